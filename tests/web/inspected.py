"""Agents with something of everything that an inspector shows; secrets in all they say."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import trio

from culet.kernel import Agent, AgentToolRun, Retry, Turn, rpc
from culet.kernel.errors import ChildDidNotStop

SECRET = "canary-51c7"
PACE_S = 0.05


class Slow(Agent):
    """Says a word again and again until somebody cancels it."""

    async def on_turn(self, turn: Turn) -> AsyncIterator[dict[str, Any]]:
        self.set_state({"seen": SECRET})
        if turn.input["words"] < 0:
            raise ValueError(f"no {SECRET}")
        for i in range(turn.input["words"]):
            await trio.sleep(PACE_S)
            yield {"type": "text-delta", "id": "t", "delta": f"{SECRET} {i} "}


RELEASED = trio.Event()


class Stuck(Agent):
    """Does not stop when it is told to, until somebody lets it go."""

    async def hold(self) -> None:
        self.spawn(self.cling)

    async def cling(self) -> None:
        with trio.move_on_after(20, shield=True):
            await RELEASED.wait()


class Office(Agent):
    initial_state = {"called": 0, "words": SECRET}

    @rpc
    async def begin(self, run_id: str, words: int) -> None:
        asked = {"words": words, "text": SECRET}
        await self.run_agent_tool(Slow, asked, run_id=run_id, detached=True)

    @rpc
    async def plan(self) -> list[str]:
        """Plan a call, a tick and one that will rest; return their ids."""
        once = Retry(max_attempts=1)
        return [
            (await self.schedule(3600, "ring", SECRET)).id,
            (await self.schedule("0 7 * * *", "report", SECRET)).id,
            (await self.schedule(0, "breaks", SECRET, retry=once)).id,
        ]

    @rpc
    async def cling(self) -> None:
        """Leave a remnant behind."""
        await (await self.dynamic_agents.get(Stuck, "s")).hold()
        with suppress(ChildDidNotStop):
            await self.dynamic_agents.abort(Stuck, "s")

    @rpc
    async def release(self) -> None:
        """Let the remnants go."""
        RELEASED.set()

    @rpc
    async def called(self) -> int:
        return int(self.state["called"])

    async def on_agent_tool_finish(self, run: AgentToolRun) -> None:
        if run.run_id == "unheard":
            raise ValueError(f"no {SECRET}")

    @rpc
    async def weave(self, count: int) -> None:
        """Keep so many fibers."""
        for i in range(count):
            await self.fibers.start(f"f{i}", self.nothing, key=f"{SECRET} {i}")

    async def nothing(self) -> str:
        return SECRET

    async def ring(self, payload: str, schedule: Any) -> None:
        self.set_state({**self.state, "called": self.state["called"] + 1})

    async def report(self, payload: str, schedule: Any) -> None:
        pass

    async def breaks(self, payload: str, schedule: Any) -> None:
        raise ValueError(f"no {payload}")
