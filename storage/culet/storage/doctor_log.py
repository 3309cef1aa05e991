"""The doctor's own reader of a tree log, written from the format and not from `log.py`.

It reads a folder that nobody may write, and builds what a recovery would make of it
in another one. Standard library only.

A segment `log<number>` is a row of records, each a header (little-endian: F5 `CL2`,
epoch, segment, lsn, oldest segment still needed, checksum of the record before, last
record known to be on the disk, length of the body, CRC-32 of header and body) and a
body of entries in MessagePack, in which F5 is written F5 00. Behind the last record
there may be a mark: F5 `CLS`, epoch, segment, last record known to be on the disk,
CRC-32. Older segments begin with `CUL1`: nothing is known, nothing is written otherwise.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO, Final

from .doctor_msgpack import Value, decode

PAGE: Final = 1024
TREE_DB: Final = "tree.db"
_HEADERS: Final = {
    b"CUL1": struct.Struct("<4s II Q II I I"),
    b"\xf5CL2": struct.Struct("<4s II Q II Q I I"),
}
_MARK: Final = struct.Struct("<4s II Q I")
_CHECKSUM_BYTES: Final = 4  # the last field of each
_SEGMENT: Final = re.compile(r"log(\d+)")
# A name comes out of a log that may be damaged: it must not lead out of the folder.
_FILE: Final = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,63}\.db")
_DIGEST: Final = re.compile(r"[0-9a-f]{16}")
_CHUNK: Final = 1 << 20
_SECTOR: Final = 512
_DAMAGED: Final = (
    "The log is damaged: {} cannot be read at byte {}, and what was written later shows "
    "that it had been on the disk. Restore the folder of this tree from a backup."
)


class LogError(Exception):
    """Why a log cannot be applied, as one sentence."""


@dataclass(frozen=True)
class Record:
    """Where one whole record lies, and what its header says."""

    path: str
    body_at: int
    body_size: int
    epoch: int
    segment: int
    lsn: int
    low: int
    previous: int
    checksum: int
    known: int | None  # the last record known to be on the disk

    @property
    def end(self) -> int:
        """Where it ends."""
        return self.body_at + self.body_size

    def body(self) -> bytes:
        """Read the entries."""
        with open(self.path, "rb") as file:
            file.seek(self.body_at)
            body = file.read(self.body_size)
        if self.known is None:
            return body
        return body.replace(b"\xf5\0", b"\xf5")

    def follows(self, other: Record) -> bool:
        """Whether this is the next record after `other`."""
        return self.lsn == other.lsn + 1 and self.previous == other.checksum


@dataclass
class FileImage:
    """What a log says of one file. `template` is set where it was born in the log."""

    template: str | None = None
    pages: dict[int, bytes] = field(default_factory=dict)
    size: int = 0  # in pages; 0: nothing was said


@dataclass
class Segment:
    """One file of a log."""

    path: str
    number: int
    end: int = 0  # behind its last record that counts
    # said behind it: epoch, lsn
    known: list[tuple[int, int]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Its name in the folder."""
        return os.path.basename(self.path)


@dataclass
class Log:
    """The records that count, and what lies around them."""

    records: list[Record]
    segments: list[Segment]
    torn: list[str]  # segments with bytes behind their last record that counts

    @property
    def lsn(self) -> int:
        """Number of the last record, 0 without one."""
        return self.records[-1].lsn if self.records else 0


def read_log(folder: str) -> Log:
    """Find the chain of whole records, oldest first."""
    found = Log([], [], [])
    numbers = sorted(
        int(match[1]) for name in os.listdir(folder) if (match := _SEGMENT.fullmatch(name))
    )  # fmt: skip
    for number in numbers:
        segment = Segment(f"{folder}/log{number:08d}", number)
        found.segments.append(segment)
        old = False
        with open(segment.path, "rb") as file:
            while (record := _record(file, segment, segment.end)) is not None:
                before = found.records[-1] if found.records else None
                if before is not None and not record.follows(before):
                    # The first record of a segment may follow segments that were let go
                    # and whose names came back with the crash. Anything else is old.
                    if segment.end or record.lsn <= before.lsn:
                        break
                    found.records.clear()
                found.records.append(record)
                segment.end, old = record.end, record.known is None
            if not old:
                segment.known = list(_known(file, segment))
        if _is_written(segment.path, segment.end):
            found.torn.append(segment.path)
    return found


def _record(file: BinaryIO, segment: Segment, at: int) -> Record | None:
    """Return the whole record of that segment at an offset, if there is one."""
    size = os.fstat(file.fileno()).st_size
    file.seek(at)
    head = file.read(_HEADERS[b"\xf5CL2"].size)
    header = _HEADERS.get(head[:4])
    if header is None or len(head) < header.size:
        return None
    head = head[: header.size]
    _, epoch, number, lsn, low, previous, *known, length, checksum = header.unpack(head)
    body_at = at + header.size
    if number != segment.number or body_at + length > size:
        return None
    file.seek(body_at)
    if _crc_of(file, length, zlib.crc32(head[:-_CHECKSUM_BYTES])) != checksum:
        return None
    return Record(
        segment.path, body_at, length, epoch, number, lsn, low, previous, checksum,
        known[0] if known else None,
    )  # fmt: skip


def _known(file: BinaryIO, segment: Segment) -> Iterator[tuple[int, int]]:
    """Return what lies behind the end and says that records had been on the disk."""
    file.seek(segment.end)
    rest = file.read()
    for match in re.finditer(b"\xf5CL[2S]", rest):
        at = match.start()
        record = _record(file, segment, segment.end + at)
        if record is not None and record.known is not None:
            yield record.epoch, record.known
        part = rest[at : at + _MARK.size]
        if match[0] == b"\xf5CLS" and len(part) == _MARK.size:
            _, epoch, number, known, checksum = _MARK.unpack(part)
            same = zlib.crc32(part[:-_CHECKSUM_BYTES]) == checksum
            if same and number == segment.number:
                yield epoch, known


def _crc_of(file: BinaryIO, length: int, value: int) -> int:
    for at in range(0, length, _CHUNK):
        value = zlib.crc32(file.read(min(length - at, _CHUNK)), value)
    return value


def _is_written(path: str, offset: int) -> bool:
    """Whether something but zeros lies behind an offset of a file."""
    with open(path, "rb") as file:
        file.seek(offset)
        while chunk := file.read(_CHUNK):
            if chunk.count(0) != len(chunk):
                return True
    return False


def check(log: Log) -> None:
    """Raise `LogError` where a record that had been on the disk is not there."""
    last = log.records[-1] if log.records else None
    epoch, lsn, top = (last.epoch, last.lsn, last.segment) if last else (0, 0, 0)
    for segment in log.segments:
        if any(e >= epoch and known > lsn for e, known in segment.known):
            raise LogError(_DAMAGED.format(segment.name, segment.end))
    if last is None:
        return
    begins = log.records[0].segment
    for segment in reversed(log.segments):
        if last.low <= segment.number < begins:
            raise LogError(_DAMAGED.format(segment.name, segment.end))
    there = {segment.number for segment in log.segments}
    for number in (*range(last.low, begins), *range(top, max(there))):
        if number not in there:
            msg = f"Segment {number} of the log is missing."
            raise LogError(msg)


def fold(log: Log) -> dict[str, FileImage]:
    """Return the last image of each live file; `LogError` where the log is damaged."""
    check(log)
    if not log.records:
        return {}
    last = log.records[-1]
    live: dict[str, FileImage] | None = None
    for record in log.records:
        if record.segment >= last.low:
            for entry in _entries(record):
                live = _note(live, entry, record)
    return live or {}


def _entries(record: Record) -> list[Value]:
    try:
        entries = decode(record.body())
    except ValueError as error:
        msg = f"Record {record.lsn} of the log cannot be read: {error}."
        raise LogError(msg) from error
    if not isinstance(entries, list):
        msg = f"Record {record.lsn} of the log is not a list of entries."
        raise LogError(msg)
    return entries


def _note(
    live: dict[str, FileImage] | None, entry: Value, record: Record
) -> dict[str, FileImage]:
    match entry:
        case ["M", list(names)] if all(map(_is_name, names)):
            # The first one counts: later ones repeat what the entries between say.
            return {str(n): FileImage() for n in names} if live is None else live
        case ["C", str(name), str(digest)] if live is not None and _is_name(name):
            live[name] = FileImage(template=digest)
            return live
        case ["D", str(name)] if live is not None:
            live.pop(name, None)
            return live
        case ["P", str(name), int(size), list(pages), bytes(images)] if (
            live is not None and name in live and len(images) == len(pages) * PAGE
        ):
            image = live[name]
            image.size = size or image.size
            for index, page in enumerate(pages):
                if not isinstance(page, int) or page < 1:
                    break
                image.pages[page] = images[index * PAGE : (index + 1) * PAGE]
            else:
                return live
    msg = f"Record {record.lsn} of the log has an entry that makes no sense."
    raise LogError(msg)


def _is_name(name: object) -> bool:
    return isinstance(name, str) and _FILE.fullmatch(name) is not None


def build(folder: str, image: FileImage, name: str, templates: str, to: str) -> None:
    """Write one file into the folder `to` as a recovery would leave it.

    `templates` is where the store keeps what its files are born from. Raises
    `LogError` where the file or its template is lost.
    """
    path, source = f"{to}/{name}", f"{folder}/{name}"
    if image.template is not None:
        source = f"{templates}/{image.template}.db"
        _check_template(source, image.template, name)
    elif not os.path.exists(source):
        msg = f"The file {name} is lost."
        raise LogError(msg)
    shutil.copyfile(source, path)
    with open(path, "r+b") as file:
        for page, content in image.pages.items():
            if not image.size or page <= image.size:
                file.seek((page - 1) * PAGE)
                file.write(content)
        if image.size:
            file.truncate(image.size * PAGE)


def _check_template(path: str, digest: str, name: str) -> None:
    """Make sure that a template is what its name says."""
    content = b""
    if _DIGEST.fullmatch(digest) and os.path.exists(path):
        with open(path, "rb") as file:
            content = file.read()
    if hashlib.sha256(content).hexdigest()[: len(digest)] != digest:
        msg = f"The template {digest!r} of the file {name} is lost or damaged."
        raise LogError(msg)


def changed_pages(folder: str, name: str, built: str) -> int:
    """Count the pages of a file that the log changes, in what was found of it."""
    path = f"{folder}/{name}"
    old = os.path.getsize(path) if os.path.exists(path) else 0
    new = os.path.getsize(f"{built}/{name}")
    different = abs(new - old + PAGE - 1) // PAGE if old != new else 0
    if old:
        with open(path, "rb") as left, open(f"{built}/{name}", "rb") as right:
            for _ in range(min(old, new) // PAGE):
                different += left.read(PAGE) != right.read(PAGE)
    return different


def may_become(content: bytes, births: list[bytes]) -> bool:
    """Whether a file is no more than the beginning of one of those that files are born as.

    A cut leaves any of its sectors as zeros.
    """
    return any(_is_part(content, image) for image in births)


def _is_part(content: bytes, image: bytes) -> bool:
    if len(content) > len(image):
        return False
    for at in range(0, len(content), _SECTOR):
        part = content[at : at + _SECTOR]
        if part.count(0) != len(part) and not image.startswith(part, at):
            return False
    return True
