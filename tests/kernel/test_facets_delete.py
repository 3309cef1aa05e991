"""A delete is for good: nothing that was is met again, and nothing late makes it anew."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import pytest
import trio

from culet.kernel import Chunk, Response, Turn, open_kernel
from culet.kernel.errors import Deleted, FacetAborted, StorageError
from kernel.agents import agent_at, node_at, raises, settle, tree_of
from kernel.family import (
    NOTES,
    Facet,
    Other,
    Top,
    children,
    count,
    files,
    get,
    opened,
)
from kernel.peers import RecordingPeer, come, connect

NAMES = [
    ("slash-child", "slash-child/nested-looking"),
    ("wild%child", "wildXchild/nested"), ("wild_child", "wildXchild"),
    ("a", "a:b"), ("a", "A"), ("x/Facet:y", "x"),
]  # fmt: skip


class Busy(Facet):
    """Does all that it can while it is told to stop."""

    async def linger(self) -> None:
        try:
            await trio.sleep_forever()
        finally:
            await self._all("linger")

    async def _all(self, text: str) -> None:
        with trio.CancelScope(shield=True):
            for act in (self._schedule_one, self._start_fiber, self._make, self._write):
                for _ in range(3):
                    with contextlib.suppress(FacetAborted, Deleted):
                        await act(text)
                        NOTES.append(f"done: {act.__name__}")
                    await trio.sleep(0.1)

    async def _schedule_one(self, text: str) -> None:
        await self.schedule(0, "reminded", text)

    async def _start_fiber(self, text: str) -> None:
        await self.fibers.start(text, trio.sleep_forever)

    async def _make(self, text: str) -> None:
        await self.dynamic_agents.get(Facet, text)

    async def _write(self, text: str) -> None:
        self.sql("CREATE TABLE IF NOT EXISTS kept (text)")

    async def fiber(self) -> None:
        await self.fibers.start("f", trio.sleep_forever)

    async def hold(self) -> None:
        async with self.keep_alive():
            await trio.sleep_forever()


class Ticks(Facet):
    async def slowly(self, payload: Any, schedule: Any) -> None:
        NOTES.append(f"{self.name} begins")
        await trio.sleep(10)
        NOTES.append(f"{self.name} ends")


async def drop(test: Any, cls: Any, name: str, *above: tuple[str, str]) -> None:
    await (await children(test, *above)).delete(cls, name)


# ---- nothing is left


@pytest.mark.rule("F-054", "F-055", "F-064")
async def test_the_next_one_starts_empty_all_the_way_down(clock: object) -> None:
    async with opened() as test:
        kids = await children(test)
        await kids.delete(Facet, "k")
        assert not kids.has(Facet, "k")
        for path in ([(Facet, "k")], [(Facet, "k"), (Facet, "b")]):
            await (await get(test, *path)).keep("old")
        assert len(files(test)) == 2
        await kids.delete(Facet, "k")
        await kids.delete(Facet, "k")
        assert not kids.has(Facet, "k")
        assert await (await get(test, (Facet, "k"))).kept() == []
        assert (await children(test, ("Facet", "k"))).list() == []
        await test.advance(1)
        assert len(files(test)) == 1
        assert (count(test, "node"), count(test, "job")) == (2, 0)


@pytest.mark.rule("F-056", "F-057", "F-058", "F-063")
async def test_what_the_whole_subtree_owes_goes_with_it(clock: object) -> None:
    async with opened(Busy) as test:
        paths = [[(Facet, "p"), (Busy, "k")], [(Facet, "p"), (Busy, "k"), (Busy, "b")]]
        for path in paths:
            kid = await get(test, *path)
            await kid.remind(5, "late")
            await kid.fiber()
        beside = await get(test, (Facet, "p"), (Facet, "beside"))
        await beside.remind(5, "on time")
        assert (count(test, "job"), count(test, "fiber")) == (5, 2)
        await drop(test, Busy, "k", ("Facet", "p"))
        await settle()
        assert (count(test, "job"), count(test, "fiber")) == (1, 0)
        assert [c.name for c in (await children(test, ("Facet", "p"))).list()] == [
            "beside"
        ]
        await test.advance(10)
        assert [n for n in NOTES if "hears" in n] == ["beside hears on time"]


@pytest.mark.rule("F-059", "F-060")
@pytest.mark.parametrize(("gone", "stays"), NAMES)
async def test_a_name_that_only_looks_as_if_it_were_below_stays(
    gone: str, stays: str, clock: object
) -> None:
    async with opened() as test:
        for name in (gone, stays):
            kid = await get(test, (Facet, name))
            await kid.remind(5, "mine")
            await kid.keep(name)
        await drop(test, Facet, gone)
        await test.advance(10)
        assert [n for n in NOTES if "hears" in n] == [f"{stays} hears mine"]
        assert await (await get(test, (Facet, stays))).kept() == [stays]


@pytest.mark.rule("F-061")
async def test_a_row_that_makes_no_sense_stops_no_delete(clock: object) -> None:
    async with opened() as test:
        await (await get(test, (Facet, "k"))).remind(5, "x")
        tree = tree_of(test)
        for owner in ('[{"className": "Facet', "%", ""):
            tree.db.execute(
                "INSERT INTO job (owner, kind, what, at, due_at, lane, created_at)"
                " VALUES (?, 'call', 'reminded', 0, 9e15, 'call', 0)",
                (owner,),
            )
        await drop(test, Facet, "k")
        await test.advance(1)
        assert not (await children(test)).has(Facet, "k")
        assert count(test, "job") == 3, "what is nobody's is not touched"
        assert await (await get(test, (Facet, "k"))).ping(1) == 2


@pytest.mark.rule("F-066")
async def test_what_it_does_while_it_is_stopped_leaves_nothing(clock: object) -> None:
    async with opened(Busy, abort_grace_s=5) as test:
        kid = await get(test, (Busy, "k"))
        await kid.keep("x")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(raises, Deleted, kid.linger)
            await settle()
            await drop(test, Busy, "k")
        await test.advance(10)
        assert not any(n.startswith("done") for n in NOTES)
        assert (count(test, "node"), count(test, "job"), count(test, "fiber")) == (
            1, 0, 0,
        )  # fmt: skip
        assert files(test) == set()


@pytest.mark.rule("F-067")
async def test_what_the_old_one_owed_never_reaches_the_new_one(clock: object) -> None:
    """The reference needs an incarnation in its rows; ours name the slot of one life."""
    async with opened() as test:
        for _ in range(3):
            kid = await get(test, (Facet, "k"))
            await kid.remind(5, "of an old life")
            slot = node_at(test, ("Facet", "k")).slot
            await drop(test, Facet, "k")
        kid = await get(test, (Facet, "k"))
        # as if a row had been missed
        tree_of(test).db.execute(
            "INSERT INTO job (owner, kind, what, at, due_at, lane, created_at)"
            " VALUES (?, 'call', 'reminded', 0, 0, 'call', 0)",
            (slot,),
        )
        tree_of(test).jobs.touch(slot, "call")
        await kid.remind(6, "of the new one")
        await test.advance(10)
        assert [n for n in NOTES if "hears" in n] == ["k hears of the new one"]


# ---- those who are there


@pytest.mark.rule("F-068")
async def test_callers_are_told_at_once(clock: object) -> None:
    async with opened() as test:
        stubs = [
            await get(test, (Facet, "k")),
            await get(test, (Facet, "k"), (Other, "b")),
        ]
        outside = await test.kernel.get_sub_agent(
            await test.kernel.get_agent(Top, "a"), Facet, "k"
        )
        async with trio.open_nursery() as nursery:
            for stub in (*stubs, outside):
                nursery.start_soon(raises, Deleted, stub.wait)
            await settle()
            began = trio.current_time()
            await drop(test, Facet, "k")
        assert trio.current_time() == began
        await get(test, (Facet, "k"))
        for stub in (*stubs, outside):
            await raises(Deleted, stub.ping, 1)


@pytest.mark.rule("F-069")
async def test_a_delete_in_the_middle_of_a_callback_stops_no_other(
    clock: object,
) -> None:
    async with opened(Ticks) as test:
        await get(test, (Ticks, "k"))
        await get(test, (Ticks, "other"))
        for name in ("k", "other"):
            agent = agent_at(test, ("Ticks", name))
            await agent.schedule(1, "slowly")
            await agent.schedule(2, "reminded", "next")
        await test.advance(1.5)
        assert "k begins" in NOTES
        await drop(test, Ticks, "k")
        await test.advance(30)
        assert "k ends" not in NOTES
        assert "k hears next" not in NOTES
        assert NOTES[-2:] == ["other ends", "other hears next"]
        assert count(test, "job") == 0


@pytest.mark.rule("F-070")
async def test_its_keep_alives_keep_nobody(clock: object) -> None:
    async with opened(Busy, idle_s=5) as test:
        kid = await get(test, (Facet, "p"), (Busy, "k"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(raises, Deleted, kid.hold)
            await settle()
            await test.advance(60)
            assert test.find([("Top", "a"), ("Facet", "p")]) is not None
            await drop(test, Busy, "k", ("Facet", "p"))
        await test.advance(60)
        assert test.kernel.metrics()["trees"] == 0


@pytest.mark.rule("F-065")
async def test_sockets_close_for_good_and_nothing_late_makes_it_anew(
    clock: object,
) -> None:
    async with opened() as test:
        await get(test, (Facet, "k"), (Facet, "b"))
        paths = (
            [("Top", "a"), ("Facet", "k")],
            [("Top", "a"), ("Facet", "k"), ("Facet", "b")],
        )
        peers = [await connect(test, *path) for path in paths]
        other = await connect(test)
        closed: list[Any] = []

        async def delete() -> None:
            await drop(test, Facet, "k")
            closed.extend(peer.closed for peer in peers)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(delete)
            for _ in range(5):
                for peer in peers:
                    peer.send("late")
                await trio.lowlevel.checkpoint()
        assert closed == [(4410, "deleted")] * 2, "before delete returns"
        for peer in peers:
            peer.send("later still")
            assert peer.connection is not None
            peer.connection.closed(1000, "", was_clean=True)
        await test.advance(5)
        assert not (await children(test)).has(Facet, "k")
        assert count(test, "node") == 1
        assert other.closed is None


# ---- get beside it


class Deaf(Facet):
    async def deaf(self, seconds: float) -> None:
        with trio.CancelScope(shield=True):
            await trio.sleep(seconds)
            NOTES.append(f"old code of {self.name}")

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        NOTES.append(f"turn of {self.name}")
        yield {"type": "text-delta", "id": "t", "delta": "x"}


@pytest.mark.rule("F-029", "F-031")
async def test_a_get_waits_for_the_delete_then_makes_a_fresh_one(
    clock: object,
) -> None:
    async with opened(Deaf, abort_grace_s=5) as test:
        kid = await get(test, (Deaf, "k"))
        await kid.keep("old")
        kids = await children(test)
        fresh: list[Any] = []

        async def again() -> None:
            fresh.append(await kids.get(Deaf, "k"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(raises, Deleted, kid.deaf, 2)
            await settle()
            nursery.start_soon(kids.delete, Deaf, "k")
            await settle()
            nursery.start_soon(again)
            nursery.start_soon(again)
            await settle()
            assert not fresh
            assert not kids.has(Deaf, "k")
            assert kids.list() == []
        assert NOTES[-2:] == ["old code of k", "start k"]
        assert len(fresh) == 2
        assert await fresh[0].kept() == []


@pytest.mark.rule("F-029")
async def test_a_run_in_a_facet_of_that_name_waits_as_well(clock: object) -> None:
    async with opened(Deaf, abort_grace_s=5) as test:
        kid = await get(test, (Deaf, "k"))
        root, kids = agent_at(test), await children(test)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(raises, Deleted, kid.deaf, 2)
            await settle()
            nursery.start_soon(kids.delete, Deaf, "k")
            await settle()
            run = await root.run_agent_tool(Deaf, run_id="k")
        assert run.status == "completed"
        assert NOTES[-3:] == ["old code of k", "start k", "turn of k"]


@pytest.mark.rule("F-029")
async def test_a_get_waits_no_longer_than_old_code_may_take(clock: object) -> None:
    async with opened(Deaf, abort_grace_s=1) as test:
        kid = await get(test, (Deaf, "k"))
        kids = await children(test)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(raises, Deleted, kid.deaf, 60)
            await settle()
            nursery.start_soon(kids.delete, Deaf, "k")
            await settle()
            began = trio.current_time()
            assert await (await kids.get(Deaf, "k")).ping(1) == 2
            assert 1 <= trio.current_time() - began < 2


class Starts(Facet):
    async def on_start(self) -> None:
        await self.keep("x")
        await self.schedule(5, "reminded", "x")
        if self.name == "ends itself":
            await self.destroy()
        await trio.sleep(1)
        NOTES.append(f"{self.name} started")


@pytest.mark.rule("F-054", "F-068")
@pytest.mark.parametrize("name", ["ends itself", "is deleted"])
async def test_a_delete_in_the_middle_of_a_start_ends_it(
    name: str, clock: object
) -> None:
    async with opened(Starts) as test:
        kids = await children(test)
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(raises, Deleted, kids.get, Starts, name)
            await settle()
            await kids.delete(Starts, name)
        await test.advance(10)
        assert NOTES == ["start a"]
        assert (count(test, "node"), count(test, "job"), files(test)) == (1, 0, set())
        assert tree_of(test).made == set()


async def test_a_delete_goes_on_without_its_caller(clock: object) -> None:
    async with opened(Deaf, abort_grace_s=5) as test:
        kid = await get(test, (Deaf, "k"))
        kids = await children(test)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(raises, Deleted, kid.deaf, 2)
            await settle()
            with trio.move_on_after(0.5):
                await kids.delete(Deaf, "k")
            await kids.get(Deaf, "k")
            assert NOTES[-2:] == ["old code of k", "start k"], (
                "a get waits all the same"
            )


@pytest.mark.rule("F-065")
async def test_who_was_let_in_just_before_finds_nobody(clock: object) -> None:
    async with opened() as test:
        await get(test, (Facet, "k"))
        found = await come(test, ("Top", "a"), ("Facet", "k"))
        assert not isinstance(found, Response)
        await drop(test, Facet, "k")
        client = RecordingPeer(found.gate)
        client.connection = found.connect(client, "c")
        await raises(Deleted, client.connection.opened)
        client.send("late")
        await raises(Deleted, found.handle)
        client.connection.closed(1006, "", was_clean=False)
        await test.advance(5)
        assert count(test, "node") == 1
        assert tree_of(test).sockets.count == 0
        assert "start k" in NOTES[:2]
        assert NOTES.count("start k") == 1


# ---- when it is cut short


@pytest.mark.rule("F-071")
@pytest.mark.parametrize("how", ["asleep", "next life"])
async def test_what_sleeps_is_wiped_without_being_woken(
    how: str, clock: object
) -> None:
    async with opened() as test:
        await (await get(test, (Facet, "k"), (Facet, "b"))).keep("x")
        await (await get(test, (Facet, "k"))).keep("x")
        await test.evict([("Top", "a"), ("Facet", "k")])
        if how == "next life":
            await tree_of(test).durable()
            await test.crash()
            await test.reopen()
        kids = await children(test)
        NOTES.clear()
        await kids.delete(Facet, "k")
        await test.advance(1)
        assert NOTES == []
        assert (count(test, "node"), files(test)) == (1, set())


@pytest.mark.rule("F-072")
async def test_a_wipe_that_fails_is_tried_again_until_it_is_done(
    clock: object,
) -> None:
    async with opened() as test:
        await (await get(test, (Facet, "k"))).keep("x")
        test.faults.fail_commit(3, StorageError)  # mark, take, wipe
        await drop(test, Facet, "k")
        await test.advance(0.1)
        assert not (await children(test)).has(Facet, "k"), "gone all the same"
        assert count(test, "node") == 2, "a marked row is kept"
        await test.advance(400)
        assert (count(test, "node"), count(test, "job"), files(test)) == (1, 0, set())


@pytest.mark.rule("F-072")
async def test_a_file_that_cannot_be_removed_is_no_file_that_is_forgotten(
    clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened() as test:
        await (await get(test, (Facet, "k"))).keep("x")
        store = tree_of(test).store
        (slot,) = files(test) - {tree_of(test).root_slot}
        remove, tries = store.delete, list[str]()

        def busy(which: str) -> None:
            tries.append(which)
            if len(tries) < 3:
                raise StorageError("somebody holds it")
            remove(which)

        monkeypatch.setattr(store, "delete", busy)
        await drop(test, Facet, "k")
        await test.advance(0.1)
        assert files(test) == {slot}
        assert count(test, "node") == 2, "its mark stays with it"
        await test.advance(400)
        assert tries == [slot] * 3
        assert (count(test, "node"), count(test, "job"), files(test)) == (1, 0, set())


@pytest.mark.rule("F-073")
@pytest.mark.parametrize("commits", range(6))
async def test_a_crash_leaves_it_whole_or_gone(commits: int, clock: object) -> None:
    async with opened() as test:
        kid = await get(test, (Facet, "k"))
        await kid.keep("x")
        await kid.remind(50, "x")
        await (await get(test, (Facet, "k"), (Facet, "b"))).keep("x")
        await tree_of(test).durable()
        test.faults.die_after(commits)
        with trio.move_on_after(5), contextlib.suppress(Exception):
            await drop(test, Facet, "k")
            await tree_of(test).durable()
        await test.crash()
        await test.reopen()
        kids = await children(test)
        await test.advance(10)
        if kids.has(Facet, "k"):
            assert (count(test, "node"), count(test, "job"), len(files(test))) == (
                3,
                1,
                2,
            )
            await test.advance(60)
            assert "k hears x" in NOTES
        else:
            assert (count(test, "node"), count(test, "job"), files(test)) == (
                1,
                0,
                set(),
            )


class Keeper(Facet):
    async def below(self, name: str) -> None:
        await (await self.dynamic_agents.get(Keeper, name)).keep("goes")

    async def drop(self, name: str) -> None:
        await self.dynamic_agents.delete(Keeper, name)


@pytest.mark.rule("F-064")
async def test_no_file_of_it_stays_in_the_folder(clock: object, tmp_path: Any) -> None:
    async with open_kernel(
        roots=[Keeper], facets=[Keeper], storage=f"sqlite:{tmp_path}/d", threads=False
    ) as kernel:
        root = await kernel.get_agent(Keeper, "a")
        await root.keep("stays")
        await root.below("k")
        await (await kernel.get_sub_agent(root, Keeper, "k")).below("b")
        assert len(_databases(tmp_path)) == 3
        await root.drop("k")
        await trio.sleep(1)
        assert len(_databases(tmp_path)) == 1
        assert await root.kept() == ["stays"]


def _databases(folder: Any) -> list[Any]:
    trees = list(folder.rglob("tree.db"))
    assert len(trees) == 1
    return [p for p in trees[0].parent.glob("*.db") if p.name != "tree.db"]


@pytest.mark.rule("F-064", "F-072")
@pytest.mark.parametrize("level", ["power", "process"])
@pytest.mark.parametrize("seconds", [0, 1])
async def test_no_deleted_file_outlives_an_orderly_close(
    level: Literal["power", "process"], seconds: float, clock: object, tmp_path: Path
) -> None:
    async with open_kernel(
        roots=[Keeper], facets=[Keeper], storage=f"sqlite:{tmp_path}/d",
        durability=level,
    ) as kernel:  # fmt: skip
        root = await kernel.get_agent(Keeper, "a")
        for name in ("k", "l"):
            await root.below(name)
        await root.drop("k")
        await trio.sleep(seconds)
    assert len(_databases(tmp_path)) == 1
