"""The machines by name, and the one way to play them: tests and `fuzz` share both.

A round of a machine is some histories from one seed. What Hypothesis draws for a seed
also depends on which modules are loaded (it collects their constants), so nothing may
hang on a lucky seed: `play` goes on, round after round, until it has executed the steps
that were asked for and has reached every mark.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any, Final, NamedTuple

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    get_state_machine_test,
    invariant,
)

from machines.effects import EffectMachine
from machines.gate import GateMachine
from machines.parallel import RegistryTogether, TreeTogether
from machines.registry import RegistryMachine
from machines.runs import RunMachine
from machines.sometimes import Sometimes
from machines.streams import StreamMachine
from machines.submissions import SubmissionMachine
from machines.timing import TimeMachine
from machines.tools import ToolMachine
from machines.visitors import VisitedTree
from volume import LEDGER, Volume

HISTORIES: Final = 10  # of a round
LENGTHS: Final = (20, 40, 80)  # rules of a history, by the seed of its round
SPARE_ROUNDS: Final = 300  # beyond what the steps need, until all marks are reached


class Machine(NamedTuple):
    """One machine, and the steps of it that each profile asks for."""

    cls: type[RuleBasedStateMachine]
    steps: Volume

    @property
    def sometimes(self) -> Sometimes:
        """What a run of it must have met."""
        return getattr(self.cls, "sometimes", Sometimes())

    @property
    def claim(self) -> str:
        """The first sentence of its module."""
        said = sys.modules[self.cls.__module__].__doc__
        assert said, "a machine says what its invariant is"
        return " ".join(said.split()).partition(". ")[0].rstrip(".") + "."


# One line makes a machine known to the tests and to `fuzz`.
MACHINES: Final[dict[str, Machine]] = {
    "effects": Machine(EffectMachine, Volume(600, 10_000, 200_000)),
    "gate": Machine(GateMachine, Volume(6_000, 160_000, 4_200_000)),
    "registry": Machine(RegistryMachine, Volume(1_500, 10_000, 200_000)),
    "runs": Machine(RunMachine, Volume(1_000, 10_000, 200_000)),
    "streams": Machine(StreamMachine, Volume(1_200, 10_000, 200_000)),
    "submissions": Machine(SubmissionMachine, Volume(800, 10_000, 200_000)),
    "time": Machine(TimeMachine, Volume(400, 10_000, 200_000)),
    "tools": Machine(ToolMachine, Volume(600, 10_000, 200_000)),
    "tree": Machine(VisitedTree, Volume(600, 10_000, 200_000)),
    "registry-together": Machine(RegistryTogether, Volume(150, 3_000, 50_000)),
    "tree-together": Machine(TreeTogether, Volume(150, 3_000, 50_000)),
}


class Steps:
    """Counts the rules that were executed, whatever Hypothesis calls an example."""

    def __init__(self) -> None:
        self.count = 0

    def of(self, machine: type[RuleBasedStateMachine]) -> type[RuleBasedStateMachine]:
        """Return the machine that counts here.

        Its invariants are looked at once before the first rule and once after each.
        """
        steps = self

        class Counted(machine):  # type: ignore[misc, valid-type]
            def __init__(self) -> None:
                super().__init__()
                steps.count -= 1

            @invariant()
            def one_step_more(self) -> None:
                steps.count += 1

        Counted.__name__ = Counted.__qualname__ = machine.__name__
        return Counted


def play_round(machine: type[RuleBasedStateMachine], number: int) -> None:
    """Play the histories of one seed. Raises what the machine found, shrunk."""
    test: Any = get_state_machine_test(
        machine,
        settings=settings(
            max_examples=HISTORIES,
            stateful_step_count=LENGTHS[number % len(LENGTHS)],
            phases=[Phase.generate, Phase.shrink],
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
    seed(number)(test)()


def play(name: str, steps: int) -> int:
    """Play rounds 1, 2, 3, … until so many steps and every mark; return the steps.

    Fails with the marks that are missing when a generous number of rounds is over.
    """
    machine, counted = MACHINES[name], Steps()
    cls = counted.of(machine.cls)
    before = spare = 0
    for number in itertools.count(1):
        if counted.count >= steps:
            if not machine.sometimes.missing():
                break
            spare += 1
            if spare > SPARE_ROUNDS:
                machine.sometimes.check()
        try:
            play_round(cls, number)
        except BaseException as error:
            line = f"python -m fuzz --seed {number} --rounds 1 {name}"
            error.add_note(f"round {number}; perhaps again by: {line}")
            raise
        assert counted.count > before, "a round without a step"
        LEDGER.add("machine steps", counted.count - before)
        before = counted.count
    return counted.count
