"""What a child that runs itself says of a run, and what may be believed of it.

Such a child numbers its chunks from 0 without a gap, and says of a run how it stands.
Here is decided which chunk is the next one, and whether an inspection can be true: a
terminal status if and only if there is a time of completion, and never `interrupted`,
for that is the verdict of whoever cannot hear the child any more.
"""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple, get_args

import msgspec

InspectionStatus = Literal["starting", "running", "completed", "error", "aborted"]
INSPECTED: Final[tuple[InspectionStatus, ...]] = get_args(InspectionStatus)
OVER: Final[frozenset[str]] = frozenset({"completed", "error", "aborted"})


class Inspection(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a run stands, in the words of the child that does it.

    `output` is any JSON value; `error` the text of a failure, or why it was aborted;
    instants are epoch milliseconds, `completed_at` set if and only if the run is over.
    """

    status: InspectionStatus
    output: Any = None
    summary: str | None = None
    error: str | None = None
    started_at: int = 0
    completed_at: int | None = None

    @property
    def over(self) -> bool:
        """Whether the run has ended."""
        return self.status in OVER


class StoredChunk(NamedTuple):
    """One chunk of a run with its number; the first is 0."""

    sequence: int
    chunk: Any  # a mapping with a text as `type`


class Take(NamedTuple):
    """The chunk is the next one."""

    chunk: Any


class Known(NamedTuple):
    """The chunk was taken before."""


class Gap(NamedTuple):
    """There must be a chunk before it; `why` is a text for the child's author."""

    why: str


class Wrong(NamedTuple):
    """What the child said breaks its contract; `why` is a text for its author."""

    why: str


def judge(answer: object) -> Inspection | Wrong | None:
    """Return an answer to "how does it stand?" as it is, or what is wrong with it.

    None is an answer: the child knows no such run.
    """
    if answer is None:
        return None
    if not isinstance(answer, Inspection):
        return Wrong(f"an inspection is an Inspection or None, not {answer!r:.200}")
    if answer.status not in INSPECTED:
        known = ", ".join(INSPECTED)
        return Wrong(f"the status {answer.status!r} is not one of {known}")
    if answer.over and type(answer.completed_at) is not int:
        return Wrong(f"it is {answer.status} and has no completed_at")
    if not answer.over and answer.completed_at is not None:
        return Wrong(f"it is {answer.status} and has a completed_at")
    for name in ("summary", "error"):
        value = getattr(answer, name)
        if value is not None and not isinstance(value, str):
            return Wrong(f"{name} is a text, not {value!r:.200}")
    return answer


def order(after: int, said: object) -> Take | Known | Gap | Wrong:
    """Return what to do with a chunk when `after` is the last number that was taken."""
    if not (isinstance(said, tuple) and len(said) == 2 and type(said[0]) is int):
        return Wrong(f"a chunk comes as (sequence, chunk), not {said!r:.200}")
    if said[0] <= after:
        return Known() if said[0] >= 0 else Wrong(f"chunk {said[0]} has no place")
    if said[0] > after + 1:
        return Gap(f"chunk {said[0]} came after chunk {after}: there is a gap")
    return Take(said[1])
