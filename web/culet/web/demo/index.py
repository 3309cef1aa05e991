"""The index of the demo's documents, built in small synchronous pieces.

It lives in one agent's own database and is handed that agent's `sql`. A contentless
FTS5 table maps terms to passages; text is split into terms here, so FTS5 keeps only
which passage has which term (`detail=none`). Building is a generator that can stop
after any passage: `build_step` runs it for a few milliseconds inside one transaction,
so after a crash the tables say exactly which lines of which documents are done.

FTS5 writes a segment whenever a statement needs a savepoint of its own, and holds at
most 2,000 of them. So one step gathers what it adds to the full-text index and what it
removes, and says each in one statement; every `MERGE_EVERY` steps the segments are
merged, a few pages at a time, because FTS5 left to itself now and then merges so much
at once that the loop would stand still.

"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import msgspec

from culet.adapters.passage import Passage, TermStats
from culet.web.demo import corpus, passages
from culet.web.demo.search import Search, Sql

MERGE_PAGES: Final = 16  # of the full-text index at a time
MERGE_EVERY: Final = 128  # steps that wrote to it

SCHEMA: Final = (
    """CREATE TABLE IF NOT EXISTS document(
        id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, size INTEGER NOT NULL,
        mtime_ns INTEGER NOT NULL, next_line INTEGER NOT NULL,
        done INTEGER NOT NULL CHECK (done IN (0, 1))) STRICT""",
    """CREATE TABLE IF NOT EXISTS passage(
        id INTEGER PRIMARY KEY, document INTEGER NOT NULL REFERENCES document(id),
        line INTEGER NOT NULL, text TEXT NOT NULL) STRICT""",
    "CREATE INDEX IF NOT EXISTS passage_document ON passage(document)",
    """CREATE VIRTUAL TABLE IF NOT EXISTS passage_terms USING fts5(
        terms, content='', contentless_delete=1, detail=none,
        tokenize="ascii tokenchars '._:'")""",
    "INSERT INTO passage_terms(passage_terms, rank) VALUES('automerge', 0)",
    "INSERT INTO passage_terms(passage_terms, rank) VALUES('crisismerge', 1999)",
)


class Progress(msgspec.Struct, frozen=True):
    """How far the index is. `fraction` counts bytes of documents, 0 to 1."""

    done: bool
    fraction: float
    documents: int
    documents_total: int
    passages: int


class Batch(msgspec.Struct):
    """What one step does to the full-text index and to the marks of documents."""

    added: dict[int, str] = {}  # id of the passage -> its terms
    removed: list[int] = []
    marks: dict[int, tuple[int, int]] = {}  # id of the document -> next line, done


class Index:
    """The documents of some corpora in one database. Single task, never blocks long.

    `transaction` wraps one step (an agent's own `transaction`).
    """

    def __init__(
        self,
        sql: Sql,
        corpora: Sequence[corpus.Corpus] = (),
        *,
        transaction: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._sql = sql
        self._corpora = tuple(corpora)
        self._transaction = transaction
        self._work: Iterator[None] | None = None
        self._progress = Progress(False, 0.0, 0, 0, 0)
        self._batch = Batch()
        self._written = 0  # steps since the last merge that wrote to the index
        self._search = Search(sql)

    @property
    def progress(self) -> Progress:
        """How far the last step came."""
        return self._progress

    def build_step(self, budget_s: float, now: Callable[[], float]) -> Progress:
        """Index for about `budget_s`, in one transaction, and say how far it is.

        `now` is a clock in seconds that only moves forward. The first step looks which
        documents are new, changed or gone; when all are done it costs one look. If a
        step raises, nothing of it is kept and the next one starts from the tables.
        """
        if self._progress.done:
            return self._progress
        deadline = now() + budget_s
        work, self._work = self._work, None
        with self._transaction():
            if work is None:
                for statement in SCHEMA:
                    self._sql(statement)
                self._batch = Batch()
                work = self._build()
            for _ in work:
                if now() >= deadline:
                    break
            self._flush()
        self._work = work
        return self._progress

    def stats(self, terms: Sequence[str]) -> TermStats:
        """Return in how many passages each of `terms` stands."""
        return self._search.stats(terms)

    def search(self, terms: Sequence[str], limit: int) -> list[Passage]:
        """Return the best passages for `terms`, see `Search.search`."""
        return self._search.search(terms, limit)

    def _build(self) -> Iterator[None]:
        found: dict[str, corpus.Document] = {}
        for source in self._corpora:
            for document in corpus.walk(source):
                if document and len(found) < corpus.DOCUMENTS_MAX:
                    found.setdefault(document.name, document)
                yield
        known: dict[str, tuple[int, int]] = {}  # name -> (id, next line), of unfinished
        done: set[str] = set()
        for identity, name, size, mtime_ns, next_line, is_done in self._documents():
            document = found.get(name)
            if document is None or (document.size, document.mtime_ns) != (
                size,
                mtime_ns,
            ):
                yield from self._forget(identity)
            elif is_done:
                done.add(name)
            else:
                known[name] = (identity, next_line)
            yield
        total = sum(document.size for document in found.values()) or 1
        ready = sum(found[name].size for name in done)
        count = self._number("SELECT count(*) FROM passage")
        self._progress = Progress(False, ready / total, len(done), len(found), count)
        for document in found.values():
            if document.name in done:
                continue
            if document.name not in known:
                known[document.name] = (self._insert(document), 1)
            for _ in self._index(document, *known[document.name]):
                count += 1
                yield
                if self._written >= MERGE_EVERY:
                    yield from self._merge(MERGE_PAGES)
            done.add(document.name)
            ready += document.size
            self._progress = Progress(
                False, ready / total, len(done), len(found), count
            )
            yield
        yield from self._merge(-MERGE_PAGES)
        self._search.renew(count)
        self._progress = Progress(True, 1.0, len(done), len(found), count)

    def _documents(self) -> Iterator[tuple[int, str, int, int, int, int]]:
        last = 0
        while rows := self._sql(
            "SELECT id, name, size, mtime_ns, next_line, done FROM document"
            " WHERE id > ? ORDER BY id LIMIT 500",
            last,
        ):
            for row in rows:
                yield msgspec.convert(tuple(row), tuple[int, str, int, int, int, int])
            last = msgspec.convert(rows[-1][0], int)

    def _forget(self, identity: int) -> Iterator[None]:
        while rows := self._sql(
            "SELECT id FROM passage WHERE document = ? LIMIT 64", identity
        ):
            for row in rows:
                self._sql("DELETE FROM passage WHERE id = ?", row[0])
                self._batch.removed.append(msgspec.convert(row[0], int))
            yield
        self._sql("DELETE FROM document WHERE id = ?", identity)

    def _insert(self, document: corpus.Document) -> int:
        self._sql(
            "INSERT INTO document(name, size, mtime_ns, next_line, done)"
            " VALUES(?, ?, ?, 1, 0)",
            document.name,
            document.size,
            document.mtime_ns,
        )
        return self._number("SELECT id FROM document WHERE name = ?", document.name)

    def _index(
        self, document: corpus.Document, identity: int, next_line: int
    ) -> Iterator[None]:
        text = corpus.read(document) or ""
        rowid = self._number("SELECT coalesce(max(id), 0) FROM passage")
        for passage in passages.split(text, prose=passages.is_prose(document.name)):
            if passage.line < next_line:
                continue  # done before the process ended
            rowid += 1
            self._sql(
                "INSERT INTO passage(id, document, line, text) VALUES(?, ?, ?, ?)",
                rowid,
                identity,
                passage.line,
                passage.text,
            )
            terms = passages.terms_of(passage, document.module)
            self._batch.added[rowid] = " ".join(sorted(terms))
            self._batch.marks[identity] = (passage.line + 1, 0)
            yield
        self._batch.marks[identity] = (0, 1)

    def _flush(self) -> None:
        batch, self._batch = self._batch, Batch()
        if batch.removed:
            self._sql(
                "DELETE FROM passage_terms WHERE rowid IN"
                " (SELECT value FROM json_each(?))",
                msgspec.json.encode(batch.removed).decode(),
            )
        if batch.added:
            self._sql(
                "INSERT INTO passage_terms(rowid, terms)"
                " SELECT CAST(key AS INTEGER), value FROM json_each(?)",
                msgspec.json.encode(batch.added).decode(),
            )
        self._written += bool(batch.removed or batch.added)
        for identity, (line, done) in batch.marks.items():
            self._sql(
                "UPDATE document SET next_line = ?, done = ? WHERE id = ?",
                line,
                done,
                identity,
            )

    def _merge(self, pages: int) -> Iterator[None]:
        """Merge segments, a bounded piece at a time; negative merges all into one."""
        self._written = 0
        while True:
            yield  # before too: what this step added must be in the tables first
            before = self._number("SELECT total_changes()")
            self._sql(
                "INSERT INTO passage_terms(passage_terms, rank) VALUES('merge', ?)",
                pages,
            )
            if self._number("SELECT total_changes()") - before < 2:
                return
            pages = abs(pages)

    def _number(self, query: str, *params: object) -> int:
        return msgspec.convert(self._sql(query, *params)[0][0], int)
