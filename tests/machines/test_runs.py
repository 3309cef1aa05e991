"""The machine of terminal authority, for as long as a test may take; `fuzz` runs on."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from conftest import PROFILE
from machines.runs import RunMachine


def test_runs_end_once_and_truthfully_whatever_happens() -> None:
    run_state_machine_as_test(
        RunMachine,
        settings=settings(
            max_examples=200 if PROFILE == "ci" else 25,
            stateful_step_count=40,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
