"""What an operator does with a root from outside, by the ids that lists show.

An agent's nouns act for that agent only. `kernel.operator` gives what may be done to any
agent of a root: runs and dead letters page by page, and by their number or id the verbs
of those nouns. Whoever calls this has decided who may: there is no gate behind it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Final, Literal, final

import msgspec
import trio

from . import deliveries, runtree
from .core.job import job_number
from .core.path import path_text
from .core.run import AgentToolRun
from .errors import UsageError
from .jobrows import JobRow
from .ports import TreeKey
from .receipts import CancelReceipt
from .runtree import Phase

if TYPE_CHECKING:
    from .tree import Tree

Act = Literal["cancel", "run_now", "pause", "resume", "replay", "redeliver"]
_RUNS: Final = (  # with no status the newest, whatever they are
    "SELECT born, owner, id, child, detached IS NOT NULL FROM run"
    " WHERE (?1 IS NULL OR born < ?1) ORDER BY born DESC LIMIT ?2"
)
_RUN: Final = "SELECT owner, id FROM run WHERE born = ?"
_DEAD: Final = "dead = 1 AND id > ? ORDER BY id LIMIT ?"
_VERBS: Final[dict[str, frozenset[str]]] = {
    "call": frozenset({"cancel", "run_now", "pause", "resume", "replay"}),
    "queue": frozenset({"cancel", "replay"}),
    "hook": frozenset({"redeliver"}),
    "deliver": frozenset({"redeliver"}),
}
_ID_MAX: Final = 1 << 62  # of a row
_SLICE: Final = 16  # runs that are read before others have their turn
_ROOTS_SLICE: Final = 2_000  # roots that are looked at before others have their turn


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """One run of any agent of a tree. See `RunInspection` for what it shares with that.

    `attempt` and `chunks` are known of a run that goes on; of one that is over `chunks`
    alone.
    """

    number: int
    run: AgentToolRun
    path: str
    phase: Phase
    detached: bool
    attempt: int | None
    chunks: int | None
    elapsed_s: float


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """Something owed that is not tried again by itself. `acts`: what may be done to it."""

    id: str
    path: str
    kind: str
    what: str
    attempts: int
    error: str | None
    due_at: int
    acts: list[str]


class RootRow(msgspec.Struct, frozen=True, kw_only=True):
    """One root. `agents`: the live ones of an open root. `due_at`: when it is due (ms)."""

    class_name: str
    name: str
    state: Literal["open", "sleeping"]
    agents: int
    due_at: int | None


@final
class Operator:
    """One open root, for who looks after it. Made by `kernel.operator`."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    async def runs(
        self, *, before: int | None = None, limit: int | None = None
    ) -> list[RunRow]:
        """Return runs of all its agents, the newest first; go on with the last number.

        At most `limits.due_rows` at once.
        """
        return await runs(self._tree, before=before, limit=self._most(limit))

    def dead(
        self, *, after: str | None = None, limit: int | None = None
    ) -> list[DeadLetter]:
        """Return what is not tried again by itself; go on with the last id.

        At most `limits.due_rows` at once. Raises `UsageError` for what is no id.
        """
        number = 0 if after is None else job_number(after)
        if number is None:
            raise UsageError(f"after is the id of a letter, not {after!r:.40}")
        return dead(self._tree, after=number, limit=self._most(limit))

    async def cancel_run(
        self, number: int, reason: str | None = None
    ) -> CancelReceipt | None:
        """Cancel a run by its number, with all below it; None: there is none."""
        return await cancel_run(self._tree, number, reason)

    async def act(self, job_id: str, act: Act) -> bool:
        """Do that to a schedule, a queued call or a dead letter; durable when it returns.

        False where there is no such job, or it does not apply to it (see `acts`).
        """
        return await act_on_job(self._tree, job_id, act)

    @staticmethod
    def acts(kind: str) -> frozenset[str]:
        """Return what may be done to a job of that kind."""
        return verbs(kind)

    def _most(self, limit: int | None) -> int:
        most = self._tree.kernel.limits.due_rows
        return most if limit is None else max(1, min(limit, most))


async def first_roots(
    keys: Iterable[TreeKey], after: tuple[str, str] | None, find: str, limit: int
) -> list[TreeKey]:
    """Return the first roots by name after that one whose path has `find` in it.

    There may be very many: others have their turn meanwhile.
    """
    begin, wanted = after or ("", ""), find.casefold()
    best: list[TreeKey] = []
    todo = list(keys)
    for at in range(0, len(todo), _ROOTS_SLICE):
        found = {
            key
            for key in todo[at : at + _ROOTS_SLICE]
            if key > begin and wanted in f"{key.class_name}/{key.name}".casefold()
        }
        best = heapq.nsmallest(limit, found.union(best))
        await trio.lowlevel.checkpoint()
    return best


async def runs(tree: Tree, *, before: int | None, limit: int) -> list[RunRow]:
    """Return runs of all agents of an open tree, the newest first; `before`: a number.

    Others have their turn meanwhile: what is deleted by then is left out.
    """
    found = tree.db.execute(_RUNS, (before, limit))
    rows: list[RunRow] = []
    for at, (number, owner, run_id, child, detached) in enumerate(found):
        if at % _SLICE == 0:
            await trio.lowlevel.checkpoint()
            if tree.closed:
                break
        run = tree.runs.get(owner, run_id)
        if run is not None and run.status == "running":
            row = _going(tree, owner, run_id)
        elif run is not None:
            row = _over(tree, number, owner, child, run, detached=bool(detached))
        else:
            row = None
        if row is not None:
            rows.append(row)
    return rows


def _going(tree: Tree, owner: str, run_id: str) -> RunRow | None:
    seen = runtree.inspect(tree, owner, run_id)
    if seen is None:
        return None
    return RunRow(
        number=seen.number, run=seen.run, path=seen.path, phase=seen.phase,
        detached=seen.detached, attempt=seen.attempt, chunks=seen.chunks,
        elapsed_s=seen.elapsed_s,
    )  # fmt: skip


def _over(
    tree: Tree,
    number: int,
    owner: str,
    child: str,
    run: AgentToolRun,
    *,
    detached: bool,
) -> RunRow:
    """Return a run that has ended, by its row alone: no file of an agent is opened."""
    end = run.started_at if run.completed_at is None else run.completed_at
    own = path_text([(run.agent_type, run.run_id)])
    path = tree.path_of(child) or f"{tree.path_of(owner)}/{own}"
    return RunRow(
        number=number, run=run, path=path, phase="over", detached=detached,
        attempt=None, chunks=run.n, elapsed_s=max(0, end - run.started_at) / 1000,
    )  # fmt: skip


def dead(tree: Tree, *, after: int, limit: int) -> list[DeadLetter]:
    """Return what rests of all agents of an open tree, in the order of the ids."""
    path = cache(tree.path_of)
    return [
        DeadLetter(
            id=str(row.id), path=path(row.owner), kind=row.kind, what=row.what,
            attempts=row.attempts, error=row.error, due_at=row.due_at,
            acts=[a for a in ("replay", "redeliver", "cancel") if a in verbs(row.kind)],
        )
        for row in tree.jobs.find(_DEAD, (after, limit))
    ]  # fmt: skip


def verbs(kind: str) -> frozenset[str]:
    """Return what may be done to a job of that kind."""
    return _VERBS.get(kind, frozenset())


async def cancel_run(
    tree: Tree, number: int, reason: str | None
) -> CancelReceipt | None:
    """Cancel a run by its number, as `runs.cancel` does; None: there is none."""
    found = tree.db.execute(_RUN, (number,)) if 0 <= number < _ID_MAX else []
    if not found:
        return None
    owner, run_id = found[0]
    receipt = await tree.runs.stop(owner, run_id, reason)
    await tree.durable()
    return receipt


async def act_on_job(tree: Tree, job_id: str, act: Act) -> bool:
    """Do that to a job, durably; False where there is no such job or it does not apply."""
    number = job_number(job_id)
    row = None if number is None else tree.jobs.get(number)
    if row is None or act not in verbs(row.kind):
        return False
    done = _change(tree, row, act)
    await tree.durable()
    return done


def _change(tree: Tree, row: JobRow, act: Act) -> bool:
    job_id = str(row.id)
    if act == "redeliver":
        return deliveries.again(tree, row.owner, job_id)
    if act == "cancel":
        return tree.schedules.remove(row.owner, row.kind, job_id)
    return tree.schedules.change(row.owner, row.kind, job_id, act)
