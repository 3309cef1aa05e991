"""`culet tree` and `culet runs`: a folder is read as recovery would find it, untouched."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio

from culet.kernel import Agent, Chunk, Turn, open_kernel
from culet.kernel.testing import open_test_kernel
from culet.web.__main__ import main


class Kid(Agent):
    resumable = True

    async def keep(self) -> None:
        self.sql("create table if not exists t (v)")
        self.sql("insert into t values (zeroblob(9000))")

    async def make(self, name: str) -> None:
        await self.dynamic_agents.get(Kid, name)

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        yield {"type": "text-delta", "id": "t", "delta": "x"}
        if turn.input == "fail":
            raise ValueError("no good")
        if turn.input == "go on":
            await trio.sleep_forever()


class Top(Kid):
    async def tick(self, payload: Any, schedule: Any) -> None:
        """Be called."""

    async def fill(self) -> None:
        await self.make("k")
        kid = await self.dynamic_agents.get(Kid, "k")
        await kid.keep()
        await kid.make("odd \x1b[31m/name")
        await self.schedule(1000, "tick")
        await self.run_agent_tool(Kid, "well", run_id="r1")
        await self.run_agent_tool(Kid, "fail", run_id="r2")
        await self.run_agent_tool(Kid, "go on", run_id="r3", detached=True)


def said(capsys: pytest.CaptureFixture[str], *args: str, status: int = 0) -> str:
    assert main(args) == status
    return capsys.readouterr().out


def objects(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def fingerprint(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def fill(folder: Path, *, crash: bool) -> None:
    """Make two roots, leave well or as a dead process does."""

    async def work() -> None:
        async with open_test_kernel(
            roots=[Top], facets=[Kid], storage=f"sqlite:{folder}"
        ) as test:
            for name in ("a", "b"):
                root = await test.kernel.get_agent(Top, name)
                if name == "a":
                    await root.fill()
            if crash:
                await test.crash()

    trio.run(work)


@pytest.mark.parametrize("crash", [False, True], ids=["closed", "crashed"])
def test_a_tree_is_told_and_nothing_is_touched(
    crash: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path, crash=crash)
    before = fingerprint(tmp_path)

    text = said(capsys, "tree", str(tmp_path), "--root", "Top/a")
    rows = objects(said(capsys, "tree", str(tmp_path), "--json"))

    assert fingerprint(tmp_path) == before
    names = [line.split("  ")[-2] for line in text.splitlines()]
    assert names == [
        "Top/a", "Kid/k", "Kid/odd \\u001b[31m/name", "Kid/r1", "Kid/r2", "Kid/r3",
    ]  # fmt: skip
    assert text.splitlines()[2].startswith("    Kid/odd"), "below k"
    by_path = {row["path"]: row for row in rows}
    assert by_path["Top/a"]["jobs"] == 1
    assert by_path["Top/a"]["runs"] == 1
    assert by_path["Top/a/Kid/k"]["bytes"] > 9000
    assert by_path["Top/a/Kid/r3"]["jobs"] == 1, "its turn is owed"
    assert "Top/b" in by_path
    assert len({row["slot"] for row in rows}) == 7


@pytest.mark.parametrize("crash", [False, True], ids=["closed", "crashed"])
def test_runs_are_told_all_or_of_one_status(
    crash: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path, crash=crash)

    rows = objects(said(capsys, "runs", str(tmp_path), "--json"))
    failed = said(capsys, "runs", str(tmp_path), "--status", "error")

    assert [(r["owner"], r["run_id"], r["status"]) for r in rows] == [
        ("Top/a", "r1", "completed"),
        ("Top/a", "r2", "error"),
        ("Top/a", "r3", "running"),
    ]
    assert rows[0]["agent_type"] == "Kid"
    assert failed == "Top/a  r2  Kid  error: no good\n"


def test_a_folder_that_a_kernel_has_open_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def work() -> None:
        async with open_kernel(
            roots=[Top], facets=[Kid], storage=f"sqlite:{tmp_path}"
        ) as kernel:
            await kernel.get_agent(Top, "a")
            assert main(["tree", str(tmp_path)]) == 2
            assert main(["runs", str(tmp_path), "--json"]) == 2

    trio.run(work)
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("a kernel has the folder") == 2
    assert "Top/a" in said(capsys, "tree", str(tmp_path))


def test_what_is_not_there_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said(capsys, "tree", str(tmp_path / "none"), status=2)
    fill(tmp_path / "data", crash=False)
    said(capsys, "tree", str(tmp_path / "data"), "--root", "Top/zz", status=2)


@pytest.mark.unsound("its log is overwritten")
def test_a_tree_that_cannot_be_read_hides_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def work() -> None:
        async with open_kernel(
            roots=[Top], facets=[Kid], storage=f"sqlite:{tmp_path}"
        ) as kernel:
            for name in ("a", "b"):
                await (await kernel.get_agent(Top, name)).keep()

    trio.run(work)
    found = sorted(tmp_path.glob("roots/*/*/*"))
    assert len(found) == 2
    with (found[0] / "log00000001").open("r+b") as log:
        log.write(b"no record at all")

    assert main(["tree", str(tmp_path)]) == 1
    told = capsys.readouterr()
    assert str(found[0]) in told.err
    assert told.out.count("Top/") == 1
