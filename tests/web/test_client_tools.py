"""The Python client runs tools of its own and approves calls, of a child as well."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio

from culet.adapters import ScriptedModel, Think, tool
from culet.adapters.model import ModelRequest, ToolCall
from culet.kernel import agent_tool, open_kernel
from culet.kernel.errors import ConnectionLost, Refused
from culet.web import connect, create_app, serve
from culet.web.client_line import Outgoing
from culet.web.client_questions import RunQuestions

PAID: list[int] = []


@pytest.fixture(autouse=True)
def nothing_paid() -> None:
    PAID.clear()


class Desk(Think):
    def get_model(self) -> Any:
        return ScriptedModel(self.play)

    def play(self, request: ModelRequest) -> list[Any]:
        last = request.messages[-1]
        if last.role != "user":
            results = [m.content for m in request.messages if m.role == "tool"]
            return [f"so: {'; '.join(results)}"]
        names = last.content.split()
        return [ToolCall(id=f"c{i}", name=n, input={}) for i, n in enumerate(names)]

    def get_tools(self) -> dict[str, Any]:
        return {
            "pay": tool(self.pay, needs_approval=True),
            "where": tool(self.where, client=True),
            "clerk": agent_tool(Clerk, description="pays"),
        }

    async def pay(self) -> str:
        PAID.append(1)
        return "paid"

    async def where(self) -> str:
        raise AssertionError("the client runs it")


class Clerk(Desk):
    def format_agent_tool_input(self, input: Any, request: Any) -> str:  # noqa: A002
        return "pay where"


@asynccontextmanager
async def serving() -> AsyncIterator[str]:
    async with (
        open_kernel(roots=[Desk], facets=[Clerk], storage="memory:") as kernel,
        trio.open_nursery() as nursery,
    ):
        app = create_app(kernel)
        url = await nursery.start(partial(serve, app, bind="127.0.0.1:0"))
        yield f"ws{url.removeprefix('http')}/agents/desk/a"
        nursery.cancel_scope.cancel()


def text(message: dict[str, Any]) -> str:
    return "".join(p.get("text", "") for p in message["parts"])


async def test_a_call_is_answered_and_approved_and_the_message_goes_on() -> None:
    with trio.fail_after(30):
        async with serving() as url, connect(url) as agent, connect(url) as other:
            answer = await agent.ask("pay where")
            await answer.done()
            await other.until(lambda a: len(a.waiting_calls) == 2)
            pay, where = agent.waiting_calls
            assert (pay["toolName"], pay["state"]) == ("pay", "approval-requested")
            await agent.answer_call(where["toolCallId"], {"at": "home"})
            await other.until(lambda a: len(a.waiting_calls) == 1)
            await other.approve_call(pay["toolCallId"])
            for one in (agent, other):
                await one.until(
                    lambda a: text(a.messages[-1]) == 'so: paid; {"at":"home"}'
                )
                assert [m["role"] for m in one.messages] == ["user", "assistant"]
                assert one.waiting_calls == []
            assert PAID == [1]


async def test_a_call_is_denied_and_a_tool_failed() -> None:
    with trio.fail_after(30):
        async with serving() as url, connect(url) as agent:
            await (await agent.ask("pay where")).done()
            pay, where = agent.waiting_calls
            await agent.approve_call(pay["toolCallId"], False)
            await agent.answer_call(where["toolCallId"], error="no idea", go_on=False)
            said = "so: error: a person refused this tool call; error: no idea"
            await agent.until(lambda a: text(a.messages[-1]) == said)
            assert PAID == []


@pytest.mark.rule("T-248")
async def test_a_child_s_call_is_answered_at_the_child_s_own_address() -> None:
    with trio.fail_after(30):
        async with serving() as url, connect(url) as agent:
            answer = await agent.ask("clerk")
            await agent.until(lambda a: a.runs.runs_by_id)
            [run_id] = agent.runs.runs_by_id

            def waits(a: Any) -> bool:
                progress = a.runs.runs_by_id[run_id].get("progress")
                return progress is not None and progress["phase"] == "waiting"

            await agent.until(waits)
            async with connect(url, sub=[("Clerk", run_id)]) as child:
                await child.until(lambda a: len(a.waiting_calls) == 2)
                pay, where = child.waiting_calls
                await child.approve_call(pay["toolCallId"])
                await child.answer_call(where["toolCallId"], "home")
                message = await answer.done()
            assert message is not None
            assert text(message) == "so: so: paid; home"
            assert PAID == [1]


async def test_a_child_s_calls_are_answered_from_its_parent_s_address() -> None:
    with trio.fail_after(30):
        async with serving() as url, connect(url) as agent, connect(url) as other:
            answer = await agent.ask("clerk")
            for one in (agent, other):
                await one.until(lambda a: len(a.waiting_calls) == 2)
            pay, where = agent.waiting_calls
            assert (pay["toolName"], pay["state"], pay["input"]) == (
                "pay", "approval-requested", {},
            )  # fmt: skip
            assert where["state"] == "input-available"
            run_id = pay["runId"]
            assert await other.approve_call(pay["toolCallId"], run_id=run_id) is True
            assert await agent.approve_call("c0", False, run_id=run_id) is False
            await agent.until(lambda a: len(a.waiting_calls) == 1)
            assert await agent.answer_call("c1", "home", run_id=run_id) is True
            message = await answer.done()
            assert message is not None
            assert text(message) == "so: so: paid; home"
            assert agent.waiting_calls == []
            assert PAID == [1]
            assert await agent.answer_call("c1", "late", run_id=run_id) is False
            with pytest.raises(Refused):
                await agent.answer_call("c1", "x", run_id="of-nobody")


async def test_who_comes_later_sees_what_is_asked_and_an_answer_waits_for_a_socket() -> (
    None
):
    with trio.fail_after(30):
        async with serving() as url:
            async with connect(url) as agent:
                await agent.ask("clerk")
                await agent.until(lambda a: len(a.waiting_calls) == 2)
            async with connect(url) as late:
                await late.until(lambda a: len(a.waiting_calls) == 2)
                run_id = late.waiting_calls[0]["runId"]
                said: list[Any] = []

                async def answers() -> None:
                    said.append(await late.approve_call("c0", False, run_id=run_id))
                    try:
                        await late.answer_call("c1", error="no idea", run_id=run_id)
                    except ConnectionLost:
                        said.append("lost")

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(answers)
                    nursery.start_soon(answers)
                assert sorted(map(str, said)) == ["False", "True"]
                await late.until(lambda a: not a.waiting_calls)
                assert PAID == []


def test_an_answer_that_was_sent_is_unknown_when_its_socket_goes() -> None:
    questions = RunQuestions()
    sent, unsent = Outgoing("a", False), Outgoing("b", False)
    sent.sent = True
    first = questions.expect("r", "c", sent)
    second = questions.expect("r", "c", unsent)
    questions.lost()
    assert isinstance(first.error, ConnectionLost)
    assert not second.over.is_set()
    questions.answered({"runId": "r", "toolCallId": "c", "accepted": True})
    assert second.accepted
    assert second.over.is_set()
    assert questions._pending == {}
    questions.answered({"runId": "r", "toolCallId": "c", "accepted": True})
