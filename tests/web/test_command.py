"""`culet serve` from the outside: what is wrong is said in one line."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from pathlib import Path

import pytest

MODULE = """
from contextlib import asynccontextmanager
from functools import partial
import trio
from culet.kernel import Agent, open_kernel
from culet.kernel.errors import ChildDidNotStop, UsageError
from culet.web import create_app

class Desk(Agent):
    pass

class Bad(Agent):
    async def schedule(self): ...

app = create_app(partial(open_kernel, roots=[Desk]))
opener = partial(open_kernel, roots=[Desk], storage="sqlite:./data")
bad = partial(open_kernel, roots=[Bad])

async def coroutine(): ...

NUMBER = 5

def raising(error):
    # an opener whose kernel ends by this, out of a nursery as kernels do
    @asynccontextmanager
    async def opened():
        async with trio.open_nursery():
            raise error
        yield
    return opened

stuck = raising(ChildDidNotStop(["Desk/a"]))
deep = raising(ExceptionGroup("", [ValueError(), ExceptionGroup("", [UsageError("odd")])]))
interrupted = raising(KeyboardInterrupt())
broken = raising(ValueError("a fault of ours"))

def at_once():
    raise KeyboardInterrupt
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
        ("mine:NUMBER", "neither an app nor an opener"),
        ("mine:deep", "odd"),
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


@pytest.mark.parametrize(
    ("target", "status", "said"),
    [
        ("mine:stuck", 70, "culet: did not stop, fenced: Desk/a\n"),
        ("mine:interrupted", 130, ""),
        ("mine:at_once", 130, ""),
    ],
)
def test_how_a_server_ended_is_its_exit_status(
    tmp_path: Path, target: str, status: int, said: str
) -> None:
    done = serve(tmp_path, target)

    assert (done.returncode, done.stderr) == (status, said)


def test_a_fault_that_nobody_expected_is_told_whole(tmp_path: Path) -> None:
    done = serve(tmp_path, "mine:broken")

    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "a fault of ours" in done.stderr


@pytest.mark.parametrize(
    ("host", "url", "warned"),
    [
        ("::1", "http://[::1]:", False),
        ("localhost", "http://localhost:", False),
        ("0.0.0.0", "http://0.0.0.0:", True),
    ],
)
def test_a_server_says_its_url_and_whether_it_is_open_to_all(
    tmp_path: Path, host: str, url: str, warned: bool
) -> None:
    server = subprocess.Popen(
        [*command(tmp_path, "mine:opener"), "--host", host],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stderr is not None
        said = server.stderr.readline()
        assert ("anybody may use these agents" in said) == warned
        if warned:
            said = server.stderr.readline()
        assert f"serving on {url}" in said
    finally:
        server.terminate()
        server.communicate(timeout=20)
    assert server.returncode == 0


def test_it_logs_one_object_a_line_if_that_is_asked_for(tmp_path: Path) -> None:
    server = subprocess.Popen(
        [*command(tmp_path, "mine:opener"), "--log", "json"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stderr is not None
        line = json.loads(server.stderr.readline())
        assert (line["level"], line["logger"]) == ("info", "culet.web")
        assert line["message"].startswith("serving on ")
    finally:
        server.terminate()
        server.communicate(timeout=20)


def test_an_opener_answers_to_the_names_that_it_is_given(tmp_path: Path) -> None:
    server = subprocess.Popen(
        [*command(tmp_path, "mine:opener"), "--hosts", "app.example, other.example"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stderr is not None
        port = int(server.stderr.readline().strip().rpartition(":")[2])
        for name, status in (("app.example", 404), ("evil.example", 403)):
            asked = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
            asked.request("GET", "/agents/desk/d", headers={"Host": name})
            assert asked.getresponse().status == status
            asked.close()
    finally:
        server.terminate()
        server.communicate(timeout=20)


def test_names_for_an_app_are_the_app_s_own_affair(tmp_path: Path) -> None:
    done = subprocess.run(
        [*command(tmp_path, "mine:app"), "--hosts", "app.example"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == (
        "culet: mine:app is an app: give its names to create_app(hosts=…)\n"
    )


def test_an_address_of_another_machine_is_a_clear_error(tmp_path: Path) -> None:
    done = subprocess.run(
        [*command(tmp_path, "mine:opener"), "--host", "203.0.113.1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )

    assert done.returncode == 2
    assert "cannot listen on 203.0.113.1:0" in done.stderr
    assert done.stderr.count("\n") == 1


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
