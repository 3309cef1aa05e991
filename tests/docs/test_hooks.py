"""The shop of the guide: a webhook told twice, a process that dies, news that is pushed."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import trio

from culet.web import RemoteAgent, connect
from docs.service import CULET, HYPERCORN, Service, service

SERVERS = pytest.mark.parametrize(
    "command", [[*HYPERCORN, "hooks:app"], [*CULET, "hooks:app"]],
    ids=["hypercorn", "culet"],
)  # fmt: skip


async def post(
    server: Service, path: str, body: bytes, signature: str = ""
) -> tuple[int, str]:
    asked = urllib.request.Request(server.url + path, body, {"x-signature": signature})

    def ask() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(asked, timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    return await trio.to_thread.run_sync(ask)


async def pay(server: Service, **told: Any) -> tuple[int, str]:
    body = json.dumps(told).encode()
    signed = hmac.new(b"change me", body, hashlib.sha256).hexdigest()
    return await post(server, "/hooks/payments", body, signed)


def order(server: Service, name: str) -> Any:
    return connect(f"{server.url.replace('http', 'ws')}/agents/order/{name}")


async def posted(agent: RemoteAgent) -> Any:
    with trio.fail_after(20):
        await agent.until(lambda a: a.state["steps"][-1:] == ["posted"])
    return agent.state


@SERVERS
async def test_a_webhook_that_comes_again_is_taken_once(
    command: list[str], tmp_path: Path
) -> None:
    async with service(command, tmp_path) as server:
        told = {"delivery": "d1", "order": "o1", "cents": 500}
        assert [await pay(server, **told) for _ in range(3)] == [
            (200, "taken\n"), (200, "known\n"), (200, "known\n"),
        ]  # fmt: skip
        async with order(server, "o1") as agent:
            assert (await posted(agent))["paid"] == 500
        assert (await post(server, "/hooks/payments", b"{}", "forged"))[0] == 403
        assert (await pay(server, delivery="d2"))[0] == 400


@SERVERS
async def test_the_service_s_own_task_pushes_news_to_who_looks(
    command: list[str], tmp_path: Path
) -> None:
    async with service(command, tmp_path) as server, order(server, "o2") as agent:
        assert agent.state["currency"] == "EUR"  # from the props of the service
        assert (await post(server, "/courier/o2", b"at the harbour"))[0] == 202
        with trio.fail_after(20):
            await agent.until(lambda a: a.state["parcel"] == "at the harbour")


async def test_what_was_taken_is_done_though_the_process_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [*CULET, "hooks:app"]
    monkeypatch.setitem(os.environ, "STEP_S", "3")
    async with service(command, tmp_path) as server:
        assert await pay(server, delivery="d1", order="o1", cents=500) == (
            200,
            "taken\n",
        )
        server.process.kill()
        await server.process.wait()
    monkeypatch.setitem(os.environ, "STEP_S", "0")
    async with service(command, tmp_path) as server, order(server, "o1") as agent:
        state = await posted(agent)
        assert (state["paid"], state["steps"]) == (500, ["booked", "packed", "posted"])
        again = await pay(server, delivery="d1", order="o1", cents=500)
        assert again == (200, "known\n")
