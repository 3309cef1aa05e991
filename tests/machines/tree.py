"""The tree of agents is a dictionary from path to what its storage says: whatever is
stopped, evicted, broken or killed comes back as it was, and what is deleted never does.

Rules ask agents at every depth, under nasty names, through all their ancestors. The
process may die between two rules or in any commit; then what was asked for has happened
wholly or not at all. After every rule rows, files and nodes in memory must agree with
the model: one live node a slot, none of a deleted one, siblings never mixed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import outcome
import trio
import trio.testing
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from culet.kernel.calls import OutsideTarget, Stub
from culet.kernel.core.limits import Limits
from culet.kernel.core.path import check_name
from culet.kernel.errors import (
    ChildDidNotStop,
    Deleted,
    FacetAborted,
    FacetBroken,
    UsageError,
)
from culet.kernel.node import State
from culet.kernel.ports import TreeKey
from culet.kernel.testing import open_test_kernel
from culet.kernel.tree import Tree
from machines.grove import (
    BAD,
    CLASSES,
    GOOD,
    HOPS_MAX,
    Bough,
    Found,
    Grove,
    Path,
    check_ended,
    check_nodes,
    found,
)
from machines.guest import TrioMachine
from machines.invariants import broken
from machines.sometimes import Sometimes

LIMITS: Final = Limits(restart_attempts=10_000)  # agents break often here
KEY: Final = TreeKey("Bough", "k")
PATIENCE: Final = 120  # half seconds that an answer may take
DIED: Final = "the process died"
ENDED = (FacetAborted, FacetBroken, Deleted)
unit = st.floats(0, 1, exclude_max=True, allow_nan=False)
which = st.integers(0, 1)  # of the names of this history
made = st.sampled_from(["Bough", "Bough", "Bough", "Sour", "Brittle"])


@dataclass
class Record:
    """One agent of the model. Its slot is learnt when it is first seen."""

    slot: str | None = None
    content: dict[str, int] = field(default_factory=dict)


Model = dict[Path, Record]
Change = Callable[[Model], None]


def below(model: Model, path: Path) -> list[Path]:
    """Return the paths at and below one."""
    return [p for p in model if p[: len(path)] == path]


class Steps(trio.abc.Instrument):
    """Knows at which commit the step of a task has begun."""

    def __init__(self, machine: TreeMachine) -> None:
        self.machine, self.commits = machine, 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """Remember where it begins."""
        self.commits = self.machine.test.faults.commits


class GroveMachine(TrioMachine):
    """One kernel, one root, its model; lives that end and begin."""

    sometimes: ClassVar[Sometimes]

    def __init__(self) -> None:
        super().__init__()
        self.grove = Bough.grove = Grove(self.mark)
        self.model: Model = {(): Record()}
        self.seen: set[str] = set()
        self.over = trio.Event()
        self._asking: trio.CancelScope | None = None
        self.do(self._open)

    # ---- lives

    async def _open(self) -> None:
        opened = trio.Event()

        async def keep() -> None:
            with suppress(ChildDidNotStop):
                async with open_test_kernel(
                    roots=[Bough], facets=list(CLASSES.values()), limits=LIMITS
                ) as self.test:
                    opened.set()
                    await self.over.wait()

        self.nursery.start_soon(keep)
        await opened.wait()
        self.steps = Steps(self)  # type: ignore[arg-type]
        trio.lowlevel.add_instrument(self.steps)
        self.grove.watch(self.test)
        await self._tree()

    async def _tree(self) -> Tree:
        """Return the open tree; its root is made if it is not there."""
        await self._root()
        return self.test.kernel.trees[KEY]

    async def _root(self) -> Any:
        while True:
            with suppress(Deleted):  # for as long as it takes to end
                return await self.test.kernel.get_agent(Bough, KEY.name)
            await trio.sleep(0.5)

    @property
    def tree(self) -> Tree | None:
        """The tree, if it is open."""
        return self.test.kernel.trees.get(KEY)

    def _on_death(self) -> None:
        between = self.test.faults.commits > self.steps.commits
        self.mark("died between two commits of one step", between)
        if self._asking is not None:
            self._asking.cancel()

    def mark(self, mark: str, when: bool = True) -> None:
        """Hit a mark of this machine, if it has it."""
        if mark in self.sometimes.marks:
            self.sometimes.hit(mark, when)

    async def _revive(self, *, anyway: bool = False) -> None:
        """Begin the next life when this one is dead."""
        if not (anyway or self.test.faults.dead):
            return
        self._silence()  # a process that is dead has no code
        await self.test.crash()
        await self.test.reopen()
        self.grove.watch(self.test)
        await trio.testing.wait_all_tasks_blocked()

    def _silence(self) -> None:
        self.grove.release.set()
        self.grove.release = trio.Event()

    # ---- asking

    def do(self, fn: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        """Run one coroutine function to its end; all must be looked at after it."""
        self.sound = False
        return super().do(fn, *args)

    async def call(self, path: Path, verb: str, *args: Any) -> Any:
        """Ask the agent at a path for something, through all its ancestors."""
        root = await self._root()
        return await root.do([list(hop) for hop in path], verb, list(args))

    def ask(self, fn: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        """Run a client to its end while time passes; `DIED` if the process has."""
        return self.do(self._ask, fn, args)

    async def _ask(
        self, fn: Callable[..., Awaitable[Any]], args: tuple[Any, ...]
    ) -> Any:
        out: list[outcome.Outcome[Any]] = []
        over = trio.Event()

        async def job() -> None:
            with trio.CancelScope() as self._asking:
                out.append(await outcome.acapture(fn, *args))
            self._asking = None
            over.set()

        self.nursery.start_soon(job)
        for _ in range(PATIENCE):
            await trio.testing.wait_all_tasks_blocked()
            if over.is_set():
                break
            self.clock.jump(0.5)
        else:
            msg = f"no answer to {args}"
            raise AssertionError(msg)
        if self.test.faults.dead:
            await self._revive()
            return DIED
        return out[0].unwrap()

    def halted(self, path: Path) -> bool:
        """Whether an agent on the way has been stopped and nobody got it since."""
        tree = self.tree
        if tree is None:
            return False
        ways = [path[:n] for n in range(len(path) + 1)]
        slots = [self.model[p].slot for p in ways if p in self.model]
        return any(slot in tree.aborted for slot in slots)

    def step(
        self, path: Path, verb: str, *args: Any, change: Change | None = None
    ) -> Any:
        """Ask, and change the model when it has happened; None: it was not let through.

        Where the process died meanwhile it has happened wholly or not at all.
        """
        halted = self.halted(path)
        try:
            got = self.ask(self.call, path, verb, *args)
        except (FacetAborted, FacetBroken) as error:
            assert halted or self.halted(path), f"{path} {verb}: {error!r}"
            self.mark("was stopped")
            return None
        if got == DIED:
            self.either(change)
            return None
        assert (got == "absent") == (path not in self.model), (path, got)
        if change is not None and got != "absent":
            self.apply(change)
        return got

    # ---- the model

    def apply(self, change: Change) -> None:
        """Change the model; what leaves it is gone for good."""
        before = {r.slot for r in self.model.values()}
        change(self.model)
        now = {r.slot for r in self.model.values()}
        self.grove.gone |= {slot for slot in before - now if slot is not None}

    def either(self, change: Change | None) -> None:
        """The process died: the change has happened, or not."""
        self.mark("died within a rule")
        seen = self.look()
        if self.fits(self.model, seen):
            self.mark("had not happened", change is not None)
            return
        after = deepcopy(self.model)
        if change is not None:
            change(after)
        assert self.fits(after, seen), f"neither {self.model} nor {after}: {seen}"
        self.mark("had happened")
        self.apply(lambda model: (model.clear(), model.update(after))[0])

    def fits(self, model: Model, seen: Found) -> bool:
        """Whether rows and files say what the model says."""
        if set(model) != set(seen):
            return False
        for path, record in model.items():
            slot, content = seen[path]
            new = record.slot is None and slot not in self.seen
            if content != record.content or not (new or record.slot == slot):
                return False
        return True

    def look(self) -> Found:
        """Return what rows and files say, in a life that lasts so long."""
        return self.do(self._look)  # type: ignore[no-any-return]

    async def _look(self) -> Found:
        await self._revive()
        for _ in range(3):
            seen = await self._ask(self._seen, ())
            if seen != DIED:
                return seen  # type: ignore[no-any-return]
            self.test.faults.heal()
        raise AssertionError("it does not come back")

    async def _seen(self) -> Found:
        tree = await self._tree()
        await trio.testing.wait_all_tasks_blocked()
        return found(tree, self.grove)

    # ---- what must hold

    @invariant()
    def all_agree(self) -> None:
        """Rows, files, nodes and the model."""
        if self._end is not None:
            return
        seen = self.look()
        assert self.fits(self.model, seen), f"{self.model} but there is {seen}"
        for path, record in self.model.items():
            record.slot = seen[path][0]
        slots = [slot for slot, _ in seen.values()]
        assert not self.grove.gone & set(slots), "one that was deleted is back"
        self.seen |= set(slots)
        tree = self.tree
        assert tree is not None
        wrong = broken(tree)
        assert not wrong, wrong
        check_nodes(tree, self.grove)
        assert not self.grove.wrong, "\n".join(self.grove.wrong)
        self.sound = True

    def tidy(self) -> None:
        """After the wipes: what has no live row has neither a row nor a file."""
        tree = self.tree
        assert tree is not None
        rows = {slot for (slot,) in tree.db.execute("SELECT slot FROM node")}
        live = {record.slot for record in self.model.values()}
        assert rows == live, f"rows {rows}, live {live}"
        assert tree.store.slots() <= {*rows, "tree"}, "a file without a row"

    def teardown(self) -> None:
        """Come to rest, look once more, close."""
        try:
            if self._end is None and self.sound:
                self.test.faults.heal()
                self._silence()
                self.do(self.test.advance, 20)
                self.all_agree()
                self.tidy()
        finally:
            if self._end is None:
                self.do(self._close)
            super().teardown()

    async def _close(self) -> None:
        self._silence()
        self.over.set()


class TreeMachine(GroveMachine):
    """See the module's text."""

    sometimes: ClassVar = Sometimes(
        "made", "found again", "too deep", "put", "read", "absent", "listed", "deleted",
        "deleted several", "made again", "destroyed", "destroyed the root",
        "destroyed in its schedule", "aborted", "stopped several in order",
        "would not stop", "got beside its remnant", "a fenced one was refused",
        "was stopped", "evicted", "evicted the root", "woken by a call",
        "woken by a schedule", "woken by a fiber", "broke alone", "broke all",
        "a parent heard of it", "sour", "refused", "run", "a deleted run stays told",
        "straggled", "deleted beside a call", "called, then deleted",
        "deleted, then got", "schedule deleted as it fired", "crashed", "crashed twice",
        "died within a rule", "had happened", "had not happened",
        "died between two commits of one step",
    )  # fmt: skip

    @initialize(names=st.lists(st.sampled_from(GOOD), min_size=2, max_size=2))
    def choose(self, names: list[str]) -> None:
        """A history has few names, so that they meet."""
        self.names = names
        self.made: set[Path] = set()

    def pick(self, at: float, deepest: int = HOPS_MAX) -> Path:
        """Return the path of one agent that there is."""
        paths = sorted(p for p in self.model if len(p) <= deepest)
        return paths[int(at * len(paths))]

    def child(self, at: float) -> Path | None:
        """Return the path of one facet that there is."""
        paths = sorted(p for p in self.model if p)
        return paths[int(at * len(paths))] if paths else None

    # ---- making and looking

    @rule(at=unit, cls=made, which=which)
    def get(self, at: float, cls: str, which: int) -> None:
        """One more level down at most is too deep: nothing is written."""
        path, name = self.pick(at), self.names[which]
        if len(path) == HOPS_MAX:
            self.too_deep(path, name)
        else:
            self.get_child(path, cls, name)

    def too_deep(self, path: Path, name: str) -> None:
        """One level more is refused, and nothing is written: the invariants look."""
        with suppress(UsageError):
            got = self.step(path, "get", "Bough", name)
            assert got is None, "deeper than allowed"
            return
        self.sometimes.hit("too deep")

    def get_child(self, path: Path, cls: str, name: str) -> None:
        """Get a facet that may be."""
        child = (*path, (cls, name))
        known = child in self.model
        remnants = [] if self.tree is None else [n.slot for n in self.tree.remnants]
        beside = known and self.model[child].slot in remnants

        def change(model: Model) -> None:
            model.setdefault(child, Record())

        if self.step(path, "get", cls, name, change=change) is not None:
            self.sometimes.hit("found again" if known else "made")
            self.sometimes.hit("made again", not known and child in self.made)
            self.sometimes.hit("got beside its remnant", beside)
            self.made.add(child)

    @rule(which=which, end=st.sampled_from(["abort", "delete", "neither"]))
    def grow(self, which: int, end: str) -> None:
        """A branch as deep as allowed, a twig at each level; perhaps it ends at once."""
        path: Path = ()
        while len(path) < HOPS_MAX:
            for cls in ("Sour", "Bough"):
                self.get_child(path, cls, self.names[which])
            path = (*path, ("Bough", self.names[which]))
            if path not in self.model:
                return
        self.too_deep(path, self.names[which])
        if end != "neither":
            self.end(path[:1], end)

    @rule(at=unit, which=which)
    def sour(self, at: float, which: int) -> None:
        """A first start that fails leaves nothing."""
        path = self.pick(at, HOPS_MAX - 1)
        child = (*path, ("Sour", self.names[which]))
        self.grove.sour = True
        try:
            got = self.ask(self.call, path, "get", *child[-1])
            assert got == DIED or child in self.model
            if got == DIED:
                self.grove.sour = False
                self.either(lambda model: model.setdefault(child, Record()) and None)
        except (FacetAborted, FacetBroken):
            self.sometimes.hit("sour")
        finally:
            self.grove.sour = False

    @rule(at=unit, key=st.sampled_from("ab"), value=st.integers(0, 99))
    def put(self, at: float, key: str, value: int) -> None:
        """Write to the agent's own file."""
        path = self.pick(at)

        def change(model: Model) -> None:
            model[path].content[key] = value

        if self.step(path, "put", key, value, change=change) is not None:
            self.sometimes.hit("put")

    @rule(at=unit, cls=made, which=which)
    def read(self, at: float, cls: str, which: int) -> None:
        """Looking makes nothing and finds what there is."""
        path = self.pick(at)
        if self.step(path, "list") is not None:
            got = self.step(path, "list")
            mine = [list(p[-1]) for p in self.model if p and p[:-1] == path]
            assert got is None or sorted(got) == sorted(mine), (got, mine)
            self.sometimes.hit("listed", bool(mine))
        got = self.step(path, "read")
        if got is not None:
            assert got == self.model[path].content
            self.sometimes.hit("read", bool(got))
        child = (*path, (cls, self.names[which]))
        got = self.step(child, "read") if len(child) <= HOPS_MAX else None
        if got == "absent":
            self.sometimes.hit("absent")
            assert self.step(path, "has", cls, child[-1][1]) in (None, False)
        elif got is not None:
            assert got == self.model[child].content

    @rule(at=unit, name=st.sampled_from(BAD))
    def refuse(self, at: float, name: str) -> None:
        """A name that no agent may have makes nothing and says why."""
        with suppress(UsageError):
            check_name(name)
            raise AssertionError(name)
        with suppress(UsageError):
            assert self.step(self.pick(at), "get", "Bough", name) is None
            return
        self.sometimes.hit("refused")

    # ---- ending

    def drop(self, path: Path) -> Change:
        """Return the change that a delete makes."""

        def change(model: Model) -> None:
            for gone in below(model, path):
                del model[gone]
            if not path:
                model[()] = Record()

        return change

    @rule(at=unit, verb=st.sampled_from(["abort", "delete"]))
    def stop(self, at: float, verb: str) -> None:
        """Stopping is not forgetting; deleting is, of all that is below, for good."""
        path = self.child(at)
        if path is not None:
            self.end(path, verb)

    def end(self, path: Path, verb: str) -> None:
        """Abort or delete a facet. A receipt is looked at where it is given."""
        slots = {self.model[p].slot for p in below(self.model, path)}
        change = self.drop(path) if verb == "delete" else None
        if self.step(path[:-1], verb, *path[-1], change=change) is None:
            return
        self.sometimes.hit("deleted" if change else "aborted")
        self.sometimes.hit("deleted several", bool(change) and len(slots) > 1)
        if change and self.tree is not None:
            check_ended(self.tree, self.grove, slots)

    @rule(at=unit, root=st.integers(0, 9))
    def destroy(self, at: float, root: int) -> None:
        """An agent deletes itself: it never hears of it."""
        path = () if root == 0 else self.child(at)
        if path is None:
            return
        self._destroyed(path, self.ask, self.call, path, "destroy")
        if path not in self.model or not path:
            self.sometimes.hit("destroyed" if path else "destroyed the root")

    def _destroyed(self, path: Path, ask: Callable[..., Any], *args: Any) -> None:
        halted = self.halted(path)
        try:
            got = ask(*args)
        except Deleted:
            self.apply(self.drop(path))
        except (FacetAborted, FacetBroken):
            assert halted
        else:
            assert got == DIED, got
            self.either(self.drop(path))

    @rule(at=unit)
    def bye(self, at: float) -> None:
        """An agent deletes itself in its own schedule."""
        path = self.child(at)
        if path is None:
            return

        async def bye() -> None:
            await self.call(path, "later", 0.0, "bye")
            await trio.sleep(8)
            raise Deleted("so it should be")

        async def rest() -> None:
            await self.test.advance(8)

        def ask() -> Any:
            got = self.ask(bye)
            if got == DIED:  # what was durable of it goes on
                self.do(rest)
            return got

        self._destroyed(path, ask)
        self.sometimes.hit("destroyed in its schedule", path not in self.model)

    @rule(at=unit, then=st.sampled_from(["nothing", "abort", "delete", "destroy"]))
    def deafen(self, at: float, then: str) -> None:
        """Code that will not stop; perhaps it should at once, and is got again."""
        path = self.child(at)
        if path is None or self.step(path, "deafen") != "deaf" or then == "nothing":
            return
        if then == "destroy":
            self._destroyed(path, self.ask, self.call, path, "destroy")
        else:
            self.end(path, then)
        if path[:-1] in self.model:
            self.get_child(path[:-1], *path[-1])

    @rule()
    @precondition(lambda self: self.grove.deaf)
    def hear(self) -> None:
        """It wakes up, and finds out whether it may still act."""
        self._silence()
        self.do(self.test.advance, 0)

    @rule(at=unit)
    def evict(self, at: float) -> None:
        """Drop what does nothing from memory; of the root the whole tree."""
        path = self.pick(at)

        async def evict() -> None:
            await self.test.evict([(KEY.class_name, KEY.name), *path])
            self.sometimes.hit("evicted" if path else "evicted the root")

        with suppress(UsageError):
            if self.ask(evict) == DIED:
                self.either(None)

    @rule(at=unit)
    def crack(self, at: float) -> None:
        """A task of an agent raises: it breaks alone, or all do, as its class says."""
        brittle = sorted(p for p in self.model if p and p[-1][0] == "Brittle")
        path = brittle[0] if brittle and at < 0.3 else self.pick(at)
        tree = self.tree
        before = {} if tree is None else dict(tree.nodes)
        slot = self.model[path].slot
        if self.step(path, "crack") != "cracked" or tree is not self.tree:
            return
        self.do(self.test.advance, 6)
        assert tree is not None
        if self.test.faults.dead:
            return
        spread = bool(path) and path[-1][0] == "Brittle"
        top = () if spread else path
        hit = {self.model[p].slot for p in below(self.model, top)}
        for other, node in before.items():
            if other not in hit and node.state is State.LIVE:
                assert tree.nodes.get(other) in (node, None), "others broke with it"
        node = before.get(slot or "")
        assert node is None or node.state >= State.STOPPING
        self.sometimes.hit("broke all" if spread else "broke alone")

    # ---- what is owed, and what comes late

    @rule(at=unit, fiber=st.booleans())
    def owe(self, at: float, fiber: bool) -> None:
        """A schedule or a fiber: they wake their agent."""
        path = self.pick(at)
        if fiber:
            self.step(path, "fiber")
        else:
            self.step(path, "later", 1.0, "fire")

    @rule(at=unit, which=which)
    def run(self, at: float, which: int) -> None:
        """A run makes its facet, once: a run whose facet is deleted is told as it ended."""
        path = self.pick(at, HOPS_MAX - 1)
        name = self.names[which]
        tree, slot = self.tree, self.model[path].slot
        sql = "SELECT status FROM run WHERE owner = ? AND id = ?"
        known = [] if tree is None else tree.db.execute(sql, (slot, name))
        child = (*path, ("Worker", name))

        def change(model: Model) -> None:
            if not known:
                model.setdefault(child, Record())

        if self.step(path, "run", name, change=change) is not None:
            self.sometimes.hit("run")
            late = bool(known) and child not in self.model
            self.sometimes.hit("a deleted run stays told", late)

    @rule(at=unit)
    @precondition(lambda self: self.grove.gone)
    def straggle(self, at: float) -> None:
        """A stub of a deleted slot is of no use for good."""
        gone = sorted(self.grove.gone)
        slot = gone[int(at * len(gone))]
        kernel = self.test.kernel
        kind = kernel.classes.of(Bough)
        stub: Any = Stub(OutsideTarget(kernel, KEY, slot, kind))
        try:
            got = self.ask(stub.do, [], "put", ["late", 1])
        except Deleted:
            self.sometimes.hit("straggled")
        else:
            assert got == DIED, got
            self.either(None)

    @rule(at=unit, delay=st.sampled_from([0.0, 0.5, 1.0]), again=st.booleans())
    def delete_beside(self, at: float, delay: float, again: bool) -> None:
        """A delete while a call is inside, a schedule fires, another gets it anew."""
        path = self.child(at)
        if path is None or self.step(path, "later", delay, "fire") in (None, "absent"):
            return
        ends: list[str] = []

        async def inside() -> None:
            try:
                got = await self.call(path, "hold", delay, "a", 1)
            except ENDED:
                self.sometimes.hit("deleted beside a call")
            else:
                ends.append(got)

        async def get() -> None:
            with suppress(Deleted):
                await self.call(path[:-1], "get", *path[-1])

        async def meet() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(inside)
                await trio.sleep(0.5)
                nursery.start_soon(self.call, path[:-1], "delete", *path[-1])
                if again:
                    nursery.start_soon(get)

        if self._both(meet, path, again):
            self.sometimes.hit("called, then deleted", "put" in ends)
            self.sometimes.hit("schedule deleted as it fired", delay == 0.5)

    def _both(self, meet: Callable[[], Awaitable[None]], path: Path, got: bool) -> bool:
        """Let two things meet. A get may come before the delete or after it."""
        halted = self.halted(path[:-1])
        try:
            answer = self.ask(meet)
        except BaseExceptionGroup as group:
            assert halted, group
            assert group.split(ENDED)[1] is None, group
            return False
        seen = self.look()
        record = self.model[path]
        if answer == DIED or got:
            was = seen.get(path)
            if was is not None and was[0] == record.slot:
                assert answer == DIED, "it is not deleted"
                content = was[1]  # the call may have been let in
                assert content in (record.content, record.content | {"a": 1})
                record.content = content
                return False
        self.apply(self.drop(path))
        if path in seen:
            assert got, "nobody has got it"
            self.model[path] = Record()
            self.sometimes.hit("deleted, then got", answer != DIED)
        return answer != DIED

    # ---- time and death

    @rule(seconds=st.sampled_from([0.01, 1.0, 5.0]))
    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.do(self.test.advance, seconds)

    @rule(twice=st.booleans())
    def crash(self, twice: bool) -> None:
        """Kill the process; a recovery that is cut short is no other one."""

        async def die() -> None:
            await self._revive(anyway=True)

        self.do(die)
        first = self.look()
        if twice:
            self.do(die)
            assert self.look() == first
        self.sometimes.hit("crashed twice" if twice else "crashed")

    @rule(commits=st.integers(0, 6))
    def die_in(self, commits: int) -> None:
        """Let the process die so many commits from now."""
        self.test.faults.on_death = self._on_death
        self.test.faults.die_after(commits)
