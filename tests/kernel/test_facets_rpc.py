"""Calls of clients: what can be called, what comes back, what of a client that is gone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import trio

from culet.kernel import Agent, Connection, current_agent, rpc
from culet.kernel import Final as FinalValue
from culet.kernel.errors import UsageError
from culet.kernel.testing import Harness, open_test_kernel
from kernel.agents import agent_at, node_at, settle
from kernel.peers import RecordingPeer, connect, frames_of

HEARD: list[Any] = []
AT = pytest.mark.parametrize("hops", [(), (("Top", "k"),)], ids=["root", "facet"])
Hops = tuple[tuple[str, str], ...]


@pytest.fixture(autouse=True)
def fresh() -> None:
    HEARD.clear()


class Point(msgspec.Struct):
    x: int
    tags: list[str] = []


class Base(Agent):
    @rpc(description="from the base")
    async def inherited(self) -> str:
        return "base"

    @rpc
    async def overridden(self) -> str:
        return "base"

    @rpc
    async def unmarked(self) -> str:
        return "base"


class Top(Base):
    @rpc(description="what Top says")
    async def overridden(self) -> str:
        return "top"

    async def unmarked(self) -> str:  # not marked again: no client may call it
        return "top"

    @rpc
    async def echo(self, value: Any) -> Any:
        return value

    @rpc
    async def move(self, point: Point, by: dict[str, int]) -> Point:
        return Point(point.x + by["x"], [*point.tags, "moved"])

    @rpc
    async def nothing(self) -> None:
        HEARD.append("nothing")

    @rpc
    async def maybe(self) -> str | None:
        return None

    @rpc
    async def fails(self, kind: str) -> None:
        if kind == "exit":
            raise SystemExit("secret-token-9")
        raise ValueError("secret-token-9")

    @rpc
    async def wait(self, seconds: float) -> float:
        await trio.sleep(seconds)
        HEARD.append(("waited", seconds))
        return seconds

    @rpc
    async def stream(self, upto: int, end: str) -> AsyncIterator[Any]:
        for i in range(upto):
            yield i
        if end == "raise":
            raise ValueError("secret-token-9")
        if end == "final":
            yield FinalValue({"n": upto})
            yield "never sent"

    @rpc
    async def forever(self) -> AsyncIterator[int]:
        i = 0
        try:
            while True:
                yield i
                i += 1
                await trio.sleep(1)
        finally:
            HEARD.append("stream closed")

    @rpc
    async def whose(self) -> list[Any]:
        here = current_agent()
        assert here is not None
        assert here.connection is not None
        return [self.name, here.connection.id, here.connection.uri, here.identity]

    async def on_message(self, connection: Connection, message: str | bytes) -> None:
        HEARD.append(("message", message))

    async def kid(self) -> None:
        await self.dynamic_agents.get(Top, "k")


def opened() -> Any:
    return open_test_kernel(roots=[Top], facets=[Top])


async def come(test: Harness, hops: Hops = (), **options: Any) -> RecordingPeer:
    await test.kernel.get_agent(Top, "a")
    peer = await connect(test, ("Top", "a"), *hops, **options)
    await settle()
    return peer


def answers(peer: RecordingPeer, call: str) -> list[Any]:
    return [f for f in frames_of(peer, "rpc") if f["id"] == call]


async def called(peer: RecordingPeer, method: str, *args: Any) -> Any:
    """Call and return the one answer."""
    call = f"{method}-{len(peer.out)}"
    peer.rpc(method, *args, call=call)
    await settle()
    (answer,) = answers(peer, call)
    return answer


DEEP: Any = {"list": [1, 2.5, None, [True, {"k": "✓"}]], "text": "a\n\u2028b", "o": {}}


# ---- answers


@AT
@pytest.mark.rule("F-424", "F-422", "W-081", "W-082")
async def test_results_of_every_kind(hops: Hops, clock: object) -> None:
    """A synchronous method is refused when it is marked (`test_rpc_wants_an_async_method`)."""
    async with opened() as test:
        peer = await come(test, hops)
        for value in (DEEP, [], {}, "", 0, False, [None]):
            answer = await called(peer, "echo", value)
            assert (answer["success"], answer["done"]) == (True, True)
            assert answer["result"] == value
        moved = await called(peer, "move", {"x": 1, "tags": ["a"]}, {"x": 2})
        assert moved["result"] == {"x": 3, "tags": ["a", "moved"]}
        for method in ("nothing", "maybe"):
            answer = await called(peer, method)
            assert answer["success"]
            assert answer["done"]
            assert "result" not in answer, "which the clients read as undefined"
        assert HEARD == ["nothing"]


@AT
@pytest.mark.rule("F-425", "W-084")
async def test_what_cannot_be_called_or_fails_is_told_in_public_words(
    hops: Hops, clock: object
) -> None:
    """The texts of exceptions are not public: a client gets an error id, the log the rest."""
    async with opened() as test:
        failures: list[str] = []
        test.kernel.subscribe("failure", lambda *e: failures.append(e[3][0]))
        peer = await come(test, hops)
        absent = await called(peer, "no_such")
        assert absent["error"] == "Method no_such does not exist"
        assert not absent["success"]
        assert (await called(peer, "unmarked"))["error"] == (
            "Method unmarked is not callable"
        )
        for kind in ("value", "exit"):
            answer = await called(peer, "fails", kind)
            assert not answer["success"]
            assert answer["error"] == f"the call failed (error {failures[-1]})"
        assert "secret-token-9" not in "".join(map(str, peer.out))
        assert (await called(peer, "echo", 1))["result"] == 1, "and it goes on"


@pytest.mark.parametrize(
    "frame",
    [
        {"type": "rpc", "id": "1", "method": "echo"},
        {"type": "rpc", "id": "1", "method": "echo", "args": None},
        {"type": "rpc", "id": "1", "method": "echo", "args": {"value": 1}},
        {"type": "rpc", "id": 7, "method": "echo", "args": [1]},
        {"type": "rpc", "id": None, "method": "echo", "args": [1]},
        {"type": "rpc", "id": "1", "method": None, "args": [1]},
        {"type": "rpc"},
    ],
)
@pytest.mark.rule("F-426", "W-080")
async def test_what_is_not_quite_a_call_is_a_message(frame: Any, clock: object) -> None:
    async with opened() as test:
        peer = await come(test)
        peer.send(frame)
        await settle()
        assert frames_of(peer, "rpc") == []
        ((what, text),) = HEARD
        assert what == "message"
        assert msgspec.json.decode(text) == frame
        assert (await called(peer, "echo", 1))["result"] == 1


@AT
@pytest.mark.rule("F-427", "W-087")
async def test_calls_do_not_wait_for_each_other(hops: Hops, clock: object) -> None:
    async with opened() as test:
        peer = await come(test, hops)
        for seconds in (3, 1, 2):
            peer.rpc("wait", seconds, call=str(seconds))
        await test.advance(5)
        assert [f["id"] for f in frames_of(peer, "rpc")] == ["1", "2", "3"]


# ---- streams


@AT
@pytest.mark.rule("F-428", "F-430", "W-083", "W-085")
@pytest.mark.parametrize("end", ["final", "stop", "raise"])
async def test_a_stream_says_its_values_in_order_and_how_it_ended(
    end: str, hops: Hops, clock: object
) -> None:
    """A generator has one end by nature: there is no closing twice, no send after it."""
    async with opened() as test:
        peer = await come(test, hops)
        peer.rpc("stream", 3, end)
        await settle()
        *values, last = answers(peer, "1")
        assert [(f["success"], f["result"], f["done"]) for f in values] == [
            (True, i, False) for i in range(3)
        ]
        if end == "raise":
            assert not last["success"]
            assert "secret-token-9" not in last["error"]
        else:
            assert (last["success"], last["done"]) == (True, True)
            assert last.get("result") == ({"n": 3} if end == "final" else None)


@AT
@pytest.mark.rule("F-429", "W-088")
async def test_a_client_that_is_gone_before_the_answer_is_no_error(
    hops: Hops, clock: object
) -> None:
    """Its call goes on to the end, its stream is closed: nobody could ever stop it."""
    async with opened() as test:
        failures: list[Any] = []
        test.kernel.subscribe("failure", lambda *event: failures.append(event))
        peer = await come(test, hops)
        peer.rpc("wait", 3, call="w")
        peer.rpc("forever", call="f")
        await test.advance(1.5)
        assert peer.connection is not None
        said = len(peer.out)
        peer.connection.closed(1006, "", was_clean=False)
        await test.advance(10)
        assert sorted(map(str, HEARD)) == ["('waited', 3.0)", "stream closed"]
        assert failures == []
        assert len(peer.out) == said
        assert node_at(test, *hops).calls == {}, "nothing of it goes on"


# ---- what is callable


@pytest.mark.rule("F-431", "F-432")
async def test_marks_are_inherited_and_an_override_speaks_for_itself(
    clock: object,
) -> None:
    async with opened() as test:
        peer = await come(test)
        assert (await called(peer, "inherited"))["result"] == "base"
        assert (await called(peer, "overridden"))["result"] == "top"
        assert not (await called(peer, "unmarked"))["success"]
        about = agent_at(test).get_callable_methods()
        assert about["inherited"] == ("from the base", False)
        assert about["overridden"] == ("what Top says", False)
        assert about["echo"] == (None, False)
        assert about["stream"].streaming
        assert "unmarked" not in about


@pytest.mark.rule("F-431")
async def test_two_methods_under_one_name_are_refused() -> None:
    class Both(Base):
        @rpc(name="inherited")
        async def other(self) -> str:
            return "other"

    with pytest.raises(UsageError, match="both inherited and other 'inherited'"):
        async with open_test_kernel(roots=[Both]):
            pytest.fail("it opened")


@AT
@pytest.mark.rule("F-436", "F-470", "W-086")
async def test_no_member_of_an_agent_can_be_called(hops: Hops, clock: object) -> None:
    async with opened() as test:
        peer = await come(test, hops)
        agent = agent_at(test, *hops)
        before = (agent.state, test.kernel.metrics()["nodes"])
        names = {*dir(Agent), *dir(type(agent)), *vars(agent), "kid"}
        names -= {*test.kernel.classes.known["Top"].rpc}
        assert {
            "set_state",
            "destroy",
            "schedule",
            "sql",
            "_begin",
            "__init__",
        } <= names
        for name in sorted(names):
            for args in ([], [{}], ["x", 1]):
                answer = await called(peer, name, *args)
                assert not answer["success"], name
                assert answer["error"].startswith(f"Method {name} ")
        assert (agent.state, test.kernel.metrics()["nodes"]) == before


@AT
@pytest.mark.rule("F-435")
async def test_a_call_knows_its_client(hops: Hops, clock: object) -> None:
    async with opened() as test:
        one = await come(test, hops, identity="ann")
        two = await come(test, hops, label="d", identity="bob")
        name = "k" if hops else "a"
        for peer, label, who in ((one, "c", "ann"), (two, "d", "bob")):
            assert peer.connection is not None
            expected = [name, label, peer.connection.uri, who]
            assert (await called(peer, "whose"))["result"] == expected


# ---- told to subscribers


@AT
@pytest.mark.rule("F-433")
async def test_calls_and_failures_are_events(hops: Hops, clock: object) -> None:
    async with opened() as test:
        events: list[Any] = []

        def listen(channel: str, _tree: Any, slot: Any, detail: Any) -> None:
            events.append((channel, slot, detail["method"], detail["streaming"]))

        for channel in ("rpc", "rpc:error"):
            test.kernel.subscribe(channel, listen)
        peer = await come(test, hops)
        await called(peer, "echo", 1)
        await called(peer, "fails", "value")
        await called(peer, "no_such")
        peer.rpc("stream", 1, "final")
        peer.rpc("stream", 1, "raise")
        await settle()
        slot = node_at(test, *hops).slot
        assert events[:3] == [
            ("rpc", slot, "echo", False),
            ("rpc:error", slot, "fails", False),
            ("rpc:error", slot, "no_such", False),
        ]
        assert sorted(events[3:]) == [
            ("rpc", slot, "stream", True), ("rpc:error", slot, "stream", True),
        ]  # fmt: skip
