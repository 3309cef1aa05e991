"""The log of a tree under load: many open files, and the pause between records."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import trio

from culet.kernel import Agent
from culet.kernel.core.limits import DEFAULT, Limits
from culet.kernel.testing import open_test_kernel
from storage.driving import KEY, NOTE, NOTES, add_node, barrier, opened

BIG = "x" * 700


@pytest.mark.slow
def test_a_thousand_open_files_let_segments_retire(tmp_path: Path) -> None:
    """More agents than may be open, all of them written in turn, some deleted."""
    limits = Limits(
        open_databases=1000,
        segment_bytes=256 << 10,
        checkpoint_frames=4,
        checkpoint_s=60.0,  # no clock decides
    )
    store = opened(str(tmp_path), limits=limits)
    tree = store.open_tree(KEY, level="power")
    slots = [f"s{number}" for number in range(1100)]
    with tree.tree.transaction():
        for slot in slots:
            add_node(tree, slot)
    before = len(os.listdir("/proc/self/fd"))
    most = 0
    for turn in range(3):
        for at in range(0, len(slots), 100):
            for slot in slots[at : at + 100]:
                tree.agent(slot).execute(NOTE, (f"k{turn}", BIG))
            barrier(tree)
            most = max(most, len(tree.log.segments))
            assert len(store._open_files) <= 1000
        for slot in slots[-20:]:
            tree.tree.execute("DELETE FROM main.node WHERE slot = ?", (slot,))
            tree.delete(slot)
        del slots[-20:]
        barrier(tree)
    assert len(store._open_files) > 900
    assert tree.log.low > 5  # many were let go
    assert most <= 6
    assert len([n for n in tree.folder.names() if n.startswith("log")]) <= most + 2
    store.close()
    assert len(os.listdir("/proc/self/fd")) <= before

    store = opened(str(tmp_path), limits=limits)
    tree = store.open_tree(KEY, level="power")
    assert tree.slots() == set(slots)
    for slot in slots:
        assert tree.agent(slot).execute(NOTES) == [("k0",), ("k1",), ("k2",)]
    store.close()


class Writer(Agent):
    async def note(self, text: str) -> None:
        self.sql("CREATE TABLE IF NOT EXISTS note (text)")
        self.sql("INSERT INTO note VALUES (?)", text)

    async def note_and_wait(self, text: str) -> None:
        await self.note(text)
        await self.durable()


@pytest.mark.limit("segment_bytes")
def test_a_segment_is_left_in_time_and_none_is_larger(tmp_path: Path) -> None:
    size = 64 << 10
    store = opened(str(tmp_path), limits=Limits(segment_bytes=size))
    tree = store.open_tree(KEY, level="power")
    add_node(tree, "s")
    filled = []
    for number in range(200):
        tree.agent("s").execute(NOTE, (f"k{number}", "x"))
        barrier(tree)
        filled.append((tree.log.segment, tree.log._filled))
    folder = next(path.parent for path in tmp_path.rglob("log*"))
    assert {path.stat().st_size for path in folder.glob("log*")} == {size}
    assert filled[-1][0] > 3, "it went on in the next one"
    last = [most for (at, most), (after, _) in pairwise(filled) if after > at]
    assert all(size * 3 // 4 < most <= size for most in last)
    store.close()


@pytest.mark.limit("linger_s")
async def test_a_commit_that_nobody_waits_for_is_durable_within_the_linger(
    autojump_clock: Any,
) -> None:
    """One record for all of a while; who waits cuts the while short."""
    async with open_test_kernel(roots=[Writer], storage="memory:") as test:
        writer = await test.kernel.get_agent(Writer, "w")
        await writer.note_and_wait("first")
        tree = test.tree("Writer", "w")
        assert tree is not None
        await trio.sleep(1)
        records = tree.barrier.records
        agent = tree.store.agent(tree.root_slot)
        start = trio.current_time()
        for number in range(10):
            agent.user("INSERT INTO note VALUES (?)", (f"n{number}",), 1)
            tree.barrier.touched()
            await trio.sleep(DEFAULT.linger_s / 20)
        assert tree.barrier.records == records
        assert tree.barrier.durable < tree.store.commits
        while tree.barrier.durable < tree.store.commits:
            await trio.sleep(DEFAULT.linger_s / 20)
        assert trio.current_time() - start <= DEFAULT.linger_s * 1.2
        assert tree.barrier.records == records + 1

        agent.user("INSERT INTO note VALUES ('last')", (), 1)
        start = trio.current_time()
        await tree.barrier.wait()
        assert trio.current_time() - start < DEFAULT.linger_s / 2
