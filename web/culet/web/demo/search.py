"""Finding passages: which ones count, and which of them are worth quoting.

FTS5 is never asked for an OR over everything. A passage counts when its terms carry at
least half of what the question's terms weigh together, so it must have one of the
rarest terms, those without which the rest cannot reach half. Only their short lists are
read whole; the long lists of common terms are read cut down to them.

The best by weight are then read and ranked by their text: a definition of what was
asked for, a sentence about it, and several mentions are worth more than one mention.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol

import msgspec

from culet.adapters.passage import Passage, TermStats
from culet.adapters.terms import identifiers, is_term, parts

TERMS_MAX: Final = 8  # of one search; more are ignored
RESULTS_MAX: Final = 50
READ_MAX: Final = 48  # passages whose text is read and ranked for one search
CACHED_TERMS: Final = 4_096
SHORT_LIST: Final = 1_500  # longer lists of a term are read only as far as needed
HALF: Final = 0.5 - 1e-9  # of the weight, whatever the order of the sum

_SENTENCE: Final = re.compile(r"\b[a-z]{2,} [a-z]+ [a-z]+\b")
_IMPORT: Final = re.compile(
    r"^\s*(?:from\s|import\s|__all__|\"\w+\",$|'\w+',$)", re.MULTILINE
)


_ROW: Final = tuple[int, str, int, str]


class Sql(Protocol):
    """An agent's `sql`: runs one statement and returns its rows."""

    def __call__(self, query: str, /, *params: object) -> Sequence[Sequence[object]]:
        """Return the rows of `query`."""
        ...


class Candidate(msgspec.Struct):
    """A passage that counts: the share of the weight it carries, and what it defines."""

    share: float
    held: int  # the terms it has, as bits, the rarest first
    defined: float = 0.0


class Search:
    """Questions to an index whose tables are made by `Index`."""

    def __init__(self, sql: Sql) -> None:
        self._sql = sql
        self._passages = 0
        self._frequency: dict[str, int] = {}

    def renew(self, passages: int) -> None:
        """Forget what was counted; the index now has so many passages."""
        self._passages = passages
        self._frequency.clear()

    def stats(self, terms: Sequence[str]) -> TermStats:
        """Return in how many passages each of `terms` stands."""
        return TermStats(
            passages=self._passages,
            frequency={term: self._df(term) for term in terms if is_term(term)},
        )

    def search(self, terms: Sequence[str], limit: int) -> list[Passage]:
        """Return the best passages that carry at least half of the weight of `terms`.

        At most `TERMS_MAX` terms count and at most `RESULTS_MAX` passages come back. A
        term that stands nowhere weighs as much as the rarest possible one.
        """
        weights = {term: self._weight(term) for term in normal(terms)}
        found, rare_first = self._candidates(weights)
        best = heapq.nsmallest(
            READ_MAX,
            found,
            key=lambda rowid: (-found[rowid].share - found[rowid].defined, rowid),
        )
        ranked = self._read(
            {rowid: found[rowid] for rowid in best}, weights, rare_first
        )
        ranked.sort(key=lambda item: (-item[0], item[1].file, item[1].line))
        return [passage for _, passage in ranked[: min(limit, RESULTS_MAX)]]

    def _weight(self, term: str) -> float:
        return math.log((self._passages + 1) / max(self._df(term), 1))

    def _df(self, term: str) -> int:
        known = self._frequency.get(term)
        if known is None:
            if len(self._frequency) >= CACHED_TERMS:
                self._frequency.clear()
            rows = self._sql(
                "SELECT count(*) FROM passage_terms WHERE passage_terms MATCH ?",
                _anywhere(term),
            )
            known = self._frequency[term] = msgspec.convert(rows[0][0], int)
        return known

    def _candidates(
        self, weights: Mapping[str, float]
    ) -> tuple[dict[int, Candidate], list[str]]:
        total = sum(weights.values())
        rare_first = sorted(weights, key=lambda term: (-weights[term], term))
        needed = essential(weights, rare_first)
        either = " OR ".join(_anywhere(term) for term in needed)
        held: dict[int, int] = {}  # passage -> which of `rare_first` it has, as bits
        for bit, term in enumerate(rare_first):
            rare, match, flag = term in needed, _anywhere(term), 1 << bit
            if not rare and self._df(term) > SHORT_LIST:
                match = f"({either}) AND ({match})"
            for rowid in self._matches(match):
                if rowid in held:
                    held[rowid] |= flag
                elif rare:
                    held[rowid] = flag
        shares = {
            mask: sum(weights[t] for i, t in enumerate(rare_first) if mask >> i & 1)
            for mask in set(held.values())
        }
        enough = {mask for mask, share in shares.items() if share >= total * HALF}
        found = {
            rowid: Candidate(shares[mask] / total, mask)
            for rowid, mask in held.items()
            if mask in enough
        }
        for term in rare_first if found else ():
            for rowid in self._matches(f'"def:{term}"'):
                if rowid in found:
                    found[rowid].defined += weights[term] / total
        return found, rare_first

    def _matches(self, match: str) -> Iterable[int]:
        # One row with all numbers costs half of what a row for each of them does.
        rows = self._sql(
            "SELECT group_concat(rowid) FROM passage_terms WHERE passage_terms MATCH ?",
            match,
        )
        listed = rows[0][0]
        return map(int, str(listed).split(",")) if listed else ()

    def _read(
        self,
        best: Mapping[int, Candidate],
        weights: Mapping[str, float],
        rare_first: Sequence[str],
    ) -> list[tuple[float, Passage]]:
        rows = self._sql(
            "SELECT passage.id, document.name, passage.line, passage.text FROM passage"
            " JOIN document ON document.id = passage.document"
            " WHERE passage.id IN (SELECT value FROM json_each(?))",
            msgspec.json.encode(list(best)).decode(),
        )
        ranked = []
        for row in rows:
            rowid, file, line, text = msgspec.convert(tuple(row), _ROW)
            candidate = best[rowid]
            passage = Passage(
                file=file,
                line=line,
                quote=text,
                score=round(min(candidate.share, 1.0), 4),
                terms=tuple(
                    term
                    for bit, term in enumerate(rare_first)
                    if candidate.held >> bit & 1
                ),
                defines=candidate.defined > 0,
            )
            rank = candidate.share + 0.6 * candidate.defined + merit(text, weights)
            if next(iter(weights)) not in passage.terms:
                rank -= 0.5  # what was asked for first is what the question is about
            ranked.append((rank, passage))
        return ranked


def normal(terms: Iterable[str]) -> list[str]:
    """Return at most `TERMS_MAX` terms as the index spells them, without repeats."""
    spelled = (
        term
        for raw in terms
        for name in identifiers(raw)[:1]
        for term in parts(name)[:1]
    )
    return list(dict.fromkeys(spelled))[:TERMS_MAX]


def essential(weights: Mapping[str, float], rare_first: Sequence[str]) -> list[str]:
    """Return the rarest terms, of which every passage that counts must have one.

    What is left over weighs less than half of all, so it cannot do without them.
    """
    total = rest = sum(weights.values())
    needed: list[str] = []
    for term in rare_first:
        if rest < total * HALF:
            break
        needed.append(term)
        rest -= weights[term]
    return needed


def merit(text: str, weights: Mapping[str, float]) -> float:
    """Return how well a text tells of the terms, 0 to about 1.

    Mentions count with falling gain; sentences help; lists of names and imports do not.
    """
    total = sum(weights.values()) or 1.0
    seen = dict.fromkeys(weights, 0)
    for name in identifiers(text):
        for term in parts(name):
            if term in seen:
                seen[term] += 1
    mentions = sum(
        weight * seen[term] / (seen[term] + 1.0) for term, weight in weights.items()
    )
    sentences = min(len(_SENTENCE.findall(text)), 6) / 6
    listed = len(_IMPORT.findall(text)) / (text.count("\n") + 1)
    return 0.6 * mentions / total + 0.4 * sentences - 0.6 * listed


def _anywhere(term: str) -> str:
    """Return the FTS5 query for a term in a passage's text or in its path."""
    return f'"{term}" OR "in:{term}"'
