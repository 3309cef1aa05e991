"""`self.runs`: what an agent asked of others, looked at, answered, cancelled, read.

Reading wakes nobody. Whatever it does is done for its own agent, with what is below it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, final

import trio

from . import deliveries, runtree
from .core.budget import Spent
from .core.clientframes import ToolApproval
from .core.run import AgentToolRun, Status
from .deliveries import Delivery
from .feed import Feed, cursor_now, of_agent
from .mailbox import Sent
from .milestones import Milestone, Reports
from .node import Node
from .questions import Question, parent_answers, result
from .receipts import CancelReceipt
from .runtree import RunInspection

Deliveries = list[Delivery]  # in the class below `list` is a method
Questions = list[Question]
Inspections = list[RunInspection]


@final
class RunsNoun:
    """The agent-tool runs that one agent asked for."""

    __slots__ = ("_node",)

    def __init__(self, node: Node) -> None:
        self._node = node

    async def cancel(self, run_id: str, reason: str | None = None) -> CancelReceipt:
        """Cancel a run with everything below it, and say what that was.

        The runs, own turns and fibers at and below its agent end in one commit, detached
        ones as well, before any code hears of it; with them go the schedules and queued
        calls that the code of them has made, and all of the facets that are there for runs
        below. Code that dies can begin no child, run, fiber or schedule any more: it gets
        `FacetAborted`. Returns when it has stopped, after `abort_grace_s` at the latest
        (and `limits.cancel_s` for a child that runs itself); a caller that is cancelled
        meanwhile only hears nothing. What stood before stands: then it says that alone.
        """
        self._node.check()
        return await self._node.tree.runs.stop(self._node.slot, run_id, reason)

    def get(self, run_id: str) -> AgentToolRun | None:
        """Return one run."""
        return self._node.tree.runs.get(self._node.slot, run_id)

    def list(
        self,
        *,
        status: Status | None = None,
        agent_type: str | None = None,
        parent_tool_call_id: str | None = None,
        limit: int | None = None,
        after: str | None = None,
    ) -> list[AgentToolRun]:
        """Return runs in the order of their start; `after` is a run id."""
        return self._node.tree.runs.all(
            self._node.slot, status=status, agent_type=agent_type,
            parent_tool_call_id=parent_tool_call_id, limit=limit, after=after,
        )  # fmt: skip

    def spent(self, run_id: str) -> Spent:
        """Return what a run and all below it have spent so far; nothing when there is none.

        It stays when facets below are deleted or cleared.
        """
        tree, slot = self._node.tree, self._node.slot
        subject = tree.runs.subject(slot, run_id)
        return (
            Spent() if subject is None else tree.budgets.spent((subject.slot, run_id))
        )

    def inspect(self, run_id: str) -> RunInspection | None:
        """Return a run as it is now: its phase, its attempt, how far it is, where."""
        return runtree.inspect(self._node.tree, self._node.slot, run_id)

    def tree(
        self,
        run_id: str | None = None,
        *,
        status: Status | None = None,
        limit: int | None = None,
        after: int = 0,
    ) -> Inspections:
        """Return the runs that this agent and all below it have asked for, parents first.

        With a `run_id`, one of its own, only what is below that run. `after` is a
        `number`; a page has at most `limits.tree_rows`.
        """
        return runtree.below(
            self._node.tree, self._node.slot, run_id,
            status=status, limit=limit, after=after,
        )  # fmt: skip

    def replay(self, run_id: str, after: int = -1) -> AsyncIterator[Any]:
        """Yield the frames so far after number `after`, as decoded JSON; then end."""
        return self._node.tree.runs.replay(self._node.slot, run_id, after)

    def reports(self, run_id: str) -> Reports | None:
        """Return the progress of a run and the milestones that it has reached, so far."""
        return self._node.tree.milestones.reports(self._node.slot, run_id)

    async def await_milestone(self, run_id: str, name: str) -> Milestone:
        """Wait until a run has reached a milestone, or has ended without it.

        Answers at once for one that was reached before, in this life or an earlier one.
        Raises `NotFound` when there is no such run.
        """
        return await self._node.tree.milestones.wait(self._node, run_id, name)

    def deliveries(self, run_id: str | None = None) -> Deliveries:
        """Return what this agent is still to be told of its runs, or was told in vain.

        A `dead` one has used up its attempts; `redeliver` lets it have new ones.
        """
        return deliveries.listed(self._node.tree, self._node.slot, run_id)

    def redeliver(self, delivery_id: str) -> bool:
        """Try a dead delivery again; False for one that is not dead."""
        self._node.check()
        return deliveries.again(self._node.tree, self._node.slot, delivery_id)

    async def send(self, run_id: str, message: Any, *, id: str | None = None) -> Sent:  # noqa: A002
        """Send a letter to a run of this agent: any small JSON value.

        Its turn gets it from `turn.mailbox`, in order, at least once; the same `id` is one
        letter, however often it is sent. Nothing is accepted for a run that has ended: its
        `status` says so. Raises `NotFound` when there is no such run, `CapacityError`
        beyond `limits.mail_bytes` and `limits.mail_waiting`.
        """
        sent = self._node.tree.mail.send(self._node, run_id, message, id)
        await trio.lowlevel.checkpoint_if_cancelled()
        return sent

    def questions(self, run_id: str | None = None) -> Questions:
        """Return what the runs of this agent, and all below them, ask a person or a client.

        Or one of them with all below it. Those of runs that are at work in this life.
        """
        return self._node.tree.questions.all(self._node.slot, run_id)

    async def answer(
        self, run_id: str, call_id: str, output: Any = None, *, error: str | None = None
    ) -> bool:
        """Give a call of a run its result, or the error in which it ended.

        The run is one of this agent or of any below. True when this answer was taken: the
        first one is, also against those that come at the facet's own address. False when
        there was one, the run has ended, or it has asked for no such call. Raises
        `NotFound` when there is no such run.
        """
        told = result(call_id, output, error)
        return await parent_answers(self._node, run_id, told)

    async def approve(
        self, run_id: str, call_id: str, *, approved: bool = True
    ) -> bool:
        """Say whether a call of a run may be carried out; the rest is as with `answer`."""
        told = ToolApproval(tool_call_id=call_id, approved=approved)
        return await parent_answers(self._node, run_id, told)

    def feed(
        self,
        after: str | None = None,
        *,
        limit: int | None = None,
        below: bool = True,
        follow: bool = False,
    ) -> Feed:
        """Return all frames of all runs of this agent and all below it, in one order.

        An async iterator of `FeedEntry`. `after` is the cursor of an entry: it goes on
        behind that one, in any later life. It ends with what was committed when it was
        first asked, or after `limit` entries; with `follow` it waits for more. `below`
        False: runs of this agent alone. Raises `UsageError` for a cursor that is not of
        this tree.
        """
        return of_agent(self._node, after, limit=limit, below=below, follow=follow)

    async def feed_end(self) -> str:
        """Return the cursor behind all that was committed so far: to follow from now on."""
        self._node.check()
        return await cursor_now(self._node.tree)

    async def clear(
        self, status: Status | None = None, older_than: int | None = None
    ) -> int:
        """Forget runs and wipe their facets; `older_than` is epoch ms of their start."""
        return await self._node.tree.runs.clear(
            self._node, status=status, older_than=older_than
        )
