"""A chat whose turn says one word, durably, and kills its own process; each time anew.

python poisoned.py FOLDER   # dies of SIGKILL, or prints how the turn has ended, and ends
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import trio

from culet.adapters import AIChatAgent
from culet.kernel import Chunk, Limits, Turn, open_kernel

TRIES = 4


class Poisoned(AIChatAgent):
    async def on_chat_message(self, turn: Turn) -> AsyncIterator[Chunk]:
        if turn.attempt == 1:
            yield {"type": "text-start", "id": "t"}
        yield {"type": "text-delta", "id": "t", "delta": f"{turn.attempt} "}
        await self.durable()
        os.kill(os.getpid(), signal.SIGKILL)

    async def ask(self) -> None:
        message = {
            "id": "u",
            "role": "user",
            "parts": [{"type": "text", "text": "go"}],
        }
        await self.submit_messages([message], idempotency_key="once")

    async def told(self) -> list[str]:
        return [p.get("text", "") for m in self.messages for p in m["parts"]]


async def main(folder: str) -> None:
    storage, limits = f"sqlite:{folder}", Limits(tries=TRIES)
    async with open_kernel(roots=[Poisoned], storage=storage, limits=limits) as kernel:
        over, ends = trio.Event(), list[Any]()

        def heard(*event: Any) -> None:
            ends.append(event[-1])
            over.set()

        kernel.subscribe("turn:end", heard)
        await (await kernel.get_agent(Poisoned, "a")).ask()
        with trio.fail_after(30):
            await over.wait()
        told = await (await kernel.get_agent(Poisoned, "a")).told()
        print(ends[0], told, flush=True)


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:])
