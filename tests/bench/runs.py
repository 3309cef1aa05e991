"""`make bench`, third part: agents as tools, over the wire. Printed as in local.py.

    python tests/bench/runs.py [NAME …]

The server is the one that the peer is compared with, in a process of its own, at level
`power`; children are chat agents (`Think` with a scripted model) unless a row says
otherwise. Memory is the server's peak of resident memory (VmHWM) above what it held
before. `RUNS=100` makes the rows about many runs smaller, `TIMES=5` those of a few
milliseconds shorter.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import trio
from figures import REPEATS, clock, put
from local import Job, Root
from wire import Caller, Counter, Server, caller, counter, serving

from culet.kernel import open_kernel

LEVEL: Final = "power"
RUNS: Final = int(os.environ.get("RUNS", "1000"))
TIMES: Final = int(os.environ.get("TIMES", "40"))  # of what takes milliseconds
LIVES: Final = min(3, REPEATS)  # of a process, for what a fresh one is needed
SECONDS: Final = float(os.environ.get("SECONDS", "10"))  # of a stream, before a kill
CHUNKS: Final = 50
FRAMES_OF_A_RUN: Final = 2 + 6  # its two ends; what Think says besides the text


def row(name: str, unit: str, values: list[float]) -> None:
    """Print one figure."""
    put(name, unit, values, LEVEL)


async def runs(client: Caller, kind: str, count: int, chunks: int) -> float:
    """Ask for so many runs at once; return seconds until their results and all text."""
    before, started = client.deltas, clock()
    results = await client.call("runTools", kind, count, {"chunks": chunks})
    over = clock()
    assert {r["status"] for r in results} == {"completed"}, results
    assert client.deltas - before == count * chunks
    return max(over, client.last_delta) - started


async def barriers(folder: str) -> None:
    """One run of one chunk inside the kernel: how much of it is waiting for the disk."""
    async with open_kernel(
        roots=[Root], facets=[Job], storage=f"sqlite:{folder}", durability=LEVEL
    ) as kernel:
        root: Any = await kernel.get_agent(Root, "r")
        await root.run_some(4, 1)
        (tree,) = kernel.trees.values()
        written: list[float] = []
        write = tree.store.write

        def timed(record: Any) -> None:
            started = clock()
            write(record)
            written.append(clock() - started)

        tree.store.write = timed  # type: ignore[method-assign]
        took, shares, records = [], [], []
        for _ in range(TIMES):
            await tree.durable()
            written.clear()
            started = clock()
            await root.run_some(1, 1)
            took.append(clock() - started)
            shares.append(sum(written) / took[-1] * 100)
            records.append(float(len(written)))
    row("run_one_chunk_inside", "ms", [t * 1e3 for t in took])
    row("its_records", "", records)
    row("their_share_writing_and_syncing", "%", shares)


async def one_run(folder: str) -> None:
    """One run, from the call of a client to its answer: of one chunk, of 1,000."""
    async with serving(folder, LEVEL) as server:
        for kind in ("think", "chat"):
            client = await caller(server, kind)
            await runs(client, kind, 4, 10)
            times = [await runs(client, kind, 1, 1) * 1e3 for _ in range(TIMES)]
            row(f"run_one_chunk_{kind}", "ms", times)
            rates = [1000 / await runs(client, kind, 1, 1000) for _ in range(REPEATS)]
            row(f"run_1000_chunks_{kind}", "chunk/s", rates)


async def many_runs(folder: str) -> None:
    """64 at once, to one client and to 20."""
    async with serving(folder, LEVEL) as server:
        client = await caller(server, "one")
        await runs(client, "think", 8, 10)
        rates = [256 / await lanes(client, 64, 256) for _ in range(REPEATS)]
        row("runs_started_64_in_parallel", "run/s", rates)
        rates = [6400 / await runs(client, "think", 64, 100) for _ in range(REPEATS)]
        row("runs_64x100_chunks_one_client", "chunk/s", rates)
        client = await caller(server, "twenty")
        await runs(client, "think", 8, 10)
        seen = 8 * (10 + FRAMES_OF_A_RUN)
        watchers = [await counter(server, "twenty") for _ in range(20)]
        for watcher in watchers:
            await watcher.until(seen)
        rates, costs = [], []
        for _ in range(REPEATS):
            seen += (frames := 64 * (100 + FRAMES_OF_A_RUN))
            cpu, started = server.cpu_s(), clock()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(runs, client, "think", 64, 100)
                for watcher in watchers:
                    nursery.start_soon(watcher.until, seen)
            rates.append(20 * frames / (clock() - started))
            costs.append((server.cpu_s() - cpu) / (20 * frames) * 1e6)
        row("frames_to_20_clients", "frame/s", rates)
        row("its_cpu_of_the_server", "us/frame", costs)


async def lanes(client: Caller, parallel: int, count: int) -> float:
    """Seconds for `count` runs of one chunk, `parallel` of them at any time."""
    started = clock()
    assert await client.call("runInLanes", "think", count, parallel, {"chunks": 1})
    return clock() - started


async def fill(server: Server, root: str, count: int, chunks: int) -> int:
    """Leave so many retained runs in a root; return how many frames they have."""
    client = await caller(server, root)
    for _ in range(count // 50):
        await runs(client, "think", 50, chunks)
    await client.stream.aclose()
    return count * (chunks + FRAMES_OF_A_RUN)


async def watch(server: Server, frames: int, took: list[float]) -> Counter:
    """Be a new client: how long until the last frame of the replay is here."""
    started = clock()
    client = await counter(server, "r")
    await client.until(frames)
    took.append(clock() - started)
    return client


async def replays(folder: str) -> None:
    """1,000 retained runs x 50 chunks, replayed to a new client, then to 20 at once."""
    async with serving(folder, LEVEL) as server:
        frames = await fill(server, "r", RUNS, CHUNKS)
    took, first, grown, many, of_many, left = [], [], [], [], [], []
    for r in range(LIVES):
        async with serving(folder, LEVEL) as server:  # nothing of them is in memory
            warm = await caller(server, f"warm{r}")
            await runs(warm, "think", 8, 10)
            idle = server.rss_kb()
            server.forget_peak()
            client = await watch(server, frames, first)
            grown.append((server.peak_kb() - idle) / 1024)
            await client.stream.aclose()
            for _ in range(2):
                client = await watch(server, frames, took)
                await client.stream.aclose()
            await trio.sleep(0.2)
            left.append((server.rss_kb() - idle) / 1024)
            server.forget_peak()
            started = clock()
            async with trio.open_nursery() as nursery:
                for _ in range(20):
                    nursery.start_soon(watch, server, frames, [])
            many.append(clock() - started)
            of_many.append((server.peak_kb() - idle) / 1024)
    many_of = f"{RUNS}x{CHUNKS}"
    row(f"replay_{many_of}_first_client", "s", first)
    row("its_memory_above_idle", "MiB", grown)
    row(f"replay_{many_of}_next_client", "s", took)
    row("kept_when_they_have_left", "MiB", left)
    row(f"replay_{many_of}_20_clients", "s", many)
    row("memory_of_20_above_idle", "MiB", of_many)


async def slow_readers(folder: str) -> None:
    """20 clients that ask for the replay and do not read it."""
    async with serving(folder, LEVEL) as server:
        await fill(server, "r", RUNS, CHUNKS)
    async with serving(folder, LEVEL) as server:
        warm = await caller(server, "warm")
        await runs(warm, "think", 8, 10)
        idle = server.rss_kb()
        server.forget_peak()
        held = [await counter(server, "r") for _ in range(20)]
        await trio.sleep(3)
        row("20_clients_that_do_not_read", "MiB", [(server.peak_kb() - idle) / 1024])
        for client in held:
            await client.stream.aclose()


async def killed(folder: str) -> None:
    """1,000 runs in mid-stream, kill -9: when the parent answers, when all are over."""
    up, answered, over, cpu = [], [], [], []
    for r in range(LIVES):
        async with serving(f"{folder}/{r}", LEVEL) as server:
            client = await caller(server, "r")
            until = time.time() * 1000 + SECONDS * 1000 + 10 * RUNS
            given = {"chunks": CHUNKS, "delayMs": 1000, "slowUntil": until}
            await client.call("startRuns", "think", RUNS, given)
            while client.deltas < RUNS:
                await client.call("ping")
                assert time.time() * 1000 < until, "too slow"
                await trio.sleep(0.1)
        await trio.sleep(max(0.0, until / 1000 - time.time()))
        async with serving(f"{folder}/{r}", LEVEL) as server:
            up.append(clock() - server.started)
            client = await caller(server, "r")
            await client.call("ping")
            cpu.append(server.cpu_s())
            answered.append(clock() - server.started)
            while True:
                counts = await client.call("runStatus")
                if set(counts) == {"completed"}:
                    break
                await trio.sleep(0.05)
            over.append(clock() - server.started)
            assert counts["completed"] == RUNS
    row(f"killed_with_{RUNS}_runs_listens", "s", up)
    row(f"killed_with_{RUNS}_runs_answers", "s", answered)
    row("its_cpu_until_it_answers", "s", cpu)
    row(f"killed_with_{RUNS}_runs_all_over", "s", over)


BENCHES: dict[str, Callable[[str], Awaitable[None]]] = {
    "barriers": barriers,
    "one_run": one_run,
    "many_runs": many_runs,
    "replays": replays,
    "slow_readers": slow_readers,
    "killed": killed,
}


def main() -> None:
    """All of them, or those that are named."""
    names = sys.argv[1:] or list(BENCHES)
    unknown = set(names) - set(BENCHES)
    if unknown:
        sys.exit(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(BENCHES)}")
    for name in names:
        with tempfile.TemporaryDirectory(prefix="culet-bench-") as folder:
            trio.run(BENCHES[name], folder)


if __name__ == "__main__":
    main()
