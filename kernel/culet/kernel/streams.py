"""Streams: durable lists of chunks that many read from any place and follow live.

Entry *i* of a stream is frame *i* + 1; frame 0 says that it started, the frame after the
last entry says how it ended. A chunk is staged by the turn, flushed into the agent's
file when the next record of the tree is made, and published when that record is durable.
`published` is never more than what is durable, and replay reads only what is published:
so live, replay and recovery send the same numbers, and nothing that was sent is ever
taken back. A stream object is made before the first write of this life to its rows and
kept until all of it is published; whatever a load from disk finds is durable.

A reader that is behind pulls pages; the last look and the switch to live are one step.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, final

import msgspec
import trio

from .core import frames
from .core.run import AgentToolRun, Status, public_error
from .core.status import ended_by
from .errors import FacetAborted, StorageError
from .pages import BLOCK, Page, Place
from .ports import Blob
from .sql import end_stale

if TYPE_CHECKING:
    from .jobs import Taken
    from .sockets import Connection
    from .tree import Tree

_INSERT = (
    "INSERT INTO main.culet_entry (stream, i, attempt, body, place)"
    " VALUES (?, ?, ?, ?, ?)"
)
_PAGE = (
    "SELECT i, body FROM main.culet_entry"
    " WHERE stream = ? AND i >= ? AND i < ? ORDER BY i LIMIT ?"
)
_FIRST_ROWS = 16  # of a page; then as many as it has room for: rows may be large
_LENGTH = "SELECT coalesce(max(i) + 1, 0) FROM main.culet_entry WHERE stream = ?"


_ENDED = -1  # what a run is that grows no more


class End(NamedTuple):
    """How a stream ended, as its row says."""

    status: Status
    reason: str | None
    error: str | None
    summary: str | None
    n: int
    error_id: str | None = None

    @property
    def told(self) -> str:
        """What clients are told of an error or interruption."""
        return public_error(self.status, self.reason, self.error, self.error_id)


class View(Protocol):
    """One way to show a stream: which frames, and to whom they go live."""

    peers: dict[Connection, None]

    def started(self, *, replay: bool) -> list[str]:
        """Return the frames that open the stream."""
        ...

    def entry(self, i: int, body: str, *, replay: bool) -> str:
        """Return the frame of one entry."""
        ...

    def joined(self, *, live: bool) -> list[str]:
        """Return what a reader gets when its replay has reached the live frames."""
        ...

    def ended(self, end: End, *, replay: bool) -> list[str]:
        """Return the frames that close the stream."""
        ...


@final
class RunView:
    """A run as the parent's clients see it: `agent-tool-event` frames."""

    __slots__ = ("peers", "run")

    def __init__(self, run: AgentToolRun) -> None:
        self.run = run
        self.peers: dict[Connection, None] = {}

    def started(self, *, replay: bool) -> list[str]:
        """Return frame 0."""
        return [frames.started(self.run, replay=replay)]

    def entry(self, i: int, body: str, *, replay: bool) -> str:
        """Return frame i + 1."""
        run = self.run
        return frames.chunk(run.run_id, run.parent_tool_call_id, i + 1, body, replay)

    def joined(self, *, live: bool) -> list[str]:
        """Return nothing: the client needs no mark."""
        return []

    def ended(self, end: End, *, replay: bool) -> list[str]:
        """Return the terminal frame, made from the row alone."""
        settled = msgspec.structs.replace(
            self.run,
            status=end.status,
            reason=end.reason,
            error=end.error,
            error_id=end.error_id,
            summary=end.summary,
            n=end.n,
        )
        return [frames.terminal(settled, replay=replay)]


@final
class TurnView:
    """A turn as the agent's own clients see it: chat response frames.

    `metadata` of an own turn may say `messageIds` and `continuation` of those frames.
    """

    __slots__ = ("continuation", "message_ids", "peers", "stream")

    def __init__(self, stream: str, metadata: Any = None) -> None:
        said = metadata if isinstance(metadata, dict) else {}
        self.stream = stream
        self.peers: dict[Connection, None] = {}
        self.continuation = bool(said.get("continuation"))
        self.message_ids: list[str] | None = said.get("messageIds")

    def started(self, *, replay: bool) -> list[str]:
        """Return nothing: the chunks speak for themselves."""
        return []

    def entry(self, i: int, body: str, *, replay: bool) -> str:
        """Return one chunk as a chat response."""
        return frames.chat_response(
            self.stream, body, seq=i, replay=replay, continuation=self.continuation
        )

    def joined(self, *, live: bool) -> list[str]:
        """Return the mark that the replay is complete and live frames follow."""
        if not live:
            return []
        return [
            frames.chat_response(
                self.stream,
                replay=True,
                replay_complete=True,
                continuation=self.continuation,
            )
        ]

    def ended(self, end: End, *, replay: bool) -> list[str]:
        """Return the terminal frame; the text of an error goes with it.

        One frame: a client that has ended at the error takes what follows for the turn of
        somebody else.
        """
        text = ""
        outcome: frames.Outcome | None = None
        if end.status in ("error", "interrupted"):
            text = end.told
            outcome = "error"
        elif end.status == "aborted":
            outcome = "skipped" if ended_by(end) == "skipped" else "aborted"
        return [
            frames.chat_response(
                self.stream,
                text,
                done=True,
                error=outcome == "error",
                replay=replay,
                outcome=outcome,
                message_ids=self.message_ids,
                continuation=self.continuation,
            )
        ]


@final
class Stream:
    """One stream in memory: what is staged, how far it is stored, how far published."""

    __slots__ = (
        "_flushed",
        "attempt",
        "committed",
        "db",
        "end",
        "failed",
        "id",
        "job",
        "published",
        "slot",
        "staged",
        "staged_bytes",
        "tree",
        "views",
    )

    def __init__(self, tree: Tree, slot: str, stream_id: str, *, fresh: bool) -> None:
        self.tree, self.slot, self.id = tree, slot, stream_id
        self.db = tree.store.agent(slot)
        self.views: list[View] = []
        self.staged: list[str] = []
        self.staged_bytes = 0
        self.attempt = 1
        self.job: Taken | None = None
        self.end: End | None = None
        self.failed: StorageError | None = None
        self._flushed = trio.Event()
        self.committed = 0 if fresh else self.length()
        # frames that are published: started is one, the end is not counted
        self.published = 0 if fresh else self.committed + 1

    def length(self) -> int:
        """Entries that the agent's file holds."""
        return int(self.db.execute(_LENGTH, (self.id,))[0][0]) if self.db.exists else 0

    def last_attempt(self) -> int:
        """The number of the last attempt that stored an entry; 1 when none did."""
        if not self.db.exists:
            return 1
        sql = (
            "SELECT attempt FROM main.culet_entry WHERE stream = ?"
            " ORDER BY i DESC LIMIT 1"
        )
        rows = self.db.execute(sql, (self.id,))
        return int(rows[0][0]) if rows else 1

    # ---- writing

    def stage(self, body: str) -> None:
        """Append one chunk, JSON text. It is stored with the next record."""
        if self.end is not None:
            raise FacetAborted(self.end.reason or "the turn is over")
        if self.failed is not None:
            raise self.failed
        self.staged.append(body)
        self.staged_bytes += len(body)
        barrier = self.tree.barrier
        barrier.before[self.flush] = None
        barrier.touched()

    @property
    def full(self) -> bool:
        """Whether the turn should wait before it stages more."""
        limits = self.tree.kernel.limits
        return (
            len(self.staged) >= limits.batch_chunks
            or self.staged_bytes >= limits.staged_bytes
        )

    async def room(self) -> None:
        """Wait until what is staged was stored."""
        while self.full and self.end is None and self.failed is None:
            self.tree.barrier.urge()
            await self._flushed.wait()

    def flush(self) -> None:
        """Store what is staged: one guarded insert, entry by entry for good."""
        self.tree.barrier.before.pop(self.flush, None)
        batch, self.staged, self.staged_bytes = self.staged, [], 0
        if not batch or self.end is not None:
            return
        first, attempt = self.committed, self.attempt
        place = self.tree.order.batch(self.slot, self.id)
        node = self.tree.nodes.get(self.slot)
        try:
            if node is not None:
                end_stale(node)
            self.db.executemany(
                _INSERT,
                [(self.id, i, attempt, b, place) for i, b in enumerate(batch, first)],
            )
        except StorageError as error:  # the quota of this agent's file, or its disk
            self.failed = error
            self._wake()
            return
        self.committed = first + len(batch)
        self.tree.barrier.after.append(partial(self._publish, first, batch))
        self.tree.barrier.touched()
        if self.job is not None and self.job.attempts > 1:
            with suppress(StorageError):  # then a restart counts as one without
                self.tree.jobs.progress(self.job)
        self._wake()

    def _wake(self) -> None:
        self._flushed.set()
        self._flushed = trio.Event()

    def open(self) -> None:
        """The row was just committed: frame 0 goes out with its record."""
        self.tree.barrier.after.append(self._publish_start)
        self.tree.barrier.touched()

    def close(self, end: End) -> None:
        """The terminal was just committed: the last frame goes out with its record."""
        self.end = end
        self.staged.clear()
        self.staged_bytes = 0
        self.tree.barrier.before.pop(self.flush, None)
        self.tree.barrier.after.append(self._publish_end)
        self.tree.barrier.touched()
        self._wake()

    # ---- publishing

    def _publish_start(self) -> None:
        self.published = max(self.published, 1)
        for view in self.views:
            if view.peers:
                _push(view, view.started(replay=False))

    def _publish(self, first: int, batch: list[str]) -> None:
        self.published = first + len(batch) + 1
        for view in self.views:
            if view.peers:
                texts = [
                    view.entry(first + k, body, replay=False)
                    for k, body in enumerate(batch)
                ]
                _push(view, texts)

    def _publish_end(self) -> None:
        assert self.end is not None
        for view in self.views:
            if view.peers:
                _push(view, view.ended(self.end, replay=False))
                view.peers.clear()
        self.tree.streams.drop(self)

    # ---- reading

    def page(
        self, view: View, after: int, max_bytes: int
    ) -> tuple[list[str], int, bool]:
        """Return frames after frame number `after`, the last number, and whether all.

        Only what is published; "all" means that the reader stands at the join point.
        It ends at a multiple of `BLOCK` entries, if not before.
        """
        out: list[str] = []
        if after < 0:
            if self.published < 1:
                return out, after, True
            out += view.started(replay=True)
            after = 0
        stop = self.published - 1  # entries that may be read
        edge = min(stop, after + BLOCK - after % BLOCK)
        size, count, gone = sum(map(len, out)), _FIRST_ROWS, False
        while after < edge and size < max_bytes and not gone:
            rows: list[Any] = []
            if self.db.exists:
                rows = self.db.execute(_PAGE, (self.id, after, edge, count))
            for i, body in rows:
                text = view.entry(i, body, replay=True)
                out.append(text)
                size += len(text)
                after = i + 1
                if size >= max_bytes:
                    break
            gone = not rows  # wiped: the one permitted hole
            count = max(1, (max_bytes - size) * len(out) // max(size, 1))
        return out, after, after >= stop or gone

    def bodies(self) -> list[str]:
        """Return all stored entries, JSON texts."""
        if not self.db.exists:
            return []
        rows = self.db.execute(_PAGE, (self.id, 0, self.committed, self.committed + 1))
        return [body for _i, body in rows]


def _push(view: View, texts: list[str]) -> None:
    if texts:
        blob = Blob(*texts)
        for connection in list(view.peers):
            connection.push(blob, 0)


@final
class Cursor:
    """One reader that is behind: a stream, a view of it, and the last frame it has."""

    __slots__ = ("after", "kind", "slot", "stream_id")

    def __init__(self, slot: str, stream_id: str, kind: str, after: int = -1) -> None:
        self.slot, self.stream_id, self.kind, self.after = slot, stream_id, kind, after


@final
class Streams:
    """The streams of one tree that are in memory."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self._open: dict[tuple[str, str], Stream] = {}
        self._pages = tree.kernel.pages
        self._life = self._pages.life()

    def fresh(self, slot: str, stream_id: str, *views: View) -> Stream:
        """Make the object of a stream whose rows are about to be written."""
        stream = Stream(self.tree, slot, stream_id, fresh=True)
        stream.views = list(views)
        self._open[slot, stream_id] = stream
        return stream

    def find(self, slot: str, stream_id: str) -> Stream | None:
        """Return the object if it is in memory."""
        return self._open.get((slot, stream_id))

    def open(self, slot: str, stream_id: str) -> Stream:
        """Return the object of a stream that was not ended in an earlier life.

        Must be called before the first write of this life to its rows.
        """
        stream = self._open.get((slot, stream_id))
        if stream is None:
            stream = Stream(self.tree, slot, stream_id, fresh=False)
            stream.views = self.tree.views(slot, stream_id)
            self._open[slot, stream_id] = stream
        return stream

    def drop(self, stream: Stream) -> None:
        """All of it is published: the rows say the same from now on."""
        if self._open.get((stream.slot, stream.id)) is stream:
            del self._open[stream.slot, stream.id]

    def forget(self, slot: str) -> list[Stream]:
        """Drop every stream of a deleted agent; return them."""
        self._pages.forget(self._life, slot)
        gone = [s for (owner, _), s in self._open.items() if owner == slot]
        for stream in gone:
            self.drop(stream)
        return gone

    def leave(self, connection: Connection) -> None:
        """A connection is gone: no view keeps it."""
        for stream in self._open.values():
            for view in stream.views:
                view.peers.pop(connection, None)

    def pull(
        self, connection: Connection | None, cursor: Cursor, max_bytes: int
    ) -> tuple[Blob, bool]:
        """Return the next replay frames of a reader and whether it has caught up.

        Caught up and the stream goes on: the connection hears it live from here, in the
        same step.
        """
        stream = self._open.get((cursor.slot, cursor.stream_id))
        if stream is None:
            return self._stored(cursor, max_bytes)
        view = next((v for v in stream.views if _kind(v) == cursor.kind), None)
        if view is None:
            return Blob(), True
        page = self._page(stream, view, cursor, max_bytes)
        caught_up = page.of is not None
        marks: list[str] = []
        if caught_up and connection is not None:
            view.peers[connection] = None
            marks = view.joined(live=True)
        return Blob(*page.blob.texts, *marks) if marks else page.blob, caught_up

    def _stored(self, cursor: Cursor, max_bytes: int) -> tuple[Blob, bool]:
        """Replay a stream that is not in memory: it ended, and all of it is durable."""
        page = self._known(cursor, max_bytes, _ENDED)
        if page is None or not self.tree.runs.has_ended(cursor.slot, cursor.stream_id):
            end = self.tree.end_of(cursor.slot, cursor.stream_id)
            if end is None:
                self.open(cursor.slot, cursor.stream_id)
                return Blob(), False
            views = self.tree.views(cursor.slot, cursor.stream_id)
            view = next((v for v in views if _kind(v) == cursor.kind), None)
            if view is None:
                return Blob(), True
            stream = Stream(self.tree, cursor.slot, cursor.stream_id, fresh=True)
            stream.published = end.n + 1
            page = self._page(stream, view, cursor, max_bytes, end)
            if cursor.slot not in self.tree.nodes:
                stream.db.rest()
        cursor.after = page.after
        return page.blob, page.of is not None

    def _page(
        self,
        stream: Stream,
        view: View,
        cursor: Cursor,
        max_bytes: int,
        end: End | None = None,
    ) -> Page:
        """Return the next page of a reader and move it there; the end is in the last."""
        of = stream.published if end is None else _ENDED
        page = self._known(cursor, max_bytes, of) if end is None else None
        if page is None:
            place = self._place(cursor)
            texts, after, caught_up = stream.page(view, cursor.after, max_bytes)
            if caught_up and end is not None and after <= end.n:
                texts += view.ended(end, replay=True)  # else the reader has it, too
            page = Page(Blob(*texts), after, of if caught_up else None)
            if self._shares(cursor, max_bytes):
                self._pages.keep(place, page)
        cursor.after = page.after
        return page

    def _known(self, cursor: Cursor, max_bytes: int, of: int) -> Page | None:
        if not self._shares(cursor, max_bytes):
            return None
        return self._pages.find(self._place(cursor), of)

    def _place(self, cursor: Cursor) -> Place:
        return Place(self._life, cursor.slot, cursor.stream_id, cursor.after)

    def _shares(self, cursor: Cursor, max_bytes: int) -> bool:
        return (
            cursor.kind == "run"
            and max_bytes == self.tree.kernel.limits.replay_page_bytes
        )


def _kind(view: View) -> str:
    return "run" if isinstance(view, RunView) else "turn"
