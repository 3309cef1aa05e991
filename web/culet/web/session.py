"""One client's conversation with one agent: what arrives goes in, what to send comes out.

A session is the `Peer` that the kernel pushes to, and knows no transport. Its transport
gives it two functions that only take note: `ready` (there is something to `take`) and
`cut` (drop this client; it comes back with its cursor). Neither may block, raise or call
back: an agent's step is running when they are called. Replay is pulled: one page each
time something is taken while the outbox is less than a quarter full.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, final

from culet.kernel.core.limits import Limits
from culet.kernel.ports import Blob, Gate

from .outbox import Close, Outbox


class Inner(Protocol):
    """The kernel's side of a connection, as far as a session uses it."""

    @property
    def behind(self) -> bool:
        """Whether there is replay to pull."""
        ...

    def pull(self) -> Blob | None:
        """Return the next page of replay."""
        ...

    def received(self, message: str | bytes) -> None:
        """Take one message; never blocks."""
        ...

    def closed(self, code: int, reason: str, *, was_clean: bool) -> None:
        """The client is gone."""
        ...


@final
class Session:
    """The outgoing half with its gate, and the end of both halves."""

    __slots__ = (
        "_cut",
        "_gate",
        "_holding",
        "_most",
        "_outbox",
        "_quarter",
        "_ready",
        "connection",
        "live",
        "over",
    )

    def __init__(
        self,
        gate: Gate,
        limits: Limits,
        ready: Callable[[], None],
        cut: Callable[[str], None],
    ) -> None:
        self._gate, self._ready, self._cut = gate, ready, cut
        self._outbox = Outbox(limits.outbox_bytes)
        self._quarter = limits.outbox_bytes // 4
        self._most = limits.write_bytes
        self._holding = False
        self.connection: Inner | None = None
        # live traffic (not replay) is in the outbox: only this makes a client slow
        self.live = False
        self.over = False

    # ---- what the kernel calls

    def push(self, blob: Blob, stamp: int) -> None:
        """Queue frames; a client whose outbox is full is cut."""
        if self.over:
            return
        outbox = self._outbox
        if not outbox.fits(blob.size):
            self.over = True
            self._cut("outbox full")
            return
        self.live = True
        if outbox.push(blob, stamp, self._gate.durable):
            self._ready()
        elif not self._holding:
            self._hold()

    def close(self, code: int, reason: str, stamp: int) -> None:
        """Queue the end."""
        if self.over:
            return
        if self._outbox.close(Close(code, reason), stamp, self._gate.durable):
            self._ready()
        elif not self._holding:
            self._hold()

    def wake(self) -> None:
        """There may be more to pull."""
        if not self.over:
            self._ready()

    def drop(self, why: str) -> None:
        """End it now, whatever is queued."""
        if not self.over:
            self.over = True
            self._cut(why)

    def _hold(self) -> None:
        if self._outbox.held:
            self._holding = True
            self._gate.hold(self._released)

    def _released(self, durable: int) -> None:
        self._holding = False
        if self.over:
            return
        if durable < 0:
            if self._outbox.void():
                self._ready()
            return
        if self._outbox.release(durable):
            self._ready()
        self._hold()

    # ---- what the transport calls

    def take(self, *, pull: bool = True) -> list[Blob]:
        """Return what is to be sent now; call `landed` when it is sent, and ask again.

        Without `pull` no page of replay is read for it.
        """
        if pull and self.hungry:
            assert self.connection is not None
            page = self.connection.pull()
            if page is not None:
                self._outbox.push(page, 0, self._gate.durable)
        return self._outbox.take(self._most)

    @property
    def waiting(self) -> bool:
        """Whether there is more to take that was pushed or pulled already."""
        return self._outbox.waiting

    @property
    def hungry(self) -> bool:
        """Whether there is replay to pull, and room for it."""
        inner = self.connection
        return inner is not None and inner.behind and self._outbox.size < self._quarter

    @property
    def closing(self) -> Close | None:
        """How to end, once everything before it was taken."""
        return self._outbox.closing

    def landed(self) -> None:
        """What was taken is out of our hands."""
        self._outbox.landed()
        if not self._outbox.size:
            self.live = False

    def lost(self, code: int, reason: str, *, was_clean: bool) -> None:
        """The transport is gone. Tells the kernel once."""
        self.over = True
        inner, self.connection = self.connection, None
        if inner is not None:
            inner.closed(code, reason, was_clean=was_clean)
