"""A model that needs no key and no network: it answers in the words of its sources.

It follows the same protocol and the same loop of tools as a language model, and which
part it plays follows from the tools that it is offered. With `research` it plans
sub-questions, asks for all of them at once, and puts the findings together. With
`search` it looks up the terms of one sub-question and quotes what counts. With neither
it says that it has nothing to look things up in.

It is deterministic: a step that is asked again after a crash says the same, and goes on
behind what was already said. Thinking is in `plan` and `answer`; this is the shell that
streams it.
"""

from __future__ import annotations

from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Sequence,
)
from typing import Any, Final, TypeAlias, final

import msgspec
import trio

from culet.adapters.answer import SEARCHED, answer, finding, finding_of
from culet.adapters.model import (
    Finish,
    ModelEvent,
    ModelMessage,
    ModelRequest,
    Price,
    TextDelta,
    ToolCall,
    Usage,
)
from culet.adapters.passage import Answer, Finding, Passage, SubQuestion, TermStats
from culet.adapters.plan import TERMS_MAX, asked_terms, plan
from culet.adapters.terms import identifiers, parts

Stats: TypeAlias = Callable[[Sequence[str]], Awaitable[TermStats]]
RESEARCH: Final = "research"
SEARCH: Final = "search"
CHUNK_CHARS: Final = 48


@final
class ExtractiveModel:
    """Plans with `stats`, an async lookup of how many passages have each term.

    Only the planning part needs `stats`. `pace_s` passes before each piece of text, on
    `sleep`.
    """

    def __init__(
        self,
        stats: Stats | None = None,
        *,
        pace_s: float = 0,
        sleep: Callable[[float], Awaitable[object]] = trio.sleep,
    ) -> None:
        self.price = Price()  # it costs nothing
        self._stats = stats
        self._pace_s = pace_s
        self._sleep = sleep

    async def stream(
        self, request: ModelRequest, /
    ) -> AsyncGenerator[ModelEvent, None]:
        """Return the events of one step of a planner or of a researcher."""
        text, calls = await self._step(request)
        for piece in pieces(remaining(text, request.partial)):
            await self._sleep(self._pace_s)
            yield TextDelta(piece)
        for call in calls:
            yield call
        yield Usage(
            input_tokens=sum(len(m.content) for m in request.messages) // 4,
            output_tokens=len(text) // 4,
            cost=0.0,
        )
        yield Finish("tool-calls" if calls else "stop")

    async def _step(self, request: ModelRequest) -> tuple[str, list[ToolCall]]:
        tools = {tool.name for tool in request.tools}
        turn = Turn.of(request.messages)
        if RESEARCH in tools:
            if turn.calls:
                return answer_of(request.messages).text, []
            return await self._plan(turn)
        if SEARCH in tools:
            if turn.calls:
                return finding_from(request.messages).summary, []
            return _look_up(turn)
        return "I have no documents to look this up in.", []

    async def _plan(self, turn: Turn) -> tuple[str, list[ToolCall]]:
        terms = asked_terms(turn.question)
        stats = TermStats(passages=0)
        if self._stats is not None and terms:
            stats = await self._stats(terms)
        asked = plan(turn.question, stats)
        if not asked:
            return "Please ask with a word that I can look for in the documents.", []
        calls = [
            ToolCall(
                id=turn.call_id(RESEARCH, number),
                name=RESEARCH,
                input=msgspec.to_builtins(one),
            )
            for number, one in enumerate(asked)
        ]
        return f"I look into {len(asked)} questions, all at once.", calls


class Turn(msgspec.Struct, frozen=True):
    """The last question in a conversation and what was done about it so far."""

    question: str
    before: int  # tool calls of earlier turns
    calls: tuple[ToolCall, ...]
    results: dict[str, str]  # tool call id -> what came back

    @classmethod
    def of(cls, messages: Sequence[ModelMessage]) -> Turn:
        """Return the turn that the last user message began."""
        users = [i for i, message in enumerate(messages) if message.role == "user"]
        start = users[-1] if users else 0
        earlier, since = messages[:start], messages[start:]
        return cls(
            question=since[0].content if users else "",
            before=sum(len(message.tool_calls) for message in earlier),
            calls=tuple(call for message in since for call in message.tool_calls),
            results={
                message.tool_call_id: message.content
                for message in since
                if message.role == "tool" and message.tool_call_id is not None
            },
        )

    def call_id(self, name: str, number: int) -> str:
        """Return an id that no call of this conversation has, the same when repeated."""
        return f"{name}-{self.before + number + 1}"


def sub_question(text: str) -> SubQuestion:
    """Return what a researcher is asked: JSON of a `SubQuestion`, or a person's words."""
    try:
        asked = msgspec.json.decode(text, type=SubQuestion)
    except msgspec.DecodeError:
        asked = SubQuestion(question=text.strip())
    if asked.terms:
        return asked
    terms = [term for name in identifiers(asked.question) for term in parts(name)]
    return msgspec.structs.replace(asked, terms=tuple(dict.fromkeys(terms))[:TERMS_MAX])


def finding_from(messages: Sequence[ModelMessage]) -> Finding:
    """Return a researcher's finding, computed from its stored conversation."""
    turn = Turn.of(messages)
    found: list[Passage] = []
    for call in turn.calls:
        found += _passages(turn.results.get(call.id, ""))
    return finding(sub_question(turn.question), found)


def answer_of(messages: Sequence[ModelMessage]) -> Answer:
    """Return the assistant's answer, computed from its stored conversation."""
    turn = Turn.of(messages)
    findings = [
        finding_of(_question_of(call.input), turn.results.get(call.id, ""))
        for call in turn.calls
        if call.name == RESEARCH
    ]
    return answer(findings)


def remaining(text: str, partial: str) -> str:
    """Return what of `text` is still to be said after `partial`.

    If the sources changed meanwhile and the text is another now, it begins anew in a
    paragraph of its own: what was said stays said.
    """
    if text.startswith(partial):
        return text[len(partial) :]
    return "\n\n" + text


def pieces(text: str) -> Iterator[str]:
    """Cut a text into pieces of whole words, about `CHUNK_CHARS` long."""
    start = 0
    while start < len(text):
        end = start + CHUNK_CHARS
        space = text.find(" ", end, end + CHUNK_CHARS)
        end = space + 1 if space >= 0 else end
        yield text[start:end]
        start = end


def _look_up(turn: Turn) -> tuple[str, list[ToolCall]]:
    asked = sub_question(turn.question)
    if not asked.terms:
        return "Please ask with a word that I can look for in the documents.", []
    wanted = {"terms": list(asked.terms), "limit": SEARCHED}
    return "", [ToolCall(id=turn.call_id(SEARCH, 0), name=SEARCH, input=wanted)]


def _passages(result: str) -> Iterable[Passage]:
    try:
        return msgspec.json.decode(result, type=list[Passage])
    except msgspec.DecodeError:
        return ()  # a search that failed found nothing


def _question_of(value: Any) -> str:
    return str(value.get("question", "")) if isinstance(value, dict) else str(value)
