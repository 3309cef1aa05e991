"""Code of agents that holds the loop, floods, or leaves a thread behind."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from culet.kernel import Agent, Chunk, Limits, Schedule, Turn, open_kernel
from culet.kernel.core.limits import DEFAULT
from culet.kernel.errors import CuletError, FacetAborted
from kernel.agents import tree_of
from kernel.toolkit import Kid, frames, opened, say, top

TOLD = threading.Event()
FIRED: list[str] = []


class Told(logging.Handler):
    """Hears the watch, on its own thread, while the loop is held."""

    def emit(self, record: logging.LogRecord) -> None:
        """Note what is said."""
        if "nothing else has run" in record.getMessage():
            TOLD.set()


@pytest.fixture
def heard() -> Iterator[None]:
    handler = Told()
    logging.getLogger("culet.kernel").addHandler(handler)
    TOLD.clear()
    FIRED.clear()
    yield
    logging.getLogger("culet.kernel").removeHandler(handler)


class Hog(Agent):
    """Holds the loop, until the log has said so."""

    async def hold_on(self) -> bool:
        return TOLD.wait(30)

    async def soon(self, n: int) -> None:
        for i in range(n):
            await self.schedule(0.01, "fire", str(i))

    async def fire(self, payload: str, schedule: Schedule) -> None:
        FIRED.append(payload)

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        yield say("a")
        await trio.sleep(0.05)
        yield say("b")

    async def run(self) -> str:
        return (await self.run_agent_tool(Hog, None)).status


@pytest.mark.limit("stall_s")
@pytest.mark.rule("F-16", "F-24", "I-45")
@pytest.mark.gap("an agent holds the loop, on purpose")
@pytest.mark.usefixtures("heard")
async def test_who_holds_the_loop_is_named_in_the_log_and_nothing_is_lost_by_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limits = Limits(stall_s=0.1)
    async with open_kernel(
        roots=[Hog], facets=[Hog], storage=f"sqlite:{tmp_path}", limits=limits
    ) as kernel:
        hog, other = [await kernel.get_agent(Hog, name) for name in ("a", "b")]
        statuses: list[str] = []

        async def run() -> None:
            statuses.append(await other.run())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await other.soon(5)
            assert await hog.hold_on(), "the log said nothing while the loop was held"
            with trio.fail_after(20):
                while len(FIRED) < 5:
                    await trio.sleep(0.01)
        assert statuses == ["completed"], "no healthy run was taken for dead"
        assert sorted(FIRED) == list("01234"), "what was due meanwhile comes once"
        (told,) = [r for r in caplog.records if "nothing else has run" in r.message]
        assert "hold_on" in told.getMessage(), "the stack of the culprit"
        assert told.threadName == "culet stall watch"


@pytest.mark.limit("stall_s")
@pytest.mark.gap("an agent holds the loop, on purpose")
@pytest.mark.usefixtures("heard")
async def test_a_loop_that_comes_round_is_not_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with open_kernel(roots=[Hog], limits=Limits(stall_s=30.0)) as kernel:
        hog: Any = await kernel.get_agent(Hog, "a")
        await hog.soon(1)
        with trio.fail_after(20):
            while not FIRED:
                await trio.sleep(0.01)
    assert not TOLD.is_set()
    names = {thread.name for thread in threading.enumerate()}
    assert "culet stall watch" not in names, "its thread ends with the kernel"


class Threaded(Agent):
    """Hands its own handle to a thread that outlives it."""

    async def hand_out(self) -> None:
        agent, go = self, self.props_of["go"]
        said: list[BaseException | None] = self.props_of["said"]
        self.sql("CREATE TABLE t (v TEXT)")

        def outlive() -> None:
            assert go.wait(30)
            for act in (
                lambda: agent.sql("INSERT INTO t VALUES ('late')"),
                lambda: agent.set_state({"late": True}),
                lambda: agent.broadcast("late"),
            ):
                try:
                    act()
                    said.append(None)
                except BaseException as error:
                    said.append(error)

        self.props_of["threads"].append(threading.Thread(target=outlive))
        self.props_of["threads"][-1].start()

    async def rows(self) -> int:
        return int(self.sql("SELECT count(*) AS n FROM t")[0].n)

    props_of: dict[str, Any] = {}


@pytest.mark.rule("F-25", "I-24")
@pytest.mark.parametrize("how", ["abort", "delete"])
async def test_a_thread_that_outlives_its_agent_can_change_nothing(
    how: str, clock: object
) -> None:
    go, said, threads = threading.Event(), list[Any](), list[threading.Thread]()
    Threaded.props_of = {"go": go, "said": said, "threads": threads}
    async with opened(Threaded) as test:
        me = await top(test)
        kid = await me.dynamic_agents.get(Threaded, "k")
        await kid.hand_out()
        if how == "abort":
            await me.dynamic_agents.abort(Threaded, "k")
        else:
            await me.dynamic_agents.delete(Threaded, "k")
        await me.durable()
        commits = tree_of(test).store.commits
        go.set()
        for thread in threads:
            thread.join(30)
        assert len(said) == 3
        assert all(isinstance(e, (CuletError, RuntimeError)) for e in said), said
        assert isinstance(said[0], FacetAborted)
        assert tree_of(test).store.commits == commits, "not one commit"
        if how == "abort":
            kid = await me.dynamic_agents.get(Threaded, "k")
            assert await kid.rows() == 0


FLOOD = 20_000


class Flood(Kid):
    """Says a great many small things, or reports progress without end."""

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        if turn.input == "progress":
            for i in range(FLOOD):
                await self.report_progress(fraction=i / FLOOD, message=str(i))
                if i % 100 == 0:
                    await trio.lowlevel.checkpoint()
            yield say("over")
            return
        for i in range(FLOOD):
            yield say(str(i % 10))


@pytest.mark.limit("batch_chunks")
@pytest.mark.rule("F-29", "I-14")
async def test_a_flood_of_chunks_waits_for_the_disk_and_is_replayed_whole(
    clock: object,
) -> None:
    most = 0
    async with opened(Flood) as test:
        me = await top(test)
        tree = tree_of(test)

        def look(*_event: object) -> None:
            nonlocal most
            for stream in tree.streams._open.values():
                most = max(most, len(stream.staged))

        class Look(trio.abc.Instrument):
            def after_task_step(self, task: object) -> None:
                look()

        watch = Look()
        trio.lowlevel.add_instrument(watch)
        run = await me.run_agent_tool(Flood, "chunks", run_id="r")
        trio.lowlevel.remove_instrument(watch)
        assert run.status == "completed"
        assert 0 < most <= DEFAULT.batch_chunks
        found = await frames(me, "r")
    assert [f["sequence"] for f in found] == list(range(FLOOD + 2))
    said = "".join(json.loads(f["event"]["body"])["delta"] for f in found[1:-1])
    assert said == "0123456789" * (FLOOD // 10)


@pytest.mark.rule("F-29", "I-20")
async def test_a_flood_of_progress_is_a_frame_now_and_then_and_the_last(
    clock: object,
) -> None:
    async with opened(Flood) as test:
        me = await top(test)
        started = trio.current_time()
        run = await me.run_agent_tool(Flood, "progress", run_id="r")
        took = trio.current_time() - started
        assert run.status == "completed"
        found = await frames(me, "r")
        reported = [f for f in found if '"data-agent' in json.dumps(f)]
    assert 1 <= len(reported) <= took / DEFAULT.progress_s + 2
    assert str(FLOOD - 1) in json.dumps(reported[-1]), "the last one is always kept"
