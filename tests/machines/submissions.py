"""Submissions of a chat against a model: each is answered once, in order, or not at all.

Clients submit, cancel, clear and forget; the process dies between rules and in the middle
of a commit. What a client was told stands: an end is for good, what was accepted is there
with its messages, one that was taken back before its turn has left none.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

import trio
import trio.testing
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from culet.adapters import AIChatAgent
from culet.adapters.submissions import OPEN
from culet.kernel import Chunk, Turn
from culet.kernel.errors import ChildDidNotStop, CuletError
from culet.kernel.testing import open_test_kernel
from machines.guest import TrioMachine
from machines.sometimes import Sometimes

ME = ("Talker", "a")
QUIET_S = 120.0
NAMES = st.sampled_from([f"s{n}" for n in range(8)])


@dataclass
class World:
    """What code of the agent has done, over all its lives."""

    begun: list[tuple[str, int]] = field(default_factory=list)
    working: set[str] = field(default_factory=set)


class Talker(AIChatAgent):
    """Answers a submission after the seconds that its message says; `x` fails."""

    world: ClassVar[World] = World()

    async def on_chat_message(self, turn: Turn) -> AsyncIterator[Chunk]:
        assert not self.world.working, "two turns at once"
        self.world.begun.append((turn.request_id, turn.attempt))
        self.world.working.add(turn.request_id)
        try:
            asked = turn.messages[-1]["parts"][0]["text"]
            if not turn.chunks():
                yield {"type": "text-delta", "id": "t", "delta": "so "}
            await trio.sleep(2 if asked == "x" else int(asked))
            if asked == "x":
                raise ValueError("planned")
            yield {"type": "text-delta", "id": "t", "delta": "it is"}
        finally:
            self.world.working.discard(turn.request_id)


class SubmissionMachine(TrioMachine):
    """See the module's text."""

    sometimes: ClassVar = Sometimes(
        "known", "pending", "taken back", "stopped", "skipped", "completed", "failed",
        "forgotten", "crashed", "died in a commit", "recovering", "resumed",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        Talker.world = World()
        self.told: dict[str, str] = {}  # ends that a client heard of, and are durable
        self.kept: set[str] = set()  # accepted, and durably so
        self.withdrawn: set[str] = set()
        self.n = 0
        self.over = trio.Event()
        self.do(self._open)

    async def _open(self) -> None:
        opened = trio.Event()

        async def keep() -> None:
            with suppress(ChildDidNotStop):
                async with open_test_kernel(roots=[Talker]) as self.test:
                    opened.set()
                    await self.over.wait()

        self.nursery.start_soon(keep)
        await opened.wait()

    async def _agent(self) -> Talker:
        await self.test.kernel.get_agent(Talker, "a")
        node = self.test.find([ME])
        assert node is not None
        assert isinstance(node.agent, Talker)
        return node.agent

    async def _asked(self, what: str, *args: Any) -> Any:
        """Do one thing as a client does, and hear of it when it is durable."""
        me = await self._agent()
        result = getattr(me.submissions, what)(*args)
        result = await result if what == "cancel" else result
        await me.durable()
        return result

    async def _submit(self, me: Talker, name: str, text: str, **how: Any) -> Any:
        self.n += 1  # a message has an id of its own, or it would stay where it was
        message = {
            "id": f"m{self.n}", "role": "user", "parts": [{"type": "text", "text": text}],
        }  # fmt: skip
        return await me.submit_messages(
            [message], idempotency_key=f"k-{name}", metadata=message["id"], **how
        )

    # ---- rules

    @rule(name=NAMES, text=st.sampled_from(["0", "3", "30", "x"]), by_key=st.booleans())
    def submit(self, name: str, text: str, by_key: bool) -> None:
        """Submit under an id and a key, and again under one of them."""

        async def ask() -> None:
            me = await self._agent()
            before = me.submissions.get(name)
            keyed = before is not None and by_key
            how = {} if keyed else {"submission_id": name}
            made = await self._submit(me, name, text, **how)
            await me.durable()
            assert made.request_id == name
            assert made.accepted == (before is None)
            if made.accepted:
                self.withdrawn.discard(name)
            self.kept.add(name)
            self.sometimes.hit("known", not made.accepted)
            self.sometimes.hit("pending", made.status == "pending")

        self.do(ask)

    @rule(name=NAMES)
    def cancel(self, name: str) -> None:
        """Cancel one, whether it is there or not."""

        async def ask() -> None:
            before = (await self._agent()).submissions.get(name)
            status = await self._asked("cancel", name)
            if before is None:
                assert status is None
            elif before.status not in OPEN:
                assert status == before.status
            else:
                assert status == "aborted"
                if before.status == "pending":
                    self.withdrawn.add(name)
                self.sometimes.hit(
                    "taken back" if before.status == "pending" else "stopped"
                )

        self.do(ask)

    @rule()
    def clear(self) -> None:
        """Clear the chat: what has not begun is skipped."""

        async def ask() -> None:
            me = await self._agent()
            before = {s.request_id: s.status for s in me.submissions.list()}
            await me.clear_messages()
            for found in me.submissions.list():
                status = before[found.request_id]
                if status in OPEN:
                    wanted = "skipped" if status == "pending" else "aborted"
                    assert found.status == wanted, (status, found)
                    self.sometimes.hit("skipped", found.status == "skipped")
            assert me.messages == []
            await me.durable()
            self.withdrawn.clear()

        self.do(ask)

    @rule(name=NAMES)
    def forget(self, name: str) -> None:
        """Forget one: only what has ended goes."""

        async def ask() -> None:
            before = (await self._agent()).submissions.get(name)
            gone = await self._asked("delete", name)
            assert gone == (before is not None and before.status not in OPEN)
            if gone:
                self.told.pop(name, None)
                self.kept.discard(name)
                self.withdrawn.discard(name)
                begun = Talker.world.begun
                Talker.world.begun = [b for b in begun if b[0] != name]
            self.sometimes.hit("forgotten", gone)

        self.do(ask)

    @rule(seconds=st.sampled_from([0.5, 3, 40]))
    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.do(self.test.advance, seconds)

    @rule()
    def crash(self) -> None:
        """Die between two rules."""
        self.do(self._live_again)

    @rule(commits=st.integers(0, 6), name=NAMES, what=st.sampled_from("scf"))
    def die(self, commits: int, name: str, what: str) -> None:
        """Die in the middle of what a client asks for: it hears nothing."""

        async def ask() -> None:
            me = await self._agent()
            self.test.faults.die_after(commits)
            with suppress(CuletError):
                if what == "s":
                    await self._submit(me, name, "3", submission_id=name)
                elif what == "c":
                    await me.submissions.cancel(name)
                else:
                    me.submissions.delete(name)
            with trio.move_on_after(1), suppress(CuletError):
                await me.durable()
            self.sometimes.hit("died in a commit", self.test.faults.dead)
            self.test.faults.heal()

        self.clock.autojump_threshold = 0
        try:
            self.do(ask)
        finally:
            self.clock.autojump_threshold = float("inf")
        unsure = {name}
        self.kept -= unsure
        self.withdrawn -= unsure
        if what == "f":
            self.told.pop(name, None)
            begun = Talker.world.begun
            Talker.world.begun = [b for b in begun if b[0] != name]
        self.do(self._live_again)

    async def _live_again(self) -> None:
        await self.test.crash()
        Talker.world.working.clear()
        await self.test.reopen()
        self.sometimes.hit("crashed")
        me = await self._agent()
        found = [s.status for s in me.submissions.list()]
        self.sometimes.hit("recovering", "recovering" in found)
        kept = [b for b in Talker.world.begun if me.submissions.get(b[0]) is not None]
        Talker.world.begun = kept  # what was never durable has never been

    # ---- what must hold

    @invariant()
    def holds_true(self) -> None:
        """Look at the rows, the messages, and what clients were told."""
        self.do(self._look)

    async def _look(self) -> None:
        me = await self._agent()
        await me.durable()
        await trio.testing.wait_all_tasks_blocked()
        rows = {s.request_id: s for s in me.submissions.list()}
        for name in self.kept:
            assert name in rows, f"{name} was accepted, and is gone"
        for name, end in self.told.items():
            assert rows[name].status == end, f"{name} was {end}, is {rows[name].status}"
        brought = {m["id"] for m in me.messages}
        for name, found in rows.items():
            if found.status in OPEN:
                assert found.metadata in brought, f"{name} is owed without its message"
            else:
                self.told[name] = found.status
                self.sometimes.hit("completed", found.status == "completed")
                self.sometimes.hit("failed", found.status == "error")
        for name in self.withdrawn & rows.keys():
            assert rows[name].metadata not in brought, f"{name} was taken back"
        going = [n for n, s in rows.items() if s.status in ("running", "recovering")]
        assert len(going) <= 1, f"more than one has begun: {going}"
        first = [n for n, attempt in Talker.world.begun if attempt == 1]
        assert len(first) == len(set(first)), f"asked anew: {first}"
        order = [n for n in rows if n in first]
        assert [n for n in first if n in rows] == order, f"out of order: {first}"
        self.sometimes.hit("resumed", any(n > 1 for _, n in Talker.world.begun))

    def teardown(self) -> None:
        """After a long quiet time nothing is open."""
        try:
            if self._end is None:
                for _ in range(4):
                    self.do(self.test.advance, QUIET_S)
                self.do(self._look)
                self.do(self._quiet)
        finally:
            self.over.set()
            super().teardown()

    async def _quiet(self) -> None:
        me = await self._agent()
        found = [s for s in me.submissions.list() if s.status in OPEN]
        assert not found, f"never answered: {found}"
