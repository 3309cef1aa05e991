from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import apsw
import pytest

from culet.web.demo.corpus import Corpus
from culet.web.demo.index import Index, Progress
from culet.web.demo.search import TERMS_MAX, essential, merit, normal

STEP_S = 0.02


class Ticks:
    """A clock that moves by a fixed time at each look."""

    def __init__(self, tick_s: float = 0.001) -> None:
        self.now = 0.0
        self.tick_s = tick_s

    def __call__(self) -> float:
        self.now += self.tick_s
        return self.now


class Shelf:
    """A folder of documents and a database for their index."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "docs"
        self.folder.mkdir()
        self.db = apsw.Connection(str(folder / "index.db"))
        self.calls = 0

    def sql(self, query: str, /, *params: object) -> Sequence[Sequence[object]]:
        self.calls += 1
        return self.db.execute(query, params).fetchall()  # type: ignore[arg-type]

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, newline="")

    def index(self) -> Index:
        return Index(self.sql, [Corpus(self.folder)], transaction=lambda: self.db)

    def built(self) -> Index:
        index = self.index()
        build(index)
        return index

    def places(self) -> list[tuple[object, ...]]:
        rows = self.sql(
            "SELECT document.name, passage.line, passage.text FROM passage"
            " JOIN document ON document.id = passage.document"
            " ORDER BY document.name, passage.line"
        )
        return [tuple(row) for row in rows]

    def check(self) -> None:
        """Each passage is in the full-text index once, and nothing else is."""
        passages = {row[0] for row in self.sql("SELECT id FROM passage")}
        assert passages == {
            row[0] for row in self.sql("SELECT rowid FROM passage_terms")
        }
        self.sql("INSERT INTO passage_terms(passage_terms) VALUES('integrity-check')")


def build(index: Index, tick_s: float = 0.001) -> list[Progress]:
    clock = Ticks(tick_s)
    steps = [index.build_step(STEP_S, clock)]
    while not steps[-1].done:
        steps.append(index.build_step(STEP_S, clock))
    return steps


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    shelf = Shelf(tmp_path)
    yield shelf
    shelf.db.close()


def fill(shelf: Shelf, documents: int = 6, sections: int = 8) -> None:
    for n in range(documents):
        text = "\n\n".join(
            f"# Part {n} {s}\n\nThe word{n} and the topic{s} are told here.\n"
            for s in range(sections)
        )
        shelf.write(f"doc{n}.md", text)


def test_progress_only_grows_and_ends_done(shelf: Shelf) -> None:
    fill(shelf)
    steps = build(shelf.index())

    fractions = [step.fraction for step in steps]
    assert len(steps) > 2
    assert sorted(fractions) == fractions
    assert (
        steps[-1].done,
        steps[-1].fraction,
        steps[-1].documents,
        steps[-1].documents_total,
    ) == (True, 1.0, 6, 6)
    shelf.check()


def test_a_step_stops_at_its_deadline(shelf: Shelf) -> None:
    fill(shelf, documents=1, sections=60)
    clock = Ticks(STEP_S)
    index = shelf.index()
    seen = []
    while not index.build_step(STEP_S, clock).done:
        seen.append(len(shelf.places()))

    assert all(later - earlier <= 1 for earlier, later in pairwise(seen))
    assert len(shelf.places()) == 60


@pytest.mark.parametrize("crash_after", [1, 2, 3, 5, 8, 13, 21, 34])
def test_a_build_goes_on_where_a_crash_cut_it(shelf: Shelf, crash_after: int) -> None:
    fill(shelf)
    clock = Ticks(0.01)
    index = shelf.index()
    for _ in range(crash_after):
        index.build_step(STEP_S, clock)
    before = shelf.places()

    build(shelf.index(), 0.01)  # the tables are all that is left

    shelf.check()
    assert set(before) <= set(shelf.places())
    assert len(shelf.places()) == 48
    assert len(shelf.built().search(["word3"], 50)) == 8


def test_a_step_that_raises_keeps_nothing_and_the_next_goes_on(shelf: Shelf) -> None:
    fill(shelf)
    index = shelf.index()
    real = index._sql
    budget = 40

    def failing(query: str, /, *params: object) -> Sequence[Sequence[object]]:
        nonlocal budget
        budget -= 1
        if budget == 0:
            raise apsw.FullError("database or disk is full")
        return real(query, *params)

    index._sql = failing
    with pytest.raises(apsw.FullError):
        build(index)
    build(index)

    shelf.check()
    assert len(shelf.places()) == 48


def test_a_built_index_is_not_built_again(shelf: Shelf) -> None:
    fill(shelf)
    shelf.built()
    ids = shelf.sql("SELECT id, document FROM passage")

    again = shelf.built()

    assert ids == shelf.sql("SELECT id, document FROM passage")
    calls = shelf.calls
    again.build_step(STEP_S, Ticks())
    assert shelf.calls == calls


def test_changed_new_and_lost_documents_are_noticed(shelf: Shelf) -> None:
    fill(shelf)
    shelf.built()
    shelf.write("doc1.md", "Now about zebras only.")
    shelf.write("new.md", "A walrus came.")
    (shelf.folder / "doc2.md").unlink()

    index = shelf.built()

    shelf.check()
    assert [p.file for p in index.search(["zebra"], 9)] == ["doc1.md"]
    assert [p.file for p in index.search(["walrus"], 9)] == ["new.md"]
    assert index.search(["word1"], 9) == []
    assert index.search(["word2"], 9) == []
    assert len(index.search(["word3"], 9)) == 8


def test_a_quote_is_byte_for_byte(shelf: Shelf) -> None:
    text = "\ufefffirst\r\n\tthe  gnu ü \x0c\r\nlast \n"
    shelf.write("a.txt", text)

    (found,) = shelf.built().search(["gnu"], 5)

    assert (1, "\n".join(text.split("\n")[:3])) == (found.line, found.quote)


def test_a_passage_counts_with_half_of_the_weight(shelf: Shelf) -> None:
    fill(shelf)
    shelf.write("rare.md", "The aardvark sleeps.")
    index = shelf.built()

    assert [p.file for p in index.search(["aardvark", "topic1"], 9)] == ["rare.md"]
    both = index.search(["word1", "topic2"], 3)
    assert (both[0].file, both[0].score) == ("doc1.md", 1.0)
    assert index.search(["topic1", "unheard"], 9) == []


def test_a_definition_comes_before_a_mention(shelf: Shelf) -> None:
    shelf.write("use.py", "# the walrus is used here with the walrus and the walrus\n")
    shelf.write("sea/walrus.py", "class Walrus:\n    '''A large animal.'''\n")
    first, second = shelf.built().search(["walrus"], 9)

    assert (first.file, first.defines) == ("sea/walrus.py", True)
    assert (second.file, second.defines) == ("use.py", False)


def test_what_was_asked_for_first_comes_first(shelf: Shelf) -> None:
    fill(shelf)
    found = shelf.built().search(["topic1", "word1"], 50)
    assert found
    assert "topic1" in found[0].terms


def test_stats_count_passages(shelf: Shelf) -> None:
    fill(shelf)
    stats = shelf.built().stats(["word1", "topic1", "unheard", '"'])
    assert stats.passages == 48
    assert stats.frequency == {"word1": 8, "topic1": 6, "unheard": 0}


@pytest.mark.parametrize(
    "terms",
    [[], [""], ['"'], ['a" OR "b'], ["the"], ["\0"], ["*"], ["NEAR(a b)"], ["in:a"]],
)
def test_no_term_is_syntax(shelf: Shelf, terms: list[str]) -> None:
    fill(shelf, documents=1)
    assert isinstance(shelf.built().search(terms, 5), list)


def test_only_so_many_terms_count() -> None:
    many = [f"term{n}" for n in range(40)]
    assert many[:TERMS_MAX] == normal([*many, *many])


def test_essential_terms_are_those_that_half_needs() -> None:
    assert essential({"a": 5.0, "b": 2.0, "c": 1.0}, ["a", "b", "c"]) == ["a"]
    assert essential({"a": 2.0, "b": 2.0, "c": 1.0}, ["a", "b", "c"]) == ["a", "b"]
    assert essential({}, []) == []


def test_sentences_have_more_merit_than_lists_of_names() -> None:
    weights = {"queue": 1.0}
    told = merit("The queue keeps what is put into it.", weights)
    assert told > merit("queue = Queue()", weights) > merit("import queue", weights)
