"""Whose code logs: the agent, the run and the tool call, on every record.

`WhoLogs` is a filter for a handler: it adds what is known of the task that logs, also in
code that knows nothing of agents. `JsonLines` writes a record as one JSON object.

    handler = logging.StreamHandler()
    handler.addFilter(WhoLogs())
    handler.setFormatter(JsonLines())
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any, Final, final

from .core.limits import LOG_CHARS, LOG_ERROR_CHARS
from .core.shown import shortened, shown
from .node import ambient

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
