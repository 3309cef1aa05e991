"""Where a turn's chunks are kept: from when, in which pieces, and until when."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import trio

from adapters.peer import connected
from adapters.talk import (
    DOORS,
    ME,
    Talk,
    ask,
    bodies,
    history,
    probe,
    seqs,
    texts,
)
from culet.kernel import Limits
from culet.kernel.errors import FacetAborted, StorageError
from culet.kernel.testing import open_test_kernel

LAZY = Limits(linger_s=20)  # seconds, for what nobody waits for


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    DOORS.__init__()  # type: ignore[misc]
    monkeypatch.setattr(Talk, "staged", [])
    yield


@pytest.mark.rule("C-001")
async def test_what_a_turn_is_stands_before_its_first_chunk_and_after_a_crash(
    clock: object,
) -> None:
    async with open_test_kernel(roots=[Talk]) as test:
        async with connected(test.kernel, ME) as tab:
            ask(tab, "r0", "first")
            await tab.ended("r0")
            ask(tab, "r1", "wait:a one")
            await DOORS.at("wait:a")
            me = await test.kernel.get_agent(Talk, "a")
            async with trio.open_nursery() as nursery:

                async def more() -> None:
                    try:
                        await me.more()
                    except (StorageError, FacetAborted):
                        return

                nursery.start_soon(more)  # in the answer r0, which is the last there is
                ask(tab, "r2", "two")
                await test.advance(1)
                assert not tab.chunks("r2")
                assert {s for s, _ in await me.entries()} == {"r0"}
                await test.crash()
                nursery.cancel_scope.cancel()
        DOORS.open("wait:a")
        DOORS.open("wait:more")
        await test.reopen()
        async with connected(test.kernel, ME) as late:
            await late.ended("r2")
            await test.advance(1)
            stored = await history(test)
            assert [m["id"] for m in stored] == [
                "u-r0", "msg-r0", "u-r1", "msg-r1", "u-r2", "msg-r2",
            ]  # fmt: skip
            assert texts(stored)[1] == "first more still"
            assert texts(stored)[5] == "two"
            told = [f for f in late.frames if f.get("continuation")]
            assert told
            assert {f["id"] for f in told}.isdisjoint({"r0", "r1", "r2"})


@pytest.mark.limit("batch_chunks")
@pytest.mark.rule("C-002")
async def test_what_is_said_at_once_is_stored_together_and_never_too_much_waits(
    clock: object,
) -> None:
    limits = Limits(batch_chunks=50, linger_s=20)
    async with (
        open_test_kernel(roots=[Talk], limits=limits) as test,
        connected(test.kernel, ME) as tab,
    ):
        tree = test.tree(*ME)
        assert tree is not None
        before = tree.barrier.count
        ask(tab, "r1", "many:400")
        await tab.ended("r1")
        # its end flushes what is left, and every word has its own number
        assert seqs(tab, "r1") == list(range(401))
        assert max(Talk.staged) == 49  # the fiftieth waits for what was staged
        assert tree.barrier.count - before < 30, "commits of 400 chunks"


@pytest.mark.rule("C-002")
async def test_what_is_staged_is_stored_when_somebody_comes_and_none_is_twice(
    clock: object,
) -> None:
    async with (
        open_test_kernel(roots=[Talk], limits=LAZY) as test,
        connected(test.kernel, ME) as tab,
    ):
        ask(tab, "r1", "a b wait:x c")
        await DOORS.at("wait:x")
        async with connected(test.kernel, ME) as late:
            assert (await probe(late, "p"))["id"] == "r1"
            late.send("cf_agent_stream_resume_ack", id="r1")
            await late.until(lambda c: c.text("r1") == "a b ")
            DOORS.open("wait:x")
            await late.ended("r1")
            assert late.text("r1") == "a b wait:x c "
            assert seqs(late, "r1") == list(range(5))


@pytest.mark.rule("C-003")
async def test_a_settled_tool_result_is_stored_at_once_whatever_may_wait(
    clock: object,
) -> None:
    async with open_test_kernel(roots=[Talk], limits=LAZY) as test:
        async with connected(test.kernel, ME) as tab:
            ask(tab, "r1", "a wait:x tool:t1 b wait:y")
            await DOORS.at("wait:x")
            me = await test.kernel.get_agent(Talk, "a")
            await me.stored()
            DOORS.open("wait:x")
            await DOORS.at("wait:y")
            with trio.fail_after(1):  # the rest may wait for twenty
                await tab.until(
                    lambda c: (
                        "tool-output-available"
                        in [chunk["type"] for chunk in c.chunks("r1")]
                    )
                )
            await test.crash()
        DOORS.open("wait:y")
        await test.reopen()
        async with connected(test.kernel, ME) as late:
            late.send("cf_agent_stream_resume_ack", id="r1")
            await late.ended("r1")
            kinds = [c["type"] for c in late.chunks("r1")]
            assert kinds.count("tool-output-available") == 1


@pytest.mark.limit("chunk_bytes")
@pytest.mark.rule("C-004")
async def test_a_chunk_that_is_too_large_is_refused_so_all_that_was_shown_is_stored(
    clock: object,
) -> None:
    limits = Limits(chunk_bytes=2_000)
    async with open_test_kernel(roots=[Talk], limits=limits) as test:
        async with connected(test.kernel, ME) as tab:
            ask(tab, "r1", "a big:1000 big:3000 never")
            assert (await tab.ended("r1"))["outcome"] == "error"
            assert "limit is 2000" in tab.responses("r1")[-1]["body"]
            live = bodies(tab, "r1")
            assert seqs(tab, "r1") == [0, 1, 2]
        async with connected(test.kernel, ME) as late:
            late.send("cf_agent_stream_resume_ack", id="r1")
            await late.ended("r1")
            assert (seqs(late, "r1"), bodies(late, "r1")) == ([0, 1, 2], live)


@pytest.mark.rule("C-005", "W-113")
async def test_every_reading_has_the_same_chunks_under_the_same_numbers(
    clock: object,
) -> None:
    limits = Limits(replay_page_bytes=500)  # many pages
    async with open_test_kernel(roots=[Talk], limits=limits) as test:
        async with connected(test.kernel, ME) as tab:
            ask(tab, "r1", "many:60 wait:x many:20")
            await DOORS.at("wait:x")
            DOORS.open("wait:x")
            await tab.ended("r1")
            live = bodies(tab, "r1")
            assert seqs(tab, "r1") == list(range(82))
        for _ in range(2):
            async with connected(test.kernel, ME) as late:
                late.send("cf_agent_stream_resume_ack", id="r1")
                await late.ended("r1")
                assert seqs(late, "r1") == list(range(82))
                assert bodies(late, "r1") == live
            await test.crash()
            await test.reopen()


@pytest.mark.rule("C-006")
@pytest.mark.parametrize("landed", [False, True])
async def test_nobody_is_shown_a_chunk_before_it_is_stored(
    landed: bool, clock: object
) -> None:
    async with open_test_kernel(roots=[Talk]) as test:
        async with connected(test.kernel, ME) as tab:
            ask(tab, "r1", "a wait:x b wait:y")
            await DOORS.at("wait:x")
            await tab.until(lambda c: c.text("r1") == "a ")
            await test.advance(1)
            test.faults.die_in_record(landed=landed)
            DOORS.open("wait:x")
            await DOORS.at("wait:y")
            await test.advance(1)
            assert tab.text("r1") == "a "
            await test.crash()
        await test.reopen()
        me = await test.kernel.get_agent(Talk, "a")
        count = len(await me.entries())
        assert count >= len(seqs(tab, "r1"))
        DOORS.open("wait:y")
        async with connected(test.kernel, ME) as late:
            late.send("cf_agent_stream_resume_ack", id="r1")
            await late.ended("r1")
            assert late.text("r1") == "a wait:x b wait:y "
            assert bodies(late, "r1")[:2] == bodies(tab, "r1")[:2]


@pytest.mark.rule("C-008", "W-107", "W-135")
async def test_what_was_said_before_a_clear_comes_back_in_no_way(clock: object) -> None:
    async with open_test_kernel(roots=[Talk], limits=LAZY) as test:
        async with (
            connected(test.kernel, ME) as tab,
            connected(test.kernel, ME) as other,
        ):
            ask(tab, "r1", "a wait:x b wait:y never")
            await DOORS.at("wait:x")
            me = await test.kernel.get_agent(Talk, "a")
            await me.stored()
            DOORS.open("wait:x")
            await DOORS.at("wait:y")  # two chunks are staged, and shown to nobody
            assert other.text("r1") == "a "
            tab.send("cf_agent_chat_clear")
            await other.until(lambda c: bool(c.of("cf_agent_chat_clear")))
            await test.advance(30)
            # nothing follows the clear: it would begin a message anew
            assert [f["type"] for f in other.frames[-2:]] == [
                "cf_agent_use_chat_response", "cf_agent_chat_clear",
            ]  # fmt: skip
            assert other.frames[-2]["outcome"] == "aborted"
            assert other.text("r1") == "a "
            assert await me.entries() == []
        for _ in range(2):
            async with connected(test.kernel, ME) as late:
                assert late.frames[0]["messages"] == []
                late.send("cf_agent_stream_resume_ack", id="r1")
                await late.ended("r1")
                assert late.chunks("r1") == []
                assert (await probe(late, "p"))["reason"] == "idle"
            await test.crash()
            await test.reopen()
        me = await test.kernel.get_agent(Talk, "a")
        assert await me.entries() == []


@pytest.mark.rule("C-009")
async def test_after_a_restart_the_turn_that_ran_is_the_one_that_is_resumed(
    clock: object,
) -> None:
    async with open_test_kernel(roots=[Talk]) as test:
        async with connected(test.kernel, ME) as tab:
            ask(tab, "r0", "before")
            await tab.ended("r0")
            ask(tab, "r1", "a wait:x b")
            await DOORS.at("wait:x")
            ask(tab, "r2", "after")
            await tab.until(lambda c: c.text("r1") == "a ")
            await test.advance(1)
            await test.crash()
        await test.reopen()
        async with connected(test.kernel, ME) as late:
            await late.until(lambda c: bool(c.frames))
            assert late.frames[0] == {"type": "cf_agent_stream_resuming", "id": "r1"}
            late.send("cf_agent_stream_resume_ack", id="r1")
            await late.until(lambda c: c.text("r1") == "a ")
            # nobody has taken it up yet: what is stored is shown, and there is no end
            assert not any(f["done"] for f in late.responses("r1"))
            DOORS.open("wait:x")
            await late.ended("r1")
            await late.ended("r2")
            assert late.text("r1") == "a wait:x b "
            assert seqs(late, "r1") == list(range(4))
        assert texts(await history(test))[-1] == "after"
