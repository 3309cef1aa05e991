"""The agents that the run machine drives, and the model: what the outside was told.

A program is a list of steps, one chunk each, so a resumed turn goes on at the step after
the last stored one. What agents notice is noted in the model, not raised: an exception
in agent code ends at the agent's border and would fail nothing.
"""

from __future__ import annotations

import collections
from collections.abc import AsyncIterator
from typing import Any, ClassVar

import trio

from culet.kernel import (
    Agent,
    AgentToolRun,
    Budget,
    CancelReceipt,
    Chunk,
    FiberRecovery,
    FiberResolution,
    Schedule,
    Turn,
)
from culet.kernel.errors import CuletError, OverBudget
from culet.kernel.milestones import PROGRESS
from culet.kernel.tree import Tree

Key = tuple[str, str]  # (slot of the owner, run id)
BUDGET = Budget(tokens=40, calls=8)  # of each run of the root, and of all below it


class Model:
    """What was promised so far, over all lives."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.told: dict[str, str] = {}  # run of the root -> status
        self.seen: dict[Key, dict[int, Any]] = {}  # frames that left
        self.begun: set[str] = set()  # runs whose code has run
        self.tools: dict[Key, set[int]] = collections.defaultdict(set)
        self.fired: collections.Counter[str] = collections.Counter()
        self.off: set[str] = set()  # schedules removed in this life
        self.shots: dict[str, tuple[str, str]] = {}  # acknowledged: id -> (slot, what)
        self.hooks: collections.Counter[tuple[str, str, str]] = collections.Counter()
        self.starts: collections.Counter[str] = collections.Counter()
        self.deleted: set[str] = set()
        self.tokens: collections.Counter[str] = collections.Counter()  # outside's count
        self.calls: collections.Counter[str] = collections.Counter()
        self.refused: set[str] = set()  # by which budgets
        self.forgotten: set[str] = set()  # runs of the root that may have been cleared
        self.disturbed = False
        self.release = trio.Event()  # of code that will not stop

    def need(self, good: bool, text: str) -> None:
        """Note what is wrong."""
        if not good:
            self.wrong.append(text)

    def bill(self, top: str, tokens: int) -> None:
        """Count a paid call below a run of the root, as somebody outside would."""
        self.tokens[top] += tokens
        self.calls[top] += 1
        good = self.tokens[top] <= (BUDGET.tokens or 0)
        good = good and self.calls[top] <= (BUDGET.calls or 0)
        self.need(good, f"spent {self.tokens[top]} in {self.calls[top]} calls of {top}")

    def saw(self, key: Key, frame: dict[str, Any]) -> None:
        """Note one frame that a client got."""
        known = self.seen.setdefault(key, {})
        number, event = frame["sequence"], frame["event"]
        self.need(known.setdefault(number, event) == event, f"frame changed: {frame}")

    def told_status(self, run_id: str, status: str) -> None:
        """Note what a caller was told."""
        if run_id in self.forgotten:
            return
        self.need(
            self.told.setdefault(run_id, status) == status, f"two ends of {run_id}"
        )

    def holds(self, tree: Tree, receipt: CancelReceipt) -> None:
        """What a receipt names as ended stands so, or was forgotten since."""
        for one in (*receipt.runs, *receipt.fibers):
            table = "run" if one.kind == "run" else "fiber"
            rows = tree.db.execute(
                f"SELECT status FROM {table} WHERE id = ?", (one.id,)
            )
            stands = not rows or (one.status,) in rows
            self.need(stands, f"{one.kind} {one.id} was not ended: {rows}")
        jobs = [tree.jobs.get(int(call.id)) for call in receipt.calls]
        self.need(not any(jobs), f"a dropped call is owed: {jobs}")
        self.off.update(call.id for call in receipt.calls)
        self.need(bool(receipt.runs) == receipt.ended, "who ended it")


class Actor(Agent):
    """What all agents of the machine can do."""

    model: ClassVar[Model]
    kinds: ClassVar[dict[str, type[Agent]]]  # what it runs as tools, by name

    async def on_agent_tool_finish(self, run: AgentToolRun) -> None:
        self.model.hooks[self._node.slot, run.run_id, run.status] += 1

    async def on_fiber_recovered(self, ctx: FiberRecovery) -> FiberResolution | None:
        await self._steps(int(ctx.name), ctx.snapshot or 0)
        return FiberResolution()

    async def fiber(self, count: int) -> None:
        async def fn() -> None:
            await self._steps(count, 0)

        await self.run_fiber(str(count), fn)

    async def _steps(self, count: int, done: int) -> None:
        for number in range(done, count):
            await trio.sleep(2)
            self.stash(number + 1)

    async def later(self, seconds: float, what: str) -> str:
        made = await self.schedule(seconds, "fire", {"what": what})
        return made.id

    async def fire(self, payload: Any, schedule: Schedule) -> None:
        model = self.model
        model.need(schedule.id not in model.off, "a cancelled schedule fired")
        model.fired[schedule.id] += 1
        if payload["what"] == "bad":
            raise ValueError("bad")
        if payload["what"] == "slow":
            await trio.sleep(3)


class Root(Actor):
    async def run(self, cls: str, program: list[Any], run_id: str) -> str:
        run = await self.run_agent_tool(
            self.kinds[cls], program, run_id=run_id, budget=BUDGET
        )
        return run.status

    async def cancel(self, run_id: str) -> str | None:
        receipt = await self.runs.cancel(run_id)
        self.model.holds(self._node.tree, receipt)
        return receipt.status


class Worker(Actor):
    """A resumable child that does its program."""

    resumable = True

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        run = self._node.tree.runs.of_child(self._node.slot, turn.request_id)
        running = run is not None and run.status == "running"
        self.model.need(running, f"a turn began after its end: {turn.request_id}")
        self.model.begun.add(turn.request_id)
        program: list[list[Any]] = turn.input
        done = [chunk for chunk in turn.chunks() if chunk["type"] != PROGRESS]
        for number in range(len(done), len(program)):
            step = program[number]
            if step[0] == "mark":  # its report is its chunk
                await self.report_progress(milestone=step[1])
                continue
            result = await self._step(turn, number, *step)
            yield {
                "type": "data-step",
                "data": [turn.request_id, number, step[0], result],
            }

    async def _step(self, turn: Turn, number: int, verb: str, *args: Any) -> Any:
        match verb:
            case "tool":
                await self._tool(turn, number)
            case "sleep":
                await trio.sleep(args[0])
            case "nest":
                cls, program, *tokens = args
                run_id = f"{turn.request_id}.{number}"
                return await self._nest(cls, program, run_id, *tokens)
            case "crowd":
                count, program, tokens = args
                async with trio.open_nursery() as nursery:
                    for n in range(count):
                        run_id = f"{turn.request_id}.{number}.{n}"
                        nursery.start_soon(
                            self._nest, "Worker", program, run_id, tokens
                        )
            case "buy":
                await self._buy(*args)
            case "fiber":
                await self.fiber(args[0])
            case "later":
                await self.later(args[0], "ok")
            case "raise":
                raise ValueError("raise")
            case "deaf":
                with trio.CancelScope(shield=True), trio.move_on_after(args[0]):
                    await self.model.release.wait()
        return None

    async def _nest(
        self, cls: str, program: list[Any], run_id: str, tokens: int | None = None
    ) -> str:
        budget = None if tokens is None else Budget(tokens=tokens)
        run = await self.run_agent_tool(
            self.kinds[cls], program, run_id=run_id, budget=budget
        )
        if run.reason == "budget":
            self.model.refused.add("at dispatch")
        return run.status

    async def _buy(self, reserve: int, use: int) -> None:
        """Call something that is paid for, unless the budget refuses."""
        try:
            spend = await self.budget.reserve(tokens=reserve, calls=1)
        except OverBudget:
            self.model.refused.add("before a spend")
            return
        lineage = self._node.lineage()
        self.model.bill(lineage[min(1, len(lineage) - 1)].slot, use)
        await trio.sleep(1)
        spend.settle(tokens=use)

    async def _tool(self, turn: Turn, number: int) -> None:
        """Do something outside that must not be done again once its chunk was seen."""
        await self.durable()
        node = self._node
        assert node.parent is not None
        key = node.parent.slot, turn.request_id
        mark = f',{number},"tool",'
        frames = self.model.seen.get(key, {}).values()
        seen = any(mark in frame.get("body", "") for frame in frames)
        self.model.need(not seen, f"a finished tool call was repeated: {key} {number}")
        self.model.tools[key].add(number)


class Frail(Worker):
    resumable = False


class Flaky(Worker):
    """Its start fails every third time, the first time as well."""

    resumable = False

    async def on_start(self) -> None:
        starts = self.model.starts
        starts[self._node.slot] += 1
        await trio.lowlevel.checkpoint()
        if starts[self._node.slot] % 3 == 1:
            raise ValueError("start")


CLASSES: dict[str, type[Agent]] = {c.__name__: c for c in (Worker, Frail, Flaky)}
Actor.kinds = CLASSES
EXPECTED = (CuletError,)  # what an abort, a crash or a delete may do to a caller
