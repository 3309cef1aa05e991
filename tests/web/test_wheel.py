"""What is installed from the wheel: all of the product, nothing else, and it serves."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.service import EXAMPLES, service

ROOT = Path(__file__).parents[2]
PORTIONS = ("kernel", "adapters", "storage", "web")
NOT_SHIPPED = {"__pycache__", ".DS_Store"}


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def wheel_of(source: Path, into: Path) -> Path:
    """Build as an installer does, with what is installed here: no network."""
    options = ["--no-deps", "--no-build-isolation", "--no-index", "-q", "-w", into]
    run(sys.executable, "-m", "pip", "wheel", source, *options)
    (made,) = into.glob("culet-*.whl")
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    with zipfile.ZipFile(wheel_of(ROOT, tmp_path_factory.mktemp("wheel"))) as made:
        yield made


@pytest.fixture(scope="module")
def unpacked(wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("site")
    wheel.extractall(place)
    return place


def sources() -> dict[str, bytes]:
    """Return the product's files by the name that they are installed under."""
    found = {}
    for portion in PORTIONS:
        top = ROOT / portion
        for folder, prefix in (
            (top / "culet", "culet"),
            (ROOT / "web/js/src", "culet/web/demo/static/culet"),
        ):
            for path in folder.rglob("*"):
                if path.is_file() and not NOT_SHIPPED & set(path.parts):
                    name = f"{prefix}/{path.relative_to(folder).as_posix()}"
                    found[name] = path.read_bytes()
    return found


def test_the_wheel_holds_the_product_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    contents = {name: wheel.read(name) for name in wheel.namelist()}
    about = {name for name in contents if ".dist-info/" in name}
    product = sources()

    assert contents.keys() - about == product.keys()
    assert all(contents[name] == text for name, text in product.items())
    for portion in PORTIONS:
        assert f"culet/{portion}/py.typed" in contents
    for page in ("demo/static/index.html", "inspect/static/index.html"):
        assert f"culet/web/{page}" in contents
    # what is a link in the tree is a file here: of two packages one is made
    assert contents["culet/web/demo/static/culet/agent.js"].startswith(b"// One agent")
    assert not [n for n in contents if "/test_" in n or "tests/" in n or ".test." in n]


def test_the_wheel_says_what_it_is(wheel: zipfile.ZipFile) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (about,) = {n.split("/")[0] for n in wheel.namelist() if ".dist-info/" in n}
    metadata = wheel.read(f"{about}/METADATA").decode()

    licence = wheel.read(f"{about}/licenses/LICENSE")
    assert licence == (ROOT / "LICENSE").read_bytes()
    for line in (
        f"Version: {project['version']}",
        "License-Expression: Apache-2.0",
        "License-File: LICENSE",
        "Requires-Python: >=3.11",
        "Classifier: Typing :: Typed",
    ):
        assert line in metadata.splitlines()
    entry_points = wheel.read(f"{about}/entry_points.txt").decode()
    assert "culet = culet.web.__main__:main" in entry_points


@pytest.mark.slow
def test_a_wheel_of_the_source_archive_is_the_same(
    wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path)
    (archive,) = tmp_path.glob("culet-*.tar.gz")

    with zipfile.ZipFile(wheel_of(archive, tmp_path)) as again:
        sums = [{i.filename: i.CRC for i in one.infolist()} for one in (wheel, again)]

    assert sums[0] == sums[1]


@pytest.mark.slow
async def test_an_app_of_the_unpacked_wheel_serves_its_pages(
    unpacked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(unpacked))
    where = "import culet.web as w, culet.kernel as k; print(w.__file__, k.__file__)"
    for path in run(sys.executable, "-c", where, cwd=tmp_path).split():
        assert Path(path).is_relative_to(unpacked)

    culet = [sys.executable, "-m", "culet.web", "serve", "--port", "0", "mounted:app"]
    async with service(culet, tmp_path, folder=EXAMPLES) as server:
        token = await server.login("alice", "wonderland")
        for name, words in (
            ("inspect", "<!doctype html>"),
            ("inspect/main.js", "import"),
            ("inspect/views.js", "export"),
        ):
            status, text, _ = await server.http(f"/{name}", Cookie=f"who={token}")
            assert (status, words in text) == (200, True), name


def test_the_demo_of_the_unpacked_wheel_serves_its_page(
    unpacked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(unpacked))
    docs = ROOT / "tests/kill/docs"
    options = ["--data", str(tmp_path), "--port", "0", "--docs", str(docs)]
    demo = subprocess.Popen(
        [sys.executable, "-m", "culet.web", "demo", *options],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert demo.stdout is not None
        url = demo.stdout.readline().split()[2]
        for name, words in (
            ("", "<!doctype html>"),
            ("static/main.js", "./culet/agent.js"),
            ("static/culet/agent.js", "class AgentClient"),
            ("static/culet/reducer.js", "applyAgentToolEvents"),
        ):
            with urllib.request.urlopen(f"{url}/{name}", timeout=10) as answer:
                assert words in answer.read().decode(), name
    finally:
        demo.terminate()
        demo.communicate(timeout=20)
