"""The folds of a chat: chunks count once, replies keep their places."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culet.web.client_transcript import Fold, Transcript

CHUNKS: list[dict[str, Any]] = [
    {"type": "start", "messageId": "m1", "messageMetadata": {"a": 1}},
    {"type": "text-start", "id": "t"},
    *({"type": "text-delta", "id": "t", "delta": f"w{i} "} for i in range(5)),
    {"type": "text-end", "id": "t"},
    {"type": "finish", "messageMetadata": {"b": 2}},
]


def message(name: str, text: str = "", role: str = "user") -> dict[str, Any]:
    return {"id": name, "role": role, "parts": [{"type": "text", "text": text}]}


def ids(transcript: Transcript) -> list[str]:
    return [m["id"] for m in transcript.messages()]


@given(st.lists(st.integers(0, len(CHUNKS)), max_size=4))
def test_replays_from_the_start_cut_anywhere_fold_to_the_same(cuts):
    once, often = Fold("r"), Fold("r")
    for seq, chunk in enumerate(CHUNKS):
        assert once.add(seq, chunk)
    new = 0
    for cut in [*cuts, len(CHUNKS)]:
        for seq, chunk in enumerate(CHUNKS[:cut]):
            new += often.add(seq, chunk)
    assert new == len(CHUNKS)
    assert often.message == once.message
    assert once.message == {
        "id": "m1",
        "role": "assistant",
        "parts": [{"type": "text", "text": "w0 w1 w2 w3 w4 ", "state": "done"}],
        "metadata": {"a": 1, "b": 2},
    }


def test_a_turn_that_shows_nothing_is_no_message():
    transcript, fold = Transcript(), Fold("r")
    transcript.begin(fold)
    fold.add(0, {"type": "start"})
    fold.add(1, {"type": "start-step"})
    assert transcript.messages() == []
    fold.end("aborted")
    transcript.end(fold)
    assert transcript.messages() == []


def test_the_end_leaves_nothing_streaming():
    fold = Fold("r")
    for seq, chunk in enumerate(CHUNKS[:4]):
        fold.add(seq, chunk)
    fold.end("aborted")
    assert fold.parts == [{"type": "text", "text": "w0 w1 ", "state": "done"}]


def test_a_reply_stands_after_its_question_whatever_comes_first():
    transcript, first, second = Transcript(), Fold("1"), Fold("2")
    for question, fold in (("q1", first), ("q2", second)):
        transcript.put(message(question))
        transcript.begin(fold)
    second.add(0, {"type": "text-delta", "delta": "b"})
    first.add(0, {"type": "text-delta", "delta": "a"})
    assert ids(transcript) == ["q1", "reply-1", "q2", "reply-2"]
    transcript.end(first)
    transcript.end(second)
    assert ids(transcript) == ["q1", "reply-1", "q2", "reply-2"]


def test_the_servers_transcript_keeps_questions_that_it_does_not_know_yet():
    transcript, fold = Transcript(), Fold("1")
    transcript.put(message("old"))
    transcript.put(message("q"))
    transcript.begin(fold)
    fold.add(0, {"type": "text-delta", "delta": "a"})
    transcript.replace([message("new")], [(message("q"), fold)])
    assert ids(transcript) == ["new", "q", "reply-1"]
    transcript.replace([message("q"), message("other")], [(message("q"), fold)])
    assert ids(transcript) == ["q", "reply-1", "other"]


@pytest.mark.parametrize("whole", [True, False])
def test_of_two_versions_of_a_reply_the_whole_one_stays(whole):
    transcript, fold = Transcript(), Fold("1")
    fold.message_id = "m"
    transcript.begin(fold)
    fold.add(0 if whole else 7, {"type": "text-delta", "delta": "folded"})
    transcript.replace([message("m", "the server's", "assistant")], [])
    transcript.end(fold)
    (only,) = transcript.messages()
    assert only["parts"][0]["text"] == ("folded" if whole else "the server's")


def test_a_continuation_goes_on_in_the_last_reply():
    transcript, fold = Transcript(), Fold("2")
    transcript.put(message("q"))
    transcript.put(message("m", "so ", "assistant"))
    fold.continuation = True
    transcript.begin(fold)
    fold.add(3, {"type": "text-delta", "delta": "far"})
    assert ids(transcript) == ["q", "m"]
    assert transcript.messages()[1]["parts"][0]["text"] == "so far"
    transcript.put(message("m", "so very ", "assistant"))  # updated while it streams
    fold.add(4, {"type": "text-delta", "delta": "far"})
    transcript.end(fold)
    assert ids(transcript) == ["q", "m"]


def test_clearing_keeps_what_is_under_way():
    transcript, fold = Transcript(), Fold("1")
    transcript.put(message("q"))
    transcript.begin(fold)
    transcript.clear()
    fold.add(0, {"type": "text-delta", "delta": "late"})
    assert ids(transcript) == ["reply-1"]
    transcript.drop(fold, "q")
    assert ids(transcript) == []
