"""What gates and agents see of a request on its way, and what no request can do."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import pytest
import trio

from culet.kernel import Agent, Request, Response, open_kernel, rpc
from culet.web import create_app
from web.serving import HANDSHAKE, RUNNERS, Server

Seen = list[tuple[str, ...]]


class Mid(Agent):
    """Passes on, counts, and tells what it saw."""

    seen: ClassVar[Seen] = []
    started: ClassVar[list[Any]] = []

    async def on_start(self, props: Any = None) -> None:
        if self.name == "broken":
            raise ValueError("secret-token-9")
        self.started.append((self.name, props))

    async def on_before_sub_agent(self, request: Request, child: Any) -> Any:
        self.seen.append((self.name, request.url, child.class_name, child.name))
        match request.query.get("gate"):
            case "stop" if self.name == "m":
                return Response("not here", 418, {"x-why": "tea"})
            case "replace":
                return Request(
                    "PUT", "/elsewhere?b=2", headers={"x-more": "1"}, body=b"other"
                )
            case "redirect":
                return request.replace(path="/sub/mid/other")
            case "raise":
                raise ValueError("secret-token-9")
            case "number":
                return 7
            case "strict" if not self.dynamic_agents.has(child.class_name, child.name):
                return Response("unknown", 404)
        return None

    async def on_request(self, request: Request) -> Response:
        if request.path == "/raise":
            self.seen.append(("raised",))
            raise ValueError("secret-token-9")
        return Response.json(
            {
                "who": [step.name for step in self.self_path],
                "method": request.method,
                "path": request.path,
                "url": request.url,
                "query": request.query,
                "host": request.headers.get("host", ""),
                "more": request.headers.get("x-more"),
                "body": (await request.read()).decode(),
            }
        )

    @rpc
    async def make(self, name: str) -> None:
        await self.dynamic_agents.get(Mid, name)

    @rpc
    async def names(self) -> list[str]:
        return [child.name for child in self.dynamic_agents.list()]


class Top(Mid):
    """The root."""


@asynccontextmanager
async def serving(transport: str = "own", **options: Any) -> AsyncIterator[Server]:
    Mid.seen.clear()
    Mid.started.clear()
    async with (
        open_kernel(roots=[Top], facets=[Mid], storage="memory:") as kernel,
        trio.open_nursery() as nursery,
    ):
        url = await nursery.start(RUNNERS[transport], create_app(kernel, **options))
        server = Server(url, kernel)
        top: Any = await kernel.get_agent(Top, "t")
        await top.make("m")
        yield server
        nursery.cancel_scope.cancel()


async def ask(server: Server, method: str, tail: str, **more: Any) -> Any:
    status, _headers, body = await server.http(method, f"/agents/top/t{tail}", **more)
    assert status == 200, body
    return json.loads(body)


@pytest.mark.rule("F-121", "F-125", "F-128", "F-129", "F-178", "F-179")
@pytest.mark.parametrize("transport", ["own", "quart"])
async def test_each_hop_sees_what_is_left_at_it_and_the_leaf_its_tail(
    transport: str,
) -> None:
    async with serving(transport) as server:
        got = await ask(
            server, "POST", "/sub/mid/m/sub/mid/a%20b/p/q?x=1", body=b"hello"
        )

        assert got == {
            "who": ["t", "m", "a b"], "method": "POST", "path": "/p/q",
            "url": "/p/q?x=1", "query": {"x": "1"}, "more": None, "body": "hello",
            "host": f"127.0.0.1:{server.port}",
        }  # fmt: skip
        assert Mid.seen == [
            ("t", "/sub/mid/m/sub/mid/a%20b/p/q?x=1", "Mid", "m"),
            ("m", "/sub/mid/a%20b/p/q?x=1", "Mid", "a b"),
        ]


@pytest.mark.rule("F-121", "F-135")
@pytest.mark.parametrize("transport", ["own", "quart"])
async def test_get_and_head_come_without_a_body(transport: str) -> None:
    """Also where a client has sent one: it means nothing, and nobody is to rely on it."""
    async with serving(transport) as server:
        assert (await ask(server, "GET", "/sub/mid/m/x"))["body"] == ""
        assert (await ask(server, "GET", "/sub/mid/m/x", body=b"sent"))["body"] == ""
        for sent in (b"", b"sent"):
            status, headers, body = await server.http(
                "HEAD", "/agents/top/t/sub/mid/m/x", body=sent
            )
            assert (status, body) == (200, b"")
            told = await ask(server, "GET", "/sub/mid/m/x")
            like_get = len(
                json.dumps({**told, "method": "HEAD"}, separators=(",", ":"))
            )
            assert int(headers["content-length"]) == like_get


@pytest.mark.rule("F-122", "F-131", "F-123", "W-023")
async def test_a_gate_is_asked_once_and_its_response_ends_the_way() -> None:
    async with serving() as server:
        started = list(Mid.started)
        path = "/agents/top/t/sub/mid/m/sub/mid/new?gate=stop"
        status, headers, body = await server.http("GET", path)

        assert (status, headers["x-why"], body) == (418, "tea", b"not here")
        assert [seen[0] for seen in Mid.seen] == ["t", "m"], (
            "outermost first, each once"
        )
        assert Mid.started == started, "the child was not started"
        top: Any = await server.kernel.get_agent(Top, "t")
        mid = await server.kernel.get_sub_agent(top, Mid, "m")
        assert await mid.names() == [], "nor registered"


@pytest.mark.rule("F-124", "F-148")
async def test_a_request_of_the_gate_is_what_the_child_sees_but_for_its_path() -> None:
    async with serving() as server:
        got = await ask(server, "GET", "/sub/mid/m/tail?gate=replace&a=1")
        assert got["who"] == ["t", "m"]
        assert (got["method"], got["body"], got["more"]) == ("PUT", "other", "1")
        assert (got["path"], got["query"]) == ("/tail", {"b": "2"})

        got = await ask(server, "GET", "/sub/mid/m/tail?gate=redirect")
        assert (got["who"], got["path"]) == (["t", "m"], "/tail"), "no way elsewhere"


@pytest.mark.rule("F-126", "F-127")
async def test_a_strict_gate_lets_through_what_is_there() -> None:
    async with serving() as server:
        path = "/agents/top/t/sub/mid/{}?gate=strict"
        assert (await server.http("GET", path.format("new")))[0] == 404
        assert (await server.http("GET", path.format("m")))[0] == 200
        assert (await server.http("GET", path.format("new").partition("?")[0]))[
            0
        ] == 200
        assert (await server.http("GET", path.format("new")))[0] == 200, (
            "it is there now"
        )


@pytest.mark.rule("F-132", "F-149")
@pytest.mark.parametrize("way", ["raise", "number"])
async def test_a_gate_that_fails_refuses_without_a_word_of_why(way: str) -> None:
    async with serving() as server:
        status, _, body = await server.http(
            "GET", f"/agents/top/t/sub/mid/new?gate={way}"
        )
        assert status == 500
        assert b"secret" not in body
        assert len(Mid.seen) == 1, "and is not asked again"
        assert [name for name, _ in Mid.started] == ["t", "m"]


@pytest.mark.rule("F-133", "F-149", "F-150", "W-023")
async def test_a_child_that_cannot_start_is_503_and_a_handler_is_never_repeated() -> (
    None
):
    async with serving() as server:
        status, headers, body = await server.http("GET", "/agents/top/t/sub/mid/broken")
        assert (status, headers["retry-after"]) == (503, "1")
        assert b"secret" not in body

        assert (await server.http("POST", "/agents/top/t/raise", body=b"x"))[0] == 500
        assert Mid.seen.count(("raised",)) == 1


@pytest.mark.rule("F-145", "F-469")
async def test_props_reach_the_root_that_the_request_has_started_and_nobody_else() -> (
    None
):
    async with serving(props={"who": "ann"}) as server:
        await server.http("GET", "/agents/top/new")
        await server.http("GET", "/agents/top/new")
        await server.http("GET", "/agents/top/new/sub/mid/leaf")
        assert Mid.started == [
            ("t", None), ("m", None), ("new", {"who": "ann"}), ("leaf", None),
        ]  # fmt: skip
        for tree in list(
            server.kernel.trees.values()
        ):  # the root sleeps, its facet too
            for node in reversed(list(tree.nodes.values())):
                assert await tree.evict(node)
        Mid.started.clear()
        await server.http("GET", "/agents/top/new/sub/mid/leaf")
        assert Mid.started == [("new", None), ("leaf", None)], "it was not addressed"


@pytest.mark.rule("F-146")
async def test_headers_that_a_client_makes_up_open_no_door() -> None:
    made_up = (
        "x-cf-agents-subagent-url: http://x/agents/top/t/sub/mid/secret",
        'x-agents-lifecycle-props: {"admin": true}',
        "x-partykit-room: other",
    )
    async with serving() as server:
        await server.http("GET", "/agents/top/new", headers=made_up)
        top: Any = await server.kernel.get_agent(Top, "new")
        assert await top.names() == []
        assert ("new", None) in Mid.started
        headers = [tuple(line.split(": ", 1)) for line in made_up]
        async with server.connect("/agents/top/new", headers) as client:
            assert (await client.hello())[0]["name"] == "new"
        assert await top.names() == []


@pytest.mark.rule("F-147")
async def test_an_upgrade_stays_one_whatever_the_gate_makes_of_it() -> None:
    async with (
        serving() as server,
        server.connect("/agents/top/t/sub/mid/m?gate=replace") as client,
    ):
        assert (await client.hello())[0]["name"] == "m"


@pytest.mark.rule("F-144")
async def test_the_root_gate_is_asked_once_and_wakes_nobody() -> None:
    asked: list[bool] = []

    async def admit(request: Request, _root: Any) -> Response:
        asked.append("upgrade" in request.headers)
        return Response("no", 403)

    async with serving(admit=admit) as server:
        assert (await server.http("GET", "/agents/top/asleep"))[0] == 403
        assert await server.close_of("/agents/top/asleep") == 4403
        assert asked == [False, True]
        assert [key.name for key in server.kernel.trees] == ["t"]


@pytest.mark.rule("F-143", "W-026", "W-027")
async def test_a_preflight_is_answered_without_waking_anybody() -> None:
    async with serving(cors=True) as server:
        status, headers, _ = await server.http(
            "OPTIONS", "/agents/top/asleep/sub/mid/x"
        )
        assert (status, headers["access-control-allow-origin"]) == (200, "*")
        assert [key.name for key in server.kernel.trees] == ["t"]
        status, headers, _ = await server.http(
            "GET", "/agents/top/t/sub/mid/m?gate=raise"
        )
        assert (status, headers["access-control-allow-origin"]) == (500, "*")

        stream = await trio.open_tcp_stream("127.0.0.1", server.port)
        lines = ["GET /agents/top/t HTTP/1.1", "Host: x", *HANDSHAKE, "", ""]
        await stream.send_all("\r\n".join(lines).encode())
        answer = await stream.receive_some(4096)
        assert answer.startswith(b"HTTP/1.1 101")
        assert b"access-control" not in answer.lower()
        await trio.aclose_forcefully(stream)


@pytest.mark.rule("F-141", "F-142")
async def test_the_prefix_is_matched_by_segments_and_short_paths_are_not_ours() -> None:
    async with serving() as server:
        for path in ("/agentsX/top/t", "/agents", "/x/agents/top/t"):
            assert (await server.http("GET", path))[0] == 404
        assert (await server.http("GET", "/agents/nope/t"))[0] == 400
        assert Mid.seen == []


@pytest.mark.rule("F-137", "F-179")
async def test_a_query_is_for_the_leaf_as_well_as_for_every_gate() -> None:
    async with serving() as server:
        got = await ask(server, "GET", "/sub/mid/m?_pk=a&token=s%20t")
        assert got["query"] == {"_pk": "a", "token": "s t"}
        assert got["url"] == "/?_pk=a&token=s%20t"


def test_a_request_at_a_hop_keeps_its_query_and_nothing_else_changes() -> None:
    request = Request("POST", "/agents/a/b/sub/c/d?q=1", headers={"H": "1"}, body=b"x")
    there = request.at("/d")
    assert (there.url, there.path, there.query) == ("/d?q=1", "/d", {"q": "1"})
    assert (there.raw_path, there.method) == ("/agents/a/b/sub/c/d", "POST")
    assert request.url == "/agents/a/b/sub/c/d?q=1"
    assert there.headers == {"h": "1"}


class Told(Agent):
    """A gate that puts a request of its own in the place of the visitor's."""

    async def on_before_sub_agent(self, request: Request, child: Any) -> Any:
        match request.query.get("gate"):
            case "anew":
                return Request("PUT", "/x?gate=anew", body=b"anew")
            case "other":
                return Request("PUT", "/x?gate=other", identity="bob")
            case "nobody":
                return request.replace(identity=None, readonly=False)
        return None

    async def fill(self) -> None:
        await self.dynamic_agents.get(Told, "k")

    async def on_request(self, request: Request) -> Response:
        return Response.json([request.method, request.identity, request.readonly])


@pytest.mark.rule("F-124")
async def test_a_request_that_a_gate_makes_anew_forgets_neither_who_asks_nor_what_not() -> (
    None
):
    """What it leaves out is no word of the gate's: else a visitor became a nobody whom
    no revocation finds, and one who may only look could write."""

    async def authenticate(_request: Request) -> str:
        return "ann"

    async def admit(request: Request, _root: Any) -> Request:
        return request.replace(readonly=True)

    async with (
        open_kernel(roots=[Told], facets=[Mid, Told], storage="memory:") as kernel,
        trio.open_nursery() as nursery,
    ):
        app = create_app(kernel, authenticate=authenticate, admit=admit)
        server = Server(await nursery.start(RUNNERS["own"], app), kernel)
        for gate, expected in {
            "anew": ["PUT", "ann", True], "other": ["PUT", "bob", True],
            "nobody": ["GET", None, False], "": ["GET", "ann", True],
        }.items():  # fmt: skip
            path = f"/agents/told/t/sub/told/k/sub/told/deep?gate={gate}"
            await (await kernel.get_agent(Told, "t")).fill()
            status, _, body = await server.http("GET", path)
            assert (status, json.loads(body)) == (200, expected)
        nursery.cancel_scope.cancel()
