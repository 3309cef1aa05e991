"""Run ids, previews, what the model hears, and the pace of progress."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culet.kernel.core.path import build_agent_path, check_name
from culet.kernel.core.run import (
    AgentToolRun,
    coalesce,
    derive_run_id,
    input_digest,
    model_value,
    shape_preview,
    steady_json,
)

texts = st.text(st.characters(exclude_categories=["Cs"]))
pairs = st.tuples(texts, texts)


@given(pairs, pairs)
def test_a_run_id_is_a_function_of_both_ids_and_safe(one: Any, other: Any) -> None:
    run_id = derive_run_id(*one)
    assert (derive_run_id(*other) == run_id) == (one == other)
    assert re.fullmatch(r"run-[a-z2-7]{32}", run_id)
    assert check_name(run_id) == run_id
    path = build_agent_path([("A", "r"), ("B", run_id)])
    assert path.endswith("/" + run_id)


def test_a_run_id_does_not_change_between_versions() -> None:
    assert derive_run_id("msg-1", "call-1") == "run-" + PINNED


PINNED = "4hp7n4z4aon77gcpp7ck5a4rwtdxgmco"


def test_neighbouring_ids_do_not_run_together() -> None:
    assert derive_run_id("ab", "c") != derive_run_id("a", "bc")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4)
    ),
    max_leaves=12,
)


def test_a_digest_sees_values_not_spelling() -> None:
    assert input_digest(b'{"a": 1, "b": [2]}') == input_digest(b'{"b":[2],"a":1}')
    assert input_digest(b'{"a":1}') != input_digest(b'{"a":2}')
    assert input_digest(b'{"a":1}') != input_digest(b'{"a":"1"}')


def test_sets_have_one_text_in_whatever_order_they_come() -> None:
    one, other = set[int](), set[int]()
    for n in (8, 0):
        one.add(n)
    for n in (0, 8):
        other.add(n)
    assert list(one) != list(other), "as in another process"
    assert steady_json({"x": one}) == steady_json({"x": other}) == b'{"x":[0,8]}'
    assert steady_json({1: "no text for a key"}) == b'{"1":"no text for a key"}'
    with pytest.raises(TypeError):
        steady_json(object())


@given(json_values, json_values)
def test_different_inputs_have_different_digests(one: Any, other: Any) -> None:
    def digest(value: Any) -> str:
        return input_digest(json.dumps(value).encode())

    same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert (digest(one) == digest(other)) == same


def test_a_preview_shows_the_shape() -> None:
    value = {"query": "HTTP/3", "n": 3, "tags": ["a", "b"], "deep": {"x": None}}
    assert shape_preview(value) == {
        "query": "string(6)",
        "n": "number",
        "tags": {"array(2)": "string(1)"},
        "deep": {"x": "null"},
    }


@pytest.mark.rule("T-010", "T-012")
@given(
    st.recursive(
        st.none() | st.floats() | st.just("SECRET") | st.binary(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=9)
            | st.dictionaries(
                texts.filter(lambda t: "SECRET" not in t), inner, max_size=90
            )
        ),
        max_leaves=60,
    ),
    st.integers(40, 1024),
)
def test_a_preview_fits_and_tells_no_text(value: Any, bound: int) -> None:
    shown = json.dumps(shape_preview(value, bound), ensure_ascii=False)
    compact = json.dumps(
        shape_preview(value, bound), ensure_ascii=False, separators=(",", ":")
    )
    assert len(compact.encode()) <= bound
    assert "SECRET" not in shown


def test_a_preview_of_something_wide_or_deep_is_shown_less_deeply() -> None:
    wide = {f"key{i}": "x" * i for i in range(1000)}
    assert len(json.dumps(shape_preview(wide))) <= 1024
    deep: Any = "x"
    for _ in range(500):
        deep = {"k": deep}
    assert "object(1)" in json.dumps(shape_preview(deep))
    assert shape_preview({"k" * 5000: 1}) == {"k" * 63 + "…": "number"}


def run(status: str, **more: Any) -> AgentToolRun:
    return AgentToolRun(run_id="r", agent_type="A", status=status, **more)


@pytest.mark.rule("T-084", "T-085", "T-090", "T-091", "T-092", "T-093", "T-094")
@pytest.mark.parametrize(
    ("record", "told"),
    [
        (run("completed", summary="s"), "s"),
        (run("completed"), ""),
        (run("completed", summary="s", output={"a": 1}), {"a": 1}),
        (run("completed", output=0), 0),
        (
            run("error", error="no"),
            {"ok": False, "status": "error", "error": "no", "retryable": False},
        ),
        (
            run("error", error="full", reason="capacity"),
            {"ok": False, "status": "error", "error": "full", "retryable": True,
             "reason": "capacity"},
        ),
        (
            run("aborted", output={"a": 1}),
            {"ok": False, "status": "aborted", "error": "the run was cancelled",
             "retryable": False},
        ),
        (
            run("interrupted", error="lost", reason="deleted"),
            {"ok": False, "status": "interrupted", "error": "lost",
             "retryable": True, "reason": "deleted"},
        ),
        (
            run("running", reason="no-progress"),
            {"ok": False, "status": "running", "retryable": True,
             "childStillRunning": True},
        ),
    ],
)  # fmt: skip
def test_the_model_hears_the_result_or_plainly_that_there_is_none(
    record: AgentToolRun, told: object
) -> None:
    assert model_value(record) == told


@pytest.mark.limit("progress_s")
def test_progress_is_paced() -> None:
    assert coalesce(None, 0) == "store"
    assert coalesce(1000, 1199) == "hold"
    assert coalesce(1000, 1200) == "store"
    assert coalesce(1000, 1001, last=True) == "store"
    assert coalesce(1000, 400) == "store"  # the clock went back


@given(st.lists(st.integers(0, 500), min_size=1, max_size=50))
def test_at_most_one_in_the_pace_and_the_last_always(gaps: list[int]) -> None:
    now, stored, kept = 0, None, []
    for place, gap in enumerate(gaps):
        now += gap
        last = place == len(gaps) - 1
        if coalesce(stored, now, last=last) == "store":
            kept.append((place, now))
            stored = now
    assert kept[-1][0] == len(gaps) - 1
    times = [when for _place, when in kept[:-1]]
    assert all(b - a >= 200 for a, b in itertools.pairwise(times))
