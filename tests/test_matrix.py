"""The ledger of rules is whole, and docs/matrix.md says what it and the marks say."""

from __future__ import annotations

import re

import pytest

import matrix

GROUPS = matrix.ledger()
TESTS = matrix.marked()
KNOWN = [rule for group in GROUPS for rule in group.ids]
each = pytest.mark.parametrize("group", GROUPS, ids=lambda g: g.name)


def test_the_matrix_is_made_from_the_marks() -> None:
    assert matrix.PAPER.read_text() == matrix.make(), "run: python tests/matrix.py"


def test_a_rule_stands_in_the_ledger_once() -> None:
    assert sorted(set(KNOWN)) == sorted(KNOWN)
    assert len(KNOWN) > 1_000


def test_a_mark_names_a_rule_that_there_is() -> None:
    assert set(TESTS) - set(KNOWN) == set()


@each
def test_a_rule_has_a_test_or_the_ledger_says_why_not(group: matrix.Group) -> None:
    silent = [r for r in group.ids if r not in TESTS and group.status(r)[0] is None]
    assert silent == [], "mark a test, or say open, aside or later in rules.txt"


@each
def test_the_ledger_calls_nothing_open_that_is_proven(group: matrix.Group) -> None:
    over = [
        line.text
        for line in group.lines
        if line.status == "open"
        and not set(line.rules) & set(matrix.unproven(group, TESTS))
    ]
    assert over == [], "take it out of rules.txt"


@each
def test_what_comes_later_has_no_test_yet(group: matrix.Group) -> None:
    here = [r for r in group.ids if group.status(r)[0] == "later" and r in TESTS]
    assert here == [], "it is there: say so in rules.txt"


@each
def test_what_is_not_proven_has_a_reason(group: matrix.Group) -> None:
    assert all(line.reason for line in group.lines if line.status != "open")


@pytest.mark.parametrize(("name", "paper"), [("W", "wire.md"), ("W B", "wire-chat.md")])
def test_the_paper_of_the_wire_has_each_of_its_rules_once(
    name: str, paper: str
) -> None:
    text = (matrix.PAPER.parent / paper).read_text()
    told = re.findall(r"^\| (W-\d+) \|", text, re.MULTILINE)
    assert sorted(told) == [i for g in GROUPS if g.name == name for i in g.ids]


SMALL = """# a ledger
A: one
ids A-01..A-04 A-04a A-06
open A-02..A-06
aside A-03: otherwise
"""


def test_ranges_leave_out_what_there_is_not() -> None:
    (group,) = matrix.read(SMALL)

    assert group.ids == ["A-01", "A-02", "A-03", "A-04", "A-04a", "A-06"]
    assert [group.status(r)[0] for r in group.ids] == [
        None, "open", "aside", "open", "open", "open",
    ]  # fmt: skip
    assert matrix.unproven(group, {"A-04": ["t"]}) == ["A-02", "A-04a", "A-06"]
    assert matrix.ranges(["A-02", "A-04a", "A-06"], group.ids) == "A-02 A-04a..A-06"


@pytest.mark.parametrize("line", ["open A-07", "open A-3x4", "aside B-01: no"])
def test_a_line_about_what_there_is_not_is_refused(line: str) -> None:
    with pytest.raises(AssertionError):
        matrix.read(SMALL + line + "\n")
