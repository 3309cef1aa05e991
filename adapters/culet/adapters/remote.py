"""What all models behind HTTP have in common: trying again, reading, closing, failing.

A request that failed is sent again with the kernel's back-off, as long as nothing of
the answer was said; afterwards never, because what was said stays said. A provider's
`Retry-After` is honoured when it is bearable. Every failure is one of the errors below,
with a text that people may read: no key, no address, no stack.

The HTTP stream is closed when the consumer stops or is cancelled, at once. For that the
reading is never left at rest: it is resumed under a cancelled scope, so that each
generator of the HTTP client ends where it waits, and none is left to the collector.
"""

from __future__ import annotations

import email.utils
import itertools
import logging
import math
import os
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
)
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager, suppress
from typing import Any, Final, Protocol, final

import msgspec
import trio

from culet.adapters.model import ModelEvent
from culet.kernel.clock import Chance
from culet.kernel.core import sse
from culet.kernel.core.job import Retry, next_try
from culet.kernel.core.limits import DEFAULT, MODEL_ATTEMPTS, MODEL_WAIT_S
from culet.kernel.errors import CuletError, RemoteProtocolError, UsageError

log = logging.getLogger("culet.adapters")

RETRY: Final = Retry(
    max_attempts=MODEL_ATTEMPTS,
    base_delay=DEFAULT.backoff_base_s,
    max_delay=MODEL_WAIT_S,
)
_SAID_CHARS: Final = 300  # of a provider's own words in our message
_LATER: Final = frozenset({408, 409, 425, 429})  # and all from 500


class ModelError(CuletError):
    """A model did not answer, or not to the end. `again`: asking again may help."""

    again = True


class ModelLimited(ModelError):
    """The provider's rate limit is reached; `retry_after_s` is what it asks for."""

    def __init__(self, message: str, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ModelUnavailable(ModelError):
    """The provider cannot be reached, is silent for too long, or failed by itself."""


class ModelRefused(ModelError):
    """The provider does not take this request, and will not take it later either.

    `status` is its HTTP status: too long a conversation, an unknown model, no credit.
    """

    again = False

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class ModelCut(ModelError):
    """The answer ended before the model had finished, or cannot be read on."""


class Sdk(msgspec.Struct, frozen=True, kw_only=True):
    """What differs between the official clients, as far as failures go."""

    name: str  # of the provider, for people
    variable: str  # of the environment, that holds the key
    status_error: type[Exception]  # with `status_code`, `response`, `body`
    timeout_error: type[Exception]
    connection_error: type[Exception]
    api_error: type[Exception]  # the base of the three
    transport_error: type[Exception]  # of the HTTP client below
    transport_timeout: type[Exception]


def key_for(owner: str, variable: str, model: str, api_key: str | None) -> str:
    """Return the key that a model is asked with; `UsageError` without key or name."""
    if not model:
        raise UsageError(f"{owner} needs the name of a model")
    key = api_key or os.environ.get(variable)
    if not key:
        raise UsageError(f"{owner} needs a key: set {variable} or give api_key")
    return key


class Reply(Protocol):
    """An answer whose status was good and whose body is still to come."""

    def iter_bytes(self) -> AsyncIterator[bytes]:
        """Return the body in blocks as they arrive."""
        ...


class Fold(Protocol):
    """Makes model events of one answer's server-sent events."""

    @property
    def done(self) -> bool:
        """Whether the provider said that nothing more comes."""
        ...

    def take(self, event: sse.Event) -> Iterable[ModelEvent]:
        """Return what an event says at once. May raise any `ModelError`."""
        ...

    def end(self) -> Iterable[ModelEvent]:
        """Return tool calls, usage and finish; raises `ModelCut` if it was cut."""
        ...


@final
class Remote:
    """Sends requests of one model and reads the answers; see the module."""

    def __init__(
        self,
        sdk: Sdk,
        *,
        retry: Retry | None,
        sleep: Callable[[float], Awaitable[object]],
        chance: Callable[[], float] | None,
    ) -> None:
        self._sdk = sdk
        self._retry = RETRY if retry is None else retry
        self._sleep = sleep
        self._chance = Chance().fraction if chance is None else chance

    async def stream(
        self,
        send: Callable[[], AbstractAsyncContextManager[Reply]],
        fold: Callable[[], Fold],
    ) -> AsyncGenerator[ModelEvent, None]:
        """Yield the events of one answer; `send` and `fold` are made anew each time."""
        for attempt in itertools.count(1):
            said = False
            try:
                async with aclosing(self._once(send, fold())) as events:
                    async for event in events:
                        said = True
                        yield event
                return
            except ModelError as error:
                delay_s = None if said else self._delay_s(error, attempt)
                if delay_s is None:
                    raise
                name = self._sdk.name
                log.info("%s: %s; again in %.1f s", name, error, delay_s)
            await self._sleep(delay_s)

    async def _once(
        self, send: Callable[[], AbstractAsyncContextManager[Reply]], fold: Fold
    ) -> AsyncGenerator[ModelEvent, None]:
        decoder = sse.Decoder()
        with translated(self._sdk):
            async with send() as reply:
                blocks = reply.iter_bytes()
                try:
                    async for block in blocks:
                        for event in decoder.feed(block):
                            for said in fold.take(event):
                                yield said
                        if fold.done:
                            break
                finally:
                    await _unwind(blocks)
        for said in fold.end():
            yield said

    def _delay_s(self, error: ModelError, attempt: int) -> float | None:
        """Return how long to wait before the next attempt; None: there is none."""
        if not error.again or attempt >= self._retry.max_attempts:
            return None
        own_s = next_try(self._retry, attempt, 0, self._chance()) / 1000
        asked_s = error.retry_after_s if isinstance(error, ModelLimited) else None
        if asked_s is None:
            return own_s
        return None if asked_s > self._retry.max_delay else max(own_s, asked_s)


async def _unwind(blocks: AsyncIterator[bytes]) -> None:
    """End a body that nobody reads on, however deep its generators are nested."""
    with trio.CancelScope() as scope:
        scope.cancel()
        with suppress(Exception):  # it may fail as it likes, nobody wants it
            async for _ in blocks:
                pass


@contextmanager
def translated(sdk: Sdk) -> Iterator[None]:
    """Raise what a client raises as one of our errors."""
    try:
        yield
    except RemoteProtocolError as error:
        raise ModelCut(f"{sdk.name}: {error}") from error
    except sdk.status_error as error:
        raise status_failure(sdk, error) from error
    except (sdk.timeout_error, sdk.transport_timeout) as error:
        raise ModelUnavailable(f"{sdk.name} said nothing for too long") from error
    except sdk.connection_error as error:
        raise ModelUnavailable(f"{sdk.name} cannot be reached") from error
    except sdk.transport_error as error:
        raise ModelCut(f"the connection to {sdk.name} broke off") from error
    except sdk.api_error as error:
        raise ModelUnavailable(f"{sdk.name} failed") from error


def status_failure(sdk: Sdk, error: Any) -> ModelError | UsageError:
    """Return the error for an answer with a bad status."""
    status: int = error.status_code
    if status in (401, 403):
        return UsageError(
            f"{sdk.name} did not accept the API key ({status}): set {sdk.variable} to a"
            " key that may use this model"
        )
    if status == 429 and getattr(error, "code", None) == "insufficient_quota":
        return ModelRefused(f"{sdk.name}: the account's quota is used up", status)
    if status == 429:
        after_s = retry_after_s(error.response.headers)
        return ModelLimited(f"{sdk.name}: the rate limit is reached", after_s)
    if status in _LATER or status >= 500:
        return ModelUnavailable(f"{sdk.name} failed with status {status}")
    words = shortened(said_by(error.body))
    return ModelRefused(f"{sdk.name} refused the request ({status}): {words}", status)


def said_by(body: object) -> str:
    """Return the message in the body of an error, in either provider's form."""
    if isinstance(body, Mapping):
        inner = body.get("error", body)
        if isinstance(inner, Mapping) and isinstance(inner.get("message"), str):
            return str(inner["message"])
    return "no reason given"


def shortened(text: str) -> str:
    """Return a provider's words on one line and not too many of them."""
    line = " ".join(text.split())
    return line if len(line) <= _SAID_CHARS else line[:_SAID_CHARS] + " …"


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return what `Retry-After` asks for, in seconds; None: nothing that can be read.

    A date counts from the answer's own `Date`, so that no clock of ours is needed.
    """
    value = headers.get("retry-after")
    if value is None:
        return None
    with suppress(ValueError):
        seconds = float(value)
        return seconds if 0 <= seconds < math.inf else None
    with suppress(ValueError, TypeError):
        until = email.utils.parsedate_to_datetime(value)
        now = email.utils.parsedate_to_datetime(headers.get("date", ""))
        return max(0.0, (until - now).total_seconds())
    return None
