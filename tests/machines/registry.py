"""The registry of an agent's facets is a dictionary: `get` makes, `lookup`, `has` and
`list` look, `delete` forgets for good, `abort` and a crash forget nothing.

Names are nasty. Several ask at once: gets of one name give one life, and a get beside a
delete leaves one of the two ends. After a crash the dictionary is what it was said to be.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, ClassVar

import trio
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from culet.kernel import Agent
from culet.kernel.core.path import check_name
from culet.kernel.errors import (
    ChildDidNotStop,
    Deleted,
    FacetAborted,
    UsageError,
)
from culet.kernel.testing import open_test_kernel
from machines.guest import TrioMachine
from machines.invariants import broken
from machines.sometimes import Sometimes

GOOD = (
    "a", "sub", "%2f", "a/b", "/", "\\", "...", " ", "é", "e\u0301", "\ufeff", "'; --",
    "__proto__", "tree", "tree.db", "%", "x" * 256,
)  # fmt: skip
BAD = ("", ".", "..", "a\0b", "\ud800", "x" * 257)
Facets = dict[tuple[str, str], int | None]


class Leaf(Agent):
    """Keeps a number."""

    async def put(self, number: int) -> None:
        self.set_state(number)

    async def number(self) -> int | None:
        value: int | None = self.state
        return value


class Twig(Leaf):
    """The same under another class."""


class Keeper(Agent):
    """Whose facets they are."""

    async def do(self, verb: str, cls: str, name: str, number: int = 0) -> Any:
        try:
            return await self._do(verb, cls, name, number)
        except FacetAborted:
            return "stopped"

    async def _do(self, verb: str, cls: str, name: str, number: int) -> Any:
        kind = CLASSES[cls]
        facets = self.dynamic_agents
        match verb:
            case "get":
                await facets.get(kind, name)
            case "put":
                stub = await facets.lookup(kind, name)
                if stub is None:
                    return False
                await stub.put(number)
                return True
            case "number":
                stub = await facets.lookup(kind, name)
                return "absent" if stub is None else await stub.number()
            case "has":
                return facets.has(kind, name)
            case "delete":
                await facets.delete(kind, name)
            case "abort":
                await facets.abort(kind, name)
        return None

    async def names(self) -> list[tuple[str, str]]:
        return [(c.class_name, c.name) for c in self.dynamic_agents.list()]


CLASSES: dict[str, type[Leaf]] = {"Leaf": Leaf, "Twig": Twig}
classes = st.sampled_from(sorted(CLASSES))
which = st.integers(0, 2)  # of the names of this history


class RegistryMachine(TrioMachine):
    """See the module's text."""

    sometimes: ClassVar = Sometimes(
        "made", "found", "absent", "deleted", "came back", "aborted", "refused",
        "crashed", "got and deleted at once", "got twice at once",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.facets: Facets = {}
        self.gone: set[tuple[str, str]] = set()
        self.stopped: set[tuple[str, str]] = set()  # until somebody gets it
        self.over = trio.Event()
        self.do(self._open)

    async def _open(self) -> None:
        opened = trio.Event()

        async def keep() -> None:
            with suppress(ChildDidNotStop):
                async with open_test_kernel(
                    roots=[Keeper], facets=[Leaf, Twig]
                ) as self.test:
                    opened.set()
                    await self.over.wait()

        self.nursery.start_soon(keep)
        await opened.wait()
        await self._ask("names")

    async def _ask(self, method: str, *args: Any) -> Any:
        root = await self.test.kernel.get_agent(Keeper, "k")
        return await getattr(root, method)(*args)

    def ask(self, *args: Any) -> Any:
        """Let the keeper do something."""
        return self.do(self._ask, "do", *args)

    # ---- rules

    @initialize(names=st.lists(st.sampled_from(GOOD), min_size=3, max_size=3))
    def choose(self, names: list[str]) -> None:
        """A history has few names, so that they meet."""
        self.names = names

    @rule(cls=classes, which=which)
    def get(self, cls: str, which: int) -> None:
        name = self.names[which]
        known = (cls, name) in self.facets
        self.ask("get", cls, name)
        self.stopped.discard((cls, name))
        if not known:
            self.sometimes.hit("came back", (cls, name) in self.gone)
            self.sometimes.hit("made")
            self.facets[cls, name] = None

    @rule(cls=classes, which=which, number=st.integers(0, 99))
    def put(self, cls: str, which: int, number: int) -> None:
        name = self.names[which]
        there = self.ask("put", cls, name, number)
        if (cls, name) in self.stopped:
            assert there == "stopped"
            return
        assert there == ((cls, name) in self.facets)
        if there:
            self.facets[cls, name] = number

    @rule(cls=classes, which=which)
    def look(self, cls: str, which: int) -> None:
        """Neither looking nor asking makes anything."""
        name = self.names[which]
        want: Any = self.facets.get((cls, name), "absent")
        if (cls, name) in self.stopped:
            want = "stopped"
        assert self.ask("number", cls, name) == want
        assert self.ask("has", cls, name) == (want != "absent")
        self.sometimes.hit("absent" if want == "absent" else "found")

    @rule(cls=classes, which=which)
    def delete(self, cls: str, which: int) -> None:
        name = self.names[which]
        self.ask("delete", cls, name)
        if self.facets.pop((cls, name), "absent") != "absent":
            self.sometimes.hit("deleted")
            self.stopped.discard((cls, name))
            self.gone.add((cls, name))

    @rule(cls=classes, which=which)
    def abort(self, cls: str, which: int) -> None:
        """Stopping is not forgetting."""
        name = self.names[which]
        self.ask("abort", cls, name)
        if (cls, name) in self.facets:
            self.sometimes.hit("aborted")
            self.stopped.add((cls, name))

    @rule(cls=classes, name=st.sampled_from(BAD))
    def refuse(self, cls: str, name: str) -> None:
        """A name that no agent may have makes nothing and says why."""
        for check in (lambda: check_name(name), lambda: self.ask("get", cls, name)):
            try:
                check()
            except UsageError:
                continue
            raise AssertionError(name)
        self.sometimes.hit("refused")
        if name.isascii():  # no Unicode does not get as far
            for verb in ("abort", "delete"):  # to end what cannot be is no mistake
                self.ask(verb, cls, name)
            assert self.ask("has", cls, name) is False

    @rule(cls=classes, which=which, count=st.integers(2, 4), delete=st.booleans())
    def together(self, cls: str, which: int, count: int, delete: bool) -> None:
        """Some get it at once, and perhaps one deletes it meanwhile."""
        name = self.names[which]
        key = (cls, name)

        async def quietly(fn: Callable[..., Awaitable[Any]], *args: Any) -> None:
            with suppress(Deleted):
                await fn(*args)

        async def all_at_once() -> None:
            async with trio.open_nursery() as nursery:
                for _ in range(count):
                    nursery.start_soon(quietly, self._ask, "do", "get", cls, name)
                if delete:
                    nursery.start_soon(quietly, self._ask, "do", "delete", cls, name)

        known = key in self.facets
        self.do(all_at_once)
        self.stopped.discard(key)
        there = self.ask("has", cls, name)
        self.sometimes.hit("got twice at once", there)
        self.sometimes.hit("got and deleted at once", delete)
        assert there or delete
        rows = self._rows(name)
        assert len([row for row in rows if row == (cls, "live")]) == int(there)
        if delete:
            # which life it is shows in what it keeps: a new one keeps nothing
            self.gone.add(key)
            self.facets.pop(key, None)
            if there:
                self.facets[key] = self.ask("number", cls, name)
        elif not known:
            self.facets[key] = None

    def _rows(self, name: str) -> list[tuple[Any, ...]]:
        tree = self.test.tree("Keeper", "k")
        assert tree is not None
        sql = "SELECT class, state FROM node WHERE name = ?"
        return tree.db.execute(sql, (name,))

    @rule(seconds=st.sampled_from([0.01, 2.0]))
    def advance(self, seconds: float) -> None:
        """Wipes run."""
        self.do(self.test.advance, seconds)

    @rule()
    def crash(self) -> None:
        """Die; what was said stays true."""

        async def die() -> None:
            await self.test.crash()
            await self.test.reopen()

        self.do(die)
        found: Facets = {}
        for cls, name in self.do(self._ask, "names"):
            found[cls, name] = self.ask("number", cls, name)
        assert found == self.facets
        self.sometimes.hit("crashed")
        self.stopped.clear()

    # ---- what must hold

    @invariant()
    def the_list_is_the_dictionary(self) -> None:
        if self._end is None:
            listed = self.do(self._ask, "names")
            assert sorted(listed) == sorted(self.facets)
            tree = self.test.tree("Keeper", "k")
            assert tree is not None
            wrong = broken(tree)
            assert not wrong, wrong

    def teardown(self) -> None:
        """Once all wipes have run, only what lives has rows and files."""
        try:
            if self._end is None:
                self.do(self.test.advance, 5)
                tree = self.test.tree("Keeper", "k")
                assert tree is not None
                rows = tree.db.execute("SELECT state FROM node")
                assert rows == [("live",)] * (len(self.facets) + 1)
        finally:
            if self._end is None:

                async def close() -> None:
                    self.over.set()

                self.do(close)
            super().teardown()
