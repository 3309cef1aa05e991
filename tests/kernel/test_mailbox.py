"""Letters to a run: in order, at least once, once by their id, none for what has ended."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio

from culet.kernel import Agent, AgentToolRun, Chunk, Letter, Limits, Sent, Turn
from culet.kernel.errors import CapacityError, FacetAborted, NotFound, UsageError
from culet.kernel.testing import Harness, open_test_kernel
from culet.kernel.testing_scenario import Point, Scenario, Spec, run_scenario
from kernel.agents import raises, rows, settle, tree_of
from volume import Volume

SEEN: list[Any] = []
TURNS: list[Turn] = []
CRASHES = Volume(14, 40, 10**6)


@pytest.fixture(autouse=True)
def fresh() -> None:
    SEEN.clear()
    TURNS.clear()


class Worker(Agent):
    """Does what its letters say, until one says `stop`; notes each in its own table."""

    resumable = True

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        TURNS.append(turn)
        self.sql("create table if not exists did (id text primary key, what text)")
        yield {"type": "text-delta", "id": "t", "delta": "so"}
        await trio.sleep(turn.input)
        async for letter in turn.mailbox:
            SEEN.append((turn.attempt, letter.body))
            self.sql(
                "insert or ignore into did values (?, ?)", letter.id, str(letter.body)
            )
            if letter.body == "sleep":
                await trio.sleep(50)
            if letter.body == "stop":
                break
        turn.output = [r.what for r in self.sql("select what from did order by rowid")]


class Idle(Worker):
    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        TURNS.append(turn)
        yield {"type": "text-delta", "id": "t", "delta": "so"}
        await trio.sleep_forever()


class Boss(Agent):
    async def begin(self, seconds: float = 0, run_id: str = "r") -> AgentToolRun:
        return await self.run_agent_tool(Worker, seconds, run_id=run_id, detached=True)

    async def say(
        self, body: Any, letter_id: str | None = None, run_id: str = "r"
    ) -> Sent:
        return await self.runs.send(run_id, body, id=letter_id)

    async def run(self, run_id: str = "r") -> AgentToolRun | None:
        return self.runs.get(run_id)


def opened(**options: Any) -> Any:
    return open_test_kernel(roots=[Boss], facets=[Worker, Idle], **options)


async def boss(test: Harness) -> Any:
    return await test.kernel.get_agent(Boss, "a")


def mail(test: Harness) -> list[Any]:
    sql = "SELECT id, body, done_at IS NOT NULL FROM mail ORDER BY n"
    return rows(tree_of(test, "Boss"), sql)


@pytest.mark.rule("B-23")
async def test_letters_come_in_order_to_a_turn_that_waits_or_comes_later(
    clock: object,
) -> None:
    async with opened() as test:
        me = await boss(test)
        await me.begin(5)
        for number in range(3):
            assert (await me.say(number)).accepted
        await test.advance(6)
        assert SEEN == [(1, 0), (1, 1), (1, 2)]
        await me.say({"to": ["do"]})
        await test.advance(1)
        assert SEEN[-1] == (1, {"to": ["do"]})
        await me.say("stop")
        await test.advance(1)
        run = await me.run()
        assert (run.status, run.output) == (
            "completed",
            ["0", "1", "2", "{'to': ['do']}", "stop"],
        )
        assert mail(test) == []
        # a letter is no progress, and nobody else hears of it
        assert not [c for c in TURNS[0]._stream.bodies() if "to" in c]


@pytest.mark.rule("B-23")
async def test_the_same_id_is_one_letter_before_and_after_it_was_done(
    clock: object,
) -> None:
    async with opened() as test:
        me = await boss(test)
        await me.begin(5)
        assert await me.say("one", "x") == Sent(
            id="x", accepted=True, known=False, status="running"
        )
        again = Sent(id="x", accepted=False, known=True, status="running")
        assert await me.say("one", "x") == again
        await test.advance(6)
        assert [done for _, _, done in mail(test)] == [1]
        await me.say("sleep")  # done when the next one is asked for
        await test.advance(1)
        assert [done for _, _, done in mail(test)] == [1, 0]
        assert await me.say("one", "x") == again
        await test.advance(1)
        assert SEEN == [(1, "one"), (1, "sleep")]


@pytest.mark.rule("B-23")
async def test_what_was_not_done_comes_again_after_a_crash_and_no_other(
    clock: object,
) -> None:
    async with opened() as test:
        me = await boss(test)
        await me.begin()
        for body in ("one", "sleep", "three"):
            await me.say(body, body)
        await test.advance(5)
        assert SEEN == [(1, "one"), (1, "sleep")]
        await test.crash()
        await test.reopen()
        me = await boss(test)
        await test.advance(100)
        assert SEEN[2:] == [(2, "sleep"), (2, "three")]
        assert (await me.say("one", "one")).known
        await me.say("stop")
        await test.advance(1)
        assert (await me.run()).output == ["one", "sleep", "three", "stop"]


@pytest.mark.rule("B-23")
async def test_nothing_is_sent_to_what_has_ended_or_never_was(clock: object) -> None:
    async with opened() as test:
        me = await boss(test)
        await me.begin()
        await me.say("stop")
        await test.advance(1)
        late = await me.say("late", "l")
        assert late == Sent(id="l", accepted=False, known=False, status="completed")
        await me.begin(50, "c")
        await me.say("x", run_id="c")
        await agent_at_boss(test).runs.cancel("c")
        assert (await me.say("late", run_id="c")).status == "aborted"
        assert mail(test) == []
        await raises(NotFound, me.say, "x", None, "none")
        await raises(FacetAborted, sync, TURNS[0].mailbox.done, "l")


async def sync(fn: Any, *args: Any) -> Any:
    return fn(*args)


def agent_at_boss(test: Harness) -> Any:
    node = test.find([("Boss", "a")])
    assert node is not None
    return node.agent


async def test_a_run_that_is_deleted_or_cleared_keeps_no_letter(clock: object) -> None:
    async with opened() as test:
        await boss(test)
        me = agent_at_boss(test)
        for run_id in ("d", "c"):
            await me.run_agent_tool(Idle, 1, run_id=run_id, detached=True)
            await me.runs.send(run_id, "x")
        await test.advance(1)
        await me.dynamic_agents.delete(Idle, "d")
        assert len(mail(test)) == 1
        await me.runs.clear()
        assert mail(test) == []


@pytest.mark.limit("mail_bytes", "mail_waiting", "mail_known")
@pytest.mark.rule("B-23")
async def test_letters_are_small_and_few(clock: object) -> None:
    limits = Limits(mail_waiting=3, mail_bytes=100, mail_known=2)
    async with opened(limits=limits) as test:
        await boss(test)
        me = agent_at_boss(test)
        await me.run_agent_tool(Idle, 1, run_id="r", detached=True)
        await test.advance(1)
        box = TURNS[0].mailbox
        await raises(CapacityError, me.runs.send, "r", "x" * 99)
        await me.runs.send("r", "x" * 98, id="largest")
        assert box.done(box.take())
        with pytest.raises(UsageError):
            await me.runs.send("r", object())
        with pytest.raises(UsageError):
            await me.runs.send("r", "x", id="")
        for number in range(3):
            await me.runs.send("r", number, id=f"n{number}")
        await raises(CapacityError, me.runs.send, "r", 3)
        found = [box.take() for _ in range(4)]
        assert [None if one is None else one.body for one in found] == [0, 1, 2, None]
        first = found[0]
        assert isinstance(first, Letter)
        assert box.done(first)
        assert not box.done(first)
        assert box.done("n1")
        assert box.done("n2")
        # the eldest id is not known any more
        assert [letter_id for letter_id, _, _ in mail(test)] == ["n1", "n2"]
        await me.runs.send("r", 9)
        assert (await box.get()).body == 9


async def test_only_the_parent_s_own_runs_get_letters(clock: object) -> None:
    async with opened() as test:
        me = await boss(test)
        await me.begin(50)
        other = await test.kernel.get_agent(Boss, "b")
        await raises(NotFound, other.say, "x")
        await settle()
        assert mail(test) == []


# ---- at every commit


async def story(scenario: Scenario) -> None:
    """Send by ids of its own until each is known; every one is carried out once."""
    me = await scenario.get(Boss, "a")
    await me.begin()
    for body in ("one", "two", "three", "stop"):
        sent = await me.say(body, f"id-{body}")
        assert sent.accepted or sent.known or sent.status == "completed"
        await scenario.advance(1)
    run = await me.run()
    assert run.status == "completed"
    scenario.ended("r", run.status)
    scenario.told("did", run.output)

    @scenario.recall
    async def read() -> dict[str, Any]:
        found = await (await scenario.get(Boss, "a")).run()
        return {"did": found.output}


@pytest.mark.rule("B-23")
def test_every_letter_is_carried_out_once_by_its_id_wherever_the_process_dies() -> None:
    spec = Spec(roots=[Boss], facets=[Worker, Idle])
    whole = run_scenario(story, spec)
    assert whole.findings == ()
    commits, records = whole.lives[0]
    points = [Point("commit", n + 1) for n in range(commits)]
    points += [Point("record", n + 1) for n in range(records)]
    points += [Point("landed", n + 1) for n in range(records)]
    assert len(points) > 20
    for point in points[:: max(1, len(points) // CRASHES.now)]:
        told = run_scenario(story, spec, (point,), hasty=True)
        assert told.findings == (), point
        assert told.reached, point
