"""A client as the kernel sees one: an outbox with the gate in front of it, recorded."""

from __future__ import annotations

import json
from collections import deque
from typing import Any

from culet.kernel import Request
from culet.kernel.core.path import ParsedPath, PathStep
from culet.kernel.errors import Refused
from culet.kernel.http import Response
from culet.kernel.ports import Blob, Gate
from culet.kernel.sockets import Connection
from culet.kernel.testing import Harness
from culet.kernel.visits import Visit, visit


class RecordingPeer:
    """Lets frames out when the gate's durable count reaches their stamp, in order."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.out: list[str | bytes] = []
        self.closed: tuple[int, str] | None = None
        self.connection: Connection | None = None
        self._held: deque[tuple[int, Blob | tuple[int, str]]] = deque()
        self._waiting = False

    def push(self, blob: Blob, stamp: int) -> None:
        self._held.append((stamp, blob))
        self._let_out(self.gate.durable)

    def close(self, code: int, reason: str, stamp: int) -> None:
        self._held.append((stamp, (code, reason)))
        self._let_out(self.gate.durable)

    def drop(self, why: str) -> None:
        """It is cut: nothing of what was held leaves any more."""
        self._held.clear()
        if self.closed is None:
            self.closed = (1006, why)
            assert self.connection is not None
            self.connection.closed(1006, why, was_clean=False)

    def wake(self) -> None:
        """Pull at once: this client has room."""
        while self.connection is not None and not self._held:
            blob = self.connection.pull()
            if blob is None:
                return
            self.out += blob.texts

    def _let_out(self, durable: int) -> None:
        self._waiting = False
        if durable < 0:
            self._held.clear()
            return
        while self._held and self._held[0][0] <= durable:
            _stamp, what = self._held.popleft()
            if isinstance(what, Blob):
                if self.closed is None:
                    self.out += what.texts
            elif self.closed is None:
                self.closed = what
                assert self.connection is not None
                self.connection.closed(*what, was_clean=True)
        if self._held and not self._waiting:
            self._waiting = True
            self.gate.hold(self._let_out)
        elif not self._held:
            self.wake()

    # ---- for tests

    def send(self, frame: Any) -> None:
        assert self.connection is not None
        text = frame if isinstance(frame, (str, bytes)) else json.dumps(frame)
        self.connection.received(text)

    def rpc(self, method: str, *args: Any, call: str = "1") -> None:
        self.send({"type": "rpc", "id": call, "method": method, "args": list(args)})


def request(
    *hops: tuple[str, str], identity: Any = None, query: str = ""
) -> tuple[ParsedPath, Request]:
    """A request for the agent at Top/a and below."""
    root, *rest = hops or (("Top", "a"),)
    path = ParsedPath(PathStep(*root), tuple(PathStep(*h) for h in rest), "/")
    url = "/agents/top/a" + (f"?{query}" if query else "")
    return path, Request("GET", url, path="/", identity=identity)


async def come(
    test: Harness, *hops: tuple[str, str], **options: Any
) -> Visit | Response:
    """Visit an agent from outside."""
    about = {k: options.pop(k) for k in ("identity", "query") if k in options}
    path, asked = request(*hops, **about)
    return await visit(test.kernel, path, asked, **options)


async def connect(
    test: Harness,
    *hops: tuple[str, str],
    label: str = "c",
    peer: type[RecordingPeer] = RecordingPeer,
    **options: Any,
) -> RecordingPeer:
    """Connect a client to an agent."""
    found = await come(test, *hops, **options)
    if isinstance(found, Response):
        raise Refused(f"refused with {found.status}", status=found.status)
    client = peer(found.gate)
    client.connection = found.connect(client, label)
    await client.connection.opened()
    return client


def frames_of(peer: RecordingPeer, kind: str) -> list[Any]:
    """Return the frames of one type that a client has got."""
    texts = [t for t in peer.out if isinstance(t, str) and t.startswith("{")]
    return [f for f in map(json.loads, texts) if f["type"] == kind]
