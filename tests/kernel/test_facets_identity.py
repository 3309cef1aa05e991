"""Who an agent is: its name and path, from its constructor on and after every wake."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from culet.kernel import Agent, ChildRef, Connection, Request, Response, Schedule, rpc
from culet.kernel.core.path import build_agent_path, parse_agent_path, path_text
from culet.kernel.errors import Deleted, UsageError
from culet.kernel.testing import Harness, ScriptedChild, open_test_kernel
from kernel.agents import agent_at, node_at, raises, tree_of
from kernel.peers import come, connect, frames_of

NOTES: list[Any] = []
TRIED: list[str] = []


@pytest.fixture(autouse=True)
def fresh() -> None:
    NOTES.clear()
    TRIED.clear()


class Plain(Agent):
    def __init__(self) -> None:
        self.born_as = (self.name, self.class_name, self.self_path, self.parent_path)

    async def on_start(self) -> None:
        await trio.sleep(0.01)
        self.started = True

    def here(self) -> list[Any]:
        """What is known in any call: fails where the start was not over."""
        return [self.started, self.name, [list(s) for s in self.parent_path]]

    @rpc
    async def who(self) -> list[Any]:
        return self.here()

    async def born(self) -> Any:
        return self.born_as

    async def make(self, cls: str, name: str) -> None:
        await self.dynamic_agents.get(CLASSES[cls], name)

    async def keep(self, text: str) -> list[str]:
        self.sql("create table if not exists t (v)")
        if text:
            self.sql("insert into t values (?)", text)
        return [r.v for r in self.sql("select v from t")]

    async def owe(self, seconds: float) -> str:
        return (await self.schedule(seconds, "due")).id

    async def put(self) -> None:
        self.queue.put("due", "once more")

    async def due(self, payload: Any, schedule: Schedule) -> None:
        if payload == "once more" and not TRIED:
            TRIED.append(self.name)
            raise ValueError("not this time")
        NOTES.append(["due", *self.here()])

    async def owed(self) -> int:
        return len(self.schedules.list())

    async def abort(self, cls: str, name: str) -> list[str]:
        receipt = await self.dynamic_agents.abort(CLASSES[cls], name)
        return [path for path, _how in receipt.nodes]

    async def delete(self, cls: str, name: str) -> None:
        await self.dynamic_agents.delete(CLASSES[cls], name)

    async def upgrade(self, name: str) -> None:
        await self.dynamic_agents.upgrade(Plain, name, to=Other)

    async def kids(self) -> list[str]:
        return [f"{c.class_name} {c.name}" for c in self.dynamic_agents.list()]

    async def ask_parent(self) -> list[Any]:
        return await (await self.parent_agent(Top)).who()

    async def on_message(self, connection: Connection, message: str | bytes) -> None:
        NOTES.append(["message", *self.here()])

    async def on_request(self, request: Request) -> Response:
        return Response.json(self.here())

    async def on_before_sub_agent(
        self, request: Request, child: ChildRef
    ) -> Request | Response | None:
        NOTES.append(["gate", *self.here()])
        return None

    async def on_agent_tool_finish(self, run: Any) -> None:
        NOTES.append(["hook", *self.here()])


class Top(Plain):
    async def run(self) -> str:
        script = [["sleep", 5], ["say", "x"]]
        return (await self.run_agent_tool(ScriptedChild, script, detached=True)).run_id


class Other(Plain):
    pass


CLASSES: dict[str, type[Agent]] = {c.__name__: c for c in (Top, Plain, Other)}
Hops = tuple[tuple[str, str], ...]


def opened(**options: Any) -> Any:
    facets = [Top, Plain, Other, ScriptedChild]
    return open_test_kernel(roots=[Top], facets=facets, **options)


async def at(test: Harness, *hops: tuple[str, str]) -> Any:
    """Return a stub of the agent at a path, all of it made if need be."""
    root = await test.kernel.get_agent(Top, "a")
    stub: Any = root
    for number, (cls, name) in enumerate(hops):
        await stub.make(cls, name)
        tree = tree_of(test)
        node = node_at(test, *hops[: number + 1])
        stub = tree.stub(node.slot, node.kind)
    return stub


async def crash(test: Harness) -> None:
    await tree_of(test).durable()
    await test.crash()
    await test.reopen()


# ---- names and paths


@pytest.mark.rule("F-091", "F-092", "F-093", "F-094")
@pytest.mark.parametrize("again", ["first", "evicted", "crashed"])
async def test_name_and_path_are_known_in_the_constructor_and_after_every_wake(
    again: str, clock: object
) -> None:
    async with opened() as test:
        hops = (("Plain", "k"), ("Other", "deep"), ("Plain", "k"))
        await at(test, *hops)
        if again == "evicted":
            await test.evict([("Top", "a")])
        elif again == "crashed":
            await crash(test)
        whole = [("Top", "a"), *hops]
        for depth in range(4):
            path = whole[: depth + 1]
            name, cls, self_path, parent_path = await (
                await at(test, *hops[:depth])
            ).born()
            assert (cls, name) == path[-1]
            assert [tuple(s) for s in self_path] == path
            assert [tuple(s) for s in parent_path] == path[:-1]
            agent = agent_at(test, *hops[:depth])
            assert [tuple(s) for s in agent.self_path] == path
            assert agent.parent_path == agent.self_path[:-1]


@pytest.mark.rule("F-095")
async def test_the_same_name_elsewhere_is_another_agent(clock: object) -> None:
    async with opened() as test:
        paths: list[Hops] = [
            (("Plain", "x"),),
            (("Plain", "x"), ("Plain", "x")),
            (("Plain", "x"), ("Plain", "x"), ("Plain", "x")),
            (("Other", "x"),),
            (("Other", "x"), ("Plain", "x")),
        ]
        for number, hops in enumerate(paths):
            await (await at(test, *hops)).keep(str(number))
        await crash(test)
        for number, hops in enumerate(paths):
            assert await (await at(test, *hops)).keep("") == [str(number)]
        assert len({node_at(test, *hops).slot for hops in paths}) == len(paths)


@pytest.mark.rule("F-096")
async def test_a_facet_may_be_called_like_its_root(clock: object) -> None:
    async with opened() as test:
        kid = await at(test, ("Top", "a"))
        root = await at(test)
        await root.keep("root")
        await kid.keep("kid")
        assert await kid.ask_parent() == [True, "a", []]
        assert await root.abort("Top", "a") == ["Top/a/Top/a"]
        kid = await at(test, ("Top", "a"))
        assert await kid.keep("") == ["kid"]
        peer = await connect(test, ("Top", "a"), ("Top", "a"))
        for node in (node_at(test, ("Top", "a")), node_at(test)):
            assert await tree_of(test).evict(node)
        peer.send("hello")  # wakes the root, then the facet of its name
        await test.advance(0.1)
        assert NOTES[-1] == ["message", True, "a", [["Top", "a"]]]
        assert await kid.ask_parent() == [True, "a", []]


@pytest.mark.rule("F-102")
async def test_a_facet_of_another_class_keeps_what_it_owed_and_says_who_it_is(
    clock: object,
) -> None:
    async with opened() as test:
        root = await at(test)
        kid = await at(test, ("Plain", "k"))
        await kid.owe(100)
        await kid.owe(100_000)
        await root.upgrade("k")
        changed = await at(test, ("Other", "k"))
        assert (await changed.born())[1] == "Other"
        assert [tuple(s) for s in agent_at(test, ("Other", "k")).self_path] == [
            ("Top", "a"), ("Other", "k"),
        ]  # fmt: skip
        assert await changed.owed() == 2
        await test.advance(101)
        assert NOTES == [["due", True, "k", [["Top", "a"]]]]
        await crash(test)
        changed = await at(test, ("Other", "k"))
        assert await changed.owed() == 1
        await changed.owe(100_000)
        assert await changed.owed() == 2, "old and new ones are of one owner"


# ---- paths that look alike


@pytest.mark.rule("F-103", "F-104")
async def test_a_name_cannot_forge_the_path_of_another_agent(clock: object) -> None:
    """Owners are slots, not texts; the texts of two paths differ all the same."""
    async with opened() as test:
        forged, real = ("Plain", "b/Plain/c"), (("Plain", "b"), ("Plain", "c"))
        near: list[Hops] = [
            (forged,), real, (("Plain", "b:c"),), (("Plain", "b"), ("Plain", "cc")),
            (("Plain", "bb"),), (("Other", "b"), ("Plain", "c")), (("Plain", "b%2FPlain"),),
        ]  # fmt: skip
        for hops in near:
            stub = await at(test, *hops)
            await stub.keep("/".join(hops[-1]))
            await stub.owe(100)
        texts = {node_at(test, *hops).path_text() for hops in near}
        assert len(texts) == len(near)
        root = await at(test)
        (told,) = await root.abort(*forged)
        assert told == "Top/a/Plain/b%2FPlain%2Fc"
        await at(test, forged)
        await root.delete("Plain", "b")
        left = [hops for hops in near if hops[0] != ("Plain", "b")]
        assert sorted(await root.kids()) == sorted({" ".join(h[0]) for h in left})
        await test.advance(101)
        assert sorted(n[2] for n in NOTES) == sorted(h[-1][1] for h in left)
        for hops in left:
            assert await (await at(test, *hops)).keep("") == ["/".join(hops[-1])]


_step = st.tuples(st.sampled_from(["A", "B"]), st.text("ab/%:\n\x85 2F", min_size=1))
_path = st.lists(_step, min_size=1, max_size=4)


@pytest.mark.rule("F-103")
@given(_path, _path)
def test_two_paths_never_read_the_same(one: Any, two: Any) -> None:
    assert (path_text(one) == path_text(two)) == (one == two)
    assert path_text(one).splitlines() == [path_text(one)]


@pytest.mark.rule("F-103")
def test_the_address_of_odd_names_is_theirs_alone() -> None:
    steps = [("Root", "u"), ("Kid", "a:b/c"), ("Kid", "100%2F")]
    url = build_agent_path(steps)
    assert url == "/agents/root/u/sub/kid/a%3Ab%2Fc/sub/kid/100%252F"
    parsed = parse_agent_path(url, ["Root", "Kid"])
    assert parsed is not None
    assert [tuple(s) for s in parsed.steps] == steps


# ---- rows that make no sense


@pytest.mark.rule("F-101")
async def test_a_facet_whose_parent_is_lost_harms_nobody_else(clock: object) -> None:
    """The chain of parents is read from rows, each time: there is no stored copy of it."""
    async with opened() as test:
        for name in ("orphan", "good"):
            await (await at(test, ("Plain", name))).owe(10)
        tree = tree_of(test)
        lost = node_at(test, ("Plain", "orphan")).slot
        with tree.transaction():
            tree.db.execute("UPDATE node SET parent = 'nowhere' WHERE name = 'orphan'")
        await crash(test)
        await test.advance(60)
        assert [n[2] for n in NOTES] == ["good"], "what the orphan owes stops nobody"
        root = await at(test)
        assert await root.kids() == ["Plain good"]
        tree = tree_of(test)
        await raises(Deleted, tree.wake, lost)
        assert (await (await at(test, ("Plain", "orphan"))).who())[1] == "orphan"


@pytest.mark.rule("F-101")
async def test_parents_in_a_circle_are_no_parents(clock: object) -> None:
    async with opened() as test:
        for name in ("x", "y", "good"):
            await (await at(test, ("Plain", name))).owe(10)
        tree = tree_of(test)
        slots = [node_at(test, ("Plain", name)).slot for name in ("x", "y")]
        with tree.transaction():
            for one, other in (slots, slots[::-1]):
                sql = "UPDATE node SET parent = ? WHERE slot = ?"
                tree.db.execute(sql, (other, one))
        await crash(test)
        await test.advance(60)
        assert [n[2] for n in NOTES] == ["good"]
        tree = tree_of(test)
        for slot in slots:
            error = await raises(Deleted, tree.wake, slot)
            assert "lead to no root" in str(error)
        assert await (await at(test)).kids() == ["Plain good"]


@pytest.mark.rule("F-093")
async def test_the_deepest_facet_wakes_with_its_parents_asleep(clock: object) -> None:
    async with opened() as test:
        hops = (("Plain", "1"), ("Plain", "2"), ("Plain", "3"))
        deepest = await at(test, *hops)
        await deepest.owe(10)
        await test.evict([("Top", "a")])
        await test.advance(11)
        assert NOTES == [
            ["due", True, "3", [["Top", "a"], ["Plain", "1"], ["Plain", "2"]]]
        ]


# ---- without a kernel


@pytest.mark.rule("F-105")
def test_an_agent_that_no_kernel_made_has_no_name() -> None:
    class Bare(Agent):
        pass

    made = Bare()
    for read in (
        lambda: made.name, lambda: made.parent_path, lambda: made.class_name,
        lambda: made.sql("select 1"), lambda: made.dynamic_agents, lambda: made.sockets,
    ):  # fmt: skip
        with pytest.raises(UsageError, match="this Bare was not made by a kernel"):
            read()


# ---- every way in


@pytest.mark.rule("F-106", "F-246")
@pytest.mark.parametrize(
    "way",
    [
        "call",
        "parent",
        "schedule",
        "queue",
        "message",
        "rpc",
        "request",
        "gate",
        "hook",
    ],
)
async def test_every_way_in_starts_the_agent_first(way: str, clock: object) -> None:
    """The kernel sleeps or dies; then one thing comes, and finds the agent as it was."""
    async with opened() as test:
        root = await at(test)
        kid = await at(test, ("Plain", "k"))
        expected = [True, "k", [["Top", "a"]]]
        peer = None
        if way in {"message", "rpc"}:
            peer = await connect(test, ("Top", "a"), ("Plain", "k"))
        elif way == "schedule":
            await kid.owe(100)
        elif way == "queue":
            await kid.put()
        elif way == "hook":
            await root.run()
        if way in {"queue", "hook"}:
            await crash(test)
        else:
            for node in (node_at(test, ("Plain", "k")), node_at(test)):
                assert await tree_of(test).evict(node)
        match way:
            case "call":
                assert await kid.who() == expected
            case "parent":
                assert await kid.ask_parent() == [True, "a", []]
            case "schedule" | "queue" | "hook":
                await test.advance(101)
                if way == "hook":
                    expected = [True, "a", []]
                assert [[way if way == "hook" else "due", *expected]] == NOTES
            case "message":
                assert peer is not None
                peer.send("x")
                await test.advance(0.1)
                assert [["gate", True, "a", []], ["message", *expected]] == NOTES
            case "rpc":
                assert peer is not None
                peer.rpc("who")
                await test.advance(0.1)
                (answer,) = frames_of(peer, "rpc")
                assert answer["result"] == expected
            case "request" | "gate":
                visit = await come(test, ("Top", "a"), ("Plain", "k"))
                assert NOTES == [["gate", True, "a", []]]
                assert not isinstance(visit, Response)
                response = await visit.handle()
                assert response.status == 200
                assert response.body == b'[true,"k",[["Top","a"]]]'
