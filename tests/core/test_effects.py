"""What is done about an effect: the whole table, and laws over histories of it."""

from __future__ import annotations

import itertools
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culet.kernel.core.effects import (
    FOR_GOOD,
    Act,
    Done,
    NotDone,
    Policy,
    Standing,
    Status,
    Step,
    Verdict,
    after_check,
    decided,
    derive_token,
    next_step,
)

MOST = 3
POLICIES: tuple[Policy, ...] = get_args(Policy)
STATUSES: tuple[Status, ...] = get_args(Status)
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
# of a doubt, by policy: when it is begun and nobody is at work, and when it is asked
DOUBT: dict[Policy, tuple[Act, Act]] = {
    "repeat": ("run", "run"),
    "check": ("check", "check"),
    "ask": ("ask", "wait"),
    "fail": ("fail", "fail"),
}


def test_what_nobody_has_begun_is_begun() -> None:
    for policy in POLICIES:
        assert next_step(None, policy, most=MOST) == Step("run", 1)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("status", STATUSES)
def test_every_standing_has_one_step(
    status: Status, live: bool, policy: Policy
) -> None:
    step = next_step(Standing(status, 2, live), policy, most=MOST)

    wanted: Step
    match status:
        case "completed" | "error":
            wanted = Step("replay", 2)
        case "unknown":
            wanted = Step("fail", 2)
        case "granted":
            wanted = Step("run", 3)
        case "begun" if live:
            wanted = Step("join", 2)
        case _:
            act = DOUBT[policy][status == "asked"]
            wanted = Step(act, 3 if act == "run" else 2)
    assert step == wanted


@pytest.mark.parametrize(("status", "act"), [("begun", "ask"), ("asked", "wait")])
def test_a_repeat_that_never_gets_anywhere_becomes_a_question(
    status: Status, act: Act
) -> None:
    assert next_step(Standing(status, MOST), "repeat", most=MOST) == Step(act, MOST)


def test_a_check_settles_repeats_or_leaves_the_doubt() -> None:
    begun, asked = Standing("begun", 1), Standing("asked", 1)
    assert after_check(begun, Done(7)) == Step("replay", 1)
    assert after_check(begun, NotDone()) == Step("run", 2)
    for odd in (None, True, "done", Done, object()):
        assert after_check(begun, odd) == Step("ask", 1)
        assert after_check(asked, odd) == Step("wait", 1)


@pytest.mark.parametrize("verdict", VERDICTS)
@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("status", STATUSES)
def test_only_a_doubt_can_be_decided(
    status: Status, live: bool, verdict: Verdict
) -> None:
    found = decided(Standing(status, 1, live), verdict)
    if status in FOR_GOOD or (status == "begun" and live):
        assert found is None
    else:
        want = {"result": "completed", "error": "error", "repeat": "granted"}
        assert found == want.get(verdict, "unknown")


EVENTS = st.lists(
    st.sampled_from(["want", "crash", "end", *VERDICTS, "done", "not done", "odd"]),
    max_size=30,
)


class Outside:
    """One effect, those who want it, and how often the outside was asked to do it."""

    def __init__(self, policy: Policy) -> None:
        self.policy: Policy = policy
        self.row: Standing | None = None
        self.calls = 0
        self.allowed = 1  # calls that the policy, a check or a person permits
        self.outcomes = 0

    def event(self, event: str) -> None:
        row = self.row
        if event == "want":
            self.want()
        elif event == "crash" and row is not None:
            self.row = row._replace(live=False)
        elif event == "end" and row is not None and row.live:
            self.row, self.outcomes = Standing("completed", row.attempt), 1
        elif event in VERDICTS and row is not None:
            status = decided(row, event)  # type: ignore[arg-type]
            if status is not None:
                self.allowed += status == "granted" and row.status != "granted"
                self.outcomes += status in FOR_GOOD
                self.row = row._replace(status=status)

    def want(self, found: Any = None) -> None:
        step = next_step(self.row, self.policy, most=MOST)
        if step.act == "check":
            assert self.row is not None
            step = after_check(self.row, found)
            self.allowed += step.act == "run"
            if step.act == "replay":
                self.row = self.row._replace(status="completed")
                self.outcomes += 1
                return
        elif step.act == "run" and self.policy == "repeat" and self.row is not None:
            self.allowed += self.row.status in ("begun", "asked")
        match step.act:
            case "run":
                self.calls += 1
                self.row = Standing("begun", step.attempt, True)
            case "ask":
                assert self.row is not None
                self.row = self.row._replace(status="asked")


@given(policy=st.sampled_from(POLICIES), events=EVENTS)
def test_it_is_never_done_more_often_than_somebody_allowed(
    policy: Policy, events: list[str]
) -> None:
    world = Outside(policy)
    for event in events:
        before = world.row
        if event in ("done", "not done", "odd"):
            answers = {"done": Done(1), "not done": NotDone(), "odd": 1}
            world.want(answers[event])
        else:
            world.event(event)
        row = world.row
        assert world.calls <= world.allowed
        assert world.outcomes <= 1
        assert row is None or row.attempt == world.calls
        if before is not None and before.status in FOR_GOOD:
            assert row == before, "an outcome is for good"
        if row is not None and not row.live and row.status not in FOR_GOOD:
            assert row.uncertain, "what nobody does and nobody knows is a doubt"


@given(st.lists(st.text(max_size=4), min_size=8, max_size=8))
def test_a_token_is_of_one_effect_and_fits_everywhere(parts: list[str]) -> None:
    one, other = parts[:4], parts[4:]
    token = derive_token(*one)
    assert token == derive_token(*one)
    assert (token == derive_token(*other)) == (one == other)
    assert len(token) == 35
    assert token.isascii()
    assert token.replace("-", "").isalnum()


def test_texts_that_only_look_alike_have_tokens_of_their_own() -> None:
    pairs = [("a:b", "c"), ("a", "b:c"), ("a", "bc"), ("ab", "c")]
    tokens = [derive_token("s", "call", *pair) for pair in pairs]
    for one, other in itertools.combinations(tokens, 2):
        assert one != other
