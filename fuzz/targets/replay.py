"""The fold of any cut, doubled and interleaved delivery is the fold of the log.

A server's log of some runs is delivered over several connections. Each begins a run's
frames again at any place that the client has reached, is cut anywhere, mixes the runs
and lets foreign messages in between. No piece is missing in the end.
"""

from __future__ import annotations

import json
from typing import Any, Final

from culet.kernel.core import frames
from culet.kernel.core.reducer import AgentToolEvents, apply_agent_tool_event
from culet.kernel.core.run import AgentToolRun
from fuzz.case import Case
from machines.sometimes import Sometimes

SOMETIMES: Final = Sometimes(
    "ended", "open", "doubled", "milestone", "progress", "nothing changed", "branched"
)
STATUSES: Final = ("completed", "error", "aborted", "interrupted")


def play(case: Case) -> None:
    """Make a log, fold it, deliver it badly, fold that."""
    log = [_run(case, number) for number in range(case.rng.randrange(1, 4))]
    straight = AgentToolEvents.empty()
    for run in log:
        for frame in run:
            straight = apply_agent_tool_event(straight, frame)
    assert straight.protocol_errors == 0
    state = AgentToolEvents.empty()
    at = [0] * len(log)
    for _ in range(case.rng.randrange(40)):
        state = _some(case, log, at, state)
    rest = list(enumerate(log))
    case.rng.shuffle(rest)
    for which, run in rest:
        for frame in run[at[which] :]:
            state = apply_agent_tool_event(state, frame)
    want = straight.to_json()
    assert _by_id(state.to_json()) == _by_id(want)
    assert state.protocol_errors == 0
    for run in log:  # all of it once more changes nothing
        for frame in run:
            assert apply_agent_tool_event(state, _again(case, frame)) is state


def _some(
    case: Case, log: list[list[Any]], at: list[int], state: AgentToolEvents
) -> AgentToolEvents:
    which = case.rng.randrange(len(log))
    if case.luck(0.15):
        garbage = case.json() if case.luck(0.5) else _garbage(case, log[which])
        kept = apply_agent_tool_event(state, garbage)
        case.mark("nothing changed", kept is state)
        case.mark("branched", kept is not state)
        return state  # an old state stays what it was, whoever branched off
    begin = case.rng.randrange(at[which] + 1)
    case.mark("doubled", begin < at[which])
    end = case.rng.randrange(begin, len(log[which]) + 1)
    before = json.dumps(state.to_json()) if case.luck(0.1) else None
    old = state
    for frame in log[which][begin:end]:
        state = apply_agent_tool_event(state, _again(case, frame))
    assert before is None or before == json.dumps(old.to_json())
    at[which] = max(at[which], end)
    return state


def _again(case: Case, frame: Any) -> Any:
    return {**frame, "replay": True} if case.luck(0.5) else frame


def _garbage(case: Case, run: list[Any]) -> Any:
    frame = json.loads(json.dumps(case.rng.choice(run)))
    place = frame if case.luck(0.5) else frame["event"]
    place[case.rng.choice(list(place))] = case.json()
    return frame


def _by_id(state: dict[str, Any]) -> str:
    return json.dumps(state, sort_keys=True)


def _run(case: Case, number: int) -> list[Any]:
    run_id = case.one(f"r{number}", f"__proto__{number}", f"é{number}")
    call = case.one(None, "call", "toString")
    run = AgentToolRun(
        run_id=run_id, agent_type="A", parent_tool_call_id=call, order=case.rng.randrange(3)
    )  # fmt: skip
    texts = [frames.started(run)]
    count = case.rng.randrange(8)
    for position in range(count):
        body = json.dumps(_chunk(case, position))
        texts.append(frames.chunk(run_id, call, position + 1, body))
    if case.luck(0.6):
        case.mark("ended")
        ended = AgentToolRun(
            run_id=run_id, agent_type="A", parent_tool_call_id=call, order=run.order,
            status=case.one(*STATUSES), n=count, completed_at=1, reason=case.one(None, "x"),
        )  # fmt: skip
        texts.append(frames.terminal(ended))
    else:
        case.mark("open")
    return [json.loads(text) for text in texts]


def _chunk(case: Case, number: int) -> Any:
    match case.rng.randrange(8):
        case 0:
            case.mark("milestone")
            data = {"name": "m", "sequence": number, "at": case.rng.randrange(3)}
            return {"type": "data-agent-milestone", "data": data}
        case 1:
            case.mark("progress")
            fraction = case.one(0, 0.5, True, "x", None)
            data = {"fraction": fraction, "message": "m", "at": number}
            return {"type": "data-agent-progress", "data": data}
        case 2:
            return {"type": "text-start", "id": "t"}
        case 3:
            return {"type": "text-end", "id": "t"}
        case 4:
            return {
                "type": "tool-input-available",
                "toolCallId": "c",
                "toolName": "n",
                "input": 1,
            }
        case 5:
            return {
                "type": "tool-output-available",
                "toolCallId": "c",
                "output": number,
            }
        case 6:
            return case.json()
    return {"type": "text-delta", "id": "t", "delta": f"<{number}>"}
