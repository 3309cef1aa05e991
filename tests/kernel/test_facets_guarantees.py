"""What users build on without asking: one life at a time, no lock, nothing told early."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
import trio

from culet.kernel import Agent, Connection, Limits, Response, Schedule, rpc
from culet.kernel.errors import CuletError, FacetAborted, UsageError
from culet.kernel.testing import Harness, open_test_kernel
from kernel.agents import agent_at, node_at, raises, settle
from kernel.peers import come, connect, frames_of

NOTES: list[Any] = []
INSIDE: Counter[str] = Counter()  # code of a life that runs now, by agent
KID = ("Kid", "k")


@pytest.fixture(autouse=True)
def fresh() -> None:
    NOTES.clear()
    INSIDE.clear()


class Kid(Agent):
    initial_state = 0

    async def on_start(self) -> None:
        if self.name == "hangs":
            await trio.sleep_forever()
        if self.name == "guarded":
            self.spawn(self._live)
            await trio.sleep(0.01)

    async def _live(self) -> None:
        me = self.name
        INSIDE[me] += 1
        assert INSIDE[me] == 1, "two lives of one agent at once"
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(0.05)
            INSIDE[me] -= 1
            NOTES.append("ended")

    @rpc
    async def ping(self) -> str:
        return "pong"

    @rpc
    async def racy(self) -> None:
        n = self.state
        await trio.sleep(1)
        self.set_state(n + 1)

    @rpc
    async def atomic(self) -> None:
        await trio.lowlevel.checkpoint()
        self.set_state(self.state + 1)

    @rpc
    async def write(self, text: str) -> str:
        self.sql("create table if not exists t (v)")
        self.sql("insert into t values (?)", text)
        return text

    async def written(self) -> list[str]:
        self.sql("create table if not exists t (v)")
        return [r.v for r in self.sql("select v from t")]

    async def shout(self, text: str) -> None:
        await self.write(text)
        self.broadcast(text)
        await trio.sleep_forever()

    async def tell(self, text: str) -> None:
        await self.write(text)
        await (await self.kernel.get_agent(Top, "b")).note(text)

    async def note(self, text: str) -> None:
        NOTES.append(text)

    async def on_request(self, request: Any) -> Response:
        return Response(await self.write("http"))

    async def on_message(self, connection: Connection, message: str | bytes) -> None:
        await self.write(str(message))
        connection.send(message)

    async def behind(self, seconds: float) -> str:
        self.spawn(self._behind, seconds)
        return "returned"

    async def _behind(self, seconds: float) -> None:
        try:
            await trio.sleep(seconds)
            NOTES.append("done")
        finally:
            NOTES.append("over")

    async def owe(self, payload: Any) -> None:
        await self.schedule(10, "due", payload)
        payload["after"] = 1

    async def due(self, payload: Any, schedule: Schedule) -> None:
        if payload == "hang":
            began = trio.current_time()
            try:
                await trio.sleep_forever()
            finally:
                NOTES.append(trio.current_time() - began)
        NOTES.append(payload)


class Top(Kid):
    async def make(self, name: str) -> None:
        await self.dynamic_agents.get(Kid, name)

    async def abort(self, name: str) -> None:
        await self.dynamic_agents.abort(Kid, name)


def opened(**options: Any) -> Any:
    return open_test_kernel(roots=[Top], facets=[Kid], **options)


async def at(test: Harness, *names: str) -> Any:
    root = await test.kernel.get_agent(Top, "a")
    return await test.kernel.get_sub_agent(root, Kid, names[0]) if names else root


# ---- one life


@pytest.mark.rule("F-472")
async def test_whatever_comes_at_once_there_is_one_life(clock: object) -> None:
    async with opened() as test:
        root, kid = await at(test), await at(test, "guarded")
        peer = await connect(test, ("Top", "a"), ("Kid", "guarded"))
        starts: list[Any] = []
        test.kernel.subscribe("start", lambda *event: starts.append(event))

        async def quietly(fn: Any, *args: Any) -> None:
            with suppress(CuletError):
                await fn(*args)

        for _ in range(5):
            before = len(starts)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(quietly, root.abort, "guarded")
                for _ in range(4):
                    nursery.start_soon(quietly, root.make, "guarded")
                    nursery.start_soon(quietly, kid.ping)
                    nursery.start_soon(come, test, ("Top", "a"), ("Kid", "guarded"))
                    peer.rpc("ping")
            await root.make("guarded")
            assert len(starts) - before in {1, 2}, "those who came before and after"
            assert INSIDE["guarded"] == 1
        assert NOTES.count("ended") >= 5


@pytest.mark.rule("F-473")
@pytest.mark.parametrize("method", ["atomic", "racy"])
async def test_between_two_awaits_nobody_else_runs_and_over_one_anybody_may(
    method: str, clock: object
) -> None:
    """There is no lock around a call: who reads, awaits and writes can lose an update."""
    async with opened() as test:
        kid = await at(test, "k")
        peer = await connect(test, ("Top", "a"), KID)
        async with trio.open_nursery() as nursery:
            for i in range(10):
                peer.rpc(method, call=str(i))
                nursery.start_soon(getattr(kid, method))
            await test.advance(2)
        assert len(frames_of(peer, "rpc")) == 10
        assert agent_at(test, KID).state == (20 if method == "atomic" else 1)


# ---- nothing told early


@pytest.mark.rule("F-475")
@pytest.mark.parametrize(
    "way", ["call", "rpc", "message", "broadcast", "http", "other root"]
)
@pytest.mark.parametrize("hops", [(), (KID,)], ids=["root", "facet"])
async def test_what_has_been_told_is_there_after_a_crash(
    way: str, hops: Any, clock: object
) -> None:
    async with opened() as test:
        names = [name for _, name in hops]
        agent = await at(test, *names)
        peer = await connect(test, ("Top", "a"), *hops)
        await test.kernel.get_agent(Top, "b")
        await settle()
        text = "http" if way == "http" else "x"

        async def until(told: Any) -> None:
            with trio.fail_after(10):
                while not told():
                    await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:

            async def act(fn: Any, *args: Any) -> None:
                with suppress(CuletError):
                    await fn(*args)

            match way:
                case "call":
                    assert await agent.write("x") == "x"
                case "rpc":
                    peer.rpc("write", "x")
                    await until(lambda: frames_of(peer, "rpc"))
                case "message":
                    peer.send("x")
                    await until(lambda: "x" in peer.out)
                case "broadcast":
                    nursery.start_soon(act, agent.shout, "x")
                    await until(lambda: "x" in peer.out)
                case "http":
                    visit = await come(test, ("Top", "a"), *hops)
                    assert not isinstance(visit, Response)
                    assert (await visit.handle()).body == b"http"
                case "other root":
                    nursery.start_soon(act, agent.tell, "x")
                    await until(lambda: "x" in NOTES)
            await test.crash()
        await test.reopen()
        assert await (await at(test, *names)).written() == [text]


# ---- work behind a call


@pytest.mark.rule("F-477")
@pytest.mark.parametrize("end", ["by itself", "abort", "close"])
async def test_work_behind_a_call_goes_on_and_ends_with_its_agent(
    end: str, clock: object
) -> None:
    async with opened() as test:
        kid = await at(test, "k")
        began = trio.current_time()
        assert await kid.behind(100) == "returned"
        assert trio.current_time() - began < 1
        with pytest.raises(UsageError, match="busy"):
            await test.evict([("Top", "a"), KID])
        await test.advance(50)
        assert NOTES == []
        if end == "by itself":
            await test.advance(51)
            assert NOTES == ["done", "over"]
        elif end == "abort":
            await (await at(test)).abort("k")
            assert NOTES == ["over"]
        else:
            await test.close()
            assert NOTES == ["over"]


# ---- limits


@pytest.mark.rule("F-479")
@pytest.mark.parametrize("idle_s", [2.0, 40.0])
async def test_how_long_an_idle_agent_stays_is_yours_to_say(
    idle_s: float, clock: object
) -> None:
    async with opened(idle_s=idle_s) as test:
        await at(test, "k")
        await test.advance(idle_s * 0.7)
        assert test.find([("Top", "a"), KID]) is not None
        await test.advance(idle_s * 0.8)
        assert test.find([("Top", "a"), KID]) is None
        await test.advance(idle_s * 2.5)
        assert test.tree("Top", "a") is None, "the root follows"


@pytest.mark.rule("F-479")
@pytest.mark.parametrize("limit", [3.0, 30.0])
async def test_how_long_starts_callbacks_and_stops_may_take_is_yours_to_say(
    limit: float, clock: object
) -> None:
    limits = Limits(job_timeout_s=limit)
    async with opened(start_s=limit, abort_grace_s=limit, limits=limits) as test:
        root = await at(test)
        began = trio.current_time()
        await raises(CuletError, root.make, "hangs")
        assert trio.current_time() - began == pytest.approx(limit, abs=0.1)
        await at(test, "k")
        await agent_at(test, KID).schedule(0, "due", "hang")
        await test.advance(limit - 0.5)
        assert NOTES == []
        await test.advance(1)
        assert pytest.approx([limit], abs=0.1) == NOTES


@pytest.mark.rule("F-480")
async def test_the_longest_name_of_a_root_is_kept_and_a_longer_one_refused(
    clock: object,
) -> None:
    name = "🜁" * 256  # 1,024 bytes
    async with opened() as test:
        root = await test.kernel.get_agent(Top, name)
        await root.write("kept")
        await raises(UsageError, test.kernel.get_agent, Top, name + "x")
        await test.crash()
        await test.reopen()
        root = await test.kernel.get_agent(Top, name)
        assert await root.written() == ["kept"]
        found = test.find([("Top", name)])
        assert found is not None
        assert found.agent.name == name


# ---- values


@pytest.mark.rule("F-481")
async def test_nothing_that_was_handed_over_is_shared(clock: object) -> None:
    async with opened() as test:
        kid = await at(test, "k")
        agent = agent_at(test, KID)
        agent.set_state(given := {"list": [1]})
        given["list"].append(2)
        agent.state["list"].append(3)
        assert agent.state == {"list": [1]}
        payload = {"x": [1]}
        await kid.owe(payload)
        assert payload == {"x": [1]}, "the callee has its own copy"
        await test.advance(11)
        assert NOTES == [{"x": [1]}], "a payload is what it was when it was owed"
        peer = await connect(test, ("Top", "a"), KID)
        peer.send({"type": "cf_agent_state", "state": {"list": [4]}})
        await settle()
        assert json.dumps(agent.state) == '{"list": [4]}'


# ---- cancelling


@pytest.mark.rule("F-482")
async def test_who_is_cancelled_ends_its_call_and_no_work_behind_it(
    clock: object,
) -> None:
    async with opened() as test:
        kid = await at(test, "k")
        with trio.move_on_after(0.5) as scope:
            await kid.racy()
        assert scope.cancelled_caught
        await test.advance(5)
        assert agent_at(test, KID).state == 0, "the call ended where it stood"
        await kid.behind(3)
        with trio.move_on_after(0.5):
            await kid.racy()
        await test.advance(5)
        assert NOTES == ["done", "over"], "what it had started before goes on"
        assert node_at(test, KID).calls == {}
        assert await kid.ping() == "pong"


@pytest.mark.rule("F-478")
async def test_a_finally_gets_a_short_time_and_no_kernel(clock: object) -> None:
    """Our choice for dying code: it may await until the grace is over, and write nothing."""

    class Dying(Kid):
        async def work(self, seconds: float) -> None:
            await self.write("before")
            try:
                await trio.sleep_forever()
            finally:
                with trio.CancelScope(shield=True):
                    await trio.sleep(seconds)
                    NOTES.append("tidy")
                    try:
                        await self.write("late")
                    except FacetAborted:
                        NOTES.append("refused")

    async with open_test_kernel(
        roots=[Top], facets=[Kid, Dying], abort_grace_s=4
    ) as test:
        await test.kernel.get_agent(Top, "a")
        top = agent_at(test)
        for seconds, ending in ((2, "stopped"), (60, "remnant")):
            NOTES.clear()
            kid = await top.dynamic_agents.get(Dying, "k")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(raises, FacetAborted, kid.work, seconds)
                await settle()
                began = trio.current_time()
                try:
                    receipt = await top.dynamic_agents.abort(Dying, "k", "why")
                    assert [how for _path, how in receipt.nodes] == ["stopped"]
                except CuletError as error:
                    assert ending == "remnant", error
                    assert NOTES == []
                assert trio.current_time() - began == pytest.approx(
                    2 if ending == "stopped" else 5, abs=0.1
                )
            assert NOTES == ["tidy", "refused"]
            kid = await top.dynamic_agents.get(Dying, "k")
            assert set(await kid.written()) == {"before"}
