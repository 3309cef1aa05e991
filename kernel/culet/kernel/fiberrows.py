"""Fibers as their rows tell them: what is listed, inspected, and told to a recovery hook.

The row says who and how it ended. While it runs its job beside it says the rest: how often
it was tried, the last stash, the last sign of life, its deadline, how far it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, final

import msgspec

from .calls import stored_json
from .core.job import UNREADABLE
from .core.limits import TERMINALS
from .core.run import Status
from .endings import BELOW
from .errors import UsageError

if TYPE_CHECKING:
    from .tree import Tree

Statuses = Status | Collection[Status] | None
_COLUMNS: Final = (
    "f.id, f.kind, f.name, f.key, f.metadata, f.status, f.reason, f.error, f.result,"
    " f.started_at, f.completed_at, f.owner, job.attempts, job.at, job.snapshot,"
    " CASE WHEN f.kind = 'fiber' THEN job.payload END"
)
_ROWS: Final = (
    f"SELECT {_COLUMNS} FROM fiber f LEFT JOIN job"
    " ON job.owner = f.owner AND job.kind = f.kind AND job.what = f.id"
)
_BY_ID: Final = f"{_ROWS} WHERE f.owner = ? AND f.id = ?"
_BY_KEY: Final = f"{_ROWS} WHERE f.owner = ? AND f.key = ?"
_WANTED: Final = (
    " AND (?2 IS NULL OR f.status IN (SELECT value FROM json_each(?2)))"
    " AND (?3 IS NULL OR f.name = ?3) AND f.born > coalesce("
    "(SELECT born FROM fiber WHERE owner = ?4 AND id = ?5), 0) ORDER BY f.born LIMIT ?6"
)
_OWN: Final = f"{_ROWS} WHERE f.owner = ?1{_WANTED}"
_BELOW: Final = f"{BELOW}{_ROWS} WHERE f.owner IN (SELECT slot FROM sub){_WANTED}"
_SAME_BELOW: Final = (
    f"{BELOW}{_ROWS} WHERE f.owner IN (SELECT slot FROM sub)"
    " AND (f.id = ?2 OR f.key = ?3) ORDER BY f.born"
)
_FORGET: Final = (
    "DELETE FROM fiber WHERE born IN (SELECT born FROM fiber WHERE owner = ?1"
    " AND kind = 'fiber' AND status <> 'running'"
    " AND status IN (SELECT value FROM json_each(?2))"
    " AND (?3 IS NULL OR completed_at < ?3) ORDER BY completed_at, born LIMIT ?4)"
)


class FiberProgress(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a fiber last said of itself. `fraction` is in 0..1."""

    fraction: float | None = None
    message: str | None = None
    phase: str | None = None
    data: Any = None


class FiberRun(msgspec.Struct, frozen=True, kw_only=True):
    """One fiber or own turn as its row tells it. Instants are epoch milliseconds.

    `accepted`: of what `start` returns, whether this call has started it. `slot` is of its
    agent, `path` as well where agents below were asked for. The last five are of one that
    still runs: how often it was tried without a stash, the last stash, its last sign of
    life (its start, a stash, a report), what it reported, until when it may run.
    """

    id: str
    kind: Literal["fiber", "turn"]
    name: str
    key: str | None
    metadata: Any
    status: Status
    reason: str | None
    error: str | None
    result: Any
    started_at: int
    completed_at: int | None
    slot: str
    path: str | None = None
    accepted: bool | None = None
    attempts: int | None = None
    snapshot: Any = None
    seen_at: int | None = None
    progress: FiberProgress | None = None
    deadline_at: int | None = None


class FiberRecovery(msgspec.Struct, frozen=True, kw_only=True):
    """What `on_fiber_recovered` is told of a fiber whose task ended before it did.

    `attempt` counts the tries without a stash, the first life of the fiber included;
    `error` is what the last try of this hook raised. `age_s` counts from `started_at`
    (epoch ms), which no recovery moves. `status` is what stands: `running`.
    """

    id: str
    name: str
    key: str | None
    status: Status
    snapshot: Any
    metadata: Any
    attempt: int
    error: str | None
    started_at: int
    age_s: float

    @property
    def created_at(self) -> int:
        """The same as `started_at`."""
        return self.started_at


class FiberResolution(msgspec.Struct, frozen=True, kw_only=True):
    """How a recovered fiber ends."""

    status: Literal["completed", "error", "aborted", "interrupted"] = "completed"
    result: Any = None
    error: str | None = None


class About(msgspec.Struct, omit_defaults=True):
    """What the job of a fiber carries: the payload of its row.

    `keep`: whether its row outlives it. `deadline_at`: epoch ms. `trace`: the context of the
    span that it was started in.
    """

    keep: bool = True
    deadline_at: int | None = None
    progress: FiberProgress | None = None
    trace: str | None = None


_about: Final = msgspec.json.Decoder(About)


def about(payload: str | None) -> About:
    """Return what a job carries: nothing where it was written before, or is damaged."""
    try:
        return About() if payload is None else _about.decode(payload)
    except UNREADABLE:
        return About()


def to_fiber(row: tuple[Any, ...], path: str | None = None) -> FiberRun:
    """Return the public record of a row."""
    (fiber_id, kind, name, key, metadata, status, reason, error, result, started_at,
     completed_at, slot, attempts, seen_at, snapshot, payload) = row  # fmt: skip
    more = about(payload)
    return FiberRun(
        id=fiber_id, kind=kind, name=name, key=key,
        metadata=stored_json(metadata),
        status=status, reason=reason, error=error,
        result=stored_json(result),
        started_at=started_at, completed_at=completed_at, slot=slot, path=path,
        attempts=attempts, seen_at=seen_at, snapshot=stored_json(snapshot),
        progress=more.progress, deadline_at=more.deadline_at,
    )  # fmt: skip


def _wanted(statuses: Statuses) -> str | None:
    """Return statuses as a JSON list; None: all."""
    if statuses is None:
        return None
    found = [statuses] if isinstance(statuses, str) else list(statuses)
    unknown = set(found) - TERMINALS - {"running"}
    if unknown:
        msg = f"{sorted(map(str, unknown))} is no status of a fiber"
        raise UsageError(msg)
    return msgspec.json.encode(found).decode()


@final
class FiberRows:
    """The rows of the fibers of one tree: reading and forgetting."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.db = tree.db

    def get(self, owner: str, fiber_id: str | None, key: str | None) -> FiberRun | None:
        """Return one fiber by id or by key."""
        by_id = fiber_id is not None
        sql, value = (_BY_ID, fiber_id) if by_id else (_BY_KEY, key)
        rows = self.db.execute(sql, (owner, value))
        return to_fiber(rows[0]) if rows else None

    def below(self, slot: str, fiber_id: str | None, key: str | None) -> list[FiberRun]:
        """Return those of that id or key, of the agent and all below it."""
        rows = self.db.execute(_SAME_BELOW, (slot, fiber_id, key))
        return [to_fiber(r) for r in rows]

    def all(
        self,
        slot: str,
        *,
        status: Statuses = None,
        name: str | None = None,
        limit: int | None = None,
        after: FiberRun | None = None,
        below: bool = False,
    ) -> list[FiberRun]:
        """Return fibers in the order of their start; `below`: each with its path."""
        last = (None, None) if after is None else (after.slot, after.id)
        params = (slot, _wanted(status), name, *last, self._most(limit))
        if not below:
            return [to_fiber(r) for r in self.db.execute(_OWN, params)]
        rows = self.db.execute(_BELOW, params)
        paths = {owner: self.tree.path_of(owner) for owner in {r[11] for r in rows}}
        return [to_fiber(r, paths[r[11]]) for r in rows]

    def forget(
        self, owner: str, statuses: Statuses, before: int | None, limit: int | None
    ) -> int:
        """Delete rows of fibers that ended, the earliest end first; returns how many."""
        wanted = _wanted(
            ("completed", "error", "aborted") if statuses is None else statuses
        )
        with self.tree.transaction():
            self.db.execute(_FORGET, (owner, wanted, before, self._most(limit)))
            return self.db.changes

    def _most(self, limit: int | None) -> int:
        most = self.tree.kernel.limits.due_rows
        if limit is None:
            return most
        if limit < 1:
            msg = f"limit is at least 1, not {limit}"
            raise UsageError(msg)
        return min(limit, most)


def progress_of(
    fraction: float | None, message: str | None, phase: str | None, data: Any
) -> FiberProgress | None:
    """Return a report; None for a bare sign of life."""
    said: Mapping[str, Any] = {
        "fraction": fraction, "message": message, "phase": phase, "data": data,
    }  # fmt: skip
    return FiberProgress(**said) if any(v is not None for v in said.values()) else None
