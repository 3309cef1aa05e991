"""Names that the dynamic agents had before they were called so; they still work.

Each is made from one table and does what its new verb does, with a warning. They will
go when nobody uses them any more.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Final

VERBS: Final = {
    "sub_agent": "get",
    "has_sub_agent": "has",
    "list_sub_agents": "list",
    "abort_sub_agent": "abort",
    "delete_sub_agent": "delete",
}
"""The old name, on the agent itself, and the verb of `dynamic_agents`."""


def delegates() -> dict[str, Callable[..., Any]]:
    """Return the methods that an agent class gets, by name."""
    return {old: _delegate(old, new) for old, new in VERBS.items()}


def _delegate(old: str, new: str) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **options: Any) -> Any:
        warnings.warn(
            f"{old} is deprecated: use self.dynamic_agents.{new}",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(self.dynamic_agents, new)(*args, **options)

    call.__name__ = old
    call.__qualname__ = f"Agent.{old}"
    call.__doc__ = f"Do what `dynamic_agents.{new}` does; deprecated."
    return call
