"""The bounds of the web that are times: just under each nothing happens, past it it does."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import MockClock

from culet.kernel import Limits
from culet.web.serve import _Replayed
from web.byhand import Peer, Polite, SocketPeer, pass_time, peer, sockets, still, until
from web.serving import BEGUN, parse_answer, serving
from web.test_transport import masked, upgrade

POST = b"POST /agents/hub/h/echo HTTP/1.1\r\nHost: x\r\n"
SIZED = POST + b"Content-Length: 1000000\r\n\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
BIG = 8 << 20  # more than sockets buffer


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


# ---- before and between requests


@pytest.mark.limit("handshake_s")
@pytest.mark.rule("F-49", "I-43")
@pytest.mark.parametrize("trickle", [b"", b"GET / HT"], ids=["silence", "trickle"])
async def test_a_first_request_has_handshake_s_to_come(
    trickle: bytes, mock_clock: MockClock
) -> None:
    async with serving(limits=Limits(handshake_s=10)) as server:
        async with peer(server) as slow:
            for at in range(8):
                await slow.say(trickle[at : at + 1])
                await pass_time(mock_clock, 1.2, 1)
            assert not slow.ended
            await pass_time(mock_clock, 0.5, 1)
            await until(lambda: slow.ended)
            assert slow.heard == b""
        assert (await server.http("GET", "/healthz"))[0] == 200


@pytest.mark.limit("idle_s")
@pytest.mark.rule("F-49")
@pytest.mark.parametrize("trickle", [b"", b"GET / HT"], ids=["silence", "trickle"])
async def test_the_next_request_has_idle_s_to_come(
    trickle: bytes, mock_clock: MockClock
) -> None:
    async with (
        serving(limits=Limits(idle_s=16)) as server,
        peer(server, b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n") as slow,
    ):
        await until(lambda: b"ok\n" in slow.heard)
        for at in range(8):
            await slow.say(trickle[at : at + 1])
            await pass_time(mock_clock, 1.9, 1)
        assert not slow.ended
        await pass_time(mock_clock, 1, 1)
        await until(lambda: slow.ended)


# ---- WebSockets


@pytest.mark.limit("ping_s")
@pytest.mark.rule("F-32")
async def test_who_vanishes_is_pinged_after_ping_s_and_cut_after_twice_that(
    mock_clock: MockClock,
) -> None:
    async with (
        serving(limits=Limits(ping_s=25)) as server,
        peer(server, upgrade(), kind=Polite) as there,
        peer(server, upgrade(), kind=SocketPeer) as gone,
    ):
        await until(lambda: sockets(server) == 2)
        await pass_time(mock_clock, 24.5, 25)
        assert (there.pings, gone.pings) == (0, 0)
        await pass_time(mock_clock, 2, 4)
        assert (there.pings, gone.pings) == (1, 1)
        await pass_time(mock_clock, 23, 23)
        assert not gone.ended
        await pass_time(mock_clock, 2.5, 5)
        await until(lambda: gone.ended)
        await until(lambda: sockets(server) == 1)
        assert gone.close_code is None
        await pass_time(mock_clock, 200, 200)
        assert not there.ended, "who answers stays"
        assert there.pings in range(7, 11)


@pytest.mark.limit("idle_s")
async def test_a_socket_without_a_sign_of_life_has_idle_s(
    mock_clock: MockClock,
) -> None:
    async with (
        serving(limits=Limits(idle_s=30, ping_s=25)) as server,
        peer(server, upgrade(), kind=SocketPeer) as gone,
    ):
        await until(lambda: sockets(server) == 1)
        await pass_time(mock_clock, 29.5, 30)
        assert not gone.ended
        await pass_time(mock_clock, 2, 4)
        await until(lambda: gone.ended)


@pytest.mark.limit("slow_client_s")
@pytest.mark.rule("F-31", "I-20", "I-43")
async def test_who_reads_nothing_is_cut_after_slow_client_s_and_nobody_waits(
    transport: str, mock_clock: MockClock
) -> None:
    limits = Limits(slow_client_s=20, outbox_bytes=1 << 30, ping_s=500, idle_s=1000)
    async with (
        serving(limits=limits) as server,
        peer(server, upgrade(), deaf=4096),
        server.connect() as good,
    ):
        await good.hello()
        await until(lambda: sockets(server) == 2)
        for _ in range(8):
            answer = await good.call("tell", '{"news": "%s"}' % ("x" * (BIG // 10)))
            assert answer["success"]
        await still()
        await pass_time(mock_clock, 19, 10)
        assert sockets(server) == 2
        assert (await good.call("ping", "a"))["result"] == "a"
        await pass_time(mock_clock, 6, 12)
        await until(lambda: sockets(server) == 1)
        assert (await good.call("ping", "b"))["result"] == "b"


@pytest.mark.limit("slow_client_s")
async def test_who_reads_a_little_now_and_then_is_no_slow_client(
    mock_clock: MockClock,
) -> None:
    limits = Limits(slow_client_s=20, outbox_bytes=1 << 30, ping_s=500, idle_s=1000)
    async with (
        serving(limits=limits) as server,
        peer(server, upgrade(), deaf=1 << 18) as slow,
        server.connect() as good,
    ):
        await good.hello()
        await until(lambda: sockets(server) == 2)
        for _ in range(20):
            await good.call("tell", '{"news": "%s"}' % ("x" * (BIG // 10)))
        for _ in range(4):
            got = 0
            while got < 600_000:
                got += len(await slow.stream.receive_some(1 << 17))
            await still()
            await pass_time(mock_clock, 15, 15)
        assert sockets(server) == 2
        await pass_time(mock_clock, 30, 30)  # what TCP still moved counts from there
        await until(lambda: sockets(server) == 1)


@pytest.mark.limit("handshake_s")
async def test_who_does_not_answer_a_close_is_cut_after_handshake_s(
    transport: str, mock_clock: MockClock
) -> None:
    limits = Limits(handshake_s=10, ping_s=500, idle_s=1000)
    async with (
        serving(limits=limits) as server,
        peer(server, upgrade(), kind=SocketPeer) as rude,
    ):
        await until(lambda: sockets(server) == 1)
        (tree,) = server.kernel.trees.values()
        await until(lambda: any("mcp_servers" in text for text in rude.texts))
        (connection,) = tree.sockets.of(tree.root_slot)
        connection.close(4001, "go")
        await until(lambda: rude.close_code == 4001)
        await pass_time(mock_clock, 9.5, 10)
        assert not rude.ended
        await pass_time(mock_clock, 2, 4)
        await until(lambda: rude.ended)
        await until(lambda: sockets(server) == 0)


async def test_who_waits_for_a_busy_agent_is_not_taken_for_silent(
    mock_clock: MockClock,
) -> None:
    """Nothing of a client is read while so many of its calls are in work."""
    limits = Limits(rpc_per_connection=1, ping_s=25, idle_s=75)
    async with (
        serving(limits=limits) as server,
        peer(server, upgrade(), kind=Polite) as busy,
    ):
        await until(lambda: any("mcp_servers" in text for text in busy.texts))
        call = b'{"type":"rpc","id":"%s","method":"slow","args":[300]}'
        await busy.say(masked(1, call % b"1"))
        await pass_time(mock_clock, 290, 290)
        assert (busy.ended, sockets(server)) == (False, 1)
        await pass_time(mock_clock, 15, 5)
        await until(lambda: any('"1"' in text for text in busy.texts))
        await pass_time(mock_clock, 60, 60)
        assert busy.pings > 0
        assert not busy.ended


# ---- what an HTTP client reads


@pytest.mark.limit("slow_client_s")
@pytest.mark.rule("F-31")
async def test_an_answer_that_nobody_reads_is_given_up_after_slow_client_s(
    mock_clock: MockClock,
) -> None:
    limits = Limits(slow_client_s=20, idle_s=10_000)
    async with serving(limits=limits) as server, peer(server, deaf=1 << 18) as slow:
        await slow.say(POST + b"Content-Length: %d\r\n\r\n" % BIG + b"x" * BIG)
        assert await slow.stream.receive_some(100), "the answer has begun"
        for _ in range(20):
            await still()
        await pass_time(mock_clock, 19, 10)
        await pass_time(mock_clock, 6, 12)
        late = Peer(slow.stream)
        await late.listen()
        assert len(late.heard) < BIG - 1_000_000, "what the system held"


class Narrow:
    """A stream whose every send takes its time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.sent = b""
        self.socket = self
        self.closed = False

    async def send_all(self, data: bytes) -> None:
        await trio.sleep(self.seconds)
        self.sent += data

    def close(self) -> None:
        self.closed = True


@pytest.mark.limit("slow_client_s")
@pytest.mark.parametrize(("seconds", "lasts"), [(19.9, True), (20.1, False)])
async def test_who_takes_an_answer_in_parts_is_no_slow_client(
    seconds: float, lasts: bool, clock: MockClock
) -> None:
    narrow = Narrow(seconds)
    stream: Any = _Replayed(narrow, b"", 20)  # type: ignore[arg-type]
    whole = bytes(range(256)) * 2_000
    if lasts:
        await stream.send_all(whole)
        assert narrow.sent == whole
    else:
        with pytest.raises(trio.BrokenResourceError):
            await stream.send_all(whole)
    assert narrow.closed is not lasts


# ---- what it sends


@pytest.mark.limit("body_late_s", "body_pace")
@pytest.mark.rule("F-49", "I-43")
@pytest.mark.parametrize("head", [SIZED, CHUNKED], ids=["sized", "chunked"])
@pytest.mark.parametrize("every", [0, 1], ids=["silence", "trickle"])
async def test_a_body_that_trickles_is_cut_when_it_is_body_late_s_behind(
    transport: str, head: bytes, every: int, mock_clock: MockClock
) -> None:
    limits = Limits(body_late_s=60, body_pace=1000)
    async with serving(limits=limits) as server, peer(server, head) as slow:
        await still()
        for _ in range(59):
            data = b"x" * every
            await slow.say(chunk(data) if head is CHUNKED and data else data)
            await pass_time(mock_clock, 1, 1)
        assert (slow.heard, slow.ended) == (b"", False)
        assert (await server.http("GET", "/healthz"))[0] == 200, "others are served"
        await pass_time(mock_clock, 2, 2)
        await until(lambda: slow.ended)
        assert slow.status == 408


@pytest.mark.limit("body_pace")
async def test_a_body_that_keeps_its_pace_may_take_as_long_as_it_takes(
    transport: str, mock_clock: MockClock
) -> None:
    limits = Limits(body_late_s=10, body_pace=1000, handshake_s=5, idle_s=20)
    size, parts = 8_000, 40
    head = POST + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % (size * parts)
    async with serving(limits=limits) as server, peer(server, head) as slow:
        for _ in range(parts):
            await pass_time(mock_clock, 8, 2)
            await slow.say(b"x" * size)
            await still()
        await until(lambda: slow.ended)
        assert slow.status == 200
        assert len(parse_answer(slow.heard)[2]) == size * parts


@pytest.mark.limit("body_wait_s")
async def test_a_body_that_no_agent_reads_is_dropped_after_body_wait_s(
    transport: str, mock_clock: MockClock
) -> None:
    limits = Limits(body_wait_s=60, body_unread_bytes=1 << 16)
    path = b"POST /agents/hub/h/late HTTP/1.1\r\nHost: x\r\n"
    head = path + b"Content-Length: 1000000\r\n\r\n" + b"x" * 1_000_000
    for wait, status in ((59, 200), (61, 408)):
        first = head.replace(b"/late", b"/late?s=%d" % wait)
        async with serving(limits=limits) as server, peer(server) as client:
            client.stream.setsockopt(1, 7, 1 << 22)
            BEGUN.clear()
            await client.say(first)
            await until(lambda: BEGUN)
            await still()
            await pass_time(mock_clock, wait + 0.2, 62)
            await until(lambda client=client: client.status)
            assert client.status == status, wait
