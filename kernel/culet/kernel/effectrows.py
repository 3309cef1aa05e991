"""The ledger of effects: one row each, from the durable intent to the outcome.

Every method is one commit in `tree.db`, in the step of whoever calls it: so an outcome
stands together with what the same step has written, or neither does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, final

import msgspec

from .calls import stored_json
from .core.effects import Policy, Standing, Status, derive_token
from .endings import BELOW
from .errors import CapacityError, UsageError

if TYPE_CHECKING:
    from .tree import Tree

Kind = Literal["call", "tool"]
_COLUMNS: Final = (
    "born, owner, kind, name, key, asker, tool_call_id, digest, preview, policy, attempt,"
    " status, result, error, began_at, settled_at"
)
_BY_ID: Final = f"SELECT {_COLUMNS} FROM effect WHERE owner = ? AND born = ?"
_BY_KEY: Final = (
    f"SELECT {_COLUMNS} FROM effect"
    " WHERE owner = ? AND kind = ? AND name = ? AND key = ?"
)
_WANTED: Final = (
    " AND born > ?2 AND (?3 IS NULL OR status IN (SELECT value FROM json_each(?3)))"
    " AND (?4 IS NULL OR name = ?4)"
    " AND born NOT IN (SELECT value FROM json_each(?5)) ORDER BY born LIMIT ?6"
)
_OWN: Final = f"SELECT {_COLUMNS} FROM effect WHERE owner = ?1{_WANTED}"
_BELOW: Final = (
    f"{BELOW}SELECT {_COLUMNS} FROM effect"
    f" WHERE owner IN (SELECT slot FROM sub){_WANTED}"
)
_BEGIN: Final = (
    "INSERT INTO effect (owner, kind, name, key, asker, tool_call_id, digest, preview,"
    " policy, attempt, status, began_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 1, 'begun', ?)"
    " RETURNING born"
)
_AGAIN: Final = (
    "UPDATE effect SET status = 'begun', attempt = attempt + 1, asker = ?, policy = ?,"
    " began_at = ?, settled_at = NULL WHERE born = ? AND attempt = ?"
)
_MOVE: Final = (
    "UPDATE effect SET status = ?, result = ?, error = ?, settled_at = ?"
    " WHERE born = ? AND status NOT IN ('completed', 'error')"
)
_OPEN: Final = "SELECT count(*) FROM effect WHERE owner = ? AND settled_at IS NULL"
_CALLS: Final = "SELECT count(*) FROM effect WHERE owner = ? AND kind = 'call'"
_OLD: Final = (
    "DELETE FROM effect WHERE born IN (SELECT born FROM effect WHERE owner = ?"
    " AND kind = 'call' AND settled_at < ? ORDER BY settled_at LIMIT ?)"
)
_OLD_TOOLS: Final = (
    "DELETE FROM effect WHERE born IN (SELECT born FROM effect WHERE owner = ?"
    " AND kind = 'tool' AND settled_at IS NOT NULL"
    " ORDER BY settled_at DESC, born DESC LIMIT ? OFFSET ?)"
)
_FORGET: Final = (
    "DELETE FROM effect WHERE born IN (SELECT born FROM effect WHERE owner = ?1"
    " AND settled_at < ?2 AND (?3 IS NULL OR name = ?3) ORDER BY settled_at LIMIT ?4)"
)
_EVERY: Final = 16  # begun by one agent between two looks for old rows
_OWNERS: Final = 10_000  # of which that is counted; then all are looked at anew
_AT_ONCE: Final = 64  # old rows dropped by one look


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """One effect as the ledger has it. Instants are epoch milliseconds.

    `status`: `begun` (at work, or nobody knows), `asked` (a person is to decide),
    `granted` (somebody decided that it may be done again), `completed` with `result`,
    `error` with the text of what was raised, `unknown` (it was given up without an
    answer). `uncertain`: nobody knows whether it was carried out. `token` is the same in
    every attempt. `asker`: the run, turn or fiber whose code does it.
    `slot` is of its agent, `path` as well where agents below were asked for.
    """

    id: str
    slot: str
    kind: Kind
    name: str
    key: str
    token: str
    policy: Policy
    status: Status
    attempt: int
    uncertain: bool
    asker: str | None
    tool_call_id: str | None
    preview: Any
    result: Any
    error: str | None
    began_at: int
    settled_at: int | None
    path: str | None = None


class Wanted(NamedTuple):
    """What is about to be done."""

    kind: Kind
    name: str
    key: str
    digest: str
    policy: Policy
    asker: str | None = None
    tool_call_id: str | None = None
    preview: Any = None


class Row(NamedTuple):
    """One row."""

    born: int
    owner: str
    kind: Kind
    name: str
    key: str
    asker: str | None
    tool_call_id: str | None
    digest: str
    preview: str | None
    policy: Policy
    attempt: int
    status: Status
    result: str | None
    error: str | None
    began_at: int
    settled_at: int | None

    @property
    def token(self) -> str:
        """What tells the other side that two attempts are one effect."""
        if self.kind == "tool":  # as `ToolContext` has it
            return f"{self.owner}:{self.key}"
        return derive_token(self.owner, self.kind, self.name, self.key)

    def standing(self, live: bool) -> Standing:
        """Return it as the rules see it."""
        return Standing(self.status, self.attempt, live)

    def shown(self, live: bool, path: str | None = None) -> Effect:
        """Return the public record."""
        return Effect(
            id=str(self.born), slot=self.owner, path=path, kind=self.kind,
            name=self.name, key=self.key,
            token=self.token, policy=self.policy, status=self.status,
            attempt=self.attempt, uncertain=self.standing(live).uncertain,
            asker=self.asker, tool_call_id=self.tool_call_id,
            preview=stored_json(self.preview), result=stored_json(self.result),
            error=self.error, began_at=self.began_at, settled_at=self.settled_at,
        )  # fmt: skip


@final
class EffectRows:
    """The rows of one tree."""

    def __init__(self, tree: Tree) -> None:
        self.tree, self.db = tree, tree.db
        self._begun: dict[str, int] = {}  # by each owner since the last look

    def find(self, owner: str, wanted: Wanted) -> Row | None:
        """Return the row of what is wanted, whenever it was begun."""
        params = (owner, wanted.kind, wanted.name, wanted.key)
        rows = self.db.execute(_BY_KEY, params)
        return Row(*rows[0]) if rows else None

    def get(self, owner: str, effect_id: str) -> Row | None:
        """Return one row by its id."""
        rows = self.db.execute(_BY_ID, (owner, _number(effect_id)))
        return Row(*rows[0]) if rows else None

    def all(
        self,
        owner: str,
        statuses: frozenset[str] | None,
        name: str | None,
        without: list[int],
        limit: int | None,
        after: str | None,
        below: bool,
    ) -> list[Row]:
        """Return rows in the order of their birth; `below`: of all below as well."""
        wanted = None if statuses is None else _json(sorted(statuses))
        first = 0 if after is None else _number(after)
        params = (owner, first, wanted, name, _json(without), self._most(limit))
        sql = _BELOW if below else _OWN
        return [Row(*row) for row in self.db.execute(sql, params)]

    def begin(self, owner: str, wanted: Wanted) -> Row:
        """Write the intent. Raises `CapacityError`: then nothing may be done."""
        limits, now = self.tree.kernel.limits, self.tree.now()
        with self.tree.transaction():
            self._trim(owner, now)
            (count,) = self.db.execute(_OPEN, (owner,))[0]
            if count >= limits.effects_open:
                msg = f"{count} effects are without an outcome (limits.effects_open)"
                raise CapacityError(msg)
            preview = None if wanted.preview is None else _json(wanted.preview)
            rows = self.db.execute(
                _BEGIN,
                (owner, wanted.kind, wanted.name, wanted.key, wanted.asker,
                 wanted.tool_call_id, wanted.digest, preview, wanted.policy, now),
            )  # fmt: skip
        found = self.get(owner, str(rows[0][0]))
        assert found is not None
        return found

    def again(self, row: Row, wanted: Wanted) -> Row:
        """Write that the next attempt begins."""
        params = (
            wanted.asker,
            wanted.policy,
            self.tree.now(),
            row.born,
            row.attempt,
        )
        with self.tree.transaction():
            self.db.execute(_AGAIN, params)
        found = self.get(row.owner, str(row.born))
        assert found is not None
        return found

    def move(
        self,
        row: Row,
        status: Status,
        *,
        result: str | None = None,
        error: str | None = None,
    ) -> bool:
        """Write a status; False when an outcome stands already."""
        settles = status in ("completed", "error", "unknown")
        until = max(row.began_at, self.tree.now()) if settles else None
        if error is not None:
            error = error.encode(errors="replace").decode()
            error = error[: self.tree.kernel.limits.effect_error_chars]
        with self.tree.transaction():
            self.db.execute(_MOVE, (status, result, error, until, row.born))
            return self.db.changes > 0

    def withdraw(self, row: Row, before: Row | None) -> None:
        """Take back an intent that has provably not begun: it is as it was `before`."""
        with self.tree.transaction():
            if before is None:
                self.db.execute("DELETE FROM effect WHERE born = ?", (row.born,))
            else:
                sql = "UPDATE effect SET status = ?, attempt = ? WHERE born = ?"
                self.db.execute(sql, (before.status, before.attempt, row.born))

    def forget(
        self, owner: str, before: int, name: str | None, limit: int | None
    ) -> int:
        """Delete rows with an outcome of before, the oldest first; returns how many."""
        with self.tree.transaction():
            self.db.execute(_FORGET, (owner, before, name, self._most(limit)))
            return self.db.changes

    def _trim(self, owner: str, now: int) -> None:
        """Now and then: drop what is old, refuse what is too much."""
        if len(self._begun) >= _OWNERS:
            self._begun.clear()
        begun = self._begun.get(owner, _EVERY) + 1
        self._begun[owner] = begun
        if begun < _EVERY:
            return
        limits = self.tree.kernel.limits
        before = now - round(limits.effect_keep_s * 1000)
        self.db.execute(_OLD, (owner, before, _AT_ONCE))
        self.db.execute(_OLD_TOOLS, (owner, _AT_ONCE, limits.effect_tools))
        (count,) = self.db.execute(_CALLS, (owner,))[0]
        if count >= limits.effects_per_agent:
            msg = (
                f"{count} effects are recorded (limits.effects_per_agent): forget some"
            )
            raise CapacityError(msg)
        self._begun[owner] = 0

    def _most(self, limit: int | None) -> int:
        most = self.tree.kernel.limits.due_rows
        if limit is not None and limit < 1:
            msg = f"limit is at least 1, not {limit}"
            raise UsageError(msg)
        return most if limit is None else min(limit, most)


def _number(effect_id: str) -> int:
    """Return the row's number; -1, which none has, for what is no id."""
    return int(effect_id) if effect_id.isdecimal() and len(effect_id) < 19 else -1


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
