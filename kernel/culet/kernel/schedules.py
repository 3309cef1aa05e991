"""Schedules and the queue: `call` and `queue` jobs, and the call when they are due."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast, final

import msgspec

from .calls import UNENCODABLE
from .core import job as core
from .core.job import Cron, Every, Interval, Retry
from .errors import CapacityError, FacetBroken, UsageError
from .events import CHANNEL_OF, Owed
from .jobs import UNREADABLE, JobRow, StartFailed, Taken
from .node import Ambient, Node

if TYPE_CHECKING:
    from .tree import Tree


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """One schedule or queued call. Instants are epoch milliseconds.

    `at` is the instant that it is for, `due_at` is not before which it is tried next.
    `every`: seconds of an interval, or a cron text with `tz`; None for a one-shot.
    """

    id: str
    callback: str
    payload: Any
    at: int
    due_at: int
    every: float | str | None = None
    tz: str | None = None
    attempts: int = 0
    paused: bool = False
    dead: bool = False
    error: str | None = None


def to_schedule(row: JobRow) -> Schedule:
    """Return the public record of a `call` or `queue` job."""
    every: Every | None = None
    error = row.error
    try:  # listed all the same, or it hides the others
        every = None if row.every is None else core.decode_every(row.every)
    except UNREADABLE as broken:
        error = error or f"its recurrence cannot be read: {broken}"
    try:
        payload = None if row.payload is None else msgspec.json.decode(row.payload)
    except msgspec.DecodeError as broken:
        payload, error = None, error or f"its payload cannot be decoded: {broken}"
    return Schedule(
        id=str(row.id),
        callback=row.what,
        payload=payload,
        at=row.at,
        due_at=row.due_at,
        every=every.seconds
        if isinstance(every, Interval)
        else every.expr
        if every is not None
        else None,
        tz=every.tz if isinstance(every, Cron) else None,
        attempts=row.attempts,
        paused=bool(row.paused),
        dead=bool(row.dead),
        error=error,
    )


def callback_name(
    node: Node, callback: str | Callable[..., Any], *, arguments: int = 2
) -> str:
    """Return the method's name; raises `UsageError` unless it can be called later.

    It must be an async method of that agent which takes `arguments` arguments.
    """
    if not isinstance(callback, str):
        if getattr(callback, "__self__", None) is not node.agent:
            msg = f"{callback!r} is not a method of this agent; give its name"
            raise UsageError(msg)
        callback = str(callback.__name__)
    if callback.startswith("__") or not callable(
        getattr(node.kind.cls, callback, None)
    ):
        msg = f"{node.kind.name} has no method {callback!r} to call"
        raise UsageError(msg)
    _check_callback(cast(Any, node.kind.cls), callback, arguments)
    return callback


@lru_cache(maxsize=1024)
def _check_callback(cls: Any, name: str, arguments: int) -> None:
    """Refuse now what would only fail when it is due."""
    fn = getattr(cls, name)
    if not inspect.iscoroutinefunction(fn):
        msg = f"{cls.__name__}.{name} is called later: make it async"
        raise UsageError(msg)
    try:
        inspect.signature(fn).bind(*[None] * (arguments + 1))
    except TypeError:
        gets = "(payload, schedule)" if arguments == 2 else "(run)"
        msg = f"{cls.__name__}.{name} is called with {gets}; give it these parameters"
        raise UsageError(msg) from None


@final
class Schedules:
    """The calls that agents of one tree owe themselves."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree

    def add(
        self,
        node: Node,
        when: float | datetime | str,
        callback: str | Callable[..., Any],
        payload: Any,
        *,
        idempotent: bool | None,
        retry: Retry | None,
        tz: str | None,
        jitter: float,
    ) -> Schedule:
        """Store one schedule, in one commit; an idempotent one that exists is returned."""
        now = self.tree.now()
        every: Every | None = None
        if isinstance(when, str):
            every = Cron(when, tz or "UTC")
            at = core.first_tick(every, now)
        elif isinstance(when, datetime):
            if when.tzinfo is None:
                msg = f"{when!r} has no time zone; give an aware datetime"
                raise UsageError(msg)
            at = int(when.timestamp() * 1000)
        else:
            if not 0 <= when < 1e10:
                msg = (
                    f"a delay is a number of seconds that is not negative, not {when!r}"
                )
                raise UsageError(msg)
            at = now + int(when * 1000)
        if idempotent is None:
            idempotent = every is not None
        spec = when if not isinstance(when, datetime) else at
        return self._store(
            node, "call", callback, payload, at=at, every=every, retry=retry,
            key=("at", spec, tz) if idempotent else None,
            due_at=at + int(self.tree.kernel.chance.fraction() * jitter * 1000),
        )  # fmt: skip

    def every(
        self,
        node: Node,
        seconds: float,
        callback: str | Callable[..., Any],
        payload: Any,
        retry: Retry | None,
    ) -> Schedule:
        """Store one interval; the same one twice is one."""
        every = Interval(seconds)
        at = core.first_tick(every, self.tree.now())
        return self._store(
            node, "call", callback, payload, at=at, every=every, retry=retry,
            key=("every", seconds), due_at=at,
        )  # fmt: skip

    def put(
        self,
        node: Node,
        callback: str | Callable[..., Any],
        payload: Any,
        retry: Retry | None,
    ) -> Schedule:
        """Queue one call: first in, first out, one at a time."""
        now = self.tree.now()
        return self._store(
            node, "queue", callback, payload, at=now, every=None, retry=retry, key=None,
            due_at=now,
        )  # fmt: skip

    def _store(
        self,
        node: Node,
        kind: str,
        callback: str | Callable[..., Any],
        payload: Any,
        *,
        at: int,
        every: Every | None,
        retry: Retry | None,
        key: tuple[Any, ...] | None,
        due_at: int,
    ) -> Schedule:
        node.check()
        name = callback_name(node, callback)
        try:
            text = msgspec.json.encode(payload)
        except UNENCODABLE as error:
            msg = f"the payload for {name!r} cannot be encoded as JSON: {error}"
            raise UsageError(msg) from None
        if len(text) > self.tree.kernel.limits.input_bytes:
            msg = f"the payload for {name!r} has {len(text)} bytes"
            raise CapacityError(msg)
        jobs = self.tree.jobs
        digest: str | None = None
        if key is not None:
            parts = msgspec.json.encode([name, list(key)]) + text
            digest = hashlib.sha256(parts).hexdigest()
            known = jobs.find(
                "owner = ? AND kind = 'call' AND key = ?", (node.slot, digest)
            )
            if known:
                return to_schedule(known[0])
        self.tree.quotas.admit_schedule(node.slot)
        with self.tree.transaction():
            job_id = jobs.add(
                node.slot, kind, name, at=at, due_at=due_at, lane=kind, key=digest,
                payload=None if payload is None else msgspec.Raw(text),
                every=None if every is None else core.encode_every(every),
                retry=None if retry is None else core.encode_retry(retry),
            )  # fmt: skip
        row = jobs.get(job_id)
        assert row is not None
        self.tree.emit(f"{CHANNEL_OF[kind]}:create", node.slot, Owed(name, str(job_id)))
        return to_schedule(row)

    # ---- reading and changing

    def all(
        self, owner: str, kind: str, *, callback: str | None = None
    ) -> list[Schedule]:
        """Return the schedules of an agent, earliest first."""
        rows = self.tree.jobs.find(
            "owner = ?1 AND kind = ?2 AND (?3 IS NULL OR what = ?3) ORDER BY due_at, id",
            (owner, kind, callback),
        )
        return [to_schedule(r) for r in rows]

    def get(self, owner: str, kind: str, schedule_id: str) -> Schedule | None:
        """Return one of them by its id."""
        row = self._row(owner, kind, schedule_id)
        return None if row is None else to_schedule(row)

    def _row(self, owner: str, kind: str, schedule_id: str) -> JobRow | None:
        if (
            not schedule_id.isascii()
            or not schedule_id.isdigit()
            or len(schedule_id) > 18
        ):
            return None
        row = self.tree.jobs.get(int(schedule_id))
        if row is None or row.owner != owner or row.kind != kind:
            return None
        return row

    def remove(self, owner: str, kind: str, schedule_id: str) -> bool:
        """Delete one; False when there is none (or it ran already)."""
        row = self._row(owner, kind, schedule_id)
        if row is None:
            return False
        with self.tree.transaction():
            self.tree.jobs.drop("id = ?", (row.id,))
        told = Owed(row.what, str(row.id), row.attempts)
        self.tree.emit(f"{CHANNEL_OF[kind]}:cancel", owner, told)
        return True

    def change(self, owner: str, schedule_id: str, how: str) -> bool:
        """Apply `pause`, `resume`, `run_now` or `replay` to one schedule."""
        row = self._row(owner, "call", schedule_id)
        if row is None:
            return False
        sets = {
            "pause": "paused = 1",
            "resume": "paused = 0",
            "run_now": "due_at = ?2, paused = 0",
            "replay": "dead = 0, attempts = 0, due_at = ?2",
        }[how]
        with self.tree.transaction():
            self.tree.db.execute(
                f"UPDATE job SET {sets} WHERE id = ?1 AND ?2 IS NOT NULL",
                (row.id, self.tree.now()),
            )
            self.tree.jobs.touch(row.owner, row.lane)
        return True

    # ---- when it is due

    async def fire(self, taken: Taken) -> bool:
        """Handle one due call: wake its owner, look again, call the method."""
        try:
            node = await self.tree.wake(taken.row.owner)
        except (FacetBroken, UsageError) as error:
            raise StartFailed from error
        if not self.tree.jobs.mine(taken):
            return False
        method = getattr(node.agent, taken.row.what, None)
        if method is None:
            msg = f"{node.kind.name} has no method {taken.row.what!r} to call"
            raise UsageError(msg)
        schedule = to_schedule(taken.row)
        self.tree.emit("schedule:fire", node.slot, schedule)
        await node.enter(Ambient(node), method, taken.payload, schedule)
        return True
