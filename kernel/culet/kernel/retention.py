"""What has ended goes after a time, where a class says so: `Agent.retention_s`.

The runs that an agent has asked for go with their facets, the turns of a chat with what
they have streamed; the messages stay. One `limit` job per agent is owed while something
of it has ended, so what it keeps goes in its sleep, and an agent that keeps nothing is
woken for nothing. A run whose end its parent has yet to hear of stays until the next look.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    from .jobs import Taken
    from .node import Node
    from .tree import Tree

RETENTION: Final = {"retention": True}  # the payload of its job
_KEY: Final = "retention"
_ARMED: Final = "SELECT 1 FROM job WHERE owner = ? AND kind = 'limit' AND key = ?"
_HEARD: Final = (
    "NOT EXISTS (SELECT 1 FROM job WHERE job.owner = run.owner AND job.what = run.id"
    " AND job.kind IN ('hook', 'deliver'))"
)
_OLD: Final = (
    "SELECT id FROM run WHERE owner = ? AND status <> 'running' AND completed_at <= ?"
    f" AND {_HEARD} ORDER BY completed_at LIMIT ?"
)
_OLDEST: Final = (
    f"SELECT min(completed_at) FROM run WHERE owner = ? AND {_HEARD}"
    " AND status <> 'running'"
)
_UNHEARD: Final = "SELECT 1 FROM run WHERE owner = ? AND status <> 'running' LIMIT 1"


@final
class Retention:
    """The looks at what one tree has kept for long enough."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree

    def _keep_ms(self, owner: str) -> int | None:
        kind = self.tree.kind_of(owner)
        keep_s = None if kind is None else kind.cls.retention_s
        return None if keep_s is None else int(keep_s * 1000)

    def arm(self, owner: str, now: int) -> None:
        """Something of that agent ends now: owe a look; inside the commit that ends it."""
        keep_ms = self._keep_ms(owner)
        if keep_ms is not None and not self.tree.db.execute(_ARMED, (owner, _KEY)):
            self._owe(owner, now + keep_ms)

    def _owe(self, owner: str, at: int) -> None:
        # no run or fiber has the empty id: nothing of theirs takes this job with it
        self.tree.jobs.add(
            owner, "limit", "", at=at, lane="limit:retention", key=_KEY,
            payload=RETENTION,
        )  # fmt: skip

    async def sweep(self, node: Node, taken: Taken) -> None:
        """Forget what is old, and owe the next look if there is anything left."""
        keep_ms = self._keep_ms(node.slot)
        if keep_ms is None:
            return  # the class keeps all of it now
        before = self.tree.now() - keep_ms
        most = self.tree.kernel.limits.sweep_runs
        old = self.tree.db.execute(_OLD, (node.slot, before, most))
        for (run_id,) in old:
            await self.tree.runs.forget(node, run_id)
        turns = node.agent._sweep(before)
        [(oldest,)] = self.tree.db.execute(_OLDEST, (node.slot,))
        left = [at for at in (oldest, turns) if at is not None]
        due = min(left) + keep_ms if left else None
        if due is None and self.tree.db.execute(_UNHEARD, (node.slot,)):
            due = self.tree.now() + keep_ms
        if self.tree.jobs.mine(taken):
            with self.tree.transaction():
                self.tree.jobs.drop("id = ?", (taken.row.id,))
                if due is not None:
                    self._owe(node.slot, due)
