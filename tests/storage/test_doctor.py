"""The doctor sees what is wrong, and changes nothing."""

from __future__ import annotations

import argparse
import io
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from culet.kernel.errors import NotFound, StorageBusy
from culet.kernel.ports import TreeKey, TreeStore
from culet.storage import Files, Folder, examine, log, schema
from culet.storage.doctor import add_arguments, main, run
from culet.storage.doctor_folder import look
from culet.storage.doctor_log import fold, read_log
from culet.storage.record import encode_record
from culet.storage.store import folder_of, tree_folders
from storage.driving import KEY, NODE, NOTE, add_node, barrier, opened

pytestmark = pytest.mark.unsound("it is damaged so that the doctor sees it")

RUN = (
    "INSERT INTO main.run (owner, id, child, class, display_order, input_digest, status, "
    "started_at, place) VALUES ('root0', ?, 'kid', 'C', 0, '', 'running', 1, 1)"
)
FIBER = (
    "INSERT INTO main.fiber (owner, id, kind, name, status, started_at) "
    "VALUES ('root0', ?, ?, 'f', 'running', 1)"
)
JOB = (
    "INSERT INTO main.job (owner, kind, what, at, due_at, lane, created_at) "
    "VALUES (?, ?, ?, 0, 0, '', 0)"
)


def healthy(tree: TreeStore) -> None:
    add_node(tree, "root0")
    add_node(tree, "kid", "root0")
    add_node(tree, "dying", "root0")
    add_node(tree, "below", "dying")
    tree.tree.execute(
        "UPDATE main.node SET state = 'gone' WHERE slot IN ('dying', 'below')"
    )
    for slot in ("root0", "kid"):
        tree.agent(slot).execute(NOTE, ("a", "1"))
    tree.tree.execute(RUN, ("run1",))
    tree.tree.execute(FIBER, ("fiber1", "fiber"))
    tree.tree.execute(FIBER, ("turn1", "turn"))
    for i in range(2):
        tree.agent("kid").execute(ENTRY.format(f"'old', {i}, 1, '{{}}'"))
    tree.tree.execute(ENDED.format(n=2))
    for job in (
        ("kid", "turn", "run1"),
        ("root0", "fiber", "fiber1"),
        ("root0", "turn", "turn1"),
        ("root0", "call", "tick"),
        ("root0", "wipe", "dying"),
    ):
        tree.tree.execute(JOB, job)


MORE_ROOTS = NODE.replace("?, ?, 'Supervisor', ?", "'other', NULL, 'Supervisor', 'b'")
ENDED = (
    "INSERT INTO main.run (owner, id, child, class, display_order, input_digest, status, "
    "started_at, completed_at, n, place, end_place) "
    "VALUES ('root0', 'old', 'kid', 'C', 0, '', 'completed', 1, 2, {n}, 2, 5)"
)
EFFECT = (
    "INSERT INTO main.effect (owner, kind, name, key, digest, policy, attempt, status, result, "
    "began_at, settled_at) VALUES ('root0', 'call', 'pay', 'k', '', "
    "'ask', 1, 'completed', '7', 1, 2)"
)
LETTER = "INSERT INTO main.mail (slot, run, id, body, sent_at) VALUES ('kid', {}, 1)"
ACCOUNT = "INSERT INTO main.account (slot, what, state, tokens_held) VALUES ({})"
GONE = "INSERT INTO main.gone (place, owner, frame, kind, path) VALUES ({}, 'deleted', 'p')"
FAULTS = [
    ("running run", "DELETE FROM main.job WHERE what = 'run1'"),
    ("running fiber", "DELETE FROM main.job WHERE what = 'fiber1'"),
    ("has 2 turn jobs", JOB.replace("?, ?, ?", "'kid', 'turn', 'run1'")),
    ("nothing unfinished", JOB.replace("?, ?, ?", "'root0', 'fiber', 'over'")),
    ("call job tick is without a live owner", JOB.replace("?, ?, ?", "'below', 'call', 'tick'")),
    ("run run1 is without a live owner", "UPDATE main.run SET owner = 'below' WHERE id = 'run1'"),
    ("fiber turn1 is without a live owner", "UPDATE main.fiber SET owner = 'x' WHERE id = 'turn1'"),
    ("no wipe covers", "DELETE FROM main.job WHERE kind = 'wipe'"),
    ("live node under", "UPDATE main.node SET state = 'live' WHERE slot = 'below'"),
    ("file without a node", "DELETE FROM main.node WHERE slot = 'kid'"),
    ("more than one root", MORE_ROOTS),
    ("more than one end", ENDED.format(n=0).replace("'old'", "'run1'").replace("'root0'", "'kid'")),
    ("ended with 3 entries, its file holds 0", ENDED.format(n=3).replace("'old'", "'new'")),
    ("trigger run_absorbs", "DROP TRIGGER main.run_absorbs"),
    ("trigger effect_absorbs", "DROP TRIGGER main.effect_absorbs"),
    ("effect 1 (pay) is without a live owner", EFFECT.replace("'root0'", "'below'")),
    ("result of effect 1 (pay) is no JSON", EFFECT.replace("'7'", "'{'")),
    ("2 times, 3 times without", "UPDATE main.job SET attempts = 3, tries = 2 WHERE kind = 'turn'"),
    ("turn1 of agent root0 is closed", ACCOUNT.format("'root0', 'turn1', 'closed', 0")),
    ("of no run and of no turn", ACCOUNT.format("'kid', 'none', 'closed', 0")),
    ("has ended, nothing draws on it", ACCOUNT.format("'kid', 'run1', 'ended', 0")),
    ("holds 5 tokens, those below", ACCOUNT.format("'kid', 'run1', 'open', 5")),
    ("trigger account_of_run", "DROP TRIGGER main.account_of_run"),
    ("letter l to run none", LETTER.format("'none', 'l', '1'")),
    ("letter l to run run1 is no JSON", LETTER.format("'run1', 'l', '{'")),
    ("trigger mail_of_ended", "DROP TRIGGER main.mail_of_ended"),
    (f"newer than {len(schema.TREE)}", "PRAGMA main.user_version = 9"),
    ("has no place", "UPDATE main.run SET place = NULL WHERE id = 'run1'"),
    ("its end lies at 9", "UPDATE main.run SET end_place = 9 WHERE id = 'run1'"),
    ("given to 2 frames", "UPDATE main.run SET place = 5 WHERE id = 'run1'"),
    ("gone at place 7 is without", GONE.format("7, 'below', '{}'")),
    ("gone at place 7 is no JSON", GONE.format("7, 'root0', '{'")),
    ("due at -5", "UPDATE main.job SET due_at = -5 WHERE what = 'tick'"),
]  # fmt: skip
ENTRY = "INSERT INTO main.culet_entry (stream, i, attempt, body) VALUES ({})"
PLACED = ENTRY.replace("body", "body, place")
AGENT_FAULTS = [
    ("gap", ENTRY.format("'old', 3, 1, '{}'")),
    ("earlier attempt", ENTRY.format("'old', 2, 0, '{}'")),
    (
        "lies at 3, before the one",
        PLACED.format("'o', 0, 1, '{}', 4), ('o', 1, 1, '{}', 3"),
    ),
    ("lie at 7 to 7, the run itself at 2 to 5", PLACED.format("'old', 2, 1, '{}', 7")),
    ("no JSON", ENTRY.format("'old', 2, 1, '{'")),
    ("value a is no JSON", "UPDATE main.culet_value SET value = 'a' WHERE key = 'a'"),
    ("trigger culet_entry_keeps", "DROP TRIGGER main.culet_entry_keeps"),
    ("holds 1", "DELETE FROM main.culet_entry WHERE i = 1"),
]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@contextmanager
def written(folder: Path) -> Iterator[TreeStore]:
    """Make a healthy tree; what the block adds becomes durable with its end."""
    store = opened(str(folder))
    tree = store.open_tree(KEY, level="power")
    healthy(tree)
    store.note_root(TreeKey("Supervisor", "root0"), 0)
    yield tree
    barrier(tree)
    store.close()


def test_a_healthy_folder_is_ok_and_stays_as_it_is(tmp_path: Path) -> None:
    store = opened(str(tmp_path))
    tree = store.open_tree(KEY, level="power")
    healthy(tree)
    store.note_root(TreeKey("Supervisor", "root0"), 0)
    barrier(tree)
    tree.tree.execute("DELETE FROM main.job")  # in the WAL only: it never happened
    store.close()
    before = contents(tmp_path)

    report = examine(str(tmp_path))

    assert report.ok, report
    assert [(t.root, t.nodes, t.files) for t in report.trees] == [
        ("Supervisor/root0", 4, 3)
    ]
    assert contents(tmp_path) == before


@pytest.mark.parametrize(("word", "sql"), FAULTS, ids=[w for w, _ in FAULTS])
def test_a_broken_rule_is_named(tmp_path: Path, word: str, sql: str) -> None:
    with written(tmp_path) as tree:
        tree.tree.execute(sql)

    report = examine(str(tmp_path))

    assert not report.ok
    assert any(word in problem for problem in report.trees[0].problems), report


@pytest.mark.parametrize(
    ("word", "sql"), AGENT_FAULTS, ids=[w for w, _ in AGENT_FAULTS]
)
def test_a_broken_rule_of_an_agent_is_named(
    tmp_path: Path, word: str, sql: str
) -> None:
    with written(tmp_path) as tree:
        tree.agent("kid").execute(sql)

    [found] = examine(str(tmp_path)).trees

    assert any(word in problem for problem in found.problems), found


def test_old_turns_of_a_chat_may_have_dropped_what_they_streamed(
    tmp_path: Path,
) -> None:
    with written(tmp_path) as tree:
        tree.tree.execute("DELETE FROM main.job WHERE what = 'turn1'")
        tree.tree.execute(
            "UPDATE main.fiber SET status = 'completed', completed_at = 2, n = 7 "
            "WHERE id = 'turn1'"
        )
    assert examine(str(tmp_path)).ok


def test_a_root_that_is_being_destroyed_owes_nothing(tmp_path: Path) -> None:
    with written(tmp_path) as tree:
        tree.tree.execute("UPDATE main.node SET state = 'gone' WHERE parent IS NULL")
        tree.tree.execute("DELETE FROM main.job")

    [found] = examine(str(tmp_path)).trees

    assert found.problems == []
    assert "destroyed" in found.notes[0]


def test_what_only_a_newer_sqlite_understands_is_no_problem(tmp_path: Path) -> None:
    with written(tmp_path) as tree:
        tree.agent("kid").execute("CREATE TABLE t (a, b AS (concat(a, 'x')))")
        tree.agent("kid").execute("CREATE INDEX i ON t (b)")
        tree.agent("kid").execute("INSERT INTO t VALUES (1)")
    [found] = examine(str(tmp_path)).trees

    assert found.problems == []
    old = sqlite3.sqlite_version_info < (3, 44)
    assert old == any("is older than the one" in note for note in found.notes)


@pytest.mark.parametrize("fault", ["page", "file"])
def test_a_damaged_file_is_named(tmp_path: Path, fault: str) -> None:
    store = opened(str(tmp_path))
    tree = store.open_tree(KEY, level="power")
    healthy(tree)
    for number in range(50):
        tree.agent("kid").execute(NOTE, (f"k{number}", "x" * 500))
    barrier(tree)
    tree.close()
    store.open_tree(KEY, level="power").close()
    store.close()
    path = Path(folder_of(str(tmp_path), KEY)) / "kid.db"
    if fault == "page":
        content = bytearray(path.read_bytes())
        content[-3 * 1024 : -1024] = b"\xff" * 2048
        path.write_bytes(content)
    else:
        path.unlink()

    [found] = examine(str(tmp_path)).trees

    assert any("kid.db" in problem for problem in found.problems)


def test_an_open_or_a_foreign_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        examine(str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    store = opened(str(tmp_path))
    with pytest.raises(StorageBusy):
        examine(str(tmp_path))
    store.close()
    assert examine(str(tmp_path)).ok


# --- how it was found


def test_as_found_tells_what_recovery_will_mend(tmp_path: Path) -> None:
    with written(tmp_path) as tree:
        barrier(tree)
        for number in range(20):
            tree.agent("kid").execute(NOTE, (f"k{number}", "1"))
    [folder] = (Path(p) for p in tree_folders(str(tmp_path)))
    (folder / "stray.db").write_bytes(b"")
    [segment] = folder.glob("log*")
    whole = segment.read_bytes().rstrip(b"\0")
    segment.write_bytes(whole + b"CUL1 half a record")

    [plain] = look(str(tmp_path)).trees
    [found] = look(str(tmp_path), as_found=True).trees

    assert (plain.notes, plain.problems, found.problems) == ([], [], [])
    notes = "\n".join(found.notes)
    for words in (
        f"the last one is number {found.records}",
        "ends in bytes that do not count",
        "stray.db is left over",
        "kid.db-wal has",
        "kid.db: recovery brings",
    ):
        assert words in notes, notes


def test_a_log_with_a_hole_and_one_that_makes_no_sense_are_named(
    tmp_path: Path,
) -> None:
    with written(tmp_path):
        pass
    [folder] = (Path(p) for p in tree_folders(str(tmp_path)))
    [segment] = folder.glob("log*")

    def record(entries: object, low: int) -> bytes:
        return encode_record(
            entries,  # type: ignore[arg-type]
            epoch=1, segment=1, lsn=1, low=low, previous=0, synced=0,
        )[0]  # fmt: skip

    for data, words in (
        (record([("M", ["tree.db"])], 1), "The file tree.db is lost"),
        (record([("M", ["../x.db"])], 1), "makes no sense"),
        (record([("D", "x.db")], 1), "makes no sense"),
        (record([("M", []), ("P", "no.db", 1, [1], b"")], 1), "makes no sense"),
        (
            record([("M", ["x.db"]), ("P", "x.db", 1, [0], bytes(1024))], 1),
            "makes no sense",
        ),
        (record([("M", ["x.db"]), ("D", "x.db")], 1), "knows no tree.db"),
        (record([("M", []), ("M", ["tree.db"])], 1), "knows no tree.db"),
        (record([("M", []), ("C", "tree.db", "../../x")], 1), "template"),
        (record([("M", ["kid.db"])], 1), "knows no tree.db"),
        (record(7, 1), "not a list"),
        (record(1.5, 1), "cannot be read"),
    ):
        segment.write_bytes(data)
        if words == "The file tree.db is lost":
            (folder / "tree.db").rename(folder / "kept")
        [found] = examine(str(tmp_path)).trees
        if words == "The file tree.db is lost":
            (folder / "kept").rename(folder / "tree.db")
        assert any(words in problem for problem in found.problems), found
    segment.unlink()
    (folder / "log00000002").write_bytes(
        encode_record([], epoch=1, segment=2, lsn=2, low=1, previous=0, synced=0)[0]
    )
    [found] = examine(str(tmp_path)).trees
    assert found.problems == ["Segment 1 of the log is missing."]


def test_files_without_a_record_are_named_unless_they_are_just_born(
    tmp_path: Path,
) -> None:
    with written(tmp_path):
        pass
    [folder] = (Path(p) for p in tree_folders(str(tmp_path)))
    [segment] = folder.glob("log*")
    segment.write_bytes(bytes(4096))

    [young] = examine(str(tmp_path)).trees
    (folder / "kid.db").write_bytes(bytes(1 << 20))
    [old] = examine(str(tmp_path)).trees

    assert (young.problems, len(young.notes)) == ([], 1)
    assert "yet something was written to kid.db. Restore" in old.problems[0]


def test_segments_that_were_let_go_and_came_back_do_not_count(tmp_path: Path) -> None:
    """Their unlink was lost with the power; what follows them begins anew."""

    def segment(number: int, lsn: int, low: int, *more: bytes) -> bytes:
        entries = [("M", ["tree.db"])]
        return encode_record(
            entries, epoch=1, segment=number, lsn=lsn, low=low, previous=0, synced=0
        )[0] + b"".join(more)

    for number, data in (
        (1, segment(1, 5, 1, segment(1, 9, 1))),  # the second does not follow
        (2, segment(2, 3, 1)),  # older than what was read: left out
        (7, segment(7, 12, 7, b"CUL1", bytes(60))),  # all before it is superfluous
        (8, segment(8, 13, 7)[:-1]),  # cut
        (9, b"CUL1"),
    ):
        (tmp_path / f"log{number:08d}").write_bytes(data)

    found = read_log(str(tmp_path))
    same = log.read_log(Folder(Files(), str(tmp_path)))

    assert [(r.segment, r.lsn) for r in found.records] == [(7, 12)]
    assert [(r.segment, r.lsn) for r in same.chain] == [(7, 12)]
    assert [os.path.basename(path)[-1] for path in found.torn] == list("12789")
    assert fold(found).keys() == {"tree.db"}


def test_a_copy_without_a_lock_and_with_a_damaged_index_is_looked_at(
    tmp_path: Path,
) -> None:
    with written(tmp_path):
        pass
    (tmp_path / "lock").unlink()
    for name in ("roots.db", "roots.db-wal"):
        (tmp_path / name).write_bytes(b"no database" * 100)

    assert examine(str(tmp_path)).ok
    assert not (tmp_path / "lock").exists()


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    with written(tmp_path):
        pass
    [folder] = (Path(p) for p in tree_folders(str(tmp_path)))
    (folder / "log00000007").mkdir()

    [found] = examine(str(tmp_path)).trees

    assert found.problems[0].startswith("It cannot be read: ")


# --- the command


def command(*args: str) -> tuple[int, str, str]:
    out, errors = io.StringIO(), io.StringIO()
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args(args), out, errors), out.getvalue(), errors.getvalue()


def test_the_command_tells_and_its_status_says_it_too(tmp_path: Path) -> None:
    with written(tmp_path):
        pass
    status, out, errors = command(str(tmp_path))
    assert (status, errors) == (0, "")
    assert out == (
        "Supervisor/root0: 4 agents, 3 files, 2 records, ok\nnothing is wrong\n"
    )
    status, out, _ = command(str(tmp_path), "--json", "--as-found")
    assert (status, json.loads(out)["ok"]) == (0, True)
    assert json.loads(out)["trees"][0]["notes"]
    with written(tmp_path / "bad") as tree:
        tree.tree.execute("DELETE FROM main.job WHERE what = 'fiber1'")
    status, out, _ = command(str(tmp_path / "bad"))
    assert status == 1
    assert (
        "  ! tree.db: The running fiber fiber1 of agent root0 has 0 jobs, not one.\n"
        in out
    )
    assert main([str(tmp_path / "bad"), "--json"]) == 1
    status, out, errors = command(str(tmp_path / "nothing"))
    assert (status, out) == (2, "")
    assert "is not a folder of Culet" in errors


ALONE = """
import sys
for name in ("apsw", "trio", "msgspec", "hypercorn", "quart", "websockets"):
    sys.modules[name] = None
from culet.storage.doctor import main
status = main(sys.argv[1:])
assert not [m for m in sys.modules if m.startswith("culet.kernel")]
sys.exit(status)
"""


def test_the_doctor_needs_nothing_but_the_language(tmp_path: Path) -> None:
    with written(tmp_path):
        pass
    found = subprocess.run(
        [sys.executable, "-c", ALONE, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.endswith("nothing is wrong\n")
