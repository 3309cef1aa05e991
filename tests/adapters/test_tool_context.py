"""What a tool knows of its call: enough to do a thing outside only once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from adapters.peer import user
from adapters.test_think import STAGE, Recorded, call
from culet.adapters import Think, ToolContext, TurnResult, tool
from culet.kernel import Agent
from culet.kernel.testing import open_test_kernel

TOLD: list[ToolContext] = []


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    STAGE.__init__()  # type: ignore[misc]
    TOLD.clear()
    yield
    STAGE.__init__()  # type: ignore[misc]


class Helper(Think):
    """Calls its tool twice in one step; the tool waits at the door of its input."""

    def get_model(self) -> Any:
        calls = [call("c1", "pay", what="first"), call("c2", "pay", what="second")]
        return Recorded([calls, "Paid."])

    def get_tools(self) -> dict[str, Any]:
        return {"pay": tool(self.pay, on_uncertain="repeat")}

    async def pay(self, ctx: ToolContext, what: str) -> str:
        TOLD.append(ctx)
        await STAGE.through(what)
        return what

    async def ask(self, message_id: str) -> TurnResult:
        return await self.save_messages([user(message_id, "pay")])


class Boss(Agent):
    async def send(self, run_id: str) -> str:
        run = await self.run_agent_tool(Helper, "pay", run_id=run_id, detached=True)
        return run.status

    async def send_below(self, name: str, run_id: str) -> None:
        below = await self.dynamic_agents.get(Boss, name)
        await below.send(run_id)

    async def ended(self, run_id: str) -> str | None:
        run = self.runs.get(run_id)
        return None if run is None else run.summary


@pytest.mark.rule("B-25")
async def test_a_repeated_call_has_the_same_ids_and_the_next_attempt(
    clock: object,
) -> None:
    async with open_test_kernel(roots=[Boss], facets=[Helper]) as test:
        boss = await test.kernel.get_agent(Boss, "b")
        await boss.send("r1")
        await STAGE.at("first")
        await STAGE.at("second")
        STAGE.door("first").set()
        await test.advance(1)
        await test.crash()
        STAGE.door("second").set()
        await test.reopen()
        boss = await test.kernel.get_agent(Boss, "b")
        await test.advance(5)
        assert await boss.ended("r1") == "Paid."
        found = [(c.run_id, c.tool_call_id, c.attempt) for c in TOLD]
        assert found == [("r1", "c1", 1), ("r1", "c2", 1), ("r1", "c2", 2)]
        keys = [c.idempotency_key for c in TOLD]
        assert keys[1] == keys[2] != keys[0]
        assert all(keys)


@pytest.mark.rule("B-25")
async def test_no_two_calls_share_a_key_whatever_ids_a_model_gives(
    clock: object,
) -> None:
    STAGE.door("first").set()
    STAGE.door("second").set()
    async with open_test_kernel(roots=[Boss, Helper], facets=[Boss, Helper]) as test:
        boss = await test.kernel.get_agent(Boss, "b")
        for run_id in ("r1", "r2"):
            await boss.send(run_id)
        for name in ("one", "two"):  # who may give their runs the same ids
            await boss.send_below(name, "r1")
        await test.advance(5)
        alone = await test.kernel.get_agent(Helper, "h")
        for message_id in ("u1", "u2"):
            assert (await alone.ask(message_id)).status == "completed"
        by_run = {(c.run_id, c.tool_call_id) for c in TOLD if c.run_id}
        assert by_run == {(r, c) for r in ("r1", "r2") for c in ("c1", "c2")}
        assert len(TOLD) == 12
        assert sum(c.run_id is None for c in TOLD) == 4, "a turn of a chat is no run"
        assert len({c.idempotency_key for c in TOLD}) == 12
        assert {c.attempt for c in TOLD} == {1}
