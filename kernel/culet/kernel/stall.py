"""Says who holds the loop: a thread that looks whether its passes come to an end.

All agents of a process share one thread. Code that never waits, be it a loop without an
end or a call that blocks, stops everybody, and nothing in the loop can tell of it. It
cannot be ended from outside either; but the log says where it is.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from time import monotonic
from typing import Final, final

import trio

log = logging.getLogger("culet.kernel")
_FRAMES: Final = 12  # the innermost, of the stack that is told


@final
class Stall(trio.abc.Instrument):
    """The watch of one loop. Made in it; `start` and `stop` are called there as well."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._began: float | None = None  # the pass that is under way
        self._told: float | None = None  # the pass that was told of
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop = 0

    def after_io_wait(self, timeout: float) -> None:
        """A pass begins."""
        self._began = monotonic()

    def before_io_wait(self, timeout: float) -> None:
        """It is over."""
        self._began = None

    def start(self) -> None:
        """Look from now on."""
        self._loop = threading.get_ident()
        self._thread = threading.Thread(
            target=self._watch, name="culet stall watch", daemon=True
        )
        self._thread.start()
        trio.lowlevel.add_instrument(self)

    def stop(self) -> None:
        """Look no more."""
        trio.lowlevel.remove_instrument(self)
        self._over.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _watch(self) -> None:
        while not self._over.wait(self._stall_s / 2):
            began = self._began
            if began is None or began == self._told:
                continue
            held_s = monotonic() - began
            if held_s >= self._stall_s:
                self._told = began
                self._tell(held_s)

    def _tell(self, held_s: float) -> None:
        frame = sys._current_frames().get(self._loop)
        stack = traceback.format_stack(frame)[-_FRAMES:] if frame else []
        log.warning(
            "nothing else has run for %.1f s; this is where the loop is:\n%s",
            held_s,
            "".join(stack),
        )
