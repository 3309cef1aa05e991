"""The benchmark of runs prints every row that the papers name, each with its level."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROWS = {
    "run_one_chunk_inside",
    "its_records",
    "their_share_writing_and_syncing",
    "run_one_chunk_think",
    "run_1000_chunks_think",
    "run_one_chunk_chat",
    "run_1000_chunks_chat",
    "runs_started_64_in_parallel",
    "runs_64x100_chunks_one_client",
    "frames_to_20_clients",
    "its_cpu_of_the_server",
    "replay_50x50_first_client",
    "its_memory_above_idle",
    "replay_50x50_next_client",
    "kept_when_they_have_left",
    "replay_50x50_20_clients",
    "memory_of_20_above_idle",
    "20_clients_that_do_not_read",
    "killed_with_50_runs_listens",
    "killed_with_50_runs_answers",
    "its_cpu_until_it_answers",
    "killed_with_50_runs_all_over",
}


@pytest.mark.rule("G-10")
def test_each_figure_of_runs_has_a_row_at_level_power() -> None:
    env = {"RUNS": "50", "TIMES": "5", "REPEATS": "1", "SECONDS": "3"}
    done = subprocess.run(
        [sys.executable, HERE / "runs.py"],
        check=True,
        capture_output=True,
        text=True,
        timeout=240,
        env={**env, "PATH": "/usr/bin:/bin"},
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]

    assert {row["name"] for row in rows} == ROWS
    assert {row["level"] for row in rows} == {"power"}
    # a process that never listens, never answers or loses runs prints no such row
    assert all(row["value"] >= 0 and row["n"] > 0 for row in rows)
