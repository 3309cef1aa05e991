"""A caller that is cancelled at its n-th schedule point, for every n, and what must hold.

An operation runs in a task of its own. After its n-th step, when it waits at a
checkpoint, its scope is cancelled: it may end there, or be shielded and complete.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple, cast

import trio

from crash.agents import FACETS, Boss, Kid, Thinker
from crash.story import LIMITS, owed
from culet.kernel import testing_seeded as seeded
from culet.kernel.testing import Harness, open_test_kernel
from culet.kernel.tree import Tree
from machines.invariants import broken
from machines.world import Actor, Model

CUTS_MAX: Final = 400  # steps of one operation; more is a hot loop
QUIET_S: Final = 120
Form = Literal["stays", "dies", "company"]


class Cutter(trio.abc.Instrument):
    """Counts the steps of one task, and cancels a scope after the n-th."""

    def __init__(self, at: int, scope: trio.CancelScope) -> None:
        self.at, self.scope = at, scope
        self.task = trio.lowlevel.current_task()
        self.steps = 0

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """The task waits at a checkpoint, or has ended."""
        if task is self.task:
            self.steps += 1
            if self.steps == self.at:
                self.scope.cancel()


class Told(NamedTuple):
    """What a caller knows in the end: a value, or nothing because it was cancelled."""

    value: Any
    known: bool
    was_cut: bool


async def cut(act: Callable[[], Awaitable[Any]], at: int) -> Told:
    """Do it in a task of its own, cancelled after its step number `at` (0: before)."""
    out: list[Told] = []

    async def task() -> None:
        with trio.CancelScope() as scope:
            cutter = Cutter(at, scope)
            if at == 0:
                scope.cancel()
            trio.lowlevel.add_instrument(cutter)
            try:
                value = await act()
                out.append(Told(value, True, scope.cancel_called))
            finally:
                trio.lowlevel.remove_instrument(cutter)
        if scope.cancelled_caught:
            out.append(Told(None, False, True))

    with trio.fail_after(QUIET_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(task)
    return out[0]


@dataclass(frozen=True)
class Op:
    """One operation: what is there before, what is asked, and what the rows may say.

    `rows` tells the state of things from the rows alone, after everything has come to
    rest. What a caller was told fixes it to `done`; a caller that was cancelled may find
    it as it was (`before`), done, or in one of the states `between`. `same`: what the
    caller is told is this value.
    """

    name: str
    act: Callable[[World], Awaitable[Any]]
    rows: Callable[[World], Any]
    before: Any
    done: Any
    same: Any = None
    prepare: Callable[[World], Awaitable[Any]] | None = None
    between: tuple[Any, ...] = ()
    twice: Any = None  # the rows after it was done two times, if not `done`
    joins: bool = True  # done by two at once it is done once
    root: tuple[str, str] = ("CutBoss", "a")


class World:
    """One kernel in which an operation is done."""

    def __init__(self, test: Harness, root: tuple[str, str]) -> None:
        self.test, self.root = test, root
        self.nursery: trio.Nursery

    async def boss(self) -> CutBoss:
        """Return the root of most operations."""
        return await self.test.kernel.get_agent(CutBoss, "a")

    async def thinker(self) -> CutThinker:
        """Return the root of chats."""
        return await self.test.kernel.get_agent(CutThinker, "a")

    async def wake(self) -> None:
        """Let the root be there."""
        await (self.boss() if self.root[0] == "CutBoss" else self.thinker())

    @property
    def tree(self) -> Tree:
        """The open tree."""
        tree = self.test.tree(*self.root)
        assert tree is not None
        return tree

    def select(self, sql: str, *params: Any) -> list[Any]:
        """Return rows of `tree.db`."""
        return [tuple(row) for row in self.tree.db.execute(sql, params)]

    def own(self, sql: str) -> list[Any]:
        """Return rows of the root's own file."""
        file = self.tree.store.agent(self.tree.root_slot)
        return [row[0] for row in file.execute(sql)] if file.exists else []

    def start(self, fn: Callable[[], Awaitable[Any]]) -> None:
        """Do something beside, until the end."""
        self.nursery.start_soon(fn)

    async def rest(self) -> None:
        """Wait until nothing is owed but what waits for ever."""
        for _ in range(QUIET_S):
            await trio.sleep(1)
            if not [o for o in owed(self.tree) if o[0] == "wipe" or o[0] == "gone"]:
                break
        await trio.sleep(5)


class SlowKid(Kid):
    """A facet whose start has places to be cut at."""

    async def on_start(self, props: Any = None) -> None:
        await trio.sleep(1)
        await super().on_start(props)
        await self.durable()
        await trio.sleep(1)


class CutBoss(Boss):
    """The root that is asked."""

    async def make(self, name: str) -> str:
        await self.dynamic_agents.get(Kid, name)
        return name

    async def make_slow(self, name: str) -> str:
        await self.dynamic_agents.get(SlowKid, name)
        return name

    async def find(self, name: str) -> bool:
        found = await self.dynamic_agents.lookup(Kid, name)
        return found is not None

    async def twice(self, key: str) -> str:
        """Write, wait for the disk, write again."""
        await self.note(f"{key}-1", "x")
        await self.durable()
        with self.transaction():
            self.sql("insert or ignore into note values (?, 'y')", f"{key}-2")
            self.sql("insert or ignore into note values (?, 'z')", f"{key}-3")
        return key

    async def through(self, name: str, key: str) -> str:
        """Let a child write."""
        kid = await self.dynamic_agents.get(Kid, name)
        await kid.note(key, "x")
        return key

    async def halt(self, name: str) -> list[str]:
        receipt = await self.dynamic_agents.abort(Kid, name)
        return [state for _path, state in receipt.nodes]

    async def safe(self, key: str) -> str:
        await self.note(key, "x")
        await self.durable()
        return key


class CutThinker(Thinker):
    """The chat that is asked."""

    async def say(self, text: str) -> str:
        result = await self.save_messages(
            [
                {
                    "id": f"u-{text}",
                    "role": "user",
                    "parts": [{"type": "text", "text": text}],
                }
            ]
        )
        return result.status


@asynccontextmanager
async def world(root: tuple[str, str]) -> AsyncIterator[World]:
    """Open a kernel with nothing in it."""
    Actor.model = Thinker.model = Model()
    async with (
        open_test_kernel(
            roots=[CutBoss, CutThinker], facets=[*FACETS, SlowKid], limits=LIMITS
        ) as test,
        trio.open_nursery() as nursery,
    ):
        made = World(test, root)
        made.nursery = nursery
        yield made
        nursery.cancel_scope.cancel()


def autocommit(tree: Tree) -> None:
    """Raise when a connection of the tree is in a transaction."""
    inner = cast(Any, tree.store).inner
    for file in (inner.tree, *inner._agents.values()):
        if file.connection is not None:
            assert not file.connection.in_transaction, file
            assert file.depth == 0
    assert cast(Any, tree.store).tree.depth == 0


def check(op: Op, there: World, told: Told) -> None:
    """Compare what the caller was told with what the rows say."""
    tree = there.tree
    autocommit(tree)
    wrong = broken(tree)
    assert not wrong, wrong
    assert not Actor.model.wrong, Actor.model.wrong
    rows = op.rows(there)
    if told.known:
        assert told.value == op.same, f"told {told.value!r}"
        assert rows == op.done, f"told {told.value!r}, the rows say {rows!r}"
    else:
        allowed = [op.before, op.done, *op.between]
        assert rows in allowed, f"cancelled, and the rows say {rows!r}"


def tasks() -> int:
    """Return how many tasks live."""
    return trio.lowlevel.current_statistics().tasks_living


async def story(op: Op, at: int, form: Form) -> bool:
    """Cut it there, look, and do it again. Returns whether it was cut at all.

    The next life looks if the form is `dies`; in `company` somebody else asks for the
    same at the same time, is not cut, and must be told as if alone.
    """
    async with world(op.root) as there:
        base = tasks()
        if op.prepare is not None:
            await op.prepare(there)
        others: list[Any] = []

        async def other() -> None:
            others.append(await op.act(there))

        if form == "company":
            there.start(other)
        told = await cut(lambda: op.act(there), at)
        was_cut = told.was_cut
        if form == "dies":  # what the next life reads is what was written
            await there.test.crash()
            await there.test.reopen()
        await there.wake()
        autocommit(there.tree)
        await there.rest()
        if form == "company":
            assert others == [op.same], f"the other one was told {others}"
            told = Told(op.same, True, False)
        check(op, there, told)
        was_done = op.rows(there) == op.done
        with trio.fail_after(QUIET_S):
            value = await op.act(there)
        await there.rest()
        second = op
        if was_done and op.twice is not None:
            second = replace(op, done=op.twice)
        check(second, there, Told(value, True, False))
        there.nursery.cancel_scope.cancel()
        await there.rest()
        await there.test.evict([op.root])
        await trio.sleep(1)
        assert tasks() <= base, "a task is left"
    return was_cut


def points(op: Op, form: Form) -> int:
    """Cut an operation at every step; return how many there were."""
    for at in range(CUTS_MAX):
        try:
            was_cut = seeded.run(lambda at=at: story(op, at, form))  # type: ignore[misc]
        except BaseException as error:
            error.add_note(f"{op.name} cut at step {at}, {form}")
            raise
        if not was_cut:
            return at
    msg = f"{op.name} never completes"
    raise AssertionError(msg)
