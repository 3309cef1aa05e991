"""Owed work: when a job is tried again, when it ticks next, when enough is enough.

A job that failed is tried again later and later; a recurring job, once done, moves to
its next tick; a job without hope rests where somebody sees it. These three decisions
are pure and stand here for the whole kernel, so that there is one back-off.

*Back-off.* The delay doubles from `base_delay` and stops at `max_delay`; chance takes
up to half of it away, so that what failed together does not come back together. It is
never zero: a job that fails at once is slow, not hot.

*Ticks.* An interval counts from the instant that the job was for (`at`), not from
when it was done, so it does not drift; whatever was missed in the meantime is one tick
that is late, never a burst. A cron job moves to the first fire after both.

*Enough.* Attempts count without progress. When they are used up, what nobody waits for
is `dead` and listed; a recurring job gives up this tick only; a turn or fiber settles
its run `error`; and what the kernel owes itself (a wipe, a look at a budget) goes on.

*Asked for.* A call that was made due before its tick (`due_at` earlier than `at`, which
nothing else makes) was one more: the tick itself is still to come.

*Missed.* Whoever says `misfire="none"` wants a tick in its time or not at all: one that is
more than a grace late is skipped, whatever kept it (downtime, a suspended machine, the
call before it). Otherwise all that were missed are one call.

Laws: `next_try` is later than now, monotone in attempts and chance, bounded;
`after_tick` is later than now and than `at`, and for an interval a whole number of
intervals after `at`; recurrences and retries survive their JSON.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final, Literal

import msgspec

from culet.kernel.core import cron
from culet.kernel.core.limits import DEFAULT, JITTER_MAX_S
from culet.kernel.errors import UsageError

Kind = Literal["call", "queue", "fiber", "turn", "hook", "deliver", "limit", "wipe"]
Verdict = Literal["retry", "dead", "give-up-tick", "settle-error", "keep-trying"]
Misfire = Literal["one", "none"]
_DOUBLINGS_MAX: Final = 62
_ID_DIGITS: Final = 18  # of any number that a row may have
_USUAL: Final = ',"misfire":"one","jitter":0.0}'


def is_number(value: object) -> bool:
    """Whether it is a finite number; True is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value)


def job_number(public_id: str) -> int | None:
    """Return the number of the job that an id may name; None: it names none."""
    plain = public_id.isascii() and public_id.isdigit()
    return int(public_id) if plain and len(public_id) <= _ID_DIGITS else None


class Retry(msgspec.Struct, frozen=True, kw_only=True):
    """How often, and how soon again. Delays are seconds.

    Raises `UsageError` for less than one attempt and for delays that are not positive,
    finite and in order.
    """

    max_attempts: int = DEFAULT.attempts
    base_delay: float = DEFAULT.backoff_base_s
    max_delay: float = DEFAULT.backoff_max_s

    def __post_init__(self) -> None:
        whole = isinstance(self.max_attempts, int) and is_number(self.max_attempts)
        if not whole or self.max_attempts < 1:
            raise UsageError(
                f"max_attempts is a whole number from 1, not {self.max_attempts!r}"
            )
        delays = is_number(self.base_delay) and is_number(self.max_delay)
        if not delays or not 0 < self.base_delay <= self.max_delay:
            raise UsageError(
                "retry delays must be positive, finite and base_delay <= max_delay, "
                f"not {self.base_delay!r} and {self.max_delay!r}"
            )


DEFAULT_RETRY: Final = Retry()


class Interval(msgspec.Struct, frozen=True, tag="interval"):
    """Every so many seconds, counted from the first instant.

    `jitter`: seconds that chance may add to each tick, less than the interval.
    """

    seconds: float
    misfire: Misfire = "one"
    jitter: float = 0.0

    def __post_init__(self) -> None:
        if not is_number(self.seconds) or self.seconds < 0.001:
            raise UsageError(
                "an interval is a positive number of seconds, at least a millisecond,"
                f" not {self.seconds!r}"
            )
        _check_policy(self.misfire, self.jitter)
        if self.jitter >= self.seconds:
            raise UsageError(
                f"jitter is less than the interval of {self.seconds!r} s,"
                f" not {self.jitter!r}"
            )


class Cron(msgspec.Struct, frozen=True, tag="cron"):
    """When the wall clock of a zone matches a cron expression.

    `jitter`: seconds that chance may add to each tick.
    """

    expr: str
    tz: str = "UTC"
    misfire: Misfire = "one"
    jitter: float = 0.0

    def __post_init__(self) -> None:
        _check_policy(self.misfire, self.jitter)


def check_jitter(jitter: float) -> None:
    """Raise `UsageError` unless it is a number of seconds that a tick may be late."""
    if not is_number(jitter) or not 0 <= jitter <= JITTER_MAX_S:
        raise UsageError(f"jitter is 0 to {JITTER_MAX_S} seconds, not {jitter!r}")


def _check_policy(misfire: Misfire, jitter: float) -> None:
    if misfire not in ("one", "none"):
        raise UsageError(f"misfire is 'one' or 'none', not {misfire!r}")
    check_jitter(jitter)


Every = Interval | Cron
# What decoding a column of a row may raise that somebody else has written.
UNREADABLE: Final = (
    msgspec.DecodeError, UsageError, UnicodeError, RecursionError, OverflowError,
)  # fmt: skip
_every: Final = msgspec.json.Decoder(Every)
_retry: Final = msgspec.json.Decoder(Retry)


def encode_every(every: Every) -> str:
    """Return the JSON of a recurrence; its policies only where they are not the usual."""
    text = msgspec.json.encode(every).decode()
    return text.removesuffix(_USUAL) + "}" if text.endswith(_USUAL) else text


@lru_cache(maxsize=256)
def decode_every(text: str) -> Every:
    """Return the recurrence of its JSON. Raises `msgspec.DecodeError`."""
    return _every.decode(text)


def encode_retry(retry: Retry) -> str:
    """Return the JSON of a retry policy."""
    return msgspec.json.encode(retry).decode()


@lru_cache(maxsize=256)
def decode_retry(text: str) -> Retry:
    """Return the retry policy of its JSON. Raises `msgspec.DecodeError`."""
    return _retry.decode(text)


def first_tick(every: Every, now_ms: int) -> int:
    """Return the first tick of a new recurrence. Raises `UsageError` for a bad cron."""
    return after_tick(every, now_ms, now_ms)


def after_tick(every: Every, at_ms: int, now_ms: int) -> int:
    """Return the tick after the one at `at_ms`, in epoch milliseconds: later than now.

    However many were missed between the two, they are not made up for.
    """
    if isinstance(every, Cron):
        return cron.next_fire(every.expr, every.tz, max(at_ms, now_ms))
    step_ms = max(1, round(every.seconds * 1000))
    missed = max(0, now_ms - at_ms) // step_ms
    return at_ms + (missed + 1) * step_ms


def next_tick(every: Every, at_ms: int, due_ms: int, now_ms: int) -> int:
    """Return the tick to come after a call for the one at `at_ms` that was due at `due_ms`.

    That tick itself, where the call was asked for before it.
    """
    return at_ms if due_ms < at_ms else after_tick(every, at_ms, now_ms)


def with_jitter(every: Every, at_ms: int, chance: float) -> int:
    """Return not before which the tick at `at_ms` is called; `chance` is in [0, 1)."""
    return at_ms + int(every.jitter * 1000 * chance)


def is_missed(every: Every, due_ms: int, now_ms: int, grace_s: float) -> bool:
    """Whether a tick that was due at `due_ms` is by its own policy not called any more."""
    return every.misfire == "none" and now_ms - due_ms > grace_s * 1000


def next_try(retry: Retry | None, attempts: int, now_ms: int, chance: float) -> int:
    """Return when to try again after `attempts` failures: epoch milliseconds.

    The delay is `base_delay * 2 ** (attempts - 1)`, at most `max_delay`; `chance`, in
    [0, 1], says how much of its second half counts. None: the default policy, one
    second doubling to five minutes. Never less than a millisecond from now.
    """
    policy = DEFAULT_RETRY if retry is None else retry
    doublings = min(max(attempts, 1) - 1, _DOUBLINGS_MAX)
    delay_s = min(policy.max_delay, policy.base_delay * 2.0**doublings)
    return now_ms + max(1, round(delay_s * 1000 * (0.5 + 0.5 * chance)))


def verdict(kind: Kind, recurring: bool, attempts: int, limit: int) -> Verdict:
    """Return what becomes of a job whose attempt number `attempts` has just failed.

    `retry`: later. With attempts used up: `settle-error` for a turn or fiber,
    `keep-trying` for a wipe or a look at a budget, `give-up-tick` for a recurring job,
    `dead` for everything else.
    """
    if attempts < limit:
        return "retry"
    match kind:
        case "turn" | "fiber":
            return "settle-error"
        case "wipe" | "limit":
            return "keep-trying"
    return "give-up-tick" if recurring else "dead"
