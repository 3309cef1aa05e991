"""A real server on a free port, its agents, and clients that speak to it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import trio
from hypercorn.config import Config
from hypercorn.trio import serve as hypercorn_serve
from quart_trio import QuartTrio
from trio_websocket import (
    ConnectionClosed,
    WebSocketConnection,
    wrap_client_stream,
)

from culet.kernel import (
    Agent,
    Final,
    Kernel,
    Limits,
    Request,
    Response,
    open_kernel,
    rpc,
)
from culet.kernel.errors import CapacityError
from culet.web import create_app, serve

BEGUN: list[str] = []  # requests that an agent has, and will read later


class Writer(Agent):
    """A child that can be run as a tool, and talked to."""

    async def on_turn(self, turn):
        for i in range(turn.input["k"]):
            yield {"type": "text-delta", "id": "t", "delta": f"w{i} "}

    @rpc
    async def whoami(self) -> list[str]:
        return [step.name for step in self.self_path]


class Plain(Agent):
    """A child without a turn: the default gate admits it."""

    @rpc
    async def whoami(self) -> list[str]:
        return [step.name for step in self.self_path]

    async def on_request(self, request: Request) -> Response:
        return Response(f"{self.name}|{request.path}|{request.query}")


class Broken(Agent):
    async def on_start(self) -> None:
        raise ValueError("secret-token-9")


class Hub(Agent):
    initial_state = {"n": 0}

    @rpc
    async def ping(self, text: str) -> str:
        return text

    @rpc
    async def slow(self, seconds: float) -> None:
        await trio.sleep(seconds)

    @rpc
    async def fail(self) -> None:
        raise ValueError("secret-token-9")

    async def hidden(self) -> str:
        return "never by a client"

    @rpc
    async def count(self, n: int) -> AsyncIterator[int]:
        for i in range(n):
            yield i
        yield Final("over")

    @rpc
    async def note(self, text: str) -> int:
        self.sql("CREATE TABLE IF NOT EXISTS t (v TEXT)")
        self.sql("INSERT INTO t VALUES (?)", text)
        return int(self.sql("SELECT count(*) AS n FROM t")[0].n)

    @rpc
    async def tell(self, text: str) -> None:
        self.broadcast(text)

    @rpc
    async def write(self, run_id: str, k: int) -> str:
        run = await self.run_agent_tool(Writer, {"k": k}, run_id=run_id)
        return run.status

    @rpc
    async def make(self, name: str) -> None:
        await self.dynamic_agents.get(Plain, name)

    @rpc
    async def delete(self, name: str) -> None:
        await self.dynamic_agents.delete(Plain, name)

    async def on_message(self, connection, message) -> None:
        if message == "boom":
            raise ValueError("secret-token-9")
        connection.send(message)

    async def on_connect(self, connection, ctx) -> None:
        if "boom" in ctx.request.query:
            raise ValueError("secret-token-9")
        if "full" in ctx.request.query:
            raise CapacityError("no room for you")

    def get_connection_tags(self, connection, ctx) -> list[str]:
        return [ctx.request.query["tag"]] if "tag" in ctx.request.query else []

    def should_connection_be_readonly(self, connection, ctx) -> bool:
        return "readonly" in ctx.request.query

    async def on_request(self, request: Request) -> Response:
        match request.path:
            case "/echo":
                return Response(await request.read())
            case "/late":
                BEGUN.append(request.path)
                await trio.sleep(float(request.query["s"]))
                return Response(str(len(await request.read())))
            case "/stream":
                return Response(_parts(), headers={"content-type": "text/plain"})
            case "/fail":
                raise ValueError("secret-token-9")
            case "/full":
                raise CapacityError("no room for you")
            case _:
                return Response("Not implemented", 404)


async def _parts() -> AsyncIterator[bytes]:
    for part in (b"one ", b"two ", b"three"):
        yield part
        await trio.lowlevel.checkpoint()


HANDSHAKE = (
    "Upgrade: websocket",
    "Connection: Upgrade",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    "Sec-WebSocket-Version: 13",
)


class Server:
    """A running server: its URL and its kernel."""

    def __init__(self, url: str, kernel: Kernel) -> None:
        self.url, self.kernel = url, kernel

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @asynccontextmanager
    async def connect(
        self, path: str = "/agents/hub/h", headers: Any = ()
    ) -> AsyncIterator[Client]:
        stream = await trio.open_tcp_stream("127.0.0.1", self.port)
        try:
            async with trio.open_nursery() as nursery:
                socket = await wrap_client_stream(
                    nursery,
                    stream,
                    f"127.0.0.1:{self.port}",
                    path,
                    extra_headers=list(headers),
                    message_queue_size=10_000,
                )
                yield Client(socket)
                nursery.cancel_scope.cancel()
        finally:
            await trio.aclose_forcefully(stream)

    async def refused(self, path: str, headers: Any = ()) -> int:
        """Return the HTTP status that answers a handshake."""
        stream = await trio.open_tcp_stream("127.0.0.1", self.port)
        lines = [f"GET {path} HTTP/1.1", f"Host: 127.0.0.1:{self.port}", *HANDSHAKE]
        lines += [f"{name}: {value}" for name, value in headers]
        async with stream:
            await stream.send_all("\r\n".join([*lines, "", ""]).encode())
            with trio.fail_after(5):
                answer = await stream.receive_some(65536)
        return parse_answer(answer)[0]

    async def close_of(self, path: str) -> int:
        """Connect, read to the end; return the close code."""
        async with self.connect(path) as client:
            return (await client.closed())[0]

    async def http(
        self,
        method: str,
        path: str,
        *,
        headers: tuple[str, ...] = (),
        body: bytes = b"",
    ) -> tuple[int, dict[str, str], bytes]:
        """Make one plain HTTP request on a connection of its own."""
        stream = await trio.open_tcp_stream("127.0.0.1", self.port)
        lines = [f"{method} {path} HTTP/1.1", f"Host: 127.0.0.1:{self.port}"]
        lines += [*headers, "Connection: close"]
        if body:
            lines.append(f"Content-Length: {len(body)}")
        async with stream:  # also where the server takes no more
            await stream.send_all("\r\n".join([*lines, "", ""]).encode() + body)
            return parse_answer(await read_all(stream))


class Client:
    """One WebSocket, frames as JSON."""

    def __init__(self, socket: WebSocketConnection) -> None:
        self.socket = socket
        self.calls = 0

    async def frame(self) -> Any:
        with trio.fail_after(5):
            return json.loads(await self.socket.get_message())

    async def raw(self) -> str | bytes:
        with trio.fail_after(5):
            return await self.socket.get_message()

    async def send(self, frame: Any) -> None:
        await self.socket.send_message(json.dumps(frame))

    async def hello(self) -> list[Any]:
        """Read identity, state if one follows, and the catalogue."""
        frames = [await self.frame()]
        while frames[-1]["type"] != "cf_agent_mcp_servers":
            frames.append(await self.frame())
        return frames

    async def until(self, wanted: Callable[[Any], bool]) -> list[Any]:
        """Read frames up to the one that is wanted, which is the last."""
        frames = [await self.frame()]
        while not wanted(frames[-1]):
            frames.append(await self.frame())
        return frames

    async def start(self, method: str, *args: Any) -> str:
        self.calls += 1
        call_id = f"{method}-{self.calls}"
        await self.send(
            {"type": "rpc", "id": call_id, "method": method, "args": list(args)}
        )
        return call_id

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method; return the frame that answers."""
        call_id = await self.start(method, *args)
        frames = await self.until(
            lambda f: f.get("id") == call_id and f.get("done") is not False
        )
        return frames[-1]

    async def closed(self) -> tuple[int, str]:
        """Read to the end; return close code and reason."""
        with trio.fail_after(5):
            try:
                while True:
                    await self.socket.get_message()
            except ConnectionClosed as error:
                assert error.reason is not None
                return error.reason.code, error.reason.reason or ""


async def read_all(stream: trio.SocketStream) -> bytes:
    """Read until the server has closed, which it must."""
    data = b""
    try:
        with trio.fail_after(5):
            while part := await stream.receive_some(65536):
                data += part
    except trio.BrokenResourceError:
        pass
    finally:
        await trio.aclose_forcefully(stream)
    return data


def parse_answer(data: bytes) -> tuple[int, dict[str, str], bytes]:
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {n.lower(): v.strip() for n, _, v in (x.partition(":") for x in lines)}
    if headers.get("transfer-encoding") == "chunked":
        whole = b""
        while body:
            size, _, rest = body.partition(b"\r\n")
            whole += rest[: int(size, 16)]
            body = rest[int(size, 16) + 2 :]
        body = whole
    return int(first.split()[1]), headers, body


transport_of_tests = "own"  # changed by the fixture `transport`


@asynccontextmanager
async def serving(
    *,
    storage: Any = "memory:",
    limits: Limits | None = None,
    transport: str | None = None,
    **options: Any,
) -> AsyncIterator[Server]:
    """Serve the agents of this module on a free port.

    `transport`: "own" is `culet.web.serve`, "quart" is hypercorn as anybody starts it.
    """
    async with (
        open_kernel(
            roots=[Hub], facets=[Writer, Plain, Broken], storage=storage, limits=limits
        ) as kernel,
        trio.open_nursery() as nursery,
    ):
        app = create_app(kernel, **options)
        run = RUNNERS[transport or transport_of_tests]
        url = await nursery.start(run, app)
        yield Server(url, kernel)
        nursery.cancel_scope.cancel()


async def run_own(app: QuartTrio, *, task_status: Any) -> None:
    await serve(app, bind="127.0.0.1:0", task_status=task_status)


async def run_hypercorn(app: QuartTrio, *, task_status: Any) -> None:
    """Run it until cancelled; then stop it as a signal does."""
    config = Config()
    config.bind = ["127.0.0.1:0"]
    config.graceful_timeout = 0.2
    config.errorlog = None
    stop = trio.Event()

    async def shielded(*, task_status: Any) -> None:
        with trio.CancelScope(shield=True):
            await hypercorn_serve(
                cast(Any, app), config, shutdown_trigger=stop.wait,
                task_status=task_status,
            )  # fmt: skip

    async with trio.open_nursery() as nursery:
        binds = await nursery.start(shielded)
        task_status.started(binds[0])
        try:
            await trio.sleep_forever()
        finally:
            stop.set()


RUNNERS: dict[str, Any] = {"own": run_own, "quart": run_hypercorn}
