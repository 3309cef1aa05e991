"""Bodies that an agent streams: its own code, until the last part.

Each part is made by a call inside the agent, so what ends the agent ends the body; and
it stays in memory for as long as one goes on, however slowly that is taken. A body that
only reads what is stored is no code of the agent's: see `Following`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import final

import trio

from .http import Response, closed
from .node import Ambient, Node, State, ambient


@final
class Following:
    """A body for whoever only looks on: it wakes nobody and outlives any agent's stop."""

    __slots__ = ("_parts",)

    def __init__(self, parts: AsyncIterator[bytes]) -> None:
        self._parts = parts

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        return await anext(self._parts)

    async def aclose(self) -> None:
        """End it."""
        await closed(self._parts)


def stay_inside(node: Node, ctx: Ambient, response: Response) -> Response:
    """Let a streamed body of an agent's answer run inside that agent, part by part."""
    if not isinstance(response.body, bytes | Following):
        response.body = _inside(node, ctx, response.body)
    return response


async def _inside(
    node: Node, ctx: Ambient, body: AsyncIterator[bytes]
) -> AsyncGenerator[bytes, None]:
    node.check()
    node.refs += 1
    parts = aiter(body)
    try:
        while True:
            try:
                part = await node.enter(ctx, anext, parts)
            except StopAsyncIteration:
                return
            yield part
    finally:
        try:
            await _end(node, ctx, parts)
        finally:
            node.refs -= 1
            node.used_at = trio.current_time()


async def _end(node: Node, ctx: Ambient, body: AsyncIterator[bytes]) -> None:
    """Let its clean-up run, as the agent's code; if that has ended, fenced and not for long."""
    if node.state < State.STOPPING:
        await node.enter(ctx, closed, body)
        return
    token = ambient.set(ctx)
    try:
        with trio.move_on_after(node.tree.kernel.abort_grace_s):
            await closed(body)
    finally:
        ambient.reset(token)
