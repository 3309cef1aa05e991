"""Effects of plain agents: once each, over crashes, with every doubt listed."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any, ClassVar

import pytest
import trio

from culet.kernel import (
    Agent,
    Chunk,
    Done,
    Effect,
    EffectContext,
    Limits,
    NotDone,
    Turn,
    current_effect,
)
from culet.kernel.errors import (
    CapacityError,
    CuletError,
    EffectFailed,
    EffectUncertain,
    FacetAborted,
    StorageError,
    UsageError,
)
from culet.kernel.testing import Harness, open_test_kernel
from kernel.agents import agent_at


class Bank:
    """The other side: what each token came with, and doors to wait at."""

    def __init__(self) -> None:
        self.asked: list[EffectContext] = []
        self.shut: trio.Event | None = None
        self.says: Any = None  # of a check
        self.checks = 0

    def tokens(self) -> Counter[str]:
        return Counter(c.token for c in self.asked)

    async def pay(self, n: int) -> Any:
        here = current_effect()
        assert here is not None
        self.asked.append(here)
        if self.shut is not None:
            await self.shut.wait()
        if n < 0:
            raise ValueError("not that")
        if n == 404:
            raise EffectUncertain("no answer came")
        return {"paid": n}

    async def check(self, n: int) -> Any:
        self.checks += 1
        assert current_effect() is not None
        if isinstance(self.says, Exception):
            raise self.says
        if self.says == "slow":
            await trio.sleep(10_000)
        return self.says


BANK = Bank()


@pytest.fixture(autouse=True)
def bank() -> Iterator[None]:
    BANK.__init__()  # type: ignore[misc]
    yield


class Shop(Agent):
    async def buy(self, n: int, key: str, how: str = "ask") -> Any:
        check = BANK.check if how == "check" else None
        return await self.effects.call(
            "pay", BANK.pay, n, key=key, on_uncertain=how, check=check  # type: ignore[arg-type]
        )  # fmt: skip

    async def walk(self, key: str) -> Any:
        """Buy in a fiber, and begin it again when it is recovered."""
        return await self.run_fiber("walk", lambda: self.buy(1, key))


class Desk(Agent):
    resumable = True

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        turn.output = await self.effects.call("pay", BANK.pay, 5, key="t")
        yield {"type": "text-delta", "id": "t", "delta": "paid"}


class Top(Shop):
    seen: ClassVar[list[Any]] = []

    async def desk(self) -> Any:
        run = await self.run_agent_tool(Desk, None, run_id="r")
        return run.output

    async def on_progress(self, run: Any, progress: Any) -> None:
        self.seen.append(progress)


def opened(**options: Any) -> Any:
    return open_test_kernel(roots=[Top], facets=[Shop, Desk], **options)


async def top(test: Harness) -> Any:
    await test.kernel.get_agent(Top, "a")
    return agent_at(test)


async def begun_and_dead(test: Harness, how: str, n: int = 1) -> Any:
    """Begin to pay, die in the middle; return the agent of the next life."""
    me = await top(test)
    BANK.shut = trio.Event()
    async with trio.open_nursery() as nursery:

        async def ask() -> None:
            with pytest.raises(CuletError):
                await me.buy(n, "k", how)

        nursery.start_soon(ask)
        while not BANK.asked:
            await trio.sleep(0.1)
        await test.crash()
        nursery.cancel_scope.cancel()
    BANK.shut = None
    await test.reopen()
    return await top(test)


async def paid(me: Any, number: int, key: str) -> None:
    """Pay, and write so in the step in which the function returns."""

    async def pay() -> int:
        await trio.sleep(1)
        me.set_state({"paid": number})
        return number

    await me.effects.call("pay", pay, key=key)


# ---- once


async def test_an_effect_is_done_once_and_told_again_in_every_life(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        assert await me.buy(3, "k") == {"paid": 3}
        assert await me.buy(3, "k") == {"paid": 3}
        await me.durable()
        await test.crash()
        await test.reopen()
        me = await top(test)
        assert await me.buy(3, "k") == {"paid": 3}
        assert await me.buy(3, "other") == {"paid": 3}
        assert [(c.attempt, c.key) for c in BANK.asked] == [(1, "k"), (1, "other")]
        assert len(BANK.tokens()) == 2
        (one, _) = me.effects.list(status="completed")
        assert (one.name, one.key, one.uncertain) == ("pay", "k", False)
        assert one.token == BANK.asked[0].token
        assert one.result == {"paid": 3}
        assert "3" not in str(one.preview), "the input is not kept, its shape is"


async def test_the_intent_is_durable_before_the_function_is_called(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        tree = me._node.tree
        stood: list[tuple[int, int]] = []

        async def pay() -> None:
            stood.append((tree.barrier.durable, tree.barrier.count))
            rows = me.effects.list()
            assert [(e.status, e.uncertain) for e in rows] == [("begun", False)]

        await me.effects.call("pay", pay, key="k")
        assert stood[0][0] == stood[0][1]


async def test_the_outcome_is_one_step_with_what_the_function_wrote_last(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        await paid(me, 0, "k")
        await me.durable()
        # a death in any record: state and outcome are there together or not at all
        seen = set[str]()
        for number in range(1, 5):
            key = f"k{number}"
            test.faults.die_in_record(number)
            with pytest.raises(StorageError):
                await paid(me, number, key)
                await me.durable()
                raise StorageError("it lived")
            await test.crash()
            await test.reopen()
            me = await top(test)
            found = me.effects.find("pay", key)
            done = found is not None and found.status == "completed"
            assert done == (me.state["paid"] == number)
            seen.add("nothing" if found is None else found.status)
        assert seen == {"nothing", "begun", "completed"}


async def test_who_asks_meanwhile_waits_for_the_one_at_work(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        BANK.shut = trio.Event()
        told: list[Any] = []

        async def ask() -> None:
            told.append(await me.buy(1, "k"))

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(ask)
            await trio.sleep(1)
            assert me.effects.list(uncertain=True) == []
            BANK.shut.set()
        assert told == [{"paid": 1}] * 5
        assert len(BANK.asked) == 1


async def test_what_it_raises_is_its_outcome_for_good(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        for _ in range(2):
            with pytest.raises(EffectFailed, match="ValueError: not that") as told:
                await me.buy(-1, "k")
            assert me.effects.get(told.value.effect_id).status == "error"
        assert len(BANK.asked) == 1


@pytest.mark.parametrize("bad", [object(), "x" * (256 << 10), float("1e999") * 0])
async def test_a_result_that_cannot_be_kept_is_an_outcome_too(
    clock: object, bad: Any
) -> None:
    async with opened() as test:
        me = await top(test)
        calls = 0

        async def fn() -> Any:
            nonlocal calls
            calls += 1
            return bad

        for _ in range(2):
            try:
                found = await me.effects.call("odd", fn, key="k")
                assert found is None  # JSON has no NaN: msgspec writes null
            except EffectFailed as error:
                assert "its result" in str(error)
        assert calls == 1


async def test_a_plain_function_will_do(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        assert await me.effects.call("now", lambda: (1, 2), key="k") == [1, 2]
        assert await me.effects.call("now", lambda: 9, key="k") == [1, 2]


async def test_effects_of_siblings_are_their_own(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        kids = [await me.dynamic_agents.get(Shop, n) for n in "xy"]
        for kid in kids:
            await kid.buy(1, "k")
        assert len(BANK.tokens()) == 2
        assert me.effects.list() == []
        await me.dynamic_agents.delete(Shop, "x")
        rows = me._node.tree.db.execute("SELECT count(*) FROM effect")
        assert rows == [(1,)]


# ---- doubt


async def test_under_ask_it_waits_for_a_decision_and_is_not_done_again(
    clock: object,
) -> None:
    async with opened() as test:
        me = await begun_and_dead(test, "ask")
        (doubt,) = me.effects.list(uncertain=True)
        assert (doubt.status, doubt.attempt, doubt.policy) == ("begun", 1, "ask")
        told: list[Any] = []

        async def ask() -> None:
            told.append(await me.buy(1, "k"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            nursery.start_soon(ask)
            await trio.sleep(100)
            assert (told, len(BANK.asked)) == ([], 1)
            (doubt,) = me.effects.list(uncertain=True)
            assert doubt.status == "asked"
            assert me.effects.resolve(doubt.id, result={"paid": "by hand"})
        assert told == [{"paid": "by hand"}] * 2
        assert not me.effects.resolve(doubt.id, result=2), "the first one stands"
        assert me.effects.list(uncertain=True) == []
        assert len(BANK.asked) == 1


async def test_a_decision_to_repeat_does_it_once_more_under_the_same_token(
    clock: object,
) -> None:
    async with opened() as test:
        me = await begun_and_dead(test, "ask")
        (doubt,) = me.effects.list(uncertain=True)
        assert me.effects.resolve(doubt.id, repeat=True)
        assert await me.buy(1, "k") == {"paid": 1}
        assert [c.attempt for c in BANK.asked] == [1, 2]
        assert len(BANK.tokens()) == 1


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ({"error": "the bank said no"}, EffectFailed, "the bank said no"),
        ({"unknown": True}, EffectUncertain, "nobody knows"),
    ],
)
async def test_a_decision_that_it_failed_or_stays_unknown_is_raised(
    clock: object, how: Any, error: type[CuletError], text: str
) -> None:
    async with opened() as test:
        me = await begun_and_dead(test, "ask")
        (doubt,) = me.effects.list(uncertain=True)
        assert me.effects.resolve(doubt.id, **how)
        for _ in range(2):
            with pytest.raises(error, match=text):
                await me.buy(1, "k")
        assert len(BANK.asked) == 1
        still = [e.status for e in me.effects.list(uncertain=True)]
        assert still == (["unknown"] if "unknown" in how else [])


async def test_under_repeat_the_same_token_comes_again(clock: object) -> None:
    async with opened() as test:
        me = await begun_and_dead(test, "repeat")
        assert len(me.effects.list(uncertain=True)) == 1
        assert await me.buy(1, "k", "repeat") == {"paid": 1}
        assert [c.attempt for c in BANK.asked] == [1, 2]
        assert len(BANK.tokens()) == 1
        assert me.effects.list(uncertain=True) == []


async def test_under_fail_the_caller_is_told_and_it_stays_listed(
    clock: object,
) -> None:
    async with opened() as test:
        me = await begun_and_dead(test, "fail")
        for _ in range(2):
            with pytest.raises(EffectUncertain) as told:
                await me.buy(1, "k", "fail")
        (doubt,) = me.effects.list(uncertain=True)
        assert doubt.id == told.value.effect_id
        assert len(BANK.asked) == 1


@pytest.mark.limit("effect_check_s")
@pytest.mark.parametrize(
    ("says", "asked", "result"),
    [
        (Done({"paid": 8}), 1, {"paid": 8}),
        (NotDone(), 2, {"paid": 1}),
        (None, 1, None),
        (ValueError("broken"), 1, None),
        ("slow", 1, None),
    ],
)
async def test_a_check_says_what_became_of_it(
    clock: object, says: Any, asked: int, result: Any
) -> None:
    async with opened() as test:
        me = await begun_and_dead(test, "check")
        BANK.says = says
        if result is None:  # it cannot tell: a person is asked
            with trio.move_on_after(100) as scope:
                await me.buy(1, "k", "check")
            assert scope.cancelled_caught
            (doubt,) = me.effects.list(uncertain=True)
            assert doubt.status == "asked"
            BANK.says = Done(1)
            assert await me.buy(1, "k", "check") == 1, "it may know later"
        else:
            assert await me.buy(1, "k", "check") == result
        assert len(BANK.asked) == asked
        assert len(BANK.tokens()) == 1


async def test_two_who_check_at_once_do_not_do_it_twice(clock: object) -> None:
    async with opened() as test:
        me = await begun_and_dead(test, "check")
        BANK.says = NotDone()
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(me.buy, 1, "k", "check")
        assert [c.attempt for c in BANK.asked] == [1, 2]


async def test_a_function_that_cannot_know_leaves_it_to_the_policy(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        with pytest.raises(EffectUncertain):
            await me.buy(404, "f", "fail")
        assert len(BANK.asked) == 1
        start = trio.current_time()
        with trio.move_on_after(1000) as scope:
            await me.buy(404, "r", "repeat")
        assert scope.cancelled_caught, "in the end a person is asked"
        tries = [c.attempt for c in BANK.asked if c.key == "r"]
        assert tries == [1, 2, 3, 4, 5]
        assert trio.current_time() - start == 1000
        assert me.effects.find("pay", "r").status == "asked"


async def test_two_who_want_what_cannot_be_known_do_not_repeat_it_twice_as_often(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        with trio.move_on_after(1000):
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(me.buy, 404, "r", "repeat")
        assert [c.attempt for c in BANK.asked] == [1, 2, 3, 4, 5]


async def test_code_that_is_cut_off_leaves_a_doubt_not_a_loss(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        BANK.shut = trio.Event()
        with trio.move_on_after(5):
            await me.buy(1, "k")
        (doubt,) = me.effects.list(uncertain=True)
        assert (doubt.key, doubt.status) == ("k", "begun")
        BANK.shut = None
        assert me.effects.resolve(doubt.id, repeat=True)
        assert await me.buy(1, "k") == {"paid": 1}


async def test_who_gives_up_waiting_leaves_nothing_in_memory(clock: object) -> None:
    async with opened() as test:
        me = await begun_and_dead(test, "ask")
        effects = me._node.tree.effects
        told: list[Any] = []

        async def ask() -> None:
            told.append(await me.buy(1, "k"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            with trio.move_on_after(5):
                await me.buy(1, "k")
            (doubt,) = me.effects.list(uncertain=True)
            assert len(effects._news) == 1, "the other one still waits"
            assert me.effects.resolve(doubt.id, result=3)
        assert told == [3]
        assert (effects._news, effects.live) == ({}, {})


async def test_who_leaves_before_the_intent_is_durable_has_not_begun(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        await me.durable()
        with trio.CancelScope() as scope:
            scope.cancel()
            await me.buy(1, "k")
        assert (BANK.asked, me.effects.list()) == ([], [])
        assert await me.buy(1, "k") == {"paid": 1}
        assert [c.attempt for c in BANK.asked] == [1]


async def test_an_aborted_facet_writes_no_outcome(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        kid = await me.dynamic_agents.get(Shop, "x")
        BANK.shut = trio.Event()

        async def ask() -> None:
            with pytest.raises(FacetAborted):
                await kid.buy(1, "k")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.sleep(1)
            await me.dynamic_agents.abort(Shop, "x")
        BANK.shut = None
        await me.dynamic_agents.get(Shop, "x")
        live = agent_at(test, ("Shop", "x"))
        (doubt,) = live.effects.list(uncertain=True)
        assert (doubt.status, doubt.attempt) == ("begun", 1)


async def test_a_turn_that_waits_for_a_decision_says_so_and_goes_on(
    clock: object,
) -> None:
    Top.seen.clear()
    async with opened() as test:
        me = await top(test)
        BANK.shut = trio.Event()
        outputs: list[Any] = []

        async def ask(me: Any) -> None:
            try:
                outputs.append(await me.desk())
            except CuletError:
                outputs.append(None)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, me)
            while not BANK.asked:
                await trio.sleep(0.1)
            await test.crash()
            nursery.cancel_scope.cancel()
        BANK.shut = None
        outputs.clear()
        await test.reopen()
        me = await top(test)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, me)
            await trio.sleep(300)  # longer than any silence is borne
            assert outputs == []
            assert [p.phase for p in Top.seen] == ["waiting"]
            desk = agent_at(test, ("Desk", "r"))
            (doubt,) = desk.effects.list(uncertain=True)
            assert Top.seen[0].data["effects"][0]["id"] == doubt.id
            assert (doubt.status, doubt.asker) == ("asked", "r")
            assert desk.effects.resolve(doubt.id, result=5)
        assert outputs == [5]
        assert len(BANK.asked) == 1


# ---- bounds and mistakes


async def test_a_key_with_other_arguments_is_refused(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        await me.buy(1, "k")
        with pytest.raises(UsageError, match="other arguments"):
            await me.buy(2, "k")
        assert len(BANK.asked) == 1


@pytest.mark.parametrize(
    "given",
    [
        {"key": ""}, {"key": 7}, {"key": "x" * 2000}, {"key": "a\nb"}, {"name": " "},
        {"on_uncertain": "hope"}, {"on_uncertain": "check"}, {"check": print},
        {"arg": object()}, {"key": "\ud800"},
    ],
)  # fmt: skip
async def test_what_cannot_be_asked_is_refused_before_anything_is_done(
    clock: object, given: dict[str, Any]
) -> None:
    async with opened() as test:
        me = await top(test)
        given = {"name": "pay", "key": "k", "arg": 1, **given}
        with pytest.raises(UsageError):
            await me.effects.call(
                given.pop("name"), BANK.pay, given.pop("arg"), **given
            )
        assert (BANK.asked, me.effects.list()) == ([], [])


async def test_a_decision_is_one_and_of_a_doubt(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        await me.buy(1, "k")
        (done,) = me.effects.list()
        for bad in ({}, {"repeat": True, "unknown": True}, {"result": object()}):
            with pytest.raises(UsageError):
                me.effects.resolve(done.id, **bad)
        for effect_id in (done.id, "77", "x", "", "9" * 40):
            assert not me.effects.resolve(effect_id, repeat=True)
        assert [me.effects.get(i) for i in ("77", "x", "9" * 40)] == [None] * 3


@pytest.mark.limit("effects_open", "effects_per_agent")
async def test_open_effects_and_recorded_ones_are_bounded(clock: object) -> None:
    limits = Limits(effects_open=3, effects_per_agent=20)
    async with opened(limits=limits) as test:
        me = await top(test)
        BANK.shut = trio.Event()
        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(me.buy, 1, f"open{number}")
            await trio.sleep(1)
            with pytest.raises(CapacityError, match="effects_open"):
                await me.buy(1, "one more")
            assert len(BANK.asked) == 3, "it was refused before anything was done"
            BANK.shut.set()
        with pytest.raises(CapacityError, match="effects_per_agent"):
            for number in range(60):
                await me.buy(1, f"k{number}")
        assert me.effects.forget() > 19
        await me.buy(1, "again")


@pytest.mark.limit("effect_keep_s")
async def test_old_outcomes_are_dropped_and_young_ones_and_doubts_are_not(
    clock: object,
) -> None:
    limits = Limits(effect_keep_s=1000.0)
    async with opened(limits=limits) as test:
        me = await top(test)
        BANK.shut = trio.Event()
        with trio.move_on_after(1):
            await me.buy(1, "doubt")
        BANK.shut = None
        for number in range(5):
            await me.buy(1, f"old{number}")
        await trio.sleep(600)
        for number in range(5):
            await me.buy(1, f"young{number}")
        await trio.sleep(600)
        for number in range(20):
            await me.buy(1, f"new{number}")
        keys = {e.key for e in me.effects.list()}
        assert {k for k in keys if k.startswith("old")} == set()
        assert len({k for k in keys if k.startswith("young")}) == 5
        assert [e.key for e in me.effects.list(uncertain=True)] == ["doubt"]


@pytest.mark.limit("due_rows")
async def test_the_list_is_read_page_by_page(clock: object) -> None:
    async with opened(limits=Limits(due_rows=4)) as test:
        me = await top(test)
        for number in range(10):
            await me.buy(1, f"k{number}")
        found: list[Effect] = []
        while page := me.effects.list(after=found[-1].id if found else None):
            assert len(page) <= 4
            found += page
        assert [e.key for e in found] == [f"k{n}" for n in range(10)]
        assert me.effects.list(name="none") == []
        assert me.effects.list(limit=1, uncertain=False) == found[:1]
        with pytest.raises(UsageError):
            me.effects.list(limit=0)


async def test_who_looks_from_above_sees_the_doubts_of_all_below(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        kid = await me.dynamic_agents.get(Shop, "x")
        await me.buy(1, "mine")
        await kid.buy(2, "kid's")
        BANK.shut = trio.Event()
        with trio.move_on_after(1):
            await kid.buy(3, "doubt")
        assert [e.key for e in me.effects.list()] == ["mine"]
        found = me.effects.list(below=True)
        paths = [(e.key, e.path) for e in found]
        assert paths == [
            ("mine", "Top/a"), ("kid's", "Top/a/Shop/x"), ("doubt", "Top/a/Shop/x"),
        ]  # fmt: skip
        (doubt,) = test.kernel.effects("Top", "a", uncertain=True)
        assert (doubt.key, doubt.path) == ("doubt", "Top/a/Shop/x")
        assert not me.effects.resolve(doubt.id, result=1), "its own agent decides"
        assert me.effects.list(below=True, after=found[1].id) == [doubt]
        assert test.kernel.effects("Top", "nobody") == []
        with pytest.raises(UsageError):
            me.effects.list(status="done")


async def test_subscribers_hear_of_intents_doubts_and_outcomes(clock: object) -> None:
    heard: list[tuple[str, Any]] = []
    async with opened() as test:
        me = await begun_and_dead(test, "ask")
        for channel in ("effect:begin", "effect:uncertain", "effect:end"):
            test.kernel.subscribe(channel, lambda c, _t, _s, d: heard.append((c, d)))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(me.buy, 1, "k")
            await trio.sleep(1)
            (doubt,) = me.effects.list(uncertain=True)
            me.effects.resolve(doubt.id, repeat=True)
        assert [(c, d.attempt, d.status) for c, d in heard] == [
            ("effect:uncertain", 1, "asked"), ("effect:begin", 2, "begun"),
            ("effect:end", 2, "completed"),
        ]  # fmt: skip


async def test_a_check_may_be_a_method_that_others_can_call(clock: object) -> None:
    class Both(Agent):
        async def was_paid(self, n: int) -> Done | NotDone | None:
            return Done(n) if n else NotDone()

    async with open_test_kernel(roots=[Both]) as test:
        stub = await test.kernel.get_agent(Both, "a")
        assert await stub.was_paid(3) == Done(3)
        assert await stub.was_paid(0) == NotDone()


async def test_outside_of_an_effect_there_is_none(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        assert current_effect() is None
        await me.buy(1, "k")
        assert current_effect() is None
