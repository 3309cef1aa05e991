"""A client that keeps every frame over all its connections, and folds them like a page."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import trio
from trio_websocket import ConnectionClosed, HandshakeError, open_websocket_url

from culet.kernel import AgentToolEvents, apply_agent_tool_event

TERMINALS = {"finished", "error", "aborted", "interrupted"}


class Watcher:
    """What one client knows. `chunks`: request id -> number -> body, each seen once."""

    def __init__(self) -> None:
        self.events = AgentToolEvents.empty()
        self.chunks: dict[str, dict[int, str]] = {}
        self.ended: dict[str, str | None] = {}
        self.terminals: dict[str, set[str]] = {}
        self.changed: list[str] = []
        self.connections = 0
        self._replayed: dict[str, trio.Event] = {}

    def take(self, text: str) -> dict[str, Any]:
        frame: dict[str, Any] = json.loads(text)
        if frame["type"] == "agent-tool-event":
            self.events = apply_agent_tool_event(self.events, frame)
            event = frame["event"]
            if event["kind"] in TERMINALS:
                told = msgspec.json.encode(event, order="deterministic").decode()
                self.terminals.setdefault(event["runId"], set()).add(told)
        elif frame["type"] == "cf_agent_use_chat_response":
            self._response(frame)
        return frame

    def _response(self, frame: dict[str, Any]) -> None:
        request, seq = frame["id"], frame.get("seq")
        if seq is not None:
            known = self.chunks.setdefault(request, {})
            if known.setdefault(seq, frame["body"]) != frame["body"]:
                self.changed.append(f"{request} {seq}: {known[seq]} -> {frame['body']}")
        if frame["done"]:
            self.ended[request] = frame.get("outcome")
            self._replayed.setdefault(request, trio.Event()).set()

    async def follow(self, url: str, *, ask: dict[str, Any] | None = None) -> None:
        """Connect, ask or resume, take frames until the socket ends."""
        try:
            async with open_websocket_url(url, max_message_size=1 << 24) as socket:
                self.connections += 1
                if ask is not None:
                    await socket.send_message(json.dumps(ask))
                else:
                    probe = {"type": "cf_agent_stream_resume_request", "probeId": "p"}
                    await socket.send_message(json.dumps(probe))
                while True:
                    frame = self.take(await socket.get_message())
                    if frame["type"] == "cf_agent_stream_resuming":
                        ack = {"type": "cf_agent_stream_resume_ack", "id": frame["id"]}
                        await socket.send_message(json.dumps(ack))
        except (ConnectionClosed, HandshakeError, OSError):
            return

    async def until_ended(self, request: str) -> None:
        """Wait until the end of that turn was seen."""
        await self._replayed.setdefault(request, trio.Event()).wait()

    async def ask_for(self, url: str, request: str, runs: int) -> None:
        """As a fresh client: replay a finished turn and all runs."""
        async with open_websocket_url(url, max_message_size=1 << 24) as socket:
            ack = {"type": "cf_agent_stream_resume_ack", "id": request}
            await socket.send_message(json.dumps(ack))
            while request not in self.ended or len(self.terminals) < runs:
                self.take(await socket.get_message())


def question(request: str, text: str) -> dict[str, Any]:
    """Return the frame that asks."""
    message = {
        "id": "user-1",
        "role": "user",
        "parts": [{"type": "text", "text": text}],
    }
    body = {"messages": [message], "trigger": "submit-message"}
    return {
        "type": "cf_agent_use_chat_request",
        "id": request,
        "init": {"method": "POST", "body": json.dumps(body)},
    }
