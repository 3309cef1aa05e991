"""The order of a tree's frames: cursors, where a reader goes on, what a page takes."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culet.kernel.core.feed import (
    BEGINNING,
    FIRST,
    Ahead,
    Key,
    Position,
    end_of,
    first,
    seek,
)
from culet.kernel.errors import UsageError

places = st.integers(0, (1 << 63) - 1)
numbers = st.integers(0, (1 << 32) - 1)
positions = st.builds(Position, places, numbers)
trees = st.text("abcdefghijklmnop0123456789", min_size=1, max_size=24)


@given(at=positions, tree=trees)
def test_a_cursor_says_where_it_was_taken_and_is_safe_in_a_url(
    at: Position, tree: str
) -> None:
    text = at.text(tree)

    assert Position.parse(text, tree) == at
    assert len(text) == 24
    assert set(text) <= set(
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    )


@given(at=positions, tree=trees, other=trees)
def test_a_cursor_of_another_tree_is_refused(
    at: Position, tree: str, other: str
) -> None:
    if tree != other:
        with pytest.raises(UsageError):
            Position.parse(at.text(tree), other)


@given(at=positions, byte=st.integers(0, 17), bit=st.integers(0, 7))
def test_a_cursor_with_any_bit_turned_over_is_refused(
    at: Position, byte: int, bit: int
) -> None:
    raw = bytearray(base64.urlsafe_b64decode(at.text("t")))
    raw[byte] ^= 1 << bit
    with pytest.raises(UsageError):
        Position.parse(base64.urlsafe_b64encode(raw).decode(), "t")


@given(text=st.text(max_size=40))
def test_any_other_text_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Position.parse(text, "t")


@pytest.mark.parametrize("wrong", [None, 3, b"AQAAAAEAAAACAAAAAIYxaqOX", "", " "])
def test_what_is_no_text_is_refused(wrong: object) -> None:
    with pytest.raises(UsageError):
        Position.parse(wrong, "t")  # type: ignore[arg-type]


def test_a_cursor_of_another_version_is_refused_as_such() -> None:
    raw = b"\2" + base64.urlsafe_b64decode(Position(1, 1).text("t"))[1:13]
    import hashlib

    seal = hashlib.blake2s(raw, key=b"t", digest_size=5).digest()
    with pytest.raises(UsageError, match="another version"):
        Position.parse(base64.urlsafe_b64encode(raw + seal).decode(), "t")


def test_the_beginning_lies_before_all_and_the_end_of_a_place_behind_all_of_it() -> (
    None
):
    assert Position(1, 0) > BEGINNING
    assert Position(FIRST, 5) < end_of(FIRST) < Position(FIRST + 1, 0)


@given(
    steps=st.lists(st.integers(0, 2), max_size=60),
    place=st.integers(0, 70),
    number=st.integers(0, 62),
)
def test_seek_finds_the_first_entry_behind_a_position(
    steps: list[int], place: int, number: int
) -> None:
    at, given_ = 1, []
    for step in steps:
        at += step
        given_.append(at)
    after = Position(place, number)

    found = seek(len(given_), given_.__getitem__, after)

    behind = [i for i, p in enumerate(given_) if (p, i + 1) > after]
    assert found == (behind[0] if behind else len(given_))


def split(keys: list[Key], count: int, chunk: int) -> list[Ahead]:
    """Return the keys over some sources, each of which tells a few at a time."""
    out = []
    for number in range(count):
        rest = [k for k in keys if k.place % count == number]
        source = Ahead(rest[:chunk])
        left = iter(rest[chunk:])

        def more(source: Ahead = source, left: object = left) -> None:
            for _ in range(chunk):
                key = next(left, None)  # type: ignore[call-overload]
                if key is not None:
                    source.keys.append(key)

        source.more = more
        out.append(source)
    return out


@given(
    sizes=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 50)), max_size=60),
    sources=st.integers(1, 7),
    chunk=st.integers(1, 5),
    most=st.integers(1, 9),
    room=st.integers(1, 120),
    reach=st.integers(0, 70),
)
def test_pages_in_a_row_are_what_sorting_everything_would_be(
    sizes: list[tuple[int, int]],
    sources: int,
    chunk: int,
    most: int,
    room: int,
    reach: int,
) -> None:
    keys = [
        Key(place, number, size, None)
        for place, (count, size) in enumerate(sizes, 1)
        for number in range(count)
    ]
    todo = split(keys, sources, chunk)
    got: list[Key] = []
    while page := first(todo, end_of(reach), most, room):
        assert len(page) <= most
        assert len(page) == 1 or sum(k.size for k in page) <= room
        for key in page:  # each source gives what it has given no more
            todo[key.place % sources].keys.remove(key)
            if not todo[key.place % sources].keys:
                todo[key.place % sources].more()  # type: ignore[misc]
        got += page

    assert got == [k for k in keys if k.place <= reach]
