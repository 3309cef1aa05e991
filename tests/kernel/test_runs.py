"""Agent-tool runs: one row, one turn at a time, one end; what the flaws of old taught."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
import trio

from culet.kernel import (
    Agent,
    AgentToolEvents,
    AgentToolRun,
    CancelToken,
    Chunk,
    Detached,
    Turn,
    apply_agent_tool_event,
)
from culet.kernel.errors import (
    CapacityError,
    CuletError,
    Deleted,
    NotFound,
    StorageError,
    StorageFull,
    UsageError,
)
from culet.kernel.runs import Ask
from culet.kernel.testing import Harness, ScriptedChild, open_test_kernel
from kernel.agents import agent_at, node_at, raises, rows, settle, tree_of

HOOKS: list[tuple[str, str, str]] = []
TURNS: Counter[str] = Counter()
EFFECTS: Counter[str] = Counter()
STARTS: Counter[str] = Counter()
DEAF: list[trio.Event] = []


@pytest.fixture(autouse=True)
def fresh() -> None:
    HOOKS.clear()
    DEAF.clear()
    for counts in (TURNS, EFFECTS, STARTS):
        counts.clear()


def say(text: str) -> Chunk:
    return {"type": "text-delta", "id": "t", "delta": text}


class Hearing(Agent):
    async def on_agent_tool_finish(self, run: AgentToolRun) -> None:
        HOOKS.append((self.name, run.run_id, run.status))


class Child(ScriptedChild, Hearing):
    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        TURNS[turn.request_id] += 1
        async with aclosing(super().on_turn(turn)) as chunks:
            async for chunk in chunks:
                yield chunk


class Frail(Child):
    resumable = False


class AsksChild(Frail):
    """Cannot resume, and waits for a run that can."""

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        script = [["sleep", 5], ["say", "x"]]
        run = await self.run_agent_tool(Child, script, run_id="in")
        yield say(run.status)


class Flaky(Child):
    resumable = False

    async def on_start(self) -> None:
        STARTS[self.name] += 1
        if STARTS[self.name] == 1:
            raise ValueError("first start")


class NeverStarts(Child):
    async def on_start(self) -> None:
        STARTS[self.name] += 1
        raise ValueError("never")


class HangsInStart(Child):
    async def on_start(self) -> None:
        await trio.sleep_forever()


class Deaf(Child):
    """Will not stop until it is let go."""

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        TURNS[turn.request_id] += 1
        go = trio.Event()
        DEAF.append(go)
        with trio.CancelScope(shield=True), trio.move_on_after(300):
            await go.wait()
        yield say("late")


class Swallows(Child):
    """Swallows every cancellation, so many times."""

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        for _ in range(turn.input):
            try:
                await trio.sleep(0.05)
            except BaseException:
                EFFECTS["swallowed"] += 1
        yield say("done")


class Effects(Child):
    """Each step has an effect that must happen once when its chunk is published."""

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        TURNS[turn.request_id] += 1
        for number in range(len(turn.chunks()), turn.input):
            await self.durable()
            EFFECTS[str(number)] += 1
            yield say(f"step {number};")
            await trio.sleep(1)


class Bad(Child):
    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        match turn.input:
            case "no type":
                yield {"text": "x"}
            case "not json":
                yield {"type": "x", "value": object()}
            case "huge":
                yield {"type": "x", "value": "v" * (2 << 20)}
            case "output":
                turn.output = object()
                yield say("x")
            case "callee":
                kid = await self.dynamic_agents.get(Child, "k")
                await self.dynamic_agents.delete(Child, "k")
                await kid.ping(1)
            case "exit":
                raise SystemExit(3)


class RunsInStart(Hearing):
    async def on_start(self) -> None:
        self.error = ""
        try:
            await self.run_agent_tool(Child, [["say", "x"]], run_id="awaited")
        except UsageError as error:
            self.error = str(error)
        await self.run_agent_tool(Child, [["say", "x"]], run_id="loose", detached=True)


class Top(Hearing):
    max_concurrent_agent_tools = 70

    async def ping(self, n: int) -> int:
        return n + 1

    async def run(
        self,
        cls: str,
        value: Any,
        run_id: str | None = None,
        silence: float | None = None,
    ) -> list[Any]:
        run = await self.run_agent_tool(
            CLASSES[cls], value, run_id=run_id, no_progress_s=silence
        )
        return [run.status, run.reason]

    async def cancel(self, run_id: str) -> str | None:
        return (await self.runs.cancel(run_id)).status

    async def delivered(self, run: AgentToolRun) -> None:
        HOOKS.append(("delivered", run.run_id, run.status))

    async def frames(self, run_id: str, after: int = -1) -> list[Any]:
        return [f async for f in self.runs.replay(run_id, after)]


CLASSES: dict[str, type[Agent]] = {
    c.__name__: c
    for c in (
        Child, Frail, AsksChild, Flaky, NeverStarts, HangsInStart, Deaf, Swallows, Effects, Bad,
        RunsInStart,
    )
}  # fmt: skip


def opened(**options: Any) -> Any:
    return open_test_kernel(roots=[Top], facets=list(CLASSES.values()), **options)


async def opened_top(test: Harness) -> tuple[Top, Any]:
    root = await test.kernel.get_agent(Top, "a")
    return root, agent_at(test)


async def again(test: Harness) -> tuple[Top, Any]:
    await test.crash()
    await test.reopen()
    return await opened_top(test)


def start(nursery: trio.Nursery, fn: Any, *args: Any) -> None:
    """Call in the background; what a crash or abort does to the caller is not asked."""

    async def body() -> None:
        try:
            await fn(*args)
        except Exception as error:
            assert isinstance(error, CuletError), error

    nursery.start_soon(body)


def events(frames: list[Any]) -> list[tuple[int, str]]:
    return [(f["sequence"], f["event"]["kind"]) for f in frames]


def jobs(test: Harness) -> list[tuple[Any, ...]]:
    sql = "SELECT kind, what, attempts, begun, held IS NOT NULL FROM job ORDER BY id"
    return rows(tree_of(test), sql)


def statuses(test: Harness) -> dict[str, str]:
    return dict(rows(tree_of(test), "SELECT id, status FROM run"))


# ---- in the ordinary way


@pytest.mark.rule("I-14", "I-18", "T-080")
async def test_a_run_has_one_row_one_sequence_one_end(clock: object) -> None:
    async with opened() as test:
        root, me = await opened_top(test)
        script = [["say", "a"], ["say", "b"], ["output", {"n": 1}]]
        assert await root.run("Child", script, "r") == ["completed", None]
        run = me.runs.get("r")
        assert (run.status, run.summary, run.output, run.n) == (
            "completed", "aboutput", {"n": 1}, 3,
        )  # fmt: skip
        assert events(await root.frames("r")) == [
            (0, "started"), (1, "chunk"), (2, "chunk"), (3, "chunk"), (4, "finished"),
        ]  # fmt: skip
        assert events(await root.frames("r", 2)) == [(3, "chunk"), (4, "finished")]
        await settle()
        assert HOOKS == [("a", "r", "completed")]
        assert jobs(test) == []


@pytest.mark.rule("I-05", "I-06", "B-06", "T-014", "T-015", "T-118")
async def test_a_known_id_never_starts_a_second_turn(clock: object) -> None:
    async with opened() as test:
        root, _me = await opened_top(test)
        answers = []

        async def ask() -> None:
            answers.append(await root.run("Child", [["sleep", 5]], "r"))

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(ask)
        assert answers == [["completed", None]] * 5
        assert await root.run("Child", [["sleep", 5]], "r") == ["completed", None]
        assert TURNS == {"r": 1}
        assert await root.run("Child", "other input", "r") == ["completed", None]
        await raises(UsageError, root.run, "Frail", [["sleep", 5]], "r")


@pytest.mark.parametrize("name", ["", "..", "a\0b", "x" * 300])
async def test_a_bad_run_id_is_refused(name: str, clock: object) -> None:
    async with opened() as test:
        root, _me = await opened_top(test)
        await raises(UsageError, root.run, "Child", [], name)
        assert rows(tree_of(test), "SELECT count(*) FROM node") == [(1,)]


async def test_what_cannot_be_run_as_a_tool_is_refused(clock: object) -> None:
    async with opened() as test:
        _root, me = await opened_top(test)
        with pytest.raises(UsageError, match="on_turn"):
            await me.run_agent_tool(RunsInStart, 1)
        with pytest.raises(UsageError, match="stored as JSON"):
            await me.run_agent_tool(Child, object())
        with pytest.raises(CapacityError):
            await me.run_agent_tool(Child, "x" * (9 << 20))
        with pytest.raises(NotFound):
            await me.parent_agent(Top)
        assert rows(tree_of(test), "SELECT count(*) FROM run") == [(0,)]


@pytest.mark.rule("F-21", "F-22", "F-27", "T-026")
@pytest.mark.parametrize(
    ("what", "reason"),
    [("no type", "failed"), ("not json", "failed"), ("huge", "failed"),
     ("output", "bad-output"), ("callee", "failed"), ("exit", "failed")],
)  # fmt: skip
async def test_what_a_turn_does_wrong_ends_it_in_error(
    what: str, reason: str, clock: object
) -> None:
    async with opened() as test:
        root, me = await opened_top(test)
        with trio.fail_after(5):
            assert await root.run("Bad", what, "r") == ["error", reason]
        assert me.runs.get("r").error
        await settle()
        assert jobs(test) == []
        assert await root.run("Child", [["say", "x"]], "s") == ["completed", None]


@pytest.mark.rule("HB-29", "T-054")
async def test_a_failed_run_keeps_what_it_has_said(clock: object) -> None:
    async with opened() as test:
        root, _me = await opened_top(test)
        script = [["say", str(i)] for i in range(5)] + [["fail", "no"]]
        assert await root.run("Child", script, "r") == ["error", "failed"]
        kinds = [kind for _seq, kind in events(await root.frames("r"))]
        assert kinds == ["started", *["chunk"] * 5, "error"]
        async with trio.open_nursery() as nursery:
            start(nursery, root.run, "Child", [["say", "x"], ["sleep", 99]], "c")
            await test.advance(1)
            await root.cancel("c")
        kinds = [kind for _seq, kind in events(await root.frames("c"))]
        assert kinds == ["started", "chunk", "aborted"]


@pytest.mark.rule("I-10", "B-07", "T-004", "T-119", "T-255", "T-259")
async def test_refused_by_capacity_leaves_no_row(clock: object) -> None:
    async with opened() as test:
        root, me = await opened_top(test)
        async with trio.open_nursery() as nursery:
            for i in range(70):
                nursery.start_soon(root.run, "Child", [["sleep", 5]], f"r{i}")
            await test.advance(1)
            assert await root.run("Child", [], "more") == ["error", "capacity"]
            assert me.runs.get("more") is None
            assert await root.run("Child", [["sleep", 5]], "r3") == ["completed", None]
        assert await root.run("Child", [["say", "x"]], "more") == ["completed", None]


@pytest.mark.rule("F-380", "T-263")
async def test_refused_by_depth_leaves_no_row(clock: object) -> None:
    async with opened() as test:
        root, _me = await opened_top(test)
        deep: list[Any] = [["say", "bottom"]]
        for level in range(4):
            deep = [["run", f"l{level}", deep]]
        assert await root.run("Child", deep, "r") == ["completed", None]
        assert set(statuses(test)) == {"r", "l3", "l2"}


# ---- watching is not doing


@pytest.mark.rule("I-07", "F-482", "T-046", "T-061")
async def test_a_cancelled_waiter_changes_nothing(clock: object) -> None:
    async with opened() as test:
        root, me = await opened_top(test)
        with trio.move_on_after(1):
            await root.run("Child", [["sleep", 5], ["say", "x"]], "r")
        assert me.runs.get("r").status == "running"
        await test.advance(10)
        assert me.runs.get("r").status == "completed"
        await settle()
        assert HOOKS == [("a", "r", "completed")]


async def test_silence_is_told_to_one_waiter_and_is_not_death(clock: object) -> None:
    async with opened() as test:
        root, me = await opened_top(test)
        script = [["say", "x"], ["sleep", 30], ["say", "y"]]
        assert await root.run("Child", script, "r", 10) == ["running", "no-progress"]
        run = me.runs.get("r")
        assert (run.status, run.reason) == ("running", None)
        assert await root.run("Child", script, "r") == ["completed", None]
        assert TURNS == {"r": 1}


async def test_progress_keeps_a_waiter(clock: object) -> None:
    async with opened() as test:
        root, _me = await opened_top(test)
        script = [step for i in range(6) for step in (["sleep", 6], ["say", str(i)])]
        assert await root.run("Child", script, "r", 10) == ["completed", None]


async def test_a_detached_run_goes_on_and_is_delivered_once(clock: object) -> None:
    async with opened() as test:
        _root, me = await opened_top(test)
        policy = Detached(on_finish="delivered")
        run = await me.run_agent_tool(
            Child, [["sleep", 5]], run_id="r", detached=policy
        )
        assert run.status == "running"
        await test.advance(10)
        assert set(HOOKS) == {("a", "r", "completed"), ("delivered", "r", "completed")}
        assert len(HOOKS) == 2
        with pytest.raises(UsageError):
            bad = Detached(on_finish="nothing")
            await me.run_agent_tool(Child, [], run_id="s", detached=bad)
        assert me.runs.get("s") is None


# ---- cancel


@pytest.mark.rule("I-07", "T-051")
async def test_cancel_ends_it_with_everything_below(clock: object) -> None:
    async with opened() as test:
        root, me = await opened_top(test)
        script = [["run", "in", [["run", "deep", [["sleep", 50]]]]]]
        async with trio.open_nursery() as nursery:
            start(nursery, root.run, "Child", script, "r")
            await test.advance(1)
            assert set(statuses(test).values()) == {"running"}
            began = trio.current_time()
            assert await root.cancel("r") == "aborted"
            assert set(statuses(test).values()) == {"aborted"}
            await settle()
            assert trio.current_time() - began < 0.2
        assert test.find([("Top", "a"), ("Child", "r")]) is None
        assert await root.cancel("r") == "aborted"
        assert await root.cancel("nobody") is None
        assert me.runs.get("r").status == "aborted"


@pytest.mark.rule("kernel-mini-11")
async def test_cancel_does_not_wake_what_it_stopped(clock: object) -> None:
    async with opened() as test:
        root, _me = await opened_top(test)
        async with trio.open_nursery() as nursery:
            start(nursery, root.run, "Child", [["run", "in", [["sleep", 50]]]], "r")
            await test.advance(1)
            await root.cancel("r")
        await test.advance(700)
        assert HOOKS == [("a", "r", "aborted")]
        found = [(r["path"], r["state"]) for r in test.kernel.tree("Top", "a")]
        assert found == [
            ("Top/a", "live"),
            ("Top/a/Child/r", "sleeping"),
            ("Top/a/Child/r/Child/in", "sleeping"),
        ]


@pytest.mark.rule("I-07", "T-041")
async def test_a_token_used_before_makes_no_child_and_no_call(clock: object) -> None:
    async with opened() as test:
        _root, me = await opened_top(test)
        token = CancelToken()
        token.cancel("too late")
        run = await me.run_agent_tool(Child, [["say", "x"]], run_id="r", cancel=token)
        assert (run.status, run.reason, run.n) == ("aborted", "too late", 0)
        assert rows(tree_of(test), "SELECT count(*) FROM node") == [(1,)]
        await me.durable()
        assert events([f async for f in me.runs.replay("r")]) == [
            (0, "started"),
            (1, "aborted"),
        ]
        await settle()
        assert TURNS == {}
        assert HOOKS == [("a", "r", "aborted")]


@pytest.mark.rule("T-042", "T-059")
@pytest.mark.parametrize("detached", [False, True])
async def test_a_token_used_later_cancels(detached: bool, clock: object) -> None:
    async with opened() as test:
        _root, me = await opened_top(test)
        token = CancelToken()
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                await me.run_agent_tool(
                    Child, [["sleep", 9]], run_id="r", cancel=token, detached=detached
                )

            nursery.start_soon(ask)
            await test.advance(1)
            token.cancel("now")
        run = me.runs.get("r")
        assert (run.status, run.reason) == ("aborted", "now")


@pytest.mark.rule("HB-09", "T-048")
@pytest.mark.parametrize("offset", [0, 0.01, 0.049, 0.05, 0.051, 0.1])
async def test_a_turn_that_swallows_cancellation_is_aborted_all_the_same(
    offset: float, clock: object
) -> None:
    async with opened(abort_grace_s=1) as test:
        root, me = await opened_top(test)
        async with trio.open_nursery() as nursery:
            start(nursery, root.run, "Swallows", 4, "r")
            await settle()
            await test.advance(offset)
            await root.cancel("r")
        assert me.runs.get("r").status == "aborted"
        await test.advance(5)
        assert me.runs.get("r").n == 0
        assert events(await root.frames("r")) == [(0, "started"), (1, "aborted")]
        assert await root.ping(1) == 2


# ---- crashes


@pytest.mark.rule("I-14", "G-08", "B-02", "T-115", "T-148", "T-155a")
async def test_a_resumable_turn_goes_on_where_it_was(clock: object) -> None:
    async with opened() as test:
        root, _me = await opened_top(test)
        async with trio.open_nursery() as nursery:
            start(nursery, root.run, "Effects", 5, "r")
            await test.advance(2.5)
            root, me = await again(test)
            nursery.cancel_scope.cancel()
        live = await root.frames("r")
        assert await root.run("Effects", 5, "r") == ["completed", None]
        assert set(EFFECTS.values()) == {1}, "a published step is never repeated"
        frames = await root.frames("r")
        assert events(frames) == [
            (0, "started"), *[(i, "chunk") for i in range(1, 6)], (6, "finished"),
        ]  # fmt: skip
        assert [f["event"] for f in frames[: len(live)]] == [f["event"] for f in live]
        assert me.runs.get("r").summary == "".join(f"step {i};" for i in range(5))
        await settle()
        assert HOOKS == [("a", "r", "completed")]


@pytest.mark.rule("HB-05", "I-05", "T-104")
async def test_asked_again_after_a_restart_it_is_joined(clock: object) -> None:
    async with opened() as test:
        root, _me = await opened_top(test)
        script = [["run", "in", [["sleep", 2], ["say", "x"], ["sleep", 2]]]]
        async with trio.open_nursery() as nursery:
            start(nursery, root.run, "Child", script, "r")
            await test.advance(3)
            root, _me = await again(test)
            nursery.cancel_scope.cancel()
        assert await root.run("Child", script, "r") == ["completed", None]
        assert statuses(test) == {"r": "completed", "in": "completed"}


@pytest.mark.rule("I-05", "HB-29")
async def test_a_turn_that_cannot_resume_is_interrupted(clock: object) -> None:
    async with opened() as test:
        root, _me = await opened_top(test)
        async with trio.open_nursery() as nursery:
            start(nursery, root.run, "Frail", [["say", "x"], ["sleep", 9]], "r")
            await test.advance(1)
            root, me = await again(test)
            nursery.cancel_scope.cancel()
        await test.advance(1)
        run = me.runs.get("r")
        assert (run.status, run.reason, run.retryable) == (
            "interrupted", "not-resumable", True,
        )  # fmt: skip
        assert TURNS == {"r": 1}
        kinds = [kind for _seq, kind in events(await root.frames("r"))]
        assert kinds == ["started", "chunk", "interrupted"]
        await test.advance(1)
        assert HOOKS == [("a", "r", "interrupted")]


@pytest.mark.rule("kernel-mini-8")
@pytest.mark.parametrize("end", ["crash", "error"])
async def test_the_end_of_an_asker_ends_what_it_waits_for(
    end: str, clock: object
) -> None:
    async with opened() as test:
        root, me = await opened_top(test)
        async with trio.open_nursery() as nursery:
            start(nursery, root.run, "AsksChild", None, "r")
            await test.advance(1)
            if end == "crash":
                root, me = await again(test)
            else:
                node = node_at(test, ("AsksChild", "r"))
                node.end_calls(ValueError("the turn fails while it waits"))
            await test.advance(0.5)
            nursery.cancel_scope.cancel()
        assert me.runs.get("r").status in {"interrupted", "error"}
        told = rows(tree_of(test), "SELECT status, reason FROM run WHERE id = 'in'")
        assert told == [("aborted", "asker-ended")]
        await test.advance(20)
        assert [h for h in HOOKS if h[1] == "in"] == []


async def test_what_a_turn_detached_goes_on_without_it(clock: object) -> None:
    class Leaves(Child):
        async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
            await self.run_agent_tool(Child, [["sleep", 5]], run_id="l", detached=True)
            yield say("gone")

    async with open_test_kernel(roots=[Top], facets=[Child, Leaves]) as test:
        _root, me = await opened_top(test)
        await me.run_agent_tool(Leaves, 1, run_id="r")
        assert statuses(test) == {"r": "completed", "l": "running"}
        await test.advance(10)
        assert statuses(test) == {"r": "completed", "l": "completed"}


@pytest.mark.rule("kernel-mini-4")
async def test_a_start_that_fails_once_is_not_a_begun_turn(clock: object) -> None:
    async with opened() as test:
        root, _me = await opened_top(test)
        with trio.fail_after(30):
            answer = await root.run("Flaky", [["say", "x"]], "r")
        assert answer == ["completed", None]
        assert TURNS == {"r": 1}


@pytest.mark.rule("HB-07", "B-07", "T-008")
async def test_starts_that_always_fail_end_the_run_after_three(clock: object) -> None:
    async with opened() as test:
        root, me = await opened_top(test)
        assert await root.run("NeverStarts", [], "r") == ["error", "start-failed"]
        assert STARTS["r"] == 3
        assert "never" in me.runs.get("r").error
        assert jobs(test) in ([], [("hook", "r", 1, 0, 1)])


@pytest.mark.rule("HB-07", "I-09", "T-123", "T-128", "C-063")
async def test_one_hung_child_does_not_stop_its_parent(clock: object) -> None:
    async with opened() as test:
        root, _me = await opened_top(test)
        async with trio.open_nursery() as nursery:
            start(nursery, root.run, "Child", [["sleep", 2], ["say", "x"]], "r1")
            start(nursery, root.run, "HangsInStart", [], "r2")
            start(nursery, root.run, "NeverStarts", [], "r3")
            start(nursery, root.run, "Frail", [["sleep", 9]], "r4")
            await test.advance(1)
            tasks = 0
            for _ in range(2):
                await test.crash()
                await test.reopen()
                began = trio.current_time()
                root = await test.kernel.get_agent(Top, "a")
                assert await root.ping(1) == 2
                assert trio.current_time() - began < 1
        await settle()
        tasks = trio.lowlevel.current_statistics().tasks_living
        assert tasks < 40
        await test.advance(300)
        assert statuses(test) == {
            "r1": "completed", "r2": "error", "r3": "error", "r4": "interrupted",
        }  # fmt: skip


@pytest.mark.rule("kernel-mini-10")
async def test_a_run_awaited_in_on_start_is_refused_at_once(clock: object) -> None:
    async with opened() as test:
        _root, me = await opened_top(test)
        began = trio.current_time()
        await me.dynamic_agents.get(RunsInStart, "s")
        assert trio.current_time() == began
        assert "on_start" in agent_at(test, ("RunsInStart", "s")).error
        await test.advance(5)
        assert statuses(test) == {"loose": "completed"}


@pytest.mark.rule("kernel-mini-9")
async def test_restarts_with_progress_do_not_kill_a_run(clock: object) -> None:
    async with opened() as test:
        root, me = await opened_top(test)
        async with trio.open_nursery() as nursery:
            start(nursery, root.run, "Effects", 25, "r")
            for _ in range(8):
                await test.advance(1.01)
                root, me = await again(test)
            nursery.cancel_scope.cancel()
        await test.advance(30)
        assert me.runs.get("r").status == "completed"


@pytest.mark.rule("kernel-mini-9", "T-161", "T-264", "C-050")
async def test_progress_of_a_nested_run_counts_for_its_askers(clock: object) -> None:
    async with opened() as test:
        root, _me = await opened_top(test)
        inner = [step for i in range(9) for step in (["say", str(i)], ["sleep", 1])]
        script = [["run", "mid", [["run", "in", inner]]]]
        async with trio.open_nursery() as nursery:
            start(nursery, root.run, "Child", script, "r")
            for _ in range(8):
                await test.advance(1.01)
                root, _me = await again(test)
            nursery.cancel_scope.cancel()
        await test.advance(30)
        assert statuses(test) == dict.fromkeys(("r", "mid", "in"), "completed")


@pytest.mark.rule("kernel-mini-12")
async def test_restarts_without_progress_end_it(clock: object) -> None:
    async with opened() as test:
        root, me = await opened_top(test)
        async with trio.open_nursery() as nursery:
            start(nursery, root.run, "Child", [["sleep", 50]], "r")
            for _ in range(8):
                await test.advance(1)
                root, me = await again(test)
            nursery.cancel_scope.cancel()
        await test.advance(1)
        run = me.runs.get("r")
        assert (run.status, run.reason) == ("error", "recovery-exhausted")
        assert TURNS["r"] == 5


@pytest.mark.rule("kernel-mini-9")
async def test_planned_stops_do_not_count(clock: object) -> None:
    async with opened() as test:
        root, me = await opened_top(test)
        async with trio.open_nursery() as nursery:
            start(nursery, root.run, "Child", [["sleep", 50]], "r")
            for _ in range(9):
                await test.advance(1)
                await test.close()
                await test.reopen()
                root, me = await opened_top(test)
            nursery.cancel_scope.cancel()
        await settle()
        assert TURNS["r"] == 10, "each life goes on with it at once"
        await test.advance(60)
        assert me.runs.get("r").status == "completed"


@pytest.mark.rule("I-13", "I-18", "B-01", "T-134", "T-135", "T-140")
@pytest.mark.parametrize("commits", range(14))
async def test_a_crash_after_any_commit_ends_truthfully(
    commits: int, clock: object
) -> None:
    """Whatever the instant: the run is not there at all, or it ends well, one hook."""
    async with opened() as test:
        root, me = await opened_top(test)
        script = [["say", "a"], ["durable"], ["say", "b"], ["output", 1]]
        test.faults.die_after(commits)
        with trio.move_on_after(3):
            try:
                await root.run("Child", script, "r")
            except Exception as error:
                assert test.faults.dead, error
        told = me.runs.get("r").status if not test.faults.dead else None
        root, me = await again(test)
        await test.advance(5)
        run = me.runs.get("r")
        if run is None:
            assert told is None
            assert rows(tree_of(test), "SELECT count(*) FROM node") == [(1,)]
            return
        assert run.status == "completed"
        assert run.n == 4
        assert [s for s, _k in events(await root.frames("r"))] == list(range(6))
        assert set(HOOKS) == {("a", "r", "completed")}
        assert jobs(test) == []


@pytest.mark.rule("I-06", "T-031", "T-103")
async def test_an_ended_run_stays_as_it_was_told(clock: object) -> None:
    async with opened() as test:
        root, _me = await opened_top(test)
        assert await root.run("Child", [["say", "x"]], "r") == ["completed", None]
        before = await root.frames("r")
        root, me = await again(test)
        assert await root.frames("r") == before
        assert me.runs.get("r").status == "completed"
        assert await root.cancel("r") == "completed"
        assert TURNS == {"r": 1}


@pytest.mark.rule("T-138")
async def test_a_class_that_is_gone_ends_the_run(clock: object) -> None:
    async with opened() as test:
        root, me = await opened_top(test)
        async with trio.open_nursery() as nursery:
            start(nursery, root.run, "Child", [["sleep", 9]], "r")
            await test.advance(1)
            await test.crash()
            test._facets.remove(Child)
            await test.reopen()
            _root, me = await opened_top(test)
            nursery.cancel_scope.cancel()
        await test.advance(1)
        run = me.runs.get("r")
        assert (run.status, run.reason) == ("interrupted", "class-gone")


# ---- abort and delete of the facet


@pytest.mark.rule("kernel-mini-1", "kernel-mini-2", "F-23", "F-28")
async def test_a_turn_that_will_not_stop_never_runs_beside_its_successor(
    clock: object,
) -> None:
    async with opened(abort_grace_s=1) as test:
        root, me = await opened_top(test)
        async with trio.open_nursery() as nursery:
            start(nursery, root.run, "Deaf", 0, "r")
            await test.advance(1)
            start(nursery, me.dynamic_agents.abort, Deaf, "r")
            await test.advance(5)
            turns = TURNS["r"]
            sql = "SELECT held FROM job WHERE kind = 'turn'"
            held = rows(tree_of(test), sql)
            DEAF[0].set()  # the remnant ends: its worker must not end the other's hold
            await test.advance(5)
            again = rows(tree_of(test), sql)
            for go in DEAF:
                go.set()
            await test.advance(5)
        assert turns == 2, "the lane of the fenced one is free"
        assert again == held
        assert TURNS["r"] == 2
        run = me.runs.get("r")
        assert (run.status, run.n) == ("completed", 1)


async def test_abort_is_not_stop(clock: object) -> None:
    async with opened() as test:
        root, me = await opened_top(test)
        async with trio.open_nursery() as nursery:
            start(nursery, root.run, "Child", [["say", "x"], ["sleep", 9]], "r")
            await test.advance(1)
            receipt = await me.dynamic_agents.abort(Child, "r", "restart")
            assert receipt.runs == [("r", "running")]
            await test.advance(20)
        assert me.runs.get("r").status == "completed"
        assert TURNS["r"] == 2


@pytest.mark.rule("kernel-mini-7")
async def test_deleting_the_child_interrupts_its_run(clock: object) -> None:
    async with opened() as test:
        root, me = await opened_top(test)
        answers = []

        async def ask() -> None:
            answers.append(
                await root.run("Child", [["say", "x"], ["say", "y"], ["sleep", 9]], "r")
            )

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await test.advance(1)
            await me.dynamic_agents.delete(Child, "r")
        assert answers == [["interrupted", "deleted"]]
        await settle()
        assert events(await root.frames("r")) == [(0, "started"), (3, "interrupted")]
        assert HOOKS == [("a", "r", "interrupted")]
        root, me = await again(test)
        assert events(await root.frames("r")) == [(0, "started"), (3, "interrupted")]


async def test_deleting_the_asker_tells_who_waits(clock: object) -> None:
    async with opened() as test:
        _root, me = await opened_top(test)
        await me.dynamic_agents.get(Child, "p")
        parent = agent_at(test, ("Child", "p"))
        async with trio.open_nursery() as nursery:

            async def wait() -> None:
                await parent._node.tree.runs.join(parent._node, "r", Ask())

            await parent.run_agent_tool(
                Child, [["sleep", 9]], run_id="r", detached=True
            )
            nursery.start_soon(raises, Deleted, wait)
            await test.advance(1)
            await me.dynamic_agents.delete(Child, "p")
        await settle()
        assert rows(tree_of(test), "SELECT count(*) FROM run") == [(0,)]
        assert jobs(test) == []


@pytest.mark.rule("T-266")
async def test_clear_forgets_runs_with_their_facets(clock: object) -> None:
    async with opened() as test:
        root, me = await opened_top(test)
        for i in range(3):
            await root.run("Child", [["say", "x"]], f"r{i}")
        async with trio.open_nursery() as nursery:
            start(nursery, root.run, "Child", [["sleep", 9]], "live")
            await test.advance(1)
            assert await me.runs.clear("completed") == 3
            assert statuses(test) == {"live": "running"}
            assert await me.runs.clear() == 1
        await settle()
        tree = tree_of(test)
        assert statuses(test) == {}
        assert rows(tree, "SELECT count(*) FROM node") == [(1,)]
        assert jobs(test) == []
        assert tree.store.slots() == set()


@pytest.mark.rule("T-267")
async def test_a_run_is_cleared_with_its_facet_or_not_at_all(clock: object) -> None:
    async with opened() as test:
        root, me = await opened_top(test)
        await root.run("Child", [["say", "x"]], "r")
        await me.durable()
        test.faults.fail_commit(2)  # the row is dropped, the facet is not
        with pytest.raises(StorageError):
            await me.runs.clear()
        await test.advance(60)

        await test.kernel.get_agent(Top, "a")
        me = agent_at(test)
        assert statuses(test) == {"r": "completed"}
        assert me.dynamic_agents.has("Child", "r")
        assert await me.runs.clear() == 1
        await settle()
        assert statuses(test) == {}
        assert not me.dynamic_agents.has("Child", "r")


# ---- a disk that is full


async def test_a_full_file_ends_that_run_and_others_live(clock: object) -> None:
    async with opened() as test:
        root, me = await opened_top(test)
        async with trio.open_nursery() as nursery:
            start(nursery, root.run, "Child", [["sleep", 1], ["say", "x"]], "other")
            start(nursery, root.run, "Child", [["sleep", 2], ["say", "x"]], "full")
            await test.advance(0.5)
            node = node_at(test, ("Child", "full"))
            full = node.db.executemany

            def refuse(sql: str, many: Any) -> None:
                raise StorageFull("the quota of this file")

            node.db.executemany = refuse  # type: ignore[method-assign]
            await test.advance(5)
            node.db.executemany = full  # type: ignore[method-assign]
        assert me.runs.get("other").status == "completed"
        run = me.runs.get("full")
        assert (run.status, run.n) == ("error", 0)
        assert "quota" in run.error
        assert events(await root.frames("full")) == [(0, "started"), (1, "error")]


@pytest.mark.parametrize("nth", range(1, 14))
async def test_a_full_disk_at_any_commit_leaves_nothing_half(
    nth: int, clock: object
) -> None:
    async with opened() as test:
        root, me = await opened_top(test)
        test.faults.fail_commit(nth)
        script = [["say", "a"], ["durable"], ["output", 1]]
        with trio.fail_after(60):
            try:
                answer = await root.run("Child", script, "r")
            except StorageError:
                answer = []
        test.faults.heal()
        await test.advance(60)
        root, me = await opened_top(test)
        run = me.runs.get("r")
        if run is None:
            assert not answer
        else:
            assert run.status in {"completed", "error"}
            if answer:
                assert answer[0] == run.status
            kinds = [k for _s, k in events(await root.frames("r"))]
            assert len(kinds) == run.n + 2
        assert jobs(test) == []
        assert await root.run("Child", [["say", "x"]], "after") == ["completed", None]


@pytest.mark.parametrize("nth", range(1, 5))
async def test_a_failed_barrier_restarts_the_tree_and_tells_nothing(
    nth: int, clock: object
) -> None:
    async with opened() as test:
        root, me = await opened_top(test)
        test.faults.fail_record(nth)
        answer: list[Any] = []
        with trio.fail_after(60):
            try:
                answer = await root.run("Child", [["say", "a"], ["sleep", 1]], "r")
            except StorageError:
                pass
            except Exception as error:
                assert "restarts" in str(error), error
        await test.advance(30)
        root, me = await opened_top(test)
        run = me.runs.get("r")
        assert run is not None or not answer
        if run is not None:
            assert run.status == "completed"
            assert [s for s, _ in events(await root.frames("r"))] == list(range(4))
        assert await root.run("Child", [["say", "x"]], "after") == ["completed", None]


# ---- the reducer agrees


@pytest.mark.rule("I-16")
async def test_replay_folds_to_the_same_state_from_any_cut(clock: object) -> None:
    async with opened() as test:
        root, _me = await opened_top(test)
        await root.run("Child", [["say", str(i)] for i in range(6)], "r")
        frames = await root.frames("r")
        whole = AgentToolEvents.empty()
        for frame in frames:
            whole = apply_agent_tool_event(whole, frame)
        for cut in range(len(frames)):
            state = AgentToolEvents.empty()
            for frame in frames[:cut] + await root.frames("r", cut - 2) + frames:
                state = apply_agent_tool_event(state, frame)
            assert state.to_json() == whole.to_json()


# ---- nothing is kept of what is over


async def test_what_checks_an_output_goes_with_its_run(clock: object) -> None:
    async with opened() as test, trio.open_nursery() as nursery:
        await test.kernel.get_agent(Top, "a")
        me, tree = agent_at(test), tree_of(test)

        async def run(run_id: str, *script: Any) -> None:
            await me.run_agent_tool(
                Child, list(script), run_id=run_id, output_type=dict[str, int]
            )

        for run_id in ("cancelled", "deleted"):
            nursery.start_soon(run, run_id, ["sleep", 60])
        nursery.start_soon(run, "good", ["say", "x"])
        await settle()
        assert len(tree.runs.validators) == 2
        await me.runs.cancel("cancelled")
        await me.dynamic_agents.delete(Child, "deleted")
        await settle()
        assert tree.runs.validators == {}


async def test_two_that_clear_at_once_do_not_meet(clock: object) -> None:
    async with opened() as test, trio.open_nursery() as nursery:
        root = await test.kernel.get_agent(Top, "a")
        me = agent_at(test)
        for n in range(4):
            await root.run("Child", [["say", "x"]], f"r{n}")
        counts: list[int] = []

        async def clear() -> None:
            counts.append(await me.runs.clear())

        nursery.start_soon(clear)
        nursery.start_soon(clear)
        await test.advance(1)
        assert sum(counts) == 4
        assert me.runs.list() == []
