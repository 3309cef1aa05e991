from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culet.adapters.model import ModelMessage, ToolCall, ToolSpec
from culet.adapters.wire import Asked, object_of, safe_ids, schema_of


def test_ids_that_no_provider_takes_are_replaced_and_the_others_kept() -> None:
    calls = [
        ToolCall(id=one, name="t", input={})
        for one in ("toolu_1", "call-msg:1-0", "x" * 41, "call_1")
    ]
    ids = safe_ids([ModelMessage(role="assistant", tool_calls=tuple(calls))])
    assert list(ids.values()) == ["toolu_1", "call_2", "call_3", "call_1"]


@given(names=st.lists(st.text(max_size=50)))
def test_safe_ids_are_safe_and_distinct(names: list[str]) -> None:
    calls = tuple(ToolCall(id=name, name="t", input={}) for name in names)
    ids = safe_ids([ModelMessage(role="assistant", tool_calls=calls)])
    assert ids.keys() == set(names)
    assert len(set(ids.values())) == len(ids)
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{1,40}", one) for one in ids.values())


def test_a_tool_without_parameters_is_an_object_all_the_same() -> None:
    assert schema_of(ToolSpec(name="t")) == {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("value", "expected"),
    [({"a": 1}, {"a": 1}), (None, {}), ("", {}), ("x", {"input": "x"})],
)
def test_an_input_is_always_an_object(value: object, expected: object) -> None:
    assert object_of(value) == expected


@pytest.mark.parametrize(
    ("pieces", "cut", "value"),
    [
        (['{"a"', ":1}"], False, {"a": 1}),
        ([], False, {}),
        (['{"a":'], False, '{"a":'),
        (["[" * 10_000], False, "[" * 10_000),
        (['{"a":1}'], True, {"a": 1}),
    ],
)
def test_arguments_are_put_together(
    pieces: list[str], cut: bool, value: object
) -> None:
    asked = Asked("c", "t")
    asked.arguments += pieces
    assert asked.call(cut=cut) == ToolCall(id="c", name="t", input=value)


@pytest.mark.parametrize("pieces", [[], ['{"a":']])
def test_half_a_call_of_a_cut_answer_was_not_asked_for(pieces: list[str]) -> None:
    asked = Asked("c", "t")
    asked.arguments += pieces
    assert asked.call(cut=True) is None
