"""The guide to routing: its service is started, its excerpts are the example's."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from culet.adapters import RoutedAgents
from culet.kernel import Agent
from culet.web import build_agent_path, connect
from docs.service import CULET, EXAMPLES, HYPERCORN, Service, said_by, service

TEXT = (EXAMPLES.parent / "guide-routing.md").read_text()
*EXCERPTS, PROGRAM = re.findall(
    r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE
)
(PRINTED,) = re.findall(r"^```text\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
SERVERS = pytest.mark.parametrize(
    "command",
    [[*HYPERCORN, "--workers", "0", "routing:app"], [*CULET, "routing:app"]],
    ids=["hypercorn", "culet"],
)


def socket_of(server: Service, path: str, user: str) -> Any:
    url = server.url.replace("http", "ws") + path
    return connect(url, headers={"x-user": user})


@SERVERS
async def test_the_service_does_what_the_guide_says(
    command: list[str], tmp_path: Path
) -> None:
    async with service(command, tmp_path) as server:
        async with socket_of(server, "/agents/chats/anna", "anna") as hub:
            for chat_id in ("c1", "c2"):
                assert await hub.call("open_chat", chat_id) == f"chats/{chat_id}"
            path = "/agents/chats/anna/chats/c1"
            async with socket_of(server, path, "anna") as chat:
                assert [await chat.call("say", t) for t in ("hello", "bye")] == [1, 2]
                name = chat.name
            found = [await hub.call("find", words) for words in ("bye", "hello", "")]
            await hub.call("close_chat", "c1")
            await hub.call("open_chat", "c1")
        async with socket_of(server, path, "anna") as chat:
            assert (await chat.call("say", "anew"), chat.name == name) == (1, False)
            other = chat.name
        refused = [
            (await server.http(p, None, **{"x-user": user}))[0]
            for p, user in (
                (path, "bob"),
                (f"/agents/chat/{other}", "anna"),
                ("/agents/chats/anna/chats/none", "anna"),
            )
        ]

    assert found == [["c1"], [], ["c1"]]
    assert refused == [403, 403, 404]


@SERVERS
async def test_its_own_routes_lead_to_facets(
    command: list[str], tmp_path: Path
) -> None:
    async with service(command, tmp_path) as server:
        async with socket_of(server, "/pads/anna/sub/pad/p%2F1", "anna") as pad:
            posted = await server.http(
                "/pads/anna/sub/pad/p%2F1", {"a": "b"}, **{"x-user": "anna"}
            )
            got = await server.http(
                "/pads/anna/sub/pad/p%2F1", None, **{"x-user": "anna"}
            )
            assert pad.name == "p/1"
        codes = [
            await server.close_code(f"/pads/anna/sub/{tail}?user=anna")
            for tail in ("pad/p/sub/pad/q", "stranger/x")
        ]
        stranger = await server.http("/pads/anna/sub/pad/p", None, **{"x-user": "bob"})

    assert posted[:2] == got[:2] == (200, "a=b")
    assert codes == [4404, 4404]
    assert stranger[0] == 403


@SERVERS
async def test_the_program_of_the_guide_prints_what_it_says(
    command: list[str], tmp_path: Path
) -> None:
    async with service(command, tmp_path) as server:
        assert await said_by(PROGRAM, server) == PRINTED


def test_excerpts_are_the_examples() -> None:
    example = (EXAMPLES / "routing.py").read_text()

    assert len(EXCERPTS) >= 5
    for excerpt in EXCERPTS:
        assert excerpt.strip("\n") in example


def test_what_the_guide_says_of_hubs_exists() -> None:
    for name in re.findall(r"^\| `(?:await )?(\w+)\(", TEXT, re.MULTILINE):
        assert callable(getattr(RoutedAgents, name)), name
    assert callable(Agent.on_forward)
    path = build_agent_path([("Chats", "anna"), ("Pad", "p/1")], leaf_path="/x")
    assert json.dumps(path) == '"/agents/chats/anna/sub/pad/p%2F1/x"'
