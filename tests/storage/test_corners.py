"""What seldom happens to a store, one at a time."""

from __future__ import annotations

import errno
import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest

from culet.kernel.core.limits import Limits
from culet.kernel.errors import SqlError, StorageError
from culet.kernel.ports import TreeStore
from culet.storage import Files, SqliteStore, open_memory, open_sqlite
from culet.storage.doctor_folder import look
from culet.storage.janitor import _copy_all
from culet.storage.log import segment_name, segment_numbers
from culet.storage.treefile import FileAgent, SqliteTree
from culet.web.__main__ import main
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
FAR = 1 << 62
SMALL = Limits(segment_bytes=64 << 10, checkpoint_frames=50, huge_frames=400)


class World:
    """One store with one tree that has a root; `broken` operations fail."""

    def __init__(self, folder: Path) -> None:
        self.broken: set[str] = set()  # "operation end-of-path"
        self.store: SqliteStore = open_sqlite(
            str(folder), limits=SMALL, files=Files(self._observe)
        )
        self.store.open()
        self.tree: SqliteTree = self.store.open_tree(KEY, level="power")
        add_node(self.tree, "root0")

    def _observe(self, operation: str, path: str) -> None:
        for kind, end in (wanted.split() for wanted in self.broken):
            if operation == kind and end in os.path.basename(path):
                raise OSError(errno.EIO, "planned", path)

    @property
    def root(self) -> FileAgent:
        return self.tree.agent("root0")

    def fill_wal(self, count: int, key: str = "k") -> None:
        with self.root.transaction():
            for number in range(count):
                self.root.execute(NOTE, (f"{key}{number}", BIG))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.broken.clear()
    world.store.close()


# --- checkpoints


def test_a_file_that_is_being_synced_is_not_checkpointed_again(world: World) -> None:
    world.fill_wal(60, "a")
    record(world.tree)
    late = world.tree.janitor()
    world.fill_wal(60, "b")
    record(world.tree)
    file = world.root.file
    assert file is not None
    assert not file.checkpointed
    for chore in late:
        chore.work()
        chore.done(None)
    barrier(world.tree)
    assert file.checkpointed


def test_a_mark_that_cannot_be_written_ends_the_life_of_the_tree(world: World) -> None:
    world.fill_wal(60)
    begun = world.tree.begin()
    world.tree.fill(begun, FAR)
    world.tree.write(begun)
    world.broken.add("write log")
    world.tree.done(begun)

    assert not world.tree.log.files["root0.db"].checkpointed
    with pytest.raises(StorageError, match="planned"):
        world.tree.begin()


@pytest.mark.parametrize("count", [60, 900], ids=["long", "huge"])
def test_a_wal_with_an_open_transaction_waits_for_its_end(
    world: World, count: int
) -> None:
    world.fill_wal(count)
    begun = world.tree.begin()
    world.tree.fill(begun, FAR)
    world.tree.write(begun)
    world.root.user_begin()
    world.tree.done(begun)
    run_chores(world.tree)
    assert not world.tree.room(world.root)
    assert world.root.in_user_transaction

    world.root.user_end(commit=False)
    barrier(world.tree)
    assert world.tree.room(world.root)
    assert world.root.file is not None
    assert world.root.file.checkpointed


def test_a_checkpoint_that_a_reader_stops_half_way_is_an_error(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    writer = apsw.Connection(path)
    writer.pragma("journal_mode", "wal")
    writer.execute("CREATE TABLE a (b)")
    reader = apsw.Connection(path)
    reader.execute("BEGIN; SELECT * FROM a").fetchall()
    writer.execute("INSERT INTO a VALUES (1)")

    with pytest.raises(StorageError, match="a checkpoint copied"):
        _copy_all(writer)
    reader.close()
    _copy_all(writer)
    writer.close()


def test_the_sync_of_a_file_that_was_deleted_meanwhile_is_needless(
    world: World,
) -> None:
    add_node(world.tree, "kid")
    with world.tree.agent("kid").transaction():
        for number in range(60):
            world.tree.agent("kid").execute(NOTE, (f"k{number}", BIG))
    record(world.tree)
    late = world.tree.janitor()
    world.tree.tree.execute("DELETE FROM main.node WHERE slot = 'kid'")
    world.tree.delete("kid")
    barrier(world.tree)
    assert "kid.db" not in world.tree.folder.names()

    for chore in late:
        chore.work()
        chore.done(None)
    barrier(world.tree)


@pytest.mark.unsound("a file is taken away")
def test_the_sync_of_a_file_that_somebody_took_away_is_an_error(world: World) -> None:
    world.fill_wal(60)
    record(world.tree)
    path = world.tree.folder.where("root0.db")
    os.unlink(path)
    world.tree.folder.release("root0.db")
    run_chores(world.tree)

    with pytest.raises(StorageError, match=r"root0\.db"):
        world.tree.begin()


# --- records


def test_a_wal_that_is_shorter_than_its_commits_is_an_error(world: World) -> None:
    world.fill_wal(5)
    os.truncate(world.tree.folder.where("root0.db-wal"), 2000)
    begun = world.tree.begin()

    with pytest.raises(StorageError, match="shorter than its commits"):
        world.tree.fill(begun, FAR)


def test_a_file_in_which_nothing_was_committed_since_adds_no_page(world: World) -> None:
    world.fill_wal(60)
    barrier(world.tree)
    file = world.root.file
    assert file is not None
    assert file.recheck  # it was checkpointed, and its WAL did not begin again
    world.tree.log.touch(file)
    begun = world.tree.begin()
    world.tree.fill(begun, FAR)

    assert [entry[:4] for entry in begun.entries if entry[0] == "P"] == [
        ("P", "root0.db", 0, [])
    ]
    world.tree.write(begun)
    world.tree.done(begun)


# --- opening and closing


def test_a_store_that_is_not_open_opens_no_tree(tmp_path: Path) -> None:
    for store in (
        open_sqlite(str(tmp_path / "a"), limits=SMALL),
        open_memory("", limits=SMALL),
    ):
        with pytest.raises(StorageError, match="not open"):
            store.open_tree(KEY, level="power")


def test_a_store_closes_while_a_tree_is_on_its_way(tmp_path: Path) -> None:
    store = opened(str(tmp_path))
    store._reserve(KEY)
    store.close()
    opened(str(tmp_path)).close()


def test_a_tree_whose_descriptor_was_closed_by_others_says_so(world: World) -> None:
    world.fill_wal(5)
    barrier(world.tree)
    handle = world.tree.folder._take("log00000001", create=False)
    world.tree.folder._give(handle)
    os.close(handle.descriptor)

    with pytest.raises(StorageError, match="Bad file descriptor"):
        world.tree.close()
    world.store.open_tree(KEY, level="power").close()


def test_an_agent_whose_file_cannot_be_opened_says_so(world: World) -> None:
    world.fill_wal(5)
    barrier(world.tree)
    world.root.disconnect()
    path = world.tree.folder.where("root0.db")
    os.rename(path, path + "x")

    for act in (
        lambda: world.root.execute(NOTES),
        lambda: world.root.executemany(NOTE, [("a", "1")]),
        lambda: world.root.user("SELECT 1", (), 1),
        world.root.user_begin,
    ):
        with pytest.raises(StorageError, match="CantOpen"):
            act()
    assert world.root.connection is None
    assert str(world.root.told(ValueError("odd"))) == "ValueError: odd"
    os.rename(path + "x", path)


# --- statements


@pytest.fixture(params=["sqlite", "memory"])
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TreeStore]:
    make = open_sqlite if request.param == "sqlite" else open_memory
    store = make(str(tmp_path), limits=Limits(sql_steps=200_000))
    store.open()
    tree = store.open_tree(KEY, level="power")
    add_node(tree, "root0")
    yield tree
    tree.close()
    store.close()


def test_a_kernel_statement_that_is_wrong_says_so_with_and_without_a_file(
    tree: TreeStore,
) -> None:
    for number in range(2):
        with pytest.raises(StorageError, match="no such table"):
            tree.agent("root0").execute("SELECT * FROM absent")
        tree.agent("root0").execute(NOTE, (f"a{number}", "1"))
    for database in (tree.agent("root0"), tree.tree):
        with pytest.raises(StorageError, match="no such table"):
            database.executemany("INSERT INTO absent VALUES (?)", [(1,)])


def test_a_long_statement_of_the_kernel_has_no_budget(tree: TreeStore) -> None:
    agent = tree.agent("root0")
    agent.execute(NOTE, ("a", "1"))
    rows = agent.execute(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 99999)"
        " SELECT max(i) FROM n"
    )
    assert rows == [(99999,)]


def test_a_transaction_in_which_the_database_was_closed_is_undone(
    tmp_path: Path,
) -> None:
    store = opened(str(tmp_path))
    tree = store.open_tree(KEY, level="power")
    add_node(tree, "root0")
    with tree.tree.transaction():
        add_node(tree, "kid")
        tree.tree.disconnect()
    assert tree.tree.execute("SELECT slot FROM main.node") == [("root0",)]
    barrier(tree)
    store.close()


def test_a_users_transaction_that_sqlite_has_ended_is_left_quietly(
    tree: TreeStore,
) -> None:
    agent = tree.agent("root0")
    agent.user("CREATE TABLE once (a UNIQUE)", (), 1)
    agent.user_begin()
    agent.user("INSERT INTO once VALUES (1)", (), 1)
    with pytest.raises(SqlError):
        agent.user("INSERT OR ROLLBACK INTO once VALUES (1) RETURNING a", (), 1)
    agent.user_end(commit=False)

    assert agent.user("SELECT * FROM once", (), 1).rows == []


def test_what_returning_wrote_is_undone_where_it_fails(tree: TreeStore) -> None:
    agent = tree.agent("root0")
    agent.user("CREATE TABLE top (id INTEGER PRIMARY KEY)", (), 1)
    agent.user(
        "CREATE TABLE low (t REFERENCES top DEFERRABLE INITIALLY DEFERRED)", (), 1
    )
    with pytest.raises(SqlError, match="FOREIGN KEY"):
        agent.user("INSERT INTO low VALUES (5) RETURNING t", (), 1)
    with pytest.raises(SqlError, match="no such table"):
        agent.user("INSERT INTO absent VALUES (5) RETURNING t", (), 1)

    assert agent.user("SELECT * FROM low", (), 1).rows == []
    agent.user("INSERT INTO low VALUES (NULL) RETURNING t", (), 1)


def test_virtual_tables_beside_the_file_and_of_other_kinds_are_refused(
    tree: TreeStore,
) -> None:
    with pytest.raises(SqlError, match="TEMP"):
        tree.agent("root0").user("CREATE VIRTUAL TABLE temp.f USING fts5(x)", (), 1)
    with pytest.raises(SqlError, match="virtual tables of dbstat"):
        tree.agent("root0").user("CREATE VIRTUAL TABLE f USING dbstat", (), 1)


def test_a_transaction_that_cannot_be_begun_says_so(world: World) -> None:
    world.fill_wal(1)
    connection = world.root.connection
    assert connection is not None
    connection.set_authorizer(lambda *_: apsw.SQLITE_DENY)
    with pytest.raises(StorageError, match="AuthError"):
        world.root.user_begin()
    assert not world.root.in_user_transaction


# --- agents without a file


def test_what_was_never_written_is_deleted_and_measured(tree: TreeStore) -> None:
    agent = tree.agent("root0")
    assert agent.size_bytes == 0
    tree.delete("gone")
    assert tree.slots() == set()
    assert not tree.crowded


def test_a_file_that_nobody_has_opened_since_has_a_size() -> None:
    store = open_memory("", limits=SMALL)
    store.open()
    tree = store.open_tree(KEY, level="power")
    add_node(tree, "root0")
    tree.make(tree.agent("root0"))  # made, and not opened
    barrier(tree)
    tree.close()
    tree = store.open_tree(KEY, level="power")
    assert tree.agent("root0").size_bytes > 4096
    assert tree.agent("root0").execute(NOTES) == []
    tree.close()
    store.close()


# --- the doctor


def test_a_file_whose_name_was_lost_is_made_anew_says_the_doctor(world: World) -> None:
    world.fill_wal(5)
    barrier(world.tree)
    world.store.close()
    os.unlink(world.tree.folder.where("root0.db"))

    [tree] = look(world.store.directory, as_found=True).trees
    assert tree.problems == []
    assert any("root0.db: recovery brings" in note for note in tree.notes)


def test_the_doctor_is_a_program(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    barrier(world.tree)
    world.store.close()
    monkeypatch.setattr(sys, "argv", ["doctor", world.store.directory])
    monkeypatch.delitem(sys.modules, "culet.storage.doctor", raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("culet.storage.doctor", run_name="__main__")

    assert ended.value.code == 0
    assert "nothing is wrong" in capsys.readouterr().out


# --- a folder that is read offline


def listed(world: World, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    world.store.close()
    status = main(["tree", world.store.directory])
    said = capsys.readouterr()
    return status, said.out, said.err


def test_agents_whose_files_hold_nothing_yet_are_listed(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    for slot in ("there", "lost"):
        add_node(world.tree, slot, "root0")
        world.tree.make(world.tree.agent(slot))
    barrier(world.tree)
    os.unlink(world.tree.folder.where("lost.db"))

    status, out, _ = listed(world, capsys)
    assert status == 0
    assert out.count("\n") == 3


def test_a_root_that_is_being_destroyed_is_not_listed(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.tree.tree.execute("UPDATE main.node SET state = 'gone'")
    barrier(world.tree)

    assert listed(world, capsys)[1] == "nobody is in there\n"


@pytest.mark.unsound("it is damaged")
@pytest.mark.parametrize("how", ["page", "log", "young"])
def test_a_tree_that_cannot_be_read_is_named_and_one_that_is_being_made_is_not(
    world: World, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    world.fill_wal(60)
    barrier(world.tree)
    world.store.close()
    folder = Path(world.tree.folder.path)
    if how == "page":
        world.store.open()
        tree = world.store.open_tree(KEY, level="power")  # all is in the files now
        tree.close()
        (folder / "tree.db").write_bytes(b"no database" * 700)
    elif how == "log":
        (folder / "log00000001").write_bytes(b"")
        (folder / "tree.db").write_bytes(b"\1" * 9000)
    else:
        for path in folder.iterdir():
            path.unlink()

    status, out, err = listed(world, capsys)
    assert out == ("nobody is in there\n" if how == "young" else "")
    assert ("culet doctor" in err) == (status != 0) == (how != "young")


def test_what_is_no_segment_is_no_number() -> None:
    names = [segment_name(12), "log", "log²", "log3.bak", "lock", segment_name(3)]
    assert segment_numbers(names) == [3, 12]
