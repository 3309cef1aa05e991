"""`make bench`: one JSON object per figure on stdout, a table for people on stderr.

    python tests/bench/local.py [NAME …]

Medians of at least 5 repeats; `level` is the durability level of the tree. Probes of the
same run (fdatasync, a loop of 3 million steps) say how fast this machine is today.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import trio
from figures import REPEATS, clock, put, rss_kb

from culet.kernel import Agent, Due, Turn, open_kernel

LATE_MS: list[float] = []  # of what was called since the last look


class Job(Agent):
    initial_state = {"n": 0}

    async def on_start(self) -> None:
        self.sql("CREATE TABLE IF NOT EXISTS t (v TEXT)")
        self.sql("INSERT INTO t (v) VALUES ('made')")

    async def ping(self, n: int) -> int:
        return n

    async def due_soon(self, at_ms: int, n: int) -> None:
        when = datetime.fromtimestamp(at_ms / 1000, UTC)
        await self.schedules.many([Due(when, "told", i) for i in range(n)])

    async def told(self, payload: Any, schedule: Any) -> None:
        LATE_MS.append(time.time() * 1000 - schedule.at)

    async def on_turn(self, turn: Turn) -> AsyncIterator[dict[str, Any]]:
        for i in range(turn.input):
            yield {"type": "text-delta", "id": "t", "delta": f"w{i:06d} "}


class Root(Agent):
    async def on_start(self) -> None:
        self.sql("CREATE TABLE IF NOT EXISTS t (v TEXT)")

    async def spawn_some(self, prefix: str, n: int) -> None:
        for i in range(n):
            await (await self.dynamic_agents.get(Job, f"{prefix}{i}")).ping(i)

    async def warm(self, n: int) -> None:
        job = await self.dynamic_agents.get(Job, "warm")
        for i in range(n):
            await job.ping(i)

    async def run_some(self, runs: int, chunks: int) -> None:
        async def one() -> None:
            run = await self.run_agent_tool(Job, chunks)
            assert run.status == "completed", run

        async with trio.open_nursery() as nursery:
            for _ in range(runs):
                nursery.start_soon(one)

    async def feed_all(self) -> int:
        return len([entry async for entry in self.runs.feed()])

    async def fibers_some(self, n: int) -> None:
        async def body() -> None:
            self.stash({"i": 1})

        for _ in range(n):
            await self.run_fiber("bench", body)

    async def schedule_some(self, n: int) -> None:
        for i in range(n):
            await self.schedule(3600, "due", {"i": i})

    async def schedule_many(self, n: int) -> None:
        for _ in range(n // 1000):
            await self.schedules.many([Due(3600, "due", {"i": i}) for i in range(1000)])

    async def due(self, payload: Any, schedule: Any) -> None: ...

    async def due_soon(self, at_ms: int, n: int) -> None:
        when = datetime.fromtimestamp(at_ms / 1000, UTC)
        dues = [Due(when, "told", {"i": i}) for i in range(n)]
        for first in range(0, n, 1000):
            await self.schedules.many(dues[first : first + 1000])

    async def due_soon_below(self, at_ms: int, n: int, below: int) -> None:
        for i in range(below):
            await (await self.dynamic_agents.get(Job, f"due{i}")).due_soon(at_ms, n)

    async def told(self, payload: Any, schedule: Any) -> None:
        self.sql("INSERT INTO t (v) VALUES ('told')")
        LATE_MS.append(time.time() * 1000 - schedule.at)

    async def insert(self, n: int) -> None:
        for _ in range(n):
            self.sql("INSERT INTO t (v) VALUES (?)", "x" * 100)

    async def abort_one(self, name: str) -> float:
        started = clock()
        await self.dynamic_agents.abort(Job, name)
        return clock() - started


Bench = Callable[[Any, int], Awaitable[float]]


async def facets(root: Any, r: int) -> float:
    started = clock()
    await root.spawn_some(f"f{r}-", 100)
    return 100 / (clock() - started)


async def warm_calls(root: Any, r: int) -> float:
    await root.warm(10)
    started = clock()
    await root.warm(3000)
    return 3000 / (clock() - started)


async def run_one_chunk(root: Any, r: int) -> float:
    times = []
    for _ in range(20):
        started = clock()
        await root.run_some(1, 1)
        times.append(clock() - started)
    return statistics.median(times) * 1e3


async def run_1000_chunks(root: Any, r: int) -> float:
    started = clock()
    await root.run_some(1, 1000)
    return (clock() - started) * 1e3


async def runs_64x100(root: Any, r: int) -> float:
    started = clock()
    await root.run_some(64, 100)
    return 6400 / (clock() - started)


async def feed(root: Any, r: int) -> float:
    """Read what 64 runs have said, 100 chunks each; the first call lets them say it."""
    if r < 0:
        await root.run_some(64, 100)
    started = clock()
    count = await root.feed_all()
    assert count == 64 * 102, count
    return count / (clock() - started)


async def fibers(root: Any, r: int) -> float:
    started = clock()
    await root.fibers_some(300)
    return 300 / (clock() - started)


async def schedules(root: Any, r: int) -> float:
    started = clock()
    await root.schedule_some(500)
    return 500 / (clock() - started)


async def schedules_many(root: Any, r: int) -> float:
    started = clock()
    await root.schedule_many(5000)
    return 5000 / (clock() - started)


async def late(
    put: Callable[[int], Awaitable[None]], n: int, in_ms: int
) -> list[float]:
    """Put calls that are due then; return how many ms late each was."""
    LATE_MS.clear()
    await put(int(time.time() * 1000) + in_ms)
    while len(LATE_MS) < n:
        await trio.sleep(0.01)
    return sorted(LATE_MS)


async def due_1000_at_once(root: Any, r: int) -> float:
    return (await late(lambda at: root.due_soon(at, 1000), 1000, 700))[-1]


async def due_alone(root: Any, r: int) -> float:
    times = [(await late(lambda at: root.due_soon(at, 1), 1, 60))[0] for _ in range(10)]
    return statistics.median(times)


async def due_10000_over_100(root: Any, r: int) -> float:
    times = await late(lambda at: root.due_soon_below(at, 100, 100), 10_000, 3000)
    return times[int(len(times) * 0.99)]


async def due_10000_gap(root: Any, r: int) -> float:
    """The longest that the loop did nothing else meanwhile, ms."""
    gap, last = 0.0, clock()

    async def probe() -> None:
        nonlocal gap, last
        last = clock()
        while True:
            await trio.sleep(0.001)
            now = clock()
            if LATE_MS:
                gap = max(gap, now - last)
            last = now

    async with trio.open_nursery() as nursery:
        nursery.start_soon(probe)
        await due_10000_over_100(root, r)
        nursery.cancel_scope.cancel()
    return gap * 1e3


async def inserts(root: Any, r: int) -> float:
    started = clock()
    await root.insert(2000)
    return 2000 / (clock() - started)


async def inserts_64_in_flight(root: Any, r: int) -> float:
    count = 0
    until = clock() + 0.5

    async def lane() -> None:
        nonlocal count
        while clock() < until:
            await root.insert(1)
            count += 1

    started = clock()
    async with trio.open_nursery() as nursery:
        for _ in range(64):
            nursery.start_soon(lane)
    return count / (clock() - started)


async def abort_40_p99(root: Any, r: int) -> float:
    await root.spawn_some(f"a{r}-", 40)
    times = [await root.abort_one(f"a{r}-{i}") for i in range(40)]
    return max(times) * 1e3


async def live_facet_kb(root: Any, r: int) -> float:
    gc.collect()
    before = rss_kb()
    await root.spawn_some(f"m{r}-", 100)
    gc.collect()
    return (rss_kb() - before) / 100


# first of all, while the heap is small
BENCHES: dict[str, tuple[str, Bench]] = {
    "live_facet_resident": ("kB", live_facet_kb),
    "fresh_facets": ("facet/s", facets),
    "warm_calls": ("call/s", warm_calls),
    "run_one_chunk": ("ms", run_one_chunk),
    "run_1000_chunks": ("ms", run_1000_chunks),
    "runs_64x100_chunks": ("chunk/s", runs_64x100),
    "feed_64x100_chunks": ("entry/s", feed),
    "fibers_one_stash": ("fiber/s", fibers),
    "schedule_inserts": ("insert/s", schedules),
    "schedules_many": ("insert/s", schedules_many),
    "due_1000_all_done": ("ms late", due_1000_at_once),
    "due_alone": ("ms late", due_alone),
    "due_10000_over_100_p99": ("ms late", due_10000_over_100),
    "due_10000_over_100_gap": ("ms", due_10000_gap),
    "sql_inserts_one_call": ("row/s", inserts),
    "acked_inserts_64_in_flight": ("row/s", inserts_64_in_flight),
    "abort_40_facets_slowest": ("ms", abort_40_p99),
}


def probe_sync(folder: str) -> list[float]:
    """p50 of fdatasync over preallocated blocks, ms; five times."""
    path = os.path.join(folder, "probe")
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.pwrite(fd, b"\0" * (1 << 20), 0)
    os.fsync(fd)
    out = []
    for _ in range(REPEATS):
        times = []
        for i in range(60):
            os.pwrite(fd, b"x" * 4096, (i * 4096) % (1 << 20))
            started = clock()
            os.fdatasync(fd)
            times.append(clock() - started)
        out.append(statistics.median(times) * 1e3)
    os.close(fd)
    return out


def probe_loop() -> list[float]:
    """A loop of 3 million steps in a function, ms; five times."""

    def loop() -> int:
        total = 0
        for i in range(3_000_000):
            total += i
        return total

    out = []
    for _ in range(REPEATS):
        started = clock()
        loop()
        out.append((clock() - started) * 1e3)
    return out


async def measure(names: list[str], folder: str, level: Any) -> None:
    async with open_kernel(
        roots=[Root], facets=[Job], storage=f"sqlite:{folder}", durability=level
    ) as kernel:
        for name in names:
            unit, bench = BENCHES[name]
            root: Any = await kernel.get_agent(Root, name)
            await bench(root, -1)
            put(name, unit, [await bench(root, r) for r in range(REPEATS)], level)


def main() -> None:
    names = sys.argv[1:] or list(BENCHES)
    unknown = set(names) - set(BENCHES)
    if unknown:
        sys.exit(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(BENCHES)}")
    with tempfile.TemporaryDirectory(prefix="culet-bench-") as folder:
        put("probe_fdatasync_p50", "ms", probe_sync(folder), None)
        put("probe_loop_3m", "ms", probe_loop(), None)
        for level in ("power", "process"):
            trio.run(measure, names, os.path.join(folder, level), level)


if __name__ == "__main__":
    main()
