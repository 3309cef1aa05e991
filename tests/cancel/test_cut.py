"""A caller may be cancelled at any schedule point: nothing is half, open, or left behind.

For each operation and each point that its task passes: it is cancelled there, then the
connections are in autocommit, the rows say what the caller was told (read in the same
life, and by the next one after a crash), nothing is unfinished, the same operation works
again, everything can be put to sleep, and no task is left.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import trio

from cancel.cut import Form, cut, points
from cancel.ops import OPS
from culet.kernel import testing_seeded as seeded


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Failures of code that is cut are no news."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.rule("I-50", "I-03", "I-15", "F-56", "G-23")
@pytest.mark.parametrize("form", ["stays", "dies"])
@pytest.mark.parametrize("name", OPS)
def test_a_caller_cut_anywhere_leaves_nothing_half(name: str, form: Form) -> None:
    assert points(OPS[name], form) > 0


@pytest.mark.parametrize("name", [op.name for op in OPS.values() if op.joins])
def test_who_asks_for_the_same_is_not_cut_with_it(name: str) -> None:
    assert points(OPS[name], "company") > 0


def test_the_cutter_comes_to_every_checkpoint_once() -> None:
    async def act(seen: list[int]) -> str:
        for number in range(3):
            seen.append(number)
            await trio.lowlevel.checkpoint()
        return "done"

    async def main() -> None:
        for at, wanted in enumerate(([0], [0], [0, 1], [0, 1, 2])):
            seen: list[int] = []
            told = await cut(lambda seen=seen: act(seen), at)  # type: ignore[misc]
            assert (seen, told.known, told.was_cut) == (wanted, False, True)
        told = await cut(lambda: act([]), 9)
        assert (told.value, told.known, told.was_cut) == ("done", True, False)

    seeded.run(main)
