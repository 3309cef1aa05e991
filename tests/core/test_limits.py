"""Limits: each is positive, and each is enforced somewhere."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from culet.kernel.core.limits import Limits

ROOT = Path(__file__).parent.parent.parent
SOURCES = [
    path
    for folder in ("kernel", "storage", "adapters", "web")
    for path in (ROOT / folder / "culet").rglob("*.py")
    if path.name != "limits.py"
]


def test_every_limit_is_used_by_some_code() -> None:
    used = {
        node.attr
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
    }
    assert [name for name in Limits.__struct_fields__ if name not in used] == []


@pytest.mark.parametrize("name", Limits.__struct_fields__)
def test_a_limit_that_is_not_positive_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Limits(**{name: 0})
