"""Which roots a folder has and when each is next due: one small file, always synced.

It may be lost: the trees know all of it (see `SqliteStore`). It has a connection of
its own, used from worker threads one at a time.
"""

from __future__ import annotations

import threading
from typing import Final

import apsw

from culet.kernel.errors import SchemaTooNew
from culet.kernel.ports import RootEntry, Rows, TreeKey

from .connection import migrate
from .errors import CAUGHT, storage_error

STEPS: Final[tuple[str, ...]] = (
    """
CREATE TABLE root (
  class TEXT NOT NULL,
  name TEXT NOT NULL,
  due_at INTEGER,
  PRIMARY KEY (class, name)
) STRICT, WITHOUT ROWID;
""",
)
_ALL: Final = "SELECT class, name, due_at FROM root ORDER BY class, name"
_NOTE: Final = (
    "INSERT INTO root (class, name, due_at) VALUES (?, ?, ?) "
    "ON CONFLICT (class, name) DO UPDATE SET due_at = excluded.due_at"
)
_DROP: Final = "DELETE FROM root WHERE class = ? AND name = ?"


class HostIndex:
    """The file `roots.db` of one store."""

    def __init__(self, path: str, *, vfs: str, busy_s: float) -> None:
        self._lock = threading.Lock()
        self._connection = apsw.Connection(path, vfs=vfs)
        try:
            # Somebody may look into it. All roots need it, so nobody is kept waiting
            # who would not wait for it himself.
            self._connection.set_busy_timeout(int(busy_s * 1000))
            self._connection.pragma("journal_mode", "WAL")
            self._connection.pragma("synchronous", "FULL")
            self.new = self._connection.pragma("user_version") == 0
            if not self.new:
                migrate(self._connection, STEPS, f"the index {path!r}")
            if self._connection.pragma("quick_check") != "ok":
                msg = "the index is damaged"
                raise apsw.CorruptError(msg)
        except BaseException:
            self._connection.close(True)
            raise

    def fill(self, entries: list[RootEntry]) -> None:
        """Make a new index, whole or not at all: half a one would be trusted."""
        with self._lock:
            try:
                with self._connection:
                    migrate(self._connection, STEPS, "the index")
                    for key, due_at in entries:
                        self._connection.execute(_NOTE, (*key, due_at))
            except CAUGHT as error:
                raise storage_error(error) from error
        self.new = False

    def all(self) -> list[RootEntry]:
        """Return every line."""
        with self._lock:
            try:
                rows: Rows = self._connection.execute(_ALL).fetchall()
            except CAUGHT as error:
                raise storage_error(error) from error
        return [RootEntry(TreeKey(c, n), due) for c, n, due in rows]

    def note(self, key: TreeKey, due_at: int | None) -> None:
        """Write one line, durable on return."""
        self._run(_NOTE, (*key, due_at))

    def drop(self, key: TreeKey) -> None:
        """Remove one line, durably."""
        self._run(_DROP, tuple(key))

    def _run(self, sql: str, params: tuple[str | int | None, ...]) -> None:
        with self._lock:
            try:
                self._connection.execute(sql, params)
            except CAUGHT as error:
                raise storage_error(error) from error

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            try:
                self._connection.close(True)
            except CAUGHT as error:
                raise storage_error(error) from error


def open_index(path: str, *, vfs: str, busy_s: float = 0.0) -> HostIndex:
    """Open the index; `StorageCorrupt` if it is not a database or a damaged one.

    `busy_s`: how long each call blocks while another process has it locked.
    """
    try:
        return HostIndex(path, vfs=vfs, busy_s=busy_s)
    except SchemaTooNew:
        raise
    except CAUGHT as error:
        raise storage_error(error) from error
