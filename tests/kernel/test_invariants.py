"""Invariants that no other test of the kernel takes as its subject."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio

from culet.kernel import Agent, AgentToolRun, Chunk, Retry, Schedule, Turn, rpc
from culet.kernel.errors import CuletError
from culet.kernel.ports import TreeKey
from culet.kernel.testing import Harness, ScriptedChild, open_test_kernel
from kernel.agents import agent_at, rows, settle, tree_of
from kernel.peers import RecordingPeer, connect

CANARY = "the-quick-canary-sings-0123456789"
NOTES: list[Any] = []
COUNTS: list[
    int
] = []  # commits: when a run was asked for, on disk when its facet starts
PEERS: list[RecordingPeer] = []


@pytest.fixture(autouse=True)
def fresh() -> None:
    NOTES.clear()
    COUNTS.clear()
    PEERS.clear()


class Child(ScriptedChild):
    """Does what it is told."""


class Looks(Agent):
    """Whose start says what the rows say of its run, and takes a while."""

    resumable = True

    async def on_start(self) -> None:
        tree = self._node.tree
        COUNTS.append(tree.barrier.durable)
        NOTES.append(
            (
                rows(tree, "SELECT status FROM run WHERE id = ?", self.name),
                rows(tree, "SELECT begun FROM job WHERE what = ?", self.name),
                self._node.db.exists,
            )
        )
        await trio.sleep(5)

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        yield {"type": "text-delta", "id": "t", "delta": "a"}
        await trio.sleep(5)
        yield {"type": "text-delta", "id": "t", "delta": "b"}


class Whispers(Agent):
    """Reads its input, fails, and says nothing of it."""

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        assert CANARY in turn.input["secret"]
        yield {"type": "text-delta", "id": "t", "delta": "heard"}
        if turn.input["fail"]:
            raise ValueError("no")


class Top(Agent):
    hook = "fine"

    @rpc
    async def add(self, n: int) -> int:
        return n + 1

    @rpc
    async def echo(self, value: Any) -> Any:
        return value

    async def note(self, payload: Any, schedule: Schedule) -> None:
        NOTES.append(payload)

    async def fail(self, payload: Any, schedule: Schedule) -> None:
        raise ValueError("bad")

    async def slow(self, payload: Any, schedule: Schedule) -> None:
        NOTES.append((trio.current_time(), "in"))
        await trio.sleep(25)
        NOTES.append((trio.current_time(), "out"))

    async def on_agent_tool_start(self, run: AgentToolRun) -> None:
        shown = any("agent-tool-event" in str(peer.out) for peer in PEERS)
        NOTES.append(("start", run.run_id, run.status, shown))
        await self._hook()

    async def on_agent_tool_finish(self, run: AgentToolRun) -> None:
        NOTES.append(("finish", run.run_id, run.status))
        await self._hook()

    async def _hook(self) -> None:
        if self.hook == "raises":
            raise ValueError("in a hook")
        if self.hook == "hangs":
            await trio.sleep_forever()


def opened(**options: Any) -> Any:
    facets = [Child, Looks, Whispers]
    return open_test_kernel(roots=[Top], facets=facets, **options)


async def opened_top(test: Harness) -> Any:
    await test.kernel.get_agent(Top, "a")
    return agent_at(test)


def written(test: Harness) -> int:
    """Return how many commits the tree has made."""
    return tree_of(test).barrier.count


async def again(test: Harness) -> Any:
    await test.crash()
    await test.reopen()
    return await opened_top(test)


# ---- runs


@pytest.mark.rule("I-01", "I-12", "T-001", "T-061a")
async def test_the_row_of_a_run_is_durable_before_its_facet_is_opened(
    clock: object,
) -> None:
    async with opened() as test:
        me = await opened_top(test)
        test.kernel.subscribe("run:start", lambda *_: COUNTS.append(written(test)))
        await me.run_agent_tool(Looks, None, run_id="r", detached=True)
        await test.advance(1)
        asked, on_disk = COUNTS
        assert asked <= on_disk, "its code ran before its row was durable"
        assert NOTES == [
            ("start", "r", "running", False),
            ([("running",)], [(1,)], False),
        ]
        sql = "SELECT run.child, node.name FROM run JOIN node ON node.slot = run.child"
        child = rows(tree_of(test), sql)
        me = await again(test)  # in the middle of its first start
        assert me.runs.get("r").status == "running"
        await test.advance(7)
        me = await again(test)  # in the middle of its turn
        await test.advance(20)
        assert me.runs.get("r").status == "completed"
        assert rows(tree_of(test), sql) == child, "where it runs never changes"
        file = tree_of(test).store.agent(child[0][0])
        found = file.execute("SELECT stream, i FROM main.culet_entry ORDER BY i")
        assert {stream for stream, _i in found} == {"r"}
        assert [i for _stream, i in found] == list(range(len(found)))


@pytest.mark.rule("I-04", "F-13", "T-034")
async def test_nothing_ends_before_it_began_though_the_clock_goes_back(
    clock: object,
) -> None:
    async with opened() as test:
        me = await opened_top(test)
        await me.run_agent_tool(Child, [["sleep", 5]], run_id="r", detached=True)

        async def fn() -> None:
            await trio.sleep(5)

        await me.fibers.start("f", fn, fiber_id="f")
        await test.advance(1)
        test.clock.jump(-3600)
        assert me.runs.get("r").completed_at is None
        await test.advance(10)
        for ended in (me.runs.get("r"), me.fibers.inspect("f")):
            assert ended.status == "completed"
            assert ended.completed_at >= ended.started_at


@pytest.mark.rule("I-11", "F-53")
async def test_the_input_of_a_run_stays_with_its_facet(
    clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with opened() as test:
        me = await opened_top(test)
        peer = await connect(test)
        for fail in (False, True):
            value = {"secret": f"{CANARY} {fail}", "fail": fail}
            run = await me.run_agent_tool(Whispers, value, run_id=f"r{fail}")
            assert run.status == ("error" if fail else "completed")
        await test.advance(5)
        late = await connect(test, label="late")
        tree = tree_of(test)
        stored = [
            rows(tree, f"SELECT * FROM {t}") for t in ("run", "node", "job", "fiber")
        ]
        assert len(stored[0]) == 2
        for told in (stored, peer.out, late.out, NOTES, me.runs.list(), caplog.text):
            assert told
            assert CANARY[:16] not in str(told)
        assert all(
            len(str(r[0])) <= 1024 for r in rows(tree, "SELECT preview FROM run")
        )


@pytest.mark.rule("I-41", "F-21", "T-009", "T-100", "T-278", "T-280")
@pytest.mark.parametrize("hook", ["fine", "raises", "hangs"])
async def test_a_hook_hears_what_is_so_and_changes_nothing(
    hook: str, clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Top, "hook", hook)
    async with opened() as test:
        me = await opened_top(test)
        PEERS.append(await connect(test))
        run = await me.run_agent_tool(Child, [["say", "x"]], run_id="r")
        assert run.status == "completed"
        await test.advance(0.1)
        heard = [("start", "r", "running", False), ("finish", "r", "completed")]
        assert heard == NOTES, "and the first hook before any frame"
        assert me.runs.get("r") == run
        assert (await me.run_agent_tool(Child, [["say", "y"]])).status == "completed"
        me = await again(test)
        await test.advance(3000)
        assert me.runs.get("r") == run
        times = NOTES.count(("finish", "r", "completed"))
        assert (times == 1) if hook == "fine" else (times > 1), "owed until it was told"


# ---- time


def earliest(test: Harness) -> int | None:
    """The alarm slot by another way."""
    sql = "SELECT due_at, held, dead, paused FROM job"
    due = [at for at, *rest in rows(tree_of(test), sql) if rest == [None, 0, 0]]
    return min(due, default=None)


@pytest.mark.rule("I-30", "F-294", "F-300")
async def test_the_alarm_is_the_earliest_that_is_owed_at_any_time(
    clock: object,
) -> None:
    async with opened() as test:
        me = await opened_top(test)
        slots: list[int | None] = []

        async def check() -> None:
            await settle()
            tree = tree_of(test)
            slots.append(tree.jobs.slot())
            assert slots[-1] == earliest(test)
            await me.durable()
            (index,) = [e for e in test._store.roots() if e.key == TreeKey("Top", "a")]
            due = slots[-1]
            assert due is None or (index.due_at is not None and index.due_at <= due), (
                "a kernel that starts would sleep too long"
            )

        await check()
        far = await me.schedule(500, "note")
        await check()
        near = await me.schedule(100, "note")
        await check()
        me.schedules.pause(near.id)
        await check()
        me.schedules.resume(near.id)
        me.schedules.cancel(far.id)
        await check()
        bad = Retry(max_attempts=2, base_delay=10, max_delay=10)
        await me.schedule(1, "fail", retry=bad)
        await test.advance(2)
        await check()
        await test.advance(20)
        await check()
        me = await again(test)
        await check()
        await test.advance(200)
        await check()
        assert slots[0] is None
        assert slots[-1] is None, "what is dead wakes nobody"
        assert len(set(slots)) == 4


@pytest.mark.rule("I-33", "F-282")
async def test_one_schedule_is_never_called_beside_itself(clock: object) -> None:
    async with opened() as test:
        me = await opened_top(test)
        began = trio.current_time()
        made = await me.schedule_every(10, "slow")
        await test.advance(200)
        assert [what for _at, what in NOTES[:6]] == ["in", "out"] * 3
        times = [round(at - began, 1) for at, what in NOTES if what == "in"]
        assert times == [10.0, 40.0, 70.0, 100.0, 130.0, 160.0, 190.0], (
            "ticks that pass meanwhile are skipped, and the grid is kept"
        )
        assert me.schedules.get(made.id).due_at > test.clock.now_ms() - 25_000


# ---- fibers


@pytest.mark.rule("I-38", "F-328")
async def test_a_fiber_has_its_row_and_job_before_its_first_step(clock: object) -> None:
    async with opened() as test:
        me = await opened_top(test)
        tree = tree_of(test)
        fibers = "SELECT name, status FROM fiber"
        held = "SELECT kind, held IS NOT NULL FROM job"

        async def fn() -> None:
            NOTES.append((rows(tree, fibers), rows(tree, held)))
            await trio.sleep(5)

        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                with pytest.raises(CuletError):
                    await me.run_fiber("f", fn)

            nursery.start_soon(ask)
            await test.advance(1)
            assert NOTES == [([("f", "running")], [("fiber", 1)])]
            await test.crash()
        await test.reopen()
        await opened_top(test)
        tree = tree_of(test)
        assert len(rows(tree, "SELECT * FROM job WHERE kind = 'fiber'")) == len(
            rows(tree, "SELECT * FROM fiber WHERE status = 'running'")
        )
        await test.advance(5)
        assert rows(tree, fibers) == [("f", "interrupted")]
        assert rows(tree, held) == []


# ---- clients


@pytest.mark.rule("F-36", "I-45")
@pytest.mark.parametrize("method", ["add", "echo"])
@pytest.mark.parametrize(
    "value", ["9" * 1_000_000, "1e999", "[" * 400 + "]" * 400, '"\\ud800"', "-0", "1e9"]
)
async def test_a_call_with_an_odd_number_or_depth_is_answered(
    method: str, value: str, clock: object
) -> None:
    async with opened() as test:
        await opened_top(test)
        peer, other = await connect(test), await connect(test, label="other")
        call = f'{{"type":"rpc","id":"1","method":"{method}","args":[{value}]}}'
        peer.send(call)
        await settle()
        answers = [json.loads(f) for f in peer.out if '"rpc"' in str(f)]
        assert len(answers) == ("ud800" not in value), "half a letter is no call"
        for answer in answers:
            assert answer["id"] == "1"
            assert answer["success"] or answer["error"]
        assert peer.closed is None
        other.rpc("add", 1)
        await settle()
        (fine,) = [json.loads(f) for f in other.out if '"rpc"' in str(f)]
        assert (fine["success"], fine["result"]) == (True, 2)
