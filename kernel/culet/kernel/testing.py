"""For tests, ours and users': a kernel whose time, chance, crashes and faults you hold.

`open_test_kernel` opens a kernel on a store that you may crash at any instant and open
again, in deterministic time when the test runs on `trio.testing.MockClock`. A crash
keeps what a record has made durable and nothing else. `Faults` says which commit or
record of the store fails, or in which of them the process dies. `ScriptedChild` is
a facet that does what its input says, step by step.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from time import perf_counter_ns
from typing import Any, Final, final

import trio
import trio.testing

from .agent import Agent
from .classes import Classes
from .clock import Chance
from .core.limits import Limits
from .errors import InternalError, StorageError, StorageFull, UsageError
from .kernel import Kernel, find_store
from .node import Node, State, alone
from .ports import (
    AgentDb,
    Chore,
    Db,
    Level,
    Record,
    RootEntry,
    Rows,
    SqlValue,
    Stopwatch,
    Store,
    TreeKey,
    TreeStore,
    UserRows,
)
from .tracing import Tracer
from .tree import Tree
from .turn import Chunk, Turn

Path = Sequence[tuple[str, str]]
EPOCH_MS: Final = 1_767_225_600_000  # 2026-01-01T00:00:00Z, where virtual time begins
_LOOK_NS: Final = 50_000  # of work between two looks at the stopwatch
_STEP_S: Final = 1.0  # of a mock clock that does not jump by itself


# ---- time


@final
class VirtualClock:
    """A wall clock that follows trio's, and that jumps when told to.

    Under `MockClock` it is as virtual as trio's own; `jump` moves the wall alone, as a
    user or a suspended machine does, forward or back. (Trio's alone: let time pass and
    `jump` back by as much.) Work takes as long as it is looked at: where a long pass is
    cut into slices is the same on every machine.
    """

    def __init__(self, start_ms: int = EPOCH_MS) -> None:
        self._start_ms = start_ms
        self._zero: float | None = None
        self._jumped_ms = 0
        self._looks = 0

    def now_ms(self) -> int:
        """Return epoch milliseconds."""
        now = trio.current_time()
        if self._zero is None:
            self._zero = now
        passed = math.floor((now - self._zero) * 1000 + 1e-6)
        return self._start_ms + passed + self._jumped_ms

    def stopwatch_ns(self) -> int:
        """Return nanoseconds that only grow: trio's, and a little for each look."""
        self._looks += 1
        return round(trio.current_time() * 1e9) + self._looks * _LOOK_NS

    def jump(self, seconds: float) -> None:
        """Move the wall clock; nothing in the process notices by itself."""
        self._jumped_ms += round(seconds * 1000)


# ---- faults


@final
class Faults:
    """What goes wrong in a store, counted in commits and in records from now on."""

    def __init__(self) -> None:
        self.commits = 0
        self.records = 0
        self.dead = False
        self._commit: tuple[int, type[StorageError], bool] | None = None
        self._record: tuple[int, type[StorageError], bool] | None = None
        self._fuse: int | None = None
        self._last: tuple[int, bool] | None = None
        self.on_death: Callable[[], object] | None = None
        self.on_write: Callable[[str], object] | None = None  # an agent's own SQL

    def fail_commit(
        self, nth: int = 1, error: type[StorageError] = StorageFull, *, stay: bool = False
    ) -> None:  # fmt: skip
        """Let the n-th commit from now raise; with `stay` every later one as well."""
        self._commit = (self.commits + nth, error, stay)

    def fail_record(
        self, nth: int = 1, error: type[StorageError] = StorageError, *, stay: bool = False
    ) -> None:  # fmt: skip
        """Let the n-th record from now fail to reach the disk."""
        self._record = (self.records + nth, error, stay)

    def die_after(self, commits: int) -> None:
        """Let the process be dead after so many more commits, in the middle of a step."""
        self._fuse = self.commits + commits

    def die_in_record(self, nth: int = 1, *, landed: bool = False) -> None:
        """Let the process die in the n-th record from now, before it is on the disk or
        (`landed`) after, when nobody has been told yet."""
        self._last = (self.records + nth, landed)

    def heal(self) -> None:
        """Take back what was planned; a death that has happened stands until `crash`."""
        self._commit = self._record = self._fuse = self._last = None

    def check(self) -> None:
        """Raise when the process is dead: it reads and writes nothing any more."""
        if self.dead:
            msg = "the process is dead"
            raise StorageError(msg)

    def before_commit(self) -> None:
        """Count one commit; raise when it is not to be."""
        self.check()
        if self._fuse is not None and self.commits >= self._fuse:
            self._die()
        self.commits += 1
        self._commit = _strike(self._commit, self.commits, "commit")

    def before_record(self) -> None:
        """Count one record; raise when it is not to be."""
        self.check()
        self.records += 1
        if self._last == (self.records, False):
            self._die()
        self._record = _strike(self._record, self.records, "record")

    def after_record(self) -> None:
        """A record is on the disk; raise when the process dies before it says so."""
        if self._last == (self.records, True):
            self._die()

    def _die(self) -> None:
        self.dead = True
        if self.on_death is not None:
            self.on_death()
        self.check()


def _strike(
    plan: tuple[int, type[StorageError], bool] | None, count: int, what: str
) -> tuple[int, type[StorageError], bool] | None:
    if plan is None or count < plan[0]:
        return plan
    if plan[2] or count == plan[0]:
        msg = f"planned: {what} {count} fails"
        raise plan[1](msg)
    return None


def _writes(sql: str) -> bool:
    text = sql.lstrip().upper()
    if text.startswith("WITH"):
        return any(
            verb in text for verb in (" INSERT ", " UPDATE ", ")UPDATE", "DELETE ")
        )
    return not text.startswith(("SELECT", "PRAGMA", "EXPLAIN", "VALUES"))


class _FaultyDb:
    """A database whose commits ask the plan first."""

    def __init__(self, inner: Db, faults: Faults) -> None:
        self.inner, self.faults = inner, faults
        self.depth = 0

    def execute(self, sql: str, params: Sequence[SqlValue] = ()) -> Rows:
        self.faults.check()
        if self.depth == 0 and _writes(sql):
            self.faults.before_commit()
        return self.inner.execute(sql, params)

    def executemany(self, sql: str, rows: Sequence[Sequence[SqlValue]]) -> None:
        self.faults.check()
        if self.depth == 0:
            self.faults.before_commit()
        self.inner.executemany(sql, rows)

    @property
    def changes(self) -> int:
        return self.inner.changes

    @contextmanager
    def transaction(self) -> Iterator[None]:
        self.faults.check()
        self.depth += 1
        try:
            with self.inner.transaction():
                yield
                if self.depth == 1:
                    self.faults.before_commit()
        finally:
            self.depth -= 1


class _FaultyAgentDb(_FaultyDb):
    """The same for an agent's file."""

    def __init__(self, inner: AgentDb, faults: Faults) -> None:
        super().__init__(inner, faults)
        self.agent = inner

    @property
    def exists(self) -> bool:
        return self.agent.exists

    def user(self, sql: str, params: Sequence[SqlValue], max_rows: int) -> UserRows:
        self.faults.check()
        if _writes(sql):
            if self.faults.on_write is not None:
                self.faults.on_write(sql)
            if not self.agent.in_user_transaction:
                self.faults.before_commit()
        return self.agent.user(sql, params, max_rows)

    def user_begin(self) -> None:
        self.faults.check()
        self.agent.user_begin()

    def user_end(self, *, commit: bool) -> None:
        if commit and self.agent.in_user_transaction:
            try:
                self.faults.before_commit()
            except StorageError:
                self.agent.user_end(commit=False)
                raise
        self.agent.user_end(commit=commit)

    def rest(self) -> None:
        self.agent.rest()

    @property
    def in_user_transaction(self) -> bool:
        return self.agent.in_user_transaction

    @property
    def size_bytes(self) -> int:
        return self.agent.size_bytes


class _FaultyTree:
    """One tree of such a store."""

    def __init__(self, inner: TreeStore, faults: Faults) -> None:
        self.inner, self.faults = inner, faults
        self.tree = _FaultyDb(inner.tree, faults)
        self._agents: dict[str, _FaultyAgentDb] = {}

    @property
    def inline(self) -> bool:
        return self.inner.inline

    @property
    def commits(self) -> int:
        return self.inner.commits

    @property
    def dirty(self) -> bool:
        return self.inner.dirty

    @property
    def created(self) -> bool:
        return self.inner.created

    def agent(self, slot: str) -> AgentDb:
        inner = self.inner.agent(slot)
        known = self._agents.get(slot)
        if known is None or known.agent is not inner:
            known = self._agents[slot] = _FaultyAgentDb(inner, self.faults)
        return known

    def delete(self, slot: str) -> None:
        self.faults.check()
        self._agents.pop(slot, None)
        self.inner.delete(slot)

    def slots(self) -> set[str]:
        return self.inner.slots()

    def begin(self) -> Record:
        self.faults.check()
        return self.inner.begin()

    def fill(
        self, record: Record, until_ns: int, stopwatch: Stopwatch = perf_counter_ns
    ) -> bool:
        return self.inner.fill(record, until_ns, stopwatch)

    def write(self, record: Record) -> None:
        self.faults.before_record()
        self.inner.write(record)
        self.faults.after_record()

    def done(self, record: Record, stopwatch: Stopwatch = perf_counter_ns) -> int:
        self.faults.check()
        return self.inner.done(record, stopwatch)

    def room(self, db: Db) -> bool:
        return self.inner.room(db)

    @property
    def crowded(self) -> bool:
        return self.inner.crowded

    def janitor(self) -> list[Chore]:
        return self.inner.janitor()

    def retire(self) -> None:
        self.inner.retire()

    def close(self) -> None:
        self.inner.close()


class _FaultyStore:
    """A store over another one, with a plan of what fails."""

    def __init__(self, inner: Store, faults: Faults) -> None:
        self.inner, self.faults = inner, faults

    def open(self) -> None:
        self.inner.open()

    def open_tree(
        self, key: TreeKey, *, level: Level, create: bool = True
    ) -> TreeStore:
        self.faults.check()
        return _FaultyTree(
            self.inner.open_tree(key, level=level, create=create), self.faults
        )

    def drop_tree(self, key: TreeKey) -> None:
        self.faults.check()
        self.inner.drop_tree(key)

    def roots(self) -> list[RootEntry]:
        return self.inner.roots()

    def note_root(self, key: TreeKey, due_at: int | None) -> None:
        self.faults.check()
        self.inner.note_root(key, due_at)

    def close(self) -> None:
        self.inner.close()


# ---- the kernel under test


@final
class Harness:
    """One store and the kernel that lives on it now; made by `open_test_kernel`.

    `kernel` is the current life; `faults` are the store's; `clock` is the wall clock of
    all lives.
    """

    kernel: Kernel

    def __init__(
        self,
        nursery: trio.Nursery,
        store: Store,
        roots: list[type[Agent]],
        facets: list[type[Agent]],
        *,
        seed: int,
        limits: Limits,
        idle_s: float,
        abort_grace_s: float,
        start_s: float,
        tracer: Tracer | None = None,
    ) -> None:
        self.clock, self._tracer = VirtualClock(), tracer
        self.faults = Faults()
        self.lives = 0
        self._nursery = nursery
        self._store = store
        self._chance = Chance(seed)
        self._roots, self._facets = roots, facets
        self._limits = limits
        self._idle_s, self._abort_grace_s, self._start_s = (
            idle_s,
            abort_grace_s,
            start_s,
        )
        self._over = trio.Event()
        self._over.set()

    async def advance(self, seconds: float) -> None:
        """Let time pass: virtual under a `MockClock`, real otherwise."""
        clock = trio.lowlevel.current_clock()
        if (
            not isinstance(clock, trio.testing.MockClock)
            or clock.autojump_threshold < math.inf
        ):
            await trio.sleep(seconds)
            return
        await trio.testing.wait_all_tasks_blocked()
        while seconds > 0:
            clock.jump(min(seconds, _STEP_S))
            seconds -= _STEP_S
            await trio.testing.wait_all_tasks_blocked()

    async def crash(self) -> None:
        """End this life as a dead process would: only what a record holds remains."""
        kernel = self.kernel
        self.faults.dead = True
        kernel.closing = True
        error = StorageError("the process is dead")
        for tree in list(kernel.trees.values()):
            tree.closed = True
            tree.jobs.stopped = True
            tree.barrier.fence(error)
        kernel.kill()
        await self._over.wait()
        self._store.close()
        self.faults.heal()
        self.faults.dead = False

    async def reopen(self) -> Kernel:
        """Begin the next life on what the last one left."""
        if not self._over.is_set():
            msg = "the kernel is open; crash() or close() it first"
            raise UsageError(msg)
        self.lives += 1
        self.kernel = Kernel(
            Classes(self._roots, self._facets, Agent),
            _FaultyStore(self._store, self.faults),
            durability="process",
            clock=self.clock,
            chance=self._chance,
            limits=self._limits,
            idle_s=self._idle_s,
            abort_grace_s=self._abort_grace_s,
            start_s=self._start_s,
            threads=False,
            tracer=self._tracer,
        )
        self._over = trio.Event()
        await self._nursery.start(self._live, self.kernel, self._over)
        return self.kernel

    async def close(self) -> None:
        """Stop this life in order, everything durable."""
        if not self._over.is_set():
            try:
                await self.kernel.close()
            finally:
                await self._over.wait()
                self.kernel.stop_threads()

    async def _live(
        self, kernel: Kernel, over: trio.Event, *, task_status: Any = None
    ) -> None:
        try:
            await kernel.run(task_status=task_status)
        except BaseExceptionGroup as group:
            if not self.faults.dead:
                raise
            # code that ran on in a dead process met a dead store
            rest = group.split(StorageError)[1]
            rest = rest.split(trio.Cancelled)[1] if rest is not None else None
            if rest is not None:
                raise rest from None
        finally:
            over.set()

    # ---- looking and evicting

    def tree(self, class_name: str, name: str) -> Tree | None:
        """Return an open root's tree."""
        return self.kernel.trees.get(TreeKey(class_name, name))

    def find(self, path: Path) -> Node | None:
        """Return the node in memory at a path of (class, name), root first."""
        (class_name, name), *hops = path
        tree = self.tree(class_name, name)
        node = None if tree is None else tree.nodes.get(tree.root_slot)
        for hop_class, hop_name in hops:
            if node is None:
                return None
            found = (
                k
                for k in node.kids.values()
                if k.kind.name == hop_class and k.name == hop_name
            )
            node = next(found, None)
        return node

    def is_idle(self, path: Path) -> bool:
        """Whether nothing keeps that agent in memory (or it is not there)."""
        node = self.find(path)
        return node is None or not node.busy

    async def evict(self, path: Path) -> None:
        """Drop an agent with its facets from memory now; a root's tree is closed.

        Raises `UsageError` when something of it is busy.
        """
        node = self.find(path)
        if node is not None:
            await self._evict(node)
        if len(path) == 1:
            tree = self.tree(*path[0])
            if tree is not None:
                await self.kernel.host.put_to_sleep(tree)

    async def _evict(self, node: Node) -> None:
        for kid in list(node.kids.values()):
            await self._evict(kid)
        if node.state is State.LIVE and not await node.tree.evict(node):
            msg = f"{node.path_text()} is busy"
            raise UsageError(msg)


@asynccontextmanager
async def open_test_kernel(
    *,
    roots: Iterable[type[Agent]],
    facets: Iterable[type[Agent]] = (),
    seed: int = 0,
    storage: str | Store = "memory:",
    limits: Limits | None = None,
    idle_s: float = 3600.0,
    abort_grace_s: float = 5.0,
    start_s: float = 30.0,
    tracer: Tracer | None = None,
) -> AsyncIterator[Harness]:
    """Open a kernel for a test: virtual clock, seeded chance, level `process`, no threads.

    Leaving it stops the kernel in order, unless it was crashed and not opened again.
    """
    limits = limits or Limits()
    store = find_store(storage, limits) if isinstance(storage, str) else storage
    try:
        async with trio.open_nursery() as nursery:
            harness = Harness(
                nursery, store, list(roots), list(facets), seed=seed, limits=limits,
                idle_s=idle_s, abort_grace_s=abort_grace_s, start_s=start_s,
                tracer=tracer,
            )  # fmt: skip
            await harness.reopen()
            try:
                yield harness
            finally:
                with trio.CancelScope(shield=True):
                    dead = harness.faults.dead  # it could not even stop in order
                    harness.faults.heal()
                    await (harness.crash() if dead else harness.close())
    except BaseExceptionGroup as group:
        raise alone(group) from None


# ---- a child that does what it is told


class ScriptedChild(Agent):
    """A facet whose turn is its input: a list of steps, one chunk each.

    `["say", text]`, `["sleep", s]`, `["stash", value]`, `["output", value]`,
    `["durable"]`, `["fail", text]`, `["run", run_id, script]` (a nested run of the same
    class, awaited). Resumable: it goes on after the last step that was stored.
    """

    resumable = True

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        """Do the steps that no earlier attempt has stored."""
        steps: list[list[Any]] = turn.input
        for number in range(len(turn.chunks()), len(steps)):
            yield await self._step(turn, number, steps[number])

    async def _step(self, turn: Turn, number: int, step: list[Any]) -> Chunk:
        verb, *args = step
        text = verb
        match verb:
            case "say":
                text = str(args[0])
            case "sleep":
                await trio.sleep(args[0])
            case "stash":
                turn.stash(args[0])
            case "output":
                turn.output = args[0]
            case "durable":
                await self.durable()
            case "fail":
                raise ValueError(args[0])
            case "run":
                run = await self.run_agent_tool(type(self), args[1], run_id=args[0])
                text = run.status
            case _:
                msg = f"no step {verb!r}"
                raise InternalError(msg)
        return {"type": "text-delta", "id": f"s{number}", "delta": text}
