"""The machine of registry, for as long as a test may take; `fuzz` runs on."""

from __future__ import annotations

from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import get_state_machine_test

from conftest import PROFILE
from machines.registry import RegistryMachine


def test_the_registry_is_a_dictionary_that_survives() -> None:
    test = get_state_machine_test(
        RegistryMachine,
        settings=settings(
            max_examples=400 if PROFILE == "ci" else 60,
            stateful_step_count=30,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    seed(1)(test)()  # so that the marks are reached each time

    RegistryMachine.sometimes.check()
