"""Supervision: what becomes of an agent that fails, and when it may start again.

An agent *breaks* when a task of its own raises; it *fails to start* when its constructor
or `on_start` does. Either ends this life of it and of what is below it, nothing else:
callers get `FacetBroken`. A life that broke is told to the parent (`on_child_failed`); a
start that failed is told to those who wait for it. A class that says `supervision =
"escalate"` takes the whole tree down when it breaks.

Failures in a row make the next start wait, longer each time, by the back-off of jobs.
After `limits.restart_attempts` of them the agent rests: who calls it is refused at once,
and one start is tried each `limits.restart_rest_s`. A life that has lasted for
`limits.restart_calm_s`, and a delete, begin the count anew. The counts are of this
process: another one knows nothing against the agent. A tree whose storage fails again and
again rests likewise between two restarts; whoever comes meanwhile opens it.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, final

import msgspec
import trio

from .clock import Chance
from .core.job import Retry, next_try
from .core.limits import Limits
from .core.run import error_words
from .errors import ChildDidNotStop, FacetBroken
from .events import Restarted
from .node import Ambient, Node, State
from .ports import TreeKey

if TYPE_CHECKING:
    from .tree import Address, NodeRow, Tree


class ChildRef(msgspec.Struct, frozen=True):
    """A child by its class and name."""

    class_name: str
    name: str


class ChildFailure(msgspec.Struct, frozen=True):
    """Why a child broke. `restarts`: how often it was started again before, in a row.

    In a row: since it first broke, no life of it lasted for `limits.restart_calm_s`.
    """

    error_type: str
    message: str
    restarts: int


@final
class Record:
    """What is held against one agent."""

    __slots__ = ("broke", "count", "error", "not_before", "restarts", "rests", "since")

    def __init__(self) -> None:
        self.count = 0  # failures in a row
        self.broke = False  # not only in starting
        self.restarts = 0
        self.not_before = 0.0  # by trio's clock
        self.rests = False
        self.since: float | None = None  # its last start, if that succeeded
        self.error: BaseException | None = None


@final
class Supervision:
    """The failures of one tree, by address: they outlive a slot."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.records: dict[Address, Record] = {}

    # ---- what happens

    def start_ended(self, node: Node, error: BaseException | None) -> None:
        """A start is over: one that failed makes the next one wait."""
        if error is not None:
            self.tree.kernel.report("start", node, error, name="on_start")
            self._failed(node, error)
            return
        record = self.records.get(node.address)
        if record is None:
            return
        if not record.broke:
            del self.records[node.address]
            return
        record.since, record.rests = trio.current_time(), False
        record.restarts += 1
        told = Restarted(node.path_text(), record.restarts)
        self.tree.emit("restart", node.slot, told)

    def broke(self, node: Node, error: BaseException) -> None:
        """A task of an agent raised: stop it, or the whole tree, and tell its parent."""
        if node.state >= State.STOPPING:
            return
        node.error = error
        tree = self.tree
        tree.kernel.report("broken", node, error, name="background task")
        record = self._failed(node, error)
        record.broke = True
        failure = ChildFailure(
            type(error).__name__, error_words(error), record.restarts
        )
        escalates = node.agent.supervision == "escalate"
        top = node.lineage()[0] if escalates else node
        broken = FacetBroken(f"{node.path_text()} broke: {error_words(error)}")
        broken.__cause__ = error

        if top.parent is not None:
            top.parent.used_at = trio.current_time()  # not to be evicted untold

        async def stop() -> None:
            with suppress(ChildDidNotStop):
                await tree.abort(
                    [top.slot], f"broken: {error_words(error)}", error=broken
                )
            if top.parent is not None:
                await self._tell(top.parent, top, failure)

        tree.start_soon(stop)

    async def _tell(self, parent: Node, child: Node, failure: ChildFailure) -> None:
        await parent.ready.wait()  # its own start may have made the child
        if parent.state is State.LIVE:
            ref = ChildRef(child.kind.name, child.name)
            parent.hook(Ambient(parent), parent.agent.on_child_failed, ref, failure)

    def _failed(self, node: Node, error: BaseException) -> Record:
        limits, now = self.tree.kernel.limits, trio.current_time()
        record = self.records.pop(node.address, None)
        if record is None or (
            record.since is not None and now - record.since >= limits.restart_calm_s
        ):
            record = Record()
        record.count += 1
        record.error, record.since = error, None
        record.rests = record.count >= limits.restart_attempts
        record.not_before = now + self._delay_s(record)
        self.records[node.address] = record
        if len(self.records) > limits.failed_starts:  # names may be anybody's
            del self.records[next(iter(self.records))]
        return record

    def _delay_s(self, record: Record) -> float:
        """Return how long the next start waits: the first one not at all."""
        limits = self.tree.kernel.limits
        if record.rests:
            return limits.restart_rest_s
        if record.count == 1:
            return 0.0
        retry = Retry(
            base_delay=min(limits.restart_base_s, limits.restart_max_s),
            max_delay=limits.restart_max_s,
        )
        chance = self.tree.kernel.chance.fraction()
        return next_try(retry, record.count - 1, 0, chance) / 1000

    def forget(self, address: Address) -> None:
        """It was deleted: whoever comes after it begins anew."""
        self.records.pop(address, None)

    # ---- what may start

    def check(self, address: Address) -> None:
        """Raise `FacetBroken` while that agent rests."""
        record = self.records.get(address)
        if record is None or not record.rests:
            return
        left_s = record.not_before - trio.current_time()
        if left_s > 0:
            _parent, class_name, name = address
            msg = (
                f"{class_name}/{name} failed {record.count} times in a row; the next "
                f"start is tried in {left_s:.0f} s; delete or upgrade it, or wait"
            )
            raise FacetBroken(msg) from record.error

    def rests(self, address: Address) -> bool:
        """Whether that agent is refused for now."""
        record = self.records.get(address)
        now = trio.current_time()
        return record is not None and record.rests and now < record.not_before

    async def may_start(self, row: NodeRow, parent: Node | None) -> bool:
        """Wait for the back-off; False: look again from the top."""
        self.check(row.address)
        record = self.records.get(row.address)
        if record is not None and trio.current_time() < record.not_before:
            await trio.sleep_until(record.not_before)
            return False
        if parent is not None and parent.state >= State.STOPPING:
            await trio.lowlevel.checkpoint()
            return False
        return True


@final
class TreeFailures:
    """How often the storage of each tree failed, in a row, in this process."""

    def __init__(self, limits: Limits, chance: Chance) -> None:
        self._limits, self._chance = limits, chance
        self._rows: dict[TreeKey, tuple[int, float]] = {}  # how often, and when last

    def again_ms(self, key: TreeKey) -> int:
        """One more failure: how long the tree rests now. The first time not at all."""
        limits, now = self._limits, trio.current_time()
        count, last = self._rows.pop(key, (0, now))
        count = 1 if now - last >= limits.restart_calm_s else count + 1
        self._rows[key] = (count, now)
        if len(self._rows) > limits.failed_starts:
            del self._rows[next(iter(self._rows))]
        if count == 1:
            return 0
        retry = Retry(base_delay=min(limits.restart_base_s, limits.restart_max_s),
                      max_delay=limits.restart_max_s)  # fmt: skip
        return next_try(retry, count - 1, 0, self._chance.fraction())
