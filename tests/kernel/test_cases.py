"""Cases from the field that need agents of their own: what went wrong elsewhere."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import pytest
import trio

from culet.kernel import (
    Agent,
    Chunk,
    FiberRecovery,
    FiberResolution,
    Schedule,
    Turn,
    next_fire,
)
from culet.kernel.errors import CuletError, FacetAborted, StorageError
from culet.kernel.testing import Harness, open_test_kernel
from kernel.agents import agent_at, rows, settle, tree_of

DONE: Counter[str] = Counter()
FIRED: list[tuple[float, str]] = []


@pytest.fixture(autouse=True)
def fresh() -> None:
    DONE.clear()
    FIRED.clear()


class WaitsForItself(Agent):
    """A turn that goes on when its own schedule fires, and asks its parent then."""

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        self.go = trio.Event()
        await self.schedule(60, "wake")
        await self.go.wait()
        parent = await self.parent_agent(Top)
        yield {"type": "text-delta", "id": "t", "delta": await parent.hello()}

    async def wake(self, payload: Any, schedule: Schedule) -> None:
        self.go.set()


class Says(Agent):
    """Says a, b, c; with an input of "fail" it fails once it has said a and b."""

    resumable = True

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        DONE["attempts"] += 1
        said = len(turn.chunks())
        for number, text in enumerate("abc"):
            if number < said:
                continue
            if number == 2 and turn.input == "fail":
                raise ValueError("once")
            yield {"type": "text-delta", "id": "t", "delta": text}
            await self.durable()


class Other(Agent):
    async def note(self, payload: Any, schedule: Schedule) -> None:
        FIRED.append((trio.current_time(), "other"))


class Maint(Agent):
    """Asks for maintenance in each of its starts."""

    idempotent = True

    async def on_start(self) -> None:
        await self.schedule(60, "maint", idempotent=Maint.idempotent)
        await self.durable()

    async def maint(self, payload: Any, schedule: Schedule) -> None:
        FIRED.append((trio.current_time(), "maint"))

    async def other(self) -> None:
        other = await self.dynamic_agents.get(Other, "o")
        assert other is not None
        kid = agent_under(self, "o")
        await kid.schedule(60, "note")


def agent_under(agent: Agent, name: str) -> Any:
    return next(k.agent for k in agent._node.kids.values() if k.name == name)


class Top(Agent):
    async def hello(self) -> str:
        return "hello"

    async def in_fiber(self) -> str:
        async def fn() -> str:
            run = await self.run_agent_tool(WaitsForItself, None, run_id="r")
            return f"{run.status}: {run.summary}"

        return await self.run_fiber("f", fn)

    async def detached(self) -> None:
        await self.run_agent_tool(WaitsForItself, None, run_id="r", detached=True)

    async def owe_other(self, seconds: float) -> None:
        await self.dynamic_agents.get(Other, "o")
        await agent_under(self, "o").schedule(seconds, "note")

    async def hold(self, seconds: float) -> None:
        with trio.CancelScope(shield=True):
            await trio.sleep(seconds)

    async def mail(self) -> str:
        async def fn() -> str:
            DONE["mail"] += 1
            return "sent"

        return await self.run_fiber("mail", fn)

    async def on_fiber_recovered(self, ctx: FiberRecovery) -> FiberResolution:
        DONE["recovered"] += 1
        return FiberResolution(result="recovered")


async def opened_top(test: Harness) -> Any:
    return await test.kernel.get_agent(Top, "a")


# ---- an operation that waits for what only it can make


@pytest.mark.rule("HB-11")
@pytest.mark.parametrize("how", ["in_fiber", "detached"])
async def test_idleness_does_not_cut_what_waits_for_a_schedule(
    how: str, clock: object
) -> None:
    facets = [WaitsForItself]
    async with open_test_kernel(roots=[Top], facets=facets, idle_s=5) as test:
        root = await opened_top(test)
        told: list[Any] = []

        async def ask() -> None:
            told.append(await getattr(root, how)())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await test.advance(120)
            nursery.cancel_scope.cancel()
        root = await opened_top(test)
        runs = "SELECT status, summary FROM run"
        assert rows(tree_of(test), runs) == [("completed", "hello")]
        assert told == ["completed: hello" if how == "in_fiber" else None]
        await test.advance(480)
        await opened_top(test)
        await settle()
        assert rows(tree_of(test), "SELECT kind FROM job") == []
        assert rows(tree_of(test), "SELECT name FROM fiber") == []


# ---- finished work whose bookkeeping failed


@pytest.mark.rule("HB-13", "I-39")
@pytest.mark.parametrize("nth", range(1, 8))
async def test_a_finished_fiber_is_not_recovered_though_the_disk_was_full(
    nth: int, clock: object
) -> None:
    async with open_test_kernel(roots=[Top]) as test:
        root = await opened_top(test)
        await settle()
        test.faults.fail_commit(nth)
        told = None
        with suppress(StorageError):
            told = await root.mail()
        sent = DONE["mail"]
        test.faults.heal()
        await test.crash()
        await test.reopen()
        await opened_top(test)
        await test.advance(60)
        assert DONE["mail"] == sent <= 1
        if told is not None:
            assert told == "sent"
            assert DONE["recovered"] == 0
        assert DONE["recovered"] <= 1
        assert rows(tree_of(test), "SELECT kind FROM job") == []
        assert rows(tree_of(test), "SELECT 1 FROM fiber WHERE status = 'running'") == []


# ---- what was said is not said again


@pytest.mark.rule("HB-15", "I-14", "T-102a")
@pytest.mark.parametrize("commits", range(16))
async def test_what_a_turn_has_said_is_not_said_again(
    commits: int, clock: object
) -> None:
    """A turn that fails is not tried again; one that is cut goes on behind what it said."""
    async with open_test_kernel(roots=[Top], facets=[Says]) as test:
        await opened_top(test)
        me = agent_at(test)
        failed = await me.run_agent_tool(Says, "fail", run_id="f")
        assert (failed.status, failed.summary, failed.n) == ("error", "ab", 2)
        assert DONE["attempts"] == 1
        await me.durable()
        test.faults.die_after(commits)
        with trio.move_on_after(3):
            try:
                await me.run_agent_tool(Says, "", run_id="r")
            except CuletError:
                assert test.faults.dead
        await test.crash()
        await test.reopen()
        await opened_top(test)
        me = agent_at(test)
        await test.advance(20)
        texts: dict[str, list[str]] = {}
        for run in me.runs.list():
            frames = [f async for f in me.runs.replay(run.run_id)]
            assert [f["sequence"] for f in frames] == list(range(len(frames)))
            bodies = [f["event"].get("body") for f in frames[1:-1]]
            texts[run.run_id] = [b.split('"delta":"')[1][0] for b in bodies]
        assert texts["f"] == ["a", "b"]
        assert texts.get("r", ["a", "b", "c"]) == ["a", "b", "c"]


# ---- what comes due while somebody stops


async def held(root: Any, seconds: float) -> None:
    """A handler that holds up the stop, and is told why it ends."""
    with suppress(FacetAborted):
        await root.hold(seconds)


@pytest.mark.rule("HB-25", "I-31")
@pytest.mark.parametrize("what", ["shutdown", "abort"])
async def test_what_comes_due_around_a_stop_is_called_once(
    what: str, clock: object
) -> None:
    chance = random.Random(25)
    for _ in range(50):
        FIRED.clear()
        offset = chance.choice([chance.uniform(-0.05, 0.05), chance.uniform(-3, 3)])
        async with open_test_kernel(
            roots=[Top], facets=[Other], abort_grace_s=2
        ) as test:
            root = await opened_top(test)
            await root.owe_other(10)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(held, root, offset + 10.5)
                await test.advance(10 + offset)
                if what == "shutdown":
                    await test.close()
                else:
                    await agent_at(test).dynamic_agents.abort(Other, "o")
            if what == "shutdown":
                await test.advance(60 - trio.current_time() % 60)
                await test.reopen()
                await opened_top(test)
            await test.advance(20)
            assert [w for _at, w in FIRED] == ["other"], offset
            assert tree_of(test).jobs.slot() is None


# ---- rows that pile up in a loop of crashes


@pytest.mark.rule("HB-17", "I-36", "I-37")
@pytest.mark.parametrize("idempotent", [True, False])
async def test_a_start_that_schedules_in_a_crash_loop(
    idempotent: bool, clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Maint, "idempotent", idempotent)
    lives = 200
    async with open_test_kernel(roots=[Maint], facets=[Other]) as test:
        for life in range(lives):
            root = await test.kernel.get_agent(Maint, "a")
            if life < lives - 1:
                await test.crash()
                await test.reopen()
        await root.other()
        tree = tree_of(test, "Maint")
        kept = rows(tree, "SELECT count(*) FROM job WHERE what = 'maint'")
        assert kept == [(1 if idempotent else lives,)]
        began = trio.current_time()
        await test.advance(61)
        calls = Counter(what for _at, what in FIRED)
        assert calls == {"maint": kept[0][0], "other": 1}
        (at,) = [at - began for at, what in FIRED if what == "other"]
        assert at < 61, "others are not starved"


# ---- midnight where the clock goes forward


def utc(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1000)


@pytest.mark.rule("HB-23", "I-32")
@pytest.mark.parametrize(
    ("expr", "tz", "start", "wanted"),
    [
        (
            "0 0 * * *", "America/Los_Angeles", "2026-03-07T20:00",
            ["03-08T08:00", "03-09T07:00", "03-10T07:00", "03-11T07:00"],
        ),
        (
            "0 0 * * 0-4", "America/Chicago", "2026-03-06T18:00",
            ["03-08T06:00", "03-09T05:00", "03-10T05:00", "03-11T05:00", "03-12T05:00"],
        ),
    ],
    ids=["Los Angeles", "Chicago"],
)  # fmt: skip
def test_no_midnight_is_skipped_when_the_clock_goes_forward(
    expr: str, tz: str, start: str, wanted: list[str]
) -> None:
    ticks = [utc(f"2026-{tick}") for tick in wanted]
    one_by_one = [next_fire(expr, tz, utc(start))]
    while len(one_by_one) < len(ticks):
        one_by_one.append(next_fire(expr, tz, one_by_one[-1]))
    assert one_by_one == ticks
    hours = range(utc(start), ticks[-1], 3_600_000)
    assert sorted({next_fire(expr, tz, at) for at in hours}) == ticks
