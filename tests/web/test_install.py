"""Agents mounted in an app of somebody's own: what is theirs stays theirs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from quart import Response as Page
from quart import websocket
from quart_trio import QuartTrio

from culet.kernel import Agent, Kernel, Limits, Request, Response, open_kernel, rpc
from culet.kernel.errors import StorageBusy, UsageError
from culet.web import create_app, install
from culet.web.app import gateways_of
from culet.web.scopes import raw_path
from web.serving import RUNNERS, Hub, Plain, Server, Writer


class Other(Agent):
    @rpc
    async def ping(self, text: str) -> str:
        return f"other {text}"

    async def on_request(self, request: Request) -> Response:
        return Response(f"other {request.path}")


def theirs() -> QuartTrio:
    """Return an app with a bit of everything."""
    app = QuartTrio("theirs")
    app.seen = []  # type: ignore[attr-defined]

    @app.before_request
    async def see() -> None:
        app.seen.append("before")  # type: ignore[attr-defined]

    @app.after_request
    async def mark(page: Page) -> Page:
        page.headers["x-theirs"] = "yes"
        return page

    @app.errorhandler(404)
    async def lost(_error: Exception) -> tuple[str, int]:
        return "theirs: not here\n", 404

    @app.errorhandler(ValueError)
    async def wrong(error: ValueError) -> tuple[str, int]:
        return f"theirs: {error}\n", 418

    @app.get("/page")
    async def page() -> str:
        return "a page"

    @app.get("/fails")
    async def fails() -> str:
        raise ValueError("oops")

    @app.get("/agents")
    async def beside() -> str:
        return "beside the prefix"

    @app.websocket("/echo")
    async def echo() -> None:
        while True:
            await websocket.send(await websocket.receive())

    @app.websocket("/agentsx/<name>")
    async def near(name: str) -> None:
        await websocket.send(name)

    return app


hub_opener = partial(open_kernel, roots=[Hub], facets=[Writer, Plain])


@asynccontextmanager
async def running(app: QuartTrio, transport: str) -> AsyncIterator[Server]:
    async with trio.open_nursery() as nursery:
        url = await nursery.start(RUNNERS[transport], app)
        kernel: Any = gateways_of(app)[0].kernel
        yield Server(url, kernel)
        nursery.cancel_scope.cancel()


async def test_their_routes_and_handlers_go_on(transport: str) -> None:
    app = theirs()
    install(app, hub_opener)
    async with running(app, transport) as server:
        for path, status, body in [
            ("/page", 200, b"a page"),
            ("/agents", 200, b"beside the prefix"),
            ("/nowhere", 404, b"theirs: not here\n"),
            ("/healthz", 404, b"theirs: not here\n"),
            ("/fails", 418, b"theirs: oops\n"),
        ]:
            answer = await server.http("GET", path)
            assert (answer[0], answer[2]) == (status, body), path
        # an agent's 404 is the agent's, and their hooks see it
        app.seen.clear()  # type: ignore[attr-defined]
        status, headers, body = await server.http("GET", "/agents/hub/h")
        assert (status, body) == (404, b"Not implemented")
        assert headers["x-theirs"] == "yes"
        assert app.seen == ["before"]  # type: ignore[attr-defined]


async def test_their_sockets_go_on_beside_ours(transport: str) -> None:
    app = theirs()
    install(app, hub_opener)
    async with (
        running(app, transport) as server,
        server.connect("/echo") as echo,
        server.connect("/agents/hub/h") as hub,
        server.connect("/agentsx/near") as near,
    ):
        assert await near.raw() == "near"
        await hub.hello()
        for text in ("one", "two"):
            await echo.socket.send_message(text)
            assert await echo.raw() == text
            assert (await hub.call("ping", text))["result"] == text
        assert await server.refused("/none") == 404


async def test_two_installs_under_two_prefixes(transport: str) -> None:
    asked: list[str] = []

    async def admit(request: Request, root: object) -> Response:
        asked.append(request.raw_path)
        return Response("no", 403)

    app = theirs()
    install(app, hub_opener)
    install(app, partial(open_kernel, roots=[Other]), prefix="api/v2/others")
    install(app, partial(open_kernel, roots=[Other]), prefix="closed", admit=admit)
    async with running(app, transport) as server:
        async with (
            server.connect("/agents/hub/h") as hub,
            server.connect("/api/v2/others/other/o") as other,
        ):
            assert (await hub.call("ping", "a"))["result"] == "a"
            assert (await other.call("ping", "a"))["result"] == "other a"
        assert await server.close_of("/agents/other/o") == 4400
        assert await server.close_of("/closed/other/o") == 4403
        answer = await server.http("GET", "/api/v2/others/other/o/x%2Fy")
        assert answer[2] == b"other /x%2Fy"
        assert asked == ["/closed/other/o"]


async def test_prefixes_may_not_lie_inside_each_other() -> None:
    app = theirs()
    install(app, hub_opener, prefix="api/agents")
    for prefix in ("api/agents", "api", "api/agents/more"):
        with pytest.raises(UsageError, match="already"):
            install(app, hub_opener, prefix=prefix)
    install(app, hub_opener, prefix="api/agents2")
    assert len(gateways_of(app)) == 2


async def test_probes_are_there_when_asked_for(transport: str) -> None:
    app = theirs()
    install(app, hub_opener, probes=True)
    async with running(app, transport) as server:
        for path in ("/healthz", "/readyz", "/metrics"):
            assert (await server.http("GET", path))[0] == 200


async def test_the_limits_of_an_opener_are_those_of_the_door(transport: str) -> None:
    app = theirs()
    limits = Limits(body_bytes=2000, message_bytes=1000)
    install(app, partial(hub_opener, limits=limits))
    async with running(app, transport) as server:
        status, _, _ = await server.http("POST", "/agents/hub/h/echo", body=b"x" * 2001)
        assert status == 413
        async with server.connect() as client:
            await client.hello()
            await client.socket.send_message("x" * 1001)
            assert (await client.closed())[0] == 1009


async def test_a_kernel_that_is_open_elsewhere_is_named(tmp_path: Path) -> None:
    opener = partial(hub_opener, storage=f"sqlite:{tmp_path}")
    app = theirs()
    install(app, opener)
    async with opener(), trio.open_nursery() as app.nursery:
        with pytest.raises(StorageBusy, match="one kernel per folder, one worker"):
            await app.startup()
    assert not gateways_of(app)[0].ready


async def test_before_the_app_serves_agents_are_not_ready() -> None:
    app = theirs()
    install(app, hub_opener)
    answer = await app.test_client().get("/agents/hub/h")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


async def test_a_process_is_healthy_before_it_is_ready() -> None:
    app = create_app(hub_opener)

    async def seen() -> list[int]:
        asked = app.test_client()
        paths = "/healthz", "/readyz"
        return [(await asked.get(path)).status_code for path in paths]

    assert await seen() == [200, 503]
    async with trio.open_nursery() as app.nursery:
        await app.startup()
        assert await seen() == [200, 200]
        await app.shutdown()
    assert await seen() == [200, 503]


async def test_a_kernel_of_ones_own_may_be_installed(transport: str) -> None:
    async with hub_opener() as kernel:
        assert isinstance(kernel, Kernel)
        app = theirs()
        install(app, kernel)
        async with running(app, transport) as server, server.connect() as client:
            assert (await client.call("ping", "x"))["result"] == "x"
        assert not kernel.closing, "who opens it closes it"


@pytest.mark.parametrize(
    ("scope", "path"),
    [
        ({"raw_path": b"/a/b%2Fc", "path": "/a/b/c"}, "/a/b%2Fc"),
        ({"path": "/a/b c"}, "/a/b%20c"),
        ({"raw_path": b"/r/a", "path": "/r/a", "root_path": "/r"}, "/a"),
        ({"raw_path": b"/r/a", "path": "/r/a", "root_path": "/r/"}, "/a"),
        ({"raw_path": b"/ra/a", "path": "/ra/a", "root_path": "/r"}, "/ra/a"),
        ({"raw_path": b"/a", "path": "/a", "root_path": ""}, "/a"),
    ],
)
def test_raw_paths(scope: dict[str, Any], path: str) -> None:
    assert raw_path(scope) == path
