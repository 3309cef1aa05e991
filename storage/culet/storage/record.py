"""One record of a tree log as bytes, and what bytes tell when one cannot be read.

    {magic, epoch, segment, lsn, low, previous, synced, length, checksum} body

`previous` is the checksum of the record before, `low` the oldest segment that is still
needed. `synced` is the last record that its writer knew to be on the disk: it tells a
record that was damaged from one that was torn, which was the last thing written.

A *mark* says the same and nothing else. It lies where the next record will begin, which
overwrites it. It is written before database files get ahead of the log, and at a close:
then the last record cannot vanish unnoticed either.

Both begin with a byte that stands in a body only with a zero behind it, so a search
finds what the log has written and nothing that a user has stored. No text in UTF-8 has
that byte.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import msgspec

from culet.kernel.errors import StorageCorrupt

_RARE: Final = b"\xf5"
_ESCAPED: Final = _RARE + b"\0"
MAGIC: Final = _RARE + b"CL2"
_MARK_MAGIC: Final = _RARE + b"CLS"
_MAGIC_1: Final = b"CUL1"  # without `synced`; nothing is escaped in its bodies
HEADER: Final = struct.Struct("<4sIIQIIQII")
_HEADER_1: Final = struct.Struct("<4sIIQIIII")
_MARK: Final = struct.Struct("<4sIIQI")  # magic, epoch, segment, synced, checksum
_UNSIGNED: Final = struct.Struct("<I")  # the checksum, last of each
_BEGINS: Final = re.compile(re.escape(MAGIC) + b"|" + re.escape(_MARK_MAGIC))
_UNKNOWN: Final = -1  # of `synced`

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder().decode

Entry = tuple[Any, ...]


class Logged(NamedTuple):
    """One complete record as it was found."""

    segment: int
    low: int
    lsn: int
    epoch: int
    checksum: int
    body: bytes
    previous: int = 0
    synced: int = _UNKNOWN
    end: int = 0  # offset behind it

    def entries(self) -> list[Any]:
        """Return what it says; `StorageCorrupt` where that is no list of entries."""
        try:
            found = _decode(self.body)
        except msgspec.DecodeError as error:
            msg = f"record {self.lsn} of the log cannot be read"
            raise StorageCorrupt(msg) from error
        if not isinstance(found, list):
            msg = f"record {self.lsn} of the log is no list of entries"
            raise StorageCorrupt(msg)
        return found


class Claim(NamedTuple):
    """Something whole says that all records up to `synced` were on the disk."""

    epoch: int
    synced: int


def encode_record(
    entries: list[Entry],
    *,
    epoch: int,
    segment: int,
    lsn: int,
    low: int,
    previous: int,
    synced: int,
) -> tuple[bytes, int]:
    """Return one record as bytes, and its checksum."""
    body = _encode(entries).replace(_RARE, _ESCAPED)
    head = HEADER.pack(MAGIC, epoch, segment, lsn, low, previous, synced, len(body), 0)[
        : -_UNSIGNED.size
    ]
    checksum = zlib.crc32(body, zlib.crc32(head))
    return b"".join((head, _UNSIGNED.pack(checksum), body)), checksum


def encode_mark(*, epoch: int, segment: int, synced: int) -> bytes:
    """Return a mark as bytes; it is shorter than the header of a record."""
    head = _MARK.pack(_MARK_MAGIC, epoch, segment, synced, 0)[: -_UNSIGNED.size]
    return head + _UNSIGNED.pack(zlib.crc32(head))


def record_at(data: bytes, offset: int, segment: int) -> Logged | None:
    """Return the record at `offset`, if there is a whole one of that segment."""
    header = HEADER
    synced = _UNKNOWN
    magic = data[offset : offset + len(MAGIC)]
    if magic == _MAGIC_1:
        header = _HEADER_1
    elif magic != MAGIC:
        return None
    start = offset + header.size
    if start > len(data):
        return None
    _, epoch, number, lsn, low, previous, *rest = header.unpack_from(data, offset)
    if magic == MAGIC:
        synced = rest.pop(0)
    length, checksum = rest
    end = start + length
    if number != segment or end > len(data):
        return None
    body = data[start:end]
    head = data[offset : start - _UNSIGNED.size]
    if checksum != zlib.crc32(body, zlib.crc32(head)):
        return None
    if magic == MAGIC:
        body = body.replace(_ESCAPED, _RARE)
    return Logged(segment, low, lsn, epoch, checksum, body, previous, synced, end)


def claims(data: bytes, offset: int, segment: int) -> Iterator[Claim]:
    """Return what whole records and marks from `offset` on say of those before them."""
    for match in _BEGINS.finditer(data, offset):
        at = match.start()
        found = record_at(data, at, segment) or _mark_at(data, at, segment)
        if found is not None:
            yield Claim(found.epoch, found.synced)


def _mark_at(data: bytes, offset: int, segment: int) -> Claim | None:
    part = data[offset : offset + _MARK.size]
    if len(part) < _MARK.size:
        return None
    magic, epoch, number, synced, checksum = _MARK.unpack(part)
    if magic != _MARK_MAGIC or number != segment:
        return None
    if checksum != zlib.crc32(part[: -_UNSIGNED.size]):
        return None
    return Claim(epoch, synced)
