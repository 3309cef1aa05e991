"""What a client gets that comes late, comes again, or reads what others still write."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio

from culet.kernel import Chunk, ConnectContext, Connection, Turn
from culet.kernel.errors import StorageCorrupt, UsageError
from kernel.agents import rows, settle, tree_of
from kernel.peers import RecordingPeer, connect, frames_of
from kernel.toolkit import (
    TURNS,
    Frail,
    Kid,
    Top,
    again,
    ask,
    folded,
    frames,
    kinds,
    opened,
    run_frames,
    top,
)


class Choosy(Top):
    """Says of each client whether it hears of runs."""

    def should_send_protocol_messages(
        self, connection: Connection, ctx: ConnectContext
    ) -> bool:
        return bool(ctx.identity != "raw")


@pytest.mark.rule("T-226", "T-235", "W-208")
async def test_runs_are_replayed_in_the_order_of_their_start_to_that_client_only(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        first = await connect(test)
        for run_id in ("z", "a", "m"):
            await me.run_agent_tool(Kid, [["say", run_id]], run_id=run_id)
            await test.advance(1)
        await me.durable()
        had = len(run_frames(first))
        late = await connect(test, label="late")
        await me.durable()  # its replay waits for what is under way
        await settle()
        found = run_frames(late)
        assert all(frame.get("replay") for frame in found)
        assert [f["event"]["runId"] for f in found if f["sequence"] == 0] == [
            "z", "a", "m",
        ]  # fmt: skip
        assert len(run_frames(first)) == had
        assert folded(first) == folded(late)


@pytest.mark.rule("T-227", "T-129")
async def test_a_run_whose_file_is_damaged_does_not_stop_the_others(
    clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened() as test:
        me = await top(test)
        for run_id in ("r0", "bad", "r2"):
            await me.run_agent_tool(Kid, [["say", "x"]], run_id=run_id)
        await me.durable()
        tree = tree_of(test)
        [(slot,)] = rows(tree, "SELECT child FROM run WHERE id = 'bad'")
        await test.evict([("Top", "a"), ("Kid", "bad")])
        damaged = tree.store.agent(slot)
        assert damaged.exists

        def read(sql: str, params: Any = ()) -> Any:
            raise StorageCorrupt("malformed")

        monkeypatch.setattr(damaged, "execute", read)
        monkeypatch.setattr(tree.store, "agent", lambda _slot, real=tree.store.agent: (
            damaged if _slot == slot else real(_slot)
        ))  # fmt: skip
        told: list[Any] = []
        test.kernel.subscribe("failure", lambda _c, _t, _s, told_: told.append(told_))
        late = await connect(test, label="late")
        await settle()
        for run_id in ("r0", "r2"):
            assert kinds(run_frames(late, run_id)) == [
                (0, "started"), (1, "chunk"), (2, "finished"),
            ]  # fmt: skip
        assert [(one.what, one.name) for one in told] == [("replay", "bad")]
        assert me.runs.get("bad").status == "completed"


@pytest.mark.rule("T-228")
async def test_why_a_run_was_interrupted_is_replayed_as_it_was_told(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        peer = await connect(test)
        await me.run_agent_tool(Kid, [["sleep", 9]], run_id="gone", detached=True)
        await me.run_agent_tool(Frail, [["sleep", 9]], run_id="cut", detached=True)
        await test.advance(1)
        await me.dynamic_agents.delete(Kid, "gone")
        await me.durable()
        live = run_frames(peer, "gone")[-1]["event"]
        me = await again(test)
        await test.advance(1)
        late = await connect(test, label="late")
        await me.durable()  # its replay waits for what is under way
        await settle()
        ends = {f["event"]["runId"]: f["event"] for f in run_frames(late)}
        assert ends["gone"] == live
        assert (ends["gone"]["kind"], ends["gone"]["reason"]) == (
            "interrupted",
            "deleted",
        )
        assert ends["cut"]["reason"] == "not-resumable"
        assert "childStillRunning" not in ends["cut"]


@pytest.mark.rule("T-236")
async def test_a_replay_after_the_last_frame_is_empty_also_when_its_facet_is_wiped(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        await me.run_agent_tool(Kid, [["say", "a"], ["say", "b"]], run_id="r")
        assert kinds(await frames(me, "r", 2)) == [(3, "finished")]
        assert [await frames(me, "r", after) for after in (3, 4)] == [[], []]
        await me.dynamic_agents.delete(Kid, "r")
        await test.advance(1)
        assert kinds(await frames(me, "r", 0)) == [(3, "finished")]
        assert await frames(me, "r", 3) == []


@pytest.mark.rule("T-231")
async def test_a_replay_wakes_no_facet(clock: object) -> None:
    class HangsLater(Kid):
        async def on_start(self) -> None:
            if TURNS["r"]:
                await trio.sleep_forever()

    async with opened(HangsLater) as test:
        me = await top(test)
        await me.run_agent_tool(HangsLater, [["say", "x"]], run_id="r")
        await me.durable()
        await test.evict([("Top", "a"), ("HangsLater", "r")])
        began = trio.current_time()
        late = await connect(test, label="late")
        assert trio.current_time() == began
        assert kinds(run_frames(late))[-1] == (2, "finished")
        assert test.find([("Top", "a"), ("HangsLater", "r")]) is None


@pytest.mark.rule("T-233", "W-215")
async def test_who_declined_hears_of_no_run_live_or_replayed(clock: object) -> None:
    async with opened(root=Choosy) as test:
        me = await top(test, Choosy)
        await me.run_agent_tool(Kid, [["say", "x"]], run_id="before")
        raw = await connect(test, ("Choosy", "a"), label="raw", identity="raw")
        await me.run_agent_tool(Kid, [["say", "x"]], run_id="live")
        type(me).max_concurrent_agent_tools = 0
        try:
            await me.run_agent_tool(Kid, [], run_id="refused")
        finally:
            type(me).max_concurrent_agent_tools = None
        await me.runs.clear()
        await me.durable()
        assert raw.out == []


@pytest.mark.rule("T-234", "W-214")
async def test_clients_of_a_facet_get_no_frames_of_its_parent(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        async with trio.open_nursery() as nursery:
            ask(nursery, me, Kid, [["say", "x"], ["sleep", 5]], run_id="r")
            await test.advance(1)
            inside = await connect(test, ("Top", "a"), ("Kid", "r"), label="inside")
            ask(nursery, me, Kid, [["say", "y"]], run_id="s")
        await me.durable()
        assert run_frames(inside) == []
        assert not [t for t in inside.out if "agent-tool-event" in str(t)]
        assert frames_of(inside, "cf_agent_identity")[0]["name"] == "r"


@pytest.mark.rule("T-236", "W-209")
async def test_the_same_client_after_a_reconnect_has_nothing_twice(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        script = [step for i in range(4) for step in (["say", str(i)], ["sleep", 1])]
        async with trio.open_nursery() as nursery:
            ask(nursery, me, Kid, script, run_id="r")
            lives = []
            for number in range(3):
                peer = await connect(test, label=f"c{number}")
                lives.append(peer)
                await test.advance(1.5)
                assert peer.connection is not None
                peer.connection.closed(1006, "", was_clean=False)
        lives.append(await connect(test, label="last"))
        await me.durable()
        fresh_one = await connect(test, label="fresh")
        await me.durable()  # its replay waits for what is under way
        await settle()
        assert folded(*lives) == folded(fresh_one)
        parts = folded(*lives)["runsById"]["r"]["parts"]
        assert "".join(p["text"] for p in parts) == "0sleep1sleep2sleep3sleep"


@pytest.mark.rule("T-238")
async def test_a_replay_to_a_socket_that_closes_ends_quietly(
    clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened() as test:
        me = await top(test)
        for number in range(5):
            await me.run_agent_tool(Kid, [["say", "x" * 50_000]], run_id=f"r{number}")
        await me.durable()
        peer = await connect(test)
        assert peer.connection is not None
        for cursor in tree_of(test).runs.cursors(me._node.slot, {})[0]:
            peer.connection.follow(cursor)
            peer.connection.closed(1006, "", was_clean=False)
            assert peer.connection.pull() is None
        await settle()
        assert not caplog.records
        assert all(not s.views[0].peers for s in tree_of(test).streams._open.values())


@pytest.mark.rule("T-063", "T-064", "T-310", "W-238")
async def test_chunks_are_sent_one_by_one_as_they_were_said(clock: object) -> None:
    odd = [
        {"type": "text-delta", "id": "t", "delta": 'quotes " and \\ and \u2028 and 🦉'},
        {"type": "data-x", "data": {"deep": [1, None, {"é": 1.5}]}},
        {"type": "tool-input-start", "toolCallId": "c", "toolName": "t", "extra": True},
    ]

    class Odd(Kid):
        async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
            for chunk in odd:
                yield chunk
                await trio.sleep(1)

    async with opened(Odd) as test:
        me = await top(test)
        peer = await connect(test)
        async with trio.open_nursery() as nursery:
            for run_id in ("r", "s"):
                ask(nursery, me, Odd, 1, run_id=run_id, parent_tool_call_id="call")
        await me.durable()
        for run_id in ("r", "s"):
            found = run_frames(peer, run_id)
            assert [f["sequence"] for f in found] == [0, 1, 2, 3, 4]
            assert [json.loads(f["event"]["body"]) for f in found[1:-1]] == odd
            assert {f["parentToolCallId"] for f in found} == {"call"}


class Later(RecordingPeer):
    """Pulls only when the test does."""

    def wake(self) -> None:
        pass


async def test_a_replay_of_many_files_lets_others_in_between(
    clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened() as test:
        me = await top(test)
        for number in range(6):
            await me.run_agent_tool(Kid, [["say", "x"]], run_id=f"r{number}")
        await me.durable()
        late = await connect(test, label="late", peer=Later)
        now = 0

        def slowly() -> int:
            nonlocal now
            now += 6_000_000  # ns that it takes to open one file
            return now

        monkeypatch.setattr(test.kernel.clock, "stopwatch_ns", slowly)
        pages = 0
        told: list[str] = []
        assert late.connection is not None
        while late.connection.behind:
            page = late.connection.pull()
            assert page is not None
            pages += 1
            told += page.texts
        starts = [f for f in map(json.loads, told) if f.get("sequence") == 0]
        assert [f["event"]["runId"] for f in starts] == [f"r{n}" for n in range(6)]
        assert pages == 3, "two files fit into limits.pass_s"


async def test_who_has_just_heard_that_a_run_ended_finds_its_end(clock: object) -> None:
    """What the agent has not made durable yet included: all of it, and in order."""
    async with opened() as test:
        me = await top(test)
        script = [["say", "one"], ["say", "two"]]
        for run_id in ("a", "b", "c"):
            run = await me.run_agent_tool(Kid, script, run_id=run_id)
            assert run.status == "completed"
            found = [frame async for frame in me.runs.replay(run_id)]
            assert kinds(found) == [
                (0, "started"), (1, "chunk"), (2, "chunk"), (3, "finished"),
            ]  # fmt: skip


@pytest.mark.parametrize("instant", [float("nan"), float("inf"), "yesterday", True])
async def test_a_clear_of_what_is_older_than_no_instant_clears_nothing(
    instant: Any, clock: object
) -> None:
    async with opened() as test:
        me = await top(test)
        await me.run_agent_tool(Kid, [["say", "x"]], run_id="r")
        with pytest.raises(UsageError, match="older_than is an instant"):
            await me.runs.clear(older_than=instant)
        assert [run.run_id for run in me.runs.list()] == ["r"]
