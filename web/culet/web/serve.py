"""`serve`: one trio listener in front of two servers.

WebSocket upgrades under the agents' prefix go to our own transport; everything else,
first bytes replayed, goes to hypercorn, which serves the Quart-Trio app as it is.
Upgrade requests for other paths are refused here unless the app has WebSockets of its
own. Whatever a connection's handler raises ends that connection: under hypercorn alone
one byte after an upgrade would end the whole server.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
from collections import Counter
from functools import partial
from typing import Final, final

import trio
from hypercorn.config import Config
from quart_trio import QuartTrio

from culet.kernel.errors import UsageError
from culet.kernel.node import alone

from .app import INSPECTOR, SOCKETS, gateways_of
from .asgi import AgentSockets
from .collector import settle
from .gateway import Gateway
from .heads import END, Head, is_ambiguous, read_head, refuse_handshake
from .hypercorn_inside import Inside, fits, misfit, plain_serve, why_not_started
from .outbox import RESTART
from .sieved import Sieved
from .signals import Told, stop_signals
from .transport import RECEIVE_BYTES
from .upgrade import open_socket
from .wire import Wire

log = logging.getLogger("culet.web")
GRACE_S: Final = 3.0  # for requests and goodbyes when the server stops
BACKLOG: Final = 1024
_GONE: Final = (trio.BrokenResourceError, trio.ClosedResourceError, OSError)


async def serve(
    app: QuartTrio,
    *,
    bind: str = "127.0.0.1:8787",
    task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve an app with agents (`create_app`, `install`) until SIGINT, SIGTERM or cancellation.

    `bind` is HOST:PORT, port 0 for any; `task_status.started` gets the URL. Returns when
    clients were told and open requests had `GRACE_S` to finish; a second signal takes
    the grace away. Raises `UsageError` for an address that cannot be had and for an app
    that does not start. Python's collector of cycles is told once to leave alone what was
    imported, and to look at everything less often than usual.
    """
    try:
        async with stop_signals() as told:
            await serve_told(app, told, bind=bind, task_status=task_status)
    except BaseExceptionGroup as group:
        raise alone(group) from None


async def serve_told(
    app: QuartTrio,
    told: Told,
    *,
    bind: str,
    task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve an app until `told` says to stop. See `serve`."""
    gateways = gateways_of(app)
    host, port = split_bind(bind)
    listeners = await _listen(host, port)
    settle()
    server = _Server(app, gateways)
    told.hastens(server.hasten)
    try:
        run = server.run if fits() else server.run_plainly
        await run(listeners, host, told, task_status)
    except BaseExceptionGroup as group:
        why = why_not_started(group)
        if why is None:
            raise
        raise UsageError(f"the app does not start: {why}") from None
    finally:
        for listener in listeners:
            listener.socket.close()


def split_bind(bind: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT`; raises `UsageError`."""
    host, colon, port = bind.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"bind is HOST:PORT, not {bind!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


async def _listen(host: str, port: int) -> list[trio.SocketListener]:
    try:
        return await trio.open_tcp_listeners(port, host=host, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UsageError(
                f"port {port} of {host} is taken: choose another with --port"
            ) from error
        raise UsageError(f"cannot listen on {host}:{port}: {error}") from error


@final
class _Server:
    def __init__(self, app: QuartTrio, gateways: tuple[Gateway, ...]) -> None:
        self.limits = gateways[0].limits  # of connections; sockets have their own
        self.gateways = gateways
        self.routed: AgentSockets = app.extensions[SOCKETS]  # by routes of the app
        self.wires: list[Wire] = []
        self.config = self._configure()
        # an upgrade that hypercorn cannot bear ends its connection only: see `_handle`
        self.app_has_sockets = any(rule.websocket for rule in app.url_map.iter_rules())
        self.app = app
        self.open: Counter[str] = Counter()
        self.total = 0
        self.streams: set[trio.SocketStream] = set()
        self.idle = trio.Event()
        self.draining = False
        self.grace = trio.CancelScope()

    def _configure(self) -> Config:
        config = Config()
        config.accesslog = config.errorlog = None
        config.keep_alive_timeout = self.limits.idle_s
        config.h11_max_incomplete_size = self.limits.header_bytes
        config.graceful_timeout = GRACE_S
        config.include_server_header = False
        return config

    async def run(
        self,
        listeners: list[trio.SocketListener],
        host: str,
        told: Told,
        task_status: trio.TaskStatus[str],
    ) -> None:
        """Accept until told to stop; then let what is open end in order."""
        inside = Inside(self.app, self.config)
        # a cancelled server still shuts its app down: what the app opened is closed
        life = trio.CancelScope(shield=True)

        async def live(*, task_status: trio.TaskStatus[None]) -> None:
            with life:
                await inside.live(task_status=task_status)

        async with trio.open_nursery() as outer:
            await outer.start(live)
            await inside.started()
            try:
                await self._accept(inside, listeners, host, told, task_status)
            finally:
                with trio.CancelScope(shield=True):
                    await inside.stopped()
                    life.cancel(reason="the server has stopped")

    async def run_plainly(
        self,
        listeners: list[trio.SocketListener],
        host: str,
        told: Told,
        task_status: trio.TaskStatus[str],
    ) -> None:
        """Leave the listener to a hypercorn that is not known: less is kept, see the guide."""
        log.warning(
            "%s: it serves WebSockets too, and cuts less than the limits say", misfit()
        )
        self._warn(host)
        self.config.websocket_max_message_size = 2 * self.limits.message_bytes
        self.config.websocket_ping_interval = self.limits.ping_s
        url = _url(host, listeners)

        async def until() -> None:
            _say_served(url, task_status)
            await told.stop.wait()
            self._refuse()

        await plain_serve(self.app, self.config, listeners, until)

    async def _accept(
        self,
        inside: Inside,
        listeners: list[trio.SocketListener],
        host: str,
        told: Told,
        task_status: trio.TaskStatus[str],
    ) -> None:
        async with trio.open_nursery() as handlers:
            async with trio.open_nursery() as accepting:
                self.wires = [Wire(gateway.limits) for gateway in self.gateways]
                for wire in self.wires:
                    handlers.start_soon(wire.flush)
                    handlers.start_soon(wire.keep)
                await accepting.start(
                    partial(
                        trio.serve_listeners,
                        partial(self._handle, inside),
                        listeners,
                        handler_nursery=handlers,
                    )
                )
                url = _url(host, listeners)
                self._warn(host)
                _say_served(url, task_status)
                await told.stop.wait()
                self._refuse()
                await inside.stop()
                await self._wind_down()
                accepting.cancel_scope.cancel(reason="the server stops")
            for listener in listeners:  # who comes now is refused, and does not wait
                listener.socket.close()
            handlers.cancel_scope.cancel(reason="the server stops")

    def _warn(self, host: str) -> None:
        guarded = all(gateway.guarded for gateway in self.gateways)
        if not guarded and not _is_loopback(host):
            log.warning(
                "%s can be reached from other machines and there is neither "
                "`authenticate` nor `admit`: anybody may use these agents",
                host,
            )

    def _refuse(self) -> None:
        """Nothing new begins: `/readyz` says so first, and so does every later answer."""
        self.draining = True
        for gateway in self.gateways:
            gateway.drain()

    async def _wind_down(self) -> None:
        """Say goodbye; what has not ended after the grace is closed.

        New connections are answered meanwhile, and are not waited for.
        """
        open_then = set(self.streams)
        sockets = sum(len(wire.links) for wire in self.wires)
        for wire in self.wires:
            wire.close_all(*RESTART)
        self.routed.close_all(*RESTART)
        inspector = self.app.extensions.get(INSPECTOR)
        if inspector is not None:
            inspector.close()  # its events would go on for the whole grace
        self.grace.deadline = min(self.grace.deadline, trio.current_time() + GRACE_S)
        with self.grace:
            while not open_then.isdisjoint(self.streams):
                self.idle = trio.Event()
                await self.idle.wait()
        cut = len(open_then & self.streams)
        about = {"sockets": sockets, "requests": len(open_then) - sockets, "cut": cut}
        log.info("drained", extra=about)
        # hypercorn shields its sends: only a closed socket ends them
        for stream in list(self.streams):
            stream.socket.close()

    def hasten(self) -> None:
        """A second signal: nothing that is open gets more time."""
        self.grace.cancel(reason="a second signal")
        for gateway in self.gateways:
            gateway.hasten()

    # ---- one connection

    async def _handle(self, inside: Inside, stream: trio.SocketStream) -> None:
        """Serve one connection; nothing that goes wrong in it goes further."""
        address = _address(stream)
        limits = self.limits
        if (
            self.total >= limits.connections
            or self.open[address] >= limits.connections_per_address
        ):
            await trio.aclose_forcefully(stream)
            return
        self.total += 1
        self.open[address] += 1
        self.streams.add(stream)
        try:
            await self._serve(inside, stream)
        except _GONE:
            pass
        except Exception as error:
            if not _harmless(error):
                log.exception("a connection from %s failed", address)
        finally:
            self.streams.discard(stream)
            self.total -= 1
            self.open[address] -= 1
            if not self.open[address]:
                del self.open[address]
            self.idle.set()
            await trio.aclose_forcefully(stream)

    async def _serve(self, inside: Inside, stream: trio.SocketStream) -> None:
        first = b""
        with trio.move_on_after(self.limits.handshake_s):
            first = await self._first_bytes(stream)
        if not first:
            return
        head = read_head(first[: first.index(END) + len(END)])
        if isinstance(head, Head) and head.is_websocket:
            head = refuse_handshake(head) or head
        if isinstance(head, int):
            await _answer(
                stream, head, "bad request" if head == 400 else "not supported"
            )
            return
        socket = head.is_websocket
        if self.draining and not socket:
            await _answer(stream, 503, "the server stops", "retry-after: 1\r\n")
            return
        if socket:
            path = head.target.partition("?")[0]
            for gateway, wire in zip(self.gateways, self.wires, strict=True):
                if gateway.owns(path):
                    await open_socket(gateway, wire, stream, first)
                    return
            if not self.app_has_sockets:
                await _answer(stream, 404, "no WebSocket here")
                return
        limits = self.limits
        replayed = _Replayed(stream, first, limits.slow_client_s)
        await inside.connection(Sieved(replayed, stream.socket, limits.header_bytes))

    async def _first_bytes(self, stream: trio.SocketStream) -> bytes:
        """Read up to the end of the first request's head."""
        first, end = bytearray(), -1
        while end < 0:
            data = await stream.receive_some(RECEIVE_BYTES)
            if not data:
                return b""
            begin = max(0, len(first) - len(END) + 1)  # what is before was looked at
            first += data
            end = first.find(END, begin)
            size = len(first) if end < 0 else end + len(END)
            if is_ambiguous(first, begin, size) or not first[:1] > b" ":
                await _answer(stream, 400, "bad request")
                return b""
            if size > self.limits.header_bytes:
                await _answer(stream, 431, "the request's head is too large")
                return b""
        return bytes(first)


@final
class _Replayed(trio.abc.HalfCloseableStream):
    """A stream whose first bytes were read already, and whose sends have a deadline."""

    def __init__(self, stream: trio.SocketStream, first: bytes, send_s: float) -> None:
        self.socket = stream.socket  # hypercorn asks it for the addresses
        self._stream, self._first, self._send_s = stream, first, send_s
        # hypercorn's refusal of what comes next may meet an answer that is being sent
        self._turn = trio.Lock()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Return the bytes read before, then what arrives."""
        if self._first:
            first, self._first = self._first, b""
            await trio.lowlevel.checkpoint()
            return first
        return bytes(await self._stream.receive_some(max_bytes))

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send, or give the client up: the caller's scope is shielded.

        Each part has its time, so that only who reads nothing is given up.
        """
        async with self._turn:
            whole = memoryview(data)
            for at in range(0, len(whole), RECEIVE_BYTES):
                deadline = trio.move_on_after(self._send_s)
                with deadline:
                    await self._stream.send_all(whole[at : at + RECEIVE_BYTES])
                if deadline.cancelled_caught:
                    self.socket.close()
                    raise trio.BrokenResourceError("the client does not read")

    async def wait_send_all_might_not_block(self) -> None:
        """Wait until there is room to send."""
        await self._stream.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        """Send no more."""
        async with self._turn:
            await self._stream.send_eof()

    async def aclose(self) -> None:
        """Close the stream."""
        await self._stream.aclose()


async def _answer(
    stream: trio.SocketStream, status: int, text: str, more: str = ""
) -> None:
    body = text.encode() + b"\n"
    head = (
        f"HTTP/1.1 {status} {text}\r\nconnection: close\r\n{more}"
        f"content-type: text/plain; charset=utf-8\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    await stream.send_all(head.encode() + body)
    await stream.send_eof()
    with trio.move_on_after(1.0):
        while await stream.receive_some(RECEIVE_BYTES):
            pass


def _say_served(url: str, task_status: trio.TaskStatus[str]) -> None:
    """Report that the server runs. Signals are heard already: who reads it may stop it."""
    log.info("serving on %s", url)
    task_status.started(url)


def _address(stream: trio.SocketStream) -> str:
    try:
        return str(stream.socket.getpeername()[0])
    except (OSError, IndexError):
        return "-"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _url(host: str, listeners: list[trio.SocketListener]) -> str:
    port = listeners[0].socket.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _harmless(error: BaseException) -> bool:
    """Whether an error says only that the client is gone."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(_harmless, error.exceptions))
    return isinstance(error, _GONE)
