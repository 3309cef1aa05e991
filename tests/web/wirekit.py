"""Agents for the tests of the wire, and how they are served."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import trio
from quart_trio import QuartTrio

from culet.adapters import AIChatAgent
from culet.kernel import (
    Agent,
    Chunk,
    ConnectContext,
    Connection,
    Kernel,
    Limits,
    Request,
    Response,
    Turn,
    current_agent,
    open_kernel,
    rpc,
)
from culet.web import create_app
from web import serving as here
from web.serving import RUNNERS, Server, Writer

Came = tuple[str, str, str, dict[str, str]]


class Note(AIChatAgent):
    """A chat below a desk."""


class Desk(Agent):
    """Does what its clients and their queries say."""

    initial_state: ClassVar[Any] = {"n": 0}
    came: ClassVar[list[Came]] = []  # label, path, rest, query of each that connected
    gate: ClassVar[trio.Event]

    async def on_connect(self, connection: Connection, ctx: ConnectContext) -> None:
        asked = ctx.request
        self.came.append((connection.id, asked.raw_path, ctx.path, asked.query))
        if "welcome" in asked.query:
            connection.send("welcome")

    async def on_message(self, connection: Connection, message: str | bytes) -> None:
        connection.send(message)

    async def on_request(self, request: Request) -> Response:
        if request.path == "/missing":
            return await super().on_request(request)
        return Response(f"{request.method} {self.name} {request.path}")

    def should_connection_be_readonly(
        self, connection: Connection, ctx: ConnectContext
    ) -> bool:
        return "readonly" in ctx.request.query

    def should_send_protocol_messages(
        self, connection: Connection, ctx: ConnectContext
    ) -> bool:
        return "raw" not in ctx.request.query

    @rpc
    async def ping(self, text: str) -> str:
        return text

    @rpc
    async def labels(self) -> list[str]:
        return [connection.id for connection in self.sockets.list()]

    @rpc
    async def tell(self, text: str) -> None:
        self.broadcast(text)

    @rpc
    async def hang_up(self, code: int, reason: str = "") -> None:
        caller = current_agent()
        assert caller is not None
        assert caller.connection is not None
        caller.connection.close(code, reason)

    @rpc
    async def wait(self) -> None:
        await self.gate.wait()

    @rpc
    async def let_go(self) -> None:
        self.gate.set()

    @rpc
    async def write(self, run_id: str, k: int) -> str:
        return (await self.run_agent_tool(Writer, {"k": k}, run_id=run_id)).status

    @rpc
    async def make(self, name: str) -> None:
        await self.dynamic_agents.get(Note, name)


class Bare(Agent):
    """Nothing of its own: no state, no hooks."""

    @rpc
    async def ping(self, text: str) -> str:
        return text


class Quiet(Bare):
    """Does not say who it is."""

    send_identity_on_connect = False
    initial_state: ClassVar[Any] = {"n": 0}


class Sleeper(Bare):
    """Starts when it is let, and greets when it is let."""

    may_start: ClassVar[trio.Event]
    may_greet: ClassVar[trio.Event]

    async def on_start(self) -> None:
        await self.may_start.wait()

    async def on_connect(self, connection: Connection, ctx: ConnectContext) -> None:
        await self.may_greet.wait()
        connection.send('{"type": "greeting"}')


class Speaker(AIChatAgent):
    """Says three words."""

    def should_send_protocol_messages(
        self, connection: Connection, ctx: ConnectContext
    ) -> bool:
        return "raw" not in ctx.request.query

    async def on_chat_message(self, turn: Turn) -> AsyncIterator[Chunk]:
        yield {"type": "text-start", "id": "t"}
        for word in ("one ", "two ", "three"):
            yield {"type": "text-delta", "id": "t", "delta": word}
        yield {"type": "data-lines", "data": "a\nb"}
        yield {"type": "data-body", "data": dict(turn.body)}
        yield {"type": "text-end", "id": "t"}


class Wired(Server):
    """A server, and the app that it serves."""

    def __init__(self, url: str, kernel: Kernel, app: QuartTrio) -> None:
        super().__init__(url, kernel)
        self.app = app


ROOTS = [Desk, Bare, Quiet, Sleeper, Speaker]


@asynccontextmanager
async def wired(
    *, app: QuartTrio | None = None, limits: Limits | None = None, **options: Any
) -> AsyncIterator[Wired]:
    """Serve them on a free port, by the transport of the fixture."""
    Desk.came.clear()
    Desk.gate = trio.Event()
    Sleeper.may_start, Sleeper.may_greet = trio.Event(), trio.Event()
    async with (
        open_kernel(
            roots=ROOTS, facets=[Note, Writer], storage="memory:", limits=limits
        ) as kernel,
        trio.open_nursery() as nursery,
    ):
        run = RUNNERS[here.transport_of_tests]
        app = app or create_app(kernel, **options)
        yield Wired(await nursery.start(run, app), kernel, app)
        Sleeper.may_start.set()
        Sleeper.may_greet.set()
        nursery.cancel_scope.cancel()


def question(text: str, message_id: str = "u1") -> dict[str, Any]:
    """Return a user message."""
    part = {"type": "text", "text": text}
    return {"id": message_id, "role": "user", "parts": [part]}
