"""Guesses at runs, in number: nothing is opened or written, and time tells nothing."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path

import pytest

from culet.kernel import Request, Response
from culet.web.gateway import Gateway
from volume import Volume
from web.serving import serving

GUESSES = Volume(2_000, 10_000, 100_000)
APART = 0.05  # of the medians
ROUNDS = 5  # the machine may be busy in one


@pytest.mark.rule("G-17", "F-42", "I-22", "I-44")
async def test_guesses_open_nothing_and_take_as_long_for_what_is_elsewhere(
    tmp_path: Path,
) -> None:
    async with serving(storage=f"sqlite:{tmp_path}") as server:
        async with server.connect("/agents/hub/other") as other:
            assert (await other.call("write", "known", 1))["result"] == "completed"
        async with server.connect() as mine:
            await mine.hello()
        gateway = Gateway(server.kernel)
        rows = server.kernel.tree("Hub", "h")
        before = server.kernel.metrics()["commits"], names(tmp_path), len(rows)

        async def guess(run: str) -> float:
            began = time.perf_counter()
            answer = await gateway.enter(
                Request("GET", f"/agents/hub/h/sub/writer/{run}")
            )
            took = time.perf_counter() - began
            assert isinstance(answer, Response)
            assert answer.status == 404
            return took

        apart = 1.0
        for _ in range(ROUNDS):
            took: dict[str, list[float]] = {"known": [], "guess": []}
            for _ in range(GUESSES.now // (2 * ROUNDS)):
                for run, times in took.items():
                    times.append(await guess(run))
            known, guessed = map(statistics.median, took.values())
            apart = min(apart, abs(known - guessed) / max(known, guessed))
        assert apart <= APART
        rows = server.kernel.tree("Hub", "h")
        assert (
            server.kernel.metrics()["commits"],
            names(tmp_path),
            len(rows),
        ) == before


def names(folder: Path) -> set[str]:
    return {
        os.path.join(where, name)
        for where, _, found in os.walk(folder)
        for name in found
    }
