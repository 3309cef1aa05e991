"""The chat's HTTP paths stand behind the gates of all others, and no page may forge them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from culet.adapters import AIChatAgent
from culet.kernel import Chunk, Request, Response, Turn, open_kernel
from culet.web import create_app
from web.serving import RUNNERS, Server

PATHS = [("POST", "chat"), ("GET", "chat/c/stream"), ("POST", "chat/c/stop")]
JSON = "Content-Type: application/json"
BODY = json.dumps(
    {
        "id": "c",
        "messages": [
            {"id": "u", "role": "user", "parts": [{"type": "text", "text": "hi"}]}
        ],
    }
).encode()


class Speaker(AIChatAgent):
    async def on_chat_message(self, turn: Turn) -> AsyncIterator[Chunk]:
        yield {"type": "text-start", "id": "t"}
        await trio.sleep_forever()


async def admit(request: Request, root: Any) -> Response | None:
    return None if root.name == "mine" else Response("not found", 404)


@asynccontextmanager
async def served(**options: Any) -> AsyncIterator[Server]:
    async with (
        open_kernel(roots=[Speaker], facets=[Speaker], storage="memory:") as kernel,
        trio.open_nursery() as nursery,
    ):
        url = await nursery.start(RUNNERS["own"], create_app(kernel, **options))
        yield Server(url, kernel)
        nursery.cancel_scope.cancel()


async def ask(server: Server, method: str, path: str, *headers: str) -> Any:
    status, told, body = await server.http(
        method, path, headers=headers, body=BODY if method == "POST" else b""
    )
    told.pop("date", None)
    return status, told, body


@pytest.mark.rule("I-22", "I-44", "F-42")
@pytest.mark.parametrize(("method", "leaf"), PATHS)
async def test_a_chat_that_is_not_yours_looks_like_one_that_is_not_there(
    method: str, leaf: str
) -> None:
    async with served(admit=admit) as server:
        await server.kernel.get_agent(Speaker, "theirs")
        assert {key.name for key in server.kernel.trees} == {"theirs"}
        before = set(server.kernel.trees), server.kernel.metrics()["commits"]
        there = await ask(server, method, f"/agents/speaker/theirs/{leaf}", JSON)
        gone = await ask(server, method, f"/agents/speaker/nobody/{leaf}", JSON)
        assert there == gone
        assert there[0] == 404
        assert (set(server.kernel.trees), server.kernel.metrics()["commits"]) == before


@pytest.mark.rule("F-47")
@pytest.mark.parametrize("cors", [False, True])
@pytest.mark.parametrize("kind", ["text/plain", "multipart/form-data; boundary=x", ""])
async def test_a_foreign_page_can_neither_ask_nor_stop(kind: str, cors: bool) -> None:
    headers = ["Origin: https://evil.example"] + [f"Content-Type: {kind}"] * bool(kind)
    async with served(cors=cors) as server:
        for leaf in ("chat", "chat/c/stop"):
            path = f"/agents/speaker/mine/{leaf}"
            assert (await ask(server, "POST", path, *headers))[0] == (
                415 if cors else 403
            )
        if not cors:
            assert server.kernel.trees == {}
        path = "/agents/speaker/mine/chat/c/stop"
        assert (await ask(server, "POST", path, *headers[1:]))[0] == 415
        assert (await ask(server, "POST", path, JSON))[0] == 204
