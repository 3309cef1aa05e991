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
    "functools", "itertools", "math", "re", "typing", "typing_extensions", "urllib",
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


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_time_and_chance_are_injected(path: Path) -> None:
    if path.name == "clock.py":
        return
    banned = {
        "time.time", "time.time_ns", "datetime.now", "datetime.datetime.now",
        "datetime.utcnow", "random.random", "random.choice", "random.randrange",
        "uuid.uuid4", "secrets.token_hex", "os.urandom", "time.sleep", "eval", "exec",
    }  # fmt: skip
    for line, name in calls(ast.parse(path.read_text())):
        assert name not in banned, f"{path}:{line} calls {name}"
        if name == "print":
            assert path.name == "__main__.py" or "demo" in path.parts, f"{path}:{line}"


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
