"""A connection as the HTTP server behind our listener gets to see it.

What a client sends goes through a `Sieve`. And hypercorn cannot bear a byte between a
WebSocket handshake and its answer: under hypercorn alone one ends the whole server. So
those bytes wait here for the answer.
"""

from __future__ import annotations

from typing import Final, final

import trio

from .heads import Sieve

HELD_BYTES: Final = 64 << 10  # behind a handshake that is not answered yet
_ACCEPTED: Final = b"HTTP/1.1 101"
_GONE: Final = (trio.BrokenResourceError, trio.ClosedResourceError)


@final
class Sieved(trio.abc.HalfCloseableStream):
    """A stream of which only what can be read in one way arrives."""

    def __init__(
        self,
        inner: trio.abc.HalfCloseableStream,
        socket: trio.socket.SocketType,
        head_bytes: int,
    ) -> None:
        self.socket = socket  # hypercorn asks it for the addresses
        self._inner = inner
        self._sieve = Sieve(head_bytes)
        self._accepted = trio.Event()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Return what the server may see next; nothing when the client sends no more."""
        sieve, passed = self._sieve, b""
        while not passed:
            if sieve.switching:
                if not await self._until_accepted():
                    return b""
                sieve.switched()
                passed = sieve.feed(b"")
                continue
            data = await self._inner.receive_some(max_bytes)
            if not data:
                return b""
            passed = sieve.feed(bytes(data))
        return passed

    async def _until_accepted(self) -> bool:
        """Wait for the answer to a handshake; False: the client did not wait for it."""
        sieve, gone = self._sieve, False
        async with trio.open_nursery() as nursery:

            async def listen() -> None:
                nonlocal gone
                while sieve.held < HELD_BYTES:  # who says more than that does not wait
                    try:
                        data = await self._inner.receive_some(HELD_BYTES)
                    except _GONE:
                        break
                    if not data:
                        break
                    sieve.feed(bytes(data))
                gone = True
                nursery.cancel_scope.cancel(reason="the client is gone")

            nursery.start_soon(listen)
            await self._accepted.wait()
            nursery.cancel_scope.cancel(reason="the handshake was answered")
        return not gone

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send what the server says."""
        await self._inner.send_all(data)
        if self._sieve.switching and bytes(data[: len(_ACCEPTED)]) == _ACCEPTED:
            self._accepted.set()

    async def wait_send_all_might_not_block(self) -> None:
        """Wait until there is room to send."""
        await self._inner.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        """Send no more."""
        await self._inner.send_eof()

    async def aclose(self) -> None:
        """Close the stream."""
        await self._inner.aclose()
