"""A proof that plays too little fails, and so does a test that leaves a broken folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from volume import ASKED, PROFILE, Ledger, Volume

ROOT = Path(__file__).parent.parent
SAMPLE = """
import shutil
import pytest
from storage.driving import KEY, NOTE, add_node, barrier, opened
from volume import ASKED, LEDGER

@pytest.mark.volume("kills")
def test_enough():
    LEDGER.add("kills", ASKED["kills"].now)

@pytest.mark.volume("power images")
def test_too_little():
    LEDGER.add("power images", ASKED["power images"].now - 1)

def leave_broken(tmp_path):
    store = opened(str(tmp_path / "data"))
    tree = store.open_tree(KEY, level="power")
    add_node(tree, "root0")
    tree.agent("root0").execute(NOTE, ("a", "1"))
    barrier(tree)
    store.close()
    shutil.rmtree(tmp_path / "data" / "templates")

def test_broken(tmp_path):
    leave_broken(tmp_path)

@pytest.mark.unsound("on purpose")
def test_broken_on_purpose(tmp_path):
    leave_broken(tmp_path)
"""


def play(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Run the sample as its own run of the tests."""
    sample = folder / "test_sample.py"
    sample.write_text(SAMPLE)
    path = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml")),
            *("-p", "conftest", "-p", "no:cacheprovider", "--rootdir", str(folder)),
            *more,
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.slow
def test_a_run_that_plays_too_little_fails_and_says_what(tmp_path: Path) -> None:
    done = play(tmp_path, "-k", "enough or too_little", str(tmp_path))

    assert done.returncode == 1, done.stdout + done.stderr
    assert "TOO LITTLE: power images" in done.stdout
    assert "TOO LITTLE: kills" not in done.stdout


@pytest.mark.slow
def test_a_folder_that_is_left_broken_fails_and_a_part_of_a_proof_is_not_judged(
    tmp_path: Path,
) -> None:
    names = ("too_little", "broken", "broken_on_purpose")
    done = play(tmp_path, *(f"{tmp_path}/test_sample.py::test_{n}" for n in names))

    assert done.returncode == 1, done.stdout + done.stderr
    bad = [
        line for line in done.stdout.splitlines() if line.startswith(("ERR", "FAIL"))
    ]
    assert [line.rpartition("::")[2].split()[0] for line in bad] == ["test_broken"]
    assert "template" in done.stdout
    assert "TOO LITTLE" not in done.stdout


def test_a_ledger_counts_and_knows_what_is_missing() -> None:
    ledger = Ledger()
    ledger.add("kills", ASKED["kills"].now - 1)
    assert ledger.short_of(["kills"]) == ["kills"]
    ledger.add("kills")
    assert ledger.short_of(["kills"]) == []
    assert ledger.lines(["kills"])[0].startswith("kills: ")


def test_one_profile_is_on_and_each_is_more_than_the_one_before() -> None:
    assert PROFILE in Volume._fields
    for volume in ASKED.values():
        assert volume.short < volume.ci < volume.long
