"""Client frames: each kind decoded, everything else an ordinary message."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from culet.kernel.core.frames import (
    Cancel,
    ChatMessages,
    ChatRequest,
    Clear,
    Ignored,
    ResumeAck,
    ResumeRequest,
    Rpc,
    State,
    ToolApproval,
    ToolResult,
    decode_client_frame,
)
from volume import SLOWER

USER = {"id": "m", "role": "user", "parts": [{"type": "text", "text": "hi"}]}


def request(body: Any, **init: Any) -> str:
    inner = body if isinstance(body, str) else json.dumps(body)
    init = {"method": "POST", "body": inner, **init}
    return json.dumps({"type": "cf_agent_use_chat_request", "id": "q", "init": init})


def test_rpc_keeps_its_arguments_as_json() -> None:
    text = '{"type":"rpc","id":"1","method":"ping","args":["hi", {"a": [1]}]}'
    frame = decode_client_frame(text)
    assert isinstance(frame, Rpc)
    assert (frame.id, frame.method) == ("1", "ping")
    assert [msgspec.json.decode(arg) for arg in frame.args] == ["hi", {"a": [1]}]


def test_state_keeps_its_json() -> None:
    frame = decode_client_frame('{"state":{"n": 1},"type":"cf_agent_state"}')
    assert isinstance(frame, State)
    assert bytes(frame.state) == b'{"n": 1}'


@pytest.mark.rule("W-109", "W-110", "W-111")
@pytest.mark.parametrize(
    ("frame", "expected"),
    [
        ({"type": "cf_agent_chat_request_cancel", "id": "q"}, Cancel("q")),
        ({"type": "cf_agent_chat_clear"}, Clear()),
        ({"type": "cf_agent_chat_messages", "messages": [USER]}, ChatMessages([USER])),
        ({"type": "cf_agent_stream_resume_request"}, ResumeRequest()),
        (
            {"type": "cf_agent_stream_resume_request", "probeId": "p"},
            ResumeRequest("p"),
        ),
        ({"type": "cf_agent_stream_resume_ack", "id": "q", "x": 1}, ResumeAck("q")),
        (
            {"type": "cf_agent_tool_approval", "toolCallId": "c", "approved": True,
             "autoContinue": True},
            ToolApproval("c", True, True),
        ),
        (
            {"type": "cf_agent_tool_result", "toolCallId": "c", "toolName": "f",
             "output": None, "autoContinue": False},
            ToolResult("c", "f", None),
        ),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)  # fmt: skip
def test_each_kind(frame: dict, expected: object) -> None:
    assert decode_client_frame(json.dumps(frame)) == expected


@pytest.mark.rule("W-110")
def test_an_absent_output_is_not_null() -> None:
    frame = decode_client_frame('{"type":"cf_agent_tool_result","toolCallId":"c"}')
    assert isinstance(frame, ToolResult)
    assert frame.output is msgspec.UNSET


@pytest.mark.rule("W-101")
def test_a_chat_request_is_json_in_json() -> None:
    frame = decode_client_frame(
        request(
            {
                "messages": [USER],
                "trigger": "regenerate-message",
                "clientTools": [{"name": "f"}],
                "mood": "good",
            }
        )
    )
    assert frame == ChatRequest(
        id="q",
        messages=[USER],
        trigger="regenerate-message",
        client_tools=[{"name": "f"}],
        body={"mood": "good"},
    )


@pytest.mark.rule("W-102")
@pytest.mark.parametrize(
    "text",
    [
        request(""),
        request("{"),
        request("[]"),
        request({}),
        request({"messages": [{"id": 1}]}),
        request({"messages": [7]}),
        request({"messages": [USER | {"role": []}]}),
        request({"messages": [USER | {"parts": [1]}]}),
        request({"messages": [USER], "trigger": ["x"]}),
        request({"messages": [USER]}, method="GET"),
        request("[" * 100_000),
        json.dumps({"type": "cf_agent_chat_messages", "messages": [{"id": "m"}]}),
    ],
    ids=range(12),
)
def test_an_unusable_chat_frame_is_ignored_with_a_reason(text: str) -> None:
    frame = decode_client_frame(text)
    assert isinstance(frame, Ignored)
    assert frame.why


@pytest.mark.rule("W-112")
@pytest.mark.parametrize(
    "text",
    [
        "", "hello", "{", "[]", "null", '{"a":1}', '{"type":"glow"}', '{"type":3}',
        '{"type":"rpc","id":"1","method":"m"}', '{"type":"rpc","id":1,"method":"m"}',
        '{"type":"cf_agent_state"}', '{"type":"cf_agent_chat_request_cancel"}',
        "[" * 100_000, "\ud800", b"\x00\x01", b'{"type":"cf_agent_chat_clear"}',
    ],
    ids=range(16),
)  # fmt: skip
def test_everything_else_is_an_ordinary_message(text: str | bytes) -> None:
    assert decode_client_frame(text) is None


TYPES = [
    "rpc",
    "cf_agent_state",
    "cf_agent_use_chat_request",
    "cf_agent_chat_request_cancel",
    "cf_agent_chat_clear",
    "cf_agent_chat_messages",
    "cf_agent_stream_resume_request",
    "cf_agent_stream_resume_ack",
    "cf_agent_tool_result",
    "cf_agent_tool_approval",
]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["id", "method", "body", "messages", "role", "parts", "type"]
            ),
            inner,
        )
    ),
    max_leaves=8,
)


@given(
    st.dictionaries(
        st.sampled_from(["id", "init", "args", "method", "state", "toolCallId",
                         "messages", "probeId", "approved"]),
        json_values,
    ),
    st.sampled_from(TYPES),
)  # fmt: skip
def test_decoding_never_raises(fields: dict[str, Any], kind: str) -> None:
    text = json.dumps({**fields, "type": kind})
    for cut in (len(text), len(text) // 2):
        frame = decode_client_frame(text[:cut])
        assert frame is None or not isinstance(frame, str)


@given(st.text() | st.binary())
def test_noise_never_raises(noise: str | bytes) -> None:
    decode_client_frame(noise)


MIB = 1 << 20
HEAD = '{"type":"rpc","id":"1","method":"m","args":['
HOSTILE = {
    "deep lists": "[" * MIB,
    "deep objects": '{"a":' * (MIB // 5),
    "deep arguments": HEAD + "[" * (MIB // 2 - 50) + "]" * (MIB // 2 - 50) + "]}",
    "a deep state": '{"type":"cf_agent_state","state":'
    + "[" * 90_000
    + "]" * 90_000
    + "}",
    "many digits": HEAD + "9" * (MIB - 100) + "]}",
    "an infinity": HEAD + "1e999]}",
    "no number": HEAD + "NaN]}",
    "a doubled key": '{"type":"rpc","type":"rpc","id":"1"}',
    "many keys": "{" + ",".join(f'"k{n}":1' for n in range(90_000)) + "}",
    "many numbers": "[" + "1," * (MIB // 2 - 2) + "1]",
    "escapes": '{"type":"x","v":"' + "\\u0041" * 170_000 + '"}',
    "half a letter": HEAD.replace('"1"', '"\\ud800"') + "]}",
}


@pytest.mark.rule("F-36")
@pytest.mark.parametrize("what", HOSTILE)
def test_whatever_comes_is_decoded_or_not_in_no_time(what: str) -> None:
    """Five milliseconds of the processor are enough for the longest message."""
    text = HOSTILE[what]
    assert len(text) <= MIB
    took = []
    for _ in range(5):
        began = time.thread_time()
        frame = decode_client_frame(text)
        took.append(time.thread_time() - began)
        assert frame is None or what in {"many digits", "an infinity", "half a letter"}
    assert min(took) < 0.005 * SLOWER
