"""Clients that come all at once, never finish a request, or smuggle a second one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

import culet.web
from culet.kernel import Limits
from web.serving import Hub, Server, parse_answer, read_all, serving

EVENT = b"agent-tool-event"


async def replay(server: Server, root: str, frames: int) -> None:
    """Be a new client until so many frames of runs have come."""
    stream = await trio.open_tcp_stream("127.0.0.1", server.port)
    try:
        await stream.send_all(
            f"GET /agents/hub/{root} HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\n"
            "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode()
        )
        got, tail = 0, b""
        while got < frames:
            part = await stream.receive_some(1 << 18)
            assert part, f"closed after {got} of {frames} frames"
            data = tail + part
            got += data.count(EVENT)
            last = data.rfind(EVENT)
            tail = data[max(last + len(EVENT), len(data) - len(EVENT) + 1, 0) :]
        assert got == frames
    finally:
        await trio.aclose_forcefully(stream)


@pytest.mark.rule("F-33", "I-17", "I-43")
async def test_a_storm_of_clients_that_come_back_delays_nobody_who_is_there(
    tmp_path: Path,
) -> None:
    clients, words = 100, 1_000
    most = 0
    async with (
        serving(storage=f"sqlite:{tmp_path}") as server,
        server.connect("/agents/hub/there") as there,
    ):
        await there.hello()
        async with server.connect("/agents/hub/h") as first:
            await first.hello()
            for run in ("a", "b"):
                await first.start("write", run, words)
            await first.until(lambda f: f.get("id") == "write-2")
        answered = 0
        async with trio.open_nursery() as nursery:
            with trio.fail_after(60):
                async with trio.open_nursery() as storm:
                    for _ in range(clients):
                        storm.start_soon(replay, server, "h", 2 * (words + 2))

                    async def talk() -> None:
                        nonlocal answered, most
                        while True:
                            await there.call("ping", "x")
                            answered += 1
                            store = server.kernel.store
                            most = max(most, len(store._open_files))  # type: ignore[attr-defined]

                    nursery.start_soon(talk)
            nursery.cancel_scope.cancel()
        assert answered > 5, "who was there is answered all the time"
        assert most <= Limits().open_asleep, "they share what is read"


COUNTED: list[str] = []


@asynccontextmanager
async def counted() -> AsyncIterator[Server]:
    """Serve, and note each request that reaches an agent."""
    COUNTED.clear()
    inner = Hub.on_request

    async def noted(self, request):
        COUNTED.append(request.path)
        return await inner(self, request)

    Hub.on_request = noted  # type: ignore[method-assign]
    try:
        async with serving() as server:
            yield server
    finally:
        Hub.on_request = inner  # type: ignore[method-assign]


SECOND = b"GET /agents/hub/h/smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
START = b"POST /agents/hub/h/first HTTP/1.1\r\nHost: x\r\n"
SMUGGLED = {
    "both lengths": START + b"Content-Length: 5\r\n" + CHUNKED + b"\r\n0\r\n\r\n",
    "two lengths": START + b"Content-Length: 0\r\nContent-Length: 50\r\n\r\n",
    "lengths in one": START + b"Content-Length: 0, 50\r\n\r\n",
    "a length with a sign": START + b"Content-Length: +5\r\n\r\n",
    "an unknown coding": START + b"Transfer-Encoding: xchunked\r\n\r\n",
    "chunked twice": START + CHUNKED + CHUNKED + b"\r\n0\r\n\r\n",
    "a space before the colon": START + b"Transfer-Encoding : chunked\r\n\r\n",
    "a header without a name": START + b": x\r\n\r\n",
    "two hosts": b"GET /agents/hub/h/first HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
    "no host": b"GET /agents/hub/h/first HTTP/1.1\r\n\r\n",
    "a bad chunk": START + CHUNKED + b"\r\nzz\r\n\r\n",
    "a NUL": START + b"X: a\0b\r\n\r\n",
    "a folded line": START + b"X: a\r\n Content-Length: 5\r\n\r\n",
}


@pytest.mark.rule("F-51", "I-42")
@pytest.mark.parametrize("head", SMUGGLED.values(), ids=SMUGGLED)
async def test_a_request_with_two_readings_is_refused_and_what_follows_it_is_not_seen(
    head: bytes,
) -> None:
    async with counted() as server:
        stream = await trio.open_tcp_stream("127.0.0.1", server.port)
        await stream.send_all(head + SECOND)
        answer = await read_all(stream)
        assert "/smuggled" not in COUNTED
        if answer:
            assert parse_answer(answer)[0] in range(400, 502), answer
        assert answer.count(b"HTTP/1.1 200") == 0
        status, _headers, _body = await server.http("GET", "/agents/hub/h/stream")
        assert status == 200, "others are served"


@pytest.mark.rule("F-49", "I-43")
@pytest.mark.parametrize(
    "part",
    [
        b"GET /agents/hub/h/first HTTP/1.1\r\nX: ",
        START + b"Content-Length: 100\r\n\r\nx",
        START + CHUNKED + b"\r\n1\r\nx\r\n",
        b"",
    ],
    ids=["a head", "a body", "chunks", "nothing"],
)
async def test_a_request_that_never_ends_is_cut_and_others_are_served(
    part: bytes,
) -> None:
    limits = Limits(handshake_s=0.2, idle_s=0.2, body_wait_s=0.2)
    async with serving(limits=limits) as server:
        stream = await trio.open_tcp_stream("127.0.0.1", server.port)
        await stream.send_all(part)
        status, _headers, _body = await server.http("GET", "/agents/hub/h/stream")
        assert status == 200
        answer = await read_all(stream)  # fails when the server does not hang up
        assert b"HTTP/1.1 200" not in answer


@pytest.mark.rule("F-55")
def test_the_page_never_makes_markup_of_a_text() -> None:
    root = Path(culet.web.__path__[0])
    scripts = [p for p in root.rglob("*.js") if "node_modules" not in p.parts]
    assert scripts
    for path in scripts:
        text = path.read_text()
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write"):
            assert word not in text, f"{path} uses {word}"
