"""The messages format: a request as JSON, and the events of a streamed answer. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, final

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
from culet.adapters.remote import (
    ModelCut,
    ModelLimited,
    ModelRefused,
    ModelUnavailable,
    said_by,
    shortened,
)
from culet.adapters.wire import GO_ON, Asked, object_of, safe_ids, schema_of
from culet.kernel.core.limits import MODEL_EVENT_BYTES
from culet.kernel.core.sse import Event

_REASONS: Final = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "tool_use": "tool-calls",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "refusal": "content-filter",
}
_EMPTY: Final = "(empty)"  # the API takes no blank text


def system_of(request: ModelRequest) -> str:
    """Return the system prompt, with the conversation's own system messages."""
    said = [m.content for m in request.messages if m.role == "system"]
    return "\n\n".join(filter(None, [request.system, *said]))


def messages_of(request: ModelRequest, *, prefill: bool) -> list[dict[str, Json]]:
    """Return the messages of a request; neighbours of one role are one message.

    A cut answer's text is the last thing the assistant said. `prefill`: the model goes
    on in it, as older ones do; otherwise it is asked to.
    """
    ids = safe_ids(request.messages)
    out: list[dict[str, Json]] = []
    for message in request.messages:
        if message.role != "system":
            role = "assistant" if message.role == "assistant" else "user"
            _add(out, role, _blocks(message, ids))
    if request.partial.strip():
        _add(out, "assistant", [_text(request.partial.rstrip())])
        if not prefill:
            _add(out, "user", [_text(GO_ON)])
    return out


def tools_of(specs: Iterable[ToolSpec]) -> list[dict[str, Json]]:
    """Return the tools of a request."""
    return [
        {"name": s.name, "description": s.description, "input_schema": schema_of(s)}
        for s in specs
    ]


def _add(out: list[dict[str, Json]], role: str, blocks: list[Json]) -> None:
    if out and out[-1]["role"] == role:
        out[-1]["content"] += blocks
    else:
        out.append({"role": role, "content": blocks})


def _blocks(message: ModelMessage, ids: dict[str, str]) -> list[Json]:
    if message.role == "tool":
        call = message.tool_call_id or ""
        block = {"type": "tool_result", "tool_use_id": ids.get(call, call)}
        return [{**block, "content": message.content}]
    blocks: list[Json] = [
        {
            "type": "tool_use",
            "id": ids[call.id],
            "name": call.name,
            "input": object_of(call.input),
        }
        for call in message.tool_calls
    ]
    if message.content.strip():
        return [_text(message.content.rstrip()), *blocks]
    return blocks or [_text(_EMPTY)]


def _text(text: str) -> dict[str, Json]:
    return {"type": "text", "text": text}


class _Block(msgspec.Struct):
    type: str = ""
    id: str = ""
    name: str = ""
    input: Json = None
    text: str = ""
    thinking: str = ""


class _Delta(msgspec.Struct):
    type: str = ""
    text: str = ""
    thinking: str = ""
    partial_json: str = ""
    stop_reason: str | None = None


class _Usage(msgspec.Struct):
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    cache_read_input_tokens: int | None = None


class _Message(msgspec.Struct):
    usage: _Usage | None = None


class _Event(msgspec.Struct):
    type: str = ""
    index: int = 0
    message: _Message | None = None
    content_block: _Block | None = None
    delta: _Delta | None = None
    usage: _Usage | None = None
    error: Json = None


_event: Final = msgspec.json.Decoder(_Event)


@final
class MessageFold:
    """Model events of one streamed message. `lead`: white space that was said already."""

    def __init__(self, lead: str = "") -> None:
        self.done = False
        self._lead = lead
        self._reason: str | None = None
        self._calls: dict[int, Asked] = {}  # by content block
        self._size = 0
        self._input = self._output = 0

    def take(self, event: Event) -> Iterator[ModelEvent]:
        """Yield the text and the thinking of one event; keep the rest for `end`."""
        try:
            found = _event.decode(event.data)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ModelCut(f"the answer cannot be read on: {error}") from error
        match found.type or event.kind:
            case "error":
                raise _failure(found.error)
            case "message_start" if found.message is not None:
                self._count(found.message.usage)
            case "content_block_start" if found.content_block is not None:
                yield from self._begin(found.index, found.content_block)
            case "content_block_delta" if found.delta is not None:
                yield from self._more(found.index, found.delta)
            case "message_delta":
                self._count(found.usage)
                if found.delta is not None:
                    self._reason = found.delta.stop_reason or self._reason
            case "message_stop":
                self.done = True

    def end(self) -> Iterator[ModelEvent]:
        """Yield tool calls, usage and finish. Raises `ModelCut` for half an answer."""
        if not self.done:
            raise ModelCut("the answer ended before the model had finished")
        reason = _REASONS.get(self._reason or "end_turn", "other")
        for _, asked in sorted(self._calls.items()):
            call = asked.call(cut=reason == "length")
            if call is not None:
                yield call
        if self._input or self._output:
            yield Usage(input_tokens=self._input, output_tokens=self._output)
        yield Finish(reason)

    def _begin(self, index: int, block: _Block) -> Iterator[ModelEvent]:
        if block.type == "tool_use":
            asked = self._calls[index] = Asked(block.id, block.name)
            if block.input:  # whole at once, from servers that do not stream it
                asked.arguments.append(msgspec.json.encode(block.input).decode())
        yield from self._words(block.text, block.thinking)

    def _more(self, index: int, delta: _Delta) -> Iterator[ModelEvent]:
        asked = self._calls.get(index)
        if asked is not None and delta.partial_json:
            asked.arguments.append(delta.partial_json)
            self._size += len(delta.partial_json)
            if self._size > MODEL_EVENT_BYTES:
                raise ModelCut("the model's tool calls are larger than allowed")
        yield from self._words(delta.text, delta.thinking)

    def _words(self, text: str, thinking: str) -> Iterator[ModelEvent]:
        if thinking:
            yield ReasoningDelta(thinking)
        if text:
            text, self._lead = text.removeprefix(self._lead), ""
        if text:
            yield TextDelta(text)

    def _count(self, usage: _Usage | None) -> None:
        """Keep the numbers of a usage, which are totals; the cache counts as input."""
        if usage is None:
            return
        cached = usage.cache_creation_input_tokens or 0
        cached += usage.cache_read_input_tokens or 0
        self._input = max(self._input, (usage.input_tokens or 0) + cached)
        self._output = max(self._output, usage.output_tokens or 0)


def _failure(error: Json) -> Exception:
    kind = error.get("type") if isinstance(error, dict) else None
    said = shortened(said_by({"error": error}))
    if kind == "rate_limit_error":
        return ModelLimited("Anthropic: the rate limit is reached", None)
    if kind == "invalid_request_error":
        return ModelRefused(f"Anthropic refused the request: {said}", 400)
    return ModelUnavailable(f"the model failed: {said}")
