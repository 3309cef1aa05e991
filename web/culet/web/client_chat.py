"""The chat half of a connection: what is asked, what streams, what was said.

A turn that was asked over a socket which is lost is found again by the resume handshake;
one that is neither offered nor pending is asked for once more, under the same id: the
server replays a turn that it knows, and begins one that never arrived.
"""

from __future__ import annotations

from typing import Any, Final, final

import msgspec

from culet.kernel.core.size import size_of
from culet.kernel.errors import CallFailed, CuletError

from .client_answer import Answer
from .client_calls import decoded
from .client_line import Line
from .client_transcript import Fold, Transcript

Json = dict[str, Any]
_ASKING: Final = frozenset(("input-available", "approval-requested"))
OUTCOMES: Final = frozenset(("completed", "aborted", "error", "skipped"))


def waiting_calls(messages: list[Json]) -> list[Json]:
    """Return the parts of the last message that wait for a client or a person."""
    last = messages[-1]["parts"] if messages else []
    return [p for p in last if "toolCallId" in p and p.get("state") in _ASKING]


def result_frame(
    call_id: str,
    output: Any,
    error: str | None,
    *,
    go_on: bool,
    run_id: str | None = None,
) -> Json:
    """Return the frame that gives a tool call its result, or the error it ended in."""
    told = {"output": output} if error is None else {"errorText": error}
    state = "output-available" if error is None else "output-error"
    frame = {"type": "cf_agent_tool_result", "toolCallId": call_id, "toolName": ""}
    return {**frame, "state": state, **told, "autoContinue": go_on, **_of_run(run_id)}


def approval_frame(
    call_id: str, *, approved: bool, go_on: bool, run_id: str | None = None
) -> Json:
    """Return the frame that says whether a tool call may run."""
    frame = {"type": "cf_agent_tool_approval", "toolCallId": call_id}
    return {**frame, "approved": approved, "autoContinue": go_on, **_of_run(run_id)}


def _of_run(run_id: str | None) -> Json:
    return {} if run_id is None else {"runId": run_id}


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
        self._replaying: set[str] = set()  # acknowledged, and the replay still comes
        self._asked_before: set[str] = set()  # over sockets before
        self._stale: set[str] = set()  # others' turns: their end may have been missed
        # of frames without a number, over this socket
        self._counts: dict[str, int] = {}
        self._over: dict[str, None] = {}  # the last turns that ended
        self.is_there = False  # the agent has said what only a chat says

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

    def follow(self, request_id: str) -> Answer | None:
        """Return a reader of a turn that is under way, whoever asked for it."""
        fold = self.folds.get(request_id)
        if fold is None or request_id in self.answers:
            return self.answers.get(request_id)
        answer = self.answers[request_id] = Answer(fold, {}, "", self._bound, self)
        answer.replayed()
        return answer

    def replay(self, answer: Answer) -> bool:
        """Let the server say a turn again, for a reader that was too slow."""
        if not self._line.is_open or answer.request_id in self._replaying:
            return False
        self._reading[answer.request_id] = answer
        self._ack(answer.request_id)
        return True

    # ---- the socket

    def opened(self, probe_id: str) -> None:
        """A new socket: ask what streams, if an answer is waited for."""
        self._acked.clear()
        self._replaying.clear()
        self._counts.clear()
        for answer in (*self._reading.values(), *self.answers.values()):
            answer.replayed(cut=True)
        self._reading.clear()
        self._asked_before = {
            request_id
            for request_id, answer in self.answers.items()
            if answer.item is None or answer.item.sent
        }
        self._stale = self.folds.keys() - self.answers.keys()
        if self._asked_before:
            frame = {"type": "cf_agent_stream_resume_request", "probeId": probe_id}
            text = msgspec.json.encode(frame).decode()
            self._line.post(text, first=True, volatile=True)

    def too_large(self, size: int) -> None:
        """The socket went because of a message of `size` bytes, the largest it has carried.

        A question that is one would only end the next socket as well: it never arrives.
        """
        for answer in list(self.answers.values()):
            item = answer.item
            if item is not None and item.sent and size_of(answer.frame) >= size:
                self.transcript.drop(answer.fold, answer.question["id"])
                self._forget(answer.request_id)
                answer.end(CallFailed("the question is larger than the server takes"))

    def over(self, error: CuletError) -> None:
        """Nothing will be heard any more."""
        for answer in (*self._reading.values(), *self.answers.values()):
            if answer.outcome is None:
                answer.end(error)
        self.answers.clear()
        self.folds.clear()

    def _begin_replay(self, request_id: str) -> None:
        self._acked.add(request_id)
        self._replaying.add(request_id)
        self._counts[request_id] = 0

    def _ack(self, request_id: str) -> None:
        self._begin_replay(request_id)
        frame = {"type": "cf_agent_stream_resume_ack", "id": request_id}
        self._line.post(msgspec.json.encode(frame).decode(), volatile=True)

    # ---- what comes: each returns whether something changed

    def offered(self, request_id: str) -> None:
        """A turn streams and may be had from its first chunk on."""
        self._drop_stale(request_id)
        self._known(request_id)
        if request_id not in self._acked:
            self._ack(request_id)
        self._ask_again(request_id)

    def pending(self, request_id: str | None) -> None:
        """A turn is owed and has said nothing; it will be offered."""
        self._drop_stale(request_id)
        if request_id is not None:
            self._known(request_id)
        self._ask_again(request_id)

    def nothing(self) -> None:
        """Nothing is there to resume: what was asked has ended, or never arrived."""
        self._ask_again(None)

    def _drop_stale(self, but: str | None = None) -> None:
        """Others' turns that the server does not speak of any more have ended."""
        for request_id in self._stale - {but}:
            fold = self.folds.pop(request_id, None)
            if fold is not None:
                self.transcript.end(fold)
        self._stale = set()

    def _ask_again(self, but: str | None) -> None:
        """Ask once more, over this socket, for turns that were asked over another.

        The same id is the same turn: one that is known is replayed, not begun again.
        """
        for request_id in self._asked_before - self._acked - {but}:
            answer = self.answers.get(request_id)
            if answer is None:
                continue
            if answer.item is None:
                self._ack(request_id)
                continue
            self._begin_replay(request_id)
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
        self._note_replay(request_id, frame, done=done)
        if fold is None or (not done and chunk is None):
            return None
        if done:
            self._end(fold, frame.get("outcome"))
            if fold.outcome is None:
                return None
        return fold, seq, chunk

    def _note_replay(self, request_id: str, frame: Json, *, done: bool) -> None:
        """See whether a replay is over: its mark, its end, or a live frame says so."""
        goes_on = frame.get("replay") and not (done or frame.get("replayComplete"))
        if goes_on or request_id not in self._replaying:
            return
        self._replaying.discard(request_id)
        answer = self._reading.pop(request_id, None) or self.answers.get(request_id)
        if answer is not None:
            answer.replayed()

    def _known(self, request_id: str) -> None:
        """A turn is under way, of which nothing was heard yet."""
        if request_id not in self.folds and request_id not in self._over:
            self.folds[request_id] = Fold(request_id)

    def _fold(self, request_id: str, frame: Json) -> Fold:
        fold = self.folds.setdefault(request_id, Fold(request_id))
        if not fold.placed:
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
        chunk = decoded(body)
        if chunk is None:
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
        known = isinstance(outcome, str) and outcome in OUTCOMES
        fold.end(outcome if known else failed)
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

    def replaced(self, messages: list[Json], *, idle: bool) -> None:
        """The server's whole transcript has come; `idle`: no turn is under way."""
        if idle:
            self._drop_stale()
        mine = [
            (a.question, a.fold) for a in self.answers.values() if a.item is not None
        ]
        self.transcript.replace(messages, mine)

    def cleared(self) -> None:
        """The history was cleared."""
        self.transcript.clear()
