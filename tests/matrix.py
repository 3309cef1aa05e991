"""Which test proves which rule: docs/matrix.md, made from the marks.

python tests/matrix.py        # write docs/matrix.md
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAPER = ROOT / "docs" / "matrix.md"
HEAD = """# Rules and their tests

Made by `python tests/matrix.py` from the marks `@pytest.mark.rule(…)`; do not edit.
F: facets, T and C: agent tools and chat, I: invariants, HB: cases from the field,
kernel-mini: flaws found while the kernel was small.
Not yet: workflows (F group Y) and loaded code (F-398 to F-401, F-408, F-409):
later, they need a process per facet.

| rule | tests |
|---|---|
"""


def marks(path: Path) -> list[tuple[str, str]]:
    """Return (rule, test) pairs of one file."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        for mark in node.decorator_list:
            if (
                isinstance(mark, ast.Call)
                and ast.unparse(mark.func) == "pytest.mark.rule"
            ):
                where = f"{path.relative_to(ROOT)}::{node.name}"
                for arg in mark.args:
                    assert isinstance(arg, ast.Constant), f"{where}: a rule is a text"
                    found.append((str(arg.value), where))
    return found


def order(rule: str) -> tuple[str, int]:
    """Sort F-9 before F-10."""
    match = re.fullmatch(r"([A-Za-z-]+)-(\d+)\w*", rule)
    assert match, f"{rule!r} is no rule"
    return match[1], int(match[2])


def make() -> str:
    """Return the paper."""
    tests: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if "node_modules" in path.parts:
            continue
        for rule, where in marks(path):
            tests.setdefault(rule, []).append(where)
    rows = [
        f"| {rule} | {'<br>'.join(f'`{w}`' for w in sorted(tests[rule]))} |"
        for rule in sorted(tests, key=order)
    ]
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAPER.write_text(make())
    sys.stdout.write(f"{PAPER}\n")
