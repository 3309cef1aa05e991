"""When the bytes leave: at the end of the pass in which a frame was pushed."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing

import trio
from websockets.protocol import OPEN

from culet.kernel.core.limits import Limits
from culet.kernel.ports import Blob
from culet.web.session import Session
from culet.web.transport import Link, new_protocol
from culet.web.wire import FEW, Wire
from web.test_session import Gate, Pages

LIMITS = Limits(outbox_bytes=64 << 20)


class Watched:
    """A link with its session, and the other end of its socket."""

    def __init__(self, wire: Wire, ours: trio.SocketStream, theirs: socket.socket):
        protocol = new_protocol(LIMITS)
        protocol.state = OPEN
        self.link = Link(wire, ours, protocol)
        self.session = Session(Gate(), LIMITS, self.link.ready, self.link.cut)
        self.link.session = self.session
        self.theirs = theirs

    def push(self, text: str) -> None:
        self.session.push(Blob(text), 0)

    def came(self) -> bytes:
        """What lies in the client's socket now."""
        try:
            return self.theirs.recv(1 << 20, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return b""

    def read(self, size: int) -> int:
        """Wait for so many bytes, outside of the loop."""
        left = size
        while left > 0 and (part := self.theirs.recv(1 << 20)):
            left -= len(part)
        return size - left


@asynccontextmanager
async def wired(number: int) -> AsyncIterator[list[Watched]]:
    """Links of one wire; nothing else goes on in the loop."""
    wire = Wire(LIMITS)
    async with AsyncExitStack() as stack, trio.open_nursery() as nursery:
        nursery.start_soon(wire.flush)
        links: list[Watched] = []
        for _ in range(number):
            ours, theirs = socket.socketpair()
            stack.enter_context(closing(theirs))
            stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
            links.append(Watched(wire, await stack.enter_async_context(stream), theirs))
            nursery.start_soon(links[-1].link._send)
        await trio.testing.wait_all_tasks_blocked()
        yield links
        nursery.cancel_scope.cancel()


async def test_what_a_pass_has_pushed_is_written_at_its_end_in_one_piece() -> None:
    async with wired(1) as (one,):
        one.push("first")
        one.push("second")
        assert one.came() == b""
        await trio.lowlevel.checkpoint()
        assert one.came() == b"\x81\x05first\x81\x06second"


async def test_a_crowd_is_written_to_by_the_task_and_nobody_is_left_out() -> None:
    async with wired(FEW + 1) as links:
        for one in links:
            one.push("all")
        await trio.testing.wait_all_tasks_blocked()
        assert [one.came() for one in links] == [b"\x81\x03all"] * len(links)


async def test_what_a_full_socket_did_not_take_follows_though_the_loop_has_no_work() -> (
    None
):
    size = 8 << 20
    async with wired(1) as (one,):
        read = trio.Event()

        async def client() -> None:
            assert await trio.to_thread.run_sync(one.read, size + 10) == size + 10
            read.set()

        with trio.CancelScope(deadline=trio.current_time() + 20) as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client)
                await trio.testing.wait_all_tasks_blocked()
                one.push("x" * size)
                await read.wait()
        assert not scope.cancel_called, "it waited for somebody to wake the loop"


async def test_pages_of_a_replay_are_read_by_the_task_to_the_last() -> None:
    async with wired(1) as (one,):
        one.session.connection = Pages(3, 1)
        one.session.wake()
        one.link.wire.before_io_wait(0)
        assert one.came() == b""  # not where a pass ends
        await trio.testing.wait_all_tasks_blocked()
        assert one.came() == b"\x81\x01p" * 3


async def test_a_client_that_is_gone_is_cut_though_the_loop_has_no_work() -> None:
    async with wired(1) as (one,):
        one.theirs.close()
        ended = trio.Event()

        async def life() -> None:
            with one.link._scope:
                await trio.sleep_forever()
            ended.set()

        with trio.CancelScope(deadline=trio.current_time() + 20) as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(life)
                await trio.testing.wait_all_tasks_blocked()
                one.push("hello")
                await ended.wait()
        assert not scope.cancel_called
        assert one.link.wire.cuts == 1
