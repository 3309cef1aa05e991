"""The doctor looks after every test that leaves the folder of a store behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from culet.kernel.errors import NotFound
from culet.storage import examine


def healthy(folder: str | os.PathLike[str]) -> None:
    """Let the doctor look at one folder; nothing may be wrong."""
    report = examine(os.fspath(folder))
    assert report.ok, [(t.root, t.problems) for t in report.trees if t.problems]


def healthy_if_there(folder: str | os.PathLike[str]) -> None:
    """The same of a folder that a life may not have come to make."""
    try:
        healthy(folder)
    except NotFound:
        return


def stores(top: Path) -> Iterator[Path]:
    """Return the folders of stores at and below a folder."""
    for place, folders, names in os.walk(top):
        if "lock" in names and ("roots" in folders or "roots.db" in names):
            yield Path(place)
            folders.clear()
