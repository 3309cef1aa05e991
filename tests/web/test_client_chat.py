"""The Python client and a chat: answers that stream, stop, and outlive sockets."""

from __future__ import annotations

import pytest
import trio

from culet.kernel import Limits
from culet.kernel.errors import CallFailed, UsageError
from culet.web import RemoteAgent, connect
from culet.web.client_events import (
    ChatChunk,
    ChatEnded,
    Connected,
    Disconnected,
    MessagesChanged,
)
from web.remote import GATES, QUICK, fresh_messages, gate, host, running, wire, words

BOT = "chat-bot/b"


@pytest.fixture(autouse=True)
def fresh_gates():
    GATES.clear()


def texts(agent: RemoteAgent) -> list[str]:
    return ["".join(p.get("text", "") for p in m["parts"]) for m in agent.messages]


async def test_an_answer_streams_and_is_then_a_message():
    async with running() as server, connect(server.url(BOT)) as agent:
        answer = await agent.ask("say 5")
        with trio.fail_after(5):
            said = [c["delta"] async for c in answer if c["type"] == "text-delta"]
        assert "".join(said) == words(5) == answer.text
        assert answer.outcome == "completed"
        assert texts(agent) == ["say 5", words(5)]
        assert await answer.done() == agent.messages[-1]
        assert await fresh_messages(server.url(BOT)) == agent.messages


async def test_two_questions_keep_the_places_of_their_answers():
    async with running() as server, connect(server.url(BOT)) as agent:
        first = await agent.ask("say 3 1")
        second = await agent.ask("say 2")
        await gate("chat").reached.wait()
        assert texts(agent)[0] == "say 3 1"
        gate("chat").open.set()
        with trio.fail_after(5):
            await second.done()
        assert first.outcome == "completed"
        assert texts(agent) == ["say 3 1", words(3), "say 2", words(2)]
        assert await fresh_messages(server.url(BOT)) == agent.messages


async def test_a_question_that_is_too_large_fails_and_the_others_are_answered():
    async with running() as server, connect(server.url(BOT), limits=QUICK) as agent:
        large = await agent.ask("\u20ac" * 400_000)
        small = await agent.ask("say 2")
        with trio.fail_after(10):
            with pytest.raises(CallFailed, match="larger"):
                await large.done()
            await small.done()
        assert agent.connections == 2
        assert texts(agent) == ["say 2", words(2)]
        assert await fresh_messages(server.url(BOT)) == agent.messages


async def test_a_turn_that_fails_raises_and_the_next_one_does_not():
    async with running() as server, connect(server.url(BOT)) as agent:
        answer = await agent.ask("fail 2")
        with trio.fail_after(5), pytest.raises(CallFailed):
            async for _ in answer:
                pass
        assert answer.outcome == "error"
        with pytest.raises(CallFailed):
            await answer.done()
        assert (await (await agent.ask("say 1")).done()) is not None


async def test_stop_ends_the_answer_and_keeps_what_was_said():
    async with running() as server, connect(server.url(BOT)) as agent:
        answer = await agent.ask("say 9 3")
        await gate("chat").reached.wait()
        await agent.until(lambda _a: answer.text == words(3))
        await answer.stop()
        with trio.fail_after(5):
            message = await answer.done()
        assert answer.outcome == "aborted"
        assert message is not None
        assert texts(agent) == ["say 9 3", words(3)]
        assert await fresh_messages(server.url(BOT)) == agent.messages


async def test_another_client_sees_question_answer_and_clear():
    async with (
        running() as server,
        connect(server.url(BOT)) as one,
        connect(server.url(BOT)) as two,
    ):
        events = two.events()
        answer = await one.ask("say 2")
        with trio.fail_after(5):
            await answer.done()
            await two.until(lambda a: texts(a) == ["say 2", words(2)])
            seen = [await anext(events)]
            while not isinstance(seen[-1], ChatEnded):
                seen.append(await anext(events))
        assert isinstance(seen[0], MessagesChanged)
        assert [e.seq for e in seen if isinstance(e, ChatChunk)] == list(range(6))
        assert seen[-1].outcome == "completed"
        assert two.messages == one.messages
        await one.clear()
        with trio.fail_after(5):
            await two.until(lambda a: not a.messages)
        assert one.messages == []


async def test_an_answer_goes_on_over_a_socket_that_is_cut():
    async with (
        running() as server,
        wire(server.port) as proxy,
        connect(proxy.url(BOT), limits=QUICK) as agent,
    ):
        events = agent.events()
        answer = await agent.ask("say 8 4")
        said = []
        with trio.fail_after(5):
            await gate("chat").reached.wait()
            while len(said) < 3:
                chunk = await anext(answer)
                said += [chunk["delta"]] if chunk["type"] == "text-delta" else []
            proxy.cut()
            await agent.until(lambda a: a.connections == 2)
            gate("chat").open.set()
            said += [c["delta"] async for c in answer if c["type"] == "text-delta"]
        assert "".join(said) == words(8)
        assert gate("chat").passed == 1
        assert await fresh_messages(server.url(BOT)) == agent.messages
        numbers, lost = [], 0
        while True:
            event = await anext(events)
            lost += isinstance(event, Disconnected)
            numbers += [event.seq] if isinstance(event, ChatChunk) else []
            if isinstance(event, ChatEnded):
                break
        assert lost == 1
        assert numbers == list(range(12))  # each chunk is told once


@pytest.mark.rule("C-020a")
async def test_an_answer_that_ended_while_the_socket_was_away_is_replayed():
    async with (
        running() as server,
        wire(server.port) as proxy,
        connect(proxy.url(BOT), limits=QUICK) as agent,
        connect(server.url(BOT)) as witness,
    ):
        answer = await agent.ask("say 6 2")
        with trio.fail_after(5):
            await gate("chat").reached.wait()
            proxy.accepts = False
            proxy.cut()
            gate("chat").open.set()
            await witness.until(lambda a: texts(a) == ["say 6 2", words(6)])
            proxy.accepts = True
            said = [c["delta"] async for c in answer if c["type"] == "text-delta"]
        assert "".join(said) == words(6)
        assert agent.messages == witness.messages


async def test_a_question_that_the_server_never_got_is_asked_once():
    async with (
        running() as server,
        wire(server.port) as proxy,
        connect(proxy.url(BOT), limits=QUICK) as agent,
    ):
        proxy.swallows = True
        answer = await agent.ask("say 3")
        assert answer.item is not None
        assert answer.item.sent
        proxy.swallows = False
        proxy.cut()
        with trio.fail_after(5):
            assert await answer.done() is not None
        assert texts(agent) == ["say 3", words(3)]
        assert await fresh_messages(server.url(BOT)) == agent.messages


async def test_a_queued_question_outlives_its_socket_as_well():
    async with (
        running() as server,
        wire(server.port) as proxy,
        connect(proxy.url(BOT), limits=QUICK) as agent,
    ):
        first = await agent.ask("say 4 2")
        second = await agent.ask("say 3")
        with trio.fail_after(5):
            await gate("chat").reached.wait()
            proxy.cut()
            await agent.until(lambda a: a.connections == 2)
            gate("chat").open.set()
            await first.done()
            await second.done()
        assert texts(agent) == ["say 4 2", words(4), "say 3", words(3)]
        assert await fresh_messages(server.url(BOT)) == agent.messages


async def test_a_question_is_taken_back_while_there_is_no_socket():
    async with (
        running() as server,
        wire(server.port) as proxy,
        connect(proxy.url(BOT), limits=QUICK) as agent,
    ):
        events = agent.events()
        proxy.accepts = False
        proxy.cut()
        with trio.fail_after(5):
            while not isinstance(await anext(events), Disconnected):
                pass
        with trio.move_on_after(0.01):
            await agent.ask("never")
        assert agent.messages == []
        proxy.accepts = True
        with trio.fail_after(5):
            assert (await (await agent.ask("say 1")).done()) is not None
        assert texts(agent) == ["say 1", words(1)]


async def test_an_answer_goes_on_when_the_whole_kernel_is_started_anew(tmp_path):
    async with (
        host(tmp_path) as server,
        connect(server.url(BOT), limits=QUICK) as agent,
    ):
        answer = await agent.ask("say 30 10")
        with trio.fail_after(10):
            await gate("chat").reached.wait()
            await agent.until(lambda _a: answer.text == words(10))
            await server.stop()
            GATES.clear()
            await server.start()
            await gate("chat").reached.wait()
            gate("chat").open.set()
            said = [c["delta"] async for c in answer if c["type"] == "text-delta"]
        assert "".join(said) == words(30)
        assert texts(agent) == ["say 30 10", words(30)]
        assert await fresh_messages(server.url(BOT)) == agent.messages
        assert agent.connections == 2


async def test_a_slow_reader_of_an_answer_is_dropped_to_replay_and_loses_nothing():
    limits = Limits(client_values=16)
    async with running() as server, connect(server.url(BOT), limits=limits) as agent:
        answer = await agent.ask("say 100")
        with trio.fail_after(10):
            await answer.done()  # all has come, 16 chunks are kept for the reader
            assert answer.text == words(100)
            said = [c["delta"] async for c in answer if c["type"] == "text-delta"]
        assert "".join(said) == words(100)
        assert texts(agent) == ["say 100", words(100)]


async def test_a_reader_that_is_slow_in_mid_turn_catches_up_and_goes_on_live():
    limits = Limits(client_values=8)
    async with running() as server, connect(server.url(BOT), limits=limits) as agent:
        answer = await agent.ask("say 60 50")
        said = []
        with trio.fail_after(10):
            await gate("chat").reached.wait()
            await agent.until(lambda _a: answer.text == words(50))
            async for chunk in answer:
                if chunk["type"] == "text-delta":
                    said.append(chunk["delta"])
                if len(said) == 50:
                    gate("chat").open.set()
        assert "".join(said) == words(60)
        assert answer.outcome == "completed"


async def test_leaving_ends_what_waits_for_an_answer():
    async with running() as server:
        async with connect(server.url(BOT)) as agent:
            answer = await agent.ask("say 4 2")
        with pytest.raises(UsageError, match="left"):
            await answer.done()


async def test_what_is_no_message_cannot_be_asked():
    async with running() as server, connect(server.url(BOT)) as agent:
        with pytest.raises(UsageError, match="UI message"):
            await agent.ask({"text": "hi"})
        with pytest.raises(UsageError, match="JSON"):
            await agent.ask({"id": "1", "role": "user", "parts": [object()]})
        assert agent.messages == []


async def test_a_turn_that_streams_is_followed_by_whoever_connects():
    async with running() as server, connect(server.url(BOT)) as one:
        answer = await one.ask("say 6 3")
        with trio.fail_after(5):
            await gate("chat").reached.wait()
            async with (
                wire(server.port) as proxy,
                connect(proxy.url(BOT), limits=QUICK) as two,
            ):
                await two.until(lambda a: a.turns)
                followed = two.follow(two.turns[0])
                assert followed is not None
                assert two.follow(two.turns[0]) is followed
                first = await anext(followed)
                assert first["type"] == "start"
                proxy.accepts = False
                proxy.cut()
                gate("chat").open.set()
                await answer.done()
                proxy.accepts = True
                said = [c["delta"] async for c in followed if c["type"] == "text-delta"]
                assert "".join(said) == words(6)
                await two.until(lambda a: a.messages == one.messages)
        assert two.follow("nobody") is None


async def test_others_turns_that_ended_meanwhile_do_not_stream_for_ever():
    async with (
        running() as server,
        wire(server.port) as proxy,
        connect(server.url(BOT)) as one,
        connect(proxy.url(BOT), limits=QUICK) as two,
    ):
        answer = await one.ask("say 6 3")
        with trio.fail_after(5):
            await gate("chat").reached.wait()
            await two.until(lambda a: a.turns)
            proxy.accepts = False
            proxy.cut()
            gate("chat").open.set()
            await answer.done()
            proxy.accepts = True
            await two.until(lambda a: not a.turns and a.messages == one.messages)


async def test_a_reader_may_begin_with_what_is_known():
    async with running() as server, connect(server.url(BOT)) as agent:
        await (await agent.ask("say 1")).done()
        events = agent.events(known=True)
        assert await anext(events) == Connected(
            name="b", agent="chat-bot", connections=1
        )
        assert await anext(events) == MessagesChanged(messages=agent.messages)
