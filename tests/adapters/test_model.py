from typing import Any

import msgspec
import pytest

from culet.adapters.model import (
    Finish,
    Model,
    ModelEvent,
    ModelMessage,
    TextDelta,
    ToolCall,
    Usage,
    to_model_messages,
)
from culet.adapters.scripted import ScriptedModel


def tool_part(**extra: Any) -> dict[str, Any]:
    return {"type": "tool-read", "toolCallId": "c1", "input": {"n": 1}} | extra


def call(value: Any = None) -> ToolCall:
    return ToolCall(id="c1", name="read", input={"n": 1} if value is None else value)


def result(content: str) -> ModelMessage:
    return ModelMessage(role="tool", content=content, tool_call_id="c1")


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        pytest.param([], [], id="nothing said"),
        pytest.param(
            [{"type": "step-start"}, {"type": "text", "text": "hi"}],
            [ModelMessage(role="assistant", content="hi")],
            id="text",
        ),
        pytest.param(
            [
                {"type": "reasoning", "text": "hm"},
                {"type": "data-x", "data": 1},
                {"type": "source-url", "url": "u"},
                {"type": "text", "text": "hi"},
            ],
            [ModelMessage(role="assistant", content="hi")],
            id="reasoning, data and sources are for people",
        ),
        pytest.param(
            [
                {"type": "step-start"},
                {"type": "text", "text": "look"},
                tool_part(state="output-available", output={"b": 1, "a": [2]}),
                {"type": "step-start"},
                {"type": "text", "text": "done"},
            ],
            [
                ModelMessage(role="assistant", content="look", tool_calls=(call(),)),
                result('{"a":[2],"b":1}'),
                ModelMessage(role="assistant", content="done"),
            ],
            id="each step is a message followed by its results",
        ),
        pytest.param(
            [tool_part(state="output-available", output="plain")],
            [ModelMessage(role="assistant", tool_calls=(call(),)), result("plain")],
            id="a text result is not quoted again",
        ),
        pytest.param(
            [tool_part(state="output-error", errorText="boom")],
            [
                ModelMessage(role="assistant", tool_calls=(call(),)),
                result("error: boom"),
            ],
            id="error",
        ),
        pytest.param(
            [tool_part(state="output-denied")],
            [
                ModelMessage(role="assistant", tool_calls=(call(),)),
                result("error: a person refused this tool call"),
            ],
            id="denied",
        ),
        pytest.param(
            [tool_part(state="output-available", output=1, preliminary=True)],
            [
                ModelMessage(role="assistant", tool_calls=(call(),)),
                result("error: there is no result, the turn ended before the tool did"),
            ],
            id="a preliminary output is no result",
        ),
        pytest.param([tool_part(state="input-streaming")], [], id="half a call"),
        pytest.param(
            [
                {"type": "dynamic-tool", "toolName": "read", "toolCallId": "c1"}
                | {"input": {"n": 1}, "state": "output-available", "output": 3}
            ],
            [ModelMessage(role="assistant", tool_calls=(call(),)), result("3")],
            id="dynamic tool",
        ),
        pytest.param(
            [
                {
                    "type": "tool-read",
                    "toolCallId": "c1",
                    "rawInput": "{",
                    "input": None,
                }
                | {"state": "output-error", "errorText": "bad input"}
            ],
            [
                ModelMessage(
                    role="assistant",
                    tool_calls=(ToolCall(id="c1", name="read", input=None),),
                ),
                result("error: bad input"),
            ],
            id="bad input",
        ),
    ],
)
def test_an_assistant_message_for_a_model(
    parts: list[dict[str, Any]], expected: list[ModelMessage]
) -> None:
    assert expected == to_model_messages([{"role": "assistant", "parts": parts}])


def test_people_and_system_say_their_text_and_name_their_files() -> None:
    messages = [
        {"role": "system", "parts": [{"type": "text", "text": "be brief"}]},
        {
            "role": "user",
            "parts": [
                {"type": "file", "filename": "a.png", "mediaType": "image/png"},
                {"type": "text", "text": "what is it?"},
            ],
        },
    ]

    assert [
        ModelMessage(role="system", content="be brief"),
        ModelMessage(role="user", content="[file a.png image/png]\nwhat is it?"),
    ] == to_model_messages(messages)


@pytest.mark.parametrize(
    "event", [TextDelta("a"), call(), Usage(input_tokens=3), Finish("length")]
)
def test_events_survive_storage(event: ModelEvent) -> None:
    assert event == msgspec.json.decode(msgspec.json.encode(event), type=ModelEvent)


def test_a_scripted_model_is_a_model() -> None:
    assert isinstance(ScriptedModel([]), Model)
