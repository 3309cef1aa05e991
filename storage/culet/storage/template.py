"""Database files are born from bytes: a hundred times faster than running the schema.

A log entry that says "created" names the template by its digest, and the bytes lie in
the store's folder before the first record says so: a newer version of this package,
with another schema, can still redo what an older one has logged.
"""

from __future__ import annotations

import hashlib
from typing import Final

import apsw

from culet.kernel.errors import StorageCorrupt

from . import schema
from .files import Files, Folder

PAGE: Final = 1024
_SECTOR: Final = 512
_WRITE_VERSION: Final = slice(18, 20)  # of the header: 1 is rollback journal, 2 is WAL
_USER_VERSION: Final = slice(60, 64)


def build(steps: tuple[str, ...], *, wal: bool) -> bytes:
    """Return an empty database after all `steps`, as bytes of a file."""
    connection = apsw.Connection(":memory:")
    connection.pragma("page_size", PAGE)
    for step in steps:
        connection.execute(step)
    connection.pragma("user_version", len(steps))
    image = bytearray(connection.serialize("main"))
    connection.close()
    image[_WRITE_VERSION] = b"\2\2" if wal else b"\1\1"
    return bytes(image)


def user_version(first_page: bytes) -> int:
    """Return the number of migration steps that a database has behind it."""
    return int.from_bytes(first_page[_USER_VERSION], "big")


class Templates:
    """The templates of one store: those of today, and all that its logs may name."""

    def __init__(self, files: Files, path: str) -> None:
        self._files = files
        self._path = path
        self._kept: dict[str, bytes] = {}
        self.tree = self._add(build(schema.TREE, wal=True))
        self.agent = self._add(build(schema.AGENT, wal=True))

    def _add(self, image: bytes) -> str:
        digest = hashlib.sha256(image).hexdigest()[:16]
        self._kept[digest] = image
        return digest

    def keep(self) -> None:
        """Write those of today to the folder, durably, unless they are there."""
        self._files.make_folders(self._path, sync=True)
        folder = self._files.folder(self._path)
        try:
            for digest in (self.tree, self.agent):
                name = f"{digest}.db"
                if folder.size(name) != len(self._kept[digest]):
                    folder.write(name, 0, self._kept[digest])
                    folder.sync(name)
                    folder.sync_folder()
        finally:
            folder.close()

    def bytes_of(self, digest: str) -> bytes:
        """Return the template with that digest, or raise `StorageCorrupt`."""
        if digest not in self._kept:
            image = self._load(Folder(self._files, self._path), digest)
            self._kept[digest] = image
        return self._kept[digest]

    def may_become(self, content: bytes) -> bool:
        """Whether a file is, wholly or in part, what one of the templates begins as.

        A cut leaves any of its sectors as zeros, and any number of them out.
        """
        for name in Folder(self._files, self._path).names():
            self.bytes_of(name.removesuffix(".db"))
        return any(_part_of(content, image) for image in self._kept.values())

    @staticmethod
    def _load(folder: Folder, digest: str) -> bytes:
        try:
            image = folder.read(f"{digest}.db")
        except FileNotFoundError:
            image = b""
        if hashlib.sha256(image).hexdigest()[:16] != digest:
            msg = f"the template {digest} that a log needs is missing or damaged"
            raise StorageCorrupt(msg)
        return image


def _part_of(content: bytes, image: bytes) -> bool:
    if len(content) > len(image):
        return False
    sectors = range(0, len(content), _SECTOR)
    return all(
        part == image[at : at + len(part)] or not any(part)
        for at in sectors
        for part in (content[at : at + _SECTOR],)
    )
