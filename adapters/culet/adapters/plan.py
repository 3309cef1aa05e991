"""From a question to the sub-questions that researchers look into.

A question names *entities*: dotted names (`asyncio.Queue`), words that look like code
(`open_memory_channel`, `TaskGroup`), phrases in quotes. Where it names fewer than
three, its rarest content words are entities too; a *content* word stands in the index,
and in at most a fifth of the passages. Each entity is one sub-question. Where the
question compares, each pair of entities is one more; where room is left, how the
entities are used, and what goes wrong with them.

Pure and deterministic: the same question over the same index gives the same plan.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Final

import msgspec

from culet.adapters.passage import SubQuestion, TermStats
from culet.adapters.terms import STOPWORDS, identifiers, parts

PLAN_MIN: Final = 3
PLAN_MAX: Final = 6
TERMS_MAX: Final = 8  # of one sub-question
QUESTION_CHARS: Final = 4_000  # of a question that are looked at
ENTITIES_MAX: Final = 5
COMMON: Final = 0.2  # a word in more of the passages than this says nothing
FEW: Final = 12  # passages in which any term may stand

_COMPARING: Final = """
    between compare compared comparison contrast differ difference different instead or
    rather than unlike versus vs
"""
COMPARING: Final = frozenset(_COMPARING.split())
# Words of asking: they shape a question and are never what it is about.
_ASKING: Final = """
    best describe document example explain good happen help know mean need should show
    thing understand use used using way work write
"""
ASKING: Final = COMPARING | frozenset(_ASKING.split())
CONTRASTS: Final = ("instead", "unlike")  # in a question they are also worth finding

_QUOTED: Final = re.compile(r"`([^`\n]+)`|\"([^\"\n]+)\"|“([^”\n]+)”|‘([^’\n]+)’")
_CODE_LIKE: Final = re.compile(r"\w+_\w+|_\w+|[a-z]+[A-Z]\w*|[A-Z][a-z0-9]+[A-Z]\w*")


class Entity(msgspec.Struct, frozen=True):
    """Something that the question names: how it is written there, and where."""

    text: str
    at: int
    terms: tuple[str, ...]
    named: bool  # written like a name, not just a word


def asked_terms(question: str) -> list[str]:
    """Return all terms whose frequency `plan` wants to know, in order."""
    found = [term for name in identifiers(_cut(question)) for term in parts(name)]
    return list(dict.fromkeys(found))


def plan(question: str, stats: TermStats) -> list[SubQuestion]:
    """Return 3 to 6 sub-questions, or none if the question has no word to look for."""
    question = _cut(question)
    words = _words(question, stats)
    named = _named(question)[:ENTITIES_MAX]
    entities = list(named)
    taken = {term for entity in named for term in entity.terms}
    for word in words:
        if len(entities) >= PLAN_MIN:
            break
        if not taken & set(word.terms):
            entities.append(word)
    if not entities:
        return []
    entities.sort(key=lambda entity: entity.at)
    asked = {term for name in identifiers(question) for term in parts(name)}
    subjects = [_subject(entity, entities, asked, stats) for entity in entities]
    wanted = list(subjects)
    if compares(question):
        wanted += [
            _pair(first, second, stats) for first, second in combinations(entities, 2)
        ]
    # One usage where room is left, and only a short plan is filled up with more.
    keep = max(PLAN_MIN, len(wanted) + 1)
    found = list(zip(entities, subjects, strict=True))
    wanted += [_usage(*one) for one in found[: PLAN_MIN - 1]]
    wanted += [_trouble(*one) for one in found[:1]]
    return wanted[: min(keep, PLAN_MAX)]


def compares(question: str) -> bool:
    """Say whether a question asks for things to be compared."""
    return any(
        term in COMPARING
        for name in identifiers(question)
        for term in (*parts(name), name.lower())
    )


def weight(term: str, stats: TermStats) -> float:
    """Return the idf of a term; one that stands nowhere has the highest."""
    return math.log((stats.passages + 1) / max(stats.frequency.get(term, 0), 1))


def _cut(question: str) -> str:
    return question[:QUESTION_CHARS]


def _is_content(term: str, stats: TermStats) -> bool:
    """Whether a term tells something: it stands somewhere, and not nearly everywhere.

    A share says little of a handful of passages: so few may have any term.
    """
    most = max(COMMON * stats.passages, FEW)
    return 0 < stats.frequency.get(term, 0) <= most


def _named(question: str) -> list[Entity]:
    """Return what is written like a name: quoted, dotted or code-like; in order."""
    found: list[Entity] = []
    rest = question
    for match in _QUOTED.finditer(question):
        text = next(group for group in match.groups() if group is not None)
        terms = [term for name in identifiers(text) for term in parts(name)]
        found.append(Entity(text, match.start(), tuple(dict.fromkeys(terms)), True))
        blank = " " * (match.end() - match.start())
        rest = rest[: match.start()] + blank + rest[match.end() :]
    for match in re.finditer(r"[^\W\d][\w.]*", rest):
        text = match[0].strip(".")
        called = rest[match.end() : match.end() + 1] == "("
        if "." in text or called or _CODE_LIKE.fullmatch(text):
            found.append(Entity(text, match.start(), parts(text), True))
    distinct: dict[tuple[str, ...], Entity] = {}
    for entity in sorted(found, key=lambda entity: entity.at):
        if entity.terms:
            distinct.setdefault(entity.terms, entity)
    return list(distinct.values())


def _words(question: str, stats: TermStats) -> list[Entity]:
    """Return the plain words that the question may be about, the rarest first.

    Content words; if it has none, the words that stand nowhere, so that the answer can
    say of what nothing was found.
    """
    plain: dict[str, Entity] = {}
    for match in re.finditer(r"[^\W\d]\w*", question):
        terms = parts(match[0])[:1]
        if terms and terms[0] not in ASKING | STOPWORDS:
            plain.setdefault(terms[0], Entity(match[0], match.start(), terms, False))
    content = [e for e in plain.values() if _is_content(e.terms[0], stats)]
    unknown = [e for e in plain.values() if not stats.frequency.get(e.terms[0])]
    return sorted(content or unknown, key=lambda e: (-weight(e.terms[0], stats), e.at))


def _search_terms(entity: Entity, stats: TermStats) -> list[str]:
    """Return what to search for: a compound only where the index knows it.

    The parts are what the question says; that nobody wrote them in this very form is no
    reason to find nothing.
    """
    known = [term for term in entity.terms if stats.frequency.get(term)]
    single = [t for t in entity.terms if "." not in t and "_" not in t]
    wanted = set(known) | set(single)
    return [term for term in entity.terms if term in wanted] or list(entity.terms)


def _subject(
    entity: Entity,
    entities: Sequence[Entity],
    asked: set[str],
    stats: TermStats,
) -> SubQuestion:
    terms = _search_terms(entity, stats)
    if entity.named:
        return _sub(f"What is {entity.text}?", terms, "subject")
    # A plain word says little alone: it is looked for together with a name that the
    # question has, else with the word that the question says next.
    index = entities.index(entity)
    after = [*entities[index + 1 :], *entities[:index]]
    company = [other.terms[-1] for other in after if other.named]
    company += [other.terms[0] for other in after]
    with_it = [term for term in company if term not in terms][:1]
    text = f"What do the documents say about {' and '.join([entity.text, *with_it])}"
    # Whoever asks for an alternative asks for the words that introduce one.
    asks = asked & set(CONTRASTS)
    contrast = [term for term in CONTRASTS if term in asks and _is_content(term, stats)]
    return _sub(text + "?", [*terms, *with_it, *contrast], "subject")


def _pair(first: Entity, second: Entity, stats: TermStats) -> SubQuestion:
    one, two = _search_terms(first, stats), _search_terms(second, stats)
    # In turns, so that the bound on terms leaves something of both.
    terms = [term for both in zip(one, two, strict=False) for term in both]
    rest = [*one[len(two) :], *two[len(one) :]]
    return _sub(
        f"How does {first.text} compare with {second.text}?", [*terms, *rest], "pair"
    )


def _usage(entity: Entity, subject: SubQuestion) -> SubQuestion:
    text = f"How is {entity.text} used?"
    return _sub(text, [*subject.terms[:4], "example"], "usage")


def _trouble(entity: Entity, subject: SubQuestion) -> SubQuestion:
    text = f"What can go wrong with {entity.text}?"
    return _sub(text, [*subject.terms[:4], "error", "raise"], "trouble")


def _sub(question: str, terms: Iterable[str], kind: str) -> SubQuestion:
    distinct = tuple(dict.fromkeys(terms))[:TERMS_MAX]
    return SubQuestion(question=question, terms=distinct, kind=kind)
