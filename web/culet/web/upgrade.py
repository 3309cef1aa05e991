"""From the first bytes of a connection to an open WebSocket on an agent.

The client gives a handshake four seconds, and an agent may take longer to wake: so the
socket is accepted first. What must not become a WebSocket (a foreign Origin, a bad
handshake) is answered in HTTP; every later refusal is a close with a code that the
clients understand.
"""

from __future__ import annotations

import logging
from typing import Final

import trio
from websockets.http11 import Request as WireRequest
from websockets.protocol import OPEN
from websockets.server import ServerProtocol

from culet.kernel.errors import CuletError
from culet.kernel.http import Request, Response
from culet.kernel.visits import Visit, error_response

from .gateway import Gateway, close_code
from .heads import END, joined
from .outbox import LAST_S, RESTART
from .session import Session
from .transport import RECEIVE_BYTES, Link, new_protocol
from .wire import Wire

log = logging.getLogger("culet.web")
_BAD: Final = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nContent-Length: 12\r\n"
    b"Connection: close\r\n\r\nbad request\n"
)


async def open_socket(
    gateway: Gateway, wire: Wire, stream: trio.SocketStream, first: bytes
) -> None:
    """Do the handshake that `first` begins, and be the WebSocket until it ends."""
    if gateway.ready:  # a crowd that comes at once is let in as passes have time for it
        await gateway.kernel.paced()
    protocol = new_protocol(wire.limits)
    head, end, rest = first.partition(END)
    request = await _shake_hands(gateway, stream, protocol, head + end)
    if request is None:
        return
    if rest:
        protocol.receive_data(rest)
    if not gateway.ready:
        await _refuse(stream, protocol, *RESTART)
        return
    visited = await gateway.enter(request)
    refusal = (
        await _converse(gateway, wire, stream, protocol, request, visited)
        if isinstance(visited, Visit)
        else visited
    )
    if refusal is not None:
        reason = f"connection refused ({refusal.status})"
        await _refuse(stream, protocol, close_code(refusal.status), reason)


async def _converse(
    gateway: Gateway,
    wire: Wire,
    stream: trio.SocketStream,
    protocol: ServerProtocol,
    request: Request,
    visit: Visit,
) -> Response | None:
    """Run the session; a Response says that it could not begin."""
    kernel = gateway.kernel
    link = Link(wire, stream, protocol)
    session = Session(visit.gate, wire.limits, link.ready, link.cut)
    connection_id = request.query.get("_pk") or kernel.chance.id()
    try:
        connection = visit.connect(session, connection_id)
    except CuletError as error:
        return error_response(error)
    session.connection = connection
    if not gateway.ready:  # it stopped while the agent was woken
        link.bye = RESTART
    await link.run(kernel, session, connection)
    return None


async def _shake_hands(
    gateway: Gateway, stream: trio.SocketStream, protocol: ServerProtocol, head: bytes
) -> Request | None:
    """Accept the handshake, or answer it in HTTP and return None."""
    protocol.receive_data(head)
    event = next(iter(protocol.events_received()), None)
    if not isinstance(event, WireRequest):
        await stream.send_all(_BAD)  # the protocol has hung up and says nothing more
        return None
    request = kernel_request(event)
    reached = stream.socket.getsockname()
    server = str(reached[0]) if isinstance(reached, tuple) else ""
    refusal = gateway.refuse_upgrade(request, server)
    if refusal is None:
        try:
            # the key is decoded by a library that calls it its own fault
            request.headers.get("sec-websocket-key", "").encode("ascii")
            answer = protocol.accept(event)
        except UnicodeEncodeError:  # it is no text, or a header that is quoted is none
            await stream.send_all(_BAD)
            return None
        protocol.send_response(answer)
    else:
        assert isinstance(refusal.body, bytes)
        protocol.send_response(protocol.reject(refusal.status, refusal.body.decode()))
    await _say(stream, protocol)
    return request if protocol.state is OPEN else None


def kernel_request(event: WireRequest) -> Request:
    """Return the handshake as gates and agents see it."""
    return Request("GET", event.path, headers=joined(event.headers.raw_items()))


async def _say(stream: trio.SocketStream, protocol: ServerProtocol) -> None:
    data = b"".join(protocol.data_to_send())
    if data:
        await stream.send_all(data)


async def _refuse(
    stream: trio.SocketStream, protocol: ServerProtocol, code: int, reason: str
) -> None:
    """Close an accepted socket, and read until the client has closed as well."""
    if protocol.state is not OPEN:
        return
    protocol.send_close(code, reason)
    with trio.move_on_after(LAST_S):
        await _say(stream, protocol)
        while not protocol.eof_sent:
            data = await stream.receive_some(RECEIVE_BYTES)
            if not data:
                return
            protocol.receive_data(data)
            protocol.events_received()
        await stream.send_eof()
        while await stream.receive_some(RECEIVE_BYTES):
            pass
