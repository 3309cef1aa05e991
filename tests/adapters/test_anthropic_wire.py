from __future__ import annotations

from typing import Any

import msgspec
import pytest

from culet.adapters.anthropic_wire import (
    MessageFold,
    messages_of,
    system_of,
    tools_of,
)
from culet.adapters.model import (
    Finish,
    ModelEvent,
    ModelMessage,
    ModelRequest,
    ReasoningDelta,
    TextDelta,
    ToolCall,
    ToolSpec,
    Usage,
)
from culet.adapters.remote import (
    ModelCut,
    ModelError,
    ModelLimited,
    ModelRefused,
    ModelUnavailable,
)
from culet.kernel.core.sse import Event


def folded(*events: Any, lead: str = "") -> list[ModelEvent]:
    fold = MessageFold(lead)
    found: list[ModelEvent] = []
    for event in events:
        text = event if isinstance(event, str) else msgspec.json.encode(event).decode()
        found += fold.take(Event("", text))
    return [*found, *fold.end()]


def block(index: int, kind: str, **fields: Any) -> dict[str, Any]:
    inner = {"type": kind, **fields}
    return {"type": "content_block_start", "index": index, "content_block": inner}


def delta(index: int, kind: str, **fields: Any) -> dict[str, Any]:
    inner = {"type": kind, **fields}
    return {"type": "content_block_delta", "index": index, "delta": inner}


def ends(reason: str | None, **usage: int) -> list[dict[str, Any]]:
    last = {"type": "message_delta", "delta": {"stop_reason": reason}, "usage": usage}
    return [last, {"type": "message_stop"}]


def test_text_thinking_calls_and_usage() -> None:
    usage = {"input_tokens": 5, "cache_read_input_tokens": 100, "output_tokens": 1}
    assert folded(
        {"type": "message_start", "message": {"usage": usage}},
        {"type": "ping"},
        block(0, "thinking", thinking=""),
        delta(0, "thinking_delta", thinking="hm"),
        delta(0, "signature_delta", signature="s"),
        block(1, "text", text=""),
        delta(1, "text_delta", text="I ask"),
        block(2, "tool_use", id="a", name="t", input={}),
        block(3, "tool_use", id="b", name="t", input={"city": "B"}),
        delta(2, "input_json_delta", partial_json='{"city"'),
        delta(2, "input_json_delta", partial_json=':"A"}'),
        block(4, "tool_use", id="c", name="u", input={}),
        {"type": "something_new"},
        *ends("tool_use", output_tokens=9),
    ) == [
        ReasoningDelta("hm"),
        TextDelta("I ask"),
        ToolCall(id="a", name="t", input={"city": "A"}),
        ToolCall(id="b", name="t", input={"city": "B"}),
        ToolCall(id="c", name="u", input={}),
        Usage(input_tokens=105, output_tokens=9),
        Finish("tool-calls"),
    ]


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("end_turn", "stop"), ("stop_sequence", "stop"), ("max_tokens", "length"),
        ("refusal", "content-filter"), ("pause_turn", "other"), (None, "stop"),
    ],
)  # fmt: skip
def test_reasons(reason: str | None, expected: str) -> None:
    assert folded(*ends(reason)) == [Finish(expected)]


def test_a_call_that_the_limit_cut_is_left_out() -> None:
    cut = [
        block(0, "tool_use", id="a", name="t", input={}),
        delta(0, "input_json_delta", partial_json='{"ci'),
        *ends("max_tokens"),
    ]
    assert folded(*cut) == [Finish("length")]


def test_white_space_that_was_said_is_not_said_again() -> None:
    first, second = delta(0, "text_delta", text=" a"), delta(0, "text_delta", text=" b")
    assert folded(first, second, *ends(None), lead=" ")[:2] == [
        TextDelta("a"), TextDelta(" b"),
    ]  # fmt: skip
    assert folded(second, *ends(None), lead="\n")[0] == TextDelta(" b")


def failure(kind: str) -> dict[str, Any]:
    return {"type": "error", "error": {"type": kind, "message": "why"}}


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([block(0, "text", text="a")], ModelCut),
        (["{"], ModelCut),
        ([failure("overloaded_error")], ModelUnavailable),
        ([failure("rate_limit_error")], ModelLimited),
        ([failure("invalid_request_error")], ModelRefused),
        ([{"type": "error"}], ModelUnavailable),
    ],
)
def test_what_is_no_whole_answer_is_an_error(
    events: list[Any], expected: type[ModelError]
) -> None:
    with pytest.raises(expected):
        folded(*events)


def test_calls_are_bounded() -> None:
    more = delta(0, "input_json_delta", partial_json="x" * 1_000_000)
    with pytest.raises(ModelCut, match="larger than allowed"):
        folded(block(0, "tool_use", id="a", name="t", input={}), *[more] * 9)


def test_a_conversation_alternates_and_its_results_stand_together() -> None:
    calls = tuple(ToolCall(id=one, name="t", input={"n": 1}) for one in ("a", "r:1"))
    request = ModelRequest(
        system="be brief",
        messages=(
            ModelMessage(role="system", content="and kind"),
            ModelMessage(role="user", content="hi"),
            ModelMessage(role="user", content=" "),
            ModelMessage(role="assistant", content="I ask. ", tool_calls=calls),
            ModelMessage(role="tool", content="x", tool_call_id="a"),
            ModelMessage(role="tool", content="y", tool_call_id="r:1"),
            ModelMessage(role="user", content="well?"),
        ),
        tools=(ToolSpec(name="t", description="does it"),),
        partial="So ",
    )
    assert system_of(request) == "be brief\n\nand kind"
    first, asks, results, cut, more = messages_of(request, prefill=False)
    assert [b["text"] for b in first["content"]] == ["hi", "(empty)"]
    assert [b["type"] for b in asks["content"]] == ["text", "tool_use", "tool_use"]
    assert asks["content"][2] == {
        "type": "tool_use", "id": "call_1", "name": "t", "input": {"n": 1},
    }  # fmt: skip
    assert [b["type"] for b in results["content"]] == ["tool_result"] * 2 + ["text"]
    assert results["content"][1]["tool_use_id"] == "call_1"
    assert cut == {"role": "assistant", "content": [{"type": "text", "text": "So"}]}
    assert more["role"] == "user"
    assert [m["role"] for m in messages_of(request, prefill=True)][-1] == "assistant"
    (tool,) = tools_of(request.tools)
    assert tool["input_schema"] == {"type": "object", "properties": {}}
