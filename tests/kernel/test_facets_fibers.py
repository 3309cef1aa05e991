"""Fibers of facets: their ledger, their recovery, their bounds, and who may see them."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest
import trio

from culet.kernel import (
    Agent,
    Chunk,
    FiberProgress,
    FiberRecovery,
    FiberResolution,
    Limits,
    Schedule,
    Turn,
)
from culet.kernel.errors import CapacityError, FacetAborted, UsageError
from culet.kernel.events import FiberEnded, FiberTold, FiberTry
from culet.kernel.testing import EPOCH_MS, Harness, open_test_kernel
from kernel.agents import agent_at, node_at, raises, rows, settle, tree_of

TOLD: list[FiberRecovery] = []
NOTES: list[Any] = []
FLAGS: set[str] = set()


@pytest.fixture(autouse=True)
def fresh() -> None:
    for kept in (TOLD, NOTES, FLAGS):
        kept.clear()


class Kid(Agent):
    async def on_start(self) -> None:
        NOTES.append(f"start {self.name}")
        if "broken" in FLAGS and self.name == "k":
            raise ValueError("it does not start")
        self.sql("CREATE TABLE IF NOT EXISTS said (what TEXT)")

    async def on_fiber_recovered(self, ctx: FiberRecovery) -> FiberResolution | None:
        TOLD.append(ctx)
        self.sql("INSERT INTO said VALUES (?)", f"hook {ctx.name}")
        match ctx.name:
            case "raises":
                raise ValueError("in the hook")
            case "hangs":
                await trio.sleep_forever()
            case "slow":
                await trio.sleep(3000)
            case "ignored":
                return None
            case "stashes":
                self.stash(len(TOLD))
                raise ValueError("in the hook")
            case "wrong":
                return {"status": "completed"}  # type: ignore[return-value]
            case "ends":
                self.fibers.cancel(ctx.id, reason="by itself")
                await trio.sleep(0)
        return FiberResolution(result="recovered")

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        self.sql("INSERT INTO said VALUES ('turn')")
        yield {"type": "x"}
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(1)
                try:
                    self.sql("INSERT INTO said VALUES ('late')")
                except FacetAborted as error:
                    NOTES.append(type(error).__name__)

    async def due(self, payload: Any, schedule: Schedule) -> None: ...

    def said(self) -> list[str]:
        return [row.what for row in self.sql("SELECT what FROM said")]

    async def stay(
        self,
        name: str,
        fiber_id: str | None = None,
        key: str | None = None,
        metadata: Any = None,
        deadline_s: float | None = None,
        wait: bool = False,
    ) -> Any:
        """Start a fiber that goes on for ever."""
        return await self.fibers.start(
            name, trio.sleep_forever, fiber_id=fiber_id, key=key, metadata=metadata,
            deadline_s=deadline_s, wait=wait,
        )  # fmt: skip


class Top(Kid):
    pass


def opened(**options: Any) -> Any:
    return open_test_kernel(roots=[Top], facets=[Kid], **options)


KID = ("Kid", "k")
DEEP = (KID, ("Kid", "deep"))


async def kid_of(test: Harness) -> Any:
    """Return the facet, and below it one more."""
    await test.kernel.get_agent(Top, "a")
    await agent_at(test).dynamic_agents.get(Kid, "k")
    await agent_at(test, KID).dynamic_agents.get(Kid, "deep")
    return agent_at(test, KID)


async def crashed(test: Harness) -> None:
    """Lose the process, with all that was committed; the next life begins."""
    await tree_of(test).durable()
    await test.crash()
    NOTES.clear()
    await test.reopen()


def listen(test: Harness) -> list[tuple[str, Any]]:
    heard: list[tuple[str, Any]] = []

    def fn(channel: str, tree: Any, subject: Any, detail: Any) -> None:
        if channel.startswith("fiber:"):
            heard.append((channel.removeprefix("fiber:"), detail))

    test.kernel.subscribe("*", fn)
    return heard


def owed(test: Harness) -> list[tuple[Any, ...]]:
    return rows(tree_of(test), "SELECT kind, what FROM job ORDER BY kind, what")


def stored(test: Harness) -> list[tuple[Any, ...]]:
    sql = "SELECT name, status, reason FROM fiber ORDER BY born"
    return rows(tree_of(test), sql)


# ---- the ledger


@pytest.mark.rule("F-330")
async def test_a_fiber_that_runs_for_the_first_time_has_no_snapshot(
    clock: object,
) -> None:
    async with opened() as test:
        kid = await kid_of(test)
        await kid.stay("f", fiber_id="f")
        await settle()
        assert kid.fibers.inspect("f").snapshot is None
        assert TOLD == []
        await crashed(test)
        await test.advance(5)
        assert [t.snapshot for t in TOLD] == [None], "only the hook is told"


@pytest.mark.rule("F-347")
async def test_the_first_start_is_accepted_and_every_other_joins_it(
    clock: object,
) -> None:
    async with opened() as test:
        kid = await kid_of(test)
        first = await kid.stay("f", key="k", metadata={"m": 1})
        again = await kid.stay("f", key="k", metadata={"m": 2})
        assert (first.accepted, again.accepted) == (True, False)
        assert (again.id, again.metadata) == (first.id, {"m": 1})
        assert kid.fibers.inspect(first.id).accepted is None
        async with trio.open_nursery() as nursery:

            async def join() -> None:
                NOTES.append(await kid.stay("f", key="k", wait=True))

            nursery.start_soon(join)
            await settle()
            kid.fibers.cancel(key="k")
        assert (NOTES[-1].status, NOTES[-1].accepted) == ("aborted", False)


@pytest.mark.rule("F-356")
async def test_deleting_keeps_what_was_interrupted_and_what_runs(clock: object) -> None:
    async with opened() as test:
        kid = await kid_of(test)
        for at, status in enumerate(("completed", "error", "aborted", "interrupted")):
            await kid.stay(status, fiber_id=status)
            how = FiberResolution(status=status)  # type: ignore[arg-type]
            assert kid.fibers.resolve(status, how)
            await test.advance(1)
            assert kid.fibers.inspect(status).completed_at == EPOCH_MS + at * 1000
        await kid.stay("runs", fiber_id="runs")
        fibers = kid.fibers
        assert fibers.delete(settled_before=EPOCH_MS + 1000) == 1
        assert fibers.delete(limit=1) == 1
        names = [f.name for f in fibers.list()]
        assert names == ["aborted", "interrupted", "runs"], (
            "the earliest end goes first"
        )
        assert fibers.delete(status=("completed", "running")) == 0
        assert fibers.delete() == 1
        assert fibers.delete(status="interrupted") == 1
        assert [f.name for f in fibers.list()] == ["runs"]
        for bad in ({"status": "over"}, {"limit": 0}):
            with pytest.raises(UsageError):
                fibers.delete(**bad)


async def test_what_was_interrupted_is_so_for_good(clock: object) -> None:
    async with opened() as test:
        kid = await kid_of(test)
        await kid.stay("ignored", fiber_id="f")
        await crashed(test)
        await test.advance(5)
        kid = agent_at(test, KID)
        found = kid.fibers.inspect("f")
        assert (found.status, found.reason) == ("interrupted", "not-resumed")
        assert not kid.fibers.resolve("f", FiberResolution())
        assert kid.fibers.cancel("f") == "interrupted"
        assert not kid.fibers.resolve("nobody", FiberResolution())


@pytest.mark.limit("due_rows")
async def test_lists_are_bounded_filtered_and_go_on(clock: object) -> None:
    async with opened(limits=Limits(due_rows=3)) as test:
        kid = await kid_of(test)
        for n in range(5):
            await kid.stay(f"n{n % 2}", fiber_id=f"f{n}")
        kid.fibers.cancel("f1")
        first = kid.fibers.list(limit=99)
        assert [f.id for f in first] == ["f0", "f1", "f2"]
        assert [f.id for f in kid.fibers.list(after=first[-1])] == ["f3", "f4"]
        assert [f.id for f in kid.fibers.list(name="n1")] == ["f1", "f3"]
        assert [f.id for f in kid.fibers.list(status="aborted")] == ["f1"]
        both = kid.fibers.list(status=("running", "aborted"), name="n1")
        assert [f.id for f in both] == ["f1", "f3"]
        with pytest.raises(UsageError, match="status"):
            kid.fibers.list(status="pending")


# ---- recovery


@pytest.mark.rule("F-352", "F-364")
async def test_the_hook_is_told_all_there_is(clock: object) -> None:
    async with opened() as test:
        kid = await kid_of(test)

        async def fn() -> None:
            kid.stash({"page": 7})
            await trio.sleep_forever()

        await kid.fibers.start("f", fn, fiber_id="f", key="key", metadata={"m": 1})
        await test.advance(60)
        await crashed(test)
        await test.advance(1)
        (told,) = TOLD
        assert (told.id, told.name, told.key, told.status) == (
            "f",
            "f",
            "key",
            "running",
        )
        assert (told.snapshot, told.metadata) == ({"page": 7}, {"m": 1})
        assert (told.attempt, told.error) == (2, None)
        assert told.started_at == told.created_at == EPOCH_MS
        assert 60 <= told.age_s < 62
        found = agent_at(test, KID).fibers.inspect("f")
        assert (found.status, found.result) == ("completed", "recovered")
        assert owed(test) == []


@pytest.mark.rule("F-352")
async def test_an_answer_that_comes_too_late_changes_nothing(clock: object) -> None:
    async with opened() as test:
        kid = await kid_of(test)
        await kid.stay("ends", fiber_id="f")
        await crashed(test)
        await test.advance(5)
        found = agent_at(test, KID).fibers.inspect("f")
        assert (found.status, found.reason) == ("aborted", "by itself")
        assert len(TOLD) == 1
        assert owed(test) == []


@pytest.mark.rule("F-334")
async def test_an_alarm_leaves_a_fiber_alone_that_runs(clock: object) -> None:
    async with opened() as test:
        kid = await kid_of(test)
        await kid.stay("f", fiber_id="f")
        tree = tree_of(test)
        for _ in range(3):
            await test.advance(40)
            tree.jobs.touch(kid._node.slot, "fiber:f")  # look again
            await settle()
        assert TOLD == []
        assert kid.fibers.inspect("f").status == "running"
        assert owed(test) == [("fiber", "f")]


@pytest.mark.rule("F-338", "I-48")
async def test_a_facet_that_cannot_start_does_not_keep_the_root_awake(
    clock: object,
) -> None:
    async with opened(idle_s=20) as test:
        kid = await kid_of(test)
        await kid.stay("f", fiber_id="f")
        FLAGS.add("broken")
        await crashed(test)
        await test.advance(3000)
        starts = [n for n in NOTES if n == "start k"]
        assert 2 <= len(starts) <= 12
        await test.kernel.get_agent(Top, "a")
        assert stored(test) == [("f", "error", "recovery-exhausted")]
        error = rows(tree_of(test), "SELECT error FROM fiber")[0][0]
        assert "it does not start" in error
        assert owed(test) == []
        assert TOLD == []


@pytest.mark.rule("F-338")
async def test_a_facet_that_starts_again_is_recovered_after_all(clock: object) -> None:
    async with opened() as test:
        kid = await kid_of(test)
        await kid.stay("f", fiber_id="f")
        FLAGS.add("broken")
        await crashed(test)
        await test.advance(2)
        assert TOLD == []
        FLAGS.clear()
        await test.advance(60)
        assert [t.id for t in TOLD] == ["f"]
        assert stored(test) == [("f", "completed", None)]


@pytest.mark.rule("F-339")
async def test_many_fibers_of_one_facet_start_it_once(
    clock: object,
) -> None:
    async with opened() as test:
        kid = await kid_of(test)
        deep = agent_at(test, *DEEP)
        for n in range(4):
            await (kid if n % 2 else deep).stay(f"f{n}")
            await test.advance(0.1)
        await crashed(test)
        await test.advance(5)
        assert Counter(NOTES) == {"start a": 1, "start k": 1, "start deep": 1}
        assert sorted(t.name for t in TOLD) == ["f0", "f1", "f2", "f3"]


@pytest.mark.rule("F-340")
async def test_recovery_begins_with_the_life_and_no_two_meet(clock: object) -> None:
    async with opened() as test:
        kid = await kid_of(test)
        await kid.stay("slow", fiber_id="f")
        await crashed(test)
        await settle()
        assert [t.id for t in TOLD] == ["f"], "nobody had to ask, no time has passed"
        assert NOTES == ["start a", "start k"]
        tree = tree_of(test)
        for _ in range(5):
            tree.jobs.touch(agent_at(test, KID)._node.slot, "fiber:f")
            await test.kernel.get_agent(Top, "a")
            await test.advance(30)
        assert len(TOLD) == 1


@pytest.mark.rule("F-341", "F-342", "F-344", "C-062")
async def test_a_hook_that_raises_is_called_again_later_and_later(
    clock: object,
) -> None:
    async with opened() as test:
        kid = await kid_of(test)
        await kid.stay("raises", fiber_id="f")
        await crashed(test)
        at: list[float] = []
        for _ in range(400):
            seen = len(TOLD)
            await test.advance(0.25)
            at += [trio.current_time()] * (len(TOLD) - seen)
        gaps = [b - a for a, b in pairwise(at)]
        assert len(gaps) == 3
        for gap, longest in zip(gaps, (2, 4, 8), strict=True):
            assert longest / 2 - 0.3 <= gap <= longest + 0.3
        assert [t.attempt for t in TOLD] == [2, 3, 4, 5]
        assert TOLD[0].error is None
        assert TOLD[1].error == "ValueError: in the hook"
        assert stored(test) == [("raises", "error", "recovery-exhausted")]
        assert tree_of(test).jobs.slot() is None, "drained: no alarm is left"


@pytest.mark.limit("fiber_recovery_s")
@pytest.mark.rule("F-341", "F-362", "C-062")
async def test_a_fiber_that_is_too_old_is_not_tried_again(clock: object) -> None:
    async with opened() as test:
        kid = await kid_of(test)
        await kid.stay("stashes", fiber_id="f")  # so that no attempt is ever the last
        await test.advance(10)
        await crashed(test)
        heard = listen(test)
        await test.advance(600)
        tries = len(TOLD)
        assert tries > 5, "each of them had stored something"
        test.clock.jump(86_400)
        await test.advance(600)
        assert stored(test) == [("stashes", "error", "recovery-exhausted")]
        skipped = [d for c, d in heard if c == "recovery:skipped"]
        assert [d.outcome for d in skipped] == ["max-age"]
        assert len(TOLD) <= tries + 1
        assert owed(test) == []


async def test_an_old_fiber_is_tried_once_at_least(clock: object) -> None:
    async with opened() as test:
        kid = await kid_of(test)
        await kid.stay("f", fiber_id="f")
        await tree_of(test).durable()
        await test.crash()
        test.clock.jump(30 * 86_400)
        await test.reopen()
        await test.advance(5)
        assert [round(t.age_s) for t in TOLD] == [30 * 86_400]
        assert stored(test) == [("f", "completed", None)]


@pytest.mark.rule("F-343", "F-345")
async def test_a_hook_that_hangs_holds_up_no_other_and_has_no_limit(
    clock: object,
) -> None:
    async with opened(limits=Limits(job_timeout_s=10)) as test:
        kid = await kid_of(test)
        for name in ("hangs", "slow", "f"):
            await kid.stay(name, fiber_id=name)
        await crashed(test)
        await test.advance(5)
        assert stored(test)[2] == ("f", "completed", None)
        await test.advance(3100)
        assert stored(test)[:2] == [
            ("hangs", "running", None), ("slow", "completed", None),
        ]  # fmt: skip
        assert len(TOLD) == 3


@pytest.mark.rule("F-354")
async def test_a_job_of_a_fiber_that_has_ended_goes_and_the_hook_is_not_called(
    clock: object,
) -> None:
    async with opened() as test:
        kid = await kid_of(test)
        await kid.stay("f", fiber_id="f")
        await kid.stay("g", fiber_id="g")
        tree = tree_of(test)
        with tree.transaction():
            tree.db.execute(
                "UPDATE fiber SET status = 'completed', completed_at = started_at"
                " WHERE id = 'f'"
            )
            tree.db.execute("DELETE FROM fiber WHERE id = 'g'")
        await crashed(test)
        heard = listen(test)
        await test.advance(5)
        assert TOLD == []
        assert owed(test) == []
        assert [(c, d.outcome) for c, d in heard] == [("recovery:skipped", "ended")] * 2


async def test_a_hook_that_answers_with_something_else_is_told_so(
    clock: object,
) -> None:
    async with opened() as test:
        kid = await kid_of(test)
        await kid.stay("wrong", fiber_id="f")
        await crashed(test)
        await test.advance(600)
        found = agent_at(test, KID).fibers.inspect("f")
        assert (found.status, found.reason) == ("error", "recovery-exhausted")
        assert "FiberResolution" in found.error


@pytest.mark.rule("F-327")
@pytest.mark.parametrize(
    ("name", "left"),
    [("f", []), ("ignored", ["interrupted"]), ("raises", ["error"])],
)
async def test_of_run_fiber_only_what_nobody_heard_of_keeps_its_row(
    name: str, left: list[str], clock: object
) -> None:
    async with opened() as test:
        kid = await kid_of(test)

        async def bad() -> None:
            raise ValueError("heard")

        await raises(ValueError, kid.run_fiber, "bad", bad)
        assert stored(test) == []
        kid.spawn(kid.run_fiber, name, trio.sleep_forever)
        await settle()
        assert [s for _n, s, _r in stored(test)] == ["running"]
        await crashed(test)
        await test.advance(600)
        assert [s for _n, s, _r in stored(test)] == left
        assert owed(test) == []


# ---- events


@pytest.mark.rule("F-359")
async def test_a_fiber_is_told_of_from_start_to_end(clock: object) -> None:
    async with opened() as test:
        kid = await kid_of(test)
        heard = listen(test)

        async def good() -> None:
            await trio.sleep(3)
            await kid.report_progress(fraction=0.5)

        async def bad() -> None:
            raise ValueError("bad")

        await kid.run_fiber("good", good)
        await raises(ValueError, kid.run_fiber, "bad", bad)
        await kid.stay("kept", fiber_id="f")
        await test.advance(2)
        kid.fibers.cancel("f", reason="enough")
        assert heard == [
            ("start", FiberTold("good", False)),
            ("progress", FiberProgress(fraction=0.5)),
            ("end", FiberEnded("good", False, "completed", None, None, 3.0)),
            ("start", FiberTold("bad", False)),
            (
                "end",
                FiberEnded("bad", False, "error", "failed", "ValueError: bad", 0.0),
            ),
            ("start", FiberTold("kept", True)),
            ("end", FiberEnded("kept", True, "aborted", "enough", None, 2.0)),
        ]


@pytest.mark.rule("F-359")
async def test_an_interruption_and_each_try_are_told(clock: object) -> None:
    async with opened() as test:
        kid = await kid_of(test)
        heard = listen(test)
        await kid.stay("raises", fiber_id="f")
        await settle()
        await agent_at(test).dynamic_agents.abort(Kid, "k")
        assert heard[1:] == [("interrupted", FiberTold("raises", True))]
        heard.clear()
        await test.advance(600)
        error = "ValueError: in the hook"
        tries = [
            [
                ("recovery:detected", FiberTry("raises", True, n)),
                ("recovery:attempt", FiberTry("raises", True, n)),
                ("recovery:failed", FiberTry("raises", True, n, error)),
            ]
            for n in (2, 3, 4, 5)
        ]
        assert heard[:-1] == [event for group in tries for event in group]
        last, detail = heard[-1]
        assert (last, detail.status, detail.reason) == (
            "end",
            "error",
            "recovery-exhausted",
        )


# ---- what was ended can do nothing more


@pytest.mark.parametrize("how", ["cancel", "resolve", "deadline"])
async def test_shielded_code_of_a_fiber_that_was_ended_writes_nothing(
    how: str, clock: object
) -> None:
    async with opened() as test:
        kid = await kid_of(test)
        deep = await kid.dynamic_agents.get(Kid, "deep")

        async def fn() -> None:
            try:
                await trio.sleep_forever()
            finally:
                with trio.CancelScope(shield=True):
                    await trio.sleep(1)
                    for act in (
                        lambda: kid.sql("INSERT INTO said VALUES ('late')"),
                        lambda: kid.set_state({"late": 1}),
                        lambda: kid.stash(1),
                        lambda: kid.queue.put("due", "late"),
                        lambda: kid.fibers.cancel("other"),
                    ):
                        try:
                            act()
                        except Exception as error:
                            NOTES.append(type(error).__name__)
                    for call, args in (
                        (deep.stay, ("late",)),
                        (kid.run_fiber, ("late", fn)),
                        (kid.schedule, (5, "due")),
                    ):
                        error = await raises(FacetAborted, call, *args)
                        NOTES.append(type(error).__name__)

        NOTES.clear()
        deadline_s = 5 if how == "deadline" else None
        await kid.fibers.start("f", fn, fiber_id="f", deadline_s=deadline_s)
        await kid.stay("other", fiber_id="other")
        await settle()
        if how == "cancel":
            kid.fibers.cancel("f")
        elif how == "resolve":
            kid.fibers.resolve("f", FiberResolution())
        await test.advance(10)
        assert NOTES == ["FacetAborted"] * 8
        assert kid.said() == []
        assert kid.state is None
        assert [f.id for f in kid.fibers.list(status="running")] == ["other"]
        assert owed(test) == [("fiber", "other")]


async def test_shielded_code_of_a_turn_that_was_ended_writes_nothing(
    clock: object,
) -> None:
    async with opened() as test:
        kid = await kid_of(test)
        tree = tree_of(test)
        tree.fibers.start_turn(kid._node, "t", name="t", lane="t", payload={})
        await test.advance(1)
        NOTES.clear()
        assert kid.fibers.cancel("t") == "aborted"
        await test.advance(5)
        assert NOTES == ["FacetAborted"]
        assert kid.said() == ["turn"]
        assert rows(tree, "SELECT n FROM fiber WHERE id = 't'") == [(1,)]


async def test_a_fiber_that_ends_though_it_was_cancelled_does_not_look_completed(
    clock: object,
) -> None:
    async with opened() as test:
        kid = await kid_of(test)

        async def deaf() -> str:
            with trio.CancelScope(shield=True):
                await trio.sleep(5)
            return "done"

        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                NOTES.append(await raises(FacetAborted, kid.run_fiber, "f", deaf))

            nursery.start_soon(ask)
            await settle()
            (fiber,) = kid.fibers.list()
            kid.fibers.cancel(fiber.id, reason="enough")
            await test.advance(6)
        assert NOTES[-1].reason == "enough"
        assert kid.fibers.inspect(fiber.id).status == "aborted"


async def test_what_a_fiber_spawned_goes_on_when_the_fiber_is_ended(
    clock: object,
) -> None:
    async with opened() as test:
        kid = await kid_of(test)

        async def later() -> None:
            await trio.sleep(5)
            kid.sql("INSERT INTO said VALUES ('on')")

        async def fn() -> None:
            kid.spawn(later)
            await trio.sleep_forever()

        await kid.fibers.start("f", fn, fiber_id="f")
        await settle()
        kid.fibers.cancel("f")
        await test.advance(6)
        assert kid.said() == ["on"]


# ---- deadlines


async def test_a_fiber_that_is_late_ends_in_error_with_what_it_waits_for(
    clock: object,
) -> None:
    async with opened() as test:
        kid = await kid_of(test)

        async def fn() -> None:
            await kid.run_fiber("inner", trio.sleep_forever)

        started = await kid.fibers.start("f", fn, fiber_id="f", deadline_s=30)
        assert started.deadline_at == EPOCH_MS + 30_000
        await test.advance(29)
        assert kid.fibers.inspect("f").status == "running"
        await test.advance(2)
        assert stored(test) == [
            ("f", "error", "deadline"), ("inner", "aborted", "asker-ended"),
        ]  # fmt: skip
        assert owed(test) == []
        await settle()
        assert tree_of(test).fibers.live == {}
        error = await raises(
            FacetAborted, lambda: kid.run_fiber("r", trio.sleep_forever, deadline_s=2)
        )
        assert error.reason == "deadline"


async def test_a_fiber_in_time_leaves_no_alarm(clock: object) -> None:
    async with opened() as test:
        kid = await kid_of(test)

        async def fn() -> int:
            return 1

        assert await kid.run_fiber("f", fn, deadline_s=30) == 1
        await kid.stay("g", fiber_id="g", deadline_s=30)
        kid.fibers.cancel("g")
        assert owed(test) == []
        for bad in (0, -1, float("nan"), float("inf"), "5", True):
            await raises(
                UsageError, lambda bad=bad: kid.run_fiber("f", fn, deadline_s=bad)
            )
        assert stored(test) == [("g", "aborted", "cancelled")]


@pytest.mark.parametrize("down_s", [1, 100])
async def test_a_deadline_holds_over_a_crash(down_s: int, clock: object) -> None:
    async with opened() as test:
        kid = await kid_of(test)
        for n in range(8):
            await kid.stay("slow", fiber_id=f"f{n}", deadline_s=30)
        await tree_of(test).durable()
        await test.crash()
        NOTES.clear()
        test.clock.jump(down_s)
        await test.reopen()
        await test.advance(5)
        assert len(TOLD) == (8 if down_s < 30 else 0), "no hook for one that is late"
        assert ("start k" in NOTES) == (down_s < 30), "nor is its agent woken"
        await test.advance(30)
        assert stored(test) == [("slow", "error", "deadline")] * 8
        assert owed(test) == []


async def test_a_run_of_the_same_id_keeps_its_budget(clock: object) -> None:
    async with opened() as test:
        kid = await kid_of(test)
        tree = tree_of(test)
        tree.jobs.add(
            kid._node.slot, "limit", "x", at=tree.now() + 9000, lane="limit:x"
        )
        await kid.stay("f", fiber_id="x", deadline_s=5)
        kid.fibers.cancel("x")
        assert owed(test) == [("limit", "x")]


# ---- signs of life


async def test_what_a_fiber_reports_is_seen_and_outlives_a_crash(clock: object) -> None:
    async with opened() as test:
        kid = await kid_of(test)

        async def fn() -> None:
            await trio.sleep(10)
            await kid.report_progress(fraction=0.25, message="a quarter", phase="load")
            await trio.sleep(0.05)
            await kid.report_progress(
                fraction=0.3
            )  # too soon after the other to be stored
            await trio.sleep(10)
            await kid.report_progress()  # no news is a sign of life
            await trio.sleep(10)
            kid.stash(1)
            await trio.sleep_forever()

        await kid.fibers.start("slow", fn, fiber_id="f")

        def seen() -> tuple[Any, ...]:
            found = kid.fibers.inspect("f")
            at = None if found.seen_at is None else found.seen_at - EPOCH_MS
            return at, found.progress

        await settle()
        assert seen() == (0, None)
        await test.advance(10.01)
        quarter = FiberProgress(fraction=0.25, message="a quarter", phase="load")
        assert seen() == (10_000, quarter)
        await test.advance(0.2)
        assert seen() == (10_050, FiberProgress(fraction=0.3))
        assert kid.fibers.list()[0].progress == FiberProgress(fraction=0.3)
        await test.advance(10)
        assert seen() == (20_050, FiberProgress(fraction=0.3))
        await test.advance(11)
        assert seen() == (30_050, FiberProgress(fraction=0.3))
        await crashed(test)
        await settle()
        kid = agent_at(test, KID)
        row = tree_of(test).fibers.rows.get(kid._node.slot, "f", None)
        assert row.seen_at == EPOCH_MS + 30_050, "the row tells of the former life"
        assert row.progress == FiberProgress(fraction=0.3)
        kid.fibers.cancel("f")
        ended = kid.fibers.inspect("f")
        assert (ended.seen_at, ended.progress, ended.attempts) == (None, None, None)


async def test_reports_are_stored_now_and_then_and_the_complete_one_always(
    clock: object,
) -> None:
    async with opened() as test:
        kid = await kid_of(test)
        commits: list[int] = []

        async def fn() -> None:
            before = tree_of(test).store.commits
            for n in range(100):
                await kid.report_progress(fraction=n / 1000)
                await trio.sleep(0.01)
            commits.append(tree_of(test).store.commits - before)
            await trio.sleep(1)
            await kid.report_progress(fraction=0.9)  # stored, so the next is too soon
            await kid.report_progress(fraction=1)
            await trio.sleep_forever()

        await kid.fibers.start("f", fn, fiber_id="f")
        await test.advance(3)
        assert 4 <= commits[0] <= 6
        row = tree_of(test).fibers.rows.get(kid._node.slot, "f", None)
        assert row.progress == FiberProgress(fraction=1)


async def test_a_report_that_makes_no_sense_is_refused(clock: object) -> None:
    async with opened() as test:
        kid = await kid_of(test)
        with pytest.raises(UsageError, match="fiber or a turn"):
            await kid.report_progress(fraction=0.5)

        async def fn() -> None:
            with pytest.raises(UsageError, match="fraction"):
                await kid.report_progress(fraction=2)
            with pytest.raises(UsageError, match="milestone"):
                await kid.report_progress(milestone="m")
            await kid.report_progress(message="good")
            with pytest.raises(CapacityError, match="1024"):
                await kid.report_progress(message="x" * 2000)
            with pytest.raises(UsageError, match="JSON"):
                await kid.report_progress(data=object())
            (me,) = kid.fibers.list()
            assert me.progress == FiberProgress(message="good")

        await kid.run_fiber("f", fn)


async def test_a_sign_of_life_is_no_progress(clock: object) -> None:
    async with opened() as test:
        kid = await kid_of(test)

        async def fn() -> None:
            while True:
                await kid.report_progress()
                await trio.sleep(1)

        await kid.fibers.start("f", fn, fiber_id="f")
        await test.advance(3)
        await crashed(test)
        await test.advance(1)
        assert [t.attempt for t in TOLD] == [2]


# ---- seen and ended by an ancestor


async def test_an_ancestor_lists_and_cancels_what_is_below_and_nothing_else(
    clock: object,
) -> None:
    async with opened() as test:
        kid = await kid_of(test)
        top, deep = agent_at(test), agent_at(test, *DEEP)
        await top.dynamic_agents.get(Kid, "beside")
        beside = agent_at(test, ("Kid", "beside"))
        for agent in (top, kid, deep, beside):
            await agent.stay("f", fiber_id="same")
        await deep.stay("g", fiber_id="own", key="key")
        paths = [f.path for f in top.fibers.list(below=True)]
        assert paths == [
            "Top/a", "Top/a/Kid/k", "Top/a/Kid/k/Kid/deep", "Top/a/Kid/beside",
            "Top/a/Kid/k/Kid/deep",
        ]  # fmt: skip
        mine = kid.fibers.list(below=True)
        assert [f.id for f in mine] == ["same", "same", "own"]
        rest = kid.fibers.list(below=True, after=mine[0])
        assert [f.id for f in rest] == ["same", "own"]
        assert kid.fibers.cancel("own") is None, "it is not its own"
        assert beside.fibers.cancel("own", below=True) is None
        assert beside.fibers.cancel(key="key", below=True) is None
        assert kid.fibers.cancel("same", reason="all", below=True) == "aborted"
        assert kid.fibers.cancel("same", below=True) == "aborted"
        assert top.fibers.cancel(key="key", below=True) == "aborted"
        running = top.fibers.list(below=True, status="running")
        assert [f.path for f in running] == ["Top/a", "Top/a/Kid/beside"]
        with pytest.raises(UsageError):
            top.fibers.cancel(below=True)


async def test_an_operator_lists_the_fibers_of_a_root(clock: object) -> None:
    async with opened() as test:
        kid = await kid_of(test)
        await kid.stay("f", fiber_id="f")
        agent_at(test).fibers.cancel("nobody")
        (found,) = test.kernel.fibers("Top", "a", status="running")
        assert (found.path, found.id, found.slot) == (
            "Top/a/Kid/k",
            "f",
            kid._node.slot,
        )
        assert test.kernel.fibers("Top", "a", after=found) == []
        assert test.kernel.fibers("Top", "nobody") == []


# ---- a user's own transaction


async def test_a_turn_is_not_ended_inside_a_transaction_of_its_agent(
    clock: object,
) -> None:
    async with opened() as test:
        kid = await kid_of(test)
        tree, slot = tree_of(test), kid._node.slot
        tree.fibers.start_turn(kid._node, "t", name="t", lane="t", payload={})
        stream = tree.streams.open(slot, "t")
        stream.stage('{"type":"x"}')
        with kid.transaction():
            kid.sql("INSERT INTO said VALUES ('mine')")
            with pytest.raises(UsageError, match="transaction"):
                kid.fibers.cancel("t")
            assert kid.said() == ["mine"]
        assert kid.fibers.inspect("t").status == "running"
        assert kid.fibers.cancel("t") == "aborted"
        assert rows(tree, "SELECT n FROM fiber WHERE id = 't'") == [(1,)]


async def test_a_fiber_is_cancelled_in_a_transaction_that_is_rolled_back(
    clock: object,
) -> None:
    async with opened() as test:
        kid = await kid_of(test)
        await kid.stay("f", fiber_id="f")

        def act() -> None:
            with kid.transaction():
                kid.sql("INSERT INTO said VALUES ('mine')")
                assert kid.fibers.cancel("f") == "aborted"
                raise ValueError("roll back")

        with pytest.raises(ValueError, match="roll back"):
            act()
        assert kid.said() == []
        assert kid.fibers.inspect("f").status == "aborted"
        assert node_at(test, KID).transaction is None
