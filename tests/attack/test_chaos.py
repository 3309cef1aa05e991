"""Hostile clients and unlucky moments, over real sockets and on real files."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import trio

from attack.world import FACETS, Hub, Plain, Teller, World, call, until, world
from culet.kernel import Agent, Limits, rpc
from culet.kernel.ports import TreeKey
from web.serving import parse_answer, read_all

BAD_FRAMES: list[Any] = [
    "", "{", "null", "[]", "5", '"x"', "{}", '{"type":5}', '{"type":"rpc"}',
    '{"type":"rpc","id":5,"method":"ping","args":[]}',
    '{"type":"rpc","id":"1","method":null,"args":[]}',
    '{"type":"rpc","id":"1","method":"ping","args":{}}',
    '{"type":"rpc","id":"1","method":"__init__","args":[]}',
    '{"type":"rpc","id":"1","method":"_node","args":[]}',
    '{"type":"rpc","id":"1","method":"destroy","args":[]}',
    '{"type":"rpc","id":"1","method":"sql","args":["DROP TABLE note"]}',
    '{"type":"rpc","id":"1","method":"run","args":["Teller","r",{"k":"x"}]}',
    '{"type":"rpc","id":"1","method":"ping","args":[1,2,3,4,5,6,7,8,9]}',
    '{"type":"rpc","id":"1","method":"ping","args":[' + "[" * 50_000,
    "[" * 200_000, '{"type":"cf_agent_state"}',
    '{"type":"cf_agent_state","state":' + "[" * 400 + "]" * 400 + "}",
    '{"type":"cf_agent_use_chat_request","id":"x"}',
    '{"type":"cf_agent_use_chat_request","id":"x","init":{"method":"POST","body":"{"}}',
    '{"type":"cf_agent_stream_resume_ack","id":"nope"}',
    '{"type":"cf_agent_stream_resume_request"}',
    '{"type":"cf_agent_tool_result","toolCallId":"x","toolName":"y","output":1}',
    '{"type":"cf_agent_chat_clear"}', '{"type":"agent-tool-event","runId":"r"}',
    '{"type":"rpc","type":"rpc","id":"\\ud800","method":"ping","args":["\\ud800"]}',
    b"", b"\x00\xff", b'{"type":"rpc"}', "\x00" * 100, "x" * 900_000,
]  # fmt: skip


@pytest.mark.rule("I-45", "F-35")
@pytest.mark.parametrize("seed", [1, 2])
async def test_no_frame_hurts_anybody(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    async with world(tmp_path) as w, w.connect() as good:
        await good.hello()
        await call(good, "note", "kept")
        failures: list[Any] = []
        w.kernel.subscribe("failure", lambda _c, _t, node, what: failures.append(what))
        for frame in [*BAD_FRAMES, *map(str.encode, filter(_text, BAD_FRAMES))]:
            async with w.connect() as bad:
                await bad.hello()
                await bad.socket.send_message(frame)
                text = json.dumps(
                    {"type": "rpc", "id": "9", "method": "ping", "args": ["y"]}
                )
                cut = chance.randint(1, len(text) - 1)
                await bad.socket.send_message(text[:cut])
                frame = await bad.call("ping", "z")
                assert frame["result"] == "z"
        assert await call(good, "ping", "x") == "x"
        assert await call(good, "notes") == ["kept"]
        broken = [f for f in failures if f[0] in ("broken", "storage")]
        assert broken == []
        statuses = await call(good, "statuses")
        assert set(statuses) <= {"r"}


def _text(frame: Any) -> bool:
    return isinstance(frame, str)


@pytest.mark.rule("F-35", "I-43")
async def test_a_message_that_is_too_large_closes_that_socket_only(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as w, w.connect() as good:
        await good.hello()
        for fill in ("x", "é"):
            async with w.connect() as bad:
                await bad.hello()
                await bad.socket.send_message(fill * (1 << 20) + "x")
                assert (await bad.closed())[0] == 1009
        assert await call(good, "ping", "x") == "x"


@pytest.mark.rule("I-43")
async def test_bodies_and_heads_that_are_too_large(tmp_path: Path) -> None:
    limits = Limits(body_bytes=1 << 20)
    async with world(tmp_path, limits=limits) as w:
        path = "/agents/hub/h"
        status, _, _ = await w.server.http("POST", path, body=b"x" * (1 << 20))
        assert status == 404  # taken, and not implemented
        stream = await trio.open_tcp_stream("127.0.0.1", w.server.port)
        await stream.send_all(b"GET /agents/hub/h HTTP/1.1\r\nX: " + b"y" * 40_000)
        assert parse_answer(await read_all(stream))[0] in (400, 431)
        stream = await trio.open_tcp_stream("127.0.0.1", w.server.port)
        await stream.send_all(b"\x16\x03\x01 this is TLS" + bytes(range(256)) * 4)
        await stream.send_eof()
        await read_all(stream)
        assert (await w.server.http("GET", path))[0] == 404


class Ender(Agent):
    """Ends itself from its own schedule."""

    ran: list[str] = []

    async def on_start(self) -> None:
        self.sql("CREATE TABLE IF NOT EXISTS t (v TEXT)")

    @rpc
    async def plan(self) -> None:
        await self.schedule(0.05, "bye")
        await self.schedule_every(0.03, "tick")

    async def bye(self, payload: Any, schedule: Any) -> None:
        Ender.ran.append("bye")
        await self.destroy()

    async def tick(self, payload: Any, schedule: Any) -> None:
        self.sql("INSERT INTO t VALUES ('x')")
        Ender.ran.append("tick")

    @rpc
    async def rows(self) -> int:
        return len(self.sql("SELECT v FROM t"))


@pytest.mark.rule("HB-02")
@pytest.mark.parametrize("root", [True, False])
async def test_destroy_from_its_own_schedule_leaves_nothing(
    root: bool, tmp_path: Path
) -> None:
    Ender.ran.clear()
    path = "/agents/ender/e" if root else "/agents/hub/h/sub/ender/e"
    options: dict[str, Any] = {"roots": [Hub, Ender], "facets": [Ender, *FACETS]}
    async with world(tmp_path, **options) as w:
        if not root:
            await w.kernel.get_agent(Hub, "h")
        async with w.connect(path) as client:
            await client.hello()
            await call(client, "plan")
            assert (await client.closed())[0] == 4410
        assert Ender.ran.count("bye") == 1
        await trio.sleep(0.2)
        ticks = Ender.ran.count("tick")
        await trio.sleep(0.2)
        assert Ender.ran.count("tick") == ticks
        assert Ender.ran.count("bye") == 1
    Ender.ran.clear()
    async with world(tmp_path, **options) as w:
        await trio.sleep(0.2)
        assert Ender.ran == []
        if not root:
            await w.kernel.get_agent(Hub, "h")
        async with w.connect(path) as client:
            await client.hello()
            assert await call(client, "rows") == 0


@pytest.mark.rule("HB-19")
async def test_bad_rows_of_jobs_stop_no_other(tmp_path: Path) -> None:
    options: dict[str, Any] = {"facets": [Ender, *FACETS]}
    async with world(tmp_path, **options) as w:
        hub_stub = await w.kernel.get_agent(Hub, "h")
        hub = w.node().agent
        await w.kernel.get_sub_agent(hub_stub, Ender, "e")
        ids = [(await hub.schedule(0.3, "fired", i)).id for i in range(10)]
        await (w.node("e").agent).schedule(0.3, "tick")
        for text, at in (("{bad", 4), ("\x00", 5), ("[" * 5_000, 6)):
            tree(w).db.execute(
                "UPDATE job SET payload = ? WHERE id = ?", (text, ids[at])
            )
        for text, at in (("nothing", 7), ("sql", 8)):
            tree(w).db.execute("UPDATE job SET what = ? WHERE id = ?", (text, ids[at]))
        tree(w).touched()
        await hub_stub.ping("x")
    async with world(tmp_path) as w:  # and Ender is gone
        hub_stub = await w.kernel.get_agent(Hub, "h")
        wanted = {f"fired {i}" for i in (0, 1, 2, 3, 9)}
        with trio.fail_after(5):
            while not wanted <= set(await hub_stub.notes()):
                await trio.sleep(0.02)
        assert set(await hub_stub.notes()) == wanted
        assert await hub_stub.ping("x") == "x"
        run = await w.node().agent.run_agent_tool(Teller, {"k": 2}, run_id="r")
        assert run.status == "completed"


def tree(w: World) -> Any:
    return w.kernel.trees[TreeKey("Hub", "h")]


async def test_roots_that_fall_asleep_in_every_moment_lose_nothing(
    tmp_path: Path,
) -> None:
    """Eviction races with calls, sockets, schedules and runs."""
    chance = random.Random(5)
    told: list[str] = []
    async with world(tmp_path, idle_s=0.02) as w:
        until_s = trio.current_time() + 1.5

        async def caller(who: int) -> None:
            i = 0
            while trio.current_time() < until_s:
                i += 1
                text = f"{who}-{i}"
                match chance.randrange(4):
                    case 0:
                        hub = await w.kernel.get_agent(Hub, "h")
                        await hub.note(text)
                        told.append(text)
                    case 1:
                        async with w.connect() as client:
                            await client.hello()
                            await call(client, "note", text)
                            told.append(text)
                    case 2:
                        hub = await w.kernel.get_agent(Hub, "h")
                        await hub.later(chance.random() * 0.1, text)
                        told.append(f"fired {text}")
                    case _:
                        hub = await w.kernel.get_agent(Hub, "h")
                        got = await hub.run("Teller", text, {"k": 2, "pace": 0.001})
                        assert got["status"] == "completed"
                await trio.sleep(chance.random() * 0.08)

        async with trio.open_nursery() as nursery:
            for who in range(3):
                nursery.start_soon(caller, who)
        with trio.fail_after(5):
            while True:
                notes = await (await w.kernel.get_agent(Hub, "h")).notes()
                if set(told) <= set(notes):
                    break
                await trio.sleep(0.02)
        assert len(notes) == len(set(notes))


async def test_thirty_roots_at_once(tmp_path: Path) -> None:
    async with world(tmp_path) as w:

        async def one(i: int) -> None:
            async with w.connect(f"/agents/hub/r{i}") as client:
                await client.hello()
                assert await call(client, "note", str(i)) == 1
                ended = await call(client, "run", "Teller", "r", {"k": 3})
                assert ended["status"] == "completed"

        async with trio.open_nursery() as nursery:
            for i in range(30):
                nursery.start_soon(one, i)
    async with world(tmp_path) as w:
        for i in range(30):
            assert await (await w.kernel.get_agent(Hub, f"r{i}")).notes() == [str(i)]


async def test_values_of_agents_are_apart(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        hub = await w.kernel.get_agent(Hub, "h")
        for i in range(20):
            child = await w.kernel.get_sub_agent(hub, Plain, f"p{i}")
            await child.note(f"of {i}")
        for i in range(20):
            child = await w.kernel.get_sub_agent(hub, Plain, f"p{i}")
            assert await child.notes() == [f"of {i}"]
        assert await hub.notes() == []
        await until(lambda: not tree(w).store.dirty)
