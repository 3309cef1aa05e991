"""`connect`: an agent on a server, as an object.

    async with connect("ws://127.0.0.1:8787/agents/supervisor/alice") as agent:
        await agent.call("ping", "hi")

Everything lives inside the `async with`: no task outlives it. The connection comes back
by itself, with back-off; state, runs and messages are folds that take each frame once,
however often it comes. Time limits are trio's (`trio.fail_after`).
"""

from __future__ import annotations

import ssl as tls
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, TypeVar, final, overload

import trio

from culet.kernel import AgentToolEvents
from culet.kernel.clock import Chance
from culet.kernel.core.limits import Limits
from culet.kernel.errors import CallFailed, ConnectionLost, Refused, UsageError
from culet.kernel.sendable import check_message

from .client_answer import Answer
from .client_calls import CallStream, encoded
from .client_chat import approval_frame, result_frame, waiting_calls
from .client_events import Events
from .client_line import Line
from .client_mirror import Mirror
from .client_socket import Renewed, address_of, renewing
from .client_transcript import as_message

Json = dict[str, Any]
T = TypeVar("T")
# A call of no method: its answer says that every frame before it was taken.
_FENCE: Final = "cf_agent_state"


@asynccontextmanager
async def connect(
    url: str,
    *,
    sub: Sequence[tuple[str, str]] = (),
    headers: Renewed = (),
    query: Mapping[str, str] | None = None,
    ssl: tls.SSLContext | None = None,
    identify: bool = True,
    limits: Limits | None = None,
    seed: int | None = None,
) -> AsyncIterator[RemoteAgent]:
    """Connect to the agent at `url`, or to the one below it at `sub` (class and name).

    `headers` go with the handshake (`{"authorization": "Bearer …"}`); no Origin is sent.
    An async function that returns them is asked before each attempt: for tokens that
    expire. An `OSError` of it is a lost connection, whatever else it raises ends this.
    Enters when the agent has said who it is (`identify=False`: when the socket is open,
    for agents that do not say it). Raises `UsageError` for a bad URL, `ConnectionLost`
    when the first attempt fails, `ConnectionEnded` when the server refuses for good.
    After that a lost connection comes back; one that the server ends for good makes
    everything that waits for the agent raise `ConnectionEnded`.
    """
    chance = Chance(seed)
    limits = limits or Limits()
    address = address_of(url, sub=sub, query=query, ssl=ssl, connection_id=chance.id())
    mirror = Mirror(limits, chance, identify=identify)
    line = Line(mirror, address, renewing(headers), limits, chance)
    mirror.listen(line)
    failure: BaseException | None = None
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(line.live)
            try:
                await mirror.welcome.wait()
                line.check()
                yield RemoteAgent(line, mirror, limits, chance)
            except BaseException as error:
                failure = error
                raise
            finally:
                line.leave()
                await mirror.gone.wait()
    except BaseExceptionGroup as group:
        # the body's own exception comes out as it is, not in a group
        ours = group.split(lambda e: e is failure or isinstance(e, trio.Cancelled))[1]
        if ours is not None or failure is None:
            raise
    if failure is not None:
        raise failure


@final
class RemoteAgent:
    """An agent over a connection. Made by `connect`; useless after it.

    What is known of the agent (`state`, `runs`, `messages`) is always current.
    """

    def __init__(
        self, line: Line, mirror: Mirror, limits: Limits, chance: Chance
    ) -> None:
        self._line, self._mirror = line, mirror
        self._limits, self._chance = limits, chance
        self._calls, self._chat = mirror.calls, mirror.chat
        self._state_lock = trio.Lock()

    # ---- what is known

    @property
    def name(self) -> str:
        """The agent's name, as it says itself."""
        return self._mirror.name

    @property
    def agent(self) -> str:
        """The segment of its class in URLs."""
        return self._mirror.agent

    @property
    def state(self) -> Any:
        """Its state; None while it has none."""
        return self._mirror.state

    @property
    def runs(self) -> AgentToolEvents:
        """Its runs, folded from all frames that ever came."""
        return self._mirror.runs

    @property
    def messages(self) -> list[Json]:
        """The transcript of a chat agent, a reply that streams as far as it is.

        A chat that is busy when one connects tells its history when the turn has ended.
        """
        return self._chat.transcript.messages()

    @property
    def is_chat(self) -> bool:
        """Whether the agent answers questions; known when it is `caught_up`."""
        return self._chat.is_there

    @property
    def is_connected(self) -> bool:
        """Whether a socket is open now."""
        return self._line.is_open

    @property
    def connections(self) -> int:
        """How often it was connected: more than 1 after a reconnect."""
        return self._line.connections

    async def changed(self) -> None:
        """Wait until something changes: state, runs, messages or the connection."""
        self._line.check()
        await self._mirror.changed.wait()
        self._line.check()

    async def until(self, wanted: Callable[[RemoteAgent], Any]) -> None:
        """Wait until `wanted(agent)` is true; it is asked after every change."""
        await trio.lowlevel.checkpoint()
        while not wanted(self):
            await self.changed()

    def events(self, *, known: bool = False) -> Events:
        """Return a reader of everything that happens from now on. Iterate over it.

        `known`: what is known already comes first, as events.
        A reader is never waited for: one that is `limits.client_events` behind gets a
        `Lagged` instead, and finds what is true in `state`, `runs` and `messages`.
        """
        reader = self._mirror.hub.reader(self._mirror.known() if known else ())
        self._line.check()
        return reader

    # ---- calls

    @overload
    async def call(self, method: str, *args: Any, result_type: type[T]) -> T: ...
    @overload
    async def call(self, method: str, *args: Any, result_type: Any = ...) -> Any: ...
    async def call(self, method: str, *args: Any, result_type: Any = Any) -> Any:
        """Call a method of the agent; the answer is decoded to `result_type`.

        Raises `CallFailed` with what the server told; `ConnectionLost` when the socket
        went after the call was sent (one not sent yet goes over the next socket);
        `RemoteProtocolError` for an answer of another type. A cancelled call that was
        sent goes on at the server.
        """
        return await self._calls.call(method, args, result_type)

    @overload
    def stream(self, method: str, *args: Any, item_type: type[T]) -> CallStream[T]: ...
    @overload
    def stream(
        self, method: str, *args: Any, item_type: Any = ...
    ) -> CallStream[Any]: ...
    def stream(self, method: str, *args: Any, item_type: Any = Any) -> CallStream[Any]:
        """Call a streaming method: iterate over its values; `.result` is its final one.

        A consumer that is slow makes the whole socket wait, unless an answer of a call
        is waited for; after `limits.client_pause_s` it is given up (`CapacityError`).
        """
        self._line.check()
        return self._calls.begin(method, args, item_type)

    async def send(self, message: str | bytes | Json) -> None:
        """Send a message of the app (a mapping as JSON); returns when it is written.

        Raises `UsageError` for what cannot be sent; `ConnectionLost` when the socket went
        while it was being written.
        """
        text = encoded(message) if isinstance(message, dict) else message
        check_message(text)
        await self._line.space()
        item = self._line.post(text)
        try:
            await item.written()
        except trio.Cancelled:
            self._line.retract(item)
            raise

    async def set_state(self, state: Any) -> None:
        """Set the agent's state; returns when the server has it, and `state` shows it.

        Of several clients that set it at one time, all end with the one that came last.
        Raises `Refused` when it would not, `ConnectionLost` when nobody knows: then
        `state` tells after the reconnect.
        """
        frame = encoded({"type": "cf_agent_state", "state": state, "echo": True})
        mirror = self._mirror
        async with self._state_lock:
            mirror.state_error = None
            with suppress(CallFailed):  # as it must: there is no such method
                await self._calls.call(_FENCE, (), Any, before=frame)
            if mirror.state_error is not None:
                raise Refused(mirror.state_error)

    # ---- chat

    async def ask(
        self,
        question: str | Json,
        *,
        body: Mapping[str, Any] | None = None,
        request_id: str | None = None,
    ) -> Answer:
        """Ask a chat agent; returns when the question is sent. Iterate over the answer.

        `question` is a text or a UI message; `body` are custom keys for the agent.
        """
        if isinstance(question, str):
            parts = [{"type": "text", "text": question}]
            question = {"id": self._chance.id(), "role": "user", "parts": parts}
        encoded(question)
        if as_message(question) is not question or "role" not in question:
            raise UsageError("a UI message has id, role and parts")
        await self._line.space()
        answer = self._chat.ask(
            request_id or self._chance.id(), question, dict(body or {})
        )
        self._mirror.touch()
        assert answer.item is not None
        try:
            await answer.item.gone.wait()
        except trio.Cancelled:
            self._chat.unask(answer)
            raise
        self._line.check()
        return answer

    async def caught_up(self) -> None:
        """Return when all that the agent tells who connects was taken.

        `state` is there on entering; `messages` and `turns` may come a moment later.
        Over as many sockets as it takes; raises `ConnectionEnded` when there is no more.
        """
        while True:
            try:
                await self._calls.call(_FENCE, (), Any)
            except ConnectionLost:
                continue
            except CallFailed:  # as it must: there is no such method
                return

    @property
    def turns(self) -> list[str]:
        """The request ids of the turns that are under way, whoever asked for them."""
        return list(self._chat.folds)

    def follow(self, request_id: str) -> Answer | None:
        """Return the answer of a turn that is under way, from its first chunk on."""
        return self._chat.follow(request_id)

    @property
    def waiting_calls(self) -> list[Json]:
        """The tool calls that wait: parts of the last message, then those of runs.

        One that is `input-available` wants a result, one that is `approval-requested` a
        yes or no. While a turn streams, the server may be about to run it itself; one that
        has become a run does not wait. A call of a run, however far below, has its
        `runId`: answer it with that.
        """
        runs = self.runs.runs_by_tool_call_id
        own = [c for c in waiting_calls(self.messages) if c["toolCallId"] not in runs]
        return own + self._mirror.questions.calls()

    async def answer_call(
        self,
        tool_call_id: str,
        output: Any = None,
        *,
        error: str | None = None,
        go_on: bool = True,
        run_id: str | None = None,
    ) -> bool | None:
        """Give a tool call its result, or the error that it ended in.

        The first answer of any client stands, a later one changes nothing. The turn goes
        on when no call of the message waits any more, unless `go_on` is False. With the
        `run_id` of a run below it is a call of that one: then it returns whether this
        answer was the first. Raises `Refused` when a gate, or the server, will not have
        it, and `ConnectionLost` when nobody knows; else it is sent, and returns None.
        """
        frame = result_frame(tool_call_id, output, error, go_on=go_on, run_id=run_id)
        return await self._answer(frame, run_id, tool_call_id)

    async def approve_call(
        self,
        tool_call_id: str,
        approved: bool = True,
        *,
        go_on: bool = True,
        run_id: str | None = None,
    ) -> bool | None:
        """Say whether a tool call may run; the first word of any client stands.

        `run_id` is as with `answer_call`.
        """
        frame = approval_frame(
            tool_call_id, approved=approved, go_on=go_on, run_id=run_id
        )
        return await self._answer(frame, run_id, tool_call_id)

    async def _answer(
        self, frame: Json, run_id: str | None, call_id: str
    ) -> bool | None:
        if run_id is None:
            await self.send(frame)
            return None
        text, questions = encoded(frame), self._mirror.questions
        await self._line.space()
        pending = questions.expect(run_id, call_id, self._line.post(text))
        try:
            return await pending.wait()
        except trio.Cancelled:
            if self._line.retract(pending.item):
                questions.forget(run_id, call_id, pending)
            raise  # one that was sent keeps its place: what is said to it is not the next's

    async def stop(self, request_id: str | None = None) -> None:
        """Stop a turn; without an id all that are under way."""
        ids = [request_id] if request_id is not None else self.turns
        for one in ids:
            await self._chat.stop(one)
        await trio.lowlevel.checkpoint()

    async def clear(self) -> None:
        """Clear the history; turns that are under way end."""
        await self.send({"type": "cf_agent_chat_clear"})
        self._chat.cleared()
        self._mirror.tell_messages()
