"""`AgentMachine`: a Hypothesis machine to subclass with rules on your own agents.

Crashes between rules and in the middle of a commit, time that passes and agents that
are dropped from memory are rules of its own; that promises hold is checked after every
rule and, at the end, after a long quiet time. Needs Hypothesis.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, ClassVar, Final

import outcome
import trio
import trio.testing
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from .agent import Agent
from .errors import ChildDidNotStop, UsageError
from .kernel import Kernel
from .node import Node, State
from .testing import Harness, open_test_kernel
from .testing_guest import TrioMachine
from .testing_ledger import Promise
from .testing_scenario import Client
from .testing_watch import quiet, statuses

log: Final = logging.getLogger("culet.kernel")
_STEP_S: Final = 1.0  # of the clock while a question is open


class AgentMachine(TrioMachine):
    """Rules are what clients do, with `self.ask(fn, *args)`; run it as `.TestCase`.

    Say `roots`, `facets`, `effects` as in the marker `culet_scenario`. `begin` is called
    for each example: give your agents `self.client` there, whose `effect`, `done`,
    `told` and `ended` they and your rules call. `recall` reads what was told.
    """

    roots: ClassVar[Iterable[type[Agent]]] = ()
    facets: ClassVar[Iterable[type[Agent]]] = ()
    effects: ClassVar[Mapping[str, Promise]] = {}
    patience_s: ClassVar[float] = 600.0  # of virtual time, for one question
    quiet_s: ClassVar[float] = 3600.0  # for all that is owed at the end

    def __init__(self) -> None:
        super().__init__()
        self.client = Client(self.effects)
        self._over = trio.Event()
        self._closed = trio.Event()
        self._asking: trio.CancelScope | None = None
        self._failed = False
        self.do(self._open)
        self.begin()

    # ---- what subclasses say and use

    def begin(self) -> None:
        """Called for each example, when its kernel is open: connect your agents."""

    async def recall(self) -> Mapping[str, Any]:
        """Return how a client reads now what it was told: `{key: value}`."""
        return self.client.ledger.tells

    @property
    def harness(self) -> Harness:
        """The kernel under test, with its faults and its clock."""
        return self.client.harness

    @property
    def kernel(self) -> Kernel:
        """The kernel of this life."""
        return self.client.kernel

    def ask(self, fn: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        """Run a coroutine function as a client; time passes until it has its answer.

        Returns None when the process died meanwhile (the next one is open then).
        """
        return self.do(self._ask, fn, args)

    # ---- lives

    async def _open(self) -> None:
        opened = trio.Event()
        self.client.mark()

        async def keep() -> None:
            try:
                async with open_test_kernel(
                    roots=self.roots, facets=self.facets, seed=self.scheduler_seed
                ) as self.client.harness:
                    self.harness.faults.on_write = self.client.wrote
                    log.addFilter(self._is_alive)
                    opened.set()
                    await self._over.wait()
            except ChildDidNotStop as error:
                self.client.ledger.find("leaked task", str(error), "it does not stop")
            finally:
                log.removeFilter(self._is_alive)
                self._closed.set()

        self.nursery.start_soon(keep)
        await opened.wait()

    def _is_alive(self, _record: logging.LogRecord) -> bool:
        """Keep what a dying kernel logs out of the report: it would hide the rest."""
        return not self.harness.faults.dead

    def _on_death(self) -> None:
        if self._asking is not None:
            self._asking.cancel()

    async def _ask(self, fn: Callable[..., Awaitable[Any]], args: Iterable[Any]) -> Any:
        out: list[outcome.Outcome[Any]] = []
        over = trio.Event()

        async def job() -> None:
            with trio.CancelScope() as self._asking:
                out.append(await outcome.acapture(fn, *args))
            self._asking = None
            over.set()

        self.nursery.start_soon(job)
        if not await self._wait_for(over):
            msg = f"{fn!r} has no answer after {self.patience_s:g} s"
            raise AssertionError(msg)
        if await self._revive():
            return None
        return out[0].unwrap()

    async def _wait_for(self, over: trio.Event) -> bool:
        waited = 0.0
        while True:
            await trio.testing.wait_all_tasks_blocked()
            if over.is_set():
                return True
            if waited >= self.patience_s:
                return False
            self.clock.jump(_STEP_S)
            waited += _STEP_S

    async def _revive(self, *, anyway: bool = False) -> bool:
        """Begin the next life if the process is dead; what was told is still there."""
        if not (anyway or self.harness.faults.dead):
            return False
        await self.client.resurrect()
        await trio.testing.wait_all_tasks_blocked()
        await self._check()
        return True

    async def _check(self) -> None:
        self.client.ledger.check_recall(await self.recall())
        self.client.ledger.check_runs(await statuses(self.harness))

    # ---- rules of its own

    @rule(seconds=st.sampled_from([0.1, 1.0, 10.0, 100.0]))
    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.do(self._advance, seconds)

    async def _advance(self, seconds: float) -> None:
        await self.harness.advance(seconds)
        await self._revive()

    @rule()
    def crash(self) -> None:
        """Kill the process between two rules."""
        self.do(self._crash)

    async def _crash(self) -> None:
        await self._revive(anyway=True)

    @rule(commits=st.integers(0, 12))
    def die_in_commit(self, commits: int) -> None:
        """Let the process die so many commits from now, in the middle of a step."""
        self.harness.faults.on_death = self._on_death
        self.harness.faults.die_after(commits)

    @rule(number=st.integers(1, 4), landed=st.booleans())
    def die_in_record(self, number: int, landed: bool) -> None:
        """Let the process die in one of the next records, lost or just landed."""
        self.harness.faults.on_death = self._on_death
        self.harness.faults.die_in_record(number, landed=landed)

    @rule()
    def evict(self) -> None:
        """Drop all agents that do nothing from memory."""
        self.do(self._evict)

    async def _evict(self) -> None:
        trees = list(self.kernel.trees.values())
        nodes = [n for t in trees if not t.closed for n in t.nodes.values()]
        for node in reversed(nodes):  # facets before their parents
            if node.state is State.LIVE and not node.busy:
                with suppress(UsageError):  # somebody came meanwhile
                    await self.harness.evict(_path(node))
        await self._revive()

    # ---- what must hold

    @invariant()
    def promises_hold(self) -> None:
        """No finding so far; see `culet.kernel.testing_ledger`."""
        findings = list(self.client.ledger.findings.values())
        self._failed = bool(findings)
        assert not findings, "\n".join(map(str, findings))

    def teardown(self) -> None:
        """Resume to quiet, look once more, close, and see what is left."""
        if self._end is None and not self._failed:
            try:
                self.do(self._finish)
            finally:
                super().teardown()
            self.promises_hold()
        else:
            super().teardown()

    async def _finish(self) -> None:
        self.harness.faults.heal()
        await self._revive()
        for what in await quiet(self.harness, self.quiet_s):
            self.client.ledger.find("stuck", what, f"after {self.quiet_s:g} s")
        await self._ask(self._check, ())
        self._over.set()
        if await self._wait_for(self._closed):
            self.client.leaked()


def _path(node: Node) -> list[tuple[str, str]]:
    return [(n.kind.name, n.name) for n in node.lineage()]
