"""Facets whose script may also report, and an owner that hears of what it detached."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import trio

from culet.kernel import AgentToolRun, Chunk, Detached, Inspection, StoredChunk, Turn
from kernel.toolkit import HEARD, TURNS, Hears, Kid, forget, say

FAIL: Counter[str] = Counter()  # of a run: how often its owner still raises
FINISH = Detached(on_finish="delivered")


def fresh_start() -> None:
    """Begin a test with nothing heard, and nobody failing."""
    forget()
    FAIL.clear()


class Worker(Kid):
    """Also does `["report", {…}]` and `["mark", name]`; goes on after its last stash."""

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        TURNS[turn.request_id] += 1
        done = turn.snapshot or 0
        for number, step in enumerate(turn.input[done:], done):
            match step:
                case ["report", told]:
                    await self.report_progress(**told)
                case ["mark", name]:
                    await self.report_progress(milestone=name)
                case ["below", run_id, script]:
                    run = await self.run_agent_tool(Worker, script, run_id=run_id)
                    yield say(run.status)
                case ["detach", run_id, script]:
                    await self.run_agent_tool(
                        Worker, script, run_id=run_id, detached=FINISH
                    )
                case _:
                    yield await self._step(turn, number, step)
            turn.stash(number + 1)


class Owner(Hears):
    """Hears of ends and milestones, and raises as often as `FAIL` says."""

    async def ping(self, n: int) -> int:
        return n + 1

    async def delivered(self, run: AgentToolRun) -> None:
        await super().delivered(run)
        FAIL[run.run_id] -= 1
        if FAIL[run.run_id] >= 0:
            raise ValueError("not now")


class Top(Owner):
    """The root at Top/a."""


class Foreign(Hears):
    """Runs itself: says a word, and answers a cancel as its input says.

    `completed` and `aborted`: that is how it ends; `deaf`: it never answers.
    """

    async def on_start(self, props: Any = None) -> None:
        self.how: dict[str, Any] = {}
        self.ended: dict[str, Inspection] = {}

    async def start_agent_tool_run(self, given: Any, /, *, run_id: str) -> Inspection:
        self.how[run_id] = given
        return Inspection("running", started_at=1)

    async def inspect_agent_tool_run(self, run_id: str) -> Inspection | None:
        if run_id not in self.how:
            return None
        return self.ended.get(run_id, Inspection("running", started_at=1))

    async def agent_tool_chunks(
        self, run_id: str, after: int = -1
    ) -> list[StoredChunk]:
        return [StoredChunk(0, say("word"))] if after < 0 else []

    async def cancel_agent_tool_run(
        self, run_id: str, reason: str | None = None
    ) -> Inspection | None:
        how = self.how[run_id]
        HEARD.append(("cancel", run_id, reason))
        if how == "deaf":
            await trio.sleep_forever()
        text = None if how == "completed" else reason
        self.ended[run_id] = Inspection(
            how, summary="done", error=text, started_at=1, completed_at=2
        )
        await trio.sleep(0.5)  # so the pump may see it first
        return self.ended[run_id]


def heard(*kinds: str) -> list[tuple[Any, ...]]:
    """Return what agents were told, of these kinds."""
    return [h for h in HEARD if h[0] in kinds]
