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
    literal = frames.literal("{}")

    assert "replay" not in frames.chunk("r", None, 1, "{}")
    assert "replay" not in frames.chunk_frame("r", None, 1, literal)
    assert json.loads(frames.chunk_frame("r", None, 1, literal, True))["replay"] is True


@pytest.mark.rule("W-114")
def test_a_plain_frame_of_a_turn_has_three_keys_and_done() -> None:
    frame = json.loads(frames.chat_response_frame("q", frames.literal("{}")))

    want = {
        "type": "cf_agent_use_chat_response",
        "id": "q",
        "body": "{}",
        "done": False,
    }
    assert frame == want
