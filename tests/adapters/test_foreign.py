"""Frameworks that know only asyncio: both loops in step, and two of them for real."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, ClassVar

import agents
import pydantic_ai
import pytest
import trio
from agents.models.interface import Model as OpenAIModelInterface
from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseTextDeltaEvent,
)
from pydantic_ai.messages import ModelMessage, UserPromptPart
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.models.test import TestModel

from culet.adapters.contract import adapter_contract, perform
from culet.adapters.foreign import (
    Bridge,
    ForeignAgent,
    ForeignCancelled,
    Result,
    _limiter,
    in_asyncio,
)
from culet.adapters.openai_agents import OpenAIAgent
from culet.adapters.openai_agents import _play as openai_play
from culet.adapters.pydantic_ai import PydanticAgent
from culet.adapters.pydantic_ai import _play as pydantic_play
from culet.kernel import Agent, AgentToolRun, Chunk, Turn
from culet.kernel.errors import FacetAborted, FacetBroken
from culet.kernel.testing import open_test_kernel

PATIENCE_S = 20


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "culet-asyncio"]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Any:
    yield
    assert threads() == []


# ---- the two loops


async def numbers(bridge: Bridge, n: int = 5) -> AsyncIterator[int]:
    for i in range(n):
        await asyncio.sleep(0)
        yield i


async def taken(player: Any, **options: Any) -> list[Any]:
    with trio.fail_after(PATIENCE_S):
        async with in_asyncio(player, **options) as items:
            return [item async for item in items]


async def test_items_come_in_order_and_the_thread_is_gone_after() -> None:
    assert await taken(numbers) == [0, 1, 2, 3, 4]
    assert threads() == []


async def test_no_more_than_the_buffer_waits() -> None:
    made: list[int] = []

    async def eager(bridge: Bridge) -> AsyncIterator[int]:
        for i in range(100):
            made.append(i)
            yield i

    with trio.fail_after(PATIENCE_S):
        async with in_asyncio(eager, buffer=3) as items:
            assert await anext(items) == 0
            deadline = time.monotonic() + PATIENCE_S
            while len(made) < 4 and time.monotonic() < deadline:
                await trio.sleep(0.001)
            await trio.sleep(0.05)
            assert len(made) <= 5  # three wait, one is taken, one is in hand
            assert [i async for i in items] == list(range(1, 100))


class Boom(Exception):
    pass


async def test_what_the_framework_raises_is_raised_here_after_its_items() -> None:
    async def fails(bridge: Bridge) -> AsyncIterator[int]:
        yield 1
        raise Boom("in the other loop")

    got: list[int] = []
    with pytest.raises(Boom, match="in the other loop"):
        async with in_asyncio(fails) as items:
            while True:
                got.append(await anext(items))
    assert got == [1]


@pytest.mark.parametrize(
    ("error", "kind"),
    [(asyncio.CancelledError(), ForeignCancelled), (SystemExit(3), FacetBroken)],
)
async def test_what_is_no_exception_is_told_as_one(
    error: BaseException, kind: type[Exception]
) -> None:
    async def odd(bridge: Bridge) -> AsyncIterator[int]:
        yield 1
        raise error

    with pytest.raises(kind):
        await taken(odd)


@pytest.mark.parametrize("how", ["cancelled", "left", "raised"])
async def test_leaving_cancels_the_task_there_and_waits_for_its_end(how: str) -> None:
    ends: list[str] = []

    async def patient(bridge: Bridge) -> AsyncIterator[int]:
        yield 1
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)
            ends.append("cleaned up")
            raise

    with trio.fail_after(PATIENCE_S), trio.CancelScope() as scope:
        try:
            async with in_asyncio(patient) as items:
                async for _item in items:
                    if how == "left":
                        break
                    if how == "raised":
                        raise Boom
                    scope.cancel()
        except Boom:
            assert how == "raised"
    assert scope.cancelled_caught is (how == "cancelled")
    assert ends == ["cleaned up"] or how != "cancelled"
    assert threads() == []


async def test_code_that_will_not_stop_is_left_behind_and_said_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    release = threading.Event()

    async def stubborn(bridge: Bridge) -> AsyncIterator[int]:
        yield 1
        release.wait()  # blocks its loop

    with trio.fail_after(PATIENCE_S):
        async with in_asyncio(stubborn, cancel_s=0.05) as items:
            await anext(items)
            await trio.sleep(0.01)
    assert "did not stop" in caplog.text
    (left,) = threads()
    release.set()
    await trio.to_thread.run_sync(left.join)


async def test_a_call_back_runs_in_the_turns_own_task() -> None:
    where: list[Any] = []

    async def here(n: int) -> int:
        where.append(trio.lowlevel.current_task())
        await trio.sleep(0)
        if n < 0:
            raise Boom("no such number")
        return n + 1

    async def asks(bridge: Bridge) -> AsyncIterator[Any]:
        yield await bridge.call(here, 1)
        try:
            await bridge.call(here, -1)
        except Boom as error:
            yield str(error)
        await bridge.durable()

    synced: list[bool] = []

    async def durable() -> None:
        synced.append(True)

    assert await taken(asks, durable=durable) == [2, "no such number"]
    assert where == [trio.lowlevel.current_task()] * 2
    assert synced == [True]


async def test_a_question_of_dying_code_is_refused() -> None:
    told: list[str] = []

    async def late(bridge: Bridge) -> AsyncIterator[int]:
        try:
            yield 1
            await asyncio.sleep(3600)
        finally:
            try:
                await bridge.durable()
            except FacetAborted as error:
                told.append(str(error))

    with trio.fail_after(PATIENCE_S):
        async with in_asyncio(late) as items:
            await anext(items)
            await trio.sleep(0.01)
    assert told != []


async def test_who_leaves_at_once_has_begun_nothing_that_stays() -> None:
    async def for_ever(bridge: Bridge) -> AsyncIterator[int]:
        await asyncio.sleep(3600)
        yield 1

    with trio.fail_after(PATIENCE_S):
        for _ in range(5):
            async with in_asyncio(for_ever):
                pass
            assert threads() == []
    assert _limiter().borrowed_tokens == 0


# ---- an agent of one's own


class Foreign(ForeignAgent):
    def get_player(self, turn: Turn) -> Any:
        async def play(bridge: Bridge) -> AsyncIterator[Chunk | Result]:
            async for word in perform(turn.input):
                await bridge.durable()
                yield {"type": "text-delta", "id": "t", "delta": f"{word} "}

        return play


# ---- pydantic-ai


async def answer(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[str]:
    (prompt,) = (p for p in messages[-1].parts if isinstance(p, UserPromptPart))
    async for word in perform(str(prompt.content)):
        yield f"{word} "


class Pydantic(PydanticAgent):
    def get_agent(self) -> Any:
        return pydantic_ai.Agent(FunctionModel(stream_function=answer))


# ---- openai-agents


class Performing(OpenAIModelInterface):
    """A model without a network."""

    async def get_response(self, *args: Any, **kw: Any) -> Any:
        raise NotImplementedError

    async def stream_response(
        self,
        system_instructions: Any,
        input: Any,  # noqa: A002
        *args: Any,
        **kw: Any,
    ) -> AsyncIterator[Any]:
        prompt = input if isinstance(input, str) else input[-1]["content"]
        text, n = "", 0
        async for word in perform(prompt):
            text += f"{word} "
            yield ResponseTextDeltaEvent(
                content_index=0, delta=f"{word} ", item_id="m", logprobs=[],
                output_index=0, sequence_number=n, type="response.output_text.delta",
            )  # fmt: skip
            n += 1
        said = ResponseOutputText(annotations=[], text=text, type="output_text")
        message = ResponseOutputMessage(
            id="m", content=[said], role="assistant", status="completed", type="message"
        )
        response = Response(
            id="r", created_at=0, model="fake", object="response", output=[message],
            parallel_tool_calls=False, tool_choice="auto", tools=[],
        )  # fmt: skip
        yield ResponseCompletedEvent(
            response=response, sequence_number=n, type="response.completed"
        )


class OpenAI(OpenAIAgent):
    def get_agent(self) -> Any:
        return agents.Agent(name="fake", model=Performing())


TestForeign = adapter_contract(lambda: Foreign, examples=4, real_time=True)
TestPydantic = adapter_contract(
    lambda: Pydantic, examples=4, real_time=True, fewest_words=1
)
TestOpenAI = adapter_contract(lambda: OpenAI, examples=4, real_time=True)


# ---- what is written is on the disk before the world is touched


async def syncs(player: Any) -> int:
    """Play it; return how often it waited for the disk."""
    count = 0

    async def durable() -> None:
        nonlocal count
        count += 1
        await trio.sleep(0)

    await taken(player, durable=durable)
    return count


async def test_pydantic_ai_waits_before_each_request_and_each_tool() -> None:
    agent: Any = pydantic_ai.Agent(TestModel())

    @agent.tool_plain
    def look(where: str) -> str:
        return where

    player = partial(pydantic_play, agent, "look", {})
    assert await syncs(player) == 3  # a request, the tool, a request


async def test_openai_agents_waits_before_each_request() -> None:
    agent: Any = agents.Agent(name="fake", model=Performing())
    assert await syncs(partial(openai_play, agent, "#disk one", {})) == 1


class Writes(ForeignAgent):
    """Looks from its player whether something is not on the disk yet."""

    dirty: ClassVar[list[bool]] = []

    async def on_start(self, props: Any = None) -> None:
        self.sql("CREATE TABLE IF NOT EXISTS note (text TEXT)")

    def get_player(self, turn: Turn) -> Any:
        store = self._node.tree.store
        self.sql("INSERT INTO note VALUES ('about to begin')")

        async def play(bridge: Bridge) -> AsyncIterator[Chunk]:
            self.dirty.append(store.dirty)
            yield {"type": "text-delta", "id": "t", "delta": "x"}

        return play


async def test_a_player_begins_when_what_its_agent_wrote_is_durable() -> None:
    class Asker(Agent):
        async def ask(self) -> str:
            return (await self.run_agent_tool(Writes, "", run_id="r")).status

    with trio.fail_after(PATIENCE_S):
        async with open_test_kernel(roots=[Asker], facets=[Writes]) as test:
            asker = await test.kernel.get_agent(Asker, "a")
            assert await asker.ask() == "completed"
    assert Writes.dirty == [False]


# ---- tools of a framework, and what they see of the agent


class Ledger(PydanticAgent):
    """Its tool writes a row of the agent's, from the other thread."""

    async def on_start(self, props: Any = None) -> None:
        self.sql("CREATE TABLE IF NOT EXISTS note (text TEXT)")

    async def write(self, text: str) -> int:
        self.sql("INSERT INTO note VALUES (?)", text)
        return int(self.sql("SELECT count(*) FROM note")[0][0])

    def get_agent(self) -> Any:
        agent = pydantic_ai.Agent(
            TestModel(custom_output_text="noted"), deps_type=Bridge
        )
        write = self.write

        @agent.tool
        async def note(ctx: pydantic_ai.RunContext[Bridge], text: str) -> int:
            return await ctx.deps.call(write, text)

        return agent


class Parent(Agent):
    async def ask(self, text: str) -> AgentToolRun:
        return await self.run_agent_tool(Ledger, text, run_id="r")

    async def chunks(self) -> list[Any]:
        import json

        frames = [f["event"] async for f in self.runs.replay("r")]
        return [json.loads(f["body"]) for f in frames if f["kind"] == "chunk"]


async def test_a_tool_of_pydantic_ai_writes_in_the_agent() -> None:
    with trio.fail_after(PATIENCE_S):
        async with open_test_kernel(roots=[Parent], facets=[Ledger]) as test:
            top = await test.kernel.get_agent(Parent, "a")
            run = await top.ask("write it down")
            assert (run.status, run.summary) == ("completed", "noted")
            assert run.usage["outputTokens"] > 0
            node = test.find([("Parent", "a"), ("Ledger", "r")])
            assert node is not None
            assert node.agent.sql("SELECT count(*) FROM note")[0][0] == 1
            kinds = [c["type"] for c in await top.chunks()]
            assert kinds[:2] == ["tool-input-available", "tool-output-available"]
            assert kinds[2] == "text-start"
            assert kinds[-1] == "text-end"
