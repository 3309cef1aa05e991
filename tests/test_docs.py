"""What the papers say is run: the README's program and its commands."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from culet.kernel import Agent, Kernel
from culet.kernel.effectnoun import EffectsNoun
from culet.kernel.fibernoun import FibersNoun
from culet.kernel.nouns import SchedulesNoun
from culet.kernel.runnoun import RunsNoun

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_program_in_the_readme_prints_what_it_says_twice(tmp_path: Path) -> None:
    program = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    said = re.search(r"It prints `(.*?)`, and", README)
    assert program and said

    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", program[1]],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.stdout.strip() == said[1], done.stderr


def test_the_readme_is_short_and_names_targets_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()

    assert README.count("\n") < 200
    for target in re.findall(r"^    make ([\w-]+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_links_inside_the_papers_lead_somewhere() -> None:
    for paper in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for link in re.findall(r"\]\(([^)#]+)\)", paper.read_text()):
            if "://" not in link:
                assert (paper.parent / link).exists(), f"{paper.name}: {link}"


NOUNS = {
    "runs": RunsNoun, "effects": EffectsNoun, "schedules": SchedulesNoun, "fibers": FibersNoun,
}  # fmt: skip


@pytest.mark.parametrize("name", re.findall(r"(?:self|kernel)(?:\.\w+)+(?=\()", README))
def test_what_the_readme_calls_is_there(name: str) -> None:
    first, *rest = name.split(".")
    start: Any = {"self": Agent, "kernel": Kernel}[first]

    assert callable(reduce(lambda of, n: NOUNS.get(n) or getattr(of, n), rest, start))


def test_each_decision_has_a_number_of_its_own() -> None:
    numbers = [p.name[:4] for p in (ROOT / "docs" / "decisions").glob("*.md")]

    assert len(numbers) == len(set(numbers))
