"""Children that run themselves, followed: what the kernel makes of what they say."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, ClassVar

import pytest
import trio

from adapters.chatbase import ChatBase
from adapters.wrong import (
    CancelBlocks,
    GapInChunks,
    LosesTheErrorText,
    ReportsInterrupted,
    TerminalWithoutCompletedAt,
)
from culet.adapters.performance import STAGE
from culet.kernel import Agent, AgentToolRun, Inspection, Limits, StoredChunk, Turn
from culet.kernel.core.inspection import Gap, Known, Take, Wrong, judge, order
from culet.kernel.errors import UsageError
from culet.kernel.pump import VERBS
from culet.kernel.testing import Harness, open_test_kernel
from kernel.agents import Top, agent_at, node_at, settle

PROMPTS = iter(range(1_000_000))


def prompt(text: str) -> str:
    return f"#pump{next(PROMPTS)} {text}"


class Parent(Top):
    async def ask(self, cls: str, run_id: str, text: str) -> AgentToolRun:
        return await self.run_agent_tool(KINDS[cls], text, run_id=run_id)

    async def dispatch(self, cls: str, run_id: str, text: str) -> AgentToolRun:
        return await self.run_agent_tool(KINDS[cls], text, run_id=run_id, detached=True)

    async def stop(self, run_id: str, reason: str) -> str | None:
        return (await self.runs.cancel(run_id, reason)).status

    async def clear(self) -> int:
        return await self.runs.clear()

    async def run(self, run_id: str) -> AgentToolRun | None:
        return self.runs.get(run_id)

    async def frames(self, run_id: str) -> list[Any]:
        return [f async for f in self.runs.replay(run_id)]


Parent.__name__ = Parent.__qualname__ = "Top"


class Counted(ChatBase):
    """Counts what the kernel asks of it."""

    asked: ClassVar[list[str]] = []

    async def ping(self) -> None:
        pass

    async def start_agent_tool_run(self, given: Any, *, run_id: str) -> Inspection:
        self.asked.append("start")
        return await super().start_agent_tool_run(given, run_id=run_id)

    async def cancel_agent_tool_run(
        self, run_id: str, reason: str | None = None
    ) -> Inspection | None:
        self.asked.append(f"cancel {reason}")
        return await super().cancel_agent_tool_run(run_id, reason)


class Forgetful(Counted):
    """Keeps nothing over its life."""

    async def on_start(self, props: Any = None) -> None:
        await super().on_start(props)
        self.sql("DELETE FROM mine")
        self.sql("DELETE FROM said")


class Again(Forgetful):
    """Says that it may be started again."""

    resumable = True


class Stuck(CancelBlocks):
    """Says nonsense, and does not hear."""

    def say(self, run_id: str, n: int, word: str) -> None:
        self.sql("INSERT INTO said VALUES (?, ?, '7')", run_id, n)
        self.tell()


class Silent(Counted):
    """Its tail never says that the run is over."""

    async def tail_agent_tool_run(
        self, run_id: str, after: int = -1
    ) -> AsyncIterator[StoredChunk]:
        async for one in super().tail_agent_tool_run(run_id, after):
            yield one
        await trio.sleep_forever()


class Twice(Counted):
    """Its tail says everything from the start, and everything twice."""

    async def tail_agent_tool_run(
        self, run_id: str, after: int = -1
    ) -> AsyncIterator[StoredChunk]:
        async for one in super().tail_agent_tool_run(run_id, -1):
            yield one
            yield one


class BreaksOff(Counted):
    """Its tail fails after each chunk."""

    async def tail_agent_tool_run(
        self, run_id: str, after: int = -1
    ) -> AsyncIterator[StoredChunk]:
        async with aclosing(super().tail_agent_tool_run(run_id, after)) as tail:
            async for one in tail:
                yield one
                raise ConnectionError("the tail")


class Hanging(Counted):
    """Does not answer."""

    async def inspect_agent_tool_run(self, run_id: str) -> Inspection | None:
        await trio.sleep_forever()
        return None


class Ends(ChatBase):
    """Ends at once, as its input says."""

    async def inspect_agent_tool_run(self, run_id: str) -> Inspection | None:
        rows = self.sql("SELECT input FROM mine WHERE run = ?", run_id)
        status = rows[0].input.strip('"') if rows else ""
        return Inspection(status, {"n": 7}, "seven", "why", 1, 2) if rows else None  # type: ignore[arg-type]


class FailsInBand(Counted):
    """Says that it failed as a chunk, and goes on talking."""

    def say(self, run_id: str, n: int, word: str) -> None:
        chunk = json.dumps(
            {"type": "error", "errorText": "in band"} if n == 1 else word_of(word)
        )
        self.sql("INSERT INTO said VALUES (?, ?, ?)", run_id, n, chunk)
        self.tell()


class Nonsense(Counted):
    """A chunk of its is no chunk."""

    def say(self, run_id: str, n: int, word: str) -> None:
        self.sql("INSERT INTO said VALUES (?, ?, '7')", run_id, n)
        self.tell()


class Breaks(Counted):
    """Its first life breaks in the middle of the work."""

    lives: ClassVar[list[str]] = []

    async def work(self, run_id: str) -> None:
        self.lives.append(run_id)
        if len(self.lives) == 1:
            self.say(run_id, 0, "one")
            await trio.sleep(1)
            raise RuntimeError("in the background")
        await super().work(run_id)


def word_of(word: str) -> dict[str, str]:
    return {"type": "text-delta", "id": "t", "delta": f"{word} "}


class NoTail(Agent):
    """The four verbs that are needed, and no tail."""

    async def start_agent_tool_run(self, given: Any, *, run_id: str) -> Inspection:
        self.set_state({"run": run_id, "words": given.split()})
        return Inspection("running")

    async def cancel_agent_tool_run(
        self, run_id: str, reason: str | None = None
    ) -> Inspection | None:
        return await self.inspect_agent_tool_run(run_id)

    async def inspect_agent_tool_run(self, run_id: str) -> Inspection | None:
        if self.state is None:
            return None
        if self.state.get("looked", 0) < 3:
            self.set_state({**self.state, "looked": self.state.get("looked", 0) + 1})
            return Inspection("running")
        return Inspection("completed", completed_at=1)

    async def agent_tool_chunks(
        self, run_id: str, after: int = -1
    ) -> list[StoredChunk]:
        said = enumerate(self.state["words"][: self.state.get("looked", 0)])
        chunks = [(n, {"type": "text-delta", "id": "t", "delta": w}) for n, w in said]
        return [StoredChunk(*c) for c in chunks if c[0] > after]


KINDS: dict[str, type[Agent]] = {
    c.__name__: c
    for c in (
        ChatBase, Counted, Forgetful, Silent, Twice, BreaksOff, Hanging, Ends, NoTail,
        Again, Stuck, FailsInBand, Nonsense, Breaks, CancelBlocks, GapInChunks, LosesTheErrorText,
        ReportsInterrupted, TerminalWithoutCompletedAt,
    )
}  # fmt: skip


@pytest.fixture(autouse=True)
def fresh() -> None:
    Counted.asked.clear()


def kernel(**options: Any) -> Any:
    return open_test_kernel(roots=[Parent], facets=list(KINDS.values()), **options)


def texts(frames: list[Any]) -> list[str]:
    chunks = [f["event"] for f in frames if f["event"]["kind"] == "chunk"]
    return [json.loads(c["body"])["delta"].strip() for c in chunks]


async def parent(test: Harness) -> Any:
    return await test.kernel.get_agent(Parent, "a")


# ---- pure


@pytest.mark.rule("I-08")
def test_what_an_inspection_may_not_say() -> None:
    assert judge(None) is None
    good = Inspection("completed", completed_at=1)
    assert judge(good) is good
    for bad in (
        {"status": "completed"},
        Inspection("completed"),
        Inspection("running", completed_at=1),
        Inspection("interrupted", completed_at=1),  # type: ignore[arg-type]
        Inspection("error", error=ValueError(), completed_at=1),  # type: ignore[arg-type]
    ):
        assert isinstance(judge(bad), Wrong), bad


@pytest.mark.parametrize(
    ("after", "said", "kind"),
    [
        (-1, (0, {}), Take), (4, (5, {}), Take), (4, (4, {}), Known),
        (4, (0, {}), Known), (-1, (1, {}), Gap), (4, (6, {}), Gap),
        (-1, (-1, {}), Wrong), (-1, {}, Wrong), (-1, (True, {}), Wrong),
        (-1, (0,), Wrong), (-1, StoredChunk(0, {}), Take),
    ],
)  # fmt: skip
def test_which_chunk_is_the_next(after: int, said: Any, kind: type) -> None:
    assert isinstance(order(after, said), kind)


# ---- what is refused when the kernel opens


def less(*names: str, **more: Any) -> type[Agent]:
    kept = {n: getattr(ChatBase, n) for n in VERBS if n not in names}
    return type("Odd", (Agent,), {**kept, **more})


async def _one(self: Any, run_id: str) -> None: ...
async def _generator(self: Any, run_id: str, after: int = -1) -> AsyncIterator[Any]:
    yield 1


def _plain(self: Any, run_id: str) -> None: ...


async def _turn(self: Any, turn: Turn) -> AsyncIterator[Any]:
    yield {}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: less("agent_tool_chunks"), "lacks agent_tool_chunks"),
        (lambda: less(cancel_agent_tool_run=_one), r"cancel_agent_tool_run\('r', 'why'\)"),
        (lambda: less(start_agent_tool_run=_one), "cannot be called as start_agent"),
        (lambda: less(inspect_agent_tool_run=_plain), "must be `async def` without"),
        (lambda: less(agent_tool_chunks=_generator), "must be `async def` without"),
        (lambda: less(tail_agent_tool_run=_one), "must be an async generator"),
        (lambda: less(on_turn=_turn), "keep one"),
    ],
)  # fmt: skip
@pytest.mark.rule("T-007")
async def test_half_a_child_adapter_is_refused_when_the_kernel_opens(
    make: Callable[[], type[Agent]], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        async with open_test_kernel(roots=[Top], facets=[make()]):
            pass


async def test_the_verbs_are_the_kernels_alone(clock: object) -> None:
    async with kernel() as test:
        top = await parent(test)
        await top.dispatch("ChatBase", "r", prompt("one"))
        child = await test.kernel.get_sub_agent(top, ChatBase, "r")
        with pytest.raises(UsageError, match="belongs to the agent itself"):
            await child.cancel_agent_tool_run("r")


# ---- following


async def test_a_run_is_followed_to_its_end(clock: object) -> None:
    async with kernel() as test:
        top = await parent(test)
        run = await top.ask("ChatBase", "r", prompt("one two three"))
        assert (run.status, run.summary) == ("completed", "one two three ")
        frames = await top.frames("r")
        assert [f["sequence"] for f in frames] == [0, 1, 2, 3, 4]
        assert texts(frames) == ["one", "two", "three"]


@pytest.mark.rule("T-076")
async def test_a_child_without_a_tail_is_asked_now_and_then(clock: object) -> None:
    async with kernel() as test:
        run = await (await parent(test)).ask("NoTail", "r", "a b c")
        assert (run.status, run.summary) == ("completed", "abc")


@pytest.mark.parametrize("name", ["Silent", "Twice", "BreaksOff"])
@pytest.mark.rule("T-066", "T-078", "B-05")
async def test_a_tail_that_is_silent_repeats_itself_or_breaks_loses_nothing(
    name: str, clock: object
) -> None:
    async with kernel() as test:
        top = await parent(test)
        run = await top.ask(name, "r", prompt("one two"))
        assert run.status == "completed"
        assert texts(await top.frames("r")) == ["one", "two"]


@pytest.mark.limit("adapter_silence_s")
async def test_a_tail_that_is_silent_is_left_after_adapter_silence_s(
    clock: object,
) -> None:
    async with kernel(limits=Limits(adapter_silence_s=3.0)) as test:
        top = await parent(test)
        start = trio.current_time()
        run = await top.ask("Silent", "r", prompt("one two"))
        assert run.status == "completed"
        assert 3.0 <= trio.current_time() - start < 3.5, "then somebody looks"


@pytest.mark.parametrize(
    ("status", "told"),
    [
        ("completed", ("completed", {"n": 7}, "seven", None, None)),
        ("error", ("error", None, "seven", "why", "failed")),
        ("aborted", ("aborted", None, "seven", None, "why")),
    ],
)
async def test_what_a_child_says_of_its_end_is_the_end_of_the_run(
    status: str, told: tuple[Any, ...], clock: object
) -> None:
    async with kernel() as test:
        run = await (await parent(test)).ask("Ends", "r", status)
        assert (run.status, run.output, run.summary, run.error, run.reason) == told


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("GapInChunks", "a b c d", "there is a gap"),
        ("ReportsInterrupted", "a fail:x", "'interrupted' is not one of"),
        ("TerminalWithoutCompletedAt", "a", "has no completed_at"),
        ("LosesTheErrorText", "a fail:x", "does not say why"),
    ],
)
@pytest.mark.rule("T-032", "T-034", "T-026", "I-08")
async def test_an_adapter_that_breaks_its_contract_ends_in_an_error_that_says_so(
    name: str, text: str, says: str, clock: object
) -> None:
    async with kernel() as test:
        run = await (await parent(test)).ask(name, "r", prompt(text))
        assert run.status == "error"
        assert says in run.error


@pytest.mark.limit("adapter_call_s")
async def test_a_verb_that_does_not_answer_ends_the_run(clock: object) -> None:
    async with kernel() as test:
        run = await (await parent(test)).ask("Hanging", "r", prompt("a"))
        assert run.status == "error"
        assert run.error == "inspect_agent_tool_run took more than 30.0 s"
        await settle()
        assert Counted.asked == ["cancel it was given up"]


@pytest.mark.parametrize(
    ("name", "text", "says", "said"),
    [
        ("FailsInBand", "one wait:x two", "in band", ["one"]),
        ("FailsInBand", "one two three four", "in band", ["one"]),
        ("Nonsense", "one wait:door", "a chunk is a mapping", []),
    ],
)
@pytest.mark.rule("T-021", "T-075")
async def test_what_cannot_be_a_chunk_ends_the_run_and_the_child_hears_of_it(
    name: str, text: str, says: str, said: list[str], clock: object
) -> None:
    async with kernel() as test:
        top = await parent(test)
        text = prompt(text)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(later, text)
            run = await top.ask(name, "r", text)
        assert run.status == "error"
        assert says in run.error
        assert texts(await top.frames("r")) == said
        await settle()
        goodbyes = [a for a in Counted.asked if a.startswith("cancel")]
        assert len(goodbyes) <= 1
        child = agent_at(test, (name, "r"))
        assert child.look("r").over


async def test_a_child_that_is_given_up_and_does_not_hear_it_is_let_alone(
    clock: object,
) -> None:
    async with kernel() as test:
        text = prompt("one wait:door")
        run = await (await parent(test)).ask("Stuck", "r", text)
        assert run.status == "error"
        node = node_at(test, ("Stuck", "r"))
        await settle()
        assert node.calls  # it is being told
        await test.advance(6)
        assert not node.calls
        STAGE.open(text)


async def later(text: str) -> None:
    await trio.sleep(1)
    STAGE.gate(text, "wait:x").open()


async def test_a_child_that_breaks_is_followed_again_where_it_was(
    clock: object,
) -> None:
    Breaks.lives.clear()
    async with kernel() as test:
        top = await parent(test)
        run = await top.ask("Breaks", "r", prompt("one two"))
        assert run.status == "completed"
        assert texts(await top.frames("r")) == ["one", "two"]
        assert Counted.asked == ["start"]


# ---- cancelling


@pytest.mark.rule("T-048", "T-050", "T-059")
async def test_a_child_hears_of_the_cancel_and_then_it_is_stopped(
    clock: object,
) -> None:
    async with kernel() as test:
        top = await parent(test)
        text = prompt("one wait:door two")
        await top.dispatch("Counted", "r", text)
        await STAGE.reached(text)
        child = agent_at(test, ("Counted", "r"))
        assert await top.stop("r", "enough") == "aborted"
        await settle()
        assert Counted.asked == ["start", "cancel enough"]
        assert test.find([("Top", "a"), ("Counted", "r")]) is None
        assert not child.at_work
        run = await top.run("r")
        assert (run.status, run.reason) == ("aborted", "enough")
        again = await test.kernel.get_sub_agent(top, Counted, "r")
        assert again is not None
        mine = (
            agent_at(test, ("Top", "a")) if False else node_at(test, ("Counted", "r"))
        )
        assert mine.agent.look("r").status == "aborted"  # in its own words as well


@pytest.mark.limit("cancel_s")
async def test_a_cancel_that_blocks_is_cut_after_cancel_s(clock: object) -> None:
    async with kernel(limits=Limits(cancel_s=5.0)) as test:
        top = await parent(test)
        text = prompt("one wait:door two")
        await top.dispatch("CancelBlocks", "r", text)
        await STAGE.reached(text)
        before, ended_at = trio.current_time(), []
        node = node_at(test, ("CancelBlocks", "r"))
        test.kernel.subscribe(
            "run:end", lambda *_: ended_at.append(trio.current_time())
        )
        assert await top.stop("r", "enough") == "aborted"
        assert ended_at == [before]  # the row does not wait for the child
        assert node.gone.is_set()
        assert 5.0 <= trio.current_time() - before < 6.0


@pytest.mark.rule("T-047")
async def test_clearing_a_run_tells_its_child_once(clock: object) -> None:
    async with kernel() as test:
        top = await parent(test)
        text = prompt("one wait:door two")
        await top.dispatch("Counted", "r", text)
        await STAGE.reached(text)
        assert await top.clear() == 1
        await settle()
        assert Counted.asked == ["start", "cancel cleared"]
        assert await top.run("r") is None


# ---- crashes


@pytest.mark.rule("T-049", "T-106", "T-069")
async def test_after_a_crash_the_child_is_joined_and_nothing_is_said_twice(
    clock: object,
) -> None:
    async with kernel() as test:
        top = await parent(test)
        text = prompt("one two wait:door three")
        await top.dispatch("Counted", "r", text)
        await STAGE.reached(text)
        await test.advance(1)
        await test.crash()
        await test.reopen()
        top = await parent(test)
        STAGE.open(text)
        run = await top.ask("Counted", "r", text)
        assert run.status == "completed"
        assert texts(await top.frames("r")) == ["one", "two", "three"]
        assert Counted.asked == ["start"]


async def test_a_child_that_forgot_its_run_is_not_started_again(clock: object) -> None:
    async with kernel() as test:
        top = await parent(test)
        text = prompt("one wait:door two")
        await top.dispatch("Forgetful", "r", text)
        await STAGE.reached(text)
        await test.advance(1)
        await test.crash()
        await test.reopen()
        run = await (await parent(test)).ask("Forgetful", "r", text)
        assert (run.status, run.reason) == ("interrupted", "not-started")
        assert Counted.asked == ["start"]


@pytest.mark.parametrize(
    ("text", "end", "starts"),
    [
        ("wait:door one two", ("completed", None), 2),
        ("one wait:door two", ("interrupted", "not-started"), 1),
    ],
)
async def test_a_child_that_may_be_started_again_is_if_nothing_of_it_is_stored(
    text: str, end: tuple[str, str | None], starts: int, clock: object
) -> None:
    async with kernel() as test:
        top = await parent(test)
        text = prompt(text)
        await top.dispatch("Again", "r", text)
        await STAGE.reached(text)
        await test.advance(1)
        await test.crash()
        await test.reopen()
        STAGE.open(text)
        run = await (await parent(test)).ask("Again", "r", text)
        assert (run.status, run.reason) == end
        assert Counted.asked.count("start") == starts


async def test_a_crash_at_any_commit_or_record_leaves_no_gap_and_no_double(
    clock: object,
) -> None:
    """Until the scenario passes without meeting the crash."""
    for landed in (None, False, True):
        for point in range(1, 200):
            if not await crashed_at(point, landed=landed):
                break
        else:
            pytest.fail("it never ends")
        assert point > 2


async def crashed_at(point: int, *, landed: bool | None) -> bool:
    Counted.asked.clear()
    async with kernel() as test:
        text = prompt("one two three four")
        top = await parent(test)
        died = trio.Event()
        test.faults.on_death = died.set
        if landed is None:
            test.faults.die_after(point)
        else:
            test.faults.die_in_record(point, landed=landed)
        over = trio.Event()

        async def first_life() -> None:
            try:
                await top.ask("Counted", "r", text)
            except Exception:
                return
            over.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(first_life)
            with trio.move_on_after(30):
                while not (died.is_set() or over.is_set()):
                    await trio.sleep(0.1)
            nursery.cancel_scope.cancel()
        await test.crash()
        await test.reopen()
        top = await parent(test)
        run = await top.ask("Counted", "r", text)
        said = texts(await top.frames("r"))
        frames = [f["sequence"] for f in await top.frames("r")]
        assert frames == list(range(len(said) + 2))
        if run.status == "completed":
            assert said == ["one", "two", "three", "four"]
        else:  # begun, and nobody knows how far: never started twice
            assert (run.status, run.reason) == ("interrupted", "not-started")
            assert said == []
        assert Counted.asked.count("start") <= 2
        return died.is_set()
