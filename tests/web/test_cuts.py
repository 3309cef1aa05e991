"""A connection that is cut again and again, anywhere: no frame is lost, none is doubled.

One run streams; its watcher's line is cut after so many bytes as chance says, in the
middle of a handshake, of a frame, of a replay. What he hears over all his lines is put
together and counted: a client that says what it has (`_runs`) is sent each frame once.
One that says nothing is sent all of them each time; his fold takes each once.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any
from urllib.parse import quote

import pytest
import trio
from trio_websocket import ConnectionClosed, HandshakeError, wrap_client_stream

import volume
from culet.kernel import AgentToolEvents, apply_agent_tool_event
from culet.kernel.core.attach import PARAMETER, Known, known_text, noted
from web.cutting import GONE, Cutter, cutter

CUTS = volume.ASKED["cuts"].now
SILENT_CUTS = 40  # of who says nothing: he is sent everything each time
CHUNKS = 12 * CUTS
PATH = "/agents/desk/d?_pk=me"


async def hear(port: int, path: str, take: Any) -> None:
    """Give `take` each message of one connection, until that is gone or it has enough."""
    with suppress(*GONE):
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        async with stream, trio.open_nursery() as nursery:
            with suppress(ConnectionClosed, HandshakeError):
                tap = _EndRaises(stream)
                socket = await wrap_client_stream(nursery, tap, "a", path)
                while not take(json.loads(await socket.get_message())):
                    pass
            nursery.cancel_scope.cancel()


class _EndRaises(trio.abc.Stream):
    """trio-websocket waits for ever for a handshake whose stream has ended."""

    def __init__(self, inner: trio.SocketStream) -> None:
        self._inner = inner

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        data = bytes(await self._inner.receive_some(max_bytes))
        if not data:
            raise ConnectionResetError
        return data

    async def send_all(self, data: Any) -> None:
        await self._inner.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._inner.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        await self._inner.aclose()


async def watched(made: Cutter, heard: list[Any], path: Any) -> None:
    """Connect again and again until the run's end was heard."""

    def take(frame: Any) -> bool:
        if frame["type"] != "agent-tool-event":
            return False
        heard.append(frame)
        return bool(frame["event"]["kind"] == "finished")

    with trio.fail_after(300):
        while not heard or heard[-1]["event"]["kind"] != "finished":
            with suppress(BaseExceptionGroup):
                await hear(made.port, path(), take)


@pytest.mark.slow
async def test_who_says_what_he_has_is_sent_each_frame_once_over_all_cuts() -> None:
    known: dict[str, Known] = {}
    heard: list[Any] = []

    def path() -> str:
        while path.noted < len(heard):  # type: ignore[attr-defined]
            noted(known, heard[path.noted])  # type: ignore[attr-defined]
            path.noted += 1  # type: ignore[attr-defined]
        return f"{PATH}&{PARAMETER}={quote(known_text(known), safe='')}"

    path.noted = 0  # type: ignore[attr-defined]
    async with cutter(1, CHUNKS) as made:
        made.most = CUTS
        await watched(made, heard, path)
        volume.LEDGER.add("cuts", made.cuts)
        assert made.cuts == CUTS
    numbers = [frame["sequence"] for frame in heard]
    assert numbers == list(range(CHUNKS + 2)), (
        "a frame was lost, doubled or out of order"
    )
    bodies = [json.loads(f["event"]["body"]) for f in heard[1:-1]]
    assert [b["delta"] for b in bodies] == [f"{n} " for n in range(CHUNKS)]


@pytest.mark.slow
async def test_who_says_nothing_folds_each_frame_once_over_all_cuts() -> None:
    heard: list[Any] = []
    async with cutter(2, CHUNKS) as made:
        made.most = SILENT_CUTS
        await watched(made, heard, lambda: PATH)
        assert made.cuts == SILENT_CUTS
    state = AgentToolEvents.empty()
    for frame in heard:
        state = apply_agent_tool_event(state, frame)
    said = state.runs_by_id["r"]["parts"][0]["text"]
    assert said == "".join(f"{n} " for n in range(CHUNKS))
    assert state.protocol_errors == 0
