"""A facet is made by the first `get` and found by all later ones."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
import trio

from culet.kernel import (
    Agent,
    ChildRef,
    Chunk,
    Request,
    Response,
    Turn,
    current_agent,
    rpc,
)
from culet.kernel.calls import AsyncCallback, Stub
from culet.kernel.errors import FacetAborted, FacetBroken, StorageError, UsageError
from culet.kernel.testing import ScriptedChild, open_test_kernel
from kernel.agents import agent_at, node_at, raises, settle, tree_of
from kernel.family import NOTES, Facet, Other, Top, children, count, files, get, opened
from kernel.peers import come, connect, frames_of

MEETING: list[str] = []
FAIL: list[int] = []  # starts that are still to fail
SEEN: list[Any] = []


@pytest.fixture(autouse=True)
def fresh() -> None:
    for notes in (MEETING, FAIL, SEEN):
        notes.clear()


class Meets(Facet):
    """Its calls return when five of them have come together."""

    async def meet(self, text: str) -> list[str]:
        await self.keep(text)
        MEETING.append(text)
        while len(MEETING) < 5:
            await trio.lowlevel.checkpoint()
        return await self.kept()


class Slow(Facet):
    async def on_start(self) -> None:
        await trio.sleep(1)
        NOTES.append("started")


class Fails(Facet):
    """Its first starts fail, after they have owed and said something."""

    async def on_start(self) -> None:
        await self.keep("from the start")
        await self.schedule(5, "reminded", "of a start that failed")
        await self.dynamic_agents.get(Facet, "below")
        await trio.sleep(0.1)
        if FAIL:
            FAIL.pop()
            raise ValueError("not yet")


class Asks(Facet):
    """Uses what needs its row while it starts."""

    async def on_start(self) -> None:
        parent = await self.parent_agent(Parent)
        SEEN.append(await parent.knows("Asks", self.name))
        await self.schedule(0, "reminded", "at once")
        await self.fibers.start("f", self._fiber, wait=True)

    async def _fiber(self) -> None:
        SEEN.append("fiber")


class Parent(Facet):
    """A facet that has facets, and a gate that nobody passes."""

    async def knows(self, cls: str, name: str) -> bool:
        return self.dynamic_agents.has(cls, name)

    async def make(self, name: str) -> None:
        await self.dynamic_agents.get(Asks, name)

    async def on_before_sub_agent(
        self, request: Request, child: ChildRef
    ) -> Request | Response | None:
        SEEN.append(f"gate of {child.name}")
        return Response("no", 403)


class Loud(Facet):
    """Speaks to its clients while it starts."""

    async def on_start(self) -> None:
        self.broadcast("hello from below")
        self.set_state({"loud": True})


class Desk(Facet):
    """Makes a facet when a client says so."""

    @rpc
    async def open(self, name: str) -> list[str]:
        here = current_agent()
        assert here is not None
        assert here.connection is not None
        kid = await self.dynamic_agents.get(Looks, name)
        return await kid.look()


class Looks(Facet):
    async def on_start(self) -> None:
        SEEN.append(await self.look())

    async def look(self) -> list[str]:
        here = current_agent()
        assert here is not None
        return [here.agent.name, repr(here.connection), repr(here.request)]


class Streams(Facet):
    async def tell(self, to: AsyncCallback, count: int) -> int:
        for number in range(count):
            await self.keep(str(number))
            await to(number)
        return count

    async def borrow(self, fn: AsyncCallback) -> None:
        self.borrowed = fn


class Order(Facet):
    async def note(self, text: str) -> None:
        NOTES.append(text)
        await trio.lowlevel.checkpoint()


MORE: tuple[type[Agent], ...] = (
    Meets, Slow, Fails, Asks, Parent, Loud, Desk, Looks, Streams, Order,
)  # fmt: skip


# ---- the first get and the later ones


@pytest.mark.rule("F-001", "F-002", "F-005")
async def test_the_first_get_makes_and_starts_it_later_ones_find_it(
    clock: object,
) -> None:
    async with opened() as test:
        one = await get(test, (Facet, "k"))
        two = await get(test, (Facet, "k"))
        assert await one.ping(1) == 2
        await one.keep("by one")
        assert await two.kept() == ["by one"]
        assert await two.path() == [["Top", "a"], ["Facet", "k"]], "it runs below"
        assert NOTES == ["start a", "start k"]


@pytest.mark.rule("F-004")
async def test_facets_of_one_parent_run_side_by_side(clock: object) -> None:
    async with opened(*MORE) as test:
        kids = [await get(test, (Meets, f"k{n}")) for n in range(5)]
        got: dict[int, list[str]] = {}

        async def call(number: int) -> None:
            got[number] = await kids[number].meet(f"text {number}")

        with trio.fail_after(5):
            async with trio.open_nursery() as nursery:
                for number in range(5):
                    nursery.start_soon(call, number)
        assert got == {number: [f"text {number}"] for number in range(5)}


@pytest.mark.rule("F-006")
async def test_get_waits_for_the_start_and_tells_why_it_failed(clock: object) -> None:
    async with opened(*MORE) as test:
        await get(test, (Slow, "s"))
        assert NOTES[-1] == "started"
        FAIL.append(1)
        error = await raises(FacetBroken, get, test, (Fails, "f"))
        assert isinstance(error.__cause__, ValueError)
        assert "not yet" in str(error)


@pytest.mark.rule("F-021")
async def test_getting_what_lives_starts_and_writes_nothing(clock: object) -> None:
    async with opened() as test:
        kid = await get(test, (Facet, "k"), (Facet, "deep"))
        before = tree_of(test).store.commits
        for _ in range(20):
            await get(test, (Facet, "k"), (Facet, "deep"))
            await kid.ping(1)
        assert tree_of(test).store.commits == before
        assert NOTES == ["start a", "start k", "start deep"]


# ---- what a failed start leaves


@pytest.mark.rule("F-007", "F-028")
async def test_what_a_first_start_left_goes_when_it_fails(clock: object) -> None:
    async with opened(*MORE) as test:
        FAIL.append(1)
        await raises(FacetBroken, get, test, (Fails, "f"))
        assert not (await children(test)).has(Fails, "f")
        await test.advance(10)
        assert "f hears of a start that failed" not in NOTES
        assert (count(test, "node"), count(test, "job"), files(test)) == (1, 0, set())
        kid = await get(test, (Fails, "f"))
        assert await kid.kept() == ["from the start"], "once: it is another life"


@pytest.mark.rule("F-007")
async def test_a_failed_start_is_taken_back_though_its_caller_has_left(
    clock: object,
) -> None:
    async with opened(*MORE) as test:
        await get(test)
        FAIL.append(1)
        with trio.move_on_after(0.05):
            await get(test, (Fails, "f"))
        await test.advance(1)
        assert FAIL == []
        assert not (await children(test)).has(Fails, "f")


class Bare(Facet):
    async def on_start(self) -> None:
        if FAIL:
            FAIL.pop()
            raise ValueError("not yet")


@pytest.mark.rule("F-007")
async def test_what_cannot_be_taken_back_is_told_and_can_be_got(clock: object) -> None:
    async with opened(Bare) as test:
        kids = await children(test)
        told: list[Any] = []
        test.kernel.subscribe("failure", lambda *event: told.append(event[3]))
        FAIL.append(1)
        test.faults.fail_commit(2, StorageError)  # made, and taken back
        await raises(FacetBroken, kids.get, Bare, "b")
        assert [failure.name for failure in told][-1] == "a start that failed"
        assert kids.has(Bare, "b")
        assert await (await kids.get(Bare, "b")).ping(1) == 2


@pytest.mark.rule("F-007", "F-009")
async def test_a_run_that_was_asked_for_meanwhile_keeps_its_facet(
    clock: object,
) -> None:
    async with opened(Slips) as test:
        kids = await children(test)
        root = agent_at(test)
        FAIL.append(1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(raises, FacetBroken, kids.get, Slips, "s")
            await settle()
            run = await root.run_agent_tool(Slips, run_id="s")
        assert run.status == "completed"
        assert kids.has(Slips, "s")


class Slips(ScriptedChild):
    async def on_start(self) -> None:
        await trio.sleep(0.1)
        if FAIL:
            FAIL.pop()
            raise ValueError("not yet")

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        yield {"type": "text-delta", "id": "t", "delta": "x"}


@pytest.mark.rule("F-007", "F-009")
async def test_what_existed_before_outlives_a_failed_start(clock: object) -> None:
    async with opened(*MORE) as test:
        kid = await get(test, (Fails, "f"))
        await kid.keep("mine")
        await (await children(test)).abort(Fails, "f")
        FAIL.append(1)
        await raises(FacetBroken, get, test, (Fails, "f"))
        assert (await children(test)).has(Fails, "f")
        again = await get(test, (Fails, "f"))
        assert "mine" in await again.kept()


@pytest.mark.rule("F-009", "F-028")
async def test_a_start_that_fails_takes_no_other_ones_life(clock: object) -> None:
    async with opened(*MORE) as test:
        await get(test)
        FAIL.extend([1, 1])
        failures = []

        async def insist() -> None:
            while True:
                try:
                    kid = await get(test, (Fails, "f"))
                    await kid.keep("x")
                    return
                except FacetBroken as error:
                    failures.append(error)

        async with trio.open_nursery() as nursery:
            for delay in (0.0, 0.0, 0.05, 0.11):
                await trio.sleep(delay)
                nursery.start_soon(insist)
        assert len(failures) >= 2
        assert (await children(test)).has(Fails, "f")
        kid = await get(test, (Fails, "f"))
        assert (await kid.kept()).count("x") == 4


@pytest.mark.rule("F-008")
async def test_what_starts_is_known_already_to_all_that_lead_back_to_it(
    clock: object,
) -> None:
    async with opened(*MORE) as test:
        parent = await get(test, (Parent, "p"))
        await parent.make("kid")
        assert SEEN == [True, "fiber"]
        await settle()
        assert "kid hears at once" in NOTES


# ---- what cannot be made


@pytest.mark.rule("F-011")
async def test_a_class_that_is_not_registered_makes_nothing(clock: object) -> None:
    class Stranger(Facet):
        pass

    async with opened() as test:
        error = await raises(UsageError, get, test, (Stranger, "k"))
        assert "'Stranger' is not registered: add it to open_kernel" in str(error)
        assert count(test, "node") == 1
        kids = await children(test)
        assert not kids.has(Stranger, "k")
        assert kids.list("Stranger") == []


@pytest.mark.rule("F-016")
async def test_a_root_is_opened_by_its_class_whatever_its_name_looks_like(
    clock: object,
) -> None:
    """The reference looks a root up by the name of its class, which a bundler may
    have shortened. Ours holds the class: short names work, others are refused."""
    short = type("_a", (Facet,), {})
    async with open_test_kernel(roots=[short], facets=[Facet]) as test:
        await test.kernel.get_agent(short, "x")
        node = test.find([("_a", "x")])
        assert node is not None
        kid = await node.agent.dynamic_agents.get(Facet, "k")
        assert await kid.path() == [["_a", "x"], ["Facet", "k"]]
        error = await raises(UsageError, test.kernel.get_agent, Top, "a")
        assert "add it to open_kernel(roots=" in str(error)


@pytest.mark.rule("F-014")
async def test_two_classes_may_have_facets_of_one_name(clock: object) -> None:
    async with opened() as test:
        one, two = await get(test, (Facet, "k")), await get(test, (Other, "k"))
        await one.keep("one")
        await two.keep("two")
        assert (await one.kept(), await two.kept()) == (["one"], ["two"])
        await (await children(test)).delete(Facet, "k")
        assert await two.kept() == ["two"]


@pytest.mark.rule("F-015")
async def test_a_facet_has_facets_and_is_no_root(clock: object) -> None:
    async with opened() as test:
        kid = await get(test, (Facet, "k"), (Other, "deep"))
        await kid.keep("x")
        assert await kid.path() == [["Top", "a"], ["Facet", "k"], ["Other", "deep"]]
        await raises(UsageError, test.kernel.get_agent, Facet, "k")


# ---- who it is, and who it is not


@pytest.mark.rule("F-017")
async def test_a_facet_made_for_a_client_does_not_meet_that_client(
    clock: object,
) -> None:
    async with opened(*MORE) as test:
        await get(test, (Desk, "d"))
        peer = await connect(test, ("Top", "a"), ("Desk", "d"))
        peer.rpc("open", "k")
        await settle()
        nobody = ["k", "None", "None"]
        assert [f["result"] for f in frames_of(peer, "rpc")] == [nobody]
        assert [nobody] == SEEN, "nor while it started"


@pytest.mark.rule("F-018")
async def test_what_a_facet_says_while_it_starts_is_for_its_own_clients(
    clock: object,
) -> None:
    async with opened(*MORE) as test:
        await get(test, (Facet, "beside"))
        others = [
            await connect(test),
            await connect(test, ("Top", "a"), ("Facet", "beside")),
        ]
        before = [list(peer.out) for peer in others]
        kid = await get(test, (Loud, "k"))
        assert await kid.ping(1) == 2
        await settle()
        assert [peer.out for peer in others] == before
        assert agent_at(test).state is None
        own = await connect(test, ("Top", "a"), ("Loud", "k"))
        await settle()
        assert frames_of(own, "cf_agent_state")[0]["state"] == {"loud": True}


@pytest.mark.rule("F-019", "F-020", "F-022")
async def test_a_facet_is_itself_in_every_life(clock: object) -> None:
    """The reference derives an identity and checks it at each start. Ours is the row:
    whoever wakes a slot finds the class, the name and the parent of that slot."""
    async with opened() as test:
        kid = await get(test, (Facet, "k"), (Other, "deep"))
        path = [["Top", "a"], ["Facet", "k"], ["Other", "deep"]]
        assert await kid.path() == path
        agent = agent_at(test, ("Facet", "k"), ("Other", "deep"))
        assert (agent.name, agent.class_name) == ("deep", "Other")
        slot = node_at(test, ("Facet", "k"), ("Other", "deep")).slot
        await test.evict([("Top", "a"), ("Facet", "k")])
        assert await kid.path() == path
        await tree_of(test).durable()
        await test.crash()
        await test.reopen()
        kid = await get(test, (Facet, "k"), (Other, "deep"))
        assert await kid.path() == path
        assert node_at(test, ("Facet", "k"), ("Other", "deep")).slot == slot
        for name in ("_node", "name", "self_path", "parent_path", "class_name"):
            with pytest.raises(UsageError):
                setattr(agent, name, "forged")


# ---- calls


@pytest.mark.rule("F-023")
async def test_a_facet_streams_to_a_callback_in_order_and_keeps_what_it_wrote(
    clock: object,
) -> None:
    async with opened(*MORE) as test:
        kid = await get(test, (Streams, "s"))
        heard: list[int] = []

        async def to(number: int) -> None:
            await trio.sleep(1 / (number + 1))
            heard.append(number)

        assert await kid.tell(to, 4) == 4
        assert heard == [0, 1, 2, 3]
        await (await children(test)).abort(Streams, "s")
        assert await (await get(test, (Streams, "s"))).kept() == ["0", "1", "2", "3"]


class Listens(Facet):
    """Hands its own code to a facet."""

    async def listen(self) -> list[str]:
        heard: list[str] = []

        async def to(number: int) -> None:
            here = current_agent()
            assert here is not None
            heard.append(f"{number} in {here.agent.name}")

        kid = await self.dynamic_agents.get(Streams, "s")
        await kid.tell(to, 2)
        return heard

    async def lend(self) -> None:
        kid = await self.dynamic_agents.get(Streams, "s")
        await kid.borrow(self.ping)


@pytest.mark.rule("F-023")
async def test_a_callback_runs_in_the_agent_whose_it_is(clock: object) -> None:
    async with opened(*MORE, Listens) as test:
        owner = await get(test, (Listens, "l"))
        assert await owner.listen() == ["0 in l", "1 in l"]
        await owner.lend()
        borrowed = agent_at(test, ("Listens", "l"), ("Streams", "s")).borrowed
        assert await borrowed(1) == 2
        await (await children(test)).abort(Listens, "l")
        await raises(FacetAborted, borrowed, 1)


class Gives(Facet):
    """Answers with what must not leave its tree, and takes what may come in."""

    async def kid(self) -> Stub[Facet]:
        return cast("Stub[Facet]", await self.dynamic_agents.get(Facet, "k"))

    async def plain_kid(self) -> Any:
        return {"kids": [await self.kid()]}

    async def method(self) -> Any:
        return self.kid

    async def other(self) -> Any:
        return await self.kernel.get_agent(Gives, "other")

    async def tell(self, to: AsyncCallback) -> None:
        await self.keep("told")
        await to("told")

    async def show(self, what: Any) -> int:
        await what.keep("shown")
        return len(await what.kept())

    async def show_other(self, what: str) -> int:
        other = await self.kernel.get_agent(Gives, "other")
        match what:
            case "own kid":
                return await other.show(await self.kid())
            case "own method":
                return await other.show(self.kid)
        return await other.show(await self.kernel.get_agent(Gives, "a"))


@pytest.mark.rule("F-024", "F-395")
async def test_a_stub_of_a_facet_does_not_leave_its_tree(clock: object) -> None:
    async with open_test_kernel(roots=[Gives], facets=[Facet]) as test:
        root = await test.kernel.get_agent(Gives, "a")
        for method in ("kid", "plain_kid", "method"):
            error = await raises(UsageError, getattr(root, method))
            assert "does not leave its tree" in str(error)
        for what in ("own kid", "own method"):
            await raises(UsageError, root.show_other, what)
        other = await root.other()
        assert await other.show(root) == 1, "a root is the same from everywhere"
        assert await root.show_other("a root") == 2
        error = await raises(UsageError, root.show, object())
        assert "Gives.show" in str(error)


@pytest.mark.rule("F-024")
async def test_who_is_told_outside_is_told_what_is_durable(clock: object) -> None:
    async with open_test_kernel(roots=[Gives], facets=[Facet]) as test:
        root = await test.kernel.get_agent(Gives, "a")
        tree = test.tree("Gives", "a")
        assert tree is not None
        told: list[tuple[str, bool]] = []

        async def to(text: str) -> None:
            told.append((text, tree.barrier.durable >= tree.barrier.count))

        await root.tell(to)
        assert told == [("told", True)]


@pytest.mark.rule("F-026")
async def test_calls_through_one_stub_begin_in_the_order_in_which_they_are_made(
    clock: object,
) -> None:
    async with opened(*MORE) as test:
        kid = await get(test, (Order, "o"))
        made: list[str] = []

        async def call(text: str) -> None:
            made.append(text)
            await kid.note(text)

        NOTES.clear()
        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(call, str(number))
        assert made == NOTES


@pytest.mark.rule("F-026")
@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("seed", range(4))
async def test_calls_that_find_it_asleep_begin_in_their_order_too(
    outside: bool, seed: int, clock: object
) -> None:
    """They wait for one start and trio wakes them in any order; one of them leaves."""
    async with opened(*MORE, seed=seed) as test:
        kid = await get(test, (Order, "o"))
        if outside:
            root = await test.kernel.get_agent(Top, "a")
            kid = await test.kernel.get_sub_agent(root, Order, "o")
        assert await tree_of(test).evict(node_at(test, ("Order", "o")))
        NOTES.clear()
        made: list[str] = []
        leaver = trio.CancelScope()

        async def call(text: str) -> None:
            if text == "7":
                with leaver:
                    made.append(text)
                    await kid.note(text)
                return
            made.append(text)
            await kid.note(text)

        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(call, str(number))
            while len(made) < 20:
                await trio.lowlevel.checkpoint()
            leaver.cancel()
        heard = [n for n in NOTES if n.isdigit()]
        assert heard in (made, [n for n in made if n != "7"])


@pytest.mark.rule("F-026", "F-242")
async def test_calls_that_wait_for_a_start_that_fails_all_hear_of_that_one(
    clock: object,
) -> None:
    async with opened(Bare) as test:
        kid = await get(test, (Bare, "b"))
        assert await tree_of(test).evict(node_at(test, ("Bare", "b")))
        FAIL.append(1)
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(raises, FacetBroken, kid.ping, 1)
        assert await kid.ping(1) == 2


@pytest.mark.rule("F-030")
async def test_no_gate_stands_before_the_parents_own_code(clock: object) -> None:
    async with opened(*MORE) as test:
        await get(test, (Parent, "p"), (Facet, "k"))
        outside = await test.kernel.get_sub_agent(
            await test.kernel.get_sub_agent(
                await test.kernel.get_agent(Top, "a"), Parent, "p"
            ),
            Facet, "k2",
        )  # fmt: skip
        assert await outside.ping(1) == 2
        assert SEEN == []
        answer = await come(test, ("Top", "a"), ("Parent", "p"), ("Facet", "k"))
        assert isinstance(answer, Response)
        assert SEEN == ["gate of k"], "whoever comes from outside is asked"
