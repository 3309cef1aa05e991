"""The whole kernel against a model: runs, fibers, schedules, aborts, deletes, crashes.

Every rule boundary may be a crash, and a crash may come after any commit, so in the
middle of a step. After each rule the invariants hold; at the end, after a long quiet
time, nothing is unfinished and everybody was told what the rows say.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, ClassVar, Self

import trio
import trio.testing
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from culet.kernel import Agent
from culet.kernel.errors import ChildDidNotStop
from culet.kernel.fibers import Fibers
from culet.kernel.jobs import Jobs
from culet.kernel.testing import open_test_kernel
from culet.kernel.tree import Tree
from kernel.peers import RecordingPeer, connect
from machines.following import Following
from machines.guest import TrioMachine
from machines.invariants import broken
from machines.sometimes import Sometimes
from machines.world import CLASSES, EXPECTED, Actor, Model, Root

ROOT = ("Root", "a")
CUT = "SELECT id FROM run WHERE reason = 'not-resumable'"
QUIET = 60  # steps of nine seconds at the end
unit = st.floats(0, 1, exclude_max=True, allow_nan=False)


def programs(
    depth: int = 1, *more: st.SearchStrategy[list[Any]]
) -> st.SearchStrategy[list[Any]]:
    """Programs of up to five steps, `more` kinds among them, nested at most three deep."""
    steps: list[st.SearchStrategy[list[Any]]] = [
        st.just(["emit"]),
        st.just(["tool"]),
        st.sampled_from([["sleep", 0], ["sleep", 1], ["sleep", 7]]),
        st.sampled_from([["fiber", 2], ["later", 3], ["raise"], ["deaf", 20]]),
        st.sampled_from([["buy", 10, 4], ["buy", 10, 10], ["buy", 25, 5]]),
        *more,
    ]
    if depth < 3:
        nested = st.tuples(
            st.just("nest"), st.sampled_from(["Worker", "Frail"]), programs(depth + 1, *more),
            st.sampled_from([None, 10, 25]),
        )  # fmt: skip
        steps.insert(0, nested.map(list))
    return st.lists(st.one_of(steps), min_size=1, max_size=5)


class Holds:
    """Takes that have a task: filled by the three places of the kernel that hold."""

    live: set[int]

    def __enter__(self) -> Self:
        self.live = live = set()
        number, work, run = Jobs.take_number, Jobs._work, Fibers.run

        def take_number(jobs: Jobs) -> int:
            take = number(jobs)
            live.add(take)
            return take

        async def counted_work(jobs: Jobs, batch: Any) -> None:
            try:
                await work(jobs, batch)
            finally:
                live.difference_update(taken.take for taken in batch)

        async def counted_run(
            fibers: Fibers, node: Any, taken: Any, *args: Any, **how: Any
        ) -> Any:
            try:
                return await run(fibers, node, taken, *args, **how)
            finally:
                live.discard(taken.take)

        Jobs.take_number = take_number  # type: ignore[method-assign]
        Jobs._work = counted_work  # type: ignore[method-assign]
        Fibers.run = counted_run  # type: ignore[method-assign]
        self._undo = number, work, run
        return self

    def __exit__(self, *_: object) -> None:
        number, work, run = self._undo
        Jobs.take_number = number  # type: ignore[method-assign]
        Jobs._work = work  # type: ignore[method-assign]
        Fibers.run = run  # type: ignore[method-assign]


class RunMachine(TrioMachine):
    """Rules are what the world does to a tree; see the module's text."""

    sometimes: ClassVar = Sometimes(
        "completed", "error", "aborted", "interrupted", "fired", "deleted",
        "crashed", "died in a step", "cut before the end", "told before a crash",
        "bought", "refused at dispatch", "refused before a spend", "read on",
    )  # fmt: skip

    root: ClassVar[type[Root]] = Root
    kinds: ClassVar[dict[str, type[Agent]]] = CLASSES

    def __init__(self) -> None:
        super().__init__()
        self.holds = Holds().__enter__()
        self.model = Actor.model = self.new_model()
        self.waiters: list[trio.CancelScope] = []
        self.clients: list[RecordingPeer] = []
        self.reader = Following(ROOT)
        self.counted: dict[RecordingPeer, int] = {}
        # of clients that came again: what they had
        self.brought: dict[RecordingPeer, dict[str, tuple[int, str]]] = {}
        self.last: dict[tuple[RecordingPeer, str], tuple[int, bool]] = {}
        self.over = trio.Event()
        self.do(self._open)

    def new_model(self) -> Model:
        """Return what this history is compared with."""
        return Model()

    # ---- lives

    async def _open(self) -> None:
        opened = trio.Event()

        async def keep() -> None:
            with suppress(ChildDidNotStop):  # it would hide what failed
                async with open_test_kernel(
                    roots=[self.root], facets=list(self.kinds.values()), abort_grace_s=5
                ) as self.test:
                    opened.set()
                    await self.over.wait()

        self.nursery.start_soon(keep)
        await opened.wait()
        self._listen()
        await self._root()

    def _listen(self) -> None:
        """Hear which calls are dropped, whatever ends them: they are not made."""

        def dropped(_channel: str, _tree: Any, _slot: Any, call: Any) -> None:
            self.model.off.add(call.id)
            self.model.shots.pop(call.id, None)

        self.test.kernel.subscribe("schedule:cancel", dropped)

    async def _root(self) -> Root:
        return await self.test.kernel.get_agent(self.root, ROOT[1])

    @property
    def tree(self) -> Tree | None:
        """The open tree; None while it is not open, or dead."""
        tree = self.test.tree(*ROOT)
        if tree is None or tree.closed or self.test.faults.dead:
            return None
        return tree

    def task(self, fn: Callable[[], Awaitable[None]], *, waiter: bool = False) -> None:
        """Do something in the background; it may be cut by whatever comes."""

        async def body() -> None:
            with trio.CancelScope() as scope:
                if waiter:
                    self.waiters.append(scope)
                with suppress(*EXPECTED):
                    await fn()

        async def start() -> None:
            self.nursery.start_soon(body)

        self.do(start)

    def named(self, run_id: str) -> str:
        """Return an id like that one of which nothing was forgotten."""
        while run_id in self.model.forgotten:
            run_id += "'"
        return run_id

    def pick(self, where: str, choice: float) -> str | None:
        """Return the slot of one live node."""
        tree = self.tree
        if tree is None:
            return None
        sql = f"SELECT slot FROM node WHERE {where} ORDER BY born"
        slots = [row[0] for row in tree.db.execute(sql)]
        return slots[int(choice * len(slots))] if slots else None

    # ---- rules

    @rule(
        cls=st.sampled_from(["Worker", "Worker", "Frail", "Flaky"]),
        program=programs(),
        run=st.integers(0, 5),
    )
    def dispatch(self, cls: str, program: list[Any], run: int) -> None:
        """Ask for a run of the root, or join one that is known."""
        run_id = self.named(f"r{run}")

        async def ask() -> None:
            root = await self._root()
            status = await root.run(cls, program, run_id)
            if status != "running":
                self.model.told_status(run_id, status)

        self.task(ask, waiter=True)

    @rule(choice=unit, of_root=st.booleans())
    def cancel(self, choice: float, of_root: bool) -> None:
        """Cancel any run of the tree by id."""
        tree = self.tree
        if tree is None:
            return
        sql = "SELECT owner, id FROM run WHERE status = 'running' ORDER BY born"
        found = tree.db.execute(sql)
        if not found:
            return
        owner, run_id = found[int(choice * len(found))]

        async def ask() -> None:
            if owner == tree.root_slot and of_root:
                status = await (await self._root()).cancel(run_id)
                if status is not None:
                    self.model.told_status(run_id, status)
            else:
                receipt = await tree.runs.stop(owner, run_id, "test")
                if not tree.closed:
                    self.model.holds(tree, receipt)

        self.task(ask)

    @rule(choice=unit)
    @precondition(lambda self: self.waiters)
    def drop_waiter(self, choice: float) -> None:
        """A caller loses interest: observation is not execution."""
        scope = self.waiters.pop(int(choice * len(self.waiters)))

        async def drop() -> None:
            scope.cancel()

        self.do(drop)

    @rule(choice=unit)
    def delete(self, choice: float) -> None:
        """Delete a facet with all below it."""
        slot, tree = (
            self.pick("state = 'live' AND parent IS NOT NULL", choice),
            self.tree,
        )
        if slot is None or tree is None:
            return
        self.model.disturbed = True

        async def drop() -> None:
            await tree.delete(slot)
            await tree.durable()
            self.model.deleted.add(slot)

        self.task(drop)

    @rule(choice=unit)
    def abort(self, choice: float) -> None:
        """Abort a live subtree."""
        slot, tree = self.pick("state = 'live'", choice), self.tree
        if slot is None or tree is None or slot not in tree.nodes:
            return
        self.model.disturbed = True

        async def stop() -> None:
            await tree.abort([slot], "test")

        self.task(stop)

    @rule(choice=unit)
    def evict(self, choice: float) -> None:
        """Drop an idle node from memory."""
        slot, tree = self.pick("state = 'live'", choice), self.tree
        if slot is None or tree is None or slot not in tree.nodes:
            return

        async def drop() -> None:
            node = tree.nodes.get(slot)
            if node is not None:
                await tree.evict(node)

        self.task(drop)

    @rule(
        choice=unit,
        seconds=st.floats(0, 20),
        what=st.sampled_from(["ok", "ok", "ok", "slow", "bad"]),
    )
    def schedule(self, choice: float, seconds: float, what: str) -> None:
        """Let an agent owe itself a call."""
        slot, tree = self.pick("state = 'live'", choice), self.tree
        kind = None if slot is None or tree is None else tree.kind_of(slot)
        if slot is None or tree is None or kind is None:
            return

        async def add() -> None:
            made = await tree.stub(slot, kind).later(seconds, what)
            await tree.durable()
            if made not in self.model.off:  # a cancel has taken it along meanwhile
                self.model.shots[made] = (slot, what)

        self.task(add)

    @rule(choice=unit)
    def unschedule(self, choice: float) -> None:
        """Take a schedule back: from now on it does not fire."""
        tree = self.tree
        if tree is None:
            return
        rows = tree.db.execute(
            "SELECT owner, id FROM job WHERE kind = 'call' ORDER BY id"
        )
        if not rows:
            return
        owner, job_id = rows[int(choice * len(rows))]

        async def remove() -> None:
            if tree.schedules.remove(owner, "call", str(job_id)):
                self.model.off.add(str(job_id))
                self.model.shots.pop(str(job_id), None)

        self.task(remove)

    @rule(choice=unit, steps=st.integers(1, 4))
    def fiber(self, choice: float, steps: int) -> None:
        """Run a fiber in an agent, from a caller that may be dropped."""
        slot, tree = self.pick("state = 'live'", choice), self.tree
        kind = None if slot is None or tree is None else tree.kind_of(slot)
        if slot is None or tree is None or kind is None:
            return

        async def run() -> None:
            await tree.stub(slot, kind).fiber(steps)

        self.task(run, waiter=True)

    @rule(seconds=st.floats(0, 10), rest=st.booleans())
    def advance(self, seconds: float, rest: bool) -> None:
        """Let time pass."""

        async def jump() -> None:
            self.clock.jump(seconds)
            if rest:
                await trio.testing.wait_all_tasks_blocked()

        self.do(jump)

    @rule(passes=st.integers(1, 12))
    def step(self, passes: int) -> None:
        """Let the scheduler make some passes."""

        async def some() -> None:
            for _ in range(passes):
                await trio.lowlevel.checkpoint()

        self.do(some)

    @rule()
    def rest(self) -> None:
        """Let everything run that can run."""
        self.do(trio.testing.wait_all_tasks_blocked)

    @rule(passes=st.integers(1, 40), limit=st.sampled_from([None, None, 1, 3]))
    def read_on(self, passes: int, limit: int | None) -> None:
        """Let the reader of the feed go on at its cursor, and cut it somewhere."""

        async def read() -> None:
            with suppress(*EXPECTED):
                await self.reader.read(self.test.kernel, limit)

        async def some() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(read)
                for _ in range(passes):
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()

        before = len(self.reader.got)
        self.do(some)
        self.sometimes.hit("read on", 0 < before < len(self.reader.got))

    @rule()
    def come(self) -> None:
        """A client connects."""

        async def go() -> None:
            self.clients.append(await connect(self.test, ROOT))

        self.task(go)

    @rule(choice=unit)
    @precondition(lambda self: self.clients)
    def cut(self, choice: float) -> None:
        """A client is gone."""
        peer = self.clients.pop(int(choice * len(self.clients)))
        self._look(peer)
        shown = [over for (who, _), (_, over) in self.last.items() if who is peer]
        self.sometimes.hit("cut before the end", not all(shown))

        async def gone() -> None:
            assert peer.connection is not None
            peer.connection.closed(1006, "", was_clean=False)

        self.do(gone)

    @rule(
        commits=st.sampled_from([0, 1, 2, 3, 5, 8, 13]),
        passes=st.sampled_from([100, 30, 10]),
    )
    def crash_later(self, commits: int, passes: int) -> None:
        """Die after so many more commits, also between two of one step."""

        async def some() -> None:
            self.test.faults.die_after(commits)
            for _ in range(passes):
                if self.test.faults.dead:
                    return
                await trio.lowlevel.checkpoint()

        self.do(some)
        self.sometimes.hit("died in a step", self.test.faults.dead)
        self.crash()

    @rule(really=st.sampled_from([False, False, True]))  # else no life is long
    def crash_now(self, really: bool) -> None:
        """Die, wherever everything is."""
        if really:
            self.crash()

    def crash(self) -> None:
        """Die now; the next life begins on what is durable."""
        self._look_at_all()
        self.model.disturbed = True
        self.sometimes.hit("crashed")
        self.sometimes.hit("told before a crash", bool(self.model.told))
        self.do(self._crash)

    async def _crash(self) -> None:
        self.model.release.set()
        await self.test.crash()
        self.model.release = trio.Event()
        self.model.off.clear()
        self.clients.clear()
        self.holds.live.clear()
        await self.test.reopen()
        self._listen()
        await self._root()

    # ---- what must hold

    @invariant()
    def holds_true(self) -> None:
        """Check the rows, the holds, the clients and the promises."""
        if self.test.faults.dead:
            return
        self._look_at_all()
        assert not self.model.wrong, self.model.wrong
        tree = self.tree
        if tree is None or tree.barrier.fenced is not None:
            return
        wrong = broken(tree)
        assert not wrong, wrong
        held = tree.db.execute("SELECT held, kind FROM job WHERE held IS NOT NULL")
        lost = [row for row in held if row[0] not in self.holds.live]
        assert not lost, f"held, and nobody works on it: {lost}"
        for run_id, status in self.model.told.items():
            rows = tree.db.execute(
                "SELECT status FROM run WHERE owner = ? AND id = ?",
                (tree.root_slot, run_id),
            )
            assert rows == [(status,)], f"told {run_id} {status}, is {rows}"
        for (run_id,) in tree.db.execute(CUT):
            begun = self.model.disturbed or run_id in self.model.begun
            assert begun, f"interrupted, though its code never ran: {run_id}"
        for slot in self.model.deleted:
            assert not tree.is_live_slot(slot), "a deleted agent is back"
        self._published_stays(tree)

    def _published_stays(self, tree: Tree) -> None:
        """Every frame that left is what a replay would give again."""
        for (owner, run_id), frames in self.model.seen.items():
            sql = "SELECT child, status FROM run WHERE owner = ? AND id = ?"
            rows = tree.db.execute(sql, (owner, run_id))
            assert rows, f"a run that was shown is gone: {run_id}"
            child, status = rows[0]
            kinds = {f["kind"] for f in frames.values()}
            ended = kinds - {"started", "chunk"}
            assert not ended or status != "running", (
                f"an end that was shown is open: {run_id}"
            )
            if not tree.store.agent(child).exists:
                continue  # wiped, or nothing was said
            stored = tree.store.agent(child).execute(
                "SELECT i, body FROM main.culet_entry WHERE stream = ?", (run_id,)
            )
            bodies = dict(stored)
            for number, event in frames.items():
                if event["kind"] == "chunk":
                    assert bodies.get(number - 1) == event["body"], (run_id, number)

    def _look_at_all(self) -> None:
        for peer in self.clients:
            self._look(peer)

    def _look(self, peer: RecordingPeer) -> None:
        """Note the frames that a client got since the last look; check their order."""
        tree = self.test.tree(*ROOT)
        if tree is None:
            return
        new = peer.out[self.counted.get(peer, 0) :]
        self.counted[peer] = len(peer.out)
        for frame in map(decoded, new):
            if frame is None:
                continue
            run_id, number = frame["event"].get("runId"), frame["sequence"]
            if run_id is None or not self.minds(run_id):
                continue  # what is cleared is told so
            last, over = self.last.get((peer, run_id), (-1, False))
            ended = frame["event"]["kind"] not in ("started", "chunk")
            need = self.model.need
            need(not over, f"a frame after the end of {run_id}")
            need(
                number == last + 1 or (ended and number > last),
                f"client gap in {run_id}: {last} -> {number}",
            )
            self.last[peer, run_id] = (number, ended)
            self.model.saw((tree.root_slot, run_id), frame)

    # ---- the end

    def teardown(self) -> None:
        """A long quiet time, then: nothing is unfinished, everybody knows the truth."""
        try:
            if self._end is None and not self.model.wrong:
                self._quiet()
        finally:
            try:
                if self._end is None:
                    self.do(self._close)
                super().teardown()
            finally:
                self.holds.__exit__()

    async def _close(self) -> None:
        self.model.release.set()
        self.over.set()
        for scope in self.waiters:
            scope.cancel()

    def _quiet(self) -> None:
        if self.test.faults.dead:
            self.do(self._crash)
        self.test.faults.heal()
        for _ in range(QUIET):

            async def pass_time() -> None:
                self.model.release.set()
                self.clock.jump(9)
                await trio.testing.wait_all_tasks_blocked()

            self.do(pass_time)
            self.do(self.meanwhile)
            self.holds_true()
        self.do(self._root)
        self.do(trio.testing.wait_all_tasks_blocked)
        tree = self.tree
        assert tree is not None
        for (status,) in tree.db.execute("SELECT DISTINCT status FROM run"):
            if status != "running":
                self.sometimes.hit(status)
        self.sometimes.hit("fired", bool(self.model.fired))
        self.sometimes.hit("deleted", bool(self.model.deleted))
        self.sometimes.hit("bought", bool(self.model.tokens))
        for where in self.model.refused:
            self.sometimes.hit(f"refused {where}")
        self._nothing_is_left(tree)
        self._hooks_were_called(tree)
        self._clients_agree()
        self.do(lambda: self.reader.check(self.test.kernel, tree))

    async def meanwhile(self) -> None:
        """What those outside do in the quiet time."""

    def _nothing_is_left(self, tree: Tree) -> None:
        for sql in (
            "SELECT owner, id FROM run WHERE status = 'running'",
            "SELECT owner, id FROM fiber WHERE status = 'running'",
            "SELECT slot FROM node WHERE state = 'gone'",
            "SELECT id, kind, what FROM job WHERE dead = 0",
        ):
            rows = tree.db.execute(sql)
            assert not rows, f"never ends: {rows[:3]}"
        for shot, (slot, what) in self.model.shots.items():
            gone = not tree.is_live_slot(slot)
            assert gone or self.model.fired[shot], f"schedule {shot} {what} never fired"
        assert not tree.remnants, "code that has ended is still listed"
        slots = {row[0] for row in tree.db.execute("SELECT slot FROM node")}
        assert tree.store.slots() - {"tree"} <= slots, "a file without a row"

    def _hooks_were_called(self, tree: Tree) -> None:
        sql = "SELECT owner, id, status FROM run"
        for owner, run_id, status in tree.db.execute(sql):
            count = self.model.hooks[owner, run_id, status]
            below = status == "aborted" and owner != tree.root_slot
            assert count or below, f"no hook for {run_id} {status}"
            assert count <= 1 or self.model.disturbed, f"two hooks for {run_id}"

    def _clients_agree(self) -> None:
        """Who followed all along knows what a newcomer is told."""

        async def newcomer() -> None:
            self.clients.append(await connect(self.test, ROOT))

        self.do(newcomer)
        self.do(trio.testing.wait_all_tasks_blocked)
        self.holds_true()
        *old, fresh = self.clients
        for peer in old:
            if peer.closed is None:
                assert self.ends(peer) == self.ends(fresh)

    def ends(self, peer: RecordingPeer) -> dict[str, tuple[int, str]]:
        """Return the last frame of each run that a client knows."""
        out = dict(self.brought.get(peer, {}))
        for frame in map(decoded, peer.out):
            if frame is not None and "runId" in frame["event"]:
                event = frame["event"]
                out[event["runId"]] = (frame["sequence"], event["kind"])
        return {r: end for r, end in out.items() if self.minds(r)}

    def minds(self, run_id: str) -> bool:
        """Whether what is shown of a run must hold."""
        return run_id not in self.model.forgotten


def decoded(text: str | bytes) -> dict[str, Any] | None:
    """Return an `agent-tool-event` frame."""
    if not isinstance(text, str) or not text.startswith("{"):
        return None
    frame: dict[str, Any] = json.loads(text)
    return frame if frame.get("type") == "agent-tool-event" else None
