"""The style guide, executable: layers, banned calls, docstrings, what a commit holds."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("kernel", "storage", "adapters", "web")
SOURCES = sorted(p for d in PACKAGES for p in (ROOT / d / "culet").rglob("*.py"))
CORE_ONLY = {
    "__future__", "base64", "bisect", "collections", "dataclasses", "datetime", "enum",
    "functools", "heapq", "itertools", "math", "re", "typing", "typing_extensions", "urllib",
    "zoneinfo", "msgspec", "json", "hashlib", "copy", "operator",
}  # fmt: skip
# layer -> what it must never import (prefixes of absolute module names)
NEVER = {
    "kernel": {"apsw", "quart", "hypercorn", "culet.storage", "culet.adapters", "culet.web"},
    "storage": {"trio", "quart", "hypercorn", "culet.adapters", "culet.web"},
    "adapters": {"apsw", "quart", "hypercorn", "culet.storage", "culet.web"},
    "web": {"apsw"},
}  # fmt: skip
COMPOSITION = {
    "serve",
    "__main__",
    "demo",
}  # the only places of web that know everybody


def layer(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def imports(path: Path) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    package = ".".join(path.relative_to(ROOT).parts[1:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*up, base] if base else up)
            found.append((node.lineno, base))
    return found


def is_core(path: Path) -> bool:
    return "core" in path.relative_to(ROOT).parts or path.name == "session.py"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_layers_hold(path: Path) -> None:
    banned = NEVER[layer(path)]
    for line, name in imports(path):
        assert not any(name == b or name.startswith(b + ".") for b in banned), (
            f"{path}:{line} imports {name}"
        )
        if "core" in path.relative_to(ROOT).parts:
            top = name.split(".")[0]
            inner = (
                name.startswith("culet.kernel.core") or name == "culet.kernel.errors"
            )
            assert top in CORE_ONLY or inner, f"core is pure: {path}:{line} {name}"
        if layer(path) == "web" and not COMPOSITION & set(path.with_suffix("").parts):
            assert not name.startswith(("culet.storage", "culet.adapters")), (
                f"{path}:{line} imports {name}"
            )


def calls(tree: ast.AST) -> list[tuple[int, str]]:
    return [
        (node.lineno, ast.unparse(node.func))
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    ]


# Whatever is below one of these names is time or chance. (trio's clock is virtual in
# tests, and zones are data.)
TIME_AND_CHANCE = (
    "time", "datetime.datetime.now", "datetime.datetime.utcnow",
    "datetime.datetime.today", "datetime.date.today", "random", "secrets",
    "os.urandom", "os.getrandom", "uuid.uuid1", "uuid.uuid4", "ssl.RAND_bytes",
)  # fmt: skip
DEFAULT_STOPWATCH = "the default of an argument; the kernel gives its clock's"
INJECTED_ELSEWHERE = {
    "kernel/culet/kernel/clock.py": ("time", "random", "here they are injected"),
    "kernel/culet/kernel/ports.py": ("time.perf_counter_ns", DEFAULT_STOPWATCH),
    "kernel/culet/kernel/testing.py": ("time.perf_counter_ns", DEFAULT_STOPWATCH),
    "storage/culet/storage/memory.py": ("time.perf_counter_ns", DEFAULT_STOPWATCH),
    "storage/culet/storage/treefile.py": ("time.perf_counter_ns", DEFAULT_STOPWATCH),
    "storage/culet/storage/treelog.py": ("time.perf_counter_ns", DEFAULT_STOPWATCH),
    "storage/culet/storage/janitor.py": ("time.perf_counter_ns", DEFAULT_STOPWATCH),
    "kernel/culet/kernel/stall.py": (
        "time.monotonic",
        "a thread that watches the loop",
    ),
    "kernel/culet/kernel/testing_seeded.py": ("random.Random", "the type, for a check"),
    "web/culet/web/demo/agents.py": (
        "time.perf_counter",
        "a user's code, which has no stopwatch: it cuts the making of an index",
    ),
}


def uses(tree: ast.AST) -> list[tuple[int, str]]:
    """Return every imported thing that is named: (line, its full name)."""
    full: dict[str, str] = {}
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                full[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                full[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            top, *rest = ast.unparse(node).split(".")
            if top in full:
                found.append((node.lineno, ".".join([full[top], *rest])))
    return found


def is_below(name: str, tops: tuple[str, ...]) -> bool:
    return any(name == top or name.startswith(top + ".") for top in tops)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_time_and_chance_are_injected(path: Path) -> None:
    tree = ast.parse(path.read_text())
    *allowed, _why = INJECTED_ELSEWHERE.get(str(path.relative_to(ROOT)), ("",))
    for line, name in uses(tree):
        if "." in name and is_below(name, TIME_AND_CHANCE):
            assert is_below(name, tuple(allowed)), f"{path}:{line} uses {name}"
    for line, name in calls(tree):
        assert name not in {"eval", "exec"}, f"{path}:{line} calls {name}"
        if name == "print":
            assert path.name == "__main__.py" or "demo" in path.parts, f"{path}:{line}"


@pytest.mark.parametrize(
    "text",
    [
        "import time\ntime.time()",
        "import time as t\nstarted = t.monotonic",
        "from time import time_ns as now\nnow()",
        "import datetime\ndatetime.datetime.now(datetime.UTC)",
        "from datetime import datetime as d\nd.utcnow()",
        "import random\nrandom.Random()",
        "from random import shuffle\nshuffle([])",
        "import secrets\nsecrets.token_urlsafe()",
        "import os\nos.urandom(8)",
        "from uuid import uuid4\nuuid4()",
    ],
)
def test_time_and_chance_are_found_under_every_name(text: str) -> None:
    assert any(is_below(name, TIME_AND_CHANCE) for _, name in uses(ast.parse(text)))


def test_what_is_excused_is_still_there() -> None:
    for name, (*allowed, why) in INJECTED_ELSEWHERE.items():
        found = [used for _, used in uses(ast.parse((ROOT / name).read_text()))]
        assert why
        assert all(any(is_below(u, (a,)) for u in found) for a in allowed), name


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_module_says_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"


def test_namespace_has_no_init() -> None:
    for package in PACKAGES:
        assert not (ROOT / package / "culet" / "__init__.py").exists()


def test_names_that_say_nothing_are_not_used() -> None:
    for path in SOURCES:
        assert path.stem not in {"utils", "helpers", "common", "manager", "misc"}, path


def test_changelog_has_an_open_section() -> None:
    assert "## Unreleased" in (ROOT / "CHANGELOG.md").read_text()


def test_no_file_holds_a_place_of_one_machine() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    bad = re.compile(r'(^|[^\w./])/(work|root)/|"resolved": *"http|index-url *=')
    for name in listed:
        path = ROOT / name
        if not name or not path.is_file() or name == "tests/test_tidy.py":
            continue
        assert path.stat().st_size < 400_000, f"{name} is too large to keep"
        if path.suffix in {".png", ".db"}:
            continue
        for number, line in enumerate(path.read_text(errors="replace").split("\n"), 1):
            assert not bad.search(line), f"{name}:{number} {line[:100]}"
