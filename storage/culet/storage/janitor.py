"""What is tidied after a record: checkpoints in the loop, the rest on a thread.

A file wants a checkpoint when its WAL is long, or when it is what keeps the oldest
segment. It may have one only while nothing of it is waiting for a record; a hot file
never is, so it is *held*: `room` is False and the kernel's writers wait for the next
record. A user's synchronous SQL is not held.

Copying pages costs about 3 microseconds each, so a WAL beyond `limits.huge_frames` is never
checkpointed in the loop: the loop closes its connection, and the janitor does it with
one of its own. A statement that comes meanwhile waits for it (`wait_for`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from time import perf_counter_ns

import apsw

from culet.kernel.core.limits import Limits
from culet.kernel.errors import StorageError
from culet.kernel.ports import Chore, Stopwatch

from .errors import CAUGHT, storage_error
from .treelog import Tracked, TreeLog


class Connections:
    """How the janitor reaches the connections of a tree, which are the loop's."""

    def open(self, file: Tracked) -> apsw.Connection:
        """Return the loop's connection to that file."""
        raise NotImplementedError

    def close_file(self, file: Tracked) -> bool:
        """Close the loop's connection, unless a transaction is open in it."""
        raise NotImplementedError

    def is_open(self, file: Tracked) -> bool:
        """Whether the loop has a connection to that file."""
        raise NotImplementedError

    def own(self, file: Tracked) -> apsw.Connection:
        """Open a connection for one checkpoint, on the calling thread."""
        raise NotImplementedError


class _Away:
    """A huge WAL that is copied outside the loop, by whoever comes first."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work
        self._lock = threading.Lock()
        self.error: BaseException | None = None

    def run(self) -> None:
        """Do the work, or wait until the other thread has done it."""
        with self._lock:
            work, self._work = self._work, None
            if work is not None:
                try:
                    work()
                except BaseException as error:
                    self.error = error
        if self.error is not None:
            raise self.error


class Janitor:
    """The tidying of one tree. Methods run in the loop; a chore's work elsewhere."""

    def __init__(self, log: TreeLog, connections: Connections, limits: Limits) -> None:
        self._log = log
        self._long_frames = limits.checkpoint_frames
        self._huge_frames = limits.huge_frames
        self._budget_ns = int(limits.checkpoint_s * 1e9)
        self._connections = connections
        self._long: dict[Tracked, None] = {}
        self._held: dict[Tracked, None] = {}
        self._syncing: set[Tracked] = set()
        self._away: dict[Tracked, _Away] = {}
        self._preparing = False
        self._log_syncing = False
        self._unlinking: set[str] = set()
        self._chores: list[Chore] = []
        self._lock = threading.Lock()  # held while a chore works
        self._closed = False

    def committed(self, file: Tracked) -> None:
        """Look at a file that has just grown."""
        if file.end >= self._long_frames:
            self._long[file] = None

    def forget(self, file: Tracked) -> None:
        """Drop what is planned for a file that was deleted."""
        self._long.pop(file, None)
        self._held.pop(file, None)

    def has_room(self, file: Tracked) -> bool:
        """False while writers of the file should wait for the next record."""
        return file not in self._held

    @property
    def crowded(self) -> bool:
        """Whether a held file has grown so long that it cannot wait to come to rest."""
        return any(file.end > self._huge_frames for file in self._held)

    def take(self) -> list[Chore]:
        """Return the chores of now, and forget them."""
        chores, self._chores = self._chores, []
        return chores

    # --- after a record

    def tidy(self, stopwatch: Stopwatch = perf_counter_ns) -> None:
        """Checkpoint what may be, for `limits.checkpoint_s`; plan the rest."""
        log = self._log
        end = stopwatch() + self._budget_ns
        if len(log.segments) > 1:
            log.retire()
        for file in self._wanted():
            if stopwatch() > end:
                break
            self._consider(file)
        if not log.power and not self._log_syncing and self._waits_for_log():
            self._plan_log_sync()
        names = log.take_superfluous()
        if names:
            self._plan_unlinks(names)
        if log.wants_segment and not self._preparing:
            self._plan_segment()

    def _wanted(self) -> Iterator[Tracked]:
        yield from list(self._held)
        yield from [f for f in self._long if f not in self._held]
        segments = self._log.segments
        if len(segments) > 1:
            oldest = min(segments)
            for file, lsn in list(segments[oldest].items()):
                if not file.dead and file.safe < lsn and file not in self._held:
                    yield file

    def _consider(self, file: Tracked) -> None:
        if file in self._syncing or file in self._away:
            return
        if not self._log.may_checkpoint(file):
            self._held[file] = None  # what is dead or checkpointed is not wanted
            return
        try:
            self._log.mark()
            if file.end > self._huge_frames:
                self._send_away(file)
            else:
                self._checkpoint(file)
        except CAUGHT as error:
            self._log.fail(error)

    def _checkpoint(self, file: Tracked) -> None:
        if file.end:  # none: a new file only needs its sync, or it pins its segment
            connection = self._connections.open(file)
            if connection.in_transaction:
                self._held[file] = None
                return
            _copy_all(connection)
        safe = self._log.note_checkpoint(file)
        self._release(file)
        self._plan_file_sync(file, safe)

    def _release(self, file: Tracked) -> None:
        self._held.pop(file, None)
        self._long.pop(file, None)

    # --- chores

    def _plan(
        self, work: Callable[[], None], then: Callable[[], None] | None = None
    ) -> None:
        def guarded() -> None:
            # A chore of a former life must not touch the files of the next one.
            with self._lock:
                if not self._closed:
                    work()

        def done(error: BaseException | None) -> None:
            if self._closed:
                return
            if error is not None:
                # Never "sync again and go on": what the failed one lost is unknown.
                self._log.fail(error)
            elif then is not None:
                then()

        self._chores.append(Chore(guarded, done))

    def _plan_file_sync(self, file: Tracked, safe: int) -> None:
        log = self._log
        self._syncing.add(file)

        def then() -> None:
            self._syncing.discard(file)
            file.safe = safe
            if not self._connections.is_open(file):
                log.folder.release(file.name)

        self._plan(lambda: log.sync_file(file), then)

    def _plan_segment(self) -> None:
        self._preparing = True

        def then() -> None:
            self._preparing = False

        self._plan(self._log.prepare, then)

    def _plan_unlinks(self, names: list[str]) -> None:
        folder = self._log.folder

        self._unlinking.update(names)

        def work() -> None:
            for name in names:
                folder.unlink(name)
                self._unlinking.discard(name)

        self._plan(work)

    def _waits_for_log(self) -> bool:
        log = self._log
        if log.acked <= log.synced:
            return False
        return bool(log.superfluous or self._held or len(log.segments) > 1)

    def _plan_log_sync(self) -> None:
        log = self._log
        self._log_syncing = True
        name, upto = log.log_to_sync()

        def then() -> None:
            self._log_syncing = False
            log.synced = max(log.synced, upto)
            self.tidy()

        self._plan(lambda: log.sync_log(name), then)

    # --- a huge WAL

    def _send_away(self, file: Tracked) -> None:
        if not self._connections.close_file(file):
            self._held[file] = None
            return
        safe = self._log.note_checkpoint(file)
        self._held[file] = None

        def work() -> None:
            connection = self._connections.own(file)
            try:
                _copy_all(connection, empty=True)
            finally:
                connection.close(True)
            self._log.sync_file(file)

        away = self._away[file] = _Away(work)

        def then() -> None:
            self._back(file, away)
            file.safe = max(file.safe, safe)
            if not self._connections.is_open(file):
                self._log.folder.release(file.name)

        self._plan(away.run, then)

    def _back(self, file: Tracked, away: _Away) -> None:
        """That copy is made. The file may be away once more by now, for the next one."""
        if self._away.get(file) is away:
            del self._away[file]
            self._release(file)

    def wait_for(self, file: Tracked) -> None:
        """Block until nobody else is inside a file that is to be opened now."""
        away = self._away.get(file)
        if away is None:
            return
        try:
            away.run()
        except BaseException as error:
            self._log.fail(error)
            raise storage_error(error) from error
        self._back(file, away)

    def close(self) -> None:
        """Wait for the chore that runs; those that come later do nothing.

        But what was deleted for good does not stay until the tree is opened again.
        """
        with self._lock:
            self._closed = True
        log = self._log
        if log.failure is not None:
            return
        with suppress(OSError):  # the next open sweeps
            if not log.power and log.superfluous:
                segment, upto = log.log_to_sync()
                log.sync_log(segment)
                log.synced = max(log.synced, upto)
            for name in [*self._unlinking, *log.take_superfluous()]:
                log.folder.unlink(name)


def _copy_all(connection: apsw.Connection, *, empty: bool = False) -> None:
    """Copy the whole WAL into the database file; page-cache writes, no sync.

    With `empty` the WAL is cut to nothing. A connection that stays open restarts it
    by itself, but what was copied is forgotten when the connection closes.
    """
    mode = apsw.SQLITE_CHECKPOINT_TRUNCATE if empty else apsw.SQLITE_CHECKPOINT_PASSIVE
    found, copied = connection.wal_checkpoint(mode=mode)
    if found != copied:
        msg = f"a checkpoint copied {copied} of {found} frames"
        raise StorageError(msg)
