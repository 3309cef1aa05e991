"""Whatever a client sends is a frame of the protocol or an ordinary message: decoding
never raises.

Frames that are right are made wrong: bits, cuts, other types in fields, deep nesting,
numbers that no machine holds, halves of surrogate pairs. A frame that is right and odd
must come through.
"""

from __future__ import annotations

import json
from typing import Any, Final, get_args

from culet.kernel.core.clientframes import ClientFrame, Ignored, decode_client_frame
from fuzz.case import Case
from machines.sometimes import Sometimes

SOMETIMES: Final = Sometimes("frame", "ordinary", "ignored", "deep")
MESSAGE: Final = {"id": "m", "role": "user", "parts": [{"type": "text", "text": "x"}]}
BODY: Final = json.dumps({"messages": [MESSAGE], "trigger": "submit-message"})
RIGHT: Final[tuple[dict[str, Any], ...]] = (
    {"type": "rpc", "id": "1", "method": "m", "args": [1, {"a": None}]},
    {"type": "cf_agent_state", "state": {"n": 1}},
    {"type": "cf_agent_use_chat_request", "id": "r", "init": {"method": "POST", "body": BODY}},
    {"type": "cf_agent_chat_request_cancel", "id": "r"},
    {"type": "cf_agent_chat_clear"},
    {"type": "cf_agent_chat_messages", "messages": [MESSAGE]},
    {"type": "cf_agent_stream_resume_request", "probeId": "p"},
    {"type": "cf_agent_stream_resume_ack", "id": "r"},
    {"type": "cf_agent_tool_result", "toolCallId": "t", "toolName": "n", "output": 1},
    {"type": "cf_agent_tool_approval", "toolCallId": "t", "approved": True},
)  # fmt: skip
KINDS: Final = get_args(ClientFrame)


def play(case: Case) -> None:
    """Decode one message, right or wrong."""
    right = dict(case.rng.choice(RIGHT))
    match case.rng.randrange(7):
        case 0:
            right["x"] = case.json()  # what we do not know does not make it wrong
            text = json.dumps(right)
            assert isinstance(decode_client_frame(text), KINDS), text[:200]
        case 1 | 2:
            right[case.rng.choice(list(right))] = case.json()
            text = json.dumps(right)
        case 3:
            case.mark("deep")
            deep = case.one("[", '{"a":') * case.one(10, 1000, 200_000)
            text = json.dumps(right)[:-1] + ',"deep":' + deep
        case 4:
            text = json.dumps(case.json())
        case 5:
            init = {"method": case.one("POST", "GET"), "body": json.dumps(case.json())}
            request = {"type": "cf_agent_use_chat_request", "id": "r", "init": init}
            text = json.dumps(request)
        case _:
            data = case.damaged(json.dumps(right).encode())
            text = data.decode("utf-8", case.one("surrogateescape", "replace"))
    found = decode_client_frame(text)
    assert found is None or isinstance(found, KINDS)
    assert decode_client_frame(text.encode("utf-8", "surrogatepass")) is None
    if found is None:
        case.mark("ordinary")
    else:
        case.mark("ignored" if isinstance(found, Ignored) else "frame")
        assert decode_client_frame(text) == found
