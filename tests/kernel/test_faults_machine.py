"""A machine that is slow, that is full of open files, that lacks memory or a folder."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio

from culet.kernel import Agent, Chunk, Limits, Turn, open_kernel
from culet.kernel.errors import StorageError
from culet.storage import Files, open_sqlite
from kernel.toolkit import say


class Hub(Agent):
    """Answers, keeps notes, and asks for runs."""

    async def ping(self, n: int) -> int:
        return n + 1

    async def note(self, text: str) -> int:
        self.sql("CREATE TABLE IF NOT EXISTS t (v TEXT)")
        self.sql("INSERT INTO t VALUES (?)", text)
        return int(self.sql("SELECT count(*) AS n FROM t")[0].n)

    async def run(self, words: int, run_id: str) -> tuple[str, str | None]:
        run = await self.run_agent_tool(Worker, words, run_id=run_id)
        return run.status, run.summary

    async def ask(self, count: int) -> list[str]:
        out: list[str] = []

        async def one(i: int) -> None:
            out.append((await self.run(2, f"r{i}"))[0])

        async with trio.open_nursery() as nursery:
            for i in range(count):
                nursery.start_soon(one, i)
        return out

    async def kids(self, count: int) -> list[int]:
        return [
            await (await self.dynamic_agents.get(Worker, f"k{i}")).note("x")
            for i in range(count)
        ]

    async def greedy(self) -> int:
        return len(bytearray(1 << 40))


class Worker(Hub):
    """Says as many words as it is asked for."""

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        SAID.append(0)
        for i in range(turn.input):
            SAID[-1] += 1
            yield say(f"{i} ")


SAID: list[int] = []


def opened(tmp_path: Path, files: Files | None = None, **more: Any) -> Any:
    store = open_sqlite(str(tmp_path), limits=Limits(), files=files or Files())
    return open_kernel(roots=[Hub], facets=[Worker], storage=store, **more)


@pytest.mark.rule("F-09", "I-20", "I-45")
async def test_a_disk_that_takes_its_time_holds_nobody_up_and_ends_nothing(
    tmp_path: Path,
) -> None:
    """While one sync hangs, calls are answered, a run waits, and nothing is told."""
    disk, hangs = threading.Event(), threading.Event()
    disk.set()

    def see(operation: str, path: str) -> None:
        if operation == "sync" and threading.current_thread().name == "culet writer":
            hangs.set()
            assert disk.wait(30)

    async with opened(tmp_path, Files(see)) as kernel:
        hub: Any = await kernel.get_agent(Hub, "a")
        other: Any = await kernel.get_agent(Hub, "b")
        assert await other.ping(1) == 2
        results: list[Any] = []
        SAID.clear()

        async def run() -> None:
            results.append(await hub.run(5_000, "r"))

        async with trio.open_nursery() as nursery:
            await hub.note("first")
            disk.clear()
            hangs.clear()
            nursery.start_soon(hub.note, "second")
            nursery.start_soon(run)
            with trio.fail_after(10):
                await trio.to_thread.run_sync(hangs.wait, 10)
            for n in range(1_000):
                assert await other.ping(n) == n + 1
            tree = next(t for t in kernel.trees.values() if t.key.name == "a")
            staged = [len(s.staged) for s in tree.streams._open.values()]
            assert max(staged, default=0) <= kernel.limits.batch_chunks
            assert results == [], "nothing is told of what is not on the disk"
            assert sum(SAID) < 5_000, "who says more than is stored waits"
            disk.set()
        status, summary = results[0]
        assert (status, len((summary or "").split())) == ("completed", 5_000)
        assert await hub.note("third") == 3


@pytest.mark.rule("F-18", "I-10")
async def test_a_thousand_runs_at_once_all_end_and_others_are_answered(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path, durability="process") as kernel:
        hub: Any = await kernel.get_agent(Hub, "a")
        other: Any = await kernel.get_agent(Hub, "b")
        ended: list[str] = []
        answers = 0

        async def ask() -> None:
            ended.extend(await hub.ask(1_000))

        with trio.fail_after(120):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                while not ended:
                    answers = await other.ping(answers)
                    await trio.sleep(0.001)
        assert ended == ["completed"] * 1_000
        assert answers > 10


FEW_FILES = """
import resource, sys
sys.path[:0] = sys.argv[2].split(":")
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
import os, trio
from culet.kernel import Limits, open_kernel
from culet.kernel.errors import CuletError
from kernel.test_faults_machine import Hub, Worker

def count():
    return len(os.listdir("/proc/self/fd"))

async def main():
    async with open_kernel(
        roots=[Hub], facets=[Worker], storage="sqlite:" + sys.argv[1],
        limits=Limits(open_databases=8), durability="process",
    ) as kernel:
        hub = await kernel.get_agent(Hub, "a")
        await hub.note("before")
        assert await hub.kids(100) == [1] * 100  # one closes for the next
        few = count()
        assert await hub.kids(100) == [2] * 100
        assert count() <= few + 2, (few, count())
        taken = []
        try:
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
        try:
            await (await kernel.get_agent(Hub, "b")).note("x")
        except CuletError as error:
            print(type(error).__name__, error)
        for fd in taken:
            os.close(fd)
        for name, notes in (("a", 2), ("b", 1)):
            with trio.fail_after(60):
                while True:  # a record that failed has begun its tree again
                    try:
                        found = await (await kernel.get_agent(Hub, name)).note("x")
                        break
                    except CuletError:
                        await trio.sleep(0.05)
            assert found == notes, (name, found)
        print("goes on")

trio.run(main)
"""


def in_a_process(text: str, tmp_path: Path) -> str:
    """Run a program that knows these agents; return what it says."""
    path = ":".join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-c", text, str(tmp_path), path],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.rule("F-11", "I-43")
def test_a_process_without_a_file_to_spare_says_so_and_goes_on(tmp_path: Path) -> None:
    said = in_a_process(FEW_FILES, tmp_path)
    assert "Error" in said
    assert "goes on" in said


LITTLE_MEMORY = """
import resource, sys
sys.path[:0] = sys.argv[2].split(":")
import trio
from culet.kernel import open_kernel
from kernel.test_faults_machine import Hub, Worker

async def main():
    async with open_kernel(
        roots=[Hub], facets=[Worker], storage="sqlite:" + sys.argv[1],
        durability="process",
    ) as kernel:
        hub = await kernel.get_agent(Hub, "a")
        assert await hub.note("before") == 1
        resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
        try:
            await hub.greedy()
        except MemoryError:
            print("it was told")
        assert await hub.note("after") == 2
        assert (await hub.run(3, "r"))[0] == "completed"
        print("goes on")

trio.run(main)
"""


@pytest.mark.rule("F-19", "I-29")
def test_who_asks_for_more_memory_than_there_is_fails_alone(tmp_path: Path) -> None:
    """What the kernel itself holds is bounded; a process that is killed is F-01."""
    assert in_a_process(LITTLE_MEMORY, tmp_path).split("\n")[:2] == [
        "it was told",
        "goes on",
    ]


@pytest.mark.rule("F-10")
@pytest.mark.parametrize("why", ["a file", "not ours"])
async def test_a_folder_that_cannot_be_used_is_a_clear_error_at_the_start(
    why: str, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    if why == "a file":
        folder.write_text("mine")
        errors: tuple[type[BaseException], ...] = (StorageError,)
        with pytest.raises(errors, match="data"):
            async with opened(folder):
                pytest.fail("it opened")
        assert folder.read_text() == "mine"
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as top:
        folder = Path(top, "data")
        folder.mkdir(mode=0o555)
        Path(top).chmod(0o755)
        said = in_a_process(NOBODY, folder)
    assert "Permission" in said
    assert "data" in said


NOBODY = """
import os, sys
sys.path[:0] = sys.argv[2].split(":")
import trio
from culet.kernel import open_kernel
from culet.kernel.errors import StorageError
from kernel.test_faults_machine import Hub

async def main():
    try:
        async with open_kernel(roots=[Hub], storage="sqlite:" + sys.argv[1]):
            print("it opened")
    except StorageError as error:
        print(error)

if os.geteuid() == 0:  # root may do everything
    os.setgid(65534), os.setuid(65534)
trio.run(main)
"""
