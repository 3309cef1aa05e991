"""`culet tree DIR` and `culet runs DIR`: what is in a folder that nobody has open; with
`culet tree DIR --due 24h` what it owes until then, and why each fires when it does.

Read as the doctor reads, from a copy that is built of the log, never through SQLite in
the folder itself; one tree after the other, so that a folder of any size takes the room
of its largest `tree.db`. While a kernel has the folder it is refused.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TextIO

import msgspec

from culet.kernel.clock import SystemClock
from culet.kernel.core.path import path_text
from culet.kernel.core.upcoming import (
    OWED_COLUMNS,
    OwedRow,
    Upcoming,
    describe,
    explain,
)

from . import doctor_log as log
from . import doctor_rules as rules
from .doctor import CANNOT_LOOK, SOUND, WRONG, printable
from .doctor_folder import grown, held, trees_in

_ROOT: Final = "SELECT class, name, state FROM node WHERE parent IS NULL LIMIT 1"
_NODES: Final = (
    "SELECT slot, parent, class, name, created_at,"
    " (SELECT count(*) FROM job WHERE owner = slot),"
    " (SELECT count(*) FROM job WHERE owner = slot AND dead = 1),"
    " (SELECT min(due_at) FROM job WHERE owner = slot AND dead = 0 AND paused = 0),"
    " (SELECT count(*) FROM run WHERE owner = slot AND status = 'running')"
    " FROM node WHERE state = 'live' ORDER BY born"
)
_DUE: Final = (
    f"SELECT {OWED_COLUMNS} FROM job WHERE dead = 0 AND due_at <= ? ORDER BY due_at, id"
)
_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION: Final = re.compile(r"(\d{1,6}(?:\.\d{1,6})?)([smhd])", re.ASCII)
_PATHS: Final = "SELECT slot, parent, class, name FROM node ORDER BY born"
_RUNS: Final = (
    "SELECT owner, id, class, status, reason, error, n, started_at, completed_at"
    " FROM run WHERE ?1 IS NULL OR status = ?1 ORDER BY born"
)
STATUSES: Final = ("running", "completed", "error", "aborted", "interrupted")


class Unreadable(Exception):
    """One tree cannot be read; the doctor tells more of it."""


class _Tree:
    """One tree while it is read: a copy of its `tree.db`, and how large its files are."""

    def __init__(self, connection: sqlite3.Connection, sizes: dict[str, int]) -> None:
        self.connection, self.sizes = connection, sizes
        self.root: tuple[str, str] | None = None
        found = connection.execute(_ROOT).fetchone()
        if found is not None and found[2] == "live":
            self.root = found[0], found[1]

    def nodes(self) -> Iterator[dict[str, Any]]:
        """Yield a row for each agent, the oldest first, so parents before children."""
        paths: dict[str, str] = {}
        depths: dict[str | None, int] = {}
        for found in self.connection.execute(_NODES):
            slot, parent, class_name, name, created_at, jobs, dead, due_at, runs = found
            paths[slot] = _path(paths, parent, class_name, name)
            depths[slot] = depths.get(parent, 0) + 1
            yield {
                "path": paths[slot],
                "class_name": class_name,
                "name": name,
                "depth": depths[slot],
                "slot": slot,
                "created_at": created_at,
                "runs": runs,
                "jobs": jobs,
                "dead_jobs": dead,
                "due_at": due_at,
                "bytes": self.sizes.get(slot, 0),
            }

    def due(self, until: int) -> Iterator[dict[str, Any]]:
        """Yield what is owed until then (epoch ms), the earliest first, and why then.

        Nobody has the folder: what a life held when it ended is tried again.
        """
        paths = self._paths()
        for found in self.connection.execute(_DUE, (until,)):
            row = OwedRow(*found)._replace(held=None)
            yield msgspec.to_builtins(explain(row, paths.get(row.owner, row.owner)))

    def _paths(self) -> dict[str, str]:
        paths: dict[str, str] = {}
        for slot, parent, class_name, name in self.connection.execute(_PATHS):
            paths[slot] = _path(paths, parent, class_name, name)
        return paths

    def runs(self, status: str | None) -> Iterator[dict[str, Any]]:
        """Yield a row for each run, the oldest first."""
        paths = self._paths()
        for found in self.connection.execute(_RUNS, (status,)):
            owner, run_id, class_name, state, reason, error, n, began, ended = found
            yield {
                "owner": paths.get(owner, owner),
                "run_id": run_id,
                "agent_type": class_name,
                "status": state,
                "reason": reason,
                "error": error,
                "n": n,
                "started_at": began,
                "completed_at": ended,
            }


def _path(paths: dict[str, str], parent: str | None, class_name: str, name: str) -> str:
    step = path_text([(class_name, name)])
    return step if parent is None else f"{paths.get(parent, '?')}/{step}"


def add_arguments(parser: argparse.ArgumentParser, *, runs: bool) -> None:
    """Add what the command takes."""
    parser.add_argument("dir", metavar="DIR", help="the folder of storage=sqlite:DIR")
    parser.add_argument("--root", metavar="CLASS/NAME", help="this root only")
    parser.add_argument("--json", action="store_true", help="one object a line")
    if runs:
        parser.add_argument("--status", choices=STATUSES, help="these only")
    else:
        parser.add_argument(
            "--due",
            metavar="24h",
            type=_duration,
            help="what is owed until then instead",
        )


def _duration(text: str) -> timedelta:
    found = _DURATION.fullmatch(text)
    if found is None:
        msg = f"give a number with s, m, h or d, as 24h, not {text!r}"
        raise argparse.ArgumentTypeError(msg)
    return timedelta(seconds=float(found[1]) * _UNITS_S[found[2]])


def run_tree(args: argparse.Namespace, out: TextIO, errors: TextIO) -> int:
    """Tell of each agent in the folder, or what is due; return the exit status."""
    if args.due is not None:
        return _run_due(args, out, errors)

    def rows(tree: _Tree) -> Iterator[dict[str, Any]]:
        return tree.nodes()

    def line(row: dict[str, Any]) -> str:
        step = f"{row['class_name']}/{row['name']}"
        about = f"{row['bytes']} bytes, {row['jobs']} jobs"
        about += f" ({row['dead_jobs']} dead)" if row["dead_jobs"] else ""
        about += f", {row['runs']} runs" if row["runs"] else ""
        return f"{'  ' * (row['depth'] - 1)}{printable(step)}  {about}"

    return _run(args, out, errors, rows, line, "nobody is in there")


def _run_due(args: argparse.Namespace, out: TextIO, errors: TextIO) -> int:
    until = SystemClock().now_ms() + args.due // timedelta(milliseconds=1)

    def rows(tree: _Tree) -> Iterator[dict[str, Any]]:
        return tree.due(until)

    def line(row: dict[str, Any]) -> str:
        what = msgspec.convert(row, Upcoming)
        return printable(f"{_moment(what.due_at)}  {what.path}  {describe(what)}")

    return _run(args, out, errors, rows, line, "nothing is due by then")


def _moment(at_ms: int) -> str:
    """Return an instant for people; the number itself where no calendar has it."""
    try:
        return f"{datetime.fromtimestamp(at_ms / 1000, UTC):%Y-%m-%d %H:%M:%SZ}"
    except (ValueError, OverflowError, OSError):
        return str(at_ms)


def run_runs(args: argparse.Namespace, out: TextIO, errors: TextIO) -> int:
    """Tell of each run in the folder; return the exit status."""

    def rows(tree: _Tree) -> Iterator[dict[str, Any]]:
        return tree.runs(args.status)

    def line(row: dict[str, Any]) -> str:
        why = row["error"] or row["reason"]
        about = f"{row['status']}: {why}" if why else row["status"]
        head = f"{row['owner']}  {row['run_id']}  {row['agent_type']}  {about}"
        return printable(head)

    return _run(args, out, errors, rows, line, "there are no such runs")


def _run(
    args: argparse.Namespace,
    out: TextIO,
    errors: TextIO,
    rows: Callable[[_Tree], Iterator[dict[str, Any]]],
    line: Callable[[dict[str, Any]], str],
    nothing: str,
) -> int:
    """Write the rows of all trees; people who get none are told `nothing`."""
    status, seen, told = SOUND, False, 0

    def counted(tree: _Tree) -> Iterator[dict[str, Any]]:
        nonlocal told
        for row in rows(tree):
            told += 1
            yield row

    try:
        with held(args.dir) as directory:
            for path in trees_in(directory):
                try:
                    with tempfile.TemporaryDirectory(prefix="culet-tree-") as place:
                        seen |= _tell(path, directory, place, args, out, counted, line)
                except (Unreadable, log.LogError, rules.TooNew) as error:
                    errors.write(f"culet: {path}: {error}\n")
                    status = WRONG
    except BrokenPipeError:  # of `out`: it is not the folder that is to blame
        raise
    except OSError as error:
        errors.write(f"culet: {error}\n")
        return CANNOT_LOOK
    if args.root is not None and not seen:
        errors.write(f"culet: there is no root {args.root}\n")
        return CANNOT_LOOK
    if not told and status == SOUND and not args.json:
        out.write(f"{nothing}\n")
    return status


def _tell(
    path: str,
    directory: str,
    place: str,
    args: argparse.Namespace,
    out: TextIO,
    rows: Callable[[_Tree], Iterator[dict[str, Any]]],
    line: Callable[[dict[str, Any]], str],
) -> bool:
    """Write the rows of one tree; whether it is one that was asked for."""
    found = log.read_log(path)
    live = log.fold(found)
    if log.TREE_DB not in live:
        if found.records or grown(path, f"{directory}/templates"):
            raise Unreadable(f"its log knows no {log.TREE_DB}; see `culet doctor`")
        return False  # it was just being made
    log.build(path, live[log.TREE_DB], log.TREE_DB, f"{directory}/templates", place)
    sizes = {name.removesuffix(".db"): _size(path, name, i) for name, i in live.items()}
    try:
        with rules.opened(f"{place}/{log.TREE_DB}") as connection:
            tree = _Tree(connection, sizes)
            if tree.root is None or args.root not in (None, path_text([tree.root])):
                return False
            say = json.dumps if args.json else line
            out.writelines(f"{say(row)}\n" for row in rows(tree))
    except sqlite3.DatabaseError as error:
        raise Unreadable(f"SQLite says: {error}; see `culet doctor`") from error
    return True


def _size(folder: str, name: str, image: log.FileImage) -> int:
    """Return the bytes that a recovery would leave of one file."""
    if image.size:
        return image.size * log.PAGE
    try:
        return os.path.getsize(f"{folder}/{name}")
    except FileNotFoundError:  # born in the log, and nothing was written since
        return 0
