"""The body of an HTTP request on its way to Quart: no faster than it is read.

Quart takes what a server has as soon as it is there and keeps it until somebody reads:
an agent that reads slowly, or not at all, would hold a whole upload in memory. So where a
body goes to an agent, the next part is not asked for while enough of it lies unread; the
server stops reading then, and the client has to wait.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any, final

import trio

from culet.kernel.core.limits import Limits

from .hypercorn_inside import give_up

Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]


@final
class Intake:
    """One request's body between the server and the app. Without `bound` all passes."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._limits: Limits | None = None
        self._unread = 0
        self._over = False  # nobody will read any more
        self._room = trio.Event()
        self.dropped = False  # it was not read in time

    def bound(self, limits: Limits) -> None:
        """Keep it within bounds from now on; what was passed on before does not count."""
        if self._limits is None:
            self._limits, self._unread = limits, 0

    def read(self, size: int) -> None:
        """So many bytes were read."""
        self._unread = max(self._unread - size, 0)
        self._room.set()

    def end(self) -> None:
        """The answer is complete: what still arrives is dropped.

        Its last part cannot leave before: hypercorn then puts one more event into a
        queue that must not be full.
        """
        self._over = True
        self._room.set()

    async def receive(self) -> Event:
        """Return the next event for the app, when there is room for it."""
        limits = self._limits
        if limits is not None and not self.dropped:
            with trio.move_on_after(limits.body_wait_s) as waiting:
                while self._unread >= limits.body_unread_bytes and not self._over:
                    self._room = trio.Event()
                    await self._room.wait()
            if waiting.cancelled_caught:
                self.dropped = self._over = True
                return {"type": "http.request", "body": b"", "more_body": False}
        while True:
            event = await self._receive()
            if event["type"] != "http.request":
                return event
            if not self._over:
                self._unread += len(event.get("body", b""))
                return event

    async def abandon(self, send: Send) -> None:
        """The app failed: tell hypercorn, which may have to get rid of what it holds."""
        self.end()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._drain)
            with suppress(Exception):
                await give_up(send)
            nursery.cancel_scope.cancel(reason="the request has ended")

    async def _drain(self) -> None:
        while (await self._receive())["type"] == "http.request":
            pass
