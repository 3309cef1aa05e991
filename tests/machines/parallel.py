"""Whatever several clients do at once looks as if they had done it one after the other.

Each client is a task with a few calls in a row: get, write, look, list, abort, delete,
on few paths, under a scheduler whose seed is drawn. Their answers and what is there
afterwards must be explained by some sequential order that keeps each client's own and
never puts a call before one that was over when it began. A call that ended because its
agent was stopped or deleted, or because the process died, may have happened or not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple

import trio
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from culet.kernel.errors import CuletError
from culet.kernel.testing_seeded import seeded
from machines.grove import GOOD, Found, Path
from machines.sometimes import Sometimes
from machines.tree import DIED, ENDED, GroveMachine, Model, Record

ORDERS_MAX: Final = 200_000  # steps of one search
UNKNOWN: Final = "unknown"  # the answer of a call that was ended
Slot = str | None  # None: made by a call that did not say what it made
State = tuple[tuple[Path, Slot, tuple[tuple[str, int], ...]], ...]  # sorted by path


class Op(NamedTuple):
    """One call of a client."""

    verb: str
    path: Path
    value: int = 0


@dataclass
class Event:
    """One call as it was: when it began and ended, and what it was told."""

    op: Op
    began: float
    ended: float = math.inf
    answer: Any = UNKNOWN


# ---- the sequential model


class Agents:
    """A state that may be changed: path -> (slot, content)."""

    def __init__(self, state: State, used: frozenset[str]) -> None:
        self.at = {path: (slot, dict(content)) for path, slot, content in state}
        self.used = used  # slots of agents that there ever were before

    def freeze(self) -> State:
        """Return it as a value."""
        rows = ((p, s, tuple(sorted(c.items()))) for p, (s, c) in self.at.items())
        return tuple(sorted(rows, key=lambda row: row[0]))

    def is_it(self, path: Path, slot: str) -> bool:
        """Whether the agent there may have that slot; from then on it has."""
        mine, content = self.at[path]
        if mine is None and self.is_new(slot):
            self.at[path] = mine = slot, content
            return True
        return mine == slot

    def is_new(self, slot: str) -> bool:
        """Whether no agent had it before."""
        return slot not in self.used and all(s != slot for s, _ in self.at.values())

    def do(self, op: Op, answer: Any) -> bool:
        """Do one call; False: it would not have been answered so."""
        known = answer != UNKNOWN
        asked = op.path if op.verb in ("put", "hold", "see", "list") else op.path[:-1]
        if asked not in self.at:
            return answer in ("absent", UNKNOWN)
        match op.verb:
            case "get":
                if op.path in self.at:
                    return not known or self.is_it(op.path, answer)
                if known and not self.is_new(answer):
                    return False
                self.at[op.path] = (answer if known else None), {}
                return True
            case "put" | "hold":
                self.at[op.path][1]["a"] = op.value
                return answer in ("put", UNKNOWN)
            case "see":
                if not known or answer == "absent":
                    return not known
                slot, content = answer
                return self.at[op.path][1] == content and self.is_it(op.path, slot)
            case "delete":
                size = len(op.path)
                self.at = {p: v for p, v in self.at.items() if p[:size] != op.path}
                return answer in ("deleted", UNKNOWN)
            case "list":
                kids = [list(p[-1]) for p in self.at if p and p[:-1] == op.path]
                return not known or (
                    answer != "absent" and sorted(answer) == sorted(kids)
                )
        return answer in ("stopped", UNKNOWN)  # an abort changes nothing


def explained(
    start: State, clients: list[list[Event]], end: State, used: frozenset[str]
) -> bool:
    """Whether some sequential order gives these answers and leads to that end."""
    seen = set[tuple[tuple[int, ...], State]]()
    todo = [(tuple(0 for _ in clients), start)]
    while todo:
        places, state = todo.pop()
        if (places, state) in seen:
            continue
        seen.add((places, state))
        assert len(seen) < ORDERS_MAX, "too many orders"
        rest = [c[n:] for c, n in zip(clients, places, strict=True)]
        if not any(rest) and is_end(state, end, used):
            return True
        first = min((c[0].ended for c in rest if c), default=math.inf)
        for number, calls in enumerate(rest):
            if not calls or calls[0].began > first:
                continue
            on = tuple(n + (i == number) for i, n in enumerate(places))
            todo += [(on, after) for after in outcomes(state, calls[0], used)]
    return False


def outcomes(state: State, event: Event, used: frozenset[str]) -> Iterator[State]:
    """Yield what may be after one call."""
    if event.answer == UNKNOWN:
        yield state
    agents = Agents(state, used)
    if agents.do(event.op, event.answer):
        yield agents.freeze()


def is_end(state: State, end: State, used: frozenset[str]) -> bool:
    """Whether a state is what was found."""
    agents = Agents(state, used)
    if set(agents.at) != {path for path, _, _ in end}:
        return False
    return all(
        agents.at[path][1] == dict(content) and slot and agents.is_it(path, slot)
        for path, slot, content in end
    )


# ---- the machine

calls = st.tuples(
    st.sampled_from(["get", "get", "put", "hold", "see", "delete", "abort", "list"]),
    st.integers(0, 7),
    st.integers(1, 99),
)
scripts = st.lists(st.lists(calls, min_size=1, max_size=4), min_size=2, max_size=3)


class TogetherMachine(GroveMachine):
    """See the module's text. `levels`: of facets that the clients use."""

    levels: ClassVar[int] = 1
    sometimes: ClassVar = Sometimes(
        "met", "three met", "got by two", "got beside a delete", "deleted by two",
        "ended by others", "let in beside a delete", "died", "crashed",
    )  # fmt: skip

    @initialize(names=st.lists(st.sampled_from(GOOD), min_size=2, max_size=2))
    def choose(self, names: list[str]) -> None:
        """Few paths, so that the clients meet."""
        tops: list[Path] = [(("Bough", name),) for name in dict.fromkeys(names)]
        self.paths: list[Path] = list(tops)
        if self.levels > 1:
            self.paths += [(*top, top[0]) for top in tops]
        self.hit = self.sometimes.hit

    @rule(
        scripts=scripts,
        seed=st.integers(0, 1 << 16),
        die=st.none() | st.integers(0, 6),
    )
    def together(
        self, scripts: list[list[tuple[str, int, int]]], seed: int, die: int | None
    ) -> None:
        """Let clients do their calls at once; look for an order that explains it."""
        ops = [[self.op(*call) for call in script] for script in scripts]
        start, used = frozen(self.model), frozenset(self.seen | self.grove.gone)
        halted = any(self.halted(path) for path in self.paths)
        if die is not None:
            self.test.faults.on_death = self._on_death
            self.test.faults.die_after(die)
        clients: list[list[Event]] = [[] for _ in ops]
        with seeded(seed):
            got = self.ask(self._all, ops, clients)
        self.test.faults.heal()
        end = self.look()
        self.hit("died", got == DIED)
        self._met(clients)
        verbs = {op.verb for script in ops for op in script}
        ended = [e for c in clients for e in c if e.answer == UNKNOWN]
        if got != DIED and not halted and not verbs & {"delete", "abort"}:
            assert not ended, f"ended by nobody: {ended}"
        there = frozen_end(end)
        assert explained(start, clients, there, used), story(start, clients, there)
        self.apply(lambda model: follow(model, end))

    def op(self, verb: str, which: int, value: int) -> Op:
        """Return one call on one of the paths."""
        path = self.paths[which % len(self.paths)]
        return Op(verb, path[:-1] if verb == "list" else path, value)

    async def _all(self, ops: list[list[Op]], clients: list[list[Event]]) -> None:
        self.now = 0
        async with trio.open_nursery() as nursery:
            for script, events in zip(ops, clients, strict=True):
                nursery.start_soon(self._client, script, events)

    async def _client(self, script: list[Op], events: list[Event]) -> None:
        for op in script:
            event = Event(op, self._tick())
            events.append(event)
            try:
                event.answer = await self._call(op)
            except ENDED:
                pass
            except CuletError:
                if not self.test.faults.dead:
                    raise
            if self.test.faults.dead:
                return
            event.ended = self._tick()

    def _tick(self) -> int:
        self.now += 1
        return self.now

    async def _call(self, op: Op) -> Any:
        match op.verb:
            case "put":
                return await self.call(op.path, "put", "a", op.value)
            case "hold":
                return await self.call(op.path, "hold", 0.5, "a", op.value)
            case "see" | "list":
                return await self.call(op.path, op.verb)
        return await self.call(op.path[:-1], op.verb, *op.path[-1])

    def _met(self, clients: list[list[Event]]) -> None:
        """Note which calls have met."""
        for number, mine in enumerate(clients):
            others = [e for c in clients[number + 1 :] for e in c]
            for a in mine:
                here = [e for e in others if e.began < a.ended and a.began < e.ended]
                self.hit("met", bool(here))
                self.hit("three met", len(here) > 1)
                self.hit("ended by others", a.answer == UNKNOWN and a.ended < math.inf)
                for b in here:
                    if a.op.path != b.op.path:
                        continue
                    verbs = {a.op.verb, b.op.verb}
                    self.hit("got by two", verbs == {"get"} and a.answer == b.answer)
                    self.hit("deleted by two", verbs == {"delete"})
                    self.hit("got beside a delete", verbs == {"get", "delete"})
                    let_in = verbs == {"put", "delete"} and "put" in (
                        a.answer,
                        b.answer,
                    )
                    self.hit("let in beside a delete", let_in)

    @rule(often=st.integers(0, 3))
    def crash(self, often: int) -> None:
        """Kill the process between two rules: what was told stands."""
        if often > 0:
            return

        async def die() -> None:
            await self._revive(anyway=True)

        self.do(die)
        self.hit("crashed")


class RegistryTogether(TogetherMachine):
    """The facets of one agent."""

    sometimes: ClassVar = Sometimes(*TogetherMachine.sometimes.marks)


class TreeTogether(TogetherMachine):
    """A facet and what is below it, both the aim of calls."""

    levels = 2
    sometimes: ClassVar = Sometimes(*TogetherMachine.sometimes.marks)


def frozen(model: Model) -> State:
    """Return the model as a value."""
    rows = [(p, r.slot, tuple(sorted(r.content.items()))) for p, r in model.items()]
    return tuple(sorted(rows, key=lambda row: row[0]))


def frozen_end(seen: Found) -> State:
    """Return what was found as a value."""
    rows = [(p, s, tuple(sorted(c.items()))) for p, (s, c) in seen.items()]
    return tuple(sorted(rows, key=lambda row: row[0]))


def follow(model: Model, seen: Found) -> None:
    """Let the model be what was found."""
    model.clear()
    model.update({path: Record(s, dict(c)) for path, (s, c) in seen.items()})


def story(start: State, clients: list[list[Event]], end: State) -> str:
    """Tell what no order explains."""
    lines = ["no order explains it", f"before: {start}"]
    for number, events in enumerate(clients):
        lines += [f"  client {number}: {event}" for event in events]
    return "\n".join([*lines, f"after: {end}"])
