"""Hypothesis machines over async code: one trio guest run an example, on a mock clock.

Each rule runs one coroutine to its end; between rules nothing moves, not even time. The
order of trio's tasks is seeded, so an example replays exactly. Needs Hypothesis.
"""

from __future__ import annotations

import collections
import queue
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, ClassVar, Final

import outcome
import trio
import trio.testing
from hypothesis.stateful import RuleBasedStateMachine

from .testing_seeded import seeded

TICKS_MAX: Final = 200_000  # of one rule; more is a loop that never rests
_THREAD_S: Final = 5.0  # that a rule may wait for a thread


class TrioMachine(RuleBasedStateMachine):
    """A state machine whose rules may await: `self.do(fn, *args)`."""

    scheduler_seed: ClassVar[int] = 0
    nursery: trio.Nursery

    def __init__(self) -> None:
        super().__init__()
        self._order = seeded(self.scheduler_seed)
        self._order.__enter__()
        self.clock = trio.testing.MockClock()
        self._ready: collections.deque[Callable[[], object]] = collections.deque()
        self._from_threads: queue.SimpleQueue[Callable[[], object]] = (
            queue.SimpleQueue()
        )
        self._end: outcome.Outcome[None] | None = None
        self._started = False
        trio.lowlevel.start_guest_run(
            self._main,
            run_sync_soon_threadsafe=self._from_threads.put,
            run_sync_soon_not_threadsafe=self._ready.append,
            done_callback=self._ended,
            clock=self.clock,
            restrict_keyboard_interrupt_to_checkpoints=True,
        )
        self._pump(lambda: self._started)

    def _ended(self, end: outcome.Outcome[None]) -> None:
        self._end = end

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._stop = trio.Event()
        async with trio.open_nursery() as self.nursery:
            self._started = True
            await self._stop.wait()
            self.nursery.cancel_scope.cancel()

    def _pump(self, until: Callable[[], bool]) -> None:
        for _ in range(TICKS_MAX):
            if until() or self._end is not None:
                return
            while not self._from_threads.empty():
                self._ready.append(self._from_threads.get())
            if self._ready:
                self._ready.popleft()()
            else:
                self._from_threads.get(timeout=_THREAD_S)()
        msg = f"no rest after {TICKS_MAX} ticks: a hot loop"
        raise AssertionError(msg)

    def do(self, fn: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        """Run one coroutine function to its end; return or raise what it does."""
        out: list[outcome.Outcome[Any]] = []

        async def job() -> None:
            out.append(await outcome.acapture(fn, *args))

        self._token.run_sync_soon(self.nursery.start_soon, job)
        self._pump(lambda: bool(out))
        if not out:
            assert self._end is not None
            self._end.unwrap()
            msg = "the run ended in the middle of a rule"
            raise AssertionError(msg)
        return out[0].unwrap()

    def teardown(self) -> None:
        """End the guest run; raise what it raised."""
        try:
            if self._end is None:
                self.clock.autojump_threshold = 0  # what ends may take its time
                self._token.run_sync_soon(self._stop.set)
                self._pump(lambda: self._end is not None)
        finally:
            self._order.__exit__(None, None, None)
        assert self._end is not None
        with suppress(outcome.AlreadyUsedError):  # a rule has raised it already
            self._end.unwrap()
