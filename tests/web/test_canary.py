"""Secrets planted everywhere, everything played, every byte that left and every file read.

Each secret may be in the places of `ALLOWED`, which is the list of docs/proof.md, and must
be found in those that make the scan worth something: a scan that finds nothing at all
looks at the wrong bytes.
"""

from __future__ import annotations

import io
import json
import logging
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import (
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    redirect_stderr,
    redirect_stdout,
)
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from adapters.peer import user
from culet.adapters import ScriptedModel, Think
from culet.adapters.model import ToolCall
from culet.adapters.otel import OtelTracer
from culet.kernel import (
    Agent,
    Limits,
    Request,
    Response,
    Retry,
    Turn,
    agent_tool,
    open_kernel,
    rpc,
)
from culet.kernel.logs import JsonLines, WhoLogs
from culet.web import create_app
from culet.web.__main__ import main
from web import serving as web_serving
from web.serving import Server

pytestmark = pytest.mark.rule("F-53", "F-54", "F-55", "I-11", "I-23")

PLANTED = (
    "input", "child_state", "child_sql", "chat", "tool_input", "tool_result", "raised",
    "tool_raised", "header", "cookie", "token", "props", "environment", "key", "payload",
    "body", "vendor",
)  # fmt: skip
SECRET = {name: f"{name}-{secrets.token_hex(12)}" for name in PLANTED}

OWN_FILE, TREE_FILE, LOG = "its own file", "tree.db", "the tree's log"
CHILD_CLIENT, CHAT_CLIENT = "clients of the child", "clients of the chat"
ALLOWED: dict[str, set[str]] = {
    # what a run is asked is owed, with its job, until it has begun to be done
    "input": {TREE_FILE, LOG},
    "child_state": {OWN_FILE, LOG, CHILD_CLIENT},
    "child_sql": {OWN_FILE, LOG},
    "chat": {OWN_FILE, LOG, CHAT_CLIENT},
    "tool_input": {OWN_FILE, LOG, CHAT_CLIENT},
    "tool_result": {OWN_FILE, LOG, CHAT_CLIENT},
    # what was raised is in the rows of its run, its job, its effect; and in our log
    "raised": {TREE_FILE, LOG, "logs", "culet runs"},
    "tool_raised": {TREE_FILE, LOG, "logs"},
    "vendor": {TREE_FILE, LOG, "logs"},  # of an own turn
    "payload": {TREE_FILE, LOG},
    # who comes in is for `authenticate` alone, unless an agent keeps it
    "header": set(), "cookie": set(), "token": set(), "props": set(),
    "environment": set(), "key": set(), "body": set(),
}  # fmt: skip
FOUND = {
    "input": TREE_FILE, "child_state": OWN_FILE, "child_sql": OWN_FILE,
    "chat": CHAT_CLIENT, "tool_result": CHAT_CLIENT, "raised": "logs",
    "tool_raised": "logs", "vendor": "logs",
    "payload": TREE_FILE,
}  # fmt: skip


def trouble(name: str = "raised") -> str:
    return f"/srv/{SECRET[name]}.py: SELECT * FROM t WHERE k = '{SECRET[name]}'"


class Keyed(ScriptedModel):
    """A model with a key, that fails at its second step."""

    api_key = SECRET["key"]


class Kid(Agent):
    """A child that keeps what it hears; "fail" raises."""

    async def on_turn(self, turn: Turn) -> AsyncIterator[dict[str, Any]]:
        self.set_state({"seen": SECRET["child_state"]})
        self.sql("CREATE TABLE IF NOT EXISTS t (v TEXT)")
        self.sql("INSERT INTO t VALUES (?)", SECRET["child_sql"])
        yield {"type": "text-delta", "id": "t", "delta": "some public words"}
        if turn.input.get("fail"):
            raise RuntimeError(trouble())


class Broken(Kid):
    async def on_start(self) -> None:
        raise RuntimeError(trouble())


class Desk(Agent):
    """The parent: it works with kids, and everything of it may fail."""

    initial_state = {"n": 0}

    async def on_start(self, props: Any = None) -> None:
        assert props is None or props["key"] == SECRET["props"]

    @rpc
    async def work(self, run_id: str, fail: bool) -> str:
        asked = {"text": SECRET["input"], "fail": fail}
        return (await self.run_agent_tool(Kid, asked, run_id=run_id)).status

    @rpc
    async def start_broken(self) -> str:
        asked = {"text": SECRET["input"]}
        return (await self.run_agent_tool(Broken, asked, run_id="b")).status

    @rpc
    async def plan(self) -> None:
        once = Retry(max_attempts=1)
        await self.schedule(0, "ring", {"p": SECRET["payload"]}, retry=once)
        await self.schedule(3600, "ring", {"p": SECRET["payload"]})

    async def ring(self, payload: Any, schedule: Any) -> None:
        raise RuntimeError(trouble())

    @rpc
    async def fiber(self) -> None:
        async def fails() -> None:
            raise RuntimeError(trouble())

        await self.run_fiber("f", fails)

    @rpc
    async def boom(self) -> None:
        raise RuntimeError(trouble())

    @rpc
    async def query(self) -> None:
        self.sql(f"SELECT '{SECRET['raised']}' FROM nowhere")

    async def on_message(self, connection: Any, message: Any) -> None:
        raise RuntimeError(trouble())

    async def on_request(self, request: Request) -> Response:
        await request.read()
        raise RuntimeError(trouble())

    def validate_state_change(self, next: Any, source: Any) -> None:  # noqa: A002
        if source != "server":
            raise RuntimeError(trouble())


class Talk(Think):
    """A chat with tools, one of which raises, and a kid as a tool."""

    def get_model(self) -> Any:
        return Keyed([
            [
                ToolCall(id="c1", name="look", input={"at": SECRET["tool_input"]}),
                ToolCall(id="c2", name="break_it", input={}),
                ToolCall(id="c3", name="kid", input={"fail": True}),
            ],
            [RuntimeError(trouble("vendor"))],
        ])  # fmt: skip

    def get_tools(self) -> dict[str, Any]:
        return {
            "look": self.look,
            "break_it": self.break_it,
            "kid": agent_tool(Kid, description="works"),
        }

    async def look(self, at: str) -> str:
        """Look at something."""
        return SECRET["tool_result"]

    async def break_it(self) -> str:
        """Break."""
        raise RuntimeError(trouble("tool_raised"))


async def authenticate(request: Request) -> Any:
    if "token" not in request.query:
        return None
    assert request.query["token"] == SECRET["token"]
    assert request.headers["authorization"] == f"Bearer {SECRET['header']}"
    return {"name": "ada"}


HEADERS = (
    ("authorization", f"Bearer {SECRET['header']}"),
    ("cookie", f"session={SECRET['cookie']}"),
)


class Bytes:
    """Every byte that left, by the place where it went."""

    def __init__(self) -> None:
        self.of: dict[str, bytearray] = {}

    def add(self, place: str, data: Any) -> None:
        raw = data if isinstance(data, bytes) else str(data).encode()
        self.of.setdefault(place, bytearray()).extend(raw + b"\n")


@asynccontextmanager
async def listening(
    server: Server, seen: Bytes, place: str, path: str
) -> AsyncIterator[web_serving.Client]:
    """Connect, as somebody with all the secrets of a visitor, and keep what comes."""
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(
            server.connect(f"{path}?token={SECRET['token']}", HEADERS)
        )
        get = client.socket.get_message

        async def kept() -> Any:
            message = await get()
            seen.add(place, message)
            return message

        client.socket.get_message = kept  # type: ignore[method-assign]
        yield client


async def drained(*clients: web_serving.Client) -> None:
    """Read what is still on its way."""

    async def drain(client: web_serving.Client) -> None:
        with trio.move_on_after(0.2):
            while True:
                await client.socket.get_message()

    async with trio.open_nursery() as nursery:
        for client in clients:
            nursery.start_soon(drain, client)


@contextmanager
def everything_logged(out: io.StringIO) -> Iterator[None]:
    """Log at every level, as `culet serve --log json` does."""
    handler = logging.StreamHandler(out)
    handler.addFilter(WhoLogs())
    handler.addFilter(lambda record: record.name != "trio-websocket")  # the client's
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        root.setLevel(before)
        root.removeHandler(handler)


async def http(
    server: Server, seen: Bytes, place: str, method: str, path: str, body: bytes = b""
) -> bytes:
    headers = tuple(f"{name}: {value}" for name, value in HEADERS)
    kind = ("Content-Type: application/json",)
    mark = "&" if "?" in path else "?"
    path = f"{path}{mark}token={SECRET['token']}"
    status, told, answer = await server.http(
        method, path, headers=headers + kind, body=body
    )
    seen.add(place, f"{status} {told}")
    seen.add(place, answer)
    return answer


async def play(server: Server, seen: Bytes) -> None:
    """Do everything that can be seen from outside."""
    desk, talk = "/agents/desk/d", "/agents/talk/t"
    async with (
        listening(server, seen, "the parent's clients", desk) as ada,
        listening(server, seen, "strangers", "/agents/desk/other") as stranger,
        listening(server, seen, CHAT_CLIENT, talk) as chat,
        listening(server, seen, "strangers", "/agents/talk/other") as deaf,
    ):
        assert (await ada.call("work", "r", False))["result"] == "completed"
        assert (await ada.call("work", "e", True))["result"] == "error"
        assert (await ada.call("start_broken"))["result"] == "error"
        for method in ("plan", "fiber", "boom", "query", "nothing"):
            await ada.call(method)
        await ada.send({"type": "cf_agent_state", "state": {"n": 1}})
        async with listening(server, seen, CHILD_CLIENT, f"{desk}/sub/kid/r") as inside:
            await drained(inside)
        async with listening(server, seen, "the parent's clients", desk) as late:
            await late.socket.send_message("boom")
            await late.closed()
        asked = {"messages": [user("u1", SECRET["chat"])], "trigger": "submit-message"}
        init = {"method": "POST", "body": json.dumps(asked)}
        frame = {"type": "cf_agent_use_chat_request", "id": "q", "init": init}
        await chat.send(frame)
        await chat.until(lambda f: f.get("id") == "q" and f.get("done"))
        await drained(ada, stranger, chat, deaf)
    await http(server, seen, CHAT_CLIENT, "GET", f"{talk}/get-messages")
    asked_again = {"id": "c", "messages": [user("u2", SECRET["chat"])]}
    over_http = msgspec.json.encode(asked_again)
    await http(server, seen, CHAT_CLIENT, "POST", f"{talk}/chat", over_http)
    body = SECRET["body"].encode()
    await http(server, seen, "answers", "POST", f"{desk}/hook", body)
    await http(server, seen, "answers", "GET", "/agents/nobody/x")
    await http(server, seen, "metrics", "GET", "/metrics")
    for name in ("roots", "tree", "runs", "due", "fibers", "effects", "dead"):
        for root in ("class=Desk&name=d", "class=Talk&name=t"):
            path = f"/inspect/api/{name}?{root}"
            await http(server, seen, "inspector", "GET", path)
    for root in (("Desk", "d"), ("Talk", "t")):
        seen.add("kernel.tree", server.kernel.tree(*root))
        async for item in server.kernel.feed(*root):
            seen.add("the feed", item)


async def inspector_events(server: Server, seen: Bytes, *, task_status: Any) -> None:
    """Read the inspector's events until cancelled."""
    stream = await trio.open_tcp_stream("127.0.0.1", server.port)
    async with stream:
        head = (
            f"GET /inspect/api/events HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n\r\n"
        )
        await stream.send_all(head.encode())
        seen.add("inspector", await stream.receive_some(65536))
        task_status.started()
        while part := await stream.receive_some(65536):
            seen.add("inspector", part)


def commands(folder: Path, seen: Bytes) -> None:
    """Ask the command line about the folder."""
    for line in (
        ("doctor", "--json"), ("tree", "--json"), ("tree", "--due", "24h"),
        ("runs", "--json"), ("runs",), ("tree",),
    ):  # fmt: skip
        name, *rest = line
        out = io.StringIO()
        with redirect_stdout(out), redirect_stderr(out):
            main([name, str(folder), *rest])
        assert out.getvalue()
        seen.add(f"culet {name}", out.getvalue())


def files(folder: Path, seen: Bytes) -> None:
    """Read every file of the folder, by what it is."""
    for path in folder.rglob("*"):
        if path.is_file():
            place = OWN_FILE
            if path.name.startswith(("tree.db", "roots.db")):
                place = TREE_FILE
            elif path.suffix != ".db" and not path.name.endswith(".db-wal"):
                place = LOG
            seen.add(place, path.read_bytes())
            seen.add("names of files", str(path))


async def test_each_secret_is_where_it_may_be_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def operator(_request: Request) -> bool:
        return True

    monkeypatch.setenv("OPENAI_API_KEY", SECRET["environment"])
    seen, log, spans = Bytes(), io.StringIO(), InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    folder = tmp_path / "data"
    with everything_logged(log):
        async with (
            open_kernel(
                roots=[Desk, Talk],
                facets=[Kid, Broken],
                storage=f"sqlite:{folder}",
                tracer=OtelTracer(provider),
                limits=Limits(start_attempts=1),
            ) as kernel,
            trio.open_nursery() as nursery,
        ):
            app = create_app(
                kernel, authenticate=authenticate, props={"key": SECRET["props"]},
                inspect=operator,
            )  # fmt: skip
            server = Server(await nursery.start(web_serving.run_own, app), kernel)
            await nursery.start(inspector_events, server, seen)
            await play(server, seen)
            nursery.cancel_scope.cancel()
    seen.add("logs", log.getvalue())
    for span in spans.get_finished_spans():
        seen.add("spans", span.to_json())
    files(folder, seen)
    commands(folder, seen)

    places = {"spans", "logs", "inspector", "metrics", "answers", "the feed", OWN_FILE,
              TREE_FILE, LOG, "strangers", "culet doctor", "culet tree", "culet runs"}  # fmt: skip
    assert places <= set(seen.of), "some place was not looked at"
    where = {
        name: {place for place, data in seen.of.items() if secret.encode() in data}
        for name, secret in SECRET.items()
    }
    leaks = {n: sorted(w - ALLOWED[n]) for n, w in where.items() if w - ALLOWED[n]}
    assert not leaks
    missed = {n: place for n, place in FOUND.items() if place not in where[n]}
    assert not missed, "the scan looks at the wrong bytes"
