"""The laws, each attacked on purpose, over real sockets and on real files."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any, ClassVar

import pytest
import trio

from attack.world import FACETS, Hub, Plain, Teller, World, call, until, world
from culet.kernel import Agent, AgentToolEvents, Limits, apply_agent_tool_event, rpc
from culet.kernel.errors import ChildDidNotStop, Deleted, FacetAborted, UsageError
from culet.kernel.ports import TreeKey
from web.serving import Client

HANDSHAKE = (
    b"GET /agents/hub/h HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\n"
    b"Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
TERMINALS = {"finished", "error", "aborted", "interrupted"}


def tree(w: World) -> Any:
    return w.kernel.trees[TreeKey("Hub", "h")]


# ---- 3: nothing leaves before it is durable


@pytest.mark.rule("I-15")
async def test_no_reply_frame_or_body_leaves_before_its_record(tmp_path: Path) -> None:
    go = threading.Event()
    go.set()
    async with world(tmp_path) as w, w.connect() as one, w.connect() as two:
        for client in (one, two):
            await client.hello()
        await call(one, "note", "first")
        see = w.disk.__call__

        def held(operation: str, path: str) -> None:
            if operation == "write" and threading.current_thread().name.endswith(
                "writer"
            ):
                go.wait(20)
            see(operation, path)

        tree(w).store.folder.files._observer = held
        await until(lambda: not tree(w).store.dirty)
        go.clear()
        heard: list[str] = []
        async with trio.open_nursery() as nursery:

            async def listen(client: Client) -> None:
                while True:
                    heard.append(str(await client.socket.get_message()))

            async def ask_http() -> None:
                status, _, _ = await w.server.http("GET", "/agents/hub/h")
                heard.append(f"http {status}")

            async def ask_api() -> None:
                await (await w.kernel.get_agent(Hub, "h")).notes()
                heard.append("api")

            nursery.start_soon(listen, one)
            nursery.start_soon(listen, two)
            await one.start("note", "secret")
            await one.start("tell", "told")
            await one.start("count", 7)
            await one.start("begin", "Teller", "r", {"k": 3})
            await until(lambda: w.node().agent.state == {"n": 7})
            nursery.start_soon(ask_http)
            nursery.start_soon(ask_api)
            await two.start("notes")
            await trio.sleep(0.4)
            assert heard == []  # not even what was only read
            assert len(w.node().agent.sql("SELECT 1 FROM note")) == 2
            go.set()
            await until(
                lambda: (
                    sum("agent-tool-event" in text for text in heard) == 10
                    and {"api", "http 404", "told"} <= set(heard)
                )
            )
            nursery.cancel_scope.cancel()


# ---- 10: slow readers


@pytest.mark.rule("I-20", "F-31", "T-083")
async def test_a_client_that_does_not_read_delays_nobody(tmp_path: Path) -> None:
    limits = Limits(outbox_bytes=256 << 10, slow_client_s=0.5, idle_s=20.0)
    async with world(tmp_path, limits=limits) as w, w.connect() as fast:
        await fast.hello()
        lazy = await trio.open_tcp_stream("127.0.0.1", w.server.port)
        await lazy.send_all(HANDSHAKE)
        await until(lambda: tree(w).sockets.count == 2)
        for _ in range(100):
            began = time.perf_counter()
            await call(fast, "tell", json.dumps({"type": "x" * 100_000}))
            assert time.perf_counter() - began < 0.5
        await until(lambda: tree(w).sockets.count == 1, 10)
        assert await call(fast, "ping", "x") == "x"
        await trio.aclose_forcefully(lazy)


# ---- 2, 5: cancels


class Stubborn(Agent):
    """Swallows that many cancellations; -1: all of them."""

    stop = False
    inside: ClassVar[set[str]] = set()

    async def on_turn(self, turn):
        left = turn.input
        yield {"type": "text-delta", "id": "t", "delta": "x"}
        while not Stubborn.stop:
            self.inside.add(turn.run_id)
            try:
                await trio.sleep(0.002)
            except trio.Cancelled:
                if left == 0:
                    raise
                left -= 1


@pytest.mark.rule("HB-09", "I-07", "T-036")
async def test_a_run_cancelled_at_any_moment_is_aborted_whatever_it_swallows(
    tmp_path: Path,
) -> None:
    chance = random.Random(7)
    async with world(tmp_path, facets=[Stubborn]) as w:
        await (await w.kernel.get_agent(Hub, "h")).ping("x")
        hub = w.node().agent
        told: dict[str, str] = {}

        async def one(i: int) -> None:
            run_id = f"r{i}"
            async with trio.open_nursery() as nursery:

                async def waiting() -> None:
                    run = await hub.run_agent_tool(Stubborn, i % 4, run_id=run_id)
                    told[run_id] = run.status

                nursery.start_soon(waiting)
                await trio.sleep(chance.random() * 0.05)
                with trio.fail_after(0.5):
                    standing = (await hub.runs.cancel(run_id)).status
                assert standing in ("aborted", None)
                if standing is None:  # not asked for yet
                    await until(lambda: hub.runs.get(run_id) is not None)
                    assert (await hub.runs.cancel(run_id)).status == "aborted"

        for batch in range(10):
            async with trio.open_nursery() as nursery:
                for i in range(20):
                    nursery.start_soon(one, batch * 20 + i)
        assert set(told.values()) == {"aborted"}
        assert len(told) == 200
        await tree(w).durable()  # what is replayed is what was published
        for i in range(200):
            frames = [f async for f in hub.runs.replay(f"r{i}")]
            kinds = [_event(f)["kind"] for f in frames]
            assert [k for k in kinds if k in TERMINALS] == ["aborted"]
        await until(lambda: len(tree(w).nodes) == 1)
        assert tree(w).remnants == []
        assert tree(w).db.execute("SELECT count(*) FROM job")[0][0] == 0


@pytest.mark.rule("HB-09", "I-24", "F-23")
async def test_a_run_that_never_stops_is_quarantined_and_others_are_served(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, facets=[Stubborn, Teller], abort_grace_s=0.2) as w:
        await (await w.kernel.get_agent(Hub, "h")).ping("x")
        hub = w.node().agent
        Stubborn.stop = False
        try:
            await hub.run_agent_tool(Stubborn, -1, run_id="r", detached=True)
            await until(lambda: "r" in Stubborn.inside)
            node = w.node("r")
            assert (await hub.runs.cancel("r")).status == "aborted"
            await until(lambda: node in tree(w).remnants)
            with pytest.raises(FacetAborted):
                node.agent.sql("SELECT 1")
            with pytest.raises(FacetAborted):
                node.agent.set_state(1)
            with pytest.raises(FacetAborted):
                node.agent.broadcast("late")
            run = await hub.run_agent_tool(Teller, {"k": 2}, run_id="s")
            assert run.status == "completed"
            await hub.run_agent_tool(Stubborn, -1, run_id="q", detached=True)
            await until(lambda: "q" in Stubborn.inside)
            with pytest.raises(ChildDidNotStop):
                await hub.dynamic_agents.abort(Stubborn, "q")
            assert len(w.kernel.tree("Hub", "h")) >= 3
        finally:
            Stubborn.stop = True  # or a failure would wait for it for ever
        await until(lambda: tree(w).remnants == [])
    Stubborn.stop = False


def _event(frame: Any) -> Any:
    return (json.loads(frame) if isinstance(frame, str) else frame)["event"]


# ---- 9: starts never wait for children


@pytest.mark.rule("HB-07", "T-052")
async def test_a_hundred_hung_starts_do_not_slow_their_parent(tmp_path: Path) -> None:
    async with world(tmp_path, start_s=60.0) as w, w.connect() as client:
        await client.hello()
        for i in range(100):
            await call(client, "begin", "Hung", f"r{i}", {})
        await until(lambda: len(tree(w).nodes) == 101)
        with trio.fail_after(1):
            for i in range(10):
                assert await call(client, "ping", str(i)) == str(i)
        ended = await call(client, "run", "Teller", "ok", {"k": 3})
        assert ended["status"] == "completed"
        hub = w.node().agent
        began = time.perf_counter()
        for i in range(100):
            assert (await hub.runs.cancel(f"r{i}")).status == "aborted"
        await until(lambda: len(tree(w).nodes) <= 2)
        assert time.perf_counter() - began < 5


# ---- 7, 8: fences and deletes


class Clingy(Agent):
    """Writes whatever it can when it is stopped, and later."""

    tried: list[str] = []

    async def on_start(self) -> None:
        self.sql("CREATE TABLE IF NOT EXISTS late (text TEXT)")
        self.spawn(self.hang)

    async def hang(self) -> None:
        try:
            await trio.sleep_forever()
        finally:
            for name, act in self.acts().items():
                try:
                    done = act()
                    if hasattr(done, "__await__"):
                        with trio.CancelScope(shield=True):
                            await done
                    Clingy.tried.append(f"{name} went through")
                except (FacetAborted, Deleted):
                    Clingy.tried.append(name)

    def acts(self) -> dict[str, Any]:
        return {
            "sql": lambda: self.sql("INSERT INTO late VALUES ('x')"),
            "state": lambda: self.set_state(9),
            "broadcast": lambda: self.broadcast("late"),
            "schedule": lambda: self.schedule(0, "later"),
            "queue": lambda: self.queue.put("later"),
            "get": lambda: self.dynamic_agents.get(Plain, "late"),
            "run": lambda: self.run_agent_tool(Teller, {"k": 1}, run_id="late"),
            "fiber": lambda: self.run_fiber("late", self.later),
            "spawn": lambda: self.spawn(self.later),
            "durable": lambda: self.durable(),
            "transaction": lambda: self.transaction().__enter__(),
            "cancel": lambda: self.runs.cancel("late"),
        }

    async def later(self, payload: Any = None, schedule: Any = None) -> None:
        Clingy.tried.append("ran late")


@pytest.mark.rule("I-24", "F-042", "F-066")
@pytest.mark.parametrize("how", ["abort", "delete"])
async def test_a_stopped_agent_can_do_nothing_in_its_finally(
    how: str, tmp_path: Path
) -> None:
    Clingy.tried.clear()
    async with world(tmp_path, facets=[Clingy, *FACETS]) as w:
        await (await w.kernel.get_agent(Hub, "h")).ping("x")
        hub = w.node().agent
        await hub.dynamic_agents.get(Clingy, "c")
        acts = set(w.node("c").agent.acts())
        if how == "abort":
            await hub.dynamic_agents.abort(Clingy, "c")
        else:
            await hub.dynamic_agents.delete(Clingy, "c")
        assert set(Clingy.tried) == acts
        Clingy.tried.clear()
        await hub.dynamic_agents.get(Clingy, "c")
        agent = w.node("c").agent
        assert agent.sql("SELECT * FROM late") == []
        assert agent.state is None
        assert agent.schedules.list() == []
        assert "late" not in [c.name for c in agent.dynamic_agents.list()]
        await hub.dynamic_agents.delete(Clingy, "c")


@pytest.mark.rule("I-25", "F-065", "F-067")
async def test_what_comes_late_for_a_deleted_facet_meets_nothing(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as w:
        hub_stub = await w.kernel.get_agent(Hub, "h")
        hub = w.node() and w.node().agent
        await hub.dynamic_agents.get(Plain, "p")
        async with w.connect("/agents/hub/h/sub/plain/p") as client:
            await client.hello()
            await call(client, "note", "old")
            stub = await w.kernel.get_sub_agent(hub_stub, Plain, "p")
            agent = w.node("p").agent
            await agent.schedule(0.05, "note_late", "late job")
            for _ in range(20):
                await client.start("note", "late frame")
            await hub.dynamic_agents.delete(Plain, "p")
            code, _reason = await client.closed()
            assert code == 4410
        with pytest.raises(Deleted):
            await stub.notes()
        await hub.dynamic_agents.get(Plain, "p")
        await trio.sleep(0.2)
        fresh = await w.kernel.get_sub_agent(hub_stub, Plain, "p")
        assert await fresh.notes() == []
        with pytest.raises(Deleted):
            await stub.notes()


@pytest.mark.rule("F-029")
async def test_two_gets_and_a_delete_at_once_leave_one_or_none(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await (await w.kernel.get_agent(Hub, "h")).ping("x")
        hub = w.node().agent
        for i in range(100):

            async def get(i: int = i) -> None:
                await trio.sleep(random.random() * 0.002)
                try:
                    stub = await hub.dynamic_agents.get(Plain, "p")
                    await stub.note(str(i))
                except (Deleted, FacetAborted):
                    pass

            async def delete() -> None:
                await trio.sleep(random.random() * 0.002)
                await hub.dynamic_agents.delete(Plain, "p")

            with trio.fail_after(5):
                async with trio.open_nursery() as nursery:
                    for fn in (get, delete, get):
                        nursery.start_soon(fn)
            live = tree(w).db.execute("SELECT count(*) FROM node WHERE state = 'live'")
            assert live[0][0] in (1, 2)
        await hub.dynamic_agents.delete(Plain, "p")
        await until(lambda: tree(w).db.execute("SELECT count(*) FROM node")[0][0] == 1)


class Parent(Agent):
    async def fill(self, n: int) -> None:
        for i in range(n):
            await self.dynamic_agents.get(Plain, f"p{i}")


@pytest.mark.rule("G-11")
async def test_abort_of_forty_live_facets_is_fast(tmp_path: Path) -> None:
    async with world(tmp_path, facets=[Parent, Plain]) as w:
        await (await w.kernel.get_agent(Hub, "h")).ping("x")
        hub = w.node().agent
        took: list[float] = []
        for _ in range(30):
            parent = await hub.dynamic_agents.get(Parent, "p")
            await parent.fill(40)
            began = time.perf_counter()
            receipt = await hub.dynamic_agents.abort(Parent, "p")
            took.append(time.perf_counter() - began)
            assert len(receipt.nodes) == 41
        took.sort()
        assert took[len(took) // 2] < 0.05, took  # of wall time: some are starved


# ---- names


NAMES = [
    "x'; DROP TABLE node;--", 'a" OR "1"="1', "%", "_", "$.a", "${x}", "\U0001f600",
    "a" * 256, "sub", "a/b", "a\\b", "../x", "?", "#", "%2e%2e", " ", "\n", "é", "e\u0301",
]  # fmt: skip


@pytest.mark.rule("HB-39", "I-27", "F-40", "F-059", "F-060", "F-382")
async def test_names_are_names_everywhere(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.connect() as client:
        await client.hello()
        hub_stub = await w.kernel.get_agent(Hub, "h")
        hub = w.node().agent
        for name in NAMES:
            child = await w.kernel.get_sub_agent(hub_stub, Plain, name)
            assert await child.note(name) == 1
            run = await hub.run_agent_tool(Teller, {"k": 1}, run_id=name)
            assert (run.run_id, run.status) == (name, "completed")
            key = f"of {name}"  # a key of blanks says nothing
            await hub.fibers.start(
                "f", _nothing, fiber_id=name, key=key, metadata={name: 1}
            )
        assert [c.name for c in hub.dynamic_agents.list(Plain)] == NAMES
        assert [r.run_id for r in hub.runs.list()] == NAMES
        for name in NAMES:
            assert hub.runs.list(status=name) == []
            assert hub.runs.list(agent_type=name) == []
            assert hub.schedules.get(name) is None
            assert hub.schedules.cancel(name) is False
            with pytest.raises(UsageError):
                await hub.schedule(1, name)
            assert hub.fibers.inspect(key=f"of {name}").metadata == {name: 1}
        long = "a" * 10_000
        with pytest.raises(UsageError):
            await hub.run_agent_tool(Teller, {"k": 1}, run_id=long)
        with pytest.raises(UsageError):
            await hub.schedule(1, long)
        for name in ("%", "_", "x'; DROP TABLE node;--"):
            await hub.dynamic_agents.delete(Plain, name)
        left = [n for n in NAMES if n not in ("%", "_", "x'; DROP TABLE node;--")]
        assert [c.name for c in hub.dynamic_agents.list(Plain)] == left
        for name in left:
            child = await w.kernel.get_sub_agent(hub_stub, Plain, name)
            assert await child.notes() == [name]


async def _nothing() -> None:
    return None


# ---- 4: one sequence per run, for whoever comes whenever


SEQUENCE = re.compile(rb'"sequence":([0-9]+)')


async def bare(port: int) -> AsyncGenerator[bytes, None]:
    """Yield the text messages of a client that costs as little as can be."""
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    try:
        await stream.send_all(HANDSHAKE)
        data = b""
        while b"\r\n\r\n" not in data:
            data += await stream.receive_some(65536)
        data = data.partition(b"\r\n\r\n")[2]
        while True:
            at = 0
            while len(data) >= at + 10:
                size, start = data[at + 1], at + 2
                if size == 126:
                    size, start = int.from_bytes(data[at + 2 : at + 4]), at + 4
                elif size == 127:
                    size, start = int.from_bytes(data[at + 2 : at + 10]), at + 10
                if len(data) < start + size:
                    break
                yield data[start : start + size]
                at = start + size
            with trio.fail_after(30):
                part = await stream.receive_some(1 << 18)
            assert part, "the server hung up"
            data = data[at:] + part
    finally:
        await trio.aclose_forcefully(stream)


@pytest.mark.rule("I-17")
async def test_five_thousand_chunks_to_twenty_clients_while_they_are_made(
    tmp_path: Path,
) -> None:
    chunks = 5_000
    seen: list[list[int]] = []

    async def watch(w: World, delay: float) -> None:
        await trio.sleep(delay)
        numbers: list[int] = []
        seen.append(numbers)
        async with aclosing(bare(w.server.port)) as texts:
            async for text in texts:
                if b'"agent-tool-event"' in text:
                    found = SEQUENCE.search(text)
                    assert found is not None
                    numbers.append(int(found[1]))
                    if b'"kind":"finished"' in text:
                        return

    async with world(tmp_path) as w, w.connect() as client:
        await client.hello()
        await call(client, "begin", "Teller", "r", {"k": chunks, "pace": 0})
        async with trio.open_nursery() as nursery:
            for i in range(20):
                nursery.start_soon(watch, w, i * 0.02)
    assert all(numbers == list(range(chunks + 2)) for numbers in seen)


@pytest.mark.rule("I-16", "I-17", "T-235", "T-236")
async def test_a_client_that_comes_fifty_times_folds_to_what_a_fresh_one_sees(
    tmp_path: Path,
) -> None:
    chance = random.Random(3)
    async with world(tmp_path) as w:
        await (await w.kernel.get_agent(Hub, "h")).ping("x")
        hub = w.node().agent
        for i in range(4):
            value = {"k": 300, "pace": 0.002, **({"fail_at": 250} if i == 3 else {})}
            await hub.run_agent_tool(Teller, value, run_id=f"r{i}", detached=True)
        state = AgentToolEvents.empty()
        for _ in range(50):
            async with w.connect() as client:
                with trio.move_on_after(chance.random() * 0.03):
                    while True:
                        frame = json.loads(await client.socket.get_message())
                        if frame["type"] == "agent-tool-event":
                            state = apply_agent_tool_event(state, frame)
        await until(lambda: all(r.status != "running" for r in hub.runs.list()), 20)

        async def whole(state: AgentToolEvents) -> AgentToolEvents:
            async with w.connect() as client:
                ended = 0
                while ended < 4:
                    frame = await client.frame()
                    if frame["type"] == "agent-tool-event":
                        state = apply_agent_tool_event(state, frame)
                        ended += frame["event"]["kind"] in TERMINALS
            return state

        fresh = await whole(AgentToolEvents.empty())
        assert (await whole(state)).to_json() == fresh.to_json()


# ---- HB-03: waking


class Sleeper(Agent):
    """Every way in checks that the start came first."""

    starts = 0
    heard: list[str] = []

    async def on_start(self) -> None:
        await trio.sleep(0.005)
        Sleeper.starts += 1
        object.__setattr__(self, "ready", True)

    def hear(self, what: str) -> None:
        assert getattr(self, "ready", False)
        assert [s.name for s in self.self_path] == ["h", "s"]
        Sleeper.heard.append(what)

    @rpc
    async def call(self) -> str:
        self.hear("rpc")
        return "x"

    async def on_request(self, request: Any) -> Any:
        from culet.kernel import Response

        self.hear("http")
        return Response("x")

    async def on_message(self, connection: Any, message: Any) -> None:
        self.hear("message")

    async def fired(self, payload: Any, schedule: Any) -> None:
        self.hear("schedule")

    async def on_connect(self, connection: Any, ctx: Any) -> None:
        self.hear("connect")


@pytest.mark.rule("HB-03", "I-28")
async def test_on_start_comes_first_whoever_wakes_it(tmp_path: Path) -> None:
    Sleeper.starts, Sleeper.heard = 0, []
    path = "/agents/hub/h/sub/sleeper/s"
    async with world(tmp_path, facets=[Sleeper]) as w:
        hub_stub = await w.kernel.get_agent(Hub, "h")
        hub = w.node().agent
        stub = await w.kernel.get_sub_agent(hub_stub, Sleeper, "s")
        async with w.connect(path) as client:
            await client.hello()

            async def due() -> None:
                pass

            ways = {
                "rpc": lambda: stub.call(),
                "http": lambda: w.server.http("GET", path),
                "message": lambda: client.socket.send_message("hello"),
                "connect": lambda: w.server.connect(path).__aenter__(),
                "schedule": due,
            }
            del ways["connect"]
            order = list(ways)
            for first in order:
                for second in order:
                    await until(lambda: not w.node("s") or not w.node("s").busy)
                    agent = w.node("s")
                    if agent is None:
                        await stub.call()
                        agent = w.node("s")
                        await until(lambda: not w.node("s").busy)
                    if "schedule" in (first, second):
                        await agent.agent.schedule(0.03, "fired")
                    assert await tree(w).evict(agent)
                    before, Sleeper.heard = Sleeper.starts, []
                    async with trio.open_nursery() as nursery:
                        for way in {first, second}:
                            nursery.start_soon(ways[way])
                    await until(lambda: {first, second} <= set(Sleeper.heard))  # noqa: B023
                    assert Sleeper.starts == before + 1
        assert hub is not None
