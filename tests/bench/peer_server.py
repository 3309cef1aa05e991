"""The server that the peer benchmark drives; see peer/README.md for what it must expose.

python tests/bench/peer_server.py --port 8787 --dir DIR [--level power|process]
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
import trio

from culet.adapters import AIChatAgent, Think
from culet.adapters.model import Finish, ModelEvent, ModelRequest, TextDelta
from culet.kernel import Agent, Limits, open_kernel, rpc
from culet.kernel.clock import SystemClock
from culet.web import create_app, serve

CLOCK = SystemClock()


class Passes(trio.abc.Instrument):
    """The longest pass of the loop since somebody asked: its time, and its CPU time."""

    def __init__(self) -> None:
        self._worst = self._worst_cpu = 0
        self._since, self._cpu = time.perf_counter_ns(), time.thread_time_ns()

    def after_io_wait(self, timeout: float) -> None:
        self._since, self._cpu = time.perf_counter_ns(), time.thread_time_ns()

    def before_io_wait(self, timeout: float) -> None:
        self._worst = max(self._worst, time.perf_counter_ns() - self._since)
        self._worst_cpu = max(self._worst_cpu, time.thread_time_ns() - self._cpu)

    def take(self) -> list[float]:
        took = [self._worst / 1e6, self._worst_cpu / 1e6]
        self._worst = self._worst_cpu = 0
        return took


PASSES = Passes()


class Input(msgspec.Struct, rename="camel"):
    chunks: int
    delay_ms: float = 0
    slow_until: float = 0
    size: int = 200  # of a chunk of `Teller`, bytes
    per_s: float = 0  # chunks of `Teller`; 0: as fast as they are stored


async def deltas(given: Input, start: int = 0) -> AsyncIterator[str]:
    for i in range(start, given.chunks):
        if given.delay_ms and CLOCK.now_ms() < given.slow_until:
            await trio.sleep(given.delay_ms / 1000)
        yield f"w{i:06d} "


class Scripted:
    """A model that streams what the input asks for, from the partial on."""

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        given = msgspec.json.decode(request.messages[-1].content, type=Input)
        async for text in deltas(given, len(request.partial) // 8):
            yield TextDelta(text)
        yield Finish("stop")


def as_text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


class ChatWriter(AIChatAgent):
    def format_agent_tool_input(self, input: Any, request: Any) -> Any:  # noqa: A002
        return as_text(input)

    async def on_chat_message(self, turn: Any) -> AsyncIterator[dict[str, Any]]:
        given = msgspec.json.decode(turn.messages[-1]["parts"][0]["text"], type=Input)
        said = len(turn.text) // 8
        if not said:
            yield {"type": "start-step"}
            yield {"type": "text-start", "id": "t"}
        async for text in deltas(given, said):
            yield {"type": "text-delta", "id": "t", "delta": text}
        yield {"type": "text-end", "id": "t"}
        yield {"type": "finish-step"}
        yield {"type": "finish", "finishReason": "stop"}


class ThinkWriter(Think):
    model = Scripted()

    def format_agent_tool_input(self, input: Any, request: Any) -> Any:  # noqa: A002
        return as_text(input)


class Teller(Agent):
    """Says when it said it, in chunks of one size, at a pace."""

    async def on_turn(self, turn: Any) -> AsyncIterator[dict[str, Any]]:
        given = msgspec.convert(turn.input, Input)
        pad = "." * (given.size - len(as_text(stamped(""))))
        begun = trio.current_time()
        for i in range(given.chunks):
            if given.per_s:
                await trio.sleep_until(begun + i / given.per_s)
            yield stamped(pad)


def stamped(pad: str) -> dict[str, Any]:
    """Return a chunk with the time of the machine's clock, which clients share."""
    text = f"@{time.perf_counter_ns():020d} {pad}"
    return {"type": "text-delta", "id": "t", "delta": text}


class JobRunner(Agent):
    initial_state = {"n": 0}

    async def on_start(self) -> None:
        self.sql("CREATE TABLE IF NOT EXISTS started (at INTEGER)")
        self.sql("INSERT INTO started (at) VALUES (?)", CLOCK.now_ms())

    @rpc
    async def ping(self, x: Any = None) -> Any:
        return "pong" if x is None else x


KINDS: dict[str, type[Agent]] = {
    "chat": ChatWriter,
    "think": ThinkWriter,
    "tell": Teller,
}


async def each(n: int, parallel: int, fn: Callable[[int], Awaitable[None]]) -> int:
    todo = iter(range(n))

    async def lane() -> None:
        for i in todo:
            await fn(i)

    async with trio.open_nursery() as nursery:
        for _ in range(min(parallel, n)):
            nursery.start_soon(lane)
    return n


class Supervisor(Agent):
    initial_state = {"n": 0}

    async def on_start(self) -> None:
        self.sql("CREATE TABLE IF NOT EXISTS bench (id INTEGER PRIMARY KEY, v TEXT)")
        self.sql("CREATE TABLE IF NOT EXISTS fired (id INTEGER PRIMARY KEY, v TEXT)")
        self.fired = 0
        self.target = 0
        self.recovered = 0

    @rpc
    async def ping(self, x: Any = None) -> Any:
        return "pong" if x is None else x

    @rpc(name="spawnJobs")
    async def spawn_jobs(self, prefix: str, n: int, parallel: int = 1) -> int:
        async def one(i: int) -> None:
            job = await self.dynamic_agents.get(JobRunner, f"{prefix}-{i}")
            await job.ping(i)

        return await each(n, parallel, one)

    @rpc(name="warmPings")
    async def warm_pings(self, name: str, n: int, parallel: int = 1) -> int:
        job = await self.dynamic_agents.get(JobRunner, name)

        async def one(i: int) -> None:
            await job.ping(i)

        return await each(n, parallel, one)

    @rpc(name="runTools")
    async def run_tools(self, kind: str, k: int, given: dict[str, Any]) -> list[Any]:
        out: list[Any] = [None] * k

        async def one(i: int) -> None:
            run = await self.run_agent_tool(KINDS[kind], given)
            out[i] = {
                "status": run.status,
                "len": len(run.summary or ""),
                "error": run.error,
            }

        await each(k, k, one)
        return out

    @rpc(name="runInLanes")
    async def run_in_lanes(
        self, kind: str, n: int, parallel: int, given: dict[str, Any]
    ) -> int:
        async def one(i: int) -> None:
            run = await self.run_agent_tool(KINDS[kind], given)
            assert run.status == "completed", run

        return await each(n, parallel, one)

    @rpc(name="startRuns")
    async def start_runs(self, kind: str, k: int, given: dict[str, Any]) -> int:
        for _ in range(k):
            await self.run_agent_tool(KINDS[kind], given, detached=True)
        return k

    @rpc(name="longestPass")
    async def longest_pass(self) -> list[float]:
        """Of the loop, since the last call: ms by the clock, ms of CPU time."""
        return PASSES.take()

    @rpc(name="runStatus")
    async def run_status(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for run in self.runs.list():
            counts[run.status] = counts.get(run.status, 0) + 1
        return counts

    @rpc
    async def fanout(self, n: int, size: int) -> int:
        pad = "x" * size
        for i in range(n):
            self.broadcast(as_text({"type": "bench", "i": i, "pad": pad}))
            await trio.lowlevel.checkpoint()
        return n

    @rpc
    async def bump(self, n: int) -> int:
        for _ in range(n):
            self.set_state({"n": self.state["n"] + 1})
        return int(self.state["n"])

    @rpc(name="scheduleMany")
    async def schedule_many(self, n: int, at_ms: int) -> int:
        self.fired, self.target = 0, n
        self.sql("DELETE FROM fired")
        at = datetime.fromtimestamp(at_ms / 1000, UTC)
        for i in range(n):
            await self.schedule(at, "on_due", {"i": i})
        return n

    async def on_due(self, payload: dict[str, int], schedule: Any) -> None:
        self.sql("INSERT INTO fired (v) VALUES (?)", str(payload["i"]))
        self.fired += 1
        if self.fired == self.target:
            self.broadcast(as_text({"type": "bench-due", "n": self.fired}))

    @rpc(name="dueCount")
    async def due_count(self) -> int:
        return int(self.sql("SELECT count(*) AS n FROM fired")[0].n)

    @rpc(name="fibers")
    async def fibers_run(self, n: int, stashes: int) -> int:
        async def body() -> None:
            for s in range(stashes):
                self.stash({"s": s})

        for _ in range(n):
            await self.run_fiber("bench", body)
        return n

    @rpc(name="startFibers")
    async def start_fibers(self, n: int) -> int:
        async def body() -> None:
            self.stash({"i": 0})
            await trio.sleep(600)

        for _ in range(n):
            await self.fibers.start("stuck", body)
        return n

    async def on_fiber_recovered(self, ctx: Any) -> None:
        if ctx.name == "stuck":
            self.recovered += 1

    @rpc(name="recoveredCount")
    async def recovered_count(self) -> int:
        return self.recovered

    @rpc(name="insertOne")
    async def insert_one(self, v: str) -> bool:
        self.sql("INSERT INTO bench (v) VALUES (?)", v)
        return True

    @rpc(name="insertMany")
    async def insert_many(self, n: int, v: str) -> int:
        with self.transaction():
            for _ in range(n):
                self.sql("INSERT INTO bench (v) VALUES (?)", v)
        return n

    @rpc(name="rowCount")
    async def row_count(self) -> int:
        return int(self.sql("SELECT count(*) AS n FROM bench")[0].n)


async def main(port: int, folder: str, level: Any) -> None:
    trio.lowlevel.add_instrument(PASSES)
    async with open_kernel(
        roots=[Supervisor],
        facets=[JobRunner, ChatWriter, ThinkWriter, Teller],
        storage=f"sqlite:{folder}",
        durability=level,
        limits=Limits(jobs_at_once=1024, connections_per_address=4000),
    ) as kernel:
        await serve(create_app(kernel), bind=f"127.0.0.1:{port}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--dir", required=True)
    parser.add_argument("--level", default="power", choices=["power", "process"])
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    trio.run(main, args.port, args.dir, args.level)
