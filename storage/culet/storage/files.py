"""Every file operation of the store, in one place, so that a test can see each one.

`Files` names whole paths; a `Folder` is one directory whose files are named and
whose descriptors are kept. Before each operation the observer is told (operation,
path): it may count, raise `OSError`, or end the process.

A descriptor on a database file is closed only together with SQLite's own (closing
any of them drops the POSIX locks that SQLite holds), hence `release`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from culet.kernel.errors import StorageBusy

Observer = Callable[[str, str], None]
_READ_WRITE: Final = os.O_RDWR | os.O_CLOEXEC
_AT_ONCE: Final = 8  # files that are synced


def _sync(path: str) -> None:
    descriptor = os.open(path, _READ_WRITE)
    try:
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)


class Files:
    """The file operations of one store. `vfs` names the VFS that SQLite shall use."""

    def __init__(self, observer: Observer | None = None, *, vfs: str = "unix") -> None:
        self._observer = observer
        self.vfs = vfs

    def see(self, operation: str, path: str) -> None:
        """Tell the observer what is about to happen."""
        if self._observer is not None:
            self._observer(operation, path)

    def folder(self, path: str) -> Folder:
        """Return the folder at `path`, which must exist when it is used."""
        return Folder(self, path)

    def make_folders(self, path: str, *, sync: bool) -> None:
        """Make a folder and those above it that are missing; durable with `sync`."""
        if os.path.isdir(path):
            return
        above = os.path.dirname(path)
        self.make_folders(above, sync=sync)
        self.see("mkdir", path)
        os.makedirs(path, exist_ok=True)
        if sync:
            self.sync_folder(above)

    def sync_folder(self, path: str) -> None:
        """Make names that were made or removed in a folder durable."""
        self.see("sync-folder", path)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def lock(self, path: str) -> int:
        """Take the lock file and return its descriptor; `StorageBusy` if it is taken."""
        self.see("lock", path)
        descriptor = os.open(path, _READ_WRITE | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            msg = (
                f"another kernel has the folder {os.path.dirname(path)!r} open; "
                "stop it, or use another folder"
            )
            raise StorageBusy(msg) from error
        return descriptor

    def unlock(self, descriptor: int) -> None:
        """Give the lock up."""
        os.close(descriptor)

    def rename(self, old: str, new: str) -> None:
        """Move a folder, durably."""
        self.see("rename", old)
        os.rename(old, new)
        self.sync_folder(os.path.dirname(new))
        self.sync_folder(os.path.dirname(old))

    def remove_tree(self, path: str) -> None:
        """Remove a folder and all that is in it, if it exists; what it can of it."""
        self.see("remove-tree", path)
        shutil.rmtree(path, ignore_errors=True)


class _Handle:
    """One kept descriptor; `users` is how many threads are inside a call on it."""

    __slots__ = ("descriptor", "released", "users")

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.users = 0
        self.released = False


class Folder:
    """One directory. Methods may be called from the loop, the writer and the janitor."""

    def __init__(self, files: Files, path: str) -> None:
        self.files = files
        self.path = path
        self._handles: dict[str, _Handle] = {}
        self._lock = threading.Lock()

    def where(self, name: str) -> str:
        """Return the path of a file of this folder."""
        return f"{self.path}/{name}"

    def names(self) -> list[str]:
        """Return the names of all files here."""
        return os.listdir(self.path)

    def size(self, name: str) -> int:
        """Return the length of a file, 0 if there is none."""
        try:
            return os.stat(self.where(name)).st_size
        except FileNotFoundError:
            return 0

    def read(self, name: str) -> bytes:
        """Return a whole file."""
        self.files.see("read", self.where(name))
        with open(self.where(name), "rb") as file:
            return file.read()

    def pread(self, name: str, size: int, offset: int) -> bytes:
        """Return `size` bytes at `offset`, fewer at the end of the file."""
        self.files.see("read", self.where(name))
        handle = self._take(name, create=False)
        try:
            return os.pread(handle.descriptor, size, offset)
        finally:
            self._give(handle)

    def write(self, name: str, offset: int, data: bytes) -> None:
        """Write all of `data` at `offset`; the file is made if it is missing."""
        self.files.see("write", self.where(name))
        handle = self._take(name, create=True)
        try:
            view, done = memoryview(data), 0
            while done < len(view):
                done += os.pwrite(handle.descriptor, view[done:], offset + done)
        finally:
            self._give(handle)

    def truncate(self, name: str, size: int) -> None:
        """Cut a file to `size`, or extend it; it is made if it is missing."""
        self.files.see("truncate", self.where(name))
        handle = self._take(name, create=True)
        try:
            os.ftruncate(handle.descriptor, size)
        finally:
            self._give(handle)

    def sync(self, name: str) -> None:
        """Make the content of a file durable."""
        self.files.see("sync", self.where(name))
        handle = self._take(name, create=False)
        try:
            os.fdatasync(handle.descriptor)
        finally:
            self._give(handle)

    def sync_all(self, names: Sequence[str]) -> None:
        """Make the content of many files durable; raises what the first failure is.

        Several at once: one after the other, each waits for a turn of the disk's own. Only
        while SQLite has none of them open, whose locks this would drop.
        """
        paths = [self.where(name) for name in names]
        for path in paths:
            self.files.see("sync", path)
        if not paths:
            return
        with ThreadPoolExecutor(min(_AT_ONCE, len(paths))) as pool:
            for _ in pool.map(_sync, paths):
                pass

    def sync_folder(self) -> None:
        """Make names that were made or removed here durable."""
        self.files.sync_folder(self.path)

    def unlink(self, name: str) -> None:
        """Remove a file, if it exists."""
        self.release(name)
        self.files.see("unlink", self.where(name))
        try:
            os.unlink(self.where(name))
        except FileNotFoundError:
            return

    def release(self, name: str) -> None:
        """Close the kept descriptor of a file, as soon as nobody is using it."""
        with self._lock:
            handle = self._handles.pop(name, None)
            if handle is not None:
                handle.released = True
                if not handle.users:
                    os.close(handle.descriptor)

    def close(self) -> None:
        """Close all kept descriptors."""
        for name in list(self._handles):
            self.release(name)

    def open(self, name: str, *, create: bool) -> int:
        """Open a file for `_take`. Here so that a test may note what is made."""
        self.files.see("open", self.where(name))
        flags = _READ_WRITE | (os.O_CREAT if create else 0)
        return os.open(self.where(name), flags, 0o644)

    def _take(self, name: str, *, create: bool) -> _Handle:
        with self._lock:
            handle = self._handles.get(name)
            if handle is None:
                handle = _Handle(self.open(name, create=create))
                self._handles[name] = handle
            handle.users += 1
            return handle

    def _give(self, handle: _Handle) -> None:
        with self._lock:
            handle.users -= 1
            if handle.released and not handle.users:
                os.close(handle.descriptor)
