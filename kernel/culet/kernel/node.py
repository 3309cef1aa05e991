"""One live agent: its instance, its nurseries, the calls inside it, its fence.

A node is one task. Its body waits on an Event inside a `work` nursery (the agent's own
tasks) inside a `children` nursery (the nodes of its facets), so a parent cannot leave a
child behind, and what belongs to the agent ends before its children do. A call does not
get a task: it runs in its caller's, under a cancel scope that is registered here. A node
is `gone` only when the last such call has left its code.

A start that would wait for itself through other starts is refused: the context variable
`starting` names the node whose `on_start` this task works for, and each starting node
notes the nodes that it waits for.
"""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, final

import trio

from .core.path import path_text
from .errors import CapacityError, FacetAborted, FacetBroken, UsageError

if TYPE_CHECKING:
    from .agent import Agent
    from .classes import AgentClass
    from .http import Request
    from .ports import AgentDb
    from .sockets import Connection
    from .sql import Transaction
    from .tree import Tree
    from .turn import Turn

T = TypeVar("T")
log = logging.getLogger("culet.kernel")
READY: Final = trio.Event()  # of all nodes that have started: 0.3 kB less for each
READY.set()


class State(enum.IntEnum):
    """The life of a node; it only goes up."""

    STARTING = 0
    LIVE = 1
    STOPPING = 2
    GONE = 3


class Work:
    """A fiber or turn, as its tasks see it: over, once somebody has ended it."""

    __slots__ = ("is_cut", "reason")

    def __init__(self) -> None:
        self.is_cut = False
        self.reason: str | None = None

    def cut(self, reason: str | None) -> None:
        """Fence it: code that goes on regardless can do nothing any more."""
        self.is_cut, self.reason = True, reason


Payer = tuple[str, str]  # an agent, and its run, turn or fiber: who pays for a spend


class Ambient(NamedTuple):
    """Whose code runs in this task, and for whom."""

    node: Node
    connection: Connection | None = None
    request: Request | None = None
    identity: Any = None
    asker: str | None = None  # the run or fiber that this code works for
    turn: Turn | None = None
    tool_call: tuple[str, str] | None = None  # (message id, tool call id)
    work: Work | None = None  # the fiber or turn, which may have been ended
    in_queue: bool = False  # it holds the place of a turn: none begins meanwhile
    payer: Payer | None = None  # whose turn has called this code, if it is not its own
    maker: str | None = None  # the run, turn or fiber that made this call's schedule

    @property
    def pays(self) -> Payer | None:
        """Who pays for what this code does: the turn that it works for, or its caller's."""
        if self.payer is not None or self.asker is None:
            return self.payer
        return self.node.slot, self.asker


ambient: ContextVar[Ambient | None] = ContextVar("culet_ambient", default=None)
starting: ContextVar[Node | None] = ContextVar("culet_starting", default=None)


@final
class Node:
    """The live half of one agent. Made and ended by `Tree`."""

    __slots__ = (
        "agent",
        "born",
        "calls",
        "children",
        "closing",
        "db",
        "error",
        "fenced",
        "gone",
        "hooks",
        "kids",
        "kind",
        "left",
        "name",
        "parent",
        "props",
        "ready",
        "reason",
        "refs",
        "slot",
        "state",
        "stop",
        "transaction",
        "tree",
        "upgraded_from",
        "used_at",
        "waits_for",
        "work",
    )

    def __init__(
        self,
        tree: Tree,
        slot: str,
        parent: Node | None,
        kind: AgentClass,
        name: str,
        born: int,
    ) -> None:
        self.tree = tree
        self.slot = slot
        self.parent = parent
        self.kind = kind
        self.name = name
        self.born = born
        self.state = State.STARTING
        self.kids: dict[str, Node] = {}
        self.calls: dict[trio.CancelScope, BaseException | None] = {}
        self.refs = 0  # keep-alive; dies with the node
        self.hooks = 0  # running now
        self.fenced = False
        self.closing = False  # its run was ended: it may take leave, and begin nothing
        self.error: BaseException | None = None
        self.reason: str | None = None
        self.waits_for: tuple[Node, ...] = ()  # starts that its own start waits for
        self.props: Any = None
        self.upgraded_from: str | None = None  # until a start has succeeded
        self.transaction: Transaction | None = None  # of the user, while it is open
        self.used_at = trio.current_time()
        self.ready, self.gone, self.stop = trio.Event(), trio.Event(), trio.Event()
        self.left = trio.Event()  # the books: gone, or a remnant
        self.children: trio.Nursery | None = None
        self.work: trio.Nursery | None = None
        self.db: AgentDb = tree.store.agent(slot)
        self.agent: Agent = kind.cls.__new__(kind.cls)
        object.__setattr__(self.agent, "_node", self)

    def __repr__(self) -> str:
        return f"<{self.path_text()} {self.state.name.lower()}>"

    def lineage(self) -> list[Node]:
        """Return the nodes from the root to this one."""
        out: list[Node] = []
        node: Node | None = self
        while node is not None:
            out.append(node)
            node = node.parent
        return out[::-1]

    @property
    def address(self) -> tuple[str | None, str, str]:
        """Slot of the parent, class and name: what outlives the slot."""
        above = None if self.parent is None else self.parent.slot
        return above, self.kind.name, self.name

    def path_text(self) -> str:
        """Return `Class/name` of each step, for logs, receipts and lists."""
        return path_text((n.kind.name, n.name) for n in self.lineage())

    # ---- life

    async def run(self) -> None:
        """Be the node's task, from start to gone. Never raises but `Cancelled`."""
        broken: BaseException | None = None
        try:
            async with trio.open_nursery() as self.children:
                async with trio.open_nursery() as self.work:
                    broken = await self._start()
                    self.tree.start_ended(self, broken)
                    if broken is None:
                        if self.state is State.STARTING:
                            self.state = State.LIVE
                        self.ready.set()
                        self.ready = READY
                        await self.stop.wait()
                    if self.work.child_tasks:
                        self.work.cancel_scope.cancel(reason=self.reason)
                if broken is not None:
                    self.children.cancel_scope.cancel(reason="start failed")
        except BaseException as error:
            if is_stop(error):
                self._finish(None)
                raise only_stop(error) from None
            broken = error
        self._finish(broken)

    async def _start(self) -> BaseException | None:
        """Run the constructor and `on_start`; return what went wrong."""
        starting.set(self)
        token = ambient.set(Ambient(self))
        try:
            with trio.fail_after(self.tree.kernel.start_s):
                self.agent.__init__()  # type: ignore[misc]  # `_node` had to be there first
                await self.agent._begin(self.props)
        except trio.TooSlowError:
            limit = self.tree.kernel.start_s
            return TimeoutError(f"on_start took more than {limit} s")
        except BaseException as error:
            if is_stop(error):
                raise
            return error
        finally:
            ambient.reset(token)
            starting.set(None)
        return None

    def cut(self) -> None:
        """Let the body end; a start that hangs is cancelled."""
        self.stop.set()
        if not self.ready.is_set() and self.work is not None:
            self.work.cancel_scope.cancel(reason=self.reason)

    def _finish(self, broken: BaseException | None) -> None:
        self.state = State.GONE
        if broken is not None and self.reason is None:
            self.error = self.error or broken
            self.end_calls(FacetBroken(f"{self.path_text()} broke: {broken!r}"))
        else:
            self.end_calls(FacetAborted(self.reason))
        self.ready.set()
        self._leave()

    def _leave(self) -> None:
        """The last code of this life has ended: now another one may begin."""
        if self.state is State.GONE and not self.calls:
            self.tree.forget(self)
            self.gone.set()
            self.left.set()

    def end_calls(self, error: BaseException) -> None:
        """Cancel every call that is inside this agent's code."""
        for scope in list(self.calls):
            if self.calls[scope] is None:
                self.calls[scope] = error
            scope.cancel(reason=str(error))

    # ---- entering its code

    def check(self) -> None:
        """Raise unless this node may still act: the fence of every kernel call."""
        if self.fenced or self.state >= State.STOPPING:
            raise FacetAborted(self.reason)
        here = ambient.get()
        if here is not None and here.work is not None and here.work.is_cut:
            raise FacetAborted(here.work.reason)

    def check_open(self) -> None:
        """Raise unless this node may still begin something: a child, a run, a schedule."""
        self.check()
        if self.closing:
            raise FacetAborted(self.reason)

    async def enter(
        self, ctx: Ambient, fn: Callable[..., Awaitable[T]], *args: Any
    ) -> T:
        """Run `fn` as a call inside this agent: the border for exceptions.

        Cancelling the caller cancels the call; stopping the node ends it with
        `FacetAborted`. Raises what `fn` raises; anything that is not an Exception
        becomes `FacetBroken`.
        """
        self.check()
        scope = trio.CancelScope()
        self.calls[scope] = None
        token = ambient.set(ctx)
        try:
            with scope:
                result = await fn(*args)
                if self.calls[scope] is None:
                    return result
            raise FacetAborted(self.reason)  # the true reason is put in its place below
        except BaseException as error:
            if is_stop(error):
                raise
            ended = self.calls[scope]
            if ended is not None:  # whatever its clean-up raised, that is why it ended
                raise own(ended) from error
            if isinstance(error, Exception):
                raise
            msg = f"{self.path_text()} raised {type(error).__name__}"
            raise FacetBroken(msg) from error
        finally:
            ambient.reset(token)
            del self.calls[scope]
            self.used_at = trio.current_time()
            self._leave()

    def spawn(
        self, ctx: Ambient, fn: Callable[..., Awaitable[Any]], *args: Any
    ) -> None:
        """Start a task of this agent; what it raises breaks this facet only."""
        self.check()

        async def body() -> None:
            ambient.set(ctx)
            starting.set(None)
            try:
                await fn(*args)
            except BaseException as error:
                if is_stop(error):
                    raise
                self.tree.node_failed(self, error)

        assert self.work is not None
        self.work.start_soon(body)

    def hook(self, ctx: Ambient, fn: Callable[..., Awaitable[Any]], *args: Any) -> None:
        """Start a hook: bounded in time, its failure is reported and changes nothing.

        One more than `limits.hooks_at_once` of a node is reported and not called.
        """
        self.check()
        if self.hooks >= self.tree.kernel.limits.hooks_at_once:
            msg = f"{self.hooks} hooks are running already"
            name = getattr(fn, "__name__", "hook")
            self.tree.kernel.report("hook", self, CapacityError(msg), name=name)
            return
        self.hooks += 1

        async def body() -> None:
            try:
                with trio.fail_after(self.tree.kernel.limits.notify_s):
                    await fn(*args)
            except BaseException as error:
                if is_stop(error):
                    raise
                name = getattr(fn, "__name__", "hook")
                self.tree.kernel.report("hook", self, error, name=name)
            finally:
                self.hooks -= 1

        self.spawn(ctx, body)

    @property
    def busy(self) -> bool:
        """Whether something keeps this node from being dropped from memory."""
        nurseries = (self.work, self.children)  # below there may be a remnant
        tasks = any(n is not None and n.child_tasks for n in nurseries)
        return bool(self.kids or self.calls or self.refs or tasks)


def is_stop(error: BaseException) -> bool:
    """Whether it is a cancellation or an interrupt, alone or in a group.

    Such an error passes every border of an agent; all others end there: also what only
    looks like one, a subclass of `KeyboardInterrupt`, or a `Cancelled` that was kept and
    raised where nothing is cancelled.
    """
    if isinstance(error, BaseExceptionGroup):
        return any(map(is_stop, error.exceptions))
    if isinstance(error, trio.Cancelled):
        return trio.current_effective_deadline() == -math.inf
    return type(error) is KeyboardInterrupt


def only_stop(error: BaseException) -> BaseException:
    """Return the cancellation alone: what dying code raised beside it goes nowhere."""
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup((trio.Cancelled, KeyboardInterrupt)) or error
    return error


def alone(error: BaseException) -> BaseException:
    """Return the one error of a group of one, as if no nursery were there."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def own(error: BaseException) -> BaseException:
    """Return an exception object for one caller alone, or tracebacks pile up on it."""
    if isinstance(error, FacetAborted):
        return FacetAborted(error.reason)
    if isinstance(error, FacetBroken):
        copy = FacetBroken(*error.args)
        copy.__cause__ = error.__cause__
        return copy
    return error


def check_cycle(node: Node) -> None:
    """Refuse a start that would wait for itself; see the module's text."""
    me = starting.get()
    seen, todo = set[Node](), [] if me is None else [node]
    while todo:
        other = todo.pop()
        if other is me:
            msg = f"the start of {me.path_text()} would wait for itself"
            raise UsageError(msg)
        if other.state is State.STARTING and other not in seen:
            seen.add(other)
            todo += other.waits_for


@contextmanager
def waiting_for(node: Node) -> Iterator[None]:
    """Note that this task, if it works for a start, waits for that of `node`.

    A start may wait for several at once, in tasks of its own. Raises `UsageError`.
    """
    check_cycle(node)
    me = starting.get()
    if me is None:
        yield
        return
    me.waits_for += (node,)
    try:
        yield
    finally:
        left = list(me.waits_for)
        left.remove(node)
        me.waits_for = tuple(left)


def starts_under(node: Node) -> bool:
    """Whether this task works for the start of `node` or of a node below it."""
    me = starting.get()
    while me is not None:
        if me is node:
            return True
        me = me.parent
    return False
