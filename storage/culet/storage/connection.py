"""How a database is opened: each setting in a function of its own, with its reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import apsw

from culet.kernel.core.limits import Limits
from culet.kernel.errors import SchemaTooNew

_OPEN: Final = apsw.SQLITE_OPEN_READWRITE


def open_file(
    path: str,
    *,
    vfs: str,
    statements: int,
    committed: Callable[[int], None] | None,
    limits: Limits,
) -> apsw.Connection:
    """Open a file of a tree. `committed(frames)` is called after each commit."""
    connection = apsw.Connection(
        path, flags=_OPEN, vfs=vfs, statementcachesize=statements
    )
    try:
        _exclusive(connection)
        _no_syncs(connection)
        _small_cache(connection)
        _no_checkpoints(connection)
        _strict_words(connection)
        set_limits(connection, limits)
        if committed is not None:
            _tell_commits(connection, committed)
    except BaseException:
        connection.close(True)
        raise
    return connection


def open_image(
    image: bytes,
    *,
    statements: int,
    committed: Callable[[], None] | None,
    limits: Limits,
) -> apsw.Connection:
    """Open a database that lies in memory. `committed` is called with each commit."""
    connection = apsw.Connection(":memory:", statementcachesize=statements)
    connection.deserialize("main", image)
    _strict_words(connection)
    set_limits(connection, limits)
    if committed is not None:
        told = committed  # for the closure: it is not None

        def hook() -> bool:
            told()
            return False

        connection.set_commit_hook(hook)
    return connection


def _exclusive(connection: apsw.Connection) -> None:
    """One process has the folder; without shared memory a WAL needs one file less."""
    connection.pragma("locking_mode", "EXCLUSIVE")


def _no_syncs(connection: apsw.Connection) -> None:
    """The tree's log makes commits durable; SQLite's syncs would block the loop."""
    connection.pragma("synchronous", "OFF")


def _small_cache(connection: apsw.Connection) -> None:
    """Thousands of files may be open; the page cache of the system serves them all."""
    connection.pragma("cache_size", -64)


def _no_checkpoints(connection: apsw.Connection) -> None:
    """A page reaches the .db only after it is in the log. Before the hook is set:
    this call would remove it.
    """
    connection.wal_autocheckpoint(0)
    connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)


def _strict_words(connection: apsw.Connection) -> None:
    """A misspelt column must not be taken for a text, nor a schema be written to."""
    connection.config(apsw.SQLITE_DBCONFIG_DQS_DML, 0)
    connection.config(apsw.SQLITE_DBCONFIG_DQS_DDL, 0)
    connection.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, 1)
    connection.config(apsw.SQLITE_DBCONFIG_ENABLE_FKEY, 1)
    connection.config(apsw.SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0)


def set_limits(connection: apsw.Connection, limits: Limits) -> None:
    """Bound what one value, one text and one nest of triggers may take."""
    connection.limit(apsw.SQLITE_LIMIT_LENGTH, limits.value_bytes)
    # a user's statement is checked before, and gets a mark of ours in front
    connection.limit(apsw.SQLITE_LIMIT_SQL_LENGTH, limits.sql_bytes + 100)
    connection.limit(apsw.SQLITE_LIMIT_TRIGGER_DEPTH, 100)


def _tell_commits(
    connection: apsw.Connection, committed: Callable[[int], None]
) -> None:
    def hook(_connection: apsw.Connection, _name: str, frames: int) -> int:
        committed(frames)
        return apsw.SQLITE_OK

    connection.set_wal_hook(hook)


def migrate(connection: apsw.Connection, steps: tuple[str, ...], what: str) -> None:
    """Bring a database to today's schema, each step in a transaction of its own."""
    version = connection.pragma("user_version")
    check_version(version, steps, what)
    for number in range(version, len(steps)):
        with connection:
            connection.execute(steps[number])
            connection.pragma("user_version", number + 1)


def check_version(version: int, steps: tuple[str, ...], what: str) -> None:
    """Raise `SchemaTooNew` for a database that a newer version of this package wrote."""
    if version > len(steps):
        msg = (
            f"{what} has schema {version}, this version knows {len(steps)}: "
            "open it with the version that wrote it"
        )
        raise SchemaTooNew(msg)
