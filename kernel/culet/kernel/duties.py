"""What a tree owes by itself: hooks and deliveries of runs that ended, budgets, wipes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

import msgspec
import trio

from .core.run import AgentToolRun, error_text
from .core.status import Cause, settled
from .detached import budget_later, look_later
from .endings import BELOW, Ending
from .events import Undelivered
from .fibers import DEADLINE
from .jobs import Hopeless
from .milestones import Progress
from .node import Ambient, Node
from .pump import goodbye
from .retention import RETENTION

if TYPE_CHECKING:
    from .jobs import Taken
    from .tree import Tree


@final
class Duties:
    """The jobs of one tree that are neither schedules, turns nor fibers."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree

    async def wipe(self, taken: Taken) -> bool:
        """Remove the files and rows of a subtree that is marked gone, every row below."""
        sub = BELOW + "SELECT slot FROM sub"
        slots = [str(r[0]) for r in self.tree.db.execute(sub, (taken.row.what,))]
        await self.tree.stops.carry_out(self.tree.stops.plan(slots))
        for slot in slots:
            self.tree.streams.forget(slot)
            self.tree.aborted.pop(slot, None)
            self.tree.made.discard(slot)
        with self.tree.transaction():
            self.tree.db.execute(
                BELOW + "DELETE FROM node WHERE slot IN (SELECT slot FROM sub)",
                (taken.row.what,),
            )
            for slot in slots:
                if self.tree.store.agent(slot).exists:
                    self.tree.store.delete(slot)
        return True

    async def enter_for(
        self, taken: Taken, name: str, fn: Callable[[Node], Any]
    ) -> bool:
        """Wake the owner, look again, and run `fn(node)` inside it."""
        node = await self.tree.wake(taken.row.owner)
        if not self.tree.jobs.mine(taken):
            return False
        in_queue = taken.row.lane == node.kind.cls.turn_lane
        await node.enter(Ambient(node, in_queue=in_queue), fn, node)
        return True

    async def hook(self, taken: Taken) -> bool:
        """Tell the parent of a run that it has ended."""
        if taken.payload:  # cleared since: it says what its row has said
            run = msgspec.convert(taken.payload["run"], AgentToolRun)
        else:
            stored = self.tree.runs.get(taken.row.owner, taken.row.what)
            if stored is None:
                return True
            run = stored

        async def call(node: Node) -> None:
            await node.agent.on_agent_tool_finish(run)

        return await self.enter_for(taken, "hook", call)

    async def deliver(self, taken: Taken) -> bool:
        """Hand the end of a detached run, or a milestone of it, to its asker.

        Who is to hear of it is looked up now. An asker that has no such method (any more)
        cannot do better in another try: the delivery rests at once where it is seen.
        """
        run = self.tree.runs.get(taken.row.owner, taken.row.what)
        if run is None:
            return True
        known, told = run, taken.payload or {}
        progress: Progress | None = None
        if "progress" in told:
            progress = msgspec.convert(told["progress"], Progress)

        async def call(node: Node) -> None:
            if progress is None:
                await self._tell_end(node, known, told)
            else:
                await self._tell_milestone(node, known, progress, told)

        try:
            return await self.enter_for(taken, "deliver", call)
        except Exception as error:
            if self.tree.kernel.heard and self.tree.jobs.mine(taken):
                self._undelivered(taken, known, progress, told, error)
            raise

    async def _tell_end(self, node: Node, run: AgentToolRun, told: Any) -> None:
        method, agent = told.get("on_finish"), node.agent
        if method is not None:
            fn = getattr(agent, str(method), None)
            if fn is None:
                msg = f"{node.kind.name}.{method} does not exist (any more)"
                raise Hopeless(msg)
            await fn(run)
            return
        await _chat_of(node)._notify_finish(run, told.get("notify"))

    async def _tell_milestone(
        self, node: Node, run: AgentToolRun, progress: Progress, told: Any
    ) -> None:
        await node.agent.on_progress(run, progress)
        if node.kind.takes_notice:
            react = told.get("mode") == "react"
            await _chat_of(node)._notify_milestone(run, progress, react=react)

    def _undelivered(
        self,
        taken: Taken,
        run: AgentToolRun,
        progress: Progress | None,
        told: Any,
        error: Exception,
    ) -> None:
        subject = self.tree.runs.subject(taken.row.owner, taken.row.what)
        callback = told.get("on_finish") or "notify"
        if progress is not None:
            callback = "on_progress"
        name = None if progress is None else progress.milestone
        text = error_text(error)
        detail = Undelivered(callback, name, run.status, taken.attempts, text)
        self.tree.emit("run:undelivered", subject, detail)

    async def limit(self, taken: Taken) -> bool:
        """A bound was reached: what still runs beyond it is given up.

        A deadline of a fiber, the budget of a run, or (with a key) its silence; or how
        long an agent keeps what has ended.
        """
        owner, run_id = taken.row.owner, taken.row.what
        if taken.payload == RETENTION:

            async def sweep(node: Node) -> None:
                await self.tree.retention.sweep(node, taken)

            return await self.enter_for(taken, "retention", sweep)
        if taken.payload == DEADLINE:
            self.tree.fibers.overdue(owner, run_id)
            return True
        late = self.tree.budgets.out_of_time(owner, run_id, taken.row.key)
        if late is not None and late.kind == "turn":
            self.tree.endings.cancel(late, None, Ending.by("budget-exceeded"))
            return True
        run = self.tree.runs.get(owner, run_id)
        if run is None or run.status != "running":
            return True
        if late is not None:
            await self.give_up(owner, run_id, "budget-exceeded")
            return True
        policy, now = self.tree.runs.policy(owner, run_id), self.tree.now()
        parked = self.tree.runs.parked(owner, run_id)
        if taken.row.key is None:
            if parked and policy is not None and policy.max_budget_s is not None:
                with self.tree.transaction():  # who waits for a person spends nothing
                    self.tree.jobs.drop("id = ?", (taken.row.id,))
                    budget_later(self.tree, owner, run_id, now, policy.max_budget_s)
                return True
            most = self.tree.kernel.limits.start_attempts
            if taken.attempts < most and self._comes_back(owner, run_id):
                self.tree.jobs.release([taken.row.id])  # then it may be parked
                return False
            await self.give_up(owner, run_id, "budget-exceeded")
            return True
        if policy is None or policy.no_progress_s is None:
            return True
        said_at = now if parked else self._said_at(owner, run_id)
        due = said_at + int(policy.no_progress_s * 1000)
        if due > now:
            with self.tree.transaction():
                self.tree.jobs.drop("id = ?", (taken.row.id,))
                look_later(self.tree, owner, run_id, due)
            return True
        budget_s = policy.max_budget_s
        over = budget_s is not None and run.started_at + budget_s * 1000 <= now
        await self.give_up(owner, run_id, "budget-exceeded" if over else "silent")
        return True

    def _comes_back(self, owner: str, run_id: str) -> bool:
        """Whether a run has begun in a former life and is about to be taken up again."""
        subject = self.tree.runs.subject(owner, run_id)
        if subject is None or (subject.slot, run_id) in self.tree.turns.live:
            return False
        sql = "SELECT begun FROM job WHERE owner = ? AND kind = 'turn' AND what = ?"
        rows = self.tree.db.execute(sql, (subject.slot, run_id))
        return bool(rows and rows[0][0])

    def _said_at(self, owner: str, run_id: str) -> int:
        """Return when a run, or what it waits for, last gave a sign of life: epoch ms.

        One that has said nothing at all, or that is about to be taken up again, is not
        silent: its budget and its attempts bound it.
        """
        subject = self.tree.runs.subject(owner, run_id)
        assert subject is not None
        live, now = self.tree.turns.live, self.tree.now()
        turn = live.get((subject.slot, run_id))
        if turn is None or turn.said_at is None:
            return now
        below = [live.get((s.slot, s.id)) for s in self.tree.endings.asked_by(subject)]
        said = [t.said_at for t in below if t is not None and t.said_at is not None]
        return max([turn.said_at, *said])

    async def give_up(self, owner: str, run_id: str, cause: Cause) -> None:
        """Cancel a run, and end it `interrupted` unless its child says how it ended.

        Such a word comes from a child that runs itself: it may have completed or failed
        before it heard of the cancel, and then that is how the run ended. It has
        `limits.cancel_s` to say so. Any other run ends in this very step.
        """
        subject = self.tree.runs.subject(owner, run_id)
        if subject is None:
            return
        reason = settled(cause).reason
        self.tree.emit("run:give_up", subject, reason)
        turn = self.tree.turns.live.get((subject.slot, run_id))
        if turn is not None and turn._node.kind.runs_itself:
            turn.gave_up = cause
            with trio.move_on_after(self.tree.kernel.limits.cancel_s):
                found = await goodbye(turn._node, run_id, reason)
                if found is not None and found.over and self._goes_on(owner, run_id):
                    await self.tree.endings.over(owner, run_id)  # the pump's word
        self.tree.runs.cancel(owner, run_id, ending=Ending.by(cause))

    def _goes_on(self, owner: str, run_id: str) -> bool:
        run = self.tree.runs.get(owner, run_id)
        return run is not None and run.status == "running"


def _chat_of(node: Node) -> Any:
    """Return the agent as one that has a chat; raises `Hopeless` when it has none."""
    if not node.kind.takes_notice:
        msg = f"{node.kind.name} has no chat (any more) that could be notified"
        raise Hopeless(msg)
    return node.agent
