"""A hub for independent peers: chats, documents, sessions of one user.

A facet lives in its parent's tree. Agents that are many, busy and on their own should
each be a root; what they share is a catalogue. `RoutedAgents` keeps it, durably, and is
the way to them: requests and sockets to `/{segment}/{id}/…` of the hub go on to the peer
of that id, which owns them from then on. Listing and searching read the hub alone, nobody
is woken for it.

The hub decides, so its row comes first and goes first: a peer is made when somebody first
comes to it, and one whose entry is deleted is owed its end by a job of the hub, which no
crash forgets. Each entry names its root by an id that is never used again, so an id that
is added anew, or is another hub's, never meets what an old one left.

Written with the public API alone.
"""

from __future__ import annotations

import builtins
from typing import Any, ClassVar
from urllib.parse import unquote

import msgspec
import trio

from culet.kernel import Agent, Forward, Request, Response, Retry, Schedule
from culet.kernel.errors import CapacityError, CuletError, NotFound, UsageError

_MAKE = (
    "CREATE TABLE IF NOT EXISTS routed_agents (id TEXT PRIMARY KEY, name TEXT NOT NULL,"
    " metadata TEXT, seq INTEGER) STRICT, WITHOUT ROWID"
)
_COLUMNS = "id, name, metadata, seq"
_PUSH = (
    "UPDATE routed_agents SET metadata = ?, seq = ? WHERE id = ?"
    " AND (seq IS NULL OR seq < ?) AND (? IS NULL OR name = ?) RETURNING 1 AS done"
)
_FOREVER = Retry(max_attempts=1_000_000, base_delay=1.0, max_delay=300.0)
_ID_MAX = 256  # code points
_SEQ_MAX = 1 << 62


class RoutedAgent(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a hub. `name`: of the root that is the peer. `seq`: of the metadata."""

    id: str
    name: str
    metadata: Any = None
    seq: int | None = None


class _Visitors:
    """Those on their way to one peer."""

    def __init__(self) -> None:
        self.count, self.gone = 0, trio.Event()


class RoutedAgents(Agent):
    """A catalogue of peers, and the way to them. Subclass it and say `agent_class`.

    `segment` is the one that leads to the peers in URLs. At most `max_agents` entries,
    of `max_metadata_bytes` each.
    """

    agent_class: ClassVar[type[Agent]]
    segment: ClassVar[str] = "agents"
    max_agents: ClassVar[int] = 100_000
    max_metadata_bytes: ClassVar[int] = 64 << 10

    # ---- the catalogue

    async def add(self, id: str, metadata: Any = None) -> RoutedAgent:  # noqa: A002
        """Write down a peer and return its entry; one that is there stays as it is.

        Raises `UsageError` for an id or metadata that cannot be, `CapacityError` beyond
        `max_agents`.
        """
        _check_id(id)
        known = self.get(id)
        if known is not None:
            return known
        text = self._text(metadata)
        self.sql(_MAKE)
        count = self.sql("SELECT count(*) AS n FROM routed_agents")[0].n
        if count >= self.max_agents:
            msg = f"{self.class_name} {self.name!r} has {self.max_agents} agents"
            raise CapacityError(msg)
        insert = "INSERT INTO routed_agents (id, name, metadata) VALUES (?, ?, ?)"
        self.sql(insert, id, self.kernel.new_id(), text)
        entry = self.get(id)
        assert entry is not None
        return entry

    async def delete(self, id: str) -> None:  # noqa: A002
        """Forget an entry and destroy its peer, with its storage. Idempotent.

        The entry is gone at once. What is left of the peer then is owed by a job.
        """
        entry = self.get(id)
        if entry is None:
            return
        # The job first: without it nothing would know of a peer that has no entry.
        owed = await self.schedule(0, "_destroy", entry.name, retry=_FOREVER)
        self.sql("DELETE FROM routed_agents WHERE id = ? AND name = ?", id, entry.name)
        if entry.name in self._on_their_way():
            return  # whoever makes the peer just now: the job waits for them
        try:
            await self.kernel.destroy_agent(self.agent_class, entry.name)
        except CuletError:
            return  # the job tries again
        self.schedules.cancel(owed.id)

    def get(self, id: str) -> RoutedAgent | None:  # noqa: A002
        """Return one entry."""
        found = self._entries("WHERE id = ?", id)
        return found[0] if found else None

    def list(
        self, *, limit: int = 1000, after: str | None = None
    ) -> builtins.list[RoutedAgent]:
        """Return entries in the order of their ids; `after` is an id, there or not."""
        if not 0 < limit <= 10_000:
            msg = f"limit is in 1..10000, not {limit!r}"
            raise UsageError(msg)
        where = "WHERE id > ? ORDER BY id LIMIT ?"
        return self._entries(where, "" if after is None else after, limit)

    async def set_metadata(
        self,
        id: str,  # noqa: A002
        metadata: Any,
        *,
        seq: int,
        peer: str | None = None,
    ) -> bool:
        """Store what a peer says of itself, if it is news; return whether it was stored.

        `seq` counts the peer's own pushes: one that is not higher than the entry's came
        late and is refused, as is one for an entry that is deleted. A peer that gives
        its own `name` as `peer` is not mistaken for one that had the id before or after.
        """
        if type(seq) is not int or abs(seq) > _SEQ_MAX:
            msg = f"seq is an integer of at most 62 bits, not {seq!r}"
            raise UsageError(msg)
        text = self._text(metadata)
        if not self._there():
            return False
        return bool(self.sql(_PUSH, text, seq, id, seq, peer, peer))

    async def agent(self, id: str) -> Any:  # noqa: A002
        """Return a stub of a peer, made if need be. Raises `NotFound` without an entry."""
        entry = self.get(id)
        if entry is None:
            msg = f"{self.class_name} {self.name!r} has no agent {id!r}"
            raise NotFound(msg)
        visitors = self._on_their_way().setdefault(entry.name, _Visitors())
        visitors.count += 1
        try:
            return await self.kernel.get_agent(self.agent_class, entry.name)
        finally:
            visitors.count -= 1
            if not visitors.count:
                visitors.gone.set()
                del self._on_their_way()[entry.name]

    # ---- the way

    async def on_forward(self, request: Request) -> Forward | Response | None:
        """Send what asks for `/{segment}/{id}/…` on to that peer; 404 without an entry.

        To let only some visitors through, ask them here and then `super()`.
        """
        _, *parts = request.path.split("/")
        if len(parts) < 2 or parts[0] != self.segment:
            return None
        try:
            peer = await self.agent(unquote(parts[1], errors="strict"))
        except (NotFound, UnicodeDecodeError):
            return Response("Not Found", 404)
        return Forward(peer, "/" + "/".join(parts[2:]))

    # ---- inside

    async def _destroy(self, name: str, _schedule: Schedule) -> None:
        """Destroy a peer that has no entry any more."""
        if self._entries("WHERE name = ?", name):
            return  # `delete` was cancelled between the job and the entry
        visitors = self._on_their_way().get(name)
        if visitors is not None:  # they found the entry, and no others can any more
            await visitors.gone.wait()
        await self.kernel.destroy_agent(self.agent_class, name)

    def _on_their_way(self) -> dict[str, _Visitors]:
        """Return who makes, or finds, which peer just now.

        It may end with the hub's node: a call that has been cut either makes nothing, or
        is making it already, which whoever destroys it waits for.
        """
        found: dict[str, _Visitors] = vars(self).setdefault("_visitors", {})
        return found

    def _there(self) -> bool:
        sql = "SELECT 1 FROM sqlite_schema WHERE type = 'table' AND name = ?"
        return bool(self.sql(sql, "routed_agents"))

    def _entries(self, where: str, *params: Any) -> builtins.list[RoutedAgent]:
        if not self._there():  # a hub without entries has no file
            return []
        rows = self.sql(f"SELECT {_COLUMNS} FROM routed_agents {where}", *params)
        return [
            RoutedAgent(
                id=row.id,
                name=row.name,
                metadata=None
                if row.metadata is None
                else msgspec.json.decode(row.metadata),
                seq=row.seq,
            )
            for row in rows
        ]

    def _text(self, metadata: Any) -> str | None:
        """Return metadata as JSON; raises `UsageError` for what is none or too large."""
        try:
            text = msgspec.json.encode(metadata)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            msg = f"metadata is plain data: {error}"
            raise UsageError(msg) from None
        if len(text) > self.max_metadata_bytes:
            msg = f"metadata has {len(text)} bytes, more than {self.max_metadata_bytes}"
            raise UsageError(msg)
        return None if metadata is None else text.decode()


def _check_id(id: str) -> None:  # noqa: A002
    """Refuse what cannot stand in a URL as one segment."""
    if not isinstance(id, str) or not 0 < len(id) <= _ID_MAX or id in {".", ".."}:
        msg = f"an id is a text of 1 to {_ID_MAX} characters, not {id!r}"
        raise UsageError(msg)
    try:
        id.encode()
    except UnicodeEncodeError:
        msg = f"an id must be valid Unicode: {id!r}"
        raise UsageError(msg) from None
    if "\0" in id:
        msg = f"an id must not hold NUL: {id!r}"
        raise UsageError(msg)
