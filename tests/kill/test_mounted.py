"""The same kills in somebody's own service under plain hypercorn, seen by our client.

One client asks, is there when the process is killed, and waits: the next life listens at
the same port. What it then has is what a fresh client gets.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import trio

from culet.web import connect
from kill.test_kill import QUESTION, REQUEST, Server, starts
from kill.watcher import Watcher
from sound import healthy

POINTS = ["run:ask:2", "child:chunk:12", "child:end:2", "run:end:2", "answer:3"]
assert len(POINTS) == 5


class Seen:
    """What the client that saw it all has."""

    def __init__(self) -> None:
        self.chunks: list[Any] = []
        self.text = ""
        self.runs: Any = None
        self.messages: list[Any] = []
        self.connections = 0
        self.raw = Watcher()  # what a fresh client gets, frame by frame


async def ask_through_a_death(folder: Path, at: str, *more: str) -> Seen:
    seen = Seen()
    async with trio.open_nursery() as nursery:
        async with Server(folder, at, "--mounted", *more) as first:
            port = first.http.rpartition(":")[2]
            known = trio.Event()
            nursery.start_soon(ask, first.socket, seen, known)
            with trio.fail_after(20):
                await first.process.wait()
            assert first.process.returncode == -signal.SIGKILL, f"{at} was not reached"
            healthy(folder / "data")
        again = ("--mounted", "--port", port, *more)
        async with Server(folder, ":0", *again) as second:
            with trio.fail_after(40):
                await known.wait()
            async with connect(second.socket) as fresh:
                with trio.move_on_after(10):
                    await fresh.until(lambda a: runs_of(a) == seen.runs)
                assert runs_of(fresh) == seen.runs
            with trio.fail_after(10):
                await seen.raw.ask_for(second.socket, REQUEST, len(seen.runs))
            path = "/agents/assistant/default/get-messages"
            seen.messages = await trio.to_thread.run_sync(second.get, path)
    return seen


async def ask(url: str, seen: Seen, known: trio.Event) -> None:
    async with connect(url) as agent:
        answer = await agent.ask(QUESTION, request_id=REQUEST)
        async for chunk in answer:
            seen.chunks.append(chunk)
        assert answer.outcome == "completed"
        await agent.until(
            lambda a: all(r["status"] != "running" for r in runs_of(a).values())
        )
        seen.text, seen.runs = answer.text, runs_of(agent)
        seen.connections = agent.connections
    known.set()


def runs_of(agent: Any) -> dict[str, Any]:
    runs: dict[str, Any] = agent.runs.to_json()["runsById"]
    return runs


def check(folder: Path, seen: Seen) -> None:
    assert seen.connections >= 2
    assert len(seen.runs) >= 2
    assert {run["status"] for run in seen.runs.values()} == {"completed"}
    assert {
        run: len(told) for run, told in seen.raw.terminals.items()
    } == dict.fromkeys(seen.runs, 1)
    deltas = [c["delta"] for c in seen.chunks if c["type"] == "text-delta"]
    stored = seen.messages[-1]["parts"]
    said = "".join(p["text"] for p in stored if p["type"] == "text")
    assert "".join(deltas) == seen.text == said
    assert "queues.md:" in said
    assert [m["role"] for m in seen.messages] == ["user", "assistant"]
    replayed = seen.raw.chunks[REQUEST]
    assert [json.loads(replayed[n]) for n in range(len(replayed))] == seen.chunks
    assert max(starts(folder).values()) <= 2
    healthy(folder / "data")


@pytest.mark.slow
@pytest.mark.parametrize("at", POINTS)
async def test_a_killed_service_goes_on_where_it_was(at: str, tmp_path: Path) -> None:
    check(tmp_path, await ask_through_a_death(tmp_path, at))
