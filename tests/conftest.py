"""What all tests share: Hypothesis profiles, and the probe that finds long passes.

Everything of a kernel runs on one thread, so a pass of the event loop that computes for
long delays all others. The probe takes the thread's CPU time round each task step and
each pass of every async test; more than 100 ms in one pass fails the test. Gaps in wall
time are only told (`-rA` or a failing test shows them): a busy machine has them too.
Collecting garbage and importing modules do not count. `@pytest.mark.gap("why")` lets a
test have long passes.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal

import pytest
import trio
import trio.testing
from hypothesis import HealthCheck, settings

PASS_S: Final = 0.1  # of CPU in one pass of the loop

for _name, _examples in (("dev", 60), ("ci", 150)):
    settings.register_profile(
        _name,
        deadline=None,
        max_examples=_examples,
        suppress_health_check=[HealthCheck.too_slow],
    )
PROFILE: Final = os.environ.get(
    "HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"
)
settings.load_profile(PROFILE)


class GapProbe(trio.abc.Instrument):
    """Finds passes of the loop that take long, and the task that did it."""

    def __init__(self) -> None:
        self.worst_pass_s = 0.0  # CPU
        self.worst_wall_s = 0.0
        self.culprit = ""
        self._pass_cpu = self._pass_wall = self._step_cpu = 0.0
        self._step_worst = 0.0
        self._step_name = ""
        self._modules = 0
        self._in_pass = False
        self._gc_from = self._gc_s = 0.0

    def on_gc(self, phase: Literal["start", "stop"], _info: dict[str, int]) -> None:
        """Count what the garbage collector takes."""
        now = time.thread_time()
        if phase == "start":
            self._gc_from = now
        else:
            self._gc_s += now - self._gc_from

    def after_io_wait(self, timeout: float) -> None:
        """A pass begins."""
        self._in_pass = True
        self._gc_s = self._step_worst = 0.0
        self._modules = len(sys.modules)
        self._pass_cpu, self._pass_wall = time.thread_time(), time.perf_counter()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """A task runs."""
        self._step_cpu = time.thread_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """It waits again."""
        took = time.thread_time() - self._step_cpu
        if took > self._step_worst:
            self._step_worst, self._step_name = took, task.name

    def before_io_wait(self, timeout: float) -> None:
        """The pass is over."""
        if not self._in_pass:
            return
        self._in_pass = False
        cpu = time.thread_time() - self._pass_cpu - self._gc_s
        if len(sys.modules) != self._modules:
            return  # something was imported for the first time
        self.worst_wall_s = max(
            self.worst_wall_s, time.perf_counter() - self._pass_wall
        )
        if cpu > self.worst_pass_s:
            self.worst_pass_s, self.culprit = cpu, self._step_name

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the loop of this task meanwhile."""
        gc.callbacks.append(self.on_gc)
        trio.lowlevel.add_instrument(self)
        try:
            yield
        finally:
            trio.lowlevel.remove_instrument(self)
            gc.callbacks.remove(self.on_gc)

    def verdict(self) -> str | None:
        """Return what is wrong, or None."""
        if self.worst_pass_s <= PASS_S:
            return None
        return (
            f"one pass of the loop took {self.worst_pass_s * 1000:.0f} ms of CPU,"
            f" mostly in {self.culprit}"
        )


def pytest_configure(config: pytest.Config) -> None:
    """Register our marker."""
    line = "gap(reason): this test may hold the loop for long; say why"
    config.addinivalue_line("markers", line)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every async test the probe."""
    for item in items:
        if item.get_closest_marker("trio") is None:
            continue
        names: list[str] = item.fixturenames  # type: ignore[attr-defined]
        if "gap_probe" not in names:
            names.append("gap_probe")


@pytest.fixture
async def gap_probe(request: pytest.FixtureRequest) -> AsyncIterator[GapProbe]:
    """Watch the loop of one async test."""
    probe = GapProbe()
    with probe.watching():
        yield probe
    if probe.worst_wall_s > PASS_S:
        print(f"wall gap of {probe.worst_wall_s * 1000:.0f} ms in {probe.culprit}")
    marker = request.node.get_closest_marker("gap")
    if marker is not None:
        assert marker.args, "say why: @pytest.mark.gap('why')"
        return
    wrong = probe.verdict()
    if wrong is not None:
        pytest.fail(wrong)


@pytest.fixture
def clock(autojump_clock: trio.testing.MockClock) -> trio.testing.MockClock:
    """Time that passes at once when nothing else is to do."""
    return autojump_clock


def pytest_report_header(config: Any) -> str:
    """Say which Hypothesis profile is on."""
    return f"hypothesis profile: {PROFILE}"
