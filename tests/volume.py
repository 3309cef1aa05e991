"""How much of each proof a run of the tests plays, and whether it did.

One profile, chosen by `CULET_PROFILE`: `short` for every day, `ci` for CI (the default
where `CI` is set), `long` for a night. A proof counts what it really played in `LEDGER`;
at the end of a run `verdict` compares that with what its profile asks. All that counts
one kind stands in one module, so a run of that whole module must come up to it.
"""

from __future__ import annotations

import collections
import os
import sys
import time
from collections.abc import Iterable
from typing import Final, Literal, NamedTuple, get_args

Profile = Literal["short", "ci", "long"]
Kind = Literal[
    "crash points", "power images", "machine steps", "kills", "cuts",
    "hostile frames", "hostile heads", "drains",
]  # fmt: skip


class Volume(NamedTuple):
    """One number for each profile."""

    short: int
    ci: int
    long: int

    @property
    def now(self) -> int:
        """What the profile of this run asks."""
        return int(getattr(self, PROFILE))


def _profile() -> Profile:
    name = os.environ.get("CULET_PROFILE") or (
        "ci" if os.environ.get("CI") else "short"
    )
    for known in get_args(Profile):
        if name == known:
            return known  # type: ignore[no-any-return]
    msg = f"CULET_PROFILE is {name!r}, not one of {', '.join(get_args(Profile))}"
    raise ValueError(msg)


PROFILE: Final = _profile()
EXAMPLES: Final = Volume(60, 150, 1000)  # of a law that Hypothesis checks
ASKED: Final[dict[Kind, Volume]] = {
    "crash points": Volume(550, 6_500, 13_000),
    "power images": Volume(650, 4_000, 12_000),
    "machine steps": Volume(10_000, 200_000, 5_000_000),
    "kills": Volume(20, 40, 5_000),
    "drains": Volume(4, 12, 2_000),
    "cuts": Volume(150, 1_000, 20_000),
    "hostile frames": Volume(2_000, 10_000, 1_000_000),
    "hostile heads": Volume(500, 10_000, 100_000),
}
# `make coverage` traces every line: what counts time of the processor allows for that.
SLOWER: Final = 3 if "COVERAGE_RUN" in os.environ else 1
TOLD_S: Final = 15.0  # between two lines of progress of the long form


class Ledger:
    """Counts what was played in this run."""

    def __init__(self) -> None:
        self.done: collections.Counter[str] = collections.Counter()
        self._began: dict[str, float] = {}
        self._told = time.monotonic()

    def add(self, kind: Kind, count: int = 1) -> None:
        """Count; in the long form say now and then how far it is."""
        now = time.monotonic()
        began = self._began.setdefault(kind, now)
        self.done[kind] += count
        if PROFILE == "long" and now - self._told >= TOLD_S:
            self._told = now
            rate = self.done[kind] / max(now - began, 1e-3)
            left = max(ASKED[kind].now - self.done[kind], 0) / max(rate, 1e-3)
            line = f"{kind}: {self.done[kind]:,} of {ASKED[kind].now:,}"
            line += f", {rate:,.1f} a second, {left / 60:,.0f} minutes to go"
            print(line, file=sys.__stderr__, flush=True)

    def lines(self, kinds: Iterable[str]) -> list[str]:
        """Return what was played of these kinds, and what was asked."""
        return [
            f"{kind}: {self.done[kind]:,} (the {PROFILE} form asks {ASKED[kind].now:,})"  # type: ignore[index]
            for kind in sorted(kinds)
        ]

    def short_of(self, kinds: Iterable[str]) -> list[str]:
        """Return the kinds of which too little was played."""
        return [k for k in kinds if self.done[k] < ASKED[k].now]  # type: ignore[index]


LEDGER: Final = Ledger()
