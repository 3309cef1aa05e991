"""Calls of an agent's methods over a line, and what becomes of them when it breaks.

A call that was not sent when the socket is lost is sent over the next one. One that was
sent may have run or not: its caller gets `ConnectionLost` and decides.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final, Generic, TypeVar, final
from weakref import WeakValueDictionary

import msgspec
import trio

from culet.kernel.clock import Chance
from culet.kernel.core.limits import Limits
from culet.kernel.errors import (
    CallFailed,
    CapacityError,
    ConnectionLost,
    CuletError,
    RemoteProtocolError,
    UsageError,
)

from .client_line import Line, Outgoing
from .client_socket import Ending

Json = dict[str, Any]
T = TypeVar("T")
_STRETCH: Final = 16  # times the bound, while an answer is waited for
_NOTHING: Final = object()


def decoded(text: str) -> Json | None:
    """Return the JSON object that a text is; None for anything else."""
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def encoded(frame: Json) -> str:
    """Return a frame as JSON text; raises `UsageError` for what JSON cannot say."""
    try:
        return msgspec.json.encode(frame).decode()
    except (TypeError, ValueError) as error:
        raise UsageError(f"not JSON: {error}") from None


def typed(value: Any, kind: Any, method: str) -> Any:
    """Return a JSON value as the type that the caller expects."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        text = f"{method} returned what is no {kind}: {error}"
        raise RemoteProtocolError(text) from None


@final
class _Call:
    """One call that waits for its answer."""

    def __init__(self) -> None:
        self.item: Outgoing | None = None
        self.answered = trio.Event()
        self.value: Any = None
        self.error: CuletError | None = None

    def fail(self, error: CuletError) -> None:
        self.error = error
        self.answered.set()


@final
class CallStream(Generic[T]):
    """A streaming call: iterate over its values; `result` is the final one.

    A consumer that is slow makes the socket wait; one that stops for long (or while
    other answers are waited for and very much comes) is given up with `CapacityError`.
    """

    def __init__(self, calls: Calls, call_id: str, method: str, kind: Any) -> None:
        self._calls = calls
        self._method, self._kind = method, kind
        self._values: deque[Any] = deque()
        self._wake = trio.Event()
        self._result: Any = _NOTHING
        self._error: CuletError | None = None
        self._over = False
        self.id = call_id
        self.item: Outgoing | None = None

    def __aiter__(self) -> CallStream[T]:
        return self

    async def __anext__(self) -> T:
        await trio.lowlevel.checkpoint()
        while not self._values:
            if self._error is not None:
                raise self._error
            if self._over:
                raise StopAsyncIteration
            self._wake = trio.Event()
            await self._wake.wait()
        value = self._values.popleft()
        self._calls.moved.set()
        converted: T = typed(value, self._kind, self._method)
        return converted

    @property
    def result(self) -> Any:
        """The final value; raises `UsageError` before the end, or what ended it."""
        if self._error is not None:
            raise self._error
        if not self._over:
            raise UsageError("the stream is not over yet")
        return None if self._result is _NOTHING else self._result

    async def aclose(self) -> None:
        """Listen no more. The method goes on: the wire has no cancel for it."""
        self._calls.forget(self)
        self._over = True
        self._values.clear()
        self._wake.set()
        await trio.lowlevel.checkpoint()

    @property
    def backlog(self) -> int:
        """Values that have come and were not taken."""
        return len(self._values)

    def put(self, value: Any) -> None:
        """Take one value."""
        self._values.append(value)
        self._wake.set()

    def end(self, value: Any) -> None:
        """Take the final value."""
        self._over, self._result = True, value
        self._wake.set()

    def fail(self, error: CuletError) -> None:
        """End with an error, after the values that have come."""
        self._over, self._error = True, error
        self._wake.set()


@final
class Calls:
    """The calls of one line that are in flight."""

    def __init__(self, line: Line, limits: Limits, chance: Chance) -> None:
        self._line, self._limits, self._chance = line, limits, chance
        self._calls: dict[str, _Call] = {}
        # a stream that nobody holds any more is nobody's: its values are dropped
        self._streams: WeakValueDictionary[str, CallStream[Any]] = WeakValueDictionary()
        self._slots = trio.Semaphore(limits.rpc_per_connection)
        self.moved = trio.Event()

    async def call(
        self,
        method: str,
        args: tuple[Any, ...],
        kind: Any,
        *,
        before: str | None = None,
    ) -> Any:
        """Call and wait for the answer. `before` is a frame that goes just before it."""
        call_id, text = self._frame(method, args)
        call = _Call()
        async with self._slots:
            await self._line.space()
            ahead = None if before is None else self._line.post(before)
            call.item = self._line.post(text)
            self._calls[call_id] = call
            self.moved.set()
            try:
                await call.answered.wait()
            finally:
                del self._calls[call_id]
                if self._line.retract(call.item) and ahead is not None:
                    self._line.retract(ahead)
        if call.error is not None:
            raise call.error
        return typed(call.value, kind, method)

    def begin(self, method: str, args: tuple[Any, ...], kind: Any) -> CallStream[Any]:
        """Begin a streaming call, now. Raises `CapacityError` when too many run."""
        if len(self._streams) >= self._limits.rpc_per_connection:
            raise CapacityError(f"{len(self._streams)} streams are open already")
        call_id, text = self._frame(method, args)
        stream: CallStream[Any] = CallStream(self, call_id, method, kind)
        stream.item = self._line.post(text)
        self._streams[call_id] = stream
        return stream

    def forget(self, stream: CallStream[Any]) -> None:
        """Nobody listens to a stream any more."""
        if stream.item is not None:
            self._line.retract(stream.item)
        self._streams.pop(stream.id, None)
        self.moved.set()

    def _frame(self, method: str, args: tuple[Any, ...]) -> tuple[str, str]:
        call_id = self._chance.id()
        frame = {"type": "rpc", "id": call_id, "method": method, "args": list(args)}
        return call_id, encoded(frame)

    # ---- what comes

    def answer(self, frame: Json) -> None:
        """Take one answer. One that nobody waits for is dropped."""
        call_id = str(frame.get("id"))
        found = self._calls.get(call_id) or self._streams.get(call_id)
        if found is None:
            return
        if not frame.get("success"):
            found.fail(CallFailed(str(frame.get("error") or "the call failed")))
            self._streams.pop(call_id, None)
            return
        last = frame.get("done", True) is not False
        if isinstance(found, _Call):
            if last:  # values of a stream that was called plainly are passed over
                found.value = frame.get("result")
                found.answered.set()
        elif last:
            found.end(frame.get("result", _NOTHING))
            self._streams.pop(call_id, None)
        else:
            found.put(frame.get("result"))
            if found.backlog > self._limits.client_values * _STRETCH:
                self._give_up(found)

    async def room(self) -> None:
        """Wait while a stream is full, unless somebody waits for an answer."""
        if not self._full() or self._calls:
            return
        with trio.move_on_after(self._limits.client_pause_s) as pause:
            while self._full() and not self._calls:
                self.moved = trio.Event()
                await self.moved.wait()
        if pause.cancelled_caught:
            for stream in self._full():
                self._give_up(stream)

    def _full(self) -> list[CallStream[Any]]:
        bound = self._limits.client_values
        return [s for s in self._streams.values() if s.backlog >= bound]

    def _give_up(self, stream: CallStream[Any]) -> None:
        text = f"too slow: {stream.backlog} values were not taken"
        self._streams.pop(stream.id, None)
        stream.fail(CapacityError(text))

    # ---- when the line breaks

    def lost(self, ending: Ending) -> None:
        """Fail what was sent; the rest waits for the next socket."""
        text = f"{ending} before the answer came"
        error = ConnectionLost(text, code=ending.code)
        self._fail(error, sent_only=True)

    def over(self, error: CuletError) -> None:
        """Fail everything."""
        self._fail(error, sent_only=False)

    def _fail(self, error: CuletError, *, sent_only: bool) -> None:
        all_waiting: list[_Call | CallStream[Any]] = []
        all_waiting += self._calls.values()
        all_waiting += self._streams.values()
        for waiting in all_waiting:
            assert waiting.item is not None
            if waiting.item.sent or not sent_only:
                waiting.fail(error)
        for call_id, stream in list(self._streams.items()):
            if stream._over:
                self._streams.pop(call_id, None)
        self.moved.set()
