"""Tools that a client runs and calls that a person approves: who answers, and when once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, ClassVar

import msgspec
import pytest
import trio

from adapters.peer import Client, connected, fetch, user
from culet.adapters import AIChatAgent, ScriptedModel, Think, tool
from culet.adapters.model import ModelRequest, ToolCall
from culet.adapters.scripted import step_number
from culet.adapters.tooling import ToolContext
from culet.kernel import AgentToolRun, Detached, Turn, agent_tool
from culet.kernel.core import clientframes as client
from culet.kernel.testing import Harness, open_test_kernel

ME = ("Clerk", "a")
MSG = "msg-r1"


class Stage:
    """What a test sees of the agents over all their lives, and the door they wait at."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.requests: list[ModelRequest] = []
        self.shut = trio.Event()
        self.progress: list[Any] = []
        self.ended: list[AgentToolRun] = []
        self.bare: list[list[Any]] = []


STAGE = Stage()


@pytest.fixture(autouse=True)
def fresh() -> None:
    STAGE.__init__()  # type: ignore[misc]


def call(call_id: str, tool_name: str, **given: Any) -> ToolCall:
    return ToolCall(id=call_id, name=tool_name, input=given)


class Clerk(Think):
    script: ClassVar[Any] = []

    def get_model(self) -> Any:
        def play(request: ModelRequest) -> Any:
            STAGE.requests.append(request)
            step = self.script[step_number(request)]
            return [step] if isinstance(step, str) else step

        return ScriptedModel(play)

    def get_tools(self) -> dict[str, Any]:
        return {
            "pay": tool(self.pay, needs_approval=True),
            "repay": tool(self.pay, needs_approval=True, on_uncertain="repeat"),
            "gift": tool(self.pay, needs_approval=lambda given: given["n"] > 10),
            "odd": tool(self.pay, needs_approval=lambda given: given["none"]),
            "hold": tool(self.hold, on_uncertain="fail"),
            "click": tool(self.click, client=True),
            "shoot": tool(self.click, client=True, needs_approval=True),
            "desk": agent_tool(Desk, description="asks a person"),
        }

    async def pay(self, ctx: ToolContext, n: int) -> str:
        STAGE.done.append(f"pay {n} {ctx.identity}")
        if n == 13:
            await STAGE.shut.wait()
        return f"paid {n}"

    async def hold(self) -> str:
        STAGE.done.append("hold")
        await STAGE.shut.wait()
        return "held"

    async def click(self, where: str) -> str:
        raise AssertionError("the client runs it")

    def format_agent_tool_input(self, input: Any, request: Any) -> str:  # noqa: A002
        return str(input["text"])

    async def on_progress(self, run: Any, progress: Any) -> None:
        STAGE.progress.append(progress)

    async def all_runs(self) -> list[AgentToolRun]:
        return self.runs.list()

    async def cancel_all(self) -> list[str | None]:
        return [(await self.runs.cancel(r.run_id)).status for r in self.runs.list()]

    async def goes_on(self) -> None:
        await self.continue_last_turn()

    async def bounded(self) -> AgentToolRun:
        bounds = Detached(max_budget_s=60, no_progress_s=5)
        return await self.run_agent_tool(
            Desk, {"text": "pay"}, run_id="bounded", detached=bounds
        )


class Desk(Clerk):
    script: ClassVar[Any] = [[call("k1", "pay", n=1)], "Thanks."]


class Bare(AIChatAgent):
    """Asks for two calls by itself, and says what became of them."""

    async def on_chat_message(self, turn: Turn) -> AsyncIterator[dict[str, Any]]:
        STAGE.bare.append(turn.messages)
        if not turn.continuation:
            for name in ("one", "two"):
                asked = {"toolCallId": name, "toolName": name, "input": {}}
                yield {"type": "tool-input-available", **asked}
            yield {
                "type": "tool-approval-request",
                "toolCallId": "two",
                "approvalId": "p",
            }
            return
        yield {"type": "step-start"}
        states = [p["state"] for p in turn.messages[-1]["parts"] if "toolCallId" in p]
        for part in turn.messages[-1]["parts"]:
            if part.get("state") == "approval-responded":
                given = {"toolCallId": part["toolCallId"], "output": "done by me"}
                yield {"type": "tool-output-available", **given}
        yield {"type": "text-start", "id": "t"}
        yield {"type": "text-delta", "id": "t", "delta": " ".join(states)}
        yield {"type": "text-end", "id": "t"}

    async def ask_bare(self) -> AgentToolRun:
        return await self.run_agent_tool(Bare, "go", run_id="run1")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set what the model says, one argument a step."""
    return lambda *steps: monkeypatch.setattr(Clerk, "script", steps)


def kernel() -> Any:
    return open_test_kernel(roots=[Clerk, Bare], facets=[Desk, Bare])


async def history(test: Harness, *path: tuple[str, str]) -> list[dict[str, Any]]:
    answer = await fetch(test.kernel, *(path or (ME,)), leaf="/get-messages")
    assert isinstance(answer.body, bytes)
    found: list[dict[str, Any]] = msgspec.json.decode(answer.body)
    return found


def shown(message: dict[str, Any]) -> list[Any]:
    """Return the parts of a message, short: texts, and (tool, state, value)."""
    out: list[Any] = []
    for part in message["parts"]:
        if "toolCallId" in part:
            value = part.get("output", part.get("errorText"))
            out.append((part["toolName"], part["state"], value))
        elif part["type"] == "text":
            out.append(part["text"])
    return out


async def last(test: Harness, *path: tuple[str, str]) -> list[Any]:
    return shown((await history(test, *path))[-1])


def result(tab: Client, call_id: str, output: Any, **more: Any) -> None:
    """Answer as the published client does: the result, then the question what streams."""
    fields = {"toolName": "x", "output": output, "autoContinue": True, **more}
    tab.send("cf_agent_tool_result", toolCallId=call_id, **fields)
    tab.send("cf_agent_stream_resume_request", probeId=f"p-{call_id}")


def approve(tab: Client, call_id: str, yes: bool = True, **more: Any) -> None:
    fields = {"approved": yes, "autoContinue": True, **more}
    tab.send("cf_agent_tool_approval", toolCallId=call_id, **fields)
    tab.send("cf_agent_stream_resume_request", probeId=f"p-{call_id}")


async def asked(tab: Client, *tools: str) -> None:
    """Ask the clerk; return when its turn has ended with calls that wait."""
    own = [{"name": name, "parameters": {}} for name in tools]
    tab.chat("r1", user("u1", "hi"), clientTools=own)
    await tab.ended("r1")


def continuations(tab: Client) -> list[str]:
    """Return the ids of the continuations that this client has seen the end of."""
    found = tab.of("cf_agent_use_chat_response")
    return [f["id"] for f in found if f.get("continuation") and f["done"]]


async def went_on(tab: Client, times: int = 1) -> None:
    await tab.until(lambda c: len(continuations(c)) == times)


async def doing(what: str) -> None:
    """Wait until a tool has begun."""
    with trio.fail_after(30):
        while not any(done.startswith(what) for done in STAGE.done):
            await trio.sleep(0.01)


async def parked(test: Harness) -> None:
    """Wait until the parent was told that its child waits."""
    with trio.fail_after(30):
        while not any(p.phase == "waiting" for p in STAGE.progress):
            await trio.sleep(0.05)


# ---- client tools


@pytest.mark.rule("C-070", "C-072", "W-172", "W-178", "W-185")
async def test_a_client_s_result_goes_on_in_the_same_message_once(
    clock: object, script: Any
) -> None:
    script([call("c1", "own", a=1)], "Thanks.")
    async with (
        kernel() as test,
        connected(test.kernel, ME) as tab,
        connected(test.kernel, ME, connection_id="d") as other,
    ):
        await asked(tab, "own")
        await trio.sleep(60)  # nothing polls, nothing ends it
        assert await last(test) == [("own", "input-available", None)]
        result(tab, "c1", {"x": 1})
        result(other, "c1", "second")  # the first one stands
        await went_on(tab)
        await went_on(other)
        await trio.sleep(5)
        messages = await history(test)
        assert [m["id"] for m in messages] == ["u1", MSG]
        assert shown(messages[-1]) == [
            ("own", "output-available", {"x": 1}), "Thanks.",
        ]  # fmt: skip
        assert len(continuations(tab)) == 1
        # the model has the result, and is offered the client's tools again
        assert [m.content for m in STAGE.requests[-1].messages][-1] == '{"x":1}'
        assert "own" in {t.name for t in STAGE.requests[-1].tools}
        result(tab, "c1", "late")
        await trio.sleep(5)
        assert await last(test) == shown(messages[-1])
        assert len(STAGE.requests) == 2


@pytest.mark.rule("W-180", "W-181", "W-182")
async def test_a_continuation_is_shown_to_every_client_and_offered_to_none(
    clock: object, script: Any
) -> None:
    script([call("c1", "own")], "Thanks.")
    async with kernel() as test, connected(test.kernel, ME) as tab:
        await asked(tab, "own")
        tab.frames.clear()
        result(tab, "c1", 1)
        await went_on(tab)
        kinds = [f["type"] for f in tab.frames]
        assert "cf_agent_stream_resuming" not in kinds
        assert "cf_agent_stream_pending" not in kinds
        [updated] = tab.of("cf_agent_message_updated")
        assert shown(updated["message"]) == [("own", "output-available", 1)]
        [none] = tab.of("cf_agent_stream_resume_none")
        assert none == {"type": "cf_agent_stream_resume_none", "probeId": "p-c1"}
        # its first chunk comes after the client has asked what streams
        first = kinds.index("cf_agent_use_chat_response")
        assert kinds.index("cf_agent_stream_resume_none") < first
        [request_id] = continuations(tab)
        assert tab.chunks(request_id)[0] == {"type": "start"}
        # the transcript before the end, to the one that has answered as well
        assert kinds[-2:] == ["cf_agent_chat_messages", "cf_agent_use_chat_response"]


@pytest.mark.rule("W-181")
@pytest.mark.limit("continuation_s")
@pytest.mark.parametrize("asks", [True, False])
async def test_a_continuation_waits_for_its_client_to_ask_but_not_for_long(
    clock: object, script: Any, asks: bool
) -> None:
    script([call("c1", "own")], "Thanks.")
    async with kernel() as test, connected(test.kernel, ME) as tab:
        await asked(tab, "own")
        tab.send("cf_agent_tool_result", toolCallId="c1", output=1, autoContinue=True)
        limit = test.kernel.limits.continuation_s
        await trio.sleep(limit / 2)
        assert len(STAGE.requests) == 1
        if asks:
            tab.send("cf_agent_stream_resume_request", probeId="p")
            await trio.sleep(limit / 4)
        else:
            await trio.sleep(limit)
        assert len(STAGE.requests) == 2
        await went_on(tab)


@pytest.mark.rule("C-070", "C-040", "W-177", "W-178", "W-179")
async def test_it_goes_on_when_all_calls_are_answered_across_crash_and_reconnect(
    clock: object, script: Any
) -> None:
    script(
        [call("c1", "own"), call("c2", "own"), call("c3", "click", where="x")], "So."
    )
    async with kernel() as test:
        async with connected(test.kernel, ME) as tab:
            await asked(tab, "own")
            result(tab, "c2", 2)
            await trio.sleep(5)
            assert len(STAGE.requests) == 1
        await test.crash()
        await test.reopen()
        async with connected(test.kernel, ME) as tab:
            wrong = {"state": "output-error", "errorText": "no"}
            result(tab, "c1", None, autoContinue=False, **wrong)
            await trio.sleep(5)
            assert len(STAGE.requests) == 1
        async with connected(test.kernel, ME) as tab:
            # one without the wish to go on leaves the wish of the first in place
            result(tab, "c3", "ok", autoContinue=False)
            await went_on(tab)
        assert await last(test) == [
            ("own", "output-error", "no"), ("own", "output-available", 2),
            ("click", "output-available", "ok"), "So.",
        ]  # fmt: skip


@pytest.mark.rule("C-070", "W-178")
async def test_no_answer_wishes_to_go_on_so_nothing_does(
    clock: object, script: Any
) -> None:
    script([call("c1", "own")], "So.")
    async with kernel() as test, connected(test.kernel, ME) as tab:
        await asked(tab, "own")
        result(tab, "c1", 1, autoContinue=False)
        await trio.sleep(10)
        assert await last(test) == [("own", "output-available", 1)]
        assert len(STAGE.requests) == 1


async def test_a_crash_after_the_last_answer_loses_no_continuation(
    clock: object, script: Any
) -> None:
    script([call("c1", "own")], "So.")
    async with kernel() as test:
        async with connected(test.kernel, ME) as tab:
            await asked(tab, "own")
            tab.send(
                "cf_agent_tool_result", toolCallId="c1", output=1, autoContinue=True
            )
            await tab.until(lambda c: bool(c.of("cf_agent_message_updated")))
            assert (
                len(STAGE.requests) == 1
            )  # what was told is durable, it has not begun
        await test.crash()
        await test.reopen()
        await test.kernel.get_agent(Clerk, "a")
        await trio.sleep(10)
        assert await last(test) == [("own", "output-available", 1), "So."]


@pytest.mark.rule("C-071", "W-183")
async def test_a_result_that_comes_while_the_answer_streams_is_part_of_that_stream(
    clock: object, script: Any
) -> None:
    script([call("c1", "own"), call("c2", "hold")], "So.")
    async with kernel() as test, connected(test.kernel, ME) as tab:
        tab.chat("r1", user("u1", "hi"), clientTools=[{"name": "own"}])
        await doing("hold")
        for output in (1, 2):  # without asking what streams: it hears it
            own = {"output": output, "autoContinue": True}
            tab.send("cf_agent_tool_result", toolCallId="c1", **own)
        await tab.until(lambda c: bool(c.of("cf_agent_message_updated")))
        STAGE.shut.set()
        await tab.ended("r1")
        await trio.sleep(5)
        assert await last(test) == [
            ("own", "output-available", 1), ("hold", "output-available", "held"), "So.",
        ]  # fmt: skip
        told = [c for c in tab.chunks("r1") if c.get("toolCallId") == "c1"]
        assert [c["type"] for c in told] == [
            "tool-input-available", "tool-output-available",
        ]  # fmt: skip
        assert continuations(tab) == []  # the turn itself went on


@pytest.mark.rule("C-071")
async def test_a_result_between_a_crash_and_the_next_attempt_is_kept(
    clock: object, script: Any
) -> None:
    script([call("c1", "own"), call("c2", "hold")], "So.")
    async with kernel() as test:
        async with connected(test.kernel, ME) as tab:
            tab.chat("r1", user("u1", "hi"), clientTools=[{"name": "own"}])
            await doing("hold")
            result(tab, "c1", 1)
            await tab.until(lambda c: bool(c.of("cf_agent_message_updated")))
        await test.crash()
        await test.reopen()
        async with connected(test.kernel, ME) as tab:
            tab.send("cf_agent_stream_resume_ack", id="r1")
            await tab.ended("r1")
        [one, two, text] = await last(test)
        assert (one, text) == (("own", "output-available", 1), "So.")
        assert two[:2] == ("hold", "output-error")


@pytest.mark.rule("W-173")
@pytest.mark.parametrize("name", ["pay", "hold", "none"])
async def test_what_the_server_runs_takes_no_result_from_a_client(
    clock: object, script: Any, name: str
) -> None:
    script([call("c1", name, n=1) if name == "pay" else call("c1", name)], "So.")
    async with kernel() as test, connected(test.kernel, ME) as tab:
        tab.chat("r1", user("u1", "hi"))
        if name == "hold":
            await doing("hold")
        else:
            await tab.ended("r1")
        before = await last(test)
        result(tab, "c1", "forged")
        result(tab, "c9", "for nothing")
        if name == "hold":
            approve(tab, "c1", yes=False)
        await trio.sleep(5)
        assert await last(test) == before
        for told in tab.of("cf_agent_message_updated"):  # at most what it is
            assert shown(told["message"]) == before


@pytest.mark.rule("W-174")
@pytest.mark.limit("tool_output_bytes")
async def test_a_result_of_just_the_bound_is_a_result(
    clock: object, script: Any
) -> None:
    script([call("c1", "own")], "So.")
    async with kernel() as test, connected(test.kernel, ME) as tab:
        await asked(tab, "own")
        limit = test.kernel.limits.tool_output_bytes
        result(tab, "c1", "x" * (limit - 2))  # its quotes count
        await went_on(tab)
        [(_, state, _output), said] = await last(test)
        assert (state, said) == ("output-available", "So.")


@pytest.mark.limit("tool_output_bytes")
async def test_one_byte_more_than_the_bound_is_told_as_an_error(
    clock: object, script: Any
) -> None:
    script([call("c1", "own")], "So.")
    async with kernel() as test, connected(test.kernel, ME) as tab:
        await asked(tab, "own")
        limit = test.kernel.limits.tool_output_bytes
        result(tab, "c1", "x" * (limit - 1))
        await went_on(tab)
        [(_, state, text), said] = await last(test)
        assert (state, said) == ("output-error", "So.")
        assert str(limit) in text


async def test_a_result_that_is_too_large_is_told_as_an_error(
    clock: object, script: Any
) -> None:
    script([call("c1", "own")], "So.")
    async with kernel() as test, connected(test.kernel, ME) as tab:
        await asked(tab, "own")
        limit = test.kernel.limits.tool_output_bytes
        result(tab, "c1", "x" * limit)
        await went_on(tab)
        [(_, state, text), said] = await last(test)
        assert (state, said) == ("output-error", "So.")
        assert str(limit) in text


# ---- approvals


@pytest.mark.rule("C-072", "W-111", "W-172", "W-175")
async def test_an_approved_call_runs_once_and_the_first_word_stands(
    clock: object, script: Any
) -> None:
    script([call("c1", "pay", n=1)], "Done.")
    async with kernel() as test, connected(test.kernel, ME) as tab:
        await asked(tab)
        assert await last(test) == [("pay", "approval-requested", None)]
        assert STAGE.done == []
        approve(tab, "c1")
        approve(tab, "c1", yes=False)
        approve(tab, "c1")
        await went_on(tab)
        await trio.sleep(5)
        assert STAGE.done == ["pay 1 None"]
        [_, message] = await history(test)
        assert shown(message) == [("pay", "output-available", "paid 1"), "Done."]
        [part] = [p for p in message["parts"] if "toolCallId" in p]
        assert part["approval"] == {"id": "approval-c1", "approved": True}


@pytest.mark.rule("C-072", "W-176")
async def test_a_denied_call_runs_never_and_the_model_is_told(
    clock: object, script: Any
) -> None:
    script([call("c1", "pay", n=1)], "Pity.")
    async with kernel() as test, connected(test.kernel, ME) as tab:
        await asked(tab)
        approve(tab, "c1", yes=False)
        approve(tab, "c1")
        await went_on(tab)
        await trio.sleep(5)
        assert STAGE.done == []
        assert await last(test) == [("pay", "output-denied", None), "Pity."]
        assert STAGE.requests[-1].messages[-1].content == (
            "error: a person refused this tool call"
        )


@pytest.mark.parametrize(
    ("name", "n", "asks"),
    [("gift", 1, False), ("gift", 11, True), ("odd", 1, True), ("pay", "x", False)],
)
async def test_whether_a_person_is_asked_may_depend_on_the_input(
    clock: object, script: Any, name: str, n: Any, asks: bool
) -> None:
    script([call("c1", name, n=n)], "Done.")
    async with kernel() as test, connected(test.kernel, ME) as tab:
        await asked(tab)
        [(_, state, _), *_rest] = await last(test)
        assert (state == "approval-requested") is asks
        assert STAGE.done == (["pay 1 None"] if (name, n) == ("gift", 1) else [])


@pytest.mark.rule("C-072", "W-171")
@pytest.mark.parametrize("first", ["approve", "result"])
async def test_a_client_tool_may_need_approval_too(
    clock: object, script: Any, first: str
) -> None:
    script([call("c1", "shoot", where="x")], "Done.")
    async with kernel() as test, connected(test.kernel, ME) as tab:
        await asked(tab)
        if first == "approve":
            approve(tab, "c1")
            await trio.sleep(5)
            assert await last(test) == [("shoot", "approval-responded", None)]
            assert len(STAGE.requests) == 1
        result(tab, "c1", "shot")
        await went_on(tab)
        assert await last(test) == [("shoot", "output-available", "shot"), "Done."]


async def test_a_crash_between_approval_and_execution_runs_it_once(
    clock: object, script: Any
) -> None:
    script([call("c1", "pay", n=1)], "Done.")
    async with kernel() as test:
        async with connected(test.kernel, ME) as tab:
            await asked(tab)
            yes = {"approved": True, "autoContinue": True}
            tab.send("cf_agent_tool_approval", toolCallId="c1", **yes)
            await tab.until(lambda c: bool(c.of("cf_agent_message_updated")))
        assert STAGE.done == []
        await test.crash()
        await test.reopen()
        await test.kernel.get_agent(Clerk, "a")
        await trio.sleep(10)
        assert STAGE.done == ["pay 1 None"]
        assert await last(test) == [("pay", "output-available", "paid 1"), "Done."]


@pytest.mark.parametrize(("name", "times"), [("pay", 1), ("repay", 2)])
async def test_a_crash_in_mid_execution_is_as_uncertain_as_of_any_other_tool(
    clock: object, script: Any, name: str, times: int
) -> None:
    script([call("c1", name, n=13)], "Done.")
    async with kernel() as test:
        async with connected(test.kernel, ME) as tab:
            await asked(tab)
            approve(tab, "c1")
            await doing("pay")
        await test.crash()
        STAGE.shut.set()
        await test.reopen()
        await test.kernel.get_agent(Clerk, "a")
        await trio.sleep(30)
        assert len(STAGE.done) == times
        if name == "pay":  # the approval is used up: a person is asked again
            assert await last(test) == [("pay", "approval-requested", None)]
        else:
            assert await last(test) == [(name, "output-available", "paid 13"), "Done."]


async def test_a_continuation_that_is_stopped_leaves_nothing_to_run_again(
    clock: object, script: Any
) -> None:
    script([call("c1", "pay", n=13)], "Done.")
    async with kernel() as test, connected(test.kernel, ME) as tab:
        await asked(tab)
        approve(tab, "c1")
        await doing("pay")
        told = tab.of("cf_agent_use_chat_response")
        [turn] = {f["id"] for f in told if f.get("continuation")}
        tab.send("cf_agent_chat_request_cancel", id=turn)
        await went_on(tab)
        assert await last(test) == [("pay", "output-error", "aborted")]
        approve(tab, "c1")
        await trio.sleep(5)
        assert STAGE.done == ["pay 13 None"]


@pytest.mark.rule("W-184")
async def test_an_approval_after_the_conversation_has_gone_on_runs_nothing(
    clock: object, script: Any
) -> None:
    script([call("c1", "pay", n=1)], "Done.")
    async with kernel() as test, connected(test.kernel, ME) as tab:
        await asked(tab)
        script("Other.")
        tab.chat("r2", user("u2", "something else"))
        await tab.ended("r2")
        approve(tab, "c1")
        await trio.sleep(5)
        [_, first, _, second] = await history(test)
        [(_, state, text)] = shown(first)
        assert (state, "too late" in text) == ("output-error", True)
        assert shown(second) == ["Other."]
        assert STAGE.done == []


async def test_an_approval_that_comes_while_the_turn_streams_is_carried_out_after_it(
    clock: object, script: Any
) -> None:
    script([call("c1", "pay", n=1), call("c2", "hold")], "Done.")
    async with kernel() as test, connected(test.kernel, ME) as tab:
        tab.chat("r1", user("u1", "hi"))
        await doing("hold")
        approve(tab, "c1")
        await tab.until(lambda c: bool(c.of("cf_agent_message_updated")))
        STAGE.shut.set()
        await went_on(tab)
        assert STAGE.done == ["hold", "pay 1 None"]
        assert await last(test) == [
            ("pay", "output-available", "paid 1"), ("hold", "output-available", "held"),
            "Done.",
        ]  # fmt: skip


@pytest.mark.rule("W-106")
async def test_a_client_that_sets_messages_takes_no_decision_back(
    clock: object, script: Any
) -> None:
    script([call("c1", "pay", n=1)], "Done.")
    async with kernel() as test, connected(test.kernel, ME) as tab:
        await asked(tab)
        stale = (await history(test))[-1]
        approve(tab, "c1")
        await went_on(tab)
        tab.send("cf_agent_chat_messages", messages=[stale])
        approve(tab, "c1")
        result(tab, "c1", "forged")
        await trio.sleep(5)
        assert await last(test) == [("pay", "output-available", "paid 1")]
        assert STAGE.done == ["pay 1 None"]


@pytest.mark.rule("W-106")
@pytest.mark.parametrize("how", ["set", "ask"])
@pytest.mark.parametrize("state", ["approval-requested", "approval-responded"])
async def test_a_call_that_a_client_has_made_up_is_never_carried_out(
    clock: object, script: Any, how: str, state: str
) -> None:
    script(*["Hello."] * 9)
    part = {
        "type": "tool-pay", "toolName": "pay", "toolCallId": "x", "state": state,
        "input": {"n": 1}, "approval": {"id": "p", "approved": True},
    }  # fmt: skip
    made_up = {"id": "m", "role": "assistant", "parts": [part]}
    async with kernel() as test, connected(test.kernel, ME) as tab:
        if how == "set":
            tab.send("cf_agent_chat_messages", messages=[user("u0", "hi"), made_up])
        else:
            tab.chat("r1", user("u0", "hi"), made_up)
            await tab.ended("r1")
        approve(tab, "x")
        await trio.sleep(5)
        clerk = await test.kernel.get_agent(Clerk, "a")
        await clerk.goes_on()
        assert STAGE.done == []
        [_, first, *_] = await history(test)
        states = [p["state"] for p in first["parts"] if "toolCallId" in p]
        assert states == ["output-error"]


async def test_clear_forgets_what_waits(clock: object, script: Any) -> None:
    script([call("c1", "pay", n=1), call("c2", "own")], "Done.")
    async with kernel() as test, connected(test.kernel, ME) as tab:
        await asked(tab, "own")
        result(tab, "c2", 1)
        tab.send("cf_agent_chat_clear")
        approve(tab, "c1")
        await trio.sleep(5)
        assert await history(test) == []
        assert STAGE.done == []


async def test_an_author_s_own_chat_goes_on_with_what_was_answered(
    clock: object,
) -> None:
    async with kernel() as test, connected(test.kernel, ("Bare", "a")) as tab:
        tab.chat("r1", user("u1", "hi"))
        await tab.ended("r1")
        result(tab, "one", 1)
        approve(tab, "two")
        await went_on(tab)
        assert await last(test, ("Bare", "a")) == [
            ("one", "output-available", 1), ("two", "output-available", "done by me"),
            "output-available approval-responded",
        ]  # fmt: skip


# ---- a child that waits


@pytest.mark.rule("T-156", "T-248", "C-038")
@pytest.mark.parametrize("cut", [False, True])
async def test_a_child_that_waits_for_a_person_stays_running_and_says_so(
    clock: object, script: Any, cut: bool
) -> None:
    script([call("c1", "desk", text="pay")], "All done.")
    async with kernel() as test:
        async with connected(test.kernel, ME) as tab:
            tab.chat("r1", user("u1", "hi"))
            await parked(test)
        told = next(p for p in STAGE.progress if p.phase == "waiting")
        [asks] = told.data["calls"]
        assert asks.pop("runId").startswith("run-")
        assert asks == {
            "toolCallId": "k1", "toolName": "pay", "state": "approval-requested",
            "input": {"n": 1},
        }  # fmt: skip
        for _ in range(8 if cut else 0):  # more often than a turn without progress has
            await test.crash()
            await test.reopen()
            await test.kernel.get_agent(Clerk, "a")
            await trio.sleep(30)
        await trio.sleep(100_000)
        clerk = await test.kernel.get_agent(Clerk, "a")
        [run] = await clerk.all_runs()
        assert run.status == "running"
        desk = ("Desk", run.run_id)
        async with connected(test.kernel, ME, desk) as window:
            approve(window, "k1")
            approve(window, "k1", yes=False)
            await doing("pay")
        await trio.sleep(30)
        [run] = await clerk.all_runs()
        assert (run.status, run.summary) == ("completed", "Thanks.")
        assert STAGE.done == ["pay 1 None"]
        assert await last(test, ME, desk) == [
            ("pay", "output-available", "paid 1"), "Thanks.",
        ]  # fmt: skip
        assert await last(test) == [
            ("desk", "output-available", "Thanks."),
            "All done.",
        ]


@pytest.mark.rule("C-051")
@pytest.mark.parametrize(
    ("n", "end"), [(1, ("completed", None)), (13, ("interrupted", "budget-exceeded"))]
)
async def test_budget_and_silence_of_a_run_count_only_while_nobody_is_asked(
    clock: object, monkeypatch: pytest.MonkeyPatch, n: int, end: Any
) -> None:
    monkeypatch.setattr(Desk, "script", [[call("k1", "pay", n=n)], "Thanks."])
    async with kernel() as test:
        clerk = await test.kernel.get_agent(Clerk, "a")
        await clerk.bounded()
        await parked(test)
        await trio.sleep(5_000)
        [run] = await clerk.all_runs()
        assert run.status == "running"
        async with connected(test.kernel, ME, ("Desk", "bounded")) as window:
            approve(window, "k1")
            await trio.sleep(100)
        [run] = await clerk.all_runs()
        assert (run.status, run.reason) == end


@pytest.mark.rule("C-051")
async def test_a_budget_that_passes_while_the_process_is_down_ends_no_run_that_waits(
    clock: object,
) -> None:
    async with kernel() as test:
        clerk = await test.kernel.get_agent(Clerk, "a")
        await clerk.bounded()
        await parked(test)
        await test.crash()
        await trio.sleep(500)
        await test.reopen()
        clerk = await test.kernel.get_agent(Clerk, "a")
        await trio.sleep(500)
        [run] = await clerk.all_runs()
        assert run.status == "running"
        async with connected(test.kernel, ME, ("Desk", "bounded")) as window:
            approve(window, "k1")
            await trio.sleep(100)
        [run] = await clerk.all_runs()
        assert run.status == "completed"


async def test_a_child_that_waits_can_be_cancelled(clock: object, script: Any) -> None:
    script([call("c1", "desk", text="pay")], "All done.")
    async with kernel() as test, connected(test.kernel, ME) as tab:
        tab.chat("r1", user("u1", "hi"))
        await parked(test)
        clerk = await test.kernel.get_agent(Clerk, "a")
        assert await clerk.cancel_all() == ["aborted"]
        await tab.ended("r1")
        [(_, state, told), said] = await last(test)
        assert (state, told["status"]) == ("output-available", "aborted")
        assert said == "All done."


@pytest.mark.rule("C-038")
async def test_a_child_of_an_author_s_own_waits_in_passes_also_over_crashes(
    clock: object,
) -> None:
    async with kernel() as test:
        bare = await test.kernel.get_agent(Bare, "a")
        done: list[AgentToolRun] = []
        run = ("Bare", "run1")
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                done.append(await bare.ask_bare())

            nursery.start_soon(ask)
            await trio.sleep(5)
            async with connected(test.kernel, ("Bare", "a"), run) as window:
                result(window, "one", 1)
                await trio.sleep(5)
            assert done == []
            nursery.cancel_scope.cancel()
        await test.crash()
        await test.reopen()
        bare = await test.kernel.get_agent(Bare, "a")
        await trio.sleep(5)
        async with connected(test.kernel, ("Bare", "a"), run) as window:
            approve(window, "two")
            await trio.sleep(5)
        found = await bare.ask_bare()
        assert found.status == "completed"
        assert await last(test, ("Bare", "a"), run) == [
            ("one", "output-available", 1), ("two", "output-available", "done by me"),
            "output-available approval-responded",
        ]  # fmt: skip
        assert len(STAGE.bare) == 2


# ---- frames


def test_an_answer_says_only_what_it_is() -> None:
    frame = client.decode_client_frame(
        b'{"type":"cf_agent_tool_approval","toolCallId":"c","approved":"yes"}'.decode()
    )
    assert frame is None
