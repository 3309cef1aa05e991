"""Where spans begin and end; `open_kernel(tracer=…)` gives them to somebody who keeps them.

The kernel knows no format of traces. It says what begins, under which parent, and stores
the context of a run with its turn, so that the turn joins the same trace however often
the process dies. A span that dies with its process was never ended, and so is not told.
Each says whose it is (`agent`, a path) and, where there is one, for which run, turn or
fiber (`run_id`).

kind        name                  begins and ends
request     METHOD Class          an HTTP request is answered by an agent
rpc         Class.method          a client's call
run         Class                 a run is asked for, and waited for unless detached
turn        Class                 one attempt of a turn
fiber       the fiber's name      one try of it, recovery included
call        Class.method          one try of a scheduled or queued call
tool        the tool's name       a tool function works
model       the model's class     a model answers
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, Literal, Protocol

Kind = Literal["request", "rpc", "run", "turn", "fiber", "call", "tool", "model"]
HERE: Final = "here"
"""The parent that is the current span of the task, if there is one."""
KEY: Final = "trace"  # of the context in a stored payload
NO_SPAN: Final = nullcontext()
"""What stands where a span would, without a tracer: no attribute is even made."""


class Tracer(Protocol):
    """Keeps spans. What it raises ends in the code that is traced: it must not raise."""

    def span(
        self,
        kind: Kind,
        name: str,
        about: Mapping[str, Any],
        *,
        parent: str | None = HERE,
        current: bool = True,
    ) -> AbstractContextManager[Any]:
        """Return a span around a block; an exception that leaves the block is its error.

        `parent`: a context that `context` gave, `HERE`, or None: the span begins a trace.
        With `current` it is the parent of what begins inside the block in the same task;
        without, the block may be a generator's.
        """
        ...

    def context(self) -> str | None:
        """Return the current span as a text that a later process can go on with.

        It is stored; 200 characters at most, as a `traceparent` of W3C Trace Context.
        """
        ...

    def note(self, about: Mapping[str, Any]) -> None:
        """Add to the current span what was not known when it began."""
        ...


def context(tracer: Tracer | None) -> str | None:
    """Return the context that a tracer would go on with; None without one."""
    return None if tracer is None else tracer.context()
