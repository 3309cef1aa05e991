"""Submissions: turns that were asked for durably, by whoever need not wait for them.

A submission is one step: its messages, its row and its job are stored together, or not
at all. So there is no moment at which it is accepted and its messages are not there, and
none at which they are there and nobody owes the turn. Turns of a chat go one after the
other in the order in which they were accepted; one that has begun is never asked anew,
it goes on as the same turn. One that is cancelled before it has begun takes its messages
back; one that the chat was cleared before is `skipped`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, final, get_args

import msgspec
import trio

from culet.kernel.core.limits import KEY_MAX, SUBMISSIONS_MAX, SUBMISSIONS_PAGE
from culet.kernel.core.run import Status
from culet.kernel.endings import json_text
from culet.kernel.errors import CapacityError, UsageError

if TYPE_CHECKING:
    from culet.adapters.chat import Chat

SubmissionStatus = Status | Literal["pending", "recovering", "skipped"]
TurnStatus = Status | Literal["skipped"]
STATUSES: Final[frozenset[str]] = frozenset(
    {*get_args(Status), "pending", "recovering", "skipped"}
)
OPEN: Final[frozenset[str]] = frozenset({"pending", "running", "recovering"})
SKIPPED: Final = "skipped"  # the reason of a turn that the chat was cleared before
_STATUS: Final = (  # ?2: ids of turns whose code runs, as JSON
    "CASE WHEN f.status = 'aborted' AND f.reason = 'skipped' THEN 'skipped'"
    " WHEN f.status <> 'running' THEN f.status WHEN job.begun = 0 THEN 'pending'"
    " WHEN f.id IN (SELECT value FROM json_each(?2)) THEN 'running'"
    " WHEN job.held IS NULL OR job.attempts > 1 THEN 'recovering' ELSE 'running' END"
)
_FROM: Final = (
    " FROM fiber f LEFT JOIN job ON job.owner = f.owner AND job.kind = 'turn'"
    " AND job.what = f.id WHERE f.owner = ?1 AND f.kind = 'turn'"
    " AND json_type(f.metadata, '$.submission') = 'object'"
)
_ROWS: Final = (
    f"SELECT f.id, {_STATUS} AS phase, f.key, f.metadata, f.error, f.reason,"
    f" f.started_at, f.completed_at{_FROM}"
)
_BY_ID: Final = f"{_ROWS} AND f.id = ?3"
_BY_KEY: Final = f"{_ROWS} AND f.key = ?3"
_LIST: Final = (
    f"{_ROWS} AND (?3 IS NULL OR phase = ?3) AND f.born >"
    " coalesce((SELECT born FROM fiber WHERE owner = ?1 AND id = ?4), 0)"
    " ORDER BY f.born LIMIT ?5"
)
_OVER: Final = (
    f"SELECT f.id{_FROM} AND f.status <> 'running' AND (?3 IS NULL OR {_STATUS} = ?3)"
    " AND (?4 IS NULL OR f.completed_at < ?4) ORDER BY f.born LIMIT ?5"
)


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """A turn that is owed, as its row tells it. Instants are epoch milliseconds.

    `accepted`: of what `submit_messages` returns, whether this call has made it; False
    when the id or the key was known. `status`: `pending` until its turn comes,
    `running`, `recovering` from the end of its process until it goes on, then how it
    ended; `skipped` when the chat was cleared before it began.
    """

    request_id: str
    status: SubmissionStatus
    accepted: bool | None = None
    key: str | None = None
    metadata: Any = None
    error: str | None = None
    reason: str | None = None
    submitted_at: int = 0
    completed_at: int | None = None


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """How a submission is asked for: by which id and key, and what is kept with it."""

    id: str | None = None
    key: str | None = None
    metadata: Any = None

    def check(self, metadata_bytes: int) -> None:
        """Raise `UsageError` or `CapacityError` for what cannot be stored."""
        for what, text in (("submission_id", self.id), ("idempotency_key", self.key)):
            if text is None:
                continue
            if not isinstance(text, str) or not 0 < len(text) <= KEY_MAX:
                msg = f"{what} is a text of 1 to {KEY_MAX} letters, not {text!r:.80}"
                raise UsageError(msg)
            json_text(text)
        size = len((json_text(self.metadata) or "").encode())
        if size > metadata_bytes:
            msg = f"the metadata of a submission has {size} bytes, the limit is"
            raise CapacityError(f"{msg} {metadata_bytes}")

    def row(self, ids: list[str], added: list[str]) -> dict[str, Any]:
        """Return what its row keeps: its messages, and which of them are new."""
        kept = {
            "ids": ids, "added": added, "named": self.id is not None,
            "metadata": self.metadata,
        }  # fmt: skip
        return {"submission": kept}


def to_submission(row: tuple[Any, ...]) -> Submission:
    """Return the public record of a row."""
    (request_id, status, key, metadata, error, reason, submitted_at,
     completed_at) = row  # fmt: skip
    return Submission(
        request_id=request_id, status=status, key=key, error=error, reason=reason,
        metadata=msgspec.json.decode(metadata)["submission"]["metadata"],
        submitted_at=submitted_at, completed_at=completed_at,
    )  # fmt: skip


@final
class Submissions:
    """The submissions of one chat agent: `self.submissions`."""

    __slots__ = ("_chat",)

    def __init__(self, chat: Chat) -> None:
        self._chat = chat

    def get(
        self, request_id: str | None = None, *, key: str | None = None
    ) -> Submission | None:
        """Return one by its id or by its key; None: there is none."""
        if (request_id is None) == (key is None):
            raise UsageError("give the id of a submission, or its key")
        sql, value = (_BY_KEY, key) if request_id is None else (_BY_ID, request_id)
        rows = self._rows(sql, value)
        return to_submission(rows[0]) if rows else None

    def known(self, wish: Wish) -> Submission | None:
        """Return the one that a wish means; raises `UsageError` when it means two."""
        by_id = None if wish.id is None else self.get(wish.id)
        by_key = None if wish.key is None else self.get(key=wish.key)
        if by_id is not None and by_key is not None and by_id != by_key:
            msg = f"{wish.id!r} and the key {wish.key!r} are of two submissions"
            raise UsageError(msg)
        if by_id is None and wish.id is not None and self._is_taken(wish.id):
            msg = f"{wish.id!r} is the id of something else"
            raise UsageError(msg)
        if by_key is None and wish.key is not None:
            fibers, slot = self._chat.tree.fibers, self._chat.slot
            if fibers.get(slot, None, wish.key) is not None:
                msg = f"{wish.key!r} is the key of something else"
                raise UsageError(msg)
        return by_id or by_key

    def _is_taken(self, request_id: str) -> bool:
        return self._chat.tree.endings.subject(self._chat.slot, request_id) is not None

    def list(
        self,
        *,
        status: SubmissionStatus | None = None,
        limit: int = SUBMISSIONS_PAGE,
        after: str | None = None,
    ) -> list[Submission]:
        """Return submissions in the order of their acceptance; `after` is an id."""
        rows = self._rows(_LIST, _status(status), after, _limit(limit))
        return [to_submission(row) for row in rows]

    async def cancel(
        self, request_id: str, reason: str | None = None
    ) -> SubmissionStatus | None:
        """End one that has not ended; return how it stands, None: there is none.

        One that is `pending` takes the messages back that it brought.
        """
        self._chat.node.check()
        found = self.get(request_id)
        if found is None:
            return None
        if found.status in OPEN:
            self._chat.withdraw(request_id, reason, begun=found.status != "pending")
        await trio.lowlevel.checkpoint_if_cancelled()
        found = self.get(request_id)
        return None if found is None else found.status

    def delete(self, request_id: str) -> bool:
        """Forget one that has ended: its id and key may be new again. Messages stay."""
        self._chat.node.check()
        found = self.get(request_id)
        if found is None or found.status in OPEN:
            return False
        self._chat.drop_turns([request_id])
        return True

    def clear(
        self,
        *,
        status: SubmissionStatus | None = None,
        older_than: int | None = None,
        limit: int = SUBMISSIONS_PAGE,
    ) -> int:
        """Forget such as have ended, the oldest first; return how many.

        `older_than` is epoch ms of their end. What has not ended is never meant.
        """
        self._chat.node.check()
        rows = self._rows(_OVER, _status(status), older_than, _limit(limit))
        self._chat.drop_turns([request_id for (request_id,) in rows])
        return len(rows)

    def _rows(self, sql: str, *params: Any) -> Any:
        slot, tree = self._chat.slot, self._chat.tree
        live = [what for owner, what in tree.turns.live if owner == slot]
        return tree.db.execute(sql, (slot, json_text(live), *params))


def _status(status: str | None) -> str | None:
    if status is not None and status not in STATUSES:
        msg = f"{status!r} is no status of a submission"
        raise UsageError(msg)
    return status


def _limit(limit: int) -> int:
    if type(limit) is not int or not 1 <= limit <= SUBMISSIONS_MAX:
        msg = f"limit is a number of 1 to {SUBMISSIONS_MAX}, not {limit!r}"
        raise UsageError(msg)
    return limit
