"""First come, first served: the calls of one stub begin in the order they are made in.

A call begins at once when its agent is awake. Those that find it asleep all wait for one
start, and for the disk where they cross a border, and trio wakes those that wait in any
order. So each has a place in the line of its stub, and begins when those before it have
begun, or have left. Stubs have no order among each other: no caller waits for another's.
"""

from __future__ import annotations

from typing import final

import trio


@final
class Place:
    """The place of one call in the line of its stub."""

    __slots__ = ("_line", "_turn")

    def __init__(self, line: dict[Place, None]) -> None:
        self._line = line
        self._turn: trio.Event | None = None
        line[self] = None

    @property
    def first(self) -> bool:
        """Whether nobody is before it any more."""
        return next(iter(self._line)) is self

    async def wait(self) -> None:
        """Wait until it is the first."""
        self._turn = trio.Event()
        if not self.first:
            await self._turn.wait()

    def leave(self) -> None:
        """It has begun, or is given up: the next one is the first. Twice is no error."""
        self._line.pop(self, None)
        after = next(iter(self._line), None)
        if after is not None and after._turn is not None:
            after._turn.set()


@final
class Line:
    """The calls of one stub that have not begun yet, the eldest first."""

    __slots__ = ("_places",)

    def __init__(self) -> None:
        self._places: dict[Place, None] | None = None  # most stubs never have one

    def __bool__(self) -> bool:
        return bool(self._places)

    def place(self) -> Place:
        """Return a place behind all others. To be left, however its call ends."""
        if self._places is None:
            self._places = {}
        return Place(self._places)
