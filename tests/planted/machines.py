"""Two of the planted bugs, hunted by a Hypothesis machine such as users write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import rule

from culet.kernel.testing_machine import AgentMachine
from planted.bugs import FACETS, Book, BookWriteBehind, Parent, World


class BookMachine(AgentMachine):
    """Clients add notes and read them."""

    book: ClassVar[type[Book]] = Book
    roots = (Book, BookWriteBehind)

    async def recall(self) -> Mapping[str, Any]:
        return await (await self.client.get(self.book, "b")).all()

    @rule(number=st.integers(0, 9))
    def add(self, number: int) -> None:
        self.ask(self._add, f"n{number}")

    async def _add(self, note_id: str) -> None:
        book = await self.client.get(self.book, "b")
        self.client.told(note_id, await book.add(note_id, note_id))


class WriteBehindMachine(BookMachine):
    book = BookWriteBehind


class TillMachine(AgentMachine):
    """A client asks for runs that charge."""

    till: ClassVar[str] = "Till"
    roots = (Parent,)
    facets = tuple(FACETS.values())

    def begin(self) -> None:
        World.outside = self.client

    @rule(number=st.integers(0, 2))
    def run(self, number: int) -> None:
        self.ask(self._run, f"r{number}")

    async def _run(self, run_id: str) -> None:
        parent = await self.client.get(Parent, "p")
        self.client.ended(run_id, await parent.run(self.till, run_id))


class ForgetfulMachine(TillMachine):
    till = "TillForgetful"


class LeakyMachine(TillMachine):
    till = "NurseLeaky"
