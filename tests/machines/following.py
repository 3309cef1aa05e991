"""One reader of the feed of a tree that is cut, and comes back by its cursor, for ever.

It sees each stored frame exactly once and in an order that never changes: what it has
got is what a fresh reader gets up to the same place, but for what was deleted since.
"""

from __future__ import annotations

from typing import Any

from culet.kernel import FeedEntry
from culet.kernel.core.feed import Position
from culet.kernel.kernel import Kernel
from culet.kernel.tree import Tree


class Following:
    """What one reader has got over all lives of a tree."""

    def __init__(self, root: tuple[str, str]) -> None:
        self.root = root
        self.got: list[FeedEntry] = []

    async def read(self, kernel: Kernel, limit: int | None = None) -> None:
        """Go on where it was cut, and follow, until it is cut or has so many more."""
        after = self.got[-1].cursor if self.got else None
        feed = kernel.feed(*self.root, after=after, limit=limit, follow=True)
        async for entry in feed:
            self.got.append(entry)

    async def check(self, kernel: Kernel, tree: Tree) -> None:
        """Compare with what a fresh reader gets, and that with what is stored."""
        fresh = [entry async for entry in kernel.feed(*self.root)]
        places = [Position.parse(e.cursor, tree.root_slot) for e in fresh]
        assert places == sorted(set(places)), "out of order, or twice"
        stored = frames_of(tree)
        shown = {(e.path, e.sequence): e for e in fresh if e.kind in _FRAMES}
        assert len(shown) == sum(e.kind in _FRAMES for e in fresh), "one frame twice"
        missing = stored - shown.keys()
        assert not missing, f"stored, and not in the feed: {missing}"
        mine = {e.cursor: e for e in self.got}
        assert len(mine) == len(self.got), "a reader that was cut got one twice"
        if not self.got:
            return
        last = Position.parse(self.got[-1].cursor, tree.root_slot)
        past = [e for e, at in zip(fresh, places, strict=True) if at <= last]
        new = [e for e in past if e.cursor not in mine]
        assert not new, f"a reader that was cut missed {new}"
        there = {e.cursor for e in past}
        assert past == [e for e in self.got if e.cursor in there], "it changed"


_FRAMES = {"started", "chunk", "finished", "error", "aborted", "interrupted"}


def frames_of(tree: Tree) -> set[tuple[str, int]]:
    """Return path and number of each frame that the rows and files hold."""
    out: set[tuple[str, int]] = set()
    rows: list[Any] = tree.db.execute("SELECT owner, id, child, class, n FROM run")
    for owner, run_id, child, kind, n in rows:
        path = f"{tree.path_of(owner)}/{kind}/{run_id}"
        out.add((path, 0))
        if n is not None:
            out.add((path, n + 1))
        file = tree.store.agent(child)
        if file.exists:
            sql = "SELECT i FROM main.culet_entry WHERE stream = ?"
            out |= {(path, i + 1) for (i,) in file.execute(sql, (run_id,))}
    return out
