"""The agent class: names, docstrings and hooks. What they do lives in the modules named.

Subclass it, write `async def` methods and hooks. Whatever is defined here as a member
and is not a hook cannot be redefined: such a class is refused when the kernel opens.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, TypeVar, cast

import msgspec
import trio

from . import answers
from .budgets import BudgetNoun
from .calls import Stub, TreeTarget
from .classes import CallableMethod
from .core import frames
from .core.attach import PARAMETER, known_runs
from .core.budget import Budget
from .core.budget import checked as checked_budget
from .core.effects import Verdict
from .core.job import Misfire, Retry
from .core.path import PathStep, kebab
from .core.places import RunCaps
from .core.questions import Policy
from .core.run import AgentToolRun
from .detached import Detached, checked
from .effectnoun import EffectsNoun
from .effectrows import Row as EffectRow
from .errors import NotFound, StorageError, UsageError
from .fibernoun import FibersNoun
from .fiberrows import FiberRecovery, FiberResolution, progress_of
from .http import ConnectContext, Forward, Headers, Request, Response, as_request
from .legacy import delegates
from .milestones import Progress
from .milestones import check as check_report
from .node import Ambient, Node, ambient
from .nouns import (
    AgentKernel,
    DynamicAgents,
    KeepAlive,
    QueueNoun,
    SchedulesNoun,
    SocketsNoun,
)
from .plans import Due
from .questions import RunAnswer
from .runnoun import RunsNoun
from .runs import Ask
from .schedules import Schedule
from .sendable import check_tags, message_blob
from .sockets import Connection
from .sql import Transaction, end_stale, rows
from .state import Changes, check_writer, keep_state, load_state, store_state
from .streams import Cursor, End
from .supervise import ChildFailure, ChildRef
from .tools import AgentTool, output_schema
from .turn import CancelToken, Chunk, Turn

if TYPE_CHECKING:
    from .ports import Level

A = TypeVar("A", bound="Agent")
Source = Connection | Literal["server"]


class _NoKernel:
    """Where the node of an agent will be; an agent that was made by hand has none."""

    def __get__(self, agent: object, owner: type) -> _NoKernel:
        if agent is None:
            return self
        msg = (
            f"this {owner.__name__} was not made by a kernel: it has no name, storage"
            " or parent; get agents with `get_agent` and `dynamic_agents.get`"
        )
        raise UsageError(msg)


class Agent:
    """Base of all agents."""

    if TYPE_CHECKING:  # made from the table of `legacy`
        sub_agent: Callable[..., Awaitable[Any]]
        has_sub_agent: Callable[..., bool]
        list_sub_agents: Callable[..., list[Any]]
        abort_sub_agent: Callable[..., Awaitable[Any]]
        delete_sub_agent: Callable[..., Awaitable[None]]

    initial_state: ClassVar[Any] = None
    max_concurrent_agent_tools: ClassVar[int | None] = None
    max_queued_agent_tools: ClassVar[int] = 0  # callers in line; then it is refused
    agent_tool_questions: ClassVar[Policy] = "bubble"  # of the runs that it asks for
    run_caps: ClassVar[RunCaps] = RunCaps()  # by class, of detached runs, of a wait
    supervision: ClassVar[Literal["contain", "escalate"]] = "contain"
    retry: ClassVar[Retry] = Retry(max_attempts=3, base_delay=0.1, max_delay=3.0)
    resumable: ClassVar[bool] = False
    durability: ClassVar[Level | None] = None
    retention_s: ClassVar[float | None] = None  # of what has ended; None: for ever
    send_identity_on_connect: ClassVar[bool] = True  # False: clients hear no name
    turn_budget: ClassVar[Budget | None] = None  # of each own turn, as one of a chat
    turn_lane: ClassVar[str | None] = None  # chat bases: one turn after the other
    turn_frames: ClassVar[bool] = False  # chat bases: own clients see turns

    _node: Node = cast(Node, _NoKernel())
    _state: str | None = None  # JSON
    _initial: bool = False  # `_state` is the initial one, not stored yet
    _changes: Changes | None = None  # of the state, whose hooks have not begun

    __culet_final__: ClassVar[frozenset[str]] = frozenset()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__culet_final__:
            msg = f"{name!r} belongs to Agent; give the attribute another name"
            raise UsageError(msg)
        object.__setattr__(self, name, value)

    # ---- hooks: write the ones that you need

    async def on_start(self, props: Any = None) -> None:
        """Called once per life of the node, before anything else of it."""

    async def on_before_sub_agent(
        self, request: Request, child: ChildRef
    ) -> Request | Response | None:
        """Gate of one hop, before the child is opened: None lets the request through.

        The default admits the facet of a run only if this agent has it already.
        """
        return self._default_gate(child)

    async def on_request(self, request: Request) -> Response:
        """Answer an HTTP request; the default is 404."""
        return Response("Not implemented", 404)

    async def on_forward(self, request: Request) -> Forward | Response | None:
        """Say whether another root answers this request or socket in this one's place.

        Asked of the agent that was addressed, before it answers; None: it does so
        itself. The sockets belong to the other root: this agent does not see them.
        """

    async def on_connect(self, connection: Connection, ctx: ConnectContext) -> None:
        """Called when a client has connected, after the protocol's own frames."""

    async def on_message(self, connection: Connection, message: str | bytes) -> None:
        """Called for each message that is not a frame of the protocol."""

    async def on_close(
        self, connection: Connection, code: int, reason: str, was_clean: bool
    ) -> None:
        """Called when a client is gone, if this agent is awake."""

    async def on_error(
        self, error: BaseException, *, connection: Connection | None = None
    ) -> None:
        """Called for what a message handler or `on_state_changed` raises.

        Returning means handled. Also for what a schedule or queued call raised when it
        will not be tried again: that is booked by then, and the answer changes nothing.
        """
        raise error

    async def on_child_failed(self, child: ChildRef, error: ChildFailure) -> None:
        """Called when a facet broke by itself; it is stopped by then."""

    async def on_fiber_recovered(self, ctx: FiberRecovery) -> FiberResolution | None:
        """Say how a fiber ends whose process is gone; None: `interrupted`."""
        return None

    def validate_state_change(self, next: Any, source: Source) -> None:  # noqa: A002
        """Raise to refuse a new state; `source` is a connection or "server"."""

    async def on_state_changed(self, state: Any, source: Source) -> None:
        """Called after a new state is stored and on its way to the clients."""

    async def on_agent_tool_start(self, run: AgentToolRun) -> None:
        """Called when a run of this agent was written down. Cannot change it."""

    async def on_agent_tool_finish(self, run: AgentToolRun) -> None:
        """Called when a run has ended; owed until it has been called once."""

    async def on_progress(self, run: AgentToolRun, progress: Progress) -> None:
        """Called with progress that a run of this agent reported."""

    def get_connection_tags(
        self, connection: Connection, ctx: ConnectContext
    ) -> list[str]:
        """Return labels for `sockets.list(tag)`: at most 9 texts of 1 to 256 letters.

        Others fail the connect. The id of the connection is a tag of its own.
        """
        return []

    def should_connection_be_readonly(
        self, connection: Connection, ctx: ConnectContext
    ) -> bool:
        """Whether that client may only look. Of its HTTP requests a gate decides."""
        return False

    def should_send_protocol_messages(
        self, connection: Connection, ctx: ConnectContext
    ) -> bool:
        """Whether that client gets identity, state and run frames."""
        return True

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        """Do one turn: an async generator of chunks. Makes a class runnable as a tool."""
        raise NotFound(f"{type(self).__name__} has no on_turn")
        yield {}

    # ---- identity

    @property
    def name(self) -> str:
        """The name under which this agent is addressed in its parent."""
        return self._node.name

    @property
    def class_name(self) -> str:
        """The name of its class."""
        return self._node.kind.name

    @property
    def self_path(self) -> list[PathStep]:
        """The steps from the root to this agent."""
        return [PathStep(n.kind.name, n.name) for n in self._node.lineage()]

    @property
    def parent_path(self) -> list[PathStep]:
        """The steps from the root to the parent; empty for a root."""
        return self.self_path[:-1]

    @property
    def kernel(self) -> AgentKernel:
        """The way to other roots."""
        return AgentKernel(self._node)

    @property
    def upgraded_from(self) -> str | None:
        """The class that this agent was before `dynamic_agents.upgrade`, while it starts.

        For `on_start` to change its tables by; told again until a start has succeeded
        (and once more if the process ends right then). None at all other times.
        """
        return self._node.upgraded_from

    async def parent_agent(self, cls: type[A]) -> A:
        """Return a stub of the parent, which must be of that class.

        It has `fetch` besides: the parent's `on_request`, without any gate. It is the
        direct parent's; `kernel.get_agent` and `parent_path` lead to the root.
        """
        parent = self._node.parent
        if parent is None:
            msg = f"parent_agent: {self.name!r} is not a facet, a root has no parent"
            raise NotFound(msg)
        if parent.kind.cls is not cls:
            wanted = getattr(cls, "__name__", repr(cls))
            msg = f"parent_agent: the recorded parent class is {parent.kind.name}, not {wanted}"
            raise UsageError(msg)
        await trio.lowlevel.checkpoint_if_cancelled()
        target = TreeTarget(parent.tree, parent.slot, parent.kind, fetches=True)
        return cast(A, Stub(target))

    async def fetch(
        self,
        request: Request | str,
        *,
        method: str = "GET",
        headers: Headers = {},  # noqa: B006  # read only
        body: bytes = b"",
    ) -> Response:
        """Answer a request, or one made of a URL and the rest, as `on_request` does.

        Of another agent only through the stub of `parent_agent`.
        """
        asked = as_request(request, method=method, headers=headers, body=body)
        return await self.on_request(asked)

    # ---- nouns

    @property
    def dynamic_agents(self) -> DynamicAgents:
        """Its facets."""
        return DynamicAgents(self._node)

    @property
    def runs(self) -> RunsNoun:
        """Its agent-tool runs."""
        return RunsNoun(self._node)

    @property
    def budget(self) -> BudgetNoun:
        """What the turn that this code works for may still spend."""
        return BudgetNoun(self._node)

    @property
    def schedules(self) -> SchedulesNoun:
        """Its schedules."""
        return SchedulesNoun(self._node)

    @property
    def queue(self) -> QueueNoun:
        """Its queue of calls."""
        return QueueNoun(self._node)

    @property
    def fibers(self) -> FibersNoun:
        """Its fibers."""
        return FibersNoun(self._node)

    @property
    def effects(self) -> EffectsNoun:
        """What it does outside, once each."""
        return EffectsNoun(self._node)

    @property
    def sockets(self) -> SocketsNoun:
        """Its connections."""
        return SocketsNoun(self._node)

    # ---- storage

    def sql(self, query: str, *params: Any) -> list[Any]:
        """Run one statement on this agent's own file and return its rows.

        Commits by itself unless inside `transaction()`. Raises `SqlError` for what is
        refused (transaction verbs, ATTACH, PRAGMA, writing `culet_` tables), too long or
        too many rows; `StorageFull` at the quota.
        """
        node = self._node
        node.check()
        end_stale(node)
        result = node.db.user(query, params, node.tree.kernel.limits.sql_rows)
        node.tree.touched()
        return rows(result.columns, result.rows)

    def transaction(self) -> Transaction:
        """Return a context manager for several statements in one commit; no await inside."""
        return Transaction(self._node)

    async def durable(self) -> None:
        """Wait until everything that this tree has committed so far is durable."""
        self._node.check()
        await self._node.tree.durable()

    # ---- state

    @property
    def state(self) -> Any:
        """A copy of the state, a JSON value; `initial_state` until one is set.

        Changing the copy changes nothing: `set_state` does.
        """
        text = self._stored_state()
        return None if text is None else msgspec.json.decode(text)

    def set_state(self, next: Any) -> None:  # noqa: A002
        """Store a new state and send it to every client. Never blocks.

        Raises what `validate_state_change` raises, and `Refused` where this code runs
        for a readonly client.
        """
        self._node.check()
        check_writer(self._node)
        self._take_state(next, None)

    def _take_state(self, value: Any, source: Connection | None) -> None:
        object.__setattr__(self, "_state", store_state(self._node, value, source))
        object.__setattr__(self, "_initial", False)

    def _stored_state(self) -> str | None:
        """Return the state as JSON; whoever reads the initial one first stores it."""
        if self._initial and self._state is not None:
            kept = keep_state(self._node, self._state)
            object.__setattr__(self, "_initial", not kept)
        return self._state

    # ---- sockets

    def get_callable_methods(self) -> dict[str, CallableMethod]:
        """Return what clients may call, by the names that they use."""
        return dict(self._node.kind.callables)

    def broadcast(
        self, message: str | bytes, without: Collection[Connection | str] = ()
    ) -> None:
        """Send one message to every client but those in `without` (connections or ids)."""
        node = self._node
        node.check()
        skipped = without
        if without:
            ids = {w for w in without if isinstance(w, str)}
            skipped = [c for c in node.tree.sockets.of(node.slot)
                       if c in without or c.id in ids]  # fmt: skip
        node.tree.sockets.push_all(
            node.slot, message_blob(message), without=skipped, raw=True
        )

    # ---- time

    async def schedule(
        self,
        when: float | datetime | str,
        callback: str | Callable[..., Any],
        payload: Any = None,
        *,
        idempotent: bool | None = None,
        retry: Retry | None = None,
        tz: str | None = None,
        misfire: Misfire = "one",
        jitter: float = 0.0,
    ) -> Schedule:
        """Owe a call of one of this agent's methods: in seconds, at a time, or by cron.

        The method gets `(payload, schedule)`. At least once, never early. `idempotent`:
        whether one with the same time, callback and payload is the same one (None: yes
        for a cron text, no for the others). Of a cron text `tz` is its IANA zone, and
        `misfire` says what becomes of a tick that is later than
        `limits.misfire_grace_s`: `one`, it is called though late, and once for all that
        were missed; `none`, it is skipped. `jitter`: so many seconds chance may add.

        Raises `UsageError` for what would never come, or would fail when it does;
        `CapacityError` beyond `limits.schedules_per_agent`.
        """
        due = Due(when, callback, payload, idempotent, retry, tz, misfire, jitter)
        made = self._node.tree.schedules.add(self._node, due)
        await trio.lowlevel.checkpoint_if_cancelled()
        return made

    async def schedule_every(
        self,
        seconds: float,
        callback: str | Callable[..., Any],
        payload: Any = None,
        *,
        retry: Retry | None = None,
        misfire: Misfire = "one",
        jitter: float = 0.0,
    ) -> Schedule:
        """Owe a call every so many seconds; the same one twice is one.

        At most 30 days: use a cron text for what is rarer. It keeps its grid: how long a
        call takes, or how late it is, moves no later one.
        """
        made = self._node.tree.schedules.every(
            self._node, seconds, callback, payload, retry, misfire, jitter
        )
        await trio.lowlevel.checkpoint_if_cancelled()
        return made

    # ---- fibers and background

    async def run_fiber(
        self,
        name: str,
        fn: Callable[[], Awaitable[Any]],
        *,
        deadline_s: float | None = None,
    ) -> Any:
        """Run `fn` as a fiber in this task: after a crash it is recovered, not lost.

        Returns what `fn` returns. Its row is dropped with its end; only one that ends
        otherwise than `completed` with nobody left to hear it keeps its row. Raises
        `FacetAborted` when it is cancelled, or is not over after `deadline_s` seconds.
        """
        node = self._node
        taken = node.tree.fibers.begin(
            node, name, node.tree.kernel.chance.id(), None, None,
            keep=False, deadline_s=deadline_s,
        )  # fmt: skip
        return await node.tree.fibers.run(node, taken, name, fn, keep=False)

    def stash(self, data: Any) -> None:
        """Store a checkpoint of the fiber or turn that this code works for."""
        self._node.tree.fibers.stash(self._node, data)

    def keep_alive(self) -> KeepAlive:
        """`async with self.keep_alive():` keeps this agent in memory meanwhile."""
        return KeepAlive(self._node)

    def spawn(self, fn: Callable[..., Awaitable[Any]], *args: Any) -> None:
        """Start a task of this agent: cancelled with it, its failure breaks this facet."""
        here = ambient.get()
        ctx = (
            Ambient(self._node)
            if here is None
            else here._replace(node=self._node, work=None, in_queue=False)
        )
        self._node.spawn(ctx, fn, *args)

    async def destroy(self) -> NoReturn:
        """Delete this agent with its storage and all below it. Never returns."""
        node = self._node
        node.check()
        tree, failed, errors = node.tree, trio.Event(), list[StorageError]()
        tree.emit("destroy", node.slot, node.path_text())

        async def end() -> None:  # not in this task: that is about to be stopped
            try:
                if node.parent is None:
                    await tree.kernel.host.destroy_root(tree)
                else:
                    await tree.delete(node.slot)
            except StorageError as error:
                errors.append(error)
                failed.set()

        # nor in one of the tree, where that ends as a whole
        start_soon = tree.start_soon if node.parent else tree.kernel.start_soon
        start_soon(end)
        await failed.wait()
        raise errors[0]

    # ---- agent tools

    async def run_agent_tool(
        self,
        tool: type[Agent] | AgentTool,
        input: Any = None,  # noqa: A002
        *,
        run_id: str | None = None,
        parent_tool_call_id: str | None = None,
        display_order: int = 0,
        display: Any = None,
        input_preview: Any = None,
        cancel: CancelToken | None = None,
        detached: bool | Detached = False,
        no_progress_s: float | None = None,
        output_type: Any = None,
        questions: Policy | None = None,
        budget: Budget | None = None,
    ) -> AgentToolRun:
        """Run a facet as a tool: durable, idempotent by `run_id`, one truthful end.

        Waits for the end unless `detached`. Cancelling the caller only loses the
        observer: the run goes on, and the same id joins it again. A `budget` is reserved
        from what the calling turn has left, or the run is refused: `error`, reason
        `budget`. Without one it shares what that turn has. `questions`: what becomes of
        calls of it, and of runs below, that wait for a person: they `bubble` up to people,
        are denied at once (`deny`), or approved (`auto`).
        """
        node = self._node
        if isinstance(tool, AgentTool):
            input = tool.check_input(input)  # noqa: A001
            display = tool.display if display is None else display
            output_type = tool.output_type if output_type is None else output_type
            questions = tool.questions if questions is None else questions
            budget = tool.budget if budget is None else budget
            tool = tool.cls
        kind = node.tree.kernel.classes.of(tool)
        policy = checked(node, detached)
        check, schema = None, None
        if output_type is not None:
            wanted, schema = output_type, output_schema(output_type)

            def check(value: Any) -> Any:
                return msgspec.convert(value, wanted)

        ask = Ask(
            run_id=run_id, tool_call_id=parent_tool_call_id, order=display_order,
            display=display, preview=input_preview, cancel=cancel, detached=policy,
            no_progress_s=no_progress_s, check=check, schema=schema,
            budget=checked_budget(budget), questions=questions,
        )  # fmt: skip
        return await node.tree.runs.run(node, kind, input, ask)

    async def report_progress(
        self,
        *,
        fraction: float | None = None,
        message: str | None = None,
        phase: str | None = None,
        milestone: str | None = None,
        data: Any = None,
    ) -> None:
        """Report progress of the turn that this code works for; stored and replayed.

        In a fiber it is seen by whoever inspects it; with nothing said it is a sign of
        life. Milestones are of turns: each is a frame of its own.
        """
        here, told = ambient.get(), Progress(fraction, message, phase, milestone, data)
        check_report(told)
        if here is None or here.node is not self._node or here.turn is None:
            if milestone is not None:
                raise UsageError("a milestone belongs into a turn")
            said = progress_of(fraction, message, phase, data)
            self._node.tree.fibers.report(self._node, said)
            await trio.lowlevel.checkpoint_if_cancelled()
            return
        here.turn.report(told)
        await trio.lowlevel.checkpoint_if_cancelled()

    # ---- for the kernel and chat bases

    async def _begin(self, props: Any) -> None:
        """Load the state and run `on_start`."""
        text = load_state(self._node)
        if text is None and self.initial_state is not None:
            text = msgspec.json.encode(self.initial_state).decode()
            object.__setattr__(self, "_initial", True)
        object.__setattr__(self, "_state", text)
        await self._prepare()
        if self._node.kind.start_takes_props:
            await self.on_start(props)
        else:
            await self.on_start()

    async def _prepare(self) -> None:
        """Chat bases load what they keep."""

    async def _connected(self, connection: Connection, ctx: ConnectContext) -> None:
        """Say who this agent is, replay its runs, then let the user's hook speak."""
        tags = check_tags(self.get_connection_tags(connection, ctx))
        connection.tags = (connection.id, *tags)
        connection.readonly = (
            ctx.request.readonly or self.should_connection_be_readonly(connection, ctx)
        )
        connection.protocol = self.should_send_protocol_messages(connection, ctx)
        hello: list[str] = []
        cursors: list[Cursor] = []
        if connection.protocol:
            state = self._stored_state()
            follows = state is not None
            # A chat's word comes first: who knows whom it talks to may speak, and a
            # transcript that came after that would lack what the client has just said.
            hello = [*self._hello(connection)]
            if self.send_identity_on_connect:
                me = kebab(self.class_name)
                hello.append(frames.identity(self.name, me, state_follows=follows))
            if state is not None:
                hello.append(frames.state(state))
            hello.append(frames.MCP_SERVERS)
            known = known_runs(ctx.request.query.get(PARAMETER))
            cursors, gone = self._node.tree.runs.cursors(self._node.slot, known)
            if gone:
                hello.append(frames.forgotten(gone))
        connection.attach(hello, cursors)
        about = {"connectionId": connection.id}
        self._node.tree.emit("connect", self._node.slot, about)
        await self.on_connect(connection, ctx)

    def _hello(self, connection: Connection) -> list[str]:
        """Return what a chat base says to a client that connects."""
        return []

    def _frame(self, connection: Connection, frame: Any) -> bool:
        """Handle a chat frame, without waiting; False: it is an ordinary message."""
        return False

    def _left(self, connection: Connection) -> None:
        """Chat bases forget a client that is gone."""

    async def _run_answered(
        self, node: Node, ctx: Ambient, connection: Connection, frame: RunAnswer
    ) -> None:
        """A client answers a question of a run below this agent."""
        await answers.from_client(node, ctx, connection, frame)

    def _answered(self, run_id: str, answer: RunAnswer) -> bool:
        """Chat bases take an answer to a call of a run of theirs; whether it is the first."""
        return False

    def _sweep(self, before_ms: int) -> int | None:
        """Chat bases forget old streams; returns when the oldest that stays has ended."""
        return None

    def _ended(self, stream_id: str, end: End) -> None:
        """Chat bases keep what a turn has said, in the very step that ends it."""

    def _effect_decided(
        self, effect: EffectRow, verdict: Verdict, value: Any, error: str | None
    ) -> bool:
        """Chat bases tell a tool call what was decided; whether it waits for that."""
        return False

    def _default_gate(self, child: ChildRef) -> Response | None:
        node = self._node
        kind = node.tree.kernel.classes.known.get(child.class_name)
        if kind is None or not kind.is_tool:
            return None
        known = node.tree.child_slot(node.slot, kind, child.name) is not None
        return None if known else Response("Not Found", 404)


for _old, _call in delegates().items():
    setattr(Agent, _old, _call)

_HOOKS = {
    name
    for name, value in vars(Agent).items()
    if name.startswith("on_")
    or (inspect.isfunction(value) and name.startswith(("should_",)))
} | {"get_connection_tags", "validate_state_change"}
_SETTINGS = {
    "initial_state", "max_concurrent_agent_tools", "max_queued_agent_tools", "run_caps",
    "supervision", "retry", "resumable", "turn_budget", "durability", "turn_lane", "turn_frames",
    "send_identity_on_connect", "agent_tool_questions", "retention_s",
}  # fmt: skip
Agent.__culet_final__ = frozenset(
    name
    for name in vars(Agent)
    if name not in _HOOKS | _SETTINGS
    and not (name.startswith("__") and name.endswith("__"))
) | {"_node"}
