"""The chat half of a connection: what is asked, what streams, answers to read.

A turn that was asked over a socket which is lost is found again by the resume handshake;
one that is neither offered nor pending is asked for once more, under the same id: the
server replays a turn that it knows, and begins one that never arrived.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final, Protocol, final

import msgspec
import trio

from culet.kernel.core.chunks import text_of
from culet.kernel.errors import CallFailed, CapacityError, CuletError

from .client_line import Line, Outgoing
from .client_transcript import Fold, Transcript

Json = dict[str, Any]
OUTCOMES: Final = frozenset(("completed", "aborted", "error", "skipped"))


class AnswerOwner(Protocol):
    """What an answer asks of its chat."""

    def replay(self, answer: Answer) -> bool:
        """Ask for the turn's replay; False while there is no socket."""
        ...

    async def stop(self, request_id: str) -> None:
        """Ask for the end of a turn."""
        ...


@final
class Answer:
    """The answer to one question. Iterate over its chunks; `done()` waits for its end.

    It goes on over reconnects. A reader that is slow is not waited for: what it missed
    is replayed to it when it asks for more.
    """

    def __init__(
        self, fold: Fold, question: Json, frame: str, bound: int, chat: AnswerOwner
    ) -> None:
        self.fold, self.question, self.frame = fold, question, frame
        self._bound, self._owner = bound, chat
        self._queue: deque[Json] = deque()
        self._next = 0  # the number of the first chunk that was not queued
        self._gap = False
        self._asked = False
        self._asked_at = -1
        self._wake = trio.Event()
        self._ended = trio.Event()
        self._error: CuletError | None = None
        self.item: Outgoing | None = None

    @property
    def request_id(self) -> str:
        """The id of the turn."""
        return self.fold.request_id

    @property
    def outcome(self) -> str | None:
        """`completed`, `aborted`, `error` or `skipped`; None while it goes on."""
        return self.fold.outcome

    @property
    def message(self) -> Json | None:
        """The assistant message, as far as it is."""
        return self.fold.message

    @property
    def text(self) -> str:
        """The text so far."""
        return text_of(self.fold.parts)

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> Json:
        await trio.lowlevel.checkpoint()
        while not self._queue:
            if self._error is not None:
                raise self._error
            if self._gap and not self._asked:
                self._ask_replay()
            elif self._ended.is_set() and not self._asked:
                self._check()
                raise StopAsyncIteration
            self._wake = trio.Event()
            await self._wake.wait()
        return self._queue.popleft()

    def _ask_replay(self) -> None:
        if self._asked_at == self._next:
            raise CapacityError("too slow: the server has forgotten what was missed")
        if self._owner.replay(self):
            self._asked, self._gap, self._asked_at = True, False, self._next

    async def done(self) -> Json | None:
        """Wait for the end and return the message; None when it shows nothing.

        Raises `CallFailed` for a turn that failed, not for one that was stopped.
        """
        await self._ended.wait()
        self._check()
        return self.fold.message

    async def stop(self) -> None:
        """Ask the server to stop the turn; its end comes as the answer's."""
        await self._owner.stop(self.request_id)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self.fold.outcome == "error":
            raise CallFailed(self.fold.error or "the turn failed")

    # ---- for the chat

    def put(self, seq: int, chunk: Json) -> None:
        """Take one chunk, if it is the next one and there is room for it."""
        if seq < self._next:
            return
        if seq > self._next or len(self._queue) >= self._bound:
            self._gap = True
            return
        self._queue.append(chunk)
        self._next = seq + 1
        self._wake.set()

    def replayed(self, *, cut: bool = False) -> None:
        """The replay that was asked for is complete; or cut off with its socket."""
        self._asked = False
        if cut:
            self._asked_at = -1
        self._gap = self._gap or self._next < self.fold.next_seq
        self._wake.set()

    def end(self, error: CuletError | None = None) -> None:
        """The turn has ended; or nothing more will be heard of it."""
        self._error = error
        self._ended.set()
        self._wake.set()


@final
class Chat:
    """The chat half of a connection: what is asked, what streams, what was said."""

    def __init__(self, line: Line, bound: int) -> None:
        self._line = line
        self._bound = bound
        self.transcript = Transcript()
        self.folds: dict[str, Fold] = {}  # that go on
        self.answers: dict[str, Answer] = {}  # of this client, that go on
        self._reading: dict[str, Answer] = {}  # that are replayed to a slow reader
        self._acked: set[str] = set()  # over this socket
        self._asked_before: set[str] = set()  # over sockets before
        self._counts: dict[
            str, int
        ] = {}  # of frames without a number, over this socket
        self._over: dict[str, None] = {}  # the last turns that ended

    # ---- to ask

    def ask(self, request_id: str, question: Json, body: Json) -> Answer:
        """Ask for a turn."""
        inner = {**body, "messages": [question], "trigger": "submit-message"}
        text = msgspec.json.encode(inner).decode()
        frame = {
            "type": "cf_agent_use_chat_request",
            "id": request_id,
            "init": {"method": "POST", "body": text},
        }
        fold = Fold(request_id)
        answer = Answer(
            fold, question, msgspec.json.encode(frame).decode(), self._bound, self
        )
        answer.item = self._line.post(answer.frame)
        self.folds[request_id] = fold
        self.answers[request_id] = answer
        self.transcript.put(question)
        self.transcript.begin(fold)
        return answer

    def unask(self, answer: Answer) -> bool:
        """Take a question back that was not sent; False: it was."""
        if answer.item is None or not self._line.retract(answer.item):
            return False
        self.transcript.drop(answer.fold, answer.question["id"])
        self._forget(answer.request_id)
        answer.fold.outcome = "aborted"
        answer.end()
        return True

    async def stop(self, request_id: str) -> None:
        """Ask the server to stop a turn; one that was not asked yet is taken back."""
        answer = self.answers.get(request_id)
        if answer is not None and self.unask(answer):
            return
        frame = {"type": "cf_agent_chat_request_cancel", "id": request_id}
        await self._line.post(msgspec.json.encode(frame).decode()).written()

    def replay(self, answer: Answer) -> bool:
        """Let the server say a turn again, for a reader that was too slow."""
        if not self._line.is_open:
            return False
        self._reading[answer.request_id] = answer
        self._ack(answer.request_id)
        return True

    # ---- the socket

    def opened(self, probe_id: str) -> None:
        """A new socket: ask what streams, if an answer is waited for."""
        self._acked.clear()
        self._counts.clear()
        for answer in (*self._reading.values(), *self.answers.values()):
            answer.replayed(cut=True)
        self._reading.clear()
        self._asked_before = {
            request_id
            for request_id, answer in self.answers.items()
            if answer.item is not None and answer.item.sent
        }
        if self._asked_before:
            frame = {"type": "cf_agent_stream_resume_request", "probeId": probe_id}
            text = msgspec.json.encode(frame).decode()
            self._line.post(text, first=True, volatile=True)

    def over(self, error: CuletError) -> None:
        """Nothing will be heard any more."""
        for answer in (*self._reading.values(), *self.answers.values()):
            if answer.outcome is None:
                answer.end(error)
        self.answers.clear()
        self.folds.clear()

    def _ack(self, request_id: str) -> None:
        self._acked.add(request_id)
        self._counts[request_id] = 0
        frame = {"type": "cf_agent_stream_resume_ack", "id": request_id}
        self._line.post(msgspec.json.encode(frame).decode(), volatile=True)

    # ---- what comes: each returns whether something changed

    def offered(self, request_id: str) -> None:
        """A turn streams and may be had from its first chunk on."""
        if request_id not in self._acked:
            self._ack(request_id)
        self._ask_again(request_id)

    def pending(self, request_id: str | None) -> None:
        """A turn is owed and has said nothing; it will be offered."""
        self._ask_again(request_id)

    def nothing(self) -> None:
        """Nothing is there to resume: what was asked has ended, or never arrived."""
        self._ask_again(None)

    def _ask_again(self, but: str | None) -> None:
        """Ask once more, over this socket, for turns that were asked over another.

        The same id is the same turn: one that is known is replayed, not begun again.
        """
        for request_id in self._asked_before - self._acked - {but}:
            answer = self.answers.get(request_id)
            if answer is not None:
                self._acked.add(request_id)
                self._counts[request_id] = 0
                self._line.post(answer.frame, volatile=True)

    def response(self, frame: Json) -> tuple[Fold, int, Json | None] | None:
        """Take one frame of a turn: the turn, and the chunk if it was new.

        None: nothing changed. A turn whose `outcome` is set has just ended.
        """
        request_id = frame.get("id")
        if not isinstance(request_id, str):
            return None
        over = request_id in self._over
        fold = None if over else self._fold(request_id, frame)
        body, done = frame.get("body"), frame.get("done") is True
        chunk = None
        seq = 0
        if frame.get("error"):
            if fold is not None:
                fold.error = str(body or "the turn failed")
        elif isinstance(body, str) and body:
            seq, chunk = self._chunk(request_id, frame, body, fold)
        if frame.get("replayComplete") or (done and frame.get("replay")):
            reading = self._reading.pop(request_id, None)
            if reading is not None:
                reading.replayed()
        if fold is None or (not done and chunk is None):
            return None
        if done:
            self._end(fold, frame.get("outcome"))
            if fold.outcome is None:
                return None
        return fold, seq, chunk

    def _fold(self, request_id: str, frame: Json) -> Fold:
        fold = self.folds.get(request_id)
        if fold is None:
            fold = self.folds[request_id] = Fold(request_id)
            fold.continuation = frame.get("continuation") is True
            self.transcript.begin(fold)
        return fold

    def _chunk(
        self, request_id: str, frame: Json, body: str, fold: Fold | None
    ) -> tuple[int, Json | None]:
        """Apply a chunk; return its number, and the chunk if it was new."""
        seq = frame.get("seq")
        if not isinstance(seq, int):
            seq = self._counts.get(request_id, 0)
            self._counts[request_id] = seq + 1
        try:
            chunk = msgspec.json.decode(body)
        except msgspec.DecodeError:
            return seq, None
        if not isinstance(chunk, dict):
            return seq, None
        answer = self.answers.get(request_id) or self._reading.get(request_id)
        new = fold is not None and fold.add(seq, chunk)
        if answer is not None:
            answer.put(seq, chunk)
        return seq, chunk if new else None

    def _end(self, fold: Fold, outcome: Any) -> None:
        if outcome == "recovering":
            return  # the server goes on with it
        failed = "error" if fold.error is not None else "completed"
        fold.end(outcome if outcome in OUTCOMES else failed)
        self.transcript.end(fold)
        answer = self.answers.get(fold.request_id)
        self._forget(fold.request_id)
        if answer is not None:
            answer.end()

    def _forget(self, request_id: str) -> None:
        self.folds.pop(request_id, None)
        self.answers.pop(request_id, None)
        self._over[request_id] = None
        while len(self._over) > self._bound:
            del self._over[next(iter(self._over))]

    def replaced(self, messages: list[Json]) -> None:
        """The server's whole transcript has come."""
        mine = [(answer.question, answer.fold) for answer in self.answers.values()]
        self.transcript.replace(messages, mine)

    def cleared(self) -> None:
        """The history was cleared."""
        self.transcript.clear()
