"""The conformance suite for authors of chat bases: ten lines in a test file of theirs.

    from culet.adapters.contract import adapter_contract, perform

    class Parrot(MyChatBase):                       # however your base gets its words:
        async def reply(self, prompt):              # here they come from `perform`
            async for word in perform(prompt):
                yield word

    TestParrot = adapter_contract(lambda: Parrot)   # pytest finds its tests

Every law is played on scripts that Hypothesis makes up: words, a door at which the
performance stands while the law does what it is about, and perhaps a failure at the end.
The laws of `KERNEL` hold for whatever can be run as a tool; those of `VERBS` are about
the five verbs of a `ChildAdapter`, called without the kernel between. Needs pytest and
Hypothesis; plays on a store in memory, in virtual time unless told otherwise.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from itertools import count
from typing import Any, ClassVar, Final, NamedTuple, cast

import trio
import trio.lowlevel
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from culet.kernel import (
    Agent,
    AgentToolRun,
    Inspection,
    Limits,
    StoredChunk,
)
from culet.kernel.core.inspection import Take, Wrong, judge, order
from culet.kernel.node import Ambient, Node
from culet.kernel.pump import TAIL, TailingAdapter, brings_verbs
from culet.kernel.testing import Harness, open_test_kernel

from .performance import STAGE, perform, spoken

__all__ = ["KERNEL", "VERBS", "Script", "adapter_contract", "perform"]

_ROOT: Final = ("Asker", "a")
_NAMES: Final = count(1)
_LOOK_S: Final = 0.002  # between two looks at what has no event to wait for
_CALM_S: Final = 1.0  # in which a child that has ended says nothing more
_REAL_CALM_S: Final = 0.02  # the same where time is real


class Script(NamedTuple):
    """What one performance says: words, the place of its door among them, its end."""

    words: list[str]
    door: int
    fails: bool

    def prompt(self, *, door: bool = True, fails: bool | None = None) -> str:
        """Return it as a prompt for `perform`, under a name of its own."""
        words = list(self.words)
        if door:
            words.insert(min(self.door, len(words)), "wait:door")
        if self.fails if fails is None else fails:
            words.append("fail:the-lamp-went-out")
        return " ".join([f"#{next(_NAMES)}", *words])


def _scripts(fewest: int) -> st.SearchStrategy[Script]:
    word = st.text("abcxyzäß漢", min_size=1, max_size=4)
    words = st.lists(word, min_size=fewest, max_size=6)
    return st.builds(Script, words, st.integers(0, 6), st.booleans())


class _Asker(Agent):
    """The parent in every test."""

    child: ClassVar[type[Agent]]

    async def ask(self, run_id: str, prompt: str) -> AgentToolRun:
        return await self.run_agent_tool(
            self.child, prompt, run_id=run_id, detached=True
        )

    async def wait(self, run_id: str, prompt: str) -> AgentToolRun:
        return await self.run_agent_tool(self.child, prompt, run_id=run_id)

    async def find(self, run_id: str) -> AgentToolRun | None:
        return self.runs.get(run_id)

    async def stop(self, run_id: str, reason: str) -> str | None:
        return (await self.runs.cancel(run_id, reason)).status

    async def frames(self, run_id: str, after: int) -> list[Any]:
        return [f async for f in self.runs.replay(run_id, after)]

    async def make(self, name: str) -> None:
        await self.dynamic_agents.get(self.child, name)

    async def children(self) -> list[str]:
        return [c.name for c in self.dynamic_agents.list(self.child)]


class World:
    """One kernel with a parent and its children, as the laws use it."""

    def __init__(self, child: type[Agent], test: Harness, calm_s: float) -> None:
        self.child, self.test, self.calm_s = child, test, calm_s
        self.asker: Any = None

    async def reopen(self) -> None:
        """Crash and come back."""
        await self.test.crash()
        await self.test.reopen()
        await self.connect()

    async def connect(self) -> None:
        """Get the parent's stub of this life."""
        self.asker = await self.test.kernel.get_agent(type_of(self.child), _ROOT[1])

    async def over(self, run_id: str, prompt: str) -> AgentToolRun:
        """Wait for the end of a run that was asked for."""
        run = await self.asker.wait(run_id, prompt)
        assert run.status != "running", f"{run_id} goes on for ever"
        return cast("AgentToolRun", run)

    async def said(self, run_id: str) -> list[dict[str, Any]]:
        """Return the chunks of a run as its clients see them, from dense frames."""
        frames = await self.asker.frames(run_id, -1)
        numbers = [f["sequence"] for f in frames]
        assert numbers == list(range(len(frames))), f"frames are numbered {numbers}"
        return [f["event"] for f in frames if f["event"]["kind"] == "chunk"]

    async def words(self, run_id: str) -> list[str]:
        """Return the words that its clients have heard."""
        from msgspec import json

        return _words(json.decode(e["body"]) for e in await self.said(run_id))

    def node(self, name: str) -> Node | None:
        """Return a child in memory."""
        return self.test.find([_ROOT, (self.child.__name__, name)])

    async def stopped(self, name: str) -> None:
        """Wait until a child is out of memory."""
        while self.node(name) is not None:  # noqa: ASYNC110  # it has no event for that
            await trio.sleep(_LOOK_S)

    async def facet(self, name: str) -> Verbs:
        """Return the verbs of a child that exists, with no run of the kernel's."""
        await self.asker.make(name)
        node = self.node(name)
        assert node is not None
        return Verbs(node, name)


class Verbs:
    """The five verbs of a live child, each answer looked at."""

    def __init__(self, node: Node, run_id: str) -> None:
        self.node, self.run_id = node, run_id
        self.child = cast(TailingAdapter, node.agent)

    async def call(
        self, fn: Callable[..., Awaitable[Any]], *args: Any, **kw: Any
    ) -> Any:
        """Call one inside the agent, as the kernel does."""

        async def inside() -> Any:
            return await fn(*args, **kw)

        return await self.node.enter(Ambient(self.node), inside)

    async def start(self, prompt: str) -> Inspection:
        """Start, and look at the answer."""
        start = self.child.start_agent_tool_run
        found = _seen(await self.call(start, prompt, run_id=self.run_id))
        assert found is not None, "start returned None"
        return found

    async def inspect(self) -> Inspection | None:
        """Inspect, and look at the answer."""
        return _seen(await self.call(self.child.inspect_agent_tool_run, self.run_id))

    async def cancel(self, reason: str | None = None) -> Inspection | None:
        """Cancel, and look at the answer."""
        cancel = self.child.cancel_agent_tool_run
        return _seen(await self.call(cancel, self.run_id, reason))

    async def chunks(self, after: int = -1) -> list[StoredChunk]:
        """Return all stored chunks after a number; they have to be dense."""
        out: list[StoredChunk] = []
        while True:
            get = self.child.agent_tool_chunks
            page = await self.call(get, self.run_id, after=after)
            if not page:
                return out
            for one in page:
                verdict = order(after, one)
                assert isinstance(verdict, Take), f"after {after} came {one!r:.200}"
                after += 1
                out.append(StoredChunk(*one))

    async def tail(
        self, after: int = -1, limit: int | None = None
    ) -> list[StoredChunk]:
        """Follow a run to its end, or for `limit` chunks, then close the tail."""

        async def follow() -> list[StoredChunk]:
            out: list[StoredChunk] = []
            tail = self.child.tail_agent_tool_run(self.run_id, after=after)
            async with aclosing(tail) as said:  # type: ignore[type-var]
                while limit is None or len(out) < limit:
                    one = await anext(said, None)
                    if one is None:
                        break
                    out.append(StoredChunk(*one))
            return out

        return cast("list[StoredChunk]", await self.call(follow))

    async def over(self) -> Inspection:
        """Wait for the end of the run."""
        while True:
            found = await self.inspect()
            assert found is not None, "it does not know its run any more"
            if found.over:
                return found
            await trio.sleep(_LOOK_S)


def _seen(answer: object) -> Inspection | None:
    verdict = judge(answer)
    assert not isinstance(verdict, Wrong), verdict.why
    return verdict


def _words(chunks: Any) -> list[str]:
    deltas = (c.get("delta", "") for c in chunks if c.get("type") == "text-delta")
    return "".join(deltas).split()


def _ended_truly(run: AgentToolRun, prompt: str) -> None:
    if "fail:" in prompt:
        assert run.status == "error", f"it failed, and its run is {run.status}"
        assert run.error, "an error has no text"
        assert "the-lamp-went-out" in run.error, (
            f"the error's text is lost: {run.error}"
        )
    else:
        assert run.status == "completed", f"{run.status}: {run.error or run.reason}"


def _said_truly(words: list[str], prompt: str) -> None:
    """All words; of what failed the first ones: a framework may lose its last."""
    whole = spoken(prompt)
    if "fail:" in prompt:
        whole = whole[: len(words)]
    assert words == whole, f"it said {words}, not {whole}"


# ---- laws of whatever can be run as a tool


async def says_all_of_it_once(world: World, script: Script) -> None:
    """A run says its words in order, in dense frames, and ends as it truly ended."""
    prompt = script.prompt(door=False)
    run = await world.asker.wait("r", prompt)
    _ended_truly(run, prompt)
    _said_truly(await world.words("r"), prompt)
    assert run.completed_at is not None


async def a_known_id_starts_nothing(world: World, script: Script) -> None:
    """A second dispatch joins the run, while it goes on and afterwards."""
    prompt = script.prompt()
    await world.asker.ask("r", prompt)
    await STAGE.reached(prompt)
    again = await world.asker.ask("r", prompt)
    assert again.status == "running"
    STAGE.open(prompt)
    first = await world.over("r", prompt)
    assert await world.over("r", prompt) == first
    assert STAGE.begun[prompt.split()[0]] == 1, "it was begun twice"


async def a_cancelled_run_says_nothing_more(world: World, script: Script) -> None:
    """Cancel by id: `aborted` with its reason, in bounded time, and then silence."""
    prompt, other = script.prompt(), script.prompt(door=False, fails=False)
    await world.asker.ask("r", prompt)
    await STAGE.reached(prompt)
    assert await world.asker.stop("r", "enough") == "aborted"
    await world.stopped("r")
    before = await world.said("r")
    STAGE.open(prompt)
    assert (await world.asker.wait("s", other)).status == "completed"
    await trio.sleep(world.calm_s)
    run = await world.asker.find("r")
    assert (run.status, run.reason) == ("aborted", "enough")
    assert await world.said("r") == before
    assert await world.words("r") == spoken(prompt)[: len(await world.words("r"))]


async def a_late_cancel_changes_nothing(world: World, script: Script) -> None:
    """What has ended stays as it is."""
    prompt = script.prompt(door=False)
    run = await world.asker.wait("r", prompt)
    assert await world.asker.stop("r", "too late") == run.status
    assert await world.asker.find("r") == run


async def an_observer_that_leaves_stops_nothing(world: World, script: Script) -> None:
    """A caller that is cancelled while it waits leaves its run alone."""
    prompt = script.prompt()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.asker.wait, "r", prompt)
        await STAGE.reached(prompt)
        nursery.cancel_scope.cancel()
    assert (await world.asker.find("r")).status == "running"
    STAGE.open(prompt)
    _ended_truly(await world.over("r", prompt), prompt)


async def runs_do_not_mix(world: World, script: Script) -> None:
    """Two runs of one class side by side each say their own words."""
    slow, quick = script.prompt(), script.prompt(door=False, fails=False)
    await world.asker.ask("r", slow)
    await STAGE.reached(slow)
    assert (await world.asker.wait("s", quick)).status == "completed"
    assert await world.words("s") == spoken(quick)
    STAGE.open(slow)
    _ended_truly(await world.over("r", slow), slow)
    _said_truly(await world.words("r"), slow)


async def a_crash_takes_nothing_back(world: World, script: Script) -> None:
    """What was told before a crash stands; the run ends truly, no word twice."""
    prompt = script.prompt()
    await world.asker.ask("r", prompt)
    await STAGE.reached(prompt)
    before = await world.said("r")
    await world.reopen()
    STAGE.open(prompt)
    run = await world.over("r", prompt)
    assert (await world.said("r"))[: len(before)] == before
    words = await world.words("r")
    if run.status == "interrupted":
        assert words == spoken(prompt)[: len(words)]
    else:
        _ended_truly(run, prompt)
        _said_truly(words, prompt)


async def an_unknown_id_makes_nothing(world: World, script: Script) -> None:
    """To ask about a run, or to cancel it, does not make one."""
    assert await world.asker.find("r") is None
    assert await world.asker.stop("r", "why") is None
    assert await world.asker.children() == []


# ---- laws of the five verbs


async def inspecting_makes_nothing(world: World, script: Script) -> None:
    """An unknown id is None, whichever verb hears of it and however often."""
    verbs = await world.facet("r")
    for _ in range(2):
        assert await verbs.inspect() is None
        assert await verbs.cancel("why") is None
        assert await verbs.chunks() == []
    if hasattr(verbs.child, TAIL):
        assert await verbs.tail() == []
    assert await verbs.inspect() is None


async def a_second_start_begins_nothing(world: World, script: Script) -> None:
    """Start is idempotent by id, with another input as well, also after the end."""
    prompt, other = script.prompt(), script.prompt(door=False)
    verbs = await world.facet("r")
    first = await verbs.start(prompt)
    await STAGE.reached(prompt)
    assert not first.over
    again = await verbs.start(other)
    assert again.started_at == first.started_at
    STAGE.open(prompt)
    end = await verbs.over()
    before = await verbs.chunks()
    assert await verbs.start(other) == end
    await trio.sleep(world.calm_s)
    assert await verbs.chunks() == before
    assert STAGE.begun[prompt.split()[0]] == 1, "it was begun twice"
    assert STAGE.begun[other.split()[0]] == 0, "the second input was begun"


async def an_end_is_told_truly(world: World, script: Script) -> None:
    """An inspection says how it ended: status, text of the error, time of completion."""
    prompt = script.prompt(door=False)
    verbs = await world.facet("r")
    await verbs.start(prompt)
    end = await verbs.over()
    if script.fails:
        assert end.status == "error", f"it failed, and its inspection says {end.status}"
        assert "the-lamp-went-out" in (end.error or ""), "the error's text is lost"
    else:
        assert end.status == "completed"
    assert _words(c for _, c in await verbs.chunks()) == spoken(prompt)


async def nothing_is_said_after_the_end(world: World, script: Script) -> None:
    """When a run is over its chunks are all there, and stay as they are."""
    prompt = script.prompt(door=False)
    verbs = await world.facet("r")
    await verbs.start(prompt)
    end = await verbs.over()
    before = await verbs.chunks()
    await trio.sleep(world.calm_s)
    assert await verbs.chunks() == before, "chunks came after the end"
    assert await verbs.inspect() == end


async def chunks_are_dense(world: World, script: Script) -> None:
    """Stored chunks are numbered from 0 without a gap, from wherever they are read."""
    prompt = script.prompt(door=False)
    verbs = await world.facet("r")
    await verbs.start(prompt)
    await verbs.over()
    whole = await verbs.chunks()
    for after in range(-1, len(whole) + 1):
        assert await verbs.chunks(after) == whole[after + 1 :]


async def a_tail_has_what_is_stored(world: World, script: Script) -> None:
    """A tail from any place says each chunk once, in order, and ends with the run."""
    prompt = script.prompt()
    verbs = await world.facet("r")
    if not hasattr(verbs.child, TAIL):
        return
    await verbs.start(prompt)
    await STAGE.reached(prompt)
    tailed: dict[int, list[StoredChunk]] = {}

    async def follow(after: int) -> None:
        tailed[after] = await verbs.tail(after)

    async with trio.open_nursery() as nursery:
        for after in range(-1, script.door):
            nursery.start_soon(follow, after)
        await trio.lowlevel.checkpoint()
        STAGE.open(prompt)
    await verbs.over()
    whole = await verbs.chunks()
    for after, found in tailed.items():
        assert found == whole[after + 1 :], f"the tail after {after} differs"
    assert await verbs.tail() == whole


async def closing_a_tail_stops_nothing(world: World, script: Script) -> None:
    """A tail that is closed, or cancelled while it waits, leaves the run alone."""
    prompt = script.prompt()
    verbs = await world.facet("r")
    if not hasattr(verbs.child, TAIL):
        return
    await verbs.start(prompt)
    await STAGE.reached(prompt)
    there = len(await verbs.chunks())
    await verbs.tail(limit=there)
    with trio.move_on_after(world.calm_s):
        await verbs.tail(there - 1)
    STAGE.open(prompt)
    end = await verbs.over()
    assert end.status == ("error" if script.fails else "completed")
    assert _words(c for _, c in await verbs.chunks()) == spoken(prompt)


async def a_cancel_ends_it(world: World, script: Script) -> None:
    """Cancel answers soon, says `aborted`, keeps the reason; then nothing is said."""
    prompt = script.prompt()
    verbs = await world.facet("r")
    await verbs.start(prompt)
    await STAGE.reached(prompt)
    limit = world.test.kernel.limits.cancel_s
    found = None
    with trio.move_on_after(limit) as scope:
        found = await verbs.cancel("enough")
    assert not scope.cancelled_caught, f"cancel took more than {limit} s"
    assert found is not None, "cancel of a run that goes on answered None"
    assert found.status == "aborted", f"cancelled, and it says {found.status}"
    assert "enough" in (found.error or ""), "the reason of the cancel is lost"
    before = await verbs.chunks()
    STAGE.open(prompt)
    await trio.sleep(world.calm_s)
    assert await verbs.chunks() == before, "chunks came after the end"
    assert await verbs.cancel("again") == found
    assert await verbs.inspect() == found


async def a_late_cancel_rewrites_nothing(world: World, script: Script) -> None:
    """Cancel of a run that has ended answers with the end that stands."""
    verbs = await world.facet("r")
    await verbs.start(script.prompt(door=False))
    end = await verbs.over()
    assert await verbs.cancel("too late") == end
    assert await verbs.inspect() == end


async def a_crash_is_survived(world: World, script: Script) -> None:
    """After a crash the child knows its run, and brings it to an end of its own."""
    prompt = script.prompt()
    verbs = await world.facet("r")
    await verbs.start(prompt)
    await STAGE.reached(prompt)
    before = await verbs.chunks()
    await verbs.call(verbs.node.agent.durable)
    await world.reopen()
    verbs = await world.facet("r")
    STAGE.open(prompt)
    end = await verbs.over()
    whole = await verbs.chunks()
    assert whole[: len(before)] == before
    said = _words(c for _, c in whole)
    if end.status == "completed":
        assert said == spoken(prompt)
    else:
        assert said == spoken(prompt)[: len(said)]
        assert end.error, "an error has no text"


Law = Callable[[World, Script], Awaitable[None]]
KERNEL: Final[Sequence[Law]] = (
    says_all_of_it_once,
    a_known_id_starts_nothing,
    a_cancelled_run_says_nothing_more,
    a_late_cancel_changes_nothing,
    an_observer_that_leaves_stops_nothing,
    runs_do_not_mix,
    a_crash_takes_nothing_back,
    an_unknown_id_makes_nothing,
)
VERBS: Final[Sequence[Law]] = (
    inspecting_makes_nothing,
    a_second_start_begins_nothing,
    an_end_is_told_truly,
    nothing_is_said_after_the_end,
    chunks_are_dense,
    a_tail_has_what_is_stored,
    closing_a_tail_stops_nothing,
    a_cancel_ends_it,
    a_late_cancel_rewrites_nothing,
    a_crash_is_survived,
)


# ---- the suite


_ASKERS: Final[dict[type[Agent], type[_Asker]]] = {}


def type_of(child: type[Agent]) -> type[_Asker]:
    """Return the parent class for a child class."""
    known = _ASKERS.get(child)
    if known is None:
        known = _ASKERS[child] = type("Asker", (_Asker,), {"child": child})
        known.__module__ = __name__
    return known


def adapter_contract(
    make_child: Callable[[], type[Agent]],
    *,
    examples: int = 10,
    cancel_s: float = 5.0,
    patience_s: float = 30.0,
    real_time: bool = False,
    shrink: bool = True,
    fewest_words: int = 0,
) -> type:
    """Return a class of tests for what `make_child` returns: an agent class.

    The runs of that class say what `perform` says of their input, a text. `examples` are
    played of each law, each for at most `patience_s`; a cancel has `cancel_s`. Say
    `real_time` where threads, processes or sockets are at work: virtual time jumps over
    what they do. `shrink`
    looks for the smallest script that breaks one; `fewest_words` is 1 for a framework that
    does not take silence for an answer. Assign it to a name that pytest
    collects. Raises `UsageError` for half a `ChildAdapter`.
    """
    child = make_child()
    laws = [*KERNEL, *(VERBS if brings_verbs(child) else ())]
    limits = Limits(cancel_s=cancel_s)
    profile = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=(Phase.explicit, Phase.generate, *([Phase.shrink] if shrink else [])),
        suppress_health_check=list(HealthCheck),
    )
    scripts = _scripts(fewest_words)

    def checked(law: Law) -> Callable[..., None]:
        test = _test(law, make_child, limits, patience_s, real_time=real_time)
        return profile(given(script=scripts)(test))

    tests = {f"test_{law.__name__}": checked(law) for law in laws}
    return type(f"Test{child.__name__}", (), {"__doc__": __doc__, **tests})


def _test(
    law: Law,
    make_child: Callable[[], type[Agent]],
    limits: Limits,
    patience_s: float,
    *,
    real_time: bool,
) -> Callable[..., None]:
    calm_s = _REAL_CALM_S if real_time else _CALM_S
    unit = "s" if real_time else "s of virtual time; has it threads? say real_time=True"

    async def play(script: Script) -> None:
        async with _world(make_child(), limits, calm_s) as world:
            with trio.move_on_after(patience_s) as scope:
                await law(world, script)
            assert not scope.cancelled_caught, f"it took more than {patience_s} {unit}"

    def test(self: object, script: Script) -> None:
        clock = None if real_time else trio.testing.MockClock(autojump_threshold=0)
        trio.run(play, script, clock=clock)

    test.__doc__ = law.__doc__
    test.__name__ = test.__qualname__ = f"test_{law.__name__}"
    return test


@asynccontextmanager
async def _world(
    child: type[Agent], limits: Limits, calm_s: float
) -> AsyncIterator[World]:
    asker = type_of(child)
    async with open_test_kernel(
        roots=[asker], facets=[child], limits=limits, abort_grace_s=limits.cancel_s
    ) as test:
        world = World(child, test, calm_s)
        await world.connect()
        yield world
