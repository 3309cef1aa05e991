"""Questions across levels: what a run asks is heard by everybody above, and answered once.

A run asks and waits; whoever is above answers it by its id, at any level, and the first
answer that was told as taken stands over every crash: the run goes on with that one. Who
has a policy for the runs below him is never asked. What ends takes its questions along.
"""

from __future__ import annotations

import collections
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, Final

import msgspec
import trio
import trio.testing
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from culet.kernel import Question, Turn
from culet.kernel.core.clientframes import ToolApproval
from culet.kernel.core.questions import Policy
from culet.kernel.errors import NotFound
from culet.kernel.milestones import PROGRESS
from culet.kernel.questions import WAITING, RunAnswer
from culet.kernel.tree import Tree
from machines import world
from machines.runs import RunMachine, unit
from machines.sometimes import Sometimes
from machines.world import EXPECTED

ASKS: Final = (st.sampled_from([["ask", "yes"], ["ask", "value"], ["ask", "yes"]]),)
STATES: Final = {"yes": "approval-requested", "value": "input-available"}
MARKS: Final = (
    "asked", "asked below", "answered", "answered from above", "answered too late",
    "decided by a policy", "asked in two lives",
)  # fmt: skip
ROUNDS: Final = 200  # of answers in one pause: a program asks less often
TABLE: Final = (
    "create table if not exists answer"
    " (run text, call text, what text, said text, unique (run, call))"
)
KEEP: Final = (
    "update answer set said = ? where run = ? and call = ? and what = ?"
    " and said is null returning run"
)
OWNER: Final = "SELECT owner FROM run WHERE child = ? AND id = ?"
RUNNING: Final = "SELECT 1 FROM run WHERE child = ? AND id = ? AND status = 'running'"
AWAITED: Final = (
    "WITH RECURSIVE sub (slot, what) AS (SELECT ?1, ?2 UNION SELECT r.child, r.id"
    " FROM run r JOIN sub ON r.owner = sub.slot AND r.asker = sub.what"
    " WHERE r.status = 'running') SELECT slot, what FROM sub"
)
LAST: Final = (
    "SELECT body FROM main.culet_entry WHERE stream = ? AND body LIKE ?"
    " ORDER BY i DESC LIMIT 1"
)
Call = tuple[str, str, str]  # (slot of the agent whose run asks, run id, call id)


def policy_of(program: list[Any]) -> Policy | None:
    """Return the policy that a run of this program has, and all below it."""
    under = bool(program) and program[0][0] == "under"
    return program[0][1] if under else None


class Answers(world.Model):
    """Who asks what in this life, and what was answered, durably, in any."""

    def __init__(self) -> None:
        super().__init__()
        self.asking: set[Call] = set()
        self.asked: set[Call] = set()  # ever
        self.lives: collections.Counter[Call] = collections.Counter()
        self.decided = 0
        self.taken: dict[Call, Any] = {}  # the caller was told so


class Asks(world.Worker):
    """Asks for what its program says, and keeps the first answer."""

    __culet_base__ = True  # it takes answers, as a chat base does
    model: ClassVar[Answers]  # type: ignore[misc]
    news: trio.Event | None = None

    async def _step(self, turn: Turn, number: int, verb: str, *args: Any) -> Any:
        policy = policy_of(turn.input)
        if verb == "under":
            return None
        if verb == "ask":
            return await self._ask(turn, f"c{number}", args[0], policy)
        if verb == "nest" and policy is not None:
            kind, program, *tokens = args
            args = (kind, [["under", policy], *program], *tokens)
        return await super()._step(turn, number, verb, *args)

    async def _ask(self, turn: Turn, call: str, what: str, policy: Any) -> Any:
        model, here = self.model, (self._node.slot, turn.request_id, call)
        state, questions = STATES[what], self._node.tree.questions
        self.sql(TABLE)
        self.sql("insert or ignore into answer values (?, ?, ?, null)", *here[1:], what)
        verdict = questions.verdict(turn, state)
        wanted = "deny" if policy == "deny" else "ask"
        wanted = "approve" if policy == "auto" and what == "yes" else wanted
        model.need(verdict == wanted, f"{here} under {policy}: {verdict}")
        if verdict != "ask":
            self._keep(here[1], call, what, verdict == "approve")
            model.decided += 1
        model.lives[here] += 1
        model.asked.add(here)
        try:
            while (said := self._said(*here[1:])) is None:
                self.news = trio.Event()
                model.asking.add(here)
                asked = {"toolCallId": call, "toolName": "pay", "state": state}
                questions.park(turn, [asked])
                await self.news.wait()
        finally:
            model.asking.discard(here)
        if turn.waits:
            questions.park(turn, [])
        told = msgspec.json.decode(said)
        known = model.taken.get(here, told)
        model.need(known == told, f"{here}: {known} was taken, it goes on with {told}")
        return told

    def _said(self, run_id: str, call: str) -> Any:
        sql = "select said from answer where run = ? and call = ?"
        return self.sql(sql, run_id, call)[0].said

    def _keep(self, run_id: str, call: str, what: str, value: Any) -> bool:
        """Store an answer; False: there is one, or nothing like that was asked."""
        self.sql(TABLE)
        text = msgspec.json.encode(value).decode()
        return bool(self.sql(KEEP, text, run_id, call, what))

    def _answered(self, run_id: str, answer: RunAnswer) -> bool:
        call = answer.tool_call_id
        if isinstance(answer, ToolApproval):
            taken = self._keep(run_id, call, "yes", answer.approved)
        else:
            taken = self._keep(run_id, call, "value", answer.output)
        if taken and self.news is not None:
            self.news.set()
        return taken


class Tells:
    """An agent that answers for the runs below it."""

    runs: Any

    async def say(self, run_id: str, call: str, value: Any) -> bool:
        """Answer a run of this agent, or of any below."""
        if isinstance(value, bool):
            return bool(await self.runs.approve(run_id, call, approved=value))
        return bool(await self.runs.answer(run_id, call, value))


class AskMachine(RunMachine):
    """The rules of those who answer; see the module's text."""

    sometimes: ClassVar = Sometimes(*MARKS, others=RunMachine.sometimes.marks)
    model: Answers

    @rule(choice=unit, value=st.booleans(), above=st.booleans())
    def answer(self, choice: float, value: bool, above: bool) -> None:
        """Answer what is asked: the root, or whoever asked for that very run."""
        tree = self.tree
        found = [] if tree is None else tree.questions.all(tree.root_slot)
        if tree is None or not found:
            return
        one = found[int(choice * len(found))]
        self.task(lambda: self._give(tree, one, value, above=above))

    @rule(choice=unit, value=st.booleans())
    @precondition(lambda self: self.model.taken)
    def answer_again(self, choice: float, value: bool) -> None:
        """Answer what has its answer: it is not taken, whatever has become of the run."""
        known = sorted(self.model.taken)
        _slot, run_id, call = here = known[int(choice * len(known))]
        given = value if isinstance(self.model.taken[here], bool) else int(value)

        async def again() -> None:
            root: Any = await self._root()
            with suppress(NotFound):  # it was forgotten
                taken = await root.say(run_id, call, given)
                self.model.need(not taken, f"a second answer was taken: {here}")
                self.sometimes.hit("answered too late")

        self.task(again)

    async def _give(
        self, tree: Tree, one: Question, value: Any, *, above: bool
    ) -> None:
        model, call = self.model, one.tool_call_id
        slot = tree.questions.asks(tree.root_slot, one.run_id, call)
        if slot is None:
            return
        here = (slot, one.run_id, call)
        owner = tree.db.execute(OWNER, (slot, one.run_id))[0][0]
        kind = tree.kind_of(owner)
        by: Any = await self._root()
        if not above and kind is not None and owner != tree.root_slot:
            by = tree.stub(owner, kind)
        value = value if one.state == STATES["yes"] else int(value)
        taken = await by.say(one.run_id, call, value)
        await tree.durable()
        if taken:
            model.need(here not in model.taken, f"answered twice: {here}")
            model.taken[here] = value
            self.sometimes.hit("answered")
            self.sometimes.hit("answered from above", by is not None and above
                               and owner != tree.root_slot)  # fmt: skip

    # ---- what must hold

    @invariant()
    def holds_true(self) -> None:
        """Check that everybody above hears of all that is asked."""
        super().holds_true()
        model, tree = self.model, self.tree
        self.sometimes.hit("asked", bool(model.asking))
        self.sometimes.hit(
            "asked in two lives", max(model.lives.values(), default=0) > 1
        )
        self.sometimes.hit("decided by a policy", bool(model.decided))
        if tree is None or tree.barrier.fenced is not None:
            return
        heard = {(q.run_id, q.tool_call_id) for q in tree.questions.all(tree.root_slot)}
        for slot, run_id, call in model.asking:
            running = tree.db.execute(RUNNING, (slot, run_id))
            if running and (slot, run_id) in tree.turns.live:
                assert (run_id, call) in heard, f"{run_id} asks, and nobody hears it"
        never = heard - {here[1:] for here in model.asked}
        assert not never, f"heard, and never asked: {never}"

    async def meanwhile(self) -> None:
        """In the quiet time at the end all is answered."""
        for _ in range(ROUNDS):
            tree = self.tree
            if tree is None:
                return
            await self._all_is_told(tree)
            found = tree.questions.all(tree.root_slot)
            if not found:
                return
            for one in found:
                with suppress(*EXPECTED):
                    await self._give(tree, one, True, above=True)
            await trio.testing.wait_all_tasks_blocked()
        self.model.need(False, "it asks for ever")

    async def _all_is_told(self, tree: Tree) -> None:
        """Whoever watches a run of the root has been told what it and those below ask."""
        wrong = ""
        for _ in range(20):  # a report comes at most so often
            self.clock.jump(0.3)
            await trio.testing.wait_all_tasks_blocked()
            if tree is not self.tree:
                return
            with suppress(*EXPECTED):
                await tree.durable()
            wrong = "; ".join(
                filter(None, map(partial(self._untold, tree), tree.turns.live))
            )
            if not wrong:
                return
        self.model.need(False, wrong)

    def _untold(self, tree: Tree, turn: tuple[str, str]) -> str:
        slot, run_id = turn
        if tree.db.execute(OWNER, turn) != [(tree.root_slot,)]:
            return ""
        below = {(str(c), str(r)) for c, r in tree.db.execute(AWAITED, turn)}
        asking = {here[1:] for here in self.model.asking if here[:2] in below}
        self.sometimes.hit("asked below", any(run != run_id for run, _call in asking))
        # what is about to be asked anew may be told still
        may = {here[1:] for here in self.model.asked if here[:2] in below} | asking
        file, told = tree.store.agent(slot), set()
        bodies = file.execute(LAST, (run_id, f"%{PROGRESS}%")) if file.exists else []
        if bodies:
            data = msgspec.json.decode(bodies[0][0])["data"]
            calls = data["data"]["calls"] if data["phase"] == WAITING else []
            told = {(call["runId"], call["toolCallId"]) for call in calls}
        good = asking <= told <= may
        return "" if good else f"{run_id} is asked {asking}, was told {told}"
