import pytest

from culet.adapters.terms import TERM_MAX, is_term, parts, singular, tokenize


@pytest.mark.parametrize(
    ("identifier", "expected"),
    [
        pytest.param("queue", ("queue",), id="word"),
        pytest.param(
            "asyncio.Queue", ("asyncio.queue", "asyncio", "queue"), id="dotted"
        ),
        pytest.param("get_nowait", ("get_nowait", "nowait"), id="snake"),
        pytest.param("LifoQueue", ("lifoqueue", "lifo", "queue"), id="camel"),
        pytest.param("HTTPServer", ("httpserver", "http", "server"), id="acronym"),
        pytest.param("self._tasks", ("task",), id="self and underscore are dropped"),
        pytest.param("__init__", ("init",), id="dunder"),
        pytest.param("does", (), id="stopword"),
        pytest.param("Größe", ("größe",), id="letters of any script"),
    ],
)
def test_an_identifier_stands_whole_and_in_parts(
    identifier: str, expected: tuple[str, ...]
) -> None:
    assert expected == parts(identifier)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("queues", "queue"),
        ("queries", "query"),
        ("classes", "class"),
        ("class", "class"),
        ("status", "status"),
        ("this", "this"),
        ("sys", "sys"),
        ("matches", "match"),
    ],
)
def test_plurals_meet_their_singular(word: str, expected: str) -> None:
    assert expected == singular(word)


def test_documents_and_questions_get_the_same_terms() -> None:
    assert tokenize("asyncio.Queue") <= tokenize("uses asyncio.Queue(maxsize=3)")


def test_a_word_that_is_data_is_no_term() -> None:
    assert not is_term("a" * (TERM_MAX + 1))
    assert tokenize("a" * 5000) == set()


def test_a_term_cannot_end_a_quoted_string() -> None:
    assert not is_term('queue" OR "x')
