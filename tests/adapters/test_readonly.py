"""Who may only look: by a socket's hook or by the gate, over sockets and over HTTP alike."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from adapters.peer import Client, connected, path_to, user
from culet.adapters import AIChatAgent
from culet.kernel import Request, Response, Turn
from culet.kernel.core.path import PathStep
from culet.kernel.http import closed
from culet.kernel.testing import Harness, open_test_kernel
from culet.kernel.visits import visit

ME = ("Talk", "a")
JSON = {"content-type": "application/json"}
LOOK = "Connection is readonly"


class Talk(AIChatAgent):
    initial_state = {"n": 0}

    def should_connection_be_readonly(self, connection: Any, ctx: Any) -> bool:
        return connection.id == "looker"

    async def on_chat_message(self, turn: Turn) -> Any:
        yield {"type": "text-delta", "id": "t", "delta": "hello"}

    async def on_request(self, request: Request) -> Response:
        if request.path == "/set":
            self.set_state({"n": 1})
            return Response("done")
        return await super().on_request(request)


async def look_only(request: Request, root: PathStep) -> Request | None:
    """The gate of the test: who says so may look, and nothing more."""
    return request.replace(readonly=True) if "look" in request.query else None


async def send(
    test: Harness, method: str, leaf: str, body: Any = None, *, look: bool
) -> Response:
    data = msgspec.json.encode(body) if body is not None else b""
    url = f"{leaf}?look=1" if look else leaf
    request = Request(method, url, headers=JSON, body=data)
    reached = await visit(test.kernel, path_to(ME, leaf=leaf), request, admit=look_only)
    assert not isinstance(reached, Response)
    response = await reached.handle()
    if not isinstance(response.body, bytes):
        await closed(response.body)
    return response


@pytest.mark.rule("W-048")
async def test_the_gate_makes_a_request_readonly_and_it_changes_nothing(
    clock: object,
) -> None:
    asked = {"id": "c", "messages": [user("u1", "hi")]}
    async with open_test_kernel(roots=[Talk]) as test:
        for method, leaf, body in (
            ("POST", "/chat", asked),
            ("POST", "/chat/c/stop", {}),
            ("POST", "/chat/a/b/stop", {}),
            ("POST", "/x/chat/a/b/c/stop", {}),
            ("POST", "/set", {}),
        ):
            refused = await send(test, method, leaf, body, look=True)
            assert (refused.status, refused.body) == (403, LOOK.encode())
        me = test.find([ME]).agent  # type: ignore[union-attr]
        assert (me.messages, me.state) == ([], {"n": 0})
        for method, leaf in (("GET", "/chat/c/stream"), ("GET", "/get-messages")):
            assert (await send(test, method, leaf, look=True)).status < 300
        assert (await send(test, "POST", "/chat", asked, look=False)).status == 200
        assert (await send(test, "POST", "/set", {}, look=False)).status == 200
        await test.advance(1)
        assert [m["role"] for m in me.messages] == ["user", "assistant"]


@pytest.mark.rule("W-048", "W-119")
async def test_a_readonly_socket_asks_stops_clears_and_sets_nothing(
    clock: object,
) -> None:
    async with (
        open_test_kernel(roots=[Talk]) as test,
        connected(test.kernel, ME, connection_id="owner") as owner,
        connected(test.kernel, ME, connection_id="looker") as looker,
    ):
        owner.chat("r1", user("u1", "hi"))
        await owner.ended("r1")
        me = test.find([ME]).agent  # type: ignore[union-attr]
        kept = me.messages
        looker.chat("r2", user("u2", "and me?"))
        last = await looker.ended("r2")
        assert (last["error"], last["body"]) == (True, LOOK)
        looker.send("cf_agent_chat_clear")
        looker.send("cf_agent_chat_messages", messages=[user("u3", "mine")])
        looker.send("cf_agent_chat_request_cancel", id="r1")
        await test.advance(1)
        assert me.messages == kept
        assert shown(looker) == kept, "it is told what stands"
        assert not owner.of("cf_agent_chat_clear")
        assert looker.text("r1") == "hello", "it may look"


def shown(client: Client) -> Any:
    return client.of("cf_agent_chat_messages")[-1]["messages"]


@pytest.mark.rule("F-418", "W-048")
async def test_a_socket_that_the_gate_makes_readonly_sets_no_state(
    clock: object,
) -> None:
    async with open_test_kernel(roots=[Talk]) as test:
        reached = await visit(
            test.kernel, path_to(ME), Request(url="/x?look=1"), admit=look_only
        )
        assert not isinstance(reached, Response)
        client = Client(reached.gate)
        client.connection = reached.connect(client, "c")
        await client.connection.opened()
        assert client.connection.readonly
        client.send("cf_agent_state", state={"n": 2})
        await test.advance(1)
        assert client.of("cf_agent_state_error")[0]["error"] == LOOK
