"""The quota of one tree: how much room its files may take together.

A write costs nothing: the sizes are noted with each record, and SQLite itself refuses
what is beyond `max_page_count`. Far from the bound that is the bound of each file. Near
it, a file that has grown may take what was left at its last record, and where nothing is
left no file may grow: free pages inside it are used still. So one file alone never passes
the bound, many at once by what they write between two records. `tree.db` is counted and
never refused: cancel, abort and delete need it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import apsw

from culet.kernel.core.limits import Limits
from culet.kernel.errors import StorageError, StorageFull

from .template import PAGE


class Holder(Protocol):
    """A database of the tree that may be open."""

    connection: apsw.Connection | None


class TreeQuota:
    """Pages of the files of one tree, and what each of them may still take."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.total = 0
        self._most = max(limits.tree_bytes // PAGE, 1)
        self._pages: dict[str, int] = {}
        self._shut = False  # nothing is left, and every open file knows

    @property
    def left(self) -> int:
        """Pages that all files together may still take."""
        return max(self._most - self.total, 0)

    def note(self, name: str, pages: int) -> None:
        """That file has so many pages."""
        self.total += pages - self._pages.get(name, 0)
        self._pages[name] = pages

    def drop(self, name: str) -> None:
        """That file is gone."""
        self.total -= self._pages.pop(name, 0)

    def make(self, name: str, pages: int) -> None:
        """A file of so many pages is about to be made; raise `StorageFull` if it may not."""
        if pages > self.left:
            raise StorageFull(self._text("a new file does not fit"))
        self.note(name, pages)

    def bind(self, connection: apsw.Connection) -> None:
        """Tell SQLite how large that file may get."""
        own = int(connection.pragma("page_count"))
        cap = min(self.limits.database_pages, own + self.left)
        connection.pragma("max_page_count", max(cap, 1))

    def settle(
        self, grown: Iterable[Holder], opened: Callable[[], Iterable[Holder]]
    ) -> None:
        """After a record: bind the files that it held, or all where all is changed."""
        shut = self.left == 0
        if shut != self._shut:
            self._shut = shut
            grown = opened()
        elif shut or self.left >= self.limits.database_pages:
            return
        for holder in grown:
            if holder.connection is not None:
                self.bind(holder.connection)

    def explain(self, error: StorageError, connection: apsw.Connection) -> StorageError:
        """Return an error that names the bound, where a bound may have been reached."""
        if not isinstance(error, StorageFull):
            return error
        own = int(connection.pragma("page_count"))
        cap = int(connection.pragma("max_page_count"))
        if self.left == 0:
            return StorageFull(self._text(str(error)))
        most = self.limits.database_pages
        file = f"it has {own} pages of {PAGE} bytes (limits.database_pages = {most})"
        if own >= most:
            return StorageFull(
                f"the file of this agent is full: {file}; "
                "delete rows, or raise the limit"
            )
        return StorageFull(
            f"no room in the file of this agent ({error}): {file} and may have {cap}, "
            f"its tree has {self.total * PAGE} bytes (limits.tree_bytes = "
            f"{self.limits.tree_bytes}); delete rows or facets, raise the limit that is "
            "near, or look at the disk"
        )

    def _text(self, what: str) -> str:
        return (
            f"the tree is full ({what}): its files have {self.total * PAGE} bytes "
            f"(limits.tree_bytes = {self.limits.tree_bytes}); delete facets or rows, "
            "or raise the limit"
        )
