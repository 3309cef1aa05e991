"""The client's reducer, rule by rule: what it knows again, keeps, and drops."""

from __future__ import annotations

import ast
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from culet.kernel.core import reducer
from culet.kernel.core.reducer import AgentToolEvents, apply_agent_tool_event

EMPTY = AgentToolEvents.empty()


def frame(sequence: int, kind: str, run: str, call: str | None, **more: Any) -> Any:
    out: dict[str, Any] = {"type": "agent-tool-event", "sequence": sequence}
    if call is not None:
        out["parentToolCallId"] = call
    return {**out, "event": {"kind": kind, "runId": run, **more}}


def started(run: str = "r", call: str | None = "c", **more: Any) -> Any:
    return frame(0, "started", run, call, **{"agentType": "A", "order": 0, **more})


def chunk(sequence: int, run: str = "r", call: str | None = "c", **body: Any) -> Any:
    return frame(sequence, "chunk", run, call, body=json.dumps(body))


def delta(sequence: int, text: str, part: str = "t", run: str = "r") -> Any:
    return chunk(sequence, run, type="text-delta", id=part, delta=text)


def fold(*frames: Any, state: AgentToolEvents = EMPTY) -> AgentToolEvents:
    for one in frames:
        state = apply_agent_tool_event(state, one)
    return state


def run(*frames: Any) -> Any:
    return fold(*frames).runs_by_id["r"]


def said(*frames: Any) -> str:
    return "".join(part.get("text", "") for part in run(*frames)["parts"])


@pytest.mark.rule("T-286", "T-236")
def test_a_frame_is_known_by_call_run_and_number() -> None:
    assert said(started(), delta(1, "a"), delta(1, "a"), delta(2, "a")) == "aa"
    two = fold(started("r"), started("s"), delta(1, "a"), delta(1, "b", run="s"))
    texts = {name: one["parts"][0]["text"] for name, one in two.runs_by_id.items()}
    assert texts == {"r": "a", "s": "b"}


@pytest.mark.rule("T-287")
def test_ids_of_any_characters_are_told_apart() -> None:
    names = ["a", "a\0", "\0a", "a\0b", "a:b", "a:", ":", '"', "a\\u0000", "1", ""]
    pairs = list(itertools.product(names, repeat=2))
    state = EMPTY
    for call, name in pairs:
        key = f"{call!r}{name!r}"
        state = fold(
            started(key, call),
            chunk(1, key, call, type="text-delta", id="t", delta=name),
            state=state,
        )
    assert len(state.runs_by_id) == len(pairs)
    assert len(state._seen) == 2 * len(pairs)
    seen = {(c, r, i) for c, r, i in state._seen._log}
    assert len(seen) == 2 * len(pairs)


@pytest.mark.rule("T-288")
def test_a_start_makes_a_run_refreshes_it_and_never_wakes_a_dead_one() -> None:
    one = run(started(display={"name": "A"}))
    assert one["status"] == "running"
    assert one["parts"] == []
    assert one["subAgent"] == {"agent": "A", "name": "r"}
    again = run(started(), delta(1, "a"), started(order=3, display={"name": "B"}))
    assert (again["order"], again["display"]) == (3, {"name": "B"})
    assert again["parts"][0]["text"] == "a"
    over = fold(started(), frame(1, "finished", "r", "c", summary="s"))
    assert apply_agent_tool_event(over, started(order=9)) is over


@pytest.mark.rule("T-289")
def test_a_chunk_that_came_too_early_is_applied_when_it_comes_again() -> None:
    early = delta(1, "a")
    assert fold(early) is EMPTY
    assert said(early, started(), early) == "a"


@pytest.mark.rule("T-292")
def test_a_chunk_of_an_unknown_type_changes_no_part() -> None:
    before = fold(started(), delta(1, "a"))
    after = fold(chunk(2, type="brand-new", payload=1), state=before)
    assert after.to_json() == before.to_json()


@pytest.mark.rule("T-293", "T-212")
def test_progress_is_no_part_and_the_latest_stays() -> None:
    def progress(number: int, fraction: float) -> Any:
        data = {"fraction": fraction, "at": number}
        return chunk(
            number,
            type="data-agent-progress",
            transient=True,
            id=f"p{number}",
            data=data,
        )

    one = run(started(), progress(1, 0.2), progress(2, 0.7), progress(1, 0.2))
    assert one["parts"] == []
    assert one["progress"] == {"fraction": 0.7, "at": 2}


@pytest.mark.rule("T-294")
def test_a_milestone_is_one_part_and_one_entry_whatever_its_number() -> None:
    def milestone(number: int, own: int, at: int) -> Any:
        data = {"name": f"m{own}", "sequence": own, "at": at}
        return chunk(number, type="data-agent-milestone", data=data)

    frames = [started(), milestone(1, 2, 20), milestone(2, 1, 10), milestone(9, 2, 20)]
    one = run(*frames)
    assert [m["name"] for m in one["milestones"]] == ["m1", "m2"]
    assert [p["data"]["name"] for p in one["parts"]] == ["m2", "m1"]
    assert one["progress"] == {"milestone": "m2", "at": 20}


@pytest.mark.rule("T-295", "T-296", "T-101")
@pytest.mark.parametrize(
    ("kind", "told", "status", "kept"),
    [
        ("finished", {"summary": "s"}, "completed", {"summary": "s"}),
        ("error", {"error": "e"}, "error", {"error": "e"}),
        ("aborted", {"reason": "why"}, "aborted", {"error": "why"}),
        ("aborted", {}, "aborted", {}),
        (
            "interrupted", {"error": "e", "reason": "x", "childStillRunning": True},
            "interrupted", {"error": "e", "reason": "x", "childStillRunning": True},
        ),
    ],
)  # fmt: skip
def test_an_end_sets_what_it_says_and_leaves_the_parts(
    kind: str, told: Any, status: str, kept: Any
) -> None:
    one = run(started(), delta(1, "a"), frame(2, kind, "r", "c", **told))
    assert one["status"] == status
    assert one["parts"][0]["text"] == "a"
    names = ("summary", "error", "reason", "childStillRunning")
    assert {name: one[name] for name in names if name in one} == kept


@pytest.mark.rule("T-299")
def test_a_chunk_after_the_end_is_applied_all_the_same() -> None:
    end = frame(3, "finished", "r", "c", summary="ab")
    one = [started(), delta(1, "a"), end, delta(2, "b")]
    assert said(*one) == "ab"
    assert run(*one)["status"] == "completed"


@pytest.mark.rule("T-303", "T-302")
def test_a_tool_call_without_runs_has_none() -> None:
    state = fold(started("r", None))
    assert state.runs_by_tool_call_id.get("c", []) == []
    assert state.to_json()["runsByToolCallId"] == {}


@pytest.mark.rule("T-305")
def test_after_a_reset_the_same_frames_apply_again() -> None:
    frames = [started(), delta(1, "a"), frame(2, "finished", "r", "c", summary="a")]
    before = fold(*frames)
    assert fold(*frames, state=before) is before
    assert fold(*frames, state=AgentToolEvents.empty()).to_json() == before.to_json()
    assert AgentToolEvents.empty().to_json()["runsById"] == {}


@pytest.mark.rule("T-270", "T-271")
def test_a_cleared_run_is_gone_with_its_keys_and_no_other_is() -> None:
    first = [started(), delta(1, "old"), frame(2, "finished", "r", "c", summary="old")]
    state = fold(*first, started("s"), delta(1, "kept", run="s"))
    cleared = {"type": "agent-tool-event", "sequence": 3,
               "event": {"kind": "cleared", "runIds": ["r", "unknown"]}}  # fmt: skip
    after = fold(cleared, state=state)
    assert list(after.runs_by_id) == ["s"]
    assert fold(cleared, state=after) is after
    assert fold(delta(1, "kept", run="s"), state=after) is after, "known as before"
    anew = fold(started(), delta(1, "new"), state=after)
    assert anew.runs_by_id["r"]["parts"][0]["text"] == "new"
    assert state.runs_by_id["r"]["summary"] == "old", "old states stay what they were"
    for odd in (None, "r", [1], {}):
        event = {"kind": "cleared", "runIds": odd}
        assert fold({**cleared, "event": event}, state=state) is state


@pytest.mark.rule("T-307", "T-309")
def test_two_copies_of_a_stream_in_turns_are_read_as_one() -> None:
    live = [started(), *(delta(n, f"{n} ") for n in range(1, 5))]
    for cut in range(1, 5):
        replayed = [{**one, "replay": True} for one in live]
        mixed = [
            *live[:cut],
            *(x for pair in zip(replayed, live, strict=True) for x in pair),
        ]
        assert said(*mixed) == "1 2 3 4 "


@pytest.mark.rule("T-310")
def test_siblings_chunk_by_chunk_are_rebuilt_each_by_itself() -> None:
    mixed = [started("r"), started("s")]
    for number in range(1, 5):
        mixed += [delta(number, f"r{number}"), delta(number, f"s{number}", run="s")]
    state = fold(*mixed)
    texts = {name: one["parts"][0]["text"] for name, one in state.runs_by_id.items()}
    assert texts == {"r": "r1r2r3r4", "s": "s1s2s3s4"}


@pytest.mark.rule("T-311")
@pytest.mark.parametrize("error", ["text", {"message": "text", "code": "x"}])
def test_an_error_may_be_a_text_or_an_object(error: Any) -> None:
    one = run(started(), frame(1, "error", "r", "c", error=error))
    assert (one["status"], one["error"]) == ("error", error)


@pytest.mark.rule("T-312")
def test_the_reducer_needs_no_framework_and_reaches_no_server() -> None:
    tree = ast.parse(Path(reducer.__file__).read_text())
    found = {
        node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert found == {
        "__future__", "collections.abc", "functools", "typing", "msgspec",
        "culet.kernel.core.chunks", "culet.kernel.core.limits",
    }  # fmt: skip
