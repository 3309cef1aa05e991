"""The state machines of `tests/machines` as targets: a round is some histories."""

from __future__ import annotations

import sys
import time
from unittest import SkipTest

from hypothesis.errors import HypothesisException
from hypothesis.stateful import RuleBasedStateMachine

from fuzz.case import Case, Target
from machines.play import MACHINES, Machine, play_round

deadline = float("inf")


class TimeIsUp(SkipTest):
    """Ends a round between two histories; Hypothesis lets it through."""


def timed(machine: type[RuleBasedStateMachine]) -> type[RuleBasedStateMachine]:
    """Return the machine that begins no history after the deadline.

    Unless one has failed: then it is being shrunk, and that may take its time.
    """

    class Timed(machine):  # type: ignore[misc, valid-type]
        failed = False

        def __init__(self) -> None:
            if time.monotonic() > deadline and not Timed.failed:
                raise TimeIsUp
            super().__init__()

        def teardown(self) -> None:
            self.note(sys.exc_info()[1])
            try:
                super().teardown()
            except Exception as error:
                self.note(error)
                raise

        @staticmethod
        def note(error: BaseException | None) -> None:
            if isinstance(error, Exception) and not isinstance(
                error, HypothesisException
            ):
                Timed.failed = True

    Timed.__name__ = Timed.__qualname__ = machine.__name__
    return Timed


def target(name: str, machine: Machine) -> Target:
    """Return one machine as a target."""

    def play(case: Case) -> None:
        played = timed(machine.cls)
        try:
            play_round(played, case.seed)
        except HypothesisException:
            # It wonders why a history that it knows has not begun this time.
            if time.monotonic() <= deadline or getattr(played, "failed", False):
                raise
            raise TimeIsUp from None

    return Target(name, machine.claim, play, machine.sometimes)


def targets() -> dict[str, Target]:
    """Return all machines as targets."""
    return {name: target(name, machine) for name, machine in MACHINES.items()}
