"""The demo's own documents: the plans, the quotes and the bounds on real input."""

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import apsw
import pytest

from culet.adapters.answer import finding
from culet.adapters.passage import Finding
from culet.adapters.plan import asked_terms, plan
from culet.web.demo.corpus import default_corpora, read, walk
from culet.web.demo.index import Index

QUESTIONS: list[str] = json.loads(
    (Path(__file__).parent / "questions.json").read_text()
)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Index]:
    db = apsw.Connection(str(tmp_path_factory.mktemp("index") / "index.db"))
    db.execute("PRAGMA synchronous=OFF")
    db.execute("PRAGMA journal_mode=WAL")

    def sql(query: str, /, *params: object) -> Sequence[Sequence[object]]:
        return db.execute(query, params).fetchall()  # type: ignore[arg-type]

    made = Index(sql, default_corpora(), transaction=lambda: db)
    while not made.build_step(1.0, time.perf_counter).done:
        pass
    yield made
    db.close()


@pytest.fixture(scope="module")
def lines() -> dict[str, list[str]]:
    documents = (d for corpus in default_corpora() for d in walk(corpus) if d)
    return {d.name: (read(d) or "").split("\n") for d in documents}


def findings(index: Index, question: str) -> list[Finding]:
    return [
        finding(asked, index.search(asked.terms, 12))
        for asked in plan(question, index.stats(asked_terms(question)))
    ]


@pytest.mark.slow
def test_it_is_large(index: Index) -> None:
    assert index.progress.passages > 20_000


@pytest.mark.slow
def test_ten_questions_have_ten_plans(index: Index) -> None:
    plans = [
        tuple(plan(question, index.stats(asked_terms(question))))
        for question in QUESTIONS
    ]
    assert len(set(plans)) == len(QUESTIONS) == 10
    assert all(3 <= len(one) <= 6 for one in plans)


@pytest.mark.slow
@pytest.mark.parametrize("question", QUESTIONS)
def test_every_quote_stands_in_its_document(
    index: Index, lines: dict[str, list[str]], question: str
) -> None:
    cited = [c for found in findings(index, question) for c in found.citations]

    assert cited
    for citation in cited:
        quote = citation.quote.split("\n")
        assert len(quote) <= 12
        start = citation.line - 1
        assert quote == lines[citation.file][start : start + len(quote)]


@pytest.mark.slow
def test_the_answer_of_the_issue_names_what_it_should(index: Index) -> None:
    found = findings(index, QUESTIONS[0])
    told = "\n".join(one.summary for one in found)

    assert {"stdlib/asyncio/queues.py", "stdlib/queue.py"} <= {
        citation.file for one in found for citation in one.citations
    }
    assert "Unlike the standard library Queue" in told
    assert "prefer to use a memory channel instead" in told


@pytest.mark.slow
def test_a_question_about_something_else_finds_nothing(index: Index) -> None:
    found = findings(index, "How do I cook spaghetti carbonara?")
    assert not [one for one in found if one.citations]
