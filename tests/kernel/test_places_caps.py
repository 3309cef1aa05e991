"""Bounds of runs by class, of detached runs, of a wait in line, of a tree."""

from __future__ import annotations

import random
from typing import Any

import pytest
import trio

from culet.kernel import CancelToken, Limits, RunCaps
from culet.kernel.testing import Harness
from kernel.agents import settle, tree_of
from kernel.toolkit import TURNS, Frail, Kid, Top, ask, forget, opened, top


@pytest.fixture(autouse=True)
def fresh() -> None:
    forget()


class ByClass(Top):
    run_caps = RunCaps(by_class={Kid: 1})
    max_concurrent_agent_tools = 3


class Apart(Top):
    run_caps = RunCaps(detached=1)
    max_concurrent_agent_tools = 1


class Lined(Top):
    run_caps = RunCaps(by_class={"Kid": 1}, wait_s=10)
    max_concurrent_agent_tools = 2
    max_queued_agent_tools = 4


def nobody_waits(test: Harness, name: str) -> bool:
    places = tree_of(test, name).runs.places
    return (places._lines, dict(places._given)) == ({}, {})


@pytest.mark.rule("B-08", "T-252")
async def test_runs_of_a_class_have_a_bound_of_their_own(clock: object) -> None:
    async with opened(root=ByClass) as test:
        me = await top(test, ByClass)
        async with trio.open_nursery() as nursery:
            ask(nursery, me, Kid, [["sleep", 5]], run_id="k1")
            await settle()
            full = await me.run_agent_tool(Kid, [], run_id="k2")
            assert (full.reason, full.error) == (
                "capacity", "1 runs of Kid are going on already",
            )  # fmt: skip
            for name in ("f1", "f2"):
                ask(nursery, me, Frail, [["sleep", 5]], run_id=name)
            await settle()
            full = await me.run_agent_tool(Frail, [], run_id="f3")
            assert full.error == "3 runs are going on already"
        assert (await me.run_agent_tool(Kid, [], run_id="k2")).status == "completed"


@pytest.mark.rule("B-08", "T-252")
async def test_detached_runs_that_are_bounded_apart_take_no_place_of_others(
    clock: object,
) -> None:
    async with opened(root=Apart) as test:
        me = await top(test, Apart)
        await me.run_agent_tool(Kid, [["sleep", 50]], run_id="loose", detached=True)
        run = await me.run_agent_tool(Kid, [["say", "x"]], run_id="awaited")
        assert run.status == "completed"
        full = await me.run_agent_tool(Kid, [], run_id="more", detached=True)
        assert full.error == "1 detached runs are going on already"
        await me.durable()
        await test.crash()
        await test.reopen()
        me = await top(test, Apart)
        full = await me.run_agent_tool(Kid, [], run_id="more", detached=True)
        assert full.reason == "capacity", "what goes on after a crash is counted"


@pytest.mark.rule("B-08")
async def test_who_waits_too_long_in_line_is_refused_and_leaves_nothing(
    clock: object,
) -> None:
    async with opened(root=Lined) as test:
        me = await top(test, Lined)
        async with trio.open_nursery() as nursery:
            ask(nursery, me, Kid, [["sleep", 30]], run_id="k1")
            await settle()
            began = trio.current_time()
            refused = await me.run_agent_tool(Kid, [["say", "x"]], run_id="k2")
            assert trio.current_time() - began == pytest.approx(10, abs=0.1)
            assert (refused.status, refused.reason) == ("error", "capacity")
            assert me.runs.get("k2") is None
            assert nobody_waits(test, "Lined")
            late = ask(nursery, me, Kid, [["say", "x"]], run_id="k2")
            await test.advance(9)
            await me.runs.cancel("k1", "enough")
            await settle()
        assert late[0].status == "completed", "in time the same id is as good as new"
        assert nobody_waits(test, "Lined")


@pytest.mark.rule("B-08")
async def test_a_line_for_one_class_does_not_hold_up_another(clock: object) -> None:
    order: list[str] = []
    async with opened(root=Lined) as test:
        me = await top(test, Lined)
        test.kernel.subscribe("turn:begin", lambda _c, _t, s, _d: order.append(s.id))
        async with trio.open_nursery() as nursery:
            results = [ask(nursery, me, Kid, [["sleep", 4]], run_id="k1")]
            await settle()
            results.append(ask(nursery, me, Kid, [["sleep", 1]], run_id="k2"))
            await settle()
            results.append(ask(nursery, me, Frail, [["sleep", 2]], run_id="f1"))
            await settle()
            assert order == ["k1", "f1"], "f1 waits for no place that k2 may have"
            results.append(ask(nursery, me, Frail, [["sleep", 1]], run_id="f2"))
            results.append(ask(nursery, me, Kid, [["sleep", 1]], run_id="k3"))
            await settle()
            assert len(order) == 2
        assert order == ["k1", "f1", "f2", "k2", "k3"]
        assert [r[0].status for r in results] == ["completed"] * 5
        assert nobody_waits(test, "Lined")


@pytest.mark.limit("runs_per_tree")
@pytest.mark.rule("B-08")
async def test_the_runs_of_a_tree_have_a_bound_over_all_its_agents(
    clock: object,
) -> None:
    class Patient(Top):
        max_queued_agent_tools = 1

    nested: list[Any] = [["run", "deep", [["sleep", 5]]]]
    async with opened(root=Patient, limits=Limits(runs_per_tree=2)) as test:
        me = await top(test, Patient)
        async with trio.open_nursery() as nursery:
            ask(nursery, me, Kid, nested, run_id="mid")
            await test.advance(1)
            assert TURNS == {"mid": 1, "deep": 1}
            waits = ask(nursery, me, Kid, [["say", "x"]], run_id="waits")
            await settle()
            full = await me.run_agent_tool(Kid, [], run_id="more")
            assert full.error == (
                "2 runs are going on in this tree already (limits.runs_per_tree = 2)"
            )
            assert me.runs.get("waits") is None
        assert waits[0].status == "completed"


@pytest.mark.rule("B-08")
async def test_a_tree_has_a_depth_that_no_run_passes(clock: object) -> None:
    deep: list[Any] = [["run", "b", [["run", "c", [["say", "x"]]]]]]
    async with opened(limits=Limits(depth=3)) as test:
        me = await top(test)
        run = await me.run_agent_tool(Kid, deep, run_id="a")
        assert run.status == "completed"
        middle = test.find([("Top", "a"), ("Kid", "a"), ("Kid", "b")])
        assert middle is not None
        refused = await middle.agent.run_agent_tool(Kid, [], run_id="c")
        assert (refused.status, refused.reason) == ("error", "depth")
        assert TURNS == {"a": 1, "b": 1}


class Busy(Top):
    run_caps = RunCaps(by_class={"Kid": 2}, detached=1, wait_s=15)
    max_concurrent_agent_tools = 3
    max_queued_agent_tools = 2


@pytest.mark.rule("B-08", "T-252")
@pytest.mark.parametrize("seed", range(8))
async def test_whoever_comes_and_goes_no_bound_is_passed_and_no_free_place_is_missed(
    seed: int, clock: object
) -> None:
    chance = random.Random(seed)
    async with opened(root=Busy, limits=Limits(runs_per_tree=4)) as test:
        me = await top(test, Busy)
        places = tree_of(test, "Busy").runs.places
        refused = waited = 0

        def holds() -> None:
            nonlocal waited
            going = me.runs.tree(status="running")
            loose = [i for i in going if i.detached]
            assert len(going) <= 4
            assert len(loose) <= 1
            assert len(going) - len(loose) <= 3
            assert sum(i.run.agent_type == "Kid" for i in going) <= 2
            for waiter in places._lines.get(me._node.slot, ()):
                waited += 1
                assert waiter.given or places.full(me._node, waiter.want) is not None

        async def one(number: int) -> None:
            nonlocal refused
            token = CancelToken()
            cls, loose = chance.choice([Kid, Frail]), chance.random() < 0.3
            program = [["sleep", chance.choice([0, 1, 4, 9])]]
            with trio.move_on_after(chance.choice([2, 30, 30])):
                if chance.random() < 0.2:
                    me.spawn(later, token)
                run = await me.run_agent_tool(
                    cls, program, run_id=f"r{number}", detached=loose, cancel=token
                )
                refused += run.reason == "capacity"

        async def later(token: CancelToken) -> None:
            await trio.sleep(1.5)
            token.cancel("no more")

        async with trio.open_nursery() as nursery:
            for number in range(40):
                nursery.start_soon(one, number)
                await test.advance(chance.choice([0, 0, 0, 0.5, 2]))
                await settle()
                holds()
        await test.advance(60)
        holds()
        assert nobody_waits(test, "Busy")
        assert me.runs.list(status="running") == []
        assert refused
        assert waited
