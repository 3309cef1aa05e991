"""What a parent's hooks hear of its runs, when, and that they hold up nobody."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio

from culet.kernel import AgentToolRun, Chunk, Turn, current_agent
from kernel.agents import settle
from kernel.peers import connect
from kernel.toolkit import (
    HEARD,
    Kid,
    Top,
    again,
    forget,
    kinds,
    opened,
    run_frames,
    say,
    top,
)


class Capped(Top):
    max_concurrent_agent_tools = 0


@pytest.mark.rule("T-277", "T-254")
async def test_the_first_hook_tells_of_runs_the_last_of_refusals_too(
    clock: object,
) -> None:
    async with opened(root=Capped) as test:
        me = await top(test, Capped)
        refused = await me.run_agent_tool(Kid, [["say", "x"]], run_id="r")
        assert (refused.status, refused.reason) == ("error", "capacity")
        await settle()
        assert HEARD == [("finish", "a", "r", "error")], "metered, never started"
        forget()
        type(me).max_concurrent_agent_tools = None
        try:
            await me.run_agent_tool(Kid, [["say", "x"]], run_id="r")
            await me.run_agent_tool(Kid, [["say", "x"]], run_id="r")
        finally:
            type(me).max_concurrent_agent_tools = 0
        await settle()
        assert HEARD == [("start", "a", "r"), ("finish", "a", "r", "completed")]


@pytest.mark.rule("T-281")
async def test_hooks_are_called_inside_the_parent(clock: object) -> None:
    class Inside(Top):
        async def on_agent_tool_start(self, run: AgentToolRun) -> None:
            here = current_agent()
            assert here is not None
            HEARD.append(("start", here.agent is self))

        async def on_agent_tool_finish(self, run: AgentToolRun) -> None:
            here = current_agent()
            assert here is not None
            HEARD.append(("finish", here.agent is self))
            self.set_state({"ended": run.run_id})

    async with opened(root=Inside) as test:
        me = await top(test, Inside)
        await me.run_agent_tool(Kid, [["say", "x"]], run_id="r")
        await settle()
        assert HEARD == [("start", True), ("finish", True)]
        assert me.state == {"ended": "r"}


@pytest.mark.rule("T-282")
async def test_a_slow_hook_holds_up_neither_the_caller_nor_another(
    clock: object,
) -> None:
    class Slow(Top):
        async def on_agent_tool_finish(self, run: AgentToolRun) -> None:
            if run.run_id == "slow":
                await trio.sleep(20)
            HEARD.append(run.run_id)  # type: ignore[arg-type]

    async with opened(root=Slow) as test:
        me = await top(test, Slow)
        began = trio.current_time()
        await me.run_agent_tool(Kid, [["say", "x"]], run_id="slow")
        await me.run_agent_tool(Kid, [["say", "x"]], run_id="quick")
        assert trio.current_time() - began < 1
        await test.advance(30)
        assert [h for h in HEARD if isinstance(h, str)] == ["quick", "slow"]


@pytest.mark.rule("T-283")
async def test_what_a_turn_has_used_is_in_the_record(clock: object) -> None:
    class Spends(Kid):
        async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
            yield say("x")
            turn.usage = {"input_tokens": 7, "cost": 0.25}

    records: list[AgentToolRun] = []

    class Meters(Top):
        async def on_agent_tool_finish(self, run: AgentToolRun) -> None:
            records.append(run)

    async with opened(Spends, root=Meters) as test:
        me = await top(test, Meters)
        run = await me.run_agent_tool(Spends, 1, run_id="r")
        await settle()
        assert run.usage == {"input_tokens": 7, "cost": 0.25}
        assert records == [run] == me.runs.list()


@pytest.mark.rule("T-284", "T-278")
async def test_the_last_hook_comes_after_the_row_and_the_frame(clock: object) -> None:
    seen: list[Any] = []

    class Looks(Top):
        async def on_agent_tool_finish(self, run: AgentToolRun) -> None:
            await self.durable()
            seen.append((run == self.runs.get("r"), kinds(run_frames(peer))[-1]))

    async with opened(root=Looks) as test:
        me = await top(test, Looks)
        peer = await connect(test, ("Looks", "a"))
        run = await me.run_agent_tool(Kid, [["say", "x"]], run_id="r")
        assert run.completed_at is not None
        await settle()
        assert seen == [(True, (2, "finished"))]


@pytest.mark.rule("T-133")
async def test_of_hooks_after_a_crash_one_that_raises_stops_no_other(
    clock: object,
) -> None:
    class Raises(Top):
        async def on_agent_tool_finish(self, run: AgentToolRun) -> None:
            HEARD.append((run.run_id,))
            if run.run_id == "r1":
                raise ValueError("a hook")

    async with opened(root=Raises) as test:
        me = await top(test, Raises)
        for number in range(3):
            await me.run_agent_tool(
                Kid, [["sleep", 5]], run_id=f"r{number}", detached=True
            )
        await test.advance(1)
        await test.crash()
        await test.reopen()
        await test.advance(10)
        told = [h for h in HEARD if len(h) == 1]
        assert set(told) == {("r0",), ("r1",), ("r2",)}
        me = await top(test, Raises)
        assert {run.status for run in me.runs.list()} == {"completed"}
        assert sorted(h for h in told if h != ("r1",)) == [("r0",), ("r2",)]


@pytest.mark.rule("T-134")
async def test_a_hook_that_was_owed_at_a_crash_is_called_once_after_it(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        stop = test.kernel.subscribe("run:end", lambda *_: test.faults.die_after(1))
        with trio.move_on_after(1):
            try:
                await me.run_agent_tool(Kid, [["say", "x"]], run_id="r")
            except Exception as error:
                assert test.faults.dead, error
        stop()
        me = await again(test)
        await test.advance(5)
        assert me.runs.get("r").status == "completed"
        assert HEARD.count(("finish", "a", "r", "completed")) == 1
