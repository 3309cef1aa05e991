"""Every point at which a scenario's process may stop, one after the other.

`explore` runs the scenario once to count its commits and records, then twice for each
with the process dead there: with a client that waits for recovery before it asks again,
and with one that does not. What it finds is reported at the smallest point that shows
it, with one command to repeat.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final, final

import msgspec

from .testing_ledger import Finding, Ledger
from .testing_scenario import Body, Outcome, Point, Spec, run_scenario

log: Final = logging.getLogger("culet.kernel")


class Found(msgspec.Struct, frozen=True):
    """A finding at the smallest point that shows it, and how many points show it."""

    finding: Finding
    first: Outcome
    points: int

    def text(self, repeat: Callable[[Point], str]) -> str:
        """Return the three lines of a report; `repeat` makes the command."""
        lines = [str(self.finding)]
        point = self.first.point
        if point is None:
            lines.append("    without any crash")
        else:
            more = f" (and at {self.points - 1} more)" if self.points > 1 else ""
            where = self.first.place
            lines.append(f"    when the process stops {point.says()}, at {where}{more}")
            lines.append(f"    repeat: {repeat(point)}")
        return "\n".join(lines)


@final
class Report(msgspec.Struct, frozen=True):
    """What an exploration found; `points` is how often the process was stopped."""

    points: int
    found: tuple[Found, ...]

    def text(self, repeat: Callable[[Point], str]) -> str:
        """Return the report for people."""
        broken = (
            "1 broken promise"
            if len(self.found) == 1
            else f"{len(self.found)} broken promises"
        )
        head = f"{broken}; {self.points} crash points tried"
        return "\n".join([head, *(f.text(repeat) for f in self.found)])


def explore(body: Body, spec: Spec, only: Point | None = None) -> Report:
    """Stop the scenario's process at each of its points, or at one, and judge.

    Raises what the scenario raises when nothing crashes.
    """
    with _silent():
        calm = run_scenario(body, spec)
        outcomes = [calm]
        for point in points_of(calm) if only is None else [only]:
            for hasty in (False, True):
                outcome = run_scenario(body, spec, point, hasty=hasty)
                if outcome.reached:
                    outcomes.append(_judged(outcome, calm, spec))
    points = {outcome.point for outcome in outcomes} - {None}
    return Report(len(points), tuple(_smallest(outcomes)))


def points_of(calm: Outcome) -> Iterator[Point]:
    """Return each point of a run that did not crash."""
    for number in range(1, calm.commits + 1):
        yield Point("commit", number)
    for number in range(1, calm.records + 1):
        yield Point("record", number)
        yield Point("landed", number)


def _judged(outcome: Outcome, calm: Outcome, spec: Spec) -> Outcome:
    """Add what only the comparison with the calm run shows: effects that are missing."""
    ledger = Ledger(spec.effects)
    ledger.findings = {(f.kind, f.what): f for f in outcome.findings}
    ledger.effects.update(outcome.effects)
    ledger.check_effects(calm.effects)
    return msgspec.structs.replace(outcome, findings=tuple(ledger.findings.values()))


def _smallest(outcomes: Iterable[Outcome]) -> list[Found]:
    found: dict[tuple[str, str], Found] = {}
    points: dict[tuple[str, str], set[Point | None]] = {}
    for outcome in sorted(outcomes, key=_order):
        for finding in outcome.findings:
            key = finding.kind, finding.what
            if key not in found:
                found[key] = Found(finding, outcome, 0)
            points.setdefault(key, set()).add(outcome.point)
    return [msgspec.structs.replace(f, points=len(points[k])) for k, f in found.items()]


def _order(outcome: Outcome) -> tuple[int, int, int]:
    """In the order of time; a lost commit before a lost record at the same instant."""
    if outcome.point is None:
        return -1, 0, 0
    kinds = ("commit", "record", "landed")
    return outcome.commits, outcome.records, kinds.index(outcome.point.kind)


@contextmanager
def _silent() -> Iterator[None]:
    """Keep what a dying kernel logs, a hundred times, out of the report."""
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before
