"""A body that an agent streams is its own code until the last part."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio

from culet.kernel import Request, Response, current_agent
from culet.kernel.errors import Deleted, FacetAborted
from culet.kernel.http import closed
from culet.kernel.visits import Visit
from kernel.agents import agent_at, node_at, raises, settle
from kernel.family import NOTES, Facet, children, get, opened
from kernel.peers import come

KID = (("Top", "a"), ("Tells", "k"))


class Tells(Facet):
    """Streams ten parts, a second each, and writes each down first."""

    async def on_request(self, request: Request) -> Response:
        return Response(self._parts())

    async def _parts(self) -> AsyncIterator[bytes]:
        try:
            for number in range(10):
                await self.keep(str(number))
                here = current_agent()
                assert here is not None
                assert here.agent is self
                assert here.request is not None
                yield b"%d" % number
                await trio.sleep(1)
                NOTES.append(f"said {number}")
        finally:
            NOTES.append("over")
            with trio.CancelScope(shield=True):
                await trio.sleep(0.1)
            try:
                await self.keep("in the end")
            except FacetAborted:
                NOTES.append("fenced")


class Asks(Facet):
    """Reads what its parent streams."""

    async def hear(self) -> bytes:
        parent = await self.parent_agent(Tells)
        response = await parent.fetch("/")
        parts = []
        async for part in response.body:
            parts.append(part)
            here = current_agent()
            assert here is not None
            assert here.agent is self, "between two parts it is itself"
        return b"".join(parts)


async def body_at(test: Any, *hops: tuple[str, str]) -> Any:
    visit = await come(test, *hops)
    assert isinstance(visit, Visit)
    response = await visit.handle()
    assert not isinstance(response.body, bytes)
    return response.body


@pytest.mark.rule("F-461", "F-237")
async def test_it_keeps_its_agent_awake_to_the_end_and_no_longer(clock: object) -> None:
    async with opened(Tells, idle_s=2) as test:
        await get(test, (Tells, "k"))
        body = await body_at(test, *KID)
        assert await anext(body) == b"0"
        await trio.sleep(60)  # its client takes its time
        assert test.find(KID) is not None
        assert b"".join([part async for part in body]) == b"123456789"
        assert node_at(test, KID[1]).refs == 0
        await test.advance(10)
        assert test.find(KID) is None
        assert NOTES.count("start k") == 1
        assert NOTES[-1] == "over"


@pytest.mark.rule("F-042", "F-044", "F-461")
@pytest.mark.parametrize("end", ["abort", "delete"])
@pytest.mark.parametrize("middle", [False, True])
async def test_it_ends_with_its_agent(end: str, middle: bool, clock: object) -> None:
    """In the middle of a part or between two: what it still does is fenced."""
    async with opened(Tells) as test:
        await get(test, (Tells, "k"))
        body = await body_at(test, *KID)
        failures: list[Any] = []
        test.kernel.subscribe("failure", lambda *event: failures.append(event))
        assert await anext(body) == b"0"
        async with trio.open_nursery() as nursery:
            if middle:
                nursery.start_soon(raises, (FacetAborted, Deleted), anext, body)
                await settle()
            await getattr(await children(test), end)(Tells, "k")
            assert ("fenced" in NOTES) is middle, "it is over when its agent is"
        if not middle:
            await raises((FacetAborted, Deleted), anext, body)
        assert NOTES[-2:] == ["over", "fenced"]
        assert "said 0" not in NOTES
        assert failures == [], "somebody wanted it so"


async def test_a_client_that_leaves_ends_it_and_its_clean_up_may_write(
    clock: object,
) -> None:
    async with opened(Tells) as test:
        kid = await get(test, (Tells, "k"))
        body = await body_at(test, *KID)
        assert await anext(body) == b"0"
        await closed(body)
        assert NOTES[-1] == "over"
        assert await kid.kept() == ["0", "in the end"]
        assert node_at(test, KID[1]).refs == 0
        assert node_at(test, KID[1]).calls == {}


@pytest.mark.rule("F-113")
async def test_what_a_parent_streams_to_its_child_is_the_parents_code(
    clock: object,
) -> None:
    async with opened(Tells, Asks) as test:
        kid = await get(test, (Tells, "k"), (Asks, "below"))
        assert await kid.hear() == b"0123456789"
        told = await agent_at(test, KID[1]).kept()
        assert told == [*"0123456789", "in the end"]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(raises, FacetAborted, kid.hear)
            await trio.sleep(1.5)
            await (await children(test)).abort(Tells, "k")
        assert NOTES[-1] == "fenced"
