"""A second fault while the first is being mended: refused in our words, and nothing is
lost that the third try needs.

A life of the story ends somewhere: it dies, an operation fails, or the power goes. Then
the folder is opened under faults, at each operation of that recovery. Whatever it met,
an open without faults comes to the very instant that it would have come to at once.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from culet.kernel.errors import CuletError, NotFound, StorageError
from culet.kernel.ports import TreeKey
from culet.storage import Files, SqliteStore, examine, open_sqlite
from storage.driving import KEY, NOTE, NOTES, add_node, barrier
from storage.faultvfs import HOW, How, Plan, cuts
from storage.story import LIMITS, State, Story, Told, looked_at, planned, tell_once
from volume import PROFILE

MODES = ("once", "stay", "stop")
DENSE = {"short": 4, "ci": 3, "long": 1}[PROFILE]  # each n-th operation of a recovery
ENDS = {"short": 5, "ci": 9, "long": 30}[PROFILE]  # of the first life
BULK = ("xRead", "xWrite")


def arm(plan: Plan, number: int, how: How, mode: str) -> None:
    if mode == "stop":
        plan.stop_at(number)
    else:
        plan.fail_at(number, how, stay=mode == "stay")


def ended_lives(top: Path) -> list[tuple[Path, Told, str]]:
    """Return folders in which a first life ended, each in another way."""
    plan, _ = tell_once(top / "count")
    rng = random.Random(3)
    found: list[tuple[Path, Told, str]] = []
    for index in range(ENDS):
        number = rng.randrange(
            len(plan.seen) * (index + 1) // (ENDS + 1), len(plan.seen)
        )
        mode = ("stop", "once", "cut")[index % 3]
        place = top / f"life{index}"
        with planned(place) as (second, store):
            told = Told()
            if mode != "cut":
                arm(second, number, "io", mode)
            with suppress(CuletError):
                Story(store, told, second).tell()
        if mode == "cut":
            end = len(second.changes) * (index + 2) // (ENDS + 3)
            marks = [m for m in told.marks if m[0] <= end]
            _, told.acked, told.noted = marks[-1] if marks else (0, 0, False)
            image = rng.choice(list(cuts(second.changes[:end], rng)))
            shutil.rmtree(place)
            image.write_to(str(place))
        found.append((place, told, f"{mode} {number}"))
    return found


def recover(store: SqliteStore) -> None:
    """What a kernel does with a folder at its start, and a first write."""
    store.open()
    store.roots()
    tree = store.open_tree(KEY, level="power")
    barrier(tree)
    store.close()


@pytest.mark.slow
@pytest.mark.rule("F-03", "F-05", "I-46", "I-47")
def test_a_fault_in_a_recovery_is_refused_and_the_next_one_comes_to_the_same(
    tmp_path: Path,
) -> None:
    met: Counter[str] = Counter()
    for life, (place, told, what) in enumerate(ended_lives(tmp_path)):
        calm = tmp_path / "calm"
        copied(place, calm)
        with planned(calm, empty=False) as (plan, store):
            recover(store)
        want = looked_at(f"{calm}/data", told, told.acked, told.noted)
        seen = [s for s in plan.seen if s.kind not in BULK]
        seen += [s for s in plan.seen if s.kind in BULK][::5]
        for index, operation in enumerate(seen[life % DENSE :: DENSE]):
            mode, how = MODES[index % 3], HOW[index // 3 % 3]
            try:
                met[
                    again(
                        place,
                        tmp_path / "again",
                        told,
                        want,
                        operation.number,
                        how,
                        mode,
                    )
                ] += 1
                met[mode] += 1
                met[operation.kind] += 1
            except Exception as wrong:
                wrong.add_note(f"first life {what}; then {operation} {how} {mode}")
                raise
    assert met["refused"] > 50, met  # some are harmless: what is read again, a mark
    for kind in (*MODES, "read", "write", "sync", "xOpen"):
        assert met[kind] > 0, met


def again(
    place: Path, folder: Path, told: Told, want: State, number: int, how: How, mode: str
) -> str:
    """Recover with that fault, then without; return how the first went."""
    copied(place, folder)
    outcome = "opened"
    with planned(folder, empty=False) as (plan, store):
        arm(plan, number, how, mode)
        try:
            recover(store)
        except CuletError as error:
            assert isinstance(error, StorageError), repr(error)
            outcome = "refused"
        with suppress(CuletError):
            store.close()
        assert plan.struck > 0
    state = looked_at(f"{folder}/data", told, told.acked, told.noted)
    assert state == want, f"{state} is not {want}"
    return outcome


def copied(place: Path, to: Path) -> None:
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(place, to)


# --- a root is destroyed

OTHER = TreeKey("Supervisor", "bob")
SECRET = "what nobody may find any more"


def two_roots(folder: Path) -> None:
    store = open_sqlite(f"{folder}/data", limits=LIMITS)
    store.open()
    for key in (KEY, OTHER):
        tree = store.open_tree(key, level="power")
        tree.tree.execute(
            "INSERT INTO main.node (slot, class, name, state, created_at) "
            "VALUES ('root0', ?, ?, 'live', 0)",
            key,
        )
        add_node(tree, "kid", "root0")
        tree.agent("kid").execute(NOTE, ("secret", SECRET))
        barrier(tree)
        store.note_root(key, 7)
    store.close()


def drop(store: SqliteStore) -> None:
    store.open()
    store.drop_tree(KEY)
    store.close()


@pytest.mark.slow
def test_a_root_is_dropped_wholly_or_not_at_all_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    """Faults in the drop, then in the open that finishes it, then none."""
    base = tmp_path / "base"
    two_roots(base)
    copied(base, tmp_path / "count")
    with planned(tmp_path / "count", empty=False) as (plan, store):
        drop(store)
    met: Counter[str] = Counter()
    rng = random.Random(5)
    for index, seen in enumerate(plan.seen):
        mode, how = MODES[index % 3], HOW[index // 3 % 3]
        folder = tmp_path / "told"
        copied(base, folder)
        heard = False
        with planned(folder, empty=False) as (faulty, store):
            arm(faulty, seen.number, how, mode)
            try:
                drop(store)
            except StorageError:
                heard = True
        with planned(folder, empty=False) as (faulty, store):
            arm(faulty, rng.randrange(1, 30), rng.choice(HOW), rng.choice(MODES))
            with suppress(StorageError):
                recover(store)
        try:
            met[dropped_or_whole(folder)] += 1
        except Exception as wrong:
            wrong.add_note(f"{seen} failed {how}, {mode}; heard: {heard}")
            raise
    assert met["dropped"] > 3, met
    assert met["whole"] > 3, met


def dropped_or_whole(folder: Path) -> str:
    report = examine(f"{folder}/data")
    assert report.ok, report
    store = open_sqlite(f"{folder}/data", limits=LIMITS, files=Files())
    store.open()
    try:
        other = store.open_tree(OTHER, level="power", create=False)
        assert other.agent("kid").execute(NOTES) == [("secret",)]
        try:
            tree = store.open_tree(KEY, level="power", create=False)
        except NotFound:
            outcome = "dropped"
        else:
            outcome = "whole"
            assert tree.agent("kid").execute(NOTES) == [("secret",)]
            assert KEY in [entry.key for entry in store.roots()]
            tree.close()
        other.close()
        if outcome == "dropped":
            files = [p for p in folder.rglob("*.db") if SECRET in p.read_text("latin1")]
            logs = [p for p in folder.rglob("log*") if SECRET in p.read_text("latin1")]
            assert len({p.parent for p in files + logs}) <= 1, "it was left behind"
        store.drop_tree(KEY)
        assert [entry.key for entry in store.roots()] == [OTHER]
        with pytest.raises(NotFound):
            store.open_tree(KEY, level="power", create=False)
    finally:
        store.close()
    return outcome
