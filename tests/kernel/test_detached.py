"""Detached runs: dispatched, bounded, given up, delivered once, whatever happens meanwhile."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio

from culet.kernel import AgentToolRun, CancelToken, Chunk, Detached, Turn, current_agent
from culet.kernel.errors import StorageError, UsageError
from culet.kernel.events import Undelivered
from culet.kernel.testing import Harness, open_test_kernel
from kernel.agents import agent_at, node_at, rows, settle, tree_of
from kernel.peers import connect
from kernel.toolkit import HEARD, TURNS, Kid, ask, frames, kinds, run_frames, say
from kernel.workers import (
    FAIL,
    FINISH,
    Foreign,
    Owner,
    Top,
    Worker,
    fresh_start,
    heard,
)

LONG = [["say", "x"], ["sleep", 1000]]
DEAF: list[trio.Event] = []
SEEN: list[Any] = []


@pytest.fixture(autouse=True)
def fresh() -> None:
    fresh_start()
    DEAF.clear()
    SEEN.clear()


class Old(Owner):
    """A facet that is an owner."""


class New(Kid):
    """What may follow it: it has no such method."""

    delivered = None  # type: ignore[assignment]


class Few(Owner):
    max_concurrent_agent_tools = 1


class Looks(Owner):
    """Its callback looks round, changes its state, and asks for one more run."""

    async def delivered(self, run: AgentToolRun) -> None:
        here, again = current_agent(), self.runs.get(run.run_id)
        assert here is not None
        assert again is not None
        SEEN.append((here.agent is self, again.status, run == again))
        self.set_state({"last": run.run_id})
        if run.run_id == "r":
            await self.run_agent_tool(
                Worker, [["say", "y"]], run_id="next", detached=FINISH
            )


class Slow(Owner):
    """Its callback takes two seconds."""

    async def delivered(self, run: AgentToolRun) -> None:
        await super().delivered(run)
        await trio.sleep(2)
        HEARD.append(("over", run.run_id))


class Deaf(Kid):
    """Will not stop until it is let go."""

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        go = trio.Event()
        DEAF.append(go)
        with trio.CancelScope(shield=True), trio.move_on_after(300):
            await go.wait()
        yield say("late")


def opened(root: type[Owner] = Top, **options: Any) -> Any:
    facets = [Worker, Kid, Foreign, Old, New, Deaf]
    return open_test_kernel(roots=[root], facets=facets, **options)


async def top(test: Harness, root: type[Owner] = Top) -> Any:
    await test.kernel.get_agent(root, "a")
    node = test.find([(root.__name__, "a")])
    assert node is not None
    return node.agent


async def crashed(test: Harness) -> None:
    await tree_of(test).durable()
    await test.crash()
    await test.reopen()


def owed(test: Harness, *, root: str = "Top") -> list[tuple[Any, ...]]:
    sql = "SELECT kind, what FROM job WHERE kind IN ('deliver', 'limit') ORDER BY id"
    return rows(tree_of(test, root), sql)


def ends(me: Any) -> dict[str, tuple[str, str | None]]:
    return {run.run_id: (run.status, run.reason) for run in me.runs.list()}


# ---- dispatch


@pytest.mark.rule("T-164", "T-209")
async def test_a_turn_detaches_and_goes_on_and_the_end_is_told_at_once(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        script = [["detach", "inner", [["sleep", 5]]], ["say", "on"]]
        run = await me.run_agent_tool(Worker, script, run_id="r")
        assert (run.status, run.summary) == ("completed", "on")
        middle = agent_at(test, ("Worker", "r"))
        inner = middle.runs.get("inner")
        assert inner.status == "running"
        assert heard("delivered") == []
        await test.advance(5.001)
        assert heard("delivered") == [("delivered", "inner", "completed")]
        assert heard("start") == [("start", "a", "r"), ("start", "r", "inner")]


@pytest.mark.rule("T-165", "T-166")
@pytest.mark.parametrize(
    "policy",
    [
        {"on_finish": "nothing"}, {"on_finish": "name"}, {"on_finish": "ping_all"},
        {"notify": True}, {"notify": "me"}, {"notify": 3, "on_finish": "delivered"},
        {"max_budget_s": 0}, {"max_budget_s": -1}, {"max_budget_s": math.nan},
        {"max_budget_s": math.inf}, {"max_budget_s": True}, {"max_budget_s": "1"},
        {"no_progress_s": 0}, {"no_progress_s": math.inf},
        {"milestones": "abc"}, {"milestones": [""]}, {"milestones": [1]},
        {"milestones": ["x" * 257]}, {"milestones": [str(n) for n in range(65)]},
        {"milestones": ["x"], "milestone_mode": "shout"},
    ],
    ids=str,
)  # fmt: skip
async def test_a_policy_that_could_not_be_kept_is_refused_before_anything_is_written(
    policy: dict[str, Any], clock: object
) -> None:
    async with opened() as test:
        me = await top(test)
        before = tree_of(test).barrier.count
        with pytest.raises(UsageError):
            await me.run_agent_tool(
                Worker, LONG, run_id="r", detached=Detached(**policy)
            )
        assert me.runs.list() == []
        assert tree_of(test).barrier.count == before


@pytest.mark.rule("T-167")
async def test_a_callback_wins_over_a_notice(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        both = Detached(on_finish="delivered", notify=True)
        await me.run_agent_tool(Worker, [["say", "x"]], run_id="r", detached=both)
        await test.advance(1)
        assert heard("delivered") == [("delivered", "r", "completed")]
        assert me.runs.deliveries() == []


@pytest.mark.rule("T-168")
async def test_a_token_ends_a_detached_run_and_its_end_is_delivered(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        token = CancelToken()
        await me.run_agent_tool(Worker, LONG, run_id="r", cancel=token, detached=FINISH)
        await test.advance(1)
        token.cancel("enough")
        await test.advance(1)
        assert ends(me) == {"r": ("aborted", "enough")}
        assert heard("delivered") == [("delivered", "r", "aborted")]


@pytest.mark.rule("T-169", "T-202")
async def test_one_too_many_is_told_and_leaves_nothing_a_detached_one_keeps_its_place(
    clock: object,
) -> None:
    async with opened(Few) as test:
        me = await top(test, Few)
        peer = await connect(test, ("Few", "a"))
        script = [["sleep", 50]]
        await me.run_agent_tool(Worker, script, run_id="r", detached=FINISH)
        await test.advance(40)
        handle = await me.run_agent_tool(Worker, script, run_id="s", detached=FINISH)
        await test.advance(1)
        assert (handle.run_id, handle.status, handle.reason) == (
            "s",
            "error",
            "capacity",
        )
        assert handle.retryable
        refused = [f for f in run_frames(peer) if f["event"]["runId"] != "r"]
        assert kinds(refused) == [(0, "started"), (1, "error")]
        assert list(ends(me)) == ["r"]
        assert heard("start", "delivered") == [("start", "a", "r")]
        await test.advance(20)
        handle = await me.run_agent_tool(Worker, script, run_id="s", detached=FINISH)
        assert handle.status == "running"


@pytest.mark.limit("many_detached")
@pytest.mark.rule("T-203")
async def test_many_that_nobody_waits_for_are_told_once_each_time(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        told: list[Any] = []
        test.kernel.subscribe("run:many_detached", lambda *event: told.append(event[3]))
        for number in range(52):
            await me.run_agent_tool(Kid, LONG, run_id=f"r{number}", detached=True)
        assert told == [50]
        for number in range(4):
            await me.runs.cancel(f"r{number}")
        await me.run_agent_tool(Kid, LONG, run_id="one", detached=True)
        await me.run_agent_tool(Kid, LONG, run_id="two", detached=True)
        await me.run_agent_tool(Kid, LONG, run_id="three", detached=True)
        assert told == [50, 50]


# ---- one delivery


@pytest.mark.rule("T-175", "T-192")
async def test_a_delivery_is_made_inside_its_agent_after_the_commit(
    clock: object,
) -> None:
    async with opened(Looks) as test:
        me = await top(test, Looks)
        await me.run_agent_tool(Worker, [["say", "x"]], run_id="r", detached=FINISH)
        await test.advance(1)
        assert SEEN == [(True, "completed", True), (True, "completed", True)]
        assert me.state == {"last": "next"}


@pytest.mark.rule("T-185", "T-196")
@pytest.mark.parametrize("how", ["completed", "error", "cancel", "budget", "deleted"])
async def test_every_end_has_a_frame_a_hook_and_one_delivery(
    how: str, clock: object
) -> None:
    async with opened() as test:
        me = await top(test)
        peer = await connect(test)
        script = {
            "completed": [["say", "x"], ["sleep", 1]],
            "error": [["say", "x"], ["sleep", 1], ["fail", "broken"]],
        }.get(how, LONG)
        policy = Detached(
            on_finish="delivered", max_budget_s=2 if how == "budget" else None
        )
        await me.run_agent_tool(Worker, script, run_id="r", detached=policy)
        await test.advance(1.5)
        if how == "cancel":
            await me.runs.cancel("r")
        if how == "deleted":
            await me.dynamic_agents.delete(Worker, "r")
        await test.advance(20)
        status, kind = {
            "completed": ("completed", "finished"),
            "error": ("error", "error"),
            "cancel": ("aborted", "aborted"),
        }.get(how, ("interrupted", "interrupted"))
        last = 3 if how in ("completed", "error") else 2
        assert kinds(run_frames(peer))[-1] == (last, kind)
        assert heard("delivered") == [("delivered", "r", status)]
        assert heard("finish") == [("finish", "a", "r", status)]
        assert owed(test) == []


@pytest.mark.rule("T-184", "I-07")
async def test_ends_at_one_instant_are_one_end_and_one_delivery(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        policy = Detached(on_finish="delivered", max_budget_s=5)
        await me.run_agent_tool(Worker, [["sleep", 5]], run_id="r", detached=policy)
        await test.advance(4.999)
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(_cancel_at, me, 0.001)
        await test.advance(10)
        status = me.runs.get("r").status
        assert heard("delivered") == [("delivered", "r", status)]
        assert heard("finish") == [("finish", "a", "r", status)]


async def _cancel_at(me: Any, after_s: float) -> None:
    await trio.sleep(after_s)
    await me.runs.cancel("r")


@pytest.mark.rule("T-186")
async def test_a_callback_that_raises_is_told_and_called_again_and_nothing_else_is(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        told: list[Undelivered] = []
        test.kernel.subscribe("run:undelivered", lambda *event: told.append(event[3]))
        FAIL["r"] = 2
        await me.run_agent_tool(Worker, [["say", "x"]], run_id="r", detached=FINISH)
        await test.advance(0.4)
        assert told == [
            Undelivered("delivered", None, "completed", 1, "ValueError: not now")
        ]
        assert [d.attempts for d in me.runs.deliveries("r")] == [1]
        await test.advance(60)
        assert [t.attempts for t in told] == [1, 2]
        assert heard("delivered") == [("delivered", "r", "completed")] * 3
        assert heard("finish") == [("finish", "a", "r", "completed")]
        await test.advance(600)
        assert len(heard("delivered")) == 3
        assert me.runs.deliveries() == []


@pytest.mark.rule("T-187", "T-188", "B-14")
async def test_callbacks_that_always_raise_harm_no_other_and_rest_where_they_are_seen(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        for name in ("a", "b", "c"):
            FAIL[name] = 1000
        for name in ("a", "b", "c", "good"):
            await me.run_agent_tool(
                Worker, [["say", "x"]], run_id=name, detached=FINISH
            )
        await test.advance(1)
        assert ("delivered", "good", "completed") in HEARD
        await test.advance(3600)
        tries = test.kernel.limits.attempts
        assert len(heard("delivered")) == 3 * tries + 1
        resting = me.runs.deliveries()
        assert {(d.run_id, d.what, d.dead) for d in resting} == {
            (name, "end", True) for name in ("a", "b", "c")
        }
        assert all(d.attempts == tries for d in resting)
        assert all(d.error == "ValueError: not now" for d in resting)
        await crashed(test)
        me = await top(test)
        assert len(me.runs.deliveries()) == 3, "and over a crash"
        FAIL.clear()
        assert me.runs.redeliver(resting[0].id)
        assert not me.runs.redeliver(resting[0].id), "it is not dead now"
        for wrong in ("", "x", "99", "9" * 30, "-1"):
            assert not me.runs.redeliver(wrong)
        await test.advance(1)
        assert len(me.runs.deliveries()) == 2
        assert HEARD[-1] == ("delivered", resting[0].run_id, "completed")


@pytest.mark.rule("T-194")
async def test_a_cancel_in_a_turn_of_the_owner_is_delivered_and_blocks_nobody(
    clock: object,
) -> None:
    class Cancels(Worker):
        async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
            await self.run_agent_tool(Kid, LONG, run_id="in", detached=FINISH)
            await trio.sleep(1)
            yield say(str((await self.runs.cancel("in")).status))
            await trio.sleep(5)

    async with open_test_kernel(roots=[Top], facets=[Cancels, Worker, Kid]) as test:
        me = await top(test)
        async with trio.open_nursery() as nursery:
            results = ask(nursery, me, Cancels, None, run_id="r")
            await test.advance(2)
            assert heard("delivered") == [("delivered", "in", "aborted")]
        assert results[0].summary == "aborted"


@pytest.mark.rule("T-206")
async def test_a_method_that_is_missing_then_is_seen_and_another_class_brings_it_back(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        await me.dynamic_agents.get(Old, "o")
        owner = agent_at(test, ("Old", "o"))
        await owner.run_agent_tool(Worker, [["sleep", 5]], run_id="r", detached=FINISH)
        await test.advance(1)
        await me.dynamic_agents.upgrade(Old, "o", to=New)
        await test.advance(10)
        await me.dynamic_agents.get(New, "o")
        now = agent_at(test, ("New", "o"))
        assert now.runs.get("r").status == "completed"
        (resting,) = now.runs.deliveries("r")
        assert resting.dead
        assert resting.attempts == 1, "no further try could do better"
        assert "New.delivered" in resting.error
        await me.dynamic_agents.upgrade(New, "o", to=Old)
        await me.dynamic_agents.get(Old, "o")
        assert agent_at(test, ("Old", "o")).runs.redeliver(resting.id)
        await test.advance(1)
        assert heard("delivered") == [("delivered", "r", "completed")]


@pytest.mark.rule("T-207")
async def test_each_level_hears_of_what_it_detached_itself(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        leaf = [["sleep", 3]]
        script = [["detach", "leaf1", leaf], ["detach", "leaf2", leaf], ["sleep", 5]]
        await me.run_agent_tool(Worker, script, run_id="mid", detached=FINISH)
        await test.advance(4)
        middle = agent_at(test, ("Worker", "mid"))
        assert sorted(h[1] for h in heard("delivered")) == ["leaf1", "leaf2"]
        assert me.runs.deliveries() == middle.runs.deliveries() == []
        await test.advance(10)
        assert HEARD[-1][1] == "mid" or HEARD[-2][1] == "mid"
        assert len(heard("delivered")) == 3


# ---- whoever is not there


@pytest.mark.rule("T-175")
@pytest.mark.parametrize("ended", [False, True])
async def test_an_owner_that_sleeps_after_a_crash_is_woken_to_hear(
    ended: bool, clock: object
) -> None:
    async with opened() as test:
        me = await top(test)
        await me.dynamic_agents.get(Old, "o")
        owner = agent_at(test, ("Old", "o"))
        FAIL["r"] = 1 if ended else 0
        await owner.run_agent_tool(Worker, [["sleep", 5]], run_id="r", detached=FINISH)
        await test.advance(5.1 if ended else 1)
        await crashed(test)
        HEARD.clear()
        await test.advance(30)
        assert heard("delivered") == [("delivered", "r", "completed")]


@pytest.mark.rule("T-175", "T-210")
@pytest.mark.parametrize("over", [False, True])
async def test_a_death_in_the_callback_or_after_it_calls_it_once_more_at_most(
    over: bool, clock: object
) -> None:
    async with opened(Slow) as test:
        me = await top(test, Slow)
        await me.run_agent_tool(Worker, [["sleep", 5]], run_id="r", detached=FINISH)
        await test.advance(9 if over else 6)
        assert heard("delivered") == [("delivered", "r", "completed")]
        await tree_of(test, "Slow").durable()
        await test.crash()
        await test.reopen()
        await test.advance(30)
        assert len(heard("delivered")) == (1 if over else 2)
        assert heard("over") == [("over", "r")]
        assert owed(test, root="Slow") == []


async def test_a_deleted_owner_hears_nothing_and_owes_nothing(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        await me.dynamic_agents.get(Old, "o")
        owner = agent_at(test, ("Old", "o"))
        policy = Detached(
            on_finish="delivered", max_budget_s=50, no_progress_s=9, milestones=["m"]
        )
        script = [["mark", "m"], ["sleep", 5]]
        FAIL["late"] = 1
        await owner.run_agent_tool(Worker, [], run_id="late", detached=FINISH)
        await owner.run_agent_tool(Worker, script, run_id="r", detached=policy)
        await test.advance(0.1)
        HEARD.clear()
        await me.dynamic_agents.delete(Old, "o")
        await test.advance(100)
        assert HEARD == []
        assert rows(tree_of(test), "SELECT * FROM job") == []
        assert rows(tree_of(test), "SELECT * FROM run") == []


@pytest.mark.rule("T-177")
@pytest.mark.parametrize("lost", ["owner evicted", "child aborted", "client gone"])
async def test_a_lost_observer_or_child_is_no_end(lost: str, clock: object) -> None:
    async with opened(idle_s=2) as test:
        me = await top(test)
        await me.dynamic_agents.get(Old, "o")
        owner = agent_at(test, ("Old", "o"))
        policy = Detached(on_finish="delivered", max_budget_s=60)
        script = [["say", "x"], ["sleep", 10], ["say", "y"]]
        await owner.run_agent_tool(Worker, script, run_id="r", detached=policy)
        await test.advance(1)
        match lost:
            case "child aborted":
                await owner.dynamic_agents.abort(Worker, "r")
            case "owner evicted":
                await me.dynamic_agents.abort(Old, "o")
            case "client gone":
                peer = await connect(test, ("Top", "a"), ("Old", "o"))
                assert peer.connection is not None
                peer.connection.closed(1001, "", was_clean=False)
        await test.advance(40)
        assert heard("delivered") == [("delivered", "r", "completed")]
        assert TURNS["r"] == (1 if lost == "client gone" else 2)


# ---- given up


@pytest.mark.rule("T-170")
async def test_a_budget_counts_from_the_dispatch_over_crashes(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        policy = Detached(on_finish="delivered", max_budget_s=60)
        run = await me.run_agent_tool(Worker, LONG, run_id="r", detached=policy)
        sql = "SELECT due_at FROM job WHERE kind = 'limit'"
        due = [(run.started_at + 60_000,)]
        assert rows(tree_of(test), sql) == due
        await test.advance(20)
        await crashed(test)
        me = await top(test)
        assert rows(tree_of(test), sql) == due
        await test.advance(39)
        assert ends(me) == {"r": ("running", None)}
        await test.advance(2)
        assert ends(me) == {"r": ("interrupted", "budget-exceeded")}


@pytest.mark.rule("T-178", "T-182", "T-191")
async def test_over_its_budget_a_run_is_ended_and_told_once_for_good(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        peer = await connect(test)
        gone: list[Any] = []
        test.kernel.subscribe("run:give_up", lambda *event: gone.append(event[3]))
        policy = Detached(on_finish="delivered", max_budget_s=10)
        FAIL["r"] = 1
        script = [["say", "x"], ["sleep", 15], ["say", "y"]]
        await me.run_agent_tool(Worker, script, run_id="r", detached=policy)
        await test.advance(9.9)
        assert ends(me) == {"r": ("running", None)}
        await test.advance(60)
        assert ends(me) == {"r": ("interrupted", "budget-exceeded")}
        told = run_frames(peer)
        assert kinds(told) == [(0, "started"), (1, "chunk"), (2, "interrupted")]
        assert told[-1]["event"]["reason"] == "budget-exceeded"
        assert kinds(await frames(me, "r")) == kinds(told)
        assert heard("delivered") == [("delivered", "r", "interrupted")] * 2, (
            "one retry"
        )
        assert heard("finish") == [("finish", "a", "r", "interrupted")]
        assert gone == ["budget-exceeded"], "a failed delivery gives up nothing again"
        assert node_at(test).tree.turns.live == {}
        await crashed(test)
        HEARD.clear()
        await test.advance(600)
        assert HEARD == []


@pytest.mark.rule("T-178")
@pytest.mark.parametrize(
    ("word", "status", "reason"),
    [
        ("completed", "completed", None),
        ("aborted", "interrupted", "budget-exceeded"),
        ("deaf", "interrupted", "budget-exceeded"),
    ],
)
async def test_what_a_child_that_runs_itself_says_of_its_end_is_its_end(
    word: str, status: str, reason: str | None, clock: object
) -> None:
    async with opened() as test:
        me = await top(test)
        peer = await connect(test)
        policy = Detached(on_finish="delivered", max_budget_s=10)
        await me.run_agent_tool(Foreign, word, run_id="r", detached=policy)
        await test.advance(60)
        assert ends(me) == {"r": (status, reason)}
        assert heard("delivered") == [("delivered", "r", status)]
        assert heard("finish") == [("finish", "a", "r", status)]
        assert heard("cancel")[0] == ("cancel", "r", "budget-exceeded")
        kind = "finished" if status == "completed" else "interrupted"
        assert kinds(run_frames(peer)) == [(0, "started"), (1, "chunk"), (2, kind)]
        assert owed(test) == []


@pytest.mark.rule("T-179", "T-180")
@pytest.mark.parametrize(
    "first", [["say", "x"], ["report", {"phase": "a"}], ["mark", "m"]]
)
async def test_silence_counts_from_the_last_sign_of_life(
    first: list[Any], clock: object
) -> None:
    async with opened() as test:
        me = await top(test)
        policy = Detached(on_finish="delivered", no_progress_s=10)
        script = [["sleep", 100], first, ["sleep", 9], ["say", "y"], ["sleep", 900]]
        await me.run_agent_tool(Worker, script, run_id="r", detached=policy)
        await test.advance(99)
        assert ends(me) == {"r": ("running", None)}, "it has never said a word"
        await test.advance(19.5)
        assert ends(me) == {"r": ("running", None)}, "it speaks again"
        await test.advance(1)
        assert ends(me) == {"r": ("interrupted", "no-progress")}
        await test.advance(100)
        assert heard("delivered") == [("delivered", "r", "interrupted")]
        assert owed(test) == []


@pytest.mark.rule("T-180")
async def test_one_that_never_says_a_word_is_bounded_by_its_budget_alone(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        policy = Detached(on_finish="delivered", no_progress_s=1, max_budget_s=500)
        await me.run_agent_tool(Worker, [["sleep", 9999]], run_id="r", detached=policy)
        await test.advance(499)
        assert ends(me) == {"r": ("running", None)}
        await test.advance(2)
        assert ends(me) == {"r": ("interrupted", "budget-exceeded")}


@pytest.mark.rule("T-181")
@pytest.mark.parametrize(("down_s", "budget_s"), [(0, 10), (300, 10), (0, 15)], ids=str)
async def test_where_both_bounds_are_over_the_budget_is_the_reason(
    down_s: int, budget_s: int, clock: object
) -> None:
    """The third: a machine that slept over both, and looks at the silence first."""
    async with opened() as test:
        me = await top(test)
        policy = Detached(
            on_finish="delivered", no_progress_s=10, max_budget_s=budget_s
        )
        await me.run_agent_tool(Worker, LONG, run_id="r", detached=policy)
        await test.advance(1)
        if not down_s:
            test.clock.jump(budget_s - 10)
            await test.advance(30)
        else:
            await tree_of(test).durable()
            await test.crash()
            test.clock.jump(down_s)
            await test.reopen()
            me = await top(test)
            await test.advance(5)
        assert ends(me) == {"r": ("interrupted", "budget-exceeded")}
        assert heard("delivered") == [("delivered", "r", "interrupted")]


async def test_who_waits_for_one_that_speaks_is_not_silent(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        policy = Detached(on_finish="delivered", no_progress_s=10)
        talk = [step for _ in range(9) for step in (["sleep", 5], ["say", "x"])]
        script = [["say", "x"], ["below", "in", talk], ["sleep", 100]]
        await me.run_agent_tool(Worker, script, run_id="r", detached=policy)
        await test.advance(46)
        assert ends(me) == {"r": ("running", None)}
        await test.advance(20)
        assert ends(me) == {"r": ("interrupted", "no-progress")}


async def test_a_crash_and_what_it_costs_is_no_silence(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        policy = Detached(on_finish="delivered", no_progress_s=10)
        script = [["say", "x"], ["sleep", 8], ["say", "y"]]
        await me.run_agent_tool(Worker, script, run_id="r", detached=policy)
        await test.advance(5)
        await tree_of(test).durable()
        await test.crash()
        test.clock.jump(3600)
        await test.reopen()
        await test.advance(9)
        assert heard("delivered") == [("delivered", "r", "completed")]
        assert TURNS["r"] == 2


@pytest.mark.rule("T-204")
async def test_a_given_up_child_that_will_not_stop_counts_no_more_and_is_listed(
    clock: object,
) -> None:
    async with opened(abort_grace_s=2) as test:
        me = await top(test)
        policy = Detached(on_finish="delivered", max_budget_s=5)
        await me.run_agent_tool(Deaf, None, run_id="r", detached=policy)
        await test.advance(20)
        assert ends(me) == {"r": ("interrupted", "budget-exceeded")}
        assert heard("delivered") == [("delivered", "r", "interrupted")]
        assert [n.name for n in tree_of(test).remnants] == ["r"]
        DEAF[0].set()
        await settle()
        await test.advance(5)
        assert kinds(await frames(me, "r"))[-1] == (1, "interrupted")


# ---- cut anywhere


@pytest.mark.rule("T-210", "T-195")
@pytest.mark.parametrize("how", ["ends", "given up"])
async def test_a_death_at_any_commit_costs_no_delivery_and_makes_no_second_end(
    how: str, clock: object
) -> None:
    script = [["mark", "m"], ["sleep", 2]] if how == "ends" else [["mark", "m"], *LONG]
    budget_s = 400 if how == "ends" else 4
    policy = Detached(
        on_finish="delivered", milestones=["m"], max_budget_s=budget_s, no_progress_s=30
    )
    commits = 0
    while True:
        fresh_start()
        async with opened() as test:
            me = await top(test)
            test.faults.die_after(commits)
            try:
                await me.run_agent_tool(Worker, script, run_id="r", detached=policy)
                await tree_of(test).durable()
                asked = True
            except StorageError:
                asked = False
            await test.advance(10)
            died, done = test.faults.dead, list(HEARD)
            await test.crash()
            test.faults.heal()
            await test.reopen()
            me = await top(test)
            await test.advance(60)
            run = me.runs.get("r")
            assert run is not None or not asked, commits
            if run is not None:
                status = "completed" if how == "ends" else "interrupted"
                assert run.status == status, commits
                assert set(heard("delivered")) == {("delivered", "r", status)}, commits
                marks = [h for h in heard("progress") if h[3] == "m"]
                least = 1 if how == "ends" else 0  # its time was over before it began
                assert least <= len(marks) <= 2, commits
                assert owed(test) == [], commits
                assert me.runs.deliveries() == [], commits
                told = kinds(await frames(me, "r"))
                assert [n for n, _ in told] == list(range(len(told))), commits
            if not died:
                assert done == HEARD, "a life after the end adds nothing"
                break
        commits += 1
    assert commits > 8, "it died at every one of its commits"


async def test_nothing_is_polled_while_it_goes_on(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        await me.run_agent_tool(Worker, LONG, run_id="r", detached=FINISH)
        await test.advance(1)
        before = tree_of(test).barrier.count
        await test.advance(900)
        assert tree_of(test).barrier.count == before
