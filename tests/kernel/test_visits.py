"""No answer leaves a tree before what it may reveal is durable, whatever its kind."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio

from culet.kernel import (
    Agent,
    ChildRef,
    Forward,
    Request,
    Response,
    open_kernel,
)
from culet.kernel.core.path import ParsedPath, PathStep
from culet.kernel.errors import CapacityError, Refused
from culet.kernel.testing import Harness, open_test_kernel
from culet.kernel.visits import Visit, visit
from kernel.agents import tree_of


class Kid(Agent):
    """A facet."""


class Top(Agent):
    """Writes, and then says no in some way."""

    async def _answer(self, path: str) -> Response | None:
        self.sql("CREATE TABLE IF NOT EXISTS seen (path TEXT)")
        self.sql("INSERT INTO seen VALUES (?)", path)
        match path:
            case "refused":
                raise Refused("no more", status=429)
            case "full":
                raise CapacityError("full")
            case "fails":
                raise ValueError("inner words")
            case "says":
                return Response("no", 403)
            case "deleted":
                await self.destroy()
        return None

    async def on_before_sub_agent(
        self, request: Request, child: ChildRef
    ) -> Request | Response | None:
        return await self._answer(child.name)

    async def on_forward(self, request: Request) -> Forward | Response | None:
        if request.path.startswith("/at-"):
            return await self._answer(request.path.removeprefix("/at-"))
        return None

    async def on_request(self, request: Request) -> Response:
        if request.path == "/stream":
            return Response(_breaking())
        return await self._answer(request.path[1:]) or Response("yes")


async def _breaking() -> AsyncIterator[bytes]:
    yield b"so far"
    raise ValueError("inner words")


async def asked(test: Harness, leaf: str, *hops: str) -> Response:
    path = ParsedPath(
        PathStep("Top", "a"), tuple(PathStep("Kid", hop) for hop in hops), leaf
    )
    found = await visit(test.kernel, path, Request("GET", "/agents/top/a"))
    return await found.handle() if isinstance(found, Visit) else found


KINDS = [("refused", 429), ("full", 503), ("fails", 500), ("says", 403)]


@pytest.mark.parametrize("where", ["request", "gate", "forward"])
@pytest.mark.parametrize(("kind", "status"), KINDS)
async def test_an_answer_that_says_no_waits_for_the_disk_too(
    kind: str, status: int, where: str, clock: object
) -> None:
    async with open_test_kernel(roots=[Top], facets=[Kid]) as test:
        await test.kernel.get_agent(Top, "a")
        tree = tree_of(test)
        before = tree.barrier.count
        answer = await {
            "request": lambda: asked(test, f"/{kind}"),
            "gate": lambda: asked(test, "/", kind),
            "forward": lambda: asked(test, f"/at-{kind}"),
        }[where]()

        assert answer.status == status
        assert b"inner" not in bytes(answer.body)  # type: ignore[arg-type]
        assert tree.barrier.count > before
        assert tree.barrier.durable == tree.barrier.count


@pytest.mark.parametrize("wrote", [False, True])
async def test_a_kernel_that_dies_says_so_and_does_not_hang(wrote: bool) -> None:
    async def die() -> None:
        raise ValueError("a fault of ours")

    with pytest.raises(ValueError, match="a fault of ours"):
        async with open_kernel(roots=[Top], facets=[Kid]) as kernel:
            await kernel.get_agent(Top, "a")
            assert kernel._nursery is not None
            kernel._nursery.start_soon(die)
            if wrote:  # and nobody is there to make it durable
                (tree,) = kernel.trees.values()
                tree.nodes[tree.root_slot].agent.set_state("written")
            await trio.sleep_forever()


@pytest.mark.parametrize("late", range(0, 24, 2))
async def test_who_comes_to_a_root_while_others_wake_harms_nobody(
    late: int, clock: object
) -> None:
    """After a crash all roots that were awake are due: the loop opens one by one."""
    async with open_test_kernel(roots=[Top], facets=[Kid]) as test:
        names = [f"r{n}" for n in range(6)]
        for name in names:
            await test.kernel.get_agent(Top, name)
        await test.crash()
        await test.reopen()
        for _ in range(late):
            await trio.lowlevel.checkpoint()
        for name in reversed(names):
            await test.kernel.get_agent(Top, name)
        await test.advance(1)

        assert {key.name for key in test.kernel.trees} == set(names)


async def test_a_root_that_ends_itself_in_a_request_is_gone(clock: object) -> None:
    async with open_test_kernel(roots=[Top], facets=[Kid]) as test:
        await test.kernel.get_agent(Top, "a")
        with trio.fail_after(60):
            answer = await asked(test, "/deleted")

        assert answer.status == 410


async def test_an_answer_that_breaks_off_is_reported(
    clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    failures: list[Any] = []
    async with open_test_kernel(roots=[Top], facets=[Kid]) as test:
        await test.kernel.get_agent(Top, "a")
        test.kernel.subscribe("failure", lambda *event: failures.append(event))
        answer = await asked(test, "/stream")
        assert not isinstance(answer.body, bytes)
        with caplog.at_level(logging.ERROR), pytest.raises(ValueError, match="inner"):
            async for _ in answer.body:
                pass

    assert len(failures) == 1
    assert "inner words" in caplog.text
