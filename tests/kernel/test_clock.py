"""Wall, trio's clock and the stopwatch are three times; a test moves each by itself."""

from __future__ import annotations

import itertools

import trio
import trio.testing

from culet.kernel import Agent
from culet.kernel.clock import Chance, SystemClock
from culet.kernel.testing import EPOCH_MS, ScriptedChild, VirtualClock, open_test_kernel


async def test_the_wall_jumps_both_ways_and_nothing_else_moves(
    clock: trio.testing.MockClock,
) -> None:
    wall = VirtualClock()
    assert wall.now_ms() == EPOCH_MS
    before = trio.current_time()
    wall.jump(3600)
    assert wall.now_ms() == EPOCH_MS + 3_600_000
    wall.jump(-7200)
    assert wall.now_ms() == EPOCH_MS - 3_600_000
    assert trio.current_time() == before


async def test_time_passes_while_the_wall_stands(clock: trio.testing.MockClock) -> None:
    wall = VirtualClock()
    wall.now_ms()
    before = trio.current_time()
    await trio.sleep(5)
    wall.jump(-5)
    assert trio.current_time() == before + 5
    assert wall.now_ms() == EPOCH_MS


async def test_the_virtual_stopwatch_grows_with_each_look_whatever_the_machine_does(
    clock: trio.testing.MockClock,
) -> None:
    first, second = VirtualClock(), VirtualClock()
    looks = [first.stopwatch_ns() for _ in range(5)]
    assert looks == sorted(set(looks))
    assert looks == [second.stopwatch_ns() for _ in range(5)]
    first.jump(-3600)  # it is no wall
    assert first.stopwatch_ns() > looks[-1]


class Asker(Agent):
    """Has a run done for it."""

    async def ask(self) -> str:
        script = [["say", "a"], ["sleep", 1], ["say", "b"]]
        return (await self.run_agent_tool(ScriptedChild, script, run_id="r")).status


async def test_a_machine_that_is_slow_without_end_still_stores_what_is_said(
    clock: trio.testing.MockClock,
) -> None:
    """Each look at the stopwatch is a second later: every slice is over at once."""
    seconds = itertools.count()
    async with open_test_kernel(roots=[Asker], facets=[ScriptedChild]) as test:
        slow = lambda: next(seconds) * 10**9  # noqa: E731
        test.clock.stopwatch_ns = slow  # type: ignore[method-assign]
        asker = await test.kernel.get_agent(Asker, "a")
        with trio.fail_after(60):
            assert await asker.ask() == "completed"


def test_the_stopwatch_of_the_machine_only_grows() -> None:
    clock = SystemClock()
    looks = [clock.stopwatch_ns() for _ in range(100)]
    assert looks == sorted(looks)


def test_chance_follows_from_its_seed() -> None:
    assert Chance(1).id() == Chance(1).id() != Chance(2).id()
    assert Chance().id() != Chance().id()
    assert 0 <= Chance(1).fraction() < 1
