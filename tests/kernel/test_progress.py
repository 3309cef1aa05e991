"""Progress and milestones: stored frames like any other, told live, read again later."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio

from culet.kernel import AgentToolRun, CancelToken, Chunk, Detached, Progress, Turn
from culet.kernel.core.limits import Limits
from culet.kernel.errors import CapacityError, Deleted, NotFound, UsageError
from culet.kernel.testing import EPOCH_MS, Harness, open_test_kernel
from kernel.agents import agent_at, raises, rows, settle, tree_of
from kernel.peers import connect
from kernel.toolkit import (
    HEARD,
    Hears,
    Kid,
    ask,
    folded,
    frames,
    kinds,
    run_frames,
    say,
)
from kernel.workers import FAIL, FINISH, Owner, Top, Worker, fresh_start, heard

NAMED: list[Progress] = []


@pytest.fixture(autouse=True)
def fresh() -> None:
    fresh_start()
    NAMED.clear()


class Reads(Owner):
    """Keeps all that its hook is told, and then takes too long, or raises."""

    async def on_progress(self, run: AgentToolRun, progress: Progress) -> None:
        NAMED.append(progress)
        if progress.phase == "raise":
            raise ValueError("not me")
        if progress.phase == "slow":
            await trio.sleep_forever()


class Says(Kid):
    """Yields chunks as they are given."""

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        for chunk in turn.input:
            yield chunk


class LeavesTask(Kid):
    """Leaves a task that reports when its turn is over."""

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        self.spawn(self._late)
        yield say("x")

    async def _late(self) -> None:
        await trio.sleep(5)
        try:
            await self.report_progress(milestone="late")
        except Exception as error:
            HEARD.append(("late", type(error).__name__))


class Nested(Worker):
    """Reports what it hears from below as its own."""

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        self.turn_now = turn
        async for chunk in super().on_turn(turn):
            yield chunk

    async def on_progress(self, run: AgentToolRun, progress: Progress) -> None:
        await super().on_progress(run, progress)
        HEARD.append((self.name, progress.milestone))


def opened(root: type[Hears] = Top, **options: Any) -> Any:
    facets = [Worker, Kid, Says, LeavesTask, Nested]
    return open_test_kernel(roots=[root], facets=facets, **options)


async def top(test: Harness, root: type[Hears] = Top) -> Any:
    await test.kernel.get_agent(root, "a")
    node = test.find([(root.__name__, "a")])
    assert node is not None
    return node.agent


def reports(found: list[Any]) -> list[tuple[int, Any]]:
    """Return number and fraction, or name, of the frames that are reports."""
    out = []
    for frame in found:
        if frame["event"]["kind"] == "chunk":
            body = _decoded(frame["event"]["body"])
            data = body.get("data") or {}
            if body["type"].startswith("data-agent-"):
                out.append((frame["sequence"], data.get("name", data.get("fraction"))))
    return out


def bodies(found: list[Any]) -> list[dict[str, Any]]:
    return [
        _decoded(f["event"]["body"]) for f in found if f["event"]["kind"] == "chunk"
    ]


def _decoded(text: str) -> dict[str, Any]:
    import msgspec

    value: dict[str, Any] = msgspec.json.decode(text)
    return value


# ---- reports


@pytest.mark.rule("T-211", "T-212", "T-218", "W-207")
@pytest.mark.parametrize("detached", [False, True])
async def test_a_report_is_one_chunk_of_the_childs_stream(
    detached: bool, clock: object
) -> None:
    async with opened() as test:
        me = await top(test)
        peer = await connect(test)
        told = {"fraction": 0.5, "message": "half", "phase": "load", "data": [1]}
        script = [["say", "x"], ["report", told], ["say", "y"]]
        await me.run_agent_tool(Worker, script, run_id="r", detached=detached)
        await test.advance(1)
        found = bodies(run_frames(peer))
        assert [c["type"] for c in found] == [
            "text-delta", "data-agent-progress", "text-delta",
        ]  # fmt: skip
        assert found[1].pop("id")
        assert found[1] == {
            "type": "data-agent-progress", "transient": True,
            "data": {**told, "at": EPOCH_MS},
        }  # fmt: skip
        assert heard("progress") == [("progress", "r", 0.5, None)]


@pytest.mark.rule("T-211", "T-212")
@pytest.mark.parametrize(
    "wrong",
    [
        {"fraction": 1.01}, {"fraction": -0.01}, {"fraction": "half"},
        {"fraction": True}, {"fraction": float("nan")}, {"message": 3}, {"phase": b"x"},
        {"milestone": ""}, {"milestone": 7}, {"milestone": "m" * 257},
        {"data": object()},
    ],
    ids=str,
)  # fmt: skip
async def test_a_report_that_says_nothing_sensible_is_refused_and_stores_nothing(
    wrong: dict[str, Any], clock: object
) -> None:
    class Wrong(Kid):
        async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
            await raises(UsageError, lambda: self.report_progress(**wrong))
            yield say("fine")

    async with open_test_kernel(roots=[Top], facets=[Wrong]) as test:
        me = await top(test)
        run = await me.run_agent_tool(Wrong, None, run_id="r")
        assert (run.status, run.n) == ("completed", 1)


@pytest.mark.rule("T-211")
async def test_outside_of_a_turn_there_is_nothing_to_report(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        await raises(UsageError, lambda: me.report_progress(fraction=0.1))
        await raises(UsageError, lambda: me.report_progress(milestone="m"))


@pytest.mark.rule("T-212")
async def test_what_a_chunk_says_in_the_wrong_type_is_left_out(clock: object) -> None:
    odd: list[Any] = [
        {"fraction": 7, "message": 3, "phase": "ok", "at": "x"}, "text", None,
        {"fraction": True}, {"name": 3},
    ]  # fmt: skip
    async with opened() as test:
        me = await top(test)
        script = [
            {"type": kind, "data": data}
            for kind in ("data-agent-progress", "data-agent-milestone")
            for data in odd
        ]
        run = await me.run_agent_tool(Says, script, run_id="r")
        assert run.status == "completed"
        found = me.runs.reports("r")
        assert found.milestones == []
        assert found.latest == Progress(sequence=5)
        first = me._node.tree.milestones._all(
            tree_of(test).runs._row(me._node.slot, "r"), "r", "data-agent-"
        )[0]
        assert first == Progress(phase="ok", sequence=1)


@pytest.mark.rule("T-213")
async def test_of_a_burst_the_first_and_the_last_are_stored(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        burst = [["report", {"fraction": n / 100}] for n in range(50)]
        script = [*burst, ["sleep", 0.5], *burst[:3], ["sleep", 0.05], *burst[3:6],
                  ["sleep", 10]]  # fmt: skip
        await me.run_agent_tool(Worker, script, run_id="r", detached=True)
        await test.advance(5)
        found = reports(await frames(me, "r"))
        assert [value for _n, value in found] == [0.0, 0.49, 0.0, 0.05]


@pytest.mark.rule("T-213")
@pytest.mark.parametrize("how", ["completed", "error", "cancel", "token"])
async def test_the_last_report_is_kept_however_the_run_ends(
    how: str, clock: object
) -> None:
    async with opened() as test:
        me = await top(test)
        last = {"completed": [], "error": [["fail", "broken"]]}.get(how, [["sleep", 9]])
        script = [["report", {"fraction": n / 10}] for n in (1, 2, 3)] + last
        token = CancelToken()
        async with trio.open_nursery() as nursery:
            results = ask(nursery, me, Worker, script, run_id="r", cancel=token)
            await test.advance(0.1)
            if how == "cancel":
                await me.runs.cancel("r")
            if how == "token":
                token.cancel()
        found = await frames(me, "r")
        assert reports(found) == [(1, 0.1), (2, 0.3)]
        assert len(found) == results[0].n + 2
        assert me.runs.reports("r").latest.fraction == 0.3


@pytest.mark.rule("T-213")
async def test_what_is_complete_is_stored_at_once(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        script = [["report", {"fraction": f}] for f in (0.1, 0.2, 1)] + [["sleep", 9]]
        await me.run_agent_tool(Worker, script, run_id="r", detached=True)
        await test.advance(0.05)
        assert reports(await frames(me, "r")) == [(1, 0.1), (2, 1)]
        await test.advance(5)
        assert reports(await frames(me, "r")) == [(1, 0.1), (2, 1)]


@pytest.mark.limit("progress_bytes", "milestones")
async def test_reports_are_bounded_in_size_and_milestones_in_number(
    clock: object,
) -> None:
    class Much(Kid):
        async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
            big = "x" * 990  # with its quotes and its kind 1001 bytes
            await self.report_progress(data=big[1:])
            await raises(CapacityError, lambda: self.report_progress(data=big))
            await raises(
                CapacityError, lambda: self.report_progress(milestone="m", data=big)
            )
            for number in range(3):
                await self.report_progress(milestone=f"m{number}")
            await raises(CapacityError, lambda: self.report_progress(milestone="more"))
            yield say("fine")

    limits = Limits(progress_bytes=1000, milestones=3)
    async with open_test_kernel(roots=[Top], facets=[Much], limits=limits) as test:
        me = await top(test)
        run = await me.run_agent_tool(Much, None, run_id="r")
        assert (run.status, run.n) == ("completed", 5)


@pytest.mark.rule("T-215", "T-223", "T-224", "W-206", "W-207")
async def test_milestones_are_numbered_never_coalesced_and_after_what_came_before(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        script = [
            ["report", {"fraction": 0.1}], ["report", {"fraction": 0.2}], ["mark", "a"],
            ["mark", "b"], ["report", {"fraction": 0.3}], ["mark", "a"],
        ]  # fmt: skip
        await me.run_agent_tool(Worker, script, run_id="r")
        found = await frames(me, "r")
        assert reports(found) == [
            (1, 0.1),
            (2, 0.2),
            (3, "a"),
            (4, "b"),
            (5, 0.3),
            (6, "a"),
        ]
        marks = [b for b in bodies(found) if b["type"] == "data-agent-milestone"]
        assert [m["data"]["sequence"] for m in marks] == [0, 1, 2]
        assert all(m["data"]["at"] == EPOCH_MS for m in marks)
        reached = me.runs.reports("r").milestones
        assert [(p.milestone, p.sequence) for p in reached] == [
            ("a", 3),
            ("b", 4),
            ("a", 6),
        ]


@pytest.mark.rule("T-216")
async def test_golden_trace_of_progress_the_same_live_and_after_a_reload(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        peer = await connect(test)
        script = [
            ["say", "x"], ["report", {"fraction": 0.4, "message": "m"}], ["mark", "read"],
            ["say", "y"],
        ]  # fmt: skip
        await me.run_agent_tool(Worker, script, run_id="r")
        await test.advance(1)
        live = run_frames(peer)
        assert [n for n, _ in kinds(live)] == [0, 1, 2, 3, 4, 5]
        assert reports(live) == [(2, 0.4), (3, "read")]
        late = await connect(test, label="late")
        await test.advance(1)
        assert reports(run_frames(late)) == reports(live)
        assert folded(late) == folded(peer) == folded(peer, late)
        run = folded(late)["runsById"]["r"]
        assert [m["name"] for m in run["milestones"]] == ["read"]
        assert run["progress"]["milestone"] == "read"
        await tree_of(test).durable()
        await test.crash()
        await test.reopen()
        await top(test)
        cold = await connect(test, label="cold")
        await test.advance(1)
        assert folded(cold) == folded(peer)


# ---- who is told


@pytest.mark.rule("T-219", "T-224")
async def test_the_hook_is_told_in_order_is_not_waited_for_and_harms_nobody(
    clock: object,
) -> None:
    async with opened(Reads) as test:
        me = await top(test, Reads)
        failed: list[Any] = []
        test.kernel.subscribe("failure", lambda *event: failed.append(event[3].error))
        script = [
            ["report", {"fraction": 0.5, "data": {"k": 1}}], ["sleep", 1],
            ["report", {"phase": "raise"}], ["mark", "m"], ["sleep", 1],
            ["report", {"phase": "slow"}], ["mark", "n"],
        ]  # fmt: skip
        begun = trio.current_time()
        run = await me.run_agent_tool(Worker, script, run_id="r")
        assert (run.status, round(trio.current_time() - begun, 1)) == ("completed", 2)
        await test.advance(60)
        assert [
            Progress(fraction=0.5, data={"k": 1}, sequence=1, at=EPOCH_MS),
            Progress(phase="raise", sequence=3, at=EPOCH_MS + 1000),
            Progress(milestone="m", sequence=4, at=EPOCH_MS + 1000),
            Progress(phase="slow", sequence=6, at=EPOCH_MS + 2000),
            Progress(milestone="n", sequence=7, at=EPOCH_MS + 2000),
        ] == NAMED
        assert [type(error) for error in failed] == [ValueError, trio.TooSlowError]
        assert tree_of(test, "Reads").milestones._news == {}


@pytest.mark.rule("T-224")
async def test_milestones_of_one_step_are_told_in_their_order(clock: object) -> None:
    async with opened(Reads) as test:
        me = await top(test, Reads)
        names = [f"m{number}" for number in range(12)]
        await me.run_agent_tool(Worker, [["mark", n] for n in names], run_id="r")
        await test.advance(1)
        assert [progress.milestone for progress in NAMED] == names


async def test_each_level_hears_of_its_own_runs_only(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        peer = await connect(test)
        leaf = [["mark", "deep"], ["report", {"fraction": 0.9}]]
        script = [["below", "leaf", leaf], ["mark", "mine"]]
        await me.run_agent_tool(Nested, script, run_id="mid")
        await test.advance(1)
        assert heard("mid") == [("mid", "deep"), ("mid", None)]
        assert [h[3] for h in heard("progress") if h[1] == "mid"] == ["mine"]
        assert [value for _n, value in reports(run_frames(peer))] == ["mine"]
        assert {f["event"]["runId"] for f in run_frames(peer)} == {"mid"}
        middle = agent_at(test, ("Nested", "mid"))
        assert [p.milestone for p in middle.runs.reports("leaf").milestones] == ["deep"]


@pytest.mark.rule("T-222")
async def test_what_comes_after_the_end_is_not_stored(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        run = await me.run_agent_tool(LeavesTask, None, run_id="r")
        assert run.status == "completed"
        await test.advance(10)
        assert heard("late") == [("late", "FacetAborted")]
        assert kinds(await frames(me, "r")) == [
            (0, "started"),
            (1, "chunk"),
            (2, "finished"),
        ]
        assert me.runs.reports("r").milestones == []


@pytest.mark.rule("T-225")
async def test_a_report_is_a_sign_of_life_for_who_waits(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        script: list[Any] = []
        for number in range(5):
            script += [["report", {"fraction": number / 10}], ["mark", "m"]]
            script += [["wait", 8]]
        script = [["sleep", 0]] + [
            s if s[0] != "wait" else ["sleep", 8] for s in script
        ]
        run = await me.run_agent_tool(Worker, script, run_id="r", no_progress_s=9)
        assert (run.status, run.reason) == ("completed", None)


@pytest.mark.rule("T-214", "T-217", "T-221")
async def test_after_a_crash_reports_go_on_and_what_was_reached_is_read(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        script = [
            ["mark", "a"], ["report", {"fraction": 0.2, "data": {"k": 1}}], ["sleep", 50],
            ["mark", "b"], ["report", {"fraction": 0.8}], ["sleep", 50],
        ]  # fmt: skip
        await me.run_agent_tool(Worker, script, run_id="r", detached=True)
        await test.advance(5)
        await tree_of(test).durable()
        await test.crash()
        await test.reopen()
        me = await top(test)
        found = me.runs.reports("r")
        assert found.latest == Progress(
            fraction=0.2, data={"k": 1}, sequence=2, at=EPOCH_MS
        )
        assert [(p.milestone, p.sequence) for p in found.milestones] == [("a", 1)]
        await test.advance(55)
        found = me.runs.reports("r")
        assert found.latest.fraction == 0.8
        assert [p.milestone for p in found.milestones] == ["a", "b"]
        marks = [
            b for b in bodies(await frames(me, "r")) if "name" in b.get("data", {})
        ]
        assert [m["data"]["sequence"] for m in marks] == [0, 1]
        assert me.runs.reports("nobody") is None


# ---- milestones that somebody wants


@pytest.mark.rule("T-200", "T-201")
async def test_a_declared_milestone_is_delivered_once_and_before_a_fast_end(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        policy = Detached(on_finish="delivered", milestones=["b", "a", "never", "a"])
        script = [["mark", "a"], ["mark", "other"], ["mark", "b"], ["mark", "a"]]
        await me.run_agent_tool(Worker, script, run_id="r", detached=policy)
        await test.advance(1)
        told = [h for h in heard("progress", "delivered") if h[-1] != "other"]
        assert told == [
            ("progress", "r", None, "a"), ("progress", "r", None, "b"),
            ("delivered", "r", "completed"),
        ]  # fmt: skip
        assert me.runs.deliveries() == []


@pytest.mark.rule("T-188", "B-14")
async def test_a_milestone_told_in_vain_is_seen_and_costs_no_end(clock: object) -> None:
    class Deaf(Owner):
        async def on_progress(self, run: AgentToolRun, progress: Progress) -> None:
            HEARD.append(("try", progress.milestone))
            if FAIL["off"] == 0:
                raise ValueError("not now")

    async with opened(Deaf) as test:
        me = await top(test, Deaf)
        told: list[Any] = []
        test.kernel.subscribe("run:undelivered", lambda *event: told.append(event[3]))
        policy = Detached(on_finish="delivered", milestones=["m"])
        script = [["mark", "m"], ["sleep", 1]]
        await me.run_agent_tool(Worker, script, run_id="r", detached=policy)
        await test.advance(600)
        assert heard("delivered") == [("delivered", "r", "completed")]
        (resting,) = me.runs.deliveries("r")
        assert (resting.what, resting.milestone, resting.dead) == (
            "milestone",
            "m",
            True,
        )
        assert [(t.callback, t.milestone) for t in told] == [
            ("on_progress", "m")
        ] * test.kernel.limits.attempts
        FAIL["off"] = 1
        assert me.runs.redeliver(resting.id)
        await test.advance(1)
        assert me.runs.deliveries() == []
        assert await me.runs.clear() == 1
        await test.advance(1)
        assert len(heard("finish")) == 1, "a clear tells no hook again"


@pytest.mark.rule("T-200")
async def test_one_that_was_reached_before_a_crash_is_not_told_again(
    clock: object,
) -> None:
    class Again(Kid):
        resumable = True

        async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
            await self.report_progress(milestone="m")
            yield say("x")
            await trio.sleep(20)

    async with open_test_kernel(roots=[Top], facets=[Again]) as test:
        me = await top(test)
        policy = Detached(on_finish="delivered", milestones=["m"])
        await me.run_agent_tool(Again, None, run_id="r", detached=policy)
        await test.advance(5)
        assert heard("progress") == [("progress", "r", None, "m")]
        await tree_of(test).durable()
        await test.crash()
        await test.reopen()
        HEARD.clear()
        me = await top(test)
        await test.advance(0.5)
        assert rows(tree_of(test), "SELECT 1 FROM job WHERE kind = 'deliver'") == []
        await test.advance(60)
        assert heard("delivered") == [("delivered", "r", "completed")]
        assert heard("progress") == []
        assert len(me.runs.reports("r").milestones) == 2


@pytest.mark.rule("T-208", "B-21")
@pytest.mark.parametrize("detached", [False, True])
async def test_who_waits_for_a_milestone_hears_in_its_instant(
    detached: bool, clock: object
) -> None:
    async with opened() as test:
        me = await top(test)
        at: list[float] = []

        async def wait() -> None:
            answer = await me.runs.await_milestone("r", "m")
            at.append(trio.current_time() - begun)
            assert answer.reached
            assert answer.progress.milestone == "m"
            assert answer.run.status == "running"

        begun = trio.current_time()
        async with trio.open_nursery() as nursery:
            script = [
                ["sleep", 3],
                ["mark", "other"],
                ["sleep", 4],
                ["mark", "m"],
                ["sleep", 9],
            ]
            if detached:
                await me.run_agent_tool(Worker, script, run_id="r", detached=FINISH)
            else:
                ask(nursery, me, Worker, script, run_id="r")
                await settle()
            for _ in range(3):
                nursery.start_soon(wait)
            await test.advance(20)
        assert [round(t, 1) for t in at] == [7.0] * 3


@pytest.mark.rule("T-208", "B-21")
@pytest.mark.parametrize("when", ["running", "ended", "waiting"])
async def test_a_milestone_is_found_after_a_restart(when: str, clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        script = [["mark", "early"], ["sleep", 20], ["mark", "late"], ["sleep", 20]]
        await me.run_agent_tool(Worker, script, run_id="r", detached=FINISH)
        await test.advance(60 if when == "ended" else 5)
        await tree_of(test).durable()
        await test.crash()
        await test.reopen()
        me = await top(test)
        early = await me.runs.await_milestone("r", "early")
        assert early.reached
        assert early.progress.sequence == 1
        if when == "waiting":
            with trio.fail_after(100):
                late = await me.runs.await_milestone("r", "late")
            assert late.reached
            assert late.run.status == "running"
        if when == "ended":
            late = await me.runs.await_milestone("r", "late")
            assert (late.reached, late.run.status) == (True, "completed")


@pytest.mark.rule("T-208", "B-21")
@pytest.mark.parametrize("how", ["completed", "error", "cancel", "budget", "cleared"])
async def test_a_run_that_ends_without_it_answers_who_waits(
    how: str, clock: object
) -> None:
    async with opened() as test:
        me = await top(test)
        script = {
            "completed": [["sleep", 5]],
            "error": [["sleep", 5], ["fail", "x"]],
        }.get(how, [["sleep", 900]])
        policy = Detached(max_budget_s=5 if how == "budget" else None)
        await me.run_agent_tool(Worker, script, run_id="r", detached=policy)
        answers: list[Any] = []

        async def wait() -> None:
            answers.append(await me.runs.await_milestone("r", "m"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await test.advance(1)
            if how == "cancel":
                await me.runs.cancel("r")
            if how == "cleared":
                await me.runs.clear()
            await test.advance(10)
        (answer,) = answers
        assert (answer.name, answer.reached, answer.progress) == ("m", False, None)
        status = {"completed": "completed", "error": "error", "budget": "interrupted"}
        assert answer.run.status == status.get(how, "aborted")
        if how != "cleared":
            assert await me.runs.await_milestone("r", "m") == answer, (
                "and who asks later"
            )


@pytest.mark.rule("B-21")
async def test_waiting_for_what_cannot_be_is_refused_or_ends(clock: object) -> None:
    class Eager(Kid):
        async def on_start(self) -> None:
            await self.run_agent_tool(
                Worker, [["mark", "m"]], run_id="w", detached=True
            )
            await raises(UsageError, self.runs.await_milestone, "w", "m")

    async with open_test_kernel(roots=[Top], facets=[Eager, Worker]) as test:
        me = await top(test)
        await raises(NotFound, me.runs.await_milestone, "nobody", "m")
        await raises(UsageError, me.runs.await_milestone, "nobody", "")
        await me.dynamic_agents.get(Eager, "e")
        eager = agent_at(test, ("Eager", "e"))
        await eager.run_agent_tool(Worker, [["sleep", 99]], run_id="r", detached=True)
        errors: list[Any] = []

        async def wait() -> None:
            tree = tree_of(test)
            errors.append(
                await raises(Deleted, tree.milestones.wait, eager._node, "r", "m")
            )

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await test.advance(1)
            await me.dynamic_agents.delete(Eager, "e")
            await test.advance(1)
        assert len(errors) == 1
        assert tree_of(test).milestones._bells == {}


async def test_who_stops_waiting_changes_nothing(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        script = [["sleep", 10], ["mark", "m"]]
        await me.run_agent_tool(Worker, script, run_id="r", detached=FINISH)
        with trio.move_on_after(5) as scope:
            await me.runs.await_milestone("r", "m")
        assert scope.cancelled_caught
        assert (await me.runs.await_milestone("r", "m")).reached
        await test.advance(1)
        assert heard("delivered") == [("delivered", "r", "completed")]
