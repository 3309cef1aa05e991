"""Schedules and the queue: `call` and `queue` jobs, and the call when they are due."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, final

import msgspec

from .core import job as core
from .core.job import UNREADABLE, Cron, Every, Misfire, Retry, is_number, job_number
from .core.upcoming import OWED_COLUMNS, OwedRow, Upcoming, explain
from .endings import BELOW
from .errors import CapacityError, FacetBroken, UsageError
from .events import CHANNEL_OF, Crowd, Owed
from .jobrows import COLUMNS, Hopeless, JobRow, Kind, StartFailed, Taken
from .node import Ambient, Node, State, ambient, starting
from .plans import Due, Plan, instant, plan, plan_interval, plan_now
from .tracing import NO_SPAN

if TYPE_CHECKING:
    from .tree import Tree

log = logging.getLogger("culet.kernel")
Rhythm = Literal["once", "every", "cron"]
_INSERT: Final = (
    "INSERT INTO job (id, owner, kind, what, payload, every, at, due_at, lane, key,"
    " retry, created_at, maker) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?)"
)
_ASKER: Final = "SELECT asker FROM fiber WHERE owner = ? AND id = ?"
_KNOWN: Final = (
    "owner = ? AND kind = 'call' AND key IN (SELECT value FROM json_each(?))"
)
_RHYTHMS: Final = {
    "once": "every IS NULL",
    "every": """every LIKE '{"type":"interval"%'""",
    "cron": """every LIKE '{"type":"cron"%'""",
}
_FOUND: Final = (
    " AND kind = ?2 AND (?3 IS NULL OR what = ?3) AND (?4 IS NULL OR due_at >= ?4)"
    " AND (?5 IS NULL OR due_at <= ?5) AND (?6 IS NULL OR dead = ?6)"
    " AND (due_at, id) > (?7, ?8) {rhythm} ORDER BY due_at, id LIMIT ?9"
)
_OWN: Final = f"SELECT {COLUMNS} FROM job WHERE owner = ?1" + _FOUND
_BELOW: Final = (
    f"{BELOW} SELECT {COLUMNS} FROM job WHERE owner IN (SELECT slot FROM sub)" + _FOUND
)
_SOON: Final = (
    " AND kind = 'call' AND dead = 0 AND due_at <= ?2 ORDER BY due_at, id LIMIT ?3"
)
_OWN_SOON: Final = f"SELECT {OWED_COLUMNS} FROM job WHERE owner = ?1" + _SOON
_BELOW_SOON: Final = (
    f"{BELOW} SELECT {OWED_COLUMNS} FROM job WHERE owner IN (SELECT slot FROM sub)"
    + _SOON
)
_CHANGES: Final = {
    "pause": "paused = 1 WHERE dead = 0",
    "resume": "paused = 0 WHERE dead = 0",
    "run_now": "due_at = ?2, paused = 0 WHERE dead = 0",
    "replay": "dead = 0, attempts = 0, due_at = ?2 WHERE dead = 1",
}


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """One schedule or queued call. Instants are epoch milliseconds.

    `at` is the instant that it is for, `due_at` is not before which it is tried next.
    `every`: seconds of an interval, or a cron text with `tz`; None for a one-shot.
    `called_at`: when this call of it began, in the callback only. `path`: whose it is,
    where those of several agents are listed. `maker`: the run, turn or fiber of the agent
    whose code made it, if it was one; a run that is cancelled takes its own along.
    """

    id: str
    callback: str
    payload: Any
    at: int
    due_at: int
    every: float | str | None = None
    tz: str | None = None
    misfire: Misfire = "one"
    jitter: float = 0.0
    retry: Retry | None = None
    attempts: int = 0
    paused: bool = False
    dead: bool = False
    error: str | None = None
    called_at: int | None = None
    path: str | None = None
    maker: str | None = None


class Wanted(NamedTuple):
    """Which schedules are to be listed; None: whatever it is."""

    callback: str | None = None
    rhythm: Rhythm | None = None
    start: int | datetime | None = None
    end: int | datetime | None = None
    dead: bool | None = None
    limit: int | None = None
    after: str | None = None


_ALL: Final = Wanted()


def _schedule(
    job_id: int, what: str, payload: Any, at: int, due_at: int, every: Every | None,
    retry: Retry | None, **more: Any,
) -> Schedule:  # fmt: skip
    rule: float | str | None = None
    if every is not None:
        rule = every.expr if isinstance(every, Cron) else every.seconds
    return Schedule(
        id=str(job_id), callback=what, payload=payload, at=at, due_at=due_at, every=rule,
        tz=every.tz if isinstance(every, Cron) else None,
        misfire="one" if every is None else every.misfire,
        jitter=0.0 if every is None else every.jitter, retry=retry, **more,
    )  # fmt: skip


def _planned(job_id: int, made: Plan, maker: str | None) -> Schedule:
    payload = None if made.text is None else msgspec.json.decode(made.text)
    return _schedule(
        job_id, made.what, payload, made.at, made.due_at, made.every, made.retry,
        maker=maker,
    )  # fmt: skip


def _row(
    slot: str, kind: str, made: Plan, now: int, maker: str | None
) -> tuple[Any, ...]:
    every = None if made.every is None else core.encode_every(made.every)
    retry = core.encode_retry(made.retry)
    return (
        slot, kind, made.what, made.text, every, made.at, made.due_at, kind, made.key,
        retry, now, maker,
    )  # fmt: skip


def to_schedule(row: JobRow, **more: Any) -> Schedule:
    """Return the public record of a `call` or `queue` job."""
    every: Every | None = None
    retry: Retry | None = None
    payload, error = None, row.error
    try:  # listed all the same, or it hides the others
        every = None if row.every is None else core.decode_every(row.every)
        retry = None if row.retry is None else core.decode_retry(row.retry)
    except UNREADABLE as broken:
        error = error or f"its recurrence cannot be read: {broken}"
    try:
        payload = None if row.payload is None else msgspec.json.decode(row.payload)
    except UNREADABLE as broken:
        error = error or f"its payload cannot be decoded: {broken}"
    return _schedule(
        row.id, row.what, payload, row.at, row.due_at, every, retry,
        attempts=row.attempts, paused=bool(row.paused), dead=bool(row.dead), error=error,
        maker=row.maker, **more,
    )  # fmt: skip


@final
class Schedules:
    """The calls that agents of one tree owe themselves."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self._warned: dict[str, set[str]] = {}  # methods, by the slot that starts
        self._logged: set[tuple[str | None, str]] = set()  # crowded methods of a class

    def kind(self, *, crowded: bool) -> Kind:
        """Return what the tree does with one of the two kinds."""
        told = self.crowded if crowded else None
        return Kind(self.fire, batch=True, gave_up=self.gave_up, crowded=told)

    # ---- storing

    def add(self, node: Node, due: Due) -> Schedule:
        """Store one schedule, in one commit; an idempotent one that exists is returned."""
        return self._store(node, "call", [plan(node, due)])[0]

    def many(self, node: Node, dues: Sequence[Due]) -> list[Schedule]:
        """Store many in one commit, all or nothing; in the order of `dues`."""
        most = self.tree.kernel.limits.schedules_at_once
        if len(dues) > most:
            msg = (
                f"{len(dues)} schedules at once (limits.schedules_at_once = {most}):"
                " store them in parts, or raise it"
            )
            raise CapacityError(msg)
        return self._store(node, "call", [plan(node, due) for due in dues])

    def every(
        self,
        node: Node,
        seconds: float,
        callback: str | Callable[..., Any],
        payload: Any,
        retry: Retry | None,
        misfire: Misfire = "one",
        jitter: float = 0.0,
    ) -> Schedule:
        """Store one interval; the same one twice is one."""
        made = plan_interval(node, seconds, callback, payload, retry, misfire, jitter)
        return self._store(node, "call", [made])[0]

    def put(
        self,
        node: Node,
        callback: str | Callable[..., Any],
        payload: Any,
        retry: Retry | None,
    ) -> Schedule:
        """Queue one call: first in, first out, one at a time."""
        made = plan_now(node, callback, payload, retry)
        return self._store(node, "queue", [made])[0]

    def _store(self, node: Node, kind: str, plans: list[Plan]) -> list[Schedule]:
        node.check_open()
        known = self._known(node, [p.key for p in plans if p.key is not None])
        fresh = list({p.key or n: p for n, p in enumerate(plans)
                      if p.key not in known}.values())  # fmt: skip
        ids: list[int] = []
        maker = self._maker(node)
        if fresh:
            self.tree.quotas.admit_schedule(node.slot, len(fresh))
            ids = self._insert(node, kind, fresh, maker)
        # A time that has come while nobody looked is seen now at the latest.
        self.tree.jobs.touch(node.slot, kind)
        made = {id(p): _planned(i, p, maker) for i, p in zip(ids, fresh, strict=True)}
        known.update({p.key: made[id(p)] for p in fresh if p.key is not None})
        for job_id, p in zip(ids, fresh, strict=True):
            told = Owed(p.what, str(job_id))
            self.tree.emit(f"{CHANNEL_OF[kind]}:create", node.slot, told)
            if p.unsure and starting.get() is node:
                self._warn(node, p.what)
        return [made[id(p)] if p.key is None else known[p.key] for p in plans]

    def _known(self, node: Node, keys: list[str]) -> dict[str, Schedule]:
        if not keys:
            return {}
        wanted = msgspec.json.encode(keys).decode()
        rows = self.tree.jobs.find(_KNOWN, (node.slot, wanted))
        return {row.key: to_schedule(row) for row in rows if row.key is not None}

    def _insert(
        self, node: Node, kind: str, fresh: list[Plan], maker: str | None
    ) -> list[int]:
        """Insert rows in one commit; return their ids, each greater than the one before."""
        db, jobs, now = self.tree.db, self.tree.jobs, self.tree.now()
        if len(fresh) == 1:
            values = (None, *_row(node.slot, kind, fresh[0], now, maker))
            ids = [int(db.execute(_INSERT + " RETURNING id", values)[0][0])]
        else:
            with self.tree.transaction():
                first = jobs.next_id()
                ids = list(range(first, first + len(fresh)))
                rows = [_row(node.slot, kind, p, now, maker) for p in fresh]
                numbered = [(i, *r) for i, r in zip(ids, rows, strict=True)]
                db.executemany(_INSERT, numbered)
        jobs.last_id = ids[-1]
        self.tree.touched()
        return ids

    def _maker(self, node: Node) -> str | None:
        """Return the run, turn or fiber of the agent whose code this is; None: neither.

        A fiber works for whoever started it, and a call for whoever made its schedule.
        """
        here = ambient.get()
        if here is None or here.node is not node:
            return None
        maker = here.maker or here.asker
        while maker is not None:
            rows = self.tree.db.execute(_ASKER, (node.slot, maker))
            if not rows or rows[0][0] is None:
                break
            maker = str(rows[0][0])
        return maker

    def _warn(self, node: Node, what: str) -> None:
        """A start that schedules leaves one more call each time that the agent wakes."""
        warned = self._warned.setdefault(node.slot, set())
        if what not in warned:
            warned.add(what)
            log.warning(
                "%s schedules %r in on_start, once more in each of its lives: say"
                " idempotent=True (or False, where that is meant)",
                node.path_text(),
                what,
            )

    def start_ended(self, node: Node) -> None:
        """A start is over: the next one may be warned again."""
        self._warned.pop(node.slot, None)

    def crowded(self, owner: str, what: str, many: int) -> None:
        """So many one-shot calls of one method are due at once: perhaps not meant.

        The log hears it once of each method of a class.
        """
        kind = self.tree.kind_of(owner)
        method = (None if kind is None else kind.name, what)
        if method not in self._logged:
            self._logged.add(method)
            log.warning(
                "%s: at least %d calls of %r are due at once; were they meant to be one?"
                " (idempotent=True)",
                self.tree.path_of(owner), many, what,
            )  # fmt: skip
        self.tree.emit("schedule:duplicate_warning", owner, Crowd(what, many))

    # ---- reading and changing

    def all(
        self, owner: str, kind: str, wanted: Wanted = _ALL, *, below: bool = False
    ) -> list[Schedule]:
        """Return the schedules of an agent, earliest first; `below`: of its facets too."""
        limits = self.tree.kernel.limits
        most = limits.due_rows if below else limits.schedules_per_agent
        limit = most if wanted.limit is None else min(wanted.limit, most)
        rhythm = "" if wanted.rhythm is None else f"AND {_RHYTHMS[wanted.rhythm]}"
        after = self._after(wanted.after)
        params = (
            owner, kind, wanted.callback, _bound(wanted.start), _bound(wanted.end),
            None if wanted.dead is None else int(wanted.dead), *after, limit,
        )  # fmt: skip
        sql = (_BELOW if below else _OWN).replace("{rhythm}", rhythm)
        rows = [JobRow(*found) for found in self.tree.db.execute(sql, params)]
        if not below:
            return [to_schedule(row) for row in rows]
        paths = self._paths(row.owner for row in rows)
        return [to_schedule(row, path=paths[row.owner]) for row in rows]

    def _after(self, schedule_id: str | None) -> tuple[int, int]:
        row = None if schedule_id is None else self._job(schedule_id)
        if row is None:
            return -(1 << 62), 0
        return row.due_at, row.id

    def _paths(self, slots: Any) -> dict[str, str]:
        return {slot: self.tree.path_of(slot) for slot in set(slots)}

    def get(self, owner: str, kind: str, schedule_id: str) -> Schedule | None:
        """Return one of them by its id."""
        row = self._row(owner, kind, schedule_id)
        return None if row is None else to_schedule(row)

    def _job(self, schedule_id: str) -> JobRow | None:
        number = job_number(schedule_id)
        return None if number is None else self.tree.jobs.get(number)

    def _row(
        self, owner: str, kind: str, schedule_id: str, *, below: bool = False
    ) -> JobRow | None:
        row = self._job(schedule_id)
        if row is None or row.kind != kind:
            return None
        slot: str | None = row.owner
        while below and slot is not None and slot != owner:
            above = self.tree.node_row(slot)
            slot = None if above is None else above.parent
        return row if slot == owner else None

    def remove(
        self, owner: str, kind: str, schedule_id: str, *, below: bool = False
    ) -> bool:
        """Delete one; False when there is none (or it ran already)."""
        row = self._row(owner, kind, schedule_id, below=below)
        if row is None:
            return False
        with self.tree.transaction():
            self.tree.jobs.drop("id = ?", (row.id,))
        told = Owed(row.what, str(row.id), row.attempts)
        self.tree.emit(f"{CHANNEL_OF[kind]}:cancel", row.owner, told)
        return True

    def change(self, owner: str, kind: str, schedule_id: str, how: str) -> bool:
        """Apply `pause`, `resume`, `run_now` or `replay`; False where it does not apply."""
        row = self._row(owner, kind, schedule_id)
        if row is None:
            return False
        sql = f"UPDATE job SET {_CHANGES[how]} AND id = ?1 AND ?2 IS NOT NULL"
        with self.tree.transaction():
            self.tree.db.execute(sql, (row.id, self.tree.now()))
            changed = self.tree.db.changes > 0
            self.tree.jobs.touch(row.owner, row.lane)
        return changed

    def upcoming(
        self, owner: str, hours: float, *, below: bool, limit: int | None
    ) -> list[Upcoming]:
        """Return what fires within so many hours, the earliest first, and why then."""
        most = self.tree.kernel.limits.due_rows
        limit = most if limit is None else min(limit, most)
        sql = _BELOW_SOON if below else _OWN_SOON
        until = self.tree.now() + horizon_ms(hours)
        rows = [OwedRow(*r) for r in self.tree.db.execute(sql, (owner, until, limit))]
        paths = self._paths(row.owner for row in rows)
        return [explain(row, paths[row.owner]) for row in rows]

    # ---- when it is due

    async def fire(self, taken: Taken) -> bool:
        """Handle one due call: wake its owner, look again, call the method."""
        row = taken.row
        try:
            node = await self.tree.wake(row.owner)
        except (FacetBroken, UsageError) as error:
            raise StartFailed from error
        if not self.tree.jobs.to_be_called(taken):
            return False
        method = getattr(node.agent, row.what, None)
        if method is None:
            msg = f"{node.kind.name} has no method {row.what!r} to call"
            raise Hopeless(msg)
        payload = taken.payload
        schedule = to_schedule(row, called_at=self.tree.now())
        told = Owed(row.what, schedule.id, taken.attempts)
        self.tree.emit(f"{CHANNEL_OF[row.kind]}:execute", node.slot, told)
        tracer = self.tree.kernel.tracer
        with NO_SPAN if tracer is None else tracer.span(
            "call", f"{node.kind.name}.{row.what}",
            {"agent": node.path_text(), "id": told.id, "attempt": taken.attempts},
            parent=None,
        ):  # fmt: skip
            await node.enter(Ambient(node, maker=row.maker), method, payload, schedule)
        return True

    def gave_up(self, taken: Taken, error: BaseException) -> None:
        """Tell the agent itself that a call of it will not be tried again."""
        node = self.tree.nodes.get(taken.row.owner)
        if node is not None and node.state is State.LIVE and not node.fenced:
            node.hook(Ambient(node), on_error, node, error)


async def on_error(node: Node, error: BaseException) -> None:
    """Ask the agent's `on_error`; what it raises changes nothing."""
    try:
        await node.agent.on_error(error)
    except Exception as unhandled:
        if unhandled is not error:  # which was reported with its job
            raise


def horizon_ms(hours: float) -> int:
    """Return how many milliseconds a number of hours has. Raises `UsageError`."""
    if not is_number(hours) or not 0 <= hours <= 1e7:
        msg = f"hours is a number that is not negative, not {hours!r}"
        raise UsageError(msg)
    return int(hours * 3_600_000)


def _bound(when: int | datetime | None) -> int | None:
    return instant(when) if isinstance(when, datetime) else when
