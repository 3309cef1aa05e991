"""Whose code logs: the agent, the run and the tool call, on every record.

`WhoLogs` is a filter for a handler: it adds what is known of the task that logs, also in
code that knows nothing of agents. `JsonLines` writes a record as one JSON object.

    handler = logging.StreamHandler()
    handler.addFilter(WhoLogs())
    handler.setFormatter(JsonLines())

One schema: `at`, `level`, `logger`, `message` are always there; `agent` (a path),
`run_id`, `tool_call_id` and `connection_id` where one is known. A failure has `what`
failed, the `error_id` that clients and events name it by, and `error`. The end of a run
(`log_runs`) has `status`, `reason`, `elapsed_s` and `attempt`; a server that is told to
stop says `signal`, and `sockets`, `requests` and how many were `cut`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, final

from .core.limits import LOG_CHARS, LOG_ERROR_CHARS, TERMINALS
from .core.shown import shortened, shown
from .events import Transition
from .node import ambient

if TYPE_CHECKING:
    from .kernel import Kernel

log = logging.getLogger("culet.runs")
FIELDS: Final = ("agent", "run_id", "tool_call_id", "connection_id")
_KNOWN: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


@final
class WhoLogs(logging.Filter):
    """Adds `agent`, `run_id`, `tool_call_id` and `connection_id`; None where there is none.

    `run_id` is that of the run, turn or fiber that the code works for.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Add them; every record passes."""
        here = ambient.get()
        found: dict[str, Any] = dict.fromkeys(FIELDS)
        if here is not None:
            found["agent"] = here.node.path_text()
            found["run_id"] = here.asker
            found["tool_call_id"] = here.tool_call and here.tool_call[1]
            found["connection_id"] = here.connection and here.connection.id
        for name, value in found.items():
            if not hasattr(record, name):
                setattr(record, name, value)
        return True


@final
class JsonLines(logging.Formatter):
    """One JSON object a line: `at` (ISO 8601, UTC), `level`, `logger`, `message`, who
    logs, `error` with its traceback, and what the caller gave as `extra`. Long texts are
    cut.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; what is no JSON value is told by its repr."""
        at = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "at": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": shortened(record.getMessage(), LOG_CHARS),
        }
        extra = {k: v for k, v in vars(record).items() if k not in _KNOWN}
        line |= {
            k: shortened(v, LOG_CHARS) if isinstance(v, str) else v
            for k, v in extra.items()
            if v is not None
        }
        if record.exc_info and record.exc_info[0] is not None:
            told = self.formatException(record.exc_info)
            line["error"] = shortened(told, LOG_ERROR_CHARS)
        return json.dumps(line, default=repr)  # of whatever text, surrogates too


def log_runs(kernel: Kernel) -> Callable[[], None]:
    """Log how each run ends, from now until what is returned is called."""

    def heard(_channel: str, tree: Any, run: Any, to: Transition) -> None:
        if to.to not in TERMINALS:
            return
        about = {
            "agent": tree.path_of(run.slot), "run_id": to.run_id, "status": to.to,
            "reason": to.reason, "elapsed_s": to.elapsed_s, "attempt": to.attempt,
        }  # fmt: skip
        level = logging.WARNING if to.to in {"error", "interrupted"} else logging.INFO
        log.log(level, "a run of %s: %s", to.agent_type, to.to, extra=about)

    return kernel.subscribe("run:transition", heard)


@final
class PlainLines(logging.Formatter):
    """A record for people: level, logger and message on one line, whatever is in it.

    The lines of a traceback follow, indented: no text of somebody's begins a record.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, and those of the traceback."""
        message = shown(record.getMessage(), LOG_CHARS)
        line = f"{record.levelname} {record.name} {message}"
        if not record.exc_info or record.exc_info[0] is None:
            return line
        told = shortened(self.formatException(record.exc_info), LOG_ERROR_CHARS)
        lines = [shown(part, LOG_ERROR_CHARS) for part in told.split("\n")]
        return "\n    ".join([line, *lines])
