"""Whose code runs and for whom; what becomes of errors; who may do what to whom."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from culet.kernel import (
    Agent,
    ConnectContext,
    Connection,
    Request,
    Response,
    Schedule,
    current_agent,
    rpc,
)
from culet.kernel.errors import CuletError
from culet.kernel.fibernoun import FibersNoun
from culet.kernel.nouns import DynamicAgents, QueueNoun, SchedulesNoun, SocketsNoun
from culet.kernel.runnoun import RunsNoun
from culet.kernel.testing import Harness, ScriptedChild, open_test_kernel
from kernel.agents import agent_at, raises, settle
from kernel.peers import RecordingPeer, come, connect, frames_of

NOTES: list[Any] = []
AT = pytest.mark.parametrize("hops", [(), (("Kid", "k"),)], ids=["root", "facet"])
Hops = tuple[tuple[str, str], ...]


@pytest.fixture(autouse=True)
def fresh() -> None:
    NOTES.clear()


def here() -> list[Any]:
    """Who runs, and for whom, as far as the code of an agent can see."""
    found = current_agent()
    if found is None:
        return [None]
    client = None if found.connection is None else found.connection.id
    request = None if found.request is None else found.request.method
    return [found.agent.name, client, request, found.identity]


class Top(Agent):
    handles = False  # errors

    async def on_start(self) -> None:
        NOTES.append(["start", *here()])

    @rpc
    async def around(self, name: str) -> list[Any]:
        before = here()
        kid = await self.dynamic_agents.get(Kid, name)
        inside = await kid.whose()
        return [before, inside, here()]

    @rpc
    async def whose(self) -> list[Any]:
        return here()

    @rpc
    async def in_background(self) -> None:
        self.spawn(self._note)

    async def _note(self) -> None:
        await trio.lowlevel.checkpoint()
        NOTES.append(["background", *here()])

    async def outlast(self) -> None:
        await self.schedule(10, "due")

    async def due(self, payload: Any, schedule: Schedule) -> None:
        NOTES.append(["due", *here()])

    async def make(self, name: str) -> None:
        await self.dynamic_agents.get(Kid, name)

    async def on_request(self, request: Request) -> Response:
        if request.identity == "raise":
            raise ValueError("secret-token-9")
        return Response.json(here())

    async def on_message(self, connection: Connection, message: str | bytes) -> None:
        NOTES.append(["message", *here()])
        if message == "raise":
            raise ValueError("secret-token-9")
        if message == "raise again":
            raise KeyError("secret-token-9")

    async def on_error(
        self, error: BaseException, *, connection: Connection | None = None
    ) -> None:
        NOTES.append(["error", type(error).__name__, connection is not None])
        if not self.handles:
            await super().on_error(error, connection=connection)


class Kid(Top):
    pass


class Plain(Agent):
    """Defines no hook at all."""

    async def ping(self) -> str:
        return "pong"

    @rpc
    async def hello(self) -> str:
        return "hello"


class Quiet(Plain):
    send_identity_on_connect = False
    initial_state = {"n": 0}


class Owner(Agent):
    """Owes one of each kind."""

    async def make(self, name: str) -> None:
        await self.dynamic_agents.get(Owner, name)

    async def owe(self) -> list[str]:
        queued = self.queue.put("late", "x")
        self.queue.put("late", "y")
        schedule = await self.schedule(1000, "late")
        await self.fibers.start("f", trio.sleep_forever, fiber_id="f", key="key")
        await self.run_agent_tool(
            ScriptedChild, [["sleep", 1000]], run_id="r", detached=True
        )
        await self.dynamic_agents.get(Owner, "below")
        return [schedule.id, queued]

    async def late(self, payload: Any, schedule: Schedule) -> None:
        await trio.sleep(1000)


def opened(**options: Any) -> Any:
    facets = [Kid, Owner, ScriptedChild]
    return open_test_kernel(roots=[Top, Plain, Quiet, Owner], facets=facets, **options)


async def come_to(test: Harness, hops: Hops, **options: Any) -> RecordingPeer:
    root = await test.kernel.get_agent(Top, "a")
    if hops:
        await root.make("k")
    peer = await connect(test, ("Top", "a"), *hops, **options)
    await settle()
    NOTES.clear()
    return peer


def result(peer: RecordingPeer, call: str) -> Any:
    (answer,) = [f for f in frames_of(peer, "rpc") if f["id"] == call]
    return answer["result"]


# ---- context


@AT
@pytest.mark.rule("F-461", "F-435")
async def test_a_call_into_another_agent_takes_no_client_with_it(
    hops: Hops, clock: object
) -> None:
    """Its identity goes along: who asked is still who asked."""
    async with opened() as test:
        peer = await come_to(test, hops, identity="ann")
        me = "k" if hops else "a"
        for name in ("other", "other"):  # made, then there already
            peer.rpc("around", name, call=str(len(peer.out)))
        await settle()
        for frame in frames_of(peer, "rpc"):
            assert frame["result"] == [
                [me, "c", "GET", "ann"],
                ["other", None, None, "ann"],
                [me, "c", "GET", "ann"],
            ]
        assert [n for n in NOTES if n[0] == "start"] == [
            ["start", "other", None, None, None]
        ], "a start is nobody's"
        assert current_agent() is None


@pytest.mark.rule("F-461", "F-106")
async def test_every_way_in_says_whose_code_runs(clock: object) -> None:
    async with opened() as test:
        peer = await come_to(test, (("Kid", "k"),), identity="ann")
        other = await connect(
            test, ("Top", "a"), ("Kid", "k"), label="o", identity="bob"
        )
        kid = await test.kernel.get_sub_agent(
            await test.kernel.get_agent(Top, "a"), Kid, "k"
        )
        await kid.outlast()
        peer.send("hi")
        peer.rpc("whose")
        peer.rpc("in_background", call="2")
        other.rpc("whose")
        visit = await come(test, ("Top", "a"), ("Kid", "k"), identity="web")
        assert not isinstance(visit, Response)
        answer = await visit.handle()
        assert answer.body == b'["k",null,"GET","web"]'
        assert await kid.whose() == ["k", None, None, None]
        await test.advance(11)
        assert result(peer, "1") == ["k", "c", "GET", "ann"]
        assert result(other, "1") == ["k", "o", "GET", "bob"]
        assert sorted(NOTES) == [
            ["background", "k", "c", "GET", "ann"],
            ["due", "k", None, None, None],
            ["message", "k", "c", "GET", "ann"],
        ]


# ---- errors


@AT
@pytest.mark.rule("F-463", "F-465")
@pytest.mark.parametrize("handles", [True, False])
async def test_an_error_that_on_error_takes_is_handled(
    handles: bool, hops: Hops, clock: object
) -> None:
    async with opened() as test:
        failures: list[Any] = []
        test.kernel.subscribe("failure", lambda *event: failures.append(event))
        peer = await come_to(test, hops)
        agent_at(test, *hops).handles = handles
        peer.send("raise")
        await settle()
        assert [n for n in NOTES if n[0] == "error"] == [["error", "ValueError", True]]
        if handles:
            assert peer.closed is None
            assert failures == []
            peer.send("hello")
            await settle()
            assert NOTES[-1][0] == "message"
        else:
            assert peer.closed is not None
            assert peer.closed[0] == 1011
            assert "secret-token-9" not in peer.closed[1]
            assert isinstance(failures[0][3][3], ValueError), "it is raised as it was"
        assert "secret-token-9" not in "".join(map(str, peer.out))


@pytest.mark.rule("F-463")
async def test_what_on_error_raises_itself_is_what_is_reported(clock: object) -> None:
    class Worse(Agent):
        async def on_message(self, connection: Connection, message: Any) -> None:
            raise ValueError("first")

        async def on_error(
            self, error: BaseException, *, connection: Connection | None = None
        ) -> None:
            raise RuntimeError("second")

    async with open_test_kernel(roots=[Worse]) as test:
        failures: list[Any] = []
        test.kernel.subscribe("failure", lambda *event: failures.append(event[3][3]))
        peer = await connect(test, ("Worse", "a"))
        peer.send("x")
        await settle()
        assert [type(f) for f in failures] == [RuntimeError]
        assert peer.closed is not None


@pytest.mark.rule("F-464")
async def test_an_agent_that_answers_no_requests_says_so(clock: object) -> None:
    async with opened() as test:
        await test.kernel.get_agent(Plain, "a")
        visit = await come(test, ("Plain", "a"))
        assert not isinstance(visit, Response)
        answer = await visit.handle()
        assert (answer.status, answer.body) == (404, b"Not implemented")


@AT
@pytest.mark.rule("F-465")
async def test_a_failing_request_tells_an_error_id_and_nothing_else(
    hops: Hops, clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened() as test:
        await come_to(test, hops)
        visit = await come(test, ("Top", "a"), *hops, identity="raise")
        assert not isinstance(visit, Response)
        answer = await visit.handle()
        assert answer.status == 500
        body = answer.body
        assert isinstance(body, bytes)
        for secret in (b"secret-token-9", b"Traceback", b".py", b"ValueError"):
            assert secret not in body
        error_id = body.decode().split("error ")[1].rstrip(")")
        assert error_id in caplog.text, "with it the log tells why"
        assert "secret-token-9" in caplog.text


# ---- subscribers


@pytest.mark.rule("F-467")
@pytest.mark.parametrize("error", [ValueError, SystemExit, GeneratorExit])
async def test_a_listener_that_fails_breaks_nothing(
    error: type[BaseException], clock: object
) -> None:
    heard: list[str] = []

    def listen(channel: str, *_: object) -> None:
        heard.append(channel)
        raise error("a bad listener")

    async with opened() as test:
        test.kernel.subscribe("*", listen)
        root = await test.kernel.get_agent(Top, "a")
        peer = await connect(test, ("Top", "a"))
        peer.rpc("around", "other")
        agent_at(test).set_state(1)
        await settle()
        assert result(peer, "1")
        await agent_at(test).dynamic_agents.abort(Kid, "other")
        await agent_at(test).dynamic_agents.delete(Kid, "other")
        assert await root.whose() == ["a", None, None, None]
        assert peer.connection is not None
        peer.connection.closed(1001, "", was_clean=True)
    assert {
        "spawn", "start", "connect", "rpc", "state:update", "abort", "delete",
        "disconnect",
    } <= set(heard)  # fmt: skip


# ---- what clients are told


@pytest.mark.rule("F-468")
async def test_an_agent_may_keep_its_name_from_its_clients(clock: object) -> None:
    async with opened() as test:
        await test.kernel.get_agent(Quiet, "sesame")
        peer = await connect(test, ("Quiet", "sesame"))
        peer.rpc("hello")
        await settle()
        assert frames_of(peer, "cf_agent_identity") == []
        assert frames_of(peer, "cf_agent_state")[0]["state"] == {"n": 0}
        assert result(peer, "1") == "hello"
        assert "sesame" not in "".join(map(str, peer.out))


# ---- whose is what


@pytest.mark.rule("F-470")
async def test_no_agent_acts_for_another_by_id(clock: object) -> None:
    """The owner of a noun is the node that it was made for, and never an argument."""
    async with opened() as test:
        root = await test.kernel.get_agent(Owner, "a")
        for name in ("mine", "yours"):
            await root.make(name)
        yours = test.find([("Owner", "a"), ("Owner", "yours")])
        mine = test.find([("Owner", "a"), ("Owner", "mine")])
        top = test.find([("Owner", "a")])
        assert yours is not None
        assert mine is not None
        assert top is not None
        schedule, queued = await yours.agent.owe()
        await settle()
        before = owed(yours.agent, schedule, queued)
        assert all(before)
        for other in (mine.agent, top.agent):
            assert not any(owed(other, schedule, queued))
            assert not other.schedules.cancel(schedule)
            assert not other.schedules.run_now(schedule)
            assert not other.schedules.pause(schedule)
            assert not other.queue.remove(queued)
            assert other.queue.clear() == 0
            assert other.fibers.cancel("f") is other.fibers.cancel(key="key") is None
            assert not other.fibers.delete()
            assert (await other.runs.cancel("r")).status is None
            assert await other.runs.clear() == 0
            await other.dynamic_agents.delete(Owner, "below")
            assert other.schedules.list() == other.queue.list() == []
        assert owed(yours.agent, schedule, queued) == before


def owed(agent: Any, schedule: str, queued: str) -> list[Any]:
    run, fiber = agent.runs.get("r"), agent.fibers.inspect("f")
    return [
        agent.schedules.get(schedule),
        agent.queue.get(queued),
        fiber and fiber.status,
        run and run.status,
        agent.dynamic_agents.has(Owner, "below"),
    ]


@pytest.mark.rule("F-470")
def test_no_noun_takes_an_owner() -> None:
    for noun in (
        DynamicAgents, FibersNoun, QueueNoun, RunsNoun, SchedulesNoun, SocketsNoun,
    ):  # fmt: skip
        assert noun.__slots__ == ("_node",)
        for name, method in vars(noun).items():
            names = getattr(method, "__code__", None)
            if name.startswith("_") or names is None:
                continue
            words = set(names.co_varnames[: names.co_argcount])
            assert not words & {"owner", "slot", "path", "node", "parent"}, name


@pytest.mark.rule("F-470")
async def test_a_handle_of_a_stopped_agent_acts_for_nobody(clock: object) -> None:
    async with opened() as test:
        root = await test.kernel.get_agent(Owner, "a")
        await root.make("mine")
        kid = test.find([("Owner", "a"), ("Owner", "mine")])
        assert kid is not None
        schedule, queued = await kid.agent.owe()
        nouns = kid.agent.schedules, kid.agent.queue, kid.agent.runs, kid.agent.fibers
        top = test.find([("Owner", "a")])
        assert top is not None
        await top.agent.dynamic_agents.abort(Owner, "mine")
        schedules, queue, runs, fibers = nouns

        async def act(which: int) -> None:
            match which:
                case 0:
                    schedules.cancel(schedule)
                case 1:
                    queue.remove(queued)
                case 2:
                    await runs.cancel("r")
                case 3:
                    fibers.cancel("f")
                case 4:
                    kid.agent.set_state(1)
                case 5:
                    kid.agent.broadcast("x")

        for which in range(6):
            await raises(CuletError, act, which)
        await top.agent.dynamic_agents.get(Owner, "mine")
        again = test.find([("Owner", "a"), ("Owner", "mine")])
        assert again is not None
        assert all(owed(again.agent, schedule, queued))


@pytest.mark.rule("F-461")
async def test_hooks_of_a_connection_know_whose_it_is(clock: object) -> None:
    class Asks(Agent):
        def should_connection_be_readonly(
            self, connection: Connection, ctx: ConnectContext
        ) -> bool:
            NOTES.append(["asked", *here()])
            return False

        async def on_connect(self, connection: Connection, ctx: ConnectContext) -> None:
            NOTES.append(["connect", *here()])

        def validate_state_change(self, next: Any, source: Any) -> None:  # noqa: A002
            NOTES.append(["validate", *here()])

        async def on_close(
            self, connection: Connection, code: int, reason: str, was_clean: bool
        ) -> None:
            NOTES.append(["close", *here()])

    async with open_test_kernel(roots=[Asks]) as test:
        peer = await connect(test, ("Asks", "a"), identity="ann")
        peer.send({"type": "cf_agent_state", "state": 1})
        await settle()
        assert peer.connection is not None
        peer.connection.closed(1001, "", was_clean=True)
        await settle()
        known = ["a", "c", "GET", "ann"]
        assert NOTES[:3] == [
            ["asked", *known], ["connect", *known], ["validate", *known],
        ]  # fmt: skip
        assert NOTES[3][:3] == ["close", "a", "c"]
