"""What is owed: lanes, back-off, dead letters, ticks; and nothing lost or twice."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import pytest
import trio

from culet.kernel import Agent, Limits, Retry, Schedule
from culet.kernel.errors import CapacityError, FacetAborted, UsageError
from culet.kernel.ports import TreeKey
from culet.kernel.testing import EPOCH_MS, Harness, open_test_kernel
from kernel.agents import agent_at, raises, rows, settle, tree_of

FIRED: list[tuple[float, str]] = []
SLOW = Retry(max_attempts=3, base_delay=10, max_delay=60)


@pytest.fixture(autouse=True)
def fresh() -> None:
    FIRED.clear()


def fired() -> list[str]:
    return [text for _at, text in FIRED]


class Kid(Agent):
    async def on_start(self) -> None:
        self.ready = True

    async def later(self, seconds: float, text: str) -> str:
        return (await self.schedule(seconds, "note", text)).id

    async def note(self, payload: Any, schedule: Schedule) -> None:
        assert self.ready
        FIRED.append((trio.current_time(), f"{self.name}:{payload}"))

    async def hang(self, payload: Any, schedule: Schedule) -> None:
        FIRED.append((trio.current_time(), "hangs"))
        await trio.sleep_forever()

    async def wait(self) -> None:
        await trio.sleep_forever()


class Top(Agent):
    async def on_start(self) -> None:
        await trio.sleep(0)

    async def note(self, payload: Any, schedule: Schedule) -> None:
        FIRED.append((trio.current_time(), str(payload)))

    async def fail(self, payload: Any, schedule: Schedule) -> None:
        FIRED.append((trio.current_time(), f"{payload}{schedule.attempts}"))
        raise ValueError(f"bad {payload}")

    async def slow(self, payload: Any, schedule: Schedule) -> None:
        FIRED.append((trio.current_time(), str(payload)))
        await trio.sleep(5)

    async def kid(self, name: str) -> None:
        await self.dynamic_agents.get(Kid, name)

    async def drop(self, name: str) -> None:
        await self.dynamic_agents.delete(Kid, name)

    async def kid_later(self, name: str, seconds: float, text: str) -> str:
        kid = await self.dynamic_agents.get(Kid, name)
        return await kid.later(seconds, text)

    async def calls_an_aborted_one(self, payload: Any, schedule: Schedule) -> None:
        FIRED.append((trio.current_time(), "called"))
        kid = await self.dynamic_agents.get(Kid, "k")
        await self.dynamic_agents.abort(Kid, "k", "over")
        await kid.wait()

    async def add(
        self, when: float | str, callback: str, payload: Any = None, many: int = 1
    ) -> list[str]:
        return [
            (await self.schedule(when, callback, payload, retry=SLOW)).id
            for _ in range(many)
        ]

    async def end_self(self, payload: Any, schedule: Schedule) -> None:
        FIRED.append((trio.current_time(), "end"))
        await self.destroy()


async def opened_top(test: Harness) -> tuple[Top, Any]:
    root = await test.kernel.get_agent(Top, "a")
    return root, agent_at(test)


def opened(**options: Any) -> Any:
    return open_test_kernel(roots=[Top], facets=[Kid], **options)


# ---- when


@pytest.mark.rule("I-31", "I-32")
async def test_a_schedule_fires_once_not_early_and_its_row_goes(clock: object) -> None:
    async with opened() as test:
        root, me = await opened_top(test)
        (one,) = await root.add(30, "note", "x")
        await test.advance(29.9)
        assert fired() == []
        assert me.schedules.get(one).due_at == EPOCH_MS + 30_000
        await test.advance(0.2)
        assert fired() == ["x"]
        await settle()
        assert me.schedules.get(one) is None
        assert tree_of(test).jobs.slot() is None


@pytest.mark.rule("F-291")
async def test_due_order_in_one_lane(clock: object) -> None:
    async with opened() as test:
        root, _me = await opened_top(test)
        for seconds, text in ((3, "c"), (1, "a"), (2, "b"), (1, "a2")):
            await root.add(seconds, "note", text)
        test.clock.jump(10)
        await test.advance(15)
        assert fired() == ["a", "a2", "b", "c"]


async def test_a_time_with_a_zone(clock: object) -> None:
    async with opened() as test:
        _root, me = await opened_top(test)
        when = datetime.fromtimestamp(EPOCH_MS / 1000 + 60, UTC)
        await me.schedule(when, "note", "x")
        with pytest.raises(UsageError, match="time zone"):
            await me.schedule(when.replace(tzinfo=None), "note")
        await test.advance(61)
        assert fired() == ["x"]


@pytest.mark.rule("F-271", "F-273")
@pytest.mark.parametrize("when", [-1, float("nan"), float("inf"), "61 * * * *", "x"])
async def test_a_time_that_is_none_is_refused(when: Any, clock: object) -> None:
    async with opened() as test:
        _root, me = await opened_top(test)
        with pytest.raises(UsageError):
            await me.schedule(when, "note")
        assert rows(tree_of(test), "SELECT count(*) FROM job") == [(0,)]


@pytest.mark.rule("F-267")
@pytest.mark.parametrize("callback", ["nothing", "__init__", "", len])
async def test_a_callback_that_is_none_is_refused(callback: Any, clock: object) -> None:
    async with opened() as test:
        _root, me = await opened_top(test)
        with pytest.raises(UsageError):
            await me.schedule(1, callback)


async def test_a_bound_method_is_a_callback(clock: object) -> None:
    async with opened() as test:
        _root, me = await opened_top(test)
        await me.schedule(1, me.note, "x")
        await test.advance(2)
        assert fired() == ["x"]


@pytest.mark.rule("HB-17", "I-37", "F-274", "F-275")
async def test_idempotent_schedules_are_one(clock: object) -> None:
    async with opened() as test:
        _root, me = await opened_top(test)
        ids = {(await me.schedule(60, "note", "x", idempotent=True)).id for _ in "abc"}
        ids |= {(await me.schedule(60, "note", "y", idempotent=True)).id}
        crons = {(await me.schedule("0 * * * *", "note", "x")).id for _ in "abc"}
        every = {(await me.schedule_every(60, "note")).id for _ in "abc"}
        loose = {(await me.schedule(60, "note", "x")).id for _ in "abc"}
        assert [len(ids), len(crons), len(every), len(loose)] == [2, 1, 1, 3]


# ---- what recurs


@pytest.mark.rule("HB-21", "I-33", "F-14", "F-306")
async def test_missed_ticks_are_one_catch_up_then_the_cadence(clock: object) -> None:
    async with opened() as test:
        _root, me = await opened_top(test)
        await me.schedule_every(10, "note", "tick")
        await test.advance(10.5)
        assert fired() == ["tick"]
        FIRED.clear()
        test.clock.jump(78 * 60 + 3)
        await test.advance(10)
        assert fired() == ["tick"], "one catch-up, however many were missed"
        await test.advance(60)
        assert len(FIRED) == 1 + 6
        at = (await me.schedule_every(10, "note", "tick")).at
        assert (at - EPOCH_MS) % 10_000 == 0, "an interval does not drift"


@pytest.mark.rule("I-32", "F-13", "F-306")
async def test_the_clock_going_back_fires_nothing_twice(clock: object) -> None:
    async with opened() as test:
        _root, me = await opened_top(test)
        await me.schedule(5, "note", "once")
        await test.advance(6)
        test.clock.jump(-3600)
        await test.advance(30)
        assert fired() == ["once"]


@pytest.mark.rule("kernel-mini-12", "F-285", "F-314")
async def test_a_recurring_one_gives_up_a_tick_and_goes_on(clock: object) -> None:
    async with opened() as test:
        _root, me = await opened_top(test)
        retry = Retry(max_attempts=2, base_delay=1, max_delay=1)
        made = await me.schedule_every(100, "fail", "f", retry=retry)
        await test.advance(120)
        assert fired() == ["f1", "f2"]
        kept = me.schedules.get(made.id)
        assert kept.error == "ValueError: bad f"
        assert (kept.dead, kept.attempts) == (False, 0)
        await test.advance(100)
        assert fired() == ["f1", "f2", "f1", "f2"]


# ---- what fails


@pytest.mark.rule("I-31", "C-054")
async def test_back_off_and_the_dead_letter(clock: object) -> None:
    async with opened() as test:
        root, me = await opened_top(test)
        (one,) = await root.add(0, "fail", "f")
        await test.advance(500)
        assert fired() == ["f1", "f2", "f3"]
        gaps = [b - a for (a, _), (b, _) in pairwise(FIRED)]
        assert 5 <= gaps[0] <= 10
        assert 10 <= gaps[1] <= 20
        dead = me.schedules.get(one)
        assert (dead.dead, dead.error) == (True, "ValueError: bad f")
        assert tree_of(test).jobs.slot() is None, "the dead rest"
        assert me.schedules.replay(one)
        await test.advance(1)
        assert fired() == ["f1", "f2", "f3", "f1"]


@pytest.mark.rule("HB-19", "I-36", "F-268", "F-269", "F-309", "F-316")
async def test_one_bad_row_does_not_stop_the_others(clock: object) -> None:
    async with opened() as test:
        root, me = await opened_top(test)
        ids = [(await root.add(5, "note", f"n{i}"))[0] for i in range(9)]
        ids.append(await root.kid_later("gone", 5, "never"))
        tree = tree_of(test)
        with tree.transaction():
            tree.db.execute("UPDATE job SET payload = '{bad' WHERE id = ?", (ids[4],))
            tree.db.execute("UPDATE job SET what = 'gone' WHERE id = ?", (ids[7],))
            tree.db.execute("UPDATE node SET class = 'Gone' WHERE name = 'gone'")
        await tree.evict(
            tree.nodes[rows(tree, "SELECT slot FROM node WHERE name='gone'")[0][0]]
        )
        await test.advance(500)
        assert sorted(fired()) == [f"n{i}" for i in range(9) if i not in (4, 7)]
        listed = {
            str(r[0]): r[1] for r in rows(tree, "SELECT id, error FROM job WHERE dead")
        }
        assert set(listed) == {ids[4], ids[7], ids[9]}
        assert all(listed.values()), "each says why"
        told = me.schedules.list()
        assert len(told) == 2, "one that cannot be read does not hide the list"


async def test_a_failure_in_an_aborted_callee_is_a_failure(clock: object) -> None:
    async with opened() as test:
        root, me = await opened_top(test)
        (one,) = await root.add(0, "calls_an_aborted_one")
        await test.advance(500)
        assert fired() == ["called"] * 3
        assert me.schedules.get(one).dead
        assert "FacetAborted" in me.schedules.get(one).error


@pytest.mark.rule("I-36", "F-292")
async def test_a_hanging_owner_delays_nobody_else(clock: object) -> None:
    async with opened() as test:
        root, me = await opened_top(test)
        kid = await me.dynamic_agents.get(Kid, "k")
        await agent_at(test, ("Kid", "k")).schedule(1, "hang")
        await kid.later(2, "behind")
        await root.add(2, "note", "other")
        await test.advance(100)
        assert fired() == ["hangs", "other"]
        await test.advance(600)
        assert "k:behind" in fired(), "a callback has a deadline"


async def test_a_job_behind_a_busy_lane_is_not_hot(clock: object) -> None:
    async with opened() as test:
        root, _me = await opened_top(test)
        await root.add(0, "slow", "s", 3)
        passes = 0
        tree = tree_of(test)
        refresh = tree.jobs._refresh

        def counted() -> None:
            nonlocal passes
            passes += 1
            refresh()

        tree.jobs._refresh = counted  # type: ignore[method-assign]
        await test.advance(14)
        assert fired() == ["s", "s", "s"]
        assert passes < 30


# ---- the queue


@pytest.mark.rule("F-437", "F-441")
async def test_the_queue_is_first_in_first_out_and_waits_for_its_head(
    clock: object,
) -> None:
    async with opened() as test:
        _root, me = await opened_top(test)
        me.queue.put(
            "fail", "f", retry=Retry(max_attempts=2, base_delay=60, max_delay=60)
        )
        me.queue.put("note", "b")
        me.queue.put("note", "c")
        await test.advance(20)
        assert fired() == ["f1"], "its head backs off, so they wait"
        await test.advance(60)
        assert fired() == ["f1", "f2", "b", "c"]
        (dead,) = me.queue.list()
        assert dead.dead


async def test_what_was_taken_out_of_the_queue_does_not_run(clock: object) -> None:
    async with opened() as test:
        _root, me = await opened_top(test)
        one, _two = me.queue.put("note", "1"), me.queue.put("note", "2")
        assert me.queue.remove(one)
        assert not me.queue.remove(one)
        await settle()
        assert fired() == ["2"]
        me.queue.put("slow", "3")
        me.queue.put("note", "4")
        assert me.queue.clear("note") == 1
        await test.advance(10)
        assert fired() == ["2", "3"]


@pytest.mark.limit("schedules_per_agent")
@pytest.mark.rule("I-43", "F-41")
async def test_what_an_agent_owes_itself_is_bounded(clock: object) -> None:
    limits = Limits(schedules_per_agent=3)
    async with opened(limits=limits) as test:
        root, me = await opened_top(test)
        await me.schedule(9, "note", "a", idempotent=True)
        await me.schedule_every(9, "note", "b")
        me.queue.put("slow", "c")
        for add in (
            lambda: me.schedule(9, "note", "d"),
            lambda: me.schedule_every(8, "note", "d"),
        ):
            error = await raises(CapacityError, add)
            assert "schedules_per_agent" in str(error)
        with pytest.raises(CapacityError):
            me.queue.put("note", "d")
        await me.schedule(9, "note", "a", idempotent=True)
        await root.kid_later("k", 9, "of another")
        await test.advance(8)
        assert fired() == ["c"]
        me.queue.put("note", "d")
        await test.advance(2)
        assert sorted(fired()) == ["a", "b", "c", "d", "k:of another"]


# ---- changing them


@pytest.mark.rule("F-256")
async def test_pause_resume_run_now_cancel(clock: object) -> None:
    async with opened() as test:
        root, me = await opened_top(test)
        (one,) = await root.add(10, "note", "x")
        assert me.schedules.pause(one)
        await test.advance(20)
        assert fired() == []
        assert tree_of(test).jobs.slot() is None
        assert me.schedules.resume(one)
        await test.advance(1)
        assert fired() == ["x"]
        (two,) = await root.add(1000, "note", "y")
        assert me.schedules.run_now(two)
        await test.advance(1)
        assert fired() == ["x", "y"]
        (three,) = await root.add(10, "note", "z")
        assert me.schedules.cancel(three)
        assert not me.schedules.cancel(three)
        assert not me.schedules.pause("nonsense")
        await test.advance(20)
        assert fired() == ["x", "y"]


@pytest.mark.rule("I-35", "F-257")
async def test_an_agent_has_only_its_own_schedules(clock: object) -> None:
    async with opened() as test:
        root, me = await opened_top(test)
        theirs = await root.kid_later("k", 10, "x")
        assert me.schedules.get(theirs) is None
        assert not me.schedules.cancel(theirs)
        await test.advance(20)
        assert fired() == ["k:x"]


@pytest.mark.rule("kernel-mini-3", "F-290")
@pytest.mark.parametrize("steps", range(6))
async def test_a_cancelled_schedule_does_not_fire_once_that_returned(
    steps: int, clock: object
) -> None:
    """The worker looks again in the step that enters the owner's code."""
    async with opened() as test:
        root, me = await opened_top(test)
        (one,) = await root.add(0, "note", "x")
        for _ in range(steps):
            await trio.lowlevel.checkpoint()
        before = len(FIRED)
        me.schedules.cancel(one)
        await test.advance(10)
        assert len(FIRED) == before


# ---- lives


@pytest.mark.rule("I-34")
async def test_a_due_call_wakes_a_sleeping_facet(clock: object) -> None:
    async with opened(idle_s=5) as test:
        root, _me = await opened_top(test)
        await root.kid_later("k", 100, "x")
        await test.advance(60)
        assert test.tree("Top", "a") is None
        await test.advance(50)
        assert fired() == ["k:x"]


@pytest.mark.rule("I-34", "F-067")
async def test_a_job_does_not_make_what_is_deleted(clock: object) -> None:
    async with opened() as test:
        root, me = await opened_top(test)
        await root.kid_later("k", 10, "x")
        await root.drop("k")
        await test.advance(20)
        assert fired() == []
        assert not me.dynamic_agents.has(Kid, "k")


@pytest.mark.rule("I-31")
async def test_after_a_crash_what_was_held_is_due_again(clock: object) -> None:
    async with opened() as test:
        root, _me = await opened_top(test)
        await root.add(1, "slow", "s")
        await test.advance(3)
        assert fired() == ["s"]
        held = rows(tree_of(test), "SELECT held FROM job")[0][0]
        await test.crash()
        await test.reopen()
        await test.advance(0.5)
        assert fired() == ["s", "s"], "at least once"
        again = rows(tree_of(test), "SELECT held FROM job")[0][0]
        assert again > held
        assert again >> 32 > held >> 32
        await test.advance(10)
        assert rows(tree_of(test), "SELECT count(*) FROM job") == [(0,)]


@pytest.mark.rule("I-46", "C-037")
async def test_recovering_twice_is_recovering_once(clock: object) -> None:
    async with opened() as test:
        root, _me = await opened_top(test)
        await root.add(1, "slow", "s")
        await test.advance(3)
        tree = tree_of(test)
        await test.crash()
        await test.reopen()
        await test.kernel.get_agent(Top, "a")
        tree = tree_of(test)
        tree._release_former_lives()
        image = rows(tree, "SELECT id, due_at, attempts, held FROM job")
        tree._release_former_lives()
        assert rows(tree, "SELECT id, due_at, attempts, held FROM job") == image


async def test_a_planned_stop_gives_the_attempt_back(clock: object) -> None:
    async with opened(abort_grace_s=1) as test:
        root, _me = await opened_top(test)
        await root.add(0, "slow", "s")
        for _ in range(8):
            await test.advance(1)
            await test.close()
            await test.reopen()
        assert len(FIRED) >= 8
        await test.advance(10)
        assert rows(tree_of(test), "SELECT count(*) FROM job") == [(0,)]


@pytest.mark.rule("HB-25", "I-31")
@pytest.mark.parametrize("offset", [-0.01, 0, 0.01, 0.5])
async def test_what_comes_due_while_stopping_is_kept(
    offset: float, clock: object
) -> None:
    async with opened(abort_grace_s=2) as test:
        root, _me = await opened_top(test)
        await root.add(10, "note", "x")
        await test.advance(10 - offset)
        await test.close()
        test.clock.jump(50)
        await test.reopen()
        await test.advance(20)
        assert fired() == ["x"]


@pytest.mark.rule("HB-25")
@pytest.mark.parametrize("passes", range(8))
async def test_what_was_just_taken_when_the_tree_closes_wakes_it_again(
    passes: int, clock: object
) -> None:
    async with opened() as test:
        root, _me = await opened_top(test)
        await root.add(10, "note", "x")
        await test.evict([("Top", "a")])
        test.clock.jump(60)
        await test.kernel.host.open_root(TreeKey("Top", "a"))
        for _ in range(passes):
            await trio.lowlevel.checkpoint()
        await test.close()
        await test.reopen()
        await test.advance(30)
        assert fired() == ["x"]


@pytest.mark.rule("HB-02", "F-324", "F-086")
async def test_destroy_from_a_callback_leaves_no_zombie(clock: object) -> None:
    async with opened() as test:
        root, me = await opened_top(test)
        await root.kid("k")
        kid = agent_at(test, ("Kid", "k"))
        Kid.bye = Top.end_self  # type: ignore[attr-defined]
        try:
            await kid.schedule(10, "bye")
            await kid.schedule_every(5, "note", "tick")
            await test.advance(60)
        finally:
            del Kid.bye  # type: ignore[attr-defined]
        assert fired().count("end") == 1
        assert not me.dynamic_agents.has(Kid, "k")
        tree = tree_of(test)
        assert rows(tree, "SELECT count(*) FROM job") == [(0,)]
        assert rows(tree, "SELECT count(*) FROM node") == [(1,)]


async def test_an_aborted_callee_is_told_so(clock: object) -> None:
    async with opened() as test:
        _root, me = await opened_top(test)
        kid = await me.dynamic_agents.get(Kid, "k")
        await me.dynamic_agents.abort(Kid, "k", "why")
        with pytest.raises(FacetAborted):
            await kid.wait()


async def test_time_outs_that_are_taken_back_leave_nothing_in_memory(
    clock: object,
) -> None:
    async with open_test_kernel(roots=[Top]) as test:
        await test.kernel.get_agent(Top, "a")
        me = agent_at(test)
        for n in range(500):
            made = await me.schedule(1000 + n, "note")
            await settle()
            me.schedules.cancel(made.id)
        assert len(tree_of(test).jobs._heap) < 100
