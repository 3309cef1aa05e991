"""The fold from chunks to parts: the clients' vectors, purity, and linear time."""

from __future__ import annotations

import copy
import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culet.kernel.core.chunks import apply_chunk_to_parts, fold, text_of, tool_input
from volume import SLOWER

CASES = json.loads(
    (Path(__file__).parent.parent / "vectors" / "chunks.json").read_text()
)["cases"]


def one_by_one(chunks: list[Any]) -> list[Any]:
    parts: list[Any] = []
    for chunk in chunks:
        parts = apply_chunk_to_parts(parts, chunk)
    return parts


@pytest.mark.rule("T-306", "W-236")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_parts_are_those_of_the_clients_reducer(case: dict) -> None:
    expected = case["agents"]["parts"]
    assert one_by_one(case["chunks"]) == expected
    assert fold(case["chunks"]) == expected


ids = st.sampled_from(["a", "b", "", None, 1])
values = st.sampled_from(["x", "", None, 7, {"a": 1}, [1], '{"q": 1}', '{"q'])
KINDS = """text-start text-delta text-end reasoning-start reasoning-delta reasoning-end
file source-url source-document start-step step-start tool-input-start tool-input-delta
tool-input-available tool-input-error tool-approval-request tool-output-denied
tool-output-available tool-output-error data- data-x data-y start finish error glow"""
chunks = st.fixed_dictionaries(
    {"type": st.sampled_from(KINDS.split())},
    optional={
        "id": ids,
        "toolCallId": ids,
        "toolName": st.sampled_from(["find", "plan"]),
        "delta": values,
        "input": values,
        "inputTextDelta": values,
        "output": values,
        "errorText": values,
        "data": values,
        "title": values,
        "approvalId": ids,
        "approvalDescriptor": values,
        "preliminary": st.booleans(),
        "transient": st.booleans(),
        "providerExecuted": st.booleans(),
        "providerMetadata": st.sampled_from([None, {}, {"p": 1}, {"q": 2}, "odd"]),
        "url": values,
        "mediaType": values,
    },
) | st.sampled_from([{}, {"type": None}, {"type": ["x"]}, {"id": "a"}])
streams = st.lists(chunks, max_size=25)


@given(streams)
def test_fold_equals_one_by_one(stream: list[Any]) -> None:
    assert json.dumps(fold(stream)) == json.dumps(one_by_one(stream))


@given(streams, chunks)
def test_no_input_is_ever_changed(stream: list[Any], chunk: Any) -> None:
    parts = one_by_one(stream)
    before = copy.deepcopy((parts, stream, chunk))
    apply_chunk_to_parts(parts, chunk)
    fold([*stream, chunk])
    assert (parts, stream, chunk) == before


@given(streams, st.integers(0, 24))
def test_a_prefix_folds_to_a_state_that_the_rest_goes_on_from(
    stream: list[Any], cut: int
) -> None:
    parts = fold(stream[:cut])
    for chunk in stream[cut:]:
        parts = apply_chunk_to_parts(parts, chunk)
    assert parts == fold(stream)


@given(streams)
def test_a_settled_tool_part_never_goes_back(stream: list[Any]) -> None:
    order = {"input-streaming": 0, "input-available": 1, "approval-requested": 2}
    parts: list[Any] = []
    for chunk in stream:
        before = {p["toolCallId"]: p["state"] for p in parts if "toolCallId" in p}
        parts = apply_chunk_to_parts(parts, chunk)
        for part in parts:
            was = before.get(part.get("toolCallId"))
            if was is not None:
                assert order.get(part["state"], 9) >= order.get(was, 9)


def test_what_changes_nothing_gives_the_same_list_back() -> None:
    parts = fold([{"type": "text-delta", "delta": "a"}])
    nothing = [
        {"type": "glow"}, {"type": "start"}, {"type": "finish"}, {}, {"type": 3},
        {"type": "tool-output-available", "toolCallId": "unknown", "output": 1},
        {"type": "data-x", "transient": True, "data": 1},
        {"type": "tool-input-start", "toolName": "x"},
    ]  # fmt: skip
    for chunk in nothing:
        assert apply_chunk_to_parts(parts, chunk) is parts, chunk


def test_a_late_input_fills_an_approval_and_leaves_its_state() -> None:
    parts = fold(
        [
            {"type": "tool-input-start", "toolCallId": "c", "toolName": "f"},
            {"type": "tool-approval-request", "toolCallId": "c", "approvalId": "p"},
            {"type": "tool-input-available", "toolCallId": "c", "input": {"q": 1}},
            {"type": "tool-input-available", "toolCallId": "c", "input": {"q": 2}},
        ]
    )
    assert parts[0]["state"] == "approval-requested"
    assert parts[0]["input"] == {"q": 1}


def test_an_approval_keeps_its_descriptor_and_an_input_may_come_with_a_delta() -> None:
    parts = fold(
        [
            {"type": "tool-input-start", "toolCallId": "c", "toolName": "f"},
            {"type": "tool-input-delta", "toolCallId": "c", "input": {"part": 1}},
            {
                "type": "tool-approval-request",
                "toolCallId": "c",
                "approvalId": "p",
                "approvalDescriptor": {"why": 1},
            },
        ]
    )
    assert parts[0]["input"] == {"part": 1}
    assert parts[0]["approval"] == {"id": "p", "descriptor": {"why": 1}}


def test_a_tool_chunk_without_a_call_id_makes_no_part() -> None:
    for kind in ("tool-input-start", "tool-input-available", "tool-input-error"):
        for call in ({}, {"toolCallId": ""}, {"toolCallId": 7}):
            assert fold([{"type": kind, "toolName": "f", **call}]) == []


@pytest.mark.rule("T-308")
@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (None, {}),
        ("", {}),
        ([1], {}),
        (' {"a": 1}', {"a": 1}),
        ('{"a', {}),
        ("[1]", {}),
    ],
)
def test_tool_input_is_always_an_object(raw: object, expected: object) -> None:
    assert tool_input(raw) == expected


def test_text_of_joins_what_is_shown() -> None:
    parts = fold(
        [
            {"type": "reasoning-delta", "delta": "hm"},
            {"type": "text-start"},
            {"type": "text-delta", "delta": "a"},
            {"type": "start-step"},
            {"type": "text-start"},
            {"type": "text-delta", "delta": "b"},
        ]
    )
    assert text_of(parts) == "ab"


def test_ten_thousand_deltas_fold_in_linear_time() -> None:
    def cost(count: int) -> float:
        stream = [{"type": "text-delta", "id": "t", "delta": "word "}] * count
        best = 9.0
        for _ in range(3):
            begun = time.thread_time()
            fold(stream)
            best = min(best, time.thread_time() - begun)
        return best

    assert cost(10_000) < 0.05 * SLOWER
    assert cost(40_000) < 16 * max(cost(10_000), 0.001)
