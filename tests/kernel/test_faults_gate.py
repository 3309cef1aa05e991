"""What changes while a gate thinks, and after it has let somebody in."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import trio

from culet.kernel import Agent, ChildRef, Request, Response, rpc
from kernel.agents import rows, settle, tree_of
from kernel.peers import RecordingPeer, come, connect, frames_of
from kernel.toolkit import Kid, Top, opened, top

ASKED = trio.Event()
GO = trio.Event()


class Slow(Top):
    """Its gate admits, after a while; it can throw somebody out."""

    async def on_before_sub_agent(
        self, request: Request, child: ChildRef
    ) -> Request | Response | None:
        answer = self._default_gate(child)
        ASKED.set()
        await GO.wait()
        return answer

    async def revoke(self, who: str) -> int:
        found = [c for c in self.sockets.list() if c.identity == who]
        for connection in found:
            connection.close(4401, "signed out")
        return len(found)

    @rpc
    async def note(self, text: str) -> None:
        self.set_state({"text": text})


@pytest.mark.rule("F-45", "I-22", "I-25")
@pytest.mark.parametrize("kind", ["a run's facet", "another facet"])
async def test_what_is_deleted_while_its_gate_thinks_is_not_made_again(
    kind: str, clock: object
) -> None:
    global ASKED, GO
    ASKED, GO = trio.Event(), trio.Event()
    async with opened(root=Slow) as test:
        me = await top(test, Slow)
        if kind == "a run's facet":
            run = await me.run_agent_tool(Kid, [["say", "x"]], run_id="r")
            assert run.status == "completed"
        else:
            await me.dynamic_agents.get(Kid, "r")
        answers: list[Any] = []

        async def visit() -> None:
            answers.append(await come(test, ("Slow", "a"), ("Kid", "r")))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(visit)
            await ASKED.wait()
            await me.dynamic_agents.delete(Kid, "r")
            GO.set()
        (answer,) = answers
        assert isinstance(answer, Response)
        assert answer.status == 404
        tree = tree_of(test, "Slow")
        assert rows(tree, "SELECT count(*) FROM node WHERE state = 'live'") == [(1,)]
        assert test.find([("Slow", "a"), ("Kid", "r")]) is None


@pytest.mark.rule("F-48", "I-42")
async def test_who_loses_his_rights_is_closed_and_not_heard_any_more(
    clock: object,
) -> None:
    async with opened(root=Slow) as test:
        here = ("Slow", "a")
        ann = await connect(test, here, identity="ann", label="1")
        more = await connect(test, here, identity="ann", label="2")
        bob = await connect(test, here, identity="bob", label="3")
        me = await top(test, Slow)
        started = trio.current_time()
        assert await me.revoke("ann") == 2
        ann.rpc("note", "late")
        bob.rpc("note", "mine")
        await me.durable()
        await settle()
        assert trio.current_time() - started < 1
        assert ann.closed == more.closed == (4401, "signed out")
        assert bob.closed is None
        assert me.state == {"text": "mine"}
        me.broadcast("to all")
        assert "to all" in bob.out
        assert "to all" not in ann.out + more.out


class Odd(Agent):
    async def fail(self, payload: Any, schedule: Any) -> None:
        raise ValueError("no")

    async def soon(self) -> None:
        await self.schedule(1, "fail")


HOSTILE = "x\x1b[2J\x07\nERROR culet.kernel: all is lost\u202e<script>alert(1)</script>"


@pytest.mark.rule("F-55")
async def test_a_name_with_escapes_and_markup_is_a_name_and_commands_nothing(
    clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "culet")
    async with opened(Odd) as test:
        me = await top(test)
        client: RecordingPeer = await connect(test)
        odd = await me.dynamic_agents.get(Odd, HOSTILE)
        await odd.soon()
        await test.advance(5)
        run = await me.run_agent_tool(Kid, [["say", HOSTILE]], run_id="r")
        assert run.summary == HOSTILE, "it is kept and sent as it is"
        await me.durable()
        assert me.dynamic_agents.has(Odd, HOSTILE)
        said = frames_of(client, "agent-tool-event")
        assert any("script" in str(f) for f in said), "as JSON, not as markup"
        assert all("\x1b" not in t and "\n" not in t for t in map(str, client.out))
    told = [r.getMessage() for r in caplog.records if "fail" in r.getMessage()]
    assert told
    for line in told:
        assert not any(c in line for c in "\x1b\x07\n"), line
