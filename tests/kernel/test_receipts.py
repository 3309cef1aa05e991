"""What an abort tells: each node and run, in one order; and that nothing is left."""

from __future__ import annotations

import gc
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio

from conftest import GapProbe
from culet.kernel import Agent, Chunk, Turn
from culet.kernel.errors import ChildDidNotStop
from culet.kernel.testing import Harness, open_test_kernel
from kernel.agents import agent_at, raises, settle, tree_of
from volume import SLOWER


class Kid(Agent):
    resumable = True

    async def on_start(self, props: Any = None) -> None:
        self.spawn(trio.sleep_forever)

    async def grow(self, fan: int, depth: int) -> None:
        for n in range(fan):
            kid = await self.dynamic_agents.get(Kid, f"{n}")
            if depth:
                await kid.grow(fan, depth - 1)

    async def run(self, run_id: str, seconds: float) -> None:
        await self.run_agent_tool(Kid, seconds, run_id=run_id, detached=True)

    async def deaf(self) -> None:
        self.spawn(self._deaf)

    async def _deaf(self) -> None:
        with trio.CancelScope(shield=True):
            await trio.sleep(30)

    async def tidy(self, seconds: float) -> None:
        self.spawn(self._tidy, seconds)

    async def _tidy(self, seconds: float) -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(seconds)

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        yield {"type": "text-delta", "id": "t", "delta": "so"}
        await trio.sleep(turn.input)


class Top(Kid):
    pass


def opened(**options: Any) -> Any:
    return open_test_kernel(roots=[Top], facets=[Kid], **options)


async def with_kid(test: Harness) -> Any:
    await test.kernel.get_agent(Top, "a")
    return await agent_at(test).dynamic_agents.get(Kid, "k")


async def abort(test: Harness) -> Any:
    return await agent_at(test).dynamic_agents.abort(Kid, "k", "why")


@pytest.mark.rule("F-044", "F-045")
async def test_it_names_each_node_in_the_same_order_every_time(clock: object) -> None:
    async with opened() as test:
        receipts = []
        for _ in range(4):
            kid = await with_kid(test)
            await kid.grow(3, 1)
            receipts.append(await abort(test))
        (nodes,) = {tuple(r.nodes) for r in receipts}
        assert len(nodes) == 13
        assert {how for _path, how in nodes} == {"stopped"}
        paths = [path for path, _how in nodes]
        assert paths[0] == "Top/a/Kid/k/Kid/2/Kid/2"
        assert paths[-1] == "Top/a/Kid/k"
        assert receipts[0].runs == []


@pytest.mark.rule("F-051")
async def test_it_names_the_runs_that_go_on_the_oldest_first(clock: object) -> None:
    async with opened() as test:
        kid = await with_kid(test)
        for run_id, seconds in (("z", 100), ("over", 0.1), ("a", 100), ("m", 100)):
            await kid.run(run_id, seconds)
        await test.advance(1)
        for _ in range(3):
            receipt = await abort(test)
            assert receipt.runs == [
                ("z", "running"),
                ("a", "running"),
                ("m", "running"),
            ]
            await with_kid(test)
        await test.advance(400)
        assert (await abort(test)).runs == []


async def test_a_run_that_ends_while_its_facet_stops_is_told_as_it_ended(
    clock: object,
) -> None:
    async with opened() as test:
        kid = await with_kid(test)
        await kid.run("r", 1e6)
        await kid.tidy(2)
        await test.advance(1)
        receipts = []

        async def one() -> None:
            receipts.append(await abort(test))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one)
            await test.advance(1)
            tree = tree_of(test)
            slot = tree.db.execute("SELECT owner FROM run")[0][0]
            assert tree.runs.cancel(slot, "r", "no more") == "aborted"
        assert receipts[0].runs == [("r", "aborted")]
        assert receipts[0].elapsed_s == pytest.approx(2, abs=0.1)


async def test_with_code_that_does_not_stop_the_receipt_comes_in_the_error(
    clock: object,
) -> None:
    async with opened(abort_grace_s=2) as test:
        kid = await with_kid(test)
        await kid.grow(2, 0)
        await agent_at(test, ("Kid", "k"), ("Kid", "0")).deaf()
        await settle()
        error = await raises(ChildDidNotStop, abort, test)
        assert error.receipt is not None
        assert error.receipt.nodes == [
            ("Top/a/Kid/k/Kid/1", "stopped"),
            ("Top/a/Kid/k/Kid/0", "remnant"),
            ("Top/a/Kid/k", "remnant"),
        ]
        assert 2 <= error.receipt.elapsed_s < 3.1
        await test.advance(40)


@pytest.mark.rule("F-478")
async def test_clean_up_that_takes_its_time_is_waited_for_then_cut(
    clock: object,
) -> None:
    async with opened(abort_grace_s=2) as test:
        kid = await with_kid(test)
        await kid.tidy(1)
        await settle()
        receipt = await abort(test)
        assert receipt.nodes == [("Top/a/Kid/k", "stopped")]
        assert receipt.elapsed_s == pytest.approx(1, abs=0.1)
        kid = await with_kid(test)
        await kid.tidy(2.3)
        await settle()
        receipt = await abort(test)
        assert receipt.nodes == [("Top/a/Kid/k", "cut")]


async def test_no_task_is_left_and_a_thousand_facets_take_no_time(
    gap_probe: GapProbe,
) -> None:
    async with opened() as test:
        await with_kid(test)
        await abort(test)
        before = trio.lowlevel.current_statistics().tasks_living
        kid = await with_kid(test)
        await kid.grow(31, 1)
        assert trio.lowlevel.current_statistics().tasks_living > before + 1900
        gc.collect()  # of all the tests before, which is none of this one's time
        gap_probe.worst_pass_s = 0.0
        began = time.thread_time()
        receipt = await abort(test)
        took = time.thread_time() - began
        assert len(receipt.nodes) == 993
        assert trio.lowlevel.current_statistics().tasks_living == before
        assert len(tree_of(test).nodes) == 1
        assert gap_probe.worst_pass_s < 0.05 * SLOWER
        assert took < 0.3 * SLOWER, f"{took * 1000:.0f} ms of CPU"
