"""The live half of the tree log: one record at a time makes one instant durable.

`begin` only notes where the WAL of each dirty file ends: what lies before that end
cannot change until the file's next checkpoint, and a file is checkpointed only when
all of it is durable in the log. `fill` reads the pages, `write` writes and syncs,
`done` lets go of what the record has made superfluous.

Three counts of records matter. `lsn`: begun. `acked`: written at the tree's level.
`synced`: on the disk. At level `power` the last two are one; at level `process` a
record is acked without a sync, and what destroys older state (a checkpoint, an
unlink) still waits for `synced`, so that a power cut costs a tail, never the tree.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from time import perf_counter_ns
from typing import Final

from culet.kernel.errors import StorageError
from culet.kernel.ports import Level, Stopwatch

from .errors import CAUGHT, storage_error
from .files import Folder
from .log import Redo, segment_name
from .record import Entry, encode_mark, encode_record
from .template import PAGE, Templates

_WAL_HEADER: Final = 32
_FRAME_HEADER: Final = 24
_FRAME: Final = _FRAME_HEADER + PAGE
_SALT: Final = (8, 16)  # bytes, offset in the header of a WAL
_FRAME_START: Final = struct.Struct(">II")  # page number; size of the db if a commit
FIRST_SEGMENT: Final = 256 << 10  # small, so that opening a tree costs little


class Tracked:
    """One database file as the log sees it. Frames are counted from the WAL's start."""

    __slots__ = (
        "checkpointed",
        "dead",
        "end",
        "fresh",
        "logged",
        "lsn",
        "name",
        "new",
        "pages",
        "recheck",
        "safe",
        "salt",
        "template",
    )

    def __init__(self, name: str, *, template: str | None = None) -> None:
        new = template is not None
        self.name = name
        self.template = template  # digest, while it is new
        self.end = 0  # committed frames in the WAL, from the WAL hook
        self.logged = 0  # frames that a record has taken
        self.salt = b""  # of the WAL that `logged` counts in
        self.recheck = True  # the WAL may have restarted: compare the salt
        self.new = new  # no record says yet that it exists
        self.fresh = new  # its name is not durable in the folder yet
        self.dead = False
        self.lsn = 0  # last record that holds something of it
        self.checkpointed = False  # nothing was committed since
        self.safe = 0  # the .db itself is durable up to this record
        self.pages = 0  # size, as far as records know


class LogRecord:
    """One record on its way: see `culet.kernel.ports.Record`."""

    __slots__ = (
        "commits",
        "dead",
        "entries",
        "first",
        "low",
        "lsn",
        "offset",
        "segment",
        "synced",
        "todo",
    )

    def __init__(
        self, lsn: int, low: int, segment: int, commits: int, synced: int
    ) -> None:
        self.lsn = lsn
        self.synced = synced
        self.low = low
        self.segment = segment
        self.commits = commits
        self.first = False  # of its segment
        self.entries: list[Entry] = []
        self.dead: list[Tracked] = []
        self.todo: list[tuple[Tracked, int]] = []  # file, noted end


class TreeLog:
    """The log of one open tree, after recovery and until it is closed or fails."""

    def __init__(
        self,
        folder: Folder,
        templates: Templates,
        plan: Redo,
        *,
        level: Level,
        segment_bytes: int,
    ) -> None:
        self.folder = folder
        self.templates = templates
        self.power = level == "power"
        self.segment_bytes = segment_bytes
        self.epoch = plan.epoch + 1
        self.lsn = plan.lsn
        self.acked = self.synced = plan.lsn
        self.segment = plan.top
        self.ready = 0  # highest segment that is prepared
        self.low = 0
        self.commits = 0
        self.files: dict[str, Tracked] = {}
        self.dirty: dict[Tracked, None] = {}
        self.segments: dict[int, dict[Tracked, int]] = {}  # file -> last lsn in it
        self.retired: list[int] = []
        self.superfluous: list[tuple[int, str]] = []  # unlink when that lsn is synced
        self.failure: StorageError | None = None
        self._checksum = plan.checksum
        self._written = 0  # the segment of the last record; the writer's, like
        self._offset = 0  # where the next one begins in it
        self._marked = plan.lsn
        self._acked_segment = plan.top
        self._named = True  # the names of the segments are durable in the folder
        self._filled = 0  # the same, as the loop knows it
        self._first = False
        self._capacity = 0
        self.is_open: Callable[[Tracked], bool] = lambda _file: True  # by the loop
        for name in plan.live:
            self.files[name] = Tracked(name)

    # --- files

    def create(self, name: str, template: str) -> Tracked:
        """Make a file from a template; the next record says so."""
        try:
            self.folder.write(name, 0, self.templates.bytes_of(template))
        except OSError as error:
            # Nothing knows it yet, and recovery drops files that nothing knows.
            raise storage_error(error) from error
        file = self.files[name] = Tracked(name, template=template)
        file.pages = len(self.templates.bytes_of(template)) // PAGE
        self.touch(file)
        return file

    def delete(self, file: Tracked) -> None:
        """Forget a file; it stays in the folder until the record that says so is safe."""
        file.dead = True
        del self.files[file.name]
        self.touch(file)

    def touch(self, file: Tracked) -> None:
        """Count a commit of that file."""
        self.commits += 1
        self.dirty[file] = None

    def committed(self, file: Tracked, frames: int) -> None:
        """Note what the WAL hook says: this many committed frames are in the WAL."""
        file.end = frames
        file.checkpointed = False
        self.touch(file)

    # --- segments

    def start(self, old_segments: list[int]) -> None:
        """Write the first record of this life, then drop the segments before it.

        The segment, its name and the record become durable together.
        """
        self._capacity = min(FIRST_SEGMENT, self.segment_bytes)
        self._roll()
        self.low = self.ready = self.segment
        name = segment_name(self.segment)
        self.folder.write(name, 0, bytes(self._capacity))
        record = self.begin()
        self.fill(record)
        self.write(record, sync=False)
        self._named = self.power or bool(old_segments)  # else nothing is lost yet
        if self._named:
            self.folder.sync(name)
            self.folder.sync_folder()
        self.done(record)
        if self._named:
            self.synced = self.acked
        for number in old_segments:
            self.folder.unlink(segment_name(number))

    def prepare(self) -> None:
        """Make the next segment ahead of need (janitor): zeros that are on the disk.

        Each later sync is two to three times cheaper over existing blocks.
        """
        name = segment_name(self.segment + 1)
        self.folder.write(name, 0, bytes(self.segment_bytes))
        self.folder.sync(name)
        self.folder.sync_folder()
        self.ready = self.segment + 1

    @property
    def wants_segment(self) -> bool:
        """Whether the next segment should be prepared now."""
        return self._filled > self._capacity // 2 and self.ready <= self.segment

    def _roll(self) -> None:
        self.segment += 1
        self.segments[self.segment] = {}
        self._filled = 0
        self._first = True

    def retire(self) -> None:
        """Let go of the oldest segments whose files are all safe past them.

        They are unlinked once a durable record carries the new low-water mark.
        """
        for number in sorted(self.segments)[:-1]:
            for file, lsn in self.segments[number].items():
                if self._safe(file) < lsn:
                    return
            del self.segments[number]
            self.retired.append(number)
            self.low = number + 1

    def _safe(self, file: Tracked) -> int:
        if not file.dead:
            return file.safe
        return file.lsn if file.lsn <= self.synced else 0

    # --- a record

    def begin(self) -> LogRecord:
        """Note one instant of the tree. Raises if an earlier record or sync failed."""
        if self.failure is not None:
            raise type(self.failure)(*self.failure.args) from self.failure
        # The next segment is not prepared yet: go on in this one, never wait.
        if self._filled > self._capacity * 3 // 4 and self.ready > self.segment:
            self._roll()
            self._capacity = self.segment_bytes
        self.lsn += 1
        record = LogRecord(self.lsn, self.low, self.segment, self.commits, self.synced)
        if self._first:
            record.entries.append(("M", list(self.files)))
            record.first, self._first = True, False
        here = self.segments[self.segment]
        for file in self.dirty:
            file.lsn = self.lsn
            if file.dead:
                if not file.new:
                    record.entries.append(("D", file.name))
                record.dead.append(file)
                continue
            if file.new:
                record.entries.append(("C", file.name, file.template))
                file.new = False
            if file.end > file.logged or (file.recheck and file.end):
                record.todo.append((file, file.end))
            here[file] = self.lsn
        self.dirty.clear()
        return record

    def fill(
        self,
        record: LogRecord,
        until_ns: int | None = None,
        stopwatch: Stopwatch = perf_counter_ns,
    ) -> bool:
        """Read pages until the time is up; at least nothing, at most all: then True."""
        while record.todo and (until_ns is None or stopwatch() < until_ns):
            file, end = record.todo.pop()
            record.entries.append(self._pages(file, end))
        return not record.todo

    def _pages(self, file: Tracked, end: int) -> Entry:
        """Read the frames that no record has taken: the last image of each page."""
        wal = file.name + "-wal"
        if file.recheck:
            # Only the salt tells whether the WAL restarted since the checkpoint: one
            # big commit can pass the old end, so the count of frames cannot.
            salt = self.folder.pread(wal, *_SALT)
            file.recheck = False
            if salt != file.salt:
                file.salt, file.logged = salt, 0
        size = (end - file.logged) * _FRAME
        frames = memoryview(
            self.folder.pread(wal, size, _WAL_HEADER + file.logged * _FRAME)
        )
        if len(frames) != size:
            msg = f"the WAL of {file.name!r} is shorter than its commits"
            raise StorageError(msg)
        if not self.is_open(file):  # a record of a thousand files keeps none of them
            self.folder.release(wal)
        last: dict[int, memoryview] = {}
        pages = 0
        for at in range(0, size, _FRAME):
            page, pages_after_commit = _FRAME_START.unpack_from(frames, at)
            last[page] = frames[at + _FRAME_HEADER : at + _FRAME]
            pages = pages_after_commit or pages
        file.logged = end
        file.pages = pages or file.pages
        return ("P", file.name, pages, list(last), b"".join(last.values()))

    def write(self, record: LogRecord, *, sync: bool | None = None) -> None:
        """Encode, checksum, one write, one sync at level `power` (writer thread)."""
        if record.first:
            # Without this a cut at level `process` could keep the new segment and
            # lose the tail of the old one: the chain would have a hole.
            if not self.power and self._offset:
                self.folder.sync(segment_name(record.segment - 1))
            self._written, self._offset = record.segment, 0
        data, checksum = encode_record(
            record.entries,
            epoch=self.epoch,
            segment=record.segment,
            lsn=record.lsn,
            low=record.low,
            previous=self._checksum,
            synced=record.synced,
        )
        name = segment_name(record.segment)
        self.folder.write(name, self._offset, data)
        self._checksum = checksum
        self._offset += len(data)
        if self.power if sync is None else sync:
            self.folder.sync(name)

    def done(self, record: LogRecord) -> int:
        """Note that the record is durable at the tree's level."""
        self.acked = record.lsn
        self._acked_segment = record.segment
        self._filled = self._offset
        if self.power:
            self.synced = record.lsn
        for file in record.dead:
            self.superfluous.append((record.lsn, file.name))
            self.superfluous.append((record.lsn, file.name + "-wal"))
        while self.retired and self.retired[0] < record.low:
            self.superfluous.append((record.lsn, segment_name(self.retired.pop(0))))
        return record.commits

    def take_superfluous(self) -> list[str]:
        """Return the names that may be unlinked now, and forget them."""
        names = [name for lsn, name in self.superfluous if lsn <= self.synced]
        self.superfluous = [e for e in self.superfluous if e[0] > self.synced]
        return names

    # --- checkpoints

    def may_checkpoint(self, file: Tracked) -> bool:
        """Whether everything in this WAL is durable in the log, and it is worth it."""
        return not (
            file.dead
            or file in self.dirty
            or file.checkpointed
            or file.lsn > self.synced
        )

    def note_checkpoint(self, file: Tracked) -> int:
        """Note that the WAL was copied into the .db; return what a sync makes safe.

        The WAL restarts with the next commit, with another salt.
        """
        file.checkpointed = file.recheck = True
        return file.lsn

    def mark(self) -> None:
        """Note in the log what is on the disk, before anything relies on it.

        Not synced: a cut that loses the mark has not damaged the record before it.
        Nothing to be told from a torn record is overwritten: no record is on its way
        at level `power`, and at `process` the next one begins where the mark lies.
        """
        if self.synced <= self._marked or self.failure is not None:
            return
        data = encode_mark(epoch=self.epoch, segment=self._written, synced=self.synced)
        self.folder.write(segment_name(self._written), self._offset, data)
        self._marked = self.synced

    def sync_file(self, file: Tracked) -> None:
        """Make a checkpointed file durable (janitor), with its name if it is fresh."""
        try:
            self.folder.sync(file.name)
        except FileNotFoundError:
            if not file.dead:
                raise
            return
        if file.fresh:
            self.folder.sync_folder()
            file.fresh = False

    def log_to_sync(self) -> tuple[str, int]:
        """Return the segment whose sync makes all records up to that lsn durable."""
        return segment_name(self._acked_segment), self.acked

    def sync_log(self, segment: str) -> None:
        """Make the acked records durable (janitor, level `process`)."""
        self.folder.sync(segment)
        if not self._named:
            self.folder.sync_folder()
            self._named = True

    def fail(self, error: BaseException) -> None:
        """Refuse all further records: the tree must be restarted from the disk."""
        if self.failure is None:
            self.failure = (
                storage_error(error)
                if isinstance(error, CAUGHT)
                else StorageError(str(error))
            )
