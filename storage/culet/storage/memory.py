"""A store in memory, for tests and for what need not last: same port, no log.

A record keeps an image of each dirty database at its instant; `write` does nothing.
The images outlive `close`, so a test may close a kernel and open another on the same
store, and `crash` forgets what no record has taken.
"""

from __future__ import annotations

from time import perf_counter_ns

import apsw

from culet.kernel.core.limits import Limits
from culet.kernel.errors import NotFound, StorageBusy, StorageError
from culet.kernel.ports import Chore, Db, Level, Record, RootEntry, Stopwatch, TreeKey

from . import schema
from .agentfile import AgentDatabase, EmptyDatabase
from .connection import migrate, open_image
from .database import Database
from .files import Files
from .quota import TreeQuota
from .template import PAGE, build
from .treefile import check_slot

_LIVE_SLOTS = "SELECT slot FROM main.node"
_TREE = "tree"


class MemoryRecord:
    """One record: images of what was dirty, None for what was deleted."""

    def __init__(self, commits: int, todo: list[str]) -> None:
        self.commits = commits
        self.todo = todo
        self.images: dict[str, bytes | None] = {}


class MemoryDatabase(Database):
    """`tree.db` in memory."""

    def connect(self) -> apsw.Connection:
        """Refuse: the tree was closed."""
        msg = "the tree is closed"
        raise StorageError(msg)


class MemoryTree:
    """The port `TreeStore` in memory."""

    def __init__(
        self, store: MemoryStore, key: TreeKey, disk: dict[str, bytes]
    ) -> None:
        self.limits = store.limits
        self.quota = TreeQuota(store.limits)
        self.empty = store.empty
        self.closed = self._over = False
        self.inline = True
        self.commits = 0
        self._store = store
        self._key = key
        self._disk = disk  # name -> image of the last record
        self._dirty: dict[str, None] = {}
        self._live = set(disk)
        self._agents: dict[str, AgentDatabase] = {}
        self.tree = MemoryDatabase()
        self.tree.connection = self._connect(_TREE, disk.get(_TREE, store.tree_image))
        migrate(self.tree.connection, schema.TREE, f"the tree {key}")
        nodes = {slot for (slot,) in self.tree.execute(_LIVE_SLOTS)}
        self.created = not nodes
        self._live = {name for name in disk if name in nodes}
        for name in list(disk):
            if name != _TREE and name not in nodes:
                del disk[name]
        for name, image in disk.items():
            self.quota.note(name, len(image) // PAGE)

    def _connect(self, name: str, image: bytes) -> apsw.Connection:
        def committed() -> None:
            self._touch(name)

        statements = 128 if name == _TREE else 32
        return open_image(
            image, statements=statements, committed=committed, limits=self.limits
        )

    def _touch(self, name: str) -> None:
        self.commits += 1
        self._dirty[name] = None

    # --- what an agent's database asks of its home

    def make(self, agent: AgentDatabase) -> None:
        """Make the database of an agent."""
        self._check_open()
        self.quota.make(agent.slot, len(self._store.agent_image) // PAGE)
        self._live.add(agent.slot)
        self._touch(agent.slot)
        agent.exists = True

    def open_agent(self, agent: AgentDatabase) -> apsw.Connection:
        """Load the database of an agent; it stays until the tree is closed."""
        self._check_open()
        image = self._disk.get(agent.slot, self._store.agent_image)
        connection = self._connect(agent.slot, image)
        migrate(connection, schema.AGENT, f"the database of agent {agent.slot}")
        self.quota.bind(connection)
        agent.fence.install(connection)
        return connection

    def used(self, agent: AgentDatabase) -> None:
        """Nothing is ever closed for room."""

    def resting(self, agent: AgentDatabase) -> None:
        """Nothing is ever closed for room."""

    def size_of(self, agent: AgentDatabase) -> int:
        """Return the bytes of an agent's database."""
        if agent.connection is not None:
            return int(agent.connection.pragma("page_count")) * PAGE
        return len(self._disk.get(agent.slot, b""))

    # --- the port

    @property
    def dirty(self) -> bool:
        """Whether something happened that no record has taken."""
        return bool(self._dirty)

    def agent(self, slot: str) -> AgentDatabase:
        """Return the database of the agent with that slot. Makes nothing."""
        agent = self._agents.get(slot)
        if agent is None:
            exists = check_slot(slot) in self._live
            agent = self._agents[slot] = AgentDatabase(self, slot, exists=exists)
        return agent

    def delete(self, slot: str) -> None:
        """Drop the database of an agent."""
        agent = self.agent(slot)
        agent.disconnect()
        agent.dead, agent.exists = True, False
        del self._agents[slot]
        if slot in self._live:
            self._live.discard(slot)
            self._touch(slot)
            self.quota.drop(slot)

    def slots(self) -> set[str]:
        """Return the slots that have a database."""
        return set(self._live)

    def begin(self) -> MemoryRecord:
        """Take the images of this instant."""
        self._check_open()
        record = MemoryRecord(self.commits, [])
        for name in self._dirty:
            record.images[name] = self._image(name)
        self._dirty.clear()
        return record

    def _image(self, name: str) -> bytes | None:
        if name == _TREE:
            database: Database = self.tree
        elif name in self._live:
            database = self.agent(name)
        else:
            return None
        if database.connection is None:
            return self._store.agent_image
        return database.connection.serialize("main")

    def fill(
        self, record: Record, until_ns: int, stopwatch: Stopwatch = perf_counter_ns
    ) -> bool:
        """Return True: `begin` has taken all."""
        return True

    def write(self, record: Record) -> None:
        """Keep the images: from now on they are what a crash leaves."""
        assert isinstance(record, MemoryRecord)
        for name, image in record.images.items():
            if image is None:
                self._disk.pop(name, None)
            else:
                self._disk[name] = image

    def done(self, record: Record, stopwatch: Stopwatch = perf_counter_ns) -> int:
        """Return the count of commits that are now kept."""
        assert isinstance(record, MemoryRecord)
        grown = []
        for name, image in record.images.items():
            if image is not None and (name == _TREE or name in self._live):
                self.quota.note(name, len(image) // PAGE)
                grown += [self._agents[name]] if name in self._agents else []
        self.quota.settle(grown, self._agents.values)
        return record.commits

    def room(self, db: Db) -> bool:
        """Return True: nothing is ever held."""
        return True

    @property
    def crowded(self) -> bool:
        """Return False: there is nothing to checkpoint."""
        return False

    def janitor(self) -> list[Chore]:
        """Return nothing to do."""
        return []

    def retire(self) -> None:
        """Close all databases. Commits without a record are lost."""
        self.closed = True
        for agent in self._agents.values():
            agent.disconnect()
        self.tree.disconnect()

    def close(self) -> None:
        """Close it: the tree may be opened again."""
        if not self._over:
            self._over = True
            self.retire()
            self._store.closed(self._key)

    def _check_open(self) -> None:
        if self.closed:
            msg = "the tree is closed"
            raise StorageError(msg)


class MemoryStore:
    """The port `Store` in memory."""

    def __init__(self, *, limits: Limits) -> None:
        self.limits = limits
        self.tree_image = build(schema.TREE, wal=False)
        self.agent_image = build(schema.AGENT, wal=False)
        self.empty = EmptyDatabase(limits)
        self._disks: dict[TreeKey, dict[str, bytes]] = {}
        self._index: dict[TreeKey, int | None] = {}
        self._trees: dict[TreeKey, MemoryTree] = {}
        self._open = False

    def open(self) -> None:
        """Take the lock: a second opener gets `StorageBusy`."""
        if self._open:
            msg = "another kernel has this memory: store open"
            raise StorageBusy(msg)
        self._open = True

    def open_tree(
        self, key: TreeKey, *, level: Level, create: bool = True
    ) -> MemoryTree:
        """Open one tree as its last record left it. `level` makes no difference."""
        if not self._open:
            msg = "the store is not open"
            raise StorageError(msg)
        if key in self._trees:
            msg = f"the tree {key.class_name}/{key.name} is open already"
            raise StorageBusy(msg)
        if key not in self._disks and not create:
            raise NotFound(str(key))
        tree = MemoryTree(self, key, self._disks.setdefault(key, {}))
        self._trees[key] = tree
        if tree.created and not create:
            tree.close()
            raise NotFound(str(key))
        return tree

    def closed(self, key: TreeKey) -> None:
        """Note that a tree was closed."""
        self._trees.pop(key, None)

    def drop_tree(self, key: TreeKey) -> None:
        """Remove a closed tree, for good."""
        if key in self._trees:
            msg = f"the tree {key.class_name}/{key.name} is open"
            raise StorageBusy(msg)
        self._disks.pop(key, None)
        self._index.pop(key, None)

    def roots(self) -> list[RootEntry]:
        """Return the host index."""
        return [RootEntry(key, due) for key, due in sorted(self._index.items())]

    def note_root(self, key: TreeKey, due_at: int | None) -> None:
        """Write one line of the host index."""
        self._index[key] = due_at

    def crash(self) -> None:
        """End all as a dead process would: what no record has taken is gone."""
        self.close()

    def close(self) -> None:
        """Close every tree and give up the lock. The content stays."""
        for tree in list(self._trees.values()):
            tree.close()
        self._open = False


def open_memory(
    url_rest: str, *, limits: Limits, files: Files | None = None
) -> MemoryStore:
    """Return a new, empty store of `memory:`. The other arguments make no difference."""
    return MemoryStore(limits=limits)
