"""Whose rights have ended is let go of within a second: sockets, streams, long polls.

On both transports, in every root and below. What they send in between is not heard.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import trio
from trio_websocket import ConnectionClosed

from culet.kernel import Agent, Request, Response, open_kernel, rpc
from culet.kernel.core.limits import REVOCATIONS_KEPT
from culet.kernel.errors import Refused
from culet.web import create_app
from web import serving as web_serving
from web.serving import HANDSHAKE, Server

pytestmark = [pytest.mark.rule("F-48"), pytest.mark.usefixtures("transport")]
HEARD: list[str] = []
WAITS = trio.Event()
DOOR = trio.Event()


def fresh() -> None:
    global WAITS, DOOR
    HEARD.clear()
    WAITS, DOOR = trio.Event(), trio.Event()


@pytest.fixture(autouse=True)
def _fresh() -> None:
    fresh()


class Room(Agent):
    """A facet that is talked to."""

    async def on_message(self, connection: Any, message: Any) -> None:
        HEARD.append(str(message))

    @rpc
    async def whoami(self) -> str:
        return self.name

    async def on_request(self, request: Request) -> Response:
        match request.path:
            case "/poll":
                WAITS.set()
                await trio.sleep_forever()
                raise AssertionError
            case "/events":
                return Response(ticks(), headers={"content-type": "text/event-stream"})
            case _:
                HEARD.append(request.path)
                return Response("here")


class House(Room):
    """A root with rooms."""

    @rpc
    async def long(self) -> str:
        WAITS.set()
        await DOOR.wait()
        HEARD.append("done")
        return "done"


async def ticks() -> AsyncIterator[bytes]:
    while True:
        yield b"data: tick\n\n"
        await trio.sleep(0.05)


async def authenticate(request: Request) -> Any:
    who = request.query.get("who")
    if who == "slow":
        WAITS.set()
        await DOOR.wait()
    return {"name": who} if who else None


def named(name: str) -> Any:
    return lambda identity: identity["name"] == name


@asynccontextmanager
async def opened(**options: Any) -> AsyncIterator[Server]:
    """Serve houses with rooms to people who say their name."""
    async with (
        open_kernel(roots=[House], facets=[Room], storage="memory:") as kernel,
        trio.open_nursery() as nursery,
    ):
        app = create_app(kernel, authenticate=authenticate, **options)
        run = web_serving.RUNNERS[web_serving.transport_of_tests]
        yield Server(await nursery.start(run, app), kernel)
        nursery.cancel_scope.cancel()


class Reader:
    """Reads an HTTP answer as it comes."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream, self.got, self.over = stream, b"", trio.Event()

    async def run(self) -> None:
        try:
            while part := await self.stream.receive_some(65536):
                self.got += part
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        self.over.set()

    async def until(self, text: bytes) -> None:
        with trio.fail_after(5):
            while text not in self.got:
                await trio.sleep(0.01)


@asynccontextmanager
async def reading(server: Server, path: str) -> AsyncIterator[Reader]:
    stream = await trio.open_tcp_stream("127.0.0.1", server.port)
    head = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n\r\n"
    async with stream, trio.open_nursery() as nursery:
        await stream.send_all(head.encode())
        reader = Reader(stream)
        nursery.start_soon(reader.run)
        yield reader
        nursery.cancel_scope.cancel()


PLACES = ("/agents/house/h", "/agents/house/g", "/agents/house/h/sub/room/r")


@pytest.mark.rule("W-058")
async def test_all_sockets_of_a_subject_close_within_a_second_and_no_others() -> None:
    async with opened() as server, AsyncExitStack() as stack:
        theirs, others = [], []
        for path in PLACES:
            for who, clients in (("eve", theirs), ("ada", others)):
                client = await stack.enter_async_context(
                    server.connect(f"{path}?who={who}")
                )
                await client.hello()
                clients.append(client)
        nobody = await stack.enter_async_context(server.connect(PLACES[0]))
        await nobody.hello()

        with trio.fail_after(1):
            assert server.kernel.revoke(named("eve"), reason="you are out") == 3
            for client in theirs:
                assert await client.closed() == (4401, "you are out")
        for client in (*others, nobody):
            assert (await client.call("whoami"))["success"]
        assert server.kernel.revoke({"name": "eve"}) == 0, "they are gone"
        assert server.kernel.revoke({"name": "ada"}, code=1012) == 3
        assert [(await c.closed())[0] for c in others] == [1012] * 3


@pytest.mark.rule("W-058")
async def test_what_they_send_in_between_is_not_heard_and_no_answer_comes() -> None:
    async with opened() as server, server.connect(f"{PLACES[0]}?who=eve") as eve:
        await eve.hello()
        await eve.socket.send_message("before")
        await eve.socket.send_message(
            json.dumps({"type": "rpc", "id": "1", "method": "long", "args": []})
        )
        with trio.fail_after(5):
            await WAITS.wait()
        server.kernel.revoke(named("eve"))
        with pytest.raises(ConnectionClosed):
            for _ in range(200):
                await eve.socket.send_message("after")
        DOOR.set()
        with trio.fail_after(5):
            while "done" not in HEARD:
                await trio.sleep(0.01)  # the call goes on, as that of who leaves
        with pytest.raises(ConnectionClosed):
            while True:
                assert "done" not in await eve.socket.get_message()
        assert HEARD == ["before", "done"]


async def test_a_client_that_reads_nothing_is_gone_within_a_second_too() -> None:
    async with (
        opened() as server,
        reading_nothing(server, f"{PLACES[0]}?who=eve") as stream,
    ):
        with trio.fail_after(5):
            while not server.kernel.metrics()["connections"]:
                await trio.sleep(0.01)
        (house,) = server.kernel.trees.values()
        (mute,) = house.sockets.everybody()
        while True:  # until neither the system nor the client takes any more
            before = mute._peer._outbox.size  # type: ignore[attr-defined]
            mute.send("x" * 60_000)
            await trio.sleep(0.01)
            if before and mute._peer._outbox.size > before:  # type: ignore[attr-defined]
                break
        server.kernel.revoke(named("eve"))
        with trio.fail_after(1):
            while house.sockets.count:
                await trio.sleep(0.01)
        del stream


@asynccontextmanager
async def reading_nothing(
    server: Server, path: str
) -> AsyncIterator[trio.SocketStream]:
    stream = await trio.open_tcp_stream("127.0.0.1", server.port)
    lines = [f"GET {path} HTTP/1.1", f"Host: 127.0.0.1:{server.port}", *HANDSHAKE]
    await stream.send_all("\r\n".join([*lines, "", ""]).encode())
    async with stream:
        yield stream


@pytest.mark.rule("W-058")
async def test_streams_and_long_polls_end_and_the_next_request_is_asked_anew() -> None:
    async with (
        opened() as server,
        server.connect(PLACES[0]),
        reading(server, f"{PLACES[2]}/events?who=eve") as events,
        reading(server, f"{PLACES[0]}/poll?who=eve") as poll,
        reading(server, f"{PLACES[0]}/events?who=ada") as ada,
    ):
        for stream in (events, ada):
            await stream.until(b"tick")
        with trio.fail_after(5):
            await WAITS.wait()
        assert server.kernel.revoke(named("eve")) == 2
        with trio.fail_after(1):
            await events.over.wait()
            await poll.until(b"revoked")
        assert poll.got.startswith(b"HTTP/1.1 401")
        assert not events.got.endswith(b"0\r\n\r\n"), "it was cut, it has no end"
        seen = len(ada.got)
        await ada.until(b"tick")
        with trio.fail_after(5):
            while len(ada.got) <= seen:
                await trio.sleep(0.01)
        assert (await server.http("GET", f"{PLACES[0]}/x?who=eve"))[0] == 200
        assert HEARD == ["/x"]
        with trio.fail_after(2):
            while len(server.kernel.guests) > 1:
                await trio.sleep(0.01)


async def test_who_is_on_the_way_when_they_are_revoked_does_not_get_in() -> None:
    async with opened() as server:
        answers: list[int] = []

        async def ask() -> None:
            answers.append((await server.http("GET", f"{PLACES[0]}/x?who=slow"))[0])

        async def join() -> None:
            answers.append(await server.close_of(f"{PLACES[0]}?who=slow"))

        for way, refused in ((ask, 401), (join, 4401)):
            fresh()
            answers.clear()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(way)
                with trio.fail_after(5):
                    await WAITS.wait()
                server.kernel.revoke(named("slow"))
                DOOR.set()
            assert (answers, HEARD) == ([refused], [])
        assert (await server.http("GET", f"{PLACES[0]}/x?who=slow"))[0] == 200


async def test_a_rule_that_fails_lets_go_of_nobody_and_tells_its_caller() -> None:
    async with opened() as server, server.connect(f"{PLACES[0]}?who=eve") as eve:
        await eve.hello()
        with pytest.raises(KeyError):
            server.kernel.revoke(lambda identity: identity["nothing"])
        assert (await eve.call("whoami"))["success"]


async def test_more_revocations_than_are_kept_refuse_who_was_on_the_way() -> None:
    async with opened() as server:
        guests = server.kernel.guests
        guests.check("eve", guests.number)
        server.kernel.revoke(lambda identity: identity.name == "x")
        with pytest.raises(Refused):  # the rule cannot tell of a text
            guests.check("eve", guests.number - 1)
        begin = guests.number
        for _ in range(REVOCATIONS_KEPT):
            server.kernel.revoke("somebody")
        guests.check("eve", begin)
        server.kernel.revoke("somebody")
        with pytest.raises(Refused):
            guests.check("eve", begin)
