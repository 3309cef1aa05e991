"""`python -m fuzz [--seconds N] [--seed S] [--machine runs|streams]`.

Runs the machines of `tests/machines` in rounds, each round with a seed of its own, until
the time is up or a history fails. A failure is shrunk, printed with the round's seed, and
the exit code is 1; `--seed` with that number plays the same round again.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
from pathlib import Path
from typing import Final

from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, get_state_machine_test

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from machines.runs import RunMachine
from machines.streams import StreamMachine

MACHINES: Final[dict[str, type[RuleBasedStateMachine]]] = {
    "runs": RunMachine,
    "streams": StreamMachine,
}
ROUND: Final = 100  # histories
STEPS: Final = (20, 40, 80)  # rules of a history, in turn


def play(machine: type[RuleBasedStateMachine], number: int) -> None:
    """Play one round of histories; raise what fails, shrunk."""
    test = get_state_machine_test(
        machine,
        settings=settings(
            max_examples=ROUND,
            stateful_step_count=STEPS[number % len(STEPS)],
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
    seed(number)(test)()


def main() -> int:
    """Play rounds of all machines in turn until the time is up."""
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--machine", choices=sorted(MACHINES), action="append")
    asked = parser.parse_args()
    logging.disable(logging.CRITICAL)  # what is planned to fail is logged as such
    names = asked.machine or sorted(MACHINES)
    began = time.monotonic()
    number = asked.seed
    while True:
        for name in names:
            try:
                play(MACHINES[name], number)
            except Exception:
                traceback.print_exc()
                print(f"machine {name}, round --seed {number}: FAILED")
                return 1
        number += 1
        passed = time.monotonic() - began
        print(f"{number - asked.seed} rounds, {passed:.0f} s, all good", flush=True)
        if passed >= asked.seconds:
            return 0


if __name__ == "__main__":
    sys.exit(main())
