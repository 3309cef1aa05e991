"""The chat completions format: a request as JSON, and the events of a streamed answer.

Pure. It is the format that most servers speak, and they differ: calls without ids or
without an index, the same index for all, arguments as an object, reasoning under two
names, no `[DONE]`, `stop` where tool calls were made. All of that is understood here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, final

import msgspec

from culet.adapters.model import (
    Finish,
    Json,
    ModelEvent,
    ModelMessage,
    ModelRequest,
    ReasoningDelta,
    TextDelta,
    ToolSpec,
    Usage,
)
from culet.adapters.remote import ModelCut, ModelUnavailable, said_by, shortened
from culet.adapters.wire import GO_ON, Asked, object_of, safe_ids, schema_of
from culet.kernel.core.limits import MODEL_EVENT_BYTES
from culet.kernel.core.sse import Event

_REASONS: Final = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool-calls",
    "function_call": "tool-calls",
    "content_filter": "content-filter",
}
_CALL_BYTES: Final = 64  # that a call counts beside its arguments


def messages_of(request: ModelRequest, *, prefill: bool) -> list[dict[str, Json]]:
    """Return the messages of a request, a cut answer's text as the last one said.

    `prefill`: the server goes on in a last message of the assistant; otherwise it is
    asked to.
    """
    ids = safe_ids(request.messages)
    out: list[dict[str, Json]] = []
    if request.system:
        out.append({"role": "system", "content": request.system})
    out += [_message(message, ids) for message in request.messages]
    if request.partial:
        out.append({"role": "assistant", "content": request.partial})
        if not prefill:
            out.append({"role": "user", "content": GO_ON})
    return out


def tools_of(specs: Iterable[ToolSpec]) -> list[dict[str, Json]]:
    """Return the tools of a request."""
    return [
        {
            "type": "function",
            "function": {
                "name": spec.name,
                "description": spec.description,
                "parameters": schema_of(spec),
            },
        }
        for spec in specs
    ]


def _message(message: ModelMessage, ids: dict[str, str]) -> dict[str, Json]:
    out: dict[str, Json] = {"role": message.role, "content": message.content}
    if message.tool_call_id is not None:
        out["tool_call_id"] = ids.get(message.tool_call_id, message.tool_call_id)
    if message.tool_calls:
        out["content"] = message.content or None
        out["tool_calls"] = [
            {
                "id": ids[call.id],
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": _json(object_of(call.input)),
                },
            }
            for call in message.tool_calls
        ]
    return out


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: Json = None  # text, or from some servers the object itself


class _CallDelta(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: Json = None
    refusal: Json = None
    reasoning_content: Json = None
    reasoning: Json = None
    tool_calls: list[_CallDelta] | None = None


class _Choice(msgspec.Struct):
    index: int | None = 0
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cost: Json = None  # some servers say it, in US dollars


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Json = None


_chunk: Final = msgspec.json.Decoder(_Chunk)


@final
class ChatFold:
    """Model events of one streamed chat completion."""

    def __init__(self) -> None:
        self.done = False
        self._reason: str | None = None
        self._calls: list[Asked] = []
        self._at: dict[int, Asked] = {}  # index -> the call that its deltas go on
        self._size = 0
        self._usage = Usage()

    def take(self, event: Event) -> Iterator[ModelEvent]:
        """Yield the text and the reasoning of one event; keep the rest for `end`."""
        if event.data.strip() == "[DONE]":
            self.done = True
            return
        try:
            chunk = _chunk.decode(event.data)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ModelCut(f"the answer cannot be read on: {error}") from error
        if chunk.error:
            said = shortened(said_by({"error": chunk.error}))
            raise ModelUnavailable(f"the model failed: {said}")
        if chunk.usage is not None:
            self._usage = _usage(chunk.usage)
        for choice in chunk.choices or ():
            if choice.index:
                continue  # one answer was asked for
            if choice.delta is not None:
                yield from self._said(choice.delta)
            self._reason = choice.finish_reason or self._reason

    def end(self) -> Iterator[ModelEvent]:
        """Yield tool calls, usage and finish. Raises `ModelCut` for half an answer."""
        if self._reason is None and not self.done:
            raise ModelCut("the answer ended before the model had finished")
        reason = _REASONS.get(self._reason or "stop", "other")
        calls = [asked.call(cut=reason == "length") for asked in self._calls]
        asked = [call for call in calls if call is not None]
        yield from asked
        if self._usage != Usage():
            yield self._usage
        yield Finish("tool-calls" if asked and reason == "stop" else reason)

    def _said(self, delta: _Delta) -> Iterator[ModelEvent]:
        reasoning = delta.reasoning_content or delta.reasoning
        if reasoning and isinstance(reasoning, str):
            yield ReasoningDelta(reasoning)
        for text in (delta.content, delta.refusal):
            if text and isinstance(text, str):
                yield TextDelta(text)
        for call in delta.tool_calls or ():
            self._ask(call)

    def _ask(self, delta: _CallDelta) -> None:
        """Begin a call or go on with one."""
        function = delta.function or _Function()
        given = function.arguments
        text = (
            given if isinstance(given, str) else "" if given is None else _json(given)
        )
        asked = self._goes_on(delta, function.name, text)
        if asked is None:
            asked = Asked()
            self._calls.append(asked)
        if delta.index is not None:
            self._at[delta.index] = asked
        asked.id = asked.id or delta.id or ""
        asked.name = asked.name or function.name or ""
        asked.arguments.append(text)
        self._size += _CALL_BYTES + len(text)
        if self._size > MODEL_EVENT_BYTES:
            raise ModelCut("the model's tool calls are larger than allowed")

    def _goes_on(self, delta: _CallDelta, name: str | None, text: str) -> Asked | None:
        """Return the call that a delta goes on with; None: it begins another.

        That is the one of its index, else of its id, else the last. Another id says
        that it is another call, whatever the index, and so do a name and arguments
        behind arguments that are whole.
        """
        if delta.index is not None:
            asked = self._at.get(delta.index)
        elif delta.id:
            same = (one for one in self._calls if one.id == delta.id)
            asked = next(same, None)
        else:
            asked = self._calls[-1] if self._calls else None
        if asked is None or (delta.id and asked.id and delta.id != asked.id):
            return None
        return None if name and text and asked.whole else asked


def _usage(found: _Usage) -> Usage:
    cost = found.cost if isinstance(found.cost, int | float) else None
    return Usage(
        input_tokens=found.prompt_tokens or 0,
        output_tokens=found.completion_tokens or 0,
        cost=cost,
    )


def _json(value: Any) -> str:
    return msgspec.json.encode(value, order="deterministic").decode()
