"""What is known of an agent: the folds that its frames go into, and who is told.

Whatever comes, however often and over how many sockets, each frame counts once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, final
from urllib.parse import quote

import trio

from culet.kernel import AgentToolEvents, apply_agent_tool_event
from culet.kernel.clock import Chance
from culet.kernel.core.attach import PARAMETER, Known, known_text, noted
from culet.kernel.core.limits import Limits
from culet.kernel.errors import CuletError, UsageError

from . import client_events as told
from .client_calls import Calls, decoded
from .client_chat import Chat
from .client_events import Hub
from .client_line import Line
from .client_questions import RunQuestions
from .client_socket import Ending
from .client_transcript import as_message

Json = dict[str, Any]
_TOO_LARGE: Final = 1009


@final
class Mirror:
    """The listening half of a connection: the party of its line."""

    calls: Calls
    chat: Chat
    _line: Line

    def __init__(self, limits: Limits, chance: Chance, *, identify: bool) -> None:
        self.name = ""
        self.agent = ""
        self.state: Any = None
        self.state_error: str | None = None
        self.runs = AgentToolEvents.empty()
        self.questions = RunQuestions()
        self.hub = Hub(limits.client_events)
        self.welcome, self.gone = trio.Event(), trio.Event()
        self.changed = trio.Event()
        self._limits, self._chance, self._identify = limits, chance, identify
        self._state_follows = False
        self._known: dict[str, Known] = {}

    def listen(self, line: Line) -> None:
        """Be the party of this line."""
        self._line = line
        self.calls = Calls(line, self._limits, self._chance)
        self.chat = Chat(line, self._limits.client_values)

    # ---- what the line tells

    def target(self, resource: str) -> str:
        """Return where the next socket goes: it is told which frames are here already."""
        text = known_text(self._known)
        if not text:
            return resource
        mark = "&" if "?" in resource else "?"
        return f"{resource}{mark}{PARAMETER}={quote(text, safe='')}"

    def opened(self) -> None:
        """A socket is open."""
        self.chat.opened(self._chance.id(8))
        if not self._identify:
            self._greeted()

    def taken(self, message: str | bytes) -> None:
        """One message has come."""
        frame = decoded(message) if isinstance(message, str) else None
        kind = frame.get("type") if frame is not None else None
        handle = _HANDLERS.get(kind) if isinstance(kind, str) else None
        if handle is None or frame is None:
            self.tell(told.Message(data=message))
        else:
            handle(self, frame)

    async def room(self) -> None:
        """Wait for a stream that is full."""
        await self.calls.room()

    def lost(self, ending: Ending, retry_in_s: float) -> None:
        """The socket is gone, another one comes."""
        self.calls.lost(ending)
        self.questions.lost()
        if ending.code == _TOO_LARGE:
            self.chat.too_large(self._line.largest)
        self.tell(
            told.Disconnected(
                code=ending.code, reason=ending.reason, retry_in_s=retry_in_s
            )
        )

    def over(self, error: CuletError | None) -> None:
        """There will be no other socket."""
        last = error or UsageError("the connection was left")
        self.calls.over(last)
        self.questions.lost(last)
        self.chat.over(last)
        self.hub.end(error)
        self.welcome.set()
        self.gone.set()
        self.touch()

    # ---- frames

    def tell(self, event: told.Event) -> None:
        """Tell readers and waiters."""
        self.hub.tell(event)
        self.touch()

    def touch(self) -> None:
        """Wake who waits for a change."""
        self.changed.set()
        self.changed = trio.Event()

    def known(self) -> list[told.Event]:
        """Return what is known now, as if it had just happened."""
        out: list[told.Event] = []
        out.append(self._connected())
        if self.state is not None:
            out.append(told.StateChanged(state=self.state))
        for run_id, run in self.runs.runs_by_id.items():
            out.append(
                told.RunChanged(
                    run_id=run_id, kind="known", sequence=-1, chunk=None, run=run
                )
            )
        messages = self.chat.transcript.messages()
        if messages:
            out.append(told.MessagesChanged(messages=messages))
        return out

    def tell_messages(self) -> None:
        """Tell that the transcript is another."""
        if self.hub.heard:
            self.hub.tell(
                told.MessagesChanged(messages=self.chat.transcript.messages())
            )
        self.touch()

    def _greeted(self) -> None:
        self._line.connections += 1
        self.welcome.set()
        self.tell(self._connected())

    def _connected(self) -> told.Connected:
        count = self._line.connections
        return told.Connected(name=self.name, agent=self.agent, connections=count)

    def _on_identity(self, frame: Json) -> None:
        self.name, self.agent = str(frame.get("name")), str(frame.get("agent"))
        self._state_follows = self._identify and frame.get("stateFollows") is True
        if self._identify and not self._state_follows:
            self._greeted()

    def _on_state(self, frame: Json) -> None:
        if "state" not in frame:
            return
        self.state = frame["state"]
        if self._state_follows:
            self._state_follows = False
            self._greeted()
        own = frame.get("echo") is True
        self.tell(
            told.StateChanged(state=self.state, source="client" if own else "server")
        )

    def _on_state_error(self, frame: Json) -> None:
        self.state_error = str(frame.get("error"))

    def _on_rpc(self, frame: Json) -> None:
        self.calls.answer(frame)

    def _on_run(self, frame: Json) -> None:
        noted(self._known, frame)
        runs = apply_agent_tool_event(self.runs, frame)
        if runs is self.runs:
            return
        before, self.runs = self.runs, runs
        self.questions.taken(frame, runs)
        if self.hub.heard:
            self._tell_run(frame, before, runs)
        self.touch()

    def _tell_run(
        self, frame: Json, before: AgentToolEvents, runs: AgentToolEvents
    ) -> None:
        event = frame["event"]
        if event["kind"] == "cleared":
            gone = [r for r in before.runs_by_id if r not in runs.runs_by_id]
            self.hub.tell(told.RunsCleared(run_ids=gone))
            return
        body = event.get("body")
        self.hub.tell(
            told.RunChanged(
                run_id=event["runId"],
                kind=event["kind"],
                sequence=frame.get("sequence", 0),
                chunk=decoded(body) if isinstance(body, str) else None,
                run=runs.runs_by_id[event["runId"]],
                replay=frame.get("replay") is True,
            )
        )

    def _on_run_answer(self, frame: Json) -> None:
        self.questions.answered(frame)

    def _on_response(self, frame: Json) -> None:
        changed = self.chat.response(frame)
        if changed is None:
            return
        fold, seq, chunk = changed
        if chunk is not None:
            self.hub.tell(
                told.ChatChunk(request_id=fold.request_id, seq=seq, chunk=chunk)
            )
        if fold.outcome is not None:
            self.hub.tell(
                told.ChatEnded(
                    request_id=fold.request_id, outcome=fold.outcome, error=fold.error
                )
            )
        self.touch()

    def _on_messages(self, frame: Json) -> None:
        messages = frame.get("messages")
        if isinstance(messages, list):
            kept = [m for m in map(as_message, messages) if m is not None]
            self.chat.is_there = True
            self.chat.replaced(kept, idle=frame.get("connect") is True)
            self.tell_messages()

    def _on_message(self, frame: Json) -> None:
        message = as_message(frame.get("message"))
        if message is not None:
            self.chat.transcript.put(message)
            self.tell_messages()

    def _on_clear(self, _frame: Json) -> None:
        self.chat.cleared()
        self.tell_messages()

    def _on_resuming(self, frame: Json) -> None:
        self.chat.is_there = True
        self.chat.offered(str(frame.get("id")))

    def _on_pending(self, frame: Json) -> None:
        request_id = frame.get("id")
        self.chat.is_there = True
        self.chat.pending(request_id if isinstance(request_id, str) else None)

    def _on_none(self, _frame: Json) -> None:
        self.chat.is_there = True
        self.chat.nothing()

    def _on_other(self, _frame: Json) -> None:
        """Frames that tell nothing which is kept here."""


_HANDLERS: Final[dict[str, Callable[[Mirror, Json], None]]] = {
    "cf_agent_identity": Mirror._on_identity,
    "cf_agent_state": Mirror._on_state,
    "cf_agent_state_error": Mirror._on_state_error,
    "cf_agent_mcp_servers": Mirror._on_other,
    "rpc": Mirror._on_rpc,
    "agent-tool-event": Mirror._on_run,
    "cf_agent_run_answer": Mirror._on_run_answer,
    "cf_agent_use_chat_response": Mirror._on_response,
    "cf_agent_chat_messages": Mirror._on_messages,
    "cf_agent_message_updated": Mirror._on_message,
    "cf_agent_chat_clear": Mirror._on_clear,
    "cf_agent_stream_resuming": Mirror._on_resuming,
    "cf_agent_stream_pending": Mirror._on_pending,
    "cf_agent_stream_resume_none": Mirror._on_none,
    "cf_agent_chat_recovering": Mirror._on_other,
}
