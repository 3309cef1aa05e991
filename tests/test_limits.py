"""Every bound of `Limits` has a test that shows it at its edge and past it, or a reason.

The mark is `@pytest.mark.limit("name", …)` on the test.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from culet.kernel.core.limits import Limits

TESTS: Final = Path(__file__).parent
PACE: Final = "a pace: later or sooner, nothing is refused, cut or lost"
NO_EDGE: Final = {
    "busy_step_s": PACE,
    "slice_s": PACE,
    "flush_s": PACE,
    "checkpoint_s": PACE,
    "batch_s": PACE,
    "wake_slice": PACE,
    "adapter_poll_s": PACE,
    "sweep_runs": PACE,
}


def marked(source: str) -> list[tuple[str, str]]:
    """Return (test, name of a limit) for every mark in a module."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for mark in node.decorator_list:
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == MARK:
                names = [arg for arg in mark.args if isinstance(arg, ast.Constant)]
                found += [(node.name, str(name.value)) for name in names]
    return found


MARK: Final = "pytest.mark.limit"


@cache
def shown() -> dict[str, list[str]]:
    """Return the tests of each limit that has some."""
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        if "node_modules" in path.parts:
            continue
        text = path.read_text()
        if MARK in text:
            for test, name in marked(text):
                found.setdefault(name, []).append(f"{path.name}::{test}")
    return found


@pytest.mark.parametrize("name", Limits.__struct_fields__)
def test_a_limit_is_shown_at_its_edge_or_has_none(name: str) -> None:
    tests, why = shown().get(name, []), NO_EDGE.get(name)
    assert tests or why, f"no test is marked {MARK}({name!r})"
    assert not (tests and why), (
        f"{name} has a test, and is in the ledger of those without"
    )


def test_a_mark_names_a_limit() -> None:
    known = set(Limits.__struct_fields__)
    assert {n: t for n, t in shown().items() if n not in known} == {}
    assert set(NO_EDGE) <= known


def test_a_mark_is_found_where_it_stands() -> None:
    source = "@pytest.mark.limit('a', 'b')\nasync def test_x(): ...\ndef test_y(): ..."
    assert marked(source) == [("test_x", "a"), ("test_x", "b")]
