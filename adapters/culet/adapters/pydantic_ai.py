"""A pydantic-ai agent as an agent of this kernel. Needs the package `pydantic-ai-slim`.

    class Critic(PydanticAgent):
        def get_agent(self):
            return pydantic_ai.Agent("openai:gpt-5", instructions="Be brief.")

It can be run as a tool like any other class. Its tools get the `Bridge` as `ctx.deps`
(unless `get_options` says other deps): `await ctx.deps.call(fn, *args)` runs a method of
this agent. Before each request to a model and each tool call, what the agent has written
is durable.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic_ai import Agent as Pydantic
from pydantic_ai import AgentRunResultEvent
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.messages import (
    FunctionToolCallEvent,
    FunctionToolResultEvent,
    PartDeltaEvent,
    PartEndEvent,
    PartStartEvent,
    TextPart,
    TextPartDelta,
    ThinkingPart,
    ThinkingPartDelta,
    ToolCallPart,
)
from pydantic_core import to_jsonable_python

from culet.kernel import Chunk, Turn

from .foreign import Bridge, ForeignAgent, Player, Result, prompt_of


class PydanticAgent(ForeignAgent):
    """An agent whose turn is one run of a pydantic-ai agent: write `get_agent`.

    A result that is a text is the run's summary; any other is its output. Usage is told
    as `inputTokens` and `outputTokens`.
    """

    def get_agent(self) -> Pydantic[Any, Any]:
        """Return the pydantic-ai agent of one turn."""
        raise NotImplementedError

    def get_prompt(self, turn: Turn) -> str:
        """Return what it is asked: the turn's input, as JSON if it is no text."""
        return prompt_of(turn.input)

    def get_options(self, turn: Turn) -> dict[str, Any]:
        """Return more arguments for its `run_stream_events`."""
        return {}

    def get_player(self, turn: Turn) -> Player[Chunk | Result]:
        """Return what plays this turn."""
        agent, prompt = self.get_agent(), self.get_prompt(turn)
        return partial(_play, agent, prompt, self.get_options(turn))


@dataclass
class _Durable(AbstractCapability[Any]):
    """What the tree has committed is on the disk before the world is touched."""

    bridge: Bridge

    async def before_model_request(self, ctx: Any, request_context: Any) -> Any:
        await self.bridge.durable()
        return request_context

    async def before_tool_execute(
        self, ctx: Any, *, call: Any, tool_def: Any, args: Any
    ) -> Any:
        await self.bridge.durable()
        return args


async def _play(
    agent: Pydantic[Any, Any], prompt: str, options: dict[str, Any], bridge: Bridge
) -> AsyncIterator[Chunk | Result]:
    given = {"deps": bridge, **options}
    given["capabilities"] = [*given.get("capabilities", ()), _Durable(bridge)]
    said = _Parts()
    async with agent.run_stream_events(prompt, **given) as events:
        async for event in events:
            if isinstance(event, AgentRunResultEvent):
                yield _result(event)
            else:
                for chunk in said.chunks(event):
                    yield chunk


def _result(event: AgentRunResultEvent[Any]) -> Result:
    output, usage = event.result.output, event.result.usage
    told = {"inputTokens": usage.input_tokens, "outputTokens": usage.output_tokens}
    if isinstance(output, str):
        return Result(None, output, told)
    return Result(to_jsonable_python(output), None, told)


class _Parts:
    """Turns events of pydantic-ai into UI message chunks."""

    def __init__(self) -> None:
        self._ids: dict[int, str] = {}  # of the parts of the answer that comes in
        self._count = 0

    def chunks(self, event: object) -> Iterator[Chunk]:
        """Return the chunks that say what one event says."""
        match event:
            case PartStartEvent(index=index, part=TextPart() | ThinkingPart() as part):
                self._count += 1
                self._ids[index] = f"p{self._count}"
                yield {"type": f"{_kind(part)}-start", "id": self._ids[index]}
                if part.content:
                    yield self._delta(index, _kind(part), part.content)
            case PartDeltaEvent(index=index, delta=TextPartDelta() as delta):
                yield self._delta(index, "text", delta.content_delta)
            case PartDeltaEvent(index=index, delta=ThinkingPartDelta() as delta):
                if delta.content_delta:
                    yield self._delta(index, "reasoning", delta.content_delta)
            case PartEndEvent(index=index, part=TextPart() | ThinkingPart() as part):
                yield {"type": f"{_kind(part)}-end", "id": self._ids[index]}
            case FunctionToolCallEvent(part=ToolCallPart() as call):
                yield {
                    "type": "tool-input-available",
                    "toolCallId": call.tool_call_id,
                    "toolName": call.tool_name,
                    "input": call.args_as_dict(),
                }
            case FunctionToolResultEvent():
                yield _answered(event)

    def _delta(self, index: int, kind: str, text: str) -> Chunk:
        return {"type": f"{kind}-delta", "id": self._ids[index], "delta": text}


def _kind(part: object) -> str:
    return "reasoning" if isinstance(part, ThinkingPart) else "text"


def _answered(event: FunctionToolResultEvent) -> Chunk:
    call_id, content = event.part.tool_call_id, to_jsonable_python(event.part.content)
    if event.part.outcome == "success":
        return {
            "type": "tool-output-available",
            "toolCallId": call_id,
            "output": content,
        }
    text = content if isinstance(content, str) else str(content)
    return {"type": "tool-output-error", "toolCallId": call_id, "errorText": text}
