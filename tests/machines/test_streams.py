"""The machine of streams, for as long as a test may take; `fuzz` runs on."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from conftest import PROFILE
from machines.streams import StreamMachine


def test_replay_and_live_fold_to_the_same_state() -> None:
    run_state_machine_as_test(
        StreamMachine,
        settings=settings(
            max_examples=200 if PROFILE == "ci" else 40,
            stateful_step_count=30,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
