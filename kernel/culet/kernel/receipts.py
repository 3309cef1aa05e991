"""What a cancel did, as a value: every end that it made is one that stands in a row."""

from __future__ import annotations

import msgspec

from .core.run import Status


class EndedWork(msgspec.Struct, frozen=True, kw_only=True):
    """A run, fiber or own turn that a cancel ended. `path`: of the agent it ran in."""

    kind: str  # run, fiber or turn
    path: str
    id: str
    status: Status
    reason: str | None


class DroppedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule, or a queued call, that will not be made any more."""

    kind: str  # call or queue
    path: str
    id: str
    callback: str


class Withdrawn(msgspec.Struct, frozen=True, kw_only=True):
    """A question to a person, or a call for a client, that nobody can answer any more."""

    path: str
    run_id: str
    tool_call_id: str
    tool_name: str


class CancelReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """What `runs.cancel` did. All of it was committed before any code heard of it.

    `status` and `reason` are what stands in the row; None: there is no such run. `ended`:
    whether this call is what ended it; if not, everything below is empty. `runs` and
    `fibers` (own turns among them) are what ended, the run itself first, the others in the
    order of their start; `calls` the schedules and queued calls that went; `questions`
    what waited for a person. `nodes`: (path, how) as in an `AbortReceipt`, in the order of
    their stopping; "remnant" is code that does not stop: fenced, it changes nothing any
    more. `elapsed_s`: seconds until the last of them had stopped.
    """

    run_id: str
    status: Status | None
    reason: str | None = None
    ended: bool = False
    runs: list[EndedWork] = []
    fibers: list[EndedWork] = []
    calls: list[DroppedCall] = []
    questions: list[Withdrawn] = []
    nodes: list[tuple[str, str]] = []
    elapsed_s: float = 0.0
