"""How much of what can wait is done in one pass of the loop, by all agents together.

trio runs every task that can run before it looks at the outside world again. After a
restart a thousand turns go on at once: each of them is quick, all of them together
would keep a new client waiting until the last one is over. So who begins or goes on
with something long asks here first. While the pass is young it is let through at once;
then it stands in line, and what fits into the next passes is let in, in order. Whoever
comes first in a pass always goes, so that a slow machine goes on, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, final

import trio

from .core.limits import Limits

_WOKEN: Final = 16  # of a line, in one pass; who then comes too late is first again


@final
class Pace(trio.abc.Instrument):
    """The turnstile of one kernel; as an instrument it sees where passes begin."""

    def __init__(self, limits: Limits, stopwatch: Callable[[], int]) -> None:
        self._pass_ns = int(limits.pass_s * 1e9)
        self._stopwatch = stopwatch
        self._passes = 1
        self._begun = 0  # the pass that `_until` is of
        self._until = 0
        self._line: deque[trio.Event] = deque()
        self._served = False  # a task is there that will look at the line

    def after_io_wait(self, timeout: float) -> None:
        """A pass begins."""
        self._passes += 1

    @property
    def spent(self) -> bool:
        """Whether this pass has no time left for what can wait."""
        if self._begun != self._passes:
            self._begun = self._passes
            self._until = self._stopwatch() + self._pass_ns
            return False
        return self._stopwatch() >= self._until

    async def go(self, nursery: trio.Nursery) -> None:
        """Return when there is time: at once, or in a later pass.

        `nursery` is the kernel's. Cancelled, the caller has lost its place.
        """
        if not self._line and not self.spent:
            return
        event = trio.Event()
        self._line.append(event)
        while True:
            if not self._served:
                self._served = True
                nursery.start_soon(self._serve)
            await event.wait()
            if not self.spent:
                return
            event = trio.Event()
            self._line.appendleft(event)

    async def _serve(self) -> None:
        """Let some of the line try, pass by pass, until nobody stands there."""
        try:
            while self._line:
                for _ in range(min(len(self._line), _WOKEN)):
                    self._line.popleft().set()
                await trio.lowlevel.checkpoint()
        finally:
            self._served = False
