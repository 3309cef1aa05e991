"""An agent's own SQL: rows, and transactions that cannot be left open over an await."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Final, final

import trio

from .errors import UsageError

if TYPE_CHECKING:
    from .node import Node


class Row(tuple[Any, ...]):
    """One row of a result: by index, `row["name"]` and `row.name`. Immutable."""

    __slots__ = ()
    _columns: ClassVar[Mapping[str, int]] = MappingProxyType({})

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return tuple.__getitem__(self, self._columns[key])
        return tuple.__getitem__(self, key)

    def __getattr__(self, name: str) -> Any:
        try:
            return tuple.__getitem__(self, self._columns[name])
        except KeyError:
            raise AttributeError(name) from None

    def keys(self) -> list[str]:
        """Return the column names."""
        return list(self._columns)


_made: dict[tuple[str, ...], type[Row]] = {}
_MADE_MAX: Final = 1_000


def rows(columns: tuple[str, ...], values: list[tuple[Any, ...]]) -> list[Row]:
    """Return the rows of a result; one small class per list of columns."""
    if not values:
        return []
    made = _made.get(columns)
    if made is None:
        if len(_made) >= _MADE_MAX:
            _made.clear()
        index = {name: at for at, name in enumerate(columns)}
        made = type("Row", (Row,), {"__slots__": (), "_columns": index})
        _made[columns] = made
    return [made(v) for v in values]


def _schedule_points(task: trio.lowlevel.Task) -> int:
    """Return trio's count of schedule points of a task: the seam is named here once."""
    return task._schedule_points


@final
class Transaction:
    """`with self.transaction():` commits at its end, rolls back on an exception.

    Leaving it after an await rolls back and raises `UsageError`.
    """

    __slots__ = ("_node", "_points", "_task")

    def __init__(self, node: Node) -> None:
        self._node = node

    def __enter__(self) -> None:
        node = self._node
        node.check()
        end_stale(node)
        self._task = trio.lowlevel.current_task()
        self._points = _schedule_points(self._task)
        node.db.user_begin()
        node.transaction = self

    def awaited(self) -> bool:
        """Whether an await has passed since it began, or another task asks."""
        task = trio.lowlevel.current_task()
        return task is not self._task or _schedule_points(task) != self._points

    def mine(self) -> bool:
        """Whether the task that began it asks."""
        return trio.lowlevel.current_task() is self._task

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        node = self._node
        awaited = self.awaited()
        commit = kind is None and not awaited and not node.fenced and node.state < 2
        try:
            if node.transaction is self:  # else another one began after an await
                node.db.user_end(commit=commit)
                if commit:
                    node.tree.touched()
        finally:
            if node.transaction is self:
                node.transaction = None
        if awaited and kind is None:
            raise UsageError(_HELD)


_HELD: Final = "transaction() was held over an await: it is rolled back"


def end_stale(node: Node) -> None:
    """Before a statement: roll back a transaction that an await has left open.

    It must not take in what another task, or the kernel, writes. Raises `UsageError`
    to the task that held it.
    """
    held = node.transaction
    if held is None or not held.awaited():
        return
    node.db.user_end(commit=False)
    if held.mine():
        raise UsageError(_HELD)
