"""What older versions have stored is looked at, recovered, migrated and replayed today.

One recording per released schema, made by `storage/old/make.py` and never again.
"""

from __future__ import annotations

import json
import sqlite3
import tarfile
from pathlib import Path
from typing import Any

import pytest

from culet.kernel.testing import Harness, open_test_kernel
from culet.storage.doctor_folder import look
from culet.storage.schema import AGENT, TREE
from storage.old.world import HEARD, Frail, Keeper, Talker, Worker

OLD = Path(__file__).parent / "old"
VERSIONS = sorted(path.name.removesuffix(".tar.xz") for path in OLD.glob("*.tar.xz"))
STATUSES = {
    "done": "completed",
    "failed": "error",
    "stopped": "aborted",
    "deleted": "interrupted",
}


@pytest.fixture(params=VERSIONS)
def recorded(
    request: pytest.FixtureRequest, tmp_path: Path
) -> tuple[Path, dict[str, Any]]:
    """A recording in a folder of its own, and the frames of its runs."""
    folder = tmp_path / "data"
    with tarfile.open(OLD / f"{request.param}.tar.xz") as tar:
        tar.extractall(folder, filter="data")
    HEARD.clear()
    return folder, json.loads((OLD / f"{request.param}.json").read_text())


def test_each_schema_has_a_recording() -> None:
    newest = max(len(TREE), len(AGENT))
    assert [f"v{number}" for number in range(1, newest + 1)] == VERSIONS
    assert sum(path.stat().st_size for path in OLD.glob("*.xz")) < 150_000


def test_the_doctor_finds_it_sound_and_behind_its_log(
    recorded: tuple[Path, dict[str, Any]],
) -> None:
    folder, _ = recorded
    report = look(str(folder), as_found=True)

    assert report.ok, report
    assert [(t.root, t.nodes, t.files) for t in report.trees] == [
        ("Keeper/k", 7, 8),
        ("Talker/t", 1, 2),
    ]
    notes = "\n".join(note for tree in report.trees for note in tree.notes)
    assert "tree.db: recovery brings" in notes
    assert "tree.db-wal has" in notes


def test_without_the_log_it_would_be_another_tree(
    recorded: tuple[Path, dict[str, Any]],
) -> None:
    """So the recording really needs its log redone."""
    folder, _ = recorded
    [keeper, _] = look(str(folder)).trees
    path = f"{keeper.folder}/tree.db"
    connection = sqlite3.connect(f"file:{path}?immutable=1", uri=True)
    gone = connection.execute("SELECT count(*) FROM node WHERE state = 'gone'")
    assert gone.fetchone()[0] == 0
    connection.close()


def everything(test: Harness) -> dict[str, int]:
    tree = test.tree("Keeper", "k")
    assert tree is not None
    sql = "SELECT kind, count(*) FROM job GROUP BY kind"
    return dict(tree.db.execute(sql))


def undated(frames: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return frames without what only newer versions say of a run: when it began."""
    return [{k: v for k, v in f.items() if k != "startedAt"} for f in frames]


@pytest.mark.rule("G-19", "F-12", "F-249")
async def test_it_is_recovered_and_goes_on_and_every_run_replays_the_same(
    recorded: tuple[Path, dict[str, Any]], autojump_clock: Any
) -> None:
    folder, frames = recorded
    assert len(frames) == 6
    async with open_test_kernel(
        roots=[Keeper, Talker], facets=[Worker, Frail], storage=f"sqlite:{folder}"
    ) as test:
        keeper = await test.kernel.get_agent(Keeper, "k")
        await test.advance(1)
        assert await keeper.statuses() == {
            **STATUSES,
            "going": "running",
            "cut": "interrupted",
        }
        assert await keeper.notes() == ["first", "second"]
        assert await keeper.state_now() == {"jobs": 3}
        for run in STATUSES:
            assert undated(await keeper.frames(run)) == undated(frames[run]), run
        assert everything(test) == {"call": 3, "turn": 1}
        assert "fiber dig {'deep': 3}" in HEARD
        assert "finish cut interrupted" in HEARD
        assert "finish deleted interrupted" in HEARD
        await test.advance(10_000)
        assert (await keeper.statuses())["going"] == "completed"
        for run in ("going", "cut"):
            told = frames[run]
            assert undated(await keeper.frames(run))[: len(told)] == undated(told)
            assert len(told) == 3
        assert {"tick 1", "tick 3"} <= set(HEARD)
        talker = await test.kernel.get_agent(Talker, "t")
        assert await talker.said() == ["hello", "heard"]
        await talker.hear("again")
    report = look(str(folder))
    assert report.ok, report
    assert [(t.root, t.nodes, t.files) for t in report.trees] == [
        ("Keeper/k", 6, 7),
        ("Talker/t", 1, 2),
    ]
