"""Runs as tools, in all the ways to ask for them, to speak to them and to watch them:
what was promised to a parent, a client or a letter's sender stands over every crash.

The run machine with more rules. Runs are detached, or waited for in a line; they reach
milestones and hear letters; callers try again what was interrupted; clients come back
with a cursor; runs are replayed from anywhere, and forgotten.
"""

from __future__ import annotations

import collections
import operator
from contextlib import suppress
from typing import Any, ClassVar
from urllib.parse import quote

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from culet.kernel import (
    Agent,
    AgentToolRun,
    Detached,
    Progress,
    Retry,
    RunCaps,
    Turn,
    retry_run,
)
from culet.kernel.core.attach import PARAMETER, Known, known_text, noted
from culet.kernel.errors import CapacityError, NotFound
from culet.kernel.milestones import MILESTONE
from culet.kernel.node import State
from culet.kernel.tree import Tree
from kernel.peers import connect
from machines import world
from machines.asking import ASKS, MARKS, Answers, AskMachine, Asks, Tells, policy_of
from machines.runs import ROOT, decoded, programs, unit
from machines.sometimes import Sometimes
from machines.world import BUDGET, EXPECTED, Model

MOST, IN_LINE, APART = 2, 2, 2  # runs at once, callers in line, detached runs at once
REFUSED = 16  # characters of the id that a refused run is shown under
AGAIN = Retry(max_attempts=3, base_delay=1, max_delay=2)
DETACHED = Detached(on_finish="delivered", milestones=("m",))
SPEAKS = (
    st.sampled_from([["mark", "m"], ["mark", "n"]]),
    st.just(["listen"]),
)
CROWDED = (
    "SELECT count(*) FILTER (WHERE detached IS NULL),"
    " count(*) FILTER (WHERE detached IS NOT NULL),"
    " count(*) FILTER (WHERE class = 'Flaky')"
    " FROM run WHERE owner = ? AND status = 'running'"
)
TERMINAL_KINDS = {"finished", "error", "aborted", "interrupted"}
Key = tuple[str, str]  # (slot of the facet, run id)


class Promises(Answers):
    """What was promised beside that."""

    def __init__(self) -> None:
        super().__init__()
        self.delivered: collections.Counter[tuple[str, str, str]] = (
            collections.Counter()
        )  # (slot of the facet, run id, status)
        self.reached: set[tuple[str, str, int]] = set()  # (run id, name, sequence)
        self.sent: dict[Key, list[str]] = collections.defaultdict(list)  # and durable
        self.done: dict[Key, set[str]] = collections.defaultdict(set)  # and durable


class Listens(Asks, Tells):
    """Hears the letters that have come, each carried out and then never given again."""

    model: ClassVar[Promises]  # type: ignore[misc]

    async def _step(self, turn: Turn, number: int, verb: str, *args: Any) -> Any:
        if verb != "listen":
            return await super()._step(turn, number, verb, *args)
        key, model = (self._node.slot, turn.request_id), self.model
        sure = [one for one in model.sent[key] if one not in model.done[key]]
        heard = []
        while (letter := turn.mailbox.take()) is not None:
            model.need(letter.id == letter.body, f"another letter: {letter}")
            heard.append(letter.id)
        again = model.done[key].intersection(heard)
        model.need(not again, f"letters that were done came again: {key} {again}")
        known = [one for one in heard if one in sure]
        model.need(known == sure, f"letters of {key}: {sure} sent, {heard} heard")
        for one in heard:
            model.need(turn.mailbox.done(one), f"{one} was done before")
        await self.durable()
        model.done[key].update(heard)
        return heard


class Worker(Listens):
    pass


class Frail(Listens, world.Frail):
    pass


class Flaky(Listens, world.Flaky):
    pass


class Root(Tells, world.Root):
    """Asks in all ways."""

    model: ClassVar[Promises]  # type: ignore[misc]
    max_concurrent_agent_tools = MOST
    max_queued_agent_tools = IN_LINE
    run_caps = RunCaps(by_class={"Flaky": 1}, detached=APART, wait_s=20)

    async def run(self, cls: str, program: list[Any], run_id: str) -> str:
        kind = self.kinds[cls]
        run = await self.run_agent_tool(
            kind, program, run_id=run_id, budget=BUDGET, questions=policy_of(program)
        )
        return "refused" if run.reason == "capacity" else run.status

    async def detach(self, cls: str, program: list[Any], run_id: str) -> str:
        run = await self.run_agent_tool(
            self.kinds[cls], program, run_id=run_id, detached=DETACHED, budget=BUDGET,
            questions=policy_of(program),
        )  # fmt: skip
        return "refused" if run.reason == "capacity" else run.status

    async def insist(self, cls: str, program: list[Any], run_id: str) -> list[str]:
        run = await retry_run(
            self, self.kinds[cls], program, run_id=run_id, abandon=lambda _run: True,
            retry=AGAIN, budget=BUDGET, questions=policy_of(program),
        )  # fmt: skip
        return [run.run_id, "refused" if run.reason == "capacity" else run.status]

    async def write(self, run_id: str, letter: str) -> bool:
        sent = await self.runs.send(run_id, letter, id=letter)
        return sent.accepted

    async def forget(self, status: str) -> list[str]:
        """Clear the runs of one status; return the facets that went with them."""
        slot, tree, model = self._node.slot, self._node.tree, self.model
        sql = "SELECT id, child FROM run WHERE owner = ? AND status = ?"
        meant = tree.db.execute(sql, (slot, status))
        for run_id, _child in meant:  # from here on nothing is said of them
            model.forgotten.add(run_id)
            model.told.pop(run_id, None)
            model.seen.pop((slot, run_id), None)
        await self.runs.clear(status=status)  # type: ignore[arg-type]
        return [child for _id, child in meant]

    def _facet(self, run_id: str) -> str:
        subject = self._node.tree.runs.subject(self._node.slot, run_id)
        return "" if subject is None else subject.slot

    async def delivered(self, run: AgentToolRun) -> None:
        model, tree = self.model, self._node.tree
        stands = tree.runs.get(self._node.slot, run.run_id)
        policy = tree.runs.policy(self._node.slot, run.run_id)
        good = stands is not None and stands.status == run.status != "running"
        model.need(good, f"delivered {run.run_id} {run.status}, is {stands}")
        model.need(policy is not None, f"somebody waits for it: {run.run_id}")
        model.delivered[self._facet(run.run_id), run.run_id, run.status] += 1

    async def on_progress(self, run: AgentToolRun, progress: Progress) -> None:
        if progress.milestone is not None:
            told = (run.run_id, progress.milestone, progress.sequence)
            self.model.reached.add(told)


KINDS: dict[str, type[Agent]] = {c.__name__: c for c in (Worker, Frail, Flaky)}
Root.kinds = Listens.kinds = KINDS
classes = st.sampled_from(["Worker", "Worker", "Frail", "Flaky"])
UNDER = st.sampled_from([[], [], [], [["under", "deny"]], [["under", "auto"]]])
speaking = st.builds(operator.add, UNDER, programs(2, *SPEAKS, *SPEAKS, *ASKS))


class ToolMachine(AskMachine):
    """See the module's text."""

    sometimes: ClassVar = Sometimes(
        "detached", "delivered", "reached", "heard", "sent", "known", "refused",
        "went on at its cursor", "replayed from the middle", "forgotten",
        "begun again", "joined again", "in line",
        *MARKS, others=AskMachine.sometimes.others,
    )  # fmt: skip
    root: ClassVar[type[world.Root]] = Root
    kinds: ClassVar[dict[str, type[Agent]]] = KINDS
    model: Promises

    def new_model(self) -> Model:
        return Promises()

    def minds(self, run_id: str) -> bool:
        """Whether it is one of ours: a refused one is shown under an id of its own."""
        return len(run_id) < REFUSED and super().minds(run_id)

    def told(self, run_id: str, status: str) -> None:
        """Note what a caller was told of a run, unless it was refused."""
        self.sometimes.hit("refused", status == "refused")
        if status not in ("running", "refused"):
            self.model.told_status(run_id, status)

    def choose(self, choice: float, where: str = "1") -> str | None:
        """Return one run of the root."""
        tree = self.tree
        if tree is None:
            return None
        sql = f"SELECT id FROM run WHERE owner = ? AND {where} ORDER BY born"
        ids = [row[0] for row in tree.db.execute(sql, (tree.root_slot,))]
        ids = [one for one in ids if one not in self.model.forgotten]
        return ids[int(choice * len(ids))] if ids else None

    # ---- asking

    @rule(cls=classes, program=speaking, run=st.integers(0, 5))
    def dispatch(self, cls: str, program: list[Any], run: int) -> None:
        """Ask for a run, in line where there is no place, or join one that is known."""
        run_id = self.named(f"r{run}")

        async def ask() -> None:
            root: Any = await self._root()
            self.told(run_id, await root.run(cls, program, run_id))

        self.task(ask, waiter=True)

    @rule(cls=classes, program=speaking, run=st.integers(0, 7))
    def detach(self, cls: str, program: list[Any], run: int) -> None:
        """Ask for a run that nobody waits for, or for one that somebody waits for."""
        run_id = self.named(f"r{run}")

        async def ask() -> None:
            root: Any = await self._root()
            status = await root.detach(cls, program, run_id)
            self.sometimes.hit("detached", status == "running")
            self.told(run_id, status)

        self.task(ask)

    @rule(cls=classes, program=speaking, run=st.integers(0, 1))
    def insist(self, cls: str, program: list[Any], run: int) -> None:
        """Ask until it has an end that is known."""
        run_id = self.named(f"t{run}")

        async def ask() -> None:
            root: Any = await self._root()
            last, status = await root.insist(cls, program, run_id)
            self.sometimes.hit("begun again", last != run_id)
            self.told(last, status)

        self.task(ask, waiter=True)

    @rule(choice=unit)
    def join(self, choice: float) -> None:
        """Wait for a run that goes on, perhaps of a former life."""
        run_id = self.choose(choice, "status = 'running'")
        if run_id is None or self.tree is None:
            return
        run = self.tree.runs.get(self.tree.root_slot, run_id)
        assert run is not None

        async def ask() -> None:
            root: Any = await self._root()
            status = await root.run(run.agent_type, [], run_id)
            self.sometimes.hit("joined again", status == "completed")
            self.told(run_id, status)

        self.task(ask, waiter=True)

    # ---- speaking and watching

    @rule(choice=unit, letter=st.sampled_from("abcdef"))
    def write(self, choice: float, letter: str) -> None:
        """Send a letter to a run; it may have been sent before."""
        run_id = self.choose(choice, "1" if letter == "f" else "status = 'running'")
        if run_id is None:
            return

        async def send() -> None:
            tree = self.tree
            root: Any = await self._root()
            subject = tree and tree.runs.subject(tree.root_slot, run_id)
            if tree is None or subject is None:
                return
            with suppress(NotFound, CapacityError):
                accepted = await root.write(run_id, letter)
                await tree.durable()
                sent = self.model.sent[subject.slot, run_id]
                self.sometimes.hit("sent" if accepted else "known")
                if accepted:
                    self.model.need(letter not in sent, f"accepted twice: {letter}")
                    sent.append(letter)

        self.task(send)

    @rule(choice=unit, after=st.integers(-1, 4))
    def replay(self, choice: float, after: int) -> None:
        """Read what a run has published, from anywhere: what clients have got."""
        run_id, tree = self.choose(choice), self.tree
        if run_id is None or tree is None:
            return
        self._look_at_all()

        async def read() -> None:
            last, need = after, self.model.need
            with suppress(*EXPECTED):
                async for frame in tree.runs.replay(tree.root_slot, run_id, after):
                    number, kind = frame["sequence"], frame["event"]["kind"]
                    good = number == last + 1 or (
                        kind in TERMINAL_KINDS and number > last
                    )
                    need(good, f"replay gap in {run_id}: {last} -> {number}")
                    last = number
                    self.model.saw((tree.root_slot, run_id), frame)
                    self.sometimes.hit("replayed from the middle", after > 0)

        self.do(read)

    @rule(choice=unit)
    @precondition(lambda self: self.clients)
    def come_back(self, choice: float) -> None:
        """A client is cut, and comes again with what it has."""
        old = self.clients[int(choice * len(self.clients))]
        self.cut(choice)
        known: dict[str, Known] = {
            run_id: Known(*had) for run_id, had in getattr(old, "known", {}).items()
        }
        for frame in map(decoded, old.out):
            if frame is not None:
                noted(known, frame)
        had = self.ends(old)
        query = f"{PARAMETER}={quote(known_text(known))}"

        async def go() -> None:
            peer = await connect(self.test, ROOT, query=query)
            peer.known = known  # type: ignore[attr-defined]
            for run_id, (_at, number) in known.items():
                at, kind = had.get(run_id, (-1, ""))
                # beyond the hole of what was wiped: it does not say that it has that
                over = at == number and kind in TERMINAL_KINDS
                self.last[peer, run_id] = (number, over)
            self.brought[peer] = {r: end for r, end in had.items() if r in known}
            self.clients.append(peer)
            self.sometimes.hit("went on at its cursor", bool(known))

        self.task(go)

    @rule(
        status=st.sampled_from(["completed", "error", "aborted", "interrupted"] * 2
                               + ["running"])
    )  # fmt: skip
    def forget(self, status: str) -> None:
        """Forget runs, with what goes on of them: nothing of them comes back."""
        self.model.disturbed = True

        async def clear() -> None:
            tree = self.tree
            root: Any = await self._root()
            gone = await root.forget(status)
            if tree is not None:
                await tree.durable()
                self.model.deleted.update(gone)
                self.sometimes.hit("forgotten", bool(gone))

        self.task(clear)

    # ---- what must hold

    @invariant()
    def holds_true(self) -> None:
        """Check the bounds of the root's runs as well, and who stands for whom."""
        super().holds_true()
        tree = self.tree
        if tree is None or tree.barrier.fenced is not None:
            return
        awaited, apart, flaky = tree.db.execute(CROWDED, (tree.root_slot,))[0]
        crowd = f"{awaited} awaited, {apart} detached, {flaky} of Flaky"
        assert awaited <= MOST, crowd
        assert apart <= APART, crowd
        assert flaky <= 1, crowd
        self._line_moves_up(tree, crowd)
        rows = dict(
            tree.db.execute(
                "SELECT id, status FROM run WHERE owner = ?", (tree.root_slot,)
            )
        )
        for run_id in rows:
            base, mark, number = run_id.partition(".again-")
            before = base if number == "2" else f"{base}{mark}{int(number or 0) - 1}"
            stands = rows.get(before, "forgotten") in ("interrupted", "forgotten")
            assert not mark or stands, f"{run_id} beside {before}, {rows[before]}"

    def _line_moves_up(self, tree: Tree, crowd: str) -> None:
        """Whoever stands in line could not begin now."""
        places, root = tree.runs.places, tree.nodes.get(tree.root_slot)
        if root is None or root.state is not State.LIVE:
            return  # whoever stands in line is being sent away
        taken = places._taken(tree.root_slot)
        for want in (one.want for one in places._lines.get(tree.root_slot, ())):
            alike = sum(n for w, n in taken.items() if w.detached == want.detached)
            kind = sum(n for w, n in taken.items() if w.class_name == want.class_name)
            full = alike >= (APART if want.detached else MOST)
            full = full or (want.class_name == "Flaky" and kind >= 1)
            self.sometimes.hit("in line")
            assert full, f"{want} stands in line: {crowd}, {taken}"

    def _nothing_is_left(self, tree: Tree) -> None:
        super()._nothing_is_left(tree)
        sql = (
            "SELECT id, child, status FROM run WHERE owner = ? AND detached IS NOT NULL"
        )
        for run_id, child, status in tree.db.execute(sql, (tree.root_slot,)):
            count = self.model.delivered[child, run_id, status]
            assert count, f"the end of {run_id} {status} was not delivered"
            assert count == 1 or self.model.disturbed, f"delivered twice: {run_id}"
            self.sometimes.hit("delivered")
            first = self._first_mark(tree, child, run_id)
            told = first is None or (run_id, "m", first) in self.model.reached
            assert told, f"the milestone of {run_id} was not told"
            self.sometimes.hit("reached", first is not None)
        self.sometimes.hit("heard", any(self.model.done.values()))
        assert not tree.runs.places._lines, "somebody stands in line for ever"
        assert not tree.runs.places._given, "a place is kept for nobody"
        lost = [one for one in self.model.delivered if one[2] == "running"]
        assert not lost, lost
        assert not tree.db.execute("SELECT 1 FROM mail WHERE done_at IS NULL AND"
                                   " NOT EXISTS (SELECT 1 FROM run WHERE child = slot"
                                   " AND run.id = mail.run AND status = 'running')"
                                   ), "letters to nobody"  # fmt: skip

    def _first_mark(self, tree: Tree, child: str, run_id: str) -> int | None:
        """Return the number of the first frame of a run that says the milestone `m`."""
        file = tree.store.agent(child)
        if not file.exists:
            return None
        sql = "SELECT i, body FROM main.culet_entry WHERE stream = ? ORDER BY i"
        for i, body in file.execute(sql, (run_id,)):
            chunk = msgspec.json.decode(body)
            if chunk["type"] == MILESTONE and chunk["data"]["name"] == "m":
                return int(i) + 1
        return None
