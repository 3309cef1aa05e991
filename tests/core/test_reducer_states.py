"""What a state keeps, over branches, restarts, milestones and foreign values."""

from __future__ import annotations

from typing import Any

import pytest

from culet.kernel.core.reducer import AgentToolEvents, apply_agent_tool_event

EMPTY = AgentToolEvents.empty()


def started(run_id: str = "r", call: str | None = None, **more: Any) -> dict[str, Any]:
    event = {"kind": "started", "runId": run_id, "agentType": "A", "order": 0, **more}
    frame = {"type": "agent-tool-event", "sequence": 0, "event": event}
    return frame if call is None else {**frame, "parentToolCallId": call}


def chunk(sequence: int, body: str, call: str | None = None) -> dict[str, Any]:
    event = {"kind": "chunk", "runId": "r", "body": body}
    frame = {"type": "agent-tool-event", "sequence": sequence, "event": event}
    return frame if call is None else {**frame, "parentToolCallId": call}


def fold(*frames: Any, state: AgentToolEvents = EMPTY) -> AgentToolEvents:
    for frame in frames:
        state = apply_agent_tool_event(state, frame)
    return state


def text(words: str) -> str:
    return f'{{"type":"text-delta","id":"t","delta":"{words}"}}'


def milestone(sequence: int, name: str = "m", **more: int) -> str:
    rest = "".join(f',"{key}":{value}' for key, value in more.items())
    return (
        '{"type":"data-agent-milestone","data":{"name":"' + name + '","sequence":'
        f"{sequence}{rest}}}}}"
    )


def said(state: AgentToolEvents) -> str:
    return "".join(part.get("text", "") for part in state.runs_by_id["r"]["parts"])


def test_branches_off_an_old_state_do_not_know_of_each_other() -> None:
    begin = fold(started())
    first = fold(chunk(1, text("a")), chunk(2, text("b")), state=begin)
    second = fold(chunk(2, text("x")), chunk(1, text("y")), state=begin)

    assert (said(first), said(second), said(begin)) == ("ab", "xy", "")
    assert len(begin._seen) == 1
    assert apply_agent_tool_event(second, chunk(1, text("y"))) is second
    assert apply_agent_tool_event(first, chunk(1, text("a"))) is first
    third = fold(chunk(3, text("c")), state=first)
    fourth = fold(chunk(3, text("d")), state=first)
    assert (said(third), said(fourth)) == ("abc", "abd")
    assert (
        chunk(3, text("c"))
        and apply_agent_tool_event(third, chunk(3, text("c"))) is third
    )
    assert apply_agent_tool_event(fourth, chunk(2, text("b"))) is fourth
    assert apply_agent_tool_event(fourth, started()) is fourth


def test_a_key_that_only_the_newer_state_has_is_new_to_the_branch() -> None:
    begin = fold(started())
    fold(chunk(1, text("a")), chunk(2, text("b")), state=begin)
    branch = fold(chunk(5, text("e")), state=begin)

    assert said(fold(chunk(1, text("a")), state=branch)) == "ea"
    assert said(fold(chunk(2, text("b")), state=branch)) == "eb"


def test_a_second_start_keeps_what_was_reached_and_takes_what_is_new() -> None:
    first = fold(
        started(inputPreview="p", display={"name": "d"}),
        chunk(1, text("a")),
        chunk(2, milestone(1, at=5)),
    )
    again = fold(started(order=3, display={"name": "e"}, inputPreview="q"), state=first)
    run = again.runs_by_id["r"]

    assert (run["order"], run["display"], run["inputPreview"]) == (
        3,
        {"name": "e"},
        "q",
    )
    assert run["milestones"] == [{"name": "m", "sequence": 1, "at": 5}]
    assert run["progress"] == {"milestone": "m", "at": 5}
    assert said(again) == "a"
    assert first.runs_by_id["r"]["order"] == 0
    assert first.runs_by_id["r"]["display"] == {"name": "d"}


def test_a_start_without_an_order_is_first() -> None:
    frame = started()
    del frame["event"]["order"]

    assert fold(frame).runs_by_id["r"]["order"] == 0


def test_a_late_start_of_an_ended_run_changes_nothing() -> None:
    event = {"kind": "finished", "runId": "r", "summary": "s"}
    ended = fold(started(), {"type": "agent-tool-event", "sequence": 1, "event": event})

    assert apply_agent_tool_event(ended, started(order=9)) is ended
    assert ended.runs_by_id["r"]["status"] == "completed"


def test_a_milestone_of_another_tool_call_is_the_same_milestone() -> None:
    state = fold(started(call="c"), chunk(1, milestone(1, "one", at=1), "c"))
    again = fold(chunk(1, milestone(1, "two", at=2), "d"), state=state)

    assert [m["name"] for m in again.runs_by_id["r"]["milestones"]] == ["one"]
    assert again.runs_by_id["r"]["progress"]["milestone"] == "one"


@pytest.mark.parametrize(
    ("second", "reached"), [({"at": 5}, "two"), ({"at": 4}, "one"), ({"at": 6}, "two")]
)
def test_the_latest_milestone_is_the_progress(second: dict, reached: str) -> None:
    state = fold(
        started(), chunk(1, milestone(1, "one", at=5)), chunk(2, milestone(2, "two", **second))
    )  # fmt: skip

    assert state.runs_by_id["r"]["progress"]["milestone"] == reached
    assert [m["sequence"] for m in state.runs_by_id["r"]["milestones"]] == [1, 2]


def test_a_milestone_without_numbers_counts_from_zero() -> None:
    bare = '{"type":"data-agent-milestone","data":{"name":"m"}}'
    progress = '{"type":"data-agent-progress","data":{"phase":"x"}}'
    state = fold(started(), chunk(1, progress), chunk(2, bare))
    run = state.runs_by_id["r"]

    assert run["milestones"] == [{"name": "m", "sequence": 0, "at": 0}]
    assert run["progress"] == {"milestone": "m", "at": 0}


def test_progress_reports_are_told_apart_by_id_or_by_place_and_text() -> None:
    def report(sequence: int, message: str, own: str = "") -> dict[str, Any]:
        name = f',"id":"{own}"' if own else ""
        body = (
            f'{{"type":"data-agent-progress"{name},"data":{{"message":"{message}"}}}}'
        )
        return chunk(sequence, body)

    def message(state: AgentToolEvents) -> str:
        return str(state.runs_by_id["r"]["progress"]["message"])

    state = fold(started(), report(1, "a", "p"))
    assert apply_agent_tool_event(state, report(2, "b", "p")) is state
    assert message(fold(report(1, "b", "q"), state=state)) == "b"
    state = fold(report(3, "c"), state=state)
    assert apply_agent_tool_event(state, report(3, "c")) is state
    assert message(fold(report(3, "d"), state=state)) == "d"
    assert message(fold(report(4, "c"), report(5, "e"), state=state)) == "e"


def test_unstored_chunks_are_told_apart_by_their_own_id() -> None:
    def unstored(name: object, words: str) -> dict[str, Any]:
        frame = chunk(1, text(words))
        frame["event"]["unstoredId"] = name
        return frame

    state = fold(started(), unstored("a", "x"), unstored("b", "y"), chunk(1, text("z")))
    assert said(state) == "xyz"
    assert apply_agent_tool_event(state, unstored("a", "other")) is state


@pytest.mark.parametrize("odd", [{1, 2}, object(), "\ud800", 2**70])
def test_values_that_json_has_no_word_for_do_not_raise(odd: object) -> None:
    state = fold(started(display=odd))

    assert state.runs_by_id["r"]["display"] == odd
    assert apply_agent_tool_event(state, started(display=odd)) is state
