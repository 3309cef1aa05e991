"""The demo's agents: an assistant, its researchers, and the library that they search.

The assistant plans sub-questions and runs one `Researcher` for each, in parallel, as a
tool. Researchers search through their parent, which asks its one `Library` facet; that
facet owns the full-text index and builds it in small slices.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, NamedTuple, cast

import msgspec
import trio

from culet.adapters import Think
from culet.adapters.extractive import ExtractiveModel, answer_of, finding_from
from culet.adapters.model import Model, to_model_messages
from culet.adapters.passage import (
    Answer,
    Citation,
    Finding,
    Passage,
    SubQuestion,
    TermStats,
)
from culet.adapters.tooling import ToolContext, tool
from culet.kernel import Agent, agent_tool
from culet.web.demo.corpus import Corpus
from culet.web.demo.index import Index, Progress

SLICE_S: Final = 0.010  # of indexing before others run
STEPS: Final = 8  # of indexing between two barriers that are waited for
TOLD_S: Final = 0.25  # between two reports of progress to the page
PROMPT: Final = """\
You answer questions about a folder of documents, from what stands in them and from
nothing else.

First plan: split the question into 3 to 6 short sub-questions that name what they are
about in the documents' own words (functions, classes, terms). Ask for all of them at
once with the `research` tool, one call each; give `question` and leave the other fields
out. A sub-question that finds nothing may be asked once more in other words.

Then answer in a few paragraphs of Markdown. Put the place behind every claim, as
`file:line`, exactly as the findings give it. Say what was not found. Never cite a place
that no finding gave you.
"""


class Library(Agent):
    """Owns the index of the documents. Ready once per life, then it only answers."""

    corpora: ClassVar[Sequence[Corpus]] = ()
    assistant: ClassVar[type[Assistant]]

    async def on_start(self, props: Any = None) -> None:
        """Begin to build, or to look whether all is built."""
        self.index = Index(self.sql, self.corpora, transaction=self.transaction)
        self.ready = trio.Event()
        self.spawn(self._build)

    async def _build(self) -> None:
        told_at = 0.0
        async with self.keep_alive():
            parent = await self.parent_agent(self.assistant)
            for number in itertools.count(1):
                progress = self.index.build_step(SLICE_S, time.perf_counter)
                if number % STEPS == 0:
                    await self.durable()  # its log grows at the disk's pace
                else:
                    await trio.lowlevel.checkpoint()
                now = trio.current_time()
                if progress.done or now - told_at > TOLD_S:
                    told_at = now
                    await parent.library_progress(progress)
                if progress.done:
                    break
        self.ready.set()

    async def stats(self, terms: list[str]) -> TermStats:
        """Return how many passages have each term; waits until the index is built."""
        await self.ready.wait()
        return self.index.stats(terms)

    async def search(self, terms: list[str], limit: int) -> list[Passage]:
        """Return the best passages; waits until the index is built."""
        await self.ready.wait()
        return self.index.search(terms, limit)


class Researcher(Think):
    """Answers one sub-question with passages that it quotes."""

    assistant: ClassVar[type[Assistant]]
    pace_s: ClassVar[float] = 0.0

    def get_model(self) -> Model:
        """Return a model that quotes what its one search finds."""
        return ExtractiveModel(pace_s=self.pace_s)

    def get_tools(self) -> dict[str, Any]:
        """Offer the search of the parent's library."""
        return {"search": tool(self.look_up, on_uncertain="repeat")}

    async def look_up(
        self, ctx: ToolContext, terms: list[str], limit: int = 12
    ) -> list[Passage]:
        """Search the documents for passages that have these terms."""
        await ctx.progress(fraction=0.2, phase="searching", message=", ".join(terms))
        parent = await self.parent_agent(self.assistant)
        found = await parent.search(terms, limit)
        count = f"{len(found)} passage{'' if len(found) == 1 else 's'}"
        await ctx.progress(fraction=0.6, phase="reading", message=count)
        return found

    def format_agent_tool_input(self, input: Any, request: Any) -> str:  # noqa: A002
        """Hand the sub-question on as JSON, which the model understands."""
        return msgspec.json.encode(input).decode()

    def get_agent_tool_output(self, run_id: str) -> Any:
        """Return the finding with its citations."""
        finding = finding_from(to_model_messages(self.messages))
        return msgspec.to_builtins(finding)

    def get_agent_tool_summary(self, run_id: str, output: Any) -> str:
        """Return the words of the finding."""
        return msgspec.convert(output, Finding).summary


class Assistant(Think):
    """Plans, lets researchers look, and answers with citations."""

    library: ClassVar[type[Library]]
    researcher: ClassVar[type[Researcher]]
    pace_s: ClassVar[float] = 0.0
    system_prompt = PROMPT
    initial_state: ClassVar[Any] = {
        "library": {"phase": "indexing", "done": 0, "total": 0, "passages": 0}
    }

    async def on_start(self, props: Any = None) -> None:
        """Have the library built from the start, so that a question finds it ready."""
        self.spawn(self.dynamic_agents.get, self.library, "library")

    def get_model(self) -> Model:
        """Return the model that was given, else one that plans with statistics."""
        return self.model or ExtractiveModel(self._stats, pace_s=self.pace_s)

    def get_tools(self) -> dict[str, Any]:
        """Offer research as an agent tool: one run per sub-question."""
        return {
            "research": agent_tool(
                self.researcher,
                description="Look one sub-question up in the documents.",
                input_type=SubQuestion,
                output_type=Finding,
                display_name="Researcher",
            )
        }

    async def _stats(self, terms: Sequence[str]) -> TermStats:
        library = await self.dynamic_agents.get(self.library, "library")
        return await library.stats(list(terms))

    async def search(self, terms: list[str], limit: int) -> list[Passage]:
        """Search the library, for a researcher."""
        library = await self.dynamic_agents.get(self.library, "library")
        return await library.search(terms, limit)

    def _answer(self) -> Answer:
        """Return the last answer; of a given model with the citations it made."""
        messages = to_model_messages(self.messages)
        if self.model is None:
            return answer_of(messages)
        turn = itertools.takewhile(lambda m: m.role != "user", reversed(messages))
        said = next((m.content for m in turn if m.role == "assistant"), "")
        runs = [run for run in self.runs.list() if run.status == "completed"]
        return cited(said, [msgspec.convert(run.output, Finding) for run in runs])

    async def on_chat_cleared(self) -> None:
        """Forget the runs of a conversation that was cleared."""
        await self.runs.clear()

    async def library_progress(self, progress: Progress) -> None:
        """Tell the page how far the index is."""
        told = {
            "phase": "ready" if progress.done else "indexing",
            "done": progress.documents,
            "total": progress.documents_total,
            "passages": progress.passages,
        }
        if self.state["library"] != told:
            self.set_state({**self.state, "library": told})

    async def ask(self, question: str) -> Asked:
        """Ask one question and wait for the answer: the page's job without a page."""
        message = {
            "id": f"user-{len(self.messages)}",
            "role": "user",
            "parts": [{"type": "text", "text": question}],
        }
        earlier = {run.run_id for run in self.runs.list()}
        result = await self.save_messages([message])
        return Asked(
            status=result.status,
            error=result.error,
            answer=self._answer(),
            runs=[_told(r) for r in self.runs.list() if r.run_id not in earlier],
        )


class ToldRun(msgspec.Struct, frozen=True, rename="camel"):
    """One run as `--json` prints it."""

    run_id: str
    agent_type: str
    status: str
    question: str
    summary: str


class Asked(msgspec.Struct, frozen=True):
    """What came of one question."""

    status: str
    error: str | None
    answer: Answer
    runs: list[ToldRun]


def _told(run: Any) -> ToldRun:
    output = run.output if isinstance(run.output, dict) else {}
    return ToldRun(
        run_id=run.run_id,
        agent_type=run.agent_type,
        status=run.status,
        question=str(output.get("question", "")),
        summary=run.summary or run.error or "",
    )


class DemoClasses(NamedTuple):
    """The classes of one demo, bound to its documents and its pace."""

    assistant: type[Assistant]
    researcher: type[Researcher]
    library: type[Library]


def cited(text: str, findings: Sequence[Finding]) -> Answer:
    """Return an answer with the citations of the findings that its text names, in order.

    A `file:line` inside of a quote names that quote.
    """
    found = {(c.file, c.line): c for one in findings for c in one.citations}
    files = "|".join(sorted((re.escape(file) for file, _ in found), reverse=True))
    named: dict[Citation, None] = {}
    for match in re.finditer(rf"(?<![\w/.-])({files}):(\d{{1,9}})", text):
        file, line = match[1], int(match[2])
        for c in found.values():
            if c.file == file and c.line <= line <= c.line + c.quote.count("\n"):
                named[c] = None
    return Answer(text=text, citations=tuple(named))


def demo_classes(
    corpora: Sequence[Corpus],
    pace_s: float,
    model: Callable[[], Model] | None = None,
) -> DemoClasses:
    """Return the demo's classes for these documents; `pace_s` between pieces of text.

    `model` returns the assistant's; without it, it is the embedded one. Researchers
    always have that: they quote, and a quote must be true.
    """
    library = cast(
        type[Library], type("Library", (Library,), {"corpora": tuple(corpora)})
    )
    researcher = cast(
        type[Researcher], type("Researcher", (Researcher,), {"pace_s": pace_s})
    )
    members = {
        "pace_s": pace_s,
        "library": library,
        "researcher": researcher,
        "model": None if model is None else model(),
    }
    assistant = cast(type[Assistant], type("Assistant", (Assistant,), members))
    library.assistant = assistant
    researcher.assistant = assistant
    return DemoClasses(assistant, researcher, library)
