"""The order of an abort, against its laws and a recursive twin."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culet.kernel.core.abort import plan
from culet.kernel.errors import InternalError

Node = tuple[int, int | None, int]


@st.composite
def forests(draw: st.DrawFn) -> list[Node]:
    """Draw nodes whose parents are older; ids, births and the listing are shuffled."""
    count = draw(st.integers(0, 25))
    ids = draw(st.permutations(range(100, 100 + count)))
    nodes: list[Node] = []
    for born in range(count):
        parent = draw(st.none() | st.sampled_from(ids[:born])) if born else None
        nodes.append((ids[born], parent, born * 3))
    return draw(st.permutations(nodes))


def recursive(nodes: list[Node], parent: int | None = None) -> list[int]:
    out: list[int] = []
    children = [node for node in nodes if node[1] == parent]
    for own, _parent, _born in sorted(children, key=lambda node: -node[2]):
        out += [*recursive(nodes, own), own]
    return out


@given(forests())
def test_the_plan_is_the_post_order_with_the_youngest_first(nodes: list[Node]) -> None:
    assert plan(nodes) == recursive(nodes)


@given(forests())
def test_children_stand_before_parents_and_nobody_twice(nodes: list[Node]) -> None:
    order = plan(nodes)
    at = {own: place for place, own in enumerate(order)}
    assert sorted(order) == sorted(node[0] for node in nodes)
    assert all(at[own] < at[parent] for own, parent, _ in nodes if parent is not None)


@given(forests(), st.data())
def test_a_subtree_stops_as_it_does_within_the_whole(
    nodes: list[Node], data: st.DataObject
) -> None:
    if not nodes:
        return
    top = data.draw(st.sampled_from(nodes))[0]
    inside = {top}
    for own, parent, _born in sorted(nodes, key=lambda node: node[2]):
        if parent in inside:
            inside.add(own)
    part = [node for node in nodes if node[0] in inside]
    assert plan(part) == [own for own in plan(nodes) if own in inside]


def test_a_deep_tree_needs_no_stack() -> None:
    deep = [(i, i - 1 if i else None, i) for i in range(20_000)]
    assert plan(deep) == list(range(19_999, -1, -1))


@pytest.mark.parametrize(
    "nodes", [[(1, None, 0), (1, None, 1)], [(1, 2, 0), (2, 1, 1)], [(1, 1, 0)]]
)
def test_what_is_no_forest_is_our_bug(nodes: list[Node]) -> None:
    with pytest.raises(InternalError):
        plan(nodes)
