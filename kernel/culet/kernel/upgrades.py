"""Upgrade: another class takes over the slot of a facet, with all that belongs to it.

Planned and fenced like an abort, in a task of the tree; when the old code has stopped,
one commit changes the class in the row. What names the slot goes on: storage, schedules,
queued calls, fibers, runs, stubs and sockets. What was under way gives its attempt back
and is taken again by the new class: a turn goes on where that class is `resumable`, else
its run settles `interrupted`; a fiber is asked for at `on_fiber_recovered`. A run keeps
the class that it was asked for as its `agent_type`, for its frames were shown.

Meanwhile nothing starts the slot: who calls it, or gets it under either class, waits and
meets the new one. Code that does not stop leaves the class as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, final

import trio

from .core.path import check_name
from .errors import (
    ChildDidNotStop,
    Deleted,
    FacetAborted,
    NotFound,
    StorageError,
    UsageError,
)
from .events import Upgraded
from .node import Node

if TYPE_CHECKING:
    from .classes import AgentClass
    from .tree import Address, Tree

# The class of which a start last succeeded is what the next start is told, however
# often the class was changed meanwhile; none, when it is that class again.
_CHANGE: Final = (
    "UPDATE node SET class = ?2,"
    " upgraded_from = nullif(coalesce(upgraded_from, class), ?2)"
    " WHERE slot = ?1 AND state = 'live' AND class = ?3"
)
_DONE: Final = "UPDATE node SET upgraded_from = NULL WHERE slot = ?"
_RUNNING: Final = "SELECT id FROM run WHERE child = ? AND status = 'running' LIMIT 1"


@final
class Upgrades:
    """The upgrades of one tree that are under way."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self._slots: dict[str, trio.Event] = {}
        self._addresses: dict[Address, trio.Event] = {}

    def under_way(self, slot: str) -> trio.Event | None:
        """Return what is set when the upgrade of that slot is over; None: there is none."""
        return self._slots.get(slot)

    async def settled(self, parent: str, kind: AgentClass, name: str) -> None:
        """Wait while an upgrade gives or takes that address."""
        while (event := self._addresses.get((parent, kind.name, name))) is not None:
            await event.wait()

    async def upgrade(self, parent: Node, old: str, name: str, new: AgentClass) -> str:
        """Give the child of that class and name another class; return its slot.

        Raises `NotFound`, `UsageError` when the address is taken or a run goes on that
        the new class could not, `ChildDidNotStop` when old code still runs at the
        deadline (nothing is changed then; asked again it goes on without that code),
        `Deleted` when it was deleted meanwhile.
        """
        check_name(name)
        parent.check_open()
        ends: list[Address] = [(parent.slot, old, name), (parent.slot, new.name, name)]
        while (busy := self._busy(ends)) is not None:
            await busy.wait()
        parent.check_open()
        slot = self._checked(parent, old, name, new)
        over = self._slots[slot] = trio.Event()
        self._addresses.update(dict.fromkeys(ends, over))
        errors: list[Exception] = []

        async def work() -> None:
            try:
                await self._work(parent.slot, slot, old, name, new)
            except Exception as error:
                errors.append(error)
            finally:
                del self._slots[slot]
                for address in ends:
                    del self._addresses[address]
                over.set()

        self.tree.start_soon(work)
        await over.wait()
        if errors:
            raise errors[0]
        return slot

    def _busy(self, addresses: Sequence[Address]) -> trio.Event | None:
        return next(
            (e for a in addresses if (e := self._addresses.get(a)) is not None), None
        )

    def _checked(self, parent: Node, old: str, name: str, new: AgentClass) -> str:
        slot = self.tree.slot_of(parent.slot, old, name)
        if slot is None:
            msg = f"{parent.path_text()} has no {old} {name!r}"
            raise NotFound(msg)
        self._check_free(parent.slot, slot, name, new)
        return slot

    def _check_free(self, parent: str, slot: str, name: str, new: AgentClass) -> None:
        if self.tree.slot_of(parent, new.name, name) is not None:
            msg = f"there is a {new.name} {name!r} already; delete it first"
            raise UsageError(msg)
        running = self.tree.db.execute(_RUNNING, (slot,))
        if running and not new.is_tool:
            msg = (
                f"run {running[0][0]!r} of {name!r} goes on, and {new.name} has no "
                "on_turn: cancel it first"
            )
            raise UsageError(msg)

    async def _work(
        self, parent: str, slot: str, old: str, name: str, new: AgentClass
    ) -> None:
        tree = self.tree
        with trio.CancelScope(shield=True):  # bounded by the grace
            plan = tree.stops.plan([slot])
            tree.stops.fence(plan, f"upgraded to {new.name}", None, upgrade=True)
            ends = await tree.stops.carry_out(plan)
        stuck = [path for path, how in ends if how == "remnant"]
        if stuck:
            raise ChildDidNotStop(stuck)
        if tree.stopping:
            raise FacetAborted("the tree stops")
        self._check_free(parent, slot, name, new)
        with tree.transaction():
            tree.db.execute(_CHANGE, (slot, new.name, old))
            changed = tree.db.changes
        if not changed:
            msg = f"{old} {name!r} was deleted meanwhile"
            raise Deleted(msg)
        tree.aborted.pop(slot, None)  # its stubs serve the new class
        tree.supervision.forget((parent, old, name))  # and that one begins anew
        tree.emit("upgrade", slot, Upgraded(tree.path_of(slot), old, new.name))

    def started(self, node: Node) -> None:
        """A start succeeded: the next one is no longer told of the upgrade."""
        if node.upgraded_from is None:
            return
        node.upgraded_from = None
        try:
            with self.tree.transaction():
                self.tree.db.execute(_DONE, (node.slot,))
        except StorageError as error:  # it is told again, that is all
            self.tree.kernel.report("storage", node, error, name="end of an upgrade")
