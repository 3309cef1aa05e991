"""Mailboxes: what a parent says to a run of its that is at work.

A letter is a row of the tree, in the order of sending, until the run has ended: so it
waits for a turn that is queued, asleep or taken up again after a crash. The turn gets
each letter at least once, and again after a crash unless it has said `done`; the id tells
a letter that it knows. The sender may give the id: the same id is one letter, however
often it is sent. Letters are directives and small; progress goes the other way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, final

import msgspec
import trio

from .calls import json_bytes, stored_json
from .core.path import check_name
from .core.run import Status
from .errors import CapacityError, FacetAborted, NotFound

if TYPE_CHECKING:
    from .node import Node
    from .tree import Tree
    from .turn import Turn

_INSERT: Final = (
    "INSERT INTO mail (slot, run, id, body, sent_at) VALUES (?, ?, ?, ?, ?)"
)
_KNOWN: Final = "SELECT 1 FROM mail WHERE slot = ? AND run = ? AND id = ?"
_NEXT: Final = (
    "SELECT n, id, body, sent_at FROM mail WHERE slot = ? AND run = ?"
    " AND done_at IS NULL AND n > ? ORDER BY n LIMIT 1"
)
_WAITING: Final = (
    "SELECT count(*) FROM mail WHERE slot = ? AND run = ? AND done_at IS NULL"
)
_DONE: Final = (
    "UPDATE mail SET done_at = ?, body = 'null' WHERE slot = ? AND run = ? AND id = ?"
    " AND done_at IS NULL"
)
_FORGET: Final = (  # the eldest of those that are done: their ids are not known any more
    "DELETE FROM mail WHERE n IN (SELECT n FROM mail WHERE slot = ? AND run = ?"
    " AND done_at IS NOT NULL ORDER BY n DESC LIMIT -1 OFFSET ?)"
)
Key = tuple[str, str]


class Letter(msgspec.Struct, frozen=True, kw_only=True):
    """What a parent has sent to a run. `body` is any JSON value; `sent_at` epoch ms."""

    id: str
    body: Any
    sent_at: int


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a letter. `accepted`: it is stored now and will be given to the run.

    Else `known`: one of that id was accepted before; or the run has ended, as `status`
    says.
    """

    id: str
    accepted: bool
    known: bool
    status: Status


@final
class Mail:
    """The letters to the runs of one tree."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.db = tree.db
        self._news: dict[Key, trio.Event] = {}

    def send(self, node: Node, run_id: str, body: Any, letter_id: str | None) -> Sent:
        """Store a letter to a run of that agent, in one commit."""
        node.check()
        limits = self.tree.kernel.limits
        letter_id = self.tree.kernel.chance.id() if letter_id is None else letter_id
        check_name(letter_id)
        text = json_bytes(body, "a letter", limits.mail_bytes).decode()
        subject = self.tree.runs.subject(node.slot, run_id)
        run = self.tree.runs.get(node.slot, run_id)
        if subject is None or run is None:
            msg = f"there is no run {run_id!r}"
            raise NotFound(msg)
        key = subject.slot, run_id
        known = bool(self.db.execute(_KNOWN, (*key, letter_id)))
        if known or run.status != "running":
            return Sent(id=letter_id, accepted=False, known=known, status=run.status)
        if self.waiting(*key) >= limits.mail_waiting:
            msg = f"{limits.mail_waiting} letters wait for run {run_id!r} already"
            raise CapacityError(msg)
        with self.tree.transaction():
            self.db.execute(_INSERT, (*key, letter_id, text, self.tree.now()))
        self._ring(key)
        return Sent(id=letter_id, accepted=True, known=False, status="running")

    def waiting(self, slot: str, run_id: str) -> int:
        """Return how many letters are not done."""
        return int(self.db.execute(_WAITING, (slot, run_id))[0][0])

    def after(self, key: Key, number: int) -> tuple[int, Letter] | None:
        """Return the next letter that is not done, with its number; None: none so far."""
        rows = self.db.execute(_NEXT, (*key, number))
        if not rows:
            return None
        number, letter_id, body, sent_at = rows[0]
        return number, Letter(id=letter_id, body=stored_json(body), sent_at=sent_at)

    def done(self, key: Key, letter_id: str) -> bool:
        """A letter needs not be given again; False: it was done, or there is none."""
        keep = self.tree.kernel.limits.mail_known
        with self.tree.transaction():
            self.db.execute(_DONE, (self.tree.now(), *key, letter_id))
            landed = self.db.changes > 0
            if landed:
                self.db.execute(_FORGET, (*key, keep))
        return landed

    def news(self, key: Key) -> trio.Event:
        """Return what is set when a letter comes."""
        return self._news.setdefault(key, trio.Event())

    def _ring(self, key: Key) -> None:
        bell = self._news.pop(key, None)
        if bell is not None:
            bell.set()

    def over(self, key: Key) -> None:
        """A turn has ended: its letters went with its row."""
        self._news.pop(key, None)


@final
class Mailbox:
    """The letters of one turn, in order: iterate, or `take` what is there.

    Each is given once in an attempt, and again in the next unless it was `done`. While
    iterating a letter is done when the next one is asked for.
    """

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._key = turn._node.slot, turn.request_id
        self._given = 0
        self._open: Letter | None = None  # of the loop that iterates

    @property
    def waiting(self) -> int:
        """How many letters are not done, those that were given among them."""
        return self._mail.waiting(*self._key)

    def take(self) -> Letter | None:
        """Return the next letter if there is one. It is not done by that."""
        self._turn._node.check()
        found = self._mail.after(self._key, self._given)
        if found is None:
            return None
        self._given = found[0]
        return found[1]

    async def get(self) -> Letter:
        """Wait for the next letter. It is not done by that."""
        while (letter := self.take()) is None:
            await self._mail.news(self._key).wait()
        await trio.lowlevel.checkpoint_if_cancelled()
        return letter

    def done(self, letter: Letter | str) -> bool:
        """Say that a letter was carried out: no later attempt gets it. Never blocks.

        False: that was said before. Raises `FacetAborted` when the turn is over.
        """
        self._turn._node.check()
        if self._turn._stream.end is not None:
            raise FacetAborted("the turn is over")
        letter_id = letter if isinstance(letter, str) else letter.id
        return self._mail.done(self._key, letter_id)

    def __aiter__(self) -> Mailbox:
        return self

    async def __anext__(self) -> Letter:
        before, self._open = self._open, None
        if before is not None:
            self.done(before)
        self._open = letter = await self.get()
        return letter

    @property
    def _mail(self) -> Mail:
        return self._turn._node.tree.mail
