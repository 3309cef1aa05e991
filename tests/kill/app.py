"""The demo's classes, served; kills itself at the k-th event of a kind.

    python tests/kill/app.py --dir DIR [--at EVENT:K] [--pace S] [--mounted] [--port N] [--model]

Events are the kernel's channels (`run:ask`, `run:start`, `turn:chunk`, `turn:end`,
`run:end`, …), `answer` (a chunk of the assistant after all of its runs have ended) and
`file:OP` of the store's file module. A side file lists the start of each tool call.
`--mounted`: the classes live in somebody's own app, and plain hypercorn serves it.
`--model`: the assistant thinks with the model that the environment names.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import trio
from hypercorn.config import Config
from hypercorn.trio import serve as hypercorn_serve
from quart_trio import QuartTrio

from culet.adapters.environment import model_from_environment
from culet.adapters.model import Model
from culet.adapters.passage import Passage
from culet.adapters.tooling import ToolContext
from culet.kernel import Kernel, open_kernel
from culet.kernel.core.limits import Limits
from culet.storage import open_sqlite
from culet.storage.files import Files
from culet.web import create_app, install, serve
from culet.web.demo.agents import Researcher, demo_classes
from culet.web.demo.corpus import corpora

DOCS = Path(__file__).parent / "docs"


class Fuse:
    """Counts events and ends the process at the one that was asked for."""

    def __init__(self, at: str) -> None:
        kind, _, count = at.rpartition(":")
        self.kind, self.left = kind, int(count or 0)
        self.runs = 0

    def hit(self, kind: str) -> None:
        if kind == self.kind:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def event(self, channel: str, tree: Any, subject: Any, detail: Any) -> None:
        if channel == "run:start":
            self.runs += 1
        if channel == "run:end":
            self.runs -= 1
        if channel == "turn:chunk" and tree is not None:
            root = subject.slot == tree.root_slot
            if not root:
                self.hit("child:chunk")
            elif self.runs == 0 and detail == "text-delta":
                self.hit("answer")
        if channel == "turn:end" and tree is not None and subject.kind == "run":
            self.hit("child:end")
        self.hit(channel)

    def file(self, op: str, name: str) -> None:
        self.hit(f"file:{op}")


async def main(
    folder: str, at: str, pace: float, mounted: bool, port: int, model: Model | None
) -> None:
    fuse = Fuse(at)
    side = open(Path(folder) / "side.txt", "a")  # noqa: SIM115
    life = sum(1 for _ in (Path(folder) / "side.txt").open())
    look_up = Researcher.look_up

    class Noted(Researcher):
        async def look_up(
            self, ctx: ToolContext, terms: list[str], limit: int = 12
        ) -> list[Passage]:
            side.write(f"{life} {ctx.run_id} {ctx.tool_call_id}\n")
            side.flush()
            return await look_up(self, ctx, terms, limit)

    given = None if model is None else lambda: model
    classes = demo_classes(corpora([DOCS]), pace, given)
    classes.researcher.look_up = Noted.look_up  # type: ignore[method-assign]
    side.write(f"{life} life\n")
    side.flush()
    store = open_sqlite(
        f"{folder}/data", limits=Limits(), files=Files(observer=fuse.file)
    )

    @asynccontextmanager
    async def opener() -> AsyncIterator[Kernel]:
        async with open_kernel(
            roots=[classes.assistant],
            facets=[classes.researcher, classes.library],
            storage=store,
        ) as kernel:
            kernel.subscribe("*", fuse.event)
            yield kernel

    async with trio.open_nursery() as nursery:
        run = run_mounted if mounted else run_own
        url = await nursery.start(run, opener, f"127.0.0.1:{port}")
        sys.stdout.write(f"{url}\n")
        sys.stdout.flush()


async def run_own(opener: Any, bind: str, *, task_status: Any) -> None:
    async with opener() as kernel:
        await serve(create_app(kernel), bind=bind, task_status=task_status)


async def run_mounted(opener: Any, bind: str, *, task_status: Any) -> None:
    app = QuartTrio("theirs")
    install(app, opener)
    config = Config()
    config.bind = [bind]
    config.errorlog = None
    async with trio.open_nursery() as nursery:
        binds = await nursery.start(partial(hypercorn_serve, cast(Any, app), config))
        task_status.started(binds[0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True)
    parser.add_argument("--at", default=":0")
    parser.add_argument("--pace", type=float, default=0.004)
    parser.add_argument("--mounted", action="store_true")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--model", action="store_true")
    args = parser.parse_args()
    model = model_from_environment() if args.model else None
    trio.run(main, args.dir, args.at, args.pace, args.mounted, args.port, model)
