"""The harness itself: time, crashes, eviction, faults, and the probe for long passes."""

from __future__ import annotations

import time

import pytest
import trio
import trio.testing

from culet.kernel import Agent
from culet.kernel.errors import FacetBroken, StorageError, StorageFull, UsageError
from culet.kernel.testing import ScriptedChild, open_test_kernel
from volume import SLOWER


class Notes(Agent):
    async def note(self, text: str, *, safely: bool = True) -> None:
        self.sql("create table if not exists note (text)")
        self.sql("insert into note values (?)", text)
        if safely:
            await self.durable()

    async def all(self) -> list[str]:
        return [r.text for r in self.sql("select text from note")]

    async def kid(self, name: str) -> list[str]:
        kid = await self.dynamic_agents.get(Notes, name)
        await kid.note("x")
        return await kid.all()

    async def quietly(self, text: str) -> None:
        self.spawn(self.note, text)

    async def slow(self) -> None:
        await trio.sleep(60)

    async def run(self, script: list[list[object]], run_id: str) -> str:
        return (await self.run_agent_tool(ScriptedChild, script, run_id=run_id)).status


async def test_virtual_time_follows_trio_and_jumps(clock: object) -> None:
    async with open_test_kernel(roots=[Notes]) as test:
        before = test.clock.now_ms()
        await test.advance(90)
        assert test.clock.now_ms() == before + 90_000
        test.clock.jump(-30)
        assert test.clock.now_ms() == before + 60_000


async def test_a_clock_that_does_not_jump_by_itself_is_moved(
    mock_clock: trio.testing.MockClock,
) -> None:
    async with open_test_kernel(roots=[Notes]) as test:
        before = test.clock.now_ms()
        await test.advance(2.5)
        assert test.clock.now_ms() == before + 2_500


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_a_crash_keeps_what_is_durable_and_nothing_else(
    kind: str, tmp_path: object, clock: object
) -> None:
    storage = "memory:" if kind == "memory" else f"sqlite:{tmp_path}"
    async with open_test_kernel(roots=[Notes], storage=storage) as test:
        notes = await test.kernel.get_agent(Notes, "a")
        await notes.note("kept")
        await notes.quietly("lost")
        await trio.lowlevel.checkpoint()
        tree = test.tree("Notes", "a")
        assert tree is not None
        node = test.find([("Notes", "a")])
        assert node is not None
        node.db.user("insert into note values ('lost')", (), 10)
        await test.crash()
        await test.reopen()
        notes = await test.kernel.get_agent(Notes, "a")
        assert "kept" in await notes.all()
        assert await notes.all() in (["kept"], ["kept", "lost"])
        assert test.lives == 2


async def test_evict_drops_from_memory_and_a_call_wakes(clock: object) -> None:
    async with open_test_kernel(roots=[Notes], facets=[Notes]) as test:
        notes = await test.kernel.get_agent(Notes, "a")
        await notes.kid("k")
        path = [("Notes", "a"), ("Notes", "k")]
        assert test.find(path) is not None
        assert test.is_idle(path)
        assert not test.is_idle(path[:1]), "it has a live facet"
        await test.evict(path[:1])
        assert test.tree("Notes", "a") is None
        assert await notes.kid("k") == ["x", "x"]


async def test_what_is_busy_is_not_evicted(clock: object) -> None:
    async with open_test_kernel(roots=[Notes]) as test, trio.open_nursery() as nursery:
        notes = await test.kernel.get_agent(Notes, "a")
        nursery.start_soon(notes.slow)
        await trio.testing.wait_all_tasks_blocked()
        assert not test.is_idle([("Notes", "a")])
        with pytest.raises(UsageError, match="busy"):
            await test.evict([("Notes", "a")])
        nursery.cancel_scope.cancel()


async def test_a_planned_fault_comes_once_and_is_told(clock: object) -> None:
    async with open_test_kernel(roots=[Notes]) as test:
        notes = await test.kernel.get_agent(Notes, "a")
        await notes.note("one")
        test.faults.fail_commit()
        with pytest.raises(StorageFull, match="planned"):
            await notes.note("two")
        await notes.note("three")
        assert await notes.all() == ["one", "three"]


async def test_a_process_that_died_writes_nothing_more(clock: object) -> None:
    async with open_test_kernel(roots=[Notes]) as test:
        notes = await test.kernel.get_agent(Notes, "a")
        await notes.note("one")
        test.faults.die_after(0)
        with pytest.raises((StorageError, FacetBroken)):
            await notes.note("two")
        assert test.faults.dead
        await test.crash()
        await test.reopen()
        assert await (await test.kernel.get_agent(Notes, "a")).all() == ["one"]


async def test_a_scripted_child_does_its_steps(clock: object) -> None:
    async with open_test_kernel(roots=[Notes], facets=[ScriptedChild]) as test:
        notes = await test.kernel.get_agent(Notes, "a")
        script = [["say", "hi"], ["sleep", 5], ["run", "n", [["output", 1]]]]
        assert await notes.run(script, "r") == "completed"
        assert await notes.run([["fail", "no"]], "f") == "error"


@pytest.mark.rule("G-12")
@pytest.mark.gap("this test holds the loop to see whether the probe sees it")
async def test_the_probe_sees_a_long_pass(gap_probe: object) -> None:
    await trio.lowlevel.checkpoint()
    until = time.thread_time() + 0.12 * SLOWER
    while time.thread_time() < until:
        pass
    await trio.lowlevel.checkpoint()
    await trio.lowlevel.checkpoint()
    verdict = gap_probe.verdict()  # type: ignore[attr-defined]
    assert verdict is not None
    assert "long_pass" in verdict
