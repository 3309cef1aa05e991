"""What a scenario did outside and told its client, and what of it turned out false.

Pure bookkeeping, shared by the crash explorer and by `AgentMachine`. A *finding* is one
promise that was broken; each is kept once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple, final

from .errors import UsageError

Promise = Literal["exactly_once", "at_least_once", "at_most_once"]
Kind = Literal[
    "duplicated effect", "lost effect", "lost event", "wrong terminal", "leaked task",
    "late write", "stuck", "failed",
]  # fmt: skip
PROMISES: Final = ("exactly_once", "at_least_once", "at_most_once")
_GONE: Final = object()


class Finding(NamedTuple):
    """One broken promise: its kind, what it is about, and a sentence that says how."""

    kind: Kind
    what: str
    how: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}: {self.how}"


@final
class Ledger:
    """Effects, tells and ends over all lives of one scenario."""

    def __init__(self, promises: Mapping[str, Promise]) -> None:
        for name, promise in promises.items():
            if promise not in PROMISES:
                msg = f"effect {name!r}: {promise!r} is none of {', '.join(PROMISES)}"
                raise UsageError(msg)
        self.promises = dict(promises)
        self.effects: Counter[tuple[str, str]] = Counter()
        self.tells: dict[str, Any] = {}
        self.ends: dict[str, str] = {}
        self.findings: dict[tuple[Kind, str], Finding] = {}
        self.last = ""  # what was noted last, for reports

    def find(self, kind: Kind, what: str, how: str) -> None:
        """Keep one finding; the first of a kind about a thing stays."""
        self.findings.setdefault((kind, what), Finding(kind, what, how))

    # ---- noting

    def act(self, name: str, key: str) -> None:
        """Something was done outside."""
        self.effects[name, key] += 1
        self.last = f"effect {name} {key!r}"
        count, promise = self.effects[name, key], self.promise(name)
        if count > 1 and promise != "at_least_once":
            how = f"done {count} times, declared {promise}"
            self.find("duplicated effect", f"{name} {key!r}", how)

    def promise(self, name: str) -> Promise:
        """Return what was declared of an effect; `exactly_once` when nothing was."""
        return self.promises.get(name, "exactly_once")

    def tell(self, key: str, value: Any) -> None:
        """The client was told a value; the first one binds."""
        self.last = f"told {key!r}"
        before = self.tells.setdefault(key, value)
        if before != value:
            self.find("lost event", key, f"told {before!r}, and later {value!r}")

    def end(self, run_id: str, status: str) -> None:
        """The client was told how a run ended; `running` is no end."""
        if status == "running":
            return
        self.last = f"ended {run_id!r}"
        before = self.ends.setdefault(run_id, status)
        if before != status:
            self.find("wrong terminal", run_id, f"told {before}, and later {status}")

    # ---- comparing

    def check_recall(self, recalled: Mapping[str, Any]) -> None:
        """Compare what was told with what a client can read now."""
        for key, value in self.tells.items():
            now = recalled.get(key, _GONE)
            if now is _GONE:
                self.find("lost event", key, f"told {value!r}, and it is gone")
            elif now != value:
                self.find("lost event", key, f"told {value!r}, now it is {now!r}")

    def check_runs(self, statuses: Mapping[str, str]) -> None:
        """Compare the ends that were told with the rows (run id -> status)."""
        for run_id, told in self.ends.items():
            status = statuses.get(run_id)
            if status is None:
                self.find(
                    "wrong terminal", run_id, f"told {told}, there is no such run"
                )
            elif status != told:
                self.find("wrong terminal", run_id, f"told {told}, its row: {status}")

    def check_effects(self, expected: Mapping[tuple[str, str], int]) -> None:
        """Nothing that a run without a crash does may be missing at the end."""
        for name, key in expected:
            if not self.effects[name, key] and self.promise(name) != "at_most_once":
                how = f"never done, declared {self.promise(name)}"
                self.find("lost effect", f"{name} {key!r}", how)
