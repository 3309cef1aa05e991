"""What a run gives back: text, output that was checked, and what the model hears."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any, ClassVar

import msgspec
import pytest
import trio

from culet.adapters import AIChatAgent, ScriptedModel, Think
from culet.adapters.model import ToolCall
from culet.kernel import Agent, Chunk, Limits, Retry, Turn, agent_tool
from culet.kernel.core.limits import ERROR_CHARS
from culet.kernel.core.run import AgentToolRun, model_value
from culet.kernel.errors import CapacityError, EffectFailed, UsageError
from culet.kernel.testing import open_test_kernel
from kernel.agents import rows, tree_of
from kernel.peers import connect
from kernel.toolkit import (
    TURNS,
    Kid,
    Top,
    again,
    ask,
    frames,
    kinds,
    opened,
    run_frames,
    say,
    top,
)


class Score(msgspec.Struct):
    n: int


class Question(msgspec.Struct):
    query: str


class Answers(Kid):
    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        yield say("an answer")


# ---- an output that somebody wants


@pytest.mark.rule("T-086", "T-087", "T-088", "T-093", "B-09")
@pytest.mark.parametrize(
    ("script", "told"),
    [
        (
            [["say", '{"n": 7}']],
            "Expected `object`, got `null`",
        ),  # never read from prose
        ([["output", {"n": "x"}]], "Expected `int`, got `str` - at `$.n`"),
        ([["output", {}]], "missing required field `n`"),
    ],
)
async def test_an_output_that_does_not_fit_is_an_error_everywhere(
    script: Any, told: str, clock: object
) -> None:
    async with opened() as test:
        me = await top(test)
        peer = await connect(test)
        run = await me.run_agent_tool(Kid, script, run_id="r", output_type=Score)
        await me.durable()
        assert (run.status, run.reason, run.output) == ("error", "bad-output", None)
        assert told in run.error
        assert run.summary, "what it said is kept"
        assert run == me.runs.get("r")
        last = run_frames(peer)[-1]["event"]
        shown = f"the run failed (error {run.error_id})"
        assert (last["kind"], last["error"]) == ("error", shown)
        told_model = model_value(run)
        assert (told_model["ok"], told_model["retryable"]) == (False, False)


@pytest.mark.rule("T-085", "T-100")
async def test_an_output_that_fits_is_the_result_in_every_life(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        run = await me.run_agent_tool(
            Kid, [["output", {"n": 7}]], run_id="r", output_type=Score
        )
        assert (run.status, run.output) == ("completed", {"n": 7})
        assert model_value(run) == {"n": 7}
        await me.durable()
        me = await again(test)
        assert me.runs.get("r") == run
        assert await me.run_agent_tool(Kid, [["output", {"n": 7}]], run_id="r") == run


@pytest.mark.rule("T-086", "T-087", "T-140")
@pytest.mark.parametrize(
    ("output", "status"),
    [({"n": 7}, "completed"), ({"n": "x"}, "error"), (None, "error")],
)
async def test_an_output_is_checked_after_a_crash_as_well(
    output: Any, status: str, clock: object
) -> None:
    async with opened() as test:
        me = await top(test)
        script = [["say", "x"], ["durable"], ["sleep", 5], ["output", output]]
        async with trio.open_nursery() as nursery:
            ask(nursery, me, Kid, script, run_id="r", output_type=Score)
            await test.advance(1)
            me = await again(test)
            nursery.cancel_scope.cancel()
        assert tree_of(test).runs.validators == {}, "the type itself is gone"
        await test.advance(9)
        run = me.runs.get("r")
        assert run.status == status
        if status == "error":
            assert run.reason == "bad-output"
            assert "$" in run.error


@pytest.mark.rule("T-097")
def test_a_type_that_cannot_be_checked_is_refused_when_the_tool_is_made() -> None:
    for options in (
        {"input_type": {"type": "object"}}, {"output_type": {"type": "object"}},
        {"output_type": open},
    ):  # fmt: skip
        with pytest.raises(UsageError):
            agent_tool(Kid, description="x", **options)


@pytest.mark.rule("T-096")
async def test_an_input_that_does_not_fit_leaves_no_row(clock: object) -> None:
    tool = agent_tool(Kid, description="x", input_type=Question)
    async with opened() as test:
        me = await top(test)
        with pytest.raises(UsageError, match="query"):
            await me.run_agent_tool(tool, {"query": 7}, run_id="r")
        assert rows(tree_of(test), "SELECT count(*) FROM run") == [(0,)]


@pytest.mark.rule("T-089")
async def test_a_chat_child_has_no_output_unless_it_says_so(clock: object) -> None:
    class Chat(AIChatAgent):
        async def on_chat_message(self, turn: Turn) -> AsyncIterator[Chunk]:
            yield say("prose")

    class Tells(Chat):
        def get_agent_tool_output(self, run_id: str) -> Any:
            return {"n": len(self.messages)}

    async with opened(Chat, Tells) as test:
        me = await top(test)
        plain = await me.run_agent_tool(Chat, "x", run_id="plain")
        assert (plain.output, plain.summary) == (None, "prose")
        wanted = await me.run_agent_tool(Chat, "x", run_id="w", output_type=Score)
        assert (wanted.status, wanted.summary) == ("error", "prose")
        told = await me.run_agent_tool(Tells, "x", run_id="t", output_type=Score)
        assert told.output == {"n": 2}


# ---- what the model hears


@pytest.mark.rule("T-102", "T-092")
def test_the_model_is_told_when_asking_again_may_help() -> None:
    def told(**facts: Any) -> Any:
        return model_value(AgentToolRun(run_id="r", agent_type="Kid", **facts))

    silent = told(status="running", reason="no-progress")
    assert silent == {
        "ok": False, "status": "running", "retryable": True, "childStillRunning": True,
    }  # fmt: skip
    over = told(status="interrupted", reason="budget-exceeded")
    assert over["retryable"] is True
    assert "childStillRunning" not in over
    assert over["reason"] == "budget-exceeded"
    full = told(status="error", reason="capacity", error="2 runs are going on already")
    assert full["retryable"] is True
    assert told(status="error", error="x")["retryable"] is False


@pytest.mark.rule("T-101", "W-204")
async def test_the_summary_on_the_wire_is_never_null(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        await me.run_agent_tool(Kid, [], run_id="empty")
        await me.run_agent_tool(Kid, [["output", {"n": 1}]], run_id="output")
        for run_id in ("empty", "output"):
            last = (await frames(me, run_id))[-1]["event"]
            assert last["kind"] == "finished"
            assert isinstance(last["summary"], str)
        assert (await frames(me, "empty"))[-1]["event"]["summary"] == ""


def asked_by_model(*replies: Any, tool: Any) -> tuple[type[Agent], list[Any]]:
    """A Think agent with one tool, and the requests that its model gets."""
    seen: list[Any] = []

    class Watched(ScriptedModel):
        def stream(self, request: Any, /) -> Any:
            seen.append(request)
            return super().stream(request)

    class Boss(Think):
        model = Watched(replies)

        def get_tools(self) -> dict[str, Any]:
            return {"ask_kid": tool}

    return Boss, seen


def question(text: str) -> list[dict[str, Any]]:
    return [{"id": text, "role": "user", "parts": [{"type": "text", "text": text}]}]


@pytest.mark.rule("T-095", "T-098", "B-22")
async def test_names_are_for_people_descriptions_are_for_models(clock: object) -> None:
    tool = agent_tool(
        Answers, description="words for the model", input_type=Question,
        display_name="Words for people", icon="owl",
    )  # fmt: skip
    assert not callable(tool), "only an agent runs it: there is none to guess"
    call = ToolCall(id="c1", name="ask_kid", input={"query": "x"})
    boss, seen = asked_by_model([call], "done", tool=tool)
    async with open_test_kernel(roots=[boss], facets=[Answers]) as test:
        me = await top(test, boss)
        peer = await connect(test, ("Boss", "a"))
        await me.save_messages(question("go"))
        await me.durable()
        asked = repr([msgspec.to_builtins(r, enc_hook=repr) for r in seen])
        assert "words for the model" in asked
        for shown in ("Words for people", "owl"):
            assert shown not in asked
        started = run_frames(peer)[0]["event"]
        assert started["display"] == {"name": "Words for people", "icon": "owl"}
        assert "words for the model" not in str(run_frames(peer))


@pytest.mark.rule("T-099")
async def test_one_tool_serves_several_parents_each_with_its_own_runs(
    clock: object,
) -> None:
    tool = agent_tool(Kid, description="x")
    async with open_test_kernel(roots=[Top], facets=[Kid]) as test:
        parents = []
        for name in ("a", "b"):
            await test.kernel.get_agent(Top, name)
            node = test.find([("Top", name)])
            assert node is not None
            parents.append(node.agent)
        for me in parents:
            run = await me.run_agent_tool(tool, [["say", me.name]], run_id="r")
            assert run.summary == me.name
        assert TURNS == {"r": 2}
        assert [len(me.runs.list()) for me in parents] == [1, 1]


@pytest.mark.rule("T-075")
async def test_what_a_failed_run_said_is_kept_beside_its_error(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        run = await me.run_agent_tool(
            Kid, [["say", "half"], ["fail", "no"]], run_id="r"
        )
        assert (run.status, run.error, run.summary) == ("error", "no", "half")
        assert kinds(await frames(me, "r"))[-1] == (2, "error")


# ---- more than a row can hold


class Much(Agent):
    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        yield say("said")
        match turn.input["what"]:
            case "output":
                turn.output = "x" * (turn.input["bytes"] - 2)  # and its quotes
            case "usage":
                turn.usage = "x" * (turn.input["bytes"] - 2)
            case "stash":
                turn.stash("x" * (turn.input["bytes"] - 2))
            case "summary":
                turn.summary = 7  # type: ignore[assignment]


@pytest.mark.limit("output_bytes")
@pytest.mark.parametrize("what", ["output", "usage", "stash"])
@pytest.mark.parametrize("more", [0, 1, 32 << 20])
async def test_an_output_that_is_too_large_is_an_error_that_says_so(
    what: str, more: int, clock: object
) -> None:
    """Also one that the file would not take; nothing else of the tree hears of it."""
    limits = Limits(output_bytes=4_000, shown_bytes=4_000)
    async with opened(Much, limits=limits) as test:
        me = await top(test)
        given = {"what": what, "bytes": 4_000 + more}
        run = await me.run_agent_tool(Much, given, run_id="r")
        assert run.summary == "said"
        if not more:
            assert (run.status, run.error) == ("completed", None)
            return
        assert (run.status, run.output) == ("error", None)
        assert run.reason == ("failed" if what == "stash" else "bad-output")
        assert f"has {4_000 + more} bytes, the limit is 4000" in run.error
        assert (await top(test)) is me, "the tree has not begun anew"


async def test_a_summary_that_is_no_text_is_an_error_that_says_so(
    clock: object,
) -> None:
    async with opened(Much) as test:
        run = await (await top(test)).run_agent_tool(Much, {"what": "summary"})
        assert (run.status, run.reason) == ("error", "bad-output")
        assert run.error.endswith("a summary is a text, not a int")


@pytest.mark.parametrize(
    ("place", "told"),
    [
        ({"parent_tool_call_id": ["c1"]}, "parent_tool_call_id is a text, not a list"),
        ({"parent_tool_call_id": b"c1"}, "parent_tool_call_id is a text, not a bytes"),
        ({"parent_tool_call_id": "\ud800"}, "cannot be stored as JSON"),
        ({"parent_tool_call_id": "c" * 20_000}, "the limit is 16384"),
        ({"display_order": "first"}, "display_order is a whole number"),
        ({"display_order": 2**70}, "display_order is a whole number"),
    ],
)
async def test_a_place_that_no_row_can_hold_is_refused_and_leaves_nothing(
    place: dict[str, Any], told: str, clock: object
) -> None:
    async with opened() as test:
        me = await top(test)
        with pytest.raises((UsageError, CapacityError), match=re.escape(told)):
            await me.run_agent_tool(Kid, [["say", "x"]], run_id="r", **place)
        assert me.runs.list() == []
        assert (await me.run_agent_tool(Kid, [["say", "x"]], run_id="r")).summary == "x"


LONG = "\ud800" + "z" * (20 << 20)  # more than a row may have, and no Unicode


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("it has no words")


class Wordy(Agent):
    heard: ClassVar[list[str]] = []

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        yield say("said")
        if turn.input == "wait":
            await trio.sleep_forever()
        raise Mute if turn.input == "mute" else ValueError(LONG)

    async def late(self, payload: str, schedule: object) -> None:
        raise Mute if payload == "mute" else ValueError(LONG)

    async def on_error(
        self, error: BaseException, *, connection: object = None
    ) -> None:
        self.heard.append(type(error).__name__)


async def test_an_error_of_any_length_is_told_live_as_it_is_stored(
    clock: object,
) -> None:
    async with opened(Wordy) as test:
        me = await top(test)
        peer = await connect(test)
        run = await me.run_agent_tool(Wordy, "fail", run_id="r")
        assert (run.status, len(run.error)) == ("error", ERROR_CHARS)
        run = await me.run_agent_tool(Wordy, "mute", run_id="m")
        assert (run.status, run.reason, run.error) == ("error", "failed", "Mute")
        run = await me.run_agent_tool(Wordy, "wait", run_id="w", detached=True)
        receipt = await me.runs.cancel("w", LONG)
        assert (receipt.status, receipt.ended) == ("aborted", True)
        assert len(me.runs.get("w").reason) == ERROR_CHARS
        await me.durable()
        live = [f["event"] for f in run_frames(peer) if f["event"]["kind"] == "aborted"]
        again = (await frames(me, "w"))[-1]
        assert live == [again["event"]]


@pytest.mark.parametrize(
    ("kind", "said", "length"),
    [("long", "ValueError: ?zzz", ERROR_CHARS), ("mute", "Mute: ", 6)],
)
async def test_a_call_that_fails_with_an_error_of_any_length_rests(
    kind: str, said: str, length: int, clock: object
) -> None:
    Wordy.heard.clear()
    async with opened(root=Wordy) as test:
        me = await top(test, Wordy)
        made = await me.schedule(0, "late", kind, retry=Retry(max_attempts=2))
        with trio.fail_after(60):
            while not me.schedules.get(made.id).dead:
                await test.advance(1)
        resting = me.schedules.get(made.id)
        assert (resting.attempts, len(resting.error)) == (2, length)
        assert resting.error.startswith(said)
        assert me.heard == [said.split(":")[0]]


async def test_a_fiber_and_an_effect_that_fail_with_an_error_of_any_length_end(
    clock: object,
) -> None:
    async def fails() -> None:
        raise ValueError(LONG)

    async with opened() as test:
        me = await top(test)
        fiber = await me.fibers.start("f", fails, wait=True)
        assert (fiber.status, len(fiber.error)) == ("error", ERROR_CHARS)
        for _ in range(2):  # and it is the recorded outcome
            with pytest.raises(EffectFailed) as caught:
                await me.effects.call("e", fails, key="k")
            assert len(str(caught.value)) <= ERROR_CHARS
