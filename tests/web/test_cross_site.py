"""Pages of other sites: what a browser lets them send changes nothing here."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from quart import request, websocket
from quart_trio import QuartTrio

from culet.adapters import AIChatAgent
from culet.kernel import Agent, Chunk, Request, Response, Turn, open_kernel
from culet.kernel.errors import UsageError
from culet.web import (
    create_app,
    install,
    route_sub_agent_request,
    route_sub_agent_socket,
)
from culet.web.gateway import Gateway
from culet.web.hosts import is_named, is_rebound
from web import serving as serving_module
from web.serving import HANDSHAKE, RUNNERS, Server, parse_answer, read_all

pytestmark = pytest.mark.usefixtures("transport")

CHANGED: list[str] = []  # what a request has done


class Shop(Agent):
    """Its webhook is its own: it asks for no content type, but is asked about Origin."""

    async def on_request(self, request: Request) -> Response:
        CHANGED.append(f"{request.method} {request.path}")
        return Response("done")


class Item(Shop): ...


class Talk(AIChatAgent):
    async def on_chat_message(self, turn: Turn) -> AsyncIterator[Chunk]:
        CHANGED.append("turn")
        yield {"type": "text-delta", "id": "t", "delta": "word"}


async def anybody(_request: Request) -> bool:
    return True


@asynccontextmanager
async def served(**options: Any) -> AsyncIterator[Server]:
    CHANGED.clear()
    async with (
        open_kernel(roots=[Shop, Talk], storage="memory:") as kernel,
        trio.open_nursery() as nursery,
    ):
        app = create_app(kernel, inspect=anybody, **options)
        run = RUNNERS[serving_module.transport_of_tests]
        url = await nursery.start(run, app)
        yield Server(url, kernel)
        nursery.cancel_scope.cancel()


QUESTION = json.dumps(
    {
        "messages": [
            {"id": "m", "role": "user", "parts": [{"type": "text", "text": "x"}]}
        ]
    }
).encode()
JSON = "Content-Type: application/json"
ACT = json.dumps({"act": "nothing"}).encode()
WAYS = {
    # name: method, path, body
    "socket": ("UPGRADE", "/agents/shop/s", b""),
    "get": ("GET", "/agents/shop/s/get", b""),
    "webhook": ("POST", "/agents/shop/s/hook", b"{}"),
    "chat": ("POST", "/agents/talk/t/chat", QUESTION),
    "stop": ("POST", "/agents/talk/t/chat/x/stop", b"{}"),
    "inspector": ("POST", "/inspect/api/act", ACT),
}


async def ask(
    server: Server,
    way: str,
    *fields: str,
    host: str = "",
    kind: str = JSON,
    path: str = "",
) -> tuple[int, bytes]:
    """Ask in one of the ways; return status and body."""
    method, usual, body = WAYS[way]
    path = path or usual
    lines = [f"Host: {host or f'127.0.0.1:{server.port}'}", *fields]
    if method == "UPGRADE":
        lines = [f"GET {path} HTTP/1.1", *lines, *HANDSHAKE]
    else:
        lines = [f"{method} {path} HTTP/1.1", *lines, "Connection: close"]
    if body:
        lines += [kind, f"Content-Length: {len(body)}"] if kind else [
            f"Content-Length: {len(body)}"
        ]  # fmt: skip
    stream = await trio.open_tcp_stream("127.0.0.1", server.port)
    try:
        await stream.send_all("\r\n".join([*lines, "", ""]).encode() + body)
        if method == "UPGRADE":
            with trio.fail_after(5):
                answer = bytes(await stream.receive_some(65536))
        else:
            answer = await read_all(stream)
        status, _headers, said = parse_answer(answer)
        return status, said
    finally:
        await trio.aclose_forcefully(stream)


# A page's Origin, PORT stands for ours; whether it may.
ORIGINS = [
    (None, True),
    ("http://127.0.0.1:PORT", True),
    ("https://127.0.0.1:PORT", True),  # a proxy may speak TLS for us: the host decides
    ("null", False),
    ("", False),
    ("http://127.0.0.1", False),
    ("http://127.0.0.1:1", False),
    ("http://127.0.0.1:PORT0", False),
    ("http://localhost:PORT", False),
    ("http://evil.example", False),
    ("http://evil.example:PORT", False),
    ("http://127.0.0.1.evil.example:PORT", False),
    ("http://127.0.0.1:PORT.evil.example", False),
    ("http://127.0.0.1:PORT@evil.example", False),
    ("http://evil.example@127.0.0.1:PORT", False),
    ("http://127.0.0.1.:PORT", False),
    ("http://evil.example#127.0.0.1:PORT", False),
    ("http://evil.example\\@127.0.0.1:PORT", False),
    ("http://127.0.0.1:PORT, http://evil.example", False),
    ("http://127.0.0.1:PORT http://evil.example", False),
    ("file://127.0.0.1:PORT", False),
    ("ws://127.0.0.1:PORT", False),
    ("127.0.0.1:PORT", False),
    ("//127.0.0.1:PORT", False),
    ("http://[", False),
]
NAMED = [
    ("http://good.test", True),
    ("https://good.test:443", True),
    ("HTTP://GOOD.TEST", True),
    ("http://good.test.", False),
    ("http://good.test.evil.example", False),
    ("http://evilgood.test", False),
    ("http://evil.good.test", False),
    ("http://good.test:8080", False),
    ("http://g\u00f6od.test", False),
]


@pytest.mark.rule("F-47", "I-42", "W-025")
@pytest.mark.parametrize("way", WAYS)
async def test_who_may_ask_is_the_same_for_sockets_and_for_what_changes_something(
    way: str,
) -> None:
    async with served(hosts="*") as server:
        for host, rows in ("", ORIGINS), ("good.test", NAMED):
            for origin, may in rows:
                fields = ()
                if origin is not None:
                    fields = (f"Origin: {origin.replace('PORT', str(server.port))}",)
                CHANGED.clear()
                status, _ = await ask(server, way, *fields, host=host)
                assert (status != 403) is may, (origin, status)
                if not may:
                    assert CHANGED == []
                    if way != "inspector":
                        assert status == 403


@pytest.mark.rule("F-47")
@pytest.mark.parametrize("way", WAYS)
async def test_two_origins_are_none_of_ours(way: str) -> None:
    ours, evil = "Origin: http://127.0.0.1:PORT", "Origin: http://evil.example"
    async with served() as server:
        for pair in ((ours, evil), (evil, ours), (ours, ours)):
            fields = [line.replace("PORT", str(server.port)) for line in pair]
            assert (await ask(server, way, *fields))[0] == 403
    assert CHANGED == []


@pytest.mark.rule("F-47", "W-027")
async def test_cors_lets_pages_read_but_opens_no_socket_and_no_inspector() -> None:
    evil = "Origin: https://evil.example"
    async with served(cors=True) as server:
        assert (await ask(server, "get", evil))[0] == 200
        assert (await ask(server, "socket", evil))[0] == 403
        assert (await ask(server, "inspector", evil))[0] == 403


@pytest.mark.rule("F-47", "I-42")
@pytest.mark.parametrize("way", ["chat", "stop", "inspector"])
@pytest.mark.parametrize(
    "kind",
    [
        "", "text/plain", "text/plain;application/json", "text/json", "text/html",
        "application/x-www-form-urlencoded", "multipart/form-data; boundary=x",
        "application/jsonp", "application/json, text/plain", "text/plain, application/json",
    ],
)  # fmt: skip
async def test_what_a_form_can_send_changes_nothing(way: str, kind: str) -> None:
    async with served(origins="*", hosts="*") as server:
        told = await ask(server, way, kind=f"Content-Type: {kind}" if kind else "")
        assert told[0] == 415
        assert CHANGED == []
        told = await ask(server, way, kind="Content-Type: application/JSON ; charset=x")
        assert told[0] not in (403, 415)


FETCHED = [
    # Sec-Fetch-Site, Sec-Fetch-Mode, whether it may
    ("same-origin", "cors", True),
    ("none", "navigate", True),
    ("cross-site", "navigate", True),  # a link to what an agent shows
    ("cross-site", "no-cors", False),  # an image, a script
    ("cross-site", "cors", False),
    ("cross-site", "websocket", False),
    ("same-site", "no-cors", False),  # another host of the same domain
    ("anything", "no-cors", False),
]


@pytest.mark.rule("F-47", "W-025")
@pytest.mark.parametrize("way", ["get", "webhook", "socket"])
@pytest.mark.parametrize(("site", "mode", "may"), FETCHED)
async def test_what_another_page_fetches_without_an_origin_is_refused(
    way: str, site: str, mode: str, may: bool
) -> None:
    fields = (f"Sec-Fetch-Site: {site}", f"Sec-Fetch-Mode: {mode}")
    async with served() as server:
        status, _ = await ask(server, way, *fields)
        assert (status != 403) is may
        assert may or server.kernel.trees == {}, "nothing is made for it"
    async with served(origins="*") as server:
        assert (await ask(server, way, *fields))[0] != 403


# ---- names that point here

LOOPBACK = ["127.0.0.1", "127.8.8.8", "::1"]
OURS = [
    "localhost", "LOCALHOST:80", "app.localhost", "127.0.0.1:8787", "[::1]:80", "[::1]",
    "10.0.0.7", "box", "box:80", "",
]  # fmt: skip
THEIRS = [
    "evil.example", "evil.example:8787", "127.0.0.1.evil.example", "localhost.evil.example",
    "evil.localhost.example:80", "127.0.0.1.nip.io", "evil.", "evil.example.", "127.1",
    "::1", "[::1].evil.example", "a, evil.example", "localhost.", "x:y:z",
]  # fmt: skip


@pytest.mark.rule("W-019")
@pytest.mark.parametrize("server", LOOPBACK)
def test_which_names_may_be_an_attackers(server: str) -> None:
    assert [host for host in OURS if is_rebound(host, server)] == []
    assert [host for host in THEIRS if not is_rebound(host, server)] == []


@pytest.mark.parametrize("server", ["10.0.0.7", "0.0.0.0", "/run/socket", "", "::"])
def test_away_from_loopback_every_name_may_be_ours(server: str) -> None:
    assert [host for host in (*OURS, *THEIRS) if is_rebound(host, server)] == []


def test_names_that_are_told_are_those_that_count() -> None:
    hosts = ("App.Example", "b.example:81", "[::1]")
    known = ["app.example", "APP.example:9", "b.example:81", "[::1]:8"]
    other = ["b.example", "b.example:8", "x.app.example", "app.example.", "", "::1"]
    assert [host for host in known if not is_named(host, hosts)] == []
    assert [host for host in other if is_named(host, hosts)] == []


def test_hosts_that_cannot_be_are_refused() -> None:
    with pytest.raises(UsageError, match="hosts"):
        Gateway(None, hosts="app.example")


async def admit(_request: Request, _root: Any) -> None:
    return None


@pytest.mark.rule("F-47", "I-42", "W-019")
@pytest.mark.parametrize("way", WAYS)
async def test_a_page_whose_name_points_here_reaches_nobody(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    gone = (404, 405) if way == "inspector" else (403,)
    async with served() as server:
        rebound = f"evil.example:{server.port}"
        for _ in range(2):
            status, _ = await ask(
                server, way, f"Origin: http://{rebound}", host=rebound
            )
            assert status in gone
        assert (await ask(server, way, host=rebound))[0] in gone
        assert server.kernel.trees == {}
        assert CHANGED == []
        assert (await ask(server, way, host=f"localhost:{server.port}"))[0] not in gone
    assert caplog.text.count("'evil.example") == 1, "whoever runs it is told, once"
    assert "name it in `hosts`" in caplog.text


@pytest.mark.rule("W-019")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "options",
    [
        {"hosts": ("app.example",)},
        {"hosts": ("app.example",), "admit": admit},
        {"hosts": "*"},
        {
            "admit": admit
        },  # it asks who comes: a page has no credentials of another name
    ],
    ids=["named", "named and guarded", "any", "guarded"],
)
async def test_a_name_that_is_ours_is_served(way: str, options: dict[str, Any]) -> None:
    async with served(**options) as server:
        host = "app.example"
        status, _ = await ask(server, way, f"Origin: https://{host}", host=host)
        assert status not in (403, 404, 405)
        other = (await ask(server, way, host="other.example"))[0] in (403, 404, 405)
        assert other is isinstance(options.get("hosts"), tuple)


@pytest.mark.rule("F-47")
async def test_routes_of_ones_own_know_the_names_that_were_told_and_no_others() -> None:
    """Who comes in by them is for them to ask: what is not told is not guessed there."""
    async with open_kernel(roots=[Shop], facets=[Item], storage="memory:") as kernel:
        for hosts, may in (
            (None, True),
            (("app.example",), True),
            (("b.example",), False),
        ):
            app = QuartTrio("service")
            install(app, kernel, hosts=hosts)
            shop = await kernel.get_agent(Shop, "s")

            async def item(shop: Any = shop) -> Any:
                return await route_sub_agent_request(request, shop)

            async def item_socket(shop: Any = shop) -> None:
                await route_sub_agent_socket(websocket, shop)

            path = "/goods/sub/item/i"
            app.add_url_rule(path, "item", item)
            app.add_websocket(path, "item_socket", item_socket)
            async with trio.open_nursery() as nursery:
                run = RUNNERS[serving_module.transport_of_tests]
                server = Server(await nursery.start(run, app), kernel)
                for way in ("get", "socket"):
                    status, _ = await ask(server, way, host="app.example", path=path)
                    assert (status != 403) is may, (hosts, way, status)
                    assert (status in (200, 101)) is may
                nursery.cancel_scope.cancel()
