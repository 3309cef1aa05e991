"""One agent's database: made when it is first written, with a fence round user SQL."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Final, Protocol

import apsw

from culet.kernel.core.limits import Limits
from culet.kernel.core.size import is_larger
from culet.kernel.errors import (
    Deleted,
    SqlError,
    StorageError,
    StorageFull,
    UsageError,
)
from culet.kernel.ports import Rows, SqlValue, UserRows

from . import schema
from .connection import open_image
from .database import Database, Transaction
from .errors import CAUGHT, storage_error, user_error
from .fence import Fence
from .quota import TreeQuota
from .template import build

# Compiled statements are kept by their text. With this in front a user's statement
# never meets one that was compiled for the kernel, outside the fence.
_MARK: Final = "/*user*/ "


class EmptyDatabase:
    """What an agent that has no file reads: one database in memory for all of them."""

    def __init__(self, limits: Limits) -> None:
        image = build(schema.AGENT, wal=False)
        self.connection = open_image(
            image, statements=128, committed=None, limits=limits
        )
        self.connection.pragma("query_only", 1)
        self.fence = Fence(limits)
        self.fence.install(self.connection)

    def close(self) -> None:
        """Close it."""
        self.connection.close(True)


class Home(Protocol):
    """The tree that an agent's database belongs to."""

    limits: Limits
    quota: TreeQuota
    empty: EmptyDatabase

    def make(self, agent: AgentDatabase) -> None:
        """Make the file; then `agent.exists`."""
        ...

    def open_agent(self, agent: AgentDatabase) -> apsw.Connection:
        """Open the file, closing others if too many are open."""
        ...

    def used(self, agent: AgentDatabase) -> None:
        """Note that this one was used last."""
        ...

    def resting(self, agent: AgentDatabase) -> None:
        """Note that this one, which is open, was read while its agent sleeps."""
        ...

    def size_of(self, agent: AgentDatabase) -> int:
        """Return the bytes of the file."""
        ...


class AgentDatabase(Database):
    """The port `AgentDb`."""

    def __init__(self, home: Home, slot: str, *, exists: bool) -> None:
        super().__init__()
        self.slot = slot
        self.exists = exists
        self.dead = False
        self.fence = Fence(home.limits)
        self._home = home
        self._in_user = False
        self._broken = False  # SQLite ended the user's transaction by itself

    # --- the kernel's statements

    def transaction(self) -> Transaction:
        """As it is: whoever opens one uses the file, before the first statement already."""
        if self.connection is not None:
            self._home.used(self)
        return super().transaction()

    def connect(self) -> apsw.Connection:
        """Open the file; make it first if there is none."""
        if self.dead:
            msg = "the agent was deleted"
            raise Deleted(msg)
        if not self.exists:
            self._home.make(self)
        self.connection = self._home.open_agent(self)
        return self.connection

    def execute(self, sql: str, params: Sequence[SqlValue] = ()) -> Rows:
        """Run one statement and return all its rows; a first write makes the file."""
        connection = self.connection
        if connection is None:
            if not self.exists and not self.dead:
                found = self._read_empty(sql, params)
                if found is not None:
                    return found
            connection = self._connected()
        else:
            self._home.used(self)
        try:
            return connection.execute(sql, params).fetchall()
        except CAUGHT as error:
            raise self.told(error) from error

    def told(self, error: BaseException) -> StorageError:
        """Return what `error` says; where it is about room, with the bound."""
        told = storage_error(error)
        if self.connection is None:
            return told
        return self._home.quota.explain(told, self.connection)

    def _connected(self) -> apsw.Connection:
        if self.connection is not None:
            self._home.used(self)
            return self.connection
        try:
            return self.connect()
        except CAUGHT as error:
            raise storage_error(error) from error

    def _read_empty(self, sql: str, params: Sequence[SqlValue]) -> Rows | None:
        """Return what an empty database answers, None if the statement would write."""
        try:
            return self._home.empty.connection.execute(sql, params).fetchall()
        except apsw.ReadOnlyError:
            return None
        except CAUGHT as error:
            raise storage_error(error) from error

    @property
    def busy(self) -> bool:
        """Whether closing it now would end a transaction."""
        return self.connection is not None and self.connection.in_transaction

    @property
    def size_bytes(self) -> int:
        """Bytes of the file, 0 before it is made."""
        return self._home.size_of(self) if self.exists else 0

    def rest(self) -> None:
        """Its agent sleeps and somebody has read its file: of such, only a few stay open."""
        if self.connection is not None and not self.busy:
            self._home.resting(self)

    # --- the user's

    @property
    def in_user_transaction(self) -> bool:
        """Whether `user_begin` is waiting for its `user_end`."""
        return self._in_user

    def user_begin(self) -> None:
        """Open the user's transaction; kernel statements then join it."""
        connection = self._connected()
        if self._in_user or connection.in_transaction:
            msg = "a transaction is open already; nest nothing, or end it first"
            raise UsageError(msg)
        try:
            connection.execute("BEGIN IMMEDIATE")
        except CAUGHT as error:
            raise storage_error(error) from error
        self._in_user, self._broken = True, False

    def user_end(self, *, commit: bool) -> None:
        """Commit or roll back the user's transaction, if one is open."""
        if not self._in_user:
            return
        self._in_user = self._broken = False
        connection = self.connection
        if connection is None or not connection.in_transaction:
            if commit:
                msg = "the transaction was rolled back by an earlier error"
                raise SqlError(msg, "COMMIT")
            return
        try:
            connection.execute("COMMIT" if commit else "ROLLBACK")
        except CAUGHT as error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise self.told(user_error(error, "COMMIT")) from error

    def user(self, sql: str, params: Sequence[SqlValue], max_rows: int) -> UserRows:
        """Run one fenced statement; more than `max_rows` rows raises `SqlError`."""
        if is_larger(sql, self._home.limits.sql_bytes):
            msg = "the statement is too long (limits.sql_bytes)"
            raise SqlError(msg, sql[:200] + "…")
        if self._broken:
            msg = "the transaction was rolled back by an earlier error"
            raise SqlError(msg, sql)
        if self.connection is None and not self.exists and not self.dead:
            empty = self._home.empty
            try:
                return _run_fenced(empty.connection, empty.fence, sql, params, max_rows)
            except StorageError as error:
                if not isinstance(error.__cause__, apsw.ReadOnlyError):
                    raise
        connection = self._connected()
        try:
            return _run_fenced(connection, self.fence, sql, params, max_rows)
        except StorageFull as error:
            raise self.told(error) from error
        finally:
            if self._in_user and not connection.in_transaction:
                self._broken = True

    def detach(self) -> apsw.Connection | None:
        """Give up the connection, if there is one, without closing it."""
        self._in_user = self._broken = False
        return super().detach()


def _run_fenced(
    connection: apsw.Connection,
    fence: Fence,
    sql: str,
    params: Sequence[SqlValue],
    max_rows: int,
) -> UserRows:
    # All rows of RETURNING are written before the first is seen: too many of them
    # must undo the statement.
    undo = "returning" in sql.lower()
    if undo:
        connection.execute("SAVEPOINT culet_user")
    fence.shut(sql)
    try:
        found = _run(connection, sql, params, max_rows)
    except CAUGHT as error:
        fence.open()
        if undo:
            _undo(connection)
        if fence.why:
            raise SqlError(fence.why, sql) from error
        raise user_error(error, sql) from error
    except SqlError:
        fence.open()
        if undo:
            _undo(connection)
        raise
    fence.open()
    if undo:
        try:
            connection.execute("RELEASE culet_user")
        except CAUGHT as error:
            _undo(connection)
            raise user_error(error, sql) from error
    return found


def _undo(connection: apsw.Connection) -> None:
    if connection.in_transaction:
        connection.execute("ROLLBACK TO culet_user")
        connection.execute("RELEASE culet_user")


def _run(
    connection: apsw.Connection, sql: str, params: Sequence[SqlValue], max_rows: int
) -> UserRows:
    text = _MARK + sql
    cursor = connection.cursor()
    if ";" in sql:
        cursor.exec_trace = _one_statement(text)
    cursor.execute(text, params)
    try:
        columns = tuple(column[0] for column in cursor.description)
    except apsw.ExecutionCompleteError:  # no row, and none to come
        return UserRows((), [])
    rows = list(islice(cursor, max_rows + 1))
    if len(rows) > max_rows:
        cursor.close(True)
        msg = f"more than {max_rows} rows; use LIMIT and ask for the rest"
        raise SqlError(msg, sql)
    return UserRows(columns, rows)


def _one_statement(text: str) -> apsw.ExecTracer:
    """Return a tracer that stops before anything runs if `text` holds two statements."""

    def trace(_cursor: apsw.Cursor, first: str, _bindings: object) -> bool:
        rest = text[len(first) :]
        if rest.strip("; \t\r\n"):
            msg = "one statement at a time"
            raise ValueError(msg)
        return True

    return trace
