"""Runs are kept until they are cleared; a clear takes all of them, and tells everybody."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from culet.adapters import AIChatAgent
from culet.kernel import CancelToken, Chunk, Detached, Turn
from culet.kernel.testing import open_test_kernel
from kernel.agents import agent_at, rows, settle, tree_of
from kernel.peers import connect
from kernel.toolkit import (
    HEARD,
    TURNS,
    Frail,
    Hears,
    Kid,
    again,
    ask,
    folded,
    frames,
    kinds,
    opened,
    run_frames,
    say,
    top,
)


class Tidy(Kid):
    """A facet that owes things of its own."""

    async def tick(self, payload: Any, schedule: Any) -> None: ...

    async def on_turn(self, turn: Turn) -> Any:
        self.sql("CREATE TABLE t (x)")
        await self.schedule(3600, "tick")
        self.queue.put("tick", 1)
        await self.run_agent_tool(Kid, [["say", "deep"]], run_id="deep")
        yield say("x")


@pytest.mark.rule("T-265", "T-276", "T-232", "B-04")
async def test_runs_are_kept_whatever_their_end_and_however_long(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        token = CancelToken()
        token.cancel("x")
        await me.run_agent_tool(Kid, [["say", "x"]], run_id="completed")
        await me.run_agent_tool(Kid, [["say", "x"], ["fail", "no"]], run_id="error")
        await me.run_agent_tool(Kid, [], run_id="aborted", cancel=token)
        await me.run_agent_tool(
            Frail, [["sleep", 9]], run_id="interrupted", detached=True
        )
        await test.advance(1)
        me = await again(test)
        await test.advance(1)
        told = {run.run_id: await frames(me, run.run_id) for run in me.runs.list()}
        assert {run.run_id: run.status for run in me.runs.list()} == {
            k: k for k in told
        }
        test.clock.jump(40 * 86_400)
        await test.advance(60)  # the clock is looked at meanwhile
        me = await again(test)
        for run_id, found in told.items():
            assert await frames(me, run_id) == found
        assert me.dynamic_agents.has(Kid, "completed")


@pytest.mark.rule("T-268", "T-266", "T-270")
async def test_who_waits_for_a_run_that_is_cleared_hears_that_it_was(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        peer = await connect(test)
        async with trio.open_nursery() as nursery:
            found = [
                ask(nursery, me, Kid, [["sleep", 99]], run_id="r") for _ in range(3)
            ]
            await test.advance(1)
            assert await me.runs.clear() == 1
        for results in found:
            assert (results[0].status, results[0].reason) == ("aborted", "cleared")
        await test.advance(1)
        assert HEARD == [("start", "a", "r"), ("finish", "a", "r", "aborted")]
        assert kinds(run_frames(peer)) == [
            (0, "started"),
            (1, "aborted"),
            (2, "cleared"),
        ]
        assert run_frames(peer)[-1]["event"]["runIds"] == ["r"]
        assert folded(peer)["runsById"] == {}
        assert me.runs.list() == []


@pytest.mark.rule("T-268", "T-273", "T-205")
async def test_a_hook_that_is_owed_outlives_the_row_a_delivery_does_not(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        policy = Detached(on_finish="delivered")
        await me.run_agent_tool(Kid, [["sleep", 99]], run_id="r", detached=policy)
        await test.advance(1)
        assert await me.runs.clear() == 1
        await me.durable()
        await test.crash()
        await test.reopen()
        await test.advance(60)
        told = [h for h in HEARD if h[0] != "start"]
        assert set(told) == {("finish", "a", "r", "aborted")}


@pytest.mark.rule("T-273")
@pytest.mark.parametrize("after", [5, 5.0001])
async def test_a_clear_beside_a_delivery_harms_neither(
    after: float, clock: object
) -> None:
    async with opened() as test:
        me = await top(test)
        policy = Detached(on_finish="delivered")
        await me.run_agent_tool(Kid, [["sleep", 5]], run_id="r", detached=policy)
        await test.advance(after)
        await me.runs.clear()
        await test.advance(60)
        told = [h[0] for h in HEARD if h[0] in ("delivered", "finish")]
        assert told.count("finish") == 1, "the hook"
        assert told.count("delivered") <= 1, "its delivery"
        assert rows(tree_of(test), "SELECT count(*) FROM job") == [(0,)]


@pytest.mark.rule("T-269", "T-275")
async def test_filters_combine_and_age_alone_means_what_has_ended(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        await me.run_agent_tool(Kid, [["sleep", 99]], run_id="long", detached=True)
        await me.run_agent_tool(Kid, [["say", "x"]], run_id="old")
        await me.run_agent_tool(Kid, [["fail", "x"]], run_id="bad")
        await test.advance(10)
        cut = test.clock.now_ms()
        await test.advance(1)
        await me.run_agent_tool(Kid, [["say", "x"]], run_id="new")

        def left() -> set[str]:
            return {run.run_id for run in me.runs.list()}

        assert await me.runs.clear("error", older_than=cut) == 1
        assert left() == {"long", "old", "new"}
        assert await me.runs.clear(older_than=cut) == 1
        assert left() == {"long", "new"}
        assert me.runs.get("long").status == "running"
        assert await me.runs.clear("running", older_than=cut) == 1
        assert left() == {"new"}
        assert (
            await me.run_agent_tool(Kid, [["say", "x"]], run_id="new")
        ).summary == "x"


@pytest.mark.rule("T-271", "T-285")
async def test_a_cleared_id_begins_anew_for_the_facet_and_for_clients(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        peer = await connect(test)
        for text in ("first", "second"):
            await me.run_agent_tool(Kid, [["say", text]], run_id="r")
            await me.durable()
            run = folded(peer)["runsById"]["r"]
            assert (run["summary"], [p["text"] for p in run["parts"]]) == (text, [text])
            if text == "first":
                slot = agent_at(test, ("Kid", "r"))._node.slot
                await me.runs.clear()
                await settle()
                assert folded(peer)["runsById"] == {}
        assert agent_at(test, ("Kid", "r"))._node.slot != slot
        assert TURNS == {"r": 2}
        assert len(await frames(me, "r")) == 3


@pytest.mark.rule("T-272")
async def test_a_clear_takes_all_that_the_facet_had_at_every_depth(
    clock: object,
) -> None:
    async with opened(Tidy) as test:
        me = await top(test)
        before = tree_of(test).store.slots()
        run = await me.run_agent_tool(Tidy, 1, run_id="r")
        assert run.status == "completed"
        tree = tree_of(test)
        assert rows(tree, "SELECT count(*) FROM run") == [(2,)]
        await me.runs.clear()
        await test.advance(1)
        for table in ("run", "job", "fiber"):
            assert rows(tree, f"SELECT count(*) FROM {table}") == [(0,)], table
        assert rows(tree, "SELECT count(*) FROM node") == [(1,)]
        assert tree.store.slots() == before


@pytest.mark.rule("T-274")
async def test_clearing_a_chat_clears_no_run(clock: object) -> None:
    class Chat(AIChatAgent, Hears):
        async def on_chat_message(self, turn: Turn) -> Any:
            run = await self.run_agent_tool(Kid, [["say", "x"]], run_id="r")
            chunk: Chunk = say(run.status)
            yield chunk

    async with open_test_kernel(roots=[Chat], facets=[Kid]) as test:
        me = await top(test, Chat)
        question = {"id": "q", "role": "user", "parts": [{"type": "text", "text": "?"}]}
        await me.save_messages([question])
        await me.clear_messages()
        assert me.messages == []
        assert [run.run_id for run in me.runs.list()] == ["r"]
        assert await me.runs.clear() == 1
        assert me.runs.list() == []


@pytest.mark.rule("T-273", "T-227")
async def test_a_client_whose_replay_meets_a_clear_is_not_stuck(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        for number in range(3):
            await me.run_agent_tool(Kid, [["say", "x"]], run_id=f"r{number}")
        await me.durable()
        peer = await connect(test)
        await settle()
        assert len(folded(peer)["runsById"]) == 3
        await me.runs.clear()
        late = await connect(test, label="late")
        await test.advance(1)
        assert folded(peer)["runsById"] == folded(late)["runsById"] == {}
        assert tree_of(test).streams._open == {}
