"""A chat over HTTP: asked by POST, answered with events, gone on with after a cut."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import trio

from adapters.peer import connected, path_to, user
from culet.adapters import AIChatAgent
from culet.kernel import Chunk, Limits, Request, Response, Turn
from culet.kernel.http import closed
from culet.kernel.testing import Harness, open_test_kernel
from culet.kernel.visits import visit

ME = ("Speaker", "a")
JSON = {"content-type": "application/json"}
WORDS = [f"w{n} " for n in range(6)]


class Speaker(AIChatAgent):
    """Says six words, one a second, with a data part in between; "fail" fails."""

    async def on_chat_message(self, turn: Turn) -> AsyncIterator[Chunk]:
        yield {"type": "text-start", "id": "t"}
        for word in WORDS:
            if turn.messages[-1]["parts"][0]["text"] == "fail" and word == "w3 ":
                msg = "the lamp went out"
                raise RuntimeError(msg)
            yield {"type": "text-delta", "id": "t", "delta": word}
            await trio.sleep(1)
        yield {"type": "data-mood", "id": "m", "data": {"text": "line\nand line"}}
        yield {"type": "text-end", "id": "t"}


def kernel(**options: Any) -> Any:
    return open_test_kernel(roots=[Speaker], **options)


async def send(
    test: Harness, method: str, leaf: str, body: Any = None, **more: Any
) -> Response:
    headers = more.get("headers", JSON)
    data = msgspec.json.encode(body) if body is not None else b""
    request = Request(method, leaf, headers=headers, body=data)
    reached = await visit(test.kernel, path_to(ME, leaf=leaf), request)
    assert not isinstance(reached, Response)
    return await reached.handle()


def question(text: str, **more: Any) -> dict[str, Any]:
    return {"id": "chat", "messages": [user("u1", text)], **more}


async def read(response: Response, until: int | None = None) -> list[Any]:
    """Read events, all or so many, and leave; the mark of the end is `None`."""
    assert not isinstance(response.body, bytes)
    assert (response.status, response.headers["content-type"]) == (
        200, "text/event-stream",
    )  # fmt: skip
    out: list[Any] = []
    async for part in response.body:
        for event in part.decode().split("\n\n")[:-1]:
            kind, _, data = event.partition(": ")
            if kind == "data":
                out.append(None if data == "[DONE]" else msgspec.json.decode(data))
            else:
                out.append(event)
        if until is not None and len(out) >= until:
            break
    await closed(response.body)
    return out


def text(events: list[Any]) -> str:
    return "".join(e["delta"] for e in events if e and e["type"] == "text-delta")


@pytest.mark.rule("W-091", "W-093")
async def test_a_question_is_answered_with_events_to_the_end(clock: object) -> None:
    async with kernel() as test, connected(test.kernel, ME) as tab:
        response = await send(test, "POST", "/chat", question("hi", model="small"))
        events = await read(response)
        assert (events[0]["type"], events[-1]) == ("start", None)
        assert text(events) == "".join(WORDS)
        moods = [e for e in events if e and e["type"] == "data-mood"]
        assert moods == [
            {"type": "data-mood", "id": "m", "data": {"text": "line\nand line"}}
        ]
        assert tab.text(response.headers["x-turn"]) == "".join(WORDS)


@pytest.mark.rule("W-095", "W-096")
async def test_who_leaves_stops_nothing_and_goes_on_where_it_began(
    clock: object,
) -> None:
    async with kernel() as test:
        seen = await read(await send(test, "POST", "/chat", question("hi")), until=3)
        await trio.sleep(2)
        events = await read(await send(test, "GET", "/chat/any/stream"))
        assert events[: len(seen)] == seen
        assert (text(events), events[-1]) == ("".join(WORDS), None)
        assert (await send(test, "GET", "/chat/any/stream")).status == 204


@pytest.mark.rule("W-094")
@pytest.mark.parametrize("chat", ["any", "the/chat", "the%2Fchat", "a//b", "chat"])
async def test_the_name_of_a_chat_is_the_clients_own_in_whatever_form(
    chat: str, clock: object
) -> None:
    """Older clients put it in as it is; any answer but 200 and 204 is an error to them."""
    async with kernel() as test:
        assert (await send(test, "GET", f"/chat/{chat}/stream")).status == 204
        asked = await send(test, "POST", "/chat", question("hi"))
        events = await read(await send(test, "GET", f"/chat/{chat}/stream"))
        assert text(events) == "".join(WORDS)
        assert not isinstance(asked.body, bytes)
        await closed(asked.body)
        assert (await send(test, "POST", f"/chat/{chat}/stop")).status == 204


@pytest.mark.rule("W-095")
async def test_it_goes_on_over_a_crash_of_the_process(clock: object) -> None:
    async with kernel() as test:
        await read(await send(test, "POST", "/chat", question("hi")), until=3)
        await trio.sleep(2)
        await test.crash()
        await test.reopen()
        events = await read(await send(test, "GET", "/chat/any/stream"))
        assert events[-1] is None
        assert [e["type"] for e in events if e].count("start") == 1


@pytest.mark.rule("W-096", "W-097")
async def test_stop_ends_the_turn_at_the_server(clock: object) -> None:
    async with kernel() as test, trio.open_nursery() as nursery:
        response = await send(test, "POST", "/chat", question("hi"))

        async def stop() -> None:
            await trio.sleep(2.5)
            assert (await send(test, "POST", "/chat/any/stop")).status == 204

        nursery.start_soon(stop)
        events = await read(response)
        assert events[-2:] == [{"type": "abort"}, None]
        assert text(events) == "w0 w1 w2 "
        assert (await send(test, "POST", "/chat/any/stop")).status == 204


@pytest.mark.rule("W-097")
async def test_a_failed_turn_says_so_and_says_it_to_whoever_comes(
    clock: object,
) -> None:
    async with kernel() as test:
        for response in (
            await send(test, "POST", "/chat", question("fail")),
            await send(test, "GET", "/chat/any/stream"),
        ):
            events = await read(response)
            assert events[-2]["type"] == "error"
            assert text(events) == "w0 w1 w2 "


@pytest.mark.limit("events_beat_s")
@pytest.mark.rule("W-093")
async def test_silence_is_told_as_a_sign_of_life(clock: object) -> None:
    async with kernel(limits=Limits(events_beat_s=0.3)) as test:
        events = await read(await send(test, "POST", "/chat", question("hi")))
        beats = [e for e in events if e == ": it goes on"]
        assert len(beats) >= 12
        assert text([e for e in events if e not in beats]) == "".join(WORDS)


async def test_who_reads_late_delays_nobody_and_has_it_whole(clock: object) -> None:
    async with kernel() as test, connected(test.kernel, ME) as tab:
        slow = await send(test, "POST", "/chat", question("hi"))
        assert not isinstance(slow.body, bytes)
        first = (await anext(aiter(slow.body))).decode()
        began = trio.current_time()
        await tab.ended(slow.headers["x-turn"])
        assert trio.current_time() - began < 7
        await trio.sleep(60)
        rest = await read(slow)
        assert "w1" not in first
        assert text(rest) == "".join(WORDS[1:])


@pytest.mark.rule("W-092")
@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (question("hi"), {"content-type": "text/plain"}, 415),
        (question("hi"), {}, 415),
        ({"messages": "hi"}, JSON, 400),
        ([], JSON, 400),
        (question("hi", trigger="other"), JSON, 400),
        (question("hi"), {"content-type": "Application/JSON; charset=utf-8"}, 200),
    ],
)
async def test_what_is_no_question_is_refused(
    clock: object, body: Any, headers: dict[str, str], status: int
) -> None:
    async with kernel() as test:
        response = await send(test, "POST", "/chat", body, headers=headers)
        assert response.status == status
        if status == 200:
            await read(response)
        for method, leaf in (("GET", "/chat"), ("POST", "/chat/a/stream"),
                             ("GET", "/chat/a/stop"), ("GET", "/chat/stream")):  # fmt: skip
            assert (await send(test, method, leaf)).status == 404


@pytest.mark.rule("W-092")
async def test_a_chat_that_is_full_takes_no_question(clock: object) -> None:
    async with kernel(limits=Limits(messages_per_chat=3)) as test:
        await read(await send(test, "POST", "/chat", question("hi")))
        more = {"id": "chat", "messages": [user("u2", "and?"), user("u3", "so?")]}
        assert (await send(test, "POST", "/chat", more)).status == 413
