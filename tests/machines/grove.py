"""The agents that the tree machines drive, and what is noted of them meanwhile.

Any agent of the tree is reached by a walk from the root that looks up each hop, so a
call goes through all of its ancestors and makes nothing. What agents notice is noted in
the grove, not raised: an exception in agent code ends at the agent's border.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, ClassVar

import msgspec
import trio

from culet.kernel import (
    Agent,
    Chunk,
    Connection,
    FiberRecovery,
    FiberResolution,
    Request,
    Response,
    Schedule,
    Turn,
)
from culet.kernel.agent import ChildFailure, ChildRef
from culet.kernel.errors import ChildDidNotStop, CuletError
from culet.kernel.node import Node, State
from culet.kernel.stops import AbortReceipt
from culet.kernel.testing import Harness
from culet.kernel.testing_watch import late
from culet.kernel.tree import Tree

Path = tuple[tuple[str, str], ...]  # (class, name) of each hop below the root
Found = dict[Path, tuple[str, dict[str, int]]]  # what the files say: slot, content
GOOD = (
    "a", "sub", "%2f", "a/b", "/", "\\", "...", " ", "é", "e\u0301", "\ufeff", "'; --",
    "__proto__", "tree", "tree.db", "%", "x" * 256,
)  # fmt: skip
BAD = ("", ".", "..", "a\0b", "\ud800", "x" * 257)
HOPS_MAX = 3  # below the root
_KV = "CREATE TABLE IF NOT EXISTS kv (k TEXT PRIMARY KEY, v INTEGER) STRICT"
_NOTE = "CREATE TABLE IF NOT EXISTS note (slot TEXT, what TEXT) STRICT"
_HAS = "SELECT 1 FROM main.sqlite_master WHERE name = ?"


class Grove:
    """What was seen so far, over all lives."""

    def __init__(self, hit: Callable[..., None]) -> None:
        self.hit = hit
        self.harness: Harness
        self.wrong: list[str] = []
        self.gone: set[str] = set()  # slots that were deleted
        self.nodes: list[Node] = []  # that began, until they are gone
        self.stops: list[str] = []  # slots, in the order in which they stopped
        self.sour = False  # whether starts of `Sour` fail
        self.release = trio.Event()  # of code that will not stop
        self.deaf: set[Node] = set()

    def need(self, good: bool, text: str) -> None:
        """Note what is wrong."""
        if not good:
            self.wrong.append(text)

    def watch(self, harness: Harness) -> None:
        """Look at a life that begins."""
        self.harness = harness
        harness.faults.on_write = self._wrote
        harness.kernel.subscribe("stop", self._stopped)

    def _stopped(self, _channel: str, _tree: Any, slot: str, _why: Any) -> None:
        self.stops.append(slot)

    def _wrote(self, sql: str) -> None:
        why = late(self.harness, cleaning=True)
        self.need(why is None, f"written too late: {why} ({sql})")

    def began(self, node: Node) -> None:
        """A life of an agent begins: it is the only one of its slot."""
        for other in self.nodes:
            same = other.slot == node.slot and other.tree is node.tree
            self.need(
                not same or other.state >= State.STOPPING, f"two lives of {node!r}"
            )
        self.need(node.slot not in self.gone, f"{node!r} began and was deleted")
        self.nodes.append(node)

    def forget_gone(self) -> None:
        """Drop what has ended, but for code that does not end."""
        self.nodes = [n for n in self.nodes if n.state is not State.GONE]


class Bough(Agent):
    """Does what it is told, or passes it on."""

    grove: ClassVar[Grove]
    ready = False
    fresh = False

    async def on_start(self) -> None:
        self.grove.began(self._node)
        await trio.lowlevel.checkpoint()
        await self._grown()
        self.ready = self.fresh = True

    async def _grown(self) -> None:
        """Say what may go wrong in a start."""

    def _entered(self, how: str) -> None:
        self.grove.need(self.ready, f"{self._node!r} entered before it had started")
        self.grove.hit(f"woken by a {how}", self.fresh and how != "turn")
        self.fresh = False

    async def do(self, path: list[list[str]], verb: str, args: list[Any]) -> Any:
        self._entered("call")
        if path:
            (cls, name), *rest = path
            stub = await self.dynamic_agents.lookup(CLASSES[cls], name)
            if stub is None:
                return "absent"
            return await stub.do(rest, verb, args)
        return await getattr(self, f"_{verb}")(*args)

    # ---- visitors

    async def on_before_sub_agent(
        self, request: Request, child: ChildRef
    ) -> Request | Response | None:
        if request.query.get("stop") == str(len(self.parent_path)):
            return Response("not you", 403)
        return await super().on_before_sub_agent(request, child)

    async def on_request(self, request: Request) -> Response:
        self._entered("request")
        return Response.json(await self._see())

    async def on_message(self, connection: Connection, message: str | bytes) -> None:
        self._entered("frame")
        connection.send(msgspec.json.encode(await self._see()).decode())

    # ---- what it can do

    async def _get(self, cls: str, name: str) -> str:
        stub = await self.dynamic_agents.get(CLASSES[cls], name)
        slot: str = object.__getattribute__(stub, "_target").slot
        return slot

    async def _put(self, key: str, value: int) -> str:
        self.sql(_KV)
        self.sql("INSERT OR REPLACE INTO kv VALUES (?, ?)", key, value)
        return "put"

    async def _hold(self, seconds: float, key: str, value: int) -> str:
        await trio.sleep(seconds)
        return await self._put(key, value)

    async def _read(self) -> dict[str, int]:
        if not self.sql("SELECT 1 FROM sqlite_master WHERE name = 'kv'"):
            return {}
        return dict(tuple(row) for row in self.sql("SELECT k, v FROM kv"))

    async def _see(self) -> list[Any]:
        return [self._node.slot, await self._read()]

    async def _list(self) -> list[list[str]]:
        return [[c.class_name, c.name] for c in self.dynamic_agents.list()]

    async def _has(self, cls: str, name: str) -> bool:
        return self.dynamic_agents.has(cls, name)

    async def _delete(self, cls: str, name: str) -> str:
        await self.dynamic_agents.delete(CLASSES[cls], name)
        return "deleted"

    async def _upgrade(self, old: str, name: str, cls: str) -> str:
        grove, tree = self.grove, self._node.tree
        node = tree.nodes.get(tree.slot_of(self._node.slot, old, name) or "")
        below = [] if node is None else order(node)
        deaf = {n for d in grove.deaf for n in d.lineage() if n in below}
        try:
            await self.dynamic_agents.upgrade(CLASSES[old], name, to=CLASSES[cls])
        except ChildDidNotStop:
            grove.need(bool(deaf), f"{below} did not stop for an upgrade")
            raise
        return "upgraded"

    async def _destroy(self) -> None:
        await self.destroy()

    async def _abort(self, cls: str, name: str) -> str:
        """Abort, and look at the receipt: whom it names, in which order."""
        tree, grove = self._node.tree, self.grove
        slot = tree.slot_of(self._node.slot, cls, name)
        plan = order(tree.nodes[slot]) if slot in tree.nodes else []
        # whoever is deaf holds up all above it, also as a remnant of before
        deaf = {n for d in grove.deaf for n in d.lineage() if n in plan}
        names = [n.path_text() for n in plan]
        before = len(grove.stops)
        try:
            receipt = await self.dynamic_agents.abort(CLASSES[cls], name)
        except ChildDidNotStop as error:
            stuck = {n.path_text() for n in deaf}
            grove.need(set(error.paths) == stuck, f"{error} but deaf are {stuck}")
            grove.hit("would not stop")
            return "stuck"
        grove.need(not deaf, f"{deaf} stopped?")
        self._check_receipt(receipt, names)
        wanted = [n.slot for n in plan]
        stopped = [s for s in dict.fromkeys(grove.stops[before:]) if s in wanted]
        grove.need(stopped == wanted, f"stopped in the order {stopped}, not {wanted}")
        grove.hit("stopped several in order", len(plan) > 2)
        return "stopped"

    def _check_receipt(self, receipt: AbortReceipt, names: list[str]) -> None:
        told = [path for path, _ in receipt.nodes]
        self.grove.need(told == names, f"the receipt says {told}, not {names}")
        how = {h for _, h in receipt.nodes}
        self.grove.need(how <= {"stopped"}, f"the receipt says {how}")

    async def _later(self, seconds: float, method: str) -> str:
        made = await self.schedule(seconds, method, self._node.slot)
        return made.id

    async def fire(self, payload: str, schedule: Schedule) -> None:
        self._entered("schedule")
        self.grove.need(payload == self._node.slot, "the schedule of another fired")
        self._note(f"fire {schedule.id}")

    async def bye(self, payload: str, schedule: Schedule) -> None:
        await self.destroy()

    async def _fiber(self) -> str:
        async def body() -> None:
            await trio.sleep(2)
            self._note("fiber")

        return (await self.fibers.start("f", body)).id

    async def on_fiber_recovered(self, ctx: FiberRecovery) -> FiberResolution | None:
        self._entered("fiber")
        self._note("fiber")
        return FiberResolution()

    async def _crack(self) -> str:
        async def body() -> None:
            await trio.lowlevel.checkpoint()
            raise ValueError("cracked")

        self.spawn(body)
        return "cracked"

    async def on_child_failed(self, child: ChildRef, error: ChildFailure) -> None:
        self.grove.hit("a parent heard of it", "cracked" in error.message)

    async def _deafen(self) -> str:
        node, grove = self._node, self.grove

        async def body() -> None:
            try:
                with trio.CancelScope(shield=True):
                    await grove.release.wait()
                    try:
                        self._note("deaf")
                    except CuletError:
                        grove.hit("a fenced one was refused")
                    else:
                        ended = node.fenced or node.state >= State.STOPPING
                        grove.need(not ended, f"{node!r} wrote behind its fence")
            finally:
                grove.deaf.discard(node)

        if node not in grove.deaf:
            grove.deaf.add(node)
            self.spawn(body)
        return "deaf"

    async def _run(self, run_id: str) -> str:
        run = await self.run_agent_tool(Worker, 3, run_id=run_id, detached=True)
        return run.status

    def _note(self, what: str) -> None:
        self.sql(_NOTE)
        self.sql("INSERT INTO note VALUES (?, ?)", self._node.slot, what)


class Brittle(Bough):
    """Breaks the whole tree when it breaks."""

    supervision = "escalate"


class Sour(Bough):
    """Its start fails as long as the grove says so."""

    async def _grown(self) -> None:
        if self.grove.sour:
            raise ValueError("sour")


class Worker(Bough):
    """Is run as a tool: some chunks, a second each."""

    resumable = True

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        self._entered("turn")
        for number in range(len(turn.chunks()), turn.input):
            await trio.sleep(1)
            yield {"type": "data-step", "data": number}


CLASSES: dict[str, type[Bough]] = {
    c.__name__: c for c in (Bough, Brittle, Sour, Worker)
}


def order(node: Node) -> list[Node]:
    """Return the order in which a subtree is to stop."""
    kids = sorted(node.kids.values(), key=lambda kid: kid.born, reverse=True)
    return [n for kid in kids for n in order(kid)] + [node]


def found(tree: Tree, grove: Grove) -> Found:
    """Return what rows and files say, waking nobody."""
    out: Found = {}
    paths: dict[str | None, Path] = {}
    sql = (
        "SELECT slot, parent, class, name FROM node WHERE state = 'live' ORDER BY born"
    )
    for slot, parent, cls, name in tree.db.execute(sql):
        here = (
            () if parent is None else (*paths.get(parent, (("?", "?"),)), (cls, name))
        )
        paths[slot] = here
        grove.need(here not in out, f"two agents at {here}")
        db, content = tree.store.agent(slot), {}
        if db.exists:
            if db.execute(_HAS, ("kv",)):
                content = dict(db.execute("SELECT k, v FROM main.kv"))
            if db.execute(_HAS, ("note",)):
                notes = {s for (s,) in db.execute("SELECT slot FROM main.note")}
                grove.need(notes <= {slot}, f"{here} holds notes of others")
        out[here] = slot, content
    return out


def check_ended(tree: Tree, grove: Grove, slots: set[str | None]) -> None:
    """After a delete has returned: none of its nodes has code, unless it is deaf."""
    for node in grove.nodes:
        if node.tree is tree and node.slot in slots:
            over = node.state is State.GONE or node in tree.remnants
            grove.need(over, f"{node!r} was deleted and goes on")


def check_nodes(tree: Tree, grove: Grove) -> None:
    """What must hold of the nodes in memory while nothing moves."""
    for node in grove.nodes:
        if node.tree is not tree or node in tree.remnants or node.fenced:
            continue
        if node.state is State.GONE:
            work = node.work is not None and bool(node.work.child_tasks)
            grove.need(not work and not node.calls, f"{node!r} still has tasks")
            continue
        alive = node.state < State.STOPPING  # code that is deaf may take its time
        grove.need(not alive or node.slot not in grove.gone, f"{node!r} was deleted")
        grove.need(tree.nodes.get(node.slot) is node, f"{node!r} is out of the books")
        if node.parent is not None:
            kid = node.parent.kids.get(node.slot)
            grove.need(kid is node, f"{node!r} is not below its parent")
            grove.need(node.parent.state <= node.state, f"{node!r} outlives its parent")
    for node in tree.nodes.values():
        grove.need(node in grove.nodes, f"{node!r} in the books never began")
    grove.forget_gone()
