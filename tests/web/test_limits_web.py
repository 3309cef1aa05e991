"""Each bound of the web: what is at it passes, one more is refused as it should be."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest
import trio

from culet.kernel import Limits
from web.serving import parse_answer, read_all, serving
from web.test_transport import masked, raw, upgrade


@pytest.mark.limit("header_bytes")
@pytest.mark.rule("I-43")
@pytest.mark.parametrize(("size", "status"), [(1000, 200), (1001, 431)])
@pytest.mark.parametrize("step", [7, 5000], ids=["in parts", "at once"])
async def test_a_head_at_its_bound_passes(size: int, status: int, step: int) -> None:
    start = b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX: "
    head = start + b"y" * (size - len(start) - 4) + b"\r\n\r\n"
    assert len(head) == size
    async with serving(limits=Limits(header_bytes=1000)) as server:
        stream = await trio.open_tcp_stream("127.0.0.1", server.port)
        for at in range(0, size, step):
            await stream.send_all(head[at : at + step])
        assert parse_answer(await read_all(stream))[0] == status


@pytest.mark.limit("message_bytes")
@pytest.mark.rule("I-43")
@pytest.mark.parametrize("letter", ["x", "☃"], ids=["ascii", "wide"])
async def test_a_message_at_its_bound_passes(letter: str) -> None:
    text = letter * (2400 // len(letter.encode()))
    async with (
        serving(limits=Limits(message_bytes=2400)) as server,
        raw(server, upgrade()) as client,
    ):
        await client.open()
        await client.stream.send_all(masked(1, text.encode()))
        assert text in await client.texts_until(text)
        await client.stream.send_all(masked(1, text.encode() + b"x"))
        assert await client.close_code() == 1009


@pytest.mark.limit("connections", "connections_per_address")
@pytest.mark.rule("I-43")
@pytest.mark.parametrize("name", ["connections", "connections_per_address"])
async def test_connections_up_to_their_bound_are_served(name: str) -> None:
    async with serving(limits=Limits(**{name: 3})) as server:
        async with AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(server.connect()) for _ in range(3)
            ]
            for client in clients:
                await client.hello()
            async with raw(server, upgrade()) as more:
                assert await read_all(more.stream) == b""
            assert (await clients[0].call("ping", "hi"))["result"] == "hi"
        with trio.fail_after(5):
            while server.kernel.metrics()["connections"]:
                await trio.sleep(0.01)
        async with server.connect() as again:
            await again.hello()
