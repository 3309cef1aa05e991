"""The kit that users run on their agents finds what was planted, and nothing else."""

from __future__ import annotations

import time

import pytest

from culet.kernel.testing_crash import explore
from culet.kernel.testing_scenario import run_scenario
from planted.bugs import BUGS, TWICE, Planted

LONGEST_S = 60.0
bugs = pytest.mark.parametrize("bug", BUGS, ids=lambda b: b.kind.replace(" ", "-"))


@bugs
def test_the_planted_bug_is_found_in_time_and_repeats(bug: Planted) -> None:
    began = time.monotonic()
    report = explore(bug.broken, bug.spec)
    took = time.monotonic() - began

    found = [f for f in report.found if f.finding.kind == bug.kind]
    assert any(bug.what in f.finding.what for f in found), report
    assert took < LONGEST_S
    points = found[0].first.points
    assert points
    again = explore(bug.broken, bug.spec, points)
    assert found[0].finding in [f.finding for f in again.found]


@bugs
def test_nothing_shows_while_nothing_crashes(bug: Planted) -> None:
    assert run_scenario(bug.broken, bug.spec).findings == ()


@bugs
def test_the_same_agents_without_the_bug_pass(bug: Planted) -> None:
    report = explore(bug.right, bug.spec)

    assert report.found == ()
    assert report.points >= 10


def test_a_bug_that_only_a_crash_in_recovery_shows_is_found_at_depth_two() -> None:
    assert explore(TWICE.broken, TWICE.spec).found == ()

    report = explore(TWICE.broken, TWICE.spec, depth=2)

    kinds = {(f.finding.kind, f.finding.what) for f in report.found}
    assert kinds == {(TWICE.kind, TWICE.what)}
    points = report.found[0].first.points
    assert len(points) == 2
    assert explore(TWICE.broken, TWICE.spec, points).found
    assert "and the next one " in report.text(str)
    assert explore(TWICE.right, TWICE.spec, depth=2).found == ()
