"""How runs and fibers end: one table, in which every end is for good.

A run or fiber is `running` until something settles it, and there are four ways to be
settled. They are not degrees of success that could be improved later; they are facts
about what happened first:

- `completed`: the turn came to its end and its output was valid.
- `error`: it failed by itself. It raised, its output did not fit, it could not be
  started, it was taken up again and again without getting anywhere, its deadline has
  passed, nothing was left of its budget, or the chat that it wrote was cleared.
- `aborted`: somebody with the right to do so ended it, by id, or cleared away what it
  belonged to; or whoever asked for it ended, and took along what it was waiting for.
- `interrupted`: nobody wanted it to end, and yet it cannot go on. Its facet was
  deleted, its class is gone, it was cut and cannot or will not be resumed, its budget
  is over, or it was given up because it said nothing.

The one law is that a terminal status absorbs: the first cause to commit wins, every
later one is refused and reads the winner. It makes endings commute with everything:
a cancel that races with the last chunk, a recovery that meets a finished run, a second
settle after a crash, all are harmless. The same law is asserted by the guard of the
UPDATE and by a trigger of the schema; here is where it is decided.

The other half of the table is what does NOT end a run. To lose an observer, to hear
nothing for a while, to be cut by a crash: these are causes too, and the table says of
each that the run's status stands. Silence is not death; watching is not doing. (A cut
turn that cannot go on is settled later, by its job, with a cause of its own.)

Status and reason together name the cause (`ended_by`), so a row tells who ended it: the
table has no pair twice. A caller that cancels may say why in words of its own; words of
the table are put in quotation marks then (`own_words`), for they are not its to say. A
process that shuts down ends nothing, so there is no cause for it.

The table is total: it has a cell for each status and cause, and a test enumerates it.
A refusal is a value and not an exception, because to come late is normal.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, Protocol, get_args

from culet.kernel.core.limits import TERMINALS
from culet.kernel.core.run import Status

Cause = Literal[
    # the turn itself
    "finished",
    "failed",
    "over-budget",
    "bad-output",
    # who may end it
    "cancelled",
    "forgotten",
    "skipped",
    "asker-ended",
    # what makes it impossible
    "start-failed",
    "recovery-exhausted",
    "not-started",
    "deleted",
    "class-gone",
    "not-resumable",
    "not-resumed",
    "budget-exceeded",
    "silent",
    "deadline",
    "cleared",
    # what ends nothing
    "progressed",
    "no-progress",
    "observer-lost",
    "caller-cancelled",
    "node-aborted",
    "restarted",
]
STATUSES: Final[tuple[Status, ...]] = get_args(Status)
CAUSES: Final[tuple[Cause, ...]] = get_args(Cause)


class Moved(NamedTuple):
    """The run settles: the status and reason that its row gets.

    A cause that comes with a reason of its own (a cancel) has that one instead.
    """

    status: Status
    reason: str | None


class Refused(NamedTuple):
    """The status stands; nothing is written, nothing is sent."""

    standing: Status


_SETTLES: Final[dict[Cause, Moved]] = {
    "finished": Moved("completed", None),
    "failed": Moved("error", "failed"),
    "over-budget": Moved("error", "over-budget"),
    "bad-output": Moved("error", "bad-output"),
    "cancelled": Moved("aborted", "cancelled"),
    "forgotten": Moved("aborted", "cleared"),
    "skipped": Moved("aborted", "skipped"),
    "asker-ended": Moved("aborted", "asker-ended"),
    "start-failed": Moved("error", "start-failed"),
    "recovery-exhausted": Moved("error", "recovery-exhausted"),
    "not-started": Moved("interrupted", "not-started"),
    "deleted": Moved("interrupted", "deleted"),
    "class-gone": Moved("interrupted", "class-gone"),
    "not-resumable": Moved("interrupted", "not-resumable"),
    "not-resumed": Moved("interrupted", "not-resumed"),
    "budget-exceeded": Moved("interrupted", "budget-exceeded"),
    "silent": Moved("interrupted", "no-progress"),
    "deadline": Moved("error", "deadline"),
    "cleared": Moved("error", "cleared"),
}
_WATCHES: Final[tuple[Cause, ...]] = (
    "progressed",
    "no-progress",
    "observer-lost",
    "caller-cancelled",
    "node-aborted",
    "restarted",
)
TABLE: Final[dict[tuple[Status, Cause], Moved | Refused]] = {
    **{("running", cause): moved for cause, moved in _SETTLES.items()},
    **{("running", cause): Refused("running") for cause in _WATCHES},
    **{
        (status, cause): Refused(status)
        for status in STATUSES
        if status in TERMINALS
        for cause in CAUSES
    },
}


def advance(current: Status, cause: Cause) -> Moved | Refused:
    """Return what a cause does to a run or fiber that stands at `current`."""
    return TABLE[current, cause]


_BY: Final[dict[tuple[str, str | None], Cause]] = {
    (moved.status, moved.reason): cause for cause, moved in _SETTLES.items()
}
assert len(_BY) == len(_SETTLES)
_WORDS: Final = frozenset(m.reason for m in _SETTLES.values()) - {None, "cancelled"}


class Ended(Protocol):
    """What `ended_by` needs of a run, fiber or turn."""

    @property
    def status(self) -> Status: ...  # noqa: D102
    @property
    def reason(self) -> str | None: ...  # noqa: D102


def ended_by(row: Ended) -> Cause | None:
    """Return the cause that ended a run, fiber or turn, as its row tells it.

    None: it has not ended, was refused, or somebody resolved it from outside.
    """
    known = _BY.get((row.status, row.reason))
    if known is not None or row.status != "aborted" or row.reason is None:
        return known
    return "cancelled"


def own_words(reason: str | None) -> str | None:
    """Return a caller's reason so that it is no word of the table."""
    return f'"{reason}"' if reason in _WORDS else reason


def settled(cause: Cause) -> Moved:
    """Return how what runs ends by a cause; raises `ValueError` for what ends nothing."""
    moved = advance("running", cause)
    if isinstance(moved, Refused):
        msg = f"{cause!r} ends nothing"
        raise ValueError(msg)
    return moved
