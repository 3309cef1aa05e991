"""Signals that stop a server: the first one in order, a second one in haste.

Under `culet.web.serve` they are ours. Under somebody else's server that leaves them to
Python, SIGTERM would end the process as a crash does, and SIGINT would raise a
`KeyboardInterrupt` in whatever code runs at that moment, a step of the kernel's too. So
an app with agents hears them first there, says goodbye, and passes one interrupt on to
where trio's main task waits.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, final

import trio

log = logging.getLogger("culet.web")
_TRIOS: Final = "trio."  # where its own handler of SIGINT is at home


@final
class Told:
    """What the signals have said so far."""

    def __init__(self) -> None:
        self.stop = trio.Event()
        self._hasteners: list[Callable[[], None]] = []

    def hastens(self, fn: Callable[[], None]) -> None:
        """Call `fn` at each signal after the first one."""
        self._hasteners.append(fn)

    def heard(self, name: str) -> None:
        """Take one signal."""
        if not self.stop.is_set():
            log.info("stopping: %s", name, extra={"signal": name})
            self.stop.set()
            return
        log.info("hastening: %s", name, extra={"signal": name})
        for fn in self._hasteners:
            fn()


@asynccontextmanager
async def stop_signals() -> AsyncIterator[Told]:
    """Hear SIGINT and SIGTERM inside the block: in the main thread, else nowhere.

    What the block raises leaves it in an exception group.
    """
    told = Told()
    if threading.current_thread() is not threading.main_thread():
        yield told
        return
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:

        async def listen() -> None:
            async for number in signals:
                told.heard(signal.Signals(number).name)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(listen)
            yield told
            nursery.cancel_scope.cancel(reason="the server has stopped")


async def hear_first(drain: Callable[[], None]) -> None:
    """Call `drain` at the first signal, then let the server hear an interrupt.

    Only in the main thread, and only where nobody but trio and Python has a handler.
    """
    if threading.current_thread() is not threading.main_thread() or not _unheard():
        return
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        number = await anext(aiter(signals))
    name = signal.Signals(number).name
    log.info("stopping: %s", name, extra={"signal": name})
    drain()
    _interrupt()


def _unheard() -> bool:
    interrupt: Any = signal.getsignal(signal.SIGINT)
    return (
        str(getattr(interrupt, "__module__", "")).startswith(_TRIOS)
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )


@trio.lowlevel.enable_ki_protection
def _interrupt() -> None:
    """Let trio raise the interrupt in its main task, as it does in protected code."""
    signal.raise_signal(signal.SIGINT)
