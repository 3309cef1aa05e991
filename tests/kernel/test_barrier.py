"""When records are made: how long what is said waits for one."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import MockClock

from culet.kernel import Limits
from culet.kernel.barrier import Barrier

LINGER = Limits().linger_s


class Disk:
    """A store whose records take time; something is committed while the first is made."""

    inline, dirty, crowded, commits = True, True, False, 0

    def __init__(self, clock: MockClock, takes_s: float) -> None:
        self.clock, self.takes_s = clock, takes_s
        self.began: list[float] = []
        self.barrier: Any = None

    def begin(self) -> None:
        self.began.append(trio.current_time())

    def fill(self, _record: Any, _until: int, _stopwatch: Any) -> bool:
        return True

    def write(self, _record: Any) -> None:
        if len(self.began) == 1:
            self.barrier.touched()
        self.clock.jump(self.takes_s)

    def done(self, _record: Any, _stopwatch: Any) -> int:
        return 1

    def janitor(self) -> list[Any]:
        return []


@pytest.mark.rule("G-14")
@pytest.mark.parametrize("takes_s", [LINGER / 5, LINGER * 3])
async def test_what_is_said_while_a_record_is_made_waits_from_then_on(
    takes_s: float, clock: MockClock
) -> None:
    disk = Disk(clock, takes_s)
    store: Any = disk
    barrier = Barrier(store, Limits(), None, None, print, lambda: 0)
    disk.barrier = barrier
    async with trio.open_nursery() as nursery:
        nursery.start_soon(barrier.run)
        barrier.touched()
        await trio.sleep(10 * LINGER)
        nursery.cancel_scope.cancel()
    first, second = disk.began
    assert second - first == pytest.approx(max(LINGER, takes_s))
