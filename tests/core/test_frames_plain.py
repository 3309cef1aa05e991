"""Frames of runs and turns that have nothing to add: no key without a value."""

from __future__ import annotations

import json

import pytest

from culet.kernel.core import frames
from culet.kernel.core.run import AgentToolRun


@pytest.mark.rule("W-204")
def test_a_run_without_preview_and_display_has_no_such_keys() -> None:
    frame = json.loads(
        frames.started(AgentToolRun(run_id="r", agent_type="A", order=1))
    )

    assert frame == {
        "type": "agent-tool-event", "sequence": 0,
        "event": {"kind": "started", "runId": "r", "agentType": "A", "order": 1},
    }  # fmt: skip


def test_an_interrupted_run_without_a_reason_has_none() -> None:
    run = AgentToolRun(
        run_id="r", agent_type="A", status="interrupted", n=0, completed_at=1, error="e"
    )
    frame = json.loads(frames.terminal(run))

    assert frame["event"] == {"kind": "interrupted", "runId": "r", "error": "e"}


def test_a_running_row_with_a_length_has_no_end_either() -> None:
    with pytest.raises(AssertionError):
        frames.terminal(AgentToolRun(run_id="r", agent_type="A", n=3))


def test_live_frames_are_not_marked_as_replay() -> None:
    assert "replay" not in frames.chunk("r", None, 1, "{}")
    assert json.loads(frames.chunk("r", None, 1, "{}", True))["replay"] is True


@pytest.mark.rule("W-114")
def test_a_plain_frame_of_a_turn_has_three_keys_and_done() -> None:
    frame = json.loads(frames.chat_response("q", "{}"))

    want = {
        "type": "cf_agent_use_chat_response",
        "id": "q",
        "body": "{}",
        "done": False,
    }
    assert frame == want


def test_runs_that_are_gone_are_named_to_a_client_that_still_tells_of_them() -> None:
    assert json.loads(frames.forgotten(["r1", "r2"])) == {
        "type": "agent-tool-event", "sequence": 0,
        "event": {"kind": "cleared", "runIds": ["r1", "r2"]},
    }  # fmt: skip


@pytest.mark.parametrize("run_id", [None, "r"])
def test_the_feed_says_who_is_gone_and_whose_run_it_was(run_id: str | None) -> None:
    event = {"kind": "deleted", "path": "/a/b"} | ({"runId": run_id} if run_id else {})

    frame = json.loads(frames.deleted("/a/b", run_id))

    assert frame == {"type": "agent-feed-event", "event": event}


def test_the_feed_says_where_its_beginning_was_cut_off() -> None:
    event = {"type": "agent-feed-event", "event": {"kind": "trimmed"}}
    assert json.loads(frames.TRIMMED) == event


@pytest.mark.parametrize("echo", [True, False])
def test_a_state_is_marked_for_the_client_that_has_set_it_alone(echo: bool) -> None:
    frame = json.loads(frames.state('{"n":1}', echo=echo))

    assert frame == {"type": "cf_agent_state", "state": {"n": 1}} | (
        {"echo": True} if echo else {}
    )


@pytest.mark.parametrize(
    ("taken", "error"), [(True, None), (False, None), (False, "readonly")]
)
def test_an_answer_to_a_run_below_is_told_taken_or_not_and_why(
    taken: bool, error: str | None
) -> None:
    frame = json.loads(frames.run_answer("r", "c", taken=taken, error=error))

    told = {"runId": "r", "toolCallId": "c", "accepted": taken}
    assert frame == {"type": "cf_agent_run_answer", **told} | (
        {"error": error} if error else {}
    )
