"""trio's scheduler with a seed: the same seed, the same order of tasks.

trio has no public way to this. It has a private one, made for Hypothesis, which this
module alone touches: a flag that sorts each batch of tasks before it is shuffled, and
the generator that shuffles. `check_seam` fails when a trio comes without them.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

import trio
import trio._core._run as trio_run
import trio.testing

from .errors import InternalError

T = TypeVar("T")
_FLAG: Final = "_ALLOW_DETERMINISTIC_SCHEDULING"
_GENERATOR: Final = "_r"


def check_seam() -> None:
    """Raise `InternalError` unless trio sorts and shuffles with what we know."""
    used = trio_run.unrolled_run.__code__.co_names
    for name in (_FLAG, _GENERATOR):
        if not hasattr(trio_run, name) or name not in used:
            msg = f"this trio does not order its tasks by {name}: no seed decides"
            raise InternalError(msg)
    if not isinstance(getattr(trio_run, _GENERATOR), random.Random):
        msg = f"trio's {_GENERATOR} is no random.Random: it cannot be seeded"
        raise InternalError(msg)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Order the tasks of what runs meanwhile by a seed; then all is as it was."""
    check_seam()
    generator: random.Random = getattr(trio_run, _GENERATOR)
    state, flag = generator.getstate(), getattr(trio_run, _FLAG)
    setattr(trio_run, _FLAG, True)
    generator.seed(seed)
    try:
        yield
    finally:
        setattr(trio_run, _FLAG, flag)
        generator.setstate(state)


def run(
    fn: Callable[..., Awaitable[T]],
    *args: object,
    seed: int = 0,
    instruments: tuple[trio.abc.Instrument, ...] = (),
) -> T:
    """Run an async function in seeded order, on a clock that jumps when all wait."""
    clock = trio.testing.MockClock(autojump_threshold=0)
    with seeded(seed):
        return trio.run(fn, *args, clock=clock, instruments=instruments)
