"""Routes of one's own: from a chosen parent down everything is as in the gateway."""

from __future__ import annotations

import hashlib
import json
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

import pytest
import trio
from quart import request as quart_request
from quart import websocket as quart_websocket
from quart_trio import QuartTrio

from culet.kernel import (
    Agent,
    ChildRef,
    Kernel,
    Limits,
    Request,
    Response,
    open_kernel,
    rpc,
)
from culet.kernel.errors import ConnectionLost, UsageError
from culet.web import (
    RemoteAgent,
    build_agent_path,
    build_agent_url,
    connect,
    create_app,
    install,
    kernel_of,
    route_sub_agent_request,
    route_sub_agent_socket,
)
from web import serving as kit
from web.serving import Server, parse_answer, read_all

asked: list[tuple[str, str, str, Any]] = []  # what gates saw


@pytest.fixture(autouse=True)
def _nothing_was_asked() -> None:
    asked.clear()


class Talker(Agent):
    """What all agents of these tests do."""

    initial_state = {"n": 0}

    async def on_before_sub_agent(
        self, request: Request, child: ChildRef
    ) -> Request | Response | None:
        asked.append((self.name, child.name, request.url, request.identity))
        if "forbid" in request.query or child.name == "secret":
            return Response("no", 403)
        return await super().on_before_sub_agent(request, child)

    async def on_request(self, request: Request) -> Response:
        match request.path:
            case "/echo":
                return Response(request.stream())
            case "/first":
                async with aclosing(request.stream()) as parts:
                    async for part in parts:
                        return Response(f"began with {len(part) > 0}")
                return Response("empty")
            case "/digest":
                digest, size = hashlib.sha256(), 0
                async for part in request.stream():
                    digest.update(part)
                    size += len(part)
                return Response(f"{size} {digest.hexdigest()}")
            case "/unwanted":
                await queues_are_full()
                return Response("unwanted")
            case "/breaks":
                return Response(_breaking())
            case "/unread":
                await trio.sleep_forever()
        headers = {k: request.headers.get(k, "") for k in ("x-mine", "host")}
        body = (await request.read()).decode()
        return Response.json(
            [self.name, request.method, request.url, headers, body, request.identity]
        )

    def get_connection_tags(self, connection, ctx) -> list[str]:
        return [f"tag-{self.name}"]

    def should_connection_be_readonly(self, connection, ctx) -> bool:
        return "readonly" in ctx.request.query

    async def on_message(self, connection, message) -> None:
        connection.set_state(lambda n: (n or 0) + 1)
        connection.send(f"{connection.state} {message}")

    @rpc
    async def whoami(self) -> list[str]:
        return [step.name for step in self.self_path]

    @rpc
    async def sockets_seen(self) -> list[list[str]]:
        return [list(c.tags)[1:] for c in self.sockets.list()]

    async def tell(self, text: str) -> int:
        self.broadcast(text)
        return len(self.sockets.list())

    async def drop(self, name: str) -> None:
        await self.dynamic_agents.delete(Clerk, name)

    async def make(self, name: str) -> None:
        await self.dynamic_agents.get(Clerk, name)

    async def names(self) -> list[str]:
        return [child.name for child in self.dynamic_agents.list()]


async def queues_are_full() -> None:
    """Wait until the upload stands still."""
    await trio.testing.wait_all_tasks_blocked(0.05)


async def _breaking() -> AsyncIterator[bytes]:
    yield b"so far"
    await queues_are_full()
    raise ValueError("half-way")


class Desk(Talker):
    """The root."""


class Clerk(Talker):
    """A facet; one may stand below another."""


def routes(kernel: Kernel, **options: Any) -> QuartTrio:
    """Return a service that parses its URLs itself."""
    app = create_app(kernel, **options)
    methods = ["GET", "POST", "PUT", "HEAD", "OPTIONS"]

    @app.route("/api/u/<user>/<path:rest>", methods=methods)
    async def http(user: str, rest: str) -> Any:
        parent = await kernel.get_agent(Desk, user)
        return await route_sub_agent_request(quart_request, parent, identity=user)

    @app.route("/via/<user>")
    async def via(user: str) -> Any:
        parent = await kernel.get_agent(Desk, user)
        return await route_sub_agent_request(
            quart_request, parent, quart_request.headers["x-to"]
        )

    @app.websocket("/ws/u/<user>/<path:rest>")
    async def socket(user: str, rest: str) -> None:
        parent = await kernel.get_agent(Desk, user)
        await route_sub_agent_socket(quart_websocket, parent, identity=user)

    @app.websocket("/job/<name>")
    async def job(name: str) -> None:
        parent = await kernel.get_agent(Desk, "jobs")
        await route_sub_agent_socket(
            quart_websocket, parent, f"/sub/clerk/{name}?via=1"
        )

    @app.websocket("/late")
    async def late() -> None:
        await quart_websocket.accept()
        with pytest.raises(UsageError, match="accepted already"):
            await route_sub_agent_socket(
                quart_websocket, await kernel.get_agent(Desk, "a"), "/sub/clerk/c"
            )
        await quart_websocket.send("refused")

    return app


@asynccontextmanager
async def opened(
    limits: Limits | None = None, storage: Any = "memory:"
) -> AsyncIterator[Kernel]:
    async with open_kernel(
        roots=[Desk], facets=[Clerk], storage=storage, limits=limits
    ) as kernel:
        yield kernel


@asynccontextmanager
async def service(
    limits: Limits | None = None, **options: Any
) -> AsyncIterator[Server]:
    async with opened(limits) as kernel, trio.open_nursery() as nursery:
        app = routes(kernel, **options)
        url = await nursery.start(kit.RUNNERS[kit.transport_of_tests], app)
        yield Server(url, kernel)
        nursery.cancel_scope.cancel()


async def test_the_kernel_of_an_app_is_at_hand() -> None:
    async with opened() as kernel:
        app = create_app(kernel)
        assert kernel_of(app) is kernel_of(app, "agents") is kernel
        with pytest.raises(UsageError, match=r"one of \['agents'\]"):
            kernel_of(app, "other")
        install(app, kernel, prefix="other")
        assert kernel_of(app, "other") is kernel
        with pytest.raises(UsageError, match="which kernel"):
            kernel_of(app)
    lazy = create_app(opened)
    with pytest.raises(UsageError, match="not open yet"):
        kernel_of(lazy)
    with pytest.raises(UsageError, match="no agents"):
        kernel_of(QuartTrio(__name__))


# ---- HTTP


@pytest.mark.rule("F-136", "F-121", "F-129", "F-178", "F-179")
async def test_the_gate_is_asked_and_the_leaf_gets_its_tail(transport: str) -> None:
    async with service() as server:
        status, _headers, body = await server.http(
            "POST",
            "/api/u/alice/sub/clerk/c%2F1/p/q?x=1&y=%20",
            headers=("X-Mine: yes",),
            body=b"hello",
        )

    assert status == 200
    name, method, url, headers, text, identity = json.loads(body)
    assert (name, method, url, text) == ("c/1", "POST", "/p/q?x=1&y=%20", "hello")
    assert headers["x-mine"] == "yes" and headers["host"].startswith("127.0.0.1:")
    assert identity == "alice"
    assert asked == [("alice", "c/1", "/sub/clerk/c%2F1/p/q?x=1&y=%20", "alice")]


@pytest.mark.rule("F-136", "F-131")
async def test_each_hop_has_its_gate_and_only_the_last_is_made() -> None:
    async with service() as server:
        first = await server.http("GET", "/api/u/alice/sub/clerk/a/sub/clerk/b/z")
        desk = await server.kernel.get_agent(Desk, "alice")
        nothing = await desk.names()
        made = await server.http("GET", "/api/u/alice/sub/clerk/a")
        both = await server.http("GET", "/api/u/alice/sub/clerk/a/sub/clerk/b/z")

    assert (first[0], nothing) == (404, [])
    assert (made[0], both[0]) == (200, 200)
    assert json.loads(both[2])[:3] == ["b", "GET", "/z"]
    gates = [(at, to) for at, to, _url, _who in asked]
    assert gates == [("alice", "a"), ("alice", "a"), ("alice", "a"), ("a", "b")]


REFUSED = [
    pytest.param("/api/u/a/nothing/here", 400, id="no-hop"),
    pytest.param("/api/u/a/sub/stranger/x", 404, id="unknown-class"),
    pytest.param("/api/u/a/sub/Clerk/x", 404, id="the-class-name-is-no-segment"),
    pytest.param("/api/u/a/sub/desk/x", 404, id="a-root-class-is-no-facet"),
    pytest.param("/api/u/a/sub/clerk", 404, id="no-name"),
    pytest.param("/api/u/a/sub/sub/clerk/x", 404, id="the-first-marker-decides"),
    pytest.param("/api/u/a/sub/clerk/%00", 400, id="nul"),
    pytest.param("/api/u/a/sub/clerk/%zz", 400, id="broken-escape"),
    pytest.param("/api/u/a/sub/clerk/x/%2e%2e/y", 400, id="dots"),
    pytest.param(f"/api/u/a{'/sub/clerk/x' * 4}", 400, id="too-deep"),
]


@pytest.mark.rule("F-130", "F-140", "F-168", "F-169", "F-171", "F-173", "F-180")
@pytest.mark.parametrize(("path", "status"), REFUSED)
async def test_what_cannot_be_named_is_refused_and_asks_nobody(
    path: str, status: int
) -> None:
    async with service() as server:
        answer = await server.http("GET", path)
        code = await server.close_of(path.replace("/api/", "/ws/"))
        desk = await server.kernel.get_agent(Desk, "a")
        names = await desk.names()

    assert (answer[0], code) == (status, 4000 + status)
    assert (asked, names) == ([], [])


async def test_whether_it_exists_is_not_told_by_who_refuses() -> None:
    async with service() as server:
        desk = await server.kernel.get_agent(Desk, "a")
        await desk.make("there")
        there = await server.http("GET", "/api/u/a/sub/clerk/there?forbid=1")
        absent = await server.http("GET", "/api/u/a/sub/clerk/absent?forbid=1")
        codes = [
            await server.close_of(f"/ws/u/a/sub/clerk/{name}?forbid=1")
            for name in ("there", "absent")
        ]
        names = await desk.names()

    assert there == absent or there[0::2] == absent[0::2] == (403, b"no")
    assert codes == [4403, 4403]
    assert names == ["there"]


@pytest.mark.rule("F-137", "F-138", "F-139")
@pytest.mark.parametrize(
    ("to", "url"),
    [
        ("/sub/clerk/c/leaf", "/leaf?x=1"),
        ("sub/clerk/c/leaf", "/leaf?x=1"),
        ("/sub/clerk/c/leaf?y=2", "/leaf?y=2"),
        ("/sub/clerk/c/leaf?", "/leaf"),
        ("/sub/clerk/c/leaf?y=2#part", "/leaf?y=2"),
        ("/agents/desk/alice/sub/clerk/c/leaf", "/leaf?x=1"),
    ],
)
async def test_from_path_stands_for_the_path(to: str, url: str) -> None:
    async with service() as server:
        status, _, body = await server.http(
            "GET", "/via/alice?x=1", headers=(f"X-To: {to}",)
        )

    assert (status, json.loads(body)[0], json.loads(body)[2]) == (200, "c", url)


@pytest.mark.rule("F-151", "F-160", "F-166", "F-175")
@pytest.mark.parametrize("name", ["c/1", "space ü?%#", "sub", "a:b", "100%25", "日本"])
async def test_a_path_that_was_built_leads_there(name: str) -> None:
    steps = [("Desk", "alice"), ("Clerk", name)]
    path = build_agent_path(steps, leaf_path="/callbacks/job")
    other = build_agent_path(steps, prefix="api/v1", root_binding="MY_DESK")
    url = build_agent_url("https://x.example", steps, leaf_path="/callbacks/job")
    with pytest.raises(UsageError, match="at least one step"):
        build_agent_path([])
    async with opened() as kernel:
        desk = await kernel.get_agent(Desk, "alice")
        answers = [
            await route_sub_agent_request(Request("GET", "/outer"), desk, to)
            for to in (path, other, url.removeprefix("https://x.example"))
        ]

    said = [json.loads(bytes(a.body)) for a in answers]  # type: ignore[arg-type]
    assert [s[0] for s in said] == [name] * 3
    assert [s[2] for s in said] == ["/callbacks/job", "/", "/callbacks/job"]
    assert other.startswith("/api/v1/my-desk/alice/sub/clerk/")


async def test_a_facet_may_be_the_parent_and_depth_counts_from_the_root() -> None:
    async with opened() as kernel:
        desk = await kernel.get_agent(Desk, "a")
        above = await kernel.get_sub_agent(desk, Clerk, "one")
        below = await route_sub_agent_request(Request("GET", "/x/sub/clerk/two"), above)
        deep = await route_sub_agent_request(
            Request("GET", f"/x{'/sub/clerk/y' * 3}"), above
        )

        assert (below.status, deep.status) == (200, 400)
        assert [(at, to) for at, to, _, _ in asked] == [("one", "two")]


@pytest.mark.rule("W-023")
async def test_a_parent_that_was_deleted_is_410_and_comes_not_back() -> None:
    async with opened() as kernel:
        desk = await kernel.get_agent(Desk, "a")
        above = await kernel.get_sub_agent(desk, Clerk, "one")
        await desk.drop("one")
        answer = await route_sub_agent_request(Request("GET", "/sub/clerk/x"), above)

        assert answer.status == 410
        assert await desk.names() == []


@pytest.mark.parametrize("wrong", [None, "Desk", object()])
async def test_what_is_no_stub_of_an_agent_is_refused(wrong: Any) -> None:
    with pytest.raises(UsageError, match="stub that get_agent"):
        await route_sub_agent_request(Request("GET", "/sub/clerk/x"), wrong)


async def test_an_identity_of_the_request_is_kept() -> None:
    async with opened() as kernel:
        desk = await kernel.get_agent(Desk, "a")
        request = Request("GET", "/sub/clerk/x", identity="bo")
        kept = await route_sub_agent_request(request, desk)
        other = await route_sub_agent_request(request, desk, identity="eve")

    assert json.loads(bytes(kept.body))[-1] == "bo"  # type: ignore[arg-type]
    assert json.loads(bytes(other.body))[-1] == "eve"  # type: ignore[arg-type]


async def test_origins_and_cors_are_those_of_the_app() -> None:
    foreign = ("Origin: https://else.example",)
    path = "/api/u/a/sub/clerk/c"
    async with service() as server:
        refused = await server.http("GET", path, headers=foreign)
        nobody = await (await server.kernel.get_agent(Desk, "a")).names()
        ws = path.replace("/api/", "/ws/")
        shaken = await server.refused(ws, [("Origin", "https://else.example")])
    async with service(cors=True) as server:
        preflight = await server.http("OPTIONS", path, headers=foreign)
        allowed = await server.http("GET", path, headers=foreign)

    assert (refused[0], nobody, shaken) == (403, [], 403)
    assert (preflight[0], allowed[0]) == (200, 200)
    assert allowed[1]["access-control-allow-origin"] == "*"


# ---- bodies

BIG = bytes(range(256)) * 8192  # 2 MB


@pytest.mark.rule("F-134")
@pytest.mark.parametrize(
    "path", ["/api/u/a/sub/clerk/one", "/api/u/a/sub/clerk/one/sub/clerk/two"]
)
async def test_two_megabytes_go_through_the_hops_byte_by_byte(
    path: str, transport: str
) -> None:
    async with service() as server:
        await server.http("GET", "/api/u/a/sub/clerk/one")
        status, _, said = await server.http("POST", f"{path}/digest", body=BIG)
        echoed = await both_ways(server, f"{path}/echo", BIG)

    assert (status, said.decode()) == (200, f"{len(BIG)} {_digest(BIG)}")
    assert echoed[0] == 200 and _digest(echoed[2]) == _digest(BIG)


async def both_ways(server: Server, path: str, body: bytes) -> Any:
    """Send and read at the same time."""
    stream = await trio.open_tcp_stream("127.0.0.1", server.port)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    length = f"Content-Length: {len(body)}\r\n\r\n"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_send, stream, (head + length).encode() + body)
        return parse_answer(await read_all(stream))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.mark.rule("F-134")
@pytest.mark.parametrize("path", ["/api/u/a/sub/clerk/c", "/agents/desk/a/sub/clerk/c"])
async def test_an_answer_begins_and_ends_before_the_upload_does(
    path: str, transport: str
) -> None:
    async with service() as server:
        await server.kernel.get_agent(Desk, "a")
        stream = await trio.open_tcp_stream("127.0.0.1", server.port)
        head = f"POST {path}/first HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n"
        length = f"Content-Length: {len(BIG)}\r\n\r\n"
        await stream.send_all((head + length).encode() + BIG[:1000])
        status, _, body = parse_answer(await read_all(stream))
        again = await server.http("GET", "/healthz")

    assert (status, body) == (200, b"began with True")
    assert again[0] == 200


@pytest.mark.rule("F-134")
async def test_an_upload_that_nobody_wants_is_answered_all_the_same(
    transport: str,
) -> None:
    """The whole body is on its way, more than all queues hold, and nobody reads it."""
    async with service() as server:
        await server.kernel.get_agent(Desk, "a")
        stream = await trio.open_tcp_stream("127.0.0.1", server.port)
        head = "POST /agents/desk/a/sub/clerk/c/unwanted HTTP/1.1\r\nHost: x\r\n"
        length = f"Content-Length: {len(BIG) * 4}\r\n\r\n"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_send, stream, (head + length).encode() + BIG * 4)
            status, _, body = parse_answer(await read_all(stream))
            nursery.cancel_scope.cancel()
        again = await server.http("GET", "/agents/desk/a/sub/clerk/c")

    assert (status, body, again[0]) == (200, b"unwanted", 200)


async def test_an_answer_that_breaks_off_ends_the_connection(transport: str) -> None:
    """Nobody reads the upload, and the queue of the server is full of it."""
    async with service() as server:
        await server.kernel.get_agent(Desk, "a")
        stream = await trio.open_tcp_stream("127.0.0.1", server.port)
        head = "POST /agents/desk/a/sub/clerk/c/breaks HTTP/1.1\r\nHost: x\r\n"
        length = f"Content-Length: {len(BIG) * 4}\r\n\r\n"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_send, stream, (head + length).encode() + BIG * 4)
            data = await read_all(stream)
            nursery.cancel_scope.cancel()

    assert b"so far" in data
    assert not data.endswith(b"0\r\n\r\n")  # it does not look whole


async def _send(stream: trio.SocketStream, data: bytes) -> None:
    with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        await stream.send_all(data)


class Upload:
    """A large upload, as an ASGI server would give it to the app; then silence."""

    SIZE = 64 << 20

    def __init__(self, path: str) -> None:
        self.taken = 0
        self.sent: list[Any] = []
        self.scope: Any = {
            "type": "http", "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": path, "raw_path": path.encode(), "query_string": b"",
            "root_path": "", "headers": [(b"host", b"x")], "asgi": {"version": "3.0"},
            "client": None, "server": None, "extensions": {},
        }  # fmt: skip

    async def receive(self) -> Any:
        await trio.lowlevel.checkpoint()
        if self.taken >= self.SIZE:
            await trio.sleep_forever()
        self.taken += 65536
        return {"type": "http.request", "body": b"x" * 65536, "more_body": True}

    async def send(self, message: Any) -> None:
        await trio.lowlevel.checkpoint()
        if message is not None:
            self.sent.append(message)


@pytest.mark.limit("body_unread_bytes")
@pytest.mark.rule("F-134")
@pytest.mark.parametrize("path", ["/api/u/a/sub/clerk/c", "/agents/desk/a/sub/clerk/c"])
async def test_no_more_of_a_body_is_taken_than_is_read(path: str) -> None:
    async with opened() as kernel, trio.open_nursery() as nursery:
        await kernel.get_agent(Desk, "a")
        upload = Upload(f"{path}/unread")
        app = routes(kernel)
        nursery.start_soon(app, upload.scope, upload.receive, upload.send)
        await trio.testing.wait_all_tasks_blocked(0.01)
        nursery.cancel_scope.cancel()

    # the part that came while a route of one's own looked for the parent is beside it
    assert upload.taken <= Limits().body_unread_bytes + 16 * 65536
    assert not upload.sent


async def test_a_body_that_is_not_read_in_time_is_dropped(clock: Any) -> None:
    class Slow(Agent):
        async def on_request(self, request: Request) -> Response:
            size = 0
            async for part in request.stream():
                size += len(part)
                await trio.sleep(300)
            return Response(f"all of {size}")

    async with open_kernel(roots=[Slow], storage="memory:") as kernel:
        upload = Upload("/agents/slow/a")
        await create_app(kernel)(upload.scope, upload.receive, upload.send)

    assert upload.sent[0]["status"] == 408
    assert upload.sent[1]["body"] == b"the request body was not read in time"


async def test_each_kernel_of_an_app_has_its_own_rules() -> None:
    """Two are mounted; a route's parent says whose."""
    foreign = ("Origin: https://else.example",)
    async with opened() as one, opened() as two, trio.open_nursery() as nursery:
        app = create_app(one, origins="*")
        install(app, two, prefix="other", cors={"x-two": "yes"})

        @app.route("/<number>/<path:rest>")
        async def http(number: str, rest: str) -> Any:
            desk = await {"1": one, "2": two}[number].get_agent(Desk, number)
            return await route_sub_agent_request(quart_request, desk)

        @app.websocket("/<number>/<path:rest>")
        async def socket(number: str, rest: str) -> None:
            desk = await {"1": one, "2": two}[number].get_agent(Desk, number)
            await route_sub_agent_socket(quart_websocket, desk)

        url = await nursery.start(kit.run_own, app)
        server = Server(url, one)
        answers = [
            await server.http("GET", f"/{n}/sub/clerk/c", headers=foreign)
            for n in (1, 2)
        ]
        shaken = [
            await server.refused(f"/{n}/sub/clerk/c", [("Origin", "https://e.example")])
            for n in (1, 2)
        ]
        at_two = await (await two.get_agent(Desk, "2")).names()
        nursery.cancel_scope.cancel()

    assert [a[0] for a in answers] == [200, 200]
    assert [a[1].get("x-two") for a in answers] == [None, "yes"]
    assert shaken == [101, 403]
    assert at_two == ["c"]


async def test_what_the_caller_wrote_is_durable_before_the_call_leaves() -> None:
    class Caller(Agent):
        async def call_out(self) -> int:
            self.sql("CREATE TABLE t (v)")
            desk = await self.kernel.get_agent(Desk, "d")
            self.sql("INSERT INTO t VALUES (1)")
            await route_sub_agent_request(Request("GET", "/sub/clerk/c"), desk)
            barrier = self._node.tree.barrier
            return barrier.count - barrier.durable

    async with open_kernel(roots=[Caller, Desk], facets=[Clerk]) as kernel:
        assert await (await kernel.get_agent(Caller, "c")).call_out() == 0


# ---- sockets


@pytest.mark.rule("F-191", "F-193", "F-194", "F-196", "F-197", "F-203")
async def test_a_socket_of_a_route_is_seen_by_the_leaf_alone(transport: str) -> None:
    async with service() as server:
        desk = await server.kernel.get_agent(Desk, "alice")
        async with server.connect("/ws/u/alice/sub/clerk/c%2F1/x?_pk=me") as client:
            hello = await client.hello()
            who = await client.call("whoami")
            seen = await client.call("sockets_seen")
            await client.socket.send_message("one")
            await client.socket.send_message("two")
            echoed = [await client.raw(), await client.raw()]
            at_desk = await desk.sockets_seen()
            told = await desk.tell("for the desk only")
            owners = {
                row["path"]: row["sockets"]
                for row in server.kernel.tree("Desk", "alice")
            }

    assert (hello[0]["name"], hello[0]["agent"]) == ("c/1", "clerk")
    assert hello[1]["state"] == {"n": 0}
    assert who["result"] == ["alice", "c/1"]
    assert seen["result"] == [["tag-c/1"]]
    assert echoed == ["1 one", "2 two"]
    assert (at_desk, told) == ([], 0)
    assert sum(owners.values()) == 1
    assert [(at, to, who) for at, to, _, who in asked] == [("alice", "c/1", "alice")]


@pytest.mark.rule("F-192", "F-471")
async def test_two_hops_ask_two_gates_once_for_all_frames(transport: str) -> None:
    async with service() as server:
        await server.http("GET", "/api/u/a/sub/clerk/one")
        asked.clear()
        async with server.connect("/ws/u/a/sub/clerk/one/sub/clerk/two") as client:
            await client.hello()
            for i in range(5):
                await client.socket.send_message(str(i))
            last = [await client.raw() for _ in range(5)][-1]
            who = await client.call("whoami")
        desk = await server.kernel.get_agent(Desk, "a")
        names = await desk.names()

    assert (last, who["result"]) == ("5 4", ["a", "one", "two"])
    assert [(at, to) for at, to, _, _ in asked] == [("a", "one"), ("one", "two")]
    assert names == ["one"]


@pytest.mark.rule("F-197")
async def test_readonly_and_state_frames_reach_the_leaf(transport: str) -> None:
    async with service() as server:
        path = "/ws/u/a/sub/clerk/c"
        async with (
            server.connect(path) as one,
            server.connect(f"{path}?readonly") as two,
        ):
            await one.hello()
            await two.hello()
            await two.send({"type": "cf_agent_state", "state": {"n": 9}})
            refused = await two.frame()
            await one.send({"type": "cf_agent_state", "state": {"n": 1}})
            told = await two.until(lambda frame: frame.get("state") == {"n": 1})

    assert refused["type"] == "cf_agent_state_error"
    assert {"type": "cf_agent_state", "state": {"n": 9}} not in told


@pytest.mark.rule("F-199", "F-197")
async def test_a_leaf_that_was_away_finds_its_sockets_again(transport: str) -> None:
    async with service() as server, server.connect("/ws/u/a/sub/clerk/c") as client:
        await client.hello()
        await client.socket.send_message("one")
        assert await client.raw() == "1 one"
        (tree,) = server.kernel.trees.values()
        for node in sorted(tree.nodes.values(), key=lambda n: -len(n.lineage())):
            await tree.evict(node)
        asleep = not tree.nodes
        desk = await server.kernel.get_agent(Desk, "a")
        clerk = await server.kernel.get_sub_agent(desk, Clerk, "c")
        heard_by = await clerk.tell("back again")
        heard = await client.raw()
        await client.socket.send_message("two")
        kept = await client.raw()
        tags = await client.call("sockets_seen")

    assert asleep
    assert (heard_by, heard, kept) == (1, "back again", "2 two")
    assert tags["result"] == [["tag-c"]]


async def test_deleting_the_leaf_ends_its_sockets(transport: str) -> None:
    async with service() as server, server.connect("/ws/u/a/sub/clerk/c") as client:
        await client.hello()
        await (await server.kernel.get_agent(Desk, "a")).drop("c")
        code, _reason = await client.closed()

    assert code == 4410


async def test_a_client_that_leaves_is_forgotten(transport: str) -> None:
    async with service() as server:
        async with server.connect("/ws/u/a/sub/clerk/c") as client:
            await client.hello()
            (tree,) = server.kernel.trees.values()
            before = tree.sockets.count
        with trio.fail_after(5):
            while tree.sockets.count:
                await trio.lowlevel.checkpoint()

    assert before == 1


async def test_clients_by_a_route_are_told_that_the_server_stops() -> None:
    async with service() as server, server.connect("/ws/u/a/sub/clerk/c") as client:
        await client.hello()
        signal.raise_signal(signal.SIGTERM)
        assert (await client.closed())[0] == 1012


async def test_from_path_and_its_query_are_for_sockets_as_well() -> None:
    async with service() as server, server.connect("/job/j1?mine=2") as client:
        hello = await client.hello()

    assert hello[0]["name"] == "j1"
    assert asked == [("jobs", "j1", "/sub/clerk/j1?via=1", None)]


async def test_our_client_comes_by_a_route_of_ones_own(transport: str) -> None:
    async with service() as server:
        ws = server.url.replace("http", "ws")
        async with connect(f"{ws}/ws/u/alice/sub/clerk/c") as clerk:
            who = await clerk.call("whoami")
            await clerk.set_state({"n": 7})

    assert (clerk.name, who) == ("c", ["alice", "c"])


async def asked_again(agent: RemoteAgent) -> Any:
    """Call over a connection that is just being lost: what was under way fails."""
    with trio.fail_after(10):
        while True:
            with suppress(ConnectionLost):
                return await agent.call("whoami")


@pytest.mark.rule("F-176", "F-177")
async def test_chains_of_clients_stand_behind_their_base_and_stay_apart() -> None:
    """The same leaf name below two parents, and what comes back is the same agent."""
    async with service() as server:
        base = f"{server.url.replace('http', 'ws')}/ws/u/alice"
        for name in ("a", "b"):
            await server.http("GET", f"/api/u/alice/sub/clerk/{name}")
        chains = [[("Clerk", name), ("Clerk", "leaf")] for name in ("a", "b")]
        async with (
            connect(base, sub=chains[0], query={"x": "1"}) as one,
            connect(base, sub=chains[1]) as two,
        ):
            paths = [await one.call("whoami"), await two.call("whoami")]
            (tree,) = server.kernel.trees.values()
            tree.sockets.cut_all(1012, "come back")
            again = [await asked_again(one), await asked_again(two)]

    assert paths == again == [["alice", "a", "leaf"], ["alice", "b", "leaf"]]
    urls = [url for _at, _to, url, _who in asked if "leaf" in url]
    assert "/sub/clerk/a/sub/clerk/leaf?_pk=" in urls[0] and urls[0].endswith("x=1")


async def test_a_socket_that_was_accepted_cannot_be_left_to_an_agent() -> None:
    async with service() as server, server.connect("/late") as client:
        assert await client.raw() == "refused"


async def test_what_an_app_goes_on_to_send_to_a_socket_it_left_goes_nowhere() -> None:
    async with opened() as kernel, trio.open_nursery() as nursery:
        app = create_app(kernel)

        @app.websocket("/left")
        async def socket() -> None:
            async def chatter() -> None:
                await left.wait()
                while True:  # and lets everybody else go on
                    await quart_websocket.send("from the app")

            left = trio.Event()
            async with trio.open_nursery() as here:
                here.start_soon(chatter)
                desk = await kernel.get_agent(Desk, "a")
                left.set()
                await route_sub_agent_socket(quart_websocket, desk, "/sub/clerk/c")
                here.cancel_scope.cancel()

        url = await nursery.start(kit.RUNNERS[kit.transport_of_tests], app)
        async with Server(url, kernel).connect("/left") as client:
            await client.hello()
            answers = [await client.call("whoami") for _ in range(5)]
        nursery.cancel_scope.cancel()
    assert [answer["result"] for answer in answers] == [["a", "c"]] * 5


async def test_an_app_without_agents_cannot_take_sockets() -> None:
    app = QuartTrio(__name__)
    problems: list[str] = []
    async with opened() as kernel:

        @app.websocket("/ws")
        async def socket() -> None:
            desk = await kernel.get_agent(Desk, "a")
            try:
                await route_sub_agent_socket(quart_websocket, desk, "/sub/clerk/c")
            except UsageError as error:
                problems.append(str(error))

        async with trio.open_nursery() as nursery:
            url = await nursery.start(kit.run_hypercorn, app)
            assert await Server(url, kernel).refused("/ws") in {200, 403, 500}
            nursery.cancel_scope.cancel()

    assert problems == [
        "the app does not serve that kernel: give it to create_app or install"
    ]


async def test_sockets_of_routes_count_among_the_others() -> None:
    limits = Limits(connections_per_address=2)
    async with opened(limits) as kernel, trio.open_nursery() as nursery:
        url = await nursery.start(kit.run_hypercorn, routes(kernel))
        server = Server(url, kernel)
        async with (
            server.connect("/ws/u/a/sub/clerk/c") as one,
            server.connect("/agents/desk/a") as two,
        ):
            await one.hello()
            await two.hello()
            third = await server.refused("/ws/u/a/sub/clerk/c")
        nursery.cancel_scope.cancel()

    assert third == 503
