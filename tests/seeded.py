"""trio's scheduler with a seed: the same seed, the same order of tasks.

trio has no public way to this. It has a private one, made for Hypothesis, which this
module alone touches: a flag that sorts each batch of tasks before it is shuffled, and
the generator that shuffles. `assert_seam` fails when a trio comes without them.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import trio
import trio._core._run as trio_run
import trio.testing

T = TypeVar("T")
FLAG, GENERATOR = "_ALLOW_DETERMINISTIC_SCHEDULING", "_r"


def assert_seam() -> None:
    """Raise unless trio still shuffles with the generator that we know, and sorts first."""
    used = trio_run.unrolled_run.__code__.co_names
    for name in (FLAG, GENERATOR):
        assert hasattr(trio_run, name), f"trio has no {name} any more"
        assert name in used, f"trio's loop does not look at {name} any more"
    assert isinstance(getattr(trio_run, GENERATOR), random.Random)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Order the tasks of what runs meanwhile by a seed; then all is as it was."""
    assert_seam()
    generator: random.Random = getattr(trio_run, GENERATOR)
    state, flag = generator.getstate(), getattr(trio_run, FLAG)
    setattr(trio_run, FLAG, True)
    generator.seed(seed)
    try:
        yield
    finally:
        setattr(trio_run, FLAG, flag)
        generator.setstate(state)


def run(
    fn: Callable[[], Awaitable[T]],
    *,
    seed: int = 0,
    instruments: tuple[trio.abc.Instrument, ...] = (),
) -> T:
    """Run an async function in seeded order, on a clock that jumps when all wait."""
    clock = trio.testing.MockClock(autojump_threshold=0)
    with seeded(seed):
        return trio.run(fn, clock=clock, instruments=instruments)
