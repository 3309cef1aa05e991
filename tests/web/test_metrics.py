"""What `/metrics` says: counts of what happened, by labels that are bounded."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families as families

from culet.kernel import Agent, FiberResolution, Turn
from culet.kernel.testing import Harness, open_test_kernel
from culet.web.metrics import CONTENT_TYPE, Metrics
from web.serving import serving


class Kid(Agent):
    async def on_turn(self, turn: Turn) -> AsyncIterator[dict[str, Any]]:
        if turn.input == "fail":
            raise RuntimeError("secret words")
        yield {"type": "text-delta", "id": "t", "delta": "x"}


class Top(Agent):
    async def ask(self, what: str) -> str:
        return (await self.run_agent_tool(Kid, what)).status

    async def plan(self) -> None:
        await self.schedule(5, "due")
        await self.fibers.start("f", self.body, wait=True)

    async def body(self) -> None:
        await trio.sleep(1)

    async def due(self, _payload: Any, _schedule: Any) -> None:
        raise RuntimeError("secret words")

    async def on_fiber_recovered(self, ctx: Any) -> FiberResolution:
        return FiberResolution()


def counted(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Return every sample that is not 0: (name, label values…) to its value."""
    found = {}
    for family in families(metrics.text().decode()):
        for sample in family.samples:
            if sample.value and not sample.name.endswith(("_created", "_bucket")):
                found[sample.name, *sample.labels.values()] = sample.value
    return found


async def played(test: Harness) -> None:
    top = await test.kernel.get_agent(Top, "a")
    assert [await top.ask(w) for w in ("x", "y", "fail")] == [
        "completed", "completed", "error",
    ]  # fmt: skip
    await top.plan()
    await test.advance(60)


async def test_what_happens_is_counted_by_class_and_kind(clock: object) -> None:
    async with open_test_kernel(roots=[Top], facets=[Kid]) as test:
        metrics = Metrics(test.kernel)
        await played(test)
        found = counted(metrics)
        assert found["culet_runs_asked_total", "Kid"] == 3
        assert found["culet_runs_ended_total", "Kid", "completed"] == 2
        assert found["culet_runs_ended_total", "Kid", "error"] == 1
        assert found["culet_run_seconds_count", "Kid", "completed"] == 2
        assert found["culet_fibers_ended_total", "completed"] == 1
        assert found["culet_calls_total", "schedule", "execute"] >= 2
        assert found["culet_calls_total", "schedule", "retry"] >= 1
        assert found["culet_agents_total", "Kid", "start"] == 3
        assert found["culet_failures_total", "turn"] == 1


async def test_no_text_and_no_name_of_anybody_is_told(clock: object) -> None:
    async with open_test_kernel(roots=[Top], facets=[Kid]) as test:
        metrics = Metrics(test.kernel)
        await played(test)
        size = metrics.text().count(b"\n")
        await played(test)
        text = metrics.text()
        assert b"secret" not in text
        assert text.count(b"\n") == size, "more of the same adds no line"


async def test_what_is_closed_counts_no_more_and_two_kernels_count_apart(
    clock: object,
) -> None:
    async with (
        open_test_kernel(roots=[Top], facets=[Kid]) as one,
        open_test_kernel(roots=[Top], facets=[Kid]) as two,
    ):
        first, second = Metrics(one.kernel), Metrics(two.kernel)
        await played(one)
        first.close()
        before = counted(first)["culet_runs_asked_total", "Kid"]
        await played(one)
        assert counted(first)["culet_runs_asked_total", "Kid"] == before
        assert ("culet_runs_asked_total", "Kid") not in counted(second)


@pytest.mark.usefixtures("transport")
async def test_it_is_served_in_the_format_of_prometheus() -> None:
    async with serving() as server:
        await server.http("GET", "/agents/hub/h")
        status, headers, body = await server.http("GET", "/metrics")
        assert (status, headers["content-type"]) == (200, CONTENT_TYPE)
        samples = {
            s.name: s.value for f in families(body.decode()) for s in f.samples if not s.labels
        }  # fmt: skip
        assert samples["culet_trees"] == 1
        assert samples["culet_connections"] == 0
