"""Methods and versions of HTTP that few clients use."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from culet.kernel import Agent, Limits, Request, Response, open_kernel
from culet.web import create_app
from web import serving as serving_module
from web.serving import RUNNERS, Server, parse_answer, read_all

pytestmark = pytest.mark.usefixtures("transport")
PATH = "/agents/desk/d"
LIMITS = Limits(body_bytes=1000, message_bytes=1000, handshake_s=5)


class Events:
    """News without an end, and whether anybody still makes them."""

    begun = ended = 0


class Desk(Agent):
    async def on_request(self, request: Request) -> Response:
        if request.path == "/events":
            kind = {"content-type": "text/event-stream"}
            return Response(self.news(), headers=kind)
        return Response(request.method.encode() + b" " + await request.read())

    async def news(self) -> AsyncIterator[bytes]:
        Events.begun += 1
        try:
            while True:
                yield b": still there\n\n"
                await trio.sleep(0.01)
        finally:
            Events.ended += 1


@asynccontextmanager
async def served() -> AsyncIterator[Server]:
    async with (
        open_kernel(roots=[Desk], storage="memory:", limits=LIMITS) as kernel,
        trio.open_nursery() as nursery,
    ):
        run = RUNNERS[serving_module.transport_of_tests]
        url = await nursery.start(run, create_app(kernel))
        yield Server(url, kernel)
        nursery.cancel_scope.cancel()


async def said(server: Server, data: bytes) -> bytes:
    stream = await trio.open_tcp_stream("127.0.0.1", server.port)
    await stream.send_all(data)
    return await read_all(stream)  # fails when the server does not hang up


@pytest.mark.rule("I-42")
@pytest.mark.parametrize("path", [PATH, "/healthz", "/elsewhere"])
async def test_a_trace_is_refused_and_says_nothing_of_its_request(path: str) -> None:
    async with served() as server:
        head = f"TRACE {path} HTTP/1.1\r\nHost: h\r\nCookie: secret-token-9\r\n\r\n"
        answer = await said(server, head.encode())
        assert parse_answer(answer)[0] == 501
        assert b"secret" not in answer
        assert server.kernel.trees == {}


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "PATCH", "PURGE"])
async def test_every_other_method_is_the_agents(method: str) -> None:
    async with served() as server:
        status, _, body = await server.http(method, PATH, body=b"x")
        sent = "" if method == "GET" else "x"
        assert (status, body) == (200, f"{method} {sent}".encode())


async def test_a_client_that_waits_to_be_told_is_told_to_go_on() -> None:
    head = (
        f"POST {PATH} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n"
        "Content-Length: 4\r\nExpect: 100-continue\r\n\r\n"
    )
    async with served() as server:
        stream = await trio.open_tcp_stream("127.0.0.1", server.port)
        await stream.send_all(head.encode())
        with trio.fail_after(5):
            told = b""
            while b"\r\n\r\n" not in told:
                told += await stream.receive_some(65536)
        assert told.startswith(b"HTTP/1.1 100")
        await stream.send_all(b"body")
        rest = told.partition(b"\r\n\r\n")[2] + await read_all(stream)
        status, _, body = parse_answer(rest)
        assert (status, body) == (200, b"POST body")


async def test_a_client_that_is_never_told_to_go_on_is_cut() -> None:
    """Its body never comes: the agent that waits for it is let go, and the socket."""
    head = f"POST {PATH} HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\nExpect: 100-continue\r\n"
    async with served() as server:
        stream = await trio.open_tcp_stream("127.0.0.1", server.port)
        await stream.send_all(head.encode() + b"\r\n")
        await stream.send_eof()
        await read_all(stream)
        assert (await server.http("GET", PATH))[0] == 200


@pytest.mark.parametrize("version", ["0.9", ""])
async def test_a_request_without_a_version_that_is_known_is_refused(
    version: str,
) -> None:
    line = f"GET {PATH}" + (f" HTTP/{version}" if version else "")
    async with served() as server:
        answer = await said(server, f"{line}\r\n\r\n".encode())
        assert parse_answer(answer)[0] in (400, 505)
        assert server.kernel.trees == {}


@pytest.mark.parametrize("keep", ["", "Connection: keep-alive\r\n"])
async def test_the_old_version_is_answered_once(keep: str, transport: str) -> None:
    head = f"GET {PATH} HTTP/1.0\r\n{keep}\r\n"
    async with served() as server:
        # hypercorn alone refuses both when the second comes before the first is answered
        answer = await said(server, (head * (2 if transport == "own" else 1)).encode())
        assert answer.count(b"HTTP/1.1 ") == 1
        status, headers, body = parse_answer(answer)
        assert (status, headers["connection"], body) == (200, "close", b"GET ")


@pytest.mark.rule("I-43")
async def test_head_of_events_is_answered_and_nobody_goes_on_making_them() -> None:
    Events.begun = Events.ended = 0
    async with served() as server:
        head = f"HEAD {PATH}/events HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
        answer = await said(server, head.encode())
        status, headers, body = parse_answer(answer)
        assert (status, body) == (200, b"")
        assert headers["content-type"] == "text/event-stream"
        assert Events.begun == Events.ended


@pytest.mark.rule("I-43")
async def test_who_leaves_events_ends_them() -> None:
    Events.begun = Events.ended = 0
    async with served() as server:
        stream = await trio.open_tcp_stream("127.0.0.1", server.port)
        await stream.send_all(f"GET {PATH}/events HTTP/1.1\r\nHost: h\r\n\r\n".encode())
        with trio.fail_after(5):
            while b"still there" not in await stream.receive_some(65536):
                pass
            assert (Events.begun, Events.ended) == (1, 0)
            await trio.aclose_forcefully(stream)
            while not Events.ended:
                await trio.sleep(0.01)
