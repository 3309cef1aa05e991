"""An agent of the OpenAI Agents SDK as an agent of this kernel. Needs `openai-agents`.

    class Critic(OpenAIAgent):
        def get_agent(self):
            return agents.Agent(name="critic", instructions="Be brief.", model="gpt-5")

It can be run as a tool like any other class. Its tools get the `Bridge` as
`wrapper.context` (unless `get_options` says another context): `await
wrapper.context.call(fn, *args)` runs a method of this agent. Before each request to a
model and each tool call, what the agent has written is durable. The SDK's own tracing is
off unless `get_options` gives a `run_config`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import msgspec
from agents import Agent as OpenAI
from agents import RunConfig, RunHooks, Runner
from agents.items import ToolCallItem, ToolCallOutputItem

from culet.kernel import Chunk, Turn

from .foreign import Bridge, ForeignAgent, Player, Result, prompt_of

_REASONING = ("response.reasoning_text", "response.reasoning_summary_text")


class OpenAIAgent(ForeignAgent):
    """An agent whose turn is one run of the OpenAI Agents SDK: write `get_agent`.

    A final output that is a text is the run's summary; any other is its output. Usage is
    told as `inputTokens` and `outputTokens`.
    """

    def get_agent(self) -> OpenAI[Any]:
        """Return the agent of the SDK that begins one turn."""
        raise NotImplementedError

    def get_prompt(self, turn: Turn) -> str:
        """Return what it is asked: the turn's input, as JSON if it is no text."""
        return prompt_of(turn.input)

    def get_options(self, turn: Turn) -> dict[str, Any]:
        """Return more arguments for `Runner.run_streamed`; not `hooks`: an agent has some."""
        return {}

    def get_player(self, turn: Turn) -> Player[Chunk | Result]:
        """Return what plays this turn."""
        agent, prompt = self.get_agent(), self.get_prompt(turn)
        return partial(_play, agent, prompt, self.get_options(turn))


class _Durable(RunHooks[Any]):
    """What the tree has committed is on the disk before the world is touched."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge

    async def on_llm_start(self, *_about: Any) -> None:
        await self._bridge.durable()

    async def on_tool_start(self, *_about: Any) -> None:
        await self._bridge.durable()


async def _play(
    agent: OpenAI[Any], prompt: str, options: dict[str, Any], bridge: Bridge
) -> AsyncIterator[Chunk | Result]:
    given = {
        "context": bridge,
        "run_config": RunConfig(tracing_disabled=True),
        **options,
    }
    result = Runner.run_streamed(agent, prompt, hooks=_Durable(bridge), **given)
    said = _Parts()
    try:
        async for event in result.stream_events():
            for chunk in said.chunks(event):
                yield chunk
    finally:
        result.cancel()  # nothing, when it is over
    yield _result(result)


def _result(result: Any) -> Result:
    output, usage = result.final_output, result.context_wrapper.usage
    told = {"inputTokens": usage.input_tokens, "outputTokens": usage.output_tokens}
    if isinstance(output, str):
        return Result(None, output, told)
    return Result(msgspec.to_builtins(output, enc_hook=_plain), None, told)


def _plain(value: Any) -> Any:
    dump = getattr(value, "model_dump", None)
    return str(value) if dump is None else dump(mode="json")


class _Parts:
    """Turns events of the SDK into UI message chunks."""

    def __init__(self) -> None:
        self._open: set[str] = set()

    def chunks(self, event: Any) -> Iterator[Chunk]:
        """Return the chunks that say what one event says."""
        if event.type == "raw_response_event":
            yield from self._words(event.data)
        elif event.type == "run_item_stream_event":
            yield from _tools(event.item)

    def _words(self, data: Any) -> Iterator[Chunk]:
        name, _, verb = data.type.rpartition(".")
        if verb not in ("delta", "done"):
            return
        if name == "response.output_text":
            kind = "text"
        elif name in _REASONING:
            kind = "reasoning"
        else:
            return
        part = getattr(data, "content_index", None)
        part = getattr(data, "summary_index", 0) if part is None else part
        key = f"{kind}-{data.item_id}-{part}"
        if verb == "delta":
            if key not in self._open:
                self._open.add(key)
                yield {"type": f"{kind}-start", "id": key}
            yield {"type": f"{kind}-delta", "id": key, "delta": data.delta}
        elif key in self._open:
            self._open.remove(key)
            yield {"type": f"{kind}-end", "id": key}


def _tools(item: Any) -> Iterator[Chunk]:
    if isinstance(item, ToolCallItem):
        yield {
            "type": "tool-input-available",
            "toolCallId": item.call_id,
            "toolName": item.tool_name,
            "input": _arguments(getattr(item.raw_item, "arguments", None)),
        }
    elif isinstance(item, ToolCallOutputItem):
        output = msgspec.to_builtins(item.output, enc_hook=_plain)
        yield {
            "type": "tool-output-available",
            "toolCallId": item.call_id,
            "output": output,
        }


def _arguments(text: Any) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, TypeError):
        return text
