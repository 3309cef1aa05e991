"""Places among the runs of one agent: who asks for one more waits in line, or is refused.

An agent says how many of its runs may go on at once (`max_concurrent_agent_tools`) and
how many callers may wait for a place (`max_queued_agent_tools`, none by default: then
one too many is refused at once). First come, first served. A caller that waits has no
row yet: nothing was promised, and nothing of it is left when it goes away.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

import trio

from .node import Node

if TYPE_CHECKING:
    from .tree import Tree
    from .turn import CancelToken

_COUNT = "SELECT count(*) FROM run WHERE owner = ? AND status = 'running'"


@dataclass(slots=True, eq=False)
class _Waiter:
    """One in line. `given`: a place is kept for it, until it wakes up and asks."""

    event: trio.Event = field(default_factory=trio.Event)
    given: bool = False


@final
class Places:
    """The lines of one tree, one an agent."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self._lines: dict[str, deque[_Waiter]] = {}
        self._given: Counter[str] = Counter()

    def full(self, node: Node) -> int | None:
        """Return the bound when no place is free."""
        limit = node.agent.max_concurrent_agent_tools
        if limit is None:
            return None
        taken = int(self.tree.db.execute(_COUNT, (node.slot,))[0][0])
        return limit if taken + self._given[node.slot] >= limit else None

    async def wait(self, node: Node, cancel: CancelToken | None) -> None:
        """Wait while no place is free and the line has room; a token ends the wait.

        Whoever returns from here asks for its run before anything else happens.
        """
        owner = node.slot
        limit = self.full(node)
        queued = len(self._lines.get(owner, ()))
        if not limit or queued >= node.agent.max_queued_agent_tools:
            return
        waiter = _Waiter()
        self._lines.setdefault(owner, deque()).append(waiter)

        def leave(_reason: str | None) -> None:
            self._drop(owner, waiter)
            waiter.event.set()

        if cancel is not None:
            cancel.on_cancel(leave)
        try:
            await waiter.event.wait()
        except BaseException:
            self._drop(owner, waiter)
            self._took(owner, waiter)
            self.freed(owner)
            raise
        finally:
            if cancel is not None:
                cancel.forget(leave)
        self._took(owner, waiter)

    def freed(self, owner: str) -> None:
        """Give what is free to the first in line."""
        line = self._lines.get(owner)
        node = self.tree.nodes.get(owner)
        while line and node is not None and self.full(node) is None:
            waiter = line[0]
            self._drop(owner, waiter)
            waiter.given = True
            self._given[owner] += 1
            waiter.event.set()

    def _drop(self, owner: str, waiter: _Waiter) -> None:
        line = self._lines.get(owner, deque())
        if waiter in line:
            line.remove(waiter)
        if not line:
            self._lines.pop(owner, None)

    def _took(self, owner: str, waiter: _Waiter) -> None:
        if waiter.given:
            self._given[owner] -= 1
        self._given += Counter()  # what is zero is forgotten
