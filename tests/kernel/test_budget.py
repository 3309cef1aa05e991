"""Budgets of a tree: reserved at dispatch, shared, returned, refused before anything is spent."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio

from culet.kernel import (
    Agent,
    Budget,
    CancelToken,
    Chunk,
    Spent,
    Turn,
)
from culet.kernel.core.run import model_value
from culet.kernel.errors import OverBudget, UsageError
from culet.kernel.testing import Harness, open_test_kernel
from machines.invariants import broken

BILL: Counter[str] = Counter()  # what the outside counts


@pytest.fixture(autouse=True)
def _fresh() -> None:
    BILL.clear()


class Buyer(Agent):
    """Its turn is a list of steps; what it says tells how each of them went."""

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        told: list[Any] = []
        for verb, *args in turn.input:
            try:
                told.append(await self._do(verb, *args))
            except OverBudget as error:
                if verb == "must":
                    raise
                told.append([error.what, error.asked, error.left, error.retryable])
            yield {"type": "text-delta", "id": "t", "delta": f"{verb} "}
        turn.output = told

    async def _do(self, verb: str, *args: Any) -> Any:
        match verb:
            case "buy" | "must":
                return await self.buy(*args)
            case "sleep":
                await trio.sleep(args[0])
                return "slept"
            case "left":
                left = self.budget.left()
                return [left.tokens, left.calls, left.depth, left.seconds]
            case "run":
                run = await self.run_agent_tool(Buyer, args[0], **_options(args))
                return [run.status, run.reason, run.output, run.retryable]
            case "send":
                options = {**_options(args), "detached": True}
                return (await self.run_agent_tool(Buyer, args[0], **options)).status
            case "many":
                return await self._many(args[0], args[1], _options(args[1:]))
            case "peer":
                peer = await self.dynamic_agents.get(Buyer, "peer")
                return await peer.buy(*args)
            case "peer fiber":
                peer = await self.dynamic_agents.get(Buyer, "peer")
                return [await peer.in_fiber(*args), await peer.in_background(*args)]
            case "fiber":
                return await self.run_fiber("f", lambda: self.buy(*args))
            case "boom":
                raise ValueError("boom")
            case "drop":
                await self.dynamic_agents.delete(Buyer, args[0])
                return "dropped"
            case "clear":
                return await self.runs.clear()
            case "spent":
                return self.budget.spent().tokens
        raise AssertionError(verb)

    async def buy(self, reserve: int, use: int | None = None) -> str:
        """Reserve, wait a while as for a model, be billed, settle."""
        spend = await self.budget.reserve(tokens=reserve, calls=1)
        BILL["tokens"] += reserve if use is None else use
        BILL["calls"] += 1
        await trio.sleep(0.1)
        if use is not None:
            spend.settle(tokens=use)
        return "bought"

    async def in_fiber(self, reserve: int, use: int) -> str:
        return str(await self.run_fiber("f", lambda: self.buy(reserve, use)))

    async def in_background(self, reserve: int, use: int) -> str:
        return (
            await self.fibers.start("f", lambda: self.buy(reserve, use), wait=True)
        ).status

    async def _many(self, count: int, steps: Any, options: dict[str, Any]) -> Any:
        ends: Counter[str] = Counter()

        async def one(n: int) -> None:
            run = await self.run_agent_tool(
                Buyer, steps, run_id=f"{self.name}.{n}", **options
            )
            ends[run.reason or run.status] += 1

        async with trio.open_nursery() as nursery:
            for n in range(count):
                nursery.start_soon(one, n)
        return dict(ends)


class Desk(Buyer):
    """The root, which runs buyers and is nobody's run."""


def _options(args: Any) -> dict[str, Any]:
    given = dict(args[1]) if len(args) > 1 else {}
    if isinstance(given.get("budget"), dict):
        given["budget"] = Budget(**given["budget"])
    return given


def opened(**options: Any) -> Any:
    return open_test_kernel(roots=[Desk], facets=[Buyer], **options)


async def desk(test: Harness) -> Any:
    await test.kernel.get_agent(Desk, "a")
    node = test.find([("Desk", "a")])
    assert node is not None
    return node.agent


def accounts(test: Harness) -> list[Any]:
    """Return state, limit, spent and held of tokens and calls, the eldest first."""
    tree = test.tree("Desk", "a")
    assert tree is not None
    assert broken(tree) == []
    sql = (
        "SELECT state, tokens_limit, tokens_spent, tokens_held, calls_limit, calls_spent,"
        " calls_held FROM account ORDER BY id"
    )
    return [list(row) for row in tree.db.execute(sql)]


async def test_sixty_four_dispatches_at_once_against_a_budget_for_ten(
    clock: object,
) -> None:
    async with opened() as test:
        me = await desk(test)
        steps = [["many", 64, [["buy", 10, 7]], {"budget": {"tokens": 10, "calls": 1}}]]
        run = await me.run_agent_tool(
            Buyer, steps, run_id="top", budget=Budget(tokens=100)
        )
        assert run.output == [{"completed": 10, "budget": 54}]
        assert run.total == Spent(tokens=70, calls=10)
        assert dict(BILL) == {"tokens": 70, "calls": 10}
        assert len(accounts(test)) == 11
        assert me.runs.spent("top") == run.total


async def test_siblings_share_what_their_asker_has(clock: object) -> None:
    async with opened() as test:
        me = await desk(test)
        steps = [["many", 64, [["must", 10, 10]]], ["left"]]
        run = await me.run_agent_tool(
            Buyer, steps, run_id="top", budget=Budget(tokens=100, calls=1_000)
        )
        assert run.output == [
            {"completed": 10, "over-budget": 54},
            [0, 990, None, None],
        ]
        assert BILL["tokens"] == 100
        assert accounts(test)[0] == ["closed", 100, 100, 0, 10, 10, 0]


async def test_three_levels_reserve_from_each_other_and_return(clock: object) -> None:
    async with opened() as test:
        me = await desk(test)
        inner = [["buy", 10, 4], ["left"]]
        middle = [
            ["run", inner, {"run_id": "in", "budget": {"tokens": 20}}],
            ["left"],
            ["spent"],
        ]
        outer = [
            ["run", middle, {"run_id": "mid", "budget": {"tokens": 50}}],
            ["left"],
            ["spent"],
        ]
        run = await me.run_agent_tool(
            Buyer, outer, run_id="top", budget=Budget(tokens=100)
        )
        assert run.output == [
            [
                "completed",
                None,
                [
                    ["completed", None, ["bought", [16, None, None, None]], False],
                    [46, None, None, None],
                    4,
                ],
                False,
            ],
            [96, None, None, None],
            4,
        ]
        assert run.total == Spent(tokens=4, calls=1)
        assert accounts(test) == [
            ["closed", 4, 4, 0, None, 1, 0],
            ["closed", 4, 4, 0, None, 1, 0],
            ["closed", 4, 4, 0, None, 1, 0],
        ]


async def test_while_it_goes_on_what_a_child_has_reserved_is_held(
    clock: object,
) -> None:
    async with opened() as test:
        me = await desk(test)
        child = [["buy", 10, 4], ["sleep", 5]]
        steps = [
            ["run", child, {"run_id": "kid", "budget": {"tokens": 40, "calls": 3}}]
        ]
        run = await me.run_agent_tool(
            Buyer, steps, run_id="top", budget=Budget(tokens=100), detached=True
        )
        await test.advance(1)
        assert accounts(test) == [
            ["open", 100, 4, 36, None, 1, 2],
            ["open", 40, 4, 0, 3, 1, 0],
        ]
        await test.advance(9)
        assert me.runs.get("top").status == "completed"
        assert accounts(test)[0] == ["closed", 4, 4, 0, None, 1, 0]
        assert run.total is None


async def test_a_refusal_leaves_no_row_and_the_model_can_read_it(
    clock: object,
) -> None:
    async with opened() as test:
        me = await desk(test)
        ask = {"run_id": "much", "budget": {"tokens": 40}}
        steps = [["buy", 70, 70], ["run", [["buy", 1, 1]], ask], ["left"]]
        run = await me.run_agent_tool(
            Buyer, steps, run_id="top", budget=Budget(tokens=100)
        )
        assert run.output == [
            "bought",
            ["error", "budget", None, False],
            [30, None, None, None],
        ]
        assert len(accounts(test)) == 1
        tree = test.tree("Desk", "a")
        assert tree is not None
        assert tree.db.execute("SELECT count(*) FROM run") == [(1,)]
        assert tree.db.execute("SELECT count(*) FROM node") == [(2,)]


async def test_what_the_model_is_told_of_a_refusal(clock: object) -> None:
    class Owner(Desk):
        async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
            yield {"type": "start"}
            big = Budget(tokens=9)
            run = await self.run_agent_tool(Buyer, [], budget=big)
            turn.output = model_value(run)

    async with open_test_kernel(roots=[Desk], facets=[Owner, Buyer]) as test:
        me = await desk(test)
        run = await me.run_agent_tool(Owner, [], budget=Budget(tokens=5))
        assert run.output == {
            "ok": False,
            "status": "error",
            "error": "over budget: 9 tokens asked for, 5 left",
            "retryable": False,
            "reason": "budget",
        }


async def test_it_is_retryable_as_long_as_what_others_hold_may_come_back(
    clock: object,
) -> None:
    async with opened() as test:
        me = await desk(test)
        kid = [["buy", 5, 5], ["sleep", 5]]
        steps = [
            ["send", kid, {"run_id": "kid", "budget": {"tokens": 60}}],
            ["sleep", 1],
            ["run", [], {"run_id": "a", "budget": {"tokens": 50}}],
            ["buy", 50],
            ["buy", 99],
            ["sleep", 9],
            ["run", [], {"run_id": "b", "budget": {"tokens": 50}}],
            ["run", [], {"run_id": "c", "budget": {"tokens": 99}}],
        ]
        run = await me.run_agent_tool(
            Buyer, steps, run_id="top", budget=Budget(tokens=100)
        )
        assert run.output[2:] == [
            ["error", "budget", None, True],
            ["tokens", 50, 40, True],
            ["tokens", 99, 40, False],
            "slept",
            ["completed", None, [], False],
            ["error", "budget", None, False],
        ]


async def test_a_spend_that_is_under_way_may_come_back_one_of_a_turn_that_ended_not(
    clock: object,
) -> None:
    async with opened() as test:
        me = await desk(test)
        steps = [
            ["send", [["buy", 80, 10]], {"run_id": "quick"}],
            ["sleep", 0.05],
            ["buy", 50, 50],
            ["sleep", 1],
            ["buy", 40],
            ["run", [["buy", 30]], {"run_id": "never settles"}],
            ["buy", 60],
            ["buy", 61],
        ]
        run = await me.run_agent_tool(
            Buyer, steps, run_id="top", budget=Budget(tokens=100)
        )
        assert run.output[2:] == [
            ["tokens", 50, 20, True],
            "slept",
            "bought",
            ["completed", None, ["bought"], False],
            ["tokens", 60, 20, True],
            ["tokens", 61, 20, False],
        ]
        assert run.total == Spent(tokens=80, calls=3)


async def test_what_was_billed_beyond_is_told_and_never_more_than_the_limit_is_granted(
    clock: object,
) -> None:
    async with opened() as test:
        me = await desk(test)
        steps = [["buy", 60, 130], ["buy", 1, 1]]
        run = await me.run_agent_tool(
            Buyer, steps, run_id="top", budget=Budget(tokens=100)
        )
        assert run.output == ["bought", ["tokens", 1, 0, False]]
        assert run.total.tokens == 130
        assert run.total.over.tokens == 30


async def test_nothing_left_ends_the_turn_and_says_so(clock: object) -> None:
    async with opened() as test:
        me = await desk(test)
        steps = [["buy", 5, 5], ["must", 9]]
        run = await me.run_agent_tool(
            Buyer, steps, run_id="top", budget=Budget(tokens=10)
        )
        assert (run.status, run.reason) == ("error", "over-budget")
        assert run.error == "over budget: 9 tokens asked for, 5 left"
        assert run.summary == "buy "
        assert accounts(test) == [["closed", 5, 5, 0, None, 1, 0]]


async def test_depth_is_counted_down_from_the_budget_and_checked_at_dispatch(
    clock: object,
) -> None:
    async with opened() as test:
        me = await desk(test)
        leaf: list[Any] = [["run", [], {"run_id": "too deep"}], ["left"]]
        steps = [["left"], ["run", leaf, {"run_id": "kid", "budget": {"depth": 2}}]]
        run = await me.run_agent_tool(
            Buyer, steps, run_id="top", budget=Budget(depth=1)
        )
        refused = ["error", "budget", None, False]
        assert run.output == [
            [None, None, 1, None],
            ["completed", None, [refused, [None, None, 0, None]], False],
        ]


async def test_seconds_are_a_deadline_for_all_below_detached_ones_too(
    clock: object,
) -> None:
    async with opened() as test:
        me = await desk(test)
        slow = [["sleep", 99]]
        steps = [
            ["send", slow, {"run_id": "loose"}],
            ["run", slow, {"run_id": "kid", "budget": {"seconds": 500}}],
        ]
        began = trio.current_time()
        run = await me.run_agent_tool(
            Buyer, steps, run_id="top", budget=Budget(seconds=5)
        )
        assert (run.status, run.reason) == ("interrupted", "budget-exceeded")
        assert 5 <= trio.current_time() - began < 6
        await test.advance(1)
        tree = test.tree("Desk", "a")
        assert tree is not None
        sql = "SELECT id, status FROM run WHERE status = 'running'"
        assert tree.db.execute(sql) == []
        assert tree.db.execute("SELECT kind, what FROM job") == []


async def test_a_detached_run_ends_at_the_deadline_of_whoever_asked_for_it(
    clock: object,
) -> None:
    async with opened() as test:
        me = await desk(test)
        steps = [["send", [["sleep", 99]], {"run_id": "loose"}]]
        run = await me.run_agent_tool(
            Buyer, steps, run_id="top", budget=Budget(seconds=5)
        )
        assert run.status == "completed"
        await test.advance(6)
        tree = test.tree("Desk", "a")
        assert tree is not None
        sql = "SELECT status, reason FROM run WHERE id = 'loose'"
        assert tree.db.execute(sql) == [("interrupted", "budget-exceeded")]


async def test_time_goes_on_while_the_process_is_down(clock: object) -> None:
    class Patient(Buyer):
        resumable = True

    async with open_test_kernel(roots=[Desk], facets=[Patient]) as test:
        me = await desk(test)
        await me.run_agent_tool(
            Patient, [["sleep", 99]], run_id="top", budget=Budget(seconds=50),
            detached=True,
        )  # fmt: skip
        await test.advance(1)
        await test.crash()
        await test.advance(20)
        await test.reopen()
        me = await desk(test)
        await test.advance(28)
        assert me.runs.get("top").status == "running"
        await test.advance(2)
        run = me.runs.get("top")
        assert (run.status, run.reason) == ("interrupted", "budget-exceeded")
        assert accounts(test)[0][0] == "closed"


async def test_after_its_time_nothing_is_reserved(clock: object) -> None:
    async with opened() as test:
        me = await desk(test)
        run = await me.run_agent_tool(
            Buyer, [["left"]], run_id="top", budget=Budget(seconds=5)
        )
        assert run.output == [[None, None, None, 5]]


async def test_a_detached_run_goes_on_drawing_when_its_asker_has_ended(
    clock: object,
) -> None:
    async with opened() as test:
        me = await desk(test)
        loose = [["sleep", 3], ["buy", 30, 20], ["left"]]
        steps = [["buy", 50, 50], ["send", loose, {"run_id": "loose"}]]
        run = await me.run_agent_tool(
            Buyer, steps, run_id="top", budget=Budget(tokens=100)
        )
        assert run.status == "completed"
        assert accounts(test)[0] == ["ended", 100, 50, 0, None, 1, 0]
        await test.advance(9)
        assert accounts(test) == [
            ["closed", 70, 70, 0, None, 2, 0],
            ["closed", None, 20, 0, None, 1, 0],
        ]
        assert me.runs.spent("top") == Spent(tokens=70, calls=2)


async def test_what_a_detached_run_was_given_alone_stays_reserved_the_rest_returns(
    clock: object,
) -> None:
    async with opened() as test:
        me = await desk(test)
        own = {"tokens": 30, "calls": 5, "cost": 0}
        kid = [["sleep", 3], ["buy", 9, 9]]
        middle = [["send", kid, {"run_id": "loose", "budget": own}]]
        steps = [
            ["run", middle, {"run_id": "mid", "budget": {"tokens": 80}}],
            ["left"],
            ["sleep", 9],
            ["left"],
        ]
        run = await me.run_agent_tool(
            Buyer, steps, run_id="top", budget=Budget(tokens=100)
        )
        assert run.output[1] == [70, None, None, None]
        assert run.output[3] == [91, None, None, None]


@pytest.mark.parametrize("how", ["boom", "cancel", "drop", "clear", "abort", "crash"])
async def test_however_a_run_ends_nothing_stays_reserved(
    how: str, clock: object
) -> None:
    async with opened() as test:
        me = await desk(test)
        kid = [["buy", 10], ["send", [["sleep", 60]], {"run_id": "low"}], ["sleep", 60]]
        ask = {"run_id": "kid", "budget": {"tokens": 60}}
        steps: list[Any] = [["send", kid, ask], ["sleep", 2]]
        steps += {
            "boom": [["boom"]],
            "drop": [["drop", "kid"]],
            "clear": [["clear"]],
        }.get(how, [])
        steps.append(["left"])
        if how in ("cancel", "abort", "crash"):
            steps.append(["sleep", 60])
        token = CancelToken()
        await me.run_agent_tool(
            Buyer, steps, run_id="top", budget=Budget(tokens=100), cancel=token,
            detached=True,
        )  # fmt: skip
        await test.advance(1)
        if how == "crash":
            await test.crash()
            await test.reopen()
            me = await desk(test)
        if how == "abort":
            await me.dynamic_agents.abort(Buyer, "top")
        await test.advance(3)
        if how == "cancel":
            token.cancel("enough")
        await test.advance(200)
        found = accounts(test)
        assert {row[0] for row in found} == {"closed"}
        assert [row[3] for row in found] == [0] * len(found)
        assert found[0][1:3] == [10, 10], "what was never settled counts as spent"
        ends = {"boom": "error", "cancel": "aborted", "abort": "interrupted",
                "crash": "interrupted"}  # fmt: skip
        assert me.runs.get("top").status == ends.get(how, "completed")
        if how in ("drop", "clear"):
            assert me.runs.get("top").output[3] == [90, None, None, None]
        await me.dynamic_agents.delete(Buyer, "top")
        assert me.runs.spent("top").tokens == 10
        await me.runs.clear()
        await test.advance(1)
        assert accounts(test) == []


async def test_a_call_from_one_agent_to_another_is_paid_by_whoever_calls(
    clock: object,
) -> None:
    async with opened() as test:
        me = await desk(test)
        steps = [["peer", 30, 20], ["peer", 81], ["fiber", 5, 5], ["left"]]
        steps += [["peer fiber", 10, 10], ["left"]]
        run = await me.run_agent_tool(
            Buyer, steps, run_id="top", budget=Budget(tokens=100)
        )
        assert run.output == [
            "bought",
            ["tokens", 81, 80, False],
            "bought",
            [75, None, None, None],
            ["bought", "completed"],
            [55, None, None, None],
        ]


async def test_without_any_budget_the_sums_go_up_all_the_same(clock: object) -> None:
    async with opened() as test:
        me = await desk(test)
        kid = [["buy", 5, 3]]
        steps = [
            ["run", kid, {"run_id": "a"}],
            ["run", kid, {"run_id": "b"}],
            ["run", [], {"run_id": "c"}],
            ["clear"],
        ]
        run = await me.run_agent_tool(Buyer, steps, run_id="top")
        assert run.total == Spent(tokens=6, calls=2)
        free = await me.run_agent_tool(Buyer, [], run_id="free")
        assert free.total is None
        assert len(accounts(test)) == 1


async def test_outside_of_turns_nobody_pays(clock: object) -> None:
    async with opened() as test:
        stub = await test.kernel.get_agent(Desk, "a")
        assert await stub.buy(10**9) == "bought"
        assert accounts(test) == []


async def test_a_spend_is_settled_once(clock: object) -> None:
    class Twice(Buyer):
        async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
            yield {"type": "start"}
            spend = await self.budget.reserve(tokens=10, calls=1)
            told = [spend.settle(tokens=2), spend.settle(tokens=1)]
            turn.output = [*told, self.budget.left().tokens]

    async with open_test_kernel(roots=[Desk], facets=[Twice]) as test:
        me = await desk(test)
        run = await me.run_agent_tool(Twice, [], budget=Budget(tokens=10))
        assert run.output == [True, False, 8]


@pytest.mark.parametrize(
    "bad",
    [
        {"tokens": -1}, {"tokens": 1.5}, {"cost": 0.5}, {"calls": True},
        {"tokens": 10**13}, {"depth": 9}, {"seconds": 0}, {"seconds": float("nan")},
    ],
    ids=str,
)  # fmt: skip
async def test_what_is_no_budget_is_refused(bad: dict[str, Any], clock: object) -> None:
    async with opened() as test:
        me = await desk(test)
        with pytest.raises(UsageError):
            await me.run_agent_tool(Buyer, [], budget=Budget(**bad))
        with pytest.raises(UsageError):
            await me.run_agent_tool(Buyer, [], budget={"tokens": 5})
        assert accounts(test) == []

    class Wrong(Buyer):
        turn_budget = Budget(**bad)

    with pytest.raises(UsageError):
        async with open_test_kernel(roots=[Wrong]):
            pass
