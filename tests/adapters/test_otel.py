"""Spans: one trace from a request to what it set in motion, over crashes as well."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from adapters.peer import connected, path_to
from culet.adapters import ScriptedModel, Think, tool
from culet.adapters.model import ModelRequest, ToolCall
from culet.adapters.otel import OtelTracer
from culet.adapters.scripted import step_number
from culet.kernel import Agent, FiberResolution, Request, Response, Turn, rpc
from culet.kernel.testing import open_test_kernel
from culet.kernel.visits import visit

SECRET = "the words of somebody"
ABOVE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Kid(Agent):
    resumable = True

    async def on_turn(self, turn: Turn) -> AsyncIterator[dict[str, Any]]:
        yield {"type": "text-delta", "id": "t", "delta": SECRET}
        await trio.sleep(5)
        if turn.input == "fail":
            raise RuntimeError(SECRET)


class Top(Agent):
    async def on_request(self, request: Request) -> Response:
        if request.path == "/plan":
            await self.schedule(5, "due", SECRET)
            return Response("")
        if request.path == "/fiber":
            await self.fibers.start("work", self.body)
            return Response("")
        run = await self.run_agent_tool(
            Kid, request.path[1:], run_id="r1", detached=request.path == "/loose"
        )
        return Response(run.status)

    async def due(self, _payload: Any, _schedule: Any) -> None:
        raise RuntimeError(SECRET)

    async def body(self) -> None:
        await trio.sleep(5)

    async def on_fiber_recovered(self, ctx: Any) -> FiberResolution:
        return FiberResolution()

    @rpc
    async def ping(self) -> str:
        return SECRET


class Clerk(Think):
    def get_model(self) -> Any:
        def play(request: ModelRequest) -> Any:
            steps: Any = ([ToolCall(id="c1", name="count", input={})], [SECRET])
            return steps[step_number(request)]

        return ScriptedModel(play)

    def get_tools(self) -> dict[str, Any]:
        return {"count": tool(self.count)}

    async def count(self) -> int:
        """Count."""
        return 1


class Spans:
    """What was told, oldest end first."""

    def __init__(self) -> None:
        provider = TracerProvider()
        self.out = InMemorySpanExporter()
        provider.add_span_processor(SimpleSpanProcessor(self.out))
        self.tracer = OtelTracer(provider)

    def all(self, name: str) -> list[ReadableSpan]:
        return [s for s in self.out.get_finished_spans() if s.name == name]

    def one(self, name: str) -> Any:
        (found,) = self.all(name)
        return found

    def parent(self, span: Any) -> str | None:
        """Return the name of a span's parent; None when that was never told."""
        told = {
            s.context.span_id: s.name
            for s in self.out.get_finished_spans()
            if s.context
        }
        return None if span.parent is None else told.get(span.parent.span_id)


@pytest.fixture
def spans() -> Spans:
    return Spans()


def kernel(spans: Spans) -> Any:
    return open_test_kernel(
        roots=[Top, Clerk], facets=[Kid, Clerk], tracer=spans.tracer
    )


async def get(test: Any, leaf: str) -> Response:
    request = Request(url=leaf, headers={"traceparent": ABOVE})
    reached = await visit(test.kernel, path_to(("Top", "a"), leaf=leaf), request)
    assert not isinstance(reached, Response)
    return await reached.handle()


async def test_a_request_its_run_and_the_run_s_turn_are_one_trace(
    clock: object, spans: Spans
) -> None:
    async with kernel(spans) as test:
        await get(test, "/x")
        request, run, turn = map(spans.one, ("request GET Top", "run Kid", "turn Kid"))
        assert [spans.parent(s) for s in (run, turn)] == ["request GET Top", "run Kid"]
        assert f"{request.parent.span_id:016x}" == ABOVE.split("-")[2]
        assert {f"{s.context.trace_id:032x}" for s in (request, run, turn)} == {
            ABOVE.split("-")[1]
        }
        assert turn.attributes == {
            "culet.run_id": "r1", "culet.agent": "Top/a/Kid/r1", "culet.attempt": 1,
        }  # fmt: skip


async def test_a_turn_that_a_crash_cut_joins_its_trace_again(
    clock: object, spans: Spans
) -> None:
    async with kernel(spans) as test:
        await get(test, "/loose")
        await test.advance(2)
        await test.crash()
        await test.reopen()
        await test.kernel.get_agent(Top, "a")
        await test.advance(20)
        run = spans.one("run Kid")
        last = spans.all("turn Kid")[-1]
        assert last.attributes["culet.attempt"] == 2  # type: ignore[index]
        assert spans.parent(last) == "run Kid"
        assert last.context.trace_id == run.context.trace_id  # type: ignore[union-attr]


async def test_a_fiber_that_a_crash_cut_joins_its_trace_again(
    clock: object, spans: Spans
) -> None:
    async with kernel(spans) as test:
        await get(test, "/fiber")
        await test.advance(2)
        await test.crash()
        await test.reopen()
        await test.kernel.get_agent(Top, "a")
        await test.advance(20)
        assert spans.parent(spans.all("fiber work")[-1]) == "request GET Top"


async def test_a_scheduled_call_and_a_client_s_call_begin_traces_of_their_own(
    clock: object, spans: Spans
) -> None:
    async with kernel(spans) as test:
        await get(test, "/plan")
        await test.advance(8)
        call = spans.all("call Top.due")[0]
        assert call.parent is None
        assert (call.status.description, call.attributes["culet.attempt"]) == (  # type: ignore[index]
            "RuntimeError", 1,
        )  # fmt: skip
        async with connected(test.kernel, ("Top", "a")) as peer:
            peer.send("rpc", id="1", method="ping", args=[])
            await peer.until(lambda c: bool(c.of("rpc")))
        assert spans.one("rpc Top.ping").parent is None


async def test_a_chat_tells_its_model_and_its_tools_inside_its_turn(
    clock: object, spans: Spans
) -> None:
    async with kernel(spans) as test:
        clerk = await test.kernel.get_agent(Clerk, "c")
        await clerk.save_messages([{"id": "u", "role": "user", "parts": []}])
        assert len(spans.all("model ScriptedModel")) == 2
        for span in (*spans.all("model ScriptedModel"), spans.one("tool count")):
            assert spans.parent(span) == "turn Clerk"


async def test_each_span_says_whose_it_is_and_for_which_run(
    clock: object, spans: Spans
) -> None:
    async with kernel(spans) as test:
        await get(test, "/x")
        await get(test, "/fiber")
        await get(test, "/plan")
        await test.advance(8)
        async with connected(test.kernel, ("Top", "a")) as peer:
            peer.send("rpc", id="1", method="ping", args=[])
            await peer.until(lambda c: bool(c.of("rpc")))
        clerk = await test.kernel.get_agent(Clerk, "c")
        await clerk.save_messages([{"id": "u", "role": "user", "parts": []}])
        await test.advance(20)
        runs = {"turn Clerk": None, "tool count": None, "model ScriptedModel": None}
        for name in ("request GET Top", "rpc Top.ping", "run Kid", "turn Kid",
                     "fiber work", "call Top.due", *runs):  # fmt: skip
            told = spans.all(name)[0].attributes or {}
            kid = "/Kid/r1" if name == "turn Kid" else ""
            agent = "Clerk/c" if name in runs else f"Top/a{kid}"
            assert told["culet.agent"] == agent, name
            if name.split()[0] not in {"request", "rpc", "call"}:
                assert told["culet.run_id"], name
            if name in runs:
                runs[name] = told["culet.run_id"]  # type: ignore[assignment]
        assert len(set(runs.values())) == 1, "one turn"
        assert spans.one("run Kid").attributes["culet.run_id"] == "r1"


async def test_an_error_is_told_by_its_class_and_no_word_of_anybody_s(
    clock: object, spans: Spans
) -> None:
    async with kernel(spans) as test:
        await get(test, "/fail")
        await get(test, "/plan")
        await test.advance(60)
        assert spans.one("turn Kid").status.description == "RuntimeError"
        told = "".join(span.to_json() for span in spans.out.get_finished_spans())
        assert SECRET not in told


async def test_without_a_tracer_nothing_of_it_is_stored(clock: object) -> None:
    async with open_test_kernel(roots=[Top], facets=[Kid]) as test:
        await get(test, "/loose")
        (tree,) = test.kernel.trees.values()
        payloads = tree.db.execute("SELECT payload FROM job WHERE kind = 'turn'")
        assert payloads and all("trace" not in text for (text,) in payloads)
