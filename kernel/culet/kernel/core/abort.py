"""The order in which a subtree stops, as data.

Plain trio cancels a whole scope at once and unwinds siblings in any order. A supervisor
needs one order: children before their parents, because a parent's clean-up may still
talk about them, and of siblings the one that was born last first, because it may use
those that were there before it. That is the post-order of the tree with siblings taken
youngest first; each subtree is finished before the next begins.

The plan is computed and written down before anything is stopped, then carried out node
by node. It is iterative, so a deep tree costs no stack.

Laws: the plan is a permutation of its nodes; every child stands before its parent; of
two siblings the whole subtree of the younger stands before that of the older.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeVar

from culet.kernel.errors import InternalError

Id = TypeVar("Id", bound=Hashable)


def plan(nodes: Iterable[tuple[Id, Id | None, int]]) -> list[Id]:
    """Return the ids of `(id, parent, born)` in the order in which they stop.

    A node whose parent is not among them is a top of its own; tops are ordered like
    siblings. `born` grows with each birth. Raises `InternalError` for an id that comes
    twice and for parents that form a circle.
    """
    listed = sorted(nodes, key=lambda node: node[2], reverse=True)
    known = {node[0] for node in listed}
    if len(known) != len(listed):
        raise InternalError("a node stands twice in a plan")
    below: dict[Id | None, list[Id]] = {}
    for own, parent, _born in listed:
        below.setdefault(parent if parent in known else None, []).append(own)
    # Parents first and the oldest child first: the reverse of what is wanted.
    waiting = below.get(None, [])
    order: list[Id] = []
    while waiting:
        own = waiting.pop()
        order.append(own)
        waiting.extend(below.get(own, ()))
    if len(order) != len(listed):
        raise InternalError("the parents of a plan form a circle")
    order.reverse()
    return order
