"""Raw sockets against the server: what no well-behaved client sends."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from websockets.client import ClientProtocol
from websockets.frames import Frame
from websockets.protocol import OPEN
from websockets.uri import parse_uri

from culet.kernel import Limits
from culet.storage import Files, open_sqlite
from web.serving import Client, Server, parse_answer, read_all, serving

PATH = "/agents/hub/h"


def upgrade(path: str = PATH, extra: str = "") -> bytes:
    return (
        f"GET {path} HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
        f"{extra}\r\n"
    ).encode()


def masked(opcode: int, data: bytes, *, fin: bool = True) -> bytes:
    first = bytes(((0x80 if fin else 0) | opcode,))
    if len(data) < 126:
        return first + bytes((0x80 | len(data),)) + b"\0\0\0\0" + data
    return first + b"\xff" + len(data).to_bytes(8, "big") + b"\0\0\0\0" + data


class Raw:
    """A TCP connection on which a handshake was sent."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.protocol = ClientProtocol(parse_uri("ws://x/"))
        self.seen: list[Frame] = []

    async def open(self) -> None:
        """Read the answer to the handshake."""
        data = b""
        with trio.fail_after(5):
            while b"\r\n\r\n" not in data:
                part = await self.stream.receive_some(65536)
                assert part, data
                data += part
        head, _, rest = data.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101")
        self.protocol = ClientProtocol(parse_uri("ws://x/"), state=OPEN)
        self.protocol.receive_data(rest)

    async def texts_until(self, wanted: str) -> list[str]:
        texts: list[str] = []
        with trio.fail_after(30):
            while True:
                for event in self.protocol.events_received():
                    assert isinstance(event, Frame)
                    self.seen.append(event)
                    if event.opcode == 1:
                        texts.append(bytes(event.data).decode())
                if any(wanted in text for text in texts):
                    return texts
                data = await self.stream.receive_some(65536)
                assert data, "the server hung up"
                self.protocol.receive_data(data)

    async def close_code(self) -> int | None:
        """Read to the end of the stream; return the code of the close frame."""
        with trio.fail_after(5):
            try:
                while data := await self.stream.receive_some(65536):
                    self.protocol.receive_data(data)
            except trio.BrokenResourceError:
                pass
        return self.protocol.close_rcvd.code if self.protocol.close_rcvd else None


@asynccontextmanager
async def raw(server: Server, first: bytes) -> AsyncIterator[Raw]:
    stream = await trio.open_tcp_stream("127.0.0.1", server.port)
    try:
        await stream.send_all(first)
        yield Raw(stream)
    finally:
        await trio.aclose_forcefully(stream)


async def echo(client: Client) -> None:
    with trio.fail_after(2):
        await client.socket.send_message("are you there")
        assert await client.raw() == "are you there"


@pytest.mark.rule("HB-35", "I-45")
@pytest.mark.parametrize(
    "extra",
    [b"x", masked(1, b"hello"), b"\xff" * 65536, b"GET / HTTP/1.1\r\n\r\n"],
    ids=["a byte", "a frame", "noise", "a request"],
)
@pytest.mark.parametrize("path", [PATH, "/elsewhere"])
async def test_bytes_after_an_upgrade_harm_nobody(extra: bytes, path: str) -> None:
    async with serving() as server, trio.open_nursery() as nursery:
        good: list[Client] = []
        ready = trio.Event()
        stop = trio.Event()

        async def one() -> None:
            async with server.connect() as client:
                await client.hello()
                good.append(client)
                if len(good) == 10:
                    ready.set()
                await stop.wait()

        for _ in range(10):
            nursery.start_soon(one)
        await ready.wait()

        async with raw(server, upgrade(path) + extra) as bad:
            if path == PATH and extra == masked(1, b"hello"):
                await bad.open()
                assert "hello" in await bad.texts_until("hello")
        for client in good:
            await echo(client)
        stop.set()


@pytest.mark.rule("W-031")
@pytest.mark.parametrize(
    ("good", "bad_one"),
    [
        (b"Host: x", b"Host x"),
        (b"Upgrade: websocket", b"Upgrade: websocket, web\xf3"),
        (b"dGhlIHNhb", b"dGhlIH\xcehb"),
    ],
    ids=["no colon", "no text", "a key that is no text"],
)
async def test_a_broken_handshake_is_answered_in_http(
    good: bytes, bad_one: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Found by fuzzing: the protocol hangs up, quotes what is no text, or stumbles."""
    assert good in upgrade()
    broken = upgrade().replace(good, bad_one)
    async with serving() as server, raw(server, broken) as bad:
        with trio.fail_after(5):
            assert (await bad.stream.receive_some(100)).startswith(b"HTTP/1.1 400")
        async with server.connect() as client:
            await client.hello()
    assert not [r for r in caplog.records if r.exc_info]


async def test_an_upgrade_on_a_kept_alive_connection_harms_nobody() -> None:
    request = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    async with serving() as server, server.connect() as client:
        await client.hello()
        for path in (PATH, "/elsewhere"):
            async with raw(server, request) as bad:
                with trio.fail_after(5):
                    while b"ok\n" not in await bad.stream.receive_some(65536):
                        pass
                await bad.stream.send_all(upgrade(path) + b"x")
                if path != PATH:
                    await read_all(bad.stream)
        await echo(client)
        assert (await server.http("GET", "/healthz"))[0] == 200


MALFORMED = [
    pytest.param(b"\x81\x02hi", 1002, id="unmasked"),
    pytest.param(masked(3, b""), 1002, id="unknown opcode"),
    pytest.param(b"\xc1" + masked(1, b"hi")[1:], 1002, id="reserved bit"),
    pytest.param(masked(0, b"x"), 1002, id="continuation of nothing"),
    pytest.param(masked(9, b"x" * 126), 1002, id="long ping"),
    pytest.param(masked(1, b"\xff\xfe"), 1007, id="no UTF-8"),
    pytest.param(masked(1, b"x" * 2001), 1009, id="too large"),
    pytest.param(
        masked(1, b"x" * 1500, fin=False) + masked(0, b"x" * 1500), 1009,
        id="too large in parts",
    ),
    pytest.param(masked(8, (1000).to_bytes(2, "big")), 1000, id="a close"),
]  # fmt: skip


@pytest.mark.rule("F-35", "I-45", "W-068")
@pytest.mark.parametrize(("data", "code"), MALFORMED)
async def test_malformed_frames_close_with_their_code(data: bytes, code: int) -> None:
    async with serving(limits=Limits(message_bytes=2000)) as server:
        async with raw(server, upgrade()) as bad:
            await bad.open()
            await bad.stream.send_all(data)
            assert await bad.close_code() == code
        async with server.connect() as client:
            await client.hello()
            await echo(client)


@pytest.mark.usefixtures("transport")
async def test_a_message_in_parts_is_one_message() -> None:
    parts = (
        masked(1, b"one ", fin=False)
        + masked(9, b"ping between")
        + masked(0, "☃".encode()[:2], fin=False)
        + masked(0, "☃".encode()[2:])
    )
    async with serving() as server, raw(server, upgrade()) as client:
        await client.open()
        await client.texts_until("mcp_servers")
        for byte in parts:
            await client.stream.send_all(bytes((byte,)))
        assert await client.texts_until("☃") == ["one ☃"]
        assert [f.data for f in client.seen if f.opcode == 10] == [b"ping between"]


@pytest.mark.rule("W-031")
@pytest.mark.parametrize(
    ("head", "status"),
    [
        (upgrade().replace(b"Version: 13", b"Version: 8"), 400),
        (upgrade().replace(b"dGhlIHNhbXBsZSBub25jZQ==", b"short"), 400),
        (upgrade().replace(b"GET", b"POST"), (400, 405)),  # by version of the library
        (upgrade(extra="Origin: https://evil.example\r\n"), 403),
        (upgrade("/elsewhere"), 404),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * 40_000, 431),
    ],
    ids=["version", "key", "method", "origin", "path", "head"],
)
async def test_bad_handshakes_are_answered_in_http(
    head: bytes, status: int | tuple[int, ...]
) -> None:
    async with serving() as server, raw(server, head) as client:
        answered = parse_answer(await read_all(client.stream))[0]
    assert answered in (status if isinstance(status, tuple) else (status,))


async def test_who_sends_no_request_is_dropped() -> None:
    async with (
        serving(limits=Limits(handshake_s=0.05)) as server,
        raw(server, b"GET / HTTP/1.1\r\n") as client,
    ):
        assert await read_all(client.stream) == b""


@pytest.mark.rule("I-43", "W-031")
async def test_one_address_has_a_bounded_number_of_connections() -> None:
    async with (
        serving(limits=Limits(connections_per_address=2)) as server,
        server.connect() as a,
        server.connect() as b,
    ):
        await a.hello()
        await b.hello()
        async with raw(server, upgrade()) as third:
            assert await read_all(third.stream) == b""
        await echo(a)


@pytest.mark.rule("W-016")
@pytest.mark.usefixtures("transport")
async def test_an_offered_subprotocol_is_echoed() -> None:
    head = upgrade(extra="Sec-WebSocket-Protocol: one, two\r\n")
    async with serving() as server, raw(server, head) as client:
        data = await client.stream.receive_some(65536)
        assert b"sec-websocket-protocol: one\r\n" in data.lower()
        assert b"permessage-deflate" not in data


@pytest.mark.rule("I-20", "F-31", "W-069")
@pytest.mark.usefixtures("transport")
@pytest.mark.parametrize(
    "limits",
    [
        Limits(outbox_bytes=200_000, slow_client_s=600),
        Limits(outbox_bytes=1 << 30, slow_client_s=0.2),
    ],
    ids=["outbox full", "takes nothing"],
)
async def test_a_slow_client_is_cut_and_others_go_on(limits: Limits) -> None:
    async with serving(limits=limits) as server, server.connect() as client:
        await client.hello()
        async with raw(server, upgrade()) as slow:
            await slow.open()
            await slow.texts_until("mcp_servers")  # and reads no more from here on
            (tree,) = server.kernel.trees.values()
            assert tree.sockets.count == 2
            told = 0
            with trio.fail_after(10):
                while tree.sockets.count == 2:
                    answer = await client.call(
                        "tell", '{"news": "%s"}' % ("x" * 50_000)
                    )
                    assert answer["success"]
                    told += 1
            assert told > 1, "it was not cut at once"
            await echo(client)


@pytest.mark.rule("F-32", "W-053", "W-069")
async def test_who_answers_no_ping_is_cut() -> None:
    async with (
        serving(limits=Limits(ping_s=0.05, idle_s=0.2)) as server,
        server.connect() as client,
    ):
        await client.hello()
        async with raw(server, upgrade()) as silent:
            await silent.open()
            await silent.texts_until("mcp_servers")
            assert await silent.close_code() is None
            assert 9 in [
                event.opcode
                for event in silent.protocol.events_received()
                if isinstance(event, Frame)
            ]
        await echo(client)


@pytest.mark.rule("W-052")
@pytest.mark.usefixtures("transport")
async def test_a_reply_waits_for_the_disk(tmp_path: Path) -> None:
    disk = threading.Event()
    disk.set()
    waiting = threading.Event()

    def see(operation: str, path: str) -> None:
        if operation == "sync" and threading.current_thread().name == "culet writer":
            waiting.set()
            assert disk.wait(10)

    store = open_sqlite(str(tmp_path), limits=Limits(), files=Files(see))
    async with serving(storage=store) as server, server.connect() as client:
        await client.hello()
        assert (await client.call("note", "a"))["result"] == 1

        disk.clear()
        waiting.clear()
        call_id = await client.start("note", "b")
        with trio.fail_after(5):
            await trio.to_thread.run_sync(waiting.wait, 5)
        assert waiting.is_set(), "its commit is on the way to the disk"
        with trio.move_on_after(0.1):
            raise AssertionError(await client.frame())

        disk.set()
        answer = await client.frame()
        assert (answer["id"], answer["result"]) == (call_id, 2)


@pytest.mark.rule("W-063")
async def test_the_server_says_goodbye_when_it_stops() -> None:
    async with serving() as server, server.connect() as client:
        await client.hello()
        signal.raise_signal(signal.SIGTERM)
        assert (await client.closed())[0] == 1012


ROOMY = Limits(outbox_bytes=1 << 30, slow_client_s=600)
NEWS = 20  # of a million letters each: more than any socket buffers


def news(number: int, size: int = 0) -> str:
    return json.dumps({"news": number, "text": "x" * size})


async def pile_up(client: Client, slow: Raw) -> None:
    """Tell more than the slow one's socket takes; it reads nothing of it."""
    await slow.open()
    await slow.texts_until("mcp_servers")
    for number in range(NEWS):
        await client.call("tell", news(number, 1_000_000))


def numbers(texts: list[str]) -> list[int]:
    return [json.loads(text)["news"] for text in texts if '"news"' in text]


@pytest.mark.slow
async def test_who_reads_late_gets_everything_in_its_order() -> None:
    async with serving(limits=ROOMY) as server, server.connect() as client:
        await client.hello()
        async with raw(server, upgrade()) as slow:
            await pile_up(client, slow)
            # each answer to a ping stands for the ones before it
            await slow.stream.send_all(b"".join(masked(9, b"%d" % n) for n in range(9)))
            texts = await slow.texts_until(f'"news": {NEWS - 1},')
            assert numbers(texts) == list(range(NEWS))
            await client.call("tell", news(NEWS))
            await slow.texts_until(f'"news": {NEWS},')
            answers = [bytes(e.data) for e in slow.seen if e.opcode == 10]
            assert answers[-1] == b"8"


async def test_who_leaves_with_a_full_socket_is_answered_when_it_reads() -> None:
    async with serving(limits=ROOMY) as server, server.connect() as client:
        await client.hello()
        async with raw(server, upgrade()) as slow:
            await pile_up(client, slow)
            await slow.stream.send_all(masked(8, (4001).to_bytes(2, "big")))
            assert await slow.close_code() == 4001
        await echo(client)


async def test_who_vanishes_with_a_full_socket_harms_nobody() -> None:
    async with serving(limits=ROOMY) as server, server.connect() as client:
        await client.hello()
        async with raw(server, upgrade()) as slow:
            await pile_up(client, slow)
        (tree,) = server.kernel.trees.values()
        with trio.fail_after(5):
            while tree.sockets.count == 2:
                await client.call("tell", news(0))
        await echo(client)


async def test_who_does_not_answer_a_close_is_cut() -> None:
    async with serving(limits=Limits(handshake_s=0.1, ping_s=0.1)) as server:
        async with raw(server, upgrade(PATH + "?boom=1")) as deaf:
            await deaf.open()
            assert await deaf.close_code() == 1011
        (tree,) = server.kernel.trees.values()
        assert tree.sockets.count == 0
