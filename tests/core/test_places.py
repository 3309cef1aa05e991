"""Whether one more run may begin: bounds together, by class, and of detached runs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culet.kernel import RunCaps
from culet.kernel.core.places import Full, Want, full
from culet.kernel.errors import UsageError

A, B = Want("A", detached=False), Want("B", detached=False)
LOOSE = Want("A", detached=True)
bounds = st.none() | st.integers(0, 4)
wants = st.builds(Want, st.sampled_from("AB"), st.booleans())
taken = st.dictionaries(wants, st.integers(0, 4))
caps = st.builds(
    RunCaps, by_class=st.dictionaries(st.sampled_from("AB"), st.integers(0, 4)), detached=bounds
)  # fmt: skip


@pytest.mark.rule("B-08")
@pytest.mark.parametrize(
    ("most", "caps", "want", "taken", "bound"),
    [
        (None, RunCaps(), A, {A: 99}, None),
        (2, RunCaps(), A, {A: 1}, None),
        (2, RunCaps(), A, {A: 1, LOOSE: 1}, 2),
        (2, RunCaps(detached=1), A, {A: 1, LOOSE: 1}, None),
        (2, RunCaps(detached=1), LOOSE, {A: 1, LOOSE: 1}, 1),
        (2, RunCaps(detached=3), LOOSE, {A: 2, LOOSE: 2}, None),
        (None, RunCaps(by_class={"A": 2}), A, {A: 1, LOOSE: 1}, 2),
        (None, RunCaps(by_class={"A": 2}), B, {A: 1, LOOSE: 1}, None),
        (1, RunCaps(by_class={"A": 2}), A, {B: 1}, 1),
        (0, RunCaps(), A, {}, 0),
        (None, RunCaps(by_class={"A": 0}), A, {}, 0),
    ],
)
def test_which_bound_is_met(
    most: int | None,
    caps: RunCaps,
    want: Want,
    taken: dict[Want, int],
    bound: int | None,
) -> None:
    found = full(most, caps, want, taken)
    assert (None if found is None else found.bound) == bound


def test_the_text_says_which_bound_it_is() -> None:
    both = RunCaps(by_class={"A": 1}, detached=1)
    assert full(1, RunCaps(), A, {B: 1}) == Full(1, "1 runs are going on already")
    loose = full(None, both, LOOSE, {LOOSE: 1})
    assert loose == Full(1, "1 detached runs are going on already")
    of_class = full(None, both, A, {A: 1})
    assert of_class == Full(1, "1 runs of A are going on already")


@pytest.mark.rule("B-08")
@given(bounds, caps, wants, taken, wants)
def test_who_is_refused_is_refused_when_more_go_on(
    most: int | None, caps: RunCaps, want: Want, taken: dict[Want, int], more: Want
) -> None:
    if full(most, caps, want, taken) is not None:
        grown = Counter(taken) + Counter([more])
        assert full(most, caps, want, grown) is not None


@pytest.mark.rule("B-08")
@given(bounds, caps, taken)
def test_a_class_without_a_bound_of_its_own_minds_no_other_s(
    most: int | None, caps: RunCaps, taken: dict[Want, int]
) -> None:
    other = Want("C", detached=False)
    without = RunCaps(detached=caps.detached)
    assert full(most, caps, other, taken) == full(most, without, other, taken)


@given(bounds, caps, st.lists(wants, max_size=20))
def test_no_bound_is_passed_by_runs_that_begin_only_when_they_may(
    most: int | None, caps: RunCaps, asks: list[Want]
) -> None:
    going: Counter[Want] = Counter()
    for want in asks:
        if full(most, caps, want, going) is None:
            going[want] += 1
    loose = sum(n for w, n in going.items() if w.detached)
    together = going.total() - (0 if caps.detached is None else loose)
    assert most is None or together <= most
    assert caps.detached is None or loose <= caps.detached
    for name, bound in caps.by_class.items():
        assert sum(n for w, n in going.items() if w.class_name == name) <= bound


@pytest.mark.parametrize(
    "wrong",
    [
        {"by_class": {"A": -1}}, {"by_class": {"A": True}}, {"by_class": {"A": None}},
        {"detached": -1}, {"detached": 1.0}, {"wait_s": 0}, {"wait_s": float("inf")},
        {"wait_s": True}, {"wait_s": "1"},
    ],
)  # fmt: skip
def test_what_is_no_bound_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="is a"):
        RunCaps(**wrong)


def test_a_class_stands_for_its_name() -> None:
    assert RunCaps(by_class={Counter: 2}) == RunCaps(by_class={"Counter": 2})
