"""Turns: a fiber that writes a stream, in the code of an agent's `on_turn`.

A run is a turn of a facet that its parent asked for; a chat turn is one that the agent
started itself. Both are a `turn` job, both are driven here: wake the agent, look again,
drive the generator, stage what it yields, settle what it ended with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, final

import msgspec
import trio

from . import runtree
from .calls import UNENCODABLE, json_bytes
from .core.fits import complaint
from .core.limits import ERROR_CHARS
from .core.run import coalesce, cut_bytes, default_error, error_words
from .core.status import Cause, settled
from .endings import Ending, Subject, json_text
from .errors import (
    CapacityError,
    Deleted,
    FacetAborted,
    FacetBroken,
    OverBudget,
    StorageError,
    UsageError,
    is_told,
)
from .jobs import StartFailed, Taken
from .mailbox import Mailbox
from .milestones import MILESTONE, PROGRESS, Progress, check_size
from .node import Ambient, Node, State, Work, is_stop
from .pump import follow
from .questions import says_waiting
from .tracing import KEY, NO_SPAN

if TYPE_CHECKING:
    from .agent import Agent
    from .streams import Stream
    from .tree import Tree

Chunk = Mapping[str, Any]
_encode = msgspec.json.Encoder().encode
_REPORTS: Final = frozenset({PROGRESS, MILESTONE})
_SETTLES: Final = frozenset(
    {"tool-output-available", "tool-output-error", "tool-output-denied"}
)


class Stalled(Exception):
    """This attempt of a turn is over, the turn is not: it is taken up after a back-off.

    For code of a turn that waits in vain. What was said stays; it counts as an attempt
    without progress if nothing was, and as one of `limits.tries` in any case.
    """


@final
class CancelToken:
    """A wish to cancel that can be handed on; cancelling it twice changes nothing."""

    __slots__ = ("_callbacks", "_event", "reason")

    def __init__(self) -> None:
        self.reason: str | None = None
        self._event: trio.Event | None = None
        self._callbacks: list[Callable[[str | None], object]] | None = []

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._callbacks is None

    def cancel(self, reason: str | None = None) -> None:
        """Ask everything that holds this token to stop. Never blocks.

        Everything is asked; the first error that one of them raised is raised then.
        """
        callbacks, self._callbacks = self._callbacks, None
        if callbacks is None:
            return
        self.reason = reason
        if self._event is not None:
            self._event.set()
        first: BaseException | None = None
        for fn in callbacks:
            try:
                fn(reason)
            except BaseException as error:
                first = first or error
        if first is not None:
            raise first

    async def wait(self) -> None:
        """Return when it was cancelled."""
        if self.cancelled:
            await trio.lowlevel.checkpoint()
            return
        if self._event is None:
            self._event = trio.Event()
        await self._event.wait()

    def on_cancel(self, fn: Callable[[str | None], object]) -> None:
        """Call `fn(reason)` once, when it is cancelled; at once if it is already."""
        if self._callbacks is None:
            fn(self.reason)
        else:
            self._callbacks.append(fn)

    def forget(self, fn: Callable[[str | None], object]) -> None:
        """Take back `on_cancel`."""
        if self._callbacks is not None and fn in self._callbacks:
            self._callbacks.remove(fn)


@final
class Turn:
    """One attempt at a turn, as `on_turn` gets it.

    `attempt` is 1, and more when the turn goes on after a crash; then `snapshot` is the
    last stash and `chunks()` what earlier attempts have said. What is set as `output`
    (any JSON value), `summary` and `usage` is the result; the default summary is the
    text that was streamed. `fields` and the members that are named after chat are for chat
    bases.
    """

    def __init__(
        self,
        *,
        node: Node,
        stream: Stream,
        taken: Taken,
        payload: Mapping[str, Any],
        attempt: int,
        run_id: str | None,
    ) -> None:
        self.input: Any = payload.get("input")
        self.fields: Mapping[str, Any] = payload.get("fields") or {}
        self.identity: Any = payload.get("identity")
        self.run_id = run_id
        self.request_id = stream.id
        self.attempt = attempt
        self.cancel = CancelToken()
        self.output: Any = None
        self.summary: str | None = None
        self.usage: Any = None
        # what chat bases add
        self.messages: list[dict[str, Any]] = []  # UI messages, the new ones included
        self.omitted = 0  # older ones that are not among them: there are too many
        self.trigger = "submit-message"
        self.body: Mapping[str, Any] = {}  # the client's custom keys
        self.client_tools: list[dict[str, Any]] = []
        self.continuation = False  # it goes on in the last assistant message
        self.message_id = ""  # of the assistant message that this turn writes
        self.parked = False  # it waits for a person: its silence says nothing
        self.waits: list[dict[str, Any]] = []  # the calls that wait, while it is parked
        self._node = node
        self._stream = stream
        self._taken = taken
        self._scope, self._work = trio.CancelScope(), Work()
        self._text: list[str] = []
        self._fault: str | None = None
        self._reported_at: float | None = None
        self._pending: dict[str, Any] | None = None
        self._earlier: list[dict[str, Any]] | None = None
        self._reached: list[str] | None = None
        self.said_at: int | None = None if attempt == 1 else node.tree.now()
        self._says_waiting: bool | None = None
        self._mailbox: Mailbox | None = None
        self.gave_up: Cause | None = None  # why the kernel has asked its child to end

    @property
    def snapshot(self) -> Any:
        """The last stash of an earlier attempt, or None."""
        return self._taken.snapshot

    def stash(self, data: Any) -> None:
        """Store a checkpoint that a later attempt gets as `snapshot`. Never blocks."""
        self._node.check()
        most = self._node.tree.kernel.limits.output_bytes
        text = json_bytes(data, "a stash", most).decode()
        if not self._node.tree.jobs.stash(self._taken, text):
            raise FacetAborted("the turn is over")

    def park(self) -> None:
        """It waits for a person from now on; what is counted of recovery begins anew."""
        self.parked = True
        self._node.tree.credit(self._node.slot, self.request_id, anew=True)

    def chunks(self) -> list[dict[str, Any]]:
        """Return the chunks that earlier attempts stored, oldest first."""
        if self.attempt == 1:
            return []
        if self._earlier is None:
            bodies = self._stream.bodies()
            self._earlier = [msgspec.json.decode(body) for body in bodies]
        return self._earlier

    @property
    def mailbox(self) -> Mailbox:
        """What the parent sends to this run with `runs.send`; see `Mailbox`."""
        if self._mailbox is None:
            self._mailbox = Mailbox(self)
        return self._mailbox

    @property
    def says_waiting(self) -> bool:
        """Whether its last report but progress of its own is that somebody is asked."""
        if self._says_waiting is None:
            self._says_waiting = says_waiting(self.chunks())
        return self._says_waiting

    @says_waiting.setter
    def says_waiting(self, value: bool) -> None:
        self._says_waiting = value

    @property
    def text(self) -> str:
        """The text streamed so far, earlier attempts included."""
        return "".join(self._text)

    def say(self, chunk: Chunk) -> None:
        """Stage one chunk now, as a yield of `on_turn` does. Never blocks."""
        self._node.check()
        kind = chunk.get("type") if isinstance(chunk, Mapping) else None
        if not isinstance(kind, str):
            what = chunk if isinstance(chunk, Mapping) else None
            said = f"a {type(chunk).__name__}" if what is None else "one without it"
            msg = f"a chunk is a mapping with a text as 'type', not {said}"
            raise UsageError(msg)
        try:
            body = _encode(chunk)
        except UNENCODABLE as error:
            msg = f"chunk {kind!r} cannot be encoded as JSON: {error}"
            raise UsageError(msg) from None
        limit = self._node.tree.kernel.limits.chunk_bytes
        if len(body) > limit:
            msg = f"chunk {kind!r} has {len(body)} bytes, the limit is {limit}"
            raise CapacityError(msg)
        if kind == "error":  # said in band: no chunk, it is how the turn ends
            self._fault = str(chunk.get("errorText") or default_error("error", None))
            return
        if kind == "text-delta":
            self._text.append(str(chunk.get("delta", "")))
        stream, tree = self._stream, self._node.tree
        stream.stage(body.decode())
        self.said_at = tree.now()
        if kind in _SETTLES and not chunk.get("preliminary"):
            tree.barrier.urge()  # lost in a crash, it would make its tool run again
        if kind in _REPORTS:
            number = stream.committed + len(stream.staged)
            tree.milestones.said(self, kind, chunk.get("data"), number)
        tree.emit("turn:chunk", stream, kind)

    async def room(self) -> None:
        """Wait while too much is staged: for code that calls `say` itself."""
        if self._stream.full:
            await self._stream.room()

    @property
    def reached(self) -> list[str]:
        """The milestones that were said so far, earlier attempts included, in order."""
        if self._reached is None:
            told = [c for c in self.chunks() if c.get("type") == MILESTONE]
            self._reached = [str((c.get("data") or {}).get("name")) for c in told]
        return self._reached

    def report(self, progress: Progress) -> None:
        """Store progress: at most one frame in `limits.progress_s`, the last one kept.

        A milestone is a frame of its own, after all that was reported before it.
        """
        tree = self._node.tree
        limits, now = tree.kernel.limits, trio.current_time()
        data = _data(progress)
        check_size(progress, json_bytes(data, "a report"), limits.progress_bytes)
        data["at"] = tree.now()
        if progress.milestone is not None:
            if len(self.reached) >= limits.milestones:
                msg = f"a run reports at most {limits.milestones} milestones"
                raise CapacityError(msg)
            self.keep_last()
            data = {"name": progress.milestone, "sequence": len(self.reached), **data}
            self.say({"type": MILESTONE, "data": data})
            return
        chunk = {
            "type": PROGRESS,
            "id": tree.kernel.chance.id(10),
            "transient": True,
            "data": data,
        }
        wait = limits.progress_s
        verdict = coalesce(
            None if self._reported_at is None else int(self._reported_at * 1000),
            int(now * 1000),
            last=progress.fraction == 1,
            progress_s=wait,
        )
        if verdict == "store":
            self._pending = None
            self._reported_at = now
            self.say(chunk)
            return
        first, self._pending = self._pending is None, chunk
        if first:
            assert self._reported_at is not None
            due = self._reported_at + wait
            self._node.spawn(Ambient(self._node), self._later, due)

    async def _later(self, due: float) -> None:
        await trio.sleep_until(due)
        if self._stream.end is None:
            self.keep_last()

    def keep_last(self) -> None:
        """Stage the report that was held back, if there is one."""
        chunk, self._pending = self._pending, None
        if chunk is not None:
            self._reported_at = trio.current_time()
            self.say(chunk)


def _data(progress: Progress) -> dict[str, Any]:
    names = ("fraction", "message", "phase", "data")
    told = {name: getattr(progress, name) for name in names}
    return {name: value for name, value in told.items() if value is not None}


@final
class Turns:
    """Drives the turn jobs of one tree."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.live: dict[tuple[str, str], Turn] = {}

    async def run(self, taken: Taken) -> bool:
        """Handle one turn job; always settles its row itself."""
        tree, row = self.tree, taken.row
        subject = tree.endings.subject(row.owner, row.what)
        if subject is None:
            return True
        kind = tree.kind_of(row.owner)
        if kind is None:
            self._cut(subject, Ending.by("class-gone", "its class is gone"), taken)
            return False
        if taken.begun_before and not kind.resumable:
            self._cut(subject, Ending.by("not-resumable"), taken)
            return False
        first = not taken.begun_before and kind.start_may_be_repeated
        live = tree.nodes.get(row.owner)
        asleep = live is None or live.state is not State.LIVE
        try:
            if first and asleep and row.begun:
                # what ends in its start has not begun: a crash may repeat that
                self._mark(taken, begun=False)
            node = await tree.wake(row.owner)
            if first and (asleep or not row.begun) and self._mark(taken, begun=True):
                await tree.durable()
        except (FacetBroken, UsageError) as error:
            if taken.attempts < tree.kernel.limits.start_attempts:
                raise StartFailed from error
            text = f"could not be started: {error_words(error.__cause__ or error)}"
            failed = Ending.by("start-failed", text[:ERROR_CHARS])
            failed.error_id = self._report(None, subject, error)
            self._end(subject, failed, taken)
            return False
        await tree.kernel.paced()
        if tree.jobs.mine(taken):  # barrier, wake and on_start lie between
            if taken.begun_before and not node.kind.resumable:  # upgraded meanwhile
                self._cut(subject, Ending.by("not-resumable"), taken)
                return False
            await self._drive(node, subject, taken)
        return False

    def _mark(self, taken: Taken, *, begun: bool) -> bool:
        """Say whether a turn has begun; False when somebody else has its job now."""
        sql = "UPDATE job SET begun = ? WHERE id = ? AND held = ? AND begun <> ?"
        with self.tree.transaction():
            self.tree.db.execute(sql, (begun, taken.row.id, taken.take, begun))
        return self.tree.jobs.mine(taken)

    def stop(self, slot: str, what: str, reason: str | None) -> None:
        """End the task of a turn whose row is settled; its agent lives on."""
        turn = self.live.get((slot, what))
        if turn is None:
            return
        turn._work.cut(reason)
        turn._scope.cancel(reason=reason)
        try:
            turn.cancel.cancel(reason)  # calls what its author has put there
        except BaseException as error:
            if is_stop(error):
                raise
            self.tree.kernel.report(
                "turn", turn._node, error, name=what, run_id=turn.request_id
            )

    def end(self, turn: Turn, ending: Ending) -> None:
        """Settle a turn from inside it; it may have ended already."""
        subject = self.tree.endings.subject(turn._node.slot, turn.request_id)
        if (
            turn.gave_up is not None and ending.status == "aborted"
        ):  # as it was asked to
            how = settled(turn.gave_up)
            ending = replace(ending, status=how.status, reason=how.reason)
        if subject is not None:
            self._end(subject, ending, turn._taken)

    def exhausted(self, taken: Taken, text: str) -> None:
        """Settle a turn whose attempts are used up."""
        subject = self.tree.endings.subject(taken.row.owner, taken.row.what)
        if subject is not None:  # the text is what the last try has raised
            ending = Ending.by("recovery-exhausted", text)
            ending.error_id = self._report(None, subject, FacetBroken(text))
            self._cut(subject, ending, taken)

    def _cut(self, subject: Subject, ending: Ending, taken: Taken) -> None:
        """Settle a turn that does not go on: what it has said is kept as its summary."""
        if self.tree.jobs.mine(taken):
            stream = self.tree.streams.open(subject.slot, subject.id)
            ending.summary = self._kept("".join(_texts(stream.bodies())))
        self._end(subject, ending, taken)

    def _kept(self, text: str) -> str | None:
        """Return the part of a text that a row keeps."""
        return cut_bytes(text, self.tree.kernel.limits.summary_bytes) or None

    async def _drive(self, node: Node, subject: Subject, taken: Taken) -> None:
        stream = self.tree.streams.open(node.slot, subject.id)
        attempt = 1
        if taken.begun_before:
            attempt = max(stream.attempt, stream.last_attempt()) + 1
        stream.attempt, stream.job = attempt, taken
        turn = Turn(
            node=node,
            stream=stream,
            taken=taken,
            payload=taken.payload or {},
            attempt=attempt,
            run_id=subject.id if subject.kind == "run" else None,
        )
        if attempt > 1:
            deltas = (c for c in turn.chunks() if c.get("type") == "text-delta")
            turn._text = [str(c.get("delta", "")) for c in deltas]
        key = (node.slot, subject.id)
        self.live[key] = turn
        self.tree.budgets.open_turn(subject, node.kind.cls.turn_budget)
        self.tree.emit("turn:begin", subject, attempt)
        runtree.tell(
            self.tree, subject, "begun" if attempt == 1 else "resumed", attempt
        )
        # a child that runs itself says its chunks itself
        own = None if node.kind.runs_itself else turn
        ctx = Ambient(
            node, identity=turn.identity, asker=subject.id, turn=own, work=turn._work
        )
        tracer = self.tree.kernel.tracer
        span = NO_SPAN if tracer is None else tracer.span(
            "turn", node.kind.name,
            {"run_id": subject.id, "agent": node.path_text(), "attempt": attempt},
            parent=(taken.payload or {}).get(KEY),
        )  # fmt: skip
        try:
            with span:
                await node.enter(ctx, _go, node, node.agent, turn, stream)
        except (FacetAborted, Deleted) as error:
            if node.state >= State.STOPPING or not self.tree.jobs.mine(taken):
                raise  # this turn was stopped; else it met another agent's end
            self._end(subject, self._failure(turn, error), taken)
        except StorageError as error:
            if self.tree.barrier.fenced is not None:
                raise
            self._fail(subject, turn, error, taken)
        except Stalled:
            stream.flush()  # the next attempt goes on behind all that this one has said
            if self.tree.jobs.mine(taken):
                raise
        except Exception as error:
            self._fail(subject, turn, error, taken)
        else:
            if stream.end is None:
                self.tree.emit("turn:end", subject, attempt)
                self._end(subject, self._success(subject, turn), taken)
        finally:
            if self.live.get(key) is turn:
                del self.live[key]
                self.tree.mail.over(key)

    def _success(self, subject: Subject, turn: Turn) -> Ending:
        limit = self.tree.kernel.limits
        try:
            turn.keep_last()
            summary = turn.summary if turn.summary is not None else turn.text
            if not isinstance(summary, str):
                msg = f"a summary is a text, not a {type(summary).__name__}"
                raise UsageError(msg)
            summary = cut_bytes(summary, limit.summary_bytes)
            output = json_text(turn.output, "an output", limit.output_bytes)
            usage = json_text(turn.usage, "a usage", limit.shown_bytes)
            if turn._fault is not None:
                fault = turn._fault[:ERROR_CHARS]
                return Ending.by("failed", fault, summary=summary, usage=usage)
            self._check(subject, turn, msgspec.json.decode(output or "null"))
        except (TypeError, msgspec.ValidationError, UsageError, CapacityError) as error:
            text = f"its output is not what was asked for: {error}"
            kept = self._kept(turn.text)
            ending = Ending.by("bad-output", text[:ERROR_CHARS], summary=kept)
            ending.error_id = self._report(turn._node, subject, error)
            return ending
        return Ending.by("finished", output=output, summary=summary, usage=usage)

    def _check(self, subject: Subject, turn: Turn, output: Any) -> None:
        """Refuse an output that is not of the type that the asker wanted."""
        check = self.tree.runs.validators.get((subject.owner, subject.id))
        if check is not None:
            check(output)
            return
        schema = (turn._taken.payload or {}).get("schema")  # of a former life
        told = None if schema is None else complaint(schema, output)
        if told is not None:
            raise UsageError(told)

    def _report(self, node: Node | None, subject: Subject, error: Exception) -> str:
        """Log what clients are not told; return the id that they get instead."""
        name = subject.id
        return self.tree.kernel.report("turn", node, error, name=name, run_id=name)

    def _fail(
        self, subject: Subject, turn: Turn, error: Exception, taken: Taken
    ) -> None:
        """Settle a turn by what its code has raised."""
        error_id = self._report(turn._node, subject, error)
        ending = self._failure(turn, error)
        if not is_told(error):
            ending.error_id = error_id
        self._end(subject, ending, taken)

    def _failure(self, turn: Turn, error: Exception) -> Ending:
        text = error_words(error)
        kept = self._kept(turn.text)
        cause: Cause = "over-budget" if isinstance(error, OverBudget) else "failed"
        return Ending.by(cause, text, summary=kept)

    def _end(self, subject: Subject, ending: Ending, taken: Taken) -> None:
        self.tree.endings.settle(subject, ending, taken)


def _texts(bodies: Iterable[str]) -> Iterator[str]:
    """Yield the text of stored chunks; one that cannot be read keeps no turn from ending."""
    for body in bodies:
        try:
            chunk = msgspec.json.decode(body)
        except msgspec.DecodeError:
            continue
        if isinstance(chunk, dict) and chunk.get("type") == "text-delta":
            yield str(chunk.get("delta", ""))


async def _go(node: Node, agent: Agent, turn: Turn, stream: Stream) -> None:
    """Drive the generator: stage what it yields, let others run, wait when full."""
    slice_ns = int(node.tree.kernel.limits.slice_s * 1e9)
    stopwatch = node.tree.kernel.clock.stopwatch_ns
    until = stopwatch() + slice_ns
    pace = node.tree.kernel.pace
    foreign = node.kind.runs_itself and turn.run_id is not None
    source = follow(node, turn) if foreign else agent.on_turn(turn)
    with turn._scope:
        async with aclosing(source) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                turn.say(chunk)
                if stream.full:
                    await stream.room()
                    until = stopwatch() + slice_ns
                if pace.spent:
                    await node.tree.kernel.paced()
                    until = stopwatch() + slice_ns
                elif stopwatch() > until:
                    await trio.lowlevel.checkpoint()
                    until = stopwatch() + slice_ns
