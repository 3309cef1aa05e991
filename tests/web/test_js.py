"""The modules of the page and of the npm package, by Node alone: no server, no browser."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

JS = Path(__file__).parent.parent / "js"
STATIC = JS.parent.parent / "web/culet/web/demo/static"
MODULES = JS.parent.parent / "web/js/src"
NODE = shutil.which("node")
ALONE = (
    "vectors.test.mjs",
    "chat.test.mjs",
    "line.test.mjs",
    "page-parts.test.mjs",
)


@pytest.mark.rule("W-065", "W-066")
@pytest.mark.skipif(NODE is None and "CI" not in os.environ, reason="there is no node")
@pytest.mark.parametrize("name", ALONE)
def test_page_modules(name: str) -> None:
    assert NODE is not None, "CI needs node"

    # `node --test` inside another test runner would report to that one: run it plainly.
    done = subprocess.run(
        [NODE, "--test", "--test-reporter=tap", name],
        cwd=JS,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={k: v for k, v in os.environ.items() if k != "NODE_TEST_CONTEXT"},
    )

    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"^# pass (\d+)$", done.stdout, re.MULTILINE)
    assert passed and int(passed[1]) >= 10, done.stdout


def test_the_page_puts_text_in_as_text_and_loads_nothing_from_elsewhere() -> None:
    for path in sorted((*STATIC.glob("*.*"), *MODULES.glob("*.js"))):
        source = path.read_text()
        for way in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
        ):
            assert way not in source, f"{path.name} uses {way}"
        for address in re.findall(r"""(?:https?:)?//[\w.-]+\.\w+[^\s"']*""", source):
            assert address.startswith("http://www.w3.org/"), f"{path.name}: {address}"


def test_the_page_runs_under_a_strict_content_policy() -> None:
    html = (STATIC / "index.html").read_text()

    assert "default-src 'none'" in html
    assert "unsafe" not in html
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", html)
    for name in re.findall(r'(?:src|href)="/static/([^"]+)"', html):
        assert (STATIC / name).is_file(), name
