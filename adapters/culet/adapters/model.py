"""What a language model is to a chat agent: messages in, events out, nothing else.

A model keeps no state of its own. Everything that it must know is in the request, so
that a step which a crash cut can be asked again: `partial` is the text that this step
has already said and stored, and the events go on after it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, Protocol, TypeAlias, runtime_checkable

import msgspec

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]
Json: TypeAlias = Any  # a JSON value: what msgspec decodes from JSON


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, tag="tool-call"):
    """The model asks for a tool. `input` is a JSON value, not yet checked."""

    id: str
    name: str
    input: Json


class TextDelta(msgspec.Struct, frozen=True, tag="text-delta"):
    """More of the text that people read."""

    text: str


class ReasoningDelta(msgspec.Struct, frozen=True, tag="reasoning-delta"):
    """More of the model's thinking, which is shown apart and never sent back."""

    text: str


class Usage(msgspec.Struct, frozen=True, kw_only=True, tag="usage"):
    """What the step has used up. `cost` is in US dollars if the model says it."""

    input_tokens: int = 0
    output_tokens: int = 0
    cost: float | None = None


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """What a model costs at most, in US dollars for a million tokens."""

    input: float = 0.0
    output: float = 0.0


class Finish(msgspec.Struct, frozen=True, tag="finish"):
    """The step is over: `stop`, `tool-calls`, `length`, `content-filter`, `error`, `other`."""

    reason: str = "stop"


ModelEvent: TypeAlias = TextDelta | ReasoningDelta | ToolCall | Usage | Finish


class ModelMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One message of the conversation, in the form that most providers take.

    An `assistant` message may carry tool calls; each is answered by one `tool` message
    that names it.
    """

    role: Role
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


class ToolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A tool as a model sees it. `parameters` is a JSON Schema of type `object`."""

    name: str
    description: str = ""
    parameters: dict[str, Json] = {}


class ModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """All that a model needs for one step."""

    system: str = ""
    messages: tuple[ModelMessage, ...] = ()
    tools: tuple[ToolSpec, ...] = ()
    partial: str = ""  # stored text of this step; what is streamed goes on after it
    max_tokens: int | None = None  # of the answer, where a budget bounds it


DIRECTIVE: Final = "data-directive"  # a part: what the parent of a run has sent to it


@runtime_checkable
class Model(Protocol):
    """Anything that streams one step of a conversation.

    The iterator may raise; what it has said before stays said. Closing it stops the
    model's work. What it may have beside: `price`, a `Price`, without which it cannot work
    under a budget in money; `max_tokens`, its own bound on an answer; `input_bound(request)`,
    a number of tokens that the input surely does not exceed.
    """

    def stream(self, request: ModelRequest, /) -> AsyncIterator[ModelEvent]:
        """Return the events of one step, `Finish` last."""
        ...


def to_model_messages(
    ui_messages: Iterable[Mapping[str, Json]],
) -> list[ModelMessage]:
    """Return the conversation for a model, from UI messages (plain JSON).

    An assistant's message becomes one model message a step, each followed by the
    results of its tool calls; a call without a result is answered with a text that says
    so, because providers refuse a call that nobody answered. A directive that came
    between two steps is a user's message between them. Reasoning, sources and
    data parts are for people and left out; an unknown part is ignored. A step that was
    cut is not to be among the parts: its text belongs into `ModelRequest.partial`.
    """
    found: list[ModelMessage] = []
    for message in ui_messages:
        role, parts = message.get("role"), message.get("parts") or ()
        if role in ("user", "system"):
            text = "\n".join(filter(None, map(_said, parts)))
            found.append(ModelMessage(role=role, content=text))
        elif role == "assistant":
            for step in _steps(parts):
                found += _assistant(step)
    return found


def directive_chunk(letter_id: str, text: str) -> dict[str, Json]:
    """Return what a turn says when it takes up a letter of its parent."""
    return {"type": DIRECTIVE, "id": letter_id, "data": {"text": text}}


def tool_name(part: Mapping[str, Json]) -> str | None:
    """Return the tool that a UI message part is about, or None if it is no tool part."""
    kind = part.get("type")
    if not isinstance(kind, str):
        return None
    if kind == "dynamic-tool" or (kind.startswith("tool-") and "toolName" in part):
        name = part.get("toolName")
        return name if isinstance(name, str) else None
    return kind.removeprefix("tool-") if kind.startswith("tool-") else None


def _said(part: Mapping[str, Json]) -> str:
    if part.get("type") == "text":
        return str(part.get("text") or "")
    if part.get("type") == "file":
        return f"[file {part.get('filename') or ''} {part.get('mediaType') or ''}]"
    return ""


def _steps(parts: Sequence[Mapping[str, Json]]) -> list[list[Mapping[str, Json]]]:
    steps: list[list[Mapping[str, Json]]] = [[]]
    for part in parts:
        if part.get("type") == "step-start":
            steps.append([])
        elif part.get("type") == DIRECTIVE:
            steps += [part], []
        else:
            steps[-1].append(part)
    return steps


def _assistant(step: Sequence[Mapping[str, Json]]) -> list[ModelMessage]:
    if step and step[0].get("type") == DIRECTIVE:
        told = step[0].get("data") or {}
        return [ModelMessage(role="user", content=str(told.get("text") or ""))]
    text = "".join(str(p.get("text") or "") for p in step if p.get("type") == "text")
    calls: list[ToolCall] = []
    results: list[ModelMessage] = []
    for part in step:
        name, call_id = tool_name(part), part.get("toolCallId")
        if name is None or not isinstance(call_id, str):
            continue
        if part.get("state") == "input-streaming":
            continue  # the model did not finish asking
        asked = part.get("input", part.get("rawInput"))
        calls.append(ToolCall(id=call_id, name=name, input=asked))
        results.append(
            ModelMessage(role="tool", content=_outcome(part), tool_call_id=call_id)
        )
    if not text and not calls:
        return []
    said = ModelMessage(role="assistant", content=text, tool_calls=tuple(calls))
    return [said, *results]


def _outcome(part: Mapping[str, Json]) -> str:
    state = part.get("state")
    if state == "output-available" and not part.get("preliminary"):
        output = part.get("output")
        return (
            output
            if isinstance(output, str)
            else msgspec.json.encode(output, order="deterministic").decode()
        )
    if state == "output-error":
        return f"error: {part.get('errorText') or 'the tool failed'}"
    if state == "output-denied":
        return "error: a person refused this tool call"
    return "error: there is no result, the turn ended before the tool did"
