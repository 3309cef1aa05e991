"""What a search finds and what research reports: the shapes between agents.

They are stored in messages and results, so fields are only ever added, with defaults.
"""

from __future__ import annotations

import msgspec


class Passage(msgspec.Struct, frozen=True, kw_only=True):
    """Whole consecutive lines of a document, byte for byte."""

    file: str  # public name, `/` between its parts
    line: int  # 1-based, of the first line of `quote`
    quote: str  # without the line end of its last line
    score: float = 0.0  # share of the question's weight that its terms carry, 0 to 1
    terms: tuple[str, ...] = ()  # which of the terms asked for it has
    defines: bool = False  # something of that name is defined or is the heading here


class Citation(msgspec.Struct, frozen=True, kw_only=True):
    """The place and the exact text of what an answer rests on."""

    file: str
    line: int
    quote: str


class SubQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a question: what one researcher is asked."""

    question: str
    terms: tuple[str, ...] = ()  # what to search for, the most telling first
    kind: str = "subject"  # or "pair", "usage"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What a researcher found. Without citations it found nothing."""

    question: str
    summary: str
    citations: tuple[Citation, ...] = ()


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The assistant's answer; `text` already names the citations in their order."""

    text: str
    citations: tuple[Citation, ...] = ()


class TermStats(msgspec.Struct, frozen=True, kw_only=True):
    """In how many passages each term asked about stands, and how many there are."""

    passages: int
    frequency: dict[str, int] = {}
