"""What the runs of an agent, and all below them, ask: folded from their reports.

A run says `waiting` with the calls that it and all below it wait for, and `answered` when
none waits any more. Its other reports say nothing about that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, final

import trio

from culet.kernel import AgentToolEvents
from culet.kernel.errors import ConnectionLost, CuletError, Refused

from .client_calls import decoded
from .client_line import Outgoing

Json = dict[str, Any]
_UNKNOWN: Final = "the connection was lost: nobody knows whether the answer was taken"
_REPORT: Final = "data-agent-progress"


class Pending:
    """An answer that was sent, and what the server says to it."""

    __slots__ = ("accepted", "error", "item", "over")

    def __init__(self, item: Outgoing) -> None:
        self.item = item
        self.over = trio.Event()
        self.accepted = False
        self.error: CuletError | None = None

    async def wait(self) -> bool:
        """Return whether it was the first; raises what the server, or the line, says."""
        await self.over.wait()
        if self.error is not None:
            raise self.error
        return self.accepted


@final
class RunQuestions:
    """The questions of runs, and the answers to them that are under way."""

    def __init__(self) -> None:
        self._asked: dict[str, list[Json]] = {}  # of runs of this agent
        self._pending: dict[tuple[str, str], list[Pending]] = {}

    def taken(self, frame: Json, runs: AgentToolEvents) -> None:
        """Take one frame that was news about a run."""
        event = frame["event"]
        body, run_id = event.get("body"), event.get("runId")
        chunk = decoded(body) if isinstance(body, str) else None
        if chunk is not None and chunk.get("type") == _REPORT:
            self._reported(str(run_id), chunk.get("data"))
        going = runs.runs_by_id
        for known in list(self._asked):
            if going.get(known, {}).get("status") != "running":
                del self._asked[known]

    def _reported(self, run_id: str, data: object) -> None:
        if not isinstance(data, Mapping):
            return
        if data.get("phase") == "answered":
            self._asked.pop(run_id, None)
        more = data.get("data")
        if data.get("phase") == "waiting" and isinstance(more, Mapping):
            calls = more.get("calls")
            found = calls if isinstance(calls, list) else []
            self._asked[run_id] = [c for c in found if isinstance(c, dict)]

    def calls(self) -> list[Json]:
        """Return what waits, in the order of the runs; each with the `runId` that asks."""
        found: dict[tuple[Any, Any], Json] = {}
        for calls in self._asked.values():
            for call in calls:
                found.setdefault((call.get("runId"), call.get("toolCallId")), call)
        return list(found.values())

    # ---- answers

    def expect(self, run_id: str, call_id: str, item: Outgoing) -> Pending:
        """An answer is sent: the server says what became of each, in their order."""
        pending = Pending(item)
        self._pending.setdefault((run_id, call_id), []).append(pending)
        return pending

    def forget(self, run_id: str, call_id: str, pending: Pending) -> None:
        """Nobody waits for that one any more."""
        waiting = self._pending.get((run_id, call_id), [])
        if pending in waiting:
            waiting.remove(pending)
        if not waiting:
            self._pending.pop((run_id, call_id), None)

    def answered(self, frame: Json) -> None:
        """The server says what became of an answer."""
        key = str(frame.get("runId")), str(frame.get("toolCallId"))
        waiting = self._pending.get(key)
        if not waiting:
            return
        pending = waiting.pop(0)
        if not waiting:
            del self._pending[key]
        pending.accepted = frame.get("accepted") is True
        error = frame.get("error")
        pending.error = Refused(error) if isinstance(error, str) else None
        pending.over.set()

    def lost(self, error: CuletError | None = None) -> None:
        """The socket is gone: nobody will say what became of answers that were sent.

        The others wait for the next socket; with an `error` there will be none.
        """
        for key, waiting in list(self._pending.items()):
            for pending in list(waiting):
                if pending.item.sent or error is not None:
                    pending.error = error or ConnectionLost(_UNKNOWN)
                    pending.over.set()
                    self.forget(*key, pending)
