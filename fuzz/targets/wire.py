"""Whatever bytes a client sends, the sans-io part of the transport closes politely and
never raises, and what it was told before arrives whole.

A real `Link` over a socket pair is fed by hand: a head of a request that is right or
not, then messages in fragments, control frames between them, bits that fell over,
noise. What was whole before the damage is what the agent gets, cut however it was cut.
"""

from __future__ import annotations

import logging
from typing import Final, cast

import trio
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import OPEN
from websockets.server import ServerProtocol
from websockets.uri import parse_uri

from culet.kernel.core.limits import Limits
from culet.kernel.ports import Blob
from culet.kernel.sockets import Connection
from culet.web.framing import framed
from culet.web.gateway import Gateway
from culet.web.heads import Sieve, read_head
from culet.web.transport import Link, new_protocol
from culet.web.upgrade import _shake_hands
from culet.web.wire import Wire
from fuzz.case import Case
from machines.sometimes import Sometimes

SOMETIMES: Final = Sometimes(
    "head accepted", "head refused", "whole", "damaged", "closed for it", "fragments"
)
LIMITS: Final = Limits(message_bytes=4096)
HEAD: Final = (
    b"GET /agents/top/a?x=1 HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\n"
    b"Connection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    b"Sec-WebSocket-Version: 13\r\nOrigin: http://x\r\n\r\n"
)


class Sink:
    """What the agent gets."""

    def __init__(self) -> None:
        self.got: list[str | bytes] = []

    def received(self, message: str | bytes) -> None:
        """Take one message."""
        self.got.append(message)


def play(case: Case) -> None:
    """A head, then what follows it."""
    logging.disable(logging.CRITICAL)
    _outgoing(case)
    trio.run(_head, case)
    trio.run(_messages, case)


async def _head(case: Case) -> None:
    head = HEAD if case.luck(0.1) else case.damaged(HEAD)
    if case.luck(0.2):
        head = case.rng.randbytes(case.rng.randrange(300))
    read_head(head)
    Sieve(LIMITS.header_bytes).feed(head)
    before, end, _rest = head.partition(b"\r\n\r\n")  # as `open_socket` does
    head = before + end
    ours, theirs = trio.socket.socketpair()
    protocol = new_protocol(LIMITS)
    with theirs:
        async with trio.SocketStream(ours) as stream:
            gateway = Gateway(None, origins=case.one(None, "*"))
            request = await _shake_hands(gateway, stream, protocol, head)
        answer = await theirs.recv(65536)
    assert answer.startswith(b"HTTP/1.1 "), answer
    assert (request is not None) == (protocol.state is OPEN)
    assert (request is not None) == answer.startswith(b"HTTP/1.1 101")
    case.mark("head refused" if request is None else "head accepted")


def _opened() -> ServerProtocol:
    protocol = new_protocol(LIMITS)
    protocol.receive_data(HEAD)
    [event] = protocol.events_received()
    assert isinstance(event, Request)
    protocol.send_response(protocol.accept(event))
    protocol.data_to_send()
    return protocol


async def _messages(case: Case) -> None:
    ours, theirs = trio.socket.socketpair()
    with ours, theirs:
        link = Link(Wire(LIMITS), trio.SocketStream(ours), _opened())
        sink = Sink()
        good = [_message(case) for _ in range(case.rng.randrange(6))]
        data = b"".join(_sent(case, message) for message in good)
        _feed(case, link, sink, data)
        assert sink.got == good
        case.mark("whole", bool(good))
        bad = b"".join(_sent(case, _message(case)) for _ in range(3))
        bad = case.damaged(bad) if case.luck(0.7) else case.rng.randbytes(200)
        case.mark("damaged")
        _feed(case, link, sink, bad)
        assert sink.got[: len(good)] == good
        protocol = link._protocol
        if protocol.close_sent is not None:
            case.mark("closed for it")
            assert protocol.close_sent.code in (1000, 1001, 1002, 1007, 1009, 1011) or (
                protocol.close_rcvd is not None
            )
        link._end()


def _feed(case: Case, link: Link, sink: Sink, data: bytes) -> None:
    """Let bytes arrive in pieces; stop where the reader of a real link would."""
    at = 0
    while at < len(data) and not link._protocol.eof_sent:
        size = case.one(1, 3, 60, 5000)
        link._protocol.receive_data(data[at : at + size])
        at += size
        link._take(cast(Connection, sink))


def _message(case: Case) -> str | bytes:
    if case.luck(0.3):
        return case.rng.randbytes(case.rng.choice((0, 1, 125, 126, 700)))
    text = case.name() * case.rng.randrange(4)
    return text.encode("utf-8", "replace").decode()[:900]


def _sent(case: Case, message: str | bytes) -> bytes:
    """Return a message as a client may send it: in fragments, pings between them."""
    opcode = Opcode.TEXT if isinstance(message, str) else Opcode.BINARY
    body = message.encode() if isinstance(message, str) else message
    out = b""
    while case.luck(0.3):
        case.mark("fragments")
        cut = case.rng.randrange(len(body) + 1)
        out += Frame(opcode, body[:cut], fin=False).serialize(mask=True)
        if case.luck(0.5):
            out += Frame(case.one(Opcode.PING, Opcode.PONG), b"p").serialize(mask=True)
        opcode, body = Opcode.CONT, body[cut:]
    out += Frame(opcode, body).serialize(mask=True)
    return out


def _outgoing(case: Case) -> None:
    """Our own framing is what a client of another make reads."""
    messages = [_message(case) for _ in range(case.rng.randrange(1, 4))]
    client = ClientProtocol(parse_uri("ws://x/"), state=OPEN)
    client.receive_data(framed(Blob(*messages)))
    got: list[str | bytes] = []
    for event in client.events_received():
        assert isinstance(event, Frame)
        assert event.opcode is not Opcode.CLOSE
        data = bytes(event.data)
        got.append(data.decode() if event.opcode is Opcode.TEXT else data)
    assert got == messages
