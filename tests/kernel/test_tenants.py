"""Two tenants of one kernel: one takes all that it may have, the other has its whole share.

The one is refused by an error that names it and the bound, goes on with what it has, and
gets room again by giving some back. The other neither is refused nor waits longer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import trio

from culet.kernel import Agent, Chunk, Limits, Turn
from culet.kernel.core.path import ParsedPath, PathStep
from culet.kernel.errors import CapacityError, StorageFull
from culet.kernel.http import Request, Response
from culet.kernel.testing import Harness, open_test_kernel
from culet.kernel.visits import visit
from kernel.peers import RecordingPeer

pytestmark = pytest.mark.rule("F-41", "I-10", "I-43")
SHARE = 5
RANG: list[tuple[float, str]] = []


class Kid(Agent):
    resumable = True

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        yield {"type": "text-delta", "id": "t", "delta": "x"}
        await trio.sleep_forever()

    async def write(self) -> None:
        self.sql("create table if not exists t (v)")
        self.sql("insert into t values (zeroblob(900))")

    async def hold(self) -> None:
        """Write, and be at work until it is stopped."""
        await self.write()
        self.spawn(trio.sleep_forever)


class Tenant(Agent):
    async def ping(self) -> str:
        return self.name

    async def child(self, n: int) -> None:
        await self.dynamic_agents.get(Kid, f"k{n}")

    async def no_child(self, n: int) -> None:
        await self.dynamic_agents.delete(Kid, f"k{n}")

    async def schedule_one(self, n: int) -> None:
        await self.schedule(3600 + n, "ring")

    async def queue_one(self, n: int) -> None:
        self.queue.put("slow", n)

    async def unqueue(self, n: int) -> None:
        self.queue.clear()
        for found in self.schedules.list():
            self.schedules.cancel(found.id)

    async def slow(self, payload: Any, _schedule: Any) -> None:
        await trio.sleep_forever()

    async def ring(self, payload: Any, _schedule: Any) -> None:
        await trio.sleep(1)
        RANG.append((trio.current_time(), self.name))

    async def plan(self, count: int) -> None:
        for _ in range(count):
            await self.schedule(10, "ring")

    async def run(self, n: int) -> None:
        run = await self.run_agent_tool(Kid, n, run_id=f"r{n}", detached=True)
        if run.reason == "capacity":
            raise CapacityError(run.error or "")
        assert run.status == "running"

    async def no_run(self, n: int) -> None:
        await self.runs.cancel(f"r{n}")

    async def fill(self, n: int) -> None:
        self.sql("create table if not exists t (v)")
        self.sql("insert into t values (zeroblob(2000))")

    async def empty(self, n: int) -> None:
        self.sql("delete from t")

    async def hold(self, n: int) -> None:
        kid = await self.dynamic_agents.get(Kid, f"k{n}")
        await kid.hold()

    async def follow(self, n: int) -> None:
        """Wait for more of the feed, in a task of its own, until it is refused."""
        over: list[BaseException] = []

        async def read() -> None:
            try:
                async for _ in self.runs.feed(follow=True):
                    pass
            except CapacityError as error:
                over.append(error)

        self.spawn(read)
        for _ in range(20):
            await trio.lowlevel.checkpoint()
        if over:
            raise over[0]


def opened(**limits: Any) -> Any:
    return open_test_kernel(roots=[Tenant], facets=[Kid], limits=Limits(**limits))


Use = Callable[[Harness, str, int], Awaitable[Any]]


def by(method: str) -> Use:
    """Return a use that is a call of that method of the tenant."""

    async def use(test: Harness, name: str, n: int) -> None:
        tenant = await test.kernel.get_agent(Tenant, name)
        await getattr(tenant, method)(n)

    return use


PEERS: dict[str, list[RecordingPeer]] = {}


async def socket(test: Harness, name: str, n: int) -> None:
    path = ParsedPath(PathStep("Tenant", name), (), "/")
    found = await visit(test.kernel, path, Request("GET", "/x", path="/"))
    assert not isinstance(found, Response)
    peer = RecordingPeer(found.gate)
    peer.connection = found.connect(peer, f"c{n}")
    await peer.connection.opened()
    PEERS.setdefault(name, []).append(peer)


async def no_socket(_test: Harness, name: str, _n: int) -> None:
    peer = PEERS[name].pop()
    assert peer.connection is not None
    peer.connection.closed(1000, "", was_clean=True)


# the bound: its value, how it is used, how some of it is given back
QUOTAS: dict[str, tuple[int, Use, Use | None]] = {
    "facets_per_tree": (SHARE, by("child"), by("no_child")),
    "children_per_agent": (SHARE, by("child"), by("no_child")),
    "schedules_per_agent": (SHARE, by("schedule_one"), by("unqueue")),
    "schedules_per_agent, queued": (SHARE, by("queue_one"), by("unqueue")),
    "sockets_per_tree": (SHARE, socket, no_socket),
    "runs_per_tree": (SHARE, by("run"), by("no_run")),
    "database_pages": (60, by("fill"), by("empty")),
    "tree_bytes": (300 << 10, by("fill"), by("empty")),
    "feed_readers": (SHARE, by("follow"), None),
}  # fmt: skip


@pytest.mark.parametrize("name", QUOTAS)
async def test_one_that_takes_all_is_refused_by_name_and_the_other_has_its_share(
    name: str, clock: object
) -> None:
    PEERS.clear()
    limit = name.partition(",")[0]
    most, use, give_back = QUOTAS[name]
    async with opened(**{limit: most}) as test:

        async def take_all(tenant: str) -> tuple[int, Exception]:
            """Use it until it is refused; return how often it was granted, and how."""
            for n in range(1, 1000):
                try:
                    await use(test, tenant, n)
                except (CapacityError, StorageFull) as error:
                    return n - 1, error
            raise AssertionError("there is no bound")

        granted, refused = await take_all("greedy")
        assert f"limits.{limit}" in str(refused)
        for _ in range(3):  # and again, whatever it does
            with pytest.raises((CapacityError, StorageFull)):
                await use(test, "greedy", granted + 1)

        share, same = await take_all("modest")
        assert share == granted, "the other has as much"
        assert "greedy" not in str(same), "each is told of itself"
        assert type(same) is type(refused)

        if give_back is not None:
            await give_back(test, "greedy", 1)
            await test.advance(1)
            await use(test, "greedy", granted + 1)
        for tenant in ("greedy", "modest"):
            stub = await test.kernel.get_agent(Tenant, tenant)
            assert await stub.ping() == tenant


async def test_open_files_of_one_tenant_leave_the_other_its_own(clock: object) -> None:
    async with opened(open_databases=4) as test:
        for n in range(12):  # all of them are at work, so none of them rests
            await by("hold")(test, "greedy", n)
        for n in range(3):
            await by("fill")(test, "modest", n)
            await by("hold")(test, "modest", n)
        assert await (await test.kernel.get_agent(Tenant, "modest")).ping() == "modest"


async def ended(crowd: int, few: int) -> tuple[float, float]:
    """Let so many calls of the one and of the other be due at once, a second's work each.

    Returns after how many seconds of virtual time each had all of its own done.
    """
    RANG.clear()
    async with opened() as test:
        greedy = await test.kernel.get_agent(Tenant, "greedy")
        modest = await test.kernel.get_agent(Tenant, "modest")
        await greedy.plan(crowd)
        await modest.plan(few)
        begin = trio.current_time()
        await test.advance(200)
        times = {name: [at - begin for at, who in RANG if who == name]
                 for name in ("greedy", "modest")}  # fmt: skip
    assert (len(times["greedy"]), len(times["modest"])) == (crowd, few)
    return max(times["greedy"], default=0.0), max(times["modest"])


async def test_what_is_due_of_one_does_not_wait_for_a_crowd_of_the_other(
    clock: object,
) -> None:
    _, alone = await ended(0, 20)
    crowded, beside = await ended(150, 20)
    assert beside <= alone * 1.1, (alone, beside, crowded)
    assert crowded > beside, "its own calls go one by one"
