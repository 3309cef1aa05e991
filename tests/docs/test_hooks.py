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
from docs.service import CULET, HYPERCORN, Service, environment, service

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


async def say(server: Service, path: str, **told: Any) -> tuple[int, str]:
    body = json.dumps(told).encode()
    secret = environment(Path())["HOOK_SECRET"].encode()
    signed = hmac.new(secret, body, hashlib.sha256).hexdigest()
    return await post(server, path, body, signed)


async def pay(server: Service, **told: Any) -> tuple[int, str]:
    return await say(server, "/hooks/payments", **told)


def order(server: Service, name: str) -> Any:
    return connect(f"{server.url.replace('http', 'ws')}/agents/order/{name}")


STEPS = ["booked", "thanked", "told to the warehouse"]


async def settled(agent: RemoteAgent, *deliveries: str) -> Any:
    """Return the state in which all is done about these payments, each step once."""
    done = dict.fromkeys(deliveries, STEPS)
    with trio.fail_after(20):
        await agent.until(lambda a: a.state["payments"] == done)
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
        assert await pay(server, delivery="d2", order="o1", cents=250) == (
            200,
            "taken\n",
        )
        async with order(server, "o1") as agent:
            assert (await settled(agent, "d1", "d2"))["paid"] == 750
        for path in ("/hooks/payments", "/hooks/courier"):
            assert (await post(server, path, b"{}", "forged"))[0] == 403
            assert (await say(server, path, delivery="d2"))[0] == 400


@SERVERS
async def test_the_service_s_own_task_pushes_news_to_who_looks(
    command: list[str], tmp_path: Path
) -> None:
    async with service(command, tmp_path) as server, order(server, "o2") as agent:
        assert agent.state["currency"] == "EUR"  # from the props of the service
        for name in ("", "x" * 5000, "o2"):  # what cannot be told stops nothing
            heard = await say(server, "/hooks/courier", order=name, where="at sea")
            assert heard == (202, "heard\n")
        with trio.fail_after(20):
            await agent.until(lambda a: a.state["parcel"] == "at sea")
        assert (await pay(server, delivery="d", order="x" * 5000, cents=1))[0] == 503


async def test_what_was_taken_is_done_though_the_process_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [*CULET, "hooks:app"]
    monkeypatch.setitem(os.environ, "STEP_S", "3")
    async with service(command, tmp_path) as server:
        for delivery in ("d1", "d2"):
            taken = await pay(server, delivery=delivery, order="o1", cents=500)
            assert taken == (200, "taken\n")
        server.process.kill()
        await server.process.wait()
    monkeypatch.setitem(os.environ, "STEP_S", "0")
    async with service(command, tmp_path) as server, order(server, "o1") as agent:
        assert (await settled(agent, "d1", "d2"))["paid"] == 1000
        again = await pay(server, delivery="d1", order="o1", cents=500)
        assert again == (200, "known\n")
        assert (await settled(agent, "d1", "d2"))["paid"] == 1000
