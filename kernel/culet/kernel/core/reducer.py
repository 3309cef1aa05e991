"""What a client knows about the runs of an agent: a fold over `agent-tool-event`.

A client gets frames live, replayed after a reconnect, twice, and sometimes with a
piece missing in between. It may fold them all in the order of arrival, because of:

- *idempotent*: a frame that was applied is known by (tool call, run, identity) and
  changes nothing again. The identity of a chunk is its sequence (a milestone's and a
  progress report's is its own number or id); that of a lifecycle event its content.
- *absorbing*: the first terminal event of a run stays. Another one is a fault of the
  server; it is counted in `protocol_errors` and otherwise ignored.
- *patient*: a frame that cannot be applied yet (its run never started here) is not
  taken for seen, so a later replay brings both.
- *forgetful*: a run that was cleared is dropped with its keys, and may start anew.
- *total*: whatever a frame looks like, nothing raises; what is not understood is
  passed over. Ids such as `__proto__` are ordinary.
- *honest identity*: the SAME state object comes back when nothing changed.

States are values: an old one stays what it was. The set of seen keys is a log that
states share, each knowing how much of it is its own (`_Seen`); so a long stream costs
neither a copy a frame nor a set a state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, Final

import msgspec

from culet.kernel.core.chunks import Part, apply_chunk_to_parts
from culet.kernel.core.limits import TERMINALS

Run = dict[str, Any]  # as on the wire: runId, agentType, order, status, parts, ...
_Key = tuple[str, str, str | int]
_END: Final = {
    "finished": "completed",
    "error": "error",
    "aborted": "aborted",
    "interrupted": "interrupted",
}
_json: Final = msgspec.json.Encoder(order="deterministic")


class _Seen:
    """An immutable set of keys that grows in O(1): a prefix of a shared log.

    The state at the tip adds to the log; a state that is not at the tip any more
    (somebody branched off an old one) copies its prefix first.
    """

    __slots__ = ("_log", "_size")

    def __init__(self, log: dict[_Key, int], size: int) -> None:
        self._log = log
        self._size = size

    def __contains__(self, key: _Key) -> bool:
        return self._log.get(key, self._size) < self._size

    def __len__(self) -> int:
        return self._size

    def plus(self, key: _Key) -> _Seen:
        log = self._log
        if len(log) != self._size:
            log = {known: at for known, at in log.items() if at < self._size}
        log[key] = self._size
        return _Seen(log, self._size + 1)

    def without(self, run_ids: set[str]) -> _Seen:
        """Return a set of its own, without the keys of those runs."""
        mine = (key for key, at in self._log.items() if at < self._size)
        kept = {
            key: at for at, key in enumerate(k for k in mine if k[1] not in run_ids)
        }
        return _Seen(kept, len(kept))


class AgentToolEvents:
    """The runs of one agent as a client has them. Immutable; see `apply_agent_tool_event`.

    A run is a dict with keys as on the wire: `runId`, `agentType`, `order`, `status`,
    `parts`, `subAgent`, and where known `parentToolCallId`, `inputPreview`, `display`,
    `summary`, `error`, `reason`, `childStillRunning`, `progress`, `milestones`.
    """

    def __init__(
        self, runs_by_id: dict[str, Run], seen: _Seen, protocol_errors: int
    ) -> None:
        self._runs = runs_by_id
        self._seen = seen
        self.protocol_errors = protocol_errors
        """Terminal events that came after the first one of their run."""

    @classmethod
    def empty(cls) -> AgentToolEvents:
        """Return the state before any frame."""
        return cls({}, _Seen({}, 0), 0)

    @property
    def runs_by_id(self) -> Mapping[str, Run]:
        """All runs, by run id."""
        return self._runs

    @cached_property
    def runs_by_tool_call_id(self) -> Mapping[str, list[Run]]:
        """The runs of each tool call: by `order`, then by code points of the run id."""
        grouped: dict[str, list[Run]] = {}
        for run in self._runs.values():
            if run.get("parentToolCallId"):
                grouped.setdefault(run["parentToolCallId"], []).append(run)
        return {call: _sorted(runs) for call, runs in grouped.items()}

    @cached_property
    def unbound_runs(self) -> list[Run]:
        """The runs without a tool call, in the same order."""
        runs = self._runs.values()
        return _sorted(run for run in runs if not run.get("parentToolCallId"))

    def to_json(self) -> dict[str, Any]:
        """Return the state as the JavaScript hook has it: `runsById` and two indexes."""
        return {
            "runsById": dict(self._runs),
            "runsByToolCallId": dict(self.runs_by_tool_call_id),
            "unboundRuns": self.unbound_runs,
        }


def apply_agent_tool_event(state: AgentToolEvents, frame: object) -> AgentToolEvents:
    """Return the state after one frame (its decoded JSON). Never raises.

    The SAME object comes back when the frame is of another type, malformed, seen
    before, or about a run that has not started here.
    """
    if not isinstance(frame, Mapping) or frame.get("type") != "agent-tool-event":
        return state
    event = frame.get("event")
    if not isinstance(event, Mapping):
        return state
    kind = event.get("kind")
    if kind == "cleared":
        return _cleared(state, event.get("runIds"))
    if not isinstance(event.get("runId"), str) or not isinstance(kind, str):
        return state
    run_id: str = event["runId"]
    run = state.runs_by_id.get(run_id)
    if kind != "started" and (run is None or (kind != "chunk" and kind not in _END)):
        return state
    call = frame.get("parentToolCallId")
    call = call if isinstance(call, str) else None
    chunk = _body(event) if kind == "chunk" else None
    key = (call or "", run_id, _identity(kind, frame, event, chunk))
    if key in state._seen:
        return state
    late = kind in _END and run is not None and run["status"] in TERMINALS
    new = _apply(run, kind, call, event, chunk)
    if new is None or (kind == "started" and new is run):
        return state  # a start that comes after the end: nothing will ever follow
    runs = state._runs if new is run else {**state._runs, run_id: new}
    return AgentToolEvents(runs, state._seen.plus(key), state.protocol_errors + late)


def _cleared(state: AgentToolEvents, run_ids: object) -> AgentToolEvents:
    """Drop runs with all that was seen of them: their ids may begin anew."""
    named = run_ids if isinstance(run_ids, list) else []
    gone = {one for one in named if isinstance(one, str) and one in state._runs}
    if not gone:
        return state
    runs = {run_id: run for run_id, run in state._runs.items() if run_id not in gone}
    return AgentToolEvents(runs, state._seen.without(gone), state.protocol_errors)


def _apply(
    run: Run | None,
    kind: str,
    call: str | None,
    event: Mapping[str, Any],
    chunk: Mapping[str, Any] | None,
) -> Run | None:
    """Return the run after an event; None where the event cannot be used."""
    if kind == "started":
        return _started(run, call, event)
    assert run is not None  # only a start makes a run
    if kind == "chunk":
        return run if chunk is None else _chunk(run, chunk)
    return run if run["status"] in TERMINALS else _ended(run, kind, event)


def _started(run: Run | None, call: str | None, event: Mapping[str, Any]) -> Run | None:
    agent_type = event.get("agentType")
    if not isinstance(agent_type, str):
        return None
    if run is not None and run["status"] in TERMINALS:
        return run
    order = event.get("order")
    new: Run = {"runId": event["runId"], "agentType": agent_type}
    if call is not None:
        new["parentToolCallId"] = call
    new["order"] = order if isinstance(order, int | float) else 0
    new.update({k: event[k] for k in ("inputPreview", "display") if k in event})
    new["status"] = "running"
    new["parts"] = run["parts"] if run else []
    new["subAgent"] = {"agent": agent_type, "name": event["runId"]}
    if run:
        new.update({k: run[k] for k in ("progress", "milestones") if k in run})
    return new


def _ended(run: Run, kind: str, event: Mapping[str, Any]) -> Run:
    new: Run = {**run, "status": _END[kind]}
    names = {"finished": ("summary",), "error": ("error",), "aborted": ()}
    for name in names.get(kind, ("error", "reason", "childStillRunning")):
        if name in event:
            new[name] = event[name]
    if kind == "aborted" and "reason" in event:
        new["error"] = event["reason"]
    return new


def _chunk(run: Run, chunk: Mapping[str, Any]) -> Run:
    parts: list[Part] = run["parts"]
    new: Run = {**run, "parts": apply_chunk_to_parts(parts, chunk)}
    data = chunk.get("data")
    if chunk.get("type") == "data-agent-progress":
        new["progress"] = _progress(data if isinstance(data, Mapping) else {})
    milestone = _milestone(chunk)
    if milestone is None or not isinstance(data, Mapping):
        return new
    known = run.get("milestones", [])
    if any(old["sequence"] == milestone["sequence"] for old in known):
        return new
    new["milestones"] = sorted([*known, milestone], key=lambda m: m["sequence"])
    before = run.get("progress")
    if before is None or milestone["at"] >= before.get("at", 0):
        reached = {k: v for k, v in _progress(data).items() if k != "data"}
        at = milestone["at"]
        new["progress"] = {**reached, "milestone": milestone["name"], "at": at}
    return new


def _progress(data: Mapping[str, Any]) -> dict[str, Any]:
    """Read a progress report. `at` is the sender's: a pure fold has no clock."""
    out: dict[str, Any] = {}
    for name, kind in (("fraction", int | float), ("message", str), ("phase", str)):
        if isinstance(data.get(name), kind) and not isinstance(data[name], bool):
            out[name] = data[name]
    if "data" in data:
        out["data"] = data["data"]
    if isinstance(data.get("at"), int | float):
        out["at"] = data["at"]
    return out


def _milestone(chunk: Mapping[str, Any]) -> dict[str, Any] | None:
    if chunk.get("type") != "data-agent-milestone":
        return None
    data = chunk.get("data")
    if not isinstance(data, Mapping) or not isinstance(data.get("name"), str):
        return None
    out: dict[str, Any] = {"name": data["name"]}
    for name in ("sequence", "at"):
        value = data.get(name)
        out[name] = value if isinstance(value, int | float) else 0
    if "data" in data:
        out["data"] = data["data"]
    return out


def _body(event: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Decode a chunk's body; None when it is no JSON object."""
    body = event.get("body")
    if not isinstance(body, str):
        return None
    try:
        chunk = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return chunk if isinstance(chunk, dict) else None


def _identity(
    kind: str,
    frame: Mapping[str, Any],
    event: Mapping[str, Any],
    chunk: Mapping[str, Any] | None,
) -> str | int:
    """Name what makes a frame of a run the same frame again."""
    if kind != "chunk":
        return "event:" + _text(event)
    if "unstoredId" in event:
        return "unstored:" + _text(event["unstoredId"])
    sequence = frame.get("sequence")
    if chunk is not None:
        milestone = _milestone(chunk)
        if milestone is not None:
            return f"milestone:{milestone['sequence']}"
        if chunk.get("type") == "data-agent-progress":
            own = chunk.get("id")
            at = own if isinstance(own, str) else f"{sequence}:{event.get('body')}"
            return f"progress:{at}"
    return sequence if isinstance(sequence, int) else "sequence:" + _text(sequence)


def _text(value: object) -> str:
    """Return the JSON of a value, keys sorted; its repr where JSON has no word for it."""
    try:
        return _json.encode(value).decode()
    except (TypeError, ValueError, UnicodeError, RecursionError):
        return repr(value)


def _sorted(runs: Iterable[Run]) -> list[Run]:
    return sorted(runs, key=lambda run: (run["order"], run["runId"]))
