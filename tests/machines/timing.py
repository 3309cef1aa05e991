"""What an agent owes itself is called: never early by the wall clock, never lost once it
was durable, never in a burst for the ticks that were missed.

One-shots, intervals, crons and queued calls of a root and of its facets come and go, are
paused, asked for, taken back; their calls go well, raise, hang, or end their agent; time
passes, the wall clock jumps both ways as a suspended or corrected machine's does, lives
end between any two commits. Beside them they walk: fibers that stash each step. The model
knows who owes what, and how far who has come; the rows of the tree are held against it
after every rule. (The module is not called `time`: the standard library has one.)
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, NamedTuple

import trio
import trio.testing
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from culet.kernel import (
    Agent,
    Due,
    FiberRecovery,
    FiberResolution,
    Limits,
    Retry,
    Schedule,
    next_fire,
)
from culet.kernel.errors import ChildDidNotStop
from culet.kernel.jobs import JobRow
from culet.kernel.testing import VirtualClock, open_test_kernel
from machines.guest import TrioMachine
from machines.sometimes import Sometimes

LATE_S: Final = 70.0  # a wall clock that jumps is looked at once in ten seconds
LIMITS: Final = Limits(job_timeout_s=20, attempts=4, jobs_in_batch=3)
TWICE: Final = Retry(max_attempts=2, base_delay=1, max_delay=1)
ENDED: Final = "the process ended each time"  # in the middle of it, as far as is known
KIDS: Final = ("k", "l")
CRON: Final = "*/7 * * * *"
RHYTHMS: Final[dict[str, float | str]] = {"1": 1, "7": 7, "60": 60, "cron": CRON}


class Fire(NamedTuple):
    """One call, as the agent saw it."""

    id: str
    slot: str
    at: int
    now: int
    attempt: int


@dataclass
class Owed:
    """One call of the model. `how`: what it does when it is called."""

    slot: str
    kind: str  # once, every, cron, queue
    how: str  # ok, raise, hang, destroy
    step_ms: int | None = None
    strict: bool = False  # misfire="none"
    durable: bool = False
    paused: bool = False
    asked: bool = False  # by `run_now`: it may come before its tick
    loose: bool = False  # a crash came: its last call may come again
    fires: int = 0
    last: Fire | None = None


class Step(NamedTuple):
    """One step of a fiber: a stash that returned, or what its recovery hook was told."""

    id: str
    slot: str
    value: int
    attempt: int | None = None  # of the hook; None: a stash


@dataclass
class Walk:
    """One fiber of the model."""

    slot: str
    steps: int
    how: str  # what its recovery hook does: ok, raise
    said: int = 0  # its last stash
    kept: int = 0  # the last that is known to be durable
    lives: int = 0  # that have ended
    when: dict[int, int] = field(default_factory=lambda: {0: 0})  # that had, by stash
    durable: bool = False  # its row
    over: str | None = None  # how it has ended, durably


class Sleeper(Agent):
    """Owes itself calls."""

    retry = TWICE
    clock: ClassVar[VirtualClock]
    walked: ClassVar[list[Step]]
    fires: ClassVar[list[Fire]]
    running: ClassVar[dict[str, tuple[str, str]]]  # owner and lane, by id

    async def plan(self, what: str, when: Any, how: str, n: int) -> tuple[str, int]:
        payload = [how, n]
        if what == "queue":
            return self.queue.put("fire", payload), 0
        if what == "many":
            made = await self.schedules.many([Due(when, "fire", payload)] * 3)
            return ",".join(s.id for s in made), made[0].at
        strict = "none" if what == "strict" else "one"
        if isinstance(when, str):
            every: Any = RHYTHMS[when]
            if isinstance(every, str):
                one = await self.schedule(every, "fire", payload, misfire=strict)
            else:
                one = await self.schedule_every(every, "fire", payload, misfire=strict)
            return one.id, one.at
        same = what == "same"
        one = await self.schedule(when, "fire", payload, idempotent=same)
        if same:
            again = await self.schedule(when, "fire", payload, idempotent=True)
            assert one.id == again.id, "twice the same is one"
        return one.id, one.at

    async def change(self, how: str, schedule_id: str, below: bool) -> bool:
        if below:
            return self.schedules.cancel(schedule_id, below=True)
        if how == "cancel" and self.queue.remove(schedule_id):
            return True
        return bool(getattr(self.schedules, how)(schedule_id))

    async def listed(self, below: bool) -> list[str]:
        soon = {s.id for s in self.schedules.upcoming(1e5, below=below)}
        found = self.schedules.list(below=below)
        assert [(s.due_at, int(s.id)) for s in found] == sorted(
            (s.due_at, int(s.id)) for s in found
        )
        assert soon == {s.id for s in found if not s.dead}
        return [s.id for s in found] + (
            [] if below else [q.id for q in self.queue.list()]
        )

    async def walk(self, fiber_id: str, steps: int, how: str) -> None:
        async def body() -> None:
            await self._walk(fiber_id, steps, 0)

        about = [steps, how]
        await self.fibers.start("walk", body, fiber_id=fiber_id, metadata=about)

    async def _walk(self, fiber_id: str, steps: int, first: int) -> None:
        for done in range(first, steps):
            await trio.sleep(4)
            self.stash(done + 1)
            self.walked.append(Step(fiber_id, self._node.slot, done + 1))

    async def on_fiber_recovered(self, ctx: FiberRecovery) -> FiberResolution:
        steps, how = ctx.metadata
        first = ctx.snapshot or 0
        self.walked.append(Step(ctx.id, self._node.slot, first, ctx.attempt))
        if how == "raise":
            raise ValueError("planned")
        await self._walk(ctx.id, steps, first)
        return FiberResolution()

    async def fire(self, payload: Any, schedule: Schedule) -> None:
        slot, now = self._node.slot, self.clock.now_ms()
        self.fires.append(Fire(schedule.id, slot, schedule.at, now, schedule.attempts))
        assert schedule.id not in self.running, f"beside itself: {schedule}"
        lane = "queue" if self.queue.get(schedule.id) is not None else "call"
        self._first_in_first_out(schedule)
        self.running[schedule.id] = slot, lane
        try:
            match payload[0]:
                case "raise":
                    raise ValueError("planned")
                case "hang":
                    await trio.sleep_forever()
                case "destroy":
                    await self.destroy()
        finally:
            self.running.pop(schedule.id, None)

    def _first_in_first_out(self, schedule: Schedule) -> None:
        sql = (
            "SELECT kind = 'queue' AND EXISTS (SELECT 1 FROM job AS j WHERE j.owner ="
            " job.owner AND j.kind = 'queue' AND j.id < job.id AND j.dead = 0)"
            " FROM job WHERE id = ?"
        )
        rows = self._node.tree.db.execute(sql, (int(schedule.id),))
        assert rows == [(0,)], f"not the first of its queue: {schedule}"


class Kid(Sleeper):
    """The same below a root."""


class Root(Sleeper):
    """Has facets that owe, too."""

    async def kid(self, name: str) -> str:
        await self.dynamic_agents.get(Kid, name)
        return self._node.tree.slot_of(self._node.slot, "Kid", name) or ""

    async def ask(self, name: str, method: str, args: list[Any]) -> Any:
        kid = await self.dynamic_agents.lookup(Kid, name)
        assert kid is not None
        return await getattr(kid, method)(*args)

    async def drop(self, name: str) -> None:
        await self.dynamic_agents.delete(Kid, name)


class TimeMachine(TrioMachine):
    """See the module's text."""

    sometimes: ClassVar = Sometimes(
        "fired once", "ticked", "missed ticks", "skipped", "cancelled",
        "cancelled below", "jumped forward", "jumped back", "suspended", "crashed",
        "died between commits", "late", "paused", "resumed", "asked", "tried again",
        "rests dead", "replayed", "hung", "destroyed itself", "deleted", "queued",
        "in a facet", "walked to its end", "walked on", "in vain",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        Sleeper.fires, Sleeper.running, Sleeper.walked = [], {}, []
        self.walks: dict[str, Walk] = {}
        self.stepped = 0
        self.owed: dict[str, Owed] = {}
        self.past: dict[str, Owed] = {}  # over, and not durably: a crash brings it back
        self.kids: dict[str, str] = {}  # slots by name
        self.seen = self.n = 0
        self.back = False  # the wall clock was put back
        self.over = trio.Event()
        self.do(self._open)

    async def _open(self) -> None:
        opened = trio.Event()

        async def keep() -> None:
            with suppress(ChildDidNotStop):
                async with open_test_kernel(
                    roots=[Root], facets=[Kid], limits=LIMITS
                ) as self.test:
                    Sleeper.clock = self.test.clock
                    opened.set()
                    await self.over.wait()

        self.nursery.start_soon(keep)
        await opened.wait()
        await self._ask(None, "listed", False)
        self.root = self._tree().root_slot
        await self._tree().durable()

    def _tree(self) -> Any:
        tree = self.test.tree("Root", "r")
        assert tree is not None
        return tree

    async def _ask(self, kid: str | None, method: str, *args: Any) -> Any:
        root: Any = await self.test.kernel.get_agent(Root, "r")
        if kid is None:
            return await getattr(root, method)(*args)
        return await root.ask(kid, method, [*args])

    def _durable(self) -> None:
        """What was changed stays so: a crash would bring it back, rightly."""
        self._step()
        far = {made: self._row(made) for made in self.walks}
        self.do(self._tree().durable)
        self._check()
        for made, (status, stashed) in far.items():
            if status is None:
                continue  # it never was, or its agent has ended
            walk = self.walks[made]
            walk.kept, walk.durable = max(walk.kept, stashed), True
            walk.over = None if status == "running" else status
        for owed in self.owed.values():
            owed.durable = True
        self.past.clear()

    def _pass(self, seconds: float) -> None:
        """Let time pass, in steps of a quarter of a minute."""

        async def steps() -> None:
            left = seconds
            while left > 0 and not self.test.faults.dead:
                self.clock.jump(min(left, 15.0))
                left -= 15.0
                await trio.testing.wait_all_tasks_blocked()

        self.do(steps)

    def _who(self, which: int) -> tuple[str | None, str]:
        """Return the name of a facet (None: the root) and its slot."""
        names = [None, *sorted(self.kids)]
        name = names[which % len(names)]
        return name, self.root if name is None else self.kids[name]

    def _some(self, which: int) -> tuple[str | None, str]:
        """Return whose some call is, and its id."""
        made = sorted(self.owed, key=int)[-1 - which % len(self.owed)]
        names = {slot: name for name, slot in self.kids.items()}
        return names.get(self.owed[made].slot), made

    # ---- rules: what is owed

    @rule(name=st.sampled_from(KIDS))
    def kid(self, name: str) -> None:
        self.kids[name] = self.do(self._ask, None, "kid", name)
        self._durable()

    @rule(
        who=st.integers(0, 2),
        what=st.sampled_from(["once", "once", "many", "same"]),
        seconds=st.sampled_from([0, 0.5, 3, 59, 61, 600]),
        how=st.sampled_from(["ok", "ok", "ok", "raise", "hang", "destroy"]),
    )
    def once(self, who: int, what: str, seconds: float, how: str) -> None:
        self._plan(who, what, seconds, how, "once")

    @rule(
        who=st.integers(0, 2),
        when=st.sampled_from(sorted(RHYTHMS)),
        how=st.sampled_from(["ok", "ok", "raise", "hang"]),
        what=st.sampled_from(["every", "strict"]),
    )
    def every(self, who: int, when: str, how: str, what: str) -> None:
        if sum(o.step_ms is not None for o in self.owed.values()) < 6:
            self._plan(who, what, when, how, "cron" if when == "cron" else "every")

    @rule(who=st.integers(0, 2), how=st.sampled_from(["ok", "ok", "raise", "hang"]))
    def put(self, who: int, how: str) -> None:
        self.sometimes.hit("queued")
        self._plan(who, "queue", 0, how, "queue")

    @rule(
        who=st.integers(0, 2),
        steps=st.integers(1, 9),
        how=st.sampled_from(["ok", "ok", "raise"]),
    )
    def walk(self, who: int, steps: int, how: str) -> None:
        """A fiber sets out."""
        name, slot = self._who(who)
        self.n += 1
        made = f"w{self.n}"
        self.do(self._ask, name, "walk", made, steps, how)
        self.walks[made] = Walk(slot, steps, how)
        self._settle()

    def _plan(self, who: int, what: str, when: Any, how: str, kind: str) -> None:
        name, slot = self._who(who)
        if name is None and how == "destroy":
            how = "ok"  # a root that is gone owes nothing, and there the story ends
        self.n += 1
        made, _at = self.do(self._ask, name, "plan", what, when, how, self.n)
        every = RHYTHMS[when] if isinstance(when, str) else None
        step = None if every is None else every if isinstance(every, int) else 0
        for one in made.split(","):
            self.owed[one] = Owed(
                slot, kind, how, None if step is None else step * 1000, what == "strict"
            )
        self._settle()

    # ---- rules: what is changed

    @rule(which=st.integers(0, 20), below=st.booleans())
    @precondition(lambda self: self.owed)
    def cancel(self, which: int, below: bool) -> None:
        """From now on it does not fire."""
        name, made = self._some(which)
        below = below and self.owed[made].kind != "queue"
        asked = None if below else name
        there = self.do(self._ask, asked, "change", "cancel", made, below)
        self._look()
        self.sometimes.hit("cancelled", there)
        self.sometimes.hit("cancelled below", below and name is not None)
        if there:
            self.owed.pop(made, None)
        else:
            assert made not in self._rows()
        self._durable()

    @rule(which=st.integers(0, 20), who=st.integers(0, 2))
    @precondition(lambda self: self.owed)
    def meddle(self, which: int, who: int) -> None:
        """Nobody ends what another owes, but from above and saying so."""
        _owner, made = self._some(which)
        name, slot = self._who(who)
        if self.owed[made].slot != slot:
            for how in ("cancel", "pause", "run_now", "replay"):
                assert not self.do(self._ask, name, "change", how, made, False)
            if name is not None:
                assert not self.do(self._ask, name, "change", "cancel", made, True)
        self._settle()

    @rule(
        which=st.integers(0, 20),
        how=st.sampled_from(["pause", "resume", "resume", "run_now", "replay"]),
    )
    @precondition(lambda self: self.owed)
    def change(self, which: int, how: str) -> None:
        name, made = self._some(which)
        before = self._rows().get(made)
        asked = self.owed[made].asked
        self.owed[made].asked |= how == "run_now"
        done = self.do(self._ask, name, "change", how, made, False)
        self._look(changing=made)
        owed = self.owed.get(made)
        if before is None or owed is None:
            self._durable()
            return
        owed.asked = asked or (done and how == "run_now")
        applies = before.kind == "call" and (how == "replay") == bool(before.dead)
        assert done == applies, (how, before)
        if done:
            self.sometimes.hit("paused", how == "pause")
            self.sometimes.hit("resumed", how == "resume" and owed.paused)
            self.sometimes.hit("asked", how == "run_now")
            self.sometimes.hit("replayed", how == "replay")
            owed.loose |= how in ("replay", "run_now")
            if how != "replay":
                owed.paused = how == "pause"
        self._durable()

    @rule(name=st.sampled_from(KIDS))
    @precondition(lambda self: self.kids)
    def delete(self, name: str) -> None:
        """Its calls end with it, for good."""
        if name in self.kids:
            self.do(self._ask, None, "drop", name)
            self._look()
            self._gone(self.kids.pop(name, ""))
            self.sometimes.hit("deleted")
            self._durable()

    def _gone(self, slot: str) -> None:
        for made in [m for m, owed in self.owed.items() if owed.slot == slot]:
            self.past[made] = self.owed.pop(made)

    # ---- rules: time and fate

    @rule()
    def keep(self) -> None:
        """What is owed now is owed for good."""
        self._durable()

    @rule(seconds=st.sampled_from([0.3, 1, 5, 30]))
    def advance(self, seconds: float) -> None:
        self._pass(seconds)
        self._settle()

    @rule(seconds=st.sampled_from([-500.0, -3.0, 2.0, 100.0, 5000.0]))
    def jump(self, seconds: float) -> None:
        """The wall clock is set; the kernel notices within seconds."""

        async def move() -> None:
            self.test.clock.jump(seconds)

        self.do(move)
        self.back |= seconds < 0
        self.sometimes.hit("jumped back" if seconds < 0 else "jumped forward")
        self._look()
        self._pass(LATE_S)
        self._settle()

    @rule(hours=st.sampled_from([0.1, 8.0, 960.0]))
    def suspend(self, hours: float) -> None:
        """The machine sleeps: the wall goes on, and nothing in the process does."""

        async def sleep() -> None:
            self.test.clock.jump(hours * 3600)

        self.do(sleep)
        self.sometimes.hit("suspended")
        self._pass(LATE_S)
        self._settle()

    @rule(busy=st.sampled_from([0, 0, 4.0]), away=st.sampled_from([0, 0.5, 200.0]))
    def crash(self, busy: float, away: float) -> None:
        """Die, with what was just called not booked perhaps, be away, live again."""
        self._pass(busy)
        self._look(dying=True)
        self._live_again(away)

    @rule(commits=st.integers(0, 12), seconds=st.sampled_from([1.0, 30.0, 100.0]))
    def die(self, commits: int, seconds: float) -> None:
        """Die between two commits of whatever is due."""
        self._settle()
        self.test.faults.die_after(commits)
        self._pass(seconds)
        self.sometimes.hit("died between commits", self.test.faults.dead)
        self._look(dying=True)
        self._live_again(0)

    def _live_again(self, away: float) -> None:
        async def die() -> None:
            await self.test.crash()
            Sleeper.running.clear()
            self.test.clock.jump(away)
            await self.test.reopen()
            await self._ask(None, "listed", False)

        for owed in [*self.owed.values(), *self.past.values()]:
            owed.loose = True  # a call that was not booked is made again
        self._step()
        for walk in self.walks.values():
            walk.lives += 1
        self.do(die)
        self.sometimes.hit("crashed")
        self.do(trio.testing.wait_all_tasks_blocked)
        live = self._tree().is_live_slot
        self.kids = {name: slot for name, slot in self.kids.items() if live(slot)}
        for made, owed in list(self.past.items()):
            if made in self._rows():
                self.owed[made] = self.past.pop(made)
                if owed.slot != self.root and owed.slot not in self.kids.values():
                    sql = "SELECT name FROM node WHERE slot = ? AND state = 'live'"
                    ((name,),) = self._tree().db.execute(sql, (owed.slot,))
                    self.kids[name] = owed.slot
        for made in [m for m, owed in self.owed.items() if not owed.durable]:
            if made not in self._rows() and not self.owed[made].fires:
                self.past[made] = self.owed.pop(made)  # nobody was told that it is owed
        assert live(self.root)
        self._settle()

    # ---- what must hold

    def _rows(self) -> dict[str, JobRow]:
        found = self._tree().jobs.find("kind IN ('call', 'queue')", ())
        return {str(row.id): row for row in found}

    def _settle(self) -> None:
        self.do(trio.testing.wait_all_tasks_blocked)
        self._check()

    def _look(self, *, dying: bool = False, changing: str | None = None) -> None:
        """Take what fired since the last look off the list."""
        fires, self.seen = Sleeper.fires[self.seen :], len(Sleeper.fires)
        for fire in fires:
            owed = self.owed.get(fire.id)
            if owed is None:  # not booked before the crash: again
                assert fire.id in self.past, f"nobody owes it: {fire}"
                owed = self.owed[fire.id] = self.past.pop(fire.id)
                assert owed.loose, f"once more: {fire}"
            assert fire.slot == owed.slot, f"in another agent: {fire}"
            assert not owed.paused or fire.id == changing, f"paused: {fire}"
            again = fire.attempt > 1 and self.back  # a back-off counts from now
            assert fire.now >= fire.at or owed.asked or again, f"early: {fire}"
            self.sometimes.hit("late", fire.now - fire.at > 1000)
            self.sometimes.hit("in a facet", owed.slot != self.root)
            self.sometimes.hit("tried again", fire.attempt > 1)
            self.sometimes.hit("hung", owed.how == "hang")
            assert fire.attempt <= (2 if not owed.loose else LIMITS.attempts + 1)
            self._compare(owed, fire)
            owed.last, owed.fires = fire, owed.fires + 1
            if owed.how == "destroy" and not dying:
                self.sometimes.hit("destroyed itself")
                names = {slot: name for name, slot in self.kids.items()}
                self.kids.pop(names.get(owed.slot, ""), None)

    def _compare(self, owed: Owed, fire: Fire) -> None:
        """Hold a call of what recurs against the one before it."""
        last = owed.last
        if owed.step_ms is None or last is None:
            return
        self.sometimes.hit("ticked")
        if fire.at == last.at:
            assert owed.loose or fire.attempt > last.attempt, f"a tick twice: {fire}"
            return
        assert fire.at > last.at, f"back: {last} {fire}"
        if owed.step_ms:
            assert (fire.at - last.at) % owed.step_ms == 0, f"it drifts: {last} {fire}"
            self.sometimes.hit("missed ticks", fire.at - last.at > owed.step_ms)
        else:
            assert next_fire(CRON, "UTC", fire.at - 1) == fire.at, f"no tick: {fire}"
        if owed.how == "ok" and last.now >= last.at:
            assert fire.at > last.now, f"a burst: {last} {fire}"
        if owed.strict and fire.attempt == 1 and not owed.asked:
            assert fire.now - fire.at <= LIMITS.misfire_grace_s * 1000, f"late: {fire}"
        if fire.now >= fire.at:  # else it was one more, and the tick is still to come
            owed.loose = owed.asked = False

    def _row(self, made: str) -> tuple[str | None, int]:
        """Return how a fiber stands in its row, and its last stash while it runs."""
        sql = (
            "SELECT f.status, coalesce(j.snapshot, 0) FROM fiber f LEFT JOIN job j"
            " ON j.owner = f.owner AND j.kind = 'fiber' AND j.what = f.id"
            " WHERE f.owner = ? AND f.id = ?"
        )
        rows = self._tree().db.execute(sql, (self.walks[made].slot, made))
        return (rows[0][0], int(rows[0][1])) if rows else (None, 0)

    def _step(self) -> None:
        """Take the steps of fibers since the last look."""
        steps, self.stepped = Sleeper.walked[self.stepped :], len(Sleeper.walked)
        for step in steps:
            walk = self.walks[step.id]
            assert step.slot == walk.slot, f"in another agent: {step}"
            if step.attempt is None:
                walk.when[step.value] = walk.lives
                assert step.value == walk.said + 1, f"a step twice: {step} {walk}"
            else:
                assert walk.over is None, f"it was over: {step} {walk}"
                assert walk.kept <= step.value <= walk.said, f"{step} {walk}"
                assert 1 < step.attempt <= LIMITS.attempts, f"{step} {walk}"
                self.sometimes.hit("walked on", 0 < step.value < walk.steps)
            walk.said = step.value

    def _walks(self) -> None:
        """Hold the rows of fibers against the model."""
        self._step()
        live = self._tree().is_live_slot
        for made, walk in self.walks.items():
            status, stashed = self._row(made)
            if not live(walk.slot):
                assert status is None, f"outlived its agent: {walk}"
                continue
            assert status is not None or not walk.durable, f"lost: {made} {walk}"
            if status == "running":
                here = walk.when[walk.said] == walk.lives  # it was said in this life
                assert stashed == walk.said or (not here and stashed < walk.said), (
                    f"not its last step: {stashed} {walk}"
                )
            assert walk.over is None or status == walk.over, f"{status}: {walk}"
            if status == "completed":
                assert walk.said == walk.steps, f"not at its end: {walk}"
                self.sometimes.hit("walked to its end")
            elif status == "error":
                vain = walk.lives - walk.when[walk.kept]  # lives without a step
                cut = vain >= LIMITS.attempts
                assert walk.how == "raise" or cut, f"it had hope: {walk}"
                self.sometimes.hit("in vain")

    def _check(self) -> None:
        """Hold the rows of the tree against the model."""
        self._look()
        self._walks()
        tree, rows, now = self._tree(), self._rows(), self.test.clock.now_ms()
        for made, owed in list(self.owed.items()):
            row = rows.get(made)
            if row is None:
                ended = owed.slot not in (self.root, *self.kids.values())
                booked = owed.step_ms is None and owed.fires and owed.how == "ok"
                assert ended or booked, f"lost: {made} {owed}"
                self.past[made] = self.owed.pop(made)
                self.sometimes.hit("fired once", not ended)
                continue
            assert row.owner == owed.slot
            assert bool(row.paused) == owed.paused
            self.sometimes.hit("skipped", "skipped" in (row.error or ""))
            if row.dead:
                assert row.error, row
                assert owed.step_ms is None or ENDED in row.error, row
                assert owed.fires or owed.loose, f"dead, and never called: {row}"
                self.sometimes.hit("rests dead")
        assert rows.keys() == self.owed.keys(), rows.keys() ^ self.owed.keys()
        free = [r for r in rows.values() if r.held is None and not r.dead | r.paused]
        free.sort(key=lambda row: row.id)
        slot = min((r.due_at for r in free), default=None)
        others = tree.db.execute(
            "SELECT min(due_at) FROM job WHERE kind NOT IN ('call', 'queue')"
            " AND held IS NULL AND dead = 0 AND paused = 0"
        )[0][0]
        both = [at for at in (slot, others) if at is not None]
        assert tree.jobs.slot() == min(both, default=None), "the alarm is the earliest"
        busy = {(r.owner, r.kind) for r in rows.values() if r.held is not None}
        busy |= set(Sleeper.running.values())  # a call goes on though its row is gone
        heads = {(r.owner, r.kind): r for r in reversed(free) if r.kind == "queue"}
        for row in free:
            if row.kind == "queue":
                row = heads[row.owner, row.kind]  # they wait for it
            late = row.due_at <= now and (row.owner, row.kind) not in busy
            assert not late, f"overdue: {row}, now {now}"
        self._lists(rows)

    def _lists(self, rows: dict[str, JobRow]) -> None:
        for name in (None, *self.kids):
            slot = self.root if name is None else self.kids[name]
            mine = {i for i, row in rows.items() if row.owner == slot}
            assert set(self.do(self._ask, name, "listed", False)) == mine
        calls = {i for i, row in rows.items() if row.kind == "call"}
        assert set(self.do(self._ask, None, "listed", True)) == calls

    def _longest_s(self) -> float:
        """Seconds to what is due last: a clock that was put back makes it far."""
        sql = (
            "SELECT max(due_at) FROM job WHERE every IS NULL AND dead = 0"
            " AND paused = 0 AND kind IN ('call', 'queue', 'fiber')"
        )
        last = self._tree().db.execute(sql)[0][0]
        return max(0, (last or 0) - self.test.clock.now_ms()) / 1000

    def teardown(self) -> None:
        """In the end all that was owed once has been called."""
        try:
            if self._end is None:
                for _ in range(9 + len(self.owed)):  # one that hangs takes its time
                    self._pass(self._longest_s() + 100)
                    self._settle()
                left = [
                    row
                    for row in self._rows().values()
                    if row.every is None and not row.dead and not row.paused
                ]
                assert not left, f"never called: {left}"
                walking = [m for m in self.walks if self._row(m)[0] == "running"]
                assert not walking, f"never over: {walking}"
        finally:
            if self._end is None:

                async def close() -> None:
                    self.over.set()

                self.do(close)
            super().teardown()
