"""What all tests share: profiles, the doctor, and the probe that finds long passes.

How much a proof plays is said in `volume`; a run of a whole proof that plays less fails.
After each test the doctor looks at every folder of a store that is left in `tmp_path`;
`@pytest.mark.unsound("why")` is for tests that break one, or keep it open, on purpose.

Everything of a kernel runs on one thread, so a pass of the event loop that computes for
long delays all others. The probe takes the thread's CPU time round each task step and
each pass of every async test; more than 100 ms in one pass fails the test. Gaps in wall
time are only told (`-rA` or a failing test shows them): a busy machine has them too.
Collecting garbage and importing modules do not count. `@pytest.mark.gap("why")` lets a
test have long passes.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal

import pytest
import trio
import trio.testing
from hypothesis import HealthCheck, settings

from sound import healthy, stores
from volume import EXAMPLES, LEDGER, PROFILE, SLOWER

PASS_S: Final = 0.1 * SLOWER  # of CPU in one pass of the loop

settings.register_profile(
    PROFILE,
    deadline=None,
    max_examples=EXAMPLES.now,
    suppress_health_check=[HealthCheck.too_slow],
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


MARKERS: Final = (
    "gap(reason): this test may hold the loop for long; say why",
    "unsound(reason): this test leaves a folder that is broken or open; say why",
    "proof: this test only computes; CI runs it in a second process, beside the others",
    "volume(kind): this test counts what it plays; CULET_PROFILE says how much that is",
)
LEFT_OUT: Final = pytest.StashKey[set[str]]()  # kinds with a test that was not chosen
PROOFS: Final = pytest.StashKey[set[str]]()  # kinds that this run plays whole


def pytest_configure(config: pytest.Config) -> None:
    """Register our markers."""
    for line in MARKERS:
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


@pytest.fixture(autouse=True)
def sound(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let the doctor look at what is left in `tmp_path`; it is asked for first of all."""
    top = None
    if "tmp_path" in request.fixturenames:
        top = request.getfixturevalue("tmp_path")
    yield
    marker = request.node.get_closest_marker("unsound")
    if marker is not None:
        assert marker.args, "say why: @pytest.mark.unsound('why')"
    elif top is not None:
        for folder in stores(top):
            healthy(folder)


def kinds(items: Iterable[pytest.Item]) -> set[str]:
    """Return what these tests count."""
    marks = [mark for item in items for mark in item.iter_markers("volume")]
    return {kind for mark in marks for kind in mark.args}


def pytest_deselected(items: list[pytest.Item]) -> None:
    """A proof of which a part was left out is not judged."""
    if items:
        items[0].config.stash.setdefault(LEFT_OUT, set()).update(kinds(items))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Note the proofs that this run plays whole."""
    config = session.config
    whole = not any("::" in argument for argument in config.args)
    whole = whole and not config.option.collectonly
    left_out = config.stash.get(LEFT_OUT, set())
    config.stash[PROOFS] = kinds(session.items) - left_out if whole else set()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run whose proofs played less than their profile asks."""
    proofs = session.config.stash.get(PROOFS, set())
    if session.exitstatus == pytest.ExitCode.OK and LEDGER.short_of(proofs):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say how much was played."""
    proofs = config.stash.get(PROOFS, set())
    if proofs:
        terminalreporter.section("volumes")
        for line in LEDGER.lines(proofs):
            terminalreporter.line(line)
        for kind in LEDGER.short_of(proofs):
            terminalreporter.line(f"TOO LITTLE: {kind}", red=True)


@pytest.fixture
def clock(autojump_clock: trio.testing.MockClock) -> trio.testing.MockClock:
    """Time that passes at once when nothing else is to do."""
    return autojump_clock


def pytest_report_header(config: Any) -> str:
    """Say which profile is on."""
    return f"profile: {PROFILE}"
