"""The feed of a tree: one order of all frames of all its runs, and cursors into it.

A *place* is a number that is given out once, in the step that stores something: (life of
the tree, counter), so it grows from step to step and from life to life and is never used
again. The start of a run has a place of its own, so has its end, and so has each batch
of chunks that is stored at once. A frame lies at (place, number of the frame in its
run): frames of one batch share their place and are told apart by their numbers.

So the order needs no table: a place lies in the row that it places, and is durable with
it. What is durable is always a prefix of what was given out, hence whatever may be read
at all is never preceded by anything new. Laws: `Position.parse` is the inverse of
`Position.text`, and takes nothing of another tree; `seek` finds the first entry behind a
position; `first` merges sources as sorting all of them would.

Places below `FIRST` belong to what was stored before there were any: runs of that time
lie in the order of their rows, their chunks at the place of their start.
"""

from __future__ import annotations

import base64
import hashlib
import heapq
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, final

from culet.kernel.errors import UsageError

LIFE_BITS: Final = 32  # of a place: the counter of one life
FIRST: Final = 1 << LIFE_BITS  # place of a first life
_VERSION: Final = b"\1"
_PACKED: Final = 13  # bytes: version, place, number
_SEAL: Final = 5  # bytes
_LENGTH: Final = 24  # characters of a cursor
_END: Final = (1 << 32) - 1  # no frame has this number


class Position(NamedTuple):
    """Where a frame lies in the order of its tree."""

    place: int
    number: int

    def text(self, tree: str) -> str:
        """Return it as a cursor of that tree: 24 characters that are safe in a URL."""
        packed = _VERSION + self.place.to_bytes(8) + self.number.to_bytes(4)
        return base64.urlsafe_b64encode(packed + _seal(tree, packed)).decode()

    @classmethod
    def parse(cls, text: str, tree: str) -> Position:
        """Read a cursor of that tree. Raises `UsageError` for any other text."""
        raw = b""
        if isinstance(text, str) and len(text) == _LENGTH and text.isascii():
            try:
                raw = base64.b64decode(text, altchars=b"-_", validate=True)
            except ValueError:
                raw = b""
        packed, seal = raw[:_PACKED], raw[_PACKED:]
        if len(raw) != _PACKED + _SEAL or seal != _seal(tree, packed):
            msg = f"{text!r:.100} is no cursor of this tree's feed"
            raise UsageError(msg)
        if packed[:1] != _VERSION:
            msg = f"{text!r} is a cursor of another version"
            raise UsageError(msg)
        return cls(int.from_bytes(packed[1:9]), int.from_bytes(packed[9:]))


BEGINNING: Final = Position(0, 0)


def _seal(tree: str, packed: bytes) -> bytes:
    return hashlib.blake2s(packed, key=tree.encode()[:32], digest_size=_SEAL).digest()


def end_of(place: int) -> Position:
    """Return the position behind all that lies at a place."""
    return Position(place, _END)


def seek(length: int, place_of: Callable[[int], int], after: Position) -> int:
    """Return the first entry of a stream that lies behind a position.

    `place_of(i)` never falls; entry i is frame i + 1. `length` when there is none.
    """
    low, high = 0, length
    while low < high:
        middle = (low + high) // 2
        if (place_of(middle), middle + 1) > after:
            high = middle
        else:
            low = middle + 1
    return low


class Key(NamedTuple):
    """A frame that is there to be read. `what` says how; `size` is of its text, bytes."""

    place: int
    number: int
    size: int
    what: Any

    @property
    def position(self) -> Position:
        """Where it lies."""
        return Position(self.place, self.number)


@final
class Ahead:
    """The next frames of one source, in order; `more` adds those that follow them."""

    __slots__ = ("keys", "more")

    def __init__(
        self, keys: list[Key], more: Callable[[], object] | None = None
    ) -> None:
        self.keys, self.more = keys, more


def first(
    sources: Sequence[Ahead], reach: Position, most: int, max_bytes: int
) -> list[Key]:
    """Return the first frames of all sources up to `reach`: what one page takes.

    At most `most`, and as many bytes as that, but one frame at least. A source that has
    none must have been asked for more before.
    """
    heap = [(s.keys[0][:2], at, 0) for at, s in enumerate(sources) if s.keys]
    heapq.heapify(heap)
    out: list[Key] = []
    size = 0
    while heap and len(out) < most:
        at_position, at, index = heap[0]
        source = sources[at]
        key = source.keys[index]
        size += key.size
        if at_position > reach or (out and size > max_bytes):
            break
        out.append(key)
        index += 1
        if index == len(source.keys) and source.more is not None:
            source.more()
        if index < len(source.keys):
            heapq.heapreplace(heap, (source.keys[index][:2], at, index))
        else:
            heapq.heappop(heap)
    return out
