"""What was on the disk and cannot be read any more is refused by name, never passed over.

A torn record is the last thing that a life wrote, and nobody was told of it. Everything
else that cannot be read had been told.
"""

from __future__ import annotations

import random
import shutil
import struct
import zlib
from collections import Counter
from pathlib import Path
from time import perf_counter_ns
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culet.kernel.core.limits import Limits
from culet.kernel.errors import StorageCorrupt
from culet.kernel.ports import Level
from culet.storage import Files, Folder, SqliteStore, examine
from culet.storage.log import judge, read_log, segment_name
from culet.storage.record import (
    HEADER,
    Logged,
    claims,
    encode_mark,
    encode_record,
    record_at,
)
from culet.storage.store import folder_of
from culet.storage.treefile import SqliteTree
from storage.driving import KEY, NOTE, add_node, opened, run_chores

LIMITS = Limits(
    segment_bytes=24 << 10, checkpoint_frames=8, huge_frames=30, checkpoint_s=60.0
)
pytestmark = pytest.mark.unsound("it is damaged")
Instant = dict[str, bytes]


def snapshot(tree: SqliteTree) -> Instant:
    found: Instant = {}
    for name in tree.log.files:
        slot = name.removesuffix(".db")
        database = tree.tree if slot == "tree" else tree.agent(slot)
        connection = database.connection or database.connect()
        found[name] = connection.serialize("main")
    return found


class Lives:
    """A folder in which trees lived, and each instant that a record has made."""

    def __init__(self, top: Path, level: Level = "power") -> None:
        self.top, self.level = top, level
        self.path = Path(folder_of(str(top), KEY))
        self.instants: dict[int, Instant] = {0: {}}
        self.store: SqliteStore
        self.tree: SqliteTree

    def open(self, limits: Limits = LIMITS) -> None:
        self.store = opened(str(self.top), limits=limits)
        self.tree = self.store.open_tree(KEY, level=self.level)
        self.instants[self.tree.log.lsn] = snapshot(self.tree)

    def record(self, *, chores: bool = True) -> None:
        begun = self.tree.begin()
        self.instants[begun.lsn] = snapshot(self.tree)
        while not self.tree.fill(begun, perf_counter_ns() + 10**9):
            pass
        self.tree.write(begun)
        self.tree.done(begun)
        if chores:
            run_chores(self.tree)

    def live(self, rng: random.Random, records: int, chores: float = 0.7) -> None:
        """Some turns; files are made, written, checkpointed and deleted."""
        tree = self.tree
        if not tree.slots():
            add_node(tree, "root0")
        for number in range(records):
            slots = sorted(tree.slots()) or ["root0"]
            if rng.random() < 0.3 and len(slots) < 4:
                slots.append(f"s{tree.log.lsn}")
                add_node(tree, slots[-1])
            elif rng.random() < 0.15 and len(slots) > 1:
                gone = next(s for s in slots if s != "root0")
                slots.remove(gone)
                tree.tree.execute("DELETE FROM main.node WHERE slot = ?", (gone,))
                tree.delete(gone)
            for turn in range(rng.randrange(1, 3)):
                key = f"{tree.log.lsn:04d}-{number}-{turn}"
                tree.agent(rng.choice(slots)).execute(NOTE, (key, "x" * 300))
            self.record(chores=rng.random() < chores)

    def kill(self) -> None:
        """Leave what a killed process leaves."""
        shutil.copytree(self.path, self.top / "kept")
        self.store.close()
        shutil.rmtree(self.path)
        shutil.move(self.top / "kept", self.path)


def whole(path: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in path.iterdir()}


def read(path: Path) -> tuple[int, list[Logged]]:
    """Return the last record that recovery would go to, and the chain."""
    folder = Folder(Files(), str(path))
    log = read_log(folder)
    judge(log, str(path))
    return (log.chain[-1].lsn if log.chain else 0), log.chain


class Place(NamedTuple):
    """Where a record that counts lies."""

    record: Logged
    at: int


def places(path: Path) -> list[Place]:
    found: list[Place] = []
    ends: dict[int, int] = {}
    for record in read(path)[1]:
        found.append(Place(record, ends.get(record.segment, 0)))
        ends[record.segment] = record.end
    return found


def flip(path: Path, segment: int, at: int, how: int = 1) -> bytes:
    """Change a byte of a segment; return what it was like."""
    file = path / segment_name(segment)
    before = file.read_bytes()
    data = bytearray(before)
    data[at] ^= how
    file.write_bytes(data)
    return before


# --- any byte of any record


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("closed", [False, True], ids=["killed", "closed"])
def test_no_byte_that_changes_takes_an_instant_away_unnoticed(
    tmp_path: Path, seed: int, closed: bool
) -> None:
    rng = random.Random(seed)
    lives = Lives(tmp_path)
    for number in range(1 + seed % 2):
        lives.open()
        lives.live(rng, 8 + 9 * number)
        if closed:
            lives.store.close()
        else:
            lives.kill()
    there = places(lives.path)
    last = there[-1].record.lsn
    met: Counter[str] = Counter()
    for place in there:
        size = place.record.end - place.at
        steps = range(HEADER.size, size, 41)
        for offset in (*range(HEADER.size), *steps, size - 1):
            how = rng.choice([1, 2, 3, 32, 128, 255])
            before = flip(lives.path, place.record.segment, place.at + offset, how)
            try:
                found, _ = read(lives.path)
            except StorageCorrupt as error:
                met["refused"] += 1
                # Or the last one of all, which let a segment go that is gone.
                where = f"{segment_name(place.record.segment)} cannot be read at byte"
                gone = place.record.lsn == last and "is missing" in str(error)
                assert gone or f"{where} {place.at}," in str(error)
            else:
                needed = place.record.segment >= there[-1].record.low
                met["before" if found == last - 1 else "last"] += 1
                is_last = place.record.lsn == last
                assert found == last or (found == last - 1 and is_last), (place, offset)
                assert not needed or found < last
            (lives.path / segment_name(place.record.segment)).write_bytes(before)
    assert met["refused"] > 300
    if closed:  # then the last record is known to have been there
        assert met["before"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_tree_with_a_changed_byte_opens_at_an_instant_or_is_left_alone(
    tmp_path: Path, seed: int
) -> None:
    """The same with all that follows, and the doctor comes to the same."""
    rng = random.Random(seed)
    lives = Lives(tmp_path / "data")
    for _ in range(1 + seed % 2):
        lives.open()
        lives.live(rng, 7 + seed)
        lives.kill()
    there = places(lives.path)
    last = there[-1].record.lsn
    kept = whole(lives.path)
    met: Counter[str] = Counter()
    for _ in range(60):
        needed = [p for p in there if p.record.segment >= there[-1].record.low]
        place = rng.choice([*there, *needed, there[-1]])
        at = rng.randrange(place.at, place.record.end)
        flip(lives.path, place.record.segment, at, rng.randrange(1, 256))
        damaged = whole(lives.path)
        report = examine(str(lives.top))
        store = opened(str(lives.top), limits=LIMITS)
        try:
            tree = store.open_tree(KEY, level="power")
        except StorageCorrupt:
            met["refused"] += 1
            assert whole(lives.path) == damaged
            assert not report.ok
        else:
            lsn = tree.log.lsn - 1  # without the manifest of this life
            assert report.trees[0].records == lsn
            assert lsn in (last, last - 1)
            met["last" if lsn == last else "before"] += 1
            assert place.record.lsn == last or lsn == last
            assert snapshot(tree) == lives.instants[lsn]
        store.close()
        shutil.rmtree(lives.path)
        lives.path.mkdir()
        for name, content in kept.items():
            (lives.path / name).write_bytes(content)
    assert met["refused"] > 10 < met.total() - met["last"], met


def test_a_refusal_names_the_file_the_byte_and_what_to_do(tmp_path: Path) -> None:
    lives = Lives(tmp_path)
    lives.open(Limits())
    lives.live(random.Random(1), 4)
    lives.store.close()
    place = places(lives.path)[1]
    flip(lives.path, 1, place.at + HEADER.size + 5)
    before = whole(lives.path)

    for _ in range(2):
        store = opened(str(tmp_path))
        with pytest.raises(StorageCorrupt) as caught:
            store.open_tree(KEY, level="power")
        store.close()
        for words in (f"log00000001 cannot be read at byte {place.at}", "backup"):
            assert words in str(caught.value)
    [tree] = examine(str(tmp_path)).trees

    assert whole(lives.path) == before
    assert f"log00000001 cannot be read at byte {place.at}" in tree.problems[0]
    assert "backup" in tree.problems[0]


# --- the last record, and the first


def test_the_last_record_may_have_been_torn(tmp_path: Path) -> None:
    lives = Lives(tmp_path)
    lives.open(Limits())  # nothing is checkpointed
    lives.live(random.Random(1), 4)
    lives.kill()
    place = places(lives.path)[-1]
    flip(lives.path, 1, place.at + HEADER.size + 5)
    lives.open(Limits())

    assert lives.tree.log.lsn == place.record.lsn
    assert snapshot(lives.tree) == lives.instants[place.record.lsn - 1]
    lives.store.close()


def test_what_a_file_already_holds_was_not_torn(tmp_path: Path) -> None:
    lives = Lives(tmp_path)
    lives.open()
    add_node(lives.tree, "root0")
    for number in range(8):
        lives.tree.agent("root0").execute(NOTE, (f"k{number}", "x" * 300))
    lives.record()
    assert lives.tree.log.files["root0.db"].checkpointed
    lives.kill()
    place = places(lives.path)[-1]
    flip(lives.path, 1, place.at + HEADER.size + 5)

    with pytest.raises(StorageCorrupt, match=f"byte {place.at},"):
        read(lives.path)


@pytest.mark.rule("F-08")
def test_a_tree_never_begins_anew_over_what_it_held(tmp_path: Path) -> None:
    """The log holds one record, that of the last open, and all else is in the files."""
    lives = Lives(tmp_path)
    lives.open()
    lives.live(random.Random(1), 6)
    lives.kill()
    lives.open()
    lives.kill()
    [place] = places(lives.path)
    log = segment_name(place.record.segment)
    kept = whole(lives.path)
    for name, content in (
        (log, None),
        (log, b""),
        (log, bytes(4096)),
        (log, b"\1" + kept[log][1:]),
    ):
        (lives.path / name).unlink()
        if content is not None:
            (lives.path / name).write_bytes(content)
        before = whole(lives.path)
        lives.store = opened(str(tmp_path))
        with pytest.raises(StorageCorrupt, match="was written to"):
            lives.store.open_tree(KEY, level="power")
        lives.store.close()
        [tree] = examine(str(tmp_path)).trees
        assert "something was written to" in tree.problems[0]
        assert whole(lives.path) == before
        (lives.path / name).write_bytes(kept[name])
    lives.open()
    assert snapshot(lives.tree) == lives.instants[place.record.lsn]
    lives.store.close()


@pytest.mark.parametrize("level", ["power", "process"])
def test_a_tree_whose_first_record_never_arrived_begins_anew(
    tmp_path: Path, level: Level
) -> None:
    """A cut in its very first open: files in part, the log without a whole record."""
    lives = Lives(tmp_path, level)
    lives.open(Limits())
    lives.kill()
    log = lives.path / "log00000001"
    log.write_bytes(log.read_bytes()[: HEADER.size + 3])
    tree = lives.path / "tree.db"
    content = tree.read_bytes()
    tree.write_bytes(content[:512] + bytes(1024) + content[1536:-512])
    (lives.path / "late.db").write_bytes(b"")

    assert examine(str(tmp_path)).ok
    lives.open()
    assert lives.tree.created
    assert lives.tree.slots() == set()
    lives.store.close()


# --- what is no evidence


def test_at_level_process_a_cut_may_lose_a_record_before_a_later_one(
    tmp_path: Path,
) -> None:
    lives = Lives(tmp_path, "process")
    lives.open(Limits())
    lives.live(random.Random(1), 5)
    lives.kill()
    place = places(lives.path)[2]
    log = lives.path / "log00000001"
    data = bytearray(log.read_bytes())
    data[place.at : place.record.end] = bytes(place.record.end - place.at)
    log.write_bytes(data)
    lives.open(Limits())

    assert snapshot(lives.tree) == lives.instants[place.record.lsn - 1]
    lives.store.close()


def test_at_level_process_what_was_synced_is_known(tmp_path: Path) -> None:
    lives = Lives(tmp_path, "process")
    lives.open(Limits(checkpoint_frames=8))
    lives.live(random.Random(1), 6)
    assert lives.tree.log.synced > 2
    lives.record()
    lives.kill()
    place = places(lives.path)[1]
    flip(lives.path, place.record.segment, place.at + 7)

    with pytest.raises(StorageCorrupt, match=f"byte {place.at},"):
        read(lives.path)


def test_a_record_that_a_user_has_stored_is_no_evidence(tmp_path: Path) -> None:
    """The sector with the header of the last record never arrived; what came is the
    user's, who knows how a log is written.
    """
    lives = Lives(tmp_path)
    lives.open(Limits())
    lives.live(random.Random(1), 2)
    lsn = lives.tree.log.lsn
    forged = b"".join(
        [
            encode_record(
                [], epoch=1, segment=1, lsn=lsn + 9, low=1, previous=0, synced=lsn + 8
            )[0],
            encode_mark(epoch=1, segment=1, synced=lsn + 8),
            b"\xf5\0\xf5\xf5CL2\xf5CLS\xf5" * 3,
        ]
    )
    user = lives.tree.agent("root0")
    user.user("CREATE TABLE mine (a)", (), 1)
    user.user("INSERT INTO mine VALUES (?)", (forged,), 1)
    lives.record()
    assert user.user("SELECT a FROM mine", (), 1).rows == [(forged,)]
    lives.kill()
    place = places(lives.path)[-1]
    log = lives.path / "log00000001"
    data = bytearray(log.read_bytes())
    assert data.find(forged[:24]) == data.find(forged[-16:]) == -1
    data[place.at : place.at + 512] = bytes(512)
    log.write_bytes(data)
    lives.open(Limits())

    assert snapshot(lives.tree) == lives.instants[lsn]
    lives.record()
    lives.store.close()


def test_what_an_older_life_left_behind_is_no_evidence(tmp_path: Path) -> None:
    """Whoever wrote it, its records are of an earlier epoch than the last that counts."""
    lives = Lives(tmp_path)
    for _ in range(2):
        lives.open(Limits())
        lives.live(random.Random(1), 2)
        lives.kill()
    last = places(lives.path)[-1].record
    later = {"segment": last.segment, "lsn": last.lsn + 5, "low": 1, "previous": 0}
    log = lives.path / segment_name(last.segment)
    sound = log.read_bytes()
    for epoch in (1, 2):
        old, _ = encode_record([], epoch=epoch, synced=last.lsn + 4, **later)
        log.write_bytes(sound[: last.end] + bytes(700) + old + sound[last.end :])
        assert examine(str(tmp_path)).ok == (epoch == 1)
        if epoch == 1:
            assert read(lives.path)[0] == last.lsn
        else:
            with pytest.raises(StorageCorrupt):
                read(lives.path)


# --- segments that are not there


def test_a_hole_between_segments_is_named(tmp_path: Path) -> None:
    lives = Lives(tmp_path)
    lives.open(Limits(segment_bytes=12 << 10))
    while lives.tree.log.segment < 3:  # no file is synced, so nothing retires
        lives.live(random.Random(lives.tree.log.lsn), 1, chores=0)
        if lives.tree.log.wants_segment:
            lives.tree.log.prepare()
    lives.kill()
    there = places(lives.path)
    assert there[-1].record.segment == 3
    assert there[-1].record.low == 1
    sound = whole(lives.path)
    first, second = (segment_name(n) for n in (1, 2))

    (lives.path / second).unlink()
    with pytest.raises(StorageCorrupt, match=f"{first} cannot be read at byte"):
        read(lives.path)
    assert "log00000001" in examine(str(tmp_path)).trees[0].problems[0]
    (lives.path / second).write_bytes(sound[second])
    (lives.path / first).unlink()
    with pytest.raises(StorageCorrupt, match=r"segment 1 of the log .* is missing"):
        read(lives.path)
    assert "Segment 1" in examine(str(tmp_path)).trees[0].problems[0]


def test_a_newest_segment_that_is_gone_is_seen_by_the_one_made_ahead(
    tmp_path: Path,
) -> None:
    lives = Lives(tmp_path)
    lives.open(Limits(segment_bytes=12 << 10))
    while lives.tree.log.segment < 2 or lives.tree.log.ready < 3:
        lives.live(random.Random(lives.tree.log.lsn), 1, chores=0)
        if lives.tree.log.wants_segment:
            lives.tree.log.prepare()
    lives.kill()
    (lives.path / segment_name(lives.tree.log.segment)).unlink()

    with pytest.raises(StorageCorrupt, match=r"segment 2 of the log .* is missing"):
        read(lives.path)
    assert (
        "Segment 2 of the log is missing." in examine(str(tmp_path)).trees[0].problems
    )


# --- the bytes of a record

entries = st.lists(
    st.tuples(st.sampled_from("MCDP"), st.binary(max_size=40), st.text(max_size=8)),
    max_size=6,
) | st.lists(
    st.tuples(
        st.just("P"),
        st.lists(
            st.sampled_from([b"\xf5", b"\0", b"CL2", b"CLS", b"0"]),
            max_size=12,
        ).map(b"".join),
    ),
    max_size=4,
)


@given(entries, st.integers(0, 2**32 - 1), st.integers(0, 2**63))
def test_a_record_is_read_as_it_was_written(
    found: list[tuple[object, ...]], number: int, lsn: int
) -> None:
    data, checksum = encode_record(
        found, epoch=number, segment=7, lsn=lsn, low=number, previous=number, synced=lsn
    )  # fmt: skip
    record = record_at(b"xy" + data, 2, 7)

    assert record is not None
    assert record.entries() == [list(entry) for entry in found]
    assert record.end == len(data) + 2
    assert (record.lsn, record.synced, record.checksum) == (lsn, lsn, checksum)
    assert b"\xf5CL" not in data[HEADER.size :]
    assert record_at(data, 0, 8) is None
    for end in (0, 3, 4, HEADER.size - 1, len(data) - 1):
        assert record_at(data[:end], 0, 7) is None


@given(st.binary(max_size=300), st.integers(0, 300))
def test_a_mark_is_found_in_anything(around: bytes, at: int) -> None:
    mark = encode_mark(epoch=3, segment=7, synced=1 << 40)
    data = around[:at] + mark + around[at:]

    assert (3, 1 << 40) in [(c.epoch, c.synced) for c in claims(data, 0, 7)]
    assert list(claims(data, 0, 8)) == []
    for end in range(len(mark)):
        assert list(claims(mark[:end], 0, 7)) == []
        flipped = mark[:end] + bytes([mark[end] ^ 1]) + mark[end + 1 :]
        assert list(claims(flipped, 0, 7)) == []
    assert len(mark) < HEADER.size  # so the next record overwrites all of it


def test_a_log_without_a_database_of_its_own_changes_nothing(tmp_path: Path) -> None:
    lives = Lives(tmp_path)
    lives.open()
    lives.live(random.Random(1), 2)
    lives.store.close()
    for path in lives.path.glob("log*"):
        path.unlink()
    data, _ = encode_record(
        [("M", [])], epoch=1, segment=1, lsn=1, low=1, previous=0, synced=0
    )
    (lives.path / "log00000001").write_bytes(data)
    before = whole(lives.path)
    store = opened(str(tmp_path))

    with pytest.raises(StorageCorrupt, match=r"knows no tree\.db"):
        store.open_tree(KEY, level="power")
    assert whole(lives.path) == before
    store.close()


def test_logs_of_the_first_format_are_read(tmp_path: Path) -> None:
    """Without `synced`: what cannot be read in them counts as torn, as it always did."""
    head = struct.Struct("<4sIIQII I").pack(b"CUL1", 1, 1, 1, 1, 0, 1)
    one = head + struct.pack("<I", zlib.crc32(b"\x90", zlib.crc32(head))) + b"\x90"
    record = record_at(one, 0, 1)

    assert record is not None
    assert (record.lsn, record.body, record.synced) == (1, b"\x90", -1)
    (tmp_path / "log00000001").write_bytes(
        one + b"?" + encode_mark(epoch=1, segment=1, synced=9)
    )
    log = read_log(Folder(Files(), str(tmp_path)))
    assert log.claims == []
    judge(log, "here")
    assert [r.lsn for r in log.chain] == [1]
