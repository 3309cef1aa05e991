"""A file whose user never stops writing: its WAL stays bounded, and the loop runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from culet.kernel import Agent, Limits, open_kernel


class Hot(Agent):
    async def write(self, rows: int) -> None:
        self.sql("CREATE TABLE IF NOT EXISTS t (v TEXT)")
        for _ in range(rows):
            self.sql("INSERT INTO t (v) VALUES (?)", "x" * 400)
            await trio.lowlevel.checkpoint()


@pytest.mark.limit("checkpoint_frames", "huge_frames")
async def test_the_wal_of_a_file_that_never_rests_stays_bounded(tmp_path: Path) -> None:
    limits = Limits(checkpoint_frames=200, huge_frames=600)
    largest = 0

    async def watch() -> None:
        nonlocal largest
        while True:
            await trio.sleep(0.005)
            sizes = [p.stat().st_size for p in tmp_path.rglob("*.db-wal") if p.exists()]
            largest = max(largest, *sizes, 0)

    async with open_kernel(
        roots=[Hot], storage=f"sqlite:{tmp_path}", limits=limits
    ) as kernel:
        hot = await kernel.get_agent(Hot, "a")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            await hot.write(12_000)
            nursery.cancel_scope.cancel()
        tree = next(iter(kernel.trees.values()))

        assert tree.barrier.records_at_once > 0
        frame = 1024 + 24
        assert largest < 8 * limits.huge_frames * frame
    async with open_kernel(roots=[Hot], storage=f"sqlite:{tmp_path}") as kernel:
        await kernel.get_agent(Hot, "a")
        (root,) = [n for t in kernel.trees.values() for n in t.nodes.values()]
        assert root.agent.sql("SELECT count(*) AS n FROM t")[0].n == 12_000
