"""Do the machines bite? Each of these faults, put in on purpose, must be caught."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, get_state_machine_test

from culet.kernel import endings, stops
from culet.kernel import tree as trees
from culet.kernel.core import abort
from culet.kernel.errors import CuletError
from culet.kernel.node import Node, State
from culet.kernel.nouns import DynamicAgents
from culet.kernel.places import Places
from culet.kernel.questions import Questions
from culet.kernel.stops import Stops
from culet.kernel.tree import Tree
from machines.parallel import RegistryTogether, TreeTogether
from machines.tools import ToolMachine
from machines.tree import TreeMachine

ROUNDS = 60  # of ten histories


class Mutant(NamedTuple):
    """A fault, and the machine that must meet it."""

    breaks: Callable[[pytest.MonkeyPatch], None]
    machine: type[RuleBasedStateMachine]
    steps: int = 20


def _two_starts_at_once(patch: pytest.MonkeyPatch) -> None:
    class Forgetful(dict[str, Node]):
        def __init__(self) -> None:
            self.lost: Counter[str] = Counter()

        def get(self, slot: str, default: Any = None) -> Any:
            node = super().get(slot, default)
            if node is None or node.state is not State.STARTING or self.lost[slot] > 3:
                return node
            self.lost[slot] += 1  # a few times, or it would start for ever
            return default

    make = Tree.__init__

    def forgetful(tree: Tree, *args: Any) -> None:
        make(tree, *args)
        tree.nodes = Forgetful()

    patch.setattr(Tree, "__init__", forgetful)


def _a_delete_that_forgets_what_is_below(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(endings, "BELOW", "WITH sub (slot) AS (SELECT ?) ")


def _a_wipe_before_the_mark_is_durable(patch: pytest.MonkeyPatch) -> None:
    delete = Stops.delete

    async def hasty(self: Stops, slot: str) -> None:
        if self.tree.store.agent(slot).exists:
            self.tree.store.delete(slot)
            await self.tree.barrier.room()  # for one record
        await delete(self, slot)

    patch.setattr(Stops, "delete", hasty)


def _no_fence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Node, "check", lambda _node: None)


def _an_evicted_node_that_lives_on(patch: pytest.MonkeyPatch) -> None:
    async def evict(tree: Tree, node: Node) -> bool:
        if node.state is not State.LIVE or node.busy:
            return False
        del tree.nodes[node.slot]
        return True

    patch.setattr(Tree, "evict", evict)


def _a_list_that_shows_the_gone(patch: pytest.MonkeyPatch) -> None:
    assert " AND state = 'live'" in trees._CHILDREN
    everybody = trees._CHILDREN.replace(" AND state = 'live'", "", 1)
    patch.setattr(trees, "_CHILDREN", everybody)


def _a_lookup_that_makes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DynamicAgents, "lookup", DynamicAgents.get)


def _parents_stop_first(patch: pytest.MonkeyPatch) -> None:
    plan = abort.plan

    def reversed_plan(nodes: Iterable[tuple[Any, Any, int]]) -> list[Any]:
        return plan(nodes)[::-1]

    patch.setattr(stops.core, "plan", reversed_plan)


def _an_abort_that_deletes_what_was_written(patch: pytest.MonkeyPatch) -> None:
    forget = Tree.forget

    def too_much(tree: Tree, node: Node) -> None:
        forget(tree, node)
        if node.reason is None and tree.store.agent(node.slot).exists:
            tree.store.delete(node.slot)

    patch.setattr(Tree, "forget", too_much)


def _a_write_that_is_told_before_it_is_durable(patch: pytest.MonkeyPatch) -> None:
    async def at_once(_tree: Tree) -> None:
        return

    patch.setattr(Tree, "durable", at_once)


def _a_question_that_outlives_its_run(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Questions, "above", lambda _questions, _ended: [])


def _a_question_that_is_heard_on_its_own_level_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Questions, "_below", lambda _questions, turn: list(turn.waits))


def _who_stands_in_line_is_not_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Places, "ended", lambda _places, _owner: None)


def _a_place_that_is_never_given_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Places, "_took", lambda _places, _owner, _waiter: None)


MUTANTS = [
    Mutant(_two_starts_at_once, RegistryTogether, 6),
    Mutant(_a_delete_that_forgets_what_is_below, TreeMachine),
    Mutant(_a_wipe_before_the_mark_is_durable, RegistryTogether, 12),
    Mutant(_no_fence, TreeMachine),
    Mutant(_an_evicted_node_that_lives_on, TreeMachine),
    Mutant(_a_list_that_shows_the_gone, RegistryTogether, 8),
    Mutant(_a_lookup_that_makes, TreeTogether, 6),
    Mutant(_parents_stop_first, TreeMachine),
    Mutant(_an_abort_that_deletes_what_was_written, TreeMachine),
    Mutant(_a_write_that_is_told_before_it_is_durable, RegistryTogether, 8),
    Mutant(_a_question_that_outlives_its_run, ToolMachine),
    Mutant(_a_question_that_is_heard_on_its_own_level_alone, ToolMachine),
    Mutant(_who_stands_in_line_is_not_told, ToolMachine),
    Mutant(_a_place_that_is_never_given_back, ToolMachine),
]


def play(machine: type[RuleBasedStateMachine], number: int, steps: int) -> None:
    """Play some histories of one seed; what is found is not shrunk."""
    test: Any = get_state_machine_test(
        machine,
        settings=settings(
            max_examples=10,
            stateful_step_count=steps,
            phases=[Phase.generate],
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
    seed(number)(test)()


def bites(name: str) -> None:
    """Exit with 0 when the machine catches that fault."""
    mutant = next(m for m in MUTANTS if m.breaks.__name__ == name)
    with pytest.MonkeyPatch.context() as patch:
        mutant.breaks(patch)
        try:
            for number in range(ROUNDS):
                play(mutant.machine, number, mutant.steps)
        except (AssertionError, CuletError):
            return
    sys.exit(f"{ROUNDS} rounds met nothing")


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.breaks.__name__.strip("_"))
def test_a_machine_catches_a_fault(mutant: Mutant) -> None:
    """In a process of its own: what Hypothesis draws hangs on what is imported."""
    name = mutant.breaks.__name__
    program = f"from machines.test_bite import bites; bites({name!r})"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
