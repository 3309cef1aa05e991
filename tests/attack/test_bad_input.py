"""Bad input gets a clear typed error; nothing is lost, nothing is half done."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import apsw
import pytest
import trio

from attack.world import KINDS, Hub, Plain, call, until, world
from culet.kernel import Agent, open_kernel
from culet.kernel.errors import (
    FacetBroken,
    SchemaTooNew,
    StorageBusy,
    UsageError,
)
from culet.kernel.ports import TreeKey

BAD_NAMES = ["", "a\0b", ".", "..", "n" * 257, "\ud800"]


def rows(world: Any) -> dict[str, int]:
    """Rows of each table of the tree: what a refusal must leave alone."""
    db = world.kernel.trees[TreeKey("Hub", "h")].db
    return {
        table: db.execute(f"SELECT count(*) FROM {table}")[0][0]
        for table in ("node", "run", "fiber", "job")
    }


def files(folder: Path) -> set[str]:
    return {
        str(p.relative_to(folder))
        for p in folder.rglob("*")
        if p.is_file() and p.suffix != ".log"
    }


@pytest.mark.parametrize("name", [*BAD_NAMES, "sub", 5, None], ids=repr)
async def test_a_bad_root_name_is_refused_by_every_way_in(
    name: Any, tmp_path: Path
) -> None:
    async with world(tmp_path) as w:
        before = files(tmp_path)
        with pytest.raises(UsageError):
            await w.kernel.get_agent(Hub, name)
        assert files(tmp_path) == before
        assert w.kernel.trees == {}


@pytest.mark.rule("F-37", "F-012")
@pytest.mark.parametrize("name", [*BAD_NAMES, 5, None], ids=repr)
async def test_a_bad_child_name_is_refused_by_every_way_in(
    name: Any, tmp_path: Path
) -> None:
    async with world(tmp_path) as w:
        hub = await w.kernel.get_agent(Hub, "h")
        await hub.ping("x")
        before, kept = rows(w), files(tmp_path)
        with pytest.raises(UsageError):
            await w.kernel.get_sub_agent(hub, Plain, name)
        if name is not None:
            agent = w.node().agent
            with pytest.raises(UsageError):
                await agent.run_agent_tool(KINDS["Teller"], {"k": 1}, run_id=name)
            if isinstance(name, str) and name.isascii():  # to ask is no mistake
                assert not agent.dynamic_agents.has(Plain, name)
                assert await agent.dynamic_agents.lookup(Plain, name) is None
                await agent.dynamic_agents.delete(Plain, name)
        assert (rows(w), files(tmp_path)) == (before, kept)


@pytest.mark.rule("F-013")
@pytest.mark.parametrize("kind", ["Sub", "SUB", "sub", "Sub_"])
async def test_a_class_whose_segment_is_sub_is_refused(kind: str) -> None:
    cls = type(kind, (Agent,), {})
    for lists in ({"roots": [cls]}, {"roots": [Hub], "facets": [cls]}):
        with pytest.raises(UsageError):
            async with open_kernel(**lists):
                pass


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("/agents/hub/%2e%2e", 400),
        ("/agents/hub/%00", 400),
        ("/agents/hub/" + "n" * 257, 400),
        ("/agents/hub/sub", 400),
        ("/agents/nobody/h", 400),
        ("/agents/hub/h/sub/nobody/x", 404),
        ("/agents/hub/h/sub/plain", 404),
        ("/agents/hub/h/sub/plain/%ff", 400),
        ("/agents/hub/h/sub/plain/%0", 400),
        ("/agents/hub/h" + "/sub/plain/a" * 4, 400),
        ("/agents/plain/h", 404),
        ("/agents/hub/h/sub/hub/x", 404),
        ("/agents/hub/h/sub/plain/a/sub/plain/b", 404),
    ],
)
async def test_a_bad_path_wakes_and_writes_nothing(
    target: str, status: int, tmp_path: Path
) -> None:
    async with world(tmp_path) as w:
        before = files(tmp_path)
        assert (await w.server.http("GET", target))[0] == status
        assert await w.server.close_of(target) == 4000 + status
        assert w.kernel.trees == {}
        assert files(tmp_path) == before


@pytest.mark.rule("F-27")
async def test_values_that_cannot_be_copied_change_nothing(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        hub = await w.kernel.get_agent(Hub, "h")
        before = rows(w)
        agent = w.node().agent
        bad: list[Any] = [
            object(), {1, object()}, print, "\ud800", {object(): 1},
        ]  # fmt: skip
        deep: list[Any] = []
        for _ in range(3000):
            deep = [deep]
        ring: list[Any] = []
        ring.append(ring)
        for value in [*bad, deep, ring]:
            with pytest.raises(UsageError):
                await hub.ping(value)
            with pytest.raises(UsageError):
                agent.set_state(value)
            with pytest.raises(UsageError):
                await agent.run_agent_tool(KINDS["Teller"], value, run_id="r")
            with pytest.raises(UsageError):
                await agent.schedule(1, "fired", value)
            with pytest.raises(UsageError):
                await agent.queue.put("fired", value)
        assert rows(w) == before
        assert agent.state == {"n": 0}
        assert await hub.ping("still here") == "still here"


@pytest.mark.rule("F-07")
async def test_a_second_kernel_on_the_folder_is_refused(tmp_path: Path) -> None:
    program = (
        "import sys, trio\n"
        "from culet.kernel import Agent, open_kernel\n"
        "from culet.kernel.errors import StorageBusy\n"
        "class Hub(Agent): pass\n"
        "async def main():\n"
        "    async with open_kernel(roots=[Hub], storage='sqlite:' + sys.argv[1]) as k:\n"
        "        await k.get_agent(Hub, 'h')\n"
        "try:\n"
        "    trio.run(main)\n"
        "except StorageBusy as error:\n"
        "    sys.exit(7 if sys.argv[1] in str(error) else 8)\n"
    )
    async with world(tmp_path) as w:
        hub = await w.kernel.get_agent(Hub, "h")
        with pytest.raises(StorageBusy):
            async with open_kernel(roots=[Hub], storage=f"sqlite:{tmp_path}"):
                pass
        other = await trio.run_process(
            [sys.executable, "-c", program, str(tmp_path)], check=False
        )
        assert other.returncode == 7
        assert await hub.note("still here") == 1
    async with world(tmp_path) as w:  # and the refused ones left nothing behind
        assert await (await w.kernel.get_agent(Hub, "h")).notes() == ["still here"]


async def test_a_newer_schema_is_refused_and_others_are_served(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        for name in ("h", "other"):
            await (await w.kernel.get_agent(Hub, name)).note(name)
        path = w.kernel.trees[TreeKey("Hub", "h")].store.folder.path
    async with world(tmp_path) as w:  # then nothing of the file is in the log
        await w.kernel.get_agent(Hub, "h")

    db = apsw.Connection(os.path.join(path, "tree.db"))
    version = db.pragma("user_version")
    db.pragma("user_version", version + 1)
    db.close()
    async with world(tmp_path) as w:
        with pytest.raises(SchemaTooNew):
            await w.kernel.get_agent(Hub, "h")
        assert (await w.server.http("GET", "/agents/hub/h"))[0] == 503
        assert await w.server.close_of("/agents/hub/h") == 1011
        assert await (await w.kernel.get_agent(Hub, "other")).notes() == ["other"]
        db = apsw.Connection(os.path.join(path, "tree.db"))
        db.pragma("user_version", version)
        db.close()
        assert await (await w.kernel.get_agent(Hub, "h")).notes() == ["h"]


@pytest.mark.rule("F-47")
async def test_a_foreign_origin_is_refused_before_anything(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        for origin in (
            "https://evil.example",
            "null",
            "http://[",
            "",
            "http://127.0.0.1",
        ):
            headers = [("Origin", origin)]
            assert await w.server.refused("/agents/hub/h", headers) == 403, origin
            status, _, body = await w.server.http(
                "GET", "/agents/hub/h", headers=(f"Origin: {origin}",)
            )
            assert status == 403
            assert b"evil" not in body
        assert w.kernel.trees == {}


@pytest.mark.rule("I-22", "F-42")
async def test_a_guessed_run_id_is_404_and_makes_nothing(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await (await w.kernel.get_agent(Hub, "h")).ping("x")
        before, kept = rows(w), files(tmp_path)
        for kind in ("teller", "middle", "hung", "raiser"):
            path = f"/agents/hub/h/sub/{kind}/guess-1"
            assert (await w.server.http("GET", path))[0] == 404
            assert await w.server.close_of(path) == 4404
        assert (rows(w), files(tmp_path)) == (before, kept)
        assert [n.name for n in w.kernel.trees[TreeKey("Hub", "h")].nodes.values()] == [
            "h"
        ]


@pytest.mark.rule("I-29", "F-54")
async def test_a_child_that_raises_in_on_start_disturbs_nobody(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.connect() as client:
        await client.hello()
        before = rows(w)
        hub = await w.kernel.get_agent(Hub, "h")
        with pytest.raises(FacetBroken):
            await hub.make("RaiserPlain", "r")
        answer = await client.call("make", "RaiserPlain", "r")
        assert not answer["success"]
        assert "secret" not in answer["error"]
        path = "/agents/hub/h/sub/raiser-plain/r"
        status, _, body = await w.server.http("GET", path)
        assert status == 503
        assert b"secret" not in body
        assert await w.server.close_of(path) == 1011
        assert rows(w) == before
        run = await call(client, "run", "Raiser", "r1", {"k": 1})
        assert (run["status"], run["reason"]) == ("error", "start-failed")
        assert "secret-token-9" in run["error"]  # the asker is told why
        assert await call(client, "ping", "x") == "x"


async def test_a_child_that_hangs_in_on_start_disturbs_nobody(tmp_path: Path) -> None:
    async with (
        world(tmp_path, start_s=0.3) as w,
        w.connect() as client,
        trio.open_nursery() as nursery,
    ):
        await client.hello()
        before = rows(w)
        hub = await w.kernel.get_agent(Hub, "h")
        seen: dict[str, Any] = {}

        async def api() -> None:
            with pytest.raises(FacetBroken):
                await hub.make("HungPlain", "a")
            seen["api"] = 1

        async def http() -> None:
            path = "/agents/hub/h/sub/hung-plain/b"
            seen["http"] = (await w.server.http("GET", path))[0]

        async def socket() -> None:
            seen["ws"] = await w.server.close_of("/agents/hub/h/sub/hung-plain/c")

        async def tool() -> None:
            seen["run"] = await hub.run("Hung", "r1", {})

        for fn in (api, http, socket, tool):
            nursery.start_soon(fn)
        with trio.fail_after(0.25):  # while all of them hang
            for i in range(20):
                assert await call(client, "ping", str(i)) == str(i)
            await call(client, "make", "Plain", "p")
        await until(lambda: len(seen) == 4, 10)
        assert (seen["http"], seen["ws"]) == (503, 1011)
        assert seen["run"]["reason"] == "start-failed"
        after = rows(w)
        assert after["job"] == before["job"]
        assert after["node"] == before["node"] + 2  # p, and the child of the run


@pytest.mark.parametrize("where", ["start", "middle", "end"])
async def test_a_model_that_fails_in_mid_stream_ends_the_run_in_error(
    where: str, tmp_path: Path
) -> None:
    at = {"start": 0, "middle": 5, "end": 9}[where]
    async with world(tmp_path) as w, w.connect() as client:
        await client.hello()
        run = await call(client, "run", "Teller", "r", {"k": 10, "fail_at": at})
        assert run["status"] == "error"
        hub = w.node().agent
        frames = [f async for f in hub.runs.replay("r")]
        assert len(frames) == at + 2
        assert (await call(client, "run", "Teller", "r2", {"k": 3}))[
            "status"
        ] == "completed"


class Unprintable(Agent):
    """Says and raises texts that are no Unicode."""

    async def on_turn(self, turn):
        yield {"type": "text-delta", "id": "t", "delta": "fine"}
        match turn.input:
            case "raise":
                raise ValueError("\ud800")
            case "summary":
                turn.summary = "\ud800"
            case "output":
                turn.output = ["\ud800"]
            case "deep":
                turn.output = deep()
            case "chunk":
                yield {"type": "text-delta", "id": "t", "delta": "\ud800"}


def deep() -> Any:
    value: list[Any] = []
    for _ in range(3000):
        value = [value]
    return value


@pytest.mark.parametrize("how", ["raise", "summary", "output", "deep", "chunk"])
async def test_text_that_is_no_unicode_ends_a_run_at_once(
    how: str, tmp_path: Path
) -> None:
    async with world(tmp_path, facets=[Unprintable]) as w:
        await (await w.kernel.get_agent(Hub, "h")).ping("x")
        with trio.fail_after(2):  # not only when its attempts are used up
            run = await w.node().agent.run_agent_tool(Unprintable, how, run_id="r")
        assert run.status == ("completed" if how == "summary" else "error")
        if how == "raise":
            assert run.error == "?"


async def test_an_agent_that_says_no_unicode_does_not_lose_its_clients(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as w, w.connect() as one, w.connect() as two:
        for client in (one, two):
            await client.hello()
        agent = w.node().agent
        for message in ("\ud800", 5, None):
            with pytest.raises(UsageError):
                agent.broadcast(message)
            with pytest.raises(UsageError):
                agent.sockets.list()[0].send(message)
        for client in (one, two):
            assert await call(client, "ping", "x") == "x"
