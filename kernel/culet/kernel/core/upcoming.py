"""What a job is waiting for: why it fires when it does.

A pure reading of one row, the same for an agent that looks at its schedules, for the
operator of a kernel, and for a folder that nobody has open.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

import msgspec

from culet.kernel.core.job import UNREADABLE, Cron, Interval, decode_every

Why = Literal["time", "asked", "retry", "running", "paused"]


class OwedRow(NamedTuple):
    """The columns of a job that say when it fires. Instants are epoch milliseconds."""

    id: int
    owner: str
    kind: str
    what: str
    every: str | None
    at: int
    due_at: int
    attempts: int
    held: int | None
    paused: int
    error: str | None


OWED_COLUMNS: Final = (
    "id, owner, kind, what, every, at, due_at, attempts, held, paused, error"
)


class Upcoming(msgspec.Struct, frozen=True, kw_only=True):
    """When something owed fires next, and why then. Instants are epoch milliseconds.

    `path`: whose it is. `kind`: `once`, `every`, `cron`, `queue`, or what the kernel owes
    (`fiber`, `turn`, `hook`, `deliver`, `limit`, `wipe`). `callback`: the method; of those
    the id that it is about. `rule`: `3600 s`, a cron text, or None; `tz`: its zone.

    `why`: `time`, its time comes at `due_at`; `asked`, by `run_now`; `retry`, after try
    number `attempts` ended with `error`, it backs off; `running`, it is being called;
    `paused`, until `resume`.
    """

    id: str
    path: str
    kind: str
    callback: str
    rule: str | None
    tz: str | None
    at: int
    due_at: int
    why: Why
    attempts: int
    error: str | None


def explain(row: OwedRow, path: str) -> Upcoming:
    """Return why a job that is not dead fires when it does; never raises for a bad row."""
    kind, rule, tz, error = row.kind, None, None, row.error
    if row.kind == "call":
        kind = "once"
        if row.every is not None:
            kind = "every"
            try:
                every = decode_every(row.every)
            except UNREADABLE as broken:
                error = error or f"its recurrence cannot be read: {broken}"
            else:
                kind, rule, tz = _rule(every)
    return Upcoming(
        id=str(row.id), path=path, kind=kind, callback=row.what, rule=rule, tz=tz,
        at=row.at, due_at=row.due_at, why=_why(row), attempts=row.attempts, error=error,
    )  # fmt: skip


def _rule(every: Interval | Cron) -> tuple[str, str, str | None]:
    if isinstance(every, Cron):
        return "cron", every.expr, every.tz
    return "every", f"{every.seconds:g} s", None


def _why(row: OwedRow) -> Why:
    if row.paused:
        return "paused"
    if row.held is not None:
        return "running"
    if row.attempts > 0:
        return "retry"
    return "asked" if row.due_at < row.at else "time"


def describe(what: Upcoming) -> str:
    """Return one line for people: what it is and why it fires then."""
    rule = " ".join(filter(None, (what.rule, what.tz)))
    said = f"{what.callback} ({what.kind}{' ' + rule if rule else ''})"
    match what.why:
        case "time":
            return said
        case "asked":
            return f"{said}, asked for now"
        case "retry":
            return f"{said}, again after try {what.attempts}: {what.error or 'cut off'}"
        case "running":
            return f"{said}, running, try {what.attempts}"
        case "paused":
            return f"{said}, paused"
