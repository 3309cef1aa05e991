"""Frames: their exact bytes, live equal to replay, and what they cost."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culet.kernel.core import frames
from culet.kernel.core.reducer import AgentToolEvents, apply_agent_tool_event
from culet.kernel.core.run import AgentToolRun
from volume import SLOWER

RUN = AgentToolRun(
    run_id="r1",
    agent_type="Researcher",
    parent_tool_call_id="call-1",
    order=2,
    display={"name": "Research", "icon": "x"},
    preview={"query": "string(6)"},
)


def ended(status: str, **more: object) -> AgentToolRun:
    return AgentToolRun(
        run_id="r1", agent_type="A", status=status, n=3, completed_at=5, **more
    )


@pytest.mark.rule("T-062", "W-201", "W-204")
def test_the_bytes_of_the_frames_of_a_run() -> None:
    assert frames.started(RUN) == (
        '{"type":"agent-tool-event","parentToolCallId":"call-1","sequence":0,"event":'
        '{"kind":"started","runId":"r1","agentType":"Researcher",'
        '"inputPreview":{"query":"string(6)"},"order":2,'
        '"display":{"name":"Research","icon":"x"}}}'
    )
    assert frames.chunk("r1", "call-1", 4, '{"type":"x","d":"é\\n"}') == (
        '{"type":"agent-tool-event","parentToolCallId":"call-1","sequence":4,"event":'
        '{"kind":"chunk","runId":"r1","body":"{\\"type\\":\\"x\\",'
        '\\"d\\":\\"é\\\\n\\"}"}}'
    )
    assert frames.terminal(ended("completed", summary="ok")) == (
        '{"type":"agent-tool-event","sequence":4,"event":'
        '{"kind":"finished","runId":"r1","summary":"ok"}}'
    )
    assert frames.cleared(ended("completed")) == (
        '{"type":"agent-tool-event","sequence":5,"event":'
        '{"kind":"cleared","runIds":["r1"]}}'
    )


@pytest.mark.rule("W-204")
@pytest.mark.parametrize(
    ("run", "event"),
    [
        (ended("completed"), {"kind": "finished", "runId": "r1", "summary": ""}),
        (ended("error", error="e"), {"kind": "error", "runId": "r1", "error": "e"}),
        (ended("error"), {"kind": "error", "runId": "r1", "error": "the run failed"}),
        (ended("aborted"), {"kind": "aborted", "runId": "r1"}),
        (
            ended("aborted", reason="stop"),
            {"kind": "aborted", "runId": "r1", "reason": "stop"},
        ),
        (
            ended("interrupted", reason="budget-exceeded"),
            {"kind": "interrupted", "runId": "r1", "reason": "budget-exceeded",
             "error": "the run was interrupted (budget-exceeded)"},
        ),
    ],
)  # fmt: skip
def test_terminal_frames_come_from_the_row(run: AgentToolRun, event: dict) -> None:
    frame = json.loads(frames.terminal(run))
    assert frame == {"type": "agent-tool-event", "sequence": 4, "event": event}


def test_a_running_row_has_no_terminal() -> None:
    with pytest.raises(AssertionError):
        frames.terminal(RUN)


texts = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.mark.rule("I-19", "W-201", "W-203")
@given(texts, texts | st.none(), texts, st.integers(1, 1 << 40))
def test_replay_differs_by_its_mark_only(
    run_id: str, call: str | None, delta: str, sequence: int
) -> None:
    body = json.dumps({"type": "text-delta", "id": "t", "delta": delta})
    live = frames.chunk(run_id, call, sequence, body)
    again = frames.chunk(run_id, call, sequence, body, True)
    assert again.replace(',"replay":true', "", 1) == live
    frame = json.loads(again)
    assert frame.pop("replay") is True
    assert frame == json.loads(live)
    assert frame["sequence"] == sequence
    assert frame.get("parentToolCallId") == call
    assert frame["event"] == {"kind": "chunk", "runId": run_id, "body": body}


@pytest.mark.rule("W-203")
@pytest.mark.parametrize("make", [frames.started, lambda r, **k: frames.terminal(
    ended("completed", summary=r.agent_type), **k)])  # fmt: skip
def test_lifecycle_events_have_equal_bytes_live_and_in_replay(make) -> None:
    live, again = make(RUN), make(RUN, replay=True)
    assert again.replace(',"replay":true', "", 1) == live
    assert live.partition('"event":')[2] == again.partition('"event":')[2]


def test_a_client_folds_our_frames_into_the_run() -> None:
    state = AgentToolEvents.empty()
    done = AgentToolRun(run_id="r1", agent_type="Researcher", status="completed",
                        parent_tool_call_id="call-1", summary="Hi", n=1)  # fmt: skip
    for text in (
        frames.started(RUN),
        frames.chunk("r1", "call-1", 1, '{"type":"text-delta","delta":"Hi"}'),
        frames.terminal(done),
    ):
        state = apply_agent_tool_event(state, json.loads(text))
    run = state.runs_by_id["r1"]
    assert (run["status"], run["summary"], run["order"]) == ("completed", "Hi", 2)
    assert run["parts"][0]["text"] == "Hi"
    state = apply_agent_tool_event(state, json.loads(frames.cleared(done)))
    assert state.runs_by_id == {}


@pytest.mark.rule("W-114", "W-117", "W-118")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            frames.identity('a"b', "job-runner"),
            {"type": "cf_agent_identity", "name": 'a"b', "agent": "job-runner"},
        ),
        (
            frames.identity("a", "x", state_follows=True),
            {"type": "cf_agent_identity", "name": "a", "agent": "x",
             "stateFollows": True},
        ),
        (frames.state('{"n":1}'), {"type": "cf_agent_state", "state": {"n": 1}}),
        (frames.state_error("no"), {"type": "cf_agent_state_error", "error": "no"}),
        (
            frames.MCP_SERVERS,
            {"type": "cf_agent_mcp_servers",
             "mcp": {"servers": {}, "tools": [], "prompts": [], "resources": []}},
        ),
        (
            frames.rpc_result("1", "[2]"),
            {"type": "rpc", "id": "1", "success": True, "result": [2], "done": True},
        ),
        (
            frames.rpc_result("1"),
            {"type": "rpc", "id": "1", "success": True, "done": True},
        ),
        (
            frames.rpc_chunk("1", "null"),
            {"type": "rpc", "id": "1", "success": True, "result": None, "done": False},
        ),
        (
            frames.rpc_error("1", "no"),
            {"type": "rpc", "id": "1", "success": False, "error": "no"},
        ),
        (
            frames.chat_response("q", '{"type":"start"}', seq=0),
            {"type": "cf_agent_use_chat_response", "id": "q", "done": False, "seq": 0,
             "body": '{"type":"start"}'},
        ),
        (
            frames.chat_response("q", done=True, error=True, continuation=True,
                                 replay=True, replay_complete=True,
                                 message_ids=["m"], outcome="aborted"),
            {"type": "cf_agent_use_chat_response", "id": "q", "body": "",
             "done": True, "error": True, "continuation": True, "replay": True,
             "replayComplete": True, "messageIds": ["m"], "outcome": "aborted"},
        ),
        (
            frames.chat_messages(['{"id":"a"}', '{"id":"b"}'], connect=True),
            {"type": "cf_agent_chat_messages", "connect": True,
             "messages": [{"id": "a"}, {"id": "b"}]},
        ),
        (frames.chat_messages([]), {"type": "cf_agent_chat_messages", "messages": []}),
        (frames.CHAT_CLEAR, {"type": "cf_agent_chat_clear"}),
        (
            frames.message_updated('{"id":"a"}'),
            {"type": "cf_agent_message_updated", "message": {"id": "a"}},
        ),
        (
            frames.stream_resuming("q", "p"),
            {"type": "cf_agent_stream_resuming", "id": "q", "probeId": "p"},
        ),
        (frames.stream_none(), {"type": "cf_agent_stream_resume_none"}),
        (
            frames.stream_none("idle", "p"),
            {"type": "cf_agent_stream_resume_none", "reason": "idle", "probeId": "p"},
        ),
        (
            frames.stream_pending("q", "p"),
            {"type": "cf_agent_stream_pending", "id": "q", "probeId": "p"},
        ),
        (
            frames.chat_recovering(True, "q"),
            {"type": "cf_agent_chat_recovering", "recovering": True, "id": "q"},
        ),
    ],
)  # fmt: skip
def test_the_other_frames(text: str, expected: dict) -> None:
    assert json.loads(text) == expected


def test_a_chunk_frame_is_cheap() -> None:
    body = json.dumps({"type": "text-delta", "id": "m", "delta": "x" * 60})
    best = 9.0
    for _ in range(5):
        begun = time.thread_time()
        for sequence in range(2000):
            frames.chunk("run-01", "call-1", sequence, body)
        best = min(best, time.thread_time() - begun)
    assert best / 2000 < 10e-6 * SLOWER  # about 1 µs when nobody else is at work
