"""From a document to passages: what is found, quoted and cited.

A passage is a run of whole lines, at most `LINES_MAX`, that begins where something
begins: a definition, a heading, a paragraph. Together the passages of a document are
its lines in order, without blank lines at their ends and without lines so long that
they must be data.

The terms of a passage are those of its text, and three kinds that only an index sees:
`in:queue` (a part of the document's path), `def:queue` (something named so is defined
here, or a heading says so) and the dotted names under which code elsewhere would call
what is defined here (`asyncio.queue` for `class Queue` in `asyncio/queues.py`).

Pure: text in, passages and terms out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from os.path import splitext
from typing import Final

import msgspec

from culet.adapters.terms import is_term, parts, tokenize

LINES_MAX: Final = 12
LINES_MIN: Final = 5  # a new definition does not cut off fewer lines than these
LINE_CHARS: Final = 4_000  # a paragraph may be one line; what is longer is data
CHARS_MAX: Final = 4_000  # of a passage, its line ends not counted
assert CHARS_MAX <= LINE_CHARS  # so a line that is left out always cuts
_HEAD: Final = re.compile(
    r"""(?P<indent>[ \t]*)(?:
        (?P<decorator>@)
      | (?:export\s+|pub\s+|public\s+|static\s+|default\s+|async\s+)*
        (?P<kind>class|def|function|fn|func|struct|interface|trait|enum)\s+(?P<name>\w+)
      | (?P<heading>\#{1,6}\s+\S.*)
    )""",
    re.VERBOSE,
)
_PROSE: Final = frozenset({".md", ".rst", ".txt", ".adoc", ".tex", ".html"})


class Passage(msgspec.Struct, frozen=True):
    """Whole consecutive lines; `line` is the 1-based number of the first."""

    line: int
    text: str  # without the line end of its last line
    names: tuple[str, ...] = ()  # what is defined here: `Queue`, `Queue.get`


def is_prose(name: str) -> bool:
    """Say whether a document of this name is written for people, not for machines."""
    return splitext(name)[1].lower() in _PROSE


def split(text: str, *, prose: bool = False) -> Iterator[Passage]:
    """Yield the passages of a text in order. Only `\\n` ends a line, as in an editor."""
    held: list[str] = []
    names: list[tuple[int, str]] = []  # (index of the line in `held`, name)
    owners: list[tuple[int, str]] = []  # open classes: (indent, name)
    first = 1
    size = 0
    decorated = False

    def cut(count: int) -> Passage | None:
        nonlocal first, held, names, size
        taken = tuple(name for at, name in names if at < count)
        passage = _trimmed(first, held[:count], taken)
        first += count
        held = held[count:]
        size = sum(map(len, held))
        names = [(at - count, name) for at, name in names if at >= count]
        return passage

    for line in text.split("\n"):
        head = None if len(line) > LINE_CHARS else _HEAD.match(line)
        if head is not None and prose != bool(head["heading"]):
            head = None  # a `#` in code is a comment, a `class` in prose is a word
        wanted = head is not None and not decorated
        if (wanted and len(held) >= LINES_MIN) or (held and head and head["heading"]):
            if passage := cut(len(held)):
                yield passage
        elif len(held) >= LINES_MAX and (passage := cut(_seam(held))):
            yield passage
        if held and size + len(line) > CHARS_MAX and (passage := cut(len(held))):
            yield passage
        if len(line) > LINE_CHARS:
            first += 1
            continue
        held.append(line)
        size += len(line)
        decorated = head is not None and bool(head["decorator"])
        if head is not None and not decorated:
            names.append((len(held) - 1, _qualified(head, owners)))
    while held:
        if passage := cut(min(len(held), LINES_MAX)):
            yield passage


def terms_of(passage: Passage, module: Sequence[str]) -> set[str]:
    """Return all that the index must know of a passage; `module` is its path in parts."""
    terms = tokenize(passage.text)
    path = [part.strip("_").lower() for part in module]
    for part in path:
        terms.update("in:" + term for term in parts(part))
    for name in passage.names:
        if name.startswith("#"):
            terms.update("def:" + term for term in tokenize(name))
            continue
        names = [part.strip("_").lower() for part in name.split(".")]
        terms.update("def:" + term for term in parts(names[-1])[:1])
        dotted = [part for part in names if part]
        for depth in range(len(path)):
            # what `asyncio/queues.py` defines is called `asyncio.queues.Queue`, mostly
            # `asyncio.Queue`, and `queues.Queue` from near by
            for reach in (path[depth:], path[depth:-1]):
                called = ".".join([*reach, *dotted])
                terms.update((called, "def:" + called))
    return {term for term in terms if ":" in term or is_term(term)}


def _qualified(head: re.Match[str], owners: list[tuple[int, str]]) -> str:
    if head["heading"]:
        return head["heading"]
    indent = len(head["indent"].expandtabs())
    while owners and owners[-1][0] >= indent:
        owners.pop()
    name = ".".join([*(owner for _, owner in owners[-1:]), head["name"]])
    if head["kind"] == "class":
        owners.append((indent, head["name"]))
    return name


def _seam(lines: list[str]) -> int:
    """Return where to cut a full passage: after its last blank line, if it has one."""
    for index in range(len(lines) - 1, LINES_MIN - 1, -1):
        if not lines[index].strip():
            return index + 1
    return len(lines)


def _trimmed(first: int, lines: list[str], names: tuple[str, ...]) -> Passage | None:
    start, end = 0, len(lines)
    while start < end and not lines[start].strip():
        start += 1
    while end > start and not lines[end - 1].strip():
        end -= 1
    if start == end:
        return None
    return Passage(first + start, "\n".join(lines[start:end]), names)
