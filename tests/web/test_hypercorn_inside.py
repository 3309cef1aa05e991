"""What leans on hypercorn's inside stands in one module, and there is a way without it."""

from __future__ import annotations

import ast
import logging
import signal
import struct
from importlib import metadata
from pathlib import Path

import pytest
import trio

import culet.web
from culet.kernel import Limits
from culet.kernel.errors import UsageError
from culet.web import create_app, hypercorn_inside, serve
from culet.web.serve import _Replayed
from web.serving import serving
from web.test_transport import raw, upgrade

PUBLIC = {"hypercorn.config"}  # `Config`, as its documentation has it


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another hypercorn is installed."""
    monkeypatch.setattr(hypercorn_inside, "installed", "0.19.2")


def test_only_one_module_reaches_into_hypercorn() -> None:
    for path in Path(culet.web.__path__[0]).glob("*.py"):
        if path.stem == "hypercorn_inside":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.ImportFrom(module=str(module), level=0):
                    names = [module]
                case ast.Import(names=aliases):
                    names = [alias.name for alias in aliases]
                case _:
                    continue
            for name in names:
                assert not name.startswith("hypercorn") or name in PUBLIC, path


def test_the_version_that_is_known_is_the_one_that_is_asked_for() -> None:
    asked = [r for r in metadata.requires("culet") or () if r.startswith("hypercorn")]
    assert asked == [f"hypercorn~={hypercorn_inside.KNOWN}.0"]
    assert hypercorn_inside.fits()


@pytest.mark.parametrize("version", ["0.17.9", "0.19.0", "1.0", "0.180.1"])
def test_another_version_is_not_reached_into(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hypercorn_inside, "installed", version)
    assert not hypercorn_inside.fits()


async def test_a_hypercorn_that_fails_is_told_only_where_it_knows_the_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[object] = []

    async def send(event: object) -> None:
        said.append(event)

    await hypercorn_inside.give_up(send)
    assert said == [None]
    monkeypatch.setattr(hypercorn_inside, "installed", "0.19.0")
    await hypercorn_inside.give_up(send)
    assert said == [None]


@pytest.mark.usefixtures("unknown")
async def test_under_another_hypercorn_agents_are_served_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "culet.web")
    async with serving(transport="own") as server:
        status, _headers, body = await server.http("GET", "/agents/hub/h/stream")
        assert (status, body) == (200, b"one two three")
        async with server.connect() as client:
            await client.hello()
            assert (await client.call("ping", "hi"))["result"] == "hi"
            async with raw(server, upgrade()) as gone:
                await gone.open()
                linger = struct.pack("ii", 1, 0)  # closing resets the connection
                gone.stream.setsockopt(1, 13, linger)
            for _ in range(20):
                assert (await client.call("tell", '{"x": 1}'))["success"]
        assert await server.close_of("/agents/hub/h/sub/writer/guessed") == 4404
        foreign = [("Origin", "https://evil.example")]
        assert await server.refused("/agents/hub/h", foreign) == 403
    assert "hypercorn 0.19.2 is not 0.18" in caplog.text


@pytest.mark.usefixtures("unknown")
async def test_under_another_hypercorn_a_slow_client_is_given_up_and_others_go_on() -> (
    None
):
    limits = Limits(outbox_bytes=200_000, slow_client_s=600)
    async with (
        serving(limits=limits, transport="own") as server,
        server.connect() as client,
        raw(server, upgrade()) as slow,
    ):
        await client.hello()
        await slow.open()
        await slow.texts_until("mcp_servers")  # and reads no more from here on
        (tree,) = server.kernel.trees.values()
        with trio.fail_after(10):
            while tree.sockets.count == 2:
                await client.call("tell", '{"news": "%s"}' % ("x" * 50_000))
        assert (await client.call("ping", "hi"))["result"] == "hi"


@pytest.mark.usefixtures("unknown")
async def test_under_another_hypercorn_a_signal_and_a_failing_start_are_told() -> None:
    async with serving(transport="own") as server, server.connect() as client:
        await client.hello()
        signal.raise_signal(signal.SIGTERM)
        assert (await client.closed())[0] == 1012
        app = create_app(server.kernel)

        @app.before_serving
        async def fail() -> None:
            raise ValueError("no lamp")

        with pytest.raises(UsageError, match="does not start"):
            await serve(app, bind="127.0.0.1:0")


async def test_two_answers_at_once_leave_one_after_the_other() -> None:
    """Found by hostile heads: a refusal of bad bytes met the answer before them."""
    ours, theirs = trio.socket.socketpair()
    sizes = 300_000
    async with trio.SocketStream(ours) as stream, trio.SocketStream(theirs) as client:
        replayed = _Replayed(stream, b"", 5.0)
        got = b""
        with trio.fail_after(5):
            async with trio.open_nursery() as nursery:
                for letter in (b"a", b"b"):
                    nursery.start_soon(replayed.send_all, letter * sizes)
                while len(got) < 2 * sizes:
                    got += await client.receive_some(65536)
        whole = b"a" * sizes, b"b" * sizes
        assert got in (whole[0] + whole[1], whole[1] + whole[0])
