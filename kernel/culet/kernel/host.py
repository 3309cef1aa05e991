"""Which roots are open and which sleep: opened once, left whole, woken when they are due.

Every open tree has a task under the kernel's nursery. Of a root that sleeps the kernel
knows when it owes something; the host loop opens it then, a few at a time. A tree whose
storage fails is left and begins again from its last record.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, final

import trio

from .barrier import until
from .errors import (
    Deleted,
    NotFound,
    StorageBusy,
    StorageError,
    StorageFull,
    UsageError,
)
from .node import Node
from .patience import Patience
from .ports import Level, TreeKey, TreeStore
from .supervise import TreeFailures
from .tree import Tree

if TYPE_CHECKING:
    from .kernel import Kernel

_LAST_WORDS_S: Final = 0.05  # for the tasks of a tree beside code that does not stop
_AWAKE: Final = 0  # in the host index: look at once, it was live
_DESTROYED: Final = "SELECT 1 FROM node WHERE parent IS NULL AND state = 'gone'"


@final
class Host:
    """The roots of one kernel. `sleeping`: when each is due (epoch ms), None for never."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.trees: dict[TreeKey, Tree] = {}
        self.sleeping: dict[TreeKey, int | None] = {}
        self.waking: set[TreeKey] = set()  # that sleep still, and are due: opened now
        self.nursery: trio.Nursery | None = None
        self._opening: dict[TreeKey, trio.Event] = {}
        self._leaving: dict[TreeKey, trio.Event] = {}
        self._locked: dict[TreeKey, StorageBusy] = {}  # when last opened
        self._doomed: dict[TreeKey, trio.Event] = {}  # until its folder is gone
        self._broken: dict[TreeKey, BaseException] = {}
        self._failures = TreeFailures(kernel.limits, kernel.chance)
        self._sleepers_changed = trio.Event()

    async def open(self, nursery: trio.Nursery) -> None:
        """Open the store and read which roots there are; watch them from now on."""
        self.nursery = nursery
        await self._off_loop(self.kernel.store.open)
        entries = await self._off_loop(self.kernel.store.roots)
        self.sleeping = {e.key: e.due_at for e in entries}
        nursery.start_soon(self._watch)

    def knows(self, key: TreeKey) -> bool:
        """Whether there is such a root, awake, asleep or on the way."""
        known = (self.trees, self.sleeping, self._opening, self._leaving)
        return any(key in where for where in known)

    async def settle(self) -> None:
        """Return when no root is being opened, left or deleted."""
        while waits := [
            *self._opening.values(),
            *self._leaving.values(),
            *self._doomed.values(),
        ]:
            await waits[0].wait()

    async def _watch(self) -> None:
        """Wake sleeping roots when their slot is due. The wall clock is read anew."""
        assert self.nursery is not None
        swept = trio.current_time()
        while True:
            self._sleepers_changed = trio.Event()
            if trio.current_time() - swept >= self.kernel.limits.clock_check_s:
                swept = trio.current_time()
                self.kernel.pages.sweep()
            now = self.kernel.clock.now_ms()
            slots = [
                (due, key)
                for key, due in self.sleeping.items()
                if due is not None and key not in self.waking
            ]
            due = [slot for slot in slots if slot[0] <= now]
            room = self.kernel.limits.waking_roots - len(self.waking)
            for _at, key in heapq.nsmallest(room, due):
                self.waking.add(key)
                self.nursery.start_soon(self._wake_root, key)
            next_due = min((at for at, _ in slots if at > now), default=None)
            with trio.move_on_after(
                until(now, next_due, self.kernel.limits.clock_check_s)
            ):
                await self._sleepers_changed.wait()

    async def _wake_root(self, key: TreeKey) -> None:
        """Open one root, in a task of its own: a slow one delays no other."""
        try:
            await self.open_root(key, create=False)
        except NotFound:  # nothing of it was durable, or its destroy is over now
            self.sleeping.pop(key, None)
        except (StorageError, UsageError) as error:
            if self.kernel.closing:
                return
            self.sleeping.pop(key, None)
            self.kernel.report("root", None, error, name=f"{key.class_name}/{key.name}")
            if isinstance(error, StorageError):  # what it owes is owed still
                passes = isinstance(error, StorageFull | StorageBusy)
                limits = self.kernel.limits
                wait_s = limits.clock_check_s if passes else limits.backoff_max_s
                due_at = self.kernel.clock.now_ms() + int(wait_s * 1000)
                self.sleeping[key] = due_at
        finally:
            self.waking.discard(key)
            self._sleepers_changed.set()

    async def _off_loop(self, fn: Callable[[], Any]) -> Any:
        """Run blocking work of the store on its thread (in place without threads)."""
        if self.kernel.opener is None:
            return fn()
        out: list[Any] = []
        await self.kernel.opener.run(lambda: out.append(fn()))
        return out[0]

    async def _patiently(self, work: Callable[[], Any], what: str) -> Any:
        """Run blocking work of the store off the loop; where a file is locked, try again.

        Another process may look at it for a moment. Raises `StorageBusy` when that moment
        is longer than `limits.busy_s`.
        """
        patience = Patience(self.kernel.limits, what)
        while True:
            try:
                return await self._off_loop(work)
            except StorageBusy as error:
                patience.check(error)
            await patience.rest()

    async def leave_all(self) -> list[Node]:
        """Leave all trees, beside each other: they share the time that slow code has."""
        trees = list(self.trees.values())
        remnants: list[Node] = []

        failed: list[Exception] = []

        async def leave(tree: Tree) -> None:
            try:
                remnants.extend(await self._leave(tree, final=True))
            except Exception as error:  # the others are left all the same
                failed.append(error)

        async with trio.open_nursery() as nursery:
            for number, tree in enumerate(trees, 1):
                nursery.start_soon(leave, tree)
                if number % self.kernel.limits.wake_slice == 0:
                    await trio.lowlevel.checkpoint()
        if failed:
            raise failed[0]
        return remnants

    # ---- open and left

    async def open_root(self, key: TreeKey, *, create: bool = True) -> Tree:
        """Return the open tree of a root, opening (and creating) it if need be."""
        while True:
            if self.kernel.closing:
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
        kind = self.kernel.classes.of(key.class_name, among="roots")
        level: Level = kind.cls.durability or self.kernel.durability

        def work() -> TreeStore:
            store = self.kernel.store.open_tree(key, level=level, create=create)
            if store.tree.execute(_DESTROYED):  # a crash came before its folder went
                store.close()
                self.kernel.store.drop_tree(key)
                store = self.kernel.store.open_tree(key, level=level, create=create)
            try:
                self.kernel.store.note_root(key, _AWAKE)
            except BaseException:
                store.close()
                raise
            return store

        name = f"{key.class_name}/{key.name}"
        store: TreeStore = await self._patiently(work, name)
        try:
            tree = Tree(self.kernel, key, store)
        except BaseException:
            store.close()
            raise
        assert self.nursery is not None
        await self.nursery.start(tree.run)
        self.trees[key] = tree  # not before it runs: others would find a dead tree
        if not tree.closed:
            self.sleeping.pop(key, None)
        self.kernel.emit("root:open", tree, key, store.created)
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
                # Not before its tasks have ended may a thread close what they read.
                wait_s = 0.0 if remnants else self.kernel.abort_grace_s
                with trio.move_on_after(max(wait_s, _LAST_WORDS_S)):
                    await tree.over.wait()
                tree.store.retire()

                def work() -> None:
                    tree.store.close()
                    if final:
                        self.kernel.store.note_root(tree.key, due)

                try:
                    await self._off_loop(work)
                except StorageError as error:  # the index calls it awake: looked at
                    name = f"leaving {tree.key.class_name}/{tree.key.name}"
                    self.kernel.report("storage", None, error, name=name)
        finally:
            if self.trees.get(tree.key) is tree:
                del self.trees[tree.key]
            del self._leaving[tree.key]
            over.set()
        if final and not self.kernel.closing and not doomed:
            self.sleeping[tree.key] = due
            self._sleepers_changed.set()
        return remnants

    def evict_root(self, tree: Tree) -> None:
        """Let a tree that does nothing sleep; its slot is in the host index."""
        if self.nursery is not None and tree.key not in self._leaving:
            self.nursery.start_soon(self.put_to_sleep, tree)

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
            await self._off_loop(lambda: self.kernel.store.drop_tree(key))
        except StorageError:
            if tree.closed:  # its mark is durable: opening it tries again
                wait_ms = int(self.kernel.limits.backoff_max_s * 1000)
                self.sleeping[key] = self.kernel.clock.now_ms() + wait_ms
                self._sleepers_changed.set()
            raise
        finally:
            del self._doomed[key]
            over.set()

    def restart_tree(self, tree: Tree, error: BaseException) -> None:
        """The storage of a tree failed: stop it, and begin again from its last record."""
        self.kernel.report(
            "storage", None, error, name=f"{tree.key.class_name}/{tree.key.name}"
        )
        if (
            self.nursery is not None
            and not tree.closed
            and tree.key not in self._leaving
        ):
            self.nursery.start_soon(self._restart, tree)

    async def _restart(self, tree: Tree) -> None:
        if tree.key in self._leaving or tree.closed:
            return
        await self._leave(tree, final=False)
        self.kernel.emit("restart", None, tree.key, None)
        if self.kernel.closing:
            return
        rest_ms = self._failures.again_ms(tree.key)
        if rest_ms:
            self._look_later(tree.key, rest_ms)
            return
        try:
            await self.open_root(tree.key, create=False)
        except (NotFound, StorageFull, StorageBusy) as error:
            # nothing of it was durable; or there may be room, or no lock, the next time
            self.kernel.report("storage", None, error, name=f"restart of {tree.key}")
            if not isinstance(error, NotFound):  # nobody may come, and it owes things
                self._look_later(
                    tree.key, int(self.kernel.limits.backoff_base_s * 1000)
                )
        except Exception as error:
            self._broken[tree.key] = error
            self.kernel.report("storage", None, error, name=f"restart of {tree.key}")

    def _look_later(self, key: TreeKey, wait_ms: int) -> None:
        """Open a tree then, unless somebody comes before: it may owe things."""
        at = self.kernel.clock.now_ms() + wait_ms
        self.sleeping[key] = max(at, self.sleeping.get(key) or 0)
        self._sleepers_changed.set()

    async def awake(self, key: TreeKey) -> Tree:
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

    def sleepers(self, until: int) -> set[TreeKey]:
        """Return the roots that sleep and are due until then (epoch ms)."""
        slots = self.sleeping.items()
        return {key for key, due_at in slots if due_at is not None and due_at <= until}
