"""Progress and milestones of runs: who is told, who waits, what is read again later.

A report is a chunk of the run's stream like any other, so it is numbered, stored and
replayed, and the stream is the only record of what was reached. Whoever waits for a
milestone reads that first: so it is found warm, after a restart, and when the run was
faster than the one who asks. The first of a name that a detached run declared owes a
delivery, in the same record as the chunk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, final

import msgspec
import trio

from .core.run import AgentToolRun
from .detached import is_milestone
from .errors import CapacityError, Deleted, NotFound, UsageError
from .node import Ambient, Node, State, is_stop, starting

if TYPE_CHECKING:
    from .tree import Tree
    from .turn import Turn

PROGRESS: Final = "data-agent-progress"
MILESTONE: Final = "data-agent-milestone"
_REPORTS: Final = (
    "SELECT i, body FROM main.culet_entry WHERE stream = ? AND body LIKE ? ORDER BY i"
)
_CHILD: Final = "SELECT child FROM run WHERE owner = ? AND id = ?"


class Progress(msgspec.Struct, frozen=True, omit_defaults=True):
    """What `report_progress` was told. `fraction` is in 0..1.

    `sequence` is the number of its frame, `at` epoch milliseconds.
    """

    fraction: float | None = None
    message: str | None = None
    phase: str | None = None
    milestone: str | None = None
    data: Any = None
    sequence: int = 0
    at: int = 0


class Reports(msgspec.Struct, frozen=True, kw_only=True):
    """All that a run has reported: the latest of all, and its milestones in order."""

    latest: Progress | None = None
    milestones: list[Progress] = []


class Milestone(msgspec.Struct, frozen=True, kw_only=True):
    """How waiting for a milestone ended.

    `progress` is the first report of it; None: the run has ended without it, as `run` says.
    """

    name: str
    progress: Progress | None
    run: AgentToolRun

    @property
    def reached(self) -> bool:
        """Whether the run has come to it."""
        return self.progress is not None


def check(progress: Progress) -> None:
    """Raise `UsageError` for a report that says nothing sensible."""
    fraction = progress.fraction
    if fraction is not None:
        number = isinstance(fraction, int | float) and not isinstance(fraction, bool)
        if not number or not 0 <= fraction <= 1:
            msg = f"fraction is in 0..1, not {fraction!r:.200}"
            raise UsageError(msg)
    for name in ("message", "phase"):
        value = getattr(progress, name)
        if value is not None and not isinstance(value, str):
            msg = f"{name} is a text, not a {type(value).__name__}"
            raise UsageError(msg)
    if progress.milestone is not None and not is_milestone(progress.milestone):
        msg = f"a milestone is a short name, not {progress.milestone!r:.200}"
        raise UsageError(msg)


def read(kind: str, data: object, sequence: int) -> Progress | None:
    """Return the report that a chunk holds; what has the wrong type in it is left out."""
    if not isinstance(data, Mapping):
        return None
    name = data.get("name")
    if kind == MILESTONE and not is_milestone(name):
        return None
    fraction, at = data.get("fraction"), data.get("at")
    if isinstance(fraction, bool) or not isinstance(fraction, int | float):
        fraction = None
    return Progress(
        fraction=fraction if fraction is not None and 0 <= fraction <= 1 else None,
        message=_text(data.get("message")),
        phase=_text(data.get("phase")),
        milestone=name if kind == MILESTONE else None,
        data=data.get("data"),
        sequence=sequence,
        at=at if type(at) is int else 0,
    )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


@final
class Milestones:
    """The reports of the runs of one tree."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self._bells: dict[tuple[str, str], trio.Event] = {}
        self._news: dict[tuple[str, str], deque[Progress]] = {}  # the hook is behind

    # ---- when one is said

    def said(self, turn: Turn, kind: str, data: object, sequence: int) -> None:
        """A report of a run was staged: owe what it owes, wake who waits, tell its asker."""
        node, run_id = turn._node, turn.run_id
        progress = read(kind, data, sequence)
        parent = node.parent
        if progress is None or run_id is None or parent is None:
            return
        name, declared = progress.milestone, False
        if name is not None:
            first = name not in turn.reached
            declared = self._owe(parent.slot, run_id, progress, first=first)
            turn.reached.append(name)
            self.tree.order.say(node, run_id)  # before what is said to it
            self._ring(parent.slot, run_id)
        if declared or not parent.kind.hears_progress or parent.state is not State.LIVE:
            return
        self._tell(parent, run_id, progress)

    def _tell(self, parent: Node, run_id: str, progress: Progress) -> None:
        """Let the hook hear of it, after what was reported before, if it keeps up."""
        key = parent.slot, run_id
        news = self._news.get(key)
        if news is not None:
            news.append(progress)
            return
        most = self.tree.kernel.limits.hooks_at_once
        self._news[key] = news = deque([progress], maxlen=most)
        parent.spawn(Ambient(parent), self._tell_all, parent, run_id, news)

    async def _tell_all(self, parent: Node, run_id: str, news: deque[Progress]) -> None:
        """Call the hook with one report after the other; what it raises changes nothing."""
        key = parent.slot, run_id
        try:
            while news and (run := self.tree.runs.get(*key)) is not None:
                try:
                    with trio.fail_after(self.tree.kernel.limits.notify_s):
                        await parent.agent.on_progress(run, news.popleft())
                except BaseException as error:
                    if is_stop(error):
                        raise
                    self.tree.kernel.report("hook", parent, error, name="on_progress")
        finally:
            if self._news.get(key) is news:
                del self._news[key]

    def _owe(self, owner: str, run_id: str, progress: Progress, *, first: bool) -> bool:
        """Owe the delivery of a declared milestone, the first time; whether it is one."""
        policy = self.tree.runs.policy(owner, run_id)
        parent = self.tree.kind_of(owner)
        if policy is None or parent is None:
            return False
        if progress.milestone not in policy.milestones:
            return False
        if not first:
            return True
        key = msgspec.json.encode([run_id, progress.milestone]).decode()
        with self.tree.transaction():
            self.tree.jobs.add(
                owner, "deliver", run_id, at=self.tree.now(), key=key,
                lane=parent.cls.turn_lane or "deliver",
                payload={"progress": progress, "mode": policy.milestone_mode},
            )  # fmt: skip
        return True

    # ---- reading

    def reports(self, owner: str, run_id: str) -> Reports | None:
        """Return what a run has reported so far; None: there is no such run."""
        rows = self.tree.db.execute(_CHILD, (owner, run_id))
        if not rows:
            return None
        latest: Progress | None = None
        reached = []
        for progress in self._all(rows[0][0], run_id, "data-agent-"):
            latest = progress
            if progress.milestone is not None:
                reached.append(progress)
        return Reports(latest=latest, milestones=reached)

    def _all(self, child: str, run_id: str, kind: str) -> list[Progress]:
        """Return reports in the order of their frames, the staged ones among them."""
        db, out = self.tree.store.agent(child), list[Progress]()
        rows = db.execute(_REPORTS, (run_id, f"%{kind}%")) if db.exists else []
        found = [(int(i), str(body)) for i, body in rows]
        stream = self.tree.streams.find(child, run_id)
        if stream is not None:
            staged = enumerate(stream.staged, stream.committed)
            found += [(i, body) for i, body in staged if kind in body]
        for i, body in found:
            chunk = msgspec.json.decode(body)
            said = chunk.get("type")
            if said in (PROGRESS, MILESTONE):
                progress = read(said, chunk.get("data"), i + 1)
                if progress is not None:
                    out.append(progress)
        return out

    def _first(self, child: str, run_id: str, name: str) -> Progress | None:
        reached = self._all(child, run_id, MILESTONE)
        return next((p for p in reached if p.milestone == name), None)

    # ---- waiting

    async def wait(self, node: Node, run_id: str, name: str) -> Milestone:
        """Wait until a run has reached a milestone, or has ended without it."""
        node.check()
        if not is_milestone(name):
            msg = f"a milestone is a short name, not {name!r:.200}"
            raise UsageError(msg)
        if starting.get() is not None:
            msg = "a milestone awaited in on_start could only come after it"
            raise UsageError(msg)
        owner = node.slot
        rows = self.tree.db.execute(_CHILD, (owner, run_id))
        if not rows:
            msg = f"there is no run {run_id!r}"
            raise NotFound(msg)
        child, run = str(rows[0][0]), self.tree.runs.get(owner, run_id)
        await trio.lowlevel.checkpoint_if_cancelled()
        while run is not None:
            found = self._first(child, run_id, name)
            if found is not None or run.status != "running":
                return Milestone(name=name, progress=found, run=run)
            over = self.tree.endings.watch(owner, run_id)
            await self._bells.setdefault((owner, run_id), trio.Event()).wait()
            run = over.run or self.tree.runs.get(owner, run_id)
        msg = f"run {run_id!r} is gone with whom it belonged to"
        raise Deleted(msg)

    def _ring(self, owner: str, run_id: str) -> None:
        bell = self._bells.pop((owner, run_id), None)
        if bell is not None:
            bell.set()

    def over(self, owner: str, run_id: str) -> None:
        """A run has ended: whoever waits for a milestone of it looks again."""
        self._ring(owner, run_id)


def check_size(progress: Progress, body: bytes, limit: int) -> None:
    """Raise `CapacityError` for a report that is too big: it is shown, not a result."""
    if len(body) > limit:
        what = progress.milestone or "progress"
        msg = f"the report {what!r:.80} has {len(body)} bytes, the limit is {limit}"
        raise CapacityError(msg)
