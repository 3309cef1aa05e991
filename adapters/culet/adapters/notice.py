"""What a chat is told of runs that it detached: texts, and messages with ids of their own.

The id of a message is made of the run and of what happened to it, so a notice that is
given a second time after a crash is the message that is there already.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from culet.adapters.messages import Message
from culet.kernel import AgentToolRun, Progress
from culet.kernel.core.run import as_told, model_value

SOURCE: Final = "detached-agent-tool"


def finish_key(run: AgentToolRun) -> str:
    """Return the id of the message that tells how a run ended."""
    return f"detached-finish:{run.run_id}:{run.status}"


def milestone_key(run: AgentToolRun, progress: Progress) -> str:
    """Return the id of the message that tells of a milestone."""
    return f"detached-ms:{run.run_id}:{progress.milestone}"


def finish_text(run: AgentToolRun) -> str:
    """Return what the model is told of a run that has ended."""
    value = model_value(as_told(run))
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    how = run.status if run.reason is None else f"{run.status} ({run.reason})"
    return f"Background run {run.run_id} of {run.agent_type} ended: {how}\n\n{text}"


def milestone_text(run: AgentToolRun, progress: Progress) -> str:
    """Return one line about a milestone."""
    said = f": {progress.message}" if progress.message else ""
    return f"{run.agent_type} {run.run_id} has reached {progress.milestone}{said}"


def message(
    key: str, role: str, text: str, run: AgentToolRun, source: str, **more: Any
) -> Message:
    """Return a message that says which run it is about."""
    about = {
        "source": source,
        "runId": run.run_id,
        "agentType": run.agent_type,
        "status": run.status,
        **more,
    }
    parts = [{"type": "text", "text": text}]
    return {"id": key, "role": role, "metadata": about, "parts": parts}
