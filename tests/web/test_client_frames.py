"""The Python client against a server that says whatever a test wants, on a real socket."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import trio
from trio_websocket import (
    ConnectionClosed,
    WebSocketConnection,
    WebSocketRequest,
    serve_websocket,
)

from culet.kernel import Limits
from culet.kernel.core.attach import known_runs
from culet.kernel.errors import CallFailed, CapacityError, Refused
from culet.web import RemoteAgent, connect
from culet.web import client_events as told

QUICK = Limits(reconnect_base_s=0.01, reconnect_max_s=0.02)
HELLO = {"type": "cf_agent_identity", "name": "a", "agent": "hub"}
RESPONSE = "cf_agent_use_chat_response"
CANCEL = "cf_agent_chat_request_cancel"


class Server:
    """The server's end of the newest socket, and everything that a client has sent."""

    def __init__(self) -> None:
        self.sockets: list[WebSocketConnection] = []
        self.targets: list[str] = []
        self.tokens: list[bytes] = []
        self.heard: list[dict[str, Any]] = []
        self.accepts = True
        self._more = trio.Event()

    async def handle(self, request: WebSocketRequest) -> None:
        if not self.accepts:
            await request.reject(503)
            return
        self.targets.append(request.path)
        self.tokens += [v for k, v in request.headers if k == b"x-token"]
        socket = await request.accept()
        self.sockets.append(socket)
        await self.say(HELLO)
        try:
            while True:
                self.heard.append(json.loads(await socket.get_message()))
                self._more.set()
                self._more = trio.Event()
        except ConnectionClosed:
            pass

    async def say(self, *frames: Any) -> None:
        """Send frames; a text goes as it is."""
        for frame in frames:
            text = frame if isinstance(frame, str | bytes) else json.dumps(frame)
            await self.sockets[-1].send_message(text)

    async def until(self, kind: str) -> list[dict[str, Any]]:
        """Take frames out, up to the first one of a kind, and return them."""
        taken: list[dict[str, Any]] = []
        while True:
            while self.heard:
                taken.append(self.heard.pop(0))
                if taken[-1]["type"] == kind:
                    return taken
            await self._more.wait()

    async def hears(self, kind: str) -> dict[str, Any]:
        """Return the next frame of a kind."""
        return (await self.until(kind))[-1]


@asynccontextmanager
async def talking(limits: Limits = QUICK) -> AsyncIterator[tuple[Server, RemoteAgent]]:
    server = Server()
    async with trio.open_nursery() as nursery:
        running = await nursery.start(
            partial(serve_websocket, server.handle, "127.0.0.1", 0, None)
        )
        url = f"ws://127.0.0.1:{running.port}/agents/hub/a"
        with trio.fail_after(10):
            async with connect(url, limits=limits) as agent:
                yield server, agent
        nursery.cancel_scope.cancel()


def said(request_id: str, seq: int | None, **more: Any) -> dict[str, Any]:
    """Return a frame of a turn with one chunk of text."""
    chunk = json.dumps({"type": "text-delta", "id": "t", "delta": f"w{seq} "})
    frame = {"type": RESPONSE, "id": request_id, "body": chunk, "done": False}
    return frame | ({} if seq is None else {"seq": seq}) | more


def texts(agent: RemoteAgent) -> list[str]:
    return ["".join(p.get("text", "") for p in m["parts"]) for m in agent.messages]


def run_frame(sequence: int, **event: Any) -> dict[str, Any]:
    event = {"runId": "r1", **event}
    return {"type": "agent-tool-event", "sequence": sequence, "event": event}


STARTED = run_frame(0, kind="started", agentType="Worker", order=0)
NONSENSE: list[Any] = [
    "no JSON",
    "[" * 100_000,
    "[1]",
    b"\xff\x00",
    {"type": ["list"]},
    {"type": "cf_agent_state"},
    {"type": "rpc", "id": "of nobody", "success": True, "result": 1},
    {"type": "agent-tool-event"},
    {"type": "agent-tool-event", "event": {"kind": ["x"], "runId": "r1"}},
    {"type": "cf_agent_chat_messages", "messages": 5},
    {"type": "cf_agent_chat_messages", "messages": [5, {"id": 5}, {"role": "user"}]},
    {"type": "cf_agent_message_updated", "message": "text"},
    {"type": "cf_agent_message_updated", "message": {"id": [], "parts": []}},
    {"type": "cf_agent_stream_pending", "id": 5},
    {"type": "cf_agent_stream_resume_none"},
    {"type": "cf_agent_chat_recovering"},
    {"type": RESPONSE, "id": 5, "body": "{}", "done": True},
    said("q", 0, body="no JSON"),
    said("q", 1, body="[]"),
    said("q", 2, body="[" * 100_000),
    said("q", 3, body=""),
]


async def test_frames_that_make_no_sense_harm_nothing() -> None:
    async with talking() as (server, agent):
        await server.say(STARTED, *NONSENSE, {"type": "cf_agent_state", "state": 7})
        await agent.until(lambda a: a.state == 7)
        assert agent.messages == []
        assert list(agent.runs.runs_by_id) == ["r1"]
        assert agent.connections == 1


async def test_a_chunk_of_a_run_that_cannot_be_read_is_told_without_it() -> None:
    async with talking() as (server, agent):
        events = agent.events()
        await server.say(
            STARTED,
            run_frame(1, kind="chunk", body="no JSON"),
            run_frame(2, kind="chunk"),
            run_frame(3, kind="chunk", body='{"type":"text-start","id":"t"}'),
        )
        seen = [await anext(events) for _ in range(4)]
    chunks = [event.chunk for event in seen if isinstance(event, told.RunChanged)]
    assert chunks == [None, None, None, {"type": "text-start", "id": "t"}]


async def test_runs_that_the_agent_has_forgotten_are_told() -> None:
    async with talking() as (server, agent):
        events = agent.events()
        cleared = {"kind": "cleared", "runIds": ["r1", "never seen"]}
        await server.say(STARTED, {"type": "agent-tool-event", "event": cleared})
        assert isinstance(await anext(events), told.RunChanged)
        assert await anext(events) == told.RunsCleared(run_ids=["r1"])
        assert not agent.runs.runs_by_id


@pytest.mark.rule("T-237", "B-03")
async def test_a_client_that_comes_back_says_which_frames_it_has() -> None:
    started = {**STARTED, "startedAt": 7}
    other = {**run_frame(0, kind="started", runId="r2", agentType="W", order=0)}
    async with talking() as (server, agent):
        await server.say(
            {**other, "startedAt": 9},
            started,
            run_frame(1, kind="chunk", body="{}"),
            run_frame(2, kind="chunk", body="{}"),
            run_frame(4, kind="chunk", body="{}"),  # there is a gap before it
            run_frame(0, kind="started", runId="old server", agentType="W", order=0),
        )
        await agent.until(lambda a: "old server" in a.runs.runs_by_id)
        await server.sockets[0].aclose()
        await agent.until(lambda a: a.connections == 2)
        cleared = {"kind": "cleared", "runIds": ["r1"]}
        await server.say(
            {"type": "agent-tool-event", "sequence": 0, "event": cleared},
            run_frame(1, kind="finished", runId="r2", summary="x"),
        )
        await agent.until(lambda a: a.runs.runs_by_id["r2"]["status"] == "completed")
        await server.sockets[1].aclose()
        await agent.until(lambda a: a.connections == 3)
    first, second, third = (
        parse_qs(urlsplit(target).query).get("_runs") for target in server.targets
    )
    assert first is None
    assert second is not None
    assert known_runs(second[0]) == {"r1": (7, 2), "r2": (9, 0)}
    assert third is not None
    assert known_runs(third[0]) == {"r2": (9, 1)}


async def test_a_message_has_a_list_of_parts_whatever_came() -> None:
    part = {"type": "text", "text": "hello"}
    question = {"id": "m1", "role": "user"}
    async with talking() as (server, agent):
        await server.say(
            {
                "type": "cf_agent_chat_messages",
                "messages": [
                    question,
                    {"id": "m2", "role": "user", "parts": ["x", part]},
                ],
            }
        )
        await agent.until(lambda a: a.messages)
        assert agent.messages == [
            {**question, "parts": []},
            {"id": "m2", "role": "user", "parts": [part]},
        ]


async def test_a_message_that_changed_takes_the_place_of_the_old_one() -> None:
    def message(name: str, text: str) -> dict[str, Any]:
        return {"id": name, "role": "user", "parts": [{"type": "text", "text": text}]}

    async with talking() as (server, agent):
        both = [message("m1", "one"), message("m2", "two")]
        events = agent.events()
        await server.say({"type": "cf_agent_chat_messages", "messages": both})
        for changed in (message("m1", "eins"), message("m3", "three")):
            await server.say({"type": "cf_agent_message_updated", "message": changed})
        for _ in range(3):
            last = await anext(events)
        assert texts(agent) == ["eins", "two", "three"]
        assert last == told.MessagesChanged(messages=agent.messages)


async def test_chunks_without_numbers_are_counted() -> None:
    async with talking() as (server, agent):
        events = agent.events()
        await server.say(said("q", None), said("q", None), said("q", None, done=True))
        seen = [await anext(events) for _ in range(4)]
    assert [e.seq for e in seen if isinstance(e, told.ChatChunk)] == [0, 1, 2]
    assert isinstance(seen[-1], told.ChatEnded)


CHUNK = '{"type":"text-delta","id":"t","delta":"a part of the answer"}'


@pytest.mark.rule("C-021")
@pytest.mark.parametrize(
    ("frame", "outcome"),
    [
        ({"outcome": "aborted"}, "aborted"),
        ({"outcome": ["aborted"]}, "completed"),
        ({"outcome": "a word of another version"}, "completed"),
        ({}, "completed"),
        ({"error": True, "body": "it broke"}, "error"),
        ({"error": True, "body": ""}, "error"),
        ({"error": True, "body": CHUNK}, "error"),  # a text for people all the same
    ],
)
async def test_a_turn_ends_in_a_way_that_we_know(
    frame: dict[str, Any], outcome: str
) -> None:
    async with talking() as (server, agent):
        answer = await agent.ask("?")
        await server.say(
            said(answer.request_id, 0),
            {"type": RESPONSE, "id": answer.request_id, "done": True, **frame},
        )
        if outcome == "error":
            told_of = frame["body"] or "the turn failed"
            with pytest.raises(CallFailed, match=re.escape(told_of)):
                await answer.done()
            assert answer.text == "w0 "
        else:
            await answer.done()
        assert answer.outcome == outcome
        assert agent.turns == []


async def test_a_turn_that_recovers_has_not_ended() -> None:
    async with talking() as (server, agent):
        answer = await agent.ask("?")
        over = {"type": RESPONSE, "id": answer.request_id, "done": True}
        await server.say(said(answer.request_id, 0), {**over, "outcome": "recovering"})
        await server.say(said(answer.request_id, 1), {**over, "outcome": "completed"})
        await answer.done()
        assert answer.text == "w0 w1 "


async def test_what_comes_after_the_end_of_a_turn_begins_no_other() -> None:
    async with talking() as (server, agent):
        answer = await agent.ask("?")
        over = {"type": RESPONSE, "id": answer.request_id, "done": True}
        await server.say(said(answer.request_id, 0), over)
        await answer.done()
        before = agent.messages
        error = {**over, "error": True, "body": "late"}
        await server.say(
            said(answer.request_id, 0), said(answer.request_id, 1), error, over,
            {"type": "cf_agent_state", "state": 1},
        )  # fmt: skip
        await agent.until(lambda a: a.state == 1)
        assert (agent.messages, agent.turns) == (before, [])
        assert answer.outcome == "completed"


async def test_a_continuation_goes_on_in_the_last_reply() -> None:
    reply = {"id": "m", "role": "assistant", "parts": [{"type": "text", "text": "so "}]}
    async with talking() as (server, agent):
        await server.say(
            {"type": "cf_agent_chat_messages", "messages": [reply]},
            said("q", 0, continuation=True),
            said("q", 1, continuation=True, done=True),
        )
        await agent.until(lambda a: texts(a) == ["so w0 w1 "])
        assert [m["id"] for m in agent.messages] == ["m"]


async def test_a_turn_is_under_way_from_the_moment_in_which_it_is_offered() -> None:
    reply = {"id": "m", "role": "assistant", "parts": [{"type": "text", "text": "so "}]}
    async with talking() as (server, agent), trio.open_nursery() as nursery:
        caught_up = trio.Event()

        async def wait() -> None:
            await agent.caught_up()
            caught_up.set()

        nursery.start_soon(wait)
        fence = await server.hears("rpc")
        await server.say(
            {"type": "cf_agent_chat_messages", "messages": [reply]},
            {"type": "cf_agent_stream_pending", "id": "q"},
        )
        await agent.until(lambda a: a.messages)
        assert not caught_up.is_set()
        await server.say({**fence, "success": False, "error": "no such method"})
        await caught_up.wait()
        assert agent.turns == ["q"]
        answer = agent.follow("q")
        assert answer is not None
        await server.say({"type": "cf_agent_stream_resuming", "id": "q"})
        await server.hears("cf_agent_stream_resume_ack")
        await server.say(
            said("q", 0, continuation=True), said("q", 1, continuation=True, done=True)
        )
        await answer.done()
        assert texts(agent) == ["so w0 w1 "]
        assert agent.turns == []


async def test_stop_without_an_id_stops_every_turn() -> None:
    async with talking() as (server, agent):
        await server.say(said("theirs", 0))
        await agent.until(lambda a: a.turns)
        mine = await agent.ask("?")
        await agent.stop()
        stopped = [(await server.hears(CANCEL))["id"] for _ in range(2)]
        assert set(stopped) == {"theirs", mine.request_id}
        await agent.stop("another")
        assert (await server.hears(CANCEL))["id"] == "another"


async def test_a_turn_that_is_followed_is_asked_for_again_over_another_socket() -> None:
    async with talking() as (server, agent):
        await server.say(said("theirs", 0))
        await agent.until(lambda a: a.turns)
        followed = agent.follow("theirs")
        assert followed is not None
        await server.sockets[-1].aclose(1012)
        await server.hears("cf_agent_stream_resume_request")
        await server.say({"type": "cf_agent_stream_resume_none"})
        assert (await server.hears("cf_agent_stream_resume_ack"))["id"] == "theirs"
        await server.say(
            said("theirs", 0, replay=True),
            said("theirs", 1, replay=True, done=True, outcome="completed"),
        )
        await followed.done()
        assert followed.text == "w0 w1 "


async def test_a_turn_that_is_owed_is_not_asked_for_again() -> None:
    async with talking() as (server, agent):
        first = await agent.ask("one")
        second = await agent.ask("two")
        await server.sockets[-1].aclose(1012)
        await server.hears("cf_agent_stream_resume_request")
        await server.say({"type": "cf_agent_stream_pending", "id": first.request_id})
        again = await server.hears("cf_agent_use_chat_request")
        assert again["id"] == second.request_id
        for answer in (first, second):
            await server.say(said(answer.request_id, 0, done=True))
            await answer.done()
        assert not [f for f in server.heard if f["type"] == "cf_agent_use_chat_request"]


async def test_a_turn_that_is_offered_twice_is_taken_once() -> None:
    async with talking() as (server, agent):
        offer = {"type": "cf_agent_stream_resuming", "id": "theirs"}
        await server.say(offer, offer, {"type": "cf_agent_state", "state": 1})
        await agent.until(lambda a: a.state == 1)
        await agent.send({"type": "last"})
        kinds = [frame["type"] for frame in await server.until("last")]
        assert kinds == ["cf_agent_stream_resume_ack", "last"]


async def test_a_state_that_is_cancelled_or_refused_is_what_it_was_before() -> None:
    async with talking() as (server, agent):
        await server.say({"type": "cf_agent_state", "state": "before"})
        await agent.until(lambda a: a.state == "before")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(agent.set_state, "mine")
            await server.hears("rpc")
            nursery.cancel_scope.cancel()
        assert agent.state == "before"
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def refused() -> None:
                with pytest.raises(Refused, match="not that"):
                    await agent.set_state("mine")

            call = await server.hears("rpc")
            await server.say(
                {"type": "cf_agent_state_error", "error": "not that"},
                {"type": "cf_agent_state", "state": "theirs"},
                {"type": "rpc", "id": call["id"], "success": False, "error": "no"},
            )
        assert agent.state == "theirs"


async def test_what_is_said_to_an_answer_that_nobody_waits_for_is_not_the_next_one_s() -> (
    None
):
    async with talking() as (server, agent):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(agent.approve_call, "c", run_id="r"))
            await server.hears("cf_agent_tool_approval")
            nursery.cancel_scope.cancel()
        said: list[bool | None] = []

        async def second() -> None:
            said.append(await agent.approve_call("c", False, run_id="r"))

        told = {"type": "cf_agent_run_answer", "runId": "r", "toolCallId": "c"}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(second)
            await server.hears("cf_agent_tool_approval")
            await server.say({**told, "accepted": True}, {**told, "accepted": False})
        assert said == [False]
        assert agent._mirror.questions._pending == {}


async def test_headers_are_asked_for_anew_before_each_attempt() -> None:
    server, asked = Server(), 0

    async def headers() -> dict[str, str]:
        nonlocal asked
        asked += 1
        await trio.lowlevel.checkpoint()
        if asked == 2:
            raise ConnectionRefusedError("who gives tokens is away")
        if asked == 4:
            raise LookupError("no more tokens")
        return {"X-Token": f"t{asked}"}

    async with trio.open_nursery() as nursery:
        handle = partial(serve_websocket, server.handle, "127.0.0.1", 0, None)
        url = f"ws://127.0.0.1:{(await nursery.start(handle)).port}/agents/hub/a"
        with trio.fail_after(10), pytest.RaisesGroup(LookupError):
            async with connect(url, limits=QUICK, headers=headers) as agent:
                await server.sockets[-1].aclose(1012)
                await agent.until(lambda a: a.connections == 2)
                await server.sockets[-1].aclose(1012)
                await trio.sleep_forever()
        nursery.cancel_scope.cancel()
    assert (server.tokens, asked) == ([b"t1", b"t3"], 4)


async def test_a_message_is_taken_back_while_there_is_no_socket() -> None:
    async with talking() as (server, agent):
        server.accepts = False
        await server.sockets[-1].aclose(1012)
        await agent.until(lambda a: not a.is_connected)
        with trio.move_on_after(0.01):
            await agent.send({"type": "never"})
        server.accepts = True
        await agent.send({"type": "last"})
        assert [f["type"] for f in await server.until("last")] == ["last"]


async def test_who_reads_too_slowly_is_told_what_the_server_has_forgotten() -> None:
    async with talking(Limits(client_values=2)) as (server, agent):
        answer = await agent.ask("?")
        name = answer.request_id
        await server.say(*(said(name, number) for number in range(5)))
        await agent.until(lambda _: answer.text.endswith("w4 "))
        assert [(await anext(answer))["delta"] for _ in range(2)] == ["w0 ", "w1 "]
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def told() -> None:
                with pytest.raises(CapacityError, match="forgotten"):
                    await anext(answer)

            await server.hears("cf_agent_stream_resume_ack")
            complete = {"body": "", "replay": True, "replayComplete": True}
            await server.say(said(name, 4, replay=True), said(name, 5, **complete))
