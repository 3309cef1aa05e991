"""The barrier of one tree: what makes commits durable, and the output gate behind it.

One record is in flight. Whoever waits shares the next one; what leaves the tree is not
waited for at all, it is stamped with the count of commits of its moment and rests in an
outbox until `durable` has reached that count. The writer thread never waits for a task
of the tree, and no cancellation reaches a record under way.

What a stream has staged is flushed when the next record is made (`before`), and
published when that record is durable (`after`): no task, event or timer per chunk.
"""

from __future__ import annotations

import math
import queue
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, final

import trio

from .errors import Fenced

if TYPE_CHECKING:
    from .core.limits import Limits
    from .ports import Chore, Stopwatch, TreeStore

_NEVER: Final = 1 << 62  # no slice ends before it
_CHORES_OF_CHORES: Final = 4  # a sync, then what waited for it; the rest can wait


@final
class Worker:
    """One plain thread with a queue: nothing that a cancellation can reach.

    `post(fn, done)` runs `fn` there and then `done(error)` in the loop.
    """

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[
            tuple[Callable[[], None], Callable[[BaseException | None], None]] | None
        ] = queue.SimpleQueue()
        self._token = trio.lowlevel.current_trio_token()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        while (item := self._queue.get()) is not None:
            fn, done = item
            error: BaseException | None = None
            try:
                fn()
            except BaseException as caught:
                error = caught
            try:
                self._token.run_sync_soon(done, error)
            except trio.RunFinishedError:
                return

    def post(
        self, fn: Callable[[], None], done: Callable[[BaseException | None], None]
    ) -> None:
        """Queue work; never blocks."""
        self._queue.put((fn, done))

    async def run(self, fn: Callable[[], None]) -> None:
        """Run `fn` on the thread and wait for it, whatever is cancelled meanwhile."""
        over = trio.Event()
        errors: list[BaseException] = []

        def done(error: BaseException | None) -> None:
            if error is not None:
                errors.append(error)
            over.set()

        self.post(fn, done)
        with trio.CancelScope(shield=True):
            await over.wait()
        if errors:
            raise errors[0]

    def stop(self) -> None:
        """Let the thread end after what is queued, and wait for it (it is idle then)."""
        self._queue.put(None)
        self._thread.join(timeout=5)


@final
class Barrier:
    """The barrier task of one tree, and the `Gate` that outboxes hold on to."""

    def __init__(
        self,
        store: TreeStore,
        limits: Limits,
        writer: Worker | None,
        janitor: Worker | None,
        on_failure: Callable[[BaseException], None],
        stopwatch: Stopwatch,
    ) -> None:
        self.store = store
        self.limits = limits
        self.durable = store.commits
        self.fenced: BaseException | None = None
        self.before: dict[Callable[[], None], None] = {}
        self.after: list[Callable[[], None]] = []
        self.records = 0
        self.records_at_once = 0  # made in the loop for a file that never rests
        self._writer, self._janitor = writer, janitor
        self._on_failure = on_failure
        self._stopwatch = stopwatch
        self._wanted = trio.Event()
        self._touched_at = 0.0
        self._urgent = trio.Event()
        self._waiters: deque[tuple[int, trio.Event]] = deque()
        self._held: list[Callable[[int], None]] = []

    # ---- asking

    def touched(self) -> None:
        """Something was committed or staged: a record follows within `linger_s`."""
        if not self._wanted.is_set():
            self._touched_at = trio.current_time()
            self._wanted.set()

    def urge(self) -> None:
        """Somebody waits: the record follows at once."""
        self.touched()
        self._urgent.set()

    @property
    def count(self) -> int:
        """Commits so far: the stamp of what leaves the tree now."""
        return self.store.commits

    def hold(self, waiter: Callable[[int], None]) -> None:
        """Call `waiter(durable)` once, after the next record; -1 when fenced."""
        if self.fenced is not None:
            waiter(-1)
            return
        self._held.append(waiter)
        self.urge()

    def flush(self) -> None:
        """Commit everything that is staged, now."""
        while self.before:
            fn = next(iter(self.before))
            del self.before[fn]
            fn()

    async def wait(self) -> None:
        """Return when everything that the tree has committed so far is durable."""
        if self.fenced is None and self.before:
            self.flush()
        count = self.store.commits
        if self.fenced is None and self.durable >= count:
            await trio.lowlevel.checkpoint_if_cancelled()
            return
        await self._wait_for(count)

    async def _wait_for(self, count: int) -> None:
        if self.fenced is not None:
            msg = "the tree restarts: its last commits are void"
            raise Fenced(msg) from self.fenced
        event = trio.Event()
        self._waiters.append((count, event))
        self.urge()
        await event.wait()
        if self.durable < count:
            msg = "the tree restarts: its last commits are void"
            raise Fenced(msg) from self.fenced

    async def room(self) -> None:
        """Wait for one record, or the fence: a hot file needs its checkpoint."""
        if self.fenced is not None:
            return
        event = trio.Event()
        self._waiters.append((0, event))
        self.urge()
        await event.wait()

    # ---- the task

    async def run(self) -> None:
        """Make records until cancelled; a failed one fences the tree and ends this."""
        while self.fenced is None:
            await self._wanted.wait()
            if not self._urgent.is_set():
                # from the first touch on, which may lie behind the last record
                with trio.move_on_at(self._touched_at + self.limits.linger_s):
                    await self._urgent.wait()
            if self.fenced is not None:
                return  # a record now would make half a step durable
            self._wanted, self._urgent = trio.Event(), trio.Event()
            try:
                await self._record()
            except Exception as error:
                self.fence(error)
                self._on_failure(error)
                return

    async def _record(self) -> None:
        deadline = self._stopwatch() + int(self.limits.flush_s * 1e9)
        while self.before:  # one at least, or a slow machine would store nothing
            fn = next(iter(self.before))
            del self.before[fn]
            fn()
            if self._stopwatch() >= deadline:
                break
        if self.before:
            self.urge()
        after, self.after = self.after, []
        if self.store.dirty:
            await self._make_durable()
        else:
            self.durable = self.store.commits
        await self._release(after)

    async def _make_durable(self) -> None:
        store = self.store
        slice_ns = int(self.limits.slice_s * 1e9)
        at_once = store.crowded
        record = store.begin()
        until = _NEVER if at_once else self._stopwatch() + slice_ns
        while not store.fill(record, until, self._stopwatch):
            await trio.lowlevel.cancel_shielded_checkpoint()
            until = self._stopwatch() + slice_ns
        if at_once:
            store.write(record)
            self.records_at_once += 1
        elif store.inline or self._writer is None:
            store.write(record)
            await trio.lowlevel.cancel_shielded_checkpoint()
        else:
            await self._writer.run(lambda: store.write(record))
        if self.fenced is not None:
            raise self.fenced
        self.durable = store.done(record, self._stopwatch)
        self.records += 1
        self._tidy()

    def _tidy(self) -> None:
        """Hand out the chores that there are; one that is done may ask for another."""
        for _ in range(_CHORES_OF_CHORES):
            chores = self.store.janitor()
            for chore in chores:
                if self._janitor is None:
                    try:
                        chore.work()
                    except Exception as error:
                        chore.done(error)
                    else:
                        chore.done(None)
                else:
                    self._janitor.post(chore.work, partial(self._tidied, chore))
            if not chores:
                return

    def _tidied(self, chore: Chore, error: BaseException | None) -> None:
        chore.done(error)
        self._tidy()

    async def _release(self, after: list[Callable[[], None]]) -> None:
        """Publish, let outboxes go, wake waiters: in slices, or a pass gets long."""
        slice_ns = int(self.limits.slice_s * 1e9)
        held, self._held = self._held, []
        until = self._stopwatch() + slice_ns
        for fn in after:
            fn()
            if self._stopwatch() > until:
                await trio.lowlevel.cancel_shielded_checkpoint()
                until = self._stopwatch() + slice_ns
        for waiter in held:
            waiter(self.durable)
            if self._stopwatch() > until:
                await trio.lowlevel.cancel_shielded_checkpoint()
                until = self._stopwatch() + slice_ns
        woken = 0
        for _ in range(len(self._waiters)):
            count, event = self._waiters.popleft()
            if count > self.durable:
                self._waiters.append((count, event))
                continue
            event.set()
            woken += 1
            if woken % self.limits.wake_slice == 0:
                await trio.lowlevel.cancel_shielded_checkpoint()
        if self._waiters:
            self.urge()

    def fence(self, error: BaseException) -> None:
        """Nothing that is not durable by now will ever leave."""
        if self.fenced is not None:
            return
        self.fenced = error
        held, self._held = self._held, []
        for waiter in held:
            waiter(-1)
        waiters, self._waiters = self._waiters, deque()
        for _count, event in waiters:
            event.set()
        self.before.clear()
        self.after.clear()
        self._wanted.set()
        self._urgent.set()


def until(now_ms: int, due_at: int | None, at_most_s: float) -> float:
    """Seconds to sleep until `due_at`, at most `at_most_s`; infinity is never returned."""
    if due_at is None:
        return at_most_s
    return min(max(math.ceil(due_at - now_ms) / 1000, 0.0), at_most_s)
