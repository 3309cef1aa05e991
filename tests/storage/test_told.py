"""What goes wrong below is told in the words of the kernel, and nothing is guessed."""

from __future__ import annotations

import errno
import time
from pathlib import Path

import apsw
import msgspec
import pytest

from culet.kernel.errors import (
    SchemaTooNew,
    StorageBusy,
    StorageCorrupt,
    StorageError,
    StorageFull,
)
from culet.kernel.ports import TreeKey
from culet.storage import Files, Folder
from culet.storage.errors import storage_error
from culet.storage.hostindex import open_index
from culet.storage.log import Image, Log, Redo, judge, plan_redo, redo
from culet.storage.record import Logged
from culet.storage.template import Templates

RECORD = Logged(segment=1, low=1, lsn=1, epoch=1, checksum=0, body=b"")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.ENOSPC, "full"), StorageFull),
        (OSError(errno.EDQUOT, "quota"), StorageFull),
        (OSError(errno.EIO, "io"), StorageError),
        (apsw.FullError("full"), StorageFull),
        (apsw.BusyError("busy"), StorageBusy),
        (apsw.LockedError("locked"), StorageBusy),
        (apsw.CorruptError("corrupt"), StorageCorrupt),
        (apsw.NotADBError("no database"), StorageCorrupt),
        (ValueError("odd"), StorageError),
    ],
)
def test_each_error_has_its_kind(error: Exception, kind: type[StorageError]) -> None:
    told = storage_error(error)

    assert type(told) is kind
    assert type(error).__name__ in str(told)


def test_an_error_of_the_kernel_stays_what_it_is() -> None:
    error = StorageBusy("x")
    assert storage_error(error) is error


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"\xc1", "cannot be read"),
        (b"\x91\x92\xa1X\xa1a", "makes no sense"),  # [["X", "a"]]
        (b"\x91\x92\xa1D\xa1a", "makes no sense"),  # before any list of live files
        (b"\x07", "no list of entries"),
    ],
)
def test_a_record_that_makes_no_sense_is_corrupt(body: bytes, why: str) -> None:
    with pytest.raises(StorageCorrupt, match=why):
        plan_redo([RECORD._replace(body=body)], ["log00000001"])


def test_a_segment_that_is_needed_and_missing_is_corrupt() -> None:
    log = Log([RECORD._replace(segment=2)], {2: 40}, [])
    with pytest.raises(StorageCorrupt, match=r"segment 1 .* missing"):
        judge(log, "here")


def test_a_segment_missing_behind_the_last_record_is_corrupt() -> None:
    log = Log([RECORD], {1: 40, 3: 0}, [])
    with pytest.raises(StorageCorrupt, match=r"segment 2 .* missing"):
        judge(log, "here")


def test_a_live_file_that_is_lost_is_corrupt(tmp_path: Path) -> None:
    folder = Folder(Files(), str(tmp_path))
    plan = Redo({"a.db": Image(None)}, 1, 1, 0, 1)

    with pytest.raises(StorageCorrupt, match="lost"):
        redo(folder, plan, Templates(Files(), str(tmp_path / "templates")))


def test_a_template_that_is_lost_or_damaged_is_corrupt(tmp_path: Path) -> None:
    templates = Templates(Files(), str(tmp_path))
    (tmp_path / "beef.db").write_bytes(b"other")

    for digest in ("0000", "beef"):
        with pytest.raises(StorageCorrupt, match=digest):
            templates.bytes_of(digest)


def test_a_template_of_a_former_version_is_read_from_the_folder(tmp_path: Path) -> None:
    old = Templates(Files(), str(tmp_path))
    old.keep()
    new = Templates(Files(), str(tmp_path))
    want = new._kept.pop(new.tree)

    assert new.bytes_of(new.tree) == want


def test_an_index_that_is_gone_says_so(tmp_path: Path) -> None:
    index = open_index(str(tmp_path / "roots.db"), vfs="unix")
    assert index is not None
    index.fill([])
    index._connection.close()

    for act in (
        index.all,
        lambda: index.note(TreeKey("A", "a"), 1),
        lambda: index.drop(TreeKey("A", "a")),
        lambda: index.fill([]),
    ):
        with pytest.raises(StorageError):
            act()


def test_an_index_of_a_newer_version_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "roots.db"
    connection = apsw.Connection(str(path))
    connection.pragma("user_version", 99)
    connection.close()

    with pytest.raises(SchemaTooNew):
        open_index(str(path), vfs="unix")


def test_an_index_that_cannot_be_opened_says_so(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        open_index(str(tmp_path / "missing" / "roots.db"), vfs="unix")


def test_a_folder_of_many_files_is_recovered_in_a_time_that_grows_with_their_number(
    tmp_path: Path,
) -> None:
    """Each was looked for in a list of all the others: 10,000 facets took 0.6 s."""

    templates = Templates(Files(), str(tmp_path / "templates"))

    def spent(count: int) -> float:
        folder = Folder(Files(), str(tmp_path / str(count)))
        (tmp_path / str(count)).mkdir()
        names = [f"{number:016d}.db" for number in range(count)]
        for name in names:
            (tmp_path / str(count) / name).touch()
        body = msgspec.msgpack.encode([["M", names]])
        plan = plan_redo([RECORD._replace(body=body)], ["log00000001"])
        times = []
        for _ in range(3):
            started = time.thread_time()
            redo(folder, plan, templates)
            times.append(time.thread_time() - started)
        folder.close()
        assert len(folder.names()) == count, "nothing is lost by it"
        return min(times)

    assert spent(12_000) < 9 * spent(3_000)  # 4, or 16 for a list
