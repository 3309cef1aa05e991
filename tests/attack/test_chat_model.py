"""A model that fails, hangs or talks nonsense in mid-stream, behind a real socket."""

from __future__ import annotations

import json
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import trio

from attack.world import call, world
from culet.adapters import Think
from culet.adapters.model import Finish, TextDelta, ToolCall
from culet.kernel import rpc
from web.serving import Client


class Faulty:
    """A model whose last user text says what goes wrong."""

    async def stream(self, request: Any) -> Any:
        said = json.dumps(request.messages, default=str)
        yield TextDelta("before ")
        await trio.lowlevel.checkpoint()
        kinds = ("hang", "raise", "base", "unicode", "ghost", "fine")
        what = max(kinds, key=lambda kind: said.rfind(f"please {kind}"))
        does = getattr(self, "fail" if what == "raise" else what)
        async with aclosing(does()) as events:
            async for event in events:
                yield event

    async def hang(self) -> Any:
        yield TextDelta("hanging ")
        await trio.sleep_forever()

    async def fail(self) -> Any:
        yield TextDelta("x")
        raise RuntimeError("the model is gone")

    async def base(self) -> Any:
        yield TextDelta("x")
        raise SystemExit(3)

    async def unicode(self) -> Any:
        yield TextDelta("\ud800")

    async def ghost(self) -> Any:
        yield ToolCall("c1", "no_such_tool", {"x": 1})
        yield Finish("tool-calls")

    async def fine(self) -> Any:
        yield TextDelta("after")
        yield Finish("stop")


class Talker(Think):
    model = Faulty()
    max_steps = 2

    @rpc
    async def ping(self, text: str) -> str:
        return text


def ask(request: str, what: str) -> dict[str, Any]:
    message = {
        "id": f"m-{request}", "role": "user",
        "parts": [{"type": "text", "text": f"please {what}"}],
    }  # fmt: skip
    body = json.dumps({"messages": [message], "trigger": "submit-message"})
    return {
        "type": "cf_agent_use_chat_request", "id": request,
        "init": {"method": "POST", "body": body},
    }  # fmt: skip


async def answer(client: Client, request: str) -> list[Any]:
    frames = await client.until(
        lambda f: (
            f["type"] == "cf_agent_use_chat_response"
            and f["id"] == request
            and f["done"]
        )
    )
    return [f for f in frames if f.get("id") == request]


@pytest.mark.parametrize("what", ["raise", "base", "unicode", "ghost"])
async def test_the_turn_ends_truthfully_and_the_next_one_is_served(
    what: str, tmp_path: Path
) -> None:
    path = "/agents/talker/t"
    async with (
        world(tmp_path, roots=[Talker], facets=[]) as w,
        w.connect(path) as client,
    ):
        await client.send(ask("r1", what))
        frames = await answer(client, "r1")
        if what != "ghost":  # which the model may get over
            assert any(f.get("error") for f in frames), frames
        assert await call(client, "ping", "x") == "x"
        await client.send(ask("r2", "fine"))
        frames = await answer(client, "r2")
        said = "".join(
            json.loads(f["body"]).get("delta", "") for f in frames
            if f["body"] and not f.get("error")
        )  # fmt: skip
        assert "before" in said
        assert "after" in said


async def test_a_model_that_hangs_is_stopped_and_the_next_turn_is_served(
    tmp_path: Path,
) -> None:
    path = "/agents/talker/t"
    async with (
        world(tmp_path, roots=[Talker], facets=[]) as w,
        w.connect(path) as client,
    ):
        await client.send(ask("r1", "hang"))
        await client.until(lambda f: "hanging" in f.get("body", ""))
        await client.send({"type": "cf_agent_chat_request_cancel", "id": "r1"})
        frames = await answer(client, "r1")
        assert frames[-1].get("outcome") == "aborted"
        status, _, body = await w.server.http("GET", f"{path}/get-messages")
        assert status == 200
        assert "hanging" in body.decode()
        assert await call(client, "ping", "x") == "x"
