"""Whatever name is used inside: sent by a client it means nothing."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

import culet.adapters
import culet.kernel
import culet.web
from culet.kernel import Agent, ChildRef, Limits, Request, Response, open_kernel
from culet.web import create_app
from web.serving import HANDSHAKE, RUNNERS, Server, read_all
from web.test_transport import raw, upgrade

SHAPE = re.compile(r"x-[a-z0-9-]+|culet(\.[a-z_]+)?|_pk|__[a-z_]+[a-z]|traceparent")
# What proxies and frameworks put in front; some believe it.
FORWARDED = (
    "Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto",
    "X-Forwarded-Port", "X-Forwarded-Prefix", "X-Forwarded-Uri", "X-Forwarded-User",
    "X-Forwarded-Scheme", "X-Forwarded-Server", "X-Forwarded-Path", "X-Real-IP",
    "X-Client-IP", "True-Client-IP", "CF-Connecting-IP", "X-Original-URL",
    "X-Original-URI", "X-Rewrite-URL", "X-HTTP-Method-Override", "X-HTTP-Method",
    "X-Method-Override", "X-Script-Name", "Script-Name", "X-Identity", "X-User",
    "Remote-User", "X-Remote-User", "X-Agent", "X-Culet-Identity", "X-Culet-Path",
    "X-Culet-Agent", "X-Culet-Props", "X-Culet-Internal", "X-Partykit-Room",
    "X-Partykit-Namespace", "X-Partykit-Props", "Via", "Prefer", "Range", "If-Match",
)  # fmt: skip
VALUES = (
    "1", "root", "/agents/desk/other", "evil.example", "for=127.0.0.1;host=evil.example",
    '{"admin": true}',
)  # fmt: skip


def inside() -> set[str]:
    """Return the texts of our code that could be the name of a header or a parameter."""
    found = set()
    for package in (culet.web, culet.kernel, culet.adapters):
        for path in Path(package.__path__[0]).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                match node:
                    case ast.Constant(value=str(text)) if SHAPE.fullmatch(text):
                        found.add(text)
                    case _:
                        pass
    return {name for name in found if not name.endswith("__")}


NAMES = sorted({*inside(), *FORWARDED} - {"__agents_transport"})  # a client's own word
GATES: list[Any] = []


class Desk(Agent):
    async def on_before_sub_agent(self, request: Request, child: ChildRef) -> None:
        GATES.append((self.name, child.class_name, child.name, request.identity))

    async def on_request(self, request: Request) -> Response:
        return Response.json(told(self, request))

    async def on_connect(self, connection: Any, ctx: Any) -> None:
        connection.send(json.dumps(told(self, ctx.request)))


class Drawer(Desk): ...


def told(agent: Agent, request: Request) -> dict[str, Any]:
    """Return all that an agent is told, but what the client put into its own words."""
    return {
        "told": [list(step) for step in agent.self_path], "identity": request.identity,
        "method": request.method, "path": request.path, "raw": request.raw_path,
        "host": request.headers["host"].partition(":")[0],
    }  # fmt: skip


async def authenticate(request: Request) -> str | None:
    return request.headers.get("cookie")


async def admit(request: Request, root: Any) -> None:
    GATES.append((*root, request.identity, request.raw_path))


@asynccontextmanager
async def served(transport: str, **options: Any) -> AsyncIterator[Server]:
    async with (
        open_kernel(roots=[Desk], facets=[Drawer], storage="memory:") as kernel,
        trio.open_nursery() as nursery,
    ):
        url = await nursery.start(RUNNERS[transport], create_app(kernel, **options))
        yield Server(url, kernel)
        nursery.cancel_scope.cancel()


PATH = "/agents/desk/d/sub/drawer/x/tail"


async def http(server: Server, fields: list[str], query: str) -> Any:
    GATES.clear()
    lines = [f"GET {PATH}{query} HTTP/1.1", "Host: h", "Connection: close", *fields]
    stream = await trio.open_tcp_stream("127.0.0.1", server.port)
    await stream.send_all("\r\n".join([*lines, "", ""]).encode())
    answer = await read_all(stream)
    assert answer.startswith(b"HTTP/1.1 200"), answer
    return json.loads(answer.partition(b"\r\n\r\n")[2]), list(GATES)


async def socket(server: Server, fields: list[str], query: str) -> Any:
    GATES.clear()
    lines = [f"GET {PATH}{query} HTTP/1.1", "Host: h", *HANDSHAKE, *fields, "", ""]
    async with raw(server, "\r\n".join(lines).encode()) as client:
        await client.open()
        texts = await client.texts_until('"told"')
        return json.loads(texts[-1]), list(GATES)


def test_the_names_are_found_that_are_known_to_be_there() -> None:
    assert {"x-turn", "culet.intake", "culet.socket", "_pk", "traceparent"} <= inside()


@pytest.mark.rule("I-42")
@pytest.mark.parametrize("transport", ["own", "quart"])
@pytest.mark.parametrize("ask", [http, socket])
async def test_what_is_ours_by_name_changes_nothing_when_a_client_sends_it(
    ask: Any, transport: str
) -> None:
    async with served(transport, authenticate=authenticate, admit=admit) as server:
        await server.kernel.get_agent(Desk, "d")
        usual = await ask(server, [], "")
        assert usual[0]["identity"] is None
        assert len(usual[1]) == 2
        for value in VALUES:
            fields = [f"{name}: {value}" for name in NAMES]
            assert await ask(server, fields, "") == usual
            query = "&".join(f"{name}={value}" for name in NAMES).replace(" ", "+")
            assert await ask(server, [], f"?{query}") == usual
        for name in NAMES:
            assert await ask(server, [f"{name}: root"], f"?{name}=root") == usual, name


@pytest.mark.rule("F-47", "I-42")
@pytest.mark.parametrize("transport", ["own", "quart"])
async def test_a_client_does_not_say_itself_where_it_comes_from(transport: str) -> None:
    async with served(transport) as server:
        own = [f"{name}: evil.example" for name in FORWARDED]
        own += ["Forwarded: host=evil.example;proto=https", "X-Forwarded-Proto: http"]
        origin = ("Origin", "http://evil.example")
        lies = [tuple(line.split(": ", 1)) for line in own]
        assert await server.refused("/agents/desk/d", [origin, *lies]) == 403
        lines = (f"Origin: {origin[1]}", *own)
        assert (await server.http("GET", "/agents/desk/d", headers=lines))[0] == 403
        own = [line.replace("evil.example", "localhost") for line in own]
        head = "\r\n".join(["GET /agents/desk/d HTTP/1.1", "Host: evil.example", *own])
        async with raw(server, f"{head}\r\n\r\n".encode()) as client:
            with trio.fail_after(5):
                assert b" 403 " in await client.stream.receive_some(65536)
        assert server.kernel.trees == {}


@pytest.mark.rule("I-43")
@pytest.mark.parametrize("transport", ["own", "quart"])
async def test_a_client_does_not_say_itself_which_address_it_counts_for(
    transport: str,
) -> None:
    limits = Limits(connections_per_address=2)
    async with (
        served(transport, limits=limits) as server,
        raw(server, upgrade("/agents/desk/d")) as one,
        raw(server, upgrade("/agents/desk/d")) as two,
    ):
        for client in (one, two):
            await client.open()
        lies = "".join(f"{name}: 10.0.0.7\r\n" for name in FORWARDED)
        async with raw(server, upgrade("/agents/desk/d", lies)) as third:
            answer = await read_all(third.stream)
        assert not answer.startswith(b"HTTP/1.1 101")
