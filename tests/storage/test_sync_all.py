"""Many files are made durable at once; which ones is told first, and a failure is raised."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from culet.storage.files import Files, Folder

NAMES = [f"n{number:02}" for number in range(40)]


def filled(path: Path, files: Files) -> Folder:
    for name in NAMES:
        (path / name).write_bytes(b"x")
    return files.folder(str(path))


def test_each_is_told_of_and_synced_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str]] = []
    synced: list[str] = []
    real = os.fdatasync

    def watched(descriptor: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        real(descriptor)

    monkeypatch.setattr(os, "fdatasync", watched)
    folder = filled(tmp_path, Files(lambda *told: seen.append(told)))
    folder.sync_all(NAMES)
    folder.sync_all([])
    assert seen == [("sync", str(tmp_path / name)) for name in NAMES]
    assert sorted(synced) == NAMES


def test_one_that_fails_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fdatasync

    def broken(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("n17"):
            raise OSError(errno.EIO, "the disk")
        real(descriptor)

    monkeypatch.setattr(os, "fdatasync", broken)
    folder = filled(tmp_path, Files())
    with pytest.raises(OSError, match="the disk"):
        folder.sync_all(NAMES)


def test_one_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    folder = filled(tmp_path, Files())
    with pytest.raises(FileNotFoundError):
        folder.sync_all([*NAMES, "gone"])
