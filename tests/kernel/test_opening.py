"""Mistakes that a kernel refuses when it opens, or when they are made, not later."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from culet.kernel import Agent, open_kernel
from culet.kernel.errors import UsageError


class Root(Agent):
    initial_state = {"list": [1]}

    async def tick(self, payload: Any, schedule: Any) -> None: ...

    def sync(self, payload: Any, schedule: Any) -> None: ...

    async def short(self, payload: Any) -> None: ...

    async def set_it(self, value: Any) -> Any:
        self.set_state(value)
        return self.state


def made(name: str) -> type[Agent]:
    return type(name, (Agent,), {})


async def refused(match: str, **options: Any) -> None:
    with pytest.raises(UsageError, match=match):
        async with open_kernel(**options):
            pass


async def test_an_unknown_level_of_durability_is_refused() -> None:
    await refused("durability is power or process", roots=[Root], durability="fsync")
    weak = type("Weak", (Agent,), {"durability": "none"})
    await refused("Weak.durability is power or process", roots=[weak])


async def test_two_classes_of_one_name_are_refused_in_one_list_too() -> None:
    await refused("two different classes in facets are named Dup",
                  roots=[Root], facets=[made("Dup"), made("Dup")])  # fmt: skip
    await refused("two different classes in roots are named Dup",
                  roots=[made("Dup"), made("Dup")])  # fmt: skip
    await refused("roots is a list of classes", roots=Root)


async def test_a_turn_that_is_no_generator_is_refused() -> None:
    async def plain(self: Any, turn: Any) -> None: ...

    def sync(self: Any, turn: Any) -> Any:
        yield {}

    for turn in (plain, sync):
        wrong = type("Wrong", (Agent,), {"on_turn": turn})
        await refused("Wrong.on_turn must be `async def` with `yield`", roots=[wrong])

    async def right(self: Any, turn: Any) -> AsyncIterator[Any]:
        yield {}

    good = type("Good", (Agent,), {"on_turn": right})
    async with open_kernel(roots=[good]):
        pass


@pytest.mark.parametrize(
    "hook",
    [
        "should_connection_be_readonly",
        "should_send_protocol_messages",
        "validate_state_change",
    ],
)
async def test_a_hook_that_is_not_awaited_must_not_be_async(hook: str) -> None:
    """A coroutine that nobody awaits is true: all clients would be readonly."""

    async def asked(self: Any, *_args: Any) -> bool:
        return False

    hooks = {hook: asked}
    wrong = type("Wrong", (Agent,), hooks)
    await refused(f"Wrong.{hook} is not awaited: make it a plain `def`", roots=[wrong])


async def test_a_callback_that_could_not_be_called_is_refused_when_it_is_set(
    tmp_path: Path,
) -> None:
    async with open_kernel(roots=[Root], storage=f"sqlite:{tmp_path}") as kernel:
        await kernel.get_agent(Root, "r")
        (node,) = [n for t in kernel.trees.values() for n in t.nodes.values()]
        root = node.agent
        with pytest.raises(
            UsageError, match=r"Root.sync is called later: make it async"
        ):
            await root.schedule(1, "sync")
        with pytest.raises(UsageError, match=r"called with \(payload, schedule\)"):
            await root.schedule_every(1, "short")
        with pytest.raises(UsageError, match="make it async"):
            root.queue.put("sync")
        assert root.schedules.list() == []
        await root.schedule(1, "tick")


async def test_the_state_that_is_read_is_a_copy() -> None:
    async with open_kernel(roots=[Root]) as kernel:
        stub: Any = await kernel.get_agent(Root, "r")
        (node,) = [n for t in kernel.trees.values() for n in t.nodes.values()]
        root = node.agent

        root.state["list"].append(2)
        assert root.state == {"list": [1]}
        assert Root.initial_state == {"list": [1]}
        given = {"a": [1]}
        assert await stub.set_it(given) == {"a": [1]}
        given["a"].append(2)
        assert root.state == {"a": [1]}
