"""Cancelling a run ends its whole tree, marked before any code hears of it; and says so."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
import trio

from culet.kernel import (
    Agent,
    AgentToolRun,
    CancelReceipt,
    Chunk,
    Detached,
    Inspection,
    Turn,
)
from culet.kernel.errors import FacetAborted
from culet.kernel.testing import open_test_kernel
from culet.kernel.testing_scenario import Point, Scenario, Spec, run_scenario
from culet.kernel.testing_watch import all_tasks
from kernel.agents import agent_at, node_at, rows, settle, tree_of
from volume import Volume

SEEN: list[Any] = []
DYING: Any = None  # what a branch does while it dies
LASTS_S = 100.0
CRASHES = Volume(14, 40, 10**6)


@pytest.fixture(autouse=True)
def fresh() -> None:
    global DYING
    SEEN.clear()
    DYING = None


class Base(Agent):
    async def tick(self, payload: Any, schedule: Any) -> None:
        SEEN.append(("tick", self.name, payload))

    async def again(self, payload: Any, schedule: Any) -> None:
        """A call of a schedule that makes one more, and a fiber that makes one."""
        await self.schedule(500, "tick", "from a call")

        async def body() -> None:
            await self.schedule(500, "tick", "from a fiber of a call")

        await self.fibers.start("f", body)

    async def plan(self, what: str) -> None:
        await self.schedule(500, "tick", what)

    async def sit(self) -> None:
        await trio.sleep_forever()

    async def wake(self, name: str) -> None:
        """Call a facet that is there, by a stub of former days."""
        slot = self._node.tree.slot_of(self._node.slot, "Branch", name)
        kind = self._node.tree.kernel.classes.of(Branch)
        await self._node.tree.stub(slot or self._node.slot, kind).sit()


class Branch(Base):
    """Asks for `fan` runs below, `depth` levels of them, and waits."""

    resumable = True

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        fan, depth = turn.input
        yield {"type": "text-delta", "id": "t", "delta": "so"}
        await self.schedule(500, "tick", "of a turn")
        await self.fibers.start("beside", self.sit)
        try:
            async with trio.open_nursery() as nursery:
                for number in range(fan if depth else 0):
                    ask = self.below(fan, depth - 1, number)
                    nursery.start_soon(ask)
                await trio.sleep(LASTS_S)
        finally:
            if DYING is not None:
                with trio.CancelScope(shield=True):
                    await DYING(self)

    def below(self, fan: int, depth: int, number: int) -> Any:
        async def ask() -> None:
            await trio.sleep(number / 10 ** (3 - 2 * depth))  # not in trio's order
            detached = Detached() if number % 3 == 2 else False
            await self.run_agent_tool(
                Branch, [fan, depth], run_id=f"{self.name}-{number}", detached=detached
            )

        return ask


class Planner(Base):
    """Plans in its start, in its turn, in fibers of it, and in calls that it has planned."""

    resumable = True

    async def on_start(self, props: Any = None) -> None:
        await self.schedule(900, "tick", "in the start", idempotent=True)

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        yield {"type": "text-delta", "id": "t", "delta": "so"}
        await self.schedule(500, "tick", "in the turn")
        self.queue.put("tick", "queued")
        await self.schedule_every(500, "tick", "each")
        await self.schedule(1, "again", "then")

        async def body() -> None:
            await self.schedule(500, "tick", "in a fiber")

        await self.run_fiber("f", body)
        await self.fibers.start("g", body)
        if turn.input:
            await self.run_agent_tool(Planner, False, run_id="inner", detached=True)
        await trio.sleep_forever()


class Foreign(Base):
    """A child that runs itself; it hears of the cancel and wants to begin things."""

    async def start_agent_tool_run(self, input: Any, *, run_id: str) -> Inspection:  # noqa: A002
        await self.dynamic_agents.get(Branch, "old")
        return Inspection(status="running")

    async def cancel_agent_tool_run(
        self, run_id: str, reason: str | None = None
    ) -> Inspection | None:
        SEEN.append(await attempts(self))
        self.sql("create table if not exists said (a)")  # it may put things in order
        return Inspection(status="aborted")

    async def inspect_agent_tool_run(self, run_id: str) -> Inspection | None:
        return None if not self.dynamic_agents.has(Branch, "old") else await running()

    async def agent_tool_chunks(self, run_id: str, after: int = -1) -> list[Any]:
        return []


async def running() -> Inspection:
    return Inspection(status="running")


class Top(Base):
    async def begin(self, cls: str, given: Any, run_id: str = "r") -> AgentToolRun:
        kind = {k.__name__: k for k in (Branch, Planner, Foreign)}[cls]
        return await self.run_agent_tool(kind, given, run_id=run_id, detached=True)

    async def stop(self, run_id: str = "r") -> CancelReceipt:
        return await self.runs.cancel(run_id, "enough")

    async def ends(self) -> dict[str, str]:
        """Every end that stands, in the whole tree."""
        sql = "SELECT id, status FROM run UNION ALL SELECT id, status FROM fiber"
        return dict(self._node.tree.db.execute(sql))


def opened(**options: Any) -> Any:
    return open_test_kernel(roots=[Top], facets=[Branch, Planner, Foreign], **options)


async def attempts(agent: Any) -> list[str]:
    """Try to begin everything that can be begun; return what came of each."""
    out = []
    for name, fn in {
        "child": lambda: agent.dynamic_agents.get(Branch, "new"),
        "wake": lambda: agent.wake("old"),
        "upgrade": lambda: agent.dynamic_agents.upgrade(Branch, "old", to=Planner),
        "run": lambda: agent.run_agent_tool(Branch, [0, 0], run_id="new"),
        "detached": lambda: agent.run_agent_tool(
            Branch, [0, 0], run_id="d", detached=True
        ),
        "schedule": lambda: agent.schedule(1, "tick", "late"),
        "many": lambda: agent.schedule_every(1, "tick", "late"),
        "queue": lambda: sync(agent.queue.put, "tick", "late"),
        "fiber": lambda: agent.run_fiber("late", agent.sit),
        "start": lambda: agent.fibers.start("late", agent.sit),
    }.items():
        try:
            with trio.fail_after(1):
                await fn()
            out.append(f"{name} was begun")
        except FacetAborted:
            out.append(name)
        except BaseException as error:
            out.append(f"{name}: {error!r}")
    return out


async def sync(fn: Any, *args: Any) -> None:
    fn(*args)


NAMES = [
    "child", "wake", "upgrade", "run", "detached", "schedule", "many", "queue", "fiber", "start",
]  # fmt: skip


async def grown(test: Any, fan: int, depth: int) -> Any:
    """Return the root when all levels wait."""
    await test.kernel.get_agent(Top, "a")
    me = agent_at(test)
    await me.begin("Branch", [fan, depth])
    await test.advance(2)
    return me


def leftovers(test: Any) -> list[Any]:
    """Return what goes on or is owed, beside the root itself."""
    tree = tree_of(test)
    running = "SELECT id FROM {} WHERE status = 'running'"
    sql = f"{running.format('run')} UNION ALL {running.format('fiber')}"
    jobs = "SELECT kind, what FROM job WHERE kind <> 'hook'"
    return [*rows(tree, sql), *rows(tree, jobs), *list(tree.nodes)[1:]]


# ---- the whole tree


@pytest.mark.rule("T-047", "T-262")
async def test_three_levels_of_ten_end_in_the_same_order_each_time(
    clock: object,
) -> None:
    found = []
    for seed in (1, 2):
        async with opened(seed=seed) as test:
            before = len(all_tasks())
            await test.kernel.get_agent(Top, "a")
            awake = len(all_tasks())
            me = await grown(test, 10, 2)
            assert len(rows(tree_of(test), "SELECT 1 FROM run")) == 111
            receipt = await me.stop()
            assert leftovers(test) == []
            await settle()
            assert len(all_tasks()) == awake > before
            found.append(receipt)
    first, second = found
    assert (first.status, first.reason, first.ended) == ("aborted", "enough", True)
    assert [e.id for e in first.runs] == [e.id for e in second.runs]
    assert first.runs[0].path == "Top/a/Branch/r"
    assert first.runs[0].reason == "enough"
    assert len(first.runs) == 111 == len({e.id for e in first.runs})
    assert {(e.status, e.reason) for e in first.runs[1:]} == {
        ("aborted", "asker-ended")
    }
    # the fibers and the schedules of each of them
    assert [e.path for e in first.fibers] == [e.path for e in second.fibers]
    assert len(first.fibers) == len(first.calls) == 111
    assert {(c.kind, c.callback) for c in first.calls} == {("call", "tick")}
    # every node has stopped, children before parents
    assert first.nodes == second.nodes
    assert {how for _path, how in first.nodes} == {"stopped"}
    places = {path: at for at, (path, _how) in enumerate(first.nodes)}
    assert len(places) == 111
    assert all(
        at < places[path.rpartition("/Branch/")[0]]
        for path, at in places.items()
        if path != "Top/a/Branch/r"
    )
    assert first.elapsed_s < 1


@pytest.mark.rule("T-262")
async def test_it_is_all_marked_before_any_code_hears_of_it(clock: object) -> None:
    global DYING
    async with opened() as test:
        me = await grown(test, 2, 1)
        tree = tree_of(test)

        async def look(agent: Any) -> None:
            open_ = rows(tree, "SELECT id FROM run WHERE status = 'running'")
            open_ += rows(tree, "SELECT id FROM fiber WHERE status = 'running'")
            open_ += rows(tree, "SELECT id FROM job WHERE kind = 'call'")
            SEEN.append((agent.name, open_, await attempts(agent)))

        DYING = look
        await me.stop()
        assert sorted(name for name, _, _ in SEEN) == ["r", "r-0", "r-1"]
        assert [(open_, tried) for _, open_, tried in SEEN] == [([], NAMES)] * 3
        assert leftovers(test) == []


@pytest.mark.rule("T-047")
async def test_a_child_that_runs_itself_hears_and_can_begin_nothing(
    clock: object,
) -> None:
    async with opened() as test:
        await test.kernel.get_agent(Top, "a")
        me = agent_at(test)
        await me.begin("Foreign", None)
        await test.advance(1)
        old = node_at(test, ("Foreign", "r"), ("Branch", "old"))
        await test.evict([("Top", "a"), ("Foreign", "r"), ("Branch", "old")])
        assert old.gone.is_set()
        receipt = await me.stop()
        assert SEEN == [NAMES]
        assert [e.id for e in receipt.runs] == ["r"]
        assert receipt.nodes == [("Top/a/Foreign/r", "stopped")]
        assert leftovers(test) == []


async def test_a_stranger_who_wakes_a_facet_below_waits_for_the_next_life(
    clock: object,
) -> None:
    class Slow(Foreign):
        async def cancel_agent_tool_run(
            self, run_id: str, reason: str | None = None
        ) -> Inspection | None:
            await trio.sleep(3)
            return None

    async with open_test_kernel(roots=[Top], facets=[Branch, Slow]) as test:
        await test.kernel.get_agent(Top, "a")
        me = agent_at(test)
        await me.run_agent_tool(Slow, None, run_id="r", detached=True)
        await test.advance(1)
        await test.evict([("Top", "a"), ("Slow", "r"), ("Branch", "old")])
        tree = tree_of(test)
        [(slot,)] = rows(tree, "SELECT slot FROM node WHERE name = 'old'")
        dying = node_at(test, ("Slow", "r"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(me.stop)
            await test.advance(1)
            node = await tree.wake(slot)
        assert dying.gone.is_set()
        assert node.parent is not dying


# ---- what it takes along


async def test_the_calls_that_its_code_has_planned_go_and_no_others(
    clock: object,
) -> None:
    async with opened() as test:
        await test.kernel.get_agent(Top, "a")
        me = agent_at(test)
        await me.plan("of the parent")
        await me.begin("Planner", True)
        await test.advance(3)
        facet = await me.dynamic_agents.get(Planner, "r")
        await facet.plan("for a visitor")
        [known] = [
            s
            for s in agent_at(test, ("Planner", "r")).schedules.list()
            if s.payload == "in the turn"
        ]
        assert known.maker == "r"
        receipt = await me.stop()
        assert ("Top/a/Planner/r", "queue") not in [
            (c.path, c.kind) for c in receipt.calls
        ]
        gone = [(c.path, c.kind) for c in receipt.calls]
        # in the turn, each, two fibers, two of the call; of the facet below all of them
        assert gone.count(("Top/a/Planner/r", "call")) == 6
        assert gone.count(("Top/a/Planner/r/Planner/inner", "call")) == 7
        left = [
            (s.path, s.payload) for s in me.schedules.list(below=True, limit=99)
        ]  # fmt: skip
        assert sorted(left) == [
            ("Top/a", "of the parent"), ("Top/a/Planner/r", "for a visitor"),
            ("Top/a/Planner/r", "in the start"),
        ]  # fmt: skip
        SEEN.clear()
        await test.advance(2000)
        assert sorted(what for _, _, what in SEEN) == [
            "for a visitor", "in the start", "of the parent",
        ]  # fmt: skip


async def test_a_queued_call_that_waits_behind_another_goes_too(clock: object) -> None:
    class Queues(Base):
        async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
            for number in range(3):
                self.queue.put("busy", number)
            yield {"type": "text-delta", "id": "t", "delta": "so"}
            await trio.sleep_forever()

        async def busy(self, payload: Any, schedule: Any) -> None:
            SEEN.append(payload)
            await trio.sleep(50)

    async with open_test_kernel(roots=[Top], facets=[Queues]) as test:
        await test.kernel.get_agent(Top, "a")
        me = agent_at(test)
        await me.run_agent_tool(Queues, None, run_id="r", detached=True)
        await test.advance(5)
        told: list[Any] = []
        test.kernel.subscribe("queue:cancel", lambda *said: told.append(said[-1]))
        receipt = await me.stop()
        # the one that is being made as well: its agent stops
        assert [(c.kind, c.callback) for c in receipt.calls] == [("queue", "busy")] * 3
        assert len(told) == 3
        await test.advance(500)
        assert SEEN == [0]


async def test_what_a_run_that_completes_has_planned_goes_on(clock: object) -> None:
    class Leaves(Base):
        async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
            await self.schedule(5, "tick", "later")
            yield {"type": "text-delta", "id": "t", "delta": "so"}

    async with open_test_kernel(roots=[Top], facets=[Leaves]) as test:
        await test.kernel.get_agent(Top, "a")
        me = agent_at(test)
        await me.run_agent_tool(Leaves, None, run_id="r")
        assert (await me.stop()).calls == []
        await test.advance(10)
        assert SEEN == [("tick", "r", "later")]


@pytest.mark.rule("T-262")
async def test_what_an_ended_turn_waited_for_ends_with_all_below(clock: object) -> None:
    class Middle(Base):
        async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
            yield {"type": "text-delta", "id": "t", "delta": "so"}
            await self.run_agent_tool(Branch, [0, 0], run_id="own", detached=True)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.run_agent_tool, Branch, [3, 1])
                await trio.sleep(5)
                raise ValueError("it fails")

    async with open_test_kernel(roots=[Top], facets=[Middle, Branch]) as test:
        await test.kernel.get_agent(Top, "a")
        me = agent_at(test)
        run = await me.run_agent_tool(Middle, None, run_id="r")
        assert run.status == "error"
        await settle()
        tree = tree_of(test)
        open_ = rows(tree, "SELECT id FROM run WHERE status = 'running'")
        assert open_ == [("own",)]  # that nobody waited for; one below is detached too
        assert len(rows(tree, "SELECT 1 FROM run WHERE status = 'aborted'")) == 4
        calls = rows(tree, "SELECT maker FROM job WHERE kind = 'call'")
        assert calls == [("own",)]


# ---- who asks, and how often


async def test_twice_late_and_for_nothing(clock: object) -> None:
    async with opened() as test:
        me = await grown(test, 1, 1)
        receipts: list[CancelReceipt] = []

        async def one() -> None:
            receipts.append(await me.stop())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one)
            nursery.start_soon(one)
        assert sorted(r.ended for r in receipts) == [False, True]
        assert {(r.status, r.reason) for r in receipts} == {("aborted", "enough")}
        late = await me.runs.cancel("r", "another")
        assert late == CancelReceipt(run_id="r", status="aborted", reason="enough")
        assert await me.runs.cancel("x") == CancelReceipt(run_id="x", status=None)


async def test_code_of_the_run_itself_may_have_it_cancelled(clock: object) -> None:
    class Suicide(Base):
        async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
            yield {"type": "text-delta", "id": "t", "delta": "so"}
            parent = await self.parent_agent(Top)
            try:
                await parent.stop("r")
            finally:
                SEEN.append("stopped")

    async with open_test_kernel(roots=[Top], facets=[Suicide]) as test:
        await test.kernel.get_agent(Top, "a")
        me = agent_at(test)
        run = await me.run_agent_tool(Suicide, None, run_id="r")
        assert (run.status, run.reason) == ("aborted", "enough")
        await settle()
        assert SEEN == ["stopped"]
        assert leftovers(test) == []
        assert me.runs.get("r") == run


async def test_a_caller_that_goes_takes_nothing_back(clock: object) -> None:
    async with opened() as test:
        me = await grown(test, 2, 1)
        with trio.CancelScope() as scope:
            scope.cancel()
            await me.stop()
        await test.advance(1)
        assert me.runs.get("r").status == "aborted"
        assert leftovers(test) == []


async def test_code_that_does_not_stop_is_named_and_changes_nothing(
    clock: object,
) -> None:
    global DYING

    async def deaf(agent: Any) -> None:
        if agent.name == "r-0":
            await trio.sleep(30)
            SEEN.append(await attempts(agent))

    async with opened(abort_grace_s=2) as test:
        me = await grown(test, 2, 1)
        DYING = deaf
        receipt = await me.stop()
        assert receipt.status == "aborted"
        assert receipt.nodes == [
            ("Top/a/Branch/r/Branch/r-1", "stopped"),
            ("Top/a/Branch/r/Branch/r-0", "remnant"),
            ("Top/a/Branch/r", "cut"),
        ]
        assert 2 <= receipt.elapsed_s < 3
        await test.advance(60)
        assert SEEN == [NAMES]


async def test_a_receipt_crosses_to_whoever_has_asked(clock: object) -> None:
    async with opened() as test:
        me = await test.kernel.get_agent(Top, "a")
        await me.begin("Branch", [1, 1])
        await test.advance(2)
        receipt = await me.stop()
        assert isinstance(receipt, CancelReceipt)
        assert [(e.kind, e.id) for e in receipt.runs] == [("run", "r"), ("run", "r-0")]


# ---- what it said is true after a crash


async def story(scenario: Scenario) -> None:
    """Ask for a tree, cancel it, and note each end that the receipt has told."""
    top = await scenario.get(Top, "a")
    await top.begin("Branch", [2, 1])
    await scenario.advance(2)
    receipt = await top.stop()
    scenario.ended("r", receipt.status or "none")
    for one in (*receipt.runs, *receipt.fibers):
        scenario.told(one.id, one.status)

    @scenario.recall
    async def read() -> Mapping[str, Any]:
        return await top.ends()


def test_a_receipt_is_true_after_a_crash_at_any_point() -> None:
    spec = Spec(roots=[Top], facets=[Branch, Planner, Foreign])
    whole = run_scenario(story, spec)
    assert whole.findings == ()
    commits, records = whole.lives[0]
    points = [Point("commit", n + 1) for n in range(commits)]
    points += [Point("record", n + 1) for n in range(records)]
    points += [Point("landed", n + 1) for n in range(records)]
    assert len(points) > 20
    stride = max(1, len(points) // CRASHES.now)
    for point in points[::stride]:
        for hasty in (False, True):
            told = run_scenario(story, spec, (point,), hasty=hasty)
            assert told.findings == (), point
            assert told.reached, point
