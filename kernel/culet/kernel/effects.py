"""Effects: what an agent does outside, so that a crash leaves no doubt unlisted.

The intent is durable before the function is called; the outcome is one commit, in the
very step in which the function returns, so it stands together with what the function
wrote last. Whoever asks for a known one gets the recorded outcome. Where the process, or
the code alone, ended in between, the policy decides (`core.effects`), and the effect is
listed as uncertain until there is an outcome.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

import msgspec
import trio

from .calls import UNENCODABLE, stored_json
from .core.effects import (
    FOR_GOOD,
    OPEN_TO_DOUBT,
    POLICIES,
    Done,
    Policy,
    Status,
    Verdict,
    after_check,
    decided,
    next_step,
)
from .core.limits import EFFECT_KEY_MAX, NAME_MAX
from .core.run import input_digest, shape_preview
from .effectrows import Effect, EffectRows, Row, Wanted
from .errors import EffectFailed, EffectUncertain, StorageError, UsageError
from .events import EffectTold
from .node import Node, ambient, is_stop

if TYPE_CHECKING:
    from .tree import Tree

Fn = Callable[..., Any]
Listed = list[Effect]  # in the noun below `list` is a method
_UNSET: Final = msgspec.UNSET


class EffectContext(NamedTuple):
    """The effect that this code is doing: what to give the other side.

    `token` is the same in every attempt, and another one for every other effect;
    `attempt` counts from 1. `run_id` and `tool_call_id` are of the turn, where there is
    one.
    """

    token: str
    attempt: int
    name: str
    key: str
    run_id: str | None = None
    tool_call_id: str | None = None


_doing: ContextVar[EffectContext | None] = ContextVar("culet_effect", default=None)


def current_effect() -> EffectContext | None:
    """Return the effect that this code is doing; None outside of one."""
    return _doing.get()


@final
class Effects:
    """The effects of one tree."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.rows = EffectRows(tree)
        self.live: dict[int, trio.Event] = {}  # at work in this process
        self._news: dict[int, trio.Event] = {}  # waited for: a decision
        sql = "SELECT value FROM meta WHERE key = 'effects_after'"
        rows = tree.db.execute(sql)
        self.since = (
            int(rows[0][0]) if rows else 0
        )  # older jobs have begun what no row has

    # ---- reading

    def shown(self, row: Row) -> Effect:
        """Return the public record of a row."""
        return row.shown(row.born in self.live)

    def get(self, owner: str, effect_id: str) -> Effect | None:
        """Return one effect."""
        row = self.rows.get(owner, effect_id)
        return None if row is None else self.shown(row)

    # ---- the ledger, step by step: also for tool calls

    def begin(self, node: Node, wanted: Wanted, before: Row | None) -> Row:
        """Write the intent of the next attempt. It may begin when that is durable."""
        node.check()
        if before is None:
            row = self.rows.begin(node.slot, wanted)
        else:
            row = self.rows.again(before, wanted)
        self._tell("effect:begin", row)
        return row

    @contextmanager
    def work(self, row: Row) -> Iterator[None]:
        """Do it in this block: others who want it wait, its code reads the token."""
        over = self.live[row.born] = trio.Event()
        here = ambient.get()
        turn = None if here is None else here.turn
        told = EffectContext(
            row.token, row.attempt, row.name, row.key,
            None if turn is None else turn.run_id, row.tool_call_id,
        )  # fmt: skip
        token = _doing.set(told)
        try:
            yield
        finally:
            _doing.reset(token)
            if self.live.get(row.born) is over:
                del self.live[row.born]
            over.set()

    def settle(
        self,
        row: Row,
        status: Status,
        *,
        result: str | None = None,
        error: str | None = None,
    ) -> bool:
        """Write an outcome, a result as JSON; False when one stands already."""
        won = self.rows.move(row, status, result=result, error=error)
        if won:
            self._tell("effect:end", row._replace(status=status))
            self._wake(row.born)
        return won

    def ask(self, row: Row) -> None:
        """Write that a person is to decide."""
        self.rows.move(row, "asked")
        self._tell("effect:uncertain", row._replace(status="asked"))

    def grant(self, row: Row) -> None:
        """Write that somebody decided that it may be done again."""
        self.rows.move(row, "granted")
        self._wake(row.born)

    async def inquire(self, node: Node, row: Row, check: Callable[[], Any]) -> object:
        """Call an author's check; None where it fails or takes too long."""
        token = _doing.set(EffectContext(row.token, row.attempt, row.name, row.key))
        try:
            with trio.fail_after(self.tree.kernel.limits.effect_check_s):
                return await _value(check())
        except BaseException as error:
            if is_stop(error):
                raise
            node.check()  # it was stopped: that says nothing of the effect
            self.tree.kernel.report("effect", node, error, name=row.name)
            return None
        finally:
            _doing.reset(token)

    # ---- calls

    async def call(
        self,
        node: Node,
        wanted: Wanted,
        fn: Callable[[], Any],
        check: Callable[[], Any] | None,
    ) -> Any:
        """Return the outcome of an effect, doing it if need be."""
        limits, tries, rested = self.tree.kernel.limits, 0, 0
        while True:
            node.check()
            row = self.rows.find(node.slot, wanted)
            if row is None:
                tries += 1
                await self._run(node, wanted, None, fn)
                continue
            if row.digest != wanted.digest:
                msg = f"effect {row.name!r} {row.key!r} was begun with other arguments"
                raise UsageError(msg)
            standing = row.standing(row.born in self.live)
            step = next_step(standing, wanted.policy, most=limits.effect_attempts)
            if step.act == "check":
                assert check is not None
                found = await self.inquire(node, row, check)
                if self.rows.find(node.slot, wanted) != row or row.born in self.live:
                    continue  # somebody else was faster
                step = after_check(standing, found)
                if isinstance(found, Done):
                    self.complete(row, found.result)
                    continue
            match step.act:
                case "replay":
                    return _outcome(row)
                case "join":
                    await self.live[row.born].wait()
                case "run" if rested < tries:  # its code cannot know, so: not at once
                    pause = limits.backoff_base_s * 2**rested
                    rested = tries
                    await trio.sleep(min(pause, limits.backoff_max_s))
                case "run":
                    tries += 1
                    await self._run(node, wanted, row, fn)
                case "fail":
                    raise EffectUncertain(effect_id=str(row.born))
                case _:
                    await self._decision(node, row)

    def complete(self, row: Row, result: Any) -> None:
        """Write that it was done; what cannot be kept of its result is told as an error."""
        text, error = self.storable(result)
        self.settle(
            row, "completed" if error is None else "error", result=text, error=error
        )

    async def _run(
        self, node: Node, wanted: Wanted, before: Row | None, fn: Callable[[], Any]
    ) -> None:
        """Do it once; whatever comes of it is in the row."""
        row = self.begin(node, wanted, before)
        with self.work(row):
            await self.durable(node, [(row, before)])
            try:
                result = await _value(fn())
            except EffectUncertain:
                return  # its own word: the policy says what follows
            except BaseException as error:
                if is_stop(error):
                    raise
                node.check()  # it was stopped in the middle: nobody knows
                said = f"{type(error).__name__}: {error}"
                self.settle(row, "error", error=said)
                raise EffectFailed(said, str(row.born)) from error
            node.check()
            self.complete(row, result)

    async def durable(self, node: Node, begun: list[tuple[Row, Row | None]]) -> None:
        """Wait until intents are durable; who leaves before that has not begun them."""
        try:
            await self.tree.durable()
            node.check()
        except BaseException:
            if not self.tree.closed and self.tree.barrier.fenced is None:
                with suppress(StorageError):
                    for row, before in begun:
                        self.rows.withdraw(row, before)
            raise

    def storable(self, result: Any) -> tuple[str | None, str | None]:
        """Return a result as JSON, or why it cannot be kept."""
        try:
            text = None if result is None else msgspec.json.encode(result)
        except UNENCODABLE as error:
            return None, f"its result is no JSON value: {error}"
        most = self.tree.kernel.limits.effect_bytes
        if text is not None and len(text) > most:
            return None, f"its result has {len(text)} bytes, at most {most} are kept"
        return None if text is None else text.decode(), None

    async def _decision(self, node: Node, row: Row) -> None:
        """Wait until somebody has decided; a turn says that it waits."""
        if row.status != "asked":
            self.ask(row)
        news = self._news.setdefault(row.born, trio.Event())
        here = ambient.get()
        turn = None if here is None or here.node is not node else here.turn
        if turn is None:
            await news.wait()
            return
        turn.park()
        try:
            data = {
                "effects": [{"id": str(row.born), "name": row.name, "key": row.key}]
            }
            await node.agent.report_progress(
                phase="waiting", message="waits for a decision", data=data
            )
            await news.wait()
            await node.agent.report_progress(phase="answered")
        finally:
            turn.parked = False

    # ---- deciding

    def resolve(
        self,
        node: Node,
        effect_id: str,
        verdict: Verdict,
        value: Any,
        error: str | None,
    ) -> bool:
        """Write a decision: one step. False where there is no doubt to decide."""
        node.check()
        row = self.rows.get(node.slot, effect_id)
        if row is None:
            return False
        status = decided(row.standing(row.born in self.live), verdict)
        if status is None:
            return False
        if row.kind == "tool":
            waits = node.agent._effect_decided(row, verdict, value, error)
            if not waits and verdict == "repeat":
                return False  # nobody would do it
        if status == "granted":
            self.grant(row)
            return True
        text, _wrong = self.storable(value)
        return self.settle(row, status, result=text, error=error)

    def _wake(self, born: int) -> None:
        news = self._news.pop(born, None)
        if news is not None:
            news.set()

    def _tell(self, channel: str, row: Row) -> None:
        if self.tree.kernel.heard:
            told = EffectTold(str(row.born), row.name, row.key, row.attempt, row.status)
            self.tree.emit(channel, row.owner, told)


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
    ) -> Listed:
        """Return effects, tool calls included, in the order in which they were begun.

        `uncertain=True`: those of which nobody knows whether they were carried out. At
        most `limits.due_rows` at once; go on with the id of the last one as `after`.
        """
        effects, without = self._node.tree.effects, []
        statuses: frozenset[str] | None = (
            None if status is None else frozenset({status})
        )
        if uncertain is not None:
            some = OPEN_TO_DOUBT if uncertain else FOR_GOOD
            statuses = some if statuses is None else statuses & some
            without = [*effects.live] if uncertain else []
        rows = effects.rows.all(self._node.slot, statuses, name, without, limit, after)
        return [effects.shown(row) for row in rows]

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
        given = (result is not _UNSET, error is not None, repeat, unknown)
        verdicts: tuple[Verdict, ...] = ("result", "error", "repeat", "unknown")
        chosen = [v for v, is_given in zip(verdicts, given, strict=True) if is_given]
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


async def _value(given: Any) -> Any:
    return await given if inspect.isawaitable(given) else given


def _outcome(row: Row) -> Any:
    """Return a recorded result, or raise the recorded error."""
    if row.status == "error":
        raise EffectFailed(row.error or "it failed", str(row.born))
    return stored_json(row.result)


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
        text = msgspec.json.encode(args)
    except UNENCODABLE as error:
        msg = (
            f"the arguments of an effect are JSON values; let fn hold the rest: {error}"
        )
        raise UsageError(msg) from None
    return input_digest(text), shape_preview(msgspec.json.decode(text), most)
