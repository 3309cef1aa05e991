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
from .testing_scenario import Body, Outcome, Point, Points, Spec, run_scenario

log: Final = logging.getLogger("culet.kernel")


class Found(msgspec.Struct, frozen=True):
    """A finding at the smallest point that shows it, and how many points show it."""

    finding: Finding
    first: Outcome
    points: int

    def text(self, repeat: Callable[[Points], str]) -> str:
        """Return the lines of a report; `repeat` makes the command."""
        lines = [str(self.finding)]
        points = self.first.points
        if not points:
            lines.append("    without any crash")
        else:
            where = ", and the next one ".join(p.says() for p in points)
            more = f" (and at {self.points - 1} more)" if self.points > 1 else ""
            lines.append(
                f"    when the process stops {where}, at {self.first.place}{more}"
            )
            lines.append(f"    repeat: {repeat(points)}")
        return "\n".join(lines)


@final
class Report(msgspec.Struct, frozen=True):
    """What an exploration found; `points` is at how many points a process stopped."""

    points: int
    found: tuple[Found, ...]

    def text(self, repeat: Callable[[Points], str]) -> str:
        """Return the report for people."""
        count = len(self.found)
        broken = "1 broken promise" if count == 1 else f"{count} broken promises"
        head = f"{broken}; {self.points} crash points tried"
        return "\n".join([head, *(f.text(repeat) for f in self.found)])


def explore(
    body: Body, spec: Spec, only: Points | None = None, *, depth: int = 1
) -> Report:
    """Stop the scenario's process at each of its points, or at one, and judge.

    With `depth` 2 the next life is stopped at each of its points as well. Raises what
    the scenario raises when nothing crashes.
    """
    with _silent():
        calm = run_scenario(body, spec)
        outcomes = [calm]
        todo = [only] if only else [(p,) for p in points_of(calm.lives[0])]
        while todo:
            points = todo.pop(0)
            for hasty in (False, True):
                outcome = run_scenario(body, spec, points, hasty=hasty)
                if not outcome.reached:
                    continue
                outcomes.append(_judged(outcome, calm, spec))
                if not (hasty or only) and len(points) < depth and _left(outcome):
                    following = points_of(outcome.lives[len(points)])
                    todo += [(*points, p) for p in following]
    tried = {outcome.points for outcome in outcomes if outcome.points}
    return Report(len(tried), tuple(_smallest(outcomes)))


def _left(outcome: Outcome) -> bool:
    """Whether the last death left anything: else the next life is the first one again."""
    lost = outcome.points[-1].kind == "record"
    return outcome.lives[len(outcome.points) - 1][1] > int(lost)


def points_of(life: tuple[int, int]) -> Iterator[Point]:
    """Return each point of a life that made so many commits and records."""
    commits, records = life
    for number in range(1, commits + 1):
        yield Point("commit", number)
    for number in range(1, records + 1):
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
    points: dict[tuple[str, str], set[Points]] = {}
    for outcome in sorted(outcomes, key=_order):
        for finding in outcome.findings:
            key = finding.kind, finding.what
            if key not in found:
                found[key] = Found(finding, outcome, 0)
            points.setdefault(key, set()).add(outcome.points)
    return [msgspec.structs.replace(f, points=len(points[k])) for k, f in found.items()]


def _order(outcome: Outcome) -> tuple[int, list[tuple[int, int]], list[int]]:
    """In the order of time; a lost commit before a lost record at the same instant."""
    kinds = ("commit", "record", "landed")
    deaths = len(outcome.points)
    kind = [kinds.index(p.kind) for p in outcome.points]
    return deaths, list(outcome.lives[:deaths]), kind


@contextmanager
def _silent() -> Iterator[None]:
    """Keep what a dying kernel logs, a hundred times, out of the report."""
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before
