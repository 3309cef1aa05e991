"""Checked by pyright, never run: a stub has the types of the class it stands for."""

from __future__ import annotations

from typing import assert_type

from quart import Response as QuartResponse
from quart.wrappers import Request as QuartRequest

from culet.adapters import RoutedAgent, RoutedAgents
from culet.kernel import (
    Agent,
    AgentToolRun,
    Budget,
    CancelReceipt,
    Effect,
    EffectContext,
    Feed,
    FeedEntry,
    Forward,
    Kernel,
    Left,
    Question,
    Request,
    Response,
    Schedule,
    Sent,
    Spend,
    Spent,
    current_effect,
)
from culet.web import route_sub_agent_request


class Child(Agent):
    async def ping(self, text: str) -> str:
        return text

    async def ask(self) -> int:
        parent = await self.parent_agent(Parent)
        assert_type(parent, Parent)
        assert_type(await parent.fetch("/x", headers={"a": "b"}), Response)
        assert_type(self.kernel.new_id(), str)
        return 1


class Hub(RoutedAgents):
    agent_class = Child

    async def on_forward(self, request: Request) -> Forward | Response | None:
        assert_type(self.get("c"), RoutedAgent | None)
        assert_type(self.list(limit=1), list[RoutedAgent])
        assert_type(await self.set_metadata("c", 1, seq=1), bool)
        return await super().on_forward(request)


class Parent(Agent):
    async def count(self, n: int) -> list[int]:
        child = await self.dynamic_agents.get(Child, "c")
        assert_type(child, Child)
        assert_type(await child.ping("x"), str)
        found = await self.dynamic_agents.lookup(Child, "c")
        assert_type(found, Child | None)
        run = await self.run_agent_tool(Child, {"n": n}, budget=Budget(tokens=9))
        assert_type(run, AgentToolRun)
        assert_type(run.total, Spent | None)
        assert_type(self.runs.spent("r"), Spent)
        assert_type(await self.runs.cancel("r"), CancelReceipt)
        assert_type(self.runs.questions(), list[Question])
        assert_type(await self.runs.answer("r", "c", {"x": 1}), bool)
        assert_type(await self.runs.approve("r", "c", approved=False), bool)
        assert_type(await self.runs.send("r", {"x": 1}, id="l"), Sent)
        assert_type(self.runs.feed(limit=1), Feed)
        async for entry in self.runs.feed(await self.runs.feed_end(), follow=True):
            assert_type(entry, FeedEntry)
            assert_type(entry.cursor, str)
        assert_type(await self.budget.reserve(tokens=1), Spend)
        assert_type(self.budget.left(), Left)
        assert_type(self.effects.list(uncertain=True), list[Effect])
        assert_type(self.effects.resolve("1", repeat=True), bool)
        assert_type(current_effect(), EffectContext | None)
        made = await self.schedule(1.0, self.count)
        assert_type(made, Schedule)
        return [n]


async def routes(quart_request: QuartRequest, hub: Hub) -> None:
    assert_type(await route_sub_agent_request(Request(), hub), Response)
    assert_type(await route_sub_agent_request(quart_request, hub), QuartResponse)


async def outside(kernel: Kernel) -> None:
    parent = await kernel.get_agent(Parent, "p")
    assert_type(parent, Parent)
    assert_type(await parent.count(1), list[int])
    child = await kernel.get_sub_agent(parent, Child, "c")
    assert_type(child, Child)
