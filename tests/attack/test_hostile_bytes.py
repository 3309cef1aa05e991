"""Frames and heads of requests that nobody should send, in great number, to a real server.

Some are right and say nonsense, some are damaged as a broken proxy or an attacker would.
Whatever comes: nothing raises out of a connection, no pass of the loop is long (the
probe of every test sees to that), memory stays flat, and who behaves is answered.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final

import pytest
import trio
from fuzz.case import Case
from websockets.frames import Frame, Opcode

from culet.adapters import AIChatAgent
from culet.kernel import Chunk, Limits, Request, Response, Turn, open_kernel
from culet.web import create_app
from machines.sometimes import Sometimes
from volume import ASKED, LEDGER
from web.serving import HANDSHAKE, RUNNERS, Client, Hub, Plain, Server, Writer

SEED: Final = 20_261_130
BATCH: Final = 20  # frames on one connection
AT_ONCE: Final = 8  # connections
TOLD: Final = 250  # connections between two looks at who behaves
GROWTH: Final = 20 << 20  # of the process, after the first tenth
LIMITS: Final = Limits(message_bytes=64 << 10, handshake_s=2.0, idle_s=2.0)
ROOTS: Final = {"h", "chat"}  # that anybody may visit: else each head made one


class Speaker(AIChatAgent):
    async def on_chat_message(self, turn: Turn) -> AsyncIterator[Chunk]:
        yield {"type": "text-delta", "id": "t", "delta": "word"}


async def admit(request: Request, root: Any) -> Response | None:
    return None if root.name in ROOTS else Response("not you", 403)


@asynccontextmanager
async def served() -> AsyncIterator[Server]:
    async with (
        open_kernel(
            roots=[Hub, Speaker],
            facets=[Writer, Plain],
            storage="memory:",
            limits=LIMITS,
        ) as kernel,
        trio.open_nursery() as nursery,
    ):
        url = await nursery.start(RUNNERS["own"], create_app(kernel, admit=admit))
        yield Server(url, kernel)
        nursery.cancel_scope.cancel()


class Ears(logging.Handler):
    """Hears the web's own errors, and everybody's tracebacks but those of agents."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        ours = record.name.startswith("culet.web") and record.levelno >= logging.ERROR
        if ours or record.exc_info:
            said = self.format(record)[-3000:]
            if "secret-token-9" not in said:  # an agent that raises, as it was asked to
                self.said.append(said)


@contextmanager
def heard() -> Iterator[list[str]]:
    """Fail when a connection ended by an error of ours, or anything left a traceback."""
    logger, ears = logging.getLogger("culet"), Ears()
    everybody = logging.getLogger(), logger
    for listened in everybody:
        listened.addHandler(ears)
    logger.propagate = False
    try:
        yield ears.said
    finally:
        logger.propagate = True
        for listened in everybody:
            listened.removeHandler(ears)
    assert ears.said == []


def resident() -> int:
    """Return how much memory the process holds, in bytes."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def conversation(server: Server, data: bytes) -> bytes:
    """Send all, say that it is all, and read to the end, which must come."""
    stream = await trio.open_tcp_stream("127.0.0.1", server.port)
    answer = b""
    with trio.fail_after(15):
        try:
            async with trio.open_nursery() as nursery:

                async def say() -> None:
                    try:
                        await stream.send_all(data)
                        await stream.send_eof()
                    except (trio.BrokenResourceError, trio.ClosedResourceError):
                        pass  # it has hung up before

                nursery.start_soon(say)
                while part := await stream.receive_some(1 << 18):
                    answer = (answer + part)[:65536]
                nursery.cancel_scope.cancel()
        except* trio.BrokenResourceError:
            pass
        finally:
            await trio.aclose_forcefully(stream)
    return answer


async def bombard(
    server: Server, kind: Any, cases: int, each: int, make: Any, judge: Any
) -> None:
    """Send `cases` of these, of which each counts so often, and watch what they do."""
    numbers = iter(range(cases))
    first = 0
    async with server.connect("/agents/hub/h") as good:
        await good.hello()

        async def one() -> None:
            nonlocal first
            for number in numbers:
                case = Case(SEED + number, MARKS)
                data = make(case)
                try:
                    judge(data, await conversation(server, data))
                except BaseException:
                    print("seed", SEED + number, data[:2000], file=sys.stderr)
                    raise
                LEDGER.add(kind, each)
                if number == max(cases // 10, 1):
                    first = resident()
                if number % TOLD == 0:
                    await answered(good, number)

        async with trio.open_nursery() as nursery:
            for _ in range(AT_ONCE):
                nursery.start_soon(one)
        await answered(good, cases)
        grown = resident() - first
        assert grown < GROWTH, f"grown by {grown >> 20} MiB"
        MARKS.check()


async def answered(good: Client, number: int) -> None:
    await good.socket.send_message(str(number))
    while await good.raw() != str(number):
        pass  # what others made the agent tell


MARKS: Final = Sometimes("fine", "nonsense", "damaged")

# ---- frames

WORDS: Final = (
    "rpc", "cf_agent_state", "cf_agent_mcp_servers", "cf_agent_chat_clear",
    "cf_agent_chat_messages", "cf_agent_use_chat_request", "cf_agent_chat_request_cancel",
    "cf_agent_stream_resume_request", "cf_agent_stream_resume_ack", "cf_agent_tool_result",
    "cf_agent_tool_approval", "cf_agent_identity", "agent-tool-event", "cf_agent_unknown",
)  # fmt: skip
FIELDS: Final = (
    "id", "method", "args", "state", "messages", "init", "body", "event", "sequence",
    "runId", "toolCallId", "output", "approved", "replay", "trigger", "parts",
)  # fmt: skip


def nonsense(case: Case) -> str:
    """Return a text that begins as a frame of ours does, or not even that."""
    if case.luck(0.1):
        depth = case.one(10, 1000, 9000)
        return case.one("[", '{"type":', '{"a":[') * depth
    if case.luck(0.1):
        return case.one("9" * 5000, "1e999", "NaN", '{"type":"rpc","type":1}', "\ud7ff")
    frame: dict[str, Any] = {"type": case.one(*WORDS)}
    for _ in range(case.rng.randrange(5)):
        frame[case.one(*FIELDS)] = case.json()
    if case.luck(0.3):
        frame |= {"type": "rpc", "id": "x", "args": [case.json()]}
        frame["method"] = case.one("ping", "fail", "hidden", "on_start", "__init__")
    if case.luck(0.2):
        frame |= {"type": "cf_agent_use_chat_request", "id": "q"}
        body = {"messages": case.json(), "trigger": case.json()}
        frame["init"] = {"method": "POST", "body": json.dumps(body)}
    return json.dumps(frame)


def frames(case: Case) -> bytes:
    """Return a handshake and what follows it."""
    out = []
    for _ in range(BATCH):
        text = nonsense(case).encode("utf-8", "replace")
        opcode = case.one(*(Opcode.TEXT,) * 9, Opcode.BINARY, Opcode.PING, Opcode.CONT)
        if opcode is Opcode.PING:
            text = text[:125]
        fin = opcode is Opcode.PING or not case.luck(0.02)
        data = Frame(opcode, text, fin=fin).serialize(mask=True)
        if case.luck(0.06):
            case.mark("damaged")
            data = case.damaged(data)
        elif opcode is Opcode.TEXT:
            case.mark("nonsense")
        out.append(data)
    case.mark("fine")
    head = f"GET /agents/{case.one('hub/h', 'speaker/chat')} HTTP/1.1\r\nHost: x\r\n"
    return "\r\n".join([head[:-2], *HANDSHAKE, "", ""]).encode() + b"".join(out)


def judge_frames(_data: bytes, answer: bytes) -> None:
    assert answer.startswith(b"HTTP/1.1 101")
    assert b"secret" not in answer


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.volume("hostile frames")
@pytest.mark.rule("G-16", "F-35", "F-36", "I-45")
async def test_frames_that_nobody_should_send_end_nothing_and_leave_nothing() -> None:
    cases = -(-ASKED["hostile frames"].now // BATCH)
    with heard():
        async with served() as server:
            await bombard(server, "hostile frames", cases, BATCH, frames, judge_frames)


# ---- heads of requests

TARGETS: Final = (
    "/agents/hub/h", "/agents/hub/h/echo", "/agents/hub/h/stream", "/agents/speaker/chat",
    "/agents/hub/h/sub/plain/p", "/agents/hub/h/sub/writer/guessed", "/healthz", "/other",
    "http://evil.example/agents/hub/h", "*", "//agents/hub/h", "/agents/hub/h/../x",
    "/agents/hub/%2e%2e", "/agents/hub/h;x", "/agents//h", "/agents/hub/h?a=%zz&a",
)  # fmt: skip
HEADERS: Final = (
    "Content-Length: 4", "Content-Length: 99999999999999999999", "Content-Length: -1",
    "Transfer-Encoding: chunked", "Transfer-Encoding: gzip, chunked", "Expect: 100-continue",
    "Host: evil.example", "Origin: null", "Origin: https://evil.example", "Connection: close",
    "Connection: upgrade, x", "HTTP2-Settings: AAMAAABkAAQAAP__",
    "Sec-WebSocket-Extensions: permessage-deflate; server_max_window_bits=99",
    "Sec-WebSocket-Protocol: \x01", "Cookie: " + "a" * 4000, "X-Forwarded-For: 1", " folded",
    "content-type: application/json", "content-type: text/plain", "Range: bytes=0-",
)  # fmt: skip


def head(case: Case) -> bytes:
    """Return a request, more or less."""
    target = case.one(*TARGETS)
    if case.luck(0.2):
        target += "/" + case.name().replace(" ", "")
    method = case.one(
        "GET", "GET", "POST", "HEAD", "OPTIONS", "PUT", "PRI", "get", "CONNECT"
    )
    lines = [
        f"{method} {target} HTTP/{case.one('1.1', '1.1', '1.1', '1.0', '2.0', '9')}"
    ]
    if not case.luck(0.1):
        lines.append("Host: x")
    if case.luck(0.4):
        lines += HANDSHAKE
    lines += [case.one(*HEADERS) for _ in range(case.rng.randrange(4))]
    data = "\r\n".join(
        [*lines, "", case.one("", "body", "4\r\nbody\r\n0\r\n\r\n")]
    ).encode("utf-8", "replace")
    if case.luck(0.5):
        case.mark("damaged")
        return case.damaged(data)
    case.mark("nonsense")
    return case.rng.randbytes(case.rng.randrange(1, 400)) if case.luck(0.05) else data


FIRST: Final = re.compile(rb"HTTP/1\.[01] (\d{3})|\Z")


def judge_head(data: bytes, answer: bytes) -> None:
    found = FIRST.match(answer)
    assert found is not None, answer[:200]
    if found[1] is not None:
        status = int(found[1])
        assert status in range(100, 500) or status in (501, 503, 505), answer[:500]
        if status < 300:
            MARKS.hit("fine")


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.volume("hostile heads")
@pytest.mark.rule("G-16", "F-38", "I-45")
async def test_heads_that_nobody_should_send_end_nothing_and_leave_nothing() -> None:
    with heard():
        async with served() as server:
            cases = ASKED["hostile heads"].now
            await bombard(server, "hostile heads", cases, 1, head, judge_head)
            assert {key.name for key in server.kernel.trees} <= ROOTS
