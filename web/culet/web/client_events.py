"""What a client is told: events as typed values, and readers that may be slow.

Events say *that* something changed; what is true now is in the agent's folds (`state`,
`runs`, `messages`), which miss nothing. So a reader that does not keep up is never
waited for: when its queue is full the queue is emptied, and it gets one `Lagged`, at
which it looks at the folds and goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, Final, Literal, final
from weakref import WeakSet

import msgspec
import trio

from culet.kernel.errors import CuletError

Json = dict[str, Any]


class Connected(msgspec.Struct, frozen=True, kw_only=True, tag="connected"):
    """The agent has said who it is. `connections` counts them, this one included."""

    name: str
    agent: str
    connections: int


class Disconnected(msgspec.Struct, frozen=True, kw_only=True, tag="disconnected"):
    """The socket was lost; the next try comes in `retry_in_s` seconds."""

    code: int
    reason: str
    retry_in_s: float


class StateChanged(msgspec.Struct, frozen=True, kw_only=True, tag="state"):
    """The agent's state is now this; `source` says who set it."""

    state: Any
    source: Literal["server", "client"] = "server"


class RunChanged(msgspec.Struct, frozen=True, kw_only=True, tag="run"):
    """One frame of a run that was new. `run` is the run after it, as in `agent.runs`.

    `kind` is that of the frame; `known` for a run as it was when the reader was made.
    `replay`: it happened before this client came, or while it was away.
    """

    run_id: str
    kind: str
    sequence: int
    chunk: Json | None
    run: Json
    replay: bool = False


class RunsCleared(msgspec.Struct, frozen=True, kw_only=True, tag="runs-cleared"):
    """The agent has forgotten these runs."""

    run_ids: list[str]


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True, tag="chunk"):
    """One new chunk of a turn, this client's or another's."""

    request_id: str
    seq: int
    chunk: Json


class ChatEnded(msgspec.Struct, frozen=True, kw_only=True, tag="chat-end"):
    """A turn ended: `completed`, `aborted`, `error` or `skipped`."""

    request_id: str
    outcome: str
    error: str | None = None


class MessagesChanged(msgspec.Struct, frozen=True, kw_only=True, tag="messages"):
    """The transcript was replaced, or one message in it; here are all."""

    messages: list[Json]


class Message(msgspec.Struct, frozen=True, kw_only=True, tag="message"):
    """A message of the app: whatever is no frame of the protocol."""

    data: str | bytes


class Lagged(msgspec.Struct, frozen=True, kw_only=True, tag="lagged"):
    """This reader was too slow and has missed so many events: look at the folds."""

    dropped: int


Event = (
    Connected
    | Disconnected
    | StateChanged
    | RunChanged
    | RunsCleared
    | ChatChunk
    | ChatEnded
    | MessagesChanged
    | Message
    | Lagged
)


@final
class Events:
    """One reader of events, from the moment in which it was made. Iterate over it.

    Ends when the connection is left; raises what ended it for good.
    """

    def __init__(self, hub: Hub, bound: int, known: Iterable[Event]) -> None:
        self._hub = hub
        self._queue: deque[Event] = deque(known)
        self._bound = bound + len(self._queue)
        self._dropped = 0
        self._wake = trio.Event()

    def __aiter__(self) -> Events:
        return self

    async def __anext__(self) -> Event:
        await trio.lowlevel.checkpoint()
        while not self._queue and not self._dropped:
            if self._hub.over:
                if self._hub.error is not None:
                    raise self._hub.error
                raise StopAsyncIteration
            self._wake = trio.Event()
            await self._wake.wait()
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            return Lagged(dropped=dropped)
        return self._queue.popleft()

    def _put(self, event: Event) -> None:
        if len(self._queue) >= self._bound:
            self._dropped += len(self._queue)
            self._queue.clear()
        self._queue.append(event)
        self._wake.set()


@final
class Hub:
    """The readers of one connection. A reader that nobody holds is forgotten."""

    def __init__(self, bound: int) -> None:
        self._bound: Final = bound
        self._readers: WeakSet[Events] = WeakSet()
        self.over = False
        self.error: CuletError | None = None

    @property
    def heard(self) -> bool:
        """Whether anybody reads, so that making an event is of use."""
        return bool(self._readers)

    def reader(self, known: Iterable[Event] = ()) -> Events:
        """Return a new reader, which gets `known` first."""
        reader = Events(self, self._bound, known)
        self._readers.add(reader)
        return reader

    def tell(self, event: Event) -> None:
        """Give an event to every reader."""
        for reader in self._readers:
            reader._put(event)

    def end(self, error: CuletError | None) -> None:
        """No event follows: readers end, or raise the error."""
        self.over, self.error = True, error
        for reader in self._readers:
            reader._wake.set()
