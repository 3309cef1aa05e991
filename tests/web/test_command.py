"""`culet serve` from the outside: what is wrong is said in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MODULE = """
from functools import partial
from culet.kernel import Agent, open_kernel

class Desk(Agent):
    pass

class Bad(Agent):
    async def schedule(self): ...

opener = partial(open_kernel, roots=[Desk], storage="sqlite:./data")
bad = partial(open_kernel, roots=[Bad])

async def coroutine(): ...
"""


def command(folder: Path, target: str) -> list[str]:
    (folder / "mine.py").write_text(MODULE)
    return [sys.executable, "-m", "culet.web", "serve", target, "--port", "0"]


def serve(folder: Path, target: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(folder, target),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("mine:bad", "Bad.schedule hides a member of Agent"),
        ("mine:coroutine", "neither an app nor an opener"),
        ("mine:Desk", "neither an app nor an opener"),
        ("mine:nothing", "nothing"),
        ("absent:app", "absent"),
        ("mine", "give MODULE:NAME"),
    ],
)
def test_what_cannot_be_served_is_said_in_one_line(
    tmp_path: Path, target: str, said: str
) -> None:
    done = serve(tmp_path, target)

    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert said in done.stderr


def test_a_second_server_on_a_folder_says_whose_it_is(tmp_path: Path) -> None:
    first = subprocess.Popen(
        command(tmp_path, "mine:opener"),
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert first.stderr is not None
        assert "serving on" in first.stderr.readline()
        second = serve(tmp_path, "mine:opener")
    finally:
        first.terminate()
        first.communicate(timeout=20)

    assert second.returncode == 1
    assert second.stderr.count("\n") == 1, second.stderr
    assert "data" in second.stderr
