"""The Quart-Trio app: thin HTTP routes in front of the gateway.

Agents' paths are routed before Quart's own routing, by the raw path: Quart decodes
paths, and an encoded slash in a name would become a separator.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

from quart import Response as QuartResponse
from quart import request as current_request
from quart.wrappers import Request as QuartRequest
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException

from culet.kernel.core.limits import Limits
from culet.kernel.errors import Refused, UsageError
from culet.kernel.http import Request, Response
from culet.kernel.kernel import Kernel
from culet.kernel.visits import Admit

from .gateway import Authenticate, Cors, Gateway, Origins

KEY: Final = "culet"  # of the gateway in `app.extensions`
Opener = Callable[[], AbstractAsyncContextManager[Kernel]]


def create_app(
    kernel: Kernel | Opener,
    *,
    prefix: str = "agents",
    origins: Origins = None,
    cors: Cors = False,
    props: Any = None,
    limits: Limits | None = None,
    authenticate: Authenticate | None = None,
    admit: Admit | None = None,
) -> QuartTrio:
    """Return an app that serves a kernel's agents over HTTP; `serve` adds WebSockets.

    `origins`: None: same origin only; "*": any; a tuple: exactly those. `authenticate`
    returns an identity, None (anonymous) or a Response that refuses; `admit` is the gate
    of roots. More routes may be added to the app.
    """
    app = QuartTrio("culet.web", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = None  # bounded where the body is read
    install(
        app,
        kernel,
        prefix=prefix,
        origins=origins,
        cors=cors,
        props=props,
        limits=limits,
        authenticate=authenticate,
        admit=admit,
    )
    return app


def install(
    app: QuartTrio,
    kernel: Kernel | Opener,
    *,
    prefix: str = "agents",
    origins: Origins = None,
    cors: Cors = False,
    props: Any = None,
    limits: Limits | None = None,
    authenticate: Authenticate | None = None,
    admit: Admit | None = None,
) -> None:
    """Serve agents in an app of one's own. See `create_app` for what is given.

    An opener (a function that returns `open_kernel(…)`) is entered when the app starts
    to serve and left when it stops.
    """
    gateway = Gateway(
        kernel if isinstance(kernel, Kernel) else None,
        prefix=prefix,
        origins=origins,
        cors=cors,
        props=props,
        limits=limits or (kernel.limits if isinstance(kernel, Kernel) else None),
        authenticate=authenticate,
        admit=admit,
    )
    if KEY in app.extensions:
        raise UsageError("agents are installed in this app already")
    app.extensions[KEY] = gateway
    if not isinstance(kernel, Kernel):
        _open_while_serving(app, gateway, kernel)

    async def agents() -> QuartResponse | None:
        raw = current_request.scope.get("raw_path") or current_request.path.encode()
        path = raw.decode("latin-1")
        if not gateway.owns(path):
            return None
        asked = _kernel_request(current_request, path, gateway.limits)
        return _quart_response(await gateway.answer(asked), head=asked.method == "HEAD")

    app.before_request(agents)
    _add_probes(app, gateway)


def gateway_of(app: QuartTrio) -> Gateway:
    """Return the gateway of an app; raises `UsageError` for one without agents."""
    gateway = app.extensions.get(KEY)
    if not isinstance(gateway, Gateway):
        raise UsageError("the app serves no agents: make it with create_app or install")
    return gateway


def _open_while_serving(app: QuartTrio, gateway: Gateway, opener: Opener) -> None:
    @app.while_serving
    async def lifespan() -> AsyncGenerator[None, None]:
        async with opener() as kernel:
            gateway.serve(kernel)
            try:
                yield
            finally:
                gateway.serve(None)


def _add_probes(app: QuartTrio, gateway: Gateway) -> None:
    async def healthz() -> QuartResponse:
        return QuartResponse("ok\n", content_type="text/plain")

    async def readyz() -> QuartResponse:
        ready = gateway.ready
        return QuartResponse(
            "ready\n" if ready else "not ready\n",
            200 if ready else 503,
            content_type="text/plain",
        )

    async def metrics() -> QuartResponse:
        lines = [
            f"culet_{name} {value}\n"
            for name, value in sorted(gateway.kernel.metrics().items())
        ]
        return QuartResponse("".join(lines), content_type="text/plain; version=0.0.4")

    for view in (healthz, readyz, metrics):
        app.add_url_rule(f"/{view.__name__}", f"culet.{view.__name__}", view)


def _kernel_request(request: QuartRequest, raw_path: str, limits: Limits) -> Request:
    query = request.query_string.decode("latin-1")
    length = request.content_length

    async def body() -> AsyncIterator[bytes]:
        too_large = Refused("the request body is too large", status=413)
        if length is not None and length > limits.body_bytes:
            raise too_large
        size = 0
        try:
            async for part in request.body:
                size += len(part)
                if size > limits.body_bytes:
                    raise too_large
                yield part
        except HTTPException as error:  # the app has a bound of its own
            raise Refused(str(error), status=error.code or 400) from error

    return Request(
        request.method,
        f"{raw_path}?{query}" if query else raw_path,
        headers={name.lower(): value for name, value in request.headers.items()},
        body=body,
    )


def _quart_response(response: Response, *, head: bool) -> QuartResponse:
    body = response.body
    if not isinstance(body, bytes):
        answer = QuartResponse(b"" if head else body, response.status)
        answer.timeout = None  # a stream lasts as long as its agent wants
    else:
        answer = QuartResponse(b"" if head else body, response.status)
        answer.headers["content-length"] = str(len(body))
    answer.headers.pop("content-type", None)
    for name, value in response.headers.items():
        answer.headers[name] = value
    return answer
