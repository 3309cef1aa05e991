"""The map from the JavaScript SDK names only what exists."""

from __future__ import annotations

import importlib
import inspect
import re
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from culet.adapters import Think
from culet.kernel import Agent, Kernel, nouns, sockets
from culet.kernel import agent as agents

TEXT = (Path(__file__).parents[2] / "docs" / "coming-from-javascript.md").read_text()
ROWS = re.findall(r"^\| (.*?) \| (`.*?`) \|", TEXT, re.MULTILINE)
NAMES = sorted(
    {n for _, cell in ROWS for n in re.findall(r"`([\w.]+)(?:\(.*?\))?`", cell)}
)


def noun(of: type, name: str) -> Any:
    """Return what a property of an agent is annotated to return."""
    value = inspect.getattr_static(of, name)
    if isinstance(value, property) and value.fget is not None:
        wanted = str(value.fget.__annotations__.get("return", ""))
        for module in (nouns, sockets, agents):
            if hasattr(module, wanted):
                return getattr(module, wanted)
    return value


def found(name: str) -> Any:
    first, *rest = name.split(".")
    if first == "culet":
        *module, last = name.split(".")
        return getattr(importlib.import_module(".".join(module)), last)
    start: Any = {"self": Agent, "kernel": Kernel, "think": Think}[first]
    return reduce(noun, rest, start)


@pytest.mark.parametrize("name", NAMES)
def test_the_name_exists(name: str) -> None:
    assert found(name) is not None or name == "self.max_concurrent_agent_tools" or (
        name == "self.initial_state"
    )  # fmt: skip


def test_a_name_that_does_not_exist_would_be_found_out() -> None:
    for name in ("self.schedules.nope", "culet.web.nope", "kernel.nope"):
        with pytest.raises(AttributeError):
            found(name)
    assert len(NAMES) > 90
