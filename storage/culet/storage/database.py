"""One database for the kernel's own statements: the port `Db` over an apsw connection."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import apsw

from culet.kernel.errors import StorageError
from culet.kernel.ports import Rows, SqlValue

from .errors import CAUGHT, storage_error


class Database:
    """A connection that is opened on first use. Subclasses say how in `connect`."""

    def __init__(self) -> None:
        self.connection: apsw.Connection | None = None
        self.depth = 0  # open `transaction()` blocks

    def connect(self) -> apsw.Connection:
        """Open the connection, keep it in `self.connection`, and return it."""
        raise NotImplementedError

    def execute(self, sql: str, params: Sequence[SqlValue] = ()) -> Rows:
        """Run one statement and return all its rows."""
        try:
            connection = self.connection
            if connection is None:
                connection = self.connect()
            return connection.execute(sql, params).fetchall()
        except CAUGHT as error:
            raise storage_error(error) from error

    def told(self, error: BaseException) -> StorageError:
        """Return the error of the kernel that says what `error` says."""
        return storage_error(error)

    def executemany(self, sql: str, rows: Sequence[Sequence[SqlValue]]) -> None:
        """Run one statement once for each row, in one transaction."""
        with self.transaction():
            connection = self.connection
            assert connection is not None  # the transaction is open in it
            try:
                connection.executemany(sql, rows)
            except CAUGHT as error:
                raise self.told(error) from error

    @property
    def changes(self) -> int:
        """Rows that the last INSERT, UPDATE or DELETE changed."""
        return 0 if self.connection is None else self.connection.changes()

    def transaction(self) -> Transaction:
        """One immediate transaction; an inner one joins the outer by a savepoint."""
        return Transaction(self)

    def detach(self) -> apsw.Connection | None:
        """Give up the connection, if there is one, without closing it."""
        connection, self.connection, self.depth = self.connection, None, 0
        return connection

    def disconnect(self) -> None:
        """Close the connection; an open transaction is rolled back."""
        connection = self.detach()
        if connection is not None:
            connection.close(True)  # forced: it raises nothing


class Transaction:
    """What `transaction()` returns. Left by an exception, its changes are undone."""

    __slots__ = ("_commit", "_database", "_undo")

    def __init__(self, database: Database) -> None:
        self._database = database
        self._commit = "COMMIT"
        self._undo: tuple[str, ...] = ("ROLLBACK",)

    def __enter__(self) -> None:
        database = self._database
        try:
            connection = database.connection or database.connect()
            if connection.in_transaction:
                name = f"culet_{database.depth}"
                self._commit = f"RELEASE {name}"
                self._undo = (f"ROLLBACK TO {name}", self._commit)
                connection.execute(f"SAVEPOINT {name}")
            else:
                connection.execute("BEGIN IMMEDIATE")
        except CAUGHT as error:
            raise storage_error(error) from error
        database.depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        database = self._database
        connection = database.connection
        if connection is None:
            return  # closed inside: rolled back already
        database.depth -= 1
        try:
            if kind is None:
                connection.execute(self._commit)
                return
        except CAUGHT as error:
            self._roll_back(connection)
            raise database.told(error) from error
        self._roll_back(connection)

    def _roll_back(self, connection: apsw.Connection) -> None:
        # SQLite may have rolled back by itself (disk full, I/O error).
        if connection.in_transaction:
            for statement in self._undo:
                connection.execute(statement)
