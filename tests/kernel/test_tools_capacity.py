"""How many runs at once: refused, or in line; and each agent counts its own."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from culet.kernel import CancelToken
from kernel.agents import agent_at, rows, settle, tree_of
from kernel.peers import connect
from kernel.toolkit import (
    HEARD,
    TURNS,
    Frail,
    Kid,
    Top,
    again,
    ask,
    kinds,
    opened,
    run_frames,
    top,
)


class Capped(Top):
    max_concurrent_agent_tools = 2


class Lined(Top):
    max_concurrent_agent_tools = 1
    max_queued_agent_tools = 3


class Middle(Kid):
    max_concurrent_agent_tools = 1


# ---- refused


@pytest.mark.rule("T-252", "T-202", "T-253")
async def test_awaited_and_detached_count_alike_and_one_more_is_refused_at_once(
    clock: object,
) -> None:
    async with opened(root=Capped) as test:
        me = await top(test, Capped)
        peer = await connect(test, ("Capped", "a"))
        async with trio.open_nursery() as nursery:
            ask(nursery, me, Kid, [["sleep", 9]], run_id="awaited")
            await me.run_agent_tool(Kid, [["sleep", 9]], run_id="loose", detached=True)
            await test.advance(1)
            began = trio.current_time()
            refused = await me.run_agent_tool(Kid, [], run_id="more")
            assert trio.current_time() == began
            assert (refused.status, refused.reason) == ("error", "capacity")
            assert "2 runs" in refused.error
            handle = await me.run_agent_tool(Kid, [], run_id="more", detached=True)
            assert handle.status == "error"
        await settle()
        shown = [f for f in run_frames(peer) if f["event"]["kind"] == "error"]
        assert [f["sequence"] for f in shown] == [1, 1]
        assert {run.run_id for run in me.runs.list()} == {"awaited", "loose"}


@pytest.mark.rule("T-256", "T-257")
async def test_what_was_interrupted_holds_no_place_what_runs_does(
    clock: object,
) -> None:
    async with opened(root=Capped) as test:
        me = await top(test, Capped)
        await me.run_agent_tool(Frail, [["sleep", 9]], run_id="cut", detached=True)
        await me.run_agent_tool(Kid, [["sleep", 30]], run_id="goes on", detached=True)
        await test.advance(1)
        await test.crash()
        await test.reopen()
        me = await top(test, Capped)
        await test.advance(1)
        assert me.runs.get("cut").status == "interrupted"
        assert me.runs.get("goes on").status == "running"
        run = await me.run_agent_tool(Kid, [["say", "x"]], run_id="new")
        assert run.status == "completed"
        await me.run_agent_tool(Kid, [["sleep", 9]], run_id="second", detached=True)
        full = await me.run_agent_tool(Kid, [["say", "x"]], run_id="third")
        assert full.reason == "capacity", "the one that goes on is counted"


@pytest.mark.rule("T-258", "T-259")
async def test_without_a_bound_all_go_on_at_once(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            found = [ask(nursery, me, Kid, [["sleep", 5]]) for _ in range(40)]
        assert trio.current_time() - began < 6
        assert {results[0].status for results in found} == {"completed"}


@pytest.mark.rule("T-041")
async def test_what_is_cancelled_before_it_begins_takes_no_place(clock: object) -> None:
    async with opened(root=Capped) as test:
        me = await top(test, Capped)
        for number in range(2):
            await me.run_agent_tool(
                Kid, [["sleep", 9]], run_id=f"r{number}", detached=True
            )
        token = CancelToken()
        token.cancel("never mind")
        run = await me.run_agent_tool(Kid, [], run_id="r", cancel=token)
        assert (run.status, run.reason) == ("aborted", "never mind")


# ---- in line


@pytest.mark.rule("T-252")
async def test_who_asks_for_one_more_waits_in_line_first_come_first_served(
    clock: object,
) -> None:
    order: list[str] = []
    async with opened(root=Lined) as test:
        me = await top(test, Lined)
        test.kernel.subscribe("turn:begin", lambda _c, _t, s, _d: order.append(s.id))
        async with trio.open_nursery() as nursery:
            found = []
            for number in range(4):
                found.append(ask(nursery, me, Kid, [["sleep", 5]], run_id=f"r{number}"))
                await settle()
            refused = await me.run_agent_tool(Kid, [], run_id="r4")
            assert refused.reason == "capacity", "the line has its bound"
            joined = ask(nursery, me, Kid, [["sleep", 5]], run_id="r0")
            await settle()
            assert [run.run_id for run in me.runs.list()] == ["r0"]
            for number in range(1, 4):
                await test.advance(5.2)
                assert [r.run_id for r in me.runs.list(status="running")] == [
                    f"r{number}"
                ]
        assert order == ["r0", "r1", "r2", "r3"]
        assert {results[0].status for results in found} == {"completed"}
        assert joined == found[0]
        places = tree_of(test, "Lined").runs.places
        assert (places._lines, dict(places._given)) == ({}, {})


@pytest.mark.rule("T-252")
@pytest.mark.parametrize("how", ["token", "scope"])
async def test_who_waits_in_line_may_leave_it(how: str, clock: object) -> None:
    async with opened(root=Lined) as test:
        me = await top(test, Lined)
        token = CancelToken()
        async with trio.open_nursery() as nursery:
            ask(nursery, me, Kid, [["sleep", 5]], run_id="r0")
            await settle()
            left: list[Any] = []

            async def leaves() -> None:
                with trio.move_on_after(1 if how == "scope" else 99):
                    left.append(
                        await me.run_agent_tool(
                            Kid, [["say", "x"]], run_id="r1", cancel=token
                        )
                    )

            nursery.start_soon(leaves)
            await settle()
            last = ask(nursery, me, Kid, [["say", "x"]], run_id="r2")
            await test.advance(2)
            if how == "token":
                token.cancel("no more")
                await settle()
                assert (left[0].status, left[0].reason) == ("aborted", "no more")
        assert last[0].status == "completed"
        assert TURNS == {"r0": 1, "r2": 1}
        assert (me.runs.get("r1") is None) is (how == "scope")
        places = tree_of(test, "Lined").runs.places
        assert (places._lines, dict(places._given)) == ({}, {})


async def test_a_place_that_is_not_taken_goes_to_the_next(clock: object) -> None:
    async with opened(root=Lined) as test:
        me = await top(test, Lined)
        async with trio.open_nursery() as nursery:
            ask(nursery, me, Kid, [["sleep", 5]], run_id="r0")
            await settle()
            scope = trio.CancelScope()

            async def leaves_when_called() -> None:
                with scope:
                    await me.run_agent_tool(Kid, [["say", "x"]], run_id="r1")

            nursery.start_soon(leaves_when_called)
            await settle()
            twice = [
                ask(nursery, me, Kid, [["say", "x"]], run_id="r2") for _ in range(2)
            ]
            await settle()
            test.kernel.subscribe("turn:end", lambda *_: scope.cancel())
        assert [results[0].status for results in twice] == ["completed"] * 2
        assert TURNS == {"r0": 1, "r2": 1}
        places = tree_of(test, "Lined").runs.places
        assert (places._lines, dict(places._given)) == ({}, {})


async def test_a_bound_of_none_at_all_has_no_line(clock: object) -> None:
    class Closed(Lined):
        max_concurrent_agent_tools = 0

    async with opened(root=Closed) as test:
        me = await top(test, Closed)
        with trio.fail_after(1):
            run = await me.run_agent_tool(Kid, [], run_id="r")
        assert run.reason == "capacity"


# ---- one below another


@pytest.mark.rule("T-260", "T-261")
async def test_each_agent_has_runs_bounds_and_clients_of_its_own(clock: object) -> None:
    script = [["run", "in", [["say", "deep"], ["sleep", 5]]]]
    async with opened(Middle, root=Capped) as test:
        me = await top(test, Capped)
        peer = await connect(test, ("Capped", "a"))
        async with trio.open_nursery() as nursery:
            ask(nursery, me, Middle, script, run_id="mid")
            await test.advance(1)
            below = await connect(test, ("Capped", "a"), ("Middle", "mid"), label="m")
            node = test.find([("Capped", "a"), ("Middle", "mid")])
            assert node is not None
            mid = node.agent
            full = await mid.run_agent_tool(Middle, [], run_id="second")
            assert full.reason == "capacity"
            other = await me.run_agent_tool(Kid, [["say", "x"]], run_id="beside")
            assert other.status == "completed"
        await me.durable()
        assert {f["event"]["runId"] for f in run_frames(peer)} == {"mid", "beside"}
        assert "in" in {f["event"]["runId"] for f in run_frames(below)}
        assert [run.run_id for run in mid.runs.list()] == ["in"]
        assert "in" not in {run.run_id for run in me.runs.list()}
        assert await mid.runs.clear() == 1
        assert {run.run_id for run in me.runs.list()} == {"mid", "beside"}


@pytest.mark.rule("T-263", "T-264", "B-10")
async def test_three_levels_go_on_after_a_crash_each_by_itself(clock: object) -> None:
    script = [["run", "m", [["run", "l", [["sleep", 3], ["say", "x"]]]]]]
    async with opened() as test:
        me = await top(test)
        await me.run_agent_tool(Kid, script, run_id="t", detached=True)
        await test.advance(1)
        began = trio.current_time()
        me = await again(test)
        assert trio.current_time() - began < 1, "no start waits for another"
        tree = tree_of(test)
        sql = (
            "SELECT run.id, node.name FROM run JOIN node ON node.slot = run.owner"
            " ORDER BY run.born"
        )
        assert rows(tree, sql) == [("t", "a"), ("m", "t"), ("l", "m")]
        await test.advance(10)
        assert rows(tree, "SELECT DISTINCT status FROM run") == [("completed",)]
        ends = [h for h in HEARD if h[0] == "finish"]
        assert sorted(ends) == sorted(set(ends))
        assert len(ends) == 3
        assert agent_at(test).runs.get("t").n == 1
        assert kinds([f async for f in me.runs.replay("t")])[-1] == (2, "finished")
