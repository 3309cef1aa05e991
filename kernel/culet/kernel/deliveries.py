"""What agents are still to be told of their runs: listed, and tried again when asked to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from .calls import stored_json
from .core.job import job_number

if TYPE_CHECKING:
    from .tree import Tree

_OWED: Final = (
    "owner = ? AND kind IN ('hook', 'deliver') AND (?2 IS NULL OR what = ?2)"
    " ORDER BY id LIMIT ?3"
)
_AGAIN: Final = (
    "UPDATE job SET dead = 0, attempts = 0, due_at = ? WHERE id = ? AND owner = ?"
    " AND kind IN ('hook', 'deliver') AND dead = 1 RETURNING lane"
)


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that an agent is owed to hear about a run.

    `what` is `hook` (on_agent_tool_finish), `end` (of a detached run) or `milestone`, which
    has a name then. `attempts` have failed or are under way, the last with `error`; a
    `dead` one is not tried again by itself. `due_at` is epoch milliseconds.
    """

    id: str
    run_id: str
    what: Literal["hook", "end", "milestone"]
    milestone: str | None = None
    attempts: int = 0
    due_at: int = 0
    dead: bool = False
    error: str | None = None


def listed(tree: Tree, owner: str, run_id: str | None) -> list[Delivery]:
    """Return what that agent is to be told, oldest first; at most `limits.due_rows`."""
    out = []
    limit = tree.kernel.limits.due_rows
    for row in tree.jobs.find(_OWED, (owner, run_id, limit)):
        name = _milestone(row.payload) if row.key is not None else None
        what: Literal["hook", "end", "milestone"] = "hook"
        if row.kind == "deliver":
            what = "end" if row.key is None else "milestone"
        told = Delivery(
            id=str(row.id), run_id=row.what, what=what, milestone=name,
            attempts=row.attempts, due_at=row.due_at, dead=bool(row.dead),
            error=row.error,
        )  # fmt: skip
        out.append(told)
    return out


def again(tree: Tree, owner: str, delivery_id: str) -> bool:
    """Make a dead delivery due with new attempts; False for one that is not dead."""
    number = job_number(delivery_id)
    if number is None:
        return False
    params = (tree.now(), number, owner)
    with tree.transaction():
        rows = tree.db.execute(_AGAIN, params)
        for (lane,) in rows:
            tree.jobs.touch(owner, str(lane))
    return bool(rows)


def _milestone(payload: str | None) -> str | None:
    told: Any = stored_json(payload)
    try:
        return str(told["progress"]["milestone"])
    except (TypeError, KeyError):
        return None
