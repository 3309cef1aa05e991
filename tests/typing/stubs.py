"""Checked by pyright, never run: a stub has the types of the class it stands for."""

from __future__ import annotations

from typing import assert_type

from culet.kernel import Agent, AgentToolRun, Kernel, Schedule


class Child(Agent):
    async def ping(self, text: str) -> str:
        return text


class Parent(Agent):
    async def count(self, n: int) -> list[int]:
        child = await self.dynamic_agents.get(Child, "c")
        assert_type(child, Child)
        assert_type(await child.ping("x"), str)
        found = await self.dynamic_agents.lookup(Child, "c")
        assert_type(found, Child | None)
        run = await self.run_agent_tool(Child, {"n": n})
        assert_type(run, AgentToolRun)
        made = await self.schedule(1.0, self.count)
        assert_type(made, Schedule)
        return [n]


async def outside(kernel: Kernel) -> None:
    parent = await kernel.get_agent(Parent, "p")
    assert_type(parent, Parent)
    assert_type(await parent.count(1), list[int])
    child = await kernel.get_sub_agent(parent, Child, "c")
    assert_type(child, Child)
