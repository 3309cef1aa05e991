"""What a caller may do about a run that did not complete: never twice what may be done.

A run that still goes on is joined again under its id. One that is `interrupted` may have
done its work in part, or all of it: nobody can know. So a second run, under an id of its
own, is only for somebody who says that the first is abandoned. Every other end is for
good: it is what happened.
"""

from __future__ import annotations

from typing import Final, Literal

from culet.kernel.core.run import Status

Step = Literal["return", "attach", "ask"]
MARK: Final = ".again-"


def next_step(status: Status, joined: int, number: int, most: int) -> Step:
    """Return what comes after run `number` of at most `most` stands at `status`.

    `joined` is how often this caller has joined it already; silence is borne `most`
    times as well. `ask`: whether it is abandoned.
    """
    if status == "running" and joined < most:
        return "attach"
    if status == "interrupted" and number < most:
        return "ask"
    return "return"


def run_id_of(base: str, number: int) -> str:
    """Return the id of the n-th run that stands for one piece of work, counted from 1."""
    return base if number == 1 else f"{base}{MARK}{number}"
