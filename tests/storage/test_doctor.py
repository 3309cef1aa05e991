"""The doctor sees what is wrong, and changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from culet.kernel.errors import NotFound, StorageBusy
from culet.kernel.ports import TreeStore
from culet.storage import examine
from culet.storage.store import folder_of
from storage.driving import KEY, NOTE, add_node, barrier, opened

RUN = (
    "INSERT INTO main.run (owner, id, child, class, display_order, input_digest, status, "
    "started_at) VALUES ('root0', ?, 'kid', 'C', 0, '', 'running', 1)"
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
    for job in (
        ("kid", "turn", "run1"),
        ("root0", "fiber", "fiber1"),
        ("root0", "turn", "turn1"),
        ("root0", "call", "tick"),
        ("root0", "wipe", "dying"),
    ):
        tree.tree.execute(JOB, job)


FAULTS = [
    ("running run", "DELETE FROM main.job WHERE what = 'run1'"),
    ("running fiber", "DELETE FROM main.job WHERE what = 'fiber1'"),
    ("running run", JOB.replace("?, ?, ?", "'kid', 'turn', 'run1'")),
    ("nothing unfinished", JOB.replace("?, ?, ?", "'root0', 'fiber', 'over'")),
    ("without a live owner", JOB.replace("?, ?, ?", "'below', 'call', 'tick'")),
    ("no wipe covers", "DELETE FROM main.job WHERE kind = 'wipe'"),
    ("live node under", "UPDATE main.node SET state = 'live' WHERE slot = 'below'"),
    ("file without a node", "DELETE FROM main.node WHERE slot = 'kid'"),
]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_healthy_folder_is_ok_and_stays_as_it_is(tmp_path: Path) -> None:
    store = opened(str(tmp_path))
    tree = store.open_tree(KEY, level="power")
    healthy(tree)
    barrier(tree)
    tree.tree.execute("DELETE FROM main.job")  # in the WAL only: it never happened
    store.close()
    before = contents(tmp_path)

    report = examine(str(tmp_path))

    assert report.ok
    assert [(t.root, t.nodes, t.files) for t in report.trees] == [
        ("Supervisor/root0", 4, 3)
    ]
    assert contents(tmp_path) == before


@pytest.mark.parametrize(("word", "sql"), FAULTS, ids=[w for w, _ in FAULTS])
def test_a_broken_rule_is_named(tmp_path: Path, word: str, sql: str) -> None:
    store = opened(str(tmp_path))
    tree = store.open_tree(KEY, level="power")
    healthy(tree)
    tree.tree.execute(sql)
    barrier(tree)
    store.close()

    report = examine(str(tmp_path))

    assert not report.ok
    assert any(word in problem for problem in report.trees[0].problems)


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
