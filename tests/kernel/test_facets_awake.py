"""Staying awake, sleeping until something is due, and trying again."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import trio

from culet.kernel import Agent, Retry, retry_call
from culet.kernel.agent import KeepAlive
from culet.kernel.errors import FacetAborted, UsageError
from culet.kernel.node import Ambient
from culet.kernel.testing import Harness, open_test_kernel
from kernel.agents import agent_at, node_at, raises, rows, settle, tree_of

IDLE_S = 60.0
NOTES: list[Any] = []


@pytest.fixture(autouse=True)
def fresh() -> None:
    NOTES.clear()


class Kid(Agent):
    retry = Retry(max_attempts=4, base_delay=2.0, max_delay=5.0)

    async def on_start(self) -> None:
        self.sql("CREATE TABLE IF NOT EXISTS t (n INTEGER)")

    async def hold(self, seconds: float) -> str:
        async with self.keep_alive():
            await trio.sleep(seconds)
        return "held"

    async def hold_and_fail(self) -> None:
        async with self.keep_alive():
            raise ValueError("inside")

    async def later(self, seconds: float) -> None:
        await self.schedule(seconds, "due", self.name)

    async def due(self, payload: Any, schedule: Any) -> None:
        NOTES.append(payload)


async def tries(fails: int, **how: Any) -> list[float]:
    """Call what fails so often; return the instants of the calls."""
    at: list[float] = []

    async def fn() -> None:
        at.append(trio.current_time())
        if len(at) <= fails:
            raise ValueError(f"try {len(at)}")

    try:
        await retry_call(fn, **how)
    finally:
        NOTES.append(at)
    return at


class Top(Kid):
    pass


def opened(**options: Any) -> Any:
    return open_test_kernel(roots=[Top], facets=[Kid], idle_s=IDLE_S, **options)


KID = ("Kid", "k")


async def as_kid(kid: Any, fails: int, **how: Any) -> list[float]:
    """Let `tries` run as code of that agent."""
    return await kid._node.enter(Ambient(kid._node), lambda: tries(fails, **how))


async def kid_of(test: Harness, name: str = "k") -> Any:
    await test.kernel.get_agent(Top, "a")
    await agent_at(test).dynamic_agents.get(Kid, name)
    return agent_at(test, ("Kid", name))


def refs(test: Harness) -> dict[str, int]:
    """Return the references that `kernel.tree` shows, by path."""
    return {row["path"]: row["refs"] for row in test.kernel.tree("Top", "a")}


# ---- references


@pytest.mark.rule("F-366", "F-369")
async def test_a_reference_counts_once_however_often_it_is_left(clock: object) -> None:
    async with opened() as test:
        kid = await kid_of(test)
        first, second = kid.keep_alive(), kid.keep_alive()
        await first.__aenter__()
        await second.__aenter__()
        assert refs(test) == {"Top/a": 0, "Top/a/Kid/k": 2}
        for _ in range(3):
            await first.__aexit__()
        assert refs(test)["Top/a/Kid/k"] == 1, "the other one holds still"
        await second.__aexit__()
        await second.__aexit__()
        assert refs(test)["Top/a/Kid/k"] == 0
        await KeepAlive(kid._node).__aexit__()
        assert refs(test)["Top/a/Kid/k"] == 0, "never below zero"


@pytest.mark.rule("F-366")
async def test_one_reference_may_be_entered_again_while_it_is_held(
    clock: object,
) -> None:
    async with opened() as test:
        kid = await kid_of(test)
        keep = kid.keep_alive()
        async with keep:
            async with keep, kid.keep_alive():
                assert refs(test)["Top/a/Kid/k"] == 3
            assert refs(test)["Top/a/Kid/k"] == 1
        assert refs(test)["Top/a/Kid/k"] == 0


@pytest.mark.rule("F-367")
async def test_it_is_let_go_on_a_result_on_an_error_and_on_a_cancellation(
    clock: object,
) -> None:
    async with opened() as test:
        kid = await kid_of(test)
        assert await kid.hold(1) == "held"
        assert refs(test)["Top/a/Kid/k"] == 0
        await raises(ValueError, kid.hold_and_fail)
        assert refs(test)["Top/a/Kid/k"] == 0
        with trio.move_on_after(1):
            await kid.hold(99)
        assert refs(test)["Top/a/Kid/k"] == 0


@pytest.mark.rule("F-368")
async def test_each_agent_has_its_own_and_keeps_those_above_in_memory(
    clock: object,
) -> None:
    async with opened() as test, trio.open_nursery() as nursery:
        one, two = await kid_of(test), await kid_of(test, "two")
        await kid_of(test, "idle")
        nursery.start_soon(one.hold, 200)
        nursery.start_soon(two.hold, 400)
        await test.advance(100)
        assert refs(test) == {
            "Top/a": 0, "Top/a/Kid/k": 1, "Top/a/Kid/two": 1, "Top/a/Kid/idle": 0,
        }  # fmt: skip
        states = [row["state"] for row in test.kernel.tree("Top", "a")]
        assert states == ["live", "live", "live", "sleeping"]
        await test.advance(200)
        assert test.find([("Top", "a"), KID]) is None
        assert node_at(test, ("Kid", "two")).refs == 1
        await test.advance(300)
        assert test.kernel.trees == {}, "nothing holds it any more"


@pytest.mark.rule("F-370", "F-371", "F-376", "F-378")
async def test_it_leaves_no_job_no_event_and_no_alarm(clock: object) -> None:
    async with opened() as test:
        kid = await kid_of(test)
        heard: list[str] = []
        test.kernel.subscribe("*", lambda channel, *_: heard.append(channel))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(kid.hold, 100)
            await settle()
            assert rows(tree_of(test), "SELECT 1 FROM job") == []
            assert tree_of(test).jobs.slot() is None
            assert heard == []
        await test.advance(300)
        assert test.kernel.trees == {}
        assert [e.due_at for e in test.kernel.store.roots()] == [None]


@pytest.mark.rule("F-050", "F-070", "F-374", "F-375")
@pytest.mark.parametrize("how", ["abort", "delete", "break"])
async def test_it_dies_with_its_agent_and_a_late_release_takes_nothing(
    how: str, clock: object
) -> None:
    async with opened() as test:
        kid = await kid_of(test)
        keep = kid.keep_alive()
        await keep.__aenter__()
        top = agent_at(test)
        if how == "abort":
            await top.dynamic_agents.abort(Kid, "k")
        elif how == "delete":
            await top.dynamic_agents.delete(Kid, "k")
        else:

            async def breaks() -> None:
                raise ValueError("broken")

            kid.spawn(breaks)
        await settle()
        assert refs(test).get("Top/a/Kid/k", 0) == 0
        await raises(FacetAborted, kid.keep_alive().__aenter__)
        again = await kid_of(test)
        async with again.keep_alive():
            await keep.__aexit__()
            assert refs(test)["Top/a/Kid/k"] == 1


@pytest.mark.rule("F-372", "F-373", "F-377")
async def test_a_crash_leaves_no_reference_behind(clock: object) -> None:
    async with opened() as test:
        kid = await kid_of(test)
        keep = kid.keep_alive()
        await keep.__aenter__()
        await kid.durable()
        await test.crash()
        await test.reopen()
        assert test.kernel.tree("Top", "a") == [] or set(refs(test).values()) == {0}
        again = await kid_of(test)
        async with again.keep_alive():
            await keep.__aexit__()
            assert refs(test)["Top/a/Kid/k"] == 1
        await test.advance(300)
        assert test.kernel.trees == {}, "what the former life held keeps nobody awake"


# ---- sleeping roots


async def test_roots_that_sleep_are_not_opened_before_they_are_due(
    clock: object,
) -> None:
    count = 100
    async with opened() as test:
        for n in range(count):
            root = await test.kernel.get_agent(Top, f"r{n:03}")
            await root.later(4000 if n % 2 else 8000)
        await test.close()
        for advance in (0, 3000):
            await test.reopen()
            opens: list[str] = []
            test.kernel.subscribe(
                "root:open", lambda *event, o=opens: o.append(event[2].name)
            )
            await test.advance(advance)
            assert opens == []
            assert test.kernel.metrics()["trees"] == 0
            assert test.kernel.metrics()["sleeping_trees"] == count
            if advance == 0:
                await test.close()
        await test.advance(1500)
        odd = [f"r{n:03}" for n in range(count) if n % 2]
        assert sorted(opens) == odd, "each once"
        assert sorted(NOTES) == odd
        await test.advance(500)
        assert test.kernel.metrics()["trees"] == 0, "they sleep again"
        assert sorted(opens) == odd


async def test_a_root_that_hangs_as_it_is_opened_delays_no_other(
    clock: object,
) -> None:
    async with opened() as test:
        for name in ("a", "b"):
            await (await test.kernel.get_agent(Top, name)).later(500)
        await test.advance(200)
        assert test.kernel.trees == {}
        opened_by, stuck = test.kernel.host._open, trio.Event()

        async def slow(key: Any, **more: Any) -> Any:
            if key.name == "a":
                await stuck.wait()
            return await opened_by(key, **more)

        test.kernel.host._open = slow  # type: ignore[method-assign]
        await test.advance(400)
        assert NOTES == ["b"]
        stuck.set()
        await test.advance(5)
        assert NOTES == ["b", "a"]


# ---- trying again


@pytest.mark.rule("F-446")
async def test_the_first_success_is_returned_and_the_last_error_raised(
    clock: object,
) -> None:
    async with opened() as test:
        kid = await kid_of(test)
        assert len(await as_kid(kid, 0)) == 1
        assert len(await as_kid(kid, 3)) == 4
        error = await raises(ValueError, as_kid, kid, 9)
        assert str(error) == "try 4"
        assert len(NOTES[-1]) == 4
        no = {"should_retry": lambda error: "try 1" in str(error)}
        error = await raises(ValueError, lambda: as_kid(kid, 9, **no))
        assert str(error) == "try 2"
        assert len(await as_kid(kid, 1, base_delay=5.0)) == 2, "base may equal the cap"


@pytest.mark.rule("F-446", "F-447")
@pytest.mark.parametrize(
    "bad",
    [
        {"max_attempts": 0}, {"max_attempts": 1.5}, {"max_attempts": float("nan")},
        {"max_attempts": True}, {"base_delay": 0}, {"base_delay": float("inf")},
        {"max_delay": float("nan")}, {"max_delay": -1},
        {"base_delay": 6.0},  # beyond the 5 s of the class
        {"max_delay": 1.0},  # below its 2 s
    ],
)  # fmt: skip
async def test_a_policy_that_makes_no_sense_is_refused_before_the_first_call(
    bad: dict[str, Any], clock: object
) -> None:
    async with opened() as test:
        kid = await kid_of(test)
        await raises(UsageError, lambda: as_kid(kid, 0, **bad))
        assert NOTES == [[]]


@pytest.mark.rule("F-447")
async def test_what_the_class_says_holds_where_the_call_says_nothing(
    clock: object,
) -> None:
    async with opened() as test:
        kid = await kid_of(test)
        await raises(ValueError, as_kid, kid, 9)
        assert len(NOTES[-1]) == 4
        await raises(ValueError, lambda: as_kid(kid, 9, max_attempts=2))
        assert len(NOTES[-1]) == 2
        NOTES.clear()

    async def fn() -> None:
        NOTES.append(1)
        raise ValueError("outside")

    await raises(ValueError, retry_call, fn)
    assert len(NOTES) == 3, "outside of any agent"


@pytest.mark.rule("F-448")
async def test_delays_double_up_to_the_cap_and_chance_takes_up_to_half(
    clock: object,
) -> None:
    seen: list[list[float]] = []
    async with opened() as test:
        kid = await kid_of(test)
        for _ in range(20):
            at = await as_kid(kid, 5, max_attempts=6)
            seen.append([b - a for a, b in pairwise(at)])
    for tries in zip(*seen, strict=True):
        assert len(set(tries)) > 10, "they are spread"
    for delays in seen:
        for delay, most in zip(delays, (2, 4, 5, 5, 5), strict=True):
            assert most / 2 <= delay <= most
