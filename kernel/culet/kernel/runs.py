"""Agent-tool runs: a facet asked to do one thing, durable, idempotent, observable.

The row is written first, with its job, in one commit; a known id never starts a second
turn. Waiters of a run share one event and read the row. Cancelling a waiting caller is
losing an observer: only a cancel by id stops a run, and everything below it.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final, final

import msgspec
import trio

from . import runtree
from .calls import json_bytes, stored_json
from .core import frames
from .core import run as core
from .core.attach import Known
from .core.budget import Budget, Short, Spent
from .core.job import is_number
from .core.limits import ORDER_MAX
from .core.path import check_name
from .core.places import Want
from .core.questions import Policy, check_policy
from .core.run import AgentToolRun, Status
from .detached import Detached, arm, count, stored
from .endings import Ending, Subject, Watch, json_text
from .errors import (
    CapacityError,
    Deleted,
    InternalError,
    NotFound,
    StorageError,
    UsageError,
)
from .node import Ambient, Node, ambient, starting
from .places import Places
from .ports import Blob
from .receipts import CancelReceipt, DroppedCall, EndedWork
from .streams import Cursor, RunView
from .tracing import KEY, context
from .turn import CancelToken

if TYPE_CHECKING:
    from .classes import AgentClass
    from .tree import Tree

log = logging.getLogger("culet.kernel")
_COLUMNS: Final = (
    "id, class, status, tool_call_id, display_order, display, preview, output, summary,"
    " error, error_id, reason, usage, n, started_at, completed_at,"
    " (SELECT json_object('tokens', tokens_spent + tokens_over,"
    " 'cost', cost_spent + cost_over, 'calls', calls_spent + calls_over,"
    " 'over', json_object('tokens', tokens_over, 'cost', cost_over, 'calls', calls_over))"
    " FROM account WHERE account.slot = run.child AND account.what = run.id)"
)
_JSON: Final = (5, 6, 7, 12, 16)
_INSERT: Final = (
    "INSERT INTO run (owner, id, child, class, asker, tool_call_id, display_order,"
    " display, preview, input_digest, detached, status, started_at, place)"
    " VALUES (?,?,?,?,?,?,?,?,?,?,?,'running',?,?)"
)


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """How a run is asked for; see `Agent.run_agent_tool`."""

    run_id: str | None = None
    tool_call_id: str | None = None
    order: int = 0
    display: Any = None
    preview: Any = None
    cancel: CancelToken | None = None
    detached: Detached | None = None
    no_progress_s: float | None = None
    check: Callable[[Any], Any] | None = None
    questions: Policy | None = None  # None: as the asker's class says
    schema: Any = None  # of what `check` lets pass, for a life that does not have it
    budget: Budget | None = None


def to_run(row: tuple[Any, ...]) -> AgentToolRun:
    """Return the public record of a row of `_COLUMNS`."""
    values = list(row)
    for at in _JSON:
        values[at] = stored_json(values[at])
    (run_id, cls, status, call, order, display, preview, output, summary, error,
     error_id, reason, usage, n, started_at, completed_at, total) = values  # fmt: skip
    return AgentToolRun(
        run_id=run_id, agent_type=cls, status=status, parent_tool_call_id=call,
        order=order, display=display, preview=preview, output=output, summary=summary,
        error=error, error_id=error_id, reason=reason, usage=usage, n=n,
        started_at=started_at,
        completed_at=completed_at,
        total=None if total is None else msgspec.convert(total, Spent),
    )  # fmt: skip


@final
class Runs:
    """The runs that agents of one tree asked for."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.db = tree.db
        self.places = Places(tree)
        self.validators: dict[tuple[str, str], Callable[[Any], Any]] = {}
        # of detached runs: whose cancelling ends them, as long as they go on
        self.tokens: dict[
            tuple[str, str], tuple[CancelToken, Callable[[str | None], object]]
        ] = {}

    # ---- reading

    def get(self, owner: str, run_id: str) -> AgentToolRun | None:
        """Return one run of that parent."""
        sql = f"SELECT {_COLUMNS} FROM run WHERE owner = ? AND id = ?"
        rows = self.db.execute(sql, (owner, run_id))
        return to_run(rows[0]) if rows else None

    def of_child(self, child: str, run_id: str) -> AgentToolRun | None:
        """Return the run whose facet has that slot."""
        sql = f"SELECT {_COLUMNS} FROM run WHERE child = ? AND id = ?"
        rows = self.db.execute(sql, (child, run_id))
        return to_run(rows[0]) if rows else None

    def has_ended(self, child: str, run_id: str) -> bool:
        """Whether there is such a run and it has ended; its row may be large."""
        sql = "SELECT status <> 'running' FROM run WHERE child = ? AND id = ?"
        rows = self.db.execute(sql, (child, run_id))
        return bool(rows and rows[0][0])

    def all(
        self,
        owner: str,
        *,
        status: Status | None = None,
        agent_type: str | None = None,
        parent_tool_call_id: str | None = None,
        limit: int | None = None,
        after: str | None = None,
    ) -> list[AgentToolRun]:
        """Return runs of that parent in the order of their start."""
        sql = (
            f"SELECT {_COLUMNS} FROM run WHERE owner = ?1"
            " AND (?2 IS NULL OR status = ?2) AND (?3 IS NULL OR class = ?3)"
            " AND (?4 IS NULL OR tool_call_id = ?4)"
            " AND born > coalesce((SELECT born FROM run WHERE owner = ?1 AND id = ?5), 0)"
            " ORDER BY born LIMIT ?6"
        )
        most = self.tree.kernel.limits.retained_runs
        count = most if limit is None else max(0, min(limit, most))
        params = (owner, status, agent_type, parent_tool_call_id, after, count)
        return [to_run(r) for r in self.db.execute(sql, params)]

    def cursors(
        self, owner: str, known: Mapping[str, Known]
    ) -> tuple[list[Cursor], list[str]]:
        """Return a replay cursor per run of that parent that a client lacks some of.

        Oldest first, of the newest runs; and the runs that it knows and that are gone.
        """
        sql = (
            "SELECT child, id, started_at, n FROM run WHERE owner = ?"
            " ORDER BY born DESC LIMIT ?"
        )
        rows = self.db.execute(sql, (owner, self.tree.kernel.limits.retained_runs))
        cursors: list[Cursor] = []
        gone = [run_id for run_id in known if self._row(owner, run_id) is None]
        for child, run_id, started_at, n in reversed(rows):
            after, had = -1, known.get(run_id)
            other = had is not None and had.started_at != started_at
            if had is not None and (other or (n is not None and had.sequence > n + 1)):
                gone.append(run_id)  # that one was cleared, this is another
            elif had is not None:
                after = had.sequence
            if n is None or after <= n:
                cursors.append(Cursor(child, run_id, "run", after))
        return cursors, gone

    # ---- asking

    async def run(
        self, node: Node, kind: AgentClass, value: Any, ask: Ask
    ) -> AgentToolRun:
        """Dispatch, and wait for the end unless detached."""
        tracer = self.tree.kernel.tracer
        if tracer is None:
            return await self._run(node, kind, value, ask)
        with tracer.span("run", kind.name, {"agent": node.path_text()}):
            return await self._run(node, kind, value, ask)

    async def _run(
        self, node: Node, kind: AgentClass, value: Any, ask: Ask
    ) -> AgentToolRun:
        if starting.get() is not None and ask.detached is None:
            msg = (
                "a run awaited in on_start could only begin after it: make it detached"
            )
            raise UsageError(msg)
        queues = node.agent.max_queued_agent_tools and starting.get() is None
        if queues and self._row(node.slot, self._named(ask)[0]) is None:
            want = Want(kind.name, ask.detached is not None)
            await self.places.wait(node, want, ask.cancel)
        try:
            run, known = self.dispatch(node, kind, value, ask)
        finally:
            self.places.freed(node.slot)  # refused, or known already: the next one
        if self.tree.kernel.tracer is not None:
            self.tree.kernel.tracer.note({"run_id": run.run_id})
        here = ambient.get()
        if known and here is not None and here.turn is not None:
            self.tree.questions.tell(here.turn)  # what is asked below may be another
        if known and run.status == "running":
            ask = self._attached(node, run, ask)
        if ask.detached is not None or run.status != "running":
            if ask.cancel is not None and run.status == "running":
                cancel = partial(self.cancel, node.slot, run.run_id)
                self.tokens[node.slot, run.run_id] = (ask.cancel, cancel)
                ask.cancel.on_cancel(cancel)
            await trio.lowlevel.checkpoint()
            return run
        if known:
            return await self._rejoin(node, run.run_id, ask)
        return await self.join(node, run.run_id, ask)

    def dispatch(
        self, node: Node, kind: AgentClass, value: Any, ask: Ask
    ) -> tuple[AgentToolRun, bool]:
        """Write the run and its job in one commit; (its run, True) for a known id."""
        node.check_open()
        self.tree.emit("run:ask", node.slot, kind.name)
        if not kind.is_tool:
            msg = f"{kind.name} cannot be run as a tool: give it an on_turn"
            raise UsageError(msg)
        most = self.tree.kernel.limits.input_bytes
        text = json_bytes(value, f"the input of {kind.name}", most)
        check_policy(ask.questions or node.agent.agent_tool_questions)
        self._check_place(ask)
        self._check_shown("display", ask.display)
        if not callable(ask.preview):
            self._check_shown("preview", ask.preview)
        named, derived = self._named(ask)
        run_id = named or self.tree.kernel.chance.id()
        digest = core.input_digest(core.steady_json(value))
        known = self._known(node, kind, run_id, digest, derived=derived)
        if known is not None:
            return known, True
        refusal = self._refusal(node, kind, ask, run_id)
        if refusal is not None:
            return self._refused(node, kind, ask, run_id, refusal), False
        preview = ask.preview
        if callable(preview):
            preview = preview(value)
            self._check_shown("preview", preview)
        if preview is None:
            limit = self.tree.kernel.limits.preview_bytes
            preview = core.shape_preview(msgspec.json.decode(text), limit)
        return self._insert(node, kind, ask, run_id, text, digest, preview), False

    def _named(self, ask: Ask) -> tuple[str | None, bool]:
        """Return the id that a run has by itself, and whether a tool call gave it."""
        if ask.run_id is not None:
            return check_name(ask.run_id), False
        here = ambient.get()
        if here is not None and here.tool_call is not None:
            return core.derive_run_id(*here.tool_call), True
        return None, False

    def _check_place(self, ask: Ask) -> None:
        """Refuse what says where clients show a run and is not of its type."""
        if not isinstance(ask.tool_call_id, str | None):
            kind = type(ask.tool_call_id).__name__
            raise UsageError(f"parent_tool_call_id is a text, not a {kind}")
        self._check_shown("parent_tool_call_id", ask.tool_call_id)
        if not isinstance(ask.order, int) or abs(ask.order) > ORDER_MAX:
            msg = (
                f"display_order is a whole number up to {ORDER_MAX}, not {ask.order!r}"
            )
            raise UsageError(msg)

    def _check_shown(self, what: str, value: Any) -> None:
        """Refuse what every client would get and is too much for that."""
        limit = self.tree.kernel.limits.shown_bytes
        size = len((json_text(value) or "").encode())
        if size > limit:
            msg = f"the {what} of a run has {size} bytes, the limit is {limit}"
            raise CapacityError(msg)

    def _attached(self, node: Node, run: AgentToolRun, ask: Ask) -> Ask:
        """Somebody joins a run that goes on: with patience that ends, and its check."""
        limits = self.tree.kernel.limits
        if ask.check is not None:
            self.validators.setdefault((node.slot, run.run_id), ask.check)
        if ask.no_progress_s is None:
            ask = msgspec.structs.replace(ask, no_progress_s=limits.reattach_s)
        child = self._row(node.slot, run.run_id)
        assert child is not None  # it was found in this step
        subject = Subject("run", node.slot, run.run_id, child)
        self.tree.emit("run:reattach", subject, ask.no_progress_s)
        return ask

    def subject(self, owner: str, run_id: str) -> Subject | None:
        """Return who a run is; None when there is no such run."""
        child = self._row(owner, run_id)
        return None if child is None else Subject("run", owner, run_id, child)

    def policy(self, owner: str, run_id: str) -> Detached | None:
        """Return how a detached run is followed; None for one that is waited for."""
        sql = "SELECT detached FROM run WHERE owner = ? AND id = ?"
        rows = self.db.execute(sql, (owner, run_id))
        return stored(rows[0][0]) if rows else None

    def _row(self, owner: str, run_id: str | None) -> str | None:
        """Return the slot of a run's facet; None when there is no such run."""
        sql = "SELECT child FROM run WHERE owner = ? AND id = ?"
        rows = self.db.execute(sql, (owner, run_id))
        return str(rows[0][0]) if rows else None

    def _known(
        self, node: Node, kind: AgentClass, run_id: str, digest: str, *, derived: bool
    ) -> AgentToolRun | None:
        sql = "SELECT input_digest, class, child FROM run WHERE owner = ? AND id = ?"
        rows = self.db.execute(sql, (node.slot, run_id))
        if not rows:
            return None
        child = self.tree.child_slot(node.slot, kind, run_id)
        if rows[0][1] != kind.name and rows[0][2] != child:  # nor was it upgraded to it
            msg = f"run {run_id!r} is a {rows[0][1]}, not a {kind.name}"
            raise UsageError(msg)
        if rows[0][0] != digest:
            if derived:
                msg = f"tool call of run {run_id!r} came again with another input"
                raise InternalError(msg)
            log.warning(
                "run %r exists with another input; it is returned as it is", run_id
            )
        return self.get(node.slot, run_id)

    def _refusal(
        self, node: Node, kind: AgentClass, ask: Ask, run_id: str
    ) -> tuple[str, str] | Short | None:
        tree = self.tree
        depth = tree.kernel.limits.depth
        if len(node.lineage()) >= depth:
            return "depth", f"a run would be deeper than {depth}"
        full = tree.quotas.full(node.slot)
        if full is not None and not tree.child_slot(node.slot, kind, run_id):
            return "capacity", full
        if ask.cancel is not None and ask.cancel.cancelled:
            return None  # it ends before it begins, and takes nobody's place
        full_at = self.places.full(node, Want(kind.name, ask.detached is not None))
        if full_at is not None:
            return "capacity", full_at.text
        here = ambient.get()
        payer = None if here is None else here.pays
        return tree.budgets.refusal(payer, ask.budget)

    def _refused(
        self, node: Node, kind: AgentClass, ask: Ask, run_id: str,
        why: tuple[str, str] | Short,
    ) -> AgentToolRun:  # fmt: skip
        """Leave no row: the result has the real id, the frames one that is never stored."""
        now, returns = self.tree.now(), isinstance(why, Short) and why.may_return
        reason, error = ("budget", why.text()) if isinstance(why, Short) else why
        told = AgentToolRun(
            run_id=run_id, agent_type=kind.name, status="error", reason=reason,
            error=error, parent_tool_call_id=ask.tool_call_id, order=ask.order,
            display=ask.display, n=0, started_at=now, completed_at=now,
            may_return=returns,
        )  # fmt: skip
        fresh = self.tree.kernel.chance.id()
        shown = msgspec.structs.replace(told, run_id=fresh, started_at=0)
        blob = Blob(frames.started(shown), frames.terminal(shown))
        self.tree.sockets.push_all(node.slot, blob)
        if node.kind.hears_finish:  # nothing is stored that could owe it
            node.hook(Ambient(node), node.agent.on_agent_tool_finish, told)
        return told

    def _insert(
        self,
        node: Node,
        kind: AgentClass,
        ask: Ask,
        run_id: str,
        text: bytes,
        digest: str,
        preview: Any,
    ) -> AgentToolRun:
        tree = self.tree
        tree.order.say_own()
        stillborn = ask.cancel is not None and ask.cancel.cancelled
        run = AgentToolRun(
            run_id=run_id, agent_type=kind.name, parent_tool_call_id=ask.tool_call_id,
            order=ask.order, display=ask.display, preview=preview, started_at=tree.now(),
        )  # fmt: skip
        # one that is cancelled before it begins has no child and calls no model
        known = None if stillborn else tree.child_slot(node.slot, kind, run_id)
        child = known or tree.kernel.chance.id()
        subject = Subject("run", node.slot, run_id, child)
        payload = self._payload(node, ask, text)
        view = RunView(run)
        view.peers = dict.fromkeys(tree.sockets.protocol_of(node.slot))
        stream = tree.streams.fresh(
            child, run_id, view, *tree.own_views(child, kind, run_id)
        )
        job, take = 0, None
        try:
            with tree.transaction():
                if not stillborn:
                    tree.insert_node(child, node.slot, kind, run_id)
                self._write(subject, run, digest, ask)
                if not stillborn:
                    job, take = self._owe(subject, kind, ask, payload, run.started_at)
                if ask.detached is not None:
                    arm(tree, node.slot, run_id, ask.detached, run.started_at)
        except Exception:
            tree.streams.drop(stream)
            raise
        stream.open()
        if ask.check is not None:
            self.validators[node.slot, run_id] = ask.check
        self._tell_begun(node, subject, run, detached=ask.detached is not None)
        if stillborn:
            reason = None if ask.cancel is None else ask.cancel.reason
            tree.endings.settle(subject, Ending.by("cancelled", reason=reason), None)
            return self.get(node.slot, run_id) or run
        if take is not None:
            tree.start_job(tree.jobs.born_taken(job, take))
        return run

    def _payload(self, node: Node, ask: Ask, text: bytes) -> dict[str, Any]:
        """Return what the job of a run's turn carries; `text` is the input as JSON."""
        payload: dict[str, Any] = {"input": msgspec.Raw(text)}
        here = ambient.get()
        if here is not None and here.identity is not None:
            payload["identity"] = here.identity
        if ask.schema is not None:
            payload["schema"] = ask.schema
        trace = context(self.tree.kernel.tracer)
        if trace is not None:
            payload[KEY] = trace
        questions = ask.questions or node.agent.agent_tool_questions
        if questions != "bubble":
            payload["questions"] = questions
        return payload

    def _write(
        self, subject: Subject, run: AgentToolRun, digest: str, ask: Ask
    ) -> None:
        """Insert the row, inside the transaction of its dispatch."""
        here = ambient.get()
        self.db.execute(
            _INSERT,
            (
                subject.owner, run.run_id, subject.slot, run.agent_type,
                here.asker if here is not None and ask.detached is None else None,
                run.parent_tool_call_id, run.order, json_text(run.display),
                json_text(run.preview), digest,
                None if ask.detached is None else json_text(ask.detached),
                run.started_at, self.tree.order.take(),
            ),
        )  # fmt: skip

    def _owe(
        self,
        subject: Subject,
        kind: AgentClass,
        ask: Ask,
        payload: dict[str, Any],
        now: int,
    ) -> tuple[int, int | None]:
        """Reserve its budget and owe its turn: the job, and its take if it begins at once."""
        tree, here, child = self.tree, ambient.get(), subject.slot
        tree.budgets.open_run(
            subject,
            None if here is None else here.pays,
            ask.budget,
            loose=ask.detached is not None,
        )
        lane = kind.cls.turn_lane or f"turn:{subject.id}"
        take = tree.jobs.take_number() if tree.jobs.idle(child, lane) else None
        job = tree.jobs.add(
            child,
            "turn",
            subject.id,
            at=now,
            lane=lane,
            payload=payload,
            held=take,
            begun=take is not None and not kind.start_may_be_repeated,
        )
        return job, take

    def _tell_begun(
        self, node: Node, subject: Subject, run: AgentToolRun, *, detached: bool
    ) -> None:
        """Tell whoever listens that a run was asked for."""
        tree = self.tree
        tree.emit("run:start", subject, None)
        runtree.tell(tree, subject, "asked")
        if detached:
            self._count_detached(node)
        self._count_retained(node)
        if node.kind.hears_start:
            node.hook(Ambient(node), node.agent.on_agent_tool_start, run)

    def _count_detached(self, node: Node) -> None:
        """Warn once when so many go on that nobody may be looking any more."""
        limit = self.tree.kernel.limits.many_detached
        if count(self.tree, node.slot) == limit:
            log.warning("%r has %d detached runs going on", node, limit)
            self.tree.emit("run:many_detached", node.slot, limit)

    def _count_retained(self, node: Node) -> None:
        """Warn once when so many are kept that clearing may have been forgotten."""
        slot, limit = node.slot, self.tree.kernel.limits.many_retained
        sql = "SELECT count(*) FROM (SELECT 1 FROM run WHERE owner = ? LIMIT ?)"
        if self.db.execute(sql, (slot, limit + 1)) == [(limit,)]:
            log.warning("%r keeps %d runs; runs.clear() forgets some", node, limit)
            self.tree.emit("run:many_retained", slot, limit)

    def over(self, owner: str, run_id: str) -> None:
        """A run has ended: nothing is kept for it."""
        self.validators.pop((owner, run_id), None)
        self.places.ended(owner)
        self.tree.milestones.over(owner, run_id)
        token = self.tokens.pop((owner, run_id), None)
        if token is not None:
            token[0].forget(token[1])

    # ---- waiting

    async def _rejoin(self, node: Node, run_id: str, ask: Ask) -> AgentToolRun:
        """Wait for a run that went on already; how this waiter leaves it is counted."""
        subject = self.subject(node.slot, run_id)
        outcome = "lost"
        try:
            run = await self.join(node, run_id, ask)
            outcome = run.reason or "" if run.status == "running" else run.status
        finally:
            self.tree.kernel.reattached[outcome] += 1
            self.tree.emit("run:reattached", subject, outcome)
        return run

    async def join(self, node: Node, run_id: str, ask: Ask) -> AgentToolRun:
        """Wait for the end of a run; a waiter that gives up changes nothing."""
        owner = node.slot

        def cancel(reason: str | None) -> None:
            self.cancel(owner, run_id, reason)

        if ask.cancel is not None:
            ask.cancel.on_cancel(cancel)
        try:
            while True:
                run = self.get(owner, run_id)
                if run is None:
                    msg = f"run {run_id!r} is gone with whom it belonged to"
                    raise Deleted(msg)
                if run.status != "running":
                    return run
                watch = self.tree.endings.watch(owner, run_id)
                if not await self._wait(watch, owner, run_id, ask.no_progress_s):
                    return msgspec.structs.replace(run, reason="no-progress")
                if watch.run is not None:  # whatever became of its row since
                    return watch.run
        finally:
            if ask.cancel is not None:
                ask.cancel.forget(cancel)

    async def _wait(
        self, watch: Watch, owner: str, run_id: str, no_progress_s: float | None
    ) -> bool:
        """Wait for the end; False when nothing was said for that long."""
        if no_progress_s is None:
            await watch.over.wait()
            return True
        said = self._said(owner, run_id)
        with trio.move_on_after(no_progress_s):
            await watch.over.wait()
            return True
        return self._said(owner, run_id) != said or self.parked(owner, run_id)

    def parked(self, owner: str, run_id: str) -> bool:
        """Whether a run, or what it waits for, waits for a person: nothing bounds that."""
        subject = self.subject(owner, run_id)
        if subject is None:
            return False
        live = self.tree.turns.live
        turns = [subject, *self.tree.endings.asked_by(subject)]
        found = [live.get((one.slot, one.id)) for one in turns]
        return any(turn is not None and turn.parked for turn in found)

    def _said(self, owner: str, run_id: str) -> int:
        child = self._row(owner, run_id)
        stream = None if child is None else self.tree.streams.find(child, run_id)
        return 0 if stream is None else stream.committed + len(stream.staged)

    # ---- ending and showing

    def cancel(
        self,
        owner: str,
        run_id: str,
        reason: str | None = None,
        *,
        ending: Ending | None = None,
    ) -> Status | None:
        """Cancel by id: the standing status, None when there is no such run.

        `ending` says otherwise how it ends (a budget that is over).
        """
        child = self._row(owner, run_id)
        if child is None:
            return None
        subject = Subject("run", owner, run_id, child)
        return self.tree.endings.cancel(subject, reason, ending)

    async def stop(
        self, owner: str, run_id: str, reason: str | None = None
    ) -> CancelReceipt:
        """Cancel by id and wait until the code of it has stopped; say what was done."""
        began = trio.current_time()
        subject = self.subject(owner, run_id)
        if subject is None:
            await trio.lowlevel.checkpoint_if_cancelled()
            return CancelReceipt(run_id=run_id, status=None)
        done = self.tree.endings.cancelled(subject, reason)
        run = self.get(owner, run_id)
        stands = CancelReceipt(
            run_id=run_id, status=done.status,
            reason=None if run is None else run.reason,
        )  # fmt: skip
        if not done.told:
            await trio.lowlevel.checkpoint_if_cancelled()
            return stands
        path = cache(self.tree.path_of)
        ended = [
            EndedWork(
                kind=s.kind, path=path(s.slot), id=s.id, status=e.status,
                reason=e.reason,
            )
            for s, e, _n in done.told
        ]  # fmt: skip
        calls = [
            DroppedCall(
                kind=row.kind, path=path(row.owner), id=str(row.id), callback=row.what
            )
            for row in done.calls
        ]
        nodes: list[tuple[str, str]] = []
        if done.stopping is not None:
            await done.stopping.over.wait()
            nodes = done.stopping.nodes
        return msgspec.structs.replace(
            stands, ended=True, runs=[e for e in ended if e.kind == "run"],
            fibers=[e for e in ended if e.kind != "run"], calls=calls,
            questions=done.questions, nodes=nodes,
            elapsed_s=trio.current_time() - began,
        )  # fmt: skip

    async def replay(self, owner: str, run_id: str, after: int) -> AsyncIterator[Any]:
        """Yield the frames after number `after`, decoded; then end.

        What was committed when it was first asked for one is made durable, and so is there:
        who has just heard that a run ended finds its end.
        """
        await self.tree.durable()
        child = self._row(owner, run_id)
        if child is None:
            msg = f"there is no run {run_id!r}"
            raise NotFound(msg)
        cursor = Cursor(child, run_id, "run", after)
        limit = self.tree.kernel.limits.replay_page_bytes
        over = False
        while not over:
            page, over = self.tree.streams.pull(None, cursor, limit)
            for text in page.texts:
                yield msgspec.json.decode(text)
            await trio.lowlevel.checkpoint()

    async def clear(
        self, node: Node, *, status: Status | None, older_than: int | None
    ) -> int:
        """Forget runs: cancel what goes on, wipe the facets, drop the rows.

        With `older_than` alone only what has ended is meant.
        """
        count = 0
        if older_than is not None and not is_number(older_than):
            msg = f"older_than is an instant in milliseconds, not {older_than!r}"
            raise UsageError(msg)
        for run in self.all(node.slot, status=status):
            if older_than is not None and (
                run.started_at >= older_than
                or (status is None and run.status == "running")
            ):
                continue
            count += await self.forget(node, run.run_id)
        return count

    async def forget(self, node: Node, run_id: str) -> bool:
        """Forget one run and wipe its facet; False when somebody has done so already."""
        node.check()
        child = self._row(node.slot, run_id)
        if child is None:
            return False
        self.cancel(node.slot, run_id, ending=Ending.by("forgotten"))
        self._forget(node, run_id)
        if self.tree.is_live_slot(child):
            try:  # no await before its commit: with the row it is one step
                await self.tree.delete(child)
            except StorageError as error:
                self.tree.fail(error)  # half of it: back to the last record
                raise
        return True

    def _forget(self, node: Node, run_id: str) -> None:
        """Drop the row of a run that has ended; whoever shows it drops it as well.

        A hook that is owed is told with what the row said; a delivery is not made.
        """
        run = self.get(node.slot, run_id)
        assert run is not None
        owed = (
            "owner = ? AND kind IN ('hook', 'deliver', 'limit') AND what = ?"
            " AND held IS NULL"
        )
        mine = (node.slot, run_id)
        sql = f"SELECT 1 FROM job WHERE {owed} AND kind = 'hook'"
        with self.tree.transaction():
            hook = self.db.execute(sql, mine) and node.kind.hears_finish
            self.tree.jobs.drop(owed, mine)
            self.tree.budgets.forget(self._row(*mine) or "", run_id)
            self.tree.order.cleared(node.slot, run)
            self.db.execute("DELETE FROM run WHERE owner = ? AND id = ?", mine)
            if hook:
                self.tree.jobs.add(
                    node.slot, "hook", run_id, at=self.tree.now(),
                    lane=f"hook:{run_id}", payload={"run": run},
                )  # fmt: skip
        blob = Blob(frames.cleared(run))  # after its last frame, which waits as well
        push = partial(self.tree.sockets.push_all, node.slot, blob)
        self.tree.barrier.after.append(push)
        self.tree.barrier.touched()
