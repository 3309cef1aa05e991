"""A client's conversation over real sockets: what it is told, in which order."""

from __future__ import annotations

import pytest
import trio

from culet.kernel import Limits
from web.serving import Client, Hub, serving

pytestmark = pytest.mark.usefixtures("transport")


def is_end(frame: object) -> bool:
    return isinstance(frame, dict) and frame.get("event", {}).get("kind") in {
        "finished", "error", "aborted", "interrupted",
    }  # fmt: skip


def without_replay(frames: list[dict]) -> list[dict]:
    return [{k: v for k, v in f.items() if k != "replay"} for f in frames]


@pytest.mark.rule("W-042", "W-011")
async def test_the_first_frames_say_who_the_agent_is() -> None:
    async with serving() as server, server.connect("/agents/hub/h?") as client:
        identity, state, catalogue = await client.hello()

        assert identity == {
            "type": "cf_agent_identity", "name": "h", "agent": "hub",
            "stateFollows": True,
        }  # fmt: skip
        assert state == {"type": "cf_agent_state", "state": {"n": 0}}
        assert catalogue["mcp"]["servers"] == {}


@pytest.mark.rule("W-043", "W-049")
async def test_an_agent_without_state_sends_none() -> None:
    async with serving() as server, server.connect() as hub:
        await hub.call("make", "p")
        async with server.connect("/agents/hub/h/sub/plain/p") as client:
            identity, _catalogue = await client.hello()
        assert "stateFollows" not in identity


@pytest.mark.rule("F-425", "W-081", "W-084")
async def test_calls_and_their_errors() -> None:
    async with serving() as server, server.connect() as client:
        await client.hello()

        assert await client.call("ping", "hi") == {
            "type": "rpc", "id": "ping-1", "success": True, "result": "hi", "done": True,
        }  # fmt: skip
        missing = await client.call("missing")
        hidden = await client.call("hidden")
        failed = await client.call("fail")
        wrong = await client.call("ping", 7)
        assert missing["error"] == "Method missing does not exist"
        assert hidden["error"] == "Method hidden is not callable"
        assert "secret" not in failed["error"]
        assert "error" in failed["error"]
        assert wrong["success"] is False
        assert (await client.call("ping", "still here"))["result"] == "still here"


@pytest.mark.rule("W-041")
async def test_calls_that_came_before_the_hello_are_answered() -> None:
    async with serving() as server, server.connect() as client:
        await client.start("ping", "first bytes")
        frames = await client.until(lambda f: f["type"] == "rpc")
        assert frames[0]["type"] == "cf_agent_identity"
        assert frames[-1]["result"] == "first bytes"


@pytest.mark.rule("F-428", "W-083")
async def test_a_streaming_call_ends_with_its_final_value() -> None:
    async with serving() as server, server.connect() as client:
        await client.hello()
        await client.start("count", 3)
        frames = await client.until(lambda f: f["done"])

        assert [(f["result"], f["done"]) for f in frames] == [
            (0, False), (1, False), (2, False), ("over", True),
        ]  # fmt: skip


@pytest.mark.rule("F-417", "W-048", "W-070", "W-072")
async def test_state_goes_to_all_others() -> None:
    async with (
        serving() as server,
        server.connect() as ann,
        server.connect() as bob,
        server.connect("/agents/hub/h?readonly=1") as cyd,
    ):
        for client in (ann, bob, cyd):
            await client.hello()

        await ann.send({"type": "cf_agent_state", "state": {"n": 1}})
        said = {"type": "cf_agent_state", "state": {"n": 1}}
        assert await bob.frame() == said
        assert await cyd.frame() == said
        assert (await ann.call("ping", "x"))["result"] == "x", "and not to the sender"

        await cyd.send({"type": "cf_agent_state", "state": {"n": 2}})
        assert await cyd.frame() == {
            "type": "cf_agent_state_error",
            "error": "Connection is readonly",
        }
        assert await cyd.frame() == said, "the true state"


@pytest.mark.rule("I-23", "F-226", "W-055")
async def test_a_broadcast_reaches_everybody_here_and_nobody_elsewhere() -> None:
    async with (
        serving() as server,
        server.connect() as ann,
        server.connect() as bob,
        server.connect("/agents/hub/other") as eve,
    ):
        for client in (ann, bob, eve):
            await client.hello()
        await ann.start("tell", '"news"')

        assert await bob.frame() == "news"
        assert await ann.frame() == "news"
        assert (await eve.call("ping", "quiet"))["result"] == "quiet"


@pytest.mark.rule("W-089")
async def test_text_and_bytes_go_through_unchanged() -> None:
    async with serving() as server, server.connect() as client:
        await client.hello()
        for message in ("plain text", '{"type":"unknown"}', "☃", b"\0\xff", b"", ""):
            await client.socket.send_message(message)
            assert await client.raw() == message


async def read_run(client: Client) -> list[dict]:
    return await client.until(is_end)


@pytest.mark.rule("W-045")
async def test_replay_equals_live() -> None:
    async with serving() as server, server.connect() as live:
        await live.hello()
        await live.start("write", "r1", 40)
        heard = [f for f in await read_run(live) if f["type"] == "agent-tool-event"]

        async with server.connect() as late:
            await late.hello()
            replayed = await read_run(late)

        assert [f["sequence"] for f in heard] == list(range(42))
        assert all(f["replay"] for f in replayed)
        assert without_replay(replayed) == heard


@pytest.mark.rule("I-17")
async def test_who_comes_in_the_middle_misses_nothing() -> None:
    async with serving() as server, server.connect() as first:
        await first.hello()
        await first.start("write", "r1", 400)
        await first.until(lambda f: f.get("sequence") == 0)
        async with server.connect() as second:
            await second.hello()
            frames = await read_run(second)

        assert [f["sequence"] for f in frames] == list(range(402))


async def test_a_long_replay_comes_in_pages_and_in_order() -> None:
    limits = Limits(replay_page_bytes=512, outbox_bytes=4096)
    async with serving(limits=limits) as server:
        hub = await server.kernel.get_agent(Hub, "h")
        assert await hub.write("r1", 300) == "completed"
        async with server.connect() as late:
            await late.hello()
            frames = await read_run(late)
        assert [f["sequence"] for f in frames] == list(range(302))


async def test_a_client_that_comes_back_has_its_label_and_the_whole_picture() -> None:
    async with serving() as server:
        for _ in range(2):
            async with server.connect("/agents/hub/h?_pk=mine") as client:
                await client.hello()
                (tree,) = server.kernel.trees.values()
                (connection,) = tree.sockets.of(tree.root_slot)
                assert connection.id == "mine"
                await client.socket.aclose()
            with trio.fail_after(2):
                while tree.sockets.count:
                    await trio.lowlevel.checkpoint()
        assert not tree.closed


@pytest.mark.rule("W-062")
async def test_a_deleted_agent_closes_its_sockets() -> None:
    async with serving() as server, server.connect() as hub:
        await hub.call("make", "p")
        async with server.connect("/agents/hub/h/sub/plain/p") as client:
            await client.hello()
            assert (await hub.call("delete", "p"))["success"] is True
            assert await client.closed() == (4410, "deleted")


@pytest.mark.rule("W-033", "W-060")
async def test_a_failing_handler_is_told_as_a_failure(caplog) -> None:
    async with serving() as server:
        async with server.connect() as client:
            await client.hello()
            await client.socket.send_message("boom")
            code, reason = await client.closed()
            assert code == 1011
            assert "secret" not in reason
        assert await server.close_of("/agents/hub/h?boom=1") == 1011
        async with server.connect() as client:
            assert (await client.call("ping", "alive"))["result"] == "alive"
    assert "secret-token-9" in caplog.text, "the details are in the log"


@pytest.mark.rule("W-033", "W-023")
async def test_an_agent_that_has_no_room_says_so_without_a_reason_of_ours() -> None:
    async with serving() as server:
        async with server.connect("/agents/hub/h?full=1") as client:
            code, reason = await client.closed()
        assert (code, reason) == (1011, "refused (503)")
        status, headers, _ = await server.http("GET", "/agents/hub/h/full")
        assert status == 503
        assert "retry-after" in headers


@pytest.mark.rule("W-030", "W-023")
async def test_a_child_that_cannot_start_is_not_refused_for_good(caplog) -> None:
    async with serving() as server, server.connect() as hub:
        await hub.hello()
        path = "/agents/hub/h/sub/broken/b"
        assert await server.close_of(path) == 1011, "so that clients try again"
        status, headers, body = await server.http("GET", path)
        assert (status, headers["retry-after"]) == (503, "1")
        assert b"secret" not in body


async def test_one_socket_more_than_a_tree_may_have_is_told_to_try_again() -> None:
    async with serving(limits=Limits(sockets_per_tree=2)) as server:
        async with server.connect() as one, server.connect() as two:
            await one.hello()
            await two.hello()
            assert await server.close_of("/agents/hub/h") == 1011
            assert (await one.call("ping", "hi"))["result"] == "hi"
        while server.kernel.metrics()["connections"]:
            await trio.sleep(0.01)
        async with server.connect() as three:
            await three.hello()


@pytest.mark.rule("F-221", "F-222", "W-033")
async def test_tags_that_cannot_be_close_1011_and_the_log_says_why(caplog) -> None:
    async with (
        serving() as server,
        server.connect("/agents/hub/h?tag=" + "x" * 257) as client,
    ):
        code, reason = await client.closed()
        assert code == 1011
        assert reason.startswith("error ")
        assert "tag" not in reason
        async with server.connect("/agents/hub/h?tag=" + "x" * 256) as other:
            assert (await other.call("ping", "in"))["result"] == "in"
    assert "1 to 256 letters" in caplog.text


@pytest.mark.rule("F-223", "W-064")
@pytest.mark.parametrize("code", [1000, 4001, None])
async def test_a_close_is_answered_with_its_code_unless_that_is_reserved(code) -> None:
    async with serving() as server, server.connect() as client:
        await client.hello()
        with trio.fail_after(5):
            await client.socket.aclose(*([] if code is None else [code, "bye"]))
        answer = client.socket.closed
        assert answer is not None
        assert answer.code == (1000 if code is None else code)
