"""Testing your agents: its files are written and run, and what it prints is so."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from culet.kernel.testing_scenario import Spec

pytest_plugins = ["pytester"]

TEXT = (Path(__file__).parents[2] / "docs" / "testing-your-agents.md").read_text()
BLOCKS = re.findall(r"^```python\n(# .*?)^```", TEXT, re.DOTALL | re.MULTILINE)
REPORT = re.search(r"^```text\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
SHOP, TEST, FIXED, MACHINE = BLOCKS
PLUGIN = ("-p", "culet.kernel.pytest_plugin", "-q")


@pytest.fixture
def reader(pytester: pytest.Pytester) -> Iterator[pytest.Pytester]:
    """A folder with what the reader has typed so far."""
    for source in (SHOP, TEST):
        write(pytester, source)
    pytester.syspathinsert()
    yield pytester
    for name in ("shop", "test_shop", "test_shop_machine"):
        sys.modules.pop(name, None)


def write(pytester: pytest.Pytester, source: str) -> None:
    name = source.split()[1].strip(",")
    pytester.path.joinpath(name).write_text(source)


def numberless(text: str) -> str:
    """Counts of commits are the kernel's: they may change without the paper."""
    return re.sub(r"\b\d+\b", "*", text)


def fix(pytester: pytest.Pytester) -> None:
    first = SHOP.split("class Payment")[0]
    write(pytester, first + FIXED.split("\n", 1)[1])


def test_the_scenario_passes_as_a_plain_test(reader: pytest.Pytester) -> None:
    reader.runpytest_inprocess(*PLUGIN).assert_outcomes(passed=1)


def test_the_report_is_the_one_that_is_shown(reader: pytest.Pytester) -> None:
    result = reader.runpytest_inprocess(*PLUGIN, "--culet-crash")
    result.assert_outcomes(failed=1)
    assert REPORT is not None
    lines = numberless(REPORT[1]).splitlines()
    result.stdout.fnmatch_lines(lines, consecutive=True)


def test_the_cure_helps_as_it_says(reader: pytest.Pytester) -> None:
    fix(reader)
    result = reader.runpytest_inprocess(*PLUGIN, "--culet-crash")
    result.assert_outcomes(passed=1)
    said = re.search(r"^    (culet: .*)", TEXT, re.MULTILINE)
    assert said is not None
    result.stdout.fnmatch_lines([numberless(said[1])])


def test_the_machine_passes_with_the_cure(reader: pytest.Pytester) -> None:
    fix(reader)
    write(reader, MACHINE)
    result = reader.runpytest_inprocess(
        *PLUGIN, "-p", "no:cacheprovider", "test_shop_machine.py", "--hypothesis-seed=1"
    )
    result.assert_outcomes(passed=1)


def test_the_arguments_that_it_names_exist() -> None:
    named = re.search(r"^The marker takes (.*?)\. The", TEXT, re.MULTILINE)
    assert named is not None
    names = set(re.findall(r"`(\w+)`", named[1]))
    assert len(names) >= 7
    assert names <= set(Spec.__struct_fields__)
