"""The kernel: one process's runtime. It owns all tasks; its `host` opens and leaves roots.

Every open tree has a task under the kernel's one shielded nursery. A cancellation that
reaches `open_kernel` from outside starts a planned stop, bounded by `abort_grace_s`; runs
stay for recovery; then it goes through.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from importlib.metadata import (
    EntryPoint,
    PackageNotFoundError,
    distribution,
    entry_points,
)
from typing import Any, Final, TypeVar, cast, final

import trio

from . import agenda, listing
from .agent import Agent
from .barrier import Worker
from .calls import OutsideTarget, Stub, TreeTarget
from .classes import Classes
from .clock import Chance, Clock, SystemClock
from .core.limits import Limits
from .core.path import check_name
from .core.shown import shown
from .effectrows import Effect
from .errors import (
    ChildDidNotStop,
    NotFound,
    StorageError,
    UsageError,
)
from .events import Failure
from .feed import Feed, of_root
from .fiberrows import FiberRun, Statuses
from .guests import REVOKED, Guests
from .host import Host
from .node import Node, alone, is_stop
from .operate import Operator, RootRow, first_roots
from .pace import Pace
from .pages import Pages
from .ports import Level, Store, TreeKey
from .stall import Stall
from .tracing import Tracer
from .tree import Tree

A = TypeVar("A", bound=Agent)
log = logging.getLogger("culet.kernel")
Listener = Callable[[str, Tree | None, Any, Any], None]


@final
class Kernel:
    """Made by `open_kernel`."""

    def __init__(
        self,
        classes: Classes,
        store: Store,
        *,
        durability: Level,
        clock: Clock,
        chance: Chance,
        limits: Limits,
        idle_s: float,
        abort_grace_s: float,
        start_s: float,
        threads: bool,
        tracer: Tracer | None = None,
    ) -> None:
        self.classes, self.store, self.limits = classes, store, limits
        self.durability: Level = durability
        self.clock, self.chance = clock, chance
        self.tracer = tracer
        self.idle_s, self.abort_grace_s, self.start_s = idle_s, abort_grace_s, start_s
        self.writer = Worker("culet writer") if threads else None
        self.janitor = Worker("culet janitor") if threads else None
        self.opener = Worker("culet opener") if threads else None
        self.pace = Pace(limits, clock.stopwatch_ns)
        self.pages = Pages(limits.shared_pages_bytes)
        self.host = Host(self)
        self.trees = self.host.trees  # that are open
        self.guests = Guests(self)
        self.closing = False
        self.graces: set[trio.CancelScope] = set()  # of code that is being stopped
        self._nursery: trio.Nursery | None = None
        # how waiters left that had joined again
        self.reattached: Counter[str] = Counter()
        self._listeners: dict[str, list[Listener]] = {}

    # ---- life

    async def run(self, *, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        """Be the kernel's task until `close`."""
        trio.lowlevel.add_instrument(self.pace)
        stall = Stall(self.limits.stall_s) if self.writer is not None else None
        if stall is not None:
            stall.start()
        try:
            await self._run(task_status)
        finally:
            trio.lowlevel.remove_instrument(self.pace)
            if stall is not None:
                stall.stop()

    async def _run(self, task_status: Any) -> None:
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as self._nursery:
                await self.host.open(self._nursery)
                self._nursery.start_soon(self._last_word)
                task_status.started()

    async def _last_word(self) -> None:
        """When all tasks end, and not by `close`, nobody waits for a record any more."""
        try:
            await trio.sleep_forever()
        finally:
            for tree in self.trees.values():
                if not tree.closed:
                    tree.barrier.fence(StorageError("the kernel has ended"))
                tree.order.close()

    async def paced(self) -> None:
        """Wait until this pass of the loop has time for something long."""
        assert self._nursery is not None
        await self.pace.go(self._nursery)

    async def close(self) -> None:
        """Stop everything in order, make it durable, let the tasks end."""
        self.closing = True
        await self.host.settle()
        assert self._nursery is not None
        try:
            remnants = await self.host.leave_all()
        finally:  # its task is shielded: it would wait for ever
            self._nursery.cancel_scope.cancel(reason="the kernel closes")
        if remnants:
            log.error("did not stop: %s", [n.path_text() for n in remnants])
            self.emit("stuck", None, remnants, None)
        if remnants:
            raise ChildDidNotStop([n.path_text() for n in remnants])

    def stop_threads(self) -> None:
        """End the threads and give up the folder: the last act."""
        for worker in (self.writer, self.janitor, self.opener):
            if worker is not None:
                worker.stop()
        self.store.close()

    def kill(self) -> None:
        """Cancel every task at once, in no order: for tests of what a dead process leaves."""
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel(reason="the process dies")

    def hasten(self) -> None:
        """Give code that is being stopped no more time, now and from now on."""
        self.abort_grace_s = 0.0
        for wait in list(self.graces):
            wait.deadline = min(wait.deadline, trio.current_time())

    async def drain(self, *, timeout: float = 10.0) -> None:
        """Stop accepting new roots and calls, make all durable, leave runs for recovery."""
        self.closing = True
        with trio.move_on_after(timeout):
            for tree in list(self.trees.values()):
                tree.jobs.stopped = True
                await tree.durable()

    # ---- from outside

    async def get_agent(self, cls: type[A], name: str) -> A:
        """Return a stub of a root, made and started if need be (typed as its class)."""
        kind = self.classes.of(cls, among="roots")
        check_name(name, root=True)
        key = TreeKey(kind.name, name)
        tree = await self.host.awake(key)
        target = OutsideTarget(self, key, tree.root_slot, kind)
        return cast(A, Stub(target))

    async def get_sub_agent(self, parent: Agent, cls: type[A], name: str) -> A:
        """Return a stub of a facet of `parent` (a stub), for calls from outside; no gate."""
        target = getattr(parent, "_target", None)
        if not isinstance(target, OutsideTarget):
            msg = "get_sub_agent wants a stub that get_agent or get_sub_agent returned"
            raise UsageError(msg)
        kind = self.classes.of(cls)
        tree = await target.tree()
        with tree.visitor():
            node = await TreeTarget(tree, target.slot, target.kind).node()
            child = await tree.get(node, kind, name)
            await tree.durable()
        made = OutsideTarget(self, target.key, child.slot, kind, facet=True)
        return cast(A, Stub(made))

    async def destroy_agent(self, cls: type[Agent], name: str) -> None:
        """Delete a root with its storage and all below it; where there is none, nothing.

        Goes on to the end though its caller is cancelled.
        """
        kind = self.classes.of(cls, among="roots")
        key = TreeKey(kind.name, check_name(name, root=True))
        try:
            tree = await self.host.open_root(key, create=False)
        except NotFound:
            return
        over, failed = trio.Event(), list[Exception]()

        async def end() -> None:  # not in this task, which may be inside that root
            try:
                await self.host.destroy_root(tree)
            except Exception as error:
                failed.append(error)
            finally:
                over.set()

        assert self._nursery is not None
        self._nursery.start_soon(end)
        await over.wait()
        if failed:
            raise failed[0]

    # ---- being watched

    def subscribe(self, channel: str, fn: Listener) -> Callable[[], None]:
        """Call `fn(channel, tree, subject, detail)` on each event; "*" hears all.

        Events come in the step that made them: a listener must be quick; what it raises is
        logged and changes nothing. `culet.kernel.events` has the channels and what they
        carry. Returns a function that ends it.
        """
        self._listeners.setdefault(channel, []).append(fn)

        def unsubscribe() -> None:
            listeners = self._listeners.get(channel, [])
            if fn in listeners:
                listeners.remove(fn)
            if not listeners:
                self._listeners.pop(channel, None)

        return unsubscribe

    @property
    def heard(self) -> bool:
        """Whether anybody has subscribed: a detail that takes work is made only then."""
        return bool(self._listeners)

    def emit(self, channel: str, tree: Tree | None, subject: Any, detail: Any) -> None:
        """Tell listeners of one event; what they raise is logged and ends there."""
        if not self._listeners:
            return
        for fn in [*self._listeners.get(channel, ()), *self._listeners.get("*", ())]:
            try:
                fn(channel, tree, subject, detail)
            except BaseException as error:
                if is_stop(error):
                    raise
                log.exception("a listener of %r failed", channel)

    def report(
        self,
        what: str,
        node: Node | None,
        error: BaseException,
        *,
        name: str,
        run_id: str | None = None,
    ) -> str:
        """Log a failure with its details under a fresh error id, and return the id.

        `run_id`: the run, turn or fiber that failed, if that is not who calls this.
        """
        error_id = self.chance.id(8)
        about = {"what": what, "error_id": error_id}
        if node is not None:
            about["agent"] = node.path_text()
        if run_id is not None:
            about["run_id"] = run_id
        where = node.path_text() if node is not None else "-"
        told = error_id, what, shown(where), shown(name)
        log.error("%s: %s in %s (%s)", *told, exc_info=error, extra=about)
        self.emit("failure", None, node, Failure(error_id, what, name, error))
        return error_id

    def start_soon(self, fn: Callable[..., Any], *args: Any) -> None:
        """Start a task of the kernel's own."""
        if self._nursery is not None:
            self._nursery.start_soon(fn, *args)

    def revoke(self, who: Any, *, code: int = 4401, reason: str = REVOKED) -> int:
        """Let go of a subject whose rights have ended, in every root and facet of this kernel.

        `who`: the identity that `authenticate` gave, or a function that says of an identity
        whether it is meant; somebody anonymous never is. Sockets close with `code`, and
        `reason`, within `limits.revoke_s`; from now on nothing that they send is heard and
        nothing more is said to them, but what was queued before may leave still. HTTP
        requests that wait for an answer get 401, streamed answers break off; who was
        identified already and is still on the way is refused. Returns how many were let
        go of. What they have asked for goes on: a run is
        ended by its id. Who comes anew is a matter of `authenticate`. With the default code
        clients do not come back by themselves; with 1012 they do, under their new rights.
        """
        return self.guests.revoke(who, code, reason)

    def tree(
        self,
        class_name: str,
        name: str,
        *,
        limit: int | None = None,
        after: str | None = None,
    ) -> list[dict[str, Any]]:
        """Return a row for each agent of an open root, the oldest first; none if it sleeps.

        Keys: `path`, `slot`, `state` (starting, live, stopping, sleeping; resting: it broke
        too often; remnant: code that did not stop), `sockets`, `refs` (keep-alive), `runs`
        (asked for, going on), `jobs` (owed, `dead_jobs` among them), `bytes`. At most
        `limit` (`limits.tree_rows`) at once; go on with the last slot as `after`.
        """
        tree = self.trees.get(TreeKey(class_name, name))
        if tree is None or tree.closed:
            return []
        most = self.limits.tree_rows
        return listing.page(tree, most if limit is None else limit, after)

    async def due(
        self,
        hours: float,
        *,
        root: tuple[str, str] | None = None,
        limit: int | None = None,
        after: str | None = None,
    ) -> agenda.DuePage:
        """Return what is owed within that many hours, and why it fires then: one page.

        Of one root (class, name), or of all, awake and asleep: their agents' schedules
        and queues, fibers, turns, hooks. Roots by name, the jobs of each by time; go on
        with the page's `after`. At most `limit` (`limits.due_rows`) rows. A root that
        cannot be opened is reported and left out.
        """
        key = None if root is None else TreeKey(*root)
        return await agenda.page(self, hours, root=key, limit=limit, after=after)

    async def roots(
        self,
        *,
        find: str = "",
        limit: int | None = None,
        after: tuple[str, str] | None = None,
    ) -> list[RootRow]:
        """Return all roots that there are, awake or asleep, by name: one page.

        `find`: only those whose `Class/name` has it, in whatever case. At most
        `limits.tree_rows` at once; go on with the last one (class, name) as `after`.
        Looking opens nothing.
        """
        most = self.limits.tree_rows
        limit = most if limit is None else max(1, min(limit, most))
        keys = [*self.trees, *self.host.sleeping]
        rows = []
        for key in await first_roots(keys, after, find, limit):
            tree = self.trees.get(key)
            awake = tree is not None and not tree.closed
            row = RootRow(
                class_name=key.class_name, name=key.name,
                state="open" if awake else "sleeping",
                agents=len(tree.nodes) if tree is not None and awake else 0,
                due_at=self.host.sleeping.get(key) or None,
            )  # fmt: skip
            rows.append(row)
        return rows

    @asynccontextmanager
    async def operator(self, class_name: str, name: str) -> AsyncIterator[Operator]:
        """Look after a root from outside: see and end what its agents have asked for.

        One that sleeps is opened, none of its agents is started; it stays open inside
        the block. There is no gate: who calls this decides who may. Raises `NotFound`
        for a root that was never made.
        """
        key = TreeKey(class_name, name)
        if not self.host.knows(key):
            raise NotFound("there is no such root")
        tree = await self.host.open_root(key, create=False)
        with tree.visitor():
            yield Operator(tree)

    def fibers(
        self,
        class_name: str,
        name: str,
        *,
        status: Statuses = None,
        limit: int | None = None,
        after: FiberRun | None = None,
    ) -> list[FiberRun]:
        """Return fibers of all agents of an open root, each with its path; none if it sleeps.

        In the order of their start, at most `limits.due_rows` at once; go on with the last
        one as `after`. To end one, let its agent or one above it cancel it.
        """
        tree = self.trees.get(TreeKey(class_name, name))
        if tree is None or tree.closed:
            return []
        found = tree.fibers.rows.all(
            tree.root_slot, status=status, limit=limit, after=after, below=True
        )
        return [tree.fibers.now(f) for f in found]

    def effects(
        self,
        class_name: str,
        name: str,
        *,
        uncertain: bool | None = None,
        limit: int | None = None,
        after: str | None = None,
    ) -> list[Effect]:
        """Return effects of all agents of an open root, each with its path; none if it sleeps.

        In the order in which they were begun, at most `limits.due_rows` at once; go on
        with the id of the last one as `after`. To decide about one, let its agent do it.
        """
        tree = self.trees.get(TreeKey(class_name, name))
        if tree is None or tree.closed:
            return []
        return tree.effects.all(
            tree.root_slot, uncertain=uncertain, limit=limit, after=after, below=True
        )

    def feed(
        self,
        class_name: str,
        name: str,
        *,
        after: str | None = None,
        limit: int | None = None,
        below: bool = True,
        follow: bool = False,
    ) -> Feed:
        """Return the feed of a root, as `runs.feed` is for its own code.

        A root that sleeps is opened, none of its agents is started; while one follows it,
        it stays open. Goes on over restarts of the tree and ends when the kernel closes.
        Raises on the way `NotFound`, `UsageError` for a cursor of another tree.
        """
        key = TreeKey(class_name, name)
        return of_root(self, key, after, limit=limit, below=below, follow=follow)

    def metrics(self) -> dict[str, int]:
        """Return counts over all open trees."""
        trees = self.trees.values()
        joined = {
            f"run_reattached_{o}".replace("-", "_"): n
            for o, n in self.reattached.items()
        }
        return joined | {
            "trees": len(self.trees),
            "sleeping_trees": len(self.host.sleeping),
            "nodes": sum(len(t.nodes) for t in trees),
            "remnants": sum(len(t.remnants) for t in trees),
            "connections": sum(t.sockets.count for t in trees),
            "records": sum(t.barrier.records for t in trees),
            "commits": sum(t.store.commits for t in trees),
        }


_STORES: Final = "culet.stores"


def _own_stores() -> dict[str, EntryPoint]:
    """Return the stores that come with us."""
    try:
        ours = distribution("culet").entry_points
    except PackageNotFoundError:  # part of somebody's own distribution
        return {}
    return {e.name: e for e in ours.select(group=_STORES)}


def find_store(url: str, limits: Limits) -> Store:
    """Return the store of a URL: its scheme names an entry point of `culet.stores`."""
    scheme, colon, rest = url.partition(":")
    found = _own_stores()
    if scheme not in found:  # a look at all that is installed takes a start 5 to 10 ms
        found |= {e.name: e for e in entry_points(group=_STORES)}
    if not colon or scheme not in found:
        known = ", ".join(sorted(f"{name}:" for name in found))
        msg = f"storage {url!r}: give a URL that begins with one of {known}"
        raise UsageError(msg)
    return cast(Store, found[scheme].load()(rest, limits=limits))


@asynccontextmanager
async def open_kernel(
    *,
    roots: Iterable[type[Agent]],
    facets: Iterable[type[Agent]] = (),
    storage: str | Store = "memory:",
    durability: Level = "power",
    clock: Clock | None = None,
    seed: int | None = None,
    idle_s: float = 60.0,
    abort_grace_s: float = 5.0,
    start_s: float = 30.0,
    limits: Limits | None = None,
    threads: bool = True,
    tracer: Tracer | None = None,
) -> AsyncIterator[Kernel]:
    """Open the kernel on a store; leaving it stops everything in order.

    `roots` are classes addressable at the top, `facets` live under a parent; a class may
    be both. `durability` is `power` (a record is synced) or `process`. With
    `threads=False` records are written in the loop: for deterministic tests. A `tracer`
    keeps spans (`culet.adapters.otel`).

    Raises `UsageError` for classes that cannot be served, `StorageBusy` when another
    kernel has the folder.
    """
    limits = limits or Limits()
    if durability not in ("power", "process"):
        msg = f"durability is power or process, not {durability!r}"
        raise UsageError(msg)
    classes = Classes(roots, facets, Agent)
    store = find_store(storage, limits) if isinstance(storage, str) else storage
    kernel = Kernel(
        classes, store, durability=durability, clock=clock or SystemClock(),
        chance=Chance(seed), limits=limits, idle_s=idle_s,
        abort_grace_s=abort_grace_s, start_s=start_s, threads=threads, tracer=tracer,
    )  # fmt: skip
    try:
        async with trio.open_nursery() as outer:
            await outer.start(kernel.run)
            try:
                yield kernel
            finally:
                with trio.CancelScope(shield=True):
                    await kernel.close()
    except BaseExceptionGroup as group:
        raise alone(group) from None
    finally:
        kernel.stop_threads()
