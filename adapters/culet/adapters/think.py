"""`Think`: a chat agent whose `on_chat_message` is written for you.

Give it a model, a system prompt and tools. One turn is a loop of steps: ask the model,
stream what it says, run the tools that it asked for, all at once, and ask again. What
cannot be taken back (a model call, a tool call) begins when all that led to it is
durable. A turn whose process ended goes on where it stood: finished steps and finished
tool calls are never repeated, a text that was cut goes on in the same part.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import AbstractContextManager, aclosing
from typing import Any, ClassVar, Final, cast

import trio

from culet.adapters import messages as rules
from culet.adapters.aichat import AIChatAgent
from culet.adapters.approvals import approved_calls
from culet.adapters.continuation import advance, standing, usage_json, usage_sum
from culet.adapters.model import (
    Finish,
    Model,
    ModelEvent,
    ModelRequest,
    ReasoningDelta,
    TextDelta,
    ToolCall,
    Usage,
    directive_chunk,
    to_model_messages,
)
from culet.adapters.spending import Call
from culet.adapters.toolcalls import ToolCalls, as_tools, specs
from culet.adapters.tooling import Tool
from culet.adapters.toolledger import told_to_model
from culet.kernel import Chunk, Letter, Turn
from culet.kernel.core.chunks import tool_input
from culet.kernel.errors import UsageError
from culet.kernel.tracing import NO_SPAN
from culet.kernel.turn import Stalled

_REASONS: Final = frozenset(
    {"stop", "length", "content-filter", "tool-calls", "error", "other"}
)


class Think(AIChatAgent):
    """Base of agents that think with a model; see the module.

    `max_steps` bounds the model calls of one turn. A model that says nothing for
    `stall_s` seconds is given up and asked again for the rest, as after a crash, with
    the same bounds: `limits.attempts` in a row in which it said nothing, `limits.tries`
    in all. None: only the model itself says when it waits in vain.
    """

    __culet_base__: ClassVar[bool] = True
    model: ClassVar[Model | None] = None
    system_prompt: ClassVar[str] = ""
    max_steps: ClassVar[int] = 10
    stall_s: ClassVar[float | None] = None

    def get_model(self) -> Model:
        """Return the model of the next turn; the default is the class's `model`."""
        if self.model is None:
            msg = f"{type(self).__name__} needs a model: set `model` or get_model"
            raise UsageError(msg)
        return self.model

    def get_system_prompt(self) -> str:
        """Return the system prompt of the next turn."""
        return self.system_prompt

    async def on_directive(self, letter: Letter) -> str:
        """Return what the model is told of a letter to this run; "": nothing.

        It hears it before its next step, as a user's message, once. A turn that would
        have ended takes one more step for it.
        """
        return rules.input_text(letter.body)

    def get_tools(self) -> Mapping[str, Any]:
        """Return name -> Tool, AgentTool or a typed function."""
        return {}

    def _client_runs(self, name: str) -> bool | None:
        one = as_tools(self.get_tools()).get(name)
        if one is not None:
            return isinstance(one, Tool) and one.client
        offered = self._chat.transcript.context.get("fields", {}).get("clientTools", ())
        return True if name in {t.get("name") for t in offered} else None

    async def on_chat_message(self, turn: Turn) -> AsyncIterator[Chunk]:
        """Answer with the model, step by step."""
        work = _Thinking(self, turn)
        at = work.at
        if not at.told:
            yield work.note({"type": "start"})
        if turn.continuation and not at.steps and not at.open:
            await work.run_approved()
        while True:
            if not at.open:
                async for chunk in work.directives():
                    yield chunk
            if not work.goes_on:
                break
            resumed = at.open and at.model_is_done  # its tools may have run already
            if not at.open:
                yield work.note({"type": "start-step"})
            if not at.model_is_done:
                work.pay()
                await self.durable()
                try:
                    async with aclosing(work.ask()) as said:
                        async for chunk in said:
                            yield work.note(chunk)
                except Stalled:
                    self._chat.offers.given_up(turn.request_id)
                    raise
                work.end_of_model()
                work.check_whole()
            if at.open:
                await work.run(resumed=resumed)
                yield work.note({"type": "finish-step"})
        yield work.note({"type": "finish", "finishReason": work.reason})
        turn.usage = usage_json(at.usage) if at.usage != Usage() else None


class _Thinking:
    """One turn of a Think: the model's events as chunks, and how far the turn is."""

    def __init__(self, agent: Think, turn: Turn) -> None:
        self.agent, self.turn = agent, turn
        self.at = standing(turn.chunks())
        self.model = agent.get_model()
        self.system = agent.get_system_prompt()
        tools = as_tools(agent.get_tools())
        self.calls = ToolCalls(agent, turn, tools, self.note)
        self.specs = specs(tools, turn.client_tools)
        self.reason = "tool-calls" if self.at.calls else "stop"
        self._asked: list[ToolCall] = []
        self._usage = Usage()
        self._call: Call
        self._used = rules.tool_call_ids(turn.messages) | set(self.at.asked)
        agent._chat.waiting.hears[turn.request_id] = self.note

    def note(self, chunk: Chunk) -> Chunk:
        """Keep account of a chunk that is said; returns it."""
        advance(self.at, chunk)
        return chunk

    @property
    def goes_on(self) -> bool:
        """Whether there is another step, or the rest of one, to do."""
        at = self.at
        if at.open:
            return True
        if at.steps == 0:  # but not before a call of the message has its answer
            return not self._waiting()
        if at.steps >= self.agent.max_steps or not (at.calls or at.directed):
            return False
        return not self._waiting()

    async def directives(self) -> AsyncGenerator[Chunk, None]:
        """Say what the parent of a run has sent meanwhile; each letter once.

        A letter is done when it is said: one that is known by its id was said before.
        """
        mailbox = self.turn.mailbox
        count = 0 if self.turn.run_id is None else mailbox.waiting
        for _ in range(count):  # what comes meanwhile has its time after the next step
            letter = mailbox.take()
            if letter is None:
                return
            if letter.id not in self.at.letters:
                text = await self.agent.on_directive(letter)
                if text:
                    yield self.note(directive_chunk(letter.id, text))
            mailbox.done(letter)

    def _waiting(self) -> set[str]:
        """Return the calls of the step that a client or a person has yet to answer."""
        at = self.at
        asked = {c.id for c in at.calls if self.calls.client_runs(c.name)}
        return (asked | at.requested) - at.settled

    async def run(self, *, resumed: bool) -> None:
        """Run the tools of the open step, but those that wait for somebody.

        `resumed`: an earlier attempt may have carried them out.
        """
        at = self.at
        done = at.settled | self._waiting()
        begun = [call.id for call in at.calls] if resumed else []
        await self.calls.run(at.calls, done, begun)

    async def run_approved(self) -> None:
        """Run the calls that a person has approved; that they begin is durable first."""
        turn = self.turn
        own = [m for m in turn.messages if m["id"] == turn.message_id]
        calls = [c for m in own for c in approved_calls(m)]
        calls = [c for c in calls if not self.calls.client_runs(c.name)]
        if any(call.id not in self.at.settled for call in calls):
            begun = self.agent._chat.waiting.begun(turn)
            await self.calls.run(calls, self.at.settled, begun)

    def _request(self) -> ModelRequest:
        turn = self.turn
        own = [m for m in turn.messages if m["id"] == turn.message_id]
        others = [m for m in turn.messages if m["id"] != turn.message_id]
        so_far = rules.assistant_message(
            turn.message_id, self.at.kept, ended=None, base=own[0] if own else None
        )
        said = [*others, so_far] if so_far is not None else others
        return ModelRequest(
            system=self.system, messages=tuple(to_model_messages(told_to_model(self.agent, said))),
            tools=self.specs, partial=self.at.partial,
        )  # fmt: skip

    def pay(self) -> None:
        """Reserve what the next call of the model may cost. Raises `OverBudget`."""
        self._call = Call(self.agent, self.model, self._request())

    def check_whole(self) -> None:
        """Raise `OverBudget` when the answer ended because the budget did."""
        self._call.check_whole(self.reason)

    def _span(self) -> AbstractContextManager[Any]:
        node, turn = self.agent._node, self.turn
        tracer = node.tree.kernel.tracer
        if tracer is None:
            return NO_SPAN
        run = turn.run_id or turn.request_id
        about = {"agent": node.path_text(), "run_id": run, "step": self.at.steps}
        return tracer.span("model", type(self.model).__name__, about, current=False)

    async def ask(self) -> AsyncGenerator[Chunk, None]:
        """Ask the model for the open step, or for the rest of it; yield what it says."""
        self._asked, self._usage = [], Usage()
        said = _closable(self.model.stream(self._call.request))
        stall_s = self.agent.stall_s
        heard = said if stall_s is None else _watched(said, stall_s)
        with self._span():
            async with aclosing(said), aclosing(heard):
                async for event in heard:
                    self._call.hear(event)
                    match event:
                        case TextDelta(text) if text:
                            for chunk in self._more("text", text):
                                yield chunk
                        case ReasoningDelta(text) if text:
                            for chunk in self._more("reasoning", text):
                                yield chunk
                        case ToolCall():
                            self._take(event)
                        case Usage():
                            self._usage = usage_sum(self._usage, event)
                        case Finish(reason):
                            self.reason = reason if reason in _REASONS else "other"

    def _more(self, kind: str, text: str) -> Iterator[Chunk]:
        """Yield a delta, in the open part of its kind or in a new one."""
        at = self.at
        if kind == "text" and at.open_reasoning is not None:
            yield {"type": "reasoning-end", "id": at.open_reasoning}
        if kind == "reasoning" and at.open_text is not None:
            yield {"type": "text-end", "id": at.open_text}
        part = at.open_text if kind == "text" else at.open_reasoning
        if part is None:
            part = f"{kind}-{at.steps}-{at.parts}"
            yield {"type": f"{kind}-start", "id": part}
        yield {"type": f"{kind}-delta", "id": part, "delta": text}

    def _take(self, call: ToolCall) -> None:
        number = len(self.at.asked) + len(self._asked)
        fresh = rules.unique_call_id(call.id, self._used, self.turn.message_id, number)
        self._used.add(fresh)
        given = tool_input(call.input)
        self._asked.append(ToolCall(id=fresh, name=call.name, input=given))

    def end_of_model(self) -> None:
        """Say in one go what ends the model's part: after a crash all of it is there, or none.

        So a tool call that is stored is one of all, and a step without tools is over
        with the model.
        """
        at = self.at
        self._call.settle()
        chunks: list[Chunk] = []
        if at.open_reasoning is not None:
            chunks.append({"type": "reasoning-end", "id": at.open_reasoning})
        if at.open_text is not None:
            chunks.append({"type": "text-end", "id": at.open_text})
        if self._usage != Usage():
            used = {"usage": usage_json(usage_sum(at.usage, self._usage))}
            chunks.append({"type": "message-metadata", "messageMetadata": used})
        for call in self._asked:
            chunks += self.calls.requests(call)
        if not self._asked:
            chunks.append({"type": "finish-step"})
        for chunk in chunks:
            self.turn.say(chunk)
            self.note(chunk)


async def _watched(
    events: AsyncGenerator[ModelEvent, None], stall_s: float
) -> AsyncGenerator[ModelEvent, None]:
    """Yield events as they come; raises `Stalled` when none comes for so long."""
    while True:
        with trio.move_on_after(stall_s) as silence:
            try:
                event = await anext(events)
            except StopAsyncIteration:
                return
        if silence.cancelled_caught:
            raise Stalled(f"the model said nothing for {stall_s} s")
        yield event


def _closable(events: AsyncIterator[ModelEvent]) -> AsyncGenerator[ModelEvent, None]:
    """Return the events as something that can be closed, as most iterators can."""
    if hasattr(events, "aclose"):
        return cast("AsyncGenerator[ModelEvent, None]", events)
    return _wrapped(events)


async def _wrapped(
    events: AsyncIterator[ModelEvent],
) -> AsyncGenerator[ModelEvent, None]:
    async for event in events:
        yield event
