"""A client that comes back says what it has, and gets the rest, joined to what is live."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import pytest
import trio

from culet.kernel.core.attach import Known, known_text, noted
from culet.kernel.testing import Harness
from kernel.agents import settle
from kernel.peers import RecordingPeer, connect
from kernel.toolkit import Kid, Top, again, ask, folded, forget, opened, run_frames, top


@pytest.fixture(autouse=True)
def fresh() -> None:
    forget()


def has(*peers: RecordingPeer) -> dict[str, Known]:
    """Return what a client has that was these, one after the other."""
    known: dict[str, Known] = {}
    for peer in peers:
        for frame in run_frames(peer):
            noted(known, frame)
    return known


async def back(
    test: Harness, known: dict[str, Known], label: str = "b"
) -> RecordingPeer:
    """Connect once more, with what is known."""
    return await connect(test, query=f"_runs={quote(known_text(known))}", label=label)


def numbers(peer: RecordingPeer, run_id: str) -> list[int]:
    return [f["sequence"] for f in run_frames(peer, run_id)]


def leave(peer: RecordingPeer) -> None:
    assert peer.connection is not None
    peer.connection.closed(1001, "", was_clean=True)


@pytest.mark.rule("B-03", "T-237", "T-230", "W-211")
async def test_who_comes_back_in_mid_run_gets_the_rest_once_without_a_gap(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        first = await connect(test)
        async with trio.open_nursery() as nursery:
            program = [
                ["say", "a"],
                ["sleep", 5],
                ["say", "b"],
                ["sleep", 5],
                ["say", "c"],
            ]
            ask(nursery, me, Kid, program, run_id="r")
            await test.advance(1)
            leave(first)
            assert numbers(first, "r") == [0, 1]
            await test.advance(6)
            second = await back(test, has(first))
            await settle()
            assert numbers(second, "r") == [2, 3], "a page of what was missed"
        await me.durable()
        assert numbers(second, "r") == [2, 3, 4, 5, 6]
        whole = await connect(test, label="w")
        assert folded(first, second) == folded(whole)
        assert not any("replay" in f for f in run_frames(second, "r")[2:])


@pytest.mark.rule("B-03", "T-237", "T-231", "W-211")
async def test_of_runs_that_a_client_has_whole_nothing_is_sent(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        first = await connect(test)
        for number in range(5):
            await me.run_agent_tool(Kid, [["say", "x"]], run_id=f"r{number}")
        await me.durable()
        leave(first)
        await me.run_agent_tool(Kid, [["say", "new"]], run_id="new")
        me = await again(test)
        second = await back(test, has(first))
        await settle()
        assert {f["event"]["runId"] for f in run_frames(second)} == {"new"}
        assert numbers(second, "new") == [0, 1, 2]
        whole = await connect(test, label="w")
        assert folded(first, second) == folded(whole)
        third = await back(test, has(first, second), label="t")
        assert run_frames(third) == []


@pytest.mark.rule("B-03", "T-237", "B-17", "W-212")
async def test_what_was_cleared_meanwhile_is_told_and_what_took_its_id_begins_anew(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        first = await connect(test)
        for name in ("gone", "anew", "stays"):
            await me.run_agent_tool(Kid, [["say", "old"], ["say", "old"]], run_id=name)
        await me.durable()
        leave(first)
        await me.runs.clear()
        await test.advance(1)
        for name in ("anew", "stays"):
            await me.run_agent_tool(Kid, [["say", "x"]] * 5, run_id=name)
        second = await back(test, has(first))
        await settle()
        cleared = run_frames(second)[0]["event"]
        assert (cleared["kind"], sorted(cleared["runIds"])) == (
            "cleared", ["anew", "gone", "stays"],
        )  # fmt: skip
        assert numbers(second, "anew") == list(range(7))
        whole = await connect(test, label="w")
        assert folded(first, second) == folded(whole)


@pytest.mark.rule("T-237", "W-211")
@pytest.mark.parametrize(
    "query",
    ["", "_runs=", "_runs=nonsense", '_runs=[["r",1,1]', "_runs=[[1,2,3]]", "other=1"],
)
async def test_who_says_nothing_or_nonsense_gets_everything(
    query: str, clock: object
) -> None:
    async with opened() as test:
        me = await top(test)
        await me.run_agent_tool(Kid, [["say", "x"]], run_id="r")
        await me.durable()
        peer = await connect(test, query=query)
        await settle()
        assert numbers(peer, "r") == [0, 1, 2]


@pytest.mark.rule("T-237")
@pytest.mark.parametrize("sequence", [5, 10**9])
async def test_who_says_more_than_there_is_gets_everything(
    sequence: int, clock: object
) -> None:
    async with opened() as test:
        me = await top(test)
        await me.run_agent_tool(Kid, [["say", "x"]], run_id="r")
        await me.durable()
        at = me.runs.get("r").started_at
        peer = await back(test, {"r": Known(at, sequence)})
        await settle()
        assert [f["event"]["kind"] for f in run_frames(peer)] == [
            "cleared", "started", "chunk", "finished",
        ]  # fmt: skip


@pytest.mark.rule("T-237")
async def test_a_refusal_is_no_run_that_could_be_gone(clock: object) -> None:
    class Closed(Top):
        max_concurrent_agent_tools = 0

    async with opened(root=Closed) as test:
        me = await top(test, Closed)
        peer = await connect(test, ("Closed", "a"))
        refused = await me.run_agent_tool(Kid, [], run_id="r")
        assert refused.reason == "capacity"
        await me.durable()
        await settle()
        shown: list[Any] = run_frames(peer)
        assert [f["event"]["kind"] for f in shown] == ["started", "error"]
        assert has(peer) == {}
