"""`python tests/mutants [file…]`: make the core wrong in one place, see a test fail.

Each mutant is one process forked from one that has loaded all but `culet`. There it is
imported in place of the module, and the tests of `tests/core` run until the first one
fails: those that mirror the module first. What survives is printed. The exit status says
whether the share of caught mutants is at least the one asked for.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

import hypothesis
import msgspec  # noqa: F401 - loaded once for all
import pytest
import trio  # noqa: F401
from hypothesis import Phase, settings

sys.path.insert(0, str(Path(__file__).parent))

from sites import Mutant, mutants

ROOT: Final = Path(__file__).parent.parent.parent
CORE: Final = ROOT / "kernel/culet/kernel/core"
FILES: Final = ("status", "job", "frames", "reducer", "path")
CPU_S: Final = 60  # then it runs in circles, and that is caught as well
PATIENCE_S: Final = 900.0  # then it waits for ever; a busy machine is no fault
CAUGHT, SURVIVED, BROKEN = 0, 1, 2


class _Instead(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from another text."""

    def __init__(self, module: str, mutant: Mutant) -> None:
        self.module, self.mutant = module, mutant

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        return (
            importlib.util.spec_from_loader(name, self) if name == self.module else None
        )

    def exec_module(self, module: ModuleType) -> None:
        code = compile(self.mutant.source, f"<mutant of {self.module}>", "exec")
        exec(code, module.__dict__)


def _plain_profiles() -> None:
    """Let Hypothesis find a failure and not shrink it, the same one each time."""
    register = settings.register_profile

    def registered(name: str, parent: Any = None, **given: Any) -> None:
        given |= {"phases": (Phase.explicit, Phase.generate), "database": None}
        register(name, parent, **{**given, "derandomize": True})

    # Settings are immutable for whoever asks politely.
    type.__setattr__(settings, "register_profile", staticmethod(registered))


def _test(file: str, mutant: Mutant | None) -> int:
    """In a process of its own: run the tests; return what became of the mutant."""
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    assert "culet.kernel" not in sys.modules
    if mutant is not None:
        module = f"culet.kernel.core.{file}"
        sys.meta_path.insert(0, _Instead(module, mutant))
    _plain_profiles()
    tests = ROOT / "tests/core"
    own = sorted(map(str, tests.glob(f"test_{file}*.py")))
    rest = sorted(set(map(str, tests.glob("test_*.py"))) - set(own))
    plain = ["-x", "-q", "--assert=plain", "-p", "no:cacheprovider"]
    code = int(pytest.main([*plain, f"--rootdir={ROOT}", *own, *rest]))
    return {0: SURVIVED, 1: CAUGHT}.get(code, CAUGHT if mutant else BROKEN)


class Running(NamedTuple):
    """A mutant that is being tested."""

    file: str
    mutant: Mutant | None
    since: float


def fork(file: str, mutant: Mutant | None) -> int:
    """Begin one; return its process."""
    child = os.fork()
    if child:
        return child
    code = BROKEN
    try:
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
        code = _test(file, mutant)
    finally:
        os._exit(code)


def reap(running: dict[int, Running]) -> tuple[Running, int]:
    """Wait for one to end, or to take too long; return its exit code."""
    while True:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            return running.pop(child), os.waitstatus_to_exitcode(status)
        for child, one in running.items():
            if time.monotonic() - one.since > PATIENCE_S:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.005)


def play(files: Sequence[str], at_once: int) -> dict[str, list[tuple[Mutant, bool]]]:
    """Test all mutants of some files."""
    waiting = [(f, m) for f in files for m in mutants((CORE / f"{f}.py").read_text())]
    results: dict[str, list[tuple[Mutant, bool]]] = {f: [] for f in files}
    running: dict[int, Running] = {}
    total = len(waiting)
    while waiting or running:
        while waiting and len(running) < at_once:
            file, mutant = waiting.pop(0)
            running[fork(file, mutant)] = Running(file, mutant, time.monotonic())
        one, code = reap(running)
        assert one.mutant is not None
        caught = code != SURVIVED
        results[one.file].append((one.mutant, caught))
        if not caught:
            m = one.mutant
            print(f"survives: {one.file}.py:{m.line}: {m.before!r} -> {m.after!r}")
        done = total - len(waiting) - len(running)
        if done % 50 == 0:
            print(f"  {done} of {total}", file=sys.stderr, flush=True)
    return results


def main() -> int:
    """Test the mutants of the files asked for, and print the score."""
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__)
    parser.add_argument("files", nargs="*", choices=[*FILES, []], metavar="file")
    parser.add_argument("--at-least", type=float, default=85.0, help="percent")
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    files = asked.files or list(FILES)
    os.environ["CULET_PROFILE"] = "short"
    assert hypothesis.__version__
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = folder
        sound = {fork(files[0], None): Running(files[0], None, time.monotonic())}
        if reap(sound)[1] != SURVIVED:
            print("the tests fail without any mutant")
            return 2
        results = play(files, max(1, asked.at_once))
    all_caught = all_made = 0
    for file, found in results.items():
        caught = sum(good for _, good in found)
        all_caught, all_made = all_caught + caught, all_made + len(found)
        print(f"{file:8} {caught:4} of {len(found):4} caught")
    score = 100 * all_caught / max(all_made, 1)
    print(f"score    {score:.1f} % of {all_made} mutants")
    return 0 if score >= asked.at_least else 1


if __name__ == "__main__":
    sys.exit(main())
