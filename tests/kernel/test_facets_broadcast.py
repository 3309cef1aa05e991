"""Broadcasts: to the clients of one agent, in order, whatever becomes of one of them."""

from __future__ import annotations

from typing import Any

import pytest

from culet.kernel import Agent, rpc
from culet.kernel.ports import Blob
from culet.kernel.testing import Harness, open_test_kernel
from kernel.agents import agent_at, settle, tree_of
from kernel.peers import RecordingPeer, connect, frames_of

ROOT, KID, SIBLING = ("Top", "a"), ("Kid", "k"), ("Kid", "s")
GRANDCHILD = (KID, ("Kid", "k"))  # of its parent's class and name
PLACES: dict[str, tuple[tuple[str, str], ...]] = {
    "root": (), "kid": (KID,), "sibling": (SIBLING,), "grandchild": GRANDCHILD,
}  # fmt: skip


class Speaks(Agent):
    async def make(self, name: str) -> None:
        await self.dynamic_agents.get(Kid, name)

    async def say(self, text: str) -> None:
        self.broadcast(text)

    async def note(self, n: int) -> None:
        self.set_state({"n": n})

    @rpc
    async def repeat(self, texts: list[str]) -> None:
        for text in texts:
            self.broadcast(text)


class Top(Speaks):
    initial_state = {"n": 0}


class Kid(Speaks):
    async def on_start(self) -> None:
        self.broadcast(f"{self.name} starts")
        self.set_state({"n": -1})


class SharingPeer(RecordingPeer):
    """Keeps the very blobs that it was given."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.blobs: list[Blob] = []

    def push(self, blob: Blob, stamp: int) -> None:
        self.blobs.append(blob)
        super().push(blob, stamp)


class DyingPeer(RecordingPeer):
    """Finds out that its client is gone when it is pushed to."""

    alive = True

    def push(self, blob: Blob, stamp: int) -> None:
        if self.alive:
            super().push(blob, stamp)
        else:
            assert self.connection is not None
            self.connection.closed(1006, "", was_clean=False)


def opened() -> Any:
    return open_test_kernel(roots=[Top], facets=[Kid])


async def everybody(test: Harness, places: Any = PLACES) -> dict[str, RecordingPeer]:
    """Return a client of each agent, what was said at first taken away."""
    root = await test.kernel.get_agent(Top, "a")
    await root.make("k")
    await root.make("s")
    await agent_at(test, KID).make("k")
    peers = {
        place: await connect(test, ROOT, *PLACES[place], label=place)
        for place in places
    }
    await settle()
    for peer in peers.values():
        peer.out.clear()
    return peers


async def stub_of(test: Harness, place: str) -> Any:
    stub: Any = await test.kernel.get_agent(Top, "a")
    for _, name in PLACES[place]:
        stub = await test.kernel.get_sub_agent(stub, Kid, name)
    return stub


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("how", ["say", "note"])
@pytest.mark.rule("F-226", "F-227", "F-228", "F-229", "F-231")
async def test_what_an_agent_says_in_a_call_is_heard_by_its_own_clients(
    how: str, place: str, clock: object
) -> None:
    async with opened() as test:
        peers = await everybody(test)
        stub = await stub_of(test, place)
        await (stub.say("hello") if how == "say" else stub.note(7))
        await settle()
        for where, peer in peers.items():
            if where != place:
                assert peer.out == [], where
            elif how == "say":
                assert peer.out == ["hello"]
            else:
                assert [f["state"] for f in frames_of(peer, "cf_agent_state")] == [
                    {"n": 7}
                ]


@pytest.mark.rule("F-228")
async def test_a_broadcast_to_nobody_is_no_error(clock: object) -> None:
    async with opened() as test:
        peers = await everybody(test, ["root"])
        await (await stub_of(test, "kid")).say("into the air")
        await settle()
        assert peers["root"].out == []


@pytest.mark.rule("F-234")
async def test_each_client_hears_broadcasts_in_the_order_of_the_calls(
    clock: object,
) -> None:
    async with opened() as test:
        peers = await everybody(test, ["kid"])
        other = await connect(test, ROOT, KID, label="other")
        await settle()
        texts = [f"m{i}" for i in range(50)]
        peers["kid"].rpc("repeat", texts)
        await settle()
        assert peers["kid"].out[:-1] == texts
        assert other.out[-50:] == texts


@pytest.mark.rule("F-232")
async def test_a_broadcast_is_made_once_and_wakes_nobody(clock: object) -> None:
    """No call to the root for each message: the sockets are a table of the tree, and
    what is sent is one object for all."""
    async with opened() as test:
        await test.kernel.get_agent(Top, "a")
        await everybody(test, ["root"])
        peers = [
            await connect(test, ROOT, KID, label=str(i), peer=SharingPeer)
            for i in range(3)
        ]
        assert await tree_of(test).evict(test.find([ROOT, SIBLING]))  # type: ignore[arg-type]
        starts: list[Any] = []
        test.kernel.subscribe("start", lambda *event: starts.append(event))
        kid = agent_at(test, KID)
        kid.broadcast("hello")
        kid.set_state({"n": 1})
        sent = [peer.blobs[-2:] for peer in peers]  # type: ignore[attr-defined]
        assert all(a is b for one in sent for a, b in zip(one, sent[0], strict=True))
        await settle()
        assert starts == []


@pytest.mark.rule("F-233", "F-228")
async def test_a_dead_client_does_not_keep_the_others_from_hearing(
    clock: object,
) -> None:
    async with opened() as test:
        await everybody(test, ["root"])
        first = await connect(test, ROOT, KID, label="first")
        gone = await connect(test, ROOT, KID, label="gone")
        dying = await connect(test, ROOT, KID, label="dying", peer=DyingPeer)
        last = await connect(test, ROOT, KID, label="last")
        await settle()
        assert gone.connection is not None
        gone.connection.closed(1006, "", was_clean=False)
        dying.alive = False  # type: ignore[attr-defined]
        kid = await stub_of(test, "kid")
        await kid.say("hello")
        await kid.note(1)
        await settle()
        for peer in (first, last):
            assert "hello" in peer.out
            assert frames_of(peer, "cf_agent_state")[-1]["state"] == {"n": 1}
        assert [c.id for c in agent_at(test, KID).sockets.list()] == ["first", "last"]


@pytest.mark.rule("F-236")
async def test_what_a_facet_says_while_it_starts_touches_no_foreign_socket(
    clock: object,
) -> None:
    async with opened() as test:
        peers = await everybody(test)
        await (await stub_of(test, "kid")).make("new")
        await (await stub_of(test, "root")).make("new")
        await settle()
        assert [peer.out for peer in peers.values()] == [[], [], [], []]
