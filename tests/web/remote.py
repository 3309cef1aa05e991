"""Agents for the Python client, a server that can be started anew, a wire to cut."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import trio

from culet.adapters import AIChatAgent
from culet.kernel import Agent, Final, Kernel, Limits, open_kernel, rpc
from culet.web import connect, create_app, serve

QUICK = Limits(reconnect_base_s=0.01, reconnect_max_s=0.05)


class Gate:
    """What agents wait for in the middle of their work, and how often they came."""

    def __init__(self) -> None:
        self.open = trio.Event()
        self.reached = trio.Event()
        self.passed = 0

    async def through(self) -> None:
        self.passed += 1
        self.reached.set()
        await self.open.wait()


GATES: dict[str, Gate] = {}


def gate(name: str) -> Gate:
    return GATES.setdefault(name, Gate())


class Worker(Agent):
    resumable = True

    async def on_turn(self, turn):
        said = len(list(turn.chunks()))
        for i in range(said, turn.input["k"]):
            if i == turn.input.get("stop_at"):
                await gate("worker").through()
            yield {"type": "text-delta", "id": "t", "delta": f"d{i} "}

    @rpc
    async def whoami(self) -> list[str]:
        return [step.name for step in self.self_path]

    @rpc
    async def deeper(self, name: str) -> None:
        await self.dynamic_agents.get(Leaf, name)


class Leaf(Agent):
    initial_state = {"leaf": True}

    @rpc
    async def whoami(self) -> list[str]:
        return [step.name for step in self.self_path]


class Supervisor(Agent):
    initial_state = {"n": 0}

    @rpc
    async def ping(self, text: str) -> str:
        return text

    @rpc
    async def nothing(self) -> None:
        pass

    @rpc
    async def fail(self) -> None:
        raise ValueError("secret-token-9")

    @rpc
    async def wait(self) -> str:
        await gate("wait").through()
        return "waited"

    @rpc
    async def count(self, n: int) -> AsyncIterator[Any]:
        for i in range(n):
            yield i
        yield Final({"over": n})

    @rpc
    async def break_off(self) -> AsyncIterator[int]:
        yield 1
        raise ValueError("secret-token-9")

    @rpc
    async def slowly(self, n: int) -> AsyncIterator[int]:
        for i in range(n):
            yield i
        await gate("slowly").through()

    @rpc
    async def set_n(self, n: int) -> None:
        self.set_state({"n": n})

    @rpc
    async def tell(self, text: str, times: int) -> None:
        for _ in range(times):
            self.broadcast(text)

    @rpc
    async def research(self, k: int, stop_at: int | None = None) -> list[str]:
        out = [""] * 3

        async def one(i: int) -> None:
            run = await self.run_agent_tool(
                Worker,
                {"i": i, "k": k, "stop_at": stop_at},
                run_id=f"r{i}",
                parent_tool_call_id="call-1",
                display_order=i,
            )
            out[i] = run.status

        async with trio.open_nursery() as nursery:
            for i in range(3):
                nursery.start_soon(one, i)
        return out

    @rpc
    async def close_all(self, code: int, reason: str) -> None:
        for connection in self.sockets.list():
            connection.close(code, reason)

    def validate_state_change(self, following, source) -> None:
        if following == {"n": -1}:
            raise ValueError("not that")

    def should_connection_be_readonly(self, connection, ctx) -> bool:
        return "readonly" in ctx.request.query

    def should_send_protocol_messages(self, connection, ctx) -> bool:
        return "silent" not in ctx.request.query

    async def on_message(self, connection, message) -> None:
        connection.send(message)


class ChatBot(AIChatAgent):
    """Says as many words as it is asked for; waits at a gate before word `at`."""

    async def on_chat_message(self, turn):
        words, at, fails = _asked(turn.messages)
        said = len(turn.text.split())
        if not said:
            yield {"type": "text-start", "id": "t"}
        for i in range(said, words):
            if i == at:
                await gate("chat").through()
            yield {"type": "text-delta", "id": "t", "delta": f"w{i} "}
        if fails:
            raise ValueError("secret-token-9")
        yield {"type": "text-end", "id": "t"}
        yield {"type": "finish", "finishReason": "stop"}


def _asked(messages: list[dict[str, Any]]) -> tuple[int, int, bool]:
    text = next(m for m in reversed(messages) if m["role"] == "user")["parts"][0][
        "text"
    ]
    numbers = [int(word) for word in text.split() if word.isdigit()]
    at = numbers[1] if len(numbers) > 1 else -1
    return (numbers[0] if numbers else 4), at, "fail" in text


def words(n: int) -> str:
    return "".join(f"w{i} " for i in range(n))


class Server:
    """One kernel behind one port, until it is left."""

    def __init__(self, url: str, kernel: Kernel) -> None:
        self.kernel = kernel
        self.port = int(url.rpartition(":")[2])

    def url(self, path: str = "supervisor/s") -> str:
        return f"ws://127.0.0.1:{self.port}/agents/{path}"


@asynccontextmanager
async def running(
    storage: str | Path = "memory:", *, port: int = 0, **options: Any
) -> AsyncIterator[Server]:
    """Serve on a port; leaving it stops the kernel as a restart would."""
    where = storage if isinstance(storage, str) else f"sqlite:{storage}"
    async with (
        open_kernel(
            roots=[Supervisor, ChatBot], facets=[Worker, Leaf], storage=where
        ) as kernel,
        trio.open_nursery() as nursery,
    ):
        app = create_app(kernel, **options)
        url = await nursery.start(partial(serve, app, bind=f"127.0.0.1:{port}"))
        yield Server(url, kernel)
        nursery.cancel_scope.cancel()


class Host:
    """A server on one folder and one port that can be stopped and started again."""

    def __init__(self, folder: Path, nursery: trio.Nursery) -> None:
        self._folder, self._nursery = folder, nursery
        self._scope = trio.CancelScope()
        self._stopped = trio.Event()
        self.port = 0

    def url(self, path: str = "supervisor/s") -> str:
        return f"ws://127.0.0.1:{self.port}/agents/{path}"

    async def start(self) -> None:
        self._scope, self._stopped = trio.CancelScope(), trio.Event()
        self.port = await self._nursery.start(self._run)

    async def stop(self) -> None:
        """Stop server and kernel, and wait until they have."""
        self._scope.cancel()
        await self._stopped.wait()

    async def _run(self, *, task_status: trio.TaskStatus[int]) -> None:
        with self._scope:
            async with running(self._folder, port=self.port) as server:
                task_status.started(server.port)
                await trio.sleep_forever()
        self._stopped.set()


@asynccontextmanager
async def host(folder: Path) -> AsyncIterator[Host]:
    """Serve a folder; the server may be restarted inside."""
    async with trio.open_nursery() as nursery:
        made = Host(folder, nursery)
        await made.start()
        yield made
        await made.stop()


async def fresh_messages(url: str) -> list[dict[str, Any]]:
    """Return the transcript as a client that knows nothing gets it."""
    async with connect(url) as agent:
        with trio.fail_after(5):
            await agent.until(lambda a: a.messages)
        return agent.messages


class Wire:
    """A TCP proxy whose connections can be cut, and which can refuse new ones."""

    def __init__(
        self, port: int, target: int, tls: ssl.SSLContext | None = None
    ) -> None:
        self.port, self.target, self._tls = port, target, tls
        self.accepts = True
        self.swallows = False  # what clients send goes nowhere
        self.ups = 0  # times that something came from a client
        self._up = trio.Event()
        self._scopes: set[trio.CancelScope] = set()

    def url(self, path: str = "supervisor/s") -> str:
        return f"ws://127.0.0.1:{self.port}/agents/{path}"

    def cut(self) -> None:
        """Break every connection without a goodbye."""
        for scope in self._scopes:
            scope.cancel()

    async def handle(self, near: trio.SocketStream) -> None:
        if not self.accepts:
            await trio.aclose_forcefully(near)
            return
        with trio.CancelScope() as scope:
            self._scopes.add(scope)
            far = None
            try:
                far = await trio.open_tcp_stream("127.0.0.1", self.target)
                client: trio.abc.Stream = near
                if self._tls is not None:
                    client = trio.SSLStream(
                        near, self._tls, server_side=True, https_compatible=True
                    )
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._pump, client, far, True)
                    await self._pump(far, client, False)
                    nursery.cancel_scope.cancel()
            except* (OSError, *_GONE):
                pass
            finally:
                self._scopes.discard(scope)
                near.socket.close()
                if far is not None:
                    far.socket.close()

    async def _pump(self, source: Any, sink: Any, up: bool) -> None:
        with suppress(*_GONE):
            while data := await source.receive_some(65536):
                if up:
                    self.ups += 1
                    self._up.set()
                if not (up and self.swallows):
                    await sink.send_all(data)

    async def until_up(self, times: int) -> None:
        """Wait until clients have sent something so often more."""
        wanted = self.ups + times
        while self.ups < wanted:
            self._up = trio.Event()
            await self._up.wait()


_GONE = (trio.BrokenResourceError, trio.ClosedResourceError)


@asynccontextmanager
async def wire(target: int, ssl: ssl.SSLContext | None = None) -> AsyncIterator[Wire]:
    """Open a proxy in front of a port."""
    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        proxy = Wire(listeners[0].socket.getsockname()[1], target, ssl)
        nursery.start_soon(partial(trio.serve_listeners, proxy.handle, listeners))
        yield proxy
        nursery.cancel_scope.cancel()
