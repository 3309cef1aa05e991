"""Real SIGKILLs at chosen moments: nothing told is lost, nothing is done twice.

The short form dies at twenty moments, `ci` at twenty more, `long` at all of them again
and again, each time at another pace.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any, Self

import pytest
import trio

from kill.watcher import Watcher, question
from sound import healthy
from volume import ASKED, LEDGER, SLOWER

APP = Path(__file__).with_name("app.py")
QUESTION = (
    "How does asyncio.Queue differ from queue.Queue, and what does trio use instead?"
)
REQUEST = "ask-1"
POINTS = [
    *(f"run:ask:{k}" for k in (1, 2, 3)),  # before dispatch
    *(f"run:start:{k}" for k in (1, 2, 3)),  # between run row and begin
    *(f"child:chunk:{k}" for k in (3, 12, 30)),  # in mid-stream
    *(f"child:end:{k}" for k in (1, 2, 3)),  # between last chunk and settling commit
    *(f"run:end:{k}" for k in (1, 2, 3)),  # between settling commit and its barrier
    *(f"answer:{k}" for k in (1, 3, 6)),  # during the answer
    "file:sync:20",
    "file:write:30",
]
# A whole life has at least so many events of each kind, beyond those of its start.
FOUND = {
    "run:ask": range(1, 7),
    "run:start": range(1, 7),
    "run:end": range(1, 7),
    "child:end": range(1, 7),
    "child:chunk": range(1, 91, 3),
    "turn:begin": range(1, 8),
    "turn:chunk": range(1, 131, 5),
    "answer": range(1, 21),
    "file:sync": range(18, 27),
    "file:write": range(26, 35),
}
BATCH = 40  # kills of one test: one that takes minutes looks like one that hangs
PACE_S = (0.001, 0.002, 0.004, 0.008)


class Server:
    """One life of the app."""

    def __init__(self, folder: Path, at: str, *more: str) -> None:
        self.folder, self.at, self.more = folder, at, more

    async def __aenter__(self) -> Self:
        with (self.folder / "stderr.txt").open("a") as errors:
            self.process = await trio.lowlevel.open_process(
                [
                    sys.executable,
                    str(APP),
                    "--dir",
                    str(self.folder),
                    "--at",
                    self.at,
                    *self.more,
                ],
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        assert self.process.stdout is not None
        line = b""
        while not line.endswith(b"\n"):
            part = await self.process.stdout.receive_some(200)
            if not part:
                raise AssertionError((self.folder / "stderr.txt").read_text()[-3000:])
            line += part
        self.http = line.decode().strip().rstrip("/")
        self.socket = (
            self.http.replace("http://", "ws://") + "/agents/assistant/default"
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.process.returncode is None:
            self.process.kill()
        with trio.CancelScope(shield=True):
            await self.process.wait()
            assert self.process.stdout is not None
            await self.process.stdout.aclose()

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.http + path, timeout=10) as answer:
            return json.load(answer)


def moments(count: int) -> list[tuple[str, float]]:
    """Return where so many lives end, and at which pace: the chosen twenty go first."""
    chance = random.Random(1)
    others = [f"{kind}:{k}" for kind, ks in FOUND.items() for k in ks]
    others = [at for at in others if at not in POINTS]
    out = [(at, 0.004) for at in POINTS]
    while len(out) < count:
        ats = others if len(out) == len(POINTS) else [*POINTS, *others]
        out += [(at, chance.choice(PACE_S)) for at in chance.sample(ats, len(ats))]
    return out[:count]


async def die_and_go_on(
    folder: Path, at: str, pace: float = 0.004
) -> tuple[Watcher, Watcher, list[Any]]:
    """Ask, be killed at `at`, start again, see the end; then look as a fresh client."""
    watcher, fresh = Watcher(), Watcher()
    async with Server(folder, at, "--pace", str(pace)) as server:
        with trio.move_on_after(20 * SLOWER):
            await watcher.follow(server.socket, ask=question(REQUEST, QUESTION))
            await server.process.wait()
        assert server.process.returncode == -signal.SIGKILL, f"{at} was never reached"
    healthy(folder / "data")
    asked = REQUEST in watcher.chunks  # else the question may not have been durable
    async with Server(folder, ":0") as server, trio.open_nursery() as nursery:
        ask = None if asked else question(REQUEST, QUESTION)
        nursery.start_soon(lambda: watcher.follow(server.socket, ask=ask))
        with trio.fail_after(30 * SLOWER):
            await watcher.until_ended(REQUEST)
            runs = len(watcher.terminals)
            await fresh.ask_for(server.socket, REQUEST, runs)
        path = "/agents/assistant/default/get-messages"
        messages = await trio.to_thread.run_sync(server.get, path)
        nursery.cancel_scope.cancel()
    return watcher, fresh, messages


def starts(folder: Path) -> Counter[tuple[str, str]]:
    """How often each tool call of a researcher was started, over all lives."""
    lines = (folder / "side.txt").read_text().split("\n")
    calls = [line.split(" ") for line in lines if line and not line.endswith(" life")]
    return Counter((run, call) for _life, run, call in calls)


def check(
    folder: Path, watcher: Watcher, fresh: Watcher, messages: list[Any]
) -> str | None:
    """Assert what always holds; return why the turn did not end as it should, or None."""
    assert watcher.changed == []
    assert all(len(told) == 1 for told in watcher.terminals.values())
    assert watcher.terminals == fresh.terminals
    assert watcher.events.to_json() == fresh.events.to_json()
    bodies = watcher.chunks[REQUEST]
    assert sorted(bodies) == list(range(len(bodies))), "a hole in the numbers"
    assert bodies == fresh.chunks[REQUEST]
    assert max(starts(folder).values(), default=0) <= 2  # two lives
    healthy(folder / "data")
    deltas = [json.loads(b) for b in bodies.values()]
    said = "".join(c["delta"] for c in deltas if c["type"] == "text-delta")
    stored = "".join(p["text"] for p in messages[-1]["parts"] if p["type"] == "text")
    assert said == stored
    if watcher.ended[REQUEST] not in (None, "completed"):
        return f"the turn ended {watcher.ended[REQUEST]}"
    kinds = [json.loads(t)["kind"] for told in watcher.terminals.values() for t in told]
    if set(kinds) != {"finished"}:
        return f"runs ended {kinds}"
    if "queues.md:" not in stored:
        return f"no citation in {stored!r}"
    return None


# trio-websocket leaves the socket of a peer that died to the garbage collector
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
@pytest.mark.volume("kills")
@pytest.mark.parametrize("batch", range(-(-ASKED["kills"].now // BATCH)))
async def test_kills_lose_nothing_and_do_nothing_twice(
    batch: int, tmp_path: Path
) -> None:
    reasons: dict[str, str] = {}
    failures: dict[str, BaseException] = {}
    lanes = trio.CapacityLimiter(2)

    async def one(number: int, at: str, pace: float) -> None:
        async with lanes:
            name = f"{number}-{at.replace(':', '-')}"
            folder = tmp_path / name
            folder.mkdir()
            try:
                seen = await die_and_go_on(folder, at, pace)
                reason = check(folder, *seen)
            except (AssertionError, trio.TooSlowError) as error:
                failures[name] = error
                return
            LEDGER.add("kills")
            shutil.rmtree(folder)
            if reason is not None:
                reasons[name] = reason

    mine = moments(ASKED["kills"].now)[batch * BATCH :][:BATCH]
    async with trio.open_nursery() as nursery:
        for number, (at, pace) in enumerate(mine):
            nursery.start_soon(one, number, at, pace)
    assert not failures, "\n".join(f"{at}: {e!r}" for at, e in failures.items())
    assert len(reasons) <= len(mine) // 10, reasons


if (
    __name__ == "__main__"
):  # one point, loudly: python tests/kill/test_kill.py run:end:1 DIR
    os.makedirs(sys.argv[2], exist_ok=True)
    result = trio.run(die_and_go_on, Path(sys.argv[2]), sys.argv[1])
    sys.stdout.write(f"{check(Path(sys.argv[2]), *result)}\n")
