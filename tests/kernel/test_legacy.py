"""The old names of the dynamic agents: they warn, and do what the new verbs do."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

from culet.kernel import Agent
from culet.kernel.errors import Deleted, FacetAborted, UsageError
from culet.kernel.legacy import VERBS
from culet.kernel.nouns import DynamicAgents
from culet.kernel.testing import open_test_kernel
from kernel.agents import agent_at


class Kid(Agent):
    """A facet."""

    async def who(self) -> list[str]:
        return [step.name for step in self.self_path]


class Other(Agent):
    """A facet of another class."""


class Top(Agent):
    """A root that uses the old names."""


def opened() -> Any:
    return open_test_kernel(roots=[Top], facets=[Kid, Other])


async def warned(call: Callable[[], Any]) -> Any:
    """Return what an old name returns; it must warn, and point at its caller."""
    with pytest.warns(DeprecationWarning) as told:
        value = call()
    (warning,) = told
    assert warning.filename == __file__
    return await value if hasattr(value, "__await__") else value


async def test_the_old_names_do_what_the_new_verbs_do(clock: object) -> None:
    async with opened() as test:
        await test.kernel.get_agent(Top, "a")
        top = agent_at(test)
        new = top.dynamic_agents
        stub = await warned(lambda: top.sub_agent(Kid, "k"))
        assert await stub.who() == ["a", "k"]
        await new.get(Other, "o")
        for cls, name in ((Kid, "k"), ("Kid", "k"), (Kid, "no"), (Other, "o")):
            old = await warned(lambda c=cls, n=name: top.has_sub_agent(c, n))  # type: ignore[misc]
            assert old is new.has(cls, name)
        assert await warned(top.list_sub_agents) == new.list()
        assert len(new.list()) == 2
        assert await warned(lambda: top.list_sub_agents(Kid)) == new.list(Kid)
        page = await warned(lambda: top.list_sub_agents(limit=1, after=("Kid", "k")))
        assert [c.name for c in page] == ["o"]

        receipt = await warned(lambda: top.abort_sub_agent(Kid, "k", "enough"))
        assert receipt.nodes == [("Top/a/Kid/k", "stopped")]
        with pytest.raises(FacetAborted, match="enough"):
            await stub.who()
        assert new.has(Kid, "k")

        await warned(lambda: top.delete_sub_agent(Kid, "k"))
        assert not new.has(Kid, "k")
        with pytest.raises(Deleted):
            await stub.who()
        await warned(lambda: top.delete_sub_agent(Kid, "k"))


@pytest.mark.parametrize(("old", "new"), VERBS.items())
async def test_each_names_the_verb_to_use(old: str, new: str, clock: object) -> None:
    assert callable(getattr(DynamicAgents, new))
    assert f"dynamic_agents.{new}" in str(getattr(Agent, old).__doc__)
    assert getattr(Agent, old).__name__ == old
    async with opened() as test:
        await test.kernel.get_agent(Top, "a")
        args = () if new == "list" else (Kid, "k")
        with pytest.warns(
            DeprecationWarning,
            match=rf"^{old} is deprecated: use self.dynamic_agents.{new}$",
        ):
            found = getattr(agent_at(test), old)(*args)
        if hasattr(found, "__await__"):
            await found


async def test_an_error_is_that_of_the_new_verb(clock: object) -> None:
    async with opened() as test:
        await test.kernel.get_agent(Top, "a")
        with pytest.raises(UsageError, match="not registered"):
            await warned(lambda: agent_at(test).sub_agent(Top, "k"))
        with pytest.raises(TypeError):
            await warned(lambda: agent_at(test).has_sub_agent())


@pytest.mark.parametrize("name", VERBS)
async def test_they_are_no_methods_for_others(name: str, clock: object) -> None:
    async with opened() as test:
        top = await test.kernel.get_agent(Top, "a")
        with pytest.raises(UsageError, match="belongs to the agent itself"):
            getattr(top, name)
        with pytest.raises(UsageError, match=name):
            setattr(agent_at(test), name, None)
    hides = type("Hides", (Agent,), {name: lambda self: None})
    with pytest.raises(UsageError, match=rf"Hides.{name} hides a member"):
        async with open_test_kernel(roots=[hides]):
            pass


async def test_the_new_verbs_do_not_warn(clock: object) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        async with opened() as test:
            await test.kernel.get_agent(Top, "a")
            new = agent_at(test).dynamic_agents
            await new.get(Kid, "k")
            assert new.has(Kid, "k")
            assert new.list()
            await new.delete(Kid, "k")
