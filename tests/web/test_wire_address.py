"""Addresses, queries and HTTP, as docs/wire.md tells them to authors of clients."""

from __future__ import annotations

import json

import pytest
from quart import websocket
from quart_trio import QuartTrio

from culet.web import install
from culet.web.app import gateways_of
from web.wirekit import Desk, wired

pytestmark = pytest.mark.usefixtures("transport")

ROOT = "/agents/desk/d"


@pytest.mark.rule("W-004")
@pytest.mark.parametrize(
    ("raw", "name"),
    [("a%20b", "a b"), ("a%2520b", "a%20b"), ("a+b", "a+b"), ("%C3%A9", "é"),
     ("a%2Fb", "a/b"), ("a:b", "a:b"), ("SUB", "SUB")],
)  # fmt: skip
async def test_the_name_of_a_root_is_decoded_once_and_told_decoded(
    raw: str, name: str
) -> None:
    async with wired() as server:
        async with server.connect(f"/agents/desk/{raw}") as client:
            assert (await client.hello())[0]["name"] == name
        assert [key.name for key in server.kernel.trees] == [name]
        status, _, body = await server.http("GET", f"/agents/desk/{raw}/x")
        assert (status, body.decode()) == (200, f"GET {name} /x")
        assert len(server.kernel.trees) == 1, "the same agent"


@pytest.mark.rule("W-006", "W-008")
async def test_what_is_left_of_the_path_goes_to_the_agent_as_it_came() -> None:
    async with wired() as server:
        for rest in ("/", "/a%2Fb/c", "/files/sub/note/x"):
            path = ROOT + rest
            assert (await server.http("GET", path))[2].decode() == f"GET d {rest}"
            async with server.connect(f"{path}?_pk=l") as client:
                await client.hello()
            assert Desk.came.pop() == ("l", path, rest, {"_pk": "l"})
        nodes = [row["path"] for row in server.kernel.tree("Desk", "d")]
        assert nodes == ["Desk/d"], "a marker that is not first is no hop"


@pytest.mark.rule("W-010")
async def test_what_is_too_short_to_name_an_agent_is_the_apps() -> None:
    app = QuartTrio("theirs")

    @app.get("/agents/list")
    async def listed() -> str:
        return "a list"

    @app.websocket("/agents/live")
    async def live() -> None:
        await websocket.send("theirs")

    @app.get("/agents/desk/d")
    async def never() -> str:
        return "not reached"

    async with wired() as other:
        install(app, other.kernel)
        async with wired(app=app) as server:
            answers = [
                await server.http("GET", path)
                for path in ("/agents/list", "/agents/nothing", "/agents/desk//", ROOT)
            ]
            assert [(status, body) for status, _, body in answers[:1]] == [
                (200, b"a list")
            ]
            assert [status for status, _, _ in answers[1:3]] == [404, 404]
            assert answers[3][2] == b"GET d /", "two segments are an agent's"
            async with server.connect("/agents/live") as client:
                assert await client.raw() == "theirs"
            assert await server.refused("/agents/nothing") == 404


@pytest.mark.rule("W-013")
async def test_a_label_is_what_the_client_says_and_need_not_be_unlike_others() -> None:
    async with (
        wired() as server,
        server.connect(f"{ROOT}?_pk=same") as one,
        server.connect(f"{ROOT}?_pk=same") as two,
        server.connect(f"{ROOT}?_pk=") as three,
        server.connect(ROOT) as four,
    ):
        for client in (one, two, three, four):
            await client.hello()
        labels = (await one.call("labels"))["result"]
        assert labels.count("same") == 2
        assert all(labels)
        assert len(set(labels)) == 3, "one was made for each that gave none"
        await four.start("tell", '"news"')
        for client in (one, two, three):
            assert await client.frame() == "news", "each is a socket of its own"
        # and the end of one is not the end of the other
        await one.start("hang_up", 1000)
        assert (await one.closed())[0] == 1000
        assert (await two.call("ping", "here"))["result"] == "here"


@pytest.mark.rule("W-011", "W-014")
async def test_a_query_reaches_the_agent_decoded_and_may_be_empty() -> None:
    async with wired() as server:
        for query, seen in [
            ("?", {}),
            (
                "?_pk=l&token=a+b&x=%2B%26&no=",
                {"_pk": "l", "token": "a b", "x": "+&", "no": ""},
            ),
        ]:
            async with server.connect(ROOT + query) as client:
                await client.hello()
            assert Desk.came[-1][3] == seen
            assert (await server.http("GET", ROOT + query))[0] == 200


@pytest.mark.rule("W-020")
async def test_the_history_is_an_array_at_any_path_that_ends_in_get_messages() -> None:
    async with wired() as server:
        async with server.connect(ROOT) as client:
            await client.call("make", "n")
        for agent in ("/agents/speaker/s", f"{ROOT}/sub/note/n"):
            for method, leaf in [
                ("GET", "/get-messages"), ("GET", "/get-messages?token=x"),
                ("POST", "/get-messages"), ("GET", "/any/thing/get-messages"),
                ("GET", "/get-messages/"),
            ]:  # fmt: skip
                status, headers, body = await server.http(method, agent + leaf)
                assert (status, json.loads(body)) == (200, []), (method, leaf)
                assert headers["content-type"] == "application/json"
            assert (await server.http("GET", f"{agent}/get-message"))[0] == 404


@pytest.mark.rule("W-021", "W-028")
async def test_http_that_an_agent_does_not_answer_is_404_also_where_sockets_are() -> (
    None
):
    async with wired() as server:
        for path in ("/agents/bare/b", f"{ROOT}/missing", "/agents/speaker/s/x"):
            for method in ("GET", "POST", "DELETE"):
                status, _, body = await server.http(method, path)
                assert (status, body) == (404, b"Not implemented"), path


@pytest.mark.rule("W-022")
async def test_a_class_that_is_unknown_or_elsewhere_is_told_and_nobody_is_woken() -> (
    None
):
    async with wired() as server:
        for path, status, words in [
            ("/agents/nope/x", 400, "no agent class answers to 'nope'"),
            ("/agents/Desk/x", 400, "no agent class answers to 'Desk'"),
            ("/agents/note/x", 404, "Not Found"),
            (f"{ROOT}/sub/nope/x", 404, "Not Found"),
            (f"{ROOT}/sub/note", 404, "Not Found"),
        ]:
            answer = await server.http("GET", path)
            assert (answer[0], answer[2].decode()) == (status, words)
        assert server.kernel.trees == {}


@pytest.mark.rule("W-026")
async def test_options_is_for_the_agent_unless_cors_is_on() -> None:
    async with wired() as server:
        status, _, body = await server.http("OPTIONS", ROOT)
        assert (status, body) == (200, b"OPTIONS d /")
    async with wired(cors=True) as server:
        status, headers, body = await server.http("OPTIONS", ROOT)
        assert (status, body) == (200, b"")
        assert headers["access-control-allow-methods"] == "GET, POST, HEAD, OPTIONS"
        assert headers["access-control-allow-headers"] == "*"
        assert server.kernel.trees == {}, "nobody was woken"


@pytest.mark.rule("W-027")
async def test_with_cors_every_answer_of_agents_may_be_read_by_foreign_pages() -> None:
    origin = ("Origin: https://b.example",)
    async with wired(cors=True) as server:
        for path, status in [
            (ROOT, 200), ("/agents/bare/b", 404), ("/agents/nope/x", 400),
            (f"{ROOT}/sub/note/a/sub/note/b", 404),
        ]:  # fmt: skip
            answer = await server.http("GET", path, headers=origin)
            assert (answer[0], answer[1]["access-control-allow-origin"]) == (
                status,
                "*",
            )
        elsewhere = await server.http("GET", "/elsewhere", headers=origin)
        assert "access-control-allow-origin" not in elsewhere[1]
        foreign = [("Origin", "https://b.example")]
        assert await server.refused(ROOT, foreign) == 403, "sockets want `origins`"
    async with wired(origins=("https://b.example",)) as server:
        assert await server.refused(ROOT, foreign) == 101
        status, headers, _ = await server.http("GET", ROOT, headers=origin)
        assert status == 200
        assert "access-control-allow-origin" not in headers


@pytest.mark.rule("W-027", "W-029")
async def test_without_an_open_kernel_a_path_says_come_again() -> None:
    async with wired(cors=True) as server:
        (gateway,) = gateways_of(server.app)
        gateway.serve(None)
        status, headers, body = await server.http("GET", ROOT)
        assert (status, headers["retry-after"], body) == (503, "1", b"not ready\n")
        assert headers["access-control-allow-origin"] == "*", "a page may read that"
        async with server.connect(ROOT) as client:
            assert await client.closed() == (1012, "the server restarts")
        gateway.serve(server.kernel)
        gateway.drain()
        assert (await server.http("GET", ROOT))[0] == 503
        async with server.connect(ROOT) as client:
            assert (await client.closed())[0] == 1012
        gateway.serve(server.kernel)
        async with server.connect(ROOT) as client:
            assert (await client.hello())[0]["name"] == "d"
