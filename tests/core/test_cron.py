"""Cron: every row of the vectors, a brute-force twin, and errors that name the field."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from culet.kernel.core.cron import next_fire, parse
from culet.kernel.core.limits import CRON_TEXT_MAX
from culet.kernel.errors import UsageError

ROWS = json.loads((Path(__file__).parent.parent / "vectors" / "cron.json").read_text())[
    "rows"
]


def ms(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp() * 1000)


def fires(expr: str, tz: str, start: int, count: int) -> list[int]:
    out = [start]
    for _ in range(count):
        out.append(next_fire(expr, tz, out[-1]))
    return out[1:]


@pytest.mark.rule("I-33")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_fires_as_the_vectors_expect(row: dict) -> None:
    start = ms(row["start_utc"])
    if "error" in row["expect"]:
        with pytest.raises(UsageError):
            next_fire(row["expr"], row["tz"], start)
        return
    expected = [ms(text) for text in row["expect"]["ok"]]
    assert fires(row["expr"], row["tz"], start, row["n"]) == expected


@pytest.mark.parametrize(
    ("expr", "names"),
    [
        ("61 0 * * * *", "second"),
        ("x * * * *", "minute"),
        ("* 24 * * *", "hour"),
        ("* * 32 * *", "day of month"),
        ("* * * foo *", "month"),
        ("* * * * 8", "day of week"),
        ("* * * * 5#6", "day of week"),
        ("*/0 * * * *", "minute"),
        ("5-1 * * * *", "minute"),
        ("1,,2 * * * *", "minute"),
        ("1- * * * *", "minute"),
        ("٣ * * * *", "minute"),
        ("* * ? * *", "day of month"),
        ("* * * * * * *", "7 fields"),
        ("", "0 fields"),
        ("@reboot", "1 fields"),
        ("0 0 30 2 *", "does not fire"),
        ("*" * (CRON_TEXT_MAX + 1), "at most"),
    ],
)
def test_an_error_names_the_bad_field(expr: str, names: str) -> None:
    with pytest.raises(UsageError, match=names):
        next_fire(expr, "UTC", 0)


@pytest.mark.parametrize(
    "tz", ["Mars/Base", "", "../etc/passwd", "/etc/localtime", "A\0"]
)
def test_an_unknown_zone_is_named(tz: str) -> None:
    with pytest.raises(UsageError, match="time zone"):
        next_fire("* * * * *", tz, 0)


@pytest.mark.parametrize("after", [10**18, -(10**18), 253402300799000])
def test_instants_beyond_the_calendar_are_refused(after: int) -> None:
    with pytest.raises(UsageError):
        next_fire("0 0 * * *", "UTC", after)


@pytest.mark.parametrize(
    ("expr", "start", "expected"),
    [
        ("30 0 0 * * *", "2026-01-01T00:00:00Z", "2026-01-01T00:00:30Z"),
        ("0 0 L * *", "2026-02-01T00:00:00Z", "2026-02-28T00:00:00Z"),
        ("0 0 L 2 *", "2028-01-01T00:00:00Z", "2028-02-29T00:00:00Z"),
        ("@yearly", "2026-01-01T00:00:00Z", "2027-01-01T00:00:00Z"),
        ("0 0 * JAN-MAR Sun", "2026-03-29T00:00:00Z", "2027-01-03T00:00:00Z"),
        ("0 0 */2 * 1", "2026-01-01T00:00:00Z", "2026-01-03T00:00:00Z"),
        ("0 0 */2 * 1", "2026-01-11T00:00:00Z", "2026-01-12T00:00:00Z"),
        ("0 0 */2 * *", "2026-01-11T00:00:00Z", "2026-01-13T00:00:00Z"),
        ("* * * * *", "2026-01-01T00:00:00.001Z", "2026-01-01T00:01:00Z"),
        ("* * * * *", "2025-12-31T23:59:59.999Z", "2026-01-01T00:00:00Z"),
        ("0 0 29 2 */7", "2026-01-01T00:00:00Z", "2026-02-01T00:00:00Z"),
        ("0 0 29 2 */7", "2028-02-27T00:00:00Z", "2028-02-29T00:00:00Z"),
    ],
)
def test_what_the_vectors_leave_out(expr: str, start: str, expected: str) -> None:
    assert next_fire(expr, "UTC", ms(start)) == ms(expected)


def test_a_day_that_a_zone_skipped_fires_once_after_it() -> None:
    start = ms("2011-12-29T12:00:00-10:00")
    assert fires("0 12 * * *", "Pacific/Apia", start - 1, 3) == [
        start,
        ms("2011-12-31T00:00:00+14:00"),
        ms("2011-12-31T12:00:00+14:00"),
    ]


ZONES = ["UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe",
         "Africa/Cairo", "Antarctica/Troll", "America/Santiago", "Asia/Kathmandu",
         "Atlantic/Azores", "Asia/Beirut", "Pacific/Apia"]  # fmt: skip
minutes = st.sampled_from(["0", "30", "*/15", "5,35", "*/20", "0-10/5", "59"])
hours = st.sampled_from(["*", "0", "1", "2", "3", "*/2", "0,23", "1-3", "2-4/2"])
days = st.sampled_from(["*", "*", "1", "L", "10-20", "*/3"])
weekdays = st.sampled_from(["*", "*", "0", "sun", "6,7", "1#1"])
expressions = st.builds(
    lambda *fields: " ".join(fields), minutes, hours, days, st.just("*"), weekdays
)
CHANGES = [ms(text) for text in (
    "2026-03-08T07:00:00Z", "2026-03-29T01:00:00Z", "2026-10-25T01:00:00Z",
    "2026-11-01T06:00:00Z", "2026-10-03T15:30:00Z", "2026-04-23T22:00:00Z",
    "2026-10-29T21:00:00Z", "2026-04-05T03:00:00Z", "2026-09-06T04:00:00Z",
)]  # fmt: skip
instants = st.one_of(
    st.builds(lambda change, off: change + off * 60_000, st.sampled_from(CHANGES),
              st.integers(-2000, 2000)),
    st.integers(ms("2025-01-01T00:00:00Z"), ms("2028-01-01T00:00:00Z")),
)  # fmt: skip


WALK_MIN = 3 * 1440  # minutes that `brute` walks


def matches(expr: str, local: datetime) -> bool:
    cron = parse(expr)
    last = (local + timedelta(days=1)).day == 1
    weekday = local.isoweekday() % 7
    by_day = local.day in cron.days or (cron.last_day and last)
    by_week = weekday in cron.weekdays or (weekday, (local.day + 6) // 7) in cron.nth
    return (
        local.second in cron.seconds
        and local.minute in cron.minutes
        and local.hour in cron.hours
        and local.month in cron.months
        and ((by_day or by_week) if cron.either else (by_day and by_week))
    )


def brute(expr: str, tz: str, after: int, limit: int) -> int | None:
    """Walk minute by minute and apply the two rules word by word."""
    zone = ZoneInfo(tz)
    rhythm = parse(expr).rhythm
    minute = after // 60_000 + 1
    for at in range(minute, min(minute + WALK_MIN, limit // 60_000 + 1)):
        now = datetime.fromtimestamp(at * 60, zone)
        before = datetime.fromtimestamp(at * 60 - 60, zone)
        local = now.replace(tzinfo=None)
        if rhythm:
            if matches(expr, local):
                return at * 60_000
            continue
        if now.fold == 0 and matches(expr, local):
            return at * 60_000
        step = local - before.replace(tzinfo=None)
        if step > timedelta(minutes=1):  # the end of a gap
            skipped = int(step.total_seconds() // 60)
            if any(matches(expr, local - timedelta(minutes=m))
                   for m in range(1, skipped)):  # fmt: skip
                return at * 60_000
    return None


@given(expressions, st.sampled_from(ZONES), instants)
def test_it_equals_a_walk_minute_by_minute(expr: str, tz: str, after: int) -> None:
    found = next_fire(expr, tz, after)
    expected = brute(expr, tz, after, found)
    if found // 60_000 - after // 60_000 <= WALK_MIN:
        assert expected == found, datetime.fromtimestamp(found / 1000, UTC)
    else:
        assert expected is None


@given(expressions, st.sampled_from(ZONES), instants, st.integers(0, 10**9))
def test_it_is_later_and_nothing_lies_between(
    expr: str, tz: str, after: int, back: int
) -> None:
    found = next_fire(expr, tz, after)
    assert found > after
    assert next_fire(expr, tz, found - 1) == found
    assume(back < found - after)
    assert next_fire(expr, tz, after + back) == found
