"""Runs as somebody sees who looks at all of them: one as it is now, and the tree of them.

A run's row says how it ended. While it goes on its job, its turn and its stream say the
rest: whether it has begun, how often, how far it is, whether it waits. Reading wakes
nobody and changes nothing.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from .core.path import path_text
from .core.run import AgentToolRun, Status
from .core.status import Cause, ended_by
from .errors import UsageError
from .events import Transition
from .streams import Stream

if TYPE_CHECKING:
    from .endings import Subject
    from .tree import Tree

Phase = Literal["queued", "running", "recovering", "waiting", "over"]
_DETAILS: Final = (
    "SELECT run.born, run.owner, run.id, run.child, run.asker, run.detached IS NOT NULL,"
    " job.begun, job.held, job.attempts"
)
_JOB: Final = " LEFT JOIN job ON job.owner = run.child AND job.kind = 'turn' AND job.what = run.id"
_ONE: Final = f"{_DETAILS} FROM run{_JOB} WHERE run.owner = ? AND run.id = ?"
_SUB: Final = (  # who is below, in how many runs, the nearest of them
    "WITH RECURSIVE sub (slot, level, above) AS (SELECT ?1, ?2, ?3 UNION ALL"
    " SELECT node.slot, sub.level + (run.id IS NOT NULL), ifnull(run.id, sub.above)"
    " FROM sub JOIN node ON node.parent = sub.slot AND node.state = 'live'"
    " LEFT JOIN run ON run.child = node.slot AND run.owner = sub.slot) "
)
_TREE: Final = (
    f"{_SUB}{_DETAILS}, sub.level, sub.above FROM sub JOIN run ON run.owner = sub.slot"
    f"{_JOB} WHERE run.born > ?4 AND (?5 IS NULL OR run.status = ?5)"
    " ORDER BY run.born LIMIT ?6"
)
_UP: Final = (  # the facets from an agent up to the root, and which of them are runs
    "WITH RECURSIVE up (slot, step) AS (SELECT ?, 0 UNION ALL"
    " SELECT node.parent, up.step + 1 FROM up JOIN node ON node.slot = up.slot"
    " WHERE node.parent IS NOT NULL)"
    " SELECT run.id FROM up JOIN run ON run.child = up.slot ORDER BY up.step"
)


class RunInspection(msgspec.Struct, frozen=True, kw_only=True):
    """One run as it is now.

    `phase`: `queued` until its turn begins, `recovering` from the end of its process
    until it goes on, `waiting` for a person, `over`. `path` is of its facet. `depth` is
    the number of runs that it was asked for in, `parent_run_id` the nearest of them.
    `asker`: the run, turn or fiber that waits for it. `attempt` counts from 1, 0 before
    the first; `chunks` are stored so far; `cause` ended it. `number` grows with the start
    over the whole tree.
    """

    run: AgentToolRun
    phase: Phase
    path: str
    depth: int
    parent_run_id: str | None
    asker: str | None
    detached: bool
    attempt: int
    chunks: int
    elapsed_s: float
    cause: Cause | None
    number: int


def above(tree: Tree, owner: str) -> list[str]:
    """Return the runs in which an agent works, the nearest first."""
    return [str(run_id) for (run_id,) in tree.db.execute(_UP, (owner,))]


def inspect(tree: Tree, owner: str, run_id: str) -> RunInspection | None:
    """Return one run of that parent; None: there is none."""
    rows = tree.db.execute(_ONE, (owner, run_id))
    if not rows:
        return None
    found = above(tree, owner)
    return _inspection(tree, (*rows[0], len(found), found[0] if found else None))


def below(
    tree: Tree,
    owner: str,
    run_id: str | None,
    *,
    status: Status | None,
    limit: int | None,
    after: int,
) -> list[RunInspection]:
    """Return the runs that an agent, or what is in one of its runs, has asked for."""
    most = tree.kernel.limits.tree_rows
    if limit is not None and limit < 1:
        msg = f"limit is at least 1, not {limit}"
        raise UsageError(msg)
    up = above(tree, owner)
    slot, nearest, level = owner, (up[0] if up else None), len(up)
    if run_id is not None:
        subject = tree.runs.subject(owner, run_id)
        if subject is None:
            return []
        slot, nearest, level = subject.slot, run_id, level + 1
    count = most if limit is None else min(limit, most)
    rows = tree.db.execute(_TREE, (slot, level, nearest, after, status, count))
    path = cache(tree.path_of)
    return [_inspection(tree, row, path) for row in rows]


def _inspection(tree: Tree, row: tuple[Any, ...], path: Any = None) -> RunInspection:
    (number, owner, run_id, child, asker, detached, begun, held, attempts, depth,
     parent) = row  # fmt: skip
    run = tree.runs.get(owner, run_id)
    assert run is not None  # its row was read in this step
    end = tree.now() if run.completed_at is None else run.completed_at
    attempt, chunks = _said(tree, run, child, begun=bool(begun))
    path = path or tree.path_of
    own = path_text([(run.agent_type, run_id)])
    return RunInspection(
        run=run, phase=_phase(tree, run, child, begun, held, attempts),
        path=path(child) or f"{path(owner)}/{own}", depth=depth, parent_run_id=parent,
        asker=asker, detached=bool(detached), attempt=attempt, chunks=chunks,
        elapsed_s=max(0, end - run.started_at) / 1000, cause=ended_by(run),
        number=number,
    )  # fmt: skip


def _phase(
    tree: Tree, run: AgentToolRun, child: str, begun: int, held: int, attempts: int
) -> Phase:
    if run.status != "running":
        return "over"
    if not begun:
        return "queued"
    turn = tree.turns.live.get((child, run.run_id))
    if turn is None:
        return "recovering" if held is None or attempts > 1 else "running"
    return "waiting" if turn.parked else "running"


def _said(tree: Tree, run: AgentToolRun, child: str, *, begun: bool) -> tuple[int, int]:
    """Return the last attempt and how many chunks are stored."""
    turn = tree.turns.live.get((child, run.run_id))
    stream = tree.streams.find(child, run.run_id)
    if stream is None:  # read it, keep no object
        stream = Stream(tree, child, run.run_id, fresh=run.n is not None)
    count = run.n if run.n is not None else stream.committed
    if turn is not None:
        return turn.attempt, count
    may_have_begun = begun or run.status != "running"
    return (stream.last_attempt() if may_have_begun and count else int(begun)), count


def tell(
    tree: Tree, subject: Subject, to: str, attempt: int = 0, reason: str | None = None
) -> None:
    """Tell subscribers that a run has passed from one state to the next."""
    if subject.kind != "run" or not tree.kernel.heard:
        return
    found = above(tree, subject.owner)
    run = tree.runs.get(subject.owner, subject.id)
    if run is None:
        return  # deleted with whom it belonged to
    elapsed_s = max(0, tree.now() - run.started_at) / 1000
    told = Transition(
        subject.id, found[0] if found else None, len(found), run.agent_type, to, reason,
        elapsed_s, attempt,
    )  # fmt: skip
    tree.emit("run:transition", subject, told)


def ended(tree: Tree, subject: Subject, status: str, reason: str | None) -> None:
    """Tell of the end of a run, which was just committed."""
    if subject.kind != "run" or not tree.kernel.heard:
        return
    stream = tree.streams.open(subject.slot, subject.id)
    begun = stream.job is not None or stream.committed
    attempt = max(stream.attempt, stream.last_attempt()) if begun else 0
    tell(tree, subject, status, attempt, reason)
