"""`AIChatAgent`: an agent that people chat with, and that can be run as a tool.

Write `on_chat_message`, an async generator of UI chunks. Messages, streams that clients
resume, stop, clear, the queue of turns and their recovery are the base's. A turn whose
process ended goes on as the same turn: `turn.attempt` is more than 1 and
`turn.chunks()` is what was said already.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, ClassVar, Final, Literal, cast

import msgspec
import trio

from culet.adapters import chat_http, notice
from culet.adapters import messages as rules
from culet.adapters.approvals import ClientAnswer
from culet.adapters.chat import LANE, Chat, ChatResponse
from culet.adapters.messages import Message
from culet.adapters.submissions import Submission, Submissions, TurnStatus, Wish
from culet.kernel import (
    Agent,
    AgentToolRun,
    Chunk,
    Progress,
    Request,
    Response,
    Turn,
)
from culet.kernel.core import clientframes as client
from culet.kernel.core import frames
from culet.kernel.core.chunks import text_of
from culet.kernel.core.effects import Verdict
from culet.kernel.core.status import ended_by
from culet.kernel.effectrows import Row as EffectRow
from culet.kernel.endings import Ending
from culet.kernel.errors import NotFound, UsageError
from culet.kernel.sockets import Connection
from culet.kernel.state import READONLY
from culet.kernel.streams import End

log = logging.getLogger("culet.adapters")


class TurnResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a turn ended that was waited for; `skipped`: it was cleared before it began."""

    request_id: str
    status: TurnStatus
    error: str | None = None


class AgentToolRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What `format_agent_tool_input` is told beside the input."""

    run_id: str
    identity: Any = None


class ChatRecovery(msgspec.Struct, frozen=True, kw_only=True):
    """A turn that is about to go on after its process ended, or its model fell silent.

    `kind` is `retry` when nothing of it was stored, else `continue`.
    """

    request_id: str
    attempt: int
    kind: Literal["retry", "continue"]
    partial_text: str
    partial_parts: list[dict[str, Any]]
    snapshot: Any
    messages: list[Message]


class ChatRecoveryOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What `on_chat_recovery` may choose. A partial with tool results is always kept."""

    go_on: bool = True
    persist: bool = True


class AIChatAgent(Agent):
    """Base of chat agents; see the module."""

    __culet_base__: ClassVar[bool] = True
    turn_lane = LANE
    turn_frames = True
    resumable = True

    _chat: Chat
    _hears_response: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        """Refuse a subclass that hides what the base needs."""
        super().__init_subclass__()
        ours = "__culet_base__" in vars(cls)
        for name in () if ours else vars(cls).keys() & _OWN:
            msg = f"{cls.__name__}.{name} hides a member of AIChatAgent"
            raise UsageError(msg)
        cls._hears_response = cls.on_chat_response is not AIChatAgent.on_chat_response

    # ---- hooks

    async def on_chat_message(self, turn: Turn) -> AsyncIterator[Chunk]:
        """Answer `turn.messages`: an async generator of UI chunks."""
        msg = f"{type(self).__name__} has no on_chat_message"
        raise UsageError(msg)
        yield {}

    async def on_chat_response(self, result: ChatResponse) -> None:
        """Called once when a turn has ended in this life of the agent."""

    async def on_chat_recovery(self, ctx: ChatRecovery) -> ChatRecoveryOptions | None:
        """Called before a turn goes on after a crash, or its model fell silent; None: it does.

        It has `limits.job_timeout_s`. What it raises ends the turn: nobody would know
        whether it was to go on.
        """
        return None

    async def on_chat_cleared(self) -> None:
        """Called when the history was cleared; runs are kept unless this clears them."""

    def format_agent_tool_input(self, input: Any, request: AgentToolRequest) -> Any:  # noqa: A002
        """Return what a run's input is for the model: a text, or UI messages."""
        return rules.input_text(input)

    def get_agent_tool_output(self, run_id: str) -> Any:
        """Return the output of a run, a JSON value; None: it has a summary only."""
        return None

    def get_agent_tool_summary(self, run_id: str, output: Any) -> str:
        """Return the summary of a run: the text of its answer, else its output."""
        message = self._chat.transcript.get(rules.reply_id(run_id))
        text = text_of(message["parts"]) if message else ""
        if text or output is None:
            return text
        return output if isinstance(output, str) else _json(output)

    def format_detached_finish(self, run: AgentToolRun) -> str:
        """Return what the model is told of a detached run that has ended; "": nothing."""
        return notice.finish_text(run)

    def format_detached_milestone(self, run: AgentToolRun, progress: Progress) -> str:
        """Return what is said of a milestone that a detached run has reached; "": nothing."""
        return notice.milestone_text(run, progress)

    async def on_request(self, request: Request) -> Response:
        """Answer `GET …/get-messages` and the chat over HTTP (`…/chat`).

        An override calls this for what is not its own.
        """
        if request.path.rstrip("/").rpartition("/")[2] == "get-messages":
            body = f"[{','.join(self._chat.transcript.texts())}]"
            return Response(body.encode(), 200, {"content-type": "application/json"})
        answer = await chat_http.answer(self._chat, request)
        return answer or await super().on_request(request)

    # ---- what an agent does with its chat

    @property
    def messages(self) -> list[Message]:
        """The stored UI messages, oldest first; a copy."""
        return self._chat.transcript.all()

    async def save_messages(
        self,
        messages: Any,  # a list, or a function of the stored messages
        *,
        body: dict[str, Any] | None = None,
    ) -> TurnResult:
        """Add messages, run a turn after those that are queued, and wait for its end.

        A function gets the stored messages and returns the new ones. Cancelling the
        caller does not stop the turn.
        """
        self._chat.refuse_inside_turn()
        given = messages(self.messages) if callable(messages) else messages
        return await self._joined(self._chat.ask(_checked(given), body=body))

    async def submit_messages(
        self,
        messages: Sequence[Message],
        *,
        submission_id: str | None = None,
        idempotency_key: str | None = None,
        metadata: Any = None,
        body: dict[str, Any] | None = None,
    ) -> Submission:
        """Owe a turn and return at once; a known id or key is that turn, whatever it holds.

        `metadata` is kept with it. Raises `UsageError` for no messages, and when id and
        key are of two submissions. See `submissions`.
        """
        given = _checked(messages)
        if not given:
            raise UsageError("submit_messages wants at least one message")
        wish = Wish(id=submission_id, key=idempotency_key, metadata=metadata)
        wish.check(self._node.tree.kernel.limits.shown_bytes)
        self._node.check()
        known = self.submissions.known(wish)
        request_id = (
            self._chat.ask(given, body=body, wish=wish)
            if known is None
            else known.request_id
        )
        await trio.lowlevel.checkpoint_if_cancelled()
        found = self.submissions.get(request_id)
        if found is None:
            raise NotFound("the submission was deleted meanwhile")
        return msgspec.structs.replace(found, accepted=known is None)

    @property
    def submissions(self) -> Submissions:
        """The turns that `submit_messages` has asked for: look, cancel, forget."""
        return Submissions(self._chat)

    async def add_messages(self, messages: Sequence[Message]) -> None:
        """Upsert messages by id, without a turn; the clients see them."""
        self._chat.add(_checked(messages))
        await trio.lowlevel.checkpoint_if_cancelled()

    async def continue_last_turn(
        self, *, body: dict[str, Any] | None = None
    ) -> TurnResult:
        """Run a turn that goes on in the last assistant message."""
        self._chat.refuse_inside_turn()
        last = self._chat.transcript.last_assistant()
        if last is None:
            raise UsageError("there is no assistant message to go on in")
        return await self._joined(self._chat.ask([], body=body, continues=last))

    async def clear_messages(self) -> None:
        """Forget the history; turns that go on are stopped, clients are told."""
        self._chat.clear()
        await trio.lowlevel.checkpoint_if_cancelled()

    async def _joined(self, request_id: str) -> TurnResult:
        row = await self._node.tree.fibers.join(self._node.slot, request_id)
        skipped = ended_by(row) == "skipped"
        status: TurnStatus = "skipped" if skipped else row.status
        return TurnResult(request_id=row.id, status=status, error=row.error)

    # ---- a turn

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        """Drive `on_chat_message` for a chat turn or a run."""
        self._chat.waiting.resume(turn)
        await self._chat.offers.arrived(turn.request_id)
        if turn.run_id is None and self._chat.superseded(turn.request_id):
            self._chat.transcript.forget([turn.request_id])
            text = "skipped: what it was to answer was deleted"
            self._node.tree.turns.end(turn, Ending.by("skipped", text))
            return
        note = await self._chat.begin(turn)
        if turn.attempt > 1 and not await self._goes_on(turn):
            return
        begun, parked = bool(turn.chunks()), note.parked
        if note.told:
            self._chat.take_up(turn)
        while True:
            if not parked:
                async with aclosing(cast(Any, self.on_chat_message(turn))) as chunks:
                    async for chunk in chunks:
                        is_start = chunk.get("type") == "start"
                        if not begun:
                            begun = True
                            first = chunk if is_start else {"type": "start"}
                            yield self._start(first, turn)
                            self._chat.offers.announce(turn.request_id, first=True)
                        if not is_start:  # a later one would begin the message anew
                            yield chunk
            if turn.run_id is None or not (
                await self._chat.waiting.park(turn) or parked
            ):
                break
            parked = False
            self._chat.waiting.next_pass(turn)
        if self._chat.transcript.noted(turn.request_id) is None:
            return  # cleared meanwhile
        self._chat.store_reply(turn.request_id)
        if turn.run_id is not None:
            await self._result(turn, turn.run_id, note.message_id)

    def _start(self, chunk: Chunk, turn: Turn) -> Chunk:
        """Name the message that this stream makes; a continuation goes on in its own."""
        if turn.continuation:
            return {k: v for k, v in chunk.items() if k != "messageId"}
        turn.message_id = chunk.get("messageId") or turn.message_id
        return {**chunk, "messageId": turn.message_id}

    async def _goes_on(self, turn: Turn) -> bool:
        """Ask the hook whether a turn goes on after a crash; if not, it ends here."""
        told = turn.chunks()
        turn.message_id = rules.message_id_of(told, turn.message_id)
        self._chat.offers.announce(turn.request_id, first=not told)
        message = rules.assistant_message(turn.message_id, told, ended=None)
        parts = message["parts"] if message else []
        ctx = ChatRecovery(
            request_id=turn.request_id, attempt=turn.attempt,
            kind="continue" if parts else "retry", partial_text=text_of(parts),
            partial_parts=parts, snapshot=turn.snapshot, messages=turn.messages,
        )  # fmt: skip
        choice = await self._chosen(ctx)
        if choice.go_on:
            self._chat.offers.recovered(turn.request_id)
            return True
        if not choice.persist and not rules.has_tool_results(parts):
            self._chat.transcript.forget([turn.request_id])
        self._node.tree.turns.end(turn, Ending.by("not-resumed"))
        return False

    async def _chosen(self, ctx: ChatRecovery) -> ChatRecoveryOptions:
        limit = self._node.tree.kernel.limits.job_timeout_s
        with trio.move_on_after(limit):
            return await self.on_chat_recovery(ctx) or ChatRecoveryOptions()
        raise TimeoutError(f"on_chat_recovery took more than {limit} s")

    async def _input_messages(self, turn: Turn) -> list[Message]:
        assert turn.run_id is not None
        request = AgentToolRequest(run_id=turn.run_id, identity=turn.identity)
        value = await _value(self.format_agent_tool_input(turn.input, request))
        return rules.input_messages(value, turn.run_id)

    async def _result(self, turn: Turn, run_id: str, message_id: str) -> None:
        """Set output and summary of a run, from what its author's hooks say."""
        if turn.output is None:
            turn.output = await _value(self.get_agent_tool_output(run_id))
        if turn.summary is None:
            value = self.get_agent_tool_summary(run_id, turn.output)
            turn.summary = await _value(value)

    # ---- the kernel's extension points

    async def _notify_finish(self, run: AgentToolRun, source: Any) -> None:
        """The model takes a turn about a detached run that has ended; once."""
        text = await _value(self.format_detached_finish(run))
        if text:
            source = source if isinstance(source, str) else notice.SOURCE
            key = notice.finish_key(run)
            said = notice.message(key, "user", text, run, source)
            await self.submit_messages([said], idempotency_key=key)

    async def _notify_milestone(
        self, run: AgentToolRun, progress: Progress, *, react: bool
    ) -> None:
        """The chat shows a milestone, or the model takes a turn about it; once."""
        text = await _value(self.format_detached_milestone(run, progress))
        if not text:
            return
        key, role = (
            notice.milestone_key(run, progress),
            "user" if react else "assistant",
        )
        said = notice.message(
            key, role, text, run, notice.SOURCE, milestone=progress.milestone
        )
        if react:
            await self.submit_messages([said], idempotency_key=key)
        else:
            await self.add_messages([said])

    async def _prepare(self) -> None:
        self._chat = Chat(self)

    def _client_runs(self, name: str) -> bool | None:
        """Whether the client carries out a tool; None: only `on_chat_message` knows."""
        return None

    def _effect_decided(
        self, effect: EffectRow, verdict: Verdict, value: Any, error: str | None
    ) -> bool:
        return self._chat.waiting.decided(effect, verdict, value, error)

    def _hello(self, connection: Connection) -> list[str]:
        return self._chat.offers.hello(connection)

    def _left(self, connection: Connection) -> None:
        self._chat.offers.leave(connection)

    def _answered(self, run_id: str, answer: ClientAnswer) -> bool:
        return self._chat.waiting.answer(answer, None, run_id=run_id)

    def _sweep(self, before_ms: int) -> int | None:
        return self._chat.sweep(before_ms)

    def _ended(self, stream_id: str, end: End) -> None:
        self._chat.ended(stream_id, end)

    def _frame(self, connection: Connection, frame: Any) -> bool:
        if connection.readonly and isinstance(frame, _CHANGES):
            self._refuse(connection, frame)
            return True
        match frame:
            case client.ChatRequest():
                self._chat.accept(frame, connection)
            case client.Cancel():
                self._chat.cancel(frame.id)
            case client.Clear():
                self._chat.clear(without=connection)
            case client.ChatMessages():
                self._chat.add(frame.messages, without=connection)
            case client.ResumeRequest():
                self._chat.offers.probe(frame.probe_id, connection)
            case client.ResumeAck():
                self._chat.offers.acknowledge(frame.id, connection)
            case client.ToolResult() | client.ToolApproval():
                self._chat.waiting.answer(frame, connection)
            case _:
                return False
        return True

    def _refuse(self, connection: Connection, frame: Any) -> None:
        """Tell a client that may only look; it may show already what it has asked for."""
        log.info("refused %s of a readonly client", type(frame).__name__)
        if isinstance(frame, client.ChatRequest):
            told = frames.chat_response(frame.id, READONLY, done=True, error=True)
            connection.say(told)
        if not isinstance(frame, client.Cancel) and connection.protocol:
            kept = self._chat.transcript.texts()
            connection.say(frames.chat_messages(kept))


_CHANGES: Final = (client.ChatRequest, client.Cancel, client.Clear, client.ChatMessages)


def _checked(messages: Sequence[Message]) -> list[Message]:
    """Return the messages; raises `UsageError` for what is no list of UI messages."""
    found = client.ui_messages(list(messages))
    if found is None or not all(m["id"] for m in found):
        msg = "messages are UI messages: mappings with id, role and parts"
        raise UsageError(msg)
    return found


async def _value(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


_OWN = frozenset(
    [
        "messages",
        "save_messages",
        "submit_messages",
        "submissions",
        "add_messages",
        "continue_last_turn",
        "clear_messages",
        "on_turn",
        "turn_lane",
        "turn_frames",
        "_chat",
        "_prepare",
        "_client_runs",
        "_effect_decided",
        "_hello",
        "_left",
        "_answered",
        "_ended",
        "_sweep",
        "_frame",
        "_start",
        "_chosen",
        "_goes_on",
        "_input_messages",
        "_result",
        "_joined",
        "_notify_finish",
        "_notify_milestone",
    ]
)
