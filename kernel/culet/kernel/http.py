"""Request and Response as agents and gates see them. No I/O library behind them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from contextlib import aclosing
from typing import Any, Final, TypeVar, final
from urllib.parse import parse_qsl

import msgspec

from .core.limits import DEFAULT
from .errors import CapacityError, UsageError

T = TypeVar("T")
Headers = Mapping[str, str]


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield b""


def _path_of(url: str) -> str:
    """Return the raw path of a URL, with or without scheme and host."""
    path = url.partition("#")[0].partition("?")[0]
    if "://" in path:
        path = "/" + path.partition("://")[2].partition("/")[2]
    return path


@final
class Request:
    """One HTTP request, or the handshake of a WebSocket.

    `raw_path` is the path as it came, still percent-encoded; `path` is the tail that
    is left for the agent (starts with `/`), `url` the same with its query: a facet and
    the gate before it see what is left at their hop. `headers` have lower-case names;
    `identity` is what `authenticate` returned, None when anonymous. `readonly`: a gate has
    said (with `replace`) that its client may look, and change nothing. `body_bytes`
    bounds what `read` takes.
    """

    __slots__ = (
        "_anew",
        "_body",
        "_most",
        "_stream",
        "headers",
        "identity",
        "method",
        "path",
        "query",
        "raw_path",
        "readonly",
        "url",
    )

    def __init__(
        self,
        method: str = "GET",
        url: str = "/",
        *,
        raw_path: str | None = None,
        path: str | None = None,
        query: Mapping[str, str] | None = None,
        headers: Headers | Iterable[tuple[str, str]] = (),
        identity: Any = None,
        body: bytes | Callable[[], AsyncIterator[bytes]] = b"",
        body_bytes: int = DEFAULT.body_bytes,
    ) -> None:
        self._anew, self._most = True, body_bytes
        self.method = method.upper()
        self.url = url
        self.raw_path = _path_of(url) if raw_path is None else raw_path
        self.path = self.raw_path if path is None else path
        if query is None:
            query = dict(parse_qsl(url.partition("?")[2], keep_blank_values=True))
        self.query: dict[str, str] = dict(query)
        items = headers.items() if isinstance(headers, Mapping) else headers
        self.headers: dict[str, str] = {k.lower(): v for k, v in items}
        self.identity = identity
        self.readonly = False
        self._body: bytes | None = body if isinstance(body, bytes) else None
        self._stream = _nothing if isinstance(body, bytes) else body

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield the body in parts as they arrive. A body can be read once."""
        if self._body is not None:
            yield self._body
            return
        source, self._stream = self._stream, _spent
        parts = source()
        try:
            async for part in parts:
                yield part
        finally:
            await closed(parts)

    async def read(self, *, max_bytes: int | None = None) -> bytes:
        """Return the whole body; raises `CapacityError` beyond `max_bytes`.

        Without it `body_bytes` holds: of the limits, where a client has sent it.
        """
        max_bytes = self._most if max_bytes is None else max_bytes
        if self._body is None:
            parts: list[bytes] = []
            size = 0
            async with aclosing(self.stream()) as incoming:
                async for part in incoming:
                    size += len(part)
                    if size > max_bytes:
                        msg = f"request body is larger than {max_bytes} bytes"
                        raise CapacityError(msg)
                    parts.append(part)
            self._body = b"".join(parts)
        if len(self._body) > max_bytes:
            msg = f"request body is larger than {max_bytes} bytes"
            raise CapacityError(msg)
        return self._body

    async def json(self, type: type[T] | Any = Any) -> Any:  # noqa: A002
        """Decode the body as JSON; raises `UsageError` when it is not of `type`."""
        try:
            return msgspec.json.decode(await self.read(), type=type)
        except (msgspec.MsgspecError, RecursionError) as error:
            msg = f"request body is not what is wanted: {error}"
            raise UsageError(msg) from error

    def replace(
        self,
        *,
        path: str | None = None,
        headers: Headers | None = None,
        identity: Any = ...,
        readonly: bool | None = None,
    ) -> Request:
        """Return a copy with other path, headers, identity or rights; the body is shared."""
        other = Request(
            self.method,
            self.url,
            raw_path=self.raw_path,
            path=self.path if path is None else path,
            query=self.query,
            headers=self.headers if headers is None else headers,
            identity=self.identity if identity is ... else identity,
            body_bytes=self._most,
        )
        other._anew = False
        other.readonly = self.readonly if readonly is None else readonly
        other._body, other._stream = self._body, self._stream
        if self._body is None:
            other._stream = self.stream
        return other

    def instead_of(self, asked: Request) -> Request:
        """Return this request as a gate's answer to `asked`.

        One that the gate has made anew says neither who asks nor what that client may
        not: both stay. What the gate says with `replace` holds.
        """
        if not self._anew:
            return self
        identity = asked.identity if self.identity is None else self.identity
        other = self.replace(
            identity=identity, readonly=self.readonly or asked.readonly
        )
        other._most = asked._most
        return other

    def at(self, tail: str) -> Request:
        """Return a copy that asks for `tail`, what is left of the path at some hop."""
        other = self.replace(path=tail)
        query = self.url.partition("?")[1:]
        other.url = tail + "".join(query)
        return other


def as_request(
    request: Request | str,
    *,
    method: str = "GET",
    headers: Headers | Iterable[tuple[str, str]] = (),
    body: bytes = b"",
) -> Request:
    """Return a request, or make one of a URL (whose host does not matter) and the rest."""
    if isinstance(request, Request):
        return request
    return Request(method, request, headers=headers, body=body)


async def closed(parts: AsyncIterator[Any]) -> None:
    """End an iterator that may be a generator: whoever stops reading ends what feeds it."""
    close = getattr(parts, "aclose", None)
    if close is not None:
        await close()


async def _spent() -> AsyncIterator[bytes]:
    msg = "the request body was read already"
    raise UsageError(msg)
    yield b""


_TEXT: Final = "text/plain; charset=utf-8"


@final
class Response:
    """What answers a request. `body`: bytes, str, or an async iterator of bytes."""

    __slots__ = ("body", "headers", "status")

    def __init__(
        self,
        body: bytes | str | AsyncIterator[bytes] = b"",
        status: int = 200,
        headers: Headers | Iterable[tuple[str, str]] = (),
    ) -> None:
        items = headers.items() if isinstance(headers, Mapping) else headers
        self.headers: dict[str, str] = {k.lower(): v for k, v in items}
        if isinstance(body, str):
            body = body.encode()
            self.headers.setdefault("content-type", _TEXT)
        self.body: bytes | AsyncIterator[bytes] = body
        self.status = status

    @classmethod
    def json(cls, obj: Any, status: int = 200) -> Response:
        """Return a JSON response of any value that msgspec can encode."""
        return cls(
            msgspec.json.encode(obj), status, {"content-type": "application/json"}
        )


class Forward(msgspec.Struct, frozen=True):
    """What `on_forward` returns: who answers instead, and the raw path left for it.

    `to` is a stub of another root, of `kernel.get_agent`. `path` may begin with hops
    (`/sub/…`), which pass the gates below that root.
    """

    to: Any
    path: str = "/"


class ConnectContext(msgspec.Struct, frozen=True):
    """What is known of a client that connects: request, identity, path left for the agent."""

    request: Request
    identity: Any = None
    path: str = "/"
