"""One tree: starting, aborting, deleting, breaking, in their order (mechanisms B)."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import trio

from culet.kernel import Agent, ChildFailure, ChildRef, Limits
from culet.kernel.errors import (
    CapacityError,
    ChildDidNotStop,
    Deleted,
    FacetAborted,
    FacetBroken,
    UsageError,
)
from culet.kernel.testing import Harness, open_test_kernel
from kernel.agents import agent_at, node_at, raises, settle, tree_of

STARTS: list[str] = []
FAIL: list[int] = []
FAILED: list[tuple[str, str]] = []
LEFT: list[str] = []


@pytest.fixture(autouse=True)
def fresh() -> None:
    for notes in (STARTS, FAIL, FAILED, LEFT):
        notes.clear()


class Plain(Agent):
    async def ping(self, n: int) -> int:
        return n + 1

    async def wait(self) -> None:
        await trio.sleep_forever()

    async def deaf(self, seconds: float) -> None:
        with trio.CancelScope(shield=True):
            await trio.sleep(seconds)

    async def bad_end(self) -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError("in finally")

    async def write_at_the_end(self) -> None:
        self.sql("create table if not exists t (v)")
        try:
            await trio.sleep_forever()
        finally:
            try:
                self.sql("insert into t values ('late')")
            except FacetAborted as error:
                LEFT.append(str(error))
                raise

    async def kept(self) -> list[Any]:
        self.sql("create table if not exists t (v)")
        return [r.v for r in self.sql("select v from t")]

    async def keep(self, v: str) -> None:
        self.sql("create table if not exists t (v)")
        self.sql("insert into t values (?)", v)

    async def grow(self, name: str, depth: int, fan: int) -> None:
        for i in range(fan if depth else 0):
            kid = await self.dynamic_agents.get(Plain, f"{name}.{i}")
            await kid.grow(f"{name}.{i}", depth - 1, fan)

    async def break_down(self) -> None:
        self.spawn(self._boom)

    async def _boom(self) -> None:
        await trio.lowlevel.checkpoint()
        raise ValueError("boom")

    async def end(self) -> None:
        await self.destroy()

    async def call_parent(self) -> int:
        return await (await self.parent_agent(Top)).ping(1)

    async def on_child_failed(self, child: ChildRef, error: ChildFailure) -> None:
        FAILED.append((f"{self.name}/{child.name}", error.error_type))


class Top(Plain):
    async def on_start(self) -> None:
        STARTS.append(self.name)

    async def use(self, cls: str, name: str, method: str, args: list[Any]) -> Any:
        kid = await self.dynamic_agents.get(CLASSES[cls], name)
        return await getattr(kid, method)(*args)

    async def make(self, cls: str, name: str) -> None:
        await self.dynamic_agents.get(CLASSES[cls], name)

    async def kill(self, cls: str, name: str, reason: str | None) -> list[list[str]]:
        receipt = await self.dynamic_agents.abort(CLASSES[cls], name, reason)
        return [list(pair) for pair in receipt.nodes]

    async def drop(self, cls: str, name: str) -> None:
        await self.dynamic_agents.delete(CLASSES[cls], name)

    async def look(self, name: str) -> bool:
        return await self.dynamic_agents.lookup(Plain, name) is not None


class Slow(Plain):
    async def on_start(self) -> None:
        STARTS.append(self.name)
        await trio.sleep(1)


class Fails(Plain):
    async def on_start(self) -> None:
        STARTS.append(self.name)
        await trio.sleep(0.1)
        if len(STARTS) < FAIL[0] + 1:
            raise ValueError("not yet")


class Hangs(Plain):
    async def on_start(self) -> None:
        STARTS.append(self.name)
        await trio.sleep_forever()


class Stubborn(Plain):
    async def on_start(self) -> None:
        self.spawn(self._hang)

    async def _hang(self) -> None:
        with trio.CancelScope(shield=True):
            await trio.sleep(60)
        with contextlib.suppress(FacetAborted):
            self.sql("create table late (v)")
            LEFT.append(str(id(self)))


class Chatty(Plain):
    """Calls its parent and a sibling while it starts."""

    async def on_start(self) -> None:
        parent = await self.parent_agent(Top)
        self.got = [
            await parent.ping(1),
            await parent.use("Plain", "sibling", "ping", [5]),
        ]

    async def result(self) -> list[int]:
        return self.got


class Dad(Plain):
    """Its start makes a child whose start calls back."""

    async def on_start(self) -> None:
        if self.name == "son":
            self.heard = await (await self.parent_agent(Dad)).ping(1)
        else:
            await self.dynamic_agents.get(Dad, "son")


class Cycle(Plain):
    async def on_start(self) -> None:
        await trio.sleep(0.1)
        other = {"x": "y", "y": "x"}[self.name]
        await (await self.parent_agent(Top)).make("Cycle", other)


class Suicidal(Plain):
    async def on_start(self) -> None:
        self.spawn(self._end)

    async def _end(self) -> None:
        await trio.lowlevel.checkpoint()
        await (await self.parent_agent(Top)).kill("Suicidal", self.name, "itself")


class Strict(Plain):
    supervision = "escalate"

    async def make_strict(self, name: str) -> None:
        await self.dynamic_agents.get(Strict, name)


CLASSES: dict[str, type[Agent]] = {
    c.__name__: c
    for c in (
        Plain, Slow, Fails, Hangs, Stubborn, Chatty, Dad, Cycle, Suicidal, Strict,
    )
}  # fmt: skip


def opened(**options: Any) -> Any:
    return open_test_kernel(roots=[Top], facets=list(CLASSES.values()), **options)


async def top(test: Harness) -> Top:
    return await test.kernel.get_agent(Top, "a")


# ---- starting


@pytest.mark.rule("I-28", "F-242", "F-472", "F-010")
async def test_fifty_gets_are_one_start(clock: object) -> None:
    async with opened() as test:
        root = await top(test)
        async with trio.open_nursery() as nursery:
            for _ in range(50):
                nursery.start_soon(root.make, "Slow", "s")
        assert STARTS == ["a", "s"]


@pytest.mark.rule("B-16", "F-036")
async def test_lookup_makes_nothing(clock: object) -> None:
    async with opened() as test:
        root = await top(test)
        assert not await root.look("k")
        assert not agent_at(test).dynamic_agents.has(Plain, "k")
        assert agent_at(test).dynamic_agents.list() == []
        await root.make("Plain", "k")
        assert await root.look("k")


@pytest.mark.rule("I-28", "F-243", "F-006", "F-028")
async def test_a_failed_start_is_shared_and_not_cached(clock: object) -> None:
    async with opened() as test:
        root = await top(test)
        FAIL.append(2)
        causes = []

        async def one() -> None:
            error = await raises(FacetBroken, root.make, "Fails", "f")
            causes.append(error)

        async with trio.open_nursery() as nursery:
            for _ in range(50):
                nursery.start_soon(one)
        assert STARTS == ["a", "f"], "one start for all who waited"
        assert len({id(e) for e in causes}) == 50, "an error of one's own for each"
        assert len({id(e.__cause__) for e in causes}) == 1
        began = trio.current_time()
        await root.make("Fails", "f")
        assert trio.current_time() - began < 1, "fifty waiters are one failure"


async def test_starts_that_fail_again_and_again_wait_longer(clock: object) -> None:
    async with opened() as test:
        root = await top(test)
        FAIL.append(100)
        began = trio.current_time()
        for _ in range(8):
            await raises(FacetBroken, root.make, "Fails", "f")
        assert trio.current_time() - began > 5, "a failing start is not hot"


async def test_a_start_that_has_failed_for_days_is_tried_still(clock: object) -> None:
    async with opened() as test:
        root = await top(test)
        FAIL.append(10_000)
        await raises(FacetBroken, root.make, "Fails", "f")
        (record,) = tree_of(test).supervision.records.values()
        record.count = 5_000
        await raises(FacetBroken, root.make, "Fails", "f")
        starts = len(STARTS)
        error = await raises(FacetBroken, root.make, "Fails", "f")
        assert "5001 times" in str(error)
        assert len(STARTS) == starts, "it rests"
        await test.advance(61)
        await raises(FacetBroken, root.make, "Fails", "f")
        assert len(STARTS) == starts + 1


@pytest.mark.limit("failed_starts")
async def test_starts_that_fail_under_any_name_fill_no_memory(clock: object) -> None:
    async with opened(limits=Limits(failed_starts=5)) as test:
        root = await top(test)
        FAIL.append(100)
        for n in range(8):
            await raises(FacetBroken, root.make, "Fails", f"f{n}")
        assert [name for _, _, name in tree_of(test).supervision.records] == [
            "f3", "f4", "f5", "f6", "f7",
        ]  # fmt: skip


@pytest.mark.limit("calls_at_once")
async def test_calls_from_outside_are_bounded(clock: object) -> None:
    async with opened(limits=Limits(calls_at_once=3)) as test:
        root = await top(test)
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(root.wait)
            await settle()
            await raises(CapacityError, root.ping, 1)
            nursery.cancel_scope.cancel()
        assert await root.ping(1) == 2


@pytest.mark.rule("F-479")
async def test_a_hanging_start_ends_at_its_limit(clock: object) -> None:
    async with opened(start_s=3) as test:
        root = await top(test)
        error = await raises(FacetBroken, root.make, "Hangs", "h")
        assert isinstance(error.__cause__, TimeoutError)
        assert await root.ping(1) == 2


async def test_a_cancelled_caller_does_not_cancel_the_start(clock: object) -> None:
    async with opened() as test:
        root = await top(test)
        with trio.move_on_after(0.5):
            await root.make("Slow", "s")
        await test.advance(1)
        assert node_at(test, ("Slow", "s")).state == 1
        assert STARTS == ["a", "s"]


async def test_a_child_calls_parent_and_sibling_while_it_starts(clock: object) -> None:
    async with opened() as test:
        assert await (await top(test)).use("Chatty", "c", "result", []) == [2, 6]


@pytest.mark.rule("F-119")
async def test_a_start_may_start_a_child_that_calls_back(clock: object) -> None:
    async with opened() as test:
        await (await top(test)).make("Dad", "d")
        assert agent_at(test, ("Dad", "d"), ("Dad", "son")).heard == 2


@pytest.mark.rule("F-26")
async def test_two_starts_that_wait_for_each_other_are_refused(clock: object) -> None:
    async with opened() as test:
        root = await top(test)
        errors: list[BaseException] = []

        async def one(name: str) -> None:
            errors.append(await raises(FacetBroken, root.make, "Cycle", name))

        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one, "x")
            nursery.start_soon(one, "y")
        assert trio.current_time() - began < 5, "refused, not hung"
        assert any("would wait for itself" in str(e.__cause__) for e in errors)


class Wide(Agent):
    """Its start waits for two others at once; that of `back` waits for `wide`."""

    async def on_start(self) -> None:
        if self.name == "wide":
            async with trio.open_nursery() as nursery:
                for name in ("back", "short"):
                    nursery.start_soon(self.kernel.get_agent, Wide, name)
        elif self.name == "back":
            await trio.sleep(1)  # until the other one is there
            await self.kernel.get_agent(Wide, "wide")
        else:
            await trio.sleep(0.5)


@pytest.mark.rule("F-26", "F-119")
async def test_a_start_that_waits_for_several_at_once_is_not_lost_sight_of(
    clock: object,
) -> None:
    async with open_test_kernel(roots=[Wide]) as test:
        began = trio.current_time()
        error = await raises(FacetBroken, test.kernel.get_agent, Wide, "wide")
        assert trio.current_time() - began < 5, "refused, not hung"
        assert "would wait for itself" in repr(error.__cause__)
        assert await raises(FacetBroken, test.kernel.get_agent, Wide, "back")
        await test.kernel.get_agent(Wide, "short")


@pytest.mark.rule("F-380")
async def test_depth_is_checked_before_anything_is_made(clock: object) -> None:
    async with opened() as test:
        root = await top(test)
        await raises(UsageError, root.grow, "n", 4, 1)
        tree = tree_of(test)
        assert tree.db.execute("SELECT count(*) FROM node") == [(4,)]


@pytest.mark.rule("F-37", "F-012", "F-389")
@pytest.mark.parametrize("name", ["", "x\0y", ".", "..", "n" * 257])
async def test_bad_names_are_refused_and_make_nothing(name: str, clock: object) -> None:
    async with opened() as test:
        root = await top(test)
        await raises(UsageError, root.make, "Plain", name)
        assert tree_of(test).db.execute("SELECT count(*) FROM node") == [(1,)]


@pytest.mark.parametrize(
    "name", ["x'; DROP TABLE node;--", 'a" OR "1"="1', "%", "_", "$.a", "${x}", "🜁"]
)
@pytest.mark.rule("HB-39", "F-39", "F-382")
async def test_odd_names_are_only_names(name: str, clock: object) -> None:
    async with opened() as test:
        root = await top(test)
        await root.use("Plain", "other", "keep", ["o"])
        await root.use("Plain", name, "keep", ["v"])
        kids = agent_at(test).dynamic_agents.list
        assert [k[:2] for k in kids()] == [("Plain", "other"), ("Plain", name)]
        await root.drop("Plain", name)
        await settle()
        assert [k[:2] for k in kids()] == [("Plain", "other")]
        assert await root.use("Plain", "other", "kept", []) == ["o"]


# ---- aborting


@pytest.mark.rule("F-044")
async def test_the_order_of_an_abort_is_planned(clock: object) -> None:
    async with opened() as test:
        root = await top(test)
        orders = set()
        for _ in range(5):
            await root.use("Plain", "m", "grow", ["m", 2, 3])
            receipt = await root.kill("Plain", "m", "again")
            assert all(how == "stopped" for _path, how in receipt)
            orders.add(tuple(path for path, _how in receipt))
        (order,) = orders
        assert len(order) == 13
        assert order[0].endswith("/Plain/m.2/Plain/m.2.2")
        assert order[-1] == "Top/a/Plain/m"


@pytest.mark.rule("F-027", "F-043")
async def test_calls_end_with_the_reason_and_later_ones_too(clock: object) -> None:
    async with opened() as test:
        root = await top(test)
        kid = await agent_at(test).dynamic_agents.get(Plain, "k")
        async with trio.open_nursery() as nursery:
            errors = []

            async def call() -> None:
                errors.append(await raises(FacetAborted, kid.wait))

            nursery.start_soon(call)
            nursery.start_soon(call)
            await settle()
            await root.kill("Plain", "k", "because")
        assert [e.reason for e in errors] == ["because", "because"]
        assert errors[0] is not errors[1]
        assert (await raises(FacetAborted, kid.ping, 1)).reason == "because"
        await root.make("Plain", "k")
        assert await kid.ping(1) == 2, "get makes it live again, for old stubs too"


async def test_what_a_dying_call_raises_does_not_hide_the_abort(clock: object) -> None:
    async with opened() as test:
        root = await top(test)
        kid = await agent_at(test).dynamic_agents.get(Plain, "k")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(raises, FacetAborted, kid.bad_end)
            await settle()
            await root.kill("Plain", "k", "stop")


@pytest.mark.rule("I-24", "F-478", "F-042")
async def test_a_fenced_node_cannot_write_in_finally(clock: object) -> None:
    async with opened() as test:
        root = await top(test)
        kid = await agent_at(test).dynamic_agents.get(Plain, "k")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(raises, FacetAborted, kid.write_at_the_end)
            await settle()
            await root.kill("Plain", "k", "stop")
        assert LEFT == ["stop"]
        assert await root.use("Plain", "k", "kept", []) == []


@pytest.mark.rule("I-24", "I-28", "F-472")
async def test_abort_waits_for_calls_that_are_still_inside(clock: object) -> None:
    async with opened() as test:
        root = await top(test)
        kid = await agent_at(test).dynamic_agents.get(Plain, "k")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(raises, FacetAborted, kid.deaf, 2)
            await settle()
            began = trio.current_time()
            nursery.start_soon(root.kill, "Plain", "k", "stop")
            await settle()
            await trio.sleep(0.5)
            nursery.start_soon(root.make, "Plain", "k")
            await settle()
            assert test.find([("Top", "a"), ("Plain", "k")]) is not None
            assert node_at(test, ("Plain", "k")).state > 1, (
                "no new life beside code of the old one"
            )
        assert trio.current_time() - began == pytest.approx(2, abs=0.1)


async def test_an_abort_while_it_starts_ends_the_start(clock: object) -> None:
    async with opened() as test:
        root = await top(test)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(raises, FacetAborted, root.make, "Hangs", "h")
            await settle()
            await root.kill("Hangs", "h", "enough")
        assert STARTS == ["a", "h"], "and it is not begun anew"
        assert test.find([("Top", "a"), ("Hangs", "h")]) is None


@pytest.mark.rule("I-24", "F-23", "F-478")
async def test_what_does_not_stop_is_fenced_and_its_name_is_free(clock: object) -> None:
    async with opened(abort_grace_s=2) as test:
        root = await top(test)
        await root.make("Stubborn", "s")
        old = node_at(test, ("Stubborn", "s"))
        began = trio.current_time()
        error = await raises(ChildDidNotStop, root.kill, "Stubborn", "s", "x")
        assert error.paths == ["Top/a/Stubborn/s"]
        assert 2 <= trio.current_time() - began <= 3
        states = [row["state"] for row in test.kernel.tree("Top", "a")]
        assert states == ["live", "sleeping", "remnant"]
        assert await root.use("Stubborn", "s", "ping", [1]) == 2
        assert node_at(test, ("Stubborn", "s")) is not old
        await test.advance(70)
        assert str(id(old.agent)) not in LEFT, "code of a fenced node writes nothing"
        assert not tree_of(test).remnants


async def test_a_stubborn_grandchild_keeps_its_parents_and_nobody_else(
    clock: object,
) -> None:
    async with opened(abort_grace_s=2) as test:
        root = await top(test)
        await root.make("Plain", "d")
        below = agent_at(test, ("Plain", "d")).dynamic_agents
        await below.get(Plain, "fine")
        await below.get(Stubborn, "deep")
        error = await raises(ChildDidNotStop, root.kill, "Plain", "d", "x")
        assert error.paths == ["Top/a/Plain/d/Stubborn/deep", "Top/a/Plain/d"]
        assert await root.use("Plain", "d", "ping", [1]) == 2
        await test.advance(100)


async def test_one_stubborn_child_does_not_fence_the_innocent(clock: object) -> None:
    async with opened(abort_grace_s=1) as test:
        root = await top(test)
        await root.make("Plain", "d")
        below = agent_at(test, ("Plain", "d")).dynamic_agents
        for i in range(20):
            await below.get(Plain, f"old{i}")
        await below.get(Stubborn, "deep")  # the youngest stops first
        error = await raises(ChildDidNotStop, root.kill, "Plain", "d", "x")
        assert len(error.paths) == 2
        await test.advance(100)


async def test_two_aborts_of_the_same_code_list_it_once(clock: object) -> None:
    async with opened(abort_grace_s=2) as test:
        root = await top(test)
        await root.make("Stubborn", "s")
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(
                    raises, ChildDidNotStop, root.kill, "Stubborn", "s", "x"
                )
        assert len(tree_of(test).remnants) == 1
        await test.advance(100)
        assert tree_of(test).remnants == []


async def test_a_task_may_abort_its_own_facet(clock: object) -> None:
    async with opened() as test:
        root = await top(test)
        await root.make("Suicidal", "s")
        await settle()
        assert test.find([("Top", "a"), ("Suicidal", "s")]) is None
        assert not tree_of(test).remnants
        assert await root.ping(1) == 2


async def test_an_abort_goes_on_when_its_caller_is_cancelled(clock: object) -> None:
    async with opened() as test:
        root = await top(test)
        await root.make("Plain", "k")
        with trio.CancelScope() as scope:
            scope.cancel()
            await root.kill("Plain", "k", "x")
        await settle()
        assert test.find([("Top", "a"), ("Plain", "k")]) is None


@pytest.mark.rule("F-048", "I-26")
async def test_aborting_what_does_not_exist_or_sleeps_is_no_error(
    clock: object,
) -> None:
    async with opened() as test:
        root = await top(test)
        assert await root.kill("Plain", "nobody", None) == []
        assert not agent_at(test).dynamic_agents.has(Plain, "nobody")
        await root.make("Plain", "k")
        await test.evict([("Top", "a"), ("Plain", "k")])
        assert await root.kill("Plain", "k", None) == []
        assert await root.use("Plain", "k", "ping", [1]) == 2


# ---- what breaks by itself


@pytest.mark.rule("I-29", "F-21", "F-477", "F-049")
async def test_a_failure_in_the_background_breaks_that_facet_only(
    clock: object,
) -> None:
    async with opened() as test:
        root = await top(test)
        await root.make("Plain", "sibling")
        kid = await agent_at(test).dynamic_agents.get(Plain, "k")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(raises, FacetBroken, kid.wait)
            await settle()
            await kid.break_down()
        await settle()
        assert FAILED == [("a/k", "ValueError")]
        await raises(FacetBroken, kid.ping, 1)
        assert await root.use("Plain", "sibling", "ping", [1]) == 2
        assert await root.use("Plain", "k", "ping", [1]) == 2
        assert await kid.ping(1) == 2


async def test_escalate_breaks_the_whole_tree(clock: object) -> None:
    async with opened() as test:
        root = await top(test)
        await root.make("Plain", "plain")
        strict = await agent_at(test, ("Plain", "plain")).dynamic_agents.get(
            Strict, "s"
        )
        await strict.break_down()
        await settle()
        assert test.find([("Top", "a")]) is None
        assert await (await top(test)).ping(1) == 2


@pytest.mark.rule("I-29", "F-22")
async def test_what_is_no_exception_ends_at_the_border(clock: object) -> None:
    class Exits(Plain):
        async def leave(self) -> None:
            raise SystemExit(3)

    async with open_test_kernel(roots=[Exits]) as test:
        root = await test.kernel.get_agent(Exits, "a")
        await raises(FacetBroken, root.leave)
        assert await root.ping(1) == 2


@pytest.mark.rule("F-482")
async def test_cancelling_a_caller_cancels_that_call_only(clock: object) -> None:
    async with opened() as test:
        root = await top(test)
        with trio.move_on_after(1):
            await root.wait()
        assert await root.ping(1) == 2
        assert not node_at(test).calls


# ---- sleeping and deleting


async def test_a_call_wakes_an_evicted_facet_with_its_data(clock: object) -> None:
    async with opened(idle_s=5) as test:
        root = await top(test)
        kid = await agent_at(test).dynamic_agents.get(Plain, "k")
        await kid.keep("v")
        with trio.CancelScope() as scope:
            tree = tree_of(test)
            tree.visitors += 1  # somebody stays, so only facets go
            await test.advance(20)
            tree.visitors -= 1
            scope.cancel()
        assert test.find([("Top", "a"), ("Plain", "k")]) is None
        await root.ping(1)
        assert await kid.kept() == ["v"]


async def test_what_waits_in_memory_is_not_evicted(clock: object) -> None:
    async with opened(idle_s=5) as test:
        await top(test)
        kid = await agent_at(test).dynamic_agents.get(Plain, "k")
        with trio.move_on_after(60):
            await kid.wait()
        assert test.find([("Top", "a"), ("Plain", "k")]) is not None
        async with agent_at(test, ("Plain", "k")).keep_alive():
            await test.advance(60)
            assert test.find([("Top", "a"), ("Plain", "k")]) is not None


@pytest.mark.rule("I-25", "F-054", "F-068")
async def test_a_deleted_facet_is_gone_for_good(clock: object) -> None:
    async with opened() as test:
        root = await top(test)
        kid = await agent_at(test).dynamic_agents.get(Plain, "k")
        await kid.keep("old")
        below = await agent_at(test, ("Plain", "k")).dynamic_agents.get(Plain, "b")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(raises, Deleted, kid.wait)
            nursery.start_soon(raises, Deleted, below.wait)
            await settle()
            await root.drop("Plain", "k")
        await raises(Deleted, kid.ping, 1)
        assert await root.use("Plain", "k", "kept", []) == [], "a new one starts empty"
        for _ in range(2):
            await settle()
            await raises(Deleted, kid.ping, 1)
            await raises(Deleted, below.ping, 1)
        tree = tree_of(test)
        assert tree.db.execute("SELECT state FROM node") == [("live",)] * 2
        assert tree.db.execute("SELECT count(*) FROM job") == [(0,)]


@pytest.mark.rule("I-26", "F-055")
async def test_deleting_twice_or_nothing_is_no_error(clock: object) -> None:
    async with opened() as test:
        root = await top(test)
        await root.drop("Plain", "k")
        await root.make("Plain", "k")
        await root.drop("Plain", "k")
        await root.drop("Plain", "k")


@pytest.mark.rule("F-074")
async def test_a_facet_may_destroy_itself(clock: object) -> None:
    async with opened() as test:
        root = await top(test)
        await raises(Deleted, root.use, "Plain", "k", "end", [])
        await settle()
        assert not await root.look("k")
        assert await root.use("Plain", "k", "kept", []) == []


@pytest.mark.rule("I-21", "I-25", "I-26", "B-16", "F-073")
@pytest.mark.parametrize("commits", range(4))
async def test_a_crash_only_delays_a_wipe(commits: int, clock: object) -> None:
    async with opened() as test:
        root = await top(test)
        await root.use("Plain", "k", "keep", ["v"])
        await root.use("Plain", "k", "grow", ["b", 1, 3])
        slots = tree_of(test).store.slots()
        assert slots
        test.faults.die_after(commits)
        with trio.move_on_after(5), contextlib.suppress(Exception):
            await root.drop("Plain", "k")
        await test.crash()
        await test.reopen()
        root = await top(test)
        await test.advance(5)
        tree = tree_of(test)
        if await root.look("k"):
            assert await root.use("Plain", "k", "kept", []) == ["v"]
        else:
            assert tree.db.execute("SELECT count(*) FROM node") == [(1,)]
            assert tree.db.execute("SELECT count(*) FROM job") == [(0,)]
            assert not tree.store.slots() & slots


async def test_what_is_deleted_while_its_parent_wakes_is_not_started(
    clock: object,
) -> None:
    async with opened() as test:
        root = await top(test)
        await root.make("Slow", "s")
        below = agent_at(test, ("Slow", "s"))
        kid = await below.dynamic_agents.get(Slow, "kid")
        tree = tree_of(test)
        slot = tree.child_slot(below._node.slot, tree.kernel.classes.of(Slow), "kid")
        assert slot is not None
        await test.evict([("Top", "a"), ("Slow", "s")])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(raises, Deleted, kid.ping, 1)
            await test.advance(0.5)
            await tree.delete(slot)
        assert STARTS.count("kid") == 1
        assert slot not in tree.nodes


# ---- stopping


async def test_nothing_is_started_while_the_tree_stops(clock: object) -> None:
    async with opened(abort_grace_s=5) as test:
        root = await top(test)
        kid = await agent_at(test).dynamic_agents.get(Plain, "k")
        errors: list[Any] = []

        async def call() -> None:
            try:
                await root.deaf(2)
            except FacetAborted as error:
                errors.append(error)

        async def late() -> None:
            await trio.sleep(1)
            errors.append(await raises(FacetAborted, kid.ping, 1))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            nursery.start_soon(late)
            await settle()
            nursery.start_soon(test.close)
        assert len(errors) == 2
        assert STARTS == ["a"]


async def test_leaving_with_code_that_does_not_stop_is_told(clock: object) -> None:
    with pytest.raises(ChildDidNotStop, match="Stubborn/s"):
        async with opened(abort_grace_s=1) as test:
            await (await top(test)).make("Stubborn", "s")


async def test_what_dying_tasks_raise_goes_nowhere(clock: object) -> None:
    class Untidy(Agent):
        async def on_start(self) -> None:
            self.spawn(self._two)

        async def _two(self) -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.sleep_forever)
                nursery.start_soon(self._late)

        async def _late(self) -> None:
            try:
                await trio.sleep_forever()
            finally:
                with trio.CancelScope(shield=True):
                    await trio.sleep(20)
                raise ValueError("late")

        async def end(self, name: str) -> None:
            await self.dynamic_agents.abort(Untidy, name)

        async def make(self, name: str) -> None:
            await self.dynamic_agents.get(Untidy, name)

    with pytest.raises(ChildDidNotStop):
        async with open_test_kernel(
            roots=[Untidy], facets=[Untidy], abort_grace_s=1
        ) as test:
            root = await test.kernel.get_agent(Untidy, "a")
            await root.make("k")
            await raises(ChildDidNotStop, root.end, "k")
            await root.make("k")
            await test.advance(30)
            await root.make("k")
