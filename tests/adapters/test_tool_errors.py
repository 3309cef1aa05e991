"""A tool that raises: its model reads why, its clients an error id, in every life."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from adapters.peer import connected, user
from culet.adapters import ScriptedModel, Think
from culet.adapters.model import ModelEvent, ModelRequest, ToolCall
from culet.adapters.tooling import ToolContext
from culet.kernel.errors import CapacityError, NotFound, UserError
from culet.kernel.testing import open_test_kernel

ME = ("Talk", "a")
SECRET = "canary-77aa"
WHY = f"ValueError: no file /srv/{SECRET}"
REQUESTS: list[ModelRequest] = []
pytestmark = pytest.mark.rule("F-54")


class Recorded:
    """Plays a script and keeps its requests."""

    def __init__(self, steps: Any) -> None:
        self._model = ScriptedModel(steps)

    async def stream(self, request: ModelRequest, /) -> AsyncIterator[ModelEvent]:
        REQUESTS.append(request)
        async with aclosing(self._model.stream(request)) as events:
            async for event in events:
                yield event


class Talk(Think):
    model = Recorded(
        [[ToolCall(id="c1", name="open_it", input={"how": "raise"})], "Sorry."]
    )

    def get_tools(self) -> dict[str, Any]:
        return {"open_it": self.open_it}

    async def open_it(self, how: str, ctx: ToolContext) -> str:
        """Open something."""
        match how:
            case "raise":
                raise ValueError(f"no file /srv/{SECRET}")
            case "say":
                raise UserError("that file is not yours")
            case "full":
                raise CapacityError("the shelf is full")
            case _:
                raise NotFound("no such shelf")


def outcomes(request: ModelRequest) -> list[str]:
    """Return what the model reads of its calls."""
    return [m.content for m in request.messages if m.role == "tool"]


async def test_the_model_reads_why_and_clients_an_id_also_after_a_crash(
    clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    REQUESTS.clear()
    async with open_test_kernel(roots=[Talk]) as test:
        async with connected(test.kernel, ME) as tab:
            tab.chat("r1", user("u1", "open it"))
            await tab.ended("r1")
            assert outcomes(REQUESTS[-1]) == [f"error: {WHY}"]
            assert SECRET not in json.dumps(tab.frames)
            (told,) = [
                c["errorText"]
                for c in tab.chunks("r1")
                if c["type"] == "tool-output-error"
            ]
            found = re.fullmatch(r"the tool failed \(error (\w+)\)", told)
            assert found
            assert WHY.removeprefix("ValueError: ") in caplog.text
            assert found[1] in caplog.text
        await test.crash()
        await test.reopen()
        async with connected(test.kernel, ME) as late:
            late.chat("r2", user("u1", "open it"), user("u2", "and now?"))
            await late.ended("r2")
            assert SECRET not in json.dumps(late.frames)
        first = REQUESTS[-2]
        assert outcomes(first) == [f"error: {WHY}"], (
            "of an earlier turn, in a later life"
        )


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("say", "that file is not yours"),
        ("full", "CapacityError: the shelf is full"),
        ("gone", "NotFound: no such shelf"),
    ],
)
async def test_what_an_error_says_to_clients_is_shown(
    how: str, told: str, clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ToolCall(id="c1", name="open_it", input={"how": how})
    monkeypatch.setattr(Talk, "model", Recorded([[asked], "Sorry."]))
    async with (
        open_test_kernel(roots=[Talk]) as test,
        connected(test.kernel, ME) as tab,
    ):
        tab.chat("r1", user("u1", "open it"))
        await tab.ended("r1")
        shown = [c.get("errorText") for c in tab.chunks("r1")]
        assert told in shown
        assert outcomes(REQUESTS[-1]) == [f"error: {told}"]
