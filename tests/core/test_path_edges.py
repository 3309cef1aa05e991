"""Edges of addresses that no vector stands on."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culet.kernel.core.path import (
    build_agent_path,
    build_agent_url,
    parse_agent_path,
    path_text,
)
from culet.kernel.errors import UsageError


@pytest.mark.parametrize(
    ("origin", "want"),
    [
        ("http://h:80", "http://h"), ("ws://h:80", "ws://h"),
        ("https://h:443", "https://h"), ("wss://h:443", "wss://h"),
        ("http://h:443", "http://h:443"), ("wss://h:80", "wss://h:80"),
        ("ws://H:8080", "ws://h:8080"), ("https://[::1]:443/", "https://[::1]"),
    ],
)  # fmt: skip
def test_only_the_port_that_a_scheme_implies_is_left_out(
    origin: str, want: str
) -> None:
    assert build_agent_url(origin, [("A", "x")]) == f"{want}/agents/a/x"


def test_a_root_called_sub_is_neither_built_nor_parsed() -> None:
    with pytest.raises(UsageError, match="sub"):
        build_agent_path([("A", "sub")])
    with pytest.raises(UsageError, match="sub"):
        parse_agent_path("/agents/a/sub", ["A"])
    assert build_agent_path([("A", "x"), ("A", "sub")]) == "/agents/a/x/sub/a/sub"


def test_marks_that_clients_leave_alone_are_left_alone() -> None:
    assert build_agent_path([("A", "x"), ("A", "-_.!~*'()")]).endswith("/-_.!~*'()")
    assert build_agent_path([("A", "x"), ("A", "a!b c/")]).endswith("/a!b%20c%2F")


@pytest.mark.parametrize("name", ["A%", "A%41"])
def test_a_class_with_an_escape_in_its_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="segment"):
        build_agent_path([(name, "x")])


@pytest.mark.parametrize("segment", ["%ff", "%c3", "%ed%a0%80"])
def test_bytes_that_are_no_text_are_a_mistake_of_the_client(segment: str) -> None:
    with pytest.raises(UsageError, match="UTF-8"):
        parse_agent_path(f"/agents/a/{segment}", ["A"])
    with pytest.raises(UsageError, match="UTF-8"):
        parse_agent_path(f"/agents/a/x/sub/a/{segment}", ["A"])


NAMES = st.text(st.sampled_from("a/%\x1b\n 2F\u2028é"), min_size=1, max_size=5)
STEPS = st.lists(st.tuples(st.sampled_from(["A", "B"]), NAMES), max_size=3)


@given(STEPS, STEPS)
def test_two_paths_never_read_the_same(one: list[Any], other: list[Any]) -> None:
    assert (path_text(one) == path_text(other)) == (one == other)


def test_a_path_for_people_is_a_line_of_names_as_they_are() -> None:
    steps = [("Shop", "é b"), ("Cart", "a/b%2F\x1b[31m")]
    assert path_text(steps) == "Shop/é b/Cart/a%2Fb%252F%1B[31m"
