"""What a user's statement may do, judged by SQLite's authorizer at every depth.

The authorizer is asked while a statement is compiled: for the statement itself, for
triggers that it fires, for what a virtual table runs on its behalf. It stays installed
(installing it again would throw away every compiled statement) and passes everything
while the kernel's own statements run.

The schema text of what a user makes must not mention `culet_` at all. That is coarser
than judging each use, and it closes what the authorizer is not told: the new name in
ALTER TABLE, the target of a foreign key, the body of a trigger that fires later.
"""

from __future__ import annotations

from typing import Final

import apsw

from culet.kernel.core.limits import Limits

_OURS: Final = "culet_"
_INTERNAL: Final = "sqlite_"
_MODULES: Final = frozenset({"fts5", "fts5vocab", "rtree", "geopoly"})
_FUNCTIONS: Final = frozenset({"load_extension", "fts3_tokenizer"})
# fts5 reads data_version, ALTER TABLE ADD COLUMN runs quick_check; the others only
# describe what the user has made.
_PRAGMAS: Final = frozenset(
    {
        "data_version",
        "quick_check",
        "table_info",
        "table_xinfo",
        "table_list",
        "index_list",
    }
    | {"index_info", "index_xinfo", "foreign_key_list"}
)
# What CREATE, DROP and ALTER do to the schema tables by themselves. A direct write is
# refused by SQLite (no writable_schema, defensive mode).
_SCHEMA_TABLES: Final = frozenset({"sqlite_master", "sqlite_schema"})
_SCHEMA_TABLES_TEMP: Final = frozenset({"sqlite_temp_master", "sqlite_temp_schema"})

_READS: Final = frozenset({apsw.SQLITE_READ, apsw.SQLITE_SELECT, apsw.SQLITE_RECURSIVE})
_WRITES: Final = frozenset({apsw.SQLITE_INSERT, apsw.SQLITE_UPDATE, apsw.SQLITE_DELETE})
_SCHEMA: Final = frozenset(
    {
        apsw.SQLITE_CREATE_TABLE,
        apsw.SQLITE_CREATE_INDEX,
        apsw.SQLITE_CREATE_TRIGGER,
        apsw.SQLITE_CREATE_VIEW,
        apsw.SQLITE_CREATE_VTABLE,
        apsw.SQLITE_DROP_TABLE,
        apsw.SQLITE_DROP_INDEX,
        apsw.SQLITE_DROP_TRIGGER,
        apsw.SQLITE_DROP_VIEW,
        apsw.SQLITE_DROP_VTABLE,
        apsw.SQLITE_ALTER_TABLE,
        apsw.SQLITE_REINDEX,
    }
)
_BUDGET_STEP: Final = 100_000  # VM steps between two looks at the budget


class Fence:
    """The fence of one connection: open for the kernel, shut while a user's SQL runs."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._shut = False
        self._mentions_ours = False
        self._mentions_sequence = False
        self._steps_left = 0
        self.why = ""  # the last refusal, in words

    def install(self, connection: apsw.Connection) -> None:
        """Put the fence round a connection, for good."""
        connection.set_authorizer(self._authorize)
        step = min(_BUDGET_STEP, self._limits.sql_steps)
        self._step = step
        connection.set_progress_handler(self._progress, step)

    def shut(self, sql: str) -> None:
        """From here on statements are the user's."""
        text = sql.lower()
        self._mentions_ours = _OURS in text
        self._mentions_sequence = "sqlite_sequence" in text
        self._steps_left = self._limits.sql_steps
        self.why = ""
        self._shut = True

    def open(self) -> None:
        """From here on statements are the kernel's."""
        self._shut = False

    def _progress(self) -> bool:
        if not self._shut:
            return False
        self._steps_left -= self._step
        return self._steps_left < 0

    def _authorize(
        self,
        action: int,
        first: str | None,
        second: str | None,
        database: str | None,
        _trigger: str | None,
    ) -> int:
        if not self._shut or action in _READS:
            return apsw.SQLITE_OK
        why = self._refusal(action, first or "", second or "", database)
        if why is None:
            return apsw.SQLITE_OK
        self.why = why
        return apsw.SQLITE_DENY

    def _refusal(
        self, action: int, first: str, second: str, database: str | None
    ) -> str | None:
        """Return why a user may not do that, or None."""
        if action in _WRITES:
            return self._refuse_write(action, first.lower(), database)
        if action in _SCHEMA:
            return self._refuse_schema(action, first.lower(), second.lower(), database)
        if action == apsw.SQLITE_FUNCTION:
            return (
                f"{second}() is not allowed" if second.lower() in _FUNCTIONS else None
            )
        if action == apsw.SQLITE_PRAGMA:
            reads = first.lower() in _PRAGMAS
            return None if reads else "PRAGMA is not allowed"
        if action in (apsw.SQLITE_TRANSACTION, apsw.SQLITE_SAVEPOINT):
            return "use transaction() instead of transaction and savepoint verbs"
        if action in (apsw.SQLITE_ATTACH, apsw.SQLITE_DETACH):
            return "ATTACH, DETACH and VACUUM are not allowed"
        return f"{apsw.mapping_authorizer_function.get(action, action)} is not allowed"

    def _refuse_write(
        self, action: int, table: str, database: str | None
    ) -> str | None:
        if table in _SCHEMA_TABLES:
            return None
        if table in _SCHEMA_TABLES_TEMP:
            # ALTER TABLE looks there for triggers to rename; it holds none.
            return None if action == apsw.SQLITE_UPDATE else "TEMP is not allowed"
        if table == "sqlite_sequence":
            # DROP and ALTER of a table with AUTOINCREMENT come here as well.
            return "sqlite_sequence is read-only" if self._mentions_sequence else None
        if table.startswith((_OURS, _INTERNAL)):
            return f"{table} is read-only"
        return "TEMP is not allowed" if database == "temp" else None

    def _refuse_schema(
        self, action: int, first: str, second: str, database: str | None
    ) -> str | None:
        if self._mentions_ours or first.startswith(_OURS) or second.startswith(_OURS):
            return "the schema that you make may not mention culet_"
        if self._mentions_sequence:
            return "the schema that you make may not mention sqlite_sequence"
        if database == "temp":
            return "TEMP is not allowed"
        if action == apsw.SQLITE_CREATE_VTABLE and second not in _MODULES:
            return f"virtual tables of {second} are not allowed"
        return None
