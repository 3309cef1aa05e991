"""The gateway's decisions, the same for HTTP and WebSockets, on every transport.

Order: the raw target is parsed once, by one codec → Origin → `authenticate` → the
kernel's gates (`admit`, then hop by hop). What ends before the kernel has woken nothing.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final, final
from urllib.parse import urlsplit

import trio

from culet.kernel.core.limits import Limits
from culet.kernel.core.path import ParsedPath, parse_agent_path
from culet.kernel.errors import CuletError, NotFound, UsageError, UserError
from culet.kernel.http import Request, Response, closed
from culet.kernel.kernel import Kernel
from culet.kernel.node import is_stop
from culet.kernel.sendable import close_reason
from culet.kernel.sockets import Connection
from culet.kernel.visits import Admit, Visit, error_response, visit, visit_below

from .hosts import Hosts, is_named, is_rebound
from .outbox import Close

Authenticate = Callable[[Request], Awaitable[Any]]
Enter = Callable[[Request], Awaitable[Visit | Response]]
Origins = str | tuple[str, ...] | None
log = logging.getLogger("culet.web")
Cors = bool | Mapping[str, str]
_CORS: Final = {
    "access-control-allow-origin": "*",
    "access-control-allow-methods": "GET, POST, HEAD, OPTIONS",
    "access-control-allow-headers": "*",
    "access-control-max-age": "86400",
    # the turn of an answer over plain HTTP is in a header: pages take it up again by that
    "access-control-expose-headers": "*",
}


class Drained(Exception):
    """The server stops: an answer that has no end of its own is cut."""


@final
class Gateway:
    """What one app knows of its kernel and of who may come in.

    `origins`: None: pages of the same host only; "*": any; a tuple: exactly those. A
    request without Origin comes from no browser and passes, unless its `Sec-Fetch-Site`
    says that another site's page fetches. `cors` adds headers (True: the usual ones) to
    HTTP answers and lets foreign pages make HTTP requests. `hosts`: "*": any; a tuple:
    those names, with a port or without; None: any, but see `hosts.is_rebound`.
    """

    def __init__(
        self,
        kernel: Kernel | None,
        *,
        prefix: str = "agents",
        origins: Origins = None,
        hosts: Hosts = None,
        cors: Cors = False,
        props: Any = None,
        limits: Limits | None = None,
        authenticate: Authenticate | None = None,
        admit: Admit | None = None,
    ) -> None:
        if isinstance(origins, str) and origins != "*":
            raise UsageError(f'origins is None, "*" or a tuple, not {origins!r}')
        if isinstance(hosts, str) and hosts != "*":
            raise UsageError(f'hosts is None, "*" or a tuple, not {hosts!r}')
        parse_agent_path("/", (), prefix)  # refuses a prefix that cannot be one
        self._kernel = kernel
        self._watchers: list[Callable[[Kernel | None], None]] = []
        self.prefix = prefix
        self.origins, self.hosts = origins, hosts
        self._told: set[str] = set()  # hosts that were refused
        self.cors = _CORS if cors is True else dict(cors or {})
        self.props = props
        self.limits = limits or Limits()
        self.authenticate, self.admit = authenticate, admit
        self._draining = False
        self._endless: set[trio.CancelScope] = set()
        self._lead = "/" + "/".join(part for part in prefix.split("/") if part) + "/"

    @property
    def kernel(self) -> Kernel:
        """The kernel; raises `UsageError` before it is open."""
        if self._kernel is None:
            raise UsageError("the kernel is not open yet")
        return self._kernel

    def serves(self, kernel: Kernel) -> bool:
        """Whether that is its kernel."""
        return self._kernel is kernel

    def serve(self, kernel: Kernel | None) -> None:
        """Serve this kernel from now on, or none."""
        self._kernel = kernel
        self._draining = False
        for fn in self._watchers:
            fn(kernel)

    def drain(self) -> None:
        """Take nothing new any more; cut the answers that would go on for ever."""
        self._draining = True
        for scope in list(self._endless):
            scope.cancel(reason="the server stops")

    def undrain(self) -> None:
        """A server begins to serve it: requests are taken again."""
        self._draining = False

    def hasten(self) -> None:
        """Give code that is being stopped no more time."""
        if self._kernel is not None:
            self._kernel.hasten()

    async def until_drained(self, body: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
        """Yield what an endless answer says; raise `Drained` when the server stops.

        So its client sees that it was cut, and does not take a part for the whole.
        """
        try:
            while True:
                part = None
                with trio.CancelScope() as scope:
                    if self._draining:
                        scope.cancel(reason="the server stops")
                    self._endless.add(scope)
                    try:
                        part = await anext(body)
                    except StopAsyncIteration:
                        return
                    finally:
                        self._endless.discard(scope)
                if part is None:
                    raise Drained
                yield part
        finally:
            await closed(body)

    def watch(self, fn: Callable[[Kernel | None], None]) -> None:
        """Call `fn` with the kernel that is served, or None, now and at each change."""
        self._watchers.append(fn)
        fn(self._kernel)

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        closing = self._kernel is None or self._kernel.closing
        return not closing and not self._draining

    @property
    def guarded(self) -> bool:
        """Whether anything asks who comes in."""
        return self.authenticate is not None or self.admit is not None

    # ---- the steps

    def owns(self, raw_path: str) -> bool:
        """Whether a raw path is under the agents' prefix, and long enough to name one.

        What is shorter is the app's, as is all that lies elsewhere.
        """
        if not raw_path.startswith(self._lead):
            return False
        return len([p for p in raw_path[len(self._lead) :].split("/") if p]) >= 2

    def parse(self, raw_path: str) -> ParsedPath:
        """Read a path under the prefix. Raises `UsageError` or `NotFound`."""
        path = parse_agent_path(raw_path, self.kernel.classes.known, self.prefix)
        if path is None:
            raise NotFound("no agent is named")
        return path

    def allows(self, headers: Mapping[str, str]) -> bool:
        """Whether the Origin of a request is one of ours."""
        origin = headers.get("origin")
        if self.origins == "*":
            return True
        if origin is None:
            return not _is_fetched_by_others(headers)
        if self.origins is None:
            return _same_host(origin, headers.get("host", ""))
        return origin in self.origins

    def knows_host(self, host: str, server: str) -> bool:
        """Whether a request's `Host` is a name of ours. `server`: the address it reached."""
        if self.hosts == "*":
            return True
        if isinstance(self.hosts, tuple):
            known = is_named(host, self.hosts)
        else:
            known = self.guarded or not is_rebound(host, server)
        if not known and not self._told:
            self._told.add(host)
            log.warning(
                "refused what was sent to the host %r: name it in `hosts` if it is yours",
                host[:100],
            )
        return known

    def refuse_upgrade(self, request: Request, server: str) -> Response | None:
        """Return the HTTP answer to a handshake that must not become a WebSocket."""
        if not self.knows_host(request.headers.get("host", ""), server):
            return Response("unknown host", 403)
        if not self.allows(request.headers):
            return Response("foreign origin", 403)
        if request.query.get("__agents_transport", "cf-websocket") != "cf-websocket":
            return Response("this transport is not supported", 400)
        return None

    async def enter(self, request: Request) -> Visit | Response:
        """Let a request in, up to the agent that it names; a Response says why not."""
        try:
            path = self.parse(request.raw_path)
            kernel = self.kernel
        except CuletError as error:
            return error_response(error)
        since = kernel.guests.number  # who is revoked from here on does not get in
        identified = await self.identify(request)
        if isinstance(identified, Response):
            return identified
        return await visit(
            kernel, path, identified, admit=self.admit, props=self.props, since=since
        )

    async def identify(self, request: Request) -> Request | Response:
        """Return the request with who `authenticate` says it is, or how it refuses."""
        if self.authenticate is None:
            return request
        try:
            identity = await self.authenticate(request)
        except CuletError as error:
            return error_response(error)
        except BaseException as error:
            if is_stop(error):
                raise
            error_id = self.kernel.report(
                "authenticate", None, error, name=request.raw_path
            )
            return Response(f"refused (error {error_id})", 500)
        if isinstance(identity, Response):
            return identity
        return request.replace(identity=identity)

    async def enter_below(
        self, parent: Any, tail: str | None, request: Request
    ) -> Visit | Response:
        """Let a request in below an agent that a route of one's own has chosen.

        `tail` is the raw path from the first hop on, None when there was none.
        """
        if tail is None:
            return Response("no sub-agent is named in the path", 400)
        return await visit_below(parent, tail, request)

    async def answer(self, request: Request, enter: Enter | None = None) -> Response:
        """Answer one HTTP request for the agent that `enter` reaches with it."""
        if self.cors and request.method == "OPTIONS":
            return Response(b"", 200, self.cors)
        if not self.knows_host(request.headers.get("host", ""), ""):
            response = Response("unknown host", 403)
        elif self.cors or self.allows(request.headers):
            response = await answered(request, enter or self.enter)
        else:
            response = Response("foreign origin", 403)
        for name, value in self.cors.items():
            response.headers.setdefault(name, value)
        return response


async def answered(request: Request, enter: Enter) -> Response:
    """Return what the agent that `enter` reaches answers, or why it was not reached."""
    visited = await enter(request)
    if isinstance(visited, Response):
        return visited
    try:
        return await visited.handle()
    except CuletError as error:
        return error_response(error)


async def opened(kernel: Kernel, connection: Connection) -> Close | None:
    """Run an agent's connect hooks; return how to close when they fail."""
    try:
        await connection.opened()
    except Exception as error:
        # A misuse in an agent's hook is its author's fault, not the client's.
        if isinstance(error, CuletError) and not isinstance(error, UsageError):
            status = error_response(error).status
            shown = isinstance(error, UserError)
            said = close_reason(str(error)) if shown else f"refused ({status})"
            return Close(close_code(status), said)
        error_id = kernel.report("connect", None, error, name=connection.place)
        return Close(1011, f"error {error_id}")
    return None


def close_code(status: int) -> int:
    """Return the WebSocket close code that tells a client of a refusal.

    4000 + status for 4xx, which stops the clients' reconnecting; 1011 otherwise.
    """
    return 4000 + status if 400 <= status < 500 else 1011


def _is_fetched_by_others(headers: Mapping[str, str]) -> bool:
    """Whether a browser says that another site's page asks, and is not left for ours.

    It sends no Origin with an image or a script; a page that is followed by a link may
    come from anywhere.
    """
    site = headers.get("sec-fetch-site", "none")
    return (
        site not in {"same-origin", "none"}
        and headers.get("sec-fetch-mode") != "navigate"
    )


def _same_host(origin: str, host: str) -> bool:
    """Whether an Origin names the host (and port) that the request was sent to."""
    try:
        split = urlsplit(origin)
    except ValueError:
        return False
    default = {"http": ":80", "https": ":443"}.get(split.scheme)
    if default is None or not host:
        return False
    theirs, ours = split.netloc.lower(), host.lower()
    return theirs.removesuffix(default) == ours.removesuffix(default)
