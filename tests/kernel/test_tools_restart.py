"""A parent, a facet or both begin again: each run goes on by its own job."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio

from culet.adapters import AIChatAgent
from culet.kernel import Chunk, Detached, Turn
from culet.kernel.core.frames import literal
from kernel.agents import rows, settle, tree_of
from kernel.peers import connect
from kernel.toolkit import (
    HEARD,
    TURNS,
    Frail,
    Kid,
    Top,
    again,
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

BEGUN: list[tuple[str, int]] = []


@pytest.fixture(autouse=True)
def fresh() -> None:
    forget()
    BEGUN.clear()


class SlowStart(Kid):
    async def on_start(self) -> None:
        await trio.sleep(3)


class Starts(Top):
    """Asks for a run each time it starts."""

    async def on_start(self) -> None:
        await self.run_agent_tool(
            Kid, [["sleep", 3], ["say", "x"]], run_id=f"s{len(self.runs.list())}",
            detached=True,
        )  # fmt: skip


class Chat(AIChatAgent):
    """Says three words, one a second; its output is what its history says."""

    async def on_chat_message(self, turn: Turn) -> AsyncIterator[Chunk]:
        TURNS[turn.request_id] += 1
        words = ["one ", "two ", "three "]
        done = sum(c["type"] == "text-delta" for c in turn.chunks())
        for word in words[done:]:
            yield say(word)
            await trio.sleep(1)

    def get_agent_tool_output(self, run_id: str) -> Any:
        return [p["text"] for m in self.messages for p in m["parts"] if "text" in p]


def watch(test: Any) -> None:
    test.kernel.subscribe(
        "turn:begin", lambda _c, _t, subject, number: BEGUN.append((subject.id, number))
    )


# ---- the parent


@pytest.mark.rule("T-122")
async def test_what_a_start_asks_for_is_not_what_is_recovered(clock: object) -> None:
    async with opened(root=Starts) as test:
        await top(test, Starts)
        await test.advance(1)
        await test.crash()
        await test.reopen()
        me = await top(test, Starts)
        watch(test)
        await test.advance(10)
        assert {run.run_id: run.status for run in me.runs.list()} == {
            "s0": "completed", "s1": "completed",
        }  # fmt: skip
        assert TURNS == {"s0": 2, "s1": 1}


@pytest.mark.rule("T-124")
async def test_however_many_wake_a_parent_each_run_goes_on_once(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        for number in range(3):
            await me.run_agent_tool(
                Kid, [["sleep", 5], ["say", "x"]], run_id=f"r{number}", detached=True
            )
        await test.advance(1)
        await test.crash()
        await test.reopen()
        watch(test)
        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(test.kernel.get_agent, Top, "a")
        await test.advance(10)
        assert sorted(BEGUN) == [("r0", 2), ("r1", 2), ("r2", 2)]
        assert len([h for h in HEARD if h[0] == "finish"]) == 3


@pytest.mark.rule("T-125")
async def test_awaited_and_detached_go_on_alike_and_end_each_in_its_way(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        policy = Detached(on_finish="delivered")
        script = [["sleep", 3], ["say", "x"]]
        async with trio.open_nursery() as nursery:
            ask(nursery, me, Kid, script, run_id="awaited")
            await me.run_agent_tool(Kid, script, run_id="loose", detached=policy)
            await test.advance(1)
            await again(test)
            nursery.cancel_scope.cancel()
        await test.advance(10)
        assert sorted(h for h in HEARD if h[0] != "start") == [
            ("delivered", "loose", "completed"),
            ("finish", "a", "awaited", "completed"), ("finish", "a", "loose", "completed"),
        ]  # fmt: skip


@pytest.mark.rule("T-126", "T-127", "T-139")
async def test_slow_starts_of_many_facets_are_no_reason_to_end_a_run(
    clock: object,
) -> None:
    async with opened(SlowStart) as test:
        me = await top(test)
        for number in range(30):
            await me.run_agent_tool(
                SlowStart, [["say", "a"], ["sleep", 20], ["say", "b"]],
                run_id=f"r{number}", detached=True,
            )  # fmt: skip
        await test.advance(5)
        began = trio.current_time()
        me = await again(test)
        assert trio.current_time() - began < 1
        await test.advance(40)
        assert {run.status for run in me.runs.list()} == {"completed"}
        assert len(me.runs.list()) == 30


@pytest.mark.rule("T-130", "T-132")
@pytest.mark.parametrize("resumable", [False, True])
async def test_a_facet_that_never_began_begins_now(
    resumable: bool, clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SlowStart, "resumable", resumable)
    async with opened(SlowStart) as test:
        me = await top(test)
        script = [["say", "x"], ["sleep", 5]]
        await me.run_agent_tool(SlowStart, script, run_id="r", detached=True)
        await me.durable()  # and not a step further
        me = await again(test)
        for _ in range(2):
            await test.advance(1)
            me = await again(test)
        await test.advance(10)
        assert me.runs.get("r").status == "completed"
        assert TURNS == {"r": 1}
        await me.run_agent_tool(SlowStart, script, run_id="s", detached=True)
        await test.advance(4)
        me = await again(test)
        await test.advance(10)
        assert me.runs.get("s").status == ("completed" if resumable else "interrupted")
        assert {"r": 1, "s": 1 + resumable} == TURNS


@pytest.mark.rule("T-131")
async def test_recovery_makes_no_facet_that_is_not_there(clock: object) -> None:
    async with opened(SlowStart) as test:
        me = await top(test)
        await me.run_agent_tool(SlowStart, [["say", "x"]], run_id="r", detached=True)
        await test.advance(1)
        await me.dynamic_agents.delete(SlowStart, "r")
        await me.durable()
        me = await again(test)
        await test.advance(10)
        run = me.runs.get("r")
        assert (run.status, run.reason) == ("interrupted", "deleted")
        assert rows(tree_of(test), "SELECT count(*) FROM node") == [(1,)]
        assert TURNS == {}


@pytest.mark.rule("T-136", "T-152")
async def test_a_recovery_that_fails_leaves_the_parent_usable_and_is_told(
    clock: object,
) -> None:
    class Breaks(Kid):
        async def on_start(self) -> None:
            if TURNS["r"]:
                raise ValueError("not again")

    async with opened(Breaks) as test:
        me = await top(test)
        await me.run_agent_tool(
            Breaks, [["say", "x"], ["sleep", 9]], run_id="r", detached=True
        )
        await me.run_agent_tool(Kid, [["sleep", 9]], run_id="other", detached=True)
        await test.advance(1)
        me = await again(test)
        watch(test)
        told: list[Any] = []
        test.kernel.subscribe(
            "run:end", lambda _c, _t, s, e: told.append((s.id, e.status))
        )
        assert me.runs.get("r").status == "running"
        assert kinds(await frames(me, "r")) == [(0, "started"), (1, "chunk")]
        assert (await me.run_agent_tool(Kid, [["say", "y"]])).status == "completed"
        await test.advance(60)
        assert ("r", "error") in told
        assert ("other", "completed") in told
        assert ("other", 2) in BEGUN
        assert me.runs.get("r").reason == "start-failed"


# ---- the facet


@pytest.mark.rule("T-141", "T-142", "T-145")
async def test_a_run_that_is_taken_up_again_is_running_until_it_ends(
    clock: object,
) -> None:
    async with opened(Chat) as test:
        me = await top(test)
        await me.run_agent_tool(Chat, "go", run_id="r", detached=True)
        await test.advance(0.5)
        me = await again(test)
        seen = []
        for _ in range(8):
            seen.append(me.runs.get("r").status)
            await test.advance(0.5)
        assert seen[0] == "running"
        assert sorted(set(seen), reverse=True) == ["running", "completed"]
        assert seen == sorted(seen, reverse=True), "and never back"


@pytest.mark.rule("T-143", "T-154", "T-155")
async def test_a_turn_that_had_said_all_is_complete_after_a_crash(
    clock: object,
) -> None:
    async with opened(Chat) as test:
        me = await top(test)
        await me.run_agent_tool(Chat, "go", run_id="r", detached=True)
        await test.advance(2.5)  # all three words are stored, the end is not
        me = await again(test)
        await test.advance(5)
        run = me.runs.get("r")
        assert (run.status, run.summary) == ("completed", "one two three ")
        assert run.output == ["go", "one two three "], "from what is stored alone"
        bodies = [
            f["event"]["body"] for f in await frames(me, "r") if "body" in f["event"]
        ]
        assert sum("delta" in body for body in bodies) == 3
        assert literal("x") == '"x"'


@pytest.mark.rule("T-144", "T-155b", "B-09")
async def test_a_turn_that_is_given_up_says_so_and_keeps_what_it_said(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        script = [["say", "half"], ["sleep", 50]]
        await me.run_agent_tool(Kid, script, run_id="r", detached=True)
        await me.run_agent_tool(Frail, script, run_id="f", detached=True)
        for _ in range(8):
            await test.advance(1)
            me = await again(test)
        await test.advance(1)
        run = me.runs.get("r")
        assert (run.status, run.reason, run.summary) == (
            "error", "recovery-exhausted", "half",
        )  # fmt: skip
        assert run.error
        cut = me.runs.get("f")
        assert (cut.status, cut.summary) == ("interrupted", "half")


@pytest.mark.rule("T-146")
async def test_who_joined_hears_the_end_of_a_turn_that_went_on_at_once(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        script = [["say", "x"], ["sleep", 4]]
        await me.run_agent_tool(Kid, script, run_id="r", detached=True)
        await test.advance(1)
        me = await again(test)
        began = trio.current_time()
        run = await me.run_agent_tool(Kid, script, run_id="r")
        assert run.status == "completed"
        assert trio.current_time() - began < 4.5


@pytest.mark.rule("T-153")
async def test_nobody_has_to_look_for_a_facet_to_go_on(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        script = [["run", "in", [["sleep", 5], ["say", "deep"]]]]
        await me.run_agent_tool(Kid, script, run_id="r", detached=True)
        await test.advance(1)
        await test.crash()
        await test.reopen()
        await test.advance(20)
        tree = tree_of(test)
        assert rows(tree, "SELECT DISTINCT status FROM run") == [("completed",)]


@pytest.mark.rule("T-135")
async def test_an_end_that_recovery_finds_is_told_like_every_other(
    clock: object,
) -> None:
    """Its row, its last frame, live and replayed, and its hook, once each."""
    async with opened() as test:
        me = await top(test)
        script = [["say", "a"], ["sleep", 9]]
        await me.run_agent_tool(Frail, script, run_id="r", detached=True)
        await test.advance(1)
        me = await again(test)
        peer = await connect(test)
        await test.advance(5)
        run = me.runs.get("r")
        assert (run.status, run.reason) == ("interrupted", "not-resumable")
        want = [(0, "started"), (1, "chunk"), (2, "interrupted")]
        assert kinds(run_frames(peer)) == want
        assert kinds(await frames(me, "r")) == want
        assert [h for h in HEARD if h[0] == "finish"] == [
            ("finish", "a", "r", "interrupted")
        ]
        me = await again(test)
        await test.advance(5)
        assert [h[0] for h in HEARD].count("finish") == 1


# ---- a parent whose own turn goes on


@pytest.mark.rule("T-158", "T-159", "T-160", "T-162")
async def test_a_turn_that_is_taken_up_often_asks_for_its_run_once(
    clock: object,
) -> None:
    inner = [step for i in range(6) for step in (["say", str(i)], ["sleep", 1])]
    script = [["say", "a"], ["run", "in", inner], ["say", "b"]]
    async with opened() as test:
        me = await top(test)
        await me.run_agent_tool(Kid, script, run_id="r", detached=True)
        for _ in range(4):
            await test.advance(1.2)
            me = await again(test)
        await test.advance(20)
        run = me.runs.get("r")
        assert (run.status, run.summary) == ("completed", "acompletedb")
        found = rows(tree_of(test), "SELECT id, status, summary FROM run ORDER BY born")
        said = "".join(f"{i}sleep" for i in range(6))
        assert found == [("r", "completed", "acompletedb"), ("in", "completed", said)]


@pytest.mark.rule("T-159")
async def test_a_run_that_ended_while_its_asker_was_down_is_used_as_it_is(
    clock: object,
) -> None:
    class Waits(Kid):
        async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
            TURNS[turn.request_id] += 1
            run = await self.run_agent_tool(Kid, [["say", "x"]], run_id="in")
            await self.durable()
            if turn.attempt == 1:
                await trio.sleep(50)
            yield say(f"{run.status} {run.summary}")

    async with opened(Waits) as test:
        me = await top(test)
        await me.run_agent_tool(Waits, 1, run_id="r", detached=True)
        await test.advance(1)
        me = await again(test)
        await test.advance(1)
        assert me.runs.get("r").summary == "completed x"
        assert TURNS == {"r": 2, "in": 1}


@pytest.mark.rule("T-163")
async def test_a_turn_that_only_detached_runs_does_not_wait_for_them(
    clock: object,
) -> None:
    class Leaves(Kid):
        async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
            await self.run_agent_tool(Kid, [["sleep", 60]], run_id="d", detached=True)
            await self.durable()
            if turn.attempt == 1:
                await trio.sleep(50)
            yield say("gone on")

    async with opened(Leaves) as test:
        me = await top(test)
        await me.run_agent_tool(Leaves, 1, run_id="r", detached=True)
        await test.advance(1)
        me = await again(test)
        await test.advance(2)
        assert me.runs.get("r").status == "completed"
        found = rows(tree_of(test), "SELECT id, status FROM run ORDER BY born")
        assert found == [("r", "completed"), ("d", "running")]


@pytest.mark.rule("T-081", "T-161", "C-050")
async def test_a_silent_facet_gives_its_asker_no_credit(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        await me.run_agent_tool(
            Kid, [["run", "in", [["sleep", 50]]]], run_id="r", detached=True
        )
        for _ in range(8):
            await test.advance(1)
            me = await again(test)
        await test.advance(1)
        assert me.runs.get("r").reason == "recovery-exhausted"


# ---- what clients see of it


@pytest.mark.rule("T-069", "T-062", "W-202")
async def test_numbers_go_on_after_a_crash_in_the_middle(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        first = await connect(test)
        script = [step for i in range(3) for step in (["say", str(i)], ["sleep", 1])]
        await me.run_agent_tool(Kid, script, run_id="r", detached=True)
        await test.advance(1.5)
        me = await again(test)
        second = await connect(test, label="second")
        await test.advance(10)
        assert [f["sequence"] for f in run_frames(second)] == list(range(8))
        assert folded(first, second) == folded(second)
        await settle()
