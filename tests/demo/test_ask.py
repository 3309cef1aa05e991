"""`culet demo` from the outside: one question in the terminal, and its mistakes."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent.parent / "kill" / "docs"


def culet(*args: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "culet.web", *args],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def ask(question: str, *folders: Path) -> dict[str, Any]:
    docs = [word for folder in folders for word in ("--docs", str(folder))]
    done = culet("demo", "--ask", question, "--json", *docs)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def lines_at(path: Path, line: int, count: int) -> str:
    whole = path.read_text().split("\n")
    return "\n".join(whole[line - 1 : line - 1 + count])


def test_an_answer_cites_whole_lines_byte_for_byte_and_lists_its_runs() -> None:
    told = ask("How does asyncio.Queue differ from queue.Queue?", DOCS)

    assert set(told) == {"answer", "citations", "runs"}
    assert told["citations"]
    for cited in told["citations"]:
        assert set(cited) == {"file", "line", "quote"}
        count = cited["quote"].count("\n") + 1
        assert count <= 12
        assert lines_at(DOCS / cited["file"], cited["line"], count) == cited["quote"]
        assert f"{cited['file']}:{cited['line']}" in told["answer"]
    assert 3 <= len(told["runs"]) <= 6
    for run in told["runs"]:
        assert set(run) == {"runId", "agentType", "status", "question", "summary"}
        assert (run["agentType"], run["status"]) == ("Researcher", "completed")
        assert run["question"]
        assert run["summary"]


def test_two_questions_over_two_folders_give_disjoint_files() -> None:
    stdlib = Path(sysconfig.get_path("stdlib"))
    folders = (stdlib / "email", stdlib / "asyncio")

    first = ask("What is HeaderRegistry, and what does parsedate_tz do?", *folders)
    second = ask("What is StreamReader, and what does readuntil do?", *folders)

    files = [{c["file"] for c in told["citations"]} for told in (first, second)]
    assert files[0]
    assert files[1]
    assert all(name.startswith("email/") for name in files[0])
    assert all(name.startswith("asyncio/") for name in files[1])


def test_an_answer_that_rests_on_nothing_says_so() -> None:
    told = ask("What is a zygomorphic quasar?", DOCS)

    assert told["citations"] == []
    assert "nothing" in told["answer"].lower()


def test_progress_goes_to_stderr_and_the_answer_alone_to_stdout() -> None:
    done = culet("demo", "--ask", "What is the culet?", "--docs", str(DOCS))

    assert done.returncode == 0
    assert "gems.md:" in done.stdout
    assert "run" not in done.stdout.split("\n")[0]
    assert "completed" in done.stderr


def test_a_port_that_is_taken_is_a_clear_error(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = culet(
            "demo", "--data", str(tmp_path), "--docs", str(DOCS), "--port", port
        )

    assert done.returncode == 2
    assert "--port" in done.stderr
    assert "Traceback" not in done.stderr


def test_documents_that_are_not_there_are_a_clear_error(tmp_path: Path) -> None:
    done = culet("demo", "--ask", "x", "--docs", str(tmp_path / "nowhere"))

    assert done.returncode == 2
    assert "nowhere" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_second_server_on_the_data_is_refused(tmp_path: Path) -> None:
    first = subprocess.Popen(
        [
            sys.executable, "-m", "culet.web", "demo", "--data", str(tmp_path),
            "--docs", str(DOCS), "--port", "0",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        assert first.stdout is not None
        assert first.stdout.readline().startswith("Culet demo: http://")
        second = culet(
            "demo", "--data", str(tmp_path), "--docs", str(DOCS), "--port", "0"
        )
    finally:
        first.terminate()
        first.communicate(timeout=20)

    assert second.returncode == 1
    assert str(tmp_path) in second.stderr
    assert "Traceback" not in second.stderr
    assert first.returncode in (0, -15)
