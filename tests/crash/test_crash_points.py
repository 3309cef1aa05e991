"""A process that dies after any commit, or in any record, comes back with all it promised.

One journalled story of each scenario counts its commits and records; then it is told
again once for each of them, with a death there: after the commit, in the record before
it is on the disk, and after, before anybody was told. Then a second death at each point
of the recovery. The short form takes some of the second deaths, and some of all on
files; `ci` takes all first ones in memory, and of second deaths at most 24 after each of
30 first ones; `long` takes all, and on files as well.
"""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import pytest

from crash.scenarios import SCENARIOS
from crash.story import Journal, Point, Scenario, points_of, tell
from sound import healthy
from volume import LEDGER, Volume

ALL: Final = 10**6
RECOVERIES: Final = Volume(5, 30, ALL)  # of a scenario, in which it dies again
SECONDS: Final = Volume(1, 24, ALL)  # second deaths in each of them
ON_FILES: Final = Volume(2, 2, ALL)  # first deaths of a scenario on files
SECONDS_ON_FILES: Final = Volume(0, 1, ALL)
# a test that takes minutes looks like one that hangs
SHARES: Final = Volume(1, 4, 8)
each = pytest.mark.parametrize("name", SCENARIOS)
shared = pytest.mark.parametrize("share", range(SHARES.now))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Failures of code in a process that dies are no news."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def some(points: list[Point], count: int, seed: str) -> list[Point]:
    """Return all, or a sample that is always the same."""
    if len(points) <= count:
        return points
    return sorted(random.Random(seed).sample(points, count))


def dies(
    scenario: Scenario,
    wanted: Journal | None,
    points: Iterable[Point],
    folder: Path | None,
) -> Journal:
    """Tell it with these deaths; it comes to the same end."""
    places = list(points)
    line = f"cd tests && python -m crash.again {scenario.name} "
    line += " ".join(map(str, places))
    try:
        told = tell(scenario, places, storage=stored(folder))
        same = wanted is None or told.outcome == wanted.outcome
        assert same, "it comes to another end"
        if folder is not None:
            with scenario.version():
                healthy(folder)
            shutil.rmtree(folder)
    except BaseException as error:
        error.add_note(f"again: {line}")
        raise
    LEDGER.add("crash points")
    return told


def stored(folder: Path | None) -> str:
    return "memory:" if folder is None else f"sqlite:{folder}"


@pytest.mark.rule(
    "G-01",
    "G-02",
    "B-20",
    "I-03",
    "F-01",
    "F-03",
    "G-08",
    "I-09",
    "I-14",
    "I-46",
    "I-47",
    "I-48",
)
@pytest.mark.proof
@pytest.mark.volume("crash points")
@shared
@each
def test_a_death_at_any_point_takes_nothing_back_nor_a_second_one_in_recovery(
    name: str, share: int
) -> None:
    scenario = SCENARIOS[name]
    wanted = tell(scenario)
    points = points_of(wanted.lives[0])
    assert len(points) > 9, "a scenario that hardly writes proves nothing"
    again = set(some(points, RECOVERIES.now, name))
    for first in points[share :: SHARES.now]:
        recovered = dies(scenario, wanted, [first], None)
        if first in again:
            found = points_of(recovered.lives[1])
            for second in some(found, SECONDS.now, f"{name} {first}"):
                dies(scenario, wanted, [first, second], None)


@pytest.mark.rule("G-01", "G-02")
@pytest.mark.proof
@pytest.mark.volume("crash points")
@shared
@each
def test_on_files_it_is_the_same_and_the_doctor_is_content_after_each_death(
    name: str, share: int, tmp_path: Path
) -> None:
    scenario = SCENARIOS[name]
    wanted = dies(scenario, None, [], tmp_path / "whole")
    firsts = some(points_of(wanted.lives[0]), ON_FILES.now, name)
    for first in firsts[share :: SHARES.now]:
        recovered = dies(scenario, wanted, [first], tmp_path / str(first))
        found = points_of(recovered.lives[1])
        for second in some(found, SECONDS_ON_FILES.now, f"{name} {first}"):
            folder = tmp_path / f"{first}-{second}"
            dies(scenario, wanted, [first, second], folder)
