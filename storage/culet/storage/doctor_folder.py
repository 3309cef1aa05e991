"""Look at a folder of trees without touching it. Standard library only.

The folder is never opened through SQLite: one SELECT would checkpoint and delete the
WAL of a crashed life. The doctor takes the lock, builds in a temporary folder what a
recovery would make of each tree, and asks that.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from . import doctor_log as log
from . import doctor_places as places
from . import doctor_rules as rules

_DROPPED: Final = ".dropped"  # a tree that is being removed
_ROOT: Final = "SELECT class, name, state FROM node WHERE parent IS NULL LIMIT 1"
_SLOTS: Final = "SELECT slot FROM node"
_DUE: Final = "SELECT min(due_at) FROM job WHERE dead = 0 AND paused = 0"


@dataclass(frozen=True, kw_only=True)
class TreeReport:
    """What was found in one tree. `root` is class/name, None if it cannot be told.

    `problems` are sentences about what must not be; `notes` about what may be.
    """

    folder: str
    root: str | None
    nodes: int
    files: int
    records: int  # lsn of the last one in the log
    problems: list[str]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was found in a folder."""

    directory: str
    trees: list[TreeReport]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not any(tree.problems for tree in self.trees)


def look(directory: str, *, as_found: bool = False) -> Report:
    """Look at every tree of a folder; with `as_found` also at what recovery will mend.

    Blocks. Raises `FileNotFoundError` if it is no store, `BlockingIOError` while a
    kernel has it open.
    """
    with held(directory) as directory:
        index = _read_index(directory)
        return Report(
            directory=directory,
            trees=[
                _look_at_tree(path, f"{directory}/templates", index, as_found)
                for path in trees_in(directory)
            ],
        )


@contextmanager
def held(directory: str) -> Iterator[str]:
    """Keep kernels out of a folder; gives its absolute path.

    Raises `FileNotFoundError` if it is no store, `BlockingIOError` while a kernel has it.
    """
    directory = os.path.abspath(directory)
    if not os.path.isdir(f"{directory}/roots") and not os.path.exists(
        f"{directory}/lock"
    ):
        msg = f"{directory!r} is not a folder of Culet"
        raise FileNotFoundError(msg)
    with _locked(directory):
        yield directory


@contextmanager
def _locked(directory: str) -> Iterator[None]:
    """Keep kernels out meanwhile. A folder without a lock file was never open."""
    path = f"{directory}/lock"
    if not os.path.exists(path):
        yield
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            msg = f"a kernel has the folder {directory!r} open; stop it, or look at a copy"
            raise BlockingIOError(msg) from error
        yield
    finally:
        os.close(descriptor)


def trees_in(directory: str) -> list[str]:
    """Return the folders of all trees but those that are being removed."""
    level = [f"{directory}/roots"]
    for _ in range(3):
        level = [
            entry.path
            for path in level
            if os.path.isdir(path)
            for entry in os.scandir(path)
            if entry.is_dir()
        ]
    return sorted(path for path in level if not path.endswith(_DROPPED))


def _read_index(directory: str) -> dict[tuple[str, str], int | None] | None:
    """Return when each root is due by the host index, None without a whole one.

    It may be lost: the next open makes it anew.
    """
    with tempfile.TemporaryDirectory(prefix="culet-doctor-") as place:
        for name in ("roots.db", "roots.db-wal"):
            if os.path.exists(f"{directory}/{name}"):
                shutil.copyfile(f"{directory}/{name}", f"{place}/{name}")
        try:
            connection = sqlite3.connect(f"{place}/roots.db")
            try:
                rows = connection.execute("SELECT class, name, due_at FROM root")
                return {(c, n): due for c, n, due in rows}
            finally:
                connection.close()
        except sqlite3.DatabaseError:
            return None


def _look_at_tree(
    path: str,
    templates: str,
    index: dict[tuple[str, str], int | None] | None,
    as_found: bool,
) -> TreeReport:
    with tempfile.TemporaryDirectory(prefix="culet-doctor-") as place:
        tree = _Tree(path, templates, place, index)
        try:
            tree.look(as_found)
        except log.LogError as error:
            tree.problems.append(str(error))
        except OSError as error:
            tree.problems.append(f"It cannot be read: {error}.")
        return tree.report()


class _Tree:
    """One tree while it is looked at."""

    def __init__(
        self,
        path: str,
        templates: str,
        place: str,
        index: dict[tuple[str, str], int | None] | None,
    ) -> None:
        self.path, self.templates, self.place = path, templates, place
        self.index = index
        self.root: tuple[str, str] | None = None
        self.slots: set[str] = set()
        self.live: dict[str, log.FileImage] = {}
        self.lsn = 0
        self.stored: dict[str, dict[str, int]] = {}
        self.spans: dict[str, places.Spans] = {}
        self.unread: set[str] = set()  # files that could not be asked
        self.problems: list[str] = []
        self.notes: list[str] = []

    def report(self) -> TreeReport:
        return TreeReport(
            folder=self.path,
            root=None if self.root is None else "/".join(self.root),
            nodes=len(self.slots),
            files=len(self.live),
            records=self.lsn,
            problems=self.problems,
            notes=self.notes,
        )

    def look(self, as_found: bool) -> None:
        found = log.read_log(self.path)
        self.lsn = found.lsn
        if as_found:
            self.notes += _describe_log(found)
        self.live = log.fold(found)
        if not found.records:
            self._look_at_nothing()
            return
        if log.TREE_DB not in self.live:
            self.problems.append(f"The log knows no {log.TREE_DB}.")
            return
        self._build()
        if as_found:
            self._describe_files()
        for name in sorted(self.live.keys() - self.unread - {log.TREE_DB}):
            self._look_at_agent(name)
        if log.TREE_DB not in self.unread:
            self._ask(log.TREE_DB, self._look_at_rows)

    def _look_at_nothing(self) -> None:
        """Before the first record no file holds more than its template."""
        written = grown(self.path, self.templates)
        if written:
            names = ", ".join(sorted(written))
            self.problems.append(
                f"The log holds no record, and yet something was written to {names}. "
                "Restore the folder of this tree from a backup."
            )
        else:
            self.notes.append("It was just being made: its log holds no record yet.")

    def _build(self) -> None:
        for name, image in self.live.items():
            try:
                log.build(self.path, image, name, self.templates, self.place)
            except log.LogError as error:
                self.problems.append(str(error))
                self.unread.add(name)

    def _look_at_agent(self, name: str) -> None:
        def ask(connection: sqlite3.Connection) -> None:
            self._tell(name, rules.check_file(connection, tree=False))
            self.stored[name.removesuffix(".db")] = rules.lengths(connection)
            self.spans[name.removesuffix(".db")] = places.spans(connection)

        self._ask(name, ask)

    def _look_at_rows(self, connection: sqlite3.Connection) -> None:
        self.slots = {str(slot) for (slot,) in connection.execute(_SLOTS)}
        agents = {n.removesuffix(".db") for n in self.live if n != log.TREE_DB}
        self.problems += [
            f"There is a file without a node: {slot}.db."
            for slot in sorted(agents - self.slots)
        ]
        found = connection.execute(_ROOT).fetchone()
        if found is not None:
            self.root = found[0], found[1]
            if found[2] == "gone":
                self.notes.append("It is being destroyed: the next open removes it.")
                return
        self._tell(log.TREE_DB, rules.check_file(connection, tree=True))
        unknown = {n.removesuffix(".db") for n in self.unread}
        self.problems += rules.check_ends(connection, self.stored, unknown)
        self.problems += places.check_spans(connection, self.spans)
        self._look_at_due(connection.execute(_DUE).fetchone()[0])

    def _look_at_due(self, due: int | None) -> None:
        """A root that owes something must be in the host index in time, or it sleeps on."""
        if self.index is None or self.root is None or due is None:
            return
        noted = self.index.get(self.root)
        if noted is None or noted > due:
            self.problems.append(
                f"It is due at {due}, the host index wakes it at {noted or 'no time'}."
            )

    def _ask(self, name: str, ask: Callable[[sqlite3.Connection], None]) -> None:
        try:
            with rules.opened(f"{self.place}/{name}") as connection:
                ask(connection)
        except rules.TooNew as error:
            self.unread.add(name)
            self.notes.append(f"{name} was not looked at: {error}")
        except sqlite3.DatabaseError as error:
            self.unread.add(name)
            self.problems.append(f"{name}: SQLite says: {error}.")

    def _tell(self, name: str, problems: list[str]) -> None:
        self.problems += [f"{name}: {problem}" for problem in problems]

    def _describe_files(self) -> None:
        """Note what the files are before recovery, and what it will make of them."""
        for entry in sorted(_entries(self.path), key=lambda e: e.name):
            if entry.name.endswith(".db") and entry.name not in self.live:
                self.notes.append(f"{entry.name} is left over; recovery removes it.")
            elif entry.name.endswith("-wal") and entry.stat().st_size:
                self.notes.append(
                    f"{entry.name} has {entry.stat().st_size} bytes; recovery takes "
                    "what counts from the log and removes it."
                )
        for name in sorted(self.live.keys() - self.unread):
            pages = log.changed_pages(self.path, name, self.place)
            if pages:
                self.notes.append(f"{name}: recovery brings {pages} pages up to date.")


def grown(path: str, templates: str) -> list[str]:
    """Return the databases of a tree that hold more than they are born from."""
    births = [Path(entry.path).read_bytes() for entry in _entries(templates)]
    return [
        entry.name
        for entry in _entries(path)
        if entry.name.endswith(".db")
        and not log.may_become(Path(entry.path).read_bytes(), births)
    ]


def _entries(path: str) -> list[os.DirEntry[str]]:
    return list(os.scandir(path)) if os.path.isdir(path) else []


def _describe_log(found: log.Log) -> list[str]:
    counts = (
        f"The log has {len(found.segments)} segments with {len(found.records)} whole "
        f"records, the last one is number {found.lsn}."
    )
    return [counts] + [
        f"{os.path.basename(path)} ends in bytes that do not count: "
        "a record that was cut, or an old one."
        for path in found.torn
    ]
