"""What an ASGI scope says of a request or a handshake, as gates and agents read it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, NamedTuple
from urllib.parse import quote

from culet.kernel.http import Request

from .heads import joined

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Handshake(NamedTuple):
    """A WebSocket that a server offers, and the way to answer it."""

    scope: Scope
    receive: Receive
    send: Send


def raw_path(scope: Scope) -> str:
    """Return the path of an ASGI scope as it was sent, without the app's root path."""
    raw = scope.get("raw_path")
    path = raw.decode("latin-1") if raw else quote(scope["path"])
    root = quote(scope.get("root_path") or "").rstrip("/")
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


def server_of(scope: Scope) -> str:
    """Return the address that a request has reached, as far as the server tells."""
    return str((scope.get("server") or ("",))[0])


def host_of(scope: Scope) -> str:
    """Return the `Host` that a request names; more than one are a list, as elsewhere."""
    named = [value for name, value in scope["headers"] if name.lower() == b"host"]
    return b", ".join(named).decode("latin-1")


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
