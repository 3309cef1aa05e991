"""Live and replayed frames, interleaved, doubled and cut: the state equals replay only.

One root with runs that are written by hand: chunks are staged, records made or not,
runs settled, lives ended. Clients come, read a page or many, go, come back with what
they have folded. Whatever the order, a client that has caught up holds the state that a
newcomer folds from a replay alone, and a frame once sent never changes.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, ClassVar

import trio
import trio.testing
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from culet.kernel import (
    Agent,
    AgentToolEvents,
    Chunk,
    Turn,
    apply_agent_tool_event,
)
from culet.kernel.core.limits import Limits
from culet.kernel.errors import ChildDidNotStop, CuletError
from culet.kernel.streams import Cursor
from culet.kernel.testing import open_test_kernel
from culet.kernel.tree import Tree
from kernel.peers import RecordingPeer, connect
from machines.guest import TrioMachine
from machines.sometimes import Sometimes

RUNS = ("r0", "r1", "r2")
ROOT = ("Writer", "a")
KINDS = ("text-start", "text-delta", "text-end", "data-agent-progress", "tool-output")


class Spoken(Agent):
    """A run that says what it is told to say, when it is told."""

    resumable = True
    feeds: ClassVar[dict[str, trio.MemoryReceiveChannel[Any]]]

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        assert turn.run_id is not None
        async for what in self.feeds[turn.run_id]:
            if what is None:
                return
            if isinstance(what, str):
                raise ValueError(what)
            yield what


class Writer(Agent):
    """Dispatches runs and leaves them to themselves."""

    async def begin(self, run_id: str) -> None:
        await self.run_agent_tool(Spoken, run_id, run_id=run_id, detached=True)

    async def stop(self, run_id: str) -> str | None:
        return (await self.runs.cancel(run_id)).status


class SlowPeer(RecordingPeer):
    """A client that reads replay only when it is told to."""

    patient = False

    def wake(self) -> None:
        if not self.patient:
            super().wake()

    def read_page(self) -> None:
        """Take one page of what there is to replay."""
        assert self.connection is not None
        blob = self.connection.pull()
        if blob is not None:
            self.out += blob.texts


class Client:
    """What one client folded over all its connections."""

    def __init__(self) -> None:
        self.state = AgentToolEvents.empty()
        self.peer: RecordingPeer | None = None
        self.read = 0
        self.last: dict[str, int] = {}  # run -> the last frame that it has

    def fold(self) -> list[dict[str, Any]]:
        """Fold the frames since the last look; return them."""
        if self.peer is None:
            return []
        new = self.peer.out[self.read :]
        self.read = len(self.peer.out)
        frames = [f for f in map(decoded, new) if f is not None]
        for frame in frames:
            self.state = apply_agent_tool_event(self.state, frame)
            run_id, number = frame["event"]["runId"], frame["sequence"]
            last = self.last.get(run_id, -1)
            assert number <= last + 1, f"a gap in {run_id}: {last} -> {number}"
            self.last[run_id] = max(last, number)
        return frames


def decoded(text: str | bytes) -> dict[str, Any] | None:
    """Return an `agent-tool-event` frame."""
    if not isinstance(text, str) or not text.startswith("{"):
        return None
    frame: dict[str, Any] = json.loads(text)
    return frame if frame.get("type") == "agent-tool-event" else None


class StreamMachine(TrioMachine):
    """See the module's text."""

    sometimes: ClassVar = Sometimes(
        "read a page", "came back", "twice", "ended", "crashed", "cut in a replay",
        "more than one run",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.clients: list[Client] = []
        self.sent: dict[tuple[str, int], Any] = {}
        self.over = trio.Event()
        self.feeds: dict[str, trio.MemorySendChannel[Any]] = {}
        self.begun: set[str] = set()
        self.number = 0
        self.do(self._open)

    async def _open(self) -> None:
        opened = trio.Event()

        async def keep() -> None:
            with suppress(ChildDidNotStop):
                async with open_test_kernel(
                    roots=[Writer],
                    facets=[Spoken],
                    limits=Limits(replay_page_bytes=300, batch_chunks=4),
                ) as self.test:
                    opened.set()
                    await self.over.wait()

        self._feed()
        self.nursery.start_soon(keep)
        await opened.wait()
        await self.test.kernel.get_agent(Writer, "a")

    def _feed(self) -> None:
        Spoken.feeds = {}
        for run_id in RUNS:
            self.feeds[run_id], Spoken.feeds[run_id] = trio.open_memory_channel(1000)

    @property
    def tree(self) -> Tree | None:
        """The open tree."""
        tree = self.test.tree(*ROOT)
        return None if tree is None or tree.closed else tree

    # ---- rules

    @rule(run_id=st.sampled_from(RUNS))
    def begin(self, run_id: str) -> None:
        """Dispatch a run; a known id is joined."""

        async def ask() -> None:
            root = await self.test.kernel.get_agent(Writer, "a")
            with suppress(CuletError):
                await root.begin(run_id)
                self.begun.add(run_id)

        self.do(ask)

    @rule(
        run_id=st.sampled_from(RUNS),
        kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=6),
        passes=st.integers(0, 6),
    )
    def say(self, run_id: str, kinds: list[str], passes: int) -> None:
        """Let a run say chunks; a few passes later they are stored, sent, or neither."""

        async def feed() -> None:
            for kind in kinds:
                self.number += 1
                chunk = {"type": kind, "id": "t", "delta": f"<{self.number}>"}
                self.feeds[run_id].send_nowait(chunk)
            for _ in range(passes):
                await trio.lowlevel.checkpoint()

        self.do(feed)

    @rule(run_id=st.sampled_from(RUNS), how=st.sampled_from([None, "failed", "cancel"]))
    def end(self, run_id: str, how: str | None) -> None:
        """End a run: well, badly, or by a cancel."""

        async def finish() -> None:
            if how == "cancel":
                root = await self.test.kernel.get_agent(Writer, "a")
                with suppress(CuletError):
                    await root.stop(run_id)
            else:
                self.feeds[run_id].send_nowait(how)

        self.do(finish)

    @rule(slow=st.booleans(), again=st.booleans())
    def come(self, slow: bool, again: bool) -> None:
        """A client connects, a new one or one that was here before."""
        gone = [c for c in self.clients if c.peer is None]
        client = gone[0] if gone and again else Client()
        if client not in self.clients:
            self.clients.append(client)
        self.sometimes.hit("came back", bool(client.last))

        async def join() -> None:
            kind = SlowPeer if slow else RecordingPeer
            SlowPeer.patient = slow
            client.peer, client.read = await connect(self.test, ROOT, peer=kind), 0

        self.do(join)
        self._fold(client)

    @rule(which=st.integers(0, 9), pages=st.integers(1, 4))
    @precondition(lambda self: self.clients)
    def read(self, which: int, pages: int) -> None:
        """A slow client takes some pages."""
        client = self.clients[which % len(self.clients)]

        async def take() -> None:
            for _ in range(pages):
                if isinstance(client.peer, SlowPeer) and client.peer.closed is None:
                    before = len(client.peer.out)
                    client.peer.read_page()
                    self.sometimes.hit("read a page", len(client.peer.out) > before)

        self.do(take)
        self._fold(client)

    @rule(which=st.integers(0, 9))
    @precondition(lambda self: self.clients)
    def go(self, which: int) -> None:
        """A client is cut, wherever it was."""
        client = self.clients[which % len(self.clients)]
        self._fold(client)
        peer, client.peer = client.peer, None
        if peer is None or peer.connection is None:
            return
        behind = isinstance(peer, SlowPeer) and peer.connection.behind
        self.sometimes.hit("cut in a replay", behind)

        async def gone() -> None:
            assert peer.connection is not None
            peer.connection.closed(1006, "", was_clean=False)

        self.do(gone)

    @rule(
        which=st.integers(0, 9), run_id=st.sampled_from(RUNS), after=st.integers(-1, 6)
    )
    @precondition(lambda self: self.clients)
    def ask_again(self, which: int, run_id: str, after: int) -> None:
        """A client gets a replay that it has already: frames come twice."""
        client, tree = self.clients[which % len(self.clients)], self.tree
        if client.peer is None or tree is None or client.peer.closed is not None:
            return
        sql = "SELECT child FROM run WHERE owner = ? AND id = ?"
        rows = tree.db.execute(sql, (tree.root_slot, run_id))
        if not rows:
            return
        after = min(after, client.last.get(run_id, -1))
        cursor = Cursor(rows[0][0], run_id, "run", after)

        async def doubled() -> None:
            page, _over = tree.streams.pull(None, cursor, 4096)
            assert client.peer is not None
            client.peer.out += page.texts
            self.sometimes.hit("twice", bool(page.texts) and after >= 0)

        self.do(doubled)
        self._fold(client)

    @rule(passes=st.integers(1, 10))
    def step(self, passes: int) -> None:
        """Let the scheduler make some passes."""

        async def some() -> None:
            for _ in range(passes):
                await trio.lowlevel.checkpoint()

        self.do(some)

    @rule(seconds=st.sampled_from([0.001, 0.01, 2]))
    def advance(self, seconds: float) -> None:
        """Let time pass: records are made, back-offs end."""

        async def jump() -> None:
            self.clock.jump(seconds)
            await trio.testing.wait_all_tasks_blocked()

        self.do(jump)

    @rule(really=st.sampled_from([False, False, True]))  # else no life is long
    def crash(self, really: bool) -> None:
        """Die; the next life begins on what is durable."""
        if not really:
            return

        async def die() -> None:
            for client in self.clients:
                self._fold(client)
                client.peer = None
            self.sometimes.hit("crashed")
            await self.test.crash()
            self._feed()
            await self.test.reopen()
            await self.test.kernel.get_agent(Writer, "a")

        self.do(die)

    # ---- what must hold

    def _fold(self, client: Client) -> None:
        for frame in client.fold():
            key = frame["event"]["runId"], frame["sequence"]
            assert self.sent.setdefault(key, frame["event"]) == frame["event"], key

    @invariant()
    def what_was_sent_stays(self) -> None:
        """Fold what came; a run that was shown is there."""
        for client in self.clients:
            self._fold(client)
        tree = self.tree
        if tree is None:
            return
        stored = {r[0] for r in tree.db.execute("SELECT id FROM run")}
        assert {run_id for run_id, _ in self.sent} <= stored

    def teardown(self) -> None:
        """All catch up; then every client holds what replay alone gives."""
        try:
            if self._end is None:
                self._agree()
        finally:
            if self._end is None:

                async def close() -> None:
                    self.over.set()

                self.do(close)
            super().teardown()

    def _agree(self) -> None:
        async def rest() -> None:
            for _ in range(8):
                self.clock.jump(2)
                await trio.testing.wait_all_tasks_blocked()
            SlowPeer.patient = False
            for client in self.clients:
                if client.peer is None or client.peer.closed is not None:
                    client.peer, client.read = await connect(self.test, ROOT), 0
                while isinstance(client.peer, SlowPeer) and client.peer.connection:
                    before = len(client.peer.out)
                    client.peer.read_page()
                    if len(client.peer.out) == before:
                        break
            fresh = Client()
            fresh.peer = await connect(self.test, ROOT)
            await trio.testing.wait_all_tasks_blocked()
            for client in [*self.clients, fresh]:
                self._fold(client)
            want = fresh.state.to_json()
            for client in self.clients:
                assert client.state.to_json() == want
            await self._numbers_are_whole(fresh)

        self.do(rest)

    async def _numbers_are_whole(self, fresh: Client) -> None:
        """A replay is 0, 1, 2, ... and at most one end, the last."""
        assert fresh.peer is not None
        told: dict[str, list[tuple[int, str]]] = {}
        for frame in map(decoded, fresh.peer.out):
            if frame is not None:
                event = frame["event"]
                told.setdefault(event["runId"], []).append(
                    (frame["sequence"], event["kind"])
                )
        self.sometimes.hit("more than one run", len(told) > 1)
        self.sometimes.hit("ended", any(len(frames) > 5 for frames in told.values()))
        for run_id, frames in told.items():
            assert [n for n, _ in frames] == list(range(len(frames))), run_id
            ends = [k for _, k in frames if k not in ("started", "chunk")]
            assert len(ends) <= 1
            assert not ends or frames[-1][1] == ends[0]
