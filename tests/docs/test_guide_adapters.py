"""The guide to adapters: its files are written and run."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from culet.kernel import Agent, AgentToolRun
from culet.kernel.testing import open_test_kernel

pytest_plugins = ["pytester"]

TEXT = (Path(__file__).parents[2] / "docs" / "guide-adapters.md").read_text()
BLOCKS = re.findall(r"^```python\n(# .*?)^```", TEXT, re.DOTALL | re.MULTILINE)
FILES = {block.split()[1]: block for block in BLOCKS}


@pytest.fixture
def reader(pytester: pytest.Pytester) -> Iterator[pytest.Pytester]:
    """A folder with what the reader has typed."""
    for name, source in FILES.items():
        pytester.path.joinpath(name).write_text(source)
    pytester.syspathinsert()
    yield pytester
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


def test_there_is_one_file_for_each_way() -> None:
    assert list(FILES) == [
        "counter.py", "critic.py", "echo.py", "chatbase.py", "test_chatbase.py",
    ]  # fmt: skip


def test_a_chat_base_has_fewer_than_a_hundred_lines_and_its_test_ten() -> None:
    assert len(FILES["chatbase.py"].splitlines()) < 100
    lines = [line for line in FILES["test_chatbase.py"].splitlines()[1:] if line]
    assert len(lines) <= 10


def test_the_readers_suite_passes(reader: pytest.Pytester) -> None:
    result = reader.runpytest_inprocess(
        "-q", "-p", "no:cacheprovider", "test_chatbase.py"
    )
    result.assert_outcomes(passed=18)


@pytest.mark.parametrize(
    ("name", "given", "wanted"),
    [
        ("Counter", 3, ("completed", "0 1 2 ", {"counted": 3})),
        ("Echo", "one two", ("completed", "one two ", {"words": 2})),
        ("Critic", "rate it", ("completed", '{"rate":"noted"}', None)),
    ],
)
async def test_the_other_ways_do_what_they_say(
    reader: pytest.Pytester, name: str, given: Any, wanted: tuple[Any, ...]
) -> None:
    module: Any = __import__(name.lower())
    child = getattr(module, name)

    class Parent(Agent):
        async def ask(self, given: Any) -> AgentToolRun:
            return await self.run_agent_tool(child, given, run_id="r")

    with trio.fail_after(20):
        async with open_test_kernel(roots=[Parent], facets=[child]) as test:
            top = await test.kernel.get_agent(Parent, "a")
            run = await top.ask(given)
            assert (run.status, run.summary, run.output) == wanted
            if name == "Critic":
                critic = await test.kernel.get_sub_agent(top, child, "r")
                assert await critic.marks() == 1
