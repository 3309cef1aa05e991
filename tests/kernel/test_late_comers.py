"""Who comes while an agent or a root is ending meets its next life. Found by the tree
machine; each of these had hung, or was told of an end that was not its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

import pytest
import trio

from culet.kernel import Agent
from culet.kernel.errors import ChildDidNotStop
from culet.kernel.ports import TreeKey
from culet.kernel.testing import Harness, open_test_kernel


class Deaf(Agent):
    """May be made deaf, and breaks when it is told so."""

    over: ClassVar[trio.Event]

    async def deafen(self) -> None:
        async def body() -> None:
            with trio.CancelScope(shield=True):
                await self.over.wait()

        self.spawn(body)

    async def crack(self) -> None:
        async def body() -> None:
            raise ValueError("cracked")

        self.spawn(body)

    async def life(self) -> str:
        return self._node.slot

    async def wait(self) -> None:
        await trio.sleep_forever()

    async def kid(self, verb: str) -> Any:
        kid = await self.dynamic_agents.get(Deaf, "k")
        return await getattr(kid, verb)()

    async def abort(self) -> None:
        await self.dynamic_agents.abort(Deaf, "k")


@pytest.fixture(autouse=True)
def over() -> None:
    Deaf.over = trio.Event()


async def within(
    harness: Harness, fn: Callable[..., Awaitable[Any]], *args: Any
) -> Any:
    """Run `fn` to its end in a minute; then let deaf code go."""
    try:
        with trio.fail_after(60):
            return await fn(*args)
    finally:
        Deaf.over.set()
        await harness.advance(1)


@pytest.mark.rule("I-47")
async def test_a_root_that_was_told_of_is_there_after_a_crash(clock: object) -> None:
    async with open_test_kernel(roots=[Deaf]) as test:
        root = await test.kernel.get_agent(Deaf, "r")
        tree = test.tree("Deaf", "r")
        assert tree is not None
        slot = tree.root_slot
        await test.crash()
        await test.reopen()
        root = await test.kernel.get_agent(Deaf, "r")
        assert await root.life() == slot


async def test_a_root_that_is_falling_asleep_is_woken_once_it_sleeps(
    clock: object,
) -> None:
    async with open_test_kernel(roots=[Deaf], facets=[Deaf]) as test:
        root = await test.kernel.get_agent(Deaf, "r")
        await root.deafen()
        slot = await root.life()
        tree = test.kernel.trees[TreeKey("Deaf", "r")]

        async def call() -> None:
            await trio.sleep(1)  # it stops, and waits for its code
            assert test.kernel.trees[TreeKey("Deaf", "r")] is tree
            assert await root.life() == slot

        async def both() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(test.kernel.host.put_to_sleep, tree)
                nursery.start_soon(call)

        await within(test, both)


async def test_a_get_while_a_broken_agent_stops_is_not_told_of_a_start(
    clock: object,
) -> None:
    async with open_test_kernel(roots=[Deaf], facets=[Deaf]) as test:
        root = await test.kernel.get_agent(Deaf, "r")
        await root.kid("deafen")
        slot = await root.kid("life")
        await root.kid("crack")
        await trio.sleep(1)

        async def again() -> Any:
            return await root.kid("life")

        assert await within(test, again) == slot


async def test_a_get_does_not_wait_for_code_that_never_stops(clock: object) -> None:
    async with open_test_kernel(roots=[Deaf], facets=[Deaf]) as test:
        root = await test.kernel.get_agent(Deaf, "r")
        await root.kid("deafen")

        async def abort() -> None:
            with pytest.raises(ChildDidNotStop):
                await root.abort()

        async def both() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(abort)
                await trio.sleep(1)  # it stops, and will be a remnant
                await root.kid("life")
            assert not Deaf.over.is_set()

        await within(test, both)


async def test_an_agent_above_a_remnant_is_not_dropped_from_memory(
    clock: object,
) -> None:
    """It could not end, and the drop would never be over: nor any later one."""
    async with open_test_kernel(roots=[Deaf], facets=[Deaf], idle_s=10) as test:
        root = await test.kernel.get_agent(Deaf, "r")
        await root.kid("deafen")
        with pytest.raises(ChildDidNotStop):
            await root.abort()

        async def later() -> None:
            await trio.sleep(30)
            await root.life()

        await within(test, later)
        await trio.sleep(40)
        assert test.is_idle([("Deaf", "r")])
        assert test.kernel.metrics()["nodes"] == 0
