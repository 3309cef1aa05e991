"""How an app under an ASGI server refuses: a loop, a request, a handshake, a socket.

What is refused here has reached no route of the app and is no agent's connection.
"""

from __future__ import annotations

from typing import Final

import trio

from culet.kernel.http import Response

from .outbox import LAST_S, Close
from .scopes import Handshake, Receive, Scope, Send

_VERSIONS: Final = frozenset(("1.0", "1.1", "2", "3"))  # hypercorn takes any number
_LAST: Final = [(b"content-length", b"0"), (b"connection", b"close")]
NEEDS_TRIO: Final = (
    "this app runs on trio: start it with `hypercorn --worker-class trio`"
)


async def refuse_loop(scope: Scope, receive: Receive, send: Send) -> None:
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


def _two_lengths(scope: Scope) -> bool:
    """Whether a request says in two ways where it ends: who reads it otherwise than we
    do, a proxy before us, sees another request behind it.
    """
    names = {name.lower() for name, _value in scope["headers"]}
    return b"content-length" in names and b"transfer-encoding" in names


def refused_status(scope: Scope) -> int | None:
    """Return the status of a request that must not reach the app, and ends its connection.

    A CONNECT may change the protocol, so hypercorn stops reading and the connection would
    stay for ever, whatever is answered. A TRACE would show a page its own cookies.
    """
    if scope["method"] in {"CONNECT", "TRACE"}:
        return 501
    if scope["http_version"] not in _VERSIONS:
        return 505
    return 400 if _two_lengths(scope) else None


async def refuse_request(send: Send, status: int) -> None:
    """Answer a request without a body, and end its connection."""
    start = {"type": "http.response.start", "status": status}
    await send({**start, "headers": _LAST})
    await send({"type": "http.response.body", "body": b""})


async def refuse_handshake(shake: Handshake, refusal: Response) -> None:
    """Answer a handshake that must not become a WebSocket."""
    scope, _receive, send = shake
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


async def close_socket(send: Send, close: Close) -> None:
    """Send the close of an accepted WebSocket."""
    await send({"type": "websocket.close", "code": close.code, "reason": close.reason})


async def refuse_socket(receive: Receive, send: Send, close: Close) -> None:
    """Close an accepted socket, and take what comes until the client has closed too.

    A socket that is dropped with unread bytes is reset: the code would be lost.
    """
    with trio.move_on_after(LAST_S):
        await close_socket(send, close)
        while (await receive())["type"] != "websocket.disconnect":
            pass
