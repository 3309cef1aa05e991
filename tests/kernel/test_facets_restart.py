"""What sleep, abort, crash and kill leave: rows and sockets stay, memory begins anew."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import apsw
import pytest
import trio

from culet.kernel import (
    Agent,
    Budget,
    ConnectContext,
    Connection,
    FiberRecovery,
    FiberResolution,
    Response,
    Schedule,
    rpc,
)
from culet.kernel.errors import (
    FacetAborted,
    FacetBroken,
    SchemaTooNew,
    StorageError,
)
from culet.kernel.ports import TreeKey
from culet.kernel.testing import Harness, ScriptedChild, open_test_kernel
from culet.storage.connection import migrate
from kernel.agents import agent_at, node_at, raises, rows, settle, tree_of
from kernel.peers import come, connect, frames_of

NOTES: list[Any] = []
FAIL: list[
    Any
] = []  # how many of the next starts fail; "hang": those of that name hang
ROOT, KID = ("Top", "a"), ("Kid", "k")


@pytest.fixture(autouse=True)
def fresh() -> None:
    NOTES.clear()
    FAIL.clear()


class Kid(Agent):
    initial_state = {"n": 0}

    def __init__(self) -> None:
        self.field = "new"

    async def on_start(self) -> None:
        NOTES.append(f"{self.name} starts")
        if self.name.startswith("hangs") and "hang" in FAIL:
            await trio.sleep_forever()
        if self.name.startswith("slow"):
            await trio.sleep(1)
        if FAIL and isinstance(FAIL[0], int):
            FAIL[0] -= 1
            if FAIL[0] >= 0:
                raise ValueError("not yet")
        NOTES.append(f"{self.name} started")

    def should_connection_be_readonly(
        self, connection: Connection, ctx: ConnectContext
    ) -> bool:
        return bool(ctx.identity == "reader")

    def get_connection_tags(
        self, connection: Connection, ctx: ConnectContext
    ) -> list[str]:
        return ["tagged"]

    async def on_message(self, connection: Connection, message: str | bytes) -> None:
        NOTES.append(message)

    async def on_request(self, request: Any) -> Response:
        return Response("here")

    @rpc
    async def ping(self) -> str:
        NOTES.append("ping")
        return self.field

    async def set_field(self, value: str) -> None:
        self.field = value
        self.set_state({"n": 1})

    async def every(self, seconds: float) -> None:
        await self.schedule_every(seconds, "due", self.name)

    async def once(self, seconds: float) -> None:
        await self.schedule(seconds, "due", self.name, idempotent=True)

    async def due(self, payload: Any, schedule: Schedule) -> None:
        NOTES.append(f"due {payload}")

    async def fiber(self) -> None:
        await self.run_fiber("unmanaged", self._steps)

    async def managed(self) -> None:
        await self.fibers.start("managed", self._steps, fiber_id="m")

    async def _steps(self) -> None:
        self.stash({"at": 1})
        await trio.sleep_forever()

    async def on_fiber_recovered(self, ctx: FiberRecovery) -> FiberResolution:
        NOTES.append((ctx.name, ctx.snapshot, self.field, self.name))
        return FiberResolution(result=None)

    async def hold(self) -> None:
        async with self.keep_alive():
            await trio.sleep_forever()


class Top(Kid):
    async def make(self, name: str) -> None:
        await self.dynamic_agents.get(Kid, name)

    async def abort(self, name: str) -> None:
        await self.dynamic_agents.abort(Kid, name)

    async def delete(self, name: str) -> None:
        await self.dynamic_agents.delete(Kid, name)

    async def run(self, run_id: str) -> str:
        script = [["say", "x"], ["stash", 1], ["sleep", 1000]]
        return (
            await self.run_agent_tool(
                ScriptedChild, script, run_id=run_id, detached=True
            )
        ).run_id


class Busy(Kid):
    """Has something in every table."""

    async def fill(self) -> None:
        await (await self.dynamic_agents.get(Busy, "below")).once(1000)
        await self.once(1000)
        self.queue.put("due", "queued")
        await self.fibers.start("f", self._steps, fiber_id="f")
        script = [["say", "x"], ["sleep", 1000]]
        for _ in range(2):
            run = await self.run_agent_tool(
                ScriptedChild, script, detached=True, budget=Budget(tokens=9)
            )
            await self.runs.send(run.run_id, "hello")
        await self.effects.call("pay", trio.lowlevel.checkpoint, key="k")
        await self.run_agent_tool(ScriptedChild, [["say", "x"]])
        await self.runs.clear(status="completed")


def opened(**options: Any) -> Any:
    facets = [Kid, Busy, ScriptedChild]
    return open_test_kernel(roots=[Top, Busy], facets=facets, **options)


async def at(test: Harness, *names: str) -> Any:
    """Return a stub of the root, or of one of its facets."""
    root = await test.kernel.get_agent(Top, "a")
    return await test.kernel.get_sub_agent(root, Kid, names[0]) if names else root


async def end_life(test: Harness, how: str) -> None:
    """End what is in memory of Top/a/Kid/k: crash, abort, or sleep."""
    await tree_of(test).durable()
    if how == "crash":
        await test.crash()
        await test.reopen()
    elif how == "abort":
        await (await at(test)).abort("k")
    else:
        await test.evict([ROOT, KID])


# ---- memory is new, rows stay


@pytest.mark.rule("F-237")
async def test_a_facet_sleeps_while_its_root_wakes_and_falls_with_it(
    clock: object,
) -> None:
    async with opened() as test:
        root, kid = await at(test), await at(test, "k")
        await root.set_field("root's")
        await kid.set_field("kid's")
        peer = await connect(test, ROOT, KID)
        assert peer.connection is not None
        peer.connection.set_state("kept")
        await settle()
        await test.evict([ROOT, KID])
        assert (await root.ping(), await kid.ping()) == ("root's", "new")
        await kid.set_field("kid's")
        await settle()
        assert not await tree_of(test).evict(node_at(test)), "it has a child awake"
        for node in (node_at(test, KID), node_at(test)):
            assert await tree_of(test).evict(node)
        assert (await kid.ping(), await root.ping()) == ("new", "new")
        assert agent_at(test, KID).state == agent_at(test).state == {"n": 1}
        (found,) = agent_at(test, KID).sockets.list()
        assert found is peer.connection
        assert (found.state, found.gone) == ("kept", False)


@pytest.mark.rule("F-238", "F-240", "F-241")
@pytest.mark.parametrize("how", ["crash", "abort"])
async def test_a_forced_end_keeps_state_schedules_and_fibers(
    how: str, clock: object
) -> None:
    """Recovery comes after the start, so what `on_start` sets up is there for it."""
    async with opened() as test:
        kid = await at(test, "k")
        await kid.set_field("old")
        await kid.every(60)
        async with trio.open_nursery() as nursery:

            async def fiber() -> None:
                with suppress(FacetAborted, StorageError):
                    await kid.fiber()

            nursery.start_soon(fiber)
            await kid.managed()
            await test.advance(1)
            NOTES.clear()
            await end_life(test, how)
        await test.advance(70)
        told = sorted(n for n in NOTES if isinstance(n, tuple))
        assert told == [
            ("managed", {"at": 1}, "new", "k"), ("unmanaged", {"at": 1}, "new", "k"),
        ]  # fmt: skip
        assert NOTES.count("due k") == 1, "and the interval goes on as it was"
        first = next(i for i, n in enumerate(NOTES) if isinstance(n, tuple))
        assert NOTES.index("k started") < first, "recovery meets an agent that is ready"
        await test.advance(60)
        assert NOTES.count("due k") == 2
        kid = await at(test, "k")
        assert agent_at(test, KID).state == {"n": 1}
        assert await kid.ping() == "new"


@pytest.mark.rule("F-239")
def test_a_killed_process_goes_on_with_a_facets_fiber_by_itself(tmp_path: Path) -> None:
    script = str(Path(__file__).with_name("killed_fiber.py"))
    begin = [sys.executable, script, str(tmp_path / "data"), "begin"]
    with subprocess.Popen(begin, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "in it\n"
        os.kill(first.pid, signal.SIGKILL)
        assert first.wait() == -signal.SIGKILL
    again = [*begin[:-1], "recover"]
    second = subprocess.run(
        again, capture_output=True, text=True, timeout=60, check=True
    )
    assert second.stdout == "started ['a'] k long {'page': 7}\n"


@pytest.mark.rule("F-244")
async def test_what_a_connection_has_outlives_its_agent_in_memory(
    clock: object,
) -> None:
    async with opened() as test:
        await at(test, "k")
        peer = await connect(test, ROOT, KID, label="l", identity="reader")
        conn = peer.connection
        assert conn is not None
        conn.set_state({"seen": 3})
        await settle()
        before = (conn.uri, conn.tags, conn.state, conn.readonly, conn.protocol)
        agent_at(test, KID).field = "old"
        await test.evict([ROOT, KID])
        await at(test, "k")
        (found,) = agent_at(test, KID).sockets.list("tagged")
        after = (found.uri, found.tags, found.state, found.readonly, found.protocol)
        assert after == before
        assert after[1:] == (("l", "tagged"), {"seen": 3}, True, True)
        assert agent_at(test, KID).field == "new"


@pytest.mark.rule("F-245")
@pytest.mark.parametrize("how", ["crash", "abort"])
async def test_a_keep_alive_dies_with_its_node_and_rows_do_not(
    how: str, clock: object
) -> None:
    async with opened() as test:
        root, kid = await at(test), await at(test, "k")
        await kid.once(1000)
        await root.run("r")
        async with trio.open_nursery() as nursery:

            async def hold() -> None:
                with suppress(FacetAborted, StorageError):
                    await kid.hold()

            nursery.start_soon(hold)
            await test.advance(1)
            assert node_at(test, KID).refs == 1
            await end_life(test, how)
        kid = await at(test, "k")
        assert node_at(test, KID).refs == 0
        await test.evict([ROOT, KID])
        tree = tree_of(test)
        owed = rows(tree, "SELECT kind, what FROM job ORDER BY kind")
        assert owed == [("call", "due"), ("turn", "r")]
        assert rows(tree, "SELECT id, status FROM run") == [("r", "running")]


@pytest.mark.rule("F-247")
async def test_whatever_the_index_says_a_start_finds_what_is_owed(
    clock: object,
) -> None:
    """The alarm is computed from the rows: there is no copy of it that could be lost."""
    async with opened() as test:
        kid = await at(test, "k")
        await kid.every(60)
        await kid.once(100)
        await test.evict([ROOT])
        key = TreeKey("Top", "a")
        test.kernel.store.note_root(key, None)
        test.kernel.host.sleeping[key] = None
        await test.advance(200)
        assert "due k" not in NOTES, "nobody knows of it"
        await at(test)
        await test.advance(1)
        assert NOTES.count("due k") == 2, "the interval once, the single one once"
        await (await at(test, "k")).every(60)
        await test.advance(60)
        assert NOTES.count("due k") == 3


# ---- starting


@pytest.mark.rule("F-242", "F-106")
@pytest.mark.parametrize("first", ["frames", "calls"])
async def test_whatever_comes_waits_for_the_start(first: str, clock: object) -> None:
    async with opened() as test:
        slow = ("Kid", "slow")
        await at(test)
        kid = await at(test, "slow")
        peer = await connect(test, ROOT, slow)
        await settle()
        await test.evict([ROOT, slow])
        NOTES.clear()
        async with trio.open_nursery() as nursery:

            def frames() -> None:
                peer.send("message")
                peer.rpc("ping")

            def calls() -> None:
                nursery.start_soon(at, test, "slow")
                nursery.start_soon(kid.ping)
                nursery.start_soon(come, test, ROOT, slow)

            for come_now in (frames, calls) if first == "frames" else (calls, frames):
                come_now()
                await test.advance(0.3)
                assert NOTES == ["slow starts"]
            await test.advance(1)
        assert NOTES[:2] == ["slow starts", "slow started"]
        assert sorted(NOTES[2:]) == ["message", "ping", "ping"]


@pytest.mark.rule("F-242", "F-243")
async def test_a_start_that_fails_is_told_to_its_callers_and_tried_again(
    clock: object,
) -> None:
    async with opened() as test:
        root = await at(test)
        await at(test, "k")
        peer = await connect(test, ROOT, KID)
        await settle()
        await test.evict([ROOT, KID])
        FAIL[:] = [3]
        error = await raises(FacetBroken, root.make, "k")
        assert isinstance(error.__cause__, ValueError)
        answer = await come(test, ROOT, KID)
        assert isinstance(answer, Response)
        assert answer.status == 503
        peer.send("who waits for it")
        await test.advance(1)
        assert peer.closed is not None
        assert peer.closed[0] == 1011, "a code with which clients come back"
        assert await (await at(test, "k")).ping() == "new"
        again = await connect(test, ROOT, KID)
        again.rpc("ping")
        await settle()
        assert frames_of(again, "rpc")[0]["result"] == "new"
        assert NOTES.count("k starts") == 5


@pytest.mark.rule("F-248")
async def test_a_start_that_hangs_holds_up_neither_root_nor_siblings(
    clock: object,
) -> None:
    async with opened(start_s=1000) as test:
        for name in ("hangs1", "fine", "hangs2", "good"):
            await (await at(test, name)).once(10)
        await (await at(test)).once(10)
        await tree_of(test).durable()
        await test.crash()
        FAIL[:] = ["hang"]
        NOTES.clear()
        await test.reopen()
        began = trio.current_time()
        root = await at(test)
        assert await root.ping() == "new"
        assert trio.current_time() - began < 0.1
        await test.advance(11)
        assert {n for n in NOTES if n.startswith("due")} == {
            "due fine",
            "due good",
            "due a",
        }
        assert {"hangs1 starts", "hangs2 starts"} <= set(NOTES)
        await (await at(test)).make("another")


# ---- schemas


STEPS = (
    "CREATE TABLE one (v)",
    "CREATE TABLE two (v); INSERT INTO two SELECT v FROM one",
    "ALTER TABLE two ADD COLUMN w",
)


def tables(db: apsw.Connection) -> list[str]:
    return [r[0] for r in db.execute("SELECT sql FROM sqlite_schema ORDER BY name")]


@pytest.mark.rule("F-249")
def test_a_schema_that_is_current_is_left_alone() -> None:
    db = apsw.Connection(":memory:")
    migrate(db, STEPS, "it")
    ran: list[str] = []
    db.trace_v2(apsw.SQLITE_TRACE_STMT, lambda event: ran.append(str(event["sql"])))
    migrate(db, STEPS, "it")
    assert [s for s in ran if "user_version" not in s] == []


@pytest.mark.rule("F-249")
def test_a_step_that_fails_leaves_nothing_and_is_made_again() -> None:
    """Step and record are one transaction: there is no table of a former try to drop."""
    db, whole = apsw.Connection(":memory:"), apsw.Connection(":memory:")
    migrate(whole, STEPS, "it")
    migrate(db, STEPS[:1], "it")
    db.execute("INSERT INTO one VALUES (1)")
    broken = (STEPS[0], STEPS[1] + "; INSERT INTO nowhere VALUES (1)", STEPS[2])
    with pytest.raises(apsw.SQLError):
        migrate(db, broken, "it")
    assert tables(db) == [STEPS[0]]
    migrate(db, STEPS, "it")
    assert tables(db) == tables(whole)
    assert list(db.execute("SELECT v FROM one UNION ALL SELECT v FROM two")) == [
        (1,),
        (1,),
    ]
    with pytest.raises(SchemaTooNew):
        migrate(db, STEPS[:2], "it")


@pytest.mark.rule("F-250")
async def test_nothing_of_a_deleted_agent_is_left_in_any_table(clock: object) -> None:
    """Every table that there is, whatever is added to it later."""
    async with opened() as test:
        for name in ("gone", "stays"):
            root = await test.kernel.get_agent(Busy, "a")
            await (await test.kernel.get_sub_agent(root, Busy, name)).fill()
        await test.advance(1)
        tree = tree_of(test, "Busy")
        slots = {
            name: {r[0] for r in rows(tree, _BELOW, name)} for name in ("gone", "stays")
        }
        assert len(slots["gone"]) == 4, "itself, one below, two that run"
        counted = found(tree, slots["gone"])
        assert all(counted.values()), "it had something in every table"
        assert counted == found(tree, slots["stays"])
        agent = test.find([("Busy", "a")])
        assert agent is not None
        files = tree.store.slots()
        await agent.agent.dynamic_agents.delete(Busy, "gone")
        await test.advance(1)
        assert not any(found(tree, slots["gone"]).values())
        assert found(tree, slots["stays"]) == counted
        assert files & slots["gone"]
        assert not tree.store.slots() & slots["gone"]


_BELOW = (
    "WITH RECURSIVE sub(slot) AS (SELECT slot FROM node WHERE name = ?"
    " UNION SELECT node.slot FROM node JOIN sub ON node.parent = sub.slot)"
    " SELECT slot FROM sub"
)


def found(tree: Any, slots: set[str]) -> dict[str, int]:
    """Return how many rows of each table name one of those slots, in any column."""
    names = [
        r[0]
        for r in rows(tree, "SELECT name FROM sqlite_schema WHERE type = 'table'")
        if r[0] not in {"meta", "sqlite_sequence"}
    ]
    assert {"node", "run", "fiber", "job"} <= set(names)
    return {
        name: sum(
            any(str(value) in slots for value in row)
            for row in rows(tree, f"SELECT * FROM {name}")
        )
        for name in names
    }
