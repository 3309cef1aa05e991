"""Whatever bytes stand in the log of a tree, recovery gives one durable instant of it or
says that it is corrupt.

A tree lives for a while, dies without a goodbye, and its segments are damaged: bits,
cuts, holes, noise, records doubled or out of place, a segment lost. What opens must be
byte-equal to one instant that a record has made, for every file, or be the tree before
its first record. No file is checkpointed here: where noise covers the last
record and the mark behind it, nothing tells it from a torn one. That one byte is never
enough for that is shown in `tests/storage/test_damage.py`.
"""

from __future__ import annotations

import shutil
import struct
import tempfile
from pathlib import Path
from time import perf_counter_ns
from typing import Final

from culet.kernel.core.limits import Limits
from culet.kernel.errors import StorageCorrupt
from culet.kernel.ports import TreeKey
from culet.storage import Files, Folder, open_sqlite
from culet.storage.log import read_log, segment_numbers
from culet.storage.store import SqliteStore, folder_of
from culet.storage.treefile import SqliteTree
from fuzz.case import Case
from machines.sometimes import Sometimes

SOMETIMES: Final = Sometimes(
    "an older instant", "the last instant", "corrupt", "reset", "two segments"
)
KEY: Final = TreeKey("Root", "a")
LIMITS: Final = Limits(segment_bytes=32 << 10, checkpoint_s=3600.0)
NODE: Final = (
    "INSERT INTO main.node (slot, parent, class, name, state, created_at)"
    " VALUES (?, ?, 'C', ?, 'live', 0)"
)
WRITE: Final = "INSERT OR REPLACE INTO main.culet_value (key, value) VALUES (?, ?)"
Instant = dict[str, bytes]


def play(case: Case) -> None:
    """Live, die, damage, recover."""
    with tempfile.TemporaryDirectory(prefix="culet-fuzz-") as place:
        store = open_sqlite(f"{place}/store", limits=LIMITS)
        store.open()
        tree = store.open_tree(KEY, level="power")
        instants = _live(case, tree)
        path = folder_of(store.directory, KEY)
        shutil.copytree(path, f"{place}/kept")
        store.close()
        shutil.rmtree(path)
        shutil.move(f"{place}/kept", path)
        _damage(case, Path(path))
        _recover(case, f"{place}/store", path, instants)


def _live(case: Case, tree: SqliteTree) -> dict[int, Instant]:
    tree.tree.execute(NODE, ("root", None, "a"))
    slots = ["root"]
    instants: dict[int, Instant] = {}
    for _ in range(case.rng.randrange(1, 24)):
        if case.luck(0.3) and len(slots) < 4:
            slots.append(f"s{len(instants)}")
            tree.tree.execute(NODE, (slots[-1], "root", slots[-1]))
            tree.make(tree.agent(slots[-1]))
        elif case.luck(0.1) and len(slots) > 1:
            gone = slots.pop()
            tree.tree.execute("DELETE FROM main.node WHERE slot = ?", (gone,))
            tree.delete(gone)
        for _ in range(case.rng.randrange(1, 5)):
            agent = tree.agent(case.rng.choice(slots))
            text = case.rng.randbytes(case.one(3, 40, 700)).hex()
            agent.execute(WRITE, (str(case.rng.randrange(30)), text))
        record = tree.begin()
        instants[record.lsn] = _instant(tree)
        while not tree.fill(record, perf_counter_ns() + 10**9):
            pass
        tree.write(record)
        tree.done(record)
        if tree.log.wants_segment:
            tree.log.prepare()
    case.mark("two segments", len(tree.log.segments) > 1)
    return instants


def _instant(tree: SqliteTree) -> Instant:
    found: Instant = {}
    for name in tree.log.files:
        slot = name.removesuffix(".db")
        database = tree.tree if slot == "tree" else tree.agent(slot)
        connection = database.connection or database.connect()
        found[name] = connection.serialize("main")
    return found


def _damage(case: Case, folder: Path) -> None:
    segments = sorted(folder.glob("log*"))
    segment = case.rng.choice(segments)
    data = segment.read_bytes()
    used = len(data.rstrip(b"\0")) + 1
    match case.rng.randrange(9):
        case 0:
            data = case.rng.randbytes(case.rng.randrange(4096))
        case 1:
            data = data[: case.rng.randrange(used)]
        case 2 | 3 | 4:
            data = case.damaged(data[:used]) + data[used:]
        case 5:
            at = case.rng.randrange(0, used, 512)
            data = data[:at] + bytes(512) + data[at + 512 :]
        case 6:
            at, size = case.rng.randrange(used), case.rng.randrange(1, 2000)
            data = data[:at] + data[at : at + size] + data[at:]
        case 7:
            at = case.rng.randrange(36)
            data = (
                data[:at] + struct.pack("<I", case.rng.getrandbits(32)) + data[at + 4 :]
            )
        case _:
            segment.unlink()
            return
    segment.write_bytes(data)


def _recover(case: Case, store: str, path: str, instants: dict[int, Instant]) -> None:
    folder = Folder(Files(), path)
    chain = read_log(folder).chain
    began = segment_numbers(folder.names())
    folder.close()
    found: SqliteStore = open_sqlite(store, limits=LIMITS)
    found.open()
    try:
        tree = found.open_tree(KEY, level="power")
    except StorageCorrupt:
        case.mark("corrupt")
        return
    finally:
        if KEY not in found._trees:
            found.close()
    try:
        if not chain or chain[-1].lsn not in instants:
            # Not one record is left that anybody was told of: an empty tree, no mix.
            case.mark("reset")
            assert tree.created, began
            return
        last = max(instants)
        case.mark("the last instant", chain[-1].lsn == last)
        case.mark("an older instant", chain[-1].lsn != last)
        assert _instant(tree) == instants[chain[-1].lsn]
    finally:
        found.close()
