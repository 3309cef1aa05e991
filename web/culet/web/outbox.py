"""What waits to be sent to one client: a FIFO behind the output gate. Pure, no I/O.

A frame is stamped with the tree's count of commits when it is pushed, and may leave when
the durable count has reached that stamp. Order is kept over everything: a frame that may
leave still waits behind one that may not. Size counts from the push until the transport
says that the bytes are gone (`landed`), and is bounded.

Laws: what leaves is a prefix of what was pushed, in order; nothing leaves before its
stamp is durable; a close comes after all that was pushed before it and nothing comes
after; an empty outbox takes any one blob, however large.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import Final, NamedTuple, final

from culet.kernel.ports import Blob


class Close(NamedTuple):
    """The end of a conversation: a WebSocket close code and a reason."""

    code: int
    reason: str


RESTART: Final = Close(1012, "the server restarts")
LAST_S: Final = 1.0  # for the last words of a connection


@final
class Outbox:
    """Frames of one client. `size` is in the units of `Blob.size`."""

    __slots__ = ("_closing", "_flying", "_held", "_ready", "_shut", "max_size", "size")

    def __init__(self, max_size: int) -> None:
        self.max_size = max_size
        self.size = 0
        self._closing: Close | None = None
        self._ready: list[Blob] = []
        self._held: deque[tuple[int, Blob | Close]] = deque()
        self._flying = 0
        self._shut = False

    @property
    def held(self) -> bool:
        """Whether something waits for the gate."""
        return bool(self._held)

    @property
    def shut(self) -> bool:
        """Whether a close was pushed: nothing is taken any more."""
        return self._shut

    @property
    def closing(self) -> Close | None:
        """How to end, once all that leaves before was taken."""
        return None if self._ready else self._closing

    @property
    def waiting(self) -> bool:
        """Whether there is more to `take`."""
        return bool(self._ready)

    def fits(self, size: int) -> bool:
        """Whether a blob of that size may be pushed."""
        return self.size + size <= self.max_size or not self.size

    def push(self, blob: Blob, stamp: int, durable: int) -> bool:
        """Append a blob. True when it may leave now, with all before it."""
        if self._shut:
            return False
        self.size += blob.size
        if stamp <= durable and not self._held:
            self._ready.append(blob)
            return True
        self._held.append((stamp, blob))
        return False

    def close(self, close: Close, stamp: int, durable: int) -> bool:
        """Append the end; the first one counts. True when it may leave now."""
        if self._shut:
            return False
        self._shut = True
        if stamp <= durable and not self._held:
            self._closing = close
            return True
        self._held.append((stamp, close))
        return False

    def release(self, durable: int) -> bool:
        """The durable count has risen. True when something may leave now."""
        held = self._held
        released = False
        while held and held[0][0] <= durable:
            _stamp, what = held.popleft()
            released = True
            if isinstance(what, Close):
                self._closing = what
            else:
                self._ready.append(what)
        return released

    def void(self) -> bool:
        """The tree is fenced: what is held never leaves, but for a close.

        True when there was one, which may leave now.
        """
        for _stamp, what in self._held:
            if isinstance(what, Close):
                self._closing = what
            else:
                self.size -= what.size
        self._held.clear()
        return self._closing is not None

    def take(self, most: float = inf) -> list[Blob]:
        """Return what may leave; it is counted until `landed`.

        At most so much, but one blob at least, and a large one alone: what waits here is
        shared with all who are sent the same, and so is what is taken alone.
        """
        ready, size, count = self._ready, 0, 0
        for blob in ready:
            size += blob.size
            if count and (size > most or 4 * blob.size > most):
                size -= blob.size
                break
            count += 1
        self._flying += size
        if count == len(ready):
            self._ready = []
            return ready
        taken = ready[:count]
        del ready[:count]
        return taken

    def landed(self) -> None:
        """All that was taken is out of our hands."""
        self.size -= self._flying
        self._flying = 0
