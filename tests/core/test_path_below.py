"""The path below an agent: one codec, wherever the walk begins."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culet.kernel.core.path import (
    PathBelow,
    PathStep,
    build_agent_path,
    find_below,
    parse_agent_path,
    parse_below,
)
from culet.kernel.errors import NotFound, UsageError

CLASSES = ("Desk", "Clerk", "AIChat")
names = st.text(min_size=1, max_size=12).filter(
    lambda t: "\0" not in t and t not in {".", ".."} and t.isprintable()
)
hops = st.lists(st.tuples(st.sampled_from(CLASSES), names), min_size=1, max_size=3)
leaves = st.sampled_from([None, "/", "/x", "/callbacks/job", "/a%20b"])
pieces = st.sampled_from(
    ["sub", "clerk", "desk", "a-i-chat", "Clerk", "x", "%2F", "%00", "%zz", "..", "%2e",
     "", "a b", "\\", "?q=/sub/clerk/x", "#/sub/clerk/y", "sub/clerk/c", "é", "%C3%A9",
     "%ff", "." ]
)  # fmt: skip
tails = st.lists(pieces, max_size=12).map("/".join)


@given(hops, leaves, st.sampled_from(["agents", "api/v1"]))
def test_what_was_built_is_found_and_read(
    steps: list[tuple[str, str]], leaf: str | None, prefix: str
) -> None:
    path = build_agent_path([("Desk", "root"), *steps], prefix=prefix, leaf_path=leaf)
    found = find_below(path + "?x=/sub/clerk/other")
    assert found is not None
    below = parse_below(found, CLASSES)

    assert below == PathBelow(tuple(PathStep(*s) for s in steps), leaf or "/")
    assert parse_below(below.tail(0), CLASSES) == below


@given(tails)
def test_a_walk_from_a_root_and_one_from_below_it_read_the_same(tail: str) -> None:
    def read(fn: object) -> object:
        try:
            return fn()  # type: ignore[operator]
        except (UsageError, NotFound) as error:
            return type(error), str(error)

    whole = read(lambda: parse_agent_path(f"/agents/desk/r/{tail}", CLASSES))
    below = read(lambda: parse_below(f"/{tail}", CLASSES))
    assert (whole.below if hasattr(whole, "below") else whole) == below


@given(st.text(max_size=60))
def test_reading_returns_or_refuses(text: str) -> None:
    for raw in (text, quote(text), f"/sub/clerk/{text}"):
        found = find_below(raw)
        assert found is None or found.startswith("/sub")
        try:
            below = parse_below(raw, CLASSES)
        except (UsageError, NotFound):
            continue
        assert below.leaf_path.startswith("/")
        assert len(below.hops) <= 3


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/api/u/a/sub/clerk/c", "/sub/clerk/c"),
        ("sub/clerk/c/", "/sub/clerk/c"),
        ("/a//sub///clerk/c", "/sub/clerk/c"),
        ("/sub/sub/clerk/c", "/sub/sub/clerk/c"),
        ("/subs/clerk/c", None),
        ("/x?to=/sub/clerk/c", None),
        ("/x#/sub/clerk/c", None),
        ("/%73ub/clerk/c", None),
        ("", None),
    ],
)
def test_the_first_marker_begins_it(path: str, found: str | None) -> None:
    assert find_below(path) == found
