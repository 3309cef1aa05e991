"""After a power cut at any moment a tree is whole, and at the instant of one record."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from culet.kernel.ports import Level
from culet.storage import Folder, treefile
from culet.storage.log import Entry, Redo, redo
from culet.storage.template import Templates
from culet.storage.treelog import LogRecord, Tracked, TreeLog
from storage.power import prove
from volume import LEDGER, Volume

IMAGES = {"power": Volume(500, 3_000, 9_000), "process": Volume(150, 1_000, 3_000)}
DOCTOR = Volume(5, 1, 1)  # looks at each n-th image
MUST_MEET = (
    "checkpointed", "created", "ddl", "deleted", "held", "reopened", "rests",
    "retired", "rolled back", "spilled", "vacuum", "wal emptied",
)  # fmt: skip


@pytest.mark.rule("G-02", "F-02", "I-47")
@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.volume("power images")
@pytest.mark.parametrize("level", ["power", "process"])
def test_every_power_image_is_one_instant_of_the_tree(
    tmp_path: Path, level: Level
) -> None:
    images = IMAGES[level].now
    proof = prove(
        str(tmp_path),
        images=images,
        level=level,
        counted=lambda: LEDGER.add("power images"),
        doctor=DOCTOR.now,
    )

    assert proof.bad == []
    assert proof.images >= images
    assert proof.met["sqlite syncs"] == 0
    assert all(proof.met[what] > 0 for what in MUST_MEET), proof.met
    assert proof.nested > images // 8


# --- does the proof bite? Each of these faults, put in on purpose, must be caught.


def _checkpoint_ahead_of_the_log(patch: pytest.MonkeyPatch) -> None:
    def anything_goes(_log: TreeLog, file: Tracked) -> bool:
        return not file.dead and not file.checkpointed

    patch.setattr(TreeLog, "may_checkpoint", anything_goes)


def _unlink_before_the_record(patch: pytest.MonkeyPatch) -> None:
    delete = TreeLog.delete

    def too_early(log: TreeLog, file: Tracked) -> None:
        delete(log, file)
        log.folder.unlink(file.name)

    patch.setattr(TreeLog, "delete", too_early)


def _no_sync_of_the_log(patch: pytest.MonkeyPatch) -> None:
    write = TreeLog.write

    def unsynced(log: TreeLog, record: LogRecord, *, sync: bool | None = None) -> None:
        write(log, record, sync=False)

    patch.setattr(TreeLog, "write", unsynced)


def _restart_of_the_wal_guessed_from_its_length(patch: pytest.MonkeyPatch) -> None:
    pages = TreeLog._pages

    def guess(log: TreeLog, file: Tracked, end: int) -> Entry:
        if file.recheck and file.salt:
            file.recheck = False
            if end < file.logged:
                file.logged = 0
        return pages(log, file, end)

    patch.setattr(TreeLog, "_pages", guess)


def _retire_without_syncing_the_file(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TreeLog, "sync_file", lambda _log, _file: None)


def _old_wals_trusted_at_recovery(patch: pytest.MonkeyPatch) -> None:
    def trusting(folder: Folder, plan: Redo, templates: Templates) -> None:
        wals = {n: folder.read(n) for n in folder.names() if n.endswith("-wal")}
        redo(folder, plan, templates)
        for name, content in wals.items():
            folder.write(name, 0, content)

    patch.setattr(treefile, "redo", trusting)


LATE = {_restart_of_the_wal_guessed_from_its_length: 9}  # no seed before meets it
MUTANTS = [
    _checkpoint_ahead_of_the_log,
    _unlink_before_the_record,
    _no_sync_of_the_log,
    _restart_of_the_wal_guessed_from_its_length,
    _retire_without_syncing_the_file,
    _old_wals_trusted_at_recovery,
]


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.__name__.strip("_"))
def test_the_proof_catches_a_fault(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mutant: Callable[[pytest.MonkeyPatch], None],
) -> None:
    mutant(monkeypatch)

    seed = LATE.get(mutant, 1)
    proof = prove(str(tmp_path), images=1500, level="power", first_seed=seed)

    assert proof.bad != []
