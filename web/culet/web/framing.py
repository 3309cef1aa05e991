"""Outgoing WebSocket frames: unmasked, unfragmented, made once and shared."""

from __future__ import annotations

from culet.kernel.ports import Blob


def frame(message: str | bytes) -> bytes:
    """Return the wire form of one message: text for str, binary for bytes."""
    if isinstance(message, str):
        first, body = b"\x81", message.encode()
    else:
        first, body = b"\x82", message
    size = len(body)
    if size < 126:
        return first + bytes((size,)) + body
    if size < 65536:
        return first + b"\x7e" + size.to_bytes(2, "big") + body
    return first + b"\x7f" + size.to_bytes(8, "big") + body


def framed(blob: Blob) -> bytes:
    """Return the wire form of all messages of a blob, made by whoever asks first."""
    wire = blob.framed
    if wire is None:
        texts = blob.texts
        wire = frame(texts[0]) if len(texts) == 1 else b"".join(map(frame, texts))
        blob.framed = wire
    return wire
