"""What a store owes in the hours to come: for the operator, page by page.

Roots in the order of their names, the jobs of each in the order of their time. A root that
sleeps is opened (none of its agents is started) if the host index says that it is due, and
sent to sleep again when nothing wants it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import trio

from .core.upcoming import OWED_COLUMNS, OwedRow, Upcoming, explain
from .errors import CapacityError, NotFound, StorageError, UsageError
from .ports import TreeKey
from .schedules import horizon_ms

if TYPE_CHECKING:
    from .kernel import Kernel
    from .tree import Tree

_DUE: Final = (
    f"SELECT {OWED_COLUMNS} FROM job WHERE dead = 0 AND due_at <= ?"
    " AND (due_at, id) > (?, ?) ORDER BY due_at, id LIMIT ?"
)
_FIRST: Final = (-(1 << 62), 0)


class Cursor(NamedTuple):
    """Where the next page begins: behind this job of this root."""

    key: TreeKey
    due_at: int
    id: int


class DuePage(NamedTuple):
    """One page of what is owed. `after`: ask with it for the next one; None: that is all."""

    rows: list[Upcoming]
    after: str | None


_cursors: Final = msgspec.json.Decoder(Cursor)


async def page(
    kernel: Kernel,
    hours: float,
    *,
    root: TreeKey | None,
    limit: int | None,
    after: str | None,
) -> DuePage:
    """Return one page; see `Kernel.due`."""
    until = kernel.clock.now_ms() + horizon_ms(hours)
    most = kernel.limits.due_rows
    left = most if limit is None else min(limit, most)
    if left < 1:
        msg = f"limit is at least 1, not {limit!r}"
        raise UsageError(msg)
    begin = None if after is None else _cursor(after)
    rows: list[Upcoming] = []
    budget = left  # of roots: an index that is behind may send us to many for nothing
    for key in _keys(kernel, until, root):
        here = _FIRST
        if begin is not None:
            if key < begin.key:
                continue
            here = (begin.due_at, begin.id) if key == begin.key else _FIRST
        if budget == 0:
            return DuePage(rows, _text(Cursor(key, *_FIRST)))
        budget -= 1
        found = await _of_root(kernel, key, until, here, left - len(rows))
        rows += found
        if len(rows) == left:
            last = rows[-1]
            return DuePage(rows, _text(Cursor(key, last.due_at, int(last.id))))
        await trio.lowlevel.checkpoint()
    return DuePage(rows, None)


def _text(cursor: Cursor) -> str:
    return msgspec.json.encode(cursor).decode()


def _cursor(after: str) -> Cursor:
    try:
        return _cursors.decode(after)
    except msgspec.DecodeError:
        msg = f"{after!r} is not the `after` of a page"
        raise UsageError(msg) from None


def _keys(kernel: Kernel, until: int, root: TreeKey | None) -> list[TreeKey]:
    if root is not None:
        return [root]
    awake = {key for key, tree in kernel.trees.items() if not tree.closed}
    return sorted(awake | kernel.host.sleepers(until))


async def _of_root(
    kernel: Kernel, key: TreeKey, until: int, after: tuple[int, int], limit: int
) -> list[Upcoming]:
    """Return jobs of one root; none of one that is gone or cannot be opened."""
    slept = key not in kernel.trees
    try:
        tree = await kernel.host.open_root(key, create=False)
        with tree.visitor():
            rows = upcoming(tree, until, after, limit)
    except NotFound:
        return []
    except (StorageError, UsageError, CapacityError) as error:
        kernel.report("root", None, error, name=f"{key.class_name}/{key.name}")
        return []
    if slept and tree.idle:
        kernel.host.evict_root(tree)
    return rows


def upcoming(
    tree: Tree, until: int, after: tuple[int, int], limit: int
) -> list[Upcoming]:
    """Return what an open tree owes until then, the earliest first."""
    found = tree.db.execute(_DUE, (until, *after, limit))
    rows = [OwedRow(*row) for row in found]
    paths = {slot: tree.path_of(slot) for slot in {row.owner for row in rows}}
    return [explain(row, paths[row.owner]) for row in rows]
