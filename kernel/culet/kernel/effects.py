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
from typing import TYPE_CHECKING, Any, NamedTuple, final

import msgspec
import trio

from .calls import UNENCODABLE, stored_json
from .core.effects import (
    FOR_GOOD,
    OPEN_TO_DOUBT,
    STATUSES,
    Done,
    Status,
    Verdict,
    after_check,
    decided,
    next_step,
)
from .core.run import error_text
from .effectrows import Effect, EffectRows, Row, Wanted
from .errors import EffectFailed, EffectUncertain, StorageError, UsageError
from .events import EffectTold
from .node import Node, ambient, is_stop

if TYPE_CHECKING:
    from .tree import Tree
    from .turn import Turn


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
        # older jobs have begun what no row has
        self.since = int(rows[0][0]) if rows else 0

    # ---- reading

    def shown(self, row: Row) -> Effect:
        """Return the public record of a row."""
        return row.shown(row.born in self.live)

    def get(self, owner: str, effect_id: str) -> Effect | None:
        """Return one effect."""
        row = self.rows.get(owner, effect_id)
        return None if row is None else self.shown(row)

    def all(
        self,
        owner: str,
        *,
        uncertain: bool | None = None,
        status: Status | None = None,
        name: str | None = None,
        limit: int | None = None,
        after: str | None = None,
        below: bool = False,
    ) -> list[Effect]:
        """Return effects; see `EffectsNoun.list` (effectnoun)."""
        if status is not None and status not in STATUSES:
            msg = f"{status!r} is no status of an effect"
            raise UsageError(msg)
        without: list[int] = []
        statuses: frozenset[str] | None = (
            None if status is None else frozenset({status})
        )
        if uncertain is not None:
            some = OPEN_TO_DOUBT if uncertain else FOR_GOOD
            statuses = some if statuses is None else statuses & some
            without = [*self.live] if uncertain else []
        rows = self.rows.all(owner, statuses, name, without, limit, after, below)
        if not below:
            return [self.shown(row) for row in rows]
        paths = {slot: self.tree.path_of(slot) for slot in {row.owner for row in rows}}
        return [row.shown(row.born in self.live, paths[row.owner]) for row in rows]

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
                said = error_text(error)
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
        try:
            if turn is None:
                await news.wait()
            else:
                await self._parked(node, turn, row, news)
        finally:
            if not news.statistics().tasks_waiting and self._news.get(row.born) is news:
                del self._news[row.born]

    async def _parked(self, node: Node, turn: Turn, row: Row, news: trio.Event) -> None:
        """Wait in a turn: its silence says nothing meanwhile."""
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


async def _value(given: Any) -> Any:
    return await given if inspect.isawaitable(given) else given


def _outcome(row: Row) -> Any:
    """Return a recorded result, or raise the recorded error."""
    if row.status == "error":
        raise EffectFailed(row.error or "it failed", str(row.born))
    return stored_json(row.result)
