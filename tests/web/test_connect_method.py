"""CONNECT asks for another protocol on the connection: nobody here speaks one."""

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
