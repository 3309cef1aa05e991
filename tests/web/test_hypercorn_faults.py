"""Three faults of hypercorn 0.18 on trio: that they are real, and that they end at us.

Each comes twice. Under hypercorn alone, with an app of a few lines, a test shows the fault
and fails when a later version has mended it. Behind our listener the same bytes harm
nobody. (The third one ends a whole process: `test_quart_transport` shows that in one.)
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing
from hypercorn.config import Config
from hypercorn.trio import serve as hypercorn_serve
from quart import abort, websocket
from quart_trio import QuartTrio

from culet.kernel import Agent, Limits, Request, Response, open_kernel
from culet.web import install, serve
from web.serving import read_all
from web.test_transport import Raw, masked, upgrade

MUCH = b"x" * 1_000_000  # more than a socket takes
LIMITS = Limits(slow_client_s=0.2, connections_per_address=1)
App = Callable[[Any, Any, Any], Awaitable[None]]


@asynccontextmanager
async def bare(app: App, idle_s: float = 5.0) -> AsyncIterator[int]:
    """Serve an ASGI app by hypercorn alone; yields the port."""
    config = Config()
    config.keep_alive_timeout = idle_s
    config.bind, config.errorlog, config.graceful_timeout = ["127.0.0.1:0"], None, 0.1
    async with trio.open_nursery() as nursery:
        start = partial(hypercorn_serve, app, config)
        urls = await nursery.start(
            lambda *, task_status: start(task_status=task_status)
        )
        yield int(urls[0].rpartition(":")[2])
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def connected(port: int, first: bytes) -> AsyncIterator[Raw]:
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    try:
        await stream.send_all(first)
        yield Raw(stream)
    finally:
        await trio.aclose_forcefully(stream)


async def reset(client: Raw) -> None:
    """Vanish: the connection is reset."""
    client.stream.setsockopt(1, 13, struct.pack("ii", 1, 0))
    await trio.aclose_forcefully(client.stream)


# ---- under hypercorn alone


@pytest.mark.cannot("hypercorn shields its sends")
async def test_alone_a_send_to_who_does_not_read_cannot_be_cancelled() -> None:
    stuck, over = trio.Event(), trio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "websocket"  # hypercorn goes on without a lifespan
        await send({"type": "websocket.accept"})
        with trio.CancelScope() as sending:
            async with trio.open_nursery() as nursery:

                async def fill() -> None:
                    while True:
                        await send({"type": "websocket.send", "bytes": MUCH})
                        await trio.lowlevel.checkpoint()  # see the next fault

                nursery.start_soon(fill)
                await trio.testing.wait_all_tasks_blocked(0.05)
                stuck.set()
                sending.cancel()
        over.set()

    async with bare(app) as port, connected(port, upgrade("/")) as client:
        with trio.fail_after(5):
            await stuck.wait()
        with trio.move_on_after(0.2):
            await over.wait()
        assert not over.is_set(), "it was cancelled: the fault is mended"
        await reset(client)
        with trio.fail_after(5):
            await over.wait()


@pytest.mark.cannot("hypercorn says nothing of a client that is gone, and never yields")
async def test_alone_a_send_to_who_is_gone_returns_for_ever_without_a_checkpoint() -> (
    None
):
    sent: list[int] = []
    gone, over = trio.Event(), trio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "websocket"  # hypercorn goes on without a lifespan
        await send({"type": "websocket.accept"})
        await gone.wait()
        while (await receive())["type"] != "websocket.disconnect":
            pass
        passes = trio.lowlevel.current_statistics().run_sync_soon_queue_size
        others: list[int] = []
        async with trio.open_nursery() as nursery:

            async def other() -> None:
                while True:
                    others.append(1)
                    await trio.lowlevel.checkpoint()

            nursery.start_soon(other)
            await trio.lowlevel.checkpoint()
            before = len(others)
            for _ in range(10_000):
                await send({"type": "websocket.send", "bytes": b"x"})
            sent.append(len(others) - before + passes)
            nursery.cancel_scope.cancel()
        over.set()

    async with bare(app) as port, connected(port, upgrade("/")) as client:
        await client.open()
        await reset(client)
        gone.set()
        with trio.fail_after(5):
            await over.wait()
    assert sent == [0], "others were let run: the fault is mended"


@pytest.mark.cannot("hypercorn takes HTTP/2 without TLS, has no setting for it")
async def test_alone_who_offers_http_2_and_says_no_more_keeps_the_connection() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError(scope["type"])

    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
    async with bare(app, 0.05) as port:
        async with connected(port, b"") as quiet:
            assert await read_all(quiet.stream) == b"", "an idle one is closed"
        async with connected(port, preface) as client:
            with trio.move_on_after(0.4) as waiting:
                while await client.stream.receive_some(65536):
                    pass
            assert waiting.cancelled_caught, "it was closed: the fault is mended"


# ---- behind our listener


class Desk(Agent):
    """Answers without end, and without ever waiting for anything by itself."""

    ended = 0

    async def on_request(self, request: Request) -> Response:
        return Response(self.much() if request.path == "/much" else b"here")

    async def much(self) -> AsyncIterator[bytes]:
        try:
            while True:
                yield MUCH
        finally:
            Desk.ended += 1


@asynccontextmanager
async def served(limits: Limits = LIMITS) -> AsyncIterator[tuple[int, list[Any]]]:
    """Serve an app with agents and a WebSocket of its own, by our listener."""
    heard: list[Any] = []
    app = QuartTrio("service")

    @app.websocket("/own")
    async def own() -> None:
        await websocket.accept()
        try:
            heard.append(await websocket.receive())
            while True:
                await websocket.send(MUCH)
        finally:
            heard.append("ended")

    @app.websocket("/refuses")
    async def refuses() -> None:
        abort(403)

    @app.websocket("/waits")
    async def waits() -> None:
        heard.append("waiting")
        try:
            await trio.sleep_forever()
        finally:
            heard.append("ended")

    async with (
        open_kernel(roots=[Desk], storage="memory:", limits=limits) as kernel,
        trio.open_nursery() as nursery,
    ):
        install(app, kernel, limits=limits)
        start = partial(serve, app, bind="127.0.0.1:0")
        url = await nursery.start(lambda *, task_status: start(task_status=task_status))
        yield int(url.rpartition(":")[2]), heard
        nursery.cancel_scope.cancel()


MUCH_OF_IT = b"GET /agents/desk/d/much HTTP/1.1\r\nHost: h\r\n\r\n"
HERE = b"GET /agents/desk/d HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"


async def until_served(port: int) -> None:
    """Ask until there is room: only one connection is let in at a time."""
    with trio.fail_after(5):
        while True:
            async with connected(port, HERE) as client:
                if (await read_all(client.stream)).endswith(b"here"):
                    return
            await trio.sleep(0.02)


@pytest.mark.rule("F-31", "I-43", "I-45")
@pytest.mark.parametrize(
    "first",
    [MUCH_OF_IT, upgrade("/own") + masked(1, b"go")],
    ids=["an answer", "a socket of the app"],
)
async def test_who_does_not_read_is_given_up_and_the_next_one_served(
    first: bytes,
) -> None:
    async with served() as (port, heard), connected(port, first) as slow:
        with trio.fail_after(5):
            assert await slow.stream.receive_some(10)
        await until_served(port)
        if b"Upgrade" in first:
            with trio.fail_after(5):
                while heard[-1:] != ["ended"]:
                    await trio.sleep(0.01)


@pytest.mark.rule("F-32", "I-45")
@pytest.mark.parametrize(
    "first",
    [MUCH_OF_IT, upgrade("/own") + masked(1, b"go")],
    ids=["an answer", "a socket of the app"],
)
async def test_who_vanishes_stops_nobody_and_what_was_sent_ends(first: bytes) -> None:
    Desk.ended = 0
    async with served() as (port, heard):
        async with connected(port, first) as gone:
            with trio.fail_after(5):
                assert await gone.stream.receive_some(10)
            await reset(gone)
        await until_served(port)
        with trio.fail_after(5):
            while not (heard[-1:] == ["ended"] if b"Upgrade" in first else Desk.ended):
                await trio.sleep(0.01)


@pytest.mark.rule("HB-35", "I-45")
@pytest.mark.parametrize("before", [b"", HERE.replace(b"Connection: close\r\n", b"")])
@pytest.mark.parametrize(
    ("extra", "wanted"),
    [
        (masked(1, b"hello"), ["hello"]),
        (b"x", []),
        (b"\0", []),
        (b"\xff" * 65536, []),
        (b"GET / HTTP/1.1\r\nHost: h\r\n\r\n", []),
    ],
    ids=["a frame", "a byte", "a NUL", "noise", "a request"],
)
async def test_bytes_behind_an_upgrade_wait_for_its_answer(
    before: bytes, extra: bytes, wanted: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    async with served() as (port, heard):
        for cut in (False, True):
            heard.clear()
            first = before + upgrade("/own")
            async with connected(port, first if cut else first + extra) as bad:
                if cut:
                    await bad.stream.send_all(extra)
                data = b""
                with trio.fail_after(5):
                    while b"HTTP/1.1 101" not in data:
                        part = await bad.stream.receive_some(65536)
                        assert part, data
                        data += part
                    while wanted and not heard:
                        await trio.sleep(0.01)
                assert heard[:1] == wanted
                await reset(bad)
            await until_served(port)
    assert "Traceback" not in caplog.text


@pytest.mark.rule("I-43", "I-45")
@pytest.mark.parametrize("before", [b"", HERE.replace(b"Connection: close\r\n", b"")])
async def test_what_follows_a_handshake_that_the_app_refuses_is_not_read(
    before: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with served() as (port, _heard):
        first = before + upgrade("/refuses") + masked(1, b"hello") + HERE
        async with connected(port, first) as client:
            answer = await read_all(client.stream)  # fails when it does not hang up
        assert answer.count(b"here") == bool(before)
        assert b" 403 " in answer
        await until_served(port)
    assert "Traceback" not in caplog.text


@pytest.mark.rule("I-43", "I-45")
@pytest.mark.parametrize("how", [reset, lambda client: client.stream.send_eof()])
@pytest.mark.parametrize("extra", [b"", masked(1, b"hello")], ids=["quiet", "speaks"])
async def test_who_does_not_wait_for_the_answer_is_let_go(
    how: Any, extra: bytes
) -> None:
    async with served() as (port, heard):
        async with connected(port, upgrade("/waits") + extra) as client:
            with trio.fail_after(5):
                while not heard:
                    await trio.sleep(0.01)
                await how(client)
                while heard != ["waiting", "ended"]:
                    await trio.sleep(0.01)
        await until_served(port)
