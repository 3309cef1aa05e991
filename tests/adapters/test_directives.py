"""A Think that runs as a tool hears what its parent sends, once, before its next step."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from adapters.peer import fetch
from culet.adapters import ScriptedModel, Think, tool
from culet.adapters.model import (
    ModelRequest,
    ToolCall,
    directive_chunk,
    to_model_messages,
)
from culet.kernel import Agent, AgentToolRun, Letter, Sent
from culet.kernel.testing import Harness, open_test_kernel
from culet.kernel.testing_scenario import Point, Scenario, Spec, run_scenario
from volume import Volume

CRASHES = Volume(40, 60, 10**6)
REQUESTS: list[ModelRequest] = []
PACE_S = 0.0  # between two events of the model
DOOR = trio.Event()


@pytest.fixture(autouse=True)
def fresh() -> None:
    global DOOR
    REQUESTS.clear()
    DOOR = trio.Event()


class Digger(Think):
    max_steps = 4

    def get_model(self) -> Any:
        def play(request: ModelRequest) -> list[Any]:
            REQUESTS.append(request)
            told = [m.content for m in request.messages if m.role == "user"]
            called = any(m.tool_calls for m in request.messages)
            if not called:
                return [ToolCall(id="c1", name="dig", input={})]
            return [f"heard {len(told)}."]

        return ScriptedModel(play, pace_s=PACE_S)

    def get_tools(self) -> dict[str, Any]:
        return {"dig": tool(self.dig, on_uncertain="repeat")}

    async def dig(self) -> str:
        await DOOR.wait()
        return "dug"

    async def on_directive(self, letter: Letter) -> str:
        return "" if letter.body == "nothing" else await super().on_directive(letter)


class Boss(Agent):
    async def begin(self) -> AgentToolRun:
        return await self.run_agent_tool(Digger, "dig", run_id="r", detached=True)

    async def say(self, body: Any, letter_id: str | None = None) -> Sent:
        return await self.runs.send("r", body, id=letter_id)

    async def run(self) -> AgentToolRun | None:
        return self.runs.get("r")


def kernel() -> Any:
    return open_test_kernel(roots=[Boss], facets=[Digger])


async def begun(test: Harness) -> Any:
    boss = await test.kernel.get_agent(Boss, "a")
    await boss.begin()
    await trio.sleep(5)
    return boss


def users(request: ModelRequest) -> list[str]:
    return [m.content for m in request.messages if m.role == "user"]


@pytest.mark.rule("B-23")
async def test_the_model_hears_it_before_its_next_step(clock: object) -> None:
    async with kernel() as test:
        boss = await begun(test)
        await boss.say("deeper")
        await boss.say("nothing")
        await boss.say({"to": 3})
        await trio.sleep(5)
        assert len(REQUESTS) == 1
        DOOR.set()
        await trio.sleep(5)
        run = await boss.run()
        assert (run.status, run.summary) == ("completed", "heard 3.")
        assert users(REQUESTS[-1]) == ["dig", "deeper", '{\n  "to": 3\n}']
        roles = [m.role for m in REQUESTS[-1].messages]
        assert roles == ["user", "assistant", "tool", "user", "user"]
        answer = await fetch(
            test.kernel, ("Boss", "a"), ("Digger", "r"), leaf="/get-messages"
        )
        assert isinstance(answer.body, bytes)
        assert answer.body.count(b'"data-directive"') == 2


@pytest.mark.rule("B-23")
async def test_one_that_comes_in_the_last_step_gets_one_more(clock: object) -> None:
    async with kernel() as test:
        boss = await test.kernel.get_agent(Boss, "a")
        DOOR.set()

        def at_last(_kernel: Any, _subject: Any, kind: Any) -> None:
            if kind == "text-delta" and len(REQUESTS) == 2:
                agent = test.find([("Boss", "a")])
                assert agent is not None
                mail = agent.tree.mail
                mail.send(agent, "r", "wait", "late")

        test.kernel.subscribe("turn:chunk", lambda *said: at_last(*said[-3:]))
        await boss.begin()
        await trio.sleep(5)
        run = await boss.run()
        assert len(REQUESTS) == 3
        assert users(REQUESTS[-1]) == ["dig", "wait"]
        assert (run.status, run.summary) == ("completed", "heard 1.heard 2.")


@pytest.mark.rule("B-23")
async def test_a_crash_tells_nothing_twice_and_loses_nothing(clock: object) -> None:
    async with kernel() as test:
        boss = await begun(test)
        await boss.say("deeper", "l1")
        await test.crash()
        await test.reopen()
        boss = await test.kernel.get_agent(Boss, "a")
        assert (await boss.say("deeper", "l1")).known
        DOOR.set()
        await trio.sleep(30)
        run = await boss.run()
        assert run.summary == "heard 2."
        assert users(REQUESTS[-1]) == ["dig", "deeper"]


@pytest.mark.rule("B-23")
async def test_one_that_was_said_and_not_done_is_known_by_its_id(
    clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "PACE_S", 10.0)
    async with kernel() as test:
        boss = await test.kernel.get_agent(Boss, "a")
        await boss.begin()
        await trio.sleep(25)
        await boss.say("deeper", "l1")
        DOOR.set()
        await trio.sleep(2)  # the model is asked again and has said nothing
        tree = test.tree("Boss", "a")
        assert tree is not None
        sql = "UPDATE mail SET done_at = NULL, body = '\"deeper\"' WHERE done_at > 0"
        tree.db.execute(sql)
        tree.touched()
        await tree.durable()
        await test.crash()
        await test.reopen()
        boss = await test.kernel.get_agent(Boss, "a")
        await trio.sleep(100)
        assert users(REQUESTS[-1]) == ["dig", "deeper"]
        assert (await boss.run()).summary == "heard 2."


async def test_letters_without_end_do_not_exceed_the_steps(
    clock: object,
) -> None:
    async with kernel() as test:
        boss = await begun(test)
        sends = 0

        def on(_channel: str, *_said: Any) -> None:
            nonlocal sends
            node = test.find([("Boss", "a")])
            if node is not None and sends < 90:
                sends += 1
                node.tree.mail.send(node, "r", "more", None)

        test.kernel.subscribe("turn:chunk", on)
        DOOR.set()
        await trio.sleep(30)
        run = await boss.run()
        assert run.status == "completed"
        assert len(REQUESTS) == Digger.max_steps


def test_a_directive_stands_between_two_steps() -> None:
    step = {"type": "step-start"}
    say: Any = lambda text: {"type": "text", "text": text}  # noqa: E731
    parts = [step, say("one"), directive_chunk("l", "turn left"), step, say("two")]
    found = to_model_messages([{"id": "m", "role": "assistant", "parts": parts}])
    assert [(m.role, m.content) for m in found] == [
        ("assistant", "one"), ("user", "turn left"), ("assistant", "two"),
    ]  # fmt: skip


async def story(scenario: Scenario) -> None:
    """Send one letter by an id, and hear that the model has had it once."""
    boss = await scenario.get(Boss, "a")
    await boss.begin()
    await boss.say("deeper", "l1")
    DOOR.set()
    await scenario.advance(60)
    run = await boss.run()
    assert run.status == "completed"
    assert run.summary == "heard 2."
    scenario.ended("r", run.status)


@pytest.mark.rule("B-23")
def test_the_model_hears_a_letter_once_wherever_the_process_dies() -> None:
    spec = Spec(roots=[Boss], facets=[Digger])
    whole = run_scenario(story, spec)
    assert whole.findings == ()
    commits, records = whole.lives[0]
    points = [Point("commit", n + 1) for n in range(commits)]
    points += [Point("landed", n + 1) for n in range(records)]
    assert len(points) > 20
    for point in points[:: max(1, len(points) // CRASHES.now)]:
        told = run_scenario(story, spec, (point,), hasty=True)
        assert told.findings == (), point
