"""What a chat hears of runs that it detached: in the place of a turn, once, as messages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio

from adapters.peer import user
from culet.adapters import AIChatAgent
from culet.kernel import AgentToolRun, Chunk, Detached, Progress, Turn
from culet.kernel.errors import UsageError
from culet.kernel.testing import Harness, open_test_kernel
from kernel.agents import rows, tree_of
from kernel.toolkit import HEARD, Kid, say
from kernel.workers import Worker, fresh_start, heard

SILENT: set[str] = set()


@pytest.fixture(autouse=True)
def fresh() -> None:
    fresh_start()
    SILENT.clear()


class Talker(AIChatAgent):
    """Answers with what it was told last; a text of digits takes so many seconds."""

    async def on_chat_message(self, turn: Turn) -> AsyncIterator[Chunk]:
        last = turn.messages[-1]
        text = last["parts"][0]["text"]
        HEARD.append(("turn", text.split("\n")[0]))
        yield say(f"heard {last['role']}")
        if text.isdigit():
            await trio.sleep(int(text))
        HEARD.append(("turn over", text.split("\n")[0]))

    async def delivered(self, run: AgentToolRun) -> None:
        HEARD.append(("delivered", run.run_id, run.status))

    async def waits(self, run: AgentToolRun) -> None:
        try:
            await self.save_messages([user("m", "from the callback")])
        except UsageError:
            HEARD.append(("refused",))
        await self.submit_messages([user("m", "from the callback")])

    def format_detached_finish(self, run: AgentToolRun) -> str:
        return "" if "finish" in SILENT else super().format_detached_finish(run)

    def format_detached_milestone(self, run: AgentToolRun, progress: Progress) -> str:
        if "milestone" in SILENT:
            return ""
        return super().format_detached_milestone(run, progress)


def opened() -> Any:
    return open_test_kernel(roots=[Talker], facets=[Worker, Kid])


async def talker(test: Harness) -> Any:
    await test.kernel.get_agent(Talker, "a")
    node = test.find([("Talker", "a")])
    assert node is not None
    return node.agent


def told(me: Any) -> list[tuple[str, str]]:
    return [(m["id"], m["role"]) for m in me.messages if m["id"].startswith("detached")]


@pytest.mark.rule("T-197", "T-198", "T-199")
@pytest.mark.parametrize("source", [True, "my-source"])
async def test_the_end_of_a_run_is_a_message_and_a_turn_of_the_model(
    source: Any, clock: object
) -> None:
    async with opened() as test:
        me = await talker(test)
        policy = Detached(notify=source)
        await me.run_agent_tool(Worker, [["say", "forty"]], run_id="r", detached=policy)
        await test.advance(1)
        (asked, answer) = me.messages
        assert asked["id"] == "detached-finish:r:completed"
        assert (asked["role"], answer["role"]) == ("user", "assistant")
        assert "forty" in asked["parts"][0]["text"]
        assert asked["metadata"] == {
            "source": "detached-agent-tool" if source is True else source,
            "runId": "r", "agentType": "Worker", "status": "completed",
        }  # fmt: skip
        assert len(heard("turn")) == 1
        assert me.runs.deliveries() == []


@pytest.mark.rule("T-197")
async def test_an_empty_text_is_no_notice(clock: object) -> None:
    async with opened() as test:
        me = await talker(test)
        SILENT.update({"finish", "milestone"})
        policy = Detached(notify=True, milestones=["m"])
        await me.run_agent_tool(Worker, [["mark", "m"]], run_id="r", detached=policy)
        await test.advance(1)
        assert me.messages == []
        assert heard("turn") == []
        assert me.runs.deliveries() == []


@pytest.mark.rule("T-193", "T-195", "T-199")
async def test_a_delivery_waits_for_the_turn_and_the_next_turn_for_it(
    clock: object,
) -> None:
    async with opened() as test:
        me = await talker(test)
        await me.submit_messages([user("u1", "300")])
        await test.advance(1)
        policy = Detached(on_finish="delivered")
        await me.run_agent_tool(Worker, [["sleep", 5]], run_id="r", detached=policy)
        await me.run_agent_tool(
            Worker, [["sleep", 5]], run_id="s", detached=Detached(notify=True)
        )
        await test.advance(200)
        assert me.runs.get("r").status == "completed"
        assert heard("delivered") == [], "a turn is going on"
        (waiting, _) = me.runs.deliveries()
        assert waiting.attempts == 0, "it is not taken before its turn"
        await test.advance(200)
        kinds = [h[0] for h in HEARD if h[0] in ("turn", "turn over", "delivered")]
        assert kinds.index("turn over") < kinds.index("delivered")
        assert len(heard("delivered")) == 1
        assert told(me) == [("detached-finish:s:completed", "user")]
        turns = [h[0] for h in HEARD if h[0].startswith("turn")]
        assert turns == ["turn", "turn over"] * 2, "one at a time"


@pytest.mark.rule("T-199")
async def test_a_callback_cannot_wait_for_a_turn_but_may_ask_for_one(
    clock: object,
) -> None:
    async with opened() as test:
        me = await talker(test)
        policy = Detached(on_finish="waits")
        await me.run_agent_tool(Worker, [], run_id="r", detached=policy)
        await test.advance(5)
        assert heard("refused") == [("refused",)]
        assert heard("turn") == [("turn", "from the callback")]
        assert me.runs.deliveries() == []


@pytest.mark.rule("T-200", "T-201")
@pytest.mark.parametrize("mode", ["narrate", "react"])
async def test_a_milestone_is_narrated_or_reacted_to_once(
    mode: Any, clock: object
) -> None:
    async with opened() as test:
        me = await talker(test)
        policy = Detached(notify=True, milestones=["m"], milestone_mode=mode)
        script = [["report", {"message": "x"}], ["mark", "m"], ["mark", "m"]]
        await me.run_agent_tool(Worker, script, run_id="r", detached=policy)
        await test.advance(5)
        role = "assistant" if mode == "narrate" else "user"
        assert told(me) == [
            ("detached-ms:r:m", role), ("detached-finish:r:completed", "user"),
        ]  # fmt: skip
        assert len(heard("turn")) == (1 if mode == "narrate" else 2)
        line = next(m for m in me.messages if m["id"] == "detached-ms:r:m")
        assert line["metadata"]["milestone"] == "m"


@pytest.mark.rule("T-198", "T-200")
async def test_a_notice_given_again_after_a_crash_is_the_one_that_is_there(
    clock: object,
) -> None:
    async with opened() as test:
        me = await talker(test)
        policy = Detached(notify=True, milestones=["m"])
        await me.run_agent_tool(Worker, [["mark", "m"]], run_id="r", detached=policy)
        await test.advance(5)
        run, progress = me.runs.get("r"), me.runs.reports("r").milestones[0]
        before = me.messages
        await tree_of(test, "Talker").durable()
        await test.crash()
        await test.reopen()
        me = await talker(test)
        for _ in range(2):
            await me._notify_milestone(run, progress, react=False)
            await me._notify_finish(run, True)
        await test.advance(5)
        assert me.messages == before
        assert len(heard("turn")) == 1


@pytest.mark.rule("T-200a")
async def test_a_narrated_line_does_not_cost_a_turn_that_is_to_go_on(
    clock: object,
) -> None:
    async with opened() as test:
        me = await talker(test)
        policy = Detached(milestones=["m"])
        script = [["sleep", 4], ["mark", "m"], ["sleep", 900]]
        await me.run_agent_tool(Worker, script, run_id="r", detached=policy)
        await me.submit_messages([user("u1", "10")])
        await test.advance(5)
        await tree_of(test, "Talker").durable()
        await test.crash()
        await test.reopen()
        me = await talker(test)
        await test.advance(30)
        assert heard("turn over") == [("turn over", "10")]
        ids = [m["id"] for m in me.messages]
        assert ids[0] == "u1"
        assert sorted(i.startswith("detached-ms") for i in ids) == [False, False, True]
        assert [m["role"] for m in me.messages].count("assistant") == 2
        sql = "SELECT status FROM fiber WHERE kind = 'turn'"
        assert rows(tree_of(test, "Talker"), sql) == [("completed",)]
