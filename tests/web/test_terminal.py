"""`culet chat` and `culet watch` as people run them: processes against a real server."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio

from culet.kernel.http import Response
from culet.web import connect
from web.remote import GATES, fresh_messages, gate, host, running, words

BOT = "chat-bot/b"
CULET = [sys.executable, "-m", "culet.web"]
ENV = {**os.environ, "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}
TIMES_OUT_S = 20


@pytest.fixture(autouse=True)
def fresh_gates():
    GATES.clear()


async def run(*args: str, stdin: bytes = b"") -> tuple[int, str, str]:
    """Run a command to its end; return its status, stdout and stderr."""
    with trio.fail_after(TIMES_OUT_S):
        done = await trio.run_process(
            [*CULET, *args],
            stdin=stdin,
            capture_stdout=True,
            capture_stderr=True,
            check=False,
            env=ENV,
        )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


class Running:
    """A command that runs, and what it has written."""

    def __init__(self, process: trio.Process, source: trio.abc.ReceiveStream) -> None:
        self.process, self._source = process, source
        self.text = ""

    async def until(self, wanted: str) -> None:
        """Read until a text has been written."""
        while wanted not in self.text:
            self.text += await self._some()

    async def rest(self) -> str:
        """Read to the end."""
        while data := await self._some(last=True):
            self.text += data
        return self.text

    async def _some(self, *, last: bool = False) -> str:
        with trio.fail_after(TIMES_OUT_S):
            data = bytes(await self._source.receive_some())
        assert data or last, self.text
        return data.decode()

    async def end(self) -> int:
        with trio.fail_after(TIMES_OUT_S):
            return await self.process.wait()


@asynccontextmanager
async def started(*args: str) -> AsyncIterator[Running]:
    async with trio.open_nursery() as nursery:
        process = await nursery.start(
            partial(
                trio.run_process,
                [*CULET, *args],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                check=False,
                env=ENV,
            )
        )
        assert process.stdout is not None
        yield Running(process, process.stdout)
        if process.returncode is None:
            process.kill()


async def test_one_question_gets_its_answer_on_stdout():
    async with running() as server:
        assert await run("chat", server.url(BOT), "--ask", "say 5") == (
            0,
            words(5) + "\n",
            "",
        )


async def test_one_question_as_json_lines():
    async with running() as server:
        status, out, _ = await run("chat", server.url(BOT), "--ask", "say 3", "--json")
    events = [json.loads(line) for line in out.splitlines()]
    assert status == 0
    assert events[0]["type"] == "connected"
    chunks = [e["chunk"] for e in events if e["type"] == "chunk"]
    assert "".join(c.get("delta", "") for c in chunks) == words(3)
    assert events[-1]["type"] == "chat-end"
    assert events[-1]["outcome"] == "completed"


@pytest.mark.parametrize("json_too", [(), ("--json",)])
async def test_a_turn_that_fails_is_told_and_is_the_exit_status(json_too):
    async with running() as server:
        status, out, err = await run(
            "chat", server.url(BOT), "--ask", "fail 2", *json_too
        )
    assert status == 1
    assert "the turn failed" in err or '"outcome":"error"' in out


async def test_lines_of_a_pipe_are_questions_one_after_the_other():
    async with running() as server:
        status, out, _ = await run("chat", server.url(BOT), stdin=b"say 1\n\nsay 2")
        assert (status, out) == (0, f"{words(1)}\n{words(2)}\n")
        assert len(await fresh_messages(server.url(BOT))) == 4


async def test_who_comes_in_the_middle_sees_the_answer_from_its_beginning():
    async with running() as server, connect(server.url(BOT)) as agent:
        answer = await agent.ask("say 6 3")
        await gate("chat").reached.wait()
        async with started("chat", server.url(BOT)) as chat:
            await chat.until(words(3))
            gate("chat").open.set()
            await answer.done()
            await chat.until(words(6) + "\n")
            assert chat.process.stdin is not None
            await chat.process.stdin.send_all(b"/clear\n")
            with trio.fail_after(TIMES_OUT_S):
                await agent.until(lambda a: not a.messages)
            await chat.process.stdin.aclose()
            assert await chat.end() == 0


async def test_ctrl_c_stops_the_answer_and_is_the_exit_status():
    async with (
        running() as server,
        started("chat", server.url(BOT), "--ask", "say 9 3") as chat,
    ):
        await chat.until(words(3))
        chat.process.send_signal(signal.SIGINT)
        assert await chat.end() == 130
        assert "■ stopped" in await chat.rest()
        messages = await fresh_messages(server.url(BOT))
        assert messages[-1]["parts"][-1]["text"] == words(3)


async def test_a_second_ctrl_c_leaves_at_once(tmp_path):
    async with (
        host(tmp_path) as server,
        started("chat", server.url(BOT), "--ask", "say 9 3") as chat,
    ):
        await chat.until(words(3))
        await server.stop()
        await chat.until("connection lost")
        chat.process.send_signal(signal.SIGINT)
        await chat.until("stopping")
        chat.process.send_signal(signal.SIGINT)
        assert await chat.end() == 130
        await server.start()


async def test_an_answer_goes_on_over_a_restart_of_the_server(tmp_path):
    async with (
        host(tmp_path) as server,
        started("chat", server.url(BOT), "--ask", "say 9 3") as chat,
    ):
        await chat.until(words(3))
        await server.stop()
        GATES.clear()
        gate("chat").open.set()
        await server.start()
        assert await chat.end() == 0
        told = re.compile(r"connection lost .* in \d\.\d s\n")
        assert told.sub("", await chat.rest()) == words(9) + "\n"


async def test_watch_shows_state_runs_and_messages_as_they_happen():
    async with running() as server, started("watch", server.url()) as watch:
        await watch.until('state {"n":0}')
        async with connect(server.url()) as agent:
            await agent.call("set_n", 5)
            await watch.until('state {"n":5}')
            await agent.call("research", 3)
            await watch.until("· Worker r1 started")
            await watch.until("✓ Worker r2: d0 d1 d2")
            await agent.call("tell", "hello\x1b[2J", 1)
            await watch.until("message hello[2J")
        watch.process.send_signal(signal.SIGINT)
        assert await watch.end() == 0


async def test_watch_as_json_begins_with_what_is_known():
    async with running() as server:
        async with connect(server.url()) as agent:
            await agent.call("research", 2)
        async with started("watch", server.url(), "--json") as watch:
            while sum('"completed"' in line for line in watch.text.splitlines()) < 3:
                watch.text += await watch._some()
            watch.process.send_signal(signal.SIGTERM)
            assert await watch.end() == 0
        events = [json.loads(line) for line in (await watch.rest()).splitlines()]
        assert [e["type"] for e in events[:2]] == ["connected", "state"]


async def test_watch_of_an_agent_below_with_a_token():
    async def authenticate(request):
        known = request.headers.get("authorization") == "Bearer k"
        return "me" if known else Response("who?", 401)

    async with running(authenticate=authenticate) as server:
        headers = {"authorization": "Bearer k"}
        async with connect(server.url(), headers=headers) as agent:
            await agent.call("research", 1)
        options = ["--sub", "Worker:r1", "--header", "Authorization: Bearer k"]
        async with started("watch", server.url(), *options) as watch:
            await watch.until("connected to worker r1")
        status, _, err = await run("watch", server.url())
        assert status == 1
        assert "4401" in err


async def test_what_cannot_be_reached_or_read_is_one_clear_line():
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    await listeners[0].aclose()
    status, out, err = await run("chat", f"ws://127.0.0.1:{port}/agents/a/b")
    assert (status, out) == (1, "")
    assert err == f"culet: cannot reach 127.0.0.1:{port}: Connection refused\n"
    status, _, err = await run("watch", "nonsense")
    assert status == 2
    assert err.count("\n") == 1
    status, _, err = await run("watch", "ws://h/x", "--sub", "Worker")
    assert status == 2
    assert "CLASS:NAME" in err


@pytest.mark.parametrize("more", [(), ("--ask", "say 5"), ("--json",)])
async def test_an_agent_that_is_no_chat_is_not_waited_for(more):
    async with running() as server:
        status, out, err = await run("chat", server.url(), *more)
    assert (status, out) == (2, "")
    assert err == "culet: this agent is no chat; `culet watch` shows what it does\n"


async def test_a_reader_that_leaves_ends_it_quietly():
    async with running() as server:
        command = " ".join([*CULET, "watch", server.url(), "--json"])
        with trio.fail_after(TIMES_OUT_S):
            async with connect(server.url()) as agent, trio.open_nursery() as nursery:

                async def keep_talking():
                    while True:
                        await agent.call("tell", "x", 1)
                        await trio.sleep(0.05)

                nursery.start_soon(keep_talking)
                done = await trio.run_process(
                    ["bash", "-c", f"{command} | head -1; exit ${{PIPESTATUS[0]}}"],
                    capture_stdout=True, capture_stderr=True, check=False, env=ENV,
                )  # fmt: skip
                nursery.cancel_scope.cancel()
    assert done.returncode == 0
    assert done.stderr == b""


@asynccontextmanager
async def at_a_terminal(
    *args: str, columns: int
) -> AsyncIterator[tuple[Running, trio.abc.SendStream]]:
    """Run a command at a pseudo-terminal; yield it and what types."""
    import fcntl
    import pty
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = await trio.lowlevel.open_process(
        [*CULET, *args],
        stdin=theirs, stdout=theirs, stderr=theirs, env=ENV,
        start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    terminal = trio.lowlevel.FdStream(ours)
    try:
        yield Running(process, terminal), terminal
    finally:
        if process.returncode is None:
            process.kill()
        await terminal.aclose()


needs_terminal = pytest.mark.skipif(
    os.name != "posix", reason="needs a pseudo-terminal"
)


@needs_terminal
async def test_a_conversation_goes_on_below_what_was_said_before():
    async with running() as server:
        async with connect(server.url(BOT)) as agent:
            await (await agent.ask("say 2 \x1b[2J")).done()
        options = ("chat", server.url(BOT))
        async with at_a_terminal(*options, columns=80) as (chat, keys):
            await chat.until("> say 2 [2J\r\n")
            await chat.until(words(2).strip() + "\r\n")
            await chat.until("> ")
            await keys.send_all(b"\x04")
            assert await chat.end() == 0
        assert "\x1b[2J" not in chat.text


@needs_terminal
async def test_a_conversation_at_a_narrow_terminal():
    async with running() as server:
        options = ("chat", server.url(BOT))
        async with at_a_terminal(*options, columns=30) as (chat, terminal):
            process = chat.process
            await chat.until("> ")
            await terminal.send_all(b"say 3\n")
            await chat.until(f"{words(3)}\r\n")
            await chat.until("> ")
            await terminal.send_all(b"say 9 3\n")
            await gate("chat").reached.wait()
            process.send_signal(signal.SIGINT)
            await chat.until("stopping")
            await chat.until("■ stopped")
            process.send_signal(signal.SIGINT)
            assert await chat.end() == 0
        assert "\x1b[3" not in chat.text
        assert len(await fresh_messages(server.url(BOT))) == 4
