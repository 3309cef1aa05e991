"""Two lives of a process: the first is killed in a facet's fiber, the second gets no visit.

python killed_fiber.py FOLDER begin     # prints "in it" when the checkpoint is durable
python killed_fiber.py FOLDER recover   # prints what the facet was told, and ends
"""

from __future__ import annotations

import sys

import trio

from culet.kernel import Agent, FiberRecovery, FiberResolution, open_kernel

OVER: list[str] = []


class Kid(Agent):
    async def on_start(self) -> None:
        self.ready = "started"

    async def work(self) -> None:
        await self.run_fiber("long", self._long)

    async def _long(self) -> None:
        self.stash({"page": 7})
        await self.durable()
        print("in it", flush=True)
        await trio.sleep_forever()

    async def on_fiber_recovered(self, ctx: FiberRecovery) -> FiberResolution:
        path = [step.name for step in self.parent_path]
        OVER.append(f"{self.ready} {path} {self.name} {ctx.name} {ctx.snapshot}")
        return FiberResolution(result="recovered")


class Top(Agent):
    async def begin(self) -> None:
        await (await self.dynamic_agents.get(Kid, "k")).work()


async def main(folder: str, phase: str) -> None:
    async with open_kernel(
        roots=[Top], facets=[Kid], storage=f"sqlite:{folder}"
    ) as kernel:
        if phase == "begin":
            await (await kernel.get_agent(Top, "a")).begin()
        ended = trio.Event()
        kernel.subscribe("fiber:end", lambda *_event: ended.set())
        with trio.move_on_after(30):
            await ended.wait()
        print(*OVER, flush=True)


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:])
