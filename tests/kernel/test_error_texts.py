"""What an exception in an agent's code says stays with us: the wire gets an error id.

Whatever raises, and wherever: no text of it, no path, no SQL and no stack is in what a
client gets; an id is, and the log has the whole under it. A `UserError` goes out as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from culet.kernel import Agent, Request, Response, Retry, Turn, rpc
from culet.kernel import errors as all_errors
from culet.kernel.errors import (
    CallFailed,
    ConnectionEnded,
    ConnectionLost,
    CuletError,
    EffectFailed,
    EffectUncertain,
    FacetBroken,
    InternalError,
    SqlError,
    UserError,
    is_told,
)
from culet.kernel.testing import Harness, open_test_kernel
from culet.kernel.visits import Visit, error_response
from culet.web.gateway import opened as opened_by_gateway
from kernel.agents import agent_at
from kernel.peers import RecordingPeer, come, connect, frames_of

SECRET = "canary-e41b"
TEXT = f"{SECRET} in /srv/app/secret.py: SELECT * FROM users WHERE key = '{SECRET}'"
PUBLIC = "your card has expired"
ID = re.compile(r"error (\w{8,})")
RAISED: dict[str, Exception] = {
    "plain": ValueError(TEXT),
    "sql": SqlError(TEXT, TEXT),
    "broken": FacetBroken(TEXT),
    "bug": InternalError(TEXT),
    "effect": EffectFailed(TEXT, "1"),
    "unsure": EffectUncertain(TEXT),
    "remote": CallFailed(TEXT),
    "lost": ConnectionLost(TEXT),
    "group": ExceptionGroup(TEXT, [ValueError(TEXT)]),
    "public": UserError(PUBLIC, status=402),
}
HIDDEN = sorted(set(RAISED) - {"public"})


class Kid(Agent):
    async def on_turn(self, turn: Turn) -> AsyncIterator[dict[str, Any]]:
        yield {"type": "text-delta", "id": "t", "delta": "so far"}
        raise RAISED[turn.input]


class Mute(Kid):
    async def on_turn(self, turn: Turn) -> AsyncIterator[Any]:
        yield [SECRET]


class Unborn(Kid):
    async def on_start(self) -> None:
        raise ValueError(TEXT)


class Odd(Kid):
    async def on_turn(self, turn: Turn) -> AsyncIterator[dict[str, Any]]:
        turn.output = {"n": SECRET}
        yield {"type": "text-delta", "id": "t", "delta": "so far"}


class Top(Agent):
    """Raises what it is asked to, wherever an agent's code runs."""

    initial_state = {"n": 0}

    @rpc
    async def call(self, what: str) -> None:
        raise RAISED[what]

    @rpc
    async def stream(self, what: str) -> AsyncIterator[int]:
        yield 1
        raise RAISED[what]

    @rpc
    async def below(self, what: str) -> None:
        kid = await self.dynamic_agents.get(Caller, "c")
        await kid.call(what)

    @rpc
    async def later(self, what: str) -> str:
        once = Retry(max_attempts=1)
        return (await self.schedule(0, "ring", what, retry=once)).id

    async def ring(self, payload: str, schedule: Any) -> None:
        raise RAISED[payload]

    @rpc
    async def fiber(self, what: str) -> None:
        async def fails() -> None:
            raise RAISED[what]

        await self.run_fiber("f", fails)

    @rpc
    async def query(self, text: str) -> None:
        self.sql(text)

    async def on_connect(self, connection: Any, ctx: Any) -> None:
        if "raise" in ctx.request.query:
            raise RAISED[ctx.request.query["raise"]]

    async def on_message(self, connection: Any, message: Any) -> None:
        raise RAISED[message]

    async def on_request(self, request: Request) -> Response:
        if request.query["raise"] == "no response":
            return {"told": SECRET}  # type: ignore[return-value]
        raise RAISED[request.query["raise"]]

    def validate_state_change(self, next: Any, source: Any) -> None:  # noqa: A002
        if source != "server":
            raise RAISED[next["raise"]]


class Caller(Agent):
    async def call(self, what: str) -> None:
        raise RAISED[what]


def opened() -> Any:
    return open_test_kernel(roots=[Top], facets=[Kid, Mute, Unborn, Odd, Caller])


def logged(caplog: pytest.LogCaptureFixture, error_id: str) -> str:
    """Return what the log has under an id: the message, and the traceback."""
    found = [r for r in caplog.records if error_id in r.getMessage()]
    assert found, f"nothing is logged under {error_id}"
    return caplog.handler.format(found[0])


def check_hidden(
    told: Any, caplog: pytest.LogCaptureFixture, *, text: str = SECRET
) -> None:
    """What a client got has no text of ours and an id that the log has."""
    shown = told if isinstance(told, str) else json.dumps(told)
    assert SECRET not in shown
    assert "/srv" not in shown
    assert "SELECT" not in shown
    assert "Traceback" not in shown
    found = ID.search(shown)
    assert found, f"no error id: {shown}"
    assert text in logged(caplog, found[1])


async def reached(test: Harness, what: str) -> Visit:
    """Come with a request or socket that is to raise that."""
    found = await come(test, query=f"raise={what}")
    assert isinstance(found, Visit)
    return found


async def connected(test: Harness, visit: Visit) -> Any:
    """Connect; return how the gateway closes a socket whose hook has raised."""
    late = RecordingPeer(visit.gate)
    late.connection = visit.connect(late, "late")
    return await opened_by_gateway(test.kernel, late.connection)


async def answer(test: Harness, method: str, *args: Any) -> Any:
    peer = await connect(test)
    peer.rpc(method, *args)
    for _ in range(20):
        await test.advance(0.1)
        done = [f for f in frames_of(peer, "rpc") if "result" not in f or f["done"]]
        if done:
            return done[-1]
    raise AssertionError("no answer")


@pytest.mark.rule("F-54", "HB-37", "W-084", "W-085")
@pytest.mark.parametrize("what", HIDDEN)
@pytest.mark.parametrize("method", ["call", "stream", "below", "fiber"])
async def test_what_a_method_raises_is_an_id_for_its_client(
    method: str, what: str, clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened() as test:
        told = await answer(test, method, what)
        assert told["success"] is False
        check_hidden(told["error"], caplog)


@pytest.mark.rule("W-084", "W-085")
@pytest.mark.parametrize("method", ["call", "stream", "below", "fiber"])
async def test_what_an_author_says_to_a_client_goes_out_as_it_is(
    method: str, clock: object
) -> None:
    async with opened() as test:
        told = await answer(test, method, "public")
        assert (told["success"], told["error"]) == (False, PUBLIC)


@pytest.mark.rule("F-54")
async def test_sql_that_fails_is_an_id_for_the_client(
    clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened() as test:
        told = await answer(test, "query", f"SELECT {SECRET.replace('-', '_')} FROM t")
        assert "canary_e41b" not in told["error"]
        check_hidden(told["error"], caplog, text="canary_e41b")


async def test_the_texts_that_the_npm_clients_look_for_stay(clock: object) -> None:
    async with opened() as test:
        assert (await answer(test, "nothing"))[
            "error"
        ] == "Method nothing does not exist"
        assert (await answer(test, "ring"))["error"] == "Method ring is not callable"


@pytest.mark.rule("F-54", "HB-37")
@pytest.mark.parametrize("what", HIDDEN)
async def test_what_a_turn_raises_is_in_its_row_and_an_id_on_every_wire(
    what: str, clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened() as test:
        await test.kernel.get_agent(Top, "a")
        me = agent_at(test)
        peer = await connect(test)
        own = await connect(test, label="own")
        run = await me.run_agent_tool(Kid, what, run_id="r")
        await me.durable()
        assert (run.status, run.summary) == ("error", "so far")
        assert SECRET in run.error, "its parent may read it"
        assert run == me.runs.get("r")
        late = await connect(test, label="late")
        inside = await connect(test, ("Top", "a"), ("Kid", "r"), label="inside")
        await test.crash()
        await test.reopen()
        again = await connect(test, label="again")
        ends = []
        for one in (peer, own, late, again):
            assert SECRET not in str(one.out)
            (last,) = [
                f["event"]
                for f in frames_of(one, "agent-tool-event")
                if f["event"]["kind"] == "error"
            ]
            ends.append(last["error"])
        assert SECRET not in str(inside.out)
        assert set(ends) == {f"the run failed (error {run.error_id})"}
        check_hidden(ends[0], caplog)


async def test_what_a_turn_says_to_its_client_goes_out_as_it_is(clock: object) -> None:
    async with opened() as test:
        await test.kernel.get_agent(Top, "a")
        me = agent_at(test)
        peer = await connect(test)
        run = await me.run_agent_tool(Kid, "public", run_id="r")
        await me.durable()
        assert (run.error, run.error_id) == (PUBLIC, None)
        assert frames_of(peer, "agent-tool-event")[-1]["event"]["error"] == PUBLIC


@pytest.mark.rule("F-54")
@pytest.mark.parametrize("kind", [Unborn, Odd])
async def test_a_turn_that_cannot_start_or_does_not_fit_says_no_more(
    kind: type[Agent], clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened() as test:
        await test.kernel.get_agent(Top, "a")
        me = agent_at(test)
        peer = await connect(test)
        wanted = dict[str, int] if kind is Odd else None
        run = await me.run_agent_tool(kind, "plain", run_id="r", output_type=wanted)
        await me.durable()
        assert run.reason in ("bad-output", "start-failed")
        shown = frames_of(peer, "agent-tool-event")[-1]["event"]["error"]
        check_hidden(shown, caplog, text="Traceback")
        assert SECRET not in str(peer.out)


@pytest.mark.rule("F-54", "HB-37", "W-024", "W-033", "W-060")
@pytest.mark.parametrize("what", HIDDEN)
async def test_what_a_request_a_message_or_a_connect_raises_is_an_id(
    what: str, clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened() as test:
        visit = await reached(test, what)
        response = await visit.handle()
        body = bytes(response.body).decode()
        assert SECRET not in body
        if not isinstance(RAISED[what], CuletError):
            assert response.status == 500
            check_hidden(body, caplog)
        peer = await connect(test)
        peer.send(what)
        await test.advance(0.1)
        assert peer.closed is not None
        assert peer.closed[0] == 1011, "no normal end: clients come back"
        check_hidden(peer.closed[1], caplog)
        visit = await reached(test, what)
        how = await connected(test, visit)
        assert how is not None
        assert SECRET not in how.reason
        assert how.code != 1000


@pytest.mark.rule("W-023", "W-033", "W-060")
@pytest.mark.rule("F-54")
async def test_what_is_no_answer_and_no_chunk_is_not_shown_either(
    clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened() as test:
        response = await (await reached(test, "no response")).handle()
        assert response.status == 500
        check_hidden(bytes(response.body).decode(), caplog, text="no Response")
        peer = await connect(test)
        run = await agent_at(test).run_agent_tool(Mute, "plain", run_id="r")
        await agent_at(test).durable()
        assert "a chunk is a mapping" in run.error
        assert SECRET not in str(peer.out)


async def test_an_author_refuses_a_request_or_a_socket_in_words_of_their_own(
    clock: object,
) -> None:
    async with opened() as test:
        visit = await reached(test, "public")
        response = await visit.handle()
        assert (response.status, response.body) == (402, PUBLIC.encode())
        peer = await connect(test)
        how = await connected(test, visit)
        assert how == (4402, PUBLIC)
        peer.send("public")
        await test.advance(0.1)
        assert peer.closed == (1011, PUBLIC)


@pytest.mark.rule("F-54", "W-072")
@pytest.mark.parametrize("what", sorted(RAISED))
async def test_a_state_that_a_check_refuses_is_refused_without_its_words(
    what: str, clock: object
) -> None:
    async with opened() as test:
        peer = await connect(test)
        peer.send({"type": "cf_agent_state", "state": {"raise": what}})
        await test.advance(0.1)
        (told,) = frames_of(peer, "cf_agent_state_error")
        expected = PUBLIC if what == "public" else "State update rejected"
        assert told["error"] == expected


@pytest.mark.rule("F-54")
async def test_what_a_scheduled_call_raises_reaches_nobody_but_the_log(
    clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened() as test:
        peer = await connect(test)
        await answer(test, "later", "plain")
        await test.advance(5)
        assert SECRET not in str(peer.out)
        assert SECRET in caplog.text, "the log has it"


@pytest.mark.rule("F-54", "W-084")
def test_of_all_our_errors_those_that_are_told_are_listed() -> None:
    kinds = {
        kind
        for kind in vars(all_errors).values()
        if isinstance(kind, type) and issubclass(kind, Exception)
    }
    told = {kind.__name__ for kind in kinds if is_told(kind.__new__(kind))}
    assert told == {
        "UserError", "UsageError", "NotFound", "Refused", "CapacityError",
        "OverBudget", "FacetAborted", "Deleted",
    }  # fmt: skip
    assert error_response(UserError("no", status=409)).status == 409
    assert not is_told(ConnectionEnded(TEXT, code=4000))
