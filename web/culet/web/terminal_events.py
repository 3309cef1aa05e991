"""What an event is to somebody who reads along: a line, a status, a JSON object."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from culet.kernel.core.chunks import text_of

from . import client_events as told
from .client import RemoteAgent
from .terminal_screen import Screen, Style

_ENDS: Final[dict[str, tuple[str, Style]]] = {
    "completed": ("✓", "good"),
    "error": ("✗", "bad"),
    "aborted": ("■", "warn"),
    "interrupted": ("✗", "warn"),
}


def print_event(event: told.Event, screen: Screen, turns: set[str]) -> None:
    """Write what one event tells, if it is worth a line."""
    match event:
        case told.Connected():
            again = "" if event.connections == 1 else " again"
            screen.line(f"connected{again} to {event.agent} {event.name}", "dim")
        case told.StateChanged():
            screen.line(f"state {msgspec.json.encode(event.state).decode()}")
        case told.ChatChunk():
            if event.request_id not in turns:
                turns.add(event.request_id)
                screen.line(f"● turn {event.request_id}")
        case told.ChatEnded():
            turns.discard(event.request_id)
            mark, style = _ENDS.get(event.outcome, ("■", "warn"))
            why = f": {event.error}" if event.error else ""
            screen.line(f"{mark} turn {event.request_id} {event.outcome}{why}", style)
        case told.MessagesChanged():
            screen.line(f"{len(event.messages)} messages{_last(event.messages)}")
        case told.RunsCleared():
            screen.line(f"{len(event.run_ids)} runs forgotten", "dim")
        case told.Message():
            shown = event.data if isinstance(event.data, str) else repr(event.data)
            screen.line(f"message {shown}")
        case _:
            print_common(event, screen)


def _last(messages: list[dict[str, Any]]) -> str:
    text = text_of(messages[-1]["parts"]) if messages else ""
    return f", the last: {text}" if text else ""


def print_common(event: told.Event, screen: Screen) -> None:
    """Write what is worth a line in a chat as well: runs, and the connection."""
    match event:
        case told.RunChanged():
            _print_run(event, screen)
        case told.Disconnected():
            why = event.reason or f"code {event.code}"
            again = f"trying again in {event.retry_in_s:.1f} s"
            screen.line(f"connection lost ({why}); {again}", "warn")
        case told.Lagged():
            screen.line(f"… {event.dropped} events were too many to show", "dim")
        case _:
            pass


def _print_run(event: told.RunChanged, screen: Screen) -> None:
    """Write a line at the beginning, the milestones and the end of a run."""
    run, name = event.run, _name(event.run)
    chunk = event.chunk or {}
    if event.kind == "chunk":
        if chunk.get("type") == "data-agent-milestone":
            data = chunk.get("data")
            milestone = data.get("name", "") if isinstance(data, dict) else ""
            screen.line(f"◆ {name}: {milestone}", "dim")
        return
    if run["status"] not in _ENDS:
        screen.line(f"· {name} started", "dim")
        return
    mark, style = _ENDS[run["status"]]
    what = run.get("summary") or run.get("error") or run["status"]
    screen.line(f"{mark} {name}: {what}", style)


def _name(run: dict[str, Any]) -> str:
    display = run.get("display")
    named = display.get("name") if isinstance(display, dict) else None
    return (
        f"{named} {run['order'] + 1}" if named else f"{run['agentType']} {run['runId']}"
    )


def as_json(event: told.Event) -> bytes:
    """Return an event as JSON; what a run has said so far is not said with each chunk."""
    if isinstance(event, told.RunChanged) and event.kind == "chunk":
        run = {name: value for name, value in event.run.items() if name != "parts"}
        event = msgspec.structs.replace(event, run=run)
    return msgspec.json.encode(event)


def summary(agent: RemoteAgent) -> str:
    """Return the status line: what is under way now."""
    if not agent.is_connected:
        return "reconnecting …"
    running = [r for r in agent.runs.runs_by_id.values() if r["status"] == "running"]
    said = [_progress(run) for run in running]
    if len(running) > 1:
        said.insert(0, f"{len(running)} runs")
    elif not running and agent.turns:
        said.append("answering …")
    return " · ".join(said)


def _progress(run: dict[str, Any]) -> str:
    progress = run.get("progress") or {}
    fraction = progress.get("fraction")
    parts = [_name(run)]
    if isinstance(fraction, int | float):
        parts.append(f"{fraction:.0%}")
    parts += [str(progress[k]) for k in ("phase", "message") if progress.get(k)]
    return " ".join(parts)
