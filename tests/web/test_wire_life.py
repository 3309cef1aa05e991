"""The life of a connection, frame by frame, as docs/wire.md tells it to authors of clients."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio
from trio_websocket import ConnectionClosed

from culet.kernel import Limits, Request
from web.serving import Client
from web.test_transport import masked, raw, upgrade
from web.wirekit import Sleeper, question, wired

pytestmark = pytest.mark.usefixtures("transport")

ROOT = "/agents/desk/d"


def kinds(frames: list[Any]) -> list[str]:
    return [frame["type"] for frame in frames]


async def quiet(client: Client) -> None:
    """Fail if anything comes before the answer to a call."""
    assert (await client.call("ping", "quiet"))["result"] == "quiet"


# ---- before the agent is there


@pytest.mark.rule("W-040")
@pytest.mark.parametrize("what", ["the agent", "authenticate"])
async def test_the_handshake_waits_for_nobody(what: str) -> None:
    asked, go = trio.Event(), trio.Event()

    async def authenticate(_request: Request) -> None:
        asked.set()
        if what == "authenticate":
            await go.wait()

    async with (
        wired(authenticate=authenticate) as server,
        raw(server, upgrade("/agents/sleeper/s")) as client,
    ):
        await client.open()  # 101, and nobody is awake
        await asked.wait()
        go.set()
        Sleeper.may_start.set()
        texts = await client.texts_until("mcp_servers")
        assert json.loads(texts[0])["name"] == "s"


@pytest.mark.rule("W-041")
async def test_first_bytes_are_handled_when_the_agent_has_introduced_itself() -> None:
    async with wired() as server, server.connect("/agents/sleeper/s") as client:
        await client.start("ping", "first")
        await client.start("ping", "second")
        Sleeper.may_start.set()
        assert kinds(await client.hello()) == [
            "cf_agent_identity", "cf_agent_mcp_servers",
        ]  # fmt: skip
        await client.start("ping", "third")
        with trio.move_on_after(0.05):
            raise AssertionError(await client.frame())
        Sleeper.may_greet.set()
        frames = [await client.frame() for _ in range(4)]
        assert kinds(frames) == ["greeting", "rpc", "rpc", "rpc"]
        assert [f["result"] for f in frames[1:]] == ["first", "second", "third"]


@pytest.mark.rule("W-041", "W-042", "W-051")
async def test_a_chat_may_be_asked_and_probed_with_the_first_bytes() -> None:
    init = {"method": "POST", "body": json.dumps({"messages": [question("hi")]})}
    first = [
        {"type": "cf_agent_stream_resume_request", "probeId": "p1"},
        {"type": "cf_agent_use_chat_request", "id": "q1", "init": init},
    ]
    async with wired() as server, server.connect("/agents/speaker/s") as client:
        for frame in first:
            await client.send(frame)
        frames = await client.until(lambda f: bool(f.get("done")))
        assert kinds(frames[:4]) == [
            "cf_agent_chat_messages", "cf_agent_identity", "cf_agent_mcp_servers",
            "cf_agent_stream_resume_none",
        ]  # fmt: skip
        assert frames[3]["probeId"] == "p1"
        assert {f["id"] for f in frames[4:]} == {"q1"}


# ---- what is said on connect


@pytest.mark.rule("W-042", "W-043", "W-044", "W-050")
async def test_who_connects_is_told_name_state_catalogue_each_time_anew() -> None:
    async with wired() as server:
        for _ in range(2):
            async with server.connect(f"{ROOT}?welcome=1") as client:
                frames = await client.hello()
                assert frames == [
                    {"type": "cf_agent_identity", "name": "d", "agent": "desk",
                     "stateFollows": True},
                    {"type": "cf_agent_state", "state": {"n": 0}},
                    {"type": "cf_agent_mcp_servers", "mcp": {"servers": {}, "tools": [],
                     "prompts": [], "resources": []}},
                ]  # fmt: skip
                assert await client.raw() == "welcome"
        async with server.connect("/agents/bare/b") as client:
            identity, _catalogue = await client.hello()
            assert identity == {
                "type": "cf_agent_identity", "name": "b", "agent": "bare",
            }  # fmt: skip
            await quiet(client)


@pytest.mark.rule("W-042", "W-045")
async def test_runs_are_replayed_behind_the_catalogue_to_the_one_that_came() -> None:
    async with wired() as server, server.connect(ROOT) as first:
        await first.hello()
        for run_id in ("r1", "r2"):
            await first.call("write", run_id, 2)
        async with server.connect(f"{ROOT}?welcome=1") as late:
            await late.hello()
            heard = [await late.raw() for _ in range(9)]
            assert heard.count("welcome") == 1
            frames = [json.loads(text) for text in heard if text != "welcome"]
            assert [(f["event"]["runId"], f["sequence"]) for f in frames] == [
                (run_id, at) for run_id in ("r1", "r2") for at in range(4)
            ]
            assert all(f["replay"] is True for f in frames)
            await quiet(late)
        await quiet(first)


@pytest.mark.rule("W-046")
async def test_an_agent_may_keep_its_name_to_itself_and_works() -> None:
    async with wired() as server, server.connect("/agents/quiet/q") as client:
        assert kinds(await client.hello()) == ["cf_agent_state", "cf_agent_mcp_servers"]
        await quiet(client)
        async with server.connect("/agents/quiet/q") as other:
            await other.hello()
            await other.send({"type": "cf_agent_state", "state": {"n": 1}})
            assert (await client.frame())["state"] == {"n": 1}


@pytest.mark.rule("W-047")
async def test_who_wants_no_protocol_has_calls_messages_and_the_chat_it_asks_for() -> (
    None
):
    async with wired() as server:
        async with (
            server.connect(f"{ROOT}?raw=1") as plain,
            server.connect(ROOT) as hub,
        ):
            await hub.hello()
            await quiet(plain)
            await hub.send({"type": "cf_agent_state", "state": {"n": 1}})
            await hub.call("write", "r", 1)
            await hub.call("tell", '{"to": "all"}')
            assert await plain.frame() == {"to": "all"}
            await plain.socket.send_message("mine")
            assert await plain.raw() == "mine"
        async with server.connect("/agents/speaker/s?raw=1") as plain:
            init = {"method": "POST", "body": json.dumps({"messages": [question("x")]})}
            await plain.send(
                {"type": "cf_agent_use_chat_request", "id": "q", "init": init}
            )
            frames = await plain.until(lambda f: bool(f.get("done")))
            assert set(kinds(frames)) == {"cf_agent_use_chat_response"}
            async with server.connect("/agents/speaker/s") as tab:
                await tab.hello()
                await tab.send(
                    {"type": "cf_agent_use_chat_request", "id": "q2", "init": init}
                )
                await tab.until(lambda f: bool(f.get("done")))
            await plain.send({"type": "cf_agent_stream_resume_request", "probeId": "p"})
            answer = await plain.frame()
            assert answer["type"] == "cf_agent_stream_resume_none", (
                "others' turns are not shown to it; what it asks is answered"
            )


# ---- how it is refused, and ends


async def close_at_once(client: Client) -> tuple[int, str]:
    """Return how it is closed; nothing may come before."""
    with trio.fail_after(5), pytest.raises(ConnectionClosed) as ended:
        raise AssertionError(await client.socket.get_message())
    assert ended.value.reason is not None
    return ended.value.reason.code, ended.value.reason.reason or ""


@pytest.mark.rule("W-030")
@pytest.mark.parametrize(
    ("path", "code", "reason"),
    [
        ("/agents/nope/x", 4400, "connection refused (400)"),
        (f"{ROOT}/sub/nope/x", 4404, "connection refused (404)"),
        (f"{ROOT}/sub/writer/guessed", 4404, "connection refused (404)"),
    ],
)
async def test_a_refusal_is_a_close_frame_and_nothing_before_it(
    path: str, code: int, reason: str
) -> None:
    async with wired() as server, server.connect(path) as client:
        assert await close_at_once(client) == (code, reason)


@pytest.mark.rule("W-061")
@pytest.mark.parametrize(
    ("code", "reason", "told"),
    [
        (1000, "bye", "bye"),
        (1008, "", ""),
        (3000, "x" * 200, "x" * 123),
        (4001, "☃" * 120, "☃" * 41),
        (4999, "é" * 61 + "☃", "é" * 61),
    ],
    ids=["1000", "1008", "3000", "4001", "4999"],
)
async def test_an_agent_closes_with_a_code_and_as_much_of_a_reason_as_fits(
    code: int, reason: str, told: str
) -> None:
    async with wired() as server, server.connect(ROOT) as client:
        await client.hello()
        await client.start("hang_up", code, reason)
        assert await client.closed() == (code, told)


@pytest.mark.rule("W-061")
async def test_a_code_that_no_frame_may_carry_is_the_agents_mistake() -> None:
    async with wired() as server, server.connect(ROOT) as client:
        await client.hello()
        for code in (-1, 0, 999, 1004, 1005, 1006, 1015, 2999, 5000):
            assert not (await client.call("hang_up", code))["success"]
        await quiet(client)


@pytest.mark.rule("W-053")
async def test_no_frame_of_the_protocol_is_a_heartbeat(transport: str) -> None:
    limits = Limits(ping_s=0.02, idle_s=5.0)
    async with wired(limits=limits) as server, server.connect(ROOT) as client:
        await client.hello()
        with trio.move_on_after(0.15):
            raise AssertionError(await client.socket.get_message())
        await quiet(client)


@pytest.mark.rule("W-057")
async def test_what_comes_after_the_server_has_closed_is_not_heard() -> None:
    def frame(about: dict[str, Any]) -> bytes:
        return masked(1, json.dumps(about).encode())

    call = {"type": "rpc", "id": "1", "method": "hang_up", "args": [4001]}
    async with wired() as server, server.connect(ROOT) as other:
        await other.hello()
        async with raw(server, upgrade(f"{ROOT}?_pk=rude")) as rude:
            await rude.open()
            await rude.texts_until("mcp_servers")
            await rude.stream.send_all(frame(call))
            with trio.fail_after(5):
                while rude.protocol.close_rcvd is None:
                    rude.protocol.receive_data(await rude.stream.receive_some(65536))
            for n in range(3):  # and does not answer the close
                late = {"type": "cf_agent_state", "state": {"n": 5 + n}}
                await rude.stream.send_all(frame(late))
            await rude.stream.send_all(masked(8, (4001).to_bytes(2, "big")))
            assert await rude.close_code() == 4001
        await quiet(other)
        async with server.connect(ROOT) as late_one:
            assert (await late_one.hello())[1]["state"] == {"n": 0}


@pytest.mark.rule("W-056")
async def test_who_has_too_many_calls_in_work_is_not_read_until_one_has_ended() -> None:
    limits = Limits(rpc_per_connection=3)
    async with wired(limits=limits) as server, server.connect(ROOT) as client:
        await client.hello()
        for _ in range(3):
            await client.start("wait")
        await client.start("ping", "fourth")
        async with server.connect(ROOT) as other:
            await other.hello()
            await quiet(other)
            with trio.move_on_after(0.1):
                raise AssertionError(await client.frame())
            await other.call("let_go")
        answers = [await client.frame() for _ in range(4)]
        assert {frame["id"] for frame in answers[:3]} == {"wait-1", "wait-2", "wait-3"}
        assert answers[3]["result"] == "fourth"
