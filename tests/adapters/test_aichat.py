"""A chat agent as its clients see it: turns, stop, resume, clear, crash; frame by frame."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from typing import Any, ClassVar

import msgspec
import pytest
import trio

from adapters.peer import Client, connected, fetch, user
from culet.adapters import (
    AIChatAgent,
    ChatRecovery,
    ChatRecoveryOptions,
    Submission,
    TurnResult,
)
from culet.adapters.chat import ChatResponse
from culet.kernel import Agent, AgentToolRun, Chunk, Limits, Turn
from culet.kernel.errors import FacetAborted, StorageError, UsageError
from culet.kernel.ports import TreeKey
from culet.kernel.testing import Harness, open_test_kernel

ME = ("Talker", "a")
RESPONSES: list[ChatResponse] = []
RECOVERIES: list[ChatRecovery] = []


class Doors:
    """What the agents wait for: a test opens a door by its name."""

    def __init__(self) -> None:
        self._events: dict[str, trio.Event] = {}
        self.reached: list[str] = []

    def _event(self, name: str) -> trio.Event:
        return self._events.setdefault(name, trio.Event())

    def open(self, name: str) -> None:
        self._event(name).set()

    async def at(self, name: str) -> None:
        """Wait until somebody stands before the door."""
        with trio.fail_after(30):
            while name not in self.reached:
                await trio.sleep(0.01)

    async def through(self, name: str) -> None:
        self.reached.append(name)
        await self._event(name).wait()


DOORS = Doors()


@pytest.fixture(autouse=True)
def fresh() -> None:
    DOORS.__init__()  # type: ignore[misc]
    RESPONSES.clear()
    RECOVERIES.clear()


def said(message: dict[str, Any]) -> str:
    return "".join(p.get("text", "") for p in message["parts"])


class Talker(AIChatAgent):
    """Says each word of the last user message; `wait:x` waits at the door x."""

    keep: ClassVar[bool] = True
    go_on: ClassVar[bool] = True

    async def on_chat_message(self, turn: Turn) -> AsyncIterator[Chunk]:
        words = said(turn.messages[-1]).split()
        done = sum(c["type"] == "text-delta" for c in turn.chunks())
        if not done:
            yield {"type": "text-start", "id": "t"}
        for word in words[done:]:
            if word.startswith("wait:"):
                await DOORS.through(word)
            if word == "fail":
                raise ValueError("on purpose")
            yield {"type": "text-delta", "id": "t", "delta": f"{word} "}
        yield {"type": "text-end", "id": "t"}

    async def on_chat_response(self, result: ChatResponse) -> None:
        RESPONSES.append(result)

    async def on_chat_recovery(self, ctx: ChatRecovery) -> ChatRecoveryOptions:
        RECOVERIES.append(ctx)
        return ChatRecoveryOptions(go_on=self.go_on, persist=self.keep)

    async def ask(self, text: str) -> TurnResult:
        return await self.save_messages([user(f"u{len(self.messages)}", text)])

    async def submit(self, text: str, key: str) -> Submission:
        message = user(f"u{len(self.messages)}", text)
        return await self.submit_messages([message], idempotency_key=key)

    async def streams(self) -> list[str]:
        return [r[0] for r in self.sql("SELECT DISTINCT stream FROM culet_entry")]

    async def stored(self) -> list[dict[str, Any]]:
        return self.messages


def texts(messages: list[dict[str, Any]]) -> list[str]:
    return [said(m).strip() for m in messages]


async def history(test: Harness, *path: tuple[str, str]) -> list[dict[str, Any]]:
    answer = await fetch(test.kernel, *(path or (ME,)), leaf="/get-messages")
    assert answer.status == 200
    assert isinstance(answer.body, bytes)
    return list(msgspec.json.decode(answer.body))


# ---- a turn


@pytest.mark.rule("W-113", "W-116", "W-122", "W-154", "W-157", "W-167")
async def test_a_turn_streams_its_chunks_and_leaves_a_message(clock: object) -> None:
    async with (
        open_test_kernel(roots=[Talker]) as test,
        connected(test.kernel, ME) as tab,
    ):
        assert [f["type"] for f in tab.frames] == [
            "cf_agent_chat_messages", "cf_agent_identity", "cf_agent_mcp_servers",
        ]  # fmt: skip
        assert tab.frames[0]["connect"] is True
        tab.chat("r1", user("u1", "hello there"))
        last = await tab.ended("r1")
        chunks = tab.chunks("r1")
        assert chunks[0] == {"type": "start", "messageId": "msg-r1"}
        assert [c["type"] for c in chunks[1:]] == [
            "text-start", "text-delta", "text-delta", "text-end",
        ]  # fmt: skip
        assert [f["seq"] for f in tab.responses("r1")[:-1]] == [0, 1, 2, 3, 4]
        assert last == {
            "type": "cf_agent_use_chat_response", "id": "r1", "body": "",
            "done": True, "messageIds": ["u1"],
        }  # fmt: skip
        stored = await history(test)
        assert [m["id"] for m in stored] == ["u1", "msg-r1"]
        assert texts(stored) == ["hello there", "hello there"]
        await trio.sleep(0.1)
        assert [(r.request_id, r.status) for r in RESPONSES] == [("r1", "completed")]


@pytest.mark.rule("W-151", "W-155", "W-156")
async def test_other_tabs_get_the_question_the_chunks_and_the_transcript_in_order(
    clock: object,
) -> None:
    async with (
        open_test_kernel(roots=[Talker]) as test,
        connected(test.kernel, ME) as tab,
        connected(test.kernel, ME) as other,
    ):
        tab.chat("r1", user("u1", "one two"))
        await other.ended("r1")
        seen = other.frames[3:]
        assert seen[0]["type"] == "cf_agent_chat_messages"
        assert texts(seen[0]["messages"]) == ["one two"]
        assert seen[-2]["type"] == "cf_agent_chat_messages"
        assert texts(seen[-2]["messages"]) == ["one two", "one two"]
        assert seen[-1]["done"] is True
        assert all(f["id"] == "r1" for f in seen[1:-2])
        # the one that asked knows its own list
        await tab.ended("r1")
        assert len(tab.of("cf_agent_chat_messages")) == 1


@pytest.mark.rule("W-103")
async def test_a_request_that_comes_twice_is_one_turn(clock: object) -> None:
    async with (
        open_test_kernel(roots=[Talker]) as test,
        connected(test.kernel, ME) as tab,
    ):
        tab.chat("r1", user("u1", "hello wait:x"))
        tab.chat("r1", user("u1", "hello wait:x"))
        await DOORS.at("wait:x")
        tab.chat("r1", user("u1", "hello wait:x"))
        DOORS.open("wait:x")
        await tab.ended("r1")
        assert tab.text("r1") == "hello wait:x "
        assert DOORS.reached == ["wait:x"]
        # from a new socket it is a replay of the one there was
        async with connected(test.kernel, ME) as again:
            again.chat("r1", user("u1", "other words"))
            await again.ended("r1")
            assert again.text("r1") == "hello wait:x "
        assert texts(await history(test)) == ["hello wait:x", "hello wait:x"]


@pytest.mark.rule("W-161")
async def test_two_requests_are_answered_one_after_the_other_each_in_its_place(
    clock: object,
) -> None:
    async with (
        open_test_kernel(roots=[Talker]) as test,
        connected(test.kernel, ME) as tab,
    ):
        tab.chat("r1", user("u1", "first wait:x"))
        await DOORS.at("wait:x")
        tab.chat("r2", user("u1", "first wait:x"), user("u2", "second"))
        await trio.sleep(1)
        assert tab.responses("r2") == []
        DOORS.open("wait:x")
        await tab.ended("r2")
        stored = await history(test)
        assert [m["id"] for m in stored] == ["u1", "msg-r1", "u2", "msg-r2"]


@pytest.mark.rule("W-152")
@pytest.mark.parametrize("known", [["u1"], ["u1", "msg-r1"]])
async def test_a_regenerate_puts_a_new_answer_in_the_place_of_the_old(
    clock: object,
    known: list[str],
) -> None:
    async with (
        open_test_kernel(roots=[Talker]) as test,
        connected(test.kernel, ME) as tab,
    ):
        tab.chat("r1", user("u1", "again"))
        await tab.ended("r1")
        tab.chat("r2", user("u1", "again"), trigger="regenerate-message")
        await tab.ended("r2")
        assert [m["id"] for m in await history(test)] == ["u1", "msg-r2"]


@pytest.mark.rule("C-021", "W-115", "W-159")
async def test_a_failing_turn_tells_the_error_and_keeps_what_was_said(
    clock: object,
) -> None:
    async with (
        open_test_kernel(roots=[Talker]) as test,
        connected(test.kernel, ME) as tab,
    ):
        tab.chat("r1", user("u1", "some words fail"))
        last = await tab.ended("r1")
        assert last["outcome"] == "error"
        assert last["error"] is True
        assert re.fullmatch(r"the run failed \(error \w+\)", last["body"])
        assert sum(f["done"] for f in tab.responses("r1")) == 1
        stored = await history(test)
        assert texts(stored) == ["some words fail", "some words"]
        assert stored[-1]["parts"][0]["state"] == "done"
        tab.chat("r2", user("u2", "go on"))
        assert (await tab.ended("r2")).get("outcome") is None


@pytest.mark.rule("W-108", "W-158")
async def test_stop_ends_the_turn_in_its_middle_and_keeps_the_partial(
    clock: object,
) -> None:
    async with (
        open_test_kernel(roots=[Talker]) as test,
        connected(test.kernel, ME) as tab,
        connected(test.kernel, ME) as other,
    ):
        tab.chat("r1", user("u1", "half of it wait:x rest"))
        await DOORS.at("wait:x")
        tab.send("cf_agent_chat_request_cancel", id="r1")
        assert (await tab.ended("r1"))["outcome"] == "aborted"
        assert texts(await history(test)) == ["half of it wait:x rest", "half of it"]
        await other.ended("r1")
        assert texts(other.frames[-2]["messages"])[-1] == "half of it"
        tab.send("cf_agent_chat_request_cancel", id="r1")  # too late, and unknown
        tab.send("cf_agent_chat_request_cancel", id="nothing")
        tab.chat("r2", user("u2", "next"))
        await tab.ended("r2")


@pytest.mark.rule("W-162")
async def test_a_queued_turn_that_is_stopped_says_nothing(clock: object) -> None:
    async with (
        open_test_kernel(roots=[Talker]) as test,
        connected(test.kernel, ME) as tab,
    ):
        tab.chat("r1", user("u1", "wait:x"))
        await DOORS.at("wait:x")
        tab.chat("r2", user("u2", "never"))
        tab.send("cf_agent_chat_request_cancel", id="r2")
        assert (await tab.ended("r2"))["outcome"] == "aborted"
        assert tab.chunks("r2") == []
        DOORS.open("wait:x")
        await tab.ended("r1")
        assert [m["id"] for m in await history(test)] == ["u1", "msg-r1", "u2"]


@pytest.mark.rule("W-104")
@pytest.mark.limit("messages_per_chat")
async def test_a_chat_that_is_full_refuses_a_request_and_says_so(clock: object) -> None:
    limits = Limits(messages_per_chat=3)
    async with (
        open_test_kernel(roots=[Talker], limits=limits) as test,
        connected(test.kernel, ME) as tab,
    ):
        tab.chat("r1", user("u1", "one"))
        await tab.ended("r1")
        tab.chat("r2", user("u1", "one"), user("u2", "two"))
        refused = await tab.ended("r2")
        assert refused["error"] is True
        assert "limit is 3" in refused["body"]
        assert len(await history(test)) == 2


# ---- resume


def probes(client: Client, probe_id: str) -> list[str]:
    found = (f for f in client.frames if f.get("probeId") == probe_id)
    return [f["type"].removeprefix("cf_agent_stream_") for f in found]


@pytest.mark.rule("W-131")
async def test_every_probe_gets_one_answer(clock: object) -> None:
    async with (
        open_test_kernel(roots=[Talker]) as test,
        connected(test.kernel, ME) as tab,
    ):
        tab.send("cf_agent_stream_resume_request", probeId="p0")
        await tab.until(lambda c: bool(probes(c, "p0")))
        assert tab.frames[-1]["reason"] == "idle"
        tab.chat("r1", user("u1", "a wait:x b"))
        await DOORS.at("wait:x")
        async with connected(test.kernel, ME) as other:
            assert other.frames[0] == {
                "type": "cf_agent_stream_resuming", "id": "r1",
            }  # fmt: skip
            for number in range(3):
                other.send("cf_agent_stream_resume_request", probeId=f"q{number}")
            await other.until(lambda c: bool(probes(c, "q2")))
            assert [probes(other, f"q{i}") for i in range(3)] == [["resuming"]] * 3
            assert probes(tab, "p0") == ["resume_none"]
            DOORS.open("wait:x")
            await tab.ended("r1")


@pytest.mark.rule("W-134", "W-136", "W-139")
async def test_a_client_that_comes_back_gets_all_of_the_turn_once(
    clock: object,
) -> None:
    async with (
        open_test_kernel(roots=[Talker]) as test,
        connected(test.kernel, ME) as tab,
    ):
        tab.chat("r1", user("u1", "a b wait:x c wait:y d"))
        await DOORS.at("wait:x")
        async with connected(test.kernel, ME) as late:
            late.send("cf_agent_stream_resume_request", probeId="p")
            await late.until(lambda c: bool(probes(c, "p")))
            DOORS.open("wait:x")
            await DOORS.at("wait:y")
            await tab.until(lambda c: "c" in c.text("r1"))
            assert late.responses("r1") == []  # nothing live before it acknowledges
            late.send("cf_agent_stream_resume_ack", id="r1")
            late.send("cf_agent_stream_resume_ack", id="r1")
            await late.until(
                lambda c: any(f.get("replayComplete") for f in c.responses("r1"))
            )
            replayed = late.responses("r1")
            assert all(f["replay"] for f in replayed)
            assert msgspec.json.decode(replayed[0]["body"])["messageId"] == "msg-r1"
            DOORS.open("wait:y")
            await late.ended("r1")
            await tab.ended("r1")
            assert late.text("r1") == tab.text("r1") == "a b wait:x c wait:y d "
            live = late.responses("r1")[len(replayed) :]
            assert not any(f.get("replay") for f in live)
            seqs = [f["seq"] for f in late.responses("r1") if "seq" in f]
            assert seqs == list(range(len(seqs)))


@pytest.mark.rule("C-011", "C-013", "W-143")
@pytest.mark.parametrize("after", ["at once", "when it hears the turn live"])
async def test_who_asks_again_hears_nothing_until_it_acknowledges_again(
    after: str, clock: object
) -> None:
    async with (
        open_test_kernel(roots=[Talker]) as test,
        connected(test.kernel, ME) as tab,
    ):
        tab.chat("r1", user("u1", "a b wait:x c wait:y d"))
        await DOORS.at("wait:x")
        async with connected(test.kernel, ME) as late:
            late.send("cf_agent_stream_resume_ack", id="r1")
            if after == "when it hears the turn live":
                await late.until(
                    lambda c: any(f.get("replayComplete") for f in c.responses("r1"))
                )
            late.send("cf_agent_stream_resume_request", probeId="p")
            await late.until(lambda c: bool(probes(c, "p")))
            DOORS.open("wait:x")
            await DOORS.at("wait:y")
            await tab.until(lambda c: "c" in c.text("r1"))
            assert late.frames[-1]["probeId"] == "p"
            heard = len(late.frames)
            late.send("cf_agent_stream_resume_ack", id="r1")
            DOORS.open("wait:y")
            await late.ended("r1")
            anew = [f for f in late.frames[heard:] if f.get("id") == "r1"]
            seqs = [f["seq"] for f in anew if "seq" in f]
            assert seqs == list(range(len(seqs)))
            assert anew[0]["replay"]
            await tab.ended("r1")


@pytest.mark.rule("C-018", "W-124", "W-138")
async def test_a_probe_of_a_queued_turn_is_told_to_wait_then_offered_the_stream(
    clock: object,
) -> None:
    async with (
        open_test_kernel(roots=[Talker, Opener]) as test,
        connected(test.kernel, ("Opener", "a")) as tab,
    ):
        tab.chat("r1", user("u1", "wait:x"))
        await DOORS.at("before")
        async with connected(test.kernel, ("Opener", "a")) as other:
            transcript, pending = other.frames[:2]
            assert [m["id"] for m in transcript["messages"]] == ["u1"]  # in its place
            assert (transcript["connect"], pending["type"]) == (
                True, "cf_agent_stream_pending",
            )  # fmt: skip
            other.send("cf_agent_stream_resume_request", probeId="p")
            await other.until(lambda c: bool(probes(c, "p")))
            assert probes(other, "p") == ["pending"]
            DOORS.open("before")
            await other.until(lambda c: bool(c.of("cf_agent_stream_resuming")))
            assert other.responses("r1") == []
            other.send("cf_agent_stream_resume_ack", id="r1")
            DOORS.open("wait:x")
            await other.ended("r1")
            await tab.ended("r1")
            assert other.text("r1") == tab.text("r1")


class Opener(Talker):
    """Its turns stand before a door before they say anything."""

    async def on_chat_message(self, turn: Turn) -> AsyncIterator[Chunk]:
        await DOORS.through("before")
        async with aclosing(super().on_chat_message(turn)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                yield chunk


@pytest.mark.rule("W-135")
async def test_a_finished_turn_is_replayed_with_its_end(clock: object) -> None:
    async with open_test_kernel(roots=[Talker]) as test:
        async with connected(test.kernel, ME) as tab:
            tab.chat("r1", user("u1", "done"))
            await tab.ended("r1")
        async with connected(test.kernel, ME) as late:
            assert late.frames[0]["type"] == "cf_agent_chat_messages"
            late.send("cf_agent_stream_resume_ack", id="r1")
            last = await late.ended("r1")
            assert (last["replay"], last["messageIds"]) == (True, ["u1"])
            assert late.text("r1") == "done "
            late.send("cf_agent_stream_resume_ack", id="unknown")
            await trio.sleep(1)
            assert late.frames[-1] == last


@pytest.mark.rule("W-125")
async def test_an_error_is_offered_with_the_transcript_to_who_comes(
    clock: object,
) -> None:
    async with open_test_kernel(roots=[Talker]) as test:
        async with connected(test.kernel, ME) as tab:
            tab.chat("r1", user("u1", "wait:x fail"))
            await DOORS.at("wait:x")
        DOORS.open("wait:x")
        await trio.sleep(1)
        for _ in range(2):
            async with connected(test.kernel, ME) as late:
                transcript, offer = late.frames[:2]
                assert texts(transcript["messages"]) == ["wait:x fail", "wait:x"]
                assert offer == {"type": "cf_agent_stream_resuming", "id": "r1"}
                late.send("cf_agent_stream_resume_ack", id="r1")
                assert (await late.ended("r1"))["outcome"] == "error"


# ---- clear and set


@pytest.mark.rule("W-107")
async def test_clear_stops_the_turn_and_forgets_everything(clock: object) -> None:
    async with (
        open_test_kernel(roots=[Talker]) as test,
        connected(test.kernel, ME) as tab,
        connected(test.kernel, ME) as other,
    ):
        tab.chat("r1", user("u1", "some words"))
        await tab.ended("r1")
        tab.chat("r2", user("u2", "more wait:x"))
        await DOORS.at("wait:x")
        tab.send("cf_agent_chat_clear")
        assert (await tab.ended("r2"))["outcome"] == "aborted"
        await other.until(lambda c: bool(c.of("cf_agent_chat_clear")))
        assert tab.of("cf_agent_chat_clear") == []
        assert await history(test) == []
        tab.chat("r3", user("u3", "new"))
        await tab.ended("r3")
        assert texts(await history(test)) == ["new", "new"]


@pytest.mark.rule("W-105")
async def test_set_messages_upserts_and_never_deletes(clock: object) -> None:
    async with (
        open_test_kernel(roots=[Talker]) as test,
        connected(test.kernel, ME) as tab,
        connected(test.kernel, ME) as other,
    ):
        tab.send("cf_agent_chat_messages", messages=[user("u1", "a"), user("u2", "b")])
        tab.send("cf_agent_chat_messages", messages=[user("u2", "B")])
        tab.send("cf_agent_chat_messages", messages=[])
        await other.until(lambda c: len(c.of("cf_agent_chat_messages")) == 4)
        assert texts(await history(test)) == ["a", "B"]
        assert len(tab.of("cf_agent_chat_messages")) == 1


async def test_a_frame_that_is_not_for_the_chat_is_an_ordinary_message(
    clock: object,
) -> None:
    async with (
        open_test_kernel(roots=[Mailbox]) as test,
        connected(test.kernel, ("Mailbox", "a")) as tab,
    ):
        tab.connection.received("plain text")
        tab.send("cf_agent_tool_result", toolCallId="c", toolName="x", output=1)
        tab.send("my_own", x=1)
        await tab.until(lambda c: c.frames[-1] == {"got": 2})


class Mailbox(Talker):
    async def on_message(self, connection: Any, message: str | bytes) -> None:
        RECOVERIES.append(message)  # type: ignore[arg-type]
        connection.send(msgspec.json.encode({"got": len(RECOVERIES)}).decode())


# ---- the agent's own turns


async def test_save_messages_waits_for_the_end_and_says_how_it_was(
    clock: object,
) -> None:
    async with open_test_kernel(roots=[Talker]) as test:
        talker = await test.kernel.get_agent(Talker, "a")
        good = await talker.ask("hello")
        bad = await talker.ask("oh fail")
        assert (good.status, good.error) == ("completed", None)
        assert (bad.status, bad.error) == ("error", "on purpose")
        assert texts(await talker.stored()) == ["hello", "hello", "oh fail", "oh"]


async def test_a_submission_with_a_known_key_is_the_same_turn(clock: object) -> None:
    async with open_test_kernel(roots=[Talker]) as test:
        talker = await test.kernel.get_agent(Talker, "a")
        first = await talker.submit("hello wait:x", "k")
        again = await talker.submit("other", "k")
        assert (first.accepted, again.accepted) == (True, False)
        assert first.request_id == again.request_id
        DOORS.open("wait:x")
        await talker.ask("after")
        assert texts(await talker.stored()) == [
            "hello wait:x", "hello wait:x", "after", "after",
        ]  # fmt: skip


async def test_a_turn_cannot_wait_for_the_next_one(clock: object) -> None:
    class Selfish(AIChatAgent):
        async def on_chat_message(self, turn: Turn) -> AsyncIterator[Chunk]:
            await self.save_messages([user("u2", "again")])
            yield {"type": "text-delta", "id": "t", "delta": "never"}

        async def ask(self) -> TurnResult:
            return await self.save_messages([user("u1", "x")])

    async with open_test_kernel(roots=[Selfish]) as test:
        result = await (await test.kernel.get_agent(Selfish, "a")).ask()
        assert result.status == "error"
        assert "submit_messages" in result.error


class Adds(AIChatAgent):
    """Its answer is one word, a continuation adds two, with a door between."""

    async def on_chat_message(self, turn: Turn) -> AsyncIterator[Chunk]:
        if turn.continuation:
            yield {"type": "text-delta", "id": "t", "delta": "two "}
            await DOORS.through("wait:c")
            yield {"type": "text-delta", "id": "t", "delta": "three"}
        else:
            yield {"type": "text-delta", "id": "t", "delta": "one "}

    async def ask(self) -> TurnResult:
        await self.save_messages([user("u1", "x")])
        return await self.continue_last_turn()


@pytest.mark.rule("W-126", "W-180")
async def test_a_continuation_goes_on_in_the_last_message_and_is_never_offered(
    clock: object,
) -> None:
    path = ("Adds", "a")
    async with (
        open_test_kernel(roots=[Adds]) as test,
        connected(test.kernel, path) as tab,
    ):
        adds = await test.kernel.get_agent(Adds, "a")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(adds.ask)
            await DOORS.at("wait:c")
            await tab.until(lambda c: any(f.get("continuation") for f in c.frames))
            async with connected(test.kernel, path) as late:
                assert late.frames[-1]["type"] == "cf_agent_mcp_servers"
                late.send("cf_agent_stream_resume_request", probeId="p")
                await late.until(lambda c: bool(probes(c, "p")))
                updated, none = late.frames[-2:]
                assert said(updated["message"]) == "one two "
                assert probes(late, "p") == ["resume_none"]
                assert "reason" not in none
                DOORS.open("wait:c")
                await late.until(lambda c: bool(c.frames[-1].get("done")))
                live = [f for f in late.frames if f.get("continuation")]
                words = [msgspec.json.decode(f["body"]) for f in live[:-1]]
                assert [w["delta"] for w in words] == ["three"]
        stored = await history(test, path)
        assert texts(stored) == ["x", "one two three"]
        await tab.until(lambda c: bool(c.frames[-1].get("continuation")))
        frames = [f for f in tab.frames if f.get("continuation")]
        assert "messageId" not in msgspec.json.decode(frames[0]["body"])
        assert frames[-1]["done"]
        assert texts(tab.frames[-2]["messages"])[-1] == "one two three"


@pytest.mark.rule("C-035")
async def test_a_continuation_goes_on_after_a_crash_and_adds_once(
    clock: object,
) -> None:
    path = ("Adds", "a")
    async with open_test_kernel(roots=[Adds]) as test:
        adds = await test.kernel.get_agent(Adds, "a")
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                with suppress(StorageError, FacetAborted):
                    await adds.ask()

            nursery.start_soon(ask)
            await DOORS.at("wait:c")
            await trio.sleep(1)
            await test.crash()
            nursery.cancel_scope.cancel()
        await test.reopen()
        tree = await test.kernel.host.open_root(TreeKey(*path))
        (active,) = [r[0] for r in tree.db.execute("SELECT what FROM job")]
        subject = tree.endings.subject(tree.root_slot, active)
        assert subject is not None
        tree.endings.cancel(subject, "by the test")
        for _ in range(2):
            assert texts(await history(test, path)) == ["x", "one two"]
            await test.crash()
            await test.reopen()


@pytest.mark.limit("retained_turns")
async def test_streams_of_turns_long_past_are_forgotten_their_messages_are_not(
    clock: object,
) -> None:
    limits = Limits(retained_turns=2)
    async with open_test_kernel(roots=[Talker], limits=limits) as test:
        talker = await test.kernel.get_agent(Talker, "a")
        kept = await talker.submit("first", "key")
        for number in range(6):
            await talker.ask(f"n{number}")
        assert (await talker.submit("again", "key")).request_id == kept.request_id
        assert len(await talker.stored()) == 14
        assert len(await talker.streams()) <= 4


def test_a_class_that_hides_a_member_of_the_base_is_refused() -> None:
    with pytest.raises(UsageError, match="hides"):
        type("Bad", (AIChatAgent,), {"messages": []})


# ---- as a tool


class Boss(Agent):
    async def run(self, text: str, run_id: str) -> AgentToolRun:
        return await self.run_agent_tool(Talker, text, run_id=run_id)

    async def stop(self, run_id: str) -> str | None:
        return (await self.runs.cancel(run_id)).status


async def test_a_run_s_input_is_a_message_and_its_answer_the_summary(
    clock: object,
) -> None:
    async with open_test_kernel(roots=[Boss], facets=[Talker]) as test:
        boss = await test.kernel.get_agent(Boss, "b")
        run = await boss.run("two words", "r1")
        assert (run.status, run.summary, run.output) == (
            "completed",
            "two words ",
            None,
        )
        stored = await history(test, ("Boss", "b"), ("Talker", "r1"))
        assert [m["id"] for m in stored] == ["agent-tool-r1-input", "msg-r1"]


@pytest.mark.rule("T-244")
async def test_a_chat_with_a_running_child_is_queued_and_leaves_the_run_alone(
    clock: object,
) -> None:
    child = (("Boss", "b"), ("Talker", "r1"))
    async with open_test_kernel(roots=[Boss], facets=[Talker]) as test:
        boss = await test.kernel.get_agent(Boss, "b")
        runs: list[AgentToolRun] = []
        async with trio.open_nursery() as nursery:

            async def run() -> None:
                runs.append(await boss.run("in work wait:x", "r1"))

            nursery.start_soon(run)
            await DOORS.at("wait:x")
            async with connected(test.kernel, *child) as drilled:
                assert drilled.frames[0] == {
                    "type": "cf_agent_stream_resuming", "id": "r1",
                }  # fmt: skip
                drilled.send("cf_agent_stream_resume_ack", id="r1")
                drilled.chat("r1", user("u9", "the id of the run is no request"))
                drilled.chat("r2", user("u1", "and you?"))
                await drilled.until(lambda c: "work" in c.text("r1"))
                assert drilled.responses("r2") == []
                DOORS.open("wait:x")
                await drilled.ended("r2")
                assert drilled.text("r1") == "in work wait:x "
        assert runs[0].summary == "in work wait:x "
        stored = await history(test, *child)
        assert [m["id"] for m in stored] == [
            "agent-tool-r1-input", "msg-r1", "u1", "msg-r2",
        ]  # fmt: skip


async def test_a_cancelled_run_keeps_its_partial_message(clock: object) -> None:
    child = (("Boss", "b"), ("Talker", "r1"))
    async with open_test_kernel(roots=[Boss], facets=[Talker]) as test:
        boss = await test.kernel.get_agent(Boss, "b")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(boss.run, "half wait:x", "r1")
            await DOORS.at("wait:x")
            assert await boss.stop("r1") == "aborted"
        assert texts(await history(test, *child)) == ["half wait:x", "half"]


@pytest.mark.rule("T-019")
async def test_clearing_the_chat_of_a_running_child_ends_the_run_with_an_error(
    clock: object,
) -> None:
    child = (("Boss", "b"), ("Talker", "r1"))
    async with open_test_kernel(roots=[Boss], facets=[Talker]) as test:
        boss = await test.kernel.get_agent(Boss, "b")
        runs: list[AgentToolRun] = []
        async with trio.open_nursery() as nursery:

            async def run() -> None:
                runs.append(await boss.run("wait:x", "r1"))

            nursery.start_soon(run)
            await DOORS.at("wait:x")
            async with connected(test.kernel, *child) as drilled:
                drilled.send("cf_agent_chat_clear")
        assert runs[0].status == "error"
        assert "skipped" in runs[0].error
        assert await history(test, *child) == []


# ---- crash


@pytest.mark.rule("C-032", "C-035", "W-139", "W-140")
async def test_a_turn_goes_on_after_a_crash_as_the_same_turn(clock: object) -> None:
    async with open_test_kernel(roots=[Talker]) as test:
        async with connected(test.kernel, ME) as tab:
            tab.chat("r1", user("u1", "a b wait:x c d"))
            await DOORS.at("wait:x")
            await tab.until(lambda c: c.text("r1") == "a b ")
            await test.crash()
        DOORS.open("wait:x")
        await test.reopen()
        async with connected(test.kernel, ME) as late:
            await late.until(lambda c: bool(c.frames))
            assert late.frames[0] == {"type": "cf_agent_stream_resuming", "id": "r1"}
            late.send("cf_agent_stream_resume_ack", id="r1")
            last = await late.ended("r1")
            assert last["messageIds"] == ["u1"]
            assert late.text("r1") == "a b wait:x c d "
            starts = [c for c in late.chunks("r1") if c["type"] == "start"]
            assert starts == [{"type": "start", "messageId": "msg-r1"}]
        assert texts(await history(test)) == ["a b wait:x c d"] * 2
        told = RECOVERIES[0]
        assert (told.kind, told.attempt, told.partial_text) == ("continue", 2, "a b ")


@pytest.mark.rule("C-036")
async def test_a_hook_may_decline_that_a_turn_goes_on(
    clock: object,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Talker, "go_on", False)
    async with open_test_kernel(roots=[Talker]) as test:
        async with connected(test.kernel, ME) as tab:
            tab.chat("r1", user("u1", "a wait:x b"))
            await tab.until(lambda c: c.text("r1") == "a ")
            await test.crash()
        await test.reopen()
        async with connected(test.kernel, ME) as late:
            late.send("cf_agent_stream_resume_ack", id="r1")
            assert (await late.ended("r1"))["outcome"] == "error"
        assert texts(await history(test)) == ["a wait:x b", "a"]


async def test_what_is_told_as_ended_is_in_the_history_after_a_crash(
    clock: object,
) -> None:
    async with open_test_kernel(roots=[Talker]) as test:
        for number in range(5):
            async with connected(test.kernel, ME) as tab:
                tab.chat(f"r{number}", user(f"u{number}", f"word {number}"))
                await tab.ended(f"r{number}")
                await test.crash()
            await test.reopen()
            assert len(await history(test)) == 2 * (number + 1)


@pytest.mark.rule("C-015", "C-052")
async def test_a_turn_that_ends_while_its_agent_sleeps_leaves_its_message(
    clock: object,
) -> None:
    async with open_test_kernel(roots=[Talker]) as test:
        async with connected(test.kernel, ME) as tab:
            tab.chat("r1", user("u1", "a wait:x b"))
            await tab.until(lambda c: c.text("r1") == "a ")
            await test.crash()
        await test.reopen()
        tree = await test.kernel.host.open_root(TreeKey(*ME))
        subject = tree.endings.subject(tree.root_slot, "r1")
        assert subject is not None
        assert not tree.nodes
        tree.endings.cancel(subject, "by the test")
        assert texts(await history(test)) == ["a wait:x b", "a"]


# ---- what an author or a disk gets wrong


class Clumsy(Talker):
    """Hangs something on its token that fails."""

    async def on_chat_message(self, turn: Turn) -> AsyncIterator[Chunk]:
        def fail(reason: str | None) -> None:
            raise ValueError("in a callback")

        turn.cancel.on_cancel(fail)
        turn.cancel.on_cancel(lambda _reason: DOORS.open("told"))
        async with aclosing(super().on_chat_message(turn)) as chunks:
            async for chunk in chunks:
                yield chunk


async def test_a_callback_that_fails_does_not_spoil_a_stop(clock: object) -> None:
    me = ("Clumsy", "a")
    async with (
        open_test_kernel(roots=[Clumsy]) as test,
        connected(test.kernel, me) as tab,
    ):
        tab.chat("r1", user("u1", "one wait:x"))
        await DOORS.at("wait:x")
        tab.send("cf_agent_chat_request_cancel", id="r1")
        assert (await tab.ended("r1"))["outcome"] == "aborted"
        await DOORS.through("told")
        tab.chat("r2", user("u2", "two"))
        await tab.ended("r2")
        assert tab.text("r2") == "two "


@pytest.mark.rule("W-151")
async def test_a_request_that_is_half_stored_restarts_the_tree(clock: object) -> None:
    async with open_test_kernel(roots=[Talker]) as test:
        async with connected(test.kernel, ME) as tab:
            tab.chat("r1", user("u1", "one"))
            await tab.ended("r1")
            await test.advance(1)
            before = test.tree("Talker", "a")
            test.faults.fail_commit(2)  # the first one stores the message
            tab.chat("r2", user("u2", "lost"))
            await test.advance(10)
        assert test.tree("Talker", "a") is not before
        assert texts(await history(test)) == ["one", "one"]


async def test_what_a_turn_cannot_carry_is_refused_before_anything_is_stored(
    clock: object,
) -> None:
    async with open_test_kernel(roots=[Talker]) as test:
        root = await test.kernel.get_agent(Talker, "a")
        node = test.find([ME])
        assert node is not None
        agent: Any = node.agent
        with pytest.raises(UsageError, match="JSON"):
            await agent.submit_messages([user("u1", "x")], body={"odd": object()})
        assert await root.stored() == []


async def test_clients_that_come_and_go_during_a_turn_are_forgotten(
    clock: object,
) -> None:
    async with (
        open_test_kernel(roots=[Talker]) as test,
        connected(test.kernel, ME) as tab,
    ):
        tab.chat("r1", user("u1", "wait:x"))
        await DOORS.at("wait:x")
        for _ in range(3):
            async with connected(test.kernel, ME) as other:
                other.send("cf_agent_stream_resume_ack", id="r1")
                other.send("cf_agent_stream_resume_request")
                await test.advance(1)
        node = test.find([ME])
        assert node is not None
        offers = node.agent._chat.offers  # type: ignore[attr-defined]
        assert not any(c.gone for p in offers._waiting.values() for c in p)
        DOORS.open("wait:x")
        await tab.ended("r1")
