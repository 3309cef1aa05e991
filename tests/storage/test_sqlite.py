"""What only the folder has: its lock, its index, open files, long WALs, full disks."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import apsw
import pytest

from culet.kernel.core.limits import DEFAULT, Limits
from culet.kernel.errors import (
    CuletError,
    SchemaTooNew,
    StorageBusy,
    StorageCorrupt,
    StorageError,
    StorageFull,
)
from culet.kernel.ports import TreeKey, TreeStore
from culet.storage import Files, SqliteStore, open_sqlite
from culet.storage.files import Folder
from culet.storage.log import segment_name
from culet.storage.store import folder_of, tree_folders
from culet.storage.treefile import SqliteTree
from storage.driving import (
    KEY,
    NOTE,
    NOTES,
    add_node,
    barrier,
    opened,
    record,
    run_chores,
)

BIG = "x" * 900


def keys(tree: TreeStore, slot: str = "root0") -> list[str]:
    return [key for (key,) in tree.agent(slot).execute(NOTES)]


def images(folder: str) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file()
    }


# --- the lock


def test_a_second_store_on_the_folder_is_refused_by_name(tmp_path: Path) -> None:
    store = opened(str(tmp_path))
    second = open_sqlite(str(tmp_path), limits=DEFAULT)
    with pytest.raises(StorageBusy, match=str(tmp_path)):
        second.open()
    second.close()
    store.close()

    second.open()
    second.close()


@pytest.mark.rule("F-472")
def test_a_second_process_on_the_folder_is_refused(tmp_path: Path) -> None:
    store = opened(str(tmp_path))
    code = (
        "import sys; from culet.storage import open_sqlite\n"
        "from culet.kernel.core.limits import DEFAULT\n"
        "from culet.kernel.errors import StorageBusy\n"
        "try: open_sqlite(sys.argv[1], limits=DEFAULT).open()\n"
        "except StorageBusy: sys.exit(7)"
    )
    found = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    store.close()

    assert found.returncode == 7


def test_a_folder_that_cannot_be_made_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        opened(str(tmp_path / "file" / "data"))


# --- names


@pytest.mark.rule("F-388")
def test_no_name_becomes_a_path(tmp_path: Path) -> None:
    store = opened(str(tmp_path))
    for name in ("..", "a/b", "\ud800", "x" * 256, "ä", ""):
        tree = store.open_tree(TreeKey("Supervisor", name), level="process")
        add_node(tree, "root0")
        record(tree)
        tree.close()
    store.close()

    for path in tree_folders(str(tmp_path)):
        assert len(os.path.basename(path)) == 40
        assert os.path.basename(path)[:4] == "".join(Path(path).parts[-3:-1])


# --- schema


def newer(path: str) -> None:
    connection = apsw.Connection(path)
    connection.pragma("user_version", 99)
    connection.close()


@pytest.mark.unsound("another version wrote it")
@pytest.mark.parametrize("where", ["file", "log"])
@pytest.mark.rule("F-249")
def test_a_newer_schema_is_refused_and_nothing_is_written(
    tmp_path: Path, where: str
) -> None:
    store = opened(str(tmp_path))
    tree = store.open_tree(KEY, level="power")
    add_node(tree, "root0")
    barrier(tree)
    if where == "log":
        tree.tree.execute("PRAGMA main.user_version = 99")
        barrier(tree)
        tree.close()
    else:
        tree.close()
        tree = store.open_tree(KEY, level="power")  # nothing of tree.db is in the log
        tree.close()
        newer(folder_of(str(tmp_path), KEY) + "/tree.db")
    before = images(folder_of(str(tmp_path), KEY))

    with pytest.raises(SchemaTooNew, match="99"):
        store.open_tree(KEY, level="power")
    assert images(folder_of(str(tmp_path), KEY)) == before
    store.close()


def test_a_newer_index_is_refused(tmp_path: Path) -> None:
    opened(str(tmp_path)).close()
    newer(f"{tmp_path}/roots.db")

    with pytest.raises(SchemaTooNew):
        opened(str(tmp_path))


@pytest.mark.unsound("another version wrote it")
def test_a_newer_agent_file_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    store = opened(str(tmp_path))
    tree = store.open_tree(KEY, level="power")
    add_node(tree, "root0")
    tree.agent("root0").execute(NOTE, ("a", "1"))
    tree.agent("root0").execute("PRAGMA main.user_version = 99")
    barrier(tree)
    tree.close()
    tree = store.open_tree(KEY, level="power")

    with pytest.raises(SchemaTooNew, match="root0"):
        tree.agent("root0").execute(NOTES)
    store.close()


def test_a_file_is_redone_from_the_template_that_its_log_names(tmp_path: Path) -> None:
    store = opened(str(tmp_path))
    tree = store.open_tree(KEY, level="power")
    add_node(tree, "root0")
    tree.agent("root0").execute(NOTE, ("a", "1"))
    barrier(tree)
    store.close()
    templates = list((tmp_path / "templates").iterdir())
    assert len(templates) == 2

    # A later version has other templates; those of old must still be found.
    store = opened(str(tmp_path))
    store._templates._kept.clear()
    store._templates.agent = "0" * 16
    assert keys(store.open_tree(KEY, level="power")) == ["a"]
    store.close()


# --- the index


def make_roots(folder: str) -> list[tuple[TreeKey, int | None]]:
    store = opened(folder)
    expected: list[tuple[TreeKey, int | None]] = []
    for number in range(3):
        key = TreeKey("Supervisor", f"root{number}")
        tree = store.open_tree(key, level="power")
        tree.tree.execute(
            "INSERT INTO main.node (slot, class, name, state, created_at) "
            "VALUES ('root0', ?, ?, 'live', 0)",
            key,
        )
        due = number * 100 or None
        for held, dead, at in ((1, 0, due), (None, 0, 900), (None, 1, 1)):
            if due is not None:
                tree.tree.execute(
                    "INSERT INTO main.job (owner, kind, what, at, due_at, lane, held, "
                    "dead, created_at) VALUES ('root0', 'call', 'm', 0, ?, '', ?, ?, 0)",
                    (at, held, dead),
                )
        barrier(tree)
        store.note_root(key, due)
        expected.append((key, due))
    store.close()
    return expected


@pytest.mark.parametrize("damage", ["none", "missing", "garbage", "torn", "empty"])
@pytest.mark.rule("F-247")
def test_a_lost_index_is_made_again_from_the_trees(tmp_path: Path, damage: str) -> None:
    expected = make_roots(str(tmp_path))
    index = tmp_path / "roots.db"
    if damage in ("missing", "garbage"):
        index.unlink()
    if damage == "garbage":
        index.write_bytes(os.urandom(8192))
    if damage == "torn":
        index.write_bytes(index.read_bytes()[:5000].ljust(8192, b"\xff"))
    if damage == "empty":
        index.write_bytes(b"")

    store = opened(str(tmp_path))
    assert [(e.key, e.due_at) for e in store.roots()] == expected
    store.close()


def test_a_tree_that_was_half_dropped_is_not_listed_and_is_removed(
    tmp_path: Path,
) -> None:
    expected = make_roots(str(tmp_path))
    path = folder_of(str(tmp_path), expected[0][0])
    os.rename(path, path + ".dropped")
    (tmp_path / "roots.db").unlink()

    store = opened(str(tmp_path))
    assert [(e.key, e.due_at) for e in store.roots()] == expected[1:]
    assert not os.path.exists(path + ".dropped")
    store.close()


# --- open files


def test_many_files_are_served_by_few_connections(tmp_path: Path) -> None:
    store = opened(str(tmp_path), limits=Limits(open_databases=8, checkpoint_frames=20))
    tree = store.open_tree(KEY, level="process")
    slots = [f"s{number}" for number in range(200)]
    for slot in slots:
        add_node(tree, slot)
    for turn in range(4):
        for slot in slots:
            tree.agent(slot).execute(NOTE, (f"k{turn}", BIG))
            assert len(store._open_files) <= 8
        barrier(tree)
    store.close()
    descriptors = len(os.listdir("/proc/self/fd"))

    store = opened(str(tmp_path), limits=Limits(open_databases=8))
    tree = store.open_tree(KEY, level="process")
    for slot in slots:
        assert keys(tree, slot) == ["k0", "k1", "k2", "k3"]
    assert len(os.listdir("/proc/self/fd")) < descriptors + 8 * 4 + 20
    store.close()


@pytest.mark.rule("F-11", "I-43")
def test_a_record_of_many_closed_files_keeps_none_of_them_open(tmp_path: Path) -> None:
    store = opened(str(tmp_path), limits=Limits(open_databases=8))
    tree = store.open_tree(KEY, level="process")
    descriptors = len(os.listdir("/proc/self/fd"))
    slots = [f"s{number}" for number in range(200)]
    for turn in range(2):
        for slot in slots:
            if not turn:
                add_node(tree, slot)
            tree.agent(slot).execute(NOTE, (f"k{turn}", BIG))
        barrier(tree)
        assert len(os.listdir("/proc/self/fd")) < descriptors + 8 * 4 + 20
    assert all(keys(tree, slot) == ["k0", "k1"] for slot in slots)
    store.close()


@pytest.mark.limit("open_asleep")
def test_of_files_that_are_read_while_their_agents_sleep_few_stay_open(
    tmp_path: Path,
) -> None:
    store = opened(str(tmp_path), limits=Limits(open_databases=50, open_asleep=4))
    tree = store.open_tree(KEY, level="process")
    slots = [f"s{number}" for number in range(30)]
    for slot in slots:
        add_node(tree, slot)
        tree.agent(slot).execute(NOTE, ("k", BIG))
    barrier(tree)
    awake, asleep = slots[:10], slots[10:]
    for slot in asleep:
        assert keys(tree, slot) == ["k"]
        tree.agent(slot).rest()
        tree.agent(slot).rest()
    assert len(store._open_files) == len(awake) + 4
    assert all(tree.agent(slot).connection is not None for slot in awake)

    last = tree.agent(asleep[-1])
    last.execute(NOTE, ("more", BIG))  # its agent woke up
    for slot in asleep[:10]:
        assert keys(tree, slot) == ["k"]
        tree.agent(slot).rest()
    assert last.connection is not None
    assert len(store._open_files) == len(awake) + 1 + 4
    barrier(tree)
    store.close()
    store = opened(str(tmp_path))
    tree = store.open_tree(KEY, level="process")
    assert keys(tree, asleep[-1]) == ["k", "more"]
    assert all(keys(tree, slot) == ["k"] for slot in slots[:-1])
    store.close()


@pytest.mark.parametrize("when", ["before", "inside"])
def test_a_file_in_a_transaction_is_not_put_to_rest(tmp_path: Path, when: str) -> None:
    store = opened(str(tmp_path), limits=Limits(open_asleep=1))
    tree = store.open_tree(KEY, level="process")
    for slot in ("a", "b", "c"):
        add_node(tree, slot)
        tree.agent(slot).execute(NOTE, ("k", BIG))
    if when == "before":
        tree.agent("a").rest()
    with tree.agent("a").transaction():
        if when == "inside":
            tree.agent("a").rest()
        for slot in ("b", "c"):
            tree.agent(slot).rest()
        tree.agent("a").execute(NOTE, ("more", BIG))
    assert keys(tree, "a") == ["k", "more"]
    assert tree.agent("b").connection is None
    store.close()


@pytest.mark.limit("open_databases")
def test_least_recently_used_goes_first_and_a_transaction_never(tmp_path: Path) -> None:
    store = opened(str(tmp_path), limits=Limits(open_databases=2))
    tree = store.open_tree(KEY, level="process")
    a, b, c, d = (tree.agent(slot) for slot in "abcd")
    for agent in (a, b, a):
        agent.execute(NOTE, (f"k{id(agent)}{agent.exists}", "1"))
    c.execute(NOTE, ("k", "1"))
    assert [x.connection is not None for x in (a, b, c)] == [True, False, True]

    a.user_begin()
    with c.transaction():
        c.execute(NOTE, ("k2", "1"))
        d.execute(NOTE, ("k", "1"))  # all are busy: one more than the limit
        b.execute(NOTE, ("k2", "1"))
        assert [x.connection is not None for x in (a, b, c, d)] == [
            True,
            True,
            True,
            False,
        ]
    a.user_end(commit=True)
    assert keys(tree, "c") == ["k", "k2"]
    store.close()


def test_nothing_is_kept_for_an_agent_that_nobody_holds(tmp_path: Path) -> None:
    store = opened(str(tmp_path))
    tree = store.open_tree(KEY, level="process")
    for number in range(50):
        tree.agent(f"s{number}").execute(NOTES)

    assert len(tree._agents) == 0
    store.close()


# --- checkpoints and segments


def small() -> Limits:
    return Limits(segment_bytes=64 << 10, checkpoint_frames=50, huge_frames=400)


def wal_size(tree: SqliteTree, name: str) -> int:
    return tree.folder.size(name + "-wal")


@pytest.mark.parametrize("level", ["power", "process"])
def test_logs_and_wals_stay_small_over_a_long_life(tmp_path: Path, level: str) -> None:
    store = opened(str(tmp_path), limits=small())
    tree = store.open_tree(KEY, level="power" if level == "power" else "process")
    add_node(tree, "root0")
    agent = tree.agent("root0")
    agent.user("CREATE TABLE mine (a)", (), 1)
    for _ in range(400):
        agent.user("INSERT INTO mine VALUES (?)", (BIG,), 1)
        barrier(tree)
    segments = [n for n in tree.folder.names() if n.startswith("log")]

    assert tree.log.segment > 5
    assert len(segments) <= 4
    assert wal_size(tree, "root0.db") < 200 * 1048
    store.close()
    store = opened(str(tmp_path))
    tree = store.open_tree(KEY, level="power")
    assert tree.agent("root0").user("SELECT count(*) FROM mine", (), 1).rows == [(400,)]
    store.close()


def test_a_hot_file_is_held_for_one_record(tmp_path: Path) -> None:
    store = opened(str(tmp_path), limits=small())
    tree = store.open_tree(KEY, level="power")
    agent = tree.agent("root0")
    add_node(tree, "root0")
    for number in range(60):
        agent.execute(NOTE, (f"k{number}", BIG))
    begun = tree.begin()
    agent.execute(NOTE, ("during", BIG))  # so it is not clean when the record is done
    assert tree.room(agent)
    while not tree.fill(begun, 1 << 62):
        pass
    tree.write(begun)
    tree.done(begun)
    assert not tree.room(agent)
    assert tree.room(tree.tree)

    barrier(tree)

    assert tree.room(agent)
    agent.execute(NOTE, ("after", BIG))
    assert tree.log.files["root0.db"].end < 10  # the WAL has begun again
    store.close()


def test_a_huge_wal_is_copied_by_the_janitor(tmp_path: Path) -> None:
    store = opened(str(tmp_path), limits=small())
    tree = store.open_tree(KEY, level="power")
    add_node(tree, "root0")
    agent = tree.agent("root0")
    with agent.transaction():
        for number in range(900):
            agent.execute(NOTE, (f"k{number}", BIG))
    record(tree)
    assert not tree.room(agent)
    assert agent.connection is None
    assert wal_size(tree, "root0.db") > 400 * 1048

    run_chores(tree)

    assert tree.room(agent)
    assert wal_size(tree, "root0.db") == 0
    agent.execute(NOTE, ("more", "1"))
    barrier(tree)
    store.close()
    store = opened(str(tmp_path))
    tree = store.open_tree(KEY, level="power")
    assert len(keys(tree)) == 901
    store.close()


def test_a_janitor_that_comes_late_does_not_end_the_wait_for_the_next_copy(
    tmp_path: Path,
) -> None:
    """Else the loop opens a file while the janitor is inside: "database is locked"."""
    store = opened(str(tmp_path), limits=small())
    tree = store.open_tree(KEY, level="power")
    add_node(tree, "root0")
    agent = tree.agent("root0")

    def grow(key: str) -> None:
        with agent.transaction():
            for number in range(900):
                agent.execute(NOTE, (f"{key}{number}", BIG))
        record(tree)

    grow("a")
    late = tree.janitor()
    grow("b")  # the loop could not wait: it has copied the first WAL itself
    assert not tree.room(agent)
    for chore in late:
        chore.work()
        chore.done(None)

    assert not tree.room(agent)
    assert wal_size(tree, "root0.db") > 400 * 1048
    run_chores(tree)
    assert tree.room(agent)
    assert wal_size(tree, "root0.db") == 0
    store.close()


@pytest.mark.parametrize("database", ["root0", "tree"])
def test_a_statement_waits_for_the_janitor_or_does_its_work(
    tmp_path: Path, database: str
) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def observer(operation: str, path: str) -> None:
        janitor = threading.current_thread() is not threading.main_thread()
        if janitor and operation == "sync" and path.endswith(f"{database}.db"):
            inside.set()
            assert go_on.wait(10)

    store = opened(str(tmp_path), limits=small(), files=Files(observer))
    tree = store.open_tree(KEY, level="power")
    add_node(tree, "root0")

    def write(key: str, how_many: int) -> None:
        with tree.tree.transaction(), tree.agent("root0").transaction():
            for number in range(how_many):
                if database == "tree":
                    add_node(tree, f"{key}{number}")
                else:
                    tree.agent("root0").execute(NOTE, (f"{key}{number}", BIG))

    def count() -> int:
        if database == "tree":
            return int(tree.tree.execute("SELECT count(*) FROM main.node")[0][0])
        return len(keys(tree))

    write("a", 5000 if database == "tree" else 900)
    before = count()
    record(tree)
    chores = tree.janitor()
    thread = threading.Thread(target=lambda: [c.work() for c in chores])
    thread.start()
    assert inside.wait(10)
    threading.Timer(0.05, go_on.set).start()
    write("b", 1)  # waits for the thread
    thread.join()
    for chore in chores:
        chore.done(None)
    barrier(tree)
    assert count() == before + 1

    write("c", 5000 if database == "tree" else 900)
    record(tree)
    write("d", 1)  # the chore has not begun: done here
    barrier(tree)
    expected = count()
    store.close()
    store = opened(str(tmp_path))
    tree = store.open_tree(KEY, level="power")
    assert count() == expected
    store.close()


def test_a_chore_of_a_former_life_touches_nothing(tmp_path: Path) -> None:
    store = opened(str(tmp_path), limits=small())
    tree = store.open_tree(KEY, level="power")
    add_node(tree, "root0")
    while not tree.log.wants_segment:
        tree.agent("root0").execute(
            "INSERT OR REPLACE INTO main.culet_value VALUES ('a', json_quote(?))",
            (BIG,),
        )
        record(tree)
    late = tree.janitor()
    assert late
    tree.close()
    store.open_tree(KEY, level="power")
    before = images(folder_of(str(tmp_path), KEY))

    for chore in late:
        chore.work()
        chore.done(None)
    assert images(folder_of(str(tmp_path), KEY)) == before
    store.close()


def test_a_late_write_does_not_reach_the_next_life(tmp_path: Path) -> None:
    store = opened(str(tmp_path))
    tree = store.open_tree(KEY, level="power")
    add_node(tree, "root0")
    late = tree.begin()
    tree.close()
    store.open_tree(KEY, level="power")
    before = images(folder_of(str(tmp_path), KEY))

    with pytest.raises(StorageError, match="closed"):
        tree.write(late)
    assert images(folder_of(str(tmp_path), KEY)) == before
    store.close()


def test_a_failed_sync_of_a_file_refuses_all_further_records(tmp_path: Path) -> None:
    store = opened(str(tmp_path), limits=small())
    tree = store.open_tree(KEY, level="power")
    add_node(tree, "root0")
    for number in range(60):
        tree.agent("root0").execute(NOTE, (f"k{number}", BIG))
    record(tree)
    chores = tree.janitor()
    assert chores
    chores[0].done(OSError(errno.EIO, "no"))

    with pytest.raises(StorageError, match="no"):
        tree.begin()
    tree.close()
    tree = store.open_tree(KEY, level="power")
    assert len(keys(tree)) == 60
    store.close()


# --- the disk is full


class FullDisk:
    """Fails the n-th operation of some kinds, and all of those after it."""

    def __init__(self, kinds: tuple[str, ...], code: int = errno.ENOSPC) -> None:
        self.kinds, self.code, self.left = kinds, code, -1

    def __call__(self, operation: str, path: str) -> None:
        if self.left >= 0 and operation in self.kinds:
            if self.left == 0:
                raise OSError(self.code, os.strerror(self.code), path)
            self.left -= 1


def scenario(store: SqliteStore, told: list[str]) -> None:
    """A short life; `told` are the keys that a record has made durable."""
    tree = store.open_tree(KEY, level="power")
    try:
        if tree.created:
            add_node(tree, "root0")
        for number in range(4):
            key = f"k{len(told)}-{number}"
            if not tree.tree.execute(
                "SELECT 1 FROM main.node WHERE slot = ?", (f"n{number}",)
            ):
                add_node(tree, f"n{number}")
            tree.agent("root0").execute(NOTE, (key, BIG))
            tree.agent(f"n{number}").execute(NOTE, (key, BIG))
            record(tree)
            told.append(key)
            for chore in tree.janitor():
                error: BaseException | None = None
                try:
                    chore.work()
                except OSError as caught:
                    error = caught
                chore.done(error)
    finally:
        tree.close()


@pytest.mark.parametrize("kinds", [("write",), ("sync", "sync-folder"), ("read",)])
def test_whatever_fails_the_tree_comes_back_at_its_last_record(
    tmp_path: Path, kinds: tuple[str, ...]
) -> None:
    fault = FullDisk(kinds)
    limits = Limits(segment_bytes=32 << 10, checkpoint_frames=5)
    failures = 0
    for nth in range(400):
        folder = str(tmp_path / str(nth))
        store = opened(folder, limits=limits, files=Files(fault))
        told: list[str] = []
        scenario(store, told)
        fault.left = nth
        try:
            scenario(store, told)
            done = True
        except CuletError as error:
            assert isinstance(error, StorageFull), repr(error)
            done, failures = False, failures + 1
        fault.left = -1
        tree = store.open_tree(KEY, level="power")
        # A record whose write failed may yet be there whole: it was told to nobody.
        found = keys(tree)
        assert set(told) <= set(found)
        assert len(found) <= len(told) + 1
        tree.close()
        store.close()
        if done:
            break
    else:
        pytest.fail("the scenario never got through")
    assert failures > 5


def test_a_full_disk_under_sqlite_is_told_and_rolled_back(tmp_path: Path) -> None:
    class FullFile(apsw.VFSFile):
        def __init__(self, name: object, flags: list[int]) -> None:
            super().__init__("unix", name, flags)  # type: ignore[arg-type] # as given

        def xWrite(self, data: object, offset: int) -> None:
            if full.is_set():
                raise apsw.FullError("full")
            super().xWrite(data, offset)

    class FullVfs(apsw.VFS):
        def __init__(self) -> None:
            super().__init__("full-disk", "unix")

        def xOpen(self, name: object, flags: list[int]) -> apsw.VFSFile:
            return FullFile(name, flags)

    full = threading.Event()
    vfs = FullVfs()
    store = opened(str(tmp_path), files=Files(vfs="full-disk"))
    tree = store.open_tree(KEY, level="power")
    add_node(tree, "root0")
    agent = tree.agent("root0")
    agent.user("CREATE TABLE mine (a)", (), 1)
    full.set()
    with pytest.raises(StorageFull):
        agent.user("INSERT INTO mine VALUES (1)", (), 1)
    with pytest.raises(StorageFull), tree.tree.transaction():
        add_node(tree, "a")
    agent.user_begin()
    agent.user("INSERT INTO mine VALUES (1)", (), 1)
    with pytest.raises(StorageFull):
        agent.user_end(commit=True)
    full.clear()

    assert not agent.in_user_transaction
    assert agent.user("SELECT * FROM mine", (), 1).rows == []
    add_node(tree, "a")
    agent.user("INSERT INTO mine VALUES (1)", (), 1)
    barrier(tree)
    store.close()
    vfs.unregister()


# --- damage
@pytest.mark.unsound("a segment was taken away")
def test_a_missing_segment_is_corruption_not_loss(tmp_path: Path) -> None:
    store = opened(str(tmp_path), limits=small())
    tree = store.open_tree(KEY, level="power")
    add_node(tree, "root0")
    number = 0
    while len(tree.log.segments) < 2:
        number += 1
        tree.agent("root0").execute(NOTE, (f"k{number}", BIG))
        record(tree)
        for chore in tree.janitor():  # prepares segments, syncs no file: none retires
            if tree.log.wants_segment:
                chore.work()
                chore.done(None)
    first = min(tree.log.segments)
    tree.close()
    os.unlink(f"{tree.folder.path}/{segment_name(first)}")

    with pytest.raises(StorageCorrupt, match="segment"):
        store.open_tree(KEY, level="power")
    store.close()


@pytest.mark.unsound("a file was taken away")
def test_a_missing_file_is_corruption(tmp_path: Path) -> None:
    store = opened(str(tmp_path))
    tree = store.open_tree(KEY, level="power")
    add_node(tree, "root0")
    tree.agent("root0").execute(NOTE, ("a", "1"))
    barrier(tree)
    tree.close()
    store.open_tree(KEY, level="power").close()  # its birth is no longer in the log
    os.unlink(f"{tree.folder.path}/root0.db")

    with pytest.raises(StorageCorrupt, match="root0"):
        store.open_tree(KEY, level="power")
    store.close()


# --- descriptors


def test_a_descriptor_in_use_is_closed_by_its_last_user(tmp_path: Path) -> None:
    folder = Folder(Files(), str(tmp_path))
    folder.write("a", 0, b"x")
    handle = folder._take("a", create=False)
    folder.release("a")
    os.fstat(handle.descriptor)
    folder._give(handle)

    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handle.descriptor)
    folder.write("a", 1, b"y")
    assert folder.read("a") == b"xy"
    folder.unlink("a")
    folder.unlink("a")
    assert folder.names() == []
    assert folder.size("a") == 0


def test_opening_a_new_tree_syncs_little(tmp_path: Path) -> None:
    seen: list[str] = []
    store = opened(str(tmp_path), files=Files(lambda op, _path: seen.append(op)))
    seen.clear()
    store.open_tree(KEY, level="power").close()
    # The segment, its folder, and what is above it: the three folders that were made.
    assert seen.count("sync") == 1
    assert seen.count("sync-folder") <= 6
    seen.clear()
    store.open_tree(TreeKey("Supervisor", "bob"), level="process").close()
    assert seen.count("sync") + seen.count("sync-folder") <= 1
    store.close()
