"""One open tree on disk: `tree.db`, the agents' files and the log that joins them."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack, suppress
from time import perf_counter_ns
from typing import Final
from weakref import WeakValueDictionary

import apsw

from culet.kernel.core.limits import Limits
from culet.kernel.errors import StorageCorrupt, StorageError, UsageError
from culet.kernel.ports import Chore, Db, Level, Record, Stopwatch

from . import schema
from .agentfile import AgentDatabase, EmptyDatabase
from .connection import check_version, migrate, open_file
from .database import Database
from .errors import CAUGHT, storage_error
from .files import Folder
from .janitor import Connections, Janitor
from .log import (
    check_unborn,
    judge,
    plan_redo,
    read_log,
    redo,
    segment_numbers,
)
from .quota import TreeQuota
from .template import PAGE, Templates, user_version
from .treelog import LogRecord, Tracked, TreeLog

TREE_FILE: Final = "tree.db"
_SLOT: Final = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,63}")
_LIVE_SLOTS: Final = "SELECT slot FROM main.node"


def check_slot(slot: str) -> str:
    """Return the slot, or raise `UsageError` where it cannot name a file."""
    if not _SLOT.fullmatch(slot) or slot == "tree":
        msg = f"a slot is up to 64 letters, digits, - and _, not {slot!r}"
        raise UsageError(msg)
    return slot


class OpenFiles:
    """Which agents' databases of a store are open, least recently used first."""

    def __init__(self, limits: Limits) -> None:
        self.most = limits.open_databases
        self.most_asleep = limits.open_asleep
        self.order: OrderedDict[AgentDatabase, None] = OrderedDict()
        self.asleep: OrderedDict[AgentDatabase, None] = OrderedDict()  # also in `order`

    def make_room(self) -> None:
        """Close what was not used for longest, but nothing that is in a transaction."""
        while len(self.order) >= self.most:
            idle = next((agent for agent in self.order if not agent.busy), None)
            if idle is None:
                return
            idle.disconnect()

    def rest(self, agent: AgentDatabase) -> None:
        """Keep it among the few that sleep; close the one that has rested for longest.

        An open file costs more than a hundred kilobytes. Reading back a thousand runs
        must not leave a thousand of them open, nor close those of agents at work.
        """
        self.asleep[agent] = None
        self.asleep.move_to_end(agent)
        while len(self.asleep) > self.most_asleep:
            oldest, _ = self.asleep.popitem(last=False)
            oldest.disconnect()  # in no transaction: who uses one takes it out

    def use(self, agent: AgentDatabase) -> None:
        """It was used last, whoever did."""
        self.order.move_to_end(agent)
        self.asleep.pop(agent, None)

    def drop(self, agent: AgentDatabase) -> None:
        """It is closed."""
        self.order.pop(agent, None)
        self.asleep.pop(agent, None)

    def __len__(self) -> int:
        return len(self.order)


class TreeDatabase(Database):
    """`tree.db`: opened with the tree and closed with it."""

    def __init__(self, tree: SqliteTree) -> None:
        super().__init__()
        self._tree = tree

    def connect(self) -> apsw.Connection:
        """Open it again after the janitor had it."""
        self.connection = self._tree.open_tree_file()
        return self.connection


class FileAgent(AgentDatabase):
    """An agent's database in a file of its own."""

    def __init__(self, tree: SqliteTree, slot: str, file: Tracked | None) -> None:
        super().__init__(tree, slot, exists=file is not None)
        self.file = file
        self.tree = tree

    def disconnect(self) -> None:
        """Close the connection and the descriptors beside it."""
        was_open = self.connection is not None
        super().disconnect()
        self.tree.open_files.drop(self)
        file, folder = self.file, self.tree.folder
        if file is None:
            return
        if was_open and file.checkpointed and file.end and not self.tree.closed:
            # The next connection would not know that this WAL was copied, and would
            # go on behind it: it would never restart.
            try:
                folder.truncate(file.name + "-wal", 0)
            except CAUGHT as error:
                self.tree.log.fail(error)
                raise storage_error(error) from error
            file.end = file.logged = 0
        folder.release(file.name)
        folder.release(file.name + "-wal")


class SqliteTree(Connections):
    """The port `TreeStore` over SQLite files and a log."""

    def __init__(
        self,
        folder: Folder,
        *,
        templates: Templates,
        level: Level,
        limits: Limits,
        empty: EmptyDatabase,
        open_files: OpenFiles,
        closed: Callable[[SqliteTree], None],
    ) -> None:
        self.folder = folder
        self.limits = limits
        self.quota = TreeQuota(limits)
        self.empty = empty
        self.open_files = open_files
        self.closed = False
        self._over = False
        self._left: list[apsw.Connection] = []  # of the loop, to be closed
        self._writing = threading.Lock()
        self._tree_file: Tracked
        self._on_close = closed
        self._agents: WeakValueDictionary[str, FileAgent] = WeakValueDictionary()
        self.tree = TreeDatabase(self)
        try:
            self._open(templates, level)
        except BaseException as error:
            self._let_go()
            if isinstance(error, CAUGHT):
                raise storage_error(error) from error
            raise

    def _open(self, templates: Templates, level: Level) -> None:
        names = self.folder.names()
        log = read_log(self.folder)
        judge(log, self.folder.path)
        plan = plan_redo(log.chain, names)
        if not log.chain:
            check_unborn(self.folder, names, templates)
        else:
            if TREE_FILE not in plan.live:
                msg = f"the log in {self.folder.path!r} knows no {TREE_FILE}"
                raise StorageCorrupt(msg)
            self._check_version(plan.live[TREE_FILE].first_page, templates)
        redo(self.folder, plan, templates)
        self.log = TreeLog(
            self.folder,
            templates,
            plan,
            level=level,
            segment_bytes=self.limits.segment_bytes,
        )
        self.log.is_open = self.is_open
        self._janitor = Janitor(self.log, self, self.limits)
        self._tree_file = self.log.files.get(TREE_FILE) or self.log.create(
            TREE_FILE, templates.tree
        )
        migrate(self.tree.connect(), schema.TREE, f"the tree in {self.folder.path!r}")
        nodes = {slot for (slot,) in self.tree.execute(_LIVE_SLOTS)}
        self.created = not nodes
        # The table is the truth, never the folder.
        for name, file in list(self.log.files.items()):
            if file is not self._tree_file and name.removesuffix(".db") not in nodes:
                self.log.delete(file)
        for name in self.log.files:
            self.quota.note(name, self.folder.size(name) // PAGE)
        self.log.start(segment_numbers(names))
        self.log.commits = 0

    def _check_version(
        self,
        first_page: Callable[[Folder, str, Templates], bytes],
        templates: Templates,
    ) -> None:
        """Refuse a newer schema before anything is written."""
        page = first_page(self.folder, TREE_FILE, templates)
        check_version(
            user_version(page), schema.TREE, f"the tree in {self.folder.path!r}"
        )

    # --- connections

    def _connect(self, file: Tracked, *, statements: int) -> apsw.Connection:
        log, janitor = self.log, self._janitor

        def committed(frames: int) -> None:
            log.committed(file, frames)
            janitor.committed(file)

        return open_file(
            self.folder.where(file.name),
            vfs=self.folder.files.vfs,
            statements=statements,
            committed=committed,
            limits=self.limits,
        )

    def open_tree_file(self) -> apsw.Connection:
        """Open `tree.db`."""
        self._check_open()
        self._janitor.wait_for(self._tree_file)
        return self._connect(self._tree_file, statements=128)

    def make(self, agent: AgentDatabase) -> None:
        """Make the file of an agent."""
        self._check_open()
        assert isinstance(agent, FileAgent)
        name, born = agent.slot + ".db", self.log.templates.agent
        self.quota.make(name, len(self.log.templates.bytes_of(born)) // PAGE)
        agent.file = self.log.create(name, born)
        agent.exists = True

    def open_agent(self, agent: AgentDatabase) -> apsw.Connection:
        """Open the file of an agent, closing others if too many are open."""
        self._check_open()
        assert isinstance(agent, FileAgent)
        assert agent.file is not None
        self._janitor.wait_for(agent.file)
        self.open_files.make_room()
        connection = self._connect(agent.file, statements=32)
        try:
            migrate(connection, schema.AGENT, f"the file of agent {agent.slot}")
            self.quota.bind(connection)
            agent.fence.install(connection)
        except BaseException:
            connection.close(True)
            raise
        self.open_files.order[agent] = None
        return connection

    def used(self, agent: AgentDatabase) -> None:
        """Note that this one was used last."""
        assert isinstance(agent, FileAgent)
        self.open_files.use(agent)

    def resting(self, agent: AgentDatabase) -> None:
        """Note that this one was read while its agent sleeps."""
        self.open_files.rest(agent)

    def size_of(self, agent: AgentDatabase) -> int:
        """Return the bytes of the file of an agent, as far as records know."""
        assert isinstance(agent, FileAgent)
        assert agent.file is not None
        return max(agent.file.pages * PAGE, self.folder.size(agent.file.name))

    def open(self, file: Tracked) -> apsw.Connection:
        """Return the loop's connection to a file (for the janitor's decisions)."""
        database = self._database(file)
        return database.connection or database.connect()

    def close_file(self, file: Tracked) -> bool:
        """Close the loop's connection, unless a transaction is open in it."""
        database = self._database(file)
        if database.connection is not None and database.connection.in_transaction:
            return False
        database.disconnect()
        return True

    def is_open(self, file: Tracked) -> bool:
        """Whether the loop has a connection to that file."""
        if file is self._tree_file:
            return self.tree.connection is not None
        agent = self._agents.get(file.name.removesuffix(".db"))
        return agent is not None and agent.connection is not None

    def own(self, file: Tracked) -> apsw.Connection:
        """Open a connection for one checkpoint, on the calling thread."""
        return open_file(
            self.folder.where(file.name),
            vfs=self.folder.files.vfs,
            statements=0,
            committed=None,
            limits=self.limits,
        )

    def _database(self, file: Tracked) -> Database:
        if file is self._tree_file:
            return self.tree
        return self.agent(file.name.removesuffix(".db"))

    def _check_open(self) -> None:
        if self.closed:
            msg = "the tree is closed"
            raise StorageError(msg)

    # --- the port

    @property
    def inline(self) -> bool:
        """True at level `process`: a record is a write to the page cache."""
        return not self.log.power

    @property
    def commits(self) -> int:
        """Commits of this life so far, files made and deleted included."""
        return self.log.commits

    @property
    def dirty(self) -> bool:
        """Whether something happened that no record has taken."""
        return bool(self.log.dirty)

    def agent(self, slot: str) -> FileAgent:
        """Return the database of the agent with that slot. Makes nothing."""
        agent = self._agents.get(slot)
        if agent is None:
            file = self.log.files.get(check_slot(slot) + ".db")
            agent = self._agents[slot] = FileAgent(self, slot, file)
        return agent

    def delete(self, slot: str) -> None:
        """Drop an agent's file; it is unlinked after the record that says so."""
        agent = self.agent(slot)
        agent.disconnect()
        agent.dead, agent.exists = True, False
        del self._agents[slot]
        if agent.file is not None:
            self._janitor.forget(agent.file)
            self.log.delete(agent.file)
            self.quota.drop(agent.file.name)

    def slots(self) -> set[str]:
        """Return the slots that have a file."""
        return {n.removesuffix(".db") for n in self.log.files if n != TREE_FILE}

    def begin(self) -> LogRecord:
        """Note the end of every dirty file at this instant."""
        self._check_open()
        return self.log.begin()

    def fill(
        self, record: Record, until_ns: int, stopwatch: Stopwatch = perf_counter_ns
    ) -> bool:
        """Collect pages until the time is up; True when all are there."""
        assert isinstance(record, LogRecord)
        try:
            return self.log.fill(record, until_ns, stopwatch)
        except CAUGHT as error:
            self.log.fail(error)
            raise storage_error(error) from error

    def write(self, record: Record) -> None:
        """Write and sync the record (writer thread)."""
        assert isinstance(record, LogRecord)
        with self._writing:
            self._check_open()  # a late write must not reach the log of the next life
            try:
                self.log.write(record)
            except CAUGHT as error:
                self.log.fail(error)
                raise storage_error(error) from error

    def done(self, record: Record, stopwatch: Stopwatch = perf_counter_ns) -> int:
        """Tidy up after a durable record, return its count of commits."""
        assert isinstance(record, LogRecord)
        count = self.log.done(record)
        self._settle_quota([entry[1] for entry in record.entries if entry[0] == "P"])
        self._janitor.tidy(stopwatch)
        return count

    def _settle_quota(self, names: list[str]) -> None:
        grown: list[FileAgent] = []
        for name in names:
            file = self.log.files.get(name)
            if file is not None:  # not deleted since
                self.quota.note(name, file.pages)
                agent = self._agents.get(name.removesuffix(".db"))
                grown += [] if agent is None else [agent]
        self.quota.settle(grown, lambda: list(self._agents.values()))

    def room(self, db: Db) -> bool:
        """False while writers of that file should wait for the next record."""
        file = db.file if isinstance(db, FileAgent) else self._tree_file
        return file is None or self._janitor.has_room(file)

    @property
    def crowded(self) -> bool:
        """Whether a file that never rests must be checkpointed by the next record."""
        return self._janitor.crowded

    def janitor(self) -> list[Chore]:
        """Return what the janitor thread should do now."""
        return self._janitor.take()

    def retire(self) -> None:
        """Refuse all from now on. What the loop uses is taken away from it here.

        A thread that closes a connection in the middle of a statement of the loop would
        fail, and leave it open.
        """
        self.closed = True
        agents = list(self._agents.values())
        found = [database.detach() for database in (self.tree, *agents)]
        self._left += [connection for connection in found if connection is not None]
        for agent in agents:
            self.open_files.drop(agent)

    def close(self) -> None:
        """Close all files. Commits without a record are lost at the next open."""
        if self._over:
            return
        self._over = True
        try:
            self._let_go()
        except CAUGHT as error:
            raise storage_error(error) from error
        finally:  # or the tree could not be opened again
            self._on_close(self)

    def _let_go(self) -> None:
        self.retire()
        with self._writing:
            pass  # a record that is being written goes on to its end
        if hasattr(self, "_janitor"):
            self._janitor.close()
            with suppress(OSError):  # it would only have told more of a damage
                self.log.mark()
        with ExitStack() as stack:  # one that fails must not keep the others open
            stack.callback(self.folder.close)  # after them: it drops SQLite's locks
            for connection in self._left:
                stack.callback(connection.close, True)
