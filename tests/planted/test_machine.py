"""`AgentMachine` finds planted bugs by itself, and nothing in agents without them."""

from __future__ import annotations

import pytest
import trio
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from culet.kernel.testing_machine import AgentMachine
from planted.machines import (
    BookMachine,
    ForgetfulMachine,
    LeakyMachine,
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
    [
        (WriteBehindMachine, "lost event"),
        (ForgetfulMachine, "duplicated effect"),
    ],
)
def test_the_machine_finds_a_planted_bug(
    machine: type[AgentMachine], kind: str
) -> None:
    with pytest.raises(AssertionError, match=kind):
        run_state_machine_as_test(machine, settings=HUNT)


@pytest.mark.parametrize("machine", [BookMachine, TillMachine])
def test_the_machine_lets_right_agents_pass(machine: type[AgentMachine]) -> None:
    run_state_machine_as_test(machine, settings=SETTINGS)


def test_at_its_end_the_machine_sees_tasks_that_leaked() -> None:
    machine = LeakyMachine()
    machine.die_in_commit(commits=5)
    machine.run(number=0)  # cut in the middle; recovery leaks
    machine.run(number=0)
    machine.evict()
    machine.promises_hold()
    with pytest.raises(AssertionError, match="leaked task"):
        machine.teardown()


def test_what_a_dying_process_logs_is_not_in_the_report(
    caplog: pytest.LogCaptureFixture,
) -> None:
    machine = TillMachine()
    for number in range(3):
        for commits in range(4, 8):
            machine.die_in_commit(commits=commits)
            machine.run(number=number)
    assert caplog.messages == []
    machine.teardown()


def test_a_question_without_an_answer_fails() -> None:
    machine = TillMachine()
    with pytest.raises(AssertionError, match="no answer after 600 s"):
        machine.ask(trio.sleep_forever)
    machine.crash()
    machine.teardown()


def test_what_was_told_is_looked_for_after_each_crash() -> None:
    machine = BookMachine()
    machine.do(told_what_is_not_there, machine)
    machine.promises_hold()
    machine.crash()
    with pytest.raises(AssertionError, match="lost event: n7"):
        machine.promises_hold()
    machine.teardown()


async def told_what_is_not_there(machine: AgentMachine) -> None:
    machine.client.told("n7", "milk")
