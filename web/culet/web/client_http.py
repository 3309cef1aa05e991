"""A question to a chat agent over plain HTTP: its answer as events, whole over cuts.

For programs that ask once and go: no socket stays open, no state is kept. The answer is
read as server-sent events; when the line is cut, the same turn is read again from where
it was, until the server says its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from ssl import SSLContext
from typing import Any, Final, final
from urllib.parse import quote

import h11
import msgspec
import trio

from culet.kernel.clock import Chance
from culet.kernel.core.chunks import apply_chunk_to_parts, text_of
from culet.kernel.core.limits import Limits
from culet.kernel.core.sse import Decoder
from culet.kernel.errors import (
    CallFailed,
    ConnectionEnded,
    ConnectionLost,
    RemoteProtocolError,
    UsageError,
)

from .client_socket import (
    RECEIVE_BYTES,
    Address,
    Headers,
    Renewed,
    address_of,
    open_stream,
    renewing,
)
from .client_transcript import as_message

Json = dict[str, Any]
_DONE: Final = "[DONE]"
_BEATS: Final = 3  # of the server's signs of life that may be missed
_ERROR_BYTES: Final = 2_000  # of what a refusal says
_GONE: Final = (
    OSError,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
    trio.TooSlowError,
    h11.RemoteProtocolError,
    RemoteProtocolError,
)


@asynccontextmanager
async def ask_over_http(
    url: str,
    question: str | Json,
    *,
    sub: Sequence[tuple[str, str]] = (),
    headers: Renewed = (),
    body: Mapping[str, Any] | None = None,
    ssl: SSLContext | None = None,
    limits: Limits | None = None,
    seed: int | None = None,
) -> AsyncIterator[HttpAnswer]:
    """Ask the chat agent at `url`, or the one below it at `sub`; iterate over its chunks.

    `question` is a text or a UI message, `body` custom keys for the agent; `headers` as of
    `connect`. Enters when the
    server has the question on disk: leaving stops nothing. Raises `UsageError` for a bad
    URL or message, `ConnectionLost` when nobody knows whether the question arrived,
    `ConnectionEnded` when the server refuses it.
    """
    chance = Chance(seed)
    if isinstance(question, str):
        parts = [{"type": "text", "text": question}]
        question = {"id": chance.id(), "role": "user", "parts": parts}
    if as_message(question) is not question or "role" not in question:
        raise UsageError("a UI message has id, role and parts")
    told = {**(body or {}), "messages": [question], "trigger": "submit-message"}
    try:
        asked = msgspec.json.encode(told)
    except (TypeError, ValueError) as error:
        raise UsageError(f"the question cannot be sent as JSON: {error}") from None
    found = address_of(url, sub=sub, ssl=ssl, connection_id=chance.id())
    answer = HttpAnswer(found, headers, limits or Limits(), chance)
    try:
        await answer._ask(asked)
        yield answer
    finally:
        await answer._leave()


@final
class HttpAnswer:
    """The answer to one question. Iterate over its chunks, or `await done()`."""

    def __init__(
        self,
        address: Address,
        headers: Renewed,
        limits: Limits,
        chance: Chance,
    ) -> None:
        self.outcome: str | None = None
        """`completed` or `aborted`; None while it goes on, or when it failed."""
        self.turn = ""
        self._parts: list[Json] = []
        self._address, self._limits, self._chance = address, limits, chance
        self._headers = renewing(headers)
        self._line: _Line | None = None
        self._error: CallFailed | None = None
        self._queue: deque[Json] = deque()
        self._next = 0  # the number of the first chunk that was not taken
        self._at = 0  # the number of the next chunk of this line

    @property
    def parts(self) -> list[Json]:
        """The parts of the message so far."""
        return self._parts

    @property
    def text(self) -> str:
        """The text so far."""
        return text_of(self._parts)

    def __aiter__(self) -> HttpAnswer:
        return self

    async def __anext__(self) -> Json:
        await trio.lowlevel.checkpoint()
        while not self._queue:
            if self._error is not None:
                raise self._error
            if self.outcome is not None:
                raise StopAsyncIteration
            await self._more()
        return self._queue.popleft()

    async def done(self) -> str:
        """Read to the end and return the text; raises `CallFailed` for a turn that failed."""
        async for _ in self:
            pass
        return self.text

    # ---- the line

    async def _ask(self, body: bytes) -> None:
        try:
            line = await self._open("POST", "chat", body)
        except _GONE as error:
            raise ConnectionLost(f"asking {self._address.host}: {error}") from error
        if line.status != 200:
            said = await line.refusal(self._limits.handshake_s)
            raise ConnectionEnded(said, code=4000 + line.status)
        self.turn = line.headers.get("x-turn", "")
        self._line = line

    async def _open(self, method: str, leaf: str, body: bytes = b"") -> _Line:
        path, _, query = self._address.resource.partition("?")
        target = f"{path.rstrip('/')}/{leaf}" + ("&" if "?" in leaf else "?") + query
        with trio.fail_after(self._limits.handshake_s):
            headers = await self._headers()
        with trio.fail_after(self._limits.handshake_s):
            line = _Line(await open_stream(self._address))
        try:
            with trio.fail_after(self._limits.handshake_s):
                await line.begin(method, self._address.authority, target, headers, body)
        except BaseException:
            await line.close()
            raise
        return line

    async def _more(self) -> None:
        """Take what comes next; over another line if this one is cut."""
        try:
            if self._line is None:
                await self._again()
            assert self._line is not None
            with trio.fail_after(_BEATS * self._limits.events_beat_s):
                events = await self._line.events()
        except _GONE:
            await self._leave()
            return
        if events is None:  # it ended, and not by saying so
            await self._leave()
            return
        for data in events:
            self._take(data)

    async def _again(self) -> None:
        """Read the turn again, behind what is here. Waits longer after each failure."""
        tries = 0
        while True:
            pause = min(
                self._limits.reconnect_max_s, self._limits.reconnect_base_s * 2**tries
            )
            await trio.sleep(pause * (0.5 + self._chance.fraction() / 2))
            tries += 1
            try:
                line = await self._open("GET", f"chat/x/stream?turn={quote(self.turn)}")
            except _GONE:
                continue
            if line.status == 200:
                self._line, self._at = line, 0
                return
            text = await line.refusal(self._limits.handshake_s)
            if line.status == 204 or 400 <= line.status < 500:
                raise ConnectionEnded(
                    text or "the turn is not kept", code=4000 + line.status
                )

    def _take(self, data: str) -> None:
        if self.outcome is not None or self._error is not None:
            return
        if data == _DONE:
            self.outcome = "completed"
            return
        try:
            chunk = msgspec.json.decode(data)
        except ValueError:
            chunk = None
        kind = chunk.get("type") if isinstance(chunk, dict) else None
        if not isinstance(kind, str):
            return  # none of the protocol's
        if kind == "error":
            self._error = CallFailed(str(chunk.get("errorText") or "the turn failed"))
            return
        if kind == "abort":
            self.outcome = "aborted"
            return
        number, self._at = self._at, self._at + 1
        if number < self._next:
            return  # it was read over another line
        self._next = number + 1
        self._parts = apply_chunk_to_parts(self._parts, chunk)
        self._queue.append(chunk)

    async def _leave(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            await line.close()


@final
class _Line:
    """One request and what comes back. Closed by who made it."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self._h11 = h11.Connection(h11.CLIENT)
        self._events = Decoder()
        self.status = 0
        self.headers: dict[str, str] = {}

    async def begin(
        self, method: str, authority: str, target: str, headers: Headers, body: bytes
    ) -> None:
        """Send the request; return when the answer begins."""
        fields = [("host", authority), ("accept", "text/event-stream")]
        if body:
            length = str(len(body))
            fields += [("content-type", "application/json"), ("content-length", length)]
        request = h11.Request(method=method, target=target, headers=[*fields, *headers])
        ends: list[h11.Event] = [h11.Data(data=body)] if body else []
        for event in (request, *ends, h11.EndOfMessage()):
            await self._stream.send_all(self._h11.send(event) or b"")
        while True:
            answer = await self._next()
            if isinstance(answer, h11.Response):
                break
            if not isinstance(answer, h11.InformationalResponse):
                raise trio.BrokenResourceError("the server has not answered")
        self.status = answer.status_code
        self.headers = {k.decode(): v.decode("latin-1") for k, v in answer.headers}

    async def events(self) -> list[str] | None:
        """Return the data of the events that came next, maybe none; None at the end."""
        event = await self._next()
        if not isinstance(event, h11.Data):
            return None
        return [found.data for found in self._events.feed(bytes(event.data))]

    async def refusal(self, patience_s: float) -> str:
        """Return what an answer that is no stream says, in that time, and close."""
        said = b""
        with suppress(*_GONE), trio.fail_after(patience_s):
            while len(said) < _ERROR_BYTES and isinstance(
                event := await self._next(), h11.Data
            ):
                said += event.data
        await self.close()
        return said[:_ERROR_BYTES].decode(errors="replace").strip()

    async def _next(self) -> Any:
        while True:
            event = self._h11.next_event()
            if event is not h11.NEED_DATA:
                return event
            self._h11.receive_data(
                bytes(await self._stream.receive_some(RECEIVE_BYTES))
            )

    async def close(self) -> None:
        """Close the stream, now."""
        await trio.aclose_forcefully(self._stream)
