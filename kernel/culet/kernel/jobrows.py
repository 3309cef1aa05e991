"""A job as it is stored, one in the hands of its worker, and what a kind does with it.

The words of `jobs`, without what moves them.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple, final

import msgspec

from .core import job as core
from .core.job import UNREADABLE
from .errors import UsageError

log = logging.getLogger("culet.kernel")
COLUMNS: Final = (
    "id, owner, kind, what, payload, every, at, due_at, lane, key, retry, attempts,"
    " begun, held, paused, dead, error, snapshot, created_at, tries, maker"
)


class JobRow(NamedTuple):
    """A job as stored; see the schema for its columns."""

    id: int
    owner: str
    kind: str
    what: str
    payload: str | None
    every: str | None
    at: int
    due_at: int
    lane: str
    key: str | None
    retry: str | None
    attempts: int
    begun: int
    held: int | None
    paused: int
    dead: int
    error: str | None
    snapshot: str | None
    created_at: int
    tries: int = 0  # of a turn, in all
    maker: str | None = None  # of a call


@final
class Taken:
    """A job in the hands of its worker."""

    __slots__ = (
        "again",
        "attempts",
        "began",
        "begun_before",
        "over",
        "row",
        "take",
        "token",
    )

    def __init__(self, row: JobRow, take: int, *, begun_before: bool) -> None:
        self.row, self.take, self.begun_before = row, take, begun_before
        self.token = object()  # of the lane that its worker keeps busy
        self.attempts = row.attempts  # without progress
        self.began = row.due_at  # ms: when its worker came to it
        self.over = False  # booked: the row does not carry this take any more
        self.again = False  # it failed, and backs off

    @property
    def payload(self) -> Any:
        """The decoded payload; None when there is none."""
        return (
            None if self.row.payload is None else msgspec.json.decode(self.row.payload)
        )

    @property
    def snapshot(self) -> Any:
        """The last stash; None when there is none, or none that can be read."""
        text = self.row.snapshot
        if text is None:
            return None
        try:
            return msgspec.json.decode(text)
        except UNREADABLE as error:
            log.warning("the stash of %r cannot be read: %s", self.row.what, error)
            return None


class Kind(NamedTuple):
    """What the tree does with one kind of job.

    `run` returns True when the job is over in the ordinary way, False when it has
    settled its row itself. `exhausted` is called instead when attempts are used up;
    `gave_up` hears of that, and `crowded` of many that are due at once: (owner, method,
    how many at least).
    """

    run: Callable[[Taken], Awaitable[bool]]
    exhausted: Callable[[Taken, str], None] | None = None
    deadline: bool = True
    batch: bool = False
    gave_up: Callable[[Taken, BaseException], None] | None = None
    crowded: Callable[[str, str, int], None] | None = None


class Hopeless(UsageError):
    """No further try in this life can do better: a method that the class has not."""


def retry_of(row: JobRow) -> core.Retry | None:
    """Return the policy of a job; None, the default, also where it cannot be read."""
    try:
        return None if row.retry is None else core.decode_retry(row.retry)
    except UNREADABLE:
        return None


class StartFailed(Exception):
    """The owner could not be started; its `begun` mark is taken back."""
