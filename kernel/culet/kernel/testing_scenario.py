"""A scenario on a user's own agents, and one run of it with the process stopped once.

A scenario is an async function that asks agents for things as a client does, with ids
that the client chose. `run_scenario` runs it in virtual time; with a `Point` the process
dies in that commit or record, the next life resumes to quiet, the client reads what it
was told, and then asks for everything again with the same ids.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final, Literal, NamedTuple, Self, TypeVar, final

import msgspec
import trio

from . import testing_seeded
from .agent import Agent
from .core.limits import Limits
from .errors import ChildDidNotStop, StorageError, UsageError
from .kernel import Kernel
from .testing import Harness, open_test_kernel
from .testing_ledger import Finding, Ledger, Promise
from .testing_watch import all_tasks, late, place, quiet, statuses, task_name

A = TypeVar("A", bound=Agent)
Body = Callable[["Scenario"], Awaitable[None]]
Classes = Iterable[type[Agent]] | Callable[[], Iterable[type[Agent]]]
Recall = Callable[[], Awaitable[Mapping[str, Any]]]
_SQL_SHOWN: Final = 60
_POINT: Final = re.compile(r"(r?)(\d+)(\+?)")


@final
class Point(NamedTuple):
    """Where the process stops: in the n-th commit or record, counted from one.

    A commit it dies in is not made. A record it dies in has not reached the disk
    (`record`), or has and nobody was told (`landed`). As text: `7`, `r3`, `r3+`.
    """

    kind: Literal["commit", "record", "landed"]
    number: int

    def __str__(self) -> str:
        if self.kind == "commit":
            return str(self.number)
        return f"r{self.number}" + ("+" if self.kind == "landed" else "")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what `str` wrote. Raises `UsageError`."""
        match = _POINT.fullmatch(text.strip())
        if match is None or int(match[2]) < 1 or (match[3] and not match[1]):
            msg = f"a point is 7 (a commit), r3 or r3+ (a record), not {text!r}"
            raise UsageError(msg)
        if not match[1]:
            return cls("commit", int(match[2]))
        return cls("landed" if match[3] else "record", int(match[2]))

    def says(self) -> str:
        """Return a phrase for people."""
        match self.kind:
            case "commit":
                return f"in commit {self.number}, which is not made"
            case "record":
                return f"in record {self.number}, which is lost"
            case _:
                return f"after record {self.number}, which nobody was told of"


Points = tuple[
    Point, ...
]  # deaths in a row, each counted from the beginning of its life


def parse_points(text: str) -> Points:
    """Read `7`, or `7,2`: the second is counted in the life after the first."""
    return tuple(map(Point.parse, text.split(",")))


def points_text(points: Points) -> str:
    """Write what `parse_points` reads."""
    return ",".join(map(str, points))


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """What a scenario runs on; the arguments of the marker `culet_scenario`.

    `roots` and `facets`: classes, or a function that returns them, called for each run.
    `effects`: what each outside effect promises; `exactly_once` when not named.
    `quiet_s`: how long owed work may take (virtual); `after_s`: what is waited then, for
    what comes late.
    """

    roots: Any
    facets: Any = ()
    effects: dict[str, Promise] = msgspec.field(default_factory=dict)
    seed: int = 0
    quiet_s: float = 600.0
    after_s: float = 60.0
    body_s: float = 86_400.0
    idle_s: float = 3600.0
    abort_grace_s: float = 5.0
    limits: Limits | None = None


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One run: whether its points were reached and where, and what was found.

    `lives` says of each life how many commits and records it made, to its end.
    """

    points: Points
    reached: bool
    place: str
    lives: tuple[tuple[int, int], ...]
    findings: tuple[Finding, ...]
    effects: dict[tuple[str, str], int]


class Client:
    """The client of agents under test, and the outside world that they act on.

    It calls `kernel`, notes what it was told (`told`, `ended`), and agents of the test
    note in it what they do outside (`effect`).
    """

    harness: Harness

    def __init__(self, promises: Mapping[str, Promise]) -> None:
        self.ledger = Ledger(promises)
        self._ghosts: set[trio.lowlevel.Task] = set()
        self._first = frozenset[trio.lowlevel.Task]()

    @property
    def kernel(self) -> Kernel:
        """The kernel of this life."""
        return self.harness.kernel

    async def get(self, cls: type[A], name: str) -> A:
        """Return a stub of a root, made if need be."""
        return await self.kernel.get_agent(cls, name)

    async def advance(self, seconds: float) -> None:
        """Let virtual time pass."""
        await self.harness.advance(seconds)

    def effect(self, name: str, key: str) -> None:
        """Note something that an agent did outside, as a mail under an id of yours.

        Call it where the agent would act. A dead process acts no more: it raises then.
        """
        if self._is_dead():
            msg = "the process is dead"
            raise StorageError(msg)
        why = late(self.harness)
        if why is not None:
            self.ledger.find("late write", f"{name} {key!r}", why)
        self.ledger.act(name, key)

    def done(self, name: str, key: str) -> bool:
        """Whether the outside knows of that effect: for agents that may ask it."""
        return self.ledger.effects[name, key] > 0

    def told(self, key: str, value: Any) -> None:
        """Note that the client was told `value` about `key`: it must stay so."""
        if not self._is_dead():
            self.ledger.tell(key, value)

    def ended(self, run_id: str, status: str) -> None:
        """Note that the client was told how a run ended: its row must say the same."""
        if not self._is_dead():
            self.ledger.end(run_id, status)

    def _is_dead(self) -> bool:
        here = trio.lowlevel.current_task()
        return self.harness.faults.dead or here in self._ghosts

    def wrote(self, sql: str) -> None:
        """An agent writes to its own file: has it the right to?"""
        why = late(self.harness, cleaning=True)
        if why is not None:
            self.ledger.find("late write", " ".join(sql.split())[:_SQL_SHOWN], why)

    # ---- tasks that are nobody's

    def mark(self) -> None:
        """Remember the tasks that were there before there was a kernel."""
        self._first = frozenset(all_tasks())

    def strays(self) -> set[trio.lowlevel.Task]:
        """Return tasks that are neither of before, nor of the kernel, nor known ghosts."""
        now = all_tasks() - self._first - self._ghosts
        return {task for task in now if task is not trio.lowlevel.current_task()}

    async def resurrect(self) -> None:
        """The process is gone with all its tasks; the next one begins."""
        self.harness.faults.on_death = None
        await self.harness.crash()
        self._ghosts |= self.strays()
        await self.harness.reopen()

    def leaked(self) -> None:
        """After the kernel has closed: whatever still runs was nobody's."""
        for task in self.strays():
            how = "it outlives its agent and the kernel"
            self.ledger.find("leaked task", task_name(task), how)


@final
class Scenario(Client):
    """What the scenario's function is given: the client, and how it reads."""

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec.effects)
        self.spec = spec
        self.place = ""
        self.died = False
        self.deaths = 0
        self._recall: Recall | None = None
        self._asking: trio.CancelScope | None = None

    def recall(self, fn: Recall) -> Recall:
        """Say how the client reads now what it was told: `{key: value}`. A decorator."""
        self._recall = fn
        return fn

    # ---- what the runner calls

    def on_death(self) -> None:
        """The process stops now, in the middle of a step."""
        self.died = True
        self.deaths += 1
        last = self.ledger.last
        self.place = f"{place()}, after {last}" if last else place()
        if self._asking is not None:
            self._asking.cancel()

    def plan(self, point: Point) -> None:
        """Tell the store where to die, counted from now."""
        faults = self.harness.faults
        faults.on_death = self.on_death
        if point.kind == "commit":
            faults.die_after(point.number - 1)
        else:
            faults.die_in_record(point.number, landed=point.kind == "landed")

    async def ask(self, body: Body) -> None:
        """Let the client ask for everything, then let the kernel come to rest."""
        if await self._guarded(body, self):
            await self.rest()

    async def rest(self) -> None:
        """Resume to quiet, and see what the client can still read."""
        await self._guarded(self._rest)

    async def _rest(self) -> None:
        for what in await quiet(self.harness, self.spec.quiet_s):
            how = f"not over after {self.spec.quiet_s:g} s"
            self.ledger.find("stuck", what, how)
        await self.harness.advance(self.spec.after_s)
        self.ledger.check_runs(await statuses(self.harness))
        if self._recall is not None:
            self.ledger.check_recall(await self._recall())

    async def _guarded(self, fn: Callable[..., Awaitable[None]], *args: Any) -> bool:
        """Run code until it ends (True), or the process dies, or it fails after that."""
        try:
            with trio.fail_after(self.spec.body_s), trio.CancelScope() as self._asking:
                await fn(*args)
        except Exception as error:
            if not self.died:
                raise
            if not self.harness.faults.dead:
                how = f"asked again after the crash: {error!r}"
                self.ledger.find("failed", "the scenario", how)
            return False
        finally:
            self._asking = None
        return not self.harness.faults.dead


async def _run(body: Body, spec: Spec, points: Points, hasty: bool) -> Outcome:
    scenario = Scenario(spec)
    scenario.mark()
    lives: list[tuple[int, int]] = []
    try:
        async with open_test_kernel(
            roots=_classes(spec.roots), facets=_classes(spec.facets), seed=spec.seed,
            idle_s=spec.idle_s, abort_grace_s=spec.abort_grace_s, limits=spec.limits,
        ) as harness:  # fmt: skip
            scenario.harness = harness
            harness.faults.on_write = scenario.wrote
            await _live(scenario, body, points, lives, hasty=hasty)
    except ChildDidNotStop as error:
        scenario.ledger.find("leaked task", str(error), "it does not stop")
    scenario.leaked()
    return Outcome(
        points=points, reached=scenario.deaths == len(points), place=scenario.place,
        lives=tuple(lives), findings=tuple(scenario.ledger.findings.values()),
        effects=dict(scenario.ledger.effects),
    )  # fmt: skip


async def _live(
    scenario: Scenario,
    body: Body,
    points: Points,
    lives: list[tuple[int, int]],
    *,
    hasty: bool,
) -> None:
    """One life after the other, until one recovers and is asked again in peace."""
    faults = scenario.harness.faults
    for number in range(len(points) + 1):
        if number > 0:
            if not faults.dead:
                return  # a point that is not there
            await scenario.resurrect()
        before = faults.commits, faults.records
        if number < len(points):
            scenario.plan(points[number])
        if number > 0 and not hasty:
            await scenario.rest()
        if not faults.dead:
            await scenario.ask(body)
        lives.append((faults.commits - before[0], faults.records - before[1]))


def _classes(given: Any) -> list[type[Agent]]:
    return list(given() if callable(given) else given)


def run_scenario(
    body: Body, spec: Spec, points: Points = (), *, hasty: bool = False
) -> Outcome:
    """Run a scenario once in virtual time, from an empty store, dying at `points`.

    A `hasty` client asks again at once after the crash, while the kernel recovers; one
    that is not lets it come to rest and reads what it was told first.

    Raises what the scenario raises as long as nothing has died.
    """
    return testing_seeded.run(_run, body, spec, points, hasty, seed=spec.seed)
