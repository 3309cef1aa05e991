"""Python's collector of cycles: a full look stops the loop, so a server gives it no work."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
import trio

from culet.kernel.sockets import Connection
from culet.web.collector import RARE, USUAL
from culet.web.session import Session
from culet.web.transport import Link
from web.serving import HANDSHAKE, Server, serving

HEAD = "\r\n".join(
    ["GET /agents/hub/h HTTP/1.1", "Host: localhost", *HANDSHAKE, "", ""]
)
OURS = (Link, Session, Connection)
SETTLE = """
import gc, sys
from culet.web.collector import settle
gc.set_threshold(*map(int, sys.argv[1:]))
settle()
print(gc.get_freeze_count() > 1000, gc.get_threshold())
gc.set_threshold(1, 2, 3)
settle()
print(gc.get_threshold())
"""


IMPORTED = """
import gc
looks = []
gc.callbacks.append(lambda phase, info: looks.append(phase))
if {off}:
    gc.disable()
import culet.kernel
looks.clear()
import culet.web
print(gc.isenabled(), gc.get_freeze_count(), looks.count("start") <= 1)
"""


@pytest.mark.parametrize(("off", "then"), [(0, "True 0 True"), (1, "False 0 True")])
def test_the_collector_rests_while_the_server_is_imported_and_is_as_it_was(
    off: int, then: str
) -> None:
    said = subprocess.run(
        [sys.executable, "-c", IMPORTED.format(off=off)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert said.stdout.strip() == then


async def come_and_go(server: Server) -> None:
    """Be a client that is told who the agent is, and leaves without a word."""
    stream = await trio.open_tcp_stream("127.0.0.1", server.port)
    await stream.send_all(HEAD.encode())
    got = b""
    while b"mcp_servers" not in got:
        got += await stream.receive_some(65536)
    await stream.aclose()


@pytest.mark.rule("G-15")
async def test_a_socket_that_has_ended_leaves_no_cycles() -> None:
    async with serving() as server:
        await come_and_go(server)
        (tree,) = server.kernel.trees.values()
        gc.collect()
        gc.disable()
        try:
            async with trio.open_nursery() as nursery:
                for _ in range(10):
                    nursery.start_soon(come_and_go, server)
            with trio.fail_after(5):
                while tree.sockets.count or any(isinstance(o, OURS) for o in _new()):
                    await trio.sleep(0.01)
        finally:
            gc.enable()


def _new() -> list[object]:
    """Return what has come since the collector ran last, and lives."""
    return gc.get_objects(generation=0)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(USUAL, RARE, id="as Python has it"),
        pytest.param((900, 10, 10), (900, 10, 10), id="as somebody chose"),
    ],
)
def test_what_was_imported_is_set_aside_once_and_choices_stand(
    before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SETTLE, *map(str, before)],
        check=True,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.stdout.splitlines() == [f"True {after}", "(1, 2, 3)"]
