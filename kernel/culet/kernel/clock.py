"""Time and chance, injected. Durable time is wall-clock milliseconds; trio only sleeps.

Three times are kept apart: the wall, which may jump both ways and is all that is stored;
trio's clock, which only sleeps and stands still in suspend; and a stopwatch for slices
of work, so that even where a long pass is cut does not hang on the machine in a test.
"""

from __future__ import annotations

import random
import time
from typing import Final, Protocol

_ALPHABET: Final = "0123456789abcdefghijklmnopqrstuvwxyz"


class Clock(Protocol):
    """The wall clock, and a stopwatch."""

    def now_ms(self) -> int:
        """Return epoch milliseconds. They may jump both ways; all that is stored is this."""
        ...

    def stopwatch_ns(self) -> int:
        """Return nanoseconds that only grow, from any zero: how long work has taken."""
        ...


class SystemClock:
    """The machine's clock."""

    def now_ms(self) -> int:
        """Return epoch milliseconds."""
        return time.time_ns() // 1_000_000

    def stopwatch_ns(self) -> int:
        """Return nanoseconds that only grow."""
        return time.perf_counter_ns()


class Chance:
    """Ids and jitter. With a seed the same calls give the same values, for tests."""

    def __init__(self, seed: int | None = None) -> None:
        self._random: random.Random = (
            random.SystemRandom() if seed is None else random.Random(seed)
        )

    def id(self, length: int = 16) -> str:
        """Return a fresh id of lower-case letters and digits (82 bits at 16)."""
        bits = self._random.getrandbits(6 * length)
        out = []
        for _ in range(length):
            bits, digit = divmod(bits, 36)
            out.append(_ALPHABET[digit])
        return "".join(out)

    def fraction(self) -> float:
        """Return a number in [0, 1), for jitter."""
        return self._random.random()
