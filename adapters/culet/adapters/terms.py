"""Words as an index knows them: one tokenizer for documents and for questions.

An identifier stands in the index whole and in parts, so that a question may name it
either way: `asyncio.Queue` gives `asyncio.queue`, `asyncio` and `queue`; `getNowait`
and `get_nowait` both give their own name and `get`, `nowait`. Everything is lower
case and plurals lose their `s`. What carries no meaning (`the`, `how`, `self`) is left
out on both sides.

Pure: text in, terms out.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

_IDENTIFIER: Final = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*")
_HUMPS: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[^A-Z_]+")
_TERM: Final = re.compile(r"[^\W_][\w.:]*")
TERM_MAX: Final = 64  # characters; what is longer is data, not a word

_MEANINGLESS: Final = """
    a about after all also am an and any are as at be because been before being but by
    can cannot could did do does doing done each else either even ever every few for
    from get gets give given had has have having he hence her here his how however i if
    in into is it its itself just let like made make makes many may me might more most
    much must my neither no nor not now of off on once one only onto or other our out
    over own per please rather same shall she should since so some still such tell than
    that the their them then there these they this those though through thus to too two
    under until up upon us very via want was way we well were what whatever when where
    whether which while who whom whose why will with within without would yes yet you
    your self cls none true false
"""
STOPWORDS: Final = frozenset(_MEANINGLESS.split())


def singular(word: str) -> str:
    """Return `word` without the `s` of a plural or of a third person."""
    if len(word) < 4 or word[-1] != "s" or word[-2] in "sui":
        return word
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    if word.endswith(("sses", "xes", "tches", "shes", "zzes")):
        return word[:-2]
    return word[:-1]


@lru_cache(maxsize=1 << 14)
def parts(identifier: str) -> tuple[str, ...]:
    """Return the terms of one identifier, the most exact first, without repeats.

    `asyncio.LifoQueue` → `asyncio.lifoqueue`, `asyncio`, `lifoqueue`, `lifo`, `queue`.
    Private names lose their leading underscores; `self.` and `cls.` are dropped.
    """
    names = [name.strip("_") for name in identifier.split(".")]
    names = [name for name in names if name and name.lower() not in STOPWORDS]
    found = [".".join(names).lower()] if len(names) > 1 else []
    for name in names:
        found.append(singular(name.lower()))
        humps = [hump for piece in name.split("_") for hump in _HUMPS.findall(piece)]
        if len(humps) > 1:
            words = [hump.lower() for hump in humps]
            found += [singular(word) for word in words if word not in STOPWORDS]
    return tuple(dict.fromkeys(term for term in found if is_term(term)))


def is_term(term: str) -> bool:
    """Say whether `term` may stand in the index at all."""
    return (
        1 < len(term) <= TERM_MAX
        and term not in STOPWORDS
        and _TERM.fullmatch(term) is not None
    )


def identifiers(text: str) -> list[str]:
    """Return the names in `text` in order, dotted ones whole, repeats included."""
    return _IDENTIFIER.findall(text)


def tokenize(text: str) -> set[str]:
    """Return every term of `text`; how often one stands there does not count."""
    terms: set[str] = set()
    for identifier in set(_IDENTIFIER.findall(text)):
        terms.update(parts(identifier))
    return terms
