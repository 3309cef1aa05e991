"""Following a run: numbers that never change, readers that hold up nobody."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
import trio

from culet.kernel import Chunk, Turn
from culet.kernel.errors import NotFound
from kernel.agents import settle, tree_of
from kernel.peers import RecordingPeer, connect
from kernel.toolkit import (
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


class Reports(Kid):
    """Words, progress and a milestone in turn, a second each."""

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        for number in range(len(turn.chunks()) // 3, 3):
            yield say(str(number))
            await self.report_progress(fraction=number / 3, message=f"at {number}")
            await self.report_progress(milestone=f"m{number}")
            await trio.sleep(1)


class Breaks(RecordingPeer):
    """A client that fails at the first frame of a run that it is given."""

    def push(self, blob: Any, stamp: int) -> None:
        if any("agent-tool-event" in text for text in blob.texts):
            assert self.connection is not None
            self.connection.closed(1006, "", was_clean=False)
            return
        super().push(blob, stamp)


@pytest.mark.rule("T-067", "T-080")
async def test_numbers_advance_with_nobody_watching(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        script = [["say", "a"], ["sleep", 1], ["say", "b"]]
        async with trio.open_nursery() as nursery:
            ask(nursery, me, Kid, script, run_id="r")
            await test.advance(0.5)
            late = await connect(test)
        await me.durable()
        assert me.runs.get("r").n == 3
        assert [f["sequence"] for f in run_frames(late)] == [0, 1, 2, 3, 4]


@pytest.mark.rule("T-068", "T-068a", "T-216", "T-070", "W-202", "W-206")
async def test_progress_has_its_number_like_any_word_live_replayed_and_after_a_crash(
    clock: object,
) -> None:
    async with opened(Reports) as test:
        me = await top(test)
        live = await connect(test)
        await me.run_agent_tool(Reports, 1, run_id="r", detached=True)
        await test.advance(1.5)
        seen = {f["sequence"]: f["event"] for f in run_frames(live)}
        assert len(seen) == 7
        me = await again(test)
        late = await connect(test, label="late")
        await test.advance(9)
        found = await frames(me, "r")
        assert [f["sequence"] for f in found] == list(range(11))
        for client in (live, late):
            numbers = [f["sequence"] for f in run_frames(client)]
            assert numbers == sorted(set(numbers)), "it never goes back"
            for frame in run_frames(client):
                assert found[frame["sequence"]]["event"] == frame["event"]
        types = [json.loads(f["event"]["body"])["type"] for f in found[1:-1]]
        assert (
            types == ["text-delta", "data-agent-progress", "data-agent-milestone"] * 3
        )
        names = [m["name"] for m in folded(late)["runsById"]["r"]["milestones"]]
        assert names == ["m0", "m1", "m2"]


@pytest.mark.rule("T-070")
async def test_reading_what_is_over_or_unknown_leaves_nothing_open(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        await me.run_agent_tool(Kid, [["say", "x"]], run_id="r")
        found = await frames(me, "r")
        assert kinds(found) == [(0, "started"), (1, "chunk"), (2, "finished")]
        with pytest.raises(NotFound):
            await frames(me, "unknown")
        await settle()
        assert tree_of(test).streams._open == {}


@pytest.mark.rule("T-071", "T-072", "T-079")
async def test_several_clients_get_all_in_order_though_one_fails(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        broken = await connect(test, label="broken", peer=Breaks)
        others = [await connect(test, label=f"c{n}") for n in range(3)]
        script = [step for i in range(3) for step in (["say", str(i)], ["sleep", 1])]
        async with trio.open_nursery() as nursery:
            for run_id in ("r", "s"):
                ask(nursery, me, Kid, script, run_id=run_id)
        await me.durable()
        assert me.runs.get("r").status == me.runs.get("s").status == "completed"
        assert run_frames(broken) == []
        for peer in others:
            for run_id in ("r", "s"):
                numbers = [f["sequence"] for f in run_frames(peer, run_id)]
                assert numbers == list(range(8))


@pytest.mark.rule("T-082", "T-072")
async def test_a_reader_that_stops_in_the_middle_leaves_nothing(
    clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened() as test:
        me = await top(test)
        async with trio.open_nursery() as nursery:
            ask(nursery, me, Kid, [["say", "a"], ["sleep", 5]], run_id="r")
            await test.advance(1)
            async with aclosing(me.runs.replay("r")) as reader:
                async for _frame in reader:
                    break
            with trio.move_on_after(1):
                await me.run_agent_tool(Kid, [], run_id="r", no_progress_s=9)
        await me.durable()
        tree = tree_of(test)
        assert (tree.streams._open, tree.endings.waiters) == ({}, {})
        assert not [r for r in caplog.records if r.levelname == "ERROR"]
