"""What has ended goes when it is old enough, where a class says so, and nothing else does."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import trio

from adapters.peer import connected, user
from adapters.talk import DOORS, Talk, ask, probe, texts
from culet.kernel import Detached, Limits
from culet.kernel.ports import TreeKey
from culet.kernel.testing import Harness, open_test_kernel
from kernel.agents import rows
from kernel.toolkit import HEARD, Kid, Top, say, top

DAY_S = 86_400.0
WEEK_S = 7 * DAY_S


class Wordy(Kid):
    """Says five thousand times a kilobyte, and goes on with it after a crash."""

    resumable = True

    async def on_turn(self, turn: Any) -> Any:
        for number in range(len(turn.chunks()), turn.input):
            yield say(f"{number:05}" + "x" * 1_000)
            if number == turn.input // 2:
                await trio.sleep(3)


class Forgetful(Top):
    retention_s: ClassVar[float | None] = WEEK_S

    async def not_today(self, run: Any) -> None:
        raise ValueError("on purpose")


class Keeps(Top):
    pass


async def days(test: Harness, count: float) -> None:
    """Let days go by, in the steps in which the clock is looked at."""
    test.clock.jump(count * DAY_S)
    await test.advance(60)


async def read(test: Harness, name: str, sql: str) -> list[Any]:
    """Read what a root has in its tree, without waking it."""
    return rows(await test.kernel.host.open_root(TreeKey(name, "a")), sql)


async def runs_of(test: Harness, name: str) -> list[Any]:
    return await read(test, name, "SELECT id, status FROM run")


async def jobs_of(test: Harness, name: str) -> list[Any]:
    return await read(test, name, "SELECT kind, key FROM job")


def size(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.rglob("*.db"))


@pytest.mark.rule("HB-31")
@pytest.mark.parametrize("crash", [False, True])
async def test_a_run_that_is_old_goes_in_the_sleep_of_its_agent_with_all_its_bytes(
    crash: bool, clock: object, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}"
    async with open_test_kernel(
        roots=[Forgetful, Keeps], facets=[Wordy], storage=url, idle_s=30
    ) as test:
        starts: list[Any] = []
        test.kernel.subscribe(
            "agent:start", lambda _c, _t, _s, told: starts.append(told)
        )
        for cls in (Forgetful, Keeps):
            me = await top(test, cls)
            await me.run_agent_tool(Wordy, 5_000, run_id="r", detached=True)
        await test.advance(1)
        if crash:
            await test.crash()  # in the middle of its stream
            await test.reopen()
        await test.advance(60)
        assert await runs_of(test, "Forgetful") == [("r", "completed")]
        assert await jobs_of(test, "Forgetful") == [("limit", "retention")]
        assert await jobs_of(test, "Keeps") == []
        full = size(tmp_path)
        assert full > 2 * 5_000_000
        await days(test, 6.9)
        assert await runs_of(test, "Forgetful") == [("r", "completed")]
        await days(test, 0.2)
        assert await runs_of(test, "Forgetful") == []
        assert await jobs_of(test, "Forgetful") == [], "nothing is left to be swept"
        assert full - size(tmp_path) > 5_000_000
        assert await read(test, "Forgetful", "SELECT class FROM node") == [
            ("Forgetful",)
        ]
        starts.clear()
        for _ in range(23):
            await days(test, 1)
        assert starts == [], "nobody is woken for nothing"
        assert await runs_of(test, "Keeps") == [("r", "completed")]


@pytest.mark.rule("HB-31", "C-007")
async def test_each_goes_at_its_time_and_what_runs_or_is_not_heard_of_stays(
    clock: object,
) -> None:
    limits = Limits(sweep_runs=2)
    async with open_test_kernel(roots=[Forgetful], facets=[Kid], limits=limits) as test:
        me = await top(test, Forgetful)
        policy = Detached(on_finish="not_today")
        await me.run_agent_tool(
            Kid, [["sleep", 30 * DAY_S]], run_id="long", detached=True
        )
        await me.run_agent_tool(Kid, [["say", "x"]], run_id="owed", detached=policy)
        for run_id in ("a", "b", "c"):
            await me.run_agent_tool(Kid, [["say", "x"]], run_id=run_id)
        await test.advance(60)
        await days(test, 3)
        me = await top(test, Forgetful)
        await me.run_agent_tool(Kid, [["say", "x"]], run_id="later")
        left = {r for r, _s in await runs_of(test, "Forgetful")}
        assert left == {"long", "owed", "a", "b", "c", "later"}
        await days(test, 4.1)
        assert {r for r, _s in await runs_of(test, "Forgetful")} == {
            "long",
            "owed",
            "later",
        }
        await days(test, 3)
        assert {r for r, _s in await runs_of(test, "Forgetful")} == {"long", "owed"}
        assert (await jobs_of(test, "Forgetful")).count(("limit", "retention")) == 1
        told = [h for h in HEARD if h[0] == "finish"]
        assert len(told) == 5, "each of them was heard of before it went"


class Sweeps(Talk):
    retention_s: ClassVar[float | None] = WEEK_S

    async def keyed(self) -> bool:
        """Ask for a turn by a key; returns whether it was new."""
        asked = [user("u-k", "by a key")]
        return (await self.submit_messages(asked, idempotency_key="k")).accepted


@pytest.mark.rule("HB-31", "C-007")
async def test_what_turns_have_streamed_goes_when_it_is_old_and_their_messages_stay(
    clock: object,
) -> None:
    DOORS.__init__()  # type: ignore[misc]
    path = ("Sweeps", "a")
    async with open_test_kernel(roots=[Sweeps], idle_s=30) as test:
        async with connected(test.kernel, path) as tab:
            ask(tab, "r1", "old fail")
            await tab.ended("r1")
        await days(test, 5)
        async with connected(test.kernel, path) as tab:
            assert (await probe(tab, "p"))["id"] == "r1"
            ask(tab, "r2", "wait:x still")
            await DOORS.at("wait:x")
        await days(test, 2.5)  # the first is swept while the second streams
        me = await test.kernel.get_agent(Sweeps, "a")
        assert {s for s, _ in await me.entries()} <= {"r2"}
        DOORS.open("wait:x")
        await test.advance(60)
        assert {s for s, _ in await me.entries()} == {"r2"}
        await days(test, 6)
        me = await test.kernel.get_agent(Sweeps, "a")
        assert {s for s, _ in await me.entries()} == {"r2"}
        await days(test, 1.5)
        me = await test.kernel.get_agent(Sweeps, "a")
        assert await me.entries() == []
        assert await jobs_of(test, "Sweeps") == []
        assert await read(test, "Sweeps", "SELECT id FROM fiber") == []
        async with connected(test.kernel, path) as late:
            assert texts(late.frames[0]["messages"]) == [
                "old fail", "old", "wait:x still", "wait:x still",
            ]  # fmt: skip
            late.send("cf_agent_stream_resume_ack", id="r2")
            assert (await probe(late, "p"))["reason"] == "idle"


@pytest.mark.rule("HB-31", "C-007")
async def test_a_failure_that_is_swept_is_offered_to_nobody_any_more(
    clock: object,
) -> None:
    path = ("Sweeps", "a")
    async with open_test_kernel(roots=[Sweeps], idle_s=30) as test:
        assert await (await test.kernel.get_agent(Sweeps, "a")).keyed()
        async with connected(test.kernel, path) as tab:
            ask(tab, "r1", "old fail")
            await tab.ended("r1")
        await days(test, 7.1)
        assert await jobs_of(test, "Sweeps") == []
        me = await test.kernel.get_agent(Sweeps, "a")
        assert await me.entries() == []
        assert not await me.keyed(), "a key is known for ever"
        async with connected(test.kernel, path) as late:
            assert (await probe(late, "p"))["reason"] == "idle"


@pytest.mark.rule("HB-31")
@pytest.mark.parametrize("commits", range(7))
async def test_a_death_at_any_commit_of_a_sweep_only_delays_it(
    commits: int, clock: object
) -> None:
    path = ("Sweeps", "a")
    async with open_test_kernel(roots=[Sweeps], facets=[Kid], idle_s=30) as test:
        async with connected(test.kernel, path) as tab:
            ask(tab, "r1", "some words")
            await tab.ended("r1")
        me = await top(test, Sweeps)
        for run_id in ("a", "b"):
            await me.run_agent_tool(Kid, [["say", "x"]], run_id=run_id)
        await test.advance(60)
        test.faults.die_after(commits)
        await days(test, 7.1)
        assert test.faults.dead, "the sweep has as many commits"
        await test.crash()
        await test.reopen()
        await test.advance(600)
        assert await read(test, "Sweeps", "SELECT id FROM run") == []
        assert await read(test, "Sweeps", "SELECT id FROM fiber") == []
        assert await jobs_of(test, "Sweeps") == []
        assert await read(test, "Sweeps", "SELECT class FROM node") == [("Sweeps",)]
        root = await test.kernel.get_agent(Sweeps, "a")
        assert await root.entries() == []
        async with connected(test.kernel, path) as late:
            assert texts(late.frames[0]["messages"]) == ["some words", "some words"]
