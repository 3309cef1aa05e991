"""Where a chat keeps its messages: `culet_message` of the agent's own file.

A reply has its place from the moment in which its request is accepted: the sequence
number after the user's message. So a second request that is accepted meanwhile comes
after the answer to the first. A turn that has not left its message yet is noted; the
note goes in the step that stores the message, so none is stored twice or forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, final

import msgspec

from culet.adapters.messages import Message
from culet.kernel.ports import AgentDb

_PUT: Final = (
    "INSERT INTO main.culet_message (id, body) VALUES (?, ?)"
    " ON CONFLICT (id) DO UPDATE SET body = excluded.body"
)
_PUT_AT: Final = (
    "INSERT INTO main.culet_message (seq, id, body) VALUES (?, ?, ?)"
    " ON CONFLICT (id) DO UPDATE SET body = excluded.body"
)
_KEEP: Final = (
    "INSERT INTO main.culet_value (key, value) VALUES (?, ?)"
    " ON CONFLICT (key) DO UPDATE SET value = excluded.value"
)
_NOTE: Final = "chat:turn:"
_FAILED: Final = "chat:unseen"
_RECOVERING: Final = "chat:recovering"
_ARMED: Final = "chat:armed"
_CONTEXT: Final = "chat:context"


class Note(msgspec.Struct, frozen=True, omit_defaults=True):
    """A turn whose message is not stored for good yet.

    `base` is the message that a continuation goes on in, as it was before. `decided` is
    what persons said to approvals that this turn asked for, `begun` names the approved
    calls whose tool may have begun. A turn of a run that waited for a person has several
    passes: `told` is how much of its stream the passes hold that are over, `parked`
    whether it waits.
    """

    place: int
    message_id: str
    continuation: bool = False
    base: Message | None = None
    decided: dict[str, bool] = {}
    begun: list[str] = []
    told: int = 0
    parked: bool = False


@final
class Transcript:
    """The messages of one chat. Every method is one statement or joins the caller's."""

    def __init__(self, db: AgentDb) -> None:
        self.db = db

    # ---- messages

    def texts(self, before: int | None = None) -> list[str]:
        """Return the JSON of each message, oldest first; of those before a place."""
        sql = (
            "SELECT body FROM main.culet_message"
            " WHERE ?1 IS NULL OR seq < ?1 ORDER BY seq"
        )
        return [body for (body,) in self.db.execute(sql, (before,))]

    def all(self, before: int | None = None) -> list[Message]:
        """Return the messages, oldest first; those before a place."""
        return [msgspec.json.decode(text) for text in self.texts(before)]

    def recent(
        self, before: int, max_bytes: int, least: int
    ) -> tuple[list[Message], int]:
        """Return the last messages before a place, oldest first, and how many are left out.

        As many as have `max_bytes` of JSON together, but the last `least` in any case. What
        is left out is never loaded. They begin with a person's where that costs none of
        the `least`: providers want it so.
        """
        sql = (
            "SELECT seq, octet_length(body) FROM main.culet_message"
            " WHERE seq < ? ORDER BY seq DESC"
        )
        rows, size, kept = self.db.execute(sql, (before,)), 0, 0
        for _seq, length in rows:
            size += length
            if size > max_bytes and kept >= least:
                break
            kept += 1
        while least < kept < len(rows) and self._role_at(rows[kept - 1][0]) != "user":
            kept -= 1
        if not kept:
            return [], len(rows)
        sql = "SELECT body FROM main.culet_message WHERE seq >= ? AND seq < ? ORDER BY seq"
        found = self.db.execute(sql, (rows[kept - 1][0], before))
        return [msgspec.json.decode(body) for (body,) in found], len(rows) - kept

    def _role_at(self, place: int) -> Any:
        sql = (
            "SELECT json_extract(body, '$.role') FROM main.culet_message WHERE seq = ?"
        )
        return self.db.execute(sql, (place,))[0][0]

    def get(self, message_id: str) -> Message | None:
        """Return one message."""
        sql = "SELECT body FROM main.culet_message WHERE id = ?"
        rows = self.db.execute(sql, (message_id,))
        return None if not rows else msgspec.json.decode(rows[0][0])

    def roles(self) -> dict[str, str]:
        """Return id -> role, oldest first."""
        sql = (
            "SELECT id, json_extract(body, '$.role') FROM main.culet_message"
            " ORDER BY seq"
        )
        return dict(self.db.execute(sql))

    def last_assistant(self) -> Message | None:
        """Return the last assistant message."""
        sql = (
            "SELECT body FROM main.culet_message"
            " WHERE json_extract(body, '$.role') = 'assistant' ORDER BY seq DESC LIMIT 1"
        )
        rows = self.db.execute(sql)
        return None if not rows else msgspec.json.decode(rows[0][0])

    def with_call(self, call_id: str) -> Message | None:
        """Return the last message with a part for that tool call."""
        sql = (
            "SELECT body FROM main.culet_message WHERE instr(body, ?) ORDER BY seq DESC"
        )
        literal = msgspec.json.encode(call_id).decode()
        for (body,) in self.db.execute(sql, (literal,)):
            message: Message = msgspec.json.decode(body)
            if any(part.get("toolCallId") == call_id for part in message["parts"]):
                return message
        return None

    def last_id(self) -> str | None:
        """Return the id of the last message."""
        sql = "SELECT id FROM main.culet_message ORDER BY seq DESC LIMIT 1"
        rows = self.db.execute(sql)
        return None if not rows else str(rows[0][0])

    def put(self, messages: Iterable[Message]) -> None:
        """Upsert by id: a known one keeps its place."""
        for message in messages:
            body = msgspec.json.encode(message).decode()
            self.db.execute(_PUT, (message["id"], body))

    def put_at(self, place: int, message: Message) -> None:
        """Upsert one at a reserved place."""
        body = msgspec.json.encode(message).decode()
        self.db.execute(_PUT_AT, (place, message["id"], body))

    def delete(self, ids: Iterable[str]) -> None:
        """Delete messages."""
        for message_id in ids:
            sql = "DELETE FROM main.culet_message WHERE id = ?"
            self.db.execute(sql, (message_id,))

    def cut(self, after_id: str | None, place: int) -> None:
        """Delete what lies between a message and a later place."""
        self.db.execute(
            "DELETE FROM main.culet_message WHERE seq < ?2 AND seq >"
            " coalesce((SELECT seq FROM main.culet_message WHERE id = ?1), ?2)",
            (after_id, place),
        )

    def reserve(self) -> int:
        """Return a place after all others, which no other message will get."""
        sql = "INSERT INTO main.culet_message (id, body) VALUES ('', '') RETURNING seq"
        place = int(self.db.execute(sql)[0][0])
        self.db.execute("DELETE FROM main.culet_message WHERE id = ''")
        return place

    # ---- notes

    def note(self, request_id: str, note: Note) -> None:
        """Note a turn that will leave a message."""
        text = msgspec.json.encode(note).decode()
        self.db.execute(_KEEP, (_NOTE + request_id, text))

    def noted(self, request_id: str) -> Note | None:
        """Return the note of a turn."""
        sql = "SELECT value FROM main.culet_value WHERE key = ?"
        rows = self.db.execute(sql, (_NOTE + request_id,))
        return None if not rows else msgspec.json.decode(rows[0][0], type=Note)

    def all_noted(self) -> list[str]:
        """Return the ids of turns whose message is not stored for good, in their order."""
        sql = (
            "SELECT substr(key, ?2) FROM main.culet_value"
            " WHERE substr(key, 1, ?2 - 1) = ?1 ORDER BY"
            " CASE WHEN json_valid(value) THEN json_extract(value, '$.place') END"
        )
        params = (_NOTE, len(_NOTE) + 1)
        return [request_id for (request_id,) in self.db.execute(sql, params)]

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drop notes."""
        for request_id in request_ids:
            sql = "DELETE FROM main.culet_value WHERE key = ?"
            self.db.execute(sql, (_NOTE + request_id,))

    def drop_streams(self, stream_ids: Iterable[str]) -> None:
        """Delete what turns have streamed."""
        for stream_id in stream_ids:
            sql = "DELETE FROM main.culet_entry WHERE stream = ?"
            self.db.execute(sql, (stream_id,))

    # ---- what clients that come are told

    @property
    def failed(self) -> str | None:
        """The last turn, if it has failed: whoever comes is shown that."""
        found: str | None = self._value(_FAILED)
        return found

    def set_failed(self, request_id: str | None) -> None:
        """Keep it, or forget it."""
        self._set_value(_FAILED, request_id)

    @property
    def recovering(self) -> str | None:
        """The turn of which clients were told that it is about to be taken up again."""
        found: str | None = self._value(_RECOVERING)
        return found

    def set_recovering(self, request_id: str | None) -> None:
        """Keep it, or forget it."""
        self._set_value(_RECOVERING, request_id)

    # ---- what waits for a client or a person

    @property
    def armed(self) -> str | None:
        """The message in which a turn is to go on when no call of it waits any more."""
        found: str | None = self._value(_ARMED)
        return found

    def set_armed(self, message_id: str | None) -> None:
        """Keep it, or forget it."""
        self._set_value(_ARMED, message_id)

    @property
    def context(self) -> dict[str, Any]:
        """What the last turn was asked with: a continuation of it gets the same."""
        found: dict[str, Any] = self._value(_CONTEXT) or {}
        return found

    def set_context(self, payload: dict[str, Any] | None) -> None:
        """Keep it, or forget it."""
        self._set_value(_CONTEXT, payload or None)

    def _value(self, key: str) -> Any:
        sql = "SELECT value FROM main.culet_value WHERE key = ?"
        rows = self.db.execute(sql, (key,))
        try:
            return None if not rows else msgspec.json.decode(rows[0][0])
        except msgspec.DecodeError:
            return None  # none of them is worth an agent that does not start

    def _set_value(self, key: str, value: Any) -> None:
        if value is not None:
            self.db.execute(_KEEP, (key, msgspec.json.encode(value).decode()))
        elif self._value(key) is not None:
            self.db.execute("DELETE FROM main.culet_value WHERE key = ?", (key,))
