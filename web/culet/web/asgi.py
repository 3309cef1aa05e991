"""Agents' WebSockets under a plain ASGI server, in a user's own app.

The same gateway and the same session as behind our own listener, but the socket is the
server's (`plainlink`). Three habits of hypercorn's trio server shape what is here and
there:

- a `send` cannot be cancelled: a task of its own owns the sending, the kernel hears of
  the end without waiting for it, and a client that takes nothing loses its TCP socket
  where we can find that;
- a `send` to a client that is gone returns at once and never yields: every batch does,
  and after each message of the app, HTTP and WebSockets alike, we do;
- what arrives between an upgrade and `accept` ends the whole process: nothing is awaited
  before the accept. That narrows the gap and cannot close it; see the guide.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final, final

import trio

from culet.kernel.errors import CuletError, UsageError
from culet.kernel.http import Request, Response
from culet.kernel.kernel import Kernel
from culet.kernel.node import alone
from culet.kernel.visits import Visit, error_response

from .gateway import Drained, Enter, Gateway, close_code
from .hypercorn_inside import decline_compression, tcp_socket
from .intake import Intake
from .outbox import RESTART, Close
from .plainlink import PlainLink
from .refusals import (
    refuse_handshake,
    refuse_loop,
    refuse_request,
    refuse_socket,
    refused_status,
)
from .scopes import (
    App,
    Event,
    Handshake,
    Receive,
    Scope,
    Send,
    host_of,
    kernel_request,
    raw_path,
    server_of,
)
from .session import Session

INTAKE: Final = "culet.intake"  # in the scope of a request: its body's way in
UNTAKEN: Final = "culet.socket"  # in the scope of a WebSocket of the app


@final
class AgentSockets:
    """ASGI middleware: WebSockets on agents' paths become sessions, all else is the app's.

    Responses of the app are sent to their end, see `finishing`.
    """

    def __init__(self, app: App, gateways: Iterable[Gateway]) -> None:
        self._app, self._gateways = app, gateways
        self._open: Counter[str] = Counter()
        self._sessions: set[Session] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request or WebSocket."""
        if not trio.lowlevel.in_trio_run():
            await refuse_loop(scope, receive, send)
            return
        if scope["type"] == "http":
            await self._request(scope, receive, send)
            return
        if scope["type"] == "websocket":
            path = raw_path(scope)
            for gateway in self._gateways:
                if gateway.owns(path):
                    shake = Handshake(scope, receive, send)
                    request = kernel_request(scope, path)
                    await self.serve(gateway, shake, request, gateway.enter)
                    return
            await Untaken(self, scope, receive, send).offer(self._app)
            return
        await self._app(scope, receive, send)

    async def _request(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = refused_status(scope)
        if status is not None:
            await refuse_request(send, status)
            return
        intake = scope[INTAKE] = Intake(receive)
        path = raw_path(scope)
        for gateway in self._gateways:
            if gateway.owns(path):
                intake.bound(gateway.limits)
                if not gateway.knows_host(host_of(scope), server_of(scope)):
                    await refuse_request(send, 403)
                    return
        last = any(name.lower() == b"upgrade" for name, _value in scope["headers"])
        try:
            await self._app(scope, intake.receive, finishing(send, intake, last=last))
        except Exception as error:
            await intake.abandon(send)
            if not isinstance(alone(error), Drained):
                raise

    def close_all(self, code: int, reason: str) -> None:
        """Say goodbye to everybody, also to who is just coming in: the server stops."""
        for session in list(self._sessions):
            session.close(code, reason, 0)

    def gateway_of(self, kernel: Kernel) -> Gateway | None:
        """Return the gateway that serves a kernel."""
        return next((g for g in self._gateways if g.serves(kernel)), None)

    async def serve(
        self, gateway: Gateway, shake: Handshake, request: Request, enter: Enter
    ) -> None:
        """Be a session with the agent that `enter` reaches: one of a bounded number."""
        address = str((shake.scope.get("client") or ("-",))[0])
        limits, count = gateway.limits, self._open
        if (
            count.total() >= limits.connections
            or count[address] >= limits.connections_per_address
        ):
            refusal = Response("too many connections", 503)
            await refuse_handshake(shake, refusal)
            return
        count[address] += 1
        try:
            await _serve(self._sessions, gateway, shake, request, enter)
        finally:
            count[address] -= 1
            if not count[address]:
                del count[address]


@final
class Untaken:
    """A WebSocket that goes to the app, which may leave it to an agent before accepting.

    Once taken, the app hears and says nothing of it any more: what arrives is for the
    agent's session.
    """

    def __init__(
        self, sockets: AgentSockets, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self.sockets, self.scope = sockets, scope
        self._receive, self._send = receive, send
        self._accepted = self._taken = False
        self._to_agent, self._from_client = trio.open_memory_channel[Event](0)

    async def offer(self, app: App) -> None:
        """Let the app have it."""
        self.scope[UNTAKEN] = self
        await app(self.scope, self._for_app, self._from_app)

    async def take(self, gateway: Gateway, request: Request, enter: Enter) -> None:
        """Leave it to the agent that `enter` reaches; returns when it has ended.

        Raises `UsageError` when the app has accepted it already, or left it before.
        """
        if self._accepted or self._taken:
            raise UsageError(
                "the WebSocket was accepted already: leave that to the route"
            )
        self._taken = True
        shake = Handshake(self.scope, self._from_client.receive, self._send)
        await self.sockets.serve(gateway, shake, request, enter)

    async def _for_app(self) -> Event:
        while True:
            event = await self._receive()
            if not self._taken:
                return event
            await self._to_agent.send(event)

    async def _from_app(self, message: Event) -> None:
        if not self._taken:
            self._accepted = self._accepted or message["type"] == "websocket.accept"
            await self._send(message)
        # a send to who is gone, or to nobody, has none
        await trio.lowlevel.checkpoint()


def finishing(send: Send, intake: Intake, *, last: bool) -> Send:
    """Let the last message of a response reach hypercorn's end of it.

    While it is sent, hypercorn tells the app that the client is gone, at which
    Quart-Trio cancels the task that is sending: the connection was not closed, and one
    that is kept alive had no idle timer any more.

    `last`: this is the last one of its connection. After a request that offers to change
    the protocol hypercorn may read no more, with its idle timer stopped.
    """

    async def sending(message: Event) -> None:
        if last and message["type"] == "http.response.start":
            headers = [*message.get("headers", ()), (b"connection", b"close")]
            message = {**message, "headers": headers}
        end = message["type"] == "http.response.body" and not message.get("more_body")
        if end:
            intake.end()
        with trio.CancelScope(shield=end):
            await send(message)
        if not end:
            await trio.lowlevel.checkpoint()  # a send to who is gone has none

    return sending


async def _serve(
    sessions: set[Session],
    gateway: Gateway,
    shake: Handshake,
    request: Request,
    enter: Enter,
) -> None:
    scope, receive, send = shake
    # behind a route of the app's own it is for that to ask who comes
    server = server_of(scope) if gateway.owns(raw_path(scope)) else ""
    refusal = gateway.refuse_upgrade(request, server)
    if refusal is not None:
        await refuse_handshake(shake, refusal)
        return
    offered = scope.get("subprotocols") or [None]
    decline_compression(send)
    await send({"type": "websocket.accept", "subprotocol": offered[0]})
    if not gateway.ready:
        await refuse_socket(receive, send, RESTART)
        return
    visited = await enter(request)
    refused = (
        await _converse(sessions, gateway, shake, request, visited)
        if isinstance(visited, Visit)
        else visited
    )
    if refused is not None:
        status = refused.status
        close = Close(close_code(status), f"connection refused ({status})")
        await refuse_socket(receive, send, close)


async def _converse(
    sessions: set[Session],
    gateway: Gateway,
    shake: Handshake,
    request: Request,
    visit: Visit,
) -> Response | None:
    """Run the session; a Response says that it could not begin."""
    scope, receive, send = shake
    kernel = gateway.kernel
    socket = tcp_socket(scope.get("http_version"), send)
    link = PlainLink(gateway.limits, receive, send, socket)
    session = Session(visit.gate, gateway.limits, link.ready, link.cut)
    connection_id = request.query.get("_pk") or kernel.chance.id()
    try:
        connection = visit.connect(session, connection_id)
    except CuletError as error:
        return error_response(error)
    session.connection = connection
    sessions.add(session)
    if not gateway.ready:  # it stopped while the agent was woken
        session.close(*RESTART, 0)
    try:
        await link.run(kernel, session, connection)
    finally:
        sessions.discard(session)
    return None
