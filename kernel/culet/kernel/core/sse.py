"""Server-sent events: bytes as a socket gives them in, whole events out. Pure.

The official clients of the model providers have decoders of their own, but these leave
async generators half read when an answer is done, which trio rightly complains about.
So the clients send the request and this reads the answer.
"""

from __future__ import annotations

import re
from typing import Final, final

import msgspec

from culet.kernel.core.limits import MODEL_EVENT_BYTES
from culet.kernel.errors import RemoteProtocolError

_LINE_END: Final = re.compile(rb"\r\n|\n|\r(?!\Z)")  # a last \r may be half of one


class Event(msgspec.Struct, frozen=True):
    """One event: its `event:` field ("" if it has none) and its data, lines joined."""

    kind: str
    data: str


@final
class Decoder:
    """Puts events together; `feed` it what arrives, in any pieces.

    Comments and fields other than `event` and `data` are ignored; what stands at the
    end without the empty line that ends an event is none.
    """

    def __init__(self, max_bytes: int = MODEL_EVENT_BYTES) -> None:
        self._max = max_bytes
        self._rest = bytearray()  # of a line that has not ended
        self._kind = ""
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, block: bytes) -> list[Event]:
        """Return the events that this block completes.

        Raises `RemoteProtocolError` for an event that is larger than allowed.
        """
        looked = max(0, len(self._rest) - 1)  # the last byte may have been half an end
        self._rest += block
        found: list[Event] = []
        start = 0
        for end in _LINE_END.finditer(self._rest, looked):
            event = self._line(bytes(self._rest[start : end.start()]))
            if event is not None:
                found.append(event)
            start = end.end()
        del self._rest[:start]
        if len(self._rest) + self._size > self._max:
            msg = f"an event of the answer is larger than {self._max} bytes"
            raise RemoteProtocolError(msg)
        return found

    def _line(self, line: bytes) -> Event | None:
        if line:
            self._size += len(line)
            field, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if field == b"data":
                self._data.append(value)
            elif field == b"event":
                self._kind = value.decode(errors="replace")
            return None
        kind, data = self._kind, self._data
        self._kind, self._data, self._size = "", [], 0
        if not data:
            return None
        return Event(kind, b"\n".join(data).decode(errors="replace"))
