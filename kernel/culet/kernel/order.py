"""The one order of all frames of a tree: who gives out places, and how far they may be read.

Each start and end of a run and each batch of chunks takes a place (see `core.feed`) in the
step that writes it, and the place lies in the row. What may be read is what lies up to
`reach`, the last place that is durable. What is forgotten leaves a row of `gone`, so that
a reader that was away hears of it; too many of those are trimmed, and that is told as well.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple, final

import trio

from .core import frames
from .core.feed import LIFE_BITS
from .core.path import path_text
from .core.run import AgentToolRun
from .endings import BELOW
from .errors import CapacityError
from .node import Node, ambient

if TYPE_CHECKING:
    from .tree import Tree

_TOLD_OF: Final = (  # whether the feed has shown anything of what is deleted
    f"{BELOW}SELECT 1 WHERE EXISTS (SELECT 1 FROM run WHERE owner IN"
    " (SELECT slot FROM sub)) OR EXISTS (SELECT 1 FROM run WHERE child IN"
    " (SELECT slot FROM sub)) OR EXISTS (SELECT 1 FROM gone WHERE owner IN"
    " (SELECT slot FROM sub))"
)
_INSERT_GONE: Final = (
    "INSERT INTO gone (place, owner, kind, path, run_id, parent_run_id, frame)"
    " VALUES (?, ?, ?, ?, ?, ?, ?)"
)


@final
class Order:
    """What gives out the places of one tree, and knows how far they may be read."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.closed = False
        self.floor = tree.epoch << LIFE_BITS  # `recent` knows all batches behind it
        self.last = self._reach = self.floor + 1  # `last` was given out last
        self._pending: deque[tuple[int, int]] = deque()  # (commits before it, place)
        self._recent: deque[tuple[int, str, str]] = deque()  # (place, slot, stream)
        self._news = trio.Event()
        self._waiting = 0
        self._gone: int | None = None  # rows, as far as this life knows

    # ---- giving out

    def take(self) -> int:
        """Return the next place, for what this step is about to commit."""
        self.last += 1
        self._pending.append((self.tree.store.commits, self.last))
        self.tree.barrier.after.append(self._tell)
        return self.last

    def batch(self, slot: str, stream: str) -> int:
        """Return the place of a batch of that stream."""
        place = self.take()
        self._recent.append((place, slot, stream))
        if len(self._recent) > self.tree.kernel.limits.feed_recent:
            self.floor = self._recent.popleft()[0]
        return place

    def say(self, node: Node, stream_id: str | None) -> None:
        """Store what a turn of an agent has said: what comes now comes after it.

        Not inside `transaction()`, whose rollback would take it along.
        """
        if stream_id is None or node.transaction is not None:
            return
        stream = self.tree.streams.find(node.slot, stream_id)
        if stream is not None and stream.staged:
            stream.flush()

    def say_own(self) -> None:
        """Do so for the turn whose code this is."""
        here = ambient.get()
        if here is not None and here.node.tree is self.tree:
            self.say(here.node, here.asker)

    # ---- what is gone

    def cleared(self, owner: str, run: AgentToolRun) -> None:
        """A run is forgotten; in the transaction that drops its row, before it does."""
        scope = Scope(self.tree, owner, below=False)
        facts = scope.facts(owner, run.run_id)
        if facts is not None:
            self._pass(owner, "cleared", facts, frames.cleared(run))

    def deleted(self, slot: str) -> None:
        """A subtree is marked gone; in that transaction, before its rows are dropped."""
        row = self.tree.node_row(slot)
        if row is None or row.parent is None:
            return
        db = self.tree.db
        if not db.execute(_TOLD_OF, (slot,)):
            return
        inside = "DELETE FROM gone WHERE owner IN (SELECT slot FROM sub)"
        db.execute(BELOW + inside, (slot,))
        found = db.execute("SELECT id FROM run WHERE child = ?", (slot,))
        run_id = found[0][0] if found else None
        path = self.tree.path_of(slot)
        facts = Facts(path, asked_by(self.tree, row.parent, self.last + 1), 1, None)
        self._gone = None
        self._pass(row.parent, "deleted", facts, frames.deleted(path, run_id), run_id)

    def _pass(
        self,
        owner: str,
        kind: str,
        facts: Facts,
        frame: str,
        run_id: str | None = None,
    ) -> None:
        run_id = facts.run.run_id if facts.run is not None else run_id
        row = (owner, kind, facts.path, run_id, facts.parent_run_id, frame)
        self.tree.db.execute(_INSERT_GONE, (self.take(), *row))
        if self._gone is None:
            self._gone = int(self.tree.db.execute("SELECT count(*) FROM gone")[0][0])
        else:
            self._gone += 1
        if self._gone > self.tree.kernel.limits.feed_gone:
            self._trim()

    def _trim(self) -> None:
        """Keep the newer half; the newest of the others stands for all of them."""
        db = self.tree.db
        half = self.tree.kernel.limits.feed_gone // 2
        sql = "SELECT place FROM gone ORDER BY place DESC LIMIT 1 OFFSET ?"
        found = db.execute(sql, (half,))
        self._gone = None
        if found:
            db.execute("DELETE FROM gone WHERE place < ?", found[0])
            db.execute(
                "UPDATE gone SET kind = 'trimmed', owner = ?, path = ?, run_id = NULL,"
                " parent_run_id = NULL, frame = ? WHERE place = ?",
                (
                    self.tree.root_slot, self.tree.path_of(self.tree.root_slot),
                    frames.TRIMMED, *found[0],
                ),
            )  # fmt: skip

    # ---- how far

    @property
    def reach(self) -> int:
        """The last place that is durable. All before it are."""
        durable, pending = self.tree.barrier.durable, self._pending
        # a record is made between two steps: it has all commits of one, or none
        while pending and pending[0][0] < durable:
            self._reach = pending.popleft()[1]
        return self._reach

    def _tell(self) -> None:
        """A record is durable: who waits for more looks."""
        if self.reach and self._waiting:
            self._news.set()
            self._news = trio.Event()

    def close(self) -> None:
        """The tree ends: whoever waits hears of it."""
        self.closed = True
        self._news.set()

    async def more(self, seen: int) -> None:
        """Return when a place behind `seen` may be read, or the tree ends.

        Raises `CapacityError` when as many as `limits.feed_readers` wait already.
        """
        limit = self.tree.kernel.limits.feed_readers
        if self._waiting >= limit:
            key = self.tree.key
            msg = (
                f"{limit} readers wait for the feed of {key.class_name}/{key.name} "
                f"already (limits.feed_readers = {limit}): let some go, or raise it"
            )
            raise CapacityError(msg)
        self._waiting += 1
        try:
            while self.reach <= seen and not self.closed:
                await self._news.wait()
        finally:
            self._waiting -= 1

    def since(self, place: int) -> dict[tuple[str, str], None] | None:
        """Return the streams with batches from there on; None: it is too long ago."""
        if place <= self.floor:
            return None
        out: dict[tuple[str, str], None] = {}
        for at, slot, stream in reversed(self._recent):
            if at < place:
                break
            out[slot, stream] = None
        return out


class Facts(NamedTuple):
    """What the entries of one run have in common; None: there is no run."""

    path: str
    parent_run_id: str | None
    depth: int
    run: AgentToolRun | None


def asked_by(tree: Tree, owner: str, before: int) -> str | None:
    """Return the run of an agent that asks, if it had one by then."""
    sql = "SELECT id FROM run WHERE child = ? AND place < ? ORDER BY place DESC LIMIT 1"
    rows = tree.db.execute(sql, (owner, before))
    return str(rows[0][0]) if rows else None


class Scope:
    """Whose runs are read: an agent's own, or those of all below it as well."""

    def __init__(self, tree: Tree, slot: str, *, below: bool) -> None:
        self.tree, self.slot, self.below = tree, slot, below
        self._known: dict[str, int | None] = {slot: 0}

    def depth(self, owner: str) -> int | None:
        """Return how far an agent is below the reader's; None: it is not."""
        if owner not in self._known:
            if len(self._known) >= self.tree.kernel.limits.feed_page:
                self._known = {self.slot: 0}
            self._known[owner] = self._far(owner) if self.below else None
        return self._known[owner]

    def _far(self, owner: str) -> int | None:
        here: str | None = owner
        for far in range(self.tree.kernel.limits.depth + 1):
            if here == self.slot:
                return far
            row = None if here is None else self.tree.node_row(here)
            if row is None:
                return None
            here = row.parent
        return None

    def facts(self, owner: str, run_id: str) -> Facts | None:
        """Return what is told of a run; None: it is gone."""
        tree = self.tree
        depth, run = self.depth(owner), tree.runs.get(owner, run_id)
        if depth is None or run is None:
            return None
        sql = "SELECT place FROM run WHERE owner = ? AND id = ?"
        place = int(tree.db.execute(sql, (owner, run_id))[0][0])
        step = path_text([(run.agent_type, run_id)])
        path = f"{tree.path_of(owner)}/{step}"
        return Facts(path, asked_by(tree, owner, place), depth + 1, run)
