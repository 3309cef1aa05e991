"""Examine a folder without touching it: what `culet doctor DIR` stands on.

The folder is never opened through SQLite: one SELECT would checkpoint and delete the
WAL of a crashed life. The doctor takes the lock, copies each tree, applies the log to
the copy with its own reader, and asks the copy.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from typing import Final

import apsw
import msgspec

from culet.kernel.errors import CuletError, NotFound

from .errors import CAUGHT, storage_error
from .files import Files
from .log import plan_redo, read_chain, redo
from .schema import AGENT, TREE
from .store import dropped, tree_folders
from .template import Templates
from .treefile import TREE_FILE

_ROOT: Final = "SELECT class || '/' || name FROM node WHERE parent IS NULL LIMIT 1"
_SLOTS: Final = "SELECT slot FROM node"

# Each finds what must not be, as one text a row. Columns are always qualified: a bare
# `what = id` inside a subquery would quietly mean the job's own id.
_CHECKS: Final[tuple[tuple[str, str], ...]] = (
    (
        "a running run without exactly one turn job",
        """
        SELECT run.owner || ' ' || run.id FROM run
        WHERE run.status = 'running' AND 1 <> (
          SELECT count(*) FROM job
          WHERE job.kind = 'turn' AND job.owner = run.child AND job.what = run.id)
        """,
    ),
    (
        "a running fiber without exactly one job",
        """
        SELECT fiber.owner || ' ' || fiber.id FROM fiber
        WHERE fiber.status = 'running' AND 1 <> (
          SELECT count(*) FROM job
          WHERE job.kind IN ('fiber', 'turn')
            AND job.owner = fiber.owner AND job.what = fiber.id)
        """,
    ),
    (
        "a fiber or turn job with nothing unfinished",
        """
        SELECT job.kind || ' ' || job.owner || ' ' || job.what FROM job
        WHERE job.kind IN ('fiber', 'turn') AND NOT EXISTS (
          SELECT 1 FROM fiber
          WHERE fiber.owner = job.owner AND fiber.id = job.what
            AND fiber.status = 'running')
        AND NOT EXISTS (
          SELECT 1 FROM run
          WHERE run.child = job.owner AND run.id = job.what AND run.status = 'running')
        """,
    ),
    (
        "a job without a live owner",
        """
        SELECT job.kind || ' ' || job.owner || ' ' || job.what FROM job
        WHERE job.kind <> 'wipe' AND NOT EXISTS (
          SELECT 1 FROM node WHERE node.slot = job.owner AND node.state = 'live')
        """,
    ),
    (
        "a gone node that no wipe covers",
        """
        WITH RECURSIVE covered (slot) AS (
          SELECT job.what FROM job WHERE job.kind = 'wipe'
          UNION
          SELECT node.slot FROM node JOIN covered ON node.parent = covered.slot)
        SELECT node.slot FROM node
        WHERE node.state = 'gone' AND node.slot NOT IN (SELECT covered.slot FROM covered)
        """,
    ),
    (
        "a live node under a gone or missing one",
        """
        SELECT child.slot FROM node AS child
        LEFT JOIN node AS parent ON parent.slot = child.parent
        WHERE child.parent IS NOT NULL AND child.state = 'live'
          AND parent.state IS NOT 'live'
        """,
    ),
)


class TreeReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was found in one tree. `root` is class/name, None if it cannot be told."""

    folder: str
    root: str | None
    nodes: int
    files: int
    records: int  # lsn of the last one in the log
    problems: list[str]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What was found in a folder."""

    directory: str
    trees: list[TreeReport]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not any(tree.problems for tree in self.trees)


def examine(directory: str, *, files: Files | None = None) -> Report:
    """Examine every tree of a folder. Blocks.

    Raises `NotFound` if it is no store, `StorageBusy` while a kernel has it open.
    """
    directory, files = os.path.abspath(directory), files or Files()
    if not os.path.isdir(f"{directory}/roots") and not os.path.exists(
        f"{directory}/lock"
    ):
        msg = f"{directory!r} is not a folder of Culet"
        raise NotFound(msg)
    lock = files.lock(f"{directory}/lock")
    try:
        templates = Templates(files, f"{directory}/templates")
        folders = [path for path in tree_folders(directory) if not dropped(path)]
        return Report(
            directory=directory,
            trees=[_examine_copy(files, path, templates) for path in folders],
        )
    finally:
        files.unlock(lock)


def _examine_copy(files: Files, path: str, templates: Templates) -> TreeReport:
    with tempfile.TemporaryDirectory(prefix="culet-doctor-") as place:
        copy = f"{place}/tree"
        try:
            shutil.copytree(path, copy)
            return _examine_tree(files, path, copy, templates)
        except CAUGHT as error:
            return _broken(path, str(storage_error(error)))
        except CuletError as error:
            return _broken(path, f"{type(error).__name__}: {error}")


def _broken(path: str, problem: str) -> TreeReport:
    return TreeReport(
        folder=path, root=None, nodes=0, files=0, records=0, problems=[problem]
    )


def _examine_tree(
    files: Files, path: str, copy: str, templates: Templates
) -> TreeReport:
    folder = files.folder(copy)
    try:
        plan = plan_redo(read_chain(folder), folder.names())
        redo(folder, plan, templates)
    finally:
        folder.close()
    if TREE_FILE not in plan.live:
        why = (
            f"the log knows no {TREE_FILE}" if plan.live else "the log holds no record"
        )
        return _broken(path, why)
    problems: list[str] = []
    root: str | None = None
    slots: set[str] = set()
    for name in sorted(plan.live):
        flags = apsw.SQLITE_OPEN_READWRITE
        connection = apsw.Connection(f"{copy}/{name}", flags=flags)
        try:
            problems += _examine_file(connection, name)
            if name == TREE_FILE:
                found = connection.execute(_ROOT).fetchall()
                root = str(found[0][0]) if found else None
                slots = {str(row[0]) for row in connection.execute(_SLOTS)}
                problems += _examine_rows(connection)
        except CAUGHT as error:
            problems.append(f"{name}: {storage_error(error)}")
        finally:
            connection.close(True)
    agents = {name.removesuffix(".db") for name in plan.live if name != TREE_FILE}
    problems += [f"a file without a node: {slot}" for slot in sorted(agents - slots)]
    return TreeReport(
        folder=path,
        root=root,
        nodes=len(slots),
        files=len(plan.live),
        records=plan.lsn,
        problems=problems,
    )


def _examine_file(connection: apsw.Connection, name: str) -> list[str]:
    problems = [
        f"{name}: {text}"
        for (text,) in connection.execute("PRAGMA integrity_check")
        if text != "ok"
    ]
    version = connection.pragma("user_version")
    steps = TREE if name == TREE_FILE else AGENT
    if version > len(steps):
        problems.append(f"{name}: schema {version} is newer than {len(steps)}")
    return problems


def _examine_rows(connection: apsw.Connection) -> list[str]:
    return [
        f"{what}: {text}"
        for what, sql in _CHECKS
        for (text,) in connection.execute(sql).fetchall()
    ]
