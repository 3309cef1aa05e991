"""The answer to one question: its chunks, as they come, for a reader at its own pace.

A reader is never waited for. What it had no room for is not kept: when it has caught up,
the server is asked to replay the turn, and chunks that it has are passed over.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol, final

import trio

from culet.kernel.core.chunks import text_of
from culet.kernel.errors import CallFailed, CapacityError, CuletError

from .client_line import Outgoing
from .client_transcript import Fold

Json = dict[str, Any]


class AnswerOwner(Protocol):
    """What an answer asks of its chat."""

    def replay(self, answer: Answer) -> bool:
        """Ask for the turn's replay; False while there is no socket."""
        ...

    async def stop(self, request_id: str) -> None:
        """Ask for the end of a turn."""
        ...


@final
class Answer:
    """The answer to one question. Iterate over its chunks; `done()` waits for its end.

    It goes on over reconnects. A reader that is slow is not waited for: what it missed
    is replayed to it when it asks for more.
    """

    def __init__(
        self, fold: Fold, question: Json, frame: str, bound: int, chat: AnswerOwner
    ) -> None:
        self.fold, self.question, self.frame = fold, question, frame
        self._bound, self._owner = bound, chat
        self._queue: deque[Json] = deque()
        self._next = 0  # the number of the first chunk that was not queued
        self._gap = False
        self._asked = False
        self._asked_at = -1
        self._wake = trio.Event()
        self._ended = trio.Event()
        self._error: CuletError | None = None
        self.item: Outgoing | None = None

    @property
    def request_id(self) -> str:
        """The id of the turn."""
        return self.fold.request_id

    @property
    def outcome(self) -> str | None:
        """`completed`, `aborted`, `error` or `skipped`; None while it goes on."""
        return self.fold.outcome

    @property
    def message(self) -> Json | None:
        """The assistant message, as far as it is."""
        return self.fold.message

    @property
    def text(self) -> str:
        """The text so far."""
        return text_of(self.fold.parts)

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> Json:
        await trio.lowlevel.checkpoint()
        while not self._queue:
            if self._error is not None:
                raise self._error
            if self._gap and not self._asked:
                self._ask_replay()
            elif self._ended.is_set() and not self._asked:
                self._check()
                raise StopAsyncIteration
            self._wake = trio.Event()
            await self._wake.wait()
        return self._queue.popleft()

    def _ask_replay(self) -> None:
        if self._asked_at == self._next:
            raise CapacityError("too slow: the server has forgotten what was missed")
        if self._owner.replay(self):
            self._asked, self._gap, self._asked_at = True, False, self._next

    async def done(self) -> Json | None:
        """Wait for the end and return the message; None when it shows nothing.

        Raises `CallFailed` for a turn that failed, not for one that was stopped.
        """
        await self._ended.wait()
        self._check()
        return self.fold.message

    async def stop(self) -> None:
        """Ask the server to stop the turn; its end comes as the answer's."""
        await self._owner.stop(self.request_id)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self.fold.outcome == "error":
            raise CallFailed(self.fold.error or "the turn failed")

    # ---- for the chat

    def put(self, seq: int, chunk: Json) -> None:
        """Take one chunk, if it is the next one and there is room for it."""
        if seq < self._next:
            return
        if seq > self._next or len(self._queue) >= self._bound:
            self._gap = True
            return
        self._queue.append(chunk)
        self._next = seq + 1
        self._wake.set()

    def replayed(self, *, cut: bool = False) -> None:
        """The replay that was asked for is complete; or cut off with its socket."""
        self._asked = False
        if cut:
            self._asked_at = -1
        self._gap = self._gap or self._next < self.fold.next_seq
        self._wake.set()

    def end(self, error: CuletError | None = None) -> None:
        """The turn has ended; or nothing more will be heard of it."""
        self._error = error
        self._ended.set()
        self._wake.set()
