"""Who has no right to a run cannot tell whether there is one."""

from __future__ import annotations

import pytest

from culet.kernel import Request, Response
from culet.kernel.core.path import PathStep
from web.serving import Server, serving

# a run of another parent, of another class, of nobody: and each with a tail
FOREIGN = [
    "/agents/hub/other/sub/writer/known",
    "/agents/hub/h/sub/plain-writer/known",
    "/agents/hub/nobody/sub/writer/known",
]
UNKNOWN = "/agents/hub/h/sub/writer/guessed"


async def answer(server: Server, path: str) -> tuple[int, dict[str, str], bytes, int]:
    status, headers, body = await server.http("GET", path)
    shown = {k: v for k, v in headers.items() if k.lower() != "date"}
    return status, shown, body, await server.close_of(path)


@pytest.mark.rule("I-44", "F-43")
async def test_what_is_not_there_and_what_is_elsewhere_look_the_same() -> None:
    async with serving() as server, server.connect() as hub:
        await hub.hello()
        assert (await hub.call("write", "known", 1))["result"] == "completed"
        async with server.connect("/agents/hub/other") as other:
            await other.hello()
        wanted = await answer(server, UNKNOWN)
        assert (wanted[0], wanted[3]) == (404, 4404)
        before = server.kernel.metrics()["commits"]
        for path in FOREIGN:
            assert await answer(server, path) == wanted, path
        assert server.kernel.metrics()["commits"] == before
        async with server.connect("/agents/hub/h/sub/writer/known") as mine:
            assert (await mine.call("whoami"))["result"] == ["h", "known"]


@pytest.mark.rule("I-44")
async def test_a_root_gate_answers_before_it_is_known_whether_there_is_a_run() -> None:
    async def admit(request: Request, root: PathStep) -> Response | None:
        return Response("not yours", 403) if request.identity != root.name else None

    async def authenticate(request: Request) -> str:
        return str(request.query.get("user", ""))

    async with (
        serving(admit=admit, authenticate=authenticate) as server,
        server.connect("/agents/hub/h?user=h") as hub,
    ):
        await hub.hello()
        assert (await hub.call("write", "known", 1))["result"] == "completed"
        trees = set(server.kernel.trees)
        answers = [
            await answer(server, f"/agents/hub/{root}/sub/writer/{run}?user=eve")
            for root in ("h", "nobody")
            for run in ("known", "guessed")
        ]
        assert answers[0][0] == 403
        assert answers == [answers[0]] * 4
        assert set(server.kernel.trees) == trees
