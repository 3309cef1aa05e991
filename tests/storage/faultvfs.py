"""Every storage operation, SQLite's and ours, counted, failed, held up or taken back.

A `Plan` sees each operation before it happens: it numbers it, fails it, stops the
world from it on, or holds its thread. What did happen is kept in order, so that
`cuts` can say what a power cut at that moment may leave: of what was not synced
nothing, all, any half, one write alone, a write torn at a sector, a name lost.
Nothing is really synced; the journal decides what is durable.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import apsw

from culet.storage import Files, Folder

How = Literal["full", "io", "busy"]
HOW: tuple[How, ...] = ("full", "io", "busy")
SECTOR = 512
_OURS = {"full": errno.ENOSPC, "io": errno.EIO, "busy": errno.EBUSY}
# No system is busy with a write, nor full with a read: SQLite would take the one for
# a checkpoint that met a reader, and delete the WAL.
_POSSIBLE = {"busy": ("xLock",), "full": ("xOpen", "xSync", "xTruncate", "xWrite")}
_SQLITE = {"full": apsw.FullError, "io": apsw.IOError, "busy": apsw.BusyError}


class Seen(NamedTuple):
    """One operation. `kind` is ours in lower case, SQLite's as its VFS calls it."""

    number: int  # from 1
    kind: str
    name: str


class Change(NamedTuple):
    """One thing that happened to the disk; `path` is relative to the store."""

    kind: Literal["link", "unlink", "write", "trunc", "sync", "syncdir"]
    path: str
    offset: int = 0  # or the size, of a "trunc"
    data: bytes = b""
    folder: bool = False  # what is linked is a folder


class Hold:
    """A thread that waits in the middle of an operation until it is let go."""

    def __init__(self) -> None:
        self.entered, self.released = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.entered.set()
        assert self.released.wait(20), "nobody released it"


@dataclass
class _Fault:
    chosen: Callable[[Seen], bool]
    nth: int
    how: How
    stay: bool
    met: int = 0


@dataclass
class Plan:
    """What was seen, what happened, and what shall go wrong."""

    top: str
    seen: list[Seen] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    struck: int = 0
    _faults: list[_Fault] = field(default_factory=list)
    _holds: list[tuple[str, str, Hold]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fail_at(self, number: int, how: How = "io", *, stay: bool = False) -> None:
        """Fail that operation; with `stay` all that are like it from then on."""
        kinds: list[str] = []

        def chosen(seen: Seen) -> bool:
            if seen.number == number:
                kinds.append(seen.kind)
            return seen.kind in kinds

        self._faults.append(_Fault(chosen, 1, how, stay))

    def fail(self, kind: str, nth: int, how: How, *, stay: bool = False) -> None:
        """Fail the n-th operation of a kind; with `stay` the later ones as well."""
        self._faults.append(_Fault(lambda seen: seen.kind == kind, nth, how, stay))

    def stop_at(self, number: int) -> None:
        """Let nothing happen from that operation on: the process is as good as dead."""
        self._faults.append(_Fault(lambda s: s.number >= number, 1, "io", stay=True))

    def hold(self, kind: str, name: str) -> Hold:
        """Hold the next operation of a kind on that file until it is released."""
        hold = Hold()
        self._holds.append((kind, name, hold))
        return hold

    def heal(self) -> None:
        """Let nothing more go wrong."""
        self._faults.clear()

    def kinds(self) -> Counter[str]:
        """How often each kind was seen."""
        return Counter(seen.kind for seen in self.seen)

    def see(self, kind: str, path: str) -> How | None:
        """Count one operation; return how it shall fail, if it shall."""
        with self._lock:
            seen = Seen(len(self.seen) + 1, kind, self.relative(path))
            self.seen.append(seen)
            strikes = [f.how for f in self._faults if _strikes(f, seen)]
            self.struck += bool(strikes)
            held = next((h for h in self._holds if _holds(h, seen)), None)
            if held is not None:
                self._holds.remove(held)
        if held is not None:
            held[2]()
        return strikes[0] if strikes else None

    def relative(self, path: str) -> str:
        return os.path.relpath(path, self.top)

    def note(self, change: Change) -> None:
        self.changes.append(change)


def _strikes(fault: _Fault, seen: Seen) -> bool:
    if not fault.chosen(seen):
        return False
    fault.met += 1
    return fault.met >= fault.nth if fault.stay else fault.met == fault.nth


def _holds(held: tuple[str, str, Hold], seen: Seen) -> bool:
    return (seen.kind, os.path.basename(seen.name)) == held[:2]


# --- our half


class FaultFiles(Files):
    """The file module under a plan. `vfs` names the VFS of the same plan."""

    def __init__(self, plan: Plan, *, vfs: str) -> None:
        super().__init__(self._observe, vfs=vfs)
        self.plan = plan

    def _observe(self, operation: str, path: str) -> None:
        how = self.plan.see(operation, path)
        if how is not None:
            raise OSError(_OURS[how], f"planned: {operation} {os.path.basename(path)}")
        name = self.plan.relative(path)
        if operation == "mkdir":
            self.plan.note(Change("link", name, folder=True))
        elif operation == "lock" and not os.path.exists(path):
            self.plan.note(Change("link", name))
        elif operation == "unlink" and os.path.exists(path):
            self.plan.note(Change("unlink", name))

    def folder(self, path: str) -> FaultFolder:
        return FaultFolder(self, path)

    def sync_folder(self, path: str) -> None:
        self.see("sync-folder", path)
        self.plan.note(Change("syncdir", self.plan.relative(path)))


class FaultFolder(Folder):
    def __init__(self, files: FaultFiles, path: str) -> None:
        super().__init__(files, path)
        self.plan = files.plan

    def _name(self, name: str) -> str:
        return self.plan.relative(self.where(name))

    def open(self, name: str, *, create: bool) -> int:
        new = not os.path.exists(self.where(name))
        descriptor = super().open(name, create=create)
        if new:
            self.plan.note(Change("link", self._name(name)))
        return descriptor

    def write(self, name: str, offset: int, data: bytes) -> None:
        try:
            super().write(name, offset, data)
        except OSError as error:
            if error.errno == errno.ENOSPC:  # a full disk takes what it can
                self._write_some(name, offset, bytes(data)[: len(data) // 2])
            raise
        self.plan.note(Change("write", self._name(name), offset, bytes(data)))

    def _write_some(self, name: str, offset: int, data: bytes) -> None:
        if os.path.exists(self.where(name)):
            with open(self.where(name), "r+b") as file:
                file.seek(offset)
                file.write(data)
            self.plan.note(Change("write", self._name(name), offset, data))

    def truncate(self, name: str, size: int) -> None:
        super().truncate(name, size)
        self.plan.note(Change("trunc", self._name(name), size))

    def sync(self, name: str) -> None:
        self.files.see("sync", self.where(name))
        if not os.path.exists(self.where(name)):
            raise FileNotFoundError(name)
        self.plan.note(Change("sync", self._name(name)))

    def sync_all(self, names: Any) -> None:
        for name in names:
            self.sync(name)


# --- SQLite's half


class FaultVfs(apsw.VFS):
    """SQLite's operations under the same plan; `unregister` it after the test."""

    def __init__(self, name: str, plan: Plan) -> None:
        self.plan = plan
        super().__init__(name, "unix")

    def excepthook(self, kind: Any, value: Any, trace: Any) -> bool:
        """What is raised where nobody can hear it was planned."""
        return True

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:
        if name is None:
            return apsw.VFSFile("unix", name, flags)
        path = name.filename() if isinstance(name, apsw.URIFilename) else name
        strike(self.plan, "xOpen", path)
        return _FaultFile(self.plan, path, name, flags)

    def xDelete(self, name: str, syncdir: bool) -> None:
        strike(self.plan, "xDelete", name)
        super().xDelete(name, syncdir)
        relative = self.plan.relative(name)
        self.plan.note(Change("unlink", relative))
        if syncdir:
            self.plan.note(Change("syncdir", os.path.dirname(relative) or "."))


def strike(plan: Plan, kind: str, path: str) -> None:
    """Count one operation of SQLite; raise what was planned for it."""
    how = plan.see(kind, path)
    if how is not None:
        how = how if kind in _POSSIBLE.get(how, (kind,)) else "io"
        raise _SQLITE[how](f"planned: {kind} {os.path.basename(path)}")


class _FaultFile(apsw.VFSFile):
    def __init__(self, plan: Plan, path: str, name: Any, flags: list[int]) -> None:
        self._plan, self._path = plan, path
        self._relative = plan.relative(path)
        self._unnamed = not os.path.exists(path) and path.endswith(("-wal", "-journal"))
        new = not os.path.exists(path)
        super().__init__("unix", name, flags)
        if new:
            plan.note(Change("link", self._relative))

    def excepthook(self, kind: Any, value: Any, trace: Any) -> bool:
        """What is raised where nobody can hear it was planned."""
        return True

    def xRead(self, amount: int, offset: int) -> bytes:
        strike(self._plan, "xRead", self._path)
        return super().xRead(amount, offset)

    def xWrite(self, data: Any, offset: int) -> None:
        strike(self._plan, "xWrite", self._path)
        super().xWrite(data, offset)
        self._plan.note(Change("write", self._relative, offset, bytes(data)))

    def xTruncate(self, size: int) -> None:
        strike(self._plan, "xTruncate", self._path)
        super().xTruncate(size)
        self._plan.note(Change("trunc", self._relative, size))

    def xSync(self, flags: int) -> None:
        strike(self._plan, "xSync", self._path)
        self._plan.note(Change("sync", self._relative))
        if self._unnamed:  # the unix VFS syncs the folder of a journal that is new
            self._unnamed = False
            self._plan.note(Change("syncdir", os.path.dirname(self._relative) or "."))

    def xLock(self, level: int) -> None:
        strike(self._plan, "xLock", self._path)
        super().xLock(level)


# --- what a power cut leaves


class _Disk:
    """The changes up to a cut: what is durable, and what is only pending."""

    def __init__(self, changes: list[Change]) -> None:
        self.inodes: dict[str, int] = {}  # as the running system sees them
        self.folders: set[int] = set()
        self.content: dict[int, bytearray] = {}
        self.names: dict[str, int | None] = {}  # durable
        self.pending_names: list[tuple[str, int | None]] = []
        self.pending: list[tuple[int, Change]] = []
        for change in changes:
            self._take(change)

    def _take(self, change: Change) -> None:
        path = change.path
        if change.kind == "link":
            inode = len(self.content) + 1
            self.inodes[path], self.content[inode] = inode, bytearray()
            self.pending_names.append((path, inode))
            if change.folder:
                self.folders.add(inode)
        elif change.kind == "unlink":
            self.inodes.pop(path, None)
            self.pending_names.append((path, None))
        elif change.kind == "sync":
            inode = self.inodes[path]
            for owner, pending in self.pending:
                if owner == inode:
                    apply(self.content[inode], pending)
            self.pending = [p for p in self.pending if p[0] != inode]
        elif change.kind == "syncdir":
            here = [
                n for n in self.pending_names if (os.path.dirname(n[0]) or ".") == path
            ]
            self.names.update(here)
            self.pending_names = [n for n in self.pending_names if n not in here]
        else:
            self.pending.append((self.inodes[path], change))


def apply(content: bytearray, change: Change) -> None:
    """Do one write or truncation to a file's content."""
    if change.kind == "trunc":
        content[:] = content[: change.offset].ljust(change.offset, b"\0")
        return
    if len(content) < change.offset:
        content.extend(bytes(change.offset - len(content)))
    content[change.offset : change.offset + len(change.data)] = change.data


def adopted(top: str) -> list[Change]:
    """Return the changes that lead to a folder as it is, all durable."""
    found: list[Change] = []
    for path in sorted(Path(top).rglob("*")):
        name = str(path.relative_to(top))
        found.append(Change("link", name, folder=path.is_dir()))
        if path.is_file():
            found.append(Change("write", name, 0, path.read_bytes()))
            found.append(Change("sync", name))
        found.append(Change("syncdir", os.path.dirname(name) or "."))
    return found


class Cut(NamedTuple):
    """One thing that a power cut may leave. `kills` is true where all was kept."""

    what: str
    writes: list[tuple[int, Change]]
    names: list[tuple[str, int | None]]
    disk: _Disk

    @property
    def kills(self) -> bool:
        return self.what == "all"

    def write_to(self, top: str) -> None:
        """Make the folder as the cut leaves it."""
        content = {inode: bytearray(data) for inode, data in self.disk.content.items()}
        for owner, change in self.writes:
            apply(content[owner], change)
        names: dict[str, int | None] = {**self.disk.names, **dict(self.names)}
        os.makedirs(top, exist_ok=True)
        for path in sorted(names):  # a folder comes before what lies in it
            inode = names[path]
            place = Path(top, path)
            if inode is None or not place.parent.is_dir():
                continue
            if inode in self.disk.folders:
                place.mkdir(exist_ok=True)
            else:
                place.write_bytes(content[inode])


def cuts(
    changes: list[Change], rng: random.Random, *, halves: int = 2
) -> Iterator[Cut]:
    """Return what a power cut after `changes` may leave, each in turn."""
    disk = _Disk(changes)
    writes, names = disk.pending, disk.pending_names
    yield Cut("nothing", [], [], disk)
    yield Cut("all", writes, names, disk)
    for _ in range(halves if writes or names else 0):
        some = [w for w in writes if rng.random() < 0.5]
        yield Cut("a half", some, [n for n in names if rng.random() < 0.5], disk)
    for index, write in enumerate(writes):
        yield Cut(f"write {index} alone", [write], names, disk)
    yield from _torn(disk)
    for index, name in enumerate(names):
        others = names[:index] + names[index + 1 :]
        yield Cut(f"name {name[0]} lost", writes, others, disk)


def _torn(disk: _Disk) -> Iterator[Cut]:
    """The last write stops at each of its sectors; and each of them alone arrives."""
    if not disk.pending or disk.pending[-1][1].kind != "write":
        return
    inode, last = disk.pending[-1]
    before = disk.pending[:-1]
    for at in range(0, len(last.data), SECTOR):
        head = last._replace(data=last.data[:at])
        alone = last._replace(offset=last.offset + at, data=last.data[at : at + SECTOR])
        if at:
            yield Cut(
                f"torn at {at}", [*before, (inode, head)], disk.pending_names, disk
            )
        yield Cut(
            f"sector {at} alone", [*before, (inode, alone)], disk.pending_names, disk
        )
