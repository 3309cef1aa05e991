"""What happens in a kernel, as server-sent events for people who look on.

The kernel never waits: a listener makes one small line of what it is told and puts it
into the ring of each reader. A reader that is slow loses the oldest and is told how many.
A line has names, ids and classes, never a text of somebody's: what may be in it is listed
here, and what is not listed is left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator
from typing import Any, Final, final

import msgspec
import trio

from culet.kernel.kernel import Kernel
from culet.kernel.ports import TreeKey

_QUIET: Final = frozenset({"turn:chunk", "fiber:progress", "state:update"})
_SHOWN: Final = (  # of the details of `culet.kernel.events`
    "path", "class_name", "run_id", "parent_run_id", "agent_type", "to", "status", "id",
    "callback", "attempt", "attempts", "restarts", "outcome", "calls", "what", "error_id",
)  # fmt: skip
_NUMBER_IS: Final = {"turn:begin": "attempt", "turn:end": "attempt"}
_TEXT_MAX: Final = 300  # of one value
_encode: Final = msgspec.json.Encoder().encode


def _clip(value: Any) -> Any:
    return value[:_TEXT_MAX] if isinstance(value, str) else value


def told(at: int, channel: str, tree: Any, subject: Any, detail: Any) -> dict[str, Any]:
    """Return what is shown of one event of `kernel.subscribe`."""
    line: dict[str, Any] = {"at": at, "channel": channel}
    key = subject if isinstance(subject, TreeKey) else getattr(tree, "key", None)
    if key is not None:
        line["root"] = f"{key.class_name}/{key.name}"
    slot = getattr(subject, "slot", subject)
    node = tree.nodes.get(slot) if tree is not None and isinstance(slot, str) else None
    if node is None and hasattr(subject, "path_text"):
        node = subject
    if node is not None:
        line["path"] = node.path_text()
    if hasattr(subject, "kind") and hasattr(subject, "id"):
        line["kind"], line["id"] = subject.kind, subject.id
    if channel in _NUMBER_IS and isinstance(detail, int):
        line[_NUMBER_IS[channel]] = detail
    elif channel == "run:ask" and isinstance(detail, str):
        line["class_name"] = detail
    for name in _SHOWN if isinstance(detail, tuple) else ():
        value = getattr(detail, name, None)
        if isinstance(value, str | int):
            line[name] = value
    return {name: _clip(value) for name, value in line.items()}


@final
class Ring:
    """What one reader has not taken yet: at most so many, the newest."""

    def __init__(self, size: int) -> None:
        self._lines: deque[bytes] = deque(maxlen=size)
        self._wake = trio.Event()
        self.lost = 0

    def put(self, line: bytes) -> None:
        """Add one; the oldest goes where there is no room."""
        if len(self._lines) == self._lines.maxlen:
            self.lost += 1
        self._lines.append(line)
        self._wake.set()

    def wake(self) -> None:
        """Let the reader look about."""
        self._wake.set()

    async def more(self) -> None:
        """Wait until there is something, or `wake` was called."""
        await self._wake.wait()

    def take(self) -> bytes:
        """Return all of it as events for a browser, and what was lost before."""
        self._wake = trio.Event()
        parts = []
        if self.lost:
            parts.append(b"event: lost\ndata: %d\n\n" % self.lost)
            self.lost = 0
        parts += [b"data: " + line + b"\n\n" for line in self._lines]
        self._lines.clear()
        return b"".join(parts)


@final
class Hub:
    """The readers of one kernel's events. It listens only while there are some."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._rings: list[Ring] = []
        self._unsubscribe: Any = None
        self.closed = False

    @property
    def readers(self) -> int:
        """How many look on."""
        return len(self._rings)

    @property
    def full(self) -> bool:
        """Whether as many look on as may."""
        return len(self._rings) >= self._kernel.limits.inspect_readers

    def close(self) -> None:
        """The kernel is served no more: everybody is sent home."""
        self.closed = True
        for ring in self._rings:
            ring.wake()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield events from now on, and a sign of life in every silence."""
        if self.full:
            return
        ring = self._join()
        beat_s = self._kernel.limits.events_beat_s
        try:
            yield b": open\n\n"
            while not (self.closed or self._kernel.closing):
                with trio.move_on_after(beat_s):
                    await ring.more()
                yield ring.take() or b": beat\n\n"
        finally:
            self._leave(ring)

    def _join(self) -> Ring:
        ring = Ring(self._kernel.limits.inspect_events)
        self._rings.append(ring)
        if self._unsubscribe is None:
            self._unsubscribe = self._kernel.subscribe("*", self._hear)
        return ring

    def _leave(self, ring: Ring) -> None:
        self._rings.remove(ring)
        if not self._rings and self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None

    def _hear(self, channel: str, tree: Any, subject: Any, detail: Any) -> None:
        if channel in _QUIET:
            return
        now = self._kernel.clock.now_ms()
        line = _encode(told(now, channel, tree, subject, detail))
        for ring in self._rings:
            ring.put(line)
