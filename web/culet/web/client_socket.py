"""One WebSocket to an agent, from the URL to how it ended."""

from __future__ import annotations

import errno
import os
import ssl as tls
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast, final
from urllib.parse import quote, urlencode, urlsplit

import trio
from trio_websocket import (
    ConnectionClosed,
    ConnectionRejected,
    HandshakeError,
    WebSocketConnection,
    wrap_client_stream,
)
from wsproto.utilities import ProtocolError

from culet.kernel.core.limits import Limits
from culet.kernel.core.path import build_agent_path
from culet.kernel.errors import UsageError

RECEIVE_BYTES: Final = 64 << 10
GOODBYE_S: Final = 1.0  # for the closing handshake when we leave
_STAND_IN: Final = ("Root", "root")  # a root, so that hops can be built by the codec
_SECURE: Final = {"ws": False, "http": False, "wss": True, "https": True}
_AGAIN: Final = frozenset((408, 425, 429))  # refusals of this moment only
_KEPT: Final = "/%!$&'()*+,;=:@-._~[]|"

Headers = Mapping[str, str] | Iterable[tuple[str, str]]
# or a function that is asked before each attempt: for tokens that expire
Renewed = Headers | Callable[[], Awaitable[Headers]]


def renewing(headers: Renewed) -> Callable[[], Awaitable[list[tuple[str, str]]]]:
    """Return a function that gives the headers of the next attempt."""
    if not callable(headers):
        fixed = list(headers.items() if isinstance(headers, Mapping) else headers)

    async def ask() -> list[tuple[str, str]]:
        if not callable(headers):
            return fixed
        given = await headers()
        return list(given.items() if isinstance(given, Mapping) else given)

    return ask


class Address(NamedTuple):
    """Where a socket goes. `resource` is the raw target, `ssl` None for plain TCP."""

    host: str
    port: int
    resource: str
    ssl: tls.SSLContext | None

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        default = 80 if self.ssl is None else 443
        return host if self.port == default else f"{host}:{self.port}"


def address_of(
    url: str,
    *,
    sub: Sequence[tuple[str, str]] = (),
    query: Mapping[str, str] | None = None,
    ssl: tls.SSLContext | None = None,
    connection_id: str,
) -> Address:
    """Read the URL of an agent; `sub` are hops below it, class and name.

    ws, wss, http and https are taken. Raises `UsageError`.
    """
    try:
        split = urlsplit(url)
        port, host = split.port, split.hostname
    except ValueError as error:
        raise UsageError(f"not a URL: {url!r} ({error})") from None
    if split.scheme not in _SECURE or not host:
        raise UsageError(f"give a ws:// or wss:// URL of an agent, not {url!r}")
    if "@" in split.netloc:
        raise UsageError("credentials do not belong in the URL: use headers")
    secure = _SECURE[split.scheme]
    if ssl is not None and not secure:
        raise UsageError("`ssl` is for wss:// URLs")
    path = quote(split.path, safe=_KEPT).rstrip("/")
    if sub:
        path += build_agent_path([_STAND_IN, *sub]).removeprefix("/agents/root/root")
    parts = [urlencode({"_pk": connection_id})]
    parts += [quote(split.query, safe=_KEPT + "?")] if split.query else []
    parts += [urlencode(dict(query))] if query else []
    resource = f"{path or '/'}?{'&'.join(parts)}"
    context = (ssl or tls.create_default_context()) if secure else None
    return Address(host, port or (443 if secure else 80), resource, context)


class Ending(NamedTuple):
    """How a connection ended. `code` 1006: without a goodbye, or it never began."""

    code: int
    reason: str

    @property
    def terminal(self) -> bool:
        """Whether connecting again would not help."""
        return self.code == 1008 or 4000 <= self.code <= 4999

    def __str__(self) -> str:
        code = "" if self.code == 1006 else f" (close code {self.code})"
        return (self.reason or "the connection was lost") + code


class _Cut(Exception):
    """The stream ended before the handshake did, or nothing is heard of the server."""


_GONE: Final = (
    _Cut,
    ConnectionClosed,
    HandshakeError,
    ProtocolError,  # of wsproto: a frame was to be sent after the close
    trio.BrokenResourceError,
    trio.ClosedResourceError,
    OSError,
)


@final
class Tap(trio.abc.Stream):
    """A stream that knows when something was heard.

    trio-websocket waits for ever when a stream ends in the opening handshake, so until
    `opened` is set an end is raised.
    """

    def __init__(self, inner: trio.abc.Stream) -> None:
        self._inner = inner
        self.opened = False
        self.heard_at = trio.current_time()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Receive, noting when."""
        try:
            data = bytes(await self._inner.receive_some(max_bytes))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            if not self.opened:
                raise _Cut("the connection broke in the handshake") from error
            raise
        if not data and not self.opened:
            raise _Cut("the server closed the connection in the handshake")
        self.heard_at = trio.current_time()
        return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of it."""
        await self._inner.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        """Wait until there is room to send."""
        await self._inner.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        """Close the stream."""
        await self._inner.aclose()


async def open_stream(address: Address) -> trio.abc.Stream:
    """Open TCP, or TLS over it. Raises `OSError`."""
    stream = await trio.open_tcp_stream(address.host, address.port)
    if address.ssl is None:
        return stream
    secure = trio.SSLStream(
        stream, address.ssl, server_hostname=address.host, https_compatible=True
    )
    try:
        await secure.do_handshake()
    except BaseException:
        await trio.aclose_forcefully(stream)
        raise
    return secure


async def converse(
    address: Address,
    headers: Callable[[], Awaitable[list[tuple[str, str]]]],
    limits: Limits,
    talk: Callable[[WebSocketConnection, Tap], Awaitable[None]],
) -> Ending:
    """Connect and `talk`; say goodbye when that returns. Return how it ended.

    Raises nothing but what `talk` raises for other reasons than a lost connection, and
    what `headers` raises that is no `OSError`.
    """
    where = f"{address.host}:{address.port}"
    try:
        with trio.fail_after(limits.handshake_s):
            given = await headers()
    except trio.TooSlowError:
        return Ending(1006, "the headers took too long")
    except OSError as error:
        return Ending(1006, f"no headers: {_told(error)}")
    raw = [(name.lower().encode(), value.encode()) for name, value in given]
    try:
        with trio.fail_after(limits.handshake_s):
            tap = Tap(await open_stream(address))
    except trio.TooSlowError:
        return Ending(1006, f"cannot reach {where}: it does not answer")
    except (OSError, trio.BrokenResourceError) as error:
        return Ending(1006, f"cannot reach {where}: {_told(error)}")
    try:
        async with trio.open_nursery() as nursery:
            with trio.fail_after(limits.handshake_s):
                socket = await wrap_client_stream(
                    nursery,
                    cast(Any, tap),
                    address.authority,
                    address.resource,
                    extra_headers=raw,
                    max_message_size=limits.client_message_bytes,
                    receive_buffer_size=RECEIVE_BYTES,
                )
            tap.opened = True
            await talk(socket, tap)
            with trio.move_on_after(GOODBYE_S):
                await socket.aclose()
            nursery.cancel_scope.cancel(reason="the conversation is over")
    except BaseExceptionGroup as group:
        gone, others = group.split((*_GONE, trio.TooSlowError))
        if others is not None or gone is None:
            raise
        return _ending(gone, where)
    finally:
        await trio.aclose_forcefully(tap)
    closed = socket.closed
    return (
        Ending(1006, "") if closed is None else Ending(closed.code, closed.reason or "")
    )


def _told(error: BaseException) -> str:
    """Return what the system says; trio tries several addresses, in a group."""
    inner = next(iter(_leaves(error.__cause__ or error)), error)
    number = inner.errno if isinstance(inner, OSError) else None
    # errors of TLS have numbers as well, which are none of the system's
    if number in errno.errorcode and not isinstance(inner, tls.SSLError):
        return os.strerror(number or 0)
    return str(inner) or type(inner).__name__


def _ending(group: BaseExceptionGroup[BaseException], where: str) -> Ending:
    """Return the most telling of what ended a connection."""
    leaves = list(_leaves(group))
    for error in leaves:
        if isinstance(error, ConnectionRejected):
            status = error.status_code
            body = (error.body or b"").decode(errors="replace").strip()[:200]
            text = f"{where} refused: HTTP {status}" + (f", {body}" if body else "")
            lasts = 400 <= status < 500 and status not in _AGAIN
            return Ending(4000 + status if lasts else 1006, text)
    for error in leaves:
        if isinstance(error, ConnectionClosed) and error.reason is not None:
            return Ending(error.reason.code, error.reason.reason or "")
    error = leaves[0]
    if isinstance(error, trio.TooSlowError):
        return Ending(1006, f"{where} does not answer the handshake")
    return Ending(1006, str(error) or type(error).__name__)


def _leaves(error: BaseException) -> Iterable[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


async def keep(socket: WebSocketConnection, tap: Tap, limits: Limits) -> None:
    """Ping a silent server, and end the connection when it stays silent."""
    while True:
        await trio.sleep(limits.ping_s)
        heard_at = tap.heard_at
        if trio.current_time() - heard_at < limits.ping_s:
            continue
        with trio.move_on_after(limits.handshake_s):
            await socket.ping()
        if tap.heard_at == heard_at:
            raise _Cut("nothing is heard of the server")
