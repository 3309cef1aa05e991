"""Places among the runs of one agent: who asks for one more waits in line, or is refused.

An agent says how many of its runs may go on at once (`max_concurrent_agent_tools`, and
`run_caps` for those of a class and for detached ones) and how many callers may wait for a
place (`max_queued_agent_tools`, none by default: then one too many is refused at once).
First come, first served: a place goes to the first in line who may have it, so nobody
waits for a place that only others may take. A caller that waits has no row yet: nothing
was promised, and nothing of it is left when it goes away. All runs of a tree together
have a bound as well (`limits.runs_per_tree`).
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, final

import trio

from .core import places as core
from .core.places import Full, Want
from .node import Node

if TYPE_CHECKING:
    from .tree import Tree
    from .turn import CancelToken

_TAKEN: Final = (
    "SELECT class, detached IS NOT NULL, count(*) FROM run"
    " WHERE owner = ? AND status = 'running' GROUP BY 1, 2"
)
_OF_TREE: Final = "SELECT count(*) FROM run WHERE status = 'running'"


@dataclass(slots=True, eq=False)
class _Waiter:
    """One in line. `given`: a place is kept for it, until it wakes up and asks."""

    want: Want
    event: trio.Event = field(default_factory=trio.Event)
    given: bool = False


@final
class Places:
    """The lines of one tree, one an agent."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self._lines: dict[str, deque[_Waiter]] = {}
        self._given: Counter[tuple[str, Want]] = Counter()
        self._tree_was_full = False  # somebody was told so since the last end

    def full(self, node: Node, want: Want) -> Full | None:
        """Return the bound when no place is free for that run."""
        return self._full(node, want, self._taken(node.slot), self._in_tree())

    def _full(
        self, node: Node, want: Want, taken: Counter[Want], in_tree: int
    ) -> Full | None:
        most = self.tree.kernel.limits.runs_per_tree
        if in_tree >= most:
            self._tree_was_full = True
            text = (
                f"{most} runs are going on in this tree already "
                f"(limits.runs_per_tree = {most})"
            )
            return Full(most, text)
        agent = node.agent
        return core.full(agent.max_concurrent_agent_tools, agent.run_caps, want, taken)

    def _taken(self, owner: str) -> Counter[Want]:
        """Return how many runs of each kind go on, and how many places are kept."""
        rows = self.tree.db.execute(_TAKEN, (owner,))
        taken = Counter({Want(c, bool(d)): int(n) for c, d, n in rows})
        taken.update({w: n for (who, w), n in self._given.items() if who == owner})
        return taken

    def _in_tree(self) -> int:
        going_on = int(self.tree.db.execute(_OF_TREE)[0][0])
        return going_on + self._given.total()

    async def wait(self, node: Node, want: Want, cancel: CancelToken | None) -> None:
        """Wait while no place is free and the line has room; a token ends the wait.

        So does `run_caps.wait_s`. Whoever returns from here asks for its run before
        anything else happens.
        """
        owner = node.slot
        full = self.full(node, want)
        queued = len(self._lines.get(owner, ()))
        if (
            full is None
            or not full.bound
            or queued >= node.agent.max_queued_agent_tools
        ):
            return
        waiter = _Waiter(want)
        self._lines.setdefault(owner, deque()).append(waiter)

        def leave(_reason: str | None) -> None:
            self._drop(owner, waiter)
            waiter.event.set()

        if cancel is not None:
            cancel.on_cancel(leave)
        patience = node.agent.run_caps.wait_s
        try:
            with trio.CancelScope() as scope:
                if patience is not None:
                    scope.deadline = trio.current_time() + patience
                await waiter.event.wait()
        except BaseException:
            self._drop(owner, waiter)
            self._took(owner, waiter)
            self.freed(owner)
            raise
        finally:
            if cancel is not None:
                cancel.forget(leave)
        self._drop(owner, waiter)
        self._took(owner, waiter)

    def freed(self, owner: str) -> None:
        """Give what is free to the first in line who may have it, then to the next."""
        line = self._lines.get(owner)
        node = self.tree.nodes.get(owner)
        if not line or node is None:
            return
        taken, in_tree = self._taken(owner), self._in_tree()
        for waiter in list(line):
            if self._full(node, waiter.want, taken, in_tree) is None:
                self._drop(owner, waiter)
                waiter.given = True
                self._given[owner, waiter.want] += 1
                taken[waiter.want] += 1
                in_tree += 1
                waiter.event.set()

    def ended(self, owner: str) -> None:
        """A run of that agent has ended: what it leaves may be somebody's of the tree."""
        self.freed(owner)
        if self._tree_was_full:
            self._tree_was_full = False
            for other in list(self._lines):
                self.freed(other)

    def _drop(self, owner: str, waiter: _Waiter) -> None:
        line = self._lines.get(owner, deque())
        if waiter in line:
            line.remove(waiter)
        if not line:
            self._lines.pop(owner, None)

    def _took(self, owner: str, waiter: _Waiter) -> None:
        if waiter.given:
            self._given[owner, waiter.want] -= 1
        self._given += Counter()  # what is zero is forgotten
