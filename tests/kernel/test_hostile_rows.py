"""Rows that make no sense, found by `fuzz rows`: they are seen, and stop nobody else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio

from culet.kernel import Agent, Chunk, Schedule, Turn
from culet.kernel.testing import Harness, open_test_kernel

fired: list[str] = []


class Worker(Agent):
    resumable = True

    async def owe(self) -> None:
        await self.schedule_every(60, "fire")

    async def fire(self, payload: Any, schedule: Schedule) -> None:
        fired.append(self.name)

    async def failing(self) -> None:
        await self.schedule_every(60, "fail")

    async def fail(self, payload: Any, schedule: Schedule) -> None:
        raise ValueError("fail")

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        await trio.sleep(turn.input)
        yield {"type": "text-delta", "id": "t", "delta": "x"}


class Boss(Agent):
    async def begin(self) -> None:
        bad = await self.dynamic_agents.get(Worker, "bad")
        await bad.owe()
        await bad.failing()
        good = await self.dynamic_agents.get(Worker, "good")
        await good.owe()
        await self.run_agent_tool(Worker, 100, run_id="r", detached=True)

    async def list_of_bad(self) -> list[str | None]:
        return [r.error for r in self.runs.list()]


BAD = "owner = (SELECT slot FROM node WHERE name = 'bad')"


async def damaged(test: Harness, sql: str) -> Harness:
    """Change rows of the open tree, die, live again: as if they had come from the disk."""
    fired.clear()
    root = await test.kernel.get_agent(Boss, "a")
    await root.begin()
    tree = test.tree("Boss", "a")
    assert tree is not None
    with tree.transaction():
        tree.db.execute(sql)
    await tree.durable()
    await test.crash()
    await test.reopen()
    await test.kernel.get_agent(Boss, "a")
    return test


@pytest.mark.parametrize(
    "sql",
    [
        f"UPDATE job SET every = '[]' WHERE {BAD}",
        f'UPDATE job SET every = \'{{"type":"cron","expr":"x"}}\' WHERE {BAD}',
        f'UPDATE job SET every = \'{{"type":"interval","seconds":1e300}}\' WHERE {BAD}',
        f"UPDATE job SET retry = '{{' WHERE {BAD}",
        f"UPDATE job SET retry = '{{\"max_attempts\":-1}}' WHERE {BAD}",
        f"UPDATE job SET attempts = 9223372036854775807 WHERE {BAD}",
        "UPDATE run SET detached = '{'",
        "UPDATE run SET detached = '[]', display = 'x', preview = '}'",
    ],
)
async def test_other_rows_go_on(clock: trio.testing.MockClock, sql: str) -> None:
    async with open_test_kernel(roots=[Boss], facets=[Worker]) as test:
        await damaged(test, sql)

        await test.advance(200)

        assert fired.count("good") == 3
        tree = test.tree("Boss", "a")
        assert tree is not None
        assert tree.db.execute("SELECT status FROM run") == [("completed",)]
        root = await test.kernel.get_agent(Boss, "a")
        assert await root.list_of_bad() == [None]


async def test_an_unreadable_recurrence_rests_where_it_is_seen(
    clock: trio.testing.MockClock,
) -> None:
    async with open_test_kernel(roots=[Boss], facets=[Worker]) as test:
        await damaged(test, f"UPDATE job SET every = '[]' WHERE {BAD}")

        await test.advance(200)

        tree = test.tree("Boss", "a")
        assert tree is not None
        rows = tree.db.execute(f"SELECT dead, error FROM job WHERE {BAD} AND dead = 1")
        assert rows
        assert all("cannot be read" in error for _dead, error in rows)
        slot = tree.db.execute("SELECT slot FROM node WHERE name = 'bad'")[0][0]
        listed = tree.schedules.all(slot, "call")
        assert [s.every for s in listed if s.dead] == [None] * len(rows)
