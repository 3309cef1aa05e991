"""The Python client over plain HTTP: an answer is whole, whatever becomes of the line."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from culet.kernel import Limits
from culet.kernel.errors import CallFailed, ConnectionEnded, ConnectionLost, UsageError
from culet.web import ask_over_http, connect
from web.remote import GATES, QUICK, fresh_messages, gate, host, running, wire, words

BOT = "chat-bot/b"


@pytest.fixture(autouse=True)
def fresh() -> None:
    GATES.clear()


async def test_an_answer_comes_chunk_by_chunk_to_its_end() -> None:
    async with running() as server:
        async with ask_over_http(server.url(BOT), "say 6") as answer:
            kinds = [chunk["type"] async for chunk in answer]
        assert (kinds[0], kinds.count("text-delta")) == ("start", 6)
        assert (answer.text, answer.outcome) == (words(6), "completed")
        assert (await fresh_messages(server.url(BOT)))[-1]["parts"] == answer.parts


async def test_a_line_that_is_cut_loses_and_doubles_nothing() -> None:
    asked = 0

    async def headers() -> dict[str, str]:
        nonlocal asked
        asked += 1
        await trio.lowlevel.checkpoint()
        return {"x-token": f"t{asked}"}

    async with running() as server, wire(server.port) as proxy:
        url = proxy.url(BOT)
        async with ask_over_http(
            url, "say 6 3", headers=headers, limits=QUICK, seed=1
        ) as answer:
            said = []
            while "".join(said) != words(3):
                chunk = await anext(answer)
                said += [chunk["delta"]] if chunk["type"] == "text-delta" else []
            proxy.cut()
            gate("chat").open.set()
            with trio.fail_after(10):
                said += [c["delta"] async for c in answer if c["type"] == "text-delta"]
        assert "".join(said) == words(6) == answer.text
        assert answer.outcome == "completed"
        assert asked == 2


@pytest.mark.rule("W-094")
async def test_what_ended_while_the_line_was_cut_is_read_all_the_same() -> None:
    async with (
        running() as server,
        wire(server.port) as proxy,
        connect(server.url(BOT)) as watcher,
    ):
        url = proxy.url(BOT)
        async with ask_over_http(url, "say 6 3", limits=QUICK) as answer:
            await gate("chat").reached.wait()
            proxy.accepts = False
            proxy.cut()
            gate("chat").open.set()
            with trio.fail_after(10):
                await watcher.until(lambda a: a.messages and not a.turns)
            proxy.accepts = True
            assert await answer.done() == words(6)


@pytest.mark.rule("W-095")
async def test_it_goes_on_over_a_restart_of_the_server(tmp_path: Any) -> None:
    async with (
        host(tmp_path) as server,
        ask_over_http(server.url(BOT), "say 6 3", limits=QUICK) as answer,
    ):
        await gate("chat").reached.wait()
        await server.stop()
        GATES.clear()
        gate("chat").open.set()
        await server.start()
        with trio.fail_after(20):
            assert await answer.done() == words(6)


async def test_who_leaves_stops_nothing() -> None:
    async with running() as server:
        async with ask_over_http(server.url(BOT), "say 6 3"):
            await gate("chat").reached.wait()
        gate("chat").open.set()
        async with connect(server.url(BOT)) as watcher:
            with trio.fail_after(10):
                await watcher.until(lambda a: a.messages and not a.turns)
            assert watcher.messages[-1]["parts"][-1]["text"] == words(6)


async def test_a_turn_that_fails_says_so_behind_what_it_said() -> None:
    async with running() as server:
        async with ask_over_http(server.url(BOT), "fail 3") as answer:
            with pytest.raises(CallFailed):
                await answer.done()
        assert answer.outcome is None


async def test_what_is_refused_or_never_arrives_is_told_by_name() -> None:
    async with running() as server, wire(server.port) as proxy:
        with pytest.raises(ConnectionEnded, match="nobody") as refused:
            async with ask_over_http(server.url("nobody/b"), "hi"):
                pass
        assert refused.value.code == 4400
        proxy.accepts = False
        with pytest.raises(ConnectionLost):
            async with ask_over_http(proxy.url(BOT), "hi"):
                pass
        for question in ({"id": "1"}, {"id": "1", "role": "user", "parts": [object()]}):
            with pytest.raises(UsageError):
                async with ask_over_http(server.url(BOT), question):
                    pass


@asynccontextmanager
async def saying(answer: bytes) -> AsyncIterator[int]:
    """Listen, answer whatever comes with that, and then nothing more."""

    async def serve(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.receive_some()
            await stream.send_all(answer)
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        yield listener.socket.getsockname()[1]
        nursery.cancel_scope.cancel()


HASTY = Limits(handshake_s=0.05)


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_a_server_that_says_nothing_is_not_waited_for(scheme: str) -> None:
    async with saying(b"") as port:
        with trio.fail_after(5), pytest.raises(ConnectionLost):
            url = f"{scheme}://127.0.0.1:{port}/agents/bot/b"
            async with ask_over_http(url, "hi", limits=HASTY):
                pass


async def test_a_refusal_that_does_not_end_is_told_as_far_as_it_came() -> None:
    head = b"HTTP/1.1 403 No\r\ncontent-length: 100\r\n\r\nnot you"
    async with saying(head) as port:
        with (
            trio.fail_after(5),
            pytest.raises(ConnectionEnded, match="not you") as told,
        ):
            url = f"http://127.0.0.1:{port}/agents/bot/b"
            async with ask_over_http(url, "hi", limits=HASTY):
                pass
        assert told.value.code == 4403


async def test_what_is_none_of_the_protocol_is_passed_over() -> None:
    head = b"HTTP/1.1 200 OK\r\nx-turn: t\r\n\r\n"
    events = ("{no", "null", "[]", '{"type": 7}', '{"type": "start"}', "[DONE]")
    said = "".join(f"data: {event}\n\n" for event in events)
    async with saying(head + said.encode()) as port:
        url = f"http://127.0.0.1:{port}/agents/bot/b"
        async with ask_over_http(url, "hi") as answer:
            with trio.fail_after(5):
                assert [chunk async for chunk in answer] == [{"type": "start"}]
        assert answer.outcome == "completed"
