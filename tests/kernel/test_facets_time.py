"""What facets owe themselves: schedules, queues and fibers, rule by rule."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import pytest
import trio

from culet.kernel import (
    Agent,
    FiberRecovery,
    FiberResolution,
    Retry,
    Schedule,
    current_agent,
    retry_call,
)
from culet.kernel.errors import UsageError
from culet.kernel.testing import EPOCH_MS, Harness, open_test_kernel
from kernel.agents import agent_at, raises, rows, settle, tree_of

TOLD: list[Any] = []
ONCE = Retry(max_attempts=1)


@pytest.fixture(autouse=True)
def fresh() -> None:
    TOLD.clear()


class Leaf(Agent):
    async def on_start(self) -> None:
        self.sql("CREATE TABLE IF NOT EXISTS note (v TEXT)")

    async def note(self, payload: Any, schedule: Schedule) -> None:
        self.sql("INSERT INTO note VALUES (?)", str(payload))
        here = current_agent()
        path = [step.name for step in self.parent_path]
        TOLD.append(
            (
                self.name,
                path,
                here.agent is self,
                here.connection,
                here.request,
                payload,
            )
        )

    async def say(self, payload: Any, schedule: Schedule) -> None:
        TOLD.append(payload)

    async def fail(self, payload: Any, schedule: Schedule) -> None:
        TOLD.append(payload)
        raise ValueError("bad")

    async def cancels_itself(self, payload: Any, schedule: Schedule) -> None:
        TOLD.append((self.schedules.cancel(schedule.id), len(self.schedules.list())))

    async def asks_its_parent(self, payload: Any, schedule: Schedule) -> None:
        parent = await self.parent_agent(Top)
        TOLD.append(await parent.ask_back(self.name))

    async def plan(self, text: str) -> str:
        return (await self.schedule(5, "say", text)).id

    async def inner(self) -> None:
        TOLD.append("inner")

    async def walk(self, name: str) -> None:
        async def fn() -> None:
            self.stash({"by": name})
            await trio.sleep_forever()

        await self.fibers.start("walk", fn, fiber_id=name)

    async def on_fiber_recovered(self, ctx: FiberRecovery) -> FiberResolution:
        if ctx.name == "again":
            TOLD.append("hook")
            await self.run_fiber("inner", self.inner)
            await self.durable()
            await trio.sleep(5)
            return FiberResolution(result=len(TOLD))
        if ctx.name == "followed":
            await self.fibers.start("next", trio.sleep_forever, fiber_id="next")
            return FiberResolution(result=None)
        TOLD.append((self.name, ctx.id, ctx.name, ctx.snapshot, ctx.started_at))
        await self.schedule(0, "say", f"go on {ctx.id}", idempotent=True)
        return FiberResolution(result="seen")


class Mid(Leaf):
    """Between the root and a leaf."""


class Top(Leaf):
    async def ask_back(self, name: str) -> str:
        leaf = await self.dynamic_agents.lookup(Leaf, name)
        assert leaf is not None
        await leaf.plan("asked back")
        return "asked"


async def opened_top(test: Harness) -> Any:
    await test.kernel.get_agent(Top, "a")
    return agent_at(test)


def opened() -> Any:
    return open_test_kernel(roots=[Top], facets=[Mid, Leaf])


DEEP = (("Mid", "m"), ("Leaf", "l"))


async def leaf_of(test: Harness) -> Any:
    """Return the leaf that lies two hops below the root."""
    top = await opened_top(test)
    await top.dynamic_agents.get(Mid, "m")
    await agent_at(test, DEEP[0]).dynamic_agents.get(Leaf, "l")
    return agent_at(test, *DEEP)


async def child(test: Harness, name: str = "k") -> Any:
    top = await opened_top(test)
    await top.dynamic_agents.get(Leaf, name)
    return agent_at(test, ("Leaf", name))


# ---- schedules


@pytest.mark.rule("F-252", "F-253", "F-270")
async def test_a_call_is_made_inside_its_owner_two_hops_down(clock: object) -> None:
    async with opened() as test:
        leaf = await leaf_of(test)
        await leaf.schedule(50, "note", {"when": [1, None]})
        await leaf.schedule(51, "note")
        await leaf.durable()
        await test.evict([("Top", "a")])
        await test.advance(60)
        here = ("l", ["a", "m"], True, None, None)
        assert [(*here, {"when": [1, None]}), (*here, None)] == TOLD
        leaf = await leaf_of(test)
        assert len(leaf.sql("SELECT v FROM note")) == 2
        for above in (agent_at(test), agent_at(test, DEEP[0])):
            assert above.sql("SELECT v FROM note") == []


@pytest.mark.rule("F-254", "F-255", "F-277")
async def test_what_recurs_is_one_and_stays(clock: object) -> None:
    async with opened() as test:
        kid = await child(test)
        tick = await kid.schedule_every(10, "say", "t", retry=ONCE)
        again = await kid.schedule_every(10, "say", "t", retry=Retry(max_attempts=4))
        cron = await kid.schedule("* * * * *", "say", "c")
        assert again.id == tick.id
        sql = "SELECT retry FROM job WHERE id = ?"
        (policy,) = rows(tree_of(test), sql, tick.id)[0]
        assert '"max_attempts":1,' in policy, "the first one wins"
        await test.advance(65)
        assert TOLD.count("t") == 6
        assert TOLD.count("c") == 1
        listed = {s.id: s.at for s in kid.schedules.list()}
        assert listed == {tick.id: EPOCH_MS + 70_000, cron.id: EPOCH_MS + 120_000}


@pytest.mark.rule("F-258", "F-259")
async def test_the_same_call_of_siblings_is_two(clock: object) -> None:
    async with opened() as test:
        one, two = await child(test, "one"), await child(test, "two")
        a = await one.schedule(5, "say", "x", idempotent=True)
        b = await two.schedule(5, "say", "x", idempotent=True)
        assert a.id != b.id
        assert [s.id for s in one.schedules.list()] == [a.id]
        assert two.schedules.get(a.id) is None
        assert not two.schedules.cancel(a.id)
        await test.advance(6)
        assert TOLD == ["x", "x"]


@pytest.mark.rule("F-264")
@pytest.mark.parametrize("recurs", [False, True])
async def test_a_call_may_cancel_itself(recurs: bool, clock: object) -> None:
    async with opened() as test:
        kid = await child(test)
        if recurs:
            await kid.schedule_every(5, "cancels_itself")
        else:
            await kid.schedule(5, "cancels_itself")
        await test.advance(30)
        assert TOLD == [(True, 0)]
        assert kid.schedules.list() == []
        assert tree_of(test).jobs.slot() is None


@pytest.mark.rule("F-293")
async def test_a_parent_may_be_asked_for_a_schedule_by_the_call_it_waits_for(
    clock: object,
) -> None:
    async with opened() as test:
        kid = await child(test)
        await kid.schedule(5, "asks_its_parent")
        await test.advance(6)
        assert TOLD == ["asked"]
        await test.advance(6)
        assert TOLD == ["asked", "asked back"]


@pytest.mark.rule("F-272")
async def test_what_lies_in_the_past_is_due_now(clock: object) -> None:
    async with opened() as test:
        kid = await child(test)
        long_ago = datetime.fromtimestamp(EPOCH_MS / 1000 - 9e5, UTC)
        await kid.schedule(long_ago, "say", "late")
        await kid.schedule(0, "say", "now")
        await settle()
        assert TOLD == ["late", "now"]


@pytest.mark.rule("F-276")
async def test_another_time_is_another_call(clock: object) -> None:
    async with opened() as test:
        kid = await child(test)
        made = [await kid.schedule(s, "say", "x", idempotent=True) for s in (5, 5, 6)]
        assert made[0].id == made[1].id != made[2].id
        assert [s.due_at - EPOCH_MS for s in kid.schedules.list()] == [5_000, 6_000]


@pytest.mark.rule("F-265")
async def test_what_a_deleted_facet_owed_is_gone_with_all_below_it(
    clock: object,
) -> None:
    async with opened() as test:
        leaf = await leaf_of(test)
        await leaf.schedule_every(5, "say", "leaf")
        await agent_at(test, DEEP[0]).schedule(5, "say", "mid")
        await agent_at(test).schedule(5, "say", "top")
        await agent_at(test).dynamic_agents.delete(Mid, "m")
        await test.advance(30)
        assert TOLD == ["top"]
        assert rows(tree_of(test), "SELECT 1 FROM job") == []


class Slow(Leaf):
    """Whose start fails until it is told otherwise."""

    broken = False

    async def on_start(self) -> None:
        if Slow.broken:
            raise ValueError("not yet")


@pytest.mark.rule("F-325", "F-315")
async def test_a_call_waits_while_its_owner_cannot_start(
    clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_test_kernel(roots=[Top], facets=[Slow]) as test:
        top = await opened_top(test)
        await top.dynamic_agents.get(Slow, "s")
        slow = agent_at(test, ("Slow", "s"))
        await slow.schedule(10, "say", "at last", retry=ONCE)
        await top.schedule(11, "say", "other")
        await test.evict([("Top", "a"), ("Slow", "s")])
        monkeypatch.setattr(Slow, "broken", True)
        starts: list[Any] = []
        test.kernel.subscribe("start", lambda *what: starts.append(what))
        await test.advance(12.5)
        assert TOLD == ["other"]
        assert 0 < len(starts) < 6, "and not hot"
        monkeypatch.setattr(Slow, "broken", False)
        await test.advance(60)
        assert TOLD == ["other", "at last"]
        assert rows(tree_of(test), "SELECT 1 FROM job") == []


@pytest.mark.rule("I-31")
async def test_a_call_that_may_be_tried_once_is_made_though_the_process_ended_before(
    clock: object,
) -> None:
    async with opened() as test:
        kid = await child(test)
        await kid.schedule(1, "say", "x", retry=ONCE)
        await kid.schedule(5, "fail", "y", retry=ONCE)
        await kid.durable()
        test.faults.die_in_record(landed=True)  # the take is on the disk, no more
        await test.advance(2)
        assert test.faults.dead
        await test.crash()
        assert TOLD == []
        await test.reopen()
        await opened_top(test)
        await test.advance(60)
        assert TOLD == ["x", "y"], "what fails is not tried again"
        sql = "SELECT what, dead FROM job"
        assert rows(tree_of(test), sql) == [("fail", 1)]


# ---- queues


@pytest.mark.rule("F-438", "F-439", "F-442", "F-445")
async def test_a_queue_goes_on_behind_what_fails_and_drops_each_by_itself(
    clock: object,
) -> None:
    async with opened() as test:
        kid = await child(test)
        kid.queue.put("say", "first")
        bad = kid.queue.put("fail", "bad", retry=ONCE)
        lost = kid.queue.put("note", "lost", retry=ONCE)
        kid.queue.put("say", "last")
        tree = tree_of(test)
        with tree.transaction():
            tree.db.execute("UPDATE job SET what = 'nothing' WHERE id = ?", (lost,))
        assert TOLD == [], "put returns before anything runs"
        await settle()
        assert TOLD == ["first", "bad", "last"]
        left = {s.id: s.dead for s in kid.queue.list()}
        assert left == {bad: True, lost: True}


@pytest.mark.rule("F-440")
async def test_what_is_queued_goes_on_after_a_crash_by_itself(clock: object) -> None:
    async with opened() as test:
        kid = await child(test)
        for n in range(3):
            kid.queue.put("say", n)
        tree = tree_of(test)
        tree.jobs.stopped = True  # the process dies before any of it
        await kid.durable()
        await test.crash()
        assert TOLD == []
        await test.reopen()
        await test.advance(5)
        assert TOLD == [0, 1, 2]


@pytest.mark.rule("F-446")
async def test_retry_call_gives_up_as_it_is_told(clock: object) -> None:
    tries: list[float] = []

    async def fn() -> str:
        tries.append(trio.current_time())
        if len(tries) < 4:
            raise ValueError(f"try {len(tries)}")
        return "done"

    error = await raises(
        ValueError, lambda: retry_call(fn, max_attempts=3, base_delay=1)
    )
    assert str(error) == "try 3"
    assert [b - a for a, b in pairwise(tries)] == [1, 2]
    assert await retry_call(fn) == "done"
    tries.clear()
    await raises(ValueError, lambda: retry_call(fn, should_retry=lambda e: False))
    assert len(tries) == 1


# ---- fibers


@pytest.mark.rule("F-336", "F-357", "F-358", "F-360", "F-364")
async def test_fibers_two_hops_down_are_recovered_there_and_go_on(
    clock: object,
) -> None:
    async with opened() as test:
        leaf = await leaf_of(test)
        for name in ("one", "two"):
            await leaf.walk(name)
        await leaf.durable()
        await test.advance(100)
        await test.crash()
        await test.reopen()
        await test.advance(5)  # nobody asks for anything
        heard = [("l", n, "walk", {"by": n}, EPOCH_MS) for n in ("one", "two")]
        assert sorted(t for t in TOLD if isinstance(t, tuple)) == heard
        assert sorted(t for t in TOLD if isinstance(t, str)) == [
            "go on one",
            "go on two",
        ]
        assert rows(tree_of(test), "SELECT status FROM fiber") == [("completed",)] * 2
        assert rows(tree_of(test), "SELECT kind FROM job") == []


@pytest.mark.rule("F-346")
async def test_a_snapshot_that_cannot_be_read_is_none(clock: object) -> None:
    async with opened() as test:
        leaf = await leaf_of(test)
        await leaf.walk("one")
        await settle()
        tree = tree_of(test)
        with tree.transaction():
            tree.db.execute("UPDATE job SET snapshot = '{bad' WHERE kind = 'fiber'")
        await tree.durable()
        await test.crash()
        await test.reopen()
        await test.advance(5)
        assert TOLD[0][:4] == ("l", "one", "walk", None)
        assert rows(tree_of(test), "SELECT status FROM fiber") == [("completed",)]


@pytest.mark.rule("F-348")
async def test_an_id_or_key_that_says_nothing_or_two_things_is_refused(
    clock: object,
) -> None:
    async with opened() as test:
        kid = await child(test)
        fibers = kid.fibers
        a = await fibers.start("f", trio.sleep_forever, fiber_id="a", key="ka")
        await fibers.start("f", trio.sleep_forever, fiber_id="b", key="kb")
        for bad in (
            {"fiber_id": ""}, {"key": ""}, {"key": " "}, {"fiber_id": "a", "key": "kb"},
        ):  # fmt: skip
            error = await raises(
                UsageError, lambda bad=bad: fibers.start("f", trio.sleep_forever, **bad)
            )
            assert str(error)
        assert len(fibers.list()) == 2
        again = await fibers.start("f", trio.sleep_forever, fiber_id="a", key="ka")
        assert again.id == a.id
        assert (a.accepted, again.accepted) == (True, False)


@pytest.mark.rule("F-349", "F-350")
async def test_whoever_waits_for_a_fiber_hears_how_it_ended(clock: object) -> None:
    async with opened() as test, trio.open_nursery() as nursery:
        kid = await child(test)

        async def good() -> str:
            await trio.sleep(3)
            return "well"

        async def bad() -> None:
            await trio.sleep(3)
            raise ValueError("why")

        async def deaf() -> None:
            try:
                await trio.sleep_forever()
            finally:
                raise ValueError("after it was cancelled")

        heard: list[Any] = []

        async def wait(name: str, fn: Any) -> None:
            run = await kid.fibers.start(name, fn, fiber_id=name, wait=True)
            heard.append((name, run.status, run.result, run.error))

        for name, fn in (("good", good), ("bad", bad), ("deaf", deaf)):
            for _ in range(2):
                nursery.start_soon(wait, name, fn)
        await test.advance(5)
        assert kid.fibers.cancel("deaf", reason="enough") == "aborted"
        await settle()
        assert sorted(set(heard), key=str) == [
            ("bad", "error", None, "ValueError: why"),
            ("deaf", "aborted", None, None),
            ("good", "completed", "well", None),
        ]
        assert len(heard) == 6


@pytest.mark.rule("F-361")
async def test_what_a_hook_has_started_outlives_the_end_of_that_recovery(
    clock: object,
) -> None:
    async with opened() as test:
        kid = await child(test)
        await kid.fibers.start("followed", trio.sleep_forever, fiber_id="f")
        await kid.durable()
        await test.crash()
        await test.reopen()
        await test.advance(5)
        sql = "SELECT name, status FROM fiber ORDER BY born"
        both = [("followed", "completed"), ("next", "running")]
        assert rows(tree_of(test), sql) == both
        await test.crash()
        await test.reopen()
        await test.advance(5)
        assert [told[1] for told in TOLD if told[0] == "k"] == ["next"]


@pytest.mark.rule("F-361", "F-365")
async def test_a_hook_that_was_cut_runs_again_and_may_start_fibers_of_its_own(
    clock: object,
) -> None:
    async with opened() as test:
        kid = await child(test)
        await kid.fibers.start("again", trio.sleep_forever, fiber_id="f")
        await kid.durable()
        await test.crash()
        await test.reopen()
        await test.advance(2)  # in the middle of the hook
        assert TOLD == ["hook", "inner"]
        await test.crash()
        await test.reopen()
        await test.advance(30)
        assert TOLD == ["hook", "inner"] * 2
        sql = "SELECT name, status, result FROM fiber"
        assert rows(tree_of(test), sql) == [("again", "completed", "4")]
        assert rows(tree_of(test), "SELECT 1 FROM job") == []
