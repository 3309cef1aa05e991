"""Cron expressions: when a wall clock somewhere next shows what was asked for.

A wall clock is not a line: once or twice a year it jumps over some local times (a gap)
and shows others twice (an overlap). What an expression means then depends on what it
says. One with a star or a step in its minutes or hours asks for a *rhythm*: it fires
at every instant whose wall time matches, no more and no less. One without asks for
*fixed times* of a day: a time that falls into a gap fires once, at the first instant
after it, and a time that is shown twice fires at the first showing only. So "every day
at half past two" is once a day on each day of the year.

The search goes day by day over matching dates. A day has one offset, or two with one
instant between them where it changes; in each stretch local time is a line, and the
next match in it is three bisections away.

Accepted: five fields (minute, hour, day of month, month, day of week), six with
seconds first, and `@yearly @annually @monthly @weekly @daily @midnight @hourly`. A
field is a list of `*`, values, ranges and steps of these; `5/10` runs to the field's
end. Months and weekdays have English names; Sunday is 0 and 7; `5#2` is the second
Friday; `L` the last day of the month. Day of month and day of week that both are set
mean *either*, as in every cron; set is all but a plain `*`, so `*/2` too, where crons
differ. Ranges that run backwards are refused.

Laws: the result is strictly later than `after_ms`, and its wall time matches (or a
matching time lies in the gap that it ends); the next fire of an instant just before a
fire is that fire.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from typing import Final, NamedTuple
from zoneinfo import ZoneInfo

from culet.kernel.core.limits import CRON_TEXT_MAX, CRON_YEARS
from culet.kernel.errors import UsageError

_DAY_S: Final = 86_400
_DAY: Final = timedelta(days=1)
_ALIASES: Final = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_MONTHS: Final = (
    "jan", "feb", "mar", "apr", "may", "jun",
    "jul", "aug", "sep", "oct", "nov", "dec",
)  # fmt: skip
_WEEKDAYS: Final = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")


class _Field(NamedTuple):
    name: str
    low: int
    high: int
    words: dict[str, int]


_FIELDS: Final = (
    _Field("second", 0, 59, {}),
    _Field("minute", 0, 59, {}),
    _Field("hour", 0, 23, {}),
    _Field("day of month", 1, 31, {}),
    _Field("month", 1, 12, {word: i + 1 for i, word in enumerate(_MONTHS)}),
    _Field("day of week", 0, 7, {word: i for i, word in enumerate(_WEEKDAYS)}),
)
_ITEM: Final = re.compile(r"(?:\*|(\w+)(?:-(\w+))?)(?:/(\d{1,4}))?", re.ASCII)
_NTH: Final = re.compile(r"(\w+)#([1-5])", re.ASCII)
_NUMBER: Final = re.compile(r"\d{1,4}", re.ASCII)


class Cron(NamedTuple):
    """A parsed expression. Values are sorted; weekdays count from Sunday, 0."""

    seconds: tuple[int, ...]
    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    nth: frozenset[tuple[int, int]]  # (weekday, which of the month)
    last_day: bool
    either: bool  # day of month and day of week are both set: one is enough
    rhythm: bool  # a star or step in minutes or hours: every instant that matches


def next_fire(expr: str, tz: str, after_ms: int) -> int:
    """Return the first fire strictly after `after_ms`, in epoch milliseconds.

    `tz` is an IANA zone. Raises `UsageError` for a bad expression (the field is
    named), an unknown zone, and an expression that never fires.
    """
    cron = parse(expr)
    zone = _zone(tz)
    lowest = after_ms // 1000 + 1  # fires are whole seconds
    try:
        here = datetime.fromtimestamp(lowest, zone).date() - _DAY
        for day in _dates(cron, here):
            found = _in_day(cron, zone, day, lowest)
            if found is not None:
                return found * 1000
    except (OverflowError, ValueError, OSError):
        raise UsageError(f"{after_ms} ms is beyond the calendar") from None
    raise UsageError(f"cron {expr!r} does not fire within {CRON_YEARS} years")


@lru_cache(maxsize=512)
def parse(expr: str) -> Cron:
    """Parse an expression. Raises `UsageError` that names the bad field."""
    if not isinstance(expr, str) or len(expr) > CRON_TEXT_MAX:
        raise UsageError(
            f"a cron expression is a text of at most {CRON_TEXT_MAX} characters"
        )
    texts = _ALIASES.get(expr.strip().lower(), expr).lower().split()
    if len(texts) == 5:
        texts.insert(0, "0")
    if len(texts) != 6:
        raise UsageError(
            f"cron {expr!r} has {len(texts)} fields: give 5, 6 with seconds, or @daily"
        )
    *plain, day_text, month_text, weekday_text = texts
    seconds, minutes, hours = (
        tuple(sorted(_values(field, text, expr)))
        for field, text in zip(_FIELDS, plain, strict=False)
    )
    day_items = day_text.split(",")
    last_day = "l" in day_items
    day_rest = [item for item in day_items if item != "l"]
    days = _values(_FIELDS[3], ",".join(day_rest), expr) if day_rest else frozenset()
    weekdays, nth = _weekdays(weekday_text, expr)
    return Cron(
        seconds=seconds,
        minutes=minutes,
        hours=hours,
        days=days,
        months=_values(_FIELDS[4], month_text, expr),
        weekdays=weekdays,
        nth=nth,
        last_day=last_day,
        either=day_text != "*" and weekday_text != "*",
        rhythm=any(mark in text for mark in "*/" for text in (plain[1], plain[2])),
    )


def _weekdays(
    text: str, expr: str
) -> tuple[frozenset[int], frozenset[tuple[int, int]]]:
    field = _FIELDS[5]
    plain: list[str] = []
    nth: set[tuple[int, int]] = set()
    for item in text.split(","):
        found = _NTH.fullmatch(item)
        if found:
            nth.add((_value(field, found[1], item, expr) % 7, int(found[2])))
        else:
            plain.append(item)
    values = _values(field, ",".join(plain), expr) if plain else frozenset[int]()
    return frozenset(value % 7 for value in values), frozenset(nth)


def _values(field: _Field, text: str, expr: str) -> frozenset[int]:
    values: set[int] = set()
    for item in text.split(","):
        found = _ITEM.fullmatch(item)
        if found is None:
            raise _bad(field, item, expr)
        first, last, step_text = found.groups()
        step = int(step_text) if step_text else 1
        if step == 0:
            raise _bad(field, item, expr)
        if first is None:
            low, high = field.low, field.high
        else:
            low = high = _value(field, first, item, expr)
            if last is not None:
                high = _value(field, last, item, expr)
            elif step_text:
                high = field.high
        if high < low:
            raise _bad(field, item, expr)
        values.update(range(low, high + 1, step))
    return frozenset(values)


def _value(field: _Field, text: str, item: str, expr: str) -> int:
    value = field.words.get(text)
    if value is None and _NUMBER.fullmatch(text):
        value = int(text)
    if value is None or not field.low <= value <= field.high:
        raise _bad(field, item, expr)
    return value


def _bad(field: _Field, item: str, expr: str) -> UsageError:
    return UsageError(
        f"cron field {field.name!r}: {item!r} is not in {field.low}-{field.high}"
        f" or not understood, in {expr!r}"
    )


@lru_cache(maxsize=256)
def _zone(tz: str) -> ZoneInfo:
    try:
        return ZoneInfo(tz)
    except (KeyError, ValueError, OSError, TypeError, AttributeError):
        raise UsageError(f"{tz!r} is not an IANA time zone") from None


def _dates(cron: Cron, first: date) -> Iterator[date]:
    """Yield the matching dates from `first` on, for `CRON_YEARS` years."""
    for months in range(CRON_YEARS * 12 + 1):
        year, month = divmod(first.year * 12 + first.month - 1 + months, 12)
        if month + 1 not in cron.months:
            continue
        length = (date(year + month // 11, (month + 1) % 12 + 1, 1) - _DAY).day
        for day in range(first.day if months == 0 else 1, length + 1):
            here = date(year, month + 1, day)
            if _date_matches(cron, here, length):
                yield here


def _date_matches(cron: Cron, here: date, length: int) -> bool:
    weekday = here.isoweekday() % 7
    by_day = here.day in cron.days or (cron.last_day and here.day == length)
    which = (here.day - 1) // 7 + 1
    by_weekday = weekday in cron.weekdays or (weekday, which) in cron.nth
    return (by_day or by_weekday) if cron.either else (by_day and by_weekday)


def _in_day(cron: Cron, zone: ZoneInfo, day: date, lowest: int) -> int | None:
    """Return the first fire of a local day that is not before `lowest` (epoch seconds).

    `low` and `high` are offsets from UTC at the two ends of the day.
    """
    midnight = int(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp())
    low = _offset(zone, day)
    high = _offset(zone, day + _DAY)
    if low == high:
        return _stretch(cron, midnight, low, lowest, 0, _DAY_S)
    change = _change(zone, midnight - low, midnight + _DAY_S - high, low)
    before, after = change + low - midnight, change + high - midnight
    first = _stretch(cron, midnight, low, lowest, 0, before)
    if first is not None:
        return first
    if cron.rhythm:
        return _stretch(cron, midnight, high, lowest, max(after, 0), _DAY_S)
    skipped = _time(cron, before, after)
    if skipped is not None and change >= lowest:
        return change
    return _stretch(cron, midnight, high, lowest, max(before, after), _DAY_S)


def _offset(zone: ZoneInfo, day: date) -> int:
    """Return the offset from UTC at a local midnight; in a gap, the one before it."""
    delta = datetime(day.year, day.month, day.day, tzinfo=zone).utcoffset()
    assert delta is not None
    return int(delta.total_seconds())


def _change(zone: ZoneInfo, start: int, end: int, low: int) -> int:
    """Return the first instant in [start, end] whose offset is not `low`."""
    while start < end:
        middle = (start + end) // 2
        delta = datetime.fromtimestamp(middle, zone).utcoffset()
        assert delta is not None
        if int(delta.total_seconds()) == low:
            start = middle + 1
        else:
            end = middle
    return start


def _stretch(
    cron: Cron, midnight: int, offset: int, lowest: int, begin: int, end: int
) -> int | None:
    """Return the first fire among the local times [begin, end) of a day, as an instant."""
    found = _time(cron, max(begin, lowest + offset - midnight), end)
    return None if found is None else midnight + found - offset


def _time(cron: Cron, begin: int, end: int) -> int | None:
    """Return the first matching second of the day in [begin, end)."""
    begin = max(begin, 0)
    if begin >= min(end, _DAY_S):
        return None
    hour, rest = divmod(begin, 3600)
    minute, second = divmod(rest, 60)
    at = bisect_left(cron.hours, hour)
    if at < len(cron.hours) and cron.hours[at] == hour:
        at_minute = bisect_left(cron.minutes, minute)
        if at_minute < len(cron.minutes) and cron.minutes[at_minute] == minute:
            at_second = bisect_left(cron.seconds, second)
            if at_second < len(cron.seconds):
                return _before(end, hour, minute, cron.seconds[at_second])
            at_minute += 1
        if at_minute < len(cron.minutes):
            return _before(end, hour, cron.minutes[at_minute], cron.seconds[0])
        at += 1
    if at < len(cron.hours):
        return _before(end, cron.hours[at], cron.minutes[0], cron.seconds[0])
    return None


def _before(end: int, hour: int, minute: int, second: int) -> int | None:
    found = hour * 3600 + minute * 60 + second
    return found if found < end else None
