"""The guide to mounting: its first steps are taken, its excerpts are the example's."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import trio

from culet.web import install
from docs.service import HYPERCORN, service

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "guide-mount.md").read_text()
FIRST, CLIENT, *EXCERPTS = re.findall(
    r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE
)


async def test_the_first_steps_lead_where_they_say(tmp_path: Path) -> None:
    (tmp_path / "service.py").write_text(FIRST)
    command = [*HYPERCORN, "service:app"]
    async with service(command, tmp_path, folder=tmp_path) as server:
        assert (await server.http("/"))[:2] == (200, "my own page\n")
        program = CLIENT.replace(
            "ws://127.0.0.1:8000", server.url.replace("http", "ws")
        )
        done = await trio.run_process(
            [sys.executable, "-W", "error", "-c", program],
            capture_stdout=True,
            stderr=subprocess.STDOUT,
            check=False,
        )
        assert done.stdout.decode() == "hello you, I am bo\n"
    assert (tmp_path / "data").is_dir()


def test_excerpts_are_the_examples() -> None:
    example = (DOCS / "examples" / "mounted.py").read_text()

    assert len(EXCERPTS) >= 6
    for excerpt in EXCERPTS:
        assert excerpt in example


def test_what_the_guide_says_of_install_exists() -> None:
    named = set(inspect.signature(install).parameters)
    assert {"authenticate", "admit", "origins", "prefix", "probes", "inspect"} <= named
    for name in ("authenticate", "admit", "probes", "origins", "prefix", "inspect"):
        assert f"`{name}" in TEXT or f"{name}=" in TEXT
