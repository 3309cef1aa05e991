"""The machine of timing, for as long as a test may take; `fuzz` runs on."""

from __future__ import annotations

from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import get_state_machine_test

from conftest import PROFILE
from machines.timing import TimeMachine


def test_nothing_owed_is_early_lost_or_in_a_burst() -> None:
    test = get_state_machine_test(
        TimeMachine,
        settings=settings(
            max_examples=60 if PROFILE == "ci" else 15,
            stateful_step_count=25,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    seed(1)(test)()  # so that the marks are reached each time

    TimeMachine.sometimes.check()
