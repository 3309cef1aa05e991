"""The state machines of `tests/machines` as targets: a round is some histories."""

from __future__ import annotations

import sys
import time
from typing import Any, Final
from unittest import SkipTest

from hypothesis import HealthCheck, seed, settings
from hypothesis.errors import HypothesisException
from hypothesis.stateful import RuleBasedStateMachine, get_state_machine_test

from fuzz.case import Case, Target
from machines.gate import GateMachine
from machines.registry import RegistryMachine
from machines.runs import RunMachine
from machines.sometimes import Sometimes
from machines.streams import StreamMachine
from machines.timing import TimeMachine

MACHINES: Final[dict[str, type[RuleBasedStateMachine]]] = {
    "gate": GateMachine,
    "registry": RegistryMachine,
    "runs": RunMachine,
    "streams": StreamMachine,
    "time": TimeMachine,
}
HISTORIES: Final = 10
STEPS: Final = (20, 40, 80)  # rules of a history, in turn

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


def target(name: str, machine: type[RuleBasedStateMachine]) -> Target:
    """Return one machine as a target."""

    def play(case: Case) -> None:
        played = timed(machine)
        test = get_state_machine_test(
            played,
            settings=settings(
                max_examples=HISTORIES,
                stateful_step_count=STEPS[case.seed % len(STEPS)],
                deadline=None,
                database=None,
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            ),
        )
        run: Any = seed(case.seed)(test)
        try:
            run()
        except HypothesisException:
            # It wonders why a history that it knows has not begun this time.
            if time.monotonic() <= deadline or getattr(played, "failed", False):
                raise
            raise TimeIsUp from None

    module = sys.modules[machine.__module__]
    said = " ".join((module.__doc__ or "").split()).partition(". ")[0].rstrip(".") + "."
    return Target(name, said, play, getattr(machine, "sometimes", Sometimes()))


def targets() -> dict[str, Target]:
    """Return all machines as targets."""
    return {name: target(name, machine) for name, machine in MACHINES.items()}
