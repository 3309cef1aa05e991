"""A family of agents for the tests of facets, and ways to make and to meet them."""

from __future__ import annotations

from typing import Any

import trio

from culet.kernel import Agent
from culet.kernel.testing import Harness, open_test_kernel
from kernel.agents import agent_at, tree_of

NOTES: list[str] = []  # what agents of this test have done


class Facet(Agent):
    """Keeps texts, waits, and owes itself calls."""

    async def on_start(self) -> None:
        NOTES.append(f"start {self.name}")

    async def ping(self, n: int) -> int:
        return n + 1

    async def keep(self, text: str) -> None:
        self.sql("CREATE TABLE IF NOT EXISTS kept (text)")
        self.sql("INSERT INTO kept VALUES (?)", text)

    async def kept(self) -> list[str]:
        self.sql("CREATE TABLE IF NOT EXISTS kept (text)")
        return [row.text for row in self.sql("SELECT text FROM kept")]

    async def wait(self) -> None:
        await trio.sleep_forever()

    async def path(self) -> list[list[str]]:
        return [list(step) for step in self.self_path]

    async def remind(self, seconds: float, text: str) -> None:
        await self.schedule(seconds, "reminded", text)

    async def reminded(self, payload: Any, schedule: Any) -> None:
        NOTES.append(f"{self.name} hears {payload}")

    async def end(self) -> None:
        await self.destroy()


class Other(Facet):
    """The same under another class."""


class Top(Facet):
    """The root, and a facet as well."""


CLASSES: dict[str, type[Facet]] = {c.__name__: c for c in (Facet, Other, Top)}


def opened(*more: type[Agent], **options: Any) -> Any:
    """Open a kernel with the root class Top; all classes are facets too."""
    NOTES.clear()
    facets = [Facet, Other, Top, *more]
    return open_test_kernel(roots=[Top], facets=facets, **options)


async def get(test: Harness, *hops: tuple[type[Agent], str]) -> Any:
    """Return a stub of the facet at a path below Top/a; what is missing is made."""
    stub: Any = await test.kernel.get_agent(Top, "a")
    done: list[tuple[str, str]] = []
    for cls, name in hops:
        stub = await agent_at(test, *done).dynamic_agents.get(cls, name)
        done.append((cls.__name__, name))
    return stub


async def children(test: Harness, *hops: tuple[str, str]) -> Any:
    """Return `dynamic_agents` of the agent at a path below Top/a."""
    if not hops:
        await test.kernel.get_agent(Top, "a")
    return agent_at(test, *hops).dynamic_agents


def count(test: Harness, table: str) -> int:
    """Return how many rows a table of the tree has."""
    return int(tree_of(test).db.execute(f"SELECT count(*) FROM {table}")[0][0])


def files(test: Harness) -> set[str]:
    """Return the slots that have a file."""
    return tree_of(test).store.slots()
