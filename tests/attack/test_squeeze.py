"""Bounds so small that everything meets them: slower, but all of it right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trio

from attack.world import Hub, Plain, Teller, call, until, world
from culet.kernel import Limits
from culet.kernel.errors import CapacityError
from culet.kernel.ports import TreeKey

TIGHT = Limits(
    open_databases=3,
    jobs_at_once=2,
    batch_chunks=2,
    staged_bytes=2048,
    chunk_bytes=1024,
    wake_slice=1,
    replay_page_bytes=256,
    segment_bytes=32 << 10,
    checkpoint_frames=8,
    huge_frames=20,
    slice_s=0.0001,
    rpc_per_connection=2,
    message_bytes=4096,
)


@pytest.mark.slow
async def test_everything_is_right_under_the_smallest_bounds(tmp_path: Path) -> None:
    async with world(tmp_path, limits=TIGHT) as w, w.connect() as client:
        await client.hello()
        hub_stub = await w.kernel.get_agent(Hub, "h")
        hub = w.node().agent
        ended: dict[str, str] = {}

        async def run(i: int) -> None:
            value = {"k": 20, "pace": 0}
            got = await hub.run_agent_tool(Teller, value, run_id=f"r{i}")
            ended[f"r{i}"] = got.status

        async def box(i: int) -> None:
            child = await w.kernel.get_sub_agent(hub_stub, Plain, f"p{i}")
            for n in range(5):
                await child.note(str(n))

        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                for i in range(12):
                    nursery.start_soon(run, i)
                    nursery.start_soon(box, i)
        assert set(ended.values()) == {"completed"}
        assert len(ended) == 12
        for i in range(12):
            child = await w.kernel.get_sub_agent(hub_stub, Plain, f"p{i}")
            assert await child.notes() == ["0", "1", "2", "3", "4"]
        numbers: dict[str, list[int]] = {}
        async with w.connect() as fresh:
            while sum(len(n) == 22 for n in numbers.values()) < 12:
                frame = await fresh.frame()
                if frame["type"] == "agent-tool-event":
                    seen = numbers.setdefault(frame["event"]["runId"], [])
                    seen.append(frame["sequence"])
        assert all(n == list(range(22)) for n in numbers.values())
        # 30 calls at once on one connection that may have two in work
        ids = [await client.start("ping", str(i)) for i in range(30)]
        answered = 0
        while answered < 30:
            frame = await client.frame()
            answered += frame.get("id") in ids
    async with world(tmp_path) as w:
        assert len(await (await w.kernel.get_agent(Hub, "h")).statuses()) == 12


async def test_a_queue_of_everything_moves_on_behind_what_hangs(tmp_path: Path) -> None:
    """Both workers are taken by turns that last; schedules and cancels still get through."""
    async with world(tmp_path, limits=Limits(jobs_at_once=4)) as w:
        await (await w.kernel.get_agent(Hub, "h")).ping("x")
        hub = w.node().agent
        for i in range(10):
            await hub.run_agent_tool(
                Teller, {"k": 5, "pace": 60}, run_id=f"r{i}", detached=True
            )
        await trio.sleep(0.1)
        with trio.fail_after(2):
            for i in range(10):
                assert (await hub.runs.cancel(f"r{i}")).status == "aborted"
        await hub.schedule(0, "fired", "x")
        await until(lambda: hub.sql("SELECT count(*) AS n FROM sqlite_master "
                                    "WHERE name = 'note'")[0].n == 1)  # fmt: skip
        with trio.fail_after(5):
            run = await hub.run_agent_tool(Teller, {"k": 2}, run_id="after")
        assert run.status == "completed"


@pytest.mark.rule("I-43")
async def test_what_is_too_much_is_refused_before_anything(tmp_path: Path) -> None:
    limits = Limits(input_bytes=1000, children_per_agent=3, chunk_bytes=1000)
    async with world(tmp_path, limits=limits) as w:
        hub_stub = await w.kernel.get_agent(Hub, "h")
        hub = w.node().agent
        db = w.kernel.trees[TreeKey("Hub", "h")].db
        with pytest.raises(CapacityError):
            await hub.run_agent_tool(Teller, {"k": 1, "x": "y" * 1000}, run_id="big")
        with pytest.raises(CapacityError):
            await hub.schedule(1, "fired", "y" * 1000)
        with pytest.raises(CapacityError):
            await hub.queue.put("fired", "y" * 1000)
        assert db.execute("SELECT count(*) FROM job")[0][0] == 0
        for i in range(3):
            await w.kernel.get_sub_agent(hub_stub, Plain, f"p{i}")
        with pytest.raises(CapacityError):
            await w.kernel.get_sub_agent(hub_stub, Plain, "p3")
        run = await hub.run_agent_tool(Teller, {"k": 1}, run_id="one too many")
        assert (run.status, run.reason) == ("error", "capacity")
        assert db.execute("SELECT count(*) FROM node")[0][0] == 4


async def test_many_ask_for_one_run_and_share_it(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.connect() as client:
        await client.hello()
        value = {"k": 10, "pace": 0.005}
        ids = [await client.start("run", "Teller", "r", value) for _ in range(50)]
        got: dict[str, Any] = {}
        while len(got) < 50:
            frame = json.loads(await client.socket.get_message())
            if frame.get("id") in ids:
                got[frame["id"]] = frame["result"]["status"]
        assert set(got.values()) == {"completed"}
        assert [f async for f in w.node().agent.runs.replay("r")][-1]
        assert (await call(client, "statuses")) == {"r": "completed"}
