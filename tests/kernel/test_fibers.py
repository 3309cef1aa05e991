"""Fibers: checkpoints, recovery, and holds that never outlive their task."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio

from culet.kernel import Agent, Chunk, FiberRecovery, FiberResolution, Turn
from culet.kernel.errors import (
    FacetAborted,
    FacetBroken,
    NotFound,
    StorageError,
    UsageError,
)
from culet.kernel.testing import Harness, open_test_kernel
from kernel.agents import agent_at, raises, rows, settle, tree_of

TOLD: list[FiberRecovery] = []
DONE: Counter[str] = Counter()


@pytest.fixture(autouse=True)
def fresh() -> None:
    TOLD.clear()
    DONE.clear()


class Top(Agent):
    answer: FiberResolution | None = FiberResolution(result="recovered")

    async def on_start(self) -> None:
        await trio.sleep(0)

    async def steps(self, name: str, count: int) -> Any:
        async def fn() -> str:
            for i in range(count):
                await trio.sleep(1)
                self.stash({"at": i + 1})
                DONE[f"{name}{i}"] += 1
            return "whole"

        return await self.run_fiber(name, fn)

    async def background(self, name: str, key: str | None = None) -> str:
        async def fn() -> str:
            await trio.sleep(5)
            DONE[name] += 1
            return "whole"

        return (await self.fibers.start(name, fn, key=key, metadata={"m": 1})).id

    async def fails(self) -> None:
        async def fn() -> None:
            raise ValueError("bad fiber")

        await self.run_fiber("f", fn)

    async def leaves(self, how: str) -> None:
        async def fn() -> None:
            raise SystemExit("it leaves")

        if how == "run":
            await self.run_fiber("f", fn)
        else:
            await self.fibers.start("f", fn, fiber_id="f")

    async def dies_badly(self) -> None:
        async def child() -> None:
            try:
                await trio.sleep_forever()
            finally:
                raise ValueError("in its clean-up")

        async def fn() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(child)

        await self.run_fiber("f", fn)

    async def odd_result(self) -> Any:
        async def fn() -> object:
            return object()

        return await self.run_fiber("f", fn)

    async def on_fiber_recovered(self, ctx: FiberRecovery) -> FiberResolution | None:
        TOLD.append(ctx)
        if ctx.name == "raises":
            raise ValueError("in the hook")
        if ctx.name == "slow":
            await trio.sleep(30)
            DONE["late"] += 1
        return None if ctx.name == "ignored" else FiberResolution(result="recovered")


class Nester(Agent):
    """A turn that waits for a fiber."""

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        async def fn() -> None:
            await trio.sleep(5)
            DONE["inner"] += 1

        async def in_background() -> None:
            await trio.sleep(5)
            DONE["outlived"] += 1

        await self.fibers.start("bg", in_background)
        if turn.input == "fail":
            await trio.sleep(1)
            raise ValueError("the turn fails")
        await self.run_fiber("inner", fn)
        yield {"type": "x"}


def opened(**options: Any) -> Any:
    return open_test_kernel(roots=[Top], facets=[Nester], **options)


async def opened_top(test: Harness) -> tuple[Top, Any]:
    root = await test.kernel.get_agent(Top, "a")
    return root, agent_at(test)


async def crash_during(test: Harness, seconds: float, fn: Any, *args: Any) -> Any:
    """Call, wait, crash, open again; return the live root."""
    async with trio.open_nursery() as nursery:

        async def body() -> None:
            with pytest.raises((StorageError, FacetAborted)):
                await fn(*args)

        nursery.start_soon(body)
        await test.advance(seconds)
        await test.crash()
    await test.reopen()
    return (await opened_top(test))[1]


def left(test: Harness) -> tuple[Any, Any]:
    tree = tree_of(test)
    return (
        rows(tree, "SELECT name, status FROM fiber ORDER BY born"),
        rows(tree, "SELECT kind FROM job"),
    )


@pytest.mark.rule("F-327")
async def test_a_fiber_returns_and_leaves_nothing(clock: object) -> None:
    async with opened() as test:
        root, _me = await opened_top(test)
        assert await root.steps("s", 3) == "whole"
        assert left(test) == ([], [])


async def test_a_failing_fiber_raises_to_its_caller(clock: object) -> None:
    async with opened() as test:
        root, _me = await opened_top(test)
        assert "bad fiber" in str(await raises(ValueError, root.fails))
        await raises(UsageError, root.odd_result)
        assert left(test)[1] == []
        assert {s for _n, s in left(test)[0]} <= {"error"}


@pytest.mark.rule("I-39", "I-40", "F-329", "F-335")
async def test_a_cut_fiber_is_told_with_its_last_stash(clock: object) -> None:
    async with opened() as test:
        root, _me = await opened_top(test)
        await crash_during(test, 2.5, root.steps, "s", 5)
        await test.advance(1)
        (told,) = TOLD
        assert (told.name, told.snapshot, told.attempt) == ("s", {"at": 2}, 2)
        assert left(test) == ([], []), "as if it had returned"
        assert set(DONE.values()) == {1}


@pytest.mark.rule("HB-13", "I-39")
async def test_a_finished_fiber_is_not_recovered(clock: object) -> None:
    async with opened() as test:
        root, _me = await opened_top(test)
        assert await root.steps("s", 1) == "whole"
        await test.crash()
        await test.reopen()
        await opened_top(test)
        await test.advance(5)
        assert TOLD == []
        assert DONE == {"s0": 1}


async def test_a_hook_that_says_nothing_interrupts(clock: object) -> None:
    async with opened() as test:
        root, _me = await opened_top(test)
        await crash_during(test, 1.5, root.steps, "ignored", 5)
        await test.advance(1)
        assert left(test) == ([("ignored", "interrupted")], [])


@pytest.mark.rule("kernel-mini-12", "I-39", "F-341", "F-362")
async def test_a_hook_that_always_raises_uses_its_attempts_up(clock: object) -> None:
    async with opened() as test:
        root, _me = await opened_top(test)
        await crash_during(test, 1.5, root.steps, "raises", 5)
        await test.advance(600)
        assert left(test) == ([("raises", "error")], [])
        assert len(TOLD) == 4, "the first attempt was the function itself"
        row = rows(tree_of(test), "SELECT reason, error FROM fiber")[0]
        assert row[0] == "recovery-exhausted"
        assert "in the hook" in row[1]


@pytest.mark.rule("kernel-mini-5", "F-363")
async def test_a_cancelled_caller_gives_the_hold_back(clock: object) -> None:
    async with opened() as test:
        root, _me = await opened_top(test)
        with trio.move_on_after(1.5):
            await root.steps("s", 5)
        held = rows(tree_of(test), "SELECT held FROM job")
        assert held == [(None,)], "no task has it, so nobody holds it"
        await test.advance(10)
        assert [t.name for t in TOLD] == ["s"]
        assert left(test)[1] == []


@pytest.mark.rule("F-051")
async def test_an_aborted_fiber_is_recovered(clock: object) -> None:
    async with opened() as test:
        root, _me = await opened_top(test)
        await root.background("b")
        tree = tree_of(test)
        await test.advance(1)
        await tree.abort([tree.root_slot], "test")
        await test.advance(10)
        assert [t.name for t in TOLD] == ["b"]
        assert TOLD[0].metadata == {"m": 1}
        assert DONE == {}


@pytest.mark.rule("F-347")
async def test_background_fibers_keep_their_row_and_join_by_key(clock: object) -> None:
    async with opened() as test:
        root, me = await opened_top(test)
        ids = {await root.background("b", "key") for _ in range(3)}
        assert len(ids) == 1
        assert me.fibers.inspect(key="key").status == "running"
        await test.advance(6)
        kept = me.fibers.inspect(key="key")
        assert (kept.status, kept.result, kept.metadata) == (
            "completed", "whole", {"m": 1},
        )  # fmt: skip
        assert await root.background("b", "key") in ids
        assert DONE == {"b": 1}
        assert me.fibers.list(status="completed") == [kept]
        assert me.fibers.delete() == 1
        assert me.fibers.inspect(key="key") is None
        with pytest.raises(UsageError):
            me.fibers.inspect()


@pytest.mark.rule("F-351")
async def test_cancelling_a_fiber_by_id_ends_it_for_good(clock: object) -> None:
    async with opened() as test:
        root, me = await opened_top(test)
        fiber_id = await root.background("b")
        await test.advance(1)
        assert me.fibers.cancel(fiber_id, reason="no more") == "aborted"
        assert me.fibers.cancel(fiber_id) == "aborted"
        assert me.fibers.cancel("nobody") is None
        await test.advance(10)
        assert DONE == {}
        assert TOLD == []
        assert me.fibers.inspect(fiber_id).reason == "no more"
        assert left(test)[1] == []


async def test_a_cancelled_run_fiber_does_not_look_like_success(clock: object) -> None:
    async with opened() as test:
        root, me = await opened_top(test)
        async with trio.open_nursery() as nursery:
            errors: list[Any] = []

            async def ask() -> None:
                errors.append(await raises(FacetAborted, root.steps, "s", 5))

            nursery.start_soon(ask)
            await test.advance(1.5)
            (fiber,) = me.fibers.list()
            me.fibers.cancel(fiber.id, reason="enough")
        assert errors[0].reason == "enough"


async def test_cancelling_during_its_recovery_stops_the_hook(clock: object) -> None:
    async with opened() as test:
        root, me = await opened_top(test)
        me = await crash_during(test, 1.5, root.steps, "slow", 5)
        await test.advance(1)
        (fiber,) = me.fibers.list()
        assert me.fibers.cancel(fiber.id) == "aborted"
        await test.advance(60)
        assert DONE["late"] == 0
        assert me.fibers.inspect(fiber.id).status == "aborted"


async def test_resolving_from_outside(clock: object) -> None:
    async with opened() as test:
        root, me = await opened_top(test)
        fiber_id = await root.background("b")
        assert me.fibers.resolve(fiber_id, FiberResolution(result=7))
        assert not me.fibers.resolve(fiber_id, FiberResolution(result=8))
        assert me.fibers.inspect(fiber_id).result == 7
        await test.advance(10)
        assert DONE == {}
        assert me.fibers.inspect(fiber_id).result == 7
        assert left(test)[1] == []


@pytest.mark.rule("F-329")
async def test_stash_belongs_into_a_fiber(clock: object) -> None:
    async with opened() as test:
        _root, me = await opened_top(test)
        with pytest.raises(UsageError, match="stash"):
            me.stash(1)
        with pytest.raises(NotFound):
            await tree_of(test).fibers.join(me._node.slot, "nobody")


@pytest.mark.rule("kernel-mini-8")
async def test_a_turn_that_ends_takes_its_fibers_along(clock: object) -> None:
    async with opened() as test:
        _root, me = await opened_top(test)
        run = await me.run_agent_tool(Nester, "fail", run_id="r")
        assert run.status == "error"
        assert left(test)[0] == [("bg", "aborted")]
        await test.advance(20)
        assert DONE["outlived"] == 0
        assert left(test)[1] == []


async def test_cancelling_a_run_takes_its_fibers_along(clock: object) -> None:
    async with opened() as test:
        _root, me = await opened_top(test)
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                await me.run_agent_tool(Nester, "wait", run_id="r")

            nursery.start_soon(ask)
            await test.advance(1)
            await me.runs.cancel("r")
        assert {s for _n, s in left(test)[0]} == {"aborted"}
        await test.advance(20)
        assert DONE == {}
        assert TOLD == []


async def test_restarts_with_a_stash_each_do_not_use_it_up(clock: object) -> None:
    async with opened() as test:
        root, _me = await opened_top(test)
        for _ in range(8):
            await crash_during(test, 1.5, root.steps, "s", 9)
            root, _me = await opened_top(test)
            await settle()
        assert all(s == "completed" for _n, s in left(test)[0])
        assert len(TOLD) == 8


@pytest.mark.parametrize("how", ["run", "start"])
async def test_a_fiber_that_raises_what_is_no_exception_has_ended(
    how: str, clock: object
) -> None:
    async with opened() as test:
        root, me = await opened_top(test)
        if how == "run":
            await raises(FacetBroken, root.leaves, how)
        else:
            await root.leaves(how)
            await settle()
            found = me.fibers.inspect("f")
            assert (found.status, found.error) == ("error", "SystemExit: it leaves")
        assert rows(tree_of(test), "SELECT * FROM job") == []
        assert await root.steps("after", 1) == "whole", "the agent lives on"


async def test_what_the_clean_up_of_a_cancelled_fiber_raises_goes_nowhere(
    clock: object,
) -> None:
    async with opened() as test, trio.open_nursery() as nursery:
        root, me = await opened_top(test)
        ended: list[str | None] = []

        async def body() -> None:
            ended.append((await raises(FacetAborted, root.dies_badly)).reason)

        nursery.start_soon(body)
        await settle()
        me.fibers.cancel(me.fibers.list()[0].id, reason="enough")
        await settle()
        assert ended == ["enough"]
