"""The stored form of policies, and edges of the back-off."""

from __future__ import annotations

import pytest

from culet.kernel.core.job import (
    Cron,
    Interval,
    Retry,
    after_tick,
    encode_every,
    encode_retry,
    next_try,
)


def test_what_is_stored_is_what_older_lives_have_stored() -> None:
    assert encode_every(Interval(5.0)) == '{"type":"interval","seconds":5.0}'
    assert encode_every(Cron("* * * * *")) == (
        '{"type":"cron","expr":"* * * * *","tz":"UTC"}'
    )
    assert encode_retry(Retry(max_attempts=2, base_delay=1.0, max_delay=9.0)) == (
        '{"max_attempts":2,"base_delay":1.0,"max_delay":9.0}'
    )


@pytest.mark.parametrize("policy", [Retry(), Interval(1.0), Cron("* * * * *")])
def test_policies_are_values(policy: Retry | Interval | Cron) -> None:
    with pytest.raises(AttributeError):
        setattr(policy, policy.__struct_fields__[0], 1)


def test_the_smallest_interval_and_delay_are_one_millisecond() -> None:
    assert after_tick(Interval(0.001), 1000, 1000) == 1001
    tiny = Retry(base_delay=1e-9, max_delay=1e-9)
    assert next_try(tiny, 1, 1000, 0.0) == 1001


def test_no_number_of_attempts_is_too_large() -> None:
    slow = Retry(base_delay=1e-12, max_delay=1e12)
    assert next_try(slow, 10**9, 0, 1.0) == next_try(slow, 63, 0, 1.0)
    assert next_try(slow, 63, 0, 1.0) == round(1e-12 * 2.0**62 * 1000)
