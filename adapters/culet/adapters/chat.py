"""The shell of a chat base: turns that are owed, their messages, what clients are told.

A request is one step: its messages are stored, the place of the reply is reserved, the
turn is owed, the other clients get the transcript. The turn writes its stream; the step
that ends it, however it ends, folds the stream into the assistant message. Clients get
the transcript after the last chunk and before the terminal frame.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, final

import msgspec

from culet.adapters import messages as rules
from culet.adapters.approvals import from_client
from culet.adapters.messages import Message
from culet.adapters.resume import Offers
from culet.adapters.submissions import SKIPPED, Wish
from culet.adapters.transcript import Note, Transcript
from culet.adapters.waiting import Waiting
from culet.kernel.core import clientframes as client
from culet.kernel.core import frames
from culet.kernel.endings import Ending, Subject, json_text
from culet.kernel.errors import CapacityError, StorageError, UsageError
from culet.kernel.node import Ambient, ambient
from culet.kernel.ports import Blob
from culet.kernel.sockets import Connection
from culet.kernel.streams import End, Stream, TurnView
from culet.kernel.turn import Turn

if TYPE_CHECKING:
    from culet.adapters.aichat import AIChatAgent

log = logging.getLogger("culet.adapters")
LANE: Final = "chat"
_TURNS: Final = (
    "SELECT what FROM job WHERE owner = ? AND kind = 'turn' AND lane = ?"
    " ORDER BY held IS NULL, due_at, id"
)
_BEGUN: Final = "SELECT begun FROM job WHERE owner = ? AND kind = 'turn' AND what = ?"
_STREAMS: Final = "SELECT id FROM fiber WHERE owner = ? AND kind = 'turn'"
_NAMED: Final = (
    "key IS NOT NULL OR ifnull(json_extract(metadata, '$.submission.named'), 0)"
)
_OF_TURNS: Final = (
    "FROM fiber WHERE owner = ? AND kind = 'turn' AND status <> 'running'"
)
_ENDED: Final = f"SELECT id, {_NAMED} {_OF_TURNS} AND completed_at <= ?"
_OLDEST: Final = f"SELECT min(completed_at) {_OF_TURNS} AND completed_at > ?"
_OLD: Final = f"SELECT id, {_NAMED} {_OF_TURNS} ORDER BY born DESC LIMIT 16 OFFSET ?"
_PENDING: Final = (
    "SELECT 1 FROM job WHERE owner = ? AND kind = 'turn' AND what = ? AND begun = 0"
)
_ADDED: Final = (  # by a submission, and no other turn that is owed is about it
    "SELECT a.value FROM fiber f, json_each(f.metadata, '$.submission.added') a"
    " WHERE f.owner = ?1 AND f.id = ?2 AND a.value NOT IN (SELECT m.value FROM fiber o,"
    " json_each(json_array(json_extract(o.metadata, '$.messageIds'),"
    " json_extract(o.metadata, '$.submission.ids'))) l, json_each(l.value) m"
    " WHERE o.owner = ?1 AND o.id <> ?2 AND o.status = 'running')"
)


class ChatResponse(msgspec.Struct, frozen=True, kw_only=True):
    """What `on_chat_response` is told of a turn that has ended."""

    request_id: str
    status: str
    message: Message | None = None
    continuation: bool = False
    error: str | None = None


@final
class Chat:
    """The chat of one live agent. Made anew each time that it wakes."""

    def __init__(self, agent: AIChatAgent) -> None:
        self.agent = agent
        self.node = agent._node
        self.tree = self.node.tree
        self.slot = self.node.slot
        self.transcript = Transcript(self.node.db)
        self.origins: dict[str, Connection] = {}  # who asked for a turn
        self.offers = Offers(self)
        self.waiting = Waiting(self)
        self._reconcile()

    def _reconcile(self) -> None:
        """Store the messages of turns that ended while this agent was not awake."""
        for request_id in self.transcript.all_noted():  # the newest last
            end = self.tree.end_of(self.slot, request_id)
            if end is None:
                continue
            try:
                self._keep(request_id, end)
            except StorageError:
                raise
            except (
                Exception
            ) as error:  # unreadable: that must not keep it from starting
                self.tree.kernel.report("message", self.node, error, name=request_id)
            self._note_failure(request_id, end)
        recovering = self.transcript.recovering
        if recovering and self.tree.end_of(self.slot, recovering) is not None:
            self.offers.recovered(recovering)
        self.tree.touched()

    # ---- asking for turns

    def accept(self, frame: client.ChatRequest, connection: Connection) -> None:
        """Take a client's request: one step. A known id is never a second turn."""
        if self.tree.endings.subject(self.slot, frame.id) is not None:
            self._again(frame.id, connection)
            return
        try:
            self.take(frame, connection.identity, connection)
        except CapacityError as error:
            text = str(error)
            connection.say(frames.chat_response(frame.id, text, done=True, error=True))

    def take(
        self,
        frame: client.ChatRequest,
        identity: Any,
        connection: Connection | None = None,
    ) -> None:
        """Owe the turn of a request under a new id: one step, in the name of `identity`.

        Raises `CapacityError` for more messages than a chat may have.
        """
        self.node.check()
        roles = self.transcript.roles()
        merged = rules.merge(roles, frame.messages)
        merged = merged._replace(put=self._honest(merged.put))
        self._check_room(roles, merged.put, len(merged.delete))
        fields: dict[str, Any] = {"trigger": frame.trigger}
        if frame.body:
            fields["body"] = frame.body
        if frame.client_tools:
            fields["clientTools"] = frame.client_tools
        if frame.trigger == "regenerate-message" and frame.messages:
            fields["leaf"] = frame.messages[-1]["id"]
        payload = _payload(fields, identity)
        with self.node.db.transaction():
            self.transcript.delete(merged.delete)
            self.transcript.put(merged.put)
            self.transcript.set_context(_context(payload))
            self._note(frame.id, None)
        ids = rules.trailing_user_ids(frame.messages)
        if connection is not None:
            self.origins[frame.id] = connection
        self._owe(frame.id, payload, {"messageIds": ids})
        view = self.view(frame.id)
        if connection is not None and view is not None:
            # also one that wants no frames of the protocol
            view.peers[connection] = None
        self.tell(without=connection)

    def _again(self, request_id: str, connection: Connection) -> None:
        """A request came twice: this client gets its stream, unless it hears it."""
        subject = self.tree.endings.subject(self.slot, request_id)
        if subject is not None and subject.kind == "turn":
            view = self.view(request_id)
            if view is None or connection not in view.peers:
                self.offers.replay(request_id, connection)

    def ask(
        self,
        messages: Sequence[Message],
        *,
        body: Mapping[str, Any] | None = None,
        wish: Wish | None = None,
        continues: Message | None = None,
    ) -> str:
        """Owe a turn that the agent itself asks for; returns its request id.

        With a `wish`, which nobody has made before, it is a submission.
        """
        self.node.check()
        roles = self.transcript.roles()
        self._check_room(roles, messages, 0)
        here = ambient.get()
        wished = None if wish is None else wish.id
        request_id = wished or self.tree.kernel.chance.id()
        fields: dict[str, Any] = {"trigger": "submit-message"}
        if body:
            fields["body"] = dict(body)
        if continues is not None and "clientTools" in self._context_fields:
            fields["clientTools"] = self._context_fields["clientTools"]
        payload = _payload(fields, None if here is None else here.identity)
        with self.node.db.transaction():
            self.transcript.put(messages)
            self.transcript.set_context(_context(payload))
            self._note(request_id, continues)
        about: dict[str, Any] = {"messageIds": rules.trailing_user_ids(messages)}
        if continues is not None:
            about = {"continuation": True}
        if wish is not None:
            ids = [m["id"] for m in messages]
            about |= wish.row(ids, [i for i in ids if i not in roles])
        self._owe(request_id, payload, about, None if wish is None else wish.key)
        self.tell()
        return request_id

    @property
    def _context_fields(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.transcript.context.get("fields") or {}
        return found

    def go_on_in(self, message: Message, connection: Connection | None) -> None:
        """Owe the turn that goes on in a message whose calls are all answered.

        It is asked with what its message was asked with, in the name of the same person.
        """
        request_id = self.tree.kernel.chance.id()
        payload = self.transcript.context or _payload({}, None)
        with self.node.db.transaction():
            self._note(request_id, message)
        if connection is not None:
            self.offers.expect(request_id, connection)
        self._owe(request_id, payload, {"continuation": True})

    def _note(self, request_id: str, continues: Message | None) -> None:
        place = self.transcript.reserve()
        note = Note(place, rules.reply_id(request_id))
        if continues is not None:
            note = Note(place, continues["id"], continuation=True, base=continues)
        self.transcript.note(request_id, note)

    def _owe(
        self,
        request_id: str,
        payload: dict[str, Any],
        about: dict[str, Any],
        key: str | None = None,
    ) -> None:
        try:
            self.tree.fibers.start_turn(
                self.node, request_id, name="chat", lane=LANE, payload=payload, key=key,
                metadata=about,
            )  # fmt: skip
        except StorageError as error:
            self.tree.fail(error)  # its messages stand already: half a step
            raise
        self._forget_old()

    def _forget_old(self) -> None:
        """Drop what turns long past have streamed: their messages say the same.

        Their rows go as well, but those with a key or an id that somebody gave: they are
        known until they are deleted.
        """
        keep = self.tree.kernel.limits.retained_turns
        old = self.tree.db.execute(_OLD, (self.slot, keep))
        if not old:
            return
        with self.node.db.transaction():
            self.transcript.drop_streams(turn for turn, _named in old)
        with self.tree.transaction():
            self._drop_rows(old)

    def sweep(self, before_ms: int) -> int | None:
        """Drop what turns have streamed that ended by then: their messages stay.

        Returns when the oldest turn has ended whose stream is kept; None: there is none.
        """
        old = self.tree.db.execute(_ENDED, (self.slot, before_ms))
        if old:
            with self._step():
                with self.node.db.transaction():
                    self.transcript.drop_streams(turn for turn, _named in old)
                    if self.transcript.failed in {turn for turn, _named in old}:
                        self.transcript.set_failed(None)
                with self.tree.transaction():
                    self._drop_rows(old)
        [(oldest,)] = self.tree.db.execute(_OLDEST, (self.slot, before_ms))
        return None if oldest is None else int(oldest)

    def _drop_rows(self, turns: Iterable[tuple[str, int]]) -> None:
        for turn, named in turns:
            if not named:
                sql = "DELETE FROM fiber WHERE owner = ? AND id = ?"
                self.tree.db.execute(sql, (self.slot, turn))

    def drop_turns(self, request_ids: Sequence[str]) -> None:
        """Forget turns that have ended, with what they have streamed: one step."""
        if not request_ids:
            return
        with self._step():
            with self.node.db.transaction():
                self.transcript.drop_streams(request_ids)
            with self.tree.transaction():
                for request_id in request_ids:
                    sql = "DELETE FROM fiber WHERE owner = ? AND id = ?"
                    self.tree.db.execute(sql, (self.slot, request_id))

    def withdraw(self, request_id: str, reason: str | None, *, begun: bool) -> None:
        """End a submission; one that has not begun takes back what it brought: a step."""
        subject = self.tree.endings.subject(self.slot, request_id)
        assert subject is not None  # its row was found in this step
        with self._step():
            if not begun:
                added = self.tree.db.execute(_ADDED, (self.slot, request_id))
                with self.node.db.transaction():
                    self.transcript.delete(message_id for (message_id,) in added)
            self.tree.endings.cancel(subject, reason)

    @contextmanager
    def _step(self) -> Iterator[None]:
        """What commits in two files: half of it restarts the tree from its record."""
        before = self.tree.barrier.count
        try:
            yield
        except StorageError as error:
            if self.tree.barrier.count != before:
                self.tree.fail(error)
            raise

    def add(
        self, messages: Sequence[Message], *, without: Connection | None = None
    ) -> None:
        """Upsert messages by id and tell the clients, but the one that has set them."""
        self.node.check()
        if without is not None:
            messages = self._honest(messages)
        self._check_room(self.transcript.roles(), messages, 0)
        with self.node.db.transaction():
            self.transcript.put(messages)
        self.tree.touched()
        self.tell(without=without)

    def _honest(self, messages: Sequence[Message]) -> list[Message]:
        """Return what a client has sent without calls that nobody has asked for."""
        get = self.transcript.get
        return [from_client(m, get(m["id"])) for m in messages]

    def _check_room(
        self, roles: Mapping[str, str], put: Sequence[Message], fewer: int
    ) -> None:
        limit = self.tree.kernel.limits.messages_per_chat
        fresh = sum(m["id"] not in roles for m in put)
        if len(roles) - fewer + fresh >= limit:
            msg = f"the chat has {len(roles)} messages, the limit is {limit}"
            raise CapacityError(msg)

    def refuse_inside_turn(self) -> None:
        """Refuse to wait for a turn from inside a turn of the same agent."""
        here = ambient.get()
        if here is None or here.node is not self.node:
            return
        if here.turn is not None or here.in_queue:  # or a delivery, in a turn's place
            msg = "a turn cannot wait for the next one: use submit_messages"
            raise UsageError(msg)

    # ---- a turn

    def superseded(self, request_id: str) -> bool:
        """Whether a turn was to answer messages that are there no more: none of them."""
        row = self.tree.fibers.get(self.slot, request_id, None)
        about = None if row is None else row.metadata
        ids = about.get("messageIds") if isinstance(about, dict) else None
        named = [i for i in ids or () if i]  # one without an id was never stored
        return bool(named) and all(self.transcript.get(i) is None for i in named)

    async def begin(self, turn: Turn) -> Note:
        """Give a turn what it works with; a run's input becomes a message."""
        note = self.transcript.noted(turn.request_id)
        if turn.run_id is not None and note is None:
            note = await self._begin_run(turn)
        if note is None:
            raise CapacityError("the chat was cleared")
        fields = turn.fields
        if turn.attempt == 1 and "leaf" in fields:
            self.transcript.cut(fields["leaf"], note.place)
            self.tree.touched()
        limits = self.tree.kernel.limits
        before, turn.omitted = self.transcript.recent(
            note.place, limits.transcript_bytes, limits.transcript_least
        )
        if turn.omitted:
            told = f"{turn.omitted} older messages are not loaded for {turn.request_id}"
            log.warning("%s: %s", self.node.path_text(), told)
        turn.messages = [
            m for m in before if note.continuation or m["id"] != note.message_id
        ]
        turn.trigger = fields.get("trigger", "submit-message")
        turn.body = fields.get("body") or {}
        turn.client_tools = fields.get("clientTools") or []
        turn.continuation = note.continuation
        turn.message_id = note.message_id
        return note

    def take_up(self, turn: Turn) -> None:
        """Let a run's turn go on where an answer was waited for: a pass of its own.

        `turn.messages` ends with what the passes before it have said, `turn.chunks()` is
        what earlier attempts have said in this one.
        """
        note = self.transcript.noted(turn.request_id)
        if note is None:
            return
        stream = self.tree.streams.open(self.slot, turn.request_id)
        chunks = [msgspec.json.decode(body) for body in stream.bodies()]
        base = rules.assistant_message(
            turn.message_id, chunks[: note.told], ended=None, decided=note.decided
        )
        others = [m for m in turn.messages if m["id"] != turn.message_id]
        turn.messages = others if base is None else [*others, base]
        turn.continuation = True
        turn._earlier = chunks[note.told :]

    async def _begin_run(self, turn: Turn) -> Note:
        assert turn.run_id is not None
        given = await self.agent._input_messages(turn)
        for message in given:
            if client.ui_messages([message]) is None:
                msg = "format_agent_tool_input returns a text or UI messages"
                raise UsageError(msg)
        note = self.transcript.noted(turn.request_id)
        if note is None:
            self._check_room(self.transcript.roles(), given, 0)
            with self.node.db.transaction():
                self.transcript.put(given)
                self.transcript.set_context(None)
                self._note(turn.request_id, None)
                note = self.transcript.noted(turn.request_id)
            self.tree.touched()
            self.tell()
        assert note is not None
        return note

    def store_reply(self, request_id: str) -> Message | None:
        """Store the message as it will be when the turn completes. Tells nobody."""
        message = self._fold(request_id, "completed")
        note = self.transcript.noted(request_id)
        if message is not None and note is not None:
            self.transcript.put_at(note.place, message)
            self.tree.touched()
        return message

    def ended(self, request_id: str, end: End) -> None:
        """A turn ended: its message is stored in this step, clients hear of it in order."""
        origin = self.origins.pop(request_id, None)
        note = self.transcript.noted(request_id)
        self.offers.over(request_id)
        self.waiting.forget(request_id)
        if note is None:
            return
        try:
            message = self._keep(request_id, end)
            self._note_failure(request_id, end)
            self.offers.recovered(request_id)
        except StorageError as error:  # stored when this agent wakes again
            self.tree.kernel.report("message", self.node, error, name=request_id)
            return
        everybody = note.continuation or origin is None
        tell = partial(self.tell, without=None if everybody else origin)
        self.tree.barrier.after.append(tell)
        if note.continuation and message is not None:
            self.tree.barrier.after.append(partial(self._tell_last, message))
        self.tree.touched()
        self.waiting.over(message, end.status)
        if self.agent._hears_response:
            result = ChatResponse(
                request_id=request_id, status=end.status, message=message,
                continuation=note.continuation, error=end.error,
            )  # fmt: skip
            ctx = Ambient(self.node)
            self.node.hook(ctx, self.agent.on_chat_response, result)

    def _note_failure(self, request_id: str, end: End) -> None:
        """Whoever comes is shown the last turn, if it has failed and none is owed."""
        failed = end.status in ("error", "interrupted")
        self.transcript.set_failed(request_id if failed else None)

    def _keep(self, request_id: str, end: End) -> Message | None:
        """Store a turn's message for good and drop its note."""
        note = self.transcript.noted(request_id)
        message = self._fold(request_id, end.status)
        with self.node.db.transaction():
            if message is not None and note is not None:
                self.transcript.put_at(note.place, message)
            self.transcript.forget([request_id])
        self.tree.touched()
        return message

    def so_far(self, request_id: str) -> Message | None:
        """Return the message with all that its turn has said, published or not."""
        stream = self.tree.streams.open(self.slot, request_id)
        stream.flush()
        return self._message(request_id, stream.bodies(), None)

    def shown(self, request_id: str) -> Message | None:
        """Return the message as far as its chunks are published; the rest comes live."""
        stream = self.tree.streams.open(self.slot, request_id)
        count = max(stream.published - 1, 0)
        return self._message(request_id, stream.bodies()[:count], None)

    def _fold(self, request_id: str, ended: str) -> Message | None:
        """Return the message that a turn leaves; None: it shows nothing, or was cleared."""
        stream = self.tree.streams.find(self.slot, request_id)
        if stream is None:  # ended in a former life: read it, keep no object
            stream = Stream(self.tree, self.slot, request_id, fresh=False)
        stream.flush()
        return self._message(request_id, stream.bodies(), ended)

    def _message(
        self, request_id: str, bodies: list[str], ended: str | None
    ) -> Message | None:
        note = self.transcript.noted(request_id)
        if note is None:
            return None
        chunks = [msgspec.json.decode(body) for body in bodies]
        message_id = note.message_id
        if not note.continuation:
            message_id = rules.message_id_of(chunks, message_id)
        return rules.assistant_message(
            message_id, chunks, ended=ended, base=note.base, decided=note.decided
        )

    # ---- what clients are told

    def tell(self, *, without: Connection | None = None) -> None:
        """Send the transcript to all clients but one."""
        if not any(c is not without for c in self.tree.sockets.of(self.slot)):
            return
        blob = Blob(frames.chat_messages(self.transcript.texts()))
        skipped = () if without is None else (without,)
        self.tree.sockets.push_all(self.slot, blob, without=skipped)

    def _tell_last(self, message: Message) -> None:
        """Send a message once more, behind the end of the turn that went on in it.

        A client that watched holds what it saw of the message against the transcript, and
        that may have begun with an answer of its own that was not the first.
        """

        def tell() -> None:
            blob = Blob(frames.message_updated(msgspec.json.encode(message).decode()))
            self.tree.sockets.push_all(self.slot, blob)

        self.tree.barrier.after.append(tell)
        self.tree.barrier.touched()

    # ---- which turn

    def turns(self) -> list[str]:
        """Return the turns that are owed: the one that runs, then the queue."""
        return [what for (what,) in self.tree.db.execute(_TURNS, (self.slot, LANE))]

    def begun(self, request_id: str) -> bool:
        """Whether a turn that is owed has begun, in this life or a former one."""
        rows = self.tree.db.execute(_BEGUN, (self.slot, request_id))
        return bool(rows and rows[0][0])

    def view(self, request_id: str) -> TurnView | None:
        """Return how the clients see a turn whose stream is in memory."""
        stream = self.tree.streams.find(self.slot, request_id)
        views = () if stream is None else stream.views
        return next((v for v in views if isinstance(v, TurnView)), None)

    # ---- stop and clear

    def cancel(self, request_id: str) -> None:
        """Stop a turn and what it waits for."""
        subject = self.tree.endings.subject(self.slot, request_id)
        if subject is not None and subject.kind in ("turn", "run"):
            self.tree.endings.cancel(subject, "stopped by the user")

    def clear(self, *, without: Connection | None = None) -> None:
        """Forget all messages; turns end, a run's with an error that says why."""
        self.node.check()
        with self._step():
            self._clear()
        skipped = () if without is None else (without,)
        blob = Blob(frames.CHAT_CLEAR)
        self.tree.sockets.push_all(self.slot, blob, without=skipped)
        self.node.hook(Ambient(self.node), self.agent.on_chat_cleared)

    def _clear(self) -> None:
        turns = self.turns()
        subjects = [self.tree.endings.subject(self.slot, t) for t in turns]
        self.transcript.forget(self.transcript.all_noted())
        if self.transcript.recovering is not None:
            self.offers.recovered(self.transcript.recovering)
        for subject in subjects:
            if subject is not None:
                self._drop(subject)
        streams = self.tree.db.execute(_STREAMS, (self.slot,))
        with self.node.db.transaction():
            self.transcript.delete(self.transcript.roles())
            self.transcript.drop_streams(s for (s,) in streams)
            self.transcript.set_failed(None)
            self.transcript.set_armed(None)
            self.transcript.set_context(None)
        self.tree.touched()

    def _drop(self, subject: Subject) -> None:
        """End a turn, and tell its end at once: before the clear, as its last word.

        Clients clear their list when they are told to. What came after that, a chunk that
        was not published yet, or an end, would begin a message anew.
        """
        if subject.kind == "run":
            text = "skipped: the chat was cleared"
            self.tree.endings.settle(subject, Ending.by("cleared", text), None)
            self.tree.stop_worker(subject.slot, subject.id, text)
        elif self.tree.db.execute(_PENDING, (subject.slot, subject.id)):
            self.tree.endings.cancel(subject, SKIPPED, Ending.by("skipped"))
        else:
            why = Ending.by("forgotten")
            self.tree.endings.cancel(subject, "the chat was cleared", why)
        stream, view = (
            self.tree.streams.find(self.slot, subject.id),
            self.view(subject.id),
        )
        if stream is None or stream.end is None or view is None:
            return
        everybody = self.tree.sockets.of(self.slot)
        reading = [c for c in everybody if c.replays(subject.id, "turn")]
        blob = Blob(*view.ended(stream.end, replay=False))
        for connection in [*view.peers, *reading]:
            connection.unfollow(subject.id, "turn")
            connection.push(blob, self.tree.barrier.count)
        view.peers.clear()


def _context(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a continuation of a turn is asked with: all but where it begins."""
    fields = {
        k: v for k, v in payload["fields"].items() if k not in ("leaf", "trigger")
    }
    return {**payload, "fields": fields}


def _payload(fields: Mapping[str, Any], identity: Any) -> dict[str, Any]:
    """Return what a turn's job holds; raises `UsageError` before anything is stored."""
    payload: dict[str, Any] = {"fields": dict(fields)}
    if identity is not None:
        payload["identity"] = identity
    json_text(payload)
    return payload
