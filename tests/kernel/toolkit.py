"""Agents and small ways to look that the tests of agent tools share."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import trio

from culet.kernel import (
    Agent,
    AgentToolEvents,
    AgentToolRun,
    Chunk,
    Progress,
    Turn,
    apply_agent_tool_event,
)
from culet.kernel.errors import CuletError
from culet.kernel.testing import Harness, ScriptedChild, open_test_kernel
from kernel.agents import agent_at
from kernel.peers import RecordingPeer, frames_of

HEARD: list[tuple[Any, ...]] = []
TURNS: Counter[str] = Counter()


def forget() -> None:
    """Begin a test with nothing heard."""
    HEARD.clear()
    TURNS.clear()


class Hears(Agent):
    """Writes down what its hooks are told of its runs."""

    async def on_agent_tool_start(self, run: AgentToolRun) -> None:
        HEARD.append(("start", self.name, run.run_id))

    async def on_agent_tool_finish(self, run: AgentToolRun) -> None:
        HEARD.append(("finish", self.name, run.run_id, run.status))

    async def on_progress(self, run: AgentToolRun, progress: Progress) -> None:
        HEARD.append(("progress", run.run_id, progress.fraction, progress.milestone))

    async def delivered(self, run: AgentToolRun) -> None:
        HEARD.append(("delivered", run.run_id, run.status))


class Kid(ScriptedChild, Hears):
    """A facet whose turn is its input; each turn that begins is counted."""

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        TURNS[turn.request_id] += 1
        async with aclosing(super().on_turn(turn)) as chunks:
            async for chunk in chunks:
                yield chunk


class Frail(Kid):
    """A facet whose turn cannot go on after a crash."""

    resumable = False


class Top(Hears):
    """The root at Top/a of these tests."""

    async def ping(self, n: int) -> int:
        return n + 1


def say(text: str) -> Chunk:
    """A chunk of text."""
    return {"type": "text-delta", "id": "t", "delta": text}


def opened(*facets: type[Agent], root: type[Agent] = Top, **options: Any) -> Any:
    """Open a test kernel with the root Top/a and these facets beside the usual ones."""
    return open_test_kernel(roots=[root], facets=[Kid, Frail, *facets], **options)


async def top(test: Harness, root: type[Agent] = Top) -> Any:
    """Wake the root; return the live instance."""
    await test.kernel.get_agent(root, "a")
    node = test.find([(root.__name__, "a")])
    assert node is not None
    return node.agent


async def again(test: Harness) -> Any:
    """Crash, open again and wake the root; return the live instance."""
    await test.crash()
    await test.reopen()
    return await top(test)


async def kid(test: Harness, name: str, cls: str = "Kid") -> Any:
    """Return the live instance of a facet of the root."""
    return agent_at(test, (cls, name))


def ask(nursery: trio.Nursery, me: Any, *args: Any, **options: Any) -> list[Any]:
    """Run a tool in the background; its result is appended to the list returned.

    What a crash or the end of the agent does to the caller is not asked.
    """
    results: list[Any] = []

    async def body() -> None:
        try:
            results.append(await me.run_agent_tool(*args, **options))
        except CuletError as error:
            results.append(error)

    nursery.start_soon(body)
    return results


async def frames(me: Any, run_id: str, after: int = -1) -> list[Any]:
    """Return the frames of a run."""
    return [frame async for frame in me.runs.replay(run_id, after)]


def kinds(found: list[Any]) -> list[tuple[int, str]]:
    """Return number and kind of frames."""
    return [(f["sequence"], f["event"]["kind"]) for f in found]


def run_frames(peer: RecordingPeer, run_id: str | None = None) -> list[Any]:
    """Return the frames of runs, or of one, that a client has got."""
    found = frames_of(peer, "agent-tool-event")
    return [f for f in found if run_id in (None, f["event"].get("runId"))]


def folded(*peers: RecordingPeer) -> Any:
    """Return what a client knows that has got the frames of these, in this order."""
    state = AgentToolEvents.empty()
    for peer in peers:
        for frame in run_frames(peer):
            state = apply_agent_tool_event(state, frame)
    return state.to_json()
