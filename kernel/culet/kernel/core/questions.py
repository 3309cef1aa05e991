"""Who decides a question of a run: a person, or a policy of somebody above. Pure.

A tool call that waits for a person, or for a client that carries it out, is a question.
It goes up from the run that asks, through everybody that waits for it, until somebody
has a policy: `deny` refuses it at once, `auto` approves it; `bubble`, the default, lets
it go on to the next above, and at last to people. An approval can be given by a policy;
the result of a call that a client carries out cannot, so `auto` lets that one go on.

Law: `decide` is the first word that decides, and people where there is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, get_args

import msgspec

from culet.kernel.core.limits import DEFAULT, Limits
from culet.kernel.core.run import shape_preview
from culet.kernel.errors import UsageError

Policy = Literal["bubble", "deny", "auto"]
POLICIES: Final[tuple[Policy, ...]] = get_args(Policy)
Verdict = Literal["ask", "deny", "approve"]
ASKED: Final = "approval-requested"  # the state of a call that wants a yes or a no


def check_policy(policy: object) -> Policy:
    """Return it; raises `UsageError` for what is none."""
    if policy not in POLICIES:
        msg = f"questions are {', '.join(POLICIES)}, not {policy!r:.100}"
        raise UsageError(msg)
    return policy


def decide(policies: Iterable[Policy], state: str) -> Verdict:
    """Return what becomes of a question; the policies from the run that asks upwards."""
    for policy in policies:
        if policy == "deny":
            return "deny"
        if policy == "auto" and state == ASKED:
            return "approve"
    return "ask"


def shown(
    calls: Sequence[Mapping[str, Any]], limits: Limits = DEFAULT
) -> list[dict[str, Any]]:
    """Return questions as they are reported: not too many, and not too large.

    An `input` for which no room is left is told by its shape, as `inputShape`.
    """
    out: list[dict[str, Any]] = []
    left = limits.questions_bytes
    for call in calls[: limits.questions_shown]:
        told = {k: v for k, v in call.items() if k != "input"}
        left -= len(msgspec.json.encode(told))
        if left < 0:
            break
        out.append(told)
        if "input" not in call:
            continue
        key, value = "input", call["input"]
        if len(msgspec.json.encode(value)) > left:
            key, value = "inputShape", shape_preview(value, _SHAPE_BYTES)
        size = len(msgspec.json.encode(value))
        if size <= left:
            told[key] = value
            left -= size
    return out


_SHAPE_BYTES: Final = 128
