"""Which store a URL means: the scheme names an entry point of `culet.stores`."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from culet.kernel import Limits
from culet.kernel.errors import UsageError
from culet.kernel.kernel import find_store


class Shelf:
    """What somebody else's store is given."""

    def __init__(self, rest: str, *, limits: Limits) -> None:
        self.rest = rest


def install(folder: Path, monkeypatch: Any) -> None:
    """Make a distribution with a store of its own."""
    about = folder / "shelf-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: shelf\nVersion: 1\n")
    (about / "entry_points.txt").write_text(
        f"[culet.stores]\nshelf = {__name__}:Shelf\nsqlite = {__name__}:Shelf\n"
    )
    monkeypatch.syspath_prepend(str(folder))


def test_the_store_of_another_distribution_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch)
    found: Any = find_store("shelf:up/there", Limits())
    assert type(found).__name__ == "Shelf"
    assert found.rest == "up/there"
    ours = find_store(f"sqlite:{tmp_path}/data", Limits())
    assert type(ours).__name__ == "SqliteStore", "nobody takes our names"


def test_an_unknown_scheme_is_told_which_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch)
    for url in ("nowhere:x", "data"):
        with pytest.raises(UsageError, match="memory:, shelf:, sqlite:"):
            find_store(url, Limits())


def test_our_stores_are_found_where_we_are_part_of_another_distribution(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("culet.kernel.kernel.distribution", absent)
    assert type(find_store("memory:", Limits())).__name__ == "MemoryStore"


def absent(name: str) -> Any:
    raise metadata.PackageNotFoundError(name)
