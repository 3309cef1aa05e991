"""Where a turn stands, read from what it has said: so that nothing is said twice.

After a crash the stream of the turn is all there is. A step is over with `finish-step`.
The step after that may be cut: while the model spoke (then there is a partial text and
no tool call, because the calls of a step are stored together, when the model is done)
or while its tools ran (then the calls are there, some with their results). Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from culet.adapters.model import ToolCall, Usage
from culet.kernel.core.chunks import tool_input

Chunk = Mapping[str, Any]


class Standing(msgspec.Struct, kw_only=True):
    """How far a turn is. Made by `standing`, moved on by `advance`."""

    told: list[Chunk] = []  # all that the turn has said
    steps: int = 0  # that are finished
    open: bool = False  # one has begun and is not finished
    open_from: int = 0  # where it begins in `told`
    partial: str = ""  # text of the last step
    open_text: str | None = None  # id of the text part that is not ended
    open_reasoning: str | None = None
    parts: int = 0  # text and reasoning parts of the last step
    calls: list[ToolCall] = []  # of the last step, in their order
    settled: set[str] = set()  # ids of those calls that need nothing more
    requested: set[str] = set()  # ids of those calls that a person is to approve
    asked: list[str] = []  # ids of all tool calls of the turn
    letters: set[str] = set()  # ids of the letters that it has taken up
    directed: bool = False  # one of them after the last step
    usage: Usage = Usage()  # of all its model calls

    @property
    def model_is_done(self) -> bool:
        """Whether only tools are left to do in the open step."""
        return bool(self.calls)

    @property
    def kept(self) -> list[Chunk]:
        """What the model is told of this turn: not the step that it is in."""
        cut = self.open and not self.model_is_done
        return self.told[: self.open_from] if cut else self.told


def standing(chunks: Iterable[Chunk]) -> Standing:
    """Return how far a turn is by the chunks that it has said."""
    at = Standing()
    for chunk in chunks:
        advance(at, chunk)
    return at


def advance(at: Standing, chunk: Chunk) -> None:
    """Move on by one chunk that was said."""
    match chunk.get("type"):
        case "data-directive":
            at.letters.add(str(chunk.get("id")))
            at.directed = True
        case "start-step":
            at.directed = False
            at.open, at.open_from, at.parts = True, len(at.told), 0
            at.partial, at.calls, at.settled, at.requested = "", [], set(), set()
            at.open_text = at.open_reasoning = None
        case "finish-step":
            at.open, at.steps = False, at.steps + 1
            at.open_text = at.open_reasoning = None
        case "text-start":
            at.open_text, at.parts = str(chunk.get("id")), at.parts + 1
        case "text-delta":
            at.partial += str(chunk.get("delta", ""))
        case "text-end":
            at.open_text = None
        case "reasoning-start":
            at.open_reasoning, at.parts = str(chunk.get("id")), at.parts + 1
        case "reasoning-end":
            at.open_reasoning = None
        case "tool-input-available":
            call_id = str(chunk.get("toolCallId"))
            name, given = str(chunk.get("toolName")), tool_input(chunk.get("input"))
            at.calls.append(ToolCall(id=call_id, name=name, input=given))
            at.asked.append(call_id)
        case "tool-output-available" if not chunk.get("preliminary"):
            at.settled.add(str(chunk.get("toolCallId")))
        case "tool-output-error" | "tool-output-denied":
            at.settled.add(str(chunk.get("toolCallId")))
        case "tool-approval-request":
            at.requested.add(str(chunk.get("toolCallId")))
        case "message-metadata":
            said = (chunk.get("messageMetadata") or {}).get("usage")
            if isinstance(said, Mapping):
                at.usage = usage_from(said)
    at.told.append(chunk)


def usage_from(said: Mapping[str, Any]) -> Usage:
    """Return the usage that a message's metadata tells."""
    return Usage(
        input_tokens=int(said.get("inputTokens") or 0),
        output_tokens=int(said.get("outputTokens") or 0),
        cost=said.get("cost"),
    )


def usage_json(usage: Usage) -> dict[str, Any]:
    """Return usage as a message's metadata tells it."""
    told: dict[str, Any] = {
        "inputTokens": usage.input_tokens,
        "outputTokens": usage.output_tokens,
    }
    if usage.cost is not None:
        told["cost"] = usage.cost
    return told


def usage_sum(one: Usage, other: Usage) -> Usage:
    """Return both together; a cost that one of them does not know counts as nothing."""
    costs = [u.cost for u in (one, other) if u.cost is not None]
    return Usage(
        input_tokens=one.input_tokens + other.input_tokens,
        output_tokens=one.output_tokens + other.output_tokens,
        cost=sum(costs) if costs else None,
    )
