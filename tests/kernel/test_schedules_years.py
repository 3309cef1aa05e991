"""Years of schedules that nobody planned by hand: every tick in its time, once."""

from __future__ import annotations

import time
from collections import defaultdict
from random import Random
from typing import Any

import pytest

from culet.kernel import Agent, Schedule, next_fire
from culet.kernel.core.limits import Limits
from culet.kernel.testing import EPOCH_MS, Harness, open_test_kernel
from kernel.agents import agent_at
from volume import Volume

YEARS = Volume(1, 20, 200)
DAY_S = 86_400
LAZY = Limits(clock_check_s=1e8)  # nobody moves the wall clock, but while it is down
ZONES = (
    "UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kolkata",
    "America/Sao_Paulo", "Africa/Cairo", "Pacific/Apia",
)  # fmt: skip
FIRED: dict[str, list[tuple[int, int]]] = defaultdict(list)


class Kid(Agent):
    async def note(self, payload: Any, schedule: Schedule) -> None:
        FIRED[schedule.id].append((schedule.at, schedule.called_at or 0))


class Top(Kid):
    pass


def cron_text(chance: Random) -> str:
    """Return an expression that fires a few times a month at most."""
    minute, hour = chance.randrange(60), chance.randrange(24)
    day, month = chance.randrange(1, 29), chance.randrange(1, 13)
    return chance.choice(
        [
            f"{minute} {hour} {day} * *",
            f"{minute} {hour} * * {chance.randrange(7)}",
            f"{minute} {hour} {day} {month} *",
            f"{minute} {hour} L * *",
            f"{minute} {hour} * * {chance.randrange(7)}#{chance.randrange(1, 6)}",
            f"{minute} {hour},{(hour + 12) % 24} {day},{day // 2 + 1} * *",
        ]
    )


async def plan(test: Harness, chance: Random) -> dict[str, Schedule]:
    """Let a root and two facets owe calls of every kind; return them by id."""
    await test.kernel.get_agent(Top, "a")
    top = agent_at(test)
    agents = [top]
    for name in ("x", "y"):
        await top.dynamic_agents.get(Kid, name)
        agents.append(agent_at(test, ("Kid", name)))
    made: dict[str, Schedule] = {}
    for n in range(24):
        agent, misfire = chance.choice(agents), chance.choice(["one", "none"])
        if n % 3:
            text, zone = cron_text(chance), chance.choice(ZONES)
            one = await agent.schedule(text, "note", n, tz=zone, misfire=misfire)
        else:
            seconds = chance.uniform(3, 30) * DAY_S
            one = await agent.schedule_every(seconds, "note", n, misfire=misfire)
        made[one.id] = one
    for n in range(YEARS.now * 6):
        delay = chance.uniform(0, YEARS.now * 365 * DAY_S)
        one = await chance.choice(agents).schedule(delay, "note", n)
        made[one.id] = one
    return made


def after(one: Schedule, at: int) -> int:
    """Return its first tick later than `at`, reckoned without the kernel's jobs."""
    if isinstance(one.every, str):
        assert one.tz is not None
        return next_fire(one.every, one.tz, at)
    assert one.every is not None
    step = round(one.every * 1000)
    return one.at + ((at - one.at) // step + 1) * step


def expected(
    one: Schedule, downs: list[tuple[int, int]], end: int
) -> list[tuple[int, int | None]]:
    """Return the ticks to be called, with the instant where that is not the tick's own."""
    out: list[tuple[int, int | None]] = []
    at = one.at
    while at <= end:
        down = next(((a, b) for a, b in downs if a <= at < b), None)
        late = down is not None and down[1] - at > 60_000
        if not (late and one.misfire == "none"):
            out.append((at, None if down is None else down[1]))
        if one.every is None:
            break
        at = after(one, at if down is None else max(at, down[1]))
    return out


@pytest.mark.slow
@pytest.mark.rule("G-05", "I-31", "I-32", "I-33", "F-15", "F-286")
async def test_years_of_random_schedules_come_each_in_its_time_and_once(
    clock: object,
) -> None:
    FIRED.clear()
    chance = Random(20)
    began = time.perf_counter()
    async with open_test_kernel(
        roots=[Top], facets=[Kid], limits=LAZY, idle_s=1e12, seed=1
    ) as test:
        made = await plan(test, chance)
        end = EPOCH_MS + YEARS.now * 365 * DAY_S * 1000
        downs: list[tuple[int, int]] = []
        while (now := test.clock.now_ms()) < end:
            await test.advance(min(chance.uniform(20, 120) * DAY_S, (end - now) / 1000))
            if chance.random() < 0.3 and test.clock.now_ms() < end:
                await agent_at(test).durable()
                down = test.clock.now_ms()
                await test.crash()
                test.clock.jump(chance.choice([30, 3600, 5 * DAY_S, 40 * DAY_S]))
                downs.append((down, test.clock.now_ms()))
                await test.reopen()
                await test.kernel.get_agent(Top, "a")
                await test.advance(5)
        end = test.clock.now_ms()
    took = time.perf_counter() - began
    calls = 0
    for number, one in made.items():
        wanted = expected(one, downs, end - 5000)
        fired = [call for call in FIRED[number] if call[0] <= end - 5000]
        assert [at for at, _ in fired] == [at for at, _ in wanted], one
        for (at, called), (_, up) in zip(fired, wanted, strict=True):
            assert 0 <= called - (at if up is None else up) <= 5000, (
                one,
                at,
                called,
                up,
            )
        calls += len(fired)
    assert calls > 300 * YEARS.now
    assert len(downs) > YEARS.now / 2
    assert YEARS.now * 365 * DAY_S / took > 10_000, "so much faster than life"
