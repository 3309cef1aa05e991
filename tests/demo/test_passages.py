import pytest
from hypothesis import given
from hypothesis import strategies as st

from culet.web.demo.passages import (
    CHARS_MAX,
    LINE_CHARS,
    LINES_MAX,
    is_prose,
    split,
    terms_of,
)

CODE = """\
import heapq
import collections

LIMIT = 10
NAMES = ()


@final
class Queue(Base):
    '''A queue.'''

    size = 0
    name = ""

    def put(self, item):
        self.items.append(item)
"""
KINDS = ["", "  ", "x = 1", "def f():", "class A:", "# note", "@dec", "\x0c", "a\r"]
LONG = "words " * (LINE_CHARS // 10)
DATA = "y" * (LINE_CHARS + 1)
LINES = st.lists(
    st.sampled_from([*KINDS, DATA, LONG, "# Heading", "words of prose"]), max_size=60
)


@given(LINES, st.booleans())
def test_passages_are_whole_lines_in_order(lines: list[str], prose: bool) -> None:
    end = 0
    seen: set[int] = set()
    for passage in split("\n".join(lines), prose=prose):
        count = passage.text.count("\n") + 1
        assert 1 <= count <= LINES_MAX
        assert "\n".join(lines[passage.line - 1 : passage.line - 1 + count]) == (
            passage.text
        )
        assert len(passage.text) - count < CHARS_MAX
        assert passage.line > end
        assert passage.text.split("\n")[0].strip()
        assert passage.text.split("\n")[-1].strip()
        end = passage.line + count - 1
        seen.update(range(passage.line, end + 1))
    left_out = [line for n, line in enumerate(lines, 1) if n not in seen]
    assert all(not line.strip() or len(line) > LINE_CHARS for line in left_out)


def test_a_definition_begins_a_passage_and_keeps_its_decorator() -> None:
    found = list(split(CODE))
    assert [(passage.line, passage.names) for passage in found] == [
        (1, ()),
        (8, ("Queue",)),
        (15, ("Queue.put",)),
    ]
    assert found[1].text.startswith("@final\nclass Queue")


def test_a_heading_begins_a_passage_of_prose_only() -> None:
    text = "# One\nwords\n# Two\nmore"
    assert [passage.line for passage in split(text, prose=True)] == [1, 3]
    assert [passage.line for passage in split(text)] == [1]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("a.md", True), ("A.RST", True), ("a.py", False), ("md", False)],
)
def test_which_documents_are_prose(name: str, expected: bool) -> None:
    assert expected == is_prose(name)


def test_a_definition_is_known_by_the_names_that_others_call_it() -> None:
    (passage,) = split("class Queue:\n    '''A queue.'''")
    terms = terms_of(passage, ("asyncio", "queues"))

    assert {
        "queue",
        "in:asyncio",
        "in:queue",
        "def:queue",
        "asyncio.queue",
        "asyncio.queues.queue",
        "queues.queue",
        "def:asyncio.queue",
    } <= terms


def test_a_heading_defines_its_words() -> None:
    (passage,) = split("## Memory channels\ntext", prose=True)
    assert {"def:memory", "def:channel"} <= terms_of(passage, ("guide",))


@given(st.text(max_size=300), st.booleans())
def test_no_term_can_break_the_index(text: str, prose: bool) -> None:
    for passage in split(text, prose=prose):
        for term in terms_of(passage, ("a-b", "c d", "ü")):
            assert term
            assert not set(term) & set(" \"'\n\t")
