"""Which test proves which rule: docs/matrix.md, made from the marks and `rules.txt`.

python tests/matrix.py          # write docs/matrix.md
python tests/matrix.py --open   # print what is open, as lines of rules.txt
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

ROOT: Final = Path(__file__).parent.parent
PAPER: Final = ROOT / "docs" / "matrix.md"
LEDGER: Final = ROOT / "tests" / "rules.txt"
RULE: Final = re.compile(r"([A-Za-z][A-Za-z-]*)-(\d+)([a-z]?)")
HEAD: Final = """# Rules and their tests

Made by `python tests/matrix.py` from the marks `@pytest.mark.rule(…)` and from
`tests/rules.txt`, which says which rules there are; do not edit.
F: facets (three digits) and faults (two), T, C and B: agent tools and chat, I:
invariants, G: goals, HB: cases from the field, W: the wire, kernel-mini: flaws found
while the kernel was small. *Open* is what nobody has worked on yet, *aside* what the design chose
to do otherwise, *later* what is not in this version.
"""

Status = Literal["open", "aside", "later"]
Key = tuple[str, int, int, str]


def key(rule: str) -> Key:
    """Sort F-9 before F-10, and F-09 (a fault) before all of F-009 (a facet)."""
    match = RULE.fullmatch(rule)
    assert match, f"{rule!r} is no rule"
    return match[1], len(match[2]) if match[1] == "F" else 0, int(match[2]), match[3]


@dataclass
class Line:
    """One line of a group that says what becomes of some of its rules."""

    status: Status
    rules: list[str]
    reason: str
    text: str


@dataclass
class Group:
    """Rules that belong together."""

    name: str
    title: str
    ids: list[str] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)

    def status(self, rule: str) -> tuple[Status | None, str]:
        """Return what is said of a rule; what is said last but `open` counts."""
        for line in sorted(self.lines, key=lambda line: line.status == "open"):
            if rule in line.rules:
                return line.status, line.reason
        return None, ""


def numbered(words: Iterable[str]) -> Iterator[str]:
    """Yield the ids of `F-001..F-003 F-009`."""
    for word in words:
        first, dots, last = word.partition("..")
        name, width, low, letter = *key(first)[:3], key(first)[3]
        if not dots:
            yield first
            continue
        assert not letter, word
        digits = len(first) - len(name) - 1
        assert key(last)[:2] == (name, width), word
        for number in range(low, key(last)[2] + 1):
            yield f"{name}-{number:0{digits}}"


def within(words: Iterable[str], ids: list[str]) -> list[str]:
    """Return those of `ids` that lie in ranges; each range must hold one."""
    out: list[str] = []
    for word in words:
        first, _dots, last = word.partition("..")
        low, high = key(first), key(last or first)
        found = [i for i in ids if low <= key(i) <= high]
        assert found, f"{word}: there are no such rules"
        out += found
    return out


def read(text: str) -> list[Group]:
    """Return the groups of a ledger."""
    groups: list[Group] = []
    for line in text.split("\n"):
        if not line or line.startswith("#"):
            continue
        word, _, rest = line.partition(" ")
        if word == "ids":
            groups[-1].ids += numbered(rest.split())
        elif word in ("open", "aside", "later"):
            ranges, _, reason = rest.partition(": ")
            rules = within(ranges.split(), groups[-1].ids)
            groups[-1].lines.append(Line(word, rules, reason, line))  # type: ignore[arg-type]
        else:
            name, _, title = line.partition(": ")
            groups.append(Group(name, title))
    return groups


def ledger() -> list[Group]:
    """Return the rules of the project."""
    return read(LEDGER.read_text())


# ---- marks


def _rules_in(node: ast.AST, where: str) -> Iterator[tuple[str, str]]:
    for mark in ast.walk(node):
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.rule":
            for arg in mark.args:
                assert isinstance(arg, ast.Constant), f"{where}: a rule is a text"
                yield str(arg.value), where


def marks(path: Path) -> list[tuple[str, str]]:
    """Return (rule, test) pairs of one file; a mark outside a test is of the file."""
    found: list[tuple[str, str]] = []
    name = str(path.relative_to(ROOT))
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for decorator in node.decorator_list:
                found += _rules_in(decorator, f"{name}::{node.name}")
    for statement in tree.body:
        if not isinstance(
            statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        ):
            found += _rules_in(statement, name)
    return found


def marked() -> dict[str, list[str]]:
    """Return the tests of each rule."""
    tests: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if "node_modules" not in path.parts:
            for rule, where in marks(path):
                tests.setdefault(rule, []).append(where)
    return tests


# ---- papers


def ranges(rules: list[str], ids: list[str]) -> str:
    """Return rules as ranges of the ids that there are."""
    runs: list[list[str]] = []
    for at, rule in enumerate(ids):
        if rule in rules:
            if runs and at and ids[at - 1] == runs[-1][-1]:
                runs[-1].append(rule)
            else:
                runs.append([rule])
    return " ".join(r[0] if len(r) == 1 else f"{r[0]}..{r[-1]}" for r in runs)


def unproven(group: Group, tests: dict[str, list[str]]) -> list[str]:
    """Return what of a group is open and has no test."""
    return [r for r in group.ids if group.status(r)[0] == "open" and r not in tests]


def still_open() -> str:
    """Return the `open` lines as they would be now, under the names of their groups."""
    tests = marked()
    out = []
    for group in ledger():
        left = unproven(group, tests)
        if left:
            out.append(f"{group.name}: {group.title}\nopen {ranges(left, group.ids)}\n")
    return "\n".join(out)


def make() -> str:
    """Return the paper."""
    tests = marked()
    counts = [
        "| group | rules | proven | open | aside | later |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    reasons = ["| rules | what stands | why |", "|---|---|---|"]
    total = [0] * 5
    for group in ledger():
        left = unproven(group, tests)
        stands = [group.status(r)[0] for r in group.ids if r not in tests]
        proven = sum(r in tests or group.status(r)[0] is None for r in group.ids)
        row = [
            len(group.ids),
            proven,
            len(left),
            stands.count("aside"),
            stands.count("later"),
        ]
        total = [a + b for a, b in zip(total, row, strict=True)]
        cells = " | ".join(map(str, row))
        counts.append(f"| {group.name}: {group.title} | {cells} |")
        for line in group.lines:
            if line.status != "open":
                names = ranges(line.rules, group.ids)
                reasons.append(f"| {names} | {line.status} | {line.reason} |")
    counts.append(f"| all | {' | '.join(map(str, total))} |")
    proofs = ["| rule | tests |", "|---|---|"]
    for rule in sorted(tests, key=key):
        where = "<br>".join(f"`{w}`" for w in sorted(tests[rule]))
        proofs.append(f"| {rule} | {where} |")
    parts = (
        HEAD, "\n".join(counts), "\n## Aside and later\n", "\n".join(reasons),
        "\n## Proofs\n", "\n".join(proofs), "",
    )  # fmt: skip
    return "\n".join(parts)


if __name__ == "__main__":
    if sys.argv[1:] == ["--open"]:
        sys.stdout.write(still_open())
    else:
        PAPER.write_text(make())
        sys.stdout.write(f"{PAPER}\n")
