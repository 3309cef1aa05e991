"""An operator's page over a kernel: off unless it was given who may look.

`/inspect` is a page of a few static files, `/inspect/api/…` its JSON. To everybody else,
and where it is off, nothing is there: the request goes on to the app, as if this were not.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Any, Final, final

import msgspec

from culet.kernel.errors import CuletError, Refused
from culet.kernel.http import Request, Response
from culet.kernel.kernel import Kernel
from culet.kernel.node import is_stop
from culet.kernel.visits import error_response
from culet.web.gateway import Gateway

from . import api
from .events import Hub

log = logging.getLogger("culet.web")
Inspect = Callable[[Request], Awaitable[bool | Response]]
PATH: Final = "/inspect"
_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_HEADERS: Final = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_JSON: Final = "application/json"


def read_static() -> dict[str, tuple[bytes, str]]:
    """Return the page's files by name: (content, content type)."""
    found = {}
    for entry in files("culet.web.inspect").joinpath("static").iterdir():
        kind = _TYPES.get(entry.name.rpartition(".")[2])
        if kind is not None:
            found[entry.name] = entry.read_bytes(), kind
    return found


@final
class Inspector:
    """Answers what is asked under `/inspect`; `may` says of each request whether it is.

    `may` gets the request with the identity that `authenticate` gave; a Response of its
    own is sent as it is (to a login, say).
    """

    def __init__(self, gateway: Gateway, may: Inspect) -> None:
        self._gateway, self._may = gateway, may
        self._files = read_static()
        self._hubs: list[Hub] = []  # of the kernel that is served
        gateway.watch(self._served)

    @property
    def readers(self) -> int:
        """How many read the events."""
        return sum(hub.readers for hub in self._hubs)

    def close(self) -> None:
        """Let the readers of events go: the server stops."""
        for hub in self._hubs:
            hub.close()

    def _served(self, kernel: Kernel | None) -> None:
        self.close()
        self._hubs = [] if kernel is None else [Hub(kernel)]

    @staticmethod
    def owns(raw_path: str) -> bool:
        """Whether a raw path is the inspector's, where it is on."""
        return raw_path == PATH or raw_path.startswith(f"{PATH}/")

    async def answer(self, request: Request) -> Response | None:
        """Answer one request; None: there is nothing, or not for them."""
        if not self._gateway.ready:
            return None
        guests = self._gateway.kernel.guests
        since = guests.number
        allowed = await self._admitted(request)
        if not isinstance(allowed, Request):
            return allowed
        try:
            guests.check(allowed.identity, since)
        except Refused:
            return None
        answer = await self._answer(request)
        if answer is not None:
            answer.headers.update(_HEADERS)
            if not isinstance(answer.body, bytes):
                answer.body = guests.guarded(allowed.identity, answer.body)
        return answer

    async def _admitted(self, request: Request) -> Request | Response | None:
        """Return the request of somebody who may look, with their identity."""
        try:
            request_or_no = await self._gateway.identify(request)
            if isinstance(request_or_no, Response):
                return None
            verdict = await self._may(request_or_no)
        except BaseException as error:
            if is_stop(error):
                raise
            self._gateway.kernel.report("inspect", None, error, name="who may look")
            return None
        if isinstance(verdict, Response):
            return verdict
        return request_or_no if verdict is True else None

    async def _answer(self, request: Request) -> Response | None:
        tail = request.raw_path.removeprefix(PATH)
        if tail == "/":
            return Response(b"", 308, {"location": f"..{PATH}"})
        name = tail.removeprefix("/")
        if request.method in {"GET", "HEAD"}:
            if not name.startswith("api/"):
                return self._file(name or "index.html")
            return await self._read(name.removeprefix("api/"), request)
        if request.method == "POST" and name == "api/act":
            return await self._act(request)
        return None

    def _file(self, name: str) -> Response | None:
        if name not in self._files:
            return None
        body, kind = self._files[name]
        return Response(body, 200, {"content-type": kind})

    async def _read(self, name: str, request: Request) -> Response | None:
        if name == "events":
            return self._events()
        read = api.READS.get(name)
        return None if read is None else await self._json(read, request)

    def _events(self) -> Response:
        hub = self._hubs[0]
        if hub.full:
            return Response("too many look on", 503, {"retry-after": "10"})
        headers = {"content-type": "text/event-stream", "x-accel-buffering": "no"}
        return Response(hub.stream(), 200, headers)

    async def _act(self, request: Request) -> Response:
        """Do something, if it is our own page that asks: no form of another site can."""
        headers = request.headers
        site = headers.get("sec-fetch-site", "same-origin")
        if not self._gateway.allows(headers) or site not in {"same-origin", "none"}:
            return Response("foreign origin", 403)
        if headers.get("content-type", "").partition(";")[0].strip().lower() != _JSON:
            return Response("send application/json", 415)
        return await self._json(api.act, request)

    async def _json(
        self, read: Callable[[Kernel, Request], Awaitable[Any]], request: Request
    ) -> Response:
        headers = {"content-type": _JSON}
        try:
            told = await read(self._gateway.kernel, request)
        except msgspec.MsgspecError:
            return Response("the body is not what is wanted", 400)
        except CuletError as error:
            return error_response(error)
        return Response(msgspec.json.encode(told), 200, headers)
