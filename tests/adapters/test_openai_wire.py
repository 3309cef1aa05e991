from __future__ import annotations

from typing import Any

import msgspec
import pytest

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
from culet.adapters.openai_wire import ChatFold, messages_of, tools_of
from culet.adapters.remote import ModelCut, ModelError, ModelUnavailable
from culet.kernel.core.sse import Event

DONE = "[DONE]"


def folded(*chunks: Any) -> list[ModelEvent]:
    fold = ChatFold()
    found: list[ModelEvent] = []
    for chunk in chunks:
        text = chunk if isinstance(chunk, str) else msgspec.json.encode(chunk).decode()
        found += fold.take(Event("", text))
    return [*found, *fold.end()]


def said(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def asked(**fields: Any) -> dict[str, Any]:
    given = {k: fields.pop(k) for k in ("name", "arguments") if k in fields}
    return {**fields, "function": given}


def call(call_id: str, name: str, value: Any) -> ToolCall:
    return ToolCall(id=call_id, name=name, input=value)


A, B = {"city": "A"}, {"city": "B"}
ONE, TWO = '{"city":"A"}', '{"city":"B"}'
PARALLEL: dict[str, list[Any]] = {
    "as OpenAI": [
        [asked(index=0, id="a", name="t", arguments="")],
        [asked(index=0, arguments='{"city"')],
        [asked(index=1, id="b", name="t", arguments="")],
        [asked(index=0, arguments=':"A"}')],
        [asked(index=1, arguments=TWO)],
    ],
    "one index for all": [
        [asked(index=0, id="a", name="t", arguments=ONE)],
        [asked(index=0, id="b", name="t", arguments=TWO)],
    ],
    "no index": [
        [asked(id="a", name="t", arguments='{"city":')],
        [asked(arguments='"A"}')],
        [asked(id="b", name="t", arguments=TWO)],
    ],
    "no index, back and forth": [
        [asked(id="a", name="t"), asked(id="b", name="t")],
        [asked(id="a", arguments=ONE), asked(id="b", arguments=TWO)],
    ],
    "id and name each time": [
        [asked(index=0, id="a", name="t", arguments='{"city":')],
        [asked(index=0, id="a", name="t", arguments='"A"}')],
        [asked(index=0, id="a", name="t", arguments="")],
        [asked(index=1, id="b", name="t", arguments=TWO)],
    ],
    "arguments as an object": [
        [asked(index=0, id="a", name="t", arguments=A)],
        [asked(index=1, id="b", name="t", arguments=B)],
    ],
}


@pytest.mark.parametrize("deltas", PARALLEL.values(), ids=PARALLEL)
def test_parallel_calls_are_put_together(deltas: list[Any]) -> None:
    chunks = [said(tool_calls=calls) for calls in deltas]
    assert folded(*chunks, said("stop"), DONE) == [
        call("a", "t", A), call("b", "t", B), Finish("tool-calls"),
    ]  # fmt: skip


@pytest.mark.parametrize("index", [0, None])
def test_calls_without_any_id_are_told_apart_by_whole_arguments(index: Any) -> None:
    both = [said(tool_calls=[asked(index=index, name="t", arguments=one)])
            for one in (ONE, TWO)]  # fmt: skip
    assert folded(*both, said("tool_calls")) == [
        call("", "t", A), call("", "t", B), Finish("tool-calls"),
    ]  # fmt: skip


def test_text_reasoning_usage_and_refusal() -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 4, "cost": 0.25}
    assert folded(
        {"choices": []},
        said(role="assistant", content=""),
        said(reasoning_content="h", reasoning="h"),
        said(reasoning="m"),
        said(content="a"),
        said(content=None, refusal="no"),
        {"choices": [{"index": 1, "delta": {"content": "another answer"}}]},
        said("content_filter"),
        {"choices": [], "usage": usage},
        DONE,
    ) == [
        ReasoningDelta("h"), ReasoningDelta("m"), TextDelta("a"), TextDelta("no"),
        Usage(input_tokens=3, output_tokens=4, cost=0.25), Finish("content-filter"),
    ]  # fmt: skip


def test_a_call_that_the_limit_cut_is_left_out() -> None:
    calls = [
        asked(index=0, id="a", name="t", arguments=ONE),
        asked(index=1, id="b", name="t", arguments='{"ci'),
    ]
    assert folded(said("length", tool_calls=calls)) == [
        call("a", "t", A), Finish("length"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ([said(content="a")], ModelCut),
        (["{"], ModelCut),
        (['{"choices": 7}'], ModelCut),
        (["[" * 10_000], ModelCut),
        ([{"error": {"message": "overloaded"}}], ModelUnavailable),
        ([{"error": "overloaded"}], ModelUnavailable),
    ],
)
def test_what_is_no_whole_answer_is_an_error(
    chunks: list[Any], expected: type[ModelError]
) -> None:
    with pytest.raises(expected):
        folded(*chunks)


def test_done_is_enough_where_a_server_gives_no_reason() -> None:
    assert folded(said(content="a"), DONE) == [TextDelta("a"), Finish("stop")]


def test_calls_are_bounded() -> None:
    more = said(tool_calls=[asked(index=0, arguments="x" * 1_000_000)])
    with pytest.raises(ModelCut, match="larger than allowed"):
        folded(*[more] * 9)
    with pytest.raises(ModelCut, match="larger than allowed"):
        folded(*[said(tool_calls=[asked(id="a"), asked(id="b")] * 9_000)] * 9)


def test_a_conversation_is_sent_as_it_was() -> None:
    request = ModelRequest(
        system="be brief",
        messages=(
            ModelMessage(role="user", content="hi"),
            ModelMessage(
                role="assistant",
                tool_calls=(call("run:1", "t", A), call("b", "t", "raw")),
            ),
            ModelMessage(role="tool", content="x", tool_call_id="run:1"),
            ModelMessage(role="tool", content="y", tool_call_id="b"),
        ),
        tools=(ToolSpec(name="t", description="does it"),),
    )
    system, user, assistant, first, second = messages_of(request, prefill=False)
    assert system == {"role": "system", "content": "be brief"}
    assert user == {"role": "user", "content": "hi"}
    assert assistant["content"] is None
    assert [(c["id"], c["function"]["arguments"]) for c in assistant["tool_calls"]] == [
        ("call_1", ONE),
        ("b", '{"input":"raw"}'),
    ]
    assert (first["tool_call_id"], second["tool_call_id"]) == ("call_1", "b")
    (tool,) = tools_of(request.tools)
    assert tool["function"]["parameters"] == {"type": "object", "properties": {}}
