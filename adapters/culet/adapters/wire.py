"""What both providers' wire formats share: safe ids, schemas, a cut answer, arguments."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from culet.adapters.model import Json, ModelMessage, ToolCall, ToolSpec

GO_ON: Final = (
    "Your answer was cut off there. Go on exactly where it ended, without repeating"
    " anything and without a remark about this."
)
_SAFE_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,40}")


def safe_ids(messages: Iterable[ModelMessage]) -> dict[str, str]:
    """Return tool call id -> an id that every provider takes; distinct stay distinct.

    Ids may come from another provider, or from us. One that is fit is kept.
    """
    own = dict.fromkeys(c.id for message in messages for c in message.tool_calls)
    fresh = (name for n in itertools.count(1) if (name := f"call_{n}") not in own)
    return {one: one if _SAFE_ID.fullmatch(one) else next(fresh) for one in own}


def schema_of(spec: ToolSpec) -> dict[str, Json]:
    """Return a tool's parameters as both providers insist on them: an object."""
    return {"type": "object", "properties": {}, **spec.parameters}


def object_of(value: Json) -> dict[str, Json]:
    """Return a call's input as an object; what is none stands in one, so it is kept."""
    if isinstance(value, dict):
        return value
    return {} if value in (None, "") else {"input": value}


class Asked:
    """A tool call whose arguments are still arriving."""

    def __init__(self, call_id: str = "", name: str = "") -> None:
        self.id, self.name = call_id, name
        self.arguments: list[str] = []

    @property
    def whole(self) -> bool:
        """Whether the arguments are JSON as they stand."""
        try:
            msgspec.json.decode("".join(self.arguments))
        except (msgspec.DecodeError, RecursionError):
            return False
        return True

    def call(self, *, cut: bool) -> ToolCall | None:
        """Return the call. `cut`: the answer ended at its limit, so this may be half.

        A half one is None: nobody asked for that. Arguments that are no JSON otherwise
        are handed on as text.
        """
        text = "".join(self.arguments).strip()
        value: Any = {}
        if text or cut:
            try:
                value = msgspec.json.decode(text)
            except (msgspec.DecodeError, RecursionError):
                if cut:
                    return None
                value = text
        return ToolCall(id=self.id, name=self.name, input=value)
