"""A connection as hypercorn sees it, where a handshake waits for its answer."""

from __future__ import annotations

from time import process_time
from typing import Any, cast

import pytest
import trio

from culet.web.heads import Sieve
from culet.web.sieved import HELD_BYTES, Sieved
from web.serving import HANDSHAKE

HEAD = "\r\n".join(["GET /theirs HTTP/1.1", "Host: x", *HANDSHAKE, "", ""]).encode()


def sieved() -> tuple[trio.StapledStream[Any, Any], Sieved]:
    theirs, ours = trio.testing.memory_stream_pair()
    return theirs, Sieved(ours, cast(Any, None), 32 << 10)


@pytest.mark.rule("F-49")
async def test_who_says_too_much_before_he_is_accepted_is_gone(clock: object) -> None:
    """Else nothing would end the wait but an answer that may never come."""
    theirs, ours = sieved()
    await theirs.send_all(HEAD + b"x" * (HELD_BYTES + 1))
    assert await ours.receive_some() == HEAD
    with trio.fail_after(60):
        assert await ours.receive_some() == b""


async def test_what_comes_before_the_answer_waits_for_it(clock: object) -> None:
    theirs, ours = sieved()
    await theirs.send_all(HEAD + b"early")
    assert await ours.receive_some() == HEAD
    async with trio.open_nursery() as nursery:
        got: list[bytes] = []

        async def receive() -> None:
            got.append(await ours.receive_some())

        nursery.start_soon(receive)
        await trio.testing.wait_all_tasks_blocked()
        assert got == []
        await ours.send_all(b"HTTP/1.1 101 Switching Protocols\r\n\r\n")
    assert got == [b"early"]


@pytest.mark.rule("F-49")
def test_a_head_that_comes_byte_by_byte_is_looked_at_once() -> None:
    """Looking at all of it each time took over ten seconds."""
    sieve = Sieve(64 << 10)
    head = b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"y" * 40_000 + b"\r\n\r\n"
    begun = process_time()
    out = b"".join(sieve.feed(head[at : at + 1]) for at in range(len(head)))
    assert out == head
    assert process_time() - begun < 3
