"""Turns on the wire, what the other files leave: requests, greetings, transcripts, ends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, get_args

import msgspec
import pytest
import trio

from adapters.peer import Client, connected, path_to, user
from adapters.talk import DOORS, ME, Talk, answers, ask, delta, history, probe, texts
from culet.adapters import AIChatAgent
from culet.kernel import Agent, AgentToolRun, Chunk, Request, Response, Turn
from culet.kernel.core import frames
from culet.kernel.testing import open_test_kernel
from culet.kernel.visits import visit


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    DOORS.__init__()  # type: ignore[misc]
    monkeypatch.setattr(Talk, "staged", [])
    yield


def ids(frame: dict[str, Any]) -> list[str]:
    return [m["id"] for m in frame["messages"]]


# ---- what a client asks


@pytest.mark.rule("W-102")
@pytest.mark.parametrize(
    "init",
    [
        {"method": "GET", "body": '{"messages":[]}'},
        {"method": "POST", "body": ""},
        {"method": "POST", "body": "{"},
        {"method": "POST", "body": '{"messages":"hi"}'},
        {"method": "POST", "body": '{"messages":[],"trigger":"glow"}'},
    ],
)
async def test_a_request_that_cannot_be_used_has_no_answer_and_no_effect(
    init: dict[str, Any], clock: object
) -> None:
    async with (
        open_test_kernel(roots=[Talk]) as test,
        connected(test.kernel, ME) as tab,
    ):
        greeted = len(tab.frames)
        tab.send("cf_agent_use_chat_request", id="r1", init=init)
        await trio.sleep(5)
        assert (await probe(tab, "p"))["reason"] == "idle"
        assert len(tab.frames) == greeted + 1
        assert await history(test) == []


class Ear(Agent):
    """Has no chat; gives back what it is told."""

    async def on_message(self, connection: Any, message: str | bytes) -> None:
        kind = msgspec.json.decode(message)["type"]
        connection.send(msgspec.json.encode({"type": "heard", "kind": kind}).decode())


@pytest.mark.rule("W-112")
async def test_frames_of_a_chat_are_messages_for_an_agent_that_has_none(
    clock: object,
) -> None:
    async with (
        open_test_kernel(roots=[Ear]) as test,
        connected(test.kernel, ("Ear", "a")) as tab,
    ):
        ask(tab, "r1", "hi")
        tab.send("cf_agent_stream_resume_request", probeId="p")
        tab.send("cf_agent_chat_clear")
        tab.send("glow")
        await tab.until(lambda c: len(c.of("heard")) == 4)
        assert [f["kind"] for f in tab.of("heard")] == [
            "cf_agent_use_chat_request", "cf_agent_stream_resume_request",
            "cf_agent_chat_clear", "glow",
        ]  # fmt: skip


@pytest.mark.rule("W-231")
async def test_a_message_is_kept_as_its_client_sent_it(clock: object) -> None:
    sent = {
        "id": "u1",
        "role": "user",
        "metadata": {"from": "a phone", "deep": {"n": [1, None]}},
        "parts": [
            {
                "type": "file",
                "mediaType": "image/png",
                "url": "data:,x",
                "filename": "a",
            },
            {"type": "text", "text": "look é 🦉"},
            {"type": "data-place", "id": "d", "data": {"x": 1.5}},
            {"type": "glow", "own": True},
        ],
        "more": "keys",
    }
    async with (
        open_test_kernel(roots=[Talk]) as test,
        connected(test.kernel, ME) as tab,
        connected(test.kernel, ME) as other,
    ):
        tab.chat("r1", sent)
        await other.ended("r1")
        assert other.of("cf_agent_chat_messages")[1]["messages"] == [sent]
        assert (await history(test))[0] == sent


# ---- who connects


class Host(Talk):
    """A chat that has asked for a run, and speaks itself to who connects."""

    initial_state = {"n": 1}

    async def run(self) -> AgentToolRun:
        return await self.run_agent_tool(Hand, {}, run_id="run")

    async def on_connect(self, connection: Any, ctx: Any) -> None:
        connection.send('{"type":"welcome"}')


class Hand(Agent):
    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        yield delta("done")


def host() -> Any:
    return open_test_kernel(roots=[Host], facets=[Hand])


@pytest.mark.rule("W-121")
@pytest.mark.parametrize("streams", [False, True])
async def test_a_chat_speaks_first_then_it_says_who_it_is_then_come_the_runs(
    streams: bool, clock: object
) -> None:
    async with host() as test:
        await (await test.kernel.get_agent(Host, "a")).run()
        async with connected(test.kernel, ("Host", "a")) as tab:
            if streams:
                ask(tab, "r1", "a wait:x")
                await DOORS.at("wait:x")
            async with connected(test.kernel, ("Host", "a")) as late:
                runs = "agent-tool-event"
                await late.until(lambda c: len(c.of(runs)) == 3)
                first = "stream_resuming" if streams else "chat_messages"
                told = [f["type"] for f in late.frames if f["type"] != "welcome"]
                assert told == [
                    f"cf_agent_{first}", "cf_agent_identity", "cf_agent_state",
                    "cf_agent_mcp_servers", runs, runs, runs,
                ]  # fmt: skip
                assert late.frames[1]["stateFollows"] is True
                assert late.of("welcome"), "the hook's words come as well"
            DOORS.open("wait:x")


@pytest.mark.rule("W-128")
async def test_what_a_client_says_before_it_was_greeted_is_done_after_that_in_order(
    clock: object,
) -> None:
    async with open_test_kernel(roots=[Talk]) as test:
        reached = await visit(test.kernel, path_to(ME), Request(url="/x"))
        assert not isinstance(reached, Response)
        early = Client(reached.gate)
        early.connection = reached.connect(early, "c")
        early.send("cf_agent_stream_resume_request", probeId="p0")
        ask(early, "r1", "hi")
        early.send("cf_agent_stream_resume_request", probeId="p1")
        await trio.sleep(1)
        assert early.frames == []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(early.run)
            await early.connection.opened()
            await early.ended("r1")
            kinds = [f["type"].removeprefix("cf_agent_") for f in early.frames]
            assert kinds[:5] == [
                "chat_messages", "identity", "mcp_servers",
                "stream_resume_none", "stream_pending",
            ]  # fmt: skip
            assert (answers(early, "p0"), answers(early, "p1")) == (
                ["resume_none"], ["pending"],
            )  # fmt: skip
            assert early.text("r1") == "hi "
            nursery.cancel_scope.cancel()


# ---- one turn


class Named(AIChatAgent):
    """Names its message itself, begins twice, and ends with a reason."""

    async def on_chat_message(self, turn: Turn) -> AsyncIterator[Chunk]:
        yield {"type": "start", "messageId": "own", "messageMetadata": {"a": 1}}
        yield {"type": "text-start", "id": "t"}
        yield delta("hi")
        yield {"type": "start", "messageId": "another"}
        yield {"type": "text-end", "id": "t"}
        yield {"type": "finish", "finishReason": "length"}

    async def ask(self) -> None:
        await self.save_messages([user("u1", "from within")])


@pytest.mark.rule("W-154", "W-165")
async def test_the_first_start_names_the_message_and_the_finish_stays_what_it_is(
    clock: object,
) -> None:
    path = ("Named", "a")
    async with (
        open_test_kernel(roots=[Named]) as test,
        connected(test.kernel, path) as tab,
        connected(test.kernel, path) as other,
    ):
        tab.chat("r1", user("u1", "go"))
        await other.ended("r1")
        chunks = other.chunks("r1")
        starts = [c for c in chunks if c["type"] == "start"]
        assert starts == [
            {"type": "start", "messageId": "own", "messageMetadata": {"a": 1}}
        ]
        assert chunks[0] == starts[0]
        assert chunks[-1] == {"type": "finish", "finishReason": "length"}
        message = other.frames[-2]["messages"][-1]
        assert (message["id"], message["metadata"]) == ("own", {"a": 1})


ODD: list[Chunk] = [
    {"type": "glow", "own": [1, None], "é": "\u2028 and 🦉"},
    {"type": "text-start", "id": "t", "more": {"deep": 1.5}},
    {"type": "reset-step"},
]


class Odd(AIChatAgent):
    """Says chunks that no client knows."""

    async def on_chat_message(self, turn: Turn) -> AsyncIterator[Chunk]:
        for chunk in ODD:
            yield chunk


@pytest.mark.rule("W-238")
async def test_what_an_author_says_goes_out_as_it_is(clock: object) -> None:
    path = ("Odd", "a")
    async with (
        open_test_kernel(roots=[Odd]) as test,
        connected(test.kernel, path) as tab,
    ):
        tab.chat("r1", user("u1", "go"))
        await tab.ended("r1")
        assert tab.chunks("r1") == [{"type": "start", "messageId": "msg-r1"}, *ODD]
        async with connected(test.kernel, path) as late:
            late.send("cf_agent_stream_resume_ack", id="r1")
            await late.ended("r1")
            assert late.chunks("r1") == tab.chunks("r1")
        kinds = [p["type"] for p in late.frames[0]["messages"][-1]["parts"]]
        assert kinds == ["text"]


class Shows(AIChatAgent):
    """Shows data, replaces it, shows some in passing; then it says that it failed."""

    async def on_chat_message(self, turn: Turn) -> AsyncIterator[Chunk]:
        yield {"type": "data-mood", "id": "m", "data": 1}
        yield {"type": "data-mood", "id": "m", "data": 2}
        yield {"type": "data-mood", "id": "n", "data": 3}
        yield {"type": "data-blink", "data": 4, "transient": True}
        yield {"type": "error", "errorText": "out of moods"}


@pytest.mark.rule("W-237", "W-169")
async def test_data_with_the_same_id_is_replaced_and_an_error_is_no_chunk(
    clock: object,
) -> None:
    path = ("Shows", "a")
    async with (
        open_test_kernel(roots=[Shows]) as test,
        connected(test.kernel, path) as tab,
        connected(test.kernel, path) as other,
    ):
        tab.chat("r1", user("u1", "go"))
        last = await other.ended("r1")
        kinds = [c["type"] for c in other.chunks("r1")]
        assert kinds == ["start", *["data-mood"] * 3, "data-blink"]
        assert other.frames[-2]["messages"][-1]["parts"] == [
            {"type": "data-mood", "id": "m", "data": 2},
            {"type": "data-mood", "id": "n", "data": 3},
        ]
        assert (last["error"], last["outcome"]) == (True, "error")
        assert last["body"] == "out of moods"


@pytest.mark.rule("W-168")
async def test_a_turn_that_the_agent_asks_for_is_told_to_everybody(
    clock: object,
) -> None:
    path = ("Named", "a")
    async with (
        open_test_kernel(roots=[Named]) as test,
        connected(test.kernel, path) as one,
        connected(test.kernel, path) as two,
    ):
        await (await test.kernel.get_agent(Named, "a")).ask()
        for tab in (one, two):
            await tab.until(lambda c: bool(c.frames[-1].get("done")))
            told = tab.frames[3:]
            assert [texts(f["messages"]) for f in told if "messages" in f] == [
                ["from within"], ["from within", "hi"],
            ]  # fmt: skip
            assert ("messages" in told[0], "messages" in told[-2]) == (True, True)
            assert told[-1]["messageIds"] == ["u1"]
            assert len({f["id"] for f in told if "body" in f}) == 1


@pytest.mark.rule("W-164", "W-116")
async def test_no_transcript_lacks_a_question_that_was_taken(clock: object) -> None:
    async with (
        open_test_kernel(roots=[Talk]) as test,
        connected(test.kernel, ME) as tab,
        connected(test.kernel, ME) as other,
    ):
        ask(tab, "r1", "first wait:x")
        await DOORS.at("wait:x")
        tab.chat("r2", user("u-r1", "first wait:x"), user("u-r2", "second"))
        await other.until(lambda c: "u-r2" in ids(c.of("cf_agent_chat_messages")[-1]))
        DOORS.open("wait:x")
        await other.ended("r2")
        assert [ids(f) for f in other.of("cf_agent_chat_messages")] == [
            [],
            ["u-r1"],
            ["u-r1", "u-r2"],
            ["u-r1", "msg-r1", "u-r2"],
            ["u-r1", "msg-r1", "u-r2", "msg-r2"],
        ]
        told = [f.get("connect") for f in other.of("cf_agent_chat_messages")]
        assert told == [True, None, None, None, None]
        # each before the end of the turn that made it
        places = [f.get("id") if f.get("done") else f["type"] for f in other.frames]
        assert places[places.index("r1") - 1] == "cf_agent_chat_messages"
        assert places[-2:] == ["cf_agent_chat_messages", "r2"]


@pytest.mark.rule("W-166")
async def test_who_leaves_stops_nothing(clock: object) -> None:
    async with open_test_kernel(roots=[Talk]) as test:
        async with connected(test.kernel, ME) as tab:
            ask(tab, "r1", "a wait:x b")
            await DOORS.at("wait:x")
        await trio.sleep(1)
        DOORS.open("wait:x")
        await trio.sleep(1)
        assert texts(await history(test)) == ["a wait:x b", "a wait:x b"]


@pytest.mark.rule("W-160", "W-107")
async def test_a_clear_ends_what_speaks_and_skips_what_has_not_begun(
    clock: object,
) -> None:
    async with (
        open_test_kernel(roots=[Talk]) as test,
        connected(test.kernel, ME) as tab,
        connected(test.kernel, ME) as other,
    ):
        ask(tab, "r1", "a wait:x b")
        await DOORS.at("wait:x")
        ask(tab, "r2", "never")
        other.send("cf_agent_chat_clear")
        await tab.until(lambda c: bool(c.of("cf_agent_chat_clear")))
        ends = [(f["id"], f["outcome"]) for f in tab.frames if f.get("done")]
        assert ends == [("r1", "aborted"), ("r2", "skipped")]
        # the clear is the last word to who did not ask for it, and none to who did
        assert tab.frames[-1] == {"type": "cf_agent_chat_clear"}
        assert other.of("cf_agent_chat_clear") == []
        async with connected(test.kernel, ME) as late:
            late.send("cf_agent_stream_resume_ack", id="r2")
            last = await late.ended("r2")
            assert (last["outcome"], last["replay"]) == ("skipped", True)


@pytest.mark.rule("W-160")
async def test_a_turn_whose_question_was_deleted_is_skipped(clock: object) -> None:
    async with (
        open_test_kernel(roots=[Talk]) as test,
        connected(test.kernel, ME) as tab,
        connected(test.kernel, ME) as other,
    ):
        ask(tab, "r0", "zero")
        await tab.ended("r0")
        ask(tab, "r1", "a wait:x b")
        await DOORS.at("wait:x")
        tab.chat("r2", user("u-r1", "a wait:x b"), user("u-r2", "second"))
        other.chat("r3", user("u-r0", "zero"), trigger="regenerate-message")
        DOORS.open("wait:x")
        assert (await tab.ended("r2"))["outcome"] == "skipped"
        assert tab.chunks("r2") == []
        assert "outcome" not in await other.ended("r3")


@pytest.mark.rule("W-144")
def test_what_culet_never_says_is_no_word_of_its_frames() -> None:
    assert set(get_args(frames.StopReason)) == {"idle"}
    assert set(get_args(frames.Outcome)) == {"aborted", "error", "skipped"}
