"""Whatever storage operation fails or is the last: told in our words, nothing told is lost.

One short story over the port, in which every kind of operation occurs. Then it is
told again for each of its operations, with that one failing.
"""

from __future__ import annotations

import random
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter_ns

import pytest

from culet.kernel.core.limits import Limits
from culet.kernel.errors import CuletError, NotFound, StorageError
from culet.kernel.ports import TreeStore
from culet.storage import Files, SqliteStore, examine, open_sqlite
from storage.driving import KEY, NODE, NOTE, NOTES, run_chores
from storage.faultvfs import (
    HOW,
    Change,
    Cut,
    FaultFiles,
    FaultVfs,
    How,
    Plan,
    Seen,
    cuts,
)
from volume import PROFILE

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
LONG = PROFILE == "long"  # everything, which takes some minutes
STRIDE = 1 if LONG else 19  # of the changes after which the power fails
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
def planned(folder: Path) -> Iterator[tuple[Plan, SqliteStore]]:
    """Return a plan and a store under it, in an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
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


def test_the_story_meets_every_kind_of_operation(tmp_path: Path) -> None:
    plan, told = tell_once(tmp_path / "a")

    kinds = plan.kinds()
    for kind in (
        "mkdir", "lock", "open", "read", "write", "truncate", "sync", "sync-folder",
        "unlink", "xOpen", "xRead", "xWrite", "xTruncate", "xSync", "xLock",
    ):  # fmt: skip
        assert kinds[kind] > 0, kinds
    assert told.acked == len(told.states) - 1 == 6
    assert plan.struck == 0
    again, _ = tell_once(tmp_path / "a")
    assert again.seen == plan.seen  # same story, same operations


def tell_with(folder: Path, number: int, how: How, mode: str) -> CuletError | None:
    """Tell the story with one fault in it; return what it was told of it, if anything."""
    caught: CuletError | None = None
    with planned(folder) as (plan, store):
        told = Told()
        if mode == "stop":
            plan.stop_at(number)
        else:
            plan.fail_at(number, how, stay=mode == "stay")
        try:
            Story(store, told, plan).tell()
        except CuletError as error:
            caught = error
        with suppress(CuletError):
            store.close()
        assert plan.struck > 0
    state = looked_at(plan.top + "/data", told, told.acked, told.noted)
    assert caught is not None or state == told.states[-1]
    return caught


MODES = ("once", "stay", "stop")
BULK = ("xRead", "xWrite")


def chosen(plan: Plan, mode: str) -> list[Seen]:
    """Return the operations that fail in this mode.

    All of them in the long form; else each rare one in one of the modes, and each third
    of those that come by the hundred.
    """
    if LONG:
        return list(plan.seen)
    rare = [seen for seen in plan.seen if seen.kind not in BULK]
    bulk = [seen for seen in plan.seen if seen.kind in BULK]
    first = MODES.index(mode)
    return rare[first :: len(MODES)] + bulk[first :: len(MODES) ** 2]


@pytest.mark.rule("F-05", "I-47")
@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize("mode", MODES)
def test_each_operation_may_fail_and_nothing_told_is_lost(
    tmp_path: Path, mode: str
) -> None:
    plan, _ = tell_once(tmp_path / "count")
    heard = tries = 0
    for seen in chosen(plan, mode):
        how = HOW[tries % len(HOW)]
        tries += 1
        try:
            error = tell_with(tmp_path / "told", seen.number, how, mode)
        except Exception as wrong:
            wrong.add_note(f"{seen} failed {how}, {mode}")
            raise
        heard += isinstance(error, StorageError)
    assert heard > tries // 2, (heard, tries)


@pytest.mark.rule("F-02", "I-47")
@pytest.mark.slow
@pytest.mark.proof
def test_each_power_cut_leaves_an_instant_that_was_told_or_a_later_one(
    tmp_path: Path,
) -> None:
    plan, told = tell_once(tmp_path / "story")
    rng = random.Random(1)
    met: Counter[str] = Counter()
    for end in range(0, len(plan.changes) + 1, STRIDE):
        marks = [m for m in told.marks if m[0] <= end]
        _, acked, noted = marks[-1] if marks else (0, 0, False)
        for cut in one_of_each(plan.changes[:end], rng):
            top = tmp_path / "cut"
            shutil.rmtree(top, ignore_errors=True)
            cut.write_to(str(top))
            met[cut.what.split()[0]] += 1
            try:
                looked_at(f"{top}/data", told, acked, noted)
            except Exception as wrong:
                wrong.add_note(f"after change {end} of {len(plan.changes)}: {cut.what}")
                raise
    assert met.keys() == {"nothing", "all", "a", "write", "torn", "sector", "name"}
    assert met.total() > 100


def one_of_each(changes: list[Change], rng: random.Random) -> list[Cut]:
    """Return one cut of each kind there is."""
    found: dict[str, list[Cut]] = {}
    for cut in cuts(changes, rng):
        found.setdefault(cut.what.split()[0], []).append(cut)
    return [rng.choice(kind) for kind in found.values()]


def test_what_is_committed_while_a_sync_hangs_is_not_in_that_record(
    tmp_path: Path,
) -> None:
    with planned(tmp_path / "held") as (plan, store):
        told = Told()
        story = Story(store, told, plan)
        store.open()
        tree = story.tree = store.open_tree(KEY, level="power")
        story.add("root0")
        story.record()
        story.notes("root0", 1)
        record = tree.begin()
        told.states.append(told.state())
        assert tree.fill(record, perf_counter_ns() + 10**9)
        hold = plan.hold("sync", "log00000001")
        writer = threading.Thread(target=tree.write, args=(record,))
        writer.start()
        assert hold.entered.wait(20)
        story.notes("root0", 1)  # the loop does not wait for the disk
        hanging = list(plan.changes)
        hold.released.set()
        writer.join(20)
        assert tree.done(record) < tree.commits
    cut = next(c for c in cuts(hanging, random.Random(0)) if c.what == "all")
    cut.write_to(str(tmp_path / "cut"))
    assert looked_at(f"{tmp_path}/cut/data", told, 1, False) == told.states[-1]


# --- what the long form has found


def test_a_store_that_cannot_close_says_so_and_lets_the_lock_go(
    tmp_path: Path,
) -> None:
    with planned(tmp_path / "a") as (plan, store):
        store.open()
        store.open_tree(KEY, level="power")
        store.note_root(KEY, 0)
        plan.fail("xLock", 1, "io")
        with pytest.raises(StorageError):
            store.close()
        assert plan.struck == 1
        again = open_sqlite(plan.top + "/data", limits=LIMITS, files=Files())
        again.open()
        again.open_tree(KEY, level="power")
        again.close()


def test_a_file_that_cannot_be_let_go_is_told_in_our_words(tmp_path: Path) -> None:
    with planned(tmp_path / "a") as (plan, store):
        story = Story(store, Told(), plan)
        store.open()
        story.tree = store.open_tree(KEY, level="power")
        for slot in ("root0", "kid"):
            story.add(slot)
        story.notes("kid", 2)
        story.record()  # and a checkpoint
        plan.fail("truncate", 1, "io")
        with pytest.raises(StorageError):
            story.forget("kid")
        assert plan.struck == 1
        with pytest.raises(StorageError):  # it restarts from its last record
            story.tree.begin()
