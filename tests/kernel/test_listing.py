"""`kernel.tree()`: everybody in a tree, awake or asleep, page by page."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
import trio

from conftest import GapProbe
from culet.kernel import Agent, Limits, Schedule
from culet.kernel.core.job import Retry
from culet.kernel.errors import ChildDidNotStop, FacetBroken
from culet.kernel.testing import Harness, open_test_kernel
from kernel.agents import agent_at, raises, settle, tree_of
from kernel.peers import connect
from volume import SLOWER


class Kid(Agent):
    async def keep(self) -> None:
        self.sql("create table if not exists t (v)")
        self.sql("insert into t values (zeroblob(9000))")

    async def make(self, count: int) -> None:
        for n in range(count):
            await self.dynamic_agents.get(Kid, f"{n}")

    async def later(self, seconds: float) -> None:
        retry = Retry(max_attempts=1)
        await self.schedule(seconds, "tick", seconds, retry=retry)

    async def tick(self, payload: Any, schedule: Schedule) -> None:
        raise ValueError("no")

    async def break_down(self) -> None:
        self.spawn(self._boom)

    async def _boom(self) -> None:
        raise ValueError("boom")

    async def deaf(self) -> None:
        self.spawn(self._deaf)

    async def _deaf(self) -> None:
        with trio.CancelScope(shield=True):
            await trio.sleep(30)


class Slow(Kid):
    async def on_start(self, props: Any = None) -> None:
        await trio.sleep(5)


class Top(Kid):
    pass


def opened(**options: Any) -> Any:
    return open_test_kernel(roots=[Top], facets=[Kid, Slow], **options)


def listed(test: Harness, key: str) -> dict[str, Any]:
    return {row["path"]: row[key] for row in test.kernel.tree("Top", "a")}


async def test_it_tells_of_each_agent_where_it_is_and_what_it_has(
    clock: object,
) -> None:
    async with opened() as test:
        assert test.kernel.tree("Top", "a") == []
        root = await test.kernel.get_agent(Top, "a")
        kid = await agent_at(test).dynamic_agents.get(Kid, "k")
        await kid.make(2)
        below = await agent_at(test, ("Kid", "k")).dynamic_agents.get(Kid, "0")
        await below.keep()
        await kid.later(1)
        await kid.later(1000)
        await connect(test, ("Top", "a"), ("Kid", "k"))
        await test.advance(5)
        await test.evict([("Top", "a"), ("Kid", "k"), ("Kid", "1")])
        async with agent_at(test, ("Kid", "k"), ("Kid", "0")).keep_alive():
            rows = test.kernel.tree("Top", "a")
        assert [row["path"] for row in rows] == [
            "Top/a",
            "Top/a/Kid/k",
            "Top/a/Kid/k/Kid/0",
            "Top/a/Kid/k/Kid/1",
        ]
        assert [row["state"] for row in rows] == ["live", "live", "live", "sleeping"]
        assert [row["sockets"] for row in rows] == [0, 1, 0, 0]
        assert [row["refs"] for row in rows] == [0, 0, 1, 0]
        assert [row["jobs"] for row in rows] == [0, 2, 0, 0]
        assert [row["dead_jobs"] for row in rows] == [0, 1, 0, 0]
        assert rows[2]["bytes"] > 9000
        assert rows[3]["bytes"] == 0
        assert len({row["slot"] for row in rows}) == 4
        await agent_at(test).dynamic_agents.delete(Kid, "k")
        assert list(listed(test, "state")) == ["Top/a"]
        assert root is not None


async def test_it_tells_who_starts_who_rests_and_who_did_not_stop(
    clock: object,
) -> None:
    limits = Limits(restart_attempts=1)
    async with opened(limits=limits, abort_grace_s=1) as test:
        await test.kernel.get_agent(Top, "a")
        inside = agent_at(test).dynamic_agents
        async with trio.open_nursery() as nursery:
            nursery.start_soon(inside.get, Slow, "s")
            await test.advance(1)
            assert listed(test, "state")["Top/a/Slow/s"] == "starting"
        kid = await inside.get(Kid, "broken")
        await kid.break_down()
        await settle()
        assert listed(test, "state")["Top/a/Kid/broken"] == "resting"
        await raises(FacetBroken, inside.get, Kid, "broken")
        await test.advance(61)
        assert listed(test, "state")["Top/a/Kid/broken"] == "sleeping"
        stuck = await inside.get(Kid, "stuck")
        await stuck.deaf()
        await settle()
        with contextlib.suppress(ChildDidNotStop):
            await inside.abort(Kid, "stuck")
        states = [row["state"] for row in test.kernel.tree("Top", "a")]
        assert states[-2:] == ["sleeping", "remnant"]
        first = test.kernel.tree("Top", "a", limit=2)
        assert "remnant" not in [row["state"] for row in first], "on the last page"
        await test.advance(60)
        assert "remnant" not in [row["state"] for row in test.kernel.tree("Top", "a")]


@pytest.mark.limit("tree_rows")
async def test_pages_are_bounded_and_together_they_are_all(clock: object) -> None:
    async with opened(limits=Limits(tree_rows=4)) as test:
        await test.kernel.get_agent(Top, "a")
        kid = await agent_at(test).dynamic_agents.get(Kid, "k")
        await kid.make(9)
        found: list[str] = []
        after: str | None = None
        while page := test.kernel.tree("Top", "a", after=after):
            assert len(page) <= 4
            found += [row["path"] for row in page]
            after = page[-1]["slot"]
        assert found == ["Top/a", "Top/a/Kid/k"] + [
            f"Top/a/Kid/k/Kid/{n}" for n in range(9)
        ]
        assert len(test.kernel.tree("Top", "a", limit=7)) == 7


@pytest.mark.gap("ten thousand rows are made in one step")
async def test_a_page_of_ten_thousand_facets_holds_the_loop_for_a_moment(
    gap_probe: GapProbe,
) -> None:
    async with opened() as test:
        await test.kernel.get_agent(Top, "a")
        tree = tree_of(test)
        kind = tree.kernel.classes.of(Kid)
        with tree.transaction():
            for n in range(10_000):
                tree.insert_node(f"slot{n}", tree.root_slot, kind, f"k{n}")
        took = []
        for _ in range(3):
            began = time.thread_time()
            page = test.kernel.tree("Top", "a")
            took.append(time.thread_time() - began)
        assert len(page) == 1000
        assert page[-1]["path"] == "Top/a/Kid/k998"
        assert min(took) < 0.05 * SLOWER, f"{min(took) * 1000:.0f} ms"
        last = test.kernel.tree("Top", "a", after="slot9990")
        assert [row["slot"] for row in last] == [
            f"slot{n}" for n in range(9991, 10_000)
        ]


async def test_a_path_reads_the_same_wherever_it_is_told(clock: object) -> None:
    async with opened() as test:
        await test.kernel.get_agent(Top, "a")
        heard: list[str] = []

        def hear(channel: str, _tree: Any, _subject: Any, detail: Any) -> None:
            heard.append(getattr(detail, "path", channel))

        test.kernel.subscribe("*", hear)
        inside = agent_at(test).dynamic_agents
        await inside.get(Kid, "x/Kid/y")
        told = [row["path"] for row in test.kernel.tree("Top", "a")]
        receipt = await inside.abort(Kid, "x/Kid/y")
        await inside.delete(Kid, "x/Kid/y")
        paths = {told[1], receipt.nodes[0][0], *heard} - {"abort"}
        assert len(paths) == 1, paths
        assert "x/Kid/y" not in paths.pop(), "it is no child of a child"
