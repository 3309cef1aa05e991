"""`kill -9` at random moments of a busy server, one life after the other on one folder.

The clients keep a history of what they were told. After each restart all of it is
there, whole; every run has one terminal, the same for ever; the doctor is content.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from trio_websocket import ConnectionClosed, HandshakeError

from sound import healthy
from web.serving import Server

APP = Path(__file__).with_name("killed.py")
GONE = (ConnectionClosed, HandshakeError, OSError, trio.TooSlowError)
TERMINALS = {"finished", "error", "aborted", "interrupted"}


class History:
    """What was told, and what was asked without an answer (which may be or not)."""

    def __init__(self) -> None:
        self.number = 0
        self.notes: list[str] = []
        self.maybe_notes: set[str] = set()
        self.runs: dict[str, str] = {}  # ended
        self.begun: set[str] = set()
        self.fibers: set[str] = set()
        self.later: set[str] = set()
        self.boxes: dict[str, list[str]] = {}
        self.unsure: set[str] = set()  # boxes with an operation that was not answered
        self.state = 0
        self.asked_state = 0
        self.terminals: dict[str, str] = {}
        self.frames: dict[tuple[str, int], str] = {}
        self.told = 0

    def next(self) -> int:
        self.number += 1
        return self.number


@asynccontextmanager
async def life(folder: Path) -> AsyncIterator[tuple[Server, Any]]:
    """One life of the server; killed at the end."""
    with (folder / "stderr.txt").open("a") as errors:
        process = await trio.lowlevel.open_process(
            [sys.executable, str(APP), str(folder / "data")],
            stdout=subprocess.PIPE,
            stderr=errors,
        )
    assert process.stdout is not None
    try:
        line = b""
        while not line.endswith(b"\n"):
            part = await process.stdout.receive_some(200)
            assert part, (folder / "stderr.txt").read_text()[-3000:]
            line += part
        yield Server(line.decode().strip().rstrip("/"), None), process  # type: ignore[arg-type]
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
            await process.stdout.aclose()


class Asker:
    """One client that asks for one thing after the other."""

    def __init__(self, told: History, chance: random.Random, who: int) -> None:
        self.told, self.chance, self.who = told, chance, who

    async def run(self, server: Server) -> None:
        try:
            async with server.connect() as client:
                self.client = client
                await client.hello()
                while True:
                    await self.chance.choice(
                        [self.note, self.count, self.later, self.work, self.begin,
                         self.fiber, self.put, self.put, self.drop, self.stop]
                    )()  # fmt: skip
        except GONE:
            pass
        except BaseExceptionGroup as group:
            if group.split(GONE)[1] is not None:
                raise

    async def ask(self, method: str, *args: Any) -> Any:
        frame = await self.client.call(method, *args)
        assert frame["success"], frame
        self.told.told += 1
        return frame.get("result")

    async def note(self) -> None:
        text = f"n{self.told.next()}"
        self.told.maybe_notes.add(text)
        await self.ask("note", text)
        self.told.notes.append(text)

    async def count(self) -> None:
        if self.who:  # one writer: then the last that was told is a lower bound
            return
        n = self.told.asked_state = self.told.next()
        await self.ask("count", n)
        self.told.state = n

    async def later(self) -> None:
        text = f"l{self.told.next()}"
        await self.ask("later", self.chance.random() * 0.2, text)
        self.told.later.add(text)

    async def work(self) -> None:
        run = f"w{self.told.next()}"
        self.told.runs[run] = await self.ask("work", run, self.chance.randint(1, 30))

    async def begin(self) -> None:
        run = f"b{self.told.next()}"
        await self.ask("begin", run, self.chance.randint(1, 60))
        self.told.begun.add(run)

    async def stop(self) -> None:
        if self.told.begun:
            run = self.chance.choice(sorted(self.told.begun))
            if await self.ask("stop", run) == "aborted":
                self.told.runs[run] = "aborted None"

    async def fiber(self) -> None:
        fiber = f"f{self.told.next()}"
        await self.ask("fiber", fiber, self.chance.randint(1, 60))
        self.told.fibers.add(fiber)

    async def put(self) -> None:
        name, text = f"{self.who}-{self.chance.randint(1, 4)}", f"p{self.told.next()}"
        was_unsure = name in self.told.unsure  # since a former life
        self.told.unsure.add(name)
        await self.ask("put", name, text)
        if not was_unsure:
            self.told.unsure.discard(name)
            self.told.boxes.setdefault(name, []).append(text)

    async def drop(self) -> None:
        name = f"{self.who}-{self.chance.randint(1, 4)}"
        self.told.unsure.add(name)
        await self.ask("drop", name)
        self.told.unsure.discard(name)
        self.told.boxes.pop(name, None)


async def watch(server: Server, told: History) -> None:
    """Keep every frame of every run; none may change, no run may end twice."""
    try:
        async with server.connect() as client:
            while True:
                note_frame(told, json.loads(await client.socket.get_message()))
    except GONE:
        pass
    except BaseExceptionGroup as group:
        if group.split(GONE)[1] is not None:
            raise


def note_frame(told: History, frame: Any) -> None:
    if frame["type"] != "agent-tool-event":
        return
    event = frame["event"]
    run, text = event["runId"], json.dumps(event, sort_keys=True)
    assert told.frames.setdefault((run, frame["sequence"]), text) == text
    if event["kind"] in TERMINALS:
        assert told.terminals.setdefault(run, text) == text


async def compare(server: Server, told: History) -> None:
    """All that was told is there."""
    async with server.connect() as client:
        await client.hello()
        with trio.fail_after(20):
            while True:
                frame = await client.call("told")
                assert frame["success"], frame
                now = frame["result"]
                running = [r for r, s in now["runs"].items() if s.startswith("running")]
                open_fibers = [f for f, s in now["fibers"].items() if s[0] == "running"]
                if not running and not open_fibers and not now["owed"]:
                    break
                await trio.sleep(0.02)
        there = now["notes"]
        assert set(told.notes) <= set(there) <= told.maybe_notes
        assert len(set(there)) == len(there)
        assert told.state <= now["state"] <= told.asked_state
        assert told.later <= set(now["fired"])
        for run, how in told.runs.items():
            assert now["runs"][run] == how
        assert told.begun <= set(now["runs"])
        assert {s.split()[0] for s in now["runs"].values()} <= {"completed", "aborted"}
        assert told.fibers <= set(now["fibers"])
        assert {s[0] for s in now["fibers"].values()} <= {"completed"}
        for name, texts in told.boxes.items():
            if name not in told.unsure:
                assert now["boxes"][name] == texts
        for name, texts in now["boxes"].items():
            if name not in told.unsure:
                assert told.boxes[name] == texts
        for name in told.unsure:  # from now on we know
            told.boxes.pop(name, None)
            if name in now["boxes"]:
                told.boxes[name] = now["boxes"][name]
        told.unsure.clear()
        await every_frame(server, told, now["runs"])


async def every_frame(server: Server, told: History, runs: dict[str, str]) -> None:
    """A fresh client sees each run whole, as those saw it who were there."""
    fresh = History()
    async with server.connect() as client:
        while len(fresh.terminals) < len(runs):
            frame = await client.frame()
            note_frame(fresh, frame)
            note_frame(told, frame)
    for run in runs:
        numbers = sorted(n for r, n in fresh.frames if r == run)
        assert numbers == list(range(len(numbers))), run


async def kills(folder: Path, count: int, seed: int) -> History:
    chance, told = random.Random(seed), History()
    for number in range(count):
        async with life(folder) as (server, process):
            if number % 3 != 2:  # else it is killed while it recovers
                await compare(server, told)
            async with trio.open_nursery() as nursery:
                for who in range(3):
                    nursery.start_soon(Asker(told, chance, who).run, server)
                nursery.start_soon(watch, server, told)
                await trio.sleep(0.1 + chance.random() * 0.5)
                process.kill()
                await process.wait()
        healthy(folder / "data")
    async with life(folder) as (server, _process):
        await compare(server, told)
    healthy(folder / "data")
    return told


# trio-websocket leaves the socket of a peer that died to the garbage collector
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
async def test_six_kills_of_a_busy_server_lose_nothing_told(tmp_path: Path) -> None:
    told = await kills(tmp_path, 6, 1)
    assert told.told > 60
    assert len(told.terminals) > 10


if __name__ == "__main__":  # python tests/attack/test_kill_any_time.py DIR COUNT SEED
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    result = trio.run(kills, folder, int(sys.argv[2]), int(sys.argv[3]))
    sys.stdout.write(f"{result.told} told, {len(result.terminals)} runs\n")
