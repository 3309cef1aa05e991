"""A file that another process has locked: waited for off the loop, then a clear error."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from culet.kernel import Agent
from culet.kernel.errors import StorageBusy
from culet.kernel.testing import Harness, open_test_kernel
from kernel.agents import agent_at, raises, tree_of

LOCKER = str(Path(__file__).with_name("locker.py"))
TASKS, WRITES = 50, 20


class Kid(Agent):
    async def on_start(self) -> None:
        self.sql("CREATE TABLE IF NOT EXISTS t (task INTEGER, n INTEGER)")

    async def write(self, task: int, n: int) -> None:
        self.sql("INSERT INTO t VALUES (?, ?)", task, n)

    async def count(self) -> int:
        return int(self.sql("SELECT count(*) AS n FROM t")[0].n)

    async def later(self) -> None:
        await self.schedule(30, "due", 1)

    async def due(self, payload: Any, schedule: Any) -> None:
        await self.write(-1, payload)


class Top(Kid):
    async def write_below(self, task: int, n: int) -> None:
        await (await self.dynamic_agents.get(Kid, "k")).write(task, n)

    async def count_below(self) -> int:
        return await (await self.dynamic_agents.get(Kid, "k")).count()

    async def later_below(self) -> None:
        await (await self.dynamic_agents.get(Kid, "k")).later()


@contextmanager
def locked(*files: str) -> Iterator[None]:
    """Let another process have these files to itself."""
    command = [sys.executable, LOCKER, *files]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        yield
    assert process.returncode == 0


def opened(folder: Path) -> Any:
    return open_test_kernel(roots=[Top], facets=[Kid], storage=f"sqlite:{folder}")


async def files_of(test: Harness) -> tuple[str, str]:
    """Make a root and a facet, send both to sleep; return tree.db and the facet's file."""
    root = await test.kernel.get_agent(Top, "a")
    await root.write_below(-1, -1)
    slot = agent_at(test, ("Kid", "k"))._node.slot
    folder = tree_of(test).store.inner.folder.path  # type: ignore[attr-defined]
    await test.evict([("Top", "a")])
    return f"{folder}/tree.db", f"{folder}/{slot}.db"


async def writers(test: Harness, errors: list[StorageBusy], seconds: float) -> None:
    """Let 50 tasks write 20 rows each, and time pass meanwhile."""

    async def one(task: int) -> None:
        try:
            for n in range(WRITES):
                root = await test.kernel.get_agent(Top, "a")
                await root.write_below(task, n)
        except StorageBusy as error:
            errors.append(error)

    async with trio.open_nursery() as nursery:
        for task in range(TASKS):
            nursery.start_soon(one, task)
        await test.advance(seconds)
        nursery.cancel_scope.deadline = trio.current_time() + 60


@pytest.mark.rule("HB-33", "F-06", "I-45")
@pytest.mark.parametrize("which", ["tree", "facet"])
async def test_a_file_that_is_free_in_time_costs_only_the_wait(
    which: str, tmp_path: Path, clock: object
) -> None:
    async with opened(tmp_path) as test:
        file = (await files_of(test))[which == "facet"]
        errors: list[StorageBusy] = []
        async with trio.open_nursery() as nursery:
            with locked(file):
                nursery.start_soon(writers, test, errors, 4)
                beside = await test.kernel.get_agent(Top, "b")  # is not delayed
                at = trio.current_time()
                await beside.write_below(0, 0)
                assert trio.current_time() - at < 0.1
                await test.advance(2)
            await test.advance(1)
            root = await test.kernel.get_agent(Top, "a")
            assert await root.count_below() == 1 + TASKS * WRITES
        assert errors == []


@pytest.mark.limit("busy_s")
@pytest.mark.rule("HB-33", "F-06")
@pytest.mark.parametrize("which", ["tree", "facet"])
async def test_a_file_that_stays_locked_is_told_with_the_wait_and_nothing_is_half_done(
    which: str, tmp_path: Path, clock: object
) -> None:
    async with opened(tmp_path) as test:
        file = (await files_of(test))[which == "facet"]
        errors: list[StorageBusy] = []
        started = trio.current_time()
        with locked(file):
            await writers(test, errors, 6)
            assert len(errors) == TASKS
            assert {
                "limits.busy_s" in str(e) and "5.0 s" in str(e) for e in errors
            } == {True}
            assert trio.current_time() - started < 8
        root = await test.kernel.get_agent(Top, "a")
        assert await root.count_below() == 1, "no partial row, and it all goes on"
        await root.write_below(1, 1)
        assert await root.count_below() == 2


@pytest.mark.rule("C-054")
async def test_a_call_that_is_due_is_made_when_its_file_is_free_again(
    tmp_path: Path, clock: object
) -> None:
    async with opened(tmp_path) as test:
        tree_file, file = await files_of(test)
        root = await test.kernel.get_agent(Top, "a")
        await root.later_below()
        await root.write(0, 0)
        await test.evict([("Top", "a")])
        with locked(file):
            await test.advance(50)
        await test.advance(60)
        root = await test.kernel.get_agent(Top, "a")
        assert await root.count_below() == 2
        await root.later_below()
        await test.evict([("Top", "a")])
        with locked(tree_file):
            other = await test.kernel.get_agent(Top, "b")
            await other.later()
            await test.evict([("Top", "b")])
            await test.advance(31)  # both are due; one is locked and delays no other
            assert test.kernel.trees.keys() == {tree_of(test, name="b").key}
            await raises(StorageBusy, test.kernel.get_agent, Top, "a")
        await test.advance(60)
        root = await test.kernel.get_agent(Top, "a")
        assert await root.count_below() == 3


async def test_an_index_that_is_locked_for_a_moment_does_not_end_the_kernel(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as test:
        await files_of(test)
    script = (
        "import sqlite3,sys,time; c=sqlite3.connect(sys.argv[1], isolation_level=None);"
        "c.execute('BEGIN EXCLUSIVE'); print('locked', flush=True); time.sleep(0.3)"
    )
    command = [sys.executable, "-c", script, f"{tmp_path}/roots.db"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        async with opened(tmp_path) as test:
            root = await test.kernel.get_agent(Top, "a")
            assert await root.count_below() == 1
