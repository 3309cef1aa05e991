"""What an agent owes itself is called: never early by the wall clock, never lost once it
was durable, never in a burst for the ticks that were missed.

Schedules come and go, time passes, the wall clock jumps both ways as a suspended or
corrected machine's does, lives end anywhere. The model is a sorted list. (The module is
not called `time`: the standard library has one.)
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, ClassVar, NamedTuple

import trio
import trio.testing
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from culet.kernel import Agent, Schedule
from culet.kernel.errors import ChildDidNotStop
from culet.kernel.testing import VirtualClock, open_test_kernel
from machines.guest import TrioMachine
from machines.sometimes import Sometimes

LATE_MS = 70_000  # a wall clock that jumps is looked at once a minute


class Fire(NamedTuple):
    """One call, as the agent saw it."""

    id: str
    at: int
    now: int


class Owed(NamedTuple):
    """One schedule of the model."""

    at: int
    every_s: float | None


class Sleeper(Agent):
    """Owes itself calls."""

    clock: ClassVar[VirtualClock]
    fires: ClassVar[list[Fire]]

    async def once(self, seconds: float) -> tuple[str, int]:
        made = await self.schedule(seconds, "fire")
        return made.id, made.at

    async def again(self, seconds: float, label: int) -> tuple[str, int]:
        made = await self.schedule_every(seconds, "fire", label)
        return made.id, made.at

    async def off(self, schedule_id: str) -> bool:
        return self.schedules.cancel(schedule_id)

    async def listed(self) -> list[tuple[int, str]]:
        return [(s.due_at, s.id) for s in self.schedules.list()]

    async def fire(self, payload: Any, schedule: Schedule) -> None:
        self.fires.append(Fire(schedule.id, schedule.at, self.clock.now_ms()))


class TimeMachine(TrioMachine):
    """See the module's text."""

    sometimes: ClassVar = Sometimes(
        "fired once", "ticked", "missed ticks", "cancelled", "cancelled too late",
        "jumped forward", "jumped back", "crashed", "late",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        Sleeper.fires = []
        self.owed: dict[str, Owed] = {}
        self.durable: set[str] = set()
        self.ever: list[str] = []
        self.called: set[str] = set()  # of those that are owed once
        self.repeats: set[str] = set()  # may be called again: it was not booked
        self.seen = 0
        self.last: dict[str, Fire] = {}
        self.label = 0
        self.over = trio.Event()
        self.do(self._open)

    async def _open(self) -> None:
        opened = trio.Event()

        async def keep() -> None:
            with suppress(ChildDidNotStop):
                async with open_test_kernel(roots=[Sleeper]) as self.test:
                    Sleeper.clock = self.test.clock
                    opened.set()
                    await self.over.wait()

        self.nursery.start_soon(keep)
        await opened.wait()
        await self._ask("listed")
        await self._make_durable()

    async def _ask(self, method: str, *args: Any) -> Any:
        root = await self.test.kernel.get_agent(Sleeper, "s")
        return await getattr(root, method)(*args)

    async def _make_durable(self) -> None:
        tree = self.test.tree("Sleeper", "s")
        assert tree is not None
        await tree.durable()

    def _pass(self, seconds: float) -> None:
        """Let time pass, in steps of a quarter of a minute."""

        async def steps() -> None:
            left = seconds
            while left > 0:
                self.clock.jump(min(left, 15.0))
                left -= 15.0
                await trio.testing.wait_all_tasks_blocked()

        self.do(steps)

    # ---- rules

    @rule(seconds=st.sampled_from([0, 0.5, 3, 59, 61, 600]))
    def once(self, seconds: float) -> None:
        made, at = self.do(self._ask, "once", seconds)
        self.owed[made] = Owed(at, None)
        self.ever.append(made)
        self._settle()

    @rule(seconds=st.sampled_from([1, 7, 60]))
    def every(self, seconds: float) -> None:
        self.label += 1
        made, at = self.do(self._ask, "again", seconds, self.label)
        self.owed[made] = Owed(at, seconds)
        self.ever.append(made)
        self._settle()

    @rule(which=st.integers(0, 20))
    @precondition(lambda self: self.ever)
    def cancel(self, which: int) -> None:
        """From now on it does not fire."""
        made = self.ever[-1 - which % len(self.ever)]
        there = self.do(self._ask, "off", made)
        self._look()
        self.sometimes.hit("cancelled" if there else "cancelled too late")
        assert there == (made in self.owed)
        self.owed.pop(made, None)
        self.durable.discard(made)
        self.do(self._make_durable)  # or a crash would bring it back, rightly
        self._settle()

    @rule()
    def keep(self) -> None:
        """What is owed now is owed for good."""
        self.do(self._make_durable)
        self.durable = set(self.owed)

    @rule(seconds=st.sampled_from([0.3, 1, 5, 30]))
    def advance(self, seconds: float) -> None:
        self._pass(seconds)
        self._look()
        self._nothing_is_overdue(0)

    @rule(seconds=st.sampled_from([-500.0, -3.0, 2.0, 100.0, 5000.0]))
    def jump(self, seconds: float) -> None:
        """The wall clock is set; the kernel notices within a minute."""

        async def move() -> None:
            self.test.clock.jump(seconds)

        self.do(move)
        self.sometimes.hit("jumped back" if seconds < 0 else "jumped forward")
        self._look()
        self._pass(LATE_MS / 1000)
        self._look()
        self._nothing_is_overdue(0)

    @rule(away=st.sampled_from([0, 0.5, 200.0]))
    def crash(self, away: float) -> None:
        """Die, be away for a while, live again."""

        async def die() -> None:
            await self.test.crash()
            self.test.clock.jump(away)
            await self.test.reopen()
            await self._ask("listed")

        self._look()
        self.do(die)
        self.sometimes.hit("crashed")
        self.last.clear()  # a call that was not booked is made again
        self.repeats = set(self.called)
        self._settle()
        there = {made for _due, made in self.do(self._ask, "listed")}
        lost = self.owed.keys() - there
        for made in sorted(lost):
            fired = any(fire.id == made for fire in Sleeper.fires)
            assert fired or made not in self.durable, f"lost: {made}"
            del self.owed[made]
        for made in there - self.owed.keys():  # fired, and not booked
            assert made in self.repeats, f"back: {made}"
            self.owed[made] = Owed(0, None)

    # ---- what must hold

    def _settle(self) -> None:
        self.do(trio.testing.wait_all_tasks_blocked)
        self._look()

    def _look(self) -> None:
        """Take what fired since the last look off the list."""
        fires, self.seen = Sleeper.fires[self.seen :], len(Sleeper.fires)
        for fire in fires:
            assert fire.now >= fire.at, f"early: {fire}"
            if fire.id not in self.owed:
                assert fire.id in self.repeats, f"nobody owes it: {fire}"
                self.repeats.discard(fire.id)
                continue
            owed, last = self.owed[fire.id], self.last.get(fire.id)
            self.sometimes.hit("late", fire.now - fire.at > 1000)
            if owed.every_s is None:
                self.sometimes.hit("fired once")
                del self.owed[fire.id]
                self.durable.discard(fire.id)
                self.called.add(fire.id)
                continue
            self.sometimes.hit("ticked")
            if last is not None:
                step = round(owed.every_s * 1000)
                assert (fire.at - last.at) % step == 0, f"it drifts: {last} {fire}"
                assert fire.at > last.at, f"one tick twice: {last} {fire}"
                assert fire.at > last.now, f"a burst: {last} {fire}"
                self.sometimes.hit("missed ticks", fire.at - last.at > step)
            self.last[fire.id] = fire

    def _nothing_is_overdue(self, grace_ms: int) -> None:
        listed = self.do(self._ask, "listed")
        assert listed == sorted(listed, key=lambda one: (one[0], int(one[1])))
        assert {made for _due, made in listed} == self.owed.keys()
        now = self.test.clock.now_ms()
        assert all(due + grace_ms > now for due, _made in listed), (listed, now)

    def _longest_s(self) -> float:
        """Seconds to what is due last: a clock that was put back makes it far."""
        now = self.test.clock.now_ms()
        dues = [due - now for due, _made in self.do(self._ask, "listed")]
        return max([0, *dues]) / 1000

    def teardown(self) -> None:
        """In the end all that was owed once has been called."""
        try:
            if self._end is None:
                self._pass(self._longest_s() + 900)
                self._look()
                once = [
                    made for made, owed in self.owed.items() if owed.every_s is None
                ]
                assert not once, f"never called: {once}"
        finally:
            if self._end is None:

                async def close() -> None:
                    self.over.set()

                self.do(close)
            super().teardown()
