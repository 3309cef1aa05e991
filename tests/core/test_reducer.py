"""The reducer of run events: vectors, the laws of its docstring, and its cost."""

from __future__ import annotations

import copy
import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culet.kernel.core.reducer import AgentToolEvents, apply_agent_tool_event
from volume import SLOWER

CASES = json.loads(
    (Path(__file__).parent.parent / "vectors" / "reducer.json").read_text()
)["cases"]


def reduce(frames: list[Any], state: AgentToolEvents | None = None) -> AgentToolEvents:
    state = state or AgentToolEvents.empty()
    for frame in frames:
        state = apply_agent_tool_event(state, frame)
    return state


def run_state(case: dict, **changes: Any) -> dict:
    """Return the reference's state of a case with one run, with our differences."""
    [(run_id, run)] = case["deduped"]["state"]["runsById"].items()
    run = {**run, **changes}
    run = {key: value for key, value in run.items() if value is not None}
    call = run["parentToolCallId"]
    return {"runsById": {run_id: run}, "runsByToolCallId": {call: [run]},
            "unboundRuns": []}  # fmt: skip


def ours(case: dict) -> dict:
    """Return the state that we want: the reference's but for the known differences."""
    match case["id"]:
        case "RD-21":  # a second terminal: the first stays
            return run_state(case, status="completed", error=None)
        case "RD-23":
            return run_state(case, status="interrupted", error="lost", summary=None)
        case "RD-25":
            return run_state(case, status="aborted", error="stop")
        case "RD-29":  # a chunk before `started`: applied with the replay
            text = {"type": "text", "text": "early", "state": "streaming"}
            return run_state(case, parts=[text])
        case "RD-37":  # ties by code points
            state = copy.deepcopy(case["deduped"]["state"])
            state["runsByToolCallId"]["call-1"].sort(key=lambda run: run["runId"])
            return state
        case "RD-61":  # an ordinary id; the reference throws
            return reduce(
                [{**f, "parentToolCallId": "plain"} for f in case["frames"]]
            ).to_json() | {
                "runsByToolCallId": {
                    "toString": [{**run, "parentToolCallId": "toString"}
                                 for run in [whole_run()]]
                },
                "runsById": {"r1": {**whole_run(), "parentToolCallId": "toString"}},
            }  # fmt: skip
    return case["deduped"]["state"]


def whole_run() -> dict:
    return CASES[0]["deduped"]["state"]["runsById"]["r1"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_state_is_that_of_the_clients_hook(case: dict) -> None:
    assert reduce(case["frames"]).to_json() == ours(case)


def event(
    sequence: int, kind: str, run: str = "r", call: str | None = "c", **more: Any
):
    frame = {"type": "agent-tool-event", "sequence": sequence}
    if call is not None:
        frame["parentToolCallId"] = call
    return {**frame, "event": {"kind": kind, "runId": run, **more}}


def start(run: str = "r", call: str | None = "c", order: int = 0) -> dict:
    return event(0, "started", run, call, agentType="A", order=order)


def chunk(sequence: int, run: str = "r", call: str | None = "c", **body: Any) -> dict:
    return event(sequence, "chunk", run, call, body=json.dumps(body))


ENDS = [
    {"kind": "finished", "summary": "s"},
    {"kind": "error", "error": "e"},
    {"kind": "aborted", "reason": "why"},
    {"kind": "aborted"},
    {"kind": "interrupted", "error": "lost", "reason": "budget-exceeded"},
]


def bodies() -> st.SearchStrategy[dict]:
    text = st.sampled_from(["Hel", "lo", "é", ""])
    return st.one_of(
        st.builds(lambda d: {"type": "text-delta", "id": "t", "delta": d}, text),
        st.just({"type": "text-start", "id": "t"}),
        st.just({"type": "text-end", "id": "t"}),
        st.just({"type": "tool-input-start", "toolCallId": "x", "toolName": "f"}),
        st.just({"type": "tool-output-available", "toolCallId": "x", "output": 1}),
        st.builds(lambda f: {"type": "data-agent-progress", "transient": True,
                             "data": {"fraction": f, "at": 5}}, st.floats(0, 1)),
    )  # fmt: skip


@st.composite
def histories(draw: st.DrawFn) -> list[dict]:
    """Draw what a server sends about one run, from the start to an end."""
    run = draw(st.sampled_from(["r", "__proto__", "constructor", "a\0b", "é"]))
    call = draw(st.sampled_from([None, "c", "toString"]))
    frames = [start(run, call)]
    for body in draw(st.lists(bodies(), max_size=8)):
        if body["type"] == "data-agent-progress":
            body = {**body, "id": f"p{len(frames)}"}
        frames.append(chunk(len(frames), run, call, **body))
    last = draw(st.sampled_from([None, *ENDS]))
    if last is not None:
        more = {key: value for key, value in last.items() if key != "kind"}
        frames.append(event(len(frames), last["kind"], run, call, **more))
    return frames


def replay(frames: list[dict]) -> list[dict]:
    return [{**frame, "replay": True} for frame in frames]


@pytest.mark.rule("I-16", "F-34", "T-289")
@given(histories(), st.data())
def test_live_and_replay_in_any_mix_equal_replay_only(
    frames: list[dict], data: st.DataObject
) -> None:
    got: list[dict] = []
    for _ in range(data.draw(st.integers(0, 3))):  # connections that were cut
        seen = data.draw(st.integers(0, len(frames)))
        missed_start = data.draw(st.integers(0, seen))
        got += frames[missed_start:seen] if not got else replay(frames[:seen])
    if got and got[0]["sequence"] != 0:  # late to the run: nothing could be applied
        assert reduce(got[:1]).to_json() == AgentToolEvents.empty().to_json()
    assert reduce(got + replay(frames)).to_json() == reduce(replay(frames)).to_json()


@pytest.mark.rule("I-19", "HB-27")
@given(histories(), st.data())
def test_a_frame_that_was_applied_changes_nothing_again(
    frames: list[dict], data: st.DataObject
) -> None:
    state = reduce(frames)
    again = data.draw(st.sampled_from(frames))
    assert apply_agent_tool_event(state, again) is state
    assert apply_agent_tool_event(state, replay([again])[0]) is state


@pytest.mark.rule("I-18", "T-298")
@pytest.mark.parametrize("first", ENDS, ids=lambda end: end["kind"])
@pytest.mark.parametrize("second", ENDS, ids=lambda end: end["kind"])
def test_the_first_terminal_stays_and_a_second_is_counted(
    first: dict, second: dict
) -> None:
    state = reduce([start(), event(1, run="r", **first)])
    after = apply_agent_tool_event(state, event(2, run="r", **second))
    assert after.to_json() == state.to_json()
    assert after.protocol_errors == (0 if first == second else 1)


@pytest.mark.rule("I-16", "HB-27", "T-290")
def test_old_states_stay_what_they_were() -> None:
    one = reduce([start(), chunk(1, type="text-delta", delta="a")])
    before = copy.deepcopy(one.to_json())
    left = reduce([chunk(2, type="text-delta", delta="L")], one)
    right = reduce([chunk(2, type="text-delta", delta="R")], one)
    assert one.to_json() == before
    assert left.runs_by_id["r"]["parts"][0]["text"] == "aL"
    assert right.runs_by_id["r"]["parts"][0]["text"] == "aR"
    assert apply_agent_tool_event(right, chunk(2, type="text-delta")) is right
    assert apply_agent_tool_event(one, chunk(1, type="text-delta")) is one


@pytest.mark.rule("T-285", "T-300", "T-304", "T-297")
@pytest.mark.parametrize(
    "frame",
    [
        None, 3, [], {}, {"type": "rpc"}, {"type": "agent-tool-event"},
        {"type": "agent-tool-event", "event": 1}, event(0, "started", "r"),
        {"type": "agent-tool-event", "event": {"kind": [], "runId": "r"}},
        {"type": "agent-tool-event", "event": {"kind": "started", "runId": {}}},
        event(1, "paused"), event(9, "finished", "unknown", summary=""),
    ],
)  # fmt: skip
def test_what_is_not_understood_gives_the_same_object(frame: object) -> None:
    state = AgentToolEvents.empty()
    assert apply_agent_tool_event(state, frame) is state


odd = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["type", "data", "id", "name"]), inner, max_size=3
        )
    ),
    max_leaves=5,
)


@pytest.mark.rule("F-52")
@given(
    st.lists(
        st.fixed_dictionaries(
            {"type": st.just("agent-tool-event")},
            optional={
                "sequence": odd,
                "parentToolCallId": odd,
                "event": st.fixed_dictionaries(
                    {"kind": st.sampled_from(["started", "chunk", "finished", "error"]),
                     "runId": st.sampled_from(["r", "q"])},
                    optional={"agentType": st.just("A") | odd, "order": odd,
                              "body": odd.map(json.dumps) | odd, "summary": odd,
                              "unstoredId": odd, "error": odd},
                ),
            },
        ),
        max_size=6,
    )
)  # fmt: skip
def test_no_frame_of_any_shape_raises(frames: list[Any]) -> None:
    state = reduce(frames, reduce(frames))  # what had to wait for its start is in now
    assert reduce(frames, state).to_json() == state.to_json()


def test_progress_is_the_latest_and_a_milestone_is_progress_too() -> None:
    def progress(sequence: int, own: object = None, **data: Any) -> dict:
        body = {"type": "data-agent-progress", "transient": True, "data": data}
        return chunk(sequence, **body, **({"id": own} if own else {}))

    def milestone(place: int, /, **data: Any) -> dict:
        return chunk(place, type="data-agent-milestone", data=data)

    frames = [
        start(),
        progress(1, "p1", fraction=0.5, message="half", data={"a": 1}, at=10),
        progress(2, fraction=True, message=3, phase="late", at=20),
        milestone(3, name="read", sequence=1, at=30, fraction=0.7, data=2),
        milestone(4, name="old", sequence=2, at=5),
        milestone(5, name="again", sequence=1, at=50),
        milestone(6, sequence=3),
        chunk(7, type="data-agent-milestone", data="odd"),
    ]
    after = [reduce(frames[: count + 1]).runs_by_id["r"] for count in range(8)]
    assert after[1]["progress"] == {
        "fraction": 0.5, "message": "half", "data": {"a": 1}, "at": 10
    }  # fmt: skip
    assert after[2]["progress"] == {"phase": "late", "at": 20}
    assert after[3]["progress"] == {"fraction": 0.7, "milestone": "read", "at": 30}
    assert after[7]["progress"] == after[3]["progress"]
    names = [reached["name"] for reached in after[7]["milestones"]]
    assert names == ["read", "old"]
    assert after[7]["milestones"][0]["data"] == 2


def test_a_frame_with_an_id_of_its_own_is_known_by_it() -> None:
    body = json.dumps({"type": "text-delta", "delta": "big"})
    unstored = event(3, "chunk", body=body, unstoredId="u1")
    state = reduce([start(), unstored, {**unstored, "sequence": 9}])
    assert state.runs_by_id["r"]["parts"][0]["text"] == "big"


@pytest.mark.rule("T-291")
def test_a_body_that_is_no_object_changes_no_part() -> None:
    for body in ("[1]", "nonsense", 7, None, "[" * 100_000):
        state = reduce([start(), event(1, "chunk", body=body)])
        assert state.runs_by_id["r"]["parts"] == []


def test_the_seen_set_of_a_branch_is_its_own() -> None:
    one = reduce([start()])
    left = reduce([chunk(1, type="text-delta", delta="L")], one)
    right = reduce([chunk(2, type="text-delta", delta="R")], one)
    assert len(one._seen) == 1
    assert reduce([chunk(2, type="text-delta", delta="R")], left) is not left
    assert reduce([chunk(2, type="text-delta", delta="R")], right) is right


@pytest.mark.rule("T-301")
def test_siblings_sort_by_order_then_by_code_points() -> None:
    state = reduce(
        [start("b", order=1), start("é"), start("z"), start("Z"), start("a")]
    )
    runs = state.runs_by_tool_call_id["c"]
    assert [run["runId"] for run in runs] == ["Z", "a", "z", "é", "b"]


@pytest.mark.rule("T-302")
def test_runs_without_a_tool_call_are_unbound() -> None:
    state = reduce([start("b", None), start("a", None)])
    assert [run["runId"] for run in state.unbound_runs] == ["a", "b"]
    assert state.runs_by_tool_call_id == {}


def test_a_thousand_chunks_cost_milliseconds() -> None:
    frames = [start(), *(chunk(i, type="text-delta", delta="word ")
                         for i in range(1, 1001))]  # fmt: skip
    begun = time.thread_time()
    state = reduce(frames)
    assert time.thread_time() - begun < 0.1 * SLOWER
    assert len(state.runs_by_id["r"]["parts"][0]["text"]) == 5000
