"""The kernel: one process's runtime. It opens roots, owns their tasks and the host loop.

Every open tree has a task under the kernel's one shielded nursery. A cancellation that
reaches `open_kernel` from outside starts a planned stop, bounded by `abort_grace_s`; runs
stay for recovery; then it goes through.
"""

from __future__ import annotations

import heapq
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from importlib.metadata import entry_points
from typing import Any, Final, TypeVar, cast, final

import trio

from . import agenda, listing
from .agent import Agent
from .barrier import Worker, until
from .calls import OutsideTarget, Stub, TreeTarget
from .classes import Classes
from .clock import Chance, Clock, SystemClock
from .core.limits import Limits
from .core.path import check_name
from .core.shown import shown
from .effectrows import Effect
from .errors import (
    ChildDidNotStop,
    Deleted,
    NotFound,
    StorageBusy,
    StorageError,
    StorageFull,
    UsageError,
)
from .events import Failure
from .feed import Feed, of_root
from .fiberrows import FiberRun, Statuses
from .guests import REVOKED, Guests
from .node import Node, is_stop
from .operate import Operator, RootRow, first_roots
from .pace import Pace
from .pages import Pages
from .patience import Patience
from .ports import Level, Store, TreeKey, TreeStore
from .stall import Stall
from .supervise import TreeFailures
from .tracing import Tracer
from .tree import Tree

A = TypeVar("A", bound=Agent)
log = logging.getLogger("culet.kernel")
Listener = Callable[[str, Tree | None, Any, Any], None]
_AWAKE: Final = 0  # in the host index: look at once, it was live
_DESTROYED: Final = "SELECT 1 FROM node WHERE parent IS NULL AND state = 'gone'"


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
        self.trees: dict[TreeKey, Tree] = {}
        self.guests = Guests(self)
        self.closing = False
        self.graces: set[trio.CancelScope] = set()  # of code that is being stopped
        self._nursery: trio.Nursery | None = None
        self._opening: dict[TreeKey, trio.Event] = {}
        self._leaving: dict[TreeKey, trio.Event] = {}
        self._locked: dict[TreeKey, StorageBusy] = {}  # when last opened
        self._doomed: dict[TreeKey, trio.Event] = {}  # until its folder is gone
        self._broken: dict[TreeKey, BaseException] = {}
        self._failures = TreeFailures(limits, chance)
        self._sleeping: dict[TreeKey, int | None] = {}
        self._sleepers_changed = trio.Event()
        self._waking = 0  # sleeping roots that are being opened, because they are due
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
                await self._off_loop(self.store.open)
                entries = await self._off_loop(self.store.roots)
                self._sleeping = {e.key: e.due_at for e in entries}
                self._nursery.start_soon(self._host_loop)
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

    async def _off_loop(self, fn: Callable[[], Any]) -> Any:
        """Run blocking work of the store on its thread (in place without threads)."""
        if self.opener is None:
            return fn()
        out: list[Any] = []
        await self.opener.run(lambda: out.append(fn()))
        return out[0]

    async def _host_loop(self) -> None:
        """Wake sleeping roots when their slot is due. The wall clock is read anew."""
        assert self._nursery is not None
        while True:
            self._sleepers_changed = trio.Event()
            now = self.clock.now_ms()
            slots = [
                (due, key) for key, due in self._sleeping.items() if due is not None
            ]
            due = [slot for slot in slots if slot[0] <= now]
            room = self.limits.waking_roots - self._waking
            for _at, key in heapq.nsmallest(room, due):
                del self._sleeping[key]
                self._waking += 1
                self._nursery.start_soon(self._wake_root, key)
            next_due = min((at for at, _ in slots if at > now), default=None)
            with trio.move_on_after(until(now, next_due, self.limits.clock_check_s)):
                await self._sleepers_changed.wait()
                continue
            self.pages.sweep()

    async def _wake_root(self, key: TreeKey) -> None:
        """Open one root, in a task of its own: a slow one delays no other."""
        try:
            await self.open_root(key, create=False)
        except NotFound:
            pass  # nothing of it was durable, or its destroy is over now
        except (StorageError, UsageError) as error:
            if self.closing:
                return
            self.report("root", None, error, name=f"{key.class_name}/{key.name}")
            if isinstance(error, StorageError):  # what it owes is owed still
                passes = isinstance(error, StorageFull | StorageBusy)
                limits = self.limits
                wait_s = limits.clock_check_s if passes else limits.backoff_max_s
                due_at = self.clock.now_ms() + int(wait_s * 1000)
                self._sleeping.setdefault(key, due_at)
        finally:
            self._waking -= 1
            self._sleepers_changed.set()

    async def patiently(self, work: Callable[[], Any], what: str) -> Any:
        """Run blocking work of the store off the loop; where a file is locked, try again.

        Another process may look at it for a moment. Raises `StorageBusy` when that moment
        is longer than `limits.busy_s`.
        """
        patience = Patience(self.limits, what)
        while True:
            try:
                return await self._off_loop(work)
            except StorageBusy as error:
                patience.check(error)
            await patience.rest()

    async def close(self) -> None:
        """Stop everything in order, make it durable, let the tasks end."""
        self.closing = True
        while waits := [
            *self._opening.values(),
            *self._leaving.values(),
            *self._doomed.values(),
        ]:
            await waits[0].wait()
        assert self._nursery is not None
        try:
            remnants = await self._leave_all()
        finally:  # its task is shielded: it would wait for ever
            self._nursery.cancel_scope.cancel(reason="the kernel closes")
        if remnants:
            log.error("did not stop: %s", [n.path_text() for n in remnants])
            self.emit("stuck", None, remnants, None)
        if remnants:
            raise ChildDidNotStop([n.path_text() for n in remnants])

    async def _leave_all(self) -> list[Node]:
        """Leave all trees, beside each other: they share the time that slow code has."""
        trees = list(self.trees.values())
        remnants: list[Node] = []

        async def leave(tree: Tree) -> None:
            remnants.extend(await self._leave(tree, final=True))

        if len(trees) == 1:
            await leave(trees[0])
            return remnants
        try:
            async with trio.open_nursery() as nursery:
                for number, tree in enumerate(trees, 1):
                    nursery.start_soon(leave, tree)
                    if number % self.limits.wake_slice == 0:
                        await trio.lowlevel.checkpoint()
        except BaseExceptionGroup as group:
            raise alone(group) from None
        return remnants

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

    # ---- roots

    async def open_root(self, key: TreeKey, *, create: bool = True) -> Tree:
        """Return the open tree of a root, opening (and creating) it if need be."""
        while True:
            if self.closing:
                msg = "the kernel is closing"
                raise UsageError(msg)
            waits = self._waits(key)
            if waits is not None:
                opening = waits is self._opening.get(key)
                await waits.wait()
                if opening and key in self._locked:  # it has waited long enough
                    raise StorageBusy(*self._locked[key].args)
                continue
            tree = self.trees.get(key)
            if tree is not None and not tree.closed:
                return tree
            if key in self._broken:
                error = self._broken[key]
                msg = f"{key.class_name}/{key.name} cannot be opened: {error}"
                raise StorageError(msg) from error
            break
        over = self._opening[key] = trio.Event()
        try:
            with trio.CancelScope(shield=True):
                self._locked.pop(key, None)
                opened = await self._open(key, create=create)
            return opened  # noqa: RET504  # a cancel scope may swallow, says mypy
        except StorageBusy as error:
            self._locked[key] = error
            raise
        finally:
            del self._opening[key]
            over.set()

    def _waits(self, key: TreeKey) -> trio.Event | None:
        """Return what a root is busy with: whoever comes meanwhile meets the next life.

        One that is being destroyed is still met while it stops: it says that it is gone.
        """
        tree = self.trees.get(key)
        if key in self._doomed:
            return self._doomed[key] if tree is None or tree.closed else None
        return self._opening.get(key, self._leaving.get(key))

    async def _open(self, key: TreeKey, *, create: bool) -> Tree:
        kind = self.classes.of(key.class_name, among="roots")
        level: Level = kind.cls.durability or self.durability

        def work() -> TreeStore:
            store = self.store.open_tree(key, level=level, create=create)
            if store.tree.execute(_DESTROYED):  # a crash came before its folder went
                store.close()
                self.store.drop_tree(key)
                store = self.store.open_tree(key, level=level, create=create)
            try:
                self.store.note_root(key, _AWAKE)
            except BaseException:
                store.close()
                raise
            return store

        name = f"{key.class_name}/{key.name}"
        store: TreeStore = await self.patiently(work, name)
        try:
            tree = Tree(self, key, store)
        except BaseException:
            store.close()
            raise
        self._sleeping.pop(key, None)
        assert self._nursery is not None
        await self._nursery.start(tree.run)
        self.trees[key] = tree  # not before it runs: others would find a dead tree
        self.emit("root:open", tree, key, store.created)
        return tree

    async def _leave(self, tree: Tree, *, final: bool) -> list[Node]:
        """Stop a tree, close its files, note when it is due again."""
        leaving = self._leaving.get(tree.key)
        if leaving is not None:
            await leaving.wait()
        if tree.closed:
            return []
        over = self._leaving[tree.key] = trio.Event()
        doomed = tree.key in self._doomed  # the index keeps it awake until it is gone
        try:
            with trio.CancelScope(shield=True):
                remnants = await tree.stop(final=final)
                due = tree.jobs.left() if final and not doomed else _AWAKE
                assert tree.nursery is not None
                tree.nursery.cancel_scope.cancel(reason="the tree closes")

                def work() -> None:
                    tree.store.close()
                    if final:
                        self.store.note_root(tree.key, due)

                try:
                    await self._off_loop(work)
                except StorageError as error:  # the index calls it awake: looked at
                    name = f"leaving {tree.key.class_name}/{tree.key.name}"
                    self.report("storage", None, error, name=name)
        finally:
            if self.trees.get(tree.key) is tree:
                del self.trees[tree.key]
            del self._leaving[tree.key]
            over.set()
        if final and not self.closing and not doomed:
            self._sleeping[tree.key] = due
            self._sleepers_changed.set()
        return remnants

    def evict_root(self, tree: Tree) -> None:
        """Let a tree that does nothing sleep; its slot is in the host index."""
        if self._nursery is not None and tree.key not in self._leaving:
            self._nursery.start_soon(self.put_to_sleep, tree)

    async def put_to_sleep(self, tree: Tree) -> None:
        """Stop a tree in order and close its files, unless somebody came meanwhile."""
        if tree.key not in self._leaving and not tree.closed and not tree.visitors:
            await self._leave(tree, final=True)

    async def destroy_root(self, tree: Tree) -> None:
        """Delete a root with all below it: its folder goes, its name is free again."""
        key = tree.key
        if key in self._doomed:
            await self._doomed[key].wait()
            return
        with tree.transaction():
            tree.db.execute("UPDATE node SET state = 'gone' WHERE parent IS NULL")
            tree.db.execute("DELETE FROM job")
        over = self._doomed[key] = trio.Event()
        try:
            tree.jobs.stopped = True
            tree.sockets.close_tree(4410, "deleted")
            tree.stops.end_all(Deleted(f"{key.class_name}/{key.name} is deleted"))
            await tree.durable()
            await self._leave(tree, final=True)
            await self._off_loop(lambda: self.store.drop_tree(key))
        except StorageError:
            if tree.closed:  # its mark is durable: opening it tries again
                wait_ms = int(self.limits.backoff_max_s * 1000)
                self._sleeping[key] = self.clock.now_ms() + wait_ms
                self._sleepers_changed.set()
            raise
        finally:
            del self._doomed[key]
            over.set()

    def restart_tree(self, tree: Tree, error: BaseException) -> None:
        """The storage of a tree failed: stop it, and begin again from its last record."""
        self.report(
            "storage", None, error, name=f"{tree.key.class_name}/{tree.key.name}"
        )
        if (
            self._nursery is not None
            and not tree.closed
            and tree.key not in self._leaving
        ):
            self._nursery.start_soon(self._restart, tree)

    async def _restart(self, tree: Tree) -> None:
        if tree.key in self._leaving or tree.closed:
            return
        await self._leave(tree, final=False)
        self.emit("restart", None, tree.key, None)
        if self.closing:
            return
        rest_ms = self._failures.again_ms(tree.key)
        if rest_ms:
            self._look_later(tree.key, rest_ms)
            return
        try:
            await self.open_root(tree.key, create=False)
        except (NotFound, StorageFull, StorageBusy) as error:
            # nothing of it was durable; or there may be room, or no lock, the next time
            self.report("storage", None, error, name=f"restart of {tree.key}")
            if not isinstance(error, NotFound):  # nobody may come, and it owes things
                self._look_later(tree.key, int(self.limits.backoff_base_s * 1000))
        except Exception as error:
            self._broken[tree.key] = error
            self.report("storage", None, error, name=f"restart of {tree.key}")

    def _look_later(self, key: TreeKey, wait_ms: int) -> None:
        """Open a tree then, unless somebody comes before: it may owe things."""
        self._sleeping.setdefault(key, self.clock.now_ms() + wait_ms)
        self._sleepers_changed.set()

    # ---- from outside

    async def get_agent(self, cls: type[A], name: str) -> A:
        """Return a stub of a root, made and started if need be (typed as its class)."""
        kind = self.classes.of(cls, among="roots")
        check_name(name, root=True)
        key = TreeKey(kind.name, name)
        tree = await self._awake(key)
        target = OutsideTarget(self, key, tree.root_slot, kind)
        return cast(A, Stub(target))

    async def _awake(self, key: TreeKey) -> Tree:
        """Open and start a root; after the end of one that is just being destroyed."""
        while True:
            tree = await self.open_root(key)
            try:
                with tree.visitor():
                    await tree.wake(tree.root_slot)
                    if tree.store.created and not tree.barrier.records:
                        await tree.durable()  # whose stub this is must stay its own
                return tree
            except Deleted:
                over = self._doomed.get(key)
                if over is None:
                    raise
            await over.wait()

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
            tree = await self.open_root(key, create=False)
        except NotFound:
            return
        over, failed = trio.Event(), list[Exception]()

        async def end() -> None:  # not in this task, which may be inside that root
            try:
                await self.destroy_root(tree)
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
        nothing more is sent to them. HTTP requests that wait for an answer get 401,
        streamed answers break off; who was identified already and is still on the way is
        refused. Returns how many were let go of. What they have asked for goes on: a run is
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
        keys = [*self.trees, *self._sleeping]
        rows = []
        for key in await first_roots(keys, after, find, limit):
            tree = self.trees.get(key)
            awake = tree is not None and not tree.closed
            row = RootRow(
                class_name=key.class_name, name=key.name,
                state="open" if awake else "sleeping",
                agents=len(tree.nodes) if tree is not None and awake else 0,
                due_at=self._sleeping.get(key) or None,
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
        known = (self.trees, self._sleeping, self._opening, self._leaving)
        if not any(key in where for where in known):
            raise NotFound("there is no such root")
        tree = await self.open_root(key, create=False)
        with tree.visitor():
            yield Operator(tree)

    def sleepers(self, until: int) -> set[TreeKey]:
        """Return the roots that sleep and are due until then (epoch ms)."""
        slots = self._sleeping.items()
        return {key for key, due_at in slots if due_at is not None and due_at <= until}

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
            "sleeping_trees": len(self._sleeping),
            "nodes": sum(len(t.nodes) for t in trees),
            "remnants": sum(len(t.remnants) for t in trees),
            "connections": sum(t.sockets.count for t in trees),
            "records": sum(t.barrier.records for t in trees),
            "commits": sum(t.store.commits for t in trees),
        }


def find_store(url: str, limits: Limits) -> Store:
    """Return the store of a URL: its scheme names an entry point of `culet.stores`."""
    scheme, colon, rest = url.partition(":")
    found = {e.name: e for e in entry_points(group="culet.stores")}
    if not colon or scheme not in found:
        known = ", ".join(sorted(f"{name}:" for name in found))
        msg = f"storage {url!r}: give a URL that begins with one of {known}"
        raise UsageError(msg)
    return cast(Store, found[scheme].load()(rest, limits=limits))


def alone(error: BaseException) -> BaseException:
    """Return the one error of a group of one, as if no nursery were there."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


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
