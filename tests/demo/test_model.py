"""The demo with a model behind HTTP: it plans, real researchers look, it cites."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from adapters.mock_api import KEY, Mock, needs_mock
from culet.adapters.passage import Citation, Finding
from culet.web.demo.agents import cited

DOCS = Path(__file__).parent.parent / "kill" / "docs"
QUESTION = "How does asyncio.Queue differ from queue.Queue?"
ANSWER = "One is for coroutines (`queues.md:3`), the other for threads (queues.md:9)."


@pytest.fixture
def mock(tmp_path: Path) -> Iterator[Mock]:
    mock = Mock(tmp_path)
    yield mock
    mock.stop()


def demo(*more: str, **environ: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if "OPENAI" not in k}
    return subprocess.run(
        [sys.executable, "-m", "culet.web", "demo", "--docs", str(DOCS), *more],
        capture_output=True, text=True, timeout=60, check=False,
        env={**kept, **environ},
    )  # fmt: skip


@needs_mock
@pytest.mark.slow
def test_the_assistant_thinks_with_the_model_of_the_environment(mock: Mock) -> None:
    asked = [
        {"name": "research", "arguments": {"question": f"What is {name}?"}}
        for name in ("asyncio.Queue", "queue.Queue")
    ]
    mock.answer({"hasToolResult": False}, {"content": "I look.", "toolCalls": asked})
    mock.answer({"hasToolResult": True}, {"content": ANSWER})
    done = demo(
        "--ask", QUESTION, "--json",
        OPENAI_API_KEY=KEY, OPENAI_MODEL="m", OPENAI_BASE_URL=f"http://{mock.host}/v1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = msgspec.json.decode(done.stdout)
    assert told["answer"] == ANSWER
    assert [(run["status"], run["question"]) for run in told["runs"]] == [
        ("completed", "What is asyncio.Queue?"), ("completed", "What is queue.Queue?"),
    ]  # fmt: skip
    assert [(c["file"], c["line"]) for c in told["citations"]] == [
        ("queues.md", 1), ("queues.md", 7),
    ]  # fmt: skip
    first, second = mock.requests()
    assert "file:line" in first["messages"][0]["content"]
    found = [m["content"] for m in second["messages"] if m["role"] == "tool"]
    assert len(found) == 2
    assert all("queues.md" in one for one in found)


def test_a_key_without_a_model_is_a_clear_error() -> None:
    done = demo("--ask", QUESTION, OPENAI_API_KEY=KEY)
    assert done.returncode == 2
    assert "OPENAI_MODEL is not" in done.stderr
    assert done.stdout == ""


def test_only_what_was_found_and_named_is_cited_in_its_order() -> None:
    def at(file: str, line: int) -> Citation:
        return Citation(file=file, line=line, quote="q\nq")

    finding = Finding(
        question="q", summary="s",
        citations=(at("a.md", 1), at("a.md", 12), at("b.md", 2), at("c.md", 3)),
    )  # fmt: skip
    answer = cited("x (b.md:3), `a.md:12`, x/c.md:3, a.md:99, no.md:9", [finding] * 2)
    assert answer.citations == (at("b.md", 2), at("a.md", 12))
    assert cited("b.md:2", []).citations == ()
