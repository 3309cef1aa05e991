from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culet.kernel.core.sse import Decoder, Event
from culet.kernel.errors import RemoteProtocolError


@pytest.mark.parametrize(
    ("text", "events"),
    [
        ("data: a\n\n", [Event("", "a")]),
        ("data:a\r\n\r\n", [Event("", "a")]),
        ("data: a\r\rdata: b\r\r\n", [Event("", "a"), Event("", "b")]),
        ("event: x\ndata: a\ndata:  b\n\ndata: c\n\n",
         [Event("x", "a\n b"), Event("", "c")]),
        (": comment\n\nid: 7\nretry: 3\ndata: a\nmore\n\n", [Event("", "a")]),
        ("event: x\n\n", []),
        ("data\n\n", [Event("", "")]),
        ("data: not ended\n", []),
        ("data: größer\u2028\n\n", [Event("", "größer\u2028")]),
    ],
)  # fmt: skip
@given(cuts=st.lists(st.integers(0, 60)))
def test_events_are_the_same_however_they_are_cut(
    text: str, events: list[Event], cuts: list[int]
) -> None:
    data, decoder = text.encode(), Decoder()
    edges = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    found: list[Event] = []
    for start, end in itertools.pairwise(edges):
        found += decoder.feed(data[start:end])
    assert found == events


@pytest.mark.parametrize("block", [b"x" * 50, b"data: " + b"x" * 20 + b"\n"])
def test_an_event_is_bounded_in_one_line_and_in_many(block: bytes) -> None:
    decoder = Decoder(max_bytes=100)
    with pytest.raises(RemoteProtocolError, match="larger than 100"):
        for _ in range(9):
            assert decoder.feed(block) == []


def test_many_small_events_are_not_one_large_one() -> None:
    decoder = Decoder(max_bytes=100)
    for _ in range(99):
        assert decoder.feed(b"data: hello\n\n") == [Event("", "hello")]


def test_a_long_line_in_small_blocks_is_looked_through_once() -> None:
    decoder = Decoder()
    block = b"x" * 16_000
    decoder.feed(b"data: ")
    for _ in range(400):  # quadratic, this takes half a minute
        assert decoder.feed(block) == []
    (event,) = decoder.feed(b"\n\n")
    assert len(event.data) == 400 * len(block)
