"""What can be read of runs: listed, looked at, as a tree; and what is told of them."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import trio

from culet.kernel import Detached, Limits, RunInspection, ended_by, runtree
from culet.kernel.events import Transition
from culet.kernel.testing import Harness
from kernel.agents import agent_at, rows, settle
from kernel.peers import connect
from kernel.toolkit import (
    Frail,
    Kid,
    again,
    ask,
    forget,
    frames,
    kinds,
    opened,
    run_frames,
    top,
)


@pytest.fixture(autouse=True)
def fresh() -> None:
    forget()


def listen(test: Harness) -> list[Transition]:
    told: list[Transition] = []
    test.kernel.subscribe("run:transition", lambda _c, _t, _s, d: told.append(d))
    return told


def seen(told: list[Transition]) -> list[tuple[str, str, int]]:
    return [(t.run_id, t.to, t.attempt) for t in told]


def look(me: Any, run_id: str) -> RunInspection:
    found = me.runs.inspect(run_id)
    assert found is not None
    return found


# ---- listed


@pytest.mark.rule("B-17")
async def test_runs_are_listed_by_what_they_are_page_by_page(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        for number in range(6):
            cls = Frail if number % 3 == 0 else Kid
            program = [["fail", "no"]] if number == 4 else [["say", "x"]]
            await me.run_agent_tool(
                cls, program, run_id=f"r{number}", parent_tool_call_id=f"c{number // 2}"
            )

        def ids(**filters: Any) -> list[str]:
            return [run.run_id for run in me.runs.list(**filters)]

        assert ids() == [f"r{n}" for n in range(6)]
        assert ids(status="error") == ["r4"]
        assert ids(agent_type="Frail") == ["r0", "r3"]
        assert ids(parent_tool_call_id="c1") == ["r2", "r3"]
        assert ids(agent_type="Kid", status="completed", limit=2) == ["r1", "r2"]
        assert ids(agent_type="Kid", status="completed", after="r2") == ["r5"]
        assert ids(after="r5") == []
        walked: list[str] = []
        while page := ids(limit=4, after=walked[-1] if walked else None):
            walked += page
        assert walked == ids()


# ---- one, as it is now


@pytest.mark.rule("B-17", "B-12")
async def test_a_run_is_seen_as_it_is_from_start_to_end(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        assert me.runs.inspect("r") is None
        async with trio.open_nursery() as nursery:
            program = [["say", "a"], ["say", "b"], ["sleep", 20]]
            ask(nursery, me, Kid, program, run_id="r")
            await test.advance(5)
            await me.durable()
            now = look(me, "r")
            assert (now.phase, now.run.status, now.attempt) == ("running", "running", 1)
            assert (now.chunks, now.depth, now.parent_run_id) == (2, 0, None)
            assert (now.path, now.detached, now.cause) == ("Top/a/Kid/r", False, None)
            assert now.elapsed_s == pytest.approx(5, abs=0.5)
            before = rows(me._node.tree, "SELECT count(*) FROM job")
            await test.advance(30)
        over = look(me, "r")
        assert (over.phase, over.attempt, over.chunks) == ("over", 1, 3)
        assert over.cause == "finished"
        assert over.elapsed_s == pytest.approx(20, abs=0.5)
        assert before == [(1,)], "looking owes nothing"
        assert [s for s, _k in kinds(await frames(me, "r"))] == [0, 1, 2, 3, 4]


@pytest.mark.rule("B-12")
async def test_a_run_stays_open_through_silence_and_a_crash_and_says_recovering(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        program = [["say", "a"], ["sleep", 900], ["say", "b"]]
        silent = await me.run_agent_tool(Kid, program, run_id="r", no_progress_s=60)
        assert (silent.status, silent.reason) == ("running", "no-progress")
        stored = me.runs.get("r")
        assert (stored.status, stored.reason) == ("running", None), "nothing is stored"
        await me.durable()
        await test.crash()
        await test.reopen()
        phases: list[str] = []

        def hear(_c: str, tree: Any, subject: Any, _d: Any) -> None:
            found = runtree.inspect(tree, tree.root_slot, "r")
            phases.append("" if found is None else found.phase)

        test.kernel.subscribe("start", hear)
        me = await top(test)
        await test.advance(1)
        assert phases == ["recovering", "recovering"], (
            "as the parent, then the child, wakes"
        )
        now = look(me, "r")
        assert (now.phase, now.run.status, now.attempt) == ("running", "running", 2)
        joined = await me.run_agent_tool(Kid, program, run_id="r", no_progress_s=2000)
        assert (joined.status, joined.summary) == ("completed", "asleepb")
        assert look(me, "r").attempt == 2


@pytest.mark.rule("B-17")
async def test_reading_wakes_no_facet_and_finds_one_that_is_gone(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        await me.run_agent_tool(Kid, [["say", "x"]], run_id="r")
        await me.run_agent_tool(Frail, [["say", "x"]], run_id="gone")
        await me.dynamic_agents.delete(Frail, "gone")
        me = await again(test)
        starts: list[Any] = []
        test.kernel.subscribe("start", lambda *told: starts.append(told))
        assert [i.run.run_id for i in me.runs.tree()] == ["r", "gone"]
        assert look(me, "r").chunks == 1
        assert (look(me, "gone").path, look(me, "gone").chunks) == (
            "Top/a/Frail/gone", 1,
        )  # fmt: skip
        assert starts == []


# ---- the tree of them


DEEP = [["run", "b", [["run", "c", [["sleep", 9]]], ["run", "d", [["say", "x"]]]]]]


@pytest.mark.rule("B-17")
async def test_the_runs_below_are_a_tree_with_parents_first(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        async with trio.open_nursery() as nursery:
            ask(nursery, me, Kid, DEEP, run_id="a")
            ask(nursery, me, Frail, [["say", "x"]], run_id="z")
            await test.advance(3)
            tree = me.runs.tree()
            shown = {i.run.run_id: (i.depth, i.parent_run_id, i.path) for i in tree}
            assert shown == {
                "a": (0, None, "Top/a/Kid/a"),
                "z": (0, None, "Top/a/Frail/z"),
                "b": (1, "a", "Top/a/Kid/a/Kid/b"),
                "c": (2, "b", "Top/a/Kid/a/Kid/b/Kid/c"),
            }
            order = [i.run.run_id for i in tree]
            assert order.index("a") < order.index("b") < order.index("c")
            assert [i.asker for i in me.runs.tree("a")] == ["a", "b"]
            running = {i.run.run_id for i in me.runs.tree(status="running")}
            assert running == {"a", "b", "c"}
            mid = agent_at(test, ("Kid", "a"))
            assert [i.depth for i in mid.runs.tree()] == [1, 2], (
                "wherever one looks from"
            )
            assert look(mid, "b") == me.runs.tree("a")[0]
            [deepest] = mid.runs.tree("b")
            assert deepest == next(i for i in tree if i.run.run_id == "c")
            assert me.runs.tree("b") == [], "b is no run of this agent"
            walked: list[Any] = []
            while page := me.runs.tree(
                limit=2, after=walked[-1].number if walked else 0
            ):
                walked += page
            assert [i.number for i in walked] == [i.number for i in tree]
            assert me.runs.tree("nobody") == []
        assert {i.phase for i in me.runs.tree()} == {"over"}


@pytest.mark.rule("B-17")
async def test_runs_of_a_facet_that_is_no_run_are_in_the_tree_too(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        await me.dynamic_agents.get(Kid, "plain")
        plain = agent_at(test, ("Kid", "plain"))
        await plain.run_agent_tool(Kid, [["run", "in", [["say", "x"]]]], run_id="out")
        assert [(i.run.run_id, i.depth, i.parent_run_id) for i in me.runs.tree()] == [
            ("out", 0, None), ("in", 1, "out"),
        ]  # fmt: skip
        await me.dynamic_agents.delete(Kid, "plain")
        assert me.runs.tree() == []


# ---- who ended it


@pytest.mark.rule("B-18", "T-061")
async def test_the_row_tells_who_ended_a_run_and_a_shutdown_is_nobody(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        long = [["sleep", 500]]
        async with trio.open_nursery() as nursery:
            for run_id in ("user", "words", "shut"):
                ask(nursery, me, Kid, long, run_id=run_id)
            ask(nursery, me, Kid, [["run", "inner", long]], run_id="outer")
            budget = Detached(max_budget_s=20)
            await me.run_agent_tool(Kid, long, run_id="budget", detached=budget)
            await test.advance(3)
            inner = agent_at(test, ("Kid", "outer"))
            for run_id in ("user", "outer"):
                await me.runs.cancel(run_id)
            await me.runs.cancel("words", "asker-ended")
            ended_below = inner.runs.get("inner")
            await test.advance(25)
            await me.durable()
            await test.kernel.drain()
            await test.close()
            nursery.cancel_scope.cancel()
        await test.reopen()
        me = await top(test)
        causes = {run.run_id: ended_by(run) for run in me.runs.list()}
        causes["inner"] = ended_by(ended_below)
        assert causes == {
            "user": "cancelled", "words": "cancelled", "outer": "cancelled",
            "inner": "asker-ended", "budget": "budget-exceeded", "shut": None,
        }  # fmt: skip
        assert me.runs.get("shut").status == "running", "a shutdown is no cancel"
        assert me.runs.get("words").reason == '"asker-ended"'


@pytest.mark.rule("B-18", "B-17")
async def test_who_waits_for_a_run_that_is_cleared_is_told_so_and_clients_as_well(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        peer = await connect(test)
        async with trio.open_nursery() as nursery:
            told = ask(nursery, me, Kid, [["sleep", 500]], run_id="r")
            await test.advance(1)
            await me.runs.clear(status="running")
            await settle()
        assert ended_by(told[0]) == "forgotten"
        await me.durable()
        last = run_frames(peer)[-1]["event"]
        assert (last["kind"], last["runIds"]) == ("cleared", ["r"])


# ---- what is told


@pytest.mark.rule("B-19")
async def test_each_transition_is_told_once_with_where_and_how_long(
    clock: object,
) -> None:
    async with opened() as test:
        told = listen(test)
        me = await top(test)
        inner = [["run", "deep", [["say", "x"]]], ["fail", "no"]]
        await me.run_agent_tool(Kid, [["sleep", 4], ["run", "in", inner]], run_id="out")
        assert seen(told) == [
            ("out", "asked", 0), ("out", "begun", 1), ("in", "asked", 0),
            ("in", "begun", 1), ("deep", "asked", 0), ("deep", "begun", 1),
            ("deep", "completed", 1), ("in", "error", 1), ("out", "completed", 1),
        ]  # fmt: skip
        assert {(t.run_id, t.parent_run_id, t.depth) for t in told} == {
            ("out", None, 0), ("in", "out", 1), ("deep", "in", 2),
        }  # fmt: skip
        assert next(t.elapsed_s for t in told if t.run_id == "in") == 0
        assert told[-1].elapsed_s == pytest.approx(4, abs=0.5)
        assert (told[-2].reason, told[-1].reason) == ("failed", None)
        assert {t.agent_type for t in told} == {"Kid"}


@pytest.mark.rule("B-19")
async def test_a_run_that_goes_on_is_resumed_and_one_that_is_cut_ends(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        program = [["say", "a"], ["sleep", 9]]
        await me.run_agent_tool(Kid, program, run_id="on", detached=True)
        await me.run_agent_tool(Frail, program, run_id="cut", detached=True)
        await test.advance(2)
        await me.durable()
        await test.crash()
        await test.reopen()
        told = listen(test)
        me = await top(test)
        await test.advance(20)
        assert sorted(seen(told)) == [
            ("cut", "interrupted", 1), ("on", "completed", 2), ("on", "resumed", 2),
        ]  # fmt: skip
        assert {t.reason for t in told if t.run_id == "cut"} == {"not-resumable"}


@pytest.mark.rule("B-19")
async def test_how_waiters_leave_that_had_joined_again_is_counted(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        told: list[Any] = []
        test.kernel.subscribe(
            "run:reattached", lambda _c, _t, s, d: told.append((s.id, d))
        )
        program = [["sleep", 50]]
        await me.run_agent_tool(Kid, program, run_id="r", detached=True)
        await me.run_agent_tool(Kid, program, run_id="r", no_progress_s=5)
        with trio.move_on_after(1):
            await me.run_agent_tool(Kid, program, run_id="r")
        await me.run_agent_tool(Kid, program, run_id="r")
        await me.run_agent_tool(Kid, program, run_id="r")  # it has ended: no waiting
        counts = {k: n for k, n in test.kernel.metrics().items() if "reattached" in k}
        assert counts == {
            "run_reattached_no_progress": 1, "run_reattached_lost": 1,
            "run_reattached_completed": 1,
        }  # fmt: skip
        assert told == [("r", "no-progress"), ("r", "lost"), ("r", "completed")]


@pytest.mark.limit("many_retained")
@pytest.mark.rule("B-19")
async def test_many_runs_that_are_kept_are_warned_of_once(
    clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(limits=Limits(many_retained=3)) as test:
        me = await top(test)
        told: list[Any] = []
        test.kernel.subscribe("run:many_retained", lambda _c, _t, s, d: told.append(d))

        async def some(first: int, count: int) -> None:
            for number in range(first, first + count):
                await me.run_agent_tool(Kid, [["say", "x"]], run_id=f"r{number}")

        with caplog.at_level(logging.WARNING, "culet.kernel"):
            await some(0, 2)
            me = await again(test)
            test.kernel.subscribe(
                "run:many_retained", lambda _c, _t, s, d: told.append(d)
            )
            await some(2, 3)
            assert told == [3], "those of former lives count, and it is said once"
            await me.runs.clear()
            await some(9, 3)
        assert told == [3, 3]
        assert sum("keeps 3 runs" in r.message for r in caplog.records) == 2
