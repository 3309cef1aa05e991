"""The guide's service, under plain hypercorn and under `culet serve`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import trio

from docs.service import CULET, EXAMPLES, HYPERCORN, Service, environment, service

MINE, THEIRS = "/agents/assistant/acme", "/agents/assistant/bold"
SERVERS = pytest.mark.parametrize(
    "command",
    [[*HYPERCORN, "mounted:app"], [*CULET, "mounted:app"]],
    ids=["hypercorn", "culet"],
)


async def frames_until(socket: Any, wanted: str) -> list[dict[str, Any]]:
    frames: list[dict[str, Any]] = []
    with trio.fail_after(10):
        while not frames or frames[-1]["type"] != wanted or not frames[-1].get("done"):
            frames.append(json.loads(await socket.get_message()))
    return frames


async def ask(
    server: Service, path: str, text: str, *, cookie: str = ""
) -> tuple[str, str]:
    """Ask an assistant as a page does; return what it says, and the run it used."""
    message = {"id": "m1", "role": "user", "parts": [{"type": "text", "text": text}]}
    body = json.dumps({"messages": [message], "trigger": "submit-message"})
    frame = {
        "type": "cf_agent_use_chat_request", "id": "ask-1",
        "init": {"method": "POST", "body": body},
    }  # fmt: skip
    async with server.socket(path, cookie=cookie) as socket:
        await socket.send_message(json.dumps(frame))
        frames = await frames_until(socket, "cf_agent_use_chat_response")
    chunks = [json.loads(f["body"]) for f in frames if f.get("body")]
    runs = {
        f["event"]["runId"]: f["event"]["kind"]
        for f in frames
        if f["type"] == "agent-tool-event"
    }
    assert list(runs.values()) == ["finished"]
    said = "".join(c["delta"] for c in chunks if c["type"] == "text-delta")
    return said, next(iter(runs))


@SERVERS
async def test_two_tenants_each_in_their_own(
    command: list[str], tmp_path: Path
) -> None:
    async with service(command, tmp_path) as server:
        alice = await server.login("alice", "wonderland")
        anna = await server.login("anna", "karenina")
        bob = await server.login("bob", "builder")

        said, run = await ask(server, MINE, "three small words", cookie=alice)
        assert said == "The clerk found 3 words."
        said, _ = await ask(server, f"{THEIRS}?token={bob}", "two words")
        assert said == "The clerk found 2 words."

        # who is nobody, who is somebody else, who is forged
        assert await server.close_code(MINE) == 4401
        assert await server.close_code(MINE, cookie=bob) == 4403
        assert await server.close_code(THEIRS, cookie=alice) == 4403
        assert await server.close_code(MINE, cookie=alice[:-1]) == 4401
        messages = f"{MINE}/get-messages"
        assert (await server.http(messages))[0] == 401
        assert (await server.http(messages, Authorization=f"Bearer {bob}"))[0] == 403
        status, text, _ = await server.http(messages, Authorization=f"Bearer {alice}")
        assert (status, len(json.loads(text))) == (200, 2)

        # the inspector: for those who run the service
        for who, expected in ((alice, 200), (anna, 404), ("", 404)):
            headers = {"Cookie": f"who={who}"}
            assert (await server.http("/inspect", **headers))[0] == expected

        # the gate of the hop: an admin, and to a clerk that exists
        clerk = f"{MINE}/sub/clerk/{quote(run, safe='')}"
        assert await server.close_code(clerk, cookie=anna) == 4403
        guessed = f"{MINE}/sub/clerk/guessed"
        assert await server.close_code(guessed, cookie=alice) == 4404
        async with server.socket(clerk, cookie=alice) as socket:
            call = {"type": "rpc", "id": "1", "method": "whoami", "args": []}
            await socket.send_message(json.dumps(call))
            assert (await frames_until(socket, "rpc"))[-1]["result"] == run


@SERVERS
async def test_the_service_itself_is_as_it_was(
    command: list[str], tmp_path: Path
) -> None:
    async with service(command, tmp_path) as server:
        assert (await server.http("/"))[:2] == (200, "my own page\n")
        assert (await server.http("/healthz"))[0] == 404
        wrong = {"name": "bob", "password": "wonderland"}
        assert (await server.http("/login", wrong))[0] == 403
        _, _, headers = await server.http(
            "/login", {"name": "bob", "password": "builder"}
        )
        assert "HttpOnly" in headers["set-cookie"]
        async with server.socket("/echo") as socket:
            for text in ("hello", "again"):
                await socket.send_message(text)
                with trio.fail_after(5):
                    assert await socket.get_message() == text


@pytest.mark.parametrize("more", [[], ["--workers", "2"]], ids=["process", "worker"])
async def test_a_second_one_on_the_folder_fails_at_once(
    more: list[str], tmp_path: Path
) -> None:
    command = [*HYPERCORN, *more, "mounted:app"]
    if more:
        second = await run_to_the_end(command, tmp_path)
    else:
        async with service(command, tmp_path) as first:
            second = await run_to_the_end(command, tmp_path)
            assert first.process.returncode is None
            assert (await first.http("/"))[0] == 200
    # (it has ended; hypercorn's status is 0 whatever became of its workers)
    assert "one kernel per folder" in second.stdout.decode()


async def run_to_the_end(
    command: list[str], data: Path
) -> subprocess.CompletedProcess[bytes]:
    with trio.fail_after(20):
        return await trio.run_process(
            command,
            cwd=EXAMPLES,
            env=environment(data),
            capture_stdout=True,
            stderr=subprocess.STDOUT,
            check=False,
        )
