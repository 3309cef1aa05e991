"""A class as a tool: what a model is told of its input, and what input is taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict

import msgspec
import pytest

from culet.kernel import Agent, Turn, agent_tool
from culet.kernel.errors import UsageError
from culet.kernel.testing import open_test_kernel
from kernel.agents import raises, tree_of


class Place(msgspec.Struct):
    page: int


class Query(msgspec.Struct):
    text: str
    near: Place | None = None


@dataclass
class Plain:
    text: str


class Typed(TypedDict):
    text: str


class Seeker(Agent):
    async def on_turn(self, turn: Turn):
        turn.output = turn.input
        yield {"type": "text-delta", "id": "t", "delta": "found"}


SEEK = agent_tool(Seeker, description="seeks", input_type=Query)


class Boss(Agent):
    async def ask(self, question: Any) -> Any:
        run = await self.run_agent_tool(SEEK, question)
        return run.output


def test_a_model_is_shown_the_object_itself_and_what_it_is_made_of() -> None:
    shown = SEEK.parameters
    assert shown["type"] == "object"
    assert shown["required"] == ["text"]
    assert list(shown["$defs"]) == ["Place"]


@pytest.mark.parametrize("kind", [Plain, Typed])
def test_an_object_without_others_needs_no_definitions(kind: Any) -> None:
    shown = agent_tool(Seeker, description="seeks", input_type=kind).parameters
    assert shown["properties"] == {"text": {"type": "string"}}
    assert "$defs" not in shown


def test_a_type_without_a_name_is_shown_as_it_is() -> None:
    shown = agent_tool(Seeker, description="seeks", input_type=list[int]).parameters
    assert shown == {"type": "array", "items": {"type": "integer"}}


def test_without_a_type_everything_is_taken() -> None:
    tool = agent_tool(Seeker, description="seeks")
    assert tool.parameters == {"type": "object"}
    assert tool.check_input([1, None]) == [1, None]
    assert tool.display is None


def test_a_tool_shows_the_name_and_icon_that_it_was_given() -> None:
    tool = agent_tool(Seeker, description="seeks", display_name="Seeks", icon="lens")
    assert tool.display == {"name": "Seeks", "icon": "lens"}
    assert agent_tool(Seeker, description="s", icon="lens").display == {"icon": "lens"}


@pytest.mark.parametrize("place", ["input_type", "output_type"])
@pytest.mark.parametrize("kind", [{"type": "object"}, object(), Agent])
def test_what_is_no_type_is_refused_when_the_tool_is_made(
    place: str, kind: Any
) -> None:
    wanted: dict[str, Any] = {place: kind}
    with pytest.raises(UsageError, match=r"give a type instead|cannot be checked"):
        agent_tool(Seeker, description="seeks", **wanted)


async def test_input_arrives_as_plain_data_and_whole(clock) -> None:
    async with open_test_kernel(roots=[Boss], facets=[Seeker]) as test:
        boss = await test.kernel.get_agent(Boss, "b")
        wanted = {"text": "sea", "near": {"page": 3}}
        assert await boss.ask(wanted) == wanted
        assert await boss.ask({"text": "sea"}) == {"text": "sea", "near": None}


@pytest.mark.parametrize("wrong", [{}, {"text": 5}, "sea", None])
async def test_input_that_does_not_fit_starts_no_run(clock, wrong: Any) -> None:
    async with open_test_kernel(roots=[Boss], facets=[Seeker]) as test:
        boss = await test.kernel.get_agent(Boss, "b")
        error = await raises(UsageError, boss.ask, wrong)
        assert "not what it wants" in str(error)
        assert tree_of(test, "Boss", "b").db.execute("SELECT * FROM run") == []
