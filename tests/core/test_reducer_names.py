"""Ids are any text: whatever they are called, runs are folded as with plain names."""

from __future__ import annotations

import json
from typing import Any

import pytest

from culet.kernel import AgentToolEvents, apply_agent_tool_event

PLAIN = "plain"
NAMES = (
    "__proto__",
    "constructor",
    "toString",
    "__class__",
    "runsById",
    "",
    "\x00",
    "1",
)


def frames(name: str) -> list[dict[str, Any]]:
    bodies = (
        {"type": "tool-input-available", "toolCallId": name, "toolName": name,
         "input": {name: 1}},
        {"type": f"data-{name}", "id": name, "data": {name: 1}},
        {"type": f"data-{name}", "id": name, "data": {name: 2}},
        {"type": "data-agent-progress", "id": name, "data": {"phase": name}},
        {"type": "data-agent-milestone", "data": {"name": name, "sequence": 1, "at": 1}},
        {"type": "tool-output-available", "toolCallId": name, "output": {name: name}},
    )  # fmt: skip

    def frame(sequence: int, **event: Any) -> dict[str, Any]:
        event = {"runId": name, "agentType": "A", "order": 0, **event}
        return {
            "type": "agent-tool-event", "parentToolCallId": f"call {name}",
            "sequence": sequence, "event": event,
        }  # fmt: skip

    chunks = [
        frame(at, kind="chunk", body=json.dumps(body))
        for at, body in enumerate(bodies, 1)
    ]
    return [frame(0, kind="started"), *chunks]


def fold(name: str) -> AgentToolEvents:
    state = AgentToolEvents.empty()
    for frame in frames(name):
        state = apply_agent_tool_event(state, frame)
    return state


def shown(state: AgentToolEvents) -> str:
    return repr((state.runs_by_id, state.runs_by_tool_call_id, state.unbound_runs))


@pytest.mark.parametrize("name", [n for n in NAMES if n])
def test_a_run_of_any_name_is_folded_as_one_of_a_plain_name(name: str) -> None:
    state = fold(name)

    assert shown(state) == shown(fold(PLAIN)).replace(PLAIN, repr(name)[1:-1])
    for frame in frames(name):
        assert apply_agent_tool_event(state, frame) is state


def test_names_of_all_kinds_are_kept_apart() -> None:
    state = AgentToolEvents.empty()
    for frame in (f for name in NAMES for f in frames(name)):
        state = apply_agent_tool_event(state, frame)

    assert set(state.runs_by_id) == set(NAMES)
    assert all(state.runs_by_id[name]["runId"] == name for name in NAMES)
