"""What an event is to somebody who reads along in a terminal, a pipe or as JSON."""

from __future__ import annotations

import io
import json
from typing import Any, cast

import pytest

from culet.kernel import AgentToolEvents
from culet.web import RemoteAgent
from culet.web import client_events as told
from culet.web.terminal_events import as_json, print_common, print_event, summary
from culet.web.terminal_screen import Screen


def lines(*events: told.Event, turns: set[str] | None = None) -> list[str]:
    """Return what a pipe gets of these events."""
    out = io.StringIO()
    screen = Screen(out, out, {})
    seen: set[str] = set() if turns is None else turns
    for event in events:
        print_event(event, screen, seen)
    return out.getvalue().splitlines()


def run(status: str = "running", **more: Any) -> dict[str, Any]:
    return {"runId": "r1", "agentType": "Worker", "order": 0, "status": status, **more}


def changed(
    run: dict[str, Any], kind: str = "finished", chunk: Any = None
) -> told.RunChanged:
    return told.RunChanged(
        run_id=run["runId"], kind=kind, sequence=1, chunk=chunk, run=run
    )


def chunk(request_id: str, seq: int) -> told.ChatChunk:
    return told.ChatChunk(request_id=request_id, seq=seq, chunk={"type": "start"})


def test_a_turn_is_a_line_when_it_begins_and_one_when_it_ends() -> None:
    ended = told.ChatEnded(request_id="q1", outcome="completed")
    assert lines(chunk("q1", 0), chunk("q1", 1), ended, chunk("q1", 0)) == [
        "● turn q1",
        "✓ turn q1 completed",
        "● turn q1",
    ]


@pytest.mark.parametrize(
    ("outcome", "error", "line"),
    [
        ("error", "it broke", "✗ turn q1 error: it broke"),
        ("aborted", None, "■ turn q1 aborted"),
        ("skipped", None, "■ turn q1 skipped"),
    ],
)
def test_how_a_turn_ended_is_told_with_its_reason(
    outcome: str, error: str | None, line: str
) -> None:
    ended = told.ChatEnded(request_id="q1", outcome=outcome, error=error)
    assert lines(ended) == [line]


def test_the_transcript_is_its_length_and_its_last_words() -> None:
    parts = [{"type": "text", "text": "hello"}]
    question = {"id": "m", "role": "user", "parts": parts}
    silent = {"id": "n", "role": "assistant", "parts": []}
    assert lines(
        told.MessagesChanged(messages=[question]),
        told.MessagesChanged(messages=[question, silent]),
        told.MessagesChanged(messages=[]),
    ) == ["1 messages, the last: hello", "2 messages", "0 messages"]


def test_bytes_of_the_app_are_shown_as_bytes() -> None:
    assert lines(told.Message(data=b"\x00a")) == [r"message b'\x00a'"]


def test_a_connection_that_is_lost_and_comes_back_is_told() -> None:
    assert lines(
        told.Connected(name="s", agent="hub", connections=1),
        told.Disconnected(code=1006, reason="", retry_in_s=0.25),
        told.Connected(name="s", agent="hub", connections=2),
        told.Disconnected(code=1012, reason="the server restarts", retry_in_s=1.0),
    ) == [
        "connected to hub s",
        "connection lost (code 1006); trying again in 0.2 s",
        "connected again to hub s",
        "connection lost (the server restarts); trying again in 1.0 s",
    ]


def test_who_was_too_slow_is_told_what_it_missed() -> None:
    assert lines(told.Lagged(dropped=7)) == ["… 7 events were too many to show"]


def test_of_the_chunks_of_a_run_only_milestones_are_lines() -> None:
    milestone = {"type": "data-agent-milestone", "data": {"name": "half way"}}
    nameless = {"type": "data-agent-milestone", "data": ["of no use"]}
    assert lines(
        changed(run(), "started"),
        changed(run(), "chunk", {"type": "text-delta", "delta": "w"}),
        changed(run(), "chunk"),  # one that could not be read
        changed(run(), "chunk", milestone),
        changed(run(), "chunk", nameless),
    ) == ["· Worker r1 started", "◆ Worker r1: half way", "◆ Worker r1:"]


@pytest.mark.parametrize(
    ("ended", "line"),
    [
        (run("completed", summary="found it"), "✓ Worker r1: found it"),
        (run("error", error="it broke"), "✗ Worker r1: it broke"),
        (run("aborted"), "■ Worker r1: aborted"),
        (run("interrupted"), "✗ Worker r1: interrupted"),
        (run("aborted", display={"name": "Search"}), "■ Search 1: aborted"),
        (run("aborted", display="Search"), "■ Worker r1: aborted"),
    ],
)
def test_a_run_that_ended_says_what_came_of_it(
    ended: dict[str, Any], line: str
) -> None:
    assert lines(changed(ended)) == [line]


def test_runs_that_were_forgotten_are_counted() -> None:
    assert lines(told.RunsCleared(run_ids=["r1", "r2"])) == ["2 runs forgotten"]


def test_beside_a_chat_only_runs_and_the_connection_are_lines() -> None:
    out = io.StringIO()
    for event in (
        chunk("q1", 0),
        told.StateChanged(state=1),
        changed(run("aborted")),
    ):
        print_common(event, Screen(out, out, {}))
    assert out.getvalue() == "■ Worker r1: aborted\n"


def test_a_chunk_as_json_does_not_repeat_what_its_run_has_said() -> None:
    said = run(parts=[{"type": "text", "text": "long"}])
    assert "parts" not in json.loads(as_json(changed(said, "chunk")))["run"]
    assert json.loads(as_json(changed(said, "started")))["run"]["parts"]
    assert said["parts"], "the event itself is left alone"


class Known:
    """What `summary` looks at of an agent."""

    def __init__(
        self, *runs: dict[str, Any], turns: tuple[str, ...] = (), lost: bool = False
    ) -> None:
        by_id = {f"r{number}": one for number, one in enumerate(runs)}
        self.runs = AgentToolEvents(by_id, {}, 0)
        self.turns = list(turns)
        self.is_connected = not lost


@pytest.mark.parametrize(
    ("known", "line"),
    [
        (Known(), ""),
        (Known(run(), lost=True), "reconnecting …"),
        (Known(turns=("q1",)), "answering …"),
        (Known(run("completed"), turns=("q1",)), "answering …"),
        (Known(run(), turns=("q1",)), "Worker r1"),
        (
            Known(run(progress={"fraction": 0.5, "phase": "reading", "message": ""})),
            "Worker r1 50% reading",
        ),
        (
            Known(run(progress={"message": "page 3"}), run(), run("error")),
            "2 runs · Worker r1 page 3 · Worker r1",
        ),
    ],
)
def test_the_status_line_says_what_is_under_way(known: Known, line: str) -> None:
    assert summary(cast(RemoteAgent, known)) == line
