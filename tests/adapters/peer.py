"""A chat client without a socket: real frames through the kernel's door, a real outbox."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import trio

from culet.kernel import Connection, Request, Response
from culet.kernel.core.path import ParsedPath, PathStep
from culet.kernel.kernel import Kernel
from culet.kernel.ports import Blob, Gate
from culet.kernel.visits import visit
from culet.web.outbox import Close, Outbox

Frame = dict[str, Any]


class Client:
    """One connection: what it got is in `frames`, decoded, in the order of arrival.

    The far end of `Connection` as the web has it: nothing arrives before it is durable,
    replay is pulled by a task of its own when there is room.
    """

    def __init__(self, gate: Gate) -> None:
        self.frames: list[Frame] = []
        self.closed: Close | None = None
        self.connection: Connection
        self._gate = gate
        self._outbox = Outbox(1 << 30)
        self._behind = trio.Event()
        self._news = trio.Event()

    # ---- the peer

    def push(self, blob: Blob, stamp: int) -> None:
        if not self._outbox.push(blob, stamp, self._gate.durable):
            self._gate.hold(self._release)
        self._land()

    def close(self, code: int, reason: str, stamp: int) -> None:
        if not self._outbox.close(Close(code, reason), stamp, self._gate.durable):
            self._gate.hold(self._release)
        self._land()

    def wake(self) -> None:
        self._behind.set()

    def _release(self, durable: int) -> None:
        if durable < 0:
            self._outbox.void()
        else:
            self._outbox.release(durable)
            if self._outbox.held:
                self._gate.hold(self._release)
        self._land()

    def _land(self) -> None:
        for blob in self._outbox.take():
            self.frames += [msgspec.json.decode(text) for text in blob.texts]
        self._outbox.landed()
        self.closed = self._outbox.closing
        news, self._news = self._news, trio.Event()
        news.set()

    async def run(self) -> None:
        """Pull what this client is behind with, until cancelled."""
        while True:
            await self._behind.wait()
            self._behind = trio.Event()
            while self.connection.behind:
                blob = self.connection.pull()
                if blob is not None:
                    self.push(blob, 0)
                await trio.lowlevel.checkpoint()

    # ---- the client

    def send(self, kind: str, **fields: Any) -> None:
        """Send one frame."""
        self.connection.received(msgspec.json.encode({"type": kind, **fields}).decode())

    def chat(
        self, request_id: str, *messages: Frame, trigger: str = "submit-message",
        **body: Any,
    ) -> None:  # fmt: skip
        """Ask for a turn."""
        inner = {"messages": list(messages), "trigger": trigger, **body}
        init = {"method": "POST", "body": msgspec.json.encode(inner).decode()}
        self.send("cf_agent_use_chat_request", id=request_id, init=init)

    async def until(self, wanted: Callable[[Client], bool]) -> None:
        """Wait until it holds of this client; half a minute of the test's clock at most."""
        with trio.fail_after(30):
            while not wanted(self):
                await self._news.wait()

    async def ended(self, request_id: str) -> Frame:
        """Wait for the terminal frame of a turn and return it."""
        await self.until(lambda c: any(f["done"] for f in c.responses(request_id)))
        return next(f for f in self.responses(request_id) if f["done"])

    def of(self, kind: str) -> list[Frame]:
        """Return the frames of a type."""
        return [f for f in self.frames if f["type"] == kind]

    def responses(self, request_id: str) -> list[Frame]:
        """Return the frames of a turn."""
        found = self.of("cf_agent_use_chat_response")
        return [f for f in found if f["id"] == request_id]

    def chunks(self, request_id: str) -> list[Frame]:
        """Return the chunks of a turn, live and replayed, in their order."""
        return [
            msgspec.json.decode(f["body"])
            for f in self.responses(request_id)
            if f["body"] and not f.get("error")
        ]

    def text(self, request_id: str) -> str:
        """Return the text of a turn as this client got it."""
        found = (c for c in self.chunks(request_id) if c["type"] == "text-delta")
        return "".join(c["delta"] for c in found)

    def leave(self) -> None:
        """Close the socket."""
        self.connection.closed(1000, "", was_clean=True)


def path_to(*steps: tuple[str, str], leaf: str = "/") -> ParsedPath:
    """Return the path of an agent, (class, name) root first."""
    root, *hops = [PathStep(*step) for step in steps]
    return ParsedPath(root, tuple(hops), leaf)


@asynccontextmanager
async def connected(
    kernel: Kernel, *steps: tuple[str, str], connection_id: str = "c"
) -> AsyncIterator[Client]:
    """Connect a client to an agent; it leaves at the end."""
    reached = await visit(kernel, path_to(*steps), Request(url="/x"))
    assert not isinstance(reached, Response), reached.status
    client = Client(reached.gate)
    client.connection = reached.connect(client, connection_id)
    await client.connection.opened()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.run)
        try:
            yield client
        finally:
            client.leave()
            nursery.cancel_scope.cancel()


async def fetch(kernel: Kernel, *steps: tuple[str, str], leaf: str) -> Response:
    """Send one GET to an agent."""
    reached = await visit(kernel, path_to(*steps, leaf=leaf), Request(url=leaf))
    assert not isinstance(reached, Response), reached.status
    return await reached.handle()


def user(message_id: str, text: str) -> Frame:
    """Return a user message."""
    part = {"type": "text", "text": text}
    return {"id": message_id, "role": "user", "parts": [part]}
