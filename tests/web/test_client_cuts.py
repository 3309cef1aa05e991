"""Our own clients over lines that are cut again and again: nothing lost, nothing doubled."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Awaitable, Callable

import pytest
import trio

from culet.kernel import Limits
from culet.web import RemoteAgent, ask_over_http, connect
from culet.web import client_events as told
from volume import Volume
from web.cutting import Cutter, cutter
from web.test_clients import JS, NODE, needs_packages

CUTS = Volume(110, 150, 1_000).now
QUICK = Limits(reconnect_base_s=0.001, reconnect_max_s=0.002)
RUN = 40 * CUTS  # chunks: more than the cuts need
ANSWER = 30 * CUTS
WORDS = "".join(f"{n} " for n in range(ANSWER))

pytestmark = pytest.mark.slow


def url_of(made: Cutter, path: str) -> str:
    return f"ws://127.0.0.1:{made.port}/agents/{path}"


async def again(made: Cutter, use: Callable[[], Awaitable[None]]) -> None:
    """Do it; a first attempt that is cut is the caller's to make again."""
    made.most = CUTS
    with trio.fail_after(300):
        await use()
    assert made.cuts == CUTS


async def test_the_python_client_takes_each_frame_of_a_run_once() -> None:
    heard: list[int] = []
    async with (
        cutter(3, RUN) as made,
        connect(url_of(made, "desk/d"), limits=QUICK) as agent,
    ):

        async def use() -> None:
            events = agent.events(known=True)
            async for event in events:
                assert not isinstance(event, told.Lagged)
                if isinstance(event, told.RunChanged):
                    heard.append(event.sequence)
                    if event.kind == "finished":
                        return

        await again(made, use)
        [run] = agent.runs.runs_by_id.values()
        assert agent.connections > CUTS / 2  # some were cut in their handshake
    first = next(n for n in heard if n >= 0)
    whole = heard[heard.index(first) :] == list(range(first, RUN + 2))
    assert whole, heard[:50]
    whole = run["parts"][0]["text"] == "".join(f"{n} " for n in range(RUN))
    assert whole


async def test_the_python_client_takes_each_chunk_of_an_answer_once() -> None:
    async with cutter(4) as made, connect(url_of(made, "bot/b"), limits=QUICK) as agent:

        async def use() -> None:
            answer = await agent.ask(str(ANSWER))
            words = [c["delta"] async for c in answer if c["type"] == "text-delta"]
            whole = "".join(words) == WORDS
            assert whole, words[:50]
            await both(agent)

        await again(made, use)


async def both(agent: RemoteAgent) -> None:
    """A question and its answer are the transcript."""
    await agent.until(lambda a: len(a.messages) == 2)
    assert [m["role"] for m in agent.messages] == ["user", "assistant"]


async def test_an_answer_over_plain_http_has_each_chunk_once() -> None:
    async with cutter(5) as made:
        made.most = 0  # not before the question was taken
        url = url_of(made, "bot/b")
        async with ask_over_http(url, str(ANSWER), limits=QUICK) as answer:

            async def use() -> None:
                words = [c["delta"] async for c in answer if c["type"] == "text-delta"]
                whole = "".join(words) == WORDS
                assert whole, words[:50]

            await again(made, use)


@needs_packages
@pytest.mark.parametrize("what", ["run", "chat", "http"])
async def test_the_javascript_client_takes_each_frame_once(what: str) -> None:
    assert NODE is not None
    size = RUN if what == "run" else ANSWER
    async with cutter(6, size if what == "run" else 0) as made:
        made.most = 0 if what == "http" else CUTS  # not before the question was taken
        told = {"CULET_URL": f"http://127.0.0.1:{made.port}", "CULET_WHAT": what}
        process = await trio.lowlevel.open_process(
            [NODE, "cuts.mjs"],
            cwd=JS,
            env={**os.environ, **told, "CULET_SIZE": str(size)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        said = b""
        assert process.stdout is not None
        try:
            with trio.fail_after(300):
                async with process.stdout:
                    async for part in process.stdout:
                        said += part
                        made.most = CUTS
                await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
        assert process.returncode == 0, said[-4000:].decode()
        assert made.cuts == CUTS
