from typing import Any

import pytest

from culet.adapters.answer import (
    NOTHING,
    QUOTES_MAX,
    SENTENCE_CHARS,
    answer,
    choose,
    finding,
    finding_of,
    sentences_of,
    telling,
)
from culet.adapters.passage import Citation, Finding, Passage, SubQuestion

QUEUE = '''class Queue(mixins._LoopBoundMixin):
    """A queue, useful for coordinating producer and consumer coroutines.

    Unlike the standard library Queue, you can reliably know this Queue's size
    with qsize(), since nobody interrupts you.
    """
    def __init__(self):
        self.items = deque()'''
UNLIKE = (
    "Unlike the standard library Queue, you can reliably know this Queue's size with"
    " qsize(), since nobody interrupts you."
)
ASKED = SubQuestion(question="What is Queue?", terms=("queue",))
PAIR = SubQuestion(question="How do they compare?", terms=("queue",), kind="pair")


def passage(quote: str = QUEUE, line: int = 21, **more: Any) -> Passage:
    found: dict[str, Any] = {"file": "a.py", "score": 1.0, "terms": ("queue",)}
    return Passage(quote=quote, line=line, **(found | more))


def test_prose_flows_over_lines_and_code_stands_alone() -> None:
    assert sentences_of(QUEUE) == [
        "class Queue(mixins._LoopBoundMixin):",
        "A queue, useful for coordinating producer and consumer coroutines.",
        UNLIKE,
        "def __init__(self):",
        "self.items = deque()",
    ]


def test_what_a_thing_is_stands_in_its_first_sentence() -> None:
    assert telling(passage(defines=True), ASKED).startswith("A queue, useful")


def test_a_comparison_is_the_sentence_that_contrasts() -> None:
    assert telling(passage(defines=True), PAIR) == UNLIKE


def test_a_long_sentence_is_cut_after_a_word() -> None:
    text = telling(passage("word " * 200), ASKED)
    assert len(text) <= SENTENCE_CHARS + 2
    assert text.endswith("word …")


@pytest.mark.parametrize("quote", ["x", "{", '"""', "----", "a" * 900])
def test_any_quote_says_something(quote: str) -> None:
    assert telling(passage(quote), ASKED)


def test_a_finding_quotes_byte_for_byte_and_names_the_place() -> None:
    quote = "    tabs\tand  spaces are kept here\r\n    and so is this"
    found = finding(ASKED, [passage(quote)])

    assert (Citation(file="a.py", line=21, quote=quote),) == found.citations
    assert found.summary.endswith("(a.py:21)")


def test_nothing_found_is_said_and_cites_nothing() -> None:
    assert Finding(question="What is Queue?", summary=NOTHING) == finding(ASKED, [])


def test_a_finding_is_bounded_and_does_not_say_a_thing_twice() -> None:
    many = [passage(f"the queue number {n} is here", n) for n in range(1, 12)]
    assert len(choose(ASKED, many)) <= QUOTES_MAX
    assert len(finding(ASKED, [passage(line=1), passage(line=2)]).citations) == 1


def test_usage_is_not_a_definition() -> None:
    asked = SubQuestion(question="How is it used?", terms=("queue",), kind="usage")
    example = passage("For example, put a job into the queue::", 90)
    assert example == choose(asked, [passage(defines=True), example])[0]


def found(question: str, *places: int) -> Finding:
    return Finding(
        question=question,
        summary="\n".join(f"said {n} (a.py:{n})" for n in places) or NOTHING,
        citations=tuple(
            Citation(file="a.py", line=n, quote=f"quote {n}") for n in places
        ),
    )


def test_an_answer_cites_each_passage_once() -> None:
    made = answer([found("A?", 1, 2), found("B?", 2, 3), found("C?", 1), found("D?")])

    assert [citation.line for citation in made.citations] == [1, 2, 3]
    for citation in made.citations:
        assert f"a.py:{citation.line}\n```\n{citation.quote}\n```" in made.text
    assert made.text.count("said 2 (a.py:2)") == 1
    assert "The same passages came up for: C?" in made.text
    assert "Nothing was found for: D?" in made.text


def test_an_answer_without_a_citation_says_so() -> None:
    made = answer([found("A?"), found("B?")])
    assert made.citations == ()
    assert "nothing that I could cite" in made.text


def test_a_quote_with_a_fence_is_fenced_by_a_longer_one() -> None:
    cited = Citation(file="a.md", line=1, quote="```py\nx\n```")
    made = answer([Finding(question="A?", summary="x", citations=(cited,))])
    assert "````\n```py\nx\n```\n````" in made.text


@pytest.mark.parametrize(
    ("result", "summary"),
    [
        ({"ok": False, "status": "aborted", "error": "stopped"}, "stopped"),
        ({"ok": False, "status": "interrupted"}, "interrupted"),
        ("error: no result", "error: no result"),
        ("", ""),
        ("[1]", "no result"),
        (None, "no result"),
    ],
)
def test_a_run_that_did_not_complete_is_a_finding_that_says_why(
    result: Any, summary: str
) -> None:
    assert Finding(question="A?", summary=summary) == finding_of("A?", result)
