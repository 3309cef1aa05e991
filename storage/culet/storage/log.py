"""The tree log: how it is read back, and how the files are redone.

A record (`record.py`) holds *page images*, not bytes of a WAL: a MessagePack list of

    ("M", names)                    the live files, first entry of a segment
    ("C", name, template digest)    a file is created from its template
    ("D", name)                     a file is deleted
    ("P", name, size, pages, images)   pages of a file, and its size in pages (0: as before)

So redo needs no order inside a record, and doing it twice is doing it once. After an
unclean end no WAL is ever read: what counts is in the log, the rest was told to nobody.

Only the last record may be torn: it was told to nobody. Where a later one, a mark, a
later segment or a database file shows that a record had been on the disk, the log is
damaged, and the tree is refused as it is.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from culet.kernel.errors import StorageCorrupt

from .files import Folder
from .record import Claim, Entry, Logged, claims, record_at
from .template import PAGE, Templates

_REMEDY: Final = (
    "Nothing was changed. Restore the folder from a backup; "
    "`culet doctor` tells which other trees are sound."
)


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


_AS_IT_IS: Final = Image(None)  # of all files of which the log says nothing more


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
    return sorted(
        int(n[3:]) for n in names if n.startswith("log") and n[3:].isdecimal()
    )


class Log(NamedTuple):
    """What the segments of a folder hold."""

    chain: list[Logged]  # complete records, oldest first
    stops: dict[int, int]  # segment -> offset behind its last record that counts
    claims: list[tuple[int, Claim]]  # segment, what is said behind that offset


def read_log(folder: Folder) -> Log:
    """Read every segment.

    One that does not chain but begins at a higher lsn follows retired ones whose
    unlink was lost in part: what came before it is dropped.
    """
    log = Log([], {}, [])
    for number in segment_numbers(folder.names()):
        data, offset, old = folder.read(segment_name(number)), 0, False
        while (record := record_at(data, offset, number)) is not None:
            if log.chain and not _follows(record, log.chain[-1]):
                if offset or record.lsn <= log.chain[-1].lsn:
                    break
                log.chain.clear()
            log.chain.append(record)
            offset, old = record.end, record.synced < 0
        log.stops[number] = offset
        if not old:
            log.claims.extend((number, claim) for claim in claims(data, offset, number))
    return log


def _follows(record: Logged, other: Logged) -> bool:
    return record.lsn == other.lsn + 1 and record.previous == other.checksum


def judge(log: Log, where: str) -> None:
    """Raise `StorageCorrupt` where a record that had been on the disk is not there."""
    stops, last = log.stops, log.chain[-1] if log.chain else None
    epoch, lsn, top = (last.epoch, last.lsn, last.segment) if last else (0, 0, 0)
    for number, claim in log.claims:
        if claim.epoch >= epoch and claim.synced > lsn:
            raise _damaged(where, number, stops[number])
    if last is None:
        return
    begins = log.chain[0].segment
    for number in range(begins - 1, last.low - 1, -1):
        if number in stops:
            raise _damaged(where, number, stops[number])
    needed = [*range(last.low, begins), *range(top, max(stops))]
    for number in needed:
        if number not in stops:
            msg = f"segment {number} of the log in {where!r} is missing. {_REMEDY}"
            raise StorageCorrupt(msg)


def _damaged(where: str, number: int, offset: int) -> StorageCorrupt:
    return StorageCorrupt(
        f"the log of a tree is damaged: {where}/{segment_name(number)} cannot be read "
        f"at byte {offset}, and what was written later shows that it had been on the "
        f"disk. {_REMEDY}"
    )


def check_unborn(folder: Folder, names: list[str], templates: Templates) -> None:
    """Make sure that a folder whose log holds no record never had one.

    Before the first record no file of it holds more than its template.
    """
    for name in sorted(names):
        if name.endswith(".db") and not templates.may_become(folder.read(name)):
            msg = (
                f"the log of a tree is damaged: in {folder.path!r} it holds no record, "
                f"and yet {name} was written to. {_REMEDY}"
            )
            raise StorageCorrupt(msg)


def plan_redo(chain: list[Logged], names: list[str]) -> Redo:
    """Fold a chain into the last image of each live file. Reads and writes nothing."""
    top = max(segment_numbers(names), default=0)
    if not chain:
        return Redo({}, 0, 0, 0, top)
    last = chain[-1]
    live: dict[str, Image] | None = None
    for record in chain:
        if record.segment < last.low:
            continue
        for entry in record.entries():
            live = _apply(live, entry)
    return Redo(live or {}, last.epoch, last.lsn, last.checksum, top)


def _apply(live: dict[str, Image] | None, entry: Entry) -> dict[str, Image]:
    match entry:
        case ["M", names]:
            return dict.fromkeys(names, _AS_IT_IS) if live is None else live
        case ["C", name, template] if live is not None:
            live[name] = Image(template)
        case ["D", name] if live is not None:
            live.pop(name, None)
        case ["P", name, size, pages, images] if live is not None and name in live:
            image = live[name]
            if image is _AS_IT_IS:
                image = live[name] = Image(None)
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
    names = set(folder.names())
    written: list[str] = []
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
            written.append(name)
        folder.release(name)
    folder.sync_all(written)
    for name in names:
        if name.endswith("-wal") or (name.endswith(".db") and name not in plan.live):
            folder.unlink(name)
    folder.sync_folder()
