"""One scenario, told with deaths in it: the process dies at each point, is opened again,
recovers, and is asked again; after each of these everything that was promised holds."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import trio

from crash.agents import FACETS, ROOTS, Boss, Thinker
from culet.kernel import testing_seeded as seeded
from culet.kernel.core.limits import Limits
from culet.kernel.testing import Harness, open_test_kernel
from culet.kernel.tree import Tree
from kernel.peers import RecordingPeer, connect
from machines.following import Following
from machines.invariants import broken
from machines.runs import decoded
from machines.world import EXPECTED, Actor, Model
from sound import healthy_if_there
from storage.newer import newer_schema

Where = Literal["commit", "lost", "landed"]
HOUR_S: Final = 3600.0
QUIET_S: Final = 300  # at most, until nothing is owed any more
HELD_S: Final = 20  # for those who wait for ever
OWED: Final = (
    "SELECT kind, owner, what FROM job WHERE dead = 0",
    "SELECT 'run', owner, id FROM run WHERE status = 'running'",
    "SELECT 'fiber', owner, id FROM fiber WHERE status = 'running'",
    "SELECT 'gone', slot, name FROM node WHERE state = 'gone'",
)
# no slice ever ends by the processor's time: what happens follows from the seed alone
LIMITS: Final = Limits(slice_s=HOUR_S, flush_s=HOUR_S)


@dataclass(frozen=True, order=True)
class Point:
    """Where a life ends: after so many commits, or in the n-th record, lost or landed."""

    where: Where
    number: int

    def __str__(self) -> str:
        return f"{self.where}{self.number}"


Act = Callable[["Story"], Awaitable[Any]]


@dataclass(frozen=True)
class Scenario:
    """What is done (twice, the second time by the same ids), and what it comes to.

    `before` is done in a life that ends by a crash of its own: the scenario is then what
    comes after. With `rests` recovery alone comes to an end. With `newer` the lives after
    `before` are those of a version with a newer schema.
    """

    name: str
    act: Act
    before: Act | None = None
    root: tuple[str, str] = ("Boss", "a")
    rests: bool = True
    newer: bool = False

    def version(self) -> AbstractContextManager[None]:
        """Be the version whose lives are told."""
        return newer_schema() if self.newer else nullcontext()


@dataclass
class Journal:
    """What one story was: how often each life wrote, and what it came to."""

    lives: list[tuple[int, int]] = field(default_factory=list)  # commits, records
    outcome: Any = None


class Story:
    """The state of one story, for the scenario that is told."""

    test: Harness

    def __init__(self, scenario: Scenario, seed: int, storage: str) -> None:
        self.scenario, self.seed, self.storage = scenario, seed, storage
        self.model = Actor.model = Thinker.model = Model()
        self.notes: set[str] = set()  # acknowledged
        self.states: list[Any] = [None]  # one of them is what there is
        self.said: dict[str, dict[str, None]] = {}  # chunks of chats that left
        self.journal = Journal()
        self.nursery: trio.Nursery
        self.versions = ExitStack()
        self.reader = Following(scenario.root)  # it comes back in every life
        self._open = True
        self._cleared: set[str] = set()
        self._clients: dict[RecordingPeer, dict[str, int]] = {}

    # ---- for scenarios

    @property
    def dead(self) -> bool:
        """Whether this life is over."""
        return self.test.faults.dead

    async def boss(self) -> Boss:
        """Return the root, as a caller from outside."""
        return await self.test.kernel.get_agent(Boss, "a")

    async def note(self, key: str) -> None:
        """Let the root note something; once this returns, it must be there."""
        await (await self.boss()).note(key, key)
        if not self.dead:
            self.notes.add(key)

    def told(self, run_id: str, status: str) -> str:
        """Note the end that a caller was told."""
        if not self.dead and status != "running":
            self.model.told_status(run_id, status)
        return status

    def forget(self, run_id: str) -> None:
        """A run is about to be cleared: nothing about it is promised any more."""
        self._cleared.add(run_id)

    def start(self, fn: Callable[[], Awaitable[Any]]) -> None:
        """Do something beside; it ends with this life."""

        async def body() -> None:
            try:
                await fn()
            except EXPECTED:
                return

        self.nursery.start_soon(body)

    async def watch(self) -> None:
        """Connect a client that notes the frames of runs."""
        self._clients[await connect(self.test, self.scenario.root)] = {}

    # ---- the story

    async def tell(self, points: Sequence[Point]) -> Journal:
        """Tell it with these deaths, one a life; check all along."""
        async with open_test_kernel(
            roots=ROOTS,
            facets=FACETS,
            seed=self.seed,
            limits=LIMITS,
            storage=self.storage,
        ) as self.test:
            if self.scenario.before is not None:
                await self._life(self.scenario.before, None)
                await self._die()
                self.journal.lives.clear()
            self.versions.enter_context(self.scenario.version())
            for number, point in enumerate(points):
                whole = await self._life(self._recover if number else self._told, point)
                assert not whole, f"it never came to {point}"
                await self._die()
            await self._life(self._recover if points else self._told, None)
            first, lives = self.journal.outcome, list(self.journal.lives)
            await self._life(self._told, None)
            self.journal.lives = lives
            assert points or first == self.journal.outcome, (
                f"asked again it comes to {self.journal.outcome}, not {first}"
            )
        return self.journal

    async def _die(self) -> None:
        self._look()
        self._clients.clear()
        await self.test.crash()
        if self.storage.startswith("sqlite:"):  # as it was left, before recovery
            healthy_if_there(self.storage.removeprefix("sqlite:"))
        self._open = False
        self.model.disturbed = True

    async def reopen(self) -> None:
        """Begin the next life."""
        self._clients.clear()
        await self.test.reopen()
        self._open = True

    async def _life(self, act: Act, point: Point | None) -> bool:
        """Do it until it is done, or this life is over: then return False."""
        faults, died = self.test.faults, trio.Event()
        before = faults.commits, faults.records
        faults.on_death = died.set
        if point is not None:
            if point.where == "commit":
                faults.die_after(point.number)
            else:
                faults.die_in_record(point.number, landed=point.where == "landed")
        if not self._open:
            await self.reopen()
        async with trio.open_nursery() as self.nursery:
            scope = self.nursery.cancel_scope

            async def until_dead() -> None:
                await died.wait()
                scope.cancel()

            self.nursery.start_soon(until_dead)
            try:
                await act(self)
            except* EXPECTED:
                if not self.dead:
                    raise
            scope.cancel()
        wrote = faults.commits - before[0], faults.records - before[1]
        self.journal.lives.append(wrote)
        faults.heal()
        return not self.dead

    async def _told(self, _story: Story) -> None:
        await self.watch()
        outcome = await self.scenario.act(self)
        await self._settle()
        if not self.dead:
            self.journal.outcome = outcome

    async def _recover(self, _story: Story) -> None:
        """Wait until nothing is owed, nobody coming; then come and look."""
        await trio.sleep(2)
        tree = self.test.tree(*self.scenario.root)
        if tree is not None:
            self._check(tree)
            await self._settle()
        kernel = self.test.kernel
        cls = {c.__name__: c for c in ROOTS}[self.scenario.root[0]]
        await kernel.get_agent(cls, "a")
        tree = self.test.tree(*self.scenario.root)
        assert tree is not None
        if self.scenario.rests:
            assert not owed(tree), f"waited for somebody to come: {owed(tree)}"
        await self.watch()
        await self._settle()

    async def _settle(self) -> None:
        """Wait until nothing is owed; then everything must hold."""
        if self.scenario.rests:
            for _ in range(QUIET_S):
                await trio.sleep(1)
                tree = self.test.tree(*self.scenario.root)
                if tree is not None and not owed(tree):
                    break
            else:
                tree = self.test.tree(*self.scenario.root)
                assert tree is not None
                msg = f"never ends: {owed(tree)}"
                raise AssertionError(msg)
        else:
            await trio.sleep(HELD_S)
        await trio.sleep(1)
        if self.dead:
            return
        tree = self.test.tree(*self.scenario.root)
        assert tree is not None
        self._look()
        self._check(tree)
        await self._promises(tree)

    # ---- what must hold

    def _look(self) -> None:
        """Note the frames that clients got."""
        tree = self.test.tree(*self.scenario.root)
        if tree is None:
            return
        for peer, last in self._clients.items():
            for request_id, body in filter(None, map(said, peer.out)):
                self.said.setdefault(request_id, {})[body] = None
            for state in filter(None, map(state_of, peer.out)):
                if state in self.states:  # whoever saw it will not see an older one
                    del self.states[: self.states.index(state)]
            for frame in filter(None, map(decoded, peer.out)):
                if frame["event"]["kind"] == "cleared":
                    continue  # of no sequence: the run is no more
                run_id, number = frame["event"]["runId"], frame["sequence"]
                if run_id in self._cleared:
                    continue
                ended = frame["event"]["kind"] not in ("started", "chunk")
                before = last.get(run_id, -1)
                good = number == before + 1 or (ended and number > before)
                self.model.need(good, f"a gap in {run_id}: {before} -> {number}")
                last[run_id] = number
                self.model.saw((tree.root_slot, run_id), frame)
            peer.out.clear()

    def _check(self, tree: Tree) -> None:
        assert not self.model.wrong, self.model.wrong
        wrong = broken(tree)
        assert not wrong, wrong
        slots = {row[0] for row in tree.db.execute("SELECT slot FROM node")}
        assert tree.store.slots() - {"tree"} <= slots, "a file without a row"
        for run_id, status in self.model.told.items():
            rows = tree.db.execute(
                "SELECT status FROM run WHERE owner = ? AND id = ?",
                (tree.root_slot, run_id),
            )
            assert rows == [(status,)], f"told {run_id} {status}, is {rows}"
        for slot in self.model.deleted:
            assert not tree.is_live_slot(slot), "a deleted agent is back"
        published_stays(tree, self.model)
        file = tree.store.agent(tree.root_slot)
        for request_id, bodies in self.said.items():
            sql = "SELECT body FROM main.culet_entry WHERE stream = ?"
            stored = {row[0] for row in file.execute(sql, (request_id,))}
            assert bodies.keys() <= stored, f"taken back: {bodies.keys() - stored}"

    async def _promises(self, tree: Tree) -> None:
        for shot, (slot, what) in self.model.shots.items():
            assert not tree.is_live_slot(slot) or self.model.fired[shot], (
                f"schedule {shot} {what} never fired"
            )
        if self.scenario.root[0] != "Boss":
            return
        boss = await self.boss()
        missing = self.notes - set(await boss.notes())
        assert not missing, f"acknowledged and lost: {missing}"
        cleared = {(tree.root_slot, run_id) for run_id in self._cleared}
        sql = (
            "SELECT owner, id, status FROM run WHERE owner = ? AND status <> 'running'"
        )
        for owner, run_id, status in tree.db.execute(sql, (tree.root_slot,)):
            heard = self.model.hooks[owner, run_id, status]
            assert heard or (owner, run_id) in cleared, f"no hook for {run_id} {status}"
        state = await boss.look()
        assert state in self.states, f"state is {state}, not one of {self.states}"


def said(text: str | bytes) -> tuple[str, str] | None:
    """Return request and chunk of a frame of a chat."""
    if not isinstance(text, str) or '"cf_agent_use_chat_response"' not in text:
        return None
    frame = json.loads(text)
    return (frame["id"], frame["body"]) if frame["body"] else None


def state_of(text: str | bytes) -> Any:
    """Return the state of a frame that tells one."""
    if not isinstance(text, str) or not text.startswith("{"):
        return None
    return json.loads(text).get("state")


def owed(tree: Tree) -> list[Any]:
    """Return what is still to be done."""
    return [row for sql in OWED for row in tree.db.execute(sql)]


def published_stays(tree: Tree, model: Model) -> None:
    """Every frame that left is what a replay would give again."""
    for (owner, run_id), frames in model.seen.items():
        sql = "SELECT child, status FROM run WHERE owner = ? AND id = ?"
        rows = tree.db.execute(sql, (owner, run_id))
        assert rows, f"a run that was shown is gone: {run_id}"
        child, status = rows[0]
        ends = {f["kind"] for f in frames.values()} - {"started", "chunk"}
        is_end = "finished" if status == "completed" else status
        assert ends <= {is_end}, f"{run_id} is {status}, shown as {ends}"
        file = tree.store.agent(child)
        if not file.exists:
            continue
        sql = "SELECT i, body FROM main.culet_entry WHERE stream = ?"
        bodies = dict(file.execute(sql, (run_id,)))
        for number, event in frames.items():
            if event["kind"] == "chunk":
                assert bodies.get(number - 1) == event["body"], (run_id, number)


def tell(
    scenario: Scenario,
    points: Sequence[Point] = (),
    *,
    seed: int = 0,
    storage: str = "memory:",
) -> Journal:
    """Tell a scenario with these deaths, in an event loop of its own."""
    story = Story(scenario, seed, storage)

    async def main() -> Journal:
        with trio.fail_after(HOUR_S):
            return await story.tell(points)

    with story.versions:
        return seeded.run(main, seed=seed)


def points_of(life: tuple[int, int]) -> list[Point]:
    """Return every point at which a life that wrote so much may end."""
    commits, records = life
    return [
        *(Point("commit", k) for k in range(commits)),
        *(Point(w, n) for w in ("lost", "landed") for n in range(1, records + 1)),
    ]
