"""The one alarm of a tree: always the earliest job, and never lost."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from culet.kernel import Agent, Due, Limits, Retry, Schedule
from culet.kernel.errors import StorageError, StorageFull
from culet.kernel.ports import TreeKey
from culet.kernel.testing import EPOCH_MS, Harness, open_test_kernel
from kernel.agents import agent_at, raises, rows, settle, tree_of

TOLD: list[Any] = []
ONCE = Retry(max_attempts=1)


@pytest.fixture(autouse=True)
def fresh() -> None:
    TOLD.clear()


class Kid(Agent):
    async def on_start(self) -> None:
        TOLD.append(f"start {self.name}")

    async def say(self, payload: Any, schedule: Schedule) -> None:
        TOLD.append(payload)

    async def fail(self, payload: Any, schedule: Schedule) -> None:
        TOLD.append(payload)
        raise ValueError("bad")

    async def slow(self, payload: Any, schedule: Schedule) -> None:
        TOLD.append("in")
        await trio.sleep(payload)
        TOLD.append("out")

    async def calls_a_kid(self, payload: Any, schedule: Schedule) -> None:
        kid: Any = await self.dynamic_agents.get(Kid, "k")
        TOLD.append(await kid.asks_back())

    async def asks_back(self) -> list[str]:
        await self.schedule(100, "say", "by the kid")
        parent: Any = await self.parent_agent(Top)
        return list(await parent.names())


class Top(Kid):
    async def names(self) -> list[str]:
        return [child.name for child in self.dynamic_agents.list()]


def opened(**options: Any) -> Any:
    return open_test_kernel(roots=[Top], facets=[Kid], **options)


async def top_of(test: Harness) -> Any:
    await test.kernel.get_agent(Top, "a")
    return agent_at(test)


async def kid_of(test: Harness, name: str = "k") -> Any:
    top = await top_of(test)
    await top.dynamic_agents.get(Kid, name)
    return agent_at(test, ("Kid", name))


def said() -> list[Any]:
    return [t for t in TOLD if not str(t).startswith("start")]


def slot_s(test: Harness) -> float | None:
    at = tree_of(test).jobs.slot()
    return None if at is None else (at - EPOCH_MS) / 1000


@pytest.mark.rule("F-294", "F-295", "F-300", "F-304", "I-30")
async def test_the_slot_is_the_earliest_of_all_that_anybody_in_the_tree_owes(
    clock: object,
) -> None:
    async with opened() as test:
        kid = await kid_of(test)
        top = agent_at(test)
        assert slot_s(test) is None
        far = await kid.schedule(500, "say")
        assert slot_s(test) == 500
        near = await top.schedule(200, "say")
        assert slot_s(test) == 200
        await kid.schedules.many([Due(300, "say"), Due(90, "say")])
        assert slot_s(test) == 90
        assert kid.schedules.pause(kid.schedules.list(end=EPOCH_MS + 90_000)[0].id)
        assert slot_s(test) == 200
        assert top.schedules.cancel(near.id)
        assert slot_s(test) == 300
        assert kid.schedules.run_now(far.id)
        assert slot_s(test) == 0, "what is overdue is due at once"
        await settle()
        assert slot_s(test) == 300
        await top.dynamic_agents.delete(Kid, "k")
        await settle()
        assert slot_s(test) is None
        await test.evict([("Top", "a")])
        assert test.kernel.host.sleeping == {TreeKey("Top", "a"): None}


@pytest.mark.rule("F-296", "F-297", "F-298", "F-299", "F-302", "F-303")
async def test_what_runs_or_keeps_itself_awake_arms_nothing(clock: object) -> None:
    async with opened() as test:
        kid = await kid_of(test)
        top = agent_at(test)
        await kid.schedule(400, "say")
        for agent in (top, kid):
            async with agent.keep_alive():
                assert slot_s(test) == 400
                async with agent.keep_alive():
                    assert slot_s(test) == 400
                assert slot_s(test) == 400
        await kid.fibers.start("f", trio.sleep_forever)
        await top.schedule_every(10, "slow", 60)
        await test.advance(11)
        assert TOLD[-1] == "in"
        assert slot_s(test) == 400, "a call that runs is looked at by nobody"
        jobs, passes = tree_of(test).jobs, 0
        refresh = jobs._refresh

        def counted() -> None:
            nonlocal passes
            passes += 1
            refresh()

        jobs._refresh = counted  # type: ignore[method-assign]
        await test.advance(50)
        assert passes <= 7, "but for the wall clock"


@pytest.mark.rule("F-305", "I-30")
@pytest.mark.parametrize("down_s", [0, 5, 500])
async def test_what_was_durable_is_called_after_a_crash_though_nobody_asks(
    down_s: float, clock: object
) -> None:
    async with opened() as test:
        kid = await kid_of(test)
        await kid.schedule(60, "say", "x")
        await kid.durable()
        await test.advance(1)
        await test.crash()
        test.clock.jump(down_s)
        await test.reopen()
        await test.advance(58.5 - down_s if down_s < 59 else 0.5)
        early = down_s < 59
        assert said() == ([] if early else ["x"])
        await test.advance(1)
        assert said() == ["x"]


@pytest.mark.rule("F-307", "F-301")
async def test_owners_start_before_what_is_due_and_a_destroyed_root_calls_nobody(
    clock: object,
) -> None:
    async with opened() as test:
        kid = await kid_of(test)
        top = agent_at(test)
        await top.schedule(10, "say", "top's")
        await kid.schedule(10, "say", "kid's")
        await top.durable()
        await test.crash()
        test.clock.jump(60)
        TOLD.clear()
        await test.reopen()
        await test.advance(1)
        assert TOLD.index("start a") < TOLD.index("top's")
        assert TOLD.index("start a") < TOLD.index("start k") < TOLD.index("kid's")

        top = await top_of(test)
        await top.schedule(10, "say", "never")
        await top.durable()
        TOLD.clear()
        test.faults.die_in_record(landed=True)  # its mark is on the disk, no more
        await raises(StorageError, test.kernel.destroy_agent, Top, "a")
        assert test.faults.dead
        await test.crash()
        test.clock.jump(60)
        await test.reopen()
        await test.advance(60)
        assert said() == []


@pytest.mark.rule("F-308")
@pytest.mark.parametrize("failures", [1, 7])
async def test_a_take_that_cannot_be_written_is_tried_until_it_can(
    failures: int, clock: object
) -> None:
    async with opened() as test:
        kid = await kid_of(test)
        await kid.schedule(10, "say", "x")
        await kid.schedule_every(10, "say", "tick")
        await kid.durable()
        test.faults.fail_commit(error=StorageFull, stay=True)
        await test.advance(10 + failures)
        assert said() == []
        looked = test.faults.commits
        await test.advance(10)
        assert 0 < test.faults.commits - looked <= 25, "tried again, and not hot"
        test.faults.heal()
        await test.advance(2.5)
        assert said() == ["x", "tick"]


@pytest.mark.rule("F-326", "F-293", "I-33")
async def test_a_root_is_called_once_at_a_time_and_serves_its_children_meanwhile(
    clock: object,
) -> None:
    async with opened() as test:
        await kid_of(test)
        top = agent_at(test)
        await top.schedules.many([Due(5, "slow", 10), Due(5, "slow", 10)])
        await top.schedule(6, "calls_a_kid")
        other = await kid_of(test, "other")
        await other.schedule(7, "say", "meanwhile")
        await test.advance(8)
        assert said() == ["in", "meanwhile"], "one lane each"
        await test.advance(30)
        assert said() == ["in", "meanwhile", "out", "in", "out", ["k", "other"]]


@pytest.mark.rule("F-310", "F-311", "F-313")
async def test_an_upgrade_or_a_planned_stop_in_a_call_is_no_try_of_it(
    clock: object,
) -> None:
    async with opened(abort_grace_s=1) as test:
        kid = await kid_of(test)
        made = await kid.schedule(1, "slow", 30, retry=ONCE)
        behind = await kid.schedule(1, "say", "behind", retry=ONCE)
        for _ in range(7):
            await test.advance(2)
            assert TOLD[-1] == "in"
            await test.close()
            await test.reopen()
        kid = await kid_of(test)
        assert kid.schedules.get(made.id).error is None
        await test.advance(40)
        assert said() == [*["in"] * 8, "out", "behind"]
        assert kid.schedules.get(behind.id) is None
        assert kid.schedules.list() == []


@pytest.mark.rule("F-311", "F-309")
async def test_what_fails_for_a_while_has_its_tries_and_then_rests(
    clock: object,
) -> None:
    async with opened() as test:
        kid = await kid_of(test)
        tries = Retry(max_attempts=4, base_delay=1, max_delay=1)
        made = await kid.schedule(1, "fail", "f", retry=tries)
        await kid.schedule(1, "say", "neighbour")
        await test.advance(60)
        assert said() == ["f", "neighbour", "f", "f", "f"]
        assert kid.schedules.get(made.id).dead


# ---- taken together


@pytest.mark.limit("attempts")
@pytest.mark.rule("F-317", "F-318", "F-319", "F-322", "I-31")
@pytest.mark.parametrize("killer", [0, 2])
async def test_a_call_that_kills_the_process_takes_no_neighbour_with_it(
    killer: int, clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken together, they are counted apart from the first crash on."""
    async with opened(limits=Limits(attempts=3)) as test:
        kid = await kid_of(test)

        async def kills(self: Any, payload: Any, schedule: Schedule) -> None:
            TOLD.append("killer")
            test.faults.dead = True  # nothing of it is written any more
            await trio.sleep_forever()

        monkeypatch.setattr(Kid, "kills", kills, raising=False)
        dues = [Due(1, "say", n, retry=ONCE) for n in range(4)]
        dues.insert(killer, Due(1, "kills"))
        made = await kid.schedules.many(dues)
        await kid.durable()
        for _ in range(6):
            await test.advance(700)
            if not test.faults.dead:
                break
            await test.crash()
            await test.reopen()
        assert TOLD.count("killer") == 3
        assert {n for n in TOLD if isinstance(n, int)} == {0, 1, 2, 3}
        kid = await kid_of(test)
        assert [s.id for s in kid.schedules.list()] == [made[killer].id]
        (dead,) = kid.schedules.list()
        assert (dead.dead, dead.error) == (True, "the process ended each time")


@pytest.mark.limit("attempts")
@pytest.mark.rule("F-317", "F-318", "F-319", "F-322")
@pytest.mark.parametrize("heals_after", [None, 3, 2])
@pytest.mark.parametrize("cron", [False, True])
async def test_what_recurs_and_kills_the_process_rests_unless_it_goes_well(
    heals_after: int | None,
    cron: bool,
    clock: object,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with opened(limits=Limits(attempts=3)) as test:
        kid = await kid_of(test)

        async def kills(self: Any, payload: Any, schedule: Schedule) -> None:
            TOLD.append("killer")
            if heals_after is not None and TOLD.count("killer") > heals_after:
                return
            test.faults.dead = True  # nothing of it is written any more
            await trio.sleep_forever()

        monkeypatch.setattr(Kid, "kills", kills, raising=False)
        if cron:
            made = await kid.schedule("0 * * * *", "kills")
        else:
            made = await kid.schedule_every(3600, "kills")
        await kid.schedule_every(3600, "say", "neighbour")
        await kid.durable()
        for _ in range(12):
            await test.advance(3700)
            if test.faults.dead:
                await test.crash()
                await test.reopen()
        kid = await kid_of(test)
        kept = kid.schedules.get(made.id)
        assert TOLD.count("neighbour") >= 5
        if heals_after is None:
            assert TOLD.count("killer") == 3 + 1, "one life for the tick after"
            assert (kept.dead, kept.error) == (True, "the process ended each time")
            assert kid.schedules.replay(made.id), "somebody has mended it"
        else:
            assert TOLD.count("killer") > 3 + 3
            assert (kept.dead, kept.attempts, kept.error) == (False, 0, None)


@pytest.mark.rule("F-317", "F-318")
@pytest.mark.parametrize("tried", [0, 1])
async def test_what_was_tried_before_is_taken_alone(tried: int, clock: object) -> None:
    async with opened() as test:
        kid = await kid_of(test)
        made = await kid.schedules.many([Due(10, "slow", 5) for _ in range(3)])
        tree = tree_of(test)
        with tree.transaction():
            sql = "UPDATE job SET attempts = 1 WHERE id = ?"
            tree.db.execute(sql, (int(made[tried].id),))
        await test.advance(12)
        held = rows(tree, "SELECT id FROM job WHERE held IS NOT NULL")
        assert held == [(int(made[0].id),)]
        await test.advance(20)
        assert said() == ["in", "out"] * 3


@pytest.mark.rule("I-36")
async def test_what_waits_behind_a_slow_call_keeps_its_order_and_its_tries(
    clock: object,
) -> None:
    async with opened() as test:
        kid = await kid_of(test)
        await kid.schedule(10, "slow", 30)
        others = await kid.schedules.many([Due(10, "say", n) for n in range(5)])
        await test.advance(12)
        held = rows(tree_of(test), "SELECT count(*) FROM job WHERE held IS NOT NULL")
        assert held == [(6,)], "taken together"
        urgent = await kid.schedule(0, "say", "not before them")
        assert kid.schedules.cancel(others[3].id)
        assert kid.schedules.pause(others[4].id)
        await test.advance(30)
        assert said() == ["in", "out", 0, 1, 2, "not before them"]
        assert kid.schedules.get(urgent.id) is None
        assert kid.schedules.get(others[4].id).attempts == 0
        assert kid.schedules.resume(others[4].id)
        await test.advance(1)
        assert said()[-1] == 4


async def test_an_abort_in_the_first_call_costs_the_others_no_try(
    clock: object,
) -> None:
    async with opened() as test:
        kid = await kid_of(test)
        await kid.schedule(10, "slow", 5)
        for n in range(3):
            await kid.schedule(10, "say", n, retry=ONCE)
        await test.advance(11)
        assert said() == ["in"]
        await agent_at(test).dynamic_agents.abort(Kid, "k")
        await settle()
        assert said() == ["in", 0, 1, 2], "they are due as they were"
        await test.advance(20)
        assert said() == ["in", 0, 1, 2, "in", "out"]


@pytest.mark.rule("F-437", "F-438")
async def test_a_queue_that_was_taken_together_waits_for_a_head_that_backs_off(
    clock: object,
) -> None:
    async with opened() as test:
        kid = await kid_of(test)
        kid.queue.put("say", "a")
        kid.queue.put(
            "fail", "f", retry=Retry(max_attempts=2, base_delay=9, max_delay=9)
        )
        for text in "bc":
            kid.queue.put("say", text)
        await test.advance(3)
        assert said() == ["a", "f"]
        assert rows(tree_of(test), "SELECT attempts, held FROM job ORDER BY id") == [
            (1, None), (0, None), (0, None),
        ]  # fmt: skip
        await test.advance(9)
        assert said() == ["a", "f", "f", "b", "c"]


@pytest.mark.limit("jobs_at_once", "jobs_in_batch")
@pytest.mark.rule("I-36", "F-292", "F-316")
async def test_owners_that_hang_with_much_behind_them_take_nobodys_turn(
    clock: object,
) -> None:
    limits = Limits(jobs_at_once=8, jobs_in_batch=4)
    async with opened(limits=limits) as test:
        top = await top_of(test)
        for n in range(6):
            kid = await kid_of(test, f"k{n}")
            await kid.schedule(10, "slow", 500)
            await kid.schedules.many([Due(10, "say", f"behind {n}")] * 9)
        await top.schedules.many([Due(11, "say", n) for n in range(20)])
        await test.advance(12)
        assert said() == [*["in"] * 6, *range(20)]
        jobs = tree_of(test).jobs
        assert len(jobs._waiting) <= 8
        await test.advance(600)
        assert len([t for t in said() if "behind" in str(t)]) == 54
        assert jobs._waiting == set()
        assert jobs._workers == 0
