"""What the server says: every frame it sends, as JSON text made once.

A frame is made where its facts are, encoded once and shared by all who get it. Parts
that already are JSON (a stored chunk, a state, a message) are spliced in, never
decoded again. Frames of runs obey two rules. *One sequence*: `started` is 0, entry i
of the stream is i + 1, the terminal is n + 1, whoever asks and whenever. *Same bytes*:
the `event` of a frame depends on the committed row (or the stored chunk) alone, so a
client that compares what it gets live and in replay finds them equal; the envelope
differs only by `"replay":true`.

A chunk's `body` is a JSON string literal of the chunk's JSON: text inside text. It is
made once with `literal` and spliced for every envelope.

Texts given as `…_json` must be JSON; they are trusted, as they come from our encoder.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Final, Literal, Protocol

import msgspec

from culet.kernel.core.clientframes import Cancel as Cancel
from culet.kernel.core.clientframes import ChatMessages as ChatMessages
from culet.kernel.core.clientframes import ChatRequest as ChatRequest
from culet.kernel.core.clientframes import Clear as Clear
from culet.kernel.core.clientframes import ClientFrame as ClientFrame
from culet.kernel.core.clientframes import Ignored as Ignored
from culet.kernel.core.clientframes import ResumeAck as ResumeAck
from culet.kernel.core.clientframes import ResumeRequest as ResumeRequest
from culet.kernel.core.clientframes import Rpc as Rpc
from culet.kernel.core.clientframes import State as State
from culet.kernel.core.clientframes import ToolApproval as ToolApproval
from culet.kernel.core.clientframes import ToolResult as ToolResult
from culet.kernel.core.clientframes import decode_client_frame as decode_client_frame
from culet.kernel.core.run import Status, public_error

StopReason = Literal["idle"]
Outcome = Literal["aborted", "error", "skipped"]

_encoder: Final = msgspec.json.Encoder()
MCP_SERVERS: Final = (
    '{"type":"cf_agent_mcp_servers",'
    '"mcp":{"servers":{},"tools":[],"prompts":[],"resources":[]}}'
)
CHAT_CLEAR: Final = '{"type":"cf_agent_chat_clear"}'


class RunFacts(Protocol):
    """What the frames of a run are derived from: its committed row."""

    @property
    def run_id(self) -> str: ...  # noqa: D102
    @property
    def agent_type(self) -> str: ...  # noqa: D102
    @property
    def parent_tool_call_id(self) -> str | None: ...  # noqa: D102
    @property
    def order(self) -> int: ...  # noqa: D102
    @property
    def display(self) -> Any: ...  # noqa: D102
    @property
    def preview(self) -> Any: ...  # noqa: D102
    @property
    def status(self) -> Status: ...  # noqa: D102
    @property
    def summary(self) -> str | None: ...  # noqa: D102
    @property
    def error(self) -> str | None: ...  # noqa: D102
    @property
    def error_id(self) -> str | None: ...  # noqa: D102
    @property
    def reason(self) -> str | None: ...  # noqa: D102
    @property
    def n(self) -> int | None: ...  # noqa: D102
    @property
    def started_at(self) -> int: ...  # noqa: D102


def literal(text: str) -> str:
    """Return `text` as a JSON string literal, quotes included."""
    return _encoder.encode(text).decode()


# -- runs ------------------------------------------------------------------------------


def started(run: RunFacts, *, replay: bool = False) -> str:
    """Return frame 0 of a run."""
    event: dict[str, Any] = {
        "kind": "started",
        "runId": run.run_id,
        "agentType": run.agent_type,
    }
    if run.preview is not None:
        event["inputPreview"] = run.preview
    event["order"] = run.order
    if run.display is not None:
        event["display"] = run.display
    # beside the event, so that its content is what it was: clients know it by that
    at = f',"startedAt":{run.started_at}' if run.started_at else ""
    return _lifecycle(run, 0, event, replay=replay, more=at)


def chunk(
    run_id: str,
    tool_call_id: str | None,
    sequence: int,
    body_text: str,
    replay: bool = False,
) -> str:
    """Return the frame of one stream entry; `body_text` is the chunk's JSON.

    `sequence` is the entry's position + 1.
    """
    head, event = _chunk_parts(run_id, tool_call_id)
    mark = ',"replay":true' if replay else ""
    return f"{head}{sequence}{mark}{event}{literal(body_text)}}}}}"


def terminal(run: RunFacts, *, replay: bool = False) -> str:
    """Return the last frame of a run, from its settled row: sequence n + 1.

    The row must be terminal; anything else is our bug.
    """
    assert run.status != "running"
    assert run.n is not None
    event: dict[str, Any]
    match run.status:
        case "completed":
            event = {"kind": "finished", "runId": run.run_id}
            event["summary"] = run.summary or ""
        case "error":
            event = {"kind": "error", "runId": run.run_id, "error": _error(run)}
        case "aborted":
            event = {"kind": "aborted", "runId": run.run_id}
            if run.reason is not None:
                event["reason"] = run.reason
        case "interrupted":  # pragma: no branch - the ends are these four
            event = {"kind": "interrupted", "runId": run.run_id, "error": _error(run)}
            if run.reason is not None:
                event["reason"] = run.reason
    return _lifecycle(run, run.n + 1, event, replay=replay)


def cleared(run: RunFacts) -> str:
    """Return that a run which had ended is forgotten: whoever shows it drops it."""
    assert run.n is not None
    event = {"kind": "cleared", "runIds": [run.run_id]}
    return _lifecycle(run, run.n + 2, event, replay=False)


def forgotten(run_ids: Sequence[str]) -> str:
    """Return that those runs, of which a client still tells, are gone."""
    event = {"kind": "cleared", "runIds": list(run_ids)}
    return f'{_head(None)}0,"event":{_encoder.encode(event).decode()}}}'


def deleted(path: str, run_id: str | None) -> str:
    """Return, for the feed alone, that an agent is gone with all below it."""
    which = {} if run_id is None else {"runId": run_id}
    return _frame(
        "agent-feed-event", {"event": {"kind": "deleted", "path": path, **which}}
    )


TRIMMED: Final = '{"type":"agent-feed-event","event":{"kind":"trimmed"}}'


def _error(run: RunFacts) -> str:
    return public_error(run.status, run.reason, run.error, run.error_id)


def _lifecycle(
    run: RunFacts,
    sequence: int,
    event: dict[str, Any],
    *,
    replay: bool,
    more: str = "",
) -> str:
    head = _head(run.parent_tool_call_id)
    mark = (',"replay":true' if replay else "") + more
    return f'{head}{sequence}{mark},"event":{_encoder.encode(event).decode()}}}'


def _head(tool_call_id: str | None) -> str:
    if tool_call_id is None:
        return '{"type":"agent-tool-event","sequence":'
    call = literal(tool_call_id)
    return f'{{"type":"agent-tool-event","parentToolCallId":{call},"sequence":'


@lru_cache(maxsize=1024)
def _chunk_parts(run_id: str, tool_call_id: str | None) -> tuple[str, str]:
    event = f',"event":{{"kind":"chunk","runId":{literal(run_id)},"body":'
    return _head(tool_call_id), event


# -- connection, state, rpc ------------------------------------------------------------


def identity(name: str, agent: str, *, state_follows: bool = False) -> str:
    """Return who the socket talks to: its name and its class's kebab segment.

    `state_follows` only when a `state` frame does follow: clients wait for it.
    """
    follows = {"stateFollows": True} if state_follows else {}
    return _frame("cf_agent_identity", {"name": name, "agent": agent, **follows})


def state(state_json: str, *, echo: bool = False) -> str:
    """Return the agent's state; `echo`: to the client that has just set it."""
    mark = ',"echo":true' if echo else ""
    return f'{{"type":"cf_agent_state","state":{state_json}{mark}}}'


def state_error(error: str) -> str:
    """Return the refusal of a client's state."""
    return _frame("cf_agent_state_error", {"error": error})


def rpc_result(call_id: str, result_json: str | None = None) -> str:
    """Return the final answer of a call. None: the method returned nothing."""
    result = "" if result_json is None else f',"result":{result_json}'
    head = f'{{"type":"rpc","id":{literal(call_id)},"success":true'
    return f'{head}{result},"done":true}}'


def rpc_chunk(call_id: str, result_json: str) -> str:
    """Return one value of a streaming call."""
    head = f'{{"type":"rpc","id":{literal(call_id)},"success":true'
    return f'{head},"result":{result_json},"done":false}}'


def rpc_error(call_id: str, error: str) -> str:
    """Return the failure of a call; it ends a streaming one too."""
    return _frame("rpc", {"id": call_id, "success": False, "error": error})


# -- chat ------------------------------------------------------------------------------


def chat_response(
    request_id: str,
    body: str = "",
    *,
    done: bool = False,
    error: bool = False,
    continuation: bool = False,
    replay: bool = False,
    replay_complete: bool = False,
    seq: int | None = None,
    message_ids: Sequence[str] | None = None,
    outcome: Outcome | None = None,
) -> str:
    """Return one frame of a turn: a UI chunk (`body` its JSON text) or a control frame.

    With `error` the body is plain text for people.
    """
    tail = "true" if done else "false"
    if error:
        tail += ',"error":true'
    if continuation:
        tail += ',"continuation":true'
    if replay:
        tail += ',"replay":true'
    if replay_complete:
        tail += ',"replayComplete":true'
    if seq is not None:
        tail += f',"seq":{seq}'
    if message_ids is not None:
        tail += f',"messageIds":{_encoder.encode(list(message_ids)).decode()}'
    if outcome is not None:
        tail += f',"outcome":"{outcome}"'
    return f'{_chat_head(request_id)}{literal(body)},"done":{tail}}}'


@lru_cache(maxsize=256)
def _chat_head(request_id: str) -> str:
    call = literal(request_id)
    return f'{{"type":"cf_agent_use_chat_response","id":{call},"body":'


def chat_messages(messages_json: Iterable[str], *, connect: bool = False) -> str:
    """Return the whole transcript, from the JSON of each message."""
    mark = ',"connect":true' if connect else ""
    messages = ",".join(messages_json)
    return f'{{"type":"cf_agent_chat_messages","messages":[{messages}]{mark}}}'


def run_answer(run_id: str, call_id: str, *, taken: bool, error: str | None) -> str:
    """Return what became of an answer to a run below: to the client that gave it."""
    told: dict[str, Any] = {"runId": run_id, "toolCallId": call_id, "accepted": taken}
    if error is not None:
        told["error"] = error
    return _frame("cf_agent_run_answer", told)


def message_updated(message_json: str) -> str:
    """Return one message that changed in place."""
    return f'{{"type":"cf_agent_message_updated","message":{message_json}}}'


def stream_resuming(request_id: str, probe_id: str | None = None) -> str:
    """Return the offer to replay a running turn; `probe_id` echoes a request."""
    return _frame("cf_agent_stream_resuming", {"id": request_id, **_probe(probe_id)})


def stream_none(reason: StopReason | None = None, probe_id: str | None = None) -> str:
    """Return that there is nothing to resume for this client."""
    why = {"reason": reason} if reason else {}
    return _frame("cf_agent_stream_resume_none", {**why, **_probe(probe_id)})


def stream_pending(request_id: str | None = None, probe_id: str | None = None) -> str:
    """Return that a turn is accepted and has said nothing yet."""
    which = {"id": request_id} if request_id is not None else {}
    return _frame("cf_agent_stream_pending", {**which, **_probe(probe_id)})


def chat_recovering(recovering: bool, request_id: str | None = None) -> str:
    """Return whether a recovery is on its way."""
    which = {"id": request_id} if request_id is not None else {}
    return _frame("cf_agent_chat_recovering", {"recovering": recovering, **which})


def _probe(probe_id: str | None) -> dict[str, str]:
    return {} if probe_id is None else {"probeId": probe_id}


def _frame(kind: str, fields: dict[str, Any]) -> str:
    return _encoder.encode({"type": kind, **fields}).decode()
