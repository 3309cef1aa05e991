"""Client tools and approvals on the wire, what the other files leave."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar

import msgspec
import pytest
import trio

from adapters.peer import Client, Frame, connected, fetch, user
from adapters.talk import probe
from culet.adapters import AIChatAgent, ScriptedModel, Think
from culet.adapters.model import ModelRequest, ToolCall
from culet.adapters.scripted import step_number
from culet.kernel import Chunk, Turn
from culet.kernel.testing import open_test_kernel

ME = ("Clerk", "a")
STEPS: Sequence[Any] = ([ToolCall(id="c1", name="own", input={"n": 1})], ["So."])


class Clerk(Think):
    """Asks its client for one call, then says `So.`"""

    requests: ClassVar[list[ModelRequest]] = []

    def get_model(self) -> Any:
        def play(request: ModelRequest) -> Any:
            self.requests.append(request)
            return STEPS[step_number(request)]

        return ScriptedModel(play)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Clerk, "requests", [])


def result(tab: Client, **more: Any) -> None:
    fields = {"toolName": "own", "autoContinue": True, **more}
    tab.send("cf_agent_tool_result", toolCallId="c1", **fields)


def part_of(message: Frame) -> Frame:
    [part] = [p for p in message["parts"] if "toolCallId" in p]
    return dict(part)


async def asked(tab: Client) -> None:
    tab.chat("r1", user("u1", "hi"), clientTools=[{"name": "own"}])
    await tab.ended("r1")


async def went_on(tab: Client) -> str:
    """Wait for the end of a continuation; return the id of its request."""
    await tab.until(
        lambda c: any(f.get("continuation") and f["done"] for f in c.frames)
    )
    return str(next(f["id"] for f in tab.frames if f.get("continuation")))


@pytest.mark.rule("W-110", "W-171")
@pytest.mark.parametrize(
    ("said", "part"),
    [
        ({"output": {"x": 1}}, {"state": "output-available", "output": {"x": 1}}),
        ({"output": None}, {"state": "output-available", "output": None}),
        ({}, {"state": "output-available", "output": None}),  # undefined in the client
        (
            {"state": "output-error", "errorText": "no", "output": 1},
            {"state": "output-error", "errorText": "no"},
        ),
    ],
)
async def test_a_result_stands_in_the_part_of_its_call_and_all_are_told(
    said: Frame, part: Frame, clock: object
) -> None:
    async with (
        open_test_kernel(roots=[Clerk]) as test,
        connected(test.kernel, ME) as tab,
        connected(test.kernel, ME) as other,
    ):
        await asked(tab)
        result(tab, **{"autoContinue": False, **said})
        for client in (tab, other):  # who has answered as well
            await client.until(lambda c: bool(c.of("cf_agent_message_updated")))
            [told] = client.of("cf_agent_message_updated")
            assert told["message"]["id"] == "msg-r1"
            assert part_of(told["message"]) == {
                "type": "tool-own", "toolCallId": "c1", "toolName": "own",
                "input": {"n": 1}, **part,
            }  # fmt: skip
        stored = await fetch(test.kernel, ME, leaf="/get-messages")
        assert isinstance(stored.body, bytes)
        assert msgspec.json.decode(stored.body)[-1] == told["message"]


@pytest.mark.rule("W-185")
async def test_tools_that_come_with_the_result_are_offered_to_what_goes_on(
    clock: object,
) -> None:
    async with (
        open_test_kernel(roots=[Clerk]) as test,
        connected(test.kernel, ME) as tab,
    ):
        await asked(tab)
        result(tab, output=1, clientTools=[{"name": "other", "description": "new"}])
        await went_on(tab)
        first, second = Clerk.requests
        assert [t.name for t in first.tools] == ["own"]
        assert [(t.name, t.description) for t in second.tools] == [("other", "new")]


@pytest.mark.rule("W-180", "W-182")
async def test_every_tab_follows_a_continuation_from_the_message_it_was_shown(
    clock: object,
) -> None:
    async with (
        open_test_kernel(roots=[Clerk]) as test,
        connected(test.kernel, ME) as tab,
        connected(test.kernel, ME) as other,
    ):
        await asked(tab)
        before = len(other.frames)
        result(tab, output=1)
        answer = await probe(tab, "p")
        assert (answer["type"], "reason" in answer) == (
            "cf_agent_stream_resume_none", False,
        )  # fmt: skip
        going = await went_on(tab)
        assert going != "r1"
        for client in (tab, other):
            await client.until(lambda c: c.frames[-1]["type"].endswith("updated"))
            told = client.responses(going)
            assert all(f["continuation"] for f in told)
            assert [f.get("seq") for f in told[:-1]] == list(range(len(told) - 1))
            assert client.chunks(going)[0] == {"type": "start"}
            kinds = [f["type"].removeprefix("cf_agent_") for f in client.frames]
            # transcript to everybody, then the end, then the message once more
            assert kinds[-3:] == [
                "chat_messages",
                "use_chat_response",
                "message_updated",
            ]
            assert client.frames[-3]["messages"][-1] == client.frames[-1]["message"]
        heard = {f["type"] for f in other.frames[before:]}
        assert heard.isdisjoint({"cf_agent_stream_resuming", "cf_agent_stream_pending"})


class Echo(AIChatAgent):
    """Asks for a call, and asks again in what goes on, as some models do."""

    async def on_chat_message(self, turn: Turn) -> AsyncIterator[Chunk]:
        call = {"toolCallId": "c1", "toolName": "own"}
        yield {"type": "tool-input-start", **call}
        yield {"type": "tool-input-available", **call, "input": {"n": 1}}
        if turn.continuation:
            asked = {"approvalId": "again", "toolCallId": "c1"}
            yield {"type": "tool-approval-request", **asked}
            yield {"type": "tool-output-denied", "toolCallId": "c1"}
            yield {"type": "text-start", "id": "t"}
            yield {"type": "text-delta", "id": "t", "delta": "So."}
            yield {"type": "text-end", "id": "t"}


@pytest.mark.rule("W-191")
async def test_a_call_that_is_asked_again_in_a_continuation_stays_answered(
    clock: object,
) -> None:
    path = ("Echo", "a")
    async with (
        open_test_kernel(roots=[Echo]) as test,
        connected(test.kernel, path) as tab,
    ):
        tab.chat("r1", user("u1", "hi"))
        await tab.ended("r1")
        result(tab, output="mine")
        await went_on(tab)
        await trio.sleep(1)
        transcript = tab.of("cf_agent_chat_messages")[-1]["messages"][-1]
        assert [p["type"] for p in transcript["parts"]] == ["tool-own", "text"]
        part = part_of(transcript)
        assert (part["state"], part["output"]) == ("output-available", "mine")
        assert "approval" not in part
