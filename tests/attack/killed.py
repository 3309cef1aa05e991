"""A busy server for `test_kill_any_time`: plain agents, everything that survives.

python tests/attack/killed.py DIR
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import trio

from culet.kernel import Agent, open_kernel, rpc
from culet.kernel.fibers import FiberRecovery, FiberResolution
from culet.web import create_app, serve

NOTES = "CREATE TABLE IF NOT EXISTS note (text TEXT)"


class Leaf(Agent):
    resumable = True

    async def on_turn(self, turn):
        for i in range(len(turn.chunks()), turn.input["k"]):
            await trio.sleep(0.002)
            yield {"type": "text-delta", "id": "t", "delta": f"{i};"}
        turn.output = turn.input["k"]


class Middle(Agent):
    resumable = True

    async def on_turn(self, turn):
        run = await self.run_agent_tool(Leaf, turn.input, run_id="leaf")
        if not turn.chunks():
            yield {"type": "text-delta", "id": "t", "delta": run.status}
        turn.output = run.output


class Box(Agent):
    """A plain facet with a file."""

    async def put(self, text: str) -> None:
        self.sql(NOTES)
        self.sql("INSERT INTO note VALUES (?)", text)

    async def all(self) -> list[str]:
        self.sql(NOTES)
        return [row.text for row in self.sql("SELECT text FROM note ORDER BY rowid")]


class Hub(Agent):
    initial_state: Any = {"n": 0}

    async def on_start(self) -> None:
        self.sql(NOTES)
        self.sql("CREATE TABLE IF NOT EXISTS fired (text TEXT)")

    @rpc
    async def note(self, text: str) -> None:
        self.sql("INSERT INTO note VALUES (?)", text)

    @rpc
    async def count(self, n: int) -> None:
        self.set_state({"n": n})

    @rpc
    async def later(self, seconds: float, text: str) -> None:
        await self.schedule(seconds, "fire", text)

    async def fire(self, payload: Any, schedule: Any) -> None:
        self.sql("INSERT INTO fired VALUES (?)", payload)

    @rpc
    async def work(self, run_id: str, k: int) -> str:
        run = await self.run_agent_tool(Middle, {"k": k}, run_id=run_id)
        return f"{run.status} {run.output}"

    @rpc
    async def begin(self, run_id: str, k: int) -> str:
        run = await self.run_agent_tool(Middle, {"k": k}, run_id=run_id, detached=True)
        return run.status

    @rpc
    async def stop(self, run_id: str) -> str | None:
        return (await self.runs.cancel(run_id)).status

    @rpc
    async def fiber(self, fiber_id: str, steps: int) -> None:
        async def body() -> int:
            for i in range(steps):
                await trio.sleep(0.002)
                self.stash(i)
            return steps

        await self.fibers.start("count", body, fiber_id=fiber_id)

    async def on_fiber_recovered(self, ctx: FiberRecovery) -> FiberResolution:
        return FiberResolution(result=["recovered", ctx.snapshot])

    @rpc
    async def put(self, name: str, text: str) -> None:
        await (await self.dynamic_agents.get(Box, name)).put(text)

    @rpc
    async def drop(self, name: str) -> None:
        await self.dynamic_agents.delete(Box, name)

    @rpc
    async def told(self) -> dict[str, Any]:
        """Everything, for the one who compares."""
        boxes = {}
        for child in self.dynamic_agents.list(Box):
            box = await self.dynamic_agents.lookup(Box, child.name)
            boxes[child.name] = None if box is None else await box.all()
        return {
            "notes": [r.text for r in self.sql("SELECT text FROM note ORDER BY rowid")],
            "fired": [r.text for r in self.sql("SELECT text FROM fired")],
            "runs": {r.run_id: f"{r.status} {r.output}" for r in self.runs.list()},
            "fibers": {f.id: [f.status, f.result] for f in self.fibers.list()},
            "boxes": boxes,
            "state": self.state["n"],
            "owed": len(self.schedules.list()),
        }


async def main(folder: str) -> None:
    async with (
        open_kernel(
            roots=[Hub], facets=[Leaf, Middle, Box], storage=f"sqlite:{folder}"
        ) as kernel,
        trio.open_nursery() as nursery,
    ):
        serving = partial(serve, create_app(kernel), bind="127.0.0.1:0")
        url = await nursery.start(serving)
        sys.stdout.write(f"{url}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    trio.run(main, sys.argv[1])
