"""How far a turn is by what it has said: so that nothing is said twice."""

from __future__ import annotations

from typing import Any

import pytest

from culet.adapters.continuation import Standing, standing, usage_json, usage_sum
from culet.adapters.model import ToolCall, Usage

START: list[Any] = [{"type": "start"}, {"type": "start-step"}]
TEXT: list[Any] = [
    {"type": "text-start", "id": "t0"},
    {"type": "text-delta", "id": "t0", "delta": "He"},
    {"type": "text-delta", "id": "t0", "delta": "llo"},
]
END_TEXT = {"type": "text-end", "id": "t0"}


def asked(call_id: str) -> dict[str, Any]:
    return {
        "type": "tool-input-available", "toolCallId": call_id, "toolName": "x",
        "input": {"a": 1},
    }  # fmt: skip


def answered(call_id: str, **more: Any) -> dict[str, Any]:
    return {"type": "tool-output-available", "toolCallId": call_id, "output": 1, **more}


def test_before_anything_is_said() -> None:
    at = standing([])
    assert (at.told, at.steps, at.open, at.partial) == ([], 0, False, "")


def test_a_step_that_was_cut_while_the_model_spoke_goes_on_after_its_text() -> None:
    at = standing([*START, *TEXT])
    assert (at.open, at.partial, at.open_text) == (True, "Hello", "t0")
    assert not at.model_is_done
    assert at.kept == [{"type": "start"}]


def test_a_text_that_was_ended_is_not_open() -> None:
    at = standing([*START, *TEXT, END_TEXT])
    assert (at.open_text, at.partial, at.parts) == (None, "Hello", 1)


def test_a_step_that_was_cut_while_its_tools_ran_has_only_those_left() -> None:
    at = standing([*START, *TEXT, END_TEXT, asked("c0"), asked("c1"), answered("c1")])
    assert at.model_is_done
    assert at.open
    assert at.calls == [ToolCall(id=i, name="x", input={"a": 1}) for i in ("c0", "c1")]
    assert at.settled == {"c1"}
    assert at.kept == at.told


@pytest.mark.parametrize(
    ("chunk", "settled"),
    [
        (answered("c0"), {"c0"}),
        (answered("c0", preliminary=True), set()),
        ({"type": "tool-output-error", "toolCallId": "c0", "errorText": ""}, {"c0"}),
        ({"type": "tool-output-denied", "toolCallId": "c0"}, {"c0"}),
        ({"type": "tool-approval-request", "toolCallId": "c0"}, set()),
    ],
)
def test_which_chunks_settle_a_call(chunk: Any, settled: set[str]) -> None:
    assert standing([*START, asked("c0"), chunk]).settled == settled


def test_a_finished_step_is_over_and_the_next_begins_empty() -> None:
    first = [*START, *TEXT, END_TEXT, asked("c0"), answered("c0")]
    between = standing([*first, {"type": "finish-step"}])
    assert (between.steps, between.open) == (1, False)
    assert [c.id for c in between.calls] == ["c0"]
    at = standing([*first, {"type": "finish-step"}, {"type": "start-step"}])
    assert (at.steps, at.open, at.partial, at.calls) == (1, True, "", [])
    assert at.asked == ["c0"]
    assert at.kept == at.told[:-1]


def test_two_standings_share_nothing() -> None:
    one, other = Standing(), Standing()
    one.calls.append(ToolCall(id="c", name="x", input={}))
    one.settled.add("c")
    assert (other.calls, other.settled, other.told) == ([], set(), [])


def test_usage_is_read_back_as_it_was_told() -> None:
    usage = Usage(input_tokens=3, output_tokens=4, cost=0.5)
    told = {"type": "message-metadata", "messageMetadata": {"usage": usage_json(usage)}}
    assert standing([*START, told]).usage == usage


def test_usage_adds_up_and_an_unknown_cost_counts_as_nothing() -> None:
    one = Usage(input_tokens=1, output_tokens=2)
    assert usage_sum(one, one) == Usage(input_tokens=2, output_tokens=4)
    assert usage_sum(one, Usage(cost=0.25)).cost == 0.25
