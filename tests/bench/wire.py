"""A server in a process of its own and clients that cost little, for figures over the wire.

The server is `peer_server.py`, the one that is compared with the peer. A `Counter` only
counts what it is sent; a `Caller` reads frame by frame and can call methods.
"""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import trio
from figures import clock, rss_kb

SERVER: Final = str(Path(__file__).with_name("peer_server.py"))
EVENT: Final = b"agent-tool-event"  # once in each frame of a run
DELTA: Final = b"text-delta"  # once in each chunk of text
ENDED: Final = b'\\"kind\\":\\"finished\\"'
_MASK: Final = b"\0\0\0\0"
_PART: Final = 256 << 10


async def free_port() -> int:
    """Return a port of this machine that nobody has."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port: int = listener.socket.getsockname()[1]
    await listener.aclose()
    return port


class Server:
    """One process of `peer_server.py` over a folder."""

    def __init__(self, port: int, folder: str, level: str) -> None:
        self.port, self.started = port, clock()
        command = [sys.executable, SERVER, "--port", str(port), "--dir", folder]
        self.process = subprocess.Popen([*command, "--level", level])

    async def up(self) -> None:
        """Return when it listens."""
        with trio.fail_after(60):
            while True:
                try:
                    stream = await trio.open_tcp_stream("127.0.0.1", self.port)
                except OSError:
                    await trio.sleep(0.005)
                else:
                    await stream.aclose()
                    return

    def rss_kb(self) -> int:
        """Return what it holds in memory now, in kB."""
        return rss_kb(self.process.pid)

    def forget_peak(self) -> None:
        """Let `peak_kb` begin anew."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def peak_kb(self) -> int:
        """Return the most that it held in memory since `forget_peak`, in kB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0])

    def cpu_s(self) -> float:
        """Return the CPU time that it has used."""
        stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / 100

    def busy_s(self) -> float:
        """Return the same to the nanosecond, of threads that live (Linux)."""
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        return sum(int((t / "schedstat").read_text().split()[0]) for t in tasks) / 1e9

    def kill(self) -> None:
        """Kill it, and wait for its end."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@asynccontextmanager
async def serving(folder: str, level: str) -> AsyncIterator[Server]:
    """Start a server and wait until it listens; kill it in the end."""
    server = Server(await free_port(), folder, level)
    try:
        await server.up()
        yield server
    finally:
        server.kill()


async def _stream(port: int, buffer: int | None) -> trio.SocketStream:
    sock = trio.socket.socket()
    try:
        if buffer is not None:
            sock.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_RCVBUF, buffer)
        await sock.connect(("127.0.0.1", port))
    except BaseException:
        sock.close()
        raise
    return trio.SocketStream(sock)


async def opened(
    port: int, root: str, buffer: int | None = None
) -> tuple[trio.SocketStream, bytes]:
    """Open one WebSocket to a root; return it with what came behind the handshake.

    `buffer` bytes are all that its socket takes before somebody reads.
    """
    with trio.fail_after(60):
        while True:
            try:
                stream = await _stream(port, buffer)
                break
            except OSError:
                await trio.sleep(0.005)
    await stream.send_all(
        f"GET /agents/supervisor/{root} HTTP/1.1\r\nHost: localhost\r\n"
        "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode()
    )
    got = b""
    while b"\r\n\r\n" not in got:
        part = await stream.receive_some(_PART)
        assert part, got
        got += part
    head, _, rest = got.partition(b"\r\n\r\n")
    assert b" 101 " in head, head
    return stream, rest


class Counter:
    """Counts the frames of runs that one client is sent, without looking into them."""

    def __init__(self, stream: trio.SocketStream, rest: bytes) -> None:
        self.stream = stream
        self.frames = self.deltas = self.bytes = 0
        self._tail = b""
        self._take(rest)

    def _take(self, part: bytes) -> None:
        # a mark may lie across two parts; one that was counted is not kept
        data = self._tail + part
        self.bytes += len(part)
        self.frames += data.count(EVENT)
        self.deltas += data.count(DELTA)
        ends = (data.rfind(EVENT) + len(EVENT), data.rfind(DELTA) + len(DELTA))
        self._tail = data[max(len(data) - len(EVENT) + 1, *ends, 0) :]

    async def until(self, frames: int) -> None:
        """Read until so many frames of runs have come."""
        while self.frames < frames:
            part = await self.stream.receive_some(_PART)
            assert part, f"the server closed after {self.frames} frames"
            self._take(part)


class Caller:
    """Reads frame by frame; `call` returns what a method returns."""

    def __init__(self, stream: trio.SocketStream, rest: bytes) -> None:
        self.stream = stream
        self.deltas = self.frames = 0
        self.last_delta = 0.0  # when it came
        self._data, self._ids = bytearray(rest), itertools.count(1)

    async def _frame(self) -> bytes:
        while True:
            data = self._data
            head, size = 2, data[1] if len(data) > 1 else 0
            if size >= 126:
                head = 4 if size == 126 else 10
                size = int.from_bytes(data[2:head], "big")
            if len(data) >= head and len(data) >= head + size:
                frame = bytes(data[head : head + size])
                del data[: head + size]
                return frame
            part = await self.stream.receive_some(_PART)
            assert part, "the server closed"
            data += part

    async def send(self, text: bytes) -> None:
        """Send one text frame."""
        size = len(text)
        head = bytes([0x81, 0x80 | min(size, 126)])
        more = size.to_bytes(2, "big") if size >= 126 else b""
        await self.stream.send_all(head + more + _MASK + text)

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the agent; counts the frames of runs that come meanwhile."""
        call_id = f"c{next(self._ids)}"
        frame = {"type": "rpc", "id": call_id, "method": method, "args": args}
        await self.send(msgspec.json.encode(frame))
        while True:
            data = await self._frame()
            if EVENT in data:
                self.frames += 1
                if DELTA in data:
                    self.deltas += 1
                    self.last_delta = clock()
                continue
            if b'"rpc"' in data[:200]:
                answer = msgspec.json.decode(data)
                if answer.get("id") == call_id:
                    assert answer["success"], answer
                    return answer.get("result")


async def counter(server: Server, root: str) -> Counter:
    """Open a client that counts."""
    return Counter(*await opened(server.port, root))


async def caller(server: Server, root: str) -> Caller:
    """Open a client that calls."""
    return Caller(*await opened(server.port, root))
