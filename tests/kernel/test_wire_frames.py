"""The frames of a conversation without a socket, as docs/wire.md tells them to clients."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import pytest

from culet.kernel import Agent, rpc
from culet.kernel.errors import Refused, StorageFull, UsageError, UserError
from culet.kernel.testing import open_test_kernel
from kernel.agents import agent_at, settle
from kernel.peers import RecordingPeer, connect, frames_of


class Top(Agent):
    """Has a state, and hears no messages."""

    initial_state: ClassVar[Any] = {"n": 0}
    refuses: ClassVar[Exception | None] = None

    def validate_state_change(self, next: Any, source: Any) -> None:  # noqa: A002
        if self.refuses is not None:
            raise self.refuses

    @rpc
    async def ping(self, text: str, more: int = 0) -> str:
        return text

    @rpc
    async def read(self) -> Any:
        return self.state

    @rpc
    async def full(self) -> None:
        raise StorageFull("the file /secret/name is full")

    @rpc
    async def no_json(self) -> Any:
        return object()


class Listener(Top):
    """Sends back what is for the app."""

    async def on_message(self, connection: Any, message: str | bytes) -> None:
        connection.send(message)


def opened() -> Any:
    return open_test_kernel(roots=[Top, Listener])


async def come(test: Any, kind: str = "Top", label: str = "c") -> RecordingPeer:
    peer: RecordingPeer = await connect(test, (kind, "a"), label=label)
    await settle()
    return peer


async def said(peer: RecordingPeer, *messages: Any) -> list[Any]:
    """Send messages; return what was sent back for them."""
    before = len(peer.out)
    for message in messages:
        peer.send(message)
    await settle()
    return peer.out[before:]


ORDINARY = [
    "plain text",
    '{"type":"unknown","n":1}',
    '{"type":"cf_agent_state"}',
    '{"type":"cf_agent_identity","name":"x","agent":"y"}',
    '{"type":"cf_mcp_agent_event"}',
    '{"type":"cf_agent_session"}',
    '{"type":"rpc","id":"1","method":"ping"}',
    "[]",
    "7",
    "",
    b"\x00\xff",
    b'{"type":"rpc","id":"1","method":"ping","args":["x"]}',
    b'{"type":"cf_agent_state","state":{"n":9}}',
]


@pytest.mark.rule("W-073", "W-080", "W-089")
@pytest.mark.parametrize("message", ORDINARY, ids=range(len(ORDINARY)))
async def test_what_is_no_frame_is_for_the_app_which_ignores_it_by_default(
    message: str | bytes, clock: object
) -> None:
    async with opened() as test:
        assert await said(await come(test, "Listener"), message) == [message]
        quiet = await come(test)
        assert await said(quiet, message) == []
        assert quiet.closed is None
        assert agent_at(test).state == {"n": 0}


@pytest.mark.rule("W-070", "W-074")
@pytest.mark.parametrize("value", [None, 0, "", [], {"deep": [{"ü": None}]}])
async def test_any_json_is_a_state_and_only_the_others_are_told(
    value: Any, clock: object
) -> None:
    async with opened() as test:
        one, two = await come(test), await come(test, label="d")
        before = len(two.out)
        assert await said(one, {"type": "cf_agent_state", "state": value}) == []
        assert [json.loads(text) for text in two.out[before:]] == [
            {"type": "cf_agent_state", "state": value}
        ]
        late = await come(test, label="e")
        assert frames_of(late, "cf_agent_state")[0]["state"] == value
        assert frames_of(late, "cf_agent_identity")[0]["stateFollows"] is True


@pytest.mark.rule("W-075")
async def test_who_asks_for_an_echo_hears_its_own_change_among_those_of_others(
    clock: object,
) -> None:
    async with opened() as test:
        one, two = await come(test), await come(test, label="d")
        before = len(one.out)
        one.send({"type": "cf_agent_state", "state": 1, "echo": True})
        two.send({"type": "cf_agent_state", "state": 2})
        one.send({"type": "cf_agent_state", "state": 3, "echo": True})
        await settle()
        assert [json.loads(text) for text in one.out[before:]] == [
            {"type": "cf_agent_state", "state": 1, "echo": True},
            {"type": "cf_agent_state", "state": 2},
            {"type": "cf_agent_state", "state": 3, "echo": True},
        ]
        assert [f["state"] for f in frames_of(two, "cf_agent_state")][-2:] == [1, 3]


@pytest.mark.rule("W-072")
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (Refused("only even numbers"), "only even numbers"),
        (UserError("not now"), "not now"),
        (UsageError("inner words"), "State update rejected"),
        (ValueError("inner words"), "State update rejected"),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_a_refused_state_is_answered_with_words_then_with_the_one_that_holds(
    error: Exception, told: str, clock: object
) -> None:
    async with opened() as test:
        peer, other = await come(test), await come(test, label="d")
        Top.refuses = error
        try:
            heard = await said(peer, {"type": "cf_agent_state", "state": {"n": 1}})
        finally:
            Top.refuses = None
        assert [json.loads(text) for text in heard] == [
            {"type": "cf_agent_state_error", "error": told},
            {"type": "cf_agent_state", "state": {"n": 0}},
        ]
        assert len(frames_of(other, "cf_agent_state")) == 1


@pytest.mark.rule("W-051")
async def test_a_state_is_taken_at_once_and_calls_begin_behind_it(
    clock: object,
) -> None:
    async with opened() as test:
        peer = await come(test)

        def call(name: str) -> dict[str, Any]:
            return {"type": "rpc", "id": name, "method": "read", "args": []}

        for n, name in enumerate(["a", "b", "c"], 1):
            peer.send({"type": "cf_agent_state", "state": {"n": n}})
            peer.send(call(name))
            await settle()
        assert {f["id"]: f["result"]["n"] for f in frames_of(peer, "rpc")} == {
            "a": 1, "b": 2, "c": 3,
        }  # fmt: skip
        peer.send(call("before"))
        peer.send({"type": "cf_agent_state", "state": {"n": 9}})
        await settle()
        (answer,) = [f for f in frames_of(peer, "rpc") if f["id"] == "before"]
        assert answer["result"] == {"n": 9}, "a call that has not begun yet sees it too"


@pytest.mark.rule("W-084")
async def test_what_is_told_of_a_call_that_could_not_be_made(clock: object) -> None:
    async with opened() as test:
        peer = await come(test)
        told = {}
        for method, args in [
            ("nothing", []), ("on_message", []), ("ping", []), ("ping", ["a", 1, 2]),
            ("ping", [7]), ("full", []), ("no_json", []),
        ]:  # fmt: skip
            call = f"{method}{args}"
            (text,) = await said(
                peer, {"type": "rpc", "id": call, "method": method, "args": args}
            )
            answer = json.loads(text)
            assert set(answer) == {"type", "id", "success", "error"}
            assert answer["success"] is False
            told[call] = answer["error"]
        assert told["nothing[]"] == "Method nothing does not exist"
        assert told["on_message[]"] == "Method on_message is not callable"
        for call in ("ping[]", "ping['a', 1, 2]", "ping[7]"):
            assert "Top.ping" in told[call], "which method, and what it wanted"
        assert told["full[]"].startswith("the storage is full (error ")
        assert told["no_json[]"].startswith("the call failed (error ")
        assert "secret" not in str(told)


@pytest.mark.rule("W-090")
async def test_each_frame_of_the_protocol_is_one_object_of_json_with_a_type(
    clock: object,
) -> None:
    async with opened() as test:
        peer = await come(test)
        await said(
            peer,
            {"type": "rpc", "id": "1", "method": "ping", "args": ["x\n\u2028☃"]},
            {"type": "rpc", "id": "2", "method": "nothing", "args": []},
        )
        agent_at(test).set_state({"text": "a\r\nb"})
        await settle()
        assert len(peer.out) == 6
        for text in peer.out:
            assert isinstance(text, str)
            assert isinstance(json.loads(text)["type"], str)
            assert "\n" not in text


@pytest.mark.rule("W-061")
async def test_a_reserved_code_is_refused_where_it_is_given(clock: object) -> None:
    async with opened() as test:
        peer = await come(test)
        connection = peer.connection
        assert connection is not None
        codes: list[Any] = [1004, 1005, 1006, 1015, 0, 2000, 5000, "1000", 1000.0]
        for code in codes:
            with pytest.raises(UsageError, match="1000 to 1014 or 3000 to 4999"):
                connection.close(code)
        assert peer.closed is None
        connection.close(4000, "half a \ud800 letter")
        await settle()
        assert peer.closed == (4000, "half a ? letter")
