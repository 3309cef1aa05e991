"""State: a row or none, checked, told to all clients but its sender; root and facet alike."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from culet.kernel import (
    Agent,
    ConnectContext,
    Connection,
    Limits,
    current_agent,
    rpc,
)
from culet.kernel.errors import StorageFull, UsageError
from culet.kernel.node import Node
from culet.kernel.testing import Harness, open_test_kernel
from kernel.agents import agent_at, node_at, settle
from kernel.peers import RecordingPeer, connect, frames_of

HEARD: list[Any] = []
AT = pytest.mark.parametrize("hops", [(), (("Top", "k"),)], ids=["root", "facet"])
Hops = tuple[tuple[str, str], ...]


@pytest.fixture(autouse=True)
def fresh() -> None:
    HEARD.clear()


class Top(Agent):
    initial_state = {"n": 0}

    def should_connection_be_readonly(
        self, connection: Connection, ctx: ConnectContext
    ) -> bool:
        if ctx.identity == "counted":
            self.set_state({"n": self.state["n"] + 1})
        return bool(ctx.identity == "reader")

    def should_send_protocol_messages(
        self, connection: Connection, ctx: ConnectContext
    ) -> bool:
        return bool(ctx.identity != "raw")

    def validate_state_change(self, next: Any, source: Any) -> None:  # noqa: A002
        HEARD.append(("check", str(next), source))
        if isinstance(next, dict):
            next["touched"] = True  # a copy: it shows nowhere
        if isinstance(next, dict) and "bad" in next:
            raise ValueError("secret-token-9")

    async def on_state_changed(self, state: Any, source: Any) -> None:
        here = current_agent()
        assert here is not None
        HEARD.append(("changed", state, source, here.connection))
        if isinstance(state, dict) and "slow" in state:
            try:
                await trio.sleep(20)
            finally:
                HEARD.append("hook over")
        if isinstance(state, dict) and "raise" in state:
            raise ValueError(state["raise"])

    async def on_error(
        self, error: BaseException, *, connection: Connection | None = None
    ) -> None:
        HEARD.append(("error", str(error), connection))

    @rpc
    async def read(self) -> Any:
        return self.state

    @rpc
    async def write(self, value: Any) -> None:
        self.set_state(value)

    async def kid(self) -> None:
        await self.dynamic_agents.get(Top, "k")


class Bare(Agent):
    """Has no initial state."""


def opened() -> Any:
    return open_test_kernel(roots=[Top, Bare], facets=[Top])


async def live(test: Harness, hops: Hops) -> Any:
    """Return the instance, made and started."""
    root = await test.kernel.get_agent(Top, "a")
    if hops:
        await root.kid()
    return agent_at(test, *hops)


def stored(node: Node) -> list[Any]:
    if not node.db.exists:
        return []
    return node.db.execute("SELECT value FROM main.culet_value WHERE key = 'state'")


def states(peer: RecordingPeer) -> list[Any]:
    return [f.get("state") for f in frames_of(peer, "cf_agent_state")]


def errors(peer: RecordingPeer) -> list[str]:
    return [f["error"] for f in frames_of(peer, "cf_agent_state_error")]


def answers(peer: RecordingPeer) -> list[Any]:
    return [
        (f["success"], f.get("error", f.get("result"))) for f in frames_of(peer, "rpc")
    ]


async def come(test: Harness, hops: Hops, **options: Any) -> RecordingPeer:
    await test.kernel.get_agent(Top, "a")
    peer = await connect(test, ("Top", "a"), *hops, **options)
    await settle()
    return peer


# ---- the row


@AT
@pytest.mark.rule("F-410", "F-422")
async def test_the_first_read_stores_the_initial_state(
    hops: Hops, clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened() as test:
        agent = await live(test, hops)
        assert stored(node_at(test, *hops)) == [], "nobody has read it"
        assert agent.state == {"n": 0}
        assert stored(node_at(test, *hops)) == [('{"n":0}',)]
        await agent.durable()
        await test.crash()
        monkeypatch.setattr(Top, "initial_state", {"n": 99})
        await test.reopen()
        assert (await live(test, hops)).state == {"n": 0}, (
            "a later class changes nothing"
        )


@AT
@pytest.mark.rule("F-410")
async def test_a_client_that_connects_reads_it_first(hops: Hops, clock: object) -> None:
    async with opened() as test:
        peer = await come(test, hops)
        assert states(peer) == [{"n": 0}]
        assert stored(node_at(test, *hops)) == [('{"n":0}',)]


@pytest.mark.rule("F-410")
async def test_without_an_initial_state_there_is_none_and_no_row(clock: object) -> None:
    async with opened() as test:
        await test.kernel.get_agent(Bare, "a")
        node = test.find([("Bare", "a")])
        assert node is not None
        assert node.agent.state is None
        assert not node.db.exists


@pytest.mark.rule("F-410")
async def test_a_full_file_does_not_keep_an_initial_state_from_being_read(
    clock: object,
) -> None:
    async with opened() as test:
        agent = await live(test, ())
        test.faults.fail_commit(error=StorageFull)
        assert agent.state == {"n": 0}
        assert stored(node_at(test)) == []
        assert agent.state == {"n": 0}
        assert stored(node_at(test)) == [('{"n":0}',)], "the next read stores it"


async def test_an_initial_state_is_not_rolled_back_with_a_users_transaction(
    clock: object,
) -> None:
    async with opened() as test:
        agent = await live(test, ())
        agent.sql("create table t (v)")
        with pytest.raises(ZeroDivisionError), agent.transaction():
            assert agent.state == {"n": 0}
            raise ZeroDivisionError
        assert agent.state == {"n": 0}
        assert stored(node_at(test)) == [('{"n":0}',)]


@AT
@pytest.mark.parametrize("value", [None, 0, False, ""])
@pytest.mark.rule("F-411", "F-422")
async def test_a_state_that_looks_like_nothing_is_a_state(
    value: Any, hops: Hops, clock: object
) -> None:
    async with opened() as test:
        agent = await live(test, hops)
        agent.set_state(value)
        await agent.durable()
        await test.crash()
        await test.reopen()
        agent = await live(test, hops)
        assert agent.state == value
        assert type(agent.state) is type(value)
        assert states(await come(test, hops)) == [value]


@AT
@pytest.mark.rule("F-412", "F-422")
async def test_a_damaged_state_falls_back_to_the_initial_one(
    hops: Hops, clock: object
) -> None:
    async with opened() as test:
        agent = await live(test, hops)
        agent.set_state({"n": 7})
        node_at(test, *hops).db.execute("UPDATE main.culet_value SET value = '{\"n\":'")
        failures: list[Any] = []
        test.kernel.subscribe("failure", lambda *event: failures.append(event))
        for _ in range(2):
            await settle()
            await test.evict([("Top", "a"), *hops])
            assert (await live(test, hops)).state == {"n": 0}
        assert stored(node_at(test, *hops)) == [('{"n":0}',)]
        assert len(failures) == 1, "told once: the next start does not meet it again"
        assert states(await come(test, hops)) == [{"n": 0}]


@pytest.mark.rule("F-412")
async def test_a_damaged_state_without_an_initial_one_is_no_state(
    clock: object,
) -> None:
    async with opened() as test:
        await test.kernel.get_agent(Bare, "a")
        bare = test.find([("Bare", "a")])
        assert bare is not None
        bare.agent.set_state(1)
        bare.db.execute("UPDATE main.culet_value SET value = 'nul'")
        await test.evict([("Bare", "a")])
        await test.kernel.get_agent(Bare, "a")
        bare = test.find([("Bare", "a")])
        assert bare is not None
        assert bare.agent.state is None
        assert stored(bare) == []


@AT
@pytest.mark.rule("F-413", "F-422")
async def test_a_state_is_there_when_set_state_returns(
    hops: Hops, clock: object
) -> None:
    async with opened() as test:
        agent = await live(test, hops)
        for n in range(3):
            agent.set_state({"n": n})
            assert agent.state == {"n": n}
        assert stored(node_at(test, *hops)) == [('{"n":2}',)]
        agent.state["n"] = 9
        assert agent.state == {"n": 2}, "what is read is a copy"


@pytest.mark.rule("F-423", "W-055")
async def test_the_state_of_a_facet_is_its_own(clock: object) -> None:
    async with opened() as test:
        kid = await live(test, (("Top", "k"),))
        parent, watcher = agent_at(test), await come(test, ())
        kid.set_state({"n": 5})
        parent.set_state({"n": 6})
        await settle()
        assert (kid.state, parent.state) == ({"n": 5}, {"n": 6})
        assert states(watcher) == [{"n": 0}, {"n": 6}]
        await test.evict([("Top", "a"), ("Top", "k")])
        kid = await live(test, (("Top", "k"),))
        assert (kid.state, parent.state) == ({"n": 5}, {"n": 6})


# ---- checked and told


@AT
@pytest.mark.rule("F-414", "F-422", "W-072")
async def test_a_refused_state_is_neither_stored_nor_told(
    hops: Hops, clock: object
) -> None:
    async with opened() as test:
        peer, other = await come(test, hops), await come(test, hops, label="o")
        agent = agent_at(test, *hops)
        with pytest.raises(ValueError, match="secret-token-9"):
            agent.set_state({"bad": 1})
        peer.send({"type": "cf_agent_state", "state": {"bad": 2}})
        await settle()
        assert errors(peer) == ["State update rejected"], "why stays in the log"
        assert errors(other) == []
        assert states(peer) == [{"n": 0}] * 2, "the sender gets the true one back"
        assert states(other) == [{"n": 0}]
        assert stored(node_at(test, *hops)) == [('{"n":0}',)]
        assert not [h for h in HEARD if h[0] == "changed"]


@AT
@pytest.mark.rule("F-415", "F-422")
async def test_a_hook_that_raises_changes_nothing_and_its_error_is_heard(
    hops: Hops, clock: object
) -> None:
    async with opened() as test:
        peer, other = await come(test, hops), await come(test, hops, label="o")
        agent = agent_at(test, *hops)
        agent.set_state({"raise": "one"})
        await settle()
        peer.send({"type": "cf_agent_state", "state": {"raise": "two"}})
        await settle()
        heard = [h for h in HEARD if h[0] == "error"]
        assert heard == [("error", "one", None), ("error", "two", peer.connection)]
        assert agent.state == {"raise": "two"}
        assert states(other)[1:] == [{"raise": "one"}, {"raise": "two"}]
        assert node_at(test, *hops).agent is agent, "and its agent lives on"


@AT
@pytest.mark.rule("F-416", "F-417", "F-422", "F-229", "W-070", "W-071")
async def test_who_changed_it_is_told_and_is_not_sent_it(
    hops: Hops, clock: object
) -> None:
    async with opened() as test:
        peer, other = await come(test, hops), await come(test, hops, label="o")
        raw = await come(test, hops, label="r", identity="raw")
        HEARD.clear()
        peer.send({"type": "cf_agent_state", "state": {"n": 1}})
        agent_at(test, *hops).set_state({"n": 2})
        peer.rpc("write", {"n": 3})
        await settle()
        checked = [h[2] for h in HEARD if h[0] == "check"]
        assert sorted(map(str, checked)) == sorted(
            [str(peer.connection), "server", "server"]
        )
        changed = {h[1]["n"]: h[2] for h in HEARD if h[0] == "changed"}
        assert changed == {1: peer.connection, 2: "server", 3: "server"}
        assert states(other) == [{"n": 0}, {"n": 1}, {"n": 2}, {"n": 3}]
        assert states(peer) == [{"n": 0}, {"n": 2}, {"n": 3}]
        assert raw.out == []


@AT
@pytest.mark.rule("F-418", "F-422", "W-048", "W-072")
async def test_a_readonly_client_changes_no_state_in_any_way(
    hops: Hops, clock: object
) -> None:
    async with opened() as test:
        peer = await come(test, hops, identity="reader")
        conn = peer.connection
        assert conn is not None
        peer.send({"type": "cf_agent_state", "state": {"n": 1}})
        peer.rpc("write", {"n": 2})
        await settle()
        assert errors(peer) == ["Connection is readonly"]
        assert answers(peer) == [(False, "Connection is readonly")]
        peer.rpc("read")
        await settle()
        assert answers(peer)[1:] == [(True, {"n": 0})], "reading is allowed"
        agent_at(test, *hops).set_state({"n": 3})
        await settle()
        assert states(peer)[-1] == {"n": 3}, "and it is told of changes"
        conn.set_state({"mine": 1})
        conn.set_state(lambda old: {**old, "more": 2})
        assert conn.state == {"mine": 1, "more": 2}
        assert conn.readonly, "what it keeps does not touch its flags"
        conn.readonly = False
        peer.rpc("write", {"n": 4})
        await settle()
        assert agent_at(test, *hops).state == {"n": 4}


@pytest.mark.rule("F-418")
async def test_a_readonly_client_of_one_agent_may_lead_to_changes_of_another(
    clock: object,
) -> None:
    """The flag is the connection's at the agent that it talks to."""

    class Asks(Top):
        @rpc
        async def pass_on(self, value: Any) -> None:
            kid = await self.dynamic_agents.get(Top, "k")
            await kid.write(value)

    async with open_test_kernel(roots=[Asks], facets=[Top]) as test:
        peer = await connect(test, ("Asks", "a"), identity="reader")
        peer.rpc("pass_on", {"n": 1})
        await settle()
        assert answers(peer) == [(True, None)]
        kid = test.find([("Asks", "a"), ("Top", "k")])
        assert kid is not None
        assert kid.agent.state == {"n": 1}


@AT
@pytest.mark.rule("F-419", "F-422")
async def test_who_connects_gets_one_state_the_others_each_change(
    hops: Hops, clock: object
) -> None:
    async with opened() as test:
        first = await come(test, hops, identity="counted")
        second = await come(test, hops, label="s", identity="counted")
        assert states(second) == [{"n": 2}], "not the change that its coming made"
        assert states(first) == [{"n": 1}, {"n": 2}]
        (me,) = frames_of(second, "cf_agent_identity")
        assert me["stateFollows"]


@AT
@pytest.mark.rule("F-420", "F-235", "F-422", "W-047")
async def test_a_client_without_protocol_calls_and_hears_messages_only(
    hops: Hops, clock: object
) -> None:
    async with opened() as test:
        raw = await come(test, hops, identity="raw")
        agent = agent_at(test, *hops)
        agent.set_state({"n": 1})
        agent.broadcast("hello")
        raw.rpc("read")
        raw.send({"type": "cf_agent_state", "state": {"bad": 1}})
        await settle()
        assert raw.out[0] == "hello"
        assert answers(raw) == [(True, {"n": 1})]
        assert states(raw) == frames_of(raw, "cf_agent_identity") == []
        assert frames_of(raw, "cf_agent_mcp_servers") == []


# ---- the hook's surroundings


@AT
@pytest.mark.rule("F-462")
async def test_the_hook_knows_for_whom_the_state_was_set(
    hops: Hops, clock: object
) -> None:
    async with opened() as test:
        peer = await come(test, hops)
        peer.rpc("write", {"n": 1})
        await settle()
        assert HEARD[-1] == ("changed", {"n": 1}, "server", peer.connection)


@AT
@pytest.mark.rule("F-462")
async def test_hooks_begin_in_the_order_of_the_changes(
    hops: Hops, clock: object
) -> None:
    """Each for whom it was set: who follows the state must not end with an old one."""
    async with opened() as test:
        peer = await come(test, hops)
        agent = agent_at(test, *hops)
        for n in range(1, 20, 2):
            agent.set_state({"n": n})
            peer.send({"type": "cf_agent_state", "state": {"n": n + 1}})
        await settle()
        changed = [h[1:] for h in HEARD if h[0] == "changed"]
        conn = peer.connection
        assert changed == [
            change
            for n in range(1, 20, 2)
            for change in (({"n": n}, "server", None), ({"n": n + 1}, conn, conn))
        ]


@pytest.mark.limit("hooks_at_once")
@pytest.mark.rule("F-462")
async def test_hooks_that_are_too_many_are_left_out_and_shift_nothing(
    clock: object,
) -> None:
    async with open_test_kernel(
        roots=[Top, Bare], limits=Limits(hooks_at_once=2)
    ) as test:
        agent = await live(test, ())
        for n in (1, 2, 3):
            agent.set_state({"n": n})
        await settle()
        agent.set_state({"n": 4})
        await settle()
        assert [h[1]["n"] for h in HEARD if h[0] == "changed"] == [1, 2, 4]


@pytest.mark.rule("F-462", "F-477")
async def test_a_hook_keeps_its_agent_awake_and_ends_with_it(clock: object) -> None:
    async with opened() as test:
        kid = await live(test, (("Top", "k"),))
        kid.set_state({"slow": 1})
        await settle()
        with pytest.raises(UsageError, match="busy"):
            await test.evict([("Top", "a"), ("Top", "k")])
        assert "hook over" not in HEARD
        began = trio.current_time()
        await agent_at(test).dynamic_agents.abort(Top, "k")
        assert HEARD[-1] == "hook over"
        assert trio.current_time() - began < 1


# ---- what a hook may not be called


@pytest.mark.rule("F-421")
async def test_the_former_name_of_the_hook_is_refused_with_its_new_one() -> None:
    """A hook under a name that nobody calls would be silence, with or without the new
    one beside it."""
    both = {
        "on_state_update": lambda self: None,
        "on_state_changed": Top.on_state_changed,
    }
    for names in ({"on_state_update": both["on_state_update"]}, both):
        old = type("Old", (Agent,), names)
        with pytest.raises(UsageError, match=r"on_state_update.*on_state_changed"):
            async with open_test_kernel(roots=[old]):
                pytest.fail("it opened")
