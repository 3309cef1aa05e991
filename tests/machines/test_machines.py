"""Every machine, for as long as a test may take; `python -m fuzz` runs on."""

from __future__ import annotations

from typing import ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from machines import play
from machines.play import MACHINES, Machine, Steps
from machines.sometimes import Sometimes
from volume import ASKED, Ledger, Volume


@pytest.mark.rule("G-04", "B-20")
@pytest.mark.proof
@pytest.mark.volume("machine steps")
@pytest.mark.slow
@pytest.mark.parametrize("name", MACHINES)
def test_it_holds_for_as_many_steps_as_asked_and_meets_every_mark(name: str) -> None:
    assert play.play(name, MACHINES[name].steps.now) >= MACHINES[name].steps.now

    MACHINES[name].sometimes.check()


@pytest.mark.parametrize("profile", Volume._fields)
def test_together_the_machines_come_up_to_what_is_asked(profile: str) -> None:
    together = sum(getattr(machine.steps, profile) for machine in MACHINES.values())

    assert together >= getattr(ASKED["machine steps"], profile)


# ---- the runner itself


class Small(RuleBasedStateMachine):
    """Goes up and down, and knows how often. Nothing more."""

    sometimes: ClassVar = Sometimes("up", "high")
    executed: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.height = 0

    @rule(by=st.integers(1, 3))
    def up(self, by: int) -> None:
        type(self).executed += 1
        self.height += by
        self.sometimes.hit("up")
        self.sometimes.hit("high", self.height > 30)

    @rule()
    @precondition(lambda self: self.height > 0)
    def down(self) -> None:
        type(self).executed += 1
        self.height -= 1


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> type[Small]:
    monkeypatch.setattr(Small, "sometimes", Sometimes("up", "high"))
    monkeypatch.setitem(MACHINES, "small", Machine(Small, Volume(1, 1, 1)))
    monkeypatch.setattr(play, "SPARE_ROUNDS", 3)
    monkeypatch.setattr(play, "LEDGER", Ledger())
    return Small


def test_the_steps_are_those_that_were_executed(small: type[Small]) -> None:
    steps = Steps()
    counted = steps.of(small)
    for number in (1, 2, 3):
        play.play_round(counted, number)

    assert steps.count == counted.executed > 300  # type: ignore[attr-defined]


def test_it_goes_on_until_every_mark_is_reached(small: type[Small]) -> None:
    played = play.play("small", 1)

    assert not small.sometimes.missing()
    assert played == play.LEDGER.done["machine steps"]


def test_a_mark_that_is_never_reached_fails(
    small: type[Small], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(play, "LENGTHS", (5,))  # too short to come high

    with pytest.raises(AssertionError, match="never reached: high"):
        play.play("small", 1)
