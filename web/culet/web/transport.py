"""Our own WebSocket transport: one trio stream, one session, few system calls.

`websockets`' sans-io protocol does the handshake, incoming frames and control frames;
outgoing messages are framed once per blob and shared (`framing`). What an agent pushes
only makes the connection dirty: the `Wire` has it written. A client that does not take it
all is left to its own sender task, which belongs to the connection and can be cancelled.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, final

import trio
from websockets.frames import Frame as WireFrame
from websockets.frames import Opcode
from websockets.protocol import OPEN
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol

from culet.kernel.core.limits import Limits
from culet.kernel.kernel import Kernel
from culet.kernel.sockets import Connection

from .framing import framed
from .gateway import opened
from .outbox import LAST_S, Close
from .session import Session

if TYPE_CHECKING:
    from .wire import Wire

log = logging.getLogger("culet.web")
RECEIVE_BYTES: Final = 64 << 10
_DATA: Final = frozenset((Opcode.TEXT, Opcode.BINARY, Opcode.CONT))
_QUIET: Final = logging.getLogger("culet.web.websocket")
_QUIET.setLevel(logging.WARNING)  # it would log each opening and closing


class _Protocol(ServerProtocol):
    """Takes the first subprotocol; a function given for it would make a cycle."""

    def select_subprotocol(
        self, subprotocols: Sequence[Subprotocol]
    ) -> Subprotocol | None:
        return subprotocols[0] if subprotocols else None


def new_protocol(limits: Limits) -> ServerProtocol:
    """Return the sans-io half of one connection: no compression, bounded messages."""
    return _Protocol(max_size=limits.message_bytes, logger=_QUIET)


def _write(fd: int, data: bytes | memoryview) -> int:
    """Write what the socket takes now; 0 when it takes nothing."""
    try:
        return os.write(fd, data)
    except BlockingIOError:
        return 0


def _write_nothing(fd: int, data: bytes | memoryview) -> int:
    """Where sockets are no file descriptors every write is the sender task's."""
    return 0


_write_now = _write if os.name == "posix" else _write_nothing


def _read(fd: int) -> bytes | None:
    """Read what has arrived, b"" at the end; None when nothing has."""
    try:
        return os.read(fd, RECEIVE_BYTES)
    except BlockingIOError:
        return None


@final
class Link:
    """One open WebSocket. Made after the handshake; `run` is its life."""

    __slots__ = (
        "_blocked",
        "_close_by",
        "_control",
        "_drained",
        "_full",
        "_heard_at",
        "_message",
        "_moved_at",
        "_pinged_at",
        "_protocol",
        "_rest",
        "_scope",
        "_socket",
        "_stream",
        "_text",
        "_wake",
        "_why",
        "bye",
        "session",
        "wire",
    )

    def __init__(
        self, wire: Wire, stream: trio.SocketStream, protocol: ServerProtocol
    ) -> None:
        self.wire = wire
        self.session: Session | None = None
        self._stream, self._socket, self._protocol = stream, stream.socket, protocol
        self._control: list[bytes] = []
        self._message = bytearray()  # as far as it has come: many parts may be empty
        self._full = False  # nothing is read: the agent has enough to do
        self._text = True
        self._rest: memoryview | None = None
        self._blocked = False
        self._wake, self._drained = trio.Event(), trio.Event()
        self._scope = trio.CancelScope()
        self._why = ""
        self.bye: Close | None = None  # said before anything else
        self._close_by: float | None = None
        now = trio.current_time()
        self._heard_at = self._moved_at = self._pinged_at = now

    # ---- what a session calls: only notes are taken

    def ready(self) -> None:
        """There is something to take."""
        self.wire.ready(self)

    def cut(self, why: str) -> None:
        """Drop this client without a goodbye: it cannot be told."""
        if not self._why:
            self._why = why
            self.wire.cuts += 1
            self._scope.cancel(reason=why)

    # ---- life

    async def run(
        self, kernel: Kernel, session: Session, connection: Connection
    ) -> None:
        """Be the connection until it ends; tells the kernel of the end."""
        self.session = session
        self.wire.links[self] = None
        if self.bye is not None:
            self.end(*self.bye)
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._send)
                    nursery.start_soon(self._open, kernel, connection)
                    await self._receive(connection)
                    await kernel.paced()  # a crowd may leave at once
                    nursery.cancel_scope.cancel(reason="the client is gone")
        finally:
            del self.wire.links[self]
            code, reason, clean = self._end()
            session.lost(code, reason, was_clean=clean)
            # cycles, which nobody has to look for now
            self.session = None
            self._protocol.parser.close()

    def _end(self) -> tuple[int, str, bool]:
        """Return the close code, reason and whether both sides have said so."""
        protocol = self._protocol
        said = protocol.close_rcvd or protocol.close_sent
        if said is None or protocol.close_rcvd is None:
            code = said.code if said is not None else 1006
            return code, self._why or (said.reason if said else ""), False
        first = protocol.close_rcvd
        if not protocol.close_rcvd_then_sent and protocol.close_sent is not None:
            first = protocol.close_sent
        return first.code, first.reason, True

    async def _open(self, kernel: Kernel, connection: Connection) -> None:
        """Run the agent's connect hooks; a failing one ends the socket."""
        await kernel.paced()
        failure = await opened(kernel, connection)
        if failure is not None:
            self.end(*failure)

    def end(self, code: int, reason: str) -> None:
        """Close after what may leave by now."""
        if self.session is not None:
            self.session.close(code, reason, 0)
        if self._close_by is None:
            self._close_by = trio.current_time() + self.wire.limits.handshake_s

    # ---- in

    async def _receive(self, connection: Connection) -> None:
        """Take what arrives until the stream ends or both sides have closed."""
        protocol = self._protocol
        while True:
            self._take(connection)
            if protocol.eof_sent:
                await self._say_last()
                return
            await self._room(connection)
            try:
                data = await self._arrived()
            except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
                return
            self._heard_at = trio.current_time()
            if not data:
                return
            protocol.receive_data(data)

    async def _arrived(self) -> bytes:
        """Return what came, b"" at the end: waits first, since mostly nothing has yet."""
        socket = self._socket
        if os.name != "posix":
            return await self._stream.receive_some(RECEIVE_BYTES)
        while True:
            await trio.lowlevel.wait_readable(socket)
            data = _read(socket.fileno())
            if data is not None:
                return data

    async def _room(self, connection: Connection) -> None:
        """Wait until the agent takes more; a client that is not read is not silent."""
        self._full = True
        await connection.room()
        self._full = False
        self._heard_at = max(self._heard_at, trio.current_time())

    def _take(self, connection: Connection) -> None:
        """Hand over the messages that are complete; keep control frames to send."""
        protocol = self._protocol
        for event in protocol.events_received():
            assert isinstance(event, WireFrame)
            if self._close_by is None and event.opcode in _DATA:
                self._data(connection, event)
        parts = [part for part in protocol.data_to_send() if part]
        if parts:
            if self._blocked:
                # a client that pings and does not read gets the latest answer only
                self._control = parts[-1:]
            else:
                self._control += parts
            self.ready()

    def _data(self, connection: Connection, event: WireFrame) -> None:
        data = bytes(event.data)
        if event.opcode is not Opcode.CONT:
            self._text = event.opcode is Opcode.TEXT
            if event.fin:
                self._hand(connection, data)
                return
        self._message += data
        if event.fin:
            message, self._message = bytes(self._message), bytearray()
            self._hand(connection, message)

    def _hand(self, connection: Connection, data: bytes) -> None:
        if not self._text:
            connection.received(data)
            return
        try:
            message = str(data, "utf-8")
        except UnicodeDecodeError:
            self._protocol.fail(1007, "text must be UTF-8")
            return
        connection.received(message)

    # ---- out

    def flush_now(self) -> bool:
        """Write where the pass ends; False when a task has to look at this one."""
        if self._blocked:
            return True
        if self._rest is not None:
            return False  # somebody may wait for the end of it
        self.flush()
        return not self._blocked and not self._why

    def flush(self, *, pull: bool = False) -> None:
        """Write once, without blocking, what may leave; `pull` a page of replay for it."""
        if self._blocked or self._socket.fileno() < 0:
            return
        try:
            rest = self._rest or memoryview(self._gather(pull=pull))
            if not rest:
                self._go_on()
                return
            self._wrote(rest, _write_now(self._socket.fileno(), rest))
        except OSError:
            self.cut("the connection broke")
        except Exception:
            log.exception("cannot send")
            self.cut("cannot send")

    def _wrote(self, rest: memoryview, sent: int) -> None:
        began = self._rest is None
        if sent < len(rest):
            self._rest = rest[sent:]
            self._blocked = True
            self._wake.set()
            if began or sent:
                self._moved_at = trio.current_time()
            return
        if not began:
            self._rest = None
            self._moved_at = trio.current_time()
            self._drained.set()
        if self.session is not None:
            self.session.landed()
        self._go_on()

    def _gather(self, *, pull: bool) -> bytes:
        """Return what to write now: control frames, frames, the close."""
        parts, self._control = self._control, []
        session = self.session
        if session is not None and self._protocol.state is OPEN:
            blobs = session.take(pull=pull)
            closing = session.closing
            if len(blobs) == 1 and not parts and closing is None:
                return framed(blobs[0])
            parts += map(framed, blobs)
            if closing is not None:
                self._protocol.send_close(closing.code, closing.reason)
                parts += self._protocol.data_to_send()
                self._close_by = trio.current_time() + self.wire.limits.handshake_s
        return b"".join(parts)

    def _go_on(self) -> None:
        """Ask for another turn when there is more."""
        session = self.session if self._protocol.state is OPEN else None
        if self._control or (session is not None and session.waiting):
            self.ready()
        elif session is not None and session.hungry:
            self.wire.behind(self)

    async def _send(self) -> None:
        """Wait until a socket that was full takes more; the `Wire` writes it."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            try:
                await self._writable()
            except (OSError, trio.ClosedResourceError):
                self.cut("the connection broke")
                return
            self._blocked = False
            self.ready()

    async def _writable(self) -> None:
        if os.name == "posix":
            await trio.lowlevel.wait_writable(self._socket)
        elif self._rest:
            sent = await self._socket.send(self._rest)
            self._rest = self._rest[sent:]
            self._moved_at = trio.current_time()

    async def _say_last(self) -> None:
        """Send the last control frame and wait for the end of what the client sends.

        Closing a socket that has unread bytes would reset it, and the client would
        never read why.
        """
        self.flush()
        with trio.move_on_after(LAST_S):
            while self._rest:
                self._drained = trio.Event()
                await self._drained.wait()
                self.flush()
            try:
                await self._stream.send_eof()
                while await self._stream.receive_some(RECEIVE_BYTES):
                    pass
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass

    # ---- time

    def look(self, now: float) -> None:
        """Do what time asks for."""
        why = self._overdue(now)
        if why:
            self.cut(why)
            return
        known = max(self._heard_at, self._moved_at, self._pinged_at)
        quiet = now - known > self.wire.limits.ping_s
        if (
            quiet
            and not self._blocked
            and not self._full
            and self._protocol.state is OPEN
        ):
            self._pinged_at = now
            self._protocol.send_ping(b"")
            self._control += self._protocol.data_to_send()
            self.ready()

    def _overdue(self, now: float) -> str:
        """Return why this client is cut now; empty when it is not."""
        limits = self.wire.limits
        heard = max(self._heard_at, self._moved_at)
        if self._close_by is not None and now > self._close_by:
            return "did not close"
        if (
            self._blocked
            and now - self._moved_at > limits.slow_client_s
            and self.session is not None
            and self.session.live
        ):
            return "slow"
        if self._full:
            return ""  # it is not read: what it says is not heard
        if now - heard > limits.idle_s:
            return "idle"
        if self._pinged_at > heard and now - self._pinged_at > limits.ping_s:
            return "answers no ping"
        return ""
