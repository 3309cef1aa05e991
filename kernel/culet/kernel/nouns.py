"""The nouns of an agent: thin faces over what the tree does, bound to one node.

Each acts for its own node only: the owner is the handle that it was made with, never
an argument.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast, final

import msgspec
import trio

from . import deliveries, runtree
from .core.budget import Spent
from .core.clientframes import ToolApproval
from .core.job import Retry
from .core.path import check_name
from .core.run import AgentToolRun, Status
from .core.upcoming import Upcoming
from .deliveries import Delivery
from .errors import FacetAborted, UsageError
from .feed import Feed, cursor_now, of_agent
from .fiberrows import FiberResolution, FiberRun, Statuses
from .mailbox import Sent
from .milestones import Milestone, Reports
from .node import Ambient, Node, ambient, is_stop
from .plans import Due
from .questions import Question, parent_answers, result
from .receipts import CancelReceipt
from .runtree import RunInspection
from .schedules import Rhythm, Schedule, Wanted
from .stops import AbortReceipt

if TYPE_CHECKING:
    from .agent import Agent
    from .sockets import Connection

A = TypeVar("A", bound="Agent")
Schedules = list[Schedule]  # in the classes below `list` is a method
Soon = list[Upcoming]
Deliveries = list[Delivery]
Questions = list[Question]
Inspections = list[RunInspection]


class Child(NamedTuple):
    """One entry of `dynamic_agents.list`. `created_at`: of this life, epoch ms."""

    class_name: str
    name: str
    created_at: int


@final
class DynamicAgents:
    """The facets of one agent: `get` creates, nothing else does."""

    __slots__ = ("_node",)

    def __init__(self, node: Node) -> None:
        self._node = node

    async def get(self, cls: type[A], name: str) -> A:
        """Return a stub of the facet, made and started if need be."""
        node = self._node
        kind = node.tree.kernel.classes.of(cls)
        child = await node.tree.get(node, kind, name)
        return cast(A, node.tree.stub(child.slot, kind))

    async def lookup(self, cls: type[A], name: str) -> A | None:
        """Return a stub of the facet if it exists; never makes one."""
        node = self._node
        node.check()
        kind = node.tree.kernel.classes.of(cls)
        slot = node.tree.child_slot(node.slot, kind, name)
        await trio.lowlevel.checkpoint_if_cancelled()
        return None if slot is None else cast(A, node.tree.stub(slot, kind))

    def has(self, cls: type[Agent] | str, name: str) -> bool:
        """Whether the facet exists; starts nothing. An unknown class has none."""
        return self._slot(cls, name) is not None

    def list(
        self,
        cls: type[Agent] | str | None = None,
        *,
        limit: int | None = None,
        after: tuple[str, str] | None = None,
    ) -> list[Child]:
        """Return the facets in the order of their birth; `after` is (class, name).

        Where that one has been deleted meanwhile the page begins at the start.
        """
        node = self._node
        wanted = None if cls is None else self._class(cls)
        count = node.tree.kernel.limits.children_per_agent if limit is None else limit
        rows = node.tree.children(node.slot, wanted, count, after)
        return [Child(*row[1:]) for row in rows]

    async def abort(
        self, cls: type[Agent] | str, name: str, reason: str | None = None
    ) -> AbortReceipt:
        """Stop the facet and all below it, in planned order. What is owed brings it back.

        A facet that sleeps or does not exist is stopped already: the receipt is empty.
        Raises `ChildDidNotStop` when code is still running at the deadline.
        """
        self._node.check()
        slot = self._slot(cls, name)
        return await self._node.tree.abort([] if slot is None else [slot], reason)

    async def delete(self, cls: type[Agent] | str, name: str) -> None:
        """Delete the facet with its storage and all below it, for good. Idempotent.

        Its class need not be registered any more: the name of the class is enough.
        """
        self._node.check()
        slot = self._slot(cls, name)
        if slot is not None:
            await self._node.tree.delete(slot)

    async def upgrade(self, cls: type[Agent] | str, name: str, *, to: type[A]) -> A:
        """Let another class take over a facet, and return a stub of it.

        Its code stops as by an abort; then one commit changes the class. Storage,
        schedules, fibers, runs, stubs and sockets stay with it; `upgraded_from` tells
        `on_start` of the new class. The old class may be one that is registered no more,
        by its name.

        Raises `NotFound`; `UsageError` when the new class is no facet, has one of that
        name, or cannot go on with a run of this one; `ChildDidNotStop` when old code
        still runs at the deadline: nothing is changed, and asking again goes on without
        that code.
        """
        node = self._node
        kind = node.tree.kernel.classes.of(to)
        slot = await node.tree.upgrades.upgrade(node, self._class(cls), name, kind)
        return cast(A, node.tree.stub(slot, kind))

    def _slot(self, cls: type[Agent] | str, name: str) -> str | None:
        class_name = self._class(cls)
        try:
            check_name(name)
        except UsageError:  # nobody can be called so: to ask is no mistake
            return None
        return self._node.tree.slot_of(self._node.slot, class_name, name)

    def _class(self, cls: type[Agent] | str) -> str:
        """Return the name of a class: facets outlive its registration."""
        if isinstance(cls, str):
            return cls
        known = self._node.tree.kernel.classes.known.get(cls.__name__)
        if known is not None and known.cls is not cls:
            msg = f"{cls!r} is not the class that is registered as {cls.__name__!r}"
            raise UsageError(msg)
        return cls.__name__


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
        """Yield the published frames after number `after`, as decoded JSON; then end."""
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


@final
class SchedulesNoun:
    """The schedules of one agent; with `below=True` those of its facets as well."""

    __slots__ = ("_node",)

    def __init__(self, node: Node) -> None:
        self._node = node

    def get(self, schedule_id: str) -> Schedule | None:
        """Return one schedule."""
        return self._node.tree.schedules.get(self._node.slot, "call", schedule_id)

    def list(
        self,
        *,
        callback: str | None = None,
        kind: Rhythm | None = None,
        start: int | datetime | None = None,
        end: int | datetime | None = None,
        dead: bool | None = None,
        below: bool = False,
        limit: int | None = None,
        after: str | None = None,
    ) -> list[Schedule]:
        """Return schedules, the earliest first; dead ones are marked so.

        `kind`: `once`, `every` or `cron`. `start` and `end` bound `due_at`, both inclusive:
        epoch milliseconds or aware datetimes. Go on with the id of the last one as `after`;
        `below` returns at most `limits.due_rows` at once, each with its `path`.
        """
        wanted = Wanted(callback, kind, start, end, dead, limit, after)
        tree, slot = self._node.tree, self._node.slot
        return tree.schedules.all(slot, "call", wanted, below=below)

    def cancel(self, schedule_id: str, *, below: bool = False) -> bool:
        """Delete one; False when there is none. It will not fire after this returns."""
        self._node.check()
        tree, slot = self._node.tree, self._node.slot
        return tree.schedules.remove(slot, "call", schedule_id, below=below)

    async def many(self, dues: Sequence[Due]) -> Schedules:
        """Store many schedules in one commit, all or none; in the order of `dues`.

        At most `limits.schedules_at_once`. Raises what `schedule` raises, for the first
        that is refused; then nothing is stored.
        """
        made = self._node.tree.schedules.many(self._node, dues)
        await trio.lowlevel.checkpoint_if_cancelled()
        return made

    def pause(self, schedule_id: str) -> bool:
        """Keep it from firing until `resume`. A call that has begun goes on."""
        return self._change(schedule_id, "pause")

    def resume(self, schedule_id: str) -> bool:
        """Let a paused one fire again; one that is overdue fires once."""
        return self._change(schedule_id, "resume")

    def run_now(self, schedule_id: str) -> bool:
        """Make it due at once, paused or not; the tick of a recurring one is still to come."""
        return self._change(schedule_id, "run_now")

    def replay(self, schedule_id: str) -> bool:
        """Try a dead one again; False for one that is not dead."""
        return self._change(schedule_id, "replay")

    def _change(self, schedule_id: str, how: str) -> bool:
        self._node.check()
        tree, slot = self._node.tree, self._node.slot
        return tree.schedules.change(slot, "call", schedule_id, how)

    def upcoming(
        self, hours: float, *, below: bool = False, limit: int | None = None
    ) -> Soon:
        """Return what fires within that many hours, the earliest first, and why then.

        Paused ones are listed as such. At most `limits.due_rows`.
        """
        tree, slot = self._node.tree, self._node.slot
        return tree.schedules.upcoming(slot, hours, below=below, limit=limit)


@final
class QueueNoun:
    """Calls that one agent queued for itself: first in, first out."""

    __slots__ = ("_node",)

    def __init__(self, node: Node) -> None:
        self._node = node

    def put(
        self, callback: str | Callable[..., Any], payload: Any = None, *,
        retry: Retry | None = None,
    ) -> str:  # fmt: skip
        """Queue a call of one of this agent's methods; returns its id."""
        tree = self._node.tree
        return tree.schedules.put(self._node, callback, payload, retry).id

    def get(self, call_id: str) -> Schedule | None:
        """Return one queued call."""
        return self._node.tree.schedules.get(self._node.slot, "queue", call_id)

    def list(
        self,
        *,
        callback: str | None = None,
        dead: bool | None = None,
        limit: int | None = None,
        after: str | None = None,
    ) -> list[Schedule]:
        """Return what is queued; dead ones are marked so. `after` is an id."""
        wanted = Wanted(callback, dead=dead, limit=limit, after=after)
        return self._node.tree.schedules.all(self._node.slot, "queue", wanted)

    def remove(self, call_id: str) -> bool:
        """Take one out; False when it is not there any more."""
        self._node.check()
        return self._node.tree.schedules.remove(self._node.slot, "queue", call_id)

    def replay(self, call_id: str) -> bool:
        """Try a dead one again, in its old place; False for one that is not dead."""
        self._node.check()
        tree, slot = self._node.tree, self._node.slot
        return tree.schedules.change(slot, "queue", call_id, "replay")

    def clear(self, callback: str | None = None) -> int:
        """Take all out, or those of one method; returns how many."""
        return sum(self.remove(s.id) for s in self.list(callback=callback))


@final
class FibersNoun:
    """The fibers of one agent; with `below=True` those of its facets as well."""

    __slots__ = ("_node",)

    def __init__(self, node: Node) -> None:
        self._node = node

    async def start(
        self,
        name: str,
        fn: Callable[[], Awaitable[Any]],
        *,
        fiber_id: str | None = None,
        key: str | None = None,
        metadata: Any = None,
        deadline_s: float | None = None,
        wait: bool = False,
    ) -> FiberRun:
        """Start a fiber in the background; a known id or key returns its fiber.

        `accepted` of what it returns says whether this call has started it. Its row is
        kept after its end. With `wait` the end is waited for. One that is not over after
        `deadline_s` seconds ends `error`, reason `deadline`, restarts or not. Raises
        `UsageError` for an id or key that is empty, or that name two fibers.
        """
        node, fibers = self._node, self._node.tree.fibers
        found = self._known(fiber_id, key)
        accepted = found is None
        if found is None:
            fiber_id = node.tree.kernel.chance.id() if fiber_id is None else fiber_id
            taken = fibers.begin(
                node, name, check_name(fiber_id), key, metadata,
                keep=True, deadline_s=deadline_s,
            )  # fmt: skip

            async def body() -> None:
                try:
                    await fibers.run(node, taken, name, fn, keep=True)
                except FacetAborted:
                    pass  # ended by id, or its agent stopped
                except BaseException as error:
                    if is_stop(error):
                        raise
                    node.tree.kernel.report("fiber", node, error, name=name)

            here = ambient.get()
            ours = here is not None and here.node is node
            maker, payer = (here.maker, here.payer) if here and ours else (None, None)
            node.spawn(Ambient(node, maker=maker, payer=payer), body)
            found = fibers.get(node.slot, fiber_id, None)
            assert found is not None
        if wait:
            found = await fibers.join(node.slot, found.id)
        else:
            await trio.lowlevel.checkpoint_if_cancelled()
        return msgspec.structs.replace(found, accepted=accepted)

    def _known(self, fiber_id: str | None, key: str | None) -> FiberRun | None:
        """Return the fiber that an id or a key names."""
        if key is not None and not key.strip():
            msg = f"the key of a fiber is not empty: {key!r}"
            raise UsageError(msg)
        fibers, slot = self._node.tree.fibers, self._node.slot
        by_id = None if fiber_id is None else fibers.get(slot, fiber_id, None)
        by_key = None if key is None else fibers.get(slot, None, key)
        if by_id is not None and by_key is not None and by_id.id != by_key.id:
            msg = f"{fiber_id!r} and key {key!r} name two fibers"
            raise UsageError(msg)
        return by_id or by_key

    def inspect(self, id: str | None = None, key: str | None = None) -> FiberRun | None:  # noqa: A002
        """Return one fiber by id or by key; see `FiberRun` for what it tells of one that runs."""
        if id is None and key is None:
            msg = "name a fiber by its id or its key"
            raise UsageError(msg)
        return self._node.tree.fibers.get(self._node.slot, id, key)

    def list(
        self,
        *,
        status: Statuses = None,
        name: str | None = None,
        limit: int | None = None,
        after: FiberRun | None = None,
        below: bool = False,
    ) -> list[FiberRun]:
        """Return fibers in the order of their start.

        `status` is one or many. At most `limits.due_rows` at once; go on with the last one
        as `after`. `below`: those of all agents below as well, each with its `path`.
        """
        fibers = self._node.tree.fibers
        found = fibers.rows.all(
            self._node.slot, status=status, name=name, limit=limit, after=after, below=below
        )  # fmt: skip
        return [fibers.now(f) for f in found]

    def cancel(
        self, id: str | None = None, key: str | None = None, reason: str | None = None, *,  # noqa: A002
        below: bool = False,
    ) -> Status | None:  # fmt: skip
        """Cancel a fiber with what it waits for; the status that stands afterwards.

        None: there is none. Its task is fenced: what it still does, shielded or in its
        clean-up, changes nothing. With `below` each of that id or key in this agent and
        all below it is cancelled, and the answer is that of the first one that ran.
        Raises `UsageError` inside `transaction()` for a turn that has just said something.
        """
        self._node.check()
        tree, slot = self._node.tree, self._node.slot
        if not below:
            one = self.inspect(id, key)
            return None if one is None else tree.fibers.cancel(one, reason)
        if id is None and key is None:
            self.inspect()  # refuses
        found = tree.fibers.rows.below(slot, id, key)
        running = [f for f in found if f.status == "running"]
        stand = [tree.fibers.cancel(f, reason) for f in running]
        return (stand or [f.status for f in found] or [None])[0]

    def resolve(self, id: str, result: FiberResolution) -> bool:  # noqa: A002
        """End a fiber from outside it; False when it was ended already."""
        self._node.check()
        found = self.inspect(id)
        return found is not None and self._node.tree.fibers.resolve(found, result)

    def delete(
        self,
        *,
        status: Statuses = None,
        settled_before: int | None = None,
        limit: int | None = None,
    ) -> int:
        """Forget fibers that ended, the earliest end first; returns how many.

        `status` None: all but the interrupted, which wait for somebody to look at them.
        `settled_before`: epoch ms. At most `limits.due_rows` at once.
        """
        self._node.check()
        rows = self._node.tree.fibers.rows
        return rows.forget(self._node.slot, status, settled_before, limit)


@final
class SocketsNoun:
    """The connections of one agent."""

    __slots__ = ("_node",)

    def __init__(self, node: Node) -> None:
        self._node = node

    def list(self, tag: str | None = None) -> list[Connection]:
        """Return connections in the order in which they came, all or those with a tag."""
        found = self._node.tree.sockets.of(self._node.slot)
        return [c for c in found if tag is None or tag in c.tags]

    def get(self, connection_id: str) -> Connection | None:
        """Return the newest connection with that label."""
        for connection in reversed(self.list()):
            if connection.id == connection_id:
                return connection
        return None
