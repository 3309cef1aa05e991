"""Raw targets with every trick in them, and a second reader that says what they name.

The oracle knows the guides, not our code: a root is `/agents/{class}/{name}`, a hop
`/sub/{class}/{name}` directly behind, the rest is the agent's; names are percent-encoded
UTF-8, decoded once. HTTP, WebSocket and the gates must agree with it and with each other.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.client import ClientProtocol
from websockets.frames import Frame
from websockets.protocol import OPEN
from websockets.uri import parse_uri

from culet.kernel import Agent, ChildRef, Request, Response, open_kernel
from culet.kernel.core.path import parse_agent_path
from culet.kernel.errors import NotFound, UsageError
from culet.web import create_app
from culet.web.gateway import Gateway
from volume import EXAMPLES
from web.serving import RUNNERS, Server, read_all
from web.test_transport import upgrade

Chain = tuple[tuple[str, str], ...]
VECTORS = json.loads(
    (Path(__file__).parent.parent / "vectors" / "paths.json").read_text()
)

# ---- the oracle: what the guides say

SEGMENTS = {
    "supervisor": "Supervisor", "job-runner": "JobRunner", "h-t-t-p-worker": "HTTPWorker",
    "researcher": "Researcher",
}  # fmt: skip
ROOTS = {"Supervisor"}
LEVELS, LETTERS = 4, 256
URL = {chr(n) for n in range(0x21, 0x7F)} - {"#"}  # what a target may be made of
HEX = set("0123456789abcdefABCDEF")


class Named(NamedTuple):
    """An agent, and what is left of the path for it."""

    chain: Chain
    leaf: str


def oracle(target: str) -> Named | None:
    """Return what a target names; None: it must be refused."""
    if not target or not set(target) <= URL or target[0] != "/":
        return None
    path = target[: target.find("?")] if "?" in target else target
    if path[:8] != "/agents/" or "\\" in path:
        return None
    segments = [s for s in path[8:].split("/") if s != ""]
    for segment in segments:
        if segment.lower().replace("%2e", ".") in (".", ".."):
            return None
    if len(segments) < 2 or SEGMENTS.get(segments[0]) not in ROOTS:
        return None
    name = decoded(segments[1])
    if name is None or name == "sub":
        return None
    chain = [(SEGMENTS[segments[0]], name)]
    at = 2
    while at < len(segments) and segments[at] == "sub":
        here = segments[at + 1 : at + 3]
        child = decoded(here[1]) if len(here) == 2 else None
        if child is None or here[0] not in SEGMENTS or SEGMENTS[here[0]] in ROOTS:
            return None
        chain.append((SEGMENTS[here[0]], child))
        at += 3
    if len(chain) > LEVELS:
        return None
    return Named(tuple(chain), "/" + "/".join(segments[at:]))


def decoded(segment: str) -> str | None:
    """Decode a name by hand, byte by byte; None where it is none."""
    data = bytearray()
    at = 0
    while at < len(segment):
        if segment[at] != "%":
            data.append(ord(segment[at]))
            at += 1
            continue
        pair = segment[at + 1 : at + 3]
        if len(pair) < 2 or not set(pair) <= HEX:
            return None
        data.append(int(pair, 16))
        at += 3
    try:
        name = data.decode("utf-8", "strict")
    except UnicodeDecodeError:
        return None
    bad = not name or "\0" in name or name in (".", "..") or len(name) > LETTERS
    return None if bad else name


# ---- agents that say what they were asked for

GATES: list[tuple[Chain, tuple[str, str]]] = []


class Asked(Agent):
    async def on_before_sub_agent(
        self, request: Request, child: ChildRef
    ) -> Request | Response | None:
        GATES.append((me(self), (child.class_name, child.name)))
        return None

    async def on_request(self, request: Request) -> Response:
        return Response.json({"chain": me(self), "leaf": request.path})

    async def on_connect(self, connection: Any, ctx: Any) -> None:
        connection.send(json.dumps({"chain": me(self), "leaf": ctx.path}))


def me(agent: Agent) -> Chain:
    return tuple((step.class_name, step.name) for step in agent.self_path)


class Supervisor(Asked): ...


class JobRunner(Asked): ...


class HTTPWorker(Asked): ...


class Researcher(Asked): ...


async def admit(_request: Request, root: Any) -> None:
    GATES.append(((), (root.class_name, root.name)))


class Saw(NamedTuple):
    """What came of one request. `named` is what the agent said of it, if one did."""

    status: int
    named: Named | None
    gates: list[tuple[Chain, tuple[str, str]]]
    made: set[Chain]


class World:
    """A server and what exists there."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def there(self) -> set[Chain]:
        """Return everybody who was made; nobody is put to sleep in a test."""
        return {
            tuple((n.kind.name, n.name) for n in node.lineage())
            for tree in self.server.kernel.trees.values()
            for node in tree.nodes.values()
        }

    async def saw(self, ask: Any, target: str) -> Saw:
        """Ask once, and see what happened meanwhile."""
        GATES.clear()
        before = self.there()
        status, told = await ask(target)
        named = None
        if told is not None:
            chain = tuple((class_name, name) for class_name, name in told["chain"])
            named = Named(chain, told["leaf"])
        return Saw(status, named, list(GATES), self.there() - before)

    async def http(self, target: str) -> tuple[int, Any]:
        """Make a plain request; return its status and what the agent said."""
        stream = await trio.open_tcp_stream("127.0.0.1", self.server.port)
        head = f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        await stream.send_all(head.encode("utf-8", "surrogatepass"))
        answer = await read_all(stream)
        status = int(answer.split(b" ", 2)[1])
        body = answer.partition(b"\r\n\r\n")[2]
        return status, json.loads(body) if status == 200 else None

    async def socket(self, target: str) -> tuple[int, Any]:
        """Connect; return 200 and what the agent said, or the status of the refusal."""
        stream = await trio.open_tcp_stream("127.0.0.1", self.server.port)
        try:
            await stream.send_all(upgrade(target))
            answer = b""
            with trio.fail_after(5):
                while b"\r\n\r\n" not in answer:
                    part = await stream.receive_some(65536)
                    assert part, answer
                    answer += part
            if not answer.startswith(b"HTTP/1.1 101"):
                return int(answer.split(b" ", 2)[1]), None
            return await first_word(stream, answer.partition(b"\r\n\r\n")[2])
        finally:
            await trio.aclose_forcefully(stream)


async def first_word(stream: trio.SocketStream, data: bytes) -> tuple[int, Any]:
    """Return what the agent says of itself, or the status that its close tells."""
    protocol = ClientProtocol(parse_uri("ws://x/"), state=OPEN)
    with trio.fail_after(5):
        while True:
            protocol.receive_data(data)
            for event in protocol.events_received():
                assert isinstance(event, Frame)
                if event.opcode == 1 and b'"leaf"' in bytes(event.data):
                    return 200, json.loads(bytes(event.data))
            if protocol.close_rcvd is not None:
                return protocol.close_rcvd.code - 4000, None
            data = await stream.receive_some(65536)
            assert data, "it hung up without a word"


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    async with (
        open_kernel(
            roots=[Supervisor], facets=[JobRunner, HTTPWorker, Researcher]
        ) as kernel,
        trio.open_nursery() as nursery,
    ):
        app = create_app(kernel, admit=admit)
        url = await nursery.start(RUNNERS["own"], app)
        yield World(Server(url, kernel))
        nursery.cancel_scope.cancel()


async def judge(here: World, target: str) -> None:
    """Ask for a target in both ways; oracle, gates and what was opened must agree."""
    wanted = oracle(target)
    for ask in (here.http, here.socket):
        exist = here.there()
        saw = await here.saw(ask, target)
        if wanted is not None:
            steps = [wanted.chain[: n + 1] for n in range(len(wanted.chain))]
            if not set(steps[:-1]) <= exist:
                wanted_here = None  # a step before the last is not made on the way
            else:
                wanted_here = wanted
                gates = [((), wanted.chain[0])]
                gates += [(step[:-1], step[-1]) for step in steps[1:]]
                assert saw.gates == gates, "each hop was asked about, in order"
        else:
            wanted_here = None
        assert saw.named == wanted_here, (saw, wanted)
        seen = {(*above, step) for above, step in saw.gates}
        assert saw.made <= seen, "nothing is opened that no gate has seen"
        if wanted_here is None:
            assert 400 <= saw.status < 500, saw
            assert saw.made == set(), "who is refused makes nothing"
            if wanted is None:
                assert saw.gates == [], "what names nobody asks nobody"
        else:
            assert saw.status == 200
            assert saw.made <= {wanted_here.chain}


# ---- targets

NAMES = (
    "u", "r", "a%2Fb", "a%2fb", "a%252Fb", "%252e%252e", "%2e%2e", "%2E.", "..", ".",
    "...", "%00", "a%00b", "%ff", "%c0%af", "%c0%ae%c0%ae", "%e0%80%af", "%ed%a0%80",
    "%f4%90%80%80", "%zz", "%", "%2", "a%", "u;x=1", ";", "%3b", "%c3%a9", "e%cc%81",
    "+", "%20", "%", "@", "sub", "%73ub", "su%62", "SUB", "~", "n" * 256, "n" * 257,
    "%c3%a9" * 256, "%c3%a9" * 257, "%5c", "a%5C..", "a\\b", "\\..", "%23", "%3f", "con",
    "%0d%0aHost:%20y", "%u0041", "$", "&", "=", "'", "(", '"', "<", "|", "^", "`",
)  # fmt: skip
CLASSES = (
    "job-runner", "h-t-t-p-worker", "http-worker", "researcher", "supervisor", "JobRunner",
    "job_runner",    "%6aob-runner", "job-runner;x", "job-runner%20", "job-runner%00", "JOB-RUNNER",
    "HTTPWorker", "unknown", "sub",
)  # fmt: skip
MARKERS = ("sub",) * 8 + ("%73ub", "Sub", "sub;x", "sub%2F", "sub%00", ".sub")
SLASHES = ("/",) * 9 + ("//", "/./", "/%2e/", "/../", "/x/../", "/%2E%2e/", "%2F", "\\")
TAILS = (
    "", "", "", "/", "/x", "/x/sub/job-runner/r", "?a=1", "?/sub/job-runner/r", "#x",
    "#/sub/job-runner/r", "?x#y", "/x?y=/../", ";x", "/sub", "/sub/", "/sub/job-runner",
    "/sub//job-runner", "%00", " ", "\t", "\x7f", "\u00e9", "/%2e%2e/%2e%2e", "/..", "%3f",
)  # fmt: skip
PREFIXES = ("/agents",) * 12 + (
    "/agents/", "//agents", "/./agents", "/%61gents", "/Agents", "agents", "/x/../agents",
    "http://x/agents", "/agents;x", "/agents/sub/job-runner/r", "/agents/../agents", "*",
)  # fmt: skip


@st.composite
def targets(draw: st.DrawFn) -> str:
    """Return a target that would name an agent, but for a trick here and there."""
    slash = st.sampled_from(SLASHES)
    text = draw(st.sampled_from(PREFIXES)) + draw(slash)
    text += draw(st.sampled_from(("supervisor",) * 6 + CLASSES)) + draw(slash)
    text += draw(st.sampled_from(("u",) * 8 + NAMES))
    for _ in range(draw(st.integers(0, 4))):
        text += draw(slash) + draw(st.sampled_from(MARKERS)) + draw(slash)
        text += draw(st.sampled_from(("job-runner",) * 6 + CLASSES)) + draw(slash)
        text += draw(st.sampled_from(("r",) * 8 + NAMES))
    return text + draw(st.sampled_from(TAILS))


@pytest.mark.rule("F-38", "I-27", "I-42")
@settings(max_examples=20 * EXAMPLES.now)
@given(targets())
def test_the_codec_reads_what_the_oracle_reads(target: str) -> None:
    path = target.partition("?")[0]
    lead, classes = (
        Gateway(None),
        ["Supervisor", "JobRunner", "HTTPWorker", "Researcher"],
    )
    wanted = oracle(target)
    try:
        parsed = parse_agent_path(path, classes) if lead.owns(path) else None
    except (UsageError, NotFound):
        parsed = None
    if parsed is not None and (
        {step.class_name for step in parsed.hops} & ROOTS
        or parsed.root.class_name not in ROOTS
        or not set(target) <= URL
    ):
        parsed = None  # refused by those who are asked next
    found = None
    if parsed is not None:
        found = Named(
            tuple((s.class_name, s.name) for s in parsed.steps), parsed.leaf_path
        )
    assert found == wanted


@pytest.mark.rule("F-38", "I-27", "I-42", "F-46")
@settings(max_examples=EXAMPLES.now // 2)
@given(st.lists(targets(), min_size=6, max_size=12))
async def test_http_sockets_and_gates_open_what_the_oracle_reads(
    asked: list[str],
) -> None:
    async with world() as here:
        for target in ("/agents/supervisor/u", "/agents/supervisor/u/sub/job-runner/r"):
            await judge(here, target)
        for target in asked:
            await judge(here, target)


@pytest.mark.rule("F-38", "I-27", "I-42")
async def test_each_trick_by_itself_at_each_place() -> None:
    root, hop = "/agents/supervisor/u", "/sub/job-runner/r"
    tricks = [f"/agents/supervisor/{name}" for name in NAMES]
    tricks += [f"{root}/sub/job-runner/{name}" for name in NAMES]
    tricks += [f"/agents/{name}/u" for name in CLASSES]
    tricks += [f"{root}/sub/{name}/r" for name in CLASSES]
    tricks += [f"{root}/{marker}/job-runner/r" for marker in MARKERS[8:]]
    tricks += [f"{prefix}/supervisor/u{hop}" for prefix in PREFIXES[12:]]
    tricks += [root + hop + tail for tail in TAILS]
    tricks += [root.replace("/u", f"{slash}u") + hop for slash in SLASHES]
    tricks += [root + hop.replace("/r", f"{slash}r") for slash in SLASHES]
    tricks += [root + f"{slash}sub{slash}job-runner/r" for slash in SLASHES]
    tricks += [root + hop * n for n in range(1, 6)]
    async with world() as here:
        for target in (root, root + hop, *tricks):
            await judge(here, target)


@pytest.mark.rule("F-38", "I-42")
async def test_the_vectors_name_over_the_wire_what_they_say_or_are_refused() -> None:
    """`stricter` says which rows of the reference are refused here."""
    stricter = {row for rule in VECTORS["stricter"] for row in rule["rows"]}
    stricter -= {"PP-14", "PP-15"}  # those are allowed, as names
    async with world() as here:
        for target in ("/agents/supervisor/u", "/agents/supervisor/u/sub/job-runner/r"):
            await judge(here, target)
        for row in VECTORS["parse_rows"]:
            await judge(here, row["raw"])
            sent = row["raw"] if set(row["raw"]) <= URL else row["normalised"]
            await judge(here, sent)
            wanted = oracle(sent)
            if row["id"] in stricter or row["known"] is None:
                assert wanted is None or len(wanted.chain) == 1, row["id"]
            else:
                assert wanted is not None, row
                hop = row["known"]
                assert wanted.chain[1] == (hop["childClass"], hop["childName"])
