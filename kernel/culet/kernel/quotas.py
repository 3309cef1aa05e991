"""Quotas of one tree: how many facets, sockets and owed calls it may have.

Facets are counted in the transaction that inserts one, sockets at admission; what is
beyond a quota is refused by a `CapacityError` that names the bound. Bytes are refused by
the database itself (see the storage). Cancel, abort and delete need none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

from .errors import CapacityError

if TYPE_CHECKING:
    from .tree import Tree

_BORN: Final = "SELECT coalesce(max(born), 0) FROM node"
_LIVE: Final = "SELECT count(*) FROM node WHERE state = 'live' AND parent IS NOT NULL"
_OWED: Final = "SELECT count(*) FROM job WHERE owner = ? AND kind IN ('call', 'queue')"
_CHILDREN: Final = "SELECT count(*) FROM node WHERE parent = ? AND state = 'live'"
_OWNERS: Final = 1_000  # whose calls are counted in memory


@final
class Quotas:
    """The quotas of one tree."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self._facets: int | None = None  # None: to be counted anew
        self._owed: dict[str, int] = {}  # calls of an agent, and those that are over

    def unsure(self) -> None:
        """A facet went, or a transaction was rolled back: count anew when it matters."""
        self._facets = None

    def full(self, parent: str, more: int = 1) -> str | None:
        """Say which bound is reached, so that no more facets may be made; None: none."""
        limits = self.tree.kernel.limits
        # Where so many were never born there is nothing to count.
        born = int(self.tree.db.execute(_BORN)[0][0]) - 1 + more
        if born > limits.facets_per_tree and self._count() + more > (
            most := limits.facets_per_tree
        ):
            return (
                f"the tree {self.tree.key.class_name}/{self.tree.key.name} has {most} "
                f"facets (limits.facets_per_tree = {most}): delete some, or raise it"
            )
        most = limits.children_per_agent
        if born > most and self._children(parent) + more > most:
            return (
                f"{self.tree.path_of(parent)} has {most} children "
                f"(limits.children_per_agent = {most}): delete some, or raise it"
            )
        return None

    def inserted(self, parent: str) -> None:
        """A facet was inserted: raise `CapacityError`, so that it is not, beyond a quota."""
        if self._facets is not None:
            self._facets += 1
        full = self.full(parent, more=0)
        if full is not None:
            raise CapacityError(full)

    def _count(self) -> int:
        if self._facets is None:
            self._facets = int(self.tree.db.execute(_LIVE)[0][0])
        return self._facets

    def _children(self, parent: str) -> int:
        return int(self.tree.db.execute(_CHILDREN, (parent,))[0][0])

    def admit_schedule(self, owner: str, more: int = 1) -> None:
        """Raise `CapacityError` when an agent would owe itself more calls than it may."""
        most = self.tree.kernel.limits.schedules_per_agent
        if self.tree.jobs.last_id + more <= most:
            return  # there cannot be so many: nothing to count
        owed = self._owed.get(owner, most)  # at most so many, or not counted yet
        if owed + more > most:
            owed = int(self.tree.db.execute(_OWED, (owner,))[0][0])
        if owed + more > most:
            msg = (
                f"{self.tree.path_of(owner)} would have more than {most} schedules and "
                f"queued calls (limits.schedules_per_agent = {most}): cancel some, or "
                "raise it"
            )
            raise CapacityError(msg)
        if len(self._owed) >= _OWNERS:
            self._owed.clear()
        self._owed[owner] = owed + more

    def admit_socket(self) -> None:
        """Raise `CapacityError` when the tree has as many sockets as it may have."""
        most = self.tree.kernel.limits.sockets_per_tree
        if self.tree.sockets.count >= most:
            msg = (
                f"the tree {self.tree.key.class_name}/{self.tree.key.name} has {most} "
                f"sockets (limits.sockets_per_tree = {most}): close some, or raise it"
            )
            raise CapacityError(msg)
