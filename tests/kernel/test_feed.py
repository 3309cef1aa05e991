"""One feed for a tree: every frame of every run below, once, in one order, from anywhere."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import msgspec
import pytest
import trio

from culet.kernel import Agent, Chunk, Detached, FeedEntry, Limits, Turn
from culet.kernel.core.feed import BEGINNING, Position, end_of
from culet.kernel.errors import (
    CapacityError,
    FacetAborted,
    NotFound,
    StorageError,
    UsageError,
)
from culet.kernel.feedreader import Reader
from culet.kernel.runs import Ask
from culet.kernel.testing import Harness
from kernel.agents import raises, settle, tree_of
from kernel.toolkit import Kid, Top, again, ask, frames, kid, opened, say, top

TINY = Limits(feed_page=3, feed_bytes=200, feed_recent=2)
BOTH = pytest.mark.parametrize("limits", [None, TINY], ids=["usual", "tiny"])
NESTED: list[Any] = [
    ["say", "a"],
    ["run", "in", [["say", "b"], ["sleep", 1], ["run", "low", [["say", "c"]]]]],
    ["say", "d"],
]


class Boss(Kid):
    """Says something, asks for a run, says something: all in one breath."""

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        yield say("before")
        await self.run_agent_tool(Kid, [["say", "x"]], run_id="in")
        yield say("after")


def told(entries: list[FeedEntry]) -> list[tuple[str | None, int, str]]:
    """Return which run, number and kind."""
    return [(e.run_id, e.sequence, e.kind) for e in entries]


async def read(me: Any, after: str | None = None, **options: Any) -> list[FeedEntry]:
    """Return what an agent's feed has."""
    return [entry async for entry in me.runs.feed(after, **options)]


async def seen(test: Harness, after: str | None = None) -> list[FeedEntry]:
    """Return what an operator reads."""
    return [entry async for entry in test.kernel.feed("Top", "a", after=after)]


async def gather(feed: Any, into: list[FeedEntry]) -> None:
    """Take each entry as it comes, so that whoever is cut has what there was."""
    async for entry in feed:
        into.append(entry)  # noqa: PERF401  # seen by others meanwhile


async def together(me: Any, *scripts: tuple[str, list[Any]]) -> None:
    """Let runs go on beside each other, to their end."""
    async with trio.open_nursery() as nursery:
        for run_id, script in scripts:
            ask(nursery, me, Kid, script, run_id=run_id)


def check(entries: list[FeedEntry]) -> None:
    """Each run's frames are dense and in order; cursors rise; no parent comes late."""
    cursors = [Position.parse(e.cursor, SLOT[0]) for e in entries]
    assert cursors == sorted(set(cursors))
    numbers: dict[str, int] = {}
    for entry in entries:
        if entry.run_id is None:
            continue
        assert entry.sequence == numbers.get(entry.path, -1) + 1, entry
        numbers[entry.path] = entry.sequence
        if entry.kind == "started" and entry.parent_run_id is not None:
            assert entry.path.rsplit("/", 2)[0] in numbers


SLOT: list[str] = [""]


async def begin(test: Harness) -> Any:
    """Wake the root and remember whose cursors these are."""
    me = await top(test)
    SLOT[0] = tree_of(test).root_slot
    return me


# ---- what there is, and in which order


async def test_three_levels_are_one_list_in_the_order_of_what_caused_what(
    clock: object,
) -> None:
    async with opened() as test:
        me = await begin(test)
        await me.run_agent_tool(Kid, NESTED, run_id="r")

        entries = await read(me)

        assert told(entries) == [
            ("r", 0, "started"), ("r", 1, "chunk"),
            ("in", 0, "started"), ("in", 1, "chunk"), ("in", 2, "chunk"),
            ("low", 0, "started"), ("low", 1, "chunk"), ("low", 2, "finished"),
            ("in", 3, "chunk"), ("in", 4, "finished"),
            ("r", 2, "chunk"), ("r", 3, "chunk"), ("r", 4, "finished"),
        ]  # fmt: skip
        check(entries)
        first = {e.run_id: e for e in reversed(entries)}
        assert first["low"].path == "Top/a/Kid/r/Kid/in/Kid/low"
        assert (first["low"].parent_run_id, first["low"].depth) == ("in", 3)
        assert (first["in"].parent_run_id, first["in"].depth) == ("r", 2)
        assert (first["r"].parent_run_id, first["r"].depth) == (None, 1)
        assert first["low"].chunk is None
        assert [e.chunk["delta"] for e in entries if e.chunk] == [
            "a", "b", "sleep", "c", "completed", "completed", "d",
        ]  # fmt: skip


async def test_a_run_starts_after_what_its_asker_said_before(clock: object) -> None:
    async with opened(Boss) as test:
        me = await begin(test)
        await me.run_agent_tool(Boss, None, run_id="r")
        assert told(await read(me))[:3] == [
            ("r", 0, "started"), ("r", 1, "chunk"), ("in", 0, "started"),
        ]  # fmt: skip


async def test_a_cancel_comes_after_what_was_said_before_it(clock: object) -> None:
    class Ends(Kid):
        async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
            await self.run_agent_tool(Kid, [["sleep", 9]], run_id="in", detached=True)
            await trio.sleep(1)
            yield say("now")
            await self.runs.cancel("in")
            yield say("done")

    async with opened(Ends) as test:
        me = await begin(test)
        await me.run_agent_tool(Ends, None, run_id="r")
        assert told(await read(me)) == [
            ("r", 0, "started"), ("in", 0, "started"), ("r", 1, "chunk"),
            ("in", 1, "aborted"), ("r", 2, "chunk"), ("r", 3, "finished"),
        ]  # fmt: skip


async def test_an_answer_to_a_milestone_comes_after_it(clock: object) -> None:
    class Marks(Kid):
        async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
            await trio.sleep(1)
            await self.report_progress(milestone="half")
            yield say("x")
            await trio.sleep(9)

    class Waits(Kid):
        async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
            await self.run_agent_tool(Marks, None, run_id="in", detached=True)
            yield say("waits")
            await self.runs.await_milestone("in", "half")
            yield say("heard")

    async with opened(Marks, Waits) as test:
        me = await begin(test)
        await me.run_agent_tool(Waits, None, run_id="r")
        entries = await read(me)
        order = [(e.run_id, (e.chunk or {}).get("type")) for e in entries]
        assert order.index(("in", "data-agent-milestone")) < [
            e.run_id == "r" and (e.chunk or {}).get("delta") == "heard" for e in entries
        ].index(True)


async def test_the_frames_are_those_that_a_replay_of_each_run_gives(
    clock: object,
) -> None:
    async with opened() as test:
        me = await begin(test)
        await me.run_agent_tool(
            Kid, NESTED, run_id="r", parent_tool_call_id="call", display={"a": 1}
        )
        await me.run_agent_tool(Kid, [["fail", "no"]], run_id="bad")
        entries = await read(me)
        for run_id in ("r", "bad"):
            replayed = await frames(me, run_id)
            for frame in replayed:
                frame.pop("replay")
            assert [e.frame for e in entries if e.run_id == run_id] == replayed
        inner = await kid(test, "r")
        of_kid = await read(inner)
        assert told(of_kid) == [
            (e.run_id, e.sequence, e.kind) for e in entries if e.depth > 1
        ]
        assert [e.text for e in of_kid] == [e.text for e in entries if e.depth > 1]
        assert {e.depth for e in of_kid} == {1, 2}


async def test_a_run_that_was_refused_is_not_shown_and_a_stillborn_one_is(
    clock: object,
) -> None:
    from culet.kernel import CancelToken

    class Narrow(Top):
        max_concurrent_agent_tools = 1

    async with opened(root=Narrow) as test:
        me = await top(test, Narrow)
        token = CancelToken()
        token.cancel()
        await me.run_agent_tool(Kid, [], run_id="still", cancel=token)
        await me.run_agent_tool(Kid, [["sleep", 9]], run_id="one", detached=True)
        refused = await me.run_agent_tool(Kid, [], run_id="two")
        assert refused.reason == "capacity"
        assert told(await read(me)) == [
            ("still", 0, "started"), ("still", 1, "aborted"), ("one", 0, "started"),
        ]  # fmt: skip


async def test_without_below_only_its_own_runs_are_shown(clock: object) -> None:
    async with opened() as test:
        me = await begin(test)
        await me.run_agent_tool(Kid, NESTED, run_id="r")
        assert {e.run_id for e in await read(me, below=False)} == {"r"}


# ---- a cursor


@BOTH
async def test_from_the_cursor_of_any_entry_the_rest_follows_exactly(
    clock: object, limits: Limits | None
) -> None:
    async with opened(limits=limits) as test:
        me = await begin(test)
        scripts = [
            (f"r{n}", [["say", f"{n}"], ["sleep", n % 3], ["say", "x" * 90]] * 2)
            for n in range(4)
        ]
        await together(me, *scripts, ("n", NESTED))
        whole = await read(me)
        assert len(whole) == 4 * 8 + 13
        check(whole)
        for number, entry in enumerate(whole):
            assert await read(me, entry.cursor) == whole[number + 1 :]
        for number, entry in enumerate(whole):
            assert (
                await read(me, entry.cursor, limit=2) == whole[number + 1 : number + 3]
            )
        assert await read(me, await me.runs.feed_end()) == []


@BOTH
async def test_whoever_follows_sees_what_a_reader_sees_afterwards(
    clock: object, limits: Limits | None
) -> None:
    async with opened(limits=limits) as test:
        me = await begin(test)
        live: list[FeedEntry] = []
        cut: list[FeedEntry] = []

        async def follow() -> None:
            await gather(me.runs.feed(follow=True), live)

        async def cut_often() -> None:
            """A reader that is cut after each few entries and comes back."""
            while True:
                after = cut[-1].cursor if cut else None
                await gather(me.runs.feed(after, follow=True, limit=2), cut)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(follow)
            nursery.start_soon(cut_often)
            await settle()
            script = [["say", "1"], ["sleep", 1], ["say", "2"], ["sleep", 1]]
            await together(me, ("a", script), ("b", script), ("n", NESTED))
            await trio.sleep(1)
            nursery.cancel_scope.cancel()

        assert live == cut == await read(me)
        check(live)


@pytest.mark.parametrize("how", ["crash", "evict", "abort"])
async def test_after_any_end_of_a_life_the_feed_goes_on_at_its_cursor(
    clock: object, how: str
) -> None:
    async with opened() as test:
        me = await begin(test)
        script = [["say", "1"], ["sleep", 5], ["say", "2"]]
        async with trio.open_nursery() as nursery:
            ask(nursery, me, Kid, script, run_id="a")
            ask(nursery, me, Kid, NESTED, run_id="n")
            await trio.sleep(0.5)
            before = await read(me)
            assert ("n", 1, "chunk") in told(before)
            if how == "crash":
                me = await again(test)
            elif how == "abort":
                await me.dynamic_agents.abort(Kid, "a")
                await me.dynamic_agents.abort(Kid, "n")
            await trio.sleep(60)
            nursery.cancel_scope.cancel()  # who asked is dead
        if how == "evict":
            await test.evict([("Top", "a")])
        rest = await seen(test, before[-1].cursor)
        whole = before + rest
        check(whole)
        assert whole == await seen(test)
        assert {e.run_id for e in whole if e.kind == "finished"} == {
            "a", "n", "in", "low",
        }  # fmt: skip
        if how == "evict":
            assert test.kernel.metrics()["nodes"] == 0, "reading starts no agent"


async def test_a_reader_may_be_cancelled_and_asked_again_and_no_run_hears_of_it(
    clock: object,
) -> None:
    async with opened(limits=TINY) as test:
        me = await begin(test)
        async with trio.open_nursery() as nursery:
            results = ask(
                nursery, me, Kid, [["say", "1"], ["sleep", 5]] * 3, run_id="r"
            )
            feed = me.runs.feed(follow=True)
            got: list[FeedEntry] = []
            while len(got) < 8:
                with trio.move_on_after(0.7):
                    await gather(feed, got)
        assert got == await read(me)
        assert feed.cursor == got[-1].cursor
        assert results[0].status == "completed"


# ---- only what is durable


async def test_nothing_is_shown_that_a_crash_could_take_back(clock: object) -> None:
    async with opened() as test:
        me = await begin(test)
        await me.durable()
        tree = tree_of(test)
        test.faults.die_in_record()
        wanted = Ask(run_id="r", detached=Detached())
        kind = test.kernel.classes.of(Kid)
        tree.runs.dispatch(tree.nodes[tree.root_slot], kind, [["say", "x"]], wanted)
        reader = Reader(tree, tree.root_slot, BEGINNING, below=True)
        assert tree.runs.get(tree.root_slot, "r") is not None
        assert await reader.page(tree.order.reach) == []
        assert tree.order.reach < tree.order.last
        await settle()
        me = await again(test)
        assert await read(me) == []
        await me.run_agent_tool(Kid, [["say", "y"]], run_id="r2")
        assert told(await read(me)) == [
            ("r2", 0, "started"), ("r2", 1, "chunk"), ("r2", 2, "finished"),
        ]  # fmt: skip


@pytest.mark.parametrize("landed", [False, True])
@pytest.mark.parametrize("nth", range(1, 9))
async def test_a_death_in_any_record_takes_back_nothing_that_was_read(
    clock: object, nth: int, landed: bool
) -> None:
    async with opened() as test:
        me = await begin(test)
        got: list[FeedEntry] = []

        async def follow() -> None:
            with suppress(StorageError):  # the process is dead
                await gather(test.kernel.feed("Top", "a", follow=True), got)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(follow)
            test.faults.die_in_record(nth, landed=landed)
            ask(nursery, me, Kid, NESTED, run_id="n")
            await trio.sleep(30)
            me = await again(test)
            await trio.sleep(60)
            nursery.cancel_scope.cancel()
        after = got[-1].cursor if got else None
        whole = got + await seen(test, after)
        assert whole == await seen(test)
        check(whole)


async def test_a_restart_of_the_tree_is_not_seen_from_outside(clock: object) -> None:
    async with opened() as test:
        me = await begin(test)
        await me.run_agent_tool(Kid, [["say", "x"]], run_id="r")
        got: list[FeedEntry] = []

        async def follow() -> None:
            await gather(test.kernel.feed("Top", "a", follow=True), got)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(follow)
            await settle()
            assert len(got) == 3
            tree = tree_of(test)
            test.faults.fail_record()
            ask(nursery, me, Kid, [["say", "lost"]], run_id="lost")
            await trio.sleep(5)
            assert tree_of(test) is not tree, "it was restarted"
            me = await begin(test)
            await me.run_agent_tool(Kid, [["say", "y"]], run_id="r2")
            await trio.sleep(1)
            nursery.cancel_scope.cancel()
        assert {e.run_id for e in got} == {"r", "r2"}
        assert got == await read(me)


@pytest.mark.parametrize("follow", [False, True])
async def test_who_comes_while_a_tree_is_fenced_reads_all_that_was_durable(
    clock: object, follow: bool
) -> None:
    async with opened() as test:
        me = await begin(test)
        await me.run_agent_tool(Kid, [["say", "x"]], run_id="r")
        await me.durable()
        tree = tree_of(test)
        tree.fail(StorageError("the disk is gone for a moment"))
        feed = test.kernel.feed("Top", "a", limit=3, follow=follow)
        with trio.fail_after(60):
            got = [entry async for entry in feed]
        assert told(got) == [
            ("r", 0, "started"), ("r", 1, "chunk"), ("r", 2, "finished"),
        ]  # fmt: skip
        await settle()
        assert tree.closed  # who was quick has read what was durable before it went


async def test_a_feed_that_is_followed_ends_with_the_kernel_or_its_agent(
    clock: object,
) -> None:
    ended: list[str] = []

    async def follow(feed: Any, name: str) -> None:
        try:
            async for _ in feed:
                pass
        except FacetAborted:
            ended.append(f"{name} aborted")
        else:
            ended.append(name)

    async with trio.open_nursery() as nursery, opened() as test:
        me = await begin(test)
        nursery.start_soon(follow, test.kernel.feed("Top", "a", follow=True), "root")
        nursery.start_soon(follow, me.runs.feed(follow=True), "agent")
        await settle()
    assert sorted(ended) == ["agent aborted", "root"]


# ---- what is gone


@BOTH
async def test_a_run_that_was_cleared_is_told_as_such_and_its_bodies_are_gone(
    clock: object, limits: Limits | None
) -> None:
    async with opened(limits=limits) as test:
        me = await begin(test)
        await together(me, ("r", [["say", "x"]]), ("n", NESTED))
        before = await read(me)
        await me.runs.clear()
        await test.advance(1)
        after = await read(me, before[4].cursor)
        assert [(e.kind, e.path) for e in after] == [
            (e.kind, e.path) for e in await read(me)
        ]
        assert sorted((e.kind, e.path) for e in after) == [
            ("cleared", "Top/a/Kid/n"),
            ("cleared", "Top/a/Kid/r"),
            ("deleted", "Top/a/Kid/n"),
        ]
        cleared = next(e for e in after if e.run_id == "r")
        assert (cleared.sequence, cleared.frame["event"]) == (
            3, {"kind": "cleared", "runIds": ["r"]},
        )  # fmt: skip
        assert "x" not in str([e.text for e in after])
        again_ = await me.run_agent_tool(Kid, [["say", "y"]], run_id="r")
        assert again_.status == "completed"
        assert told(await read(me, after[-1].cursor)) == [
            ("r", 0, "started"), ("r", 1, "chunk"), ("r", 2, "finished"),
        ]  # fmt: skip


async def test_what_goes_because_it_is_old_is_told_as_cleared(clock: object) -> None:
    class Forgetful(Top):
        retention_s = 3600.0

    async with opened(root=Forgetful) as test:
        me = await top(test, Forgetful)
        await me.run_agent_tool(Kid, [["say", "x"]], run_id="r")
        before = await read(me)
        for _ in range(3):
            test.clock.jump(4000)
            await test.advance(60)
        feed = test.kernel.feed("Forgetful", "a", after=before[-1].cursor)
        assert told([entry async for entry in feed]) == [("r", 3, "cleared")]


async def test_a_clear_while_somebody_reads_is_a_hole_and_a_word_of_it(
    clock: object,
) -> None:
    async with opened(limits=TINY) as test:
        me = await begin(test)
        await me.run_agent_tool(Kid, [["say", f"{n}"] for n in range(9)], run_id="r")
        await me.durable()
        feed = me.runs.feed(follow=True)
        first = [await anext(feed) for _ in range(3)]  # one page
        await me.runs.clear()
        await me.run_agent_tool(Kid, [["say", "new"]], run_id="r2")
        rest = [await anext(feed) for _ in range(4)]
        assert told(first) == [
            ("r", 0, "started"), ("r", 1, "chunk"), ("r", 2, "chunk"),
        ]  # fmt: skip
        assert told(rest) == [
            ("r", 11, "cleared"),
            ("r2", 0, "started"), ("r2", 1, "chunk"), ("r2", 2, "finished"),
        ]  # fmt: skip


async def test_a_deleted_facet_is_told_with_all_below_it(clock: object) -> None:
    async with opened() as test:
        me = await begin(test)
        await me.run_agent_tool(Kid, NESTED, run_id="r")
        await me.run_agent_tool(Kid, [["say", "stays"]], run_id="s")
        whole = await read(me)
        await me.dynamic_agents.delete(Kid, "r")
        await test.advance(1)

        entries = await read(me)

        assert told(entries) == [
            ("r", 0, "started"), ("r", 4, "finished"),
            ("s", 0, "started"), ("s", 1, "chunk"), ("s", 2, "finished"),
            ("r", 0, "deleted"),
        ]  # fmt: skip
        assert entries[-1].path == "Top/a/Kid/r"
        assert entries[-1].frame["event"] == {
            "kind": "deleted", "path": "Top/a/Kid/r", "runId": "r",
        }  # fmt: skip
        assert told(await read(me, whole[7].cursor)) == told(entries)[1:]


async def test_a_facet_that_never_ran_anything_is_deleted_without_a_word(
    clock: object,
) -> None:
    async with opened() as test:
        me = await begin(test)
        await me.dynamic_agents.get(Kid, "k")
        await me.dynamic_agents.delete(Kid, "k")
        assert await read(me) == []


async def test_a_run_that_goes_on_is_ended_by_the_delete_and_told_before_it(
    clock: object,
) -> None:
    async with opened() as test:
        me = await begin(test)
        await me.run_agent_tool(
            Kid, [["say", "x"], ["sleep", 99]], run_id="r", detached=True
        )
        await trio.sleep(1)
        await me.dynamic_agents.delete(Kid, "r")
        await test.advance(1)
        assert told(await read(me)) == [
            ("r", 0, "started"), ("r", 2, "interrupted"), ("r", 0, "deleted"),
        ]  # fmt: skip


@pytest.mark.limit("feed_gone")
async def test_too_much_that_is_gone_is_trimmed_and_that_is_told(clock: object) -> None:
    async with opened(limits=Limits(feed_gone=4)) as test:
        me = await begin(test)
        for n in range(11):
            await me.run_agent_tool(Kid, [], run_id=f"r{n}")
            await me.runs.clear()
        tree = tree_of(test)
        assert len(tree.db.execute("SELECT 1 FROM gone")) <= 5
        entries = await read(me)
        assert entries[0].kind == "trimmed"
        assert (entries[0].run_id, entries[0].depth) == (None, 0)
        assert [e.kind for e in entries[1:]] == ["cleared"] * (len(entries) - 1)
        assert entries[-1].run_id == "r10"
        child = await me.dynamic_agents.get(Kid, "k")
        assert child is not None
        inner = await kid(test, "k")
        assert [e.kind for e in await read(inner)] == ["trimmed"]


# ---- what is refused


async def test_a_cursor_that_is_not_of_this_tree_is_refused(clock: object) -> None:
    async with opened() as test:
        me = await begin(test)
        await me.run_agent_tool(Kid, [], run_id="r")
        [first, _end] = await read(me)
        await test.kernel.get_agent(Top, "b")
        other = test.find([("Top", "b")])
        assert other is not None
        ahead = Position(1 << 60, 1).text(tree_of(test).root_slot)
        for cursor in ("", "x", first.cursor[:-1] + "!", first.cursor + "A", ahead):
            with pytest.raises(UsageError):
                me.runs.feed(cursor)
            await raises(UsageError, anext, test.kernel.feed("Top", "a", after=cursor))
        with pytest.raises(UsageError):
            other.agent.runs.feed(first.cursor)
        await raises(
            UsageError, anext, test.kernel.feed("Top", "b", after=first.cursor)
        )
        with pytest.raises(UsageError):
            me.runs.feed(limit=0)
        await raises(NotFound, anext, test.kernel.feed("Top", "none"))
        assert test.tree("Top", "none") is None


@pytest.mark.limit("feed_readers")
async def test_one_task_reads_an_iterator_and_so_many_wait_at_once(
    clock: object,
) -> None:
    async with opened(limits=Limits(feed_readers=2)) as test:
        me = await begin(test)
        feed = me.runs.feed(follow=True)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(anext, feed)
            nursery.start_soon(anext, me.runs.feed(follow=True))
            await settle()
            await raises(UsageError, anext, feed)
            await raises(CapacityError, anext, me.runs.feed(follow=True))
            nursery.cancel_scope.cancel()
        with trio.move_on_after(1):
            await anext(feed)


# ---- nobody waits for a reader


@pytest.mark.limit("feed_page")
async def test_a_slow_reader_delays_no_run_and_holds_one_page(clock: object) -> None:
    async with opened(limits=Limits(feed_page=16)) as test:
        me = await begin(test)
        scripts = [(f"r{n}", [["say", "x"]] * 60) for n in range(4)]
        await together(me, *scripts)
        feed = me.runs.feed(follow=True)
        slow = [await anext(feed)]
        started = trio.current_time()
        await together(me, *[(f"s{n}", s) for n, (_, s) in enumerate(scripts)])
        assert trio.current_time() - started < 1
        assert len(feed._page) < 16
        held = sum(len(s.ahead) for s in feed._reader.sources.values())
        assert held <= 16 * 2 + 8 * len(feed._reader.sources)
        while len(slow) < 8 * 62:
            slow.append(await anext(feed))
            await trio.sleep(0.01)
        assert slow == await read(me)


@pytest.mark.limit("feed_recent")
async def test_what_a_reader_keeps_does_not_grow_with_what_it_has_read(
    clock: object,
) -> None:
    async with opened(limits=Limits(feed_page=8, feed_recent=4)) as test:
        me = await begin(test)
        feed = me.runs.feed(follow=True)
        for n in range(30):
            await me.run_agent_tool(Kid, [["say", "x"]], run_id=f"r{n}")
            await me.durable()
            for _ in range(3):
                await anext(feed)
        assert feed._reader.sources == {}
        tree = tree_of(test)
        assert len(tree.order._recent) <= 4
        assert len(tree.order._pending) <= 1


async def test_who_follows_from_outside_keeps_the_tree_open_and_no_agent_awake(
    clock: object,
) -> None:
    async with opened(idle_s=10) as test:
        await begin(test)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(anext, test.kernel.feed("Top", "a", follow=True))
            await trio.sleep(60)
            assert test.kernel.metrics()["nodes"] == 0
            assert test.tree("Top", "a") is not None
            nursery.cancel_scope.cancel()
        await trio.sleep(60)
        assert test.tree("Top", "a") is None


# ---- what was stored before there were places


async def test_what_an_older_version_stored_lies_before_all_and_in_an_order(
    clock: object,
) -> None:
    async with opened() as test:
        me = await begin(test)
        await together(me, ("n", NESTED), ("r", [["say", "x"]] * 3))
        whole = await read(me)
        tree = tree_of(test)
        for sql in (
            "DROP TRIGGER run_absorbs",
            "UPDATE run SET place = born, end_place = 100 - born",
        ):
            tree.db.execute(sql)
        for slot in tree.store.slots():
            db = tree.store.agent(slot)
            db.execute("DROP TRIGGER main.culet_entry_keeps")
            db.execute("UPDATE main.culet_entry SET place = NULL")
        await me.durable()
        old = await read(me)
        assert sorted(told(old), key=str) == sorted(told(whole), key=str)
        check(old)
        for number, entry in enumerate(old):
            assert await read(me, entry.cursor) == old[number + 1 :]
        await me.run_agent_tool(Kid, [["say", "x"]], run_id="new")
        assert {e.run_id for e in await read(me, old[-1].cursor)} == {"new"}


async def test_an_entry_can_cross_to_another_agent(clock: object) -> None:
    class Teller(Agent):
        async def all(self) -> list[FeedEntry]:
            return [entry async for entry in self.runs.feed()]

        async def go(self) -> str:
            return (await self.run_agent_tool(Kid, [["say", "x"]], run_id="r")).status

    async with opened(root=Teller) as test:
        root = await test.kernel.get_agent(Teller, "a")
        await root.go()
        entries = await root.all()
        assert told(entries)[-1] == ("r", 2, "finished")
        assert msgspec.json.decode(entries[1].text) == entries[1].frame
        assert end_of(1) > BEGINNING
