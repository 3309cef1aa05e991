"""Effects against an outside that counts: nothing is done more often than was allowed.

Callers want effects under every policy, leave, decide; the process dies between rules and
in the middle of a commit. Every intent that the outside has seen is in the ledger, every
doubt is listed, and an outcome that was told stands, for whoever asks again.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Any, ClassVar, Final

import trio
import trio.testing
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from culet.kernel import Agent, Done, Effect, Limits, NotDone, current_effect
from culet.kernel.errors import (
    ChildDidNotStop,
    CuletError,
    EffectFailed,
    EffectUncertain,
)
from culet.kernel.testing import open_test_kernel
from machines.guest import TrioMachine
from machines.sometimes import Sometimes

ME = ("Till", "a")
MOST: Final = 3  # attempts under `repeat`
POLICIES: Final = ("ask", "repeat", "check", "fail")
KEYS = st.sampled_from([f"{how}-{n}" for how in POLICIES for n in "ab"])
VERDICTS: Final[dict[str, dict[str, Any]]] = {
    "result": {"result": "by hand"},
    "error": {"error": "by hand"},
    "repeat": {"repeat": True},
    "unknown": {"unknown": True},
}


class World:
    """The outside, over all lives."""

    def __init__(self) -> None:
        self.done: Counter[str] = Counter()  # by token
        self.allowed: Counter[str] = Counter()  # repeats, by those who decide
        self.keys: dict[str, str] = {}  # token -> key
        self.how: dict[str, tuple[float, str]] = {}  # key -> how it goes

    def most(self, token: str) -> int:
        """Return how often it may have been done by now."""
        repeats = MOST if self.keys[token].startswith("repeat") else 1
        return repeats + self.allowed[token]


class Till(Agent):
    world: ClassVar[World] = World()

    async def want(self, key: str) -> Any:
        how = key.partition("-")[0]
        return await self.effects.call(
            "pay", self._pay, key, key=key, on_uncertain=how,  # type: ignore[arg-type]
            check=self._check if how == "check" else None,
        )  # fmt: skip

    async def _pay(self, key: str) -> str:
        here = current_effect()
        assert here is not None
        world = self.world
        assert world.keys.setdefault(here.token, key) == key, "one token for two keys"
        world.done[here.token] += 1
        seconds, end = world.how[key]
        await trio.sleep(seconds)
        if end == "raises":
            raise ValueError("planned")
        if end == "unsure":
            raise EffectUncertain("planned")
        return f"paid {key}"

    async def _check(self, key: str) -> Done | NotDone | None:
        here = current_effect()
        assert here is not None
        await trio.sleep(0.5)
        if self.world.how[key][1] == "unsure":
            return None
        return Done(f"found {key}") if self.world.done[here.token] else NotDone()


class EffectMachine(TrioMachine):
    """See the module's text."""

    sometimes: ClassVar = Sometimes(
        "completed", "failed", "in doubt", "asked", "repeated", "found by a check",
        "given up", "joined", "left", "decided", "granted", "crashed",
        "died in a commit", "told again",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.world = Till.world = World()
        self.told: dict[str, Any] = {}  # key -> outcome that somebody heard
        self.callers: list[trio.CancelScope] = []
        self.over = trio.Event()
        self.do(self._open)

    async def _open(self) -> None:
        opened = trio.Event()

        async def keep() -> None:
            with suppress(ChildDidNotStop):
                async with open_test_kernel(
                    roots=[Till], limits=Limits(effect_attempts=MOST)
                ) as self.test:
                    opened.set()
                    await self.over.wait()

        self.nursery.start_soon(keep)
        await opened.wait()

    async def _agent(self) -> Till:
        await self.test.kernel.get_agent(Till, "a")
        node = self.test.find([ME])
        assert node is not None
        assert isinstance(node.agent, Till)
        return node.agent

    # ---- rules

    @rule(
        key=KEYS,
        seconds=st.sampled_from([0.0, 2.0, 20.0]),
        end=st.sampled_from(["returns", "returns", "raises", "unsure"]),
    )
    def want(self, key: str, seconds: float, end: str) -> None:
        """Somebody wants an effect, and hears of its outcome when that is durable."""

        async def ask() -> None:
            me = await self._agent()
            self.world.how.setdefault(key, (seconds, end))
            found = me.effects.find("pay", key)
            if found is not None and not found.uncertain:
                self.sometimes.hit("joined", found.status == "begun")
            self.nursery.start_soon(self._call, me, key)

        self.do(ask)

    async def _call(self, me: Till, key: str) -> None:
        with trio.CancelScope() as scope, suppress(CuletError):
            self.callers.append(scope)
            try:
                outcome: Any = await me.want(key)
            except EffectFailed as error:
                outcome = ("failed", str(error))
            except EffectUncertain:
                assert key.startswith("fail") or self._has(me, key, "unknown")
                self.sometimes.hit("given up")
                return
            await me.durable()
            before = self.told.setdefault(key, outcome)
            assert before == outcome, f"{key}: told {before}, now {outcome}"
            self.sometimes.hit("found by a check", outcome == f"found {key}")

    def _has(self, me: Till, key: str, status: str) -> bool:
        found = me.effects.find("pay", key)
        return found is not None and found.status == status

    @rule(choice=st.floats(0, 1, exclude_max=True))
    def leave(self, choice: float) -> None:
        """Somebody leaves, in the middle of it perhaps."""

        async def cut() -> None:
            if self.callers:
                self.callers.pop(int(choice * len(self.callers))).cancel()
                self.sometimes.hit("left")

        self.do(cut)

    @rule(
        choice=st.floats(0, 1, exclude_max=True),
        verdict=st.sampled_from(sorted(VERDICTS)),
    )
    def decide(self, choice: float, verdict: str) -> None:
        """Somebody decides about a doubt."""

        async def ask() -> None:
            me = await self._agent()
            doubts = me.effects.list(uncertain=True)
            if not doubts:
                return
            one = doubts[int(choice * len(doubts))]
            if verdict == "repeat":
                self.world.allowed[one.token] += 1
            assert me.effects.resolve(one.id, **VERDICTS[verdict])
            self.sometimes.hit("granted" if verdict == "repeat" else "decided")

        self.do(ask)

    @rule(seconds=st.sampled_from([0.0, 1.0, 5.0, 60.0]))
    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.do(self.test.advance, seconds)

    @rule()
    def crash(self) -> None:
        """Die between two rules."""
        self.do(self._live_again)

    @rule(commits=st.integers(0, 5), key=KEYS, decided=st.booleans())
    def die(self, commits: int, key: str, decided: bool) -> None:
        """Die in the middle of something."""

        async def ask() -> None:
            me = await self._agent()
            self.world.how.setdefault(key, (1.0, "returns"))
            self.test.faults.die_after(commits)
            self.nursery.start_soon(self._call, me, key)
            with trio.move_on_after(3), suppress(CuletError):
                doubts = me.effects.list(uncertain=True)
                if decided and doubts:
                    self.world.allowed[doubts[0].token] += 1
                    me.effects.resolve(doubts[0].id, repeat=True)
                await trio.sleep(2)
                await me.durable()
            self.sometimes.hit("died in a commit", self.test.faults.dead)
            self.test.faults.heal()

        self.clock.autojump_threshold = 0
        try:
            self.do(ask)
        finally:
            self.clock.autojump_threshold = float("inf")
        self.do(self._live_again)

    async def _live_again(self) -> None:
        await self.test.crash()
        for scope in self.callers:
            scope.cancel()
        self.callers.clear()
        await self.test.reopen()
        self.sometimes.hit("crashed")
        me = await self._agent()
        for key, outcome in self.told.items():
            found = me.effects.find("pay", key)
            assert found is not None
            assert shown(found) == outcome, f"{key} was {outcome}, is {found}"
            self.sometimes.hit("told again")

    # ---- what must hold

    @invariant()
    def holds_true(self) -> None:
        """Compare the ledger with the outside."""
        self.do(self._look)

    async def _look(self) -> None:
        me = await self._agent()
        await trio.testing.wait_all_tasks_blocked()
        rows = {e.token: e for e in me.effects.list()}
        listed = {e.token for e in me.effects.list(uncertain=True)}
        live = {r for r in me._node.tree.effects.live}  # noqa: C416  # a copy
        for token, times in self.world.done.items():
            assert token in rows, (
                f"{self.world.keys[token]} was done, no intent is there"
            )
            assert times <= self.world.most(token), (
                f"{rows[token]} was done {times} times"
            )
            self.sometimes.hit("repeated", times > 1)
        for token, row in rows.items():
            over = row.status in ("completed", "error")
            at_work = row.status == "begun" and int(row.id) in live
            assert (token in listed) == (not over and not at_work), row
            self.sometimes.hit("in doubt", token in listed)
            self.sometimes.hit("asked", row.status == "asked")
            self.sometimes.hit("completed", row.status == "completed")
            self.sometimes.hit("failed", row.status == "error")

    def teardown(self) -> None:
        """Everything can be decided, and then nothing is in doubt."""
        try:
            if self._end is None:
                self.do(self.test.advance, 600.0)
                self.do(self._look)
                self.do(self._decided)
        finally:
            self.over.set()
            super().teardown()

    async def _decided(self) -> None:
        me = await self._agent()
        for doubt in me.effects.list(uncertain=True):
            assert me.effects.resolve(doubt.id, result="over")
        assert me.effects.list(uncertain=True) == []
        for scope in self.callers:
            scope.cancel()


def shown(effect: Effect) -> Any:
    """Return the outcome as a caller hears it."""
    if effect.status == "error":
        return ("failed", effect.error)
    return effect.result if effect.status == "completed" else effect.status
