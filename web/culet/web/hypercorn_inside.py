"""All that leans on how hypercorn is made inside, in one place.

Its public face (`hypercorn.trio.serve`, `Config`, ASGI) can neither be given a connection
whose first bytes were read already, nor drop a client, nor leave compression out. What
does that here was read in the sources of `KNOWN` and is used with that version only:
`fits` says whether it is installed. With another one nothing here is touched. Then
`serve` leaves the listener to hypercorn (`plain_serve`), and a WebSocket is what any ASGI
server makes of it; the guide says what is lost.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from importlib import metadata
from typing import Any, Final, cast, final

import trio
from hypercorn.config import Config
from hypercorn.trio import serve as public_serve

try:
    from hypercorn.trio.lifespan import Lifespan
    from hypercorn.trio.tcp_server import TCPServer
    from hypercorn.trio.worker_context import WorkerContext
    from hypercorn.utils import wrap_app
except ImportError:  # they have moved: another version
    _MOVED = True
else:
    _MOVED = False

KNOWN: Final = "0.18"
installed: str = metadata.version("hypercorn")


def fits() -> bool:
    """Whether the hypercorn that is installed is the one that is known."""
    return not _MOVED and installed.split(".")[:2] == KNOWN.split(".")


def misfit() -> str:
    """Return what does not fit, for the log."""
    return f"hypercorn {installed} is not {KNOWN}, which this was made for"


@final
class Inside:
    """An app with its lifespan, and hypercorn's half of a connection. Needs `fits`."""

    def __init__(self, app: Any, config: Config) -> None:
        self._config = config
        self._app = wrap_app(app, config.wsgi_max_body_size, "asgi")
        self._state: Any = {}
        self._lifespan = Lifespan(self._app, config, self._state)
        self._context = WorkerContext(None)

    async def live(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Be the app's lifespan until cancelled."""
        await self._lifespan.handle_lifespan(task_status=task_status)

    async def started(self) -> None:
        """Wait until the app has started; raises what `why_not_started` reads."""
        await self._lifespan.wait_for_startup()

    async def stop(self) -> None:
        """Let what is kept alive end after the request that it serves."""
        await self._context.terminated.set()

    async def stopped(self) -> None:
        """Wait until the app has shut down."""
        await self._lifespan.wait_for_shutdown()

    async def connection(self, stream: trio.abc.HalfCloseableStream) -> None:
        """Serve HTTP on a stream that has a `socket` to ask for the addresses."""
        inner = cast(Any, stream)
        await TCPServer(self._app, self._config, self._context, self._state, inner)


async def plain_serve(
    app: Any,
    config: Config,
    listeners: list[trio.SocketListener],
    until: Callable[[], Awaitable[None]],
) -> None:
    """Serve by hypercorn's public face alone, on sockets that listen, until told to stop.

    Cancelled, it stops as it does when told, which takes `config.graceful_timeout` at most.
    """
    config.bind = [f"fd://{os.dup(listener.socket.fileno())}" for listener in listeners]
    stop = trio.Event()

    async def shielded(*, task_status: trio.TaskStatus[Any]) -> None:
        with trio.CancelScope(shield=True):
            await public_serve(
                app, config, shutdown_trigger=stop.wait, task_status=task_status
            )

    async with trio.open_nursery() as nursery:
        await nursery.start(shielded)
        try:
            await until()
        finally:
            stop.set()


def why_not_started(error: BaseException) -> str | None:
    """Return what the app said when it failed to start, out of hypercorn's error."""
    if isinstance(error, BaseExceptionGroup):
        found = (why_not_started(inner) for inner in error.exceptions)
        return next((why for why in found if why is not None), None)
    if type(error).__name__ == "LifespanFailureError":
        return str(error).partition(". ")[2].strip("'\"") or "its start-up failed"
    return None


async def give_up(send: Callable[[Any], Awaitable[None]]) -> None:
    """Tell hypercorn that the app has failed: a word of its own, no other server's."""
    if fits():
        await send(None)


def decline_compression(send: Any) -> None:
    """Make hypercorn forget that the client offered to compress.

    ASGI has no say in it. Compressing a stream of small frames costs much and saves
    little; and the published clients inflate each frame in a task of its own, which
    makes them lose their place when a stream is resumed.
    """
    handshake: Any = getattr(getattr(send, "__self__", None), "handshake", None)
    if fits() and hasattr(handshake, "extensions"):
        handshake.extensions = None


def tcp_socket(http_version: str | None, send: Any) -> trio.socket.SocketType | None:
    """Find the TCP socket behind hypercorn's `send`; None when it is not there.

    ASGI has no way to drop a client that does not read, and hypercorn's `send` to one
    never ends. Its `send` is a method of the WebSocket, whose own `send` is one of the
    HTTP connection, whose own `send` is one of the server that has the stream.
    """
    if http_version != "1.1" or not fits():
        return None  # other versions of HTTP share the connection
    owner: Any = getattr(send, "__self__", None)
    for _ in range(2):
        owner = getattr(getattr(owner, "send", None), "__self__", None)
    stream = getattr(owner, "stream", None)
    socket = getattr(getattr(stream, "transport_stream", stream), "socket", None)
    return socket if isinstance(socket, trio.socket.SocketType) else None
