"""What an older version has stored is brought to a newer schema whole, or not at all."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from contextlib import suppress
from pathlib import Path

import apsw
import pytest

from culet.kernel.errors import CuletError, SchemaTooNew, StorageError
from culet.kernel.ports import Level, Store
from culet.storage import SqliteStore, examine, hostindex, open_memory, schema
from culet.storage.connection import migrate
from storage.driving import KEY, NOTE, add_node, barrier, opened
from storage.faultvfs import HOW, Cut, adopted, cuts
from storage.newer import AGENT_STEP, newer_schema
from storage.story import LIMITS, planned
from volume import PROFILE

pytestmark = pytest.mark.unsound("a newer version wrote it")
MODES = ("once", "stay", "stop")
SLOTS = ("root0", "kid", "other")
STRIDE = {"short": 9, "ci": 3, "long": 1}[PROFILE]
VALUES = "SELECT key, value FROM main.{} ORDER BY key"


def old(folder: Path, level: Level = "power") -> None:
    """A tree of this version, killed: its files are behind its log."""
    store = opened(f"{folder}/data", limits=LIMITS)
    tree = store.open_tree(KEY, level=level)
    tree.tree.execute(
        "INSERT INTO main.node (slot, class, name, state, created_at) "
        "VALUES ('root0', ?, ?, 'live', 0)",
        KEY,
    )
    for slot in SLOTS[1:]:
        add_node(tree, slot, "root0")
    for number in range(3):
        for slot in SLOTS:
            tree.agent(slot).execute(NOTE, (f"{slot}{number}", "x" * 300))
        barrier(tree)
    store.note_root(KEY, 7)
    store.close()


def go_on(store: SqliteStore) -> None:
    """Open it all, which migrates it; write a record and some more."""
    store.open()
    tree = store.open_tree(KEY, level="power")
    for slot in SLOTS:
        tree.agent(slot).execute(VALUES.format("culet_value"))
    barrier(tree)
    tree.agent("kid").execute(NOTE, ("late", "1"))
    barrier(tree)
    store.close()


def migrated(folder: Path) -> None:
    """Open it in the newer version; every row is there, every step was taken once."""
    report = examine(f"{folder}/data")
    assert report.ok, report
    store = opened(f"{folder}/data", limits=LIMITS)
    try:
        assert [entry.key for entry in store.roots()] == [KEY]
        tree = store.open_tree(KEY, level="power")
        assert tree.tree.execute("SELECT nodes FROM main.test_step") == [(3,)]
        assert tree.tree.execute(
            "SELECT slot FROM main.node WHERE test_born = born ORDER BY born"
        ) == [(slot,) for slot in SLOTS]
        for slot in SLOTS:
            agent = tree.agent(slot)
            want = [f"{slot}{number}" for number in range(3)]
            copied = agent.execute(VALUES.format("culet_copy"))
            assert [key for key, _ in copied] == want
            now = agent.execute(VALUES.format("culet_value"))
            assert [row for row in now if row[0] != "late"] == copied
            assert agent.execute("SELECT number FROM main.culet_step") == [(1,)]
        barrier(tree)
    finally:
        store.close()


def copied(place: Path, to: Path) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(place, to)
    return to


@pytest.mark.slow
@pytest.mark.rule("F-12")
@pytest.mark.parametrize("mode", MODES)
def test_a_fault_at_any_operation_of_a_migration_leaves_it_whole(
    tmp_path: Path, mode: str
) -> None:
    old(tmp_path / "old")
    with newer_schema():
        with planned(copied(tmp_path / "old", tmp_path / "n"), empty=False) as (
            plan,
            store,
        ):
            go_on(store)
        first = MODES.index(mode)
        met: Counter[str] = Counter()
        for index, seen in enumerate(plan.seen[first::STRIDE]):
            how = HOW[index % 3]
            folder = copied(tmp_path / "old", tmp_path / "again")
            with planned(folder, empty=False) as (faulty, store):
                if mode == "stop":
                    faulty.stop_at(seen.number)
                else:
                    faulty.fail_at(seen.number, how, stay=mode == "stay")
                try:
                    go_on(store)
                    met["through"] += 1
                except StorageError:
                    met["told"] += 1
                with suppress(CuletError):
                    store.close()
                assert faulty.struck > 0
            try:
                migrated(folder)
            except Exception as wrong:
                wrong.add_note(f"{seen} failed {how}, {mode}")
                raise
    assert met["told"] > 10, met


@pytest.mark.slow
@pytest.mark.rule("F-12")
def test_a_power_cut_anywhere_in_a_migration_leaves_it_whole_in_either_version(
    tmp_path: Path,
) -> None:
    old(tmp_path / "old")
    base = adopted(str(tmp_path / "old"))
    rng = random.Random(2)
    met: Counter[str] = Counter()
    with newer_schema():
        folder = copied(tmp_path / "old", tmp_path / "story")
        with planned(folder, empty=False) as (plan, store):
            go_on(store)
    for end in range(0, len(plan.changes) + 1, STRIDE):
        images = list(cuts(base + plan.changes[:end], rng))
        for image in rng.sample(images, min(3, len(images))):
            met[older(image, tmp_path / "cut")] += 1
            with newer_schema():
                migrated(image_in(image, tmp_path / "cut"))
    assert met["opens"] > 5, met
    assert met["is refused"] > 5, met


def image_in(image: Cut, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    image.write_to(str(folder))
    return folder


def older(image: Cut, folder: Path) -> str:
    """Go back to the old version: it finds all as it was, or refuses and changes nothing."""
    store = opened(f"{image_in(image, folder)}/data", limits=LIMITS)
    try:
        tree = store.open_tree(KEY, level="power")
    except SchemaTooNew:
        return "is refused"
    else:
        for slot in SLOTS:
            rows = tree.agent(slot).execute(VALUES.format("culet_value"))
            assert [key for key, _ in rows] == [f"{slot}{n}" for n in range(3)]
        return "opens"
    finally:
        store.close()


def test_a_step_and_its_record_are_one_transaction() -> None:
    steps = (*schema.AGENT, AGENT_STEP, "CREATE TABLE x (a); CREATE TABLE x (a);")
    connection = apsw.Connection(":memory:")
    with pytest.raises(apsw.SQLError):
        migrate(connection, steps, "it")

    assert connection.pragma("user_version") == len(steps) - 1
    names = connection.execute("SELECT name FROM sqlite_master").fetchall()
    assert ("culet_step",) in names
    assert ("x",) not in names
    migrate(connection, steps[:-1], "it")
    with pytest.raises(SchemaTooNew):
        migrate(connection, steps[:-2], "it")


def test_a_step_that_cannot_be_taken_leaves_the_old_version(tmp_path: Path) -> None:
    old(tmp_path)
    bad = "CREATE TABLE a (b ANY) STRICT; CREATE UNIQUE INDEX c ON node (state);"
    with newer_schema(tree=bad):  # it holds in a tree that is empty
        store = opened(f"{tmp_path}/data", limits=LIMITS)
        with pytest.raises(StorageError):
            store.open_tree(KEY, level="power")
        store.close()
    store = opened(f"{tmp_path}/data", limits=LIMITS)
    tree = store.open_tree(KEY, level="power")
    assert len(tree.slots()) == 3
    store.close()
    with newer_schema():
        migrated(tmp_path)


def test_many_steps_are_taken_in_order_and_new_files_need_none(tmp_path: Path) -> None:
    old(tmp_path)
    with newer_schema(steps=3):
        now = len(schema.AGENT)
        store = opened(f"{tmp_path}/data", limits=LIMITS)
        tree = store.open_tree(KEY, level="power")
        add_node(tree, "young", "root0")
        for slot in ("kid", "young"):
            agent = tree.agent(slot)
            agent.execute(NOTE, ("k", "1"))
            assert agent.execute("PRAGMA main.user_version") == [(now,)]
            assert agent.execute("SELECT count(*) FROM main.culet_more2") == [(0,)]
        copies = "SELECT count(*) FROM main.culet_copy"
        assert tree.agent("kid").execute(copies) == [(3,)]
        assert tree.agent("young").execute(copies) == [(0,)]
        barrier(tree)
        store.close()


def test_in_memory_it_is_the_same() -> None:
    store: Store = open_memory("", limits=LIMITS)
    store.open()
    tree = store.open_tree(KEY, level="power")
    add_node(tree, "root0")
    tree.agent("root0").execute(NOTE, ("a", "1"))
    barrier(tree)
    tree.close()
    with newer_schema():
        tree = store.open_tree(KEY, level="power")
        assert tree.tree.execute("SELECT nodes FROM main.test_step") == [(1,)]
        copies = tree.agent("root0").execute(VALUES.format("culet_copy"))
        assert [key for key, _ in copies] == ["a"]
        barrier(tree)
        tree.close()
    with pytest.raises(SchemaTooNew):
        store.open_tree(KEY, level="power")
    store.close()


def test_an_older_index_is_migrated_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old(tmp_path)
    step = "ALTER TABLE root ADD COLUMN test INTEGER;"
    monkeypatch.setattr(hostindex, "STEPS", (*hostindex.STEPS, step))
    for _ in range(2):
        store = opened(f"{tmp_path}/data", limits=LIMITS)
        assert [(e.key, e.due_at) for e in store.roots()] == [(KEY, 7)]
        store.close()
