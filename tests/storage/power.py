"""Power cuts: a journal of all that reaches the disk, and the folders that a cut leaves.

Every file operation of the store and of SQLite is noted. A cut after any of them may
keep, of what was not synced, all, nothing, some, or torn 512-byte sectors; names that
were made or removed since the last sync of the folder may or may not be there.
"""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import apsw

from culet.kernel.core.limits import Limits
from culet.kernel.ports import Chore, Level
from culet.storage import Files, Folder, examine
from culet.storage.agentfile import EmptyDatabase
from culet.storage.database import Database
from culet.storage.log import read_log
from culet.storage.template import Templates
from culet.storage.treefile import TREE_FILE, FileAgent, OpenFiles, SqliteTree
from culet.storage.treelog import LogRecord

Op = tuple[Any, ...]
Mode = Literal["none", "all", "some", "torn"]
NEVER = 1 << 62  # of perf_counter_ns
CUT = "roots/c/n/cut"  # where the doctor looks for a tree

LIMITS = Limits(
    open_databases=3,  # so that files are closed and opened all the time
    segment_bytes=32 << 10,
    checkpoint_frames=40,
    huge_frames=80,
    checkpoint_s=60.0,  # no clock decides: same seed, same history
)


class Journal:
    """What happened, in order, by name of the file."""

    def __init__(self) -> None:
        self.ops: list[Op] = []

    def note(self, *op: Any) -> None:
        self.ops.append(op)


class JournalFolder(Folder):
    def __init__(self, files: JournalFiles, path: str) -> None:
        super().__init__(files, path)
        self._note = files.journal.note

    def open(self, name: str, *, create: bool) -> int:
        new = not os.path.exists(self.where(name))
        descriptor = super().open(name, create=create)
        if new:
            self._note("link", name)
        return descriptor

    def write(self, name: str, offset: int, data: bytes) -> None:
        super().write(name, offset, data)
        self._note("write", name, offset, bytes(data))

    def truncate(self, name: str, size: int) -> None:
        super().truncate(name, size)
        self._note("trunc", name, size)

    def sync(self, name: str) -> None:
        if not os.path.exists(self.where(name)):
            raise FileNotFoundError(name)
        self._note("sync", name)

    def sync_all(self, names: Any) -> None:
        for name in names:
            self.sync(name)

    def sync_folder(self) -> None:
        self._note("syncdir", "")

    def unlink(self, name: str) -> None:
        there = os.path.exists(self.where(name))
        super().unlink(name)
        if there:
            self._note("unlink", name)


class JournalFiles(Files):
    def __init__(self, journal: Journal, *, vfs: str) -> None:
        super().__init__(vfs=vfs)
        self.journal = journal

    def folder(self, path: str) -> JournalFolder:
        return JournalFolder(self, path)


class _JournalFile(apsw.VFSFile):
    def __init__(self, journal: Journal, name: Any, flags: list[int]) -> None:
        path = name.filename() if isinstance(name, apsw.URIFilename) else name
        self._name = os.path.basename(path)
        self._journal = journal
        new = not os.path.exists(path)
        super().__init__("unix", name, flags)
        if new:
            journal.note("link", self._name)

    def xWrite(self, data: Any, offset: int) -> None:
        self._journal.note("write", self._name, offset, bytes(data))
        super().xWrite(data, offset)

    def xTruncate(self, size: int) -> None:
        self._journal.note("trunc", self._name, size)
        super().xTruncate(size)

    def xSync(self, flags: int) -> None:
        self._journal.note("SQLITE-SYNC", self._name)


class JournalVfs(apsw.VFS):
    """SQLite's half of the journal."""

    def __init__(self, name: str, journal: Journal) -> None:
        self._journal = journal
        super().__init__(name, "unix")

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:
        if name is None:
            return apsw.VFSFile("unix", name, flags)
        return _JournalFile(self._journal, name, flags)

    def xDelete(self, name: str, syncdir: bool) -> None:
        self._journal.note("unlink", os.path.basename(name))
        super().xDelete(name, syncdir)


# --- what a cut leaves


class _Disk:
    """Files by inode: what is durable, and what is only pending."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}  # as the running system sees them
        self.durable_names: dict[str, int | None] = {}
        self.pending_names: list[tuple[str, int | None]] = []
        self.data: dict[int, bytearray] = {}
        self.pending: dict[int, list[Op]] = {}

    def replay(self, op: Op) -> None:
        kind, name = op[0], op[1]
        if kind == "link":
            inode = len(self.data) + 1
            self.names[name] = inode
            self.pending_names.append((name, inode))
            self.data[inode], self.pending[inode] = bytearray(), []
        elif kind == "unlink":
            self.names.pop(name, None)
            self.pending_names.append((name, None))
        elif kind in ("write", "trunc"):
            self.pending[self.names[name]].append(op)
        elif kind == "sync":
            inode = self.names[name]
            for write in self.pending[inode]:
                _apply(self.data[inode], write)
            self.pending[inode] = []
        elif kind == "syncdir":
            self.durable_names.update(self.pending_names)
            self.pending_names.clear()


def _apply(image: bytearray, op: Op) -> None:
    if op[0] == "trunc":
        image[:] = image[: op[2]].ljust(op[2], b"\0")
        return
    offset, data = op[2], op[3]
    if len(image) < offset:
        image.extend(bytes(offset - len(image)))
    image[offset : offset + len(data)] = data


def rebuild(ops: list[Op], mode: Mode, rng: random.Random, folder: str) -> None:
    """Write the folder as a cut after `ops` may leave it."""
    disk = _Disk()
    for op in ops:
        disk.replay(op)
    keep = {
        name: 0 if mode == "none" else 99 if mode == "all" else rng.randrange(4)
        for name, _ in disk.pending_names
    }
    for name, inode in disk.pending_names:
        if keep[name] > 0:
            disk.durable_names[name] = inode
            keep[name] -= 1
    for inode, pending in disk.pending.items():
        for op in pending:
            _maybe_apply(disk.data[inode], op, mode, rng.random(), rng)
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    for name, found in disk.durable_names.items():
        if found is not None:
            Path(folder, name).write_bytes(disk.data[found])


def _maybe_apply(
    image: bytearray, op: Op, mode: Mode, luck: float, rng: random.Random
) -> None:
    if mode == "none" or (mode in ("some", "torn") and luck < 0.4):
        return
    if mode == "torn" and op[0] == "write" and luck < 0.75 and len(op[3]) > 512:
        for at in range(0, len(op[3]), 512):
            if rng.random() < 0.5:
                _apply(image, ("write", op[1], op[2] + at, op[3][at : at + 512]))
        return
    _apply(image, op)


def adopt(folder: str) -> list[Op]:
    """Return the journal that leads to a folder as it is, all durable."""
    ops: list[Op] = []
    for path in sorted(Path(folder).iterdir()):
        ops += [
            ("link", path.name),
            ("write", path.name, 0, path.read_bytes()),
            ("sync", path.name),
        ]
    ops.append(("syncdir", ""))
    return ops


def image_of(folder: str) -> dict[str, bytes]:
    """Return every database file of a folder, byte for byte."""
    return {path.name: path.read_bytes() for path in Path(folder).glob("*.db")}


def last_lsn(folder: str) -> int:
    """Return the last record that the log of a folder holds, 0 without one."""
    chain = read_log(Folder(Files(), folder)).chain
    return chain[-1].lsn if chain else 0


# --- a life of random turns


@dataclass
class Proof:
    """One run of histories, and what it met."""

    folder: str
    vfs: str
    level: Level
    journal: Journal
    templates: Templates
    empty: EmptyDatabase = field(default_factory=lambda: EmptyDatabase(LIMITS))
    images: int = 0
    nested: int = 0
    met: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    counted: Callable[[], object] = bool  # called for each image
    doctor: int = 0  # looks at each n-th image first; 0 means never

    def open(self, folder: str, journal: Journal) -> SqliteTree:
        vfs = self.vfs if journal is self.journal else "unix"
        return SqliteTree(
            JournalFiles(journal, vfs=vfs).folder(folder),
            templates=self.templates,
            level=self.level,
            limits=LIMITS,
            empty=self.empty,
            open_files=OpenFiles(LIMITS),
            closed=lambda _tree: None,
        )


class _Undo(Exception):
    """Ends a transaction that shall not be."""


class Life:
    """One life of a tree: turns, the phases of a record and chores, in any order."""

    def __init__(
        self,
        proof: Proof,
        tree: SqliteTree,
        rng: random.Random,
        snapshots: dict[int, dict[str, bytes]],
        acked: list[tuple[int, int, int]],
    ) -> None:
        self.proof, self.tree, self.rng = proof, tree, rng
        self.snapshots, self.acked = snapshots, acked
        self.record: LogRecord | None = None
        self.phase = 0
        self.chores: list[Chore] = []

    def run(self, steps: int) -> None:
        for _ in range(steps):
            k = self.rng.randrange(20)
            if k < 8:
                self.turn()
            elif k == 8 and len(self.tree.slots()) < 8:
                self.create()
            elif k == 9 and len(self.tree.slots()) > 2:
                self.delete()
            elif k < 16:
                self.advance()
            elif k < 19 or self.phase:
                self.chore()
            else:
                self.rest()

    def databases(self) -> list[Database]:
        return [self.tree.tree, *map(self.tree.agent, sorted(self.tree.slots()))]

    def turn(self) -> None:
        found = self.databases()
        chance = random.Random(
            len(self.proof.journal.ops)
        )  # leaves the history as it is
        if chance.random() < 0.05:
            self.overflow(chance.choice(found), chance)
        for database in self.rng.sample(found, self.rng.randrange(1, len(found) + 1)):
            with database.transaction():
                for _ in range(self.rng.randrange(1, 4)):
                    self.statement(database)
            if self.rng.random() < 0.04:
                database.execute("VACUUM")
                self.proof.met["vacuum"] += 1
            if isinstance(database, FileAgent) and self.rng.random() < 0.1:
                database.disconnect()
                self.proof.met["reopened"] += 1

    def overflow(self, database: Database, chance: random.Random) -> None:
        """Write more than the page cache holds: it spills into the WAL uncommitted."""
        name = database.slot + ".db" if isinstance(database, FileAgent) else TREE_FILE
        keeps, size = chance.random() < 0.4, self.tree.folder.size

        def change() -> None:
            database.execute("CREATE TABLE IF NOT EXISTS big (a)")
            before = size(name + "-wal")
            for _ in range(90):
                text = chance.randbytes(chance.choice([400, 1500])).hex()
                database.execute("INSERT INTO big VALUES (?)", (text,))
            self.proof.met["spilled"] += size(name + "-wal") > before
            database.execute("DELETE FROM big")
            if not keeps:
                raise _Undo

        try:
            with database.transaction():
                change()
        except _Undo:
            self.proof.met["rolled back"] += 1

    def statement(self, database: Database) -> None:
        rng, k = self.rng, self.rng.randrange(12)
        table = "main.meta" if database is self.tree.tree else "main.culet_value"
        number = rng.randrange(400)
        value: str | int = rng.randrange(1 << 40)
        if isinstance(database, FileAgent):
            size = rng.choice([10, 100, 100, 450, 3000])
            value = f'"{rng.randbytes(size).hex()}"'
        if k < 7:
            database.execute(
                f"INSERT OR REPLACE INTO {table} (key, value) VALUES (?, ?)",
                (str(number), value),
            )
        elif k < 9:
            database.execute(
                f"DELETE FROM {table} WHERE key LIKE ?", (f"%{number % 10}",)
            )
        elif k == 9:
            name = f"u{rng.randrange(6)}"
            database.execute(f"CREATE TABLE IF NOT EXISTS {name} (a, b)")
            database.execute(f"CREATE INDEX IF NOT EXISTS i{name} ON {name} (a)")
            database.execute(f"INSERT INTO {name} VALUES (?, ?)", (number, value))
            self.proof.met["ddl"] += 1
        else:
            database.execute(f"DROP TABLE IF EXISTS u{rng.randrange(6)}")
            self.proof.met["ddl"] += 1

    def create(self) -> None:
        slot = f"s{self.rng.getrandbits(40):010x}"
        self.tree.tree.execute(
            "INSERT INTO main.node (slot, class, name, state, created_at, parent) "
            "VALUES (?, 'C', ?, 'live', 0, ?)",
            (slot, slot, self.root()),
        )
        self.tree.make(self.tree.agent(slot))
        self.proof.met["created"] += 1

    def root(self) -> str | None:
        """The slot that all others are under; None while there is no node."""
        sql = "SELECT slot FROM node WHERE parent IS NULL"
        return next((slot for (slot,) in self.tree.tree.execute(sql)), None)

    def delete(self) -> None:
        slot = self.rng.choice(sorted(self.tree.slots() - {self.root()}))
        self.tree.tree.execute("DELETE FROM main.node WHERE slot = ?", (slot,))
        self.tree.delete(slot)
        self.proof.met["deleted"] += 1

    # the phases of a record

    def begin(self) -> None:
        self.snapshots[self.tree.log.lsn + 1] = self.snapshot()
        self.record = self.tree.begin()

    def snapshot(self) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for database in self.databases():
            connection = database.connection or database.connect()
            name = (
                database.slot + ".db" if isinstance(database, FileAgent) else TREE_FILE
            )
            found[name] = connection.serialize("main")
        return found

    def done(self) -> None:
        assert self.record is not None
        log = self.tree.log
        before = log.low
        self.tree.done(self.record)
        self.note_acked()
        self.record, self.phase = None, 0
        self.chores += self.tree.janitor()
        self.proof.met["records"] += 1
        for file in log.files.values():
            self.proof.met["checkpointed"] += file.checkpointed and bool(file.end)
        self.proof.met["held"] += not all(map(self.tree.room, self.databases()))
        self.proof.met["retired"] += log.low - before

    def note_acked(self) -> None:
        log = self.tree.log
        self.acked.append((len(self.proof.journal.ops), log.synced, log.acked))

    def advance(self) -> None:
        if self.phase == 0:
            self.begin()
            self.phase = 1
            return
        assert self.record is not None
        if self.phase == 1:
            full = self.rng.random() < 0.7
            self.phase += self.tree.fill(self.record, NEVER if full else 0)
        elif self.phase == 2:
            self.tree.write(self.record)
            self.phase = 3
        else:
            self.done()

    def chore(self) -> None:
        if self.chores:
            chore = self.chores.pop(0)
            chore.work()
            chore.done(None)
            self.chores += self.tree.janitor()
            self.note_acked()
            self.proof.met["chores"] += 1

    def rest(self) -> None:
        """Make a quiet moment: all durable, checkpointed, synced, retired."""
        self.begin()
        assert self.record is not None
        self.tree.fill(self.record, NEVER)
        self.tree.write(self.record)
        self.done()
        while self.chores:
            self.chore()
        self.proof.met["rests"] += 1


# --- the proof


def check(
    proof: Proof, folder: str, snapshots: dict[int, dict[str, bytes]], must: int
) -> str | None:
    """Let the doctor look at what a cut left, open it; return what is wrong with it."""
    got = last_lsn(folder)
    if proof.doctor and proof.images % proof.doctor == 0:
        problems = [p for tree in examine(proof.folder).trees for p in tree.problems]
        if problems:
            return f"the doctor finds: {problems}"
    tree = proof.open(folder, Journal())
    tree.close()
    now = image_of(folder)
    if got < must:
        return f"lost the acknowledged record {must}, has {got}"
    if got not in snapshots:
        return f"has the unknown record {got}"
    if now != snapshots[got]:
        names = [
            n for n in {*now, *snapshots[got]} if now.get(n) != snapshots[got].get(n)
        ]
        return f"{names} differ from the instant of record {got}"
    for name in now:
        connection = apsw.Connection(f"{folder}/{name}")
        if connection.pragma("integrity_check") != "ok":
            return f"{name} is not whole"
        if name == TREE_FILE:
            rows = connection.execute("SELECT slot || '.db' FROM node").fetchall()
            if {row[0] for row in rows} | {TREE_FILE} != set(now):
                return "nodes and files disagree"
        connection.close()
    return None


def one_seed(
    proof: Proof, seed: int, *, steps: int, cuts: int, stop: Callable[[], bool]
) -> None:
    """Three lives, each on what a cut left of the one before; cuts all along."""
    rng = random.Random(seed)
    live, cut = f"{proof.folder}/live", f"{proof.folder}/{CUT}"
    shutil.rmtree(live, ignore_errors=True)
    os.makedirs(live)
    ops = proof.journal.ops = []
    snapshots: dict[int, dict[str, bytes]] = {}
    acked: list[tuple[int, int, int]] = [(0, 0, 0)]
    base = 0
    for number in range(3):
        tree = proof.open(live, proof.journal)
        snapshots[tree.log.lsn] = image_of(live)
        if not number:  # a cut before the first record leaves a tree to be made anew
            snapshots[0] = snapshots[tree.log.lsn]
        life = Life(proof, tree, rng, snapshots, acked)
        life.note_acked()
        start = base if number else len(ops)
        life.run(steps)
        tree.close()
        proof.met["wal emptied"] += sum(
            op[0] == "trunc" and op[1].endswith("-wal") and op[2] == 0 for op in ops
        )
        proof.met["sqlite syncs"] += sum(op[0] == "SQLITE-SYNC" for op in ops)
        for _ in range(cuts):
            at = rng.randrange(start, len(ops) + 1)
            mode: Mode = rng.choice(["none", "all", "some", "torn", "torn"])
            rebuild(ops[:at], mode, rng, cut)
            # Everything kept is what a killed process leaves: the page cache.
            must = max(a if mode == "all" else s for o, s, a in acked if o <= at)
            wrong = _check_cut(proof, cut, snapshots, must, rng)
            if wrong is not None:
                proof.bad.append(f"seed {seed} life {number} cut {at} {mode}: {wrong}")
            if stop():
                return
        rebuild(ops[: rng.randrange(start, len(ops) + 1)], "torn", rng, cut)
        got = last_lsn(cut)
        shutil.rmtree(live)
        os.rename(cut, live)
        ops[:] = adopt(live)
        base = len(ops)
        acked[:] = [(0, got, got)]
        kept = snapshots.get(got, {})
        snapshots.clear()
        snapshots.update({got: kept, got + 1: kept})  # the manifest changes nothing


def _check_cut(
    proof: Proof,
    folder: str,
    snapshots: dict[int, dict[str, bytes]],
    must: int,
    rng: random.Random,
) -> str | None:
    proof.images += 1
    proof.counted()
    try:
        if rng.random() >= 0.25:
            return check(proof, folder, snapshots, must)
        # A second cut, while the first is being recovered from.
        journal = Journal()
        journal.ops = adopt(folder)
        base, got = len(journal.ops), last_lsn(folder)
        tree = proof.open(folder, journal)
        tree.close()
        again = dict(snapshots)
        if got in snapshots:
            again[tree.log.lsn] = snapshots[got]
        at = rng.randrange(base, len(journal.ops) + 1)
        mode: Mode = rng.choice(["none", "some", "torn"])
        rebuild(journal.ops[:at], mode, rng, folder)
        proof.nested += 1
        return check(proof, folder, again, must)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def prove(
    folder: str,
    *,
    images: int,
    level: Level,
    first_seed: int = 1,
    steps: int = 70,
    counted: Callable[[], object] = bool,
    doctor: int = 0,
) -> Proof:
    """Run histories until that many images were looked at, or one is bad."""
    os.makedirs(folder, exist_ok=True)
    journal = Journal()
    name = f"journal-{os.path.basename(folder)}-{level}"
    vfs = JournalVfs(name, journal)
    templates = Templates(Files(), f"{folder}/templates")
    templates.keep()  # the doctor rests on them
    proof = Proof(
        folder, name, level, journal, templates, counted=counted, doctor=doctor
    )

    def stop() -> bool:
        return bool(proof.bad) or proof.images >= images

    seed = first_seed
    try:
        while not stop():
            try:
                one_seed(proof, seed, steps=steps, cuts=12, stop=stop)
            except Exception as error:
                proof.bad.append(f"seed {seed}: {type(error).__name__}: {error}")
            seed += 1
    finally:
        vfs.unregister()
        proof.empty.close()
    return proof
