"""Clients: identity, state, calls, messages, and runs live or replayed; the gate."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio

from culet.kernel import (
    Agent,
    AgentToolEvents,
    ChildRef,
    ConnectContext,
    Connection,
    Request,
    Response,
    apply_agent_tool_event,
    current_agent,
    rpc,
)
from culet.kernel import Final as FinalValue
from culet.kernel.errors import StorageError
from culet.kernel.testing import ScriptedChild, open_test_kernel
from kernel.agents import agent_at, settle, tree_of
from kernel.peers import RecordingPeer, come, connect, frames_of

HEARD: list[Any] = []


@pytest.fixture(autouse=True)
def fresh() -> None:
    HEARD.clear()


class Kid(ScriptedChild):
    initial_state = None

    async def on_connect(self, connection: Connection, ctx: ConnectContext) -> None:
        connection.send(f"kid {self.name}")


class Loose(Agent):
    async def on_start(self) -> None:
        HEARD.append("start")


class Broken(Agent):
    async def on_start(self) -> None:
        raise ValueError("secret-token-9")


class Top(Agent):
    initial_state = {"n": 0}

    async def on_connect(self, connection: Connection, ctx: ConnectContext) -> None:
        connection.send("welcome")

    async def on_message(self, connection: Connection, message: str | bytes) -> None:
        if message == "bad":
            raise ValueError("secret-token-9")
        HEARD.append(message)
        connection.send(message)

    async def on_close(
        self, connection: Connection, code: int, reason: str, was_clean: bool
    ) -> None:
        HEARD.append((code, reason, was_clean))

    async def on_before_sub_agent(
        self, request: Request, child: ChildRef
    ) -> Request | Response | None:
        match child.name:
            case "forbidden":
                return Response("no", 403)
            case "raises":
                raise ValueError("secret-token-9")
            case "nonsense":
                return 7  # type: ignore[return-value]
        return self._default_gate(child)

    async def on_request(self, request: Request) -> Response:
        self.note("request")
        return Response.json({"path": request.path})

    def should_connection_be_readonly(
        self, connection: Connection, ctx: ConnectContext
    ) -> bool:
        return bool(ctx.identity == "reader")

    def should_send_protocol_messages(
        self, connection: Connection, ctx: ConnectContext
    ) -> bool:
        return bool(ctx.identity != "raw")

    def get_connection_tags(
        self, connection: Connection, ctx: ConnectContext
    ) -> list[str]:
        return ["all", str(ctx.identity)]

    def validate_state_change(self, next: Any, source: Any) -> None:  # noqa: A002
        if "bad" in next:
            raise ValueError("secret-token-9")
        if "leave" in next:
            raise SystemExit("secret-token-9")

    async def on_state_changed(self, state: Any, source: Any) -> None:
        HEARD.append(("state", state, source == "server"))

    def note(self, text: str) -> None:
        self.sql("create table if not exists t (v)")
        self.sql("insert into t values (?)", text)

    @rpc
    async def add(self, a: int, b: int = 1) -> int:
        self.note("add")
        return a + b

    @rpc
    async def fails(self) -> None:
        raise ValueError("secret-token-9")

    @rpc(name="countTo")
    async def count(self, n: int) -> AsyncIterator[Any]:
        for i in range(n):
            yield i
        yield FinalValue("end")

    @rpc
    async def who(self) -> list[Any]:
        here = current_agent()
        assert here is not None
        return [here.identity, here.connection.id if here.connection else None]

    @rpc
    async def append(self, text: str) -> None:
        HEARD.append(text)

    @rpc
    async def slow(self) -> None:
        await trio.sleep(100)

    async def hidden(self) -> str:
        return "no"

    async def run(self, script: list[list[Any]], run_id: str) -> str:
        return (await self.run_agent_tool(Kid, script, run_id=run_id)).status


def opened(**options: Any) -> Any:
    return open_test_kernel(roots=[Top], facets=[Kid, Loose, Broken], **options)


# ---- hello


@pytest.mark.rule("W-042")
async def test_a_client_is_told_who_it_talks_to_then_the_hook_speaks(
    clock: object,
) -> None:
    async with opened() as test:
        peer = await connect(test)
        await settle()
        types = [json.loads(t)["type"] for t in peer.out[:-1]]
        assert types == [
            "cf_agent_identity", "cf_agent_state", "cf_agent_mcp_servers",
        ]  # fmt: skip
        assert peer.out[-1] == "welcome"


@pytest.mark.rule("F-235", "F-420")
async def test_a_client_without_protocol_gets_messages_only(clock: object) -> None:
    async with opened() as test:
        raw = await connect(test, identity="raw")
        peer = await connect(test, label="p")
        assert raw.out == ["welcome"]
        agent_at(test).broadcast("to all")
        agent_at(test).set_state({"n": 5})
        await settle()
        assert raw.out == ["welcome", "to all"]
        assert peer.out[-2] == "to all"


# ---- state


@pytest.mark.rule("F-417")
async def test_state_is_stored_and_told_to_all(clock: object) -> None:
    async with opened() as test:
        one, two = await connect(test), await connect(test, label="d")
        one.send({"type": "cf_agent_state", "state": {"n": 7}})
        await settle()
        assert [s.get("state") for s in states(two)] == [{"n": 0}, {"n": 7}]
        assert [s.get("state") for s in states(one)] == [{"n": 0}], "not to its sender"
        assert ("state", {"n": 7}, False) in HEARD
        await test.crash()
        await test.reopen()
        await test.kernel.get_agent(Top, "a")
        assert agent_at(test).state == {"n": 7}


def states(peer: RecordingPeer) -> list[Any]:
    return frames_of(peer, "cf_agent_state")


@pytest.mark.parametrize("key", ["bad", "leave"])
@pytest.mark.parametrize("identity", ["reader", "writer"])
@pytest.mark.rule("F-414", "F-418", "W-072")
async def test_a_refused_state_is_answered_with_the_true_one(
    identity: str, key: str, clock: object
) -> None:
    async with opened() as test:
        peer = await connect(test, identity=identity)
        peer.send({"type": "cf_agent_state", "state": {key: 1}})
        await settle()
        assert agent_at(test).state == {"n": 0}
        assert "cf_agent_state_error" in "".join(map(str, peer.out))
        assert "secret-token-9" not in "".join(map(str, peer.out))


async def test_a_state_that_is_no_json_is_refused(clock: object) -> None:
    async with opened() as test:
        await connect(test)
        with pytest.raises(Exception, match="JSON"):
            agent_at(test).set_state({"x": object()})
        assert agent_at(test).state == {"n": 0}


# ---- calls


@pytest.mark.rule("F-425", "F-436")
async def test_rpc_answers_and_refusals(clock: object) -> None:
    async with opened() as test:
        peer = await connect(test, identity="me")
        calls: list[tuple[str, list[Any]]] = [
            ("add", [1, 2]), ("add", [1]), ("add", ["x"]), ("add", []),
            ("hidden", []), ("note", ["x"]), ("nothing", []), ("fails", []),
            ("who", []), ("set_state", [{}]),
        ]  # fmt: skip
        for number, (method, args) in enumerate(calls):
            peer.rpc(method, *args, call=str(number))
        await settle()
        answers = [only_answer(peer, str(n)) for n in range(len(calls))]
        assert [a["success"] for a in answers] == [
            True, True, False, False, False, False, False, False, True, False,
        ]  # fmt: skip
        assert [answers[0]["result"], answers[1]["result"]] == [3, 2]
        assert answers[8]["result"] == ["me", "c"]
        assert "is not callable" in answers[4]["error"]
        assert "does not exist" in answers[6]["error"]
        assert "secret-token-9" not in "".join(map(str, peer.out))


def only_answer(peer: RecordingPeer, call: str) -> Any:
    (answer,) = rpc_frames(peer, call)
    return answer


def rpc_frames(peer: RecordingPeer, call: str) -> list[Any]:
    return [f for f in frames_of(peer, "rpc") if f["id"] == call]


@pytest.mark.rule("F-428")
async def test_a_streaming_rpc(clock: object) -> None:
    async with opened() as test:
        peer = await connect(test)
        peer.rpc("countTo", 3)
        await settle()
        frames = rpc_frames(peer, "1")
        assert [f["result"] for f in frames] == [0, 1, 2, "end"]
        assert [f.get("done") for f in frames] == [False, False, False, True]


@pytest.mark.rule("F-475", "W-052", "W-060")
async def test_an_answer_waits_for_the_disk(clock: object) -> None:
    async with opened() as test:
        peer = await connect(test)
        tree = tree_of(test)
        test.faults.fail_record(1)
        peer.rpc("add", 1, 2)
        await settle()
        assert rpc_frames(peer, "1") == [], "nothing that a crash could take back"
        assert peer.closed == (1011, "restart")
        assert tree_of(test) is not tree
        again = await connect(test)
        again.rpc("add", 1, 2)
        await settle()
        assert only_answer(again, "1")["result"] == 3


async def test_calls_of_one_client_begin_in_their_order(clock: object) -> None:
    async with opened() as test:
        peer = await connect(test)
        for i in range(8):
            peer.rpc("append", str(i), call=str(i))
        await settle()
        assert [str(i) for i in range(8)] == HEARD


@pytest.mark.rule("HB-37", "F-463", "F-465", "W-060")
async def test_an_error_in_a_handler_closes_1011_and_tells_nothing(
    clock: object,
) -> None:
    async with opened() as test:
        peer, other = await connect(test), await connect(test, label="o")
        peer.send("bad")
        await settle()
        assert peer.closed is not None
        assert peer.closed[0] == 1011
        assert "secret-token-9" not in peer.closed[1]
        other.send("hello")
        await settle()
        assert other.out[-1] == "hello"


@pytest.mark.rule("W-051")
async def test_messages_come_in_order_and_wake_a_sleeper(clock: object) -> None:
    async with opened() as test:
        peer = await connect(test)
        node = tree_of(test).nodes[tree_of(test).root_slot]
        assert await tree_of(test).evict(node)
        for i in range(5):
            peer.send(f"m{i}")
        await settle()
        assert [m for m in HEARD if isinstance(m, str)] == [f"m{i}" for i in range(5)]


async def test_a_client_that_is_gone_is_forgotten_and_told_of(clock: object) -> None:
    async with opened() as test:
        peer = await connect(test)
        assert peer.connection is not None
        assert len(agent_at(test).sockets.list("all")) == 1
        peer.connection.closed(1001, "bye", was_clean=True)
        peer.connection.closed(1006, "", was_clean=False)
        peer.connection.send("late")
        await settle()
        assert HEARD == [(1001, "bye", True)]
        assert agent_at(test).sockets.list() == []
        assert agent_at(test).sockets.get("c") is None


@pytest.mark.rule("F-065")
async def test_deleting_a_facet_closes_its_clients(clock: object) -> None:
    async with opened() as test:
        await test.kernel.get_agent(Top, "a")
        await agent_at(test).dynamic_agents.get(Kid, "k")
        peer = await connect(test, ("Top", "a"), ("Kid", "k"))
        await agent_at(test).dynamic_agents.delete(Kid, "k")
        await settle()
        assert peer.closed == (4410, "deleted")


# ---- runs


@pytest.mark.rule("I-17", "T-065", "T-066", "T-226", "T-229", "T-230", "T-235")
@pytest.mark.rule("W-202", "W-209")
@pytest.mark.parametrize("after", [0, 1.5, 3.5, 99])
async def test_whenever_a_client_comes_it_sees_the_same(
    after: float, clock: object
) -> None:
    async with opened() as test:
        root = await test.kernel.get_agent(Top, "a")
        first = await connect(test)
        script = [step for i in range(5) for step in (["say", str(i)], ["sleep", 1])]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(root.run, script, "r")
            await test.advance(after)
            late = await connect(test, label="late")
        await test.advance(1)
        assert numbers(first) == numbers(late) == list(range(12))
        assert folded(first) == folded(late)


def run_frames(peer: RecordingPeer) -> list[Any]:
    return frames_of(peer, "agent-tool-event")


def numbers(peer: RecordingPeer) -> list[int]:
    return [f["sequence"] for f in run_frames(peer)]


def folded(peer: RecordingPeer) -> Any:
    state = AgentToolEvents.empty()
    for frame in run_frames(peer):
        state = apply_agent_tool_event(state, frame)
    return state.to_json()


@pytest.mark.rule("HB-27", "kernel-mini-6")
async def test_a_client_over_a_crash_equals_a_fresh_one(clock: object) -> None:
    async with opened() as test:
        root = await test.kernel.get_agent(Top, "a")
        script = [step for i in range(4) for step in (["say", str(i)], ["sleep", 1])]
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                with pytest.raises(StorageError):
                    await root.run(script, "r")

            nursery.start_soon(ask)
            old = await connect(test)
            await test.advance(2.5)
            await test.crash()
        await test.reopen()
        await test.kernel.get_agent(Top, "a")
        again = await connect(test)
        await test.advance(10)
        fresh_one = await connect(test, label="f")
        assert numbers(again) == numbers(fresh_one) == list(range(10))
        both = run_frames(old) + run_frames(again)
        state = AgentToolEvents.empty()
        for frame in both:
            state = apply_agent_tool_event(state, frame)
        assert state.to_json() == folded(fresh_one)


async def test_a_settled_run_that_is_not_durable_is_not_shown(clock: object) -> None:
    """Flaw 6: a stream that is read late publishes only what is durable."""
    async with opened() as test:
        root = await test.kernel.get_agent(Top, "a")
        script: list[list[Any]] = [["say", "x"], ["sleep", 5]]
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                with pytest.raises((StorageError, trio.Cancelled)):
                    await root.run(script, "r")

            nursery.start_soon(ask)
            await test.advance(1)
            await test.crash()
            nursery.cancel_scope.cancel()
        await test.reopen()
        await test.kernel.get_agent(Top, "a")
        tree = tree_of(test)
        tree.runs.cancel(tree.root_slot, "r", "now")
        peer = await connect(test)
        seen = numbers(peer)
        await test.crash()
        await test.reopen()
        await test.kernel.get_agent(Top, "a")
        await test.advance(10)
        fresh_one = await connect(test, label="f")
        assert numbers(fresh_one)[: len(seen)] == seen
        shown = {f["sequence"]: f["event"] for f in run_frames(fresh_one)}
        for frame in run_frames(peer):
            assert shown[frame["sequence"]] == frame["event"]


@pytest.mark.rule("I-10", "W-213")
async def test_refused_runs_show_under_an_id_that_is_never_stored(
    clock: object,
) -> None:
    async with opened() as test:
        await test.kernel.get_agent(Top, "a")
        peer = await connect(test)
        me = agent_at(test)
        me.__class__.max_concurrent_agent_tools = 0
        try:
            run = await me.run_agent_tool(Kid, [], run_id="real")
        finally:
            me.__class__.max_concurrent_agent_tools = None
        assert (run.status, run.reason, run.retryable) == ("error", "capacity", True)
        await settle()
        frames = run_frames(peer)
        assert [f["event"]["kind"] for f in frames] == ["started", "error"]
        ids = {f["event"]["runId"] for f in frames}
        assert len(ids) == 1
        assert ids != {"real"}
        assert (await me.run_agent_tool(Kid, [], run_id="real")).status == "completed"


# ---- the way in


async def status(test: Any, *hops: tuple[str, str], **options: Any) -> int:
    found = await come(test, *hops, **options)
    return found.status if isinstance(found, Response) else 200


@pytest.mark.rule("I-22", "F-44", "T-240")
async def test_gates_and_what_they_answer(clock: object) -> None:
    async with opened() as test:
        top = ("Top", "a")
        assert await status(test, top) == 200
        assert await status(test, top, ("Loose", "new")) == 200
        assert await status(test, top, ("Loose", "forbidden")) == 403
        assert await status(test, top, ("Loose", "raises")) == 500
        assert await status(test, top, ("Loose", "nonsense")) == 500
        assert await status(test, top, ("Nothing", "x")) == 404
        assert await status(test, ("Nothing", "x")) == 404
        assert await status(test, top, ("Broken", "b")) == 503
        assert await status(test, top, ("Loose", "..")) == 400
        deep = [("Loose", str(i)) for i in range(4)]
        assert await status(test, top, *deep) == 400
        assert await status(test, top, ("Loose", "absent"), ("Loose", "x")) == 404
        names = [c.name for c in agent_at(test).dynamic_agents.list()]
        assert names == ["new"], "what was refused was not made"


@pytest.mark.rule("I-22", "F-42", "B-13", "T-241")
async def test_a_guessed_run_id_is_404_and_makes_nothing(clock: object) -> None:
    async with opened() as test:
        root = await test.kernel.get_agent(Top, "a")
        await root.run([["say", "x"]], "real")
        before = tree_of(test).db.execute("SELECT count(*) FROM node")
        assert await status(test, ("Top", "a"), ("Kid", "guess")) == 404
        assert await status(test, ("Top", "a"), ("Kid", "real")) == 200
        assert tree_of(test).db.execute("SELECT count(*) FROM node") == before


async def test_an_absent_root_below_a_path_is_not_made(clock: object) -> None:
    async with opened() as test:
        assert await status(test, ("Top", "ghost"), ("Loose", "x")) == 404
        assert test.kernel.metrics()["trees"] == 0
        assert HEARD == []


@pytest.mark.rule("I-22")
async def test_the_root_gate_comes_before_the_root(clock: object) -> None:
    async def admit(request: Request, root: Any) -> Response:
        return Response("no", 401)

    async with opened() as test:
        assert await status(test, ("Top", "a"), admit=admit) == 401
        assert test.kernel.metrics()["trees"] == 0


@pytest.mark.rule("F-475")
async def test_an_http_answer_is_durable(clock: object) -> None:
    async with opened() as test:
        found = await come(test)
        assert not isinstance(found, Response)
        answer = await found.handle()
        assert (answer.status, answer.body) == (200, b'{"path":"/"}')
        await test.crash()
        await test.reopen()
        await test.kernel.get_agent(Top, "a")
        assert len(agent_at(test).sql("select * from t")) == 1
