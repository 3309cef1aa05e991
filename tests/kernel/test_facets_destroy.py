"""An agent may end itself: a facet with all below it, a root with its whole tree."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from culet.kernel import Limits, Response, open_kernel, rpc
from culet.kernel.errors import CuletError, Deleted, FacetAborted, StorageError
from culet.kernel.kernel import find_store
from culet.kernel.ports import TreeKey
from culet.kernel.testing import VirtualClock, open_test_kernel
from kernel.agents import node_at, raises, settle
from kernel.family import NOTES, Facet, children, count, files, get, opened
from kernel.peers import come, connect, frames_of


class Ends(Facet):
    """Ends itself in several ways."""

    async def fiber(self) -> None:
        await self.fibers.start("f", trio.sleep_forever)

    async def end_and_go_on(self) -> None:
        try:
            await self.destroy()
        finally:
            NOTES.append("goes on")
        NOTES.append("never")

    async def end_later(self, seconds: float) -> None:
        await self.schedule(seconds, "due")
        await self.schedule_every(seconds / 2, "reminded", "tick")

    async def answer_then_end(self) -> str:
        await self.schedule(1, "due")
        return "bye"

    async def due(self, payload: Any, schedule: Any) -> None:
        NOTES.append("due")
        await self.destroy()

    async def end_held(self) -> None:
        async with self.keep_alive():
            self.spawn(trio.sleep_forever)
            await self.schedule(0.01, "reminded", "x")
            await self.destroy()

    @rpc
    async def bye(self) -> None:
        await self.destroy()


class Root(Ends):
    """The same as a root."""

    async def deaf(self, seconds: float) -> None:
        with trio.CancelScope(shield=True):
            await trio.sleep(seconds)
        NOTES.append("old code")

    async def make(self, name: str) -> None:
        kid = await self.dynamic_agents.get(Ends, name)
        await kid.keep("x")
        await kid.remind(50, "x")

    async def make_below(self, name: str) -> None:
        kid = await self.dynamic_agents.get(Ends, name)
        await kid.keep("x")
        agent = self._node.tree.nodes
        (node,) = [n for n in agent.values() if n.name == name]
        below = await node.agent.dynamic_agents.get(Ends, "below")
        await below.keep("x")


def rooted(**options: Any) -> Any:
    NOTES.clear()
    return open_test_kernel(roots=[Root], facets=[Ends], **options)


# ---- a facet


@pytest.mark.rule("F-074", "F-075", "F-078", "F-079")
async def test_a_facet_ends_with_what_is_below_it_and_nothing_else(
    clock: object,
) -> None:
    """The reference passes a path up to its root and guards it there. Ours passes no
    path at all: an agent can only end itself, through the handle that it is."""
    async with opened(Ends) as test:
        paths: list[Any] = [
            [(Ends, "p")], [(Ends, "p"), (Ends, "k")],
            [(Ends, "p"), (Ends, "k"), (Ends, "b")], [(Ends, "p"), (Ends, "beside")],
        ]  # fmt: skip
        for path in paths:
            kid = await get(test, *path)
            await kid.keep("x")
            await kid.remind(5, "x")
            await kid.fiber()
        kid = await get(test, (Ends, "p"), (Ends, "k"))
        await raises(Deleted, kid.end)
        await settle()
        assert not (await children(test, ("Ends", "p"))).has(Ends, "k")
        assert (count(test, "job"), count(test, "fiber"), len(files(test))) == (4, 2, 2)
        await test.advance(10)
        heard = sorted(n for n in NOTES if "hears" in n)
        assert heard == ["beside hears x", "p hears x"]
        assert await (await get(test, *paths[3])).kept() == ["x"]
        again = await get(test, (Ends, "p"), (Ends, "k"))
        assert await again.kept() == []
        assert (await children(test, ("Ends", "p"), ("Ends", "k"))).list() == []


@pytest.mark.rule("F-076", "F-077")
async def test_destroy_never_returns_and_is_told_before_it_is_done(
    clock: object,
) -> None:
    async with opened(Ends) as test:
        kid = await get(test, (Ends, "k"))
        slot = node_at(test, ("Ends", "k")).slot
        told: list[tuple[str, bool]] = []
        for channel in ("destroy", "delete"):
            test.kernel.subscribe(
                channel,
                lambda channel, tree, subject, _: told.append(
                    (channel, tree.is_live_slot(slot))
                ),
            )
        await raises(Deleted, kid.end_and_go_on)
        assert NOTES[-1] == "goes on"
        assert told == [("destroy", True), ("delete", False)]


@pytest.mark.rule("F-080")
async def test_ending_while_the_parent_ends_is_no_failure(clock: object) -> None:
    async with opened(Ends) as test:
        failures: list[Any] = []
        test.kernel.subscribe("failure", lambda *args: failures.append(args))
        for first in ("p", "k"):
            parent = await get(test, (Ends, "p"))
            kid = await get(test, (Ends, "p"), (Ends, "k"))
            pair = [parent, kid] if first == "p" else [kid, parent]
            with trio.fail_after(5):
                async with trio.open_nursery() as nursery:
                    for stub in pair:
                        nursery.start_soon(raises, (Deleted, FacetAborted), stub.end)
            await test.advance(1)
            assert (count(test, "node"), count(test, "job")) == (1, 0)
        assert failures == []


@pytest.mark.rule("F-086")
async def test_a_callback_may_end_its_agent(clock: object) -> None:
    async with opened(Ends) as test:
        await (await get(test, (Ends, "k"))).end_later(10)
        await test.advance(60)
        assert NOTES.count("due") == 1
        assert NOTES.count("start k") == 1, "nothing brought it back"
        assert (count(test, "node"), count(test, "job")) == (1, 0)


@pytest.mark.rule("F-084", "F-085")
@pytest.mark.parametrize("path", [[], [(Ends, "k")], [(Ends, "k"), (Ends, "b")]])
async def test_an_agent_may_answer_first_and_end_afterwards(
    path: Any, clock: object
) -> None:
    """The reference has an internal call for it: a marker and an alarm. With ours a
    schedule of one's own does it, for a root as for a facet, over a crash as well."""
    async with open_test_kernel(roots=[Ends], facets=[Ends]) as test:
        NOTES.clear()
        stub: Any = await test.kernel.get_agent(Ends, "a")
        for cls, name in path:
            stub = await test.kernel.get_sub_agent(stub, cls, name)
        await stub.keep("x")
        assert await stub.answer_then_end() == "bye"
        await test.crash()
        await test.reopen()
        await test.advance(5)
        assert NOTES.count("due") == 1
        if path:
            stub = await test.kernel.get_agent(Ends, "a")
            for cls, name in path:
                stub = await test.kernel.get_sub_agent(stub, cls, name)
        else:
            assert test.kernel.store.roots() == []
            stub = await test.kernel.get_agent(Ends, "a")
        assert await stub.kept() == []
        await test.advance(60)
        assert NOTES.count("due") == 1


# ---- a root


@pytest.mark.rule("F-081", "F-087", "F-089")
async def test_nothing_of_a_root_is_left_and_nothing_wakes_it(
    clock: object, tmp_path: Any
) -> None:
    async with open_kernel(
        roots=[Root], facets=[Ends], storage=f"sqlite:{tmp_path}/d", threads=False,
        idle_s=5, clock=VirtualClock(),
    ) as kernel:  # fmt: skip
        NOTES.clear()
        other = await kernel.get_agent(Root, "other")
        root = await kernel.get_agent(Root, "a")
        for stub in (root, other):
            await stub.keep("x")
            await stub.make("k")
            await stub.make_below("deep")
            await stub.remind(100, "x")
        assert len(_databases(tmp_path)) == 2 * 5
        await raises(Deleted, root.end)
        await trio.sleep(1)
        assert len(_databases(tmp_path)) == 5, "and the other root's are untouched"
        assert TreeKey("Root", "a") not in {e.key for e in kernel.store.roots()}
        await trio.sleep(1000)
        assert NOTES.count("start a") == 1
        assert NOTES.count("other hears x") == 1
        await raises(Deleted, root.ping, 1)
        assert await (await kernel.get_agent(Root, "a")).kept() == []


def _databases(folder: Any) -> list[Any]:
    return list(folder.glob("d/roots/**/*.db"))


@pytest.mark.rule("F-082")
@pytest.mark.parametrize("records", [1, 2])
@pytest.mark.parametrize("landed", [False, True])
async def test_a_destroy_that_was_cut_short_ends_in_the_next_life(
    records: int, landed: bool, clock: object
) -> None:
    async with rooted() as test:
        root = await test.kernel.get_agent(Root, "a")
        await root.keep("x")
        await root.make("k")
        tree = test.tree("Root", "a")
        assert tree is not None
        await tree.durable()
        test.faults.die_in_record(records, landed=landed)
        with trio.move_on_after(5):
            await raises(CuletError, root.end)
        await test.crash()
        NOTES.clear()
        await test.reopen()
        await test.advance(5)  # nobody comes: the kernel itself looks at it
        listed = TreeKey("Root", "a") in {e.key for e in test.kernel.store.roots()}
        assert NOTES == [], "and does so before it starts anything"
        gone = landed or records == 2
        assert listed is not gone
        root = await test.kernel.get_agent(Root, "a")
        assert await root.kept() == ([] if gone else ["x"])


class Keeps:
    """A store that cannot drop a tree, so many times."""

    def __init__(self, times: int) -> None:
        self.inner = find_store("memory:", Limits())
        self.times = times

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def drop_tree(self, key: TreeKey) -> None:
        if self.times:
            self.times -= 1
            raise StorageError("not now")
        self.inner.drop_tree(key)


@pytest.mark.rule("F-082", "F-089")
@pytest.mark.parametrize("crash", [False, True])
async def test_a_folder_that_could_not_be_removed_is_removed_later(
    crash: bool, clock: object
) -> None:
    store: Any = Keeps(1)
    async with rooted(storage=store) as test:
        root = await test.kernel.get_agent(Root, "a")
        await root.keep("x")
        await raises((Deleted, StorageError), root.end)
        await test.advance(0.5)
        assert store.times == 0
        assert len(store.roots()) == 1
        NOTES.clear()
        if crash:
            await test.crash()
            await test.reopen()
        await test.advance(Limits().backoff_max_s + 10)
        assert store.roots() == [], "nobody had to come"
        assert NOTES == []
        assert await (await test.kernel.get_agent(Root, "a")).kept() == []


@pytest.mark.rule("F-083")
async def test_neither_a_keep_alive_nor_work_puts_it_off(clock: object) -> None:
    async with rooted() as test:
        root = await test.kernel.get_agent(Root, "a")
        await root.make("k")
        await raises(Deleted, root.end_held)
        await test.advance(60)
        assert test.kernel.metrics()["trees"] == 0
        assert "a hears x" not in NOTES


@pytest.mark.rule("F-086")
async def test_a_root_may_end_itself_when_something_is_due(clock: object) -> None:
    async with rooted() as test:
        root = await test.kernel.get_agent(Root, "a")
        await root.end_later(10)
        await test.advance(100)
        assert NOTES.count("due") == 1
        assert NOTES.count("start a") == 1
        assert test.kernel.metrics()["trees"] == 0
        assert test.kernel.store.roots() == []


@pytest.mark.rule("F-081")
async def test_two_that_end_a_root_at_once_do_not_meet(tmp_path: Any) -> None:
    async with open_kernel(
        roots=[Root], facets=[Ends], storage=f"sqlite:{tmp_path}/d"
    ) as kernel:
        for _ in range(5):
            root = await kernel.get_agent(Root, "a")
            await root.keep("x")
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(raises, Deleted, root.end)
            assert await (await kernel.get_agent(Root, "a")).kept() == []


@pytest.mark.rule("F-081")
async def test_a_stub_of_a_root_that_is_gone_makes_nothing(clock: object) -> None:
    async with rooted() as test:
        root = await test.kernel.get_agent(Root, "a")
        await raises(Deleted, root.end)
        await test.advance(1)
        await raises(Deleted, test.kernel.get_sub_agent, root, Ends, "k")
        assert test.kernel.trees == {}
        assert test.kernel.store.roots() == []
        await test.kernel.get_agent(Root, "a")
        await raises(Deleted, test.kernel.get_sub_agent, root, Ends, "k")


@pytest.mark.rule("F-088")
async def test_who_comes_while_it_ends_is_told_that_it_is_gone(clock: object) -> None:
    async with rooted(abort_grace_s=5) as test:
        root = await test.kernel.get_agent(Root, "a")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(raises, Deleted, root.deaf, 2)
            await settle()
            nursery.start_soon(raises, Deleted, root.end)
            await settle()
            for path in ([("Root", "a")], [("Root", "a"), ("Ends", "k")]):
                found = await come(test, *path)
                assert isinstance(found, Response)
                assert found.status == 410
            assert NOTES == ["start a"]
            await test.kernel.get_agent(Root, "a")
            assert NOTES == ["start a", "old code", "start a"], "get waits for the end"


@pytest.mark.rule("F-090")
async def test_all_sockets_of_the_tree_close_for_good(clock: object) -> None:
    async with rooted() as test:
        root = await test.kernel.get_agent(Root, "a")
        await root.make_below("k")
        top = ("Root", "a")
        peers = [
            await connect(test, top), await connect(test, top, ("Ends", "k")),
            await connect(test, top, ("Ends", "k"), ("Ends", "below")),
        ]  # fmt: skip
        await raises(Deleted, root.end)
        await settle()
        assert [peer.closed for peer in peers] == [(4410, "deleted")] * 3
        assert test.kernel.metrics()["trees"] == 0


async def test_a_client_that_asked_for_the_end_is_told_by_the_close(
    clock: object,
) -> None:
    async with opened(Ends) as test:
        await get(test, (Ends, "k"))
        peer = await connect(test, ("Top", "a"), ("Ends", "k"))
        peer.rpc("bye")
        await test.advance(1)
        assert peer.closed == (4410, "deleted")
        assert [f["success"] for f in frames_of(peer, "rpc")] in ([], [False])
