"""Back-off, ticks and verdicts: tables for the rules, Hypothesis for the laws."""

from __future__ import annotations

import itertools
import math
from datetime import UTC, datetime

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from culet.kernel.core.job import (
    DEFAULT_RETRY,
    Cron,
    Interval,
    Retry,
    after_tick,
    decode_every,
    decode_retry,
    encode_every,
    encode_retry,
    first_tick,
    is_missed,
    is_number,
    job_number,
    next_tick,
    next_try,
    verdict,
    with_jitter,
)
from culet.kernel.errors import UsageError

NOW = 1_800_000_000_000


def test_the_default_doubles_from_one_second_to_five_minutes() -> None:
    delays = [next_try(None, attempt, NOW, 1.0) - NOW for attempt in range(1, 12)]
    assert delays[:9] == [1000 * 2**i for i in range(9)]
    assert delays[9:] == [300_000, 300_000]


def test_chance_takes_up_to_half_away() -> None:
    assert next_try(DEFAULT_RETRY, 3, NOW, 0.0) - NOW == 2000
    assert next_try(DEFAULT_RETRY, 3, NOW, 0.5) - NOW == 3000


retries = st.builds(
    lambda attempts, base, factor: Retry(
        max_attempts=attempts, base_delay=base, max_delay=base * factor
    ),
    st.integers(1, 1000),
    st.floats(1e-6, 1e4),
    st.floats(1, 1e4),
)
chances = st.floats(0, 1)


@given(st.none() | retries, st.integers(-1, 10**9), chances, chances)
def test_a_next_try_is_later_bounded_and_monotone(
    retry: Retry | None, attempts: int, one: float, other: float
) -> None:
    due = next_try(retry, attempts, NOW, one)
    bound = (retry or DEFAULT_RETRY).max_delay
    assert NOW < due <= NOW + math.ceil(bound * 1000) + 1
    assert next_try(retry, attempts + 1, NOW, one) >= due
    low, high = sorted((one, other))
    assert next_try(retry, attempts, NOW, low) <= next_try(retry, attempts, NOW, high)


@pytest.mark.parametrize(
    "bad",
    [
        {"max_attempts": 0},
        {"base_delay": 0.0},
        {"base_delay": -1.0},
        {"base_delay": 2.0, "max_delay": 1.0},
        {"max_delay": math.inf},
        {"base_delay": math.nan},
    ],
    ids=str,
)
def test_a_retry_that_makes_no_sense_is_refused(bad: dict) -> None:
    with pytest.raises(UsageError):
        Retry(**bad)


@pytest.mark.parametrize("seconds", [0, -1.0, 1e-9, math.inf, math.nan])
def test_an_interval_that_makes_no_sense_is_refused(seconds: float) -> None:
    with pytest.raises(UsageError):
        Interval(seconds)


def test_an_interval_counts_from_at_and_misses_become_one() -> None:
    every = Interval(10)
    assert after_tick(every, NOW, NOW + 3) == NOW + 10_000
    assert after_tick(every, NOW, NOW + 10_000) == NOW + 20_000
    assert after_tick(every, NOW, NOW + 3_600_001) == NOW + 3_610_000
    assert after_tick(every, NOW, NOW - 999_999) == NOW + 10_000  # the clock went back


@given(
    st.floats(0.001, 1e7), st.integers(0, NOW), st.integers(0, 2 * NOW)
)  # an alarm may come early after a clock jump, or years late
def test_a_tick_is_a_whole_number_of_intervals_later_and_after_now(
    seconds: float, at: int, now: int
) -> None:
    tick = after_tick(Interval(seconds), at, now)
    step = max(1, round(seconds * 1000))
    assert tick > now
    assert tick > at
    assert (tick - at) % step == 0
    assert tick - step <= max(now, at)


def test_a_cron_tick_comes_after_both() -> None:
    def ms(*when: int) -> int:
        return int(datetime(*when, tzinfo=UTC).timestamp() * 1000)

    daily = Cron("0 12 * * *")
    at = ms(2026, 1, 1, 12)
    assert after_tick(daily, at, at + 5) == ms(2026, 1, 2, 12)
    assert after_tick(daily, at, ms(2026, 3, 1, 13)) == ms(2026, 3, 2, 12)
    assert after_tick(daily, at, ms(2025, 1, 1)) == ms(2026, 1, 2, 12)
    assert first_tick(daily, at - 1) == at


def test_a_bad_cron_is_told_when_it_is_set() -> None:
    with pytest.raises(UsageError, match="hour"):
        first_tick(Cron("0 25 * * *"), NOW)


@given(
    st.builds(Interval, st.floats(0.001, 1e9)) | st.builds(Cron, st.text(max_size=9))
)
def test_recurrences_survive_their_json(every: Interval | Cron) -> None:
    assert decode_every(encode_every(every)) == every


@given(retries)
def test_retries_survive_their_json(retry: Retry) -> None:
    assert decode_retry(encode_retry(retry)) == retry


@pytest.mark.parametrize("text", ["", "{}", '{"type":"moon"}', '{"type":"interval"}'])
def test_a_stored_recurrence_that_is_damaged_is_an_error(text: str) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_every(text)


KINDS = ("call", "queue", "fiber", "turn", "hook", "deliver", "limit", "wipe")


@pytest.mark.parametrize(
    ("kind", "recurring"), list(itertools.product(KINDS, (False, True)))
)
def test_every_verdict(kind, recurring: bool) -> None:
    assert verdict(kind, recurring, 4, 5) == "retry"
    ended = {"turn": "settle-error", "fiber": "settle-error", "wipe": "keep-trying",
             "limit": "keep-trying"}  # fmt: skip
    other = "give-up-tick" if recurring else "dead"
    for attempts in (5, 6):
        assert verdict(kind, recurring, attempts, 5) == ended.get(kind, other)


policies = st.sampled_from(["one", "none"])


@given(st.floats(1, 1e6), policies, st.floats(0, 0.99))
def test_policies_of_a_recurrence_survive_their_json(
    seconds: float, misfire, share: float
) -> None:
    for every in (
        Interval(seconds, misfire, min(seconds * share, 86_400)),
        Cron("* * * * *", "UTC", misfire, share),
    ):
        assert decode_every(encode_every(every)) == every


@given(st.floats(1, 1e5), st.integers(0, NOW), st.integers(1, 10**9), chances)
def test_a_call_that_was_asked_for_leaves_its_tick(
    seconds: float, at: int, early: int, chance: float
) -> None:
    every = Interval(seconds, jitter=seconds / 2)
    assert next_tick(every, at, at - early, at - early) == at
    due = with_jitter(every, at, chance)
    assert at <= due <= at + seconds * 500
    assert next_tick(every, at, due, due) == after_tick(every, at, due) > due


@pytest.mark.parametrize(
    ("public_id", "number"),
    [
        ("7", 7), ("9" * 18, 10**18 - 1), ("9" * 19, None), ("", None), ("-1", None),
        ("1.0", None), ("r7", None), ("\u0663", None), ("\u00b2", None),
    ],
)  # fmt: skip
def test_only_an_id_of_digits_names_a_job(public_id: str, number: int | None) -> None:
    assert job_number(public_id) == number


@pytest.mark.parametrize(("chance", "later"), [(0, 0), (0.5, 15_000), (0.9, 27_000)])
def test_jitter_is_a_share_of_its_seconds(chance: float, later: int) -> None:
    assert with_jitter(Interval(60, jitter=30), NOW, chance) == NOW + later


@pytest.mark.parametrize("every", [Interval(60), Cron("* * * * *")])
def test_a_tick_is_missed_by_policy_when_it_is_later_than_the_grace(every) -> None:
    strict = type(every)(
        *(getattr(every, f) for f in every.__struct_fields__[:-2]), "none"
    )
    assert not is_missed(every, NOW, NOW + 10**9, 60)
    assert not is_missed(strict, NOW, NOW + 60_000, 60)
    assert is_missed(strict, NOW, NOW + 60_001, 60)
    assert not is_missed(strict, NOW, NOW - 10**9, 60), "the clock went back"


@pytest.mark.parametrize(
    "policy", [{"misfire": "all"}, {"jitter": -1}, {"jitter": math.nan}, {"jitter": 60}]
)
def test_a_policy_that_makes_no_sense_is_refused(policy) -> None:
    with pytest.raises(UsageError):
        Interval(60, **policy)
    if policy != {"jitter": 60}:
        with pytest.raises(UsageError):
            Cron("* * * * *", **policy)


@pytest.mark.parametrize("value", [True, "1", None, math.inf, [1]])
def test_what_is_no_number_is_none(value) -> None:
    assert not is_number(value)
    with pytest.raises(UsageError):
        Interval(value)
    with pytest.raises(UsageError):
        Retry(max_attempts=value)
    with pytest.raises(UsageError):
        Retry(base_delay=value)
