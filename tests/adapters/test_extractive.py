import msgspec
import pytest
import trio

from culet.adapters.extractive import (
    ExtractiveModel,
    answer_of,
    finding_from,
    pieces,
    sub_question,
)
from culet.adapters.model import (
    Finish,
    Model,
    ModelEvent,
    ModelMessage,
    ModelRequest,
    TextDelta,
    ToolCall,
    ToolSpec,
)
from culet.adapters.passage import Citation, Finding, Passage, SubQuestion, TermStats

QUESTION = "How does asyncio.Queue differ from queue.Queue?"
FREQUENCY = {"asyncio.queue": 3, "asyncio": 90, "queue": 50, "queue.queue": 4}


async def stats(terms: object) -> TermStats:
    return TermStats(passages=1000, frequency=FREQUENCY)


def request(
    *messages: ModelMessage, tool: str = "research", partial: str = ""
) -> ModelRequest:
    return ModelRequest(
        messages=messages, tools=(ToolSpec(name=tool),), partial=partial
    )


def user(text: str = QUESTION) -> ModelMessage:
    return ModelMessage(role="user", content=text)


async def events(asked: ModelRequest) -> list[ModelEvent]:
    return [event async for event in ExtractiveModel(stats).stream(asked)]


def text_of(found: list[ModelEvent]) -> str:
    return "".join(e.text for e in found if isinstance(e, TextDelta))


def calls_of(found: list[ModelEvent]) -> list[ToolCall]:
    return [event for event in found if isinstance(event, ToolCall)]


def answered(found: list[ModelEvent], result: object) -> list[ModelMessage]:
    """The messages after the tools of a step have all come back with `result`."""
    calls = calls_of(found)
    content = msgspec.json.encode(result).decode()
    said = ModelMessage(
        role="assistant", content=text_of(found), tool_calls=tuple(calls)
    )
    return [
        said,
        *(
            ModelMessage(role="tool", content=content, tool_call_id=call.id)
            for call in calls
        ),
    ]


FOUND = Finding(
    question="x",
    summary="A queue. (q.py:3)",
    citations=(Citation(file="q.py", line=3, quote="class Queue:"),),
)
PASSAGES = [Passage(file="q.py", line=3, quote="# a queue of all jobs", score=1.0)]


def test_it_is_a_model() -> None:
    assert isinstance(ExtractiveModel(), Model)


async def test_the_planner_says_a_line_and_asks_for_everything_at_once() -> None:
    found = await events(request(user()))

    assert text_of(found) == "I look into 4 questions, all at once."
    calls = calls_of(found)
    assert [f"research-{n}" for n in range(1, 5)] == [call.id for call in calls]
    assert calls[0].input["question"] == "What is asyncio.Queue?"
    assert msgspec.convert(calls[0].input, SubQuestion).terms
    assert Finish("tool-calls") == found[-1]


async def test_the_planner_answers_when_the_findings_are_there() -> None:
    before = [user(), *answered(await events(request(user())), FOUND)]
    found = await events(request(*before))

    assert not calls_of(found)
    assert answer_of(before).text == text_of(found)
    assert "A queue. (q.py:3)" in text_of(found)
    assert FOUND.citations == answer_of(before).citations
    assert Finish("stop") == found[-1]


async def test_a_failed_run_does_not_stop_the_answer() -> None:
    failed = {"ok": False, "status": "aborted", "error": "stopped"}
    before = [user(), *answered(await events(request(user())), failed)]
    assert "nothing that I could cite" in text_of(await events(request(*before)))


async def test_the_next_question_gets_fresh_call_ids() -> None:
    before = [user(), *answered(await events(request(user())), FOUND)]
    said = ModelMessage(role="assistant", content="…")
    calls = calls_of(await events(request(*before, said, user("queue.Queue?"))))
    assert calls[0].id == "research-5"


async def test_the_researcher_searches_and_then_quotes() -> None:
    asked = SubQuestion(question="What is a queue?", terms=("queue",))
    first = user(msgspec.json.encode(asked).decode())
    (call,) = calls_of(await events(request(first, tool="search")))
    assert (call.name, call.input["terms"]) == ("search", ["queue"])

    before = [first, *answered([call], PASSAGES)]
    found = await events(request(*before, tool="search"))
    assert text_of(found) == "a queue of all jobs (q.py:3)"
    assert finding_from(before).citations[0].quote == "# a queue of all jobs"


@pytest.mark.parametrize("result", [[], {"ok": False, "error": "busy"}])
async def test_a_search_without_a_passage_found_nothing(result: object) -> None:
    first = user("What is a queue?")
    (call,) = calls_of(await events(request(first, tool="search")))
    before = [first, *answered([call], result)]
    assert text_of(await events(request(*before, tool="search"))) == "nothing found"


def test_a_researcher_also_takes_the_words_of_a_person() -> None:
    assert sub_question("What is asyncio.Queue?").terms == (
        "asyncio.queue",
        "asyncio",
        "queue",
    )


@pytest.mark.parametrize("question", ["", "???"])
@pytest.mark.parametrize("tool", ["research", "search"])
async def test_without_a_word_it_asks_for_one(question: str, tool: str) -> None:
    found = await events(request(user(question), tool=tool))
    assert "Please ask with a word" in text_of(found)
    assert not calls_of(found)


async def test_without_tools_it_says_that_it_has_nothing() -> None:
    assert "I have no documents" in text_of(await events(request(user(), tool="other")))


async def test_a_cut_step_goes_on_after_what_was_said_at_every_place() -> None:
    whole = await events(request(user()))
    text = text_of(whole)
    for cut in range(len(text) + 1):
        rest = await events(request(user(), partial=text[:cut]))
        assert text[cut:] == text_of(rest)
        assert calls_of(whole) == calls_of(rest)


async def test_another_text_than_the_stored_one_begins_a_paragraph() -> None:
    found = text_of(await events(request(user(), partial="I look at")))
    assert found == "\n\nI look into 4 questions, all at once."


async def test_text_comes_at_its_pace(autojump_clock: object) -> None:
    before = [user(), *answered(await events(request(user())), FOUND)]
    model = ExtractiveModel(stats, pace_s=0.03)
    start = trio.current_time()
    deltas = 0
    async for event in model.stream(request(*before)):
        deltas += isinstance(event, TextDelta)

    assert deltas > 1
    assert trio.current_time() - start == pytest.approx(0.03 * deltas)


@pytest.mark.parametrize("text", ["", "a", "word " * 100, "x" * 500, "ü" * 49 + " z"])
def test_the_pieces_are_the_text(text: str) -> None:
    assert text == "".join(pieces(text))
    assert all(0 < len(piece) <= 97 for piece in pieces(text))
