"""The rules for a chat's messages: what a request changes, what a turn leaves behind.

Messages are UI messages, plain JSON. A client always sends its whole list, so the
server decides what is new in it. What a turn has said lies in its stream; the message
is a fold of that stream, so the same stream always makes the same message, also after a
crash. Everything here is pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from culet.kernel.core.chunks import apply_chunk_to_parts, fold

Message = dict[str, Any]
_WAITING: Final = frozenset({"input-streaming", "input-available"})
_TERMINAL_TOOL: Final = frozenset({"output-available", "output-error", "output-denied"})


class Merge(NamedTuple):
    """What an incoming list changes: ids to delete, messages to upsert in their order."""

    delete: list[str]
    put: list[Message]


def merge(stored: Mapping[str, str], incoming: Sequence[Message]) -> Merge:
    """Return what a chat request changes; `stored` is id -> role, oldest first.

    If every incoming message is known already, the request is for an earlier place (an
    edit, a regenerate): what it does not name is deleted. Otherwise nothing is. A known
    assistant message stays as the server has it: a client that stopped a turn has less.
    One without an id is none.
    """
    put = [
        m
        for m in incoming
        if m["id"] and (m["role"] != "assistant" or stored.get(m["id"]) != "assistant")
    ]
    named = {m["id"] for m in incoming}
    if not named or not named <= stored.keys():
        return Merge([], put)
    return Merge([i for i in stored if i not in named], put)


def trailing_user_ids(messages: Sequence[Message]) -> list[str]:
    """Return the ids of the user messages at the end, in their order."""
    out: list[str] = []
    for message in reversed(messages):
        if message["role"] != "user":
            break
        out.append(message["id"])
    return out[::-1]


def reply_id(request_id: str) -> str:
    """Return the id of the assistant message that answers a request."""
    return f"msg-{request_id}"


def input_id(run_id: str) -> str:
    """Return the id of the user message that a run's input becomes."""
    return f"agent-tool-{run_id}-input"


def user_message(text: str, message_id: str) -> Message:
    """Return a user message of one text."""
    return {
        "id": message_id,
        "role": "user",
        "parts": [{"type": "text", "text": text}],
    }


def input_messages(value: Any, run_id: str) -> list[Message]:
    """Return what `format_agent_tool_input` answered as messages with stable ids.

    A text is one user message; a message or a list of them is taken, an id added where
    one is missing.
    """
    if isinstance(value, str):
        return [user_message(value, input_id(run_id))]
    given = [value] if isinstance(value, Mapping) else list(value)
    out: list[Message] = []
    for number, message in enumerate(given):
        own = input_id(run_id) if number == 0 else f"{input_id(run_id)}-{number}"
        out.append({"id": own, **message})
    return out


def input_text(value: Any) -> str:
    """Return a run's input as text for a model: as it is, else JSON for people."""
    if isinstance(value, str):
        return value
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def assistant_message(
    message_id: str,
    chunks: Iterable[Mapping[str, Any]],
    *,
    ended: str | None,
    base: Message | None = None,
    decided: Mapping[str, bool] | None = None,
) -> Message | None:
    """Return the message that a stream makes; None when it shows nothing.

    `ended` is how the turn ended, None while it goes on. `base` is the message that a
    continuation goes on in. `decided` is what persons said to the approvals that the
    stream asks for, by tool call: no chunk says that.
    """
    told = list(chunks)
    if base is None:
        parts = fold(told)
    else:
        parts = list(base["parts"])
        for chunk in told:
            parts = apply_chunk_to_parts(parts, chunk)
    parts = _finals(parts, told)
    if decided:
        parts = [_decided(part, decided) for part in parts]
    if ended is not None:
        parts = [_closed(part, ended) for part in parts]
    metadata = _mapping(base.get("metadata")) if base else {}
    for chunk in told:
        if chunk.get("type") in ("start", "finish", "message-metadata"):
            metadata |= _mapping(chunk.get("messageMetadata"))
    if all(part["type"] == "step-start" for part in parts):
        return None
    made: Message = {"id": message_id, "role": "assistant", "parts": parts}
    if metadata:
        made["metadata"] = metadata
    return made


def _mapping(value: Any) -> dict[str, Any]:
    """Return a copy of a mapping; whatever else an author or client sent says nothing."""
    return dict(value) if isinstance(value, Mapping) else {}


def _finals(
    parts: list[dict[str, Any]], told: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the parts without the mark `preliminary` where a final output came.

    Clients' reducer keeps that mark when the final chunk does not name it.
    """
    preliminary: dict[str, bool] = {}
    for chunk in told:
        call = chunk.get("toolCallId")
        if chunk.get("type") == "tool-output-available" and isinstance(call, str):
            preliminary[call] = bool(chunk.get("preliminary"))
    return [
        {k: v for k, v in part.items() if k != "preliminary"}
        if "preliminary" in part
        and not preliminary.get(str(part.get("toolCallId")), True)
        else part
        for part in parts
    ]


def approval_id(call_id: str) -> str:
    """Return the id of the approval that is asked for a tool call."""
    return f"approval-{call_id}"


def _decided(part: dict[str, Any], said: Mapping[str, bool]) -> dict[str, Any]:
    """Return a part with what a person has said to its approval."""
    call = part.get("toolCallId")
    if not isinstance(call, str) or call not in said:
        return part
    approval = {"id": approval_id(call), **_mapping(part.get("approval"))}
    made = {**part, "approval": {**approval, "approved": said[call]}}
    if said[call] and part.get("state") in ("input-available", "approval-requested"):
        made["state"] = "approval-responded"
    return made


def _closed(part: dict[str, Any], ended: str) -> dict[str, Any]:
    """Return a part as it is after the end: nothing streams, no tool is under way."""
    if part.get("state") == "streaming":
        return {**part, "state": "done"}
    if "toolCallId" not in part:
        return part
    state, cut = part.get("state"), ended != "completed"
    unfinished = (
        state in _WAITING
        or (state == "approval-responded" and cut)  # it may have been carried out
        or (state == "output-available" and bool(part.get("preliminary")))
    )
    if not unfinished or (not cut and state == "input-available"):
        return part  # a call that the turn left to a client or to a person waits
    text = "aborted" if ended == "aborted" else f"the turn ended: {ended}"
    kept = {k: v for k, v in part.items() if k not in ("output", "preliminary")}
    return {**kept, "state": "output-error", "errorText": text}


def message_id_of(chunks: Iterable[Mapping[str, Any]], default: str) -> str:
    """Return the id that a stream's `start` gives its message."""
    for chunk in chunks:
        if chunk.get("type") == "start":
            given = chunk.get("messageId")
            return given if isinstance(given, str) and given else default
    return default


def has_tool_results(parts: Iterable[Mapping[str, Any]]) -> bool:
    """Whether some tool call among the parts is settled: a preliminary output is none."""
    return any(
        "toolCallId" in part
        and part.get("state") in _TERMINAL_TOOL
        and not part.get("preliminary")
        for part in parts
    )


def tool_call_ids(messages: Iterable[Message]) -> set[str]:
    """Return every tool call id of a conversation."""
    return {
        part["toolCallId"]
        for message in messages
        for part in message["parts"]
        if isinstance(part.get("toolCallId"), str)
    }


def unique_call_id(wanted: str, used: Collection[str], message_id: str, n: int) -> str:
    """Return the id of the `n`-th tool call of a message: the model's, if it is fresh.

    Local servers number their calls from zero in each answer; a run is named by its
    tool call, so such an id is replaced, the same way after a crash.
    """
    if wanted and wanted not in used:
        return wanted
    return f"call-{message_id}-{n}"
