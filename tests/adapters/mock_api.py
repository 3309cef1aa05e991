"""Model providers on this machine: a mock that others keep, and raw answers of ours.

`Mock` is the npm package `@copilotkit/aimock`, a server that speaks both APIs (streams,
tools, errors, rate limits, broken streams) and journals what it was asked. What it
cannot do, to stay silent, to say when a client has left, to break off before the first
word, does `raw_server`.
"""

from __future__ import annotations

import http.client
import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

HERE = Path(__file__).parent / "mock"
CLI = HERE / "node_modules" / "@copilotkit" / "aimock" / "dist" / "cli.js"
NODE = shutil.which("node")
IN_CI = "CI" in os.environ
KEY = "sk-mock"

needs_mock = pytest.mark.skipif(
    not (NODE and CLI.exists()) and not IN_CI, reason="run `make js` first (Node 20)"
)


class Mock:
    """The mock in a process of its own; `host` is its address and port."""

    def __init__(self, folder: Path) -> None:
        assert NODE is not None, "CI needs node"
        assert CLI.exists(), "CI needs `make js`"
        nothing = folder / "nothing.json"
        nothing.write_text('{"fixtures": []}')
        self._process = subprocess.Popen(
            [NODE, str(CLI), "-p", "0", "-f", str(nothing)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "AIMOCK_API_KEYS": KEY},
        )
        self.host = self._read_host()

    def _read_host(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            found = re.search(r"http://([\d.]+:\d+)", line)
            if found:
                return found[1]
        raise AssertionError("the mock did not start")

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _control(self, method: str, path: str, body: Any = None) -> Any:
        link = http.client.HTTPConnection(self.host, timeout=10)
        try:
            sent = None if body is None else msgspec.json.encode(body)
            link.request(
                method, f"/__aimock{path}", sent, {"authorization": f"Bearer {KEY}"}
            )
            answer = link.getresponse()
            told = answer.read()
            assert answer.status == 200, told
            return msgspec.json.decode(told)
        finally:
            link.close()

    def reset(self) -> None:
        self._control("POST", "/reset")

    def answer(self, match: dict[str, Any], response: Any, **options: Any) -> None:
        """Answer requests that match; the first fixture that matches counts."""
        one = {"match": match, "response": response, **options}
        self._control("POST", "/fixtures", {"fixtures": [one]})

    def fail(self, status: int, message: str = "no", **more: Any) -> None:
        """Let every request fail, with `retryAfter` in `more` if it is 429."""
        error = {"message": message, "type": more.pop("type", "api_error")}
        self.answer({}, {"error": error, "status": status, **more})

    def requests(self) -> list[dict[str, Any]]:
        """Return the bodies that were asked, in order, chats as OpenAI's."""
        return [entry["body"] for entry in self.journal()]

    def journal(self) -> list[dict[str, Any]]:
        found = self._control("GET", "/journal")
        return [entry for entry in found if entry["path"].startswith("/v1")]


Answer = Callable[[trio.SocketStream, Any], Awaitable[None]]


@asynccontextmanager
async def raw_server(answer: Answer) -> AsyncIterator[str]:
    """Serve each connection one request: its JSON is given to `answer`; then it closes."""

    async def connection(stream: trio.SocketStream) -> None:
        async with stream:
            head = b""
            while b"\r\n\r\n" not in head:
                head += await stream.receive_some()
            head, _, body = head.partition(b"\r\n\r\n")
            found = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
            assert found is not None
            while len(body) < int(found[1]):
                body += await stream.receive_some()
            with suppress(trio.BrokenResourceError):
                await answer(stream, msgspec.json.decode(body))

    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        port = listener.socket.getsockname()[1]
        nursery.start_soon(trio.serve_listeners, connection, [listener])
        yield f"127.0.0.1:{port}"
        nursery.cancel_scope.cancel()


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


async def begin(stream: trio.SocketStream) -> None:
    """Send the head of a stream without a length: it ends when the connection does."""
    await stream.send_all(HEAD + b"connection: close\r\n\r\n")


async def say(stream: trio.SocketStream, *events: Any) -> None:
    """Send events; one with a `type` is named by it."""
    for event in events:
        kind = event.get("type") if isinstance(event, dict) else None
        data = event if isinstance(event, str) else msgspec.json.encode(event).decode()
        line = f"event: {kind}\n" if kind else ""
        await stream.send_all(f"{line}data: {data}\n\n".encode())


async def until_left(stream: trio.SocketStream) -> None:
    """Wait until the client has closed the connection."""
    with suppress(trio.BrokenResourceError):
        while await stream.receive_some():
            pass
