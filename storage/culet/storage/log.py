"""The tree log: what a record is, how it is read back, how the files are redone.

A record holds *page images*, not bytes of a WAL: `{magic, epoch, segment, lsn, low,
previous checksum, length, checksum}` and a MessagePack list of entries

    ("M", names)                    the live files, first entry of a segment
    ("C", name, template digest)    a file is created from its template
    ("D", name)                     a file is deleted
    ("P", name, size, pages, images)   pages of a file, and its size in pages (0: as before)

So redo needs no order inside a record, and doing it twice is doing it once. Each
record carries the checksum of the one before; `low` is the oldest segment that is
still needed. After an unclean end no WAL is ever read: what counts is in the log,
the rest was told to nobody.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any, Final, NamedTuple

import msgspec

from culet.kernel.errors import StorageCorrupt

from .files import Folder
from .template import PAGE, Templates

MAGIC: Final = b"CUL1"
HEADER: Final = struct.Struct("<4sIIQIIII")
_UNSIGNED: Final = struct.Struct("<I")
_CHECKED: Final = HEADER.size - _UNSIGNED.size  # of the header; the checksum is last

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


class Image:
    """What the log knows of one file: its birth, its last pages, its size."""

    __slots__ = ("pages", "size", "template")

    def __init__(self, template: str | None) -> None:
        self.template = template  # digest, if the file was born inside the log
        self.pages: dict[int, bytes] = {}
        self.size = 0  # in pages; 0: nothing was said

    def first_page(self, folder: Folder, name: str, templates: Templates) -> bytes:
        """Return the header page as it will be after the redo."""
        if 1 in self.pages:
            return self.pages[1]
        if self.template is not None:
            return templates.bytes_of(self.template)[:PAGE]
        return folder.pread(name, PAGE, 0)


class Redo(NamedTuple):
    """All that a log says; where the next life goes on."""

    live: dict[str, Image]
    epoch: int
    lsn: int
    checksum: int
    top: int  # highest number of a segment, used or only prepared


def segment_name(number: int) -> str:
    """Return the file name of a segment."""
    return f"log{number:08d}"


def segment_numbers(names: list[str]) -> list[int]:
    """Return the numbers of the segments among `names`, in order."""
    return sorted(int(n[3:]) for n in names if n.startswith("log") and n[3:].isdigit())


def encode_record(
    entries: list[Entry], *, epoch: int, segment: int, lsn: int, low: int, previous: int
) -> tuple[bytes, int]:
    """Return one record as bytes, and its checksum."""
    body = _encode(entries)
    head = HEADER.pack(MAGIC, epoch, segment, lsn, low, previous, len(body), 0)
    head = head[:_CHECKED]
    checksum = zlib.crc32(body, zlib.crc32(head))
    return b"".join((head, _UNSIGNED.pack(checksum), body)), checksum


def _complete(data: bytes, offset: int, segment: int) -> tuple[Logged, int] | None:
    """Return the record at `offset` and the checksum it chains to, if it is whole."""
    if offset + HEADER.size > len(data):
        return None
    magic, epoch, number, lsn, low, previous, length, checksum = HEADER.unpack_from(
        data, offset
    )
    if magic != MAGIC or number != segment:
        return None
    start = offset + HEADER.size
    body = data[start : start + length]
    if len(body) < length:
        return None
    if checksum != zlib.crc32(body, zlib.crc32(data[offset : offset + _CHECKED])):
        return None
    return Logged(segment, low, lsn, epoch, checksum, body), previous


def read_chain(folder: Folder) -> list[Logged]:
    """Return the chain of complete records, oldest first.

    A segment that does not chain but begins at a higher lsn follows retired ones
    whose unlink was lost in part: what came before it is dropped.
    """
    chain: list[Logged] = []
    for number in segment_numbers(folder.names()):
        data, offset = folder.read(segment_name(number)), 0
        while (found := _complete(data, offset, number)) is not None:
            record, previous = found
            if chain and (record.lsn, previous) != (
                chain[-1].lsn + 1,
                chain[-1].checksum,
            ):
                if offset or record.lsn <= chain[-1].lsn:
                    break
                chain = []
            chain.append(record)
            offset += HEADER.size + len(record.body)
    return chain


def plan_redo(chain: list[Logged], names: list[str]) -> Redo:
    """Fold a chain into the last image of each live file. Reads and writes nothing."""
    top = max(segment_numbers(names), default=0)
    if not chain:
        return Redo({}, 0, 0, 0, top)
    last = chain[-1]
    if chain[0].segment > last.low:
        msg = f"log segment {last.low} is needed and missing"
        raise StorageCorrupt(msg)
    live: dict[str, Image] | None = None
    for record in chain:
        if record.segment < last.low:
            continue
        try:
            entries = _decode(record.body)
        except msgspec.DecodeError as error:
            msg = f"record {record.lsn} of the log cannot be read"
            raise StorageCorrupt(msg) from error
        for entry in entries:
            live = _apply(live, entry)
    return Redo(live or {}, last.epoch, last.lsn, last.checksum, top)


def _apply(live: dict[str, Image] | None, entry: Entry) -> dict[str, Image]:
    match entry:
        case ["M", names]:
            return {name: Image(None) for name in names} if live is None else live
        case ["C", name, template] if live is not None:
            live[name] = Image(template)
        case ["D", name] if live is not None:
            live.pop(name, None)
        case ["P", name, size, pages, images] if live is not None and name in live:
            image = live[name]
            image.size = size or image.size
            for index, page in enumerate(pages):
                image.pages[page] = images[index * PAGE : (index + 1) * PAGE]
        case _:
            msg = f"an entry of the log makes no sense: {entry[:2]!r}"
            raise StorageCorrupt(msg)
    return live


def redo(folder: Folder, plan: Redo, templates: Templates) -> None:
    """Write the pages into the files, drop every WAL and every file that is not live.

    Idempotent until the next segment is durable, so it may itself be cut anywhere.
    """
    names = folder.names()
    for name, image in plan.live.items():
        if image.template is not None:
            folder.truncate(name, 0)
            folder.write(name, 0, templates.bytes_of(image.template))
        elif name not in names:
            msg = f"the file {name!r} is lost"
            raise StorageCorrupt(msg)
        for page, content in image.pages.items():
            if not image.size or page <= image.size:
                folder.write(name, (page - 1) * PAGE, content)
        if image.size:
            folder.truncate(name, image.size * PAGE)
        if image.template is not None or image.pages:
            folder.sync(name)
        folder.release(name)
    for name in names:
        if name.endswith("-wal") or (name.endswith(".db") and name not in plan.live):
            folder.unlink(name)
    folder.sync_folder()
