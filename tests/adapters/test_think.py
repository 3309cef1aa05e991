"""Think: the loop of steps, tools side by side, and a turn that goes on after a crash."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing
from typing import Any, ClassVar

import msgspec
import pytest
import trio

from adapters.peer import Client, connected, fetch, user
from culet.adapters import ScriptedModel, Think, TurnResult, tool
from culet.adapters.model import (
    Finish,
    ModelEvent,
    ModelRequest,
    ReasoningDelta,
    TextDelta,
    ToolCall,
    Usage,
)
from culet.adapters.tooling import ToolContext
from culet.kernel import AgentToolRun, Limits, agent_tool
from culet.kernel.testing import Harness, open_test_kernel

ME = ("Thinker", "a")


class Stage:
    """What a test sees of the agents, over all their lives, and where they wait."""

    def __init__(self) -> None:
        self.done: list[
            str
        ] = []  # what cannot be taken back: each tool call carried out
        self.requests: list[ModelRequest] = []
        self._doors: dict[str, trio.Event] = {}
        self.reached: list[str] = []

    def door(self, name: str) -> trio.Event:
        return self._doors.setdefault(name, trio.Event())

    async def through(self, name: str) -> None:
        self.reached.append(name)
        await self.door(name).wait()

    async def at(self, name: str) -> None:
        with trio.fail_after(30):
            while name not in self.reached:
                await trio.sleep(0.01)


STAGE = Stage()


@pytest.fixture(autouse=True)
def fresh() -> None:
    STAGE.__init__()  # type: ignore[misc]


class Recorded:
    """A model that plays a script, keeps its requests, and waits at `wait:…` texts."""

    def __init__(self, steps: Any) -> None:
        self._model = ScriptedModel(steps)

    async def stream(self, request: ModelRequest, /) -> AsyncIterator[ModelEvent]:
        STAGE.requests.append(request)
        async with aclosing(self._model.stream(request)) as events:
            async for event in events:
                if isinstance(event, TextDelta) and event.text.startswith("wait:"):
                    await STAGE.through(event.text)
                yield event


def call(call_id: str, tool_name: str, **given: Any) -> ToolCall:
    return ToolCall(id=call_id, name=tool_name, input=given)


class Worker(Think):
    """A child that says its input back; `wait:…` waits at that door."""

    model = Recorded(lambda r: [r.messages[-1].content])

    def format_agent_tool_input(self, input: Any, request: Any) -> str:  # noqa: A002
        return str(input["text"])


class Thinker(Think):
    script: ClassVar[Any] = []

    def get_model(self) -> Any:
        return Recorded(self.script)

    def get_system_prompt(self) -> str:
        return "be brief"

    def get_tools(self) -> dict[str, Any]:
        return {
            "add": self.add,
            "slow": tool(self.slow, on_uncertain="fail"),
            "again": tool(self.slow, on_uncertain="repeat"),
            "worker": agent_tool(Worker, description="works"),
            "count": tool(self.count),
            "click": tool(self.add, client=True),
            "pay": tool(self.add, needs_approval=True),
            "report": tool(self.report),
        }

    async def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        STAGE.done.append(f"add {a} {b}")
        return a + b

    async def slow(self, ctx: ToolContext, name: str) -> str:
        of_agent = ctx.idempotency_key.partition(":")[2]
        STAGE.done.append(f"{name} {ctx.attempt} {of_agent}")
        await STAGE.through(name)
        return name

    async def count(self, to: int) -> AsyncIterator[int]:
        for number in range(to):
            yield number

    async def report(self, ctx: ToolContext) -> str:
        await ctx.progress(fraction=0.5, message="half")
        return "told"

    async def ask(self, text: str) -> TurnResult:
        return await self.save_messages([user(f"u{len(self.messages)}", text)])

    async def all_runs(self) -> list[AgentToolRun]:
        return self.runs.list()


Thinkers = Callable[..., type[Thinker]]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set what the model says, one argument a step."""
    return lambda *steps: monkeypatch.setattr(Thinker, "script", steps)


def kernel() -> Any:
    return open_test_kernel(roots=[Thinker], facets=[Worker])


async def last(test: Harness) -> dict[str, Any]:
    """Return the last message of the history."""
    answer = await fetch(test.kernel, ME, leaf="/get-messages")
    assert isinstance(answer.body, bytes)
    found: dict[str, Any] = msgspec.json.decode(answer.body)[-1]
    return found


def shown(message: dict[str, Any]) -> list[Any]:
    """Return the parts of a message, short: texts, and (tool, state, value)."""
    out: list[Any] = []
    for part in message["parts"]:
        if "toolCallId" in part:
            value = part.get("output", part.get("errorText"))
            out.append((part["toolName"], part["state"], value))
        elif part["type"] == "step-start":
            out.append("|")
        else:
            out.append(part["text"])
    return out


def kinds(chunks: Iterable[dict[str, Any]]) -> list[str]:
    return [c["type"] for c in chunks]


# ---- the loop


async def test_a_step_without_tools_is_one_step(clock: object, script: Any) -> None:
    script([ReasoningDelta("hm"), "Hello ", "you", Usage(input_tokens=2), Finish()])
    async with kernel() as test, connected(test.kernel, ME) as tab:
        tab.chat("r1", user("u1", "hi"))
        await tab.ended("r1")
        assert kinds(tab.chunks("r1")) == [
            "start", "start-step", "reasoning-start", "reasoning-delta",
            "reasoning-end", "text-start", "text-delta", "text-delta", "text-end",
            "message-metadata", "finish-step", "finish",
        ]  # fmt: skip
        assert tab.chunks("r1")[-1]["finishReason"] == "stop"
        message = await last(test)
        assert shown(message) == ["|", "hm", "Hello you"]
        assert message["metadata"] == {"usage": {"inputTokens": 2, "outputTokens": 0}}
        (request,) = STAGE.requests
        assert (request.system, request.partial) == ("be brief", "")
        assert [m.content for m in request.messages] == ["hi"]
        assert {"add", "worker"} <= {t.name for t in request.tools}


async def test_tools_run_and_the_model_is_asked_again_with_their_results(
    clock: object,
    script: Any,
) -> None:
    script(
        ["Adding. ", call("c1", "add", a=1, b=2), call("c2", "add", a=3, b=4)],
        [call("c3", "add", a=3, b=7)],
        ["It is 10."],
    )
    async with kernel() as test, connected(test.kernel, ME) as tab:
        tab.chat("r1", user("u1", "hi"))
        await tab.ended("r1")
        assert shown(await last(test)) == [
            "|", "Adding. ", ("add", "output-available", 3),
            ("add", "output-available", 7),
            "|", ("add", "output-available", 10), "|", "It is 10.",
        ]  # fmt: skip
        assert sorted(STAGE.done) == ["add 1 2", "add 3 4", "add 3 7"]
        roles = [m.role for m in STAGE.requests[-1].messages]
        assert roles == ["user", "assistant", "tool", "tool", "assistant", "tool"]


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (call("c", "nothing"), "there is no tool 'nothing'"),
        (call("c", "add", a="x", b=1), "bad input"),
        (call("c", "add"), "bad input"),
    ],
)
async def test_a_tool_call_that_cannot_be_is_told_to_the_model(
    clock: object, script: Any, asked: ToolCall, told: str
) -> None:
    script([asked], ["I see."])
    async with kernel() as test:
        result = await (await test.kernel.get_agent(Thinker, "a")).ask("hi")
        assert result.status == "completed"
        part = shown(await last(test))[1]
        assert part[:2] == (asked.name, "output-error")
        assert told in part[2]
        assert told in STAGE.requests[1].messages[-1].content


async def test_the_number_of_steps_is_bounded(
    clock: object, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Thinker, "max_steps", 3)
    script(*[[call(f"c{i}", "add", a=i, b=i)] for i in range(9)])
    async with kernel() as test:
        result = await (await test.kernel.get_agent(Thinker, "a")).ask("hi")
        assert result.status == "completed"
        assert len(STAGE.requests) == 3


@pytest.mark.rule("W-239")
async def test_an_id_that_was_used_is_replaced_so_that_each_call_has_its_run(
    clock: object,
    script: Any,
) -> None:
    twice = [call("c0", "worker", text="x"), call("c0", "worker", text="y")]
    script(twice, ["done"])
    async with kernel() as test:
        thinker = await test.kernel.get_agent(Thinker, "a")
        await thinker.ask("first")
        await thinker.ask("second")
        runs = await thinker.all_runs()
        assert [r.summary for r in runs] == ["x", "y", "x", "y"]
        assert len({r.run_id for r in runs}) == 4
        assert len({r.parent_tool_call_id for r in runs}) == 4


async def test_a_generator_s_values_are_preliminary_until_the_last(
    clock: object,
    script: Any,
) -> None:
    script([call("c", "count", to=2)], ["ok"])
    async with kernel() as test, connected(test.kernel, ME) as tab:
        tab.chat("r1", user("u1", "hi"))
        await tab.ended("r1")
        found = [c for c in tab.chunks("r1") if c["type"] == "tool-output-available"]
        assert [(c["output"], c.get("preliminary", False)) for c in found] == [
            (0, True), (1, True), (1, False),
        ]  # fmt: skip
        assert ("count", "output-available", 1) in shown(await last(test))


async def test_a_tool_reports_progress_of_its_turn(clock: object, script: Any) -> None:
    script([call("c", "report")], ["ok"])
    async with kernel() as test, connected(test.kernel, ME) as tab:
        tab.chat("r1", user("u1", "hi"))
        await tab.ended("r1")
        told = [c for c in tab.chunks("r1") if c["type"] == "data-agent-progress"]
        assert told[0]["data"]["message"] == "half"
        assert ("report", "output-available", "told") in shown(await last(test))


@pytest.mark.parametrize(
    ("name", "state"),
    [("click", "input-available"), ("pay", "approval-requested"),
     ("own", "input-available")],
)  # fmt: skip
async def test_a_call_that_somebody_else_answers_ends_the_turn_unanswered(
    clock: object, script: Any, name: str, state: str
) -> None:
    script([call("c", name, a=1, b=2), call("d", "add", a=1, b=2)])
    async with kernel() as test, connected(test.kernel, ME) as tab:
        tab.chat("r1", user("u1", "hi"), clientTools=[{"name": "own"}])
        assert (await tab.ended("r1")).get("outcome") is None
        assert shown(await last(test)) == [
            "|", (name, state, None), ("add", "output-available", 3),
        ]  # fmt: skip
        assert STAGE.done == ["add 1 2"]
        assert "own" in {t.name for t in STAGE.requests[0].tools}


async def test_a_model_that_fails_in_mid_stream_ends_the_turn_and_the_partial_stays(
    clock: object,
    script: Any,
) -> None:
    script(["some ", "words", RuntimeError("no more tokens")])
    async with kernel() as test, connected(test.kernel, ME) as tab:
        tab.chat("r1", user("u1", "hi"))
        assert (await tab.ended("r1"))["outcome"] == "error"
        assert shown(await last(test)) == ["|", "some words"]


# ---- agent tools


async def test_runs_of_one_step_go_on_at_once_and_come_back_in_stable_order(
    clock: object,
    script: Any,
) -> None:
    script([call(f"c{i}", "worker", text=f"wait:{i}") for i in range(3)], ["All done."])
    async with kernel() as test, connected(test.kernel, ME) as tab:
        tab.chat("r1", user("u1", "hi"))
        for number in (2, 0, 1):
            await STAGE.at(f"wait:{number}")
        for number in (2, 0, 1):  # they end in another order than they were asked
            STAGE.door(f"wait:{number}").set()
            await trio.sleep(0.1)
        await tab.ended("r1")
        outputs = [c for c in tab.chunks("r1") if c["type"] == "tool-output-available"]
        assert [c["output"] for c in outputs] == ["wait:2", "wait:0", "wait:1"]
        values = [("worker", "output-available", f"wait:{i}") for i in range(3)]
        assert shown(await last(test)) == ["|", *values, "|", "All done."]
        told = [m.content for m in STAGE.requests[-1].messages if m.role == "tool"]
        assert told == ["wait:0", "wait:1", "wait:2"]
        started = [
            f["event"] for f in tab.of("agent-tool-event")
            if f["event"]["kind"] == "started"
        ]  # fmt: skip
        assert [e["order"] for e in started] == [0, 1, 2]
        calls = {f["parentToolCallId"] for f in tab.of("agent-tool-event")}
        assert calls == {"c0", "c1", "c2"}


@pytest.mark.rule("T-055")
async def test_stop_in_mid_turn_ends_the_runs_it_waits_for(
    clock: object, script: Any
) -> None:
    script(
        [call("c0", "worker", text="quick"), call("c1", "worker", text="wait:x")],
        ["never"],
    )
    async with kernel() as test, connected(test.kernel, ME) as tab:
        thinker = await test.kernel.get_agent(Thinker, "a")
        tab.chat("r1", user("u1", "hi"))
        await STAGE.at("wait:x")
        await tab.until(lambda c: "tool-output-available" in kinds(c.chunks("r1")))
        tab.send("cf_agent_chat_request_cancel", id="r1")
        assert (await tab.ended("r1"))["outcome"] == "aborted"
        runs = await thinker.all_runs()
        assert [(r.status, r.reason) for r in runs] == [
            ("completed", None), ("aborted", "asker-ended"),
        ]  # fmt: skip
        assert shown(await last(test)) == [
            "|", ("worker", "output-available", "quick"),
            ("worker", "output-error", "aborted"),
        ]  # fmt: skip


async def test_a_run_that_fails_is_told_to_the_model_as_what_it_is(
    clock: object, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Worker, "model", Recorded([["x", RuntimeError("broken")]]))
    script([call("c", "worker", text="x")], ["Sorry."])
    async with kernel() as test:
        await (await test.kernel.get_agent(Thinker, "a")).ask("hi")
        (run,) = await (await test.kernel.get_agent(Thinker, "a")).all_runs()
        part = shown(await last(test))[1]
        told = {
            "ok": False, "status": "error", "error": "broken", "retryable": False,
            "reason": "failed",
        }  # fmt: skip
        assert part[2] == told | {"error": f"the run failed (error {run.error_id})"}
        (result,) = [m for m in STAGE.requests[-1].messages if m.role == "tool"]
        assert json.loads(result.content) == told


# ---- crash


async def crash_at(test: Harness, tab: Client, *doors: str) -> None:
    """Let the process die when all stand before those doors and all is published."""
    for door in doors:
        await STAGE.at(door)
    await trio.sleep(0.1)
    await test.crash()
    for door in doors:
        STAGE.door(door).set()
    await test.reopen()


async def resumed(test: Harness) -> Client:
    """Follow the turn r1 to its end from a new socket; return what that client has."""
    async with connected(test.kernel, ME) as late:
        late.send("cf_agent_stream_resume_ack", id="r1")
        await late.ended("r1")
        return late


@pytest.mark.rule("C-034", "C-035")
async def test_a_text_that_a_crash_cut_goes_on_in_the_same_part(
    clock: object, script: Any
) -> None:
    script(["Once ", "upon ", "wait:x", " a time"])
    async with kernel() as test:
        async with connected(test.kernel, ME) as tab:
            tab.chat("r1", user("u1", "hi"))
            await crash_at(test, tab, "wait:x")
        late = await resumed(test)
        assert late.text("r1") == "Once upon wait:x a time"
        assert kinds(late.chunks("r1")).count("text-start") == 1
        assert shown(await last(test)) == ["|", "Once upon wait:x a time"]
        assert [r.partial for r in STAGE.requests] == ["", "Once upon "]
        # the model is told what is over, not the step that it is in
        assert [m.role for m in STAGE.requests[-1].messages] == ["user"]


async def test_finished_steps_and_tool_calls_are_never_repeated(
    clock: object, script: Any
) -> None:
    script(
        [call("c1", "add", a=1, b=2)],
        [call("c2", "add", a=3, b=4), call("c3", "again", name="again")],
        ["The ", "wait:end", "."],
    )
    async with kernel() as test:
        async with connected(test.kernel, ME) as tab:
            tab.chat("r1", user("u1", "hi"))
            await crash_at(test, tab, "again")
        async with connected(test.kernel, ME) as tab:
            await crash_at(test, tab, "wait:end")
        late = await resumed(test)
        adds = [d for d in STAGE.done if d.startswith("add")]
        assert adds == ["add 1 2", "add 3 4"]
        repeats = [d for d in STAGE.done if d.startswith("again")]
        assert repeats == ["again 1 msg-r1:c3", "again 2 msg-r1:c3"]
        assert late.text("r1") == "The wait:end."
        settled = [c for c in late.chunks("r1") if c["type"].startswith("tool-output")]
        assert sorted(c["toolCallId"] for c in settled) == ["c1", "c2", "c3"]


@pytest.mark.rule("C-039")
async def test_a_tool_of_which_nobody_knows_is_not_repeated_but_told(
    clock: object,
    script: Any,
) -> None:
    script([call("c1", "slow", name="slow")], ["Well."])
    async with kernel() as test:
        async with connected(test.kernel, ME) as tab:
            tab.chat("r1", user("u1", "hi"))
            await crash_at(test, tab, "slow")
        await resumed(test)
        assert [d for d in STAGE.done if d.startswith("slow")] == ["slow 1 msg-r1:c1"]
        name, state, told = shown(await last(test))[1]
        assert (name, state) == ("slow", "output-error")
        assert "nobody knows" in told


@pytest.mark.rule("T-157", "HB-05", "C-039")
async def test_runs_are_joined_after_a_crash_not_asked_again(
    clock: object, script: Any
) -> None:
    script(
        [call("c0", "worker", text="quick"), call("c1", "worker", text="wait:x")],
        ["So."],
    )
    async with kernel() as test:
        async with connected(test.kernel, ME) as tab:
            tab.chat("r1", user("u1", "hi"))
            await crash_at(test, tab, "wait:x")
        late = await resumed(test)
        runs = await (await test.kernel.get_agent(Thinker, "a")).all_runs()
        assert [(r.status, r.summary) for r in runs] == [
            ("completed", "quick"), ("completed", "wait:x"),
        ]  # fmt: skip
        assert late.text("r1") == "So."
        assert shown(await last(test)) == [
            "|", ("worker", "output-available", "quick"),
            ("worker", "output-available", "wait:x"), "|", "So.",
        ]  # fmt: skip


@pytest.mark.limit("reattach_s")
async def test_who_joins_a_silent_run_after_a_crash_waits_as_long_as_the_limits_say(
    clock: object, script: Any
) -> None:
    script([call("c1", "worker", text="wait:x")], ["Later."])
    limits = Limits(reattach_s=5)
    async with open_test_kernel(
        roots=[Thinker], facets=[Worker], limits=limits
    ) as test:
        async with connected(test.kernel, ME) as tab:
            tab.chat("r1", user("u1", "hi"))
            await STAGE.at("wait:x")
            await trio.sleep(0.1)
            await test.crash()
            await test.reopen()
        await trio.sleep(4.9)
        assert "output-available" not in str(await last(test))
        await trio.sleep(10)  # the turn itself was tried again a moment later
        (_, state, told) = shown(await last(test))[1]
        assert (state, told["status"], told["childStillRunning"]) == (
            "output-available", "running", True,
        )  # fmt: skip


async def test_usage_of_all_attempts_adds_up(clock: object, script: Any) -> None:
    used = Usage(input_tokens=10, output_tokens=1, cost=0.5)
    script([call("c1", "again", name="x"), used], ["End.", used])
    async with kernel() as test:
        async with connected(test.kernel, ME) as tab:
            tab.chat("r1", user("u1", "hi"))
            await crash_at(test, tab, "x")
        await resumed(test)
        assert (await last(test))["metadata"]["usage"] == {
            "inputTokens": 20, "outputTokens": 2, "cost": 1.0,
        }  # fmt: skip
