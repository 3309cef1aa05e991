"""Routes of one's own to facets: the path below an agent that the route has chosen.

A service that parses its URLs itself holds a stub of the parent, and leaves what is left
of the path to these two. From that parent on everything is as in the gateway: one codec
for gate and open, each ancestor asked before its child is opened, only the last step
made, refused sockets accepted and then closed with a code. Whether the visitor may come
as far as the parent is for the route to decide.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast, overload

from quart import Response as QuartResponse
from quart import current_app
from quart.wrappers import Request as QuartRequest
from quart.wrappers import Websocket

from culet.kernel.calls import outside_target
from culet.kernel.core.path import find_below
from culet.kernel.errors import UsageError
from culet.kernel.http import Request, Response
from culet.kernel.kernel import Kernel

from .app import KEY, kernel_request, quart_response
from .asgi import UNTAKEN, Untaken
from .gateway import Gateway, answered
from .scopes import kernel_request as kernel_handshake
from .scopes import raw_path


@overload
async def route_sub_agent_request(
    request: Request,
    parent_stub: Any,
    from_path: str | None = None,
    *,
    identity: Any = None,
) -> Response: ...


@overload
async def route_sub_agent_request(
    request: QuartRequest,
    parent_stub: Any,
    from_path: str | None = None,
    *,
    identity: Any = None,
) -> QuartResponse: ...


async def route_sub_agent_request(
    request: Request | QuartRequest,
    parent_stub: Any,
    from_path: str | None = None,
    *,
    identity: Any = None,
) -> Response | QuartResponse:
    """Answer a request by the facet that its path names below an agent.

    `parent_stub` is what `kernel.get_agent` or `kernel.get_sub_agent` returned. The path
    is the request's, from its first `/sub/{class}/{name}` on; whatever stands before is
    yours. `from_path` (raw, still percent-encoded) stands for it, and its `?query` for the
    request's. `identity` is what gates and agents see as `request.identity`.

    A request of Quart's gets a response of Quart's, one of the kernel's one of the
    kernel's. Bodies are streamed in both directions. Origin rules, CORS and bounds are
    those that `install` or `create_app` was given. 400 without a `/sub/` in the path.
    """
    kernel = outside_target(parent_stub).kernel
    if isinstance(request, Request):
        path, query = _pointed(
            request.raw_path, request.url.partition("?")[2], from_path
        )
        asked = Request(
            request.method,
            f"{path}?{query}" if query else path,
            headers=request.headers,
            identity=request.identity if identity is None else identity,
            body=request.stream,
        ).instead_of(request)
        gateway = Gateway(kernel)
        return await answered(
            asked, partial(gateway.enter_below, parent_stub, find_below(path))
        )
    scope = cast(Any, request.scope)
    path, query = _pointed(
        raw_path(scope), request.query_string.decode("latin-1"), from_path
    )
    gateway = _gateway(kernel)
    if not gateway.ready:
        return QuartResponse("not ready\n", 503, {"retry-after": "1", **gateway.cors})
    asked = kernel_request(
        request, path, gateway.limits, query=query, identity=identity
    )
    enter = partial(gateway.enter_below, parent_stub, find_below(path))
    head = asked.method == "HEAD"
    return quart_response(await gateway.answer(asked, enter), gateway, head=head)


async def route_sub_agent_socket(
    websocket: Websocket,
    parent_stub: Any,
    from_path: str | None = None,
    *,
    identity: Any = None,
) -> None:
    """Connect a WebSocket of a route of one's own to the facet that its path names.

    Paths and identity as for `route_sub_agent_request`. Call it before the WebSocket is
    accepted, and send and receive nothing yourself; it returns when the socket has
    ended. Raises `UsageError` for one that was accepted already, and in an app without
    agents (`create_app`, `install`).
    """
    kernel = outside_target(parent_stub).kernel
    scope = cast(Any, websocket.scope)
    untaken: Untaken | None = scope.get(UNTAKEN)
    gateway = None if untaken is None else untaken.sockets.gateway_of(kernel)
    if untaken is None or gateway is None:
        raise UsageError(
            "the app does not serve that kernel: give it to create_app or install"
        )
    query = scope.get("query_string", b"").decode("latin-1")
    path, query = _pointed(raw_path(scope), query, from_path)
    request = kernel_handshake(scope, path, query=query, identity=identity)
    enter = partial(gateway.enter_below, parent_stub, find_below(path))
    await untaken.take(gateway, request, enter)


def _pointed(path: str, query: str, from_path: str | None) -> tuple[str, str]:
    """Return raw path and query after `from_path` has had its say."""
    if from_path is None:
        return path, query
    path, mark, own_query = from_path.partition("#")[0].partition("?")
    return path if path.startswith("/") else f"/{path}", own_query if mark else query


def _gateway(kernel: Kernel) -> Gateway:
    """Return the app's gateway of a kernel, or one with the defaults."""
    gateways: list[Gateway] = current_app.extensions.get(KEY, [])
    return next((g for g in gateways if g.serves(kernel)), Gateway(kernel))
