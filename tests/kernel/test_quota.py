"""Quotas of one tree: at the bound all is well, one past it is refused and says why."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio

from culet.kernel import Agent, Chunk, Limits, Turn
from culet.kernel.errors import CapacityError, StorageFull
from culet.kernel.testing import Harness, open_test_kernel
from kernel.agents import agent_at, node_at, raises, rows, settle, tree_of
from kernel.peers import connect

PAGE = 1024
STORES = ("memory:", "sqlite")


class Kid(Agent):
    resumable = True

    async def ping(self) -> str:
        return self.name

    async def fill(self, pages: int) -> int:
        """Write that many kilobytes, one row each; return how many rows there are."""
        self.sql("create table if not exists t (v)")
        for _ in range(pages):
            self.sql("insert into t values (zeroblob(900))")
        return int(self.sql("select count(*) as n from t")[0].n)

    async def fill_at_once(self, pages: int) -> None:
        self.sql("create table if not exists t (v)")
        with self.transaction():
            for _ in range(pages):
                self.sql("insert into t values (zeroblob(900))")

    async def empty(self) -> None:
        self.sql("delete from t")

    async def put(self, text: str) -> None:
        self.set_state(text)

    async def make(self, name: str) -> None:
        await self.dynamic_agents.get(Kid, name)

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        for n in range(turn.input):
            yield {"type": "text-delta", "id": "t", "delta": f"{n}" * 500}
            await trio.sleep(0.1)
        await trio.sleep_forever()


class Top(Kid):
    async def use(self, name: str, method: str, args: list[Any]) -> Any:
        kid = await self.dynamic_agents.get(Kid, name)
        return await getattr(kid, method)(*args)

    async def drop(self, name: str) -> None:
        await self.dynamic_agents.delete(Kid, name)

    async def run(self, run_id: str, chunks: int = 0) -> list[Any]:
        run = await self.run_agent_tool(Kid, chunks, run_id=run_id, detached=True)
        return [run.status, run.reason, run.error]

    async def stop(self, run_id: str) -> Any:
        return (await self.runs.cancel(run_id)).status

    async def ends(self) -> list[Any]:
        return [[r.run_id, r.status] for r in self.runs.list()]


def opened(storage: str = "memory:", **limits: Any) -> Any:
    return open_test_kernel(
        roots=[Top], facets=[Kid], storage=storage, limits=Limits(**limits)
    )


async def top(test: Harness) -> Top:
    return await test.kernel.get_agent(Top, "a")


# ---- facets


@pytest.mark.limit("facets_per_tree")
async def test_facets_of_a_tree_are_bounded_awake_or_not_at_any_depth(
    clock: object,
) -> None:
    async with opened(facets_per_tree=3) as test:
        root = await top(test)
        await root.make("one")
        await root.use("one", "make", ["below"])
        assert await root.run("r1") == ["running", None, None]
        await settle()
        await test.evict([("Top", "a"), ("Kid", "one"), ("Kid", "below")])
        for refused in (root.make("two"), root.use("one", "make", ["three"])):
            with pytest.raises(CapacityError, match=r"facets_per_tree = 3.*delete"):
                await refused
        status, reason, error = await root.run("r2")
        assert [status, reason] == ["error", "capacity"]
        assert "limits.facets_per_tree = 3" in error
        await root.make("one")
        assert await root.run("r1") == ["running", None, None], "what exists is no more"
        tree = tree_of(test)
        assert rows(tree, "SELECT count(*) FROM node") == [(4,)]
        await root.stop("r1")
        await root.drop("r1")
        await root.make("two")
        await raises(CapacityError, root.make, "three")


async def test_the_count_is_right_after_failures_deletes_and_a_crash(
    clock: object,
) -> None:
    async with opened(facets_per_tree=5) as test:
        root = await top(test)
        for n in range(5):
            await root.make(f"k{n}")
        for _ in range(20):  # now more were born than may be
            await root.drop("k0")
            await root.make("k0")
            await raises(CapacityError, root.make, "one more")
        await test.crash()
        await test.reopen()
        root = await top(test)
        await raises(CapacityError, root.make, "one more")
        await root.drop("k1")
        await root.make("one more")
        await raises(CapacityError, root.make, "and more")


@pytest.mark.limit("children_per_agent")
async def test_children_of_an_agent_are_bounded_and_it_says_which(
    clock: object,
) -> None:
    async with opened(children_per_agent=2) as test:
        root = await top(test)
        await root.make("one")
        await root.make("two")
        with pytest.raises(
            CapacityError,
            match=r"^Top/a has 2 children \(limits.children_per_agent = 2",
        ):
            await root.make("three")
        await root.use("one", "make", ["below"])


async def test_one_more_of_ten_thousand_facets_costs_no_count(clock: object) -> None:
    async with opened(facets_per_tree=10) as test:
        root = await top(test)
        for n in range(10):
            await root.make(f"k{n}")
        asked: list[str] = []
        tree = tree_of(test)
        real = tree.quotas._count

        def counting() -> int:
            asked.append("count")
            return real()

        tree.quotas._count = counting  # type: ignore[method-assign]
        await root.make("k0")
        assert not asked, "to get what is there counts nothing"


# ---- sockets


@pytest.mark.limit("sockets_per_tree")
async def test_sockets_of_a_tree_are_bounded_and_one_that_leaves_makes_room(
    clock: object,
) -> None:
    async with opened(sockets_per_tree=2) as test:
        await (await top(test)).make("k")
        one = await connect(test, ("Top", "a"))
        await connect(test, ("Top", "a"), ("Kid", "k"))
        with pytest.raises(CapacityError, match=r"sockets_per_tree = 2"):
            await connect(test, ("Top", "a"), ("Kid", "k"))
        assert tree_of(test).sockets.count == 2
        one.connection.closed(1000, "", was_clean=True)
        await connect(test, ("Top", "a"))
        await raises(CapacityError, connect, test, ("Top", "a"))


# ---- bytes


def where(storage: str, tmp_path: Any) -> str:
    return storage if storage == "memory:" else f"sqlite:{tmp_path}"


def stored(test: Harness) -> int:
    """Return the bytes of all files of the tree, as the store itself tells them."""
    tree = tree_of(test)
    sizes = [
        tree.store.agent(slot).size_bytes for slot in tree.store.slots() - {"tree"}
    ]
    return sum(sizes) + int(tree.db.execute("PRAGMA page_count")[0][0]) * PAGE


async def fill_up(root: Top, name: str, at_most: int = 2000) -> str:
    """Write until the store refuses; return what it says."""
    for _ in range(at_most):
        try:
            await root.use(name, "fill", [1])
        except StorageFull as error:
            return str(error)
    raise AssertionError("never full")


@pytest.mark.limit("tree_bytes")
@pytest.mark.parametrize("storage", STORES)
async def test_a_tree_takes_its_bytes_and_not_one_page_more(
    storage: str, clock: object, tmp_path: Any
) -> None:
    most = 400 * PAGE
    async with opened(where(storage, tmp_path), tree_bytes=most) as test:
        root = await top(test)
        said = await fill_up(root, "k")
        await test.advance(1)
        assert most - 30 * PAGE <= stored(test) <= most + 4 * PAGE
        assert f"limits.tree_bytes = {most}" in said
        assert "delete" in said
        with pytest.raises(StorageFull, match=r"limits\.tree_bytes"):
            await root.use("other", "fill", [20])
        with pytest.raises(StorageFull, match=r"limits\.tree_bytes"):
            await root.use("k", "fill_at_once", [100])
        assert await root.use("k", "ping", []) == "k", "reading goes on"
        await root.use("k", "empty", [])
        await test.advance(1)
        assert await root.use("k", "fill", [100]) == 100, "free pages are used"
        await root.drop("k")
        await test.advance(1)
        assert await root.use("k", "fill", [100]) == 100, "a deleted file makes room"


@pytest.mark.parametrize("storage", STORES)
async def test_a_full_tree_is_full_after_it_was_opened_again(
    storage: str, clock: object, tmp_path: Any
) -> None:
    most = 400 * PAGE
    async with opened(where(storage, tmp_path), tree_bytes=most) as test:
        root = await top(test)
        await fill_up(root, "k")
        await test.crash()
        await test.reopen()
        root = await top(test)
        await fill_up(root, "k", 40)
        assert stored(test) <= most + 6 * PAGE
        await root.drop("k")
        await test.advance(1)
        await root.use("other", "fill", [100])


@pytest.mark.parametrize("storage", STORES)
async def test_files_of_facets_that_sleep_count_after_it_was_opened_again(
    storage: str, clock: object, tmp_path: Any
) -> None:
    most = 600 * PAGE
    async with opened(where(storage, tmp_path), tree_bytes=most) as test:
        root = await top(test)
        for n in range(5):
            await root.use(f"k{n}", "fill", [90])
        await test.crash()
        await test.reopen()
        root = await top(test)
        await fill_up(root, "another", 120)
        assert stored(test) <= most + 6 * PAGE


@pytest.mark.parametrize("storage", STORES)
async def test_a_full_tree_makes_no_more_files(
    storage: str, clock: object, tmp_path: Any
) -> None:
    most = 400 * PAGE
    async with opened(where(storage, tmp_path), tree_bytes=most) as test:
        root = await top(test)
        await fill_up(root, "k")
        await test.advance(1)
        files = len(tree_of(test).store.slots())
        for n in range(20):  # a state would fit into what a file is born with
            with pytest.raises(StorageFull, match=r"a new file does not fit"):
                await root.use(f"new{n}", "put", ["x"])
        assert len(tree_of(test).store.slots()) == files
        await root.use("k", "put", ["x"])


async def test_many_files_together_stop_at_the_same_bound(clock: object) -> None:
    most = 600 * PAGE
    async with opened(tree_bytes=most) as test:
        root = await top(test)
        for n in range(5):
            await root.use(f"k{n}", "fill", [10])
        full = set()
        for turn in range(1000):
            name = f"k{turn % 5}"
            try:
                await root.use(name, "fill", [2])
            except StorageFull:
                full.add(name)
            if len(full) == 5:
                break
        assert len(full) == 5
        assert stored(test) <= most + 10 * PAGE, "by what one record holds, at most"


@pytest.mark.limit("database_pages")
async def test_the_file_of_an_agent_is_bounded_and_it_says_so(clock: object) -> None:
    async with opened(database_pages=100) as test:
        root = await top(test)
        said = await fill_up(root, "k")
        assert "limits.database_pages = 100" in said
        assert node_at(test, ("Kid", "k")).db.size_bytes <= 100 * PAGE
        with pytest.raises(StorageFull, match=r"limits\.database_pages = 100"):
            await root.use("other", "fill_at_once", [200])
        await root.use("other", "fill", [20])


@pytest.mark.parametrize("storage", STORES)
async def test_cancel_abort_and_delete_work_on_a_full_tree(
    storage: str, clock: object, tmp_path: Any
) -> None:
    async with opened(where(storage, tmp_path), tree_bytes=500 * PAGE) as test:
        root = await top(test)
        for run_id in ("r1", "r2", "r3"):
            await root.run(run_id, 3)
        await test.advance(1)
        await fill_up(root, "k")
        receipt = await agent_at(test).dynamic_agents.abort(Kid, "r3")
        assert [how for _path, how in receipt.nodes] == ["stopped"]
        assert await root.stop("r1") == "aborted"
        await root.drop("r2")
        assert dict(await root.ends())["r2"] == "interrupted"
        await root.drop("k")
        await test.advance(5)
        tree = tree_of(test)
        assert rows(tree, "SELECT count(*) FROM node WHERE state = 'gone'") == [(0,)]
        assert await root.use("new", "fill", [50]) == 50


async def test_what_a_turn_says_beyond_the_quota_ends_it_truly(clock: object) -> None:
    async with opened(tree_bytes=400 * PAGE) as test:
        root = await top(test)
        await root.run("r1", 100_000)
        await test.advance(120)
        assert await root.ends() == [["r1", "error"]]
        run = agent_at(test).runs.get("r1")
        assert "limits.tree_bytes" in str(run.error), json.dumps(run.error)


def test_the_defaults_fit_together() -> None:
    limits = Limits()
    assert limits.children_per_agent <= limits.facets_per_tree
    assert limits.sockets_per_tree <= limits.connections
    assert limits.database_pages * PAGE <= limits.tree_bytes
