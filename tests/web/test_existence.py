"""What is not there and what is not yours get the same bytes, whoever asks how."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from culet.adapters import AIChatAgent
from culet.kernel import Agent, Chunk, Request, Response, Turn, open_kernel, rpc
from culet.web import create_app
from web import serving as serving_module
from web.serving import HANDSHAKE, RUNNERS, Server

pytestmark = pytest.mark.usefixtures("transport")
QUESTION = json.dumps(
    {
        "messages": [
            {"id": "m", "role": "user", "parts": [{"type": "text", "text": "x"}]}
        ]
    }
).encode()


class Talker(AIChatAgent):
    """A chat that is run as a tool."""

    async def on_chat_message(self, turn: Turn) -> AsyncIterator[Chunk]:
        yield {"type": "text-delta", "id": "t", "delta": "word"}


class Writer(Agent):
    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        yield {"type": "text-delta", "id": "t", "delta": "word"}


class Plain(Agent): ...


class Hub(Agent):
    @rpc
    async def ask(self, run_id: str) -> str:
        asked: dict[type[Agent], Any] = {Writer: None, Talker: "say a word"}
        runs = [
            await self.run_agent_tool(cls, what, run_id=f"{run_id}-{cls.__name__}")
            for cls, what in asked.items()
        ]
        return " ".join(run.status for run in runs)


async def strangers(request: Request) -> bool:
    return request.headers.get("x-key") == "the operator's"


async def admit(request: Request, root: Any) -> Response | None:
    may = root.name in {"mine", "new"} or request.headers.get("x-key") == "hers"
    return None if may else Response("not yours", 403)


@asynccontextmanager
async def served(**options: Any) -> AsyncIterator[Server]:
    async with (
        open_kernel(
            roots=[Hub], facets=[Writer, Talker, Plain], storage="memory:"
        ) as kernel,
        trio.open_nursery() as nursery,
    ):
        app = create_app(kernel, inspect=strangers, **options)
        run = RUNNERS[serving_module.transport_of_tests]
        url = await nursery.start(run, app)
        for name in ("mine", "hers"):
            hub = await kernel.get_agent(Hub, name)
            assert await hub.ask(f"{name}-run") == "completed completed"
        yield Server(url, kernel)
        nursery.cancel_scope.cancel()


JSON = ("Content-Type: application/json",)
WAYS: dict[str, tuple[str, str, tuple[str, ...], bytes]] = {
    # method, what is asked of the agent, fields, body
    "get": ("GET", "", (), b""),
    "head": ("HEAD", "", (), b""),
    "post": ("POST", "/hook", (), b"{}"),
    "delete": ("DELETE", "", (), b""),
    "options": ("OPTIONS", "", (), b""),
    "socket": ("GET", "", HANDSHAKE, b""),
    "socket of a known run": ("GET", "?_known=%7B%7D", HANDSHAKE, b""),
    "transcript": ("GET", "/get-messages", (), b""),
    "chat": ("POST", "/chat", JSON, QUESTION),
    "chat that is no json": ("POST", "/chat", (), QUESTION),
    "events": ("GET", "/chat/c/stream", (), b""),
    "stop": ("POST", "/chat/c/stop", JSON, b"{}"),
    "hop": ("GET", "/sub/plain/x", (), b""),
    "hop by socket": ("GET", "/sub/plain/x", HANDSHAKE, b""),
    "hop to a run": ("GET", "/sub/writer/hers-run-Writer", (), b""),
}  # fmt: skip
DATE = re.compile(rb"\r\ndate: [^\r]*", re.IGNORECASE)


async def answer(server: Server, path: str, way: str, *fields: str) -> bytes:
    """Return every byte that comes until the server hangs up, or says no more."""
    method, leaf, more, body = WAYS[way]
    lines = [f"{method} {path}{leaf} HTTP/1.1", "Host: h", *more, *fields]
    if HANDSHAKE[0] not in more:
        lines.append("Connection: close")
    if body:
        lines.append(f"Content-Length: {len(body)}")
    stream = await trio.open_tcp_stream("127.0.0.1", server.port)
    try:
        await stream.send_all("\r\n".join([*lines, "", ""]).encode() + body)
        said = b""
        with trio.move_on_after(5 if HANDSHAKE[0] not in more else 0.5):
            while part := await stream.receive_some(65536):
                said += part
                if b"refused" in said:  # the close frame of a socket
                    await stream.send_eof()
        return DATE.sub(b"", said)
    finally:
        await trio.aclose_forcefully(stream)


UNKNOWN = "/agents/hub/mine/sub/{kind}/guessed"
FOREIGN = [
    "/agents/hub/mine/sub/{kind}/hers-run-{run}",  # the right id under the wrong parent
    "/agents/hub/mine/sub/{other}/mine-run-{run}",  # a run of mine, of another class
    "/agents/hub/nobody/sub/{kind}/hers-run-{run}",
    "/agents/hub/nobody/sub/{kind}/guessed",
]


@pytest.mark.rule("I-44", "F-42", "F-43")
@pytest.mark.parametrize("way", WAYS)
async def test_a_run_of_others_and_one_that_is_not_there_look_the_same(
    way: str,
) -> None:
    async with served() as server:
        before = server.kernel.metrics()["commits"], set(server.kernel.trees)
        for kind, run, other in (
            ("writer", "Writer", "talker"),
            ("talker", "Talker", "writer"),
        ):
            wanted = await answer(server, UNKNOWN.format(kind=kind), way)
            assert wanted.startswith((b"HTTP/1.1 404", b"HTTP/1.1 101"))
            for path in FOREIGN:
                path = path.format(kind=kind, run=run, other=other)
                assert await answer(server, path, way) == wanted, path
        assert (server.kernel.metrics()["commits"], set(server.kernel.trees)) == before
        path = "/agents/hub/mine/sub/writer/mine-run-Writer"
        if way != "hop to a run":  # there is none below it
            assert await answer(server, path, way) != wanted, "mine is there"


@pytest.mark.rule("I-44", "F-43")
@pytest.mark.parametrize("way", WAYS)
async def test_who_is_refused_at_the_root_does_not_learn_what_is_below(
    way: str,
) -> None:
    async with served(admit=admit) as server:
        before = server.kernel.metrics()["commits"], set(server.kernel.trees)
        wanted = await answer(server, "/agents/hub/nobody", way)
        assert wanted.startswith((b"HTTP/1.1 403", b"HTTP/1.1 101"))
        for path in (
            "/agents/hub/hers",
            "/agents/hub/hers/sub/writer/hers-run-Writer",
            "/agents/hub/hers/sub/writer/guessed",
            "/agents/hub/hers/sub/talker/hers-run-Writer",
            "/agents/hub/nobody/sub/writer/guessed",
        ):
            assert await answer(server, path, way) == wanted, path
        assert (server.kernel.metrics()["commits"], set(server.kernel.trees)) == before
        path = "/agents/hub/hers/sub/writer/hers-run-Writer"
        assert await answer(server, path, way, "X-Key: hers") != wanted


@pytest.mark.rule("I-44")
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "DELETE"])
async def test_a_stranger_learns_nothing_of_an_inspector(method: str) -> None:
    asked = ("", "/", "/index.html", "/api/roots", "/api/events", "/api/act")
    asked += tuple(
        f"/api/tree?class=Hub&name={name}" for name in ("mine", "hers", "nobody")
    )
    WAYS["inspector"] = (method, "", JSON, b"{}" if method == "POST" else b"")
    try:
        async with served() as server:
            wanted = await answer(server, "/inspection", "inspector")
            assert wanted.startswith(b"HTTP/1.1 404")
            for leaf in asked:
                assert await answer(server, f"/inspect{leaf}", "inspector") == wanted
            found = await answer(
                server, "/inspect", "inspector", "X-Key: the operator's"
            )
            assert (found == wanted) is (method in {"POST", "DELETE"})
    finally:
        del WAYS["inspector"]
