"""A model that says what it was told to say, for tests and examples."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from typing import TypeAlias, final

import trio

from culet.adapters.model import (
    Finish,
    ModelEvent,
    ModelRequest,
    Price,
    TextDelta,
    ToolCall,
)
from culet.kernel.errors import UsageError

ScriptItem: TypeAlias = ModelEvent | str | Exception
Step: TypeAlias = ScriptItem | Sequence[ScriptItem]
Script: TypeAlias = Sequence[Step] | Callable[[ModelRequest], Iterable[ScriptItem]]


@final
class ScriptedModel:
    """Plays one step of a script for each request, always the same for the same request.

    A step is a text, an event, or a list of them; an exception among them is raised at
    that place, in mid-stream. Which step is played depends on the request alone, not on
    how often it was asked: it is the number of assistant messages after the last user
    message, so a request that is repeated after a crash gets the same step again. A
    callable gets the request and returns the items itself.

    `request.partial` is honoured: text that was already said is skipped. `Finish` is
    added where the script has none.
    """

    def __init__(
        self,
        steps: Script,
        *,
        pace_s: float = 0,
        sleep: Callable[[float], Awaitable[object]] = trio.sleep,
        price: Price | None = None,
    ) -> None:
        self._steps = steps
        self.price = price
        self._pace_s = pace_s
        self._sleep = sleep

    async def stream(
        self, request: ModelRequest, /
    ) -> AsyncGenerator[ModelEvent, None]:
        """Return the events of the step that this request is for.

        Raises `UsageError` if the script has no such step.
        """
        called = finished = False
        for event in _resumed(self._items(request), request.partial):
            await self._sleep(self._pace_s)
            if isinstance(event, Exception):
                raise event
            yield event
            called = called or isinstance(event, ToolCall)
            finished = isinstance(event, Finish)
        if not finished:
            yield Finish("tool-calls" if called else "stop")

    def _items(self, request: ModelRequest) -> Iterable[ScriptItem]:
        if callable(self._steps):
            return self._steps(request)
        number = step_number(request)
        if number >= len(self._steps):
            msg = (
                f"the script has {len(self._steps)} steps, asked for step {number + 1}"
            )
            raise UsageError(msg)
        step = self._steps[number]
        return (
            step if isinstance(step, Sequence) and not isinstance(step, str) else [step]
        )


def step_number(request: ModelRequest) -> int:
    """Return how many steps of this turn are done: assistant messages since the user's."""
    done = 0
    for message in reversed(request.messages):
        if message.role == "user":
            break
        done += message.role == "assistant"
    return done


def _resumed(
    items: Iterable[ScriptItem], partial: str
) -> Iterable[ModelEvent | Exception]:
    """Leave out what `partial` already holds of the text, and what came before it."""
    skip = len(partial)
    for item in items:
        event = TextDelta(item) if isinstance(item, str) else item
        if skip and isinstance(event, TextDelta):
            said, skip = event.text[:skip], max(0, skip - len(event.text))
            if len(said) == len(event.text):
                continue
            event = TextDelta(event.text[len(said) :])
        yield event
