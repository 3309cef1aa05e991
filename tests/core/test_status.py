"""The lattice of statuses: total, absorbing, and silent about who watches."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culet.kernel.core.limits import TERMINALS
from culet.kernel.core.status import (
    CAUSES,
    STATUSES,
    TABLE,
    Cause,
    Moved,
    Refused,
    advance,
    ended_by,
    own_words,
    settled,
)

CELLS = list(itertools.product(STATUSES, CAUSES))
SETTLES = {
    "finished": "completed", "failed": "error", "over-budget": "error", "bad-output": "error",
    "cancelled": "aborted", "asker-ended": "aborted", "start-failed": "error",
    "forgotten": "aborted", "skipped": "aborted",
    "recovery-exhausted": "error", "not-started": "interrupted",
    "deleted": "interrupted", "class-gone": "interrupted",
    "not-resumable": "interrupted", "budget-exceeded": "interrupted",
    "not-resumed": "interrupted", "silent": "interrupted",
    "deadline": "error", "cleared": "error",
}  # fmt: skip


def test_the_table_is_total_and_holds_nothing_else() -> None:
    assert set(TABLE) == set(CELLS)


@pytest.mark.rule("I-02")
@pytest.mark.parametrize(("status", "cause"), CELLS, ids="-".join)
def test_every_cell(status: str, cause: Cause) -> None:
    outcome = advance(status, cause)
    if status in TERMINALS or cause not in SETTLES:
        assert outcome == Refused(status)
    else:
        assert isinstance(outcome, Moved)
        assert outcome.status == SETTLES[cause]
        assert outcome.status in TERMINALS


def test_terminals_are_the_four() -> None:
    assert set(STATUSES) - TERMINALS == {"running"}
    assert len(TERMINALS) == 4


@pytest.mark.rule("I-02")
@given(st.lists(st.sampled_from(CAUSES)))
def test_the_first_settling_cause_wins_whatever_follows(causes: list[Cause]) -> None:
    status = "running"
    for cause in causes:
        outcome = advance(status, cause)
        if isinstance(outcome, Moved):
            status = outcome.status
    first = next((SETTLES[c] for c in causes if c in SETTLES), "running")
    assert status == first


@pytest.mark.parametrize("cause", CAUSES)
def test_what_ends_a_run_says_how_and_what_only_watches_does_not(cause: Cause) -> None:
    if cause in SETTLES:
        assert settled(cause) == advance("running", cause)
    else:
        with pytest.raises(ValueError, match=cause):
            settled(cause)


# ---- who ended it


class Row(NamedTuple):
    status: str
    reason: str | None


@pytest.mark.rule("B-18")
@pytest.mark.parametrize("cause", sorted(SETTLES))
def test_a_row_names_the_cause_that_ended_it(cause: Cause) -> None:
    assert ended_by(Row(*settled(cause))) == cause


@pytest.mark.rule("B-18")
@given(
    st.text()
    | st.sampled_from(sorted(filter(None, {r for _, r in map(settled, SETTLES)})))
)
def test_a_caller_s_own_words_are_never_taken_for_those_of_the_table(text: str) -> None:
    reason = own_words(text) or "cancelled"
    assert ended_by(Row("aborted", reason)) == "cancelled"
    assert text in reason or not text


def test_a_caller_may_say_cancelled_which_is_what_it_is() -> None:
    assert own_words("cancelled") == "cancelled"
    assert own_words("deleted") == '"deleted"'


@pytest.mark.rule("B-18")
def test_what_has_not_ended_or_was_refused_has_no_cause() -> None:
    assert ended_by(Row("running", None)) is None
    assert ended_by(Row("running", "no-progress")) is None
    assert ended_by(Row("error", "capacity")) is None
    assert ended_by(Row("aborted", None)) is None, "resolved from outside"
