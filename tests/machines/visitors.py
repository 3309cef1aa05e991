"""The tree of agents, as in `machines.tree`, when visitors come to it from outside, and
when agents are upgraded: only who is let in at each hop makes an agent, and only the last;
a socket meets its slot in every life and class, and closes for good when that is deleted.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from culet.kernel import Request, Response
from culet.kernel.core.path import ParsedPath, PathStep
from culet.kernel.errors import ChildDidNotStop, Refused, UsageError
from culet.kernel.visits import visit
from kernel.peers import RecordingPeer
from machines.grove import HOPS_MAX, Path
from machines.sometimes import Sometimes
from machines.tree import (
    DIED,
    KEY,
    Change,
    Model,
    Record,
    TreeMachine,
    below,
    unit,
    which,
)

SOCKETS_MAX = 3
made = st.sampled_from(["Bough", "Sour", "Brittle", "Worker"])


def asked(path: Path, stop: int) -> tuple[ParsedPath, Request]:
    """Return the request of a visitor whom the gate before hop `stop` sends away."""
    hops = tuple(PathStep(*hop) for hop in path)
    return ParsedPath(PathStep(*KEY), hops, "/"), Request("GET", f"/?stop={stop}")


class VisitedTree(TreeMachine):
    """See the module's text."""

    sometimes: ClassVar = Sometimes(
        *TreeMachine.sometimes.marks, "visited", "made by a visitor", "sent away",
        "not let in so far", "too deep for a visitor", "connected", "heard",
        "heard after a sleep", "heard in another class", "closed with its agent",
        "upgraded", "upgraded several", "an upgrade was refused",
        "an upgrade met deaf code",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.peers: dict[RecordingPeer, tuple[str, str]] = {}  # slot and class, then

    async def _revive(self, *, anyway: bool = False) -> None:
        if anyway or self.test.faults.dead:
            self.peers.clear()  # their process has died
        await super()._revive(anyway=anyway)

    # ---- visits

    @rule(
        at=unit, cls=made, which=which, further=st.booleans(),
        stop=st.sampled_from([9, 9, 9, 0, 1, 2]), socket=st.booleans(),
    )  # fmt: skip
    def visit(
        self, at: float, cls: str, which: int, further: bool, stop: int, socket: bool
    ) -> None:
        """Somebody comes to an agent that is there, or perhaps not; or to one below that."""
        hop = (cls, self.names[which])
        self.come((*self.pick(at), *([hop, hop] if further else [hop])), stop, socket)

    def come(self, path: Path, stop: int, socket: bool) -> None:
        """Let a visitor come by HTTP or with a socket, as far as gates and rows allow."""
        known = path in self.model
        answer, change = self._expected(path, stop)
        socket = socket and len(self.peers) < SOCKETS_MAX
        try:
            got = self.ask(self._visit, path, stop, socket)
        except Refused as refused:
            got = refused.status
        if got == DIED:
            self.either(change)
            return
        if isinstance(got, int):
            assert got == answer, (path, stop, got, answer)
            self.sometimes.hit("sent away", got == 403)
            self.sometimes.hit("not let in so far", got == 404)
            self.sometimes.hit("too deep for a visitor", got == 400)
            return
        assert answer == 200, (path, stop, got, answer)
        if change is not None:
            self.apply(change)
        slot, content = got
        record = self.model[path]
        assert record.slot in (None, slot), "another agent has answered"
        assert content == record.content
        self.sometimes.hit("visited" if known else "made by a visitor")

    def _expected(self, path: Path, stop: int) -> tuple[int, Change | None]:
        """Return the status of the answer, and what it makes."""
        if len(path) > HOPS_MAX:
            return 400, None
        for number in range(len(path)):
            here = path[: number + 1]
            if number == stop:
                return 403, None
            if here in self.model:
                continue
            if path[number][0] == "Worker" or here != path:
                return 404, None  # a facet of a run is there if the run is
            return 200, lambda model: model.setdefault(path, Record()) and None
        return 200, None

    async def _visit(self, path: Path, stop: int, socket: bool) -> Any:
        found = await visit(self.test.kernel, *asked(path, stop))
        if isinstance(found, Response):
            return found.status
        if not socket:
            response = await found.handle()
            assert isinstance(response.body, bytes)
            return (
                json.loads(response.body) if response.status == 200 else response.status
            )
        peer = RecordingPeer(found.gate)
        peer.connection = found.connect(peer, "c")
        await peer.connection.opened()
        slot, content = json.loads(await self._said(peer))
        self.peers[peer] = slot, path[-1][0]
        self.sometimes.hit("connected")
        return [slot, content]

    async def _said(self, peer: RecordingPeer) -> str:
        """Return what the agent answers to a message."""
        told = len(peer.out)
        peer.send("see")
        while peer.closed is None:
            for text in peer.out[told:]:
                if isinstance(text, str) and text.startswith("["):
                    return text
            await self.test.advance(0.1)
        raise Refused(f"closed with {peer.closed}", status=peer.closed[0])

    @rule(at=unit)
    @precondition(lambda self: self.peers)
    def say(self, at: float) -> None:
        """A frame finds the slot that its socket was for, or nobody."""
        self.say_to(list(self.peers)[int(at * len(self.peers))])

    def say_to(self, peer: RecordingPeer) -> None:
        """Say something over a socket."""
        slot, cls = self.peers[peer]
        paths = [p for p, record in self.model.items() if record.slot == slot]
        tree = self.tree
        asleep = tree is not None and slot not in tree.nodes
        if peer.closed is not None or not paths:
            assert slot not in {r.slot for r in self.model.values()} or (
                peer.closed is not None and peer.closed[0] in (1011, 1012)
            ), f"closed with {peer.closed} and its agent is there"
            assert peer.closed is not None, "its agent is deleted, it is open"
            self.sometimes.hit("closed with its agent", peer.closed[0] == 4410)
            del self.peers[peer]
            return
        got = self.ask(self._heard, peer)
        if got == DIED:
            self.either(None)
        elif got is not None:
            assert got == [slot, self.model[paths[0]].content]
            self.sometimes.hit("heard")
            self.sometimes.hit("heard after a sleep", asleep)
            self.sometimes.hit("heard in another class", paths[0][-1][0] != cls)

    async def _heard(self, peer: RecordingPeer) -> Any:
        try:
            return json.loads(await self._said(peer))
        except Refused as refused:
            assert refused.status in (1011, 1012), refused  # it broke, or its tree did
            return None

    # ---- upgrades

    @rule(
        at=unit, cls=st.sampled_from(["Bough", "Sour", "Brittle"]),
        first=st.sampled_from(["nothing", "deafen", "connect"]),
    )  # fmt: skip
    def upgrade(self, at: float, cls: str, first: str) -> None:
        """Another class takes over a slot, with all that is below and owed."""
        path = self.child(at)
        if path is None:
            return
        if first == "deafen":
            self.step(path, "deafen")
        elif first == "connect":
            self.come(path, 9, socket=True)
        if path in self.model:
            self.take_over(path, cls)
        if first == "connect" and self.peers:
            self.say_to(list(self.peers)[-1])

    def take_over(self, path: Path, cls: str) -> None:
        """Upgrade a facet; the model says whether that may be."""
        old, name = path[-1]
        new = (*path[:-1], (cls, name))
        moved = below(self.model, path)

        def change(model: Model) -> None:
            for was in below(model, path):
                model[(*new, *was[len(path) :])] = model.pop(was)

        try:
            got = self.step(path[:-1], "upgrade", old, name, cls, change=change)
        except UsageError:
            assert new in self.model or old == "Worker"
            self.sometimes.hit("an upgrade was refused")
        except ChildDidNotStop:
            self.sometimes.hit("an upgrade met deaf code")
        else:
            self.sometimes.hit("upgraded", got is not None)
            self.sometimes.hit("upgraded several", got is not None and len(moved) > 1)
