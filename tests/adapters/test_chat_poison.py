"""Turns that would feed themselves for ever: each has an end, and the chat outlives it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import trio

from adapters.peer import Client, connected, fetch, user
from adapters.poisoned import TRIES as POISONED_TRIES
from culet.adapters import AIChatAgent, ScriptedModel, Think, tool
from culet.adapters.model import (
    Finish,
    ModelEvent,
    ModelRequest,
    TextDelta,
    ToolCall,
)
from culet.adapters.scripted import step_number
from culet.kernel import Agent, AgentToolRun, Chunk, Limits, Turn, agent_tool
from culet.kernel.errors import EffectUncertain
from culet.kernel.testing import Harness, open_test_kernel

ME = ("Poison", "a")
TRIES = Limits(tries=6, attempts=3)
BEGUN: Counter[str] = Counter()  # attempts of a turn, over all lives
PHASES: list[str] = []
PAID: list[int] = []


@pytest.fixture(autouse=True)
def fresh() -> None:
    BEGUN.clear()
    PHASES.clear()
    PAID.clear()


def text_of(message: dict[str, Any]) -> str:
    return "".join(p.get("text", "") for p in message["parts"])


async def history(test: Harness, *path: tuple[str, str]) -> list[str]:
    answer = await fetch(test.kernel, *(path or (ME,)), leaf="/get-messages")
    assert isinstance(answer.body, bytes)
    return [text_of(m).strip() for m in msgspec.json.decode(answer.body)]


def row(test: Harness, of: tuple[str, str], request_id: str) -> tuple[Any, ...]:
    """Return how a turn stands: status, reason, error."""
    tree = test.tree(*of)
    assert tree is not None
    sql = "SELECT status, reason, error FROM fiber WHERE id = ?"
    return tuple(tree.db.execute(sql, (request_id,))[0])


def owed(test: Harness, of: tuple[str, str] = ME) -> int:
    tree = test.tree(*of)
    assert tree is not None
    sql = "SELECT count(*) FROM job WHERE kind = 'turn'"
    return int(tree.db.execute(sql)[0][0])


class Poison(AIChatAgent):
    """Says or stashes something each time, and comes to no end unless its user says so."""

    how: ClassVar[str] = "says"

    async def on_chat_message(self, turn: Turn) -> AsyncIterator[Chunk]:
        BEGUN[turn.request_id] += 1
        asked = text_of(turn.messages[-1])
        if self.how == "says" or asked == "fine":
            if turn.attempt == 1:
                yield {"type": "text-start", "id": "t"}
            word = "well " if asked == "fine" else f"{BEGUN[turn.request_id]} "
            yield {"type": "text-delta", "id": "t", "delta": word}
        if self.how == "stashes":
            turn.stash({"at": BEGUN[turn.request_id]})
        if asked != "fine":
            await trio.sleep_forever()


async def dies(test: Harness, *, planned: bool = False) -> None:
    """Let the turn come as far as it does; then its process ends, and another begins."""
    await test.kernel.get_agent(Poison, "a")
    await trio.sleep(5)
    if planned:
        await test.close()
    else:
        await test.crash()
    await test.reopen()


# ---- a word, and then the process is gone


@pytest.mark.limit("tries")
@pytest.mark.rule("C-060", "B-09")
@pytest.mark.parametrize("how", ["says", "stashes"])
async def test_a_turn_that_comes_a_little_further_in_each_life_is_given_up(
    how: str, clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Poison, "how", how)
    async with open_test_kernel(roots=[Poison], limits=TRIES) as test:
        async with connected(test.kernel, ME) as tab:
            tab.chat("r1", user("u1", "go"))
        for _ in range(3 * TRIES.tries):
            await dies(test)
        assert BEGUN["r1"] == TRIES.tries
        async with connected(test.kernel, ME) as late:
            late.send("cf_agent_stream_resume_ack", id="r1")
            assert (await late.ended("r1"))["outcome"] == "error"
            status, reason, error = row(test, ME, "r1")
            assert (status, reason) == ("error", "recovery-exhausted")
            assert "limits.tries" in error
            assert owed(test) == 0
            late.chat("r2", user("u2", "fine"))
            await late.ended("r2")
        kept = ["1 2 3 4 5 6"] if how == "says" else []
        assert await history(test) == ["go", *kept, "fine", "well"]


@pytest.mark.limit("attempts")
@pytest.mark.rule("C-060")
async def test_a_turn_that_says_nothing_has_fewer_tries_than_one_that_speaks(
    clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Poison, "how", "silent")
    async with open_test_kernel(roots=[Poison], limits=TRIES) as test:
        async with connected(test.kernel, ME) as tab:
            tab.chat("r1", user("u1", "go"))
        for _ in range(3 * TRIES.tries):
            await dies(test)
        await test.kernel.get_agent(Poison, "a")
        assert BEGUN["r1"] == TRIES.attempts
        assert row(test, ME, "r1")[:2] == ("error", "recovery-exhausted")


@pytest.mark.rule("C-061")
async def test_what_goes_well_in_between_does_not_begin_its_count_anew(
    clock: object,
) -> None:
    """Its own count: other turns, other chats and planned stops neither add nor take."""
    other = ("Poison", "b")
    async with open_test_kernel(roots=[Poison], limits=TRIES) as test:
        async with connected(test.kernel, ME) as tab:
            tab.chat("r1", user("u1", "go"))
        for number in range(3 * TRIES.tries):
            async with connected(test.kernel, other) as tab:
                tab.chat(f"o{number}", user(f"u{number}", "fine"))
                await tab.ended(f"o{number}")
            await dies(test, planned=number % 2 == 0)
        await test.kernel.get_agent(Poison, "a")
        assert owed(test, ME) == 0
        planned = TRIES.tries  # one before each of its deaths
        assert BEGUN["r1"] == TRIES.tries + planned
        assert (await history(test, other)).count("well") == 3 * TRIES.tries


@pytest.mark.rule("C-060")
async def test_the_next_turn_has_tries_of_its_own(clock: object) -> None:
    async with open_test_kernel(roots=[Poison], limits=TRIES) as test:
        async with connected(test.kernel, ME) as tab:
            tab.chat("r1", user("u1", "go"))
            tab.chat("r2", user("u2", "go"))
        for _ in range(2 * TRIES.tries + 4):
            await dies(test)
        assert (BEGUN["r1"], BEGUN["r2"]) == (TRIES.tries, TRIES.tries)
        await test.kernel.get_agent(Poison, "a")
        assert owed(test) == 0


# ---- who has asked for it


class Asker(Think):
    """Has its tool ask a child that ends the process with every word."""

    def get_model(self) -> Any:
        def play(request: ModelRequest) -> Any:
            calls = [ToolCall(id="c1", name="ask", input={"text": "go"})]
            return [calls, ["It failed."]][step_number(request)]

        return ScriptedModel(play)

    def get_tools(self) -> dict[str, Any]:
        return {"ask": agent_tool(self.below, description="asks")}

    below: ClassVar[type[Agent]] = Poison

    def format_agent_tool_input(self, input: Any, request: Any) -> str:  # noqa: A002
        return str(input["text"])


class Upper(Asker):
    below = Asker


@pytest.mark.rule("C-060", "T-162")
@pytest.mark.parametrize(("cls", "levels"), [(Asker, 1), (Upper, 2)])
async def test_who_asked_for_a_run_that_is_given_up_hears_so_and_goes_on(
    cls: type[Agent], levels: int, clock: object
) -> None:
    me = (cls.__name__, "a")
    facets = [Poison, Asker]
    async with open_test_kernel(roots=[cls], facets=facets, limits=TRIES) as test:
        async with connected(test.kernel, me) as tab:
            tab.chat("r1", user("u1", "go"))
            await trio.sleep(5)
        for _ in range(2 * TRIES.tries):
            await test.crash()
            await test.reopen()
            await test.kernel.get_agent(cls, "a")
            await trio.sleep(5)
        tree = test.tree(*me)
        assert tree is not None
        sql = "SELECT class, status, reason FROM run ORDER BY born DESC"
        first, *others = tree.db.execute(sql)
        assert first == ("Poison", "error", "recovery-exhausted")
        assert others == [("Asker", "completed", None)] * (levels - 1)
        assert row(test, me, "r1")[0] == "completed"
        assert (await history(test, me))[-1] == "It failed."
        del BEGUN["r1"]
        assert [*BEGUN.values()] == [TRIES.tries]


@pytest.mark.rule("C-060")
async def test_who_asks_for_a_poison_after_the_other_has_an_end_as_well(
    clock: object,
) -> None:
    class Stubborn(Agent):
        resumable: ClassVar[bool] = True

        async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
            for number in range(1_000):
                await self.run_agent_tool(Poison, "go", run_id=f"p{number}")
                yield {"type": "text-delta", "id": "t", "delta": "again "}

        async def begin(self) -> None:
            await self.run_agent_tool(Stubborn, None, run_id="s", detached=True)

    facets = [Poison, Stubborn]
    async with open_test_kernel(roots=[Stubborn], facets=facets, limits=TRIES) as test:
        await (await test.kernel.get_agent(Stubborn, "a")).begin()
        for _ in range(5 * TRIES.tries):
            await trio.sleep(5)
            await test.crash()
            await test.reopen()
            await test.kernel.get_agent(Stubborn, "a")
        await trio.sleep(5)
        tree = test.tree("Stubborn", "a")
        assert tree is not None
        assert tree.db.execute("SELECT status FROM run WHERE status = 'running'") == []
        sql = "SELECT status, reason FROM run WHERE id = 's'"
        assert tree.db.execute(sql) == [("error", "recovery-exhausted")]
        assert sum(BEGUN.values()) <= 2 * TRIES.tries


# ---- a person is asked: no loop


class Clerk(Think):
    """Has its desk ask a person; `Desk` is its child."""

    def get_model(self) -> Any:
        def play(request: ModelRequest) -> Any:
            calls = [ToolCall(id="c1", name="desk", input={"text": "pay"})]
            return [calls, ["All done."]][step_number(request)]

        return ScriptedModel(play)

    def get_tools(self) -> dict[str, Any]:
        return {"desk": agent_tool(Desk, description="asks a person")}

    async def on_progress(self, run: AgentToolRun, progress: Any) -> None:
        PHASES.append(progress.phase)


class Desk(Think):
    def get_model(self) -> Any:
        def play(request: ModelRequest) -> Any:
            calls = [ToolCall(id="k1", name="pay", input={"n": 1})]
            return [calls, ["Thanks."]][step_number(request)]

        return ScriptedModel(play)

    def get_tools(self) -> dict[str, Any]:
        return {"pay": tool(self.pay, needs_approval=True)}

    async def pay(self, n: int) -> str:
        PAID.append(n)
        return f"paid {n}"

    def format_agent_tool_input(self, input: Any, request: Any) -> str:  # noqa: A002
        return str(input["text"])


@pytest.mark.rule("C-040", "C-051")
async def test_who_waits_for_a_person_is_never_given_up_however_often_it_restarts(
    clock: object,
) -> None:
    """Neither the child that asks nor the turn that waits for the child."""
    me = ("Clerk", "a")
    async with open_test_kernel(roots=[Clerk], facets=[Desk], limits=TRIES) as test:
        async with connected(test.kernel, me) as tab:
            tab.chat("r1", user("u1", "hi"))
            with trio.fail_after(30):
                while "waiting" not in PHASES:
                    await trio.sleep(0.1)
        for _ in range(3 * TRIES.tries):
            await test.crash()
            await test.reopen()
            await test.kernel.get_agent(Clerk, "a")
            await trio.sleep(5)
        tree = test.tree(*me)
        assert tree is not None
        [[run_id, status]] = tree.db.execute("SELECT id, status FROM run")
        assert status == "running"
        async with connected(test.kernel, me, ("Desk", run_id)) as window:
            fields = {"toolCallId": "k1", "approved": True, "autoContinue": True}
            window.send("cf_agent_tool_approval", **fields)
            await trio.sleep(5)
        assert PAID == [1]
        assert (await history(test, me))[-1] == "All done."
        assert row(test, me, "r1")[0] == "completed"


class Unsure(AIChatAgent):
    """Pays, and nobody knows whether that was done: a person is asked."""

    async def on_chat_message(self, turn: Turn) -> AsyncIterator[Chunk]:
        BEGUN[turn.request_id] += 1
        paid = await self.effects.call("pay", pays, key="k", on_uncertain="ask")
        yield {"type": "text-start", "id": "t"}
        yield {"type": "text-delta", "id": "t", "delta": f"paid {paid}"}

    async def decide(self) -> bool:
        [doubt] = self.effects.list(uncertain=True)
        return self.effects.resolve(doubt.id, result=7)


async def pays() -> int:
    PAID.append(1)
    raise EffectUncertain("no answer came")


@pytest.mark.rule("C-051")
async def test_a_turn_whose_effect_is_in_doubt_waits_for_a_decision_over_all_restarts(
    clock: object,
) -> None:
    me = ("Unsure", "a")
    async with open_test_kernel(roots=[Unsure], limits=TRIES) as test:
        async with connected(test.kernel, me) as tab:
            tab.chat("r1", user("u1", "go"))
            await trio.sleep(1)
        for _ in range(3 * TRIES.tries):
            await test.crash()
            await test.reopen()
            unsure = await test.kernel.get_agent(Unsure, "a")
            await trio.sleep(5)
        assert row(test, me, "r1")[0] == "running"
        assert BEGUN["r1"] == 3 * TRIES.tries + 1
        assert await unsure.decide()
        await trio.sleep(1)
        assert row(test, me, "r1")[0] == "completed"
        assert (await history(test, me))[-1] == "paid 7"
        assert PAID == [1]


# ---- a model that says nothing more


class Stalling:
    """Says its words one by one; `stall` is a word after which it is silent for ever."""

    def __init__(self, said: list[str]) -> None:
        self._said = said

    async def stream(self, request: ModelRequest, /) -> AsyncIterator[ModelEvent]:
        BEGUN["asked"] += 1
        behind = request.partial
        for word in self._said:
            if word == "stall" and BEGUN["asked"] <= Silent.stalls:
                try:
                    await trio.sleep_forever()
                finally:
                    BEGUN["closed"] += 1
            elif word == "slow":
                await trio.sleep(7)
            elif word != "stall":
                if behind.startswith(word):
                    behind = behind.removeprefix(word)
                else:
                    yield TextDelta(word)
        yield Finish("stop")


class Silent(Think):
    stall_s: ClassVar[float | None] = 10.0
    stalls: ClassVar[int] = 1
    said: ClassVar[list[str]] = ["Once ", "stall", "upon"]

    def get_model(self) -> Any:
        return Stalling(self.said)


async def told(test: Harness, request_id: str = "r1") -> Client:
    async with connected(test.kernel, ("Silent", "a")) as tab:
        tab.chat(request_id, user("u1", "go"))
        await tab.ended(request_id)
        return tab


@pytest.mark.rule("C-066", "T-149")
async def test_a_model_that_falls_silent_is_asked_again_for_the_rest(
    clock: object,
) -> None:
    me = ("Silent", "a")
    async with open_test_kernel(roots=[Silent]) as test:
        began = trio.current_time()
        tab = await told(test)
        assert 10 < trio.current_time() - began < 15
        assert tab.text("r1") == "Once upon"
        assert [c["type"] for c in tab.chunks("r1")].count("text-start") == 1
        assert row(test, me, "r1")[0] == "completed"
        assert await history(test, me) == ["go", "Once upon"]
        assert BEGUN == {"asked": 2, "closed": 1}


@pytest.mark.rule("C-066")
@pytest.mark.parametrize("stalls", [1, 100])
async def test_clients_are_told_that_it_recovers_until_it_goes_on_or_ends(
    stalls: int, clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Silent, "stalls", stalls)
    monkeypatch.setattr(Silent, "stall_s", 4.0)
    limits = Limits(attempts=2)
    async with open_test_kernel(roots=[Silent], limits=limits) as test:
        tab = await told(test)
        flags = [f["recovering"] for f in tab.of("cf_agent_chat_recovering")]
        assert flags == [True, False, True, False][: 2 * min(stalls, 2)]
        kinds = [f["type"].removeprefix("cf_agent_") for f in tab.frames]
        assert kinds.index("chat_recovering") > kinds.index("use_chat_response")
        async with connected(test.kernel, ("Silent", "a")) as late:
            assert late.of("cf_agent_chat_recovering") == []


@pytest.mark.rule("C-066", "T-151")
async def test_a_model_that_never_begins_is_asked_again_for_all(
    clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Silent, "said", ["stall", "Once ", "upon"])
    async with open_test_kernel(roots=[Silent]) as test:
        assert (await told(test)).text("r1") == "Once upon"
        assert await history(test, ("Silent", "a")) == ["go", "Once upon"]


@pytest.mark.rule("C-066", "T-150")
@pytest.mark.parametrize(("said", "asked"), [(["Once ", "stall"], 3), (["stall"], 3)])
async def test_a_model_that_is_always_silent_ends_the_turn_in_error(
    said: list[str], asked: int, clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Silent, "said", said)
    monkeypatch.setattr(Silent, "stalls", 100)
    monkeypatch.setattr(Silent, "stall_s", 4.0)
    me = ("Silent", "a")
    async with open_test_kernel(roots=[Silent], limits=TRIES) as test:
        tab = await told(test)
        assert (await tab.ended("r1"))["outcome"] == "error"
        status, reason, error = row(test, me, "r1")
        assert (status, reason) == ("error", "recovery-exhausted")
        assert "said nothing for 4.0 s" in error
        assert BEGUN["asked"] == asked
        assert owed(test, me) == 0


@pytest.mark.rule("C-066", "C-060")
async def test_a_model_that_says_one_word_each_time_is_bounded_as_well(
    clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [w for n in range(20) for w in (f"{n} ", "stall")]
    monkeypatch.setattr(Silent, "said", words)
    monkeypatch.setattr(Silent, "stalls", 100)
    monkeypatch.setattr(Stalling, "stream", _one_word_more)
    async with open_test_kernel(roots=[Silent], limits=TRIES) as test:
        async with connected(test.kernel, ("Silent", "a")) as tab:
            tab.chat("r1", user("u1", "go"))
            await trio.sleep(600)
        assert BEGUN["asked"] == TRIES.tries
        status, reason, error = row(test, ("Silent", "a"), "r1")
        assert (status, reason) == ("error", "recovery-exhausted")
        assert "limits.tries" in error
        assert "said nothing" in error


async def _one_word_more(
    self: Stalling, request: ModelRequest, /
) -> AsyncIterator[ModelEvent]:
    BEGUN["asked"] += 1
    yield TextDelta(f"{BEGUN['asked']} ")
    await trio.sleep_forever()


@pytest.mark.rule("C-066")
async def test_slow_is_not_silent(
    clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Silent, "said", ["a ", "slow", "b ", "slow", "c"])
    async with open_test_kernel(roots=[Silent]) as test:
        assert (await told(test)).text("r1") == "a b c"
        assert BEGUN["asked"] == 1


@pytest.mark.rule("C-066")
async def test_nobody_watches_unless_the_class_says_so(
    clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Silent, "stall_s", None)
    async with (
        open_test_kernel(roots=[Silent]) as test,
        connected(test.kernel, ("Silent", "a")) as tab,
    ):
        tab.chat("r1", user("u1", "go"))
        await trio.sleep(10_000)
        assert row(test, ("Silent", "a"), "r1")[0] == "running"
        tab.send("cf_agent_chat_request_cancel", id="r1")
        assert (await tab.ended("r1"))["outcome"] == "aborted"
        assert BEGUN == {"asked": 1, "closed": 1}


@pytest.mark.rule("C-066", "T-149")
async def test_a_run_that_waits_for_its_next_attempt_is_running_and_can_be_stopped(
    clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Boss(Agent):
        async def send(self) -> None:
            await self.run_agent_tool(Silent, "go", run_id="r", detached=True)

        async def state_of(self) -> AgentToolRun | None:
            return self.runs.get("r")

        async def stop(self) -> Any:
            return (await self.runs.cancel("r")).status

    monkeypatch.setattr(Silent, "stalls", 100)
    async with open_test_kernel(roots=[Boss], facets=[Silent]) as test:
        boss = await test.kernel.get_agent(Boss, "a")
        await boss.send()
        await trio.sleep(10.2)  # the back-off is half a second at least
        run = await boss.state_of()
        assert run is not None
        assert run.status == "running"
        assert await boss.stop() == "aborted"
        await trio.sleep(600)
        assert BEGUN == {"asked": 1, "closed": 1}


# ---- a real process


@pytest.mark.rule("C-060", "C-061")
def test_a_turn_that_kills_its_process_with_every_word_ends_within_its_tries(
    tmp_path: Path,
) -> None:
    command = [sys.executable, str(Path(__file__).with_name("poisoned.py"))]
    deaths = 0
    while True:
        life = subprocess.run(
            [*command, str(tmp_path / "data")], capture_output=True, text=True,
            timeout=60, check=False,
        )  # fmt: skip
        if life.returncode != -signal.SIGKILL:
            break
        deaths += 1
        assert deaths <= POISONED_TRIES, "it would go on for ever"
    assert life.returncode == 0, life.stderr
    assert deaths == POISONED_TRIES
    assert "recovery-exhausted" in life.stdout
    assert life.stdout.rstrip().endswith("['go', '1 2 3 4 ']")


# ---- more to go on with than hands


class Slow(Agent):
    resumable: ClassVar[bool] = True

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        BEGUN[turn.request_id] += 1
        yield {"type": "text-delta", "id": "t", "delta": "x"}
        await trio.sleep(5)


class Crowd(Agent):
    async def send(self, count: int) -> None:
        for number in range(count):
            await self.run_agent_tool(Slow, number, run_id=f"r{number}", detached=True)


@pytest.mark.rule("C-065")
async def test_what_there_was_no_hand_for_is_taken_up_without_another_call(
    clock: object,
) -> None:
    limits = Limits(jobs_at_once=2)
    async with open_test_kernel(roots=[Crowd], facets=[Slow], limits=limits) as test:
        crowd = await test.kernel.get_agent(Crowd, "a")
        await crowd.send(9)
        await trio.sleep(1)
        await test.crash()
        await test.reopen()
        await trio.sleep(9 * 5 / 2 + 5)  # nobody asks for anything
        tree = test.tree("Crowd", "a")
        assert tree is not None
        assert tree.db.execute("SELECT DISTINCT status FROM run") == [("completed",)]
        assert len(BEGUN) == 9
