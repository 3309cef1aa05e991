"""A child and its parent, and stubs from outside: calls without a gate."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import trio

from culet.kernel import Agent, ChildRef, Request, Response, rpc
from culet.kernel.errors import Deleted, FacetAborted, NotFound, UsageError
from culet.kernel.http import as_request
from culet.kernel.testing import Harness, open_test_kernel
from kernel.agents import node_at, settle, tree_of
from kernel.peers import connect

GATES: list[str] = []


@pytest.fixture(autouse=True)
def fresh() -> None:
    GATES.clear()


class Family(Agent):
    """What all of them do."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.mark = 0

    async def on_before_sub_agent(
        self, request: Request, child: ChildRef
    ) -> Request | Response | None:
        GATES.append(child.name)
        return None

    async def on_request(self, request: Request) -> Response:
        if request.path == "/stream":
            return Response(_parts())
        if request.path == "/fail":
            raise ValueError("no such thing here")
        if request.path == "/odd":
            return "text"  # type: ignore[return-value]
        body = (await request.read()).decode()
        said = [self.name, request.method, request.path, request.query, body]
        return Response.json([*said, request.headers, request.identity])

    async def who(self) -> list[str]:
        return [step.name for step in self.self_path]

    @rpc
    async def note(self, value: int) -> int:
        self.mark += value
        return self.mark

    @rpc
    async def keep(self, value: int) -> None:
        self.set_state({"kept": value})

    async def kept(self) -> Any:
        return self.state

    async def fail(self, text: str) -> None:
        raise ValueError(text)

    async def make(self, cls: str, name: str) -> None:
        await self.dynamic_agents.get(CLASSES[cls], name)

    async def drop(self, cls: str, name: str) -> None:
        await self.dynamic_agents.delete(CLASSES[cls], name)

    async def stop(self, cls: str, name: str) -> None:
        await self.dynamic_agents.abort(CLASSES[cls], name, "stopped")

    async def has(self, cls: str, name: str) -> bool:
        return self.dynamic_agents.has(cls, name)

    async def parent_is(self, cls: str) -> list[str]:
        wanted: Any = CLASSES.get(cls, Agent)
        return await (await self.parent_agent(wanted)).who()

    async def mark_parent(self, cls: str) -> int:
        return await (await self.parent_agent(CLASSES[cls])).note(1)

    async def to_and_fro(self, cls: str, depth: int) -> list[str]:
        """Call the parent, which calls this one, which calls the parent …"""
        if depth == 0:
            return [self.name]
        parent = await self.parent_agent(CLASSES[cls])
        below = await parent.down_again(self.class_name, self.name, cls, depth)
        return [self.name, *below]

    async def down_again(
        self, child: str, name: str, cls: str, depth: int
    ) -> list[str]:
        stub = await self.dynamic_agents.get(CLASSES[child], name)
        return [self.name, *await stub.to_and_fro(cls, depth - 1)]

    async def ask(self, cls: str, url: str, how: dict[str, Any]) -> Any:
        parent = await self.parent_agent(CLASSES[cls])
        response = await parent.fetch(url, **how)
        if isinstance(response.body, bytes):
            return [response.status, response.body.decode()]
        return [response.status, b"".join([p async for p in response.body]).decode()]

    async def ask_by_request(self, cls: str, upgrade: str | None) -> Any:
        headers = {"X-Mine": "yes"} | ({"Upgrade": upgrade} if upgrade else {})
        asked = Request("PUT", "/p/q?x=1&y", headers=headers, body=b"hello", identity=7)
        parent = await self.parent_agent(CLASSES[cls])
        response = await parent.fetch(asked)
        assert isinstance(response.body, bytes)
        return json.loads(response.body)

    async def probe_parent(self, cls: str) -> list[str]:
        return probes(await self.parent_agent(CLASSES[cls]))


async def _parts() -> AsyncIterator[bytes]:
    for part in (b"one ", b"two"):
        yield part
        await trio.lowlevel.checkpoint()


class Top(Family):
    """A root."""


class Mid(Family):
    """A facet."""


class Leaf(Family):
    """A facet below it."""


class Early(Family):
    """Calls its parent while that one awaits its start."""

    async def on_start(self) -> None:
        parent = await self.parent_agent(Top)
        response = await parent.fetch("/early")
        self.first = [await parent.who(), response.status]

    async def first_words(self) -> Any:
        return self.first


CLASSES: dict[str, type[Any]] = {c.__name__: c for c in (Top, Mid, Leaf, Early)}
CHAIN = (("Mid", "m"), ("Leaf", "l"), ("Leaf", "ll"))


def opened(**options: Any) -> Any:
    return open_test_kernel(roots=[Top], facets=[Mid, Leaf, Early], **options)


async def chain(test: Harness, depth: int) -> Any:
    """Return an outside stub of an agent so many hops below the root."""
    stub: Any = await test.kernel.get_agent(Top, "a")
    for cls, name in CHAIN[:depth]:
        stub = await test.kernel.get_sub_agent(stub, CLASSES[cls], name)
    return stub


# ---- parent_agent


@pytest.mark.rule("F-107", "F-108", "F-111", "F-112")
@pytest.mark.parametrize(
    ("depth", "cls", "path"),
    [(1, "Top", ["a"]), (2, "Mid", ["a", "m"]), (3, "Leaf", ["a", "m", "l"])],
)
async def test_the_parent_is_the_one_that_has_it(
    depth: int, cls: str, path: list[str], clock: object
) -> None:
    async with opened() as test:
        stub = await chain(test, depth)

        assert await stub.parent_is(cls) == path
        assert [await stub.mark_parent(cls) for _ in range(3)] == [1, 2, 3]
        assert node_at(test, *CHAIN[: depth - 1]).agent.mark == 3


@pytest.mark.rule("F-109")
async def test_a_root_has_no_parent(clock: object) -> None:
    async with opened() as test:
        with pytest.raises(NotFound, match="not a facet"):
            await (await chain(test, 0)).parent_is("Top")


@pytest.mark.rule("F-110", "F-118")
@pytest.mark.parametrize("wrong", ["Top", "Leaf", "Agent"])
async def test_a_wrong_class_is_named_beside_the_right_one(
    wrong: str, clock: object
) -> None:
    """The root as well: there is no short cut past the parent. Nor is its base it."""
    async with opened() as test:
        with pytest.raises(UsageError) as told:
            await (await chain(test, 2)).parent_is(wrong)

    for word in ("parent_agent", "recorded parent class", "Mid", wrong):
        assert word in str(told.value)


@pytest.mark.rule("F-118")
async def test_the_root_is_reached_by_its_path(clock: object) -> None:
    class Low(Agent):
        async def top(self) -> list[str]:
            root = await self.kernel.get_agent(High, self.parent_path[0].name)
            return [await root.who(), *[s.class_name for s in self.parent_path]]

        async def down(self) -> list[str]:
            return await (await self.dynamic_agents.get(Low, "below")).top()

    class High(Agent):
        async def who(self) -> str:
            return self.name

        async def down(self) -> list[str]:
            return await (await self.dynamic_agents.get(Low, "k")).down()

    async with open_test_kernel(roots=[High], facets=[Low]) as test:
        assert await (await test.kernel.get_agent(High, "h")).down() == [
            "h",
            "High",
            "Low",
        ]


@pytest.mark.rule("F-113")
@pytest.mark.parametrize(("depth", "cls"), [(1, "Top"), (2, "Mid"), (3, "Leaf")])
async def test_fetch_is_the_parents_on_request(
    depth: int, cls: str, clock: object
) -> None:
    async with opened() as test:
        stub = await chain(test, depth)
        by_request = await stub.ask_by_request(cls, None)
        how = {"method": "post", "headers": {"X-Mine": "too"}, "body": b"words"}
        by_url = await stub.ask(cls, "https://any.example/a/b?c=d", how)
        streamed = await stub.ask(cls, "/stream", {})

    name = ["a", "m", "l"][depth - 1]
    body = [name, "PUT", "/p/q", {"x": "1", "y": ""}, "hello", {"x-mine": "yes"}, 7]
    assert by_request == body
    said = [name, "POST", "/a/b", {"c": "d"}, "words", {"x-mine": "too"}, None]
    assert [by_url[0], json.loads(by_url[1])] == [200, said]
    assert streamed == [200, "one two"]
    assert GATES == []


@pytest.mark.rule("F-114")
@pytest.mark.parametrize("value", ["websocket", "WebSocket", "h2c, WEBSOCKET"])
@pytest.mark.parametrize("way", ["request", "headers"])
async def test_fetch_takes_no_websocket(value: str, way: str, clock: object) -> None:
    async with opened() as test:
        stub = await chain(test, 1)
        with pytest.raises(UsageError, match=r"Top.*agent's URL"):
            if way == "request":
                await stub.ask_by_request("Top", value)
            else:
                await stub.ask("Top", "/", {"headers": {"UPGRADE": value}})


async def test_what_on_request_raises_comes_to_the_child(clock: object) -> None:
    async with opened() as test:
        stub = await chain(test, 1)
        with pytest.raises(ValueError, match="no such thing"):
            await stub.ask("Top", "/fail", {})
        with pytest.raises(UsageError, match="returned no Response"):
            await stub.ask("Top", "/odd", {})


async def test_fetch_of_oneself_is_on_request(clock: object) -> None:
    async with opened() as test:
        await chain(test, 0)
        response = await node_at(test).agent.fetch("/x", method="DELETE")

    assert json.loads(bytes(response.body))[:3] == ["a", "DELETE", "/x"]  # type: ignore[arg-type]


def test_a_request_is_taken_as_it_is() -> None:
    request = Request("POST", "/x")
    assert as_request(request) is request
    assert as_request("http://h:1?x=1").raw_path == "/"


@pytest.mark.rule("F-117")
async def test_a_parent_that_is_gone_is_not_made_anew(clock: object) -> None:
    async with opened() as test:
        leaf = await chain(test, 2)
        await leaf.parent_is("Mid")
        target = node_at(test, *CHAIN[:2]).agent
        parent = await target.parent_agent(Mid)
        await (await chain(test, 0)).drop("Mid", "m")
        for call in (parent.who, lambda: parent.fetch("/")):
            with pytest.raises(Deleted):
                await call()

        assert not await (await chain(test, 0)).has("Mid", "m")
        assert GATES == []


@pytest.mark.rule("F-116")
async def test_a_parent_of_the_same_name_is_another_one(clock: object) -> None:
    async with opened() as test:
        leaf = await chain(test, 2)
        old = await node_at(test, *CHAIN[:2]).agent.parent_agent(Mid)
        root = await chain(test, 0)
        await root.drop("Mid", "m")
        fresh = await chain(test, 2)
        with pytest.raises(Deleted):
            await old.who()
        with pytest.raises(Deleted):
            await leaf.who()

        assert await fresh.parent_is("Mid") == ["a", "m"]


@pytest.mark.rule("F-119")
async def test_a_parent_serves_the_child_whose_start_it_awaits(clock: object) -> None:
    async with opened() as test:
        root = await chain(test, 0)
        with trio.fail_after(5):
            await root.make("Early", "e")

        early = await test.kernel.get_sub_agent(root, Early, "e")
        assert await early.first_words() == [["a"], 200]


@pytest.mark.rule("F-120")
@pytest.mark.parametrize(("depth", "cls"), [(1, "Top"), (2, "Mid")])
async def test_calls_to_and_fro_come_to_an_end(
    depth: int, cls: str, clock: object
) -> None:
    async with opened() as test:
        stub = await chain(test, depth)
        with trio.fail_after(5):
            names = await stub.to_and_fro(cls, 5)

    me, above = (["m", "a"], ["l", "m"])[depth - 1]
    assert names == [me, above] * 5 + [me]


# ---- whoever only looks at a stub


def probes(stub: Any) -> list[str]:
    """Look at a stub in the ways that tools do; return what they would find."""
    names = (
        "then", "toJSON", "catch", "hasOwnProperty", "constructor", "prototype",
        "__await__", "__aiter__", "__len__", "__iter__", "__fspath__", "__array__",
        "_repr_html_", "_ipython_display_", "__wrapped__", "__dataclass_fields__",
        "_asdict", "__struct_fields__", "on_start", "sql", "destroy", "_node",
    )  # fmt: skip
    found = [name for name in names if hasattr(stub, name)]
    assert repr(stub).startswith("<stub of")
    assert str(stub) and f"{stub}" and bool(stub)
    assert len({stub, stub}) == 1
    assert copy.copy(stub) is stub and copy.deepcopy([stub])[0] is stub
    with pytest.raises(UsageError, match="in its process"):
        pickle.dumps(stub)
    with pytest.raises(TypeError):
        msgspec.json.encode(stub)
    with pytest.raises(TypeError):
        json.dumps(stub)
    return found


@pytest.mark.rule("F-115", "F-183", "F-189")
async def test_who_only_looks_at_a_stub_calls_nobody(clock: object) -> None:
    async with opened() as test:
        outside = await chain(test, 2)
        root = await chain(test, 0)
        calls: list[str] = []
        test.kernel.subscribe("start", lambda *event: calls.append(event[0]))
        await test.evict([("Top", "a")])

        asleep = probes(outside)  # what class it is by then is not known
        assert asleep == [
            "then",
            "toJSON",
            "catch",
            "hasOwnProperty",
            "constructor",
            "prototype",
        ]
        assert probes(root) == []
        assert calls == []
        await outside.who()
        assert probes(outside) == []
        assert await outside.probe_parent("Mid") == []


# ---- stubs from outside


@pytest.mark.rule("F-181", "F-184", "F-185")
async def test_a_stub_from_outside_makes_its_agent_and_asks_no_gate(
    clock: object,
) -> None:
    async with opened() as test:
        root = await test.kernel.get_agent(Top, "a")
        before = await root.has("Mid", "m")
        stub: Any = await test.kernel.get_sub_agent(root, Mid, "m")
        peer = await connect(test, ("Top", "a"), ("Mid", "m"))
        for _ in range(50):
            await stub.note(1)
        peer.send('{"type":"rpc","id":"1","method":"keep","args":[5]}')
        await settle()

        assert (before, await root.has("Mid", "m")) == (False, True)
        assert await stub.note(0) == 50
        assert await stub.kept() == {"kept": 5}
        assert GATES == ["m"]  # of the socket; calls asked nobody


@pytest.mark.rule("F-182")
async def test_fetch_is_for_children_and_says_so_at_once(clock: object) -> None:
    async with opened() as test:
        root = await test.kernel.get_agent(Top, "a")
        kid = await test.kernel.get_sub_agent(root, Mid, "m")
        inside = tree_of(test).stub(
            node_at(test, CHAIN[0]).slot, node_at(test, CHAIN[0]).kind
        )
        for stub in (root, kid, inside):
            with pytest.raises(UsageError, match="route_sub_agent_request"):
                stub.fetch("/x")  # not even awaited


@pytest.mark.rule("F-186")
async def test_a_stub_outlives_sleep_and_an_abort_that_is_taken_back(
    clock: object,
) -> None:
    async with opened() as test:
        stub = await chain(test, 2)
        root = await chain(test, 0)
        assert await stub.note(1) == 1
        await test.evict([("Top", "a")])
        asleep = await stub.note(1)
        await root.stop("Mid", "m")
        with pytest.raises(FacetAborted, match="stopped"):
            await stub.note(1)
        again = await chain(test, 2)

        assert asleep == 1  # memory went, the agent stayed
        assert await stub.note(1) == 1
        assert await again.note(1) == 2
        await test.evict([("Top", "a"), ("Mid", "m")])
        assert await stub.note(1) == 1, "the abort is forgotten, asleep or awake"


@pytest.mark.rule("F-187", "F-189")
@pytest.mark.parametrize(
    "name", ["on_start", "sql", "destroy", "_pump", "set_state", "parent_agent", "nope"]
)
async def test_only_methods_of_the_class_can_be_called(
    name: str, clock: object
) -> None:
    async with opened() as test:
        stub = await chain(test, 1)
        with pytest.raises(UsageError, match=f"Mid.{name}"):
            getattr(stub, name)


@pytest.mark.rule("F-188")
@pytest.mark.parametrize("wrong", [None, 7, Mid.__new__(Mid), object()])
async def test_what_is_no_class_is_refused(wrong: Any, clock: object) -> None:
    async with opened() as test:
        root = await test.kernel.get_agent(Top, "a")
        with pytest.raises(UsageError, match="pass the class"):
            await test.kernel.get_sub_agent(root, wrong, "m")
        with pytest.raises(UsageError, match="pass the class"):
            await test.kernel.get_agent(wrong, "a")


@pytest.mark.parametrize("wrong", ["", "a\0b", ".", "\ud800", "x" * 300])
async def test_names_that_cannot_be_are_refused_and_make_nothing(
    wrong: str, clock: object
) -> None:
    async with opened() as test:
        root = await test.kernel.get_agent(Top, "a")
        with pytest.raises(UsageError):
            await test.kernel.get_sub_agent(root, Mid, wrong)

        assert len(tree_of(test).nodes) == 1


@pytest.mark.rule("F-190")
async def test_what_a_child_raises_comes_with_its_words(clock: object) -> None:
    async with opened() as test:
        with pytest.raises(ValueError, match="so it was"):
            await (await chain(test, 3)).fail("so it was")


@pytest.mark.rule("F-189")
async def test_an_agent_of_another_tree_is_no_parent(clock: object) -> None:
    async with opened() as test:
        await chain(test, 1)
        inside = tree_of(test).stub(tree_of(test).root_slot, node_at(test).kind)
        for wrong in (inside, "Top", None):
            with pytest.raises(UsageError, match="stub that get_agent"):
                await test.kernel.get_sub_agent(wrong, Mid, "m")
        gone = await test.kernel.get_sub_agent(await chain(test, 1), Leaf, "l")
        await (await chain(test, 0)).drop("Mid", "m")
        with pytest.raises(Deleted):
            await test.kernel.get_sub_agent(gone, Leaf, "x")
