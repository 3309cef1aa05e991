"""One stream for a reader at his own pace: what is stored, then what comes, to its end.

A reader is woken, never fed: each time he reads the next page of the stored stream, behind
what he has. So a slow one costs a page of memory, and nobody waits for him.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, final

import trio

from .streams import Stream, View

if TYPE_CHECKING:
    from .tree import Tree


@final
class _Bell:
    """The one peer of a reader's view: it hears that there is more, and keeps nothing."""

    def __init__(self) -> None:
        self.rung = trio.Event()

    def push(self, _blob: Any, _stamp: int) -> None:
        self.rung.set()

    async def wait(self, at_most_s: float) -> bool:
        """Wait until it rings; False when it did not."""
        with trio.move_on_after(at_most_s):
            await self.rung.wait()
        heard, self.rung = self.rung.is_set(), trio.Event()
        return heard


async def follow(
    tree: Tree, slot: str, stream_id: str, view: View, *, beat_s: float
) -> AsyncIterator[list[str]]:
    """Yield pages of a stream's frames as `view` shows them, up to its end.

    Yields an empty page after `beat_s` without one, so that a reader can be told that it
    goes on. Ends without the end when the tree is closed. Only what is published.
    """
    bell = _Bell()
    limit = tree.kernel.limits.replay_page_bytes
    after, stream = -1, None
    try:
        while not tree.closed:
            end = None
            stream = tree.streams.find(slot, stream_id)
            if stream is None:
                end = tree.end_of(slot, stream_id)
            if end is not None:
                stream = Stream(tree, slot, stream_id, fresh=True)
                stream.published = end.n + 1
            elif stream is None:
                stream = tree.streams.open(slot, stream_id)
            if end is None and view not in stream.views:
                stream.views.append(view)
            view.peers[bell] = None  # type: ignore[index]  # all that a view asks of it
            texts, after, all_of_it = stream.page(view, after, limit)
            if all_of_it and end is not None:
                yield texts + view.ended(end, replay=False)
                return
            if texts:
                yield texts
            elif not await bell.wait(beat_s):
                yield []
    finally:
        view.peers.clear()
        if stream is not None and view in stream.views:
            stream.views.remove(view)
