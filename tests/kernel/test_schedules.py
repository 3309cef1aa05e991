"""Schedules: what can be asked for, what becomes of it, what is told of it."""

from __future__ import annotations

import logging
import math
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
import trio

from culet.kernel import (
    Agent,
    Due,
    Limits,
    Retry,
    Schedule,
    retry_call,
)
from culet.kernel.errors import CapacityError, UsageError
from culet.kernel.events import Crowd, Owed
from culet.kernel.testing import EPOCH_MS, Harness, open_test_kernel
from kernel.agents import agent_at, raises, rows, settle, tree_of

TOLD: list[Any] = []
ONCE = Retry(max_attempts=1)


@pytest.fixture(autouse=True)
def fresh() -> None:
    TOLD.clear()


class Kid(Agent):
    async def at(self, payload: Any, schedule: Schedule) -> None:
        TOLD.append(schedule)

    retry = Retry(max_attempts=2, base_delay=1, max_delay=1)

    async def say(self, payload: Any, schedule: Schedule) -> None:
        TOLD.append(payload)

    async def look(self, payload: Any, schedule: Schedule) -> None:
        TOLD.append((schedule.at - EPOCH_MS, (schedule.called_at or 0) - EPOCH_MS))

    async def fail(self, payload: Any, schedule: Schedule) -> None:
        TOLD.append(payload)
        raise ValueError("bad")

    async def slow_fail(self, payload: Any, schedule: Schedule) -> None:
        TOLD.append(payload)
        await trio.sleep(10)
        raise ValueError("bad")

    async def slow(self, payload: Any, schedule: Schedule) -> None:
        TOLD.append(("in", trio.current_time()))
        await (trio.sleep_forever() if payload is None else trio.sleep(payload))
        TOLD.append(("out", trio.current_time()))

    async def on_error(self, error: BaseException, *, connection: Any = None) -> None:
        TOLD.append(f"on_error: {error}")
        raise RuntimeError("and this is swallowed")


class Mid(Kid):
    pass


class Top(Kid):
    pass


def opened(**options: Any) -> Any:
    options.setdefault("roots", [Top])
    options.setdefault("facets", [Mid, Kid])
    return open_test_kernel(**options)


async def top_of(test: Harness) -> Any:
    await test.kernel.get_agent(Top, "a")
    return agent_at(test)


async def below(test: Harness) -> tuple[Any, Any, Any]:
    """Return a root, a facet of it, and a facet of that."""
    top = await top_of(test)
    await top.dynamic_agents.get(Mid, "m")
    mid = agent_at(test, ("Mid", "m"))
    await mid.dynamic_agents.get(Kid, "k")
    return top, mid, agent_at(test, ("Mid", "m"), ("Kid", "k"))


def listen(test: Harness, *channels: str) -> list[tuple[str, Any]]:
    heard: list[tuple[str, Any]] = []
    for channel in channels:
        test.kernel.subscribe(
            channel, lambda name, _tree, _subject, what: heard.append((name, what))
        )
    return heard


# ---- what is refused


@pytest.mark.rule("F-281")
@pytest.mark.parametrize("seconds", [0, -1, math.nan, math.inf, "5", None, True, 1e-4])
async def test_an_interval_is_a_positive_number(seconds: Any, clock: object) -> None:
    async with opened() as test:
        top = await top_of(test)
        error = await raises(UsageError, top.schedule_every, seconds, "say")
        assert "a positive number of seconds" in str(error)
        assert top.schedules.list() == []


@pytest.mark.rule("F-281")
async def test_an_interval_has_at_most_thirty_days(clock: object) -> None:
    async with opened() as test:
        top = await top_of(test)
        await top.schedule_every(2_592_000, "say")
        error = await raises(UsageError, top.schedule_every, 2_592_001, "say")
        assert "2592000" in str(error)


@pytest.mark.rule("F-273", "F-271")
@pytest.mark.parametrize("when", [None, True, "", b"1", [5], {"in": 5}, 1e11])
async def test_a_time_of_no_kind_is_refused(when: Any, clock: object) -> None:
    async with opened() as test:
        top = await top_of(test)
        await raises(UsageError, top.schedule, when, "say")
        await raises(UsageError, top.schedules.many, [Due(when, "say")])
        assert rows(tree_of(test), "SELECT 1 FROM job") == []


@pytest.mark.parametrize(
    "options",
    [
        {"jitter": -1},
        {"jitter": math.nan},
        {"jitter": 1e9},
        {"misfire": "all"},
        {"misfire": "none"},  # of what comes once
        {"tz": "Europe/Berlin"},
    ],
)
async def test_a_policy_that_makes_no_sense_is_refused(
    options: Any, clock: object
) -> None:
    async with opened() as test:
        top = await top_of(test)
        await raises(UsageError, lambda: top.schedule(5, "say", **options))
        if options.get("misfire") != "none" and "tz" not in options:
            cron = "0 * * * *"
            await raises(UsageError, lambda: top.schedule(cron, "say", **options))
            await raises(UsageError, lambda: top.schedule_every(9, "say", **options))
        await raises(UsageError, lambda: top.schedule_every(9, "say", jitter=9))
        assert rows(tree_of(test), "SELECT 1 FROM job") == []


@pytest.mark.rule("F-287", "F-443", "F-447")
async def test_a_policy_of_retries_is_checked_when_it_is_given_and_kept_with_the_call(
    clock: object,
) -> None:
    bad: list[dict[str, Any]] = [
        {"max_attempts": 0}, {"max_attempts": 1.5}, {"max_attempts": math.nan},
        {"max_attempts": True}, {"base_delay": 0}, {"base_delay": math.inf},
        {"base_delay": "1"}, {"max_delay": math.nan}, {"base_delay": 4, "max_delay": 3},
    ]  # fmt: skip
    for options in bad:
        with pytest.raises(UsageError):
            Retry(**options)
    assert Retry(base_delay=3, max_delay=3).max_delay == 3
    async with opened() as test:
        top = await top_of(test)
        own = await top.schedule(5, "fail", "own", retry=ONCE)
        usual = await top.schedule(5, "fail", "usual")
        queued = [top.queue.put("slow", 30), top.queue.put("say", retry=ONCE)]
        assert own.retry == ONCE == top.schedules.get(own.id).retry
        assert usual.retry == Top.retry == top.schedules.get(usual.id).retry
        policies = [top.queue.get(i).retry for i in queued]
        assert policies == [Top.retry, ONCE] == [s.retry for s in top.queue.list()]
        await test.advance(20)
        assert TOLD.count("own") == 1
        assert TOLD.count("usual") == 2, "as its class says"


@pytest.mark.rule("F-446", "F-448")
async def test_retry_call_refuses_nonsense_and_waits_within_its_bounds(
    clock: object,
) -> None:
    tries: list[float] = []

    async def fn() -> None:
        tries.append(trio.current_time())
        raise ValueError("again")

    for options in ({"max_attempts": 0}, {"max_attempts": 2.5}, {"base_delay": -1}):
        await raises(UsageError, lambda o=options: retry_call(fn, **o))
    assert tries == []

    class Caller(Agent):
        async def go(self) -> None:
            await retry_call(fn, max_attempts=7, base_delay=1, max_delay=8)

    async with open_test_kernel(roots=[Caller]) as test:
        caller: Any = await test.kernel.get_agent(Caller, "c")
        for _ in range(5):
            tries.clear()
            await raises(ValueError, caller.go)
            gaps = [b - a for a, b in pairwise(tries)]
            assert len(gaps) == 6
            for n, gap in enumerate(gaps, 1):
                assert 0 < gap <= min(2**n, 8) + 1e-3
            assert gaps != sorted({*gaps}) or len({*gaps}) > 3, "chance has a part"


# ---- many at once


async def test_many_are_stored_in_one_commit_and_come_as_if_one_by_one(
    clock: object,
) -> None:
    async with opened() as test:
        top = await top_of(test)
        heard = listen(test, "schedule:create")
        before = tree_of(test).store.commits
        when = datetime.fromtimestamp(EPOCH_MS / 1000 + 30, UTC)
        made = await top.schedules.many(
            [
                Due(5, "say", {"n": 1}),
                Due(when, top.say, "b", retry=ONCE),
                Due("* * * * *", "say", "c", tz="Europe/Berlin", misfire="none"),
                Due(5, "say", {"n": 1}),
                Due(5, "say", "same", idempotent=True),
                Due(5, "say", "same", idempotent=True),
            ]
        )
        assert tree_of(test).store.commits == before + 1
        assert len(made) == 6
        assert made[4].id == made[5].id
        ids = [int(s.id) for s in made[:5]]
        assert ids == sorted(set(ids))
        assert {s.id: s for s in top.schedules.list()} == {s.id: s for s in made}
        assert [d.id for _, d in heard] == [s.id for s in made[:5]]
        again = await top.schedules.many([Due(5, "say", "same", idempotent=True)])
        assert again == [made[4]]
        assert await top.schedules.many([]) == []
        await test.advance(70)
        assert TOLD == [{"n": 1}, {"n": 1}, "same", "b", "c"]


@pytest.mark.rule("F-254", "F-274", "F-275", "I-37")
async def test_what_is_equal_is_the_same_schedule_however_it_is_written(
    clock: object,
) -> None:
    one, other = {8}, {0}
    one.add(0)
    other.add(8)
    assert list(one) != list(other), "each process has its own order of sets"
    first = {"a": 1, "tags": one}
    second = {"tags": other, "a": 1}
    async with opened() as test:
        top = await top_of(test)
        made = [
            (await top.schedule_every(seconds, "say", payload)).id
            for seconds, payload in ((60, first), (60.0, second))
        ]
        made += [
            (await top.schedule("0 3 * * *", "say", payload, tz=tz)).id
            for payload, tz in ((first, None), (second, "UTC"))
        ]
        made += [
            (await top.schedule(delay, "say", payload, idempotent=True)).id
            for delay, payload in ((5, first), (5.0, second))
        ]
        assert made[::2] == made[1::2]
        assert len(set(made)) == 3
        assert (await top.schedule_every(60.5, "say", first)).id not in made
        assert (await top.schedule_every(60, "say", {"a": 1})).id not in made


@pytest.mark.parametrize("bad", range(3))
async def test_of_many_one_that_is_refused_leaves_none(bad: int, clock: object) -> None:
    async with opened() as test:
        top = await top_of(test)
        dues = [Due(n, "say", n) for n in range(3)]
        dues[bad] = Due(1, ("nothing", "__init__", "on_forward")[bad])
        await raises(UsageError, top.schedules.many, dues)
        assert rows(tree_of(test), "SELECT 1 FROM job") == []
        test.faults.fail_commit()
        await raises(Exception, top.schedules.many, [Due(1, "say")] * 3)
        assert rows(tree_of(test), "SELECT 1 FROM job") == []
        (made,) = await top.schedules.many([Due(1, "say", "x")])
        await test.advance(2)
        assert TOLD == ["x"]
        assert top.schedules.get(made.id) is None


@pytest.mark.limit("schedules_at_once", "schedules_per_agent")
@pytest.mark.rule("I-43")
async def test_many_are_bounded(clock: object) -> None:
    limits = Limits(schedules_at_once=3, schedules_per_agent=5)
    async with opened(limits=limits) as test:
        top = await top_of(test)
        error = await raises(CapacityError, top.schedules.many, [Due(9, "say")] * 4)
        assert "schedules_at_once" in str(error)
        made = await top.schedules.many([Due(9, "say")] * 3)
        error = await raises(CapacityError, top.schedules.many, [Due(9, "say")] * 3)
        assert "schedules_per_agent" in str(error)
        await top.schedules.many([Due(9, "say")] * 2)
        await raises(CapacityError, top.schedule, 9, "say")
        assert top.schedules.cancel(made[0].id)
        await top.schedule(9, "say")
        await raises(CapacityError, top.schedule, 9, "say")
        assert len(top.schedules.list()) == 5


# ---- what recurs


@pytest.mark.rule("F-284", "F-282")
async def test_a_long_call_moves_no_later_tick_and_never_overlaps_itself(
    clock: object,
) -> None:
    async with opened() as test:
        top = await top_of(test)
        await top.schedule_every(10, "slow", 25)
        begin = trio.current_time()
        await test.advance(131)
        ins = [at - begin for what, at in TOLD if what == "in"]
        assert [round(at) for at in ins] == [10, 40, 70, 100, 130], "the grid is kept"
        assert [w for w, _ in TOLD[:8]] == ["in", "out"] * 4


@pytest.mark.limit("job_timeout_s")
@pytest.mark.rule("F-283")
async def test_a_call_that_never_ends_is_cut_and_tried_again(clock: object) -> None:
    async with opened(limits=Limits(job_timeout_s=100)) as test:
        top = await top_of(test)
        begin = trio.current_time()
        await top.schedule_every(30, "slow")
        await test.advance(95)
        assert len(TOLD) == 1, "alive in this process: not called beside itself"
        await test.advance(40)
        assert [round(at - begin) for _, at in TOLD] == [30, 131]
        (one,) = top.schedules.list()
        assert one.error == "TimeoutError: took more than 100 s"


@pytest.mark.rule("I-33")
@pytest.mark.parametrize("every", [600, "*/10 * * * *"])
async def test_a_tick_that_is_late_is_skipped_where_that_is_asked_for(
    every: Any, clock: object
) -> None:
    async with opened() as test:
        top = await top_of(test)
        heard = listen(test, "schedule:skip")
        add = top.schedule_every if every == 600 else top.schedule
        for misfire in ("none", "one"):
            await add(every, "look", misfire, misfire=misfire)
        await test.advance(601)
        assert TOLD == [(600_000, 600_000)] * 2, "in its time it is called"
        TOLD.clear()
        await test.crash()
        test.clock.jump(1800)  # down for three ticks
        await test.reopen()
        await test.advance(1)
        assert [at for at, _now in TOLD] == [1_200_000], (
            "only the one that is made up for"
        )
        ((_, skipped),) = heard or [(0, None)]
        assert skipped is None
        kept = {s.misfire: s for s in (await top_of(test)).schedules.list()}
        assert kept["none"].error == "skipped: 1201 s late"
        assert kept["none"].at == kept["one"].at == EPOCH_MS + 3_000_000
        await test.advance(600)
        assert len(TOLD) == 3


@pytest.mark.limit("misfire_grace_s")
async def test_a_skipped_tick_is_told(clock: object) -> None:
    async with opened(limits=Limits(misfire_grace_s=5)) as test:
        top = await top_of(test)
        heard = listen(test, "schedule:skip")
        made = await top.schedule_every(60, "say", misfire="none")
        await top.schedule(58, "slow", 6)
        await test.advance(63)
        assert heard == []
        await test.advance(10)
        assert TOLD[2:] == [None], "late, and within its grace"
        await top.schedule(115 - 73, "slow", 12)
        await test.advance(60)
        text = "skipped: 7 s late"
        assert heard == [("schedule:skip", Owed("say", made.id, 1, text))]
        assert top.schedules.get(made.id).attempts == 0
        await test.advance(60)
        assert TOLD.count(None) == 2


async def test_jitter_delays_each_tick_and_moves_none(clock: object) -> None:
    async with opened(seed=5) as test:
        top = await top_of(test)
        await top.schedule_every(100, "look", jitter=50)
        await top.schedule("*/5 * * * *", "look", jitter=50)
        await test.advance(3050)
        late = [now - at for at, now in TOLD if at % 300_000]
        assert len(late) == 20
        assert 0 <= min(late) < 10_000
        assert 40_000 < max(late) <= 50_010
        ticks = sorted(at for at, _now in TOLD if at % 300_000 == 0)
        assert ticks == sorted([n * 300_000 for n in range(1, 11)] * 2)


async def test_run_now_is_one_more_and_uses_up_no_tick(clock: object) -> None:
    async with opened() as test:
        top = await top_of(test)
        made = await top.schedule_every(1000, "look")
        await test.advance(300)
        assert top.schedules.run_now(made.id)
        assert top.schedules.upcoming(1)[0].why == "asked"
        await test.advance(1)
        assert len(TOLD) == 1
        assert top.schedules.get(made.id).at == EPOCH_MS + 1_000_000
        await test.advance(800)
        assert len(TOLD) == 2, "the tick itself"
        assert top.schedules.get(made.id).at == EPOCH_MS + 2_000_000


async def test_asked_for_while_it_is_called_it_is_called_once_more(
    clock: object,
) -> None:
    async with opened() as test:
        top = await top_of(test)
        made = await top.schedule_every(1000, "slow", 10)
        await test.advance(1005)
        assert top.schedules.run_now(made.id)
        assert top.schedules.run_now(made.id)
        await test.advance(30)
        assert [what for what, _ in TOLD] == ["in", "out", "in", "out"]
        assert top.schedules.get(made.id).at == EPOCH_MS + 2_000_000
        await test.advance(990)
        assert [what for what, _ in TOLD] == ["in", "out"] * 3, "the tick itself"
        assert top.schedules.get(made.id).at == EPOCH_MS + 3_000_000


@pytest.mark.rule("F-13", "I-32", "F-306")
@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("back_s", [3600, 10 * 366 * 86_400])
async def test_a_clock_that_is_put_back_loses_no_row_and_calls_for_no_tick_again(
    back_s: int, restart: bool, clock: object
) -> None:
    async with opened() as test:
        top = await top_of(test)
        await top.schedule_every(1000, "at")
        await top.schedule("*/15 * * * *", "at")
        await top.schedule(2500, "at")
        await test.advance(2050)
        told = len(TOLD)
        assert {s.every for s in TOLD} == {1000, "*/15 * * * *"}
        owed = {(s.id, s.at) for s in top.schedules.list()}
        test.clock.jump(-back_s)
        if restart:
            await top.durable()
            await test.crash()
            await test.reopen()
            top = await top_of(test)
        await test.advance(50)
        assert len(TOLD) == told, "neither the tick that was nor the one to come"
        assert {(s.id, s.at) for s in top.schedules.list()} == owed
        test.clock.jump(back_s)
        await test.advance(2000)
        ticks = [(s.id, s.at) for s in TOLD]
        assert len(set(ticks)) == len(ticks), "a tick twice"
        grid = [s.at - EPOCH_MS for s in TOLD if s.every == 1000]
        assert grid == [1_000_000, 2_000_000, 3_000_000, 4_000_000]
        assert [s.every for s in TOLD].count(None) == 1


@pytest.mark.rule("I-32", "F-306")
async def test_a_clock_that_goes_back_between_two_tries_makes_no_tick_twice(
    clock: object,
) -> None:
    async with opened() as test:
        top = await top_of(test)
        await top.schedule_every(1000, "slow_fail", "f")
        await test.advance(1005)
        assert TOLD == ["f"]
        test.clock.jump(-500)  # while it is being called
        await test.advance(100)
        (one,) = top.schedules.list()
        assert (one.at, one.attempts) == (EPOCH_MS + 1_000_000, 1)
        await test.advance(1000)
        assert TOLD.count("f") == 2, "its second try, and no third"
        await test.advance(500)
        assert top.schedules.list()[0].at == EPOCH_MS + 3_000_000


# ---- changing


@pytest.mark.parametrize("steps", range(8))
async def test_a_call_that_was_taken_and_paused_does_not_begin(
    steps: int, clock: object
) -> None:
    async with opened() as test:
        top = await top_of(test)
        made = await top.schedule(0, "say", "x")
        for _ in range(steps):
            await trio.lowlevel.checkpoint()
        before = list(TOLD)
        paused = top.schedules.pause(made.id)
        await test.advance(100)
        assert before == TOLD
        assert paused == (not before) or top.schedules.get(made.id) is None
        if paused:
            assert top.schedules.get(made.id).attempts == 0, "it was no try"
            assert top.schedules.resume(made.id)
            await test.advance(1)
        assert TOLD == ["x"]
        assert top.schedules.list() == []


async def test_what_rests_dead_is_only_replayed(clock: object) -> None:
    async with opened() as test:
        top = await top_of(test)
        made = await top.schedule(1, "fail", "f", retry=ONCE)
        assert not top.schedules.replay(made.id), "it is not dead"
        queued = top.queue.put("fail", "q", retry=ONCE)
        await test.advance(5)
        for how in ("pause", "resume", "run_now"):
            assert getattr(top.schedules, how)(made.id) is False
        assert [s.id for s in top.schedules.list(dead=True)] == [made.id]
        assert top.schedules.list(dead=False) == []
        assert top.schedules.upcoming(1e3) == []
        assert [s.id for s in top.queue.list(dead=True)] == [queued]
        TOLD.clear()
        assert top.schedules.replay(made.id)
        assert top.queue.replay(queued)
        assert not top.queue.replay(queued)
        await test.advance(5)
        assert [t for t in TOLD if t in ("f", "q")] == ["f", "q"] or TOLD
        assert {"f", "q"} <= set(TOLD)
        assert top.schedules.get(made.id).dead
        assert top.queue.get(queued).dead


@pytest.mark.rule("F-278")
async def test_asking_again_makes_up_for_a_look_that_was_lost(clock: object) -> None:
    async with opened() as test:
        top = await top_of(test)
        made = await top.schedule_every(1000, "say", "x")
        await settle()
        tree = tree_of(test)
        with tree.transaction():  # somebody has moved it, and nobody looks
            tree.db.execute("UPDATE job SET at = ?1, due_at = ?1", (EPOCH_MS - 5,))
        await test.advance(5)
        assert TOLD == []
        again = await top.schedule_every(1000, "say", "x")
        await settle()
        assert again.id == made.id
        assert TOLD == ["x"]


# ---- reading


@pytest.mark.rule("F-289", "F-259")
async def test_a_list_is_bounded_by_time_kind_and_page(clock: object) -> None:
    async with opened() as test:
        top = await top_of(test)
        ids = [(await top.schedule(s, "say", s)).id for s in (10, 20, 20, 30)]
        every = await top.schedule_every(25, "look")
        cron = await top.schedule("0 * * * *", "say")
        top.queue.put("slow", 99)
        await settle()

        def listed(**wanted: Any) -> list[str]:
            return [s.id for s in top.schedules.list(**wanted)]

        assert listed() == [ids[0], ids[1], ids[2], every.id, ids[3], cron.id]
        at = EPOCH_MS + 20_000
        assert listed(start=at, end=at) == ids[1:3], "both ends are inclusive"
        assert listed(end=at) == ids[:3]
        moment = datetime.fromtimestamp(at / 1000, UTC) + timedelta(milliseconds=1)
        assert listed(start=moment) == [every.id, ids[3], cron.id]
        assert listed(kind="once") == ids
        assert listed(kind="every") == [every.id]
        assert listed(kind="cron", callback="say") == [cron.id]
        assert listed(callback="look") == [every.id]
        pages, after = [], None
        while page := top.schedules.list(limit=2, after=after):
            pages.append([s.id for s in page])
            after = page[-1].id
        assert pages == [[ids[0], ids[1]], [ids[2], every.id], [ids[3], cron.id]]


async def test_upcoming_says_why_each_fires_next(clock: object) -> None:
    async with opened() as test:
        top, _mid, kid = await below(test)
        for agent, delay in ((top, 100), (kid, 200)):
            await agent.schedule(delay, "say", "once")
        await kid.schedule_every(1800, "say")
        zone = "America/New_York"
        cron = await kid.schedule("30 9 * * *", "say", tz=zone)
        paused = await kid.schedule(300, "look")
        assert kid.schedules.pause(paused.id)
        await kid.schedule(0, "fail", "f", retry=Retry(max_attempts=9, base_delay=60))
        running = await top.schedule(0, "slow", 1e3)
        await kid.schedule(1e6, "say", "too late to be told")
        await test.advance(1)

        soon = kid.schedules.upcoming(24)
        told = [(u.callback, u.kind, u.rule, u.tz, u.why, u.attempts) for u in soon]
        assert told == [
            ("fail", "once", None, None, "retry", 1),
            ("say", "once", None, None, "time", 0),
            ("look", "once", None, None, "paused", 0),
            ("say", "every", "1800 s", None, "time", 0),
            ("say", "cron", "30 9 * * *", zone, "time", 0),
        ]
        assert soon[0].error == "ValueError: bad"
        assert 30_000 <= soon[0].due_at - EPOCH_MS <= 60_010
        assert soon[4].id == cron.id
        assert soon[4].due_at == EPOCH_MS + 14.5 * 3_600_000
        assert {u.path for u in soon} == {"Top/a/Mid/m/Kid/k"}
        assert len(kid.schedules.upcoming(0.4)) == 3
        assert [u.id for u in kid.schedules.upcoming(24, limit=2)] == [
            u.id for u in soon[:2]
        ]
        everything = top.schedules.upcoming(24, below=True)
        assert len(everything) == 7
        assert [u.why for u in everything if u.id == running.id] == ["running"]
        assert {u.path for u in everything} == {"Top/a", "Top/a/Mid/m/Kid/k"}
        for hours in (-1, math.nan, "1"):
            with pytest.raises(UsageError):
                kid.schedules.upcoming(hours)


@pytest.mark.rule("I-35", "F-266")
async def test_an_ancestor_sees_and_ends_what_is_below_it_and_nobody_else_does(
    clock: object,
) -> None:
    async with opened() as test:
        top, mid, kid = await below(test)
        await top.dynamic_agents.get(Kid, "other")
        other = agent_at(test, ("Kid", "other"))
        made = {
            agent: await agent.schedule(n, "say", n)
            for n, agent in enumerate((top, mid, kid, other), 10)
        }
        queued = kid.queue.put("slow", 99)

        def listed(agent: Any) -> list[tuple[str, str]]:
            return [(s.id, s.path) for s in agent.schedules.list(below=True)]

        assert listed(top) == [
            (made[top].id, "Top/a"),
            (made[mid].id, "Top/a/Mid/m"),
            (made[kid].id, "Top/a/Mid/m/Kid/k"),
            (made[other].id, "Top/a/Kid/other"),
        ]
        assert [i for i, _ in listed(mid)] == [made[mid].id, made[kid].id]
        assert [i for i, _ in listed(kid)] == [made[kid].id]
        assert mid.schedules.list() == [made[mid]], "by itself: its own"
        assert [u.id for u in mid.schedules.upcoming(1, below=True)] == [
            made[mid].id, made[kid].id,
        ]  # fmt: skip
        for agent, whose in ((mid, top), (mid, other), (kid, mid), (other, kid)):
            assert not agent.schedules.cancel(made[whose].id, below=True)
        assert not top.schedules.cancel(made[kid].id), "not without saying so"
        assert not top.schedules.cancel(queued, below=True)
        heard = listen(test, "schedule:cancel")
        assert mid.schedules.cancel(made[kid].id, below=True)
        assert not mid.schedules.cancel(made[kid].id, below=True)
        assert [d.id for _, d in heard] == [made[kid].id]
        await top.dynamic_agents.delete(Mid, "m")
        assert [i for i, _ in listed(top)] == [made[top].id, made[other].id]
        await test.advance(20)
        assert [t for t in TOLD if isinstance(t, int)] == [10, 13]


# ---- what fails, and what is told


@pytest.mark.rule("F-288", "F-444", "F-263", "F-262")
@pytest.mark.parametrize("channel", ["schedule", "queue"])
async def test_tries_are_told_one_by_one_and_the_agent_hears_of_the_last(
    channel: str, clock: object
) -> None:
    async with opened() as test:
        top = await top_of(test)
        names = ("create", "execute", "retry", "error", "cancel")
        heard = listen(test, *(f"{channel}:{name}" for name in names))
        if channel == "schedule":
            made = (await top.schedule(1, "fail", "f")).id
        else:
            made = top.queue.put("fail", "f")
        await test.advance(10)
        bad = "ValueError: bad"
        assert [(name.partition(":")[2], what) for name, what in heard] == [
            ("create", Owed("fail", made)),
            ("execute", Owed("fail", made, 1)),
            ("retry", Owed("fail", made, 1, bad)),
            ("execute", Owed("fail", made, 2)),
            ("error", Owed("fail", made, 2, bad)),
        ]
        assert TOLD == ["f", "f", "on_error: bad"], "and what that raises is swallowed"
        noun = top.schedules if channel == "schedule" else top.queue
        assert noun.get(made).dead, "it rests where it is seen"


@pytest.mark.rule("F-268", "F-442")
async def test_a_method_that_is_gone_is_not_tried_in_vain_and_rests_in_the_end(
    clock: object,
) -> None:
    async with opened() as test:
        top = await top_of(test)
        heard = listen(test, "schedule:error", "schedule:retry", "queue:error")
        once = await top.schedule(10, "say", "once")
        every = await top.schedule_every(100, "say", retry=Retry(max_attempts=3))
        queued = top.queue.put("slow", 5), top.queue.put("say"), top.queue.put("look")
        tree = tree_of(test)
        with tree.transaction():
            tree.db.execute("UPDATE job SET what = 'gone' WHERE what = 'say'")
        await test.advance(60)
        error = "Hopeless: Top has no method 'gone' to call"
        assert top.schedules.get(once.id).dead
        assert top.schedules.get(once.id).error == error
        assert top.queue.get(queued[1]).dead
        assert top.queue.get(queued[2]) is None, "the queue goes on"
        await test.advance(50)
        assert not top.schedules.get(every.id).dead, "it may come back"
        await test.advance(1000)
        assert top.schedules.get(every.id).dead
        told = [what.attempts for _, what in heard if what.id == every.id]
        assert told == [1, 2, 3], "each tick is told, and no try is made twice"
        assert {name for name, _ in heard} == {"schedule:error", "queue:error"}
        with tree.transaction():
            tree.db.execute("UPDATE job SET what = 'say' WHERE what = 'gone'")
        assert top.schedules.replay(every.id)
        TOLD.clear()
        await test.advance(101)
        assert len(TOLD) == 2


class Planner(Kid):
    async def on_start(self) -> None:
        await self.schedule(1000, "say", "a")
        await self.schedule(1000, "say", "b")
        await self.schedule(1000, "look")
        await self.schedule("0 0 * * *", "fail")
        await self.schedule_every(1000, "fail")
        await self.schedule(1000, "slow", idempotent=True)
        await self.schedule(1000, "plain", idempotent=False)
        self.spawn(self.later)

    async def later(self) -> None:
        await self.schedule(1000, "later_one")

    async def plain(self, payload: Any, schedule: Schedule) -> None: ...

    async def later_one(self, payload: Any, schedule: Schedule) -> None: ...


@pytest.mark.rule("F-279")
async def test_a_start_that_schedules_without_a_word_is_warned_once_for_each_method(
    clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(roots=[Planner]) as test:
        for _life in range(2):
            caplog.clear()
            await test.kernel.get_agent(Planner, "p")
            await settle()
            said = [
                r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING
            ]
            assert len(said) == 2, said
            assert "'say' in on_start" in said[0]
            assert "'look' in on_start" in said[1]
            assert tree_of(test, "Planner", "p").schedules._warned == {}
            await test.evict([("Planner", "p")])


@pytest.mark.limit("crowd")
@pytest.mark.rule("F-280")
async def test_a_crowd_of_calls_that_come_once_is_told_of_and_called(
    clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened() as test:
        top = await top_of(test)
        heard = listen(test, "schedule:duplicate_warning")
        await top.schedules.many([Due(10, "say", n) for n in range(9)])
        await top.schedules.many([Due(10, "look") for n in range(3)])
        await test.advance(11)
        assert heard == []
        await top.schedules.many([Due(10, "say", n) for n in range(200)])
        await test.advance(11)
        assert heard == [("schedule:duplicate_warning", Crowd("say", 200, "one-shot"))]
        assert "at least 200 calls of 'say'" in caplog.text
        assert [t for t in TOLD if isinstance(t, int)] == [*range(9), *range(200)]
        await top.schedules.many([Due(10, "say", n) for n in range(10)])
        await test.advance(11)
        assert len(heard) == 2, "told again: this is another one"
