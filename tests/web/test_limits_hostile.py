"""Bounds against those who mean harm: many sockets, small parts, bombs, floods."""

from __future__ import annotations

import resource
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager

import pytest
import trio
from trio.testing import MockClock
from websockets.frames import Frame, Opcode

from culet.kernel import Limits
from web.byhand import Peer, Polite, SocketPeer, pass_time, peer, sockets, until
from web.serving import Server, parse_answer, serving
from web.test_transport import masked, upgrade

MIB = 1 << 20


@contextmanager
def grows_less_than(most: int) -> Iterator[None]:
    """Fail when what Python holds at any time meanwhile is so much more than before."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        yield
        grown = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert grown < most, f"{grown / MIB:.1f} MiB"


async def others_are_served(server: Server) -> None:
    async with server.connect() as good:
        await good.hello()
        assert (await good.call("ping", "x"))["result"] == "x"


# ---- many sockets


@pytest.mark.limit("connections_per_address")
@pytest.mark.rule("F-49", "I-43")
@pytest.mark.gap("it is a thousand clients, and the server of them")
async def test_a_thousand_idle_sockets_of_one_address_are_let_go_and_others_served(
    mock_clock: MockClock,
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < 4096:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    many = Limits().connections_per_address
    async with serving() as server, AsyncExitStack() as stack:
        idle: list[Peer] = [
            await stack.enter_async_context(peer(server, address="127.0.0.1"))
            for _ in range(many)
        ]
        more = await stack.enter_async_context(peer(server, address="127.0.0.1"))
        await until(lambda: more.ended, "one more is not taken")
        assert not any(one.ended for one in idle)
        asked = b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        async with peer(server, asked, address="127.0.0.2") as other:
            await until(lambda: other.ended)
            assert other.status == 200
        await pass_time(mock_clock, Limits().handshake_s + 0.5, 2)
        await until(lambda: all(one.ended for one in idle))
        assert all(one.heard == b"" for one in idle)
        async with peer(server, asked, address="127.0.0.1") as again:
            await until(lambda: again.ended)
            assert again.status == 200


# ---- large messages and bodies, however they are cut


def in_parts(data: bytes, size: int) -> bytes:
    """Return one text message in fragments of so many bytes."""
    parts = [data[at : at + size] for at in range(0, len(data), size)]
    last = len(parts) - 1
    frames = (
        Frame(Opcode.CONT if at else Opcode.TEXT, part, fin=at == last)
        for at, part in enumerate(parts)
    )
    return b"".join(frame.serialize(mask=True) for frame in frames)


@pytest.mark.limit("message_bytes")
@pytest.mark.rule("F-35", "I-43")
@pytest.mark.parametrize("size", [1, 100, 2399, 5000])
async def test_a_message_is_bounded_however_it_is_cut(
    transport: str, size: int
) -> None:
    async with serving(limits=Limits(message_bytes=2400)) as server:
        async with peer(server, upgrade(), kind=Polite) as client:
            await until(lambda: any("mcp_servers" in text for text in client.texts))
            await client.say(in_parts(b"x" * 2400, size))
            await until(lambda: client.texts[-1] == "x" * 2400)
            await client.say(in_parts(b"x" * 2401, size))
            await until(lambda: client.ended)
            assert client.close_code == 1009
        await others_are_served(server)


@pytest.mark.limit("body_bytes")
@pytest.mark.rule("F-49", "I-43")
async def test_a_chunked_body_without_end_is_refused_at_the_bound(
    transport: str,
) -> None:
    head = b"POST /agents/hub/h/echo HTTP/1.1\r\nHost: x\r\n"
    chunk, end = b"64\r\n" + b"x" * 100 + b"\r\n", b"0\r\n\r\n"
    chunked = head + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    limits = Limits(body_bytes=2000, message_bytes=1000)
    async with serving(limits=limits) as server:
        async with peer(server, chunked + chunk * 20 + end) as client:
            await until(lambda: client.ended)
            assert client.status == 200
            assert len(parse_answer(client.heard)[2]) == 2000
        async with peer(server, chunked + chunk * 20 + b"1\r\nx\r\n") as client:
            await until(lambda: client.ended)
            assert client.status == 413
        await others_are_served(server)


@pytest.mark.limit("message_bytes")
@pytest.mark.rule("F-35", "I-43")
@pytest.mark.gap("counting memory makes it slow")
@pytest.mark.parametrize("part", [b"", b"xy"], ids=["empty", "two bytes"])
async def test_a_message_takes_its_size_and_not_that_of_its_parts(part: bytes) -> None:
    count = 40_000
    async with serving() as server:
        async with peer(server, upgrade(), kind=SocketPeer) as client:
            await until(lambda: any("mcp_servers" in text for text in client.texts))
            await client.say(masked(1, b"", fin=False))
            flood = masked(0, part, fin=False) * (count // 100)
            with grows_less_than(9 * MIB):  # what one read brings, in frames
                for _ in range(100):
                    await client.say(flood)
                    await trio.testing.wait_all_tasks_blocked()
                held = tracemalloc.get_traced_memory()[0]
                await client.say(masked(0, b"."))
                await until(lambda: client.texts[-1].endswith("."))
                assert held < 2 * MIB, f"{held / MIB:.1f} MiB"
            assert client.texts[-1] == part.decode() * count + "."
        await others_are_served(server)


@pytest.mark.rule("F-50", "I-43")
@pytest.mark.gap("counting memory makes it slow")
async def test_what_was_compressed_without_leave_is_not_inflated(
    transport: str,
) -> None:
    squeeze = zlib.compressobj(9, wbits=-15)
    bomb = squeeze.compress(bytes(60 * MIB)) + squeeze.flush(zlib.Z_SYNC_FLUSH)
    assert len(bomb) < 100_000
    frame = bytes((0xC1,)) + masked(1, bomb[:-4])[1:]
    offer = "Sec-WebSocket-Extensions: permessage-deflate; client_max_window_bits\r\n"
    async with serving() as server:
        async with peer(server, upgrade(extra=offer), kind=SocketPeer) as client:
            await until(lambda: any("mcp_servers" in text for text in client.texts))
            assert b"permessage-deflate" not in client.heard
            with grows_less_than(4 * MIB):
                await client.say(frame)
                await until(lambda: client.ended)
            assert client.close_code == (1002 if transport == "own" else None)
        await until(lambda: sockets(server) == 0)
        await others_are_served(server)


# ---- floods


@pytest.mark.rule("F-35", "I-43")
@pytest.mark.gap("counting memory makes it slow")
@pytest.mark.parametrize("reads", [True, False], ids=["reads", "reads nothing"])
async def test_a_flood_of_pings_takes_no_memory_and_nobodys_turn(reads: bool) -> None:
    pings = b"".join(masked(9, b"%125d" % n) for n in range(250))
    async with serving() as server:
        kind, deaf = SocketPeer, 0 if reads else 4096
        async with peer(server, upgrade(), kind=kind, deaf=deaf) as client:
            await until(lambda: sockets(server) == 1)
            await others_are_served(server)
            with grows_less_than(12 * MIB):
                for _ in range(200 if not reads else 20):  # 6 MB: more than is buffered
                    await client.say(pings)
                    await trio.testing.wait_all_tasks_blocked()
                await others_are_served(server)
            assert not client.ended
            if reads:
                await until(lambda: len(client.pongs) == 20 * 250)
