"""The agents of the recorded folders. Their names and tables are in those folders for
good: add to them, never rename.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import trio

from culet.adapters import AIChatAgent
from culet.kernel import (
    Agent,
    AgentToolRun,
    Chunk,
    FiberRecovery,
    FiberResolution,
    Turn,
)
from culet.kernel.testing import ScriptedChild

HEARD: list[str] = []  # what this process was told


class Worker(ScriptedChild):
    """A tool that goes on after a crash."""


class Frail(ScriptedChild):
    """A tool that cannot."""

    resumable = False


class Keeper(Agent):
    """A root with some of everything."""

    initial_state = {"jobs": 0}

    async def note(self, text: str) -> None:
        self.sql("CREATE TABLE IF NOT EXISTS note (id INTEGER PRIMARY KEY, text TEXT)")
        self.sql("CREATE INDEX IF NOT EXISTS note_text ON note (text)")
        self.sql("INSERT INTO note (text) VALUES (?)", text)

    async def notes(self) -> list[str]:
        return [row.text for row in self.sql("SELECT text FROM note ORDER BY id")]

    async def count(self, jobs: int) -> None:
        self.set_state({"jobs": jobs})

    async def state_now(self) -> Any:
        return self.state

    async def begin(self, frail: bool, run_id: str, script: list[Any]) -> None:
        await self.run_agent_tool(
            Frail if frail else Worker, script, run_id=run_id, detached=True
        )

    async def stop(self, run_id: str) -> None:
        await self.runs.cancel(run_id, reason="enough")

    async def forget(self, run_id: str) -> None:
        await self.dynamic_agents.delete(Worker, run_id)

    async def frames(self, run_id: str) -> list[Any]:
        return [frame async for frame in self.runs.replay(run_id)]

    async def statuses(self) -> dict[str, str]:
        return {run.run_id: run.status for run in self.runs.list()}

    async def plan(self) -> None:
        await self.schedule(3600, "tick", {"n": 1})
        await self.schedule("0 9 * * 1-5", "tick", {"n": 2}, tz="Europe/Berlin")
        await self.schedule_every(7200, "tick", {"n": 3})

    async def tick(self, payload: Any, schedule: Any) -> None:
        HEARD.append(f"tick {payload['n']}")

    async def dig(self) -> None:
        async def fn() -> None:
            self.stash({"deep": 3})
            await trio.sleep_forever()

        await self.fibers.start("dig", fn, fiber_id="dig", metadata={"m": 1})

    async def on_fiber_recovered(self, ctx: FiberRecovery) -> FiberResolution | None:
        HEARD.append(f"fiber {ctx.name} {ctx.snapshot}")
        return FiberResolution(result="dug")

    async def on_agent_tool_finish(self, run: AgentToolRun) -> None:
        HEARD.append(f"finish {run.run_id} {run.status}")


class Talker(AIChatAgent):
    """A chat that says what it was told."""

    async def on_chat_message(self, turn: Turn) -> AsyncIterator[Chunk]:
        yield {"type": "text-start", "id": "t"}
        yield {"type": "text-delta", "id": "t", "delta": "heard"}
        yield {"type": "text-end", "id": "t"}

    async def hear(self, text: str) -> None:
        await self.save_messages(
            [{"id": "m1", "role": "user", "parts": [{"type": "text", "text": text}]}]
        )

    async def said(self) -> list[str]:
        parts = [part for message in self.messages for part in message["parts"]]
        return [part["text"] for part in parts if part["type"] == "text"]
