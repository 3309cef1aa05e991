"""The contracts between the kernel and what it stands on. No trio, no SQLite here.

Storage is synchronous and runs on the kernel's thread: a commit is a write to the
page cache. Making commits durable is the barrier's alone: `begin` notes where every
file of the tree stands at one instant, `fill` collects the changed pages in slices,
`write` (the only call on the writer thread) puts one record into the tree's log and
syncs it, `done` returns the count of commits that are now durable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from time import perf_counter_ns
from typing import Any, Literal, NamedTuple, Protocol

SqlValue = None | int | float | str | bytes
Rows = list[tuple[Any, ...]]
Level = Literal["power", "process"]
Stopwatch = Callable[[], int]  # nanoseconds that only grow


class TreeKey(NamedTuple):
    """The address of a root: its class and its name."""

    class_name: str
    name: str


class RootEntry(NamedTuple):
    """One line of the host index. `due_at` None: the root owes nothing."""

    key: TreeKey
    due_at: int | None


class UserRows(NamedTuple):
    """The result of one user statement."""

    columns: tuple[str, ...]
    rows: Rows


class Chore(NamedTuple):
    """Work for the janitor thread. `done` then runs in the loop, with the error or None."""

    work: Callable[[], None]
    done: Callable[[BaseException | None], None]


class Db(Protocol):
    """One database of a tree, for the kernel's own statements.

    Statements outside `transaction` commit by themselves. Never blocks for the disk.
    Raises `StorageError` and its kinds only.
    """

    def execute(self, sql: str, params: Sequence[SqlValue] = ()) -> Rows:
        """Run one statement and return all its rows."""
        ...

    def executemany(self, sql: str, rows: Sequence[Sequence[SqlValue]]) -> None:
        """Run one statement once for each row, in one transaction."""
        ...

    @property
    def changes(self) -> int:
        """Rows that the last INSERT, UPDATE or DELETE changed."""
        ...

    def transaction(self) -> AbstractContextManager[None]:
        """One immediate transaction; an inner one joins the outer one.

        Left by an exception it is rolled back. It must not be open over an await.
        """
        ...


class AgentDb(Db, Protocol):
    """One agent's file, made when it is first written; before that it reads as empty.

    Opened on first use, closed by LRU when idle, reopened by the next use.
    """

    @property
    def exists(self) -> bool:
        """Whether the file was made (or is about to be, by the next record)."""
        ...

    def rest(self) -> None:
        """Its agent sleeps and somebody has read its file: of such, only a few stay open."""
        ...

    def user(self, sql: str, params: Sequence[SqlValue], max_rows: int) -> UserRows:
        """Run one fenced user statement; more than `max_rows` rows raises `SqlError`."""
        ...

    def user_begin(self) -> None:
        """Open the user's transaction; kernel statements then join it."""
        ...

    def user_end(self, *, commit: bool) -> None:
        """Commit or roll back the user's transaction, if one is open."""
        ...

    @property
    def in_user_transaction(self) -> bool:
        """Whether `user_begin` is waiting for its `user_end`."""
        ...

    @property
    def size_bytes(self) -> int:
        """Bytes of the file, for `kernel.tree()`; 0 before it is made."""
        ...


class Record(Protocol):
    """One record of the tree's log on its way to the disk."""

    @property
    def commits(self) -> int:
        """The count of commits that this record makes durable."""
        ...


class TreeStore(Protocol):
    """All files of one root. Everything but `write` and chores runs on the kernel's thread."""

    @property
    def tree(self) -> Db:
        """`tree.db`, the kernel's own: what decides."""
        ...

    @property
    def inline(self) -> bool:
        """True when `write` does nothing that blocks, so that it may run in the loop."""
        ...

    @property
    def commits(self) -> int:
        """Commits of this life so far, over all files of the tree."""
        ...

    @property
    def dirty(self) -> bool:
        """Whether something was committed, made or deleted that no record has taken."""
        ...

    @property
    def created(self) -> bool:
        """Whether this `open_tree` made the tree."""
        ...

    def agent(self, slot: str) -> AgentDb:
        """The database of the agent with that slot. Makes nothing."""
        ...

    def delete(self, slot: str) -> None:
        """Drop that agent's file; it is unlinked after the record that says so."""
        ...

    def slots(self) -> set[str]:
        """Slots that have a file."""
        ...

    def begin(self) -> Record:
        """Note the end of every dirty file at this instant. One record is in flight."""
        ...

    def fill(
        self, record: Record, until_ns: int, stopwatch: Stopwatch = perf_counter_ns
    ) -> bool:
        """Collect pages until `stopwatch()` passes `until_ns`; True when all are there."""
        ...

    def write(self, record: Record) -> None:
        """Write and sync the record. The only call made on the writer thread."""
        ...

    def done(self, record: Record, stopwatch: Stopwatch = perf_counter_ns) -> int:
        """The record is durable: checkpoint what may be, return `record.commits`."""
        ...

    def room(self, db: Db) -> bool:
        """False while writers of that file should wait for the next record."""
        ...

    @property
    def crowded(self) -> bool:
        """Whether a file that never rests must be checkpointed by the next record.

        Then that record is made in one step of the loop, so that nothing can be
        committed between its instant and the checkpoint.
        """
        ...

    def janitor(self) -> list[Chore]:
        """What the janitor thread should do now: syncs, unlinks, the next segment."""
        ...

    def retire(self) -> None:
        """Refuse all from now on, whoever still asks; never blocks. `close` may follow.

        It takes away what the loop uses, so that another thread can close it.
        """
        ...

    def close(self) -> None:
        """Close all files. Commits without a record are lost at the next open. Blocks."""
        ...


class Store(Protocol):
    """A folder, or the like, of many trees."""

    def open(self) -> None:
        """Take the lock: a second kernel on the folder gets `StorageBusy`."""
        ...

    def open_tree(
        self, key: TreeKey, *, level: Level, create: bool = True
    ) -> TreeStore:
        """Recover and open one tree. May block: call it off the loop when it is cold.

        Without `create` a missing tree raises `NotFound` and leaves nothing behind.
        """
        ...

    def drop_tree(self, key: TreeKey) -> None:
        """Remove a closed tree, for good. Blocks."""
        ...

    def roots(self) -> list[RootEntry]:
        """The host index, rebuilt from the trees when it is missing. Blocks."""
        ...

    def note_root(self, key: TreeKey, due_at: int | None) -> None:
        """Write one line of the host index, durable when it returns. Blocks."""
        ...

    def close(self) -> None:
        """Close every tree and give up the lock."""
        ...


class Blob:
    """Frames on their way out: encoded once, shared by all who get them.

    Each of `texts` is one WebSocket message (str) or a binary one (bytes). A transport
    may keep its own framing of them all in `framed`.
    """

    __slots__ = ("framed", "size", "texts")

    def __init__(self, *texts: str | bytes) -> None:
        self.texts = texts
        self.size = sum(map(len, texts))
        self.framed: bytes | None = None


class Peer(Protocol):
    """The far end of a connection, as agents see it: pushing never blocks or raises."""

    def push(self, blob: Blob, stamp: int) -> None:
        """Queue a frame; it leaves when the tree's durable count reaches `stamp`."""
        ...

    def close(self, code: int, reason: str, stamp: int) -> None:
        """Close after what was pushed before."""
        ...

    def wake(self) -> None:
        """There may be more to pull (see `Connection.pull`)."""
        ...

    def drop(self, why: str) -> None:
        """End it now, whatever was pushed: it was closed, and has not gone."""
        ...


class Gate(Protocol):
    """The output gate of one tree, as outboxes see it."""

    @property
    def durable(self) -> int:
        """Commits that are durable at the level of the tree."""
        ...

    def hold(self, waiter: Callable[[int], None]) -> None:
        """Call `waiter(durable)` once, after the next record (or `waiter(-1)` on a fence)."""
        ...
