"""Pages of replay that are shared: as if each reader had read the run himself."""

from __future__ import annotations

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from culet.kernel import Limits
from culet.kernel.pages import BLOCK, Page, Pages, Place
from culet.kernel.ports import Blob
from culet.kernel.streams import Cursor, Streams
from culet.kernel.testing import Harness
from kernel.agents import rows, settle, tree_of
from kernel.peers import connect
from kernel.toolkit import Kid, ask, opened, top

PAGE = Limits().replay_page_bytes
COUNT = 2 * BLOCK + 300
SLOTS = st.sampled_from(["a", "b"])
OPS = st.lists(
    st.one_of(
        st.tuples(st.just("keep"), SLOTS, st.integers(0, 9), st.integers(0, 900)),
        st.tuples(st.just("find"), SLOTS, st.integers(0, 9), st.integers(0, 3)),
        st.tuples(st.just("forget"), SLOTS, st.just(0), st.just(0)),
        st.tuples(st.just("sweep"), st.just(""), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@pytest.mark.rule("G-15")
@given(OPS)
def test_what_is_found_was_kept_there_and_all_of_it_is_bounded(ops) -> None:
    pages = Pages(6_000)
    kept: dict[Place, Page] = {}
    asked: set[Place] = set()
    for name, slot, after, number in ops:
        place = Place(1, slot, "r", after)
        match name:
            case "keep":
                of = number % 3 or None
                page = Page(Blob("x" * number), after + 1, of)
                pages.keep(place, page)
                kept[place] = page
                asked.add(place)
            case "find":
                found = pages.find(place, number)
                if found is not None:
                    assert found is kept[place]
                    assert found.of in (None, number)
                    asked.add(place)
            case "forget":
                pages.forget(1, slot)
                kept = {p: page for p, page in kept.items() if p.slot != slot}
            case "sweep":
                pages.sweep()
                kept = {p: page for p, page in kept.items() if p in asked}
                asked = set()
        assert pages.size <= 6_000
        for place in (Place(1, s, "r", n) for s in "ab" for n in range(10)):
            if place not in kept:
                assert pages.find(place, 1) is None
    for slot in "ab":
        pages.forget(1, slot)
    assert pages.size == 0, "what is gone is counted no more"


@pytest.mark.limit("shared_pages_bytes")
async def test_the_pages_of_a_kernel_have_shared_pages_bytes(clock: object) -> None:
    page = Page(Blob("x" * 900), 1, None)
    one = Pages(1 << 20)
    one.keep(Place(1, "a", "r", 0), page)
    for room, kept in ((3 * one.size, 3), (3 * one.size - 1, 2)):
        async with opened(limits=Limits(shared_pages_bytes=room)) as test:
            pages = test.kernel.pages
            places = [Place(9, "a", "r", n) for n in range(3)]
            for place in places:
                pages.keep(place, page)
            assert sum(pages.find(place, 1) is page for place in places) == kept
            assert pages.find(places[-1], 1) is page, "the oldest make room"


def read(streams: Streams, cursor: Cursor, page: int = PAGE) -> list[Blob]:
    """Read a run to where it is now, as a client does that has none of it."""
    out, over = [], False
    while not over:
        blob, over = streams.pull(None, cursor, page)
        out.append(blob)
    return out


def told(blobs: list[Blob]) -> list[str | bytes]:
    return [text for blob in blobs for text in blob.texts]


def cursor(test: Harness, run_id: str = "r", after: int = -1) -> Cursor:
    sql = f"SELECT child FROM run WHERE id = '{run_id}'"
    return Cursor(rows(tree_of(test), sql)[0][0], run_id, "run", after)


async def test_who_asks_for_the_same_run_gets_the_same_pages(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        await me.run_agent_tool(
            Kid, [["say", str(n)] for n in range(COUNT)], run_id="r"
        )
        await me.durable()
        streams = tree_of(test).streams
        first, second = read(streams, cursor(test)), read(streams, cursor(test))
        assert all(a is b for a, b in zip(first, second, strict=True))
        alone = read(streams, cursor(test), PAGE + 1)  # of another size: not shared
        assert told(first) == told(alone)
        middle = read(streams, cursor(test, after=77))
        assert told(middle) == told(first)[78:]
        assert middle[-1] is first[-1], "readers who begin anywhere soon read in step"


async def test_the_last_page_of_a_run_that_goes_on_is_read_anew(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        job = [["say", "a"], ["sleep", 1], ["say", "b"], ["sleep", 1]]
        async with trio.open_nursery() as nursery:
            ask(nursery, me, Kid, job, run_id="r")
            await test.advance(0.5)
            streams = tree_of(test).streams
            early = told(read(streams, cursor(test)))
            assert early == told(read(streams, cursor(test)))
            await test.advance(1)
            later = told(read(streams, cursor(test)))
            assert (len(early), len(later)) == (2, 4)
            await test.advance(2)
        whole = told(read(streams, cursor(test)))
        assert whole[:4] == later
        assert "finished" in str(whole[-1])


async def test_a_run_that_was_deleted_is_read_from_no_page(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        await me.run_agent_tool(Kid, [["say", "secret"]], run_id="r")
        await me.durable()
        gone = cursor(test)
        assert "secret" in str(told(read(tree_of(test).streams, cursor(test))))
        await me.runs.clear()
        await test.advance(1)
        assert told(read(tree_of(test).streams, gone)) == []
        assert test.kernel.pages.size == 0
        await me.run_agent_tool(Kid, [["say", "other"]], run_id="r")
        await me.durable()
        assert "secret" not in str(told(read(tree_of(test).streams, cursor(test))))


async def test_pages_that_nobody_asks_for_are_kept_for_a_moment(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        await me.run_agent_tool(Kid, [["say", "x"]], run_id="r")
        await connect(test)
        await me.durable()
        await settle()
        assert test.kernel.pages.size > 0
        await test.advance(2 * test.kernel.limits.clock_check_s + 1)
        assert test.kernel.pages.size == 0
