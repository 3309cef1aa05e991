"""Sockets that reach a facet: the tree's root owns them, the facet alone sees them."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import pytest
import trio

from culet.kernel import (
    Agent,
    ConnectContext,
    Connection,
    Request,
    Response,
    current_agent,
    rpc,
)
from culet.kernel.testing import Harness, open_test_kernel
from kernel.agents import agent_at, node_at, settle
from kernel.peers import RecordingPeer, come, connect

ROOT = ("Top", "a")
KID = ("Kid", "k")
LEAF = ("Kid", "leaf")


class Heard(Agent):
    """Notes what happens to it, by name."""

    initial_state = {"n": 0}
    notes: ClassVar[list[tuple[Any, ...]]] = []
    objects: ClassVar[list[Connection]] = []
    asked: ClassVar[list[str]] = []

    def note(self, *what: Any) -> None:
        self.notes.append((self.name, *what))

    async def on_start(self) -> None:
        self.note("start", len(self.sockets.list()))
        if self.name == "chatty":
            for connection in self.sockets.list():
                connection.send("I am back")
            self.broadcast("all of you")

    async def on_before_sub_agent(self, request: Request, child: Any) -> Any:
        self.note("gate", child.name)
        return Response("no", 403) if child.name == "forbidden" else None

    async def on_connect(self, connection: Connection, ctx: ConnectContext) -> None:
        self.note("connect", connection.uri, ctx.request.headers.get("x-token"))
        await trio.sleep(0.01)
        connection.set_state({"seen": []})

    async def on_message(self, connection: Connection, message: str | bytes) -> None:
        self.objects.append(connection)
        self.note("message", message)
        if message == "raise":
            raise ValueError("secret-token-9")
        if message == "later":
            self.spawn(self.answer_later, connection)
            return
        if isinstance(connection.state, dict):
            connection.set_state(lambda s: {"seen": [*s["seen"], message]})
        connection.send(message)

    async def answer_later(self, connection: Connection) -> None:
        await trio.sleep(5)
        for i in range(3):
            connection.send(f"late {i}")
        connection.set_state("done")
        connection.close(1000, "bye")

    async def on_close(
        self, connection: Connection, code: int, reason: str, was_clean: bool
    ) -> None:
        self.note("close", code, reason, was_clean)

    async def on_error(self, error: Any, *, connection: Any = None) -> None:
        self.note("error", type(error).__name__, connection is not None)

    def get_connection_tags(
        self, connection: Connection, ctx: ConnectContext
    ) -> list[str]:
        self.asked.append(f"tags {self.name}")
        return list(ctx.identity or [])

    def should_connection_be_readonly(
        self, connection: Connection, ctx: ConnectContext
    ) -> bool:
        self.asked.append(f"readonly {self.name}")
        return "readonly" in (ctx.identity or [])

    def should_send_protocol_messages(
        self, connection: Connection, ctx: ConnectContext
    ) -> bool:
        self.asked.append(f"protocol {self.name}")
        return "raw" not in (ctx.identity or [])

    @rpc
    async def slow_echo(self, text: str, seconds: float) -> list[str]:
        await trio.sleep(seconds)
        here = current_agent()
        assert here is not None
        assert here.connection is not None
        return [text, here.connection.id]

    async def ids(self, tag: str | None = None) -> list[str]:
        return [c.id for c in self.sockets.list(tag)]

    async def knows(self, label: str) -> bool:
        return self.sockets.get(label) is not None

    async def tell(self, text: str, without: list[str]) -> None:
        self.broadcast(text, without=without)

    async def flags(self, label: str) -> list[Any]:
        found = self.sockets.get(label)
        assert found is not None
        return [list(found.tags), found.readonly, found.protocol, found.state]

    async def answer_by(self, label: str, texts: list[str]) -> None:
        found = self.sockets.get(label)
        assert found is not None
        for text in texts:
            found.send(text)
            found.set_state(text)

    async def make(self, name: str) -> None:
        await self.dynamic_agents.get(Kid, name)


class Kid(Heard):
    """A facet."""


class Top(Heard):
    """The root."""


@pytest.fixture(autouse=True)
def fresh() -> None:
    Heard.notes.clear()
    Heard.objects.clear()
    Heard.asked.clear()


def opened(**options: Any) -> Any:
    return open_test_kernel(roots=[Top], facets=[Kid], **options)


async def start(test: Harness) -> Any:
    """Return the root, which has the facet k."""
    root = await test.kernel.get_agent(Top, "a")
    await root.make("k")
    Heard.notes.clear()
    return root


async def kid_of(test: Harness, root: Any, *names: str) -> Any:
    """Return a stub of a facet below the root."""
    found = root
    for name in names or ("k",):
        found = await test.kernel.get_sub_agent(found, Kid, name)
    return found


def paths(test: Harness) -> list[str]:
    return sorted(row["path"] for row in test.kernel.tree("Top", "a"))


@pytest.mark.rule("F-191", "F-192", "F-202", "F-203", "F-216", "F-217")
async def test_frames_reach_the_facet_and_its_words_that_client(clock: object) -> None:
    async with opened() as test:
        await start(test)
        client = await connect(test, ROOT, KID)
        for message in ("one", "", '{"type":"unknown"}', b"\x00\xff", "[1"):
            client.send(message)
        await settle()

        said = [note[2] for note in Heard.notes if note[1] == "message"]
        assert said == ["one", "", '{"type":"unknown"}', b"\x00\xff", "[1"]
        assert client.out[-5:] == said
        assert [note for note in Heard.notes if note[1] == "gate"] == [
            ("a", "gate", "k")
        ], "asked once, whatever the number of frames"
        assert ("k", "connect", "/", None) in Heard.notes, "the hops are stripped"
        assert {note[0] for note in Heard.notes if note[1] != "gate"} == {"k"}


@pytest.mark.rule("F-193", "F-194", "F-195", "W-055")
async def test_root_and_facet_do_not_see_each_others_sockets(clock: object) -> None:
    async with opened() as test:
        root = await start(test)
        kid = await kid_of(test, root)
        above = await connect(test, ROOT, label="above")
        below = await connect(test, ROOT, KID, label="below")

        assert (await root.ids(), await kid.ids()) == (["above"], ["below"])
        assert not await root.knows("below")
        assert not await kid.knows("above")
        await root.tell("to the root's", [])
        await kid.tell("to the facet's", [])
        below.send("hi")
        await settle()
        assert "to the root's" in above.out
        assert "to the facet's" not in above.out
        assert "to the root's" not in below.out
        heard = {note[0] for note in Heard.notes if note[1] in {"message", "close"}}
        assert heard == {"k"}
        assert below.connection is not None
        assert below.connection.state == {"seen": ["hi"]}, (
            "nothing of the kernel's in it"
        )


@pytest.mark.rule("F-196", "F-218", "F-219", "F-221")
async def test_tags_are_the_facets_own_and_each_hook_is_asked_once(
    clock: object,
) -> None:
    async with opened() as test:
        root = await start(test)
        await connect(test, ROOT, KID, label="x", identity=["red", "big"])
        await connect(test, ROOT, KID, label="y", identity=["blue"])
        kid = await kid_of(test, root)

        assert await kid.ids("red") == ["x"]
        assert await kid.ids("y") == ["y"], "the id is a tag"
        assert await kid.ids("green") == []
        assert (await kid.flags("x"))[0] == ["x", "red", "big"], "the id first"
        assert sorted(Heard.asked) == sorted(
            ["tags k", "readonly k", "protocol k"] * 2
        ), "once a connection, and not of the root"


@pytest.mark.rule("F-221", "F-222")
@pytest.mark.parametrize(
    "tags", [["t"] * 10, [""], ["x" * 257], [7]], ids=["10", "empty", "long", "no text"]
)
async def test_tags_that_cannot_be_fail_the_connect(clock: object, tags: Any) -> None:
    async with opened() as test:
        root = await start(test)
        with pytest.raises(Exception, match="tag"):
            await connect(test, ROOT, KID, label="x", identity=tags)
        await connect(test, ROOT, KID, label="y", identity=["x" * 256] * 9)
        assert (await kid_of(test, root)) is not None


@pytest.mark.rule("F-197", "F-199", "F-200", "F-201", "F-236")
async def test_a_facet_that_wakes_finds_its_sockets_as_they_were(clock: object) -> None:
    async with opened() as test:
        root = await start(test)
        await root.make("chatty")
        chatty = ("Kid", "chatty")
        client = await connect(
            test, ROOT, chatty, label="x", identity=["red", "readonly"]
        )
        raw = await connect(test, ROOT, chatty, label="r", identity=["raw"])
        other = await connect(test, ROOT, KID, label="o")
        client.send("before")
        await settle()
        before = await (await kid_of(test, root, "chatty")).flags("x")

        await test.evict([ROOT, ("Kid", "chatty")])
        assert not any(
            row["state"] == "live"
            for row in test.kernel.tree("Top", "a")
            if row["path"].endswith("chatty")
        )
        seen = len(client.out), len(raw.out), len(other.out)
        kid = await kid_of(test, root, "chatty")
        assert await kid.flags("x") == before, "woken by a call, not by a frame"
        await settle()
        assert ("chatty", "start", 2) in Heard.notes
        assert client.out[seen[0] :] == ["I am back", "all of you"]
        assert raw.out[seen[1] :] == ["I am back", "all of you"]
        assert other.out[seen[2] :] == []
        assert before == [
            ["x", "red", "readonly"], True, True, {"seen": ["before"]},
        ]  # fmt: skip


@pytest.mark.rule("F-198")
async def test_successive_frames_come_with_the_same_connection(clock: object) -> None:
    async with opened() as test:
        await start(test)
        client = await connect(test, ROOT, KID)
        client.send("1")
        client.send("2")
        await settle()
        await test.evict([ROOT, KID])
        client.send("3")
        await settle()
        assert len(Heard.objects) == 3
        assert len(set(map(id, Heard.objects))) == 1


@pytest.mark.rule("F-131", "F-205", "F-206")
async def test_whom_a_deeper_gate_refuses_is_nobodys_client(clock: object) -> None:
    async with opened() as test:
        await start(test)
        answer = await come(test, ROOT, KID, ("Kid", "forbidden"))
        assert isinstance(answer, Response)
        assert answer.status == 403
        await settle()
        assert [note for note in Heard.notes if note[1] == "connect"] == []
        assert paths(test) == ["Top/a", "Top/a/Kid/k"]


@pytest.mark.rule("F-207", "F-213")
async def test_a_frame_for_a_facet_that_is_gone_makes_none(clock: object) -> None:
    async with opened() as test:
        root = await start(test)
        client = await connect(test, ROOT, KID)
        connection = client.connection
        assert connection is not None
        await agent_at(test).dynamic_agents.delete(Kid, "k")
        await settle()
        assert client.closed is not None
        assert client.closed[0] == 4410

        client.send("late")
        connection.closed(1006, "", was_clean=False)
        connection.send("nobody")
        connection.close(1000, "again")
        connection.set_state("kept nowhere")
        await test.advance(5)
        assert paths(test) == ["Top/a"]
        assert await root.ids() == []


@pytest.mark.rule("F-208")
async def test_a_close_is_heard_by_the_facet_which_then_forgets(clock: object) -> None:
    async with opened() as test:
        root = await start(test)
        client = await connect(test, ROOT, KID, label="x")
        assert client.connection is not None
        client.connection.closed(4001, "tired", was_clean=True)
        await settle()
        closes = [note for note in Heard.notes if note[1] == "close"]
        assert closes == [("k", "close", 4001, "tired", True)]
        assert await (await kid_of(test, root)).ids() == []


@pytest.mark.rule("F-209", "F-224")
async def test_an_error_of_a_facets_socket_is_told_to_the_facet(clock: object) -> None:
    async with opened() as test:
        await start(test)
        client = await connect(test, ROOT, KID)
        client.send("raise")
        await settle()
        errors = [note for note in Heard.notes if note[1] == "error"]
        assert errors == [("k", "error", "ValueError", True)]
        assert client.closed is None, "the hook has handled it"


@pytest.mark.rule("F-210", "F-212")
async def test_answers_reach_who_asked_whatever_comes_between(clock: object) -> None:
    async with opened() as test:
        await start(test)
        clients = [await connect(test, ROOT, KID, label=f"c{i}") for i in range(3)]
        for i, client in enumerate(clients):
            client.rpc("slow_echo", f"t{i}", 3 - i, call=f"a{i}")
            client.rpc("slow_echo", f"u{i}", 0.5, call=f"b{i}")
            client.send("between")
        await test.advance(5)

        for i, client in enumerate(clients):
            answers = {
                f["id"]: f["result"]
                for f in map(json.loads, [t for t in client.out if '"rpc"' in str(t)])
            }
            assert answers == {f"a{i}": [f"t{i}", f"c{i}"], f"b{i}": [f"u{i}", f"c{i}"]}


@pytest.mark.rule("F-211")
async def test_words_after_the_handler_has_returned_go_out_in_order(
    clock: object,
) -> None:
    async with opened() as test:
        await start(test)
        client = await connect(test, ROOT, KID)
        client.send("later")
        await test.advance(6)
        assert client.out[-3:] == ["late 0", "late 1", "late 2"]
        assert client.closed == (1000, "bye")
        assert client.connection is not None
        assert client.connection.state == "done"


@pytest.mark.rule("F-211", "F-199")
@pytest.mark.parametrize("asleep", [False, True])
async def test_whoever_calls_the_facet_can_let_it_speak_to_a_client_of_its_own(
    asleep: bool, clock: object
) -> None:
    """Another call, another task, perhaps another life: no frame is under way."""
    async with opened() as test:
        root = await start(test)
        client = await connect(test, ROOT, KID, label="c")
        other = await connect(test, ROOT, KID, label="d")
        kid = await kid_of(test, root)
        if asleep:
            await test.evict([ROOT, KID])
        await kid.answer_by("c", ["one", "two", "three"])
        await settle()
        assert client.out[-3:] == ["one", "two", "three"]
        assert not {"one", "two", "three"} & set(map(str, other.out))
        assert client.connection is not None
        assert client.connection.state == "three"


@pytest.mark.rule("F-214")
async def test_a_client_that_takes_nothing_delays_nobody(clock: object) -> None:
    """The bound itself is the outbox's: see tests/web/test_session.py."""

    class Stuck(RecordingPeer):
        def _let_out(self, durable: int) -> None:
            pass

    async with opened() as test:
        root = await start(test)
        await connect(test, ROOT, KID, label="slow", peer=Stuck)
        quick = await connect(test, ROOT, KID, label="quick")
        kid = await kid_of(test, root)
        for i in range(100):
            await kid.tell(f"n{i}", [])
        await settle()
        assert quick.out[-100:] == [f"n{i}" for i in range(100)]


@pytest.mark.rule("F-215", "W-041")
async def test_frames_that_come_during_the_connect_wait_for_its_hook(
    clock: object,
) -> None:
    async with opened() as test:
        await start(test)
        visit: Any = await come(test, ROOT, KID, identity=["red"])
        client = RecordingPeer(visit.gate)
        client.connection = visit.connect(client, "x")
        client.send("early")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.connection.opened)
            await trio.sleep(0)
            client.send("still early")
        await settle()
        order = [note[1:3] for note in Heard.notes if note[0] == "k"]
        assert order[-3:] == [
            ("connect", "/"), ("message", "early"), ("message", "still early"),
        ]  # fmt: skip
        assert client.connection.state == {"seen": ["early", "still early"]}


@pytest.mark.rule("F-220", "W-013")
async def test_two_sockets_of_one_label_are_two_and_the_newest_answers_to_it(
    clock: object,
) -> None:
    async with opened() as test:
        root = await start(test)
        old = await connect(test, ROOT, KID, label="x", identity=["old"])
        new = await connect(test, ROOT, KID, label="x", identity=["new"])
        kid = await kid_of(test, root)
        assert await kid.ids() == ["x", "x"]
        assert (await kid.flags("x"))[0] == ["x", "new"]
        await kid.tell("both", [])
        await settle()
        assert "both" in old.out
        assert "both" in new.out
        assert new.connection is not None
        new.connection.closed(1000, "", was_clean=True)
        assert (await kid.flags("x"))[0] == ["x", "old"]


@pytest.mark.rule("F-471", "W-018")
@pytest.mark.parametrize("depth", [2, 3])
async def test_a_deep_socket_makes_its_leaf_and_nobody_else(
    clock: object, depth: int
) -> None:
    async with opened() as test:
        root = await start(test)
        hops = [("Kid", f"k{i}") for i in range(depth)]
        at = root
        for _class, name in hops[:-1]:
            await at.make(name)
            at = await test.kernel.get_sub_agent(at, Kid, name)
        client = await connect(test, ROOT, *hops)
        client.send("deep")
        await settle()
        want = ["Top/a", "Top/a/Kid/k"]
        path = "Top/a"
        for _class, name in hops:
            path += f"/Kid/{name}"
            want.append(path)
        assert paths(test) == sorted(want)
        assert client.out[-1] == "deep"
        gates = [note for note in Heard.notes if note[1] == "gate"]
        assert gates == [
            (above, "gate", name)
            for above, (_, name) in zip(
                ["a", *[n for _, n in hops]], hops, strict=False
            )
        ]


@pytest.mark.rule("F-226", "F-231", "F-230", "F-234")
async def test_a_broadcast_stays_at_its_depth_and_leaves_out_whom_it_names(
    clock: object,
) -> None:
    async with opened() as test:
        root = await start(test)
        kid = await kid_of(test, root)
        await kid.make("leaf")
        leaf = await kid_of(test, root, "k", "leaf")
        at_kid = await connect(test, ROOT, KID, label="kid")
        first = await connect(test, ROOT, KID, LEAF, label="first")
        second = await connect(test, ROOT, KID, LEAF, label="second")
        seen = len(at_kid.out), len(first.out), len(second.out)
        await leaf.tell("one", [])
        await leaf.tell("two", ["first"])
        await leaf.tell("three", [])
        await settle()
        assert at_kid.out[seen[0] :] == []
        assert first.out[seen[1] :] == ["one", "three"]
        assert second.out[seen[2] :] == ["one", "two", "three"]


@pytest.mark.rule("F-225")
async def test_who_comes_and_goes_is_told_of_the_facet_not_of_the_root(
    clock: object,
) -> None:
    async with opened() as test:
        await start(test)
        told: list[tuple[str, str, Any]] = []

        def listen(channel: str, _tree: Any, subject: Any, detail: Any) -> None:
            told.append((channel, subject, detail))

        for channel in ("connect", "disconnect"):
            test.kernel.subscribe(channel, listen)
        client = await connect(test, ROOT, KID, label="x")
        assert client.connection is not None
        client.connection.closed(4001, "tired", was_clean=True)
        slot = node_at(test, KID).slot
        assert told == [
            ("connect", slot, {"connectionId": "x"}),
            (
                "disconnect",
                slot,
                {"connectionId": "x", "code": 4001, "reason": "tired"},
            ),
        ]
