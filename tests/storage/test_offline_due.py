"""`culet tree DIR --due 24h`: what a folder owes, and why each fires when it does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trio

from culet.kernel import Agent, Retry, Schedule, open_kernel
from culet.kernel.testing import open_test_kernel
from culet.web.__main__ import main


class Top(Agent):
    async def plan(self, below: bool) -> None:
        if below:
            kid: Any = await self.dynamic_agents.get(Kid, "k\x1b[31m")
            await kid.plan(False)
            return
        await self.schedule(3000, "tick")
        await self.schedule_every(600, "tick")
        await self.schedule("0 0 * * *", "tick", tz="Europe/Berlin")
        paused = await self.schedule(1000, "tick")
        self.schedules.pause(paused.id)
        await self.schedule(1e7, "tick", "not in that time")
        slow = Retry(max_attempts=9, base_delay=2000, max_delay=2000)
        await self.schedule(0, "fail", retry=slow)

    async def later(self) -> None:
        await self.schedule(3000, "tick")

    async def settled(self, below: bool) -> bool:
        if below:
            kid: Any = await self.dynamic_agents.get(Kid, "k\x1b[31m")
            return bool(await kid.settled(False))
        return any(s.attempts and s.error for s in self.schedules.list())

    async def tick(self, payload: Any, schedule: Schedule) -> None: ...

    async def fail(self, payload: Any, schedule: Schedule) -> None:
        raise ValueError("bad\nnews")


class Kid(Top):
    pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which two roots and a facet owe calls."""
    place = tmp_path_factory.mktemp("due")

    async def work() -> None:
        async with open_kernel(
            roots=[Top], facets=[Kid], storage=f"sqlite:{place}"
        ) as kernel:
            for name, below in (("a", False), ("b", True)):
                root: Any = await kernel.get_agent(Top, name)
                await root.plan(below)
                while not await root.settled(below):
                    await trio.sleep(0.01)

    trio.run(work)
    return place


def lines(capsys: pytest.CaptureFixture[str], *args: str, status: int = 0) -> list[str]:
    assert main(args) == status
    return capsys.readouterr().out.splitlines()


def test_programs_are_told_each_with_its_reason(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ("tree", str(folder), "--due", "25h", "--json")
    rows = [json.loads(line) for line in lines(capsys, *args)]
    mine = [row for row in rows if row["path"] == "Top/a"]

    assert len(rows) == 2 * len(mine) == 10
    assert [row["due_at"] for row in mine] == sorted(row["due_at"] for row in mine)
    told = {(row["kind"], row["rule"], row["tz"], row["why"]) for row in mine}
    assert told == {
        ("once", None, None, "retry"),
        ("once", None, None, "time"),
        ("once", None, None, "paused"),
        ("every", "600 s", None, "time"),
        ("cron", "0 0 * * *", "Europe/Berlin", "time"),
    }
    (again,) = (row for row in mine if row["why"] == "retry")
    assert (again["attempts"], again["error"]) == (1, "ValueError: bad\nnews")


def test_people_are_told_line_by_line_and_no_name_colours_their_screen(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = lines(capsys, "tree", str(folder), "--due", "1h", "--root", "Top/b")
    told = [line for line in said if "(cron" not in line]  # midnight may be near

    assert len(told) == 4
    assert all("Top/b/Kid/k%1B[31m" in line for line in told)
    assert told[0][10] == " "
    assert told[0][19] == "Z"
    assert told[0].endswith("tick (every 600 s)")
    assert "tick (once), paused" in told[1]
    assert "fail (once), again after try 1: ValueError: bad\\u000anews" in told[2]


def test_people_are_told_that_there_is_nothing_and_programs_get_no_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def work() -> None:
        async with open_kernel(roots=[Top], storage=f"sqlite:{tmp_path}") as kernel:
            root: Any = await kernel.get_agent(Top, "a")
            await root.later()

    trio.run(work)

    assert lines(capsys, "tree", str(tmp_path), "--due", "5m") == [
        "nothing is due by then"
    ]
    assert lines(capsys, "runs", str(tmp_path)) == ["there are no such runs"]
    for command in (["tree", str(tmp_path), "--due", "5m"], ["runs", str(tmp_path)]):
        assert lines(capsys, *command, "--json") == []


@pytest.mark.unsound("no kernel writes such a time, and no slot was set for it")
def test_an_instant_that_no_calendar_has_is_told_as_its_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def work() -> None:
        async with open_test_kernel(roots=[Top], storage=f"sqlite:{tmp_path}") as test:
            root: Any = await test.kernel.get_agent(Top, "a")
            await root.later()
            tree = test.tree("Top", "a")
            assert tree is not None
            with tree.transaction():
                tree.db.execute("UPDATE job SET due_at = ?", (-(1 << 60),))
            await tree.durable()
            await test.crash()

    trio.run(work)

    (told,) = lines(capsys, "tree", str(tmp_path), "--due", "1h")
    assert told == f"{-(1 << 60)}  Top/a  tick (once), asked for now"


@pytest.mark.parametrize("text", ["", "24", "h", "-1h", "1w", "1e3h", "9999999d"])
def test_a_time_that_is_none_is_refused(
    text: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["tree", str(folder), f"--due={text}"])

    assert caught.value.code == 2
    assert "24h" in capsys.readouterr().err


@pytest.mark.parametrize("args", [("tree", "--due", "25h"), ("tree",), ("runs",)])
def test_who_has_seen_enough_is_told_nothing_more(
    folder: Path, args: tuple[str, ...]
) -> None:
    read, write = os.pipe()
    os.close(read)  # as `head` does
    command = [sys.executable, "-m", "culet.web", args[0], str(folder), *args[1:]]
    with os.fdopen(write, "wb") as pipe:
        done = subprocess.run(
            command, stdout=pipe, stderr=subprocess.PIPE, check=False, timeout=60
        )
    assert (done.returncode, done.stderr) == (141, b"")
