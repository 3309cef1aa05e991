"""Asked again under a known id: joined while it goes on, read when it has ended."""

from __future__ import annotations

import math
from typing import Any

import pytest
import trio

from culet.kernel import Detached
from kernel.agents import settle
from kernel.peers import connect
from kernel.toolkit import (
    HEARD,
    TURNS,
    Frail,
    Kid,
    again,
    ask,
    folded,
    frames,
    kinds,
    opened,
    run_frames,
    top,
)

SLOW = [step for i in range(4) for step in (["say", str(i)], ["durable"], ["sleep", 2])]


@pytest.mark.rule("T-106", "T-115")
async def test_who_joins_after_a_crash_sees_the_frames_go_on(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        old = await connect(test)
        async with trio.open_nursery() as nursery:
            ask(nursery, me, Kid, SLOW, run_id="r")
            await test.advance(3)
            me = await again(test)
            nursery.cancel_scope.cancel()
        new = await connect(test, label="new")
        had = [f["sequence"] for f in run_frames(old)]
        run = await me.run_agent_tool(Kid, SLOW, run_id="r")
        await me.durable()
        assert run.status == "completed"
        numbers = [f["sequence"] for f in run_frames(new)]
        assert numbers == list(range(run.n + 2))
        assert had == numbers[: len(had)]
        assert folded(old, new) == folded(new)
        assert kinds(await frames(me, "r")) == kinds(run_frames(new))


@pytest.mark.rule("T-103", "T-116", "T-119")
@pytest.mark.parametrize("detached", [False, True])
async def test_an_ended_run_is_read_without_a_turn_a_frame_or_a_hook(
    detached: bool, clock: object
) -> None:
    async with opened() as test:
        me = await top(test)
        run = await me.run_agent_tool(Kid, [["say", "x"]], run_id="r")
        await settle()
        peer = await connect(test)
        heard, had = len(HEARD), len(run_frames(peer))
        policy: Any = Detached(on_finish="delivered") if detached else False
        same = await me.run_agent_tool(Kid, [["say", "x"]], run_id="r", detached=policy)
        await test.advance(5)
        assert same == run
        assert TURNS == {"r": 1}
        assert (len(HEARD), len(run_frames(peer))) == (heard, had)


@pytest.mark.rule("T-117")
@pytest.mark.parametrize("first", ["detached", "awaited"])
async def test_how_it_is_delivered_is_what_the_first_one_asked_for(
    first: str, clock: object
) -> None:
    async with opened() as test:
        me = await top(test)
        policy = Detached(on_finish="delivered")
        async with trio.open_nursery() as nursery:
            if first == "detached":
                await me.run_agent_tool(
                    Kid, [["sleep", 5]], run_id="r", detached=policy
                )
                results = ask(nursery, me, Kid, [["sleep", 5]], run_id="r")
            else:
                results = ask(nursery, me, Kid, [["sleep", 5]], run_id="r")
                await test.advance(1)
                handle = await me.run_agent_tool(
                    Kid, [["sleep", 5]], run_id="r", detached=policy
                )
                assert handle.status == "running"
        await test.advance(5)
        assert results[0].status == "completed"
        told = [h for h in HEARD if h[0] in ("delivered", "finish")]
        if first == "detached":
            told.remove(("delivered", "r", "completed"))
        assert told == [("finish", "a", "r", "completed")]


@pytest.mark.rule("T-110", "T-112", "T-121")
async def test_who_joins_bears_silence_for_a_while_who_began_it_for_ever(
    clock: object,
) -> None:
    told: list[tuple[str, Any]] = []
    async with opened() as test:
        me = await top(test)
        test.kernel.subscribe(
            "run:reattach",
            lambda _c, _t, subject, silence: told.append((subject.id, silence)),
        )
        async with trio.open_nursery() as nursery:
            began = trio.current_time()
            first = ask(nursery, me, Kid, [["sleep", 500]], run_id="r")
            await test.advance(1)
            second = ask(nursery, me, Kid, [["sleep", 500]], run_id="r")
            patient = ask(
                nursery, me, Kid, [["sleep", 500]], run_id="r", no_progress_s=math.inf
            )
            none = await me.run_agent_tool(
                Kid, [["sleep", 500]], run_id="r", no_progress_s=0
            )
            assert (none.status, none.reason) == ("running", "no-progress")
            assert trio.current_time() - began < 2
            await test.advance(118)
            assert second == []
            await test.advance(3)
            assert (second[0].status, second[0].reason) == ("running", "no-progress")
            assert first == []
        assert first == patient == [me.runs.get("r")]
        assert first[0].status == "completed"
        assert sorted(told) == [("r", 0), ("r", 120.0), ("r", math.inf)]
        later = await me.run_agent_tool(Kid, [["sleep", 500]], run_id="r")
        assert later == first[0], "what was given up can still be collected"


@pytest.mark.rule("T-102a")
async def test_nobody_but_a_caller_tries_again(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        run = await me.run_agent_tool(Kid, [["fail", "no"]], run_id="r")
        await test.advance(3000)
        assert run.status == "error"
        assert TURNS == {"r": 1}
        assert await me.run_agent_tool(Kid, [["fail", "no"]], run_id="r") == run
        assert (await me.run_agent_tool(Kid, [["say", "x"]], run_id="r2")).status == (
            "completed"
        )


@pytest.mark.rule("T-104")
async def test_an_interrupted_run_stays_so_under_its_id(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        await me.run_agent_tool(Frail, [["sleep", 9]], run_id="r", detached=True)
        await test.advance(1)
        me = await again(test)
        await test.advance(1)
        run = await me.run_agent_tool(Frail, [["sleep", 9]], run_id="r")
        assert (run.status, run.retryable) == ("interrupted", True)
        assert TURNS == {"r": 1}
