"""What a client says it has: read back as it was written, and never more than it has."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culet.kernel.core.attach import (
    KNOWN_CHARS,
    KNOWN_MAX,
    Known,
    known_runs,
    known_text,
    noted,
)

ids = st.text(max_size=20).filter(lambda t: t.isprintable())
knowns = st.builds(Known, st.integers(0, 2**53), st.integers(0, 10**6))
tables = st.dictionaries(ids, knowns, max_size=KNOWN_MAX + 20)


@pytest.mark.rule("T-237")
@given(tables)
def test_what_was_written_is_read_back_the_newest_at_least(
    known: dict[str, Known],
) -> None:
    text = known_text(known)
    assert len(text) <= KNOWN_CHARS
    back = known_runs(text)
    assert back.items() <= known.items()
    if len(known) <= KNOWN_MAX and all(i.isascii() and len(i) < 21 for i in known):
        assert known_text({}) == ""
        newest = list(known)[-len(back) :] if back else []
        assert set(back) == set(newest)
    if known and len(list(known)[-1].encode()) < 1000:
        assert list(known)[-1] in back


@pytest.mark.rule("T-237")
@given(st.text() | st.none())
def test_whatever_an_address_says_nothing_raises(text: str | None) -> None:
    assert isinstance(known_runs(text), dict)


@pytest.mark.parametrize(
    "text",
    [
        None, "", "[", "{}", "[1]", '[["r",1]]', '[["r",1,2,3]]', '[["r","1",2]]',
        '[["r",1,-1]]', '[[1,1,1]]', '[["r",1.5,2]]', "[" * 10_000,
        "[" + ",".join(['["r",1,2]'] * (KNOWN_MAX + 1)) + "]",
        '[["' + "r" * KNOWN_CHARS + '",1,2]]',
    ],
)  # fmt: skip
def test_who_says_something_else_is_sent_everything(text: str | None) -> None:
    assert known_runs(text) == {}


def frame(number: Any, kind: str, run_id: Any = "r", **more: Any) -> dict[str, Any]:
    event = {"kind": kind, "runId": run_id, **more.pop("event", {})}
    return {"type": "agent-tool-event", "sequence": number, "event": event, **more}


frames = st.lists(
    st.one_of(
        st.builds(frame, st.integers(0, 6), st.just("chunk"), st.sampled_from("rs")),
        st.builds(
            frame, st.just(0), st.just("started"), st.sampled_from("rs"),
            startedAt=st.sampled_from([1, 2, None]),
        ),
        st.builds(
            frame, st.just(0), st.just("cleared"), st.none(),
            event=st.fixed_dictionaries({"runIds": st.lists(st.sampled_from("rs"))}),
        ),
    )
)  # fmt: skip


@pytest.mark.rule("T-237", "B-03")
@given(frames)
def test_only_what_follows_on_without_a_gap_is_had(came: list[dict[str, Any]]) -> None:
    known: dict[str, Known] = {}
    had: dict[tuple[str, int], set[int]] = {}
    life: dict[str, int] = {}
    for one in came:
        noted(known, one)
        event, number = one["event"], one["sequence"]
        if event["kind"] == "cleared":
            for run_id in event["runIds"]:
                life.pop(run_id, None)
                had = {k: v for k, v in had.items() if k[0] != run_id}
            continue
        run_id = event["runId"]
        if event["kind"] == "started" and one["startedAt"] is not None:
            if life.get(run_id) != one["startedAt"]:
                had = {k: v for k, v in had.items() if k[0] != run_id}
            life[run_id] = one["startedAt"]
        if run_id in life:
            had.setdefault((run_id, life[run_id]), set()).add(number)
        for name, (at, sequence) in known.items():
            assert life[name] == at
            assert set(range(1, sequence + 1)) <= had[name, at]


@pytest.mark.parametrize(
    "odd",
    [
        {}, {"event": 1}, {"event": {}, "sequence": 0}, frame(None, "chunk"),
        frame(1, "chunk", 5), frame(0, "started", [], startedAt=1),
        frame(0, "cleared", event={"runIds": 5}), frame(0, "cleared", event={"runIds": [[]]}),
        frame(True, "chunk"), frame(0, "started", startedAt=True),
    ],
)  # fmt: skip
def test_an_odd_frame_is_passed_over(odd: dict[str, Any]) -> None:
    known = {"r": Known(1, 0)}
    noted(known, odd)
    assert known == {"r": Known(1, 0)}


def test_of_very_many_the_newest_are_kept() -> None:
    known: dict[str, Known] = {}
    for number in range(KNOWN_MAX + 5):
        noted(known, frame(0, "started", f"r{number}", startedAt=1))
    assert list(known) == [f"r{n}" for n in range(5, KNOWN_MAX + 5)]
