"""Both stores keep the same promises: the port of culet.kernel.ports, on each of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter_ns

import pytest

from culet.kernel.core.limits import DEFAULT
from culet.kernel.errors import (
    Deleted,
    NotFound,
    SqlError,
    StorageBusy,
    StorageError,
    UsageError,
)
from culet.kernel.ports import Store, TreeKey, TreeStore
from culet.storage import MemoryStore, SqliteStore, open_memory, open_sqlite
from storage.driving import KEY, NODE, NOTE, NOTES, add_node, barrier, record


@pytest.fixture(params=["sqlite", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    made: Store = (
        open_sqlite(str(tmp_path / "data"), limits=DEFAULT)
        if request.param == "sqlite"
        else open_memory("", limits=DEFAULT)
    )
    made.open()
    yield made
    made.close()


@pytest.fixture(params=["power", "process"])
def tree(store: Store, request: pytest.FixtureRequest) -> TreeStore:
    tree = store.open_tree(KEY, level=request.param)
    add_node(tree, "root0")
    return tree


def crash(store: Store) -> None:
    """Lose what no record has written; a clean close does the same (see the port)."""
    if isinstance(store, MemoryStore):
        store.crash()
    else:
        store.close()
    store.open()


def reopen(store: Store, tree: TreeStore) -> TreeStore:
    crash(store)
    return store.open_tree(KEY, level="power" if not tree.inline else "process")


def values(tree: TreeStore, slot: str = "root0") -> list[str]:
    return [key for (key,) in tree.agent(slot).execute(NOTES)]


def test_a_new_tree_is_created_clean_and_empty(store: Store) -> None:
    tree = store.open_tree(KEY, level="power")

    assert (tree.created, tree.dirty, tree.commits) == (True, False, 0)
    assert tree.slots() == set()
    assert tree.tree.execute("SELECT * FROM main.job") == []


def test_a_missing_tree_is_not_found_and_leaves_nothing(
    store: Store, tmp_path: Path
) -> None:
    with pytest.raises(NotFound):
        store.open_tree(KEY, level="power", create=False)

    assert list(tmp_path.glob("data/roots/*")) == []
    assert store.open_tree(KEY, level="power").created


def test_a_tree_without_its_root_row_counts_as_missing(store: Store) -> None:
    store.open_tree(KEY, level="power").close()

    with pytest.raises(NotFound):
        store.open_tree(KEY, level="power", create=False)
    assert store.open_tree(KEY, level="power").created


@pytest.mark.rule("F-474")
def test_a_crash_keeps_what_a_record_has_and_nothing_else(
    store: Store, tree: TreeStore
) -> None:
    add_node(tree, "child")
    tree.agent("root0").execute(NOTE, ("told", "1"))
    tree.agent("child").execute(NOTE, ("told", "1"))
    barrier(tree)
    tree.agent("root0").execute(NOTE, ("untold", "1"))
    tree.agent("child").execute(NOTE, ("untold", "1"))
    add_node(tree, "late")

    tree = reopen(store, tree)

    assert values(tree) == values(tree, "child") == ["told"]
    assert tree.tree.execute("SELECT slot FROM main.node ORDER BY born") == [
        ("root0",),
        ("child",),
    ]
    assert not tree.created


def test_a_record_that_was_begun_but_not_written_is_lost(
    store: Store, tree: TreeStore
) -> None:
    barrier(tree)
    tree.agent("root0").execute(NOTE, ("a", "1"))
    begun = tree.begin()
    tree.fill(begun, perf_counter_ns() + 10**9)

    tree = reopen(store, tree)

    assert values(tree) == []
    assert not tree.agent("root0").exists


def test_a_record_that_was_written_but_not_done_is_kept(
    store: Store, tree: TreeStore
) -> None:
    tree.agent("root0").execute(NOTE, ("a", "1"))
    begun = tree.begin()
    tree.fill(begun, perf_counter_ns() + 10**9)
    tree.write(begun)

    assert values(reopen(store, tree)) == ["a"]


def test_what_is_committed_during_a_record_belongs_to_the_next(
    store: Store, tree: TreeStore
) -> None:
    tree.agent("root0").execute(NOTE, ("a", "1"))
    begun = tree.begin()
    tree.agent("root0").execute(NOTE, ("b", "1"))
    tree.fill(begun, perf_counter_ns() + 10**9)
    tree.agent("root0").execute(NOTE, ("c", "1"))
    tree.write(begun)
    assert tree.done(begun) < tree.commits
    assert tree.dirty

    assert values(reopen(store, tree)) == ["a"]


def test_done_returns_the_count_of_the_begin(tree: TreeStore) -> None:
    before = tree.commits
    tree.agent("root0").execute(NOTE, ("a", "1"))  # made, and committed
    begun = tree.begin()
    assert begun.commits == tree.commits == before + 2
    tree.agent("root0").execute(NOTE, ("b", "1"))
    tree.fill(begun, perf_counter_ns() + 10**9)
    tree.write(begun)

    assert tree.done(begun) == begun.commits == tree.commits - 1


def test_reads_count_nothing_and_make_no_file(tree: TreeStore) -> None:
    barrier(tree)
    before = tree.commits
    agent = tree.agent("root0")

    assert agent.execute(NOTES) == []
    assert agent.user("SELECT count(*) AS n FROM culet_value", (), 9).rows == [(0,)]
    with pytest.raises(SqlError, match="no such table"):
        agent.user("SELECT * FROM mine", (), 9)
    assert (tree.commits, tree.dirty, agent.exists) == (before, False, False)
    assert (agent.size_bytes, tree.slots()) == (0, set())


@pytest.mark.parametrize("by", ["kernel", "user", "transaction", "user transaction"])
def test_the_first_write_makes_the_file(tree: TreeStore, by: str) -> None:
    agent = tree.agent("root0")
    if by == "kernel":
        agent.execute(NOTE, ("a", "1"))
    elif by == "user":
        agent.user("CREATE TABLE mine (a)", (), 9)
    elif by == "transaction":
        with agent.transaction():
            agent.execute(NOTE, ("a", "1"))
    else:
        agent.user_begin()
        agent.user_end(commit=True)

    assert agent.exists
    assert tree.agent("root0").exists
    assert agent.size_bytes > 0
    assert tree.slots() == {"root0"}


def test_a_deleted_file_is_gone_also_after_a_crash(
    store: Store, tree: TreeStore
) -> None:
    add_node(tree, "child")
    handle = tree.agent("child")
    handle.execute(NOTE, ("a", "1"))
    barrier(tree)
    tree.tree.execute("DELETE FROM main.node WHERE slot = 'child'")
    tree.delete("child")
    barrier(tree)

    assert tree.slots() == set()
    with pytest.raises(Deleted):
        handle.execute(NOTE, ("b", "1"))
    with pytest.raises(Deleted):
        handle.user("CREATE TABLE mine (a)", (), 9)
    tree = reopen(store, tree)
    assert tree.slots() == set()
    assert not tree.agent("child").exists


def test_a_delete_without_a_record_is_undone_by_a_crash(
    store: Store, tree: TreeStore
) -> None:
    add_node(tree, "child")
    tree.agent("child").execute(NOTE, ("a", "1"))
    barrier(tree)
    tree.delete("child")
    assert tree.dirty

    assert values(reopen(store, tree), "child") == ["a"]


@pytest.mark.rule("I-21")
def test_files_without_a_row_are_swept(store: Store, tree: TreeStore) -> None:
    add_node(tree, "child")
    tree.agent("child").execute(NOTE, ("a", "1"))
    tree.tree.execute("DELETE FROM main.node WHERE slot = 'child'")
    barrier(tree)

    tree = reopen(store, tree)

    assert tree.slots() == set()
    tree = reopen(store, tree)
    assert tree.slots() == set()


def test_a_transaction_commits_whole_or_not_at_all(tree: TreeStore) -> None:
    before = tree.commits
    with tree.tree.transaction():
        add_node(tree, "a")
        add_node(tree, "b")
    assert tree.commits == before + 1
    with pytest.raises(ZeroDivisionError), tree.tree.transaction():
        add_node(tree, "c")
        raise ZeroDivisionError

    assert tree.tree.execute("SELECT count(*) FROM main.node") == [(3,)]


def test_an_inner_transaction_joins_and_undoes_only_itself(tree: TreeStore) -> None:
    before = tree.commits
    with tree.tree.transaction():
        add_node(tree, "a")
        with tree.tree.transaction():
            add_node(tree, "b")
        with pytest.raises(ZeroDivisionError), tree.tree.transaction():
            add_node(tree, "c")
            raise ZeroDivisionError

    assert tree.commits == before + 1
    assert tree.tree.execute("SELECT slot FROM main.node ORDER BY born") == [
        ("root0",),
        ("a",),
        ("b",),
    ]


def test_executemany_is_one_transaction(tree: TreeStore) -> None:
    before = tree.commits
    tree.tree.executemany(NODE, [("a", "root0", "a"), ("b", "root0", "b")])
    assert tree.commits == before + 1
    with pytest.raises(StorageError):
        tree.tree.executemany(NODE, [("c", "root0", "c"), ("a", "root0", "x")])

    assert tree.tree.execute("SELECT count(*) FROM main.node") == [(3,)]


def test_changes_says_how_many_rows(tree: TreeStore) -> None:
    add_node(tree, "a")
    tree.tree.execute("UPDATE main.node SET state = 'gone'")
    assert tree.tree.changes == 2
    tree.tree.execute("UPDATE main.node SET state = 'gone' WHERE slot = 'nobody'")
    assert tree.tree.changes == 0


def test_kernel_statements_join_the_transaction_of_the_user(tree: TreeStore) -> None:
    agent = tree.agent("root0")
    agent.user("CREATE TABLE mine (a)", (), 9)
    before = tree.commits
    agent.user_begin()
    assert agent.in_user_transaction
    agent.user("INSERT INTO mine VALUES (1)", (), 9)
    with agent.transaction():
        agent.execute(NOTE, ("a", "1"))
    agent.execute(NOTE, ("b", "1"))
    with pytest.raises(ZeroDivisionError), agent.transaction():
        agent.execute(NOTE, ("c", "1"))
        raise ZeroDivisionError
    agent.user_end(commit=True)

    assert not agent.in_user_transaction
    assert tree.commits == before + 1
    assert values(tree) == ["a", "b"]


def test_a_transaction_of_the_user_can_be_rolled_back(tree: TreeStore) -> None:
    agent = tree.agent("root0")
    agent.user("CREATE TABLE mine (a)", (), 9)
    agent.user_begin()
    agent.user("INSERT INTO mine VALUES (1)", (), 9)
    with pytest.raises(UsageError):
        agent.user_begin()
    agent.user_end(commit=False)
    agent.user_end(commit=False)

    assert agent.user("SELECT * FROM mine", (), 9).rows == []


@pytest.mark.parametrize("slot", ["", "tree", "../x", "a/b", "a.db", "x" * 65, "ä"])
def test_a_slot_that_cannot_name_a_file_is_refused(tree: TreeStore, slot: str) -> None:
    with pytest.raises(UsageError):
        tree.agent(slot)


def test_a_store_and_a_tree_are_opened_once(store: Store, tree: TreeStore) -> None:
    with pytest.raises(StorageBusy):
        store.open()
    with pytest.raises(StorageBusy):
        store.open_tree(KEY, level="power")
    with pytest.raises(StorageBusy):
        store.drop_tree(KEY)


@pytest.mark.parametrize("end", ["close", "retire"])
def test_a_closed_tree_refuses_everything(
    store: Store, tree: TreeStore, end: str
) -> None:
    agent = tree.agent("root0")
    agent.user_begin()
    agent.execute(NOTE, ("a", "1"))
    getattr(tree, end)()
    getattr(tree, end)()

    assert not agent.in_user_transaction
    with pytest.raises(StorageError):
        tree.tree.execute("SELECT 1")
    with pytest.raises(StorageError):
        agent.execute(NOTE, ("b", "1"))
    with pytest.raises(StorageError):
        tree.begin()
    if end == "retire":
        with pytest.raises(StorageBusy):
            store.open_tree(KEY, level="power")
        thread = threading.Thread(target=tree.close)
        thread.start()
        thread.join()
    assert store.open_tree(KEY, level="power").created


def test_a_dropped_tree_is_gone(store: Store, tree: TreeStore) -> None:
    barrier(tree)
    store.note_root(KEY, 5)
    tree.close()
    store.drop_tree(KEY)

    assert store.roots() == []
    with pytest.raises(NotFound):
        store.open_tree(KEY, level="power", create=False)


def test_the_index_keeps_one_line_a_root(store: Store) -> None:
    other = TreeKey("Supervisor", "bob")
    store.note_root(KEY, 5)
    store.note_root(other, None)
    store.note_root(KEY, 7)

    assert [(e.key, e.due_at) for e in store.roots()] == [(KEY, 7), (other, None)]
    crash(store)
    assert [(e.key, e.due_at) for e in store.roots()] == [(KEY, 7), (other, None)]


def test_trees_are_apart(store: Store, tree: TreeStore) -> None:
    other = store.open_tree(TreeKey("Supervisor", "bob"), level="power")
    add_node(other, "root0")
    tree.agent("root0").execute(NOTE, ("a", "1"))

    assert values(other) == []


def test_errors_of_the_kernel_are_typed_and_keep_their_cause(tree: TreeStore) -> None:
    with pytest.raises(StorageError) as caught:
        tree.tree.execute("SELECT * FROM nothing")
    assert caught.value.__cause__ is not None
    with pytest.raises(StorageError):
        add_node(tree, "root0")
    with pytest.raises(StorageError):
        tree.tree.execute("SELECT ?", (1 << 70,))


@pytest.mark.rule("I-02", "T-028")
def test_a_terminal_status_is_for_good(tree: TreeStore) -> None:
    tree.tree.execute(
        "INSERT INTO main.run (owner, id, child, class, display_order, input_digest, "
        "status, n, started_at, completed_at) "
        "VALUES ('root0', 'r', 'c', 'C', 0, '', 'completed', 3, 1, 2)"
    )
    with pytest.raises(StorageError, match="for good"):
        tree.tree.execute("UPDATE main.run SET status = 'running', n = NULL")


def test_the_stores_keep_the_port(store: Store) -> None:
    assert isinstance(store, SqliteStore | MemoryStore)
    tree: TreeStore = store.open_tree(KEY, level="power")
    assert tree.room(tree.tree)
    assert tree.room(tree.agent("root0"))
    assert record(tree) == 0


@pytest.mark.parametrize(
    "make", [lambda: open_sqlite("", limits=DEFAULT)], ids=["no folder"]
)
def test_a_url_that_names_no_folder_is_refused(make: Callable[[], Store]) -> None:
    with pytest.raises(UsageError):
        make()
