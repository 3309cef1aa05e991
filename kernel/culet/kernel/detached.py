"""Detached runs: what their asker wants to hear of them, and how long it bears them.

Nobody waits for such a run, so its policy is stored with its row. The commit that ends
it owes the delivery of that end; a milestone that was declared owes its own when it is
stored; a bound on time or silence is a job from the first commit on. So nothing is
polled, and a crash at any place loses none of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from .calls import stored_json
from .core.job import is_number
from .core.limits import DELAY_MAX_S, NAME_MAX
from .errors import UsageError
from .plans import callback_name

if TYPE_CHECKING:
    from .node import Node
    from .tree import Tree

MILESTONES_MAX: Final = 64  # declared for one run
_SOURCE_MAX: Final = 256  # code points
_OTHERS: Final = (
    "SELECT count(*) FROM run"
    " WHERE owner = ? AND status = 'running' AND detached IS NOT NULL"
)


class Detached(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a run that nobody waits for is followed.

    `on_finish` names an async method of the asker, called with the run when it has ended;
    it is looked up then. `notify` lets a chat agent's model take a turn about it instead
    (a text is the message's `source`). After `max_budget_s` seconds, or `no_progress_s`
    without a word once it has said one, the run is given up: `interrupted`. The asker hears
    of each of `milestones` once, in its `on_progress`; a chat agent also narrates it to its
    clients, or lets its model `react` to it.
    """

    on_finish: str | None = None
    max_budget_s: float | None = None
    no_progress_s: float | None = None
    notify: bool | str = False
    milestones: Sequence[str] = ()
    milestone_mode: Literal["narrate", "react"] = "narrate"


def checked(node: Node, detached: bool | Detached) -> Detached | None:
    """Return the policy as it is stored; None: the caller waits.

    Raises `UsageError` for one that could not be kept.
    """
    if not isinstance(detached, Detached):
        return Detached() if detached else None
    if detached.on_finish is not None:
        name = callback_name(node, detached.on_finish, arguments=1)
        detached = msgspec.structs.replace(detached, on_finish=name)
    for name in ("max_budget_s", "no_progress_s"):
        value = getattr(detached, name)
        if value is not None and not (is_number(value) and 0 < value <= DELAY_MAX_S):
            msg = f"{name} is a positive number of seconds, not {value!r}"
            raise UsageError(msg)
    _check_notify(node, detached)
    return msgspec.structs.replace(detached, milestones=_names(detached))


def _check_notify(node: Node, policy: Detached) -> None:
    notify = policy.notify
    if not isinstance(notify, bool | str) or len(str(notify)) > _SOURCE_MAX:
        msg = f"notify is True or a short text, the source, not {notify!r:.200}"
        raise UsageError(msg)
    if notify and policy.on_finish is None and not node.kind.takes_notice:
        msg = f"{node.kind.name} has no chat that could be notified: use on_finish"
        raise UsageError(msg)


def _names(policy: Detached) -> tuple[str, ...]:
    names = policy.milestones
    if policy.milestone_mode not in ("narrate", "react"):
        msg = f"milestone_mode is narrate or react, not {policy.milestone_mode!r}"
        raise UsageError(msg)
    if isinstance(names, str) or not all(map(is_milestone, names)):
        msg = f"milestones are names, not {names!r:.200}"
        raise UsageError(msg)
    names = tuple(dict.fromkeys(names))
    if len(names) > MILESTONES_MAX:
        msg = f"{len(names)} milestones are declared, the limit is {MILESTONES_MAX}"
        raise UsageError(msg)
    return names


def is_milestone(name: object) -> bool:
    """Whether it can be the name of a milestone: a short text."""
    return isinstance(name, str) and 0 < len(name) <= NAME_MAX


def stored(text: str | None) -> Detached | None:
    """Return the policy that a row holds; None: somebody waits for that run.

    One that cannot be read is one that asks for nothing.
    """
    if text is None:
        return None
    try:
        return msgspec.convert(stored_json(text), Detached)
    except (msgspec.ValidationError, TypeError):
        return Detached()


def arm(tree: Tree, owner: str, run_id: str, policy: Detached, now: int) -> None:
    """Owe the looks at its bounds; inside the commit that writes its row.

    The look at its silence has a key, which tells it from the one at its budget.
    """
    if policy.max_budget_s is not None:
        budget_later(tree, owner, run_id, now, policy.max_budget_s)
    if policy.no_progress_s is not None:
        look_later(tree, owner, run_id, now + int(policy.no_progress_s * 1000))


def budget_later(
    tree: Tree, owner: str, run_id: str, now: int, budget_s: float
) -> None:
    """Owe a look at a run when a budget that begins now is over; in a transaction."""
    due = now + int(budget_s * 1000)
    tree.jobs.add(owner, "limit", run_id, at=due, lane=f"limit:{run_id}")


def look_later(tree: Tree, owner: str, run_id: str, due: int) -> None:
    """Owe a look at the silence of a run; inside the caller's transaction."""
    key = f"silence:{run_id}"
    tree.jobs.add(owner, "limit", run_id, at=due, lane=f"limit:{run_id}", key=key)


def count(tree: Tree, owner: str) -> int:
    """Return how many detached runs of that agent go on."""
    return int(tree.db.execute(_OTHERS, (owner,))[0][0])
