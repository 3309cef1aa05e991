"""Goals with figures that are no timings: nothing is late in virtual time, nothing leaks."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any, Final

import pytest
import trio

from culet.kernel import Agent, Due, Limits, Schedule
from kernel.agents import rows, tree_of
from kernel.toolkit import Kid, frames, opened, top
from volume import Volume

ROWS: Final = 10_000
CYCLES: Final = Volume(60, 300, 10_000)
LATE_MS: list[int] = []


class Clocked(Agent):
    async def told(self, payload: Any, schedule: Schedule) -> None:
        LATE_MS.append(self._node.tree.now() - schedule.at)


@pytest.mark.rule("G-13", "I-32")
async def test_among_ten_thousand_rows_what_is_due_is_called_in_its_moment(
    clock: object,
) -> None:
    LATE_MS.clear()
    async with opened(Clocked, limits=Limits(clock_check_s=1e6)) as test:
        me = await top(test)
        await me.dynamic_agents.get(Clocked, "k")
        kid = test.find([("Top", "a"), ("Clocked", "k")]).agent
        for first in range(0, ROWS, 1000):
            dues = [Due(86_400 + first + i, "told", None) for i in range(1000)]
            await kid.schedules.many(dues)
        for second in (1, 2, 5, 60, 61, 3600):
            await kid.schedule(second, "told")
        await test.advance(4000)
        assert len(LATE_MS) == 6
        assert min(LATE_MS) >= 0, "never early"
        assert max(LATE_MS) <= 50
        (count,) = rows(tree_of(test), "SELECT count(*) FROM job")
        assert count == (ROWS,)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.slow
@pytest.mark.rule("G-18")
async def test_a_facet_that_was_made_run_and_deleted_leaves_nothing(
    tmp_path: Path, clock: object
) -> None:
    async with opened(storage=f"sqlite:{tmp_path}") as test:
        me = await top(test)

        async def cycle(number: int) -> None:
            run = await me.run_agent_tool(Kid, [["say", "x"]], run_id=f"r{number}")
            assert run.status == "completed"
            assert len(await frames(me, run.run_id)) == 3
            await me.runs.clear()
            assert not me.dynamic_agents.has(Kid, run.run_id)

        def held() -> tuple[int, int, int, int]:
            gc.collect()
            tree = tree_of(test)
            files = [p for p in tmp_path.rglob("*") if p.suffix in (".db", ".db-wal")]
            tasks = trio.lowlevel.current_statistics().tasks_living
            return descriptors(), tasks, len(files), len(tree.nodes)

        for number in range(5):
            await cycle(number)
        await test.advance(30)
        before = held()
        for number in range(5, 5 + CYCLES.now):
            await cycle(number)
        await test.advance(30)
        after = held()
        assert after == before
        tree = tree_of(test)
        for table in ("node", "run", "job", "fiber"):
            (count,) = rows(tree, f"SELECT count(*) FROM {table}")
            assert count == ((1,) if table == "node" else (0,)), table
        assert not tree.streams._open
        assert not tree.runs.validators
