"""A folder of many trees, for one kernel at a time.

DIR/lock                      an OS lock for as long as the store is open
DIR/roots.db                  the host index
DIR/templates/<digest>.db     what new files are born from
DIR/roots/ab/cd/<hash>/       one tree: tree.db, <slot>.db, log segments
DIR/dropped/<hash>/           a tree that is being removed; the next open finishes it
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Final

from culet.kernel.core.limits import Limits
from culet.kernel.errors import (
    NotFound,
    StorageBusy,
    StorageCorrupt,
    StorageError,
    UsageError,
)
from culet.kernel.ports import Level, RootEntry, TreeKey

from .agentfile import EmptyDatabase
from .errors import CAUGHT, storage_error
from .files import Files
from .hostindex import HostIndex, open_index
from .template import Templates
from .treefile import OpenFiles, SqliteTree

_DROPPED: Final = ".dropped"  # former versions: a folder that is being removed
_ROOT: Final = (
    "SELECT class, name FROM main.node WHERE parent IS NULL AND state = 'live'"
)
# Holds of a former life are void, so a held job counts as due.
_DUE: Final = "SELECT min(due_at) FROM main.job WHERE dead = 0 AND paused = 0"


def folder_of(directory: str, key: TreeKey) -> str:
    """Return the folder of a tree: hashed, so that no name can be a path."""
    text = f"{key.class_name}\0{key.name}".encode("utf-8", "surrogatepass")
    digest = hashlib.sha256(text).hexdigest()[:40]
    return f"{directory}/roots/{digest[:2]}/{digest[2:4]}/{digest}"


def tree_folders(directory: str) -> Iterator[str]:
    """Return the folders of all trees, also of those that are being removed."""
    top = f"{directory}/roots"
    for first in _children(top):
        for second in _children(first):
            yield from _children(second)


def dropped(path: str) -> bool:
    """Whether the folder of a tree is one that is being removed."""
    return path.endswith(_DROPPED)


def _children(path: str) -> list[str]:
    if not os.path.isdir(path):
        return []
    return sorted(entry.path for entry in os.scandir(path) if entry.is_dir())


class SqliteStore:
    """The port `Store` over a folder."""

    def __init__(self, directory: str, *, limits: Limits, files: Files) -> None:
        self.directory = os.path.abspath(directory)
        self._limits = limits
        self._files = files
        self._lock: int | None = None
        self._guard = threading.Lock()  # trees may be opened on worker threads
        self._trees: dict[TreeKey, SqliteTree | None] = {}
        self._open_files = OpenFiles(limits)
        self._templates: Templates
        self._empty: EmptyDatabase
        self._index: HostIndex

    def open(self) -> None:
        """Take the lock; make the folder and rebuild the index where they are missing."""
        if self._lock is not None:
            msg = f"the folder {self.directory!r} is open already"
            raise StorageBusy(msg)
        try:
            self._files.make_folders(self.directory, sync=True)
            self._lock = self._files.lock(f"{self.directory}/lock")
            self._templates = Templates(self._files, f"{self.directory}/templates")
            self._templates.keep()
            self._files.remove_tree(f"{self.directory}/dropped")
            self._empty = EmptyDatabase(self._limits)
            self._index = self._open_index()
        except BaseException as error:
            self._unlock()
            if isinstance(error, CAUGHT):
                raise storage_error(error) from error
            raise

    def open_tree(
        self, key: TreeKey, *, level: Level, create: bool = True
    ) -> SqliteTree:
        """Recover and open one tree. Blocks for some milliseconds."""
        self._reserve(key)
        try:
            tree = self._open_folder(folder_of(self.directory, key), key, level, create)
        except BaseException:
            self._forget(key)
            raise
        with self._guard:
            self._trees[key] = tree
        return tree

    def _reserve(self, key: TreeKey) -> None:
        if self._lock is None:
            msg = f"the store {self.directory!r} is not open"
            raise StorageError(msg)
        with self._guard:
            if key in self._trees:
                msg = f"the tree {key.class_name}/{key.name} is open already"
                raise StorageBusy(msg)
            self._trees[key] = None

    def _forget(self, key: TreeKey) -> None:
        with self._guard:
            self._trees.pop(key, None)

    def _open_folder(
        self, path: str, key: TreeKey | None, level: Level, create: bool
    ) -> SqliteTree:
        missing = (
            NotFound(f"no tree in {path!r}") if key is None else NotFound(str(key))
        )
        if not os.path.isdir(path):
            if not create:
                raise missing
            try:
                self._files.make_folders(path, sync=level == "power")
            except CAUGHT as error:
                raise storage_error(error) from error
        tree = SqliteTree(
            self._files.folder(path),
            templates=self._templates,
            level=level,
            limits=self._limits,
            empty=self._empty,
            open_files=self._open_files,
            closed=lambda _tree: None if key is None else self._forget(key),
        )
        if tree.created and not create:
            tree.close()
            raise missing
        return tree

    def drop_tree(self, key: TreeKey) -> None:
        """Remove a closed tree, for good. A crash on the way leaves all or nothing."""
        self._reserve(key)
        try:
            path = folder_of(self.directory, key)
            graves = f"{self.directory}/dropped"
            grave = f"{graves}/{os.path.basename(path)}"
            self._files.remove_tree(grave)
            if os.path.isdir(path):
                self._files.make_folders(graves, sync=True)
                self._files.rename(path, grave)
            self._index.drop(key)
            self._files.remove_tree(grave)
        except CAUGHT as error:
            raise storage_error(error) from error
        finally:
            self._forget(key)

    # --- the index

    def roots(self) -> list[RootEntry]:
        """Return the host index. Blocks."""
        return self._index.all()

    def note_root(self, key: TreeKey, due_at: int | None) -> None:
        """Write one line of the host index, durable when it returns. Blocks."""
        self._index.note(key, due_at)

    def _open_index(self) -> HostIndex:
        path, busy_s = f"{self.directory}/roots.db", self._limits.busy_s
        try:
            index = open_index(path, vfs=self._files.vfs, busy_s=busy_s)
        except StorageCorrupt:  # the trees know all of it
            folder = self._files.folder(self.directory)
            for end in ("", "-wal", "-shm"):
                folder.unlink("roots.db" + end)
            index = open_index(path, vfs=self._files.vfs, busy_s=busy_s)
        if index.new:
            try:
                index.fill(
                    [e for p in tree_folders(self.directory) for e in self._ask(p)]
                )
            except BaseException:
                index.close()
                raise
        return index

    def _ask(self, path: str) -> list[RootEntry]:
        """Ask one tree who it is. Recovery opens it: SQLite alone would destroy it."""
        if dropped(path):
            self._files.remove_tree(path)
            return []
        tree = self._open_folder(path, None, "power", create=True)
        try:
            root = tree.tree.execute(_ROOT)
            [(due_at,)] = tree.tree.execute(_DUE)
        finally:
            tree.close()
        return [RootEntry(TreeKey(c, n), due_at) for c, n in root]

    def close(self) -> None:
        """Close every tree and give up the lock, whatever fails on the way."""
        if self._lock is None:
            return
        with ExitStack() as stack:
            stack.callback(self._unlock)
            stack.callback(self._empty.close)
            stack.callback(self._index.close)
            for tree in self._trees.values():
                if tree is not None:
                    stack.callback(tree.close)

    def _unlock(self) -> None:
        if self._lock is not None:
            self._files.unlock(self._lock)
            self._lock = None


def open_sqlite(
    url_rest: str, *, limits: Limits, files: Files | None = None
) -> SqliteStore:
    """Return the store of `sqlite:DIR`. Nothing is touched before `open`."""
    if not url_rest or "\0" in url_rest:
        msg = "a sqlite: store needs a folder, as in sqlite:./data"
        raise UsageError(msg)
    return SqliteStore(url_rest, limits=limits, files=files or Files())
