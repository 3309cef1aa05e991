"""Agents' WebSockets under a plain ASGI server, in a user's own app.

The same gateway and the same session as behind our own listener, but the socket is the
server's: there is one `send` a message, and no ping. Three habits of hypercorn's trio
server shape what is here:

- a `send` cannot be cancelled: a task of its own owns the sending, the kernel hears of
  the end without waiting for it, and a client that takes nothing loses its TCP socket
  where we can find that;
- a `send` to a client that is gone returns at once and never yields: every batch does,
  and after each message of the app, HTTP and WebSockets alike, we do;
- what arrives between an upgrade and `accept` ends the whole process: nothing is awaited
  before the accept. That narrows the gap and cannot close it; see the guide.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from contextlib import suppress
from typing import Any, Final, final
from urllib.parse import quote

import trio

from culet.kernel.core.limits import Limits
from culet.kernel.errors import CuletError, UsageError
from culet.kernel.http import Request, Response
from culet.kernel.kernel import Kernel
from culet.kernel.node import alone
from culet.kernel.sockets import Connection
from culet.kernel.visits import Visit, error_response

from .gateway import Drained, Enter, Gateway, close_code, opened
from .heads import joined
from .hypercorn_inside import decline_compression, tcp_socket
from .intake import Intake
from .outbox import RESTART, Close
from .session import Session

log = logging.getLogger("culet.web")
Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
LAST_S: Final = 1.0  # for the last words of a connection
_ABNORMAL: Final = 1006
_TOO_BIG: Final = 1009
INTAKE: Final = "culet.intake"  # in the scope of a request: its body's way in
UNTAKEN: Final = "culet.socket"  # in the scope of a WebSocket of the app
_CORK: Final[int | None] = getattr(trio.socket, "TCP_CORK", None)  # Linux


def raw_path(scope: Scope) -> str:
    """Return the path of an ASGI scope as it was sent, without the app's root path."""
    raw = scope.get("raw_path")
    path = raw.decode("latin-1") if raw else quote(scope["path"])
    root = quote(scope.get("root_path") or "").rstrip("/")
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


NEEDS_TRIO: Final = (
    "this app runs on trio: start it with `hypercorn --worker-class trio`"
)


async def _refuse_loop(scope: Scope, receive: Receive, send: Send) -> None:
    """Under another event loop nothing can work: end the start, or say so."""
    kind = scope["type"]
    await receive()
    if kind == "lifespan":
        await send({"type": "lifespan.startup.failed", "message": NEEDS_TRIO})
    elif kind == "websocket":
        await send({"type": "websocket.close", "code": 1011, "reason": NEEDS_TRIO})
    else:
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": NEEDS_TRIO.encode()})


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
            await _refuse_loop(scope, receive, send)
            return
        if scope["type"] == "http":
            await self._request(scope, receive, send)
            return
        if scope["type"] == "websocket":
            path = raw_path(scope)
            for gateway in self._gateways:
                if gateway.owns(path):
                    request = kernel_request(scope, path)
                    enter = gateway.enter
                    await self.serve(gateway, scope, request, enter, receive, send)
                    return
            await Untaken(self, scope, receive, send).offer(self._app)
            return
        await self._app(scope, receive, send)

    async def _request(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = _refused(scope)
        if status is not None:
            await _refuse_request(send, status)
            return
        intake = scope[INTAKE] = Intake(receive)
        path = raw_path(scope)
        for gateway in self._gateways:
            if gateway.owns(path):
                intake.bound(gateway.limits)
                if not gateway.knows_host(_host(scope), server_of(scope)):
                    await _refuse_request(send, 403)
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
        self,
        gateway: Gateway,
        scope: Scope,
        request: Request,
        enter: Enter,
        receive: Receive,
        send: Send,
    ) -> None:
        """Be a session with the agent that `enter` reaches: one of a bounded number."""
        address = str((scope.get("client") or ("-",))[0])
        limits, count = gateway.limits, self._open
        if (
            count.total() >= limits.connections
            or count[address] >= limits.connections_per_address
        ):
            await _refuse_in_http(scope, send, Response("too many connections", 503))
            return
        count[address] += 1
        try:
            await _serve(self._sessions, gateway, scope, request, enter, receive, send)
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
        await self.sockets.serve(
            gateway, self.scope, request, enter, self._from_client.receive, self._send
        )

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
        await (
            trio.lowlevel.checkpoint()
        )  # a send to who is gone, or to nobody, has none


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
    scope: Scope,
    request: Request,
    enter: Enter,
    receive: Receive,
    send: Send,
) -> None:
    # behind a route of the app's own it is for that to ask who comes
    server = server_of(scope) if gateway.owns(raw_path(scope)) else ""
    refusal = gateway.refuse_upgrade(request, server)
    if refusal is not None:
        await _refuse_in_http(scope, send, refusal)
        return
    offered = scope.get("subprotocols") or [None]
    decline_compression(send)
    await send({"type": "websocket.accept", "subprotocol": offered[0]})
    if not gateway.ready:
        await _refuse(receive, send, RESTART)
        return
    visited = await enter(request)
    refused = (
        await _converse(sessions, gateway, scope, request, visited, receive, send)
        if isinstance(visited, Visit)
        else visited
    )
    if refused is not None:
        status = refused.status
        close = Close(close_code(status), f"connection refused ({status})")
        await _refuse(receive, send, close)


async def _converse(
    sessions: set[Session],
    gateway: Gateway,
    scope: Scope,
    request: Request,
    visit: Visit,
    receive: Receive,
    send: Send,
) -> Response | None:
    """Run the session; a Response says that it could not begin."""
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


@final
class PlainLink:
    """One accepted WebSocket of an ASGI server. `run` is its life."""

    def __init__(
        self,
        limits: Limits,
        receive: Receive,
        send: Send,
        socket: trio.socket.SocketType | None,
    ) -> None:
        self._limits, self._receive, self._send = limits, receive, send
        self._socket = socket
        self._wake = trio.Event()
        self._scope = trio.CancelScope()
        self._why = ""
        self._corked = False
        self._sending_since: float | None = None
        self._said: Close | None = None
        self._close_by: float | None = None
        self._heard: int | None = None  # the code with which the server ended it

    # ---- what a session calls: only notes are taken

    def ready(self) -> None:
        """There is something to take."""
        self._wake.set()

    def cut(self, why: str) -> None:
        """Drop this client without a goodbye: it cannot be told."""
        if not self._why:
            self._why = why
            self._scope.cancel(reason=why)

    # ---- life

    async def run(
        self, kernel: Kernel, session: Session, connection: Connection
    ) -> None:
        """Be the connection until it ends; tells the kernel of the end, at once."""
        async with trio.open_nursery() as sending:
            sending.start_soon(self._sender, session)
            try:
                with self._scope:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(self._open, kernel, session, connection)
                        nursery.start_soon(self._keep, session)
                        await self._receiver(session, connection)
                        nursery.cancel_scope.cancel(reason="the client is gone")
            finally:
                if self._heard is None and not self._why and self._said is None:
                    self._said = RESTART  # cancelled from outside
                session.lost(*self._end(), was_clean=self._clean)
                sending.cancel_scope.cancel(reason="the connection ends")
                await self._goodbye()

    @property
    def _clean(self) -> bool:
        return self._heard not in {None, _ABNORMAL}

    def _end(self) -> tuple[int, str]:
        if self._said is not None and (self._clean or self._heard is None):
            return self._said.code, self._why or self._said.reason
        return self._heard or _ABNORMAL, self._why

    async def _goodbye(self) -> None:
        """Say why, if there is still somebody and nothing is being sent; then drop."""
        if self._heard is not None:
            return
        if not self._why and self._said is RESTART and self._sending_since is None:
            with trio.move_on_after(LAST_S, shield=True):
                await _close(self._send, RESTART)
        elif self._socket is not None:
            self._socket.close()

    async def _open(
        self, kernel: Kernel, session: Session, connection: Connection
    ) -> None:
        """Run the agent's connect hooks; a failing one ends the socket."""
        failure = await opened(kernel, connection)
        if failure is not None:
            session.close(failure.code, failure.reason, 0)

    # ---- in

    async def _receiver(self, session: Session, connection: Connection) -> None:
        """Take what arrives until the server says that the socket is gone."""
        limit = self._limits.message_bytes
        while True:
            await connection.room()
            event = await self._receive()
            match event["type"]:
                case "websocket.receive":
                    data = event.get("bytes")
                    message: str | bytes = event["text"] if data is None else data
                    if self._close_by is not None:
                        pass  # it will close; nothing it says counts any more
                    elif _larger(message, limit):
                        self._close_by = trio.current_time() + self._limits.handshake_s
                        session.close(_TOO_BIG, "the message is too large", 0)
                    else:
                        connection.received(message)
                case "websocket.disconnect":
                    self._heard = event.get("code") or _ABNORMAL
                    return

    # ---- out

    async def _sender(self, session: Session) -> None:
        """Own the sending: one message after the other, then the close."""
        try:
            while True:
                await self._wake.wait()
                self._wake = trio.Event()
                await self._drain(session)
                if session.closing is not None and not session.over:
                    self._said = session.closing
                    self._close_by = trio.current_time() + self._limits.handshake_s
                    await _close(self._send, session.closing)
                    return
        except Exception:
            # servers differ in what they raise for a client that is gone
            log.debug("cannot send", exc_info=True)
            self.cut("cannot send")

    async def _drain(self, session: Session) -> None:
        while blobs := session.take():
            self._cork(len(blobs) > 1 or len(blobs[0].texts) > 1)
            for blob in blobs:
                for text in blob.texts:
                    if session.over:
                        return
                    self._sending_since = trio.current_time()
                    await self._send(_message(text))
            self._sending_since = None
            self._cork(False)
            session.landed()
            await trio.lowlevel.checkpoint()

    def _cork(self, on: bool) -> None:
        """Let frames that belong together arrive together, as our own listener does."""
        if _CORK is None or self._socket is None or on is self._corked:
            return
        self._corked = on
        with suppress(OSError):
            self._socket.setsockopt(trio.socket.IPPROTO_TCP, _CORK, int(on))

    # ---- time

    async def _keep(self, session: Session) -> None:
        """Cut the slow, and those that will not close."""
        limits = self._limits
        pace = min(limits.slow_client_s, limits.handshake_s, 4.0) / 4
        while True:
            await trio.sleep(pace)
            now = trio.current_time()
            since = self._sending_since
            if self._close_by is not None and now > self._close_by:
                self.cut("did not close")
            elif (
                since is not None
                and now - since > limits.slow_client_s
                and session.live
            ):
                self.cut("slow")


def _message(text: str | bytes) -> Event:
    if isinstance(text, str):
        return {"type": "websocket.send", "text": text, "bytes": None}
    return {"type": "websocket.send", "bytes": text, "text": None}


def _larger(message: str | bytes, limit: int) -> bool:
    """Whether a message has more bytes than `limit`; counts only where it must."""
    size = len(message)
    if isinstance(message, bytes) or size > limit or size * 4 <= limit:
        return size > limit
    return len(message.encode()) > limit


async def _close(send: Send, close: Close) -> None:
    await send({"type": "websocket.close", "code": close.code, "reason": close.reason})


async def _refuse(receive: Receive, send: Send, close: Close) -> None:
    """Close an accepted socket, and take what comes until the client has closed too.

    A socket that is dropped with unread bytes is reset: the code would be lost.
    """
    with trio.move_on_after(LAST_S):
        await _close(send, close)
        while (await receive())["type"] != "websocket.disconnect":
            pass


def _two_lengths(scope: Scope) -> bool:
    """Whether a request says in two ways where it ends: who reads it otherwise than we
    do, a proxy before us, sees another request behind it.
    """
    names = {name.lower() for name, _value in scope["headers"]}
    return b"content-length" in names and b"transfer-encoding" in names


def _refused(scope: Scope) -> int | None:
    """Return the status of a request that must not reach the app, and ends its connection.

    A CONNECT may change the protocol, so hypercorn stops reading and the connection would
    stay for ever, whatever is answered. A TRACE would show a page its own cookies.
    """
    if scope["method"] in {"CONNECT", "TRACE"}:
        return 501
    if scope["http_version"] not in _VERSIONS:
        return 505
    return 400 if _two_lengths(scope) else None


_VERSIONS: Final = frozenset(("1.0", "1.1", "2", "3"))  # hypercorn takes any number
_LAST: Final = [(b"content-length", b"0"), (b"connection", b"close")]


async def _refuse_request(send: Send, status: int) -> None:
    start = {"type": "http.response.start", "status": status}
    await send({**start, "headers": _LAST})
    await send({"type": "http.response.body", "body": b""})


def server_of(scope: Scope) -> str:
    """Return the address that a request has reached, as far as the server tells."""
    return str((scope.get("server") or ("",))[0])


def _host(scope: Scope) -> str:
    named = [value for name, value in scope["headers"] if name.lower() == b"host"]
    return b", ".join(named).decode("latin-1")


async def _refuse_in_http(scope: Scope, send: Send, refusal: Response) -> None:
    """Answer a handshake that must not become a WebSocket."""
    if "websocket.http.response" not in (scope.get("extensions") or {}):
        await send({"type": "websocket.close", "code": 1008})  # the server makes it 403
        return
    assert isinstance(refusal.body, bytes)
    start: Final = "websocket.http.response.start"
    headers = [
        (b"content-type", b"text/plain; charset=utf-8"),
        (b"content-length", str(len(refusal.body)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": start, "status": refusal.status, "headers": headers})
    body: Final = "websocket.http.response.body"
    await send({"type": body, "body": refusal.body, "more_body": False})


def kernel_request(
    scope: Scope, path: str, *, query: str | None = None, identity: Any = None
) -> Request:
    """Return the handshake as gates and agents see it. `query` stands for its own."""
    headers = joined(
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in scope["headers"]
    )
    if query is None:
        query = scope.get("query_string", b"").decode("latin-1")
    url = f"{path}?{query}" if query else path
    return Request("GET", url, headers=headers, identity=identity)
