"""One accepted WebSocket of somebody else's server: a session over ASGI's messages.

There is one `send` a message, and no ping. What hypercorn's trio server makes of a `send`
shapes it (see `asgi`): a task of its own owns the sending, the kernel hears of the end
without waiting for it, and a client that takes nothing loses its TCP socket where we can
find that.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Final, final

import trio

from culet.kernel.core.limits import Limits
from culet.kernel.core.size import is_larger
from culet.kernel.kernel import Kernel
from culet.kernel.sockets import Connection

from .gateway import opened
from .outbox import LAST_S, RESTART, Close
from .refusals import close_socket
from .scopes import Event, Receive, Send
from .session import Session

log = logging.getLogger("culet.web")
_ABNORMAL: Final = 1006
_TOO_BIG: Final = 1009
_CORK: Final[int | None] = getattr(trio.socket, "TCP_CORK", None)  # Linux


@final
class PlainLink:
    """One accepted WebSocket of an ASGI server. `run` is its life."""

    def __init__(
        self,
        limits: Limits,
        receive: Receive,
        send: Send,
        socket: trio.socket.SocketType | None,
    ) -> None:
        self._limits, self._receive, self._send = limits, receive, send
        self._socket = socket
        self._wake = trio.Event()
        self._scope = trio.CancelScope()
        self._why = ""
        self._corked = False
        self._sending_since: float | None = None
        self._said: Close | None = None
        self._close_by: float | None = None
        self._heard: int | None = None  # the code with which the server ended it

    # ---- what a session calls: only notes are taken

    def ready(self) -> None:
        """There is something to take."""
        self._wake.set()

    def cut(self, why: str) -> None:
        """Drop this client without a goodbye: it cannot be told."""
        if not self._why:
            self._why = why
            self._scope.cancel(reason=why)

    # ---- life

    async def run(
        self, kernel: Kernel, session: Session, connection: Connection
    ) -> None:
        """Be the connection until it ends; tells the kernel of the end, at once."""
        async with trio.open_nursery() as sending:
            sending.start_soon(self._sender, session)
            try:
                with self._scope:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(self._open, kernel, session, connection)
                        nursery.start_soon(self._keep, session)
                        await self._receiver(session, connection)
                        nursery.cancel_scope.cancel(reason="the client is gone")
            finally:
                if self._heard is None and not self._why and self._said is None:
                    self._said = RESTART  # cancelled from outside
                session.lost(*self._end(), was_clean=self._clean)
                sending.cancel_scope.cancel(reason="the connection ends")
                await self._goodbye()

    @property
    def _clean(self) -> bool:
        return self._heard not in {None, _ABNORMAL}

    def _end(self) -> tuple[int, str]:
        if self._said is not None and (self._clean or self._heard is None):
            return self._said.code, self._why or self._said.reason
        return self._heard or _ABNORMAL, self._why

    async def _goodbye(self) -> None:
        """Say why, if there is still somebody and nothing is being sent; then drop."""
        if self._heard is not None:
            return
        if not self._why and self._said is RESTART and self._sending_since is None:
            with trio.move_on_after(LAST_S, shield=True):
                await close_socket(self._send, RESTART)
        elif self._socket is not None:
            self._socket.close()

    async def _open(
        self, kernel: Kernel, session: Session, connection: Connection
    ) -> None:
        """Run the agent's connect hooks; a failing one ends the socket."""
        failure = await opened(kernel, connection)
        if failure is not None:
            session.close(failure.code, failure.reason, 0)

    # ---- in

    async def _receiver(self, session: Session, connection: Connection) -> None:
        """Take what arrives until the server says that the socket is gone."""
        limit = self._limits.message_bytes
        while True:
            await connection.room()
            event = await self._receive()
            match event["type"]:
                case "websocket.receive":
                    data = event.get("bytes")
                    message: str | bytes = event["text"] if data is None else data
                    if self._close_by is not None:
                        pass  # it will close; nothing it says counts any more
                    elif is_larger(message, limit):
                        self._close_by = trio.current_time() + self._limits.handshake_s
                        session.close(_TOO_BIG, "the message is too large", 0)
                    else:
                        connection.received(message)
                case "websocket.disconnect":
                    self._heard = event.get("code") or _ABNORMAL
                    return

    # ---- out

    async def _sender(self, session: Session) -> None:
        """Own the sending: one message after the other, then the close."""
        try:
            while True:
                await self._wake.wait()
                self._wake = trio.Event()
                await self._drain(session)
                if session.closing is not None and not session.over:
                    self._said = session.closing
                    self._close_by = trio.current_time() + self._limits.handshake_s
                    await close_socket(self._send, session.closing)
                    return
        except Exception:
            # servers differ in what they raise for a client that is gone
            log.debug("cannot send", exc_info=True)
            self.cut("cannot send")

    async def _drain(self, session: Session) -> None:
        while blobs := session.take():
            self._cork(len(blobs) > 1 or len(blobs[0].texts) > 1)
            for blob in blobs:
                for text in blob.texts:
                    if session.over:
                        return
                    self._sending_since = trio.current_time()
                    await self._send(_message(text))
            self._sending_since = None
            self._cork(False)
            session.landed()
            await trio.lowlevel.checkpoint()

    def _cork(self, on: bool) -> None:
        """Let frames that belong together arrive together, as our own listener does."""
        if _CORK is None or self._socket is None or on is self._corked:
            return
        self._corked = on
        with suppress(OSError):
            self._socket.setsockopt(trio.socket.IPPROTO_TCP, _CORK, int(on))

    # ---- time

    async def _keep(self, session: Session) -> None:
        """Cut the slow, and those that will not close."""
        limits = self._limits
        pace = min(limits.slow_client_s, limits.handshake_s, 4.0) / 4
        while True:
            await trio.sleep(pace)
            now = trio.current_time()
            since = self._sending_since
            if self._close_by is not None and now > self._close_by:
                self.cut("did not close")
            elif (
                since is not None
                and now - since > limits.slow_client_s
                and session.live
            ):
                self.cut("slow")


def _message(text: str | bytes) -> Event:
    if isinstance(text, str):
        return {"type": "websocket.send", "text": text, "bytes": None}
    return {"type": "websocket.send", "bytes": text, "text": None}
