"""The guide to agents: its blocks are run, in their order, on one kernel."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import trio

from culet.kernel import Agent, open_kernel
from culet.web import create_app
from web.serving import RUNNERS, Server

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "guide-agents.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


def compiled(block: str, number: int) -> CodeType:
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    return compile(block, f"guide-agents.md block {number}", "exec", flags)


def is_async(code: CodeType) -> bool:
    return bool(code.co_flags & 0x80)  # CO_COROUTINE: it awaits at its top


def definitions() -> dict[str, Any]:
    """Run all blocks that only define something."""
    names: dict[str, Any] = {"__name__": "guide"}
    for number, block in enumerate(BLOCKS):
        code = compiled(block, number)
        if not is_async(code) and "trio.run" not in block:
            exec(code, names)
    return names


@pytest.fixture
def guide(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    import types

    module = types.ModuleType("guide")  # annotations are looked up in their module
    monkeypatch.setitem(sys.modules, "guide", module)
    names = definitions()
    module.__dict__.update(names)
    return names


def test_the_guide_has_blocks_of_each_kind() -> None:
    kinds = [is_async(compiled(b, n)) for n, b in enumerate(BLOCKS)]
    assert kinds.count(True) >= 5
    assert kinds.count(False) >= 6


async def test_every_block_does_what_it_says(
    guide: dict[str, Any], tmp_path: Path
) -> None:
    classes = [
        c
        for c in guide.values()
        if isinstance(c, type) and issubclass(c, Agent) and c.__module__ == "guide"
    ]
    assert len(classes) >= 6
    async with open_kernel(
        roots=classes, facets=classes, storage=f"sqlite:{tmp_path}"
    ) as kernel:
        guide["kernel"] = kernel
        with trio.fail_after(20):
            for number, block in enumerate(BLOCKS):
                code = compiled(block, number)
                if is_async(code):
                    await eval(code, guide)


async def test_plain_http_does_what_it_says(guide: dict[str, Any]) -> None:
    ledger = guide["Ledger"]
    text = b"".join(b"line %d\n" % number for number in range(2_000))
    async with (
        open_kernel(roots=[ledger], facets=[ledger], storage="memory:") as kernel,
        trio.open_nursery() as nursery,
    ):
        server = Server(await nursery.start(RUNNERS["own"], create_app(kernel)), kernel)
        for path in ("/agents/ledger/a/lines", "/agents/ledger/a/sub/ledger/b/lines"):
            status, _, body = await server.http("POST", path, body=text)
            assert (status, body) == (201, b'{"lines":2000}')
            status, headers, body = await server.http("GET", path)
            assert (status, headers["content-type"]) == (200, "text/plain")
            assert body == text
        assert (await server.http("GET", "/agents/ledger/a/else"))[0] == 404
        nursery.cancel_scope.cancel()


def test_the_program_runs_by_itself(tmp_path: Path) -> None:
    program = next(b for b in BLOCKS if "trio.run" in b)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", BLOCKS[0] + program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("1\n", "")


async def test_the_test_of_the_guide_passes(guide: dict[str, Any], clock: Any) -> None:
    for name, test in list(guide.items()):
        if name.startswith("test_"):
            await test(clock)
            return
    raise AssertionError("the guide shows no test")
