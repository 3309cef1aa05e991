"""What subscribers hear: the story of a tree, in order; and that they hurt nobody."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio

from culet.kernel import Agent, Chunk, FiberRecovery, Schedule, Turn, current_agent
from culet.kernel.core.job import Retry
from culet.kernel.errors import FacetBroken
from culet.kernel.events import (
    Failure,
    Owed,
    Restarted,
    Stopped,
    Upgraded,
    Whereabouts,
)
from culet.kernel.testing import Harness, open_test_kernel
from kernel.agents import agent_at, raises, settle, tree_of
from kernel.peers import connect

Event = tuple[str, Any, Any]


class Kid(Agent):
    async def ping(self) -> str:
        return self.name

    async def make(self, name: str) -> None:
        await self.dynamic_agents.get(Kid, name)

    async def break_down(self) -> None:
        self.spawn(self._boom)

    async def _boom(self) -> None:
        raise ValueError("boom")

    async def plan(self, seconds: float, attempts: int = 2) -> str:
        retry = Retry(max_attempts=attempts, base_delay=0.1, max_delay=0.1)
        return (await self.schedule(seconds, "tick", retry=retry)).id

    async def put(self) -> str:
        return self.queue.put("tick", retry=Retry(max_attempts=1))

    async def unplan(self, schedule_id: str) -> bool:
        return self.schedules.cancel(schedule_id)

    async def tick(self, payload: Any, schedule: Schedule) -> None:
        raise ValueError("tick")

    async def fiber(self) -> None:
        await self.fibers.start("walk", trio.sleep_forever, key="f")

    async def on_fiber_recovered(self, ctx: FiberRecovery) -> None:
        return None

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        yield {"type": "text-delta", "id": "t", "delta": "x"}


class Heir(Kid):
    pass


class Top(Kid):
    async def run(self, run_id: str) -> str:
        return (await self.run_agent_tool(Kid, None, run_id=run_id)).status

    async def whose(self) -> list[Any]:
        here = current_agent()
        assert here is not None
        return [here.agent.name, here.connection is None, here.request is None]

    async def whose_below(self) -> Any:
        kid: Any = await self.dynamic_agents.get(Who, "w")
        return await kid.whose()

    async def on_connect(self, connection: Any, ctx: Any) -> None:
        here = current_agent()
        assert here is not None
        connection.send(f"{here.connection is connection} {await self.whose_below()}")


class Who(Top):
    async def on_connect(self, connection: Any, ctx: Any) -> None:
        pass


def opened(**options: Any) -> Any:
    return open_test_kernel(roots=[Top], facets=[Kid, Heir, Who], **options)


def listen(test: Harness, channel: str = "*") -> list[Event]:
    """Return a list that grows with what is heard."""
    heard: list[Event] = []

    def hear(channel: str, _tree: Any, subject: Any, detail: Any) -> None:
        heard.append((channel, subject, detail))

    test.kernel.subscribe(channel, hear)
    return heard


def short(events: list[Event]) -> list[str]:
    """Return channel and path of each event that tells one."""
    out = []
    for channel, subject, detail in events:
        where = getattr(detail, "path", None)
        if channel == "failure":
            where = detail.what
        elif channel == "abort":
            where = len(subject)
        out.append(f"{channel} {where}" if where is not None else channel)
    return out


@pytest.mark.rule("F-467")
async def test_a_whole_story_in_order(clock: object) -> None:
    async with opened() as test:
        heard = listen(test)
        root = await test.kernel.get_agent(Top, "a")
        inside = agent_at(test).dynamic_agents
        kid = await inside.get(Kid, "k")
        await kid.make("below")
        await inside.abort(Kid, "k", "why")
        await inside.get(Kid, "k")
        await kid.break_down()
        await settle()
        await inside.get(Kid, "k")
        await inside.upgrade(Kid, "k", to=Heir)
        await kid.ping()
        await inside.delete(Heir, "k")
        await test.evict([("Top", "a")])
        assert short(heard) == [
            "root:open",
            "start Top/a",
            "spawn Top/a/Kid/k",
            "start Top/a/Kid/k",
            "spawn Top/a/Kid/k/Kid/below",
            "start Top/a/Kid/k/Kid/below",
            "abort 1",
            "stop Top/a/Kid/k/Kid/below",
            "stop Top/a/Kid/k",
            "start Top/a/Kid/k",
            "failure broken",
            "abort 1",
            "stop Top/a/Kid/k",
            "start Top/a/Kid/k",
            "restart Top/a/Kid/k",
            "stop Top/a/Kid/k",
            "upgrade Top/a/Heir/k",
            "start Top/a/Heir/k",
            "delete Top/a/Heir/k",
            "stop Top/a/Heir/k",
            "stop Top/a",
        ]
        details = [detail for channel, _, detail in heard if channel != "root:open"]
        assert details[1] == Whereabouts("Top/a/Kid/k", "Kid", "k")
        assert details[5] == "why"
        assert details[7] == Stopped("Top/a/Kid/k", "why")
        failure = details[9]
        assert isinstance(failure, Failure)
        assert isinstance(failure.error, ValueError)
        assert details[13] == Restarted("Top/a/Kid/k", 1)
        assert details[14].reason == "upgraded to Heir"
        assert details[15] == Upgraded("Top/a/Heir/k", "Kid", "Heir")
        assert details[-1] == Stopped("Top/a", "evicted")
        slots = {s for c, s, d in heard if getattr(d, "path", "").endswith("/k")}
        assert len(slots) == 1, "one slot all along"
        assert await root.ping() == "a"


@pytest.mark.rule("F-261", "F-262")
async def test_what_is_owed_is_told_of_its_owner_try_by_try(clock: object) -> None:
    async with opened() as test:
        heard = listen(test)
        await test.kernel.get_agent(Top, "a")
        kid = await agent_at(test).dynamic_agents.get(Kid, "k")
        taken_back = await kid.plan(500)
        assert await kid.unplan(taken_back)
        assert not await kid.unplan(taken_back)
        fails = await kid.plan(1)
        await test.advance(10)
        queued = await kid.put()
        await test.advance(10)
        told = [(c, d) for c, _, d in heard if isinstance(d, Owed)]
        error = "ValueError: tick"
        assert told == [
            ("schedule:create", Owed("tick", taken_back)),
            ("schedule:cancel", Owed("tick", taken_back)),
            ("schedule:create", Owed("tick", fails)),
            ("schedule:execute", Owed("tick", fails, 1)),
            ("schedule:retry", Owed("tick", fails, 1, error)),
            ("schedule:execute", Owed("tick", fails, 2)),
            ("schedule:error", Owed("tick", fails, 2, error)),
            ("queue:create", Owed("tick", queued)),
            ("queue:execute", Owed("tick", queued, 1)),
            ("queue:error", Owed("tick", queued, 1, error)),
        ]
        owners = {s for c, s, d in heard if isinstance(d, Owed)}
        assert len(owners) == 1
        assert tree_of(test).path_of(owners.pop()) == "Top/a/Kid/k"


@pytest.mark.rule("F-062")
async def test_what_a_deleted_subtree_owed_is_told_once_each(clock: object) -> None:
    async with opened() as test:
        await test.kernel.get_agent(Top, "a")
        kid = await agent_at(test).dynamic_agents.get(Kid, "k")
        await kid.make("below")
        below = await agent_at(test, ("Kid", "k")).dynamic_agents.get(Kid, "below")
        ids = [await kid.plan(100), await kid.plan(200), await below.plan(300)]
        heard = listen(test, "schedule:cancel")
        await agent_at(test).dynamic_agents.delete(Kid, "k")
        assert sorted(d.id for _, _, d in heard) == sorted(ids)


@pytest.mark.rule("F-359")
async def test_fibers_and_runs_are_told_from_start_to_end(clock: object) -> None:
    async with opened() as test:
        heard = listen(test)
        root = await test.kernel.get_agent(Top, "a")
        await root.fiber()
        assert await root.run("r1") == "completed"
        await test.crash()
        await test.reopen()
        again = listen(test)
        await test.kernel.get_agent(Top, "a")
        await test.advance(5)
        kinds = [c for c, _, _ in heard if c.split(":")[0] in ("run", "turn", "fiber")]
        assert kinds == [
            "fiber:start", "run:ask", "run:start", "run:transition", "turn:begin",
            "run:transition", "turn:chunk", "turn:end", "run:end", "run:transition",
        ]  # fmt: skip
        kinds = [c for c, _, _ in again if c.split(":")[0] in ("run", "turn", "fiber")]
        assert kinds == [
            "fiber:recovery:detected", "fiber:recovery:attempt", "fiber:end",
            "fiber:recovery:handled",
        ]  # fmt: skip


@pytest.mark.rule("F-467")
@pytest.mark.parametrize("error", [ValueError("bad"), SystemExit(1), GeneratorExit()])
async def test_a_subscriber_that_raises_hurts_nobody(
    error: BaseException, clock: object
) -> None:
    async with opened() as test:
        calls: list[str] = []

        def bad(channel: str, *_: Any) -> None:
            calls.append(channel)
            raise error

        test.kernel.subscribe("*", bad)
        heard = listen(test)
        root = await test.kernel.get_agent(Top, "a")
        kid = await agent_at(test).dynamic_agents.get(Kid, "k")
        await kid.break_down()
        await settle()
        await raises(FacetBroken, kid.ping)
        await agent_at(test).dynamic_agents.get(Kid, "k")
        assert await root.run("r1") == "completed"
        await agent_at(test).dynamic_agents.abort(Kid, "k")
        await agent_at(test).dynamic_agents.delete(Kid, "k")
        assert calls == [channel for channel, _, _ in heard], "and others hear all"
        assert {"spawn", "restart", "failure", "delete", "run:end"} <= set(calls)


async def test_one_channel_hears_only_that_until_it_is_ended(clock: object) -> None:
    async with opened() as test:
        heard: list[str] = []
        end = test.kernel.subscribe("spawn", lambda *event: heard.append(event[0]))
        await test.kernel.get_agent(Top, "a")
        await agent_at(test).dynamic_agents.get(Kid, "k")
        assert heard == ["spawn"]
        end()
        end()
        await agent_at(test).dynamic_agents.get(Kid, "l")
        assert heard == ["spawn"]


@pytest.mark.rule("F-461", "F-017")
async def test_whose_code_runs_is_known_and_no_client_is_handed_on(
    clock: object,
) -> None:
    async with opened() as test:
        root = await test.kernel.get_agent(Top, "a")
        assert await root.whose() == ["a", True, True]
        peer = await connect(test, ("Top", "a"))
        await settle()
        assert "True ['w', True, True]" in peer.out
        assert current_agent() is None
