"""SIGTERM to a busy server: it refuses what is new, says goodbye, and loses nothing told.

Real processes: `culet serve` with an opener, with an app, and plain hypercorn. Clients
keep a history of what they were told, which the next life has to show (see
`attack.test_kill_any_time`); what was going on ends once.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from trio_websocket import ConnectionClosed

from attack.test_kill_any_time import GONE, Asker, History, compare, watch
from sound import healthy
from volume import ASKED, LEDGER, SLOWER
from web.serving import Server, parse_answer, read_all

TESTS = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
OURS = (str(BIN / "culet"), "serve", "--log", "json", "--port", "0", "kill.busy:opener")
OURS_APP = (*OURS[:-1], "kill.busy:app")
PLAIN = (
    *(str(BIN / "hypercorn"), "--worker-class", "trio", "--workers", "0"),
    *("--bind", "127.0.0.1:0", "--graceful-timeout", "1", "kill.busy:app"),
)
GRACE_S = 3.0  # of `culet.web.serve`, for requests that are open
ABORT_S = 2.0  # for agents, in these tests
LAST_S = 4.0  # barriers, interpreter, a machine that does other things as well
REFUSALS = ("the agent was stopped", "the kernel is closing", "the kernel stops")


class Life:
    """One life of the server, until somebody tells it to stop."""

    def __init__(self, process: trio.Process, url: str, log: Path) -> None:
        self.process, self.log = process, log
        self.server = Server(url, None)  # type: ignore[arg-type]
        self._from = log.stat().st_size

    async def stop(self, number: int = signal.SIGTERM) -> float:
        """Tell it to stop, wait for its end; return how long that took."""
        began = trio.current_time()
        self.process.send_signal(number)
        with trio.fail_after((GRACE_S + ABORT_S + LAST_S) * SLOWER):
            await self.process.wait()
        return trio.current_time() - began

    def said(self) -> list[dict[str, Any]]:
        """Return what it has logged."""
        lines = self.log.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]


@asynccontextmanager
async def life(folder: Path, command: Sequence[str] = OURS) -> AsyncIterator[Life]:
    """Start the server on a folder; killed at the end, if it has not ended before."""
    log = folder / f"stderr-{len(list(folder.glob('stderr-*')))}.txt"
    environment = {"BUSY_DATA": str(folder / "data"), "BUSY_GRACE_S": str(ABORT_S)}
    with log.open("w") as errors:
        process = await trio.lowlevel.open_process(
            list(command), cwd=TESTS, stdout=errors, stderr=errors,
            env=os.environ | environment | {"PYTHONPATH": str(TESTS)},
        )  # fmt: skip
    try:
        with trio.fail_after(20 * SLOWER):
            while not (url := re.search(r"on (http://[\d.]+:\d+)", log.read_text())):
                assert process.poll() is None, log.read_text()[-3000:]
                await trio.sleep(0.01)
        yield Life(process, url[1], log)
    finally:
        if process.returncode is None:
            process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()


async def slowly(life: Life, path: str, size: int) -> trio.SocketStream:
    """Begin an upload; the rest of it is the caller's."""
    stream = await trio.open_tcp_stream("127.0.0.1", life.server.port)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n"
    await stream.send_all(head.encode() + b"x" * 10)
    return stream


async def events(life: Life) -> trio.SocketStream:
    """Follow events that have no end; returns when some have come."""
    stream = await trio.open_tcp_stream("127.0.0.1", life.server.port)
    await stream.send_all(b"GET /agents/desk/d/events HTTP/1.1\r\nHost: x\r\n\r\n")
    heard = b""
    while b"beat" not in heard:
        part = await stream.receive_some(4096)
        assert part, heard
        heard += part
    return stream


async def settled(life: Life) -> None:
    """Wait until it has heard the signal."""
    with trio.fail_after(5 * SLOWER):
        while not any("signal" in line for line in life.said()):
            await trio.sleep(0.005)


@pytest.mark.rule("W-029", "W-063")
@pytest.mark.parametrize("command", [OURS, OURS_APP], ids=["opener", "app"])
async def test_it_refuses_what_is_new_and_finishes_what_is_open(
    command: Sequence[str], tmp_path: Path
) -> None:
    async with life(tmp_path, command) as first:
        server = first.server
        assert (await server.http("GET", "/readyz"))[0] == 200
        upload = await slowly(first, "/agents/desk/d?name=a", 1000)
        beats = await events(first)
        async with server.connect("/agents/desk/d") as client:
            await client.hello()
            first.process.terminate()
            assert (await client.closed()) == (1012, "the server restarts")
        await settled(first)
        for method, path in (
            ("GET", "/readyz"), ("GET", "/agents/desk/other"), ("GET", "/none"),
            ("POST", "/agents/desk/other?name=b"),
        ):  # fmt: skip
            status, headers, _ = await server.http(method, path, body=b"late")
            assert (status, headers["retry-after"]) == (503, "1"), path
        assert await server.close_of("/agents/desk/other") == 1012
        async with beats:
            with trio.fail_after(2 * SLOWER):  # long before the grace is over
                told = await read_all(beats)
        assert not told.endswith(b"0\r\n\r\n"), "cut: nothing says that it was all"
        assert first.process.poll() is None
        async with upload:
            await upload.send_all(b"x" * 990)
            status, _headers, body = parse_answer(await read_all(upload))
        assert (status, body) == (200, b"kept 1000")
        with trio.fail_after(LAST_S * SLOWER):
            assert await first.process.wait() == 0
        [drained] = [line for line in first.said() if line["message"] == "drained"]
        assert (drained["sockets"], drained["requests"], drained["cut"]) == (1, 2, 0)
    healthy(tmp_path / "data")
    async with life(tmp_path) as second, second.server.connect("/agents/desk/d") as c:
        await c.hello()
        assert (await c.call("kept"))["result"] == {"a": 1000}


@pytest.mark.parametrize("command", [OURS, OURS_APP], ids=["opener", "app"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_takes_the_grace_away(
    command: Sequence[str], number: int, tmp_path: Path
) -> None:
    async with life(tmp_path, command) as first:
        never = await slowly(first, "/agents/desk/d?name=a", 1000)
        async with never, first.server.connect("/agents/deaf/d") as client:
            await client.hello()
            assert (await client.call("note", "told"))["success"]
            assert (await client.call("stay", 0.01))["success"]
            first.process.terminate()
            assert (await client.closed())[0] == 1012
            await settled(first)
            took_s = await first.stop(number)
        assert took_s < GRACE_S * SLOWER, "the upload had the whole grace"
        assert first.process.returncode == 0
    healthy(tmp_path / "data")


@pytest.mark.parametrize("command", [OURS, OURS_APP], ids=["opener", "app"])
async def test_a_second_signal_hastens_agents_that_are_slow_to_stop(
    command: Sequence[str], tmp_path: Path
) -> None:
    async with life(tmp_path, command) as first:
        async with first.server.connect("/agents/deaf/d") as client:
            await client.hello()
            assert (await client.call("stay", 1.5))["success"]
            first.process.terminate()
            assert (await client.closed())[0] == 1012
        with trio.fail_after(5 * SLOWER):
            while not any(line["message"] == "drained" for line in first.said()):
                await trio.sleep(0.005)
        await first.stop()
        assert first.process.returncode == 70, "it was not waited for"


@pytest.mark.parametrize("command", [OURS, OURS_APP], ids=["opener", "app"])
async def test_code_that_never_stops_is_left_and_named_and_nothing_told_is_lost(
    command: Sequence[str], tmp_path: Path
) -> None:
    async with life(tmp_path, command) as first:
        async with first.server.connect("/agents/deaf/d") as client:
            await client.hello()
            assert (await client.call("stay", None))["success"]
            assert (await client.call("note", "told"))["success"]
        took_s = await first.stop()
        assert first.process.returncode == 70
        assert took_s < (ABORT_S + LAST_S) * SLOWER
        assert "did not stop, fenced: Deaf/d" in first.log.read_text()
    healthy(tmp_path / "data")
    async with life(tmp_path, command) as second:
        async with second.server.connect("/agents/deaf/d") as client:
            await client.hello()
            assert (await client.call("notes"))["result"] == ["told"]
        await second.stop()
        assert second.process.returncode == 0


@pytest.mark.parametrize("command", [OURS, OURS_APP], ids=["opener", "app"])
async def test_its_log_as_json_tells_start_failure_end_of_a_run_and_drain(
    command: Sequence[str], tmp_path: Path
) -> None:
    async with life(tmp_path, command) as first:
        status, _, body = await first.server.http("GET", "/agents/desk/d/fails")
        assert status == 500
        async with first.server.connect() as client:
            await client.hello()
            assert (await client.call("work", "w1", 2))["result"] == "completed 2"
        await first.stop()
        told = first.said()
    assert all({"at", "level", "logger", "message"} <= line.keys() for line in told)
    assert told[0]["message"] == f"serving on {first.server.url}"
    [failed] = [line for line in told if line.get("what") == "request"]
    assert (failed["agent"], failed["level"]) == ("Desk/d", "error")
    assert failed["error_id"].encode() in body
    assert "ValueError: no luck" in failed["error"]
    ended = {line["run_id"]: line for line in told if line["logger"] == "culet.runs"}
    assert set(ended) == {"w1", "leaf"}
    assert ended["leaf"]["agent"] == "Hub/h/Middle/w1/Leaf/leaf"
    assert {line["status"] for line in ended.values()} == {"completed"}
    assert [line["signal"] for line in told if "signal" in line] == ["SIGTERM"]
    [drained] = [line for line in told if line["message"] == "drained"]
    assert drained["cut"] == 0


# ---- any moment, under load


class Clients(Asker):
    """Asks as the clients of the kills do, and sees how its socket is closed."""

    codes: Counter[int]

    async def ask(self, method: str, *args: Any) -> Any:
        """As it is; a call that the end has met says so, and then the socket closes."""
        frame = await self.client.call(method, *args)
        if not frame["success"]:
            assert frame["error"] in REFUSALS, frame
            self.codes[(await self.client.closed())[0]] += 1
            raise OSError
        self.told.told += 1
        return frame.get("result")

    async def run(self, server: Server) -> None:
        try:
            async with server.connect() as self.client:
                await self.client.hello()
                while True:
                    await self.chance.choice(
                        [self.note, self.count, self.later, self.work, self.begin,
                         self.fiber, self.put, self.put, self.drop, self.stop]
                    )()  # fmt: skip
        except (*GONE, BaseExceptionGroup) as error:
            self.codes[_code_of(error)] += 1


def _code_of(error: BaseException) -> int:
    """Return the close code of a socket; 0 when there was none yet, or no server."""
    if isinstance(error, BaseExceptionGroup):
        assert error.split(GONE)[1] is None
        return max(map(_code_of, error.exceptions))
    closed = isinstance(error, ConnectionClosed) and error.reason is not None
    return error.reason.code if closed else 0  # type: ignore[attr-defined]


class Talk:
    """Chat turns over events, and uploads: what was told, and what was not answered."""

    def __init__(self) -> None:
        self.number = 0
        self.asked: set[str] = set()  # a turn was begun, by its user message
        self.whole: set[str] = set()  # whose events were read to their end
        self.cut = 0
        self.kept: dict[str, int] = {}

    async def chat(self, server: Server) -> None:
        while True:
            self.number += 1
            mine = f"u{self.number}"
            message = {
                "id": mine,
                "role": "user",
                "parts": [{"type": "text", "text": "?"}],
            }
            body = {"id": "c", "messages": [message], "trigger": "submit-message"}
            path, sent = "/agents/talker/t/chat", json.dumps(body).encode()
            try:
                head = (
                    f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json"
                )
                head += f"\r\nConnection: close\r\nContent-Length: {len(sent)}\r\n\r\n"
                told = b""
                async with await trio.open_tcp_stream(
                    "127.0.0.1", server.port
                ) as stream:
                    await stream.send_all(head.encode() + sent)
                    while part := await stream.receive_some(65536):
                        told += part
            except (*GONE, trio.BrokenResourceError):
                return
            if b" 200 " not in told.partition(b"\r\n")[0]:
                return
            self.asked.add(mine)
            if told.endswith(b"0\r\n\r\n"):
                assert b"[DONE]" in told, "an end that is none"
                self.whole.add(mine)
            else:
                self.cut += 1
                return

    async def upload(self, server: Server, chance: random.Random) -> None:
        while True:
            self.number += 1
            name, size = f"f{self.number}", chance.randint(1, 200_000)
            try:
                status, headers, body = await server.http(
                    "POST", f"/agents/desk/d?name={name}", body=b"x" * size
                )
            except (OSError, trio.BrokenResourceError, IndexError):
                return
            if status != 200 or len(body) < int(headers["content-length"]):
                return
            assert body == b"kept %d" % size
            self.kept[name] = size

    async def compare(self, server: Server) -> None:
        """All that was told is there, and the turns that were cut go on to their end."""
        async with server.connect("/agents/desk/d") as client:
            await client.hello()
            kept = (await client.call("kept"))["result"]
            assert self.kept.items() <= kept.items()
        with trio.fail_after(20 * SLOWER):
            while True:
                _, _, body = await server.http("GET", "/agents/talker/t/get-messages")
                messages = json.loads(body)
                users = {m["id"] for m in messages if m["role"] == "user"}
                said = [m for m in messages if m["role"] == "assistant"]
                texts = ["".join(p.get("text", "") for p in m["parts"]) for m in said]
                if len(said) == len(users) and all("w19" in text for text in texts):
                    break
                await trio.sleep(0.02)
        assert self.asked <= users
        for text in texts:
            assert text == "".join(f"w{i} " for i in range(20))


async def drains(folder: Path, count: int, seed: int, command: Sequence[str]) -> None:
    """Stop a busy server that many times, at random moments, also while it recovers."""
    chance, told, talk = random.Random(seed), History(), Talk()
    codes = Clients.codes = Counter()
    ours = command is not PLAIN  # which hears signals a moment after it says its URL
    for turn in range(count):
        async with life(folder, command) as here:
            # what goes on since the life before does not keep it from being ready
            assert (await here.server.http("GET", "/readyz"))[0] == 200
            if turn % 3 != 2:  # else it is stopped while it recovers
                await compare(here.server, told)
                await talk.compare(here.server)
            async with trio.open_nursery() as nursery:
                for who in range(3):
                    nursery.start_soon(Clients(told, chance, who).run, here.server)
                nursery.start_soon(watch, here.server, told)
                nursery.start_soon(talk.chat, here.server)
                nursery.start_soon(talk.upload, here.server, chance)
                await trio.sleep((0 if ours else 0.2) + chance.random() * 0.7)
                number = chance.choice([signal.SIGTERM, signal.SIGINT])
                await here.stop(number)
            status, said = here.process.returncode, here.log.read_text()
            if ours or status != -number:  # it had not begun to hear signals: a kill
                assert status == 0, (status, said[-3000:])
            assert "Traceback" not in said, said[-3000:]
        healthy(folder / "data")
        if ours:
            LEDGER.add("drains")
    async with life(folder, command) as here:
        await compare(here.server, told)
        await talk.compare(here.server)
        await here.stop()
    healthy(folder / "data")
    assert set(codes) <= {0, 1012}, codes
    assert codes[1012] > 0, codes
    assert told.told > count  # it was busy
    assert not ours or talk.whole


@pytest.mark.slow
@pytest.mark.volume("drains")
async def test_a_busy_server_that_is_stopped_at_any_moment_loses_nothing_told(
    tmp_path: Path,
) -> None:
    await drains(tmp_path, ASKED["drains"].now, 1, OURS)


@pytest.mark.slow
async def test_so_does_an_app_under_plain_hypercorn(tmp_path: Path) -> None:
    await drains(tmp_path, 2, 2, PLAIN)


if __name__ == "__main__":  # python -m kill.test_drain DIR COUNT SEED [plain]
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    way = PLAIN if "plain" in sys.argv else OURS
    trio.run(drains, Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), way)
