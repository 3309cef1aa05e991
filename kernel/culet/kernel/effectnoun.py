"""`self.effects`: what one agent does outside; see `effects` for how it is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, final

import msgspec

from .calls import UNENCODABLE
from .core.effects import POLICIES, Policy, Status, Verdict
from .core.limits import EFFECT_KEY_MAX, NAME_MAX
from .core.run import input_digest, shape_preview, steady_json
from .effectrows import Effect, Wanted
from .errors import UsageError
from .node import Node, ambient

Fn = Callable[..., Any]
Listed = list[Effect]  # in the class below `list` is a method
_UNSET: Final = msgspec.UNSET


@final
class EffectsNoun:
    """What one agent does outside, and what became of it."""

    __slots__ = ("_node",)

    def __init__(self, node: Node) -> None:
        self._node = node

    async def call(
        self,
        name: str,
        fn: Fn,
        *args: Any,
        key: str,
        on_uncertain: Policy = "ask",
        check: Fn | None = None,
    ) -> Any:
        """Do something outside once, and return its recorded result, a JSON value.

        `fn(*args)` is called when the intent is durable; its code gives the other side
        `current_effect().token`. What it returns, or raises, is the outcome, for good:
        asked again under the same name and key, in this life or a later one, this returns
        the same without a call. Whoever asks meanwhile waits for the one at work.

        `on_uncertain` says what is done when nobody knows whether it was carried out:
        `ask` waits until somebody decides (`resolve`), `repeat` calls `fn` again under the
        same token, `check` calls `check(*args)`, which returns `Done(result)`, `NotDone()`
        or None (it cannot tell: then it is asked), `fail` raises.

        Raises `EffectFailed` with what `fn` raised; `EffectUncertain` under `fail`;
        `UsageError` for a key that was used with other arguments; `CapacityError` when
        too many are open or recorded: then nothing was done.
        """
        if on_uncertain not in POLICIES:
            msg = f"on_uncertain is one of {sorted(POLICIES)}, not {on_uncertain!r}"
            raise UsageError(msg)
        if (check is not None) != (on_uncertain == "check"):
            msg = "a check function belongs to on_uncertain='check', and the other way round"
            raise UsageError(msg)
        _check_text("name", name, NAME_MAX)
        _check_text("key", key, EFFECT_KEY_MAX)
        node, here = self._node, ambient.get()
        asker = None if here is None or here.node is not node else here.asker
        digest, preview = _digest(args, node.tree.kernel.limits.preview_bytes)
        wanted = Wanted("call", name, key, digest, on_uncertain, asker, None, preview)
        return await node.tree.effects.call(
            node, wanted, lambda: fn(*args),
            None if check is None else lambda: check(*args),
        )  # fmt: skip

    def get(self, effect_id: str) -> Effect | None:
        """Return one effect."""
        return self._node.tree.effects.get(self._node.slot, effect_id)

    def find(self, name: str, key: str) -> Effect | None:
        """Return the effect that `call` has begun under that name and key."""
        effects = self._node.tree.effects
        row = effects.rows.find(self._node.slot, Wanted("call", name, key, "", "ask"))
        return None if row is None else effects.shown(row)

    def list(
        self,
        *,
        uncertain: bool | None = None,
        status: Status | None = None,
        name: str | None = None,
        limit: int | None = None,
        after: str | None = None,
        below: bool = False,
    ) -> Listed:
        """Return effects, tool calls included, in the order in which they were begun.

        `uncertain=True`: those of which nobody knows whether they were carried out. At
        most `limits.due_rows` at once; go on with the id of the last one as `after`.
        `below`: those of all agents below as well, each with its `path`; their agent
        decides about them.
        """
        node = self._node
        return node.tree.effects.all(
            node.slot, uncertain=uncertain, status=status, name=name, limit=limit,
            after=after, below=below,
        )  # fmt: skip

    def resolve(
        self,
        effect_id: str,
        *,
        result: Any = _UNSET,
        error: str | None = None,
        repeat: bool = False,
        unknown: bool = False,
    ) -> bool:
        """Decide about an effect of which nobody knows whether it was carried out.

        It was, with this `result`; or it failed, with this `error`; or it may be done
        again (`repeat`); or it stays `unknown`. Whoever waits for it goes on. False where
        there is nothing to decide: an outcome stands, it is at work, there is no such
        effect, or nobody would repeat it (a tool call whose turn is over).
        """
        given: dict[Verdict, bool] = {
            "result": result is not _UNSET,
            "error": error is not None,
            "repeat": repeat,
            "unknown": unknown,
        }
        chosen = [verdict for verdict, is_given in given.items() if is_given]
        if len(chosen) != 1:
            msg = "resolve() takes one of result, error, repeat and unknown"
            raise UsageError(msg)
        effects = self._node.tree.effects
        value = None if result is _UNSET else result
        _text, wrong = effects.storable(value)
        if wrong is not None:
            raise UsageError(wrong)
        return effects.resolve(self._node, effect_id, chosen[0], value, error)

    def forget(
        self,
        *,
        settled_before: int | None = None,
        name: str | None = None,
        limit: int | None = None,
    ) -> int:
        """Forget outcomes, the oldest first; returns how many. Their keys are free again.

        `settled_before`: epoch ms. At most `limits.due_rows` at once.
        """
        node = self._node
        node.check()
        before = node.tree.now() + 1 if settled_before is None else settled_before
        return node.tree.effects.rows.forget(node.slot, before, name, limit)


def _check_text(what: str, value: Any, most: int) -> None:
    if not isinstance(value, str) or not value.strip() or len(value) > most:
        msg = f"the {what} of an effect is a text of 1 to {most} letters, not {value!r}"
        raise UsageError(msg)
    if not value.isprintable():
        msg = f"the {what} of an effect is printable text, not {value!r}"
        raise UsageError(msg)


def _digest(args: tuple[Any, ...], most: int) -> tuple[str, Any]:
    """Return the digest and the shape of arguments."""
    try:
        text = steady_json(args)
    except UNENCODABLE as error:
        msg = (
            f"the arguments of an effect are JSON values; let fn hold the rest: {error}"
        )
        raise UsageError(msg) from None
    return input_digest(text), shape_preview(msgspec.json.decode(text), most)
