"""Our frames, read by another implementation."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st
from websockets.client import ClientProtocol
from websockets.frames import Opcode
from websockets.protocol import OPEN
from websockets.uri import parse_uri

from culet.kernel.ports import Blob
from culet.web.framing import frame, framed


def read(data: bytes) -> list[str | bytes]:
    client = ClientProtocol(parse_uri("ws://x/"), state=OPEN)
    client.receive_data(data)
    out: list[str | bytes] = []
    for event in client.events_received():
        assert event.fin
        assert event.opcode in (Opcode.TEXT, Opcode.BINARY)
        body = bytes(event.data)
        out.append(body.decode() if event.opcode is Opcode.TEXT else body)
    return out


@given(st.lists(st.one_of(st.text(), st.binary()), min_size=1, max_size=5))
@example(["x" * n for n in (0, 125, 126, 127, 65535, 65536)])
@example(["é" * 63, b"\0" * 126])
def test_frames_are_read_back_as_they_were(messages) -> None:
    assert read(framed(Blob(*messages))) == messages


def test_a_blob_is_framed_once() -> None:
    blob = Blob("a", "b")

    assert framed(blob) is framed(blob)
    assert framed(blob) == frame("a") + frame("b")
