"""What of a client's bytes the HTTP server behind our listener gets to see.

Two programs that read the same bytes otherwise see two different requests: that is how a
request is smuggled past a proxy, and how a head could pass our routing and be something
else to the server. So what the grammar allows to be read in two ways is refused, though
the server would forgive it: bare line feeds, folded lines, two lengths, trailers. Of the
protocols that a client may change to only WebSocket is left; HTTP/2 would share a
connection, and its limits, between requests.

All of it is decided here, on bytes, without I/O. What is refused never arrives: in its
place stands `POISON`, which no HTTP server takes for anything, so the server answers
what came before it, then says 400 and hangs up.
"""

from __future__ import annotations

import binascii
import re
import sys
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple, final

Step = Callable[[], bytes | None]
END: Final = b"\r\n\r\n"
POISON: Final = b"\0\r\n\r\n"
CHUNK_LINE: Final = 256  # a chunk's size with its extensions, which nobody reads
_REQUEST: Final = re.compile(
    rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+) ([\x21-\x7e]+) HTTP/([0-9])\.([0-9])"
)
_FIELD: Final = re.compile(
    rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*([\t\x20-\x7e\x80-\xff]*)"
)
_HOST: Final = re.compile(
    rb"(?:[A-Za-z0-9._~!$&'()*+;=%\-]*|\[[0-9A-Fa-f:.]+\])(?::[0-9]*)?"
)
_LENGTH: Final = re.compile(rb"[0-9]{1,18}")
_CHUNK: Final = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;[\t\x20-\x7e\x80-\xff]*)?")
_BARE: Final = re.compile(rb"(?<!\r)\n|\r(?!\n|\Z)|\0")


class Head(NamedTuple):
    """The head of one HTTP/1 request that can be read in one way only.

    `target` is raw, `upgrade` and `connection` are lower-case words. `length` is None for
    a chunked body. `last`: the connection ends with this request.
    """

    method: str
    target: str
    upgrade: tuple[str, ...]
    connection: tuple[str, ...]
    length: int | None
    last: bool
    fields: dict[bytes, list[bytes]]

    @property
    def is_websocket(self) -> bool:
        """Whether it asks for a WebSocket, rightly or not."""
        return "websocket" in self.upgrade


def read_head(head: bytes) -> Head | int:
    """Read a head with its last empty line; else the status that refuses it."""
    if not head.endswith(END) or is_ambiguous(head):
        return 400
    first, *lines = head.removesuffix(END).split(b"\r\n")
    asked = _REQUEST.fullmatch(first)
    if asked is None:
        return 400
    method, target, major, minor = asked.groups()
    if major != b"1":
        return 505
    fields: dict[bytes, list[bytes]] = {}
    for line in lines:
        field = _FIELD.fullmatch(line)
        if field is None:
            return 400
        fields.setdefault(field[1].lower(), []).append(field[2].strip(b" \t"))
    old = minor == b"0"
    length = _body(fields, old=old)
    if (
        not _is_target(method, target)
        or not _is_to_one_host(fields.get(b"host", []), old=old)
        or length == _NO_LENGTH
    ):
        return 400
    connection = _words(fields, b"connection")
    return Head(
        method.decode(), target.decode(), _words(fields, b"upgrade"), connection,
        length, old or "close" in connection or method == b"CONNECT", fields,
    )  # fmt: skip


def is_ambiguous(
    data: bytes | bytearray, start: int = 0, end: int = sys.maxsize
) -> bool:
    """Whether part of a head has line ends that some read and some do not."""
    return _BARE.search(data, start, end) is not None


def refuse_handshake(head: Head) -> int | None:
    """Return the status that refuses a WebSocket handshake as such."""
    key = head.fields.get(b"sec-websocket-key", [])
    fit = (
        head.method == "GET"
        and not head.last
        and head.length == 0
        and b"content-length" not in head.fields
        and head.upgrade == ("websocket",)
        and len(head.fields[b"upgrade"]) == len(head.fields.get(b"connection", [])) == 1
        and "upgrade" in head.connection
        and head.fields.get(b"sec-websocket-version") == [b"13"]
        and len(key) == 1
        and _is_key(key[0])
    )
    return None if fit else 400


def without_upgrade(head: bytes) -> bytes:
    """Return a head that offers no other protocol; who offered one is answered last."""
    lines = head.split(b"\r\n")
    for number, line in enumerate(lines):
        name = line.partition(b":")[0].lower()
        if name in {b"upgrade", b"http2-settings"}:
            lines[number] = b"Connection: close"
    return b"\r\n".join(lines)


def joined(fields: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return headers as gates and agents see them: what came twice is one list."""
    headers: dict[str, str] = {}
    for name, value in fields:
        name = name.lower()
        between = "; " if name == "cookie" else ", "
        headers[name] = f"{headers[name]}{between}{value}" if name in headers else value
    return headers


_NO_LENGTH: Final = -1


def _body(fields: dict[bytes, list[bytes]], *, old: bool) -> int | None:
    """Return how long a body is, None: chunked, `_NO_LENGTH`: nobody can tell."""
    lengths = fields.get(b"content-length", [])
    codings = fields.get(b"transfer-encoding", [])
    if codings:
        fit = len(codings) == 1 and codings[0].lower() == b"chunked"
        return None if fit and not lengths and not old else _NO_LENGTH
    if not lengths:
        return 0
    fit = len(lengths) == 1 and _LENGTH.fullmatch(lengths[0]) is not None
    return int(lengths[0]) if fit else _NO_LENGTH


def _is_target(method: bytes, target: bytes) -> bool:
    if method == b"CONNECT":
        return True  # it is refused for what it is
    if target == b"*":
        return method == b"OPTIONS"
    return target.startswith(b"/") and b"#" not in target


def _is_to_one_host(hosts: list[bytes], *, old: bool) -> bool:
    return len(hosts) in ({0, 1} if old else {1}) and all(map(_HOST.fullmatch, hosts))


def _words(fields: dict[bytes, list[bytes]], name: bytes) -> tuple[str, ...]:
    words = b",".join(fields.get(name, [])).decode("latin-1").lower().split(",")
    return tuple(word.strip(" \t") for word in words if word.strip(" \t"))


def _is_key(key: bytes) -> bool:
    try:
        return len(binascii.a2b_base64(key, strict_mode=True)) == 16
    except binascii.Error:
        return False


@final
class Sieve:
    """One connection's bytes, as they may be passed on. `feed` it what arrives.

    `switching` is true once a WebSocket handshake was passed on: what follows it belongs
    to no request, and may be passed on only when it was accepted (`switched`).
    """

    def __init__(self, header_bytes: int) -> None:
        self._header_bytes = header_bytes
        self._step: Step = self._head
        self._data, self._at = b"", 0  # what is not passed on yet begins there
        self._seen = 0  # of a head that has not come to its end: no need to look twice
        self._left = 0  # of a body, or of a chunk
        self._last = False
        self.switching = self.refused = False

    @property
    def held(self) -> int:
        """How many bytes wait."""
        return len(self._data)

    def feed(self, data: bytes) -> bytes:
        """Return what may be passed on now."""
        self._data += data
        out = []
        while self._at < len(self._data) and not self.switching:
            part = self._step()
            if part is None:
                break
            out.append(part)
        self._data, self._at = self._data[self._at :], 0
        return b"".join(out)

    def switched(self) -> None:
        """The handshake was accepted: `feed` passes on everything from now on."""
        self.switching = False
        self._step = self._all

    def _take(self, end: int) -> bytes:
        part, self._at = self._data[self._at : end], end
        return part

    def _head(self) -> bytes | None:
        begin = max(self._at, self._at + self._seen - len(END) + 1)
        end = self._data.find(END, begin)
        if end < 0:
            return self._part_of_head(begin)
        self._seen = 0
        head = self._take(end + len(END))
        read = 431 if len(head) > self._header_bytes else read_head(head)
        if isinstance(read, int) or (read.is_websocket and refuse_handshake(read)):
            return self._refuse()
        self._last = read.last
        if read.is_websocket:
            self.switching = True
        elif read.upgrade or b"http2-settings" in read.fields:
            head, self._last = without_upgrade(head), True
        if read.length is None:
            self._step = self._chunk_line
        else:
            self._left = read.length
            self._step = self._body if read.length else self._after()
        return head

    def _part_of_head(self, begin: int) -> bytes | None:
        if is_ambiguous(self._data, begin):
            return self._refuse()
        self._seen = len(self._data) - self._at
        if self._seen <= self._header_bytes:
            return None
        self._step = self._nothing  # the server says itself that it is too large
        return self._take(len(self._data))

    def _after(self) -> Step:
        return self._nothing if self._last else self._head

    def _body(self) -> bytes:
        part = self._take(min(self._at + self._left, len(self._data)))
        self._left -= len(part)
        if not self._left:
            self._step = self._after()
        return part

    def _chunk_line(self) -> bytes | None:
        end = self._data.find(b"\r\n", self._at, self._at + CHUNK_LINE)
        if end < 0:
            part = self._data[self._at : self._at + CHUNK_LINE]
            return (
                self._refuse()
                if is_ambiguous(part) or len(part) == CHUNK_LINE
                else None
            )
        line = self._take(end + 2)
        size = _CHUNK.fullmatch(line, 0, len(line) - 2)
        if size is None:
            return self._refuse()
        self._left = int(size[1], 16)
        self._step = self._chunk if self._left else self._no_trailer
        return line

    def _chunk(self) -> bytes:
        part = self._body()
        self._step = self._chunk if self._left else self._chunk_end
        return part

    def _chunk_end(self) -> bytes | None:
        return self._line_end(self._chunk_line)

    def _no_trailer(self) -> bytes | None:
        return self._line_end(self._after())

    def _line_end(self, after: Step) -> bytes | None:
        there = self._data[self._at : self._at + 2]
        if there == b"\r":
            return None
        if there != b"\r\n":
            return self._refuse()
        self._step = after
        return self._take(self._at + 2)

    def _all(self) -> bytes:
        return self._take(len(self._data))

    def _nothing(self) -> bytes | None:
        self._at = len(self._data)
        return None

    def _refuse(self) -> bytes:
        self._nothing()
        self._step, self.refused = self._nothing, True
        return POISON
