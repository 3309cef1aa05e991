"""Requests that offer to change the protocol: their connections end, whatever is answered."""

from __future__ import annotations

import pytest
import trio

from web.serving import parse_answer, read_all, serving

CONNECT = b"CONNECT /agents/hub/h HTTP/1.1\r\nHost: x\r\n\r\n"
FIRST = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.rule("I-43", "F-49")
@pytest.mark.parametrize("before", [b"", FIRST], ids=["first", "kept alive"])
async def test_a_connect_is_refused_and_its_connection_ends(
    before: bytes, transport: str
) -> None:
    """Found by hostile heads: hypercorn reads no more and its idle timer has stopped."""
    async with serving() as server:
        stream = await trio.open_tcp_stream("127.0.0.1", server.port)
        if before:
            await stream.send_all(before)
            with trio.fail_after(5):
                while b"ok\n" not in await stream.receive_some(65536):
                    pass
        await stream.send_all(CONNECT)
        answer = await read_all(stream)  # fails when the server does not hang up
        assert parse_answer(answer)[0] == 501
        assert server.kernel.trees == {}


@pytest.mark.rule("I-43", "F-49")
@pytest.mark.parametrize(
    "head",
    [
        (
            b"POST /agents/hub/h/stream HTTP/1.1\r\nHost: x\r\nUpgrade: tls/1.0\r\n"
            b"Content-Length: 4\r\n\r\nbody"
        ),
        (
            b"GET /agents/hub/h/stream HTTP/1.1\r\nHost: x\r\nUpgrade: other\r\n"
            b"Connection: Upgrade\r\n\r\n"
        ),
    ],
    ids=["with a body", "get"],
)
async def test_who_offers_another_protocol_is_answered_and_its_connection_ends(
    head: bytes, transport: str
) -> None:
    async with serving() as server:
        stream = await trio.open_tcp_stream("127.0.0.1", server.port)
        await stream.send_all(head)
        status, headers, body = parse_answer(await read_all(stream))
        assert (status, body) == (200, b"one two three")
        assert headers["connection"] == "close"
