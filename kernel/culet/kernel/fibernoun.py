"""`self.fibers`: functions with checkpoints that an agent has started."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, final

import msgspec
import trio

from .core.path import check_name
from .core.run import Status
from .errors import FacetAborted, UsageError
from .fiberrows import FiberResolution, FiberRun, Statuses
from .node import Ambient, Node, ambient, is_stop


@final
class FibersNoun:
    """The fibers of one agent; with `below=True` those of its facets as well."""

    __slots__ = ("_node",)

    def __init__(self, node: Node) -> None:
        self._node = node

    async def start(
        self,
        name: str,
        fn: Callable[[], Awaitable[Any]],
        *,
        fiber_id: str | None = None,
        key: str | None = None,
        metadata: Any = None,
        deadline_s: float | None = None,
        wait: bool = False,
    ) -> FiberRun:
        """Start a fiber in the background; a known id or key returns its fiber.

        `accepted` of what it returns says whether this call has started it. Its row is
        kept after its end. With `wait` the end is waited for. It ends with the turn or
        fiber whose code has started it; one that a recovery hook starts and does not wait
        for stands in for the recovered one and goes on. One that is not over after
        `deadline_s` seconds ends `error`, reason `deadline`, restarts or not. Raises
        `UsageError` for an id or key that is empty, or that name two fibers.
        """
        node, fibers = self._node, self._node.tree.fibers
        found = self._known(fiber_id, key)
        accepted = found is None
        if found is None:
            fiber_id = node.tree.kernel.chance.id() if fiber_id is None else fiber_id
            taken = fibers.begin(
                node, name, check_name(fiber_id), key, metadata,
                keep=True, deadline_s=deadline_s, wait=wait,
            )  # fmt: skip

            async def body() -> None:
                try:
                    await fibers.run(node, taken, name, fn, keep=True)
                except FacetAborted:
                    pass  # ended by id, or its agent stopped
                except BaseException as error:
                    if is_stop(error):
                        raise
                    node.tree.kernel.report("fiber", node, error, name=name)

            here = ambient.get()
            ours = here is not None and here.node is node
            maker, payer = (here.maker, here.payer) if here and ours else (None, None)
            node.spawn(Ambient(node, maker=maker, payer=payer), body)
            found = fibers.get(node.slot, fiber_id, None)
            assert found is not None
        if wait:
            found = await fibers.join(node.slot, found.id)
        else:
            await trio.lowlevel.checkpoint_if_cancelled()
        return msgspec.structs.replace(found, accepted=accepted)

    def _known(self, fiber_id: str | None, key: str | None) -> FiberRun | None:
        """Return the fiber that an id or a key names."""
        if key is not None and not key.strip():
            msg = f"the key of a fiber is not empty: {key!r}"
            raise UsageError(msg)
        fibers, slot = self._node.tree.fibers, self._node.slot
        by_id = None if fiber_id is None else fibers.get(slot, fiber_id, None)
        by_key = None if key is None else fibers.get(slot, None, key)
        if by_id is not None and by_key is not None and by_id.id != by_key.id:
            msg = f"{fiber_id!r} and key {key!r} name two fibers"
            raise UsageError(msg)
        return by_id or by_key

    def inspect(self, id: str | None = None, key: str | None = None) -> FiberRun | None:  # noqa: A002
        """Return one fiber by id or by key; see `FiberRun` for what it tells of one that runs."""
        if id is None and key is None:
            msg = "name a fiber by its id or its key"
            raise UsageError(msg)
        return self._node.tree.fibers.get(self._node.slot, id, key)

    def list(
        self,
        *,
        status: Statuses = None,
        name: str | None = None,
        limit: int | None = None,
        after: FiberRun | None = None,
        below: bool = False,
    ) -> list[FiberRun]:
        """Return fibers in the order of their start.

        `status` is one or many. At most `limits.due_rows` at once; go on with the last one
        as `after`. `below`: those of all agents below as well, each with its `path`.
        """
        fibers = self._node.tree.fibers
        found = fibers.rows.all(
            self._node.slot, status=status, name=name, limit=limit, after=after, below=below
        )  # fmt: skip
        return [fibers.now(f) for f in found]

    def cancel(
        self, id: str | None = None, key: str | None = None, reason: str | None = None, *,  # noqa: A002
        below: bool = False,
    ) -> Status | None:  # fmt: skip
        """Cancel a fiber with what it waits for; the status that stands afterwards.

        None: there is none. Its task is fenced: what it still does, shielded or in its
        clean-up, changes nothing. With `below` each of that id or key in this agent and
        all below it is cancelled, and the answer is that of the first one that ran.
        Raises `UsageError` inside `transaction()` for a turn that has just said something.
        """
        self._node.check()
        tree, slot = self._node.tree, self._node.slot
        if not below:
            one = self.inspect(id, key)
            return None if one is None else tree.fibers.cancel(one, reason)
        if id is None and key is None:
            self.inspect()  # refuses
        found = tree.fibers.rows.below(slot, id, key)
        running = [f for f in found if f.status == "running"]
        stand = [tree.fibers.cancel(f, reason) for f in running]
        return (stand or [f.status for f in found] or [None])[0]

    def resolve(self, id: str, result: FiberResolution) -> bool:  # noqa: A002
        """End a fiber from outside it; False when it was ended already."""
        self._node.check()
        found = self.inspect(id)
        return found is not None and self._node.tree.fibers.resolve(found, result)

    def delete(
        self,
        *,
        status: Statuses = None,
        settled_before: int | None = None,
        limit: int | None = None,
    ) -> int:
        """Forget fibers that ended, the earliest end first; returns how many.

        `status` None: all but the interrupted, which wait for somebody to look at them.
        `settled_before`: epoch ms. At most `limits.due_rows` at once.
        """
        self._node.check()
        rows = self._node.tree.fibers.rows
        return rows.forget(self._node.slot, status, settled_before, limit)
