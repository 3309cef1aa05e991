"""What an agent owes itself, before it is stored: the words checked, the instants reckoned.

A plan is a row of `job` that is not there yet. Everything that would only fail when it is
due is refused here.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import msgspec

from .calls import json_bytes
from .core import job as core
from .core.job import Cron, Every, Interval, Misfire, Retry, is_number
from .core.limits import DELAY_MAX_S, INTERVAL_MAX_S
from .core.run import steady_json
from .errors import UsageError

if TYPE_CHECKING:
    from .node import Node

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MS: Final = timedelta(milliseconds=1)


class Due(msgspec.Struct, frozen=True):
    """One call for `schedules.many`: the arguments of `schedule`, under the same names."""

    when: float | datetime | str
    callback: str | Callable[..., Any]
    payload: Any = None
    idempotent: bool | None = None
    retry: Retry | None = None
    tz: str | None = None
    misfire: Misfire = "one"
    jitter: float = 0.0


class Plan(NamedTuple):
    """One call, ready to be stored. `unsure`: nobody said whether twice the same is one."""

    what: str
    text: str | None  # JSON of the payload
    every: Every | None
    at: int
    due_at: int
    key: str | None
    retry: Retry
    unsure: bool = False


def plan(node: Node, due: Due) -> Plan:
    """Check one call and say when it is for. Raises `UsageError`, `CapacityError`."""
    name = callback_name(node, due.callback)
    text = _payload(node, name, due.payload)
    when, now = due.when, node.tree.now()
    chance = node.tree.kernel.chance.fraction
    every: Every | None = None
    if isinstance(when, str):
        every = Cron(when, due.tz or "UTC", due.misfire, due.jitter)
        at = core.first_tick(every, now)
        spread = core.with_jitter(every, at, chance())
        spec: Any = when
    else:
        if due.tz is not None or due.misfire != "one":
            msg = "tz and misfire are for what recurs: give a cron text, not {when!r}"
            raise UsageError(msg.format(when=when))
        core.check_jitter(due.jitter)
        at = instant(when) if isinstance(when, datetime) else now + _delay_ms(when)
        spread = at + int(due.jitter * 1000 * chance()) if due.jitter else at
        spec = at if isinstance(when, datetime) else _plain(when)
    idempotent = every is not None if due.idempotent is None else due.idempotent
    zone = None if due.tz == "UTC" else due.tz  # which is the one that is meant
    return Plan(
        name, text, every, at, spread,
        _digest(name, due.payload, "at", spec, zone) if idempotent else None,
        due.retry or node.agent.retry,
        unsure=due.idempotent is None and every is None,
    )  # fmt: skip


def plan_interval(
    node: Node,
    seconds: float,
    callback: str | Callable[..., Any],
    payload: Any,
    retry: Retry | None,
    misfire: Misfire,
    jitter: float,
) -> Plan:
    """The same for an interval; the same one twice is one."""
    name = callback_name(node, callback)
    text = _payload(node, name, payload)
    every = Interval(seconds, misfire, jitter)
    if seconds > INTERVAL_MAX_S:
        msg = f"an interval is at most {INTERVAL_MAX_S} s, not {seconds!r}: use a cron text"
        raise UsageError(msg)
    at = core.first_tick(every, node.tree.now())
    due_at = core.with_jitter(every, at, node.tree.kernel.chance.fraction())
    key = _digest(name, payload, "every", _plain(seconds))
    return Plan(name, text, every, at, due_at, key, retry or node.agent.retry)


def plan_now(
    node: Node, callback: str | Callable[..., Any], payload: Any, retry: Retry | None
) -> Plan:
    """The same for a call that is queued."""
    name, now = callback_name(node, callback), node.tree.now()
    text = _payload(node, name, payload)
    return Plan(name, text, None, now, now, None, retry or node.agent.retry)


def instant(when: datetime) -> int:
    """Return epoch milliseconds of an aware datetime, rounded up: never early."""
    if when.tzinfo is None:
        msg = f"{when!r} has no time zone; give an aware datetime"
        raise UsageError(msg)
    return -((_EPOCH - when) // _MS)


def _delay_ms(when: object) -> int:
    if not is_number(when) or not 0 <= cast(float, when) < DELAY_MAX_S:
        msg = (
            "give a number of seconds that is not negative, an aware datetime or a cron"
            f" text, not {when!r}"
        )
        raise UsageError(msg)
    return math.ceil(cast(float, when) * 1000 - 1e-6)


def _payload(node: Node, name: str, payload: Any) -> str | None:
    if payload is None:
        return None
    most = node.tree.kernel.limits.input_bytes
    return json_bytes(payload, f"the payload for {name!r}", most).decode()


def _digest(name: str, payload: Any, *spec: Any) -> str:
    """Return the key under which twice the same is one; older lives have stored such.

    The order of keys does not count, nor that of sets, which is another in each process.
    """
    value = msgspec.json.decode(steady_json(payload))
    plain = msgspec.json.encode(value, order="deterministic")
    parts = msgspec.json.encode([name, list(spec)]) + plain
    return hashlib.sha256(parts).hexdigest()


def _plain(seconds: float) -> float:
    """Return a number of seconds in one form: 60 and 60.0 are the same time."""
    return int(seconds) if float(seconds).is_integer() else seconds


def callback_name(
    node: Node, callback: str | Callable[..., Any], *, arguments: int = 2
) -> str:
    """Return the method's name; raises `UsageError` unless it can be called later.

    It must be an async method of that agent which takes `arguments` arguments.
    """
    if not isinstance(callback, str):
        if getattr(callback, "__self__", None) is not node.agent:
            msg = f"{callback!r} is not a method of this agent; give its name"
            raise UsageError(msg)
        callback = str(cast(Any, callback).__name__)
    _check_callback(cast(Any, node.kind.cls), callback, arguments)
    return callback


@lru_cache(maxsize=1024)
def _check_callback(cls: Any, name: str, arguments: int) -> None:
    """Refuse now what would only fail when it is due."""
    fn = getattr(cls, name, None)
    if name.startswith("__") or not callable(fn):
        msg = f"{cls.__name__} has no method {name!r} to call"
        raise UsageError(msg)
    if not inspect.iscoroutinefunction(fn):
        msg = f"{cls.__name__}.{name} is called later: make it async"
        raise UsageError(msg)
    try:
        inspect.signature(fn).bind(*[None] * (arguments + 1))
    except TypeError:
        gets = "(payload, schedule)" if arguments == 2 else "(run)"
        msg = f"{cls.__name__}.{name} is called with {gets}; give it these parameters"
        raise UsageError(msg) from None
