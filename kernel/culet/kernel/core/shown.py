"""Texts of others as they are shown to people: on one line, escaped, of a bounded length.

A name, an address or the words of an error may hold what commands a terminal, ends a
line, or turns the writing direction around. Law: `shown` is printable, holds no line
break, and has at most `most` characters; a printable text that fits is itself.
"""

from __future__ import annotations

from typing import Final

from .limits import SHOWN_CHARS

_CUT: Final = "…"


def shown(text: str, most: int = SHOWN_CHARS) -> str:
    """Return a text on one line, what is not printable as `\\u001b`, cut to `most`."""
    fits = text[: most + 1]
    if not fits.isprintable():
        fits = "".join(map(_escaped, fits))
    return fits if len(fits) <= most else fits[: most - 1] + _CUT


def shortened(text: str, most: int) -> str:
    """Return a text as it is; of one that is longer than `most` its begin and end."""
    if len(text) <= most:
        return text
    half = (most - 3) // 2
    return f"{text[:half]}\n{_CUT}\n{text[-half:]}"


def without_query(url: str) -> str:
    """Return a URL for logs: its query may hold a token."""
    return url.partition("?")[0]


def _escaped(character: str) -> str:
    return character if character.isprintable() else f"\\u{ord(character):04x}"
