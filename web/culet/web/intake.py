"""The body of an HTTP request on its way to Quart: no faster than it is read.

Quart takes what a server has as soon as it is there and keeps it until somebody reads:
an agent that reads slowly, or not at all, would hold a whole upload in memory. So where a
body goes to an agent, the next part is not asked for while enough of it lies unread; the
server stops reading then, and the client has to wait. A client that sends too slowly is
not waited for: it may be behind the pace for a while, in all, however it spreads that.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import final

import trio

from culet.kernel.core.limits import Limits

from .hypercorn_inside import give_up
from .scopes import Event, Receive, Send


@final
class Intake:
    """One request's body between the server and the app. Without `bound` all passes."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._limits: Limits | None = None
        self._unread = 0
        self._over = False  # nobody will read any more
        self._room = trio.Event()
        self._whole = False  # all of it has come
        self._patience_s = math.inf  # with the client, as long as it sends nothing
        self._waiting = trio.CancelScope()  # for the client
        self._since = trio.current_time()  # it waits, or would
        self.dropped = ""  # why the rest of it is not there

    def bound(self, limits: Limits) -> None:
        """Keep it within bounds from now on; what was passed on before does not count."""
        if self._limits is None:
            self._limits, self._unread = limits, 0
            self._patience_s = limits.body_late_s
            if not self._whole:
                self._since = trio.current_time()
                self._waiting.deadline = self._since + self._patience_s

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
                return self._drop("was not read in time")
        while True:
            event = await self._next()
            if event is None:
                return self._drop("came too slowly")
            if event["type"] != "http.request":
                return event
            if not self._over:
                self._unread += len(event.get("body", b""))
                return event

    async def _next(self) -> Event | None:
        """Return what comes next; None when the client was too slow with it."""
        if self._whole or self.dropped:
            return await self._receive()  # nothing but the end of the connection
        self._since = trio.current_time()
        deadline = self._since + self._patience_s
        with trio.CancelScope(deadline=deadline) as self._waiting:
            event = await self._receive()
        if self._waiting.cancelled_caught:
            return None
        self._whole = event["type"] != "http.request" or not event.get("more_body")
        if self._limits is not None:
            waited = trio.current_time() - self._since
            sent = len(event.get("body", b"")) / self._limits.body_pace
            most = self._limits.body_late_s
            self._patience_s = min(self._patience_s - waited + sent, most)
        return event

    def _drop(self, why: str) -> Event:
        self.dropped, self._over = why, True
        return {"type": "http.request", "body": b"", "more_body": False}

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
