"""An answer that comes between a turn's end and its last frames is told behind them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from adapters.peer import Client, connected, user
from culet.adapters import ScriptedModel, Think
from culet.adapters.model import ModelRequest, ToolCall
from culet.adapters.scripted import step_number
from culet.kernel.testing import open_test_kernel

STEPS: Sequence[Any] = ([ToolCall(id="c1", name="own", input={})], ["So."])


class Clerk(Think):
    def get_model(self) -> Any:
        def play(request: ModelRequest) -> Any:
            return STEPS[step_number(request)]

        return ScriptedModel(play)


@pytest.mark.rule("C-072")
async def test_the_message_with_an_answer_follows_the_end_of_its_turn(
    clock: object,
) -> None:
    async with (
        open_test_kernel(roots=[Clerk]) as test,
        connected(test.kernel, ("Clerk", "a")) as tab,
        connected(test.kernel, ("Clerk", "a"), connection_id="d") as other,
    ):

        def answer() -> None:  # the turn has ended, its last frames are not out
            own = {"toolName": "own", "output": 1, "autoContinue": True}
            tab.send("cf_agent_tool_result", toolCallId="c1", **own)

        def ending(_channel: str, tree: Any, subject: Any, _attempt: int) -> None:
            if subject.id == "r1":
                tree.barrier.before[answer] = None

        test.kernel.subscribe("turn:end", ending)
        tab.chat("r1", user("u1", "hi"), clientTools=[{"name": "own"}])
        for client in (tab, other):
            await client.until(lambda c: bool(c.of("cf_agent_message_updated")))
            assert places(client) == ["done", "updated"]


def places(client: Client) -> list[str]:
    """Return in which order a client heard of the end and of the answer."""
    told = []
    for frame in client.frames:
        if frame.get("id") == "r1" and frame.get("done"):
            told.append("done")
        if frame["type"] == "cf_agent_message_updated":
            told.append("updated")
    return told


@pytest.mark.rule("W-172")
async def test_who_answers_second_is_told_what_stands(clock: object) -> None:
    async with (
        open_test_kernel(roots=[Clerk]) as test,
        connected(test.kernel, ("Clerk", "a")) as tab,
        connected(test.kernel, ("Clerk", "a"), connection_id="d") as other,
    ):
        tab.chat("r1", user("u1", "hi"), clientTools=[{"name": "own"}])
        await other.ended("r1")
        for client, output in ((tab, "first"), (other, "second")):
            own = {"toolName": "own", "output": output, "autoContinue": False}
            client.send("cf_agent_tool_result", toolCallId="c1", **own)
        await other.until(lambda c: len(c.of("cf_agent_message_updated")) == 2)
        outputs = [
            part.get("output")
            for frame in other.of("cf_agent_message_updated")
            for part in frame["message"]["parts"]
            if "toolCallId" in part
        ]
        assert outputs == ["first", "first"]
        assert len(tab.of("cf_agent_message_updated")) == 1


@pytest.mark.rule("W-182")
async def test_the_message_of_a_continuation_is_told_once_more_behind_its_end(
    clock: object,
) -> None:
    async with (
        open_test_kernel(roots=[Clerk]) as test,
        connected(test.kernel, ("Clerk", "a")) as tab,
    ):
        tab.chat("r1", user("u1", "hi"), clientTools=[{"name": "own"}])
        await tab.ended("r1")
        own = {"toolName": "own", "output": 1, "autoContinue": True}
        tab.send("cf_agent_tool_result", toolCallId="c1", **own)
        await tab.until(lambda c: len(c.of("cf_agent_message_updated")) == 2)
        last = tab.frames[-1]
        assert last["type"] == "cf_agent_message_updated"
        assert last["message"]["parts"][-1]["text"] == "So."
        assert tab.frames[-2].get("done") is True
