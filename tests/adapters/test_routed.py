"""RoutedAgents: a durable catalogue, and the way to peers that are roots of their own."""

from __future__ import annotations

import ast
import contextlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

import culet.kernel
from culet.adapters import RoutedAgent, RoutedAgents, routed
from culet.kernel import Agent, ChildRef, Forward, Request, Response, Retry, rpc
from culet.kernel.core.path import parse_agent_path
from culet.kernel.errors import CapacityError, CuletError, Deleted, NotFound, UsageError
from culet.kernel.ports import TreeKey
from culet.kernel.testing import Harness, open_test_kernel
from culet.kernel.visits import Visit, visit
from culet.web import connect
from web import serving as kit

GATES: list[str] = []


@pytest.fixture(autouse=True)
def fresh() -> None:
    GATES.clear()


class Note(Agent):
    """A facet of a chat."""

    async def on_request(self, request: Request) -> Response:
        return Response(f"note {self.name} {request.url}")


class Chat(Agent):
    """A peer."""

    initial_state = {"said": 0}

    async def on_before_sub_agent(
        self, request: Request, child: ChildRef
    ) -> Request | Response | None:
        GATES.append(child.name)
        return Response("no", 403) if child.name == "secret" else None

    @rpc
    async def say(self, text: str) -> int:
        self.sql("CREATE TABLE IF NOT EXISTS said (text TEXT)")
        self.sql("INSERT INTO said VALUES (?)", text)
        count = int(self.sql("SELECT count(*) AS n FROM said")[0].n)
        self.set_state({"said": count})
        return count

    async def who(self) -> str:
        return self.name

    async def push(self, hub: str, id: str, seq: int, title: str) -> bool:  # noqa: A002
        to = await self.kernel.get_agent(Hub, hub)
        return await to.set_metadata(id, {"title": title}, seq=seq, peer=self.name)

    async def end_me(self, hub: str, id: str) -> None:  # noqa: A002
        await (await self.kernel.get_agent(Hub, hub)).delete(id)

    async def on_request(self, request: Request) -> Response:
        body = (await request.read()).decode()
        return Response.json([self.name, request.url, body, request.identity])


class Hub(RoutedAgents):
    """One user's chats."""

    agent_class = Chat
    segment = "chats"

    @rpc
    async def new(self, id: str) -> str:  # noqa: A002
        return (await self.add(id)).name

    async def entry(self, id: str) -> RoutedAgent | None:  # noqa: A002
        return self.get(id)

    async def page(self, limit: int, after: str | None) -> list[RoutedAgent]:
        return self.list(limit=limit, after=after)

    async def owed(self) -> int:
        return len(self.schedules.list())

    async def search(self, words: str) -> list[str]:
        query = (
            "SELECT id FROM routed_agents"
            " WHERE json_extract(metadata, '$.title') LIKE ? ORDER BY id"
        )
        return [row.id for row in self.sql(query, f"%{words}%")]

    async def on_request(self, request: Request) -> Response:
        return Response(f"hub {self.name} {request.path}")


class Suicidal(Agent):
    """Has itself deleted while it starts."""

    async def on_start(self) -> None:
        await (await self.kernel.get_agent(Hub, "alice")).delete("suicidal")


class Strict(RoutedAgents):
    """Lets only its owner through, keeps three."""

    agent_class = Chat
    max_agents = 3
    max_metadata_bytes = 100

    async def on_forward(self, request: Request) -> Forward | Response | None:
        if request.identity != self.name:
            return Response("not yours", 403)
        return await super().on_forward(request)


class Loop(RoutedAgents):
    """A hub of hubs."""


Loop.agent_class = Loop
ROOTS: Any = [Hub, Strict, Loop, Chat, Suicidal]


def opened(**options: Any) -> Any:
    return open_test_kernel(roots=ROOTS, facets=[Note], **options)


async def hub_of(test: Harness, name: str = "alice") -> Hub:
    return await test.kernel.get_agent(Hub, name)


async def come(test: Harness, url: str, identity: Any = None) -> Visit | Response:
    path = parse_agent_path(url, test.kernel.classes.known)
    assert path is not None
    asked = Request("GET", url, identity=identity)
    return await visit(test.kernel, path, asked)


async def got(test: Harness, url: str, identity: Any = None) -> tuple[int, str]:
    found = await come(test, url, identity)
    answer = await found.handle() if isinstance(found, Visit) else found
    assert isinstance(answer.body, bytes)
    return answer.status, answer.body.decode()


def peers(test: Harness) -> set[str]:
    """Return the names of all chats that have a folder or are open."""
    store: Any = test.kernel.store
    entries = {e.key for e in store.roots()}
    return {k.name for k in entries | set(test.kernel.trees) if k.class_name == "Chat"}


# ---- the catalogue


async def test_an_entry_is_added_read_and_deleted(clock: object) -> None:
    async with opened() as test:
        hub = await hub_of(test)
        assert await hub.entry("c1") is None
        assert await hub.page(10, None) == []
        made = await hub.add("c1", {"title": "first"})
        again = await hub.add("c1", {"title": "other"})
        assert again == made == await hub.entry("c1")
        assert (made.id, made.metadata, made.seq) == ("c1", {"title": "first"}, None)
        chat = await hub.agent("c1")
        assert await chat.say("hello") == 1
        await hub.delete("c1")
        await hub.delete("c1")
        assert await hub.entry("c1") is None
        with pytest.raises(NotFound, match="no agent 'c1'"):
            await hub.agent("c1")
        with pytest.raises(Deleted):
            await chat.say("more")
        assert peers(test) == set()
        assert await hub.owed() == 0


async def test_a_hub_that_is_only_read_writes_nothing(clock: object) -> None:
    async with opened() as test:
        hub = await hub_of(test)
        await hub.delete("c")
        assert await hub.set_metadata("c", 1, seq=1) is False
        assert await hub.page(1, None) == []
        node = test.find([("Hub", "alice")])
        assert node is not None and not node.db.exists


async def test_the_catalogue_is_durable_and_nobody_is_woken_for_it(
    clock: object,
) -> None:
    async with opened() as test:
        hub = await hub_of(test)
        for n in range(5):
            await hub.add(f"c{n}", {"title": f"about {'cats' if n % 2 else 'dogs'}"})
        await test.crash()
        await test.reopen()
        hub = await hub_of(test)
        assert [e.id for e in await hub.page(10, None)] == [f"c{n}" for n in range(5)]
        assert await hub.search("cats") == ["c1", "c3"]
        assert peers(test) == set()


async def test_a_thousand_entries_come_in_pages(clock: object) -> None:
    async with opened() as test:
        hub = await hub_of(test)
        for n in range(1000):
            await hub.add(f"c{n:04}", n)
        seen: list[Any] = []
        after = None
        while page := await hub.page(64, after):
            seen += page
            after = page[-1].id
            await hub.delete(after)  # the next page begins behind it all the same

    assert [e.metadata for e in seen] == list(range(1000))
    assert len({e.name for e in seen}) == 1000


@pytest.mark.parametrize("limit", [0, -1, 10_001])
async def test_pages_are_bounded(limit: int, clock: object) -> None:
    async with opened() as test:
        with pytest.raises(UsageError, match="limit"):
            await (await hub_of(test)).page(limit, None)


@pytest.mark.parametrize("wrong", ["", ".", "..", "a\0b", "x" * 257, "\ud800"])
async def test_ids_that_cannot_be_in_a_path_are_refused(
    wrong: str, clock: object
) -> None:
    async with opened() as test:
        hub = await hub_of(test)
        with pytest.raises(UsageError):
            await hub.add(wrong)
        assert await hub.page(1, None) == []


async def test_number_and_size_are_bounded(clock: object) -> None:
    async with opened() as test:
        hub = await test.kernel.get_agent(Strict, "s")
        for n in range(3):
            await hub.add(f"c{n}")
        with pytest.raises(CapacityError, match="has 3 agents"):
            await hub.add("c3")
        with pytest.raises(UsageError, match="more than 100"):
            await hub.set_metadata("c0", "x" * 200, seq=1)
        with pytest.raises(UsageError, match="62 bits"):
            await hub.set_metadata("c0", 1, seq=1 << 63)
        await hub.delete("c0")
        await hub.add("c3")


async def test_peers_are_no_facets_and_hubs_share_none(clock: object) -> None:
    async with opened() as test:
        one, two = await hub_of(test, "alice"), await hub_of(test, "bob")
        for hub in (one, two):
            await hub.add("c1")
        first, second = await one.agent("c1"), await two.agent("c1")
        assert [await first.say("x"), await first.say("y")] == [1, 2]
        assert await second.say("z") == 1
        assert await first.who() != await second.who()
        await one.delete("c1")
        assert await second.say("still here") == 2
        assert {key.class_name for key in test.kernel.trees} >= {"Hub", "Chat"}


async def test_an_id_that_is_added_anew_has_a_new_peer(clock: object) -> None:
    async with opened() as test:
        hub = await hub_of(test)
        await hub.add("c")
        await (await hub.agent("c")).say("secret")
        await hub.delete("c")
        await hub.add("c")
        assert await (await hub.agent("c")).say("fresh") == 1


# ---- metadata


async def test_pushes_that_come_late_or_twice_are_refused(clock: object) -> None:
    async with opened() as test:
        hub = await hub_of(test)
        assert await hub.set_metadata("c", {"n": 0}, seq=0) is False
        await hub.add("c", {"n": -1})
        took = [
            await hub.set_metadata("c", {"n": seq}, seq=seq)
            for seq in (5, 5, 4, 6, -1, 6, 9)
        ]
        entry = await hub.entry("c")
        assert took == [True, False, False, True, False, False, True]
        assert entry is not None and (entry.metadata, entry.seq) == ({"n": 9}, 9)
        await hub.delete("c")
        assert await hub.set_metadata("c", {"n": 10}, seq=10) is False
        await hub.add("c")
        assert await hub.set_metadata("c", None, seq=-3) is True


async def test_concurrent_pushes_are_one_after_the_other(clock: object) -> None:
    """Whatever the order: those that were taken rise, and the last one stands."""
    async with opened() as test:
        hub = await hub_of(test)
        await hub.add("c")
        took: list[int] = []

        async def push(seq: int) -> None:
            if await hub.set_metadata("c", {"seq": seq}, seq=seq):
                took.append(seq)

        async with trio.open_nursery() as nursery:
            for seq in [*range(50), *range(50)]:
                nursery.start_soon(push, seq)
        entry = await hub.entry("c")

    assert entry is not None and entry.seq == 49 and entry.metadata == {"seq": 49}
    assert len(took) == len(set(took)) and max(took) == 49


async def test_a_push_of_a_former_peer_is_not_taken_for_the_new_one(
    clock: object,
) -> None:
    async with opened() as test:
        hub = await hub_of(test)
        old = await hub.add("c")
        assert await (await hub.agent("c")).push("alice", "c", 7, "old") is True
        await hub.delete("c")
        await hub.add("c")
        late = await hub.set_metadata("c", {"title": "late"}, seq=99, peer=old.name)
        new = await (await hub.agent("c")).push("alice", "c", 1, "new")
        assert (late, new) == (False, True)


# ---- the end of a peer


async def test_a_peer_may_ask_for_its_own_end(clock: object) -> None:
    async with opened() as test:
        hub = await hub_of(test)
        await hub.add("c")
        chat = await hub.agent("c")
        with contextlib.suppress(Deleted):
            await chat.end_me("alice", "c")
        await test.advance(10)
        assert await hub.entry("c") is None
        assert peers(test) == set()
        assert await hub.owed() == 0


async def test_a_delete_whose_caller_goes_away_is_carried_out(clock: object) -> None:
    async with opened() as test:
        hub = await hub_of(test)
        await hub.add("c")
        await (await hub.agent("c")).say("x")
        with trio.CancelScope() as scope:
            scope.cancel()
            await hub.delete("c")
        await test.advance(10)
        entry = await hub.entry("c")
        # cancelled before it began, or carried out to the end: nothing in between
        assert (entry is None) == (peers(test) == set())
        assert await hub.owed() == 0


@pytest.mark.parametrize("commits", range(1, 14))
async def test_no_crash_leaves_a_peer_without_an_entry(
    commits: int, clock: object
) -> None:
    async with opened() as test:
        hub = await hub_of(test)
        await hub.add("c")
        await (await hub.agent("c")).say("x")
        for tree in test.kernel.trees.values():
            await tree.durable()
        test.faults.die_after(commits)
        with contextlib.suppress(CuletError):
            await hub.delete("c")
        died = test.faults.dead
        await test.crash()
        await test.reopen()
        await test.advance(400)
        hub = await hub_of(test)
        entry = await hub.entry("c")
        names = peers(test)
        if entry is None:
            assert names == set()
        else:
            assert died and names == {entry.name}
            assert await (await hub.agent("c")).say("y") == 2
        assert await hub.owed() == 0


@pytest.mark.parametrize("landed", [False, True])
@pytest.mark.parametrize("record", range(1, 5))
async def test_no_lost_record_leaves_a_peer_without_an_entry(
    record: int, landed: bool, clock: object
) -> None:
    async with opened() as test:
        hub = await hub_of(test)
        await hub.add("c")
        await (await hub.agent("c")).say("x")
        test.faults.die_in_record(record, landed=landed)
        with contextlib.suppress(CuletError):
            await hub.delete("c")
        await test.crash()
        await test.reopen()
        await test.advance(400)
        hub = await hub_of(test)
        entry = await hub.entry("c")
        assert peers(test) == ({entry.name} if entry else set())
        assert await hub.owed() == 0


async def test_who_comes_while_an_entry_is_deleted_makes_no_orphan(
    clock: object,
) -> None:
    """A visitor has found the entry, and the peer is not there yet: it comes too late."""
    async with opened() as test:
        hub = await hub_of(test)
        statuses: set[int] = set()

        async def visitor(n: int) -> None:
            for _ in range(n % 7):
                await trio.lowlevel.checkpoint()
            statuses.add((await got(test, "/agents/hub/alice/chats/c"))[0])

        async def deleter(n: int) -> None:
            for _ in range(n % 11):
                await trio.lowlevel.checkpoint()
            await hub.delete("c")

        for n in range(60):
            await hub.add("c")
            async with trio.open_nursery() as nursery:
                for k in range(4):
                    nursery.start_soon(visitor, n + k)
                nursery.start_soon(deleter, n)
        await test.advance(60)

        assert statuses <= {200, 404, 410, 503}
        assert peers(test) == set()
        assert await hub.owed() == 0


async def test_a_peer_that_starts_while_it_is_deleted_ends(clock: object) -> None:
    async with opened() as test:
        hub = await hub_of(test)
        await hub.add("suicidal")
        node = test.find([("Hub", "alice")])
        assert node is not None
        node.agent.agent_class = Suicidal
        with contextlib.suppress(CuletError):
            await hub.agent("suicidal")
        await test.advance(120)

        assert not {k for k in test.kernel.trees if k.class_name == "Suicidal"}
        assert await hub.owed() == 0


async def test_a_job_without_its_delete_does_nothing(clock: object) -> None:
    """What `delete` leaves when it is cancelled between the job and the row."""
    async with opened() as test:
        hub = await hub_of(test)
        entry = await hub.add("c")
        await (await hub.agent("c")).say("x")
        node = test.find([("Hub", "alice")])
        assert node is not None
        await node.agent.schedule(0, "_destroy", entry.name, retry=Retry())
        await test.advance(5)
        assert await hub.owed() == 0
        assert await (await hub.agent("c")).say("y") == 2


# ---- the way


async def test_requests_go_on_under_one_segment(clock: object) -> None:
    async with opened() as test:
        hub = await hub_of(test)
        entry = await hub.add("c/1 ü")
        base = "/agents/hub/alice"
        here = await got(test, f"{base}/chats/c%2F1%20%C3%BC/a%20b/c?x=1", "bo")
        top = await got(test, f"{base}/chats/c%2F1%20%C3%BC")
        absent = await got(test, f"{base}/chats/other/x")
        broken = await got(test, f"{base}/chats/%ff")
        own = [await got(test, f"{base}{p}") for p in ("", "/chats", "/chatsx/c", "/x")]

    assert json.loads(here[1]) == [entry.name, "/a%20b/c?x=1", "", "bo"]
    assert json.loads(top[1])[:2] == [entry.name, "/"]
    assert absent == broken == (404, "Not Found")
    assert [text for _, text in own] == [
        "hub alice /",
        "hub alice /chats",
        "hub alice /chatsx/c",
        "hub alice /x",
    ]


async def test_an_id_without_an_entry_makes_nothing(clock: object) -> None:
    async with opened() as test:
        await hub_of(test)
        assert (await got(test, "/agents/hub/alice/chats/c"))[0] == 404
        assert peers(test) == set()


async def test_hops_below_a_peer_pass_its_gate(clock: object) -> None:
    async with opened() as test:
        await (await hub_of(test)).add("c")
        base = "/agents/hub/alice/chats/c/sub"
        note = await got(test, f"{base}/note/n1/x?y=1")
        secret = await got(test, f"{base}/note/secret")
        unknown = await got(test, f"{base}/stranger/n")
        deep = await got(test, base.removesuffix("/sub") + "/sub/note/n" * 4)

    assert note == (200, "note n1 /x?y=1")
    assert secret == (403, "no")
    assert (unknown[0], deep[0]) == (404, 400)
    assert GATES == ["n1", "secret"]


async def test_a_hub_may_ask_who_comes(clock: object) -> None:
    async with opened() as test:
        await (await test.kernel.get_agent(Strict, "alice")).add("c")
        url = "/agents/strict/alice/agents/c"
        assert (await got(test, url, "alice"))[0] == 200
        assert await got(test, url, "bob") == (403, "not yours")
        assert await got(test, url.replace("/c", "/none"), "bob") == (403, "not yours")


async def test_forwards_from_hub_to_hub_come_to_an_end(clock: object) -> None:
    async with opened() as test:
        hub = await test.kernel.get_agent(Loop, "top")
        for _ in range(6):
            await hub.add("x")
            hub = await hub.agent("x")
        deep = await got(test, "/agents/loop/top" + "/agents/x" * 4)
        deeper = await got(test, "/agents/loop/top" + "/agents/x" * 5)

    assert deep == (404, "Not implemented")
    assert (deeper[0], "at most 4 times" in deeper[1]) == (400, True)


class Odd(Agent):
    """Answers what is no answer."""

    async def on_forward(self, request: Request) -> Forward | Response | None:
        match request.path:
            case "/raise":
                raise ValueError("secret words")
            case "/text":
                return "elsewhere"  # type: ignore[return-value]
            case "/nobody":
                return Forward("nobody")
            case "/dots":
                return Forward(await self.kernel.get_agent(Odd, "x"), "/a/../b")
            case "/gone":
                stub = await self.kernel.get_agent(Odd, "gone")
                await self.kernel.destroy_agent(Odd, "gone")
                return Forward(stub)
        self.sql("CREATE TABLE IF NOT EXISTS asked (n)")
        return None


@pytest.mark.parametrize(
    ("path", "status"),
    [("/raise", 500), ("/text", 500), ("/nobody", 400), ("/dots", 400), ("/gone", 404),
     ("/self", 404)],
)  # fmt: skip
async def test_a_forward_that_goes_nowhere_is_refused(
    path: str, status: int, clock: object
) -> None:
    async with open_test_kernel(roots=[Odd]) as test:
        answer = await got(test, f"/agents/odd/a{path}")
        assert answer[0] == status
        assert "secret" not in answer[1]
        assert test.kernel.trees.keys() <= {TreeKey("Odd", n) for n in ("a", "x")}


@pytest.mark.parametrize("name", ["own", "quart"])
async def test_sockets_go_on_and_the_hub_sees_none(name: str) -> None:
    async with serving(name) as server:
        hub = await server.kernel.get_agent(Hub, "alice")
        entry = await hub.add("c1")
        ws = server.url.replace("http", "ws")
        async with connect(f"{ws}/agents/hub/alice/chats/c1?_pk=me") as chat:
            assert (chat.name, chat.agent) == (entry.name, "chat")
            assert await chat.call("say", "one") == 1
            async with connect(f"{ws}/agents/hub/alice/chats/c1") as other:
                assert await other.call("say", "two") == 2
            rows = {
                row["path"]: row["sockets"]
                for key in (("Hub", "alice"), ("Chat", entry.name))
                for row in server.kernel.tree(*key)
            }
            assert rows.get("Hub/alice", 0) == 0
            await hub.delete("c1")
            with pytest.raises(CuletError), trio.fail_after(5):
                await chat.call("say", "three")
        status, _, body = await server.http("POST", "/agents/hub/alice/chats/c1/x")
        await hub.add("c1")
        fresh = await server.http("POST", "/agents/hub/alice/chats/c1/x", body=b"hi")
        code = await server.close_of("/agents/hub/alice/chats/none")

    assert (status, body) == (404, b"Not Found")
    assert json.loads(fresh[2])[1:3] == ["/x", "hi"]
    assert code == 4404


@contextlib.asynccontextmanager
async def serving(name: str) -> Any:
    async with (
        culet.kernel.open_kernel(
            roots=ROOTS, facets=[Note], storage="memory:"
        ) as kernel,
        trio.open_nursery() as nursery,
    ):
        run = partial(kit.RUNNERS[name], kit.create_app(kernel))
        url = await nursery.start(run)
        yield kit.Server(url, kernel)
        nursery.cancel_scope.cancel()


class Scribe(Agent):
    """Writes down who comes, then sends them on."""

    async def on_forward(self, request: Request) -> Forward | Response | None:
        self.sql("CREATE TABLE IF NOT EXISTS seen (url TEXT)")
        self.sql("INSERT INTO seen VALUES (?)", request.url)
        if request.path == "/refused":
            return Response("no", 403)
        return Forward(await self.kernel.get_agent(Chat, "c"))


@pytest.mark.parametrize("path", ["/x", "/refused"])
async def test_what_a_hub_wrote_is_durable_before_anybody_goes_on(
    path: str, clock: object
) -> None:
    async with open_test_kernel(roots=[Scribe, Chat]) as test:
        await test.kernel.get_agent(Scribe, "s")
        await come(test, f"/agents/scribe/s{path}")
        tree = test.tree("Scribe", "s")
        assert tree is not None
        assert tree.barrier.durable == tree.barrier.count
        assert tree.visitors == 0
        await test.crash()
        await test.reopen()
        await test.kernel.get_agent(Scribe, "s")
        node = test.find([("Scribe", "s")])
        assert node is not None
        assert [r.url for r in node.agent.sql("SELECT url FROM seen")] == [
            f"/agents/scribe/s{path}"
        ]


# ---- what it is written with


def test_it_is_written_with_the_public_api_alone() -> None:
    tree = ast.parse(Path(routed.__file__).read_text())
    public = set(vars(culet.kernel)) | set(vars(culet.kernel.errors))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert {a.name for a in node.names} <= {"builtins", "msgspec", "trio"}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if module.startswith("culet"):
                assert module in {"culet.kernel", "culet.kernel.errors"}
                assert {a.name for a in node.names} <= public
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            own = {name for name in vars(RoutedAgents) if name.startswith("_")}
            assert node.attr in own, f"{node.attr} is private"


# ---- deleting roots


async def test_a_root_is_destroyed_from_outside_once_and_its_name_is_free(
    clock: object,
) -> None:
    async with opened() as test:
        chat = await test.kernel.get_agent(Chat, "c")
        await chat.say("x")
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(test.kernel.destroy_agent, Chat, "c")
        with pytest.raises(Deleted):
            await chat.say("y")
        await test.kernel.destroy_agent(Chat, "c")
        await test.kernel.destroy_agent(Chat, "never")
        assert peers(test) == set()
        assert await (await test.kernel.get_agent(Chat, "c")).say("new") == 1


async def test_a_root_that_sleeps_is_destroyed_too(clock: object) -> None:
    async with opened() as test:
        await (await test.kernel.get_agent(Chat, "c")).say("x")
        await test.evict([("Chat", "c")])
        await test.kernel.destroy_agent(Chat, "c")
        assert peers(test) == set()


async def test_a_storage_failure_comes_to_whoever_destroys(clock: object) -> None:
    async with opened() as test:
        await (await test.kernel.get_agent(Chat, "c")).say("x")
        test.faults.fail_commit(stay=True)
        with pytest.raises(CuletError):
            await test.kernel.destroy_agent(Chat, "c")
        test.faults.heal()
        await test.kernel.destroy_agent(Chat, "c")
        assert peers(test) == set()


async def test_what_is_no_root_class_is_refused(clock: object) -> None:
    async with opened() as test:
        for wrong in (Note, None):
            with pytest.raises(UsageError):
                await test.kernel.destroy_agent(wrong, "c")
        with pytest.raises(UsageError):
            await test.kernel.destroy_agent(Chat, "sub")


async def test_fresh_ids_differ_and_come_again_under_the_same_seed(
    clock: object,
) -> None:
    made = []
    for _ in range(2):
        async with opened(seed=7) as test:
            hub = await hub_of(test)
            made.append([(await hub.add(f"c{n}")).name for n in range(20)])

    assert made[0] == made[1]
    assert len(set(made[0])) == 20
