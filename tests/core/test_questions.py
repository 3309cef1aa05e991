"""Questions: the first word that decides stands, and a report of them keeps its bounds."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from culet.kernel.core.limits import Limits
from culet.kernel.core.questions import ASKED, POLICIES, check_policy, decide, shown
from culet.kernel.errors import UsageError

RESULT = "input-available"


@pytest.mark.parametrize(
    ("policies", "state", "verdict"),
    [
        ([], ASKED, "ask"),
        (["bubble", "bubble"], ASKED, "ask"),
        (["deny"], ASKED, "deny"),
        (["deny"], RESULT, "deny"),
        (["auto"], ASKED, "approve"),
        (["auto"], RESULT, "ask"),  # nobody here can carry it out
        (["bubble", "auto", "deny"], ASKED, "approve"),
        (["auto", "deny"], RESULT, "deny"),  # what passes one meets the next
        (["deny", "auto"], ASKED, "deny"),
    ],
)
def test_the_nearest_word_that_decides(
    policies: list[Any], state: str, verdict: str
) -> None:
    assert decide(policies, state) == verdict


@given(st.lists(st.sampled_from(POLICIES)), st.sampled_from([ASKED, RESULT]))
def test_what_bubbles_changes_nothing(policies: list[Any], state: str) -> None:
    without = [p for p in policies if p != "bubble"]
    assert decide(policies, state) == decide(without, state)
    if "deny" in policies:
        assert decide(policies, state) != "ask"


@pytest.mark.parametrize("wrong", ["", "perhaps", None, 1, ["deny"]])
def test_a_policy_is_one_of_three(wrong: Any) -> None:
    with pytest.raises(UsageError):
        check_policy(wrong)


json = st.recursive(
    st.none() | st.integers(-9, 9) | st.text(max_size=40),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner)
    ),
    max_leaves=9,
)


@pytest.mark.limit("questions_shown", "questions_bytes")
@given(st.lists(json, max_size=9), st.integers(1, 5), st.integers(1, 300))
def test_a_report_keeps_its_bounds_and_tells_shapes_of_the_rest(
    inputs: list[Any], most: int, room: int
) -> None:
    limits = Limits(questions_shown=most, questions_bytes=room)
    calls = [{"toolCallId": str(n), "input": v} for n, v in enumerate(inputs)]
    told = shown(calls, limits)
    ids = [c["toolCallId"] for c in told]
    assert ids == [str(n) for n in range(len(ids))]
    assert len(ids) <= most
    for given_, call in zip(calls, told, strict=False):
        assert call.get("input", given_["input"]) == given_["input"]
        assert not ("input" in call and "inputShape" in call)
    assert sum(len(msgspec.json.encode(c)) for c in told) <= room + 20 * len(told)
    if len(msgspec.json.encode(calls)) <= room:
        assert told == calls[:most]


def test_with_the_default_limits_the_largest_report_fits() -> None:
    limits = Limits()
    calls = [
        {
            "runId": "r" * 36, "toolCallId": "c" * 900, "toolName": "t" * 64,
            "state": "approval-requested", "input": {"text": "x" * 20_000},
        }
    ] * 99  # fmt: skip
    calls[0] = {**calls[0], "input": "x" * (limits.questions_bytes - 2)}
    report = {"phase": "waiting", "data": {"calls": shown(calls, limits)}}
    assert len(msgspec.json.encode(report)) < limits.progress_bytes
