"""What Prometheus is told of a kernel: counters of its events, gauges of what is open.

Labels are bounded: classes, statuses and kinds, never an id or a text of somebody's. Each
kernel has a registry of its own, so several may live in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, final

from prometheus_client import CONTENT_TYPE_LATEST, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import CollectorRegistry

from culet.kernel.events import FiberEnded, Transition, Whereabouts
from culet.kernel.kernel import Kernel

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
_SECONDS: Final = (0.005, 0.02, 0.1, 0.5, 2, 10, 60, 600, 3600, 86400)
_GAUGES: Final = {
    "trees": "Roots that are open.",
    "sleeping_trees": "Roots that sleep and have something due.",
    "nodes": "Agents that are live.",
    "remnants": "Agents that were told to stop and have not.",
    "connections": "Sockets of clients.",
    "records": "Log records of the roots that are open.",
    "commits": "Commits of the roots that are open.",
}
_CALLS: Final = ("execute", "retry", "error", "skip", "cancel")


@final
class _Now:
    """What is open, counted when it is asked for."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Return one gauge for each count of the kernel."""
        for name, value in sorted(self._kernel.metrics().items()):
            about = _GAUGES.get(name, name.replace("_", " "))
            yield GaugeMetricFamily(f"culet_{name}", about, value=value)


@final
class Metrics:
    """The metrics of one kernel, from now until `close`."""

    def __init__(self, kernel: Kernel) -> None:
        registry = self.registry = CollectorRegistry()
        registry.register(_Now(kernel))

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"culet_{name}", about, labels, registry=registry)

        self._asked = counter("runs_asked", "Runs that were asked for.", "class")
        self._ended = counter("runs_ended", "Runs that have ended.", "class", "status")
        self._resumed = counter("runs_resumed", "Turns taken up again.", "class")
        self._run_s = Histogram(
            "culet_run_seconds", "From a run's asking to its end.", ("class", "status"),
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self._given_up = counter(
            "runs_given_up", "Runs beyond their budget, or silent."
        )
        self._undelivered = counter(
            "deliveries_failed", "Tries to tell an asker an end."
        )
        self._fibers = counter("fibers_ended", "Fibers that have ended.", "status")
        self._calls = counter("calls", "Scheduled and queued calls.", "kind", "what")
        self._agents = counter("agents", "Lives of agents.", "class", "what")
        self._restarts = counter("restarts", "Starts of agents that had broken.")
        self._failures = counter("failures", "What raised, and was contained.", "what")
        self._sockets = counter("sockets", "Sockets of clients.", "what")
        self._rpc = counter("rpc", "Calls of clients.", "outcome")
        self._effects = counter("effects", "Effects by their outcome.", "status")
        self._ends = [kernel.subscribe(name, fn) for name, fn in self._hears().items()]

    def close(self) -> None:
        """Hear no more; what was counted stays."""
        for end in self._ends:
            end()
        self._ends.clear()

    def text(self) -> bytes:
        """Return everything in the text format of Prometheus."""
        return generate_latest(self.registry)

    # ---- events

    def _hears(self) -> dict[str, Callable[..., None]]:
        asked, failed = map(self._rpc.labels, ("asked", "failed"))
        hears: dict[str, Callable[..., None]] = {
            "run:transition": self._on_transition,
            "run:give_up": lambda *_: self._given_up.inc(),
            "run:undelivered": lambda *_: self._undelivered.inc(),
            "fiber:end": self._on_fiber,
            "spawn": self._on_life,
            "start": self._on_life,
            "delete": self._on_life,
            "restart": lambda *_: self._restarts.inc(),
            "failure": self._on_failure,
            "connect": lambda *_: self._sockets.labels("opened").inc(),
            "disconnect": lambda *_: self._sockets.labels("closed").inc(),
            "rpc": lambda *_: asked.inc(),
            "rpc:error": lambda *_: failed.inc(),
            "effect:end": self._on_effect,
            "effect:uncertain": self._on_effect,
        }
        for kind in ("schedule", "queue"):
            for what in _CALLS:
                hears[f"{kind}:{what}"] = self._on_call
        return hears

    def _on_transition(self, _channel: str, _tree: Any, _run: Any, to: Any) -> None:
        assert isinstance(to, Transition)
        if to.to == "asked":
            self._asked.labels(to.agent_type).inc()
        elif to.to == "resumed":
            self._resumed.labels(to.agent_type).inc()
        elif to.to != "begun":
            self._ended.labels(to.agent_type, to.to).inc()
            self._run_s.labels(to.agent_type, to.to).observe(max(0, to.elapsed_s))

    def _on_fiber(self, _channel: str, _tree: Any, _fiber: Any, ended: Any) -> None:
        assert isinstance(ended, FiberEnded)
        self._fibers.labels(ended.status).inc()

    def _on_life(self, channel: str, _tree: Any, _slot: Any, where: Any) -> None:
        assert isinstance(where, Whereabouts)
        self._agents.labels(where.class_name, channel).inc()

    def _on_failure(self, _channel: str, _tree: Any, _node: Any, failure: Any) -> None:
        self._failures.labels(failure.what).inc()

    def _on_call(self, channel: str, _tree: Any, _slot: Any, _owed: Any) -> None:
        kind, _, what = channel.partition(":")
        self._calls.labels(kind, what).inc()

    def _on_effect(self, _channel: str, _tree: Any, _slot: Any, told: Any) -> None:
        self._effects.labels(told.status).inc()
