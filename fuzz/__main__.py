"""`python -m fuzz [--seconds N] [--seed S] [target…]`: attack the invariants, open-ended.

Without a target all of them take turns. Each round of a target has a seed of its own,
counted from `--seed`; what a seed does depends on nothing else. A failure prints its
trace and the one line that repeats it, and the exit status is 1. Seeds that failed and
seeds that first reached a mark are kept in the corpus, which every run plays first.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from fuzz import machines
from fuzz.case import Case, Target

HERE: Final = Path(__file__).parent
CORPUS: Final = HERE / "corpus"
SLICE_S: Final = 2.0  # of a target's turn
TOLD_S: Final = 5.0  # between two lines of progress
KEPT_MAX: Final = 200  # seeds of one target in the corpus


def targets() -> dict[str, Target]:
    """Return the small targets and the machines, by name."""
    found = {}
    for path in sorted((HERE / "targets").glob("[a-z]*.py")):
        module = importlib.import_module(f"fuzz.targets.{path.stem}")
        said = first_sentence(module.__doc__)
        found[path.stem] = Target(path.stem, said, module.play, module.SOMETIMES)
    return found | machines.targets()


def first_sentence(text: str | None) -> str:
    """Return the first sentence of a docstring: the invariant."""
    assert text, "a target says what its invariant is"
    return " ".join(text.split()).partition(". ")[0].rstrip(".") + "."


class Failure(NamedTuple):
    """One seed of one target that broke its invariant."""

    target: str
    seed: int

    @property
    def command(self) -> str:
        """The line that repeats it."""
        return f"python -m fuzz --seed {self.seed} --rounds 1 {self.target}"


class Corpus:
    """Seeds worth playing first: one file for each target, one seed a line."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def seeds(self, target: str) -> list[int]:
        """Return what is kept for a target."""
        path = self.folder / target
        if not path.exists():
            return []
        return [int(line) for line in path.read_text().split() if line.isdigit()]

    def keep(self, target: str, seed: int) -> None:
        """Keep one more; the oldest go first."""
        known = [kept for kept in self.seeds(target) if kept != seed]
        kept = [*known, seed][-KEPT_MAX:]
        self.folder.mkdir(exist_ok=True)
        (self.folder / target).write_text("\n".join(map(str, kept)) + "\n")


class Run:
    """Rounds of some targets until the time is up, the count reached or one fails."""

    def __init__(
        self, chosen: list[Target], seed: int, until: float, rounds: int | None
    ) -> None:
        self.chosen, self.until, self.rounds = chosen, until, rounds
        self.corpus = Corpus(CORPUS)
        self.next = dict.fromkeys((t.name for t in chosen), seed)
        self.first = seed
        self.played = 0
        self._began = self._told = time.monotonic()

    def play(self) -> Failure | None:
        """Play; return what failed."""
        for target, seed in self._turns():
            machines.deadline = self.until
            marks = len(target.sometimes.seen)
            try:
                target.play(Case(seed, target.sometimes))
            except machines.TimeIsUp:
                break
            except Exception:
                traceback.print_exc()
                self.corpus.keep(target.name, seed)
                return Failure(target.name, seed)
            self.played += 1
            if len(target.sometimes.seen) > marks:
                self.corpus.keep(target.name, seed)
            self._tell()
        return None

    def _turns(self) -> Iterator[tuple[Target, int]]:
        if self.rounds is None:
            for target in self.chosen:
                for seed in self.corpus.seeds(target.name):
                    if time.monotonic() >= self.until:
                        return
                    yield target, seed
        while True:
            over = True
            for target in self.chosen:
                turn = time.monotonic() + SLICE_S
                while time.monotonic() < min(turn, self.until):
                    seed = self.next[target.name]
                    if self.rounds is not None and seed >= self.first + self.rounds:
                        break
                    over = False
                    self.next[target.name] += 1
                    yield target, seed
            if over or time.monotonic() >= self.until:
                return

    def _tell(self) -> None:
        now = time.monotonic()
        if now - self._told >= TOLD_S:
            self._told = now
            print(self.line(), flush=True)

    def line(self) -> str:
        """Return the line of progress."""
        counts = ", ".join(
            f"{name} {seed - self.first}" for name, seed in self.next.items()
        )
        passed = time.monotonic() - self._began
        return f"{passed:.0f} s, {self.played} rounds, all good: {counts}"


def main() -> int:
    """Play what is asked for."""
    known = targets()
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("target", nargs="*", choices=[*known, []], metavar="target")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--rounds", type=int, help="of each target, then stop")
    parser.add_argument("--marks", action="store_true", help="fail if one is missed")
    parser.add_argument("--list", action="store_true", help="say what is attacked")
    asked = parser.parse_args()
    if asked.list:
        for target in known.values():
            print(f"{target.name:9} {target.invariant}")
        return 0
    logging.disable(logging.CRITICAL)  # what is planned to fail is logged as such
    chosen = [known[name] for name in asked.target or known]
    run = Run(chosen, asked.seed, time.monotonic() + asked.seconds, asked.rounds)
    failure = run.play()
    if failure is not None:
        print(f"FAILED: {known[failure.target].invariant}\nrepeat: {failure.command}")
        return 1
    print(run.line())
    if not asked.marks:
        return 0
    missed = {t.name: t.sometimes.missing() for t in chosen if t.sometimes.missing()}
    for name, marks in missed.items():
        print(f"{name}: never reached: {', '.join(marks)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
