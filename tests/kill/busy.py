"""What is told to stop while it is busy: `culet serve kill.busy:opener` (or `:app`).

The agents of `attack.killed`, one that takes uploads and says events without an end, one
that chats, and two that do not like to stop.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import trio

from attack.killed import Box, Hub, Leaf, Middle
from culet.adapters import AIChatAgent
from culet.kernel import Agent, Request, Response, open_kernel, rpc
from culet.web import create_app

PACE_S = 0.004


class Desk(Agent):
    """Takes uploads, and says events for ever."""

    async def on_start(self) -> None:
        self.sql("CREATE TABLE IF NOT EXISTS kept (name TEXT, size INTEGER)")

    async def on_request(self, request: Request) -> Response:
        if request.path == "/fails":
            raise ValueError("no luck")
        if request.path == "/events":
            return Response(self.beats(), headers={"content-type": "text/event-stream"})
        size = 0
        async for part in request.stream():
            size += len(part)
        self.sql("INSERT INTO kept VALUES (?, ?)", request.query["name"], size)
        return Response(f"kept {size}")

    async def beats(self) -> AsyncIterator[bytes]:
        while True:
            yield b"data: beat\n\n"
            await trio.sleep(0.02)

    @rpc
    async def kept(self) -> dict[str, int]:
        return {row.name: row.size for row in self.sql("SELECT name, size FROM kept")}


class Talker(AIChatAgent):
    """Says twenty words, slowly."""

    async def on_chat_message(self, turn: Any) -> AsyncIterator[dict[str, Any]]:
        said = sum(chunk["type"] == "text-delta" for chunk in turn.chunks())
        for i in range(said, 20):
            await trio.sleep(PACE_S)
            yield {"type": "text-delta", "id": "t", "delta": f"w{i} "}


class Deaf(Agent):
    """Does not stop when it is told to: never, or only after a while."""

    async def on_start(self) -> None:
        self.sql("CREATE TABLE IF NOT EXISTS note (text TEXT)")

    @rpc
    async def stay(self, seconds: float | None) -> None:
        self.spawn(self.linger, seconds)

    async def linger(self, seconds: float | None) -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(1e9 if seconds is None else seconds)

    @rpc
    async def note(self, text: str) -> None:
        self.sql("INSERT INTO note VALUES (?)", text)

    @rpc
    async def notes(self) -> list[str]:
        return [row.text for row in self.sql("SELECT text FROM note")]


opener = partial(
    open_kernel,
    roots=[Hub, Desk, Talker, Deaf],
    facets=[Leaf, Middle, Box],
    storage=f"sqlite:{os.environ.get('BUSY_DATA', './data')}",
    abort_grace_s=float(os.environ.get("BUSY_GRACE_S", "5")),
)
app = create_app(opener)
