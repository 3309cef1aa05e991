"""A line to an agent: a socket that comes back by itself, and what waits to be sent.

Nobody but the line's own sender writes to the socket, so a caller that is cancelled
never leaves half a frame behind. What was not sent when a socket is lost is sent over
the next one; what was sent is for its owner to judge (`lost`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol, final

import trio
from trio_websocket import ConnectionClosed, WebSocketConnection

from culet.kernel.clock import Chance
from culet.kernel.core.job import Retry, next_try
from culet.kernel.core.limits import Limits
from culet.kernel.core.size import size_of
from culet.kernel.errors import ConnectionEnded, ConnectionLost, CuletError, UsageError

from .client_socket import Address, Ending, Tap, converse, keep


class Party(Protocol):
    """Who speaks over a line. None of these waits, but `room`."""

    def target(self, resource: str) -> str:
        """Return the raw target of the next socket: it may say what is known already."""
        ...

    def opened(self) -> None:
        """A socket is open; what is posted with `first` goes before all else."""
        ...

    def taken(self, message: str | bytes) -> None:
        """A message has come."""
        ...

    async def room(self) -> None:
        """Wait until there is room for the next message."""
        ...

    def lost(self, ending: Ending, retry_in_s: float) -> None:
        """The socket is gone; the next one comes in that time."""
        ...

    def over(self, error: CuletError | None) -> None:
        """There will be no other socket. None: we left."""
        ...


@final
class Outgoing:
    """One frame on its way: `sent` as soon as a byte of it may have left."""

    __slots__ = ("error", "gone", "sent", "text", "volatile")

    def __init__(self, text: str | bytes, volatile: bool) -> None:
        self.text = text
        self.volatile = volatile
        self.sent = False
        self.gone = trio.Event()  # written, or never to be
        self.error: CuletError | None = None

    async def written(self) -> None:
        """Wait until it is on the wire; raises `ConnectionLost`, `ConnectionEnded`."""
        await self.gone.wait()
        if self.error is not None:
            raise self.error


@final
class Line:
    """See the module. `live` is its life; `leave` ends it with a goodbye."""

    def __init__(
        self,
        party: Party,
        address: Address,
        headers: Callable[[], Awaitable[list[tuple[str, str]]]],
        limits: Limits,
        chance: Chance,
    ) -> None:
        self._party, self._address, self._headers = party, address, headers
        self._limits, self._chance = limits, chance
        self._retry = Retry(
            base_delay=limits.reconnect_base_s, max_delay=limits.reconnect_max_s
        )
        self._outbox: deque[Outgoing] = deque()
        self._more, self._space = trio.Event(), trio.Event()
        self._scope = trio.CancelScope()
        self._left = trio.Event()
        self._writing: Outgoing | None = None
        self.largest = 0  # bytes of a message that was sent over this socket
        self._opened_at: float | None = None
        self.connections = 0  # at which the agent has said who it is
        self.error: CuletError | None = None
        self.ended = False

    @property
    def is_open(self) -> bool:
        """Whether a socket is open now."""
        return self._opened_at is not None

    # ---- to send

    async def space(self) -> None:
        """Wait until the outbox has room."""
        while len(self._outbox) >= self._limits.client_outbox and not self.ended:
            await self._space.wait()

    def post(
        self, text: str | bytes, *, first: bool = False, volatile: bool = False
    ) -> Outgoing:
        """Put a frame into the outbox. Raises when the line has ended.

        `volatile`: of no use over another socket than this one.
        """
        self.check()
        item = Outgoing(text, volatile)
        if first:
            self._outbox.appendleft(item)
        else:
            self._outbox.append(item)
        self._more.set()
        return item

    def retract(self, item: Outgoing) -> bool:
        """Take a frame back; False: it was sent."""
        if item.sent or item not in self._outbox:
            return False
        self._outbox.remove(item)
        self._make_room()
        item.gone.set()
        return True

    def _make_room(self) -> None:
        """Wake all who wait for room: each looks again."""
        self._space.set()
        self._space = trio.Event()

    def check(self) -> None:
        """Raise when nothing will ever be sent or received again."""
        if self.error is not None:
            raise self.error
        if self.ended:
            raise UsageError("the connection was left")

    # ---- life

    async def live(self) -> None:
        """Connect, talk, connect again, until it is over."""
        error: CuletError | None = None
        try:
            with self._scope:
                error = await self._loop()
        finally:
            self._finish(error)

    async def _loop(self) -> CuletError | None:
        attempts = 0
        while True:
            target = self._party.target(self._address.resource)
            address = self._address._replace(resource=target)
            ending = await converse(address, self._headers, self._limits, self._talk)
            opened_at, self._opened_at = self._opened_at, None
            if self._left.is_set():
                return None
            if ending.terminal:
                return ConnectionEnded(str(ending), code=ending.code)
            if self.connections == 0:
                return ConnectionLost(str(ending), code=ending.code)
            calm = opened_at is not None and (
                trio.current_time() - opened_at >= self._limits.reconnect_calm_s
            )
            attempts = 1 if calm else attempts + 1
            wait_s = next_try(self._retry, attempts, 0, self._chance.fraction()) / 1000
            self._drop(ending)
            self._party.lost(ending, wait_s)
            await trio.sleep(wait_s)

    def leave(self) -> None:
        """End the line; a goodbye is said while `live` returns."""
        self._left.set()
        if not self.is_open:
            self._scope.cancel(reason="the connection was left")

    def _finish(self, error: CuletError | None) -> None:
        self.ended, self.error = True, error
        self._opened_at = None
        for item in [*self._outbox, *([self._writing] if self._writing else [])]:
            item.error = error or UsageError("the connection was left")
            item.gone.set()
        self._outbox.clear()
        self._make_room()
        self._party.over(error)

    def _drop(self, ending: Ending) -> None:
        """The frame that was being written may have arrived or not."""
        item, self._writing = self._writing, None
        if item is not None:
            item.error = ConnectionLost(str(ending), code=ending.code)
            item.gone.set()
        self._outbox = deque(item for item in self._outbox if not item.volatile)
        self._make_room()

    async def _talk(self, socket: WebSocketConnection, tap: Tap) -> None:
        self._opened_at, self.largest = trio.current_time(), 0
        self._party.opened()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send, socket)
            nursery.start_soon(keep, socket, tap, self._limits)
            nursery.start_soon(self._until_left, nursery.cancel_scope)
            try:
                while True:
                    await self._party.room()
                    self._party.taken(await socket.get_message())
            except ConnectionClosed:
                nursery.cancel_scope.cancel(reason="the socket was closed")

    async def _until_left(self, scope: trio.CancelScope) -> None:
        await self._left.wait()
        scope.cancel(reason="the connection was left")

    async def _send(self, socket: WebSocketConnection) -> None:
        while True:
            while self._outbox:
                item = self._outbox.popleft()
                self._make_room()
                item.sent, self._writing = True, item
                self.largest = max(self.largest, size_of(item.text))
                try:
                    await socket.send_message(item.text)
                except ConnectionClosed:
                    return  # whoever reads the rest is told as well
                self._writing = None
                item.gone.set()
            self._more = trio.Event()
            await self._more.wait()
