"""Asking for a run: what comes first, what a run is called, who may ask and for whom."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import trio

from culet.adapters import AIChatAgent, ScriptedModel, Think
from culet.kernel import Agent, AgentToolRun, Chunk, Request, Response, Turn, agent_tool
from culet.kernel.errors import CapacityError, UsageError
from culet.kernel.testing import open_test_kernel
from kernel.agents import agent_at, rows, settle, tree_of
from kernel.peers import come, connect
from kernel.toolkit import (
    HEARD,
    TURNS,
    Frail,
    Hears,
    Kid,
    Top,
    again,
    ask,
    frames,
    kinds,
    opened,
    run_frames,
    say,
    top,
)


class Stranger(Kid):
    """Registered nowhere."""


class Mute(Agent):
    """Cannot be run as a tool."""


class Errs(Kid):
    """Says in band that something is wrong, then goes on."""

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        yield say("so far")
        yield {"type": "error", "errorText": turn.input}
        yield say(" and on")


class Silent(Kid):
    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        yield {"type": "step-start"}


class Server(Hears):
    """A root that asks for runs from every place where code of an agent runs."""

    async def by_call(self) -> str:
        run = await self.run_agent_tool(Kid, [["say", "x"]], run_id="call")
        return run.status

    async def on_request(self, request: Request) -> Response:
        run = await self.run_agent_tool(Kid, [["say", "x"]], run_id="request")
        return Response.json(run.status)

    async def tick(self, payload: Any, schedule: Any) -> None:
        await self.run_agent_tool(Kid, [["say", "x"]], run_id="schedule")

    async def on_agent_tool_finish(self, run: AgentToolRun) -> None:
        await super().on_agent_tool_finish(run)
        if run.run_id == "call":
            await self.run_agent_tool(Kid, [["say", "x"]], run_id="hook")


def question(text: str) -> list[dict[str, Any]]:
    """One user message."""
    return [{"id": text, "role": "user", "parts": [{"type": "text", "text": text}]}]


# ---- what it is called


@pytest.mark.rule("T-002")
async def test_a_run_without_an_id_gets_one_that_is_safe_anywhere(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        ids = [(await me.run_agent_tool(Kid, [])).run_id for _ in range(3)]
        assert len(set(ids)) == 3
        assert all(re.fullmatch(r"[A-Za-z0-9_-]{12,}", one) for one in ids)


@pytest.mark.rule("T-005", "T-025")
async def test_the_facet_of_a_run_is_named_by_its_id_and_its_class(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        await me.dynamic_agents.get(Frail, "r")
        for run_id in ("r", "s"):
            await me.run_agent_tool(Kid, [["say", "x"]], run_id=run_id)
        assert await me.dynamic_agents.lookup(Kid, "r") is not None
        tree = tree_of(test)
        facets = rows(tree, "SELECT class, name, slot FROM node WHERE parent NOTNULL")
        assert {(c, n) for c, n, _s in facets} == {
            ("Frail", "r"), ("Kid", "r"), ("Kid", "s"),
        }  # fmt: skip
        assert len({slot for _c, _n, slot in facets}) == 3
        children = rows(tree, "SELECT id, child FROM run")
        by_name = {name: slot for cls, name, slot in facets if cls == "Kid"}
        assert dict(children) == by_name, "one facet a run, for life"


@pytest.mark.rule("T-026b")
async def test_a_class_is_a_tool_by_being_asked_and_nothing_else(clock: object) -> None:
    async with open_test_kernel(roots=[Top, Kid], facets=[Kid]) as test:
        await test.kernel.get_agent(Kid, "alone")
        alone = test.find([("Kid", "alone")])
        assert alone is not None
        me = await top(test)
        await me.dynamic_agents.get(Kid, "plain")
        plain = agent_at(test, ("Kid", "plain"))
        for parent in (alone.agent, plain, me):
            run = await parent.run_agent_tool(Kid, [["say", "x"]], run_id="r")
            assert (run.status, run.summary) == ("completed", "x")


@pytest.mark.rule("T-026c")
async def test_that_a_facet_exists_says_nothing_of_a_run_nor_the_reverse(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        await me.dynamic_agents.get(Kid, "f")
        assert me.runs.get("f") is None
        run = await me.run_agent_tool(Kid, [["say", "x"]], run_id="r")
        await me.dynamic_agents.delete(Kid, "r")
        assert not me.dynamic_agents.has(Kid, "r")
        assert me.runs.get("r") == run, "a row outlives its facet"
        again_run = await me.run_agent_tool(Kid, [["say", "x"]], run_id="f")
        assert again_run.status == "completed", "a run takes the facet that is there"


# ---- in which order


@pytest.mark.rule("T-003", "T-277")
async def test_the_hook_then_the_first_frame_then_the_facet_begins(
    clock: object,
) -> None:
    class Notes(Top):
        async def on_agent_tool_start(self, run: AgentToolRun) -> None:
            stored = self.runs.get(run.run_id)
            assert stored is not None
            HEARD.append(("hook", stored.status, len(run_frames(peer))))

    class Begins(Kid):
        async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
            HEARD.append(("turn", len(run_frames(peer))))
            yield say("x")

    async with opened(Begins, root=Notes) as test:
        me = await top(test, Notes)
        peer = await connect(test, ("Notes", "a"))
        await me.run_agent_tool(Begins, 1, run_id="r")
        await me.durable()
        await settle()
        assert HEARD[:2] == [("hook", "running", 0), ("turn", 1)]
        assert kinds(run_frames(peer)) == [
            (0, "started"),
            (1, "chunk"),
            (2, "finished"),
        ]


@pytest.mark.rule("T-003", "T-119")
async def test_options_are_checked_then_the_id_then_the_places(clock: object) -> None:
    class One(Top):
        max_concurrent_agent_tools = 1

    async with opened(root=One) as test:
        me = await top(test, One)
        done = await me.run_agent_tool(Kid, [["say", "x"]], run_id="done")
        async with trio.open_nursery() as nursery:
            ask(nursery, me, Kid, [["sleep", 9]], run_id="r")
            await test.advance(1)
            with pytest.raises(UsageError):
                await me.run_agent_tool(Kid, object(), run_id="done")
            assert await me.run_agent_tool(Kid, [["say", "x"]], run_id="done") == done
            refused = await me.run_agent_tool(Kid, [], run_id="new")
        assert (refused.status, refused.reason) == ("error", "capacity")


@pytest.mark.rule("T-006", "T-007")
@pytest.mark.parametrize(("cls", "why"), [(Stranger, "Stranger"), (Mute, "on_turn")])
async def test_what_can_never_run_is_refused_and_leaves_nothing(
    cls: type[Agent], why: str, clock: object
) -> None:
    async with opened(Mute) as test:
        me = await top(test)
        peer = await connect(test)
        with pytest.raises(UsageError, match=why):
            await me.run_agent_tool(cls, 1, run_id="r")
        await settle()
        assert (me.runs.get("r"), run_frames(peer), HEARD) == (None, [], [])
        assert rows(tree_of(test), "SELECT count(*) FROM node") == [(1,)]
        assert (await me.run_agent_tool(Kid, [], run_id="r")).status == "completed"


@pytest.mark.rule("T-016")
async def test_asking_returns_before_the_turn_has_ended(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        began = trio.current_time()
        run = await me.run_agent_tool(Kid, [["sleep", 9]], run_id="r", detached=True)
        assert trio.current_time() == began
        assert (run.status, run.started_at) == ("running", test.clock.now_ms())


@pytest.mark.rule("T-017", "T-147")
async def test_what_a_turn_says_is_its_runs_from_the_first_word_over_a_crash(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        script = [["say", "a"], ["durable"], ["sleep", 5], ["say", "b"]]
        await me.run_agent_tool(Kid, script, run_id="r", detached=True)
        await test.advance(1)
        me = await again(test)
        await test.advance(9)
        assert TURNS == {"r": 2}, "the same request id in each attempt"
        child = agent_at(test, ("Kid", "r"))
        file = tree_of(test).store.agent(child._node.slot)
        sql = "SELECT DISTINCT stream, attempt FROM main.culet_entry ORDER BY attempt"
        assert file.execute(sql) == [("r", 1), ("r", 2)]


@pytest.mark.rule("T-018")
async def test_a_facet_is_kept_awake_by_its_turn(clock: object) -> None:
    async with opened(idle_s=2) as test:
        me = await top(test)
        await me.run_agent_tool(Kid, [["sleep", 60]], run_id="r", detached=True)
        await test.advance(50)
        assert test.find([("Top", "a"), ("Kid", "r")]) is not None
        await test.advance(30)
        assert test.find([("Top", "a"), ("Kid", "r")]) is None
        me = await top(test)
        assert me.runs.get("r").status == "completed"
        assert TURNS == {"r": 1}


# ---- what is shown


@pytest.mark.rule("T-011")
async def test_a_preview_that_is_given_is_shown_as_it_is_within_a_bound(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        peer = await connect(test)
        told = {"query": "HTTP/3", "n": [1, None]}
        for number, preview in enumerate((told, lambda value: told)):
            run = await me.run_agent_tool(
                Kid, [["say", "secret"]], run_id=f"r{number}", input_preview=preview
            )
            assert run.preview == told
        await me.durable()
        shown = [f["event"] for f in run_frames(peer) if f["sequence"] == 0]
        assert [event["inputPreview"] for event in shown] == [told, told]
        big = "x" * (17 << 10)
        for options in (
            {"input_preview": big}, {"input_preview": lambda value: big},
            {"display": {"name": big}},
        ):  # fmt: skip
            with pytest.raises(CapacityError, match="of a run has"):
                await me.run_agent_tool(Kid, [], run_id="big", **options)
        assert me.runs.get("big") is None


@pytest.mark.rule("T-027")
async def test_the_order_is_shown_and_decides_nothing(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        peer = await connect(test)
        async with trio.open_nursery() as nursery:
            for order, run_id in ((9, "first"), (1, "second")):
                ask(
                    nursery, me, Kid, [["say", "x"]], run_id=run_id, display_order=order
                )
                await settle()
        assert [run.run_id for run in me.runs.list()] == ["first", "second"]
        assert {r.run_id: r.order for r in me.runs.list()} == {"first": 9, "second": 1}
        await me.durable()
        shown = [f["event"] for f in run_frames(peer) if f["sequence"] == 0]
        assert [(e["runId"], e["order"]) for e in shown] == [
            ("first", 9),
            ("second", 1),
        ]


@pytest.mark.rule("T-013")
async def test_privacy_is_the_parents_the_facet_has_the_input(clock: object) -> None:
    class Chat(AIChatAgent):
        async def on_chat_message(self, turn: Turn) -> AsyncIterator[Chunk]:
            yield say("done")

    async with opened(Chat) as test:
        me = await top(test)
        await me.run_agent_tool(Chat, {"secret": "canary-7f3"}, run_id="r")
        await me.durable()
        await test.advance(1)
        tree = tree_of(test)
        for table in ("run", "job", "node"):
            assert "canary-7f3" not in str(rows(tree, f"SELECT * FROM {table}"))
        assert "canary-7f3" in str(agent_at(test, ("Chat", "r")).messages)


class Exact(msgspec.Struct):
    n: int


@pytest.mark.rule("T-012", "T-010", "I-11")
@pytest.mark.parametrize(
    "value",
    ["canary-7f3", ["x", ["canary-7f3"]], {"a": {"b": [{"c": "canary-7f3" * 900}]}},
     {"n": "canary-7f3"}],
    ids=["text", "list", "deep and long", "misfit"],
)  # fmt: skip
async def test_nothing_that_others_see_of_a_run_holds_its_input(
    value: Any, clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    class Fails(Kid):
        async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
            yield say("x")
            raise ValueError("not of the input")

    caplog.set_level(logging.DEBUG)
    seen: list[Any] = []
    exact = agent_tool(Kid, description="x", input_type=Exact)
    async with opened(Fails) as test:
        me = await top(test)
        peer = await connect(test)
        test.kernel.subscribe("*", lambda *told: seen.append(told))
        with pytest.raises(UsageError) as misfit:
            await me.run_agent_tool(exact, value)
        await me.run_agent_tool(Fails, value, run_id="r")
        await me.run_agent_tool(Fails, "another", run_id="r")
        await me.run_agent_tool(Kid, [["sleep", 9]], run_id="s", detached=True)
        await me.run_agent_tool(Kid, value, run_id="s", no_progress_s=0)
        await me.durable()
        late = await connect(test, label="late")
        tables = [
            rows(tree_of(test), f"SELECT * FROM {t}") for t in ("run", "job", "node")
        ]
        shown = (
            str(misfit.value), seen, peer.out, late.out, HEARD, me.runs.list(),
            caplog.text, tables, test.kernel.tree("Top", "a"),
        )  # fmt: skip
        for one in shown:
            assert one
            assert "canary-7f3" not in str(one)


# ---- how a turn ends


@pytest.mark.rule("T-020", "T-101")
async def test_a_turn_without_text_is_complete_with_an_empty_summary(
    clock: object,
) -> None:
    async with opened(Silent) as test:
        me = await top(test)
        run = await me.run_agent_tool(Silent, 1, run_id="r")
        assert (run.status, run.summary, run.output) == ("completed", "", None)
        assert (await frames(me, "r"))[-1]["event"]["summary"] == ""


@pytest.mark.rule("T-021", "T-075")
async def test_an_error_said_in_band_ends_the_run_and_is_no_chunk(
    clock: object,
) -> None:
    async with opened(Errs) as test:
        me = await top(test)
        run = await me.run_agent_tool(Errs, "the model is gone", run_id="r")
        assert (run.status, run.reason, run.error) == (
            "error", "failed", "the model is gone",
        )  # fmt: skip
        assert run.summary == "so far and on"
        found = await frames(me, "r")
        assert kinds(found) == [
            (0, "started"),
            (1, "chunk"),
            (2, "chunk"),
            (3, "error"),
        ]
        assert found[-1]["event"]["error"] == "the model is gone"


@pytest.mark.rule("T-075")
@pytest.mark.parametrize("nothing", [{}, None, ""], ids=repr)
async def test_an_empty_body_is_no_chunk(nothing: Any, clock: object) -> None:
    class Empty(Kid):
        async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
            yield say("so far")
            yield nothing

    async with opened(Empty) as test:
        me = await top(test)
        run = await me.run_agent_tool(Empty, None, run_id="r")
        assert (run.status, run.reason) == ("error", "failed")
        assert "a chunk is a mapping" in run.error
        found = kinds(await frames(me, "r"))
        assert found == [(0, "started"), (1, "chunk"), (2, "error")]


@pytest.mark.rule("T-022")
async def test_another_turn_that_fails_in_the_same_facet_is_not_the_runs_error(
    clock: object,
) -> None:
    class Chat(AIChatAgent):
        async def on_chat_message(self, turn: Turn) -> AsyncIterator[Chunk]:
            if turn.run_id is None:
                yield {"type": "error", "errorText": "not of the run"}
                return
            yield say("a")
            await trio.sleep(5)
            yield say("b")

    async with opened(Chat) as test:
        me = await top(test)
        await me.dynamic_agents.get(Chat, "r")
        chat = agent_at(test, ("Chat", "r"))
        assert (await chat.save_messages(question("before"))).status == "error"
        async with trio.open_nursery() as nursery:
            results = ask(nursery, me, Chat, "go", run_id="r")
            await test.advance(1)
            ends = []

            async def other() -> None:
                ends.append((await chat.save_messages(question("meanwhile"))).status)

            nursery.start_soon(other)
        assert ends == ["error"]
        assert (results[0].status, results[0].summary) == ("completed", "ab")
        assert me.runs.get("r") == results[0]


@pytest.mark.rule("T-024")
@pytest.mark.parametrize("end", ["completed", "error", "aborted"])
async def test_nothing_of_a_run_stays_in_memory_after_its_end(
    end: str, clock: object
) -> None:
    script: dict[str, Any] = {
        "completed": [["output", {"n": 1}]], "error": [["fail", "x"]],
        "aborted": [["sleep", 99]],
    }  # fmt: skip
    async with opened() as test:
        me = await top(test)
        tree = tree_of(test)
        async with trio.open_nursery() as nursery:
            results = ask(
                nursery, me, Kid, script[end], run_id="r", output_type=dict[str, int]
            )
            await test.advance(1)
            await me.runs.cancel("r")
        assert results[0].status == end
        await me.durable()
        await settle()
        kept = (
            tree.turns.live, tree.streams._open, tree.runs.validators, tree.runs.tokens,
            tree.endings.waiters, tree.runs.places._lines,
        )  # fmt: skip
        assert [len(one) for one in kept] == [0] * 6


# ---- who asks for whom


def chat_class(name: str, base: type[Agent]) -> type[Agent]:
    """A chat agent of either base which says "x"."""

    async def on_chat_message(self: Any, turn: Turn) -> AsyncIterator[Chunk]:
        yield say("x")

    if base is Think:
        return type(name, (Think,), {"model": ScriptedModel(["x"])})
    return type(name, (base,), {"on_chat_message": on_chat_message})


@pytest.mark.rule("T-026a")
@pytest.mark.parametrize("child", [Think, AIChatAgent])
@pytest.mark.parametrize("parent", [Think, AIChatAgent, Agent])
async def test_any_agent_may_ask_any_chat_agent_and_sees_the_same(
    parent: type[Agent], child: type[Agent], clock: object
) -> None:
    asker = (
        type("Asker", (Agent,), {}) if parent is Agent else chat_class("Asker", parent)
    )
    asked = chat_class("Asked", child)
    async with open_test_kernel(roots=[asker], facets=[asked]) as test:
        me = await top(test, asker)
        peer = await connect(test, ("Asker", "a"))
        run = await me.run_agent_tool(asked, "hello", run_id="r")
        await me.durable()
        assert (run.status, run.summary, run.output) == ("completed", "x", None)
        found = [k for _n, k in kinds(run_frames(peer))]
        assert found[0] == "started"
        assert found[-1] == "finished"
        assert set(found[1:-1]) == {"chunk"}
        assert len(me.runs.list()) == 1


@pytest.mark.rule("T-026d")
async def test_any_code_of_an_agent_may_ask(clock: object) -> None:
    async with opened(root=Server) as test:
        me = await top(test, Server)
        root = await test.kernel.get_agent(Server, "a")
        assert await root.by_call() == "completed"
        visit = await come(test, ("Server", "a"))
        assert not isinstance(visit, Response)
        assert (await visit.handle()).body == b'"completed"'
        await me.schedule(1, "tick")
        await test.advance(5)
        found = {run.run_id: run.status for run in me.runs.list()}
        assert found == dict.fromkeys(
            ("call", "hook", "request", "schedule"), "completed"
        )


@pytest.mark.rule("T-026d")
async def test_a_fan_out_has_one_result_a_run_and_no_exception(clock: object) -> None:
    async with opened(Errs) as test:
        me = await top(test)
        async with trio.open_nursery() as nursery:
            good = [ask(nursery, me, Kid, [["say", "x"]]) for _ in range(5)]
            bad = [ask(nursery, me, Kid, [["fail", "no"]]) for _ in range(5)]
        assert [[r.status for r in results] for results in good + bad] == [
            *[["completed"]] * 5, *[["error"]] * 5,
        ]  # fmt: skip


@pytest.mark.rule("T-118", "T-015")
async def test_twenty_that_ask_at_once_under_one_id_share_one_turn(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        script = [["say", "x"], ["sleep", 5], ["output", {"n": 1}]]
        async with trio.open_nursery() as nursery:
            found = [ask(nursery, me, Kid, script, run_id="r") for _ in range(20)]
        assert all(results == found[0] for results in found)
        assert found[0][0].output == {"n": 1}
        assert TURNS == {"r": 1}
        await settle()
        assert HEARD == [("start", "a", "r"), ("finish", "a", "r", "completed")]
