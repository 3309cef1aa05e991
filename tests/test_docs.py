"""What the papers say is run: the README's program and its commands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

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
