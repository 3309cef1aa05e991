"""The Quart-Trio app: agents mounted under a prefix, in ours or in a user's own.

Agents' paths are routed before Quart's own routing, by the raw path: Quart decodes
paths, and an encoded slash in a name would become a separator. HTTP goes through Quart
(its `before_request`, `after_request` and error handlers apply), WebSockets do not: see
`asgi`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, cast, final

import trio
from quart import Response as QuartResponse
from quart import request as current_request
from quart.wrappers import Request as QuartRequest
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException

from culet.kernel.core.limits import Limits
from culet.kernel.errors import Refused, StorageBusy, UsageError
from culet.kernel.http import Request, Response
from culet.kernel.kernel import Kernel
from culet.kernel.visits import Admit

from .asgi import INTAKE, AgentSockets
from .gateway import Authenticate, Cors, Gateway, Origins
from .heads import joined
from .hosts import Hosts
from .inspect import PATH, Inspect, Inspector
from .intake import Intake
from .metrics import CONTENT_TYPE, Metrics
from .outbox import RESTART
from .scopes import raw_path, server_of
from .signals import hear_first

KEY: Final = "culet"  # of the gateways in `app.extensions`
INSPECTOR: Final = "culet.inspector"
SOCKETS: Final = "culet.sockets"  # of those that come through the app
Opener = Callable[[], AbstractAsyncContextManager[Kernel]]


def create_app(
    kernel: Kernel | Opener,
    *,
    prefix: str = "agents",
    origins: Origins = None,
    hosts: Hosts = None,
    cors: Cors = False,
    props: Any = None,
    limits: Limits | None = None,
    authenticate: Authenticate | None = None,
    admit: Admit | None = None,
    inspect: Inspect | None = None,
) -> QuartTrio:
    """Return an app that serves a kernel's agents, and `/healthz`, `/readyz`, `/metrics`.

    `origins`: None: same origin only; "*": any; a tuple: exactly those. `hosts`: the
    names that the server answers to, "*": any; None: any, but only local ones where
    nothing asks who comes in and a request comes over loopback. `authenticate`
    returns an identity, None (anonymous) or a Response that refuses; `admit` is the gate
    of roots. `inspect` turns on the page `/inspect` for whom it says True of: see the guide.
    More routes may be added to the app.
    """
    app = QuartTrio("culet.web", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = None  # bounded where the body is read
    install(
        app,
        kernel,
        prefix=prefix,
        origins=origins,
        hosts=hosts,
        cors=cors,
        props=props,
        limits=limits,
        authenticate=authenticate,
        admit=admit,
        inspect=inspect,
        probes=True,
    )
    return app


def install(
    app: QuartTrio,
    kernel: Kernel | Opener,
    *,
    prefix: str = "agents",
    origins: Origins = None,
    hosts: Hosts = None,
    cors: Cors = False,
    props: Any = None,
    limits: Limits | None = None,
    authenticate: Authenticate | None = None,
    admit: Admit | None = None,
    inspect: Inspect | None = None,
    probes: bool = False,
) -> None:
    """Mount agents under a prefix of an app of one's own. See `create_app`.

    An opener (a function that returns `open_kernel(…)`) is entered when the app starts
    to serve and left when it stops. Several may be mounted, under different prefixes:
    `UsageError` when one lies inside another. `probes` adds `/healthz`, `/readyz` and
    `/metrics`, once per app.
    """
    gateway = Gateway(
        kernel if isinstance(kernel, Kernel) else None,
        prefix=prefix,
        origins=origins,
        hosts=hosts,
        cors=cors,
        props=props,
        limits=limits or (kernel.limits if isinstance(kernel, Kernel) else None),
        authenticate=authenticate,
        admit=admit,
    )
    gateways = _gateways(app)
    _add(gateway, gateways)
    if not isinstance(kernel, Kernel):
        _open_while_serving(app, gateway, kernel, own_limits=limits is None)
    _answer_first(app, gateway)
    if len(gateways) == 1:
        _stop_in_order(app, gateways)
    if inspect is not None:
        _add_inspector(app, gateway, inspect)
    if probes:
        _add_probes(app, gateway)


def gateways_of(app: QuartTrio) -> tuple[Gateway, ...]:
    """Return the gateways of an app; raises `UsageError` for one without agents."""
    gateways = app.extensions.get(KEY)
    if not gateways:
        raise UsageError("the app serves no agents: make it with create_app or install")
    return tuple(gateways)


def kernel_of(app: QuartTrio, prefix: str | None = None) -> Kernel:
    """Return the kernel that an app serves, for its own routes.

    `prefix` says which, where several are installed. Raises `UsageError` before it is
    open and after it has closed, and where it is not clear which is meant.
    """
    found = [g for g in gateways_of(app) if prefix in {None, g.prefix}]
    if len(found) != 1:
        prefixes = [gateway.prefix for gateway in gateways_of(app)]
        raise UsageError(f"say which kernel is meant: prefix is one of {prefixes}")
    return found[0].kernel


def _gateways(app: QuartTrio) -> list[Gateway]:
    """Return the list of an app's gateways; the first call puts us before the app."""
    gateways: list[Gateway] | None = app.extensions.get(KEY)
    if gateways is None:
        gateways = app.extensions[KEY] = []
        sockets = AgentSockets(cast(Any, app.asgi_app), gateways)
        app.extensions[SOCKETS] = sockets
        app.asgi_app = sockets  # type: ignore[method-assign, assignment]
    return gateways


def _add(gateway: Gateway, gateways: list[Gateway]) -> None:
    for other in gateways:
        ours, theirs = (f"/{g.prefix.strip('/')}/" for g in (gateway, other))
        if ours.startswith(theirs) or theirs.startswith(ours):
            raise UsageError(f"agents are installed under {other.prefix!r} already")
    gateways.append(gateway)


def _answer_first(app: QuartTrio, gateway: Gateway) -> None:
    """Answer requests on agents' paths before the app looks for a route."""

    async def agents() -> QuartResponse | None:
        path = raw_path(cast(Any, current_request.scope))
        if not gateway.owns(path):
            return None
        if not gateway.ready:
            return QuartResponse(
                "not ready\n", 503, {"retry-after": "1", **gateway.cors}
            )
        asked = kernel_request(current_request, path, gateway.limits)
        answer = await gateway.answer(asked)
        return quart_response(answer, gateway, head=asked.method == "HEAD")

    app.before_request(agents)


def _stop_in_order(app: QuartTrio, gateways: list[Gateway]) -> None:
    """Under somebody else's server, say goodbye before it stops."""

    def drain() -> None:
        for gateway in gateways:
            gateway.drain()
        sockets: AgentSockets = app.extensions[SOCKETS]
        sockets.close_all(*RESTART)
        inspector = app.extensions.get(INSPECTOR)
        if inspector is not None:
            inspector.close()

    @app.while_serving
    async def heeding() -> AsyncGenerator[None, None]:
        for gateway in gateways:
            gateway.undrain()
        scope = trio.CancelScope()

        async def heed() -> None:
            with scope:
                await hear_first(drain)

        app.nursery.start_soon(heed)
        yield
        scope.cancel(reason="the app has stopped")


def _open_while_serving(
    app: QuartTrio, gateway: Gateway, opener: Opener, *, own_limits: bool
) -> None:
    @app.while_serving
    async def lifespan() -> AsyncGenerator[None, None]:
        host = _Host(gateway, opener, own_limits=own_limits)
        await app.nursery.start(host.run)
        yield
        await host.stop()


@final
class _Host:
    """Holds a kernel open, in a task of its own.

    Quart leaves its `while_serving` generators in the order in which it entered them,
    and does not leave them at all when its server is cancelled: a kernel inside of one
    would tear the nurseries of others.
    """

    def __init__(self, gateway: Gateway, opener: Opener, *, own_limits: bool) -> None:
        self._gateway, self._opener, self._own_limits = gateway, opener, own_limits
        self._stop, self._over = trio.Event(), trio.Event()
        self._error: Exception | None = None

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Open the kernel, serve it until told to stop, close it."""
        serving = False
        try:
            async with self._opener() as kernel:
                if self._own_limits:
                    self._gateway.limits = kernel.limits
                self._gateway.serve(kernel)
                serving = True
                task_status.started()
                await self._stop.wait()
        except StorageBusy as error:
            if serving:
                raise
            msg = f"one kernel per folder, one worker per server: {error}"
            raise StorageBusy(msg) from error
        except Exception as error:
            if not self._stop.is_set():
                raise
            self._error = error  # of closing: for whoever waits for that
        finally:
            self._gateway.serve(None)
            self._over.set()

    async def stop(self) -> None:
        """Close the kernel; raises what that raises."""
        self._stop.set()
        await self._over.wait()
        if self._error is not None:
            raise self._error


def _add_inspector(app: QuartTrio, gateway: Gateway, may: Inspect) -> None:
    if app.extensions.get(INSPECTOR) is not None:
        raise UsageError("the app has an inspector already")
    if gateway.owns(f"{PATH}/class/name"):
        raise UsageError(f"agents are installed under {gateway.prefix!r}, as {PATH}")
    inspector = app.extensions[INSPECTOR] = Inspector(gateway, may)

    async def inspected() -> QuartResponse | None:
        scope = cast(Any, current_request.scope)
        path = raw_path(scope)
        host = current_request.headers.get("host", "")
        if not inspector.owns(path) or not gateway.knows_host(host, server_of(scope)):
            return None
        asked = kernel_request(current_request, path, gateway.limits)
        answer = await inspector.answer(asked)
        head = asked.method == "HEAD"
        return None if answer is None else quart_response(answer, None, head=head)

    app.before_request(inspected)


def _add_probes(app: QuartTrio, gateway: Gateway) -> None:
    counts: list[Metrics] = []  # of the kernel that is served

    def served(kernel: Kernel | None) -> None:
        for old in counts:
            old.close()
        counts[:] = [] if kernel is None else [Metrics(kernel)]

    gateway.watch(served)

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
        text = b"".join(found.text() for found in counts)
        return QuartResponse(text, content_type=CONTENT_TYPE)

    for view in (healthz, readyz, metrics):
        app.add_url_rule(f"/{view.__name__}", f"culet.{view.__name__}", view)


def kernel_request(
    request: QuartRequest,
    raw_path: str,
    limits: Limits,
    *,
    query: str | None = None,
    identity: Any = None,
) -> Request:
    """Return a request of Quart's as gates and agents see it.

    Its body is streamed, and not taken from the client faster than it is read; one of GET
    or HEAD means nothing and is left out. `query` (raw) stands for its own.
    """
    if query is None:
        query = request.query_string.decode("latin-1")
    length = request.content_length
    intake = cast("Intake | None", cast(Any, request.scope).get(INTAKE))
    if intake is not None:
        intake.bound(limits)
    incoming = request.body  # an answer that reads on has no request context any more

    async def body() -> AsyncIterator[bytes]:
        too_large = Refused("the request body is too large", status=413)
        if length is not None and length > limits.body_bytes:
            raise too_large
        size = 0
        try:
            async for part in incoming:
                if intake is not None:
                    intake.read(len(part))
                size += len(part)
                if size > limits.body_bytes:
                    raise too_large
                yield part
            if intake is not None and intake.dropped:
                raise Refused(f"the request body {intake.dropped}", status=408)
        except HTTPException as error:  # the app has a bound of its own
            raise Refused(str(error), status=error.code or 400) from error

    return Request(
        request.method,
        f"{raw_path}?{query}" if query else raw_path,
        headers=joined(request.headers.items()),
        identity=identity,
        body=b"" if request.method in {"GET", "HEAD"} else body,
        body_bytes=limits.body_bytes,
    )


def _is_events(response: Response) -> bool:
    kind = response.headers.get("content-type", "")
    return kind.partition(";")[0].strip().lower() == "text/event-stream"


def quart_response(
    response: Response, gateway: Gateway | None, *, head: bool
) -> QuartResponse:
    """Return an answer as Quart sends it; one to HEAD without its body.

    One of events has no end of its own: it is cut when the server of `gateway` stops.
    """
    body = response.body
    if not isinstance(body, bytes):
        if gateway is not None and _is_events(response):
            body = gateway.until_drained(body)
        answer = QuartResponse(b"" if head else body, response.status)
        answer.timeout = None  # a stream lasts as long as its agent wants
    else:
        answer = QuartResponse(b"" if head else body, response.status)
        answer.headers["content-length"] = str(len(body))
    answer.headers.pop("content-type", None)
    for name, value in response.headers.items():
        answer.headers[name] = value
    return answer
