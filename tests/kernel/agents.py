"""Agents that several tests of the kernel use, and small ways to wait and to look."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
import trio.testing

from culet.kernel import Agent
from culet.kernel.node import Node
from culet.kernel.testing import Harness
from culet.kernel.tree import Tree


async def settle() -> None:
    """Let everything run that can run without time passing."""
    await trio.testing.wait_all_tasks_blocked()


async def raises(kind: Any, fn: Callable[..., Awaitable[Any]], *args: Any) -> Any:
    """Await `fn(*args)`, which must raise that; return the error."""
    with pytest.raises(kind) as caught:
        await fn(*args)
    return caught.value


def tree_of(test: Harness, class_name: str = "Top", name: str = "a") -> Tree:
    """Return an open tree."""
    tree = test.tree(class_name, name)
    assert tree is not None
    return tree


def agent_at(test: Harness, *hops: tuple[str, str]) -> Any:
    """Return the live instance at a path below the root Top/a."""
    return node_at(test, *hops).agent


def node_at(test: Harness, *hops: tuple[str, str]) -> Node:
    """Return the live node at a path below the root Top/a."""
    node = test.find([("Top", "a"), *hops])
    assert node is not None
    return node


class Top(Agent):
    """A root that lets tests act inside it."""

    async def ping(self, n: int) -> int:
        return n + 1


def rows(tree: Tree, sql: str, *params: Any) -> list[tuple[Any, ...]]:
    """Return rows of `tree.db`."""
    return tree.db.execute(sql, params)
