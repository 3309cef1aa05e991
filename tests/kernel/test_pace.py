"""What all agents together do in one pass of the loop is bounded, and nobody is forgotten."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest
import trio

from culet.kernel import Chunk, Limits, Turn
from culet.kernel.pace import Pace
from kernel.toolkit import Kid, Top, opened, say, top

PASS_MS = 10


class Watch:
    """A stopwatch that stands still but for the work that is done."""

    def __init__(self) -> None:
        self.ms = 0.0

    def __call__(self) -> int:
        return int(self.ms * 1e6)


class Passes(trio.abc.Instrument):
    """Counts passes of the loop, beside the one that is looked at."""

    def __init__(self) -> None:
        self.now = 0

    def after_io_wait(self, timeout: float) -> None:
        """One more."""
        self.now += 1


async def play(work_ms: list[float]) -> tuple[list[int], dict[int, float]]:
    """Let so many tasks do their work; return their order, and the work of each pass."""
    watch, passes = Watch(), Passes()
    pace = Pace(Limits(pass_s=PASS_MS / 1000), watch)
    order: list[int] = []
    done: dict[int, float] = {}

    async def one(number: int, ms: float, line: trio.Nursery) -> None:
        await pace.go(line)
        order.append(number)
        done[passes.now] = done.get(passes.now, 0.0) + ms
        watch.ms += ms

    for instrument in (pace, passes):
        trio.lowlevel.add_instrument(instrument)
    async with trio.open_nursery() as line:
        for number, ms in enumerate(work_ms):
            line.start_soon(one, number, ms, line)
    for instrument in (pace, passes):
        trio.lowlevel.remove_instrument(instrument)
    return order, done


@pytest.mark.limit("pass_s")
async def test_a_pass_has_no_more_than_its_share_and_the_last_of_it() -> None:
    order, done = await play([3.0] * 200)

    assert sorted(order) == list(range(200))
    assert max(done.values()) <= PASS_MS + 3
    assert len(done) <= 200 * 3 / PASS_MS + 2  # and no less, as long as there is work


async def test_the_first_of_a_pass_goes_however_slow_the_machine_is() -> None:
    order, done = await play([1000.0] * 30)

    assert sorted(order) == list(range(30))
    assert max(done.values()) == 1000.0
    assert all(later - one <= 2 for one, later in pairwise(sorted(done)))


async def test_little_work_is_let_through_at_once() -> None:
    order, done = await play([0.1] * 50)

    assert sorted(order) == list(range(50))
    assert len(done) <= 2


async def test_who_is_cancelled_in_line_holds_up_nobody() -> None:
    watch = Watch()
    pace = Pace(Limits(pass_s=PASS_MS / 1000), watch)
    trio.lowlevel.add_instrument(pace)
    through: list[int] = []

    async def one(number: int, scope: trio.CancelScope, line: trio.Nursery) -> None:
        with scope:
            await pace.go(line)
            through.append(number)
            watch.ms += 2 * PASS_MS

    scopes = [trio.CancelScope() for _ in range(40)]
    async with trio.open_nursery() as line:
        for number, scope in enumerate(scopes):
            line.start_soon(one, number, scope, line)
        await trio.lowlevel.checkpoint()
        for scope in scopes[::2]:
            scope.cancel()
    trio.lowlevel.remove_instrument(pace)

    assert set(range(1, 40, 2)) <= set(through)


class Talker(Kid):
    """Hangs at first; goes on with a hundred words, for which it needs nobody."""

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        if turn.attempt == 1:
            await trio.sleep_forever()
        for i in range(100):
            yield say(str(i % 10))


@pytest.mark.rule("G-10", "I-45")
async def test_a_parent_answers_while_its_runs_go_on_after_a_crash() -> None:
    runs = 200
    async with opened(Talker) as test:
        me = await top(test)
        for i in range(runs):
            await me.run_agent_tool(Talker, None, run_id=f"r{i}", detached=True)
        await trio.sleep(1)
        await test.crash()
        await test.reopen()

        stub: Any = await test.kernel.get_agent(Top, "a")
        for n in range(20):  # passes, or a few more: what it takes to let a client in
            assert await stub.ping(n) == n + 1
            await trio.lowlevel.checkpoint()
        me = await top(test)
        assert len(me.runs.list(status="completed")) < runs / 2

        with trio.fail_after(30):
            while len(me.runs.list(status="completed")) < runs:
                await trio.sleep(0.1)
        assert {run.summary for run in me.runs.list()} == {"0123456789" * 10}
