"""A proxy that cuts, in front of a run and a chat that stream."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import trio

from culet.adapters import AIChatAgent
from culet.kernel import Agent, Turn, open_kernel, rpc
from culet.web import create_app, serve

GONE = (trio.BrokenResourceError, trio.ClosedResourceError, OSError)


class Talker(Agent):
    """Says numbers, as fast as they are stored, with now and then a breath."""

    async def on_turn(self, turn: Turn) -> AsyncIterator[dict[str, Any]]:
        for n in range(turn.input):
            yield {"type": "text-delta", "id": "t", "delta": f"{n} "}
            if n % 50 == 0:
                await trio.sleep(0.01)


class Desk(Agent):
    @rpc
    async def begin(self, chunks: int) -> str:
        return (
            await self.run_agent_tool(Talker, chunks, run_id="r", detached=True)
        ).status


class Bot(AIChatAgent):
    """Says as many numbers as it is asked for."""

    async def on_chat_message(self, turn: Turn) -> AsyncIterator[dict[str, Any]]:
        said = len(turn.text.split())
        if not said:
            yield {"type": "text-start", "id": "t"}
        for n in range(said, int(turn.messages[-1]["parts"][0]["text"])):
            yield {"type": "text-delta", "id": "t", "delta": f"{n} "}
            if n % 50 == 0:
                await trio.sleep(0.01)
        yield {"type": "text-end", "id": "t"}


class Cutter:
    """A proxy that lets a number of bytes through to the client, then cuts."""

    def __init__(self, target: int, port: int, chance: random.Random) -> None:
        self.target, self.port, self._chance = target, port, chance
        self.cuts, self.most = 0, 0

    async def handle(self, near: trio.SocketStream) -> None:
        left = self._chance.choice((200, 900, 2_000, 6_000)) * 2 * self._chance.random()
        far = await trio.open_tcp_stream("127.0.0.1", self.target)
        async with far, near, trio.open_nursery() as nursery:
            nursery.start_soon(self._up, near, far)
            with suppress(*GONE):
                while data := await far.receive_some(65536):
                    if self.cuts < self.most and len(data) > left:
                        await near.send_all(data[: int(left)])
                        self.cuts += 1
                        break
                    left -= len(data)
                    await near.send_all(data)
            nursery.cancel_scope.cancel()

    async def _up(self, near: trio.SocketStream, far: trio.SocketStream) -> None:
        with suppress(*GONE):
            while data := await near.receive_some(65536):
                await far.send_all(data)


@asynccontextmanager
async def cutter(seed: int, chunks: int = 0) -> AsyncIterator[Cutter]:
    """Serve a desk whose run of so many chunks has begun, and bots, behind a proxy that cuts."""
    async with (
        open_kernel(roots=[Desk, Bot], facets=[Talker], storage="memory:") as kernel,
        trio.open_nursery() as nursery,
    ):
        url = await nursery.start(
            partial(serve, create_app(kernel), bind="127.0.0.1:0")
        )
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        port = listeners[0].socket.getsockname()[1]
        made = Cutter(int(url.rpartition(":")[2]), port, random.Random(seed))
        nursery.start_soon(partial(trio.serve_listeners, made.handle, listeners))
        if chunks:
            desk = await kernel.get_agent(Desk, "d")
            await desk.begin(chunks)
        yield made
        nursery.cancel_scope.cancel()
