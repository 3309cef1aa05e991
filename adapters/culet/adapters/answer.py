"""From passages to a finding, and from findings to an answer, in words of the sources.

Nothing is made up: a finding is the sentence of a passage that tells most, and where it
stands; an answer is the findings and the passages quoted whole. What was not found is
said too, and an answer that rests on nothing says that it cites nothing.

Pure and deterministic, so a result can be computed again from the stored messages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from culet.adapters.passage import Answer, Citation, Finding, Passage, SubQuestion
from culet.adapters.plan import CONTRASTS
from culet.adapters.terms import identifiers, parts

QUOTES_MAX: Final = 3  # of one finding
SEARCHED: Final = 12  # passages that a researcher asks for
WORTH: Final = 0.85  # of the best passage's value: what is less is not quoted
SENTENCE_CHARS: Final = 240
NOTHING: Final = "nothing found"

_MARKS: Final = re.compile(
    r"^[\s#*>/\-]+|^\s*[rbu]*(?:\"\"\"|''')|\"\"\"|'''", re.IGNORECASE
)
_STOP: Final = re.compile(r"(?<=[a-z0-9)`'\"\]][.!?:])\s+(?=[A-Z`\"*])")
_CODE: Final = re.compile(
    r"^(?:@|async |class |def |if .*:$|for .*:$|while .*:$|elif |else:|try:|finally:|"
    r"except\b|return\b|raise |import |from \S+ import|with .*:$|assert |yield\b|pass$)"
    r"|\s[-+*/|&]?=\s|->|^[\w.]+\(.*\)$|^[\w.]+: \w+\["
)
_WORDY: Final = re.compile(r"\b[a-z]{2,} [a-z]+ [a-z]{2,}\b")
_CONTRAST: Final = re.compile(
    r"\b(?:unlike|instead|whereas|however|rather than|in contrast|different from|"
    r"differs?|similar|prefer|replacement|equivalent|compared|alternative|but not)\b",
    re.IGNORECASE,
)
_USAGE: Final = re.compile(
    r">>>|\bexample|\busage|\buse\b|\bfor example|e\.g\.|::$", re.IGNORECASE
)
_TROUBLE: Final = re.compile(
    r"\brais|\berror|\bexcept|\bwarn|\bmust not|\bnever", re.IGNORECASE
)
_SIGNS: Final = {"pair": _CONTRAST, "usage": _USAGE, "trouble": _TROUBLE}


def finding(asked: SubQuestion, passages: Sequence[Passage]) -> Finding:
    """Return what the passages say to a sub-question, in at most `QUOTES_MAX` quotes.

    `passages` are those that count, the best first. Without any, nothing was found.
    """
    chosen: dict[str, Passage] = {}  # what it says -> the first passage that says so
    for passage in choose(asked, passages):
        chosen.setdefault(telling(passage, asked), passage)
    if not chosen:
        return Finding(question=asked.question, summary=NOTHING)
    return Finding(
        question=asked.question,
        summary="\n".join(
            f"{said} ({passage.file}:{passage.line})"
            for said, passage in chosen.items()
        ),
        citations=tuple(
            Citation(file=passage.file, line=passage.line, quote=passage.quote)
            for passage in chosen.values()
        ),
    )


def choose(asked: SubQuestion, passages: Sequence[Passage]) -> list[Passage]:
    """Return the passages to quote: the best for this kind of question, well apart."""

    def value(item: tuple[int, Passage]) -> float:
        place, passage = item
        worth = passage.score - 0.08 * place
        sign = _sign(asked)
        if sign is not None:
            worth += 0.25 * min(len(sign.findall(passage.quote)), 2)
        if asked.kind == "usage" and passage.defines:
            worth -= 0.4
        if asked.kind == "pair" and not set(asked.terms[:2]) <= set(passage.terms):
            worth -= 0.2  # a comparison speaks of both
        if not _WORDY.search(passage.quote):
            worth -= 0.3  # bare code tells little by itself
        return worth

    ordered = sorted(enumerate(passages), key=lambda item: (-value(item), item[0]))
    chosen: list[Passage] = []
    for place, passage in ordered:
        if len(chosen) == QUOTES_MAX:
            break
        if chosen and value((place, passage)) < WORTH * value(ordered[0]):
            break
        chosen.append(passage)
    return chosen


def telling(passage: Passage, asked: SubQuestion) -> str:
    """Return the sentence of a passage that says most about the terms, on one line."""
    wanted = set(asked.terms)
    sign = _sign(asked)
    sentences = sentences_of(passage.quote)
    prose = [sentence for sentence in sentences if _WORDY.search(sentence)]
    introduction = prose[0] if prose and passage.defines else None

    def value(sentence: str) -> float:
        here = {term for name in identifiers(sentence) for term in parts(name)}
        worth = len(here & wanted) / (len(wanted) or 1)
        worth += 0.5 if sentence in prose else 0.0
        if sign is not None and sign.search(sentence):
            worth += 0.6
        if sign is None and sentence == introduction:
            worth += 0.6  # what a thing is stands in the first sentence about it
        return worth

    best = max(sentences, key=value, default=passage.quote.strip())
    return shortened(best)


def shortened(sentence: str) -> str:
    """Return a sentence of at most `SENTENCE_CHARS`, cut after a word."""
    if len(sentence) <= SENTENCE_CHARS:
        return sentence
    return sentence[:SENTENCE_CHARS].rpartition(" ")[0].rstrip(",;:") + " …"


def sentences_of(quote: str) -> list[str]:
    """Split a quote into sentences of prose and lines of code, without their marks."""
    texts: list[str] = []
    flowing = False  # the last line was prose and goes on
    for line in quote.split("\n"):
        bare = _MARKS.sub("", line).strip()
        code = _CODE.search(bare) is not None or line.lstrip().startswith(">>>")
        if flowing and bare and not code:
            texts[-1] += " " + bare
        elif bare:
            texts.append(bare)
        flowing = bool(bare) and not code
    return [
        sentence.strip()
        for text in texts
        for sentence in _STOP.split(text)
        if len(sentence.strip()) > 2
    ]


def _sign(asked: SubQuestion) -> re.Pattern[str] | None:
    """Return what the sentences that answer this kind of question have about them."""
    if set(asked.terms) & set(CONTRASTS):
        return _CONTRAST
    return _SIGNS.get(asked.kind)


def answer(findings: Sequence[Finding]) -> Answer:
    """Return the answer: what was found in short, then the passages it rests on.

    Markdown. Each passage is quoted once, however many findings cite it.
    """
    found = [one for one in findings if one.citations]
    missing = [one.question for one in findings if not one.citations]
    if not found:
        return Answer(
            text="I found nothing about this in the documents, so there is nothing that I"
            " could cite. " + _asked(missing)
        )
    citations = list(
        {(c.file, c.line): c for one in found for c in one.citations}.values()
    )
    lines: list[str] = []
    told: set[str] = set()
    same: list[str] = []
    for one in found:
        fresh = [line for line in one.summary.split("\n") if line not in told]
        told.update(fresh)
        if fresh:
            lines += ["", f"**{one.question}**", "", *(f"- {line}" for line in fresh)]
        else:
            same.append(one.question)
    if same:
        lines += ["", " ".join(["The same passages came up for:", *same])]
    if missing:
        lines += ["", _asked(missing)]
    lines += ["", "**Sources**"]
    for citation in citations:
        fence = "`" * max(3, _longest_run(citation.quote) + 1)
        lines += ["", f"{citation.file}:{citation.line}", fence, citation.quote, fence]
    return Answer(text="\n".join(lines).strip(), citations=tuple(citations))


def finding_of(question: str, result: Any) -> Finding:
    """Return a tool's result as a finding, whatever came back. Never raises.

    `result` is the decoded value, or text. A run that did not complete is a finding
    that says why and cites nothing.
    """
    if isinstance(result, str):
        try:
            result = msgspec.json.decode(result)
        except msgspec.DecodeError:
            return Finding(question=question, summary=result)
    try:
        found = msgspec.convert(result, Finding)
    except msgspec.ValidationError:
        why = ""
        if isinstance(result, Mapping):
            why = str(result.get("error") or result.get("status") or "")
        return Finding(question=question, summary=why or "no result")
    return found


def _asked(missing: Iterable[str]) -> str:
    return " ".join(["Nothing was found for:", *missing])


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall(r"`+", text)), default=0)
