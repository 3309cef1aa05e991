"""The machine of gate, for as long as a test may take; `fuzz` runs on."""

from __future__ import annotations

from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import get_state_machine_test

from conftest import PROFILE
from machines.gate import GateMachine


def test_nothing_leaves_early_and_order_is_kept() -> None:
    test = get_state_machine_test(
        GateMachine,
        settings=settings(
            max_examples=1500 if PROFILE == "ci" else 150,
            stateful_step_count=50,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    seed(1)(test)()  # so that the marks are reached each time

    GateMachine.sometimes.check()
