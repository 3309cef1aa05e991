"""A process that dies after any commit, or in any record, comes back with all it promised.

One journalled story of each scenario counts its commits and records; then it is told
again once for each of them, with a death there: after the commit, in the record before
it is on the disk, and after, before anybody was told. Then a second death at each point
of the recovery. `CULET_LONG=1` dies at all of them, also on files.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import pytest

from crash.scenarios import LATER, SCENARIOS
from crash.story import Journal, Point, Scenario, points_of, tell

LONG: Final = bool(os.environ.get("CULET_LONG"))
SECOND: Final = 5  # second deaths of a scenario in the short form
SHARES: Final = 8 if LONG else 1  # a test that takes minutes looks like one that hangs
ENOUGH: Final = 470  # first deaths; there are more than 6,500 second ones
ON_FILES: Final = 2  # deaths of a scenario on files in the short form
each = pytest.mark.parametrize("name", SCENARIOS)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Failures of code in a process that dies are no news."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def some(points: list[Point], count: int, seed: str) -> list[Point]:
    """Return all of them in the long form, else a sample that is always the same."""
    if LONG or len(points) <= count:
        return points
    return sorted(random.Random(seed).sample(points, count))


def dies(
    scenario: Scenario, wanted: Journal, points: Iterable[Point], storage: str = "memory:"
) -> Journal:  # fmt: skip
    """Tell it with these deaths; it comes to the same end."""
    places = list(points)
    line = f"cd tests && python -m crash.again {scenario.name} "
    line += " ".join(map(str, places))
    try:
        told = tell(scenario, places, storage=storage)
        assert told.outcome == wanted.outcome, "it comes to another end"
    except BaseException as error:
        error.add_note(f"again: {line}")
        raise
    return told


@pytest.mark.rule("G-01", "I-03")
@each
def test_a_death_at_any_point_takes_nothing_back(name: str) -> None:
    scenario = SCENARIOS[name]
    wanted = tell(scenario)
    points = points_of(wanted.lives[0])
    assert len(points) > 9, "a scenario that hardly writes proves nothing"
    for point in points:
        dies(scenario, wanted, [point])


@pytest.mark.rule("G-02")
@pytest.mark.parametrize("share", range(SHARES))
@each
def test_a_second_death_at_any_point_of_the_recovery_neither(
    name: str, share: int
) -> None:
    scenario = SCENARIOS[name]
    wanted = tell(scenario)
    for first in some(points_of(wanted.lives[0]), SECOND, name)[share::SHARES]:
        recovered = dies(scenario, wanted, [first])
        seconds = points_of(recovered.lives[1])
        for second in some(seconds, 1, f"{name} {first}"):
            dies(scenario, wanted, [first, second])


@each
def test_on_files_it_is_the_same(name: str, tmp_path: Path) -> None:
    scenario = SCENARIOS[name]
    wanted = tell(scenario, storage=f"sqlite:{tmp_path / 'whole'}")
    for point in some(points_of(wanted.lives[0]), ON_FILES, name):
        dies(scenario, wanted, [point], storage=f"sqlite:{tmp_path / str(point)}")


def test_there_are_as_many_points_as_there_were() -> None:
    found = {name: points_of(tell(s).lives[0]) for name, s in SCENARIOS.items()}
    assert sum(map(len, found.values())) >= ENOUGH, found


@pytest.mark.parametrize("name", LATER)
def test_what_does_not_exist_yet_will_die_too(name: str) -> None:
    pytest.skip(LATER[name])
