"""The tool calls of one chat that wait for a client or for a person.

A turn whose calls wait has ended; its message shows them, and nothing runs. An answer is
one step: it is stored, the clients see the message, and when it was the last one that
was missing a turn is owed that goes on in the same message. While the turn still
streams, a result becomes a chunk of its stream and an approval a word in its note, so
that it is there live, in replay and after a crash. A turn of a run does not end while a
call of it waits: its parent would take half an answer for the whole.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, final

import msgspec
import trio

from culet.adapters import approvals as rules
from culet.adapters.approvals import ClientAnswer, Part
from culet.adapters.messages import Message
from culet.adapters.model import tool_name
from culet.adapters.toolledger import LEFT, UNCERTAIN, asked_about
from culet.kernel import Turn
from culet.kernel.core import clientframes as client
from culet.kernel.core import frames
from culet.kernel.core.effects import Verdict
from culet.kernel.effectrows import Row
from culet.kernel.ports import Blob
from culet.kernel.sockets import Connection

if TYPE_CHECKING:
    from culet.adapters.chat import Chat

log = logging.getLogger("culet.adapters")


@final
class Waiting:
    """What waits in one chat, in this life of its agent."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        self.transcript = chat.transcript
        self.hears: dict[str, Callable[[Mapping[str, Any]], object]] = {}  # turns
        self._news: dict[str, trio.Event] = {}  # of turns that are parked

    # ---- answers

    def answer(
        self,
        answer: ClientAnswer,
        connection: Connection | None,
        *,
        run_id: str | None = None,
    ) -> bool:
        """Take an answer: one step; whether it was taken, for the first one stands.

        With `run_id` it is for the call of that run, and says nothing beside.
        """
        return self._take(answer, connection, run_id=run_id, decided=False)

    def _take(
        self,
        answer: ClientAnswer,
        connection: Connection | None,
        *,
        run_id: str | None = None,
        decided: bool,
    ) -> bool:
        """Take an answer, whether it was taken; `decided`: in the name of the agent."""
        self.chat.node.check()
        if connection is not None and connection.readonly:
            log.info("ignored the answer of a readonly client")
            return False
        call = answer.tool_call_id
        found = self._streaming(call)
        request_id, message = found or (None, self.transcript.with_call(call))
        part = None if message is None else rules.call_part(message, call)
        if run_id is not None and request_id != run_id:
            return False
        if message is None or part is None or not (decided or self._may(part, answer)):
            log.info("ignored an answer to %s, which takes none", call)
            return False
        limit = self.chat.tree.kernel.limits.tool_output_bytes
        fresh = rules.answered(part, answer, output_bytes=limit)
        if fresh is None:
            log.info("ignored an answer to %s, which has one", call)
            if connection is not None and request_id is None:  # it may show its own
                body = msgspec.json.encode(message).decode()
                connection.say(frames.message_updated(body))
            return False
        if fresh["state"] == "approval-responded" and request_id is None:
            fresh = rules.late(fresh) if self._gone_on(message) else fresh
        if not decided:
            fresh = self._doubt(message, part, fresh)
        if request_id is not None:
            message = self._into_stream(request_id, fresh, answer)
        else:
            message = self._into_message(message, fresh)
        with self.chat.node.db.transaction():
            self._arm(message, answer)
        self.chat.tree.touched()
        body = msgspec.json.encode(message).decode()
        blob = Blob(frames.message_updated(body))
        # Behind the frames of a turn that has just ended: who watches it takes its message
        # from those, and the older published clients keep it against what came before.
        tell = partial(self.chat.tree.sockets.push_all, self.chat.slot, blob)
        self.chat.tree.barrier.after.append(tell)
        self.chat.tree.barrier.touched()
        if request_id is None:
            self.go_on(connection)
        else:
            self._wake(request_id)
        return True

    def _may(self, part: Part, answer: ClientAnswer) -> bool:
        """Whether such an answer is the client's to give: what the server runs is not."""
        if self.chat.agent._client_runs(tool_name(part) or "") is not False:
            return True
        approval = isinstance(answer, client.ToolApproval)
        return approval and part.get("state") == "approval-requested"

    def _streaming(self, call_id: str) -> tuple[str, Message] | None:
        """Return the turn that streams the message with this call, and the message."""
        for request_id in self.chat.turns():
            message = self.chat.so_far(request_id)
            if message is not None and rules.call_part(message, call_id) is not None:
                return request_id, message
        return None

    def _into_stream(
        self, request_id: str, fresh: Part, answer: ClientAnswer
    ) -> Message:
        chat = self.chat
        note = self.transcript.noted(request_id)
        assert note is not None
        said = chat.tree.streams.open(chat.slot, request_id).committed
        if note.base is not None and not said:  # it has not begun: this is its start
            base = rules.replaced(note.base, fresh)
            self.transcript.note(request_id, msgspec.structs.replace(note, base=base))
            self.transcript.put([base])
            return base
        if isinstance(answer, client.ToolApproval):
            told = {**note.decided, answer.tool_call_id: answer.approved}
            note = msgspec.structs.replace(note, decided=told)
            self.transcript.note(request_id, note)
        chunk = rules.chunk_of(fresh)
        if chunk is not None:
            turn = chat.tree.turns.live.get((chat.slot, request_id))
            stream = chat.tree.streams.open(chat.slot, request_id)
            if turn is not None:
                turn.say(chunk)
            else:  # it is about to be taken up again
                stream.stage(msgspec.json.encode(chunk).decode())
            stream.flush()
            hears = self.hears.get(request_id)
            if hears is not None:
                hears(chunk)
        message = chat.so_far(request_id)
        assert message is not None
        return message

    def _into_message(self, message: Message, fresh: Part) -> Message:
        message = rules.replaced(message, fresh)
        self.transcript.put([message])
        return message

    def _arm(self, message: Message, answer: ClientAnswer) -> None:
        if answer.auto_continue:
            self.transcript.set_armed(message["id"])
        tools = getattr(answer, "client_tools", None)
        if tools is not None and self.transcript.last_id() == message["id"]:
            context = self.transcript.context
            fields = {**context.get("fields", {}), "clientTools": tools}
            self.transcript.set_context({**context, "fields": fields})

    # ---- going on

    def of(self, message: Message) -> list[Part]:
        """Return the calls of a message that wait."""
        runs = self.chat.agent._client_runs
        return rules.waiting(message, lambda name: runs(name) is True)

    def go_on(self, connection: Connection | None = None) -> None:
        """Owe the turn that goes on in the last message, once nothing of it waits."""
        armed = self.transcript.armed
        if armed is None or self.chat.turns():
            return  # looked at again when that turn ends
        message = None
        if self.transcript.last_id() == armed:
            message = self.transcript.get(armed)
        if message is not None and self.of(message):
            return
        self.transcript.set_armed(None)
        self.chat.tree.touched()
        if message is not None:
            self.chat.go_on_in(message, connection)

    def over(self, message: Message | None, status: str) -> None:
        """A turn ended: answers that came while it streamed may have been the last."""
        armed = self.transcript.armed
        if armed is None:
            return
        mine = message is not None and message["id"] == armed
        if mine and (status != "completed" or not rules.ends_with_calls(message or {})):
            self.transcript.set_armed(None)  # stopped, or the model has gone on itself
            self.chat.tree.touched()
            return
        self.go_on()

    # ---- a turn of a run

    def resume(self, turn: Turn) -> None:
        """A turn that waited when its process ended waits from its first moment on."""
        note = self.transcript.noted(turn.request_id)
        turn.parked = note is not None and note.parked

    async def park(self, turn: Turn) -> bool:
        """Wait until no call of a run's turn waits any more; False: none did."""
        waited, questions = False, self.chat.tree.questions
        while True:
            message = self.chat.so_far(turn.request_id)
            calls = [] if message is None else self.of(message)
            news = self._news.setdefault(turn.request_id, trio.Event())
            doubts = self._doubts(message, calls)
            if calls and self._decided(turn, calls, doubts):
                waited = True
                continue
            told = [
                {
                    "toolCallId": part["toolCallId"],
                    "toolName": tool_name(part) or "",
                    "state": part["state"],
                    "input": part.get("input"),
                    **({"uncertain": True} if part["toolCallId"] in doubts else {}),
                }
                for part in calls
            ]
            if calls or waited or turn.says_waiting:
                questions.park(turn, told)
            if not calls:
                return waited
            if not waited:
                self._note(turn, parked=True)
            waited = True
            await news.wait()

    def _doubts(self, message: Message | None, calls: list[Part]) -> set[str]:
        """Return which of the calls may have been carried out already."""
        if message is None:
            return set()
        agent, found = self.chat.agent, set()
        for part in calls:
            call_id, name = part["toolCallId"], tool_name(part) or ""
            if asked_about(agent, name, message["id"], call_id) is not None:
                found.add(call_id)
        return found

    def _decided(self, turn: Turn, calls: list[Part], doubts: set[str]) -> bool:
        """Let the policies of those above decide what they can; whether it was anything.

        To do again what may be done already is for a person alone to allow.
        """
        assert turn.run_id is not None
        taken = False
        for part in calls:
            verdict = self.chat.tree.questions.verdict(turn, part["state"])
            if verdict == "approve" and part["toolCallId"] in doubts:
                continue
            answer = rules.decided(part, verdict)
            if answer is not None:
                taken = self.answer(answer, None, run_id=turn.run_id) or taken
        return taken

    def next_pass(self, turn: Turn) -> None:
        """Begin the next pass of a run's turn: it goes on in what it has said so far."""
        stream = self.chat.tree.streams.open(self.chat.slot, turn.request_id)
        stream.flush()
        self._note(turn, parked=False, told=stream.committed)
        self.chat.take_up(turn)

    def begun(self, turn: Turn) -> set[str]:
        """Return the approved calls that an attempt of before the ledger has begun."""
        note = self.transcript.noted(turn.request_id)
        return set() if note is None else set(note.begun)

    def ask_again(self, turn: Turn, call_id: str) -> None:
        """A call waits for a person who may have approved it before: that is used up."""
        note = self.transcript.noted(turn.request_id)
        if note is None:
            return
        told = {call: said for call, said in note.decided.items() if call != call_id}
        base = note.base
        part = None if base is None else rules.call_part(base, call_id)
        if base is not None and part is not None:
            base = rules.replaced(base, rules.asked_again(part))
            self.transcript.put([base])
        self._note(turn, decided=told, base=base)
        message = self.chat.so_far(turn.request_id)
        if message is not None:
            body = msgspec.json.encode(message).decode()
            blob = Blob(frames.message_updated(body))
            self.chat.tree.sockets.push_all(self.chat.slot, blob)

    def decided(
        self, row: Row, verdict: Verdict, value: Any, error: str | None
    ) -> bool:
        """Somebody has decided about a call in doubt; whether it waits for that."""
        call = row.tool_call_id or ""
        answer: ClientAnswer = client.ToolApproval(call, True, auto_continue=True)
        if verdict in ("error", "unknown"):
            text = UNCERTAIN if error is None else error
            answer = client.ToolResult(
                call, state="output-error", error_text=text, auto_continue=True
            )
        elif verdict == "result":
            answer = client.ToolResult(call, output=value, auto_continue=True)
        elif self._streaming(call) is None:
            message = self.transcript.with_call(call)
            if message is None or self._gone_on(message):
                return False
        return row.status == "asked" and self._take(answer, None, decided=True)

    def _gone_on(self, message: Message) -> bool:
        last = self.transcript.last_id()
        return last != message["id"] or bool(self.chat.turns())

    def _doubt(self, message: Message, part: Part, fresh: Part) -> Part:
        """Write into the ledger what a person said to a call in doubt."""
        agent, name = self.chat.agent, tool_name(part) or ""
        row = asked_about(agent, name, message["id"], part["toolCallId"])
        if row is None:
            return fresh
        effects = self.chat.tree.effects
        if fresh["state"] == "approval-responded":
            effects.grant(row)
            return fresh
        effects.settle(row, "unknown")
        return rules.failed(part, LEFT)

    def _note(self, turn: Turn, **fields: Any) -> None:
        note = self.transcript.noted(turn.request_id)
        if note is not None:
            note = msgspec.structs.replace(note, **fields)
            self.transcript.note(turn.request_id, note)
            self.chat.tree.touched()

    def _wake(self, request_id: str) -> None:
        news = self._news.pop(request_id, None)
        if news is not None:
            news.set()

    def forget(self, request_id: str) -> None:
        """A turn is over: nothing is kept for it."""
        self.hears.pop(request_id, None)
        self._news.pop(request_id, None)
