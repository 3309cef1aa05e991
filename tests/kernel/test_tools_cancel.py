"""Cancelling: by whom, how far it reaches, and what was there first stays."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio

from culet.kernel import AgentToolRun, CancelToken, Chunk, Detached, Turn
from culet.kernel.core.run import model_value
from kernel.agents import agent_at, rows, settle, tree_of
from kernel.peers import connect
from kernel.toolkit import (
    HEARD,
    TURNS,
    Frail,
    Kid,
    Top,
    again,
    ask,
    forget,
    frames,
    kinds,
    opened,
    say,
    top,
)

SEEN: list[Any] = []


@pytest.fixture(autouse=True)
def fresh() -> None:
    forget()
    SEEN.clear()


class Watches(Kid):
    """Notes its own token, and every second that it lives."""

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        SEEN.append(turn.cancel)
        for number in range(99):
            yield say(str(number))
            SEEN.append(number)
            await trio.sleep(1)


class HangsInStart(Kid):
    async def on_start(self) -> None:
        await trio.sleep_forever()


# ---- the words


@pytest.mark.rule("T-043", "T-091")
async def test_who_says_no_reason_cancelled_all_the_same(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        async with trio.open_nursery() as nursery:
            results = ask(nursery, me, Kid, [["sleep", 99]], run_id="r")
            await test.advance(1)
            await me.runs.cancel("r")
        assert (results[0].status, results[0].reason) == ("aborted", "cancelled")
        told = model_value(results[0])
        assert told["error"].startswith("the run was cancelled")
        assert (told["ok"], told["status"], told["retryable"]) == (
            False,
            "aborted",
            False,
        )


# ---- the token


@pytest.mark.rule("T-044")
async def test_a_token_keeps_nothing_of_runs_that_are_over(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        token = CancelToken()
        for number, script in enumerate(
            ([["say", "x"]], [["fail", "x"]], [["sleep", 9]])
        ):
            await me.run_agent_tool(Kid, script, run_id=f"r{number}", cancel=token)
        await me.run_agent_tool(
            Kid, [["sleep", 1]], run_id="d", cancel=token, detached=True
        )
        await test.advance(5)
        with trio.move_on_after(1):
            await me.run_agent_tool(Kid, [["sleep", 99]], run_id="left", cancel=token)
        assert token._callbacks == []
        token.cancel()
        assert me.runs.get("left").status == "running", (
            "its caller was not there any more"
        )


@pytest.mark.rule("T-045", "T-120")
@pytest.mark.parametrize("detached", [False, True])
async def test_a_used_token_ends_a_run_that_goes_on_already(
    detached: bool, clock: object
) -> None:
    async with opened() as test:
        me = await top(test)
        await me.run_agent_tool(Kid, [["sleep", 99]], run_id="r", detached=True)
        await test.advance(1)
        token = CancelToken()
        token.cancel("no more")
        with trio.fail_after(1):
            run = await me.run_agent_tool(
                Kid, [["sleep", 99]], run_id="r", cancel=token, detached=detached
            )
        assert (me.runs.get("r").status, me.runs.get("r").reason) == (
            "aborted",
            "no more",
        )
        assert detached or run == me.runs.get("r")
        tree = tree_of(test)
        assert (tree.endings.waiters, tree.runs.tokens) == ({}, {})


@pytest.mark.rule("T-120")
async def test_the_token_of_one_who_joined_cancels_as_the_first_ones(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        token = CancelToken()
        async with trio.open_nursery() as nursery:
            first = ask(nursery, me, Kid, [["sleep", 99]], run_id="r")
            await test.advance(1)
            second = ask(nursery, me, Kid, [["sleep", 99]], run_id="r", cancel=token)
            await test.advance(1)
            token.cancel("enough")
        assert first == second
        assert (first[0].status, first[0].reason) == ("aborted", "enough")


@pytest.mark.rule("T-060")
async def test_the_callers_token_is_not_the_facets(clock: object) -> None:
    async with opened(Watches) as test:
        me = await top(test)
        token = CancelToken()
        async with trio.open_nursery() as nursery:
            ask(nursery, me, Watches, 1, run_id="r", cancel=token)
            await test.advance(1)
            theirs = SEEN[0]
            assert theirs is not token
            theirs.cancel("mine only")
            await test.advance(1)
            assert not token.cancelled
            assert me.runs.get("r").status == "running"
            token.cancel("yours")
        assert me.runs.get("r").reason == "yours"


# ---- who may, and how far it reaches


@pytest.mark.rule("T-047", "T-111")
@pytest.mark.parametrize("how", ["token", "id", "clear", "budget", "parent deleted"])
async def test_these_end_a_run_and_its_code(how: str, clock: object) -> None:
    async with opened(Watches) as test:
        await top(test)
        me = await top(test)
        await me.dynamic_agents.get(Kid, "mid")
        mid = agent_at(test, ("Kid", "mid"))
        token = CancelToken()
        budget = Detached(max_budget_s=2.5)
        await mid.run_agent_tool(Watches, 1, run_id="r", cancel=token, detached=budget)
        await test.advance(1.5)
        match how:
            case "token":
                token.cancel("x")
            case "id":
                await mid.runs.cancel("r", "x")
            case "clear":
                await mid.runs.clear()
            case "budget":
                await test.advance(1)
            case "parent deleted":
                await me.dynamic_agents.delete(Kid, "mid")
        await settle()
        seen = len(SEEN)
        await test.advance(20)
        assert len(SEEN) == seen, "no step after it"
        stored = rows(tree_of(test), "SELECT status, reason FROM run")
        assert stored == {
            "token": [("aborted", "x")], "id": [("aborted", "x")],
            "budget": [("interrupted", "budget-exceeded")],
        }.get(how, [])  # fmt: skip


@pytest.mark.rule("T-049")
async def test_cancel_reaches_a_turn_that_goes_on_after_a_crash(clock: object) -> None:
    async with opened(Watches) as test:
        me = await top(test)
        await me.run_agent_tool(Watches, 1, run_id="r", detached=True)
        await test.advance(2)
        me = await again(test)
        await test.advance(2)
        assert SEEN[-1] >= 1
        seen = len(SEEN)
        assert (await me.runs.cancel("r", "x")).status == "aborted"
        await test.advance(10)
        assert len(SEEN) == seen
        me = await again(test)
        await test.advance(10)
        assert len(SEEN) == seen
        assert me.runs.get("r").status == "aborted"


@pytest.mark.rule("T-050")
async def test_all_that_wait_hear_a_cancel_at_once(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        async with trio.open_nursery() as nursery:
            found = [
                ask(nursery, me, Kid, [["sleep", 99]], run_id="r") for _ in range(3)
            ]
            peer = await connect(test)
            await test.advance(1)
            began = trio.current_time()
            await me.runs.cancel("r", "x")
        assert trio.current_time() - began < 0.5
        assert [results[0].status for results in found] == ["aborted"] * 3
        tree = tree_of(test)
        await me.durable()
        assert tree.streams._open == {}
        assert not peer.closed


@pytest.mark.rule("T-054")
async def test_what_a_cancel_finds_said_and_not_stored_is_kept(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        said = trio.Event()

        def at_second(_channel: str, _tree: Any, stream: Any, _kind: str) -> None:
            SEEN.append(stream)
            if len(SEEN) == 2:
                said.set()

        test.kernel.subscribe("turn:chunk", at_second)
        script = [["say", "a"], ["say", "b"], ["sleep", 99], ["say", "c"]]
        async with trio.open_nursery() as nursery:
            results = ask(nursery, me, Kid, script, run_id="r")
            await said.wait()
            assert SEEN[1].staged, "nothing of it is stored so far"
            await me.runs.cancel("r")
        assert (results[0].status, results[0].n) == ("aborted", 2)
        want = [(0, "started"), (1, "chunk"), (2, "chunk"), (3, "aborted")]
        assert kinds(await frames(me, "r")) == want
        me = await again(test)
        assert kinds(await frames(me, "r")) == want, "and it stays"


@pytest.mark.rule("T-053")
async def test_an_end_that_stood_before_the_cancel_is_returned(clock: object) -> None:
    token = CancelToken()

    class First(Top):
        """Cancels in the very step in which its run has ended."""

    async with opened(root=First) as test:
        me = await top(test, First)

        def at_end(channel: str, *_: Any) -> None:
            token.cancel("too late")

        stop = test.kernel.subscribe("run:end", at_end)
        run = await me.run_agent_tool(Kid, [["say", "x"]], run_id="r", cancel=token)
        stop()
        assert token.cancelled
        assert (run.status, run.reason, run.summary) == ("completed", None, "x")
        assert run == me.runs.get("r")


@pytest.mark.rule("T-056", "T-249")
async def test_clients_that_go_leave_the_turn_alone(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        peers = [
            await connect(test),
            await connect(test, label="other"),
        ]
        await me.run_agent_tool(
            Kid, [["sleep", 5], ["say", "x"]], run_id="r", detached=True
        )
        await test.advance(1)
        peers.append(await connect(test, ("Top", "a"), ("Kid", "r"), label="inside"))
        for peer in peers:
            assert peer.connection is not None
            peer.connection.closed(1001, "going away", was_clean=True)
        await test.advance(10)
        assert me.runs.get("r").status == "completed"
        assert TURNS == {"r": 1}


@pytest.mark.rule("T-057")
async def test_a_cancel_needs_nobody_who_waits(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        with trio.move_on_after(1):
            await me.run_agent_tool(Kid, [["sleep", 99]], run_id="r")
        assert (await me.runs.cancel("r", "x")).status == "aborted"
        run = me.runs.get("r")
        assert (run.status, run.reason) == ("aborted", "x")
        assert run.completed_at is not None
        await settle()
        assert HEARD[-1] == ("finish", "a", "r", "aborted")


@pytest.mark.rule("T-058")
@pytest.mark.parametrize("where", ["in its start", "deaf"])
async def test_a_facet_that_cannot_be_reached_is_cancelled_and_delivered(
    where: str, clock: object
) -> None:
    class Deaf(Kid):
        async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
            with trio.CancelScope(shield=True):
                await trio.sleep(300)
            yield say("late")

    cls = Deaf if where == "deaf" else HangsInStart
    async with opened(Deaf, HangsInStart, abort_grace_s=1) as test:
        me = await top(test)
        policy = Detached(on_finish="delivered")
        await me.run_agent_tool(cls, 1, run_id="r", detached=policy)
        await test.advance(1)
        assert (await me.runs.cancel("r", "x")).status == "aborted"
        await test.advance(3)
        assert ("delivered", "r", "aborted") in HEARD
        await test.advance(400)
        assert kinds(await frames(me, "r")) == [(0, "started"), (1, "aborted")]
        assert HEARD.count(("delivered", "r", "aborted")) == 1


@pytest.mark.rule("T-262")
async def test_cancel_of_the_top_ends_what_its_turn_has_asked_for(
    clock: object,
) -> None:
    class Middle(Kid):
        async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
            yield say("a")
            await self.run_agent_tool(Frail, [["sleep", 50]], run_id="d", detached=True)
            await self.run_agent_tool(Kid, [["sleep", 50]], run_id="w")

    async with opened(Middle) as test:
        me = await top(test)
        async with trio.open_nursery() as nursery:
            ask(nursery, me, Middle, 1, run_id="r")
            await test.advance(1)
            await me.runs.cancel("r", "x")
        found: list[tuple[Any, ...]] = rows(
            tree_of(test), "SELECT id, status, reason FROM run ORDER BY id"
        )
        assert found == [
            ("d", "aborted", "asker-ended"), ("r", "aborted", "x"),
            ("w", "aborted", "asker-ended"),
        ]  # fmt: skip


def test_a_result_is_what_the_row_says() -> None:
    run = AgentToolRun(run_id="r", agent_type="Kid", status="aborted", reason="x")
    assert model_value(run)["reason"] == "x"
