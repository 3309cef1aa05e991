"""One root and everything below it: its rows, its nodes, the services that they share.

The tree owns the barrier, the jobs, the streams, the runs and the sockets of its agents.
It alone starts nodes; `stops` ends them in order, `duties` are the jobs of its own. Rows
of `node` are the truth: a live row without a node in memory is an agent that sleeps.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

import trio

from .barrier import Barrier
from .budgets import Budgets
from .calls import Stub, TreeTarget
from .core.limits import DEPTH_MAX
from .core.path import check_name, path_text
from .duties import Duties
from .effects import Effects
from .endings import Endings
from .errors import (
    CapacityError,
    Deleted,
    FacetAborted,
    FacetBroken,
    StorageBusy,
    StorageError,
    UsageError,
)
from .events import Stopped, Whereabouts
from .fibers import Fibers
from .jobs import Jobs, Kind, Taken
from .mailbox import Mail
from .milestones import Milestones
from .node import Node, State, ambient, own, starts_under, waiting_for
from .order import Order
from .patience import Patience
from .questions import Questions
from .quotas import Quotas
from .retention import Retention
from .runs import Runs
from .schedules import Schedules
from .sockets import Sockets
from .stops import AbortReceipt, Stops
from .streams import End, RunView, Streams, TurnView, View
from .supervise import Supervision
from .turn import Turns
from .upgrades import Upgrades

if TYPE_CHECKING:
    from .classes import AgentClass
    from .kernel import Kernel
    from .ports import TreeKey, TreeStore

log = logging.getLogger("culet.kernel")
_NODE: Final = (
    "SELECT born, slot, parent, class, name, state, upgraded_from FROM node"
    " WHERE slot = ?"
)
_CHILD: Final = (
    "SELECT slot FROM node WHERE ifnull(parent, '') = ? AND class = ? AND name = ?"
    " AND state = 'live'"
)
_CHILDREN: Final = (
    "SELECT slot, class, name, created_at FROM node"
    " WHERE parent = ?1 AND state = 'live'"
    " AND (?2 IS NULL OR class = ?2)"
    " AND born > coalesce((SELECT born FROM node WHERE parent = ?1 AND class = ?3"
    " AND name = ?4 AND state = 'live'), 0) ORDER BY born LIMIT ?5"
)
_LOOK: Final = "SELECT 1 FROM main.culet_value LIMIT 1"
_UNMAKE: Final = (
    "DELETE FROM node WHERE slot = ?1 AND NOT EXISTS"
    " (SELECT 1 FROM job WHERE owner = ?1) AND NOT EXISTS"
    " (SELECT 1 FROM run WHERE owner = ?1) AND NOT EXISTS"
    " (SELECT 1 FROM fiber WHERE owner = ?1) AND NOT EXISTS"
    " (SELECT 1 FROM node WHERE parent = ?1)"
)


Address = tuple[str | None, str, str]


class NodeRow(NamedTuple):
    """A node as stored."""

    born: int
    slot: str
    parent: str | None
    class_name: str
    name: str
    state: str
    upgraded_from: str | None

    @property
    def address(self) -> Address:
        """What the back-off of failed starts goes by: it outlives a slot."""
        return self.parent, self.class_name, self.name


@final
class Tree:
    """One open root."""

    def __init__(self, kernel: Kernel, key: TreeKey, store: TreeStore) -> None:
        self.kernel, self.key, self.store = kernel, key, store
        self.db = store.tree
        self.closed = False
        self.stopping = False  # nothing is started any more
        self.nodes: dict[str, Node] = {}
        self.aborted: dict[str, Exception] = {}  # what a stub gets until `get`
        self.remnants: list[Node] = []
        self.visitors = 0
        self.used_at = trio.current_time()
        self.nursery: trio.Nursery | None = None
        self.over = trio.Event()  # all its tasks have ended
        self.made: set[str] = set()  # by `get`, and no start has succeeded yet
        self._looks: dict[str, trio.Event] = {}  # at files that somebody has locked
        self.barrier = Barrier(
            store, kernel.limits, kernel.writer, kernel.janitor, self._barrier_failed,
            kernel.clock.stopwatch_ns,
        )  # fmt: skip
        self.epoch = self._new_epoch()
        self.root_slot = self._root_row()
        self.order = Order(self)
        self.jobs = Jobs(self, self.epoch)
        self.streams = Streams(self)
        self.endings = Endings(self)
        self.runs = Runs(self)
        self.budgets = Budgets(self)
        self.retention = Retention(self)
        self.milestones = Milestones(self)
        self.questions = Questions(self)
        self.mail = Mail(self)
        self.turns = Turns(self)
        self.fibers = Fibers(self)
        self.effects = Effects(self)
        self.schedules = Schedules(self)
        self.sockets = Sockets(self)
        self.stops = Stops(self)
        self.upgrades = Upgrades(self)
        self.supervision = Supervision(self)
        self.quotas = Quotas(self)
        self.duties = Duties(self)
        self.jobs.kinds = {
            "call": self.schedules.kind(crowded=True),
            "queue": self.schedules.kind(crowded=False),
            "turn": Kind(self.turns.run, self.turns.exhausted, deadline=False),
            "fiber": Kind(self.fibers.recover, self.fibers.exhausted, deadline=False),
            "hook": Kind(self.duties.hook),
            "deliver": Kind(self.duties.deliver),
            "limit": Kind(self.duties.limit),
            "wipe": Kind(self.duties.wipe),
        }
        self._release_former_lives()

    def __repr__(self) -> str:
        return f"<tree {self.key.class_name}/{self.key.name}>"

    # ---- opening

    def _new_epoch(self) -> int:
        with self.db.transaction():
            self.db.execute(
                "INSERT INTO meta (key, value) VALUES ('epoch', 1)"
                " ON CONFLICT (key) DO UPDATE SET value = value + 1"
            )
            sql = "SELECT value FROM meta WHERE key = 'epoch'"
            return int(self.db.execute(sql)[0][0])

    def _root_row(self) -> str:
        rows = self.db.execute(_CHILD, ("", self.key.class_name, self.key.name))
        if rows:
            return str(rows[0][0])
        slot = self.kernel.chance.id()
        self.db.execute(
            "INSERT INTO node (slot, parent, class, name, state, created_at)"
            " VALUES (?, NULL, ?, ?, 'live', ?)",
            (slot, self.key.class_name, self.key.name, self.now()),
        )
        return slot

    def _release_former_lives(self) -> None:
        """Recovery, all of it: what former lives held is due as it was."""
        self.db.execute(
            "UPDATE job SET held = NULL WHERE held IS NOT NULL AND held >> 32 <> ?",
            (self.epoch,),
        )

    async def run(self, *, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        """Be the tree's task until its nursery is cancelled."""
        try:
            async with trio.open_nursery() as self.nursery:
                self.nursery.start_soon(self.barrier.run)
                self.nursery.start_soon(self.jobs.run, self.nursery)
                self.nursery.start_soon(self._evict_idle)
                self.barrier.touched()
                task_status.started()
        finally:
            self.over.set()

    # ---- small services

    def now(self) -> int:
        """Return wall-clock milliseconds."""
        return self.kernel.clock.now_ms()

    def touched(self) -> None:
        """Something was committed."""
        self.barrier.touched()

    async def durable(self) -> None:
        """Wait until all that the tree has committed so far is durable."""
        await self.barrier.wait()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """One transaction in `tree.db`: the commit of a step."""
        try:
            with self.db.transaction():
                yield
        except BaseException:
            self.quotas.unsure()
            raise
        self.barrier.touched()

    @contextmanager
    def visitor(self) -> Iterator[None]:
        """Somebody outside uses the tree: it is not evicted meanwhile.

        Raises `CapacityError` when as many as `limits.calls_at_once` do already.
        """
        limit = self.kernel.limits.calls_at_once
        if self.visitors >= limit:
            msg = f"{limit} calls are in {self!r} already"
            raise CapacityError(msg)
        self.visitors += 1
        try:
            yield
        finally:
            self.visitors -= 1
            self.used_at = trio.current_time()

    def start_soon(self, fn: Callable[..., Awaitable[Any]], *args: Any) -> None:
        """Start a task of the tree itself."""
        if self.nursery is not None and not self.closed:
            self.nursery.start_soon(fn, *args)

    def start_job(self, taken: Taken) -> None:
        """Work on a job that was born taken."""
        assert self.nursery is not None
        self.jobs.start(self.nursery, taken)
        self.barrier.urge()

    def emit(self, channel: str, subject: Any, what: Any) -> None:
        """Tell subscribers."""
        self.kernel.emit(channel, self, subject, what)

    def report_job(self, taken: Taken, error: BaseException) -> None:
        """A try of a job failed: subscribers and the log hear it."""
        name = f"{taken.row.kind} {taken.row.what}"
        run_id = taken.row.what if taken.row.kind in {"turn", "fiber"} else None
        node = self.nodes.get(taken.row.owner)
        self.kernel.report("job", node, error, name=name, run_id=run_id)

    # ---- rows of nodes

    def node_row(self, slot: str) -> NodeRow | None:
        """Return one row."""
        rows = self.db.execute(_NODE, (slot,))
        return NodeRow(*rows[0]) if rows else None

    def is_live_slot(self, slot: str) -> bool:
        """Whether that slot is not gone."""
        row = self.node_row(slot)
        return row is not None and row.state == "live"

    def kind_of(self, slot: str) -> AgentClass | None:
        """Return the class of an agent; None: it, or its class, is gone."""
        row = self.node_row(slot)
        if row is None:
            return None
        return self.kernel.classes.known.get(row.class_name)

    def child_slot(self, parent: str, kind: AgentClass, name: str) -> str | None:
        """Return the slot of a live child."""
        return self.slot_of(parent, kind.name, name)

    def slot_of(self, parent: str, class_name: str, name: str) -> str | None:
        """The same by the name of a class, which may be registered no more."""
        rows = self.db.execute(_CHILD, (parent, class_name, name))
        return str(rows[0][0]) if rows else None

    def children(
        self, parent: str, class_name: str | None, limit: int, after: Any = None
    ) -> list[tuple[str, str, str, int]]:
        """Return (slot, class, name, created_at) of live children, the eldest first."""
        after_class, after_name = (None, None) if after is None else after
        params = (parent, class_name, after_class, after_name, limit)
        return [tuple(r) for r in self.db.execute(_CHILDREN, params)]

    def path_of(self, slot: str) -> str:
        """Return the path of an agent, awake or not, as `Node.path_text` does."""
        steps: list[tuple[str, str]] = []
        here: str | None = slot
        while here is not None and (row := self.node_row(here)) is not None:
            steps.append((row.class_name, row.name))
            here = row.parent
        return path_text(reversed(steps))

    def insert_node(self, slot: str, parent: str, kind: AgentClass, name: str) -> None:
        """Write the row of a child unless it is there; inside a transaction.

        Raises `CapacityError` beyond a quota: the transaction is to be rolled back.
        """
        self.db.execute(
            "INSERT INTO node (slot, parent, class, name, state, created_at)"
            " VALUES (?, ?, ?, ?, 'live', ?) ON CONFLICT DO NOTHING",
            (slot, parent, kind.name, name, self.now()),
        )
        if self.db.changes:
            self.quotas.inserted(parent)

    # ---- starting

    async def get(self, parent: Node, kind: AgentClass, name: str) -> Node:
        """Return the live child, made and started if need be."""
        parent.check_open()
        check_name(name)
        await self.upgrades.settled(parent.slot, kind, name)
        while (over := self.stops.deleting(parent.slot, kind.name, name)) is not None:
            await over.wait()  # no new life beside code of the old one
            parent.check_open()
        slot = self.child_slot(parent.slot, kind, name)
        if slot is not None:
            node = self.nodes.get(slot)
            if node is not None and node.state is State.LIVE:
                return node
            self.aborted.pop(slot, None)
            return await self.wake(slot)
        self.supervision.check((parent.slot, kind.name, name))
        return await self.wake(self._make(parent, kind, name))

    def _make(self, parent: Node, kind: AgentClass, name: str) -> str:
        depth = self.kernel.limits.depth
        if len(parent.lineage()) >= depth:
            msg = f"{parent.path_text()} is {depth} deep already: no child below it"
            raise UsageError(msg)
        slot = self.kernel.chance.id()
        with self.transaction():
            self.insert_node(slot, parent.slot, kind, name)
        self.made.add(slot)
        if self.kernel.heard:
            self.emit("spawn", slot, Whereabouts(self.path_of(slot), kind.name, name))
        return slot

    def _unmake(self, node: Node) -> None:
        """A first start failed: what it has made and owes goes, with its row.

        Unless its parent has asked it for a run meanwhile: that settles by itself.
        """
        self.made.discard(node.slot)
        if self.closed or self.barrier.fenced is not None:
            return
        slot = node.slot
        try:
            asked = self.db.execute("SELECT 1 FROM run WHERE child = ?", (slot,))
            if asked or not self.is_live_slot(slot):
                return
            with self.transaction():
                self.db.execute(_UNMAKE, (slot,))
                alone = bool(self.db.changes)
                self.quotas.unsure()
                if alone and self.store.agent(slot).exists:
                    self.store.delete(slot)
            if not alone:
                self.endings.delete(slot)
        except StorageError as error:
            self.kernel.report("storage", node, error, name="a start that failed")
        else:
            about = Whereabouts(node.path_text(), node.kind.name, node.name)
            self.emit("delete", slot, about)

    async def wake(self, slot: str, *, props: Any = None) -> Node:
        """Return the live node of a slot, starting it and what is above it. Never creates.

        Raises `Deleted`, `FacetBroken` (the start failed), `UsageError` (its class is
        not registered, or the start would wait for itself), `StorageBusy` (another process
        has locked its file, for longer than `limits.busy_s`).
        """
        patience: Patience | None = None
        while True:
            node = self.nodes.get(slot)
            if node is not None and node.state is State.LIVE:
                return node
            row = self.node_row(slot)
            if row is None or row.state != "live":
                msg = f"{slot} is deleted"
                raise Deleted(msg)
            if self.stopping:
                raise FacetAborted("the tree stops")
            if (upgrade := self.upgrades.under_way(slot)) is not None:
                await upgrade.wait()
                continue
            if (old := self.stops.deleting(*row.address)) is not None:
                await old.wait()
                continue
            parent = (
                None if row.parent is None else await self._awake_parent(row.parent)
            )
            if parent is not None and parent.closing:
                here = ambient.get()
                if here is not None and here.node is parent:
                    parent.check_open()  # raises: nothing begins below it any more
                await parent.left.wait()
                continue
            node = self.nodes.get(slot)
            if node is None:
                if not await self.supervision.may_start(row, parent):
                    continue
                if not self.is_live_slot(slot):
                    continue  # deleted while its parent was woken
                if (locked := self._locked(slot)) is not None:
                    if patience is None:
                        patience = Patience(self.kernel.limits, self.path_of(slot))
                    patience.check(locked)
                    await self._unlocked(slot, patience)
                    continue
                node = self._start(slot, row, parent, props)
            if node.state is State.STARTING:
                if starts_under(node):
                    return node
                await self._started(node)
                if node.state >= State.STOPPING and slot in self.aborted:
                    # who ended the start ends those who wait for it
                    raise own(self.aborted[slot])
                if node.state >= State.STOPPING and node.error is not None:
                    msg = f"{node.path_text()} could not be started: {node.error!r}"
                    raise FacetBroken(msg) from node.error
            if node.state is State.LIVE:
                return node
            await node.left.wait()  # however it ends: the next life is asked for

    def _locked(self, slot: str) -> StorageBusy | None:
        """Open the file of an agent that is about to start; say if somebody has locked it."""
        db = self.store.agent(slot)
        if db.exists:
            try:
                db.execute(_LOOK)
            except StorageBusy as error:
                return error
            except StorageError:
                return None  # its start will tell
        return None

    async def _unlocked(self, slot: str, patience: Patience) -> None:
        """Wait for one more look: one waiter looks for all, and no look waits."""
        looked = self._looks.get(slot)
        if looked is not None:
            await looked.wait()
            return
        looked = self._looks[slot] = trio.Event()
        try:
            await patience.rest()
        finally:
            del self._looks[slot]
            looked.set()

    async def _awake_parent(self, slot: str) -> Node:
        parent = self.nodes.get(slot)
        if (
            parent is not None
            and parent.state is State.STARTING
            and starts_under(parent)
        ):
            return parent
        if parent is None:
            self._check_chain(slot)
        return await self.wake(slot)

    def _check_chain(self, slot: str) -> None:
        """Rows that somebody has damaged must not make a chain of parents endless."""
        row = self.node_row(slot)
        for _ in range(DEPTH_MAX - 1):
            if row is None or row.parent is None:
                return
            row = self.node_row(row.parent)
        msg = f"the parents of {slot} lead to no root"
        raise Deleted(msg)

    def _start(self, slot: str, row: NodeRow, parent: Node | None, props: Any) -> Node:
        group = self.kernel.classes.known
        kind = group.get(row.class_name)
        if kind is None:
            msg = f"class {row.class_name!r} is not registered any more"
            raise UsageError(msg)
        node = Node(self, slot, parent, kind, row.name, row.born)
        node.props = props
        node.upgraded_from = row.upgraded_from
        self.nodes[slot] = node
        self.aborted.pop(slot, None)
        if parent is not None:
            parent.kids[slot] = node
            assert parent.children is not None
            parent.children.start_soon(node.run)
        else:
            self.start_soon(node.run)
        if self.kernel.heard:
            about = Whereabouts(node.path_text(), kind.name, row.name)
            self.emit("start", slot, about)
        return node

    async def _started(self, node: Node) -> None:
        with waiting_for(node):
            await node.ready.wait()

    def start_ended(self, node: Node, error: BaseException | None) -> None:
        """A start is over, well or not."""
        self.schedules.start_ended(node)
        if node.state >= State.STOPPING:
            return  # stopped while it started: its clean-up met the fence, or hurried
        if error is None:
            self.made.discard(node.slot)
            self.upgrades.started(node)
        self.supervision.start_ended(node, error)

    def forget(self, node: Node) -> None:
        """A node is gone: it leaves the books."""
        if self.nodes.get(node.slot) is node:
            del self.nodes[node.slot]
        if node.parent is not None and node.parent.kids.get(node.slot) is node:
            del node.parent.kids[node.slot]
        if node in self.remnants:
            self.remnants.remove(node)
        if self.kernel.heard:
            self.emit("stop", node.slot, Stopped(node.path_text(), node.reason))
        if node.error is not None and node.slot in self.made:
            self._unmake(node)

    def node_failed(self, node: Node, error: BaseException) -> None:
        """A background task raised: this facet breaks, by its supervision more."""
        self.supervision.broke(node, error)

    # ---- stopping

    async def abort(
        self,
        slots: Sequence[str],
        reason: str | None,
        *,
        error: Exception | None = None,
    ) -> AbortReceipt:
        """Stop subtrees in planned order. The caller only waits: it may be inside them."""
        return await self.stops.abort(slots, reason, error=error)

    async def delete(self, slot: str) -> None:
        """Mark, stop, wipe: returns when the nodes have stopped; the wipe is a job."""
        await self.stops.delete(slot)

    def stop_worker(self, slot: str, what: str, reason: str | None) -> None:
        """End the task of one turn or fiber whose row is settled; its agent lives on."""
        self.turns.stop(slot, what, reason)
        self.fibers.stop(slot, what, reason)

    async def evict(self, node: Node) -> bool:
        """Drop an idle node from memory; its rows and files stay."""
        if node.state is not State.LIVE or node.busy:
            return False
        node.state = State.STOPPING
        node.reason = "evicted"
        node.cut()
        await node.gone.wait()
        return True

    async def _evict_idle(self) -> None:
        idle_s = self.kernel.idle_s
        while True:
            await trio.sleep(max(idle_s / 4, 0.05))
            now = trio.current_time()
            for node in list(self.nodes.values()):
                if now - node.used_at >= idle_s and not node.busy:
                    await self.evict(node)
            if self._sleepy(now, idle_s):
                self.kernel.host.evict_root(self)

    @property
    def idle(self) -> bool:
        """Whether nobody wants it and nothing is due soon: it may sleep."""
        quiet = not (
            self.nodes or self.visitors or self.sockets.count or self.jobs.busy
        )
        due = self.jobs.slot()
        soon = due is not None and due <= self.now() + 2 * self.kernel.idle_s * 1000
        return quiet and not soon and not self.remnants

    def _sleepy(self, now: float, idle_s: float) -> bool:
        return self.idle and now - self.used_at >= idle_s

    # ---- views of streams

    def own_views(self, slot: str, kind: AgentClass, stream: str) -> list[View]:
        """Return the view that the agent's own clients have of one of its turns."""
        if not kind.cls.turn_frames:
            return []
        view = TurnView(stream)
        view.peers = dict.fromkeys(self.sockets.protocol_of(slot))
        return [view]

    def views(self, slot: str, stream: str) -> list[View]:
        """Return the views of a stream from its rows, nobody listening yet."""
        out: list[View] = []
        run = self.runs.of_child(slot, stream)
        if run is not None:
            out.append(RunView(run))
        kind = self.kind_of(slot)
        if kind is not None and kind.cls.turn_frames:
            own = None if run is not None else self.fibers.get(slot, stream, None)
            out.append(TurnView(stream, None if own is None else own.metadata))
        return out

    def end_of(self, slot: str, stream: str) -> End | None:
        """Return how a stream ended; None while it goes on."""
        run = self.runs.of_child(slot, stream)
        if run is not None:
            if run.status == "running":
                return None
            return End(
                run.status, run.reason, run.error, run.summary, run.n or 0, run.error_id
            )
        found = self.fibers.get(slot, stream, None)
        if found is None or found.status == "running":
            return (
                None if found is not None else End("aborted", "unknown", None, None, 0)
            )
        sql = "SELECT ifnull(n, 0), error_id FROM fiber WHERE owner = ? AND id = ?"
        n, error_id = self.db.execute(sql, (slot, stream))[0]
        return End(found.status, found.reason, found.error, None, int(n), error_id)

    def credit(self, slot: str, what: str, *, anew: bool = False) -> None:
        """Progress of a turn counts for those that wait for it, at every depth.

        `anew`: so does what no progress sets back (somebody is asked, which is no loop).
        """
        with self.transaction():
            here: tuple[str, str] | None = (slot, what)
            while here is not None:
                self.db.execute(
                    "UPDATE job SET attempts = min(attempts, 1),"
                    " tries = iif(?3, min(tries, 1), tries) WHERE owner = ?1 AND"
                    " what = ?2 AND kind IN ('turn', 'fiber')"
                    " AND (attempts > 1 OR (?3 AND tries > 1))",
                    (*here, int(anew)),
                )
                sql = "SELECT owner, asker FROM run WHERE child = ? AND id = ?"
                rows = self.db.execute(sql, here)
                here = (rows[0][0], rows[0][1]) if rows and rows[0][1] else None

    def stub(self, slot: str, kind: AgentClass) -> Stub[Any]:
        """Return a stub of an agent of this tree."""
        return Stub(TreeTarget(self, slot, kind))

    # ---- the end

    def fail(self, error: BaseException) -> None:
        """The storage of this tree failed: nothing gated leaves, it restarts from disk."""
        self.barrier.fence(error)
        self._barrier_failed(error)

    def _barrier_failed(self, error: BaseException) -> None:
        self.kernel.host.restart_tree(self, error)

    async def stop(self, *, final: bool) -> list[Node]:
        """Stop all nodes in order; `final` also makes everything durable. Returns remnants."""
        self.jobs.stopped = self.stopping = True
        top = [self.root_slot] if self.root_slot in self.nodes else []
        plan = self.stops.plan(top)
        self.stops.fence(
            plan, "the kernel stops" if final else "the tree restarts", None
        )
        await self.stops.carry_out(plan)
        if final and self.barrier.fenced is None:
            try:
                await self.durable()
            except StorageError as error:
                log.error("last barrier of %r failed: %s", self, error)
        self.closed = True
        self.order.close()
        self.sockets.cut_all(1012 if final else 1011, "restart")
        assert self.nursery is not None
        return list(self.remnants)
