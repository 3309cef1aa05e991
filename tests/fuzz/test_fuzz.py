"""`python -m fuzz` itself: every target plays, marks are reached, failures repeat."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
QUICK = ("path", "frames", "replay", "wire")
SLOW = ("treelog", "rows")
BROKEN = """
import sys
sys.argv = ["fuzz", "--rounds", "9", "path"]
from culet.kernel.core import path
sys.path.insert(0, "tests")
import urllib.parse
twice = urllib.parse.unquote_to_bytes
path.unquote_to_bytes = lambda segment: twice(twice(segment).decode("latin-1"))
import fuzz.__main__ as fuzz
fuzz.Corpus.keep = lambda *_: None
sys.exit(fuzz.main())
"""


def fuzz(*args: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does."""
    command = ["-m", "fuzz"] if code is None else ["-c", code]
    return subprocess.run(
        [sys.executable, *command, *args],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_every_small_target_plays_and_reaches_its_marks() -> None:
    for count, names in ((200, QUICK), (25, SLOW)):
        done = fuzz("--rounds", str(count), "--marks", *names)
        assert done.returncode == 0, done.stdout + done.stderr


def test_each_target_says_what_it_attacks() -> None:
    lines = fuzz("--list").stdout.splitlines()

    assert len(lines) >= 11
    assert all(len(line.split()) > 8 for line in lines)


def test_a_failure_prints_the_one_line_that_repeats_it() -> None:
    done = fuzz(code=BROKEN)

    assert done.returncode == 1, done.stderr
    assert "repeat: python -m fuzz --seed " in done.stdout
    assert done.stdout.rstrip().endswith("--rounds 1 path")
