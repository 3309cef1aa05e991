"""A process that is killed loses nothing that it was told is durable, at both levels."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from storage.driving import KEY, NOTES, opened

CHILD = """
import os, signal, sys
from storage.driving import KEY, NOTE, add_node, barrier
from culet.kernel.core.limits import Limits
from culet.storage import Files, open_sqlite

folder, level, first, nth = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
left = nth

def observer(operation, path):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

limits = Limits(segment_bytes=32 << 10, checkpoint_frames=20, huge_frames=60)
store = open_sqlite(folder, limits=limits, files=Files(observer))
store.open()
tree = store.open_tree(KEY, level=level)
if tree.created:
    add_node(tree, "root0")
    add_node(tree, "kid", "root0")
for number in range(first, first + 1000):
    for slot in ("root0", "kid"):
        tree.agent(slot).execute(NOTE, (f"{number:06d}", "x" * 700))
    barrier(tree)
    print(number, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("level", ["power", "process"])
@pytest.mark.rule("F-475")
def test_what_was_told_is_there_after_a_kill(tmp_path: Path, level: str) -> None:
    rng = random.Random(7)
    told: list[int] = []
    for _ in range(6):
        first = told[-1] + 2 if told else 0  # one more may be there, untold
        found = subprocess.run(
            [
                *(sys.executable, "-c", CHILD),
                *(str(tmp_path), level, str(first), str(rng.randrange(1, 700))),
            ],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert found.returncode == -signal.SIGKILL, found.stderr
        told += map(int, found.stdout.split())
        store = opened(str(tmp_path))
        tree = store.open_tree(KEY, level="power")
        there = [int(key) for (key,) in tree.agent("root0").execute(NOTES)]
        assert tree.agent("kid").execute(NOTES) == tree.agent("root0").execute(NOTES)
        store.close()
        assert set(told) <= set(there)
        assert len(there) <= len(told) + 6
    assert len(told) > 50
