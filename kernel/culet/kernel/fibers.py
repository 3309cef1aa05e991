"""Fibers: functions with checkpoints that an agent started itself, and its own turns.

The row and its job are one commit, the job held by whoever runs the function. Ending
the fiber and dropping the job is one commit as well. After a crash the job is due, and
`on_fiber_recovered` says how the fiber ends. A deadline is a job of its own beside it, so
it holds whatever becomes of the process.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, final

import msgspec
import trio

from .calls import json_bytes
from .core.job import is_number
from .core.limits import DELAY_MAX_S, ERROR_CHARS, TERMINALS
from .core.run import Status, error_text
from .endings import Ending, Subject, json_text
from .errors import (
    Deleted,
    FacetAborted,
    NotFound,
    StorageError,
    UsageError,
)
from .events import FiberTold, FiberTry
from .fiberrows import (
    About,
    FiberProgress,
    FiberRecovery,
    FiberResolution,
    FiberRows,
    FiberRun,
    about,
)
from .jobs import JobRow, StartFailed, Taken
from .node import Ambient, Node, Work, ambient, is_stop
from .streams import TurnView
from .tracing import HERE, NO_SPAN, context

if TYPE_CHECKING:
    from .tree import Tree

_INSERT: Final = (
    "INSERT INTO fiber (owner, id, kind, name, key, asker, metadata, status, started_at)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, 'running', ?)"
)
_ASKER: Final = "SELECT asker FROM fiber WHERE owner = ? AND id = ?"
_SEEN: Final = "UPDATE job SET at = ?, payload = ? WHERE id = ? AND held = ?"
DEADLINE: Final = {"fiber": True}  # the payload of its `limit` job
_encode: Final = msgspec.json.Encoder().encode


class _Live:
    """A fiber whose function, or whose recovery hook, runs in this process."""

    __slots__ = (
        "about", "hook", "progress", "scope", "seen_at", "taken", "work", "written",
    )  # fmt: skip

    def __init__(self, taken: Taken, told: About, now: int, *, hook: bool) -> None:
        self.taken, self.about, self.hook = taken, told, hook
        self.scope, self.work = trio.CancelScope(), Work()
        self.progress, self.seen_at = told.progress, now
        self.written = -math.inf  # trio's time of the last report that was stored


@final
class Fibers:
    """The fibers and own turns of one tree."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.db = tree.db
        self.rows = FiberRows(tree)
        self._most = tree.kernel.limits.output_bytes
        self.live: dict[tuple[str, str], _Live] = {}

    # ---- reading

    def get(self, owner: str, fiber_id: str | None, key: str | None) -> FiberRun | None:
        """Return one fiber by id or by key, as it is now."""
        found = self.rows.get(owner, fiber_id, key)
        return None if found is None else self.now(found)

    def now(self, found: FiberRun) -> FiberRun:
        """Return the same with what this process knows and no row has yet."""
        live = self.live.get((found.slot, found.id))
        if live is None or found.status != "running":
            return found
        return msgspec.structs.replace(
            found, seen_at=live.seen_at, progress=live.progress
        )

    def told(self, subject: Subject) -> tuple[FiberTold, int]:
        """Return what events say of a fiber that has not ended yet, and its start."""
        sql = (
            "SELECT f.name, f.started_at, job.payload FROM fiber f LEFT JOIN job ON"
            " job.owner = f.owner AND job.kind = f.kind AND job.what = f.id"
            " WHERE f.owner = ? AND f.id = ?"
        )
        rows = self.db.execute(sql, (subject.owner, subject.id))
        name, started_at, payload = rows[0] if rows else ("", self.tree.now(), None)
        return FiberTold(name, about(payload).keep), int(started_at)

    # ---- running

    def begin(
        self,
        node: Node,
        name: str,
        fiber_id: str,
        key: str | None,
        metadata: Any,
        *,
        keep: bool,
        deadline_s: float | None,
        wait: bool = True,
    ) -> Taken:
        """Write the row and its held job, in one commit; with a deadline its job as well.

        `wait`: whoever starts it waits for its end, here.
        """
        node.check_open()
        tree, now = self.tree, self.tree.now()
        asker = self._asker(node, wait=wait)
        take, lane = tree.jobs.take_number(), f"fiber:{fiber_id}"
        until = None if deadline_s is None else now + _milliseconds(deadline_s)
        told = _encode(About(keep, until, trace=context(tree.kernel.tracer)))
        row = (node.slot, fiber_id, "fiber", name, key, asker, json_text(metadata), now)
        with tree.transaction():
            self.db.execute(_INSERT, row)
            job = tree.jobs.add(
                node.slot, "fiber", fiber_id, at=now, lane=lane,
                payload=msgspec.Raw(told), held=take,
            )  # fmt: skip
            if until is not None:
                tree.jobs.add(
                    node.slot, "limit", fiber_id, at=until,
                    lane=f"limit:fiber:{fiber_id}", payload=DEADLINE,
                )  # fmt: skip
        if tree.kernel.heard:
            subject = Subject("fiber", node.slot, fiber_id, node.slot)
            tree.emit("fiber:start", subject, FiberTold(name, keep))
        stored = JobRow(
            job, node.slot, "fiber", fiber_id, told.decode(), None, now, now, lane, None, None,
            1, 0, take, 0, 0, None, None, now,
        )  # fmt: skip
        return Taken(stored, take, begun_before=False)

    def _asker(self, node: Node, *, wait: bool) -> str | None:
        """Return for whom a fiber works that this code starts, and with whom it ends.

        One that a recovery hook starts and does not wait for goes on where the recovered
        one broke off, so it works for whom that did.
        """
        here = ambient.get()
        asker = here.asker if here is not None and here.node is node else None
        live = None if asker is None or wait else self.live.get((node.slot, asker))
        if live is not None and live.hook:
            rows = self.db.execute(_ASKER, (node.slot, asker))
            return rows[0][0] if rows else None
        return asker

    async def run(
        self,
        node: Node,
        taken: Taken,
        name: str,
        fn: Callable[[], Awaitable[Any]],
        *,
        keep: bool,
    ) -> Any:
        """Run `fn` as that fiber, in this task; its end is in the row before it returns."""
        tree, fiber_id = self.tree, taken.row.what
        subject = Subject("fiber", node.slot, fiber_id, node.slot)
        live = self._enter(node.slot, taken)
        here = ambient.get()
        ctx = (here or Ambient(node))._replace(
            node=node, asker=fiber_id, turn=None, work=live.work
        )
        token = ambient.set(ctx)
        ended = False
        span = self._span(node, name, fiber_id, 1, HERE)
        try:
            with live.scope:
                with span:
                    result = await fn()
                output = json_text(result, "the result of a fiber", self._most)
                ending = Ending.by("finished", output=output)
                ended = tree.endings.settle(subject, ending, taken, forget=not keep)
                if ended:
                    return result
        except BaseException as error:
            if is_stop(error):
                raise
            if not live.scope.cancel_called:
                if not node.fenced and not tree.closed:
                    ending = Ending.by("failed", error_text(error))
                    ended = tree.endings.settle(subject, ending, taken, forget=not keep)
                raise
            # ended by id: what its clean-up raised beside that goes nowhere
        finally:
            ambient.reset(token)
            self.live.pop((node.slot, fiber_id), None)
            if not ended:
                self._let_go(subject, taken)
        found = self.get(node.slot, fiber_id, None)
        raise FacetAborted(None if found is None else found.reason)

    def _span(
        self, node: Node, name: str, fiber_id: str, attempt: int, parent: str | None
    ) -> AbstractContextManager[Any]:
        tracer = self.tree.kernel.tracer
        if tracer is None:
            return NO_SPAN
        about = {"agent": node.path_text(), "run_id": fiber_id, "attempt": attempt}
        return tracer.span("fiber", name, about, parent=parent)

    def _enter(self, slot: str, taken: Taken, *, hook: bool = False) -> _Live:
        live = _Live(taken, about(taken.row.payload), self.tree.now(), hook=hook)
        self.live[slot, taken.row.what] = live
        return live

    def _let_go(self, subject: Subject, taken: Taken) -> None:
        """Its task is over and the fiber is not: who is there next is told of it."""
        tree = self.tree
        if tree.closed or tree.barrier.fenced is not None:
            return
        if tree.kernel.heard and tree.endings.status(subject) == "running":
            tree.emit("fiber:interrupted", subject, self.told(subject)[0])
        if tree.jobs.mine(taken):
            tree.jobs.release([taken.row.id])

    def _here(self, node: Node, what: str) -> _Live:
        """Return the fiber that this task works for."""
        here = ambient.get()
        asker = None if here is None else here.asker
        live = None if asker is None else self.live.get((node.slot, asker))
        if live is None:
            msg = f"{what} belongs into a fiber or a turn"
            raise UsageError(msg)
        node.check()
        return live

    def stash(self, node: Node, data: Any) -> None:
        """Store a checkpoint of the fiber or turn that this task works for."""
        here = ambient.get()
        if here is not None and here.turn is not None:
            here.turn.stash(data)
            return
        live = self._here(node, "stash()")
        text = json_text(data, "a stash", self._most)
        if not self.tree.jobs.stash(live.taken, "null" if text is None else text):
            msg = f"fiber {live.taken.row.what!r} is over"
            raise UsageError(msg)
        live.seen_at = self.tree.now()

    def report(self, node: Node, said: FiberProgress | None) -> None:
        """Note a sign of life, with what the fiber says of itself (None: no news).

        Stored once in `limits.progress_s`, and when it is complete; whoever inspects it
        in this process sees the last one.
        """
        live, tree = self._here(node, "report_progress"), self.tree
        told = About(
            live.about.keep,
            live.about.deadline_at,
            live.progress if said is None else said,
            live.about.trace,
        )
        most = tree.kernel.limits.preview_bytes
        text = json_bytes(told, "the progress of a fiber", most)
        live.progress, live.seen_at = told.progress, tree.now()
        now, complete = trio.current_time(), said is not None and said.fraction == 1
        if complete or now - live.written >= tree.kernel.limits.progress_s:
            live.written = now
            row = (live.seen_at, text.decode(), live.taken.row.id, live.taken.take)
            self.db.execute(_SEEN, row)
            tree.touched()
        if tree.kernel.heard:
            fiber_id = live.taken.row.what
            subject = Subject("fiber", node.slot, fiber_id, node.slot)
            tree.emit("fiber:progress", subject, live.progress)

    def stop(self, slot: str, fiber_id: str, reason: str | None) -> None:
        """End the task of a fiber whose row is settled; its agent lives on.

        What it still does, shielded or in its clean-up, meets a fence.
        """
        live = self.live.get((slot, fiber_id))
        if live is not None:
            live.work.cut(reason)
            live.scope.cancel(reason=reason)

    def cancel(self, found: FiberRun, reason: str | None) -> Status | None:
        """Cancel one: the standing status, None when there is no such fiber any more."""
        subject = Subject(found.kind, found.slot, found.id, found.slot)
        return self.tree.endings.cancel(subject, reason)

    def resolve(self, found: FiberRun, how: FiberResolution) -> bool:
        """End one from outside it; False when it was ended already."""
        subject = Subject(found.kind, found.slot, found.id, found.slot)
        won = self.tree.endings.settle(subject, _ending(how, self._most), None)
        if won:
            self.tree.stop_worker(found.slot, found.id, "resolved")
        return won

    def overdue(self, owner: str, fiber_id: str) -> None:
        """The deadline of a fiber has passed: it ends, with what it waits for."""
        subject = Subject("fiber", owner, fiber_id, owner)
        self.tree.endings.cancel(subject, "deadline", _overdue())

    # ---- recovery

    async def recover(self, taken: Taken) -> bool:
        """Handle a fiber whose function is gone: ask its owner how it ends."""
        row, told = taken.row, about(taken.row.payload)
        subject = Subject("fiber", row.owner, row.what, row.owner)
        found = self.rows.get(row.owner, row.what, None)
        if found is None or found.status != "running":
            self._tell("skipped", subject, taken, found, "ended")
            return True
        self._tell("detected", subject, taken, found)
        if self._skip(subject, taken, found, told):
            return False
        try:
            node = await self.tree.wake(row.owner)
        except UsageError as error:
            raise StartFailed from error
        if not self.tree.jobs.mine(taken):
            return False
        ending = await self._ask(node, subject, taken, found)
        if ending is None:
            return False  # whoever ended it has settled it
        forget = not told.keep and ending.status == "completed"  # as if it had returned
        if self.tree.endings.settle(subject, ending, taken, forget=forget):
            self._tell("handled", subject, taken, found, ending.status)
        return False

    def _skip(
        self, subject: Subject, taken: Taken, found: FiberRun, told: About
    ) -> bool:
        """Settle what is not worth a try any more; whether it was so."""
        now = self.tree.now()
        if told.deadline_at is not None and told.deadline_at <= now:
            why, ending = "deadline", _overdue()
        elif taken.row.error is not None and self._too_old(found):
            why = "max-age"
            ending = Ending.by("recovery-exhausted", taken.row.error)
        else:
            return False
        if self.tree.endings.settle(subject, ending, taken):
            self._tell("skipped", subject, taken, found, why)
        return True

    def _too_old(self, found: FiberRun) -> bool:
        most_ms = self.tree.kernel.limits.fiber_recovery_s * 1000
        return self.tree.now() - found.started_at > most_ms

    async def _ask(
        self, node: Node, subject: Subject, taken: Taken, found: FiberRun
    ) -> Ending | None:
        """Call the hook; None: the fiber was ended meanwhile."""
        told = FiberRecovery(
            id=found.id, name=found.name, key=found.key, status=found.status,
            snapshot=taken.snapshot, metadata=found.metadata, attempt=taken.attempts,
            error=taken.row.error, started_at=found.started_at,
            age_s=max(0, self.tree.now() - found.started_at) / 1000,
        )  # fmt: skip
        self._tell("attempt", subject, taken, found)
        live = self._enter(subject.owner, taken, hook=True)
        answer: FiberResolution | None = None
        try:
            with live.scope:
                ctx = Ambient(node, asker=subject.id, work=live.work)
                trace = live.about.trace
                with self._span(node, found.name, found.id, taken.attempts, trace):
                    answer = await node.enter(ctx, node.agent.on_fiber_recovered, told)
                return _ending(answer, self._most)
        except (FacetAborted, Deleted, StorageError):
            if live.work.is_cut:
                return None  # it met the fence
            raise
        except Exception as error:
            if live.work.is_cut:
                return None
            self._tell("failed", subject, taken, found, error_text(error))
            raise
        finally:
            self.live.pop((subject.owner, subject.id), None)
        return None

    def _tell(
        self,
        what: str,
        subject: Subject,
        taken: Taken,
        found: FiberRun | None,
        outcome: str | None = None,
    ) -> None:
        if self.tree.kernel.heard:
            name = "" if found is None else found.name
            keep = about(taken.row.payload).keep
            told = FiberTry(name, keep, taken.attempts, outcome)
            self.tree.emit(f"fiber:recovery:{what}", subject, told)

    def exhausted(self, taken: Taken, text: str) -> None:
        """Settle a fiber whose attempts are used up."""
        subject = Subject("fiber", taken.row.owner, taken.row.what, taken.row.owner)
        ending = Ending.by("recovery-exhausted", text)
        self.tree.endings.settle(subject, ending, taken)

    # ---- own turns

    def start_turn(
        self,
        node: Node,
        turn_id: str,
        *,
        name: str,
        lane: str,
        payload: dict[str, Any],
        key: str | None = None,
        metadata: Any = None,
    ) -> str:
        """Owe a turn of the agent's own, in one commit; a known key returns its turn.

        Of `metadata` the keys `messageIds` and `continuation` are for its view.
        """
        node.check_open()
        tree, now = self.tree, self.tree.now()
        if key is not None:
            known = self.get(node.slot, None, key)
            if known is not None:
                return known.id
        view = TurnView(turn_id, metadata)
        view.peers = dict.fromkeys(tree.sockets.protocol_of(node.slot))
        stream = tree.streams.fresh(node.slot, turn_id, view)
        take: int | None = None
        about = json_text(metadata)
        try:
            with tree.transaction():
                self.db.execute(
                    _INSERT, (node.slot, turn_id, "turn", name, key, None, about, now)
                )
                tree.budgets.ask_turn(node, turn_id)
                if tree.jobs.idle(node.slot, lane):
                    take = tree.jobs.take_number()
                job = tree.jobs.add(
                    node.slot,
                    "turn",
                    turn_id,
                    at=now,
                    lane=lane,
                    payload=payload,
                    held=take,
                    begun=take is not None,
                )
        except Exception:
            tree.streams.drop(stream)
            raise
        stream.open()
        if take is not None:
            tree.start_job(tree.jobs.born_taken(job, take))
        return turn_id

    async def join(self, owner: str, turn_id: str) -> FiberRun:
        """Wait for the end of a fiber or own turn and return its row."""
        while True:
            found = self.get(owner, turn_id, None)
            if found is None:
                msg = f"there is no fiber {turn_id!r}"
                raise NotFound(msg)
            if found.status != "running":
                return found
            await self.tree.endings.over(owner, turn_id)


def _ending(how: FiberResolution | None, most: int) -> Ending:
    """Return how a fiber ends by what a hook, or somebody outside, says."""
    if how is None:
        return Ending.by("not-resumed")
    if not isinstance(how, FiberResolution) or how.status not in TERMINALS:
        msg = f"a fiber ends as a FiberResolution says, not {how!r}"
        raise UsageError(msg)
    output = json_text(how.result, "the result of a fiber", most)
    error = None if how.error is None else str(how.error)[:ERROR_CHARS]
    return Ending(how.status, None, error, output=output)


def _overdue() -> Ending:
    return Ending.by("deadline", "its deadline has passed")


def _milliseconds(deadline_s: float) -> int:
    if not is_number(deadline_s) or not 0 < deadline_s <= DELAY_MAX_S:
        msg = f"deadline_s is a number of seconds above 0, not {deadline_s!r}"
        raise UsageError(msg)
    return max(1, round(deadline_s * 1000))
