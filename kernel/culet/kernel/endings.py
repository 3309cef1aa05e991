"""How runs, fibers and turns end: one step, the first that commits stands for ever.

Settling flushes what the stream has staged, then makes ONE commit in `tree.db`: the
guarded status, the length of the stream, the job that is no longer owed, the runs and
fibers that this one was waiting for (`aborted`, reason `asker-ended`; detached ones go
on), and the hook or delivery that is owed now. Then waiters and clients are told, all
from the committed row. The loser of a race reads the winner and emits nothing.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

import trio

from . import runtree
from .calls import json_bytes, stored_json
from .core.limits import DEPTH_MAX, ERROR_CHARS
from .core.run import AgentToolRun, Status, storable
from .core.status import Cause, own_words, settled
from .errors import CuletError, UsageError
from .events import CHANNEL_OF, FiberEnded, Owed
from .jobrows import COLUMNS, JobRow
from .node import State
from .receipts import Withdrawn
from .sql import end_stale
from .streams import End, Stream

if TYPE_CHECKING:
    from .jobs import Taken
    from .stops import Stopping
    from .tree import Tree
    from .turn import Turn

BELOW: Final = (
    "WITH RECURSIVE sub (slot) AS (SELECT ? UNION SELECT node.slot FROM node"
    " JOIN sub ON node.parent = sub.slot) "
)
_END_RUN: Final = (
    "UPDATE run SET status = ?, reason = ?, error = ?, error_id = ?, output = ?,"
    " summary = ?, usage = ?, n = ?, completed_at = max(started_at, ?), end_place = ?"
    " WHERE owner = ? AND id = ?"
    " AND status = 'running'"
)
_END_FIBER: Final = (
    "UPDATE fiber SET status = ?, reason = ?, error = ?, error_id = ?, result = ?, n = ?,"
    " completed_at = max(started_at, ?) WHERE owner = ? AND id = ? AND status = 'running'"
)
_FORGET_FIBER: Final = (
    "DELETE FROM fiber WHERE owner = ? AND id = ? AND status = 'running'"
)
_JOB_OF_TURN: Final = "owner = ? AND kind = 'turn' AND what = ?"
_JOBS_OF_FIBER: Final = (  # with its deadline; a run may have the same id, and a budget
    "owner = ? AND kind IN ('fiber', 'limit') AND what = ?"
    " AND (kind = 'fiber' OR payload IS NOT NULL)"
)
_LIMITS_OF_RUN: Final = "owner = ? AND kind = 'limit' AND what = ? AND payload IS NULL"
_RUN_OF_CHILD: Final = "SELECT owner, id, child FROM run WHERE child = ? AND id = ?"
_ASKED_RUNS: Final = (
    "SELECT owner, id, child FROM run"
    " WHERE owner = ? AND asker = ? AND status = 'running' ORDER BY born"
)
_LEVELS: Final = (
    "WITH RECURSIVE asked (slot, id, level) AS (SELECT ?, ?, 0 UNION ALL"
    " SELECT run.child, run.id, level + 1 FROM run JOIN asked"
    f" ON run.owner = asked.slot AND run.asker = asked.id WHERE level < {DEPTH_MAX})"
    " SELECT max(level) FROM asked"
)
_ASKED_FIBERS: Final = (
    "SELECT owner, id, kind FROM fiber"
    " WHERE owner = ? AND asker = ? AND status = 'running' ORDER BY born"
)
_CALLS_BELOW: Final = (  # that its code made, or a facet which is there for a run below
    f"{BELOW}SELECT {COLUMNS} FROM job WHERE owner IN (SELECT slot FROM sub)"
    " AND kind IN ('call', 'queue') AND (maker IS NOT NULL OR owner IN"
    " (SELECT child FROM run WHERE owner IN (SELECT slot FROM sub))) ORDER BY id"
)
_CHILDREN_BELOW: Final = (
    f"{BELOW}SELECT child FROM run WHERE owner IN (SELECT slot FROM sub)"
)


class Subject(NamedTuple):
    """What ends. `slot` is where its code runs and its stream lies.

    A run: `owner` is the parent that asked. A fiber or own turn: `owner` is `slot`.
    """

    kind: str  # run | turn | fiber
    owner: str
    id: str
    slot: str


@dataclass(slots=True)
class Ending:
    """What is written; the JSON values are texts. `by` a cause, as the table has it.

    `error_id` is what clients are told instead of the `error`. What is said is what is
    stored: `reason` and `error` have at most `ERROR_CHARS` characters.
    """

    status: Status
    reason: str | None = None
    error: str | None = None
    output: str | None = None
    summary: str | None = None
    usage: str | None = None
    error_id: str | None = None

    def __post_init__(self) -> None:
        self.reason = storable(self.reason, ERROR_CHARS)
        self.error = storable(self.error, ERROR_CHARS)
        self.summary = storable(self.summary)

    @classmethod
    def by(
        cls,
        cause: Cause,
        error: str | None = None,
        *,
        reason: str | None = None,
        output: str | None = None,
        summary: str | None = None,
        usage: str | None = None,
        error_id: str | None = None,
    ) -> Ending:
        """Return how a cause ends what runs; a `reason` of its own stands for the table's."""
        moved = settled(cause)
        why = own_words(reason) or moved.reason
        return cls(moved.status, why, error, output, summary, usage, error_id)


@dataclass(slots=True)
class _Step:
    """One settle or cancel on its way: who ends how, top first."""

    ends: list[tuple[Subject, Ending]]
    tops: list[str] = field(default_factory=list)  # agents of the runs that it cancels
    fibers: dict[Subject, FiberEnded] = field(default_factory=dict)  # if anybody hears
    forget: bool = False
    told: list[tuple[Subject, Ending, int]] = field(default_factory=list)
    calls: list[JobRow] = field(default_factory=list)  # that are not owed any more
    above: list[Turn] = field(default_factory=list)  # have told what these ask


@dataclass(slots=True)
class Cancelled:
    """What one cancel did. `status`: what stands; None: there is no such row.

    `stopping` is None when this cancel ended nothing.
    """

    status: Status | None
    told: list[tuple[Subject, Ending, int]] = field(default_factory=list)
    calls: list[JobRow] = field(default_factory=list)
    questions: list[Withdrawn] = field(default_factory=list)
    stopping: Stopping | None = None


@dataclass(slots=True)
class Watch:
    """What waiters of one run, turn or fiber share; `run` is a run as it ended."""

    over: trio.Event = field(default_factory=trio.Event)
    run: AgentToolRun | None = None


@final
class Endings:
    """The endings of one tree."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.db = tree.db
        self.waiters: dict[tuple[str, str], Watch] = {}

    # ---- who

    def subject(self, slot: str, what: str) -> Subject | None:
        """Return the run or own turn that a turn job (owner, what) is about."""
        rows = self.db.execute(_RUN_OF_CHILD, (slot, what))
        if rows:
            owner, run_id, child = rows[0]
            return Subject("run", owner, run_id, child)
        sql = "SELECT kind FROM fiber WHERE owner = ? AND id = ?"
        rows = self.db.execute(sql, (slot, what))
        return Subject(rows[0][0], slot, what, slot) if rows else None

    def status(self, subject: Subject) -> Status | None:
        """Return the status that stands; None when there is no such row."""
        table = "run" if subject.kind == "run" else "fiber"
        sql = f"SELECT status FROM {table} WHERE owner = ? AND id = ?"
        rows = self.db.execute(sql, (subject.owner, subject.id))
        return rows[0][0] if rows else None

    def asked_by(self, subject: Subject) -> list[Subject]:
        """Return what waits on behalf of `subject`, at every depth."""
        out: list[Subject] = []
        todo = [(subject.slot, subject.id)]
        while todo:
            pair = todo.pop()
            found = [Subject("run", *r) for r in self.db.execute(_ASKED_RUNS, pair)]
            for owner, what, kind in self.db.execute(_ASKED_FIBERS, pair):
                found.append(Subject(kind, owner, what, owner))
            out += found
            todo += [(s.slot, s.id) for s in found]
        return out

    def ends_with(self, subject: Subject) -> list[Subject]:
        """Return what `subject` waits for, with all that goes on below the runs of it."""
        asked = self.asked_by(subject)
        runs = [s for s in asked if s.kind == "run"]
        return list(
            dict.fromkeys(asked + [s for r in runs for s in self._below(r.slot)])
        )

    def levels(self, slot: str, what: str) -> int:
        """Return over how many levels a turn has asked for runs, ended ones included."""
        return int(self.db.execute(_LEVELS, (slot, what))[0][0])

    def _below(self, slot: str) -> list[Subject]:
        """Return every unfinished run and fiber of the agents at and below `slot`."""
        runs = self.db.execute(
            BELOW + "SELECT owner, id, child FROM run"
            " WHERE owner IN (SELECT slot FROM sub) AND status = 'running' ORDER BY born",
            (slot,),
        )
        fibers = self.db.execute(
            BELOW + "SELECT owner, id, kind FROM fiber"
            " WHERE owner IN (SELECT slot FROM sub) AND status = 'running' ORDER BY born",
            (slot,),
        )
        out = [Subject("run", *r) for r in runs]
        return out + [Subject(kind, o, i, o) for o, i, kind in fibers]

    # ---- the steps

    def settle(
        self,
        subject: Subject,
        ending: Ending,
        taken: Taken | None,
        *,
        forget: bool = False,
    ) -> bool:
        """End one run, turn or fiber; True when this call is what ended it.

        With `taken` it lands only while the job still carries that take. `forget`: the row
        of a fiber goes with its end.
        """
        if taken is not None and not self.tree.jobs.mine(taken):
            return False
        step = _Step([(subject, ending)], forget=forget)
        gone = Ending.by("asker-ended")
        step.ends += [(s, gone) for s in self.ends_with(subject)]
        step.tops = [s.slot for s, _ in step.ends[1:] if s.kind == "run"]
        self._flush(step)
        if ending.status == "completed" and subject.kind != "fiber":
            lost = self.tree.streams.open(subject.slot, subject.id).failed
            if lost is not None:  # it said more than could be stored
                error_id = self.tree.kernel.report(
                    "turn", None, lost, name=subject.id, run_id=subject.id
                )
                step.ends[0] = (
                    subject, Ending.by("failed", str(lost), error_id=error_id)
                )  # fmt: skip
        won = self._commit(step)
        if won:
            self._tell(step, stop=[s.slot for s, _ in step.ends[1:] if s.kind == "run"])
        return won

    def cancel(
        self, subject: Subject, reason: str | None, ending: Ending | None = None
    ) -> Status | None:
        """End a run with everything below it; return the standing status.

        Of an own turn or fiber only what it waits for is ended with it.
        """
        return self.cancelled(subject, reason, ending).status

    def cancelled(
        self, subject: Subject, reason: str | None, ending: Ending | None = None
    ) -> Cancelled:
        """Do the same, and return what was done.

        First all of it is marked, in one commit; then code hears of it.
        """
        standing = self.status(subject)
        if standing != "running":
            return Cancelled(standing)
        self.tree.order.say_own()
        ending = ending or Ending.by("cancelled", reason=reason)
        inner = self._below(subject.slot) if subject.kind == "run" else []
        inner += self.ends_with(subject)
        others = [s for s in dict.fromkeys(inner) if s != subject]
        below = Ending.by("asker-ended")
        step = _Step([(subject, ending), *((s, below) for s in others)])
        runs = [s.slot for s, _ in step.ends if s.kind == "run"]
        step.tops = [subject.slot] if subject.kind == "run" else runs
        self._flush(step)
        questions = self._questions(step)
        if not self._commit(step):
            return Cancelled(self.status(subject))
        stopping = self._tell(step, stop=runs)
        if subject.kind != "run":
            self.tree.stop_worker(subject.slot, subject.id, reason)
        return Cancelled(ending.status, step.told, step.calls, questions, stopping)

    def _questions(self, step: _Step) -> list[Withdrawn]:
        """Return what the runs that end have asked a person for, and nobody has answered."""
        out = []
        for subject, _ending in step.ends:
            turn = self.tree.turns.live.get((subject.slot, subject.id))
            for call in () if turn is None else turn.waits:
                path = self.tree.path_of(subject.slot)
                out.append(
                    Withdrawn(
                        path=path, run_id=subject.id,
                        tool_call_id=call["toolCallId"], tool_name=call["toolName"],
                    )
                )  # fmt: skip
        return out

    def delete(self, slot: str) -> None:
        """Mark a subtree gone, in one commit: mark, end, drop what it owes, owe the wipe."""
        rows = self.db.execute(_RUN_OF_CHILD.replace(" AND id = ?", ""), (slot,))
        gone = Ending.by("deleted")
        step = _Step([(Subject("run", *r), gone) for r in rows])
        step.ends = [(s, e) for s, e in step.ends if self.status(s) == "running"]
        self._flush(step)
        inside = "owner IN (SELECT slot FROM sub)"
        inner = self._below(slot)
        step.above = self.tree.questions.above([*(s for s, _ in step.ends), *inner])
        with self.tree.transaction():
            for subject, ending in step.ends:
                self._end_row(step, subject, ending, hook=True)
            owed = f"SELECT id, owner, kind, what, attempts FROM job WHERE {inside}"
            jobs = self.db.execute(BELOW + owed, (slot,))
            for job_id, *_about in jobs:
                self.tree.jobs.drop("id = ?", (job_id,))
            self.tree.budgets.forget_below(slot)
            self.tree.order.deleted(slot)
            for table in ("run", "fiber", "effect"):
                self.db.execute(BELOW + f"DELETE FROM {table} WHERE {inside}", (slot,))
            self.db.execute(
                BELOW + "UPDATE node SET state = 'gone' WHERE slot IN"
                " (SELECT slot FROM sub)",
                (slot,),
            )
            self.tree.jobs.add(
                self.tree.root_slot,
                "wipe",
                slot,
                at=self.tree.now(),
                lane=f"wipe:{slot}",
            )
        self._tell(step, stop=[])
        for job_id, owner, kind, what, attempts in jobs:
            if kind in CHANNEL_OF:
                told = Owed(what, str(job_id), attempts)
                self.tree.emit(f"{CHANNEL_OF[kind]}:cancel", owner, told)
        for subject in inner:
            self._wake(subject)
            stream = self.tree.streams.find(subject.slot, subject.id)
            if stream is not None:
                self.tree.streams.drop(stream)

    # ---- parts of a step

    def _flush(self, step: _Step) -> None:
        """First what the streams have staged, so that their length is known."""
        step.above = self.tree.questions.above([s for s, _ in step.ends])
        for subject, _ending in step.ends:
            if subject.kind != "fiber":
                stream = self.tree.streams.open(subject.slot, subject.id)
                turn = self.tree.turns.live.get((subject.slot, subject.id))
                if turn is not None:
                    with suppress(CuletError):  # then it was not the last one
                        turn.keep_last()
                if stream.staged:
                    self._check_file(subject)
                stream.flush()

    def _check_file(self, subject: Subject) -> None:
        """What a turn has said must not become part of its agent's own transaction."""
        node = self.tree.nodes.get(subject.slot)
        if node is None or node.transaction is None:
            return
        end_stale(node)
        if node.transaction is not None:
            msg = f"{subject.kind} {subject.id!r} cannot be ended inside transaction()"
            raise UsageError(msg)

    def _commit(self, step: _Step) -> bool:
        """The one commit. What was flushed before it may stand without it."""
        with self.tree.transaction():
            (subject, ending), *others = step.ends
            if not self._end_row(step, subject, ending, hook=True):
                return False
            for other, how in others:
                self._end_row(step, other, how, hook=False)
            self._drop_calls(step)
        return True

    def _drop_calls(self, step: _Step) -> None:
        """Runs that are cancelled take along the calls that their code has planned.

        Those that were made by code of what ends here, and all of the facets that are there
        for runs below. What an agent has planned otherwise stays: it lives on.
        """
        ended = {(s.slot, s.id) for s, _ in step.ends}
        found: dict[int, JobRow] = {}
        for top in step.tops:
            rows = [JobRow(*r) for r in self.db.execute(_CALLS_BELOW, (top,))]
            if not rows:
                continue
            theirs = {r[0] for r in self.db.execute(_CHILDREN_BELOW, (top,))}
            found.update(
                (row.id, row)
                for row in rows
                if row.owner in theirs or (row.owner, row.maker) in ended
            )
        step.calls = [found[job_id] for job_id in sorted(found)]
        for job_id in found:
            self.tree.jobs.drop("id = ?", (job_id,))

    def _end_row(
        self, step: _Step, subject: Subject, ending: Ending, *, hook: bool
    ) -> bool:
        now = self.tree.now()
        if subject.kind == "fiber" and self.tree.kernel.heard:
            told, started_at = self.tree.fibers.told(subject)
            step.fibers[subject] = FiberEnded(
                told.name, told.managed, ending.status, ending.reason, ending.error,
                max(0, now - started_at) / 1000,
            )  # fmt: skip
        if subject.kind == "run":
            n = self._length(subject)
            self.db.execute(
                _END_RUN,
                (
                    ending.status, ending.reason, ending.error,
                    ending.error_id, ending.output, ending.summary,
                    ending.usage, n, now,
                    self.tree.order.take(), subject.owner, subject.id,
                ),
            )  # fmt: skip
        elif step.forget and hook:
            n = 0
            self.db.execute(_FORGET_FIBER, (subject.owner, subject.id))
        else:
            n = self._length(subject) if subject.kind == "turn" else 0
            self.db.execute(
                _END_FIBER,
                (
                    ending.status, ending.reason, ending.error,
                    ending.error_id, ending.output, n, now, subject.owner, subject.id,
                ),
            )  # fmt: skip
        if self.db.changes == 0:
            return False
        where = _JOBS_OF_FIBER if subject.kind == "fiber" else _JOB_OF_TURN
        self.tree.jobs.drop(where, (subject.slot, subject.id))
        if subject.kind == "run":
            self.tree.jobs.drop(_LIMITS_OF_RUN, (subject.owner, subject.id))
        if subject.kind != "fiber":
            self.tree.budgets.end(subject)
            self.tree.retention.arm(subject.owner, now)
        if subject.kind == "run" and hook:
            self._owe(subject, now)
        step.told.append((subject, ending, n))
        return True

    def _length(self, subject: Subject) -> int:
        return self.tree.streams.open(subject.slot, subject.id).committed

    def _owe(self, subject: Subject, now: int) -> None:
        """A run that ended by itself owes its parent a hook, a detached one its delivery."""
        parent = self.tree.kind_of(subject.owner)
        if parent is None:
            return
        sql = "SELECT detached FROM run WHERE owner = ? AND id = ?"
        detached = self.db.execute(sql, (subject.owner, subject.id))[0][0]
        if parent.hears_finish:
            self.tree.jobs.add(
                subject.owner, "hook", subject.id, at=now, lane=f"hook:{subject.id}"
            )
        policy = stored_json(detached)
        if not isinstance(policy, dict):
            policy = {}
        if policy.get("on_finish") or policy.get("notify"):
            self.tree.jobs.add(
                subject.owner, "deliver", subject.id, at=now,
                lane=parent.cls.turn_lane or "deliver", payload=policy,
            )  # fmt: skip

    def _tell(self, step: _Step, stop: list[str]) -> Stopping | None:
        """The commit stands: tell waiters now, clients when it is durable, stop tasks."""
        for subject, ending, n in step.told:
            if subject.kind != "fiber":
                stream: Stream = self.tree.streams.open(subject.slot, subject.id)
                end = End(
                    ending.status, ending.reason, ending.error, ending.summary, n,
                    ending.error_id,
                )  # fmt: skip
                node = self.tree.nodes.get(subject.slot)
                if node is not None and node.state is State.LIVE:
                    try:
                        node.agent._ended(subject.id, end)
                    except Exception as error:  # the commit stands: all are told
                        name = f"end of {subject.id}"
                        self.tree.kernel.report(
                            "turn", node, error, name=name, run_id=subject.id
                        )
                stream.close(end)
            self._wake(subject)
            self.tree.emit(
                f"{subject.kind}:end", subject, step.fibers.get(subject, ending)
            )
            runtree.ended(self.tree, subject, ending.status, ending.reason)
        for subject, _ending, _n in step.told[1:]:
            if subject.kind != "run":  # their agent lives on
                self.tree.stop_worker(subject.slot, subject.id, "asker-ended")
        for row in step.calls:
            told = Owed(row.what, str(row.id), row.attempts)
            self.tree.emit(f"{CHANNEL_OF[row.kind]}:cancel", row.owner, told)
        self.tree.questions.ended(step.above)
        if not stop:
            return None
        return self.tree.stops.stop_all(stop, "the run was ended")

    def _wake(self, subject: Subject) -> None:
        if subject.kind == "run":
            self.tree.runs.over(subject.owner, subject.id)
        watch = self.waiters.pop((subject.owner, subject.id), None)
        if watch is not None:
            if subject.kind == "run":
                watch.run = self.tree.runs.get(subject.owner, subject.id)
            watch.over.set()

    def watch(self, owner: str, what: str) -> Watch:
        """Return what is set when that run, turn or fiber is ended."""
        return self.waiters.setdefault((owner, what), Watch())

    async def over(self, owner: str, what: str) -> None:
        """Wait until that run, turn or fiber is ended (look at its row afterwards)."""
        await self.watch(owner, what).over.wait()


def json_text(value: Any, what: str = "a value", most: int | None = None) -> str | None:
    """Return a value as JSON text; None stays None. Raises as `json_bytes` does."""
    return None if value is None else json_bytes(value, what, most).decode()
