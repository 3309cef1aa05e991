"""The guide to mounting: its first steps are taken, its excerpts are the example's."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

from culet.web import install
from docs.service import HYPERCORN, said_by, service

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "guide-mount.md").read_text()
FIRST, CLIENT, *BLOCKS = re.findall(
    r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE
)
(SHOP,) = [block for block in BLOCKS if "/hooks/payments" in block]
(DESK,) = [block for block in BLOCKS if "kernel.operator" in block]
EXCERPTS = [b for b in BLOCKS if b not in (SHOP, DESK) and "def " in b]
LINES = [block for block in BLOCKS if "def " not in block]  # that stand by themselves
(PRINTED,) = re.findall(r"^```text\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


async def test_the_first_steps_lead_where_they_say(tmp_path: Path) -> None:
    (tmp_path / "service.py").write_text(FIRST)
    command = [*HYPERCORN, "--workers", "0", "service:app"]
    async with service(command, tmp_path, folder=tmp_path) as server:
        assert (await server.http("/"))[:2] == (200, "my own page\n")
        assert await said_by(CLIENT, server) == "hello you, I am bo\n"
    assert (tmp_path / "data").is_dir()


async def test_the_shop_says_what_the_guide_says(tmp_path: Path) -> None:
    command = [*HYPERCORN, "--workers", "0", "hooks:app"]
    async with service(command, tmp_path) as server:
        assert await said_by(SHOP, server) == PRINTED


def test_the_operator_does_what_the_guide_says() -> None:
    done = subprocess.run(
        [sys.executable, "-c", DESK], capture_output=True, text=True, timeout=30,
        check=True,
    )  # fmt: skip
    said = TEXT.partition(DESK)[2].partition("It prints\n\n")[2]
    assert done.stdout == "".join(
        f"{line.strip()}\n" for line in said.splitlines() if line.startswith("    ")
    )


def test_excerpts_are_the_examples() -> None:
    examples = [
        (DOCS / "examples" / name).read_text() for name in ("mounted.py", "hooks.py")
    ]

    assert len(EXCERPTS) >= 7
    for excerpt in EXCERPTS:
        assert any(excerpt in example for example in examples), excerpt
    for line in LINES:
        compile(line, "the guide", "exec")


def test_what_the_guide_says_of_install_exists() -> None:
    named = set(inspect.signature(install).parameters)
    assert {"authenticate", "admit", "origins", "prefix", "probes", "inspect"} <= named
    for name in ("authenticate", "admit", "probes", "origins", "prefix", "inspect"):
        assert f"`{name}" in TEXT or f"{name}=" in TEXT
