"""`retry_run`: a run that is joined again, and only by leave begun again under a new id."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import trio

from .core.again import next_step, run_id_of
from .core.job import Retry, next_try
from .core.path import check_name
from .core.run import AgentToolRun
from .errors import UsageError

if TYPE_CHECKING:
    from .agent import Agent
    from .tools import AgentTool

Abandon = Callable[[AgentToolRun], bool | Awaitable[bool]]


async def retry_run(
    agent: Agent,
    tool: type[Agent] | AgentTool,
    input: Any = None,  # noqa: A002
    *,
    run_id: str,
    abandon: Abandon | None = None,
    retry: Retry | None = None,
    **options: Any,
) -> AgentToolRun:
    """Run a facet as a tool; what was `interrupted` is begun again if `abandon` says so.

    A run that goes on is joined under its id, as often as `retry.max_attempts` says
    where `no_progress_s` bounds each wait. An interrupted one may have done its work:
    `abandon(run)` is asked whether it is given up, and only a yes begins a run with an
    id of its own (`<run_id>.again-2`, …), at most `max_attempts` runs in all. Without
    `abandon`, and for every other end, the run is returned as it is. What was abandoned
    once is not asked about again, also after a crash. `retry`: by default the agent's
    own; `options` are those of `run_agent_tool`. Raises `UsageError` for a detached run.
    """
    if options.get("detached"):
        raise UsageError("nobody waits for a detached run: there is no end to retry on")
    policy = agent.retry if retry is None else retry
    most, number = policy.max_attempts, 1
    check_name(run_id_of(run_id, most))
    while True:
        joined, this = 0, run_id_of(run_id, number)
        while True:
            run = await agent.run_agent_tool(tool, input, run_id=this, **options)
            joined += 1
            step = next_step(run.status, joined, number, most)
            if step != "attach":
                break
        if step == "return":
            return run
        number += 1
        if agent.runs.get(run_id_of(run_id, number)) is None:  # nobody has said so yet
            if not await _given_up(abandon, run):
                return run
            chance = agent._node.tree.kernel.chance.fraction()
            await trio.sleep(next_try(policy, number - 1, 0, chance) / 1000)


async def _given_up(abandon: Abandon | None, run: AgentToolRun) -> bool:
    answer = False if abandon is None else abandon(run)
    return bool(await answer if inspect.isawaitable(answer) else answer)
