"""Tool calls in the ledger: what becomes of one that a crash has cut, by its policy."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Any, ClassVar

import pytest
import trio

from adapters import test_approvals
from adapters.peer import Client, connected, user
from adapters.test_approvals import (
    Stage,
    approve,
    asked,
    call,
    result,
    shown,
    went_on,
)
from culet.adapters import ScriptedModel, Think, ToolContext, tool
from culet.adapters.model import ModelRequest
from culet.adapters.scripted import step_number
from culet.kernel import (
    Agent,
    AgentToolRun,
    Done,
    Effect,
    Limits,
    NotDone,
    agent_tool,
    current_effect,
)
from culet.kernel.errors import EffectUncertain, UsageError
from culet.kernel.testing import Harness, open_test_kernel
from kernel.agents import settle

ME = ("Till", "a")
CALL = call("c1", "pay", n=1)


class World(Stage):
    """And the other side: what each token came with."""

    def __init__(self) -> None:
        super().__init__()
        self.shut.set()
        self.tokens: list[tuple[str, int]] = []
        self.says: Any = None
        self.unsure = 0


WORLD = World()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    WORLD.__init__()  # type: ignore[misc]
    yield


class Till(Think):
    script: ClassVar[Any] = [[CALL], "Done."]
    policy: ClassVar[Any] = "ask"

    def get_model(self) -> Any:
        def play(request: ModelRequest) -> Any:
            WORLD.requests.append(request)
            step = self.script[step_number(request)]
            return [step] if isinstance(step, str) else step

        return ScriptedModel(play)

    def get_tools(self) -> dict[str, Any]:
        check = self.was_paid if self.policy == "check" else None
        return {
            "pay": tool(self.pay, on_uncertain=self.policy, check=check),
            "sign": tool(self.pay, needs_approval=True),
            "count": tool(self.count, on_uncertain="repeat"),
            "helper": agent_tool(Helper, description="pays"),
        }

    async def pay(self, ctx: ToolContext, n: int) -> str:
        here = current_effect()
        assert here is not None
        assert (here.token, here.attempt) == (ctx.idempotency_key, ctx.attempt)
        assert (here.tool_call_id, here.run_id) == (ctx.tool_call_id, ctx.run_id)
        WORLD.tokens.append((ctx.idempotency_key, ctx.attempt))
        WORLD.done.append("pay")
        await WORLD.shut.wait()
        if WORLD.unsure:
            WORLD.unsure -= 1
            raise EffectUncertain("no answer")
        if n < 0:
            raise ValueError("no")
        return f"paid {n}"

    async def was_paid(self, n: int, ctx: ToolContext) -> Any:
        assert ctx.idempotency_key == WORLD.tokens[0][0]
        if isinstance(WORLD.says, Exception):
            raise WORLD.says
        return WORLD.says

    async def count(self, to: int) -> AsyncIterator[int]:
        for number in range(to):
            yield number

    async def doubts(self) -> list[Effect]:
        return self.effects.list(uncertain=True)

    async def all_effects(self) -> list[Effect]:
        return self.effects.list()

    async def decide(self, effect_id: str, how: dict[str, Any]) -> bool:
        return self.effects.resolve(effect_id, **how)


class Helper(Till):
    def format_agent_tool_input(self, input: Any, request: Any) -> str:  # noqa: A002
        return "pay"


class Boss(Agent):
    async def send(self) -> AgentToolRun:
        return await self.run_agent_tool(Helper, "pay", run_id="h")

    async def on_progress(self, run: Any, progress: Any) -> None:
        WORLD.progress.append(progress)


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda how: monkeypatch.setattr(Till, "policy", how)


def kernel(**options: Any) -> Any:
    return open_test_kernel(roots=[Till, Boss], facets=[Helper], **options)


async def history(test: Harness) -> list[dict[str, Any]]:
    return await test_approvals.history(test, ME)


async def last(test: Harness) -> list[Any]:
    return await test_approvals.last(test, ME)


async def doing(times: int) -> None:
    with trio.fail_after(30):
        while len(WORLD.done) < times:
            await trio.sleep(0.01)


async def cut(test: Harness, tab: Client, times: int = 1) -> None:
    """Die while the tool runs for the n-th time, and live again."""
    await doing(times)
    await trio.sleep(1)
    await test.crash()
    WORLD.shut.set()
    await test.reopen()


async def ask_and_die(test: Harness) -> None:
    WORLD.shut = trio.Event()
    async with connected(test.kernel, ME) as tab:
        tab.chat("r1", user("u1", "hi"))
        await cut(test, tab)
    await test.kernel.get_agent(Till, "a")
    await trio.sleep(30)


async def till(test: Harness) -> Any:
    return await test.kernel.get_agent(Till, "a")


def doubt_parts(message: dict[str, Any]) -> list[Any]:
    return [p["data"] for p in message["parts"] if p["type"] == "data-effect"]


# ---- ask


@pytest.mark.rule("B-25")
async def test_a_call_in_doubt_is_a_question_to_a_person_and_listed(
    clock: object,
) -> None:
    async with kernel() as test:
        await ask_and_die(test)
        assert await last(test) == [("pay", "approval-requested", None)]
        (doubt,) = await (await till(test)).doubts()
        assert (doubt.kind, doubt.name, doubt.status) == ("tool", "pay", "asked")
        assert (doubt.token, 1) == WORLD.tokens[0]
        assert (doubt.tool_call_id, doubt.asker) == ("c1", "r1")
        [why] = doubt_parts((await history(test))[-1])
        assert why == {
            "toolCallId": "c1", "toolName": "pay", "attempt": 1,
            "effectId": doubt.id, "state": "uncertain",
        }  # fmt: skip
        await trio.sleep(10_000)  # nothing polls, nothing repeats it
        assert len(WORLD.tokens) == 1
        assert len(WORLD.requests) == 1, "and the model is not asked meanwhile"


async def test_who_says_yes_lets_it_be_done_again_under_the_same_token(
    clock: object,
) -> None:
    async with kernel() as test:
        await ask_and_die(test)
        async with connected(test.kernel, ME) as tab:
            result(tab, "c1", "forged")  # the server runs it: not theirs to give
            approve(tab, "c1")
            await went_on(tab)
            approve(tab, "c1")
            await trio.sleep(5)
        assert await last(test) == [("pay", "output-available", "paid 1"), "Done."]
        token = WORLD.tokens[0][0]
        assert WORLD.tokens == [(token, 1), (token, 2)]
        (one,) = await (await till(test)).all_effects()
        assert (one.status, one.attempt, one.uncertain) == ("completed", 2, False)
        [why] = doubt_parts((await history(test))[-1])
        assert (why["state"], why["attempt"]) == ("again", 2)


async def test_who_says_no_leaves_it_unknown_and_the_model_is_told(
    clock: object,
) -> None:
    async with kernel() as test:
        await ask_and_die(test)
        async with connected(test.kernel, ME) as tab:
            approve(tab, "c1", yes=False)
            await went_on(tab)
        [(_, state, text), said] = await last(test)
        assert (state, said) == ("output-error", "Done.")
        assert "nobody knows" in text
        assert "nobody knows" in WORLD.requests[-1].messages[-1].content
        (doubt,) = await (await till(test)).doubts()
        assert doubt.status == "unknown"
        assert len(WORLD.tokens) == 1


@pytest.mark.parametrize(
    ("how", "part", "status"),
    [
        ({"result": "by hand"}, ("output-available", "by hand"), "completed"),
        ({"error": "it bounced"}, ("output-error", "it bounced"), "error"),
        ({"repeat": True}, ("output-available", "paid 1"), "completed"),
    ],
)
async def test_the_agent_may_decide_as_well_and_the_turn_goes_on(
    clock: object, how: dict[str, Any], part: tuple[str, str], status: str
) -> None:
    async with kernel() as test:
        await ask_and_die(test)
        me = await till(test)
        (doubt,) = await me.doubts()
        async with connected(test.kernel, ME) as tab:
            assert await me.decide(doubt.id, how)
            await trio.sleep(5)
            approve(tab, "c1")  # too late: it is decided
            await trio.sleep(5)
        assert await last(test) == [("pay", *part), "Done."]
        (one,) = await me.all_effects()
        assert one.status == status
        assert not await me.decide(doubt.id, {"unknown": True})
        assert len(WORLD.tokens) == (2 if "repeat" in how else 1)


async def test_each_death_in_a_repeat_is_a_question_of_its_own(clock: object) -> None:
    async with kernel() as test:
        await ask_and_die(test)
        for times in (2, 3):
            WORLD.shut = trio.Event()
            async with connected(test.kernel, ME) as tab:
                approve(tab, "c1")
                await cut(test, tab, times)
            await till(test)
            await trio.sleep(30)
            assert await last(test) == [("pay", "approval-requested", None)]
            assert len(WORLD.tokens) == times
        async with connected(test.kernel, ME) as tab:
            approve(tab, "c1")
            await trio.sleep(30)
        assert await last(test) == [("pay", "output-available", "paid 1"), "Done."]
        assert [n for _, n in WORLD.tokens] == [1, 2, 3, 4]
        assert len({token for token, _ in WORLD.tokens}) == 1


async def test_an_approved_call_that_was_cut_needs_another_yes(
    clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Till, "script", [[call("c1", "sign", n=1)], "Done."])
    async with kernel() as test:
        WORLD.shut = trio.Event()
        async with connected(test.kernel, ME) as tab:
            await asked(tab)
            approve(tab, "c1")
            await cut(test, tab)
        await till(test)
        await trio.sleep(30)
        assert await last(test) == [("sign", "approval-requested", None)]
        assert len(WORLD.requests) == 1
        async with connected(test.kernel, ME) as tab:
            approve(tab, "c1")
            await went_on(tab)
        assert await last(test) == [("sign", "output-available", "paid 1"), "Done."]
        assert [n for _, n in WORLD.tokens] == [1, 2]


async def test_a_crash_of_a_turn_that_has_asked_asks_nothing_else(
    clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The question is durable with the doubt; the next attempt only ends its step."""
    async with kernel() as test:
        await ask_and_die(test)
        await test.crash()
        await test.reopen()
        await till(test)
        await trio.sleep(30)
        assert await last(test) == [("pay", "approval-requested", None)]
        assert (len(WORLD.tokens), len(WORLD.requests)) == (1, 1)


async def test_an_approval_of_a_doubt_that_comes_too_late_does_nothing(
    clock: object,
) -> None:
    async with kernel() as test:
        await ask_and_die(test)
        me = await till(test)
        (doubt,) = await me.doubts()
        async with connected(test.kernel, ME) as tab:
            tab.chat("r2", user("u2", "and?"))
            await tab.ended("r2")
            done = len(WORLD.tokens)
            assert not await me.decide(doubt.id, {"repeat": True}), "nobody would"
            approve(tab, "c1")
            await trio.sleep(5)
        assert len(WORLD.tokens) == done
        [(_, state, _text)] = shown((await history(test))[1])
        assert state == "output-error"
        doubts = [e.status for e in await me.doubts() if e.id == doubt.id]
        assert doubts == ["unknown"]


async def test_a_run_with_a_call_in_doubt_waits_and_its_parent_hears_so(
    clock: object,
) -> None:
    async with kernel() as test:
        WORLD.shut = trio.Event()
        boss = await test.kernel.get_agent(Boss, "b")

        async with trio.open_nursery() as nursery:

            async def first() -> None:
                with suppress(Exception):  # the process dies
                    await boss.send()

            nursery.start_soon(first)
            await doing(1)
            await trio.sleep(1)
            await test.crash()
            nursery.cancel_scope.cancel()
        WORLD.shut.set()
        await test.reopen()
        boss = await test.kernel.get_agent(Boss, "b")
        ends: list[AgentToolRun] = []

        async def again() -> None:
            ends.append(await boss.send())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(again)
            await trio.sleep(600)
            assert ends == []
            (told,) = [p for p in WORLD.progress if p.phase == "waiting"]
            assert told.data["calls"][0]["toolName"] == "pay"
            path = [("Boss", "b"), ("Helper", "h")]
            async with connected(test.kernel, *path) as tab:
                approve(tab, "c1")
                await trio.sleep(5)
        assert [r.status for r in ends] == ["completed"]
        assert ends[0].summary == "Done."
        assert [n for _, n in WORLD.tokens] == [1, 2]


# ---- the other policies


async def test_under_repeat_the_same_token_comes_again(
    clock: object, policy: Any
) -> None:
    policy("repeat")
    async with kernel() as test:
        await ask_and_die(test)
        assert await last(test) == [("pay", "output-available", "paid 1"), "Done."]
        token = WORLD.tokens[0][0]
        assert WORLD.tokens == [(token, 1), (token, 2)]
        assert await (await till(test)).doubts() == []


async def test_under_fail_the_model_is_told_that_nobody_knows(
    clock: object, policy: Any
) -> None:
    policy("fail")
    async with kernel() as test:
        await ask_and_die(test)
        [(_, state, text), said] = await last(test)
        assert (state, said) == ("output-error", "Done.")
        assert "nobody knows" in text
        (doubt,) = await (await till(test)).doubts()
        assert doubt.status == "unknown"
        assert len(WORLD.tokens) == 1


@pytest.mark.parametrize(
    ("says", "parts", "times"),
    [
        (Done("found"), [("pay", "output-available", "found"), "Done."], 1),
        (NotDone(), [("pay", "output-available", "paid 1"), "Done."], 2),
        (None, [("pay", "approval-requested", None)], 1),
        (ValueError("x"), [("pay", "approval-requested", None)], 1),
    ],
)
async def test_a_check_finds_out_or_a_person_is_asked(
    clock: object, policy: Any, says: Any, parts: list[Any], times: int
) -> None:
    policy("check")
    WORLD.says = says
    async with kernel() as test:
        await ask_and_die(test)
        assert await last(test) == parts
        assert [n for _, n in WORLD.tokens] == list(range(1, times + 1))


async def test_a_tool_that_cannot_know_is_asked_about_without_any_crash(
    clock: object,
) -> None:
    WORLD.unsure = 1
    async with kernel() as test, connected(test.kernel, ME) as tab:
        await asked(tab)
        assert await last(test) == [("pay", "approval-requested", None)]
        approve(tab, "c1")
        await went_on(tab)
        assert await last(test) == [("pay", "output-available", "paid 1"), "Done."]
        assert [n for _, n in WORLD.tokens] == [1, 2]


# ---- the ledger


async def test_each_call_is_an_entry_with_its_outcome(
    clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [
        call("c1", "pay", n=1), call("c2", "pay", n=-1), call("c3", "count", to=3),
        call("c4", "pay", n="x"), call("c5", "none"),
    ]  # fmt: skip
    monkeypatch.setattr(Till, "script", [calls, "Done."])
    async with kernel() as test, connected(test.kernel, ME) as tab:
        await asked(tab)
        found = await (await till(test)).all_effects()
        shown_ = [(e.name, e.tool_call_id, e.status, e.error) for e in found]
        assert shown_ == [
            ("pay", "c1", "completed", None), ("pay", "c2", "error", "ValueError: no"),
            ("count", "c3", "completed", None),
        ]  # fmt: skip
        states = [p[1] for p in (await last(test))[:5]]
        assert states == [
            "output-available", "output-error", "output-available", "output-error",
            "output-error",
        ]  # fmt: skip


async def test_a_call_whose_intent_is_not_durable_has_not_begun(clock: object) -> None:
    """Whatever record the process dies in, the tool runs once, or it is asked about."""
    ends = set[str]()
    for number in range(1, 9):
        WORLD.__init__()  # type: ignore[misc]
        async with kernel() as test:
            await till(test)
            async with connected(test.kernel, ME) as tab:
                test.faults.die_in_record(number)
                tab.chat("r1", user("u1", "hi"))
                await trio.sleep(30)
            before = len(WORLD.tokens)
            await test.crash()
            await test.reopen()
            await till(test)
            await trio.sleep(30)
            messages = await history(test)
            if not messages:
                continue  # the request was lost, and nobody was told of it
            [(_, state, *_), *_rest] = shown(messages[-1])
            ends.add(state)
            assert len(WORLD.tokens) == 1, f"{number}: {before} before, now {state}"
    assert ends == {"output-available", "approval-requested"}


async def test_a_turn_of_before_the_ledger_may_have_begun_its_calls(
    clock: object,
) -> None:
    async with kernel() as test:
        WORLD.shut = trio.Event()
        async with connected(test.kernel, ME) as tab:
            tab.chat("r1", user("u1", "hi"))
            await doing(1)
            tree = test.tree(*ME)
            assert tree is not None
            with tree.transaction():  # as an older version would have left it
                tree.db.execute("DELETE FROM effect")
                tree.db.execute(
                    "UPDATE meta SET value = 99 WHERE key = 'effects_after'"
                )
            await cut(test, tab)
        await till(test)
        await trio.sleep(30)
        assert await last(test) == [("pay", "approval-requested", None)]
        assert len(WORLD.tokens) == 1


async def test_a_stopped_turn_leaves_its_call_listed(clock: object) -> None:
    async with kernel() as test, connected(test.kernel, ME) as tab:
        WORLD.shut = trio.Event()
        tab.chat("r1", user("u1", "hi"))
        await doing(1)
        me = await till(test)
        assert await me.doubts() == [], "it is at work"
        tab.send("cf_agent_chat_request_cancel", id="r1")
        await tab.ended("r1")
        await settle()
        (doubt,) = await me.doubts()
        assert doubt.status == "begun"
        assert not await me.decide(doubt.id, {"repeat": True}), "its turn is over"
        assert await me.decide(doubt.id, {"result": "it was"})
        assert await me.doubts() == []
        assert await last(test) == [("pay", "output-error", "aborted")]


async def test_a_call_beyond_the_bound_is_not_done_and_the_model_is_told(
    clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [call(f"c{n}", "pay", n=n) for n in range(3)]
    monkeypatch.setattr(Till, "script", [calls, "Done."])
    async with kernel(limits=Limits(effects_open=2)) as test:
        async with connected(test.kernel, ME) as tab:
            await asked(tab)
        *_, (_, state, text), said = await last(test)
        assert (state, said) == ("output-error", "Done.")
        assert "not done: 2 effects" in text
        assert len(WORLD.tokens) == 2


@pytest.mark.parametrize(
    "given",
    [
        {"on_uncertain": "hope"}, {"on_uncertain": "check"},
        {"check": lambda n: None}, {"on_uncertain": "check", "check": lambda m: None},
    ],
)  # fmt: skip
def test_a_policy_that_cannot_be_is_refused(given: dict[str, Any]) -> None:
    def fn(n: int) -> int:
        return n

    with pytest.raises(UsageError):
        tool(fn, **given)
