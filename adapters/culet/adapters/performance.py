"""What a child says while its adapter is put to the test: a prompt that performs itself.

The prompt is a text: `#name one two wait:door three fail:text`. Its words are said one by
one; at `wait:` the performance stands until the test opens that door, and `fail:` ends it
with `Failed`. Works on trio and on asyncio, in any thread, for the frameworks that adapters
are written for.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Final, final

import trio


class Failed(Exception):
    """What a prompt with `fail:` ends in; its text has to reach the run."""


@final
class Gate:
    """Opens once, for all who wait at it, in whatever loop and thread they are."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = False
        self._wake: list[Callable[[], object]] = []

    def open(self) -> None:
        """Let everybody through, from now on."""
        with self._lock:
            self._open, wake, self._wake = True, self._wake, []
        for fn in wake:
            with suppress(RuntimeError):  # whose loop is over
                fn()

    async def wait(self) -> None:
        """Return when it is open."""
        event: trio.Event | asyncio.Event
        if trio.lowlevel.in_trio_run():
            event, token = trio.Event(), trio.lowlevel.current_trio_token()
            heard = event.set

            def wake() -> None:
                token.run_sync_soon(heard)
        else:
            event, loop = asyncio.Event(), asyncio.get_running_loop()
            told = event.set

            def wake() -> None:
                loop.call_soon_threadsafe(told)

        with self._lock:
            if not self._open:
                self._wake.append(wake)
        if not self._open:
            await event.wait()


@final
class Stage:
    """The performances of one test: how often each began, and their doors."""

    def __init__(self) -> None:
        self.begun: Counter[str] = Counter()
        self._gates: dict[tuple[str, str], Gate] = {}
        self._lock = threading.Lock()

    def gate(self, prompt: str, what: str) -> Gate:
        """Return a door of a prompt, or (`at:` before its name) the place before it."""
        with self._lock:
            return self._gates.setdefault((name_of(prompt), what), Gate())

    def open(self, prompt: str) -> None:
        """Open every door of a prompt."""
        for word in prompt.split():
            if word.startswith("wait:"):
                self.gate(prompt, word).open()

    async def reached(self, prompt: str) -> None:
        """Wait until the performance stands before its first door."""
        door = next(w for w in prompt.split() if w.startswith("wait:"))
        await self.gate(prompt, f"at:{door}").wait()


STAGE: Final = Stage()


def name_of(prompt: str) -> str:
    """Return the name that a prompt begins with; "" when it has none."""
    first = prompt.split(maxsplit=1)[:1]
    return first[0] if first and first[0].startswith("#") else ""


def spoken(prompt: str) -> list[str]:
    """Return the words that a prompt says."""
    words = prompt.split()
    return [w for w in words if not w.startswith(("#", "wait:", "fail:"))]


@final
class perform:  # noqa: N801  # called like the function that it would be
    """Iterate over the words of a prompt, without the first `skip`; wait and fail as it says.

    Use it where your chat base would ask its model: `async for word in perform(prompt)`.
    Cancel it like any other code; it needs no closing.
    """

    def __init__(self, prompt: str, skip: int = 0) -> None:
        if not isinstance(prompt, str):
            msg = f"a prompt is a text, not {prompt!r:.200}: give `perform` the run's input"
            raise TypeError(msg)
        self._prompt, self._skip = prompt, skip
        self._words = iter(prompt.split())
        STAGE.begun[name_of(prompt)] += 1

    def __aiter__(self) -> perform:
        return self

    async def __anext__(self) -> str:
        for word in self._words:
            if word.startswith("wait:"):
                STAGE.gate(self._prompt, f"at:{word}").open()
                await STAGE.gate(self._prompt, word).wait()
            elif word.startswith("fail:"):
                raise Failed(word.removeprefix("fail:"))
            elif not word.startswith("#"):
                self._skip -= 1
                if self._skip < 0:
                    return word
        raise StopAsyncIteration
