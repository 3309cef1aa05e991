"""Marks that a run must reach: an invariant that was never near a fault proves nothing."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import Final, final


@final
class Sometimes:
    """Counts marks over all histories of a run; `check` fails for one never reached.

    Each mark is declared beforehand: a mark that is misspelt fails where it is hit.
    Marks of `others` may be hit and need not be.
    """

    def __init__(self, *marks: str, others: Iterable[str] = ()) -> None:
        self.marks: Final = frozenset(marks)
        self.others: Final = frozenset(others)
        self.seen: collections.Counter[str] = collections.Counter()

    def hit(self, mark: str, when: bool = True) -> None:
        """Count a mark; `when` False counts nothing."""
        assert mark in self.marks | self.others, (
            f"a mark that is not declared: {mark!r}"
        )
        if when:
            self.seen[mark] += 1

    def missing(self) -> list[str]:
        """Return the marks that were never reached."""
        return sorted(self.marks - self.seen.keys())

    def check(self) -> None:
        """Fail when a mark was never reached."""
        missing = self.missing()
        assert not missing, f"never reached: {', '.join(missing)}"
