"""The stores: SQLite files joined by a tree log, and the same in memory."""

from __future__ import annotations

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
