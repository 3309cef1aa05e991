"""Bounds of the kernel at their edge: what is at it passes, what is past it does not."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import trio

from culet.kernel import Agent, Chunk, Limits, Turn, rpc
from culet.kernel.core.run import cut_bytes, shape_preview
from culet.kernel.errors import CapacityError, EffectFailed, EffectUncertain
from culet.kernel.http import Request
from culet.kernel.testing import open_test_kernel
from kernel.agents import raises, settle, tree_of
from kernel.peers import RecordingPeer, connect, frames_of
from kernel.toolkit import Kid, forget, opened, say, top

HEARD: list[Any] = []
DOOR: list[trio.Event] = []


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    forget()
    HEARD.clear()
    DOOR[:] = [trio.Event()]
    yield


# ---- calls of one client


class Busy(Agent):
    @rpc
    async def hold(self, n: int) -> int:
        HEARD.append(n)
        await DOOR[0].wait()
        return n

    async def on_message(self, connection: Any, message: Any) -> None:
        HEARD.append(message)
        await DOOR[0].wait()


@pytest.mark.limit("rpc_per_connection")
@pytest.mark.rule("I-43")
@pytest.mark.parametrize("calls", [True, False], ids=["calls", "messages"])
async def test_no_more_calls_are_in_work_than_a_connection_may_have(
    calls: bool, clock: object
) -> None:
    """However many of them one read has brought."""
    limits = Limits(rpc_per_connection=3)
    async with open_test_kernel(roots=[Busy], limits=limits) as test:
        client = await connect(test, ("Busy", "a"))
        assert client.connection is not None
        with trio.fail_after(1):
            await client.connection.room()
        for n in range(8):
            if calls:
                client.rpc("hold", n, call=str(n))
            else:
                client.send(f"m{n}")
            if n == 1:
                with trio.fail_after(1):
                    await client.connection.room()
        await settle()
        assert len(HEARD) == 3
        with trio.move_on_after(1) as waiting:
            await client.connection.room()
        assert waiting.cancelled_caught, "nothing more is read meanwhile"
        DOOR[0].set()
        await settle()
        assert (list(range(8)) if calls else [f"m{n}" for n in range(8)]) == HEARD
        if calls:
            answers = [f for f in frames_of(client, "rpc") if f.get("success")]
            assert sorted(f["result"] for f in answers) == list(range(8))
        with trio.fail_after(1):
            await client.connection.room()


# ---- sizes


def json_of(size: int) -> str:
    """A text whose JSON has so many bytes."""
    return "x" * (size - 2)


@pytest.mark.limit("input_bytes")
async def test_an_input_and_a_payload_have_input_bytes(clock: object) -> None:
    class Plans(Kid):
        async def heard(self, payload: Any, schedule: Any = None) -> None:
            HEARD.append(len(payload))

        async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
            yield say("x")

    async with opened(Plans, root=Plans, limits=Limits(input_bytes=100)) as test:
        me = await top(test, Plans)
        fits, more = json_of(100), json_of(101)
        assert (await me.run_agent_tool(Plans, fits, run_id="a")).status == "completed"
        await raises(CapacityError, lambda: me.run_agent_tool(Plans, more, run_id="b"))
        assert me.runs.get("b") is None
        await me.schedule(1, "heard", fits)
        await raises(CapacityError, me.schedule, 1, "heard", more)
        me.queue.put("heard", fits)
        with pytest.raises(CapacityError):
            me.queue.put("heard", more)
        await test.advance(2)
        assert HEARD == [98, 98]


@pytest.mark.limit("shown_bytes")
@pytest.mark.parametrize("what", ["input_preview", "display"])
async def test_what_a_caller_gives_to_be_shown_has_shown_bytes(
    what: str, clock: object
) -> None:
    async with opened(limits=Limits(shown_bytes=100)) as test:
        me = await top(test)
        fits, more = {"t": json_of(94)}, {"t": json_of(95)}
        run = await me.run_agent_tool(Kid, [], run_id="a", **{what: fits})
        assert run.status == "completed"
        await raises(
            CapacityError,
            lambda: me.run_agent_tool(Kid, [], run_id="b", **{what: more}),
        )
        assert me.runs.get("b") is None


@pytest.mark.limit("preview_bytes")
async def test_the_preview_of_an_input_has_preview_bytes(clock: object) -> None:
    value = [{"key": n} for n in range(6)]
    whole = shape_preview(value, 10_000)
    size = len(json.dumps(whole, separators=(",", ":")))
    assert shape_preview(value, size) == whole
    assert shape_preview(value, size - 1) != whole
    steps = [["say", "x"]] * 9
    shown = []
    for most in (10_000, 20):
        async with opened(limits=Limits(preview_bytes=most)) as test:
            me = await top(test)
            run = await me.run_agent_tool(Kid, steps, run_id="a")
            shown.append(run.preview)
    assert shown == [shape_preview(steps, 10_000), shape_preview(steps, 20)]
    assert shown[0] != shown[1]


@pytest.mark.limit("summary_bytes")
@pytest.mark.parametrize("letter", ["x", "☃"], ids=["ascii", "wide"])
@pytest.mark.parametrize("ends", ["completed", "error"])
async def test_a_summary_has_summary_bytes(
    letter: str, ends: str, clock: object
) -> None:
    size = len(letter.encode())
    async with opened(limits=Limits(summary_bytes=30)) as test:
        me = await top(test)
        last = [["fail", "no"]] if ends == "error" else []
        for count, kept in ((30 // size, 30 // size), (30 // size + 1, 30 // size)):
            script = [["say", letter * count], *last]
            run = await me.run_agent_tool(Kid, script, run_id=f"r{count}")
            assert run.status == ends
            assert run.summary == letter * kept


def test_a_text_is_cut_between_its_letters() -> None:
    assert [cut_bytes("aé☃", n) for n in range(7)] == [
        "", "a", "a", "aé", "aé", "aé", "aé☃",
    ]  # fmt: skip


@pytest.mark.limit("body_bytes")
async def test_a_body_is_read_up_to_the_bound_that_it_came_with() -> None:
    async def body() -> AsyncIterator[bytes]:
        for _ in range(17):
            yield bytes(1 << 20)

    large = Request("POST", "/", body=body, body_bytes=17 << 20)
    assert len(await large.replace(path="/x").read()) == 17 << 20
    for options in ({}, {"body_bytes": (17 << 20) - 1}):
        with pytest.raises(CapacityError):
            await Request("POST", "/", body=body, **options).read()


@pytest.mark.limit("staged_bytes")
async def test_a_turn_waits_when_so_much_of_it_is_not_stored(clock: object) -> None:
    most: list[int] = []

    class Flood(Kid):
        async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
            for _ in range(100):
                yield say("x" * 70)

    async with opened(
        Flood, limits=Limits(staged_bytes=1000, batch_chunks=10_000, slice_s=1000)
    ) as test:
        me = await top(test)
        tree = tree_of(test)

        class Look(trio.abc.Instrument):
            def after_task_step(self, task: object) -> None:
                streams = tree.streams._open.values()
                most.append(max((s.staged_bytes for s in streams), default=0))

        watch = Look()
        trio.lowlevel.add_instrument(watch)
        run = await me.run_agent_tool(Flood, None, run_id="r")
        trio.lowlevel.remove_instrument(watch)
    assert run.status == "completed"
    one = 120  # a chunk, as JSON, at most
    assert 1000 <= max(most) < 1000 + one


# ---- runs


@pytest.mark.limit("chunk_bytes")
@pytest.mark.parametrize("more", [0, 1])
async def test_a_chunk_has_chunk_bytes(more: int, clock: object) -> None:
    size = 200
    text = "x" * (size - len(json.dumps(say(""), separators=(",", ":"))) + more)

    class Says(Kid):
        async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
            yield say("a")
            yield say(text)

    async with opened(Says, limits=Limits(chunk_bytes=size)) as test:
        run = await (await top(test)).run_agent_tool(Says, None, run_id="r")
        assert run.status == ("error" if more else "completed")
        assert run.summary == "a" + ("" if more else text)
        assert (f"the limit is {size}" in (run.error or "")) is bool(more)


@pytest.mark.limit("retained_runs")
async def test_of_many_runs_so_many_are_listed_and_replayed(clock: object) -> None:
    async with opened(limits=Limits(retained_runs=3)) as test:
        me = await top(test)
        for number in range(3):
            await me.run_agent_tool(Kid, [["say", "x"]], run_id=f"r{number}")
        assert len(me.runs.list()) == 3
        await me.run_agent_tool(Kid, [["say", "x"]], run_id="r3")
        first = me.runs.list(limit=100)
        assert [r.run_id for r in first] == ["r0", "r1", "r2"]
        assert [r.run_id for r in me.runs.list(after="r2")] == ["r3"]
        client = await connect(test)
        await settle()
        shown = {f["event"]["runId"] for f in frames_of(client, "agent-tool-event")}
        assert shown == {"r1", "r2", "r3"}, "the newest"


@pytest.mark.limit("start_attempts")
async def test_a_child_that_cannot_start_is_tried_start_attempts_times(
    clock: object,
) -> None:
    class Never(Kid):
        async def on_start(self, props: Any = None) -> None:
            HEARD.append("start")
            raise ValueError("no")

    for most in (1, 4):
        HEARD.clear()
        limits = Limits(start_attempts=most, restart_attempts=100)
        async with opened(Never, limits=limits) as test:
            me = await top(test)
            run = await me.run_agent_tool(Never, [], run_id="r")
            assert (run.status, run.reason) == ("error", "start-failed")
            assert len(HEARD) == most


# ---- effects


class Shop(Agent):
    async def buy(self, result: Any, key: str, how: str = "ask") -> Any:
        async def pay() -> Any:
            HEARD.append((key, trio.current_time()))
            if isinstance(result, Exception):
                raise result
            return result

        return await self.effects.call("pay", pay, key=key, on_uncertain=how)  # type: ignore[arg-type]


def shop(**limits: Any) -> Any:
    return open_test_kernel(roots=[Shop], limits=Limits(**limits))


async def owner(test: Any) -> Any:
    await test.kernel.get_agent(Shop, "a")
    return test.find([("Shop", "a")]).agent


@pytest.mark.limit("effect_bytes")
async def test_a_result_of_an_effect_has_effect_bytes(clock: object) -> None:
    async with shop(effect_bytes=100) as test:
        me = await owner(test)
        assert await me.buy(json_of(100), "fits") == json_of(100)
        with pytest.raises(EffectFailed, match="has 101 bytes, at most 100"):
            await me.buy(json_of(101), "more")
        assert [e.key for e in me.effects.list()] == ["fits", "more"]


@pytest.mark.limit("effect_error_chars")
async def test_an_error_of_an_effect_has_effect_error_chars(clock: object) -> None:
    async with shop(effect_error_chars=40) as test:
        me = await owner(test)
        for size in (10, 200):
            with pytest.raises(EffectFailed):
                await me.buy(ValueError("y" * size), f"k{size}")
        short, long = (str(e.error) for e in me.effects.list())
        assert short.endswith("y" * 10)
        assert len(long) == 40


@pytest.mark.limit("effect_attempts", "backoff_base_s", "backoff_max_s")
async def test_an_effect_is_repeated_effect_attempts_times_with_growing_rests(
    clock: object,
) -> None:
    async with shop(effect_attempts=5, backoff_base_s=2.0, backoff_max_s=7.0) as test:
        me = await owner(test)
        with trio.move_on_after(1000):
            await me.buy(EffectUncertain("no answer"), "k", "repeat")
        at = [when for _key, when in HEARD]
        rests = [round(b - a, 3) for a, b in itertools.pairwise(at)]
        assert len(at) == 5
        assert rests == [2.0, 4.0, 7.0, 7.0]
        (doubt,) = me.effects.list(uncertain=True)
        assert doubt.status == "asked", "then a person decides"


# ---- waking


@pytest.mark.limit("waking_roots")
async def test_of_many_roots_that_are_due_so_many_are_opened_at_once(
    clock: object,
) -> None:
    class Sleeper(Agent):
        async def tick(self, payload: Any, schedule: Any) -> None:
            HEARD.append(self.name)

    async with open_test_kernel(roots=[Sleeper], limits=Limits(waking_roots=3)) as test:
        for name in "abcdefgh":
            await test.kernel.get_agent(Sleeper, name)
            agent = test.find([("Sleeper", name)]).agent  # type: ignore[union-attr]
            await agent.schedule(100, "tick")
            await agent.durable()
        await test.crash()
        await test.reopen()
        most = 0

        class Look(trio.abc.Instrument):
            def after_task_step(self, task: object) -> None:
                nonlocal most
                most = max(most, len(test.kernel.host.waking))

        watch = Look()
        trio.lowlevel.add_instrument(watch)
        await test.advance(200)
        trio.lowlevel.remove_instrument(watch)
        assert sorted(HEARD) == list("abcdefgh")
        assert most == 3


# ---- pages


@pytest.mark.limit("replay_page_bytes")
async def test_a_page_of_replay_ends_at_replay_page_bytes(clock: object) -> None:
    async with opened(limits=Limits(replay_page_bytes=1000)) as test:
        me = await top(test)
        await me.run_agent_tool(Kid, [["say", "x" * 50]] * 40, run_id="r")
        pages: list[int] = []
        largest = 0

        class Pages(RecordingPeer):
            def wake(self) -> None:
                nonlocal largest
                while self.connection is not None and not self._held:
                    blob = self.connection.pull()
                    if blob is None:
                        return
                    self.out += blob.texts
                    sizes = [len(text) for text in blob.texts]
                    pages.append(sum(sizes))
                    largest = max(largest, *sizes)

        client = await connect(test, peer=Pages)
        await settle()
        assert len(frames_of(client, "agent-tool-event")) == 42
        assert all(1000 <= size < 1000 + largest for size in pages[:-1])
        assert len(pages) > 5


@pytest.mark.limit("feed_bytes")
async def test_a_page_of_a_feed_has_feed_bytes_of_bodies(clock: object) -> None:
    async with opened(limits=Limits(feed_bytes=400)) as test:
        me = await top(test)
        await me.run_agent_tool(Kid, [["say", "x" * 90]] * 20, run_id="r")
        await me.durable()
        feed = me.runs.feed()
        most = 0
        seen = 0
        async for entry in feed:
            seen += 1
            page = [entry, *feed._page]
            bodies = [json.loads(e.text)["event"].get("body", "") for e in page]
            most = max(most, sum(map(len, bodies)))
        assert seen == 22
        assert 250 < most <= 400


# ---- time


@pytest.mark.limit("clock_check_s")
async def test_a_clock_that_was_set_is_seen_within_clock_check_s(
    clock: object,
) -> None:
    class Late(Agent):
        async def tick(self, payload: Any, schedule: Any) -> None:
            HEARD.append(trio.current_time())

    limits = Limits(clock_check_s=10)
    async with open_test_kernel(roots=[Late], limits=limits) as test:
        await test.kernel.get_agent(Late, "a")
        agent = test.find([("Late", "a")]).agent  # type: ignore[union-attr]
        await agent.schedule(3600, "tick")
        await test.advance(1)
        start = trio.current_time()
        test.clock.jump(3600)
        await test.advance(12)
        assert 5 < HEARD[0] - start <= 10, "at the next look, not before"


@pytest.mark.limit("revoke_s")
async def test_who_is_let_go_of_and_does_not_close_is_dropped_after_revoke_s(
    clock: object,
) -> None:
    class Stubborn(RecordingPeer):
        asked: tuple[int, str] | None = None

        def close(self, code: int, reason: str, stamp: int) -> None:
            self.asked = (code, reason)

    async with opened(limits=Limits(revoke_s=5)) as test:
        await top(test)
        meant = await connect(test, peer=Stubborn, identity="u")
        other = await connect(test, label="o", identity="v")
        assert test.kernel.revoke("u") == 1
        assert isinstance(meant, Stubborn)
        assert meant.asked is not None
        await trio.sleep(4.9)
        assert meant.closed is None
        await trio.sleep(0.2)
        assert meant.closed is not None
        assert meant.closed[0] == 1006
        assert other.closed is None


# ---- ledgers


@pytest.mark.limit("effect_tools")
async def test_of_settled_tool_calls_effect_tools_stay_listed(clock: object) -> None:
    async with shop(effect_tools=5) as test:
        me = await owner(test)
        tree = tree_of(test, "Shop")
        sql = (
            "INSERT INTO effect (owner, kind, name, key, digest, policy, attempt,"
            " status, began_at, settled_at)"
            " VALUES (?, 'tool', 't', ?, '', 'ask', 1, 'completed', ?, ?)"
        )
        with tree.transaction():
            for n in range(9):
                tree.db.execute(sql, (tree.root_slot, str(n), n, n))
        for n in range(20):  # now and then it is looked at
            await me.buy(n, f"k{n}")
        left = tree.db.execute("SELECT key FROM effect WHERE kind = 'tool' ORDER BY 1")
        assert [key for (key,) in left] == ["4", "5", "6", "7", "8"]
