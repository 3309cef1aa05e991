"""Whatever storage operation fails or is the last: told in our words, nothing told is lost.

One short story over the port, in which every kind of operation occurs. Then it is
told again for each of its operations, with that one failing.
"""

from __future__ import annotations

import itertools
import random
import shutil
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from time import perf_counter_ns

import pytest

from culet.kernel.errors import CuletError, StorageError
from culet.storage import Files, open_sqlite
from storage.driving import KEY
from storage.faultvfs import HOW, Change, Cut, How, Plan, Seen, cuts
from storage.story import LIMITS, Story, Told, looked_at, planned, tell_once
from volume import PROFILE

LONG = PROFILE == "long"  # everything, which takes some minutes
STRIDE = 1 if LONG else 19  # of the changes after which the power fails


def test_the_story_meets_every_kind_of_operation(tmp_path: Path) -> None:
    plan, told = tell_once(tmp_path / "a")

    kinds = plan.kinds()
    for kind in (
        "mkdir", "lock", "open", "read", "write", "truncate", "sync", "sync-folder",
        "unlink", "xOpen", "xRead", "xWrite", "xTruncate", "xSync", "xLock",
    ):  # fmt: skip
        assert kinds[kind] > 0, kinds
    assert told.acked == len(told.states) - 1 == 6
    assert plan.struck == 0
    again, _ = tell_once(tmp_path / "a")
    assert again.seen == plan.seen  # same story, same operations


def tell_with(folder: Path, number: int, how: How, mode: str) -> CuletError | None:
    """Tell the story with one fault in it; return what it was told of it, if anything."""
    caught: CuletError | None = None
    with planned(folder) as (plan, store):
        told = Told()
        if mode == "stop":
            plan.stop_at(number)
        else:
            plan.fail_at(number, how, stay=mode == "stay")
        try:
            Story(store, told, plan).tell()
        except CuletError as error:
            caught = error
        with suppress(CuletError):
            store.close()
        assert plan.struck > 0
    state = looked_at(plan.top + "/data", told, told.acked, told.noted)
    assert caught is not None or state == told.states[-1]
    return caught


MODES = ("once", "stay", "stop")
BULK = ("xRead", "xWrite")


def chosen(plan: Plan, mode: str) -> list[Seen]:
    """Return the operations that fail in this mode.

    All of them in the long form; else each rare one in one of the modes, and each third
    of those that come by the hundred.
    """
    if LONG:
        return list(plan.seen)
    rare = [seen for seen in plan.seen if seen.kind not in BULK]
    bulk = [seen for seen in plan.seen if seen.kind in BULK]
    first = MODES.index(mode)
    return rare[first :: len(MODES)] + bulk[first :: len(MODES) ** 2]


def errors(operations: list[Seen]) -> list[tuple[Seen, How]]:
    """Return how each of them fails: in each way in the long form, else in turn."""
    if LONG:
        return [(seen, how) for seen in operations for how in HOW]
    return list(zip(operations, itertools.cycle(HOW), strict=False))


@pytest.mark.rule("F-05", "I-47", "G-03")
@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize("mode", MODES)
def test_each_operation_may_fail_and_nothing_told_is_lost(
    tmp_path: Path, mode: str
) -> None:
    plan, _ = tell_once(tmp_path / "count")
    heard = tries = 0
    for seen, how in errors(chosen(plan, mode)):
        tries += 1
        try:
            error = tell_with(tmp_path / "told", seen.number, how, mode)
        except Exception as wrong:
            wrong.add_note(f"{seen} failed {how}, {mode}")
            raise
        heard += isinstance(error, StorageError)
    assert heard > tries // 2, (heard, tries)


@pytest.mark.rule("F-02", "I-47")
@pytest.mark.slow
@pytest.mark.proof
def test_each_power_cut_leaves_an_instant_that_was_told_or_a_later_one(
    tmp_path: Path,
) -> None:
    plan, told = tell_once(tmp_path / "story")
    rng = random.Random(1)
    met: Counter[str] = Counter()
    for end in range(0, len(plan.changes) + 1, STRIDE):
        marks = [m for m in told.marks if m[0] <= end]
        _, acked, noted = marks[-1] if marks else (0, 0, False)
        for cut in one_of_each(plan.changes[:end], rng):
            top = tmp_path / "cut"
            shutil.rmtree(top, ignore_errors=True)
            cut.write_to(str(top))
            met[cut.what.split()[0]] += 1
            try:
                looked_at(f"{top}/data", told, acked, noted)
            except Exception as wrong:
                wrong.add_note(f"after change {end} of {len(plan.changes)}: {cut.what}")
                raise
    assert met.keys() == {"nothing", "all", "a", "write", "torn", "sector", "name"}
    assert met.total() > 100


def one_of_each(changes: list[Change], rng: random.Random) -> list[Cut]:
    """Return one cut of each kind there is."""
    found: dict[str, list[Cut]] = {}
    for cut in cuts(changes, rng):
        found.setdefault(cut.what.split()[0], []).append(cut)
    return [rng.choice(kind) for kind in found.values()]


def test_what_is_committed_while_a_sync_hangs_is_not_in_that_record(
    tmp_path: Path,
) -> None:
    with planned(tmp_path / "held") as (plan, store):
        told = Told()
        story = Story(store, told, plan)
        store.open()
        tree = story.tree = store.open_tree(KEY, level="power")
        story.add("root0")
        story.record()
        story.notes("root0", 1)
        record = tree.begin()
        told.states.append(told.state())
        assert tree.fill(record, perf_counter_ns() + 10**9)
        hold = plan.hold("sync", "log00000001")
        writer = threading.Thread(target=tree.write, args=(record,))
        writer.start()
        assert hold.entered.wait(20)
        story.notes("root0", 1)  # the loop does not wait for the disk
        hanging = list(plan.changes)
        hold.released.set()
        writer.join(20)
        assert tree.done(record) < tree.commits
    cut = next(c for c in cuts(hanging, random.Random(0)) if c.what == "all")
    cut.write_to(str(tmp_path / "cut"))
    assert looked_at(f"{tmp_path}/cut/data", told, 1, False) == told.states[-1]


# --- what the long form has found


def test_a_store_that_cannot_close_says_so_and_lets_the_lock_go(
    tmp_path: Path,
) -> None:
    with planned(tmp_path / "a") as (plan, store):
        store.open()
        store.open_tree(KEY, level="power")
        store.note_root(KEY, 0)
        plan.fail("xLock", 1, "io")
        with pytest.raises(StorageError):
            store.close()
        assert plan.struck == 1
        again = open_sqlite(plan.top + "/data", limits=LIMITS, files=Files())
        again.open()
        again.open_tree(KEY, level="power")
        again.close()


def test_a_file_that_cannot_be_let_go_is_told_in_our_words(tmp_path: Path) -> None:
    with planned(tmp_path / "a") as (plan, store):
        story = Story(store, Told(), plan)
        store.open()
        story.tree = store.open_tree(KEY, level="power")
        for slot in ("root0", "kid"):
            story.add(slot)
        story.notes("kid", 2)
        story.record()  # and a checkpoint
        plan.fail("truncate", 1, "io")
        with pytest.raises(StorageError):
            story.forget("kid")
        assert plan.struck == 1
        with pytest.raises(StorageError):  # it restarts from its last record
            story.tree.begin()
