"""What a client or a person may say to a tool call, and what becomes of the call. Pure.

A call waits while nobody but its client, or the person in front of it, can go on with
it: its input is there and no result, or an approval is asked for. The first answer
stands: a later one, or one for a call that nobody asked for, changes nothing. An
approval that comes when the conversation has gone on runs nothing any more, and the
call says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import msgspec

from culet.adapters.messages import Message, approval_id
from culet.adapters.model import ToolCall, tool_name
from culet.kernel.core import clientframes as client
from culet.kernel.core.chunks import tool_input
from culet.kernel.core.limits import ERROR_CHARS

Part: TypeAlias = dict[str, Any]
ClientAnswer: TypeAlias = client.ToolResult | client.ToolApproval

_TAKES_RESULT: Final = frozenset(
    {"input-available", "approval-requested", "approval-responded"}
)
_TAKES_APPROVAL: Final = frozenset({"input-available", "approval-requested"})
UNKNOWN: Final = "this agent has not asked for this call"
NOBODY: Final = "nobody is there to carry out this call"
TOO_LATE: Final = "approved too late: the conversation had gone on, nothing was done"


def call_part(message: Message, call_id: str) -> Part | None:
    """Return the part of a message that is about a call."""
    parts = (p for p in message["parts"] if p.get("toolCallId") == call_id)
    return next(parts, None)


def answered(part: Part, answer: ClientAnswer, *, output_bytes: int) -> Part | None:
    """Return the part after an answer; None: it takes none such, what it has stands."""
    state = part.get("state")
    if isinstance(answer, client.ToolApproval):
        if state not in _TAKES_APPROVAL:
            return None
        said = {"id": approval_id(answer.tool_call_id), **(part.get("approval") or {})}
        said["approved"] = answer.approved
        after = "approval-responded" if answer.approved else "output-denied"
        return {**part, "state": after, "approval": said}
    if state not in _TAKES_RESULT:
        return None
    if answer.state == "output-error":
        return failed(part, answer.error_text or "the tool failed in the client")
    output = None if answer.output is msgspec.UNSET else answer.output
    size = len(msgspec.json.encode(output))
    if size > output_bytes:
        text = f"the result has {size} bytes, at most {output_bytes} are passed on"
        return failed(part, text)
    return {**part, "state": "output-available", "output": output}


def failed(part: Part, text: str) -> Part:
    """Return a part that has an error for its result."""
    return {**part, "state": "output-error", "errorText": text[:ERROR_CHARS]}


def decided(part: Part, verdict: str) -> ClientAnswer | None:
    """Return the answer that a policy gives; None: it is for a client or a person."""
    call = part["toolCallId"]
    if verdict == "approve":
        return client.ToolApproval(tool_call_id=call, approved=True)
    if verdict != "deny":
        return None
    if part.get("state") == "approval-requested":
        return client.ToolApproval(tool_call_id=call, approved=False)
    return client.ToolResult(tool_call_id=call, state="output-error", error_text=NOBODY)


def late(part: Part) -> Part:
    """Return an approved part after the conversation has gone on without it."""
    return failed(part, TOO_LATE)


def asked_again(part: Part) -> Part:
    """Return a part that waits for a person once more, whatever was said before."""
    approval = {"id": approval_id(part["toolCallId"])}
    return {**part, "state": "approval-requested", "approval": approval}


def chunk_of(part: Part) -> dict[str, Any] | None:
    """Return the chunk that says of a call what its part says; None: it has no result."""
    call = {"toolCallId": part["toolCallId"]}
    match part["state"]:
        case "output-available":
            return {"type": "tool-output-available", **call, "output": part["output"]}
        case "output-error":
            text = part["errorText"]
            return {"type": "tool-output-error", **call, "errorText": text}
        case "output-denied":
            return {"type": "tool-output-denied", **call}
    return None


def from_client(given: Message, stored: Message | None) -> Message:
    """Return a message that a client has set, without what only the agent may say.

    A call is asked for by the agent and moved on by answers: one that is stored stays
    as it is stored, another cannot wait for anything and so is never carried out.
    """
    if given["role"] != "assistant":
        return given
    known = {p["toolCallId"]: p for p in (stored or {}).get("parts", ()) if _is_call(p)}
    return {**given, "parts": [_honest(part, known) for part in given["parts"]]}


def _is_call(part: Part) -> bool:
    return isinstance(part.get("toolCallId"), str)


def _honest(part: Part, known: dict[str, Part]) -> Part:
    if not _is_call(part):
        return part
    if part["toolCallId"] in known:
        return known[part["toolCallId"]]
    return failed(part, UNKNOWN) if part.get("state") in _TAKES_RESULT else part


def replaced(message: Message, part: Part) -> Message:
    """Return the message with another part for the same call."""
    call = part["toolCallId"]
    parts = [part if p.get("toolCallId") == call else p for p in message["parts"]]
    return {**message, "parts": parts}


def waiting(message: Message, client_runs: Callable[[str], bool]) -> list[Part]:
    """Return the parts that wait for an answer.

    `client_runs` tells of a tool's name whether the client carries it out: then a call
    that was approved waits for its result.
    """
    return [p for p in message["parts"] if _waits(p, client_runs)]


def _waits(part: Part, client_runs: Callable[[str], bool]) -> bool:
    if "toolCallId" not in part:
        return False
    if part.get("state") == "approval-responded":
        return client_runs(tool_name(part) or "")
    return part.get("state") in _TAKES_APPROVAL


def approved_calls(message: Message) -> list[ToolCall]:
    """Return the calls that a person has approved and that have no result."""
    return [
        ToolCall(
            id=p["toolCallId"],
            name=tool_name(p) or "",
            input=tool_input(p.get("input")),
        )
        for p in message["parts"]
        if p.get("state") == "approval-responded"
        and isinstance(p.get("toolCallId"), str)
        and (p.get("approval") or {}).get("approved") is True
    ]


def ends_with_calls(message: Message) -> bool:
    """Whether tool calls are in the last step: the model has not spoken after them."""
    for part in reversed(message["parts"]):
        if part.get("type") == "step-start":
            return False
        if "toolCallId" in part:
            return True
    return False
