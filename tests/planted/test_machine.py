"""`AgentMachine` finds planted bugs by itself, and nothing in agents without them."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from culet.kernel.testing_machine import AgentMachine
from planted.machines import (
    BookMachine,
    ForgetfulMachine,
    TillMachine,
    WriteBehindMachine,
)

SETTINGS = settings(
    max_examples=40,
    stateful_step_count=25,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
HUNT = settings(SETTINGS, max_examples=400, phases=[Phase.generate])


@pytest.mark.parametrize(
    ("machine", "kind"),
    [(WriteBehindMachine, "lost event"), (ForgetfulMachine, "duplicated effect")],
)
def test_the_machine_finds_a_planted_bug(
    machine: type[AgentMachine], kind: str
) -> None:
    with pytest.raises(AssertionError, match=kind):
        run_state_machine_as_test(machine, settings=HUNT)


@pytest.mark.parametrize("machine", [BookMachine, TillMachine])
def test_the_machine_lets_right_agents_pass(machine: type[AgentMachine]) -> None:
    run_state_machine_as_test(machine, settings=SETTINGS)
