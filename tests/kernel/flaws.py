"""Small histories of flaws that the first kernel had and that need agents of their own.

Each is a coroutine function that runs under a mock clock and raises `AssertionError`
where the flaw is back. `test_mini.py` runs them as they are, and once more with the fix
taken away.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio

from culet.kernel import (
    Agent,
    Chunk,
    FiberRecovery,
    FiberResolution,
    Retry,
    Schedule,
    Turn,
)
from culet.kernel.errors import ChildDidNotStop, CuletError, StorageFull
from culet.kernel.streams import Cursor
from culet.kernel.testing import Harness, ScriptedChild, open_test_kernel
from kernel.agents import agent_at, rows, settle, tree_of

FIRED: list[tuple[float, str]] = []
TEN = Retry(max_attempts=3, base_delay=10, max_delay=10)


class Child(ScriptedChild):
    """Does what it is told."""


class Kid(Agent):
    """Whose start takes back what it owes, once it has been told to."""

    tired = False

    async def on_start(self) -> None:
        for schedule in self.schedules.list() if Kid.tired else ():
            self.schedules.cancel(schedule.id)

    async def later(self, seconds: float) -> None:
        await self.schedule(seconds, "note")

    async def note(self, payload: Any, schedule: Schedule) -> None:
        FIRED.append((trio.current_time(), "note"))


class Pair(Agent):
    """Two fibers that wait for each other, in recovery as before."""

    def __init__(self) -> None:
        self.met = {"a": trio.Event(), "b": trio.Event()}

    async def begin(self) -> None:
        for name in self.met:
            await self.fibers.start(name, trio.sleep_forever, fiber_id=name)

    async def on_fiber_recovered(self, ctx: FiberRecovery) -> FiberResolution:
        self.met[ctx.name].set()
        await self.met["a" if ctx.name == "b" else "b"].wait()
        return FiberResolution(result="met")


class Stuck(Agent):
    """A fiber that does not stop when its facet is aborted, and comes to an end later."""

    go = trio.Event()

    async def begin(self) -> None:
        async def fn() -> str:
            with trio.CancelScope(shield=True):
                await Stuck.go.wait()
            return "late"

        await self.fibers.start("f", fn, fiber_id="f")

    async def on_fiber_recovered(self, ctx: FiberRecovery) -> FiberResolution:
        await trio.sleep(20)
        return FiberResolution(result="recovered")


class Silent(Agent):
    """Says all it has to say and ends, without a pause between."""

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        for text in turn.input:
            yield {"type": "text-delta", "id": "t", "delta": text}


class Top(Agent):
    """The root of all of them."""

    async def note(self, payload: Any, schedule: Schedule) -> None:
        FIRED.append((trio.current_time(), str(payload)))

    async def slow(self, payload: Any, schedule: Schedule) -> None:
        FIRED.append((trio.current_time(), str(payload)))
        await trio.sleep(5)

    async def bad_once(self, payload: Any, schedule: Schedule) -> None:
        FIRED.append((trio.current_time(), "bad_once"))
        if len(FIRED) == 1:
            raise ValueError("the first time")

    async def run(self, value: Any, run_id: str) -> str:
        run = await self.run_agent_tool(Child, value, run_id=run_id)
        return run.status


async def opened_top(test: Harness) -> tuple[Top, Any]:
    root = await test.kernel.get_agent(Top, "a")
    return root, agent_at(test)


def opened(**options: Any) -> Any:
    FIRED.clear()
    facets = [Child, Kid, Pair, Stuck, Silent]
    return open_test_kernel(roots=[Top], facets=facets, **options)


# ---- 3: looked at again in the step that enters the owner's code


async def cancelled_by_the_start_that_it_causes() -> None:
    Kid.tired = False
    async with opened() as test:
        _root, me = await opened_top(test)
        kid = await me.dynamic_agents.get(Kid, "k")
        await kid.later(10)
        await test.evict([("Top", "a"), ("Kid", "k")])
        Kid.tired = True
        await test.advance(30)
        assert FIRED == []
        assert rows(tree_of(test), "SELECT count(*) FROM job") == [(0,)]


# ---- 6: what is read late is durable


async def read_late_and_then_lost() -> None:
    """A run of an earlier life is ended; somebody reads it before the record."""
    async with opened() as test, trio.open_nursery() as nursery:
        root, _me = await opened_top(test)

        async def ask() -> None:
            with pytest.raises(CuletError):
                await root.run([["say", "x"], ["sleep", 5], ["say", "y"]], "r")

        nursery.start_soon(ask)
        await test.advance(1)
        await test.crash()
        await test.reopen()
        _root, me = await opened_top(test)
        await me.durable()
        await settle()
        tree = tree_of(test)  # from here to the crash nobody else runs
        assert tree.runs.cancel(tree.root_slot, "r", "now") == "aborted"
        child = rows(tree, "SELECT child FROM run")[0][0]
        page, _all = tree.streams.pull(None, Cursor(child, "r", "run"), 1 << 16)
        seen = [json.loads(text)["event"] for text in page.texts]
        await test.crash()  # the cancel is lost
        await test.reopen()
        _root, me = await opened_top(test)
        await test.advance(10)
        told = [f["event"] async for f in me.runs.replay("r")]
        assert [e["kind"] for e in told] == ["started", *["chunk"] * 3, "finished"]
        assert seen == told[: len(seen)], "nothing that was read is taken back"


# ---- 7: the length of a stream is known where the end is written


async def staged_and_ended_in_one_step() -> None:
    async with opened() as test:
        _root, me = await opened_top(test)
        run = await me.run_agent_tool(Silent, ["a", "b", "c"], run_id="r")
        assert (run.status, run.n) == ("completed", 3)
        await me.durable()
        numbers = [f["sequence"] async for f in me.runs.replay("r")]
        assert numbers == [0, 1, 2, 3, 4]


# ---- 12: a wipe is never dead


async def a_wipe_that_fails_often() -> None:
    async with opened() as test:
        _root, me = await opened_top(test)
        kid = await me.dynamic_agents.get(Child, "k")
        await me.run_agent_tool(Child, [["say", "x"]], run_id="r")
        del kid
        tree = tree_of(test)
        delete = tree.store.delete
        tries: list[float] = []

        def refuse(slot: str) -> None:
            tries.append(trio.current_time())
            raise StorageFull("no room, not even to delete")

        tree.store.delete = refuse  # type: ignore[method-assign]
        await me.dynamic_agents.delete(Child, "r")
        await test.advance(2000)
        assert len(tries) > 10, "it is tried for ever"
        assert tries[-1] - tries[-2] <= 300, "at the longest back-off"
        assert rows(tree, "SELECT kind, dead FROM job") == [("wipe", 0)]
        tree.store.delete = delete  # type: ignore[method-assign]
        await test.advance(301)
        assert rows(tree, "SELECT count(*) FROM job") == [(0,)]
        assert rows(tree, "SELECT count(*) FROM node WHERE name = 'r'") == [(0,)]
        assert tree.store.slots() == set()


# ---- 13: slot, lanes, times


async def a_job_behind_a_busy_lane() -> None:
    """The dispatcher does not run in circles; no time passes here."""
    async with opened() as test:
        _root, me = await opened_top(test)
        await me.schedule(0, "slow", "s")
        await settle()
        for _ in range(2):  # not taken with it: its lane is busy by now
            await me.schedule(0, "slow", "s")
        tree = tree_of(test)
        passes = 0
        refresh = tree.jobs._refresh

        def counted() -> None:
            nonlocal passes
            passes += 1
            refresh()

        tree.jobs._refresh = counted  # type: ignore[method-assign]
        for _ in range(300):
            await trio.lowlevel.checkpoint()
        assert len(FIRED) == 1
        assert passes < 30


async def fibers_that_wait_for_each_other() -> None:
    async with opened() as test:
        _root, me = await opened_top(test)
        await (await me.dynamic_agents.get(Pair, "p")).begin()
        await me.durable()
        await test.crash()
        await test.reopen()
        await opened_top(test)
        await test.advance(5)
        sql = "SELECT name, status FROM fiber ORDER BY name"
        assert rows(tree_of(test), sql) == [("a", "completed"), ("b", "completed")]


async def a_tick_that_fails_and_one_that_is_cut() -> None:
    """The next ones are where they were: neither moves the instant that they count from."""
    async with opened() as test:
        _root, me = await opened_top(test)
        await me.schedule_every(100, "bad_once", retry=TEN)
        began = trio.current_time()
        await test.advance(290)
        assert len(FIRED) == 3
        sql = "SELECT at FROM job"
        at = rows(tree_of(test), sql)
        await me.schedule_every(1000, "slow", "s", retry=TEN)
        await test.advance(1000)
        cut = rows(tree_of(test), "SELECT at FROM job WHERE what = 'slow'")
        tree = tree_of(test)
        await test.advance(2)
        await tree.abort([tree.root_slot], "cut")
        assert rows(tree, "SELECT at FROM job WHERE what = 'slow'") == cut
        await test.advance(100)
        offsets = [(when - began) % 100 for when, what in FIRED if what == "bad_once"]
        assert [o for o in offsets if 0.1 < o < 99.9] == [
            pytest.approx(offsets[1], abs=0.1)
        ]
        assert at == [(at[0][0],)]


async def a_tree_restarted_in_one_process() -> None:
    async with opened() as test, trio.open_nursery() as nursery:
        root, me = await opened_top(test)

        async def ask() -> None:
            with pytest.raises(CuletError):
                await root.run([["say", "a"], ["sleep", 5], ["say", "b"]], "r")

        nursery.start_soon(ask)
        await test.advance(1)
        held = rows(tree_of(test), "SELECT held FROM job WHERE kind = 'turn'")
        test.faults.fail_record()
        me.set_state({"n": 1})
        await test.advance(30)
        _root, me = await opened_top(test)
        assert held != [(None,)]
        assert me.runs.get("r").status == "completed"


# ---- beside the thirteen


async def a_late_worker_that_comes_to_an_end() -> None:
    """It lost its hold: how the fiber ends is not its to say any more."""
    Stuck.go = trio.Event()
    async with opened(abort_grace_s=1) as test:
        _root, me = await opened_top(test)
        await (await me.dynamic_agents.get(Stuck, "s")).begin()
        await test.advance(1)
        with pytest.raises(ChildDidNotStop):
            await me.dynamic_agents.abort(Stuck, "s")
        await test.advance(5)
        sql = "SELECT status, result FROM fiber"
        Stuck.go.set()
        await settle()
        assert rows(tree_of(test), sql) == [("running", None)]
        await test.advance(30)
        assert rows(tree_of(test), sql) == [("completed", '"recovered"')]
        assert rows(tree_of(test), "SELECT count(*) FROM job") == [(0,)]
