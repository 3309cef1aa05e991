"""`kernel.operator` and `kernel.roots`: what looks after roots from outside."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio

from culet.kernel import Agent, Operator, Retry, RootRow, Turn
from culet.kernel.errors import NotFound, UsageError
from culet.kernel.testing import Harness, open_test_kernel


class Kid(Agent):
    async def on_turn(self, turn: Turn) -> AsyncIterator[dict[str, Any]]:
        for i in range(turn.input):
            yield {"type": "text-delta", "id": "t", "delta": str(i)}
            await trio.sleep(1)


class Top(Agent):
    async def ask(self, run_id: str, words: int) -> None:
        await self.run_agent_tool(Kid, words, run_id=run_id, detached=True)

    async def plan(self) -> list[str]:
        once = Retry(max_attempts=1)
        return [
            (await self.schedule(3600, "note")).id,
            (await self.schedule(0, "breaks", retry=once)).id,
        ]

    async def note(self, _payload: Any, _schedule: Any) -> None:
        self.set_state("noted")

    async def breaks(self, _payload: Any, _schedule: Any) -> None:
        raise ValueError

    async def told(self) -> Any:
        return self.state


async def open_office(test: Harness) -> Any:
    return await test.kernel.get_agent(Top, "a")


async def test_an_operator_sees_runs_page_by_page_and_cancels_one(
    clock: object,
) -> None:
    async with open_test_kernel(roots=[Top], facets=[Kid]) as test:
        top = await open_office(test)
        for i in range(3):
            await top.ask(f"r{i}", 1000)
        await test.advance(2)
        async with test.kernel.operator("Top", "a") as operator:
            newest = await operator.runs(limit=2)
            rest = await operator.runs(before=newest[-1].number)
            assert [r.run.run_id for r in newest + rest] == ["r2", "r1", "r0"]
            receipt = await operator.cancel_run(newest[0].number, "enough")
            assert receipt is not None and receipt.status == "aborted"
            assert await operator.cancel_run(999) is None
            run = (await operator.runs())[0].run
            assert (run.status, run.reason) == ("aborted", "enough")


async def test_an_operator_runs_what_is_owed_now_and_replays_what_is_dead(
    clock: object,
) -> None:
    async with open_test_kernel(roots=[Top], facets=[Kid]) as test:
        top = await open_office(test)
        ring, broken = await top.plan()
        await test.advance(2)
        async with test.kernel.operator("Top", "a") as operator:
            [letter] = operator.dead()
            assert (letter.id, letter.what, letter.acts) == (
                broken, "breaks", ["replay", "cancel"]
            )  # fmt: skip
            assert set(letter.acts) <= Operator.acts(letter.kind)
            assert await operator.act(ring, "run_now")
            assert not await operator.act(ring, "redeliver"), "it is no letter"
            for nobody in ("", "0", "-1", "x", "²", "9" * 40):
                assert not await operator.act(nobody, "cancel"), nobody
            assert operator.dead(after=letter.id) == []
            with pytest.raises(UsageError, match="id of a letter"):
                operator.dead(after="x")
            assert await operator.act(broken, "cancel")
            assert operator.dead() == []
        await test.advance(1)
        assert await top.told() == "noted"


async def test_a_root_that_sleeps_is_opened_and_none_of_its_agents_started(
    clock: object,
) -> None:
    async with open_test_kernel(roots=[Top], facets=[Kid], idle_s=5) as test:
        await (await open_office(test)).ask("r", 1)
        await test.advance(30)
        assert [r.state for r in await test.kernel.roots()] == ["sleeping"]
        async with test.kernel.operator("Top", "a") as operator:
            [row] = await operator.runs()
            assert (row.run.run_id, row.phase) == ("r", "over")
            [root] = await test.kernel.roots()
            assert (root.state, root.agents) == ("open", 0)
            await test.advance(30)
            assert (await test.kernel.roots())[0].state == "open", "it is in use"
        await test.advance(30)
        assert (await test.kernel.roots())[0].state == "sleeping"


@pytest.mark.parametrize("key", [("Top", "none"), ("None", "a")])
async def test_a_root_that_was_never_made_is_not_made(
    clock: object, key: tuple[str, str]
) -> None:
    async with open_test_kernel(roots=[Top], facets=[Kid]) as test:
        with pytest.raises(NotFound):
            async with test.kernel.operator(*key):
                pass
        assert await test.kernel.roots() == []


async def test_all_roots_are_listed_by_name_also_those_that_owe_nothing(
    clock: object,
) -> None:
    async with open_test_kernel(roots=[Top], facets=[Kid], idle_s=5) as test:
        for i in range(5):
            await test.kernel.get_agent(Top, f"n{i}")
        await test.advance(30)
        await test.kernel.get_agent(Top, "n3")
        first = await test.kernel.roots(limit=2)
        last = first[-1].class_name, first[-1].name
        rest = await test.kernel.roots(after=last)
        assert [r.name for r in first + rest] == [f"n{i}" for i in range(5)]
        assert [r.state for r in first + rest] == [
            "sleeping", "sleeping", "sleeping", "open", "sleeping",
        ]  # fmt: skip
        assert rest[-1] == RootRow(
            class_name="Top", name="n4", state="sleeping", agents=0, due_at=None
        )
        assert [r.name for r in await test.kernel.roots(find="TOP/N1")] == ["n1"]
        await test.crash()
        await test.reopen()
        assert len(await test.kernel.roots()) == 5, "after a restart as well"
