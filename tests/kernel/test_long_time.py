"""Much time, and much that is due in it."""

from __future__ import annotations

from collections import Counter
from datetime import date, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
import trio

from culet.kernel import Agent, Schedule
from culet.kernel.core.limits import Limits
from culet.kernel.testing import EPOCH_MS, open_test_kernel
from kernel.agents import agent_at, rows, settle, tree_of
from volume import Volume

YEARS = Volume(1, 20, 200)
MANY = Volume(2_000, 10_000, 10_000)
LAZY = Limits(clock_check_s=1e8)  # nobody moves the wall clock
ZONE = "America/Los_Angeles"
FIRED: list[tuple[int, str]] = []


class Kid(Agent):
    async def note(self, payload: str, schedule: Schedule) -> None:
        FIRED.append((schedule.at, payload))

    async def later(self, seconds: float) -> None:
        await self.schedule(seconds, "note", self.name)


class Top(Kid):
    async def kid(self, name: str, seconds: float) -> None:
        await (await self.dynamic_agents.get(Kid, name)).later(seconds)


@pytest.mark.slow
@pytest.mark.rule("G-05", "I-33", "F-286")
async def test_years_of_midnights_come_once_each(clock: object) -> None:
    FIRED.clear()
    days = 365 * YEARS.now + YEARS.now // 4
    async with open_test_kernel(roots=[Top], limits=LAZY, idle_s=1e12) as test:
        await test.kernel.get_agent(Top, "a")
        await agent_at(test).schedule("0 0 * * *", "note", "midnight", tz=ZONE)
        await test.advance(86_400.0 * days)
        first = datetime.fromtimestamp(EPOCH_MS / 1000, ZoneInfo(ZONE)).date()
        wanted = [midnight(first + timedelta(days=n)) for n in range(1, days + 1)]
        assert [at for at, _ in FIRED] == wanted
        (job,) = rows(tree_of(test), "SELECT at, attempts, held FROM job")
        assert job == (midnight(first + timedelta(days=days + 1)), 0, None)


def midnight(day: date) -> int:
    at = datetime(day.year, day.month, day.day, tzinfo=ZoneInfo(ZONE))
    return int(at.timestamp() * 1000)


@pytest.mark.slow
@pytest.mark.rule("F-17", "I-31", "I-36")
async def test_ten_thousand_at_once_are_all_called_and_nobody_waits_behind_them(
    clock: object,
) -> None:
    """No pass of the loop is long: the probe of every test sees to it."""
    FIRED.clear()
    async with open_test_kernel(roots=[Top], facets=[Kid]) as test:
        root = await test.kernel.get_agent(Top, "a")
        me = agent_at(test)
        for n in range(MANY.now):
            await me.schedule(600, "note", str(n))
            if n % 100 == 0:
                await trio.lowlevel.checkpoint()
        for name in ("x", "y"):
            await root.kid(name, 600)
        await me.durable()
        test.clock.jump(600)
        await test.advance(10)
        await settle()
        texts = [text for _at, text in FIRED]
        assert Counter(texts) == Counter([*map(str, range(MANY.now)), "x", "y"])
        assert [t for t in texts if t.isdigit()] == [str(n) for n in range(MANY.now)]
        assert max(texts.index("x"), texts.index("y")) < MANY.now // 10
        assert rows(tree_of(test), "SELECT count(*) FROM job") == [(0,)]
