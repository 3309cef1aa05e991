"""Fibers: functions with checkpoints that an agent started itself, and its own turns.

The row and its job are one commit, the job held by whoever runs the function. Ending
the fiber and dropping the job is one commit as well. After a crash the job is due, and
`on_fiber_recovered` says how the fiber ends.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, Literal, final

import msgspec
import trio

from .calls import stored_json
from .core.run import Status
from .endings import Ending, Subject, json_text
from .errors import FacetAborted, NotFound, UsageError
from .jobs import StartFailed, Taken
from .node import Ambient, Node, ambient, is_stop
from .streams import TurnView

if TYPE_CHECKING:
    from .tree import Tree

_INSERT: Final = (
    "INSERT INTO fiber (owner, id, kind, name, key, asker, metadata, status, started_at)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, 'running', ?)"
)
_COLUMNS: Final = (
    "id, kind, name, key, metadata, status, reason, error, result, started_at,"
    " completed_at"
)


class FiberRun(msgspec.Struct, frozen=True, kw_only=True):
    """One fiber or own turn as its row tells it. Instants are epoch milliseconds."""

    id: str
    kind: Literal["fiber", "turn"]
    name: str
    key: str | None
    metadata: Any
    status: Status
    reason: str | None
    error: str | None
    result: Any
    started_at: int
    completed_at: int | None


class FiberRecovery(msgspec.Struct, frozen=True, kw_only=True):
    """What `on_fiber_recovered` is told of a fiber whose process ended."""

    id: str
    name: str
    snapshot: Any
    metadata: Any
    attempt: int
    started_at: int


class FiberResolution(msgspec.Struct, frozen=True, kw_only=True):
    """How a recovered fiber ends."""

    status: Literal["completed", "error", "aborted", "interrupted"] = "completed"
    result: Any = None
    error: str | None = None


def to_fiber(row: tuple[Any, ...]) -> FiberRun:
    """Return the public record of a row of `_COLUMNS`."""
    (fiber_id, kind, name, key, metadata, status, reason, error, result, started_at,
     completed_at) = row  # fmt: skip
    return FiberRun(
        id=fiber_id, kind=kind, name=name, key=key,
        metadata=stored_json(metadata),
        status=status, reason=reason, error=error,
        result=stored_json(result),
        started_at=started_at, completed_at=completed_at,
    )  # fmt: skip


@final
class Fibers:
    """The fibers and own turns of one tree."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.db = tree.db
        self.live: dict[tuple[str, str], tuple[Taken, trio.CancelScope]] = {}

    # ---- reading

    def get(self, owner: str, fiber_id: str | None, key: str | None) -> FiberRun | None:
        """Return one fiber by id or by key."""
        column, value = ("id", fiber_id) if fiber_id is not None else ("key", key)
        sql = f"SELECT {_COLUMNS} FROM fiber WHERE owner = ? AND {column} = ?"
        rows = self.db.execute(sql, (owner, value))
        return to_fiber(rows[0]) if rows else None

    def all(
        self, owner: str, *, status: Status | None, name: str | None, limit: int
    ) -> list[FiberRun]:
        """Return fibers in the order of their start."""
        sql = (
            f"SELECT {_COLUMNS} FROM fiber WHERE owner = ?1"
            " AND (?2 IS NULL OR status = ?2) AND (?3 IS NULL OR name = ?3)"
            " ORDER BY born LIMIT ?4"
        )
        rows = self.db.execute(sql, (owner, status, name, limit))
        return [to_fiber(r) for r in rows]

    # ---- running

    def begin(
        self, node: Node, name: str, fiber_id: str, key: str | None, metadata: Any
    ) -> Taken:
        """Write the row and its held job, in one commit."""
        node.check()
        tree, now = self.tree, self.tree.now()
        here = ambient.get()
        asker = here.asker if here is not None and here.node is node else None
        take = tree.jobs.take_number()
        with tree.transaction():
            self.db.execute(
                _INSERT,
                (
                    node.slot,
                    fiber_id,
                    "fiber",
                    name,
                    key,
                    asker,
                    json_text(metadata),
                    now,
                ),
            )
            job = tree.jobs.add(
                node.slot,
                "fiber",
                fiber_id,
                at=now,
                lane=f"fiber:{fiber_id}",
                held=take,
            )
        tree.emit("fiber:start", Subject("fiber", node.slot, fiber_id, node.slot), name)
        return tree.jobs.born_taken(job, take)

    async def run(
        self, node: Node, taken: Taken, fn: Callable[[], Awaitable[Any]], *, keep: bool
    ) -> Any:
        """Run `fn` as that fiber, in this task; its end is in the row before it returns."""
        tree, fiber_id = self.tree, taken.row.what
        subject = Subject("fiber", node.slot, fiber_id, node.slot)
        scope = trio.CancelScope()
        self.live[node.slot, fiber_id] = (taken, scope)
        here = ambient.get()
        ctx = (here or Ambient(node))._replace(node=node, asker=fiber_id, turn=None)
        token = ambient.set(ctx)
        try:
            with scope:
                result = await fn()
                self._end(
                    subject, Ending("completed", output=json_text(result)), taken, keep
                )
                return result
        except BaseException as error:
            if is_stop(error):
                raise
            if not scope.cancel_called:
                if not node.fenced and not tree.closed:
                    text = f"{type(error).__name__}: {error}"
                    self._end(subject, Ending("error", "failed", text), taken, keep)
                raise
            # ended by id: what its clean-up raised beside that goes nowhere
        finally:
            ambient.reset(token)
            self.live.pop((node.slot, fiber_id), None)
            if (
                not tree.closed
                and tree.barrier.fenced is None
                and tree.jobs.mine(taken)
            ):
                tree.jobs.release([taken.row.id])
        found = self.get(node.slot, fiber_id, None)
        raise FacetAborted(None if found is None else found.reason)

    def _end(self, subject: Subject, ending: Ending, taken: Taken, keep: bool) -> None:
        with self.tree.transaction():
            won = self.tree.endings.settle(subject, ending, taken)
            if won and not keep:
                self.db.execute(
                    "DELETE FROM fiber WHERE owner = ? AND id = ?",
                    (subject.owner, subject.id),
                )

    def stash(self, node: Node, data: Any) -> None:
        """Store a checkpoint of the fiber or turn that this task works for."""
        here = ambient.get()
        asker = None if here is None else here.asker
        if here is not None and here.turn is not None:
            here.turn.stash(data)
            return
        live = None if asker is None else self.live.get((node.slot, asker))
        if live is None:
            msg = "stash() belongs into a fiber or a turn"
            raise UsageError(msg)
        node.check()
        text = json_text(data)
        if not self.tree.jobs.stash(live[0], "null" if text is None else text):
            msg = f"fiber {asker!r} is over"
            raise UsageError(msg)

    def stop(self, slot: str, fiber_id: str, reason: str | None) -> None:
        """End the task of a fiber whose row is settled; its agent lives on."""
        live = self.live.get((slot, fiber_id))
        if live is not None:
            live[1].cancel(reason=reason)

    def cancel(self, owner: str, fiber_id: str, reason: str | None) -> Status | None:
        """Cancel by id: the standing status, None when there is no such fiber."""
        found = self.get(owner, fiber_id, None)
        if found is None:
            return None
        subject = Subject(found.kind, owner, fiber_id, owner)
        return self.tree.endings.cancel(subject, reason)

    # ---- recovery

    async def recover(self, taken: Taken) -> bool:
        """Handle a fiber whose function is gone: ask its owner how it ends."""
        row = taken.row
        found = self.get(row.owner, row.what, None)
        if found is None:
            return True
        try:
            node = await self.tree.wake(row.owner)
        except UsageError as error:
            raise StartFailed from error
        if not self.tree.jobs.mine(taken):
            return False
        told = FiberRecovery(
            id=found.id, name=found.name, snapshot=taken.snapshot, metadata=found.metadata,
            attempt=taken.attempts, started_at=found.started_at,
        )  # fmt: skip
        subject = Subject("fiber", row.owner, row.what, row.owner)
        self.tree.emit("fiber:recover", subject, taken.attempts)
        scope = trio.CancelScope()
        self.live[row.owner, row.what] = (taken, scope)
        answer: FiberResolution | None = None
        try:
            with scope:
                answer = await node.enter(
                    Ambient(node, asker=row.what), node.agent.on_fiber_recovered, told
                )
        finally:
            self.live.pop((row.owner, row.what), None)
        if scope.cancelled_caught:
            return False  # whoever ended it has settled it
        how = answer or FiberResolution(status="interrupted")
        ending = Ending(
            how.status,
            None if answer is not None else "not-resumed",
            how.error,
            output=json_text(how.result),
        )
        self.tree.endings.settle(subject, ending, taken)
        return False

    def exhausted(self, taken: Taken, text: str) -> None:
        """Settle a fiber whose attempts are used up."""
        subject = Subject("fiber", taken.row.owner, taken.row.what, taken.row.owner)
        ending = Ending("error", "recovery-exhausted", text)
        self.tree.endings.settle(subject, ending, taken)

    # ---- own turns

    def start_turn(
        self,
        node: Node,
        turn_id: str,
        *,
        name: str,
        lane: str,
        payload: dict[str, Any],
        key: str | None = None,
        metadata: Any = None,
    ) -> str:
        """Owe a turn of the agent's own, in one commit; a known key returns its turn.

        Of `metadata` the keys `messageIds` and `continuation` are for its view.
        """
        node.check()
        tree, now = self.tree, self.tree.now()
        if key is not None:
            known = self.get(node.slot, None, key)
            if known is not None:
                return known.id
        view = TurnView(turn_id, metadata)
        view.peers = dict.fromkeys(tree.sockets.protocol_of(node.slot))
        stream = tree.streams.fresh(node.slot, turn_id, view)
        take: int | None = None
        about = json_text(metadata)
        try:
            with tree.transaction():
                self.db.execute(
                    _INSERT, (node.slot, turn_id, "turn", name, key, None, about, now)
                )
                if tree.jobs.idle(node.slot, lane):
                    take = tree.jobs.take_number()
                job = tree.jobs.add(
                    node.slot,
                    "turn",
                    turn_id,
                    at=now,
                    lane=lane,
                    payload=payload,
                    held=take,
                )
        except Exception:
            tree.streams.drop(stream)
            raise
        stream.open()
        if take is not None:
            tree.start_job(tree.jobs.born_taken(job, take))
        return turn_id

    async def join(self, owner: str, turn_id: str) -> FiberRun:
        """Wait for the end of a fiber or own turn and return its row."""
        while True:
            found = self.get(owner, turn_id, None)
            if found is None:
                msg = f"there is no fiber {turn_id!r}"
                raise NotFound(msg)
            if found.status != "running":
                return found
            await self.tree.endings.over(owner, turn_id)
