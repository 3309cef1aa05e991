"""Why something fires when it does: every state of a row has one answer."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culet.kernel.core.job import Cron, Interval, encode_every
from culet.kernel.core.upcoming import OWED_COLUMNS, OwedRow, Why, describe, explain

ROW = OwedRow(7, "slot", "call", "ring", None, 1000, 1000, 0, None, 0, None)


def row(**changed: Any) -> OwedRow:
    return ROW._replace(**changed)


def test_the_columns_are_those_of_the_row() -> None:
    assert tuple(OWED_COLUMNS.split(", ")) == OwedRow._fields


@pytest.mark.parametrize(
    ("changed", "why", "said"),
    [
        ({}, "time", "ring (once)"),
        ({"due_at": 900}, "asked", "ring (once), asked for now"),
        (
            {"attempts": 2, "error": "ValueError: bad", "due_at": 1500},
            "retry",
            "ring (once), again after try 2: ValueError: bad",
        ),
        ({"attempts": 1}, "retry", "ring (once), again after try 1: cut off"),
        ({"attempts": 3, "held": 5}, "running", "ring (once), running, try 3"),
        ({"paused": 1, "held": 5, "attempts": 1}, "paused", "ring (once), paused"),
    ],
)
def test_each_state_has_its_reason(changed: Any, why: Why, said: str) -> None:
    told = explain(row(**changed), "Top/a")

    assert told.why == why
    assert told.path == "Top/a"
    assert describe(told) == said


@pytest.mark.parametrize(
    ("kind", "every", "expected"),
    [
        ("call", None, ("once", None, None)),
        ("call", Interval(90), ("every", "90 s", None)),
        ("call", Interval(0.5), ("every", "0.5 s", None)),
        ("call", Cron("0 9 * * mon", "Europe/Berlin"),
         ("cron", "0 9 * * mon", "Europe/Berlin")),
        ("queue", None, ("queue", None, None)),
        ("turn", None, ("turn", None, None)),
    ],
)  # fmt: skip
def test_a_rule_is_told_with_its_zone(kind: str, every: Any, expected: Any) -> None:
    text = None if every is None else encode_every(every)
    told = explain(row(kind=kind, every=text), "p")

    assert (told.kind, told.rule, told.tz) == expected
    for word in filter(None, expected):
        assert word in describe(told)


@given(
    st.text() | st.just('{"type":"interval","seconds":-1}'),
    st.integers(0, 9), st.none() | st.integers(), st.integers(0, 1), st.integers(),
)  # fmt: skip
def test_no_row_is_too_bad_to_be_told(
    every: str, attempts: int, held: int | None, paused: int, due_at: int
) -> None:
    bad = row(every=every, attempts=attempts, held=held, paused=paused, due_at=due_at)
    told = explain(bad, "p")

    assert told.kind in ("every", "cron")
    assert describe(told)
    if told.rule is None:
        assert "cannot be read" in (told.error or "")
