"""A chat as a client has it: a turn folded from its chunks, the transcript around it.

Pure. A chunk's number makes it known: live, in a replay or twice, it is applied once.
The transcript keeps the place of a reply from the moment in which its question is
asked, as the server does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

from culet.kernel.core.chunks import apply_chunk_to_parts

Json = dict[str, Any]


def as_message(found: object) -> Json | None:
    """Return what came as a message: an object with an id and a list of parts.

    Parts that are no objects are left out; None for what is no message.
    """
    if not isinstance(found, dict) or not isinstance(found.get("id"), str):
        return None
    parts = found.get("parts")
    listed = parts if isinstance(parts, list) else []
    kept = [part for part in listed if isinstance(part, dict)]
    return found if kept == parts else {**found, "parts": kept}


@final
class Fold:
    """One turn, folded from its chunks."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.message_id = f"reply-{request_id}"
        self.continuation = False
        self.placed = False  # its first frame, or its question, says where
        self.parts: list[Json] = []
        self.metadata: Json = {}
        self.next_seq = 0
        self.whole = True  # no chunk was missed
        self.error: str | None = None
        self.outcome: str | None = None

    def add(self, seq: int, chunk: Json) -> bool:
        """Apply one chunk; False: it was known."""
        if seq < self.next_seq:
            return False
        self.whole = self.whole and seq == self.next_seq
        self.next_seq = seq + 1
        kind = chunk.get("type")
        if kind == "start" and not self.continuation:
            named = chunk.get("messageId")
            self.message_id = named if isinstance(named, str) else self.message_id
        metadata = chunk.get("messageMetadata")
        if isinstance(metadata, dict):
            self.metadata = {**self.metadata, **metadata}
        self.parts = apply_chunk_to_parts(self.parts, chunk)
        return True

    def end(self, outcome: str) -> None:
        """The turn has ended: nothing of it streams any more."""
        self.outcome = outcome
        self.parts = [
            {**part, "state": "done"} if part.get("state") == "streaming" else part
            for part in self.parts
        ]

    @property
    def message(self) -> Json | None:
        """The assistant message so far; None while it shows nothing."""
        if all(part.get("type") == "step-start" for part in self.parts):
            return None
        made: Json = {"id": self.message_id, "role": "assistant", "parts": self.parts}
        return {**made, "metadata": self.metadata} if self.metadata else made


@final
class Transcript:
    """The messages of a chat, with turns that are under way in their places."""

    def __init__(self) -> None:
        self._entries: list[Json | Fold] = []

    def messages(self) -> list[Json]:
        """Return all messages, oldest first; one that streams as far as it is."""
        folded = {
            e.message_id for e in self._entries if isinstance(e, Fold) and e.parts
        }
        out: list[Json] = []
        for entry in self._entries:
            if isinstance(entry, Fold):
                message = entry.message
                if message is not None:
                    out.append(message)
            elif entry["id"] not in folded:
                out.append(entry)
        return out

    def put(self, message: Json) -> None:
        """Add a message, or replace the one with its id."""
        for at, entry in enumerate(self._entries):
            if isinstance(entry, Fold):
                if entry.message_id == message["id"]:
                    entry.parts = list(message["parts"])
                    return
            elif entry["id"] == message["id"]:
                self._entries[at] = message
                return
        self._entries.append(message)

    def begin(self, fold: Fold) -> None:
        """A turn is under way; its reply comes here."""
        fold.placed = True
        if fold.continuation:
            last = next((m for m in reversed(self.messages())
                         if m.get("role") == "assistant"), None)  # fmt: skip
            if last is not None:
                fold.message_id, fold.parts = last["id"], list(last["parts"])
        self._entries.append(fold)

    def end(self, fold: Fold) -> None:
        """A turn is over; what it said stays as a message."""
        message = fold.message
        known = message is not None and any(
            not isinstance(e, Fold) and e["id"] == message["id"] for e in self._entries
        )
        entries: list[Json | Fold] = []
        for entry in self._entries:
            if entry is fold:
                if message is not None and not known:
                    entries.append(message)
            elif (
                message is not None
                and fold.whole  # else what the server says is more
                and not isinstance(entry, Fold)
                and entry["id"] == message["id"]
            ):
                entries.append(message)
            else:
                entries.append(entry)
        self._entries = entries

    def drop(self, fold: Fold, message_id: str) -> None:
        """Take a turn, and the question that asked for it, out again."""
        self._entries = [
            e
            for e in self._entries
            if e is not fold and (isinstance(e, Fold) or e["id"] != message_id)
        ]

    def replace(
        self, messages: Iterable[Json], mine: Iterable[tuple[Json, Fold]]
    ) -> None:
        """Take the server's transcript, keeping what it cannot know yet.

        `mine` are this client's questions without an end, in their order.
        """
        folds = [e for e in self._entries if isinstance(e, Fold)]
        asked = {question["id"]: (question, fold) for question, fold in mine}
        entries: list[Json | Fold] = []
        placed: list[Fold] = []
        for message in messages:
            entries.append(message)
            if message["id"] in asked:
                fold = asked.pop(message["id"])[1]
                entries.append(fold)
                placed.append(fold)
        for question, fold in asked.values():
            entries += [question, fold]
            placed.append(fold)
        entries += [fold for fold in folds if not any(fold is p for p in placed)]
        self._entries = entries

    def clear(self) -> None:
        """Forget all messages, but the turns that are under way."""
        self._entries = [e for e in self._entries if isinstance(e, Fold)]
