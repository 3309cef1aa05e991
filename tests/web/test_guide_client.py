"""What the guide says that the two clients call things exists."""

from __future__ import annotations

import re
from pathlib import Path

import culet.web as web
from culet.kernel import errors
from culet.web import RemoteAgent, client_events, connect

ROOT = Path(__file__).parents[2]
ROWS = re.findall(
    r"^\| [^|]+ \| ([^|]+) \| ([^|]+) \|$",
    (ROOT / "docs/guide-client.md").read_text().partition("## The same in Java")[2],
    re.MULTILINE,
)
TYPES = "\n".join(path.read_text() for path in (ROOT / "web/js/src").glob("*.d.ts"))


def named(cell: str) -> list[str]:
    """Return the names in backticks, each without what it is called with."""
    found = re.findall(r"`([^`]+)`", cell)
    return [re.split(r"[(=.{ ]", name.removeprefix("new "))[0] for name in found]


def test_each_client_has_what_the_table_names() -> None:
    where = (RemoteAgent, web, client_events, errors)
    options = {"headers", "code", *connect.__annotations__}
    python = [name for left, _ in ROWS for name in named(left)]
    javascript = [name for _, right in ROWS for name in named(right)]

    assert len(ROWS) >= 15
    assert len(python) >= 20
    for name in python:
        assert name in options or any(hasattr(w, name) for w in where), name
    for name in javascript:
        assert re.search(rf"\b{name.removeprefix('culet/')}\b", TYPES) or (
            name == "culet/http" and (ROOT / "web/js/src/http.d.ts").exists()
        ), name
