"""Roots: opening, sleeping, waking, closing; two kernels on one folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from culet.kernel import Agent, open_kernel
from culet.kernel.core.limits import Limits
from culet.kernel.errors import (
    CuletError,
    Deleted,
    FacetBroken,
    NotFound,
    StorageBusy,
    StorageFull,
    UsageError,
)
from culet.kernel.kernel import find_store
from culet.kernel.ports import TreeKey
from culet.kernel.testing import open_test_kernel
from culet.kernel.tree import Tree

STARTS: list[str] = []


@pytest.fixture(autouse=True)
def no_starts() -> None:
    STARTS.clear()


class Root(Agent):
    async def on_start(self) -> None:
        STARTS.append(self.name)
        await trio.sleep(0.01)

    async def ping(self, n: int) -> int:
        return n + 1

    async def slowly(self, seconds: float) -> str:
        await trio.sleep(seconds)
        return "done"

    async def later(self, seconds: float, text: str) -> None:
        await self.schedule(seconds, "note", text)

    async def note(self, payload: str, schedule: object) -> None:
        STARTS.append(payload)

    async def ask(self, name: str) -> int:
        other = await self.kernel.get_agent(Root, name)
        return await other.ping(1)

    async def die(self) -> None:
        await self.destroy()

    async def keep(self, text: str) -> list[str]:
        self.sql("create table if not exists t (v)")
        if text:
            self.sql("insert into t values (?)", text)
        return [r.v for r in self.sql("select v from t")]

    async def kid(self, name: str) -> None:
        kid = await self.dynamic_agents.get(Root, name)
        await kid.keep("kid")

    async def kids(self) -> list[str]:
        return [c.name for c in self.dynamic_agents.list()]


class BadRoot(Agent):
    async def on_start(self) -> None:
        raise ValueError("no")


@pytest.mark.rule("F-472")
async def test_many_at_once_open_one_tree(clock: object) -> None:
    async with open_test_kernel(roots=[Root]) as test, trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(test.kernel.get_agent, Root, "a")
    assert STARTS == ["a"]


async def test_after_a_crash_the_host_loop_and_a_caller_open_one_tree(
    clock: object,
) -> None:
    async with open_test_kernel(roots=[Root]) as test:
        await test.kernel.get_agent(Root, "a")
        await test.crash()
        await test.reopen()
        with trio.fail_after(5):  # the host loop opens it in the same moment
            assert await (await test.kernel.get_agent(Root, "a")).ping(1) == 2
    assert STARTS == ["a", "a"]


async def test_roots_call_each_other_and_themselves(clock: object) -> None:
    async with open_test_kernel(roots=[Root]) as test:
        root = await test.kernel.get_agent(Root, "a")
        assert await root.ask("b") == 2
        assert await root.ask("a") == 2


@pytest.mark.parametrize("name", ["", "a\0b", ".", "..", "x" * 257, "sub", 7])
@pytest.mark.rule("F-480")
async def test_bad_root_names_are_refused_and_leave_nothing(
    name: Any, clock: object
) -> None:
    async with open_test_kernel(roots=[Root]) as test:
        with pytest.raises(UsageError):
            await test.kernel.get_agent(Root, name)
        assert test.kernel.metrics()["trees"] == 0


async def test_a_class_that_is_not_registered_is_refused(clock: object) -> None:
    async with open_test_kernel(roots=[Root]) as test:
        with pytest.raises(UsageError, match="add it to open_kernel"):
            await test.kernel.get_agent(BadRoot, "a")


async def test_a_root_whose_start_fails_says_why_and_is_tried_again(
    clock: object,
) -> None:
    async with open_test_kernel(roots=[BadRoot]) as test:
        for _ in range(3):
            with pytest.raises(FacetBroken) as caught:
                await test.kernel.get_agent(BadRoot, "a")
            assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.rule("F-479")
async def test_an_idle_root_sleeps_and_its_schedule_wakes_it(clock: object) -> None:
    async with open_test_kernel(roots=[Root], idle_s=10) as test:
        root = await test.kernel.get_agent(Root, "a")
        await root.later(100, "fired")
        await test.advance(40)
        assert test.tree("Root", "a") is None
        await test.advance(70)
    assert STARTS == ["a", "a", "fired"]


async def test_a_sleeping_roots_schedule_fires_in_the_next_life(clock: object) -> None:
    async with open_test_kernel(roots=[Root]) as test:
        root = await test.kernel.get_agent(Root, "a")
        await root.later(100, "fired")
        await test.evict([("Root", "a")])
        await test.close()
        await test.reopen()
        assert test.kernel.metrics()["trees"] == 0
        await test.advance(101)
    assert STARTS == ["a", "a", "fired"]


@pytest.mark.rule("F-15", "F-476")
async def test_a_schedule_that_came_due_while_down_fires_once(clock: object) -> None:
    async with open_test_kernel(roots=[Root]) as test:
        root = await test.kernel.get_agent(Root, "a")
        await root.later(10, "fired")
        await test.crash()
        test.clock.jump(1000)
        await test.reopen()
        await test.advance(5)
    assert STARTS == ["a", "a", "fired"]


async def test_a_call_that_comes_while_a_root_falls_asleep_is_served(
    clock: object,
) -> None:
    async with open_test_kernel(roots=[Root]) as test:
        root = await test.kernel.get_agent(Root, "a")
        tree = test.tree("Root", "a")
        assert tree is not None
        answers = []

        async def call() -> None:
            answers.append(await root.slowly(1))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            await trio.lowlevel.checkpoint()
            test.kernel.host.evict_root(tree)
        assert answers == ["done"]


async def test_closing_while_a_root_falls_asleep(clock: object) -> None:
    async with open_test_kernel(roots=[Root]) as test:
        await test.kernel.get_agent(Root, "a")
        tree = test.tree("Root", "a")
        assert tree is not None
        test.kernel.host.evict_root(tree)
        await trio.lowlevel.checkpoint()
    assert STARTS == ["a"]


@pytest.mark.rule("F-081")
async def test_a_destroyed_root_starts_empty_and_nothing_of_it_is_left(
    clock: object,
) -> None:
    async with open_test_kernel(roots=[Root], facets=[Root]) as test:
        root = await test.kernel.get_agent(Root, "a")
        await root.keep("old")
        await root.kid("k")
        with pytest.raises(Deleted):
            await root.die()
        with pytest.raises(Deleted):
            await root.ping(1)
        with pytest.raises(Deleted):
            await root.ping(1)
        await test.advance(1)
        assert test.kernel.metrics()["trees"] == 0, "a late call makes nothing"
        root = await test.kernel.get_agent(Root, "a")
        assert await root.keep("") == []
        assert await root.kids() == []


@pytest.mark.rule("HB-02", "F-082")
@pytest.mark.parametrize("steps", range(12))
async def test_a_crash_anywhere_in_a_destroy_leaves_all_or_nothing(
    steps: int, clock: object
) -> None:
    told: list[str] = []
    async with open_test_kernel(roots=[Root], facets=[Root]) as test:
        root = await test.kernel.get_agent(Root, "a")
        await root.keep("old")
        await root.kid("k")
        await root.later(50, "old schedule")

        async def destroy() -> None:
            try:
                await root.die()
            except Deleted:
                told.append("deleted")
            except CuletError as error:
                assert test.faults.dead, error

        async with trio.open_nursery() as nursery:
            nursery.start_soon(destroy)
            for _ in range(steps):
                await trio.lowlevel.checkpoint()
            await test.crash()
        await test.reopen()
        root = await test.kernel.get_agent(Root, "a")
        kept = await root.keep("")
        if kept:
            assert not told
            assert await root.kids() == ["k"]
        else:
            assert await root.kids() == []
            tree = test.tree("Root", "a")
            assert tree is not None
            assert tree.db.execute("SELECT count(*) FROM node") == [(1,)]
            await test.advance(60)
            assert "old schedule" not in STARTS


@pytest.mark.rule("F-07", "F-472")
async def test_two_kernels_on_one_folder(tmp_path: Path) -> None:
    url = f"sqlite:{tmp_path}/data"
    async with open_kernel(roots=[Root], storage=url, durability="process") as kernel:
        root = await kernel.get_agent(Root, "a")
        with pytest.raises(StorageBusy):
            async with open_kernel(roots=[Root], storage=url):
                pytest.fail("the second kernel opened")
        assert await root.ping(1) == 2, "the first one goes on"
    async with open_kernel(roots=[Root], storage=url, durability="process") as kernel:
        assert await (await kernel.get_agent(Root, "a")).ping(1) == 2


@pytest.mark.parametrize("url", ["nowhere", "postgres:x", "sqlite:"])
async def test_a_storage_url_that_means_nothing_is_refused(url: str) -> None:
    with pytest.raises(UsageError):
        async with open_kernel(roots=[Root], storage=url):
            pytest.fail("it opened")


async def test_an_error_in_the_body_comes_out_as_itself() -> None:
    with pytest.raises(ZeroDivisionError):
        async with open_kernel(roots=[Root], storage="memory:"):
            raise ZeroDivisionError


@pytest.mark.rule("F-20")
async def test_cancelling_the_body_stops_the_kernel_in_order(clock: object) -> None:
    with trio.move_on_after(1) as scope:
        async with open_kernel(
            roots=[Root], storage="memory:", threads=False
        ) as kernel:
            root = await kernel.get_agent(Root, "a")
            await root.slowly(100)
    assert scope.cancelled_caught


async def test_a_closing_kernel_opens_nothing_more(clock: object) -> None:
    async with open_test_kernel(roots=[Root]) as test:
        await test.kernel.drain()
        with pytest.raises(UsageError, match="closing"):
            await test.kernel.get_agent(Root, "new")


class FullIndex:
    """A store whose host index cannot be written while `full`."""

    def __init__(self) -> None:
        self.inner = find_store("memory:", Limits())
        self.full = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def note_root(self, key: TreeKey, due_at: int | None) -> None:
        if self.full:
            raise StorageFull("the index")
        self.inner.note_root(key, due_at)


async def test_a_full_disk_at_bed_time_ends_no_other_root(clock: object) -> None:
    store: Any = FullIndex()
    async with open_kernel(roots=[Root], storage=store, threads=False) as kernel:
        await kernel.get_agent(Root, "a")
        other = await kernel.get_agent(Root, "b")
        tree = kernel.trees[TreeKey("Root", "a")]
        store.full = True
        await kernel.host.put_to_sleep(tree)
        assert await other.ping(1) == 2
        store.full = False
        assert await (await kernel.get_agent(Root, "a")).ping(1) == 2
        store.full = True  # and the kernel closes all the same


async def test_a_root_that_cannot_be_opened_when_due_is_tried_again(
    clock: object,
) -> None:
    async with open_test_kernel(roots=[Root]) as test:
        root = await test.kernel.get_agent(Root, "a")
        await root.later(10, "fired")
        await test.evict([("Root", "a")])
        store: Any = FullIndex()
        store.inner, store.full = test.kernel.store, True
        test.kernel.store = store
        await test.advance(60)
        assert "fired" not in STARTS
        store.full = False
        await test.advance(Limits().backoff_max_s)
    assert STARTS[-1] == "fired"


async def test_a_root_that_cannot_be_left_keeps_no_other_from_being_left(
    tmp_path: Path,
) -> None:
    names = [f"n{i}" for i in range(5)]
    with pytest.raises(ValueError, match="n0 stays"):
        async with open_kernel(
            roots=[Root], storage=f"sqlite:{tmp_path}", limits=Limits(wake_slice=1)
        ) as kernel:
            for name in names:
                await kernel.get_agent(Root, name)
            trees = list(kernel.trees.values())
            leave = kernel.host._leave

            async def failing(tree: Any, *, final: bool) -> Any:
                if tree.key.name == "n0":
                    raise ValueError("n0 stays")
                return await leave(tree, final=final)

            kernel.host._leave = failing  # type: ignore[method-assign]
    assert [tree.key.name for tree in trees if not tree.closed] == ["n0"]


async def test_no_thread_closes_what_a_task_of_the_tree_still_reads(
    tmp_path: Path,
) -> None:
    read: list[Any] = []

    async def last_steps(tree: Tree) -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                for _ in range(50):
                    read.append(tree.db.execute("SELECT count(*) FROM node"))
                    await trio.sleep(0.001)

    async with open_kernel(roots=[Root], storage=f"sqlite:{tmp_path}") as kernel:
        await (await kernel.get_agent(Root, "r")).ping(1)
        (tree,) = kernel.trees.values()
        tree.start_soon(last_steps, tree)
    assert read == [[(1,)]] * 50


async def test_a_root_that_is_not_there_is_not_made_by_looking(clock: object) -> None:
    async with open_test_kernel(roots=[Root]) as test:
        with pytest.raises(NotFound):
            await test.kernel.host.open_root(TreeKey("Root", "x"), create=False)
        assert test.kernel.metrics()["trees"] == 0


@pytest.mark.rule("F-467")
async def test_subscribers_hear_and_cannot_break_anything(clock: object) -> None:
    heard: list[str] = []

    def listen(channel: str, *_: object) -> None:
        heard.append(channel)
        raise ValueError("a bad listener")

    async with open_test_kernel(roots=[Root]) as test:
        end = test.kernel.subscribe("*", listen)
        await test.kernel.get_agent(Root, "a")
        end()
        await test.kernel.get_agent(Root, "b")
    assert heard == ["start", "root:open"] or heard == ["root:open", "start"]


class Slow(Agent):
    """Takes its time to stop."""

    async def hold(self) -> None:
        self.spawn(self.linger)

    async def linger(self) -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(3)


async def test_roots_that_are_slow_to_stop_share_the_time(clock: object) -> None:
    async with open_test_kernel(roots=[Slow]) as test:
        for i in range(20):
            await (await test.kernel.get_agent(Slow, f"s{i}")).hold()
        await test.advance(1)
        began = trio.current_time()
    assert trio.current_time() - began < 5, "not three seconds each"
