"""A stored schema refuses what the type itself refuses."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypedDict

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from culet.kernel.core.fits import complaint


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Score(msgspec.Struct, forbid_unknown_fields=True):
    n: int
    tags: list[str] = []


class Tree(msgspec.Struct):
    name: str
    kids: list[Tree] = []


class Loose(TypedDict, total=False):
    a: int
    b: str | None


@dataclass
class Pair:
    left: float
    right: tuple[int, str]


TYPES: list[Any] = [
    int, float, str, bool, None, list[int], dict[str, int], int | None, str | int | None,
    Literal["a", "b"], Literal[1, "x"] | None, Colour, Score, Tree, Loose, Pair,
    tuple[int, str], dict[str, list[Score]],
    Annotated[int, msgspec.Meta(ge=0, lt=9)], Annotated[float, msgspec.Meta(gt=0, le=2)],
    Annotated[str, msgspec.Meta(min_length=2, max_length=3, pattern="^x")],
    Annotated[list[int], msgspec.Meta(min_length=1, max_length=2)],
    Annotated[dict[str, int], msgspec.Meta(min_length=1, max_length=2)],
]  # fmt: skip
LEAVES = (
    st.none() | st.booleans() | st.integers(-3, 12) | st.sampled_from([0.5, 1.0, 2.5])
    | st.sampled_from(["", "a", "b", "red", "x1", "xyz", "blue", "x123"])
)  # fmt: skip
KEYS = st.sampled_from(["n", "tags", "name", "kids", "a", "b", "left", "right", "z"])
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=8,
)


@pytest.mark.rule("T-086", "T-087")
@pytest.mark.parametrize("wanted", TYPES, ids=str)
@given(value=VALUES)
def test_a_schema_and_its_type_agree_on_any_value(wanted: Any, value: Any) -> None:
    schema = msgspec.json.schema(wanted)
    try:
        msgspec.convert(value, wanted)
    except msgspec.ValidationError:
        fits = False
    else:
        fits = True
    assert (complaint(schema, value) is None) is fits


@pytest.mark.parametrize(
    ("wanted", "value", "text"),
    [
        (Score, {"n": "x"}, "expected `integer` - at `$.n`"),
        (Score, {}, "missing `n` - at `$`"),
        (Score, {"n": 1, "z": 2}, "unknown `z` - at `$`"),
        (list[int], [1, "x"], "expected `integer` - at `$[1]`"),
        (Colour, "green", "is none of ['blue', 'red'] - at `$`"),
        (int | str, [], "fits none of its kinds - at `$`"),
    ],
)
def test_a_complaint_says_what_and_where(wanted: Any, value: Any, text: str) -> None:
    assert complaint(msgspec.json.schema(wanted), value) == text


def test_a_value_that_is_deeper_than_anybody_looks_ends_the_look() -> None:
    value: Any = {"name": "leaf", "kids": []}
    for _ in range(500):
        value = {"name": "x", "kids": [value]}
    assert complaint(msgspec.json.schema(Tree), value) is None


def test_what_no_such_schema_says_refuses_nothing() -> None:
    assert complaint({"type": "odd", "$comment": "x"}, 1) is None
    assert complaint({"$ref": "#/$defs/Gone"}, 1) is None
