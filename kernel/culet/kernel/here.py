"""What code asks that does not know whose it is: which agent runs here, and try again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import trio

from .agent import Agent
from .core.job import Retry, next_try
from .http import Request
from .node import ambient
from .sockets import Connection


class Here(msgspec.Struct, frozen=True):
    """What `current_agent` returns."""

    agent: Agent
    connection: Connection | None
    request: Request | None
    identity: Any


def current_agent() -> Here | None:
    """Return whose code this task runs, and for which client; None outside of agents."""
    here = ambient.get()
    if here is None:
        return None
    return Here(here.node.agent, here.connection, here.request, here.identity)


async def retry_call(
    fn: Callable[[], Awaitable[Any]],
    *,
    max_attempts: int | None = None,
    base_delay: float | None = None,
    max_delay: float | None = None,
    should_retry: Callable[[Exception], bool] = lambda error: True,
) -> Any:
    """Call `fn` until it succeeds, at most `max_attempts` times, with doubling delays (s).

    What is not given is as `retry` of the calling agent's class says (3 attempts, 0.1 s
    doubling to 3 s). Inside an agent chance takes up to half of each delay away. Raises the
    last error, or at once one that `should_retry` says no to; `UsageError` for a policy
    that makes no sense as a whole, before the first call.
    """
    here = ambient.get()
    usual = Agent.retry if here is None else here.node.agent.retry
    policy = Retry(
        max_attempts=usual.max_attempts if max_attempts is None else max_attempts,
        base_delay=usual.base_delay if base_delay is None else base_delay,
        max_delay=usual.max_delay if max_delay is None else max_delay,
    )
    chance = None if here is None else here.node.tree.kernel.chance
    attempt = 1
    while True:
        try:
            return await fn()
        except Exception as error:
            if attempt >= policy.max_attempts or not should_retry(error):
                raise
        fraction = 1.0 if chance is None else chance.fraction()
        await trio.sleep(next_try(policy, attempt, 0, fraction) / 1000)
        attempt += 1
