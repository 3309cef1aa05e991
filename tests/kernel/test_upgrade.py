"""Another class takes over the slot of a facet, and nothing of it is lost."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any, ClassVar

import pytest
import trio

from culet.kernel import (
    Agent,
    Chunk,
    FiberRecovery,
    FiberResolution,
    Limits,
    Schedule,
    Turn,
)
from culet.kernel.errors import (
    ChildDidNotStop,
    Deleted,
    FacetAborted,
    FacetBroken,
    NotFound,
    UsageError,
)
from culet.kernel.testing import Harness, open_test_kernel
from kernel.agents import agent_at, node_at, raises, rows, settle, tree_of
from kernel.peers import connect

SEEN: list[Any] = []
FAIL: list[int] = []


@pytest.fixture(autouse=True)
def fresh() -> None:
    SEEN.clear()
    FAIL.clear()


class Old(Agent):
    """The first version: it writes, owes, runs, and can be hard to stop."""

    resumable = True

    async def on_start(self, props: Any = None) -> None:
        SEEN.append((self.class_name, self.upgraded_from))
        if FAIL:
            raise ValueError(FAIL.pop())
        self.sql("create table if not exists t (v)")

    async def keep(self, v: str) -> None:
        self.sql("insert into t values (?)", v)

    async def kept(self) -> list[Any]:
        return [r.v for r in self.sql("select v from t")]

    async def only_old(self) -> str:
        return "old"

    async def twice(self, n: int) -> Any:
        return [self.class_name, n + n]

    async def plan(self, seconds: float, callback: str, every: float = 0) -> str:
        if every:
            return (await self.schedule_every(every, callback)).id
        return (await self.schedule(seconds, callback, "p")).id

    async def tick(self, payload: Any, schedule: Schedule) -> None:
        self.sql("insert into t values (?)", f"{self.class_name} ticks")

    async def gone(self, payload: Any, schedule: Schedule) -> None:
        self.sql("insert into t values ('gone was there')")

    async def wait(self) -> None:
        await trio.sleep_forever()

    async def deaf(self, seconds: float) -> None:
        with trio.CancelScope(shield=True):
            await trio.sleep(seconds)
        with contextlib.suppress(FacetAborted):
            self.sql("insert into t values ('late')")

    async def fiber(self) -> None:
        await self.fibers.start("walk", self._walk, key="f")

    async def _walk(self) -> None:
        self.stash(7)
        await trio.sleep_forever()

    async def kid(self, name: str) -> Any:
        return await (await self.dynamic_agents.get(Old, name)).kept()

    async def owed(self) -> list[Any]:
        found = [*self.schedules.list()]
        return [(s.callback, s.dead, s.error is not None) for s in found]

    async def again(self, schedule_id: str) -> bool:
        return self.schedules.replay(schedule_id)

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        turn.stash("half")
        yield {"type": "text-delta", "id": "t", "delta": f"{self.class_name} "}
        await trio.sleep(turn.input)


class New(Old):
    """The second version: other methods, other annotations, no callback `gone`."""

    gone = None  # type: ignore[assignment]
    only_old = None  # type: ignore[assignment]

    async def only_new(self) -> list[Any]:
        return [self.class_name, self.upgraded_from]

    async def twice(self, n: str) -> Any:  # type: ignore[override]
        return [self.class_name, n + n]

    async def on_fiber_recovered(self, ctx: FiberRecovery) -> FiberResolution:
        return FiberResolution(result=[self.class_name, ctx.snapshot, ctx.attempt])

    async def fiber_end(self) -> list[Any]:
        found = self.fibers.inspect(key="f")
        assert found is not None
        return [found.status, found.result]

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        said = [c["delta"] for c in turn.chunks() if c["type"] == "text-delta"]
        yield {"type": "text-delta", "id": "t", "delta": f"{turn.snapshot} {said}"}


class Newest(New):
    resumable = False


class Mute(Agent):
    """It has no turn."""


class RootOnly(Agent):
    pass


class Top(Old):
    async def use(self, cls: str, name: str, method: str, args: list[Any]) -> Any:
        kid = await self.dynamic_agents.get(CLASSES[cls], name)
        return await getattr(kid, method)(*args)

    async def ask(self, cls: str, run_id: str, seconds: float) -> list[Any]:
        run = await self.run_agent_tool(CLASSES[cls], seconds, run_id=run_id)
        return [run.agent_type, run.status, run.reason or run.summary]

    async def up(self, old: str, name: str, new: str) -> None:
        to = {**CLASSES, "RootOnly": RootOnly}[new]
        await self.dynamic_agents.upgrade(old, name, to=to)

    async def has(self, cls: str, name: str) -> bool:
        return self.dynamic_agents.has(cls, name)


CLASSES: dict[str, type[Agent]] = {c.__name__: c for c in (Old, New, Newest, Mute)}


def opened(**options: Any) -> Any:
    facets = list(CLASSES.values())
    return open_test_kernel(roots=[Top, RootOnly], facets=facets, **options)


async def top(test: Harness) -> Top:
    return await test.kernel.get_agent(Top, "a")


def class_of(test: Harness, name: str = "k") -> list[Any]:
    sql = "SELECT class, upgraded_from FROM node WHERE name = ? AND state = 'live'"
    return rows(tree_of(test), sql, name)


# ---- what goes on


@pytest.mark.rule("F-398", "F-402", "F-403", "F-405", "F-406")
async def test_storage_schedules_and_stubs_go_on_in_the_new_class(
    clock: object,
) -> None:
    async with opened() as test:
        root = await top(test)
        await root.use("Old", "k", "keep", ["v1"])
        await root.use("Old", "k", "plan", [5, "tick"])
        await root.use("Old", "k", "kid", ["below"])
        stub: Any = await agent_at(test).dynamic_agents.get(Old, "k")
        slot = node_at(test, ("Old", "k")).slot
        new = await agent_at(test).dynamic_agents.upgrade(Old, "k", to=New)
        assert class_of(test) == [("New", "Old")]
        assert not await root.has("Old", "k")
        assert await root.has("New", "k")
        assert await new.kept() == ["v1"]
        assert node_at(test, ("New", "k")).slot == slot
        assert await stub.only_new() == ["New", None]
        assert await stub.twice("ab") == ["New", "abab"], "with its annotations"
        with pytest.raises(UsageError, match="New"):
            stub.only_old  # noqa: B018
        await test.advance(10)
        assert await new.kept() == ["v1", "New ticks"]
        assert await new.kid("below") == [], "what is below it is still there"
        assert SEEN.count(("Old", None)) == 3, "and was started once more"


async def test_a_method_taken_from_a_stub_before_is_the_new_one_after(
    clock: object,
) -> None:
    async with opened() as test:
        root = await top(test)
        stub: Any = await agent_at(test).dynamic_agents.get(Old, "k")
        twice, only_old = stub.twice, stub.only_old
        await root.up("Old", "k", "New")
        assert await twice("x") == ["New", "xx"]
        await raises(UsageError, only_old)


async def test_stubs_outside_serve_the_new_class_also_of_a_root_that_sleeps(
    clock: object,
) -> None:
    async with opened() as test:
        root = await top(test)
        one: Any = await test.kernel.get_sub_agent(root, Old, "k")
        two: Any = await test.kernel.get_sub_agent(root, Old, "k")
        await root.up("Old", "k", "New")
        assert await one.only_new() == ["New", None]
        await test.evict([("Top", "a")])
        assert test.tree("Top", "a") is None
        assert await two.only_new() == ["New", None]
        with pytest.raises(UsageError, match="nothing"):
            two.nothing  # noqa: B018
        await test.evict([("Top", "a")])
        await raises(UsageError, two.nothing)


async def test_sockets_stay_and_meet_the_new_class(clock: object) -> None:
    async with opened() as test:
        root = await top(test)
        await root.use("Old", "k", "keep", ["v"])
        peer = await connect(test, ("Top", "a"), ("Old", "k"))
        await root.up("Old", "k", "New")
        await settle()
        assert len(agent_at(test).dynamic_agents.list()) == 1
        assert peer.closed is None
        await root.use("New", "k", "keep", ["w"])
        assert len(node_at(test, ("New", "k")).agent.sockets.list()) == 1


@pytest.mark.rule("F-268")
async def test_a_missing_callback_rests_where_it_is_seen_and_can_be_replayed(
    clock: object,
) -> None:
    async with opened() as test:
        root = await top(test)
        failures: list[Any] = []
        test.kernel.subscribe("failure", lambda *event: failures.append(event[3]))
        once = await root.use("Old", "k", "plan", [5, "gone"])
        often = await root.use("Old", "k", "plan", [0, "gone", 3600])
        await root.up("Old", "k", "New")
        await test.advance(100)
        assert ["gone", True, True] in await root.use("New", "k", "owed", [])
        assert len(failures) <= 3, "not a hot loop"
        await test.advance(5 * 3600)
        owed = await root.use("New", "k", "owed", [])
        assert [error for _callback, _dead, error in owed] == [True, True]
        assert len(failures) <= 3 + 5 * 3, "nor at each tick"
        await root.up("New", "k", "Old")
        assert await root.use("Old", "k", "again", [once])
        assert await root.use("Old", "k", "again", [often])
        await test.advance(3700)
        kept = await root.use("Old", "k", "kept", [])
        assert set(kept) == {"gone was there"}
        assert len(kept) in (2, 3), "both now, and the tick that was next"
        assert await root.use("Old", "k", "owed", []) == [["gone", False, False]]


@pytest.mark.rule("F-399", "F-404", "F-407")
async def test_a_running_facet_keeps_its_class_and_is_made_once(clock: object) -> None:
    async with opened() as test:
        root = await top(test)
        first = await agent_at(test).dynamic_agents.get(Old, "k")
        await agent_at(test).dynamic_agents.get(New, "k")
        instance = node_at(test, ("Old", "k")).agent
        assert await first.only_old() == "old"
        assert node_at(test, ("Old", "k")).agent is instance, (
            "another name, another one"
        )
        assert SEEN == [("Top", None), ("Old", None), ("New", None)]
        FAIL.append(1)
        await raises(FacetBroken, root.use, "Old", "f", "kept", [])
        assert await root.use("Old", "f", "kept", []) == [], "no failed one is kept"


# ---- what was under way


async def test_a_run_goes_on_in_the_new_class_under_its_old_name(clock: object) -> None:
    async with opened() as test:
        root = await top(test)
        told: list[Any] = []

        async def ask(cls: str) -> None:
            told.append(await root.ask(cls, "k", 100))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, "Old")
            await test.advance(1)
            assert not told
            await root.up("Old", "k", "New")
            nursery.start_soon(ask, "New")
            nursery.start_soon(ask, "Old")
        text = "Old half ['Old ']"
        assert told == [["Old", "completed", text]] * 3, (
            "attempt 2, joined by both names"
        )
        await raises(UsageError, root.ask, "Newest", "k", 1)


async def test_a_run_that_cannot_go_on_is_interrupted_and_says_so(
    clock: object,
) -> None:
    async with opened() as test:
        root = await top(test)
        told: list[Any] = []

        async def ask() -> None:
            told.append(await root.ask("Old", "k", 1e6))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await test.advance(1)
            with pytest.raises(UsageError, match="cancel it first"):
                await root.up("Old", "k", "Mute")
            assert node_at(test, ("Old", "k")).state == 1, "it was not even stopped"
            await root.up("Old", "k", "Newest")
        assert told == [["Old", "interrupted", "not-resumable"]]


async def test_a_fiber_is_recovered_by_the_new_class_and_has_its_attempt_back(
    clock: object,
) -> None:
    async with opened() as test:
        root = await top(test)
        await root.use("Old", "k", "fiber", [])
        await root.up("Old", "k", "New")
        await test.advance(5)
        end = await root.use("New", "k", "fiber_end", [])
        assert end == ["completed", ["New", 7, 1]]


# ---- upgraded_from


async def test_the_start_is_told_until_one_has_succeeded(clock: object) -> None:
    async with opened() as test:
        root = await top(test)
        await root.use("Old", "k", "keep", ["v"])
        await root.up("Old", "k", "New")
        FAIL.extend([1, 2])
        SEEN.clear()
        for _ in range(2):
            await raises(FacetBroken, root.use, "New", "k", "kept", [])
        assert await root.use("New", "k", "kept", []) == ["v"]
        assert SEEN == [("New", "Old")] * 3
        assert class_of(test) == [("New", None)]
        await test.evict([("Top", "a"), ("New", "k")])
        await root.use("New", "k", "kept", [])
        assert SEEN[3:] == [("New", None)]


async def test_it_tells_the_class_that_last_started(clock: object) -> None:
    async with opened() as test:
        root = await top(test)
        await root.use("Old", "k", "keep", ["v"])
        await root.up("Old", "k", "New")
        await root.up("New", "k", "Newest")
        assert class_of(test) == [("Newest", "Old")]
        await root.up("Newest", "k", "Old")
        assert class_of(test) == [("Old", None)]
        SEEN.clear()
        await root.use("Old", "k", "kept", [])
        assert SEEN == [("Old", None)]


async def test_a_disk_that_is_full_then_only_tells_it_again(clock: object) -> None:
    async with opened() as test:
        root = await top(test)
        await root.use("Old", "k", "keep", ["v"])
        await root.up("Old", "k", "New")
        tree = tree_of(test)
        tree.db.execute(
            "CREATE TRIGGER full BEFORE UPDATE ON node"
            " BEGIN SELECT RAISE(ABORT, 'no room'); END"
        )
        assert await root.use("New", "k", "kept", []) == ["v"]
        assert class_of(test) == [("New", "Old")]


async def test_a_facet_that_rests_begins_anew_under_another_class(
    clock: object,
) -> None:
    async with opened(limits=Limits(restart_attempts=2)) as test:
        root = await top(test)
        await root.use("Old", "k", "keep", ["v"])
        await test.evict([("Top", "a"), ("Old", "k")])
        FAIL.extend([1, 2])
        for _ in range(2):
            await raises(FacetBroken, root.use, "Old", "k", "kept", [])
        with pytest.raises(FacetBroken, match="delete or upgrade it"):
            await root.use("Old", "k", "kept", [])
        await root.up("Old", "k", "New")
        assert await root.use("New", "k", "kept", []) == ["v"]
        assert not tree_of(test).supervision.records


# ---- refused


@pytest.mark.parametrize(
    ("old", "name", "new", "error"),
    [
        pytest.param("Old", "k", "New", UsageError, id="taken"),
        pytest.param("Old", "k", "Old", UsageError, id="itself"),
        pytest.param("Old", "k", "RootOnly", UsageError, id="no facet"),
        pytest.param("New", "no", "Newest", NotFound, id="no such"),
        pytest.param("Nobody", "k", "Newest", NotFound, id="no such class"),
        pytest.param("Old", "", "Newest", UsageError, id="no name"),
    ],
)
async def test_what_cannot_be_is_refused_and_changes_nothing(
    old: str, name: str, new: str, error: type[Exception], clock: object
) -> None:
    async with opened() as test:
        root = await top(test)
        await root.use("Old", "k", "keep", ["old"])
        await root.use("New", "k", "keep", ["new"])
        node = node_at(test, ("Old", "k"))
        before = rows(tree_of(test), "SELECT * FROM node ORDER BY born")
        await raises(error, root.up, old, name, new)
        assert rows(tree_of(test), "SELECT * FROM node ORDER BY born") == before
        assert node_at(test, ("Old", "k")) is node
        assert await root.use("Old", "k", "kept", []) == ["old"]


async def test_a_class_that_is_registered_no_more_can_still_be_left(
    clock: object, tmp_path: Any
) -> None:
    storage = f"sqlite:{tmp_path}"
    async with opened(storage=storage) as test:
        await (await top(test)).use("Old", "k", "keep", ["v"])
    async with open_test_kernel(
        roots=[Top], facets=[New], storage=storage
    ) as test:  # the new program has no Old
        root = await top(test)
        await root.up("Old", "k", "New")
        assert await root.use("New", "k", "kept", []) == ["v"]


# ---- code that does not stop


async def test_code_that_does_not_stop_leaves_the_class_and_asking_again_goes_on(
    clock: object,
) -> None:
    async with opened(abort_grace_s=1) as test:
        root = await top(test)
        kid = await agent_at(test).dynamic_agents.get(Old, "k")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(raises, FacetAborted, kid.deaf, 60)
            await settle()
            error = await raises(ChildDidNotStop, root.up, "Old", "k", "New")
            assert error.paths == ["Top/a/Old/k"]
            assert class_of(test) == [("Old", None)]
            assert await root.use("Old", "k", "only_old", []) == "old"
            await root.up("Old", "k", "New")
            assert await root.use("New", "k", "kept", []) == []
        assert await root.use("New", "k", "kept", []) == [], "fenced code wrote nothing"


# ---- beside others


async def beside(test: Harness, *acts: Any) -> list[Any]:
    """Run things while the old code takes two seconds to stop; return what they met."""
    root = await top(test)
    kid = await agent_at(test).dynamic_agents.get(Old, "k")
    out: list[Any] = []

    async def one(number: int, fn: Any, args: tuple[Any, ...]) -> None:
        try:
            out.append((number, await fn(*args)))
        except Exception as error:
            out.append((number, type(error)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(raises, FacetAborted, kid.deaf, 2)
        await settle()
        for number, (fn, *args) in enumerate(acts):
            nursery.start_soon(one, number, fn, tuple(args))
            await settle()
    assert await root.twice(2) == ["Top", 4]
    return [what for _number, what in sorted(out, key=lambda pair: pair[0])]


async def test_who_comes_meanwhile_waits_and_meets_the_new_class(
    clock: object,
) -> None:
    async with opened() as test:
        root = await top(test)
        kid: Any = await agent_at(test).dynamic_agents.get(Old, "k")
        met = await beside(
            test,
            (root.up, "Old", "k", "New"),
            (root.use, "New", "k", "only_new", []),
            (kid.twice, "z"),
        )
        assert met == [None, ["New", None], ["New", "zz"]]
        assert class_of(test) == [("New", None)]
        assert len(rows(tree_of(test), "SELECT 1 FROM node")) == 2


async def test_a_get_of_the_old_class_meanwhile_makes_a_new_one_after(
    clock: object,
) -> None:
    async with opened() as test:
        root = await top(test)
        met = await beside(
            test,
            (root.up, "Old", "k", "New"),
            (root.use, "Old", "k", "kept", []),
            (root.up, "Old", "k", "Newest"),
        )
        assert met[:2] == [None, []]
        assert sorted(c for c, _ in class_of(test)) in (
            ["New", "Old"],
            ["New", "Newest"],
        )


async def test_a_run_that_takes_the_new_name_meanwhile_keeps_it(clock: object) -> None:
    async with opened() as test:
        root = await top(test)
        met = await beside(
            test, (root.up, "Old", "k", "New"), (root.ask, "New", "k", 0.1)
        )
        assert met[0] is UsageError
        assert met[1][:2] == ["New", "completed"]
        assert set(class_of(test)) == {("Old", None), ("New", None)}
        assert await root.use("Old", "k", "only_old", []) == "old"


async def test_the_second_of_two_upgrades_finds_it_gone(clock: object) -> None:
    async with opened() as test:
        root = await top(test)
        met = await beside(
            test, (root.up, "Old", "k", "New"), (root.up, "Old", "k", "New")
        )
        assert met == [None, NotFound]


async def test_an_upgrade_of_what_is_being_upgraded_comes_after(
    clock: object,
) -> None:
    async with opened() as test:
        root = await top(test)
        met = await beside(
            test, (root.up, "Old", "k", "New"), (root.up, "New", "k", "Newest")
        )
        assert met == [None, None]
        assert class_of(test) == [("Newest", "Old")]


async def test_deleted_meanwhile_it_stays_deleted(clock: object) -> None:
    async with opened() as test:
        root = await top(test)
        inside = agent_at(test).dynamic_agents
        met = await beside(
            test, (root.up, "Old", "k", "New"), (inside.delete, Old, "k")
        )
        assert met == [Deleted, None]
        assert class_of(test) == []


async def test_an_abort_meanwhile_waits_for_the_same_code(clock: object) -> None:
    async with opened() as test:
        root = await top(test)
        inside = agent_at(test).dynamic_agents
        up, receipt = await beside(
            test, (root.up, "Old", "k", "New"), (inside.abort, Old, "k")
        )
        assert up is None
        assert receipt.nodes == [("Top/a/Old/k", "stopped")]
        assert await root.use("New", "k", "only_new", []) == ["New", None]


async def test_upgraded_after_an_abort_its_stubs_work_again(clock: object) -> None:
    async with opened() as test:
        root = await top(test)
        kid: Any = await agent_at(test).dynamic_agents.get(Old, "k")
        await agent_at(test).dynamic_agents.abort(Old, "k")
        await raises(FacetAborted, kid.kept)
        await root.up("Old", "k", "New")
        assert await kid.only_new() == ["New", None]


async def test_a_cancelled_caller_does_not_stop_it_half_way(clock: object) -> None:
    async with opened() as test:
        root = await top(test)
        kid = await agent_at(test).dynamic_agents.get(Old, "k")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(raises, FacetAborted, kid.deaf, 2)
            await settle()
            with trio.move_on_after(1):
                await root.up("Old", "k", "New")
            assert class_of(test) == [("Old", None)]
        await settle()
        assert class_of(test) == [("New", "Old")]


async def test_calls_inside_end_with_the_reason(clock: object) -> None:
    async with opened() as test:
        root = await top(test)
        kid = await agent_at(test).dynamic_agents.get(Old, "k")
        errors: list[Any] = []

        async def call() -> None:
            errors.append(await raises(FacetAborted, kid.wait))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            await settle()
            await root.up("Old", "k", "New")
        assert errors[0].reason == "upgraded to New"


@pytest.mark.parametrize("commits", range(4))
async def test_a_crash_leaves_one_class_or_the_other(
    commits: int, clock: object
) -> None:
    async with opened() as test:
        root = await top(test)
        await root.use("Old", "k", "keep", ["v"])
        await root.use("Old", "k", "fiber", [])
        await root.use("Old", "k", "plan", [50, "tick"])
        test.faults.die_after(commits)
        with trio.move_on_after(5), contextlib.suppress(Exception):
            await root.up("Old", "k", "New")
            await root.use("New", "k", "kept", [])
        await test.crash()
        await test.reopen()
        root = await top(test)
        await test.advance(100)
        ((name, _),) = class_of(test)
        kept = await root.use(name, "k", "kept", [])
        assert kept == ["v", f"{name} ticks"]


# ---- everything at once


class Life(Agent):
    """It notes how many lives of its slot there are at once."""

    alive: ClassVar[dict[str, int]] = {}

    async def on_start(self, props: Any = None) -> None:
        await trio.sleep(0.01)
        self.sql("create table if not exists t (v)")
        self.spawn(self._live)

    async def _live(self) -> None:
        slot = self._node.slot
        Life.alive[slot] = Life.alive.get(slot, 0) + 1
        assert Life.alive[slot] == 1, "two lives at once"
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(0.05)
            Life.alive[slot] -= 1

    async def keep(self, v: int) -> str:
        self.sql("insert into t values (?)", v)
        return self.class_name

    async def kept(self) -> list[int]:
        return [r.v for r in self.sql("select v from t order by v")]


class LifeA(Life):
    pass


class LifeB(Life):
    pass


class Chaos(Agent):
    async def any(self, seed: int) -> int:
        """Do many things at once; return how many of them were done."""
        chance, inside = random.Random(seed), self.dynamic_agents
        done = 0

        async def one(number: int) -> None:
            nonlocal done
            cls, other = chance.sample([LifeA, LifeB], 2)
            await trio.sleep(chance.random())
            try:
                match chance.choice(["get", "up", "up", "abort", "call", "delete"]):
                    case "get":
                        await inside.get(cls, "k")
                    case "up":
                        await inside.upgrade(cls, "k", to=other)
                    case "abort":
                        await inside.abort(cls, "k")
                    case "delete" if number % 5 == 0:
                        await inside.delete(cls, "k")
                    case _:
                        kid = await inside.lookup(cls, "k")
                        if kid is not None:
                            kept = await kid.keep(number)
                            assert kept in ("LifeA", "LifeB")
            except (FacetAborted, Deleted, NotFound, UsageError):
                return
            done += 1

        async with trio.open_nursery() as nursery:
            for number in range(60):
                nursery.start_soon(one, number)
        return done


@pytest.mark.parametrize("seed", range(12))
async def test_many_things_at_once_leave_one_life_a_slot_and_one_row_a_name(
    seed: int, clock: object
) -> None:
    Life.alive.clear()
    async with open_test_kernel(
        roots=[Chaos], facets=[LifeA, LifeB], seed=seed
    ) as test:
        root = await test.kernel.get_agent(Chaos, "a")
        broken: list[Any] = []
        test.kernel.subscribe("failure", lambda *event: broken.append(event[3]))
        assert await root.any(seed) > 10
        await test.advance(5)
        assert not broken
        tree = test.tree("Chaos", "a")
        assert tree is not None
        assert not tree.upgrades._slots
        assert not tree.upgrades._addresses
        live = rows(tree, "SELECT class, name FROM node WHERE parent IS NOT NULL")
        assert len(live) == len(set(live))
        for node in tree.nodes.values():
            row = tree.node_row(node.slot)
            assert row is not None
            assert node.kind.name == row.class_name, "a node of another class"
