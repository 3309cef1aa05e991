"""What the kernel does with a store, in one thread: drive records, run chores."""

from __future__ import annotations

from time import perf_counter_ns

from culet.kernel.core.limits import DEFAULT, Limits
from culet.kernel.ports import Store, TreeKey, TreeStore
from culet.storage import Files, open_sqlite
from culet.storage.store import SqliteStore

KEY = TreeKey("Supervisor", "alice")
NODE = (
    "INSERT INTO main.node (slot, parent, class, name, state, created_at) "
    "VALUES (?, ?, 'Supervisor', ?, 'live', 0)"
)
NOTE = "INSERT INTO main.culet_value (key, value) VALUES (?, json_quote(?))"
NOTES = "SELECT key FROM main.culet_value ORDER BY key"


def run_chores(tree: TreeStore) -> None:
    """Do what the janitor thread does, here and now."""
    while chores := tree.janitor():
        for chore in chores:
            error: BaseException | None = None
            try:
                chore.work()
            except Exception as caught:
                error = caught
            chore.done(error)


def record(tree: TreeStore) -> int:
    """Make everything durable that was committed so far."""
    begun = tree.begin()
    while not tree.fill(begun, perf_counter_ns() + 1_000_000):
        pass
    tree.write(begun)
    return tree.done(begun)


def barrier(tree: TreeStore) -> int:
    """Make a record and do the chores that follow it."""
    durable = record(tree)
    run_chores(tree)
    return durable


def add_node(tree: TreeStore, slot: str, parent: str | None = None) -> None:
    """Insert the row without which a file would be swept away; the first is the root."""
    if parent is None:
        root = tree.tree.execute("SELECT slot FROM main.node WHERE parent IS NULL")
        parent = root[0][0] if root else None
    tree.tree.execute(NODE, (slot, parent, slot))


def opened(
    folder: str, *, limits: Limits = DEFAULT, files: Files | None = None
) -> SqliteStore:
    """Return an open store."""
    store = open_sqlite(folder, limits=limits, files=files)
    store.open()
    return store


def keeps_the_port(store: Store) -> Store:
    """Let mypy see that a store is a Store."""
    return store
