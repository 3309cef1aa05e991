"""Agents' sockets under plain hypercorn: what holds there too, and what cannot.

Tests marked `cannot` say what is lost against our own listener, and why; they fail when
a later hypercorn mends it, so that the guide can say so.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trio

from culet.kernel import Limits
from culet.kernel.ports import Blob
from culet.web.gateway import Gateway
from culet.web.plainlink import PlainLink
from culet.web.session import Session
from web.serving import RUNNERS, Hub, Server, create_app, open_kernel, serving
from web.test_transport import MALFORMED, raw, upgrade

QUART = "quart"


async def still_serves(server: Any) -> None:
    async with server.connect() as client:
        assert (await client.call("ping", "alive"))["result"] == "alive"


async def until_sockets(server: Any, count: int) -> None:
    with trio.fail_after(5):
        while sum(t.sockets.count for t in server.kernel.trees.values()) != count:
            await trio.sleep(0.01)


# ---- what holds on both


@pytest.mark.limit("message_bytes")
@pytest.mark.rule("W-068")
@pytest.mark.parametrize("message", ["x" * 2001, "☃" * 700, b"x" * 2001])
async def test_a_message_that_is_too_large_is_told_so(
    transport: str, message: str | bytes
) -> None:
    async with serving(limits=Limits(message_bytes=2000)) as server:
        async with server.connect() as client:
            await client.hello()
            await client.socket.send_message("☃" * 666)
            assert await client.raw() == "☃" * 666
            await client.socket.send_message(message)
            assert (await client.closed())[0] == 1009
        await still_serves(server)


@pytest.mark.rule("F-233")
async def test_a_client_that_vanishes_while_it_is_sent_to(transport: str) -> None:
    async with serving() as server, server.connect() as client:
        await client.hello()
        async with raw(server, upgrade()) as gone:
            await gone.open()
            linger = struct.pack("ii", 1, 0)  # closing resets the connection
            gone.stream.setsockopt(1, 13, linger)
        for _ in range(50):
            await client.call("tell", '{"news": "%s"}' % ("x" * 20_000))
        await until_sockets(server, 1)


@pytest.mark.rule("W-025", "W-031")
async def test_foreign_pages_are_refused_in_http(transport: str) -> None:
    foreign = [("Origin", "https://evil.example")]
    async with serving() as server:
        assert await server.refused("/agents/hub/h", foreign) == 403
        assert server.kernel.trees == {}


@pytest.mark.rule("F-50", "I-43", "W-017")
async def test_compression_is_declined(transport: str) -> None:
    head = upgrade(extra="Sec-WebSocket-Extensions: permessage-deflate\r\n")
    async with serving() as server, raw(server, head) as client:
        with trio.fail_after(5):
            data = await client.stream.receive_some(65536)
        assert data.startswith(b"HTTP/1.1 101")
        assert b"permessage-deflate" not in data


@pytest.mark.limit("connections_per_address")
@pytest.mark.rule("W-031")
async def test_the_number_of_sockets_of_one_address_is_bounded() -> None:
    limits = Limits(connections_per_address=2)
    async with serving(limits=limits, transport=QUART) as server:
        async with server.connect() as a, server.connect() as b:
            await a.hello()
            await b.hello()
            assert await server.refused("/agents/hub/h") == 503
        await until_sockets(server, 0)
        await still_serves(server)


async def test_a_client_that_does_not_close_is_dropped() -> None:
    limits = Limits(handshake_s=0.1)
    async with serving(limits=limits, transport=QUART) as server:
        async with server.connect() as hub, raw(server, upgrade()) as stubborn:
            await hub.hello()
            await stubborn.open()
            await stubborn.texts_until("mcp_servers")
            (tree,) = server.kernel.trees.values()
            for connection in tree.sockets.of(tree.root_slot):
                if not connection.uri.endswith("?"):
                    connection.close(4001, "go")
            assert (await hub.closed())[0] == 4001
            with trio.fail_after(5):  # it never answers: the server hangs up
                while await stubborn.stream.receive_some(65536):
                    pass
        await until_sockets(server, 0)


@pytest.mark.rule("W-063")
async def test_the_server_says_goodbye_when_hypercorn_stops() -> None:
    async with open_kernel(roots=[Hub]) as kernel, trio.open_nursery() as nursery:
        inner = await nursery.start(cancellable, create_app(kernel))
        server = Server(inner.url, kernel)
        async with server.connect() as client:
            await client.hello()
            inner.scope.cancel()
            assert (await client.closed())[0] == 1012
        await until_sockets(server, 0)


class Running(NamedTuple):
    url: str
    scope: trio.CancelScope


async def cancellable(app: Any, *, task_status: Any) -> None:
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            url = await nursery.start(RUNNERS[QUART], app)
            task_status.started(Running(url, scope))


# ---- the link by itself: an ASGI server made of two channels


class Asgi:
    """What a server is to a link."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.stuck = trio.Event()
        self.fails: Exception | None = None
        self.arrive, self._arrived = trio.open_memory_channel[Any](10)

    async def receive(self) -> Any:
        return await self._arrived.receive()

    async def send(self, event: Any) -> None:
        if self.fails is not None:
            raise self.fails
        self.sent.append(event)
        if event.get("text") == "stick":
            with trio.CancelScope(shield=True):  # as hypercorn's is
                await self.stuck.wait()


class Inner:
    """The kernel's side."""

    behind = False

    def __init__(self) -> None:
        self.ends: list[tuple[int, str, bool]] = []

    def pull(self) -> None:
        return None

    def received(self, message: str | bytes) -> None: ...

    async def room(self) -> None: ...

    async def opened(self) -> None: ...

    def closed(self, code: int, reason: str, *, was_clean: bool) -> None:
        self.ends.append((code, reason, was_clean))


class Gate:
    durable = 0

    def hold(self, waiter: Any) -> None: ...


def link_of(limits: Limits) -> tuple[Asgi, Inner, Any, Any]:
    asgi, inner = Asgi(), Inner()
    link = PlainLink(limits, asgi.receive, asgi.send, None)
    session = Session(Gate(), limits, link.ready, link.cut)
    session.connection = inner
    kernel: Any = Gateway(None)

    async def run() -> None:
        await link.run(kernel, session, inner)  # type: ignore[arg-type]

    return asgi, inner, session, run


async def test_the_kernel_hears_of_a_slow_client_although_a_send_is_stuck(
    clock: Any,
) -> None:
    asgi, inner, session, run = link_of(Limits(slow_client_s=5))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        session.push(Blob("stick"), 0)
        session.push(Blob("never"), 0)
        await trio.sleep(10)
        assert inner.ends == [(1006, "slow", False)]
        assert [e["text"] for e in asgi.sent] == ["stick"]
        asgi.stuck.set()


@pytest.mark.parametrize(
    ("event", "end"),
    [
        ({"code": 1000}, (1000, "", True)),
        ({"code": 1001}, (1001, "", True)),
        ({"code": 1006}, (1006, "", False)),
        ({}, (1006, "", False)),
    ],
)
async def test_how_the_client_went_is_told(
    event: dict[str, Any], end: tuple[int, str, bool]
) -> None:
    asgi, inner, _session, run = link_of(Limits())
    await asgi.arrive.send({"type": "websocket.connect"})
    await asgi.arrive.send({"type": "websocket.disconnect", **event})
    await run()
    assert inner.ends == [end]


async def test_a_send_that_raises_ends_the_connection() -> None:
    asgi, inner, session, run = link_of(Limits())
    asgi.fails = OSError("gone")
    session.push(Blob("x"), 0)
    await run()
    assert inner.ends == [(1006, "cannot send", False)]


# ---- what cannot hold under plain hypercorn


@pytest.mark.rule("W-068")
@pytest.mark.cannot("hypercorn drops malformed frames without a close frame")
@pytest.mark.parametrize(("data", "code"), MALFORMED[:-1])
async def test_malformed_frames_end_the_connection_without_a_code(
    data: bytes, code: int
) -> None:
    limits = Limits(message_bytes=2000)
    async with serving(limits=limits, transport=QUART) as server:
        async with raw(server, upgrade()) as bad:
            await bad.open()
            await bad.stream.send_all(data)
            assert await bad.close_code() is None, code
        await until_sockets(server, 0)
        await still_serves(server)


@pytest.mark.cannot("hypercorn does not tell its app with which code a client closed")
async def test_the_code_of_a_client_that_closes_is_not_known() -> None:
    seen: list[int] = []

    async with serving(transport=QUART) as server, server.connect() as client:
        await client.hello()
        (tree,) = server.kernel.trees.values()
        (connection,) = tree.sockets.of(tree.root_slot)
        told = connection.closed

        def closed(code: int, reason: str, *, was_clean: bool) -> None:
            seen.append(code)
            told(code, reason, was_clean=was_clean)

        connection._peer.connection = Closing(connection, closed)
        await client.socket.aclose(1000)
        await until_sockets(server, 0)
    assert seen == [1006]


class Closing:
    """A connection that is listened to."""

    def __init__(self, inner: Any, closed: Any) -> None:
        self._inner, self.closed = inner, closed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.mark.rule("W-053")
@pytest.mark.cannot("an app can neither ping nor see a pong: hypercorn's own setting")
async def test_who_answers_no_ping_is_not_cut() -> None:
    limits = Limits(ping_s=0.02, idle_s=0.05)
    async with (
        serving(limits=limits, transport=QUART) as server,
        raw(server, upgrade()) as silent,
    ):
        await silent.open()
        await silent.texts_until("mcp_servers")
        await trio.sleep(0.2)
        assert not any(f.opcode == 9 for f in silent.seen)
        await until_sockets(server, 1)


VICTIM = """
from functools import partial
from quart_trio import QuartTrio
from culet.kernel import open_kernel
from culet.web import install
from web.serving import Hub
app = QuartTrio("victim")
install(app, partial(open_kernel, roots=[Hub]))
"""


@pytest.mark.cannot("bytes behind an upgrade, sent before its answer, end hypercorn")
async def test_a_byte_after_an_upgrade_ends_the_process(tmp_path: Path) -> None:
    """An app can only accept at once, which about halves the cases."""
    (tmp_path / "victim.py").write_text(VICTIM)
    tests = str(Path(__file__).parents[1])
    command = [
        str(Path(sys.executable).parent / "hypercorn"), "--worker-class", "trio",
        "--bind", "127.0.0.1:0", "victim:app",
    ]  # fmt: skip
    process = await trio.lowlevel.open_process(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": tests, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    try:
        with trio.fail_after(20):
            said = b""
            while b"127.0.0.1:" not in said:
                said += await process.stdout.receive_some(4096)
        port = int(said.split(b"127.0.0.1:")[1].split()[0])
        for _ in range(60):
            try:
                stream = await trio.open_tcp_stream("127.0.0.1", port)
            except OSError:
                break
            try:
                await stream.send_all(upgrade() + b"x")
                with trio.move_on_after(0.05):
                    await stream.receive_some(65536)
            except trio.BrokenResourceError:
                pass
            finally:
                await trio.aclose_forcefully(stream)
        with trio.fail_after(10):
            await process.wait()
    finally:
        with trio.CancelScope(shield=True):
            if process.returncode is None:
                process.kill()
            await process.wait()
            await process.stdout.aclose()
