"""How many bytes a text has as UTF-8; it is encoded only where that must be counted.

Law: `is_larger(text, most)` is `size_of(text) > most`. Half a surrogate pair, which no
wire carries, counts three bytes.
"""

from __future__ import annotations

from typing import Final

_WIDEST: Final = 4  # bytes of a character, at most


def size_of(text: str | bytes) -> int:
    """Return the bytes of a text on a wire or on disk."""
    if isinstance(text, bytes) or text.isascii():
        return len(text)
    return len(text.encode(errors="surrogatepass"))


def is_larger(text: str | bytes, most: int) -> bool:
    """Whether a text has more bytes than that."""
    if len(text) > most or len(text) * _WIDEST <= most:
        return len(text) > most
    return size_of(text) > most
