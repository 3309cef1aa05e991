"""`make bench`, fourth part: watchers in number. Printed as in local.py.

    python tests/bench/crowd.py [NAME …]

The server is that of runs.py, in a process of its own, at level `power`; the crowd is one
process more, and who measures how late live frames come is a third: it pays for nobody.
Every client checks that it gets each frame once and in order. Memory is the server's peak
of resident memory above what it held before; a pass is one of its loop's, by the clock
and in CPU time: on a machine that has other work only the second is a fact.
`WATCHERS=200 CLIENTS=50 CHUNKS=500 SLOW=5` make it smaller.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

import msgspec
import trio
from figures import REPEATS, clock, put
from wire import Caller, Server, caller, opened, serving

LEVEL: Final = "power"
WATCHERS: Final = int(os.environ.get("WATCHERS", "2000"))
CLIENTS: Final = int(os.environ.get("CLIENTS", "500"))  # that come back at once
CHUNKS: Final = int(os.environ.get("CHUNKS", "5000"))  # that each of them replays
SLOW: Final = int(os.environ.get("SLOW", "20"))
GOOD: Final = 20  # beside the slow ones
LIVES: Final = min(3, REPEATS)  # of a process, for what a fresh one is needed
TEN: Final = 10  # runs at once, for what is stored before it is sent
LIVE_S: Final = 60.0  # at most, of the live run beside a replay
BUFFER: Final = 4 << 10
OPENING: Final = 64  # connections of the crowd that are opened at any time
_PART: Final = 64 << 10
_NUMBER: Final = re.compile(rb'"sequence":(\d+),')
_STAMP: Final = re.compile(rb'delta\\":\\"@(\d{20}) ')  # not in the summary of a run


def row(name: str, unit: str, values: list[float], level: str = LEVEL) -> None:
    """Print one figure."""
    put(name, unit, values, level)


def worst(values: list[float], share: float = 0.99) -> float:
    """Return the value that so large a share of them does not exceed."""
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


class Watcher:
    """Reads what one client is sent, and checks that the frames of its run are in order."""

    def __init__(self, stream: trio.SocketStream, rest: bytes) -> None:
        self.stream, self.next, self.first = stream, 0, 0.0
        self._tail = b""
        self._take(rest)

    def _take(self, part: bytes) -> None:
        data, end = self._tail + part, 0
        for found in _NUMBER.finditer(data):
            end = found.end()
            number = int(found[1])
            assert number == self.next, f"frame {number} where {self.next} was due"
            self.next += 1
        if end and not self.first:
            self.first = clock()
        self._tail = data[max(end, len(data) - 40) :]

    async def until(self, frames: int) -> None:
        """Read until so many frames of the run have come, of as many as there are."""
        while self.next < frames:
            part = await self.stream.receive_some(_PART)
            assert part, f"the server closed after {self.next} frames"
            self._take(bytes(part))
        assert self.next == frames

    async def again(self, frames: int) -> None:
        """Read one run more, which begins at 0 as all do."""
        self.next = 0
        await self.until(frames)


async def watchers(server: Server, root: str, count: int) -> list[Watcher]:
    """Open so many clients, some at any time."""
    out: list[Watcher] = []
    places = trio.CapacityLimiter(OPENING)

    async def one() -> None:
        async with places:
            out.append(Watcher(*await opened(server.port, root)))

    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(one)
    return out


async def tell(client: Caller, count: int, **given: Any) -> None:
    """Ask for so many runs of `Teller` at once; return when they are over."""
    results = await client.call("runTools", "tell", count, given)
    assert {r["status"] for r in results} == {"completed"}, results


async def start(server: Server, root: str, **given: Any) -> None:
    """Start a run by a client that leaves at once."""
    client = await caller(server, root)
    await client.call("startRuns", "tell", 1, given)
    await client.stream.aclose()


async def left(watching: list[Watcher]) -> None:
    """Close them all."""
    for watcher in watching:
        await watcher.stream.aclose()
    await trio.sleep(0.3)


class Passes:
    """The longest passes of the server's loop, under names of their own."""

    def __init__(self, other: Caller) -> None:
        self._other = other
        self._lasted: dict[str, list[float]] = {}
        self._worked: dict[str, list[float]] = {}

    async def note(self, name: str = "") -> None:
        """Note the longest since the last note; without a name, begin anew."""
        lasted, worked = await self._other.call("longestPass")
        if name:
            self._lasted.setdefault(name, []).append(lasted)
            self._worked.setdefault(name, []).append(worked)

    def rows(self) -> None:
        """Print them."""
        for name, values in self._lasted.items():
            row(f"longest_pass_{name}", "ms", values)
            row(f"longest_pass_{name}_cpu", "ms", self._worked[name])


async def one_run(folder: str) -> None:
    """Many watchers of one parent, while a run of it streams 1,000 chunks."""
    grown, open_, cpu, took, rest = [], [], [], [], 0.0
    async with serving(folder, LEVEL) as server:
        other = await caller(server, "other")
        await tell(other, 1, chunks=1000)
        passes = Passes(other)
        for r in range(REPEATS):
            idle, begun = server.rss_kb(), server.busy_s()
            await passes.note()
            watching = await watchers(server, f"r{r}", WATCHERS)
            await passes.note("as_watchers_come")
            open_.append((server.busy_s() - begun) / WATCHERS * 1e3)
            here = server.rss_kb()
            rest = rest or (here - idle) / WATCHERS  # later ones get what is free
            server.forget_peak()
            begun, started = server.busy_s(), clock()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(start, server, f"r{r}", chunks=1000))
                for watcher in watching:
                    nursery.start_soon(watcher.until, 1002)
            took.append(clock() - started)
            cpu.append((server.busy_s() - begun) / WATCHERS / 1002 * 1e6)
            grown.append((server.peak_kb() - here) / 1024)
            await passes.note("as_they_are_told")
            await left(watching)
            await passes.note("as_they_leave")
    row(f"open_{WATCHERS}_watchers_each", "ms CPU", open_)
    row("a_watcher_at_rest", "kB", [rest])
    row(f"1000_chunks_to_{WATCHERS}_watchers", "s", took)
    row("its_cpu_a_frame_delivered", "us", cpu)
    row("its_memory_above_them_at_rest", "MiB", grown)
    passes.rows()


async def come_back(server: Server, firsts: list[float], ends: list[float]) -> None:
    """Connect, be sent the whole history of one run, leave."""
    started = clock()
    watcher = Watcher(*await opened(server.port, "r"))
    await watcher.until(CHUNKS + 2)
    firsts.append(watcher.first - started)
    ends.append(clock() - started)
    await watcher.stream.aclose()


class Live:
    """A process that watches one root which streams, and says how late its frames are."""

    def __init__(self, server: Server) -> None:
        command = [sys.executable, __file__, "--live", str(server.port)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"

    async def delays(self) -> list[float]:
        """End it; return milliseconds between word and receipt."""
        out, _ = await trio.to_thread.run_sync(self._process.communicate, b"end\n")
        delays: list[float] = msgspec.json.decode(out)
        return delays


async def live(port: int) -> None:
    """Be that process, until something comes on its input."""
    stream, _rest = await opened(port, "live")
    delays: list[float] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stamps, stream, delays)
        while not delays:
            await trio.sleep(0.01)
        delays.clear()
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await trio.to_thread.run_sync(sys.stdin.readline)
        nursery.cancel_scope.cancel()
    sys.stdout.write(msgspec.json.encode(delays).decode())


async def stamps(stream: trio.SocketStream, delays: list[float]) -> None:
    """Note of each chunk how long ago it was said, in ms."""
    tail = b""
    while part := bytes(await stream.receive_some(_PART)):
        now, data, end = clock(), tail + part, 0
        for found in _STAMP.finditer(data):
            end = found.end()
            delays.append((now - int(found[1]) / 1e9) * 1e3)
        tail = data[max(end, len(data) - 40) :]


async def come_backs(folder: str) -> None:
    """500 clients at once, each replays 5,000 chunks, while another root streams."""
    first, last, late, alone, grown, cpu = ([] for _ in range(6))
    async with serving(folder, LEVEL) as server:
        client = await caller(server, "r")
        await tell(client, 1, chunks=CHUNKS)
        await client.stream.aclose()
    all_passes: dict[str, list[float]] = {}
    for _ in range(LIVES):
        async with serving(folder, LEVEL) as server:
            other = await caller(server, "other")
            await tell(other, 1, chunks=1000)
            chunks = int(100 * LIVE_S)
            await start(server, "live", chunks=chunks, perS=100)
            watching = Live(server)
            await trio.sleep(1)
            alone.append(worst(await watching.delays()))
            watching = Live(server)
            idle = server.rss_kb()
            server.forget_peak()
            await other.call("longestPass")
            firsts: list[float] = []
            ends: list[float] = []
            begun = server.busy_s()
            async with trio.open_nursery() as nursery:
                for _ in range(CLIENTS):
                    nursery.start_soon(come_back, server, firsts, ends)
            cpu.append((server.busy_s() - begun) / CLIENTS / CHUNKS * 1e6)
            late.append(worst(await watching.delays()))
            first.append(worst(firsts))
            last.append(max(ends))
            grown.append((server.peak_kb() - idle) / 1024)
            lasted, worked = await other.call("longestPass")
            all_passes.setdefault("longest_pass_of_replays", []).append(lasted)
            all_passes.setdefault("longest_pass_of_replays_cpu", []).append(worked)
    row(f"{CLIENTS}_replay_{CHUNKS}_first_byte_p99", "s", first)
    row("the_last_of_them_has_all", "s", last)
    row("its_cpu_a_frame_replayed", "us", cpu)
    row("its_memory_above_idle", "MiB", grown)
    row("live_beside_it_p99", "ms", late)
    row("live_without_it_p99", "ms", alone)
    for name, values in all_passes.items():
        row(name, "ms", values)


async def slow_readers(folder: str) -> None:
    """20 clients that read, with and without as many beside them that never do."""
    frames = 4 * CHUNKS + 2
    took: dict[bool, list[float]] = {False: [], True: []}
    cpu: dict[bool, list[float]] = {False: [], True: []}
    grown = []
    async with serving(folder, LEVEL) as server:
        for r in range(2 * REPEATS + 1):
            root, slow = f"r{r}", r % 2 == 1
            good = await watchers(server, root, GOOD)
            idle = server.rss_kb()
            held = [
                (await opened(server.port, root, BUFFER))[0]
                for _ in range(SLOW if slow else 0)
            ]
            server.forget_peak()
            begun, started = server.busy_s(), clock()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(start, server, root, chunks=4 * CHUNKS))
                for watcher in good:
                    nursery.start_soon(watcher.until, frames)
            if r:  # the first is for warmth
                took[slow].append(clock() - started)
                cpu[slow].append((server.busy_s() - begun) / GOOD / frames * 1e6)
            if slow:
                grown.append((server.peak_kb() - idle) / 1024)
            for stream in held:
                await stream.aclose()
            await left(good)
    row(f"{GOOD}_readers_of_{4 * CHUNKS}_chunks", "s", took[False])
    row(f"beside_{SLOW}_that_do_not_read", "s", took[True])
    pairs = zip(took[True], took[False], strict=True)
    row("their_time_over_that_without", "", [a / b for a, b in pairs])
    row("their_cpu_a_frame", "us", cpu[False])
    row("the_least_beside_over_that_without", "", [min(cpu[True]) / min(cpu[False])])
    row("memory_of_those_that_do_not_read", "MiB", grown)


async def stored_first(folder: str) -> None:
    """Ten runs of chunks of 200 bytes: how many a second, and how late at 5,000/s."""
    late: dict[str, list[float]] = {"process": [], "power": []}
    rates, cpu = [], []
    for r in range(LIVES):
        for level in late:
            async with serving(f"{folder}/{level}{r}", level) as server:
                client = await caller(server, "r")
                await tell(client, 1, chunks=100)
                if level == LEVEL:
                    for _ in range(REPEATS):
                        begun, started = server.busy_s(), clock()
                        await tell(client, TEN, chunks=CHUNKS)
                        rates.append(TEN * CHUNKS / (clock() - started))
                        cpu.append((server.busy_s() - begun) / TEN / CHUNKS * 1e6)
                await client.stream.aclose()
                late[level].append(worst(await paced(server)))
    row(f"{TEN}_runs_of_200_bytes_stored_and_sent", "chunk/s", rates)
    row("its_cpu_a_chunk", "us", cpu)
    for level, values in late.items():
        row(f"5000_a_second_delay_p99_{level}", "ms", values, level)
    pairs = zip(late["power"], late["process"], strict=True)
    row("its_added_delay_p99", "ms", [a - b for a, b in pairs])


async def paced(server: Server) -> list[float]:
    """Return the delays of ten runs that together say 5,000 chunks a second."""
    delays: list[float] = []
    stream, _rest = await opened(server.port, "paced")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stamps, stream, delays)
        client = await caller(server, "paced")
        await tell(client, TEN, chunks=max(CHUNKS // 4, 250), perS=5000 / TEN)
        nursery.cancel_scope.cancel()
    await client.stream.aclose()
    await stream.aclose()
    return delays


BENCHES: Final[dict[str, Callable[[str], Awaitable[None]]]] = {
    "one_run": one_run,
    "come_backs": come_backs,
    "slow_readers": slow_readers,
    "stored_first": stored_first,
}


def main() -> None:
    """All of them, or those that are named."""
    if len(sys.argv) == 3 and sys.argv[1] == "--live":
        trio.run(live, int(sys.argv[2]))
        return
    names = sys.argv[1:] or list(BENCHES)
    unknown = set(names) - set(BENCHES)
    if unknown:
        sys.exit(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(BENCHES)}")
    for name in names:
        with tempfile.TemporaryDirectory(prefix="culet-bench-") as folder:
            trio.run(BENCHES[name], folder)


if __name__ == "__main__":
    main()
