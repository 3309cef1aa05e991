"""The same seed gives the same trace of a whole kernel, byte for byte; another another."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import pytest
import trio
import trio._core._run as trio_run

from crash.agents import FACETS, ROOTS, Boss
from crash.scenarios import SCENARIOS
from crash.story import tell
from culet.kernel import testing_seeded as seeded
from culet.kernel.errors import InternalError
from culet.kernel.testing import open_test_kernel
from machines.world import Actor, Model

FLAG, GENERATOR = seeded._FLAG, seeded._GENERATOR
PATH: Final = str(Path(__file__).parent)
PROGRAM: list[Any] = [
    ["emit"],
    ["nest", "Worker", [["emit"], ["sleep", 1], ["fiber", 2]]],
    ["later", 2],
    ["sleep", 1],
]


def trace(seed: int) -> bytes:
    """Do many things at once, in that order; return every event, one a line."""
    lines: list[str] = []

    def heard(channel: str, tree: Any, subject: Any, detail: Any) -> None:
        now = trio.current_time()
        lines.append(f"{now:.6f} {channel} {plain(subject)} {plain(detail)}")

    async def main() -> None:
        Actor.model = Model()
        async with open_test_kernel(roots=ROOTS, facets=FACETS) as test:
            test.kernel.subscribe("*", heard)
            boss = await test.kernel.get_agent(Boss, "a")
            async with trio.open_nursery() as nursery:
                for number in range(4):
                    nursery.start_soon(boss.run, "Worker", PROGRAM, f"r{number}")
                    nursery.start_soon(boss.kid, f"k{number}")
            await trio.sleep(5)
            await test.crash()
            await test.reopen()
            test.kernel.subscribe("*", heard)
            await boss_again(test.kernel)

    async def boss_again(kernel: Any) -> None:
        boss = await kernel.get_agent(Boss, "a")
        await boss.run("Worker", PROGRAM, "r9")

    seeded.run(main, seed=seed)
    return "\n".join(lines).encode()


def plain(value: Any) -> str:
    """Return what says the same in each process: no addresses."""
    if isinstance(value, str | int | float | tuple | list | None):
        return repr(value)
    fields = [f"{k}={v!r}" for k, v in sorted(named(value).items())]
    return f"{type(value).__name__}({', '.join(fields)})"


def named(value: Any) -> dict[str, Any]:
    """Return the fields of a record, and what names a thing that is alive."""
    names = (*getattr(value, "__struct_fields__", ()), *getattr(value, "_fields", ()))
    names = (*names, "owner", "id", "slot", "reason", "status")
    found = {n: getattr(value, n, None) for n in names}
    return {
        n: v
        for n, v in found.items()
        if isinstance(v, str | int | float | tuple | list)
    }


def test_the_seam_of_trio_is_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded.check_seam()
    monkeypatch.delattr(trio_run, GENERATOR)
    with pytest.raises(InternalError, match=GENERATOR):
        seeded.check_seam()


def test_no_other_module_touches_the_seam() -> None:
    root = Path(__file__).parent.parent
    found = {
        path.name
        for folder in ("kernel", "storage", "adapters", "web", "tests", "fuzz")
        for path in (root / folder).rglob("*.py")
        if re.search(r"trio\._core|_ALLOW_DETERMINISTIC", path.read_text())
    }
    assert found == {"testing_seeded.py", "test_seeded.py"}


def test_what_runs_in_seeded_order_leaves_all_as_it_was() -> None:
    generator, flag = getattr(trio_run, GENERATOR), getattr(trio_run, FLAG)
    state = generator.getstate()
    with seeded.seeded(5):
        generator.random()
    assert generator.getstate() == state
    assert getattr(trio_run, FLAG) == flag


def test_the_order_of_tasks_follows_from_the_seed() -> None:
    def order(seed: int) -> list[int]:
        out: list[int] = []

        async def main() -> None:
            async def note(number: int) -> None:
                for _ in range(3):
                    out.append(number)
                    await trio.lowlevel.checkpoint()

            async with trio.open_nursery() as nursery:
                for number in range(5):
                    nursery.start_soon(note, number)

        seeded.run(main, seed=seed)
        return out

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(8)}) > 1


@pytest.mark.rule("I-49")
def test_the_same_seed_gives_the_same_trace_of_the_kernel() -> None:
    first, second = trace(7), trace(7)
    assert first.count(b"\n") > 100
    assert first == second
    assert trace(8) != first


@pytest.mark.rule("I-49")
def test_how_fast_the_machine_is_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a long pass is cut into slices does not hang on it."""
    fast = trace(7)
    seconds = itertools.count()
    monkeypatch.setattr(time, "perf_counter_ns", lambda: next(seconds) * 10**9)

    assert trace(7) == fast


@pytest.mark.rule("I-49")
def test_another_process_gives_the_same_trace() -> None:
    """Nothing hangs on addresses or on the hashes of texts."""
    found = {
        subprocess.run(
            [sys.executable, "-W", "ignore", __file__],
            env=os.environ | {"PYTHONHASHSEED": str(seed), "PYTHONPATH": PATH},
            capture_output=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in (1, 2)
    }
    assert found == {trace(7)}


@pytest.mark.parametrize("name", ["nested", "chat"])
def test_the_same_seed_writes_the_same_number_of_times(name: str) -> None:
    assert tell(SCENARIOS[name], seed=3).lives == tell(SCENARIOS[name], seed=3).lives


if __name__ == "__main__":
    sys.stdout.buffer.write(trace(7))
