"""Pages of replay that several readers of one run ask for: read and encoded once.

A crowd that comes back after a restart wants the same frames, each at its own time. What
one of them was given is kept for the next for a while. Pages are cut at fixed entries
(`BLOCK`), so that readers who begin anywhere soon ask for the same ones.

Laws: a page that is found is what reading the run again would give; all pages together
have at most `max_bytes`; what nobody has asked for between two sweeps is gone.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, NamedTuple, final

from .ports import Blob

BLOCK: Final = 1024  # entries: no page goes over a multiple of it
_COST: Final = 1024  # bytes of a page besides its frames
_FRAME: Final = 64  # bytes of one frame besides its text
_COPIES: Final = 2  # as text, and as a transport has framed it


class Page(NamedTuple):
    """Frames of one run behind a frame number.

    `after` is the number of the last of them. `of` says what the run was like, for a page
    that would have more in it once the run is longer; None when it is whole.
    """

    blob: Blob
    after: int
    of: int | None


class Place(NamedTuple):
    """Where a page begins: behind that frame of that run, in one life of its tree."""

    life: int
    slot: str
    run_id: str
    after: int


def _size(page: Page) -> int:
    blob = page.blob
    return _COST + _COPIES * blob.size + _FRAME * len(blob.texts)


@final
class Pages:
    """The pages of one kernel that were asked for last."""

    def __init__(self, max_bytes: int) -> None:
        self.size = 0
        self.lives = 0
        self._max_bytes = max_bytes
        self._pages: OrderedDict[Place, Page] = OrderedDict()
        self._slots: dict[tuple[int, str], set[Place]] = {}
        self._asked: set[Place] = set()  # since the last sweep

    def life(self) -> int:
        """Return a number for a tree that was just loaded; no other has it."""
        self.lives += 1
        return self.lives

    def find(self, place: Place, of: int) -> Page | None:
        """Return the page that begins there, if it was kept and still says all."""
        page = self._pages.get(place)
        if page is None or page.of not in (None, of):
            return None
        self._pages.move_to_end(place)
        self._asked.add(place)
        return page

    def keep(self, place: Place, page: Page) -> None:
        """Keep a page; the oldest ones make room."""
        self._drop(place)
        if _size(page) > self._max_bytes:
            return
        self.size += _size(page)
        self._pages[place] = page
        self._slots.setdefault(place[:2], set()).add(place)
        self._asked.add(place)
        while self.size > self._max_bytes:
            self._drop(next(iter(self._pages)))

    def forget(self, life: int, slot: str) -> None:
        """The runs of a slot are gone."""
        for place in self._slots.get((life, slot), set()).copy():
            self._drop(place)

    def sweep(self) -> None:
        """Drop what nobody has asked for since the last sweep."""
        for place in [p for p in self._pages if p not in self._asked]:
            self._drop(place)
        self._asked.clear()

    def _drop(self, place: Place) -> None:
        page = self._pages.pop(place, None)
        if page is None:
            return
        self.size -= _size(page)
        self._asked.discard(place)
        of_slot = self._slots[place[:2]]
        of_slot.discard(place)
        if not of_slot:
            del self._slots[place[:2]]
