"""Connections: who is there, what reaches them, and what they send.

The root's tree owns the sockets, the leaf sees them: a connection belongs to a slot and
outlives the node, which may be asleep. An agent's task never touches a socket: it pushes
frames, encoded once and shared, stamped with the tree's count of commits; the peer lets
them out when that count is durable. Replay is pulled by the peer, page by page, and
joins the live frames in the step in which it has caught up.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Any, Final, final

import trio

from .clientcalls import answer, on_message
from .core import clientframes as client
from .core.shown import without_query
from .errors import CuletError, StorageError
from .http import ConnectContext
from .node import Ambient, Node, State, ambient, is_stop
from .ports import Blob, Peer
from .sendable import close_words, message_blob
from .state import client_state
from .streams import Cursor

if TYPE_CHECKING:
    from .tree import Tree

log = logging.getLogger("culet.kernel")
_ANSWERS: Final = (client.ToolResult, client.ToolApproval)
Work = tuple[Node, Ambient, Callable[..., Any], Any]


@final
class Connection:
    """One client, as an agent sees it. `send` and `close` never block.

    They raise `UsageError` for what cannot be sent at all, and nothing else.

    `id` is a label that the client chose and may repeat; `uri`, `identity` and `tags`
    are fixed when it connects; `state` is whatever `set_state` put there, for as long as
    the socket lives.
    """

    __slots__ = (
        "_attached",
        "_cursors",
        "_inbox",
        "_most",
        "_opened",
        "_peer",
        "_pumping",
        "_room",
        "_slot",
        "_todo",
        "_tree",
        "_working",
        "context",
        "gone",
        "id",
        "identity",
        "protocol",
        "readonly",
        "revoked",
        "state",
        "tags",
        "uri",
    )

    def __init__(
        self, tree: Tree, slot: str, peer: Peer, connection_id: str, ctx: ConnectContext
    ) -> None:
        self.id = connection_id
        self.uri = ctx.request.url
        self.identity = ctx.identity
        self.context = ctx
        self.tags: tuple[str, ...] = ()
        self.readonly = False
        self.protocol = True
        self.state: Any = None
        self.gone = self.revoked = False
        self._tree, self._slot, self._peer = tree, slot, peer
        self._inbox: deque[str | bytes] = deque()
        self._pumping = False
        self._todo: deque[Work] = deque()
        self._opened = False
        self._attached = False
        self._working, self._most = 0, tree.kernel.limits.rpc_per_connection
        self._room = trio.Event()
        self._cursors: deque[Cursor] = deque()

    def __repr__(self) -> str:
        return f"<connection {self.id} to {self.uri}>"

    # ---- for agents

    def send(self, message: str | bytes) -> None:
        """Queue one message for this client; code that was stopped is not heard."""
        here = ambient.get()
        if here is not None and here.node.state >= State.STOPPING:
            return
        self.push(message_blob(message), self._tree.barrier.count)

    def close(self, code: int = 1000, reason: str = "") -> None:
        """Close after what was sent before; `reason` is cut to 123 bytes of UTF-8.

        Raises `UsageError` for a code that no close frame may carry.
        """
        code, reason = close_words(code, reason)
        if not self.gone:
            self._peer.close(code, reason, self._tree.barrier.count)

    def set_state(self, value: Any) -> None:
        """Keep a value with this connection; a function gets the previous value."""
        self.state = value(self.state) if callable(value) else value

    # ---- for the kernel

    @property
    def place(self) -> str:
        """Where its client is, for logs: the query of its address may hold a token."""
        return without_query(self.uri)

    def push(self, blob: Blob, stamp: int) -> None:
        """Queue frames; they leave when the tree's durable count reaches `stamp`."""
        if not (self.gone or self.revoked):
            self._peer.push(blob, stamp)

    def say(self, text: str) -> None:
        """Queue one protocol frame, stamped now."""
        self.push(Blob(text), self._tree.barrier.count)

    def reply(self, text: str) -> None:
        """Queue the answer to a call: behind the frames of what it has waited for.

        Those are pushed when their record is durable, in the order of their commits;
        so the answer takes its place among them.
        """
        barrier = self._tree.barrier
        if barrier.fenced is None and barrier.count > barrier.durable:
            barrier.after.append(partial(self.push, Blob(text), 0))
            barrier.urge()
        else:
            self.say(text)

    def attach(self, hello: list[str], cursors: list[Cursor]) -> None:
        """Say who the agent is and hear it from here on: one step, nothing is missed."""
        if hello:
            self.push(Blob(*hello), self._tree.barrier.count)
        self._attached = True
        self._cursors.extend(cursors)
        if cursors:
            self._peer.wake()

    def follow(self, cursor: Cursor) -> None:
        """Replay a stream to this client from the cursor on, then live."""
        self._cursors.append(cursor)
        self._peer.wake()

    def unfollow(self, stream_id: str, kind: str) -> None:
        """End a replay of that stream where it is; the rest is not sent."""
        for cursor in [
            c for c in self._cursors if c.stream_id == stream_id and c.kind == kind
        ]:
            self._cursors.remove(cursor)

    def replays(self, stream_id: str, kind: str) -> bool:
        """Whether a replay of that stream is under way."""
        return any(c.stream_id == stream_id and c.kind == kind for c in self._cursors)

    @property
    def behind(self) -> bool:
        """Whether there is something to pull."""
        return bool(self._cursors)

    def pull(self) -> Blob | None:
        """Return the next page of replay, or None: the peer asks when it has room."""
        if self.gone or self.revoked or self._tree.closed:
            self._cursors.clear()
            return None
        limits, stopwatch = (
            self._tree.kernel.limits,
            self._tree.kernel.clock.stopwatch_ns,
        )
        limit, until = limits.replay_page_bytes, stopwatch() + int(limits.pass_s * 1e9)
        parts: list[Blob] = []
        size = 0
        while self._cursors and size < limit:
            if parts and stopwatch() >= until:
                break  # each run has a file of its own to open: the others may go on
            cursor = self._cursors[0]
            try:
                # whole pages: those who read the same run share them
                part, over = self._tree.streams.pull(self, cursor, limit)
            except StorageError as error:  # of one file: the other runs are whole
                name = cursor.stream_id
                self._tree.kernel.report("replay", None, error, name=name)
                part, over = Blob(), True
            if part.texts:
                parts.append(part)
                size += part.size
            if over:
                self._cursors.popleft()
            elif part.texts:
                break
        if len(parts) > 1:
            return Blob(*(text for part in parts for text in part.texts))
        return parts[0] if parts else None

    # ---- what arrives

    def received(self, message: str | bytes) -> None:
        """Take one message from the peer. Never blocks; see `room`."""
        if self.revoked:
            return
        self._inbox.append(message)
        if self._pumping or self.gone:
            return
        node = self._tree.nodes.get(self._slot)
        if node is not None and node.state is State.LIVE and self._opened:
            self._drain(node)
        else:
            self._pump_later()

    async def room(self) -> None:
        """Wait while too much of this client is in work already."""
        limit = self._tree.kernel.limits.rpc_per_connection
        while self._working + len(self._inbox) >= limit and not self.gone:
            self._room = trio.Event()
            await self._room.wait()

    async def opened(self) -> None:
        """Run the connect hooks and say who the agent is; raises what they raise."""
        node = await self._tree.wake(self._slot)
        ctx = Ambient(node, connection=self, request=self.context.request,
                      identity=self.identity)  # fmt: skip
        await node.enter(ctx, node.agent._connected, self, self.context)
        self._opened = True
        if self._inbox:
            self._pump_later()

    def closed(self, code: int, reason: str, *, was_clean: bool) -> None:
        """The socket is gone: no view keeps it, the agent hears of it if it is awake."""
        if self.gone:
            return
        self.gone = True
        self._room.set()
        self._inbox.clear()
        self._cursors.clear()
        tree = self._tree
        tree.sockets.leave(self)
        about = {"connectionId": self.id, "code": code, "reason": reason}
        tree.emit("disconnect", self._slot, about)
        node = tree.nodes.get(self._slot)
        if tree.closed or node is None or node.state is not State.LIVE:
            return
        node.agent._left(self)
        if self._opened and node.kind.hears_close:
            ctx = Ambient(node, connection=self, identity=self.identity)
            node.hook(ctx, node.agent.on_close, self, code, reason, was_clean)

    def revoke(self, code: int, reason: str) -> None:
        """Its client may not any more: what comes is not heard, nothing more is said.

        What was queued before may leave still, with the close behind it.
        """
        self.close(code, reason)
        self.revoked = True
        self._inbox.clear()
        self._cursors.clear()

    def drop(self, why: str) -> None:
        """End it now, if it has not ended."""
        if not self.gone:
            self._peer.drop(why)

    def _pump_later(self) -> None:
        if not self._pumping and not self._tree.closed:
            self._pumping = True
            self._tree.start_soon(self._pump)

    async def _pump(self) -> None:
        """Wake the agent (never create it) and hand over what has arrived, in order."""
        try:
            while self._inbox and not self.gone and self._opened and not self._full:
                self._drain(await self._tree.wake(self._slot))
        except CuletError as error:
            self._tree.kernel.report("socket", None, error, name=self.place)
            self.close(1011, "agent is not available")
        finally:
            self._pumping = False

    def _drain(self, node: Node) -> None:
        while self._inbox and node.state is State.LIVE and not self._full:
            message = self._inbox.popleft()
            frame = client.decode_client_frame(message)
            if frame is None:
                self._work(node, on_message, message)
            elif isinstance(frame, client.Rpc):
                self._work(node, answer, frame)
            elif isinstance(frame, client.State):
                client_state(node, self, frame)
            elif isinstance(frame, _ANSWERS) and frame.run_id is not None:
                self._work(node, node.agent._run_answered, frame)
            elif isinstance(frame, client.Ignored):
                log.info("ignored %s: %s", frame.type, frame.why)
            else:
                try:
                    handled = node.agent._frame(self, frame)
                except BaseException as error:
                    if is_stop(error):
                        raise
                    self._tree.kernel.report("frame", node, error, name=self.place)
                    handled = True
                if not handled:
                    self._work(node, on_message, message)
        if self._inbox and not self._full:
            self._pump_later()

    @property
    def _full(self) -> bool:
        """Whether as much as may be is in work; the end of one of them goes on."""
        return self._working >= self._most

    def _work(self, node: Node, fn: Callable[..., Any], what: Any) -> None:
        """Start a task for one message.

        trio starts the tasks of a pass in any order, messages must begin in theirs: so
        each task takes the message that is first by then, whichever it was made for.
        """
        self._working += 1
        ctx = Ambient(node, connection=self, request=self.context.request,
                      identity=self.identity)  # fmt: skip
        self._todo.append((node, ctx, fn, what))
        node.spawn(ctx, self._next)

    async def _next(self) -> None:
        node, ctx, fn, what = self._todo.popleft()
        try:
            if not self.revoked:
                await fn(node, ctx, self, what)
        finally:
            self._working -= 1
            self._room.set()
            if self._inbox:
                self._pump_later()


@final
class Sockets:
    """The connections of one tree, by the slot that they talk to."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self._by_slot: dict[str, dict[Connection, None]] = {}
        self.count = 0

    def connect(
        self, slot: str, peer: Peer, connection_id: str, ctx: ConnectContext
    ) -> Connection:
        """Register a connection; `opened` follows. Raises `CapacityError`."""
        self.tree.quotas.admit_socket()
        connection = Connection(self.tree, slot, peer, connection_id, ctx)
        self._by_slot.setdefault(slot, {})[connection] = None
        self.count += 1
        return connection

    def leave(self, connection: Connection) -> None:
        """Forget a connection that is gone."""
        peers = self._by_slot.get(connection._slot)
        if peers is not None and connection in peers:
            del peers[connection]
            self.count -= 1
            if not peers:
                del self._by_slot[connection._slot]
        self.tree.streams.leave(connection)

    def of(self, slot: str) -> list[Connection]:
        """Return the connections of an agent in the order in which they came."""
        return list(self._by_slot.get(slot, ()))

    def everybody(self) -> list[Connection]:
        """Return all connections of the tree."""
        return [c for peers in self._by_slot.values() for c in peers]

    def protocol_of(self, slot: str) -> list[Connection]:
        """Return those that get protocol frames and were told who the agent is."""
        return [c for c in self._by_slot.get(slot, ()) if c.protocol and c._attached]

    def push_all(
        self, slot: str, blob: Blob, *, without: Collection[Any] = (), raw: bool = False
    ) -> None:
        """Push one blob to every connection of an agent; `raw` to no-protocol ones too."""
        stamp = self.tree.barrier.count
        # a copy: one that is pushed to may find itself dead, and leaves
        for connection in self.of(slot):
            if connection in without or not connection._attached:
                continue
            if connection.protocol or raw:
                connection.push(blob, stamp)

    def close_all(self, slots: Collection[str], code: int, reason: str) -> None:
        """Close the connections of agents that are no more."""
        for slot in slots:
            for connection in self.of(slot):
                connection.close(code, reason)

    def close_tree(self, code: int, reason: str) -> None:
        """Close every connection of the tree, after what was sent before."""
        self.close_all(list(self._by_slot), code, reason)

    def cut_all(self, code: int, reason: str) -> None:
        """The tree goes down: close every connection, at once."""
        for slot in list(self._by_slot):
            for connection in self.of(slot):
                connection._peer.close(code, reason, 0)
