"""What is done about an effect: begun, joined, replayed, asked about. Pure.

An effect is something outside that no rollback takes back: a charge, a mail. Its intent
is durable before it begins; its outcome is written once, for good. Between the two lies
the only doubt there is: an intent without an outcome, and nobody at work on it. The
process ended, the code was cut off, or the function itself said that it cannot know.
Then the policy says what is done:

- `repeat`: it is done again under the same token, so the other side can tell;
- `check`: the author's function finds out, and says done, not done, or that it cannot;
- `ask`: a person decides, however long that takes;
- `fail`: whoever wanted it is told that nobody knows.

A repeat that never gets to an outcome becomes a question, after `most` attempts.
"""

from __future__ import annotations

import base64
import hashlib
from typing import Any, Final, Literal, NamedTuple, get_args

import msgspec

Policy = Literal["repeat", "check", "ask", "fail"]
POLICIES: Final[frozenset[str]] = frozenset(get_args(Policy))
Status = Literal["begun", "asked", "granted", "completed", "error", "unknown"]
STATUSES: Final[frozenset[str]] = frozenset(get_args(Status))
FOR_GOOD: Final[frozenset[str]] = frozenset({"completed", "error"})
OPEN_TO_DOUBT: Final = STATUSES - FOR_GOOD
Act = Literal["run", "join", "replay", "check", "ask", "wait", "fail"]


def derive_token(slot: str, kind: str, name: str, key: str) -> str:
    """Return what tells the other side that two attempts are one effect: 35 safe characters.

    The same for every attempt and in every life, another one for every other effect.
    """
    whole = msgspec.json.encode([slot, kind, name, key])
    digest = hashlib.sha256(b"culet.effect\0" + whole).digest()[:20]
    return "fx-" + base64.b32encode(digest).decode().lower()


class Done(msgspec.Struct, frozen=True, tag=True):
    """A check's answer: it was carried out, with this result (a JSON value)."""

    result: Any = None


class NotDone(msgspec.Struct, frozen=True, tag=True):
    """A check's answer: it was not carried out, and will not be by itself."""


class Standing(NamedTuple):
    """Where an effect is: its row, and whether somebody in this process is at work on it."""

    status: Status
    attempt: int
    live: bool = False

    @property
    def uncertain(self) -> bool:
        """Whether nobody knows if it was carried out."""
        return self.status in ("asked", "granted", "unknown") or (
            self.status == "begun" and not self.live
        )


class Step(NamedTuple):
    """What to do now; `attempt` is the number of the one that begins or stands."""

    act: Act
    attempt: int


def next_step(standing: Standing | None, policy: Policy, *, most: int) -> Step:
    """Return what whoever wants an effect does about it.

    `run` begins the attempt; `join` waits for the one at work; `replay` tells the
    outcome; `check`, `ask` and `fail` are the policy; `wait`: it is asked already.
    """
    if standing is None:
        return Step("run", 1)
    status, attempt, live = standing
    if status in FOR_GOOD:
        return Step("replay", attempt)
    if status == "unknown":
        return Step("fail", attempt)
    if status == "granted":
        return Step("run", attempt + 1)
    if status == "begun" and live:
        return Step("join", attempt)
    return _doubt(status, attempt, policy, most)


def _doubt(status: Status, attempt: int, policy: Policy, most: int) -> Step:
    match policy:
        case "repeat" if attempt < most:
            return Step("run", attempt + 1)
        case "check":
            return Step("check", attempt)
        case "fail":
            return Step("fail", attempt)
        case _:
            return Step("wait" if status == "asked" else "ask", attempt)


def after_check(standing: Standing, found: object) -> Step:
    """Return what follows from a check: `replay` says that `found.result` is the outcome.

    Whatever is neither `Done` nor `NotDone` leaves the doubt: a person decides.
    """
    if isinstance(found, Done):
        return Step("replay", standing.attempt)
    if isinstance(found, NotDone):
        return Step("run", standing.attempt + 1)
    asked = standing.status == "asked"
    return Step("wait" if asked else "ask", standing.attempt)


Verdict = Literal["result", "error", "repeat", "unknown"]
_BECOMES: Final[dict[Verdict, Status]] = {
    "result": "completed",
    "error": "error",
    "repeat": "granted",
    "unknown": "unknown",
}


def decided(standing: Standing, verdict: Verdict) -> Status | None:
    """Return the status after somebody has decided; None: it is not theirs to decide.

    Only a doubt can be decided: an outcome stands, and who is at work will tell.
    """
    if not standing.uncertain:
        return None
    return _BECOMES[verdict]
