"""A server of the guide, started as a reader would, and clients of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio
from trio_websocket import (
    ConnectionClosed,
    WebSocketConnection,
    wrap_client_stream,
)

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
BIN = Path(sys.executable).parent
HYPERCORN = [str(BIN / "hypercorn"), "--worker-class", "trio", "--bind", "127.0.0.1:0"]
CULET = [str(BIN / "culet"), "serve", "--port", "0"]


def environment(data: Path) -> dict[str, str]:
    return os.environ | {
        "APP_SECRET": "a secret of this test",
        "HOOK_SECRET": "a secret of this test",
        "APP_DATA": str(data),
        "PYTHONUNBUFFERED": "1",
    }


@asynccontextmanager
async def service(
    command: Sequence[str], data: Path, *, folder: Path = EXAMPLES
) -> AsyncIterator[Service]:
    """Start `command` in the folder of the examples; end it with SIGTERM."""
    process = await trio.lowlevel.open_process(
        list(command),
        cwd=folder,
        env=environment(data),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    said = b""
    assert process.stdout is not None
    try:
        with trio.fail_after(20):
            while not (url := re.search(rb"on (http://127\.0\.0\.1:\d+)", said)):
                part = await process.stdout.receive_some(4096)
                assert part, said.decode()
                said += part
        yield Service(url[1].decode(), process)
    finally:
        with trio.CancelScope(shield=True):
            if process.returncode is None:
                process.terminate()
            with trio.move_on_after(10):
                await process.wait()
            if process.returncode is None:
                process.kill()
                await process.wait()
            await process.stdout.aclose()


class Service:
    """A running service."""

    def __init__(self, url: str, process: trio.Process) -> None:
        self.url, self.process = url, process

    async def http(
        self, path: str, form: dict[str, str] | None = None, **headers: str
    ) -> tuple[int, str, Any]:
        """Return status, body and headers."""
        data = None if form is None else urllib.parse.urlencode(form).encode()
        asked = urllib.request.Request(self.url + path, data, headers)

        def ask() -> tuple[int, str, Any]:
            try:
                with urllib.request.urlopen(asked, timeout=10) as answer:
                    return answer.status, answer.read().decode(), answer.headers
            except urllib.error.HTTPError as error:
                with error:
                    return error.code, error.read().decode(), error.headers

        return await trio.to_thread.run_sync(ask)

    async def login(self, name: str, password: str) -> str:
        status, token, _ = await self.http(
            "/login", {"name": name, "password": password}
        )
        assert status == 200, token
        return token

    @asynccontextmanager
    async def socket(
        self, path: str, *, cookie: str = ""
    ) -> AsyncIterator[WebSocketConnection]:
        """Connect; the TCP connection is closed whatever happens."""
        host = self.url.removeprefix("http://")
        name, _, port = host.partition(":")
        headers = [("Cookie", f"who={cookie}")] if cookie else []
        stream = await trio.open_tcp_stream(name, int(port))
        try:
            async with trio.open_nursery() as nursery:
                yield await wrap_client_stream(
                    nursery, stream, host, path, extra_headers=headers,
                    message_queue_size=1000,
                )  # fmt: skip
                nursery.cancel_scope.cancel()
        finally:
            await trio.aclose_forcefully(stream)

    async def close_code(self, path: str, *, cookie: str = "") -> int:
        with trio.fail_after(10):
            async with self.socket(path, cookie=cookie) as socket:
                try:
                    while True:
                        await socket.get_message()
                except ConnectionClosed as error:
                    assert error.reason is not None
                    return int(error.reason.code)


async def said_by(program: str, server: Service) -> str:
    """Run a program of the guide against a server; return what it prints."""
    for scheme in ("ws", "http"):
        here = server.url.replace("http", scheme, 1)
        program = program.replace(f"{scheme}://127.0.0.1:8000", here)
    done = await trio.run_process(
        [sys.executable, "-W", "error", "-c", program],
        env=environment(Path()),
        capture_stdout=True,
        stderr=subprocess.STDOUT,
        check=False,
    )
    return done.stdout.decode()
