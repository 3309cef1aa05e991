"""A chat over plain HTTP as it is on the line: heads, events, marks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from web.wirekit import question, wired

pytestmark = pytest.mark.usefixtures("transport")

CHAT = "/agents/speaker/s/chat"
JSON = ("Content-Type: application/json",)


def asked(text: str, **more: Any) -> bytes:
    """Return what `useChat` posts."""
    body = {"id": "c", "messages": [question(text)], "trigger": "submit-message"}
    return json.dumps(body | more).encode()


@pytest.mark.rule("W-091", "W-093")
async def test_an_answer_is_a_stream_of_events_one_line_each_with_a_mark_at_its_end() -> (
    None
):
    async with wired() as server:
        status, headers, body = await server.http(
            "POST", CHAT, headers=JSON, body=asked("hi", messageId="m", model="small")
        )
        assert status == 200
        assert headers["content-type"] == "text/event-stream"
        assert headers["cache-control"] == "no-cache"
        assert headers["x-vercel-ai-ui-message-stream"] == "v1"
        assert headers["x-accel-buffering"] == "no"
        *events, rest = body.decode().split("\n\n")
        assert rest == "", "an empty line ends each"
        assert all(event.startswith("data: ") for event in events)
        assert all("\n" not in event for event in events)
        assert events[-1] == "data: [DONE]"
        chunks = [json.loads(event[6:]) for event in events[:-1]]
        assert chunks[0]["type"] == "start"
        assert chunks[0]["messageId"]
        assert {"type": "data-lines", "data": "a\nb"} in chunks
        assert {"type": "data-body", "data": {"model": "small"}} in chunks
        said = [c["delta"] for c in chunks if c["type"] == "text-delta"]
        assert "".join(said) == "one two three"
        # and it is what the sockets of the chat have
        _, _, history = await server.http("GET", "/agents/speaker/s/get-messages")
        assert [m["id"] for m in json.loads(history)] == ["u1", chunks[0]["messageId"]]


@pytest.mark.rule("W-027", "W-091")
async def test_a_page_of_another_origin_may_read_which_turn_it_has_asked() -> None:
    async with wired(cors=True) as server:
        headers = (*JSON, "Origin: https://b.example")
        status, told, _ = await server.http(
            "POST", CHAT, headers=headers, body=asked("hi")
        )
        assert status == 200
        assert told["access-control-allow-origin"] == "*"
        assert told["access-control-expose-headers"] == "*", "or `x-turn` is not seen"
        path = f"{CHAT}/c/stream?turn={told['x-turn']}"
        _, _, body = await server.http("GET", path, headers=headers)
        assert body.endswith(b"data: [DONE]\n\n"), "it has ended, and is told again"


@pytest.mark.rule("W-094")
async def test_nothing_to_resume_is_204_without_a_body() -> None:
    async with wired() as server:
        for path in (
            f"{CHAT}/c/stream",
            f"{CHAT}/a%2Fb/stream",
            f"{CHAT}/a/b/stream?x=1",
        ):
            status, _, body = await server.http("GET", path)
            assert (status, body) == (204, b""), path


@pytest.mark.rule("W-092")
async def test_what_cannot_be_asked_is_told_in_words() -> None:
    async with wired() as server:
        for headers, body, status in [
            ((), asked("hi"), 415),
            (("Content-Type: text/plain",), asked("hi"), 415),
            (JSON, b"{", 400),
            (JSON, asked("hi", messages="none"), 400),
            (JSON, asked("hi", trigger="other"), 400),
        ]:  # fmt: skip
            answer = await server.http("POST", CHAT, headers=headers, body=body)
            assert answer[0] == status
            assert answer[2]
        _, _, history = await server.http("GET", "/agents/speaker/s/get-messages")
        assert json.loads(history) == []
