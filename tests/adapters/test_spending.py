"""A model under a budget: its worst case is reserved before it is asked, and told to it."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from typing import Any, ClassVar

import msgspec
import pytest

from adapters.peer import user
from culet.adapters import ExtractiveModel, Price, ScriptedModel, Think
from culet.adapters.model import (
    Finish,
    ModelEvent,
    ModelMessage,
    ModelRequest,
    TextDelta,
    ToolCall,
    ToolSpec,
    Usage,
)
from culet.adapters.spending import TOOLS_TOKENS, cost, input_bound, micros
from culet.kernel import (
    Agent,
    AgentToolRun,
    Budget,
    Chunk,
    Limits,
    Spent,
    Turn,
    agent_tool,
)
from culet.kernel.core.limits import AMOUNT_MAX
from culet.kernel.errors import CuletError
from culet.kernel.testing import open_test_kernel

ASKED: list[ModelRequest] = []


class Meter:
    """A model that says as many words as it may, one token each, up to `words`.

    Its input is 10 tokens. `tells`: whether it says what it has used.
    """

    price: Price | None = None

    def __init__(
        self, words: int, *, tells: bool = True, tool: str = "", **more: Any
    ) -> None:
        self.words, self.tells, self.tool = words, tells, tool
        for name, value in more.items():
            setattr(self, name, value)

    def input_bound(self, request: ModelRequest) -> int:
        return 10

    async def stream(self, request: ModelRequest, /) -> AsyncIterator[ModelEvent]:
        ASKED.append(request)
        most = self.words if request.max_tokens is None else request.max_tokens
        words = min(self.words, most)
        for _ in range(words):
            yield TextDelta("w ")
        if self.tool:
            yield ToolCall(id=f"c{len(ASKED)}", name=self.tool, input={})
        if self.tells:
            yield Usage(input_tokens=10, output_tokens=words)
        whole = "tool-calls" if self.tool else "stop"
        yield Finish(whole if words == self.words else "length")


class Writer(Think):
    the_model: ClassVar[Any] = None
    max_steps = 20

    def get_model(self) -> Any:
        return self.the_model

    def get_tools(self) -> dict[str, Any]:
        return {"look": self.look}

    async def look(self) -> str:
        """Look at something."""
        return "seen"


class Boss(Agent):
    async def ask(self, budget: dict[str, int] | None) -> AgentToolRun:
        given = None if budget is None else Budget(**budget)
        return await self.run_agent_tool(Writer, {"text": "go"}, budget=given)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    ASKED.clear()


async def ask(
    model: Any, budget: dict[str, int] | None, limits: Limits | None = None
) -> AgentToolRun:
    Writer.the_model = model
    async with open_test_kernel(roots=[Boss], facets=[Writer], limits=limits) as test:
        boss = await test.kernel.get_agent(Boss, "a")
        return await boss.ask(budget)


@pytest.mark.limit("model_tokens")
async def test_a_model_without_a_bound_has_model_tokens_under_a_budget(
    clock: object,
) -> None:
    limits = Limits(model_tokens=50)
    whole = await ask(Meter(50), {"tokens": 1_000}, limits)
    assert (whole.status, ASKED[-1].max_tokens) == ("completed", 50)
    await ask(Meter(50, max_tokens=70), {"tokens": 1_000}, limits)
    assert ASKED[-1].max_tokens == 70, "its own counts"
    await ask(Meter(51), {"tokens": 1_000}, limits)
    assert ASKED[-1].max_tokens == 50
    await ask(Meter(51), None, limits)
    assert ASKED[-1].max_tokens is None, "nothing to be kept"


async def test_the_model_is_told_how_much_it_may_say_and_half_an_answer_is_none(
    clock: object,
) -> None:
    run = await ask(Meter(1_000), {"tokens": 50})
    assert (run.status, run.reason) == ("error", "over-budget")
    assert run.error == "over budget: the answer was cut after 40 tokens"
    assert [r.max_tokens for r in ASKED] == [40]
    assert run.summary == "w " * 40
    assert run.total == Spent(tokens=50, calls=1)
    ASKED.clear()
    run = await ask(Meter(40), {"tokens": 50})
    assert (run.status, run.usage) == (
        "completed",
        {"inputTokens": 10, "outputTokens": 40},
    )


async def test_what_it_does_not_use_is_there_for_the_next_step(clock: object) -> None:
    run = await ask(Meter(5, tool="look"), {"tokens": 40})
    assert [r.max_tokens for r in ASKED] == [30, 15]
    assert (run.status, run.reason) == ("error", "over-budget")
    assert run.error == "over budget: 11 tokens asked for, 10 left"
    assert run.summary == "w " * 10, "what was said before it stays said"
    assert run.total == Spent(tokens=30, calls=2)


async def test_calls_run_out_too(clock: object) -> None:
    run = await ask(Meter(5, tool="look"), {"calls": 3})
    assert (run.status, run.reason) == ("error", "over-budget")
    assert run.error == "over budget: 1 calls asked for, 0 left"
    assert [r.max_tokens for r in ASKED] == [None] * 3
    assert run.total == Spent(tokens=45, calls=3)


async def test_a_model_that_does_not_say_what_it_used_has_used_what_it_could(
    clock: object,
) -> None:
    run = await ask(Meter(5, tells=False), {"tokens": 100})
    assert run.total == Spent(tokens=10 + len("w " * 5), calls=1)
    free = await ask(Meter(5, tells=False), None)
    assert free.total == Spent(calls=1)


async def test_a_model_that_fails_in_mid_answer_has_used_what_was_reserved(
    clock: object,
) -> None:
    model = ScriptedModel([["some ", ValueError("gone")]])
    model.max_tokens = 30  # type: ignore[attr-defined]
    model.input_bound = lambda request: 10  # type: ignore[attr-defined]
    run = await ask(model, {"tokens": 100})
    assert (run.status, run.error) == ("error", "gone")
    assert run.total == Spent(tokens=40, calls=1)


async def test_what_a_call_may_cost_is_on_the_disk_before_the_call(
    clock: object,
) -> None:
    class Dying(Meter):
        async def stream(self, request: ModelRequest, /) -> AsyncIterator[ModelEvent]:
            ASKED.append(request)
            if len(ASKED) == 1:
                test.faults.die_after(0)
            async for event in Meter(5).stream(request):
                yield event

    Writer.the_model = Dying(5)
    async with open_test_kernel(roots=[Boss], facets=[Writer]) as test:
        boss = await test.kernel.get_agent(Boss, "a")
        with pytest.raises(CuletError):
            await boss.ask({"tokens": 50})
        await test.crash()
        await test.reopen()
        await test.kernel.get_agent(Boss, "a")
        tree = test.tree("Boss", "a")
        assert tree is not None
        assert tree.db.execute("SELECT tokens_spent FROM account") == [(50,)]
        await test.advance(60)
        sql = "SELECT status, reason FROM run"
        assert tree.db.execute(sql) == [("error", "over-budget")]


async def test_money_bounds_an_answer_by_the_price(clock: object) -> None:
    price = Price(input=3, output=15)
    run = await ask(Meter(1_000, price=price), {"cost": 30 + 15 * 20 + 14})
    assert [r.max_tokens for r in ASKED] == [20]
    assert run.total == Spent(tokens=30, cost=330, calls=1)
    poor = await ask(Meter(5, price=price), {"cost": 44})
    assert (poor.status, poor.reason, len(ASKED)) == ("error", "over-budget", 1)
    assert poor.error == (
        "over budget: 45 cost (millionths of a dollar) asked for, 44 left"
    )


async def test_money_and_a_model_without_a_price_do_not_go_together(
    clock: object,
) -> None:
    run = await ask(Meter(5), {"cost": 1_000_000})
    assert (run.status, ASKED) == ("error", [])
    assert run.error is not None
    assert "price=Price(" in run.error
    assert (await ask(ExtractiveModel(), {"cost": 0})).status == "completed"


async def test_what_a_model_says_it_cost_counts(clock: object) -> None:
    told = Usage(input_tokens=1, output_tokens=1, cost=0.1)
    run = await ask(ScriptedModel([["x", told]], price=Price(output=1)), None)
    assert run.total == Spent(tokens=2, cost=100_000, calls=1)


async def test_a_model_reads_that_a_child_was_refused_and_goes_on(
    clock: object,
) -> None:
    class Chief(Think):
        model = ScriptedModel(
            [
                [
                    ToolCall(id="a", name="big", input={}),
                    ToolCall(id="b", name="small", input={}),
                    Usage(input_tokens=10, output_tokens=10),
                ],
                "done",
            ]
        )

        def get_tools(self) -> dict[str, Any]:
            return {
                "big": agent_tool(Writer, description="b", budget=Budget(tokens=10**9)),
                "small": agent_tool(Writer, description="s", budget=Budget(tokens=20)),
            }

    class Head(Agent):
        async def go(self) -> AgentToolRun:
            return await self.run_agent_tool(Chief, "go", budget=Budget(tokens=50_000))

    Writer.the_model = Meter(5)
    async with open_test_kernel(roots=[Head], facets=[Chief, Writer]) as test:
        head = await test.kernel.get_agent(Head, "a")
        run = await head.go()
        assert run.status == "completed"
        assert run.total is not None
        assert run.total.tokens < 20_000
        node = test.find([("Head", "a")])
        assert node is not None
        chief = test.find([("Head", "a"), ("Chief", run.run_id)])
        assert chief is not None
        parts = [
            part
            for message in chief.agent.messages  # type: ignore[attr-defined]
            for part in message["parts"]
            if "toolCallId" in part
        ]
        refused, made = (part["output"] for part in parts)
        assert refused["reason"] == "budget"
        assert refused["retryable"] is False
        assert refused["error"].startswith("over budget: 1000000000 tokens asked for")
        assert made == "w " * 5


async def test_each_turn_of_a_chat_has_the_budget_of_its_class(clock: object) -> None:
    class Chat(Writer):
        turn_budget = Budget(tokens=45, calls=2)

        async def say(self, text: str) -> list[Any]:
            made = await self.save_messages([user(f"u{len(self.messages)}", text)])
            return [made.status, made.error]

    Writer.the_model = Meter(5)
    async with open_test_kernel(roots=[Chat]) as test:
        chat = await test.kernel.get_agent(Chat, "a")
        assert await chat.say("one") == ["completed", None]
        assert await chat.say("two") == ["completed", None]
        Writer.the_model = Meter(5, tool="look")
        status, error = await chat.say("three")
        assert (status, error) == ("error", "over budget: 1 calls asked for, 0 left")
        tree = test.tree("Chat", "a")
        assert tree is not None
        sql = "SELECT state, tokens_spent, calls_spent FROM account ORDER BY id"
        assert tree.db.execute(sql) == [
            ("closed", 15, 1),
            ("closed", 15, 1),
            ("closed", 30, 2),
        ]


class Talker(Writer):
    """A chat that others let speak."""

    async def say(self, text: str) -> list[Any]:
        made = await self.save_messages([user(f"u{len(self.messages)}", text)])
        return [made.status, made.error]


class Host(Agent):
    """A run of it lets a chat of its own speak twice."""

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        yield {"type": "start"}
        talker = await self.dynamic_agents.get(Talker, "t")
        told = [await talker.say("one"), await talker.say("two")]
        turn.output = [*told, self.budget.left().tokens]

    async def go(self, tokens: int) -> AgentToolRun:
        return await self.run_agent_tool(Host, None, budget=Budget(tokens=tokens))


async def test_a_turn_that_a_run_asks_another_agent_for_is_paid_by_the_run(
    clock: object,
) -> None:
    Writer.the_model = Meter(5)
    async with open_test_kernel(roots=[Host], facets=[Host, Talker]) as test:
        host = await test.kernel.get_agent(Host, "a")
        run = await host.go(30)
        short = "over budget: 11 tokens asked for, 0 left"
        assert run.output == [["completed", None], ["completed", None], 0]
        assert run.total == Spent(tokens=30, calls=2)
        run = await host.go(15)
        assert run.output == [["completed", None], ["error", short], 0]


async def test_a_turn_of_a_chat_ends_when_its_time_is_over(clock: object) -> None:
    class Slow(Think):
        turn_budget = Budget(seconds=5)
        model = ScriptedModel([["a ", "b ", "c "]], pace_s=3)

        async def say(self) -> list[Any]:
            made = await self.save_messages([user("u", "hi")])
            row = self.fibers.inspect(made.request_id)
            assert row is not None
            return [row.status, row.reason]

    async with open_test_kernel(roots=[Slow]) as test:
        slow = await test.kernel.get_agent(Slow, "a")
        assert await slow.say() == ["interrupted", "budget-exceeded"]
        tree = test.tree("Slow", "a")
        assert tree is not None
        assert tree.db.execute("SELECT * FROM job") == []


def test_the_bytes_of_a_request_bound_its_tokens() -> None:
    message = ModelMessage(role="user", content="naïve 漢字")
    request = ModelRequest(system="s", messages=(message,))
    model = ScriptedModel([])
    assert input_bound(model, request) == len(msgspec.json.encode(request))
    assert input_bound(model, request) > len("naïve 漢字".encode())
    more = msgspec.structs.replace(request, tools=(ToolSpec(name="t"),))
    assert input_bound(model, more) > input_bound(model, request) + TOOLS_TOKENS


@pytest.mark.parametrize(
    ("dollars", "millionths"),
    [
        (0.1, 100_000), (0.0000001, 1), (1e-6, 1), (0.3, 300_000), (0, 0), (-1, 0),
        (math.nan, 0), (math.inf, 0), (1e12, AMOUNT_MAX),
    ],
)  # fmt: skip
def test_money_is_rounded_up_to_whole_millionths(
    dollars: float, millionths: int
) -> None:
    assert micros(dollars) == millionths


def test_a_price_a_million_tokens_is_millionths_a_token() -> None:
    price = Price(input=0.25, output=1.1)
    assert cost(price, 1_000_000, 1_000_000) == 1_350_000
    assert cost(price, 1, 0) == 1
