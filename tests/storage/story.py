"""One short story over the port, in which every kind of storage operation occurs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter_ns

from culet.kernel.core.limits import Limits
from culet.kernel.errors import CuletError, NotFound
from culet.kernel.ports import TreeStore
from culet.storage import Files, SqliteStore, examine, open_sqlite
from storage.driving import KEY, NODE, NOTE, NOTES, run_chores
from storage.faultvfs import FaultFiles, FaultVfs, Plan

LIMITS = Limits(
    open_databases=2,
    segment_bytes=12 << 10,
    checkpoint_frames=4,
    huge_frames=8,
    checkpoint_s=60.0,  # no clock decides
)
JOB = (
    "INSERT INTO main.job (owner, kind, what, at, due_at, lane, created_at) "
    "VALUES ('root0', 'call', 'tick', 5, 5, '', 0)"
)
BIG = "x" * 900
State = tuple[tuple[str, tuple[str, ...]], ...]  # slot, its notes


@dataclass
class Told:
    """What the story knows: each instant that a record was to keep, and the last one
    that was acknowledged.
    """

    states: list[State] = field(default_factory=lambda: [()])
    acked: int = 0
    noted: bool = False
    now: dict[str, list[str]] = field(default_factory=dict)
    marks: list[tuple[int, int, bool]] = field(default_factory=list)

    def state(self) -> State:
        return tuple(sorted((slot, tuple(notes)) for slot, notes in self.now.items()))


class Story:
    """One life: some turns, each ends with a record and the janitor's chores."""

    def __init__(self, store: SqliteStore, told: Told, plan: Plan) -> None:
        self.store, self.told, self.plan = store, told, plan
        self.tree: TreeStore

    def tell(self) -> None:
        self.store.open()
        self.tree = self.store.open_tree(KEY, level="power")
        self.store.note_root(KEY, 0)
        self.told.noted = True
        self.add("root0")
        self.tree.tree.execute(JOB)
        self.notes("root0", 1)
        self.record()
        for slot in ("kid", "other", "third"):
            self.add(slot)
            self.notes(slot, 1)
        self.record()
        self.notes("kid", 3)
        self.record()
        self.forget("other")
        self.record()
        with self.tree.agent("root0").transaction():
            self.notes("root0", 9)  # beyond `huge_frames`
        self.record()
        self.tree.close()
        self.tree = self.store.open_tree(KEY, level="power")
        self.notes("third", 1)
        self.record()
        self.store.note_root(KEY, 5)
        self.store.close()

    def add(self, slot: str) -> None:
        parent = None if slot == "root0" else "root0"
        name = KEY.name if parent is None else slot
        self.tree.tree.execute(NODE, (slot, parent, name))
        self.told.now[slot] = []

    def notes(self, slot: str, count: int) -> None:
        for _ in range(count):
            key = f"{len(self.told.now[slot]):03d}"
            self.tree.agent(slot).execute(NOTE, (key, f'"{BIG}"'))
            self.told.now[slot].append(key)

    def forget(self, slot: str) -> None:
        self.tree.tree.execute("DELETE FROM main.node WHERE slot = ?", (slot,))
        self.tree.delete(slot)
        del self.told.now[slot]

    def record(self) -> None:
        told = self.told
        record = self.tree.begin()
        told.states.append(told.state())
        while not self.tree.fill(record, perf_counter_ns() + 10**9):
            pass
        self.tree.write(record)
        self.tree.done(record)
        told.acked = len(told.states) - 1
        self.mark()
        run_chores(self.tree)

    def mark(self) -> None:
        told = self.told
        told.marks.append((len(self.plan.changes), told.acked, told.noted))


@contextmanager
def planned(folder: Path, *, empty: bool = True) -> Iterator[tuple[Plan, SqliteStore]]:
    """Return a plan and a store under it, in an empty folder or as it is."""
    if empty:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    plan = Plan(str(folder))
    vfs = FaultVfs(f"fault-{folder.name}", plan)
    store = open_sqlite(
        str(folder / "data"),
        limits=LIMITS,
        files=FaultFiles(plan, vfs=vfs_name(folder)),
    )
    try:
        yield plan, store
    finally:
        with suppress(CuletError):
            store.close()
        vfs.unregister()


def vfs_name(folder: Path) -> str:
    return f"fault-{folder.name}"


def looked_at(directory: str, told: Told, acked: int, noted: bool) -> State:
    """Let the doctor look, open it, and return what is there; all that was told is."""
    with suppress(NotFound):  # it did not even come to a folder
        report = examine(directory)
        assert report.ok, report
    store = open_sqlite(directory, limits=LIMITS, files=Files())
    store.open()
    try:
        if noted:
            assert [entry.key for entry in store.roots()] == [KEY]
        tree = store.open_tree(KEY, level="power")
        slots = [s for (s,) in tree.tree.execute("SELECT slot FROM main.node")]
        there = {s: [k for (k,) in tree.agent(s).execute(NOTES)] for s in slots}
    finally:
        store.close()
    state = tuple(sorted((slot, tuple(keys)) for slot, keys in there.items()))
    assert state in told.states[acked:], "this is no instant of the story"
    return state


def tell_once(folder: Path) -> tuple[Plan, Told]:
    with planned(folder) as (plan, store):
        told = Told()
        Story(store, told, plan).tell()
    return plan, told
