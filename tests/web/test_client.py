"""The Python client against a real server: calls, streams, state, runs, refusals."""

from __future__ import annotations

import re
import shutil
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from culet.kernel import AgentToolEvents, Limits
from culet.kernel.errors import (
    CallFailed,
    CapacityError,
    ConnectionEnded,
    ConnectionLost,
    Refused,
    RemoteProtocolError,
    UsageError,
)
from culet.kernel.http import Response
from culet.web import connect
from culet.web.client_events import (
    Connected,
    Disconnected,
    Lagged,
    Message,
    RunChanged,
    StateChanged,
)
from web.remote import GATES, QUICK, gate, running, wire
from web.serving import serving


@pytest.fixture(autouse=True)
def fresh_gates():
    GATES.clear()


def same(left: AgentToolEvents, right: AgentToolEvents) -> bool:
    return left.to_json() == right.to_json()


async def fresh_runs(url: str, wanted: AgentToolEvents) -> AgentToolEvents:
    """Return what a client that knows nothing folds, once it has as much."""
    async with connect(url) as agent:
        with trio.move_on_after(5):
            await agent.until(lambda a: same(a.runs, wanted))
        return agent.runs


async def test_a_call_returns_and_says_who_answers():
    async with running() as server, connect(server.url()) as agent:
        assert (agent.name, agent.agent) == ("s", "supervisor")
        assert agent.state == {"n": 0}
        assert await agent.call("ping", "hi") == "hi"
        assert await agent.call("nothing") is None


@pytest.mark.parametrize("message", ["\ud800", bytearray(b"x"), 7], ids=repr)
async def test_a_message_that_cannot_be_sent_is_told_and_ends_nothing(message: Any):
    async with running() as server, connect(server.url()) as agent:
        with pytest.raises(UsageError, match="a message"):
            await agent.send(message)

        assert await agent.call("ping", "hi") == "hi"
        assert agent.connections == 1


async def test_a_result_is_decoded_to_the_type_that_is_asked_for():
    class Over(msgspec.Struct):
        over: int

    async with running() as server, connect(server.url()) as agent:
        assert await agent.call("ping", "hi", result_type=str) == "hi"
        with pytest.raises(RemoteProtocolError, match="ping returned"):
            await agent.call("ping", "hi", result_type=int)
        stream = agent.stream("count", 2, item_type=int)
        assert [x async for x in stream] == [0, 1]
        assert msgspec.convert(stream.result, Over) == Over(2)


async def test_errors_of_calls_are_typed_and_tell_no_secret():
    async with running() as server, connect(server.url()) as agent:
        with pytest.raises(CallFailed, match="does not exist"):
            await agent.call("nowhere")
        with pytest.raises(CallFailed) as caught:
            await agent.call("fail")
        assert "secret" not in str(caught.value)
        with pytest.raises(UsageError, match="JSON"):
            await agent.call("ping", object())
        assert await agent.call("ping", "still") == "still"


async def test_a_body_that_raises_comes_out_as_it_is():
    async with running() as server:
        with pytest.raises(ZeroDivisionError):
            async with connect(server.url()):
                raise ZeroDivisionError
        with trio.move_on_after(0.05) as scope:
            async with connect(server.url()):
                await trio.sleep_forever()
        assert scope.cancelled_caught


async def test_a_stream_gives_its_values_and_then_its_final_one():
    async with running() as server, connect(server.url()) as agent:
        stream = agent.stream("count", 3)
        with pytest.raises(UsageError, match="not over"):
            _ = stream.result
        assert [x async for x in stream] == [0, 1, 2]
        assert stream.result == {"over": 3}
        broken = agent.stream("break_off")
        assert await anext(broken) == 1
        with pytest.raises(CallFailed):
            await anext(broken)


async def test_a_stream_that_nobody_reads_any_more_is_forgotten():
    async with running() as server, connect(server.url()) as agent:
        async for _ in agent.stream("count", 5000):
            break
        stream = agent.stream("count", 5000)
        await stream.aclose()
        assert [x async for x in stream] == []
        assert await agent.call("ping", "hi") == "hi"


@pytest.mark.limit("client_values")
async def test_a_slow_consumer_of_a_stream_slows_the_socket_and_loses_nothing():
    limits = Limits(client_values=8)
    async with running() as server, connect(server.url(), limits=limits) as agent:
        stream = agent.stream("count", 500)
        most, got = 0, []
        async for x in stream:
            await trio.testing.wait_all_tasks_blocked()
            most = max(most, stream.backlog)
            got.append(x)
        assert got == list(range(500))
        assert most <= 8


async def test_an_answer_comes_through_while_a_stream_is_full():
    limits = Limits(client_values=8)
    async with running() as server, connect(server.url(), limits=limits) as agent:
        stream = agent.stream("count", 100)
        with trio.fail_after(5):
            async for x in stream:
                if x == 0:
                    await trio.testing.wait_all_tasks_blocked()
                    assert await agent.call("ping", "hi") == "hi"
        assert stream.result == {"over": 100}


@pytest.mark.limit("client_pause_s")
async def test_a_consumer_that_stops_is_given_up_and_the_line_goes_on():
    limits = Limits(client_values=4, client_pause_s=0.05)
    async with running() as server, connect(server.url(), limits=limits) as agent:
        stream = agent.stream("count", 100)
        await agent.call("ping", "x")
        events = agent.events()
        await agent.send("after")
        with trio.fail_after(5):
            assert await anext(events) == Message(data="after")
        with pytest.raises(CapacityError):
            async for _ in stream:
                pass


async def test_state_is_followed_and_set():
    async with (
        running() as server,
        connect(server.url()) as one,
        connect(server.url()) as two,
    ):
        events = two.events()
        await one.set_state({"n": 7})
        assert one.state == {"n": 7}
        with trio.fail_after(5):
            await two.until(lambda a: a.state == {"n": 7})
            assert await anext(events) == StateChanged(state={"n": 7})
        await two.call("set_n", 8)
        with trio.fail_after(5):
            await one.until(lambda a: a.state == {"n": 8})


@pytest.mark.rule("W-075")
async def test_clients_that_set_the_state_at_one_time_end_with_the_same():
    async with (
        running() as server,
        connect(server.url()) as one,
        connect(server.url()) as two,
        connect(server.url()) as looker,
    ):
        events = one.events()
        for n in range(0, 60, 2):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(one.set_state, {"n": n})
                nursery.start_soon(two.set_state, {"n": n + 1})
            for agent in (one, two, looker):
                await agent.caught_up()
            assert one.state == two.state == looker.state
        seen = [await anext(events) for _ in range(60)]
        mine = [e.state["n"] for e in seen if e.source == "client"]
        assert mine == list(range(0, 60, 2))


async def test_a_state_that_is_refused_is_told_and_taken_back():
    async with running() as server:
        async with connect(server.url()) as agent:
            with pytest.raises(Refused, match="rejected"):
                await agent.set_state({"n": -1})
            assert agent.state == {"n": 0}
        async with connect(server.url(), query={"readonly": "1"}) as agent:
            with pytest.raises(Refused, match="readonly"):
                await agent.set_state({"n": 1})
            assert agent.state == {"n": 0}


async def test_runs_are_folded_as_a_fresh_replay_would():
    async with running() as server, connect(server.url()) as agent:
        events = agent.events()
        assert await agent.call("research", 5) == ["completed"] * 3
        with trio.fail_after(5):
            await agent.until(
                lambda a: (
                    [r["status"] for r in a.runs.runs_by_id.values()]
                    == ["completed"] * 3
                )
            )
        by_call = agent.runs.runs_by_tool_call_id["call-1"]
        assert [r["runId"] for r in by_call] == ["r0", "r1", "r2"]
        assert by_call[0]["parts"][0]["text"] == "d0 d1 d2 d3 d4 "
        assert same(agent.runs, await fresh_runs(server.url(), agent.runs))
        seen: dict[str, list[int]] = {}
        for _ in range(3 * 7):
            event = await anext(events)
            assert isinstance(event, RunChanged)
            seen.setdefault(event.run_id, []).append(event.sequence)
        assert seen == {f"r{i}": list(range(7)) for i in range(3)}


@pytest.mark.limit("client_message_bytes")
async def test_a_message_to_a_client_has_client_message_bytes():
    limits = Limits(client_message_bytes=20_000, reconnect_base_s=0.01)
    async with running() as server, connect(server.url(), limits=limits) as agent:
        events = agent.events()
        with trio.fail_after(5):
            await agent.call("tell", "x" * 20_000, 1)
            assert await anext(events) == Message(data="x" * 20_000)
            with pytest.raises(ConnectionLost):
                await agent.call("tell", "x" * 20_001, 1)
            lost = await anext(events)
            assert isinstance(lost, Disconnected)
            assert lost.code == 1009
            await agent.until(lambda a: a.connections >= 2)
        assert await agent.call("ping", "back") == "back"


@pytest.mark.limit("reconnect_base_s", "reconnect_max_s")
async def test_a_client_comes_back_ever_later_and_never_later_than_that():
    limits = Limits(reconnect_base_s=0.01, reconnect_max_s=0.05, reconnect_calm_s=1e9)
    async with (
        running() as server,
        wire(server.port) as proxy,
        connect(proxy.url(), limits=limits) as agent,
    ):
        events = agent.events()
        proxy.accepts = False
        proxy.cut()
        for most in (0.01, 0.02, 0.04, 0.05, 0.05):
            with trio.fail_after(5):
                lost = await anext(events)
            assert isinstance(lost, Disconnected)
            assert most / 2 <= lost.retry_in_s <= most


@pytest.mark.limit("reconnect_calm_s")
@pytest.mark.parametrize(("calm_s", "begins_anew"), [(1e9, False), (1e-9, True)])
async def test_a_connection_that_lasted_begins_the_back_off_anew(calm_s, begins_anew):
    limits = Limits(
        reconnect_base_s=0.001, reconnect_max_s=64.0, reconnect_calm_s=calm_s
    )
    async with (
        running() as server,
        wire(server.port) as proxy,
        connect(proxy.url(), limits=limits) as agent,
    ):
        events = agent.events()
        waits: list[float] = []
        with trio.fail_after(10):
            for number in range(2, 6):
                proxy.cut()
                while not isinstance(event := await anext(events), Disconnected):
                    pass
                waits.append(event.retry_in_s)
                await agent.until(lambda a, n=number: a.connections >= n)
        mosts = [0.001] * 4 if begins_anew else [0.001, 0.002, 0.004, 0.008]
        for wait, most in zip(waits, mosts, strict=True):
            assert most / 2 <= wait <= most


@pytest.mark.limit("client_events")
async def test_a_slow_reader_of_events_is_told_what_it_missed_and_delays_nobody():
    limits = Limits(client_events=8)
    async with running() as server, connect(server.url(), limits=limits) as agent:
        slow, quick = agent.events(), agent.events()
        with trio.fail_after(5):
            await agent.call("tell", "x", 100)
            await agent.call("set_n", 3)
            first = await anext(slow)
            assert isinstance(first, Lagged)
            kept = [await anext(slow) for _ in range(101 - first.dropped)]
        assert kept[-1] == StateChanged(state={"n": 3})
        assert agent.state == {"n": 3}
        assert isinstance(await anext(quick), Lagged)


async def test_messages_of_the_app_pass_both_ways():
    async with running() as server, connect(server.url()) as agent:
        events = agent.events()
        for message in ("plain", b"bytes", '{"type": "mine"}'):
            await agent.send(message)
            with trio.fail_after(5):
                assert await anext(events) == Message(data=message)


async def test_hops_lead_to_the_agents_below():
    async with running() as server, connect(server.url()) as root:
        await root.call("research", 1)
        url = server.url()
        async with connect(url, sub=[("Worker", "r1")]) as worker:
            assert (worker.name, worker.agent) == ("r1", "worker")
            assert await worker.call("whoami") == ["s", "r1"]
            await worker.call("deeper", "a/b c")
        hops = [("Worker", "r1"), ("Leaf", "a/b c")]
        async with connect(url, sub=hops) as leaf:
            assert leaf.name == "a/b c"
            assert await leaf.call("whoami") == ["s", "r1", "a/b c"]
            assert leaf.state == {"leaf": True}


@pytest.mark.rule("W-065")
async def test_a_refusal_for_good_raises_with_its_code():
    async with running() as server:
        for sub in ([("Worker", "nobody")], [("Nowhere", "x")]):
            with pytest.raises(ConnectionEnded) as caught:
                async with connect(server.url(), sub=sub):
                    pass
            assert caught.value.code == 4404
        with pytest.raises(ConnectionEnded) as caught:
            async with connect(server.url("nobody/x")):
                pass
        assert caught.value.code == 4400


async def test_headers_carry_credentials_and_no_origin():
    seen: list[Any] = []

    async def authenticate(request):
        seen.append(request.headers.get("origin"))
        if request.headers.get("authorization") != "Bearer k":
            return Response("who are you?", 401)
        return "somebody"

    async with running(authenticate=authenticate) as server:
        good = {"Authorization": "Bearer k"}
        async with connect(server.url(), headers=good) as agent:
            assert await agent.call("ping", "hi") == "hi"
        with pytest.raises(ConnectionEnded) as caught:
            async with connect(server.url()):
                pass
        assert caught.value.code == 4401
    assert seen == [None, None]


async def test_a_foreign_origin_is_refused_in_http_and_for_good():
    async with running() as server:
        with pytest.raises(ConnectionEnded, match="HTTP 403") as caught:
            async with connect(
                server.url(), headers={"origin": "https://evil.example"}
            ):
                pass
        assert caught.value.code == 4403


async def test_a_first_attempt_that_fails_raises_at_once():
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    await listeners[0].aclose()
    with trio.fail_after(5), pytest.raises(ConnectionLost, match="cannot reach"):
        async with connect(f"ws://127.0.0.1:{port}/agents/supervisor/s"):
            pass


async def test_a_server_that_hangs_up_in_the_handshake_is_not_waited_for():
    async with running() as server, wire(server.port) as proxy:
        proxy.accepts = False
        with trio.fail_after(5), pytest.raises(ConnectionLost, match="handshake"):
            async with connect(proxy.url()):
                pass


@pytest.mark.parametrize(
    "url", ["", "ftp://h/x", "ws://", "ws://u:p@h/agents/a/b", "ws://h:99999/x"]
)
async def test_a_bad_url_is_a_usage_error(url):
    with pytest.raises(UsageError):
        async with connect(url):
            pass


@pytest.mark.rule("F-434", "W-065")
async def test_the_end_for_good_reaches_everything_that_waits():
    async with running() as server, connect(server.url()) as agent:
        events = agent.events()
        ended = []

        async def waits(fn, *args):
            with pytest.raises(ConnectionEnded) as caught:
                await fn(*args)
            ended.append(caught.value.code)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(waits, agent.call, "wait")
            nursery.start_soon(waits, agent.until, lambda _a: False)
            nursery.start_soon(waits, anext, events)
            await gate("wait").reached.wait()
            async with connect(server.url()) as other:
                with pytest.raises(ConnectionEnded):
                    await other.call("close_all", 4001, "go away")
        assert ended == [4001] * 3
        with pytest.raises(ConnectionEnded, match="go away"):
            await agent.call("ping", "hi")


async def test_after_the_block_nothing_works_and_readers_end():
    async with running() as server:
        async with connect(server.url()) as agent:
            events = agent.events()
        assert [event async for event in events] == []
        with pytest.raises(UsageError, match="left"):
            await agent.call("ping", "hi")


@pytest.mark.rule("F-434", "W-067")
async def test_a_call_that_was_sent_fails_when_the_socket_is_lost():
    async with (
        running() as server,
        wire(server.port) as proxy,
        connect(proxy.url(), limits=QUICK) as agent,
    ):
        events = agent.events()

        async def lost():
            with pytest.raises(ConnectionLost):
                await agent.call("wait")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lost)
            await gate("wait").reached.wait()
            proxy.cut()
        with trio.fail_after(5):
            assert await agent.call("ping", "again") == "again"
        assert gate("wait").passed == 1
        assert isinstance(await anext(events), Disconnected)
        assert (await anext(events)) == Connected(
            name="s", agent="supervisor", connections=2
        )


@pytest.mark.rule("F-434", "W-067")
async def test_a_call_that_was_not_sent_goes_over_the_next_socket():
    async with (
        running() as server,
        wire(server.port) as proxy,
        connect(proxy.url(), limits=QUICK) as agent,
    ):
        events = agent.events()
        proxy.accepts = False
        proxy.cut()
        while not isinstance(await anext(events), Disconnected):
            pass
        got = []

        async def call(text):
            got.append(await agent.call("ping", text))

        with trio.fail_after(5):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(call, "queued")
                with trio.move_on_after(0.01):
                    await agent.call("set_n", 99)  # taken back before it is sent
                proxy.accepts = True
        assert got == ["queued"]
        assert agent.state == {"n": 0}
        assert agent.connections == 2


@pytest.mark.rule("F-434")
async def test_a_cancelled_call_leaves_the_socket_whole():
    async with running() as server, connect(server.url()) as agent:
        for _ in range(20):
            with trio.move_on_after(0):
                await agent.call("ping", "x" * 100_000)
        assert await agent.call("ping", "whole") == "whole"


async def test_runs_after_a_cut_in_mid_run_equal_a_fresh_replay():
    async with (
        running() as server,
        wire(server.port) as proxy,
        connect(proxy.url(), limits=QUICK) as agent,
    ):

        async def research():
            with pytest.raises(ConnectionLost):
                await agent.call("research", 9, 4)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(research)
            with trio.fail_after(5):
                await gate("worker").reached.wait()
                await agent.until(lambda a: len(a.runs.runs_by_id) == 3)
            proxy.cut()
        with trio.fail_after(5):
            await agent.until(lambda a: a.connections == 2)
            gate("worker").open.set()
            await agent.until(
                lambda a: all(
                    r["status"] == "completed" for r in a.runs.runs_by_id.values()
                )
            )
        assert agent.runs.protocol_errors == 0
        text = agent.runs.runs_by_id["r0"]["parts"][0]["text"]
        assert text == "".join(f"d{i} " for i in range(9))
        assert same(agent.runs, await fresh_runs(server.url(), agent.runs))


@pytest.mark.rule("W-066")
@pytest.mark.parametrize("code", [1000, 1001, 1011, 1012])
async def test_other_close_codes_bring_the_connection_back(code):
    async with running() as server, connect(server.url(), limits=QUICK) as agent:
        with pytest.raises(ConnectionLost) as caught:
            await agent.call("close_all", code, "see you")
            await agent.call("wait")
        assert caught.value.code == code
        with trio.fail_after(5):
            assert await agent.call("ping", "back") == "back"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """Return a key and a certificate for 127.0.0.1, made just now."""
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt",
         "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", "/CN=x",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert],
        check=True, capture_output=True,
    )  # fmt: skip
    return key, cert


async def test_tls_is_spoken_and_a_stranger_is_not_trusted(certificate):
    key, cert = certificate
    server_side = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server_side.load_cert_chain(cert, key)
    trusts = ssl.create_default_context(cafile=cert)
    async with running() as server, wire(server.port, ssl=server_side) as proxy:
        url = proxy.url().replace("ws:", "wss:")
        async with connect(url, ssl=trusts, limits=QUICK) as agent:
            assert await agent.call("ping", "secret") == "secret"
            proxy.cut()
            with trio.fail_after(5):
                await agent.until(lambda a: a.connections == 2)
            assert await agent.call("ping", "again") == "again"
        with pytest.raises(ConnectionLost, match="certificate"):
            async with connect(url):
                pass
    with pytest.raises(UsageError, match="wss"):
        async with connect(proxy.url(), ssl=trusts):
            pass


async def test_a_server_that_falls_silent_is_left_for_another_socket():
    limits = Limits(ping_s=0.05, handshake_s=0.1, reconnect_base_s=0.01)
    async with (
        running() as server,
        wire(server.port) as proxy,
        connect(proxy.url(), limits=limits) as agent,
    ):
        events = agent.events()
        proxy.swallows = True
        with trio.fail_after(5):
            event = await anext(events)
            assert isinstance(event, Disconnected)
            assert "nothing is heard" in event.reason
            proxy.swallows = False
            proxy.cut()
            await agent.until(lambda a: a.connections >= 2)
        assert await agent.call("ping", "back") == "back"


async def test_a_quiet_server_that_answers_pings_is_kept():
    limits = Limits(ping_s=0.02, handshake_s=5)
    async with (
        running() as server,
        wire(server.port) as proxy,
        connect(proxy.url(), limits=limits) as agent,
    ):
        with trio.fail_after(5):
            await proxy.until_up(3)  # nothing but pings
        assert agent.connections == 1
        assert await agent.call("ping", "x") == "x"


async def test_a_stream_has_a_hard_bound_while_an_answer_is_waited_for():
    limits = Limits(client_values=2)
    async with running() as server, connect(server.url(), limits=limits) as agent:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(agent.call, "wait")
            await gate("wait").reached.wait()
            stream = agent.stream("count", 100)
            with trio.fail_after(5):
                while stream.backlog <= 32:
                    await agent.call("ping", "x")
            gate("wait").open.set()
        with pytest.raises(CapacityError, match="too slow"):
            async for _ in stream:
                pass


@pytest.mark.limit("client_outbox")
async def test_the_outbox_is_bounded_and_a_caller_waits_for_room():
    limits = Limits(client_outbox=2, reconnect_base_s=0.01, reconnect_max_s=0.05)
    async with (
        running() as server,
        wire(server.port) as proxy,
        connect(proxy.url(), limits=limits) as agent,
    ):
        events = agent.events()
        proxy.accepts = False
        proxy.cut()
        assert isinstance(await anext(events), Disconnected)
        got: list[str] = []

        async def ping(text: str) -> None:
            got.append(await agent.call("ping", text))

        with trio.fail_after(5):
            async with trio.open_nursery() as nursery:
                for i in range(10):
                    nursery.start_soon(ping, str(i))
                await trio.testing.wait_all_tasks_blocked()
                assert len(agent._line._outbox) == 2
                proxy.accepts = True
        assert sorted(got) == [str(i) for i in range(10)]


@pytest.mark.limit("rpc_per_connection")
async def test_more_calls_than_may_be_in_flight_wait_their_turn():
    limits = Limits(rpc_per_connection=4)
    async with running() as server, connect(server.url(), limits=limits) as agent:
        async with trio.open_nursery() as nursery:
            for i in range(50):
                nursery.start_soon(agent.call, "ping", str(i))
        streams = [agent.stream("slowly", 0) for _ in range(4)]
        with pytest.raises(CapacityError, match="streams are open"):
            agent.stream("slowly", 0)
        del streams


async def test_an_agent_that_does_not_say_who_it_is_can_be_called():
    async with (
        running() as server,
        connect(server.url(), query={"silent": "1"}, identify=False) as agent,
    ):
        assert agent.name == ""
        assert await agent.call("ping", "hi") == "hi"


async def test_the_client_works_behind_plain_hypercorn_too(transport):
    async with serving() as server:
        url = server.url.replace("http", "ws") + "/agents/hub/h"
        async with connect(url) as agent:
            assert await agent.call("ping", "hi") == "hi"
            assert [x async for x in agent.stream("count", 3)] == [0, 1, 2]
            assert await agent.call("write", "r1", 3) == "completed"
            with trio.fail_after(5):
                await agent.until(lambda a: a.runs.runs_by_id["r1"]["parts"])
            await agent.set_state({"n": 3})
            assert agent.state == {"n": 3}


def test_the_program_in_the_guide_runs(tmp_path):
    text = (Path(__file__).parents[2] / "docs" / "guide-client.md").read_text()
    program = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert program
    said: list[str] = []

    async def main():
        async with running() as server:
            done = await trio.run_process(
                [sys.executable, "-W", "error", "-c", program[1], server.url()],
                capture_stdout=True,
            )
            said.extend(done.stdout.decode().splitlines())

    trio.run(main)
    assert said == ["hi", "0", "1", "2", "and then {'over': 3}", "s {'n': 7}"]
