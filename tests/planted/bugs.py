"""Five planted bugs, each beside the same agents without it, and the scenario that the
crash explorer runs on both. None of the five shows while nothing crashes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, ClassVar, NamedTuple

import trio

from culet.kernel import Agent, Chunk, Turn
from culet.kernel.testing_scenario import Body, Client, Scenario, Spec


class Planted(NamedTuple):
    """One bug: what the report must call it, and the scenario on both agents."""

    kind: str
    what: str
    spec: Spec
    broken: Body
    right: Body


class World(Agent):
    """What agents of a scenario do outside goes into its notebook."""

    outside: ClassVar[Client]


# ---- a lost event: the agent answers before it has written


class Book(World):
    async def on_start(self) -> None:
        self.sql("CREATE TABLE IF NOT EXISTS note (id TEXT PRIMARY KEY, text TEXT)")

    async def add(self, note_id: str, text: str) -> str:
        self.sql("INSERT OR IGNORE INTO note VALUES (?, ?)", note_id, text)
        return text

    async def all(self) -> dict[str, str]:
        return {r.id: r.text for r in self.sql("SELECT id, text FROM note")}


class BookWriteBehind(Book):
    async def add(self, note_id: str, text: str) -> str:
        self.spawn(self._later, note_id, text)
        return text

    async def _later(self, note_id: str, text: str) -> None:
        await trio.sleep(1)
        await Book.add(self, note_id, text)


def notes(cls: type[Book]) -> Body:
    async def body(scenario: Scenario) -> None:
        book = await scenario.get(cls, "b")

        @scenario.recall
        async def read() -> dict[str, str]:
            return await (await scenario.get(cls, "b")).all()

        for note_id, text in (("n1", "milk"), ("n2", "bread")):
            scenario.told(note_id, await book.add(note_id, text))
            await scenario.advance(2)

    return body


# ---- a doubled effect: paid, and only then written down


class Till(World):
    resumable = True

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        for number in range(len(turn.chunks()), 3):
            await self.pay(f"{turn.input}.{number}")
            yield {"type": "data-paid", "data": number}

    async def pay(self, key: str) -> None:
        if not self.outside.done("charge", key):
            self.outside.effect("charge", key)


class TillForgetful(Till):
    async def pay(self, key: str) -> None:
        self.outside.effect("charge", key)


class Parent(World):
    """Runs a facet for a client."""

    async def run(self, cls: str, run_id: str) -> str:
        run = await self.run_agent_tool(FACETS[cls], run_id, run_id=run_id)
        return run.status

    async def begin(self, cls: str, run_id: str) -> None:
        await self.run_agent_tool(FACETS[cls], run_id, run_id=run_id, detached=True)

    async def begin_and_promise(self, cls: str, run_id: str) -> str:
        await self.begin(cls, run_id)
        return "completed"

    async def stop(self, run_id: str) -> str | None:
        return (await self.runs.cancel(run_id)).status


def one_run(cls: type[Agent], how: str = "run") -> Body:
    async def body(scenario: Scenario) -> None:
        World.outside = scenario
        parent = await scenario.get(Parent, "p")
        scenario.ended("r1", await getattr(parent, how)(cls.__name__, "r1"))

    return body


# ---- a false terminal: the client hears of an end that has not come


class Frail(World):
    """It cannot go on after a crash: then its run is `interrupted`."""

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        for number in range(2):
            await trio.sleep(5)
            yield {"type": "data-step", "data": number}


# ---- a leaked task: a heartbeat that belongs to nobody, started by recovery only


class Nurse(World):
    resumable = True

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        if turn.attempt > 1:
            self.watch()
        for number in range(len(turn.chunks()), 2):
            await trio.sleep(5)
            yield {"type": "data-step", "data": number}

    def watch(self) -> None:
        self.spawn(self.beat)

    async def beat(self) -> None:
        while True:
            await trio.sleep(30)


class NurseLeaky(Nurse):
    def watch(self) -> None:
        trio.lowlevel.spawn_system_task(self.beat)


# ---- a late write: what recovery does again cannot be stopped any more


class Poster(World):
    resumable = True

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        yield {"type": "data-step", "data": 0}
        with trio.CancelScope(shield=turn.attempt > 1 and self.stubborn()):
            await trio.sleep(10)
            if not self.outside.done("mail", str(turn.input)):
                self.outside.effect("mail", str(turn.input))
        yield {"type": "data-step", "data": 1}

    def stubborn(self) -> bool:
        return False


class PosterStubborn(Poster):
    def stubborn(self) -> bool:
        return True


def begun_and_stopped(cls: type[Agent]) -> Body:
    async def body(scenario: Scenario) -> None:
        World.outside = scenario
        parent = await scenario.get(Parent, "p")
        await parent.begin(cls.__name__, "r1")
        await scenario.advance(3)
        scenario.ended("r1", await parent.stop("r1") or "no such run")

    return body


# ---- beside the five: what is owed is forgotten before it is done, by recovery only


class Outbox(World):
    async def on_start(self) -> None:
        self.sql("CREATE TABLE IF NOT EXISTS mail (key TEXT UNIQUE, owed INT)")
        owed = [r.key for r in self.sql("SELECT key FROM mail WHERE owed")]
        for key in owed:
            self.recover(key)

    def recover(self, key: str) -> None:
        self.spawn(self.deliver, key)

    async def send(self, key: str) -> None:
        if not self.sql("SELECT 1 FROM mail WHERE key = ?", key):
            self.sql("INSERT INTO mail VALUES (?, 1)", key)
            await self.durable()
            await self.deliver(key)

    async def deliver(self, key: str) -> None:
        await trio.sleep(1)
        if not self.outside.done("mail", key):
            self.outside.effect("mail", key)
        self.sql("UPDATE mail SET owed = 0 WHERE key = ?", key)


class OutboxHasty(Outbox):
    def recover(self, key: str) -> None:
        self.sql("UPDATE mail SET owed = 0 WHERE key = ?", key)
        super().recover(key)


def one_mail(cls: type[Outbox]) -> Body:
    async def body(scenario: Scenario) -> None:
        World.outside = scenario
        await (await scenario.get(cls, "o")).send("m1")

    return body


FACETS: dict[str, type[Agent]] = {
    cls.__name__: cls
    for cls in (Till, TillForgetful, Frail, Nurse, NurseLeaky, Poster, PosterStubborn)
}


def on(*roots: type[Agent], **more: Any) -> Spec:
    return Spec(roots=list(roots), facets=list(FACETS.values()), **more)


BUGS = (
    Planted("lost event", "n1", on(Book, BookWriteBehind), notes(BookWriteBehind), notes(Book)),
    Planted(
        "duplicated effect", "charge 'r1.0'", on(Parent),
        one_run(TillForgetful), one_run(Till),
    ),
    Planted(
        "wrong terminal", "r1", on(Parent),
        one_run(Frail, "begin_and_promise"), one_run(Frail),
    ),
    Planted("leaked task", "beat", on(Parent), one_run(NurseLeaky), one_run(Nurse)),
    Planted(
        "late write", "mail 'r1'", on(Parent, effects={"mail": "at_most_once"}),
        begun_and_stopped(PosterStubborn), begun_and_stopped(Poster),
    ),
)  # fmt: skip
TWICE = Planted(
    "lost effect", "mail 'm1'", on(Outbox, OutboxHasty),
    one_mail(OutboxHasty), one_mail(Outbox),
)  # fmt: skip
