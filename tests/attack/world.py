"""What the attacks stand on: agents that behave badly on request, a server on a real
folder, a disk that gets full when it is told to, and the doctor afterwards.
"""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import trio

from culet.kernel import Agent, Kernel, Limits, open_kernel, rpc
from culet.kernel.node import Node
from culet.kernel.ports import TreeKey
from culet.storage import Files, open_sqlite
from culet.web import create_app, serve
from sound import healthy
from web.serving import Client, Server

NOTES = "CREATE TABLE IF NOT EXISTS note (text TEXT)"


class Teller(Agent):
    """A tool that says `k` chunks, `pace` seconds apart, and can go wrong."""

    resumable = True

    async def on_turn(self, turn):
        said = len(turn.chunks())
        for i in range(said, turn.input["k"]):
            if turn.input.get("fail_at") == i:
                raise ValueError("secret-token-9")
            if turn.input.get("pace") is not None:
                await trio.sleep(turn.input["pace"])
            yield {"type": "text-delta", "id": "t", "delta": f"{self.name} {i};"}


class Middle(Agent):
    """A tool that has its work done by another tool."""

    resumable = True

    async def on_turn(self, turn):
        run = await self.run_agent_tool(Teller, turn.input, run_id="inner")
        yield {"type": "text-delta", "id": "t", "delta": run.status}


class Hung(Agent):
    async def on_start(self) -> None:
        await trio.sleep_forever()

    async def on_turn(self, turn):
        yield {"type": "text-delta", "id": "t", "delta": "never"}


class Raiser(Agent):
    async def on_start(self) -> None:
        raise ValueError("secret-token-9")

    async def on_turn(self, turn):
        yield {"type": "text-delta", "id": "t", "delta": "never"}


class HungPlain(Agent):
    """No tool, so the default gate lets clients create it."""

    async def on_start(self) -> None:
        await trio.sleep_forever()


class RaiserPlain(Agent):
    async def on_start(self) -> None:
        raise ValueError("secret-token-9")


class Plain(Agent):
    @rpc
    async def note(self, text: str) -> int:
        self.sql(NOTES)
        self.sql("INSERT INTO note VALUES (?)", text)
        return len(self.sql("SELECT text FROM note"))

    @rpc
    async def notes(self) -> list[str]:
        self.sql(NOTES)
        return [row.text for row in self.sql("SELECT text FROM note ORDER BY rowid")]

    async def note_late(self, payload: str, schedule: Any) -> None:
        await self.note(payload)


class Hub(Agent):
    """A root that clients can ask for everything."""

    initial_state = {"n": 0}

    @rpc
    async def ping(self, text: str) -> str:
        return text

    @rpc
    async def note(self, text: str) -> int:
        self.sql(NOTES)
        self.sql("INSERT INTO note VALUES (?)", text)
        return len(self.sql("SELECT text FROM note"))

    @rpc
    async def notes(self) -> list[str]:
        self.sql(NOTES)
        return [row.text for row in self.sql("SELECT text FROM note ORDER BY rowid")]

    @rpc
    async def tell(self, text: str) -> None:
        self.broadcast(text)

    @rpc
    async def count(self, n: int) -> None:
        self.set_state({"n": n})

    @rpc
    async def run(
        self, kind: str, run_id: str, value: dict[str, Any]
    ) -> dict[str, Any]:
        run = await self.run_agent_tool(KINDS[kind], value, run_id=run_id)
        return {"status": run.status, "reason": run.reason, "error": run.error}

    @rpc
    async def begin(self, kind: str, run_id: str, value: dict[str, Any]) -> str:
        run = await self.run_agent_tool(
            KINDS[kind], value, run_id=run_id, detached=True
        )
        return run.status

    @rpc
    async def stop(self, run_id: str) -> str | None:
        return (await self.runs.cancel(run_id)).status

    @rpc
    async def statuses(self) -> dict[str, str]:
        return {run.run_id: run.status for run in self.runs.list()}

    @rpc
    async def make(self, kind: str, name: str) -> None:
        await self.dynamic_agents.get(KINDS[kind], name)

    @rpc
    async def drop(self, kind: str, name: str) -> None:
        await self.dynamic_agents.delete(KINDS[kind], name)

    @rpc
    async def later(self, seconds: float, text: str) -> str:
        return (await self.schedule(seconds, "fired", text)).id

    async def fired(self, payload: Any, schedule: Any) -> None:
        await self.note(f"fired {payload}")


class Guarded(Hub):
    """A hub whose own file has little room."""


FACETS: list[type[Agent]] = [
    Teller, Middle, Hung, Raiser, HungPlain, RaiserPlain, Plain,
]  # fmt: skip
KINDS: dict[str, type[Agent]] = {cls.__name__: cls for cls in FACETS}


class Disk:
    """The observer of a store's file module: full from the n-th operation on, or dead.

    Only operations that need room fail; reading and unlinking go on.
    """

    NEEDS_ROOM = frozenset({"mkdir", "write", "sync", "truncate", "open", "rename"})

    def __init__(self) -> None:
        self.seen = 0
        self.full_at: int | None = None
        self.refused = 0

    def __call__(self, operation: str, path: str) -> None:
        if operation not in self.NEEDS_ROOM:
            return
        if operation == "open" and os.path.exists(path):
            return
        self.seen += 1
        if self.full_at is not None and self.seen >= self.full_at:
            self.refused += 1
            raise OSError(errno.ENOSPC, "No space left on device", path)

    def fill(self, after: int = 0) -> None:
        """Be full after so many more operations."""
        self.full_at = self.seen + after + 1

    def heal(self) -> None:
        self.full_at = None


class World:
    """A server on a folder."""

    def __init__(
        self, server: Server, kernel: Kernel, disk: Disk, folder: Path
    ) -> None:
        self.server, self.kernel, self.disk, self.folder = server, kernel, disk, folder

    def connect(self, path: str = "/agents/hub/h") -> Any:
        return self.server.connect(path)

    def node(self, *names: str) -> Node | None:
        tree = self.kernel.trees.get(TreeKey("Hub", "h"))
        if tree is None:
            return None
        for node in tree.nodes.values():
            if [n.name for n in node.lineage()] == ["h", *names]:
                return node
        return None


@asynccontextmanager
async def world(
    folder: Path,
    *,
    limits: Limits | None = None,
    roots: list[type[Agent]] | None = None,
    facets: list[type[Agent]] | None = None,
    start_s: float = 30.0,
    abort_grace_s: float = 1.0,
    idle_s: float = 60.0,
    **options: Any,
) -> AsyncIterator[World]:
    """Serve the agents of this module on a real folder, and let the doctor look after."""
    disk = Disk()
    limits = limits or Limits()
    store = open_sqlite(str(folder), limits=limits, files=Files(observer=disk))
    async with (
        open_kernel(
            roots=roots or [Hub],
            facets=FACETS if facets is None else facets,
            storage=store,
            limits=limits,
            start_s=start_s,
            abort_grace_s=abort_grace_s,
            idle_s=idle_s,
        ) as kernel,
        trio.open_nursery() as nursery,
    ):
        url = await nursery.start(
            partial(serve, create_app(kernel, **options), bind="127.0.0.1:0")
        )
        yield World(Server(url, kernel), kernel, disk, folder)
        nursery.cancel_scope.cancel()
    healthy(folder)


async def until(condition: Any, timeout: float = 5.0) -> None:
    """Poll a condition that nobody announces."""
    with trio.fail_after(timeout):
        while not condition():
            await trio.sleep(0.005)


async def call(client: Client, method: str, *args: Any) -> Any:
    """Call; return the value, raise what the server refused with."""
    frame = await client.call(method, *args)
    assert frame.get("success", True), frame
    return frame.get("result")
