"""Bytes of a text, counted without making them where that can be known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culet.kernel.core.size import is_larger, size_of


@given(st.text() | st.binary(), st.integers(0, 60))
def test_a_text_is_as_large_as_its_bytes(text: str | bytes, most: int) -> None:
    encoded = text.encode() if isinstance(text, str) else text

    assert size_of(text) == len(encoded)
    assert is_larger(text, most) == (len(encoded) > most)


@pytest.mark.parametrize("letter", ["a", "é", "€", "😀"])
def test_the_bound_itself_is_not_larger(letter: str) -> None:
    text = letter * 5
    size = len(text.encode())

    assert [is_larger(text, size - 1), is_larger(text, size)] == [True, False]


def test_half_a_pair_is_counted_too() -> None:
    assert size_of("\ud800") == 3
