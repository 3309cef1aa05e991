"""One feed for a tree: all frames of all runs at and below an agent, in one order.

`Feed` is the iterator that agents and operators hold. It ends, waits for more or goes on
in the next life of the tree; `feedreader` reads, `order` says what there is to read.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Self, final

import trio

from .core.feed import BEGINNING, Position, end_of
from .errors import Fenced, UsageError
from .feedreader import FeedEntry, Reader
from .node import Node
from .ports import TreeKey

if TYPE_CHECKING:
    from .kernel import Kernel
    from .tree import Tree


@final
class Feed:
    """An async iterator of `FeedEntry`; made by `runs.feed` and `kernel.feed`.

    It holds nothing between two entries: leave it where you like. A cancelled wait loses
    nothing, the iterator can be asked again. `cursor` is that of the last entry that it
    gave, or what it began with. One task at a time.
    """

    def __init__(
        self,
        enter: Callable[[], Awaitable[tuple[Tree, str]]],
        after: str | None,
        *,
        limit: int | None,
        below: bool,
        follow: bool,
        outside: bool,
    ) -> None:
        if limit is not None and limit < 1:
            msg = f"limit is at least 1, not {limit!r}"
            raise UsageError(msg)
        self.cursor = after
        self._enter, self._left = enter, limit
        self._below, self._follow, self._outside = below, follow, outside
        self._reader: Reader | None = None
        self._page: list[FeedEntry] = []
        self._until: int | None = None  # of one that does not follow
        self._busy = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> FeedEntry:
        """Return the next entry. Raises what its agent or tree has ended with."""
        if self._busy:
            msg = "one task at a time reads a feed"
            raise UsageError(msg)
        if self._left == 0:
            raise StopAsyncIteration
        if self._page:
            await trio.lowlevel.checkpoint_if_cancelled()
        else:
            self._busy = True
            try:
                await self._fill()
            finally:
                self._busy = False
        if not self._page:
            raise StopAsyncIteration
        entry = self._page.pop()
        self.cursor = entry.cursor
        if self._left is not None:
            self._left -= 1
        return entry

    async def _fill(self) -> None:
        while not self._page:
            await trio.lowlevel.checkpoint()  # a tree that is fenced is about to go
            tree, slot = await self._enter()
            try:
                with tree.visitor() if self._outside else nullcontext():
                    if not await self._read(tree, slot):
                        return
            except Fenced:
                if not self._outside:
                    raise  # and its agent ends
            if self._outside and tree.kernel.closing:
                return

    async def _read(self, tree: Tree, slot: str) -> bool:
        """Read a page; False: there is no more. Without one the tree has ended."""
        reader = self._reader
        if reader is None or reader.tree is not tree:
            at = BEGINNING
            if self.cursor is not None:
                at = position(tree, self.cursor)
            reader = self._reader = Reader(tree, slot, at, below=self._below)
            self._until = None
        if not self._follow and self._until is None:
            await tree.durable()
            self._until = tree.order.reach
        while not tree.closed:
            reach = tree.order.reach if self._until is None else self._until
            self._page = (await reader.page(reach))[::-1]
            if self._page:
                return True
            if not self._follow:
                return False
            await tree.order.more(reader.at.place)
        return True


def position(tree: Tree, cursor: str) -> Position:
    """Return where a cursor lies in that tree; raises `UsageError`.

    One that is ahead of the tree comes from a life that this folder has not had.
    """
    at = Position.parse(cursor, tree.root_slot)
    if at.place > tree.order.reach:
        msg = f"cursor {cursor!r} is ahead of what the tree has: is it another copy?"
        raise UsageError(msg)
    return at


def of_agent(
    node: Node, after: str | None, *, limit: int | None, below: bool, follow: bool
) -> Feed:
    """Return the feed of an agent, for its own code."""
    node.check()
    if after is not None:
        position(node.tree, after)

    async def enter() -> tuple[Tree, str]:
        node.check()
        return node.tree, node.slot

    return Feed(enter, after, limit=limit, below=below, follow=follow, outside=False)


def of_root(
    kernel: Kernel,
    key: TreeKey,
    after: str | None,
    *,
    limit: int | None,
    below: bool,
    follow: bool,
) -> Feed:
    """Return the feed of a root, from outside; it goes on over restarts of its tree."""

    async def enter() -> tuple[Tree, str]:
        tree = await kernel.host.open_root(key, create=False)
        return tree, tree.root_slot

    return Feed(enter, after, limit=limit, below=below, follow=follow, outside=True)


async def cursor_now(tree: Tree) -> str:
    """Return the cursor behind all that was committed so far, when it is durable."""
    await tree.durable()
    return end_of(tree.order.reach).text(tree.root_slot)
