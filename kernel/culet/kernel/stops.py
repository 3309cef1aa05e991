"""Stopping the nodes of one tree: planned first, fenced in one step, then carried out.

Children stop before parents, younger siblings first. The plan is marked and fenced in
the step that makes it, so dying code can no longer write; a task of the tree then cuts
node by node, so no caller's cancellation stops it half-way. What has not stopped at the
deadline is cut all at once; what goes on even then is a *remnant*: out of the books,
listed, its lanes free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, final

import msgspec
import trio

from .core import abort as core
from .endings import BELOW
from .errors import ChildDidNotStop, Deleted, FacetAborted
from .events import Whereabouts
from .node import Node, State
from .pump import goodbyes

if TYPE_CHECKING:
    from .tree import Address, Tree


class AbortReceipt(msgspec.Struct, frozen=True):
    """What an abort did.

    `nodes`: (path, how) of each that was awake, in the order of their stopping; "stopped"
    in its turn, "cut" with all the rest after the deadline, or "remnant": its code still
    runs, fenced. `runs`: (run id, status now) of the runs below that were running, the
    oldest first; "running" is owed and goes on, for an abort ends no run. Seconds.
    """

    nodes: list[tuple[str, str]]
    runs: list[tuple[str, str]]
    elapsed_s: float


class Stopping:
    """Nodes that a task of the tree stops: `over` when all have, or it has given up."""

    __slots__ = ("nodes", "over")

    def __init__(self) -> None:
        self.nodes: list[tuple[str, str]] = []  # (path, how), in the order of stopping
        self.over = trio.Event()


@final
class Stops:
    """Abort, delete and the end of a tree, as far as they stop nodes."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self._deleting: dict[Address, trio.Event] = {}
        self._leaving: dict[str, trio.Event] = {}  # slots of children that still listen

    def deleting(
        self, parent: str | None, class_name: str, name: str
    ) -> trio.Event | None:
        """Return what is set when the code of a facet that is deleted has stopped."""
        return self._deleting.get((parent, class_name, name))

    def plan(self, slots: Iterable[str]) -> list[Node]:
        """Return the live nodes at and below `slots`, in the order of their stopping."""
        found: dict[str, Node] = {}
        todo = [self.tree.nodes[s] for s in slots if s in self.tree.nodes]
        while todo:
            node = todo.pop()
            if node.slot not in found:
                found[node.slot] = node
                todo += node.kids.values()
        items = [
            (n.slot, None if n.parent is None else n.parent.slot, n.born)
            for n in found.values()
        ]
        return [found[slot] for slot in core.plan(items)]

    def fence(
        self,
        plan: Sequence[Node],
        reason: str | None,
        error: Exception | None,
        *,
        upgrade: bool = False,
    ) -> None:
        """Mark the plan, in one step: holds released, calls ended, nothing can write.

        For an upgrade attempts are given back, and later calls are not refused: they
        wait for the new class.
        """
        fresh = [n for n in plan if n.state < State.STOPPING]
        if self.tree.barrier.fenced is None:
            held = [job for n in fresh for job in self.tree.jobs.held_by(n.slot)]
            if held:
                self.tree.jobs.release(held, planned=upgrade)
        for node in fresh:
            node.state = State.STOPPING
            node.reason = reason
            if not upgrade and not isinstance(error, Deleted):  # whose row says so
                self.tree.aborted[node.slot] = error or FacetAborted(reason)
        for node in fresh:
            node.end_calls(error or FacetAborted(reason))

    async def abort(
        self,
        slots: Sequence[str],
        reason: str | None,
        *,
        error: Exception | None = None,
    ) -> AbortReceipt:
        """Stop subtrees in planned order. The caller only waits: it may be inside them."""
        started = trio.current_time()
        plan = self.plan(slots)
        runs = self._running_below(slots)
        self.fence(plan, reason, error)
        self.tree.emit("abort", list(slots), reason)
        nodes = await self._carried_out(plan)
        elapsed_s = trio.current_time() - started
        receipt = AbortReceipt(nodes, self._now(runs), elapsed_s)
        stuck = [path for path, how in nodes if how == "remnant"]
        if stuck:
            raise ChildDidNotStop(stuck, receipt)
        return receipt

    def _running_below(self, slots: Sequence[str]) -> list[int]:
        """Return which runs go on in these subtrees: where they are born, in order."""
        found: set[int] = set()
        for slot in slots:
            rows = self.tree.db.execute(
                BELOW + "SELECT born FROM run WHERE status = 'running'"
                " AND child IN (SELECT slot FROM sub)",
                (slot,),
            )
            found.update(int(r[0]) for r in rows)
        return sorted(found)

    def _now(self, runs: Sequence[int]) -> list[tuple[str, str]]:
        """Return ids and statuses of those that have not been cleared since."""
        if self.tree.closed:
            return []
        sql = "SELECT id, status FROM run WHERE born = ?"
        found = (self.tree.db.execute(sql, (born,)) for born in runs)
        return [(rows[0][0], rows[0][1]) for rows in found if rows]

    def end_all(self, error: Exception) -> None:
        """Fence every node; the calls inside end with `error`. `stop` does the rest."""
        self.fence(self.plan([self.tree.root_slot]), str(error), error)

    def stop_all(self, slots: Sequence[str], reason: str | None) -> Stopping:
        """Fence subtrees now and stop them in a task of the tree, which is returned."""
        plan = self.plan(slots)
        self._dismiss(plan, reason, None)
        return self._begun(plan)

    def _dismiss(
        self, plan: Sequence[Node], reason: str | None, error: Exception | None
    ) -> None:
        """Fence, but let children that run themselves hear first that their run ended."""
        at_work: dict[str, list[str]] = {}
        for slot, run_id in self.tree.turns.live:
            at_work.setdefault(slot, []).append(run_id)
        told = []
        for node in plan:
            hears = node.kind.runs_itself and node.state is State.LIVE
            if hears and node.slot in at_work and not self.tree.closed:
                node.closing = True  # before it hears: it begins nothing any more
                told.append(node)
        self.fence([n for n in plan if n not in told], reason, error)
        for node in told:
            runs: dict[str, str | None] = {}
            for run_id in at_work[node.slot]:
                row = self.tree.runs.of_child(node.slot, run_id)
                runs[run_id] = reason if row is None else row.reason
                self.tree.turns.stop(node.slot, run_id, runs[run_id])
            if node.slot not in self._leaving:
                self._leaving[node.slot] = trio.Event()
                self.tree.start_soon(self._part, node, runs, reason, error)

    async def _part(
        self,
        node: Node,
        runs: Mapping[str, str | None],
        reason: str | None,
        error: Exception | None,
    ) -> None:
        try:
            await goodbyes(node, runs)
        finally:
            self.fence([node], reason, error)
            self._leaving.pop(node.slot).set()

    async def _carried_out(
        self, plan: Sequence[Node], then: Callable[[], object] | None = None
    ) -> list[tuple[str, str]]:
        """Carry out in a task of the tree: the caller only waits, and may be cut by it."""
        stopping = self._begun(plan, then)
        await stopping.over.wait()
        return stopping.nodes

    def _begun(
        self, plan: Sequence[Node], then: Callable[[], object] | None = None
    ) -> Stopping:
        stopping = Stopping()

        async def work() -> None:
            try:
                with trio.CancelScope(shield=True):
                    stopping.nodes.extend(await self.carry_out(plan))
            finally:
                if then is not None:
                    then()
                stopping.over.set()

        if plan or then is not None:
            self.tree.start_soon(work)
        else:
            stopping.over.set()
        return stopping

    async def carry_out(self, plan: Sequence[Node]) -> list[tuple[str, str]]:
        """Cut node by node until the deadline, then all the rest with one short wait."""
        for node in plan:
            leaving = self._leaving.get(node.slot)
            if leaving is not None:
                await leaving.wait()
        kernel = self.tree.kernel
        grace = kernel.abort_grace_s
        began = trio.current_time()
        how: dict[Node, str] = {}
        late: list[Node] = []
        for node in plan:
            node.cut()
            deadline = began + min(grace, kernel.abort_grace_s)  # somebody may hasten
            if not node.gone.is_set() and trio.current_time() < deadline:
                with trio.move_on_at(deadline) as wait:
                    kernel.graces.add(wait)
                    try:
                        await node.gone.wait()
                    finally:
                        kernel.graces.discard(wait)
            if node.gone.is_set():
                how[node] = "stopped"
            else:
                late.append(node)
        if late:
            grace = min(grace, kernel.abort_grace_s)
            with trio.move_on_after(max(grace / 4, 0.05)):
                for node in late:
                    blocked = any(
                        k in late and not k.gone.is_set() for k in node.kids.values()
                    )
                    if not blocked:
                        await node.gone.wait()
            for node in late:
                if node.gone.is_set():
                    how[node] = "cut"
                else:
                    how[node] = "remnant"
                    self._disown(node)
        return [(n.path_text(), how[n]) for n in plan]

    def _disown(self, node: Node) -> None:
        """It does not stop: fenced, out of the books, listed; its lanes are free."""
        node.fenced = True
        node.refs = 0
        if self.tree.nodes.get(node.slot) is node:
            del self.tree.nodes[node.slot]
        if node.parent is not None:
            node.parent.kids.pop(node.slot, None)
        if node not in self.tree.remnants:  # two aborts may wait for the same code
            self.tree.remnants.append(node)
        self.tree.jobs.free_lanes(node.slot)
        node.left.set()  # who waits for the next life need not wait for this code

    async def delete(self, slot: str) -> None:
        """Mark, stop, wipe: returns when the nodes have stopped; the wipe is a job."""
        sub = BELOW + "SELECT slot FROM sub"
        slots = [str(r[0]) for r in self.tree.db.execute(sub, (slot,))]
        row = self.tree.node_row(slot)
        if row is None or row.state != "live":
            return
        plan, path = self.plan([slot]), self.tree.path_of(slot)
        self.tree.endings.delete(slot)
        self.tree.supervision.forget(row.address)
        self.tree.quotas.unsure()
        self._dismiss(plan, "deleted", Deleted(f"{slot} is deleted"))
        self.tree.sockets.close_all(slots, 4410, "deleted")
        self.tree.emit("delete", slot, Whereabouts(path, row.class_name, row.name))
        over = self._deleting[row.address] = trio.Event()

        def stopped() -> None:
            if self._deleting.get(row.address) is over:
                del self._deleting[row.address]
            over.set()

        await self._carried_out(plan, stopped)
