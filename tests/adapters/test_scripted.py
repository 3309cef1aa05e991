import pytest
import trio

from culet.adapters.model import (
    Finish,
    ModelEvent,
    ModelMessage,
    ModelRequest,
    TextDelta,
    ToolCall,
)
from culet.adapters.scripted import ScriptedModel
from culet.kernel.errors import UsageError

USER = ModelMessage(role="user", content="hello")
CALL = ToolCall(id="c", name="t", input={})
ONCE = (USER, ModelMessage(role="assistant", tool_calls=(CALL,)))


async def events(model: ScriptedModel, **request: object) -> list[ModelEvent]:
    asked = ModelRequest(**{"messages": (USER,)} | request)  # type: ignore[arg-type]
    return [event async for event in model.stream(asked)]


async def test_a_text_is_said_and_finished() -> None:
    assert [TextDelta("hi"), Finish("stop")] == await events(ScriptedModel(["hi"]))


async def test_the_step_follows_from_the_messages_and_not_from_the_count() -> None:
    model = ScriptedModel([["a", CALL], "b"])

    for _ in range(2):
        assert [TextDelta("a"), CALL, Finish("tool-calls")] == await events(model)
        assert [TextDelta("b"), Finish("stop")] == await events(model, messages=ONCE)
    assert [TextDelta("a"), CALL, Finish("tool-calls")] == await events(
        model, messages=(*ONCE, USER)
    )


async def test_a_call_then_text_still_ends_for_tool_calls() -> None:
    model = ScriptedModel([[CALL, "after"]])
    assert (await events(model))[-1] == Finish("tool-calls")


@pytest.mark.parametrize(
    ("partial", "expected"),
    [
        ("", "one two three"),
        ("on", "e two three"),
        ("one ", "two three"),
        ("one two three", ""),
    ],
)
async def test_what_was_said_is_skipped(partial: str, expected: str) -> None:
    model = ScriptedModel([["one ", "two ", "three", CALL]])
    found = await events(model, partial=partial)
    text = "".join(e.text for e in found if isinstance(e, TextDelta))

    assert expected == text
    assert CALL in found


async def test_a_script_can_fail_in_mid_stream() -> None:
    model = ScriptedModel([["half", OSError("line is dead"), "never"]])
    said = []

    with pytest.raises(OSError, match="line is dead"):
        async for event in model.stream(ModelRequest(messages=(USER,))):
            said.append(event)  # noqa: PERF401 (it raises)
    assert [TextDelta("half")] == said


async def test_a_callable_answers_the_request() -> None:
    model = ScriptedModel(lambda request: [request.messages[-1].content.upper()])
    assert [TextDelta("HELLO"), Finish("stop")] == await events(model)


async def test_a_script_that_is_over_says_so() -> None:
    with pytest.raises(UsageError, match="has 1 steps, asked for step 2"):
        await events(ScriptedModel(["a"]), messages=ONCE)


async def test_pace_is_slept_before_each_event(autojump_clock: object) -> None:
    model = ScriptedModel([["a", "b", "c"]], pace_s=2)
    start = trio.current_time()
    await events(model)
    assert trio.current_time() - start == 6
