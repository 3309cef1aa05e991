"""Jobs: all that a tree owes, one table, one dispatcher, one back-off.

Take, barrier, wake, look again, call, done. Taking sets `held` to a number that is never
used again, counts the attempt and, for a turn, sets `begun`; after the barrier shared by
all that were taken together the handler of the kind runs; *done*, failure and settling
are guarded by the take, so a late worker can never end another's hold. Whoever holds a
job releases it when it ends in any way but *done*. When a tree opens, one UPDATE
releases what former lives held, and that is recovery.

Jobs know no kinds: the tree gives a table of them. Due order, one worker per owner and
lane; the dispatcher looks only at the head of lanes that are idle, so a job behind a
busy lane is not due (or the loop would be hot).

A kind may be taken in *batches*: what is due behind the head of its lane is taken in the
same commit, waits for the same barrier, and is called one after the other. Only what was
never tried is taken so: after a crash each is taken alone, so a call that kills the
process is counted by itself and its neighbours outlive it. What the worker has not begun
when its time is over, or when the head of a queue backs off, it gives back untouched.
"""

from __future__ import annotations

import heapq
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast, final

import msgspec
import trio

from .barrier import until
from .calls import UNENCODABLE
from .core import job as core
from .core.job import UNREADABLE
from .core.run import error_text
from .errors import Deleted, FacetAborted, StorageBusy, StorageError, UsageError
from .events import CHANNEL_OF, Owed
from .jobrows import COLUMNS, retry_of
from .jobrows import Hopeless as Hopeless
from .jobrows import JobRow as JobRow
from .jobrows import Kind as Kind
from .jobrows import StartFailed as StartFailed
from .jobrows import Taken as Taken

if TYPE_CHECKING:
    from .tree import Tree

log = logging.getLogger("culet.kernel")
LaneKey = tuple[str, str]
_INSTANT_MAX: Final = 1 << 62
_ENDED: Final = "the process ended each time"
_STALE_HEADS: Final = 64  # in the heap, beside one for each lane: then it is made anew

_FREE: Final = "held IS NULL AND dead = 0 AND paused = 0"
_HEAD: Final = (
    f"SELECT due_at, id FROM job WHERE owner = ? AND lane = ? AND {_FREE}"
    " ORDER BY due_at, id LIMIT 1"
)
_BATCH: Final = (
    f"SELECT id, attempts, begun FROM job WHERE owner = ? AND lane = ? AND {_FREE}"
    " AND due_at <= ? ORDER BY due_at, id LIMIT ?"
)
_QUEUE_BATCH: Final = (
    f"SELECT id, attempts, begun FROM job WHERE owner = ? AND lane = ? AND"
    f" kind = 'queue' AND {_FREE} AND due_at <= ? ORDER BY id LIMIT ?"
)
_CROWD: Final = (
    "SELECT what, count(*) FROM (SELECT what FROM job WHERE owner = ? AND lane = ?"
    f" AND {_FREE} AND due_at <= ? AND every IS NULL LIMIT ?) GROUP BY what"
)
_QUEUE_HEAD: Final = (
    f"SELECT due_at, id FROM job WHERE owner = ? AND lane = ? AND kind = 'queue'"
    f" AND {_FREE} ORDER BY id LIMIT 1"
)
_CROWD_ROWS: Final = 256  # looked at: what is told is "at least so many"
_LANES: Final = f"SELECT DISTINCT owner, lane FROM job WHERE {_FREE}"
_SLOT: Final = f"SELECT min(due_at) FROM job WHERE {_FREE}"
_LEFT: Final = "SELECT min(due_at) FROM job WHERE dead = 0 AND paused = 0"
_TAKE: Final = (
    "UPDATE job SET held = ?, attempts = min(attempts, 1000000) + 1,"
    " tries = min(tries, 1000000) + (kind = 'turn'), begun = begun OR kind = 'turn'"
    f" WHERE id = ? AND {_FREE} RETURNING {COLUMNS}"
)
_LAST_ID: Final = "SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'job'"
_TICK: Final = (  # one that was asked for while this one was called is one more
    "UPDATE job SET held = NULL, attempts = ?1, at = ?2, error = ?4,"
    " due_at = CASE WHEN due_at = ?7 THEN ?3 ELSE min(due_at, ?3) END"
    " WHERE id = ?5 AND held = ?6"
)
_DELETE: Final = "DELETE FROM job WHERE id = ? AND held = ?"
_MINE: Final = "SELECT paused FROM job WHERE id = ? AND held = ?"
_INSERT: Final = (
    "INSERT INTO job (owner, kind, what, payload, every, at, due_at, lane, key, retry,"
    " attempts, tries, begun, held, created_at)"
    " VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)"
    " RETURNING id"
)


@final
class Jobs:
    """The jobs of one tree and their dispatcher."""

    def __init__(self, tree: Tree, epoch: int) -> None:
        self.tree = tree
        self.db = tree.db
        self.epoch = epoch
        self.kinds: Mapping[str, Kind] = {}
        self.busy: dict[LaneKey, object] = {}
        self.stopped = False
        self.last_id = self.next_id() - 1
        self._takes = 0
        self._waiting: set[int] = set()  # taken behind a head, not begun
        self._crowded: set[LaneKey] = set()  # told of already
        self._heads: dict[LaneKey, tuple[int, int]] = {}
        self._heap: list[tuple[int, int, LaneKey]] = []
        self._stale: dict[LaneKey, None] = {}
        self._workers = 0
        self._wake = trio.Event()

    # ---- rows

    def take_number(self) -> int:
        """Return a number that no hold ever had: (life of the tree, counter)."""
        self._takes += 1
        return self.epoch << 32 | self._takes

    def next_id(self) -> int:
        """Return the id that the next row gets: greater than any that there was."""
        return int(self.db.execute(_LAST_ID)[0][0]) + 1

    def add(
        self,
        owner: str,
        kind: str,
        what: str,
        *,
        at: int,
        lane: str,
        payload: Any = None,
        due_at: int | None = None,
        every: str | None = None,
        key: str | None = None,
        retry: str | None = None,
        held: int | None = None,
        begun: bool = False,
    ) -> int:
        """Insert a job; inside the caller's transaction. Returns its id.

        With `held` it is born taken, its first attempt counted.
        Raises `UsageError` for a payload that is no JSON.
        """
        self.touch(owner, lane)
        try:
            encoded = None if payload is None else msgspec.json.encode(payload).decode()
        except UNENCODABLE as error:
            msg = f"{kind} {what!r}: its payload cannot be stored as JSON: {error}"
            raise UsageError(msg) from None
        due = at if due_at is None else due_at
        values = (
            owner, kind, what, encoded, every, at, due, lane, key, retry,
            int(held is not None), int(held is not None and kind == "turn"),
            int(begun), held, self.tree.now(),
        )  # fmt: skip
        job_id = int(self.db.execute(_INSERT, values)[0][0])
        self.last_id = max(self.last_id, job_id)
        return job_id

    def get(self, job_id: int) -> JobRow | None:
        """Return one job."""
        rows = self.db.execute(f"SELECT {COLUMNS} FROM job WHERE id = ?", (job_id,))
        return JobRow(*rows[0]) if rows else None

    def find(self, where: str, params: tuple[Any, ...]) -> list[JobRow]:
        """Return jobs by a constant condition of this package."""
        sql = f"SELECT {COLUMNS} FROM job WHERE {where}"
        return [JobRow(*r) for r in self.db.execute(sql, params)]

    def born_taken(self, job_id: int, take: int) -> Taken:
        """Return the hold of a job that was added with `held`."""
        row = self.get(job_id)
        assert row is not None
        return Taken(row, take, begun_before=False)

    def mine(self, taken: Taken) -> bool:
        """Whether the row still carries this take."""
        return bool(self.db.execute(_MINE, (taken.row.id, taken.take)))

    def to_be_called(self, taken: Taken) -> bool:
        """The same in the step that enters its owner; one that was paused is given back."""
        rows = self.db.execute(_MINE, (taken.row.id, taken.take))
        if rows and rows[0][0]:
            self.release([taken.row.id], planned=True)
        return bool(rows) and not rows[0][0]

    def drop(self, where: str, params: tuple[Any, ...]) -> None:
        """Delete jobs by a constant condition; inside the caller's transaction."""
        sql = f"DELETE FROM job WHERE {where} RETURNING owner, lane"
        for owner, lane in self.db.execute(sql, params):
            self.touch(owner, lane)

    def progress(self, taken: Taken) -> None:
        """Something was stored: attempts count without progress, so back to one."""
        taken.attempts = 1
        self.tree.credit(taken.row.owner, taken.row.what)

    def stash(self, taken: Taken, snapshot: str) -> bool:
        """Store a checkpoint, guarded by the take; False when the hold is lost.

        Of what does not recur `at` is its last sign of life.
        """
        self.db.execute(
            "UPDATE job SET snapshot = ?, at = ?, attempts = min(attempts, 1)"
            " WHERE id = ? AND held = ?",
            (snapshot, self.tree.now(), taken.row.id, taken.take),
        )
        landed = self.db.changes > 0
        if landed and taken.attempts > 1:
            self.progress(taken)
        self.tree.touched()
        return landed

    def slot(self) -> int | None:
        """Return the alarm slot: the earliest free job; None: nothing is owed."""
        value = self.db.execute(_SLOT)[0][0]
        return None if value is None else int(value)

    def left(self) -> int | None:
        """Return the slot that a tree leaves: what a worker still holds is owed as well.

        Its hold is void in the next life, but that must begin.
        """
        value = self.db.execute(_LEFT)[0][0]
        return None if value is None else int(value)

    # ---- what is due

    def touch(self, owner: str, lane: str) -> None:
        """Rows of that lane changed: its head is looked at in the next pass."""
        self._stale[owner, lane] = None
        self._wake.set()

    def _refresh(self) -> None:
        for key in self._stale:
            sql = _QUEUE_HEAD if key[1].startswith("queue") else _HEAD
            rows = self.db.execute(sql, key)
            if not rows:
                self._heads.pop(key, None)
                continue
            due_at, job_id = rows[0]
            self._heads[key] = (due_at, job_id)
            heapq.heappush(self._heap, (due_at, job_id, key))
        self._stale.clear()
        if len(self._heap) > 2 * len(self._heads) + _STALE_HEADS:
            self._heap = [(*head, key) for key, head in self._heads.items()]
            heapq.heapify(self._heap)

    def _due(self, now: int) -> tuple[list[tuple[int, LaneKey]], int | None]:
        """Return heads of idle lanes that are due, and the next due time."""
        out: list[tuple[int, LaneKey]] = []
        limit = self.tree.kernel.limits.jobs_at_once
        while self._heap:
            due_at, job_id, key = self._heap[0]
            if self._heads.get(key) != (due_at, job_id) or key in self.busy:
                heapq.heappop(self._heap)  # stale, or looked at again when it is idle
                continue
            if due_at > now:
                return out, due_at
            if self._workers >= limit:
                return out, None  # a worker that ends wakes the dispatcher
            heapq.heappop(self._heap)
            del self._heads[key]
            self.busy[key] = out
            self._workers += 1
            out.append((job_id, key))
        return out, None

    async def run(self, nursery: trio.Nursery) -> None:
        """Dispatch what is due, until cancelled. A full disk only delays it."""
        for owner, lane in self.db.execute(_LANES):
            self._stale[owner, lane] = None
        check_s = self.tree.kernel.limits.clock_check_s
        while True:
            self._wake = trio.Event()
            if self.stopped:
                await trio.sleep_forever()
            self._refresh()
            now = self.tree.now()
            due, next_due = self._due(now)
            if due:
                try:
                    batches = self._take(due, now)
                except StorageError as error:
                    await self._not_taken(due, error)
                    continue
                for batch in batches:
                    nursery.start_soon(self._work, batch)
                self.tree.barrier.urge()
                await trio.lowlevel.checkpoint()
                continue
            with trio.move_on_after(until(self.tree.now(), next_due, check_s)):
                await self._wake.wait()

    def _take(self, due: Sequence[tuple[int, LaneKey]], now: int) -> list[list[Taken]]:
        """Take heads of lanes, each with what may come with it, in one commit."""
        out: list[list[Taken]] = []
        gone: list[LaneKey] = []
        limits = self.tree.kernel.limits
        spare = (limits.jobs_at_once - len(self._waiting)) // len(due)
        share = max(1, min(limits.jobs_in_batch, spare))
        crowds: list[Callable[[], None]] = []
        with self.tree.transaction():
            for head, key in due:
                batch = self._take_lane(head, key, now, share)
                if not batch:  # gone since the lane was looked at
                    gone.append(key)
                    continue
                out.append(batch)
                crowds += self._crowd(batch, key, now, share)
        for batch in out:
            token = batch[0].token
            self.busy[batch[0].row.owner, batch[0].row.lane] = token
            self._waiting.update(taken.row.id for taken in batch[1:])
        for key in gone:
            del self.busy[key]
            self._workers -= 1
            self.touch(*key)
        for tell in crowds:
            tell()
        return out

    def _take_lane(self, head: int, key: LaneKey, now: int, share: int) -> list[Taken]:
        sql = _QUEUE_BATCH if key[1].startswith("queue") else _BATCH
        found = self.db.execute(sql, (*key, now, share))
        if not found or found[0][0] != head:
            return []
        take, out = self.take_number(), list[Taken]()
        for job_id, attempts, begun in found:
            if out and (attempts or not self.kinds[out[0].row.kind].batch):
                break  # what was tried before is taken alone
            row = JobRow(*self.db.execute(_TAKE, (take, job_id))[0])
            out.append(Taken(row, take, begun_before=bool(begun)))
            if attempts:
                break
        return out

    def _crowd(
        self, batch: list[Taken], key: LaneKey, now: int, share: int
    ) -> list[Callable[[], None]]:
        """Return what tells of methods of which many one-shot calls are due: once a burst."""
        least = self.tree.kernel.limits.crowd
        crowded = self.kinds[batch[0].row.kind].crowded
        known, goes_on = key in self._crowded, len(batch) == share
        if known and not goes_on:
            self._crowded.discard(key)  # these are the last of it
        few = len(batch) < min(share, least) and batch[0].attempts == 1
        if crowded is None or known or few:
            return []
        counts = Counter(t.row.what for t in batch if t.row.every is None)
        for what, count in self.db.execute(_CROWD, (*key, now, _CROWD_ROWS)):
            counts[what] += count
        many = [(what, n) for what, n in counts.items() if n >= least]
        if many and goes_on:
            self._crowded.add(key)
        return [partial(crowded, key[0], what, n) for what, n in many]

    async def _not_taken(
        self, due: Iterable[tuple[int, LaneKey]], error: StorageError
    ) -> None:
        """The take could not be written: nothing was taken, all is due later."""
        if self.tree.barrier.fenced is not None:
            await trio.sleep_forever()  # the tree restarts
        self.tree.kernel.report("storage", None, error, name=f"jobs of {self.tree!r}")
        await trio.sleep(self.tree.kernel.limits.backoff_base_s)
        for _job_id, key in due:
            self.busy.pop(key, None)
            self._workers -= 1
            self.touch(*key)

    def start(self, nursery: trio.Nursery, taken: Taken) -> None:
        """Work on a job that was born taken, at once."""
        key = (taken.row.owner, taken.row.lane)
        self.busy[key] = taken.token
        self._workers += 1
        nursery.start_soon(self._work, [taken])

    def idle(self, owner: str, lane: str) -> bool:
        """Whether a job of that lane may be born taken and started at once."""
        if self.stopped or (owner, lane) in self.busy:
            return False
        if self._workers >= self.tree.kernel.limits.jobs_at_once:
            return False
        return not self.db.execute(_HEAD, (owner, lane))

    def _free(self, key: LaneKey, token: object) -> None:
        if self.busy.get(key) is token:
            del self.busy[key]
        self._workers -= 1
        self.touch(*key)

    # ---- one job

    async def _work(self, batch: list[Taken]) -> None:
        """Work on what was taken together, one after the other."""
        head = batch[0]
        key, token = (head.row.owner, head.row.lane), head.token
        rest = deque(batch)
        try:
            await self._durable()
            # A wipe is short, and a kernel that closes waits for nobody in that line.
            if head.row.kind != "wipe":
                await self.tree.kernel.paced()
            until = trio.current_time() + self.tree.kernel.limits.batch_s
            while rest and not self.stopped:
                taken = rest.popleft()
                self._waiting.discard(taken.row.id)
                await self._one(taken)
                if taken.again and key[1].startswith("queue"):
                    break  # its head backs off: the others wait with it
                if trio.current_time() > until:
                    break  # who was made due meanwhile has a turn, too
        finally:
            if rest and not self.tree.closed and self.tree.barrier.fenced is None:
                self.release([t.row.id for t in rest if self.mine(t)], planned=True)
            self._waiting.difference_update(t.row.id for t in rest)
            self._free(key, token)

    async def _durable(self) -> None:
        """Wait for the barrier of the take; one that fails leaves nothing to be done."""
        with suppress(StorageError):
            await self.tree.durable()

    async def _one(self, taken: Taken) -> None:
        try:
            # Cancelled or wiped meanwhile? Calls look by themselves, when they begin.
            kind = self.kinds[taken.row.kind]
            if self.tree.barrier.fenced is None and (kind.batch or self.mine(taken)):
                await self._handle(taken, kind)
        except StorageError as error:
            if self.tree.barrier.fenced is None and not self.tree.closed:
                with suppress(StorageError):  # then it is only released
                    self._failed(taken, error)
        except Exception as error:  # of its own bookkeeping: its row makes no sense
            self._unreadable(taken, error)
        finally:
            if (
                not taken.over
                and not self.tree.closed
                and self.tree.barrier.fenced is None
            ):
                self._release(taken)

    def _put_off(self, taken: Taken, error: StorageBusy) -> None:
        """Another process has locked a file: that is no try, and is looked at again."""
        self.tree.report_job(taken, error)
        wait_ms = int(self.tree.kernel.limits.clock_check_s * 1000)
        begun = int(taken.begun_before and taken.row.kind == "turn")
        with self.tree.transaction():
            self.db.execute(
                "UPDATE job SET held = NULL, attempts = max(attempts - 1, 0),"
                " tries = max(tries - 1, 0), begun = ?, due_at = ?"
                " WHERE id = ? AND held = ?",
                (begun, self.tree.now() + wait_ms, taken.row.id, taken.take),
            )
        taken.over = taken.again = True

    def _unreadable(self, taken: Taken, error: Exception) -> None:
        """A row that cannot be dealt with rests where it is seen; the others go on."""
        self.tree.report_job(taken, error)
        if not self._beyond(taken):
            return  # it is released, and due again after its back-off
        with suppress(StorageError), self.tree.transaction():
            self._bury(taken, error_text(error))

    async def _handle(self, taken: Taken, kind: Kind) -> None:
        taken.began = self.tree.now()
        if self._beyond(taken):  # it killed the process each time
            if self.mine(taken):
                self._cut_off(taken)
            return
        if taken.row.every is not None and self._missed(taken):
            return
        deadline = (
            self.tree.kernel.limits.job_timeout_s if kind.deadline else float("inf")
        )
        try:
            with trio.fail_after(deadline):
                over = await kind.run(taken)
        except (Deleted, FacetAborted) as error:
            # the owner's own end has taken the hold away, or will: not a failed try
            if self.mine(taken) and not self.stopped:
                self._failed(taken, error, begun=taken.begun_before)
        except trio.TooSlowError:
            self._failed(taken, TimeoutError(f"took more than {deadline} s"))
        except StartFailed as error:
            cause = error.__cause__ or error
            self._failed(taken, cause, begun=taken.begun_before, started=False)
        except StorageBusy as error:
            self._put_off(taken, error)
        except Exception as error:
            self._failed(taken, error)
        else:
            if over:
                self._done(taken)

    def _attempt_limit(self, taken: Taken) -> int:
        retry = retry_of(taken.row)
        return self.tree.kernel.limits.attempts if retry is None else retry.max_attempts

    def _verdict(self, taken: Taken, limit: int) -> core.Verdict:
        kind, recurring = cast(core.Kind, taken.row.kind), taken.row.every is not None
        return core.verdict(kind, recurring, taken.attempts, limit)

    def _beyond(self, taken: Taken) -> bool:
        """Whether it was taken more often than its kind may be.

        Its own policy may allow less, but that is of calls that failed: a process that
        ended, or an owner that did not start, may never have come to call it. A turn has
        a bound that nothing it says sets back: one word in each life would keep it for ever.
        """
        if self._tries_over(taken):
            return True
        least = self.tree.kernel.limits.attempts
        if taken.attempts <= least:
            return False
        limit = max(self._attempt_limit(taken), least)
        if taken.attempts <= limit:
            return False
        return self._verdict(taken, limit) != "keep-trying"

    def _tries_over(self, taken: Taken) -> bool:
        """Whether a turn has had all its tries.

        Who has asked for runs has as many more for each level of them: a run that ends its
        process each time takes its asker along, which is to hear how that came out.
        """
        row, tries = taken.row, self.tree.kernel.limits.tries
        if row.tries <= tries:
            return False
        return row.tries > tries * (1 + self.tree.endings.levels(row.owner, row.what))

    def _cut_off(self, taken: Taken) -> None:
        """No further try of what ended the process each time.

        What recurs gives up this tick, has one life for the next, and then rests as well:
        it would end the process for ever.
        """
        row, why = taken.row, self._why_beyond(taken)
        if row.every is None:
            self._end(taken, why)
            return
        again = row.error is not None and row.error.startswith(_ENDED)
        text = why if again else f"{_ENDED}: {why}" if row.error else why
        limit = max(self._attempt_limit(taken), self.tree.kernel.limits.attempts)
        with self.tree.transaction():
            if again:
                self._bury(taken, text)
            else:
                self._next_tick(taken, text, limit - 1)
        self._tell(taken, "error", text)

    def _why_beyond(self, taken: Taken) -> str:
        why = taken.row.error or _ENDED
        if not self._tries_over(taken):
            return why
        times = taken.row.tries - 1
        return f"taken up {times} times, however far it came (limits.tries): {why}"

    def _missed(self, taken: Taken) -> bool:
        """Move on from a tick that its policy does not make up for; whether it was one."""
        row, now = taken.row, self.tree.now()
        try:
            every = core.decode_every(row.every or "")
        except UNREADABLE:
            return False
        grace_s = self.tree.kernel.limits.misfire_grace_s
        if not core.is_missed(every, row.due_at, now, grace_s) or not self.mine(taken):
            return False
        text = f"skipped: {(now - row.due_at) / 1000:.0f} s late"
        with self.tree.transaction():
            self._next_tick(taken, error=text)
        self._tell(taken, "skip", text)
        return True

    def _done(self, taken: Taken) -> None:
        """Delete the row, or move it to its next tick; guarded by the take."""
        if taken.row.every is None:
            self.db.execute(_DELETE, (taken.row.id, taken.take))
            self.tree.touched()
            taken.over = True
            return
        with self.tree.transaction():
            self._next_tick(taken, error=None)

    def _next_tick(self, taken: Taken, error: str | None, attempts: int = 0) -> None:
        row = taken.row
        assert row.every is not None
        try:
            every = core.decode_every(row.every)
            asked = max(row.due_at, taken.began)  # one that waited for its tick is that
            at = core.next_tick(every, row.at, asked, self.tree.now())
        except UNREADABLE as broken:
            self._bury(taken, f"its recurrence cannot be read: {broken}")
            return
        if at > _INSTANT_MAX:
            self._bury(taken, "its next tick is beyond all time")
            return
        due_at = core.with_jitter(every, at, self.tree.kernel.chance.fraction())
        values = (attempts, at, due_at, error, row.id, taken.take, row.due_at)
        self.db.execute(_TICK, values)
        taken.over = True

    def _failed(
        self,
        taken: Taken,
        error: BaseException,
        *,
        begun: bool = True,
        started: bool = True,
    ) -> None:
        """Book a failed try: back off, or end it by the rule of its kind.

        Its own policy is for the call; where the owner has not `started`, the one of
        the kernel holds.
        """
        if self.tree.closed:
            return  # its hold is void in the next life
        row = taken.row
        text = error_text(error)
        self.tree.report_job(taken, error)
        if not self.mine(taken):
            return
        limits = self.tree.kernel.limits
        limit = self._attempt_limit(taken) if started else limits.attempts
        over = self._verdict(taken, limit) not in ("retry", "keep-trying")
        if over or isinstance(error, Hopeless):
            self._end(taken, text, error, over=over)
            return
        due_at = self._back_off(taken, retry_of(row) if started else None)
        if row.every is not None and row.due_at >= row.at:
            due_at = max(due_at, row.at)  # the clock went back: only who asks is early
        with self.tree.transaction():
            self.db.execute(
                "UPDATE job SET held = NULL, due_at = ?, error = ?, begun = ?"
                " WHERE id = ? AND held = ?",
                (due_at, text, int(begun and row.kind == "turn"), row.id, taken.take),
            )
        taken.over = taken.again = True
        self._tell(taken, "retry", text)

    def _tell(self, taken: Taken, what: str, text: str) -> None:
        row = taken.row
        if (channel := CHANNEL_OF.get(row.kind)) is not None:
            told = Owed(row.what, str(row.id), taken.attempts, text)
            self.tree.emit(f"{channel}:{what}", row.owner, told)

    def _end(
        self,
        taken: Taken,
        text: str,
        error: BaseException | None = None,
        *,
        over: bool = True,
    ) -> None:
        """No further try: of this job, or of this tick.

        Where the error is hopeless and the tries are not `over`, a recurring one moves on
        without forgetting them: it rests after as many ticks.
        """
        recurs = taken.row.every is not None
        if isinstance(error, Hopeless):
            with self.tree.transaction():
                if recurs and not over:
                    self._next_tick(taken, text, taken.attempts)
                else:
                    self._bury(taken, text)
        else:
            self._used_up(taken, text)
        self._tell(taken, "error", text)
        gave_up = self.kinds[taken.row.kind].gave_up
        if gave_up is not None and error is not None:
            gave_up(taken, error)

    def _back_off(self, taken: Taken, policy: core.Retry | None) -> int:
        chance = self.tree.kernel.chance.fraction()
        return core.next_try(policy, taken.attempts, self.tree.now(), chance)

    def _used_up(self, taken: Taken, text: str) -> None:
        row = taken.row
        exhausted = self.kinds[row.kind].exhausted
        if exhausted is not None:
            exhausted(taken, text)
            return
        with self.tree.transaction():
            if row.every is not None:
                self._next_tick(taken, error=text)
            else:
                self._bury(taken, text)

    def _bury(self, taken: Taken, text: str) -> None:
        """Lay a job where somebody sees it; inside the caller's transaction."""
        self.db.execute(
            "UPDATE job SET held = NULL, dead = 1, error = ? WHERE id = ? AND held = ?",
            (text, taken.row.id, taken.take),
        )
        taken.over = True

    def _release(self, taken: Taken) -> None:
        """A hold never outlives its task: due again after its back-off."""
        if self.mine(taken):
            taken.again = True
            self.release([taken.row.id])

    def release(self, ids: list[int], *, planned: bool = False) -> None:
        """Release held jobs now, or as soon as the disk takes it. Never raises."""
        try:
            self.give_back(ids, planned=planned or self.stopped)
        except StorageError as error:
            self.tree.kernel.report("storage", None, error, name=f"holds {ids}")
            takes = [row.held for row in map(self.get, ids) if row is not None]
            self.tree.start_soon(self._release_later, ids, takes)

    async def _release_later(self, ids: list[int], takes: list[int | None]) -> None:
        held = dict(zip(ids, takes, strict=False))
        while held and self.tree.barrier.fenced is None and not self.stopped:
            await trio.sleep(self.tree.kernel.limits.backoff_base_s)
            found = [row for row in map(self.get, held) if row is not None]
            with suppress(StorageError):
                mine = [row.id for row in found if row.held == held[row.id]]
                self.give_back(mine, planned=False)
                return

    def give_back(self, ids: Iterable[int], *, planned: bool) -> None:
        """Release held jobs; a planned stop gives the attempt back and delays nothing."""
        with self.tree.transaction():
            for job_id in ids:
                row = self.get(job_id)
                if row is None or row.held is None:
                    continue
                self.touch(row.owner, row.lane)
                if planned or job_id in self._waiting:
                    self.db.execute(
                        "UPDATE job SET held = NULL, attempts = max(attempts - 1, 0),"
                        " tries = max(tries - 1, 0) WHERE id = ?",
                        (job_id,),
                    )
                    continue
                taken = Taken(row, row.held, begun_before=bool(row.begun))
                self.db.execute(
                    "UPDATE job SET held = NULL, due_at = ? WHERE id = ?",
                    (max(row.due_at, self._back_off(taken, retry_of(row))), job_id),
                )

    def held_by(self, slot: str) -> list[int]:
        """Return ids of the jobs of that owner that are held."""
        sql = "SELECT id FROM job WHERE owner = ? AND held IS NOT NULL"
        return [int(r[0]) for r in self.db.execute(sql, (slot,))]

    def free_lanes(self, slot: str) -> None:
        """A fenced node keeps no lane: its work may be done by a new one."""
        for key in [k for k in self.busy if k[0] == slot]:
            del self.busy[key]
            self.touch(*key)
