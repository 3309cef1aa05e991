"""Reading the feed of a tree: the streams that go on at one point of the order, merged.

A reader reads page by page, always from the files: the same loop for what is long past and
for what was stored a moment ago. Nobody waits for it and it holds nothing: no stream, no
node, no lock. What it keeps is its position, the runs that go on there, and some frames
that come next of each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, final

import msgspec
import trio

from .core import frames
from .core.feed import (
    BEGINNING,
    Ahead,
    Key,
    Position,
    end_of,
    first,
    seek,
)
from .order import Facts, Scope

if TYPE_CHECKING:
    from .tree import Tree

FeedKind = Literal[
    "started", "chunk", "finished", "error", "aborted", "interrupted",
    "cleared", "deleted", "trimmed",
]  # fmt: skip
_ENDS: Final[dict[str, FeedKind]] = {"completed": "finished"}  # the others as they are
_STARTS: Final = (
    "SELECT place, owner, id, child, coalesce(octet_length(preview), 0)"
    " + coalesce(octet_length(display), 0) FROM run"
    " WHERE place > ? AND place <= ? ORDER BY place LIMIT ?"
)
_ENDINGS: Final = (
    "SELECT end_place, owner, id, child, n, coalesce(octet_length(summary), 0)"
    " + coalesce(octet_length(error), 0) FROM run"
    " WHERE end_place > ? AND end_place <= ? ORDER BY end_place LIMIT ?"
)
_GONE: Final = (
    "SELECT place, owner, kind, octet_length(frame) FROM gone"
    " WHERE place > ? AND place <= ? ORDER BY place LIMIT ?"
)
_OPEN: Final = (  # by the index of ends: first those that have none
    "SELECT born, place, owner, id, child FROM run"
    " WHERE end_place IS NULL AND born > ? ORDER BY born LIMIT ?"
)
_ENDED: Final = (
    "SELECT end_place, place, owner, id, child FROM run"
    " WHERE end_place > ? ORDER BY end_place LIMIT ?"
)
_KEYS: Final = (
    "SELECT i, place, octet_length(body) FROM main.culet_entry"
    " WHERE stream = ? AND i >= ? ORDER BY i LIMIT ?"
)
_BODIES: Final = (
    "SELECT i, body FROM main.culet_entry"
    " WHERE stream = ? AND i >= ? AND i <= ? ORDER BY i"
)
_PLACE: Final = "SELECT place FROM main.culet_entry WHERE stream = ? AND i = ?"
_LENGTH: Final = "SELECT coalesce(max(i) + 1, 0) FROM main.culet_entry WHERE stream = ?"
_AHEAD: Final = 8  # frames of a source that are looked at, at least


class FeedEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One frame of one run, at its place in the order of the tree.

    `cursor` is the place: `after` of a feed that goes on behind this entry. `path` is of
    the agent that runs, `depth` how far it is below the one whose feed this is (1: asked
    for by itself), `parent_run_id` the run of the agent that asked, if that is one.
    `sequence` numbers the frames of a run; `text` is the frame, JSON as a client gets it.

    A run that was cleared is told as `cleared`; `deleted` says that the agent at `path`
    is gone with all below it, so are the bodies of those frames; `trimmed` that what went
    up to here is told no more, because there was too much of it.
    """

    cursor: str
    path: str
    run_id: str | None
    parent_run_id: str | None
    depth: int
    kind: FeedKind
    sequence: int
    text: str

    @property
    def frame(self) -> dict[str, Any]:
        """The frame, decoded: what `runs.replay` yields, without its mark `replay`."""
        decoded: dict[str, Any] = msgspec.json.decode(self.text)
        return decoded

    @property
    def chunk(self) -> dict[str, Any] | None:
        """The chunk, decoded; None for an entry of another kind."""
        if self.kind != "chunk":
            return None
        decoded: dict[str, Any] = msgspec.json.decode(self.frame["event"]["body"])
        return decoded


def _by_position(key: Key) -> tuple[int, int]:
    return key[:2]


@final
class _Source:
    """One run that goes on where the reader is: what is read of its stream."""

    __slots__ = ("ahead", "child", "dry", "facts", "next", "owner", "place", "run_id")

    def __init__(
        self, owner: str, run_id: str, child: str, place: int, entry: int | None
    ) -> None:
        self.owner, self.run_id, self.child, self.place = owner, run_id, child, place
        self.next = entry  # behind what is `ahead`; None: to be looked for
        self.ahead: list[Key] = []  # known, not given yet
        self.dry = 0  # up to this place nothing is behind them
        self.facts: Facts | None = None


class _Mark(NamedTuple):
    """A frame that is no chunk: a start or an end of a run, or what is gone."""

    kind: str  # start | end | gone
    owner: str
    run_id: str
    child: str


@final
class Reader:
    """Reads one tree, page by page, from a position on. Nothing of it outlives the tree."""

    def __init__(self, tree: Tree, slot: str, at: Position, *, below: bool) -> None:
        self.tree, self.at = tree, at
        self.scope = Scope(tree, slot, below=below)
        self.sources: dict[tuple[str, str], _Source] = {}
        self._joined = at == BEGINNING  # no run goes on there
        self._forgotten = False  # some source may be
        self._until = 0

    async def page(self, reach: int) -> list[FeedEntry]:
        """Return the next entries up to a place, none when there are no more.

        Cancelled, it has read nothing: the next call begins where this one did.
        """
        if not self._joined:
            await self._join()
        if self._forgotten:
            self._begin()
            await self._sweep()
        while self.at < end_of(reach):
            self._begin()
            entries = await self._next(reach)
            if entries:
                return entries
        return []

    def _begin(self) -> None:
        """A slice of work begins."""
        stopwatch = self.tree.kernel.clock.stopwatch_ns
        self._until = stopwatch() + int(self.tree.kernel.limits.slice_s * 1e9)

    async def _breathe(self) -> None:
        """Let others run when this has worked for a slice."""
        if self.tree.kernel.clock.stopwatch_ns() > self._until:
            await trio.lowlevel.checkpoint()
            self._begin()

    # ---- which runs go on at a position

    async def _join(self) -> None:
        """Find the runs that began before the position and had not ended by then.

        Those without an end first: one that ends meanwhile is then met by its end.
        """
        self._begin()
        for sql, begin in ((_OPEN, 0), (_ENDED, self.at.place)):
            last: int | None = begin
            while last is not None:
                rows = self.tree.db.execute(
                    sql, (last, self.tree.kernel.limits.feed_page)
                )
                for _at, place, owner, run_id, child in rows:
                    await self._breathe()
                    if place <= self.at.place and self.scope.depth(owner) is not None:
                        key = (child, run_id)
                        self.sources[key] = _Source(owner, run_id, child, place, None)
                last = rows[-1][0] if rows else None
                await self._breathe()
        self._joined = True

    def _seek(self, source: _Source) -> int:
        db, stream = self.tree.store.agent(source.child), source.run_id

        def place_of(i: int) -> int:
            rows = db.execute(_PLACE, (stream, i))
            return source.place if not rows or rows[0][0] is None else int(rows[0][0])

        length = int(db.execute(_LENGTH, (stream,))[0][0]) if db.exists else 0
        return seek(length, place_of, self.at)

    # ---- one page

    async def _next(self, reach: int) -> list[FeedEntry]:
        limits = self.tree.kernel.limits
        marks, until = await self._marks(reach)
        asked = await self._ask(until)
        aheads = [Ahead(s.ahead, more) for s, more in asked]
        until_there = end_of(until)
        chosen = first(
            [Ahead(marks), *aheads], until_there, limits.feed_page, limits.feed_bytes
        )
        bodies = await self._bodies(chosen)
        entries = []
        for key in chosen:
            await self._breathe()
            entry = self._entry(key, bodies)
            if entry is not None:
                entries.append(entry)
        self._passed(chosen)
        self.at = chosen[-1].position if chosen else until_there
        return entries

    async def _marks(self, reach: int) -> tuple[list[Key], int]:
        """Return starts, ends and what is gone, and up to which place those are all.

        A run that starts becomes a source.
        """
        most = self.tree.kernel.limits.feed_page
        range_ = (self.at.place, reach, most)
        db, depth = self.tree.db, self.scope.depth
        out: list[Key] = []
        starts = db.execute(_STARTS, range_)
        for place, owner, run_id, child, size in starts:
            await self._breathe()
            if depth(owner) is not None:
                if (child, run_id) not in self.sources:
                    source = _Source(owner, run_id, child, place, 0)
                    self.sources[child, run_id] = source
                out.append(Key(place, 0, size, _Mark("start", owner, run_id, child)))
        ends = db.execute(_ENDINGS, range_)
        for place, owner, run_id, child, n, size in ends:
            await self._breathe()
            if depth(owner) is not None:
                out.append(Key(place, n + 1, size, _Mark("end", owner, run_id, child)))
        gone = db.execute(_GONE, range_)
        for place, owner, kind, size in gone:
            await self._breathe()
            if kind == "trimmed" or depth(owner) is not None:
                out.append(Key(place, 0, size, _Mark("gone", owner, "", "")))
        full = [rows[-1][0] for rows in (starts, ends, gone) if len(rows) == most]
        return sorted(out, key=_by_position), min([reach, *full])

    async def _ask(self, until: int) -> list[tuple[_Source, Callable[[], None]]]:
        """Return the sources that may have a chunk up to a place, each asked once."""
        recent = self.tree.order.since(self.at.place)
        most = 2 * self.tree.kernel.limits.feed_page // max(1, len(self.sources))
        out: list[tuple[_Source, Callable[[], None]]] = []
        for key, source in list(self.sources.items()):
            if source.place > until:
                continue
            new = source.dry < until and (recent is None or key in recent)
            if new and not source.ahead:
                await self._breathe()
                self._look(source, max(_AHEAD, most))
            if source.ahead:
                more = partial(self._look, source, max(_AHEAD, most))
                out.append((source, more))
        return out

    def _look(self, source: _Source, most: int) -> None:
        """Add to what is known of a source."""
        db, last = self.tree.store.agent(source.child), self.tree.order.last
        rows: list[Any] = []
        if db.exists:
            if source.next is None:
                source.next = self._seek(source)
            rows = db.execute(_KEYS, (source.run_id, source.next, most))
        for i, place, size in rows:
            at = source.place if place is None else place
            source.ahead.append(Key(at, i + 1, size, source))
            source.next = i + 1
        if len(rows) < most:
            source.dry = last

    async def _bodies(self, chosen: list[Key]) -> dict[tuple[str, str, int], str]:
        """Return the chunks that were chosen: of each source they are in a row."""
        ranges: dict[_Source, tuple[int, int]] = {}
        for key in chosen:
            if isinstance(key.what, _Source):
                begin, _last = ranges.get(key.what, (key.number - 1, 0))
                ranges[key.what] = (begin, key.number - 1)
        out: dict[tuple[str, str, int], str] = {}
        for source, (begin, last) in ranges.items():
            await self._breathe()
            db = self.tree.store.agent(source.child)
            if self._facts(source) is not None and db.exists:
                rows = db.execute(_BODIES, (source.run_id, begin, last))
                out.update(((source.child, source.run_id, i), b) for i, b in rows)
        return out

    def _facts(self, source: _Source) -> Facts | None:
        if source.facts is None:
            source.facts = self.scope.facts(source.owner, source.run_id)
        return source.facts

    def _entry(
        self, key: Key, bodies: dict[tuple[str, str, int], str]
    ) -> FeedEntry | None:
        """Return one entry; None: it has gone while the page was made."""
        if isinstance(key.what, _Source):
            source: _Source = key.what
            facts = source.facts
            body = bodies.get((source.child, source.run_id, key.number - 1))
            if facts is None or facts.run is None or body is None:
                return None
            call = facts.run.parent_tool_call_id
            text = frames.chunk(source.run_id, call, key.number, body)
            return self._made(key, facts, source.run_id, "chunk", text)
        mark: _Mark = key.what
        if mark.kind == "gone":
            return self._passing(key)
        source_of = self.sources.get((mark.child, mark.run_id))
        facts = None if source_of is None else self._facts(source_of)
        run = self.tree.runs.get(mark.owner, mark.run_id)
        if facts is None or run is None:
            return None
        if mark.kind == "start":
            return self._made(key, facts, run.run_id, "started", frames.started(run))
        kind: Any = _ENDS.get(run.status, run.status)
        return self._made(key, facts, run.run_id, kind, frames.terminal(run))

    def _passing(self, key: Key) -> FeedEntry | None:
        sql = (
            "SELECT kind, path, run_id, parent_run_id, frame FROM gone WHERE place = ?"
        )
        rows = self.tree.db.execute(sql, (key.place,))
        if not rows:
            return None
        kind, path, run_id, parent_run_id, frame = rows[0]
        depth = 0 if kind == "trimmed" else (self.scope.depth(key.what.owner) or 0) + 1
        facts = Facts(path, parent_run_id, depth, None)
        return self._made(key, facts, run_id, kind, frame)

    def _made(
        self, key: Key, facts: Facts, run_id: str | None, kind: FeedKind, text: str
    ) -> FeedEntry:
        sequence = key.number
        if kind == "cleared":
            sequence = msgspec.json.decode(text)["sequence"]
        return FeedEntry(
            cursor=key.position.text(self.tree.root_slot), path=facts.path,
            run_id=run_id, parent_run_id=facts.parent_run_id, depth=facts.depth,
            kind=kind, sequence=sequence, text=text,
        )  # fmt: skip

    def _passed(self, chosen: list[Key]) -> None:
        """What was chosen is read; runs that have ended there are sources no more."""
        given = dict[_Source, int]()
        for key in chosen:
            if isinstance(key.what, _Source):
                given[key.what] = given.get(key.what, 0) + 1
            elif key.what.kind == "end":
                self.sources.pop((key.what.child, key.what.run_id), None)
            elif key.what.kind == "gone":
                self._forgotten = True
        for source, count in given.items():
            del source.ahead[:count]

    async def _sweep(self) -> None:
        """Runs that are forgotten are sources no more."""
        sql = "SELECT 1 FROM run WHERE owner = ? AND id = ?"
        for name, source in list(self.sources.items()):
            await self._breathe()
            if not self.tree.db.execute(sql, (source.owner, source.run_id)):
                del self.sources[name]
        self._forgotten = False
