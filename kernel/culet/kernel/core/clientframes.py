"""What clients say: every frame they send, decoded once into a typed value.

A WebSocket message is either one of the protocol's frames or an ordinary message for
the app; nothing in between is an error. Text that is no JSON, an unknown `type`, and a
known type without the fields that make it such a frame are ordinary messages (None).
Only a chat request whose inner body is unusable is neither: the protocol says to
ignore it, so it comes back as `Ignored`, with the reason for the log.

Law: `decode_client_frame` never raises, whatever it is given.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

_DEEPER_ERRORS: Final = (msgspec.DecodeError, UnicodeError, RecursionError)


class Rpc(msgspec.Struct, frozen=True, tag="rpc"):
    """A call of an `@rpc` method. Arguments stay JSON, to be decoded to annotations."""

    id: str
    method: str
    args: list[msgspec.Raw]


class State(msgspec.Struct, frozen=True, tag="cf_agent_state"):
    """A client's new state, as JSON. With `echo` it wants to be told as the others are."""

    state: msgspec.Raw
    echo: bool = False


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The start of a turn: the client's messages and its custom keys in `body`."""

    id: str
    messages: list[dict[str, Any]]
    trigger: Literal["submit-message", "regenerate-message"] = "submit-message"
    client_tools: list[dict[str, Any]] = []
    body: dict[str, Any] = {}


class Cancel(msgspec.Struct, frozen=True, tag="cf_agent_chat_request_cancel"):
    """Stop the turn of a request."""

    id: str


class Clear(msgspec.Struct, frozen=True, tag="cf_agent_chat_clear"):
    """Clear the history."""


class ChatMessages(msgspec.Struct, frozen=True, tag="cf_agent_chat_messages"):
    """The client set its messages; the server upserts them by id."""

    messages: list[dict[str, Any]]


class ResumeRequest(
    msgspec.Struct, frozen=True, rename="camel", tag="cf_agent_stream_resume_request"
):
    """Is there a stream to resume? Must be answered, echoing `probe_id`."""

    probe_id: str | None = None


class ResumeAck(msgspec.Struct, frozen=True, tag="cf_agent_stream_resume_ack"):
    """Replay that request to me now."""

    id: str


class ToolResult(
    msgspec.Struct, frozen=True, rename="camel", tag="cf_agent_tool_result"
):
    """The result of a tool that ran in the client. `output` is UNSET when undefined."""

    tool_call_id: str
    tool_name: str = ""
    output: Any = msgspec.UNSET
    state: Literal["output-available", "output-error"] = "output-available"
    error_text: str | None = None
    auto_continue: bool = False
    client_tools: list[dict[str, Any]] | None = None
    run_id: str | None = None  # of a run below the agent; None: a call of its own


class ToolApproval(
    msgspec.Struct, frozen=True, rename="camel", tag="cf_agent_tool_approval"
):
    """A user's answer to an approval request."""

    tool_call_id: str
    approved: bool
    auto_continue: bool = False
    run_id: str | None = None  # of a run below the agent; None: a call of its own


class Ignored(msgspec.Struct, frozen=True):
    """A frame of the protocol that says nothing usable; not for the app either."""

    type: str
    why: str


class _Init(msgspec.Struct):
    method: str = "POST"
    body: str = ""


class _ChatRequest(msgspec.Struct, tag="cf_agent_use_chat_request"):
    id: str
    init: _Init


ClientFrame = (
    Rpc
    | State
    | ChatRequest
    | Cancel
    | Clear
    | ChatMessages
    | ResumeRequest
    | ResumeAck
    | ToolResult
    | ToolApproval
    | Ignored
)
_Wire = (
    Rpc
    | State
    | _ChatRequest
    | Cancel
    | Clear
    | ChatMessages
    | ResumeRequest
    | ResumeAck
    | ToolResult
    | ToolApproval
)
_decoder: Final = msgspec.json.Decoder(_Wire)


def decode_client_frame(text: str | bytes) -> ClientFrame | None:
    """Return the frame that a text message is, or None for an ordinary message."""
    if isinstance(text, bytes):
        return None  # no client sends frames as binary messages
    try:
        frame = _decoder.decode(text)
    except _DEEPER_ERRORS:
        return None
    if isinstance(frame, _ChatRequest):
        return _chat_request(frame)
    if isinstance(frame, ChatMessages) and ui_messages(frame.messages) is None:
        return Ignored("cf_agent_chat_messages", "the messages are not UI messages")
    return frame


def ui_messages(values: object) -> list[dict[str, Any]] | None:
    """Return `values` if it is a list of UI messages (id, role, parts), else None."""
    if not isinstance(values, list) or not all(_is_message(v) for v in values):
        return None
    return values


def _is_message(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    parts = value.get("parts")
    return (
        isinstance(value.get("id"), str)
        and value.get("role") in ("system", "user", "assistant")
        and isinstance(parts, list)
        and all(isinstance(p, dict) and isinstance(p.get("type"), str) for p in parts)
    )


def _chat_request(frame: _ChatRequest) -> ChatRequest | Ignored:
    kind = "cf_agent_use_chat_request"
    if frame.init.method != "POST":
        return Ignored(kind, f"method {frame.init.method!r}")
    try:
        body = msgspec.json.decode(frame.init.body)
    except _DEEPER_ERRORS:
        return Ignored(kind, "the body is not JSON")
    if not isinstance(body, dict):
        return Ignored(kind, "the body is not an object")
    messages = ui_messages(body.pop("messages", None))
    if messages is None:
        return Ignored(kind, "the messages are not UI messages")
    trigger = body.pop("trigger", "submit-message")
    if trigger not in ("submit-message", "regenerate-message"):
        return Ignored(kind, f"trigger {trigger!r}")
    tools = body.pop("clientTools", None)
    usable = isinstance(tools, list) and all(isinstance(t, dict) for t in tools)
    return ChatRequest(
        id=frame.id,
        messages=messages,
        trigger=trigger,
        client_tools=tools if usable else [],
        body=body,
    )
