"""`make bench`, second half: trees that are large, and agents that sleep. Printed as in local.py.

    python tests/bench/scale.py [NAME …]

Everything on files, level `power`. Resident memory is what the process grew by, divided;
each of these figures is taken in a process of its own, so that none pays for another.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import process_time
from typing import Any

import trio
from figures import REPEATS, clock, put, rss_kb

from culet.kernel import Agent, Limits, open_kernel

SLEEPERS = 10_000


class Mute(Agent):
    """Says nothing, so it has no file."""

    async def ping(self) -> None: ...


class Writer(Agent):
    """Has a file with a row."""

    async def on_start(self) -> None:
        self.sql("CREATE TABLE IF NOT EXISTS t (v TEXT)")
        self.sql("INSERT INTO t (v) VALUES ('made')")

    async def ping(self) -> None: ...

    async def rows(self) -> int:
        return int(self.sql("SELECT count(*) AS n FROM t")[0].n)


KINDS: dict[str, type[Agent]] = {"Mute": Mute, "Writer": Writer}


class Root(Agent):
    async def ping(self) -> None: ...

    async def spawn_some(self, cls: str, prefix: str, count: int) -> None:
        for i in range(count):
            await self.dynamic_agents.get(KINDS[cls], f"{prefix}{i}")

    async def page(self, after: tuple[str, str] | None) -> int:
        return len(self.dynamic_agents.list(limit=100, after=after))

    async def wake(self, name: str) -> float:
        started = clock()
        child = await self.dynamic_agents.lookup(Writer, name)
        assert child is not None
        assert await child.rows() >= 1
        return clock() - started


class Gap(trio.abc.Instrument):
    """The longest time between two looks at the outside world."""

    def __init__(self) -> None:
        self.worst = 0.0
        self.since = clock()

    def after_io_wait(self, timeout: float) -> None:
        """A pass begins."""
        self.since = clock()

    def before_io_wait(self, timeout: float) -> None:
        """It is over."""
        self.worst = max(self.worst, clock() - self.since)


def kernel(folder: str, **more: Any) -> Any:
    return open_kernel(
        roots=[Root],
        facets=[Mute, Writer],
        storage=f"sqlite:{folder}",
        idle_s=more.pop("idle_s", 600.0),
        **more,
    )


async def sleepers(folder: str) -> None:
    """A root with 10,000 facets that sleep: open it, ask it, page through it."""
    await asleep(folder, "Mute", "")


async def sleepers_with_files(folder: str) -> None:
    """The same when each of them has written to a file of its own."""
    await asleep(folder, "Writer", "_with_files")


async def asleep(folder: str, cls: str, suffix: str) -> None:
    async with kernel(folder) as k:
        root = await k.get_agent(Root, "r")
        await root.spawn_some(cls, "f", SLEEPERS)
    opened, spent, memory, paged = [], [], [], []
    for _ in range(REPEATS):
        async with kernel(folder) as k:
            gc.collect()
            before, used = rss_kb(), process_time()
            started = clock()
            root = await k.get_agent(Root, "r")
            await root.ping()
            opened.append((clock() - started) * 1e3)
            spent.append((process_time() - used) * 1e3)
            memory.append(rss_kb() - before)
            started = clock()
            assert await root.page((cls, "f5000")) == 100
            paged.append((clock() - started) * 1e3)
    put(f"open_root_of_10000_sleepers{suffix}", "ms", opened, "power")
    put("its_cpu", "ms", spent, "power")
    put("its_memory", "kB", memory, "power")
    put("list_100_of_10000", "ms", paged, "power")


async def resident(folder: str, cls: str, count: int) -> float:
    async with kernel(folder) as k:
        root = await k.get_agent(Root, "r")
        await root.spawn_some(cls, "warm", 20)
        gc.collect()
        before = rss_kb()
        await root.spawn_some(cls, "f", count)
        gc.collect()
        return (rss_kb() - before) / count


async def resident_mute(folder: str) -> None:
    """A live facet that has no database open."""
    value = await resident(folder, "Mute", 4000)
    put("live_facet_without_database", "kB", [value], "power")


async def resident_writer(folder: str) -> None:
    """A live facet with its database open."""
    value = await resident(folder, "Writer", 400)
    put("live_facet_with_database", "kB", [value], "power")


async def wake(folder: str) -> None:
    """A call to a facet that sleeps, with a read of its own file."""
    async with kernel(folder) as k:
        root = await k.get_agent(Root, "r")
        await root.spawn_some("Writer", "f", 200)
    async with kernel(folder) as k:
        root = await k.get_agent(Root, "r")
        times = [await root.wake(f"f{i}") * 1e3 for i in range(200)]
    put("wake_sleeping_facet", "ms", times, "power")


async def abort(folder: str) -> None:
    """Abort a facet's subtree of 1,000 live facets: time, and the longest gap."""
    times, gaps = [], []
    limits = Limits(open_databases=2048)
    async with kernel(folder, limits=limits) as k:
        for r in range(REPEATS):
            root = await k.get_agent(Root, f"r{r}")
            await root.spawn_some("Writer", "f", 1000)
            (tree,) = [t for t in k.trees.values() if t.key.name == f"r{r}"]
            slots = [n.slot for n in tree.nodes.values() if n.parent is not None]
            gap = Gap()
            trio.lowlevel.add_instrument(gap)
            started = clock()
            receipt = await tree.abort(slots, "bench")
            times.append((clock() - started) * 1e3)
            trio.lowlevel.remove_instrument(gap)
            gaps.append(gap.worst * 1e3)
            assert len(receipt.nodes) == 1000
    put("abort_1000_live_facets", "ms", times, "power")
    put("its_longest_gap", "ms", gaps, "power")


SLEEPING_ROOTS = 10_000
QUIET_S = 12.0  # longer than the host loop rests between two looks at the clock


class Sleeper(Agent):
    """Is to be called tomorrow."""

    async def later(self) -> None:
        await self.schedule(86_400, "due")

    async def due(self, payload: Any, schedule: Any) -> None: ...


def hosts(folder: str, **more: Any) -> Any:
    return open_kernel(roots=[Sleeper], storage=f"sqlite:{folder}", **more)


async def make_roots(folder: str) -> None:
    """Make 10,000 roots with a schedule each, and let them sleep."""
    async with hosts(folder, idle_s=0.5, durability="process") as k:
        for i in range(SLEEPING_ROOTS):
            await (await k.get_agent(Sleeper, f"r{i}")).later()


class Passes(trio.abc.Instrument):
    """How often the loop has looked at the outside world."""

    def __init__(self) -> None:
        self.count = 0

    def before_io_wait(self, timeout: float) -> None:
        """One more."""
        self.count += 1


async def sleeping_roots(folder: str) -> None:
    """A host with 10,000 roots that sleep: its start, its memory, how quiet it is."""
    full = f"{folder}/full"
    subprocess.run([sys.executable, __file__, "--one", "make_roots", full], check=True)
    async with hosts(f"{folder}/empty"):
        gc.collect()
        empty = rss_kb()
    started, memory = [], []
    for r in range(REPEATS):
        begun = clock()
        async with hosts(full) as k:
            started.append((clock() - begun) * 1e3)
            opened: list[object] = []
            k.subscribe("root:open", lambda *event, to=opened: to.append(event))
            gc.collect()
            memory.append((rss_kb() - empty) / 1024)
            if r == 0:
                passes = Passes()
                trio.lowlevel.add_instrument(passes)
                await trio.sleep(QUIET_S)
                trio.lowlevel.remove_instrument(passes)
                put("passes_of_the_loop_in_12_s", "", [passes.count], "power")
            assert k.metrics()["sleeping_trees"] == SLEEPING_ROOTS
            assert opened == []
    put("start_with_10000_sleeping_roots", "ms", started, "power")
    put("its_memory_above_an_empty_kernel", "MiB", memory, "power")


FIBERS = 100


class Walker(Agent):
    """Has 100 fibers that never end by themselves."""

    async def walk(self) -> None:
        async def body() -> None:
            self.stash({"i": 0})
            await trio.sleep_forever()

        for _ in range(FIBERS):
            await self.fibers.start("stuck", body)
        await self.durable()


async def walk(folder: str) -> None:
    """Begin them and be killed; in the next life, say when the last one is recovered."""
    async with open_kernel(roots=[Walker], storage=f"sqlite:{folder}") as k:
        begun, ended = clock(), trio.Event()
        left = FIBERS

        def handled(*_event: object) -> None:
            nonlocal left
            left -= 1
            if not left:
                ended.set()

        k.subscribe("fiber:recovery:handled", handled)
        if not Path(folder, "begun").exists():
            Path(folder, "begun").touch()
            await (await k.get_agent(Walker, "w")).walk()
            os.kill(os.getpid(), signal.SIGKILL)
        with trio.fail_after(60):
            await ended.wait()
        sys.stdout.write(f"{(clock() - begun) * 1e3}\n")


async def fibers_recovered(folder: str) -> None:
    """A process that is killed with 100 fibers, until the next has recovered them all."""
    whole, opened = [], []
    env = {**os.environ, "PYTHONPYCACHEPREFIX": f"{folder}/compiled"}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # installed modules are compiled
    for r in range(REPEATS):
        command = [sys.executable, __file__, "--one", "walk", f"{folder}/{r}"]
        subprocess.run(command, check=False, env=env)
        started = clock()
        done = subprocess.run(
            command, check=True, capture_output=True, text=True, env=env
        )
        whole.append((clock() - started) * 1e3)
        opened.append(float(done.stdout))
    put("kernel_open_to_100_fibers_recovered", "ms", opened, "power")
    put("process_start_to_its_end_after_that", "ms", whole, "power")


SOCKETS = 2_000


async def hello(port: int, path: str) -> trio.SocketStream:
    """Open one WebSocket and wait until the agent said who it is."""
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    await stream.send_all(
        f"GET /agents/supervisor/s{path} HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n"
        "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode()
    )
    got = b""
    while b"cf_agent_identity" not in got:
        part = await stream.receive_some()
        assert part, got
        got += part
    return stream


async def sockets(folder: str) -> None:
    """2,000 sockets into 20 facets of one root, each open and quiet."""
    listening = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listening[0].socket.getsockname()[1]
    await listening[0].aclose()
    server = str(Path(__file__).with_name("peer_server.py"))
    command = [sys.executable, server, "--port", str(port), "--dir", folder]
    async with trio.open_nursery() as nursery:
        process = await nursery.start(trio.run_process, command)
        with trio.fail_after(30):
            while True:
                try:
                    held = [await hello(port, "")]
                    break
                except OSError:
                    await trio.sleep(0.1)
        facets = [f"/sub/job-runner/j{i}" for i in range(20)]
        held += [await hello(port, path) for path in facets]
        before = rss_kb(process.pid)
        started = clock()
        held += [await hello(port, facets[i % 20]) for i in range(SOCKETS)]
        took = clock() - started
        await trio.sleep(1)
        grown = rss_kb(process.pid) - before
        put("socket_resident", "kB", [grown / SOCKETS], "power")
        put("socket_open", "ms", [took / SOCKETS * 1e3], "power")
        for stream in held:
            await stream.aclose()
        nursery.cancel_scope.cancel()


BENCHES: dict[str, Callable[[str], Awaitable[None]]] = {
    "sleepers": sleepers,
    "sleepers_with_files": sleepers_with_files,
    "resident_mute": resident_mute,
    "resident_writer": resident_writer,
    "wake": wake,
    "abort": abort,
    "sockets": sockets,
    "sleeping_roots": sleeping_roots,
    "fibers_recovered": fibers_recovered,
}
PARTS: dict[str, Callable[[str], Awaitable[None]]] = {
    "make_roots": make_roots,
    "walk": walk,
}  # which others start in a process of its own, with a folder


def main() -> None:
    """Each in a process of its own."""
    if len(sys.argv) == 4 and sys.argv[1] == "--one":
        trio.run(PARTS[sys.argv[2]], sys.argv[3])
        return
    if len(sys.argv) == 3 and sys.argv[1] == "--one":
        with tempfile.TemporaryDirectory(prefix="culet-bench-") as folder:
            trio.run(BENCHES[sys.argv[2]], folder)
        return
    names = sys.argv[1:] or list(BENCHES)
    unknown = set(names) - set(BENCHES)
    if unknown:
        sys.exit(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(BENCHES)}")
    for name in names:
        subprocess.run([sys.executable, __file__, "--one", name], check=True)


if __name__ == "__main__":
    main()
