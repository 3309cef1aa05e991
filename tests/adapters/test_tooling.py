from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import msgspec
import pytest
import trio

from culet.adapters.tooling import (
    Tool,
    ToolContext,
    ToolFailure,
    ToolOutput,
    ToolResult,
    tool,
)
from culet.kernel.errors import Fenced, UsageError, UserError


class Where(msgspec.Struct):
    file: str
    line: int = 1


def add(a: int, b: int = 2) -> int:
    """Add two numbers.

    The second one is optional.
    """
    return a + b


async def place(where: Where, mode: Literal["r", "w"] = "r") -> dict[str, object]:
    return {"file": where.file, "line": where.line, "mode": mode}


async def count(n: int) -> AsyncIterator[int]:
    for number in range(n):
        yield number


async def breaks_off(n: int) -> AsyncIterator[int]:
    yield n
    raise RuntimeError("lost it")


def fails() -> None:
    raise ValueError("no such thing")


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("it has no words")


def fails_without_words() -> None:
    raise Mute


def fails_in_no_unicode() -> None:
    raise ValueError("\ud800")


def refuses_in_no_unicode() -> None:
    raise UserError("\ud800")


def not_plain() -> object:
    return object()


def large() -> str:
    return "x" * 1000


class Reader:
    async def read(self, path: str, ctx: ToolContext) -> str:
        await ctx.progress(fraction=0.5, message="half")
        return f"{path} {ctx.tool_call_id} {ctx.attempt}"


async def results(
    made: Tool, value: Any, context: ToolContext | None = None, **more: int
) -> list[ToolResult]:
    return [r async for r in made.run(value, context or ToolContext(), **more)]


@pytest.mark.parametrize(
    ("fn", "value", "expected"),
    [
        pytest.param(add, {"a": 1}, [ToolOutput(3)], id="sync with a default"),
        pytest.param(add, {"a": "4", "b": 1}, [ToolOutput(5)], id="lax numbers"),
        pytest.param(
            place,
            {"where": {"file": "a.py"}},
            [ToolOutput({"file": "a.py", "line": 1, "mode": "r"})],
            id="async with a Struct",
        ),
        pytest.param(
            count,
            {"n": 2},
            [ToolOutput(0, True), ToolOutput(1, True), ToolOutput(1)],
            id="a generator's last value is final",
        ),
        pytest.param(count, {"n": 0}, [ToolOutput(None)], id="an empty generator"),
        pytest.param(
            breaks_off,
            {"n": 7},
            [ToolOutput(7, True), ToolFailure("RuntimeError: lost it")],
            id="a generator that fails",
        ),
        pytest.param(
            fails, None, [ToolFailure("ValueError: no such thing")], id="raises"
        ),
        pytest.param(fails_without_words, None, [ToolFailure("Mute: ")], id="no words"),
        pytest.param(
            fails_in_no_unicode, None, [ToolFailure("ValueError: ?")], id="no Unicode"
        ),
        pytest.param(
            refuses_in_no_unicode, None, [ToolFailure("?")], id="no Unicode for people"
        ),
        pytest.param(
            add,
            {"a": "x"},
            [ToolFailure("bad input: Expected `int`, got `str` - at `$.a`")],
            id="wrong type",
        ),
        pytest.param(
            add,
            {},
            [ToolFailure("bad input: Object missing required field `a`")],
            id="missing",
        ),
        pytest.param(
            add,
            {"a": 1, "c": 3},
            [ToolFailure("bad input: Object contains unknown field `c`")],
            id="unknown",
        ),
        pytest.param(
            add,
            [1, 2],
            [ToolFailure("bad input: Expected `object`, got `array`")],
            id="no object",
        ),
    ],
)
async def test_what_comes_of_a_call(
    fn: Any, value: Any, expected: list[ToolResult]
) -> None:
    told = await results(tool(fn), value)
    raised = [getattr(one, "cause", None) for one in told]
    assert expected == [
        ToolFailure(one.text) if isinstance(one, ToolFailure) else one for one in told
    ]
    hidden = (fails, breaks_off, fails_without_words, fails_in_no_unicode)
    assert (raised[-1] is not None) == (fn in hidden), "clients get its id"


async def test_what_is_not_plain_data_is_an_error_text() -> None:
    (failure,) = await results(tool(not_plain), {})
    assert isinstance(failure, ToolFailure)
    assert "not plain data" in failure.text


async def test_a_result_over_the_bound_is_an_error_text() -> None:
    assert [ToolOutput("x" * 1000)] == await results(tool(large), {}, output_bytes=1002)
    (failure,) = await results(tool(large), {}, output_bytes=1001)
    assert isinstance(failure, ToolFailure)
    assert "1002 bytes, at most 1001" in failure.text


async def test_the_context_is_filled_in_and_hidden() -> None:
    told: list[Any] = []

    async def report(progress: Any) -> None:
        told.append(progress)

    made = tool(Reader().read)
    context = ToolContext(tool_call_id="c7", attempt=2, report=report)

    assert list(made.parameters["properties"]) == ["path"]
    assert [ToolOutput("a c7 2")] == await results(made, {"path": "a"}, context)
    assert told == [{"fraction": 0.5, "message": "half"}]


async def test_progress_without_an_observer_does_nothing() -> None:
    assert [ToolOutput("a  1")] == await results(tool(Reader().read), {"path": "a"})


async def test_the_fence_gets_out() -> None:
    def stopped() -> None:
        raise Fenced("stopped")

    with pytest.raises(Fenced):
        await results(tool(stopped), {})


async def test_cancellation_gets_out() -> None:
    with trio.move_on_after(0) as scope:
        await results(tool(trio.sleep_forever), {})
    assert scope.cancelled_caught


async def test_closing_the_run_closes_the_generator() -> None:
    closed = []

    async def forever() -> AsyncIterator[int]:
        try:
            while True:
                yield 1
        finally:
            closed.append(True)

    run = tool(forever).run({}, ToolContext())
    await run.__anext__()
    await run.aclose()

    assert closed == [True]


def test_the_schema_comes_from_the_annotations() -> None:
    assert tool(add).parameters == {
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "b": {"type": "integer", "default": 2},
        },
        "required": ["a"],
        "additionalProperties": False,
    }


def test_a_schema_with_a_struct_carries_its_definition() -> None:
    schema = tool(place).parameters
    assert schema["properties"]["where"] == {"$ref": "#/$defs/Where"}
    assert schema["$defs"]["Where"]["required"] == ["file"]


def test_the_spec_has_the_given_name_and_the_docstring() -> None:
    spec = tool(add).spec("plus")
    assert (
        spec.name,
        spec.description.startswith("Add two numbers."),
    ) == ("plus", True)


def test_constraints_reach_the_model_and_are_checked() -> None:
    def few(n: Annotated[int, msgspec.Meta(le=8)]) -> int:
        return n

    made = tool(few)
    assert made.parameters["properties"]["n"]["maximum"] == 8
    assert isinstance(made.decode({"n": 9}), ToolFailure)


def test_a_mutable_default_is_allowed() -> None:
    def collect(into: list[int] = []) -> list[int]:  # noqa: B006
        return into

    assert tool(collect).decode({}) == {"into": []}


@pytest.mark.parametrize(
    "fn",
    [
        pytest.param(lambda *args: None, id="*args"),
        pytest.param(lambda **more: None, id="**kwargs"),
        pytest.param(lambda a, /: None, id="position only"),
    ],
)
def test_a_parameter_without_a_name_is_refused(fn: Any) -> None:
    with pytest.raises(UsageError, match="name every parameter"):
        tool(fn)


def test_a_parameter_that_no_json_expresses_is_refused() -> None:
    class Handle:
        pass

    def use(handle: Handle) -> None: ...

    use.__annotations__["handle"] = Handle
    with pytest.raises(UsageError, match="parameter"):
        tool(use)


def test_an_annotation_that_does_not_resolve_is_refused() -> None:
    def use(x: int) -> None: ...

    use.__annotations__["x"] = "NoSuchName"
    with pytest.raises(UsageError, match="cannot resolve"):
        tool(use)
