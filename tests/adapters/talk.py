"""An agent that says what it is told to, and doors that a test opens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, ClassVar

import msgspec
import trio

from adapters.peer import Client, fetch, user
from culet.adapters import AIChatAgent, ChatRecovery, ChatRecoveryOptions
from culet.kernel import Chunk, Turn
from culet.kernel.testing import Harness

ME = ("Talk", "a")


class Doors:
    """What turns wait for, by name."""

    def __init__(self) -> None:
        self._events: dict[str, trio.Event] = {}
        self.reached: list[str] = []

    def _event(self, name: str) -> trio.Event:
        return self._events.setdefault(name, trio.Event())

    def open(self, name: str) -> None:
        self._event(name).set()

    async def at(self, name: str, times: int = 1) -> None:
        """Wait until somebody stands before the door (for the n-th time)."""
        with trio.fail_after(60):
            while self.reached.count(name) < times:
                await trio.sleep(0.01)

    async def through(self, name: str) -> None:
        self.reached.append(name)
        await self._event(name).wait()


DOORS = Doors()


def said(message: dict[str, Any]) -> str:
    return "".join(p.get("text", "") for p in message["parts"])


def delta(text: str) -> Chunk:
    return {"type": "text-delta", "id": "t", "delta": text}


class Talk(AIChatAgent):
    """Says each word of the last user message. A continuation says `more`, at `wait:more`.

    `wait:x` waits at the door x, `fail` fails, `many:n` are n words at once, `big:n` is
    one of n letters, `tool:x` is a call x that is answered by the server.
    """

    go_on: ClassVar[bool] = True
    staged: ClassVar[list[int]] = []  # how many chunks were staged, word by word

    async def on_chat_message(self, turn: Turn) -> AsyncIterator[Chunk]:
        if turn.continuation:
            yield delta("more ")
            await DOORS.through("wait:more")
            yield delta("still")
            return
        done = sum(c["type"] == "text-delta" for c in turn.chunks())
        words = [w for m in said(turn.messages[-1]).split() for w in _words(m)]
        for word in words[done:]:
            name, _, what = word.partition(":")
            if name == "wait":
                await DOORS.through(word)
            elif name == "fail":
                raise ValueError("on purpose, {not a chunk}")
            elif name == "tool":
                asked = {"toolCallId": what, "toolName": "t", "input": {}}
                yield {"type": "tool-input-available", **asked}
                yield {"type": "tool-output-available", "toolCallId": what, "output": 1}
            yield delta("x" * int(what) if name == "big" else f"{word} ")
            stream = self._node.tree.streams.find(self._node.slot, turn.request_id)
            self.staged.append(0 if stream is None else len(stream.staged))

    async def on_chat_recovery(self, ctx: ChatRecovery) -> ChatRecoveryOptions:
        return ChatRecoveryOptions(go_on=self.go_on)

    async def more(self) -> str:
        return (await self.continue_last_turn()).status

    async def entries(self) -> list[tuple[str, int]]:
        return [(s, i) for s, i in self.sql("SELECT stream, i FROM culet_entry")]

    async def stored(self) -> None:
        await self.durable()

    async def file_bytes(self) -> int:
        [(size,)] = self.sql(
            "SELECT page_count * page_size FROM pragma_page_count, pragma_page_size"
        )
        return int(size)


def _words(word: str) -> list[str]:
    name, _, count = word.partition(":")
    return [f"w{i}" for i in range(int(count))] if name == "many" else [word]


def texts(messages: list[dict[str, Any]]) -> list[str]:
    return [said(m).strip() for m in messages]


async def history(test: Harness) -> list[dict[str, Any]]:
    answer = await fetch(test.kernel, ME, leaf="/get-messages")
    assert isinstance(answer.body, bytes)
    return list(msgspec.json.decode(answer.body))


def ask(client: Client, request_id: str, text: str) -> None:
    client.chat(request_id, user(f"u-{request_id}", text))


def answers(client: Client, probe_id: str) -> list[str]:
    """What a probe was answered, without the common part of the names."""
    found = (f for f in client.frames if f.get("probeId") == probe_id)
    return [f["type"].removeprefix("cf_agent_stream_") for f in found]


async def probe(client: Client, probe_id: str) -> dict[str, Any]:
    """Ask what streams; return the one answer."""
    client.send("cf_agent_stream_resume_request", probeId=probe_id)
    await client.until(lambda c: bool(answers(c, probe_id)))
    [frame] = [f for f in client.frames if f.get("probeId") == probe_id]
    return frame


def seqs(client: Client, request_id: str) -> list[int]:
    return [f["seq"] for f in client.responses(request_id) if "seq" in f]


def bodies(client: Client, request_id: str) -> list[str]:
    found = client.responses(request_id)
    return [f["body"] for f in found if "seq" in f]
