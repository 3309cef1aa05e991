"""The same kills when the assistant's model is behind an OpenAI-compatible server.

The mounted form, asked by our client; the server is others' mock of that API. A step that
was cut is asked again, or asked to go on; what the researchers found is the same to it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adapters.mock_api import KEY, Mock, needs_mock
from culet.adapters.wire import GO_ON
from kill.test_mounted import POINTS, Seen, ask_through_a_death, check

NAMES = ("asyncio.Queue", "queue.Queue", "trio.open_memory_channel")
CALLS = [
    {"name": "research", "arguments": {"question": f"What is {n}?"}} for n in NAMES
]
FINAL = "One is for coroutines (queues.md:1), one for threads (queues.md:7). " * 3
REST = "To go on: trio has a channel (queues.md:13)."
SLOW = {"chunkSize": 8, "latency": 5}  # ms between pieces, so that they are seen


@pytest.fixture
def mock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mock]:
    mock = Mock(tmp_path)
    mock.answer({"userMessage": GO_ON}, {"content": REST}, **SLOW)
    mock.answer({"hasToolResult": False}, {"toolCalls": CALLS})
    mock.answer({"hasToolResult": True}, {"content": FINAL}, **SLOW)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_MODEL", "m")
    monkeypatch.setenv("OPENAI_BASE_URL", f"http://{mock.host}/v1")
    yield mock
    mock.stop()


def check_model(mock: Mock, seen: Seen) -> None:
    """Assert that the answer is the model's, and rests on what the runs have found."""
    asked = [message for body in mock.requests() for message in body["messages"]]
    texts = [p["text"] for p in seen.messages[-1]["parts"] if p["type"] == "text"]
    said = "".join(texts)
    if any(message["content"] == GO_ON for message in asked):
        assert said.endswith(REST)
        assert FINAL.startswith(said.removesuffix(REST))
    else:
        assert said == FINAL
    tools = [p for p in seen.messages[-1]["parts"] if p["type"] == "tool-research"]
    assert [t["input"]["question"] for t in tools] == [
        call["arguments"]["question"] for call in CALLS
    ]
    assert len(seen.runs) == len(tools)
    for tool, name in zip(tools, NAMES, strict=True):
        assert name in tool["output"]["summary"]
    assert_told(mock.requests()[-1], tools)


def assert_told(body: Any, tools: list[Any]) -> None:
    """Assert that the last request of the turn had all results, each at its call."""
    told = {
        message["tool_call_id"]: message["content"]
        for message in body["messages"]
        if message["role"] == "tool"
    }
    assert {at: json.loads(text) for at, text in told.items()} == {
        tool["toolCallId"]: tool["output"] for tool in tools
    }


@needs_mock
@pytest.mark.slow
@pytest.mark.parametrize("at", POINTS)
async def test_a_killed_service_with_a_model_elsewhere_goes_on_where_it_was(
    at: str, tmp_path: Path, mock: Mock
) -> None:
    seen = await ask_through_a_death(tmp_path, at, "--model")
    check(tmp_path, seen)
    check_model(mock, seen)
