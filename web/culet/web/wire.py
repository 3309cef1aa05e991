"""What the connections of one server share: when they are written to, and the clock.

An agent's task never touches a socket: what it pushes makes the connection *dirty*, and
the `Wire`, one for all connections, gives each dirty one a single non-blocking write at
the end of the pass of the loop. One task looks after time: pings, idle and slow clients.
So nothing here costs a task, an event or a timer per frame.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

import trio

from culet.kernel.core.limits import Limits

if TYPE_CHECKING:
    from .transport import Link

FEW: Final = 8  # dirty connections that are written to at the end of a pass


def _nothing() -> None:
    """What it takes to have the loop look at its tasks once more."""


@final
class Wire(trio.abc.Instrument):
    """What the connections of one server share: the flush, the clock, the counts.

    A few dirty connections are written to where the pass ends, by the loop itself: a task
    that was woken for it would write a whole pass later. A crowd is the task's work, in
    slices.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.links: dict[Link, None] = {}
        self.cuts = 0
        self._dirty: dict[Link, None] = {}
        self._replays: dict[Link, None] = {}
        self._flushing = False
        self._any = trio.Event()

    def ready(self, link: Link) -> None:
        """There is something to write to this connection. Never blocks."""
        self._dirty[link] = None

    def behind(self, link: Link) -> None:
        """There is replay to read for this connection, and room for it."""
        self._replays[link] = None

    def before_io_wait(self, timeout: float) -> None:
        """Write what the pass has pushed; trio calls this when all tasks have run.

        The time that it will wait is settled by now, so whoever is woken here needs one
        more nudge.
        """
        if self._flushing:
            return
        if 0 < len(self._dirty) <= FEW:
            self._few()
        if (self._dirty or self._replays) and not self._any.is_set():
            self._any.set()
            trio.lowlevel.current_trio_token().run_sync_soon(_nothing)

    def _few(self) -> None:
        dirty, self._dirty = self._dirty, {}
        for link in dirty:
            if not link.flush_now():
                self._dirty[link] = None

    async def flush(self) -> None:
        """Write to whoever has something: once for all that a pass has pushed.

        What was pushed goes first. Replay is read page by page, in turn, in what is left
        of a slice of time: no crowd that comes back delays those who are here.
        """
        trio.lowlevel.add_instrument(self)
        try:
            while True:
                await self._any.wait()
                self._any = trio.Event()
                self._flushing = True
                while self._dirty or self._replays:
                    await self._turn()
                self._flushing = False
        finally:
            trio.lowlevel.remove_instrument(self)

    async def _turn(self) -> None:
        until = trio.current_time() + self.limits.slice_s
        dirty, self._dirty = self._dirty, {}
        for link in dirty:
            link.flush()
            if trio.current_time() > until:
                await trio.lowlevel.checkpoint()
                until = trio.current_time() + self.limits.slice_s
        while self._replays:  # one at least, or they would never come on
            link = next(iter(self._replays))
            del self._replays[link]
            link.flush(pull=True)
            if trio.current_time() > until:
                break
        await trio.lowlevel.checkpoint()

    async def keep(self) -> None:
        """Ping the quiet, cut the idle, the slow and those that will not close."""
        limits = self.limits
        bounds = (limits.ping_s, limits.idle_s, limits.slow_client_s)
        pace = min(*bounds, limits.handshake_s, 4.0) / 4
        while True:
            await trio.sleep(pace)
            now = trio.current_time()
            for number, link in enumerate(list(self.links), 1):
                link.look(now)
                if number % limits.wake_slice == 0:
                    await trio.lowlevel.checkpoint()

    def close_all(self, code: int, reason: str) -> None:
        """Say goodbye to everybody: the server stops."""
        for link in list(self.links):
            link.end(code, reason)
