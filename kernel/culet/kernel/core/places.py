"""How many runs of one agent may go on at once, of which kind: whether one more may.

An agent bounds its runs altogether, those of a class, and, if it wants them apart, those
that nobody waits for. A place that is kept for somebody counts as taken.

Laws: a run that is refused at some number of runs is refused at any larger one; one of a
class that has no bound of its own is never refused because of another class's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from culet.kernel.core.job import is_number
from culet.kernel.core.limits import DELAY_MAX_S
from culet.kernel.errors import UsageError


class Want(NamedTuple):
    """One run that somebody asks for, as far as places go."""

    class_name: str
    detached: bool


class Full(NamedTuple):
    """No place: the bound that was met, and what a caller is told."""

    bound: int
    text: str


class RunCaps(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of an agent's runs beside `max_concurrent_agent_tools`; `run_caps` of a class.

    `by_class`: runs at once of a child class (itself, or its name). `detached`: of
    detached runs; they do not count among the others then. `wait_s`: seconds that a
    caller stays in line (`max_queued_agent_tools`) before it is refused; None: no end.
    """

    by_class: Mapping[type | str, int] = {}
    detached: int | None = None
    wait_s: float | None = None

    def __post_init__(self) -> None:
        """Keep names of classes. Raises `UsageError` for what is no bound."""
        named = {
            c if isinstance(c, str) else c.__name__: n for c, n in self.by_class.items()
        }
        bounds = [*named.values(), 0 if self.detached is None else self.detached]
        for bound in bounds:
            if type(bound) is not int or bound < 0:
                msg = f"a bound of runs is a whole number of at least 0, not {bound!r}"
                raise UsageError(msg)
        wait = self.wait_s
        if wait is not None and not (is_number(wait) and 0 < wait <= DELAY_MAX_S):
            msg = f"wait_s is a number of seconds above 0, not {wait!r}"
            raise UsageError(msg)
        msgspec.structs.force_setattr(self, "by_class", named)


def full(
    most: int | None, caps: RunCaps, want: Want, taken: Mapping[Want, int]
) -> Full | None:
    """Return the bound that keeps one more run from beginning; None: it may."""
    apart = caps.detached is not None
    pool = [n for w, n in taken.items() if not apart or w.detached == want.detached]
    bound = caps.detached if apart and want.detached else most
    if bound is not None and sum(pool) >= bound:
        what = "detached runs" if apart and want.detached else "runs"
        return Full(bound, f"{bound} {what} are going on already")
    of_class = caps.by_class.get(want.class_name)
    running = sum(n for w, n in taken.items() if w.class_name == want.class_name)
    if of_class is not None and running >= of_class:
        text = f"{of_class} runs of {want.class_name} are going on already"
        return Full(of_class, text)
    return None
