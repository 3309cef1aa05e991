"""The fifteen golden traces of agent-tool runs, each from its first word to its last.

What happens is written down in one list: rows as they are committed, frames as a client
gets them, hooks as they are called. So the order between them is part of each trace.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, Self

import pytest
import trio

from culet.kernel import AgentToolRun, CancelToken, Chunk, Detached, Turn
from culet.kernel.ports import Gate
from kernel.agents import rows, settle, tree_of
from kernel.peers import RecordingPeer, connect
from kernel.toolkit import (  # fmt: skip
    TURNS,
    Kid,
    Top,
    ask,
    folded,
    forget,
    frames,
    kinds,
    opened,
    run_frames,
    say,
    top,
)

LOG: list[Any] = []


@pytest.fixture(autouse=True)
def fresh() -> None:
    forget()
    LOG.clear()


class _Out(list[Any]):
    """What a client gets, written down as it comes."""

    def __iadd__(self, texts: Any) -> Self:
        for text in texts:
            frame = json.loads(text) if str(text).startswith("{") else {}
            if frame.get("type") == "agent-tool-event":
                replayed = " replay" if frame.get("replay") else ""
                LOG.append(f"{frame['event']['kind']}[{frame['sequence']}]{replayed}")
        self.extend(texts)
        return self


class Logged(RecordingPeer):
    def __init__(self, gate: Gate) -> None:
        super().__init__(gate)
        self.out = _Out()


class Boss(Top):
    async def on_agent_tool_start(self, run: AgentToolRun) -> None:
        LOG.append("start hook")

    async def on_agent_tool_finish(self, run: AgentToolRun) -> None:
        LOG.append(f"finish hook {run.status}")

    async def delivered(self, run: AgentToolRun) -> None:
        LOG.append(f"callback {run.status}")


class Capped(Boss):
    max_concurrent_agent_tools = 1


class NeverStarts(Kid):
    async def on_start(self) -> None:
        raise ValueError("no")


class Reports(Kid):
    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        yield say("a")
        await self.report_progress(fraction=0.5)
        await self.report_progress(milestone="half")


def listen(test: Any) -> None:
    """Write down each row as it is committed, and each turn as it begins."""
    kernel = test.kernel
    kernel.subscribe("run:start", lambda *_: LOG.append("row running"))
    kernel.subscribe("run:end", lambda _c, _t, _s, end: LOG.append(f"row {end.status}"))
    kernel.subscribe("turn:begin", lambda _c, _t, s, n: LOG.append(f"turn {s.id} {n}"))


async def begin(test: Any, root: type[Boss] = Boss) -> tuple[Any, RecordingPeer]:
    me = await top(test, root)
    listen(test)
    return me, await connect(test, (root.__name__, "a"), peer=Logged)


SLOW = [["say", "1"], ["say", "2"], ["sleep", 5], ["say", "3"]]


@pytest.mark.rule("T-062")
async def test_trace_1_live(clock: object) -> None:
    async with opened(root=Boss) as test:
        me, _peer = await begin(test)
        script = [["say", "1"], ["say", "2"], ["say", "3"]]
        await me.run_agent_tool(Kid, script, run_id="r")
        LOG.append("return")
        await me.durable()
        await settle()
        assert LOG[:4] == ["row running", "start hook", "started[0]", "turn r 1"]
        order = [LOG.index(one) for one in (
            "chunk[1]", "chunk[2]", "chunk[3]", "finished[4]", "finish hook completed",
        )]  # fmt: skip
        assert order == sorted(order)
        assert LOG.index("row completed") < LOG.index("finished[4]")
        assert LOG.index("row completed") < LOG.index("return")
        assert len(LOG) == 11


@pytest.mark.rule("T-103")
async def test_trace_2_the_same_id_again(clock: object) -> None:
    async with opened(root=Boss) as test:
        me, _peer = await begin(test)
        run = await me.run_agent_tool(Kid, [["say", "x"]], run_id="r")
        await me.durable()
        await settle()
        LOG.clear()
        assert await me.run_agent_tool(Kid, [["say", "x"]], run_id="r") == run
        await test.advance(5)
        assert LOG == []


@pytest.mark.rule("T-253", "T-254", "T-255")
async def test_trace_3_refused(clock: object) -> None:
    async with opened(root=Capped) as test:
        me, peer = await begin(test, Capped)
        await me.run_agent_tool(Kid, [["sleep", 9]], run_id="first", detached=True)
        await test.advance(1)
        LOG.clear()
        run = await me.run_agent_tool(Kid, [["say", "x"]], run_id="second")
        assert (run.run_id, run.status, run.reason) == ("second", "error", "capacity")
        await settle()
        assert sorted(LOG) == ["error[1]", "finish hook error", "started[0]"]
        assert run_frames(peer, "second") == [], "under an id that is never stored"
        await test.advance(10)
        run = await me.run_agent_tool(Kid, [["say", "x"]], run_id="second")
        assert run.status == "completed"


@pytest.mark.rule("T-042", "T-054")
async def test_trace_4_cancelled_in_the_middle(clock: object) -> None:
    async with opened(root=Boss) as test:
        me, peer = await begin(test)
        token = CancelToken()
        async with trio.open_nursery() as nursery:
            results = ask(nursery, me, Kid, SLOW, run_id="r", cancel=token)
            await test.advance(1)
            assert LOG[-1] == "chunk[2]"
            LOG.clear()
            token.cancel("enough")
        await settle()
        assert LOG == ["row aborted", "aborted[3]", "finish hook aborted"]
        assert run_frames(peer)[-1]["event"]["reason"] == "enough"
        assert (results[0].status, results[0].reason) == ("aborted", "enough")
        await test.advance(20)
        assert kinds(await frames(me, "r"))[-1] == (3, "aborted")


@pytest.mark.rule("T-041", "T-052")
async def test_trace_5_cancelled_before_it_begins(clock: object) -> None:
    async with opened(root=Boss) as test:
        me, _peer = await begin(test)
        token = CancelToken()
        token.cancel("never")
        run = await me.run_agent_tool(Kid, [["say", "x"]], run_id="r", cancel=token)
        await me.durable()
        await settle()
        assert run.status == "aborted"
        assert LOG == [
            "row running", "row aborted", "start hook", "started[0]", "aborted[1]",
            "finish hook aborted",
        ]  # fmt: skip
        assert rows(tree_of(test, "Boss"), "SELECT count(*) FROM node") == [(1,)]


@pytest.mark.rule("T-008")
async def test_trace_6_a_start_that_raises(clock: object) -> None:
    async with opened(NeverStarts, root=Boss) as test:
        me, _peer = await begin(test)
        run = await me.run_agent_tool(NeverStarts, 1, run_id="r")
        await me.durable()
        await settle()
        assert (run.status, run.reason) == ("error", "start-failed")
        assert LOG == [
            "row running", "start hook", "started[0]", "row error", "error[1]",
            "finish hook error",
        ]  # fmt: skip
        assert me.runs.list(status="running") == []


@pytest.mark.rule("T-077", "T-106")
async def test_trace_7_the_facet_alone_begins_again(clock: object) -> None:
    async with opened(root=Boss) as test:
        me, _peer = await begin(test)
        async with trio.open_nursery() as nursery:
            results = ask(nursery, me, Kid, SLOW, run_id="r")
            await test.advance(1)
            LOG.clear()
            await me.dynamic_agents.abort(Kid, "r", "restart")
        await me.durable()
        await settle()
        assert results[0].status == "completed"
        assert LOG == [
            "turn r 2", "row completed", "chunk[3]", "chunk[4]", "finished[5]",
            "finish hook completed",
        ]  # fmt: skip


@pytest.mark.rule("T-106", "T-115", "T-135")
async def test_trace_8_the_parent_is_killed(clock: object) -> None:
    async with opened(root=Boss) as test:
        me, old = await begin(test)
        await me.run_agent_tool(Kid, SLOW, run_id="r", detached=True)
        await test.advance(1)
        await test.crash()
        await test.reopen()
        listen(test)
        LOG.clear()
        me = await top(test, Boss)
        new = await connect(test, ("Boss", "a"), peer=Logged)
        await test.advance(10)
        assert LOG == [
            "started[0] replay", "chunk[1] replay", "chunk[2] replay", "turn r 2",
            "row completed", "chunk[3]", "chunk[4]", "finished[5]",
            "finish hook completed",
        ]  # fmt: skip
        last = await connect(test, ("Boss", "a"), label="last")
        await me.durable()  # its replay waits for what is under way
        await settle()
        assert [f["sequence"] for f in run_frames(last)] == list(range(6))
        assert all(f["replay"] for f in run_frames(last))
        assert folded(old, new) == folded(last)


@pytest.mark.rule("T-112", "T-104")
async def test_trace_9_silence_is_told_to_one_waiter(clock: object) -> None:
    async with opened(root=Boss) as test:
        me, _peer = await begin(test)
        script = [["say", "1"], ["say", "2"], ["sleep", 300], ["say", "3"]]
        await me.run_agent_tool(Kid, script, run_id="r", detached=True)
        await test.advance(1)
        await test.crash()
        await test.reopen()
        me = await top(test, Boss)
        listen(test)
        await connect(test, ("Boss", "a"), peer=Logged)
        await test.advance(1)
        LOG.clear()
        run = await me.run_agent_tool(Kid, script, run_id="r")
        assert (run.status, run.reason) == ("running", "no-progress")
        assert LOG == [], "no frame, no row, no hook"
        assert me.runs.get("r").reason is None
        later = await me.run_agent_tool(Kid, script, run_id="r", no_progress_s=999)
        assert later.status == "completed"
        await me.durable()
        await settle()
        assert LOG == [
            "row completed", "chunk[3]", "chunk[4]", "finished[5]",
            "finish hook completed",
        ]  # fmt: skip


@pytest.mark.rule("T-164", "T-185")
async def test_trace_10_detached(clock: object) -> None:
    async with opened(root=Boss) as test:
        me, _peer = await begin(test)
        policy = Detached(on_finish="delivered")
        handle = await me.run_agent_tool(
            Kid, [["say", "1"], ["sleep", 5]], run_id="r", detached=policy
        )
        assert handle.status == "running"
        LOG.append("return")
        await test.advance(10)
        assert LOG[0] == "row running"
        assert sorted(LOG[1:3]) == ["return", "start hook"]
        end = LOG.index("row completed")
        assert LOG.index("chunk[1]") < end < LOG.index("finished[3]")
        told = [one for one in LOG if one.startswith(("finish hook", "callback"))]
        assert sorted(told) == ["callback completed", "finish hook completed"]
        await test.advance(3000)
        assert len([one for one in LOG if one.startswith("callback")]) == 1


@pytest.mark.rule("T-178")
async def test_trace_11_a_budget_that_is_over(clock: object) -> None:
    async with opened(root=Boss) as test:
        me, peer = await begin(test)
        policy = Detached(on_finish="delivered", max_budget_s=3)
        await me.run_agent_tool(Kid, [["sleep", 99]], run_id="r", detached=policy)
        await test.advance(2)
        LOG.clear()
        await test.advance(20)
        assert LOG[:2] == ["row interrupted", "interrupted[1]"]
        assert sorted(LOG[2:]) == ["callback interrupted", "finish hook interrupted"]
        assert run_frames(peer)[-1]["event"]["reason"] == "budget-exceeded"
        await test.advance(3000)
        assert len(LOG) == 4
        policy = Detached(on_finish="delivered", max_budget_s=3)
        await me.run_agent_tool(Kid, [["sleep", 1]], run_id="s", detached=policy)
        await test.advance(20)
        assert me.runs.get("s").status == "completed"
        assert LOG.count("callback completed") == 1


@pytest.mark.rule("T-266", "T-268", "T-270")
async def test_trace_12_cleared_while_it_goes_on(clock: object) -> None:
    async with opened(root=Boss) as test:
        me, _peer = await begin(test)
        async with trio.open_nursery() as nursery:
            results = ask(nursery, me, Kid, SLOW, run_id="r")
            await test.advance(1)
            LOG.clear()
            await me.runs.clear()
            await settle()
        assert (results[0].status, results[0].reason) == ("aborted", "cleared")
        await test.advance(1)
        assert LOG == ["row aborted", "aborted[3]", "cleared[4]", "finish hook aborted"]
        tree = tree_of(test, "Boss")
        assert rows(tree, "SELECT count(*) FROM node") == [(1,)]
        assert me.runs.list() == []


@pytest.mark.rule("T-068", "T-216", "T-293", "T-294")
async def test_trace_13_progress(clock: object) -> None:
    async with opened(Reports, root=Boss) as test:
        me, peer = await begin(test)
        await me.run_agent_tool(Reports, 1, run_id="r")
        await me.durable()
        late = await connect(test, ("Boss", "a"), label="late")
        await me.durable()  # its replay waits for what is under way
        await settle()
        for client in (peer, late):
            run = folded(client)["runsById"]["r"]
            assert run["progress"]["milestone"] == "half"
            assert run["milestones"][0]["name"] == "half"
        numbered = [
            {f["sequence"]: json.loads(f["event"]["body"])["type"]
             for f in run_frames(client) if f["event"]["kind"] == "chunk"}
            for client in (peer, late)
        ]  # fmt: skip
        assert numbered[0] == numbered[1] == {
            1: "text-delta", 2: "data-agent-progress", 3: "data-agent-milestone",
        }  # fmt: skip


@pytest.mark.rule("T-065", "T-229", "T-230")
async def test_trace_14_a_client_that_comes_in_the_middle(clock: object) -> None:
    async with opened(root=Boss) as test:
        me = await top(test, Boss)
        async with trio.open_nursery() as nursery:
            ask(nursery, me, Kid, SLOW, run_id="r")
            await test.advance(1)
            LOG.clear()
            await connect(test, ("Boss", "a"), peer=Logged)
            assert LOG == ["started[0] replay", "chunk[1] replay", "chunk[2] replay"]
            LOG.clear()
        await me.durable()
        await settle()
        assert [one for one in LOG if "[" in one] == [
            "chunk[3]",
            "chunk[4]",
            "finished[5]",
        ]


@pytest.mark.rule("T-261", "T-264")
async def test_trace_15_three_levels(clock: object) -> None:
    script = [["run", "m", [["run", "l", [["sleep", 3], ["say", "deep"]]]]]]
    async with opened(root=Boss) as test:
        me, peer = await begin(test)
        await me.run_agent_tool(Kid, script, run_id="t", detached=True)
        await test.advance(1)
        assert {f["event"]["runId"] for f in run_frames(peer)} == {"t"}
        await test.crash()
        await test.reopen()
        me = await top(test, Boss)
        late = await connect(test, ("Boss", "a"))
        await test.advance(20)
        tree = tree_of(test, "Boss")
        found = rows(tree, "SELECT id, status FROM run ORDER BY born")
        assert found == [(one, "completed") for one in ("t", "m", "l")]
        assert {f["event"]["runId"] for f in run_frames(late)} == {"t"}
        assert TURNS == {"t": 2, "m": 2, "l": 2}, "one turn each, taken up once"
        assert sum(one.startswith("finish hook") for one in LOG) == 1, (
            "of the top alone"
        )


def test_the_traces_are_all_here() -> None:
    names = sorted(
        int(name.split("_")[2]) for name in globals() if name.startswith("test_trace_")
    )
    assert names == list(range(1, 16))
