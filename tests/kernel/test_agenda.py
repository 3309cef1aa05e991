"""What a kernel owes: of all its roots, awake and asleep, page by page."""

from __future__ import annotations

import math
from typing import Any

import pytest
import trio

from culet.kernel import Agent, Due, DuePage, Limits, Schedule
from culet.kernel.errors import UsageError
from culet.kernel.testing import EPOCH_MS, Harness, open_test_kernel

STARTED: list[str] = []


@pytest.fixture(autouse=True)
def fresh() -> None:
    STARTED.clear()


class Kid(Agent):
    async def on_start(self) -> None:
        STARTED.append(self.name)

    async def tick(self, payload: Any, schedule: Schedule) -> None: ...

    async def plan(self, delays: list[float]) -> None:
        await self.schedules.many([Due(s, "tick") for s in delays])


class Top(Kid):
    async def plan_below(self, delays: list[float]) -> None:
        await (await self.dynamic_agents.get(Kid, "k")).plan(delays)

    async def walk(self) -> None:
        await self.fibers.start("walk", trio.sleep_forever, fiber_id="f")


class Other(Top):
    pass


def opened(**options: Any) -> Any:
    return open_test_kernel(roots=[Top, Other], facets=[Kid], **options)


def told(page: DuePage) -> list[tuple[str, float]]:
    return [(u.path, (u.due_at - EPOCH_MS) / 1000) for u in page.rows]


async def plans(test: Harness) -> None:
    """Let four roots owe something, and two of them sleep."""
    for cls, name, delay in (
        (Top, "a", 100), (Top, "b", 50), (Other, "a", 70), (Top, "far", 9e4),
    ):  # fmt: skip
        root: Any = await test.kernel.get_agent(cls, name)
        await root.plan([delay, delay * 2])
    root = await test.kernel.get_agent(Top, "a")
    await root.plan_below([150])
    for name in ("b", "far"):
        await test.evict([("Top", name)])
    STARTED.clear()


ALL = [
    ("Other/a", 70), ("Other/a", 140), ("Top/a", 100), ("Top/a/Kid/k", 150),
    ("Top/a", 200), ("Top/b", 50), ("Top/b", 100),
]  # fmt: skip


async def test_all_roots_tell_what_they_owe_and_nobody_is_started(
    clock: object,
) -> None:
    async with opened() as test:
        await plans(test)
        assert test.tree("Top", "b") is None

        page = await test.kernel.due(1)

        assert told(page) == ALL
        assert page.after is None
        assert {u.why for u in page.rows} == {"time"}
        assert STARTED == []
        await test.advance(1)
        assert test.tree("Top", "far") is None, "it is not due in that time: not opened"


async def test_a_root_that_was_opened_to_be_read_sleeps_again(clock: object) -> None:
    async with opened(idle_s=5) as test:
        await plans(test)
        page = await test.kernel.due(1, root=("Top", "b"))
        assert told(page) == ALL[-2:]
        await trio.testing.wait_all_tasks_blocked()
        assert test.tree("Top", "b") is None
        await test.advance(51)
        assert "b" in STARTED, "and is woken in its time"


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8])
async def test_pages_tell_each_once(limit: int, clock: object) -> None:
    async with opened() as test:
        await plans(test)
        rows: list[Any] = []
        after: str | None = None
        for _ in range(20):
            page = await test.kernel.due(1, limit=limit, after=after)
            assert len(page.rows) <= limit
            rows += told(page)
            after = page.after
            if after is None:
                break
        assert rows == ALL
        assert len(rows) == len(ALL)


@pytest.mark.limit("due_rows")
async def test_pages_are_bounded_and_their_cursors_are_checked(clock: object) -> None:
    async with opened(limits=Limits(due_rows=3)) as test:
        await plans(test)
        assert len((await test.kernel.due(1)).rows) == 3
        assert len((await test.kernel.due(1, limit=99)).rows) == 3
        for bad in ({"hours": -1}, {"hours": math.nan}, {"hours": 1, "limit": 0},
                    {"hours": 1, "after": "x"}, {"hours": 1, "after": "[]"}):  # fmt: skip
            with pytest.raises(UsageError):
                await test.kernel.due(**bad)
        assert await test.kernel.due(1, root=("Top", "nobody")) == ([], None)
        assert test.tree("Top", "nobody") is None


async def test_fibers_and_what_runs_are_told_and_the_dead_are_not(
    clock: object,
) -> None:
    async with opened() as test:
        root: Any = await test.kernel.get_agent(Top, "a")
        await root.walk()
        await root.plan([10])
        tree = test.tree("Top", "a")
        assert tree is not None
        with tree.transaction():
            tree.db.execute("UPDATE job SET dead = 1 WHERE kind = 'call'")
        (only,) = (await test.kernel.due(1)).rows
        assert (only.kind, only.callback, only.why) == ("fiber", "f", "running")


async def test_a_root_that_cannot_be_opened_is_reported_and_left_out(
    clock: object,
) -> None:
    async with opened() as test:
        await plans(test)
        failures: list[Any] = []
        test.kernel.subscribe("failure", lambda *what: failures.append(what[-1].name))
        del test.kernel.classes.known["Other"]
        await test.evict([("Other", "a")])
        page = await test.kernel.due(1)
        assert told(page) == ALL[2:]
        assert "Other/a" in failures
