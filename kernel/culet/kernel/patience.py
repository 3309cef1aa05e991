"""Waiting for a file that another process has locked for a moment."""

from __future__ import annotations

from typing import final

import trio

from .core.limits import Limits
from .errors import StorageBusy


@final
class Patience:
    """How long one waiter goes on; made when its file was first found locked."""

    __slots__ = ("_limits", "_until", "_what")

    def __init__(self, limits: Limits, what: str) -> None:
        self._limits, self._what = limits, what
        self._until = trio.current_time() + limits.busy_s

    def check(self, error: StorageBusy) -> None:
        """Raise `StorageBusy` when it has waited long enough."""
        if trio.current_time() >= self._until:
            msg = (
                f"{self._what}: another process has kept its file locked for"
                f" {self._limits.busy_s} s (limits.busy_s): {error}"
            )
            raise StorageBusy(msg) from error

    async def rest(self) -> None:
        """Let others run until it is worth another try."""
        await trio.sleep(self._limits.busy_step_s)
