"""Visiting the facet of a run: who may, what is seen there, what it does to the run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio

from adapters.peer import connected, user
from culet.adapters import AIChatAgent
from culet.kernel import ChildRef, Chunk, Request, Response, Turn
from kernel.agents import agent_at, rows, tree_of
from kernel.peers import come
from kernel.toolkit import (
    Kid,
    Top,
    ask,
    opened,
    say,
    top,
)

HERE = ("Top", "a")


class Talks(AIChatAgent):
    """Answers each question with its text; a run takes five seconds for it."""

    async def on_chat_message(self, turn: Turn) -> AsyncIterator[Chunk]:
        text = "".join(p.get("text", "") for p in turn.messages[-1]["parts"])
        yield {"type": "text-start", "id": "t"}
        yield say(f"on {text}")
        if turn.run_id is not None:
            await trio.sleep(5)
            yield say(", done")
        yield {"type": "text-end", "id": "t"}


class Guarded(Top):
    """Lets in who says who he is."""

    async def on_before_sub_agent(
        self, request: Request, child: ChildRef
    ) -> Request | Response | None:
        if request.identity != "ann":
            return Response("no", 403)
        return self._default_gate(child)


async def status(test: Any, *hops: tuple[str, str], identity: Any = None) -> int:
    found = await come(test, *hops, identity=identity)
    return found.status if isinstance(found, Response) else 200


@pytest.mark.rule("T-239", "T-240")
async def test_who_may_visit_is_the_parents_to_say_an_id_opens_nothing(
    clock: object,
) -> None:
    async with opened(root=Guarded) as test:
        me = await top(test, Guarded)
        await me.run_agent_tool(Kid, [["say", "x"]], run_id="r")
        inside = (("Guarded", "a"), ("Kid", "r"))
        assert await status(test, *inside) == 403
        assert await status(test, *inside, identity="bob") == 403
        assert await status(test, *inside, identity="ann") == 200
        assert await status(test, ("Kid", "r")) == 404, "it has no address of its own"


@pytest.mark.rule("T-242", "T-241", "T-250", "T-251")
async def test_class_and_id_have_to_be_those_of_a_run_that_is_there(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        await me.run_agent_tool(Kid, [["say", "x"]], run_id="r")
        assert await status(test, HERE, ("Kid", "r")) == 200
        unknown = await come(test, HERE, ("Kid", "guess"))
        other = await come(test, HERE, ("Frail", "r"))
        assert await me.runs.clear() == 1
        cleared = await come(test, HERE, ("Kid", "r"))
        nothing = await come(test, HERE, ("NoSuchClass", "r"))
        for found in (unknown, other, cleared, nothing):
            assert isinstance(found, Response)
            assert found.status == 404
            for name in ("Kid", "Frail", "Top"):
                assert name.encode() not in bytes(found.body)  # type: ignore[arg-type]
        assert rows(
            tree_of(test), "SELECT count(*) FROM node WHERE state <> 'gone'"
        ) == [(1,)]


@pytest.mark.rule("T-243", "T-245")
async def test_a_visitor_sees_the_chat_and_what_he_says_later_changes_no_run(
    clock: object,
) -> None:
    async with opened(Talks) as test:
        me = await top(test)
        async with trio.open_nursery() as nursery:
            results = ask(nursery, me, Talks, "topic", run_id="r")
            await test.advance(1)
            async with connected(test.kernel, HERE, ("Talks", "r")) as visitor:
                assert visitor.of("cf_agent_stream_resuming")[0]["id"] == "r"
                visitor.send("cf_agent_stream_resume_ack", id="r")
                await visitor.until(lambda c: "done" in c.text("r"))
                visitor.chat("mine", user("u1", "something else"))
                await visitor.ended("mine")
                assert visitor.text("mine") == "on something else"
        run = results[0]
        assert (run.status, run.summary) == ("completed", "on topic, done")
        await me.durable()
        await test.crash()
        await test.reopen()
        me = await top(test)
        assert me.runs.get("r") == run
        await me.dynamic_agents.get(Talks, "r")
        texts = [m["parts"][0]["text"] for m in agent_at(test, ("Talks", "r")).messages]
        assert texts == [
            "topic",
            "on topic, done",
            "something else",
            "on something else",
        ]


@pytest.mark.rule("T-246")
async def test_a_stop_from_inside_aborts_the_run(clock: object) -> None:
    async with opened(Talks) as test:
        me = await top(test)
        async with trio.open_nursery() as nursery:
            results = ask(nursery, me, Talks, "topic", run_id="r")
            await test.advance(1)
            async with connected(test.kernel, HERE, ("Talks", "r")) as visitor:
                visitor.send("cf_agent_chat_request_cancel", id="r")
        assert results[0].status == "aborted"
        assert me.runs.get("r") == results[0]


@pytest.mark.rule("T-247", "T-019")
async def test_a_clear_from_inside_ends_the_run_in_error(clock: object) -> None:
    async with opened(Talks) as test:
        me = await top(test)
        async with trio.open_nursery() as nursery:
            results = ask(nursery, me, Talks, "topic", run_id="r")
            await test.advance(1)
            async with connected(test.kernel, HERE, ("Talks", "r")) as visitor:
                visitor.send("cf_agent_chat_clear")
        assert results[0].status == "error"
        assert "skipped" in results[0].error
        assert agent_at(test, ("Talks", "r")).messages == []


@pytest.mark.rule("T-249")
async def test_a_visitor_that_leaves_changes_nothing(clock: object) -> None:
    async with opened(Talks) as test:
        me = await top(test)
        async with trio.open_nursery() as nursery:
            results = ask(nursery, me, Talks, "topic", run_id="r")
            await test.advance(1)
            async with connected(test.kernel, HERE, ("Talks", "r")) as visitor:
                visitor.leave()
        assert results[0].summary == "on topic, done"
