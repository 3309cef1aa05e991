"""The stores: SQLite files joined by a tree log, and the same in memory.

Names are loaded when they are asked for: the doctor of this package must start where
no library is installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from .doctor import Report as Report
    from .doctor import TreeReport as TreeReport
    from .doctor import examine as examine
    from .files import Files as Files
    from .files import Folder as Folder
    from .files import Observer as Observer
    from .memory import MemoryStore as MemoryStore
    from .memory import open_memory as open_memory
    from .store import SqliteStore as SqliteStore
    from .store import open_sqlite as open_sqlite

_HOMES: Final = {
    "Files": "files",
    "Folder": "files",
    "MemoryStore": "memory",
    "Observer": "files",
    "Report": "doctor",
    "SqliteStore": "store",
    "TreeReport": "doctor",
    "examine": "doctor",
    "open_memory": "memory",
    "open_sqlite": "store",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
