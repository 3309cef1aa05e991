"""`culet doctor DIR`: is the folder of a store that nobody has open sound?

It runs where nothing but Python is installed, too: `python -m culet.storage.doctor DIR`
with the sources on the path. Exit status: 0 sound, 1 something is wrong, 2 it could not
look.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TextIO

from .doctor_folder import Report as Report
from .doctor_folder import TreeReport as TreeReport
from .doctor_folder import look

SOUND, WRONG, CANNOT_LOOK = 0, 1, 2


def examine(directory: str) -> Report:
    """Examine every tree of a folder. Blocks.

    Raises `NotFound` if it is no store, `StorageBusy` while a kernel has it open.
    """
    try:
        return look(directory)
    except (FileNotFoundError, BlockingIOError) as error:
        # Late, so that the rest of the doctor needs no kernel and no library.
        from culet.kernel.errors import NotFound, StorageBusy

        kind = NotFound if isinstance(error, FileNotFoundError) else StorageBusy
        raise kind(str(error)) from error


def printable(text: str) -> str:
    """Return a text of somebody's that moves no cursor, colours and ends no line."""
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("dir", metavar="DIR", help="the folder of storage=sqlite:DIR")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument(
        "--as-found",
        action="store_true",
        help="also say how the folder was left, before recovery mends it",
    )


def run(args: argparse.Namespace, out: TextIO, errors: TextIO) -> int:
    """Look, tell, and return the exit status."""
    try:
        report = look(args.dir, as_found=args.as_found)
    except OSError as error:
        errors.write(f"culet: {error}\n")
        return CANNOT_LOOK
    if args.json:
        out.write(json.dumps(asdict(report) | {"ok": report.ok}) + "\n")
    else:
        out.write("".join(f"{printable(line)}\n" for line in _lines(report)))
    return SOUND if report.ok else WRONG


def _lines(report: Report) -> list[str]:
    lines: list[str] = []
    for tree in report.trees:
        state = f"{len(tree.problems)} problems" if tree.problems else "ok"
        counts = f"{tree.nodes} agents, {tree.files} files, {tree.records} records"
        lines.append(f"{tree.root or tree.folder}: {counts}, {state}")
        lines += [f"  ! {problem}" for problem in tree.problems]
        lines += [f"  - {note}" for note in tree.notes]
    lines.append("nothing is wrong" if report.ok else "problems were found")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command by itself."""
    parser = argparse.ArgumentParser(
        prog="culet doctor", description="Check a folder that nobody has open."
    )
    add_arguments(parser)
    return run(parser.parse_args(argv), sys.stdout, sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
