import pytest

from culet.adapters.passage import TermStats
from culet.adapters.plan import COMMON, PLAN_MAX, PLAN_MIN, asked_terms, compares, plan

KNOWN = {
    "asyncio.queue": 5,
    "asyncio": 600,
    "queue": 300,
    "queue.queue": 9,
    "trio": 700,
    "cancel": 200,
    "task": 400,
    "timeout": 150,
    "instead": 300,
    "file": 3000,
}
STATS = TermStats(passages=10_000, frequency=KNOWN)
ISSUE = (
    "How does asyncio.Queue differ from queue.Queue, and what does trio use instead?"
)


def test_the_terms_to_look_up_are_those_of_all_names() -> None:
    assert asked_terms("Does asyncio.Queue cancel the queue?") == [
        "asyncio.queue",
        "asyncio",
        "queue",
        "cancel",
    ]


def test_entities_and_then_their_pairs() -> None:
    found = plan(ISSUE, STATS)

    assert [one.question for one in found] == [
        "What is asyncio.Queue?",
        "What is queue.Queue?",
        "What do the documents say about trio and queue?",
        "How does asyncio.Queue compare with queue.Queue?",
        "How does asyncio.Queue compare with trio?",
        "How does queue.Queue compare with trio?",
    ]
    assert found[0].terms == ("asyncio.queue", "asyncio", "queue")
    assert found[2].terms == ("trio", "queue", "instead")
    assert found[3].terms == ("asyncio.queue", "queue.queue", "asyncio", "queue")
    assert [one.kind for one in found] == ["subject"] * 3 + ["pair"] * 3


def test_without_names_the_rarest_words_are_the_entities_in_order() -> None:
    found = plan("How do I cancel a task in trio after a timeout?", STATS)

    assert [one.terms for one in found] == [
        ("cancel", "task"),
        ("task", "timeout"),
        ("timeout", "cancel"),
        ("cancel", "task", "example"),
    ]
    assert found[-1].kind == "usage"


def test_a_common_word_is_no_entity() -> None:
    assert KNOWN["file"] > COMMON * STATS.passages
    assert all("file" not in one.terms for one in plan("cancel a file", STATS))


def test_one_name_is_filled_up_with_usage_and_trouble() -> None:
    found = plan("What is asyncio.Queue?", STATS)
    assert [one.kind for one in found] == ["subject", "usage", "trouble"]


def test_a_compound_that_stands_nowhere_is_looked_for_by_its_parts() -> None:
    (first, *_) = plan("What is trio.Queue?", STATS)
    assert first.terms == ("trio", "queue")


@pytest.mark.parametrize("name", ["foo.Bar", "`frobnicate`", "snake_case", "CamelCase"])
def test_a_name_is_asked_for_even_if_it_stands_nowhere(name: str) -> None:
    (first, *_) = plan(f"What is {name}?", STATS)
    assert f"What is {name.strip('`')}?" == first.question
    assert first.terms


def test_words_that_stand_nowhere_are_asked_for_when_there_are_no_others() -> None:
    found = plan("How do I cook spaghetti?", STATS)
    assert found[0].terms == ("cook", "spaghetti")
    assert len(found) == PLAN_MIN


@pytest.mark.parametrize("question", ["", "???", "how do I do it?", "\0\ud800"])
def test_a_question_without_a_word_has_no_plan(question: str) -> None:
    assert plan(question, STATS) == []


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("a versus b", True),
        ("A vs. B", True),
        ("differs from", True),
        ("the difference between", True),
        ("trio instead", True),
        ("this or that", True),
        ("what is it for", False),
        ("order", False),
    ],
)
def test_which_questions_compare(question: str, expected: bool) -> None:
    assert expected == compares(question)


@pytest.mark.parametrize(
    "question",
    [
        ISSUE,
        "a.b c.d e.f g.h i.j k.l m.n or o.p",
        "x_y",
        "cancel or task",
        '"' * 99 + "trio",
        "trio " * 5000,
    ],
)
def test_a_plan_is_bounded_and_the_same_each_time(question: str) -> None:
    found = plan(question, STATS)
    assert PLAN_MIN <= len(found) <= PLAN_MAX
    assert all(1 <= len(one.terms) <= 8 for one in found)
    assert len({one.question for one in found}) == len(found)
    assert found == plan(question, STATS)
