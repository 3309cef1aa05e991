"""Time that a test moves by hand, and clients of few words, against a real server.

Nothing jumps by itself: a real socket has time to carry what was sent, however busy the
machine is, and what happens at a bound happens because the test went there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import trio
import trio.testing
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.protocol import OPEN
from websockets.uri import parse_uri

from web.serving import Server

LOOKS = 2_000  # at what is waited for, of some milliseconds each


async def still() -> None:
    """Let everything that can happen now happen."""
    for _ in range(3):
        await trio.testing.wait_all_tasks_blocked(0.004)


async def until(met: Callable[[], object], what: str = "") -> None:
    """Wait, in no time, for what must happen without any."""
    for _ in range(LOOKS):
        if met():
            return
        await trio.testing.wait_all_tasks_blocked(0.003)
    raise AssertionError(what or "it did not happen")


async def pass_time(
    clock: trio.testing.MockClock, seconds: float, steps: int = 8
) -> None:
    """Let time pass in steps, everything keeping up."""
    for _ in range(steps):
        clock.jump(seconds / steps)
        await still()


def sockets(server: Server) -> int:
    return sum(tree.sockets.count for tree in server.kernel.trees.values())


class Peer:
    """A TCP client that keeps what it hears."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.heard = b""
        self.ended = False

    async def listen(self, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        """Read to the end."""
        task_status.started()
        try:
            while data := await self.stream.receive_some(1 << 16):
                await self.say(self.take(data))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        self.ended = True

    def take(self, data: bytes) -> bytes:
        """Return what to answer at once."""
        self.heard += data
        return b""

    async def say(self, data: bytes) -> None:
        """Send, if there is still somebody."""
        try:
            await self.stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.ended = True

    @property
    def status(self) -> int | None:
        """The status of the first answer."""
        words = self.heard.split(b" ", 2)
        return int(words[1]) if len(words) > 2 else None


class SocketPeer(Peer):
    """A WebSocket client. `answers`: pings and closes, as a protocol of its own would."""

    answers = False

    def __init__(self, stream: trio.SocketStream) -> None:
        super().__init__(stream)
        self.protocol: ClientProtocol | None = None
        self.opcodes: list[Opcode] = []
        self.texts: list[str] = []
        self.pongs: list[bytes] = []

    def take(self, data: bytes) -> bytes:
        if self.protocol is None:
            self.heard += data
            head, end, rest = self.heard.partition(b"\r\n\r\n")
            if not end:
                return b""
            assert head.startswith(b"HTTP/1.1 101"), head
            self.protocol = ClientProtocol(parse_uri("ws://x/"), state=OPEN)
            data = rest
        self.protocol.receive_data(data)
        for event in self.protocol.events_received():
            assert isinstance(event, Frame)
            self.opcodes.append(event.opcode)
            if event.opcode is Opcode.TEXT:
                self.texts.append(bytes(event.data).decode())
            elif event.opcode is Opcode.PONG:
                self.pongs.append(bytes(event.data))
        answer = b"".join(self.protocol.data_to_send())
        return answer if self.answers else b""

    @property
    def pings(self) -> int:
        return self.opcodes.count(Opcode.PING)

    @property
    def close_code(self) -> int | None:
        """The code of the close frame that came, if one did."""
        said = self.protocol.close_rcvd if self.protocol else None
        return None if said is None else said.code


class Polite(SocketPeer):
    """One that answers."""

    answers = True


@asynccontextmanager
async def peer(
    server: Server,
    first: bytes = b"",
    *,
    kind: type[Peer] = Peer,
    address: str | None = None,
    deaf: int = 0,
) -> AsyncIterator[Any]:
    """Connect, send `first` and listen. `deaf`: not so, with such a receive buffer."""
    raw = trio.socket.socket()
    if deaf:
        raw.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_RCVBUF, deaf)
    if address is not None:
        await raw.bind((address, 0))
    await raw.connect(("127.0.0.1", server.port))
    stream = trio.SocketStream(raw)
    try:
        async with trio.open_nursery() as nursery:
            client = kind(stream)
            await client.say(first)
            if not deaf:
                await nursery.start(client.listen)
            yield client
            nursery.cancel_scope.cancel()
    finally:
        await trio.aclose_forcefully(stream)
