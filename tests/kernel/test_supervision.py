"""Agents that fail: who is told, who stops, and when they may start again."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import trio

from culet.kernel import Agent, ChildFailure, ChildRef, Limits, Schedule
from culet.kernel.errors import FacetAborted, FacetBroken, UsageError
from culet.kernel.testing import Harness, open_test_kernel
from kernel.agents import agent_at, raises, rows, settle, tree_of

TOLD: list[tuple[str, str, str, int]] = []
STARTS: list[tuple[str, float]] = []
FAIL: list[BaseException] = []


@pytest.fixture(autouse=True)
def fresh() -> None:
    for notes in (TOLD, STARTS, FAIL):
        notes.clear()


class Interrupt(KeyboardInterrupt):
    """No signal: somebody's own."""


class Weird(BaseException):
    def __str__(self) -> str:
        raise ValueError("not even this")


class Kept:
    """A cancellation that somebody keeps and raises later."""

    error: BaseException | None = None


async def keep_one() -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        try:
            await trio.sleep(1)
        except trio.Cancelled as error:
            Kept.error = error
            raise


def failure(kind: str) -> BaseException:
    if kind == "kept":
        assert Kept.error is not None
        return Kept.error
    return {
        "value": ValueError("boom"),
        "exit": SystemExit(3),
        "interrupt": Interrupt(),
        "weird": Weird(),
        "generator": GeneratorExit(),
        "group": BaseExceptionGroup("both", [ValueError("a"), SystemExit(1)]),
    }[kind]


KINDS = ("value", "exit", "interrupt", "weird", "generator", "group", "kept")


class Plain(Agent):
    async def on_start(self, props: Any = None) -> None:
        STARTS.append((self.name, trio.current_time()))
        if FAIL:
            raise FAIL.pop()

    async def ping(self) -> str:
        return self.name

    async def break_down(self, kind: str = "value") -> None:
        await keep_one()
        self.spawn(self._boom, kind)

    async def _boom(self, kind: str) -> None:
        await trio.lowlevel.checkpoint()
        raise failure(kind)

    async def fail(self, kind: str) -> None:
        await keep_one()
        raise failure(kind)

    async def make(self, cls: str, name: str) -> None:
        await self.dynamic_agents.get(CLASSES[cls], name)

    async def use(self, cls: str, name: str, method: str, args: list[Any]) -> Any:
        kid = await self.dynamic_agents.get(CLASSES[cls], name)
        return await getattr(kid, method)(*args)

    async def later(self, seconds: float) -> None:
        await self.schedule(seconds, "alarm")

    async def alarm(self, payload: Any, schedule: Schedule) -> None:
        pass

    async def on_child_failed(self, child: ChildRef, error: ChildFailure) -> None:
        TOLD.append((child.name, error.error_type, error.message, error.restarts))


class Top(Plain):
    pass


class Strict(Plain):
    supervision = "escalate"


class AtOnce(Plain):
    """It breaks as soon as it lives, unless told otherwise."""

    async def on_start(self, props: Any = None) -> None:
        await super().on_start(props)
        self.spawn(self._boom, "value")


class Early(Plain):
    """Its start makes a child that breaks at once, and takes its time."""

    async def on_start(self, props: Any = None) -> None:
        await self.dynamic_agents.get(Plain, "kid")
        kid = await self.dynamic_agents.get(Plain, "kid")
        await kid.break_down()
        await trio.sleep(2)


class Careless(Plain):
    """What it does about a failure fails as well."""

    async def on_child_failed(self, child: ChildRef, error: ChildFailure) -> None:
        await super().on_child_failed(child, error)
        raise Weird


class Slow(Plain):
    async def on_child_failed(self, child: ChildRef, error: ChildFailure) -> None:
        await trio.sleep_forever()


CLASSES: dict[str, type[Agent]] = {
    c.__name__: c for c in (Plain, Strict, AtOnce, Early, Careless, Slow)
}


def opened(**options: Any) -> Any:
    return open_test_kernel(roots=[Top], facets=list(CLASSES.values()), **options)


async def top(test: Harness) -> Top:
    return await test.kernel.get_agent(Top, "a")


# ---- contained


@pytest.mark.rule("F-049")
@pytest.mark.parametrize("kind", KINDS)
async def test_whatever_a_task_raises_breaks_its_facet_only(
    kind: str, clock: object
) -> None:
    async with opened() as test:
        root = await top(test)
        await root.make("Plain", "other")
        kid = await agent_at(test).dynamic_agents.get(Plain, "k")
        await kid.make("Plain", "below")
        await kid.break_down(kind)
        await settle()
        assert test.find([("Top", "a"), ("Plain", "k")]) is None
        assert test.find([("Top", "a"), ("Plain", "k"), ("Plain", "below")]) is None
        assert test.find([("Top", "a"), ("Plain", "other")]) is not None
        error = await raises(FacetBroken, kid.ping)
        assert isinstance(error.__cause__, type(failure(kind)))
        assert [(name, restarts) for name, _, _, restarts in TOLD] == [("k", 0)]
        assert await root.use("Plain", "k", "ping", []) == "k"
        assert await kid.ping() == "k"


@pytest.mark.rule("F-049")
@pytest.mark.parametrize("kind", KINDS)
async def test_whatever_a_call_raises_goes_to_its_caller(
    kind: str, clock: object
) -> None:
    async with opened() as test:
        root = await top(test)
        kid = await agent_at(test).dynamic_agents.get(Plain, "k")
        expected = ValueError if kind == "value" else FacetBroken
        await raises(expected, kid.fail, kind)
        assert await kid.ping() == "k"
        assert await root.ping() == "a"
        assert TOLD == [], "a call that failed broke nobody"


@pytest.mark.rule("F-006", "F-243")
@pytest.mark.parametrize("kind", KINDS)
async def test_whatever_a_start_raises_is_told_to_who_waits_for_it(
    kind: str, clock: object
) -> None:
    async with opened() as test:
        root = await top(test)
        await keep_one()
        heard: list[Any] = []
        test.kernel.subscribe("failure", lambda *event: heard.append(event[3]))
        for cls in ("Plain", "Strict"):
            FAIL.append(failure(kind))
            error = await raises(FacetBroken, root.make, cls, "k")
            assert isinstance(error.__cause__, type(failure(kind)))
            assert await root.use(cls, "k", "ping", []) == "k"
        assert [(f.what, f.name) for f in heard] == [("start", "on_start")] * 2
        assert TOLD == [], "nobody broke, so nobody else is told"


async def test_a_task_that_breaks_while_its_facet_starts_ends_the_start(
    clock: object,
) -> None:
    class Hasty(Plain):
        async def on_start(self, props: Any = None) -> None:
            self.spawn(self._boom, "value")
            await trio.sleep(5)

        async def hasty(self, name: str) -> None:
            await self.dynamic_agents.get(Hasty, name)

    async with open_test_kernel(roots=[Top], facets=[Hasty]) as test:
        await top(test)
        begun = trio.current_time()
        error = await raises(FacetBroken, agent_at(test).dynamic_agents.get, Hasty, "h")
        assert isinstance(error.__cause__, ValueError)
        assert trio.current_time() - begun < 1
        await settle()
        assert [t[0] for t in TOLD] == ["h"]
        assert not agent_at(test).dynamic_agents.has(Hasty, "h"), "never started"


async def test_a_parent_that_starts_is_told_when_it_has_started(clock: object) -> None:
    async with opened() as test:
        root = await top(test)
        await root.make("Early", "e")
        await settle()
        assert TOLD == [("kid", "ValueError", "boom", 0)]


async def test_a_start_that_is_stopped_has_not_failed(clock: object) -> None:
    class Writes(Plain):
        async def on_start(self, props: Any = None) -> None:
            await trio.sleep(1)
            self.sql("create table t (v)")

    async with open_test_kernel(roots=[Top], facets=[Writes]) as test:
        await top(test)
        heard: list[Any] = []
        test.kernel.subscribe("failure", lambda *event: heard.append(event))
        inside = agent_at(test).dynamic_agents
        async with trio.open_nursery() as nursery:
            nursery.start_soon(raises, FacetAborted, inside.get, Writes, "w")
            await test.advance(0.999)
            node = test.find([("Top", "a"), ("Writes", "w")])
            assert node is not None
            tree_of(test).stops.fence([node], "enough", None)  # and not cut yet
            await test.advance(1)
            await inside.abort(Writes, "w")
        assert not heard
        assert not tree_of(test).supervision.records


@pytest.mark.limit("notify_s")
@pytest.mark.parametrize("cls", ["Careless", "Slow"])
async def test_a_hook_that_fails_or_hangs_changes_nothing(
    cls: str, clock: object
) -> None:
    async with opened(limits=Limits(notify_s=3)) as test:
        root = await top(test)
        reports: list[Any] = []
        test.kernel.subscribe("failure", lambda *event: reports.append(event[3][1:3]))
        await root.make(cls, "p")
        inside = agent_at(test, (cls, "p"))
        kid = await inside.dynamic_agents.get(Plain, "k")
        await kid.break_down()
        await test.advance(2.9)
        told = ("hook", "on_child_failed") in reports
        assert told is (cls == "Careless"), "what hangs has its time"
        await test.advance(0.2)
        assert ("hook", "on_child_failed") in reports
        assert await root.use(cls, "p", "ping", []) == "p"
        assert await root.use(cls, "p", "use", ["Plain", "k", "ping", []]) == "k"


# ---- escalated


@pytest.mark.rule("F-049")
async def test_one_that_escalates_takes_the_whole_tree_down(clock: object) -> None:
    async with opened() as test:
        root = await top(test)
        await root.make("Plain", "other")
        await root.make("Plain", "p")
        strict = await agent_at(test, ("Plain", "p")).dynamic_agents.get(Strict, "s")
        await strict.break_down()
        await settle()
        assert not tree_of(test).nodes
        assert (await raises(FacetBroken, root.ping)).__cause__ is not None
        root = await top(test)
        assert await root.ping() == "a"
        assert await root.use("Plain", "other", "ping", []) == "other"
        assert TOLD == [], "nobody is above a root"


async def test_what_is_below_one_that_escalates_is_contained_by_its_own_rule(
    clock: object,
) -> None:
    async with opened() as test:
        root = await top(test)
        await root.make("Strict", "s")
        kid = await agent_at(test, ("Strict", "s")).dynamic_agents.get(Plain, "k")
        await kid.break_down()
        await settle()
        assert test.find([("Top", "a"), ("Strict", "s")]) is not None
        assert [t[0] for t in TOLD] == ["k"]


async def test_another_word_for_supervision_is_refused() -> None:
    class Wrong(Plain):
        supervision = "perhaps"  # type: ignore[assignment]

    with pytest.raises(UsageError, match="contain or escalate"):
        async with open_test_kernel(roots=[Wrong]):
            pass


# ---- started again


async def crash_loop(test: Harness, times: int) -> list[float]:
    """Get a facet that breaks at once, again and again; return the waits between."""
    root = await top(test)
    for _ in range(times):
        with contextlib.suppress(FacetBroken):
            await root.make("AtOnce", "x")
        await settle()
    at = [when for name, when in STARTS if name == "x"]
    return [b - a for a, b in itertools.pairwise(at)]


@pytest.mark.limit("restart_base_s", "restart_max_s")
async def test_restarts_wait_longer_each_time_and_are_counted(clock: object) -> None:
    async with opened() as test:
        waits = await crash_loop(test, 9)
        assert [t[3] for t in TOLD] == list(range(9))
        assert waits[0] == 0, "the first restart is at once"
        for wait, most in zip(waits[1:], [0.2, 0.4, 0.8, 1.6, 3.2, 5, 5], strict=True):
            assert most / 2 <= wait <= most


@pytest.mark.limit("restart_attempts", "restart_rest_s")
async def test_after_so_many_failures_it_rests_and_is_tried_now_and_then(
    clock: object,
) -> None:
    limits = Limits(restart_attempts=3, restart_rest_s=50)
    async with opened(limits=limits) as test:
        waits = await crash_loop(test, 20)
        assert len(waits) == 2
        root = await top(test)
        before = rows(tree_of(test), "SELECT max(seq) FROM sqlite_sequence")
        error = await raises(FacetBroken, root.make, "AtOnce", "x")
        assert "3 times" in str(error)
        assert "50 s" in str(error)
        assert isinstance(error.__cause__, ValueError)
        assert rows(tree_of(test), "SELECT max(seq) FROM sqlite_sequence") == before
        await test.advance(51)
        waits = await crash_loop(test, 20)
        assert len(waits) == 3, "one try, then it rests again"
        assert waits[2] > 50


async def test_a_start_that_fails_at_the_limit_writes_nothing_for_who_asks(
    clock: object,
) -> None:
    async with opened(limits=Limits(restart_attempts=2)) as test:
        root = await top(test)
        for _ in range(2):
            FAIL.append(ValueError("no"))
            await raises(FacetBroken, root.make, "Plain", "k")
        begun, commits = trio.current_time(), test.faults.commits
        for _ in range(100):
            await raises(FacetBroken, root.make, "Plain", "k")
        assert trio.current_time() == begun
        assert test.faults.commits == commits


@pytest.mark.limit("restart_calm_s")
async def test_a_calm_life_or_a_delete_begins_the_count_anew(clock: object) -> None:
    async with opened(limits=Limits(restart_calm_s=30)) as test:
        root = await top(test)
        for _ in range(3):
            await root.use("Plain", "k", "break_down", [])
            await settle()
        assert [t[3] for t in TOLD] == [0, 1, 2]
        kid = await agent_at(test).dynamic_agents.get(Plain, "k")
        async with agent_at(test, ("Plain", "k")).keep_alive():
            await test.advance(31)
        await kid.break_down()
        await settle()
        await root.use("Plain", "k", "break_down", [])
        await settle()
        assert [t[3] for t in TOLD[3:]] == [0, 1]
        await agent_at(test).dynamic_agents.delete(Plain, "k")
        assert not tree_of(test).supervision.records
        await root.use("Plain", "k", "break_down", [])
        await settle()
        assert TOLD[5][3] == 0


@pytest.mark.rule("F-315")
async def test_what_a_broken_facet_owes_does_not_make_it_hot(clock: object) -> None:
    limits = Limits(restart_attempts=4, restart_rest_s=100)
    async with opened(limits=limits) as test:
        root = await top(test)
        kid = await agent_at(test).dynamic_agents.get(Plain, "k")
        for n in range(20):
            await kid.later(10 + n)
        FAIL.extend(ValueError(str(n)) for n in range(1000))
        await agent_at(test).dynamic_agents.abort(Plain, "k")
        begun = len(STARTS)
        await test.advance(90)
        assert len(STARTS) - begun <= 5
        assert await root.ping() == "a"
        FAIL.clear()


async def test_many_addresses_that_break_fill_no_memory(clock: object) -> None:
    async with opened(limits=Limits(failed_starts=5)) as test:
        root = await top(test)
        for n in range(9):
            await root.use("Plain", f"k{n}", "break_down", [])
            await settle()
        names = [name for _, _, name in tree_of(test).supervision.records]
        assert names == ["k4", "k5", "k6", "k7", "k8"]


@pytest.mark.rule("F-315")
async def test_a_tree_whose_records_all_fail_does_not_make_the_kernel_hot(
    clock: object,
) -> None:
    """What is owed wakes it each time; it rests longer each time, and heals at once."""
    async with opened() as test:
        root = await top(test)
        await root.ping()
        await agent_at(test).schedule(5, "alarm")
        restarts: list[float] = []

        def restarted(*_: object) -> None:
            restarts.append(trio.current_time())
            if len(restarts) > 500:  # hot: time stands still, so let it end
                test.faults.fail_record(10_000)

        test.kernel.subscribe("restart", restarted)
        test.faults.fail_record(stay=True)
        await test.advance(60)
        assert 5 <= len(restarts) <= 30
        gaps = [b - a for a, b in itertools.pairwise(restarts)]
        assert gaps[-1] > gaps[0]
        test.faults.fail_record(10_000)
        await test.advance(10)
        assert rows(tree_of(test), "SELECT 1 FROM job") == []
