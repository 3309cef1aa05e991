"""What a tree owes by itself: hooks and deliveries of runs that ended, budgets, wipes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

import msgspec

from .core.run import AgentToolRun
from .endings import BELOW, Ending
from .errors import UsageError
from .fibers import DEADLINE
from .node import Ambient, Node

if TYPE_CHECKING:
    from .jobs import Taken
    from .tree import Tree


@final
class Duties:
    """The jobs of one tree that are neither schedules, turns nor fibers."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree

    async def wipe(self, taken: Taken) -> bool:
        """Remove the files and rows of a subtree that is marked gone, every row below."""
        sub = BELOW + "SELECT slot FROM sub"
        slots = [str(r[0]) for r in self.tree.db.execute(sub, (taken.row.what,))]
        await self.tree.stops.carry_out(self.tree.stops.plan(slots))
        for slot in slots:
            self.tree.streams.forget(slot)
            self.tree.aborted.pop(slot, None)
            self.tree.made.discard(slot)
        with self.tree.transaction():
            self.tree.db.execute(
                BELOW + "DELETE FROM node WHERE slot IN (SELECT slot FROM sub)",
                (taken.row.what,),
            )
            for slot in slots:
                if self.tree.store.agent(slot).exists:
                    self.tree.store.delete(slot)
        return True

    async def enter_for(
        self, taken: Taken, name: str, fn: Callable[[Node], Any]
    ) -> bool:
        """Wake the owner, look again, and run `fn(node)` inside it."""
        node = await self.tree.wake(taken.row.owner)
        if not self.tree.jobs.mine(taken):
            return False
        await node.enter(Ambient(node), fn, node)
        return True

    async def hook(self, taken: Taken) -> bool:
        """Tell the parent of a run that it has ended."""
        if taken.payload:  # cleared since: it says what its row has said
            run = msgspec.convert(taken.payload["run"], AgentToolRun)
        else:
            stored = self.tree.runs.get(taken.row.owner, taken.row.what)
            if stored is None:
                return True
            run = stored

        async def call(node: Node) -> None:
            await node.agent.on_agent_tool_finish(run)

        return await self.enter_for(taken, "hook", call)

    async def deliver(self, taken: Taken) -> bool:
        """Hand the end of a detached run to the method that its parent named."""
        run = self.tree.runs.get(taken.row.owner, taken.row.what)
        policy = taken.payload or {}
        if run is None:
            return True

        async def call(node: Node) -> None:
            method = policy.get("on_finish")
            fn = node.agent.on_agent_tool_finish if method is None else None
            fn = fn or getattr(node.agent, str(method), None)
            if fn is None:
                msg = f"{node.kind.name}.{method} does not exist"
                raise UsageError(msg)
            await fn(run)

        return await self.enter_for(taken, "deliver", call)

    async def limit(self, taken: Taken) -> bool:
        """A budget is over: what still runs ends `interrupted`, told as such.

        A deadline has passed: a fiber that still runs ends `error`.
        """
        if taken.payload == DEADLINE:
            self.tree.fibers.overdue(taken.row.owner, taken.row.what)
            return True
        run = self.tree.runs.get(taken.row.owner, taken.row.what)
        if run is not None and run.status == "running":
            ending = Ending("interrupted", "budget-exceeded")
            self.tree.runs.cancel(taken.row.owner, taken.row.what, ending=ending)
        return True
