"""Frames of runs on the wire: what a client of either generation knows each of them by."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio

from culet.kernel import Chunk, Turn
from kernel.agents import settle
from kernel.peers import connect
from kernel.toolkit import (
    Kid,
    again,
    ask,
    folded,
    forget,
    kinds,
    opened,
    run_frames,
    say,
    top,
)

CALL = "call-1"


@pytest.fixture(autouse=True)
def fresh() -> None:
    forget()


class Climber(Kid):
    """Says a word, tells how far it is, reaches something; again, after a while."""

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        done = sum(c["type"] == "text-delta" for c in turn.chunks())
        for step in range(done, 3):
            yield say(f"{step} ")
            await self.report_progress(fraction=step / 3, message="same")
            await self.report_progress(milestone="same")
            await trio.sleep(1)
        if turn.input == "fail":
            raise ValueError("lost")


def older(frame: dict[str, Any]) -> Any:
    """What the older published hook knows a frame by."""
    call = frame.get("parentToolCallId") or ""
    return call, frame["event"]["runId"], frame["sequence"]


def current(frame: dict[str, Any]) -> Any:
    """What the current one knows it by: lifecycle by content, reports by their own id."""
    event = frame["event"]
    identity: Any = ("event", json.dumps(event))
    if event["kind"] == "chunk":
        body = json.loads(event["body"])
        identity = "sequence", frame["sequence"]
        if body["type"] == "data-agent-progress":
            identity = "progress", body["id"]
        if body["type"] == "data-agent-milestone":
            identity = "milestone", body["data"]["sequence"]
    return frame.get("parentToolCallId") or "", event["runId"], identity


@pytest.mark.rule("W-205", "W-203")
@pytest.mark.parametrize("known_by", [older, current])
async def test_a_frame_is_the_same_to_a_client_live_and_replayed_and_no_other_is(
    known_by: Any, clock: object
) -> None:
    async with opened(Climber) as test:
        me = await top(test)
        live = await connect(test)
        async with trio.open_nursery() as nursery:
            for run_id in ("a", "b"):
                ask(nursery, me, Climber, "", run_id=run_id, parent_tool_call_id=CALL)
            ask(nursery, me, Climber, "fail", run_id="c")
            await test.advance(1.5)
            middle = await connect(test, label="middle")
        await me.durable()
        await settle()
        before = run_frames(live)
        me = await again(test)
        late = await connect(test, label="late")
        await me.durable()
        await settle()
        told = {known_by(f): f["event"] for f in before}
        assert len(before) == len(told) == 3 * (1 + 9 + 1)
        for client in (middle, late):
            found = {known_by(f): f["event"] for f in run_frames(client)}
            assert found == told
            assert len(run_frames(client)) == len(told)


@pytest.mark.rule("W-210")
async def test_a_start_says_when_beside_its_event_the_same_in_replay(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        live = await connect(test)
        await me.run_agent_tool(Kid, [["say", "x"]], run_id="r")
        await me.durable()
        late = await connect(test, label="late")
        await settle()
        for client in (live, late):
            first, *rest = run_frames(client)
            assert first["startedAt"] == me.runs.get("r").started_at
            assert "startedAt" not in first["event"]
            assert not any("startedAt" in f for f in rest)


@pytest.mark.rule("W-212")
async def test_what_is_cleared_is_told_once_and_a_client_of_old_reads_nothing_from_it(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        live = await connect(test)
        await me.run_agent_tool(
            Kid, [["say", "x"]], run_id="r", parent_tool_call_id=CALL
        )
        await me.runs.clear()
        await me.durable()
        await settle()
        found = [f for f in run_frames(live) if f["event"]["kind"] == "cleared"]
        assert found == [
            {"type": "agent-tool-event", "parentToolCallId": CALL, "sequence": 3,
             "event": {"kind": "cleared", "runIds": ["r"]}}
        ]  # fmt: skip
        assert folded(live)["runsById"] == {}
        late = await connect(test, label="late")
        await settle()
        assert run_frames(late) == []


@pytest.mark.rule("W-216", "W-217")
async def test_a_run_begins_with_what_its_clients_need_to_open_its_agent(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        live = await connect(test)
        await me.run_agent_tool(Kid, [["say", "x"]], run_id="r", display_order=2)
        await me.durable()
        await settle()
        first = run_frames(live)[0]
        assert kinds(run_frames(live))[0] == (0, "started")
        assert (first["event"]["agentType"], first["event"]["order"]) == ("Kid", 2)
        inside = await connect(
            test, ("Top", "a"), (first["event"]["agentType"], first["event"]["runId"]),
            label="inside",
        )  # fmt: skip
        assert inside.closed is None
