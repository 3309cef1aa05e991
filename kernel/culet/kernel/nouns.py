"""The nouns of an agent: thin faces over what the tree does, bound to one node.

Each acts for its own node only: the owner is the handle that it was made with, never
an argument. Those of runs, fibers and effects have files of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast, final

import trio

from .core.job import Retry
from .core.path import check_name
from .core.upcoming import Upcoming
from .errors import UsageError
from .node import Node
from .plans import Due
from .schedules import Rhythm, Schedule, Wanted
from .stops import AbortReceipt

if TYPE_CHECKING:
    from .agent import Agent
    from .sockets import Connection

A = TypeVar("A", bound="Agent")
Schedules = list[Schedule]  # in the classes below `list` is a method
Soon = list[Upcoming]


@final
class AgentKernel:
    """What an agent sees of its kernel."""

    __slots__ = ("_node",)

    def __init__(self, node: Node) -> None:
        self._node = node

    async def get_agent(self, cls: type[A], name: str) -> A:
        """Return a stub of another root; what this agent wrote is durable first."""
        self._node.check()
        await self._node.tree.durable()
        return await self._node.tree.kernel.get_agent(cls, name)

    async def destroy_agent(self, cls: type[Agent], name: str) -> None:
        """Delete another root for good, if it is there; what this agent wrote is durable first."""
        self._node.check()
        await self._node.tree.durable()
        await self._node.tree.kernel.destroy_agent(cls, name)

    def new_id(self) -> str:
        """Return a fresh id that nobody can guess; the same again under the same seed."""
        return self._node.tree.kernel.chance.id(24)


@final
class KeepAlive:
    """A reference on a live node: it blocks eviction and dies with the node.

    What is left more often than it was entered takes nobody else's reference.
    """

    __slots__ = ("_held", "_node")

    def __init__(self, node: Node) -> None:
        self._node, self._held = node, 0

    async def __aenter__(self) -> None:
        self._node.check()
        self._node.refs += 1
        self._held += 1

    async def __aexit__(self, *_: object) -> None:
        if self._held:
            self._held -= 1
            self._node.refs -= 1
            self._node.used_at = trio.current_time()


class Child(NamedTuple):
    """One entry of `dynamic_agents.list`. `created_at`: of this life, epoch ms."""

    class_name: str
    name: str
    created_at: int


@final
class DynamicAgents:
    """The facets of one agent: `get` creates, nothing else does."""

    __slots__ = ("_node",)

    def __init__(self, node: Node) -> None:
        self._node = node

    async def get(self, cls: type[A], name: str) -> A:
        """Return a stub of the facet, made and started if need be."""
        node = self._node
        kind = node.tree.kernel.classes.of(cls)
        child = await node.tree.get(node, kind, name)
        return cast(A, node.tree.stub(child.slot, kind))

    async def lookup(self, cls: type[A], name: str) -> A | None:
        """Return a stub of the facet if it exists; never makes one."""
        node = self._node
        node.check()
        kind = node.tree.kernel.classes.of(cls)
        slot = node.tree.child_slot(node.slot, kind, name)
        await trio.lowlevel.checkpoint_if_cancelled()
        return None if slot is None else cast(A, node.tree.stub(slot, kind))

    def has(self, cls: type[Agent] | str, name: str) -> bool:
        """Whether the facet exists; starts nothing. An unknown class has none."""
        return self._slot(cls, name) is not None

    def list(
        self,
        cls: type[Agent] | str | None = None,
        *,
        limit: int | None = None,
        after: tuple[str, str] | None = None,
    ) -> list[Child]:
        """Return the facets in the order of their birth; `after` is (class, name).

        Where that one has been deleted meanwhile the page begins at the start.
        """
        node = self._node
        wanted = None if cls is None else self._class(cls)
        count = node.tree.kernel.limits.children_per_agent if limit is None else limit
        rows = node.tree.children(node.slot, wanted, count, after)
        return [Child(*row[1:]) for row in rows]

    async def abort(
        self, cls: type[Agent] | str, name: str, reason: str | None = None
    ) -> AbortReceipt:
        """Stop the facet and all below it, in planned order. What is owed brings it back.

        A facet that sleeps or does not exist is stopped already: the receipt is empty.
        Raises `ChildDidNotStop` when code is still running at the deadline.
        """
        self._node.check()
        slot = self._slot(cls, name)
        return await self._node.tree.abort([] if slot is None else [slot], reason)

    async def delete(self, cls: type[Agent] | str, name: str) -> None:
        """Delete the facet with its storage and all below it, for good. Idempotent.

        Its class need not be registered any more: the name of the class is enough.
        """
        self._node.check()
        slot = self._slot(cls, name)
        if slot is not None:
            await self._node.tree.delete(slot)

    async def upgrade(self, cls: type[Agent] | str, name: str, *, to: type[A]) -> A:
        """Let another class take over a facet, and return a stub of it.

        Its code stops as by an abort; then one commit changes the class. Storage,
        schedules, fibers, runs, stubs and sockets stay with it; `upgraded_from` tells
        `on_start` of the new class. The old class may be one that is registered no more,
        by its name.

        Raises `NotFound`; `UsageError` when the new class is no facet, has one of that
        name, or cannot go on with a run of this one; `ChildDidNotStop` when old code
        still runs at the deadline: nothing is changed, and asking again goes on without
        that code.
        """
        node = self._node
        kind = node.tree.kernel.classes.of(to)
        slot = await node.tree.upgrades.upgrade(node, self._class(cls), name, kind)
        return cast(A, node.tree.stub(slot, kind))

    def _slot(self, cls: type[Agent] | str, name: str) -> str | None:
        class_name = self._class(cls)
        try:
            check_name(name)
        except UsageError:  # nobody can be called so: to ask is no mistake
            return None
        return self._node.tree.slot_of(self._node.slot, class_name, name)

    def _class(self, cls: type[Agent] | str) -> str:
        """Return the name of a class: facets outlive its registration."""
        if isinstance(cls, str):
            return cls
        known = self._node.tree.kernel.classes.known.get(cls.__name__)
        if known is not None and known.cls is not cls:
            msg = f"{cls!r} is not the class that is registered as {cls.__name__!r}"
            raise UsageError(msg)
        return cls.__name__


@final
class SchedulesNoun:
    """The schedules of one agent; with `below=True` those of its facets as well."""

    __slots__ = ("_node",)

    def __init__(self, node: Node) -> None:
        self._node = node

    def get(self, schedule_id: str) -> Schedule | None:
        """Return one schedule."""
        return self._node.tree.schedules.get(self._node.slot, "call", schedule_id)

    def list(
        self,
        *,
        callback: str | None = None,
        kind: Rhythm | None = None,
        start: int | datetime | None = None,
        end: int | datetime | None = None,
        dead: bool | None = None,
        below: bool = False,
        limit: int | None = None,
        after: str | None = None,
    ) -> list[Schedule]:
        """Return schedules, the earliest first; dead ones are marked so.

        `kind`: `once`, `every` or `cron`. `start` and `end` bound `due_at`, both inclusive:
        epoch milliseconds or aware datetimes. Go on with the id of the last one as `after`;
        `below` returns at most `limits.due_rows` at once, each with its `path`.
        """
        wanted = Wanted(callback, kind, start, end, dead, limit, after)
        tree, slot = self._node.tree, self._node.slot
        return tree.schedules.all(slot, "call", wanted, below=below)

    def cancel(self, schedule_id: str, *, below: bool = False) -> bool:
        """Delete one; False when there is none. It will not fire after this returns."""
        self._node.check()
        tree, slot = self._node.tree, self._node.slot
        return tree.schedules.remove(slot, "call", schedule_id, below=below)

    async def many(self, dues: Sequence[Due]) -> Schedules:
        """Store many schedules in one commit, all or none; in the order of `dues`.

        At most `limits.schedules_at_once`. Raises what `schedule` raises, for the first
        that is refused; then nothing is stored.
        """
        made = self._node.tree.schedules.many(self._node, dues)
        await trio.lowlevel.checkpoint_if_cancelled()
        return made

    def pause(self, schedule_id: str) -> bool:
        """Keep it from firing until `resume`. A call that has begun goes on."""
        return self._change(schedule_id, "pause")

    def resume(self, schedule_id: str) -> bool:
        """Let a paused one fire again; one that is overdue fires once."""
        return self._change(schedule_id, "resume")

    def run_now(self, schedule_id: str) -> bool:
        """Make it due at once, paused or not; the tick of a recurring one is still to come."""
        return self._change(schedule_id, "run_now")

    def replay(self, schedule_id: str) -> bool:
        """Try a dead one again; False for one that is not dead."""
        return self._change(schedule_id, "replay")

    def _change(self, schedule_id: str, how: str) -> bool:
        self._node.check()
        tree, slot = self._node.tree, self._node.slot
        return tree.schedules.change(slot, "call", schedule_id, how)

    def upcoming(
        self, hours: float, *, below: bool = False, limit: int | None = None
    ) -> Soon:
        """Return what fires within that many hours, the earliest first, and why then.

        Paused ones are listed as such. At most `limits.due_rows`.
        """
        tree, slot = self._node.tree, self._node.slot
        return tree.schedules.upcoming(slot, hours, below=below, limit=limit)


@final
class QueueNoun:
    """Calls that one agent queued for itself: first in, first out."""

    __slots__ = ("_node",)

    def __init__(self, node: Node) -> None:
        self._node = node

    def put(
        self, callback: str | Callable[..., Any], payload: Any = None, *,
        retry: Retry | None = None,
    ) -> str:  # fmt: skip
        """Queue a call of one of this agent's methods; returns its id."""
        tree = self._node.tree
        return tree.schedules.put(self._node, callback, payload, retry).id

    def get(self, call_id: str) -> Schedule | None:
        """Return one queued call."""
        return self._node.tree.schedules.get(self._node.slot, "queue", call_id)

    def list(
        self,
        *,
        callback: str | None = None,
        dead: bool | None = None,
        limit: int | None = None,
        after: str | None = None,
    ) -> list[Schedule]:
        """Return what is queued; dead ones are marked so. `after` is an id."""
        wanted = Wanted(callback, dead=dead, limit=limit, after=after)
        return self._node.tree.schedules.all(self._node.slot, "queue", wanted)

    def remove(self, call_id: str) -> bool:
        """Take one out; False when it is not there any more."""
        self._node.check()
        return self._node.tree.schedules.remove(self._node.slot, "queue", call_id)

    def replay(self, call_id: str) -> bool:
        """Try a dead one again, in its old place; False for one that is not dead."""
        self._node.check()
        tree, slot = self._node.tree, self._node.slot
        return tree.schedules.change(slot, "queue", call_id, "replay")

    def clear(self, callback: str | None = None) -> int:
        """Take all out, or those of one method; returns how many."""
        return sum(self.remove(s.id) for s in self.list(callback=callback))


@final
class SocketsNoun:
    """The connections of one agent."""

    __slots__ = ("_node",)

    def __init__(self, node: Node) -> None:
        self._node = node

    def list(self, tag: str | None = None) -> list[Connection]:
        """Return connections in the order in which they came, all or those with a tag."""
        found = self._node.tree.sockets.of(self._node.slot)
        return [c for c in found if tag is None or tag in c.tags]

    def get(self, connection_id: str) -> Connection | None:
        """Return the newest connection with that label."""
        for connection in reversed(self.list()):
            if connection.id == connection_id:
                return connection
        return None
