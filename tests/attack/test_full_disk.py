"""A disk that gets full at the n-th operation, whatever goes on: what was told stays
true, what was not is whole or absent, and when there is room again everything goes on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trio
from trio_websocket import ConnectionClosed, HandshakeError

from attack.world import Hub, World, call, world
from culet.kernel import Limits
from web.serving import Client

GONE = (ConnectionClosed, HandshakeError, OSError, trio.TooSlowError)


class History:
    """What a client was told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.runs: dict[str, str] = {}
        self.refused: list[str] = []
        self.lost = 0
        self.children: set[str] = set()
        self.later: list[str] = []


async def busy(w: World, told: History, label: str) -> None:
    """Do all kinds of things over one socket until it ends or all is done."""
    try:
        async with w.connect() as client:
            await client.hello()
            for i in range(4):
                await ask(client, told, label, i)
    except GONE:
        told.lost += 1
    except BaseExceptionGroup as group:
        if group.split(GONE)[1] is not None:
            raise
        told.lost += 1


async def ask(client: Client, told: History, label: str, i: int) -> None:
    note, run = f"{label}-{i}", f"run-{label}-{i}"
    if (await answer(client, told, "note", note)) is not None:
        told.notes.append(note)
    ended = await answer(client, told, "run", "Teller", run, {"k": 40, "pace": 0})
    if ended is not None:
        told.runs[run] = ended["status"]
    ended = await answer(client, told, "run", "Middle", run + "m", {"k": 5})
    if ended is not None:
        told.runs[run + "m"] = ended["status"]
    if (await answer(client, told, "make", "Plain", note)) is not None:
        told.children.add(note)
    if (await answer(client, told, "later", 0.01, note)) is not None:
        told.later.append(f"fired {note}")


async def answer(client: Client, told: History, method: str, *args: Any) -> Any:
    frame = await client.call(method, *args)
    if frame["success"]:
        return frame.get("result") or True
    told.refused.append(frame["error"])
    assert "Error" not in frame["error"], frame  # no names of classes, no tracebacks
    return None


async def goes_on(w: World, told: History) -> None:
    """There is room: everybody is served, and what was told is true."""
    with trio.fail_after(10):
        while True:
            try:
                async with w.connect() as client:
                    await client.hello()
                    assert await call(client, "ping", "x") == "x"
                    break
            except (*GONE, AssertionError):
                await trio.sleep(0.01)
            except BaseExceptionGroup as group:
                if group.split((*GONE, AssertionError))[1] is not None:
                    raise
                await trio.sleep(0.01)
    async with w.connect() as client:
        await client.hello()
        with trio.fail_after(10):
            while "running" in (await call(client, "statuses")).values():
                await trio.sleep(0.01)
        statuses = await call(client, "statuses")
        for run, status in told.runs.items():
            assert statuses[run] == status, run
        notes = await call(client, "notes")
        with trio.fail_after(10):
            while not set(told.later) <= set(notes):
                notes = await call(client, "notes")
                await trio.sleep(0.01)
        assert [n for n in told.notes if n not in notes] == []
        plain = [n for n in notes if not n.startswith("fired")]
        assert len(set(plain)) == len(plain)
        hub = w.node().agent
        for name in told.children:
            assert hub.dynamic_agents.has("Plain", name)
        for run in statuses:
            frames = [f async for f in hub.runs.replay(run)]
            kinds = [json.loads(f)["event"]["kind"] if isinstance(f, str)
                     else f["event"]["kind"] for f in frames]  # fmt: skip
            assert kinds[0] == "started"
            assert kinds.count("started") == 1
            assert set(kinds[1:-1]) <= {"chunk"}
            assert kinds[-1] in {"finished", "error", "aborted", "interrupted"}


@pytest.mark.rule("F-04", "G-03")
@pytest.mark.slow
async def test_full_at_any_operation_loses_nothing_and_all_goes_on(
    tmp_path: Path,
) -> None:
    """Small segments make new ones often, which is what needs room."""
    limits = Limits(segment_bytes=64 << 10)
    told, hit = History(), 0
    async with world(tmp_path, limits=limits) as w:
        for after in (0, 1, 2, 3, 4, 6, 8, 11, 15, 20, 28, 40, 60):
            w.disk.fill(after)
            before = w.disk.refused
            async with trio.open_nursery() as nursery:
                for who in "ab":
                    nursery.start_soon(busy, w, told, f"{who}{after}")
                with trio.fail_after(20):
                    while w.disk.refused == before:
                        await trio.sleep(0.005)
                await trio.sleep(0.05)
                w.disk.heal()
            hit += w.disk.refused > before
            await goes_on(w, told)
    assert hit >= 12
    assert told.lost
    assert len(told.runs) >= 8


async def test_a_new_root_on_a_full_disk_is_all_or_nothing(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await (await w.kernel.get_agent(Hub, "h")).note("kept")
        for after in range(12):
            w.disk.fill(after)
            name = f"new{after}"
            path = f"/agents/hub/{name}"
            status, _, body = await w.server.http("GET", path)
            assert status in (404, 503), body  # 404: there was room; not implemented
            assert b"space" not in body
            w.disk.heal()
            with trio.fail_after(5):
                while (await w.server.http("GET", path))[0] == 503:
                    await trio.sleep(0.01)
            new = await w.kernel.get_agent(Hub, name)
            assert await new.notes() == []
            assert await new.note("x") == 1
        assert await (await w.kernel.get_agent(Hub, "h")).notes() == ["kept"]


async def test_a_schedule_fires_though_the_disk_was_full_when_it_was_due(
    tmp_path: Path,
) -> None:
    """Nobody visits the root after the fault: what it owes must wake it all the same."""
    async with world(tmp_path) as w:
        hub = await w.kernel.get_agent(Hub, "h")
        await hub.later(0.2, "due")
        w.disk.fill()
        try:  # break the tree now, and let it be due on a full disk
            with trio.move_on_after(0.5):
                await hub.note("breaks")
        except Exception:
            pass
        await trio.sleep(0.5)
        assert w.disk.refused
        w.disk.heal()
        with trio.fail_after(8):
            notes: list[str] = []
            while "fired due" not in notes:
                await trio.sleep(0.05)
                node = w.node()
                if node is not None and node.ready.is_set():
                    notes = [r.text for r in node.agent.sql("SELECT text FROM note")]


@pytest.mark.parametrize("pages", [60, 120])
async def test_the_quota_of_one_file_ends_what_needs_it_and_nobody_else(
    pages: int, tmp_path: Path
) -> None:
    async with (
        world(tmp_path, limits=Limits(database_pages=pages)) as w,
        w.connect() as client,
    ):
        await client.hello()
        big = "x" * 9_000
        kept = 0
        for _ in range(60):
            frame = await client.call("note", big)
            if not frame["success"]:
                break
            kept += 1
        assert 0 < kept < 60
        assert not (await client.call("count", 1))["success"] or True
        assert len(await call(client, "notes")) == kept
        # its own file is full: runs of others, cancels and deletes go on
        run = await call(client, "run", "Teller", "r", {"k": 5})
        assert run["status"] == "completed"
        assert await call(client, "begin", "Teller", "s", {"k": 9, "pace": 5}) == (
            "running"
        )
        assert await call(client, "stop", "s") == "aborted"
        await call(client, "make", "Plain", "p")
        await call(client, "drop", "Plain", "p")
        run = await call(client, "run", "Teller", "many", {"k": 20_000})
        assert run["status"] == "error"
        assert "full" in run["error"].lower()
        assert (await call(client, "statuses"))["many"] == "error"
