"""What a client that comes, or comes back, is offered, and what it gets when it takes it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing

import pytest
import trio

from adapters.peer import Client, connected
from adapters.talk import (
    DOORS,
    ME,
    Talk,
    answers,
    ask,
    history,
    probe,
    said,
    seqs,
    texts,
)
from culet.kernel import Agent, Chunk, Limits, Turn
from culet.kernel.errors import FacetAborted, StorageError
from culet.kernel.testing import Harness, open_test_kernel


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    DOORS.__init__()  # type: ignore[misc]
    monkeypatch.setattr(Talk, "staged", [])
    yield


def take(client: Client, request_id: str) -> None:
    client.send("cf_agent_stream_resume_ack", id=request_id)


async def caught_up(client: Client, request_id: str, times: int = 1) -> None:
    """Wait for the mark that a replay is complete (for the n-th time)."""
    await client.until(
        lambda c: (
            sum(bool(f.get("replayComplete")) for f in c.responses(request_id)) >= times
        )
    )


async def more(test: Harness) -> None:
    """Ask for a continuation of the last answer, and let it be cut."""
    try:
        await (await test.kernel.get_agent(Talk, "a")).more()
    except (StorageError, FacetAborted):
        return


# ---- who comes while a turn streams


@pytest.mark.rule("C-010", "W-123")
async def test_who_comes_in_mid_turn_gets_the_offer_and_no_transcript(
    clock: object,
) -> None:
    async with (
        open_test_kernel(roots=[Talk]) as test,
        connected(test.kernel, ME) as tab,
    ):
        ask(tab, "r1", "a wait:x b")
        await DOORS.at("wait:x")
        async with connected(test.kernel, ME) as late:
            take(late, "r1")
            await caught_up(late, "r1")
            assert late.frames[0] == {"type": "cf_agent_stream_resuming", "id": "r1"}
            assert late.of("cf_agent_chat_messages") == []
            DOORS.open("wait:x")
            await late.ended("r1")
        async with connected(test.kernel, ME) as later:  # it is over: now there is one
            assert texts(later.frames[0]["messages"]) == ["a wait:x b", "a wait:x b"]
            assert later.of("cf_agent_stream_resuming") == []


@pytest.mark.rule("C-011", "W-133", "W-134")
@pytest.mark.parametrize("how", ["on connect", "on request", "told to wait first"])
async def test_who_was_offered_a_turn_hears_nothing_of_it_before_it_acknowledges(
    how: str, clock: object
) -> None:
    async with (
        open_test_kernel(roots=[Talk]) as test,
        connected(test.kernel, ME) as tab,
    ):
        waits = how == "told to wait first"
        ask(tab, "r1", "wait:0 a wait:x b wait:y c")
        await DOORS.at("wait:0")
        if not waits:
            DOORS.open("wait:0")
            await DOORS.at("wait:x")
        async with connected(test.kernel, ME) as late:
            if waits:
                assert late.frames[1]["type"] == "cf_agent_stream_pending"
                DOORS.open("wait:0")
                await late.until(lambda c: bool(c.of("cf_agent_stream_resuming")))
            if how == "on request":
                await probe(late, "p")
            DOORS.open("wait:x")
            await DOORS.at("wait:y")
            await tab.until(lambda c: "b" in c.text("r1"))
            assert late.responses("r1") == []
            take(late, "r1")
            await caught_up(late, "r1")
            replayed = late.responses("r1")
            assert all(f["replay"] for f in replayed)
            assert seqs(late, "r1") == list(range(len(replayed) - 1))
            assert late.text("r1") == tab.text("r1")
            DOORS.open("wait:y")
            await late.ended("r1")
            live = late.responses("r1")[len(replayed) :]
            assert not any(f.get("replay") for f in live)
            assert seqs(late, "r1") == seqs(tab, "r1")


@pytest.mark.rule("C-013", "W-136")
async def test_a_turn_may_be_offered_twice_and_each_acknowledgement_replays_all_of_it(
    clock: object,
) -> None:
    async with (
        open_test_kernel(roots=[Talk]) as test,
        connected(test.kernel, ME) as tab,
    ):
        ask(tab, "r1", "a b wait:x c")
        await DOORS.at("wait:x")
        await tab.until(lambda c: c.text("r1") == "a b ")
        async with connected(test.kernel, ME) as late:
            assert (await probe(late, "p"))["type"] == "cf_agent_stream_resuming"
            assert len(late.of("cf_agent_stream_resuming")) == 2
            for number in range(1, 4):
                take(late, "r1")
                await caught_up(late, "r1", number)
                assert seqs(late, "r1") == [0, 1, 2] * number
            DOORS.open("wait:x")
            await late.ended("r1")
            assert seqs(late, "r1") == [*[0, 1, 2] * 3, 3, 4]


@pytest.mark.rule("C-016", "W-142")
async def test_a_client_that_leaves_in_mid_replay_changes_nothing(
    clock: object,
) -> None:
    limits = Limits(replay_page_bytes=300)
    async with (
        open_test_kernel(roots=[Talk], limits=limits) as test,
        connected(test.kernel, ME) as tab,
    ):
        ask(tab, "r1", "many:40 wait:x b")
        await DOORS.at("wait:x")
        await tab.until(lambda c: len(c.chunks("r1")) == 41)
        async with connected(test.kernel, ME) as late:
            take(late, "r1")
            await late.until(lambda c: bool(c.responses("r1")))
            late.leave()
            assert 0 < len(late.responses("r1")) < 41, "it left in the middle"
        async with connected(test.kernel, ME) as later:
            assert (await probe(later, "p"))["id"] == "r1"
            take(later, "r1")
            await caught_up(later, "r1")
            DOORS.open("wait:x")
            await later.ended("r1")
            assert seqs(later, "r1") == seqs(tab, "r1") == list(range(43))


# ---- the order of answers


class Slow(Talk):
    """Its turns stand before a door before they say anything, as a model may."""

    async def on_chat_message(self, turn: Turn) -> AsyncIterator[Chunk]:
        await DOORS.through(f"setup:{turn.request_id}")
        async with aclosing(super().on_chat_message(turn)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                yield chunk


@pytest.mark.rule("C-012", "C-018", "W-132")
async def test_a_probe_is_answered_by_what_there_is_first_streaming_then_owed_then_failed(
    clock: object,
) -> None:
    path = ("Slow", "a")
    async with (
        open_test_kernel(roots=[Slow]) as test,
        connected(test.kernel, path) as tab,
        connected(test.kernel, path) as other,
    ):
        assert (await probe(other, "idle"))["reason"] == "idle"
        ask(tab, "r1", "a wait:x fail")
        ask(tab, "r2", "c")
        await DOORS.at("setup:r1")
        answer = await probe(other, "setup")  # accepted, and nothing said yet
        assert (answer["type"], answer["id"]) == ("cf_agent_stream_pending", "r1")
        DOORS.open("setup:r1")
        await DOORS.at("wait:x")
        offer = {"type": "cf_agent_stream_resuming", "id": "r1"}
        await other.until(lambda c: offer in c.frames)  # as it was told to wait for it
        answer = await probe(other, "streams")
        assert (answer["type"], answer["id"]) == ("cf_agent_stream_resuming", "r1")
        DOORS.open("wait:x")
        await DOORS.at("setup:r2")
        answer = await probe(other, "queued")  # the newer one counts, not that failure
        assert (answer["type"], answer["id"]) == ("cf_agent_stream_pending", "r2")
        DOORS.open("setup:r2")
        await tab.ended("r2")
        assert (await probe(other, "over"))["reason"] == "idle"
        ask(tab, "r3", "fail")
        DOORS.open("setup:r3")
        await tab.ended("r3")
        answer = await probe(other, "failed")
        assert (answer["type"], answer["id"]) == ("cf_agent_stream_resuming", "r3")


@pytest.mark.rule("C-012", "C-017", "W-132", "W-180")
async def test_a_continuation_is_shown_to_who_asks_and_never_offered_not_even_pending(
    clock: object,
) -> None:
    async with (
        open_test_kernel(roots=[Talk]) as test,
        connected(test.kernel, ME) as tab,
    ):
        ask(tab, "r0", "first")
        await tab.ended("r0")
        async with trio.open_nursery() as nursery:
            ask(tab, "r1", "wait:x one")
            await DOORS.at("wait:x")
            nursery.start_soon(more, test)  # of r0
            await test.advance(1)
            DOORS.open("wait:x")
            await DOORS.at("wait:more")
            await tab.until(lambda c: any(f.get("continuation") for f in c.frames))
            async with connected(test.kernel, ME) as late:
                answer = await probe(late, "p")
                assert answer["type"] == "cf_agent_stream_resume_none"
                assert "reason" not in answer
                [shown] = late.of("cf_agent_message_updated")
                assert said(shown["message"]) == "first more "
                assert late.of("cf_agent_stream_pending") == []
                assert late.of("cf_agent_stream_resuming") == []
                DOORS.open("wait:more")
                await late.until(lambda c: any(f.get("done") for f in c.frames))
                live = [f for f in late.frames if f.get("continuation")]
                assert [f["done"] for f in live] == [False, True]


@pytest.mark.rule("C-017", "W-192")
async def test_a_replayed_continuation_says_that_it_is_one_also_after_a_restart(
    clock: object,
) -> None:
    async with open_test_kernel(roots=[Talk]) as test:
        async with connected(test.kernel, ME) as tab:
            ask(tab, "r0", "first")
            await tab.ended("r0")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(more, test)
                await DOORS.at("wait:more")
                await tab.until(lambda c: any(f.get("continuation") for f in c.frames))
                await test.advance(1)
                [going] = {f["id"] for f in tab.frames if f.get("continuation")}
                await test.crash()
                nursery.cancel_scope.cancel()
        await test.reopen()
        for life in range(2):
            async with connected(test.kernel, ME) as late:
                take(late, going)
                if life == 0:
                    await caught_up(late, going)
                    DOORS.open("wait:more")
                await late.ended(going)
                told = late.responses(going)
                assert all(f.get("continuation") for f in told)
                assert len(told) >= 4
            await test.crash()
            await test.reopen()


@pytest.mark.rule("C-018", "W-138")
async def test_a_turn_that_ends_without_a_word_frees_who_was_told_to_wait(
    clock: object,
) -> None:
    path = ("Slow", "a")
    async with (
        open_test_kernel(roots=[Slow]) as test,
        connected(test.kernel, path) as tab,
    ):
        ask(tab, "r1", "never")
        await DOORS.at("setup:r1")
        async with connected(test.kernel, path) as late:
            assert (await probe(late, "p"))["type"] == "cf_agent_stream_pending"
            tab.send("cf_agent_chat_request_cancel", id="r1")
            await late.until(lambda c: bool(c.of("cf_agent_stream_resume_none")))
            [none] = late.of("cf_agent_stream_resume_none")
            assert set(none) == {"type"}  # no answer to a probe, and no word of idle


@pytest.mark.rule("C-020a", "W-131")
async def test_the_id_of_a_probe_is_in_its_answer_and_in_nothing_else(
    clock: object,
) -> None:
    path = ("Slow", "a")
    async with (
        open_test_kernel(roots=[Slow]) as test,
        connected(test.kernel, path) as tab,
    ):
        await probe(tab, "p0")
        ask(tab, "r1", "a wait:x")
        await DOORS.at("setup:r1")
        async with connected(test.kernel, path) as late:
            await probe(late, "p1")
            await probe(late, "p2")
            DOORS.open("setup:r1")
            await late.until(lambda c: bool(c.of("cf_agent_stream_resuming")))
            await DOORS.at("wait:x")
            await probe(late, "p3")
            assert [answers(late, f"p{i}") for i in (1, 2, 3)] == [
                ["pending"], ["pending"], ["resuming"],
            ]  # fmt: skip
            first, asked = late.of("cf_agent_stream_resuming")
            assert "probeId" not in first  # nobody had asked at that moment
            assert asked["probeId"] == "p3"
            late.send("cf_agent_stream_resume_request")  # and one without an id
            await late.until(lambda c: len(c.of("cf_agent_stream_resuming")) == 3)
            assert "probeId" not in late.of("cf_agent_stream_resuming")[2]
            DOORS.open("wait:x")
            await tab.ended("r1")
        assert answers(tab, "p0") == ["resume_none"]


# ---- what an acknowledgement gets


@pytest.mark.rule("C-014", "W-135", "W-137")
async def test_an_acknowledgement_is_for_its_turn_whichever_streams_now(
    clock: object,
) -> None:
    async with (
        open_test_kernel(roots=[Talk]) as test,
        connected(test.kernel, ME) as tab,
    ):
        ask(tab, "r1", "old wait:x")
        await DOORS.at("wait:x")
        async with connected(test.kernel, ME) as late:
            assert late.frames[0]["id"] == "r1"
            DOORS.open("wait:x")
            await tab.ended("r1")
            ask(tab, "r2", "new wait:y end")
            await DOORS.at("wait:y")
            await late.until(lambda c: c.text("r2") == "new ")
            take(late, "r1")  # the offer was of this one: it gets it, with its end
            last = await late.ended("r1")
            assert (last["replay"], late.text("r1")) == (True, "old wait:x ")
            take(late, "unknown")
            take(late, "")
            DOORS.open("wait:y")
            await late.ended("r2")
            assert seqs(late, "r2") == seqs(tab, "r2")  # heard live, undisturbed
            assert {f["id"] for f in late.of("cf_agent_use_chat_response")} == {
                "r1", "r2",
            }  # fmt: skip


@pytest.mark.rule("C-014", "C-019", "C-021", "W-115", "W-141", "W-159")
async def test_a_failed_turn_is_replayed_with_what_it_said_then_its_error_then_its_end(
    clock: object,
) -> None:
    async with open_test_kernel(roots=[Talk]) as test:
        async with connected(test.kernel, ME) as tab:
            ask(tab, "r1", "some words fail")
            await tab.ended("r1")
            live = tab.responses("r1")
            # one frame: the older clients take what follows an error for another turn
            assert [(f.get("error"), f["done"]) for f in live[-2:]] == [
                (None, False), (True, True),
            ]  # fmt: skip
            assert re.fullmatch(r"the run failed \(error \w+\)", live[-1]["body"])
            assert tab.text("r1") == "some words "
        for _ in range(2):
            async with connected(test.kernel, ME) as late:
                assert (await probe(late, "p"))["id"] == "r1"
                take(late, "r1")
                await late.ended("r1")
                told = late.responses("r1")
                assert [f["body"] for f in told] == [f["body"] for f in live]
                assert told[-1]["outcome"] == "error"
                assert not any(f.get("replayComplete") for f in told)
            assert texts(await history(test))[-1] == "some words"
            await test.crash()
            await test.reopen()


@pytest.mark.rule("C-015")
async def test_a_turn_that_cannot_go_on_after_a_crash_ends_and_is_kept_once(
    clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Talk, "go_on", False)
    async with open_test_kernel(roots=[Talk]) as test:
        async with connected(test.kernel, ME) as tab:
            ask(tab, "r1", "a wait:x b")
            await tab.until(lambda c: c.text("r1") == "a ")
            await test.crash()
        await test.reopen()
        async with (
            connected(test.kernel, ME) as one,
            connected(test.kernel, ME) as two,
        ):
            for late in (one, two, one):
                take(late, "r1")
                last = await late.ended("r1")
                assert late.text("r1").startswith("a ")
                assert last["done"]
            stored = await history(test)
            assert [m["id"] for m in stored] == ["u-r1", "msg-r1"]
            assert said(stored[1]) == "a "
        await test.crash()
        await test.reopen()
        assert await history(test) == stored


@pytest.mark.rule("C-015", "W-140")
async def test_a_turn_that_goes_on_after_a_crash_leaves_one_message_however_often_taken(
    clock: object,
) -> None:
    async with open_test_kernel(roots=[Talk]) as test:
        async with connected(test.kernel, ME) as tab:
            ask(tab, "r1", "a wait:x b")
            await DOORS.at("wait:x")
            await tab.until(lambda c: c.text("r1") == "a ")
            await test.crash()
        await test.reopen()
        async with connected(test.kernel, ME) as late:
            for number in range(1, 3):
                take(late, "r1")
                await caught_up(late, "r1", number)
            assert not any(f["done"] for f in late.responses("r1"))
            DOORS.open("wait:x")
            await late.ended("r1")
        assert texts(await history(test)) == ["a wait:x b", "a wait:x b"]


# ---- what is kept for who comes later


@pytest.mark.rule("C-019", "W-125", "W-141")
@pytest.mark.parametrize("by", ["a newer turn", "a stopped turn", "a clear"])
async def test_a_failure_is_offered_to_whoever_comes_until_it_is_old(
    by: str, clock: object
) -> None:
    async with open_test_kernel(roots=[Talk]) as test:
        async with connected(test.kernel, ME) as tab:
            ask(tab, "r1", "a fail")
            await tab.ended("r1")  # it saw it: whoever comes later may not have
            for _ in range(2):
                async with connected(test.kernel, ME) as late:
                    transcript, offer = late.frames[:2]
                    assert texts(transcript["messages"]) == ["a fail", "a"]
                    assert (offer["type"], offer["id"]) == (
                        "cf_agent_stream_resuming",
                        "r1",
                    )
                await test.crash()
                await test.reopen()
        async with connected(test.kernel, ME) as tab:
            if by == "a clear":
                tab.send("cf_agent_chat_clear")
                await test.advance(1)
            else:
                ask(tab, "r2", "wait:x")
                await DOORS.at("wait:x")
                async with connected(test.kernel, ME) as late:
                    assert (await probe(late, "p"))["id"] == "r2"
                if by == "a stopped turn":
                    tab.send("cf_agent_chat_request_cancel", id="r2")
                DOORS.open("wait:x")
                await tab.ended("r2")
            async with connected(test.kernel, ME) as late:
                assert (await probe(late, "p"))["reason"] == "idle"
                assert late.of("cf_agent_stream_resuming") == []


def recovering(client: Client) -> list[bool]:
    return [f["recovering"] for f in client.of("cf_agent_chat_recovering")]


class House(Agent):
    """Has a chat as a facet, which it can cut."""

    async def build(self) -> None:
        await self.dynamic_agents.get(Talk, "t")

    async def cut(self) -> None:
        await self.dynamic_agents.abort(Talk, "t", "to see what comes of it")


@pytest.mark.rule("C-020", "W-118")
@pytest.mark.parametrize("then", ["goes on", "is stopped", "is cleared"])
async def test_that_a_turn_is_recovering_is_told_until_it_goes_on_or_ends(
    then: str, clock: object
) -> None:
    path = (("House", "a"), ("Talk", "t"))
    async with open_test_kernel(roots=[House], facets=[Talk]) as test:
        await (await test.kernel.get_agent(House, "a")).build()
        async with connected(test.kernel, *path) as tab:
            ask(tab, "r1", "a wait:x b")
            await DOORS.at("wait:x")
            await tab.until(lambda c: c.text("r1") == "a ")
            assert recovering(tab) == []
            await (await test.kernel.get_agent(House, "a")).cut()
        async with (
            connected(test.kernel, *path) as one,
            connected(test.kernel, *path) as two,
        ):
            for late in (one, two):
                await late.until(lambda c: bool(recovering(c)))
                assert late.frames[0]["type"] == "cf_agent_stream_resuming"
                assert late.of("cf_agent_chat_recovering") == [
                    {"type": "cf_agent_chat_recovering", "recovering": True, "id": "r1"}
                ]
            await test.evict(path)  # whoever wakes next knows it all the same
            if then == "is stopped":
                one.send("cf_agent_chat_request_cancel", id="r1")
            elif then == "is cleared":
                one.send("cf_agent_chat_clear")
            await test.advance(20)
            for late in (one, two):
                assert recovering(late) == [True, False]
            assert DOORS.reached.count("wait:x") == (2 if then == "goes on" else 1)
            DOORS.open("wait:x")
            await test.advance(1)
            assert recovering(one) == [True, False]
        async with connected(test.kernel, *path) as later:
            await test.advance(1)
            assert recovering(later) == []


async def test_what_is_kept_for_who_comes_and_cannot_be_read_keeps_nobody_out(
    clock: object,
) -> None:
    async with open_test_kernel(roots=[Talk]) as test:
        async with connected(test.kernel, ME) as tab:
            ask(tab, "r1", "a wait:x")
            await DOORS.at("wait:x")
            tree = test.tree(*ME)
            assert tree is not None
            for key in ("chat:unseen", "chat:recovering", "chat:turn:r0"):
                tree.store.agent(tree.root_slot).execute(
                    "INSERT INTO main.culet_value (key, value) VALUES (?, ?)",
                    (key, "{not JSON"),
                )
            await (await test.kernel.get_agent(Talk, "a")).stored()
            await test.crash()
        DOORS.open("wait:x")
        await test.reopen()
        async with connected(test.kernel, ME) as late:
            take(late, "r1")
            await late.ended("r1")
            ask(late, "r2", "b")
            await late.ended("r2")
            assert late.text("r2") == "b "
