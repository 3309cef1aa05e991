"""Whoever is being served from outside: so that those whose rights have ended are let go.

The gates ask once, when a request or a socket comes; `Kernel.revoke` is for what changes
afterwards. Sockets are found in their trees. HTTP requests are listed here for as long as
they are answered, their streamed bodies included. Who was identified before a revocation
and comes to its agent after it is refused: each walk knows the number of the revocation
that it began after.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, final

import trio

from .core.limits import REVOCATIONS_KEPT
from .errors import Refused
from .http import closed
from .sendable import close_words

if TYPE_CHECKING:
    from .kernel import Kernel
    from .sockets import Connection

Who = Callable[[Any], bool]
REVOKED: Final = "revoked"


def matcher(who: Any) -> Who:
    """Return what says of an identity whether it is meant; nobody anonymous ever is."""
    if callable(who):
        return lambda identity: identity is not None and bool(who(identity))
    return lambda identity: identity is not None and bool(identity == who)


def _meant(who: Who, identity: Any) -> bool:
    """Ask of somebody who came meanwhile; a rule that cannot tell lets nobody in."""
    try:
        return who(identity)
    except Exception:
        return True


@final
class Guest:
    """One HTTP request that is being answered."""

    __slots__ = ("_scope", "identity", "revoked")

    def __init__(self, identity: Any) -> None:
        self.identity, self.revoked = identity, False
        self._scope: trio.CancelScope | None = None

    @contextmanager
    def within(self) -> Iterator[None]:
        """Cut the block short when it is revoked; look at `revoked` afterwards."""
        with trio.CancelScope() as scope:
            self._scope = scope
            if self.revoked:
                scope.cancel(reason=REVOKED)
            try:
                yield
            finally:
                self._scope = None

    def revoke(self) -> None:
        """End what is done for it."""
        self.revoked = True
        if self._scope is not None:
            self._scope.cancel(reason=REVOKED)


@final
class Guests:
    """The requests of one kernel that are being answered, and the latest revocations."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self.number = 0  # revocations so far
        self._recent: deque[Who] = deque(maxlen=REVOCATIONS_KEPT)
        self._here: dict[Guest, None] = {}

    def __len__(self) -> int:
        return len(self._here)

    def revoke(self, who: Any, code: int, reason: str) -> int:
        """Let go of everybody who is meant: one step. See `Kernel.revoke`."""
        close_words(code, reason)  # a code that cannot be sent lets go of nobody
        meant = matcher(who)
        sockets = [
            connection
            for tree in self._kernel.trees.values()
            for connection in tree.sockets.everybody()
            if not connection.revoked and meant(connection.identity)
        ]
        guests = [guest for guest in self._here if meant(guest.identity)]
        self.number += 1  # all were asked: from here on nothing raises
        self._recent.append(meant)
        for guest in guests:
            guest.revoke()
        for connection in sockets:
            connection.revoke(code, reason)
        if sockets:
            self._kernel.start_soon(self._drop, sockets)
        return len(sockets) + len(guests)

    async def _drop(self, sockets: list[Connection]) -> None:
        """Whoever has not closed by then is not asked any more."""
        await trio.sleep(self._kernel.limits.revoke_s)
        for connection in sockets:
            connection.drop(REVOKED)

    def check(self, identity: Any, since: int) -> None:
        """Raise `Refused` for somebody whose rights have ended after that number."""
        missed = self.number - since
        if identity is None or missed == 0:
            return
        recent = list(self._recent)
        if missed > len(recent) or any(_meant(w, identity) for w in recent[-missed:]):
            raise Refused(REVOKED, status=401)

    def enter(self, identity: Any) -> Guest:
        """List a request; `leave` it when it is answered."""
        guest = Guest(identity)
        self._here[guest] = None
        return guest

    def leave(self, guest: Guest) -> None:
        """It is answered."""
        self._here.pop(guest, None)

    def guarded(
        self, identity: Any, body: AsyncIterator[bytes]
    ) -> AsyncGenerator[bytes, None]:
        """Return a streamed body that raises `Refused` when its reader is revoked.

        So its client sees that it was cut, and does not take a part for the whole.
        """
        return self._guarded(identity, body, self.number)

    async def _guarded(
        self, identity: Any, body: AsyncIterator[bytes], since: int
    ) -> AsyncGenerator[bytes, None]:
        guest = self.enter(identity)
        try:
            self.check(identity, since)  # it may be read later than it was made
            while True:
                part = None
                with guest.within():
                    try:
                        part = await anext(body)
                    except StopAsyncIteration:
                        return
                if guest.revoked or part is None:
                    raise Refused(REVOKED, status=401)
                yield part
        finally:
            self.leave(guest)
            await closed(body)
