"""Children that run themselves: five verbs, and the one pump that follows them.

Most agents that can be run as a tool write `on_turn`. A chat base that has turns,
storage and streams of its own brings the verbs of `ChildAdapter` instead. The kernel
then owns the run as it owns every other: its turn is `follow`, which starts the child
once, copies its chunks into the kernel's stream under the child's own numbers and
settles what the child's inspection says. So everything above sees one kind of run.

The last chunk that is stored says where to go on, so a crash, an abort or a new tail
leaves no gap and no double. A child that is known is joined, never started again; after
a crash one that does not know its run is started anew only where its class says
`resumable`. A tail is closed to detach from it. When the kernel has ended a run, the
child hears it through its cancel verb, for `limits.cancel_s` at most, before its code is
fenced: see `goodbye`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from typing import TYPE_CHECKING, Any, Final, Protocol, cast, final

import trio

from .core import inspection as core
from .core.inspection import Inspection, StoredChunk, Wrong
from .core.limits import ERROR_CHARS
from .core.run import cut_bytes
from .endings import Ending
from .errors import CuletError, FacetAborted, FacetBroken, UsageError
from .node import Ambient, Node, State, is_stop

if TYPE_CHECKING:
    from .turn import Chunk, Turn

TAIL: Final = "tail_agent_tool_run"
# how each verb is called; a signature has to fit all of its rows
_CALLS: Final[dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]]] = {
    "start_agent_tool_run": [(({},), {"run_id": "r"})],
    "cancel_agent_tool_run": [(("r",), {}), (("r", "why"), {})],
    "inspect_agent_tool_run": [(("r",), {})],
    "agent_tool_chunks": [(("r",), {}), (("r",), {"after": 3})],
    TAIL: [(("r",), {}), (("r",), {"after": 3})],
}
VERBS: Final = frozenset(_CALLS)
_NOTHING: Final = object()


class ChildAdapter(Protocol):
    """What a class brings to be run as a tool by its own means; no base class.

    Each verb is called inside the agent, like any of its methods; a run id is a text.
    Answers come soon (`limits.adapter_call_s`): the work goes on in the background. What a
    verb has said must be true after a crash as well, so it stands in the agent's storage.
    """

    async def start_agent_tool_run(self, input: Any, /, *, run_id: str) -> Inspection:  # noqa: A002
        """Begin a run and say how it stands; a known id is never begun again."""
        ...

    async def cancel_agent_tool_run(
        self, run_id: str, reason: str | None = None
    ) -> Inspection | None:
        """End a run `aborted` if it goes on, and say how it stands; None: unknown."""
        ...

    async def inspect_agent_tool_run(self, run_id: str) -> Inspection | None:
        """Say how a run stands; None: unknown, and it still is afterwards.

        `running` promises that somebody works on it: after a crash this verb is where
        the work is taken up, or the run is ended.
        """
        ...

    async def agent_tool_chunks(
        self, run_id: str, after: int = -1
    ) -> Sequence[StoredChunk]:
        """Return stored chunks after that number, dense from 0; empty: no more so far."""
        ...


class TailingAdapter(ChildAdapter, Protocol):
    """The same with the verb that may be left out."""

    def tail_agent_tool_run(
        self, run_id: str, after: int = -1
    ) -> AsyncIterator[StoredChunk]:
        """Yield chunks after that number as they come, and end when the run does.

        An async generator; closing it changes nothing for the run.
        """
        ...


def brings_verbs(cls: type) -> bool:
    """Whether a class is a `ChildAdapter`; raises `UsageError` when only half of one."""
    found = {name for name in _CALLS if hasattr(cls, name)}
    if not found:
        return False
    missing = sorted(VERBS - {TAIL} - found)
    if missing:
        msg = f"{cls.__name__} has {min(found)} and lacks {', '.join(missing)}"
        raise UsageError(msg)
    for name in sorted(found):
        _check_verb(cls, name)
    return True


def _check_verb(cls: type, name: str) -> None:
    fn = getattr(cls, name)
    if name == TAIL:
        if inspect.iscoroutinefunction(fn):
            msg = f"{cls.__name__}.{name} must be an async generator"
            raise UsageError(msg)
    elif not inspect.iscoroutinefunction(fn):
        msg = f"{cls.__name__}.{name} must be `async def` without `yield`"
        raise UsageError(msg)
    signature = inspect.signature(fn)
    for args, named in _CALLS[name]:
        try:
            signature.bind(None, *args, **named)
        except TypeError as error:
            shown = [repr(a) for a in args] + [f"{k}={v!r}" for k, v in named.items()]
            msg = (
                f"{cls.__name__}.{name}{signature} cannot be called"
                f" as {name}({', '.join(shown)}): {error}"
            )
            raise UsageError(msg) from None


# ---- following one


async def follow(node: Node, turn: Turn) -> AsyncIterator[Chunk]:
    """Yield the chunks of a run that are not stored yet; set how the turn ends."""
    assert turn.run_id is not None
    pump = _Pump(node, turn, turn.run_id)
    try:
        if not await pump.joined():
            return
        idle = False
        while True:
            start = pump.after
            while page := await pump.page():
                for chunk in page:
                    yield chunk
                    if pump.fails_by(chunk):
                        return
            if pump.over is not None:
                pump.finish(pump.over)
                return
            await pump.look()
            if pump.over is not None:
                continue  # what it has said until then comes first
            if idle or not pump.tails:
                await pump.rest(said=pump.after > start)
            if pump.tails:
                async with pump.tail() as tail:
                    while (live := await pump.next(tail)) is not None:
                        yield live
                        if pump.fails_by(live):
                            return
                idle = pump.after == start and not pump.silent
    except (Exception, GeneratorExit):
        if node.state is State.LIVE and not pump.told and not _cancelled():
            node.tree.start_soon(goodbye, node, turn.run_id, "it was given up")
        raise


def _cancelled() -> bool:
    return trio.current_effective_deadline() == -math.inf


@final
class _Pump:
    """One attempt at following one run."""

    def __init__(self, node: Node, turn: Turn, run_id: str) -> None:
        self.node, self.turn, self.run_id = node, turn, run_id
        self.child = cast(TailingAdapter, node.agent)
        self.limits = node.tree.kernel.limits
        self.tails = hasattr(node.agent, TAIL)
        self.over: Inspection | None = None
        self.told = False  # the child knows that its run is over
        self.silent = False  # the last tail was closed because it said nothing
        stream = turn._stream
        self.after = stream.committed + len(stream.staged) - 1
        self._rest_s = self.limits.adapter_poll_s

    async def joined(self) -> bool:
        """Find the run or start it; False: it is lost, and settled."""
        found = self._judged(
            await self._ask(self.child.inspect_agent_tool_run, self.run_id)
        )
        if found is None and self.turn.attempt > 1 and not self._may_start_again():
            # It may have done what nobody remembers: that is never repeated.
            self.told = True
            self._end(Ending.by("not-started"))
            return False
        if found is None:
            start = self.child.start_agent_tool_run
            begun = await self._ask(start, self.turn.input, run_id=self.run_id)
            found = self._judged(begun)
            if found is None:
                raise self._wrong("start_agent_tool_run returned None")
        self._saw(found)
        return True

    def _may_start_again(self) -> bool:
        return self.node.kind.cls.resumable and self.after < 0

    async def page(self) -> list[Chunk]:
        """Return the next stored chunks; empty when there are no more so far."""
        said = await self._ask(
            self.child.agent_tool_chunks, self.run_id, after=self.after
        )
        if not isinstance(said, Sequence):
            raise self._wrong(f"agent_tool_chunks returned {said!r:.200}, no list")
        out = []
        for one in said:
            match core.order(self.after, one):
                case core.Take(chunk):
                    self.after += 1
                    out.append(chunk)
                case core.Gap(why) | Wrong(why):
                    raise self._wrong(why)
        return out

    async def look(self) -> None:
        """Ask how the run stands."""
        found = self._judged(
            await self._ask(self.child.inspect_agent_tool_run, self.run_id)
        )
        if found is None:
            raise self._wrong("it does not know its run any more")
        self._saw(found)

    async def rest(self, *, said: bool) -> None:
        """Wait before the next look, ever longer while nothing was said."""
        if said:
            self._rest_s = self.limits.adapter_poll_s
        await trio.sleep(self._rest_s)
        self._rest_s = min(self._rest_s * 2, self.limits.adapter_silence_s)

    def tail(self) -> AbstractAsyncContextManager[AsyncIterator[Any]]:
        """Follow live; leaving it detaches."""
        tail = self.child.tail_agent_tool_run(self.run_id, after=self.after)
        return aclosing(tail)  # type: ignore[type-var]

    async def next(self, tail: AsyncIterator[Any]) -> Chunk | None:
        """Return the next chunk of a tail; None when it ends, breaks, is silent or skips one.

        A tail only watches: one that raises is reported, and what is stored decides.
        """
        while True:
            said: Any = _NOTHING
            self.silent = True
            with trio.move_on_after(self.limits.adapter_silence_s):
                try:
                    said = await anext(tail, _NOTHING)
                except CuletError:
                    raise
                except Exception as error:
                    kernel = self.node.tree.kernel
                    kernel.report(
                        "tail", self.node, error, name=self.run_id, run_id=self.run_id
                    )
                self.silent = False
            if said is _NOTHING:
                return None
            match core.order(self.after, said):
                case core.Take(chunk):
                    self.after += 1
                    return cast("Chunk", chunk)
                case core.Gap():  # what is stored decides
                    return None
                case Wrong(why):
                    raise self._wrong(why)
            await trio.lowlevel.checkpoint()  # known: it may say that for ever

    def fails_by(self, chunk: Chunk) -> bool:
        """Whether that chunk is no chunk but the failure of the turn, said in band."""
        if chunk.get("type") != "error":
            return False
        if not self.told:
            self.node.tree.start_soon(goodbye, self.node, self.run_id, "it failed")
        return True

    def finish(self, found: Inspection) -> None:
        """Settle what the child says: the first that commits stands."""
        self.told = True
        if found.status == "completed":
            self.turn.output = found.output
            if found.summary is not None:
                self.turn.summary = found.summary
            return
        limit = self.limits.summary_bytes
        summary = found.summary or self.turn.text or None
        if summary is not None:
            summary = cut_bytes(summary, limit)
        text = found.error or None
        if found.status == "aborted":
            self._end(Ending.by("cancelled", reason=text, summary=summary))
        else:
            text = text or "it failed, and its adapter does not say why"
            ending = Ending.by("failed", text[:ERROR_CHARS], summary=summary)
            ending.error_id = self.node.tree.kernel.report(  # as raised by its code
                "turn",
                self.node,
                FacetBroken(text),
                name=self.run_id,
                run_id=self.run_id,
            )
            self._end(ending)

    def _end(self, ending: Ending) -> None:
        self.node.tree.turns.end(self.turn, ending)

    def _saw(self, found: Inspection) -> None:
        self.over = found if found.over else None
        self.told = found.over

    def _judged(self, answer: object) -> Inspection | None:
        verdict = core.judge(answer)
        if isinstance(verdict, Wrong):
            raise self._wrong(verdict.why)
        return verdict

    async def _ask(self, verb: Any, *args: Any, **named: Any) -> Any:
        limit = self.limits.adapter_call_s
        with trio.move_on_after(limit):
            return await verb(*args, **named)
        msg = f"{verb.__name__} took more than {limit} s"
        raise TimeoutError(msg)

    def _wrong(self, why: str) -> UsageError:
        name = self.node.kind.name
        return UsageError(f"{name} breaks the contract of ChildAdapter: {why}")


# ---- taking leave


async def goodbye(node: Node, run_id: str, reason: str | None) -> Inspection | None:
    """Tell a child that its run was ended; None when it does not answer in time.

    What it answers changes nothing: the run's row stands.
    """
    tree = node.tree
    limit = tree.kernel.limits.cancel_s
    answers: list[object] = []
    heard, scope = trio.Event(), trio.CancelScope()

    async def ask() -> None:
        ctx = Ambient(node, asker=run_id)
        child = cast(ChildAdapter, node.agent)
        try:
            with scope:
                verb = child.cancel_agent_tool_run
                answers.append(await node.enter(ctx, verb, run_id, reason))
        except FacetAborted:
            pass  # it was stopped meanwhile
        except BaseException as error:
            if is_stop(error):
                raise
            tree.kernel.report("cancel", node, error, name=run_id, run_id=run_id)
        finally:
            heard.set()

    if tree.closed:
        return None
    tree.start_soon(ask)
    with trio.move_on_after(limit):
        await heard.wait()
    if not heard.is_set():
        error = TimeoutError(f"cancel_agent_tool_run took more than {limit} s")
        tree.kernel.report("cancel", node, error, name=run_id, run_id=run_id)
        scope.cancel(reason="too slow")
    verdict = core.judge(answers[0]) if answers else None
    return None if isinstance(verdict, Wrong) else verdict


async def goodbyes(node: Node, runs: Mapping[str, str | None]) -> None:
    """Tell a child of several runs at once; `runs` says the reason of each."""
    async with trio.open_nursery() as nursery:
        for run_id, reason in runs.items():
            nursery.start_soon(goodbye, node, run_id, reason)
